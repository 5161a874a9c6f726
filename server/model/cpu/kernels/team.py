"""What the threads of a team run: barriers, items of work, and one share after the other.

Rules for a share, a function (thread, ..., work):
  - All threads call it with the same arguments but for the thread's number, and meet at the same
    barriers.
  - It takes items from `take`, which every barrier sets back to 0, from `take_near` or `take_run`,
    or its own rows: row r belongs to thread r % threads. What another thread wrote is read after a
    barrier.
  - It raises only where all threads raise at the same place; the entry raises it then.

Between the parts of a share the threads meet at `barrier`: there a thread spins for some 2 ms and
then sleeps until the last one has come. A thread that finds itself on another's core as a share
begins moves to one of its own. What they share is one int64 array, `sync`: words 128 bytes apart,
each on cache lines of its own.
"""
# numba infers the types of compiled functions; their docstrings give shapes and dtypes.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from drafters.jit import compiled, entry
from server.model.cpu.kernels.ir import I32, I64, call, i32, i64, word
from server.model.cpu.kernels.vectors import fetch
from server.model.cpu.records import EACH, SPINS, THREADS

# Bytes from the start of `sync` to its words.
_JOB, _SHARE, _ARGUMENTS, _STOP, _FAILED = (8 * i for i in range(5))
_JOB_SLEEPERS, _ARRIVED, _MEETING, _MEETING_SLEEPERS, _ITEM = (128 * i for i in range(1, 6))
# Behind them 256 bytes a thread: the core that it began its last job on, how many of its own items
# were taken, and words that only it uses.
_CORES, _TAKEN, _OWN = THREADS, THREADS + 8, THREADS + 128

# A thread waits so long, some 80 us, without an offer of the core: on a quiet machine one that
# waits for a barrier need not give it up. On a busy one the thread that it waits for may want a
# core.
_ALONE_SPINS = 2_000
_ASKED = 256  # bytes that a thread asks of memory between two looks at a barrier
_IDLE_NS = 3_000_000
"""So long a thread that has no job looks for one and offers its core, before it sleeps: as long as
the host works between steps that draft. One that has slept begins on the core of the thread that
woke it: behind 2.5 ms of the host's work a step took 2.7 of 15 ms longer."""

# --- words of LLVM IR -----------------------------------------------------------------------------


def _word(b: Any, address: Any) -> Any:
    return b.inttoptr(address, I64.as_pointer())


@word(int, int)
def _load(b: Any, address: Any) -> Any:
    """The int64 at `address`, and all that was written before it."""
    return b.load_atomic(_word(b, address), "seq_cst", 8)


@word(None, int, int)
def _store(b: Any, address: Any, value: Any) -> Any:
    """Write the int64 at `address`, after all that was written before."""
    b.store_atomic(value, _word(b, address), "seq_cst", 8)


@word(int, int, int)
def _add(b: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at `address`; what it was before."""
    return b.atomic_rmw("add", _word(b, address), value, "seq_cst")


@word(int, int)
def _take(b: Any, address: Any) -> Any:
    """Add 1 to the int64 at `address`, with no order to other memory; what it was before."""
    return b.atomic_rmw("add", _word(b, address), i64(1), "monotonic")


@word(None)
def _pause(b: Any) -> None:
    """Tell the core that this is a loop that waits."""
    triple = b.module.triple
    if triple.startswith("x86_64"):
        call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
    elif triple.startswith(("aarch64", "arm64")):
        call(b, "llvm.aarch64.hint", ir.VoidType(), [i32(1)])


_FUTEX = {"x86_64": 202, "aarch64": 98}
"""Number of the system call on Linux."""
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # of this process only


def _futex(b: Any) -> int | None:
    machine, _, system = b.module.triple.partition("-")
    return _FUTEX.get(machine) if "linux" in system else None


@word(None, int, int)
def _sleep(b: Any, address: Any, known: Any) -> None:
    """Sleep until `_wake`, unless the low half of the word is not that of `known`; or a little."""
    number = _futex(b)
    if number is None:
        call(b, "usleep", I32, [i32(50)])
    else:
        low = b.and_(known, i64(0xFFFFFFFF))
        numbers = [i64(number), address, i64(_FUTEX_WAIT), low, i64(0)]
        call(b, "syscall", I64, numbers, var_arg=True)


@word(None, int)
def _wake(b: Any, address: Any) -> None:
    """Wake all that sleep at `address`."""
    number = _futex(b)
    if number is not None:
        numbers = [i64(number), address, i64(_FUTEX_WAKE), i64(0x7FFFFFFF), i64(0)]
        call(b, "syscall", I64, numbers, var_arg=True)


_CLOCK = 1  # CLOCK_MONOTONIC on Linux: what time.perf_counter reads


@word(int)
def now(b: Any) -> Any:
    """Nanoseconds of the monotonic clock; 0 where the C library has none."""
    if "windows" in b.module.triple:
        return i64(0)
    clock = 6 if "darwin" in b.module.triple else _CLOCK
    with b.goto_entry_block():  # a place in a loop would take more of the stack each time
        room = b.alloca(I64, 2)
    call(b, "clock_gettime", I32, [i32(clock), b.ptrtoint(room, I64)])
    seconds, rest = (b.load(b.gep(room, [i32(i)])) for i in range(2))
    return b.add(b.mul(seconds, i64(1_000_000_000)), rest)


@word(None)
def _offer(b: Any) -> None:
    """Let another thread have the core, if one waits for it."""
    call(b, "sched_yield", I32, [])


_CORES_MASK = 128
"""Bytes of the kernel's masks of cores: 1,024 cores."""


@word(int)
def _core(b: Any) -> Any:
    """The number of the core that this thread runs on; -1 where that is not told."""
    if "linux" not in b.module.triple:
        return i64(-1)
    return b.sext(call(b, "sched_getcpu", I32, []), I64)


def _affinity(name: str) -> Any:
    """A word: this thread's mask of cores read to, or set from, an address; 0 = done."""

    @word(int, int)
    def mask(b: Any, address: Any) -> Any:
        if "linux" not in b.module.triple:
            return i64(-1)
        return b.sext(call(b, name, I32, [i32(0), i64(_CORES_MASK), address]), I64)

    return mask


_read_cores = _affinity("sched_getaffinity")
_set_cores = _affinity("sched_setaffinity")


@word(int, int, int, int)
def _call_share(b: Any, share: Any, arguments: Any, thread: Any) -> Any:
    """A share of a job by address; whether it failed."""
    kind = ir.FunctionType(I64, [I64, I64]).as_pointer()
    return b.call(b.inttoptr(share, kind), [arguments, thread])


# --- meeting --------------------------------------------------------------------------------


@compiled
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


@compiled
def _change(word, sleepers):
    """Add 1 to the word and wake who sleeps: a sleeper was counted before it looked."""
    _add(word, 1)
    if _load(sleepers) > 0:
        _wake(word)


@compiled
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
        _wait(sync + _MEETING, known, sync + _MEETING_SLEEPERS, _load(sync + SPINS))


@compiled
def barrier_reading(work, ahead, end):
    """A barrier; a thread that waits asks memory for what lies from `ahead` to `end` meanwhile.

    With one row one thread makes the inputs of a product, and memory would be idle as it does.
    """
    if work.threads == 1:
        _store(work.sync.ctypes.data + _ITEM, 0)
    else:
        _meet(work.sync.ctypes.data, work.threads, ahead, end)


@compiled
def barrier(work):
    """Return when all threads of the team are here; the next item is 0 then."""
    barrier_reading(work, 0, 0)


@compiled
def take(work):
    """The number of the next item: 0, 1, ... in turn, whichever thread asks."""
    return _take(work.sync.ctypes.data + _ITEM)


@compiled
def begin_items(work):
    """Make this thread's own items of the next part untaken; before the barrier that it follows."""
    _store(work.sync.ctypes.data + _TAKEN + EACH * work.thread, 0)


@compiled
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
        item = num_items * owner // work.threads + _take(sync + EACH * owner)
        if item < num_items * (owner + 1) // work.threads:
            return item
    return -1


@compiled
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
        taken = _take(sync + EACH * owner)
        left = (last - first) >> min(taken, 62)
        if left > 0:
            return last - left, last - (left >> 1)
    return 0, 0


@compiled
def own_words(work):
    """The first of 16 words of `sync` that only this thread uses."""
    return (_OWN + EACH * work.thread) // 8


@compiled
def _spread(sync, thread):
    """Note this thread's core, and leave it if an earlier thread of the team is on it.

    The kernel keeps threads that hand one core to and fro where they are (their caches are warm),
    and a step of 7 ms takes 27. Which cores this thread may use is afterwards what it was.
    """
    core = _core()
    noted = sync + _CORES + EACH * thread
    _store(noted, core)
    if core < 0:
        return
    for other in range(thread):
        if _load(sync + _CORES + EACH * other) == core:
            own = np.zeros(_CORES_MASK // 8, np.int64)
            if _read_cores(own.ctypes.data) != 0:
                return
            rest = own.copy()
            rest[core // 64] &= ~(1 << (core % 64))
            if rest.any() and _set_cores(rest.ctypes.data) == 0:
                _store(noted, _core())
                _set_cores(own.ctypes.data)
            return


@compiled
def run(share, arguments, work):
    """Run a share with all threads of the team, and return when all are through: what failed, or 0.
    For entry_run_by."""
    sync, threads = work.sync.ctypes.data, work.threads
    _store(sync + _ITEM, 0)
    if threads == 1:
        return _call_share(share, arguments, 0)
    _store(sync + _FAILED, 0)
    _store(sync + _CORES, _core())
    _store(sync + _SHARE, share)
    _store(sync + _ARGUMENTS, arguments)
    _change(sync + _JOB, sync + _JOB_SLEEPERS)
    failed = _call_share(share, arguments, 0)
    _meet(sync, threads, 0, 0)
    return failed if failed != 0 else _load(sync + _FAILED)


@entry
@compiled
def serve(sync: int, thread: int, threads: int) -> None:
    """What a thread other than the first does: one job after the other, until it is stopped."""
    known = 0
    while True:
        until = now() + _IDLE_NS if _load(sync + SPINS) > 0 else 0
        while _load(sync + _JOB) == known and 0 < now() < until:
            for _ in range(64):
                _pause()
            _offer()
        _wait(sync + _JOB, known, sync + _JOB_SLEEPERS, 0)
        known = _load(sync + _JOB)
        if _load(sync + _STOP) != 0:
            return
        if _load(sync + SPINS) > 0:
            _spread(sync, thread)
        if _call_share(_load(sync + _SHARE), _load(sync + _ARGUMENTS), thread) != 0:
            _store(sync + _FAILED, 1)
        _meet(sync, threads, 0, 0)


@entry
@compiled
def stop(sync: int) -> None:
    """End the threads that serve."""
    _store(sync + _STOP, 1)
    _change(sync + _JOB, sync + _JOB_SLEEPERS)
