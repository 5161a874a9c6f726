"""Aggregate tokens/s with several streams at once, and that nothing starves.

    python -m loadtest.concurrency --server tailor=http://127.0.0.1:8000 --streams 8,32

Each round sends, server after server in an order drawn anew, N distinct prompts at the same moment
and waits for all. Aggregate = all emitted tokens over the time from the first send to the last
token, prefill included. Told beside it: the slowest stream's first token, the longest silence
inside a stream, and the slowest stream's share of the median speed. A stream that fails, or brings
fewer tokens than asked without saying "stop", makes the run fail. Where a server has Prometheus
metrics, its KV use must be back at 0 within a few seconds of each wave.

Prints a table, then ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtest import machine
from loadtest.compare import (
    add_server_options,
    describe_servers,
    emit,
    peers_of,
    refuse_busy_machine,
)
from loadtest.completion import ServerRefused, Timing, request_body, stream
from loadtest.peer import (
    SETTLE_S,
    Peer,
    PeerFailed,
    ServerKeys,
    bring_down,
    bring_up,
    shuffled,
    stop_on_sigterm,
)
from loadtest.prompts import PLAIN
from loadtest.stats import ratio, summarize

KV_USAGE = re.compile(r"^(?:tailor_|vllm:)kv_cache_usage_perc(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Wave:
    """What N streams at once did. Seconds; kv_usage_after is None where it can't be read."""

    server: str
    num_streams: int
    round_id: int
    num_tokens: int
    wall_s: float
    worst_ttft_s: float
    worst_silence_s: float
    slowest_share: float
    kv_usage_after: float | None

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


def distinct_prompts(num_prompts: int) -> list[str]:
    """Prompts of about equal length that differ from the first word on: no prefix is shared."""
    sentences = [sentence.strip() for sentence in PLAIN.split(". ")]
    prompts = []
    for index in range(num_prompts):
        turn = index % len(sentences)
        told = ". ".join([*sentences[turn:], *sentences[:turn]])
        prompts.append(f"{index + 1}. Story number {index + 1} of the harbour. {told}")
    return prompts


def parse_kv_usage(metrics: str) -> float | None:
    """The highest KV usage of all engines in a Prometheus text; None when it has none."""
    found = [float(value) for value in KV_USAGE.findall(metrics)]
    return max(found) if found else None


async def kv_usage_when_idle(client: httpx.AsyncClient, url: str, wait_s: float) -> float | None:
    """KV use once it is 0, or what it still is after wait_s; None without such a metric."""
    deadline = time.monotonic() + wait_s
    while True:
        response = await client.get(f"{url}/metrics")
        usage = parse_kv_usage(response.text) if response.status_code == 200 else None
        if usage is None or usage == 0.0 or time.monotonic() > deadline:
            return usage
        await asyncio.sleep(0.2)


def book_wave(
    server: str, round_id: int, timings: Sequence[Timing], usage: float | None, num_tokens: int
) -> Wave:
    """One wave's figures. Raises PeerFailed when a stream was cut short."""
    for timing in timings:
        if not timing.chunk_s or (
            timing.finish_reason == "length" and timing.num_tokens < num_tokens
        ):
            raise PeerFailed(f"{server}: a stream brought {timing.num_tokens} of {num_tokens}")
    rates = [timing.end_to_end_tokens_per_s for timing in timings]
    median = sorted(rates)[len(rates) // 2]
    return Wave(
        server,
        len(timings),
        round_id,
        sum(timing.num_tokens for timing in timings),
        max(timing.end_s for timing in timings) - min(timing.start_s for timing in timings),
        max(timing.ttft_s for timing in timings),
        max((max(timing.inter_chunk_s, default=0.0) for timing in timings), default=0.0),
        min(rates) / median,
        usage,
    )


async def measure(
    peers: Sequence[Peer],
    counts: Sequence[int],
    *,
    num_rounds: int,
    num_tokens: int,
    pause_s: float,
    console: Console,
) -> list[Wave]:
    """All waves; the first wave of each server and width is a warm-up and is not booked."""
    waves: list[Wave] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    salt = f"{time.time_ns():x}"
    async with httpx.AsyncClient(timeout=900.0, limits=limits, auth=ServerKeys(peers)) as client:
        with Progress(console=console) as progress:
            bar = progress.add_task("waves", total=(num_rounds + 1) * len(peers) * len(counts))
            for round_id in range(-1, num_rounds):
                for count in counts:
                    for peer in shuffled(peers, round_id, str(count)):
                        progress.update(bar, description=f"{peer.name} x{count}", advance=1)
                        bodies = [
                            request_body(
                                peer.dialect, peer.model, prompt, max_tokens=num_tokens,
                                salt=peer.salt(f"{salt}-{round_id}-{count}-{index}"),
                                extra=peer.extra,
                            )
                            for index, prompt in enumerate(distinct_prompts(count))
                        ]  # fmt: skip
                        try:
                            timings = await asyncio.gather(
                                *(stream(client, peer.url, body) for body in bodies)
                            )
                        except (ServerRefused, httpx.HTTPError) as error:
                            raise PeerFailed(
                                f"{peer.name} at {count} streams: {error or type(error).__name__}"
                            ) from error
                        usage = await kv_usage_when_idle(client, peer.url, 5.0)
                        wave = book_wave(peer.name, round_id, timings, usage, num_tokens)
                        if round_id >= 0:
                            waves.append(wave)
                        if len(peers) > 1:
                            await asyncio.sleep(pause_s)
    return waves


def report(waves: Sequence[Wave], peers: Sequence[Peer], counts: Sequence[int]) -> dict[str, Any]:
    """All figures as JSON values; ratios are ours (the first server) over the other's."""
    ours = peers[0].name
    figures: dict[str, Any] = {}
    for count in counts:
        rows: dict[str, Any] = {}
        of_ours = {w.round_id: w for w in waves if w.server == ours and w.num_streams == count}
        for peer in peers:
            own = [w for w in waves if w.server == peer.name and w.num_streams == count]
            speed = summarize([w.tokens_per_s for w in own])
            usages = [w.kv_usage_after for w in own if w.kv_usage_after is not None]
            pairs = [(of_ours[w.round_id], w) for w in own if w.round_id in of_ours]
            rows[peer.name] = {
                "tokens_per_s": None if speed is None else speed.to_json(),
                "num_tokens": sorted({w.num_tokens for w in own}),
                "worst_ttft_s": max((w.worst_ttft_s for w in own), default=None),
                "worst_silence_s": max((w.worst_silence_s for w in own), default=None),
                "slowest_share": min((w.slowest_share for w in own), default=None),
                "kv_usage_after": max(usages) if usages else None,
                "ratio": ratio(
                    [a.tokens_per_s for a, _ in pairs], [b.tokens_per_s for _, b in pairs]
                ).to_json()
                if pairs and peer.name != ours
                else None,
            }
        figures[str(count)] = rows
    return {"ours": ours, "figures": figures}


def print_report(console: Console, result: dict[str, Any]) -> None:
    for count, rows in result["figures"].items():
        table = Table(title=f"{count} streams at once; ratio = {result['ours']} / server")
        table.add_column("server")
        for column in (
            "tok/s", "ratio", "worst TTFT s", "longest silence s", "slowest/median", "KV after",
        ):  # fmt: skip
            table.add_column(column, justify="right")
        for server, row in rows.items():
            against = row["ratio"]
            table.add_row(
                server,
                f"{row['tokens_per_s']['p50']:.1f}",
                ""
                if against is None
                else f"{against['median']:.2f} [{against['low']:.2f}, {against['high']:.2f}]",
                f"{row['worst_ttft_s']:.2f}",
                f"{row['worst_silence_s']:.2f}",
                f"{row['slowest_share']:.2f}",
                "-" if row["kv_usage_after"] is None else f"{row['kv_usage_after']:.4f}",
            )
        console.print(table)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.concurrency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server_options(parser)
    parser.add_argument("--streams", default="8,32", help="streams at once, comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--pause", type=float, default=SETTLE_S, help="seconds between servers' turns"
    )
    parser.add_argument("--tokens", type=int, default=64)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        peers = peers_of(options)
        counts = [int(count) for count in options.streams.split(",")]
        if min(*counts, options.rounds, options.tokens) < 1:
            raise ValueError("--streams, --rounds and --tokens want at least 1")
    except ValueError as error:
        parser.error(str(error))
    refuse_busy_machine(options.max_load)
    console = Console(stderr=True, width=120)
    about = machine.describe()
    stop_on_sigterm()
    try:

        async def run() -> list[Wave]:
            await bring_up(peers, options.log_dir)
            return await measure(
                peers, counts, num_rounds=options.rounds, num_tokens=options.tokens,
                pause_s=options.pause, console=console,
            )  # fmt: skip

        waves = asyncio.run(run())
        servers = describe_servers(peers)
    except PeerFailed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        bring_down(peers)
    result = {
        "tool": "concurrency",
        "machine": about,
        "servers": servers,
        "num_rounds": options.rounds,
        "max_tokens": options.tokens,
        **report(waves, peers, counts),
    }
    print_report(console, result)
    emit(result, options.json)
    leaked = [w for w in waves if w.kv_usage_after]
    for wave in leaked:
        print(f"{wave.server}: KV use {wave.kv_usage_after} when idle", file=sys.stderr)
    return 1 if leaked else 0


if __name__ == "__main__":
    sys.exit(main())
