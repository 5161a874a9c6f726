"""What watching a server costs it: CPU seconds per 1,000 tokens with and without metrics and polls.

    python -m loadtest.overhead --model smollm2-135m-instruct --streams 16 --pairs 12

Starts two servers on free ports: the real one, and one that books no figure (loadtest.uncounted).
Each pair gives the same streams, in an order drawn anew, to three cases:

    uncounted   no metrics, nobody looks
    counted     metrics, nobody looks
    watched     metrics, /metrics scraped every second and the page's data polled every two

CPU seconds are user + system of the server's processes, engines included, from /proc; what this
program uses to send and to poll is not in them. They depend far less on what else the machine does
than times do. Told: CPU seconds per 1,000 tokens, the paired ratios with their 95 % bootstrap
interval, and the CPU time of one scrape and one poll, measured alone on the server that has booked
all of it. Prints a table, then ends in one JSON line. Exits 1 when a ratio's interval lies above
`--goal`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtest import machine
from loadtest.completion import ServerRefused, request_body, stream
from loadtest.options import add_result_options, emit, refuse_busy_machine
from loadtest.peer import CpuMeter, Peer, PeerFailed, free_port, stop, stop_on_sigterm, wait_ready
from loadtest.prompts import distinct_prompts
from loadtest.stats import median_interval, ratio

ROOT = Path(__file__).resolve().parent.parent
CASES = {"uncounted": "uncounted", "counted": "counted", "watched": "counted"}
"""The server of each case."""
POLLS = {"/metrics": 1.0, "/dashboard/data": 2.0}
"""Seconds between two requests of each, as Prometheus here and the page (live.js) make them."""
RATIOS = (("watched", "counted"), ("counted", "uncounted"), ("watched", "uncounted"))


@dataclass(frozen=True, slots=True)
class Turn:
    """What one case did in one pair."""

    case: str
    num_tokens: int
    cpu_s: float
    wall_s: float
    num_polls: int

    @property
    def cpu_s_per_1000(self) -> float:
        return 1000.0 * self.cpu_s / self.num_tokens


def start(name: str, module: str, arguments: Sequence[str], log_dir: Path) -> Peer:
    """A server of its own session, its output in a log file."""
    port = free_port()
    log_dir.mkdir(parents=True, exist_ok=True)
    peer = Peer(name, "", "tailor", url=f"http://127.0.0.1:{port}")
    peer.log_path = log_dir / f"{name}.log"
    command = [sys.executable, "-m", module, "serve", "--host", "127.0.0.1", "--port", str(port)]
    with peer.log_path.open("wb") as log:
        peer.process = subprocess.Popen(
            [*command, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            cwd=ROOT, env=dict(os.environ), start_new_session=True,
        )  # fmt: skip
    return peer


async def poll(client: httpx.AsyncClient, url: str, path: str, every_s: float) -> int:
    """GET a path again and again until cancelled; the number of answers. Raises PeerFailed."""
    number = 0
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(every_s / 2)
        while True:
            began = time.monotonic()
            answer = await client.get(f"{url}{path}")
            if answer.status_code != 200:
                raise PeerFailed(f"{path}: HTTP {answer.status_code}")
            number += 1
            await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began)))
    return number


class Amounts(NamedTuple):
    """Streams at once, tokens of each, and how often so many streams are asked in a turn."""

    num_streams: int
    num_tokens: int
    num_waves: int


async def one_turn(
    client: httpx.AsyncClient, meter: CpuMeter, peer: Peer, case: str, salt: str,
    amounts: Amounts, extra: dict[str, Any],
) -> Turn:  # fmt: skip
    """The same streams for every case: `num_waves` times `num_streams` at once."""
    num_streams, num_tokens, num_waves = amounts
    before, began = meter.read()[peer.name], time.perf_counter()
    polls = [
        asyncio.create_task(poll(client, peer.url, path, every_s))
        for path, every_s in POLLS.items()
        if case == "watched"
    ]
    seen = 0
    try:
        for wave in range(num_waves):
            bodies = [
                request_body(
                    "tailor", peer.model, prompt, max_tokens=num_tokens,
                    salt=f"{salt}-{wave}-{index}", extra={"ignore_eos": True, **extra},
                )
                for index, prompt in enumerate(distinct_prompts(num_streams))
            ]  # fmt: skip
            timings = await asyncio.gather(*(stream(client, peer.url, body) for body in bodies))
            seen += sum(timing.num_tokens for timing in timings)
    except (ServerRefused, httpx.HTTPError) as error:
        raise PeerFailed(f"{case}: {error or type(error).__name__}") from error
    finally:
        for task in polls:
            task.cancel()
        counts = await asyncio.gather(*polls)
    wall = time.perf_counter() - began
    used = meter.read()[peer.name] - before
    if seen != num_waves * num_streams * num_tokens:
        raise PeerFailed(f"{case}: {seen} tokens")
    return Turn(case, seen, used, wall, sum(counts))


async def cost_of_polls(
    client: httpx.AsyncClient, meter: CpuMeter, peer: Peer, number: int
) -> dict[str, Any]:
    """CPU seconds and bytes of one answer of each path, on the idle server; its idling is taken
    off."""
    found: dict[str, Any] = {}
    for path in POLLS:
        size = 0
        before, began = meter.read()[peer.name], time.perf_counter()
        for _ in range(number):
            size = len((await client.get(f"{peer.url}{path}")).content)
        took, used = time.perf_counter() - began, meter.read()[peer.name] - before
        before = meter.read()[peer.name]
        await asyncio.sleep(took)
        idle = meter.read()[peer.name] - before
        found[path] = {"cpu_s": max(0.0, used - idle) / number, "bytes": size, "number": number}
    return found


async def measure(
    peers: dict[str, Peer], options: argparse.Namespace, extra: dict[str, Any], console: Console
) -> tuple[list[dict[str, Turn]], dict[str, Any]]:
    """The pairs, by case, and the cost of one poll. The first round warms up and is not booked."""
    meter = CpuMeter(list(peers.values()))
    rounds: list[dict[str, Turn]] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    stamp = f"{time.time_ns():x}"
    async with httpx.AsyncClient(timeout=900.0, limits=limits) as client:
        with Progress(console=console) as progress:
            bar = progress.add_task("turns", total=(options.pairs + 1) * len(CASES))
            for round_id in range(-1, options.pairs):
                turns: dict[str, Turn] = {}
                for case in random.Random(round_id).sample(list(CASES), len(CASES)):
                    progress.update(bar, description=case)
                    turns[case] = await one_turn(
                        client, meter, peers[CASES[case]], case, f"{stamp}-{case}-{round_id}",
                        Amounts(options.streams, options.tokens, options.waves), extra,
                    )  # fmt: skip
                    progress.update(bar, advance=1)
                    await asyncio.sleep(options.pause)
                if round_id >= 0:
                    rounds.append(turns)
        return rounds, await cost_of_polls(client, meter, peers["counted"], options.polls)


def report(rounds: Sequence[dict[str, Turn]], polls: dict[str, Any], goal: float) -> dict[str, Any]:
    """All figures as JSON values. poll_share: the CPU seconds a second that polling takes, over
    those of the case `counted`."""
    values = {case: [one[case].cpu_s_per_1000 for one in rounds] for case in CASES}
    ratios = {f"{a} / {b}": ratio(values[a], values[b]) for a, b in RATIOS}
    counted = median_interval([one["counted"].cpu_s / one["counted"].wall_s for one in rounds])
    polling = sum(polls[path]["cpu_s"] / every_s for path, every_s in POLLS.items())
    return {
        "cases": {
            case: {
                "cpu_s_per_1000_tokens": median_interval(values[case]).to_json(),
                "tokens_per_s": median_interval(
                    [one[case].num_tokens / one[case].wall_s for one in rounds]
                ).to_json(),
                "num_polls": sum(one[case].num_polls for one in rounds),
            }
            for case in CASES
        },
        "ratios": {name: found.to_json() for name, found in ratios.items()},
        "polls": polls,
        "poll_share": polling / counted.median,
        "goal": goal,
        "above_goal": [name for name, found in ratios.items() if found.low > goal],
        "rounds": [{case: asdict(turn) for case, turn in one.items()} for one in rounds],
    }


def print_report(console: Console, result: dict[str, Any]) -> None:
    table = Table(title=f"{result['num_streams']} streams, medians of {result['num_pairs']} pairs")
    table.add_column("case")
    for column in ("CPU s / 1,000 tokens", "tok/s", "polls"):
        table.add_column(column, justify="right")
    for case, row in result["cases"].items():
        found, speed = row["cpu_s_per_1000_tokens"], row["tokens_per_s"]
        table.add_row(
            case,
            f"{found['median']:.3f} [{found['low']:.3f}, {found['high']:.3f}]",
            f"{speed['median']:.1f}",
            str(row["num_polls"]),
        )
    console.print(table)
    for name, found in result["ratios"].items():
        console.print(f"{name}: {found['median']:.4f} [{found['low']:.4f}, {found['high']:.4f}]")
    for path, found in result["polls"].items():
        console.print(f"{path}: {found['cpu_s'] * 1e3:.2f} ms of CPU, {found['bytes']:,} bytes")
    console.print(f"polling's share of the CPU time: {result['poll_share']:.2%}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as of `tailor serve`")
    parser.add_argument("--serve", action="append", default=[], metavar="ARGUMENT",
                        help="one more argument of `tailor serve`; repeat")  # fmt: skip
    parser.add_argument("--drafter", default="auto", help="of every request; off drafts nothing")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="of each stream")
    parser.add_argument("--waves", type=int, default=1, help="of each turn")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--polls", type=int, default=50, help="of each path, to price one")
    parser.add_argument("--goal", type=float, default=1.02, help="highest ratio that is wanted")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between turns")
    parser.add_argument("--log-dir", type=Path, default=Path("loadtest/results/logs"))
    add_result_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    if min(options.streams, options.tokens, options.waves, options.pairs, options.polls) < 1:
        parser.error("--streams, --tokens, --waves, --pairs and --polls want at least 1")
    refuse_busy_machine(options.max_load)
    about = machine.describe()
    console = Console(stderr=True, width=120)
    stop_on_sigterm()
    peers: dict[str, Peer] = {}
    try:
        for name, module in (
            ("counted", "server.commands.cli"),
            ("uncounted", "loadtest.uncounted"),
        ):
            given = ["--model", options.model, *options.serve]
            peers[name] = start(name, module, given, options.log_dir)
            asyncio.run(wait_ready(peers[name]))
        extra = {"speculation": {"drafter": options.drafter}}
        rounds, polls = asyncio.run(measure(peers, options, extra, console))
    except PeerFailed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        for peer in peers.values():
            stop(peer)
    result = {
        "tool": "overhead",
        "machine": about,
        "model": Path(options.model).name,
        "drafter": options.drafter,
        "num_streams": options.streams,
        "num_tokens": options.tokens,
        "num_waves": options.waves,
        "num_pairs": options.pairs,
        **report(rounds, polls, options.goal),
    }
    print_report(console, result)
    emit(result, options.json)
    return 1 if result["above_goal"] else 0


if __name__ == "__main__":
    sys.exit(main())
