"""How a body's choices are drawn: their number, sampling, lengths, stops."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.api.fields import LOGPROBS, MAX_TOKENS, PROMPT
from server.api.intake_prompts import too_long
from server.api.protocol import MAX_STOP_CHARS, MAX_STOPS, CompletionBody
from server.api.served_model import ServedModel
from server.config import LimitsConfig, TaskConfig
from server.errors import (
    ConstraintUnsatisfiableError,
    ContextLengthExceededError,
    InvalidRequestError,
    LimitExceededError,
    UnsupportedFieldError,
    echoed,
)
from server.types import SamplingParams

LEAST_TEMPERATURE = 1e-30
"""Below it logits divide to infinity (fp32 ends at 3e38). Just above it the likeliest id already
has all the probability, so treating lower ones as greedy changes no choice."""

_ID = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True, slots=True)
class Choices:
    """How many choices a request makes. num: n of the body. best_of: choices that are made. echo:
    whether they begin with the prompt. stream: whether they are streamed."""

    num: int
    best_of: int
    echo: bool
    stream: bool


def choices_of(body: CompletionBody, task: TaskConfig, limits: LimitsConfig) -> Choices:
    """How many choices are made. Raises InvalidRequestError and LimitExceededError."""
    n = body.n or 1
    best_of = body.best_of if body.best_of is not None else n
    stream = bool(body.stream)
    most = min(limits.max_choices, task.limits.max_choices or limits.max_choices)
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
    options = body.stream_options
    if (
        options is not None
        and not stream
        and (options.include_usage or options.continuous_usage_stats)
    ):
        raise InvalidRequestError(
            "stream_options is allowed only with stream.", param="stream_options"
        )
    most = task.limits.max_logprobs if task.limits.max_logprobs is not None else 20
    if body.logprobs is not None and body.logprobs > most:
        raise LimitExceededError(
            f"{LOGPROBS}: at most {most}; got {body.logprobs}.", param=str(LOGPROBS)
        )
    _check_logprob_ids(body, most if task.limits.max_logprobs is not None else None)
    if body.prompt_logprobs is not None and body.prompt_logprobs > most:
        raise LimitExceededError(
            f"prompt_logprobs: at most {most}; got {body.prompt_logprobs}.", param="prompt_logprobs"
        )
    if body.prompt_logprobs is not None and stream:
        raise InvalidRequestError(
            "prompt_logprobs cannot be streamed: they are told with the whole answer.",
            param="prompt_logprobs",
        )
    return Choices(n, best_of, bool(body.echo), stream)


def sampling_of(
    body: CompletionBody,
    task: TaskConfig,
    model: ServedModel,
    choices: Choices,
    default_max_tokens: int,
) -> SamplingParams:
    """How the choices are drawn: the request's values, else the task's, else the model's
    (generation_config.json), else OpenAI's.

    Raises InvalidRequestError and its kin. The seed and the room for max_tokens come later.
    """
    defaults = task.sampling

    def pick(name: str, fallback: Any) -> Any:
        value = getattr(body, name)
        if value is None:
            value = getattr(defaults, name)
        if value is None:
            value = getattr(model.sampling, name)
        return fallback if value is None else value

    top_p, top_k = float(pick("top_p", 1.0)), int(pick("top_k", 0))
    if top_p == 0.0:  # OpenAI allows it; it keeps the most likely id alone
        top_p, top_k = 1.0, 1
    temperature = float(pick("temperature", 1.0))
    if temperature < LEAST_TEMPERATURE:
        temperature = 0.0
    stop = _stops_of(body.stop) if body.stop is not None else defaults.stop
    stop_ids = defaults.stop_token_ids if body.stop_token_ids is None else body.stop_token_ids
    _check_ids(stop_ids, model, "stop_token_ids")
    allowed = body.allowed_token_ids
    if allowed is not None:
        _check_ids(allowed, model, "allowed_token_ids")
    bias = _with_bad_words(_bias_of(body.logit_bias, model), body.bad_words, model)
    if allowed is not None and {i for i, b in bias if b <= -100.0}.issuperset(allowed):
        raise ConstraintUnsatisfiableError(
            "allowed_token_ids: logit_bias and bad_words ban every one of them.",
            param="allowed_token_ids",
        )
    # Ranking best_of needs the drawn tokens' logprobs even where the client wants none.
    named = tuple(sorted(set(body.logprob_token_ids or ())))
    _check_ids(named, model, "logprob_token_ids")
    num_logprobs = 0 if named else body.logprobs
    if num_logprobs is None and choices.best_of > choices.num:
        num_logprobs = 0
    if body.max_tokens == 0 and not choices.echo:
        raise InvalidRequestError(f"{MAX_TOKENS} may be 0 only with echo.", param=str(MAX_TOKENS))
    return SamplingParams(
        temperature=temperature,
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
        logprob_token_ids=named,
    )


def _check_logprob_ids(body: CompletionBody, most: int | None) -> None:
    """most: the task's own limit. Raises InvalidRequestError and LimitExceededError."""
    named = body.logprob_token_ids
    if not named:
        return
    if body.logprobs is None or body.max_tokens == 0:
        raise InvalidRequestError(
            "logprob_token_ids names what logprobs tells of the tokens that are drawn: it is "
            "allowed only with logprobs, and with tokens to draw.",
            param="logprob_token_ids",
        )
    if most is not None and len(named) > most:
        raise LimitExceededError(
            f"logprob_token_ids: at most {most}; got {len(named)}.", param="logprob_token_ids"
        )


def max_tokens_of(
    body: CompletionBody,
    task: TaskConfig,
    server_limit: int | None,
    sampling: SamplingParams,
    num_prompt: int,
    room: int,
    at: str,
) -> int:
    """How long an answer may be, after num_prompt tokens, where `room` tokens fit.

    A max_tokens that the client did not give is reduced to the room. Raises LimitExceededError,
    ContextLengthExceededError and InvalidRequestError.
    """
    most_prompt = task.limits.max_prompt_tokens
    if most_prompt is not None and num_prompt > most_prompt:
        raise ContextLengthExceededError(
            f"{at}: {num_prompt} tokens; the task {task.name} allows {most_prompt}.",
            param=str(PROMPT),
        )
    limits = [v for v in (task.limits.max_tokens, server_limit) if v is not None]
    max_tokens = sampling.max_tokens
    if body.max_tokens is not None:
        if limits and max_tokens > min(limits):
            raise LimitExceededError(
                f"{MAX_TOKENS}: at most {min(limits)}; got {echoed(max_tokens)}.",
                param=str(MAX_TOKENS),
            )
        if num_prompt + max_tokens > room:
            raise too_long(at, str(num_prompt), max_tokens, room)
    else:
        if num_prompt >= room:
            raise too_long(at, str(num_prompt), None, room)
        max_tokens = min([max_tokens, room - num_prompt, *limits])
    if sampling.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens ({sampling.min_tokens}) is above {MAX_TOKENS} ({max_tokens}).",
            param="min_tokens",
        )
    return max_tokens


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


def _with_bad_words(
    bias: tuple[tuple[int, float], ...], words: Sequence[str] | None, model: ServedModel
) -> tuple[tuple[int, float], ...]:
    """The bias that bans words of one token, at a text's start and behind a space; one that begins
    with a space only behind one.

    Raises UnsupportedFieldError for a word of several tokens: each of them may stand elsewhere.
    """
    if not words:
        return bias
    banned: set[int] = set()
    for i, word in enumerate(words):
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
                f"bad_words[{i}]: {echoed(word, 40)} is not one token of this model, and only such "
                "words can be banned.",
                param=f"bad_words[{i}]",
            )
        banned |= ids
    return tuple(sorted({**dict(bias), **dict.fromkeys(banned, -100.0)}.items()))
