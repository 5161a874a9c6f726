"""That a grammar reaches the engine and its drafts are told, with a fleet where the engine was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.live import LiveServer
from tests.api.real_engine import spec
from tests.api.test_structured_end_to_end import (  # noqa: F401  # with this file's `server`
    ENGINE,
    test_forced_tokens_are_reported_as_a_source,
    test_openai_and_vllm_fields_give_json_of_the_schema,
)
from tests.fleet.local_replicas import LocalReplicas, fleet_spec


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    replicas = LocalReplicas([spec(i=i, **ENGINE) for i in range(2)])
    live = LiveServer([fleet_spec(replicas, lambda: live.loop)])
    with live:
        yield live
