"""`tailor corpus build`, `corpus show` and `replay` on a tiny tokenizer: files, figures, errors.
The bigrams of a model are what it says after every single token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from drafters.corpus import Corpus
from server import token_bytes
from server.commands.corpus import take_bigrams
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.commands.command_line import Tailor
from tests.commands.conftest import VOCAB_ROWS
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info
from tests.json_lines import write_lines


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [
        {"prompt": f"Town {i}:", "completion": f"answer: yes, town {i % 3}"} for i in range(40)
    ]
    return write_lines(tmp_path / "train.jsonl", lines)


def test_build_show_and_replay(
    weightless: Path, data: Path, tmp_path: Path, tailor: Tailor
) -> None:
    output = tmp_path / "task.corpus"
    figures = tailor("corpus", "build", "--model", weightless, "--data", data, "-o", output).json
    tokenizer = byte_level_tokenizer()
    fingerprint = token_bytes.build(tokenizer, VOCAB_ROWS).fingerprint.hex()
    corpus = Corpus.load(output, fingerprint=fingerprint)
    assert figures["documents"] == corpus.num_documents == 40
    assert figures["tokens"] == corpus.num_tokens
    first = corpus.output(0).tolist()
    assert first[-1] == 0, "an output ends with the generation config's first EOS id"
    assert tokenizer.decode(first[:-1]) == " answer: yes, town 0"

    shown = tailor("corpus", "show", output, "--model", weightless, "--top", 2).out
    assert "40, " in shown and "K80" in shown and "distinct" in shown

    row = {"prompt_ids": [5, 6], "output_ids": first}
    recorded = write_lines(tmp_path / "recorded.jsonl", [row])
    words = ["--drafter", "mix", "--corpus", output, "--data", recorded]
    summary = tailor("replay", *words).json
    assert summary["decode_tokens_per_step"] > 2.0, "the corpus holds this very output"
    for wrong in (["--option", "speed", *words], ["--drafter", "mix", "--data", "none.jsonl"]):
        assert tailor("replay", *wrong, status=1).err.startswith("tailor: ")


def test_data_without_examples_is_told_and_no_corpus_is_written(
    weightless: Path, tmp_path: Path, tailor: Tailor
) -> None:
    file, output = tmp_path / "bad.jsonl", tmp_path / "out.corpus"
    file.write_text("\n")
    words = ["--model", weightless, "--data", file, "-o", output]
    told = tailor("corpus", "build", *words, status=1).err
    assert str(file) in told and "no examples" in told
    assert not output.exists()


def test_showing_what_is_no_corpus(tmp_path: Path, tailor: Tailor) -> None:
    file = tmp_path / "no.corpus"
    file.write_bytes(b"something else entirely")
    assert str(file) in tailor("corpus", "show", file, status=1).err


# --- bigrams ---

VOCAB = 40


def _engine(fail: bool = False) -> Engine:
    def broken(batch: object) -> None:
        raise MemoryError("out of memory")

    info = fake_info(vocab_size=VOCAB, max_num_seqs=8, max_num_batched_tokens=16)
    runner = FakeRunner(FakeModel(VOCAB, seed=3), info, fail=broken if fail else None)
    settings = EngineSettings(max_num_seqs=8, max_num_batched_tokens=16)
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
