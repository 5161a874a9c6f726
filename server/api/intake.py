"""A validated body into frozen Requests: the task, its defaults and hard limits, ids, the seed.

What is decided here, in this order: the Task and its model (the `model` field) · how many prompts
and choices · sampling (the request's value, else the task's, else OpenAI's default) · speculation
within the task's limits · the ids of every prompt · whether they fit. A value above a limit is
refused with a 400 that names the field; nothing is clamped or truncated, except a max_tokens that
the client did not give, which is cut to the room that the prompt leaves.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tokenizers import Tokenizer

from server.api.chat_template import ChatTemplate
from server.api.protocol import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    CompletionBody,
    PredictionBody,
    SpeculationBody,
    joined_texts,
)
from server.api.segments import SegmentEncoder
from server.api.structured import GrammarChecker, check_with_sampling
from server.api.text import TokenNames
from server.config import CORPUS_DRAFTERS, DEFAULT_TASK, LimitsConfig, TaskConfig
from server.errors import (
    ConstraintUnsatisfiableError,
    ContextLengthExceededError,
    FieldKey,
    InvalidRequestError,
    LimitExceededError,
    ModelNotFoundError,
    UnsupportedFieldError,
    echoed,
)
from server.token_bytes import TokenBytes
from server.types import GrammarSpec, Request, SamplingParams, SpeculationParams, VocabularyParams

__all__ = ["CompletionOrder", "Intake", "PromptText", "ServedModel"]

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""

PREDICTING_DRAFTER = "auto"
"""The drafter that uses a request's prediction; one that ignores it would ignore a field."""

LONG_TEXT_CHARS = 4096
"""Longer texts are tokenized in a thread: 4,096 characters take about a millisecond."""

PROMPT = FieldKey("prompt")
MAX_TOKENS = FieldKey("max_tokens")
LOGPROBS = FieldKey("logprobs")

_ID = re.compile(r"[0-9]{1,10}")
_MASK64 = (1 << 64) - 1
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One target model as the API knows it; the engine has the weights.

    vocab_size: V of the model (ids at or above are refused). max_model_len: tokens of prompt and
    output together. created: Unix seconds. fingerprint: OpenAI's system_fingerprint. chat: the
    model's chat template, None for a base model.
    """

    name: str
    tokenizer: Tokenizer
    table: TokenBytes
    vocab_size: int
    max_model_len: int
    created: int = 0
    fingerprint: str = ""
    chat: ChatTemplate | None = None
    names: TokenNames = field(init=False, repr=False)
    segments: SegmentEncoder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # A tokenizer.json may carry truncation and padding: a prompt is never cut or padded.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        object.__setattr__(self, "names", TokenNames(self.table))
        object.__setattr__(self, "segments", SegmentEncoder(self.tokenizer))


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as the client gave it (text), or as its ids read; pieces: the bytes of each id.

    Both are empty unless the answer repeats the prompt (echo).
    """

    text: str = ""
    pieces: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionOrder:
    """A POST /v1/completions after intake: Requests for the engines, and how to answer.

    requests: one per prompt, in order. num_choices: n (each Request runs best_of). logprobs: what
    the client asked for. needs_engine: False when there is nothing to compute (max_tokens 0 without
    logprobs).
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

    @property
    def needs_engine(self) -> bool:
        first = self.requests[0]
        return first.sampling.max_tokens > 0 or first.echo_logprobs is not None


class Intake:
    """Turns bodies into Requests.

    tasks and models: by name; the first model is the default. drafters: names that engines know.
    limits: the server's. Owns two threads for tokenizing long texts, and those of `grammars`;
    `close` ends them.
    """

    def __init__(
        self,
        *,
        tasks: Mapping[str, TaskConfig],
        models: Mapping[str, ServedModel],
        drafters: Sequence[str],
        limits: LimitsConfig,
    ) -> None:
        if not models:
            raise ValueError("no model")
        self.tasks: dict[str, TaskConfig] = {}
        self.replace_tasks(tasks)
        self.models = dict(models)
        self._default_model = next(iter(self.models))
        self._drafters = tuple(drafters)
        self._limits = limits
        self.grammars = GrammarChecker()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._longest = {
            name: max(1, int((model.table.offsets[1:] - model.table.offsets[:-1]).max(initial=1)))
            for name, model in self.models.items()
        }

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
        model = self.models.get(name)
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
        """The model that runs a task."""
        return self.models[task.model or self._default_model]

    async def completion(
        self,
        body: CompletionBody,
        request_id: str,
        max_model_len: int | None = None,
        *,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
        grammar: GrammarSpec | None = None,
    ) -> CompletionOrder:
        """The order of one body.

        max_model_len: what the engine can hold, if it told less than the model's own.
        default_max_tokens: where neither the body nor the task says; cut to the room there is.
        grammar: a checked one that the output must match, for a body that asks for none.
        Raises the errors of server.errors that are the client's fault (4xx).
        """
        arrival_s = time.monotonic()
        task, model = self.find(body.model)
        room = min(model.max_model_len, max_model_len or model.max_model_len)
        _refuse_unsupported(body)
        num_choices = body.n or 1
        best_of = body.best_of if body.best_of is not None else num_choices
        stream, echo = bool(body.stream), bool(body.echo)
        self._check_choices(body, task, num_choices, best_of, stream)
        prompts = _prompts_of(body.prompt)
        most = min(self._limits.max_prompts, task.limits.max_prompts or self._limits.max_prompts)
        if len(prompts) > most:
            raise LimitExceededError(
                f"{PROMPT}: {len(prompts)} prompts; at most {most} are allowed.", param=str(PROMPT)
            )
        sampling = self._sampling(body, task, model, num_choices, best_of, echo, default_max_tokens)
        if grammar is None:
            grammar = await self.grammars.of(body.structured_outputs, body.response_format)
        check_with_sampling(grammar, sampling)
        speculation = self._speculation(body, task)
        vocabulary = _vocabulary_of(body, task)
        prediction_ids: tuple[int, ...] = ()
        if body.prediction is not None:
            prediction_ids = await self._prediction_ids(body.prediction, model, room)
        echo_logprobs = body.logprobs if echo else None
        marks = body.context or task.speculation.context
        requests, texts = [], []
        for i, prompt in enumerate(prompts):
            where = str(PROMPT) if len(prompts) == 1 else f"{PROMPT}[{i}]"
            ids = await self._prompt_ids(body, prompt, model, room, where)
            max_tokens = self._max_tokens(body, task, sampling, len(ids), room, where)
            span = None
            if marks is not None and speculation.drafter != "off":
                span = _context_span(model.table, ids, marks.after, marks.before)
            seed = body.seed if body.seed is not None else task.sampling.seed
            requests.append(
                Request(
                    request_id=f"{request_id}-{i}",
                    task=task.name,
                    model=model.name,
                    prompt_ids=ids,
                    sampling=_replace_sampling(
                        sampling,
                        max_tokens=max_tokens,
                        seed=secrets.randbits(64) if seed is None else seed & _MASK64,
                    ),
                    speculation=replace(
                        speculation, prediction_ids=prediction_ids, context_span=span
                    ),
                    vocabulary=vocabulary,
                    num_choices=best_of,
                    echo_logprobs=echo_logprobs,
                    cache_salt=body.cache_salt or "",
                    priority=body.priority or 0,
                    arrival_s=arrival_s,
                    grammar=grammar,
                    report_sources=bool(body.include_token_sources),
                    report_rejected=bool(body.include_rejected_drafts),
                )
            )
            texts.append(_echo_text(model, prompt, ids, sampling) if echo else PromptText())
        total = sum(best_of * (len(r.prompt_ids) + r.sampling.max_tokens) for r in requests)
        if total > self._limits.max_request_tokens:
            raise LimitExceededError(
                f"The request could take {total} tokens "
                f"(prompts x best_of x (prompt + {MAX_TOKENS})); "
                f"the limit is {self._limits.max_request_tokens}.",
                param=str(MAX_TOKENS),
            )
        options = body.stream_options
        return CompletionOrder(
            request_id=request_id,
            label=body.model,
            model=model,
            requests=tuple(requests),
            prompts=tuple(texts),
            num_choices=num_choices,
            logprobs=body.logprobs,
            echo=echo,
            stream=stream,
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
            return_token_ids=bool(body.return_token_ids),
            include_speculation=bool(body.include_speculation),
            include_token_sources=bool(body.include_token_sources),
            include_rejected_drafts=bool(body.include_rejected_drafts),
            created=int(time.time()),
        )

    async def encode(self, model: ServedModel, text: str, *, add_special: bool) -> list[int]:
        """The ids of a text; long texts are done in a thread."""

        def work() -> list[int]:
            ids: list[int] = model.tokenizer.encode(text, add_special_tokens=add_special).ids
            return ids

        return await self.work(work, len(text))

    async def work(self, do: Callable[[], _T], num_chars: int) -> _T:
        """Run `do`, which reads num_chars characters, here or, if they are many, in a thread."""
        if num_chars < LONG_TEXT_CHARS:
            return do()
        return await asyncio.get_running_loop().run_in_executor(self._threads, do)

    def least_tokens(self, model: ServedModel, text: str) -> int:
        """A lower bound of the tokens in a text, without tokenizing it: no token has more bytes
        than the longest one."""
        return len(text.encode()) // self._longest[model.name]

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

    def _check_choices(
        self, body: CompletionBody, task: TaskConfig, n: int, best_of: int, stream: bool
    ) -> None:
        most = min(self._limits.max_choices, task.limits.max_choices or self._limits.max_choices)
        for name, value in (("n", n), ("best_of", best_of)):
            if value > most:
                raise LimitExceededError(f"{name}: at most {most}; got {value}.", param=name)
        if best_of < n:
            raise InvalidRequestError(
                f"best_of must be at least n; got best_of {best_of} and n {n}.", param="best_of"
            )
        if stream and best_of != n:
            raise InvalidRequestError(
                "best_of above n cannot be streamed: the best are known at the end.",
                param="best_of",
            )
        if body.stream_options is not None and not stream:
            raise InvalidRequestError(
                "stream_options is allowed only with stream.", param="stream_options"
            )
        most = task.limits.max_logprobs if task.limits.max_logprobs is not None else 20
        if body.logprobs is not None and body.logprobs > most:
            raise LimitExceededError(
                f"{LOGPROBS}: at most {most}; got {body.logprobs}.", param=str(LOGPROBS)
            )

    def _sampling(
        self,
        body: CompletionBody,
        task: TaskConfig,
        model: ServedModel,
        num_choices: int,
        best_of: int,
        echo: bool,
        default_max_tokens: int,
    ) -> SamplingParams:
        defaults = task.sampling

        def pick(name: str, fallback: Any) -> Any:
            value = getattr(body, name)
            if value is None:
                value = getattr(defaults, name)
            return fallback if value is None else value

        top_p, top_k = float(pick("top_p", 1.0)), int(pick("top_k", 0))
        if top_p == 0.0:  # OpenAI allows it; it keeps the most likely id alone
            top_p, top_k = 1.0, 1
        stop = _stops_of(body.stop) if body.stop is not None else defaults.stop
        stop_ids = defaults.stop_token_ids if body.stop_token_ids is None else body.stop_token_ids
        _check_ids(stop_ids, model, "stop_token_ids")
        allowed = body.allowed_token_ids
        if allowed is not None:
            _check_ids(allowed, model, "allowed_token_ids")
        bias = _bias_of(body.logit_bias, model)
        if allowed is not None and {i for i, b in bias if b <= -100.0}.issuperset(allowed):
            raise ConstraintUnsatisfiableError(
                "allowed_token_ids: logit_bias bans every one of them.", param="allowed_token_ids"
            )
        # Ranking best_of needs the drawn tokens' logprobs even where the client wants none.
        num_logprobs = body.logprobs
        if num_logprobs is None and best_of > num_choices:
            num_logprobs = 0
        if body.max_tokens == 0 and not echo:
            raise InvalidRequestError(
                f"{MAX_TOKENS} may be 0 only with echo.", param=str(MAX_TOKENS)
            )
        return SamplingParams(
            temperature=float(pick("temperature", 1.0)),
            top_p=top_p,
            top_k=max(0, top_k),
            min_p=float(pick("min_p", 0.0)),
            presence_penalty=float(pick("presence_penalty", 0.0)),
            frequency_penalty=float(pick("frequency_penalty", 0.0)),
            repetition_penalty=float(pick("repetition_penalty", 1.0)),
            logit_bias=bias,
            allowed_token_ids=None if allowed is None else tuple(sorted(set(allowed))),
            max_tokens=int(pick("max_tokens", default_max_tokens)),
            min_tokens=int(pick("min_tokens", 0)),
            stop_token_ids=tuple(sorted(set(stop_ids))),
            stop=tuple(s.encode() for s in stop),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            ignore_eos=bool(pick("ignore_eos", False)),
            skip_special_tokens=body.skip_special_tokens is not False,
            num_logprobs=num_logprobs,
        )

    def _speculation(self, body: CompletionBody, task: TaskConfig) -> SpeculationParams:
        own, asked = task.speculation, body.speculation
        drafter, num_draft = own.drafter, own.max_draft_tokens
        if asked is not None and asked.drafter is not None:
            allowed = self._drafters if own.allowed_drafters is None else own.allowed_drafters
            if asked.drafter not in allowed or asked.drafter not in self._drafters:
                raise InvalidRequestError(
                    f"speculation.drafter: {echoed(asked.drafter)} is not available; choose from "
                    f"{', '.join(d for d in self._drafters if d in allowed)}.",
                    param="speculation.drafter",
                )
            drafter = asked.drafter
        if asked is not None and asked.max_draft_tokens is not None:
            most = task.limits.max_draft_tokens
            if most is not None and asked.max_draft_tokens > most:
                raise LimitExceededError(
                    f"speculation.max_draft_tokens: at most {most}; got {asked.max_draft_tokens}.",
                    param="speculation.max_draft_tokens",
                )
            num_draft = asked.max_draft_tokens
        if body.prediction is not None:
            named = asked is not None and asked.drafter is not None
            allowed = self._drafters if own.allowed_drafters is None else own.allowed_drafters
            if not named and PREDICTING_DRAFTER in allowed:
                drafter = PREDICTING_DRAFTER
            if drafter != PREDICTING_DRAFTER or drafter not in self._drafters or num_draft == 0:
                raise UnsupportedFieldError(
                    f"prediction: only the drafter {PREDICTING_DRAFTER} uses it, and here that is "
                    f"{echoed(drafter)} with max_draft_tokens {num_draft}. Leave it out.",
                    param="prediction",
                )
        options, corpus = own.options(), own.corpus
        if asked is not None:
            options = _options_of(asked, task, drafter, options)
            if asked.corpus is not None:
                corpus = self._corpus_of(asked.corpus, task, drafter)
        if drafter == "off" or num_draft == 0:
            return SpeculationParams()
        learns = own.learn and (asked is None or asked.corpus in (None, task.name))
        return SpeculationParams(
            drafter, num_draft, options, corpus, learn_tokens=own.learn_max_tokens if learns else 0
        )

    def _corpus_of(self, name: str, task: TaskConfig, drafter: str) -> str | None:
        """The corpus file that `speculation.corpus` names; None for "off"."""
        at = "speculation.corpus"
        if drafter not in CORPUS_DRAFTERS:
            raise InvalidRequestError(
                f"{at}: the drafter {drafter} uses no corpus; {' and '.join(CORPUS_DRAFTERS)} do.",
                param=at,
            )
        if name == "off":
            return None
        other = self.tasks.get(name)
        allowed = (task.name, *task.speculation.allowed_corpora)
        if other is None or name not in allowed or other.speculation.corpus is None:
            there = [
                n
                for n in dict.fromkeys(allowed)
                if n in self.tasks and self.tasks[n].speculation.corpus is not None
            ]
            raise InvalidRequestError(
                f"{at}: {echoed(name)} is not available; choose from {', '.join([*there, 'off'])}.",
                param=at,
            )
        if (other.model or self._default_model) != (task.model or self._default_model):
            raise InvalidRequestError(f"{at}: the corpus of {name} is for another model.", param=at)
        return other.speculation.corpus

    def check_size(
        self, num_bytes: int, model: ServedModel, max_tokens: int | None, room: int, at: str
    ) -> None:
        """Raise ContextLengthExceededError for a text that cannot fit, without tokenizing it.

        No token has more bytes than the longest one.
        """
        at_least = num_bytes // self._longest[model.name]
        if at_least > room:
            raise _too_long(at, f"at least {at_least}", max_tokens, room)

    async def _prediction_ids(
        self, prediction: PredictionBody, model: ServedModel, room: int
    ) -> tuple[int, ...]:
        text = joined_texts(prediction.content, "prediction.content", "")
        too_long = LimitExceededError(
            f"prediction: it is longer than the model's context, {room} tokens.",
            param="prediction",
        )
        if len(text.encode()) // self._longest[model.name] > room:
            raise too_long
        ids = await self.work(lambda: model.segments.later(text), len(text))
        if len(ids) > room:
            raise too_long
        return tuple(ids)

    async def _prompt_ids(
        self, body: CompletionBody, prompt: str | list[int], model: ServedModel, room: int, at: str
    ) -> tuple[int, ...]:
        if isinstance(prompt, str):
            self.check_size(len(prompt.encode()), model, body.max_tokens, room, at)
            ids = await self.encode(model, prompt, add_special=body.add_special_tokens is not False)
            if not ids:
                raise InvalidRequestError(
                    f"{at}: the prompt has no tokens; it cannot be empty.", param=str(PROMPT)
                )
        else:
            ids = prompt
            for token_id in ids:
                if token_id >= model.vocab_size:
                    raise InvalidRequestError(
                        f"{at}: token id {echoed(token_id)} is not below the vocabulary size, "
                        f"{model.vocab_size}.",
                        param=str(PROMPT),
                    )
        return tuple(ids)

    def _max_tokens(
        self,
        body: CompletionBody,
        task: TaskConfig,
        sampling: SamplingParams,
        num_prompt: int,
        room: int,
        at: str,
    ) -> int:
        most_prompt = task.limits.max_prompt_tokens
        if most_prompt is not None and num_prompt > most_prompt:
            raise ContextLengthExceededError(
                f"{at}: {num_prompt} tokens; the task {task.name} allows {most_prompt}.",
                param=str(PROMPT),
            )
        limits = [v for v in (task.limits.max_tokens, self._limits.max_tokens) if v is not None]
        max_tokens = sampling.max_tokens
        if body.max_tokens is not None:
            if limits and max_tokens > min(limits):
                raise LimitExceededError(
                    f"{MAX_TOKENS}: at most {min(limits)}; got {echoed(max_tokens)}.",
                    param=str(MAX_TOKENS),
                )
            if num_prompt + max_tokens > room:
                raise _too_long(at, str(num_prompt), max_tokens, room)
        else:
            if num_prompt >= room:
                raise _too_long(at, str(num_prompt), None, room)
            max_tokens = min([max_tokens, room - num_prompt, *limits])
        if sampling.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({sampling.min_tokens}) is above {MAX_TOKENS} ({max_tokens}).",
                param="min_tokens",
            )
        return max_tokens


def _options_of(
    asked: SpeculationBody,
    task: TaskConfig,
    drafter: str,
    options: tuple[tuple[str, float | int | str | bool], ...],
) -> tuple[tuple[str, float | int | str | bool], ...]:
    """The task's drafter options with the request's own over them, within the task's limits."""
    merged = dict(options)
    most = task.limits.max_draft_tokens
    for section, given in (("trie", asked.trie), ("mix", asked.mix)):
        if given is None:
            continue
        at = f"speculation.{section}"
        if drafter != section:
            raise InvalidRequestError(
                f"{at}: these are options of the drafter {section}, and the request is drafted by "
                f"{drafter}.",
                param=at,
            )
        for key, value in given.model_dump(by_alias=True, exclude_none=True).items():
            if most is not None and key in ("num_draft", "horizon") and value > most:
                raise LimitExceededError(
                    f"{at}.{key}: at most {most}; got {value}.", param=f"{at}.{key}"
                )
            merged[f"{section}.{key}"] = value
        if section == "trie" and not _prefix_fits(merged):
            raise InvalidRequestError(
                f"{at}.prefix_length: must be below n.", param=f"{at}.prefix_length"
            )
    return tuple(sorted(merged.items()))


def _prefix_fits(options: Mapping[str, Any]) -> bool:
    """Whether the trie's L_p is below n; 3 and 13 are the drafter's defaults."""
    prefix, n = options.get("trie.prefix_length", 3), options.get("trie.n", 13)
    return int(prefix) < int(n)


def _replace_sampling(sampling: SamplingParams, *, max_tokens: int, seed: int) -> SamplingParams:
    values = {name: getattr(sampling, name) for name in SamplingParams.__dataclass_fields__}
    values.update(max_tokens=max_tokens, seed=seed)
    return SamplingParams(**values)


def _refuse_unsupported(body: CompletionBody) -> None:
    if body.suffix:
        raise UnsupportedFieldError(
            "suffix: this model has no infill; only prompts are continued.", param="suffix"
        )
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise UnsupportedFieldError(
            "stream_options.include_obfuscation: chunks are never padded; leave it out.",
            param="stream_options.include_obfuscation",
        )


def _too_long(at: str, num_prompt: str, max_tokens: int | None, room: int) -> Exception:
    extra = "" if not max_tokens else f" and {max_tokens} for the completion ({MAX_TOKENS})"
    return ContextLengthExceededError(
        f"{at}: the model's context holds {room} tokens, but the request has {num_prompt} in the "
        f"prompt{extra}. Prompts are never truncated.",
        param=str(
            MAX_TOKENS if max_tokens and num_prompt.isdigit() and int(num_prompt) < room else PROMPT
        ),
    )


def _vocabulary_of(body: CompletionBody, task: TaskConfig) -> VocabularyParams:
    """The request's mode and window within what the task allows. Raises InvalidRequestError."""
    own, asked = task.vocabulary, body.vocabulary
    mode, verify_every = own.mode, own.verify_every
    if asked is not None and asked.mode is not None:
        if asked.mode not in own.modes:
            raise InvalidRequestError(
                f"vocabulary.mode: the task {task.name} allows {', '.join(own.modes)}; got "
                f"{asked.mode}.",
                param="vocabulary.mode",
            )
        mode = asked.mode
    if asked is not None and asked.verify_every is not None:
        if mode != "exact":
            raise InvalidRequestError(
                f"vocabulary.verify_every is for mode exact; this request's mode is {mode}.",
                param="vocabulary.verify_every",
            )
        verify_every = asked.verify_every
    if mode == "full":
        return VocabularyParams()
    return VocabularyParams(mode, own.profile, (verify_every or 0) if mode == "exact" else 0)


def _prompts_of(prompt: Any) -> list[str | list[int]]:
    """The four shapes of `prompt` as a list of texts or id lists. Raises InvalidRequestError."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise InvalidRequestError(
            f"{PROMPT}: must be a string, a list of strings, a list of token ids or a list of "
            f"lists of token ids; got {echoed(prompt)}.",
            param=str(PROMPT),
        )
    if not prompt:
        raise InvalidRequestError(f"{PROMPT}: the list is empty.", param=str(PROMPT))
    first = prompt[0]
    if isinstance(first, int):
        return [_ids_of(prompt, str(PROMPT))]
    kind = str if isinstance(first, str) else list
    prompts: list[str | list[int]] = []
    for i, item in enumerate(prompt):
        if not isinstance(item, kind):
            raise InvalidRequestError(
                f"{PROMPT}[{i}]: all items must have one type (strings, token ids or lists "
                f"of token ids); got {echoed(item)}.",
                param=str(PROMPT),
            )
        prompts.append(item if isinstance(item, str) else _ids_of(item, f"{PROMPT}[{i}]"))
    return prompts


def _ids_of(items: Any, at: str) -> list[int]:
    if not items:
        raise InvalidRequestError(f"{at}: the list of token ids is empty.", param=str(PROMPT))
    for i, item in enumerate(items):
        if type(item) is not int or item < 0:
            raise InvalidRequestError(
                f"{at}[{i}]: a token id is an integer of 0 or more; got {echoed(item)}.",
                param=str(PROMPT),
            )
    ids: list[int] = items
    return ids


def _stops_of(stop: Any) -> tuple[str, ...]:
    """The stop strings of a string or a list of strings. Raises InvalidRequestError."""
    if not isinstance(stop, (str, list)):
        raise InvalidRequestError(
            f"stop: must be a string or a list of strings; got {echoed(stop)}.", param="stop"
        )
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(
            f"stop: at most {MAX_STOPS} strings; got {len(stops)}.", param="stop"
        )
    for i, text in enumerate(stops):
        at = "stop" if isinstance(stop, str) else f"stop[{i}]"
        if not isinstance(text, str):
            raise InvalidRequestError(f"{at}: must be a string; got {echoed(text)}.", param=at)
        if not text:
            raise InvalidRequestError(f"{at}: a stop string cannot be empty.", param=at)
        if len(text) > MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"{at}: at most {MAX_STOP_CHARS} characters; got {len(text)}.", param=at
            )
    return tuple(dict.fromkeys(stops))


def _check_ids(ids: Sequence[int], model: ServedModel, field_name: str) -> None:
    for token_id in ids:
        if token_id >= model.vocab_size:
            raise InvalidRequestError(
                f"{field_name}: token id {token_id} is not below the vocabulary size, "
                f"{model.vocab_size}.",
                param=field_name,
            )


def _bias_of(
    logit_bias: dict[str, float] | None, model: ServedModel
) -> tuple[tuple[int, float], ...]:
    if not logit_bias:
        return ()
    pairs: dict[int, float] = {}
    for key, bias in logit_bias.items():
        if not _ID.fullmatch(key) or int(key) >= model.vocab_size:
            raise InvalidRequestError(
                f"logit_bias: {echoed(key)} is no token id below {model.vocab_size}.",
                param="logit_bias",
            )
        if int(key) in pairs:
            raise InvalidRequestError(
                f"logit_bias: the id {int(key)} is there twice.", param="logit_bias"
            )
        pairs[int(key)] = float(bias)
    return tuple(sorted(pairs.items()))


def _context_span(
    table: TokenBytes, ids: Sequence[int], after: str | None, before: str | None
) -> tuple[int, int] | None:
    """[start, end) of the ids between the marks, or None when a mark is missing."""
    pieces = table.prompt_bytes(ids, skip_special=False)
    data = b"".join(pieces)
    start_byte, end_byte = 0, len(data)
    if after is not None:
        at = data.find(after.encode())
        if at < 0:
            return None
        start_byte = at + len(after.encode())
    if before is not None:
        end_byte = data.find(before.encode(), start_byte)
        if end_byte < 0:
            return None
    position, start, end = 0, len(ids), len(ids)
    for i, piece in enumerate(pieces):
        if position >= start_byte and start == len(ids):
            start = i
        if position >= end_byte:
            end = i
            break
        position += len(piece)
    return (start, end) if start < end else None


def _echo_text(
    model: ServedModel, prompt: str | list[int], ids: Sequence[int], sampling: SamplingParams
) -> PromptText:
    pieces = model.table.prompt_bytes(ids, skip_special=sampling.skip_special_tokens)
    if isinstance(prompt, str):
        return PromptText(prompt, tuple(pieces))
    return PromptText(b"".join(pieces).decode(errors="replace"), tuple(pieces))
