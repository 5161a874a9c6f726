"""What the soak's clients send, and what they book of the answers (soak.py runs them).

A request is kept, left by its client, or wrong. What is kept goes to the task KEPT, whose counters
must equal the sums of `usage`; the rest goes to CUT.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadtest.prompts import PLAIN

KEPT, CUT = "soak-kept", "soak-cut"
DRAFTERS = ("off", "suffix", "prompt", "trie", "auto", "grammys")
COUNTED = {
    "tailor_prompt_tokens_total": "prompt_tokens",
    "tailor_generation_tokens_total": "completion_tokens",
    "tailor_spec_decode_num_draft_tokens_total": "drafted_tokens",
    "tailor_spec_decode_num_accepted_tokens_total": "accepted_tokens",
    "tailor_spec_decode_num_decode_steps_total": "steps",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """The server's processes at one time: seconds since the start, MiB, handles, threads."""

    at_s: float
    memory_mib: float
    num_handles: int
    num_threads: int


@dataclass(slots=True)
class Tally:
    """What the clients saw; written on the event loop only."""

    outcomes: Counter[str] = field(default_factory=Counter)
    usage: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Options:
    """What to send, and for how long. Numbers only."""

    minutes: float
    num_clients: int
    abort_share: float
    num_tokens: int
    drafters: tuple[str, ...]
    seed: int
    patience_s: float = 900.0


def make_body(rng: random.Random, num_tokens: int, drafters: Sequence[str]) -> dict[str, Any]:
    """One request of the mix, for the task whose answers are kept."""
    sentences = PLAIN.split(". ")

    def prompt() -> str:
        num = rng.choice((1, 2, 4, 4, 8, 24))
        start = rng.randrange(len(sentences))
        text = ". ".join((sentences * 3)[start : start + num])
        return text if rng.random() < 0.3 else f"{rng.randrange(10**6)}: {text}"

    body: dict[str, Any] = {
        "model": KEPT,
        "prompt": prompt(),
        "max_tokens": rng.randint(1, num_tokens),
        "temperature": rng.choice((0, 0, 0.7, 1)),
        "seed": rng.randrange(1000),
        "stream": rng.random() < 0.5,
        "include_speculation": True,
        "speculation": {"drafter": rng.choice(drafters), "max_draft_tokens": rng.randint(1, 16)},
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    for share, more in (
        (0.15, {"n": 2}),
        (0.1, {"prompt": [prompt(), prompt()]}),
        (0.15, {"logprobs": rng.randint(0, 5)}),
        (0.15, {"stop": [".", "the"]}),
        (0.1, {"frequency_penalty": 0.5, "presence_penalty": 0.2}),
        (0.1, {"top_p": 0.9, "top_k": 40}),
        (0.05, {"logit_bias": {"5": 3}}),
        (0.1, {"cache_salt": str(rng.randrange(5))}),
        (0.1, {"response_format": make_schema(rng)}),
    ):
        if rng.random() < share:
            body.update(more)
    return body


def make_chat(body: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """The same request as a chat, in one case of four with a tool."""
    chat = {k: v for k, v in body.items() if k not in ("prompt", "max_tokens", "logprobs")}
    prompt = body["prompt"]
    chat["messages"] = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": prompt if isinstance(prompt, str) else prompt[0]},
    ]
    chat["max_completion_tokens"] = body["max_tokens"]
    if "logprobs" in body:
        chat |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    if rng.random() < 0.25 and "response_format" not in body:
        parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
        function = {"name": "look_up", "description": "Looks it up.", "parameters": parameters}
        chat["tools"] = [{"type": "function", "function": function}]
        chat["tool_choice"] = rng.choice(("auto", "required"))
    return chat


def make_schema(rng: random.Random) -> dict[str, Any]:
    """A response_format; every second one is new to the server."""
    name = f"k{rng.randrange(10**9)}" if rng.random() < 0.5 else "name"
    schema = {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": 40}, "year": {"type": "integer"}},
        "required": [name],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def make_decision(rng: random.Random) -> dict[str, Any]:
    """Two questions about one of the texts."""
    return {
        "model": CUT,
        "input": rng.choice(PLAIN.split(". ")),
        "questions": [
            {"type": "predicate", "name": "short", "instructions": "The text is short."},
            {
                "type": "choice",
                "name": "kind",
                "instructions": "What is it?",
                "choices": [{"value": "story"}, {"value": "recipe"}, {"value": "report"}],
            },
        ],
    }


def book(tally: Tally, answer: Mapping[str, Any]) -> None:
    """Add what an answer (or a stream's last chunk) says it used."""
    usage, report = answer["usage"], answer["speculation"]
    for name in COUNTED.values():
        source = usage if name in usage else report
        tally.usage[name] += source[name]


async def send(
    client: httpx.AsyncClient, url: str, rng: random.Random, tally: Tally, options: Options
) -> None:
    """One request: kept, cut, or wrong."""
    body = make_body(rng, options.num_tokens, options.drafters)
    where = f"{url}/v1/completions"
    kind = rng.random()
    if rng.random() < 0.35:
        body, where = make_chat(body, rng), f"{url}/v1/chat/completions"
    if kind < 0.05:
        bad = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "type": "array", "minItems": 2, "maxItems": 1}}}}  # fmt: skip
        body.update(rng.choice(({"n": 0}, {"frob": 1}, {"model": "?"}, {"prompt": []}, bad)))
        response = await client.post(where, json=body)
        expect(tally, "refused", response.status_code in (400, 404), response.text)
        return
    if kind < 0.05 + options.abort_share:
        most = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
        body.update({"model": CUT, most: 4 * options.num_tokens})
        if "response_format" not in body and body.get("tool_choice") != "required":
            body["ignore_eos"] = True
        await leave(client, where, body, rng)
        tally.outcomes["left"] += 1
        return
    if kind > 0.95:
        response = await client.post(f"{url}/v1/decisions", json=make_decision(rng))
        well = response.status_code == 200 and len(response.json()["answers"]) == 2
        expect(tally, "decision", well, response.text)
        return
    if body["stream"]:
        await _read_stream(client, where, body, tally)
    else:
        await _read_whole(client, where, body, tally)


async def _read_whole(
    client: httpx.AsyncClient, where: str, body: Mapping[str, Any], tally: Tally
) -> None:
    response = await client.post(where, json=body)
    if response.status_code == 429:
        tally.outcomes["429"] += 1
        await asyncio.sleep(0.5)
        return
    expect(tally, "whole", response.status_code == 200, response.text)
    if response.status_code == 200:
        book(tally, response.json())


async def _read_stream(
    client: httpx.AsyncClient, where: str, body: Mapping[str, Any], tally: Tally
) -> None:
    usage: dict[str, Any] = {}
    async with client.stream("POST", where, json=body) as response:
        if response.status_code == 429:
            tally.outcomes["429"] += 1
            return
        last = ""
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                for name in ("usage", "speculation"):
                    usage[name] = chunk.get(name) or usage.get(name)
            last = line or last
    expect(tally, "stream", response.status_code == 200 and last == "data: [DONE]", last)
    if last == "data: [DONE]" and usage.get("usage"):
        book(tally, usage)


async def leave(
    client: httpx.AsyncClient, where: str, body: Mapping[str, Any], rng: random.Random
) -> None:
    """Ask, and go before the answer is there."""
    try:
        if not body["stream"]:
            await client.post(where, json=body, timeout=rng.uniform(0.01, 2.0))
            return
        num_left = rng.randint(0, 20)
        async with client.stream("POST", where, json=body, timeout=30.0) as response:
            async for _ in response.aiter_lines():
                num_left -= 1
                if num_left < 0:
                    return
    except httpx.TimeoutException:
        pass


def expect(tally: Tally, outcome: str, well: bool, told: str) -> None:
    """Count an outcome; keep the first twenty unexpected ones in words."""
    tally.outcomes[outcome if well else "unexpected"] += 1
    if not well and len(tally.unexpected) < 20:
        tally.unexpected.append(f"{outcome}: {told[:200]}")
