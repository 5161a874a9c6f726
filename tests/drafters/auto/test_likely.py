"""The model's own logits as a source of `auto`: what is kept, for whom, and what it is worth."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from drafters.auto.cells import LOGITS, NUM_CELLS, NUM_SOURCES, SOURCES
from drafters.auto.drafter import AutoDrafter, AutoSession
from drafters.auto.likely import MAX_SLOTS, NUM_LIKELY, LikelyTable, find_context, longer_key
from drafters.auto.retrieval import Seen
from drafters.auto.trust import Trust
from drafters.calibration import CalibrationError
from drafters.replay import Recording, replay
from drafters.tree import DraftTree
from tests.drafters.trees import opened
from tests.fakes.fake_drafters import tree_of

Rows = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


def rows(*each: dict[int, float]) -> Rows:
    """Likeliest ids and chances, a dict a row."""
    ids = np.full((len(each), NUM_LIKELY), -1, np.int32)
    chances = np.zeros((len(each), NUM_LIKELY), np.float32)
    for i, row in enumerate(each):
        for j, (token, chance) in enumerate(sorted(row.items(), key=lambda pair: -pair[1])):
            ids[i, j], chances[i, j] = token, chance
    return ids, chances


def note(session: AutoSession, tree: DraftTree, told: Rows, emitted: Sequence[int]) -> None:
    """One step of an engine."""
    session.note_likely(tree.token_ids.tolist(), tree.parents.tolist(), *told)
    session.feedback(tree, [])
    session.extend(emitted)


def from_logits(tree: DraftTree) -> dict[int, float]:
    """First tokens that the logits drafted, and their chances."""
    return {
        int(token): float(chance)
        for token, parent, source, chance in zip(
            tree.token_ids, tree.parents, tree.source, tree.survival, strict=True
        )
        if parent < 0 and SOURCES[source] == "logits"
    }


def held(table: LikelyTable, *newest: int) -> dict[int, float]:
    """id -> share of the rows behind a context, newest token first."""
    with np.errstate(over="ignore"):  # a hash, as Python runs it
        key = functools.reduce(longer_key, newest, 0)
        slot = find_context(table.keys, key)
    if slot < 0:
        return {}
    total = float(table.sums[slot, NUM_LIKELY])
    pairs = zip(table.ids[slot].tolist(), table.sums[slot].tolist(), strict=False)
    return {token: value / total for token, value in pairs if value > 0}


def test_what_a_rejected_node_s_row_said_is_drafted_where_its_token_comes() -> None:
    session = opened(AutoDrafter(), [1, 2, 3])
    tree = tree_of([10, 11, 20], [-1, 0, -1], [0.5, 0.3, 0.2])
    told = rows({30: 0.9}, {12: 0.8}, {13: 0.8}, {21: 0.7, 22: 0.2})
    note(session, tree, told, [30])  # nothing was accepted
    note(session, DraftTree.empty(), rows({20: 0.6}), [20])
    assert list(from_logits(session.propose(8, 1)))[:2] == [21, 22]
    note(session, DraftTree.empty(), rows({10: 0.6}), [10, 11])
    assert next(iter(from_logits(session.propose(8, 1)))) == 13  # behind 10 11, not behind 10


def test_what_the_last_row_held_likely_may_come_one_later() -> None:
    trust = Trust(np.full(NUM_CELLS, 0.5))
    session = opened(AutoDrafter(trust=trust, learn=False), [1, 2, 3])
    note(session, DraftTree.empty(), rows({7: 0.5, 8: 0.3}), [7])
    assert list(from_logits(session.propose(8, 1))) == [8]
    session.extend([9])  # a step without rows: what the one before it said is past
    assert not from_logits(session.propose(8, 1))
    note(session, DraftTree.empty(), rows({7: 0.5, 8: 0.3}), [7])
    session.rollback(1)
    assert 8 not in from_logits(session.propose(8, 1))


def test_a_row_is_no_evidence_for_its_own_token() -> None:
    """A model that is sure of tokens that nothing foretells must not make the logits trusted."""
    rng = random.Random(3)
    drafter = AutoDrafter(seen=Seen())
    for _ in range(40):
        session = opened(drafter, [1, 2, 3])
        for _ in range(25):
            token = rng.randrange(1, 60)
            note(session, DraftTree.empty(), rows({token: 1.0}), [token])
        session.close()
    drafter.trust.update()
    asked, answered = drafter.trust.evidence.reshape(2, NUM_SOURCES, -1)[:, LOGITS].sum(axis=1)
    assert asked > 300 and answered < 0.15 * asked


def note_row(table: LikelyTable, before: Sequence[int], row: dict[int, float]) -> None:
    """A step without nodes, behind these tokens."""
    session = AutoDrafter(seen=Seen(likely=table), learn=False).open(before)
    note(session, DraftTree.empty(), rows(row), [1])
    session.close()


def test_a_context_forgets_and_the_table_is_bounded() -> None:
    table = LikelyTable(max_slots=1 << 10)
    for _ in range(20):
        note_row(table, [5], {1: 0.9})
    assert held(table, 5)[1] == pytest.approx(0.9, abs=0.01)
    for _ in range(20):
        note_row(table, [5], {2: 0.8})
    assert held(table, 5)[2] > 4 * held(table, 5)[1]
    rng = random.Random(1)
    for turn in range(1200):  # one context among thousands that come once
        note_row(table, [rng.randrange(100, 9000) for _ in range(3)], {3: 0.5})
        if turn % 20 == 0:
            note_row(table, [5], {2: 0.8})
    assert held(table, 5)[2] == pytest.approx(0.8, abs=0.05)
    assert table.keys.shape[0] == 1 << 10 < MAX_SLOTS
    assert np.isfinite(table.sums).all()


def test_a_growing_table_keeps_what_it_holds() -> None:
    table = LikelyTable()
    for token in range(2000):
        note_row(table, [token], {token + 1: 0.5})
    assert table.keys.shape[0] > 2000
    kept = [held(table, token).get(token + 1) for token in range(2000)]
    assert sum(share is not None for share in kept) > 1950


def _recordings(seed: int, num: int) -> list[Recording]:
    """Outputs of a random chain in which every token has one likely and two possible followers."""
    chain = random.Random(1)
    after = {token: [chain.randrange(1, 400) for _ in range(3)] for token in range(400)}
    rng = random.Random(seed)
    found = []
    for _ in range(num):
        output, ids, chances, token = [], [], [], rng.randrange(400)
        prompt = [token]
        for _ in range(40):
            ids.append(after[token])
            chances.append([0.7, 0.2, 0.1])
            token = rng.choices(after[token], [0.7, 0.2, 0.1])[0]
            output.append(token)
        found.append(Recording(prompt, output, ids, chances))
    return found


def test_requests_of_one_scope_draft_from_each_other_s_rows_and_no_others_do() -> None:
    told = _recordings(2, 30)
    off = replay(AutoDrafter(num_likely=0), told, budget=8)
    shared = replay(AutoDrafter(seen=Seen()), told, budget=8)
    alone = replay(AutoDrafter(), told, budget=8)
    assert "logits" not in off.by_source
    assert shared.by_source["logits"][1] > 100
    assert shared.decode_tokens_per_step > 1.3 * off.decode_tokens_per_step
    assert alone.decode_tokens_per_step < 1.1 * off.decode_tokens_per_step


def test_a_calibration_of_the_sources_before_goes_on() -> None:
    trust = Trust()
    trust.evidence[:, 0] = 100.0, 40.0
    before = trust.evidence.reshape(2, NUM_SOURCES, -1)[:, :LOGITS].reshape(2, -1)
    outcomes = trust.outcomes.reshape(3, NUM_SOURCES, -1)[:, :LOGITS].reshape(3, -1)
    other = Trust()
    other.restore_arrays(before, outcomes)
    assert np.array_equal(other.evidence, trust.evidence)
    with pytest.raises(CalibrationError):
        other.restore_arrays(before[:, :-1], outcomes)
