"""Single-stream speed of several servers in one run, alternating, with paired ratios.

    python -m loadtest.compare --server tailor=http://127.0.0.1:8000 \\
        --server llamacpp=loadtest/peers/llamacpp.sh --rounds 12

Each round sends every prompt once to every server, one request at a time, in an order drawn anew
for every round and prompt (the same in every run): a server that works on after its answer, as
vLLM's OpenMP threads do for a second, would else disturb the same follower each time.

Greedy, streamed, prefix caches out of the way. Figures: decode tokens/s (tokens after the first
chunk over the time after it), end-to-end tokens/s, time to the first token of the 200-token prompt,
and the ratio of the first server named to each other one within a round (median, 95 % bootstrap
interval). The texts are compared too: fp32 servers should all say the same.

Prints a table, then ends in one JSON line. Exits 2 when the machine is too busy to measure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtest import machine
from loadtest.completion import ServerRefused, Timing, request_body, stream
from loadtest.peer import (
    SETTLE_S,
    CpuMeter,
    Peer,
    PeerFailed,
    ServerKeys,
    bring_down,
    bring_up,
    parse_peers,
    shuffled,
    stop_on_sigterm,
)
from loadtest.prompts import FIXED
from loadtest.stats import Ratio, ratio, summarize

METRICS = ("decode_tokens_per_s", "end_to_end_tokens_per_s", "ttft_s")


@dataclass(frozen=True, slots=True)
class Run:
    """One measured stream. foreign_cores: cores that others used meanwhile (CpuMeter)."""

    server: str
    prompt: str
    round_id: int
    timing: Timing
    foreign_cores: float = 0.0


def value_of(timing: Timing, metric: str) -> float | None:
    """The figure named by METRICS, None where the stream has none."""
    value = getattr(timing, metric)
    return None if value is None else float(value)


def paired_ratio(
    runs: Sequence[Run], ours: str, theirs: str, prompt: str, metric: str
) -> Ratio | None:
    """ours / theirs over the rounds that have both; for ttft_s theirs / ours, so that above 1 is
    always better for ours. None without a common round."""
    values: dict[tuple[str, int], float] = {}
    for run in runs:
        value = value_of(run.timing, metric)
        if run.prompt == prompt and value is not None:
            values[run.server, run.round_id] = value
    rounds = sorted({round_id for _, round_id in values})
    pairs = [
        (values[ours, round_id], values[theirs, round_id])
        for round_id in rounds
        if (ours, round_id) in values and (theirs, round_id) in values
    ]
    if not pairs:
        return None
    own, other = [a for a, _ in pairs], [b for _, b in pairs]
    return ratio(other, own) if metric == "ttft_s" else ratio(own, other)


def text_groups(runs: Sequence[Run], prompt: str, ours: str) -> list[dict[str, Any]]:
    """The different texts of a prompt, most common first (ours among equals), with the servers that
    said them.

    `diverges_at` is the first character that differs from the first group's text.
    """
    texts: dict[str, dict[str, int]] = {}
    for run in runs:
        if run.prompt == prompt:
            counts = texts.setdefault(run.timing.text, {})
            counts[run.server] = counts.get(run.server, 0) + 1
    ordered = sorted(
        texts.items(),
        key=lambda item: (-len(item[1]), -sum(item[1].values()), ours not in item[1]),
    )
    groups: list[dict[str, Any]] = []
    for text, counts in ordered:
        reference = ordered[0][0]
        common = next(
            (at for at, (a, b) in enumerate(zip(text, reference, strict=False)) if a != b),
            min(len(text), len(reference)),
        )
        groups.append(
            {
                "servers": counts,
                "num_chars": len(text),
                "diverges_at": None if text == reference else common,
                "text_there": None if text == reference else text[common : common + 40],
            }
        )
    return groups


def report(runs: Sequence[Run], peers: Sequence[Peer], prompts: Sequence[str]) -> dict[str, Any]:
    """All figures of a run as JSON values."""
    ours = peers[0].name
    figures: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    for prompt in prompts:
        figures[prompt], ratios[prompt] = {}, {}
        for peer in peers:
            own = [run for run in runs if run.server == peer.name and run.prompt == prompt]
            timings = [run.timing for run in own]
            row: dict[str, Any] = {
                "num_runs": len(timings),
                "worst_foreign_cores": round(max((run.foreign_cores for run in own), default=0), 2),
                "num_tokens": sorted({timing.num_tokens for timing in timings}),
                "num_prompt_tokens": sorted(
                    {timing.num_prompt_tokens for timing in timings if timing.num_prompt_tokens}
                ),
                "num_cached_tokens": max((t.num_cached_tokens for t in timings), default=0),
            }
            for metric in METRICS:
                values = [v for t in timings if (v := value_of(t, metric)) is not None]
                found = summarize(values)
                row[metric] = None if found is None else found.to_json()
            figures[prompt][peer.name] = row
            if peer.name != ours:
                ratios[prompt][peer.name] = {
                    metric: None if r is None else r.to_json()
                    for metric in METRICS
                    for r in [paired_ratio(runs, ours, peer.name, prompt, metric)]
                }
    return {
        "ours": ours,
        "figures": figures,
        "ratios": ratios,
        "texts": {prompt: text_groups(runs, prompt, ours) for prompt in prompts},
    }


def print_report(console: Console, result: Mapping[str, Any]) -> None:
    """The same figures as a table for a person."""
    for prompt, servers in result["figures"].items():
        table = Table(title=f"{prompt}: one stream, medians; ratio = {result['ours']} / server")
        for column in (
            "server", "decode tok/s", "ratio", "end-to-end tok/s", "ratio", "TTFT ms",
            "times faster", "others' cores",
        ):  # fmt: skip
            table.add_column(column, justify="left" if column == "server" else "right")
        for server, row in servers.items():
            against = result["ratios"][prompt].get(server, {})
            cells = [server]
            for metric, scale in zip(METRICS, (1.0, 1.0, 1000.0), strict=True):
                figure = row[metric]
                cells.append("-" if figure is None else f"{figure['p50'] * scale:.1f}")
                found = against.get(metric)
                cells.append(
                    "" if found is None else
                    f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
                )  # fmt: skip
            table.add_row(*cells, f"{row['worst_foreign_cores']:.2f}")
        console.print(table)
        groups = result["texts"][prompt]
        if len(groups) == 1:
            console.print(f"  text: the same from all ({groups[0]['num_chars']} characters)")
        for group in groups if len(groups) > 1 else ():
            names = ", ".join(group["servers"])
            if group["diverges_at"] is None:
                console.print(f"  text A: {names}")
            else:
                console.print(
                    f"  differs at character {group['diverges_at']}: {names}: "
                    f"{group['text_there']!r}",
                    markup=False,
                )


async def measure(
    peers: Sequence[Peer],
    prompts: Mapping[str, str],
    *,
    num_rounds: int,
    num_tokens: int,
    num_warmups: int,
    pause_s: float,
    max_foreign: float,
    num_tries: int,
    runs: list[Run],
    console: Console,
) -> dict[str, float]:
    """Fills `runs` as they are made, so that an interrupted measurement keeps what it has.

    A stream during which others used more than max_foreign cores is run again, num_tries times at
    most, and the least disturbed one is kept. The choice looks at others' CPU time only, never at
    the figure. Returns each server's CPU share while it was others' turn (where it can be read).
    """
    meter = CpuMeter(peers)
    idle_cpu_s: dict[str, float] = {}
    idle_wall_s: dict[str, float] = {}
    salt_base = f"{time.time_ns():x}"
    async with httpx.AsyncClient(timeout=600.0, auth=ServerKeys(peers)) as client:

        async def one(peer: Peer, prompt: str, salt: str) -> Timing:
            body = request_body(
                peer.dialect, peer.model, prompt,
                max_tokens=num_tokens, salt=salt, extra=peer.extra,
            )  # fmt: skip
            try:
                return await stream(client, peer.url, body)
            except (ServerRefused, httpx.HTTPError) as error:
                raise PeerFailed(f"{peer.name}: {error or type(error).__name__}") from error

        with Progress(console=console) as progress:
            total = (num_rounds + num_warmups) * len(peers) * len(prompts)
            bar = progress.add_task("streams", total=total)
            for round_id in range(-num_warmups, num_rounds):
                for name, prompt in prompts.items():
                    for peer in shuffled(peers, round_id, name):
                        progress.update(bar, description=f"{peer.name} {name}", advance=1)
                        before, began = meter.read(), time.perf_counter()
                        least: Run | None = None
                        for attempt in range(num_tries if round_id >= 0 else 1):
                            salt = peer.salt(f"{salt_base}-{round_id}-{name}-{attempt}")
                            foreign, before = meter.foreign_s(), meter.read()
                            began = time.perf_counter()
                            timing = await one(peer, prompt, salt)
                            wall = time.perf_counter() - began
                            after = meter.read()
                            cores = max(0.0, (meter.foreign_s() - foreign) / wall)
                            if least is None or cores < least.foreign_cores:
                                least = Run(peer.name, name, round_id, timing, cores)
                            busy = peer.where[1:] if peer.is_alias else peer.name
                            for other in after:
                                if other != busy and other in before:
                                    used = after[other] - before[other]
                                    idle_cpu_s[other] = idle_cpu_s.get(other, 0.0) + used
                                    idle_wall_s[other] = idle_wall_s.get(other, 0.0) + wall
                            await asyncio.sleep(pause_s)
                            if cores <= max_foreign:
                                break
                        if round_id >= 0 and least is not None:
                            runs.append(least)
    return {name: round(idle_cpu_s[name] / idle_wall_s[name], 4) for name in idle_cpu_s}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server_options(parser)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warmups", type=int, default=1, help="unmeasured rounds")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--prompts", default=",".join(FIXED), help=f"of {', '.join(FIXED)}; default all"
    )
    parser.add_argument("--pause", type=float, default=SETTLE_S, help="seconds between streams")
    parser.add_argument(
        "--max-foreign", type=float, default=0.1,
        help="run a stream again when other processes used more cores than this meanwhile",
    )  # fmt: skip
    parser.add_argument("--tries", type=int, default=3, help="runs of a disturbed stream")
    return parser


def add_server_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The options that name servers and say where the result goes; shared by the load tests.

    required: whether a server must be named, the first of which is ours; else none is.
    """
    parser.add_argument(
        "--server", action="append", required=required, default=None if required else [],
        metavar="NAME=WHERE",
        help="URL, start script, or @NAME; repeat" + ("; the first one is ours" * required),
    )  # fmt: skip
    parser.add_argument("--model", action="append", default=[], metavar="NAME=MODEL")
    parser.add_argument("--extra", action="append", default=[], metavar="NAME=JSON",
                        help="fields merged into that server's requests")  # fmt: skip
    parser.add_argument("--dialect", action="append", default=[], metavar="NAME=DIALECT")
    parser.add_argument("--key", action="append", default=[], metavar="NAME=VARIABLE",
                        help="environment variable that holds that server's API key")  # fmt: skip
    parser.add_argument("--log-dir", type=Path, default=Path("loadtest/results/logs"))
    add_result_options(parser)


def peers_of(options: argparse.Namespace) -> list[Peer]:
    """The servers that `add_server_options` took. Raises ValueError as `parse_peers` does."""
    return parse_peers(
        options.server,
        models=options.model,
        extras=options.extra,
        dialects=options.dialect,
        keys=options.key,
    )


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """Where the JSON line goes (`emit`), and how busy a machine is too busy to measure on."""
    parser.add_argument("--json", type=Path, help="append the JSON line to this file too")
    parser.add_argument(
        "--max-load", type=float, default=0.5,
        help="refuse to measure while the machine's 1-minute load is above this "
        "(read before servers are started)",
    )  # fmt: skip


def refuse_busy_machine(max_load: float) -> None:
    """Exit 2 when the machine is busy: figures taken then say nothing."""
    load = machine.describe()["load_1min"]
    if load > max_load:
        print(f"load is {load}, above --max-load {max_load}: not measuring", file=sys.stderr)
        raise SystemExit(2)


def emit(result: Mapping[str, Any], path: Path | None) -> None:
    """Print the JSON line, last, and append it to `path`."""
    line = json.dumps(result, ensure_ascii=False)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as out:
            out.write(line + "\n")
    print(line)


def describe_servers(peers: Sequence[Peer]) -> dict[str, dict[str, Any]]:
    """What the JSON line says of each server: no path of this machine."""
    return {
        peer.name: {
            "dialect": peer.dialect,
            "model": Path(peer.model).name,
            "version": peer.version,
            "extra": peer.extra,
            "started_by": Path(peer.where).name if peer.process else "",
        }
        for peer in peers
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    console = Console(stderr=True, width=120)
    try:
        peers = peers_of(options)
        prompts = {name: FIXED[name] for name in options.prompts.split(",")}
        if min(options.rounds, options.tokens, options.tries) < 1 or options.warmups < 0:
            raise ValueError("--rounds, --tokens and --tries want at least 1, --warmups at least 0")
    except (ValueError, KeyError) as error:
        parser.error(str(error))
    refuse_busy_machine(options.max_load)
    about = machine.describe()
    runs: list[Run] = []
    idle: dict[str, float] = {}
    complete = True
    stop_on_sigterm()
    try:

        async def run() -> dict[str, float]:
            await bring_up(peers, options.log_dir)
            return await measure(
                peers, prompts, num_rounds=options.rounds, num_tokens=options.tokens,
                num_warmups=options.warmups, pause_s=options.pause,
                max_foreign=options.max_foreign, num_tries=options.tries, runs=runs,
                console=console,
            )  # fmt: skip

        idle = asyncio.run(run())
    except PeerFailed as error:
        print(error, file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SystemExit):
        if not runs:
            raise
        console.print("interrupted: the figures are of the runs so far")
        complete = False
    finally:
        servers = describe_servers(peers)
        bring_down(peers)
    result = {
        "tool": "compare",
        "machine": about,
        "servers": servers,
        "num_rounds": options.rounds,
        "complete": complete,
        "max_tokens": options.tokens,
        **report(runs, peers, list(prompts)),
        "idle_cpu_share": idle,
    }
    print_report(console, result)
    for name, share in idle.items():
        if share > 0.02:
            console.print(f"warning: {name} used {share:.1%} of a core while others were measured")
    emit(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
