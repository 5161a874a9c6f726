"""Kernels for CPUs that this one may not be: code made for them, and processes that choose one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from drafters.atomic_file import replacing
from drafters.library import digest
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


def kernels_by(call: str, cpu: str, folder: Path, *, defined_in: str, runs: bool) -> Path:
    """`folder`, with what a test's function, which calls compile_kernels, makes in a process that
    compiles for a CPU: kernels.s, and kernels.o where that `runs`. What the same LLVM has made of
    the same sources is not made again. call: "module.function" of this folder, which is given a
    folder and `runs`. defined_in: the module that puts kernels into LLVM's."""
    module = call.partition(".")[0]
    own = [path.read_text() for path in (Path(__file__), Path(__file__).with_name(f"{module}.py"))]
    llvm = metadata.version("llvmlite")
    kept = kept_folder("kernels", digest((defined_in,)), own, call, cpu, runs, llvm)
    if not (kept / "kernels.s").exists():  # it is written last
        said(module, f"{call}({str(kept)!r}, {runs})", cpu)
    return Path(shutil.copytree(kept, folder, dirs_exist_ok=True))


def compile_kernels(
    define: Callable[..., Any], triple: str, cpu: str, target: str, folder: str, runs: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Write what LLVM makes of every form's kernel, kernels.o and kernels.s, where that `runs`;
    else kernels.s of MIXED_FORMS.

    define: puts a form's kernel into a module. triple, cpu: LLVM's words. target: ours. options: of
    the target machine."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    module = ir.Module("kernels")
    module.triple = triple
    for form in FORMS if runs else MIXED_FORMS:
        define(module, form).linkage = "external"
    told = {"cpu": cpu, "features": TARGETS[target].told, "opt": 2, **options}
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(**told)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    if runs:
        with replacing(Path(folder) / "kernels.o") as file:
            file.write(machine.emit_object(parsed))
    with replacing(Path(folder) / "kernels.s") as file:
        file.write(machine.emit_assembly(parsed).encode())
