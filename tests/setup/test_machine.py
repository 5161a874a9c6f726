"""Cores and memory are those of the process's cgroups, from their files, and in a real cgroup."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.machine import Machine
from server.model.build import num_blocks_for
from tests.processes import run_python

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n"})
    return tmp_path


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n", encoding="ascii")


VERSION_2, CPU = {"proc/self/cgroup": "0::/"}, "sys/fs/cgroup/cpu.max"


@pytest.mark.parametrize(
    ("files", "cores", "quota", "limit", "available"),
    [
        pytest.param({}, 64, None, None, 8 * GIB, id="no cgroup: the mask and the machine"),
        (VERSION_2 | {CPU: "150000 100000"}, 1, 1.5, None, 8 * GIB),
        (VERSION_2 | {CPU: "50000 100000"}, 1, 0.5, None, 8 * GIB),
        (VERSION_2 | {CPU: "200000 100000"}, 2, 2.0, None, 8 * GIB),
        (VERSION_2 | {CPU: "max 100000"}, 64, None, None, 8 * GIB),
        pytest.param(
            VERSION_2 | {CPU: "12800000 100000"}, 64, 128.0, None, 8 * GIB, id="the mask is smaller"
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/kubepods/pod7/box",
                "sys/fs/cgroup/kubepods/memory.max": 6 * GIB,
                "sys/fs/cgroup/kubepods/memory.current": 5 * GIB,
                "sys/fs/cgroup/kubepods/memory.stat": f"anon 1\ninactive_file {GIB}\nfile 7",
                "sys/fs/cgroup/kubepods/pod7/cpu.max": "100000 100000",
                "sys/fs/cgroup/kubepods/pod7/memory.max": 4 * GIB,
                "sys/fs/cgroup/kubepods/pod7/memory.high": "max",
                "sys/fs/cgroup/kubepods/pod7/memory.current": GIB,
                "sys/fs/cgroup/kubepods/pod7/box/memory.max": "max",
            },
            # The group above has less left than the pod: 6 - (5 - 1) GiB, beside 4 - 1.
            1, 1.0, 4 * GIB, 2 * GIB, id="the tightest group above binds",
        ),
        pytest.param(
            {
                "proc/self/cgroup":
                    "4:memory:/docker/1f\n3:cpu,cpuacct:/docker/1f\n1:name=systemd:/docker/1f\n0::/",
                "sys/fs/cgroup/unified/cgroup.procs": "",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": 100000,
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": 50000,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": GIB,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB // 2,
                "sys/fs/cgroup/memory/memory.stat":
                    f"inactive_file 9\ntotal_inactive_file {GIB // 4}",
            },
            # Its files are the mounted folder; the path that it is told is the host's.
            2, 2.0, GIB, 3 * GIB // 4, id="version 1 of a container without a namespace",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/\n3:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": -1,
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            },
            64, None, None, 8 * GIB, id="version 1 without limits",
        ),
    ],
)  # fmt: skip
def test_a_quota_binds_whole_cores_and_the_least_memory_of_all_groups_counts(
    files: dict[str, object], cores: int, quota: float | None, limit: int | None, available: int,
    root: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    write(root, files)
    machine = Machine(root)
    assert (machine.cores, machine.quota, machine.memory_limit) == (cores, quota, limit)
    assert machine.available_memory == available


def test_a_kv_cache_takes_its_share_of_what_the_cgroup_has_left(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": GIB,
            "sys/fs/cgroup/memory.current": 0,
        },
    )
    monkeypatch.setattr(
        "server.model.build.available_memory", lambda: Machine(root).available_memory
    )
    assert num_blocks_for(1 << 20, "cpu", fraction=0.25) == 255


@contextlib.contextmanager
def real_cgroup(controller: str, limits: dict[str, int]) -> Iterator[Path]:
    """A cgroup of version 1 with limits; skips where the machine does not let one be made."""
    folder = Path("/sys/fs/cgroup", controller, f"tailor-test-{os.getpid()}")
    try:
        folder.mkdir()
        for name, value in limits.items():
            (folder / name).write_text(str(value), encoding="ascii")
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.parametrize(
    ("controller", "limits", "expression", "told"),
    [
        ("cpu", {"cpu.cfs_period_us": 100000, "cpu.cfs_quota_us": 150000}, "cores", "1"),
        ("memory", {"memory.limit_in_bytes": GIB}, "memory_limit", str(GIB)),
    ],
)
def test_a_process_in_a_real_cgroup_sees_its_limit(
    controller: str, limits: dict[str, int], expression: str, told: str
) -> None:
    code = (
        "import os, sys, pathlib; pathlib.Path(sys.argv[1], 'cgroup.procs').write_text('0');"
        f"from server.machine import Machine; print(Machine().{expression})"
    )
    with real_cgroup(controller, limits) as folder:
        assert run_python("-c", code, folder).strip() == told


def test_a_server_opens_as_many_files_as_it_may_and_tells_where_those_are_few() -> None:
    words = (
        "import resource as r; from server.api.serving import listen\n"
        "for most in (4096, 200):\n"
        "    r.setrlimit(r.RLIMIT_NOFILE, (64, most)); listen('127.0.0.1', 0).close()\n"
        "    print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4096", "4096", "200", "200"]
    assert "may open 4096 files" not in done.stderr and "may open 200 files" in done.stderr
