"""What drafting costs, measured on a tiny tokenizer: the corpus is built by the real command."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import pytest

from drafters.replay import Recording
from loadtest import drafter_costs
from loadtest.recordings import EOS
from tests.api.tiny_tokenizers import byte_level_tokenizer


def test_crossings_are_the_examples_then_joins_of_two() -> None:
    examples = [Recording([1], [5, 6, 7, 0]), Recording([2], [8, 6, 9, 0])]
    made = list(islice(drafter_costs.crossings(examples, random.Random(3)), 200))
    assert made[:2] == examples
    # Crossed at 6, which both hold, or an output joined with itself.
    outputs = {tuple(e.output_ids) for e in made[2:]}
    assert {(5, 6, 9, 0), (8, 6, 7, 0)} < outputs <= {
        (5, 6, 7, 0), (8, 6, 9, 0), (5, 6, 9, 0), (8, 6, 7, 0),
    }  # fmt: skip


def test_figures_beside_their_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([EOS])
    model = tmp_path / "model"
    model.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    config = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 0}
    (model / "config.json").write_text(json.dumps(config))
    for name in ("alpha", "beta"):
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        lines = [
            {"prompt": f"{name} {i}:", "completion": f"kind {i % 7}, river {i % 3}"}
            for i in range(30)
        ]
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(li) + "\n" for li in lines))
    options = ["--data", str(tmp_path / "data"), "--model", str(model)]
    options += ["--tokenizer", str(model / "tokenizer.json"), "--folder", str(tmp_path)]
    status = drafter_costs.main([*options, "--corpus-tokens", "4000", "--build-tokens", "2000"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == (1 if figures["missed"] else 0)
    for size, key in ((2000, "build_0.002M"), (4000, "build_0.004M")):
        built = figures[key]
        assert size <= built["tokens"] < size + 100
        # A Python with numpy and numba in it; the whole machine is not what is measured.
        assert 0.03 < built["peak_gib"] < 2 and built["cpu_s"] > 0
    assert set(figures["beta"]) == {"propose_us", "propose_p90_us", "extend_us"}
    assert figures["propose_us"] > 0 and figures["trie_build_ms"] > 0
    assert figures["machine"]["commit"]
    by_drafter = figures["drafters"]
    assert {"auto", "auto, logits", "auto, corpus", "suffix", "trie", "mix"} <= set(by_drafter)
    for name, by_number in by_drafter.items():
        assert list(by_number) == ["1", "8"]
        for costs in by_number.values():
            assert all(us > 0 for us in costs.values()), name
            assert ("note_us" in costs) == (name == "auto, logits")
    left = sorted(file.name for file in tmp_path.iterdir())
    assert left == ["data", "model"]
