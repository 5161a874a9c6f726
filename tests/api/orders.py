"""Orders without a server: what the API makes of a body."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from server.api.bodies import validate
from server.api.faces.completions import CompletionBody, Completions
from server.api.faces.decisions import DecisionBody, Decisions, Question, input_text
from server.api.order import Order, Orders, Target
from server.api.served_model import Catalog, ServedModel
from server.config import LimitsConfig, TaskConfig
from server.types import Request
from tests.api.live import DRAFTERS, served


def orders(*tasks: TaskConfig, models: Sequence[ServedModel] = ()) -> Orders:
    """Orders of these tasks and models."""
    by_name = {model.name: model for model in models or [served()]}
    catalog = Catalog({task.name: task for task in tasks}, by_name, {})
    return Orders(catalog, DRAFTERS, LimitsConfig())


def target(takes: Orders, name: str | None = None, room: int | None = None) -> Target:
    """What a `model` field names. room: tokens that the engines hold."""
    task, model = takes.catalog.find(name)
    room = model.max_model_len if room is None else room
    return Target(name or model.key, task, model, room)


def completion(takes: Orders, room: int | None = None, **body: Any) -> Order:
    """The order of a completion."""
    parsed = validate(CompletionBody, {"model": "tiny", "prompt": "the", **body})
    context: Any = None  # of HTTP
    at = target(takes, parsed.model, room)

    async def make() -> Order:
        generation = await Completions(context).generation(parsed, at)
        return await takes.order(generation, at, "cmpl-x")

    return asyncio.run(make())


def asked(*questions: Any) -> list[Question]:
    """What a decision asks."""
    body = validate(DecisionBody, {"model": "tiny", "input": "x", "questions": [*questions]})
    context: Any = None  # of HTTP
    return Decisions(context).asked(body)[0]


def decisions(takes: Orders, given: Any, questions: Any) -> list[Request]:
    """The Requests of a decision."""
    context: Any = SimpleNamespace(orders=takes, limits=takes.limits)
    work = Decisions(context).requests(
        input_text(given), "input", asked(*questions), target(takes), "d"
    )
    found = asyncio.run(work)
    takes.close()
    return found
