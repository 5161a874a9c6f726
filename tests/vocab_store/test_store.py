"""EmbeddingStore: rows by id from safetensors files in every dtype, without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vocab_store.errors import EmbeddingFileError
from vocab_store.store import EmbeddingStore, gemma_embedding_scale

NAME = "model.embed_tokens.weight"
CODES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def write_safetensors(
    path: Path, tensors: dict[str, tuple[str, npt.NDArray[Any]]], header_pad: int = 0
) -> None:
    """A safetensors file from raw arrays (bf16 as its bits); header_pad shifts the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blob = b""
    for name, (dtype, array) in tensors.items():
        data = array.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(blob), len(blob) + len(data)],
        }
        blob += data
    text = json.dumps(header).encode() + b" " * header_pad
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob)


def make_table(dtype: str, num_rows: int, width: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """A table as stored, and the same values as float32."""
    values = np.random.default_rng(7).standard_normal((num_rows, width)).astype(np.float32)
    if dtype == "BF16":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32)
    stored = values.astype(CODES[dtype])
    return stored, stored.astype(np.float32)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("header_pad", [0, 1, 3])
def test_gather_equals_indexing_the_whole_table(
    tmp_path: Path, dtype: str, header_pad: int
) -> None:
    stored, values = make_table(dtype, 50, 12)
    other = np.arange(6, dtype="<i8").reshape(2, 3)
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"other": ("I64", other), NAME: (dtype, stored)}, header_pad)
    ids = np.array([49, 0, 7, 7, 31], np.int32)
    out = np.full((8, 12), np.nan, np.float32)
    with EmbeddingStore.open(path, NAME) as store:
        assert (store.num_rows, store.width, store.stored_dtype) == (50, 12, dtype)
        assert store.num_bytes == stored.nbytes
        store.gather(ids, out)
    np.testing.assert_array_equal(out[:5], values[ids])
    assert np.isnan(out[5:]).all(), "rows past the ids belong to the caller"


def test_bf16_widening_keeps_infinities_and_signed_zero(tmp_path: Path) -> None:
    bits = np.array([[0x7F80, 0xFF80, 0x8000, 0x0001, 0x3F80]], np.uint16)
    write_safetensors(tmp_path / "m.safetensors", {NAME: ("BF16", bits)})
    out = np.empty((1, 5), np.float32)
    with EmbeddingStore.open(tmp_path / "m.safetensors", NAME) as store:
        store.gather([0], out)
    expected = np.array([[np.inf, -np.inf, -0.0, 2.0**-133, 1.0]], np.float32)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_scale_is_one_float32_product_and_not_on_the_head(tmp_path: Path, dtype: str) -> None:
    stored, values = make_table(dtype, 20, 64)
    write_safetensors(tmp_path / "m.safetensors", {NAME: (dtype, stored)})
    out, head = np.empty((2, 20, 64), np.float32)
    with EmbeddingStore.open(tmp_path / "m.safetensors", NAME, scale=25.25) as store:
        store.gather(np.arange(20), out)
        store.gather_head(np.arange(20), head)
    np.testing.assert_array_equal(out, values * np.float32(25.25))
    np.testing.assert_array_equal(head, values)


def test_gemma_scale_rounds_to_the_dtype_of_the_computation() -> None:
    # 640 columns: the figures transformers' Gemma3TextScaledWordEmbedding multiplies with.
    assert gemma_embedding_scale(640) == np.float32(640**0.5)
    assert gemma_embedding_scale(640, "BF16") == 25.25
    assert gemma_embedding_scale(640, "F16") == 25.296875
    # 3072 is the known case of Gemma 2: 55.4256 becomes 55.5.
    assert gemma_embedding_scale(3072, "BF16") == 55.5


def test_padded_rows_are_no_tokens(tmp_path: Path) -> None:
    stored, values = make_table("F32", 16, 4)
    write_safetensors(tmp_path / "m.safetensors", {NAME: ("F32", stored)})
    out = np.zeros((2, 4), np.float32)
    with EmbeddingStore.open(tmp_path / "m.safetensors", NAME, vocab_size=13) as store:
        assert (store.vocab_size, store.num_rows, store.num_pad_rows) == (13, 16, 3)
        store.gather([12], out)
        np.testing.assert_array_equal(out[0], values[12])
        with pytest.raises(IndexError, match="13 is outside the vocabulary of 13"):
            store.gather([12, 13], out)
    with pytest.raises(EmbeddingFileError, match="vocab_size 17"):
        EmbeddingStore.open(tmp_path / "m.safetensors", NAME, vocab_size=17)


def test_a_bad_id_or_buffer_writes_nothing(tmp_path: Path) -> None:
    stored, _ = make_table("F32", 8, 4)
    write_safetensors(tmp_path / "m.safetensors", {NAME: ("F32", stored)})
    out = np.zeros((4, 4), np.float32)
    with EmbeddingStore.open(tmp_path / "m.safetensors", NAME) as store:
        with pytest.raises(IndexError, match="-1"):
            store.gather([0, -1], out)
        with pytest.raises(ValueError, match="float32"):
            store.gather([0], out.astype(np.float64))
        with pytest.raises(ValueError, match="at least 5 rows"):
            store.gather([0] * 5, out)
        with pytest.raises(ValueError, match="contiguous"):
            store.gather([0], np.zeros((4, 4), np.float32).T)
        with pytest.raises(ValueError, match="integers"):
            store.gather(np.array([0.0]), out)
    assert not out.any()


def test_the_table_is_found_in_whichever_shard_holds_it(tmp_path: Path) -> None:
    stored, values = make_table("BF16", 9, 4)
    write_safetensors(tmp_path / "model-1.safetensors", {"lm_head.weight": ("BF16", stored[::-1])})
    write_safetensors(tmp_path / "model-2.safetensors", {NAME: ("BF16", stored)})
    out = np.empty((1, 4), np.float32)
    for paths in (tmp_path, sorted(tmp_path.glob("*.safetensors"))):
        with EmbeddingStore.open(paths, NAME) as store:
            store.gather([8], out)
        np.testing.assert_array_equal(out[0], values[8])
    with pytest.raises(EmbeddingFileError, match=r"is it model\.embed_tokens\.weight"):
        EmbeddingStore.open(tmp_path, "embed_tokens.weight")


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    stored, _ = make_table("F32", 8, 4)
    write_safetensors(path, {NAME: ("F32", stored)})
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(EmbeddingFileError, match="cut short"):
        EmbeddingStore.open(path, NAME)
    path.write_bytes(b"\x00" * 4)
    with pytest.raises(EmbeddingFileError, match=r"m\.safetensors: not a safetensors file"):
        EmbeddingStore.open(path, NAME)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(EmbeddingFileError, match="not a safetensors file"):
        EmbeddingStore.open(path, NAME)
    write_safetensors(path, {NAME: ("I8", np.zeros((2, 2), np.int8))})
    with pytest.raises(EmbeddingFileError, match="is I8"):
        EmbeddingStore.open(path, NAME)
    write_safetensors(path, {NAME: ("F32", np.zeros(4, np.float32))})
    with pytest.raises(EmbeddingFileError, match="shape"):
        EmbeddingStore.open(path, NAME)
    (tmp_path / "empty").mkdir()
    with pytest.raises(EmbeddingFileError, match=r"no \*\.safetensors"):
        EmbeddingStore.open(tmp_path / "empty", NAME)


def test_close_is_idempotent_and_later_use_raises(tmp_path: Path) -> None:
    stored, values = make_table("F32", 8, 4)
    write_safetensors(tmp_path / "m.safetensors", {NAME: ("F32", stored)})
    store = EmbeddingStore.open(tmp_path / "m.safetensors", NAME)
    view = store.rows
    assert not view.flags.writeable
    store.close()
    store.close()
    np.testing.assert_array_equal(view, values)  # a view that was handed out stays valid
    with pytest.raises(RuntimeError, match="closed"):
        store.gather([0], np.empty((1, 4), np.float32))


def test_it_reads_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    values = np.random.default_rng(1).standard_normal((6, 3)).astype(np.float16)
    library.save_file({NAME: values}, str(tmp_path / "m.safetensors"), {"format": "pt"})
    out = np.empty((6, 3), np.float32)
    with EmbeddingStore.open(tmp_path / "m.safetensors", NAME) as store:
        store.gather(range(6), out)
    np.testing.assert_array_equal(out, values.astype(np.float32))


@given(ids=st.lists(st.integers(0, 30), max_size=40), dtype=st.sampled_from(["F32", "F16", "BF16"]))
def test_any_ids_in_any_order(ids: list[int], dtype: Any) -> None:
    stored, values = make_table(dtype, 31, 5)
    store = EmbeddingStore(stored, dtype)
    out = np.empty((40, 5), np.float32)
    store.gather(ids, out)
    np.testing.assert_array_equal(out[: len(ids)], values[np.array(ids, np.int64)])
