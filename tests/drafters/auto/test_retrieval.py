"""The newest outputs of a scope are drafted from at once, and once."""

from __future__ import annotations

import numpy as np

from drafters.auto.drafter import AutoDrafter
from drafters.auto.retrieval import MAX_RECENT, NUM_RECENT, RECENT_WEIGHT, Seen, retrieve
from drafters.corpus import build_corpus
from drafters.replay import Recording, replay


def _outputs(num: int, size: int = 30) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(100, 900, size).astype(np.int32) for _ in range(num)]


def test_the_last_few_outputs_are_kept_and_equal_ones_once() -> None:
    seen = Seen()
    outputs = _outputs(NUM_RECENT + 2)
    for output in outputs:
        seen.add(output)
    seen.add([])
    assert [own[0] for own in seen.recent] == [own[0] for own in outputs[2:]]
    seen.add(outputs[3].tolist())
    kept = seen.recent
    assert len(kept) == NUM_RECENT and np.array_equal(kept[-1], outputs[3])
    seen.add(np.arange(2 * MAX_RECENT, dtype=np.int32))
    assert seen.recent[-1].shape == (MAX_RECENT,)


def test_an_answer_given_before_is_drafted_before_a_layer_is_built() -> None:
    answer = _outputs(1)[0].tolist()
    again = [Recording([7, 8, 9], answer)]
    seen = Seen()
    drafter = AutoDrafter(seen=seen)
    assert replay(drafter, again, budget=8).decode_tokens_per_step < 1.5
    seen.add(answer)
    assert replay(drafter, again, budget=8).decode_tokens_per_step > 4.0
    assert replay(AutoDrafter(), again, budget=8).decode_tokens_per_step < 1.5


def test_what_a_layer_holds_stands_once() -> None:
    outputs = _outputs(6)
    outputs[5] = np.arange(2000, 2000 + 2 * MAX_RECENT, dtype=np.int32)
    prompts = [np.array([1, 2, 50 + i, 60 + i], np.int32) for i in range(6)]
    layer = build_corpus(list(zip(prompts, outputs, strict=True)), base=None, fingerprint="x")
    seen = Seen()
    for output in (outputs[1], outputs[5], _outputs(7)[6]):
        seen.add(output)
    found = retrieve([layer], prompts[1], 12, seen.recent)
    weights = [weight for weight, _ in found]
    assert weights == sorted(weights) and weights[-1] == 1.0
    assert np.array_equal(found[-1][1], outputs[1])
    told = [output.tolist() for _, output in found]
    assert told.count(outputs[1].tolist()) == 1
    # Cut off where it is recent, whole where the layer has it; nobody's likeness made it appear.
    cut = [weight for weight, output in found if output[0] == outputs[5][0]]
    assert cut == [RECENT_WEIGHT]
