"""A model's second start asks transformers nothing, and computes the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from server.errors import ModelError
from server.model import known_config
from server.model.catalog import model_folder
from server.model.loader import open_model
from server.model.shape import shape_of
from tests.model import families
from tests.model.gguf_models import write_llama
from tests.model.tiny_models import save_tiny
from tests.processes import run_python
from tests.setup.second_start import digest

pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_second_start_imports_no_transformers_nor_a_file_s_torch(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a converted file's first start, as in an image that holds the model, and a cache
    that is new. What torch would be needed for comes last."""
    write_llama(tmp_path / "tiny.gguf", "Q8_0")
    file, gemma3 = model_folder(str(tmp_path / "tiny.gguf"), "file"), tmp_path / "gemma3"
    save_tiny(gemma3, "gemma3")
    first = {str(folder): digest(str(folder)) for folder in (file, gemma3)}
    starts = [
        (str(file), str(own_cache), "torch"),
        (str(file), str(tmp_path / "new"), "transformers"),
        (str(gemma3), str(own_cache), "transformers"),
    ]
    code = (
        "import os, sys; from tests.setup.second_start import digest\n"
        f"for folder, os.environ['TAILOR_CACHE_DIR'], absent in {starts!r}:\n"
        "    print(digest(folder)); assert absent not in sys.modules, (folder, absent)\n"
    )
    assert run_python("-c", code).split() == [first[folder] for folder, *_ in starts]
    for kept in file.glob("*.ropes"):
        kept.with_suffix(".json").unlink()
        kept.unlink()
    monkeypatch.setenv("TAILOR_CACHE_DIR", str(tmp_path / "newer"))
    assert first[str(file)] == digest(str(file))  # transformers' own


@pytest.mark.parametrize("family", families.FAMILIES)
def test_what_is_kept_is_what_transformers_says(family: str) -> None:
    config = families.build(family).config
    expected = {"model.norm.weight": (32,)}
    raw = {"family": family}
    assert known_config.find(raw) is None
    known_config.keep(raw, config, expected)
    known = known_config.find(raw)
    assert known is not None
    assert known.shape == shape_of(config)
    assert known.expected == expected
    assert known.config["vocab_size"] == config.vocab_size
    assert known_config.find({"family": "another"}) is None


def test_tables_are_kept_for_the_positions_that_were_asked_for(tiny_folder: Path) -> None:
    want = open_model(tiny_folder, remembers=True).ropes(200)
    again = open_model(tiny_folder, remembers=True)
    assert again.known is not None
    for positions in (50, 200, 210):  # the last are more than are kept
        got = again.ropes(positions)
        shared = min(positions, 200)
        for table, whole in zip(got, want, strict=True):
            assert table.shape[1] >= positions
            assert type(table) is np.ndarray and table.flags.writeable and table.flags.c_contiguous
            assert np.array_equal(table[:, :shared], whole[:, :shared])
    assert open_model(tiny_folder).known is None


def test_the_number_of_ids_is_kept_without_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    save_tiny(folder, "llama")
    opened = open_model(folder)
    known = Tokenizer.from_file(str(opened.tokenizer_file)).get_vocab(with_added_tokens=True)
    assert opened.num_token_ids == min(opened.config.vocab_size, max(known.values()) + 1)

    def fail(_: str) -> None:
        raise AssertionError("the tokenizer was read")

    first = opened.num_token_ids
    monkeypatch.setattr("tokenizers.Tokenizer", SimpleNamespace(from_file=fail))
    assert open_model(folder).num_token_ids == first
    (kept,) = (tmp_path / "cache" / "configs").glob("*-ids.json")
    kept.write_text("[]")
    with pytest.raises(AssertionError, match="was read"):  # a damaged one is made again
        assert open_model(folder).num_token_ids


def test_damaged_files_are_made_anew_and_weights_are_checked_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny(folder, "llama")
    open_model(folder, remembers=True).ropes(64)
    for file in (tmp_path / "cache" / "configs").iterdir():
        file.write_bytes(b"{")
    opened = open_model(folder, remembers=True)
    assert opened.known is None
    assert opened.ropes(64)[0].shape[1] == 64
    (ropes,) = (tmp_path / "cache" / "configs").glob("*.ropes")
    ropes.write_bytes(ropes.read_bytes()[:-4] + b"\0\0\xc0\x7f")
    again = open_model(folder, remembers=True)
    assert again.known is not None and again.ropes(64)[0].flags.owndata
    (kept,) = (tmp_path / "cache" / "configs").glob("*.json")
    plain = json.loads(kept.read_bytes().partition(b"\n")[2])
    plain["expected"]["model.norm.weight"] = [33]
    told = json.dumps(plain).encode()
    kept.write_bytes(kept.read_bytes().partition(b"\n")[0] + b"\n" + told)
    assert open_model(folder, remembers=True).known is None  # its checksum is another one
    kept.write_bytes(hashlib.sha256(told).hexdigest().encode() + b"\n" + told)
    with pytest.raises(ModelError, match="the config says"):
        open_model(folder, remembers=True)
