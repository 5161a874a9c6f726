"""A corpus with its own evidence about trust: some examples are held out and replayed on the rest.

So `auto` starts with this task's own trust: how often copies from the prompt are right here, and
how often the corpus is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from drafters.arrays import Int32
from drafters.auto.copying import Pieces
from drafters.auto.drafter import AutoDrafter
from drafters.auto.trust import Trust
from drafters.corpus import Corpus, Progress, build_corpus, first_indexed

Example = tuple[Sequence[int] | Int32, Sequence[int] | Int32]

TURNS = 4
MAX_OUTPUT = 512  # tokens of an output that are replayed
MAX_REPLAYED = 40_000  # tokens that are replayed in a turn
MAX_REST = 20_000  # examples of the corpus that they are replayed on


def build_calibrated(
    examples: Iterable[Example],
    *,
    fingerprint: str,
    n_max: int = 5,
    p_min: int = 5,
    max_held_out: int = 300,
    progress: Progress | None = None,
    pieces: Pieces | None = None,
) -> Corpus:
    """build_corpus of the examples, with the evidence of some of them.

    max_held_out: so many of the indexed examples, a fifth of all at most, are held out of a first
    build and replayed on it; 0 skips that. pieces: of the vocabulary, so that what is copied by
    text is replayed too. Raises ValueError as build_corpus does.
    """
    if max_held_out < 0:
        raise ValueError("max_held_out must not be negative")
    pairs = [(np.asarray(p, np.int32), np.asarray(o, np.int32)) for p, o in examples]
    corpus = build_corpus(
        pairs, fingerprint=fingerprint, n_max=n_max, p_min=p_min, progress=progress
    )
    num_held_out = min(max_held_out, len(pairs) // 5)
    if num_held_out == 0:
        return corpus
    indexed = pairs[first_indexed(corpus.document_starts) :]
    trust = replay_held_out(indexed, num_held_out, progress, pieces)
    return dataclasses.replace(corpus, evidence=trust.evidence, outcomes=trust.outcomes)


def replay_held_out(
    examples: Sequence[tuple[Int32, Int32]],
    num_held_out: int,
    progress: Progress | None = None,
    pieces: Pieces | None = None,
) -> Trust:
    """The trust that examples spread over the corpus and left out of it give."""
    step = max(1, len(examples) // num_held_out)
    held = examples[step - 1 :: step][:num_held_out]
    # A large corpus need not be indexed whole to learn this.
    rest = [example for i, example in enumerate(examples) if i % step != step - 1][-MAX_REST:]
    part = build_corpus(rest, fingerprint="", n_max=1, p_min=1)
    trust = Trust()
    for turn in range(TURNS):
        # Each turn asks anew with the weights of the last: expectation maximisation.
        drafter = AutoDrafter(corpus=part, trust=trust, pieces=pieces)
        before = (trust.evidence.copy(), trust.outcomes.copy())
        num_tokens = 0
        for prompt, output in held:
            session = drafter.open(prompt.tolist())
            session.settle_once()
            session.extend(output[:MAX_OUTPUT].tolist())
            session.close()
            num_tokens += min(output.shape[0], MAX_OUTPUT)
            if num_tokens > MAX_REPLAYED:
                break
        trust.evidence -= before[0]
        trust.outcomes -= before[1]
        trust.update()
        if progress is not None:
            progress("calibrating", (turn + 1) / TURNS)
    return trust
