"""Tests of a single server's API, once more, with a fleet of three where its engine was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.api import test_end_to_end as alone
from tests.api.live import LiveServer
from tests.api.real_engine import CONTEXT, spec
from tests.api.test_end_to_end import (  # noqa: F401  # collected here with this file's `server`
    test_a_request_that_no_token_satisfies_fails_alone,
    test_drafts_are_accepted_and_reported_and_sources_agree,
    test_prompt_logprobs_are_the_drawn_ones,
)
from tests.fleet.local_replicas import LocalReplicas, fleet_spec


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    replicas = LocalReplicas([spec(i=i) for i in range(3)], max_messages_per_s=2000.0)
    fleet = fleet_spec(replicas, lambda: live.loop)
    live = LiveServer([fleet], max_model_len=CONTEXT)
    with live:
        yield live


@pytest.mark.parametrize("variant", [alone.VARIANTS[1], alone.VARIANTS[3]], ids=str)
def test_no_replica_changes_an_answer(server: LiveServer, variant: dict[str, Any]) -> None:
    alone.test_speculation_batching_and_streaming_never_change_an_answer(server, variant)
