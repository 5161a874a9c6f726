"""What several writers learned is merged to the same, in whatever order and however often."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.array_file import ArrayFileError, FingerprintError
from drafters.auto.trust import Trust
from drafters.calibration import Calibration, CalibrationError
from drafters.learned import LearnedOutputs
from drafters.shared_counts import added, bounded, is_empty, pack, since, unpack
from drafters.shared_outputs import (
    SharedFile,
    SharedOutputs,
    load_shared,
    merge,
    save_shared,
    segment_of,
)
from tests.profiles import examples

_LENGTHS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=0, max_size=5
)  # of prompts and outputs
_SEGMENTS = st.lists(st.tuples(st.integers(1, 20), _LENGTHS), min_size=1, max_size=6)


def _segments(drawn: list[tuple[int, list[tuple[int, int]]]]) -> list[SharedOutputs]:
    return [
        segment_of(
            [(np.zeros(p, np.int32), np.full(o, i % 3, np.int32)) for p, o in lengths], written, i
        )
        for i, (written, lengths) in enumerate(drawn)
    ]


def _told(outputs: SharedOutputs) -> tuple[object, ...]:
    examples = [(place, p.tolist(), o.tolist()) for place, (p, o) in outputs.examples.items()]
    return sorted(examples), outputs.floor


@settings(max_examples=examples(300))
@given(
    drawn=_SEGMENTS,
    seed=st.integers(0, 1000),
    max_tokens=st.integers(1, 60),
    oldest=st.integers(0, 12),
)
def test_the_order_of_merging_does_not_matter(
    drawn: list[tuple[int, list[tuple[int, int]]]], seed: int, max_tokens: int, oldest: int
) -> None:
    segments = _segments(drawn)
    whole = merge(segments, max_tokens=max_tokens, oldest_ns=oldest)
    chance = Random(seed)
    left = [*segments, *chance.sample(segments, chance.randrange(len(segments) + 1))]  # some twice
    chance.shuffle(left)
    while len(left) > 1:  # any tree of merges, of any number of parts
        some = [left.pop() for _ in range(min(len(left), 1 + chance.randrange(3)))]
        left.insert(0, merge(some, max_tokens=max_tokens, oldest_ns=oldest))
    assert _told(merge(left, max_tokens=max_tokens, oldest_ns=oldest)) == _told(whole)
    assert whole.num_tokens <= max_tokens
    num_prompt = sum(prompt.shape[0] for prompt, _ in whole.examples.values())
    assert num_prompt <= LearnedOutputs.PROMPT_SHARE * max_tokens
    assert all(place > whole.floor and place[0] >= oldest for place in whole.examples)
    held = [(p.tobytes(), o.tobytes()) for p, o in whole.examples.values()]
    assert len(held) == len(set(held)), "what came again is held once"


def test_the_newest_stay() -> None:
    parts = [
        segment_of([(np.zeros(2, np.int32), np.full(4, token, np.int32))], written, 1)
        for written, token in ((1, 1), (2, 2), (3, 3), (4, 3))  # the last one came again
    ]
    merged = merge(parts, max_tokens=9)
    assert [int(output[0]) for _, output in merged.oldest_first()] == [2, 3]


def test_what_is_older_than_one_that_did_not_fit_stays_given_up() -> None:
    small, large, new = (
        segment_of([(np.zeros(0, np.int32), np.full(num, num, np.int32))], written, 1)
        for written, num in ((1, 1), (2, 9), (3, 2))
    )
    whole = merge([small, large, new], max_tokens=5)
    assert [output.tolist() for _, output in whole.oldest_first()] == [[2, 2]]
    parts = merge([large], max_tokens=5), merge([small, new], max_tokens=5)
    assert _told(merge(parts, max_tokens=5)) == _told(whole)
    long = segment_of([(np.zeros(4 * 5 + 1, np.int32), np.ones(1, np.int32))], 4, 1)
    assert not merge([small, long], max_tokens=5).examples, "nor one with too long a prompt"


def test_a_file_holds_it_and_a_server_of_its_own_can_read_it(tmp_path: Path) -> None:
    outputs = segment_of(
        [(np.arange(3, dtype=np.int32), np.arange(i, dtype=np.int32)) for i in (1, 4)], 7, 9
    )
    counts = {("auto", "c"): {"evidence": np.asarray([[0.0, 3.0, 0.0], [0.0, 1.5, 0.0]])}}
    path = tmp_path / "segment"
    save_shared(path, SharedFile(outputs, counts, {"corpus": "x"}), fingerprint="f", scope="s")
    read = load_shared(path, fingerprint="f", scope="s")
    assert _told(read.outputs) == _told(outputs) and read.meta["corpus"] == "x"
    assert np.array_equal(read.counts["auto", "c"]["evidence"], counts["auto", "c"]["evidence"])
    held = LearnedOutputs(100)
    held.restore(path, fingerprint="f", scope="s")
    assert [output.tolist() for _, output in held.examples()] == [[0], [0, 1, 2, 3]]
    with pytest.raises(FingerprintError):
        load_shared(path, fingerprint="g", scope="s")
    with pytest.raises(ArrayFileError, match="another task"):
        load_shared(path, fingerprint="f", scope="t")


def test_a_torn_file_is_refused_or_whole(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    outputs = segment_of([(np.arange(9, dtype=np.int32), np.arange(5, dtype=np.int32))], 1, 1)
    save_shared(path, SharedFile(outputs, {}, {}), fingerprint="f", scope="s")
    data = path.read_bytes()
    for cut in (*range(0, len(data), 5), len(data)):
        path.write_bytes(data[:cut])
        try:  # what is cut off may be padding
            read = load_shared(path, fingerprint="f", scope="s")
        except ArrayFileError:
            assert cut < len(data)
        else:
            assert _told(read.outputs) == _told(outputs), cut


def test_counts_are_told_taken_and_added() -> None:
    trust, other = Trust(), Trust()
    trust.evidence[:, 5] = 10.0, 8.0
    trust.update()
    before = trust.counts()
    trust.evidence[0, 5] += 4.0
    new = since(trust.counts(), before)
    assert new["evidence"][0, 5] == 4.0 and not new["outcomes"].any()
    other.set_counts(added([before, new]))
    assert before["evidence"][:, 5].tolist() == [10.0, 8.0], "what is added up stays as it was"
    other_shape = {"offers": np.ones((2, 3))}, {"offers": np.ones((2, 4))}
    assert added(other_shape)["offers"].shape == (2, 3)
    trust.update()
    assert np.array_equal(other.weights, trust.weights)
    assert is_empty(since(before, trust.counts()))  # faded counts are none
    with pytest.raises(CalibrationError):
        other.set_counts({"evidence": -before["evidence"], "outcomes": before["outcomes"]})

    table, fresh = Calibration(["a", "b"]), Calibration(["a", "b"])
    table.offered[3] += 6.0
    table.accepted[3] += 5.0
    assert not fresh.counts()["offers"].any()
    fresh.set_counts(table.counts())
    assert np.allclose(fresh.offered, table.offered) and np.allclose(fresh.accepted, table.accepted)
    with pytest.raises(CalibrationError):
        fresh.set_counts({"offers": np.zeros((2, 3))})
    unpacked = unpack(pack(trust.counts()))
    assert all(np.array_equal(unpacked[name], values) for name, values in trust.counts().items())
    most = bounded({"offers": np.asarray([[400.0, 1.0], [100.0, 1.0]])}, 40.0)["offers"]
    assert most.tolist() == [[40.0, 1.0], [10.0, 1.0]]
