"""Whether this machine runs the kernels for AMX tiles: asked once a process, and tried out first.

What: the system's leave to use tiles, a trial in a process of its own, and from how many rows on
tiles multiply. What not: the kernels (kernels/integers/tiles.py).

There are virtual machines that name AMX among their features and then end a program that uses it.
So a child process multiplies first: some row counts, one form of each kind of sum, by tiles and by
vectors. Where it dies, or one bit differs, vectors multiply everything, and the log says so. It
also times both: tiles multiply from the row count on from which they are the faster, which is
smaller where sums run over all inputs than where a block's are added as floats.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import logging
import os
import platform
import signal
import sys
import time
import warnings
from collections.abc import Sequence

import numpy as np

from server.model.cpu.integers.forms import BLOCK, BY_NAME, PANEL, Form, kernel_address
from server.model.cpu.linear import activations, aligned
from server.model.cpu.records import INTEGER_KERNEL as KERNEL
from server.model.cpu.records import JOB_ITEMS, NO_TILES, TILES

_log = logging.getLogger(__name__)

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_TRIAL_S = 20.0
_TRIAL_FORMS = ("int8", "q8_0")  # sums over all inputs, and over blocks
_TRIAL_ROWS = (1, 8, 16, 17, 48, 63)
# Rows from which on tiles may multiply, of each of _TRIAL_FORMS. Tiles of 8 rows are half full: the
# sums over all inputs are the faster for them, a block's were measured to be slower.
_LEAST_ROWS = ((8, 16, 32), (16, 32))
_TRIAL_INPUTS = 1536  # a product of fewer is begun for as long as it takes
_TIMES = 50
# Exit codes. Behind the second one: the place in _LEAST_ROWS of the first of _TRIAL_FORMS, and so
# many times that of the second.
_OTHER_BITS, _TIMED = 2, 10
_PLACES = [len(rows) + 1 for rows in _LEAST_ROWS]


def _permission() -> str | None:
    """Ask the system to let this process use tiles; why it does not, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "only Linux on x86-64 is asked for leave to use tiles"
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = (ctypes.c_long(n) for n in (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA))
    if libc.syscall(*numbers) != 0:
        return f"the system does not allow tiles ({os.strerror(ctypes.get_errno())})"
    return None


class _Trial:
    """A product of made-up numbers with one panel: rows x _TRIAL_INPUTS x PANEL."""

    def __init__(self, form: Form, rows: int) -> None:
        rng = np.random.default_rng(rows)
        blocks = _TRIAL_INPUTS // BLOCK
        x, figures = activations(rows, _TRIAL_INPUTS)
        x[:] = rng.integers(-127, 128, x.shape, np.int8)
        figures[:] = rng.integers(0, 1 << 20, figures.shape, np.int32)
        figures.view(np.float32)[..., ::3] = rng.standard_normal((rows, blocks, 2), np.float32)
        panel = aligned(form.panel_bytes(_TRIAL_INPUTS))
        panel[:] = rng.integers(0, 256, panel.shape, np.uint8)
        halves = panel.view(np.float16)
        halves[~np.isfinite(halves)] = 0  # scales lie among the numbers
        if form.per_output:  # as they are in a model: denormal ones take a hundred times as long
            panel[: form.header_bytes] = rng.standard_normal(PANEL, np.float32).view(np.uint8)
        out = aligned(rows * PANEL * 4).view(np.float32).reshape(rows, PANEL)
        items = [
            x.ctypes.data, x.shape[1], figures.ctypes.data, figures[0].nbytes, rows,
            panel.ctypes.data, blocks, out.ctypes.data, out[0].nbytes, 0, NO_TILES,
        ]  # fmt: skip
        assert len(items) == JOB_ITEMS
        self._numbers = x, figures, panel  # alive as long as the job
        self._out, self._job = out, np.array(items, np.int64)
        self._kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel_address(form))

    def product(self, least_rows: int) -> bytes:
        """The product's bits, by tiles from least_rows rows on."""
        self._out[:], self._job[-1] = 0, least_rows
        self._kernel(self._job.ctypes.data)
        return self._out.tobytes()

    def seconds(self, least_rows: int) -> float:
        """The least time that the product takes."""
        self._job[-1], address = least_rows, self._job.ctypes.data
        best = float("inf")
        for _ in range(_TIMES):
            before = time.perf_counter()
            self._kernel(address)
            best = min(best, time.perf_counter() - before)
        return best


def least_rows(seconds: Sequence[tuple[float, float]]) -> int:
    """The place in a form's _LEAST_ROWS from which on tiles are the faster; behind the last one:
    nowhere.

    seconds: of tiles and of vectors, at each of them.
    """
    place = len(seconds)
    while place > 0 and seconds[place - 1][0] < seconds[place - 1][1]:
        place -= 1
    return place


def _try() -> int:
    """An exit code: whether tiles and vectors give the same bits, and when tiles are the faster."""
    forms = [BY_NAME[name] for name in _TRIAL_FORMS]
    for trial in (_Trial(form, rows) for form in forms for rows in _TRIAL_ROWS):
        if trial.product(1) != trial.product(NO_TILES):
            return _OTHER_BITS
    code = _TIMED
    for form, worth, least in zip(forms, (1, _PLACES[0]), _LEAST_ROWS, strict=True):
        trials = [_Trial(form, rows) for rows in least]
        code += worth * least_rows([(t.seconds(1), t.seconds(NO_TILES)) for t in trials])
    return code


def _child() -> None:
    """What the child process does; it never returns."""
    status = 1
    try:
        faulthandler.disable()  # that it may die is no fault to be told
        with contextlib.suppress(ImportError):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = _try()
    finally:
        os._exit(status)


def _ended(pid: int) -> int | None:
    """A child's exit code, negative for a signal; None and its end, when it takes too long."""
    until = time.monotonic() + _TRIAL_S
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found == pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def tried_out() -> tuple[int, int] | str:
    """Multiply by tiles in a child process: rows from which on to use them, of each of
    _TRIAL_FORMS, or why not to.

    The child is a fork: it has the compiled kernels, and the system's leave is inherited.
    """
    for name in _TRIAL_FORMS:
        kernel_address(BY_NAME[name])
    try:
        with warnings.catch_warnings():  # the child runs compiled code and ends: no lock is asked
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError as error:
        return f"no process to try them in ({error})"
    if pid == 0:
        _child()
    code = _ended(pid)
    if code is None:
        return f"a trial did not end within {_TRIAL_S:.0f} s"
    if code < 0:
        return f"a trial was ended by {signal.Signals(-code).name}"
    if code == _OTHER_BITS:
        return "a trial gave other numbers"
    if not _TIMED <= code < _TIMED + _PLACES[0] * _PLACES[1]:
        return "a trial failed"
    places = reversed(divmod(code - _TIMED, _PLACES[0]))
    channel, blocks = ((*r, NO_TILES)[p] for r, p in zip(_LEAST_ROWS, places, strict=True))
    if channel == blocks == NO_TILES:
        return "a trial found them slower"
    return channel, blocks


@functools.cache
def _found() -> tuple[int, int]:
    """tile_rows of `int8`, and of the forms in blocks.

    Asks the system and tries tiles out, and logs why they are not used where the CPU names them
    among its features.
    """
    if not TILES:
        return NO_TILES, NO_TILES
    found = _permission() or tried_out()
    if isinstance(found, str):
        _log.warning("AMX tiles are not used, %s multiplies instead: %s", KERNEL, found)
        return NO_TILES, NO_TILES
    told = ["no row count" if rows == NO_TILES else f"{rows} rows" for rows in found]
    _log.info("AMX tiles multiply int8 from %s on, forms in blocks from %s on", *told)
    return found


def tile_rows(per_output: bool) -> int:
    """Rows from which on tiles multiply a form (Form.per_output); NO_TILES where they do not."""
    return _found()[0 if per_output else 1]


def kernel_name() -> str:
    """What multiplies, for the log and /metrics."""
    return KERNEL if min(_found()) == NO_TILES else f"{KERNEL}+amx"
