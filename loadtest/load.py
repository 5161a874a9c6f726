"""Load on a server, with real task prompts: open loop (Poisson), closed loop, on/off pairs, sweeps.

    python -m loadtest.load --data DATA_DIR --mix squad=2,massive_en=1,advising_sql=1 \\
        --server tailor-off=http://127.0.0.1:8000 --server tailor-on=@tailor-off \\
        --extra 'tailor-off={"speculation": {"drafter": "off"}}' \\
        --concurrency 1,4,16 --rounds 5

Closed loop (`--concurrency`): N clients, each sends its next request when its last one is done.
Open loop (`--rate`): requests come at Poisson times whatever the server does, as users do; times
are drawn once per cell and round, so every server meets the same arrivals, and latency counts from
the time a request was *due*. Every (level, round) runs all servers one after the other, in an
order drawn anew, with the same requests.

Told per level and server: requests/s, tokens/s, TTFT, time per output token (TPOT), inter-chunk
gaps (ITL), end-to-end latency, goodput (share and rate of requests that met `--slo`), tokens a step
where the server tells, and the paired ratio of tokens/s to the first server's with its 95 %
bootstrap interval. Ends in one JSON line. Exits 1 when a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtest import machine
from loadtest.compare import add_server_options, describe_servers, emit, refuse_busy_machine
from loadtest.completion import ServerRefused, Timing, request_body, stream
from loadtest.peer import (
    SETTLE_S,
    Peer,
    PeerFailed,
    bring_down,
    bring_up,
    parse_peers,
    shuffled,
    stop_on_sigterm,
)
from loadtest.prompts import Example, mixed_examples, parse_mix
from loadtest.stats import ratio, summarize

SLO_NAMES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Level:
    """One load level: N clients (closed loop), or requests a second (open loop)."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def label(self) -> str:
        return f"{self.concurrency} clients" if self.rate is None else f"{self.rate:g} req/s"


@dataclass(slots=True)
class Cell:
    """What one server did at one level in one round; written by run_cell only.

    late_s[i]: how long after its due time request i was sent (open loop; else 0).
    """

    server: str
    level: Level
    round_id: int
    timings: list[Timing] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return sum(timing.num_tokens for timing in self.timings) / self.wall_s


def parse_slo(text: str) -> dict[str, float]:
    """`ttft=0.5,tpot=0.05` in seconds. Raises ValueError for an unknown name or a bad number."""
    limits: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in SLO_NAMES:
            raise ValueError(f"--slo knows {', '.join(SLO_NAMES)}, not {name!r}")
        limits[name] = float(value)
        if not limits[name] > 0:
            raise ValueError(f"--slo {name} must be positive")
    return limits


def arrival_times(num_requests: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which requests are due: a Poisson process of `rate` a second."""
    rng = random.Random(seed)
    now, times = 0.0, []
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def meets_slo(timing: Timing, late_s: float, slo: Mapping[str, float]) -> bool:
    """Whether a request kept every limit. One-chunk answers keep any TPOT."""
    if not timing.chunk_s:
        return False
    figures = {
        "ttft": timing.ttft_s + late_s,
        "tpot": timing.tpot_s or 0.0,
        "e2e": timing.end_s - timing.start_s + late_s,
    }
    return all(figures[name] <= limit for name, limit in slo.items())


async def run_cell(
    client: httpx.AsyncClient,
    peer: Peer,
    level: Level,
    round_id: int,
    examples: Sequence[Example],
    *,
    max_tokens: int,
    salt: str,
) -> Cell:
    """Send every example once at this level; failures are booked, not raised."""
    cell = Cell(peer.name, level, round_id)

    async def one(index: int, due_s: float | None) -> None:
        body = request_body(
            peer.dialect, peer.model, examples[index].prompt,
            max_tokens=max_tokens, salt=f"{salt}-{index}", extra=peer.extra,
        )  # fmt: skip
        if peer.dialect == "tailor":
            body["include_speculation"] = True
        late = 0.0 if due_s is None else max(0.0, time.perf_counter() - due_s)
        try:
            timing = await stream(client, peer.url, body)
        except (ServerRefused, httpx.HTTPError) as error:
            cell.failures.append(f"{examples[index].task}: {error or type(error).__name__}"[:200])
            return
        cell.timings.append(timing)
        cell.late_s.append(late)

    began = time.perf_counter()
    if level.rate is not None:
        tasks = []
        for index, due in enumerate(arrival_times(len(examples), level.rate, round_id)):
            delay = began + due - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(one(index, began + due)))
        await asyncio.gather(*tasks)
    else:
        waiting = iter(range(len(examples)))

        async def a_client() -> None:
            for index in waiting:
                await one(index, None)

        await asyncio.gather(*(a_client() for _ in range(level.concurrency or 1)))
    cell.wall_s = time.perf_counter() - began
    return cell


async def measure(
    peers: Sequence[Peer],
    levels: Sequence[Level],
    examples: Sequence[Example],
    *,
    num_rounds: int,
    max_tokens: int,
    num_warmups: int,
    pause_s: float,
    console: Console,
) -> list[Cell]:
    """All cells, warm-ups left out."""
    cells: list[Cell] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    salt = f"{time.time_ns():x}"
    async with httpx.AsyncClient(timeout=900.0, limits=limits) as client:
        with Progress(console=console) as progress:
            bar = progress.add_task("cells", total=num_rounds * len(levels) * len(peers))
            for peer in peers:
                await run_cell(
                    client, peer, Level(concurrency=1), -1, examples[:num_warmups],
                    max_tokens=max_tokens, salt=f"{salt}-warm",
                )  # fmt: skip
            for round_id in range(num_rounds):
                for level in levels:
                    for peer in shuffled(peers, round_id, level.label):
                        progress.update(bar, description=f"{peer.name} {level.label}")
                        cells.append(
                            await run_cell(
                                client, peer, level, round_id, examples, max_tokens=max_tokens,
                                # The same salt for on and off would let the second one read the
                                # first one's prefixes: one salt per cell.
                                salt=f"{salt}-{peer.name}-{round_id}-{level.label}",
                            )
                        )  # fmt: skip
                        progress.update(bar, advance=1)
                        if len(peers) > 1:
                            await asyncio.sleep(pause_s)
    return cells


def report(
    cells: Sequence[Cell], peers: Sequence[Peer], levels: Sequence[Level], slo: Mapping[str, float]
) -> dict[str, Any]:
    """All figures as JSON values. Latencies in seconds; ratios are server / first server."""
    base = peers[0].name
    figures: dict[str, Any] = {}
    for level in levels:
        rows: dict[str, Any] = {}
        by_round = {c.round_id: c for c in cells if c.server == base and c.level == level}
        for peer in peers:
            own = [c for c in cells if c.server == peer.name and c.level == level]
            timings = [t for c in own for t in c.timings]
            lates = [late for c in own for late in c.late_s]
            wall = sum(c.wall_s for c in own)
            good = sum(meets_slo(t, late, slo) for t, late in zip(timings, lates, strict=True))
            steps = sum((t.speculation or {}).get("steps", 0) for t in timings)
            with_steps = sum(t.num_tokens for t in timings if t.speculation)
            num_failed = sum(len(c.failures) for c in own)
            samples = {
                "ttft_s": [
                    t.ttft_s + x for t, x in zip(timings, lates, strict=True) if t.chunk_s
                ],
                "tpot_s": [v for t in timings if (v := t.tpot_s) is not None],
                "itl_s": [gap for t in timings for gap in t.inter_chunk_s],
                "e2e_s": [
                    t.end_s - t.start_s + x for t, x in zip(timings, lates, strict=True)
                ],
            }  # fmt: skip
            pairs = [(c, by_round[c.round_id]) for c in own if c.round_id in by_round]
            compared = (
                peer.name != base and pairs and all(a.timings and b.timings for a, b in pairs)
            )
            rows[peer.name] = {
                "num_requests": len(timings) + num_failed,
                "num_failed": num_failed,
                "failures": sorted({f for c in own for f in c.failures})[:5],
                "requests_per_s": len(timings) / wall,
                "tokens_per_s": sum(t.num_tokens for t in timings) / wall,
                "good_share": good / max(1, len(timings) + num_failed),
                "goodput_per_s": good / wall,
                "tokens_per_step": with_steps / steps if steps else None,
                "ratio": ratio(
                    [a.tokens_per_s for a, _ in pairs], [b.tokens_per_s for _, b in pairs]
                ).to_json()
                if compared
                else None,
                **{
                    name: None if (s := summarize(values)) is None else s.to_json()
                    for name, values in samples.items()
                },
            }
        figures[level.label] = rows
    return {"base": base, "slo": dict(slo), "figures": figures}


def print_report(console: Console, result: Mapping[str, Any]) -> None:
    for level, rows in result["figures"].items():
        table = Table(title=f"{level}; ratio = server / {result['base']}")
        table.add_column("server")
        for column in (
            "req/s", "tok/s", "ratio", "TTFT p50/p99 ms", "TPOT p50/p99 ms", "e2e p50/p99 s",
            "good", "tok/step", "failed",
        ):  # fmt: skip
            table.add_column(column, justify="right")
        for server, row in rows.items():

            def pair(name: str, scale: float, row: Mapping[str, Any] = row) -> str:
                found = row[name]
                if found is None:
                    return "-"
                return f"{found['p50'] * scale:.4g}/{found['p99'] * scale:.4g}"

            against = row["ratio"]
            table.add_row(
                server,
                f"{row['requests_per_s']:.2f}",
                f"{row['tokens_per_s']:.1f}",
                ""
                if against is None
                else f"{against['median']:.2f} [{against['low']:.2f}, {against['high']:.2f}]",
                pair("ttft_s", 1000),
                pair("tpot_s", 1000),
                pair("e2e_s", 1),
                f"{row['good_share']:.0%}",
                "-" if row["tokens_per_step"] is None else f"{row['tokens_per_step']:.2f}",
                str(row["num_failed"]),
            )
        console.print(table)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server_options(parser)
    parser.add_argument("--data", type=Path, required=True, help="folder of task data sets")
    parser.add_argument("--mix", required=True, metavar="NAME=WEIGHT,...", help="data sets")
    parser.add_argument("--concurrency", default="", metavar="N,N,...", help="closed-loop levels")
    parser.add_argument("--rate", default="", metavar="R,R,...", help="open-loop requests a second")
    parser.add_argument("--requests", type=int, default=64, help="requests a cell")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--pause", type=float, default=SETTLE_S, help="seconds between servers' turns"
    )
    parser.add_argument("--tokens", type=int, default=64, help="most tokens a request")
    parser.add_argument("--warmups", type=int, default=2, help="unmeasured requests a server")
    parser.add_argument("--slo", default="", metavar="ttft=S,tpot=S,e2e=S", help="goodput limits")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of prompts")
    parser.add_argument("--max-prompt-chars", type=int, default=4000)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        peers = parse_peers(
            options.server, models=options.model, extras=options.extra, dialects=options.dialect
        )
        levels = [Level(concurrency=int(n)) for n in filter(None, options.concurrency.split(","))]
        levels += [Level(rate=float(r)) for r in filter(None, options.rate.split(","))]
        if not levels:
            raise ValueError("name levels with --concurrency or --rate")
        if any((level.rate or level.concurrency or 0) <= 0 for level in levels):
            raise ValueError("levels must be positive")
        if min(options.rounds, options.requests, options.tokens) < 1 or options.warmups < 0:
            raise ValueError("--rounds, --requests and --tokens want at least 1")
        slo = parse_slo(options.slo)
        examples = mixed_examples(
            options.data, parse_mix(options.mix), options.requests,
            seed=options.seed, max_prompt_chars=options.max_prompt_chars,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        parser.error(str(error))
    refuse_busy_machine(options.max_load)
    console = Console(stderr=True, width=140)
    about = machine.describe()
    stop_on_sigterm()
    try:

        async def run() -> list[Cell]:
            await bring_up(peers, options.log_dir)
            return await measure(
                peers, levels, examples, num_rounds=options.rounds, max_tokens=options.tokens,
                num_warmups=options.warmups, pause_s=options.pause, console=console,
            )  # fmt: skip

        cells = asyncio.run(run())
        servers = describe_servers(peers)
    except PeerFailed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        bring_down(peers)
    result = {
        "tool": "load",
        "machine": about,
        "servers": servers,
        "mix": parse_mix(options.mix),
        "num_requests": options.requests,
        "num_rounds": options.rounds,
        "max_tokens": options.tokens,
        **report(cells, peers, levels, slo),
    }
    print_report(console, result)
    emit(result, options.json)
    return 1 if any(cell.failures for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
