"""What a task's drafts are expected to gain, and how far from that a user's own figure may lie."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drafters.catalog import Need, that_use
from server.commands.tune_choice import Choice, DrafterOf
from server.commands.tune_material import Material, Progress, TuneSettings
from server.config import SpeculationConfig
from server.types import SpeculationParams

if TYPE_CHECKING:
    from server.engine.forecast import Forecast, ServedBy
    from server.engine.served_gain import GainMeter

_log = logging.getLogger(__name__)

MANY_STREAMS = 8
FURTHER = 100
"""Requests of a user's own measurement, which the range is told for."""

_FEWEST = 16  # prompts that are worth measuring
_ALONE_SHARE = 2.0 / 3.0  # of the time for measuring is spent on one client
_MACHINE = 0.02  # two measurements of the same requests on one machine differ by so much
_REPLAYED = 0.05  # ... and a replay from a measurement


@dataclass(frozen=True, slots=True)
class Expected:
    """A speedup of whole requests and the range in which FURTHER requests like these will have
    theirs, in 19 of 20 cases. num_served: requests that it was measured on, 0 where it was
    forecast. tokens_per_step: of decode steps, in these requests."""

    speedup: float = 1.0
    low: float = 1.0
    high: float = 1.0
    num_served: int = 0
    tokens_per_step: float = 1.0


def within(speedup: float, error: float, num: int, other: float) -> tuple[float, float]:
    """The range. error: standard error of a speedup of `num` requests; other: of what is not in the
    requests, as a share."""
    own = error * math.sqrt(1.0 + num / FURTHER)
    half = 2.0 * math.hypot(own, other * speedup)
    return max(0.0, speedup - half), speedup + half


def forecast_gain(forecast: Forecast, num: int) -> Expected:
    """As a replay of `num` recordings says."""
    low, high = within(forecast.speedup, forecast.error, num, _REPLAYED)
    return Expected(forecast.speedup, low, high, 0, forecast.tokens_per_step)


def expected_gains(
    settings: TuneSettings,
    material: Material,
    best: Choice | None,
    drafter_of: DrafterOf,
    served_by: ServedBy,
    meter: GainMeter,
    corpus: str | None,
    progress: Progress,
) -> dict[int, Expected]:
    """Of a choice, for one client and for MANY_STREAMS: measured where there are prompts and time
    for it, else forecast. corpus: the file of the choice's, without what is held back."""
    from server.engine.forecast import forecast

    if best is None:
        return {1: Expected(), MANY_STREAMS: Expected()}
    progress(f"replaying {MANY_STREAMS} streams", 0, None)
    many = forecast(
        drafter_of(best.drafter, best.corpus, best.options), material.held, served_by,
        max_draft_tokens=best.budget, num_streams=MANY_STREAMS, max_tokens=material.max_tokens,
    )  # fmt: skip
    speculation = _as_served(best, corpus)
    found = {}
    for clients, told in ((1, best.forecast), (MANY_STREAMS, many)):
        progress(f"serving {clients} at once with drafts and without", 0, None)
        share = _ALONE_SHARE if clients == 1 else 1.0 - _ALONE_SHARE
        most_s = share * settings.serve_s
        prompts = _that_fit(material, told, most_s)
        found[clients] = forecast_gain(told, len(material.held))
        if len(prompts) >= _FEWEST:
            try:
                gain = meter.measure(prompts, speculation, num_clients=clients, most_s=most_s)
            except RuntimeError as error:
                _log.warning("a held-back prompt failed, so its gain is forecast: %s", error)
                continue
            num = len(gain.plain.outputs)
            low, high = within(gain.speedup, gain.error, num, _MACHINE)
            found[clients] = Expected(gain.speedup, low, high, num, gain.drafted.tokens_per_step)
    return found


def _as_served(best: Choice, corpus: str | None) -> SpeculationParams:
    """Of the task's requests: it learns, where its drafter can."""
    learns = best.drafter in that_use(Need.LEARNED)
    num = SpeculationConfig().learn_max_tokens if learns else 0
    options = tuple((f"{best.drafter}.{key}", value) for key, value in best.options)
    return SpeculationParams(best.drafter, best.budget, options, corpus, learn_tokens=num)


def _that_fit(material: Material, told: Forecast, most_s: float) -> Sequence[Sequence[int]]:
    """The prompts that can be served with and without drafts in so many seconds."""
    each_s = (told.plain_s + told.seconds) / len(material.held)
    return material.to_serve[: int(most_s / each_s)]
