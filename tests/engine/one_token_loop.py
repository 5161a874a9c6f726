"""The one-token loop: what every engine schedule must reproduce, written without the engine.

No blocks, no batches, no drafts: the FakeModel over the whole text, one draw at a time, and the
rules for ends written down a second time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from server.engine.batch import DrawParams
from server.types import Request, TokenLogprob
from tests.fakes.fake_runner import FakeModel
from tests.fakes.reference_sampler import draw, token_logprob


@dataclass
class Outcome:
    """What one choice must give."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | bytes | None = None


def _as_sent(lp: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(lp.token_id, float(np.float32(lp.logprob)), lp.rank, lp.top)


def _stop_string(request: Request, token_bytes: list[bytes], ids: list[int]) -> bytes | None:
    s = request.sampling
    text = b"".join(token_bytes[i] for i in ids)
    before = len(text) - len(token_bytes[ids[-1]])
    for end in range(before + 1, len(text) + 1):
        ending = [stop for stop in s.stop if text[:end].endswith(stop)]
        if ending:
            return max(ending, key=len)
    return None


def one_token_loop(
    model: FakeModel,
    request: Request,
    choice_id: int,
    *,
    eos: tuple[int, ...],
    max_model_len: int,
    token_bytes: list[bytes],
    slice_ids: set[int] | None = None,
    grammar_tokenizer: Any = None,
) -> Outcome:
    """Run one choice of a request to its end.

    slice_ids: the only ids that can be drawn, unless the request's constraints leave none of them.
    """
    s = request.sampling
    out = Outcome()
    tokens: list[int] = []
    kv = np.empty(max_model_len + 1, np.uint64)

    def feed(token: int) -> int:
        at = len(tokens)
        kv[at] = value = model.row_hash(token, at, kv[:at])
        tokens.append(token)
        return value

    if request.echo_logprobs is not None:
        out.prompt_logprobs.append(None)
    row = 0
    for i, token in enumerate(request.prompt_ids):
        row = feed(token)
        if request.echo_logprobs is not None and i + 1 < len(request.prompt_ids):
            target = request.prompt_ids[i + 1]
            lp = token_logprob(model.logits(row, tokens), target, request.echo_logprobs)
            out.prompt_logprobs.append(_as_sent(lp))
    ends = set(s.stop_token_ids) | (set() if s.ignore_eos else set(eos))
    banned = np.asarray(sorted(ends) if s.min_tokens else [], np.int32)
    prompt = set(request.prompt_ids) if s.repetition_penalty != 1.0 else set()
    matcher = None
    if request.grammar is not None:
        matcher = grammar_tokenizer.matcher(request.grammar)
    while True:
        if len(out.ids) >= s.max_tokens or len(tokens) >= max_model_len:
            out.finish_reason = "length"
            return out
        counts = Counter(out.ids if s.has_penalties else ())
        seen = sorted(set(counts) | prompt)
        params = DrawParams(
            s,
            choice_id,
            banned,
            np.asarray(seen, np.int32),
            np.asarray([counts[i] for i in seen], np.int32),
            np.asarray([i in prompt for i in seen], np.int32),
            len(out.ids),
        )
        logits = shown = model.logits(row, tokens)
        mask = None
        if matcher is not None:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            padded = np.zeros(-(-model.vocab_size // 32) * 4, np.uint8)
            padded[: bits.shape[0]] = bits[: padded.shape[0]]
            mask = padded.view(np.uint32)
        if slice_ids is not None:
            inside = sorted(slice_ids)
            shown = np.full_like(logits, -np.inf)
            shown[inside] = logits[inside]
        try:
            try:
                token = draw(shown, params, len(tokens), [], mask)
            except ValueError:
                token = draw(logits, params, len(tokens), [], mask)
                shown = logits
        except ValueError:
            out.finish_reason = "error"
            return out
        out.ids.append(token)
        if s.num_logprobs is not None:
            told = token_logprob(shown, token, s.num_logprobs, s.logprob_token_ids)
            out.logprobs.append(_as_sent(told))
        if not s.ignore_eos and token in eos:
            out.finish_reason = "stop"
            return out
        if token in s.stop_token_ids:
            out.finish_reason, out.stop_reason = "stop", token
            return out
        if len(out.ids) > s.min_tokens and s.stop:
            found = _stop_string(request, token_bytes, out.ids)
            if found is not None:
                out.finish_reason, out.stop_reason = "stop", found
                return out
        if matcher is not None:
            assert matcher.consume_token(token)
            if matcher.is_stopped():
                out.finish_reason, out.stop_reason = "stop", b""
                return out
        row = feed(token)
