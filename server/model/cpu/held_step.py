"""HeldStep: a plain step of one Batch that is launched again, with other numbers in its arrays.

What such a step is given is written down once, as compiled code reads it: reading some twenty
arrays from Python's objects takes 25 us where the step before has pushed them out of the caches.
"""
# numba infers the types of compiled functions.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, typeof, types

from server.engine.batch import Batch
from server.model.cpu.draws import Answers
from server.model.cpu.jobs import uncounted
from server.model.cpu.records import Ends, Int64, Rows, Work
from server.model.cpu.step import GIVEN, KeptStep, Tokens, Wanted
from server.model.cpu.team import run_at
from server.model.cpu.vector_ir import I64, intrinsic

_PLACE_BYTES = 8 << 10

StepInput = tuple[bool, Tokens, tuple[Rows, Ends], Int64, Wanted, Work]
"""What a step is given beside what is kept: the arguments of KeptStep.compute."""


@intrinsic
def _put(typingctx: Any, value: Any, address: Any) -> Any:
    """Write a value at an address; its arrays stay their owners'."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = args[0].type
        if context.get_abi_sizeof(kind) > _PLACE_BYTES:
            raise ValueError("what a step is given is larger than its place")
        b.store(uncounted(b, value, args[0]), b.inttoptr(args[1], kind.as_pointer()))
        return context.get_dummy_value()

    return types.void(value, types.intp), codegen


@intrinsic
def _point(typingctx: Any, address: Any, to: Any) -> Any:
    """Write the address `to` at an address."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[1], b.inttoptr(args[0], I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@njit(types.void(typeof(GIVEN), types.intp), nogil=True, cache=True, error_model="numpy")
def _hold(given, place):
    _put(given, place)


@njit(types.void(*[types.intp] * 5), nogil=True, cache=True, error_model="numpy")
def _run_held(share, room, place, sync, threads):
    _point(room, place)
    run_at(share, room, sync, threads)


class HeldStep:
    """A step that may come again. batch, wanted: its own. answers: what it fills, whose token_ids
    are wanted.greedy."""

    def __init__(self, batch: Batch, wanted: Wanted, answers: Answers) -> None:
        self.batch = batch
        self.wanted = wanted
        self.answers = answers
        self._kept: KeptStep | None = None
        self._given: StepInput | None = None
        self._memory = np.zeros(0, np.int64)
        self._call = (0, 0, 0, 0, 0)

    def is_ready(self, kept: KeptStep) -> bool:
        """Whether compute() does a step with what `kept` keeps."""
        return self._kept is kept

    def prepare(self, kept: KeptStep, given: StepInput) -> None:
        """Write down what the step is given, all of whose arrays stay the same."""
        self._memory = np.zeros(_PLACE_BYTES // 8, np.int64)
        place, work = self._memory.ctypes.data, given[-1]
        embeds, tokens, rows, *rest = given
        _hold((embeds, tokens, *rows, *rest), place)
        self._kept, self._given = kept, given
        self._call = (
            kept.share,
            kept.room.ctypes.data,
            place,
            work.sync.ctypes.data,
            work.threads,
        )

    def compute(self) -> None:
        """The step, with what its arrays hold now; see KeptStep.compute. Fills `wanted`."""
        _run_held(*self._call)
