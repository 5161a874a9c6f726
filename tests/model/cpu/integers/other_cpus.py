"""Kernels for CPUs that this one may not be: code made for them, and processes that choose one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm

from drafters.atomic_file import replacing
from drafters.target import TARGETS
from server.model.cpu.integers.forms import BY_NAME, FORMS
from tests.kept import kept_folder
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
    else kernels.s of MIXED_FORMS. What the same LLVM has made of the same words is not made again.

    define: puts a form's kernel into a module. triple, cpu: LLVM's words. target: ours. options: of
    the target machine."""
    from llvmlite import ir

    module = ir.Module("kernels")
    module.triple = triple
    for form in FORMS if runs else MIXED_FORMS:
        define(module, form).linkage = "external"
    told = {"cpu": cpu, "features": TARGETS[target].told, "opt": 2, **options}
    kept = kept_folder("kernels", str(module), triple, told, runs, llvm.llvm_version_info)
    names = ("kernels.s", "kernels.o") if runs else ("kernels.s",)
    if not all((kept / name).exists() for name in names):
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        machine = llvm.Target.from_triple(triple).create_target_machine(**told)
        parsed = llvm.parse_assembly(str(module))
        parsed.verify()
        for name in names:
            emit = machine.emit_object if name == "kernels.o" else machine.emit_assembly
            made = emit(parsed)
            with replacing(kept / name) as file:
                file.write(made if isinstance(made, bytes) else made.encode())
    for name in names:
        shutil.copy(kept / name, folder)
