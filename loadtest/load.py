"""Load on servers: task prompts or fixed ones; one stream, many, open loop.

    python -m loadtest.load --data DATA_DIR --mix squad=2,massive_en=1,advising_sql=1 \\
        --server tailor-off=http://127.0.0.1:8000 --server tailor-on=@tailor-off \\
        --extra 'tailor-off={"speculation": {"drafter": "off"}}' \\
        --concurrency 1,4,16 --rounds 5
    python -m loadtest.load --data DATA_DIR --mix squad,advising_sql --rate 50%,80% \\
        --server tailor=http://127.0.0.1:8000 --as squad=rag-qa --as advising_sql=sql \\
        --slo ttft=0.5,tpot=0.05

One stream against peers, and several streams at once:

    python -m loadtest.load --prompts plain,copy --tokens 128 --rounds 12 --max-foreign 0.1 \\
        --server tailor=http://127.0.0.1:8000 --server llamacpp=loadtest/peers/llamacpp.sh
    python -m loadtest.load --prompts distinct --concurrency 8,32 --rounds 5 \\
        --server tailor=http://127.0.0.1:8000

Closed loop (`--concurrency`): N clients, each sends its next request when its last one is done.
Open loop (`--rate`): requests come at Poisson times whatever the server does, as users do. The
times are drawn once a cell and round, so every server meets the same arrivals, and latency counts
from the time at which a request was *due*. `--rate 50%,80%` is of the first server's capacity: the
requests a second that it answers in a closed loop of `--capacity-clients`, measured first. Every
(level, round) runs all servers one after the other, in an order drawn anew (a server that works on
after its answer, as vLLM's threads do for a second, would else disturb the same follower each
time), with the same requests.

`--mix` draws from data sets by weight: DATA_DIR/NAME/test.jsonl, a `prompt` a line. `--as
squad=rag-qa` sends a data set's prompts to a Tailor server as requests of that task; without it all
are the server's model's. `--prompts` takes fixed prompts instead (loadtest.prompts): a cell then
has one request for each client, and each prompt once. `distinct` are prompts that share no prefix,
one for each client. Texts are compared with the first server's: greedy ones of the same weights in
float32 should all be the same. `--key NAME=VARIABLE` sends a server the API key that an environment
variable holds.

The figures of each level and server: requests/s, tokens/s, characters/s (what models with other
tokens are compared by), time to the first token (TTFT), time per output token (TPOT), gaps between
chunks (ITL), end-to-end latency, goodput (share and rate of requests that met `--slo`), tokens and
draft nodes a step where the server reports them, the server's CPU seconds per 1,000 tokens, the
worst first token, the longest silence, the slowest stream's share of the median speed, others' CPU
use, that of the other servers among it. The same by data set, with the streams' decode speed, and
exact match and word F1 where the data have a `completion`. Medians over rounds with their 95 %
bootstrap interval, and the paired ratios to the first server with theirs.

`--html` writes the tables as a page. Ends in one JSON line. Exits 1 when a request failed or a
fixed prompt's stream was cut short; 2 when the machine is too busy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from drafters.atomic_file import replacing
from loadtest.cells import Cell, Conduct, Level, Plan, capacity, measure
from loadtest.figures import parse_slo, print_report, report
from loadtest.options import (
    ResultOptions,
    ServerOptions,
    ask_servers,
    describe_machine,
    describe_servers,
    emit,
    listed,
    numbers,
    program,
)
from loadtest.peer import SETTLE_S
from loadtest.prompts import FIXED, Example, distinct_prompts, mixed_examples, parse_mix
from server.commands.options import as_options

DISTINCT = "distinct"
app, main = program("load", __doc__)


@as_options
class LoadOptions:
    """What is asked, how often, and what is written."""

    data: Annotated[Path | None, Parameter(help="folder of task data sets")] = None
    mix: Annotated[str, Parameter(metavar="NAME=WEIGHT,...", help="data sets")] = ""
    prompts: Annotated[
        str,
        Parameter(
            metavar="NAME,...", help=f"fixed prompts instead: {', '.join(FIXED)}, or {DISTINCT}"
        ),
    ] = ""
    concurrency: Annotated[str, Parameter(metavar="N,...", help="closed-loop levels")] = ""
    rate: Annotated[
        str,
        Parameter(
            metavar="R,R%,...",
            help="open-loop requests a second, or per cent of the first server's capacity",
        ),
    ] = ""
    capacity_clients: Annotated[
        int, Parameter(help="clients of the closed loop that capacity is measured with")
    ] = 8
    tasks: Annotated[
        tuple[str, ...],
        Parameter(
            name="--as",
            metavar="DATASET=TASK",
            help="task of a data set's requests on a Tailor server; repeat",
        ),
    ] = ()
    requests: Annotated[
        int | None,
        Parameter(help="requests a cell (64; fixed prompts: one for each client and prompt)"),
    ] = None
    rounds: int = 3
    pause: Annotated[float, Parameter(help="seconds between servers' turns")] = SETTLE_S
    tokens: Annotated[int, Parameter(help="most tokens a request")] = 64
    warmups: Annotated[int, Parameter(help="unmeasured requests a server")] = 2
    max_foreign: Annotated[
        float,
        Parameter(
            metavar="CORES",
            help="run a cell again when other processes used more cores than this meanwhile",
        ),
    ] = float("inf")
    tries: Annotated[int, Parameter(help="runs of a disturbed cell")] = 3
    slo: Annotated[str, Parameter(metavar="ttft=S,tpot=S,e2e=S", help="goodput limits")] = ""
    seed: Annotated[int, Parameter(help="of the choice of prompts")] = 0
    max_prompt_chars: int = 4000
    html: Annotated[Path | None, Parameter(help="write the tables as a page")] = None


_SERVERS, _RESULTS, _LOAD = ServerOptions(), ResultOptions(), LoadOptions()


def fixed_examples(names: str, levels: Sequence[Level]) -> list[Example]:
    """The prompts that `--prompts` names. Raises ValueError for an unknown name."""
    if names == DISTINCT:
        most = max(level.concurrency or 1 for level in levels)
        return [Example(DISTINCT, str(i), p, "") for i, p in enumerate(distinct_prompts(most))]
    unknown = [name for name in names.split(",") if name not in FIXED]
    if unknown:
        raise ValueError(f"--prompts knows {', '.join([*FIXED, DISTINCT])}, not {unknown[0]!r}")
    return [Example(name, name, FIXED[name], "") for name in names.split(",")]


def levels_of(options: LoadOptions) -> list[Level]:
    """The levels that were named; one client for fixed prompts without. Raises ValueError."""
    levels = []
    if options.concurrency or (options.prompts and not options.rate):
        clients = numbers(options.concurrency or "1", "--concurrency")
        levels = [Level(concurrency=n) for n in clients]
    for text in listed(options.rate):
        value = float(text.removesuffix("%"))
        if not value > 0:
            raise ValueError(f"--rate wants positive numbers, not {text!r}")
        levels.append(Level(share=value / 100) if text.endswith("%") else Level(rate=value))
    if not levels:
        raise ValueError("name levels with --concurrency or --rate")
    return levels


def plan_of(options: LoadOptions, levels: Sequence[Level]) -> Plan:
    """The requests. Raises ValueError or OSError."""
    counts = (options.rounds, options.tokens, options.tries, options.capacity_clients)
    if min(*counts, 1 if options.requests is None else options.requests) < 1:
        raise ValueError("--rounds, --tokens, --tries and --requests want at least 1")
    if options.warmups < 0:
        raise ValueError("--warmups wants at least 0")
    if bool(options.prompts) == bool(options.mix):
        raise ValueError("name prompts with --data and --mix, or with --prompts")
    if options.prompts:
        if options.tasks:
            raise ValueError("--as goes with --mix")
        examples = fixed_examples(options.prompts, levels)
        least = 1 if options.prompts == DISTINCT else len(examples)
        return Plan(examples, options.tokens, wave=options.requests or least)
    if options.data is None:
        raise ValueError("--mix wants --data, the folder of the data sets")
    weights, tasks = parse_mix(options.mix), dict[str, str]()
    for text in options.tasks:
        name, _, tasks[name] = text.partition("=")
        if name not in weights or not tasks[name]:
            raise ValueError(f"--as wants DATASET=TASK with a data set of --mix, not {text!r}")
    examples = mixed_examples(
        options.data, weights, options.requests or 64,
        seed=options.seed, max_prompt_chars=options.max_prompt_chars,
    )  # fmt: skip
    return Plan(examples, options.tokens, tasks)


@app.default
def load(
    *,
    servers: ServerOptions = _SERVERS,
    options: LoadOptions = _LOAD,
    results: ResultOptions = _RESULTS,
) -> int:
    """Measure, print, and write. Raises ValueError for what cannot be asked, PeerFailed."""
    peers = servers.peers()
    if not peers:
        raise ValueError("name a server with --server")
    levels = levels_of(options)
    plan = plan_of(options, levels)
    slo = parse_slo(options.slo)
    results.refuse_busy_machine()
    about = describe_machine()
    cells: list[Cell] = []
    conduct = Conduct(
        options.rounds, options.warmups, options.pause, options.max_foreign, options.tries
    )
    console, complete = Console(stderr=True, width=180), True

    async def all_levels() -> None:
        if plan.tasks and not any(peer.dialect == "tailor" for peer in peers):
            raise ValueError("--as names tasks of Tailor, and none of these servers is Tailor")
        if any(level.share for level in levels):
            closed = replace(conduct, num_rounds=min(2, conduct.num_rounds), pause_s=0.0)
            most = await capacity(peers[0], options.capacity_clients, plan, closed, console)
            console.print(f"{peers[0].name} answers {most:.3g} requests a second")
            levels[:] = [replace(v, rate=v.share * most) if v.share else v for v in levels]
        await measure(peers, levels, plan, conduct, cells, console)

    try:
        ask_servers(peers, servers.log_dir, all_levels)
    except (KeyboardInterrupt, SystemExit):
        if not cells:
            raise
        console.print("interrupted: the figures are of the cells so far")
        complete = False
    fixed = list(dict.fromkeys(e.task for e in plan.examples)) if plan.wave is not None else []
    result: dict[str, Any] = {
        "servers": describe_servers(peers),
        "mix": parse_mix(options.mix) if options.mix else dict.fromkeys(fixed, 1.0),
        "tasks": dict(plan.tasks),
        "num_requests": options.requests or (None if fixed else 64),
        "num_rounds": options.rounds,
        "complete": complete,
        "max_tokens": options.tokens,
        "rates": {level.label: level.rate for level in levels if level.share},
        **report(cells, peers, levels, slo),
    }
    console = Console(stderr=True, width=180, record=options.html is not None)
    print_report(console, result)
    if options.html is not None:
        versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items())
        console.print(f"{about['utc']}, {about['cpu']}, {about['cores']} cores, commit "
                      f"{about['commit']}, {versions}")  # fmt: skip
        with replacing(options.html) as page:
            page.write(console.export_html().encode())
        options.html.chmod(0o644)
    emit("load", result, results.json, about)
    problems = []
    for cell in cells:
        problems += [f"{cell.server}: {failure}" for failure in cell.failures]
        for stream in cell.timings if plan.wave is not None else ():
            is_cut = stream.finish_reason == "length" and stream.num_tokens < plan.max_tokens
            if is_cut or not stream.chunk_s:
                brought = f"{stream.num_tokens} of {plan.max_tokens}"
                problems.append(f"{cell.server}: a stream brought {brought} tokens")
    for problem in list(dict.fromkeys(problems))[:10]:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
