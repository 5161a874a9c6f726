"""Text from ids: equal to the tokenizer's decode, never half a character, never part of a stop."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.api.answer import CharCounter, TextStream
from tests.api.live import TABLE, TOKENIZER, as_bytes
from tests.profiles import examples


def chunks(ids: list[int], cuts: Sequence[int]) -> list[list[int]]:
    bounds = [0, *sorted({c % (len(ids) + 1) for c in cuts}), len(ids)]
    return [ids[a:b] for a, b in pairwise(bounds)]


@settings(max_examples=examples(500))
@given(st.text(max_size=40), st.booleans(), st.lists(st.integers(0, 200), max_size=8))
def test_streamed_text_is_the_decoded_text(text: str, in_bytes: bool, cuts: list[int]) -> None:
    """So no piece has half a character, which could not be taken back."""
    ids = as_bytes(text) if in_bytes else TOKENIZER.encode(text).ids
    stream = TextStream(TABLE)
    pieces = [stream.push(part) for part in chunks(ids, cuts)]
    pieces.append(stream.finish([], "length", None))
    assert "".join(pieces) == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_a_cut_off_character_becomes_a_replacement_character() -> None:
    stream = TextStream(TABLE)
    assert stream.push(as_bytes("a€")[:-1]) == "a"
    assert stream.finish([], "length", None) == "�"


def engine_stop(text: bytes, stops: list[bytes]) -> tuple[int, bytes] | None:
    """(end, stop) of the first byte at which a stop ends, the longest where several do."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            return end, max(ending, key=len)
    return None


@settings(max_examples=examples(500))
@given(
    st.text("abc€", max_size=24),
    st.lists(st.text("abc€", min_size=1, max_size=4), min_size=1, max_size=4, unique=True),
    st.booleans(),
)
@example("aabaab", ["aabaaa", "c"], False)
@example("a\n\nb\n\nc:", ["\n\nc:"], False)
def test_nothing_that_may_be_a_stop_string_is_shown(
    text: str, stops: list[str], include: bool
) -> None:
    encoded = [s.encode() for s in stops]
    data = text.encode()
    found = engine_stop(data, encoded)
    ids = as_bytes(text)
    stream = TextStream(TABLE, stop=encoded, include_stop=include)
    shown = ""
    end = len(ids) if found is None else found[0] - 1
    for i, token_id in enumerate(ids[:end]):
        shown += stream.push([token_id])
        seen = data[: i + 1]
        held = max(k for k in range(4 * 4) for s in encoded if k < len(s) and seen.endswith(s[:k]))
        whole = codecs.getincrementaldecoder("utf-8")().decode(seen[: len(seen) - held])
        assert shown == whole  # neither more nor less than what is safe
    if found is None:
        assert shown + stream.finish([], "length", None) == text
    else:
        last = stream.finish([ids[end]], "stop", found[1])
        kept = data[: found[0]] if include else data[: found[0] - len(found[1])]
        assert shown + last == kept.decode()


def test_a_match_that_the_engine_ignored_is_shown() -> None:
    """Before min_tokens the engine does not stop: the text goes out, the later match cuts."""
    stream = TextStream(TABLE, stop=[b"ab"])
    shown = stream.push(as_bytes("ab")) + stream.push(as_bytes("xa"))
    assert shown == "abx"
    assert stream.finish(as_bytes("b"), "stop", b"ab") == ""


@pytest.mark.parametrize("include", [False, True])
def test_the_id_that_ends_a_choice_has_text_only_if_asked(include: bool) -> None:
    end = TOKENIZER.token_to_id("<|end|>")
    assert end is not None
    stream = TextStream(TABLE, include_stop=include, skip_special=False)
    text = stream.push(as_bytes("ok"))
    text += stream.finish([end], "stop", None)
    assert text == ("ok<|end|>" if include else "ok")


@settings(max_examples=examples(500))
@given(st.text(max_size=20))
def test_offsets_point_at_the_tokens(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    counter = CharCounter()
    for token_id in ids:
        data = TABLE.bytes_of(token_id)
        offset = counter.push(data)
        try:
            assert text[offset:].startswith(data.decode())
        except UnicodeDecodeError:
            assert offset <= len(text)
    assert counter.num_chars == len(text)
