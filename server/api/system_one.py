"""POST /v1/systemone: the System One protocol of decision servers, answered as /v1/decisions.

A body has a `state` and named questions of three types; an answer has their names:

    noul     {instructions, criteria?: {"true", "false"}}   {noul: chance that it is true}
    choice   {instructions, criteria: [value] or {value: description}}
             {choice, probabilities: {value: chance}, confidence}
    score    {instructions, criteria: [level, the lowest first]}
             {score, legend: {index: level}, probabilities: {index: chance}, confidence}

State, instructions and criteria are texts, or JSON that is shown compact. Prompts, probabilities
and confidence are those of server.api.decisions. Pictures are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from server.api.body_part import BodyPart
from server.api.decision_body import (
    MAX_CHOICES,
    MAX_LABEL_CHARS,
    MAX_LEVELS,
    MAX_QUESTIONS,
    DecisionBody,
    one_of,
)
from server.api.decision_prompt import json_text
from server.api.openapi import schema_of
from server.api.protocol import ModelName
from server.api.responses import (
    ChoiceAnswer,
    Decision,
    LevelAnswer,
    NoulAnswer,
    OptionAnswer,
    PredicateAnswer,
    ScoreAnswer,
    SystemOneAnswer,
    SystemOneUsage,
)
from server.errors import InvalidRequestError, RequestError, echoed

_CONTENT = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "array"}]}
Content = Annotated[Any, WithJsonSchema(_CONTENT)]


class NoulCriteria(BodyPart):
    """What counts as true, and what as false."""

    true: Content = None
    false: Content = None


class NoulQuestion(BodyPart):
    """How likely is it that this is true of the state?"""

    type: Literal["noul"]
    instructions: Content
    criteria: NoulCriteria | None = None


_OPTIONS = {
    "anyOf": [
        {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": MAX_CHOICES},
        {"type": "object", "minProperties": 2, "maxProperties": MAX_CHOICES},
    ]
}


class ChoiceQuestion(BodyPart):
    """Which of the options fits the state?"""

    type: Literal["choice"]
    instructions: Content
    criteria: Annotated[Any, WithJsonSchema(_OPTIONS)]


class ScoreQuestion(BodyPart):
    """Which of the ordered levels, lowest first, fits the state?"""

    type: Literal["score"]
    instructions: Content
    criteria: list[Content] = Field(min_length=2, max_length=MAX_LEVELS)


_QUESTIONS: dict[str, type[BaseModel]] = {
    "noul": NoulQuestion,
    "choice": ChoiceQuestion,
    "score": ScoreQuestion,
}
_QUESTIONS_SCHEMA = {
    "type": "object",
    "minProperties": 1,
    "maxProperties": MAX_QUESTIONS,
    "additionalProperties": {"anyOf": [schema_of(kind) for kind in _QUESTIONS.values()]},
}


class SystemOneBody(BodyPart):
    """POST /v1/systemone."""

    model: ModelName
    state: Content
    questions: Annotated[Any, WithJsonSchema(_QUESTIONS_SCHEMA)]


# --- the answer -----------------------------------------------------------------------------------


def answer_of(body: SystemOneBody, decision: Decision) -> SystemOneAnswer:
    """A decision's answers under the questions' names."""
    return SystemOneAnswer(
        model=decision.model,
        answers={
            name: _answer(answer)
            for name, answer in zip(body.questions, decision.answers, strict=True)
        },
        usage=SystemOneUsage(
            input_tokens=decision.usage.input_tokens, output_tokens=decision.usage.output_tokens
        ),
    )


def _answer(
    answer: PredicateAnswer | ChoiceAnswer | ScoreAnswer,
) -> NoulAnswer | OptionAnswer | LevelAnswer:
    if isinstance(answer, PredicateAnswer):
        return NoulAnswer(noul=answer.probability)
    if isinstance(answer, ChoiceAnswer):
        return OptionAnswer(
            choice=str(answer.choice),
            probabilities={str(p.value): p.probability for p in answer.probabilities},
            confidence=answer.confidence,
        )
    return LevelAnswer(
        score=answer.score,
        legend={str(level.value): level.label for level in answer.probabilities},
        probabilities={str(level.value): level.probability for level in answer.probabilities},
        confidence=answer.confidence,
    )


# --- the order ------------------------------------------------------------------------------------


def decision_body(body: SystemOneBody) -> DecisionBody:
    """The same questions as a body of /v1/decisions. Raises InvalidRequestError and its kin."""
    questions = body.questions
    if not isinstance(questions, dict) or not questions:
        raise InvalidRequestError(
            f"questions: must be an object of named questions; got {echoed(questions)}.",
            param="questions",
        )
    return DecisionBody.model_construct(
        model=body.model,
        input=_text(body.state, "state"),
        questions=[_question(value, _at(name)) for name, value in questions.items()],
    )


def _at(name: str) -> str:
    """Where a question lies in the body."""
    return f"questions.{echoed(name, 64).strip(chr(39))}"


def _question(value: Any, at: str) -> dict[str, Any]:
    question = one_of(_QUESTIONS, "type", value, at)
    told = _text(question.instructions, f"{at}.instructions")
    if isinstance(question, NoulQuestion):
        for name, criterion in (question.criteria or NoulCriteria()).model_dump().items():
            if criterion is not None:
                told += f"\n{name.title()}: {_text(criterion, f'{at}.criteria.{name}')}"
        return {"type": "predicate", "instructions": told}
    at = f"{at}.criteria"
    if isinstance(question, ScoreQuestion):
        labels = [_text(level, f"{at}[{i}]") for i, level in enumerate(question.criteria)]
        _check_labels(labels, at)
        return {"type": "score", "instructions": told, "levels": [{"label": x} for x in labels]}
    criteria = question.criteria
    if isinstance(criteria, list):
        criteria = dict.fromkeys(x if isinstance(x, str) else "" for x in criteria)
    if not isinstance(criteria, dict) or not 2 <= len(criteria) <= MAX_CHOICES:
        raise InvalidRequestError(
            f"{at}: must be 2 to {MAX_CHOICES} different options, as a list of texts or as an "
            f"object of descriptions; got {echoed(question.criteria)}.",
            param=at,
        )
    _check_labels(criteria, at)
    return {
        "type": "choice",
        "instructions": told,
        "choices": [
            {"value": name, "description": None if what is None else _text(what, f"{at}.{name}")}
            for name, what in criteria.items()
        ],
    }


def _check_labels(labels: Any, at: str) -> None:
    for label in labels:
        if not 0 < len(label) <= MAX_LABEL_CHARS:
            raise InvalidRequestError(
                f"{at}: an option is a text of 1 to {MAX_LABEL_CHARS} characters; got "
                f"{echoed(label)}.",
                param=at,
            )


def _text(content: Any, at: str) -> str:
    """A text as it is, an object or a list as compact JSON."""
    text = json_text(content, at) if isinstance(content, (dict, list)) else content
    if not isinstance(text, str) or not text.strip():
        raise InvalidRequestError(
            f"{at}: must be a text, an object or a list, not empty; got {echoed(content)}.",
            param=at,
        )
    return text


_PLACE = re.compile(r"questions\[(\d+)\](?:\.(?:choices|levels))?")


def renamed(error: RequestError, questions: Mapping[str, Any]) -> RequestError:
    """An error about the order that `decision_body` made, in the words of this route's body."""
    names = list(questions)

    def own(text: str) -> str:
        text = _PLACE.sub(lambda found: _at(names[int(found[1])]), text)
        return re.sub(r"^input\b", "state", text)

    return type(error)(
        own(error.message),
        param=None if error.param is None else own(error.param),
        retry_after_s=error.retry_after_s,
        headers=error.headers,
    )
