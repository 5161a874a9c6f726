"""A script of test_catalog.py: the drafter `echo` is installed; configure it and serve with it."""

import sys
from pathlib import Path

import pytest

from drafters.catalog import catalog, make_drafter
from server.api.bodies import SpeculationBody
from server.config import load_task
from server.errors import ConfigError
from server.types import SpeculationParams
from server.wiring.drafter import make_task_drafter
from tests.engine.requests import engine_over, finish, ids_of, request_of
from tests.fakes.fake_runner import FakeModel

assert list(catalog())[-1] == "echo", list(catalog())

file = Path(sys.argv[1])
file.write_text("speculation:\n  drafter: echo\n  echo:\n    length: 4\n")
task = load_task(file)
assert task.speculation.options() == (("echo.length", 4),)
for text, problem in (
    ("length: 99", "less than or equal to 32"),
    ("lenght: 4", "did you mean length?"),
):
    file.write_text(f"speculation:\n  drafter: echo\n  echo:\n    {text}\n")
    with pytest.raises(ConfigError) as caught:
        load_task(file)
    told = str(caught.value)
    assert f"{file}:4: speculation.echo.{text.split(':')[0]}: " in told and problem in told, told
body = SpeculationBody.model_validate({"drafter": "echo", "echo": {"length": 2}})
assert getattr(body, "echo").length == 2  # noqa: B009  # a field that this drafter brings
assert vars(make_drafter("echo", length=3))["length"] == 3


def serve(drafter: str) -> tuple[dict[str, list[int]], int]:
    """(ids by request, accepted drafts) of three requests."""
    made = {"echo": lambda task, spec: make_task_drafter("echo", "f", (2,), task, spec)}
    engine, _ = engine_over(FakeModel(16, seed=5, context=2, boost=9.0), made, max_num_seqs=4)
    speculation = SpeculationParams()
    if drafter != "off":
        speculation = SpeculationParams(drafter, 8, (("echo.length", 4),))
    asked = [
        request_of(str(i), (1, 2, 3, 4 + i), max_tokens=60, speculation=speculation)
        for i in range(3)
    ]
    told = finish(engine, *asked)
    deltas = [delta for of_one in told.values() for delta in of_one]
    assert all(delta.finish_reason != "error" for delta in deltas)
    accepted = sum(delta.counts.num_accepted for delta in deltas)
    return {name: ids_of(of_one) for name, of_one in told.items()}, accepted


plain, none = serve("off")
drafted, accepted = serve("echo")
assert drafted == plain and none == 0
sys.stdout.write(f"accepted {accepted}\n")
