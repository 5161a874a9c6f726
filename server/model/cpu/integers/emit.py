"""Words of LLVM IR that the integer kernels are written in: addresses are int64, sizes bytes."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from server.model.cpu.vector_ir import F32, I16, I32, I64, Loop, prefetch

__all__ = [
    "F16",
    "F32",
    "I8",
    "I16",
    "I32",
    "I64",
    "Loop",
    "at",
    "call",
    "i32",
    "i64",
    "keep_order",
    "prefetch",
    "splat",
]

I8 = ir.IntType(8)
F16 = ir.HalfType()


def i32(value: int) -> Any:
    """A constant."""
    return ir.Constant(I32, value)


def i64(value: int) -> Any:
    """A constant."""
    return ir.Constant(I64, value)


def call(b: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """A call of an intrinsic of LLVM, declared when it is not yet."""
    fn = b.module.globals.get(name)
    if fn is None:
        fn = ir.Function(b.module, ir.FunctionType(result, [a.type for a in arguments]), name)
    return b.call(fn, arguments)


def keep_order(b: Any) -> None:
    """Loads before this come before loads behind it, as the compiler puts them."""
    kind = ir.FunctionType(ir.VoidType(), [])
    b.call(ir.InlineAsm(kind, "", "~{memory}", side_effect=True), [])


def at(b: Any, address: Any, offset: int, kind: Any, align: int) -> Any:
    """The value of type `kind` at address + offset bytes."""
    where = b.add(address, i64(offset)) if offset else address
    value = b.load(b.inttoptr(where, kind.as_pointer()))
    value.align = align
    return value


def splat(b: Any, scalar: Any, vector: Any) -> Any:
    """The scalar in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    one = b.insert_element(undefined, scalar, i32(0))
    zeros = ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    return b.shuffle_vector(one, undefined, zeros)
