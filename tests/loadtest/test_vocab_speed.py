"""The benchmark's own arithmetic, on a FakeRunner with simulated clocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from loadtest.vocab_first_token import head_memory, measure_first_tokens, most_dynamic, unseen_ids
from loadtest.vocab_speed import figures, run_mode, sized
from server.engine.engine import Engine
from server.engine.settings import EngineSettings
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
    assert exact.num_missed > 0 and exact.num_checked >= exact.num_verifications
    assert all(
        t < 6 or t in p
        for o, p in zip(rounds["slice_1"][0].outputs, prompts, strict=True)
        for t in o
    )
    found = figures(rounds)
    assert found["full"]["against_full"]["median"] == 1.0
    assert found["full"]["head_ms"] == pytest.approx(0.002)
    assert found["exact"]["verifications"] == sum(r.num_verifications for r in rounds["exact"])
    assert found["slice_1"]["misses"] == 0


def test_every_row_of_a_prompt_is_copied_before_its_first_token() -> None:
    """The flush between requests: no request finds rows that an earlier one left."""
    profile = _profile(6, 0)
    prompts = [[3, 9, 10, 11], [9, 10, 30], [4, 9, 10, 11], [9, 31, 3]]
    num_rows = most_dynamic(prompts, profile)
    assert num_rows == 3
    engine = Engine(
        FakeRunner(FakeModel(40, seed=2), fake_info(vocab_size=40)),
        {},
        EngineSettings(max_num_seqs=2, max_num_batched_tokens=64, slice_cache_rows=num_rows + 4),
        profiles=lambda name: profile,
    )
    flush = unseen_ids(prompts, profile, num_rows + 4, 40)
    assert not set(flush) & {0, 1, 2, 3, 4, 5, 9, 10, 11, 30, 31}
    found = measure_first_tokens(
        engine, prompts, flush, profile="p", num_warm_up=1, row_bytes=engine.runner.head_row_bytes
    )
    for mode in ("full", "full_again"):
        assert found[mode]["bytes_copied"]["high"] == 0 and found[mode]["most_ids"] == 0
        assert found[mode]["same_as_full"] == 3
    assert found["slice"]["bytes_copied"]["mean"] == pytest.approx(4 * (3 + 3 + 2) / 3)
    assert found["slice"]["most_ids"] == 6 + 3
    assert found["exact"]["same_as_full"] == 3
    assert found["exact"]["against_full"]["num_pairs"] == 3
    with pytest.raises(ValueError, match="only 29 ids"):
        unseen_ids(prompts, profile, 30, 40)


def test_memory_is_counted_by_mode(tmp_path: Path) -> None:
    table = np.zeros((40, 8), np.float16)
    save_file({"model.embed_tokens.weight": table}, tmp_path / "model.safetensors")
    found = head_memory(tmp_path, 40, 32, {"full": 0, "slice": 7, "exact": 9})
    assert found["embedding_table_mapped"] == 40 * 8 * 2
    assert found["modes"] == {
        "full": {"beside_arithmetic": 40 * 32, "host_head": 0},
        "slice": {"beside_arithmetic": 7 * 32, "host_head": 0},
        "exact": {"beside_arithmetic": 9 * 32, "host_head": 40 * 32},
    }
