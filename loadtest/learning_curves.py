"""Learning curves: requests in turn through `auto` and Arctic's suffix decoding with its memory.

    python -m loadtest.learning_curves --data DIR --sets commits docstrings manifests

Gold completions of test.jsonl, one after the other, the first token given. Columns: `auto` without
a corpus that learns nothing; that learns the outputs before, as the server does by default (the
last few at once, a layer of all every three requests; what the model's logits say is in no gold
completion); with the corpus of train.jsonl; with that and learning; with the corpus of the next
set, a wrong one. Arctic remembers every answer: its defaults, its trees, and its defaults with the
corpus, within the cell's nodes; `as shipped` is bounded by its tree's depth alone, whatever the
nodes (its plugin for vLLM drafts at most 16 tokens: its defaults in the cell of 16). Each figure is
tokens per step of the first 30, 100 and all requests. --columns replays some of them. The last line
is JSON with, for each number of nodes, the median over the sets of `auto, learning` over Arctic.

    python -m loadtest.learning_curves --recorded DIR

replays DIR/SET/test.jsonl instead, a model's own answers with what it held likely at each token
(python -m loadtest.own_runs record), without a corpus. One column more learns without the logits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafters import Drafter, make_drafter
from drafters.auto.held_out import build_calibrated
from drafters.auto.likely import NUM_LIKELY
from drafters.auto.seen import Seen
from drafters.auto.trust import Trust
from drafters.corpus import Corpus
from drafters.learned import LearnedOutputs, build_layer
from drafters.replay import Recording, read_recordings, replay
from loadtest import machine
from loadtest.recordings import EOS, data_sets, load_tokenizer, read_split

BUILD_EVERY = 3
MAX_LEARNED = 200_000  # tokens, as a task's by default
ARCTIC_DEPTH = 64  # of its suffix tree by default: no draft is longer
Counts = tuple[int, int]
"""(tokens after the first, decode steps) of one request."""
Answer = Callable[[Sequence[Recording], int], list[Counts]]


def in_turn(
    drafter: Drafter, tests: Sequence[Recording], budget: int, max_depth: int = 32
) -> list[Counts]:
    """What a drafter makes that keeps itself what it learns."""
    result = replay(drafter, tests, budget=budget, max_depth=max_depth)
    return list(zip(result.num_tokens, result.num_steps, strict=True))


def learning(
    corpus: Corpus | None,
    tests: Sequence[Recording],
    budget: int,
    eos: int,
    num_likely: int = NUM_LIKELY,
) -> list[Counts]:
    """The same for `auto` with a layer of the outputs before, and the last ones."""
    outputs, seen = LearnedOutputs(MAX_LEARNED), Seen()
    trust = Trust()
    if corpus is not None:
        trust.start_from(corpus.evidence, corpus.outcomes)
    layer: Corpus | None = None
    counts: list[Counts] = []
    for number, test in enumerate(tests, 1):
        drafter = make_drafter(
            "auto",
            corpus=corpus,
            learned=layer,
            trust=trust,
            eos_token_ids=(eos,),
            seen=seen,
            num_likely=num_likely,
        )
        counts += in_turn(drafter, [test], budget)
        outputs.add(np.asarray(test.prompt_ids), np.asarray(test.output_ids))
        seen.recent.add(test.output_ids)
        if number % BUILD_EVERY == 0:
            layer = build_layer(outputs.examples(), base=corpus, fingerprint="replay")
    return counts


def columns(corpus: Corpus | None, wrong: Corpus | None, eos: int) -> dict[str, Answer]:
    """How each column answers the requests. None: no columns with a corpus."""

    def auto(of: Corpus | None) -> Answer:
        return lambda tests, budget: in_turn(
            make_drafter("auto", corpus=of, eos_token_ids=(eos,)), tests, budget
        )

    made: dict[str, Answer] = {
        "auto, cold": auto(None),
        "auto, learning": lambda tests, budget: learning(None, tests, budget, eos),
    }
    if corpus is not None:
        made["auto, corpus"] = auto(corpus)
        made["auto, corpus and learning"] = lambda t, budget: learning(corpus, t, budget, eos)
    else:
        made["auto, learning, no logits"] = lambda t, budget: learning(None, t, budget, eos, 0)
    if wrong is not None:
        made["auto, wrong corpus"] = auto(wrong)
    try:
        from loadtest.peer_drafters import ArcticSuffix

        ArcticSuffix()  # raises where the package is missing
    except ImportError:
        print("arctic-inference is not installed: its columns are left out")
        return made

    def arctic(**options: Any) -> Answer:
        return lambda tests, budget: in_turn(ArcticSuffix(remembers=True, **options), tests, budget)

    made["arctic"] = arctic()
    made["arctic as shipped"] = lambda tests, _: in_turn(
        ArcticSuffix(remembers=True), tests, ARCTIC_DEPTH, ARCTIC_DEPTH
    )
    made["arctic tree 4"] = arctic(use_tree_spec=True, max_spec_factor=4.0)
    if corpus is not None:
        made["arctic, corpus"] = arctic(corpus=corpus)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=root.parent / "shared" / "data")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: SmolLM2's)")
    parser.add_argument("--sets", nargs="*", help="data sets (default: all); at least two")
    parser.add_argument("--only", nargs="*", help="those of the sets that are replayed now")
    parser.add_argument("--recorded", type=Path, help="a model's own answers in place of --data")
    parser.add_argument("--budgets", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--columns", nargs="*", help="those that are replayed (default: all)")
    parser.add_argument("--examples", type=int, default=300, help="requests a set")
    parser.add_argument("--corpus-examples", type=int, default=2000)
    arguments = parser.parse_args(argv)
    try:
        tokenizer = load_tokenizer(arguments.tokenizer)
        names = arguments.sets or (
            data_sets(arguments.data)
            if arguments.recorded is None
            else sorted(path.parent.name for path in arguments.recorded.glob("*/test.jsonl"))
        )
    except OSError as error:
        parser.error(str(error))
    if len(names) < 2 and arguments.recorded is None:
        parser.error("--sets: at least two, so that there is a wrong corpus")
    eos = int(tokenizer.token_to_id(EOS))

    def corpus_of(name: str) -> Corpus | None:
        if arguments.recorded is not None:
            return None
        train = read_split(tokenizer, arguments.data, name, "train", arguments.corpus_examples)
        return build_calibrated(
            ((e.prompt_ids, e.output_ids) for e in train), fingerprint="replay", p_min=5
        )

    cells = []
    for place, name in enumerate(names):
        if arguments.only and name not in arguments.only:
            continue
        if arguments.recorded is not None:
            path = arguments.recorded / name / "test.jsonl"
            tests = list(read_recordings(path))[: arguments.examples]
        else:
            tests = read_split(tokenizer, arguments.data, name, "test", arguments.examples)
        answer = columns(corpus_of(name), corpus_of(names[(place + 1) % len(names)]), eos)
        for budget in arguments.budgets:
            cell: dict[str, Any] = {"data": name, "budget": budget, "requests": len(tests)}
            for column, replayed in answer.items():
                if arguments.columns and column not in arguments.columns:
                    continue
                cell[column] = list(_curve(replayed(tests, budget)))
            cells.append(cell)
            print(json.dumps(cell), flush=True)
    told = {"over_arctic": over_arctic(cells), "cells": cells}
    print(json.dumps({"tool": "learning_curves", "machine": machine.describe(), **told}))
    return 0


def over_arctic(cells: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """nodes -> column of Arctic -> `auto, learning` over it: least, median and most over the sets,
    of all requests."""
    found: dict[str, dict[str, list[float]]] = {}
    for budget in sorted({cell["budget"] for cell in cells}):
        for column in ("arctic", "arctic as shipped", "arctic tree 4"):
            shares = [
                cell["auto, learning"][-1] / cell[column][-1]
                for cell in cells
                if cell["budget"] == budget and column in cell and "auto, learning" in cell
            ]
            if shares:
                three = (min(shares), float(np.median(shares)), max(shares))
                found.setdefault(str(budget), {})[column] = [round(share, 3) for share in three]
    return found


def _curve(counts: Sequence[Counts]) -> Iterator[float]:
    """Tokens per step of the first 30, 100 and all requests."""
    for num in (30, 100, len(counts)):
        tokens, steps = np.sum(counts[:num], axis=0)
        yield round(float(tokens / max(1, steps)), 3)


if __name__ == "__main__":
    sys.exit(main())
