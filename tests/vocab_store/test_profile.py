"""Algorithm 1 against its definition; profile files; the forms other programs read."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example as given_example
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from loadtest.quality import close_under_merges, prune_tokenizer, static_pruning_ids
from server import token_bytes
from tests.api.tiny_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer
from tests.profiles import examples
from tests.vocab_store.test_slice import Texts
from vocab_store.errors import VocabStoreError
from vocab_store.profile import (
    Example,
    ProfileSettings,
    VocabProfile,
    build_profile,
    corpus_hash,
    document_frequencies,
    measure_coverage,
    tolerance_filter,
)
from vocab_store.slice import RequiredIds, VocabSlice, export_vocab_map

V = 30
REQUIRED = RequiredIds.of(V, eos_ids=[0], byte_ids=[1])


def example(inputs: list[int], outputs: list[int]) -> Example:
    return Example(np.asarray(inputs, np.int32), np.asarray(outputs, np.int32))


documents = st.lists(
    st.builds(
        example,
        st.lists(st.integers(0, V - 1), max_size=8),
        st.lists(st.integers(0, V - 1), max_size=8),
    ),
    min_size=1,
    max_size=12,
)


LETTERS = Texts(
    [chr(i - 20 + 0x3B1 if i >= 20 else i + ord("a")).encode() for i in range(V)], [0], b"letters"
)
"""Id i is the i-th letter from U+03B1 on for i >= 20 (Greek), else from "a"."""


@settings(max_examples=examples(300))
@given(documents, st.booleans())
def test_document_frequencies_are_counted_per_document(
    examples: list[Example], input_aware: bool
) -> None:
    df = document_frequencies(examples, V, input_aware=input_aware)
    for token_id in range(V):
        assert df[token_id] == sum(
            token_id in e.output_ids and not (input_aware and token_id in e.input_ids)
            for e in examples
        )


@settings(max_examples=examples(300))
@given(documents, st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))
def test_tolerance_drops_the_longest_prefix_within_tau_m(
    examples: list[Example], tau: float
) -> None:
    df = document_frequencies(examples, V)
    ids = np.flatnonzero(df)
    kept = tolerance_filter(ids, df, tau, len(examples))
    ascending = sorted(ids.tolist(), key=lambda i: (df[i], -i))
    dropped, total = 0, 0
    while dropped < len(ascending) and total + df[ascending[dropped]] <= tau * len(examples):
        total += int(df[ascending[dropped]])
        dropped += 1
    assert kept.tolist() == sorted(ascending[dropped:])
    # The promise: at most tau M documents lose a token.
    lost = set(ascending[:dropped])
    losers = sum(bool(lost & (set(e.output_ids) - set(e.input_ids))) for e in examples)
    assert losers <= tau * len(examples)


@settings(max_examples=examples(300))
@given(documents)
def test_at_tolerance_zero_nothing_of_the_corpus_is_missed(examples: list[Example]) -> None:
    made = build_profile(
        examples, LETTERS, REQUIRED, ProfileSettings(tolerance=0.0), heldout=examples
    )
    assert made.miss_rate in (0.0, None)
    assert measure_coverage(made.slice, examples).num_missed == 0
    assert set(REQUIRED.ids.tolist()) <= set(made.slice.ids.tolist())


@settings(max_examples=examples(300))
@given(documents, documents)
def test_the_fill_order_is_outside_t_and_its_gains_are_the_held_out_misses(
    examples: list[Example], heldout: list[Example]
) -> None:
    made = build_profile(examples, LETTERS, REQUIRED, ProfileSettings(), heldout=heldout)
    written = Counter(i for one in examples for ids in one for i in ids.tolist())
    outside = set(range(V)) - set(made.slice.ids.tolist())
    assert made.fill_ids.tolist() == sorted(outside, key=lambda i: (-written[i], i))
    assert made.filled(V).num_ids == V, "the whole order fills the vocabulary"
    total = sum(len(e.output_ids) for e in heldout)
    if total:
        assert float(made.fill_gains.sum()) == pytest.approx(made.miss_rate or 0.0, abs=1e-6)
        # Sums over the first 2^k - 1 ids are as measured.
        for num in (1, 3, 7, 15):
            if num < len(made.fill_ids):
                left = measure_coverage(made.filled(num), heldout).miss_rate
                assert (made.miss_rate or 0.0) - made.fill_gains[:num].sum() == pytest.approx(
                    left, abs=1e-6
                )
                assert np.ptp(made.fill_gains[num : 2 * num + 1]) == 0, "single ones are estimates"


@pytest.mark.parametrize(
    ("chosen", "left"),
    [
        # 2 lies in its own input; 21 is Greek; 3 and 21 have df 1 of 4 documents.
        (ProfileSettings(input_aware=False, tolerance=0.0), (5, 5, 5, 5)),
        (ProfileSettings(tolerance=0.0), (5, 4, 4, 4)),
        (ProfileSettings(languages=("en",), tolerance=0.0), (5, 4, 3, 3)),
        (ProfileSettings(languages=("en",), tolerance=0.25), (5, 4, 3, 2)),
    ],
)
def test_each_filter_is_switchable_and_reported(
    chosen: ProfileSettings, left: tuple[int, ...]
) -> None:
    documents = [([2, 3], [2, 4, 21]), ([2], [4, 5]), ([9], [4, 5, 3]), ([9], [4])]
    given = [example(*one) for one in documents]
    made = build_profile(given, LETTERS, REQUIRED, chosen, head_row_bytes=10)
    with pytest.raises(VocabStoreError, match="at least one document"):
        build_profile([], LETTERS, REQUIRED, chosen)
    told = made.manifest["report"]
    filters = ("unfiltered", "input_aware", "language", "tolerance")
    assert tuple(told[f"num_{name}"] for name in filters) == left
    assert told["num_ids"] == made.slice.num_ids
    assert told["head_bytes_saved"] == (V - made.slice.num_ids) * 10


def test_coverage_counts_tokens_documents_and_dynamic_rows() -> None:
    made = VocabSlice.make([0, 1, 4], REQUIRED)
    heldout = [example([2, 2, 3], [4, 2, 7, 7]), example([4], [4, 0])]
    both = measure_coverage(made, heldout)
    assert (both.num_tokens, both.num_missed, both.missed) == (6, 2, ((7, 2),))
    assert (both.num_documents, both.num_documents_missed) == (2, 1)
    assert both.mean_dynamic == 1.0, "2 and 3 in the first, none in the second"
    assert both.recall == pytest.approx(4 / 6) and both.document_miss_rate == 0.5
    static_only = measure_coverage(made, heldout, dynamic=False)
    assert static_only.missed == ((7, 2), (2, 1))
    assert measure_coverage(made, [example([], [9, 8])]).missed == ((8, 1), (9, 1))
    many = [example([], [8, 8, *range(9, 25)])]
    told = build_profile(heldout, LETTERS, REQUIRED, ProfileSettings(), heldout=many).manifest
    worst = told["report"]["worst_missed"]
    assert worst[0] == [8, "i", 2]
    assert [i for i, *_ in worst] == list(range(8, 18)), "the ten most frequent"
    assert static_pruning_ids(heldout, REQUIRED).ids.tolist() == [0, 1, 2, 3, 4, 7]


@pytest.fixture
def made(tmp_path: Path) -> VocabProfile:
    examples = [example([2, 3], [4, 5]), example([2], [4, 25])]
    return build_profile(
        examples, LETTERS, REQUIRED, ProfileSettings(), heldout=[example([3], [8, 4])]
    )


def test_a_profile_file_is_read_back_whole(made: VocabProfile, tmp_path: Path) -> None:
    path = tmp_path / "task.vocab"
    made.save(path)
    made.save(path)  # replaces
    assert [p.name for p in tmp_path.iterdir()] == ["task.vocab"], "no temporary file is left"
    back = VocabProfile.load(path, fingerprint=b"letters", required=REQUIRED)
    assert back.slice.ids.tolist() == made.slice.ids.tolist() and back.version == made.version
    for other in (
        replace(made, fill_ids=made.fill_ids[::-1]),  # the T of `exact` is another one
        replace(made, fill_gains=made.fill_gains + 1),  # likewise
        replace(made, manifest=made.manifest | {"fingerprint": "00"}),
    ):
        assert other.version != made.version
    assert back.slice.vocab_size == V
    np.testing.assert_array_equal(back.fill_ids, made.fill_ids)
    np.testing.assert_array_equal(back.fill_gains, made.fill_gains)
    assert back.manifest["report"] == made.manifest["report"]
    assert back.miss_rate == 0.5 and not back.slice.ids.flags.writeable
    assert back.manifest["report"]["worst_missed"] == [[8, "i", 1]]


def test_a_profile_that_is_damaged_or_of_another_tokenizer_is_refused(
    made: VocabProfile, tmp_path: Path
) -> None:
    path = tmp_path / "task.vocab"
    made.save(path)
    with pytest.raises(VocabStoreError, match=r"task\.vocab: made for another tokenizer"):
        VocabProfile.load(path, fingerprint=b"other")
    with pytest.raises(VocabStoreError, match="lacks EOS token ids 17"):
        VocabProfile.load(path, required=RequiredIds.of(V, eos_ids=[17]))
    with pytest.raises(VocabStoreError, match="for 30 tokens, the model has 31"):
        VocabProfile.load(path, required=RequiredIds.of(V + 1, eos_ids=[0]))
    whole = path.read_bytes()
    for other in (
        replace(made, slice=VocabSlice(np.array([0, 4, 1], np.int32), V)),
        replace(made, slice=VocabSlice(np.array([0, 1, V], np.int32), V)),
        replace(made, fill_ids=made.fill_ids + V),
        replace(made, fill_gains=made.fill_gains * np.nan),
    ):
        other.save(path)
        with pytest.raises(VocabStoreError, match=r"task\.vocab: .* within the vocabulary"):
            VocabProfile.load(path)
    damaged = [b"", whole[:-4]]
    for at in (0, 8, 16, len(whole) - 1):  # what the file is, its version, the manifest, an array
        damaged.append(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(VocabStoreError, match=r"task\.vocab"):
            VocabProfile.load(path)


def test_the_corpus_hash_sees_borders_between_documents() -> None:
    one = corpus_hash([example([1, 2], [3])])
    assert one == corpus_hash([example([1, 2], [3])])
    assert one != corpus_hash([example([1], [2, 3])])


def test_edge_llm_maps_are_exchanged(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    made = VocabSlice.make([0, 1, 9, 12], REQUIRED)
    export_vocab_map(made, tmp_path)
    tensors = load_file(str(tmp_path / "vocab_map.safetensors"))
    assert list(tensors) == ["vocab_map"] and tensors["vocab_map"].dtype == np.int32
    assert tensors["vocab_map"].tolist() == [0, 1, 9, 12]
    info = json.loads((tmp_path / "reduced_vocab.json").read_text())
    assert info == {"vocab_size": V, "reduced_vocab_size": 4}


@settings(max_examples=examples(300))
@given(st.text("abcdefghijklmnopqrstuvwxyz TFPS.,", max_size=40), st.booleans())
@given_example("The capital of France is Paris.", True)  # whose words are merged
def test_a_pruned_tokenizer_writes_kept_texts_as_before(text: str, byte_level: bool) -> None:
    """What breaks it: other texts get more ids, but are still the same text."""
    tokenizer = byte_level_tokenizer() if byte_level else sentencepiece_tokenizer()
    required = RequiredIds.from_tokens(token_bytes.build(tokenizer), [0])
    ids = tokenizer.encode(text).ids
    spec = tokenizer.to_str()
    closed = close_under_merges(spec, np.asarray([*required.ids.tolist(), *ids], np.int32))
    keep = VocabSlice.make(closed, required)
    cut_text, old_ids = prune_tokenizer(spec, keep)
    cut = Tokenizer.from_str(cut_text)
    assert cut.get_vocab_size() == keep.num_ids < tokenizer.get_vocab_size()
    assert old_ids[cut.encode(text).ids].tolist() == ids
    other = tokenizer.encode("the quick brown fox").ids
    more = cut.encode("the quick brown fox").ids
    assert (len(more) > len(other)) == (not set(other) <= set(closed))
    assert cut.decode(more) == tokenizer.decode(other)
