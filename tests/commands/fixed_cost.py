"""What steps cost in tests of tuning."""

from __future__ import annotations

from server.engine.step_times import CostTable, row_grid


class _FixedCost(CostTable):
    def observe(self, num_rows: int, keys: float, seconds: float) -> None:
        """Nothing is noted."""


def fixed_cost(first_s: float = 100.0, per_row: float = 1.0) -> CostTable:
    """A table that no step corrects: a fake model's steps take no time. Steps of 100 seconds and
    more: what Python costs beside them does not show."""
    rows = row_grid(512)
    return _FixedCost(rows, [first_s + per_row * (r - 1) for r in rows])
