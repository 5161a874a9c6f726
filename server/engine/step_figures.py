"""StepFigures: what the last step took, and who learns from it: the cost table, the draft budget,
and what `exact` costs."""

from __future__ import annotations

import time
from typing import Any

from server.engine.budget import CostTable, DraftBudget
from server.engine.figures import StepTotals
from server.engine.results import Results
from server.engine.slices import SliceBook
from server.engine.step_drafts import Step

SAMPLED = 4
"""Of steps of plain choices without drafts, one in so many is learned from: hundreds a second are
alike."""

_NAMES = (
    "step_s", "model_s", "propose_s", "host_s", "num_rows", "num_prefill_rows", "num_draft_rows",
    "draft_budget",
)  # fmt: skip
"""Of EngineStats."""


class StepFigures:
    """Notes every step that succeeded. cost: the budget's table, if there is one."""

    def __init__(self, cost: CostTable | None, budget: DraftBudget, slices: SliceBook) -> None:
        self._cost = cost
        self._budget = budget
        self._slices = slices
        self._last: tuple[float, ...] = ()
        self.totals = StepTotals()
        self._num_alike = 0

    @property
    def figures(self) -> dict[str, Any]:
        """Those of the last step, as EngineStats has them."""
        return dict(zip(_NAMES, self._last, strict=False))

    def observe(self, step: Step, began: float, results: Results) -> None:
        """A step that began at `began` (time.perf_counter) is over."""
        model_s = results.model_s
        step_s = time.perf_counter() - began
        host_s = max(0.0, step_s - model_s)
        rows, batch, drafts = step.rows, step.batch, step.drafts
        num_rows = rows.num_rows + batch.num_draft_rows
        self._last = (
            step_s, model_s, drafts.seconds, host_s, num_rows, rows.num_prefill_rows,
            batch.num_draft_rows, drafts.ceiling,
        )  # fmt: skip
        totals = self.totals
        totals.rows[0] += rows.num_prefill_rows
        totals.rows[1] += num_rows - rows.num_prefill_rows - batch.num_draft_rows
        totals.rows[2] += batch.num_draft_rows
        totals.ceiling = drafts.ceiling
        totals.observe(step_s, model_s, drafts.seconds, host_s, num_rows)
        is_alike = rows.is_plain and not (rows.num_prefill_rows or drafts.has_asked)
        self._num_alike += is_alike
        if is_alike and self._num_alike % SAMPLED:
            self._budget.host.observe_mix(has_prompt=False)
            return
        if self._cost is not None:
            likely_s = self._cost.likely_s * batch.num_draws if batch.num_likely else 0.0
            of_step = (num_rows, step.built.num_keys, model_s - likely_s)
            self._cost.observe(*of_step)
            watch = self._cost.watch
            if watch is not None and len(rows.sequences) == 1 and not rows.num_prefill_rows:
                watch.observe(*of_step)
        self._budget.observe_host(host_s)
        self._budget.host.observe_step(rows, drafts.has_asked, host_s)
        head_s, has_prompt = results.drawn.head_s, rows.num_prefill_rows > 0
        self._slices.observe(batch, results.drawn.model_s - head_s, head_s, has_prompt)
