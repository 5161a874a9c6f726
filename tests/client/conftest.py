"""The server that the commands of this folder ask: it answers REPLY, two tokens a step."""

from __future__ import annotations

import pytest

from tests.api.fixtures import served_by
from tests.api.live import encode
from tests.fakes.scripted_engine import ScriptedEngine, saying

REPLY = " over the lazy dog."


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAILOR_API_KEY", raising=False)


engine, server = served_by(lambda: ScriptedEngine(saying(encode(REPLY), per_step=2)))
