"""Machine code of all packages that have compiled functions, made on all cores, once a machine.

    python -m server.machine_code                    for this CPU, into the user's cache folder
    python -m server.machine_code --wheel FOLDER     for the CPUs that a wheel is for, beside the
                                                     packages' copies in FOLDER

drafters/library.py finds it there. What a wheel brings needs no compiler, no numba and no llvmlite
where it runs; this command needs them, and a C compiler to link with: the machine's, or ziglang's.
"""

from __future__ import annotations

import argparse
import platform
import queue
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from drafters import library
from drafters.target import NATIVE, TARGETS, Target, chosen
from server.machine import cores

PACKAGES = (
    "drafters", "drafters.auto", "drafters.published", "server.engine", "server.model.cpu.kernels",
    "server.model.cpu.kernels.integers",
)  # fmt: skip
"""The packages that have compiled functions; tests/drafters/test_machine_code.py finds others."""

_INTEGERS = "server.model.cpu.kernels.integers"  # its code looks at all features of a target

Progress = Callable[[str, int, int], None]
"""(what was done, how many are done, all)"""


class Job(NamedTuple):
    """One package's library for one target."""

    package: str
    target: str

    @property
    def modules(self) -> list[str]:
        """The modules that it is made of."""
        return library.modules_of(self.package)


def jobs_of(target: Target) -> list[Job]:
    """What a CPU runs."""
    return [
        Job(package, target.name if package == _INTEGERS else target.base) for package in PACKAGES
    ]


def missing(jobs: Iterable[Job]) -> list[Job]:
    """Those whose code neither comes with the packages nor lies in the cache as a library."""
    return [job for job in jobs if library.find_library(job.package, job.target) is None]


def make_ready() -> None:
    """Have all code of this CPU. Raises RuntimeError where it can neither be found nor made."""
    if missing(jobs_of(chosen())):
        with library.alone(library.code_folder() / f"{chosen().name}.lock"):
            make(missing(jobs_of(chosen())))


def make(
    jobs: Iterable[Job], *, folder: Path | None = None, progress: Progress | None = None
) -> None:
    """Make libraries; objects that the cache has are not made again. folder: where copies of the
    packages lie that get them; None: the cache. Raises RuntimeError."""
    jobs = list(dict.fromkeys(jobs))
    objects = [(job.target, module) for job in jobs for module in job.modules]
    todo = [one for one in objects if not library.is_whole(library.object_path(one[1], one[0]))]
    library.code_folder().mkdir(parents=True, exist_ok=True)
    done, total = 0, len(todo) + len(jobs)
    if folder is not None and jobs:
        code = folder / "drafters" / "_code"
        code.mkdir(parents=True, exist_ok=True)
        library.build_door(code / "door.so", library.machine_of(jobs[0].target))

    def tell(what: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(what, done, total)

    _compile(todo, tell)
    for job in jobs:
        path = library.library_path(job.package, job.target)
        if folder is not None:
            path = folder.joinpath(*job.package.split("."), "_code", f"{job.target}.so")
            path.parent.mkdir(parents=True, exist_ok=True)
        _link([library.object_path(module, job.target) for module in job.modules], path, job.target)
        tell(f"{job.package} for {job.target}")


# What takes longest comes first, so that no process is left alone with it at the end.
_LONG = ("step", "attention", "advance", "tree_builder", "describe", "tiles")


def _compile(todo: Sequence[tuple[str, str]], tell: Callable[[str], None]) -> None:
    """Objects of (target, module), by as many processes as there are cores."""
    waiting: dict[str, queue.SimpleQueue[str]] = {}
    for target, _ in todo:
        waiting.setdefault(target, queue.SimpleQueue())

    def age(one: tuple[str, str]) -> int:
        name = one[1].rpartition(".")[2]
        return _LONG.index(name) if name in _LONG else len(_LONG)

    for target, module in sorted(todo, key=age):
        waiting[target].put(module)

    def work() -> None:
        for target, modules in waiting.items():
            if not modules.empty():
                _compile_some(target, modules, tell)

    num = min(cores(), max(1, len(todo)))
    with ThreadPoolExecutor(num) as pool:
        for one in [pool.submit(work) for _ in range(num)]:
            one.result()


def _compile_some(
    target: str, modules: queue.SimpleQueue[str], tell: Callable[[str], None]
) -> None:
    """Take modules until there are none. Raises RuntimeError."""
    with subprocess.Popen(
        [sys.executable, "-m", "drafters.ahead", target], text=True,
        env=library.own_path(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        while True:
            try:
                module = modules.get_nowait()
            except queue.Empty:
                return
            process.stdin.write(f"{module} {library.object_path(module, target)}\n")
            process.stdin.flush()
            told = process.stdout.readline().strip()
            if told != module:
                why = told or f"the compiler of {module} ended"
                raise RuntimeError(f"machine code cannot be made: {why}")
            tell(f"{module} for {target}")


def _link(objects: Sequence[Path], out: Path, target: str) -> None:
    """One shared library. Raises RuntimeError."""
    words = ["-shared", "-Wl,-z,noexecstack", *map(str, objects), "-lm"]
    library.build([*library.c_compiler(library.machine_of(target)), *words], out)


def _shown(jobs: Sequence[Job], folder: Path | None) -> None:
    """make(), with a bar on a terminal and plain lines elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("  machine code"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def tell(what: str, num: int, total: int) -> None:
            bar.update(task, completed=num, total=total, description=what)
            if not console.is_terminal:
                print(f"  {num} of {total}: {what}", file=sys.stderr)

        make(jobs, folder=folder, progress=tell)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m server.machine_code",
        description="Make the machine code of all compiled functions.",
        epilog="example: python -m server.machine_code --target avx2",
    )
    parser.add_argument("--wheel", type=Path, metavar="FOLDER", help="a wheel's files")
    parser.add_argument("--machine", default=platform.machine(), help="that the wheel is for")
    parser.add_argument("--target", action="append", help=", ".join([*TARGETS, NATIVE]))
    options = parser.parse_args(arguments)
    targets = [chosen()]
    if options.wheel is not None:
        own = [t for t in TARGETS.values() if t.triple.startswith(options.machine)]
        targets = [target for target in own if target.shipped]
    if options.target:
        targets = [TARGETS[name] if name in TARGETS else chosen() for name in options.target]
    jobs = [job for target in targets for job in jobs_of(target)]
    if options.wheel is None:
        jobs = missing(jobs)
    try:
        if jobs:
            _shown(jobs, options.wheel)
    except (RuntimeError, OSError) as error:
        print(f"machine code: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
