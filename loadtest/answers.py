"""Many answers of an Engine in this process, each with its counts.

For programs that count (agreement, misses, ids) and time nothing: what runs beside a request never
changes its answer, so a batch is only a quicker way to the same figures.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress

from server.engine.engine import Engine
from server.types import Request

_TICK_S = 20.0


@dataclass(slots=True)
class Answer:
    """One choice, whole. `ids` hold an EOS or stop id, if one ended it."""

    ids: tuple[int, ...] = ()
    finish_reason: str = ""
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


def answer_all(
    engine: Engine, requests: Sequence[Request], what: str, console: Console, at_once: int = 16
) -> dict[str, Answer]:
    """The answers by request id, with progress: a bar on a terminal, else a line now and then.

    Raises RuntimeError when a request fails.
    """
    answers: dict[str, Answer] = {request.request_id: Answer() for request in requests}
    waiting = list(reversed(requests))
    num_open = num_done = 0
    printed_s = time.monotonic()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(what, total=len(requests))
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
                answer.num_drafted += delta.counts.num_drafted
                answer.num_accepted += delta.counts.num_accepted
                if delta.finish_reason is not None:
                    answer.finish_reason = delta.finish_reason
                    num_open, num_done = num_open - 1, num_done + 1
                    progress.update(bar, completed=num_done)
            if not console.is_terminal and time.monotonic() - printed_s > _TICK_S:
                printed_s = time.monotonic()
                print(f"{what}: {num_done} of {len(requests)}", file=sys.stderr, flush=True)
    return answers
