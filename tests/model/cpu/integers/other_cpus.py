"""Kernels for CPUs that this one may not be: code made for them, and processes that choose one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from drafters.target import TARGETS
from server.model.cpu.integers.forms import FORMS

ROOT = Path(__file__).parents[4]


def said(module: str, code: str, cpu: str) -> str:
    """What code prints in a process that compiles for a CPU. module: of this folder, which the code
    calls by its name."""
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.model.cpu.integers import {module}; {code}"],
        env={**os.environ, "TAILOR_CPU": cpu, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def compile_kernels(
    define: Callable[..., Any], triple: str, cpu: str, target: str, folder: str, **options: Any
) -> None:
    """Write what LLVM makes of every form's kernel, kernels.s and kernels.o.

    define: puts a form's kernel into a module. triple, cpu: LLVM's words. target: ours. options: of
    the target machine."""
    from llvmlite import ir

    module = ir.Module("kernels")
    module.triple = triple
    for form in FORMS:
        define(module, form).linkage = "external"
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu, TARGETS[target].told, opt=2, **options
    )
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    Path(folder, "kernels.s").write_text(machine.emit_assembly(parsed))
    Path(folder, "kernels.o").write_bytes(machine.emit_object(parsed))
