"""What the command lines of the load tests share: servers, results, the JSON line at the end.

A program is a cyclopts App of functions; `run` calls it and turns its errors into an exit status: 0
when it succeeded, 1 when something that it looked at is wrong, 2 for a wrong command line or a
machine that is too busy, 130 when it was interrupted.
"""

from __future__ import annotations

import asyncio
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
from cyclopts import App, Parameter

from loadtest.peer import Peer, PeerFailed, bring_down, bring_up, parse_peers
from server.commands.options import as_options
from server.errors import TailorError

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "numba", "fastapi", "uvicorn", "httpx")


def _cpu() -> tuple[str, list[str]]:
    """Its name, and the instruction sets that decide how fast its linear layers are."""
    cpuinfo, found = Path("/proc/cpuinfo"), dict[str, str]()
    if cpuinfo.exists():
        pairs = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        found = {key.strip(): value.strip() for key, _, value in pairs}
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
    flags = set(found.get("flags", "").split())
    name = found.get("model name") or platform.processor() or platform.machine()
    return name, [flag for flag in wanted if flag in flags]


def _git(*arguments: str) -> str:
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def describe_machine() -> dict[str, Any]:
    """Machine, versions, commit and present load, ready for a JSON line."""
    versions: dict[str, str] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cpu, instruction_sets = _cpu()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "instruction_sets": instruction_sets,
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_1min": round(os.getloadavg()[0], 2),
        "versions": versions,
        "commit": _git("rev-parse", "--short", "HEAD"),
        "tree_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


@as_options
class ResultOptions:
    """Where the JSON line goes, and how busy a machine is too busy to measure on."""

    json: Annotated[Path | None, Parameter(help="append the JSON line to this file too")] = None
    max_load: Annotated[
        float,
        Parameter(
            help="refuse to measure while the machine's 1-minute load is above this "
            "(read before servers are started)"
        ),
    ] = 0.5

    def refuse_busy_machine(self) -> None:
        """Exit 2 when the machine is busy: figures taken then say nothing."""
        load = round(os.getloadavg()[0], 2)
        if load > self.max_load:
            print(f"load is {load}, above --max-load {self.max_load}: not measuring",
                  file=sys.stderr)  # fmt: skip
            raise SystemExit(2)


@as_options
class ServerOptions:
    """The servers that are asked; see loadtest.peer."""

    server: Annotated[
        tuple[str, ...],
        Parameter(metavar="NAME=WHERE", help="URL, start script, or @NAME; repeat"),
    ] = ()
    model: Annotated[tuple[str, ...], Parameter(metavar="NAME=MODEL")] = ()
    extra: Annotated[
        tuple[str, ...],
        Parameter(metavar="NAME=JSON", help="fields merged into that server's requests"),
    ] = ()
    key: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="NAME=VARIABLE", help="environment variable that holds that server's API key"
        ),
    ] = ()
    log_dir: Path = Path("loadtest/results/logs")

    def peers(self) -> list[Peer]:
        """The servers, not started. Raises ValueError as `parse_peers` does."""
        return parse_peers(self.server, models=self.model, extras=self.extra, keys=self.key)


@as_options
class ModelChoice:
    """The model of a measurement that runs in this process."""

    model: str = "smollm2-135m-instruct"
    adapter: Path | None = None
    threads: int | None = None


def program(name: str, doc: str | None, folder: str = "loadtest") -> tuple[App, Callable[..., int]]:
    """(the App of `python -m FOLDER.NAME`, `run` of it). doc: its module's, which has an
    example."""
    app = App(
        name=f"python -m {folder}.{name}",
        help=doc,
        help_format="plaintext",
        version_flags=(),
        default_parameter=Parameter(negative=()),
        suppress_keyboard_interrupt=False,
    )
    return app, partial(run, app)


def run(app: App, arguments: Sequence[str] | None = None) -> int:
    """Call a program. Returns its exit status; see the top of this file."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        status: int | None = app(words, result_action="return_value")
        return status or 0  # --help returns nothing
    except ValueError as error:  # what was asked for cannot be done
        print(f"{app.name[0]}: {error}", file=sys.stderr)
        return 2
    except (PeerFailed, TailorError, httpx.HTTPError, OSError) as error:
        print(str(error) or type(error).__name__, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 1


def listed(text: str) -> list[str]:
    """The parts of a list with commas."""
    return [part for part in (part.strip() for part in text.split(",")) if part]


def numbers(text: str, option: str) -> list[int]:
    """A list of numbers with commas. Raises ValueError for one below 1, or none."""
    found = [int(part) for part in listed(text)]
    if not found or min(found) < 1:
        raise ValueError(f"{option} wants numbers of at least 1, with commas, not {text!r}")
    return found


def head_of(columns: Iterable[Any]) -> str:
    """The first two lines of a table in Markdown."""
    names = list(columns)
    return f"{row_of(names)}\n{'|---' * len(names)}|"


def row_of(cells: Iterable[Any]) -> str:
    """Another line of it."""
    return f"| {' | '.join(map(str, cells))} |"


def ask_servers(
    peers: Sequence[Peer], log_dir: Path, ask: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Start the servers, ask, and stop those that were started. Raises PeerFailed."""

    async def all_of_it() -> None:
        task = asyncio.current_task()
        assert task is not None
        # An exception that a handler raises is lost where it meets a finalizer; and Ctrl-C is
        # ignored by what a script starts in the background.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await bring_up(peers, log_dir)
        await ask()

    with stopped_afterwards(peers):
        before = signal.getsignal(signal.SIGTERM)
        try:
            asyncio.run(all_of_it())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            signal.signal(signal.SIGTERM, before)  # the loop leaves none: servers would run on


@contextmanager
def stopped_afterwards(peers: Sequence[Peer]) -> Iterator[None]:
    """Stop every server that was started meanwhile, on Ctrl-C and SIGTERM too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        bring_down(peers)


def emit(
    tool: str, result: Mapping[str, Any], path: Path | None, about: Mapping[str, Any] | None = None
) -> None:
    """Print the JSON line, last, and append it to `path`. about: describe_machine() of before."""
    line = json.dumps(
        {"tool": tool, **result, "machine": about or describe_machine()}, ensure_ascii=False
    )
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as out:
            out.write(line + "\n")
    print(line)


def describe_servers(peers: Sequence[Peer]) -> dict[str, dict[str, Any]]:
    """What the JSON line says of each server: no path of this machine."""
    return {
        peer.name: {
            "dialect": peer.dialect,
            "model": Path(peer.model).name,
            "version": peer.version,
            "extra": peer.extra,
            "started_by": "" if peer.is_alias or peer.is_running else Path(peer.where).name,
        }
        for peer in peers
    }
