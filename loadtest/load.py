"""Load on a server with real task prompts: open loop (Poisson, trace), closed loop, pairs, sweeps.

    python -m loadtest.load --data DATA_DIR --mix squad=2,massive_en=1,advising_sql=1 \\
        --server tailor-off=http://127.0.0.1:8000 --server tailor-on=@tailor-off \\
        --extra 'tailor-off={"speculation": {"drafter": "off"}}' \\
        --concurrency 1,4,16 --rounds 5
    python -m loadtest.load --data DATA_DIR --mix squad,advising_sql \\
        --server tailor=http://127.0.0.1:8000 --as squad=rag-qa --as advising_sql=sql \\
        --trace requests.jsonl --trace-speed 1,2 --slo ttft=0.5,tpot=0.05

Closed loop (`--concurrency`): N clients, each sends its next request when its last one is done.
Open loop (`--rate`): requests come at Poisson times whatever the server does, as users do; times
are drawn once per cell and round, so every server meets the same arrivals, and latency counts from
the time a request was *due*. A trace (`--trace`; loadtest.trace has its form, Tailor's own JSON log
is one) is an open loop too: its times, divided by `--trace-speed`, its tasks and lengths. Every
(level, round) runs all servers one after the other, in an order drawn anew, with the same requests.

`--mix` draws from data sets by weight: DATA_DIR/NAME/test.jsonl, a `prompt` a line. `--as
squad=rag-qa` sends a data set's prompts to a Tailor server as requests of that task; without it all
are the server's model's. `--key NAME=VARIABLE` sends a server the API key that an environment
variable holds.

Told per level and server: requests/s, tokens/s, TTFT, time per output token (TPOT), inter-chunk
gaps (ITL), end-to-end latency, goodput (share and rate of requests that met `--slo`), tokens and
draft nodes a step where the server tells, the same by data set, medians over rounds with their
95 % bootstrap interval, and the paired ratios to the first server of tokens/s, TTFT, TPOT, ITL and
end-to-end latency with theirs. Ends in one JSON line, which loadtest.report makes a page of. Exits
1 when a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
from loadtest.prompts import Example, mixed_examples, parse_mix
from loadtest.stats import median_interval, ratio, summarize
from loadtest.trace import Arrival, read_trace

SLO_NAMES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Level:
    """One load level: N clients (closed loop), requests a second, or a trace at so many times its
    own speed (open loop)."""

    concurrency: int | None = None
    rate: float | None = None
    speed: float | None = None

    @property
    def label(self) -> str:
        if self.speed is not None:
            return f"trace x{self.speed:g}"
        return f"{self.concurrency} clients" if self.rate is None else f"{self.rate:g} req/s"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a cell. due_s: seconds after its start; None: when a client is free.

    task: what a Tailor server gets as `model`; "" for its own model.
    """

    example: Example
    task: str
    max_tokens: int
    due_s: float | None = None


@dataclass(slots=True)
class Cell:
    """What one server did at one level in one round; written by run_cell only.

    late_s[i]: how long after its due time request i was sent (open loop; else 0). data_sets[i]:
    where its prompt is from.
    """

    server: str
    level: Level
    round_id: int
    timings: list[Timing] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    data_sets: list[str] = field(default_factory=list)
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


def parse_tasks(texts: Sequence[str], weights: Mapping[str, float]) -> dict[str, str]:
    """`--as squad=rag-qa` options. Raises ValueError for a data set that the mix does not have."""
    tasks: dict[str, str] = {}
    for text in texts:
        name, _, task = text.partition("=")
        if name not in weights or not task:
            raise ValueError(f"--as wants DATASET=TASK with a data set of --mix, not {text!r}")
        tasks[name] = task
    return tasks


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


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of every level, the same for all servers.

    examples: the draws of the mix. tasks: the task of a data set, where it has one. trace: the
    arrivals that a `speed` level replays, with the example of each.
    """

    examples: Sequence[Example]
    max_tokens: int
    tasks: Mapping[str, str] = field(default_factory=dict)
    trace: Sequence[tuple[Arrival, Example]] = ()

    def asks(self, level: Level, round_id: int) -> list[Ask]:
        """What a cell sends, in order of time."""
        if level.speed is not None:
            return [
                Ask(
                    example,
                    self.tasks.get(example.task, ""),
                    arrival.max_tokens or self.max_tokens,
                    arrival.at_s / level.speed,
                )
                for arrival, example in self.trace
            ]
        due: Sequence[float | None] = [None] * len(self.examples)
        if level.rate is not None:
            due = arrival_times(len(self.examples), level.rate, round_id)
        return [
            Ask(example, self.tasks.get(example.task, ""), self.max_tokens, due_s)
            for example, due_s in zip(self.examples, due, strict=True)
        ]


def trace_examples(
    arrivals: Sequence[Arrival],
    draw: Callable[[Mapping[str, float], int], Sequence[Example]],
    weights: Mapping[str, float],
    tasks: Mapping[str, str],
) -> list[tuple[Arrival, Example]]:
    """Each arrival with its own prompt, or one drawn from its data set, or from the whole mix.

    draw: (weights, number) -> examples. An arrival's task is a data set of the mix, or what `tasks`
    sends one as. Raises ValueError for another.
    """
    sets = {task: name for name, task in tasks.items()} | {name: name for name in weights}
    wanted: dict[str, int] = {}
    for arrival in arrivals:
        if arrival.prompt is None:
            wanted[arrival.task] = wanted.get(arrival.task, 0) + 1
    drawn = {}
    for task, number in wanted.items():
        if task and task not in sets:
            raise ValueError(
                f"the trace has requests of {task!r}: say with --as DATASET={task} "
                "which data set of --mix stands for it"
            )
        chosen = {sets[task]: 1.0} if task else weights
        drawn[task] = iter(draw(chosen, number))
    return [
        (
            arrival,
            next(drawn[arrival.task])
            if arrival.prompt is None
            else Example(sets.get(arrival.task, arrival.task), "", arrival.prompt, ""),
        )
        for arrival in arrivals
    ]


async def run_cell(
    client: httpx.AsyncClient,
    peer: Peer,
    level: Level,
    round_id: int,
    asks: Sequence[Ask],
    *,
    salt: str,
) -> Cell:
    """Send every request at this level; failures are booked, not raised."""
    cell = Cell(peer.name, level, round_id)

    async def one(index: int, due_s: float | None) -> None:
        ask = asks[index]
        tailor = peer.dialect == "tailor"
        body = request_body(
            peer.dialect, (tailor and ask.task) or peer.model, ask.example.prompt,
            max_tokens=ask.max_tokens, salt=f"{salt}-{index}", extra=peer.extra,
        )  # fmt: skip
        if tailor:
            body["include_speculation"] = True
        late = 0.0 if due_s is None else max(0.0, time.perf_counter() - due_s)
        try:
            timing = await stream(client, peer.url, body)
        except (ServerRefused, httpx.HTTPError) as error:
            told = f"{ask.example.task}: {error or type(error).__name__}"
            cell.failures.append(told[:200])
            return
        cell.timings.append(timing)
        cell.late_s.append(late)
        cell.data_sets.append(ask.example.task)

    began = time.perf_counter()
    if level.concurrency is None:
        tasks = []
        for index, ask in enumerate(asks):
            due = began + (ask.due_s or 0.0)
            delay = due - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(one(index, due)))
        await asyncio.gather(*tasks)
    else:
        waiting = iter(range(len(asks)))

        async def a_client() -> None:
            for index in waiting:
                await one(index, None)

        await asyncio.gather(*(a_client() for _ in range(level.concurrency)))
    cell.wall_s = time.perf_counter() - began
    return cell


async def measure(
    peers: Sequence[Peer],
    levels: Sequence[Level],
    plan: Plan,
    *,
    num_rounds: int,
    num_warmups: int,
    pause_s: float,
    console: Console,
) -> list[Cell]:
    """All cells, warm-ups left out."""
    cells: list[Cell] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    salt = f"{time.time_ns():x}"
    async with httpx.AsyncClient(timeout=900.0, limits=limits, auth=ServerKeys(peers)) as client:
        with Progress(console=console) as progress:
            bar = progress.add_task("cells", total=num_rounds * len(levels) * len(peers))
            for peer in peers:
                first = plan.asks(levels[0], -1)[:num_warmups]
                await run_cell(client, peer, Level(concurrency=1), -1, first, salt=f"{salt}-warm")
            for round_id in range(num_rounds):
                for level in levels:
                    for peer in shuffled(peers, round_id, level.label):
                        progress.update(bar, description=f"{peer.name} {level.label}")
                        cells.append(
                            await run_cell(
                                client, peer, level, round_id, plan.asks(level, round_id),
                                # The same salt for on and off would let the second one read the
                                # first one's prefixes: one salt per cell.
                                salt=f"{salt}-{peer.name}-{round_id}-{level.label}",
                            )
                        )  # fmt: skip
                        progress.update(bar, advance=1)
                        if len(peers) > 1:
                            await asyncio.sleep(pause_s)
    return cells


LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")


def latencies(timings: Sequence[Timing], lates: Sequence[float]) -> dict[str, list[float]]:
    """Every sample of LATENCIES, in seconds; the first and the last count from the due time."""
    return {
        "ttft_s": [t.ttft_s + x for t, x in zip(timings, lates, strict=True) if t.chunk_s],
        "tpot_s": [v for t in timings if (v := t.tpot_s) is not None],
        "itl_s": [gap for t in timings for gap in t.inter_chunk_s],
        "e2e_s": [t.end_s - t.start_s + x for t, x in zip(timings, lates, strict=True)],
    }


def _account(
    timings: Sequence[Timing], lates: Sequence[float], num_failed: int, slo: Mapping[str, float]
) -> dict[str, Any]:
    """What a set of requests got, as JSON values; the failed ones met no objective."""
    good = sum(meets_slo(t, late, slo) for t, late in zip(timings, lates, strict=True))
    steps = sum((t.speculation or {}).get("steps", 0) for t in timings)
    drafted = sum((t.speculation or {}).get("drafted_tokens", 0) for t in timings)
    with_steps = sum(t.num_tokens for t in timings if t.speculation)
    return {
        "num_requests": len(timings) + num_failed,
        "num_good": good,
        "good_share": good / max(1, len(timings) + num_failed),
        "tokens_per_step": with_steps / steps if steps else None,
        "nodes_per_step": drafted / steps if steps else None,
        **{
            name: None if (s := summarize(values)) is None else s.to_json()
            for name, values in latencies(timings, lates).items()
        },
    }


def by_round(cells: Sequence[Cell], slo: Mapping[str, float]) -> dict[str, list[float | None]]:
    """One figure a cell of: tokens/s, good requests/s, and the median (TTFT: the p99, too) of each
    latency. None where a cell has none."""
    found: dict[str, list[float | None]] = {}
    for cell in cells:
        samples = latencies(cell.timings, cell.late_s)
        good = sum(
            meets_slo(t, late, slo) for t, late in zip(cell.timings, cell.late_s, strict=True)
        )
        figures: dict[str, float | None] = {
            "tokens_per_s": cell.tokens_per_s,
            "goodput_per_s": good / cell.wall_s,
        }
        for name in LATENCIES:
            told = summarize(samples[name])
            figures[name] = None if told is None else told.p50
            if name == "ttft_s":
                figures["ttft_p99_s"] = None if told is None else told.p99
        for name, value in figures.items():
            found.setdefault(name, []).append(value)
    return found


def report(
    cells: Sequence[Cell], peers: Sequence[Peer], levels: Sequence[Level], slo: Mapping[str, float]
) -> dict[str, Any]:
    """All figures as JSON values. Latencies in seconds; ratios are server / first server, of the
    rounds' medians for latencies."""
    base = peers[0].name
    figures: dict[str, Any] = {}
    for level in levels:
        rows: dict[str, Any] = {}
        of_base = [c for c in cells if c.server == base and c.level == level]
        base_rounds = by_round(of_base, slo)
        for peer in peers:
            own = [c for c in cells if c.server == peer.name and c.level == level]
            timings = [t for c in own for t in c.timings]
            lates = [late for c in own for late in c.late_s]
            sets = [name for c in own for name in c.data_sets]
            wall = sum(c.wall_s for c in own)
            num_failed = sum(len(c.failures) for c in own)
            rounds = by_round(own, slo)
            ratios = {}
            for name in ("tokens_per_s", *LATENCIES) if peer.name != base else ():
                pairs = [
                    (mine, theirs)
                    for mine, theirs in zip(rounds[name], base_rounds[name], strict=True)
                    if mine and theirs
                ]
                whole = len(pairs) == len(own)
                ratios[name] = ratio(*zip(*pairs, strict=True)).to_json() if whole else None
            account = _account(timings, lates, num_failed, slo)
            good = account.pop("num_good")
            rows[peer.name] = {
                **account,
                "num_failed": num_failed,
                "failures": sorted({f for c in own for f in c.failures})[:5],
                "requests_per_s": len(timings) / wall,
                "tokens_per_s": sum(t.num_tokens for t in timings) / wall,
                "goodput_per_s": good / wall,
                "ratio": ratios.get("tokens_per_s"),
                "ratios": ratios,
                "rounds": {
                    name: median_interval(told).to_json()
                    for name, values in rounds.items()
                    if (told := [value for value in values if value is not None])
                },
                "data_sets": {
                    name: _account(
                        [t for t, s in zip(timings, sets, strict=True) if s == name],
                        [x for x, s in zip(lates, sets, strict=True) if s == name],
                        sum(f.startswith(f"{name}: ") for c in own for f in c.failures),
                        slo,
                    )
                    for name in sorted(set(sets))
                },
            }
        figures[level.label] = rows
    return {"base": base, "slo": dict(slo), "figures": figures}


def print_report(console: Console, result: Mapping[str, Any]) -> None:
    for level, rows in result["figures"].items():
        table = Table(title=f"{level}; ratio = server / {result['base']}")
        table.add_column("server")
        for column in (
            "req/s", "tok/s", "ratio", "TTFT p50/p99 ms", "TPOT p50/p99 ms", "ITL p50/p99 ms",
            "e2e p50/p99 s",
            "good", "tok/step", "nodes/step", "failed",
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
                pair("itl_s", 1000),
                pair("e2e_s", 1),
                f"{row['good_share']:.0%}",
                "-" if row["tokens_per_step"] is None else f"{row['tokens_per_step']:.2f}",
                "-" if row["nodes_per_step"] is None else f"{row['nodes_per_step']:.2f}",
                str(row["num_failed"]),
            )
        console.print(table)
        sets = [(server, row["data_sets"]) for server, row in rows.items()]
        if all(len(found) < 2 for _, found in sets):
            continue
        table = Table(title=f"{level}, by data set")
        for column in ("data set", "server", "requests", "TTFT p50 ms", "TPOT p50 ms", "tok/step"):
            table.add_column(
                column, justify="left" if column in ("data set", "server") else "right"
            )
        for name in sorted({name for _, found in sets for name in found}):
            for server, found in sets:
                if name in found:
                    part = found[name]
                    table.add_row(
                        name, server, str(part["num_requests"]),
                        *(
                            "-" if part[kind] is None else f"{part[kind]['p50'] * 1000:.4g}"
                            for kind in ("ttft_s", "tpot_s")
                        ),
                        "-" if part["tokens_per_step"] is None
                        else f"{part['tokens_per_step']:.2f}",
                    )  # fmt: skip
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
    parser.add_argument("--trace", type=Path, help="file of arrivals to replay (loadtest.trace)")
    parser.add_argument("--trace-speed", default="1", metavar="X,X,...", help="times its own speed")
    parser.add_argument(
        "--as", action="append", default=[], dest="tasks", metavar="DATASET=TASK",
        help="task of a data set's requests on a Tailor server; repeat",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, default=64, help="requests a cell (not of a trace)")
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
        peers = peers_of(options)
        levels = [Level(concurrency=int(n)) for n in filter(None, options.concurrency.split(","))]
        levels += [Level(rate=float(r)) for r in filter(None, options.rate.split(","))]
        weights = parse_mix(options.mix)
        tasks = parse_tasks(options.tasks, weights)
        if options.trace is not None:
            levels += [Level(speed=float(x)) for x in filter(None, options.trace_speed.split(","))]
        if not levels:
            raise ValueError("name levels with --concurrency, --rate or --trace")
        if any(not (level.speed or level.rate or level.concurrency or 0) > 0 for level in levels):
            raise ValueError("levels must be positive")
        if min(options.rounds, options.requests, options.tokens) < 1 or options.warmups < 0:
            raise ValueError("--rounds, --requests and --tokens want at least 1")
        slo = parse_slo(options.slo)

        def draw(chosen: Mapping[str, float], number: int) -> Sequence[Example]:
            return mixed_examples(
                options.data, dict(chosen), number,
                seed=options.seed, max_prompt_chars=options.max_prompt_chars,
            )  # fmt: skip

        plan = Plan(
            draw(weights, options.requests),
            options.tokens,
            tasks,
            ()
            if options.trace is None
            else trace_examples(read_trace(options.trace), draw, weights, tasks),
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    refuse_busy_machine(options.max_load)
    console = Console(stderr=True, width=180)
    about = machine.describe()
    stop_on_sigterm()
    try:

        async def run() -> list[Cell]:
            await bring_up(peers, options.log_dir)
            return await measure(
                peers, levels, plan, num_rounds=options.rounds,
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
        "mix": weights,
        "tasks": tasks,
        "trace": None
        if options.trace is None
        else {"num_requests": len(plan.trace), "span_s": plan.trace[-1][0].at_s},
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
