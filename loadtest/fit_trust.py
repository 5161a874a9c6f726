"""`python -m loadtest.replay fit`: the trust that `auto` and `suffix` start with.

It writes drafters/auto/default_trust.json and reads train splits only. Of each data set the last
part is held out and replayed on a corpus of the rest: with that corpus, without it, and with a
prediction made from the output by random edits; every data set counts for the same number of
tokens. Expectation maximisation for the weights, then the factors that correct what they claim.

With --recorded it fits what the model's own logits are worth, and leaves the rest as it is:
DIR/SET/train.jsonl are a model's own answers with what it held likely (`replay record`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from cyclopts import Parameter

from drafters.auto.cells import LOGITS, NUM_CELLS, NUM_FACTORS, NUM_LEVELS, NUM_SOURCES
from drafters.auto.drafter import AutoDrafter
from drafters.auto.seen import Seen
from drafters.auto.trust import DEFAULT_TRUST, Trust, write_default_trust
from drafters.corpus import Corpus, build_corpus
from drafters.replay import Recording, note_rows, read_recordings
from loadtest.recordings import SetOptions, open_ids

Floats = npt.NDArray[np.float64]

ROUNDS = 8
TOKENS_PER_SET = 2500.0
SMOOTHING = 6.0


def edited(held: Sequence[Recording], example: Recording, rng: random.Random) -> list[int]:
    """A prediction of an output: itself with random edits, or now and then another's output."""
    if rng.random() < 0.15:
        return list(rng.choice(held).output_ids)
    rate = rng.choice((0.02, 0.05, 0.1, 0.25))
    out: list[int] = []
    for token in example.output_ids[:-1]:
        edit = rng.random()
        if edit >= rate:
            out.append(token)
        elif edit < 0.6 * rate:
            out.append(rng.choice(example.output_ids))
        elif edit < 0.8 * rate:
            out += [token, rng.choice(example.output_ids)]
    return out


def fit_logits(folder: Path) -> tuple[Floats, Floats]:
    """(weights, factors) with those of the logits fitted anew: half of the runs share what the
    model held likely among a set's requests, half of them do not."""
    start = Trust()
    weights, factors = start.weights.copy(), start.factors.copy()
    own_weights = slice(LOGITS * NUM_CELLS // NUM_SOURCES, None)
    own_factors = slice(LOGITS * NUM_FACTORS // NUM_SOURCES, None)
    parts = [list(read_recordings(path)) for path in sorted(folder.glob("*/train.jsonl"))]
    if not parts:
        raise ValueError(f"{folder} has no SET/train.jsonl")
    for turn in range(ROUNDS):
        evidence = np.zeros((2, NUM_CELLS))
        outcomes = np.zeros((3, NUM_FACTORS))
        for recordings in parts:
            for seen in (Seen(), None):
                trust = Trust(weights, factors, memory=1e12)
                drafter = AutoDrafter(trust=trust, seen=seen)
                for recording in recordings:
                    _teach(drafter, recording)
                evidence += trust.evidence
                outcomes += trust.outcomes
        fitted = (evidence[1] + SMOOTHING * weights) / (evidence[0] + SMOOTHING)
        weights[own_weights] = fitted[own_weights]
        factors[own_factors] = ((outcomes[1] + 2.0) / (outcomes[0] + 2.0))[own_factors]
        asked = evidence[0, own_weights]
        mean = np.average(weights[own_weights], weights=asked)
        print(f"round {turn + 1}: mean weight asked {mean:.4f}")
    return weights, factors


def _teach(drafter: AutoDrafter, recording: Recording) -> None:
    """A recording, token by token, as without drafts."""
    session = drafter.open(recording.prompt_ids)
    session.settle_once()
    for place, token in enumerate(recording.output_ids):
        note_rows(session, recording, place, 1)
        session.extend([token])
    session.close()


def _write(path: Path, weights: Floats, factors: Floats) -> None:
    per_mille = np.clip(np.rint(1000 * weights), 1, 999).astype(int).reshape(NUM_LEVELS, -1)
    per_cent = np.clip(np.rint(100 * factors), 1, 800).astype(int).reshape(-1, 10)
    write_default_trust(path, per_mille.tolist(), per_cent.tolist())
    print(f"wrote {path}")


def fit_sources(parts: Sequence[tuple[Corpus, Sequence[Recording]]]) -> tuple[Floats, Floats]:
    """(weights, factors) of every source, from held-out examples beside a corpus of the rest."""
    # A flat start: longer matches are trusted more.
    weights = np.repeat(
        np.tile([0.02, 0.3, 0.5, 0.62, 0.7, 0.76, 0.82, 0.87, 0.91, 0.94], NUM_LEVELS // 10),
        NUM_CELLS // NUM_LEVELS,
    )
    factors = np.ones(NUM_FACTORS)
    for turn in range(ROUNDS):
        evidence = np.zeros((2, NUM_CELLS))
        outcomes = np.zeros((3, NUM_FACTORS))
        for corpus, held in parts:
            num_tokens = sum(len(e.output_ids) for e in held)
            rng = random.Random(turn)
            for use, share, predicted in (
                (corpus, 1.0, False),
                (None, 0.5, False),
                (None, 0.5, True),
            ):
                trust = Trust(weights, factors, memory=1e12)
                drafter = AutoDrafter(corpus=use, trust=trust, eos_token_ids=corpus.end_ids())
                for example in held:
                    session = drafter.open(
                        example.prompt_ids,
                        prediction_ids=edited(held, example, rng) if predicted else (),
                    )
                    session.settle_once()
                    session.extend(example.output_ids)
                    session.close()
                scale = share * min(1.0, TOKENS_PER_SET / num_tokens)
                evidence += scale * trust.evidence
                outcomes += scale * trust.outcomes
        weights = (evidence[1] + SMOOTHING * weights) / (evidence[0] + SMOOTHING)
        factors = (outcomes[1] + 2.0) / (outcomes[0] + 2.0)
        print(f"round {turn + 1}: mean weight asked {np.average(weights, weights=evidence[0]):.4f}")
    return weights, factors


_SETS = SetOptions()


def fit(
    *,
    sets: SetOptions = _SETS,
    output: Annotated[Path, Parameter(name=("--output", "-o"))] = DEFAULT_TRUST,
    held_out: Annotated[int, Parameter(help="train examples of a set to fit on")] = 100,
) -> int:
    """Fit the trust that drafters start with, from train splits; see loadtest.fit_trust.

    Example: python -m loadtest.replay fit --data data -o trust.json
    """
    if sets.recorded is not None:
        _write(output, *fit_logits(sets.recorded))
        return 0
    ids, parts = open_ids(sets.model), []
    for name in sets.names():
        examples = sets.read(ids, name, "train", sets.corpus_examples + 4 * held_out)
        num_held = max(10, min(held_out, len(examples) // 4))
        held, rest = examples[-num_held:], examples[:-num_held][-sets.corpus_examples :]
        corpus = build_corpus(((e.prompt_ids, e.output_ids) for e in rest), fingerprint="")
        parts.append((corpus, held))
        print(f"{name}: {corpus.num_tokens} tokens of corpus, {num_held} examples held out")
    _write(output, *fit_sources(parts))
    return 0
