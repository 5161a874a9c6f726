"""The prior: its head against numpy, its file, and what `auto` drafts from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from drafters.array_file import ArrayFileError, FingerprintError
from drafters.arrays import Float32
from drafters.auto.cells import NUM_BUCKETS, PRIOR, prior_cell
from drafters.auto.drafter import AutoDrafter
from drafters.auto.prior import (
    FORMAT,
    MOST_FOLLOWED,
    NO_HIDDEN,
    WIDTH,
    Prior,
    PriorView,
)
from drafters.auto.retrieval import Seen
from drafters.auto.tree_builder import Workspace
from drafters.auto.trust import Trust
from tests.drafters.trees import opened, paths
from tests.fakes.fake_drafters import random_prior

VOCAB, HIDDEN, OUTPUTS = 50, 24, 32


def make_prior(*, sure: float = 1.0) -> Prior:
    return random_prior(VOCAB, HIDDEN, num_outputs=OUTPUTS, sure=sure)


def reference(prior: Prior, hidden: Float32, ids: list[int]) -> Float32:
    """What the head says behind ids, the first of which was drawn from `hidden`."""

    def settled(sums: Float32) -> Float32:
        return sums / (1 + np.abs(sums))

    def product(name: str, values: Float32, unit: np.float32) -> Float32:
        sums = getattr(prior, name).astype(np.int32) @ np.rint(values / unit).astype(np.int32)
        rows: Float32 = np.float32(sums) * (getattr(prior, f"{name}_scale") * unit)
        return rows + getattr(prior, f"{name}_bias")

    embed, unit = prior.embed * prior.embed_scale[:, None], np.float32(1 / 127)
    state = settled(product("project", hidden, np.abs(hidden).max() / 4095) + embed[ids[0]])
    for token in ids[1:]:
        state = settled(product("recur", state, unit) + embed[token])
    logits = product("output", state, unit)
    chances: Float32 = np.exp(logits - logits.max())
    return chances / chances.sum()


def hidden_of(seed: int) -> Float32:
    return np.random.default_rng(seed).standard_normal(HIDDEN).astype(np.float32)


def view_of(drafter: AutoDrafter) -> PriorView:
    assert drafter.prior is not None
    return PriorView(*drafter.prior.view(drafter.of_prior, NO_HIDDEN, 0, NO_HIDDEN))


def said(prior: Prior, hidden: Float32 | None, ids: list[int]) -> Float32:
    """What `auto` is told by the head behind ids, the first of which was drawn from `hidden`; zeros
    where it does not ask."""
    drafter = AutoDrafter(model_prior=prior, num_likely=0)
    session = opened(drafter, [0])
    if hidden is not None:
        session.note_state(hidden)
    session.extend(ids[:1])
    session.extend(ids[1:])
    view = view_of(drafter)
    asked = view.turn[0]  # as the ids were learned from
    assert np.isfinite(session.propose(1, 1).survival).all()
    if view.turn[0] == asked:
        return np.zeros(prior.ids.shape[0], np.float32)
    return view.scores[asked] / view.totals[asked]


@pytest.mark.parametrize("num", range(1, MOST_FOLLOWED + 2))
def test_the_head_is_that_of_numpy(num: int) -> None:
    prior, hidden = make_prior(sure=8.0), hidden_of(1)
    ids = (1 + np.random.default_rng(num).permutation(VOCAB - 1)[:num]).tolist()
    np.testing.assert_allclose(said(prior, hidden, ids), reference(prior, hidden, ids), atol=2e-3)


@pytest.mark.parametrize(
    ("hidden", "ids"),
    [
        (None, [1]),
        (hidden_of(1), list(range(1, MOST_FOLLOWED + 3))),
        (hidden_of(1), [VOCAB]),  # an id of an adapter's own
        (hidden_of(1), [1, VOCAB, 2]),
    ],
)
def test_where_nothing_is_known_it_says_nothing(hidden: Float32 | None, ids: list[int]) -> None:
    assert not said(make_prior(), hidden, ids).any()


def test_numbers_that_are_not_finite_do_no_harm() -> None:
    found = said(make_prior(), np.full(HIDDEN, np.nan, np.float32), [1])
    assert np.isfinite(found).all() and found.any()


def test_a_file_gives_back_what_was_saved_to_its_model(tmp_path: Path) -> None:
    prior, file = make_prior(), tmp_path / "a.prior"
    prior.save(file, fingerprint="model")
    again = Prior.load(file, fingerprint="model")
    for one, other in zip(prior, again, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)
    with pytest.raises(FingerprintError):
        Prior.load(file, fingerprint="another")
    whole = bytearray(file.read_bytes())
    whole[-100] ^= 1
    file.write_bytes(whole)
    with pytest.raises(ArrayFileError, match="checksum"):
        Prior.load(file, fingerprint="model")


@pytest.mark.parametrize(
    "change",
    [
        {"ids": np.full(OUTPUTS, VOCAB, np.int32)},
        {"ids": np.zeros(OUTPUTS - 16, np.int32)},
        {"ids": np.zeros(OUTPUTS, np.int64)},
        {"embed": np.zeros((VOCAB, WIDTH - 1), np.uint8)},
        {"embed_scale": np.zeros(VOCAB - 1, np.float32)},
        {"recur_scale": np.full(WIDTH, np.nan, np.float32)},
        {"output_bias": np.full(OUTPUTS, 1e30, np.float32)},
        {"project": None},
        {"ids": np.zeros(8, np.int32), "output": np.zeros((8, WIDTH), np.uint8),
         "output_scale": np.zeros(8, np.float32), "output_bias": np.zeros(8, np.float32)},
    ],
)  # fmt: skip
def test_arrays_that_cannot_be_are_refused(
    tmp_path: Path, change: dict[str, np.ndarray | None]
) -> None:
    prior, file = make_prior(), tmp_path / "a.prior"
    arrays: dict[str, np.ndarray] = prior._asdict()
    arrays |= {n: a.view(np.uint8) for n, a in arrays.items() if a.dtype == np.int8}
    kept = {n: change.get(n, a) for n, a in arrays.items()}
    FORMAT.write(file, {n: a for n, a in kept.items() if a is not None}, fingerprint="model")
    with pytest.raises(ArrayFileError):
        Prior.load(file, fingerprint="model")


def test_auto_drafts_what_the_head_says() -> None:
    """Of a text that repeats nothing only the prior knows what may come, at each depth."""
    prior, hidden = make_prior(sure=40.0), hidden_of(5)
    with_it = AutoDrafter(model_prior=prior, num_likely=0).open([1, 2, 3])
    without = AutoDrafter(num_likely=0).open([1, 2, 3])
    for session in (with_it, without):
        session.settle()
        session.note_state(hidden)
        session.extend([7])
    assert with_it.wants_state and not without.wants_state
    assert len(without.propose(8, 8)) == 0
    tree = with_it.propose(8, 3)
    assert len(tree) > 0 and set(tree.source.tolist()) == {PRIOR}
    assert int(tree.depths().max()) > 1
    for *before, token in paths(tree):
        chances = reference(prior, hidden, [7, *before])
        assert chances[prior.ids.tolist().index(token)] > 0.009


def test_a_state_goes_with_its_token() -> None:
    """Behind ids that came without a state the head goes on; taken back, they are forgotten."""
    drafter = AutoDrafter(model_prior=make_prior(sure=40.0), num_likely=0)
    session = opened(drafter, [1, 2, 3])
    session.note_state(hidden_of(2))
    session.extend([7])
    before = session.propose(8, 2).token_ids.tolist()
    mark = session.checkpoint()
    session.extend([8, 9])
    assert len(session.propose(8, 2)) > 0
    session.rollback(mark)
    assert session.propose(8, 2).token_ids.tolist() == before
    session.rollback(0)
    assert len(session.propose(8, 2)) == 0
    session.extend([8])
    assert len(session.propose(8, 2)) == 0, "the state is not this token's"
    session.rollback(0)
    session.extend([7] + [4, 5] * MOST_FOLLOWED)
    assert PRIOR not in session.propose(8, 2).source.tolist()


def test_what_was_scored_is_not_scored_again_and_is_nobody_else_s() -> None:
    """Sessions take turns with one drafter, which has more states than it keeps: each proposes what
    it would alone. Of the states that a tree was grown from none is scored as its nodes come."""
    prior = make_prior(sure=40.0)
    shared = AutoDrafter(model_prior=prior, num_likely=0, learn=False)
    pairs = [
        [opened(one, [1, 2, 3]) for one in (shared, AutoDrafter(
            model_prior=prior, num_likely=0, learn=False
        ))]
        for _ in range(12)
    ]  # fmt: skip
    for step in range(4):
        for i, pair in enumerate(pairs):
            for session in pair:
                session.note_state(hidden_of(12 * step + i))
                session.extend([7 + i])
        for in_turn, alone in pairs:
            one, other = in_turn.propose(8, 4), alone.propose(8, 4)
            assert len(one) and one.token_ids.tolist() == other.token_ids.tolist()
            np.testing.assert_array_equal(one.survival, other.survival)
    workspace, counts = Workspace(), []
    for _ in range(2):  # of two scopes, the same text
        learns = AutoDrafter(model_prior=prior, num_likely=0, seen=Seen(workspace=workspace))
        session = opened(learns, [1, 2, 3])
        session.note_state(hidden_of(1))
        session.extend([7])
        turn = view_of(learns).turn
        before, path = turn[0], paths(session.propose(8, 4))[0]
        asked = turn[0]
        session.extend(path[:1])
        assert asked > before and turn[0] == asked
        counts.append(asked - before)
    assert counts[0] == counts[1] and turn[0] == sum(counts)


def test_depth_0_is_off_and_states_of_another_model_are_refused() -> None:
    assert AutoDrafter(model_prior=make_prior(), prior_depth=0).prior is None
    session = AutoDrafter(model_prior=make_prior()).open([1])
    with pytest.raises(ValueError, match="not of a model"):
        session.note_state(np.zeros(HIDDEN + 1, np.float32))


@pytest.mark.parametrize("situation", [0, 2, 4])
def test_a_new_scope_trusts_it_as_far_as_it_is_sure(situation: int) -> None:
    weights = Trust().weights
    for level in range(PRIOR * NUM_BUCKETS + 1, PRIOR * NUM_BUCKETS + 2 + MOST_FOLLOWED):
        unsure, usual, sure = (
            weights[prior_cell(level, top, situation)] for top in (0.05, 0.3, 0.9)
        )
        assert 0.1 < unsure < usual < sure < 0.9


def test_trust_in_it_is_learned() -> None:
    """What the head says and never comes is drafted no more."""
    prior = make_prior(sure=40.0)
    drafter = AutoDrafter(model_prior=prior, num_likely=0)
    rng = np.random.default_rng(0)
    sizes = []
    for i in range(40):
        session = opened(drafter, [1, 2, 3])
        for step in range(16):
            session.note_state(hidden_of(1000 * i + step))
            session.extend([int(rng.integers(40, VOCAB))])
            session.settle()
            tree = session.propose(8, 2)
            sizes.append(float(tree.survival[tree.source == PRIOR].sum()))
        session.close()
    assert sum(sizes[-64:]) < 0.5 * sum(sizes[:64])
