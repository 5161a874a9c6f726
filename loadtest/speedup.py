"""What drafting is worth end to end, by data set: off against auto, and against other servers.

    python -m loadtest.speedup --data DATA_DIR --work WORK_DIR --out speedup.jsonl \\
        --server vllm-ngram=loadtest/peers/vllm_ngram.sh \\
        --server llamacpp-mod=loadtest/peers/llamacpp_ngram_mod.sh

Starts Tailor itself, one server with a task for each way of answering a data set
(loadtest.task_sets): `cold` drafts from the request alone, `warm` also from a corpus of the model's
own outputs for train prompts (--train 0: left out), `learned` has answered --learned train prompts
before, as a server does that has run for a while. Every test prompt is asked in every way and off,
in an order drawn anew, one request at a time, greedy; no prompt is used twice, so that nothing
learns the answers. What is learned is kept by cache_salt: requests of `learned` share one, so that
their template's blocks may be cached; all others have one each. A pair is the sum over
--prompts prompts; the ratio of a pair's times is the speedup (median over pairs, 95 % bootstrap
interval). In the last --peer-rounds pairs the other servers answer the same prompts too.

Counted exactly: steps, tokens a step, draft rows a token, CPU seconds a token (server's processes
and threads, from the system). The forecast is the same outputs replayed through a new drafter, each
step priced with the cost table that the server measured when it started (server.engine.forecast);
`of forecast` is measured / forecast speedup of all requests together.

--weights int8 measures Tailor's integer products; corpora are the model's outputs in float32 then
too. A short sitting: --pairs 4 --prompts 2 --tokens 48.

A data set's line is appended to --out when it is done; sets that are there already are not measured
again, so an interrupted sitting goes on with the same command, and with all sets done it only
prints. Corpora are built in --work when they are missing (--prepare does only that).

Prints a table, a table for docs, then ends in one JSON line. Exits 1 when a text of Tailor
differs, 2 when the machine is too busy to measure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.progress import Progress

from loadtest import machine
from loadtest.completion import ServerRefused, request_body, stream
from loadtest.options import (
    add_server_options,
    describe_servers,
    emit,
    peers_of,
    refuse_busy_machine,
)
from loadtest.peer import (
    SETTLE_S,
    CpuMeter,
    Peer,
    PeerFailed,
    ServerKeys,
    bring_down,
    bring_up,
    shuffled,
    stop_on_sigterm,
)
from loadtest.prompts import Example
from loadtest.speedup_figures import (
    COLD,
    LEARNED,
    OFF,
    WARM,
    Answer,
    Sitting,
    cost_at,
    figures_of,
    forecasts_of,
    print_tables,
    read_cost,
    read_done,
    summary_of,
    told_interval,
)
from loadtest.task_sets import (
    SETS,
    Places,
    TaskSet,
    examples_of,
    prepare,
    tasks_dir,
    train_prompts,
)
from loadtest.weight_forms import FORMS

SERVER = "tailor"
LEARNERS = 4  # requests in flight while a task learns


def variants_of(tailor: Peer, task_set: TaskSet, warm: bool, learned: bool = False) -> list[Peer]:
    """Tailor's ways of answering as peers: names of one server with different bodies."""

    def variant(name: str, task: str, extra: dict[str, Any]) -> Peer:
        common = {"include_speculation": True, "return_token_ids": True}
        return Peer(
            name, f"@{tailor.name}", "tailor", f"{task_set.name}-{task}", {**common, **extra},
            url=tailor.url, version=tailor.version,
        )  # fmt: skip

    found = [variant(OFF, COLD, {"speculation": {"drafter": "off"}}), variant(COLD, COLD, {})]
    if learned:
        found.append(variant(LEARNED, LEARNED, {"cache_salt": f"{task_set.name} learns"}))
    return [*found, variant(WARM, WARM, {})] if warm else found


async def teach(
    client: httpx.AsyncClient,
    variants: Sequence[Peer],
    options: argparse.Namespace,
    task_set: TaskSet,
) -> None:
    """Have the train prompts answered that `learned` is to have answered before, LEARNERS at a
    time. Raises PeerFailed when one is refused."""
    waiting = train_prompts(options.data, task_set, options.learned)[::-1]
    learner = next((variant for variant in variants if variant.name == LEARNED), None)

    async def go_on() -> None:
        while waiting and learner is not None:
            body = request_body(
                learner.dialect, learner.model, waiting.pop(), max_tokens=options.tokens, salt="",
                extra=learner.extra,
            )  # fmt: skip
            await stream(client, learner.url, body)

    try:
        await asyncio.gather(*(go_on() for _ in range(LEARNERS)))
    except (ServerRefused, httpx.HTTPError) as error:
        raise PeerFailed(f"{task_set.name}: {error or type(error).__name__}") from error


class Amounts(NamedTuple):
    """Pairs of a data set and prompts of a pair; the last num_peer_rounds pairs ask the peers too.
    max_tokens: of an answer."""

    num_pairs: int
    num_prompts: int
    num_peer_rounds: int
    max_tokens: int


async def measure_set(
    client: httpx.AsyncClient,
    task_set: TaskSet,
    variants: Sequence[Peer],
    peers: Sequence[Peer],
    meter: CpuMeter,
    examples: Sequence[Example],
    amounts: Amounts,
    progress: Progress,
) -> Sitting:
    """Ask everything. The first example warms every server up; the pairs take the others.

    Raises PeerFailed when a server refuses.
    """
    num_pairs, num_prompts, num_peer_rounds, max_tokens = amounts
    sitting = Sitting()
    salt = f"{time.time_ns():x}"
    last_pair = num_pairs - num_peer_rounds
    num_requests = num_prompts * (num_pairs * len(variants) + num_peer_rounds * len(peers))
    bar = progress.add_task(task_set.name, total=num_requests)

    async def one(peer: Peer, example: Example, name: str) -> Answer:
        body = request_body(
            peer.dialect, peer.model, example.prompt,
            max_tokens=max_tokens, salt=peer.salt(f"{salt}-{name}"), extra=peer.extra,
        )  # fmt: skip
        server = SERVER if peer.is_alias else peer.name
        before = meter.read().get(server, 0.0)
        try:
            timing = await stream(client, peer.url, body)
        except (ServerRefused, httpx.HTTPError) as error:
            raise PeerFailed(f"{peer.name}: {error or type(error).__name__}") from error
        if not timing.chunk_s:  # EOS at once: a token that some servers neither show nor count
            timing.num_tokens = max(1, timing.num_tokens)
            timing.chunk_s, timing.chunk_tokens = [timing.end_s], [timing.num_tokens]
        return Answer(timing, meter.read().get(server, 0.0) - before)

    for peer in (*variants, *peers):
        await one(peer, examples[0], "warm-up")
        await _settle(peer)
    for pair in range(num_pairs):
        asked = [*variants, *(peers if pair >= last_pair else ())]
        foreign, began = meter.foreign_s(), time.perf_counter()
        for number in range(num_prompts):
            at = pair * num_prompts + number
            example = examples[1 + at % (len(examples) - 1)]
            for peer in shuffled(asked, at, task_set.name):
                progress.update(bar, description=f"{task_set.name} {peer.name}", advance=1)
                sitting.book(peer.name, pair, await one(peer, example, str(at)))
                await _settle(peer)
        wall = time.perf_counter() - began
        sitting.foreign_cores = max(sitting.foreign_cores, (meter.foreign_s() - foreign) / wall)
    progress.remove_task(bar)
    return sitting


async def _settle(peer: Peer) -> None:
    """Let a server's threads come to rest before the next one is asked. vLLM's spin for a second
    (SETTLE_S); those of the others sleep at once."""
    if not peer.is_alias:
        await asyncio.sleep(SETTLE_S if peer.dialect == "vllm" else 0.1)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.speedup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server_options(parser, required=False)
    parser.add_argument("--data", type=Path, required=True, help="folder of task data sets")
    parser.add_argument("--models", type=Path, help="folder of adapters; default DATA/../models")
    parser.add_argument("--work", type=Path, required=True, help="corpora, tasks and cache go here")
    parser.add_argument("--recorded", type=Path, help="folder of NAME/train.jsonl recordings")
    parser.add_argument("--out", type=Path, default=Path("loadtest/results/speedup.jsonl"),
                        help="a line for each data set")  # fmt: skip
    parser.add_argument("--sets", default=",".join(SETS), help="default: all")
    parser.add_argument("--tailor-model", default="smollm2-135m-instruct")
    parser.add_argument("--weights", choices=("auto", *FORMS), default="auto",
                        help="engine.weights of Tailor")  # fmt: skip
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=3, help="prompts a pair")
    parser.add_argument("--peer-rounds", type=int, default=3, help="pairs that peers take part in")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens an answer")
    parser.add_argument("--nodes", type=int, default=16, help="most draft nodes a step")
    parser.add_argument("--train", type=int, default=120,
                        help="train prompts to record a set; 0: no `warm`")  # fmt: skip
    parser.add_argument("--learned", type=int, default=0,
                        help="train prompts that `learned` has answered; 0: none")  # fmt: skip
    parser.add_argument("--prepare", action="store_true", help="only build what is missing")
    return parser


def _model_folder(model: str) -> str:
    """Where a model is, so that a server with an empty cache need not convert it again. A GGUF file
    is served as it is."""
    if Path(model).exists():
        return str(Path(model).resolve())
    done = subprocess.run(
        [sys.executable, "-m", "server.commands.cli", "models", "fetch", model, "--form=float32"],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"the model {model} could not be fetched")
    return done.stdout.strip().splitlines()[-1]


async def run_group(
    options: argparse.Namespace,
    adapter: str | None,
    sets: Sequence[TaskSet],
    peers: Sequence[Peer],
    corpora: Mapping[str, Path],
    folder: str,
    about: Mapping[str, Any],
    console: Console,
) -> None:
    """Measure the data sets of one model, and append a line for each to options.out."""
    cache = options.work / f"cache-{adapter or 'base'}"
    shutil.rmtree(cache, ignore_errors=True)  # calibrations and costs of earlier sittings
    cache.mkdir(parents=True)
    arguments = f"--tasks {tasks_dir(options.work, adapter).resolve()} --served-model-name tailor"
    arguments += f" --weights {options.weights}"
    if adapter is not None:
        arguments += f" --adapter {(options.models / adapter).resolve()}"
    tailor = Peer(
        SERVER, str(Path(__file__).parent / "peers/tailor.sh"), "tailor", model="tailor",
        env={"PYTHON": sys.executable, "TAILOR_MODEL": folder, "TAILOR_ARGS": arguments,
             "TAILOR_CACHE_DIR": str(cache.resolve())},
    )  # fmt: skip
    beside = peers if adapter is None else ()  # they have not merged the adapter
    peer_rounds = options.peer_rounds if beside else 0
    amounts = Amounts(options.pairs, options.prompts, peer_rounds, options.tokens)
    try:
        console.print(f"starting Tailor{f' with {adapter}' if adapter else ''}")
        await bring_up([tailor], options.log_dir)
        cost = read_cost(cache)
        meter = CpuMeter([tailor, *beside])
        pool = httpx.Limits(max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=600.0, limits=pool, auth=ServerKeys(peers)) as client:
            with Progress(console=console) as progress:
                for task_set in sets:
                    began = time.perf_counter()
                    warm = task_set.name in corpora
                    variants = variants_of(tailor, task_set, warm, options.learned > 0)
                    await teach(client, variants, options, task_set)
                    sitting = await measure_set(
                        client, task_set, variants, beside, meter,
                        examples_of(options.data, task_set), amounts, progress,
                    )  # fmt: skip
                    names = [variant.name for variant in variants]
                    line = {
                        "set": task_set.name,
                        "weights": options.weights,
                        "seconds": round(time.perf_counter() - began, 1),
                        "max_tokens": options.tokens,
                        "max_nodes": options.nodes,
                        "prompts_per_pair": options.prompts,
                        "machine": about,
                        "servers": describe_servers([tailor, *beside]),
                        "cost_s": {str(rows): cost_at(cost, rows) for rows in (1, 2, 4, 8, 16, 32)},
                        **figures_of(sitting, names, [peer.name for peer in beside]),
                        "forecast": forecasts_of(
                            sitting, names, cost, corpora.get(task_set.name), options.nodes
                        ),
                    }
                    options.out.parent.mkdir(parents=True, exist_ok=True)
                    with options.out.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(line) + "\n")
                    ratios = line["ratios"]
                    told = ", ".join(
                        f"{name} {told_interval(found['end_to_end'])}"
                        for name, found in ratios.items()
                    )
                    console.print(f"{task_set.name}: {told} in {line['seconds']} s")
    finally:
        bring_down([tailor])


def sets_of(options: argparse.Namespace) -> list[TaskSet]:
    """The data sets that are asked for. Raises ValueError or OSError for what cannot be measured;
    bounds options.peer_rounds."""
    names = options.sets.split(",")
    if unknown := set(names) - set(SETS):
        raise ValueError(f"no data set {sorted(unknown)}; there are {', '.join(SETS)}")
    if min(options.pairs, options.prompts, options.tokens, options.nodes) < 1:
        raise ValueError("--pairs, --prompts, --tokens and --nodes want at least 1")
    options.peer_rounds = max(0, min(options.peer_rounds, options.pairs))
    sets = [SETS[name] for name in names]
    for task_set in sets:
        if len(train_prompts(options.data, task_set, options.learned)) < options.learned:
            raise ValueError(f"{task_set.name}: not {options.learned} train prompts")
        if len(examples_of(options.data, task_set)) < 2:
            raise ValueError(f"{task_set.name}: no test prompts in {options.data}")
    return sets


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    options.models = options.models or options.data.parent / "models"
    console = Console(stderr=True, width=160)
    try:
        peers = peers_of(options)
        sets = sets_of(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    done = read_done(options.out)
    missing = [task_set for task_set in sets if task_set.name not in done]
    stop_on_sigterm()
    about = machine.describe()
    try:
        if missing or options.prepare:
            if not options.prepare:
                refuse_busy_machine(options.max_load)
            corpora = prepare(
                sets,
                Places(options.data, options.models, options.work, options.recorded),
                model=options.tailor_model, num_train=options.train, max_tokens=options.tokens,
                max_nodes=options.nodes, tell=console.print,
            )  # fmt: skip
            if options.prepare:
                return 0
            folder = _model_folder(options.tailor_model)

            async def run() -> None:
                groups = dict.fromkeys(task_set.adapter for task_set in missing)
                for adapter in sorted(groups, key=lambda name: name is None):
                    if adapter is None:  # last: the peers take part
                        names = ", ".join(peer.name for peer in peers)
                        console.print(f"starting {names or 'no other servers'}")
                        await bring_up(peers, options.log_dir)
                    group = [s for s in missing if s.adapter == adapter]
                    await run_group(options, adapter, group, peers, corpora, folder, about, console)

            asyncio.run(run())
    except (PeerFailed, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        bring_down(peers)
    done = {name: row for name, row in read_done(options.out).items() if SETS[name] in sets}
    print_tables(console, done)
    summary = summary_of(done)
    emit({"tool": "speedup", "machine": about, "sets": list(done), **summary}, options.json)
    return 1 if summary["different_texts"] else 0


if __name__ == "__main__":
    sys.exit(main())
