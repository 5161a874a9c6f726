"""TaskControl: what an engine keeps of tasks beyond a request, and what the API may ask of it.

When a whole request has finished well, its outputs go to the TaskStore. A new layer of learned
outputs means a new drafter. ("control", ...) messages report, reload and forget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from server.engine.batch import Int32
from server.engine.draft import DrafterRegistry
from server.engine.sequence import Sequence
from server.engine.task_store import TaskStore
from server.types import SpeculationParams


class TaskControl:
    """Keeps and reports what was learned of tasks. memory: None keeps nothing."""

    def __init__(self, drafters: DrafterRegistry, memory: TaskStore | None) -> None:
        self._drafters = drafters
        self._memory = memory
        self._outputs: dict[str, list[Int32] | None] = {}  # of open requests; None: not to learn

    @property
    def controls(self) -> dict[str, Callable[[Any], Any]]:
        """What ("control", ...) messages may call, by name, with plain values."""
        return {
            "task_report": self._report,
            "task_forget": self._forget,
            "drafters_reload": self._reload,
        }

    def take_learned(self, *, gives_way: bool = False) -> None:
        """Make drafters anew where the learned outputs have a new layer. gives_way: learning waits,
        for a request's first token does."""
        if self._memory is not None:
            self._memory.gives_way = gives_way
            for task, scope in self._memory.poll():
                self._drafters.forget(task, scope)

    def remember(self, sequence: Sequence, finished: bool, is_last: bool) -> None:
        """A choice has ended. finished: it ended well. is_last: its request has ended with it; then
        its outputs are learned, unless one of its choices did not end well."""
        memory = self._memory
        if memory is None:
            return
        memory.gives_way = False  # the step is over
        request, num_output = sequence.request, sequence.num_output
        if finished and num_output:
            scope, name = request.scope, sequence.drafter_name
            memory.observe(request.task, name, scope, sequence.num_steps, num_output)
        spec = request.speculation
        if spec.learn_tokens <= 0:
            return
        outputs = self._outputs.pop(request.request_id, [])
        if not finished:
            outputs = None
        elif outputs is not None and num_output:
            outputs.append(sequence.ids[sequence.prompt_len : sequence.num_tokens])
        if not is_last:
            self._outputs[request.request_id] = outputs
            return
        prompt = sequence.ids[: sequence.prompt_len]
        for output in outputs or ():
            memory.learn(
                request.task,
                request.scope,
                spec.corpus,
                spec.learn_tokens,
                prompt,
                output,
                spec.persists,
                rests=sequence.is_resting,
            )

    def _report(self, payload: Any) -> dict[str, Any]:
        """What the engine keeps of a task. payload: {"task", "drafter", "options", "corpus",
        "adapter"}."""
        if self._memory is None:
            return {}
        spec = SpeculationParams(
            payload["drafter"],
            1,
            tuple((name, value) for name, value in payload["options"]),
            payload["corpus"],
            adapter=payload.get("adapter", ""),
        )
        drafter = self._drafters.resolve(payload["task"], spec)
        return self._memory.report(payload["task"], drafter)

    def _reload(self, _: Any) -> None:
        """Make drafters anew for later requests; corpora may have changed."""
        self._drafters.forget()
        if self._memory is not None:
            self._memory.refresh()

    def _forget(self, payload: Any) -> None:
        """Drop what a task has learned. payload: {"task"}."""
        if self._memory is not None:
            self._memory.forget(payload["task"])
        self._drafters.forget(payload["task"])
