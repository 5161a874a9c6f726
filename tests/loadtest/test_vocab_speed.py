"""The benchmark's own arithmetic, on a FakeRunner with simulated clocks."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.vocab_speed import figures, run_mode, sized
from server.engine.engine import Engine, EngineSettings
from server.types import VocabularyParams
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info
from vocab_store.profile import VocabProfile
from vocab_store.slice import RequiredIds, VocabSlice


class ClockedRunner(FakeRunner):
    """A FakeRunner with the clocks of a CpuRunner."""

    body_s, head_s, draw_s = 1e-6, 2e-6, 3e-6


def _profile(num_ids: int, num_fill: int, vocab: int = 40) -> VocabProfile:
    made = VocabSlice.make(range(num_ids), RequiredIds.of(vocab, eos_ids=[1]))
    fill = np.arange(num_ids, num_ids + num_fill, dtype=np.int32)
    return VocabProfile(made, fill, np.zeros(num_fill, np.float32))


def test_a_profile_is_filled_to_a_share() -> None:
    profile = _profile(4, 20)
    assert sized(profile, 0.5).slice.ids.tolist() == list(range(20))
    assert sized(profile, 0.5).fill_ids.tolist() == [20, 21, 22, 23]
    assert sized(profile, 0.05) is profile
    with pytest.raises(ValueError, match="filled to 20 more ids only"):
        sized(profile, 0.9)


def test_modes_side_by_side() -> None:
    profile = _profile(6, 0)
    engine = Engine(
        ClockedRunner(FakeModel(40, seed=2), fake_info(vocab_size=40)),
        {},
        EngineSettings(max_num_seqs=2, max_num_batched_tokens=64),
        profiles=lambda name: profile,
    )
    prompts = [[3, 4, 5], [7, 8]]
    modes = {
        "full": VocabularyParams(),
        "exact": VocabularyParams("exact", "p", 4),
        "slice_1": VocabularyParams("slice", "p"),
    }
    rounds = {
        name: [
            run_mode(engine, prompts, vocabulary, max_tokens=12, name=f"{name}-{i}")
            for i in range(2)
        ]
        for name, vocabulary in modes.items()
    }
    full, exact = rounds["full"][0], rounds["exact"][0]
    assert exact.outputs == full.outputs
    assert full.num_tokens == sum(len(o) for o in full.outputs) - 2 == full.num_steps
    assert exact.num_missed > 0 and exact.num_checked >= exact.num_windows
    assert all(
        t < 6 or t in p
        for o, p in zip(rounds["slice_1"][0].outputs, prompts, strict=True)
        for t in o
    )
    found = figures(rounds)
    assert found["full"]["against_full"]["median"] == 1.0
    assert found["full"]["head_ms"] == pytest.approx(0.002)
    assert found["exact"]["windows"] == sum(r.num_windows for r in rounds["exact"])
    assert found["slice_1"]["misses"] == 0
