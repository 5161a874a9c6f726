"""The integer kernels: rows of int8 activations against one panel of quantised weights.

What: one C function a form (forms.py), compiled when it is first needed, and what it is told. What
not: their code (vector_kernels.py, tile_kernels.py), which panels and rows a thread takes
(product.py), making activations (quantise.py).
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import cfunc, types

from server.model.cpu.integers.emit import I64, at
from server.model.cpu.integers.forms import FORMS, Form
from server.model.cpu.integers.tile_kernels import TILES, define_tiled_rows
from server.model.cpu.integers.vector_kernels import define_rows
from server.model.cpu.vector_ir import intrinsic

__all__ = ["JOB_ITEMS", "call_kernel", "kernel_address"]

JOB_ITEMS = 11
"""int64 numbers that tell a kernel what to do: x, bytes between its rows, figures, bytes between
their rows, rows, panel, count, out, bytes between its rows, next panel, rows from which on tiles
multiply. x int8 [rows, padded inputs], figures as quantise.py writes them, out float32; x, figures,
panel, out, next panel: addresses; count: blocks of 32 inputs of the form `int8`, else super-blocks.
The next panel, as long as this one, is fetched from memory while the first rows are multiplied; 0:
none."""


def _make_rows(form: Form) -> Any:
    """All rows against one panel of a form: (address of a job)."""

    @intrinsic
    def rows(typingctx: Any, job: Any) -> Any:
        sig = types.void(types.intp)

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            numbers = [at(b, args[0], 8 * i, I64, 8) for i in range(JOB_ITEMS)]
            if TILES:
                b.call(define_tiled_rows(b.module, form), numbers)
            else:
                b.call(define_rows(b.module, form), numbers[:-1])
            return context.get_dummy_value()

        return sig, codegen

    return rows


(_int8_rows, _q8_0_rows, _q4_0_rows, _q4_1_rows, _q5_0_rows, _q5_1_rows, _q4_k_rows, _q5_k_rows,
 _q6_k_rows) = (_make_rows(form) for form in FORMS)  # fmt: skip


# One C function a form, so that each is compiled once, when it is first needed, and not again into
# every numba function that multiplies.


def _int8(job):
    _int8_rows(job)


def _q8_0(job):
    _q8_0_rows(job)


def _q4_0(job):
    _q4_0_rows(job)


def _q4_1(job):
    _q4_1_rows(job)


def _q5_0(job):
    _q5_0_rows(job)


def _q5_1(job):
    _q5_1_rows(job)


def _q4_k(job):
    _q4_k_rows(job)


def _q5_k(job):
    _q5_k_rows(job)


def _q6_k(job):
    _q6_k_rows(job)


_PYTHON = (_int8, _q8_0, _q4_0, _q4_1, _q5_0, _q5_1, _q4_k, _q5_k, _q6_k)
_made: dict[int, Any] = {}  # C functions live as long as the process


def kernel_address(form: Form) -> int:
    """Address of the form's kernel, for call_kernel; compiled when it is first asked for."""
    made = _made.get(form.number)
    if made is None:
        sig = types.void(types.intp)
        made = _made[form.number] = cfunc(sig, cache=True)(_PYTHON[form.number])
    return int(made.address or 0)


@intrinsic
def call_kernel(typingctx: Any, kernel: Any, job: Any) -> Any:
    """Rows of int8 activations against one panel: out[:, 0:PANEL].

    kernel: from kernel_address. job: address of JOB_ITEMS int64.
    """
    sig = types.void(types.intp, types.intp)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64]).as_pointer()
        b.call(b.inttoptr(args[0], kind), [args[1]])
        return context.get_dummy_value()

    return sig, codegen
