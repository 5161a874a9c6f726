"""That predictions, and grammars of tools, reach their engines, with a fleet of two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api import test_chat_end_to_end as alone
from tests.api.chat_models import chat_spec, served
from tests.api.live import LiveServer
from tests.fleet.local_replicas import LocalReplicas, fleet_spec


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    fleet = fleet_spec(LocalReplicas([chat_spec("hermes", i) for i in range(2)]), lambda: live.loop)
    models, drafters = {"hermes": served("hermes")}, ("off", "suffix", "auto")
    live = LiveServer([fleet], models=models, drafters=drafters)
    with live:
        yield live


def test_a_prediction_is_accepted_counted_and_changes_nothing(server: LiveServer) -> None:
    variant = {"temperature": 0.8, "seed": 3, "logprobs": True}
    alone.test_a_prediction_is_accepted_counted_and_changes_nothing(server, variant)


def test_a_call_that_must_be_made_is_made(server: LiveServer) -> None:
    alone.test_a_call_that_must_be_made_is_made(server, "hermes", 2, 1.2)
