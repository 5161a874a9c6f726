"""Kernels for CPUs that this one may not be: code made for them, and processes that choose one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from drafters.target import TARGETS
from server.model.cpu.integers.forms import BY_NAME, FORMS
from tests.processes import run_python

MIXED_FORMS = [BY_NAME[name] for name in ("int8", "q8_0", "q5_1", "q5_k", "q6_k")]
"""Forms that have between them all that any form is made of."""


def said(module: str, code: str, cpu: str) -> str:
    """What code prints in a process that compiles for a CPU. module: of this folder, which the code
    calls by its name."""
    code = f"from tests.model.cpu.integers import {module}; {code}"
    return run_python("-c", code, TAILOR_CPU=cpu).strip()


def compile_kernels(
    define: Callable[..., Any], triple: str, cpu: str, target: str, folder: str, runs: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Write what LLVM makes of every form's kernel, kernels.s and kernels.o, where that `runs`;
    else kernels.s of MIXED_FORMS.

    define: puts a form's kernel into a module. triple, cpu: LLVM's words. target: ours. options: of
    the target machine."""
    from llvmlite import ir

    module = ir.Module("kernels")
    module.triple = triple
    for form in FORMS if runs else MIXED_FORMS:
        define(module, form).linkage = "external"
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu, TARGETS[target].told, opt=2, **options
    )
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    Path(folder, "kernels.s").write_text(machine.emit_assembly(parsed))
    if runs:
        Path(folder, "kernels.o").write_bytes(machine.emit_object(parsed))
