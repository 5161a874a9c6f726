"""One streamed completion over HTTP, timed: when its tokens came, how many, and what they said.

Servers differ in how they tell the number of tokens in a chunk. In order of preference: the chunk's
running usage (`continuous_usage_stats`; Tailor, vLLM), its token ids, and one token a chunk with
the total put right by the final usage. A chunk without text and without tokens is no token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

Dialect = Literal["tailor", "vllm", "llamacpp", "transformers", "openai"]
DIALECTS: tuple[Dialect, ...] = ("tailor", "vllm", "llamacpp", "transformers", "openai")


class ServerRefused(Exception):
    """The server answered with an error, or with a stream that is none."""


@dataclass(slots=True)
class Timing:
    """One choice's stream. Times are time.perf_counter() seconds; written by `stream` only.

    chunk_s[i], chunk_tokens[i]: when chunk i arrived and how many tokens it brought. num_tokens is
    the server's usage where it told one, else their sum. `text` is what the client saw.
    """

    start_s: float
    end_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int | None = None
    num_cached_tokens: int = 0
    num_tokens: int = 0
    finish_reason: str | None = None
    speculation: dict[str, Any] | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to its first token. Raises ValueError without one."""
        if not self.chunk_s:
            raise ValueError("the stream brought no token")
        return self.chunk_s[0] - self.start_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first chunk over the time after the first chunk; None for one chunk."""
        if len(self.chunk_s) < 2 or self.chunk_s[-1] <= self.chunk_s[0]:
            return None
        return (self.num_tokens - self.chunk_tokens[0]) / (self.chunk_s[-1] - self.chunk_s[0])

    @property
    def end_to_end_tokens_per_s(self) -> float:
        """All tokens over the time from sending to the end of the stream."""
        return self.num_tokens / (self.end_s - self.start_s)

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first chunk; None when all came in one chunk."""
        rate = self.decode_tokens_per_s
        return 1.0 / rate if rate else None

    @property
    def inter_chunk_s(self) -> list[float]:
        """Gaps between chunks, in seconds: what a reader of the stream feels."""
        return [b - a for a, b in zip(self.chunk_s, self.chunk_s[1:], strict=False)]


def request_body(
    dialect: Dialect,
    model: str,
    prompt: str,
    *,
    max_tokens: int,
    salt: str,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A greedy, streamed /v1/completions body whose prompt is not read from a prefix cache.

    salt: unique per request. Tailor and vLLM key their prefix cache by it; llama.cpp is told not to
    reuse a prompt; transformers serve keeps none without continuous batching. For an unknown server
    ("openai") the salt becomes the prompt's first line. `extra` is merged last.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
    }
    if dialect != "transformers":  # it does not know the field, and always sends usage
        body["stream_options"] = {"include_usage": True}
    if dialect in ("tailor", "vllm"):
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        body["cache_salt"] = salt
    elif dialect == "llamacpp":
        body["cache_prompt"] = False
    elif dialect == "openai":
        body["prompt"] = f"[{salt}]\n{prompt}"
    if not model:  # a server with one model, whose name it did not tell
        del body["model"]
    body.update(extra or {})
    return body


async def stream(
    client: httpx.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    *,
    on_first_token: Callable[[], None] | None = None,
) -> Timing:
    """Send `body` (stream: true, one choice) to url/v1/completions and time its tokens.

    on_first_token is called once, when the first token has arrived.
    Raises ServerRefused on a status other than 200, an error inside the stream, or a stream
    without a finish reason; httpx.HTTPError when the connection fails.
    """
    timing = Timing(start_s=time.perf_counter())
    seen = 0
    async with client.stream("POST", f"{url}/v1/completions", json=dict(body)) as response:
        if response.status_code != 200:
            await response.aread()
            raise ServerRefused(f"HTTP {response.status_code}: {response.text[:300]}")
        async for line in response.aiter_lines():
            now = time.perf_counter()
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                break
            if on_first_token is not None and seen == 0:
                seen = _take(timing, json.loads(data), now, seen)
                if seen:
                    on_first_token()
            else:
                seen = _take(timing, json.loads(data), now, seen)
    timing.end_s = time.perf_counter()
    if timing.finish_reason is None:
        raise ServerRefused("the stream ended without a finish reason")
    if not timing.num_tokens:
        timing.num_tokens = sum(timing.chunk_tokens)
    return timing


def _take(timing: Timing, chunk: Mapping[str, Any], now: float, seen: int) -> int:
    """Book one parsed chunk. Returns the number of tokens seen so far."""
    if chunk.get("error"):
        raise ServerRefused(f"error in the stream: {str(chunk['error'])[:300]}")
    usage = chunk.get("usage") or {}
    if "prompt_tokens" in usage:
        timing.num_prompt_tokens = usage["prompt_tokens"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        timing.num_cached_tokens = cached or timing.num_cached_tokens
    if chunk.get("speculation"):
        timing.speculation = chunk["speculation"]
    running: int | None = usage.get("completion_tokens")
    choices = chunk.get("choices") or []
    if choices:
        choice = choices[0]
        text = choice.get("text") or ""
        ids = choice.get("token_ids") or []
        timing.text += text
        timing.token_ids += ids
        timing.prompt_token_ids += choice.get("prompt_token_ids") or []
        timing.finish_reason = choice.get("finish_reason") or timing.finish_reason
        # A final usage on a chunk without text counts no new token here: servers that send one
        # have sent every token in a chunk of its own, and num_tokens below takes the usage.
        if running is not None and (text or ids):
            new = running - seen
        elif ids:
            new = len(ids)
        else:
            new = 1 if text else 0
        if new > 0:
            timing.chunk_s.append(now)
            timing.chunk_tokens.append(new)
            seen += new
    if running is not None:
        timing.num_tokens = running
    return seen
