"""Results: what a Runner drew in one step, with the reasons of the draws that have no answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.engine.batch import NO_TOKEN_LEFT, DrawError, Drawn
from server.engine.sequence import Sequence
from server.types import TokenLogprob


class StepFailedError(Exception):
    """The runner raised `error`: the step has no results."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class Results:
    """A step's results. drawn: as the runner returned it. ids: its token ids as a list, -1 where a
    draw failed. problems: why, by the index of the draw. model_s: seconds of the forward pass."""

    drawn: Drawn
    ids: list[int]
    problems: dict[int, str]
    model_s: float = 0.0

    def problem(self, draw: int) -> str:
        """Why a draw has no answer."""
        return self.problems.get(draw, NO_TOKEN_LEFT)

    def logprob(self, draw: int) -> TokenLogprob:
        """The logprob of a drawn id and the likeliest beside it."""
        drawn = self.drawn
        return TokenLogprob(
            int(drawn.token_ids[draw]),
            float(drawn.logprobs[draw]),
            int(drawn.ranks[draw]),
            tuple(drawn.top[draw]),
        )


def guarded(call: Callable[..., None], *arguments: Any) -> None:
    """Call the runner. Raises StepFailedError for whatever it raises."""
    try:
        call(*arguments)
    except Exception as error:
        raise StepFailedError(error) from error


def wait_for(draw: Callable[[], Drawn], clock: Callable[[], float] = lambda: 0.0) -> Results:
    """What `draw` returns. clock: the step's seconds so far, used where the runner gives none.

    A draw without an answer gets an entry in `problems`: only its request fails. Raises
    StepFailedError for anything else that `draw` raises.
    """
    problems: dict[int, str] = {}
    try:
        drawn = draw()
    except DrawError as error:
        problems, drawn = dict(error.failed), error.drawn
    except Exception as error:
        raise StepFailedError(error) from error
    return Results(drawn, drawn.token_ids.tolist(), problems, drawn.model_s or clock())


def draw_failure(problem: str, sequence: Sequence) -> tuple[str, str]:
    """(message, code) for a request of which no token could be drawn."""
    if problem != NO_TOKEN_LEFT:
        return problem, "engine_error"
    grammar = sequence.grammar
    if grammar is not None and grammar.problem and not grammar.is_dead_end:
        return f"the grammar cannot be followed any further: {grammar.problem}", "grammar_limit"
    what = "grammar, " if grammar is not None else ""
    return (
        f"No token satisfies the request's constraints after {sequence.num_output} tokens: "
        f"{what}allowed_token_ids, logit_bias and min_tokens together exclude every one.",
        "constraint_unsatisfiable",
    )
