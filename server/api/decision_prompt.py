"""How a decision is put to a model: the input as text, the question below it, and the labels.

    The package came late and the box was crushed.

    How does the customer feel?
    Options:
    - happy
    - angry: wants their money back
    Answer with one option.
    Answer:

The last line is the start of the assistant's answer where the model has a chat template; the rest
is then what the user says. The labels are what may come next. They are the options themselves where
the first tokens of all of them differ; else the options are lettered ("A. happy") and the letters
are the labels.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from server.api.decision_body import (
    MAX_CHOICES,
    MAX_JSON_BYTES,
    MAX_JSON_DEPTH,
    MAX_JSON_VALUES,
    AssistantMessage,
    CallOutput,
    ChoiceQuestion,
    FunctionCall,
    InputJson,
    InstructionMessage,
    Part,
    PredicateQuestion,
    Question,
    Refusal,
    UserMessage,
    items_of,
    parts_of,
)
from server.errors import InvalidRequestError, LimitExceededError, UnsupportedFieldError

_TAILS = (("\nAnswer:", " "), ("\nAnswer: ", ""))
"""How a prompt may end, and what then stands before a label; the first pair whose labels all
differ is used."""

_LABEL_CHARS = 64
"""The first token of a label lies in its first so many characters."""

EncodeFunction = Callable[[Sequence[str]], list[list[int]]]
"""Ids of texts, without special ones."""


@dataclass(frozen=True, slots=True)
class Labels:
    """How the options of a question are told apart.

    tail: the end of the prompt. shown: the options as the prompt lists them. token_ids: the id that
    answers each. lettered: the answers are letters.
    """

    tail: str
    lettered: bool
    shown: tuple[str, ...]
    token_ids: tuple[int, ...]


class Labeller:
    """Labels for one tokenizer. Finds its letters once, on first need."""

    def __init__(self, encode: EncodeFunction) -> None:
        self._encode = encode
        self._tails = [(tail, gap, encode([tail])[0]) for tail, gap in _TAILS]
        self._letters: list[tuple[str, list[tuple[str, int]]]] | None = None

    def labels(self, options: Sequence[str], at: str) -> Labels:
        """Labels of these options. Raises UnsupportedFieldError for more than the tokenizer has."""
        for tail, gap, before in self._tails:
            found = self._encode([tail + gap + option[:_LABEL_CHARS] for option in options])
            ids = [
                after[len(before)]
                for after in found
                if len(after) > len(before) and after[: len(before)] == before
            ]
            if len(set(ids)) == len(options):
                return Labels(tail, False, tuple(options), tuple(ids))
        if self._letters is None:
            self._letters = [
                (tail, list(self._find_letters(tail, gap, before)))
                for tail, gap, before in self._tails
            ]
        for tail, letters in self._letters:
            if len(letters) >= len(options):
                named = list(zip(letters, options, strict=False))
                return Labels(
                    tail,
                    True,
                    tuple(f"{letter}. {option}" for (letter, _), option in named),
                    tuple(token_id for (_, token_id), _ in named),
                )
        most = max(len(letters) for _, letters in self._letters)
        raise UnsupportedFieldError(
            f"{at}: this model's tokenizer tells {most} options apart, not {len(options)}.",
            param=at,
        )

    def _find_letters(self, tail: str, gap: str, before: list[int]) -> Iterator[tuple[str, int]]:
        """A to Z, AA, AB, ...: those of one token each, all different."""
        capitals = string.ascii_uppercase
        names = [*capitals, *map("".join, itertools.product(capitals, repeat=2))]
        seen: set[int] = set()
        for name, after in zip(names, self._encode([tail + gap + n for n in names]), strict=True):
            if len(after) == len(before) + 1 and after[:-1] == before and after[-1] not in seen:
                seen.add(after[-1])
                yield name, after[-1]
                if len(seen) == MAX_CHOICES:
                    return


# --- texts ----------------------------------------------------------------------------------------


def options_of(question: Question) -> list[str]:
    """The options of a question as text, in order."""
    if isinstance(question, PredicateQuestion):
        return ["Yes", "No"]
    if isinstance(question, ChoiceQuestion):
        return [
            str(o.value).lower() if isinstance(o.value, bool) else _shown(o.value)
            for o in question.choices
        ]
    return [_shown(level.label) for level in question.levels]


def _shown(option: str) -> str:
    return option if option == option.strip() and "\n" not in option else json.dumps(option)


def question_text(question: Question, labels: Labels, at: str) -> str:
    """A question with its options, as it stands below the input; the tail comes after it."""
    lines = [_content(question.instructions, ("input_text", "input_json"), f"{at}.instructions")]
    answer = "the letter of one {}" if labels.lettered else "one {}"
    if isinstance(question, PredicateQuestion):
        lines = [f"Statement: {lines[0]}", "Is this statement true?"]
        lines += labels.shown if labels.lettered else ()
        answer = answer.format("option") if labels.lettered else "Yes or No"
    else:
        is_choice = isinstance(question, ChoiceQuestion)
        answer = answer.format("option" if is_choice else "level")
        told = (
            [option.description for option in question.choices]
            if isinstance(question, ChoiceQuestion)
            else [level.description for level in question.levels]
        )
        lines.append("Options:" if is_choice else "Levels, from the lowest to the highest:")
        for shown, description in zip(labels.shown, told, strict=True):
            bullet = "" if labels.lettered else "- "
            lines.append(f"{bullet}{shown}{f': {description}' if description else ''}")
    return "\n".join([*lines, f"Answer with {answer}."])


def input_text(given: Any) -> str:
    """The input as one text. A single user message is its content; several messages each begin with
    their role.

    Raises InvalidRequestError and its kin.
    """
    items = items_of(given)
    if isinstance(items, str):
        return items
    told: list[str] = []
    for i, item in enumerate(items):
        at = f"input[{i}]"
        if isinstance(item, UserMessage):
            text = _content(item.content, ("input_text", "input_json"), f"{at}.content")
            told.append(text if len(items) == 1 else f"User: {text}")
        elif isinstance(item, InstructionMessage):
            text = _content(item.content, ("input_text",), f"{at}.content")
            told.append(f"{item.role.title()}: {text}")
        elif isinstance(item, AssistantMessage):
            text = _content(item.content, ("output_text", "refusal"), f"{at}.content")
            told.append(f"Assistant: {text}")
        elif isinstance(item, CallOutput):
            told.append(f"Result: {_content(item.output, ('input_text',), f'{at}.output')}")
        else:
            what = item.arguments if isinstance(item, FunctionCall) else item.input
            space = f"{item.namespace}." if item.namespace else ""
            told.append(f"Call: {space}{item.name}({what})")
    joined = "\n\n".join(told)
    if not joined.strip():
        raise InvalidRequestError("input: there is no text in it.", param="input")
    return joined


def _content(content: Any, allowed: Sequence[str], at: str) -> str:
    parts = parts_of(content, allowed, at)
    if isinstance(parts, str):
        return parts
    return "\n".join(_part(part, f"{at}[{i}]") for i, part in enumerate(parts))


def _part(part: Part, at: str) -> str:
    if isinstance(part, Refusal):
        return part.refusal
    if not isinstance(part, InputJson):
        return part.text
    objects = part.data if isinstance(part.data, list) else [part.data]
    if not all(isinstance(value, dict) for value in objects):
        raise InvalidRequestError(
            f"{at}.data: must be an object or a list of objects.", param=f"{at}.data"
        )
    return json_text(part.data, f"{at}.data")


def json_text(data: Any, at: str) -> str:
    """JSON as a model reads it. Raises LimitExceededError for a value too deep or too large."""
    depth, num_values = _extent(data)
    if depth > MAX_JSON_DEPTH or num_values > MAX_JSON_VALUES:
        raise LimitExceededError(
            f"{at}: at most {MAX_JSON_DEPTH} levels and {MAX_JSON_VALUES} values.", param=at
        )
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    if len(text.encode()) > MAX_JSON_BYTES:
        raise LimitExceededError(f"{at}: at most {MAX_JSON_BYTES} bytes as compact JSON.", param=at)
    return text


def _extent(value: Any) -> tuple[int, int]:
    """(container levels, values) of a JSON value; how deep a body may be is bounded before."""
    if not isinstance(value, (dict, list)):
        return 0, 1
    inner = [_extent(item) for item in (value.values() if isinstance(value, dict) else value)]
    return 1 + max((d for d, _ in inner), default=0), 1 + sum(n for _, n in inner)
