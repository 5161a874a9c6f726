"""VocabSlice: membership, order and pads."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from vocab_store.errors import VocabStoreError
from vocab_store.slice import RequiredIds, VocabSlice

V = 64
REQUIRED = RequiredIds.of(V, eos_ids=[3, 60], special_ids=[0, 3], byte_ids=[10, 11])
ids_in_v = st.lists(st.integers(0, V - 1), max_size=30)


@dataclass
class Texts:
    """A tokenizer as vocab_store sees it."""

    pieces: list[bytes]
    special: list[int] = field(default_factory=list)
    fingerprint: bytes = b"texts"

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @property
    def special_ids(self) -> npt.NDArray[np.int64]:
        return np.asarray(self.special, np.int64)

    def bytes_of(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def test_required_ids_of_a_tokenizer_are_eos_specials_and_one_byte_tokens() -> None:
    pieces = [b"<eos>", b"a", b"ab", b"\xe4", b"<pad>", b"", b"<end>", b"<unused7>", b"<unused7>s"]
    tokens = Texts(pieces, special=[0, 4, 7, 8])  # as Gemma marks what only reserves a number
    required = RequiredIds.from_tokens(tokens, [0, 6])
    kinds = {kind: ids.tolist() for kind, ids in required.kinds.items()}
    assert kinds == {"EOS": [0, 6], "special": [0, 4, 8], "byte": [1, 3]}
    assert required.ids.tolist() == [0, 1, 3, 4, 6, 8]
    assert 7 in RequiredIds.from_tokens(tokens, [7]).ids
    with pytest.raises(ValueError, match="at least one EOS"):
        RequiredIds.from_tokens(tokens, [])


@pytest.mark.parametrize(
    ("absent", "kind"), [([60], "EOS"), ([3, 60], "EOS"), ([0], "special"), ([11], "byte")]
)
def test_a_map_without_required_ids_is_refused_by_name(absent: list[int], kind: str) -> None:
    ids = sorted({*REQUIRED.ids.tolist(), 20} - set(absent))
    told = ", ".join(map(str, absent))
    with pytest.raises(VocabStoreError, match=f"lacks {kind} token ids {told}: a model"):
        VocabSlice.make(ids, REQUIRED)


@settings(max_examples=examples(300))
@given(ids_in_v, ids_in_v, ids_in_v, ids_in_v, ids_in_v)
def test_the_slice_of_a_request_is_the_sorted_union_of_what_it_names(
    static: list[int],
    prompt: list[int],
    bias: list[int],
    allowed: list[int],
    stop: list[int],
) -> None:
    task = VocabSlice.make([*REQUIRED.ids.tolist(), *static], REQUIRED)
    made = task.union(prompt, bias, allowed, stop)
    expected = {*REQUIRED.ids.tolist(), *static, *prompt, *bias, *allowed, *stop}
    assert made.ids.tolist() == sorted(expected)
    assert made.ids.dtype == np.int32 and not made.ids.flags.writeable
    # The order and repetition of what is named change nothing: equal requests, equal slices.
    again = task.union(prompt[::-1] * 2, [*stop, *bias], allowed)
    assert again.ids.tolist() == made.ids.tolist()


@settings(max_examples=examples(300))
@given(ids_in_v, ids_in_v)
def test_positions_and_ids_are_inverse(static: list[int], asked: list[int]) -> None:
    made = VocabSlice.make([*REQUIRED.ids.tolist(), *static], REQUIRED)
    positions = made.positions(asked)
    for token_id, position in zip(asked, positions.tolist(), strict=True):
        assert (position >= 0) == (token_id in made)
        if position >= 0:
            assert made.ids[position] == token_id
    inside = positions[positions >= 0]
    assert made.ids[inside].tolist() == [i for i in asked if i in made]
    assert made.positions(made.ids).tolist() == list(range(made.num_ids))


def test_ids_outside_the_vocabulary_and_pad_positions_are_refused() -> None:
    made = VocabSlice.make(REQUIRED.ids, REQUIRED)
    with pytest.raises(IndexError, match="64 is outside the vocabulary of 64"):
        made.union([1, V])
    with pytest.raises(IndexError, match="-1"):
        made.union([-1])
    with pytest.raises(ValueError, match="flat integers"):
        made.union(np.array([1.5]))
    assert made.positions([V + 5, -7]).tolist() == [-1, -1]


def test_a_union_with_nothing_new_is_the_same_object() -> None:
    """A request whose prompt lies in T shares T's ids: nothing is copied again per request."""
    made = VocabSlice.make(REQUIRED.ids, REQUIRED)
    assert made.union([3, 60], [10]) is made
    assert made.union([5]) is not made
