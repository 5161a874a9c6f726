"""Drafters without a model's steps: recorded answers through each of them, and what they cost.

    python -m loadtest.replay table --data DIR --budgets 1,4,8,16
    python -m loadtest.replay curves --data DIR --sets commits,docstrings,manifests
    python -m loadtest.replay record --model FOLDER --data DIR --sets gsm8k -o OWN
    python -m loadtest.replay table --recorded OWN
    python -m loadtest.replay live --model FOLDER --recorded OWN --budgets 8,16
    python -m loadtest.replay costs --data DIR
    python -m loadtest.replay fit --data DIR

`table` and `curves` feed the gold completions of test.jsonl to each drafter, the first token given,
one answer after the other, or with --recorded a model's own answers (`record`, or `tailor corpus
generate`) with what it held likely at each token. The corpus is made of train answers only. Figures
are tokens a step: output tokens after the first over the decode steps. Columns of `table` learn
nothing between requests; those of `curves` do, as a server does by default (the last few answers at
once, a layer of all every three requests), and have three figures: of the first 30, 100 and all
requests. Other projects' drafters (loadtest.peer_drafters) are columns where their packages can be
imported: Arctic's suffix decoding at its defaults, as trees, with the corpus, and in `curves` with
its memory of every answer; Token Recycling and LogitSpec, where the answers have
what the model held likely. `arctic as shipped` is bounded by its tree's depth alone, whatever the
nodes. In every cell `auto` is compared with the best other column, with the 95 % bootstrap interval
over answers in pairs.

`record` and `live` are in loadtest.own_runs, `costs` in loadtest.drafter_costs, `fit` in
loadtest.fit_trust. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

from drafters import make_drafter
from drafters.auto.held_out import build_calibrated
from drafters.auto.likely import NUM_LIKELY
from drafters.auto.seen import Seen
from drafters.auto.trust import Trust
from drafters.base import Drafter
from drafters.corpus import Corpus
from drafters.learned import LearnedOutputs, build_layer
from drafters.published.grammys import BigramTable
from drafters.replay import Recording, replay
from loadtest.options import emit, listed, numbers, program, run
from loadtest.recordings import SetOptions, open_ids

NUM_RESAMPLES = 2000
BUILD_EVERY = 3
MAX_LEARNED = 200_000  # tokens, as a task's by default
ARCTIC_DEPTH = 64  # of its suffix tree by default: no draft is longer
Counts = list[tuple[int, int]]
"""(tokens after the first, decode steps) of each request."""
Column = Callable[[Sequence[Recording], int], Counts]
"""(answers, nodes a step) -> what a drafter made of them."""

app = program("replay", __doc__)
for part in ("own_runs:record", "own_runs:live", "drafter_costs:costs", "fit_trust:fit"):
    app.command(f"loadtest.{part}")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class TableOptions:
    """What is replayed, and what is printed."""

    budgets: Annotated[str, Parameter(help="nodes a step, with commas")] = "1,4,8,16"
    columns: Annotated[str, Parameter(help="those that are replayed, with ; between (all)")] = ""
    tune: Annotated[bool, Parameter(help="replay a held-back part of train, not test")] = False
    bigrams: Annotated[
        Path | None, Parameter(help="`tailor corpus bigrams` of the model: two more columns")
    ] = None
    json: Annotated[Path | None, Parameter(help="append the JSON line to this file too")] = None


_SETS, _TABLE = SetOptions(), TableOptions()


def counted(make: Callable[[], Drafter], **options: Any) -> Column:
    """A column of a drafter that is made anew for each cell, and keeps what it learns itself."""

    def column(tests: Sequence[Recording], budget: int) -> Counts:
        bounds = {"budget": budget} | options
        result = replay(make(), tests, **bounds)
        return list(zip(result.num_tokens, result.num_steps, strict=True))

    return column


def learning(corpus: Corpus | None, eos: int, num_likely: int = NUM_LIKELY) -> Column:
    """The same for `auto` with a layer of the answers before, and the last ones."""

    def column(tests: Sequence[Recording], budget: int) -> Counts:
        outputs, seen, trust = LearnedOutputs(MAX_LEARNED), Seen(), Trust()
        if corpus is not None:
            trust.start_from(corpus.evidence, corpus.outcomes)
        layer: Corpus | None = None
        counts: Counts = []
        for number, test in enumerate(tests, 1):
            made = make_drafter(
                "auto", corpus=corpus, learned=layer, trust=trust, eos_token_ids=(eos,),
                seen=seen, num_likely=num_likely,
            )  # fmt: skip
            result = replay(made, [test], budget=budget)
            counts += zip(result.num_tokens, result.num_steps, strict=True)
            outputs.add(np.asarray(test.prompt_ids), np.asarray(test.output_ids))
            seen.recent.add(test.output_ids)
            if number % BUILD_EVERY == 0:
                layer = build_layer(outputs.examples(), base=corpus, fingerprint="replay")
        return counts

    return column


def peers(corpus: Corpus | None, *, remember: bool, likely: bool) -> dict[str, Column]:
    """Columns of other projects' drafters, of those that are installed. remember: Arctic keeps
    every answer, as it does by itself. likely: the answers have what the model held likely."""
    from loadtest.peer_drafters import ArcticSuffix, LogitSpec, TokenRecycling

    made: dict[str, Column] = {}
    if likely:
        made |= {"token recycling": counted(TokenRecycling), "logitspec": counted(LogitSpec)}
    try:
        ArcticSuffix()  # raises where the package is missing
    except ImportError:
        print("arctic-inference is not installed: its columns are left out", file=sys.stderr)
    else:
        # Anew for each budget too: evicting what it saw of a request at its close leaves it 1.6 to
        # 2.4 % better when it sees the same requests again.
        def arctic(**options: Any) -> Callable[[], Drafter]:
            return lambda: ArcticSuffix(remembers=remember, **options)

        own = None if remember else corpus
        made["arctic"] = counted(arctic(corpus=own))
        made["arctic tree 4"] = counted(arctic(corpus=own, use_tree_spec=True, max_spec_factor=4.0))
        if remember:
            made["arctic as shipped"] = counted(
                arctic(), budget=ARCTIC_DEPTH, max_depth=ARCTIC_DEPTH
            )
            if corpus is not None:
                made["arctic, corpus"] = counted(arctic(corpus=corpus))
    return made


def table_columns(
    corpus: Corpus | None, eos: int, bigrams: BigramTable | None, *, likely: bool
) -> dict[str, Column]:
    """The columns that learn nothing between requests; `auto` is the last but one."""
    ends, of_task = {"eos_token_ids": (eos,)}, {} if corpus is None else {"corpus": corpus}
    made = {
        "prompt": counted(lambda: make_drafter("prompt", **ends)),
        "trie": counted(lambda: make_drafter("trie")),
        "mix": counted(lambda: make_drafter("mix", **of_task)),
        "grammys": counted(lambda: make_drafter("grammys")),
        "suffix": counted(lambda: make_drafter("suffix", **ends)),
    }
    if bigrams is not None:
        made["bigram"] = counted(lambda: make_drafter("grammys", table=bigrams, strategy="bigram"))
        made["grammys, table"] = counted(lambda: make_drafter("grammys", table=bigrams))
    made |= peers(corpus, remember=False, likely=likely)

    def auto(num_likely: int = NUM_LIKELY) -> Drafter:
        return make_drafter("auto", **ends, **of_task, num_likely=num_likely)

    if likely:
        made["auto, no logits"] = counted(lambda: auto(0))
    return made | {"auto": counted(auto), "auto, tree in prefill": counted(auto, in_prefill=True)}


def curve_columns(
    corpus: Corpus | None, wrong: Corpus | None, eos: int, *, likely: bool
) -> dict[str, Column]:
    """The columns of requests in turn. wrong: the corpus of another set."""

    def auto(of: Corpus | None) -> Column:
        given = {} if of is None else {"corpus": of}
        return counted(lambda: make_drafter("auto", eos_token_ids=(eos,), **given))

    made = {"auto, cold": auto(None), "auto, learning": learning(None, eos)}
    if likely:
        made["auto, learning, no logits"] = learning(None, eos, 0)
    if corpus is not None:
        made["auto, corpus"] = auto(corpus)
        made["auto, corpus and learning"] = learning(corpus, eos)
    if wrong is not None:
        made["auto, wrong corpus"] = auto(wrong)
    return made | peers(corpus, remember=True, likely=likely)


def tokens_per_step(counts: Counts) -> float:
    """Of all these requests."""
    tokens, steps = np.sum(counts, axis=0)
    return float(tokens / max(1, steps))


def curve(counts: Counts) -> list[float]:
    """Tokens a step of the first 30, 100 and all requests."""
    return [round(tokens_per_step(counts[:num]), 3) for num in (30, 100, len(counts))]


def ratio_interval(ours: Counts, other: Counts) -> tuple[float, float]:
    """95 % interval of tokens per step, ours over the other's, answers resampled in pairs."""
    rng = np.random.default_rng(0)
    pick = rng.integers(0, len(ours), (NUM_RESAMPLES, len(ours)))
    # Both made the same tokens, so the ratio is that of the steps.
    mine, theirs = (
        np.maximum(1, np.asarray([steps for _, steps in counts])[pick].sum(axis=1))
        for counts in (ours, other)
    )
    low, high = np.quantile(theirs / mine, [0.025, 0.975])
    return float(low), float(high)


def cell_of(counts: dict[str, Counts], first: str) -> dict[str, Any]:
    """All columns of one set and number of nodes, and the column `first` beside the best of those
    that are not `auto`."""
    cell: dict[str, Any] = {"tokens_per_step": {c: curve(own) for c, own in counts.items()}}
    others = {c: tokens_per_step(own) for c, own in counts.items() if not c.startswith("auto")}
    if others and first in counts:
        best = max(others, key=lambda c: others[c])
        low, high = ratio_interval(counts[first], counts[best])
        cell |= {
            "best_other": best,
            "ratio": round(tokens_per_step(counts[first]) / others[best], 3),
            "ratio_95": [round(low, 3), round(high, 3)],
        }
    return cell


def measure(
    sets: SetOptions, options: TableOptions, first: str, columns: Callable[..., dict[str, Column]]
) -> list[dict[str, Any]]:
    """Every cell, printed as it is done. columns: (corpus, wrong corpus, EOS, likely) -> columns,
    of which the wrong corpus is the next set's."""
    ids, names = open_ids(sets.model), sets.names()
    budgets = numbers(options.budgets, "--budgets")
    held = sets.examples if options.tune else 0

    def examples_of(name: str) -> tuple[list[Recording], list[Recording]]:
        train = sets.read(ids, name, "train", sets.corpus_examples + held)
        if not options.tune:
            return train, sets.read(ids, name, "test", sets.examples)
        num = min(held, len(train) // 4)
        return train[: len(train) - num], train[len(train) - num :]

    def corpus_of(train: Sequence[Recording]) -> Corpus | None:
        pairs = [(e.prompt_ids, e.output_ids) for e in train]
        return build_calibrated(pairs, fingerprint="replay", p_min=5) if pairs else None

    cells = []
    for place, name in enumerate(names):
        train, tests = examples_of(name)
        following = names[(place + 1) % len(names)]
        wrong = corpus_of(examples_of(following)[0]) if following != name else None
        made = columns(corpus_of(train), wrong, ids.eos, likely=any(t.likely_ids for t in tests))
        wanted = listed(options.columns.replace(",", "\0").replace(";", ","))
        wanted = [column.replace("\0", ",") for column in wanted] or list(made)
        for budget in budgets:
            cell: dict[str, Any] = {"data": name, "nodes": budget, "requests": len(tests)}
            counts = {c: made[c](tests, budget) for c in wanted if c in made}
            cells.append(cell | cell_of(counts, first))
            print(json.dumps(cells[-1]), file=sys.stderr, flush=True)
    return cells


def summary_of(cells: Sequence[dict[str, Any]], first: str) -> dict[str, Any]:
    """nodes -> the median and the lowest of the ratios to the best other column, and the least,
    median and largest of those to each column, of all requests."""
    found: dict[str, Any] = {}
    for budget in sorted({cell["nodes"] for cell in cells}):
        rows = [cell for cell in cells if cell["nodes"] == budget]
        ratios = [cell["ratio"] for cell in rows if "ratio" in cell]
        to: dict[str, list[float]] = {}
        for cell in rows:
            figures = cell["tokens_per_step"]
            for column in figures:
                if column != first and first in figures:
                    to.setdefault(column, []).append(figures[first][-1] / figures[column][-1])
        found[str(budget)] = {
            "median_ratio": round(float(np.median(ratios)), 3) if ratios else None,
            "lowest_ratio": min(ratios, default=None),
            "over": {
                column: [round(v, 3) for v in (min(s), float(np.median(s)), max(s))]
                for column, s in to.items()
            },
        }
    return found


def markdown(cells: Sequence[dict[str, Any]], which: slice) -> Iterator[str]:
    """A table for each number of nodes. which: of the figures of 30, 100 and all requests."""
    for budget in sorted({cell["nodes"] for cell in cells}):
        rows = [cell for cell in cells if cell["nodes"] == budget]
        names = list(dict.fromkeys(c for cell in rows for c in cell["tokens_per_step"]))
        yield f"\n### {budget} nodes a step\n"
        yield f"| data | {' | '.join(names)} | over the best other |"
        yield "|---" * (len(names) + 2) + "|"
        for cell in rows:
            figures = [
                " ".join(f"{value:.2f}" for value in cell["tokens_per_step"].get(c, [])[which])
                for c in names
            ]
            best = "-"
            if "ratio" in cell:
                low, high = cell["ratio_95"]
                best = f"{cell['ratio']:.2f} ({low:.2f}-{high:.2f}) {cell['best_other']}"
            yield f"| {cell['data']} | {' | '.join(figures)} | {best} |"


def _finish(
    tool: str, cells: list[dict[str, Any]], first: str, which: slice, path: Path | None
) -> int:
    for line in markdown(cells, which):
        print(line)
    emit(f"replay {tool}", {"summary": summary_of(cells, first), "cells": cells}, path)
    return 0


@app.command
def table(*, sets: SetOptions = _SETS, options: TableOptions = _TABLE) -> int:
    """Tokens a step of every drafter, set and number of nodes; nothing is learned between answers.

    Example: python -m loadtest.replay table --data data --sets gsm8k,squad --budgets 16
    """
    path = options.bigrams
    bigrams = None if path is None else BigramTable.load(path, fingerprint=None)
    cells = measure(
        sets, options, "auto",
        lambda corpus, _, eos, likely: table_columns(corpus, eos, bigrams, likely=likely),
    )  # fmt: skip
    return _finish("table", cells, "auto", slice(2, 3), options.json)


@app.command
def curves(*, sets: SetOptions = _SETS, options: TableOptions = _TABLE) -> int:
    """Tokens a step of requests in turn, which are learned and remembered.

    Example: python -m loadtest.replay curves --data data --examples 300
    """
    cells = measure(sets, options, "auto, learning", curve_columns)
    return _finish("curves", cells, "auto, learning", slice(None), options.json)


main = partial(run, app)

if __name__ == "__main__":
    sys.exit(main())
