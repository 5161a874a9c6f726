"""Calibration: (accepted + 1) / (offered + 2) of a child given its parent, decayed, kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from drafters.arrays import Int32
from drafters.calibration import Calibration, CalibrationError
from drafters.tree import DraftTree
from tests.fakes.fake_drafters import chain, check_tree


def tree(calibration: Calibration) -> DraftTree:
    """Root children 0 and 3; 1 and 2 below 0."""
    ids, parents = np.asarray([[5, 6, 7, 8], [-1, 0, 1, -1]], np.int32)
    return calibration.tree(ids, parents, 0, [1, 2, 3, 1], [0.6, 0.6, 0.6, 0.15])


def chances(calibration: Calibration, cells: Int32) -> list[float]:
    """Of children of the root."""
    found: list[float] = calibration.survival(np.full(cells.shape, -1), cells).tolist()
    return found


def test_a_child_is_offered_only_when_its_parent_was_accepted() -> None:
    calibration = Calibration(["a"], prior=0.0)
    first = tree(calibration)
    calibration.record(first, [0])  # 0 accepted; 1 offered and refused; 2 never offered; 3 refused
    assert chances(calibration, first.cell) == pytest.approx([2 / 3, 1 / 3, 1 / 2, 1 / 3])
    calibration.record(first, [])  # 1 and 2 not offered
    assert chances(calibration, first.cell) == pytest.approx([1 / 2, 1 / 3, 1 / 2, 1 / 4])


def test_survival_is_the_product_along_the_path() -> None:
    calibration = Calibration(["a"], prior=0.0)
    first = tree(calibration)
    assert first.survival.tolist() == pytest.approx([0.5, 0.25, 0.125, 0.5])
    check_tree(first)


def test_the_prior_says_that_shares_are_right() -> None:
    calibration = Calibration(["a"], prior=1000.0)
    cells = calibration.cells(0, 2, np.asarray([0.05, 0.55, 0.97]))
    low, middle, high = chances(calibration, cells)
    assert low < middle < high
    assert middle == pytest.approx(0.55, abs=0.06)


def test_sources_lengths_and_shares_have_their_own_cells() -> None:
    calibration = Calibration(["a", "b"])
    cells = {
        int(calibration.cells(source, length, share))
        for source in (0, 1)
        for length in (0, 1, 2, 5, 50)
        for share in (0.0, 0.3, 0.99, 1.0)
    }
    assert len(cells) == 2 * 5 * 4
    assert calibration.cells(0, 1, 0.5) == calibration.cells(0, 1, 0.55), "an edge begins a cell"
    assert max(cells) < calibration.offered.shape[0]


def test_old_outcomes_fade() -> None:
    calibration = Calibration(["a"], prior=0.0, memory=50.0)
    ids, parents = np.asarray([[1], [-1]], np.int32)
    one = calibration.tree(ids, parents, 0, [1], 0.5)
    for _ in range(500):
        calibration.record(one, [0])
    for _ in range(60):
        calibration.record(one, [])
    assert chances(calibration, one.cell)[0] < 0.4  # 500 old successes would leave 0.89


def test_trees_without_cells_teach_nothing() -> None:
    calibration = Calibration(["a"])
    before = calibration.offered.copy()
    calibration.record(chain([1, 2]), [0])
    assert np.array_equal(calibration.offered, before)


def test_it_is_saved_atomically_and_restored(tmp_path: Path) -> None:
    calibration = Calibration(["a", "b"])
    first = tree(calibration)
    for _ in range(5):
        calibration.record(first, [0, 1])
    calibration.record(first, [])
    path = tmp_path / "x" / "calibration.json"
    calibration.save(path)
    loaded = Calibration(["a", "b"])
    offered = loaded.offered
    loaded.restore(path)
    assert loaded.offered is offered, "in place"
    assert loaded.table() == calibration.table()
    assert chances(loaded, first.cell) == chances(calibration, first.cell)
    assert [p.name for p in path.parent.iterdir()] == ["calibration.json"]
    rows = loaded.table()
    assert [(row["source"], row["offered"]) for row in rows] == [("a", n) for n in (6, 6, 5, 5)]
    assert [row["accepted"] for row in rows] == [0.0, 5.0, 5.0, 0.0]
    assert [row["min_match_length"] for row in rows] == [1, 1, 2, 3]
    with pytest.raises(CalibrationError, match="is for the sources"):
        Calibration(["a"]).restore(path)
    whole = path.read_text()
    fewer = whole.replace('"offered": [8.0,', '"offered": [0.01,')  # than were accepted
    for damage in ("{", "{}", whole.replace('"prior": 8.0', '"prior": -1'), fewer):
        assert damage != whole
        path.write_text(damage)
        with pytest.raises(CalibrationError):
            loaded.restore(path)
    with pytest.raises(CalibrationError):
        loaded.restore(tmp_path / "none")
