"""That tools and predictions reach their engines, with a fleet of two for each model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.chat_models import chat_spec, served
from tests.api.live import LiveServer
from tests.api.test_chat_end_to_end import (  # noqa: F401  # collected with this file's `server`
    MODELS,
    test_a_call_that_must_be_made_is_made,
    test_a_prediction_is_accepted_counted_and_changes_nothing,
)
from tests.fleet.local_replicas import LocalReplicas, fleet_spec


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    specs = [
        fleet_spec(LocalReplicas([chat_spec(name, i) for i in range(2)]), lambda: live.loop)
        for name in MODELS
    ]
    models = {name: served(name) for name in MODELS}
    live = LiveServer(specs, models=models, drafters=("off", "suffix", "auto"))
    with live:
        yield live
