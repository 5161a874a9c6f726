"""The compiler of compiled functions (drafters/jit.py): numba's, for a CPU that may be another one.

    echo MODULE FILE | python -m drafters.ahead TARGET     a module's object file, one a line

It runs in a process of its own, as numba is told there, once, which CPU to compile for. numba types
each function and writes its LLVM IR; all that an entry calls is then optimised with it, once, and
becomes one object file a module, which needs the C library and its mathematics and nothing else.
"""

# mypy: allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, codegen, cpu, registry
from numba.core.callconv import CPUCallConv
from numba.core.compiler_lock import global_compiler_lock
from numba.np.arrayobj import populate_array

from drafters.atomic_file import replacing
from drafters.jit import Entry, Function, Raw
from drafters.library import object_path, read_again, sealed
from drafters.target import NATIVE, TARGETS, Target, native

_I64 = ir.IntType(64)
_I8 = ir.IntType(8)


# --- numba, for another CPU -----------------------------------------------------------------------


class _Library(codegen.CPUCodeLibrary):
    """One function's IR. It is optimised where it is linked into an object, and not before, nor
    again for each function that calls it: of a step's time to compile that was two thirds."""

    def _optimize_final_module(self) -> None:
        pass

    def optimise(self) -> None:
        """For an object."""
        super()._optimize_final_module()

    def _finalize_specific(self) -> None:
        pass

    def _verify_declare_only_symbols(self) -> None:
        pass

    def get_pointer_to_function(self, name: str) -> int:
        """Nothing runs here."""
        return 0


class _Codegen(codegen.CPUCodegen):
    """numba's, for `target`."""

    _library_class = _Library
    target: Target

    def _init(self, llvm_module: Any) -> None:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        self._tm = _machine(self.target)
        self._tm_features = self.target.told
        self._engine: Any = None
        self._target_data = self._tm.target_data
        self._data_layout = str(self._target_data)
        self._loopvect, self._opt_level = False, 0

    def _create_empty_module(self, name: str) -> Any:
        module = super()._create_empty_module(name)
        module.triple = self.target.triple or llvm.get_process_triple()
        return module

    def _add_module(self, module: Any) -> None:
        pass

    def _check_llvm_bugs(self) -> None:
        pass

    def set_env(self, env_name: str, env: Any) -> None:
        """Nothing runs here."""


def _machine(target: Target) -> Any:
    triple, name, features = target.triple, target.cpu, target.told
    if target.name == NATIVE:
        triple, name = llvm.get_process_triple(), llvm.get_host_cpu_name()
        features = llvm.get_host_cpu_features().flatten()
    found = llvm.Target.from_triple(triple)
    return found.create_target_machine(name, features, opt=3, reloc="pic", codemodel="default")


def set_target(target: Target) -> None:
    """Have numba compile for a CPU; before it compiles anything, once a process."""
    _Codegen.target = target
    numbas: Any = codegen
    numbas.JITCPUCodegen = _Codegen
    context: Any = cpu.CPUContext
    for name in ("create_cpython_wrapper", "create_cfunc_wrapper"):
        setattr(context, name, lambda *_, **__: None)
    # Any builtin function, each another one: numba tells functions apart by it.
    context.get_executable = lambda *_: [].append
    convention: Any = CPUCallConv  # a place in a source would be one on this machine
    convention.build_excinfo_struct = lambda _, exc, arguments, *__, **___: (exc, arguments, None)


# --- signatures -----------------------------------------------------------------------------------


def numba_type(hint: Any) -> Any:
    """The numba type that an annotation stands for. Raises TypeError for one that has none."""
    if hint is None or hint is type(None):
        return types.none
    scalars = {int: types.int64, float: types.float64, bool: types.boolean}
    if hint in scalars:
        return scalars[hint]
    if isinstance(hint, type) and issubclass(hint, np.generic):
        return numba.from_dtype(np.dtype(hint))
    if hasattr(hint, "_fields"):
        hints = get_type_hints(hint, include_extras=True)
        items = [numba_type(hints[name]) for name in hint._fields]
        return types.BaseTuple.from_types(items, hint)
    axes = 1
    if hasattr(hint, "__metadata__"):
        axes, hint = hint.__metadata__[0], hint.__origin__
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        return types.Tuple([numba_type(item) for item in arguments])
    if get_origin(hint) is np.ndarray:
        (scalar,) = get_args(arguments[1])
        return types.Array(numba.from_dtype(np.dtype(scalar)), axes, "C")
    raise TypeError(f"compiled functions take no {hint}")


def _items(kind: Any) -> list[Any]:
    """The types of a tuple's items."""
    return list(kind)


def layout(kind: Any) -> bytes:
    """How door.c writes or reads a value of a numba type."""
    if isinstance(kind, types.Array):
        dtype = numba.np.numpy_support.as_dtype(kind.dtype)
        return b"A" + dtype.kind.encode() + bytes((dtype.itemsize, kind.ndim))
    if isinstance(kind, types.BaseTuple):
        return b"(" + bytes((len(kind),)) + b"".join(layout(item) for item in _items(kind))
    if isinstance(kind, types.Boolean):
        return b"b"
    if isinstance(kind, types.Integer):
        return b"i"
    if isinstance(kind, types.Float):
        return b"f"
    raise TypeError(f"Python takes and gives no {kind}")


# --- functions behind doors -----------------------------------------------------------------------


class _Words:
    """Reads values from an address (int64), word by word."""

    def __init__(self, context: Any, b: Any, address: Any) -> None:
        self._context, self._b = context, b
        self._at = b.inttoptr(address, _I64.as_pointer())
        self._num = 0

    def next(self, kind: Any) -> Any:
        """The next value."""
        b, context = self._b, self._context
        if isinstance(kind, types.BaseTuple):
            return context.make_tuple(b, kind, [self.next(item) for item in _items(kind)])
        word = self._word()
        if isinstance(kind, types.Array):
            return self._array(kind, word)
        if isinstance(kind, types.Boolean):
            return b.icmp_signed("!=", word, _I64(0))
        if isinstance(kind, types.Float):
            number = b.bitcast(word, ir.DoubleType())
            return number if kind.bitwidth == 64 else b.fptrunc(number, ir.FloatType())
        return word if kind.bitwidth == 64 else b.trunc(word, ir.IntType(kind.bitwidth))

    def _word(self) -> Any:
        self._num += 1
        return self._b.load(self._b.gep(self._at, [_I64(self._num - 1)]))

    def _array(self, kind: Any, address: Any) -> Any:
        """An array that nobody counts references to."""
        b, context = self._b, self._context
        shape = [self._word() for _ in range(kind.ndim)]
        size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
        strides: list[Any] = [_I64(size)]
        for length in reversed(shape[1:]):
            strides.insert(0, b.mul(strides[0], length))
        array = context.make_array(kind)(context, b)
        data = b.inttoptr(address, context.get_data_type(kind.dtype).as_pointer())
        populate_array(array, data, shape, strides, _I64(size), None)
        return array._getvalue()


def _write(context: Any, b: Any, kind: Any, value: Any, results: Any, at: int) -> int:
    """Store a result's words from `at` on; where the next one goes."""
    if isinstance(kind, types.BaseTuple):
        for i, item in enumerate(_items(kind)):
            at = _write(context, b, item, b.extract_value(value, i), results, at)
        return at
    if isinstance(kind, types.Boolean):
        word = b.zext(value, _I64)
    elif isinstance(kind, types.Float):
        wide = value if kind.bitwidth == 64 else b.fpext(value, ir.DoubleType())
        word = b.bitcast(wide, _I64)
    elif kind.bitwidth == 64:
        word = value
    else:
        word = (b.sext if kind.signed else b.zext)(value, _I64)
    b.store(word, b.gep(results, [_I64(at)]))
    return at + 1


class _Object:
    """A module's functions on their way into one object file."""

    def __init__(self, name: str) -> None:
        target: Any = registry.cpu_target
        self.context, self.typing = target.target_context, target.typing_context
        self.context.refresh()
        self.typing.refresh()
        self._name = name
        self._library = self.context.codegen().create_library(name)
        self._exported: set[str] = set()
        self._told: dict[str, list[str]] = {}

    def _called(self, module: Any, function: Function, args: Sequence[Any]) -> Any:
        """(compile result, its declaration in a module) of a function for types of arguments."""
        found = function.dispatcher
        found.compile(tuple(args))
        result = found.overloads[tuple(args)]
        self._library.add_linking_library(result.library)
        kind = self.context.call_conv.get_function_type(
            result.fndesc.restype, result.fndesc.argtypes
        )
        return result, cgutils.get_or_insert_function(module, kind, result.fndesc.llvm_func_name)

    def _call(self, b: Any, function: Function, args: Sequence[Any], values: Sequence[Any]) -> Any:
        """(what failed or 0, result, its type)"""
        result, callee = self._called(b.module, function, args)
        status, value = self.context.call_conv.call_function(
            b, callee, result.fndesc.restype, result.fndesc.argtypes, values
        )
        known = b.icmp_signed(">=", status.code, ir.Constant(status.code.type, 1))
        told = b.select(known, b.ptrtoint(status.excinfoptr, _I64), _I64(1))
        return b.select(status.is_error, told, _I64(0)), value, result.fndesc.restype

    def _function(self, module: Any, symbol: str, seconds: type[Any] | Any) -> tuple[Any, Any]:
        kind = ir.FunctionType(_I64, [_I64, seconds])
        fn = ir.Function(module, kind, symbol)
        return fn, ir.IRBuilder(fn.append_basic_block("entry"))

    def add(self, name: str, entry: Entry) -> None:
        """A function that Python calls."""
        hints = get_type_hints(entry.py_func, include_extras=True)
        names = entry.py_func.__code__.co_varnames[: entry.py_func.__code__.co_argcount]
        kinds = [numba_type(hints[argument]) for argument in names]
        symbol = f"{self._name}.{name}"
        module = self.context.create_module(symbol)
        assert entry.function is not None
        fn, b = self._function(module, symbol, _I64.as_pointer())
        if entry.runs is None:
            words = _Words(self.context, b, fn.args[0])
            values = [words.next(kind) for kind in kinds]
            failed, value, result = self._call(b, entry.function, kinds, values)
            wanted = numba_type(hints["return"])
            if self.typing.can_convert(result, wanted) is None:
                raise TypeError(f"{symbol} gives {result}, not {wanted}")
            with b.if_then(b.icmp_signed("==", failed, _I64(0))):
                if wanted is not types.none:
                    value = self.context.cast(b, value, result, wanted)
                    _write(self.context, b, wanted, value, fn.args[1], 0)
            b.ret(failed)
        else:
            wanted = types.none
            share = self._share(module, symbol, entry, kinds)
            kinds = kinds[1:]
            words = _Words(self.context, b, fn.args[0])
            last = [words.next(kind) for kind in kinds][-1]
            args = [types.intp, types.intp, kinds[-1]]
            values = [b.ptrtoint(share, _I64), fn.args[0], last]
            failed, value, _ = self._call(b, entry.runs, args, values)
            b.ret(b.select(b.icmp_signed("==", failed, _I64(0)), value, failed))
        self._exported.add(symbol)
        arguments = b"".join(layout(kind) for kind in kinds)
        results = b"" if wanted is types.none else layout(wanted)
        self._told[name] = [symbol, arguments.decode("latin-1"), results.decode("latin-1")]
        self._library.add_ir_module(module)

    def _share(self, module: Any, symbol: str, entry: Entry, kinds: Sequence[Any]) -> Any:
        """int64 (arguments, first argument): what an entry's runner calls."""
        fn, b = self._function(module, f"{symbol}$share", _I64)
        words = _Words(self.context, b, fn.args[0])
        values = [fn.args[1], *(words.next(kind) for kind in kinds[1:])]
        assert entry.function is not None
        failed, _, _ = self._call(b, entry.function, kinds, values)
        b.ret(failed)
        fn.linkage = "internal"
        return fn

    def add_raw(self, raw: Raw) -> None:
        """A function of LLVM IR."""
        module = self.context.create_module(raw.name)
        raw.define(module)
        self._exported.add(raw.name)
        self._library.add_ir_module(module)

    def emit(self) -> bytes:
        """The object file."""
        module = ir.Module(self._name)
        module.triple = str(self._library._final_module.triple)
        text = json.dumps(self._told).encode() + b"\0"
        symbol = f"entries of {self._name}"
        kind = ir.ArrayType(_I8, len(text))
        told = ir.GlobalVariable(module, kind, symbol)
        told.global_constant = True
        told.initializer = ir.Constant(kind, bytearray(text))
        self._library.add_ir_module(module)
        final = self._library._final_module
        for library in dict.fromkeys(self._library._linking_libraries):
            final.link_in(library._get_module_for_linking(), preserve=True)
        final.link_in(llvm.parse_assembly(_MEMORY), preserve=True)
        for each in [*final.functions, *final.global_variables]:
            if not each.is_declaration and each.name not in self._exported | {symbol}:
                each.linkage = "internal"
        self._library.optimise()
        final.verify()
        foreign = [f.name for f in final.functions if f.is_declaration and _FOREIGN(f.name)]
        if foreign:
            raise TypeError(f"{self._name} needs {', '.join(foreign)}, which only Python has")
        made: bytes = self.context.codegen()._tm.emit_object(final)
        return made


# What whole arrays are assigned to each other with, lists, strings and dictionaries.
_FOREIGN = re.compile("Py|_?NRT_|_?numba_|nrt_").match

# What numba's arrays need of a run time: memory that knows how it is given back.
_MEMORY = """
declare noalias ptr @malloc(i64)
declare void @free(ptr)

define ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %align) {
  %wide = zext i32 %align to i64
  %room = add i64 %size, %wide
  %all = add i64 %room, 64
  %info = call ptr @malloc(i64 %all)
  %none = icmp eq ptr %info, null
  br i1 %none, label %end, label %fill
fill:
  %first = ptrtoint ptr %info to i64
  %behind = add i64 %first, 64
  %less = sub i64 %wide, 1
  %up = add i64 %behind, %less
  %mask = xor i64 %less, -1
  %data = and i64 %up, %mask
  store i64 1, ptr %info
  %destroys = getelementptr i8, ptr %info, i64 8
  store i64 0, ptr %destroys
  %given = getelementptr i8, ptr %info, i64 16
  store i64 0, ptr %given
  %at = getelementptr i8, ptr %info, i64 24
  store i64 %data, ptr %at
  %long = getelementptr i8, ptr %info, i64 32
  store i64 %size, ptr %long
  %other = getelementptr i8, ptr %info, i64 40
  store i64 0, ptr %other
  br label %end
end:
  ret ptr %info
}

define void @NRT_MemInfo_call_dtor(ptr %info) {
  call void @free(ptr %info)
  ret void
}
"""


@global_compiler_lock
def compile_object(module: str) -> bytes:
    """The object file of a module's entries and functions of IR. Raises what numba raises."""
    found = vars(importlib.import_module(module))
    made = _Object(module)
    for name, value in found.items():
        if isinstance(value, Entry) and value.module == module:
            made.add(name, value)
        for raw in value if isinstance(value, list) else ():
            if isinstance(raw, Raw) and raw.module == module:
                made.add_raw(raw)
    return made.emit()


def _answer(module: str, path: Path, target: str) -> str:
    """Write a module's object file. Returns "MODULE", or "MODULE: why not". `path` names the
    digest of the sources that are wanted: code of others is not written under it."""
    try:
        made = compile_object(module)
        read_again()
        if object_path(module, target).name != path.name:
            return f"{module}: its sources were edited while they were compiled; run it again"
        with replacing(path) as file:
            file.write(sealed(made))
    except Exception as error:
        traceback.print_exc()
        return f"{module}: {' '.join(str(error).split()) or type(error).__name__}"
    return module


def main() -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m drafters.ahead",
        description="Compile the functions that modules declare (drafters/jit.py).",
        epilog="Each line of standard input is `MODULE FILE`, each of standard output `MODULE`, or "
        "`MODULE: why not`.",
    )
    parser.add_argument("target", help=", ".join([*TARGETS, NATIVE]))
    target = parser.parse_args().target
    set_target(TARGETS[target] if target in TARGETS else native())
    os.environ["TAILOR_CPU"] = target  # kernels ask which CPU they are for
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        module, _, path = line.rstrip("\n").partition(" ")
        print(_answer(module, Path(path), target), file=out, flush=True)
    return 0


if __name__ == "__main__":
    # The modules that declare functions know this one by its name.
    from drafters import ahead

    sys.exit(ahead.main())
