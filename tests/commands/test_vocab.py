"""`tailor vocab profile` and `vocab show` on a tiny tokenizer: the file, the report, the errors."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from server import token_bytes
from server.model.loader import eos_token_ids
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.commands.command_line import Tailor
from tests.commands.conftest import VOCAB_ROWS
from tests.json_lines import write_lines
from vocab_store.errors import VocabStoreError
from vocab_store.profile import VocabProfile, model_facts
from vocab_store.slice import RequiredIds, VocabSlice

PAIRS = [
    ("Which town is it?", "Rome"),
    ("Which river is it?", "the Po"),
    ("Say Rome", "Rome"),
    ("Say yes", "yes"),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"prompt": p, "completion": c} for p, c in PAIRS * 5]
    return write_lines(tmp_path / "train.jsonl", rows)


def test_profile_and_show(weightless: Path, data: Path, tmp_path: Path, tailor: Tailor) -> None:
    out, edge = tmp_path / "task.vocab", tmp_path / "edge"
    words = ["--model", weightless, "--data", data, "-o", out, "--language", "en"]
    told = tailor("vocab", "profile", *words, "--export-edge-llm", edge)
    assert "tokenize 20" in told.err.splitlines() and "count 18" in told.err.splitlines()
    assert "held-out documents 2 " in told.out and "100.00 % of tokens" in told.out

    tokenizer = byte_level_tokenizer()
    tokens = token_bytes.build(tokenizer, VOCAB_ROWS)
    required = RequiredIds.from_tokens(tokens, (0, 1))
    made = VocabProfile.load(out, fingerprint=tokens.fingerprint, required=required)
    kept = load_file(str(edge / "vocab_map.safetensors"))["vocab_map"]
    assert kept.tolist() == made.slice.ids.tolist()
    shown = tailor("vocab", "show", out).out
    assert made.version in shown and '"languages": ["en"]' in shown


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_fields_and_forms_of_data_make_the_same_profile(
    weightless: Path, data: Path, tmp_path: Path, form: str, tailor: Tailor
) -> None:
    """--field and --prompt-field, on CSV and Parquet, as everywhere."""
    file = tmp_path / f"other.{form}"
    rows = [{"question": p, "answer": c} for p, c in PAIRS * 5]
    if form == "csv":
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, ["question", "answer"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
        table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
        parquet.write_table(table, file)
    common = ["vocab", "profile", "--model", weightless]
    one, other = tmp_path / "one.vocab", tmp_path / "other.vocab"
    words = ["--data", file, "--field", "answer", "--prompt-field", "question", "-o", other]
    tailor(*common, "--data", data, "-o", one)
    tailor(*common, *words)
    assert other.read_bytes() == one.read_bytes()
    tailor(*common, *words, "--heldout", file)


def test_errors_name_the_file(weightless: Path, data: Path, tmp_path: Path, tailor: Tailor) -> None:
    def says(*words: object) -> str:
        return tailor("vocab", *words, status=1).err

    start = ["profile", "--model", weightless, "-o", tmp_path / "out.vocab", "--data"]
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "x"}\n')
    assert "bad.jsonl:1: completion: is missing (there are: prompt)" in says(*start, bad)
    assert "--block needs --language" in says(*start, data, "--block", "Thai")
    assert "xx-unknown" in says(*start, data, "--language", "xx-unknown")
    assert "bad.jsonl: not a vocabulary profile" in says("show", bad)
    assert not (tmp_path / "out.vocab").exists()
    ids = np.arange(4, dtype=np.int32)
    VocabProfile(VocabSlice(ids, 4), ids[:0], np.zeros(0, np.float32)).save(bad)
    assert "the manifest holds no report" in says("show", bad)
    (weightless / "config.json").unlink()
    assert f"{weightless}/config.json: No such file" in says(*start, data)
    (weightless / "config.json").write_text("{}")
    with pytest.raises(VocabStoreError, match="lacks hidden_size"):
        model_facts(weightless)


def test_a_profile_requires_each_id_that_ends_a_text(tmp_path: Path) -> None:
    """As the engine does, which refuses a vocabulary without one: of both files, both places."""
    text = {"vocab_size": 10, "hidden_size": 4, "eos_token_id": 7}
    config = {"text_config": text, "eos_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 5, 10]}')
    assert model_facts(tmp_path) == (4, (5, 6, 7))
    del text["vocab_size"]  # as Gemma 3's config.json
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_facts(tmp_path) == (4, (5, 6, 7, 10))
    assert eos_token_ids(tmp_path, [5, 7], 10) == (5, 6, 7)
