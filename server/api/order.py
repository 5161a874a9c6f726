"""From a Generation to an Order of frozen Requests: the task's defaults and limits, ids, the seed.

A route that generates makes a Generation of its body: the fields that all routes share, and what it
calls by names of its own. `Orders.order` decides the rest, in this order: how many choices;
sampling (the request's value, else the task's, else the model's, else OpenAI's default); the
grammar; speculation within the task's limits; the ids of every prompt; whether they fit. Then each
Request is built, once.

A value above a limit is refused with a 400 that names the field. Nothing is clamped or truncated
but what the client did not give: a max_tokens, to the room that the prompt leaves, a min_tokens, to
max_tokens, and what would hold off a grammar's end.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from drafters.catalog import Need, spec_of, that_use
from drafters.options import OptionError
from server.api.bodies import (
    BodyPart,
    GenerationBody,
    PredictionBody,
    SpeculationBody,
    VocabularyBody,
    joined_texts,
)
from server.api.grammars import (
    ENDS,
    GrammarChecker,
    OutputFormat,
    Wanted,
    check_with_sampling,
    grammar_of,
)
from server.api.schemas import SchemaRules
from server.api.served_model import Catalog, ServedModel, TokenIdNames
from server.api.tools import ToolReader
from server.config import LimitsConfig, TaskConfig
from server.errors import (
    ConstraintUnsatisfiableError,
    ContextLengthExceededError,
    InvalidRequestError,
    LimitExceededError,
    UnsupportedFieldError,
    echoed,
)
from server.token_bytes import TokenBytes, TokenNames
from server.types import (
    BANNED,
    INT31,
    PARAMETERS,
    Request,
    SamplingParams,
    SpeculationParams,
    VocabularyParams,
    scope_of,
)

LONG_TEXT_CHARS = 4096
"""Longer texts are tokenized in a thread: 4,096 characters take about a millisecond."""

_MASK64 = (1 << 64) - 1
_ID = re.compile(r"[0-9]{1,10}")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Target:
    """What a `model` field names, found once, and who asks.

    label: what the client called it. room: tokens that its engines can hold. tenant: the API key's
    id, "" without keys.
    """

    label: str
    task: TaskConfig
    model: ServedModel
    room: int
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a client wants to be generated, in the words of no route.

    body: the fields that all routes share. prompts: texts, or ids. max_tokens: what the client
    gave; fills_context: whether there is no limit where it gave none and the task has none.
    logprobs: how many of the likeliest tokens are told, None for no logprobs. form: the route's
    format of the output; grammar: a checked one that the output must match instead. new_reader: of
    a choice's text, where tools may be called; forces_call: whether one must be. table,
    token_names: of the text and of logprobs, default the model's.
    """

    body: GenerationBody
    prompts: Sequence[str | list[int]]
    max_tokens: int | None
    fills_context: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool = False
    adds_special_tokens: bool = True
    truncate_to: int | None = None
    form: OutputFormat | None = None
    grammar: Wanted | None = None
    new_reader: Callable[[], ToolReader] | None = None
    forces_call: bool = False
    table: TokenBytes | None = None
    token_names: TokenNames | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """A Generation as Requests for the engines, and what its answer needs.

    requests: one per prompt, in order; each runs best_of choices. num_choices: n. grammar_field:
    where the grammar comes from, "" without one. num_truncated: tokens cut off the prompts.
    body, table, token_names: as in Generation.
    """

    request_id: str
    target: Target
    generation: Generation
    body: GenerationBody
    requests: tuple[Request, ...]
    num_choices: int
    grammar_field: str
    num_truncated: int
    table: TokenBytes
    token_names: TokenNames | TokenIdNames
    created: int

    @property
    def needs_engine(self) -> bool:
        """False when there is nothing to compute: max_tokens 0 without logprobs of the prompt."""
        first = self.requests[0]
        return first.sampling.max_tokens > 0 or first.echo_logprobs is not None


class Orders:
    """Turns Generations into Orders.

    drafters: names that engines know. limits: the server's. Owns two threads for tokenizing long
    texts, and those of `grammars`; `close` ends them.
    """

    def __init__(self, catalog: Catalog, drafters: Sequence[str], limits: LimitsConfig) -> None:
        self.catalog = catalog
        self.limits = limits
        self.grammars = GrammarChecker()
        self._drafters = tuple(drafters)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()

    async def order(self, generation: Generation, target: Target, request_id: str) -> Order:
        """The order of one Generation. Raises the client's errors of server.errors (4xx)."""
        arrival_s = time.monotonic()
        body, task, model = generation.body, target.task, target.model
        num_choices, best_of = self._choices(generation, task)
        prompts = generation.prompts
        most = min(self.limits.max_prompts, task.limits.max_prompts or self.limits.max_prompts)
        prompt_at, max_tokens_at = body.called("prompt"), body.called("max_tokens")
        if len(prompts) > most:
            raise _above(most, len(prompts), prompt_at)
        sampling = self._sampling(generation, target, best_of > num_choices)
        wanted = generation.grammar
        if wanted is None and (generation.form or body.structured_outputs):
            rules, scope = rules_of(body, task), scope_of(target.tenant, body.cache_salt or "")
            wanted = await self.work(
                lambda: grammar_of(body, generation.form, rules), body.num_bytes
            )
            await self.grammars.check(*wanted, scope)
        spec, grammar_field = wanted or (None, "")
        if spec is not None:
            check_with_sampling(body)
            sampling |= ENDS
        wished, least = sampling["max_tokens"], sampling["min_tokens"]
        speculation = speculation_of(body, task, self._drafters, self.catalog)
        if body.prediction is not None:
            speculation["prediction_ids"] = await self._prediction_ids(body.prediction, target)
        drafts = "drafter" in speculation
        marks = (body.context or task.speculation.context) if drafts else None
        vocabulary = vocabulary_of(body, task)
        timeout_s = tighter(self.limits.queue_timeout_s, task.limits.queue_timeout_s)
        echo_logprobs = [body.prompt_logprobs, generation.logprobs if generation.echo else None]
        requests, num_truncated, num_chars = [], 0, sum(map(len, prompts))
        for i, prompt in enumerate(prompts):
            at = prompt_at if len(prompts) == 1 else f"{prompt_at}[{i}]"
            ids = await self._prompt_ids(generation, prompt, target, at, num_chars)
            if generation.truncate_to is not None:
                num_truncated += max(0, len(ids) - generation.truncate_to)
                ids = ids[-generation.truncate_to :]
            max_tokens = self._max_tokens(generation, target, wished, len(ids), at)
            if least > max_tokens and body.min_tokens is not None:
                raise InvalidRequestError(
                    f"{least} is above {max_tokens_at} ({max_tokens}).",
                    at=body.called("min_tokens"),
                )
            sampling |= {"max_tokens": max_tokens, "min_tokens": min(least, max_tokens)}
            seed = body.seed if body.seed is not None else task.sampling.seed
            fresh = seed is None or seed == -1
            sampling["seed"] = secrets.randbits(64) if fresh else seed & _MASK64
            if marks is not None:
                speculation["context_span"] = context_span(
                    model.table, ids, marks.after, marks.before
                )
            requests.append(
                Request(
                    request_id=f"{request_id}-{i}",
                    task=task.name,
                    model=model.name,
                    adapter=model.adapter_id,
                    prompt_ids=tuple(ids),
                    sampling=SamplingParams(**sampling),
                    speculation=SpeculationParams(**speculation),
                    vocabulary=vocabulary,
                    num_choices=best_of,
                    echo_logprobs=max((n for n in echo_logprobs if n is not None), default=None),
                    cache_salt=body.cache_salt or "",
                    tenant=target.tenant,
                    priority=body.priority or 0,
                    arrival_s=arrival_s,
                    queue_timeout_s=timeout_s or 0.0,
                    grammar=spec,
                    report_sources=bool(body.include_token_sources),
                    report_rejected=bool(body.include_rejected_drafts),
                )
            )
        total = sum(r.num_choices * (len(r.prompt_ids) + r.sampling.max_tokens) for r in requests)
        if total > self.limits.max_request_tokens:
            raise LimitExceededError(
                f"The request could take {total} tokens (prompts x best_of x (prompt + "
                f"{max_tokens_at})); the limit is {self.limits.max_request_tokens}.",
                param=max_tokens_at,
            )
        names_of_tokens: TokenNames | TokenIdNames | None = generation.token_names
        if body.return_tokens_as_token_ids:
            names_of_tokens = TokenIdNames()
        return Order(
            request_id,
            target,
            generation,
            body,
            tuple(requests),
            num_choices,
            grammar_field,
            num_truncated,
            table=generation.table or model.table,
            token_names=model.table.names if names_of_tokens is None else names_of_tokens,
            created=int(time.time()),
        )

    # --- texts and ids ---

    async def work(self, do: Callable[[], _T], num_chars: int) -> _T:
        """Run `do`, which reads num_chars characters: here, or in a thread if they are many."""
        if num_chars < LONG_TEXT_CHARS:
            return do()
        return await asyncio.get_running_loop().run_in_executor(self._threads, do)

    def check_size(
        self, num_bytes: int, target: Target, max_tokens: int | None, body: GenerationBody
    ) -> None:
        """Raise ContextLengthExceededError for a text that cannot fit, without tokenizing it.

        No token has more bytes than the longest one.
        """
        at_least = num_bytes // target.model.longest_token
        if at_least > target.room:
            at = body.called("prompt")
            raise _too_long(body, at, at_least, max_tokens, target.room, least=True)

    async def _prompt_ids(
        self,
        generation: Generation,
        prompt: str | list[int],
        target: Target,
        at: str,
        num_chars: int,
    ) -> list[int]:
        """num_chars: of all prompts."""
        model, body = target.model, generation.body
        if isinstance(prompt, str):
            if generation.truncate_to is None:
                self.check_size(len(prompt.encode()), target, generation.max_tokens, body)
            special = generation.adds_special_tokens
            ids = await self.work(partial(model.encoded, prompt, special), num_chars)
            if not ids:
                raise InvalidRequestError(
                    "the prompt has no tokens; it cannot be empty.",
                    at=at,
                    param=body.called("prompt"),
                )
            return ids
        model.check_ids(prompt, at, body.called("prompt"))
        return prompt

    async def _prediction_ids(self, prediction: PredictionBody, target: Target) -> tuple[int, ...]:
        text = joined_texts(prediction.content, "prediction.content", "")
        ids: list[int] = []
        if len(text.encode()) // target.model.longest_token <= target.room:
            ids = await self.work(lambda: target.model.segments.later(text), len(text))
            if len(ids) <= target.room:
                return tuple(ids)
        raise LimitExceededError(
            f"longer than the model's context, {target.room} tokens.", at="prediction"
        )

    # --- checks ---

    def _choices(self, generation: Generation, task: TaskConfig) -> tuple[int, int]:
        """(n, best_of). Raises InvalidRequestError and LimitExceededError."""
        body = generation.body
        n = body.n or 1
        best_of = n if generation.best_of is None else generation.best_of
        most = min(self.limits.max_choices, task.limits.max_choices or self.limits.max_choices)
        if max(n, best_of) > most:
            raise _above(most, max(n, best_of), "n" if n > most else "best_of")
        if best_of < n:
            raise InvalidRequestError(
                f"must be at least n; got best_of {best_of} and n {n}.", at="best_of"
            )
        if body.stream and best_of != n:
            raise InvalidRequestError(
                "above n, it cannot be streamed: the best are known at the end.", at="best_of"
            )
        options = body.stream_options
        if options is not None:
            if not body.stream and (options.include_usage or options.continuous_usage_stats):
                raise InvalidRequestError("allowed only with stream.", at="stream_options")
            if options.continuous_usage_stats and not options.include_usage:
                raise InvalidRequestError(
                    "allowed only with include_usage.", at="stream_options.continuous_usage_stats"
                )
            if options.include_obfuscation:
                raise UnsupportedFieldError(
                    "chunks are never padded; leave it out.",
                    at="stream_options.include_obfuscation",
                )
        limit = task.limits.max_logprobs
        most = 20 if limit is None else limit
        for name, num in (
            ("logprobs", generation.logprobs), ("prompt_logprobs", body.prompt_logprobs)
        ):  # fmt: skip
            if num is not None and num > most:
                raise _above(most, num, body.called(name))
        if body.prompt_logprobs is not None and body.stream:
            raise InvalidRequestError(
                "cannot be streamed: they are told with the whole answer.", at="prompt_logprobs"
            )
        if body.logprob_token_ids:
            at = "logprob_token_ids"
            if generation.logprobs is None or generation.max_tokens == 0:
                raise InvalidRequestError(
                    "names what logprobs tells of the tokens that are drawn: it is allowed only "
                    "with logprobs, and with tokens to draw.",
                    at=at,
                )
            if limit is not None and len(body.logprob_token_ids) > limit:
                raise _above(limit, len(body.logprob_token_ids), at)
        return n, best_of

    def _sampling(self, generation: Generation, target: Target, is_ranked: bool) -> dict[str, Any]:
        """Fields of SamplingParams; max_tokens and seed are decided by prompt. is_ranked: whether
        the best of the choices are looked for. Raises InvalidRequestError and its kin."""
        body, model, defaults = generation.body, target.model, target.task.sampling
        values: dict[str, Any] = {}
        for one in PARAMETERS:
            name = one.name
            value = getattr(body, name, None)
            if value is None and one.in_tasks:
                value = getattr(defaults, name)
                if value is None and one.in_models:
                    value = getattr(model.sampling, name)
            values[name] = one.default if value is None else one.kind(value)
        values = SamplingParams.canonical(values)
        if generation.max_tokens is not None:
            values["max_tokens"] = generation.max_tokens
        elif generation.fills_context and defaults.max_tokens is None:
            values["max_tokens"] = INT31
        stop = defaults.stop if body.stop is None else body.stop
        stop_ids = defaults.stop_token_ids if body.stop_token_ids is None else body.stop_token_ids
        allowed, named = body.allowed_token_ids, body.logprob_token_ids or ()
        listed = ("stop_token_ids", stop_ids), ("allowed_token_ids", allowed or ())
        for at, ids in (*listed, ("logprob_token_ids", named)):
            if ids:
                model.check_ids(ids, at)
        bias = _bias_of(body, model)
        if allowed is not None and {i for i, b in bias if b <= BANNED}.issuperset(allowed):
            raise ConstraintUnsatisfiableError(
                "logit_bias and bad_words ban every one of them.", at="allowed_token_ids"
            )
        if generation.max_tokens == 0 and not generation.echo:
            raise InvalidRequestError("may be 0 only with echo.", at=body.called("max_tokens"))
        # Ranking needs the drawn tokens' logprobs even where the client wants none.
        num_logprobs = 0 if named else generation.logprobs
        values["num_logprobs"] = 0 if num_logprobs is None and is_ranked else num_logprobs
        values["logprob_token_ids"] = tuple(sorted(set(named)))
        values["logit_bias"] = bias
        values["allowed_token_ids"] = None if allowed is None else tuple(sorted(set(allowed)))
        values["stop_token_ids"] = tuple(sorted(set(stop_ids)))
        stops = [stop] if isinstance(stop, str) else dict.fromkeys(stop)
        values["stop"] = tuple([s.encode() for s in stops])
        return values

    def _max_tokens(
        self, generation: Generation, target: Target, wished: int, num_prompt: int, at: str
    ) -> int:
        """How long an answer may be behind num_prompt tokens. wished: the client's max_tokens, else
        the default, which is reduced to the room. Raises LimitExceededError and
        ContextLengthExceededError."""
        body, task, room = generation.body, target.task, target.room
        most_prompt = task.limits.max_prompt_tokens
        if most_prompt is not None and num_prompt > most_prompt:
            raise ContextLengthExceededError(
                f"{num_prompt} tokens; the task {task.name} allows {most_prompt}.",
                at=at,
                param=body.called("prompt"),
            )
        most = tighter(task.limits.max_tokens, self.limits.max_tokens)
        if generation.max_tokens is None:
            if num_prompt >= room:
                raise _too_long(body, at, num_prompt, None, room)
            return int(min(wished, room - num_prompt, wished if most is None else most))
        if most is not None and wished > most:
            raise _above(most, wished, body.called("max_tokens"))
        if num_prompt + wished > room:
            raise _too_long(body, at, num_prompt, wished, room)
        return wished


_FULL = VocabularyParams()
_NO_SPECULATION, _NO_VOCABULARY = SpeculationBody(), VocabularyBody()


def tighter(a: float | None, b: float | None) -> float | None:
    """The lower of two limits, None where there is none."""
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def rules_of(body: GenerationBody, task: TaskConfig) -> SchemaRules:
    """How the request's JSON schemas are taken: as it says, else as its task does."""
    opens, lenient = body.additional_properties, body.lenient_schemas
    return SchemaRules(
        closes=not (task.additional_properties if opens is None else opens),
        is_lenient=task.lenient_schemas if lenient is None else lenient,
    )


def _too_long(
    body: GenerationBody,
    at: str,
    num_prompt: int,
    max_tokens: int | None,
    room: int,
    *,
    least: bool = False,
) -> ContextLengthExceededError:
    """The error of a text that does not fit. least: num_prompt is a lower bound."""
    limit = body.called("max_tokens")
    extra = f" and {max_tokens} for the completion ({limit})" if max_tokens else ""
    has = f"at least {num_prompt}" if least else str(num_prompt)
    return ContextLengthExceededError(
        f"the model's context holds {room} tokens, but the request has {has} in the prompt{extra}. "
        "Prompts are never truncated.",
        at=at,
        param=limit if max_tokens and not least and num_prompt < room else body.called("prompt"),
    )


def context_span(
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
    places = [0, *itertools.accumulate(map(len, pieces))]
    start, end = bisect_left(places, start_byte), bisect_left(places, end_byte)
    return (start, end) if start < end else None


def _bias_of(body: GenerationBody, model: ServedModel) -> tuple[tuple[int, float], ...]:
    """(id, bias) pairs of logit_bias and bad_words, ids ascending.

    A word of one token is banned at a text's start and behind a space; one that begins with a space
    only behind one. Raises UnsupportedFieldError for a word of several tokens: each of them may
    stand elsewhere.
    """
    pairs: dict[int, float] = {}
    for key, bias in (body.logit_bias or {}).items():
        if not _ID.fullmatch(key) or int(key) >= model.vocab_size:
            raise InvalidRequestError(
                f"{echoed(key)} is no token id below {model.vocab_size}.", at="logit_bias"
            )
        if int(key) in pairs:
            raise InvalidRequestError(f"the id {int(key)} is there twice.", at="logit_bias")
        pairs[int(key)] = float(bias)
    for i, word in enumerate(body.bad_words or ()):
        plain = word.lstrip(" ")
        alone, behind = model.segments.later(plain), model.segments.later(f" {plain}")
        ids = {behind[-1]} if plain else set()
        if word == plain:
            # " word" may be a token of its own, or a space and the token that is banned already.
            fits = len(alone) == 1 and (len(behind) == 1 or behind[-1:] == alone)
            ids.update(alone[:1])
        else:
            fits = len(behind) == 1
        if not plain or not fits:
            raise UnsupportedFieldError(
                f"{echoed(word, 40)} is not one token of this model, and only such words can be "
                "banned.",
                at=f"bad_words[{i}]",
            )
        pairs |= dict.fromkeys(ids, BANNED)
    return tuple(sorted(pairs.items()))


# --- how a request drafts, and which part of the head it computes --------------------------------


_Options = tuple[tuple[str, float | int | str | bool], ...]


def speculation_of(
    body: GenerationBody, task: TaskConfig, drafters: Sequence[str], catalog: Catalog
) -> dict[str, Any]:
    """How a request drafts, within its task's limits: fields of SpeculationParams. drafters: that
    engines know. Raises InvalidRequestError and its kin."""
    own, asked = task.speculation, body.speculation or _NO_SPECULATION
    drafter, num_draft = own.drafter, own.max_draft_tokens
    allowed = drafters if own.allowed_drafters is None else own.allowed_drafters
    if asked.drafter is not None:
        if asked.drafter not in allowed or asked.drafter not in drafters:
            raise InvalidRequestError(
                f"{echoed(asked.drafter)} is not available; choose from "
                f"{', '.join(d for d in drafters if d in allowed)}.",
                at="speculation.drafter",
            )
        drafter = asked.drafter
    if asked.max_draft_tokens is not None:
        num_draft = asked.max_draft_tokens
        most = task.limits.max_draft_tokens
        if most is not None and num_draft > most:
            raise _above(most, num_draft, "speculation.max_draft_tokens")
    if body.prediction is not None:
        # A drafter that does not use predictions would ignore the field: it is refused.
        predicting = [name for name in that_use(Need.PREDICTION) if name in drafters]
        able = [name for name in predicting if name in allowed]
        if asked.drafter is None and drafter not in predicting and able:
            drafter = able[0]
        if drafter not in predicting or num_draft == 0:
            raise UnsupportedFieldError(
                f"only the drafter {' or '.join(that_use(Need.PREDICTION))} uses it, and here that "
                f"is {echoed(drafter)} with max_draft_tokens {num_draft}. Leave it out.",
                at="prediction",
            )
    corpus = own.corpus
    if asked.corpus is not None:
        corpus = _corpus_of(asked.corpus, task, drafter, catalog)
    drafts = drafter != "off" and num_draft > 0
    # The options that the request sets, by drafter.
    given = {
        name: member.model_dump(by_alias=True, exclude_none=True)
        for name, member in body.speculation or ()
        if isinstance(member, BodyPart)
    }
    options = _options_of(given, task, drafter) if given or drafts else ()
    if not drafts:
        return {"max_draft_tokens": 0}
    # Outputs are learned where they can be drafted from: by the task, or by this request.
    able_to_learn = {drafter, own.drafter} & set(that_use(Need.LEARNED))
    learns = own.learn and able_to_learn and asked.corpus in (None, task.name)
    return {
        "drafter": drafter,
        "max_draft_tokens": num_draft,
        "options": options,
        "corpus": corpus,
        "learn_tokens": own.learn_max_tokens if learns else 0,
        "persists": own.learn == "persist",
    }


def _above(most: float, num: float, at: str) -> LimitExceededError:
    return LimitExceededError(f"at most {most}; got {num}.", at=at)


def _corpus_of(name: str, task: TaskConfig, drafter: str, catalog: Catalog) -> str | None:
    """The corpus file that `speculation.corpus` names; None for "off"."""
    at = "speculation.corpus"
    users = that_use(Need.CORPUS)
    if drafter not in users:
        raise InvalidRequestError(
            f"the drafter {drafter} uses no corpus; {' and '.join(users)} do.", at=at
        )
    if name == "off":
        return None
    other = catalog.tasks.get(name)
    allowed = (task.name, *task.speculation.allowed_corpora)
    if other is None or name not in allowed or other.speculation.corpus is None:
        there = [
            n
            for n in dict.fromkeys(allowed)
            if n in catalog.tasks and catalog.tasks[n].speculation.corpus is not None
        ]
        raise InvalidRequestError(
            f"{echoed(name)} is not available; choose from {', '.join([*there, 'off'])}.", at=at
        )
    if catalog.base_of(other) is not catalog.base_of(task):
        raise InvalidRequestError(f"the corpus of {name} is for another model.", at=at)
    return other.speculation.corpus


def _options_of(asked: Mapping[str, Mapping[str, Any]], task: TaskConfig, drafter: str) -> _Options:
    """The task's drafter options with the request's own (by drafter) over them, within the task's
    limits."""
    merged = dict(task.speculation.options())
    for name, given in asked.items():
        at = f"speculation.{name}"
        if drafter != name:
            raise InvalidRequestError(
                f"these are options of the drafter {name}, and the request is drafted by "
                f"{drafter}.",
                at=at,
            )
        spec, most = spec_of(name), task.limits.max_draft_tokens
        for key, value in given.items():
            if most is not None and spec.option(key).counts_nodes and value > most:
                raise _above(most, value, f"{at}.{key}")
            merged[f"{name}.{key}"] = value
        own = {one.name: merged.get(f"{name}.{one.key}", one.default) for one in spec.fields}
        try:
            spec.options(**own)
        except OptionError as error:
            raise InvalidRequestError(f"{error.problem}.", at=f"{at}.{error.option}") from None
    return tuple(sorted(merged.items()))


def vocabulary_of(body: GenerationBody, task: TaskConfig) -> VocabularyParams:
    """The request's mode and verify_every within what the task allows. Raises
    InvalidRequestError."""
    own, asked = task.vocabulary, body.vocabulary or _NO_VOCABULARY
    mode, verify_every = own.mode, own.verify_every
    if asked.mode is not None:
        if asked.mode not in own.modes:
            raise InvalidRequestError(
                f"the task {task.name} allows {', '.join(own.modes)}; got {asked.mode}.",
                at="vocabulary.mode",
            )
        mode = asked.mode
    if asked.verify_every is not None:
        if mode != "exact":
            raise InvalidRequestError(
                f"for mode exact; this request's mode is {mode}.", at="vocabulary.verify_every"
            )
        verify_every = asked.verify_every
    if mode == "full":
        return _FULL
    return VocabularyParams(mode, own.profile, (verify_every or 0) if mode == "exact" else 0)
