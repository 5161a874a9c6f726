"""`python -m loadtest.quality adapters`: two adapters of one recipe, in base ids and in own tokens.

Both adapters answer the same test prompts greedily, merged into the model, one after the other in
this process. Reported of each: the share of exact answers and word F1, with the paired difference
and its 95 % bootstrap interval (of answers "intent: I, slot fills: {slot: value, ...}" also the
share of right intents and the mean F1 of an answer's slots; exact is then the joint accuracy); ids
an answer; base ids an answer; forward passes an answer without drafts and with 2, 4 and 16 nodes of
`auto` with a corpus of --train (answers replayed, the first tree in the prefill pass); adoption:
enriched ids that the model wrote over those in the fewest ids for the same text. (Speed of such
adapters in servers: `python -m loadtest.load --mix`, by characters a second.)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from loadtest.answers import answered
from loadtest.options import ResultOptions, emit
from server.commands.data import FieldOptions, TaskData, read_task_data
from server.commands.enrich import count_passes, spelled
from server.commands.options import DEFAULT_MODEL, ModelOptions
from server.commands.own_engine import OwnTokenizer, own_engine
from server.commands.progress import Bar
from server.commands.quality import estimate, exact, f1
from server.commands.recorder import Prompt, ask_engine
from server.datasets import ExampleReader, open_table
from server.model.catalog import model_folder
from server.types import SamplingParams, SpeculationParams
from vocab_store.enrichment import Enrichment

Pairs = Sequence[tuple[list[int], list[int]]]
Metric = Callable[[str, str], float]

_FILLED = re.compile(r"\s*intent: (\w*)(?:, slot fills: \{(.*)\})?", re.DOTALL)
_SLOT = re.compile(r"(\w+): (.*?)(?=, \w+: |$)", re.DOTALL)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOptions:
    """The adapters and the data."""

    train: Annotated[Path, Parameter(help="for the corpus and the tokens")]
    test: Path
    base: Annotated[Path, Parameter(help="the adapter in base ids")]
    enriched: Annotated[Path, Parameter(help="the one with tokens of its own")]
    model: str = DEFAULT_MODEL
    prompts: Annotated[int | None, Parameter(help="only the first N test prompts")] = None
    tokens: Annotated[int, Parameter(help="most ids of an answer")] = 64
    threads: int | None = None


_RESULTS = ResultOptions()


@dataclass(slots=True)
class Side:
    """What one adapter wrote. outputs: ids of each answer, its EOS id included. texts: without."""

    outputs: list[list[int]]
    texts: list[str]


def ask(options: AdapterOptions, adapter: Path, tests: Pairs) -> Side:
    """Greedy answers of a model with an adapter merged into it, without drafts."""
    chosen = ModelOptions(model=options.model, adapter=str(adapter), threads=options.threads)
    with Bar() as bar, own_engine(chosen, bar, ()) as (served, engine):
        prompts = [
            Prompt(i, None, tuple(served.prompt_ids(ids))) for i, (ids, _) in enumerate(tests)
        ]
        found = ask_engine(
            engine, OwnTokenizer(served), prompts,
            SamplingParams(temperature=0.0, max_tokens=options.tokens),
            speculation=SpeculationParams("off"),
        )  # fmt: skip
        answers = sorted(map(answered, found), key=lambda one: one.prompt.line)
        outputs = [list(one.output_ids) for one in answers]
        join = served.table.join
        texts = [join(ids, skip_special=True).decode(errors="replace") for ids in outputs]
        return Side(outputs, texts)


def filled(answer: str) -> tuple[str, Counter[tuple[str, str]]]:
    """(intent, slots with their values) of an answer; ("", none) where it has another form."""
    found = _FILLED.match(answer)
    if found is None:
        return "", Counter()
    return found[1], Counter((name, value.strip()) for name, value in _SLOT.findall(found[2] or ""))


def intent(gold: str, output: str) -> float:
    """Whether it is the right one."""
    return float(filled(gold)[0] == filled(output)[0])


def slots(gold: str, output: str) -> float:
    """F1 of the slots with their values; 1 where neither has any."""
    theirs, ours = filled(gold)[1], filled(output)[1]
    num = theirs.total() + ours.total()
    return 2 * (theirs & ours).total() / num if num else 1.0


def metrics_of(golds: Sequence[str]) -> tuple[Metric, ...]:
    """Those that the data's answers can be judged by."""
    return (exact, f1, intent, slots) if all(filled(gold)[0] for gold in golds) else (exact, f1)


def scores(metric: Metric, side: Side, golds: Sequence[str]) -> list[float]:
    """A metric of each answer."""
    return [metric(gold, text) for gold, text in zip(golds, side.texts, strict=True)]


def figures(side: Side, enrichment: Enrichment | None, golds: Sequence[str]) -> dict[str, Any]:
    """Quality and ids of one side; see the top of this file."""
    num = len(side.outputs)
    base = [ids if enrichment is None else enrichment.expand(ids) for ids in side.outputs]
    found: dict[str, Any] = {
        **{m.__name__: asdict(estimate(scores(m, side, golds))) for m in metrics_of(golds)},
        "ids": sum(map(len, side.outputs)) / num,
        "base_ids": sum(map(len, base)) / num,
    }
    if enrichment is not None:
        own = frozenset(enrichment.ids)
        fewest = [enrichment.segment(ids) for ids in base]
        possible = sum(i in own for ids in fewest for i in ids)
        found |= {
            "fewest_ids": sum(map(len, fewest)) / num,
            "adoption": sum(i in own for ids in side.outputs for i in ids) / max(1, possible),
        }
    return found


def measure_adapters(
    options: AdapterOptions, data: TaskData, tests: Pairs, golds: Sequence[str]
) -> dict[str, Any]:
    """Of both adapters, and enriched minus base over the same prompts."""
    enrichment = Enrichment.load(options.enriched / "enrichment.json", tokenizer=data.fingerprint)
    train = [*data.train, *data.held_out]
    sides: dict[str, Side] = {}
    found: dict[str, Any] = {}
    for name, adapter, own in (
        ("base", options.base, None), ("enriched", options.enriched, enrichment),
    ):  # fmt: skip
        side = sides[name] = ask(options, adapter, tests)
        prompts = [prompt for prompt, _ in spelled(tests, own)]
        written = list(zip(prompts, side.outputs, strict=True))
        passes = count_passes(spelled(train, own), written, data.fingerprint, lambda *_: None)
        found[name] = figures(side, own, golds) | {"passes": passes}
        print(name, found[name], flush=True)
    pairs = {
        metric.__name__: zip(
            scores(metric, sides["enriched"], golds), scores(metric, sides["base"], golds),
            strict=True,
        )
        for metric in metrics_of(golds)
    }  # fmt: skip
    found["difference"] = {
        name: asdict(estimate([a - b for a, b in both])) for name, both in pairs.items()
    }
    print("enriched - base", found["difference"], flush=True)
    return found


def adapters(*, options: AdapterOptions, results: ResultOptions = _RESULTS) -> int:
    """Two adapters of one recipe: base ids and tokens of its own; see loadtest.adapter_quality.

    Example: python -m loadtest.quality adapters --base b --enriched e --train a --test t
    """
    folder = model_folder(options.model)
    data = read_task_data(folder, [options.train], FieldOptions())
    tokenizer, table, eos = open_table(folder)
    tests = list(ExampleReader(tokenizer, eos).read([options.test]))
    tests = tests[: options.prompts]
    golds = [table.join(ids, skip_special=True).decode(errors="replace") for _, ids in tests]
    found = measure_adapters(options, data, tests, golds)
    emit("quality adapters", {"model": options.model, "prompts": len(tests), **found}, results.json)
    return 0
