"""A CPU that has neither AVX2 nor a conversion of float16, as many virtual machines are given."""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from server.model.cpu.kernels import ir as words
from tests.model import families
from tests.model.batches import Pages, prompt_step, run
from tests.model.cpu_models import cpu_runner
from tests.processes import run_python


def first_ids() -> list[int]:
    """What a model draws behind a prompt, with each type of KV."""
    model, table = families.build("llama"), Pages(64, seed=1).sequence(64)
    batch = prompt_step([table], [families.tokens(40, 0)])
    runners = (cpu_runner(model, kv_dtype=kind) for kind in ("float32", "float16", "int8"))
    return [int(run(runner, batch).token_ids[0]) for runner in runners]


def test_a_step_is_the_same_there() -> None:
    code = "from tests.model.cpu.test_old_cpus import first_ids; print(first_ids())"
    assert run_python("-c", code, TAILOR_CPU="x86-64").strip() == str(first_ids())


@pytest.mark.parametrize("width", [1, 16])
def test_float16_is_as_exact_without_an_instruction_for_it(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(words, "HAS_HALVES", False)
    module = ir.Module("halves")

    def add(name: str, of: Any, sizes: tuple[int, int], convert: Any) -> None:
        def emit(b: Any, args: Any) -> None:
            loop = words.Loop(b, args[2], [])
            source, target = (
                b.add(place, b.mul(loop.index, words.i64(size * width)))
                for place, size in zip(args, sizes, strict=False)
            )
            kind = of if width == 1 else ir.VectorType(of, width)
            words.put(b, convert(b, words.at(b, source, 0, kind, 1)), target, 0, 1)
            loop.close([])

        words.function(module, name, 3, emit).linkage = ""

    add("widen", words.I16, (2, 4), words.from_half)
    add("narrow", words.F32, (4, 2), words.to_half)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
    engine.finalize_object()

    def call(name: str, source: Any, kind: Any) -> Any:
        out = np.zeros(source.shape[0], kind)
        numbers = (
            ctypes.c_int64(n)
            for n in (source.ctypes.data, out.ctypes.data, source.shape[0] // width)
        )
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(engine.get_function_address(name))(*numbers)
        return out

    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    wide = call("widen", halves, np.float32)
    np.testing.assert_array_equal(wide, halves.astype(np.float32))
    finite = np.sort(wide[np.isfinite(wide)])
    between = (finite[1:].astype(np.float64) + finite[:-1]) / 2  # ties
    near = np.nextafter(between.astype(np.float32), np.float32(0))
    given = np.concatenate((finite, between.astype(np.float32), near, [np.float32(np.nan)] * 5))
    given = given[: given.shape[0] // 16 * 16]
    assert np.isnan(given[-1])
    told = call("narrow", given, np.uint16).view(np.float16)
    np.testing.assert_array_equal(told, given.astype(np.float16))
