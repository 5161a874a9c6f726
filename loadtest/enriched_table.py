"""Two adapters of one recipe, one in base ids and one in a task's own (TASC-ft): the whole table.

    python -m loadtest.enriched_table --base DIR --enriched DIR --train A.jsonl --test B.jsonl
    python -m loadtest.enriched_table --budgets 100,250,500,1000 --train A.jsonl --test B.jsonl

Both adapters answer the same test prompts greedily, merged into the model, one after the other in
this process. Told of each: the share of exact answers and word F1, with the paired difference and
its 95 % bootstrap interval; ids an answer; base ids an answer; forward passes an answer without
drafts and with 2, 4 and 16 nodes of `auto` with a corpus of --train (answers replayed, the first
tree in the prefill pass); adoption: enriched ids that the model wrote over those in the fewest ids
for the same text.

--budgets runs no model: ids and passes of the *data's* answers, and H_2 of the training outputs'
ids, by the number of tokens mined from --train. --starts N compares the untrained loss of N test
answers for both ways in which new rows begin (of --enriched's tokens). Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtest import machine
from loadtest.answers import answer_all
from loadtest.options import emit
from server.commands.enrich import TaskData, count_passes, mine_tokens, read_task_data, spelled
from server.commands.options import DEFAULT_MODEL, FieldOptions, ModelOptions
from server.commands.own_engine import own_engine
from server.commands.progress import Bar
from server.commands.quality import estimate, exact, f1
from server.datasets import open_table, read_examples
from server.errors import TailorError
from server.model.catalog import model_folder
from server.types import Request, SamplingParams, SpeculationParams
from vocab_store.enrichment import Enrichment
from vocab_store.entropy import measure, ngrams

Pairs = Sequence[tuple[list[int], list[int]]]


@dataclass(slots=True)
class Side:
    """What one adapter wrote. outputs: ids of each answer, its EOS id included. texts: without."""

    outputs: list[list[int]]
    texts: list[str]
    seconds: float


def ask(model: str, adapter: Path, tests: Pairs, max_tokens: int, threads: int | None) -> Side:
    """Greedy answers of a model with an adapter merged into it, without drafts."""
    options = ModelOptions(model=model, adapter=str(adapter), threads=threads)
    with Bar() as bar, own_engine(options, bar, ()) as (served, engine):
        requests = [
            Request(
                str(i), "table", served.name, tuple(served.prompt_ids(prompt)),
                SamplingParams(temperature=0.0, max_tokens=max_tokens),
                speculation=SpeculationParams(drafter="off"),
            )
            for i, (prompt, _) in enumerate(tests)
        ]  # fmt: skip
        began = time.perf_counter()
        console = Console(stderr=True, width=120)
        answers = answer_all(engine, requests, str(adapter), console)
        outputs = [list(answers[str(i)].ids) for i in range(len(tests))]
        table = served.table
        return Side(
            outputs,
            [table.join(ids, skip_special=True).decode(errors="replace") for ids in outputs],
            time.perf_counter() - began,
        )


def figures(side: Side, enrichment: Enrichment | None, golds: Sequence[str]) -> dict[str, Any]:
    """Quality and ids of one side; see the top of this file."""
    num = len(side.outputs)
    base = [ids if enrichment is None else enrichment.expand(ids) for ids in side.outputs]
    told: dict[str, Any] = {
        "exact": asdict(estimate([exact(g, t) for g, t in zip(golds, side.texts, strict=True)])),
        "f1": asdict(estimate([f1(g, t) for g, t in zip(golds, side.texts, strict=True)])),
        "ids": sum(map(len, side.outputs)) / num,
        "base_ids": sum(map(len, base)) / num,
        "seconds": round(side.seconds, 1),
    }
    if enrichment is not None:
        own = frozenset(enrichment.ids)
        fewest = [enrichment.segment(ids) for ids in base]
        possible = sum(i in own for ids in fewest for i in ids)
        told |= {
            "fewest_ids": sum(map(len, fewest)) / num,
            "adoption": sum(i in own for ids in side.outputs for i in ids) / max(1, possible),
        }
    return told


def compare(
    sides: dict[str, Side], golds: Sequence[str], metric: Any = exact
) -> dict[str, float | int]:
    """Mean of enriched minus base over the same prompts, with its interval."""
    scores = {
        name: [metric(g, t) for g, t in zip(golds, side.texts, strict=True)]
        for name, side in sides.items()
    }
    differences = [a - b for a, b in zip(scores["enriched"], scores["base"], strict=True)]
    return asdict(estimate(differences))


def by_budget(data: TaskData, tests: Pairs, budgets: Sequence[int]) -> dict[int, dict[str, Any]]:
    """{tokens: figures of the data's own answers}, segmented; no model runs."""
    told: dict[int, dict[str, Any]] = {}
    with Bar() as bar:
        largest = mine_tokens(data, max(budgets), 4, 0.02, bar)
        for budget in (0, *budgets):
            enrichment = largest.first(budget) if budget else None
            train, answers = spelled(data.train, enrichment), spelled(tests, enrichment)
            counts = ngrams([ids for _, ids in train], 1)
            told[budget] = {
                "tokens": 0 if enrichment is None else len(enrichment),
                "ids": sum(len(ids) for _, ids in answers) / len(answers),
                "h2": measure(counts).h2,
                "h1": measure(counts).h1,
                "passes": count_passes(train, answers, data.fingerprint, lambda *_: None),
            }
    return told


def by_start(
    model: str, enrichment: Enrichment, tests: Pairs, fingerprint: str
) -> dict[str, float]:
    """{how new rows begin: nats an answer before any training}."""
    import torch

    from server.model.loader import build_module, open_model
    from server.training.examples import TrainExample
    from server.training.loop import TrainOptions, evaluate_loss
    from server.training.lora import LoraOptions, prepare
    from server.training.rows import Start

    examples = [TrainExample(tuple(prompt), tuple(output)) for prompt, output in tests]
    starts: tuple[Start, ...] = ("mean", "leaning")
    told: dict[str, float] = {}
    for start in starts:
        module = build_module(open_model(model_folder(model)), torch.float32, torch.device("cpu"))
        options = LoraOptions(start=start)
        tuned = prepare(module, enrichment, options, tokenizer=fingerprint)
        told[start] = evaluate_loss(tuned, examples, TrainOptions(), torch.device("cpu"))
    return told


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.enriched_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--base", type=Path, metavar="DIR", help="the adapter in base ids")
    parser.add_argument("--enriched", type=Path, metavar="DIR", help="the one in ids of its own")
    parser.add_argument("--train", type=Path, required=True, help="for the corpus and the tokens")
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=None, help="only the first N test prompts")
    parser.add_argument("--tokens", type=int, default=64, help="most ids of an answer")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--budgets", default="", help="sizes of the enrichment, with commas")
    parser.add_argument("--starts", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, help="append the JSON line to this file too")
    return parser


def measure_adapters(
    options: argparse.Namespace, data: TaskData, tests: Pairs, golds: Sequence[str]
) -> dict[str, Any]:
    """Of both adapters, and their difference."""
    enrichment = Enrichment.load(options.enriched / "enrichment.json", tokenizer=data.fingerprint)
    train = [*data.train, *data.held_out]
    sides: dict[str, Side] = {}
    told: dict[str, Any] = {}
    for name, adapter, own in (
        ("base", options.base, None), ("enriched", options.enriched, enrichment),
    ):  # fmt: skip
        side = ask(options.model, adapter, tests, options.tokens, options.threads)
        sides[name] = side
        told[name] = figures(side, own, golds)
        prompts = [prompt for prompt, _ in spelled(tests, own)]
        written = list(zip(prompts, side.outputs, strict=True))
        told[name]["passes"] = count_passes(
            spelled(train, own), written, data.fingerprint, lambda *_: None
        )
        print(name, told[name], flush=True)
    told["difference"] = {
        "exact": compare(sides, golds), "f1": compare(sides, golds, f1)
    }  # fmt: skip
    print("enriched - base", told["difference"], flush=True)
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if (options.base is None) != (options.enriched is None):
        parser.error("--base and --enriched go together")
    if options.starts and options.enriched is None:
        parser.error("--starts is of the tokens of --enriched")
    budgets = sorted(int(part) for part in options.budgets.split(",") if part)
    folder = model_folder(options.model)
    try:
        data = read_task_data(folder, [options.train], FieldOptions())
        tokenizer, table, eos = open_table(folder)
        tests = list(read_examples(options.test, "completion", "prompt", tokenizer, eos))
    except (TailorError, OSError) as error:
        parser.error(str(error))
    tests = tests[: options.prompts]
    golds = [
        table.join(ids, skip_special=True).decode(errors="replace") for _, ids in tests
    ]  # fmt: skip
    summary: dict[str, Any] = {
        "tool": "enriched_table",
        "machine": machine.describe(),
        "model": options.model,
        "prompts": len(tests),
    }
    if budgets:
        summary["budgets"] = by_budget(data, tests, budgets)
        for budget, told in summary["budgets"].items():
            print(budget, told, flush=True)
    if options.base is not None:
        summary |= measure_adapters(options, data, tests, golds)
    if options.starts:
        enrichment = Enrichment.load(options.enriched / "enrichment.json")
        found = by_start(options.model, enrichment, tests[: options.starts], data.fingerprint)
        summary["nats_before"] = found
        print("nats an answer before training", found, flush=True)
    emit(summary, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
