"""`tailor corpus build`, `corpus show` and `replay` on a tiny tokenizer: files, figures, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafters.corpus import Corpus
from server import token_bytes
from server.commands.cli import main
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.commands.conftest import VOCAB_ROWS
from tests.json_lines import write_lines


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [
        {"prompt": f"Town {i}:", "completion": f"answer: yes, town {i % 3}"} for i in range(40)
    ]
    return write_lines(tmp_path / "train.jsonl", lines)


def test_build_show_and_replay(
    weightless: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "task.corpus"
    arguments = ["--model", str(weightless), "--data", str(data), "-o", str(output)]
    assert main(["corpus", "build", *arguments]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    tokenizer = byte_level_tokenizer()
    fingerprint = token_bytes.build(tokenizer, VOCAB_ROWS).fingerprint.hex()
    corpus = Corpus.load(output, fingerprint=fingerprint)
    assert figures["documents"] == corpus.num_documents == 40
    assert figures["tokens"] == corpus.num_tokens
    first = corpus.output(0).tolist()
    assert first[-1] == 0, "an output ends with the generation config's first EOS id"
    assert tokenizer.decode(first[:-1]) == " answer: yes, town 0"

    assert main(["corpus", "show", str(output), "--model", str(weightless), "--top", "2"]) == 0
    shown = capsys.readouterr().out
    assert "40, " in shown and "K80" in shown and "distinct" in shown

    row = {"prompt_ids": [5, 6], "output_ids": first}
    recorded = write_lines(tmp_path / "recorded.jsonl", [row])
    words = ["--drafter", "mix", "--corpus", str(output), "--data", str(recorded)]
    assert main(["replay", *words]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["decode_tokens_per_step"] > 2.0, "the corpus holds this very output"


def test_data_without_examples_is_told_and_no_corpus_is_written(
    weightless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "bad.jsonl", tmp_path / "out.corpus"
    file.write_text("\n")
    arguments = ["--model", str(weightless), "--data", str(file), "-o", str(output)]
    assert main(["corpus", "build", *arguments]) == 1
    told = capsys.readouterr().err
    assert str(file) in told and "no examples" in told
    assert not output.exists()


def test_showing_what_is_no_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "no.corpus"
    file.write_bytes(b"something else entirely")
    assert main(["corpus", "show", str(file)]) == 1
    assert str(file) in capsys.readouterr().err
