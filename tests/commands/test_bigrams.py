"""The target's own bigrams: what the model says after every single token."""

from __future__ import annotations

import numpy as np
import pytest

from server.commands.corpus import take_bigrams
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.wiring.drafter import model_fingerprint
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info

VOCAB = 40


def _engine(fail: bool = False) -> Engine:
    def broken(batch: object) -> None:
        raise MemoryError("out of memory")

    info = fake_info(vocab_size=VOCAB, max_num_seqs=8, max_num_batched_tokens=16)
    runner = FakeRunner(FakeModel(VOCAB, seed=3), info, fail=broken if fail else None)
    settings = EngineSettings(max_num_seqs=8, max_num_batched_tokens=16, max_failures=4)
    return Engine(runner, {}, settings)


@pytest.mark.parametrize("bos", [None, 2])
def test_the_table_holds_the_models_likeliest_next_tokens(bos: int | None) -> None:
    told: list[tuple[int, int]] = []
    table = take_bigrams(
        _engine(), 3, bos_token_id=bos, progress=lambda done, num: told.append((done, num))
    )
    model = FakeModel(VOCAB, seed=3)
    for token in range(VOCAB):
        text = [token] if bos is None else [bos, token]
        logits = model.logits(int(model.hashes(text)[-1])).astype(np.float64)
        order = np.argsort(-logits, kind="stable")[:3]
        assert table.next_ids[token].tolist() == order.tolist()
        chances = np.exp(logits - logits.max())
        chances /= chances.sum()
        assert table.chances[token] == pytest.approx(chances[order], rel=1e-4)
    assert told[-1] == (VOCAB, VOCAB) and told == sorted(told)
    assert table.fingerprint == "fake"


def test_a_model_that_cannot_be_run_is_told() -> None:
    with pytest.raises(RuntimeError, match="cannot be run"):
        take_bigrams(_engine(fail=True))


def test_the_dtype_is_no_part_of_the_model() -> None:
    assert model_fingerprint("abc:float32") == model_fingerprint("abc:int8:kv-int8") == "abc"
    assert model_fingerprint("abc") == "abc"
