"""Calibration: how often a drafted token is accepted, given that its parent was.

One table per task and drafter: (source x match-length bucket x predicted share) -> offered and
accepted. A node's chance is read from it as (accepted + 1) / (offered + 2) and survival is the
product along the path. Old evidence decays, so that the table follows a task that changes. It is
saved atomically and survives a restart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drafters.arrays import Float64, Int32
from drafters.atomic_file import replacing
from drafters.json_text import parsed
from drafters.shared_counts import Counts
from drafters.tree import DraftTree

KIND = "drafter calibration"
VERSION = 1
SHARE_EDGES = np.asarray(
    [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995]
)
SHARE_CENTRES = np.concatenate([[0.005], (SHARE_EDGES[1:] + SHARE_EDGES[:-1]) / 2, [0.998]])
LENGTH_EDGES = np.asarray([1, 2, 3, 4, 5, 7, 10, 16, 32])


class CalibrationError(ValueError):
    """A saved calibration cannot be read, or belongs to other sources."""


class Calibration:
    """Conditional acceptance by (source, match length, predicted share). One writer.

    sources: names of the drafter's sources, in DraftTree.source order.
    prior: how many offers the starting value counts for, which is the predicted share itself.
    memory: a cell is halved once it holds more offers than this.
    """

    def __init__(
        self, sources: Sequence[str], *, prior: float = 8.0, memory: float = 2000.0
    ) -> None:
        if prior < 0 or memory <= 0:
            raise ValueError("prior must be >= 0 and memory > 0")
        self.sources = tuple(sources)
        self.prior = prior
        self.memory = memory
        shape = (len(self.sources), LENGTH_EDGES.shape[0] + 1, SHARE_CENTRES.shape[0])
        self.shape = shape
        # What it begins with.
        self._accepted: Float64 = np.broadcast_to(prior * SHARE_CENTRES, shape).reshape(-1)
        self.offered: Float64 = np.full(self._accepted.shape, prior)
        self.accepted: Float64 = self._accepted.copy()
        self._chances: Float64 = (self.accepted + 1.0) / (self.offered + 2.0)

    def cells(
        self, source: npt.ArrayLike, match_length: npt.ArrayLike, share: npt.ArrayLike
    ) -> Int32:
        """Cell of each node: int32, broadcast from source index, match length and share in 0..1."""
        length = np.searchsorted(LENGTH_EDGES, np.asarray(match_length), side="right")
        share_bucket = np.searchsorted(SHARE_EDGES, np.asarray(share), side="right")
        _, num_lengths, num_shares = self.shape
        cells = (np.asarray(source) * num_lengths + length) * num_shares + share_bucket
        return np.asarray(cells, np.int32)

    def survival(self, parents: Int32, cells: Int32) -> npt.NDArray[np.float32]:
        """float32 [num_nodes]: products of chances along the paths; parents come first."""
        chances = self._chances[cells].tolist()
        out: list[float] = []
        for parent, chance in zip(parents.tolist(), chances, strict=True):
            out.append(chance if parent < 0 else out[parent] * chance)
        return np.asarray(out, np.float32)

    def tree(
        self,
        token_ids: Int32,
        parents: Int32,
        source: npt.ArrayLike,
        match_length: npt.ArrayLike,
        share: npt.ArrayLike,
    ) -> DraftTree:
        """The tree of these nodes with survival and cells as said here. The last three are as of
        `cells`, one of them at least of each node."""
        cells = self.cells(source, match_length, share)
        sources = np.empty(token_ids.shape, np.uint8)
        sources[:] = source
        return DraftTree(token_ids, parents, self.survival(parents, cells), sources, cells)

    def record(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Count an outcome: every node whose parent was accepted was offered.

        Trees without cells are ignored. `accepted`: node indexes on the accepted path.
        """
        if tree.cell.shape[0] == 0 or len(tree) == 0:
            return
        path = set(accepted)
        reached = path | {-1}
        for node, (parent, cell) in enumerate(
            zip(tree.parents.tolist(), tree.cell.tolist(), strict=True)
        ):
            if parent in reached:
                self.offered[cell] += 1.0
                if node in path:
                    self.accepted[cell] += 1.0
                if self.offered[cell] > self.memory:
                    self.offered[cell] *= 0.5
                    self.accepted[cell] *= 0.5
                self._chances[cell] = (self.accepted[cell] + 1.0) / (self.offered[cell] + 2.0)

    def table(self) -> list[dict[str, Any]]:
        """The cells that hold evidence, as plain values for people to read; the most offered
        first."""
        _, num_lengths, num_shares = self.shape
        rows = []
        for cell in np.flatnonzero(self.offered > self.prior + 0.5).tolist():
            source, rest = divmod(cell, num_lengths * num_shares)
            length, share = divmod(rest, num_shares)
            rows.append(
                {
                    "source": self.sources[source],
                    "min_match_length": 0 if length == 0 else int(LENGTH_EDGES[length - 1]),
                    "predicted_share": round(float(SHARE_CENTRES[share]), 4),
                    "offered": round(float(self.offered[cell] - self.prior), 1),
                    "accepted": round(
                        max(0.0, float(self.accepted[cell] - self._accepted[cell])), 1
                    ),
                    "chance": round(float(self._chances[cell]), 4),
                }
            )
        return sorted(rows, key=lambda row: -row["offered"])

    def counts(self) -> Counts:
        """For drafters.shared_counts: "offers", rows offered and accepted, without the prior."""
        offers = np.stack([self.offered - self.prior, self.accepted - self._accepted])
        return {"offers": np.maximum(0.0, offers)}

    def set_counts(self, counts: Counts) -> None:
        """Take counts in place of what there is. Raises CalibrationError for another shape or
        impossible counts, KeyError when they are missing."""
        offers = counts["offers"]
        if offers.shape != (2, self.offered.shape[0]) or not (offers >= 0).all():
            raise CalibrationError("the counts have another shape or are impossible")
        offered = self.prior + offers[0]
        self._take(offered, np.minimum(self._accepted + offers[1], offered), "what was counted")

    def _take(self, offered: Float64, accepted: Float64, of: str) -> None:
        """Write these counts. Raises CalibrationError that says whose they are."""
        good = offered.shape == accepted.shape == self.offered.shape
        good = good and bool(np.isfinite(offered).all() and (accepted >= 0).all())
        if not good or (accepted > offered + 1e-9).any():
            raise CalibrationError(f"{of} holds a table of another shape or impossible counts")
        self.offered[:], self.accepted[:] = offered, accepted
        self._chances = (self.accepted + 1.0) / (self.offered + 2.0)

    def save(self, path: Path | str) -> None:
        """Write the table; see write_table."""
        body = {
            "sources": list(self.sources),
            "shape": list(self.shape),
            "prior": self.prior,
            "memory": self.memory,
            "offered": self.offered.tolist(),
            "accepted": self.accepted.tolist(),
        }
        write_table(path, KIND, VERSION, body)

    def restore(self, path: Path | str) -> None:
        """Replace the counts by those of a saved file. Raises CalibrationError for a damaged file
        or other sources."""
        names = ("shape", "prior", "offered", "accepted")
        sources, (shape, prior, offered, accepted) = read_table(path, KIND, VERSION, names)
        if sources != list(self.sources):
            raise CalibrationError(
                f"{path} is for the sources {str(sources)[:80]}, not {list(self.sources)}"
            )
        if (shape.tolist(), prior.tolist()) != (list(self.shape), self.prior):
            raise CalibrationError(f"{path} holds a table of another shape")
        self._take(offered, accepted, str(path))


def write_table(path: Path | str, kind: str, version: int, body: dict[str, Any]) -> None:
    """Write a drafter's counts atomically: a reader sees the old file or the new one, never a
    part. body: arrays by name, as lists, and what else is told."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(path) as out:
        out.write(json.dumps({"kind": kind, "version": version, **body}).encode())


def read_table(
    path: Path | str, kind: str, version: int, names: Sequence[str]
) -> tuple[list[Any], list[Float64]]:
    """The sources of what write_table wrote, and the arrays of these names. Raises CalibrationError
    for a file that cannot be read, or of another kind or version."""
    try:
        body = parsed(Path(path).read_text())
        if (body["kind"], body["version"]) == (kind, version):
            return list(body["sources"]), [np.asarray(body[name], np.float64) for name in names]
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise CalibrationError(f"{path} cannot be read: {str(error)[:100]}") from error
    raise CalibrationError(f"{path} is not a version {version} {kind}")
