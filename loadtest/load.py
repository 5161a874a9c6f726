"""Load on a server: task prompts or fixed ones; one stream, many, open loop (Poisson, trace).

    python -m loadtest.load --data DATA_DIR --mix squad=2,massive_en=1,advising_sql=1 \\
        --server tailor-off=http://127.0.0.1:8000 --server tailor-on=@tailor-off \\
        --extra 'tailor-off={"speculation": {"drafter": "off"}}' \\
        --concurrency 1,4,16 --rounds 5
    python -m loadtest.load --data DATA_DIR --mix squad,advising_sql \\
        --server tailor=http://127.0.0.1:8000 --as squad=rag-qa --as advising_sql=sql \\
        --trace requests.jsonl --trace-speed 1,2 --slo ttft=0.5,tpot=0.05

One stream against peers, and several streams at once:

    python -m loadtest.load --prompts plain,copy --tokens 128 --rounds 12 --max-foreign 0.1 \\
        --server tailor=http://127.0.0.1:8000 --server llamacpp=loadtest/peers/llamacpp.sh
    python -m loadtest.load --prompts distinct --concurrency 8,32 --rounds 5 \\
        --server tailor=http://127.0.0.1:8000

Closed loop (`--concurrency`): N clients, each sends its next request when its last one is done.
Open loop (`--rate`): requests come at Poisson times whatever the server does, as users do; times
are drawn once per cell and round, so every server meets the same arrivals, and latency counts from
the time a request was *due*. `--rate 50%,80%` is of the first server's capacity: the requests a
second that it answers in a closed loop of `--capacity-clients`, measured first. A trace (`--trace`;
loadtest.trace has its form, Tailor's own JSON log is one) is an open loop too: its times, divided
by `--trace-speed`, its tasks and lengths. Every
(level, round) runs all servers one after the other, in an order drawn anew (a server that works on
after its answer, as vLLM's threads do for a second, would else disturb the same follower each
time), with the same requests.

`--mix` draws from data sets by weight: DATA_DIR/NAME/test.jsonl, a `prompt` a line. `--as
squad=rag-qa` sends a data set's prompts to a Tailor server as requests of that task; without it all
are the server's model's. `--prompts` takes fixed prompts instead (loadtest.prompts): a cell then
has one request for each client, and each prompt once; their texts are compared (greedy float32
servers should all say the same). `distinct` are prompts that share no prefix, one for each client.
`--key NAME=VARIABLE` sends a server the API key that an environment variable holds.

Told per level and server: requests/s, tokens/s, TTFT, time per output token (TPOT), inter-chunk
gaps (ITL), end-to-end latency, goodput (share and rate of requests that met `--slo`), tokens and
draft nodes a step where the server tells, the worst first token, the longest silence, the slowest
stream's share of the median speed, others' CPU use; the same by data set, with the streams' decode
speed; medians over rounds with their 95 % bootstrap interval, and the paired ratios to the first
server with theirs. With fixed prompts a server's KV use, where it tells, must be back at 0 within a
few seconds of each cell. Ends in one JSON line, which loadtest.report makes a page of. Exits 1 when
a request failed, a fixed prompt's stream was cut short, or KV use stayed; 2 when the machine is too
busy.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtest import machine
from loadtest.cells import Cell, Conduct, Level, Plan, capacity, measure, trace_examples
from loadtest.load_figures import parse_slo, print_report, report, text_groups
from loadtest.options import (
    add_server_options,
    describe_servers,
    emit,
    peers_of,
    refuse_busy_machine,
)
from loadtest.peer import SETTLE_S, Peer, PeerFailed, bring_down, bring_up, stop_on_sigterm
from loadtest.prompts import FIXED, Example, distinct_prompts, mixed_examples, parse_mix
from loadtest.trace import read_trace

DISTINCT = "distinct"


def parse_tasks(texts: Sequence[str], weights: Mapping[str, float]) -> dict[str, str]:
    """`--as squad=rag-qa` options. Raises ValueError for a data set that the mix does not have."""
    tasks: dict[str, str] = {}
    for text in texts:
        name, _, task = text.partition("=")
        if name not in weights or not task:
            raise ValueError(f"--as wants DATASET=TASK with a data set of --mix, not {text!r}")
        tasks[name] = task
    return tasks


def fixed_examples(names: str, levels: Sequence[Level]) -> list[Example]:
    """The prompts that `--prompts` names. Raises ValueError for an unknown name."""
    if names == DISTINCT:
        most = max(level.concurrency or 1 for level in levels)
        return [Example(DISTINCT, str(i), p, "") for i, p in enumerate(distinct_prompts(most))]
    unknown = [name for name in names.split(",") if name not in FIXED]
    if unknown:
        raise ValueError(f"--prompts knows {', '.join([*FIXED, DISTINCT])}, not {unknown[0]!r}")
    return [Example(name, name, FIXED[name], "") for name in names.split(",")]


def levels_of(options: argparse.Namespace) -> list[Level]:
    """The levels that were named; one client for fixed prompts without. Raises ValueError."""
    levels = [Level(concurrency=int(n)) for n in filter(None, options.concurrency.split(","))]
    for text in filter(None, options.rate.split(",")):
        value = float(text.removesuffix("%"))
        levels.append(Level(share=value / 100) if text.endswith("%") else Level(rate=value))
    if options.trace is not None:
        levels += [Level(speed=float(x)) for x in filter(None, options.trace_speed.split(","))]
    if not levels and options.prompts:
        levels = [Level(concurrency=1)]
    if not levels:
        raise ValueError("name levels with --concurrency, --rate or --trace")
    if any(
        not (level.speed or level.rate or level.share or level.concurrency or 0) > 0
        for level in levels
    ):
        raise ValueError("levels must be positive")
    if options.capacity_clients < 1:
        raise ValueError("--capacity-clients wants at least 1")
    return levels


def plan_of(options: argparse.Namespace, levels: Sequence[Level]) -> Plan:
    """The requests. Raises ValueError or OSError."""
    if min(options.rounds, options.tokens, options.tries) < 1 or options.warmups < 0:
        raise ValueError("--rounds, --tokens and --tries want at least 1, --warmups at least 0")
    if options.requests is not None and options.requests < 1:
        raise ValueError("--requests wants at least 1")
    if bool(options.prompts) == bool(options.mix):
        raise ValueError("name prompts with --data and --mix, or with --prompts")
    if options.prompts:
        if options.trace is not None or options.tasks:
            raise ValueError("--trace and --as go with --mix")
        examples = fixed_examples(options.prompts, levels)
        least = 1 if options.prompts == DISTINCT else len(examples)
        return Plan(examples, options.tokens, wave=options.requests or least)
    if options.data is None:
        raise ValueError("--mix wants --data, the folder of the data sets")
    weights = parse_mix(options.mix)
    tasks = parse_tasks(options.tasks, weights)

    def draw(chosen: Mapping[str, float], number: int) -> Sequence[Example]:
        return mixed_examples(
            options.data, dict(chosen), number,
            seed=options.seed, max_prompt_chars=options.max_prompt_chars,
        )  # fmt: skip

    return Plan(
        draw(weights, options.requests or 64),
        options.tokens,
        tasks,
        ()
        if options.trace is None
        else trace_examples(read_trace(options.trace), draw, weights, tasks),
    )


def problems_of(cells: Sequence[Cell], plan: Plan) -> list[str]:
    """What makes the run fail: failed requests, fixed prompts cut short, KV use that stayed."""
    found = []
    for cell in cells:
        found += [f"{cell.server}: {failure}" for failure in cell.failures]
        if plan.wave is not None:
            found += [
                f"{cell.server}: a stream brought {t.num_tokens} of {plan.max_tokens} tokens"
                for t in cell.timings
                if not t.chunk_s or (t.finish_reason == "length" and t.num_tokens < plan.max_tokens)
            ]
        if cell.kv_usage_after:
            found.append(f"{cell.server}: KV use {cell.kv_usage_after} when idle")
    return list(dict.fromkeys(found))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server_options(parser)
    parser.add_argument("--data", type=Path, help="folder of task data sets")
    parser.add_argument("--mix", default="", metavar="NAME=WEIGHT,...", help="data sets")
    parser.add_argument(
        "--prompts", default="", metavar="NAME,...",
        help=f"fixed prompts instead: {', '.join(FIXED)}, or {DISTINCT}",
    )  # fmt: skip
    parser.add_argument("--concurrency", default="", metavar="N,N,...", help="closed-loop levels")
    parser.add_argument(
        "--rate", default="", metavar="R,R%,...",
        help="open-loop requests a second, or per cent of the first server's capacity",
    )  # fmt: skip
    parser.add_argument(
        "--capacity-clients", type=int, default=8, metavar="N",
        help="clients of the closed loop that capacity is measured with (8)",
    )  # fmt: skip
    parser.add_argument("--trace", type=Path, help="file of arrivals to replay (loadtest.trace)")
    parser.add_argument("--trace-speed", default="1", metavar="X,X,...", help="times its own speed")
    parser.add_argument(
        "--as", action="append", default=[], dest="tasks", metavar="DATASET=TASK",
        help="task of a data set's requests on a Tailor server; repeat",
    )  # fmt: skip
    parser.add_argument(
        "--requests", type=int,
        help="requests a cell (64; fixed prompts: one for each client and prompt; not of a trace)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--pause", type=float, default=SETTLE_S, help="seconds between servers' turns"
    )
    parser.add_argument("--tokens", type=int, default=64, help="most tokens a request")
    parser.add_argument("--warmups", type=int, default=2, help="unmeasured requests a server")
    parser.add_argument(
        "--max-foreign", type=float, default=float("inf"), metavar="CORES",
        help="run a cell again when other processes used more cores than this meanwhile",
    )  # fmt: skip
    parser.add_argument("--tries", type=int, default=3, help="runs of a disturbed cell (3)")
    parser.add_argument("--slo", default="", metavar="ttft=S,tpot=S,e2e=S", help="goodput limits")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of prompts")
    parser.add_argument("--max-prompt-chars", type=int, default=4000)
    return parser


def _run(
    options: argparse.Namespace, peers: Sequence[Peer], levels: list[Level], plan: Plan
) -> tuple[list[Cell], dict[str, float], bool]:
    """(cells, the servers' CPU use while others ran, whether nothing interrupted it). Levels that
    are shares of the capacity get their rate. Raises PeerFailed."""
    cells: list[Cell] = []
    conduct = Conduct(
        options.rounds, options.warmups, options.pause, options.max_foreign, options.tries
    )
    console = Console(stderr=True, width=180)

    async def run() -> dict[str, float]:
        await bring_up(peers, options.log_dir)
        if any(level.share for level in levels):
            closed = replace(conduct, num_rounds=min(2, conduct.num_rounds), pause_s=0.0)
            most = await capacity(peers[0], options.capacity_clients, plan, closed, console)
            console.print(f"{peers[0].name} answers {most:.3g} requests a second")
            levels[:] = [replace(v, rate=v.share * most) if v.share else v for v in levels]
        return await measure(peers, levels, plan, conduct, cells, console)

    try:
        return cells, asyncio.run(run()), True
    except (KeyboardInterrupt, SystemExit):
        if not cells:
            raise
        console.print("interrupted: the figures are of the cells so far")
        return cells, {}, False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        peers = peers_of(options)
        levels = levels_of(options)
        plan = plan_of(options, levels)
        slo = parse_slo(options.slo)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    refuse_busy_machine(options.max_load)
    about = machine.describe()
    stop_on_sigterm()
    try:
        cells, idle, complete = _run(options, peers, levels, plan)
        servers = describe_servers(peers)
    except PeerFailed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        bring_down(peers)
    fixed = list(dict.fromkeys(e.task for e in plan.examples)) if plan.wave is not None else []
    result: dict[str, Any] = {
        "tool": "load",
        "machine": about,
        "servers": servers,
        "mix": parse_mix(options.mix) if options.mix else dict.fromkeys(fixed, 1.0),
        "tasks": dict(plan.tasks),
        "trace": None
        if options.trace is None
        else {"num_requests": len(plan.trace), "span_s": plan.trace[-1][0].at_s},
        "num_requests": options.requests or (None if fixed else 64),
        "num_rounds": options.rounds,
        "complete": complete,
        "max_tokens": options.tokens,
        "rates": {level.label: level.rate for level in levels if level.share},
        **report(cells, peers, levels, slo),
        "texts": {
            name: text_groups(cells, name, peers[0].name) for name in fixed if name != DISTINCT
        },
        "idle_cpu_share": idle,
    }
    console = Console(stderr=True, width=180)
    print_report(console, result)
    for name, share in idle.items():
        if share > 0.02:
            console.print(f"warning: {name} used {share:.1%} of a core while others were measured")
    emit(result, options.json)
    problems = problems_of(cells, plan)
    for problem in problems[:10]:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
