"""StepFigures: what the last step took, and who learns from it: cost table, Gain, and `exact`."""

from __future__ import annotations

import time

from server.engine.build import Built
from server.engine.figures import StepTotals
from server.engine.gain import REST, Gain
from server.engine.plan import Rows
from server.engine.results import Results
from server.engine.slices import SliceBook
from server.engine.step_times import CostTable
from server.engine.trees import Trees


class StepFigures:
    """Notes every step that succeeded. cost: the budget's table, if there is one."""

    def __init__(self, cost: CostTable | None, gain: Gain, slices: SliceBook) -> None:
        self._cost = cost
        self._gain = gain
        self._slices = slices
        self.totals = StepTotals()
        self._num_alike = 0

    def observe(
        self, rows: Rows, trees: Trees, built: Built, results: Results, began: float
    ) -> None:
        """A step that began at `began` (time.perf_counter) is over."""
        model_s = results.model_s
        step_s = time.perf_counter() - began
        host_s = max(0.0, step_s - model_s)
        batch = built.batch
        num_rows = rows.num_rows + batch.num_draft_rows
        totals = self.totals
        totals.rows[0] += rows.num_prefill_rows
        totals.rows[1] += num_rows - rows.num_prefill_rows - batch.num_draft_rows
        totals.rows[2] += batch.num_draft_rows
        totals.ceiling = trees.ceiling
        totals.observe(step_s, model_s, trees.seconds, host_s, num_rows)
        is_alike = rows.is_plain and not (rows.num_prefill_rows or trees.num_asked)
        self._num_alike += is_alike
        if is_alike and self._num_alike % REST:
            self._gain.host.observe_mix(has_prompt=False)
            return
        if self._cost is not None:
            num_draws = batch.draw_rows.shape[0] if batch.num_likely else 0
            likely_s = self._cost.likely_s * num_draws
            self._cost.observe(num_rows, built.num_keys, model_s - likely_s)
        host, num_decode = self._gain.host, rows.num_rows - rows.num_prefill_rows
        if num_decode:
            host.observe_mix(has_prompt=rows.num_prefill_rows > 0)
        if not rows.num_prefill_rows:
            host.observe(num_decode, trees.num_asked, host_s)
        head_s, has_prompt = results.drawn.head_s, rows.num_prefill_rows > 0
        if head_s > 0.0:
            self._slices.observe(batch, results.drawn.model_s - head_s, head_s, has_prompt)
