"""Seeded scenes of drafting, for test_golden_trees.py: every source, deep and wide trees.

    python -m tests.drafters.auto.golden_scenes

prints the trees as the JSON that golden_trees.json holds. Write it anew only where a change of
what is drafted is meant.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

from drafters import Drafter, make_drafter
from drafters.auto.held_out import build_calibrated
from drafters.corpus import Corpus, build_corpus

SCENES = ("bare", "corpus", "layered", "predicted", "suffix")


class _Texts:
    """Texts that repeat themselves: phrases of a task, drawn with a skew."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        ids = range(3, 90)
        self.phrases = [self.random.choices(ids, k=self.random.randrange(2, 8)) for _ in range(40)]

    def text(self, num: int) -> list[int]:
        out: list[int] = []
        while len(out) < num:
            rank = min(self.random.randrange(40), self.random.randrange(40))
            out += self.phrases[rank]
        return out[:num]

    def examples(self, num: int) -> list[tuple[list[int], list[int]]]:
        """Pairs of a prompt and an output that copies a part of it, ended by id 0."""
        pairs = []
        for _ in range(num):
            prompt = self.text(40)
            at = self.random.randrange(30)
            pairs.append((prompt, [*self.text(12), *prompt[at : at + 8], *self.text(6), 0]))
        return pairs


def _corpus(texts: _Texts, num: int, held_out: int) -> Corpus:
    return build_calibrated(texts.examples(num), fingerprint="", p_min=2, max_held_out=held_out)


def make(scene: str) -> tuple[Drafter, _Texts]:
    """The drafter of a scene, and what makes its texts."""
    texts = _Texts(SCENES.index(scene) + 1)
    if scene == "suffix":
        return make_drafter("suffix", eos_token_ids=(0,)), texts
    if scene == "corpus":
        return make_drafter("auto", corpus=_corpus(texts, 120, 0)), texts
    if scene == "layered":
        base = _corpus(texts, 60, 12)
        layer = build_corpus(_arrays(texts.examples(20)), base=base, fingerprint="")
        return make_drafter("auto", corpus=base, learned=layer), texts
    return make_drafter("auto", eos_token_ids=(0,)), texts


def _arrays(examples: list[tuple[list[int], list[int]]]) -> list[Any]:
    import numpy as np

    return [(np.asarray(p, np.int32), np.asarray(o, np.int32)) for p, o in examples]


def trees(scene: str) -> Iterator[dict[str, list[Any]]]:
    """The trees of a scene, in order, as plain values; survivals rounded to 1e-4."""
    drafter, texts = make(scene)
    rng = random.Random(99)
    for prompt, output in texts.examples(2):
        expected = [t if rng.random() < 0.85 else rng.randrange(3, 90) for t in output[:-1]]
        session = drafter.open(prompt, prediction_ids=expected if scene == "predicted" else ())
        session.settle()
        place = 0
        while place < len(output):
            tree = session.propose(rng.choice((1, 4, 16, 40)), rng.choice((1, 5, 16)))
            yield {
                "tokens": tree.token_ids.tolist(),
                "parents": tree.parents.tolist(),
                "source": tree.source.tolist(),
                "survival": [round(float(s), 4) for s in tree.survival],
            }
            num = rng.randrange(1, 5)
            session.extend(output[place : place + num])
            place += num
            if rng.random() < 0.2:
                back = rng.randrange(0, session.checkpoint() + 1)
                session.rollback(back)
                place = back
            session.settle()
        session.close()


if __name__ == "__main__":
    sys.stdout.write(json.dumps({scene: list(trees(scene)) for scene in SCENES}) + "\n")
