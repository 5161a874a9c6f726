"""What drafting is worth end to end, by data set: off against auto, and against other servers.

    python -m loadtest.speedup --data DATA_DIR --work WORK_DIR --out speedup.jsonl \\
        --server vllm-ngram=loadtest/peers/vllm_ngram.sh \\
        --server llamacpp-mod=loadtest/peers/llamacpp_ngram_mod.sh

Starts Tailor itself, one server with two tasks a data set (loadtest.task_sets): `cold` drafts from
the request alone, `warm` also from a corpus of the model's own outputs for train prompts. Every
test prompt is asked in every way, off, cold and warm, in an order drawn anew, one request at a
time, greedy; no prompt is used twice, so that nothing learns the answers. A pair is the sum over
--prompts prompts; the ratio of a pair's times is the speedup (median over pairs, 95 % bootstrap
interval). In the last --peer-rounds pairs the other servers answer the same prompts too.

Counted exactly: steps, tokens a step, draft rows a token, CPU seconds a token (server's processes
and threads, from the system). The forecast is the same outputs replayed through a new drafter, each
step priced with the cost table that the server measured when it started (server.engine.forecast);
`of forecast` is measured / forecast speedup of all requests together.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtest import machine
from loadtest.completion import ServerRefused, Timing, request_body, stream
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
from loadtest.stats import ratio
from loadtest.task_sets import SETS, TaskSet, examples_of, prepare, tasks_dir

OFF, COLD, WARM = "off", "cold", "warm"
SERVER = "tailor"


@dataclass(slots=True)
class Answer:
    """One measured request. cpu_s: of the server's processes, while it ran."""

    timing: Timing
    cpu_s: float

    @property
    def seconds(self) -> float:
        return self.timing.end_s - self.timing.start_s

    @property
    def decode_s(self) -> float:
        """From the first chunk to the last one."""
        times = self.timing.chunk_s
        return times[-1] - times[0] if len(times) > 1 else 0.0

    @property
    def decode_tokens(self) -> int:
        return self.timing.num_tokens - self.timing.chunk_tokens[0]


@dataclass(slots=True)
class Sitting:
    """All answers of one data set: answers[variant][pair] in the order of the prompts.

    Written by `measure_set` only. foreign_cores: most that others used during one pair.
    """

    answers: dict[str, list[list[Answer]]] = field(default_factory=dict)
    foreign_cores: float = 0.0

    def book(self, variant: str, pair: int, answer: Answer) -> None:
        pairs = self.answers.setdefault(variant, [])
        while len(pairs) <= pair:
            pairs.append([])
        pairs[pair].append(answer)


def variants_of(tailor: Peer, task_set: TaskSet, warm: bool) -> list[Peer]:
    """Tailor's ways of answering as peers: names of one server with different bodies."""

    def variant(name: str, task: str, extra: dict[str, Any]) -> Peer:
        common = {"include_speculation": True, "return_token_ids": True}
        return Peer(
            name, f"@{tailor.name}", "tailor", f"{task_set.name}-{task}", {**common, **extra},
            url=tailor.url, version=tailor.version,
        )  # fmt: skip

    found = [variant(OFF, COLD, {"speculation": {"drafter": "off"}}), variant(COLD, COLD, {})]
    return [*found, variant(WARM, WARM, {})] if warm else found


async def measure_set(
    client: httpx.AsyncClient,
    task_set: TaskSet,
    variants: Sequence[Peer],
    peers: Sequence[Peer],
    meter: CpuMeter,
    examples: Sequence[Example],
    *,
    num_pairs: int,
    num_prompts: int,
    num_peer_rounds: int,
    max_tokens: int,
    progress: Progress,
) -> Sitting:
    """Ask everything. The first example warms every server up; the pairs take the others.

    Raises PeerFailed when a server refuses.
    """
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


def figures_of(sitting: Sitting, variants: Sequence[str], peers: Sequence[str]) -> dict[str, Any]:
    """A data set's figures as JSON values; ratios are above 1 where drafting is faster."""
    plain = sitting.answers[OFF]
    rows = {name: _variant_row(sitting.answers[name]) for name in variants}
    ratios = {name: _ratios(plain, sitting.answers[name]) for name in variants if name != OFF}
    different = sum(
        a.timing.token_ids != b.timing.token_ids
        for name in variants
        for a, b in zip(_flat(plain), _flat(sitting.answers[name]), strict=True)
    )
    beside: dict[str, Any] = {}
    for peer in peers:
        theirs = [pair for pair in sitting.answers[peer] if pair]
        own = {name: sitting.answers[name][-len(theirs) :] for name in variants}
        speeds = [_rate(pair) for pair in theirs]
        beside[peer] = {
            "num_rounds": len(theirs),
            "tokens_per_s": float(np.median(speeds)),
            "cpu_s_per_token": _cpu(theirs),
            "same_text": sum(
                a.timing.text == b.timing.text
                for a, b in zip(_flat(theirs), _flat(own[OFF]), strict=True)
            ),
            "num_texts": len(_flat(theirs)),
            "tailor_tokens_per_s": {
                name: float(np.median([_rate(pair) for pair in own[name]])) for name in variants
            },
            "ratio": {
                name: ratio([_rate(pair) for pair in own[name]], speeds).to_json()
                for name in variants
            },
        }
    prompts = [a.timing.num_prompt_tokens or 0 for a in _flat(plain)]
    return {
        "num_requests": len(_flat(plain)),
        "mean_prompt_tokens": float(np.mean(prompts)),
        "mean_output_tokens": float(np.mean([a.timing.num_tokens for a in _flat(plain)])),
        "num_different": different,
        "foreign_cores": round(sitting.foreign_cores, 2),
        "variants": rows,
        "ratios": ratios,
        "peers": beside,
    }


def _flat(pairs: Sequence[Sequence[Answer]]) -> list[Answer]:
    return [answer for pair in pairs for answer in pair]


def _rate(pair: Sequence[Answer]) -> float:
    """End-to-end tokens/s over one pair's prompts."""
    return sum(a.timing.num_tokens for a in pair) / sum(a.seconds for a in pair)


def _decode_rate(pair: Sequence[Answer]) -> float:
    """Tokens after the first chunk over the time after it; 0 where nothing came after it."""
    seconds = sum(a.decode_s for a in pair)
    return sum(a.decode_tokens for a in pair) / seconds if seconds > 0 else 0.0


def _cpu(pairs: Sequence[Sequence[Answer]]) -> float:
    answers = _flat(pairs)
    return sum(a.cpu_s for a in answers) / sum(a.timing.num_tokens for a in answers)


def _variant_row(pairs: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    answers = _flat(pairs)
    counts = {
        key: sum((a.timing.speculation or {}).get(key, 0) for a in answers)
        for key in ("steps", "drafted_tokens", "accepted_tokens")
    }
    tokens = sum(a.timing.num_tokens for a in answers)
    return {
        **counts,
        "tokens": tokens,
        "tokens_per_step": tokens / max(1, counts["steps"]),
        # A step verifies its last token and its draft nodes.
        "rows_per_token": (counts["steps"] + counts["drafted_tokens"]) / tokens,
        "nodes_per_step": counts["drafted_tokens"] / max(1, counts["steps"]),
        "cpu_s_per_token": _cpu(pairs),
        "tokens_per_s": float(np.median([_rate(pair) for pair in pairs])),
        "decode_tokens_per_s": float(np.median([_decode_rate(pair) for pair in pairs])),
        "pair_seconds": [round(sum(a.seconds for a in pair), 4) for pair in pairs],
    }


def _ratios(
    plain: Sequence[Sequence[Answer]], drafted: Sequence[Sequence[Answer]]
) -> dict[str, Any]:
    def seconds(pairs: Sequence[Sequence[Answer]]) -> list[float]:
        return [sum(a.seconds for a in pair) for pair in pairs]

    rates = [
        (own, other)
        for a, b in zip(drafted, plain, strict=True)
        if (own := _decode_rate(a)) > 0 and (other := _decode_rate(b)) > 0
    ]
    return {
        "end_to_end": ratio(seconds(plain), seconds(drafted)).to_json(),
        "decode": ratio([a for a, _ in rates], [b for _, b in rates]).to_json() if rates else None,
        "total": sum(seconds(plain)) / sum(seconds(drafted)),
        "cpu": _cpu(plain) / _cpu(drafted) if _cpu(drafted) > 0 else None,
    }


def forecasts_of(
    sitting: Sitting, variants: Sequence[str], cost: Mapping[str, Any], corpus: Path | None,
    max_nodes: int,
) -> dict[str, Any]:  # fmt: skip
    """What replaying the same outputs with `cost` (CostTable.as_dict) promises, by variant."""
    from drafters import make_drafter
    from drafters.corpus import Corpus
    from drafters.replay import Recording
    from server.engine.budget import CostTable
    from server.engine.forecast import forecast

    recordings = [
        Recording(a.timing.prompt_token_ids, a.timing.token_ids)
        for a in _flat(sitting.answers[OFF])
    ]
    found: dict[str, Any] = {}
    for name in variants:
        if name == OFF:
            continue
        own = Corpus.load(corpus, fingerprint=None) if name == WARM and corpus is not None else None
        drafter: Any = make_drafter("auto", **({} if own is None else {"corpus": own}))
        drafter.warm_up()  # compiling is none of a step's cost
        expected = forecast(
            drafter,
            recordings,
            CostTable.from_dict(dict(cost)),
            max_draft_tokens=max_nodes,
        )
        tokens = sum(len(recording.output_ids) for recording in recordings)
        found[name] = {
            "speedup": expected.speedup,
            "decode_speedup": expected.decode_speedup,
            # As in `variants`: all tokens, and the step that ends the prompt is one.
            "tokens_per_step": tokens / (expected.num_steps + len(recordings)),
            "nodes_per_step": expected.num_rows / (expected.num_steps + len(recordings)),
        }
    return found


def read_cost(cache_dir: Path) -> dict[str, Any]:
    """The one cost table that a server has left in its cache. Raises PeerFailed without one."""
    files = sorted((cache_dir / "costs").glob("*.json"))
    if len(files) != 1:
        raise PeerFailed(f"{len(files)} cost tables in {cache_dir}, not 1")
    plain: dict[str, Any] = json.loads(files[0].read_text())
    return plain


def read_done(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of an earlier sitting by data set; none when the file is not there."""
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {line["set"]: line for line in lines if "set" in line}


def summary_of(done: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the data sets, and the sets that miss a rule, by variant."""
    found: dict[str, Any] = {}
    for name in (COLD, WARM):
        rows = {key: row for key, row in done.items() if name in row["ratios"]}
        if not rows:
            continue
        speeds = {key: row["ratios"][name]["end_to_end"] for key, row in rows.items()}
        kept = {
            key: row["ratios"][name]["total"] / row["forecast"][name]["speedup"]
            for key, row in rows.items()
        }
        found[name] = {
            "num_sets": len(rows),
            "median_speedup": float(np.median([r["median"] for r in speeds.values()])),
            "median_decode_speedup": float(
                np.median([r["ratios"][name]["decode"]["median"] for r in rows.values()
                           if r["ratios"][name]["decode"]])
            ),
            "slower_than_off": sorted(key for key, r in speeds.items() if r["low"] < 0.95),
            "below_forecast": sorted(key for key, share in kept.items() if share < 0.9),
        }  # fmt: skip
    peers = sorted({peer for row in done.values() for peer in row["peers"]})
    found["peers"] = {
        peer: {
            name: float(
                np.median(
                    [
                        row["peers"][peer]["ratio"][best]["median"]
                        for row in done.values()
                        if peer in row["peers"]
                        for best in [name if name in row["peers"][peer]["ratio"] else COLD]
                    ]
                )
            )
            for name in (OFF, COLD, WARM)
        }
        for peer in peers
    }
    found["different_texts"] = sum(row["num_different"] for row in done.values())
    return found


def table_cells(done: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of the main table: a row a data set and variant."""
    columns = [
        "set", "corpus", "end to end", "decode", "CPU s", "tokens/step", "rows/token",
        "nodes/step", "forecast", "of forecast", "others' cores",
    ]  # fmt: skip
    rows = []
    for key, row in done.items():
        for name, found in row["ratios"].items():
            own, expected = row["variants"][name], row["forecast"][name]
            rows.append(
                [
                    key,
                    name,
                    _told(found["end_to_end"]),
                    _told(found["decode"]),
                    "-" if found["cpu"] is None else f"{found['cpu']:.2f}",
                    f"{own['tokens_per_step']:.2f}",
                    f"{own['rows_per_token']:.2f}",
                    f"{own['nodes_per_step']:.1f}",
                    f"{expected['speedup']:.2f} ({expected['tokens_per_step']:.2f}/step)",
                    f"{found['total'] / expected['speedup']:.2f}",
                    f"{row['foreign_cores']:.2f}",
                ]
            )
    return columns, rows


def peer_cells(done: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of the table of peers: tokens/s end to end, then the ratios' medians."""
    peers = sorted({peer for row in done.values() for peer in row["peers"]})
    if not peers:
        return [], []
    columns = ["set", *(f"Tailor, {name}" for name in (OFF, COLD, WARM)), *peers]
    rows = []
    for key, row in done.items():
        if not row["peers"]:
            continue
        first = next(iter(row["peers"].values()))
        cells = [key]
        for name in (OFF, COLD, WARM):
            speed = first["tailor_tokens_per_s"].get(name)
            cells.append("-" if speed is None else f"{speed:.1f}")
        for peer in peers:
            found = row["peers"].get(peer)
            if found is None:
                cells.append("-")
                continue
            ratios = " / ".join(f"{r['median']:.2f}" for r in found["ratio"].values())
            same = "" if found["same_text"] == found["num_texts"] else (
                f", {found['same_text']} of {found['num_texts']} texts"
            )  # fmt: skip
            cells.append(f"{found['tokens_per_s']:.1f} ({ratios}{same})")
        rows.append(cells)
    medians = summary_of(done)["peers"]
    rows.append(
        ["median ratio", "", "", "",
         *(" / ".join(f"{medians[peer][name]:.2f}" for name in (OFF, COLD, WARM))
           for peer in peers)]
    )  # fmt: skip
    return columns, rows


def _told(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    return f"{found['median']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for docs/benchmarks."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def print_tables(console: Console, done: Mapping[str, Mapping[str, Any]]) -> None:
    """To the console for a person, to stdout for docs/benchmarks."""
    titles = ("off / auto, times faster", "tokens/s (Tailor off / cold / warm over the server)")
    for title, (columns, rows) in zip(titles, (table_cells(done), peer_cells(done)), strict=True):
        if not rows:
            continue
        table = Table(title=title)
        for column in columns:
            table.add_column(column, justify="left" if column == "set" else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        print(markdown(columns, rows), end="\n\n")


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
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=3, help="prompts a pair")
    parser.add_argument("--peer-rounds", type=int, default=3, help="pairs that peers take part in")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens an answer")
    parser.add_argument("--nodes", type=int, default=16, help="most draft nodes a step")
    parser.add_argument("--train", type=int, default=120, help="train prompts to record a set")
    parser.add_argument("--prepare", action="store_true", help="only build what is missing")
    return parser


def _model_folder(model: str) -> str:
    """Where a model is, so that a server with an empty cache need not convert it again."""
    if Path(model).is_dir():
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
    if adapter is not None:
        arguments += f" --adapter {(options.models / adapter).resolve()}"
    tailor = Peer(
        SERVER, str(Path(__file__).parent / "peers/tailor.sh"), "tailor", model="tailor",
        env={"PYTHON": sys.executable, "TAILOR_MODEL": folder, "TAILOR_ARGS": arguments,
             "TAILOR_CACHE_DIR": str(cache.resolve())},
    )  # fmt: skip
    beside = peers if adapter is None else ()  # they have not merged the adapter
    try:
        console.print(f"starting Tailor{f' with {adapter}' if adapter else ''}")
        await bring_up([tailor], options.log_dir)
        cost = read_cost(cache)
        meter = CpuMeter([tailor, *beside])
        limits = httpx.Limits(max_keepalive_connections=None)
        async with httpx.AsyncClient(
            timeout=600.0, limits=limits, auth=ServerKeys(peers)
        ) as client:
            with Progress(console=console) as progress:
                for task_set in sets:
                    began = time.perf_counter()
                    variants = variants_of(tailor, task_set, task_set.name in corpora)
                    sitting = await measure_set(
                        client, task_set, variants, beside, meter,
                        examples_of(options.data, task_set),
                        num_pairs=options.pairs, num_prompts=options.prompts,
                        num_peer_rounds=options.peer_rounds if beside else 0,
                        max_tokens=options.tokens, progress=progress,
                    )  # fmt: skip
                    names = [variant.name for variant in variants]
                    line = {
                        "set": task_set.name,
                        "seconds": round(time.perf_counter() - began, 1),
                        "max_tokens": options.tokens,
                        "max_nodes": options.nodes,
                        "prompts_per_pair": options.prompts,
                        "machine": about,
                        "servers": describe_servers([tailor, *beside]),
                        "cost_s": {
                            str(rows): _cost_at(cost, rows) for rows in (1, 2, 4, 8, 16, 32)
                        },
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
                        f"{name} {_told(found['end_to_end'])}" for name, found in ratios.items()
                    )
                    console.print(f"{task_set.name}: {told} in {line['seconds']} s")
    finally:
        bring_down([tailor])


def _cost_at(cost: Mapping[str, Any], rows: int) -> float:
    from server.engine.budget import CostTable

    return CostTable.from_dict(dict(cost)).cost(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    options.models = options.models or options.data.parent / "models"
    console = Console(stderr=True, width=160)
    try:
        peers = peers_of(options)
        unknown = set(options.sets.split(",")) - set(SETS)
        if unknown:
            raise ValueError(f"no data set {sorted(unknown)}; there are {', '.join(SETS)}")
        sets = [SETS[name] for name in options.sets.split(",")]
        if min(options.pairs, options.prompts, options.tokens, options.nodes) < 1:
            raise ValueError("--pairs, --prompts, --tokens and --nodes want at least 1")
        options.peer_rounds = max(0, min(options.peer_rounds, options.pairs))
        for task_set in sets:
            if len(examples_of(options.data, task_set)) < 2:
                raise ValueError(f"{task_set.name}: no test prompts in {options.data}")
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
                sets, data_dir=options.data, models_dir=options.models, work_dir=options.work,
                recorded_dir=options.recorded, model=options.tailor_model,
                num_train=options.train, max_tokens=options.tokens, max_nodes=options.nodes,
                tell=console.print,
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
