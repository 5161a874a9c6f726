"""Blocks of languages: facts about writing systems, and tokens that are parts of characters."""

# ruff: noqa: RUF001

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from vocab_store.errors import VocabStoreError
from vocab_store.unicode_blocks import blocks_of_languages, scripts_of_language


@pytest.mark.parametrize(
    ("tag", "scripts"),
    [
        ("en", {"Latn"}),
        ("it-IT", {"Latn"}),
        ("zh", {"Hani"}),
        ("zh-Hant-TW", {"Hani"}),
        ("ja", {"Hani", "Hira", "Kana"}),
        ("ko", {"Hani", "Hang"}),
        ("ru", {"Cyrl"}),
        ("sr", {"Cyrl"}),
        ("sr-Latn", {"Latn"}),
        ("hi", {"Deva"}),
    ],
)
def test_scripts(tag: str, scripts: set[str]) -> None:
    assert scripts_of_language(tag) == scripts


@pytest.mark.parametrize(
    ("languages", "inside", "outside"),
    [
        (["en"], "naïve résumé, “quoted” — 5 € × 3 ≤ 20 ✓ 😀", "жαא中あ한ก"),
        (["it"], "perché così è già lì", "жα中あ"),
        (["zh"], "今天，天气。「很好」！（……）—— 100% A", "あア한ж"),
        (["ja"], "今日は、カタカナ。ｶﾅ", "한жก"),
        (["ko"], "안녕하세요 漢字", "あжก"),
        (["ru"], "Привет — 5 €", "α中あ"),
        (["el"], "Καλημέρα", "ж中"),
        (["en", "zh"], "naïve 今天，", "жあ"),
    ],
)
def test_texts_of_a_language_lie_inside(languages: list[str], inside: str, outside: str) -> None:
    blocks = blocks_of_languages(languages)
    assert [c for c in inside if not blocks.meets_range(ord(c), ord(c))] == []
    assert [c for c in outside if blocks.meets_range(ord(c), ord(c))] == []


def test_blocks_can_be_added() -> None:
    assert blocks_of_languages(["en"]).has_token("😀".encode())
    assert not blocks_of_languages(["en"]).has_token("α".encode())
    with_greek = blocks_of_languages(["en"], extra_blocks=["Greek and Coptic"])
    assert with_greek.has_token("α".encode())


def test_unknown_languages_and_blocks_are_refused() -> None:
    with pytest.raises(VocabStoreError, match="not a BCP 47"):
        blocks_of_languages(["not a tag!"])
    with pytest.raises(VocabStoreError, match="no script"):
        blocks_of_languages(["und"])
    with pytest.raises(VocabStoreError, match="no script is known for the language tag 'qqq'"):
        blocks_of_languages(["en", "qqq"])
    with pytest.raises(VocabStoreError, match="no block 'Greek'"):
        blocks_of_languages(["en"], extra_blocks=["Greek"])


def test_parts_of_characters() -> None:
    """The pieces a byte-level BPE makes of 中 (E4 B8 AD), é (C3 A9) and 😀 (F0 9F 98 80)."""
    english, chinese = blocks_of_languages(["en"]), blocks_of_languages(["zh"])
    assert chinese.has_token(b"\xe4\xb8") and not english.has_token(b"\xe4\xb8")
    assert chinese.has_token(b" \xe4") and not english.has_token(b" \xd0")
    assert english.has_token(b"\xc3") and english.has_token(b"caf\xc3")
    assert english.has_token(b"\xf0\x9f") and not english.has_token(b"\xf0\xa0")
    # A continuation alone says nothing; what follows it does.
    assert english.has_token(b"\xad") and english.has_token(b"\xb8\xad x")
    assert not english.has_token(b"\xad" + "中".encode())
    # Bytes that are never UTF-8.
    assert all(map(english.has_token, (b"\xff", b"x\xc0", b"\xe0\x80", b"")))


_CHARACTERS = st.one_of(st.sampled_from("aé中，あж€😀"), st.integers(32, 0xD7FF).map(chr))


@settings(max_examples=examples(300))
@given(
    text=st.text(_CHARACTERS, min_size=1, max_size=4),
    cut=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_a_piece_of_an_allowed_text_is_allowed(text: str, cut: tuple[int, int]) -> None:
    """The filter is sound: if every character lies inside, so does each slice of the bytes."""
    data, blocks = text.encode(), blocks_of_languages(["en", "zh"])
    if all(blocks.meets_range(ord(char), ord(char)) for char in text):
        assert blocks.has_token(data[cut[0] : len(data) - cut[1]])
    else:
        assert not blocks.has_token(data)
