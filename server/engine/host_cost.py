"""What a step costs beside the model: the engine's own work on the host, fitted to real steps.

    seconds = step_s + draw_s * choices that draw + node_s * draft nodes

Measured with drafts and without, since a choice with a draft session has more done for it: what it
learns, the rows of its tree, the ids that were likely in them. What a drafter takes to propose is
left out: the forecast (forecast.py) measures that of each drafter. What it takes here is told
beside, because here each proposal follows a model step, which has filled the caches.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from server.types import Request, SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from server.engine.engine import Engine

_PROMPT = 48  # tokens of a prompt that are asked
_TOKENS = 24  # of an answer
_STREAMS = (1, 1, 8)  # requests at once, one batch after the other
_TASK = "warm-up"  # of requests whose drafts calibrate nothing (server.wiring.drafter.WARM_UP)


@dataclass(frozen=True, slots=True)
class HostCost:
    """Seconds. See the top of this file."""

    step_s: float = 0.0
    draw_s: float = 0.0
    node_s: float = 0.0

    def seconds(self, num_draws: int, num_nodes: int) -> float:
        """Of one step."""
        return self.step_s + self.draw_s * num_draws + self.node_s * num_nodes

    @staticmethod
    def fit(steps: Sequence[tuple[int, int, float]]) -> HostCost:
        """From (draws, nodes, seconds) of steps: least squares through the cheaper half, twice:
        whoever else uses the machine only adds to a step. Nothing is negative."""
        if not steps:
            return HostCost()
        table = np.asarray(steps, np.float64)
        columns = np.column_stack([np.ones(table.shape[0]), table[:, :2]])
        seconds = table[:, 2]
        kept = np.ones(seconds.shape[0], np.bool_)
        found = np.zeros(3)
        for _ in range(3):
            found = _not_negative(columns[kept], seconds[kept])
            left = seconds - columns @ found
            kept = left <= np.median(left)
        return HostCost(*(float(value) for value in found))


@dataclass(frozen=True, slots=True)
class HostCosts:
    """plain: of choices without a draft session; drafted: of those with one. ask_s: seconds that
    asking for drafts took in a step of one choice that drafted, the median; 0 where none did."""

    plain: HostCost = field(default_factory=HostCost)
    drafted: HostCost = field(default_factory=HostCost)
    ask_s: float = 0.0


def _not_negative(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Least squares with coefficients of at least 0: those below are dropped, the worst first."""
    used = [0, 1, 2]
    found = np.zeros(3)
    while used:
        part = np.linalg.lstsq(columns[:, used], seconds, rcond=None)[0]
        if part.min() >= 0.0:
            found[used] = part
            break
        del used[int(np.argmin(part))]
    return found


def measure_host(engine: Engine, prompts: Sequence[Sequence[int]], drafter: str) -> HostCosts:
    """Ask an idle engine a few short answers without drafts and with `drafter`'s, alone and eight
    at once; about a second. What it says is dropped. Raises nothing for requests that fail."""
    short = [tuple(prompt[-_PROMPT:]) for prompt in prompts if len(prompt)]
    if not short:
        return HostCosts()
    off, _ = _steps(engine, short, SpeculationParams())
    drafted, asks_s = _steps(engine, short, SpeculationParams(drafter, 8))
    ask_s = statistics.median(asks_s) if asks_s else 0.0
    return HostCosts(HostCost.fit(off), HostCost.fit(drafted), ask_s)


def _steps(
    engine: Engine, prompts: Sequence[tuple[int, ...]], speculation: SpeculationParams
) -> tuple[list[tuple[int, int, float]], list[float]]:
    """(draws, draft nodes, seconds beside model and drafter) of steps without prompts, and what
    proposing took in those of one choice that drafted."""
    found: list[tuple[int, int, float]] = []
    asks_s: list[float] = []
    number = 0
    for num_streams in _STREAMS:
        for _ in range(num_streams):
            engine.submit(
                Request(
                    request_id=f"host-{number}",
                    task=_TASK,
                    model=engine.info.name,
                    prompt_ids=prompts[number % len(prompts)],
                    sampling=SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True),
                    speculation=speculation,
                    cache_salt=f"host-{number}",
                )
            )
            number += 1
        while engine.has_work:
            engine.step()
            stats = engine.stats()
            if stats.num_rows and not stats.num_prefill_rows:
                draws = stats.num_rows - stats.num_draft_rows
                beside_s = max(0.0, stats.host_s - stats.propose_s)
                found.append((draws, stats.num_draft_rows, beside_s))
                if draws == 1 and stats.num_draft_rows:
                    asks_s.append(stats.propose_s)
    engine.take_deltas()
    return found, asks_s
