"""Hours of mixed load on a real server, and whether anything grows or is lost.

    python -m tests.soak --model smollm2-135m-instruct --minutes 30

Starts a server of its own (`tailor serve`, with a small KV cache, so that its memory is all touched
early) and sends it, from `--clients` at once: completions and chats, whole answers and streams,
several prompts and choices, log-probabilities, stop strings, seeds, every drafter, long prompts,
tools, schemas (one in two is new to the server), decisions, wrong requests. One request in five
(`--leave`) is left by its client: streams after some chunks, whole answers after some time. These
requests have a task of their own, as decisions do (their usage has no steps), so that the counters
of the other task must equal the sums of `usage` to the token.

It checks memory, handles and threads of the server and its engines (medians of the second and of
the last quarter of the time); at the end, with nothing open: KV use 0, nothing running, waiting or
open, no restart, counters equal usage, no answer with an unexpected status, and no line of the log
above `info`. Ends in one JSON line; exits 1 when a check failed.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import psutil
from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from loadtest.options import ResultOptions, emit, listed, program, stopped_afterwards
from loadtest.peer import Peer, PeerFailed, bring_up, tailor_peer, total
from loadtest.prompts import PLAIN
from server.commands.options import as_options

KEPT, LEFT = "soak-kept", "soak-left"
"""The task whose answers are read to the end, and that of all other requests."""
DRAFTERS = "off,suffix,prompt,trie,auto,grammys"
COUNTED = {
    "tailor_prompt_tokens_total": "prompt_tokens",
    "tailor_generation_tokens_total": "completion_tokens",
    "tailor_spec_decode_num_draft_tokens_total": "drafted_tokens",
    "tailor_spec_decode_num_accepted_tokens_total": "accepted_tokens",
    "tailor_spec_decode_num_decode_steps_total": "steps",
}


@as_options
class SoakOptions:
    """What is sent, for how long, and what may grow."""

    model: Annotated[str, Parameter(help="what is served")] = "smollm2-135m-instruct"
    minutes: float = 30.0
    clients: Annotated[int, Parameter(help="requests at once")] = 8
    leave: Annotated[float, Parameter(help="share of the requests that are left early")] = 0.2
    tokens: Annotated[int, Parameter(help="most tokens of an answer")] = 48
    kv: Annotated[str, Parameter(help="the server's KV cache")] = "128MiB"
    drafters: Annotated[str, Parameter(help="drafters of the mix, with commas")] = DRAFTERS
    seed: Annotated[int, Parameter(help="of the mix")] = 1
    memory_slack: Annotated[float, Parameter(help="MiB that memory may grow by")] = 32.0
    patience: Annotated[float, Parameter(help="seconds of silence that are no failure")] = 900.0


_SOAK, _RESULTS = SoakOptions(), ResultOptions()
app, main = program("soak", __doc__, "tests")


@dataclass(frozen=True, slots=True)
class Reading:
    """The server's processes at one time: MiB of memory, handles, threads."""

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

    def expect(self, outcome: str, well: bool, said: str) -> None:
        """Count an outcome; keep the first twenty unexpected ones in words."""
        self.outcomes[outcome if well else "unexpected"] += 1
        if not well and len(self.unexpected) < 20:
            self.unexpected.append(f"{outcome}: {said[:200]}")

    def book(self, answer: Mapping[str, Any]) -> None:
        """Add what an answer, or a stream's last chunk, says that it used."""
        for name in COUNTED.values():
            usage = answer["usage"]
            self.usage[name] += (usage if name in usage else answer["speculation"])[name]


def make_body(rng: random.Random, num_tokens: int, drafters: Sequence[str]) -> dict[str, Any]:
    """One request of the mix, for the task whose answers are read to the end."""
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
    choices = [{"value": "story"}, {"value": "recipe"}, {"value": "report"}]
    return {
        "model": LEFT,
        "input": rng.choice(PLAIN.split(". ")),
        "questions": [
            {"type": "predicate", "name": "short", "instructions": "The text is short."},
            {"type": "choice", "name": "kind", "instructions": "What is it?", "choices": choices},
        ],
    }


async def send(
    client: httpx.AsyncClient, url: str, rng: random.Random, tally: Tally, options: SoakOptions
) -> None:
    """One request: read to the end, left, or wrong."""
    body = make_body(rng, options.tokens, listed(options.drafters))
    where = f"{url}/v1/completions"
    kind = rng.random()
    if rng.random() < 0.35:
        body, where = make_chat(body, rng), f"{url}/v1/chat/completions"
    if kind < 0.05:
        bad = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "type": "array", "minItems": 2, "maxItems": 1}}}}  # fmt: skip
        body.update(rng.choice(({"n": 0}, {"frob": 1}, {"model": "?"}, {"prompt": []}, bad)))
        response = await client.post(where, json=body)
        tally.expect("refused", response.status_code in (400, 404), response.text)
    elif kind < 0.05 + options.leave:
        most = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
        body.update({"model": LEFT, most: 4 * options.tokens})
        if "response_format" not in body and body.get("tool_choice") != "required":
            body["ignore_eos"] = True
        await leave(client, where, body, rng)
        tally.outcomes["left"] += 1
    elif kind > 0.95:
        response = await client.post(f"{url}/v1/decisions", json=make_decision(rng))
        well = response.status_code == 200 and len(response.json()["answers"]) == 2
        tally.expect("decision", well, response.text)
    else:
        await read_to_end(client, where, body, tally)


async def read_to_end(
    client: httpx.AsyncClient, where: str, body: Mapping[str, Any], tally: Tally
) -> None:
    """Ask, and book what was used."""
    last, said = "", dict[str, Any]()
    async with client.stream("POST", where, json=body) as response:
        if response.status_code == 429:
            tally.outcomes["429"] += 1
            await asyncio.sleep(0.5)
            return
        if not body["stream"]:
            last = (await response.aread()).decode()
            said = json.loads(last) if response.status_code == 200 else {}
        else:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    said |= {k: chunk[k] for k in ("usage", "speculation") if chunk.get(k)}
                last = line or last
    is_whole = not body["stream"] or last == "data: [DONE]"
    outcome = "stream" if body["stream"] else "whole"
    tally.expect(outcome, response.status_code == 200 and is_whole, last)
    if said.get("usage") and is_whole:
        tally.book(said)


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


def read_processes(root: psutil.Process) -> Reading:
    """Sums over a process and all below it; one that just ended counts nothing."""
    memory = handles = threads = 0
    try:
        for process in (root, *root.children(recursive=True)):
            try:
                memory += process.memory_info().rss
                handles += process.num_fds()
                threads += process.num_threads()
            except psutil.NoSuchProcess:
                continue
    except psutil.NoSuchProcess:
        raise PeerFailed("the server is gone") from None
    return Reading(memory / 2**20, handles, threads)


async def send_all(
    url: str, root: psutil.Process, options: SoakOptions, tally: Tally, progress: Progress
) -> None:
    """All clients until the time is up; then every request is over. Raises PeerFailed."""
    began_s = time.monotonic()
    end_s = began_s + options.minutes * 60
    bar = progress.add_task("soak", total=options.minutes * 60)

    async def client_loop(k: int) -> None:
        rng = random.Random(options.seed * 1000 + k)
        async with httpx.AsyncClient(timeout=options.patience) as client:
            while time.monotonic() < end_s:
                try:
                    await send(client, url, rng, tally, options)
                except httpx.TransportError as error:
                    tally.expect("connection", False, type(error).__name__)
                    await asyncio.sleep(0.2)

    async def watch() -> None:
        printed_s = 0.0
        while True:
            tally.readings.append(read_processes(root))
            now_s = time.monotonic() - began_s
            progress.update(bar, completed=now_s)
            if not progress.console.is_terminal and now_s - printed_s >= 60:
                printed_s = now_s
                progress.console.print(
                    f"{now_s / 60:.0f} min: {sum(tally.outcomes.values())} requests, "
                    f"{tally.readings[-1].memory_mib:.0f} MiB", highlight=False,
                )  # fmt: skip
            await asyncio.sleep(min(2.0, options.minutes * 60 / 40))

    watching: asyncio.Future[Any] = asyncio.create_task(watch())
    clients: asyncio.Future[Any] = asyncio.gather(*map(client_loop, range(options.clients)))
    try:
        done, _ = await asyncio.wait({watching, clients}, return_when=asyncio.FIRST_COMPLETED)
        for finished in done:
            finished.result()
    finally:
        watching.cancel()
        clients.cancel()
        await asyncio.gather(watching, clients, return_exceptions=True)


async def settle(url: str, wait_s: float = 20.0) -> dict[str, Any]:
    """What is left once nothing is asked any more: /metrics and /health when idle, or as they are
    after wait_s."""
    async with httpx.AsyncClient(timeout=30.0) as client:
        end_s = time.monotonic() + wait_s
        while True:
            page = (await client.get(f"{url}/metrics")).text
            health = (await client.get(f"{url}/health")).json()
            left = {
                "kv_cache_usage": total(page, "tailor_kv_cache_usage_perc"),
                "running": total(page, "tailor_num_requests_running"),
                "waiting": total(page, "tailor_num_requests_waiting"),
                "open": sum(engine["open_requests"] for engine in health["engines"]),
            }
            if not any(left.values()) or time.monotonic() > end_s:
                restarts = sum(engine["restarts"] for engine in health["engines"])
                return {**left, "restarts": restarts, "page": page}
            await asyncio.sleep(0.3)


def log_errors(log: str) -> list[str]:
    """The lines of a JSON log that are not `info`, or no JSON."""
    found = []
    for line in filter(None, map(str.strip, log.splitlines())):
        try:
            level = json.loads(line).get("level")
        except (ValueError, AttributeError):
            level = "info" if line.startswith("Tailor ") else None  # "... ready on URL"
        if level != "info":
            found.append(line[:300])
    return found


def judge(
    tally: Tally, left: Mapping[str, Any], errors: Sequence[str], slack_mib: float
) -> dict[str, Any]:
    """Every check with its figures, and the whole verdict. Memory may grow by slack_mib or 2 %,
    whichever is more."""

    def growth(value: str) -> tuple[float, float]:
        """Medians of the second and of the last quarter of the readings."""
        all_of = [getattr(reading, value) for reading in tally.readings]
        num = len(all_of)
        early = all_of[num // 4 : max(num // 4 + 1, num // 2)]
        return statistics.median(early), statistics.median(all_of[min(num - 1, 3 * num // 4) :])

    memory, handles, threads = map(growth, ("memory_mib", "num_handles", "num_threads"))
    counters = {
        name: (total(left["page"], name, task=KEPT), float(tally.usage[used]))
        for name, used in COUNTED.items()
    }
    checks = {
        "memory": memory[1] - memory[0] <= max(slack_mib, 0.02 * memory[0]),
        "handles": handles[1] - handles[0] <= 8,
        "threads": threads[1] - threads[0] <= 4,
        "blocks": left["kv_cache_usage"] == 0,
        "idle": not (left["running"] or left["waiting"] or left["open"]),
        "restarts": left["restarts"] == 0,
        "counters": all(a == b for a, b in counters.values()) and tally.usage["steps"] > 0,
        "answers": not tally.unexpected,
        "log": not errors,
    }
    return {
        "passed": all(checks.values()),
        "checks": checks,
        "outcomes": dict(tally.outcomes),
        "memory_mib": [round(v, 1) for v in memory],
        "handles": handles,
        "threads": threads,
        "left": {k: v for k, v in left.items() if k != "page"},
        "counters": counters,
        "unexpected": tally.unexpected,
        "log_errors": list(errors)[:20],
    }


@app.default
def soak(*, options: SoakOptions = _SOAK, results: ResultOptions = _RESULTS) -> int:
    """Send the mix, and judge. Raises ValueError for wrong options, PeerFailed."""
    if not (options.minutes > 0 and options.clients > 0 and 0 <= options.leave < 0.9):
        raise ValueError("--minutes and --clients must be positive, --leave below 0.9")
    console, tally = Console(stderr=True), Tally()
    with TemporaryDirectory(prefix="soak-") as place:
        tasks = Path(place) / "tasks"
        tasks.mkdir()
        for name in (KEPT, LEFT):
            (tasks / f"{name}.yaml").write_text("description: soak\n", encoding="utf-8")
        given = f"--tasks {tasks} --log-format json --kv-cache-memory {options.kv}"
        peer: Peer = tailor_peer("tailor", options.model, given)
        with stopped_afterwards([peer]):
            asyncio.run(bring_up([peer], Path(place)))
            assert peer.process is not None and peer.log_path is not None
            root = psutil.Process(peer.process.pid)
            with Progress(console=console, disable=not console.is_terminal) as progress:
                asyncio.run(send_all(peer.url, root, options, tally, progress))
            left = asyncio.run(settle(peer.url))
            errors = log_errors(peer.log_path.read_text(encoding="utf-8"))
    result = judge(tally, left, errors, options.memory_slack)
    for name, well in result["checks"].items():
        console.print(f"{'ok  ' if well else 'FAIL'} {name}", highlight=False)
    emit(
        "soak",
        {"minutes": options.minutes, "clients": options.clients, "leave": options.leave,
         "model": Path(options.model).name, **result},
        results.json,
    )  # fmt: skip
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
