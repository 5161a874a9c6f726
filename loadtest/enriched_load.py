"""Text a second and waiting of two adapters of one recipe, base ids and enriched, under load.

    python -m loadtest.enriched_load --base DIR --enriched DIR --train train.jsonl --test test.jsonl

Both adapters are merged, each into an engine of this process. N clients each ask one prompt after
another, greedy, the same prompts of --test on every side, in turns: base ids and enriched, without
drafts and with `auto` and a corpus of --train in the adapter's ids. Nothing of the prompts is
cached when a turn begins. Text is counted in base ids, so that a longer token counts as what it
stands for. An answer's time is from its submission to its last id; no HTTP is in it. `kv` is
positions of the KV cache that an answer holds at its end, prompt included. `ids_per_step` counts
the step that ends the prompt; `nodes_per_step` and `accepted_per_step` are draft nodes. Ratios are
within a round, with a bootstrap interval. Ends in one JSON line; exits 1 where `auto` drafted
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drafters.auto.held_out import build_calibrated
from loadtest import machine
from loadtest.options import add_result_options, emit, refuse_busy_machine
from loadtest.stats import ratio
from loadtest.turns import in_turns
from server.commands.enrich import spelled
from server.commands.options import DEFAULT_MODEL, ModelOptions
from server.commands.own_engine import own_engine
from server.commands.progress import Bar
from server.datasets import open_table, read_examples
from server.engine.engine import Engine
from server.model.catalog import model_folder
from server.types import Request, SamplingParams, SpeculationParams
from vocab_store.enrichment import Enrichment

Pairs = Sequence[tuple[list[int], list[int]]]


@dataclass(frozen=True, slots=True)
class Side:
    """One adapter, served. corpus: file, in its ids. enrichment: None for base ids."""

    engine: Engine
    model: str
    corpus: str
    enrichment: Enrichment | None


@dataclass(frozen=True, slots=True)
class Run:
    """What N clients saw. base_ids: of all answers; latencies_s, kv: one number an answer. num_ids,
    num_steps, num_nodes, num_accepted: of all answers."""

    seconds: float
    base_ids: int
    latencies_s: tuple[float, ...]
    kv: tuple[int, ...]
    num_ids: int
    num_steps: int
    num_nodes: int
    num_accepted: int


_number = itertools.count()


def ask(
    side: Side, prompts: Sequence[Sequence[int]], clients: int, nodes: int, max_tokens: int
) -> Run:
    """All prompts' answers, `clients` of them at a time. nodes: a step at most; 0: no drafts."""
    speculation = SpeculationParams("auto", nodes, corpus=side.corpus)
    if not nodes:
        speculation = SpeculationParams()
    side.engine.pool.drop_cache()  # of the turn before, which asked the same prompts
    waiting, began = list(reversed(prompts)), time.perf_counter()
    asked: dict[str, tuple[float, int]] = {}
    ids: dict[str, list[int]] = {}
    latencies: list[float] = []
    kv: list[int] = []
    num_steps = num_nodes = num_accepted = 0
    while waiting or asked:
        while waiting and len(asked) < clients:
            prompt, name = tuple(_read(side, waiting.pop())), str(next(_number))
            asked[name] = time.perf_counter(), len(prompt)
            sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
            side.engine.submit(
                Request(name, "load", side.model, prompt, sampling, speculation=speculation)
            )
        for delta in side.engine.step():
            ids.setdefault(delta.request_id, []).extend(delta.token_ids)
            num_steps += delta.counts.num_steps
            num_nodes += delta.counts.num_drafted
            num_accepted += delta.counts.num_accepted
            if delta.finish_reason is None:
                continue
            if delta.finish_reason == "error":
                raise RuntimeError(delta.error)
            at, length = asked.pop(delta.request_id)
            latencies.append(time.perf_counter() - at)
            kv.append(length + len(ids[delta.request_id]))
    own = side.enrichment
    written = [text if own is None else own.expand(text) for text in ids.values()]
    seconds = time.perf_counter() - began
    return Run(
        seconds, sum(map(len, written)), tuple(latencies), tuple(kv),
        sum(map(len, ids.values())), num_steps, num_nodes, num_accepted,
    )  # fmt: skip


def _read(side: Side, prompt: Sequence[int]) -> Sequence[int]:
    return prompt if side.enrichment is None else side.enrichment.read(prompt)


@contextlib.contextmanager
def served_side(options: argparse.Namespace, adapter: Path, train: Pairs) -> Iterator[Side]:
    """An adapter, merged into its model, with a corpus of `train` in its ids."""
    file = adapter / "enrichment.json"
    enrichment = Enrichment.load(file) if file.is_file() else None
    chosen = ModelOptions(
        model=options.model, adapter=str(adapter), threads=options.threads, weights=options.weights
    )
    with (
        tempfile.TemporaryDirectory() as place,
        Bar() as bar,
        own_engine(chosen, bar, ("auto",)) as (served, engine),
    ):
        corpus = Path(place) / "train.corpus"
        fingerprint = served.table.fingerprint.hex()
        build_calibrated(spelled(train, enrichment), fingerprint=fingerprint).save(corpus)
        yield Side(engine, served.name, str(corpus), enrichment)


def measure(
    sides: dict[str, Side], tests: Pairs, clients: int, options: argparse.Namespace
) -> dict[str, Any]:
    """case -> figures with so many clients; a case is a side with or without drafts."""
    cases = [(side, drafter) for drafter in ("off", "auto") for side in sides]
    num = max(options.least, 3 * clients)
    draw, order = random.Random(clients), list(range(len(tests)))

    def prompts(turn: int) -> list[list[int]]:
        """Of the turn's round: the same for every case of it."""
        if turn % len(cases) == 0:
            draw.shuffle(order)
        return [tests[i][0] for i in order[:num]]

    turns = itertools.count()

    def run(side: str, drafter: str) -> Run:
        nodes = options.nodes if drafter == "auto" else 0
        return ask(sides[side], prompts(next(turns)), clients, nodes, options.tokens)

    runs = {f"{s}, {d}": functools.partial(run, s, d) for s, d in cases}
    took = in_turns(runs, options.rounds)
    first = took["base, off"]
    told: dict[str, Any] = {}
    for case, results in took.items():
        speeds = [r.base_ids / r.seconds for r in results]
        same = took[f"base, {case.partition(', ')[2]}"]
        p95 = [float(np.percentile(r.latencies_s, 95)) for r in results]
        same_p95 = [float(np.percentile(r.latencies_s, 95)) for r in same]
        told[case] = {
            "text_ids_per_s": round(float(np.median(speeds)), 1),
            "p95_ms": round(1e3 * float(np.median(p95)), 1),
            "ids_per_step": _per_step(results, lambda run: run.num_ids),
            "nodes_per_step": _per_step(results, lambda run: run.num_nodes),
            "accepted_per_step": _per_step(results, lambda run: run.num_accepted),
            "kv": round(float(np.mean([k for r in results for k in r.kv])), 1),
            "of_base_off": ratio(speeds, [r.base_ids / r.seconds for r in first]).to_json(),
            "of_base": ratio(speeds, [r.base_ids / r.seconds for r in same]).to_json(),
            "p95_of_base": ratio(p95, same_p95).to_json(),
        }
    return told


def _per_step(runs: Sequence[Run], count: Callable[[Run], int]) -> float:
    """A count of these runs over their steps."""
    return round(sum(map(count, runs)) / sum(r.num_steps for r in runs), 2)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m loadtest.enriched_load --base b --enriched e "
        "--train train.jsonl --test test.jsonl --clients 8,32",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--weights", help="of both engines (auto)")
    for name in ("base", "enriched"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="DIR")
    for name in ("train", "test"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="FILE")
    parser.add_argument("--clients", default="1,8,16,32")
    parser.add_argument("--least", type=int, default=24, help="fewest prompts of a run (24)")
    parser.add_argument("--tokens", type=int, default=64, help="most ids of an answer")
    parser.add_argument("--nodes", type=int, default=16, help="most draft nodes of a step (16)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    add_result_options(parser)
    options = parser.parse_args(argv)
    refuse_busy_machine(options.max_load)
    tokenizer, _, eos = open_table(model_folder(options.model))
    train, tests = (
        list(read_examples(file, "completion", "prompt", tokenizer, eos))
        for file in (options.train, options.test)
    )
    steps: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(served_side(options, getattr(options, name), train))
            for name in ("base", "enriched")
        }
        for clients in map(int, options.clients.split(",")):
            steps[str(clients)] = measure(sides, tests, clients, options)
            for case, figures in steps[str(clients)].items():
                print(f"{clients:3d} clients  {case:15s} {figures}", flush=True)
    emit({"enriched_load": steps, "machine": machine.describe()}, options.json)
    drafted = [f["nodes_per_step"] for of in steps.values() for c, f in of.items() if "auto" in c]
    return 0 if any(drafted) else 1


if __name__ == "__main__":
    raise SystemExit(main())
