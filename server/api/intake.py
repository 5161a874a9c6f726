"""From a validated body to frozen Requests: the task, its defaults and hard limits, ids, the seed.

Decided here, in this order: the Task and its model (the `model` field); how many prompts and
choices; sampling (the request's value, else the task's, else OpenAI's default); speculation within
the task's limits; the ids of every prompt; whether they fit. A value above a limit is refused with
a 400 that names the field. Nothing is clamped or truncated, except a max_tokens that the client did
not give, which is reduced to the room that the prompt leaves.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from server.api.fields import GRAMMAR, MAX_TOKENS, PROMPT
from server.api.intake_drafts import DraftingTasks, speculation_of, vocabulary_of
from server.api.intake_prompts import (
    PromptText,
    check_prompt_ids,
    context_span,
    echo_text,
    prompts_of,
    too_long,
)
from server.api.intake_sampling import Choices, choices_of, max_tokens_of, sampling_of
from server.api.protocol import (
    NEUTRAL,
    CompletionBody,
    GenerationBody,
    PredictionBody,
    joined_texts,
    refuse_unless_neutral,
)
from server.api.served_model import ServedModel
from server.api.structured import GrammarChecker, check_with_sampling
from server.api.text import TokenIdNames, TokenNames
from server.config import DEFAULT_TASK, LimitsConfig, TaskConfig
from server.errors import (
    InvalidRequestError,
    LimitExceededError,
    ModelNotFoundError,
    UnsupportedFieldError,
    echoed,
)
from server.types import GrammarSpec, Request, scope_of

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""

LONG_TEXT_CHARS = 4096
"""Longer texts are tokenized in a thread: 4,096 characters take about a millisecond."""

_MASK64 = (1 << 64) - 1
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CompletionOrder:
    """A POST /v1/completions after intake: Requests for the engines, and how to answer.

    requests: one per prompt, in order. num_choices: n (each Request runs best_of). logprobs: what
    the client asked for. needs_engine: False when there is nothing to compute (max_tokens 0 without
    logprobs). names: the route's names of fields, by their keys, for errors of the engine.
    token_names: of logprobs. prompt_logprobs: how many of each prompt position the answer has.
    num_truncated: tokens cut off the prompts.
    """

    request_id: str
    label: str
    model: ServedModel
    requests: tuple[Request, ...]
    prompts: tuple[PromptText, ...]
    num_choices: int
    logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    include_speculation: bool
    include_token_sources: bool
    include_rejected_drafts: bool
    created: int
    names: Mapping[str, str]
    token_names: TokenNames | TokenIdNames
    prompt_logprobs: int | None = None
    num_truncated: int = 0

    @property
    def needs_engine(self) -> bool:
        first = self.requests[0]
        return first.sampling.max_tokens > 0 or first.echo_logprobs is not None


class Intake:
    """Turns bodies into Requests.

    tasks and models: by name; the first model is the default. drafters: names that engines know.
    limits: the server's. adapters: beside the models, by name. Owns two threads for tokenizing
    long texts, and those of `grammars`; `close` ends them.
    """

    def __init__(
        self,
        *,
        tasks: Mapping[str, TaskConfig],
        models: Mapping[str, ServedModel],
        drafters: Sequence[str],
        limits: LimitsConfig,
        adapters: Mapping[str, ServedModel] | None = None,
    ) -> None:
        if not models:
            raise ValueError("no model")
        self.tasks: dict[str, TaskConfig] = {}
        self.replace_tasks(tasks)
        self.models = dict(models)
        self.adapters = dict(adapters or {})
        self._default_model = next(iter(self.models))
        self._drafters = tuple(drafters)
        self._limits = limits
        self.grammars = GrammarChecker()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")

    def replace_tasks(self, tasks: Mapping[str, TaskConfig]) -> None:
        """Use these tasks from the next request on; requests that are open keep theirs."""
        self.tasks = {**tasks}
        self.tasks.setdefault(DEFAULT_TASK, TaskConfig(name=DEFAULT_TASK))

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()

    def find(self, name: str | None) -> tuple[TaskConfig, ServedModel]:
        """The task and the model that a `model` field names. Raises ModelNotFoundError."""
        if name is None:
            name = self._default_model
        model = self.models.get(name) or self.adapters.get(name)
        if model is not None:
            return self.tasks[DEFAULT_TASK], model
        task = self.tasks.get(name)
        if task is None:
            raise ModelNotFoundError(
                f"The model {echoed(name)} does not exist or you do not have access to it.",
                param="model",
            )
        return task, self.model_of(task)

    def model_of(self, task: TaskConfig) -> ServedModel:
        """The model that runs a task, with its adapter. Raises ModelNotFoundError for one that was
        unloaded."""
        model = self.models[task.model or self._default_model]
        if task.adapter is None:
            return model
        adapter = self.adapters.get(task.adapter)
        if adapter is None or adapter.name != model.name:
            raise ModelNotFoundError(
                f"The adapter {echoed(task.adapter)} of the task {echoed(task.name)} is not "
                "loaded.",
                param="model",
            )
        return adapter

    async def completion(
        self,
        body: CompletionBody,
        request_id: str,
        max_model_len: int | None = None,
        *,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
        grammar: tuple[GrammarSpec, str] | None = None,
        tenant: str = "",
    ) -> CompletionOrder:
        """The order of one body.

        max_model_len: what the engine can hold, if that is less than the model's own.
        default_max_tokens: where neither body nor task has one; reduced to the room there is.
        grammar: a checked one that the output must match, and the field that it comes from, for a
            body that asks for none. tenant: who asks (Visit.tenant).
        Raises the client's errors of server.errors (4xx).
        """
        arrival_s = time.monotonic()
        task, model = self.find(body.model)
        room = min(model.max_model_len, max_model_len or model.max_model_len)
        refuse_unsupported(body)
        choices = choices_of(body, task, self._limits)
        prompts = self._prompts(body, task)
        sampling = sampling_of(body, task, model, choices, default_max_tokens)
        if grammar is None:
            grammar = await self.grammars.of(
                body.structured_outputs,
                body.response_format,
                scope_of(tenant, body.cache_salt or ""),
                close=not opens_objects(body, task),
            )
        spec, grammar_field = grammar or (None, "")
        check_with_sampling(spec, sampling)
        speculation = speculation_of(body, task, self._drafting)
        if body.prediction is not None:
            ids = await self._prediction_ids(body.prediction, model, room)
            speculation = replace(speculation, prediction_ids=ids)
        shared = Request(
            request_id=request_id,
            task=task.name,
            model=model.name,
            adapter=model.adapter_id,
            prompt_ids=(),
            sampling=sampling,
            speculation=speculation,
            vocabulary=vocabulary_of(body, task),
            num_choices=choices.best_of,
            echo_logprobs=_echo_logprobs(body, choices),
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            arrival_s=arrival_s,
            grammar=spec,
            report_sources=bool(body.include_token_sources),
            report_rejected=bool(body.include_rejected_drafts),
        )
        requests, texts, num_truncated = [], [], 0
        for i, prompt in enumerate(prompts):
            at = str(PROMPT) if len(prompts) == 1 else f"{PROMPT}[{i}]"
            ids = await self._prompt_ids(body, prompt, model, room, at)
            if body.truncate_prompt_tokens is not None:
                num_truncated += max(0, len(ids) - body.truncate_prompt_tokens)
                ids = ids[-body.truncate_prompt_tokens :]
                prompt = list(ids)
            request = self._request(body, task, model, shared, ids, room, at)
            requests.append(replace(request, request_id=f"{request_id}-{i}"))
            texts.append(echo_text(model, prompt, ids, sampling) if choices.echo else PromptText())
        self._check_total(requests)
        order = _order(body, grammar_field, model, choices, requests, texts)
        return replace(order, num_truncated=num_truncated)

    async def encode(self, model: ServedModel, text: str, *, add_special: bool) -> list[int]:
        """The ids of a text; long texts are done in a thread."""

        def work() -> list[int]:
            ids: list[int] = model.tokenizer.encode(text, add_special_tokens=add_special).ids
            return model.prompt_ids(ids)

        return await self.work(work, len(text))

    async def work(self, do: Callable[[], _T], num_chars: int) -> _T:
        """Run `do`, which reads num_chars characters: here, or in a thread if they are many."""
        if num_chars < LONG_TEXT_CHARS:
            return do()
        return await asyncio.get_running_loop().run_in_executor(self._threads, do)

    def least_tokens(self, model: ServedModel, text: str) -> int:
        """A lower bound of the tokens in a text, without tokenizing it: no token has more bytes
        than the longest one."""
        return len(text.encode()) // model.longest_token

    async def decode(self, model: ServedModel, ids: Sequence[int]) -> str:
        """The text of ids, special ones included, as vLLM's /detokenize gives it."""
        if any(i >= model.vocab_size for i in ids):
            raise InvalidRequestError(
                f"tokens: ids must be below the vocabulary size, {model.vocab_size}.",
                param="tokens",
            )

        def work() -> str:
            text: str = model.tokenizer.decode(list(ids), skip_special_tokens=False)
            return text

        return await self.work(work, len(ids))

    # --- parts ---

    @property
    def _drafting(self) -> DraftingTasks:
        return DraftingTasks(self._drafters, self.tasks, self._default_model)

    def _prompts(self, body: CompletionBody, task: TaskConfig) -> list[str | list[int]]:
        prompts = prompts_of(body.prompt)
        most = min(self._limits.max_prompts, task.limits.max_prompts or self._limits.max_prompts)
        if len(prompts) > most:
            raise LimitExceededError(
                f"{PROMPT}: {len(prompts)} prompts; at most {most} are allowed.", param=str(PROMPT)
            )
        return prompts

    def _request(
        self,
        body: CompletionBody,
        task: TaskConfig,
        model: ServedModel,
        shared: Request,
        ids: tuple[int, ...],
        room: int,
        at: str,
    ) -> Request:
        """The Request of one prompt: what all share, and its own ids, length, context and seed."""
        most = self._limits.max_tokens
        max_tokens = max_tokens_of(body, task, most, shared.sampling, len(ids), room, at)
        marks, span = body.context or task.speculation.context, None
        if marks is not None and shared.speculation.drafter != "off":
            span = context_span(model.table, ids, marks.after, marks.before)
        seed = body.seed if body.seed is not None else task.sampling.seed
        seed = secrets.randbits(64) if seed is None else seed & _MASK64
        return replace(
            shared,
            prompt_ids=ids,
            sampling=replace(shared.sampling, max_tokens=max_tokens, seed=seed),
            speculation=replace(shared.speculation, context_span=span),
        )

    def _check_total(self, requests: Sequence[Request]) -> None:
        total = sum(r.num_choices * (len(r.prompt_ids) + r.sampling.max_tokens) for r in requests)
        if total > self._limits.max_request_tokens:
            raise LimitExceededError(
                f"The request could take {total} tokens (prompts x best_of x (prompt + "
                f"{MAX_TOKENS})); the limit is {self._limits.max_request_tokens}.",
                param=str(MAX_TOKENS),
            )

    def check_size(
        self, num_bytes: int, model: ServedModel, max_tokens: int | None, room: int, at: str
    ) -> None:
        """Raise ContextLengthExceededError for a text that cannot fit, without tokenizing it.

        No token has more bytes than the longest one.
        """
        at_least = num_bytes // model.longest_token
        if at_least > room:
            raise too_long(at, f"at least {at_least}", max_tokens, room)

    async def _prediction_ids(
        self, prediction: PredictionBody, model: ServedModel, room: int
    ) -> tuple[int, ...]:
        text = joined_texts(prediction.content, "prediction.content", "")
        too_long = LimitExceededError(
            f"prediction: it is longer than the model's context, {room} tokens.",
            param="prediction",
        )
        if len(text.encode()) // model.longest_token > room:
            raise too_long
        ids = await self.work(lambda: model.segments.later(text), len(text))
        if len(ids) > room:
            raise too_long
        return tuple(ids)

    async def _prompt_ids(
        self, body: CompletionBody, prompt: str | list[int], model: ServedModel, room: int, at: str
    ) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if body.truncate_prompt_tokens is None:
                self.check_size(len(prompt.encode()), model, body.max_tokens, room, at)
            ids = await self.encode(model, prompt, add_special=body.add_special_tokens is not False)
            if not ids:
                raise InvalidRequestError(
                    f"{at}: the prompt has no tokens; it cannot be empty.", param=str(PROMPT)
                )
        else:
            ids = prompt
            check_prompt_ids(ids, model, at)
        return tuple(ids)


def _echo_logprobs(body: CompletionBody, choices: Choices) -> int | None:
    """How many logprobs of each prompt position the engine returns; None for none."""
    wanted = [body.prompt_logprobs, body.logprobs if choices.echo else None]
    return max((num for num in wanted if num is not None), default=None)


def opens_objects(body: GenerationBody, task: TaskConfig) -> bool:
    """Whether JSON objects without additionalProperties may have further members."""
    if body.additional_properties is not None:
        return body.additional_properties
    return task.additional_properties


def _order(
    body: CompletionBody,
    grammar_field: str,
    model: ServedModel,
    choices: Choices,
    requests: Sequence[Request],
    texts: Sequence[PromptText],
) -> CompletionOrder:
    options = body.stream_options
    return CompletionOrder(
        request_id=requests[0].request_id.rpartition("-")[0],
        label=body.model,
        model=model,
        requests=tuple(requests),
        prompts=tuple(texts),
        num_choices=choices.num,
        logprobs=body.logprobs,
        echo=choices.echo,
        stream=choices.stream,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        return_token_ids=bool(body.return_token_ids),
        include_speculation=bool(body.include_speculation),
        include_token_sources=bool(body.include_token_sources),
        include_rejected_drafts=bool(body.include_rejected_drafts),
        created=int(time.time()),
        names={GRAMMAR.key: grammar_field} if grammar_field else {},
        token_names=TokenIdNames() if body.return_tokens_as_token_ids else model.names,
        prompt_logprobs=body.prompt_logprobs,
    )


def refuse_unsupported(body: CompletionBody) -> None:
    """Raise UnsupportedFieldError for fields that no model here can honour."""
    refuse_unless_neutral(body, NEUTRAL)
    if body.suffix:
        raise UnsupportedFieldError(
            "suffix: this model has no infill; only prompts are continued.", param="suffix"
        )
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise UnsupportedFieldError(
            "stream_options.include_obfuscation: chunks are never padded; leave it out.",
            param="stream_options.include_obfuscation",
        )
