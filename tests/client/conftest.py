"""The server that the commands of this folder ask: it answers REPLY, two tokens a step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.live import LiveServer, encode
from tests.fakes.scripted_engine import ScriptedEngine, saying

REPLY = " over the lazy dog."


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAILOR_API_KEY", raising=False)


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(saying(encode(REPLY), per_step=2))


@pytest.fixture(scope="module")
def server(engine: ScriptedEngine) -> Iterator[LiveServer]:
    with LiveServer([engine]) as live:
        yield live
