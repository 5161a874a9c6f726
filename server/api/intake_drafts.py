"""How a request drafts and which part of the head it computes, within its task's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drafters.catalog import Need, spec_of, that_use
from drafters.options import OptionError
from server.api.protocol import CompletionBody, SpeculationBody
from server.config import TaskConfig
from server.config.drafter_sections import set_options
from server.errors import (
    InvalidRequestError,
    LimitExceededError,
    UnsupportedFieldError,
    echoed,
)
from server.types import SpeculationParams, VocabularyParams


@dataclass(frozen=True, slots=True)
class DraftingTasks:
    """What a request may draft with. drafters: names that engines know. tasks: by name, for their
    corpora. default_model: of tasks that name none."""

    drafters: Sequence[str]
    tasks: Mapping[str, TaskConfig]
    default_model: str


def speculation_of(
    body: CompletionBody, task: TaskConfig, known: DraftingTasks
) -> SpeculationParams:
    """How a request drafts, within its task's limits. Raises InvalidRequestError and its kin."""
    own, asked = task.speculation, body.speculation
    drafter, num_draft = own.drafter, own.max_draft_tokens
    if asked is not None and asked.drafter is not None:
        allowed = known.drafters if own.allowed_drafters is None else own.allowed_drafters
        if asked.drafter not in allowed or asked.drafter not in known.drafters:
            raise InvalidRequestError(
                f"speculation.drafter: {echoed(asked.drafter)} is not available; choose from "
                f"{', '.join(d for d in known.drafters if d in allowed)}.",
                param="speculation.drafter",
            )
        drafter = asked.drafter
    if asked is not None and asked.max_draft_tokens is not None:
        most = task.limits.max_draft_tokens
        if most is not None and asked.max_draft_tokens > most:
            raise LimitExceededError(
                f"speculation.max_draft_tokens: at most {most}; got {asked.max_draft_tokens}.",
                param="speculation.max_draft_tokens",
            )
        num_draft = asked.max_draft_tokens
    if body.prediction is not None:
        named = asked is not None and asked.drafter is not None
        allowed = known.drafters if own.allowed_drafters is None else own.allowed_drafters
        # A drafter that does not use predictions would ignore the field: it is refused.
        predicting = [name for name in that_use(Need.PREDICTION) if name in known.drafters]
        able = [name for name in predicting if name in allowed]
        if not named and drafter not in predicting and able:
            drafter = able[0]
        if drafter not in predicting or num_draft == 0:
            raise UnsupportedFieldError(
                f"prediction: only the drafter {' or '.join(that_use(Need.PREDICTION))} uses it, "
                f"and here that is {echoed(drafter)} with max_draft_tokens {num_draft}. Leave it "
                "out.",
                param="prediction",
            )
    options, corpus = own.options(), own.corpus
    if asked is not None:
        options = _options_of(asked, task, drafter, options)
        if asked.corpus is not None:
            corpus = _corpus_of(asked.corpus, task, drafter, known)
    if drafter == "off" or num_draft == 0:
        return SpeculationParams(max_draft_tokens=0)
    # Outputs are learned where they can be drafted from: by the task, or by this request.
    able_to_learn = {drafter, own.drafter} & set(that_use(Need.LEARNED))
    learns = own.learn and able_to_learn and (asked is None or asked.corpus in (None, task.name))
    return SpeculationParams(
        drafter,
        num_draft,
        options,
        corpus,
        learn_tokens=own.learn_max_tokens if learns else 0,
        persists=own.learn == "persist",
    )


def _corpus_of(name: str, task: TaskConfig, drafter: str, known: DraftingTasks) -> str | None:
    """The corpus file that `speculation.corpus` names; None for "off"."""
    at = "speculation.corpus"
    users = that_use(Need.CORPUS)
    if drafter not in users:
        raise InvalidRequestError(
            f"{at}: the drafter {drafter} uses no corpus; {' and '.join(users)} do.", param=at
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
            f"{at}: {echoed(name)} is not available; choose from {', '.join([*there, 'off'])}.",
            param=at,
        )
    if (other.model or known.default_model) != (task.model or known.default_model):
        raise InvalidRequestError(f"{at}: the corpus of {name} is for another model.", param=at)
    return other.speculation.corpus


def _options_of(
    asked: SpeculationBody,
    task: TaskConfig,
    drafter: str,
    options: tuple[tuple[str, float | int | str | bool], ...],
) -> tuple[tuple[str, float | int | str | bool], ...]:
    """The task's drafter options with the request's own over them, within the task's limits."""
    merged = dict(options)
    most = task.limits.max_draft_tokens
    for name, given in set_options(asked):
        at = f"speculation.{name}"
        if drafter != name:
            raise InvalidRequestError(
                f"{at}: these are options of the drafter {name}, and the request is drafted by "
                f"{drafter}.",
                param=at,
            )
        spec = spec_of(name)
        for key, value in given.items():
            if most is not None and spec.option(key).counts_nodes and value > most:
                raise LimitExceededError(
                    f"{at}.{key}: at most {most}; got {value}.", param=f"{at}.{key}"
                )
            merged[f"{name}.{key}"] = value
        own = {one.name: merged.get(f"{name}.{one.key}", one.default) for one in spec.fields}
        try:
            spec.options(**own)
        except OptionError as error:
            at = f"{at}.{error.option}"
            raise InvalidRequestError(f"{at}: {error.problem}.", param=at) from None
    return tuple(sorted(merged.items()))


def vocabulary_of(body: CompletionBody, task: TaskConfig) -> VocabularyParams:
    """The request's mode and verify_every within what the task allows. Raises
    InvalidRequestError."""
    own, asked = task.vocabulary, body.vocabulary
    mode, verify_every = own.mode, own.verify_every
    if asked is not None and asked.mode is not None:
        if asked.mode not in own.modes:
            raise InvalidRequestError(
                f"vocabulary.mode: the task {task.name} allows {', '.join(own.modes)}; got "
                f"{asked.mode}.",
                param="vocabulary.mode",
            )
        mode = asked.mode
    if asked is not None and asked.verify_every is not None:
        if mode != "exact":
            raise InvalidRequestError(
                f"vocabulary.verify_every is for mode exact; this request's mode is {mode}.",
                param="vocabulary.verify_every",
            )
        verify_every = asked.verify_every
    if mode == "full":
        return VocabularyParams()
    return VocabularyParams(mode, own.profile, (verify_every or 0) if mode == "exact" else 0)
