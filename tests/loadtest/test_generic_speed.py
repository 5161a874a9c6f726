"""generic_speed: the same model twice, and the command's last line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import generic_speed
from tests.model import families
from tests.model.tiny_models import save_tokenizer


def test_both_ways_are_timed_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # whole vectors
    families._own("LlamaForCausalLM", **sizes)().save_pretrained(tmp_path)
    save_tokenizer(tmp_path, families.VOCAB_SIZE)
    words = ["--model", str(tmp_path), "--rounds", "2", "--threads", "1", "--max-load", "1e9"]
    assert generic_speed.main(words) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["tool"] == "generic_speed" and set(last["found"]) == set(generic_speed.CASES)
    for figures in last["found"].values():
        assert figures["own_ms"] > 0 and figures["generic_ms"] > 0
