"""Fixtures that most modules of tests have: one scripted engine, or one a model, and a server of
them, for the whole module. Each test finds the engines as they were made, whatever the one before
it has done to them, and with nothing submitted or aborted.

    engine, server = served_by(lambda: ScriptedEngine(saying(IDS)), tasks=TASKS)
    engines, server = chats_of(("hermes", "base"), saying(IDS))
    server = over(spec(), max_model_len=CONTEXT)

And what tests of a body need at least, by route, and the calls of a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.api.chat_models import scripted, served
from tests.api.live import LiveServer
from tests.fakes.scripted_engine import Script, ScriptedEngine

Engines = dict[str, ScriptedEngine]
"""The engines of a server, by model."""
_CHAT = {"messages": [{"role": "user", "content": "the"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the"},
    "/v1/chat/completions": _CHAT,
    "/v1/responses": {"input": "the"},
    "/v1/decisions": {"input": "x", "questions": [{"type": "predicate", "instructions": "y"}]},
    "/v1/systemone": {
        "state": "x",
        "questions": {"y": {"type": "noul", "instructions": "y", "criteria": {"true": "z"}}},
    },
    "/tokenize": {"prompt": "the"},
    "/detokenize": {"tokens": [5]},
    "/v1/chat/completions/render": _CHAT,
}
"""What each route that takes a model needs at least: test_keys.py sees that none is left out."""
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


def noted(
    patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., object]
) -> list[Any]:
    """What `note` says of each call of owner's function from now on, by what it is given."""
    seen: list[Any] = []
    do = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        seen.append(note(*args))
        return do(*args, **options)

    patch.setattr(owner, name, call)
    return seen


def over(*engines: Any, name: str = "server", **options: Any) -> Any:
    """`server`, or what else it is called, over engines that no test looks at. options: as
    served_by's."""

    @pytest.fixture(scope="module", name=name)
    def server_of() -> Iterator[LiveServer]:
        with LiveServer(engines, **_called(options)) as live:
            yield live

    return server_of


def served_by(make: Callable[[], ScriptedEngine], **options: Any) -> tuple[Any, Any]:
    """`engine` and `server`. options: LiveServer's; those that are functions are called first."""
    return _fixtures("engine", lambda: [make()], lambda engines: engines[0], options)


def chat_by(script: Script | None = None, model: str = "hermes", **options: Any) -> tuple[Any, Any]:
    """`engine` and `server` of one model that chats."""
    models = {"models": lambda: {model: served(model)}}
    return served_by(lambda: scripted(model, script), **models, **options)


def chats_of(names: Sequence[str], script: Script | None = None, **options: Any) -> tuple[Any, Any]:
    """`engines`, by model, and `server`."""
    return _fixtures(
        "engines",
        lambda: [scripted(name, script) for name in names],
        lambda engines: dict(zip(names, engines, strict=True)),
        {"models": lambda: {name: served(name) for name in names}, **options},
    )


def _called(options: dict[str, Any]) -> dict[str, Any]:
    return {key: one() if callable(one) else one for key, one in options.items()}


def _fixtures(
    name: str,
    make: Callable[[], list[ScriptedEngine]],
    shown: Callable[[list[ScriptedEngine]], Any],
    options: dict[str, Any],
) -> tuple[Any, Any]:
    engines: list[ScriptedEngine] = []

    @pytest.fixture(scope="module", name="server")
    def server_of() -> Iterator[LiveServer]:
        engines[:] = make()
        with LiveServer(engines, **_called(options)) as live:
            yield live

    @pytest.fixture(autouse=True, name=name)
    def engines_of(server: LiveServer) -> Iterator[Any]:
        made = [(engine.script, engine.step_s) for engine in engines]
        for engine in engines:
            engine.submitted.clear()
            engine.aborted.clear()
        yield shown(engines)
        for engine, (script, step_s) in zip(engines, made, strict=True):
            engine.script, engine.step_s = script, step_s
            engine.gate.set()

    return engines_of, server_of
