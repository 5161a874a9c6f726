"""Team: the threads that run a step on a CPU together, with barriers of their own.

A compiled function (a *share*) becomes a job (jobs.py), which every thread of a team runs at the
same time, each with its own number (Work.thread). Between its parts the threads meet at
`barrier`. A step is one job, so work is handed out once a step and not some 200 times; at a barrier
a thread spins for some 2 ms and then sleeps until the last one has come. A thread that finds itself
on another's core as a job begins moves to one of its own. linear.py and attention.py decide which
rows or panels a thread takes.

Rules for a share:
  - All threads call it with the same arguments but for the thread's number, and meet at the same
    barriers.
  - It takes items from `take`, which every barrier sets back to 0, from `take_near` or `take_run`,
    or its own rows: row r belongs to thread r % threads. What another thread wrote is read after a
    barrier.
  - It raises only where all threads raise at the same place; `run` raises RuntimeError then.

What the threads share is one int64 array, `sync`: words 128 bytes apart, each on cache lines of its
own. The threads of a team end when nothing refers to its `sync` any more.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import os
import platform
import sys
import threading
import weakref
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types

from server.model.cpu.kernels import fetch
from server.model.cpu.records import Int64
from server.model.cpu.vector_ir import I32, I64, i64, intrinsic

__all__ = [
    "Team",
    "barrier",
    "barrier_reading",
    "begin_items",
    "declared",
    "own_words",
    "run",
    "run_at",
    "take",
    "take_near",
    "take_run",
]

_serial = njit(nogil=True, cache=True, error_model="numpy")

# Bytes from the start of `sync` to its words.
_JOB, _SHARE, _ARGUMENTS, _STOP, _FAILED, _SPINS = (8 * i for i in range(6))
_JOB_SLEEPERS, _ARRIVED, _MEETING, _MEETING_SLEEPERS, _ITEM = (128 * i for i in range(1, 6))
# Behind them 256 bytes a thread: the core that it began its last job on, how many of its own items
# were taken, and words that only it uses.
_THREADS, _EACH = 128 * 6, 256
_CORES, _TAKEN, _OWN = _THREADS, _THREADS + 8, _THREADS + 128
_WORDS = _THREADS // 8

# Some 2 ms. The kernel's scheduler leaves threads that sleep at every barrier where they are.
_BARRIER_SPINS = 50_000
# Before that, some 80 us without an offer of the core: on a quiet machine a thread that waits for a
# barrier need not give it up. On a busy one the thread that it waits for may itself want a core.
_ALONE_SPINS = 2_000
_ASKED = 256  # bytes that a thread asks of memory between two looks at a barrier
_IDLE_ROUNDS = 200  # of 64 pauses and an offer of the core to others: the host's work between steps

# --- words of LLVM IR -----------------------------------------------------------------------


def _word(b: Any, address: Any) -> Any:
    return b.inttoptr(address, I64.as_pointer())


@intrinsic
def _load(typingctx: Any, address: Any) -> Any:
    """The int64 at `address`, and all that was written before it."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(_word(b, args[0]), "seq_cst", 8)

    return types.intp(types.intp), codegen


@intrinsic
def _store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write the int64 at `address`, after all that was written before."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store_atomic(args[1], _word(b, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def _add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at `address`; what it was before."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", _word(b, args[0]), args[1], "seq_cst")

    return types.intp(types.intp, types.intp), codegen


@intrinsic
def _take(typingctx: Any, address: Any) -> Any:
    """Add 1 to the int64 at `address`, with no order to other memory; what it was before."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", _word(b, args[0]), i64(1), "monotonic")

    return types.intp(types.intp), codegen


@intrinsic
def _pause(typingctx: Any) -> Any:
    """Tell the core that this is a loop that waits."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        triple = llvm.get_process_triple()
        if triple.startswith("x86_64"):
            declared(b, "llvm.x86.sse2.pause", ir.VoidType(), [], [])
        elif triple.startswith(("aarch64", "arm64")):
            declared(b, "llvm.aarch64.hint", ir.VoidType(), [I32], [ir.Constant(I32, 1)])
        return context.get_dummy_value()

    return types.void(), codegen


def declared(
    b: Any, name: str, result: Any, kinds: list[Any], args: list[Any], *, var_arg: bool = False
) -> Any:
    """A call of a function by name: LLVM's or the C library's."""
    fn = b.module.globals.get(name)
    if fn is None:
        fn = ir.Function(b.module, ir.FunctionType(result, kinds, var_arg=var_arg), name)
    return b.call(fn, args)


_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # of this process only


@intrinsic
def _sleep(typingctx: Any, address: Any, known: Any) -> Any:
    """Sleep until `_wake`, unless the low half of the word is not that of `known`; or a little."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if _FUTEX is None:
            declared(b, "usleep", I32, [I32], [ir.Constant(I32, 50)])
        else:
            low = b.and_(args[1], i64(0xFFFFFFFF))
            numbers = [i64(_FUTEX), args[0], i64(_FUTEX_WAIT), low, i64(0)]
            declared(b, "syscall", I64, [I64], numbers, var_arg=True)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def _wake(typingctx: Any, address: Any) -> Any:
    """Wake all that sleep at `address`."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if _FUTEX is not None:
            numbers = [i64(_FUTEX), args[0], i64(_FUTEX_WAKE), i64(0x7FFFFFFF)]
            declared(b, "syscall", I64, [I64], numbers, var_arg=True)
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def _offer(typingctx: Any) -> Any:
    """Let another thread have the core, if one waits for it."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        declared(b, "sched_yield", I32, [], [])
        return context.get_dummy_value()

    return types.void(), codegen


_CORES_MASK = 128
"""Bytes of the kernel's masks of cores: 1,024 cores."""


@intrinsic
def _core(typingctx: Any) -> Any:
    """The number of the core that this thread runs on; -1 where that is not told."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if sys.platform != "linux":
            return i64(-1)
        return b.sext(declared(b, "sched_getcpu", I32, [], []), I64)

    return types.intp(), codegen


def _affinity(name: str) -> Any:
    """An intrinsic: this thread's mask of cores read to, or set from, an address; 0 = done."""

    @intrinsic
    def call(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            if sys.platform != "linux":
                return i64(-1)
            numbers = [ir.Constant(I32, 0), i64(_CORES_MASK), args[0]]
            return b.sext(declared(b, name, I32, [I32, I64, I64], numbers), I64)

        return types.intp(types.intp), codegen

    return call


_read_cores = _affinity("sched_getaffinity")
_set_cores = _affinity("sched_setaffinity")


@intrinsic
def _call_share(typingctx: Any, share: Any, arguments: Any, thread: Any) -> Any:
    """A share of a job by address; whether it failed."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(I64, [I64, I64]).as_pointer()
        return b.call(b.inttoptr(args[0], kind), [args[1], args[2]])

    return types.intp(*([types.intp] * 3)), codegen


# --- meeting --------------------------------------------------------------------------------


@_serial
def _wait(word, known, sleepers, spins):
    """Return when the word is no longer `known`."""
    for i in range(spins):
        if _load(word) != known:
            return
        _pause()
        if i >= _ALONE_SPINS and i % 64 == 0:
            _offer()
    _add(sleepers, 1)
    while _load(word) == known:
        _sleep(word, known)
    _add(sleepers, -1)


@_serial
def _change(word, sleepers):
    """Add 1 to the word and wake who sleeps: a sleeper was counted before it looked."""
    _add(word, 1)
    if _load(sleepers) > 0:
        _wake(word)


@_serial
def _meet(sync, threads, ahead, end):
    known = _load(sync + _MEETING)
    if _add(sync + _ARRIVED, 1) == threads - 1:
        _store(sync + _ARRIVED, 0)
        _store(sync + _ITEM, 0)
        _change(sync + _MEETING, sync + _MEETING_SLEEPERS)
    else:
        while ahead < end and _load(sync + _MEETING) == known:
            fetch(ahead, _ASKED)
            ahead += _ASKED
        _wait(sync + _MEETING, known, sync + _MEETING_SLEEPERS, _load(sync + _SPINS))


@_serial
def barrier_reading(work, ahead, end):
    """A barrier; a thread that waits asks memory for what lies from `ahead` to `end` meanwhile.

    With one row one thread makes the inputs of a product, and memory would be idle as it does.
    """
    if work.threads == 1:
        _store(work.sync.ctypes.data + _ITEM, 0)
    else:
        _meet(work.sync.ctypes.data, work.threads, ahead, end)


@_serial
def barrier(work):
    """Return when all threads of the team are here; the next item is 0 then."""
    barrier_reading(work, 0, 0)


@_serial
def take(work):
    """The number of the next item: 0, 1, ... in turn, whichever thread asks."""
    return _take(work.sync.ctypes.data + _ITEM)


@_serial
def begin_items(work):
    """Make this thread's own items of the next part untaken; before the barrier that it follows."""
    _store(work.sync.ctypes.data + _TAKEN + _EACH * work.thread, 0)


@_serial
def take_near(work, num_items):
    """The next of num_items items for this thread, -1 when all are taken.

    A thread has items that follow each other, and takes of others' when its own are gone. So each
    core reads one stretch of memory from its beginning on: where threads took items in turn, each
    core's prefetcher ran into what the other one reads.
    """
    sync = work.sync.ctypes.data + _TAKEN
    for k in range(work.threads):
        owner = work.thread + k
        if owner >= work.threads:
            owner -= work.threads
        item = num_items * owner // work.threads + _take(sync + _EACH * owner)
        if item < num_items * (owner + 1) // work.threads:
            return item
    return -1


@_serial
def take_run(work, num_items):
    """(first, last + 1) of the next items for this thread, equal when all are taken.

    As take_near, but a thread takes half of what it has left at once, and single items at the end:
    each take waits for all that was asked of memory before, which a panel of one row feels.
    """
    sync = work.sync.ctypes.data + _TAKEN
    for k in range(work.threads):
        owner = work.thread + k
        if owner >= work.threads:
            owner -= work.threads
        first = num_items * owner // work.threads
        last = num_items * (owner + 1) // work.threads
        taken = _take(sync + _EACH * owner)
        left = (last - first) >> min(taken, 62)
        if left > 0:
            return last - left, last - (left >> 1)
    return 0, 0


@_serial
def own_words(work):
    """The first of 16 words of `sync` that only this thread uses."""
    return (_OWN + _EACH * work.thread) // 8


@_serial
def _spread(sync, thread):
    """Note this thread's core, and leave it if an earlier thread of the team is on it.

    The kernel keeps threads that hand one core to and fro where they are (their caches are warm),
    and a step of 7 ms takes 27. Which cores this thread may use is afterwards what it was.
    """
    core = _core()
    noted = sync + _CORES + _EACH * thread
    _store(noted, core)
    if core < 0:
        return
    for other in range(thread):
        if _load(sync + _CORES + _EACH * other) == core:
            own = np.zeros(_CORES_MASK // 8, np.int64)
            if _read_cores(own.ctypes.data) != 0:
                return
            rest = own.copy()
            rest[core // 64] &= ~(1 << (core % 64))
            if rest.any() and _set_cores(rest.ctypes.data) == 0:
                _set_cores(own.ctypes.data)
                _store(noted, _core())
            return


@_serial
def run(job, work):
    """Run a job (make_job) with all threads of the team, and return when all are through."""
    share, arguments = job
    run_at(share, arguments, work.sync.ctypes.data, work.threads)


@_serial
def run_at(share, arguments, sync, threads):
    """`run` of a job's two addresses by a team of `threads`. sync: the address of Work.sync."""
    _store(sync + _ITEM, 0)
    if threads == 1:
        failed = _call_share(share, arguments, 0)
    else:
        _store(sync + _FAILED, 0)
        _store(sync + _CORES, _core())
        _store(sync + _SHARE, share)
        _store(sync + _ARGUMENTS, arguments)
        _change(sync + _JOB, sync + _JOB_SLEEPERS)
        failed = _call_share(share, arguments, 0)
        _meet(sync, threads, 0, 0)
        failed += _load(sync + _FAILED)
    if failed > 0:
        raise RuntimeError("a product or a norm of this step failed")


@_serial
def _serve(sync, thread, threads):
    """What a thread other than the first does: one job after the other, until it is stopped."""
    known = 0
    while True:
        for _ in range(_IDLE_ROUNDS if _load(sync + _SPINS) > 0 else 0):
            if _load(sync + _JOB) != known:
                break
            for _ in range(64):
                _pause()
            _offer()
        _wait(sync + _JOB, known, sync + _JOB_SLEEPERS, 0)
        known = _load(sync + _JOB)
        if _load(sync + _STOP) != 0:
            return
        if _load(sync + _SPINS) > 0:
            _spread(sync, thread)
        if _call_share(_load(sync + _SHARE), _load(sync + _ARGUMENTS), thread) != 0:
            _store(sync + _FAILED, 1)
        _meet(sync, threads, 0, 0)


@_serial
def _stop(sync):
    _store(sync + _STOP, 1)
    _change(sync + _JOB, sync + _JOB_SLEEPERS)


class Team:
    """The other threads of a team of `threads`; whoever calls `run` is its first.

    One job at a time. Threads spin at barriers only where each can have a core. `sync`: for Work.
    thread_ids: the kernel's ids of the other threads.
    """

    def __init__(self, threads: int) -> None:
        num_words = _WORDS + threads * _EACH // 8
        memory = np.zeros(num_words + 16, np.int64)
        skip = -memory.ctypes.data % 128 // 8
        words = memory[skip : skip + num_words]
        words[_SPINS // 8] = _BARRIER_SPINS if threads <= len(os.sched_getaffinity(0)) else 0
        self.sync: Int64 = words.view()
        members = [
            threading.Thread(
                target=_member, args=(words, thread, threads), name=f"cpu-team-{thread}",
                daemon=True,
            )
            for thread in range(1, threads)
        ]  # fmt: skip
        for member in members:
            member.start()
        self.thread_ids = tuple(member.native_id or 0 for member in members)
        if members:
            weakref.finalize(self.sync, _end, words).atexit = False


def _member(words: Int64, thread: int, threads: int) -> None:
    _serve(words.ctypes.data, thread, threads)


def _end(words: Int64) -> None:
    _stop(words.ctypes.data)
