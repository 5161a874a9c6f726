"""POST /v1/decisions: typed questions about an input, answered from the first token's logits.

Every question becomes one prompt (the input, then the question, then "Answer:") and one Request
that asks the engine for the logprobs of its labels as the next token, and for no text. The answer
is the softmax over the labels. The input comes first in every prompt, so that the prefix cache
holds it: the first question is computed alone, the others follow in batches and read it.

Labels are the options themselves where their first tokens differ, in which case the option's
probability is that of its first token; else the options are lettered A, B, ... and the letters are
the labels. `confidence` is 1 when one option has all the probability and 0 when all have the same:
(n p - 1) / (n - 1) for the highest p of n. A score is the expected level, counted from 0.
"""

from __future__ import annotations

import itertools
import json
import math
import string
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from server.api.client import Submission
from server.api.decision_body import (
    MAX_JSON_BYTES,
    MAX_JSON_DEPTH,
    MAX_JSON_VALUES,
    ChoiceQuestion,
    DecisionBody,
    PredicateQuestion,
    Question,
    items_of,
    parts_of,
    questions_of,
)
from server.api.intake import Intake, ServedModel
from server.api.usage import RequestAccount
from server.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    LimitExceededError,
    TailorError,
    UnsupportedFieldError,
)
from server.types import Request, SamplingParams

__all__ = ["DecisionIntake", "DecisionOrder", "DecisionRun"]

MAX_WAVE_QUESTIONS = 64
MAX_WAVE_LABELS = 1024
"""Questions and labels that are in the engine at once: a label costs a row of logits there."""

_TAILS = (("\nAnswer:", " "), ("\nAnswer: ", ""))
"""How a prompt may end, and what then stands before a label. The first one that has labels."""

SubmitFunction = Callable[[Sequence[Request]], Submission]


@dataclass(frozen=True, slots=True)
class Labels:
    """How the options of a question are told apart: shown[i] in the prompt, token_ids[i] after it.

    lettered: the options are shown as "A. option" and answered by their letters.
    """

    tail: str
    lettered: bool
    shown: tuple[str, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecisionOrder:
    """A body after intake: one Request per question, in order; each has its label ids."""

    label: str
    questions: tuple[Question, ...]
    requests: tuple[Request, ...]


class DecisionIntake:
    """Turns bodies into DecisionOrders. Keeps each model's letters once they are known."""

    def __init__(self, intake: Intake, max_request_tokens: int) -> None:
        self._intake = intake
        self._max_request_tokens = max_request_tokens
        self._letters: dict[str, list[tuple[str, list[tuple[str, int]]]]] = {}

    async def order(
        self, body: DecisionBody, request_id: str, max_model_len: int | None = None
    ) -> DecisionOrder:
        """The order of one body. max_model_len as in Intake.completion. Raises 4xx errors."""
        arrival_s = time.monotonic()
        intake = self._intake
        task, model = intake.find(body.model)
        room = min(model.max_model_len, max_model_len or model.max_model_len)
        if task.limits.max_prompt_tokens is not None:
            room = min(room, task.limits.max_prompt_tokens)
        questions = questions_of(body.questions)
        shared = _input_text(body.input)
        prompts = []
        for i, question in enumerate(questions):
            labels = self._labels(model, _options(question), f"questions[{i}]")
            text = f"{shared}\n\n{_question_text(question, labels, i)}"
            prompts.append((labels, text))
        at_least = [intake.least_tokens(model, text) for _, text in prompts]
        self._check_total(sum(at_least))
        requests = []
        for i, (labels, text) in enumerate(prompts):
            if at_least[i] > room:
                raise _too_long(i, f"at least {at_least[i]}", room)
            ids = await intake.encode(model, text, add_special=True)
            if len(ids) > room:
                raise _too_long(i, str(len(ids)), room)
            requests.append(
                Request(
                    request_id=f"{request_id}-{i}",
                    task=task.name,
                    model=model.name,
                    prompt_ids=tuple(ids),
                    sampling=SamplingParams(temperature=0.0, max_tokens=0),
                    arrival_s=arrival_s,
                    label_ids=labels.token_ids,
                )
            )
        self._check_total(sum(len(request.prompt_ids) for request in requests))
        return DecisionOrder(body.model, tuple(questions), tuple(requests))

    def _check_total(self, num_tokens: int) -> None:
        if num_tokens > self._max_request_tokens:
            raise LimitExceededError(
                f"The questions take {num_tokens} tokens with their input, or more; the limit is "
                f"{self._max_request_tokens}.",
                param="questions",
            )

    def _labels(self, model: ServedModel, options: Sequence[str], at: str) -> Labels:
        for tail, gap in _TAILS:
            ids = [_first_token(model, tail, gap + option) for option in options]
            if len(set(ids)) == len(ids) and None not in ids:
                return Labels(tail, False, tuple(options), tuple(i for i in ids if i is not None))
        if model.name not in self._letters:
            self._letters[model.name] = [
                (tail, list(_letters(model, tail, gap))) for tail, gap in _TAILS
            ]
        for tail, letters in self._letters[model.name]:
            if len(letters) >= len(options):
                chosen = letters[: len(options)]
                shown = (
                    f"{letter}. {option}"
                    for (letter, _), option in zip(chosen, options, strict=True)
                )
                return Labels(tail, True, tuple(shown), tuple(token for _, token in chosen))
        most = max(len(letters) for _, letters in self._letters[model.name])
        raise UnsupportedFieldError(
            f"{at}: the tokenizer of this model can tell {most} options apart, not {len(options)}.",
            param=at,
        )


def _too_long(i: int, num_tokens: str, room: int) -> ContextLengthExceededError:
    return ContextLengthExceededError(
        f"questions[{i}]: the context holds {room} tokens, but input and question have "
        f"{num_tokens}. Nothing is truncated.",
        param="input",
    )


def _ids(model: ServedModel, text: str) -> list[int]:
    ids: list[int] = model.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _first_token(model: ServedModel, tail: str, label: str) -> int | None:
    """The id that the label begins with after the tail; None where it changes the tail's ids."""
    before = _ids(model, tail)
    after = _ids(model, tail + label[:64])
    if after[: len(before)] != before or len(after) == len(before):
        return None
    return after[len(before)]


def _letters(model: ServedModel, tail: str, gap: str) -> Iterator[tuple[str, int]]:
    """Up to 255 labels of one token each, all different: A to Z, then AA, AB, ..."""
    before = _ids(model, tail)
    seen: set[int] = set()
    capitals = string.ascii_uppercase
    names = itertools.chain(capitals, map("".join, itertools.product(capitals, repeat=2)))
    for name in names:
        after = _ids(model, tail + gap + name)
        if len(after) == len(before) + 1 and after[:-1] == before and after[-1] not in seen:
            seen.add(after[-1])
            yield name, after[-1]
        if len(seen) == 255:
            return


# --- the prompt -----------------------------------------------------------------------------------


def _options(question: Question) -> list[str]:
    if isinstance(question, PredicateQuestion):
        return ["Yes", "No"]
    if isinstance(question, ChoiceQuestion):
        return [
            ("true" if option.value else "false")
            if isinstance(option.value, bool)
            else option.value.strip() or repr(option.value)
            for option in question.choices
        ]
    return [level.label.strip() or repr(level.label) for level in question.levels]


def _question_text(question: Question, labels: Labels, i: int) -> str:
    instructions = _content_text(
        question.instructions, ("input_text", "input_json"), f"questions[{i}].instructions"
    )
    if isinstance(question, PredicateQuestion):
        told = "Is this statement true?"
        if labels.lettered:
            told += "\n" + "\n".join(labels.shown)
        lines = [f"Statement: {instructions}", told]
        answer = "the letter of one option" if labels.lettered else "Yes or No"
    else:
        is_choice = isinstance(question, ChoiceQuestion)
        members: Sequence[Any] = question.choices if is_choice else question.levels  # type: ignore[union-attr]
        head = "Options:" if is_choice else "Levels, from the lowest to the highest:"
        bullet = "" if labels.lettered else "- "
        lines = [instructions, head]
        for shown, member in zip(labels.shown, members, strict=True):
            told = f": {member.description}" if member.description else ""
            lines.append(f"{bullet}{shown}{told}")
        what = "option" if is_choice else "level"
        answer = f"the letter of one {what}" if labels.lettered else f"one {what}"
    return "\n".join([*lines, f"Answer with {answer}."]) + labels.tail


def _content_text(content: Any, allowed: Sequence[str], at: str) -> str:
    parts = parts_of(content, allowed, at)
    if isinstance(parts, str):
        return parts
    return "\n".join(_part_text(part, f"{at}[{i}]") for i, part in enumerate(parts))


def _part_text(part: BaseModel, at: str) -> str:
    data = getattr(part, "data", None)
    if data is None:
        text: str = getattr(part, "text", None) or getattr(part, "refusal", "")
        return text
    if _depth_and_count(data)[0] > MAX_JSON_DEPTH or _depth_and_count(data)[1] > MAX_JSON_VALUES:
        raise LimitExceededError(
            f"{at}.data: at most {MAX_JSON_DEPTH} levels and {MAX_JSON_VALUES} values.",
            param=f"{at}.data",
        )
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    if len(text.encode()) > MAX_JSON_BYTES:
        raise LimitExceededError(
            f"{at}.data: at most {MAX_JSON_BYTES} bytes as compact JSON.", param=f"{at}.data"
        )
    return text


def _depth_and_count(value: Any) -> tuple[int, int]:
    """Container levels and values of a JSON value; the body's own depth is bounded already."""
    if isinstance(value, dict):
        inner = [_depth_and_count(item) for item in value.values()]
    elif isinstance(value, list):
        inner = [_depth_and_count(item) for item in value]
    else:
        return 0, 1
    return 1 + max((d for d, _ in inner), default=0), 1 + sum(n for _, n in inner)


def _input_text(given: Any) -> str:
    """The input as one text: a single user message is its content, several items are labelled."""
    items = items_of(given)
    if isinstance(items, str):
        return items
    told = []
    for i, item in enumerate(items):
        at = f"input[{i}]"
        kind, role = getattr(item, "type", "message"), getattr(item, "role", "")
        if kind == "message":
            allowed = {"user": ("input_text", "input_json"), "assistant": ("output_text", "refusal")}
            content = getattr(item, "content", "")
            text = _content_text(content, allowed.get(role, ("input_text",)), f"{at}.content")
            told.append(text if len(items) == 1 and role == "user" else f"{role.title()}: {text}")
        elif kind.endswith("_output"):
            text = _content_text(getattr(item, "output", ""), ("input_text",), f"{at}.output")
            told.append(f"Result: {text}")
        else:
            name, space = getattr(item, "name", ""), getattr(item, "namespace", None)
            given_to = getattr(item, "arguments", None) or getattr(item, "input", "")
            told.append(f"Call: {f'{space}.' if space else ''}{name}({given_to})")
    text = "\n\n".join(told)
    if not text.strip():
        raise InvalidRequestError("input: there is no text in it.", param="input")
    return text


# --- the answers ----------------------------------------------------------------------------------


class DecisionRun:
    """One order in the engines: the first question, then the others in batches.

    submit: EngineClient.submit. `abort` may be called at any time; `answer` then ends.
    """

    def __init__(self, order: DecisionOrder, submit: SubmitFunction) -> None:
        self._order = order
        self._submit = submit
        self._submission: Submission | None = None
        self._accounts: list[RequestAccount] = []
        self._aborted = False

    def abort(self) -> None:
        """Free what the engines hold for this. Idempotent."""
        self._aborted = True
        if self._submission is not None:
            self._submission.abort()

    async def answer(self) -> dict[str, Any]:
        """The whole response. Raises the TailorError that ended it early."""
        logprobs: list[tuple[float, ...]] = []
        for wave in _waves(self._order.requests):
            if self._aborted:
                break
            self._submission = self._submit(wave)
            self._accounts += self._submission.accounts
            found: dict[int, tuple[float, ...]] = {}
            async for arrived in self._submission:
                for i, delta in arrived:
                    found[i] = delta.label_logprobs
            if self._aborted:
                break
            logprobs += [found[i] for i in range(len(wave))]
        order = self._order
        return {
            "model": order.label,
            "answers": [
                _answer(question, probabilities_of(values))
                for question, values in zip(order.questions, logprobs, strict=False)
            ],
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        num = sum(account.num_prompt_tokens for account in self._accounts)
        cached = sum(account.num_cached_tokens for account in self._accounts)
        return {
            "input_tokens": num,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num,
        }


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
    """The softmax over the labels alone, in double precision. Raises TailorError for NaN."""
    highest = max(logprobs, default=math.nan)
    if not math.isfinite(highest):
        raise TailorError("The model produced no probabilities for this question.")
    weights = [math.exp(value - highest) for value in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _answer(question: Question, chances: list[float]) -> dict[str, Any]:
    if isinstance(question, PredicateQuestion):
        return {"type": "predicate", "name": question.name, "probability": chances[0]}
    num = len(chances)
    best = max(range(num), key=lambda i: (chances[i], -i))
    confidence = min(1.0, max(0.0, (num * chances[best] - 1) / (num - 1)))
    if isinstance(question, ChoiceQuestion):
        return {
            "type": "choice",
            "name": question.name,
            "choice": question.choices[best].value,
            "confidence": confidence,
            "probabilities": [
                {"value": option.value, "probability": chance}
                for option, chance in zip(question.choices, chances, strict=True)
            ],
        }
    return {
        "type": "score",
        "name": question.name,
        "score": math.fsum(i * chance for i, chance in enumerate(chances)),
        "confidence": confidence,
        "probabilities": [
            {"label": level.label, "value": i, "probability": chance}
            for i, (level, chance) in enumerate(zip(question.levels, chances, strict=True))
        ],
    }
