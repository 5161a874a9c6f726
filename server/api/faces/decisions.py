"""POST /v1/decisions: typed questions about an input, answered from the first token's logits.

The body is OpenAI's Decisions API, as openai-python 3.52 types it. Pictures are refused by name,
and so is anything unknown. `prompt_cache_key`, `prompt_cache_options`, `prompt_cache_breakpoint`
and `safety_identifier` change nothing here: the prefix cache works by itself. Ids, statuses and
phases of the input's items are not shown to the model; call ids only have to match.

Every question becomes one prompt and one Request that asks the engine for the logprobs of its
labels as the next token, and for no text. The answer is the softmax over the labels. The input
comes first in every prompt, so that the prefix cache holds it: the first question is computed
alone, the others follow in batches and read it.

    The package came late and the box was crushed.

    How does the customer feel?
    Options:
    - happy
    - angry: wants their money back
    Answer with one option.
    Answer:

The last line is the start of the assistant's answer where the model has a chat template; the rest
is then what the user says. The labels are what may come next. They are the options themselves where
the first tokens of all of them differ; else the options are lettered ("A. happy") and the letters
are the labels.

`confidence` is 1 when one option has all the probability and 0 when all have the same:
(n p - 1) / (n - 1) for the highest p of n. A score is the expected level, counted from 0. The
answer is never a refusal.
"""

from __future__ import annotations

import itertools
import json
import math
import secrets
import string
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct
from pydantic import BeforeValidator, FailFast, Field, WithJsonSchema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.api.answer import token_usage
from server.api.bodies import (
    BodyPart,
    CacheOptions,
    ModelName,
    content_schema,
    extent,
    one_by_type,
    one_of,
    refuse_members,
)
from server.api.engines.submission import RequestAccount
from server.api.faces.items import TEXTS, Items, text_of
from server.api.order import Target, tighter
from server.api.route_context import Face, RouteContext, caller_of
from server.api.served_model import ServedModel
from server.api.shapes import Chance, Count, Shape, TokenUsage
from server.errors import (
    ContextLengthExceededError,
    EngineError,
    InvalidRequestError,
    LimitExceededError,
    UnsupportedFieldError,
)
from server.types import Request, SamplingParams

MAX_QUESTIONS = 400
MAX_CHOICES = 255
MAX_LEVELS = 10
MAX_LABEL_CHARS = 4096
MAX_JSON_DEPTH = 32
MAX_JSON_VALUES = 10_000
MAX_JSON_BYTES = 256 * 1024

MAX_WAVE_QUESTIONS = 64
MAX_WAVE_LABELS = 512
"""Questions and labels that are in the engine at once: a label costs a row of logits there."""

# --- what is asked, in the words of no route ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a choice, or a level of a score."""

    value: str | bool
    description: str | None = None

    @property
    def shown(self) -> str:
        """Its text in a prompt."""
        text = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return text if text == text.strip() and "\n" not in text else json.dumps(text)


@dataclass(frozen=True, slots=True)
class Question:
    """One question. A predicate has no options, a score's are from the lowest to the highest. at:
    where it lies in the body."""

    kind: Literal["predicate", "choice", "score"]
    instructions: str
    options: tuple[Option, ...]
    at: str
    name: str | None = None

    def text(self, labels: Labels) -> str:
        """The question with its options, as it stands below the input; the tail comes after it."""
        lines = [self.instructions]
        answer = "the letter of one {}" if labels.lettered else "one {}"
        if self.kind == "predicate":
            lines = [f"Statement: {self.instructions}", "Is this statement true?"]
            lines += labels.shown if labels.lettered else ()
            answer = answer.format("option") if labels.lettered else "Yes or No"
        else:
            is_choice = self.kind == "choice"
            answer = answer.format("option" if is_choice else "level")
            lines.append("Options:" if is_choice else "Levels, from the lowest to the highest:")
            for shown, option in zip(labels.shown, self.options, strict=True):
                bullet = "" if labels.lettered else "- "
                told = f": {option.description}" if option.description else ""
                lines.append(f"{bullet}{shown}{told}")
        return "\n".join([*lines, f"Answer with {answer}."])


def json_text(data: Any, at: str) -> str:
    """JSON as a model reads it. Raises LimitExceededError for a value too deep or too large."""
    num_levels, num_values = extent(data)
    if num_levels > MAX_JSON_DEPTH or num_values > MAX_JSON_VALUES:
        raise LimitExceededError(
            f"at most {MAX_JSON_DEPTH} levels and {MAX_JSON_VALUES} values.", at=at
        )
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    if len(text.encode()) > MAX_JSON_BYTES:
        raise LimitExceededError(f"at most {MAX_JSON_BYTES} bytes as compact JSON.", at=at)
    return text


# --- labels ---------------------------------------------------------------------------------------

_TAILS = (("\nAnswer:", " "), ("\nAnswer: ", ""))
"""How a prompt may end, and what then stands before a label; the first pair whose labels all
differ is used."""

_LABEL_CHARS = 64
"""The first token of a label lies in its first so many characters."""


@dataclass(frozen=True, slots=True)
class Labels:
    """How the options of a question are told apart.

    tail: the end of the prompt. shown: the options as the prompt lists them. token_ids: the id that
    answers each. lettered: the answers are letters.
    """

    tail: str
    lettered: bool
    shown: tuple[str, ...]
    token_ids: tuple[int, ...]


class Labeller:
    """Labels for one tokenizer. Finds its letters once, on first need. encode: ids of a text,
    without special ones."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        # One text after the other: a batch's threads would take the cores that the engine needs.
        self._encode = encode
        self._tails = [(tail, gap, encode(tail)) for tail, gap in _TAILS]
        self._letters: list[tuple[str, list[tuple[str, int]]]] | None = None

    def labels(self, options: Sequence[str], at: str) -> Labels:
        """Labels of these options. Raises UnsupportedFieldError for more than the tokenizer has."""
        for tail, gap, before in self._tails:
            found = [self._encode(tail + gap + option[:_LABEL_CHARS]) for option in options]
            ids = [
                after[len(before)]
                for after in found
                if len(after) > len(before) and after[: len(before)] == before
            ]
            if len(set(ids)) == len(options):
                return Labels(tail, False, tuple(options), tuple(ids))
        if self._letters is None:
            self._letters = [
                (tail, list(self._find_letters(tail, gap, before)))
                for tail, gap, before in self._tails
            ]
        for tail, letters in self._letters:
            if len(letters) >= len(options):
                named = list(zip(letters, options, strict=False))
                return Labels(
                    tail,
                    True,
                    tuple(f"{letter}. {option}" for (letter, _), option in named),
                    tuple(token_id for (_, token_id), _ in named),
                )
        most = max(len(letters) for _, letters in self._letters)
        raise UnsupportedFieldError(
            f"this model's tokenizer tells {most} options apart, not {len(options)}.", at=at
        )

    def _find_letters(self, tail: str, gap: str, before: list[int]) -> Iterator[tuple[str, int]]:
        """A to Z, AA, AB, ...: those of one token each, all different."""
        capitals = string.ascii_uppercase
        names = [*capitals, *map("".join, itertools.product(capitals, repeat=2))]
        seen: set[int] = set()
        for name in names:
            after = self._encode(tail + gap + name)
            if len(after) == len(before) + 1 and after[:-1] == before and after[-1] not in seen:
                seen.add(after[-1])
                yield name, after[-1]
                if len(seen) == MAX_CHOICES:
                    return


# --- the order and its run ------------------------------------------------------------------------


def _prompt_ids(model: ServedModel, text: str, tail: str, text_at: str) -> list[int]:
    """A question as the model was trained to be asked: by its chat template, if it has one, with
    the tail as the start of the answer; else as plain text."""
    if model.chat is None:
        return model.encoded(text + tail, True)
    try:
        chat = model.chat.render([{"role": "user", "content": text}], opening=tail.lstrip("\n"))
        return model.prompt_ids(model.chat.encode(chat))
    except InvalidRequestError as error:
        raise error.moved(text_at) from None


def _waves(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """The first Request alone, then as many at once as the limits of a wave allow."""
    wave: list[Request] = []
    num_labels = 0
    for i, request in enumerate(requests):
        num = len(request.label_ids)
        if wave and (
            i == 1 or len(wave) == MAX_WAVE_QUESTIONS or num_labels + num > MAX_WAVE_LABELS
        ):
            yield wave
            wave, num_labels = [], 0
        wave.append(request)
        num_labels += num
    if wave:
        yield wave


def probabilities_of(logprobs: Sequence[float]) -> list[float]:
    """The softmax over the labels alone, in double precision. Raises EngineError for NaN."""
    highest = max(logprobs, default=math.nan)
    if not math.isfinite(highest):
        raise EngineError("The model produced no probabilities for this question.")
    weights = [math.exp(value - highest) for value in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def best_of(chances: Sequence[float]) -> tuple[int, float]:
    """The likeliest option and its confidence."""
    num = len(chances)
    best = max(range(num), key=lambda i: (chances[i], -i))
    return best, min(1.0, max(0.0, (num * chances[best] - 1) / (num - 1)))


def score_of(chances: Sequence[float]) -> float:
    """The expected level, counted from 0."""
    return math.fsum(i * chance for i, chance in enumerate(chances))


# --- the body -------------------------------------------------------------------------------------

Name = Annotated[str, Field(max_length=512)]
Description = Annotated[str, Field(max_length=65_536)]

_CONTENT = content_schema(*TEXTS, "input_json")
Content = Annotated[Any, WithJsonSchema(_CONTENT)]


def _text_of(content: Any, at: str) -> str:
    """A content field: a text, or parts that are text or JSON. Raises InvalidRequestError."""
    if content == []:
        raise InvalidRequestError("must be a text or a list of parts, not empty.", at=at)
    if isinstance(content, list):
        content = [_as_text(part, f"{at}[{i}]") for i, part in enumerate(content)]
    return text_of(content, at)


def _as_text(part: Any, at: str) -> Any:
    """A part with JSON as one with its text."""
    if not isinstance(part, dict) or part.get("type") != "input_json":
        return part
    refuse_members(part, {"type", "data"}, at)
    data = part.get("data")
    if not all(isinstance(v, dict) for v in (data if isinstance(data, list) else [data])):
        raise InvalidRequestError("must be an object or a list of objects.", at=f"{at}.data")
    return {"type": "text", "text": json_text(data, f"{at}.data")}


_ITEMS = Items(
    {"function_call": "arguments", "custom_tool_call": "input"}, reads=_text_of, has_spaces=True
)


class PredicateQuestion(BodyPart):
    """How likely is it that a statement about the input is true?"""

    type: Literal["predicate"]
    instructions: Content
    name: Name | None = None


_VALUE = one_of(
    {"=text": Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)], "=flag": bool},
    f"must be a boolean or a text of 1 to {MAX_LABEL_CHARS} characters",
    lambda value: {str: "=text", bool: "=flag"}.get(type(value)),
)


class ChoiceOption(BodyPart):
    """One option of a choice."""

    value: Annotated[Any, _VALUE]
    description: Description | None = None


class ChoiceQuestion(BodyPart):
    """Which of the options fits the input?"""

    type: Literal["choice"]
    instructions: Content
    choices: list[ChoiceOption] = Field(min_length=2, max_length=MAX_CHOICES)
    name: Name | None = None


class ScoreLevel(BodyPart):
    """One level of a score."""

    label: str = Field(min_length=1, max_length=MAX_LABEL_CHARS)
    description: Description | None = None


class ScoreQuestion(BodyPart):
    """Which of the ordered levels, lowest first, fits the input?"""

    type: Literal["score"]
    instructions: Content
    levels: list[ScoreLevel] = Field(min_length=2, max_length=MAX_LEVELS)
    name: Name | None = None


_QUESTION = one_by_type(
    {"predicate": PredicateQuestion, "choice": ChoiceQuestion, "score": ScoreQuestion},
)


def _few(questions: Any) -> Any:
    if isinstance(questions, list) and len(questions) > MAX_QUESTIONS:
        raise LimitExceededError(f"at most {MAX_QUESTIONS}; got {len(questions)}.", at="questions")
    return questions


class DecisionBody(BodyPart):
    """POST /v1/decisions."""

    model: ModelName | None = Field(None, description="default the server's first")
    input: Annotated[Any, WithJsonSchema(_ITEMS.schema(_CONTENT))]
    questions: Annotated[
        list[Annotated[Any, _QUESTION]],
        FailFast(),
        Field(min_length=1, max_length=MAX_QUESTIONS),
        BeforeValidator(_few),
    ]
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    safety_identifier: str | None = None


def _question(given: Any, at: str) -> Question:
    options: list[Option] = []
    if isinstance(given, ChoiceQuestion):
        options = [Option(option.value, option.description) for option in given.choices]
        if len({(type(option.value), option.value) for option in options}) < len(options):
            raise InvalidRequestError("every value must be there once.", at=f"{at}.choices")
    elif isinstance(given, ScoreQuestion):
        options = [Option(level.label, level.description) for level in given.levels]
    told = _text_of(given.instructions, f"{at}.instructions")
    return Question(given.type, told, tuple(options), at, given.name)


def input_text(given: Any) -> str:
    """The input as one text. A single user message is its content; several messages each begin with
    their role.

    Raises InvalidRequestError and its kin.
    """
    if isinstance(given, str) and given:
        return given
    turns = _ITEMS.turns(given)
    told: list[str] = []
    calls: set[str] = set()
    for turn in turns:
        if turn.calls:
            calls |= {call.call_id for call in turn.calls}
            told += [f"Call: {call.name}({call.arguments})" for call in turn.calls]
        elif turn.call_id is None:
            is_alone = turn.role == "user" and not turns[1:]
            told.append(turn.content if is_alone else f"{turn.role.title()}: {turn.content}")
        elif turn.call_id in calls:
            told.append(f"Result: {turn.content}")
        else:
            raise InvalidRequestError("no call before it has this id.", at=f"{turn.at}.call_id")
    text = "\n\n".join(told)
    if not text.strip():
        raise InvalidRequestError("there is no text in it.", at="input")
    return text


# --- the answer -----------------------------------------------------------------------------------


class PredicateAnswer(Shape, tag="predicate", kw_only=True):
    name: str | None
    probability: Chance


class ChoiceChance(Shape, kw_only=True):
    value: str | bool
    probability: Chance


class ChoiceAnswer(Shape, tag="choice", kw_only=True):
    name: str | None
    choice: str | bool
    confidence: Chance
    probabilities: list[ChoiceChance]


class LevelChance(Shape, kw_only=True):
    label: str
    value: Count
    probability: Chance


class ScoreAnswer(Shape, tag="score", kw_only=True):
    name: str | None
    score: Annotated[float, Meta(ge=0)]
    confidence: Chance
    probabilities: list[LevelChance]


class Decision(Shape, kw_only=True):
    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: TokenUsage


Answered = Sequence[tuple[Question, list[float]]]
"""Questions, each with the chances of its labels."""


class QuestionFace(Face):
    """A route that asks questions about an input."""

    id_prefix: ClassVar[str]

    def __init__(self, context: RouteContext) -> None:
        super().__init__(context)
        self._labellers: dict[str, Labeller] = {}  # by model

    @abstractmethod
    def asked(self, body: Any) -> tuple[list[Question], str, str]:
        """(questions, the input as text, what the body calls it). Raises the client's errors."""

    @abstractmethod
    def told(self, label: str, answered: Answered, accounts: Sequence[RequestAccount]) -> Struct:
        """The answer. label: what the body called the model."""

    async def requests(
        self, text: str, text_at: str, questions: Sequence[Question], target: Target, prefix: str
    ) -> list[Request]:
        """The Requests of questions about a text; each has its label ids.

        text_at: what the route calls the text. prefix: of the ids. Raises 4xx errors.
        """
        arrival_s = time.monotonic()
        task, model, limits = target.task, target.model, self.context.limits
        room, both = target.room, "input and question have"
        if task.limits.max_prompt_tokens is not None:
            room = min(room, task.limits.max_prompt_tokens)

        def check(what: str, num_tokens: int, at: str) -> None:
            if num_tokens > room:
                raise ContextLengthExceededError(
                    f"the context holds {room} tokens, but {what} {num_tokens} or more. "
                    "Nothing is truncated.",
                    at=at,
                    param=text_at,
                )

        def check_input(num_shared: int) -> None:
            check("the input has", num_shared, text_at)
            check_total(num_shared * len(questions))

        def check_total(num_tokens: int) -> None:
            if num_tokens > limits.max_request_tokens:
                raise LimitExceededError(
                    f"The questions take {num_tokens} tokens with their input, or more; the limit "
                    f"is {limits.max_request_tokens}.",
                    param="questions",
                )

        def encode() -> list[tuple[list[int], tuple[int, ...]]]:
            check_input(len(model.segments.first(text)))
            labeller = self._labellers.get(model.name)
            if labeller is None:
                labeller = self._labellers[model.name] = Labeller(model.segments.first)
            prompts = []
            for question in questions:
                options = [option.shown for option in question.options] or ["Yes", "No"]
                labels = labeller.labels(options, question.at)
                whole = f"{text}\n\n{question.text(labels)}"
                check(both, len(whole) // model.longest_token, question.at)
                prompts.append((_prompt_ids(model, whole, labels.tail, text_at), labels.token_ids))
            return prompts

        # The texts of all questions together must be bounded before they are made.
        check_input(len(text.encode()) // model.longest_token)
        num_chars = len(text) * len(questions) + sum(
            len(question.instructions)
            + sum(len(option.shown) + len(option.description or "") for option in question.options)
            for question in questions
        )
        prompts = await self.context.orders.work(encode, num_chars)
        for question, (ids, _) in zip(questions, prompts, strict=True):
            check(both, len(ids), question.at)
        check_total(sum(len(ids) for ids, _ in prompts))
        timeout_s = tighter(limits.queue_timeout_s, task.limits.queue_timeout_s)
        return [
            Request(
                request_id=f"{prefix}-{i}",
                task=task.name,
                model=model.name,
                adapter=model.adapter_id,
                prompt_ids=tuple(ids),
                sampling=SamplingParams(temperature=0.0, max_tokens=0),
                tenant=target.tenant,
                arrival_s=arrival_s,
                queue_timeout_s=timeout_s or 0.0,
                label_ids=label_ids,
            )
            for i, (ids, label_ids) in enumerate(prompts)
        ]

    async def respond(self, request: HttpRequest) -> Response:
        context = self.context
        body: Any = await context.body(request, self.body)
        target = context.target(request, body.model)
        questions, text, at = await context.orders.work(lambda: self.asked(body), body.num_bytes)
        prefix = f"{self.id_prefix}{secrets.token_hex(12)}"
        requests = await self.requests(text, at, questions, target, prefix)
        caller, is_gone = caller_of(request), False

        def abort() -> None:
            nonlocal is_gone
            is_gone = True
            for submission in caller.submissions:
                submission.abort()

        async def answer() -> Struct:
            chances: list[list[float]] = []
            for wave in _waves(requests):
                if caller.submissions:  # it has not waited while those before it were computed
                    wave = [replace(one, arrival_s=time.monotonic()) for one in wave]
                submission = await context.submit(request, target, wave, requests)
                if is_gone:
                    submission.abort()
                deltas = await submission.rest()
                labels = [deltas[i, 0][-1].label_logprobs for i in range(len(wave))]
                chances += map(probabilities_of, labels)
            answered = list(zip(questions, chances, strict=True))
            return self.told(target.label, answered, caller.accounts)

        return await context.whole(request, answer, abort)


class Decisions(QuestionFace):
    """The route."""

    path = "/v1/decisions"
    summary = "Typed answers about an input"
    body = DecisionBody
    answer = Decision
    id_prefix = "dec-"

    def asked(self, body: Any) -> tuple[list[Question], str, str]:
        questions = [_question(given, f"questions[{i}]") for i, given in enumerate(body.questions)]
        return questions, input_text(body.input), "input"

    def told(self, label: str, answered: Answered, accounts: Sequence[RequestAccount]) -> Struct:
        answers = [_answer(question, chances) for question, chances in answered]
        return Decision(model=label, answers=answers, usage=token_usage(accounts))


def _answer(
    question: Question, chances: list[float]
) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    name, options = question.name, question.options
    if question.kind == "predicate":
        return PredicateAnswer(name=name, probability=chances[0])
    best, confidence = best_of(chances)
    if question.kind == "choice":
        return ChoiceAnswer(
            name=name,
            choice=options[best].value,
            confidence=confidence,
            probabilities=[
                ChoiceChance(value=option.value, probability=chance)
                for option, chance in zip(options, chances, strict=True)
            ],
        )
    return ScoreAnswer(
        name=name,
        score=score_of(chances),
        confidence=confidence,
        probabilities=[
            LevelChance(label=str(level.value), value=i, probability=chance)
            for i, (level, chance) in enumerate(zip(options, chances, strict=True))
        ],
    )
