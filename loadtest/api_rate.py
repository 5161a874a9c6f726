"""Does the API process keep up? Streams of an engine whose steps end at a steady pace.

    python -m loadtest.api_rate --streams 32 --rate 100 --seconds 20

Starts a server whose engine computes nothing (loadtest.paced) and reads N streams from it over
sockets, in this process, with as little work as can be. From the moment all streams have begun to
the moment the first one ends it counts events, tells how long after the end of its step each token
was read, and how much of a core the API process and the engine's process took meanwhile (user and
system, which depend little on what else the machine does; delays depend on it). The API keeps up
when as many tokens come as steps are made and delays stay below a step. Ends in one JSON line;
exits 1 when it did not keep up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from rich.console import Console

from loadtest import machine
from loadtest.completion import request_body
from loadtest.options import add_result_options, emit, refuse_busy_machine
from loadtest.overhead import start
from loadtest.paced import RATE, tick_of
from loadtest.peer import Peer, PeerFailed, stop, stop_on_sigterm, wait_ready
from loadtest.stats import summarize

_END = b"\n\n"


@dataclass(slots=True)
class Reader:
    """One stream. events: (time.perf_counter() at which it was read, its bytes)."""

    events: list[tuple[float, bytes]] = field(default_factory=list)

    async def read(self, url: str, body: dict[str, Any]) -> None:
        """Send the request and keep every event as it comes. Raises PeerFailed."""
        at, data = urlsplit(url), json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {at.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        status = await reader.readline()
        if b" 200 " not in status:
            raise PeerFailed(f"{status.decode().strip()}: {(await reader.read(500)).decode()}")
        await reader.readuntil(b"\r\n\r\n")
        with suppress(asyncio.IncompleteReadError):
            while True:
                event = await reader.readuntil(_END)
                self.events.append((time.perf_counter(), event))
        writer.close()


def tokens_of(events: Sequence[tuple[float, bytes]]) -> list[tuple[float, int]]:
    """(when it was read, its id) of every token of a stream."""
    found: list[tuple[float, int]] = []
    for now, event in events:
        data = event[event.find(b"data: ") + 6 :].strip()
        if data.startswith(b"{"):
            for choice in json.loads(data).get("choices") or ():
                found += [(now, token) for token in choice.get("token_ids") or ()]
    return found


def report(
    streams: Sequence[Sequence[tuple[float, int]]], first_s: float, last_s: float, rate: float
) -> dict[str, Any]:
    """Figures of the tokens that were read from first_s to last_s. steps_per_s: that the engine
    made; kept_up: tokens read over steps times streams."""
    delays: list[float] = []
    ticks: set[int] = set()
    num_events = num_tokens = 0
    for tokens in streams:
        inside = [(now, token) for now, token in tokens if first_s <= now < last_s]
        num_events += len({now for now, _ in inside})
        num_tokens += len(inside)
        for now, token in inside:
            tick = tick_of(token, now, rate)
            ticks.add(tick)
            delays.append(1000 * (now - tick / rate))
    summary = summarize(delays)
    if summary is None:
        raise PeerFailed("no token was read while all streams ran")
    wall = last_s - first_s
    return {
        "wall_s": wall,
        "events_per_s": num_events / wall,
        "tokens_per_s": num_tokens / wall,
        "steps_per_s": len(ticks) / wall,
        "kept_up": num_tokens / (len(ticks) * len(streams)),
        "delay_ms": {"p50": summary.p50, "p95": summary.p95, "max": max(delays)},
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(peer: Peer, num_streams: int, rate: float, seconds: float) -> dict[str, Any]:
    """Read the streams. Raises PeerFailed."""
    assert peer.process is not None
    api = psutil.Process(peer.process.pid)
    engines = [p for p in api.children(recursive=True) if _cpu_s(p) > 0.5]
    extra = {"ignore_eos": True, "return_token_ids": True, "speculation": {"drafter": "off"}}
    readers = [Reader() for _ in range(num_streams)]
    tasks = []
    for i, reader in enumerate(readers):
        body = request_body(
            "openai", peer.model, f"Stream {i}.", max_tokens=int(rate * (seconds + 2.0)),
            salt=f"{i}", extra=extra,
        )  # fmt: skip
        tasks.append(asyncio.create_task(reader.read(peer.url, body)))
    while any(not reader.events for reader in readers):
        await asyncio.sleep(0.05)
        if failed := [task for task in tasks if task.done()]:
            failed[0].result()
            raise PeerFailed("a stream ended before all had begun")
    began, first_s = [_cpu_s(p) for p in (api, *engines)], time.perf_counter()
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=seconds)
    used = [_cpu_s(p) - before for p, before in zip((api, *engines), began, strict=True)]
    last_s = time.perf_counter()
    await asyncio.gather(*tasks)
    found = report([tokens_of(reader.events) for reader in readers], first_s, last_s, rate)
    found["api_cores"] = used[0] / found["wall_s"]
    found["engine_cores"] = sum(used[1:]) / found["wall_s"]
    found["api_us_per_event"] = 1e6 * found["api_cores"] / found["events_per_s"]
    return found


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.api_rate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as of `tailor serve`")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rate", type=float, default=100.0, help="steps a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--log-dir", type=Path, default=Path("loadtest/results/logs"))
    add_result_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.streams < 1 or min(options.rate, options.seconds) <= 0:
        parser.error("--streams, --rate and --seconds must be above 0")
    refuse_busy_machine(options.max_load)
    about = machine.describe()
    stop_on_sigterm()
    os.environ[RATE] = str(options.rate)
    peer = start("paced", "loadtest.paced", ["--model", options.model], options.log_dir)
    try:
        asyncio.run(wait_ready(peer))
        found = asyncio.run(measure(peer, options.streams, options.rate, options.seconds))
    except (PeerFailed, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        stop(peer)
    delay = found["delay_ms"]
    Console(stderr=True, width=120).print(
        f"{options.streams} streams: {found['events_per_s']:.0f} events a second of "
        f"{found['steps_per_s']:.1f} steps, {found['kept_up']:.1%} of their tokens; "
        f"{delay['p50']:.2f} ms after the step (p95 {delay['p95']:.2f}, at most "
        f"{delay['max']:.1f}); API {found['api_cores']:.0%} of a core "
        f"({found['api_us_per_event']:.0f} us an event), engine {found['engine_cores']:.0%}"
    )
    asked = {"num_streams": options.streams, "rate": options.rate}
    emit({"tool": "api_rate", "machine": about, **asked, **found}, options.json)
    return 0 if found["kept_up"] >= 0.99 and delay["p95"] < 1000.0 / options.rate else 1


if __name__ == "__main__":
    sys.exit(main())
