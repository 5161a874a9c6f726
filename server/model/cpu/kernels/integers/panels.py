"""The integer kernels as functions: one a form (cpu/integers/forms.py), void (address of a job).

records.JOB_ITEMS has what a job says. What not: their code (vectors.py, tiles.py), which panels and
rows a thread takes (kernels/integer_linear.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir

from drafters.jit import Raw
from server.model.cpu.integers.forms import FORMS, Form, kernel_name
from server.model.cpu.kernels.integers.tiles import define_tiled_rows
from server.model.cpu.kernels.integers.vectors import define_rows
from server.model.cpu.kernels.ir import I64, at
from server.model.cpu.records import JOB_ITEMS
from server.model.cpu.sizes import TILES


def _define(form: Form, module: Any) -> None:
    """All rows of a job against its panel."""
    fn = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64]), kernel_name(form))
    b = ir.IRBuilder(fn.append_basic_block("entry"))
    numbers = [at(b, fn.args[0], 8 * i, I64, 8) for i in range(JOB_ITEMS)]
    if TILES:
        b.call(define_tiled_rows(module, form), numbers)
    else:
        b.call(define_rows(module, form), numbers[:-1])
    b.ret_void()


KERNELS = [Raw(kernel_name(form), __name__, partial(_define, form)) for form in FORMS]
