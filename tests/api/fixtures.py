"""Fixtures that most modules of tests have: one scripted engine, or one a model, and a server of
them, for the whole module.

    engine, server = served_by(lambda: ScriptedEngine(saying(IDS)), tasks=TASKS)
    engines, server = chats_of(("hermes", "base"), saying(IDS))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.api.chat_models import scripted, served
from tests.api.live import LiveServer
from tests.fakes.scripted_engine import Script, ScriptedEngine


def served_by(make: Callable[[], ScriptedEngine], **options: Any) -> tuple[Any, Any]:
    """`engine` and `server`. options: LiveServer's; those that are functions are called first."""

    @pytest.fixture(scope="module", name="engine")
    def engine_of() -> ScriptedEngine:
        return make()

    @pytest.fixture(scope="module", name="server")
    def server_of(engine: ScriptedEngine) -> Iterator[LiveServer]:
        made = {name: one() if callable(one) else one for name, one in options.items()}
        with LiveServer([engine], **made) as live:
            yield live

    return engine_of, server_of


def chat_by(script: Script | None = None, model: str = "hermes", **options: Any) -> tuple[Any, Any]:
    """`engine` and `server` of one model that chats."""
    models = {"models": lambda: {model: served(model)}}
    return served_by(lambda: scripted(model, script), **models, **options)


def chats_of(names: Sequence[str], script: Script | None = None, **options: Any) -> tuple[Any, Any]:
    """`engines`, by model, and `server`."""

    @pytest.fixture(scope="module", name="engines")
    def engines_of() -> dict[str, ScriptedEngine]:
        return {name: scripted(name, script) for name in names}

    @pytest.fixture(scope="module", name="server")
    def server_of(engines: dict[str, ScriptedEngine]) -> Iterator[LiveServer]:
        models = {name: served(name) for name in engines}
        with LiveServer(list(engines.values()), models=models, **options) as live:
            yield live

    return engines_of, server_of
