"""`tailor tasks pack` and `unpack`: a task as one file, to be carried to another machine.

The file is a zip of the task's YAML, the files that it names (corpus, vocabulary profile, tables of
drafters), and manifest.json: their sizes and sha256. Equal tasks make equal files.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from drafters.atomic_file import EVERYBODY, replacing
from drafters.json_text import parsed
from server.commands.options import writing
from server.config import DEFAULT_TASKS
from server.errors import ConfigError

SUFFIX = ".tailor-task"
MANIFEST = "manifest.json"
VERSION = 1
MAX_BYTES = 8 << 30
_EPOCH = (1980, 1, 1, 0, 0, 0)


def pack(
    task: Annotated[Path, Parameter(name="FILE", help="the task's YAML file")],
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(name=("--output", "-o"), metavar="FILE", help=f"the packed task (NAME{SUFFIX})"),
    ] = None,
    force: Annotated[bool, Parameter(help="replace a file that is there")] = False,
) -> int:
    from server import __version__

    name, files = _files_of(task)
    output = output or Path(f"{name}{SUFFIX}")
    if output.exists() and not force:
        raise ConfigError(f"{output}: is there already; --force replaces it")
    manifest: dict[str, Any] = {
        "format": VERSION,
        "task": name,
        "yaml": task.name,
        "made_by": f"tailor {__version__}",
        "files": {
            file.name: {
                "bytes": file.stat().st_size,
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            }
            for file in files
        },
    }
    with (
        writing(output),
        replacing(output, EVERYBODY) as out,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        _put(archive, MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        for file in files:
            _put(archive, file.name, file.read_bytes())
    print(f"written: {output} ({', '.join(file.name for file in files)})")
    print(f"next: tailor tasks unpack {output}, on the machine that serves it")
    return 0


def unpack(
    file: Annotated[Path, Parameter(help="a packed task")],
    /,
    *,
    tasks: Annotated[
        Path, Parameter(metavar="DIR", help=f"folder of task files ({DEFAULT_TASKS})")
    ] = DEFAULT_TASKS,
    force: Annotated[bool, Parameter(help="replace files that are there")] = False,
) -> int:
    try:
        with writing(file), zipfile.ZipFile(file) as archive:
            manifest, contents = _read(file, archive)
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, NotImplementedError):
        raise ConfigError(f"{file}: is no packed task, or a damaged one") from None
    there = [name for name in contents if (tasks / name).exists()]
    if there and not force:
        raise ConfigError(f"{tasks / there[0]}: is there already; --force replaces it")
    with writing(tasks):
        tasks.mkdir(parents=True, exist_ok=True)
        # The YAML last: a server that reloads meanwhile finds what it names.
        for name in sorted(contents, key=lambda name: name == manifest["yaml"]):
            with replacing(tasks / name, EVERYBODY) as out:
                out.write(contents[name])
    print(f"written: {', '.join(str(tasks / name) for name in contents)}")
    print(f"next: tailor tasks check {tasks}")
    return 0


def _files_of(task: Path) -> tuple[str, list[Path]]:
    """(the task's name, its YAML and the files it names). Raises ConfigError."""
    from server.config import load_task
    from server.config.declared import task_files

    loaded = load_task(task)
    named = [loaded.speculation.corpus, loaded.vocabulary.profile]
    named += [path for _, _, path in task_files(loaded.speculation)]
    files = [task]
    for path in (Path(name) for name in named if name is not None):
        if not path.is_file():
            raise ConfigError(f"{task}: no file {path}")
        if path.resolve().parent != task.resolve().parent:
            raise ConfigError(f"{task}: {path}: lies elsewhere; put it beside the task's file")
        if path.name not in [file.name for file in files]:
            files.append(path)
    return loaded.name, files


def _read(file: Path, archive: zipfile.ZipFile) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest, and the content of each file that it names, checked. Raises ConfigError."""
    manifest = parsed(archive.read(MANIFEST))
    if manifest["format"] != VERSION:
        raise ConfigError(f"{file}: is of a newer Tailor (format {manifest['format']})")
    if manifest["yaml"] not in manifest["files"]:
        raise ValueError("no task in it")
    if sum(int(facts["bytes"]) for facts in manifest["files"].values()) > MAX_BYTES:
        raise ConfigError(f"{file}: holds more than {MAX_BYTES} bytes")
    contents = {}
    for name, facts in manifest["files"].items():
        if name != Path(name).name or name.startswith("."):
            raise ConfigError(f"{file}: {name[:100]!r} is no name of a file in it")
        with archive.open(name) as member:
            data = member.read(int(facts["bytes"]) + 1)
        if hashlib.sha256(data).hexdigest() != facts["sha256"]:
            raise ConfigError(f"{file}: {name} is damaged: its sha256 is another one")
        contents[name] = data
    return manifest, contents


def _put(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
