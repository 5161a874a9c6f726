"""What a step will compute: rows of sequences (Plan), and where a Batch's results lie (Built).

Plain records, each written once: the scheduler writes a Plan, build.py a Built.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from server.engine.batch import Batch, Int32
from server.engine.sequence import Sequence


@dataclass(slots=True)
class Scheduled:
    """Rows [start, start + num_rows) of one sequence; `draws` when the last one is drawn from."""

    sequence: Sequence
    start: int
    num_rows: int
    draws: bool


@dataclass(slots=True)
class Plan:
    """One step: its rows, the block copies that must come before, and who failed for space."""

    items: list[Scheduled] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    failed: list[Sequence] = field(default_factory=list)
    num_rows: int = 0
    num_prefill_rows: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Where one item's results lie: its root draw, its scores [score, score + num_scores), and
    right after them the scores of its num_labels label ids."""

    draw: int
    score: int
    num_scores: int
    num_labels: int = 0


@dataclass(slots=True)
class Built:
    """A Batch, a Span per item, and the KV entries its rows attend to. columns: of a step of plain
    decode rows alone, int32 [4, rows]: their ids, positions, slots and prefix_len."""

    batch: Batch
    spans: list[Span]
    num_keys: int
    columns: Int32 | None = None
