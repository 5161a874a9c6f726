"""Each constant of Gain and StepTimes decides something: changed, the policy leaves its bound.

A row is a constant, a value that it might have, what the policy does, and the bounds of that. With
the constants as they are every figure lies within its bounds, and with that value outside. What is
compiled runs as it is written here, so that a changed constant is read.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafters.jit import Entry
from server.engine import draft, gain, step_times
from server.engine.gain import Gain, StepShape
from server.engine.step_times import BESIDE, CostTable, HostTimes, row_grid
from tests.engine.gain_calls import choose, note_ask, note_drafts
from tests.engine.test_rests import some_choices

ALONE = StepShape(1, 1, 0.0)
ASK, NODE = 0.1, 0.15
"""Plain tokens that an ask and a node take."""


def _host(ask_s: float = ASK) -> HostTimes:
    """A host that takes nothing but what asking takes."""
    made = HostTimes(0.0)
    made.numbers[:] = 0.0, 0.0, 0.0, ask_s, 0.0, 0.0
    return made


def _gain() -> Gain:
    rows = row_grid(64)
    made = Gain(CostTable(rows, [1.0 + NODE * (r - 1) for r in rows]))
    made.host = _host()
    return made


def _is_asked(made: Gain, seat: int) -> bool:
    return not made.ask([seat], ALONE, 64)[0][0]


def _steps_until(made: Gain, seat: int, is_asked: bool, most: int = 4000) -> int:
    """Steps until a choice is asked, or is not; what is asked brings nothing."""
    for step in range(most):
        if _is_asked(made, seat) == is_asked:
            return step
        if not is_asked:
            note_ask(made, seat, np.empty(0))
    return most


def _drafts(made: Gain, seat: int, claim: float, came: bool, num: int) -> None:
    for _ in range(num):
        claims = np.full(1, claim)
        made.ask([seat], ALONE, 64)
        note_ask(made, seat, claims)
        note_drafts(made, seat, claims, range(int(came)))


def _of_a_choice(figure: Callable[[Gain, int], float], *, knows: bool) -> Callable[[], float]:
    """A figure of the first choice of a scope. knows: whether its drafter knows something."""

    def found() -> float:
        made = _gain()
        return figure(made, made.seat("a", knows=knows))

    return found


new, known = (partial(_of_a_choice, knows=knows) for knows in (False, True))


def to_the_first_ask(made: Gain, seat: int) -> float:
    return _steps_until(made, seat, True)


def asks_saved_up(made: Gain, seat: int) -> float:
    made.host = _host(0.02)  # so that it gives up for its account's sake alone
    made.rested([seat], 100_000)
    return _steps_until(made, seat, False)


def steps_in_debt(made: Gain, seat: int) -> float:
    """After the first drafts, which all missed."""
    made.ask([seat], ALONE, 64)
    note_drafts(made, seat, np.full(400, 0.1), ())
    return _steps_until(made, seat, True)


def nodes_beside_wrong_high_claims(made: Gain, seat: int) -> float:
    _drafts(made, seat, 0.5, True, 30)
    note_drafts(made, seat, np.full(120, 0.8), ())
    return choose(made, [made.seat("a")], [np.full(1, 0.5)], ALONE, 64)[0]


def misses_until_nothing_is_taken(made: Gain, seat: int) -> float:
    for missed in range(200):
        if not choose(made, [seat], [np.full(1, 0.7)], ALONE, 64)[0]:
            return missed
        note_drafts(made, seat, np.full(1, 0.7), ())
    return 200


def asks_until_a_text_that_paid_is_given_up(made: Gain, seat: int) -> float:
    _drafts(made, seat, 0.9, True, 200)
    return _steps_until(made, seat, False)


def rest_until_it_is_asked_again(made: Gain, seat: int) -> float:
    for _ in range(200):
        made.ask([seat], ALONE, 64)
        note_ask(made, seat, np.empty(0))
    steps = 0
    while not made.is_asked(seat) and steps < 20_000:
        made.rested([seat], 25)
        made.ask([seat], ALONE, 64)
        steps += 25
    return steps


def asks_without_a_node_until_given_up(made: Gain, seat: int) -> float:
    return _steps_until(made, seat, False)


def looks_at_an_answer_that_drafts_nothing() -> float:
    return some_choices(2, dear=True)[1]


def asks_of_a_text_that_repeated_once(made: Gain, seat: int) -> float:
    """In vain: what it promised is used up."""
    made.watch(seat, np.array([5, 6, 7, 8, 5, 6, 7], np.int32), 4)
    return _steps_until(made, seat, False)


def _table() -> CostTable:
    rows = row_grid(64)
    return CostTable(rows, [1.0 + 0.2 * (r - 1) for r in rows])


def a_first_step_that_is_a_tenth_slower() -> float:
    table = _table()
    table.observe(1, 0.0, 1.1)
    return table.cost(1)


def a_step_that_took_ten_times_as_long() -> float:
    table = _table()
    for _ in range(100):
        table.observe(1, 0.0, 1.0)
    table.observe(1, 0.0, 10.0)
    return table.cost(1)


def ten_steps_after_others_came() -> float:
    table = _table()
    for _ in range(300):
        table.observe(1, 0.0, 1.0)
    for _ in range(10):
        table.observe(1, 0.0, 1.2)
    return table.cost(1)


def host_at_the_start() -> float:
    return HostTimes(1.0).plain(1) + HostTimes(1.0).asking(1)


def host_after_twenty_quick_steps() -> float:
    times = HostTimes(1.0)
    for _ in range(20):
        times.observe(1, 0, 0.03)
    for _ in range(5):
        times.observe(1, 0, 0.06)
    return times.plain(1)


def rows_after_32_prompts() -> float:
    times = HostTimes(1.0)
    for _ in range(32):
        times.observe(1, 0, 1.0, 1)
    return float(times.numbers[BESIDE])


CASES: list[tuple[Any, str, Any, Callable[[], float], float, float]] = [
    (gain, "SHARE", 0.005, new(to_the_first_ask), 10, 16),
    (gain, "MOST", 1.6, new(asks_saved_up), 200, 300),
    (gain, "LEAST", 0.4, new(steps_in_debt), 20, 45),
    (gain, "EDGES", (0.15, 0.35, 0.4, 0.85), known(nodes_beside_wrong_high_claims), 1, 1),
    (gain, "PRIOR", 6.0, known(misses_until_nothing_is_taken), 10, 16),
    (gain, "MEMORY", 64.0, known(asks_until_a_text_that_paid_is_given_up), 30, 60),
    (gain, "IDLE", 512.0, known(rest_until_it_is_asked_again), 300, 600),
    (gain, "DOUBT", 0.1, known(asks_without_a_node_until_given_up), 15, 25),
    (gain, "REPEAT", 0.9, new(asks_of_a_text_that_repeated_once), 5, 7),
    (draft, "REST", 2, looks_at_an_answer_that_drafts_nothing, 8, 14),
    (step_times, "DOUBT", 0.1, a_first_step_that_is_a_tenth_slower, 1.085, 1.1),
    (step_times, "NOISE", 0.2, a_step_that_took_ten_times_as_long, 1.15, 1.3),
    (step_times, "DRIFT", 0.02, ten_steps_after_others_came, 1.18, 1.22),
    (step_times, "HOST", (0.1, 0.02, 0.1, 0.1), host_at_the_start, 0.1, 0.2),
    (step_times, "HOST_NOISE", 0.25, host_after_twenty_quick_steps, 0.04, 0.045),
    (step_times, "MEMORY", 64.0, rows_after_32_prompts, 0.55, 0.75),
]
"""(module, constant, another value, what it decides, from, to)"""


@pytest.fixture
def as_written(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What is compiled is run by Python."""
    for module in (gain, step_times):
        for name, function in vars(module).items():
            if isinstance(function, Entry):
                monkeypatch.setattr(module, name, function.py_func)
    return monkeypatch


@pytest.mark.parametrize(("module", "name", "other", "figure", "low", "high"), CASES)
def test_what_a_constant_decides_leaves_its_bounds_where_it_is_changed(
    as_written: pytest.MonkeyPatch,
    module: Any,
    name: str,
    other: Any,
    figure: Callable[[], float],
    low: float,
    high: float,
) -> None:
    assert low <= figure() <= high
    as_written.setattr(module, name, other)
    assert not low <= figure() <= high


def test_every_constant_is_here_and_there_are_no_more_than_15() -> None:
    def own(module: Any) -> set[str]:
        tree = ast.parse(Path(module.__file__).read_text())
        names = {
            target.id
            for statement in tree.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name) and target.id.isupper()
        }
        return {name for name in names if not name.startswith("_")}

    known = own(gain) | {f"{name} of a table" for name in own(step_times)}
    tried = {
        f"{name} of a table" if module is step_times else name
        for module, name, *_ in CASES
        if (module, name) != (gain, "MEMORY")  # it is step_times'
    }
    assert known == tried and len(known) <= 15
