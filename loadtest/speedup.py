"""What drafts and slices are worth end to end, by data set, and beside other servers.

    python -m loadtest.speedup --data DATA_DIR --work WORK_DIR --out speedup.jsonl \\
        --server vllm-ngram=loadtest/peers/vllm_ngram.sh \\
        --server llamacpp-mod=loadtest/peers/llamacpp_ngram_mod.sh
    python -m loadtest.speedup --data DATA_DIR --work WORK_DIR --ways off,slice,exact,exact-warm \\
        --tailor-model gemma-3-270m --sets massive_en,squad

Starts Tailor itself, with tasks for each way of answering a data set (loadtest.prompts):

    off         no drafts: what all others are compared with
    cold        drafts from the request alone
    learned     has answered --learned train prompts before, as a server that has run for a while
    warm        drafts from a corpus of the model's own outputs for train prompts, too
    slice       no drafts; the LM head of the task's vocabulary slice (its text may differ)
    exact       the slice verified by the full head; exact-warm: and drafts as in `warm`
    mix, trie   the drafters of the papers: `mix` with the corpus of `warm`, `trie` from the prompt
    grammys     the model's own bigrams behind the request's n-grams (N-Grammys)

In every round each way, in an order drawn anew, answers --prompts test prompts, greedy, one request
at a time or with --clients at once; no prompt comes back in another round, so that nothing learns
the answers. What is learned is kept by cache_salt: requests of `learned` share one, so that their
template's blocks may be cached; all others have one each. The ratio of tokens a second within a
round is the speedup (median over rounds, 95 % bootstrap interval), prompt included. In the last
--peer-rounds rounds the other servers answer the same prompts too.

Counted exactly: steps, tokens and draft nodes a step, CPU seconds (server's processes and threads,
from the system). --weights int8 measures Tailor's integer products. A short sitting: --rounds 4
--prompts 2 --tokens 48.

A data set's line is appended to --out when it is done; sets that are there already are not measured
again, so an interrupted sitting goes on with the same command, and with all sets done it only
prints. What is missing in --work is built there (--prepare does only that).

Prints a table for each number of clients, then ends in one JSON line. Exits 1 when a text of Tailor
differs (those of `slice` aside), 2 when the machine is too busy to measure.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
from cyclopts import Parameter
from rich.console import Console

from loadtest.cells import Ask, Cell, Conduct, Level, Plan, measure, refuse_failures, run_cell
from loadtest.figures import interval, number, report
from loadtest.options import (
    ResultOptions,
    ServerOptions,
    describe_machine,
    describe_servers,
    emit,
    head_of,
    listed,
    numbers,
    program,
    row_of,
    stopped_afterwards,
)
from loadtest.peer import SETTLE_S, Peer, bring_up, tailor_peer
from loadtest.prompts import (
    SETS,
    TASKS,
    Example,
    Places,
    TaskSet,
    examples_of,
    prepare,
    set_of,
    tailor,
    train_prompts,
)
from server.commands.options import as_options

SERVER = "tailor"
LEARNERS = 4  # requests in flight while a task learns
NO_DRAFTS = {"speculation": {"drafter": "off"}}
SLICE, EXACT = ({"vocabulary": {"mode": mode}} for mode in ("slice", "exact"))
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "off": ("cold", NO_DRAFTS),
    "cold": ("cold", {}),
    "learned": ("learned", {}),
    "warm": ("warm", {}),
    "slice": ("cold", NO_DRAFTS | SLICE),
    "exact": ("cold", NO_DRAFTS | EXACT),
    "exact-warm": ("warm", EXACT),
    "mix": ("mix", {}),
    "trie": ("trie", {}),
    "grammys": ("grammys", {}),
}
"""Way -> (the task that is asked, fields of the body)."""

app, main = program("speedup", __doc__)


@as_options
class SpeedupOptions:
    """What is asked, and where things are."""

    data: Annotated[Path, Parameter(help="folder of task data sets")]
    work: Annotated[Path, Parameter(help="corpora, profiles, tasks and cache go here")]
    models: Annotated[Path | None, Parameter(help="folder of adapters (DATA/../models)")] = None
    recorded: Annotated[Path | None, Parameter(help="folder of NAME/train.jsonl recordings")] = None
    out: Annotated[Path, Parameter(help="a line for each data set")] = Path(
        "loadtest/results/speedup.jsonl"
    )
    sets: Annotated[str, Parameter(metavar="NAME,...")] = ",".join(SETS)
    ways: Annotated[str, Parameter(metavar="WAY,...", help=f"of {', '.join(WAYS)}")] = (
        "off,cold,warm"
    )
    clients: Annotated[str, Parameter(metavar="N,...", help="requests at once")] = "1"
    tailor_model: str = "smollm2-135m-instruct"
    weights: Annotated[str, Parameter(help="engine.weights of Tailor")] = "auto"
    rounds: int = 10
    prompts: Annotated[int, Parameter(help="prompts a round, of each client")] = 3
    peer_rounds: Annotated[int, Parameter(help="rounds that peers take part in")] = 3
    tokens: Annotated[int, Parameter(help="most tokens an answer")] = 64
    nodes: Annotated[int, Parameter(help="most draft nodes a step")] = 16
    train: Annotated[int, Parameter(help="train prompts to record a corpus of")] = 120
    learned: Annotated[int, Parameter(help="train prompts that `learned` has answered")] = 300
    prepare: Annotated[bool, Parameter(help="only build what is missing")] = False


_SERVERS, _RESULTS = ServerOptions(), ResultOptions()


def variants_of(server: Peer, task_set: TaskSet, ways: Sequence[str]) -> list[Peer]:
    """Tailor's ways of answering as peers: names of one server with different bodies."""
    found = []
    for way in ways:
        task, fields = WAYS[way]
        extra = {"include_speculation": True, "return_token_ids": True, **fields}
        if way == "learned":
            extra["cache_salt"] = f"{task_set.name} learns"
        found.append(
            Peer(way, f"@{server.name}", "tailor", f"{task_set.name}-{task}", extra,
                 url=server.url, version=server.version)
        )  # fmt: skip
    return found


async def teach(learner: Peer, prompts: Sequence[str], max_tokens: int) -> None:
    """Have prompts answered, LEARNERS at a time. Raises PeerFailed when one is refused."""
    asks = [Ask(Example("", "", prompt, ""), "") for prompt in prompts]
    async with httpx.AsyncClient(timeout=600.0) as client:
        cell = await run_cell(
            client, learner, Level(concurrency=LEARNERS), 0, asks, max_tokens=max_tokens, salt=""
        )
    refuse_failures([cell])


async def measure_set(
    variants: Sequence[Peer], peers: Sequence[Peer], examples: Sequence[Example],
    options: SpeedupOptions, console: Console,
) -> dict[str, Any]:  # fmt: skip
    """Ask everything. Returns the figures (figures.report). Raises PeerFailed when a server
    refuses."""
    cells: list[Cell] = []
    pause_s = SETTLE_S if any(peer.dialect == "vllm" for peer in peers) else 0.1
    beside = min(options.peer_rounds, options.rounds) if peers else 0
    alone = options.rounds - beside
    levels = [Level(concurrency=n) for n in numbers(options.clients, "--clients")]
    for level in levels:
        plan = Plan(examples, options.tokens, fresh=options.prompts * (level.concurrency or 1))
        for first, num, asked in ((0, alone, variants), (alone, beside, [*variants, *peers])):
            conduct = Conduct(num, 1, pause_s if len(asked) > len(variants) else 0.0,
                              first_round=first)  # fmt: skip
            if num:
                await measure(asked, [level], plan, conduct, cells, console)
    refuse_failures(cells)
    return report(cells, [*variants, *peers], levels, {})


async def run_group(
    options: SpeedupOptions, places: Places, adapter: str | None, sets: Sequence[TaskSet],
    peers: Sequence[Peer], corpora: Mapping[str, Path], log_dir: Path, console: Console,
) -> None:  # fmt: skip
    """Measure the data sets of one model, and append a line for each to options.out."""
    cache = options.work / f"cache-{adapter or 'base'}"
    shutil.rmtree(cache, ignore_errors=True)  # calibrations and costs of earlier sittings
    cache.mkdir(parents=True)
    arguments = f"--tasks {places.tasks(adapter).resolve()} --served-model-name tailor"
    arguments += f" --weights {options.weights}"
    if adapter is not None:
        arguments += f" --adapter {(places.models / adapter).resolve()}"
    model = options.tailor_model
    if Path(model).exists():
        model = str(Path(model).resolve())
    else:  # so that a server with an empty cache need not convert it again
        form = ["--form", "float32"] if options.weights != "auto" else []
        model = tailor("models", "fetch", model, *form)
    server = tailor_peer(
        SERVER, model, arguments,
        url_name="tailor", env={"TAILOR_CACHE_DIR": str(cache.resolve())},
    )  # fmt: skip
    beside = peers if adapter is None else ()  # they have not merged the adapter
    console.print(f"starting Tailor{f' with {adapter}' if adapter else ''}")
    about = describe_machine()
    with stopped_afterwards([server]):
        await bring_up([server], log_dir)
        for task_set in sets:
            began = time.perf_counter()
            ways = [way for way in listed(options.ways)
                    if not TASKS[WAYS[way][0]][1] or task_set.name in corpora]  # fmt: skip
            variants = variants_of(server, task_set, ways)
            for learner in (variant for variant in variants if variant.name == "learned"):
                prompts = train_prompts(options.data, task_set, options.learned)
                await teach(learner, prompts, options.tokens)
            # The variants' process is found by Tailor's name.
            found = await measure_set(
                variants, beside, examples_of(options.data, task_set), options, console
            )
            line = {
                "set": task_set.name,
                "ways": ways,
                "weights": options.weights,
                "seconds": round(time.perf_counter() - began, 1),
                "max_tokens": options.tokens,
                "max_nodes": options.nodes,
                "prompts": options.prompts,
                "servers": describe_servers([server, *beside]),
                "machine": about,
                **found,
            }
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
            console.print(f"{task_set.name}: {line['seconds']} s")


def read_done(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of an earlier sitting by data set; none when the file is not there."""
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {line["set"]: line for line in lines if "set" in line}


def summary_of(done: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """By clients and way or peer: the median over the sets of its ratio to `off`, the sets that are
    slower; and how many texts of Tailor differ."""
    found: dict[str, Any] = {}
    different = 0
    for level in dict.fromkeys(level for row in done.values() for level in row["figures"]):
        rows = {key: row["figures"][level] for key, row in done.items()}
        found[level] = {}
        for name in dict.fromkeys(n for row in rows.values() for n in row if n != "off"):
            own = {key: row[name] for key, row in rows.items() if name in row}
            speeds = {key: one["ratios"]["tokens_per_s"] for key, one in own.items()}
            found[level][name] = {
                "num_sets": len(own),
                "median": float(np.median([one["median"] for one in speeds.values()])),
                "slower_than_off": sorted(key for key, one in speeds.items() if one["low"] < 0.95),
            }
        for key, row in rows.items():
            for way in done[key]["ways"]:
                texts = row[way]["same_text"]
                if texts and way != "slice":
                    different += texts["num_compared"] - texts["num_same"]
    return {"levels": found, "different_texts": different}


COLUMNS = ("set", "clients", "way", "tokens/s", "times off", "first token, times off",
           "CPU s, times off", "tokens/step", "nodes/step", "same text")  # fmt: skip


def markdown(done: Mapping[str, Mapping[str, Any]]) -> str:
    """A table for docs/benchmarks: a row a data set, number of clients, and way or peer."""
    lines = [head_of(COLUMNS)]
    for key, line in done.items():
        for level, rows in line["figures"].items():
            for name, row in rows.items():
                texts = row["same_text"]
                cells = [
                    key, level.removesuffix(" clients"), name, f"{row['tokens_per_s']:.1f}",
                    *(interval(row["ratios"].get(metric))
                      for metric in ("tokens_per_s", "ttft_s", "cpu_s_per_1000")),
                    number(row["tokens_per_step"]), number(row["nodes_per_step"]),
                    f"{texts['num_same']}/{texts['num_compared']}" if texts else "-",
                ]  # fmt: skip
                lines.append(row_of(cells))
    return "\n".join(lines)


def sets_of(options: SpeedupOptions) -> list[TaskSet]:
    """The data sets that are asked for. Raises ValueError, OSError for what cannot be measured."""
    ways = listed(options.ways)
    if unknown := set(ways) - set(WAYS):
        raise ValueError(f"no way {sorted(unknown)}; there are {', '.join(WAYS)}")
    if ways[:1] != ["off"]:
        raise ValueError("--ways begins with off, which all others are compared with")
    if min(options.rounds, options.prompts, options.tokens, options.nodes, options.train) < 1:
        raise ValueError("--rounds, --prompts, --tokens, --nodes and --train want at least 1")
    sets = [set_of(name) for name in listed(options.sets)]
    for task_set in sets:
        if not (options.data / task_set.folder / "test.jsonl").is_file():
            raise ValueError(f"no data set {task_set.name} in {options.data}")
        if len(examples_of(options.data, task_set)) < 2:
            raise ValueError(f"{task_set.name}: no test prompts in {options.data}")
        prompts = train_prompts(options.data, task_set, options.learned)
        if "learned" in ways and len(prompts) < options.learned:
            raise ValueError(f"{task_set.name}: not {options.learned} train prompts")
    return sets


@app.default
def speedup(
    *,
    options: SpeedupOptions,
    servers: ServerOptions = _SERVERS,
    results: ResultOptions = _RESULTS,
) -> int:
    """Prepare, measure what is missing, and print. Raises ValueError, PeerFailed."""
    peers, sets = servers.peers(), sets_of(options)
    models = options.models or options.data.parent / "models"
    places = Places(options.data, models, options.work, options.recorded)
    console = Console(stderr=True, width=160)
    done = read_done(options.out)
    missing = [task_set for task_set in sets if task_set.name not in done]
    if missing or options.prepare:
        if not options.prepare:
            results.refuse_busy_machine()
        ways = [WAYS[way] for way in listed(options.ways)]
        corpora = prepare(
            sets, places, dict.fromkeys(task for task, _ in ways), model=options.tailor_model,
            num_train=options.train, max_tokens=options.tokens, max_nodes=options.nodes,
            profiles=any("vocabulary" in fields for _, fields in ways), report=console.print,
        )  # fmt: skip
        if options.prepare:
            return 0

        async def measure_all() -> None:
            groups = dict.fromkeys(task_set.adapter for task_set in missing)
            for adapter in sorted(groups, key=lambda name: name is None):
                if adapter is None and peers:  # last: the peers take part
                    console.print(f"starting {', '.join(peer.name for peer in peers)}")
                    await bring_up(peers, servers.log_dir)
                group = [s for s in missing if s.adapter == adapter]
                await run_group(
                    options, places, adapter, group, peers, corpora, servers.log_dir, console
                )

        with stopped_afterwards(peers):
            asyncio.run(measure_all())
    names = [task_set.name for task_set in sets]
    done = {name: row for name, row in read_done(options.out).items() if name in names}
    print(markdown(done))
    summary = summary_of(done)
    emit("speedup", {"sets": list(done), **summary}, results.json)
    return 1 if summary["different_texts"] else 0


if __name__ == "__main__":
    sys.exit(main())
