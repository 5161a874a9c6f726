"""Many answers of an Engine in this process, each with its counts.

For programs that count (agreement, misses, ids) and time nothing: what runs beside a request never
changes its answer, so a batch is only a quicker way to the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from server.commands import recorder
from server.engine.engine import Engine
from server.types import Request


@dataclass(slots=True)
class Answer:
    """One choice, whole. `ids` hold an EOS or stop id, if one ended it. by_source: draft tokens
    that were offered, and accepted."""

    ids: tuple[int, ...] = ()
    num_steps: int = 0
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)


def answered(found: recorder.Answer | recorder.Failure) -> recorder.Answer:
    """An answer of `ask_engine`. Raises RuntimeError for a failure."""
    if isinstance(found, recorder.Failure):
        raise RuntimeError(found.message)
    return found


def answer_all(
    engine: Engine,
    requests: Sequence[Request],
    at_once: int = 16,
    told: Callable[[int], None] = lambda _: None,
) -> dict[str, Answer]:
    """The answers by request id. told: called with the number of those that are done.

    Raises RuntimeError when a request fails.
    """
    answers: dict[str, Answer] = {request.request_id: Answer() for request in requests}
    waiting = list(reversed(requests))
    num_open = num_done = 0
    while num_done < len(requests):
        while waiting and num_open < at_once:
            engine.submit(waiting.pop())
            num_open += 1
        for delta in engine.step():
            if delta.finish_reason == "error":
                raise RuntimeError(f"{delta.request_id}: {delta.error}")
            answer = answers[delta.request_id]
            answer.ids += tuple(delta.token_ids)
            answer.num_steps += delta.counts.num_steps
            for source, drafted, accepted in delta.counts.by_source:
                before = answer.by_source.get(source, (0, 0))
                answer.by_source[source] = (before[0] + drafted, before[1] + accepted)
            if delta.finish_reason is not None:
                num_open, num_done = num_open - 1, num_done + 1
                told(num_done)
    return answers
