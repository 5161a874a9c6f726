"""After `warm_up` a drafter's sessions compile and load nothing: either would delay a step."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from drafters.auto.drafter import AutoDrafter
from drafters.auto.likely import FIRST_SLOTS, LikelyTable
from drafters.corpus import Corpus, build_corpus


def _forms() -> dict[str, int]:
    """How many forms each compiled function of the drafters has in this process, by its name."""
    from numba.core.dispatcher import Dispatcher

    return {
        f"{module.__name__}.{found.__name__}": len(found.overloads)
        for module in list(sys.modules.values())
        if module.__name__.startswith("drafters")
        for found in vars(module).values()
        if isinstance(found, Dispatcher)
    }


def _serve(corpus: Corpus | None) -> None:
    """Two answers as an engine asks for them, with likely ids, a rest between, and a prediction."""
    drafter = AutoDrafter(corpus=corpus)
    text = [1, 2, 3, 4, 1, 2, 3, 5] * 4
    ids, chances = np.tile(np.array([3, 1, 2, 4], np.int32), (9, 4)), np.full((9, 16), 0.05)
    for prediction in ([], [1, 2, 3, 4]):
        session = drafter.open(text, prediction_ids=prediction)
        session.settle()
        for token in text:
            tree = session.propose(8, 4)
            num = 1 + len(tree)
            at = ((token, *tree.token_ids.tolist()), (-1, *tree.parents.tolist()))
            session.note_likely(*at, ids[:num], chances[:num].astype(np.float32))
            session.extend([token])
            drafter.trust.update()
        session.catch_up([1, 2, 3])
        session.propose(8, 4)
        session.extend([4, 1])
        session.rollback(len(text))
        session.close()


def check() -> None:
    AutoDrafter().warm_up()
    before = _forms()
    examples = [([5, 6, 7], [1, 2, 3, 4, 0]), ([5, 6, 8], [1, 2, 3, 5, 0])]
    _serve(None)
    _serve(build_corpus(examples, fingerprint="", n_max=2, p_min=1))
    full = LikelyTable()
    for token in range(4 * FIRST_SLOTS):
        one = np.full(1, token, np.int32)
        full.note(one, np.zeros((2, 0), np.int32), one[None], np.full((1, 1), 0.5, np.float32), one)
    assert full.keys.shape[0] > FIRST_SLOTS
    after = _forms()
    late = {name: num - before.get(name, 0) for name, num in after.items()}
    assert before and not any(late.values()), {name: num for name, num in late.items() if num}


def test_nothing_is_compiled_after_warm_up() -> None:
    """In a process of its own: in this one other tests have compiled."""
    code = f"from {__name__} import check; check()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
