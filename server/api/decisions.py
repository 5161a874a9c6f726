"""POST /v1/decisions: typed questions about an input, answered from the first token's logits.

Every question becomes one prompt and one Request that asks the engine for the logprobs of its
labels as the next token, and for no text. The answer is the softmax over the labels. The input
comes first in every prompt, so that the prefix cache holds it: the first question is computed
alone, the others follow in batches and read it.

`confidence` is 1 when one option has all the probability and 0 when all have the same:
(n p - 1) / (n - 1) for the highest p of n. A score is the expected level, counted from 0. The
answer is never a refusal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from server.api.decision_body import (
    ChoiceQuestion,
    DecisionBody,
    PredicateQuestion,
    Question,
    questions_of,
)
from server.api.decision_prompt import Labeller, input_text, options_of, question_text
from server.api.engines.submission import Submission
from server.api.intake import Intake
from server.api.responses import (
    ChoiceAnswer,
    ChoiceChance,
    Decision,
    DecisionUsage,
    InputDetails,
    LevelChance,
    OutputDetails,
    PredicateAnswer,
    ScoreAnswer,
)
from server.api.served_model import ServedModel
from server.api.usage import RequestAccount
from server.errors import (
    ContextLengthExceededError,
    EngineError,
    InvalidRequestError,
    LimitExceededError,
)
from server.types import Request, SamplingParams

MAX_WAVE_QUESTIONS = 64
MAX_WAVE_LABELS = 512
"""Questions and labels that are in the engine at once: a label costs a row of logits there."""

SubmitFunction = Callable[[Sequence[Request]], Awaitable[Submission]]


@dataclass(frozen=True, slots=True)
class DecisionOrder:
    """A body after intake: one Request per question, in order; each has its label ids."""

    label: str
    questions: tuple[Question, ...]
    requests: tuple[Request, ...]


class DecisionIntake:
    """Turns bodies into DecisionOrders. Keeps each model's Labeller."""

    def __init__(self, intake: Intake, max_request_tokens: int) -> None:
        self._intake = intake
        self._max_request_tokens = max_request_tokens
        self._labellers: dict[str, Labeller] = {}

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
        shared = input_text(body.input)
        # The texts of all questions together must be bounded before they are made.
        self._check(intake.least_tokens(model, shared), len(questions), room)

        def encode() -> list[tuple[list[int], tuple[int, ...]]]:
            num_shared = len(_encode(model, [shared])[0])
            self._check(num_shared, len(questions), room)
            labeller = self._labeller(model)
            prompts = []
            for i, question in enumerate(questions):
                at = f"questions[{i}]"
                labels = labeller.labels(options_of(question), at)
                text = f"{shared}\n\n{question_text(question, labels, at)}"
                prompts.append((_prompt_ids(model, text, labels.tail), labels.token_ids))
            return prompts

        num_chars = len(shared) * len(questions) + sum(
            len(question.model_dump_json()) for question in questions
        )
        prompts = await intake.work(encode, num_chars)
        for i, (ids, _) in enumerate(prompts):
            if len(ids) > room:
                raise ContextLengthExceededError(
                    f"questions[{i}]: the context holds {room} tokens, but input and question have "
                    f"{len(ids)}. Nothing is truncated.",
                    param="input",
                )
        self._check_total(sum(len(ids) for ids, _ in prompts))
        requests = [
            Request(
                request_id=f"{request_id}-{i}",
                task=task.name,
                model=model.name,
                adapter=model.adapter_id,
                prompt_ids=tuple(ids),
                sampling=SamplingParams(temperature=0.0, max_tokens=0),
                arrival_s=arrival_s,
                label_ids=label_ids,
            )
            for i, (ids, label_ids) in enumerate(prompts)
        ]
        return DecisionOrder(body.model, tuple(questions), tuple(requests))

    def _labeller(self, model: ServedModel) -> Labeller:
        labeller = self._labellers.get(model.name)
        if labeller is None:
            labeller = Labeller(lambda texts: _encode(model, texts))
            self._labellers[model.name] = labeller
        return labeller

    def _check(self, num_shared: int, num_questions: int, room: int) -> None:
        if num_shared > room:
            raise ContextLengthExceededError(
                f"input: the context holds {room} tokens, but the input has {num_shared} or more. "
                "Nothing is truncated.",
                param="input",
            )
        self._check_total(num_shared * num_questions)

    def _check_total(self, num_tokens: int) -> None:
        if num_tokens > self._max_request_tokens:
            raise LimitExceededError(
                f"The questions take {num_tokens} tokens with their input, or more; the limit is "
                f"{self._max_request_tokens}.",
                param="questions",
            )


def _encode(model: ServedModel, texts: Sequence[str]) -> list[list[int]]:
    # encode_batch is not used: its threads would take the cores that the engine computes on.
    return [model.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def _prompt_ids(model: ServedModel, text: str, tail: str) -> list[int]:
    """A question as the model was trained to be asked: by its chat template, if it has one, with
    the tail as the start of the answer; else as plain text."""
    if model.chat is None:
        ids: list[int] = model.tokenizer.encode(text + tail, add_special_tokens=True).ids
        return model.prompt_ids(ids)
    try:
        chat = model.chat.render([{"role": "user", "content": text}], opening=tail.lstrip("\n"))
        return model.prompt_ids(model.chat.encode(chat))
    except InvalidRequestError as error:
        message = error.message.removeprefix("messages: ")
        raise InvalidRequestError(f"input: {message}", param="input") from None


# --- the answers ----------------------------------------------------------------------------------


class DecisionRun:
    """One order in the engines: the first question, then the others in batches.

    submit: RouteContext.submit of a request. `abort` may be called at any time; `answer` then ends.
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

    async def answer(self) -> Decision:
        """The whole response. Raises the TailorError that ended it early."""
        logprobs: list[tuple[float, ...]] = []
        for wave in _waves(self._order.requests):
            if self._aborted:
                break
            self._submission = await self._submit(wave)
            if self._aborted:
                self._submission.abort()
                break
            self._accounts += self._submission.accounts
            found: dict[int, tuple[float, ...]] = {}
            async for arrived in self._submission:
                for i, delta in arrived:
                    found[i] = delta.label_logprobs
            if self._aborted:
                break
            logprobs += [found[i] for i in range(len(wave))]
        order = self._order
        return Decision(
            model=order.label,
            answers=[
                _answer(question, probabilities_of(values))
                for question, values in zip(order.questions, logprobs, strict=False)
            ],
            usage=self._usage(),
        )

    def _usage(self) -> DecisionUsage:
        num = sum(account.num_prompt_tokens for account in self._accounts)
        cached = sum(account.num_cached_tokens for account in self._accounts)
        return DecisionUsage(
            input_tokens=num,
            input_tokens_details=InputDetails(cached_tokens=cached),
            output_tokens=0,
            output_tokens_details=OutputDetails(),
            total_tokens=num,
        )


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


def _answer(
    question: Question, chances: list[float]
) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    if isinstance(question, PredicateQuestion):
        return PredicateAnswer(name=question.name, probability=chances[0])
    num = len(chances)
    best = max(range(num), key=lambda i: (chances[i], -i))
    confidence = min(1.0, max(0.0, (num * chances[best] - 1) / (num - 1)))
    if isinstance(question, ChoiceQuestion):
        return ChoiceAnswer(
            name=question.name,
            choice=question.choices[best].value,
            confidence=confidence,
            probabilities=[
                ChoiceChance(value=option.value, probability=chance)
                for option, chance in zip(question.choices, chances, strict=True)
            ],
        )
    return ScoreAnswer(
        name=question.name,
        score=math.fsum(i * chance for i, chance in enumerate(chances)),
        confidence=confidence,
        probabilities=[
            LevelChance(label=level.label, value=i, probability=chance)
            for i, (level, chance) in enumerate(zip(question.levels, chances, strict=True))
        ],
    )
