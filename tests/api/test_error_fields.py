"""Errors name fields as the route calls them, and change no other word."""

from __future__ import annotations

from server.config import SpeculationConfig, TaskConfig
from server.errors import LimitExceededError
from tests.api.fixtures import chat_by
from tests.api.live import LiveServer
from tests.api.test_errors import check

DRAFTERS = ("off", "auto", "prompt", "suffix")
TASKS = {
    name: TaskConfig(name=name, model="chatml", speculation=SpeculationConfig(drafter="suffix"))
    for name in ("prompt", "logprobs-x")
}


_, server = chat_by(None, "chatml", tasks=TASKS, drafters=DRAFTERS)


def refused(server: LiveServer, code: str, param: str, **body: object) -> str:
    """The message of a chat that is refused."""
    body = {"model": "chatml", "messages": [{"role": "user", "content": "a b"}], **body}
    return check(server.post("/v1/chat/completions", **body), 400, code, param)


def test_a_drafter_called_like_a_field_keeps_its_name(server: LiveServer) -> None:
    field = {"drafter": "nope"}
    told = refused(server, "invalid_value", "speculation.drafter", speculation=field)
    assert told.endswith("choose from off, auto, prompt, suffix.")
    response = server.post(model="chatml", speculation=field)
    assert check(response, 400, "invalid_value", "speculation.drafter") == told


def test_a_task_called_like_a_field_keeps_its_name(server: LiveServer) -> None:
    told = refused(
        server, "invalid_value", "vocabulary.mode", model="prompt", vocabulary={"mode": "slice"}
    )
    assert "the task prompt allows" in told


def test_an_error_of_one_field_becomes_that_of_another() -> None:
    error = LimitExceededError("above 4; prompt: stays.", at="prompt[3]", retry_after_s=2.0)
    assert (error.message, error.param) == ("prompt[3]: above 4; prompt: stays.", "prompt[3]")
    moved = error.moved("input")
    assert type(moved) is LimitExceededError and moved.retry_after_s == 2.0
    assert (moved.message, moved.param) == ("input: above 4; prompt: stays.", "input")
