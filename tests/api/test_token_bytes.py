"""The id -> bytes table equals the tokenizer's own decode, and its file is safe to share."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from server import token_bytes
from server.errors import UnsupportedTokenizerError
from tests.api.tiny_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return byte_level_tokenizer() if request.param == "byte_level" else sentencepiece_tokenizer()


TEXTS = [
    "The capital of France is Paris.\n\nThe answer",
    "héllo wörld — «quotes», 日本語, 👩‍👩‍👧 and 🇫🇷",
    "  two leading spaces\tand\ttabs  ",
    "\x00\x01 control \x7f",
]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_a_text_are_the_tokenizers_decode(tokenizer: Tokenizer, text: str) -> None:
    table = token_bytes.build(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    joined = b"".join(table.prompt_bytes(ids, skip_special=False)).decode()
    assert joined == tokenizer.decode(ids, skip_special_tokens=False)


def test_random_ids_of_a_byte_level_tokenizer_decode_equally() -> None:
    tokenizer = byte_level_tokenizer()
    table = token_bytes.build(tokenizer)
    rng = random.Random(7)
    for _ in range(300):
        ids = [rng.randrange(table.vocab_size) for _ in range(rng.randrange(1, 12))]
        for skip in (False, True):
            joined = table.join(ids, skip_special=skip).decode(errors="replace")
            assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_continuation_keeps_its_leading_space() -> None:
    tokenizer = sentencepiece_tokenizer()
    table = token_bytes.build(tokenizer)
    ids = tokenizer.encode("the answer", add_special_tokens=False).ids
    assert table.strip_start == 1
    assert table.join(ids, skip_special=True) == b" the answer"
    assert b"".join(table.prompt_bytes(ids, skip_special=True)) == b"the answer"


def test_special_and_added_tokens() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("two words", normalized=False)])
    table = token_bytes.build(tokenizer)
    eos = tokenizer.token_to_id("<|end|>")
    added = tokenizer.token_to_id("two words")
    assert eos is not None and added is not None
    specials = table.special_ids.tolist()
    assert specials.count(eos) == 1 and added not in specials
    assert table.bytes_of(added) == b"two words"
    assert table.join([eos, added], skip_special=True) == b"two words"
    assert table.join([eos, added], skip_special=False) == b"<|end|>two words"


def test_ids_outside_the_table_have_no_bytes() -> None:
    tokenizer = byte_level_tokenizer()
    known = tokenizer.get_vocab_size()
    table = token_bytes.build(tokenizer, vocab_size=known + 64)
    assert table.vocab_size == known + 64
    assert [table.bytes_of(i) for i in (known, known + 63, known + 64, -1, 10**18)] == [b""] * 5


def test_the_file_is_the_table(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "cache" / "table.bin"
    built = token_bytes.build(tokenizer, vocab_size=tokenizer.get_vocab_size() + 3)
    token_bytes.save(built, path)
    mapped = token_bytes.open_table(path)
    assert mapped.offsets.dtype == np.int64 and mapped.blob.dtype == np.uint8
    assert np.array_equal(mapped.offsets, built.offsets)
    assert np.array_equal(mapped.blob, built.blob)
    assert np.array_equal(mapped.special_ids, built.special_ids)
    assert (mapped.strip_start, mapped.fingerprint) == (built.strip_start, built.fingerprint)
    assert [p.name for p in path.parent.iterdir()] == ["table.bin"]
    mapped.blob[0] ^= 1  # a page of this process's own
    assert np.array_equal(token_bytes.open_table(path).blob, built.blob)


@pytest.mark.parametrize("damage", ["empty", "cut", "magic", "version"])
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    path = tmp_path / "table.bin"
    token_bytes.save(token_bytes.build(tokenizer), path)
    good = path.read_bytes()
    bad = {
        "empty": b"x",
        "cut": good[:-1],
        "magic": b"X" + good[1:],
        "version": good[:8] + b"\xff" + good[9:],
    }[damage]
    path.write_bytes(bad)
    with pytest.raises(ValueError):
        token_bytes.open_table(path)


def test_other_decoders_are_refused() -> None:
    wordpiece = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}))
    wordpiece.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedTokenizerError):
        token_bytes.build(wordpiece)
    bare = Tokenizer(models.BPE({"a": 0}, []))
    bare.normalizer = normalizers.NFC()
    with pytest.raises(UnsupportedTokenizerError):
        token_bytes.build(bare)
