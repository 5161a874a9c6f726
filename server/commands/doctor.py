"""`tailor doctor`: what a server would find on this machine, a line a finding and what to do.
`tailor cache`: what Tailor keeps, where, and how to be rid of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from cyclopts import Parameter

from server.commands.models import folder_size, told_size
from server.commands.serve import EngineOptions, ModelChoice, Place, check_server, server_config
from server.config import ModelConfig, ServerConfig
from server.errors import TailorError
from server.machine import MIN_FILES, Machine, allow_files
from server.model.cache_folder import cache_dir, check_kept

_PLACE, _MODEL = Place(), ModelChoice()

_MIN_SHARED = 64 << 20
_MIN_CACHE = 2 << 30


PartName = Literal[
    "models", "downloads", "configs", "tokens", "costs", "priors", "machine-code", "tasks", "fleet"
]


class Finding(NamedTuple):
    """what: in one line. todo: what to do about it; "" where all is well."""

    what: str
    todo: str = ""


class Part(NamedTuple):
    """A part of what is kept. is_lost: whether it cannot be made again."""

    path: Path
    what: str
    is_lost: bool = False


def doctor(place: Place = _PLACE, what: ModelChoice = _MODEL) -> int:
    bad = 0
    config = server_config(place, what, EngineOptions())
    for find in (_cores, _memory, _cache, _models, _tasks, _port):
        topic = find.__name__.removeprefix("_")
        try:
            found = list(find(config))
        except TailorError as error:
            found = [Finding(line, "mend what it names") for line in error.message.splitlines()]
        for finding in found:
            print(f"{'look' if finding.todo else 'ok':5} {topic:8} {finding.what}")
            if finding.todo:
                print(f"{'':14} -> {finding.todo}")
        bad += sum(bool(finding.todo) for finding in found)
    print(f"\n{bad} to look at." if bad else "\nNothing to look at.")
    return 1 if bad else 0


def cache(
    *,
    clear: Annotated[
        PartName | None, Parameter(help="remove this part; end the servers that use it first")
    ] = None,
) -> int:
    """Exit status 1 when a part could not be removed whole."""
    parts = cache_parts()
    if clear is not None:
        path = parts[clear].path
        size = folder_size(path)
        shutil.rmtree(path, ignore_errors=True)
        print(f"{told_size(size - folder_size(path))} removed from {path}")
        return 1 if path.exists() else 0
    for name, part in parts.items():
        told = "  (cannot be made again)" if part.is_lost else ""
        print(f"{name:13} {told_size(folder_size(part.path)):>9}  {part.what}{told}")
        print(f"{'':24} {part.path}")
    print("\ntailor cache --clear PART removes one of them.")
    return 0


def cache_parts() -> dict[PartName, Part]:
    """All that is kept, by name."""
    from drafters.library import code_folder

    folder = cache_dir()
    return {
        "models": Part(folder / "models", "models that were fetched or converted"),
        "downloads": Part(folder / "downloads", "parts of models that are being fetched"),
        "configs": Part(folder / "configs", "what was read of models' configurations"),
        "tokens": Part(folder / "tokens", "the bytes of each token"),
        "costs": Part(folder / "costs", "what steps cost on this machine"),
        "priors": Part(folder / "priors", "priors of models, of `tailor models prior`"),
        "machine-code": Part(code_folder(), "what was compiled here"),
        "tasks": Part(folder / "tasks", "uploaded corpora, what tasks learned", True),
        "fleet": Part(folder / "fleet", "what a fleet's tasks learned", True),
    }


def _cores(config: ServerConfig) -> Iterator[Finding]:
    from drafters.target import NATIVE, chosen

    machine, target = Machine(), chosen()
    if target.name == NATIVE:
        yield Finding(
            "no code for this CPU comes with the package",
            "nothing: the first start compiles it, which takes a minute or two",
        )
    else:
        yield Finding(f"this CPU runs the code for {target.name}")
    quota = "no quota" if machine.quota is None else f"a quota of {machine.quota:g}"
    yield Finding(f"threads: {machine.cores}, of {machine.mask} cores in the mask, {quota}")
    if machine.quota is not None and machine.quota % 1.0:
        yield Finding(
            f"the cgroup's quota of {machine.quota:g} cores is no whole number",
            "give whole cores: the part is not used",
        )
    threads = config.engine.threads
    if threads is not None and threads > machine.cores:
        yield Finding(
            f"engine.threads is {threads}, and there are {machine.cores} cores",
            "leave it out: threads that share a core wait for each other",
        )
    load = os.getloadavg()[0]
    if load > machine.mask:
        yield Finding(
            f"the load is {load:.1f} on {machine.mask} cores",
            "end what else runs before a model's first start: step costs are measured then",
        )


def _memory(config: ServerConfig) -> Iterator[Finding]:
    machine = Machine()
    limit = machine.memory_limit
    told = "no limit" if limit is None else f"a limit of {told_size(limit)}"
    yield Finding(f"{told_size(machine.available_memory)} available, {told} of the cgroup")
    need = sum(folder_size(folder) for _, folder in _folders(config) if folder is not None)
    if need > machine.available_memory:
        yield Finding(
            f"the models' files have {told_size(need)}",
            "serve a smaller model or fewer, or weights: int8 or int4",
        )
    shared = Path("/dev/shm")
    if shared.is_dir() and (free := shutil.disk_usage(shared).free) < _MIN_SHARED:
        yield Finding(f"/dev/shm has {told_size(free)} free", "give a container --shm-size 1g")
    files = allow_files()
    if files < MIN_FILES:
        yield Finding(f"a process may open {files} files", "ulimit -n 65536: each client takes one")


def _cache(_: ServerConfig) -> Iterator[Finding]:
    folder = cache_dir()
    there = next(part for part in (folder, *folder.parents) if part.exists())
    sizes = sum(folder_size(part.path) for part in cache_parts().values())
    free = shutil.disk_usage(there).free
    yield Finding(f"{told_size(sizes)} kept, {told_size(free)} free: {folder}")
    if not os.access(there, os.W_OK):
        yield Finding(
            f"{there} cannot be written", "let this user write to it, or set TAILOR_CACHE_DIR"
        )
    elif free < _MIN_CACHE:
        yield Finding(f"{told_size(free)} free", "free some: `tailor cache` says what is kept")


def _models(config: ServerConfig) -> Iterator[Finding]:
    for model, folder in _folders(config):
        if folder is None:
            yield Finding(
                f"{model.name} is not on this machine", f"tailor models fetch {model.path}"
            )
        else:
            check_kept(folder)
            yield Finding(f"{model.name}: {told_size(folder_size(folder))}, {folder}")


def _folders(config: ServerConfig) -> Iterator[tuple[ModelConfig, Path | None]]:
    from server.model.catalog import cached_folder
    from server.wiring.model import serves_file

    for model in config.models:
        as_file = serves_file(model, config.engine)
        yield model, cached_folder(model.path, "file" if as_file else "float32")


def _tasks(config: ServerConfig) -> Iterator[Finding]:
    keys, tasks = check_server(config)
    yield Finding(f"{len(tasks)} tasks and {len(keys)} keys, without a problem")
    if not keys and config.listen.host not in ("127.0.0.1", "::1", "localhost"):
        yield Finding(
            f"everyone who reaches {config.listen.host} may call", "set TAILOR_API_KEY, or keys"
        )


def _port(config: ServerConfig) -> Iterator[Finding]:
    from server.api.serving import check_certificate, listen

    place = config.listen
    check_certificate(place)
    listen(place.host, place.port).close()
    told = "HTTPS" if place.ssl_certfile else "HTTP"
    yield Finding(f"{place.host}:{place.port} is free, for {told}")
