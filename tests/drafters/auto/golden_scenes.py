"""Seeded scenes of drafting, for test_golden_trees.py: every source, deep and wide trees, and at
the end of each scene what was learned.

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

import numpy as np

from drafters import Drafter, make_drafter
from drafters.auto.copying import Pieces
from drafters.auto.drafter import AutoDrafter, AutoSession
from drafters.auto.held_out import build_calibrated
from drafters.auto.retrieval import Seen
from drafters.corpus import Corpus, build_corpus
from tests.drafters.trees import pieces_of
from tests.fakes.fake_drafters import random_prior

SCENES = ("bare", "corpus", "layered", "predicted", "suffix", "told")
HIDDEN, SHARES = 8, (0.53, 0.21, 0.097, 0.048, 0.019, 0.0093, 0.0047, 0.0)


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

    def recut(self, ids: list[int]) -> list[int]:
        """Ids of which some are written otherwise, left out or put in (see _pieces)."""
        out: list[int] = []
        for token in ids:
            form, cut = self.random.randrange(3), self.random.random()
            out += [] if cut < 0.1 else [token] if cut < 0.7 else [token - token % 3 + form]
            out += [self.random.randrange(3, 90)] if cut > 0.9 else []
        return out


def _pieces() -> Pieces:
    """Of three ids each the forms of a word, or three signs."""
    blobs = [b"", b"", b""]
    signs = {"a": ("\n", ", ", " <"), "g": ("> ", " 19", ".")}
    for word in (f"{chr(97 + i % 23)}{'eaiéo'[i % 5]}{'rns'[i % 3] * (i % 4)}" for i in range(29)):
        forms = signs.get(word[0], (f" {word}", word, word.title()))
        blobs += [form.encode() for form in forms]
    return pieces_of(blobs)


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
    if scene == "told":
        head = random_prior(90, HIDDEN, num_outputs=64, sure=8.0)
        base = _corpus(texts, 8, 0)
        told = AutoDrafter(
            corpus=base, eos_token_ids=(0, 7), seen=Seen(), pieces=_pieces(), model_prior=head
        )
        return told, texts
    return make_drafter("auto", eos_token_ids=(0,)), texts


def _arrays(examples: list[tuple[list[int], list[int]]]) -> list[Any]:
    return [(np.asarray(p, np.int32), np.asarray(o, np.int32)) for p, o in examples]


def trees(scene: str) -> Iterator[dict[str, list[Any]]]:
    """The trees of a scene, in order, as plain values; survivals rounded to 1e-4. The last has no
    nodes; its survivals are what the trusts hold, each cell weighed in a way of its own."""
    drafter, texts = make(scene)
    rng, told = random.Random(99), scene == "told"
    for turn, (prompt, output) in enumerate(texts.examples(4 if told else 2)):
        output = texts.recut(output) if told else output
        expected = [t if rng.random() < 0.85 else rng.randrange(3, 90) for t in output[:-1]]
        predicted = scene == "predicted" or (told and turn % 3 == 2)
        session = drafter.open(prompt, prediction_ids=expected if predicted else ())
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
            if told and isinstance(session, AutoSession):
                rows = [rng.sample(range(3, 90), 8) for _ in range(1 + len(tree))]
                likely = np.array(rows, np.int32), np.array([SHARES] * len(rows), np.float32)
                session.note_likely(tree.token_ids.tolist(), tree.parents.tolist(), *likely)
                session.note_state(
                    np.array([rng.gauss(0.0, 2.0) for _ in range(HIDDEN)], np.float32)
                )
            session.extend(output[place : place + num])
            place += num
            if rng.random() < 0.2:
                back = rng.randrange(0, session.checkpoint() + 1)
                session.rollback(back)
                place = back
            session.settle()
        session.close()
        if told and isinstance(drafter, AutoDrafter) and drafter.seen is not None:
            drafter.seen.add(output)
            drafter.trust.update()
    if isinstance(drafter, AutoDrafter):
        trusts = drafter.trust, drafter.trust.without
        kept = [row for trust in trusts for row in (*trust.evidence, *trust.outcomes)]
        kept = [np.cos(np.arange(row.shape[0])) @ row for row in kept]
        learned = [round(float(number), 4) for number in (*kept, drafter.trust.fit.gain)]
        yield {"tokens": [], "parents": [], "source": [], "survival": learned}


if __name__ == "__main__":
    sys.stdout.write(json.dumps({scene: list(trees(scene)) for scene in SCENES}) + "\n")
