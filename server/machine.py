"""The cores and the memory that this process may use: its mask, its cgroups, the machine.

In a container the machine's own figures are wrong: a pod of 2 cores and 4 GiB sees all 64 cores and
256 GiB of its machine in /proc. Read from the files of cgroup v2 (cpu.max, memory.max, memory.high)
and v1 (cpu.cfs_quota_us, memory.limit_in_bytes) each time: an orchestrator may change them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_UNKNOWN_MEMORY = 4 << 30
_UNLIMITED = 1 << 60
"""Bytes; v1 writes a number near 2^63 for no limit."""


def cores() -> int:
    """Threads that may spin at once; see Machine."""
    return Machine().cores


def available_memory() -> int:
    """Bytes that may still be taken; see Machine."""
    return Machine().available_memory


MIN_FILES = 1024
"""Files that a server should be able to open: each connection takes one."""


def allow_files() -> int:
    """Let this process open as many files as it may. Returns how many."""
    import resource

    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        most = max(files, 1 << 16)
    if files not in (most, resource.RLIM_INFINITY):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            files = most
    return files if files != resource.RLIM_INFINITY else most


def has_terminal() -> bool:
    """Whether the process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def core_waits(pid: int) -> dict[str, float]:
    """Seconds that each thread of a process has been ready to run and had no core, by its id, since
    it began; empty where the kernel does not tell (/proc/PID/task/*/schedstat)."""
    waits: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
                told = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text(encoding="ascii")
                _, waited_ns, _ = map(int, told.split())
                waits[thread] = waited_ns / 1e9
    return waits


def release_memory() -> None:
    """Have malloc give back what was freed. Where the C library cannot, nothing happens."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes = (ctypes.c_size_t,)
        trim(0)


def release_code(part: str) -> int:
    """Give back the pages of code and constants that this process has read of the shared objects
    with `part` in their path, and return their number of bytes. What runs again is read from the
    file again, which the kernel keeps: 16 pages in a microsecond or two. Linux alone."""
    import ctypes
    import mmap

    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or not hasattr(mmap, "MADV_DONTNEED"):
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_bytes, mappings = 0, ""
    with contextlib.suppress(OSError):
        mappings = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for line in mappings.splitlines():
        place, rights, offset, _, _, *path = line.split(maxsplit=5)
        if not path or part not in path[0] or ".so" not in path[0] or "w" in rights:
            continue
        # What the loader has written (relocations) is neither code nor in the first part of a file.
        if "x" in rights or int(offset, 16) == 0:
            begin, end = (int(number, 16) for number in place.split("-"))
            if madvise(begin, end - begin, mmap.MADV_DONTNEED) == 0:
                num_bytes += end - begin
    return num_bytes


class OtherProcesses:
    """What other processes use of the machine's cores, since this was made.

    but: a process that does not count as another one, by its id; None: this one.
    """

    def __init__(self, but: int | None = None) -> None:
        self._but = but
        self._began = self._spent()

    def _spent(self) -> tuple[float, float]:
        """(seconds of the clock times cores, seconds that the cores worked for others)."""
        import psutil

        machine, own_s = psutil.cpu_times(), 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._but).cpu_times()
            own_s = own.user + own.system
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        # A guest's time is in user and nice already.
        twice = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        return sum(machine) - twice, sum(machine) - twice - idle - own_s

    def share(self) -> float:
        """Of all cores, 0..1."""
        (all_s, busy_s), (before_all_s, before_s) = self._spent(), self._began
        return min(1.0, max(0.0, (busy_s - before_s) / max(all_s - before_all_s, 1e-9)))

    def cores(self) -> float:
        """In cores."""
        return self.share() * (os.cpu_count() or 1)


class Machine:
    """root: where /proc and /sys lie; a test has files of its own."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    @property
    def cores(self) -> int:
        """Cores of the process's mask, and no more than whole ones of its quota; 1 at least.

        A quota is rounded down: a team of threads waits for its slowest, which the kernel would
        stop each period.
        """
        quota = self.quota
        allowed = self.mask
        return allowed if quota is None else max(1, min(allowed, int(quota)))

    @property
    def mask(self) -> int:
        """Cores of the process's affinity mask."""
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    @property
    def quota(self) -> float | None:
        """Cores' worth of time that its cgroups allow; None without a limit."""
        return min(self._quotas(), default=None)

    @property
    def memory_limit(self) -> int | None:
        """Bytes that its cgroups allow in all; None without a limit."""
        return min((limit for limit, _ in self._memory_limits()), default=None)

    @property
    def available_memory(self) -> int:
        """Bytes: MemAvailable of /proc/meminfo (4 GiB where there is none), and no more than its
        cgroups have left."""
        free = min((free for _, free in self._memory_limits()), default=_UNLIMITED)
        return min(self._available(), free)

    def _available(self) -> int:
        for line in self._text(self._root / "proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return _UNKNOWN_MEMORY

    def _quotas(self) -> Iterator[float]:
        for folder in self._folders(""):
            match self._text(folder / "cpu.max").split():
                case [quota, period] if quota != "max":
                    yield int(quota) / int(period)
        for folder in self._folders("cpu"):
            time_us = self._number(folder / "cpu.cfs_quota_us")
            period_us = self._number(folder / "cpu.cfs_period_us")
            if time_us is not None and time_us > 0 and period_us:
                yield time_us / period_us

    def _memory_limits(self) -> Iterator[tuple[int, int]]:
        """(limit, what is left of it with pages of files that can be dropped) of each cgroup."""
        for controller, limits, usage, droppable in (
            ("", ("memory.max", "memory.high"), "memory.current", "inactive_file"),
            ("memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
        ):
            for folder in self._folders(controller):
                found = [self._number(folder / name) for name in limits]
                limit = min((value for value in found if value is not None), default=_UNLIMITED)
                if limit >= _UNLIMITED:
                    continue
                used = self._number(folder / usage) or 0
                for line in self._text(folder / "memory.stat").splitlines():
                    if line.startswith(f"{droppable} "):
                        used -= int(line.split()[1])
                yield limit, max(0, limit - max(0, used))

    def _folders(self, controller: str) -> Iterator[Path]:
        """The process's cgroup of a controller of v1, or of v2 (""), and all above it.

        A container that has no cgroup namespace is told the host's path, of which only the end is
        there, as the mounted folder itself: what does not exist is passed over.
        """
        mounts = self._root / "sys/fs/cgroup"
        if controller:
            mount = mounts / controller
        else:
            mount = mounts / "unified" if (mounts / "unified").is_dir() else mounts
        for line in self._text(self._root / "proc/self/cgroup").splitlines():
            number, controllers, path = (*line.split(":", 2), "", "")[:3]
            mine = number == "0" if not controller else controller in controllers.split(",")
            if mine:
                place = Path(path.lstrip("/"))
                for part in (place, *place.parents):
                    yield mount / part

    def _number(self, file: Path) -> int | None:
        text = self._text(file).strip()
        return int(text) if text.lstrip("-").isdigit() else None

    def _text(self, file: Path) -> str:
        try:
            return file.read_text(encoding="ascii")
        except (OSError, ValueError):
            return ""
