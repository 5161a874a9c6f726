"""Recordings and other projects' drafters, as the replay table reads them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from drafters.published.grammys import BigramTable
from loadtest import replay_table
from loadtest.peer_drafters import PADDING, tree_of_paths
from loadtest.recordings import EOS, load_tokenizer
from tests.api.tiny_tokenizers import byte_level_tokenizer

PATHS = [[8, 9, 10], [8, 9, PADDING], [8, 11, PADDING], [9, PADDING, PADDING]]


def test_paths_of_a_datastore_become_one_tree() -> None:
    tree = tree_of_paths(PATHS, budget=16, max_depth=16)
    assert tree.token_ids.tolist() == [8, 9, 10, 11, 9]
    assert tree.parents.tolist() == [-1, 0, 1, 0, -1]
    # Cut by budget and by depth, parents stay.
    assert tree_of_paths(PATHS, budget=2, max_depth=16).token_ids.tolist() == [8, 9]
    flat = tree_of_paths(PATHS, budget=16, max_depth=1)
    assert (flat.token_ids.tolist(), flat.parents.tolist()) == ([8, 9], [-1, -1])
    assert len(tree_of_paths([], budget=4, max_depth=4)) == 0


def test_the_default_tokenizer_is_that_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILOR_CACHE_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="start the server once"):
        load_tokenizer(None)
    folder = tmp_path / "models" / "smollm2-135m-instruct-v2"
    folder.mkdir(parents=True)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    assert load_tokenizer(None).encode("a b").ids


def test_the_table_of_recorded_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outputs that follow the corpus: `auto` beats what reads the prompt alone, and the two
    columns of a model's bigrams appear with its table."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocab = tokenizer.get_vocab_size()
    for split, first in (("train", 0), ("test", 40)):
        file = tmp_path / "own" / "town" / f"{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            {"prompt_ids": [50 + i, 7, 8], "output_ids": [*range(10, 30), 60 + i]}
            for i in range(first, first + 12)
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    next_ids = np.arange(1, vocab + 1, dtype=np.int32)[:, None] % vocab
    table = BigramTable("model", next_ids, np.full((vocab, 1), 0.5, np.float32))
    table.save(tmp_path / "bigrams")
    options = ["--recorded", str(tmp_path / "own"), "--budgets", "4"]
    options += ["--tokenizer", str(tmp_path / "tokenizer.json")]
    options += ["--bigrams", str(tmp_path / "bigrams")]
    assert replay_table.main(options) == 0
    out = capsys.readouterr().out
    cell = json.loads(next(line for line in out.splitlines() if line.startswith('{"data"')))
    figures = cell["tokens_per_step"]
    assert (cell["data"], cell["examples"]) == ("town", 12)
    assert figures["auto"] > 3.5 and figures["prompt"] == figures["trie"] == 1.0
    # One draft of three tokens that all follow: a table as good as this one is a corpus.
    assert figures["bigram"] == figures["grammys, table"] > 3.0
    summary = json.loads(out.splitlines()[-1])
    assert summary["machine"]["commit"] and summary["4"]["lowest_ratio"] == cell["ratio"]
    # The tables again, from what was printed.
    (tmp_path / "log").write_text(out)
    assert replay_table.main(["--from-json", str(tmp_path / "log")]) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[1:8] == out[out.index("\n### 4 nodes") :].splitlines()[1:8]
