"""TaskControl: what an engine keeps of tasks beyond a request, and what the API may ask of it.

Finished outputs are handed on to the TaskStore once their whole request has finished well; new
layers of learned outputs become new drafters; ("control", ...) messages report, reload and forget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from server.engine.batch import Int32
from server.engine.drafting import DrafterRegistry
from server.engine.sequence import Sequence
from server.engine.task_store import TaskStore
from server.types import SpeculationParams


class TaskControl:
    """memory: None keeps nothing."""

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

    def take_learned(self) -> None:
        """New drafters for those whose learned outputs have a new layer."""
        if self._memory is not None:
            for task, scope in self._memory.poll():
                self._drafters.forget(task, scope)

    def remember(self, sequence: Sequence, finished: bool, is_last: bool) -> None:
        """Take what a choice ended with. finished: it ended well. is_last: so has its request,
        and its outputs are learned, unless another of its choices did not end well."""
        memory = self._memory
        if memory is None:
            return
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
            )

    def _report(self, payload: Any) -> dict[str, Any]:
        """{"task", "drafter", "options", "corpus", "adapter"} of a task."""
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
        """Drafters are made anew for requests that come; corpora may have changed."""
        self._drafters.forget()
        if self._memory is not None:
            self._memory.refresh()

    def _forget(self, payload: Any) -> None:
        """{"task"}: what the task has learned is dropped."""
        if self._memory is not None:
            self._memory.forget(payload["task"])
        self._drafters.forget(payload["task"])
