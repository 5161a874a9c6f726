"""How much a better choice of nodes could bring: `auto`, a fitted choice, and an oracle.

    python -m loadtest.choice_bound --data DIR --sets gsm8k snips --fit-sets squad massive_en

Gold completions of test.jsonl with the corpus of train.jsonl, the first token given, as in
loadtest.replay_table. The candidates are those that `auto` gathers at a node. Three choices:

*auto*: by its calibrated chance, as shipped.
*fitted*: by gradient boosted trees (LightGBM, from PyPI, where it can be imported) over what is
    known of a candidate: match lengths, counts and shares of every source, auto's own chance before
    and after its correction, the chances of its rivals, where it last stood in the text, how well
    the last tokens were foreseen. Fitted on held-back train completions of --fit-sets; none of
    these sets is replayed.
*oracle*: takes the right candidate wherever there is one, as many nodes deep as the budget. No
    choice can do better with these candidates.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drafters.arrays import Float32, Int32
from drafters.auto.describe import CHANCE, describe
from drafters.auto.drafter import AutoDrafter, AutoSession
from drafters.auto.held_out import build_calibrated
from drafters.corpus import Corpus
from drafters.replay import Recording
from loadtest import machine
from loadtest.recordings import EOS, data_sets, load_tokenizer, read_split

HELD_OUT = 100  # examples of a set to fit on
MIN_SURVIVAL = 0.003

Choice = Callable[[Float32], npt.NDArray[Any]]
"""Chances of candidates by their features."""


class Replayed:
    """One output followed token by token, or step by step. position: of the next token."""

    def __init__(self, drafter: AutoDrafter, recording: Recording) -> None:
        self.drafter = drafter
        self.output = [int(token) for token in recording.output_ids]
        self.session: AutoSession = drafter.open(recording.prompt_ids)
        self.session.settle()
        self.session.extend(self.output[:1])
        self.position = 1
        self._foreseen = [0.3] * 4

    def candidates(self, path: Sequence[int]) -> tuple[Int32, Float32]:
        """(tokens, features) behind a path of drafted tokens; the last four features say how the
        last tokens were foreseen."""
        tokens, features = describe(self.drafter, self.session, path)
        last = self._foreseen
        live = np.array([np.mean(last[-8:]), last[-1], last[-2], last[-3]], np.float32)
        return tokens, np.hstack([features, np.tile(live, (len(tokens), 1))])

    def emit(self, num: int) -> None:
        """Go on by `num` tokens."""
        for token in self.output[self.position : self.position + num]:
            tokens, features = self.candidates(())
            chance = features[tokens == token, CHANCE]
            self._foreseen.append(float(chance[0]) if chance.shape[0] else 0.0)
            self.session.extend([token])
        self.position += num
        self.session.settle()


def accepted_by(text: Replayed, budget: int, choose: Choice) -> int:
    """Nodes accepted of the tree that a choice grows, best-first as `auto` does."""
    waiting: list[tuple[float, int, tuple[int, ...]]] = []
    right = 0
    path: tuple[int, ...] | None = ()
    survival = 1.0
    for number in range(budget + 1):
        if path is None or number == budget:
            break
        tokens, features = text.candidates(path)
        if tokens.shape[0]:
            for token, chance in zip(tokens.tolist(), choose(features), strict=True):
                if survival * chance >= MIN_SURVIVAL:
                    key = (-survival * float(chance), len(waiting) + 1000 * number)
                    heapq.heappush(waiting, (*key, (*path, token)))
        if not waiting:
            break
        negative, _, path = heapq.heappop(waiting)
        survival = -negative
        expected = text.output[text.position : text.position + len(path)]
        right += list(path) == expected
    return right


def accepted_by_oracle(text: Replayed, budget: int) -> int:
    """Nodes of the right path that stand among the candidates."""
    path: list[int] = []
    rest = text.output[text.position : text.position + budget]
    for token in rest:
        if token not in text.candidates(path)[0]:
            break
        path.append(token)
    return len(path)


def tokens_per_step(
    drafter: AutoDrafter, tests: Sequence[Recording], accepted: Callable[[Replayed], int]
) -> float:
    """Of all outputs, the first token given."""
    num_tokens = num_steps = 0
    for test in tests:
        text = Replayed(drafter, test)
        while text.position < len(text.output):
            num = min(accepted(text) + 1, len(text.output) - text.position)
            text.emit(num)
            num_tokens, num_steps = num_tokens + num, num_steps + 1
        text.session.close()
    return num_tokens / max(1, num_steps)


def _taught(
    drafter: AutoDrafter, recordings: Sequence[Recording], most: int
) -> Iterator[tuple[Float32, npt.NDArray[np.bool_]]]:
    """(features, which is right) of about `most` tokens."""
    num = 0
    for recording in recordings:
        text = Replayed(drafter, recording)
        while text.position < len(text.output):
            tokens, features = text.candidates(())
            yield features, tokens == text.output[text.position]
            text.emit(1)
            num += 1
        text.session.close()
        if num > most:
            return


def fit(parts: Sequence[tuple[AutoDrafter, Sequence[Recording]]], most: int) -> Choice:
    """Boosted trees of these sets' completions; each set counts for as much. Raises ImportError."""
    import lightgbm  # type: ignore[import-not-found]

    features, right, weights = [], [], []
    for drafter, recordings in parts:
        told = list(_taught(drafter, recordings, most))
        features += [rows for rows, _ in told]
        right += [rows for _, rows in told]
        weights += [np.full(len(rows), 1000.0 / len(told)) for rows, _ in told]
    options = {
        "objective": "binary", "learning_rate": 0.06, "num_leaves": 31, "min_data_in_leaf": 60,
        "feature_fraction": 0.7, "bagging_fraction": 0.7, "bagging_freq": 1, "verbose": -1,
        "num_threads": 1, "seed": 0,
    }  # fmt: skip
    data = lightgbm.Dataset(
        np.concatenate(features), np.concatenate(right), weight=np.concatenate(weights)
    )
    booster = lightgbm.train(options, data, 250)

    def choose(rows: Float32) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = booster.predict(rows.astype(np.float64), num_threads=1)
        return found

    return choose


def by_chance(rows: Float32) -> npt.NDArray[Any]:
    """The choice of `auto`."""
    return rows[:, CHANCE]


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=root.parent / "shared" / "data")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: SmolLM2's)")
    parser.add_argument("--sets", nargs="*", help="data sets (default: all)")
    parser.add_argument("--fit-data", type=Path, help="of the sets to fit on (default: --data)")
    parser.add_argument("--fit-sets", nargs="*", default=[], help="none: no fitted choice")
    parser.add_argument("--budgets", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--examples", type=int, default=25, help="completions a set")
    parser.add_argument("--fit-tokens", type=int, default=2000, help="tokens a set to fit on")
    parser.add_argument("--corpus-examples", type=int, default=1500)
    arguments = parser.parse_args(argv)
    try:
        tokenizer = load_tokenizer(arguments.tokenizer)
        names = arguments.sets or data_sets(arguments.data)
    except OSError as error:
        parser.error(str(error))
    eos = int(tokenizer.token_to_id(EOS))

    def examples_of(data: Path, name: str, held: int) -> tuple[Corpus, list[Recording]]:
        """A corpus of train examples, and `held` of them that are not in it."""
        train = read_split(tokenizer, data, name, "train", arguments.corpus_examples + held)
        held = min(held, len(train) // 4)
        kept = train[: len(train) - held]
        pairs = ((e.prompt_ids, e.output_ids) for e in kept)
        return build_calibrated(pairs, fingerprint="replay", p_min=5), train[len(kept) :]

    def drafter_of(corpus: Corpus) -> AutoDrafter:
        return AutoDrafter(corpus=corpus, eos_token_ids=(eos,))

    choices: dict[str, Choice] = {"auto": by_chance}
    if fit_on := [name for name in arguments.fit_sets if name not in names]:
        data = arguments.fit_data or arguments.data
        parts = [examples_of(data, name, HELD_OUT) for name in fit_on]
        try:
            choices["fitted"] = fit(
                [(drafter_of(corpus), held) for corpus, held in parts], arguments.fit_tokens
            )
        except ImportError:
            print("lightgbm is not installed: the fitted choice is left out")
    cells = []
    for name in names:
        tests = read_split(tokenizer, arguments.data, name, "test", arguments.examples)
        corpus, _ = examples_of(arguments.data, name, 0)
        for budget in arguments.budgets:
            ways = {
                column: functools.partial(accepted_by, budget=budget, choose=choose)
                for column, choose in choices.items()
            } | {"oracle": functools.partial(accepted_by_oracle, budget=budget)}
            cell: dict[str, Any] = {"data": name, "budget": budget}
            for column, way in ways.items():
                made = tokens_per_step(drafter_of(corpus), tests, way)
                cell[column] = round(made, 3)
            cells.append(cell)
            print(json.dumps(cell), flush=True)
    print(json.dumps({"tool": "choice_bound", "machine": machine.describe(), "cells": cells}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
