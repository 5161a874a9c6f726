"""How a request drafts and which part of the head it computes, within its task's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drafters.catalog import Need, spec_of, that_use
from drafters.options import OptionError
from server.api.bodies import GenerationBody, SpeculationBody
from server.config import TaskConfig
from server.config.declared import set_options
from server.errors import InvalidRequestError, LimitExceededError, UnsupportedFieldError, echoed
from server.types import VocabularyParams

_Options = tuple[tuple[str, float | int | str | bool], ...]


@dataclass(frozen=True, slots=True)
class DraftingTasks:
    """What a request may draft with. drafters: names that engines know. tasks: by name, for their
    corpora. default_model: of tasks that name none."""

    drafters: Sequence[str]
    tasks: Mapping[str, TaskConfig]
    default_model: str


def speculation_of(body: GenerationBody, task: TaskConfig, known: DraftingTasks) -> dict[str, Any]:
    """How a request drafts, within its task's limits: fields of SpeculationParams. Raises
    InvalidRequestError and its kin."""
    own, asked = task.speculation, body.speculation
    drafter, num_draft = own.drafter, own.max_draft_tokens
    allowed = known.drafters if own.allowed_drafters is None else own.allowed_drafters
    named = asked is not None and asked.drafter is not None
    if asked is not None and asked.drafter is not None:
        if asked.drafter not in allowed or asked.drafter not in known.drafters:
            raise InvalidRequestError(
                f"{echoed(asked.drafter)} is not available; choose from "
                f"{', '.join(d for d in known.drafters if d in allowed)}.",
                at="speculation.drafter",
            )
        drafter = asked.drafter
    if asked is not None and asked.max_draft_tokens is not None:
        num_draft = asked.max_draft_tokens
        _check_most(num_draft, task, "speculation.max_draft_tokens")
    if body.prediction is not None:
        # A drafter that does not use predictions would ignore the field: it is refused.
        predicting = [name for name in that_use(Need.PREDICTION) if name in known.drafters]
        able = [name for name in predicting if name in allowed]
        if not named and drafter not in predicting and able:
            drafter = able[0]
        if drafter not in predicting or num_draft == 0:
            raise UnsupportedFieldError(
                f"only the drafter {' or '.join(that_use(Need.PREDICTION))} uses it, and here that "
                f"is {echoed(drafter)} with max_draft_tokens {num_draft}. Leave it out.",
                at="prediction",
            )
    options, corpus = own.options(), own.corpus
    if asked is not None:
        options = _options_of(asked, task, drafter, options)
        if asked.corpus is not None:
            corpus = _corpus_of(asked.corpus, task, drafter, known)
    if drafter == "off" or num_draft == 0:
        return {"max_draft_tokens": 0}
    # Outputs are learned where they can be drafted from: by the task, or by this request.
    able_to_learn = {drafter, own.drafter} & set(that_use(Need.LEARNED))
    learns = own.learn and able_to_learn and (asked is None or asked.corpus in (None, task.name))
    return {
        "drafter": drafter,
        "max_draft_tokens": num_draft,
        "options": options,
        "corpus": corpus,
        "learn_tokens": own.learn_max_tokens if learns else 0,
        "persists": own.learn == "persist",
    }


def _check_most(num: float, task: TaskConfig, at: str) -> None:
    most = task.limits.max_draft_tokens
    if most is not None and num > most:
        raise LimitExceededError(f"at most {most}; got {num}.", at=at)


def _corpus_of(name: str, task: TaskConfig, drafter: str, known: DraftingTasks) -> str | None:
    """The corpus file that `speculation.corpus` names; None for "off"."""
    at = "speculation.corpus"
    users = that_use(Need.CORPUS)
    if drafter not in users:
        raise InvalidRequestError(
            f"the drafter {drafter} uses no corpus; {' and '.join(users)} do.", at=at
        )
    if name == "off":
        return None
    other = known.tasks.get(name)
    allowed = (task.name, *task.speculation.allowed_corpora)
    if other is None or name not in allowed or other.speculation.corpus is None:
        there = [
            n
            for n in dict.fromkeys(allowed)
            if n in known.tasks and known.tasks[n].speculation.corpus is not None
        ]
        raise InvalidRequestError(
            f"{echoed(name)} is not available; choose from {', '.join([*there, 'off'])}.", at=at
        )
    if (other.model or known.default_model) != (task.model or known.default_model):
        raise InvalidRequestError(f"the corpus of {name} is for another model.", at=at)
    return other.speculation.corpus


def _options_of(
    asked: SpeculationBody, task: TaskConfig, drafter: str, options: _Options
) -> _Options:
    """The task's drafter options with the request's own over them, within the task's limits."""
    merged = dict(options)
    for name, given in set_options(asked):
        at = f"speculation.{name}"
        if drafter != name:
            raise InvalidRequestError(
                f"these are options of the drafter {name}, and the request is drafted by "
                f"{drafter}.",
                at=at,
            )
        spec = spec_of(name)
        for key, value in given.items():
            if spec.option(key).counts_nodes:
                _check_most(value, task, f"{at}.{key}")
            merged[f"{name}.{key}"] = value
        own = {one.name: merged.get(f"{name}.{one.key}", one.default) for one in spec.fields}
        try:
            spec.options(**own)
        except OptionError as error:
            raise InvalidRequestError(f"{error.problem}.", at=f"{at}.{error.option}") from None
    return tuple(sorted(merged.items()))


def vocabulary_of(body: GenerationBody, task: TaskConfig) -> VocabularyParams:
    """The request's mode and verify_every within what the task allows. Raises
    InvalidRequestError."""
    own, asked = task.vocabulary, body.vocabulary
    mode, verify_every = own.mode, own.verify_every
    if asked is not None and asked.mode is not None:
        if asked.mode not in own.modes:
            raise InvalidRequestError(
                f"the task {task.name} allows {', '.join(own.modes)}; got {asked.mode}.",
                at="vocabulary.mode",
            )
        mode = asked.mode
    if asked is not None and asked.verify_every is not None:
        if mode != "exact":
            raise InvalidRequestError(
                f"for mode exact; this request's mode is {mode}.", at="vocabulary.verify_every"
            )
        verify_every = asked.verify_every
    if mode == "full":
        return _FULL
    return VocabularyParams(mode, own.profile, (verify_every or 0) if mode == "exact" else 0)


_FULL = VocabularyParams()
