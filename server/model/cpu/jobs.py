"""Jobs: compiled functions that a team's threads call by address (team.run)."""

# mypy: allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import typeof, types
from numba.core import cgutils

from server.model.cpu.vector_ir import I64, i64, intrinsic


def _share_function(context: Any, b: Any, share: Any, call: Any, unpack: Any) -> Any:
    """A function (address, thread) of the caller's module: whether the share failed with the
    arguments that `unpack(builder, address)` gives."""
    compiled = share.get_compile_result(call)
    context.active_code_library.add_linking_library(compiled.library)
    name = b.module.get_unique_name(f"tailor_share_{share.py_func.__name__}")
    fn = ir.Function(b.module, ir.FunctionType(I64, [I64, I64]), name)
    fn.linkage = "internal"
    inner = ir.IRBuilder(fn.append_basic_block("entry"))
    values = [fn.args[1], *unpack(inner, fn.args[0])]
    status, _ = context.call_internal_no_propagate(inner, compiled.fndesc, call, values)
    inner.ret(inner.zext(status.is_error, I64))
    return b.ptrtoint(fn, I64)


def _value_at(b: Any, address: Any, kind: Any) -> Any:
    """The value of an LLVM type that lies at an address."""
    return b.load(b.inttoptr(address, kind.as_pointer()))


def make_job(share: Any) -> Any:
    """An intrinsic: (tuple of arguments) -> (address of a share, address of its arguments).

    share: a compiled function (thread, *arguments) that returns nothing. Both addresses are for
    `run`, and valid while the function that calls the intrinsic runs.
    """

    @intrinsic
    def job(typingctx: Any, arguments: Any) -> Any:
        call = typeof(share).get_call_type(typingctx, (types.intp, *arguments), {})
        sig = types.UniTuple(types.intp, 2)(arguments)

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            kind = args[0].type

            def unpack(inner: Any, address: Any) -> list[Any]:
                items: list[Any] = cgutils.unpack_tuple(inner, _value_at(inner, address, kind))
                return items

            fn = _share_function(context, b, share, call, unpack)
            data = cgutils.alloca_once_value(b, args[0])
            return context.make_tuple(b, signature.return_type, [fn, b.ptrtoint(data, I64)])

        return sig, codegen

    return job


def uncounted(b: Any, kind: Any, value: Any) -> Any:
    """A value of a numba type whose arrays have no counter of references: whatever compiled code
    they are given to, it counts none. The one of an array that came from Python ends with the call
    that it came with."""
    if isinstance(kind, types.Array):
        for field in range(2):  # the counter, and the object that it came from
            null = ir.Constant(value.type.elements[field], None)
            value = b.insert_value(value, null, field)
    elif isinstance(kind, types.BaseTuple):
        items: Any = kind
        for i, item in enumerate(items.types):
            value = b.insert_value(value, uncounted(b, item, b.extract_value(value, i)), i)
    return value


ROOM_BYTES = 32 << 10
"""For what a kept job keeps, and in its first word the address of what it is given."""

_KEPT = 64


def make_kept_job(share: Any) -> tuple[Any, Any]:
    """As make_job, for a job most of whose arguments stay the same: reading a hundred arrays from
    Python's objects takes a tenth of a millisecond where a step has pushed them out of the caches.

    share: a compiled function (thread, kept, given), of two tuples. Two intrinsics: `keep` (kept,
    an example of what will be given, address of ROOM_BYTES) -> address of the share, for as long as
    its compiled caller is there; whoever holds the room holds what is kept, as nothing counts it.
    `give` (given, the same address) -> nothing; while its caller runs, `run` may be called with the
    two addresses. What is given has exactly the types of the example.
    """

    @intrinsic
    def keep(typingctx: Any, kept: Any, given: Any, room: Any) -> Any:
        call = typeof(share).get_call_type(typingctx, (types.intp, kept, given), {})
        sig = types.intp(kept, given, types.intp)

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            kinds = args[0].type, args[1].type
            if _KEPT + context.get_abi_sizeof(kinds[0]) > ROOM_BYTES:
                raise ValueError("the kept arguments are larger than their room")
            at = b.add(args[2], i64(_KEPT))
            b.store(uncounted(b, kept, args[0]), b.inttoptr(at, kinds[0].as_pointer()))

            def unpack(inner: Any, address: Any) -> list[Any]:
                same = _value_at(inner, inner.add(address, i64(_KEPT)), kinds[0])
                return [same, _value_at(inner, _value_at(inner, address, I64), kinds[1])]

            return _share_function(context, b, share, call, unpack)

        return sig, codegen

    @intrinsic
    def give(typingctx: Any, given: Any, room: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            data = cgutils.alloca_once_value(b, args[0])
            b.store(b.ptrtoint(data, I64), b.inttoptr(args[1], I64.as_pointer()))
            return context.get_dummy_value()

        return types.void(given, types.intp), codegen

    return keep, give
