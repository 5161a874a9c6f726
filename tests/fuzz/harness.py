"""Gives a reader many hostile inputs and counts what came of them.

    tally = run(reader, num=500, seed=7, folder=tmp_path)
    assert not tally.failures, tally.told()

Cases run in forked processes: an input that ends its process (a signal, no answer within
`slowest_s`) or takes too much memory is a failure of its own, and the next ones go on. What a case
is depends on the reader's name, the seed and its number alone, so `case(reader, seed, i)` gives it
again.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import random
import resource
import signal
import struct
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_MOST_TOLD = 1200  # characters of a line of a refusal: one that repeats its input is none
_SHARED = struct.Struct("<qdd")  # case under way, when it began, seconds of the slowest
_GROWTH = 3 << 30  # bytes of address space that a case may take


@dataclass(frozen=True)
class Reader:
    """What is read, and how.

    seeds: inputs that are taken. mutate: makes a hostile one of any. read: reads one in a folder of
    its own. refusals: what a user is told in a line or a few; anything else that it raises is a
    failure. slowest_s: for one input, on a busy machine.
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    mutate: Callable[[random.Random, bytes], bytes]
    read: Callable[[bytes, Path], None]
    refusals: tuple[type[Exception], ...]
    slowest_s: float = 20.0


@dataclass
class Tally:
    """failures: (number of the case, what came of it)."""

    reader: str
    num: int
    seed: int
    num_taken: int = 0
    num_refused: int = 0
    slowest_s: float = 0.0
    most_bytes: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)

    def told(self) -> str:
        """One line of figures, then the failures by kind, each with some cases."""
        kinds = Counter(what.partition("\n")[0][:160] for _, what in self.failures)
        lines = [
            f"{self.reader} (seed {self.seed}): {self.num} cases, {self.num_taken} taken, "
            f"{self.num_refused} refused, {len(self.failures)} failures, slowest "
            f"{self.slowest_s:.2f} s, resident memory at most {self.most_bytes >> 20} MiB"
        ]
        for kind, num in kinds.most_common(20):
            cases = [i for i, what in self.failures if what.startswith(kind)][:5]
            lines.append(f"  {num} x {kind} (cases {cases})")
        return "\n".join(lines)


def case(reader: Reader, seed: int, i: int) -> bytes:
    """The i-th input."""
    chance = random.Random(f"{reader.name} {seed} {i}")
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)  # deep values are made here, and met below with the usual limit
    try:
        return reader.mutate(chance, chance.choice(reader.seeds()))
    finally:
        sys.setrecursionlimit(usual)


def run(reader: Reader, *, num: int, seed: int, folder: Path) -> Tally:
    """Read `num` cases in forks of this process, whose threads must hold no locks."""
    tally = Tally(reader.name, num, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that write files
        reader.seeds()
    shared = mmap.mmap(-1, _SHARED.size)
    log = folder / "outcomes"
    next_case = 0
    while next_case < num:
        shared[:] = _SHARED.pack(next_case - 1, time.monotonic(), tally.slowest_s)
        log.write_bytes(b"")
        child = os.fork()
        if child == 0:
            _work(reader, range(next_case, num), seed, folder, shared, log)
        status = _wait(child, shared, reader.slowest_s)
        for line in log.read_text(encoding="utf-8").splitlines():
            outcome, _, text = line.partition("\t")
            number, _, what = text.partition("\t")
            tally.num_taken += outcome == "taken"
            tally.num_refused += outcome == "refused"
            if outcome == "raw":
                tally.failures.append((int(number), what.replace("\\n", "\n")))
            if outcome == "memory":
                tally.most_bytes = max(tally.most_bytes, int(number))
        at, _, slowest_s = _SHARED.unpack(shared[:])
        tally.slowest_s = max(tally.slowest_s, slowest_s)
        if status != 0:
            told = "no answer" if status is None else f"the process ended with status {status}"
            tally.failures.append((at, f"{told} (seconds allowed: {reader.slowest_s:g})"))
        next_case = at + 1
    return tally


def _wait(child: int, shared: mmap.mmap, slowest_s: float) -> int | None:
    """The exit status, None for a process that was ended because it did not answer."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        _, began_s, _ = _SHARED.unpack(shared[:])
        if time.monotonic() - began_s > slowest_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.005)


def _work(
    reader: Reader, cases: range, seed: int, folder: Path, shared: mmap.mmap, log: Path
) -> None:
    """The child: never returns."""
    status = 1
    warnings.simplefilter("ignore")
    faulthandler.disable()  # an input that ends the process is counted, not told
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # those that an earlier test started are not in this fork
    try:
        with log.open("a", encoding="utf-8", errors="backslashreplace", buffering=1) as out:
            os.dup2(os.open(folder / "printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            soft = _address_space() + _GROWTH
            resource.setrlimit(resource.RLIMIT_AS, (soft, soft))
            slowest_s = 0.0
            for i in cases:
                began_s = time.monotonic()
                shared[:] = _SHARED.pack(i, began_s, slowest_s)
                out.write(_outcome(reader, case(reader, seed, i), i, folder) + "\n")
                slowest_s = max(slowest_s, time.monotonic() - began_s)
            shared[:] = _SHARED.pack(cases[-1], time.monotonic(), slowest_s)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            out.write(f"memory\t{peak}\n")
        status = 0
    finally:
        os._exit(status)


def _outcome(reader: Reader, data: bytes, i: int, folder: Path) -> str:
    try:
        reader.read(data, folder)
        return f"taken\t{i}"
    except reader.refusals as error:
        told = str(error)
        if 0 < max(map(len, told.split("\n"))) <= _MOST_TOLD:
            return f"refused\t{i}"
        return f"raw\t{i}\ta refusal of {len(told)} characters: {told[:80]!r}"
    except BaseException as error:
        import traceback

        places = traceback.extract_tb(error.__traceback__)
        ours = [f"{p.filename.rpartition('/')[2]}:{p.lineno}" for p in places][-4:]
        what = f"{type(error).__name__}: {str(error)[:100]!r} at {' '.join(ours)}"
        return f"raw\t{i}\t" + what.replace("\n", "\\n")


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")
