"""The capacity model against the engine itself, on a clock that moves with each step's rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from server.fleet.simulation import Arrival, RoutingNumbers, Simulation, synthetic
from server.types import Request, SamplingParams
from tests.api.real_engine import make_engine


def cost(rows: float, keys: float) -> float:
    return 0.03 + 0.0005 * rows if rows else 0.0


def through_engine(arrivals: Sequence[Arrival]) -> tuple[list[float], list[float]]:
    """(seconds to each first token, to each end) where an engine's steps take what `cost` says, and
    who comes during a step waits for its end."""
    engine = make_engine(drafts=False)
    first_s, total_s = [0.0] * len(arrivals), [0.0] * len(arrivals)
    now_s, num = 0.0, 0
    while num < len(arrivals) or engine.has_work:
        if not engine.has_work:
            now_s = max(now_s, arrivals[num].at_s)
        while num < len(arrivals) and arrivals[num].at_s <= now_s:
            arrival = arrivals[num]
            # No two begin alike: the model knows no prefix cache.
            prompt = tuple(1 + (num * 37 + k * 7) % 300 for k in range(arrival.num_prompt_tokens))
            sampling = SamplingParams(
                max_tokens=arrival.num_output_tokens, temperature=0.0, ignore_eos=True
            )
            engine.submit(Request(str(num), arrival.task, "tiny", prompt, sampling))
            num += 1
        deltas = engine.step()
        now_s += cost(engine.stats().num_rows, 0.0)
        for delta in deltas:
            i = int(delta.request_id)
            first_s[i] = first_s[i] or now_s - arrivals[i].at_s
            if delta.finish_reason is not None:
                total_s[i] = now_s - arrivals[i].at_s
    engine.close()
    return first_s, total_s


@pytest.mark.parametrize("rate", [4.0, 9.0])
def test_every_token_comes_when_the_engine_s_does(rate: float) -> None:
    """With seats to spare, and with requests that wait for one (9 a second are too many)."""
    arrivals = list(synthetic(rate, 20.0, 12, prompt=60, output=32))
    first_s, total_s = through_engine(arrivals)
    outcome = Simulation(cost, num_replicas=1, seats=16, max_rows=128).run(arrivals)
    assert outcome.first_s == pytest.approx(first_s, abs=1e-6)
    assert outcome.total_s == pytest.approx(total_s, abs=1e-6)


def test_a_step_away_from_home_still_gives_a_token() -> None:
    """Fewer drafts come true there; where nobody drafts, nothing is lost."""
    arrivals = [Arrival(0.0, "task", 4, 20) for _ in range(60)]
    outcome = Simulation(
        lambda rows, keys: 0.02 if rows else 0.0,
        num_replicas=4,
        seats=16,
        routing=RoutingNumbers(cold_cost=0.3),
    ).run(arrivals)
    assert outcome.num_away
    spans = [end - first for first, end in zip(outcome.first_s, outcome.total_s, strict=True)]
    assert spans == pytest.approx([19 * 0.02] * len(arrivals))
