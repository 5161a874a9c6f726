"""`loadtest.forecast`: what is tuned, what is measured, and both beside each other."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from loadtest.forecast import Bench, build_parser, compare, ratios
from loadtest.priced_runner import PricedRunner, priced_time
from server import token_bytes
from server.engine.budget import CostTable, row_grid
from server.engine.engine import Engine
from server.engine.settings import EngineSettings
from server.types import Request, SamplingParams
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.fakes.fake_drafters import random_drafter
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info

TOKENIZER = byte_level_tokenizer()
TABLE = token_bytes.build(TOKENIZER, TOKENIZER.get_vocab_size())


class FixedCost(CostTable):
    """A table that no step refreshes: a fake model's steps take no time."""

    def observe(self, num_rows: int, keys: float, seconds: float) -> None:
        """Nothing is noted."""


def _bench() -> Bench:
    """A model whose texts repeat themselves, and a table by which drafts pay."""
    vocab = TABLE.vocab_size
    info = fake_info(vocab_size=vocab, num_blocks=256, max_model_len=128, eos_token_ids=(0,))
    runner = FakeRunner(FakeModel(vocab, seed=2, context=1, boost=60.0), info)
    rows = row_grid(512)
    cost = FixedCost(rows, [100.0 + r for r in rows])
    settings = EngineSettings(max_num_seqs=8, max_num_batched_tokens=64)
    engine = Engine(runner, {"auto": random_drafter(1, vocab)}, settings, cost=cost)
    served = SimpleNamespace(table=TABLE, tokenizer=TOKENIZER)
    return Bench(cast("Any", served), engine, lambda _: cost)


def test_the_same_answers_are_forecast_as_they_are_served(tmp_path: Path) -> None:
    data = tmp_path / "town"
    data.mkdir()
    for split, num in (("train", 40), ("test", 6)):
        lines = [{"prompt": f"{split} {i}:", "completion": "yes"} for i in range(num)]
        lines[1]["prompt"] *= 40  # too long
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (data / f"{split}.jsonl").write_text(text)
    words = ["--data", str(tmp_path), "--train", "12", "--prompts", "5", "--max-tokens", "20"]
    words += ["--max-prompt", "60"]
    options = build_parser().parse_args([*words, "--rounds", "1", "--clients", "1", "3"])
    folder = tmp_path / "work"
    folder.mkdir()
    rows = compare(_bench(), "town", folder, options)
    assert [row["clients"] for row in rows] == [1, 3]
    for row in rows:
        assert row["same_text"] and row["tokens"] <= 5 * 20
        assert row["tokens_per_step"] > 2, "the texts repeat themselves"
        # Only the rows of rejected nodes are not known to a replay.
        assert 0.9 < row["again_tokens_per_step"] / row["tokens_per_step"] < 1.1
    assert rows[0]["tune_speedup"] > 1.5
    told = ratios(rows)
    low, high = told["1"]["again_tokens_per_step"]
    assert low == high and "tune_tokens_per_step" not in told["3"]


def test_a_priced_step_takes_what_its_table_says() -> None:
    """Whatever else the machine does: the clock is of this thread's CPU seconds and the table."""
    rows = row_grid(64)
    cost = CostTable(rows, [50.0 + r for r in rows], 0.0)
    with priced_time() as clock:
        info = fake_info(vocab_size=9, num_blocks=64, max_model_len=64)
        runner = PricedRunner(FakeRunner(FakeModel(9, seed=1), info), clock, cost)
        engine = Engine(cast("Any", runner), {}, EngineSettings(max_num_seqs=4), cost=cost)
        engine.submit(Request("a", "", "fake", (2, 3, 4), SamplingParams(max_tokens=3)))
        began = time.perf_counter()
        num_steps = 0
        while engine.has_work:
            engine.step()
            num_steps += 1
            stats = engine.stats()
            assert stats.model_s == 50.0 + stats.num_rows and stats.host_s < 5.0
        took = time.perf_counter() - began
    assert num_steps == 3  # the prompt's three rows, and a row for each token behind the first
    assert 53.0 + 2 * 51.0 < took < 53.0 + 2 * 51.0 + 5.0
