"""`grammys`: the bigram table and the mixed strategy, worked by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from drafters.array_file import FingerprintError
from drafters.published.grammys import BigramTable, GrammysDrafter
from tests.drafters.trees import paths
from tests.fakes.fake_drafters import check_tree

# After t the target says t + 1 most often, then t + 2 (modulo 6).
TABLE = BigramTable(
    "model-a",
    np.asarray([[(t + 1) % 6, (t + 2) % 6] for t in range(6)], np.int32),
    np.asarray([[0.6, 0.3]] * 6, np.float32),
)


def test_bigram_starts_a_draft_at_each_likely_token_and_goes_on_greedily() -> None:
    drafter = GrammysDrafter(table=TABLE, strategy="bigram", num_drafts=2, length=3)
    tree = drafter.open([0, 9, 0]).propose(16, 16)  # not from the text
    check_tree(tree)
    assert set(paths(tree)) == {(1,), (1, 2), (1, 2, 3), (2,), (2, 3), (2, 3, 4)}
    assert tree.token_ids[:3].tolist() == [1, 2, 3]  # the likelier draft first
    shares = np.asarray(
        [0.6, 0.6, 0.6, 0.3, 0.6, 0.6], np.float32
    )  # of the table, the first one of its row
    assert tree.cell.tolist() == drafter.calibration.cells(0, [0, 1, 2] * 2, shares).tolist()


def test_mixed_drafts_from_the_text_first_and_fills_with_bigrams() -> None:
    drafter = GrammysDrafter(table=TABLE, strategy="mixed", num_drafts=2, length=2)
    tree = drafter.open([3, 5, 5, 0, 4, 1, 0]).propose(16, 16)
    assert set(paths(tree)) == {(4,), (4, 1), (1,), (1, 2)}
    at = tree.token_ids.tolist().index(4)  # the only token that followed
    assert (tree.source[at], tree.cell[at]) == (1, drafter.calibration.cells(1, 0, 1.0))


def test_what_followed_most_often_comes_first() -> None:
    for text, query, length, drafted in (
        ([0, 4, 0, 4, 0, 2, 0], 1, 1, [4]),
        ([0, 4, 0, 2, 0], 1, 1, [2]),  # of equal ones the newest
        ([1, 2, 7, 3, 2, 8, 1, 2], 2, 1, [7]),  # behind both tokens
        ([5, 6, 5], 1, 3, [6, 5]),  # up to the text's end
    ):
        drafter = GrammysDrafter(strategy="mixed", num_drafts=1, query=query, length=length)
        assert drafter.open(text).propose(4, 4).token_ids.tolist() == drafted


def test_the_budget_goes_to_the_likeliest_nodes() -> None:
    drafter = GrammysDrafter(table=TABLE, strategy="bigram", num_drafts=2, length=3)
    tree = drafter.open([0]).propose(3, 16)
    check_tree(tree)
    assert len(tree) == 3
    assert max(drafter.open([0]).propose(16, 2).depths()) == 2


def test_a_token_outside_the_table_has_no_bigram() -> None:
    drafter = GrammysDrafter(table=TABLE, strategy="bigram")
    assert len(drafter.open([17]).propose(8, 8)) == 0


def test_tables_are_files_of_one_model(tmp_path: Path) -> None:
    path = tmp_path / "bigrams"
    TABLE.save(path)
    assert np.array_equal(BigramTable.load(path, fingerprint="model-a").next_ids, TABLE.next_ids)
    with pytest.raises(FingerprintError):
        BigramTable.load(path, fingerprint="model-b")


def test_a_table_holds_ids_of_its_vocabulary_alone() -> None:
    with pytest.raises(ValueError, match="ids of the vocabulary"):
        BigramTable("m", np.asarray([[5]], np.int32), np.asarray([[1.0]], np.float32))
