"""POST /v1/systemone: the System One protocol of decision servers, answered as /v1/decisions.

A body has a `state` and named questions of three types; an answer has their names:

    noul     {instructions, criteria?: {"true", "false"}}   {noul: chance that it is true}
    choice   {instructions, criteria: [value] or {value: description}}
             {choice, probabilities: {value: chance}, confidence}
    score    {instructions, criteria: [level, the lowest first]}
             {score, legend: {index: level}, probabilities: {index: chance}, confidence}

State, instructions and criteria are texts, or JSON that is shown compact. Prompts, probabilities
and confidence are those of /v1/decisions. Pictures are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from pydantic import Field, WithJsonSchema

from server.api.bodies import BodyPart, ModelName, one_by_type
from server.api.engines.submission import RequestAccount
from server.api.faces.decisions import (
    MAX_CHOICES,
    MAX_LABEL_CHARS,
    MAX_LEVELS,
    MAX_QUESTIONS,
    Answered,
    Option,
    Question,
    QuestionFace,
    best_of,
    json_text,
    score_of,
)
from server.api.shapes import Chance, Count, Shape
from server.errors import InvalidRequestError, echoed

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


_QUESTION = one_by_type({"noul": NoulQuestion, "choice": ChoiceQuestion, "score": ScoreQuestion})


class SystemOneBody(BodyPart):
    """POST /v1/systemone."""

    model: ModelName | None = Field(None, description="default the server's first")
    state: Content
    questions: dict[str, Annotated[Any, _QUESTION]] = Field(min_length=1, max_length=MAX_QUESTIONS)


def _member(name: str) -> str:
    """A name that the client gave, in a path."""
    return echoed(name, 64).strip("'")


def _question(given: Any, name: str) -> Question:
    at = f"questions.{_member(name)}"
    told = _text(given.instructions, f"{at}.instructions")
    if isinstance(given, NoulQuestion):
        for key, criterion in given.criteria or NoulCriteria():
            if criterion is not None:
                told += f"\n{key.title()}: {_text(criterion, f'{at}.criteria.{key}')}"
        return Question("predicate", told, (), at, name)
    where = f"{at}.criteria"
    if isinstance(given, ScoreQuestion):
        labels = [_text(level, f"{where}[{i}]") for i, level in enumerate(given.criteria)]
        _check_labels(labels, where)
        return Question("score", told, tuple(map(Option, labels)), at, name)
    criteria = given.criteria
    if isinstance(criteria, list):
        criteria = dict.fromkeys(x if isinstance(x, str) else "" for x in criteria)
    if not isinstance(criteria, dict) or not 2 <= len(criteria) <= MAX_CHOICES:
        raise InvalidRequestError(
            f"must be 2 to {MAX_CHOICES} different options, as a list of texts or as an object of "
            f"descriptions; got {echoed(given.criteria)}.",
            at=where,
        )
    _check_labels(criteria, where)
    options = [
        Option(label, None if what is None else _text(what, f"{where}.{_member(label)}"))
        for label, what in criteria.items()
    ]
    return Question("choice", told, tuple(options), at, name)


def _check_labels(labels: Iterable[str], at: str) -> None:
    for label in labels:
        if not 0 < len(label) <= MAX_LABEL_CHARS:
            raise InvalidRequestError(
                f"an option is a text of 1 to {MAX_LABEL_CHARS} characters; got {echoed(label)}.",
                at=at,
            )


def _text(content: Any, at: str) -> str:
    """A text as it is, an object or a list as compact JSON."""
    text = json_text(content, at) if isinstance(content, (dict, list)) else content
    if not isinstance(text, str) or not text.strip():
        raise InvalidRequestError(
            f"must be a text, an object or a list, not empty; got {echoed(content)}.", at=at
        )
    return text


# --- the answer -----------------------------------------------------------------------------------


class NoulAnswer(Shape, tag="noul", kw_only=True):
    noul: Chance


class OptionAnswer(Shape, tag="choice", kw_only=True):
    choice: str
    probabilities: dict[str, Chance]
    confidence: Chance


class LevelAnswer(Shape, tag="score", kw_only=True):
    score: Annotated[float, Meta(ge=0)]
    legend: dict[str, str]
    probabilities: dict[str, Chance]
    confidence: Chance


class SystemOneUsage(Shape, kw_only=True):
    input_tokens: Count
    output_tokens: Count


class SystemOneAnswer(Shape, kw_only=True):
    model: str
    answers: dict[str, NoulAnswer | OptionAnswer | LevelAnswer]
    usage: SystemOneUsage


class SystemOne(QuestionFace):
    """The route."""

    path = "/v1/systemone"
    summary = "Answers about a state, by name"
    body = SystemOneBody
    answer = SystemOneAnswer
    id_prefix = "sys-"

    def asked(self, body: Any) -> tuple[list[Question], str, str]:
        questions = [_question(given, name) for name, given in body.questions.items()]
        return questions, _text(body.state, "state"), "state"

    def told(self, label: str, answered: Answered, accounts: Sequence[RequestAccount]) -> Struct:
        num_tokens = sum(account.num_prompt_tokens for account in accounts)
        return SystemOneAnswer(
            model=label,
            answers={str(question.name): _answer(question, of) for question, of in answered},
            usage=SystemOneUsage(input_tokens=num_tokens, output_tokens=0),
        )


def _answer(question: Question, chances: list[float]) -> NoulAnswer | OptionAnswer | LevelAnswer:
    if question.kind == "predicate":
        return NoulAnswer(noul=chances[0])
    best, confidence = best_of(chances)
    labels = [str(option.value) for option in question.options]
    if question.kind == "choice":
        return OptionAnswer(
            choice=labels[best],
            probabilities=dict(zip(labels, chances, strict=True)),
            confidence=confidence,
        )
    return LevelAnswer(
        score=score_of(chances),
        legend={str(i): label for i, label in enumerate(labels)},
        probabilities={str(i): chance for i, chance in enumerate(chances)},
        confidence=confidence,
    )
