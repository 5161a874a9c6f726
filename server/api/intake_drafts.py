"""How a body drafts and what part of the head it computes, within its task's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.api.protocol import CompletionBody, SpeculationBody
from server.config import CORPUS_DRAFTERS, TaskConfig
from server.errors import (
    InvalidRequestError,
    LimitExceededError,
    UnsupportedFieldError,
    echoed,
)
from server.types import SpeculationParams, VocabularyParams

__all__ = ["DraftingTasks", "speculation_of", "vocabulary_of"]

PREDICTING_DRAFTER = "auto"
"""The drafter that uses a request's prediction; one that ignores it would ignore a field."""


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
        if not named and PREDICTING_DRAFTER in allowed:
            drafter = PREDICTING_DRAFTER
        if drafter != PREDICTING_DRAFTER or drafter not in known.drafters or num_draft == 0:
            raise UnsupportedFieldError(
                f"prediction: only the drafter {PREDICTING_DRAFTER} uses it, and here that is "
                f"{echoed(drafter)} with max_draft_tokens {num_draft}. Leave it out.",
                param="prediction",
            )
    options, corpus = own.options(), own.corpus
    if asked is not None:
        options = _options_of(asked, task, drafter, options)
        if asked.corpus is not None:
            corpus = _corpus_of(asked.corpus, task, drafter, known)
    if drafter == "off" or num_draft == 0:
        return SpeculationParams()
    learns = own.learn and (asked is None or asked.corpus in (None, task.name))
    return SpeculationParams(
        drafter, num_draft, options, corpus, learn_tokens=own.learn_max_tokens if learns else 0
    )


def _corpus_of(name: str, task: TaskConfig, drafter: str, known: DraftingTasks) -> str | None:
    """The corpus file that `speculation.corpus` names; None for "off"."""
    at = "speculation.corpus"
    if drafter not in CORPUS_DRAFTERS:
        raise InvalidRequestError(
            f"{at}: the drafter {drafter} uses no corpus; {' and '.join(CORPUS_DRAFTERS)} do.",
            param=at,
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
    for section, given in (("trie", asked.trie), ("mix", asked.mix)):
        if given is None:
            continue
        at = f"speculation.{section}"
        if drafter != section:
            raise InvalidRequestError(
                f"{at}: these are options of the drafter {section}, and the request is drafted by "
                f"{drafter}.",
                param=at,
            )
        for key, value in given.model_dump(by_alias=True, exclude_none=True).items():
            if most is not None and key in ("num_draft", "horizon") and value > most:
                raise LimitExceededError(
                    f"{at}.{key}: at most {most}; got {value}.", param=f"{at}.{key}"
                )
            merged[f"{section}.{key}"] = value
        if section == "trie" and not _prefix_fits(merged):
            raise InvalidRequestError(
                f"{at}.prefix_length: must be below n.", param=f"{at}.prefix_length"
            )
    return tuple(sorted(merged.items()))


def _prefix_fits(options: Mapping[str, Any]) -> bool:
    """Whether the trie's L_p is below n; 3 and 13 are the drafter's defaults."""
    prefix, n = options.get("trie.prefix_length", 3), options.get("trie.n", 13)
    return int(prefix) < int(n)


def vocabulary_of(body: CompletionBody, task: TaskConfig) -> VocabularyParams:
    """The request's mode and window within what the task allows. Raises InvalidRequestError."""
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
