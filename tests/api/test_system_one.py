"""POST /v1/systemone over a real socket: the protocol's shapes, and /v1/decisions' numbers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.live import LiveServer
from tests.api.test_decisions import engine as engine  # a fixture
from tests.api.test_decisions import server as server  # a fixture
from tests.api.test_errors import check
from tests.fakes.scripted_engine import ScriptedEngine

QUESTIONS: dict[str, Any] = {
    "refund": {
        "type": "noul",
        "instructions": "Is a refund asked for?",
        "criteria": {"true": "Money back", "false": None},
    },
    "team": {
        "type": "choice",
        "instructions": {"ask": "Which team?"},
        "criteria": {"billing": "money", "sales": None, "other": {"is": "the rest"}},
    },
    "plain": {"type": "choice", "instructions": "Which?", "criteria": ["a", "b"]},
    "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", "cross"]},
}
STATE = {"message": "Charged twice.", "order": 4411}


def ask(server: LiveServer, state: Any = STATE, questions: Any = None, **more: Any) -> Any:
    body = {"model": "tiny", "state": state, "questions": questions or QUESTIONS, **more}
    return server.post("/v1/systemone", **body)


def test_without_a_model_the_first_is_asked(server: LiveServer) -> None:
    assert ask(server, model=None).json()["model"] == "tiny"


def test_answers_are_named_and_those_of_decisions(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    answer = ask(server).json()
    assert list(answer) == ["model", "answers", "usage"]
    assert list(answer["answers"]) == list(QUESTIONS)
    decision = server.post(
        "/v1/decisions",
        model="tiny",
        input='{"message":"Charged twice.","order":4411}',
        questions=[
            {"type": "predicate", "instructions": "Is a refund asked for?\nTrue: Money back"},
            {
                "type": "choice",
                "instructions": '{"ask":"Which team?"}',
                "choices": [
                    {"value": "billing", "description": "money"},
                    {"value": "sales"},
                    {"value": "other", "description": '{"is":"the rest"}'},
                ],
            },
            {
                "type": "choice",
                "instructions": "Which?",
                "choices": [{"value": "a"}, {"value": "b"}],
            },
            {
                "type": "score",
                "instructions": "How angry?",
                "levels": [{"label": "calm"}, {"label": "cross"}],
            },
        ],
    ).json()
    prompts = [request.prompt_ids for request in engine.submitted]
    assert prompts[:4] == prompts[4:], "a decision asks with the same prompts"
    noul, team, plain, anger = decision["answers"]
    got = answer["answers"]
    assert got["refund"] == {"type": "noul", "noul": noul["probability"]}
    assert got["team"] == {
        "type": "choice",
        "choice": "billing",
        "probabilities": {p["value"]: p["probability"] for p in team["probabilities"]},
        "confidence": team["confidence"],
    }
    assert set(got["plain"]["probabilities"]) == {"a", "b"}
    assert got["plain"]["confidence"] == plain["confidence"]
    assert got["anger"] == {
        "type": "score",
        "score": anger["score"],
        "legend": {"0": "calm", "1": "cross"},
        "probabilities": {str(p["value"]): p["probability"] for p in anger["probabilities"]},
        "confidence": anger["confidence"],
    }
    used = decision["usage"]["input_tokens"]
    assert answer["usage"] == {"input_tokens": used, "output_tokens": 0}


def one(**question: Any) -> dict[str, Any]:
    return {"q": {"instructions": "x", **question}}


@pytest.mark.parametrize(
    ("param", "change"),
    [
        ("state", {"state": ""}),
        ("state", {"state": 5}),
        ("questions", {"questions": [1]}),
        ("questions.q", {"questions": {"q": 1}}),
        ("questions.q.type", {"questions": one(type="box")}),
        ("questions.q.instructions", {"questions": one(type="noul", instructions=" ")}),
        ("questions.q.criteria", {"questions": one(type="choice", criteria=["a"])}),
        ("questions.q.criteria", {"questions": one(type="choice", criteria=["a", 1])}),
        ("questions.q.criteria", {"questions": one(type="score", criteria=["a"])}),
        ("questions.'=q'.type", {"questions": {"=q": {"type": "box"}}}),
        (
            f"questions.q.criteria.\\n{'b' * 58}...",
            {"questions": one(type="choice", criteria={"a": None, "\n" + "b" * 4000: 5})},
        ),
        ("questions.q.criteria[1]", {"questions": one(type="score", criteria=["a", 3])}),
    ],
)
def test_what_is_wrong_is_named(server: LiveServer, param: str, change: dict[str, Any]) -> None:
    check(ask(server, **{"state": "x", **change}), 400, "invalid_value", param)


def test_unknown_members_and_long_states_are_named(server: LiveServer) -> None:
    check(ask(server, assets={"a": "…"}), 400, "unknown_parameter", "assets")
    flood = ask(server, "long " * 5000)
    assert "state: the context holds" in check(flood, 400, "context_length_exceeded", "state")
    assert httpx.get(server.url + "/openapi.json").json()["paths"]["/v1/systemone"]["post"]
