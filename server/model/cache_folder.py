"""The cache folder: where it is, hashes of its files, and its errors.

A converted model's marker (tailor.json) lists the sha256 of each of its files as written.
`check_kept` compares them: once per machine, and again after any change of a file's size or times.
Weights that were written in part still load, and the model answers badly without any error.

Importing this module imports neither torch nor transformers, nor anything that is installed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from drafters.atomic_file import replacing
from drafters.json_text import object_in
from server.errors import CacheFolderError, IntegrityError

MARKER = "tailor.json"
"""The file in a converted folder that says what it was made of, and the hashes of the others."""

_UNCHECKED = re.compile(rf"{re.escape(MARKER)}|chat_template\.jinja|[0-9a-f]{{32}}\.(json|ropes)")
_MAX_REMEMBERED = 400

_DISK_ERRORS = frozenset(
    getattr(errno, name)
    for name in (
        "EACCES", "EDQUOT", "EEXIST", "EFBIG", "EIO", "EISDIR", "ENOSPC", "ENOTDIR", "EPERM",
        "EROFS",
    )
)  # fmt: skip


def cache_dir() -> Path:
    """$TAILOR_CACHE_DIR, or the user's cache folder. Not created."""
    override = os.environ.get("TAILOR_CACHE_DIR")
    if override:
        return Path(override).expanduser()
    import platformdirs  # here: loadtest/gpu_check.py runs where it is not

    return Path(platformdirs.user_cache_dir("tailor"))


def model_dirs() -> list[Path]:
    """Where models that were made lie: $TAILOR_MODELS_DIR (those of an image, which nothing writes
    to), where it is set, and the cache's folder."""
    given = os.environ.get("TAILOR_MODELS_DIR")
    return [*([Path(given).expanduser()] if given else []), cache_dir() / "models"]


def made_folder(name: str) -> Path:
    """The folder of that name in the first of model_dirs() that has it whole; else the cache's."""
    folders = [folder / name for folder in model_dirs()]
    return next(filter(is_made, folders), folders[-1])


def is_made(folder: Path) -> bool:
    """Whether a folder was made whole. A marker that cannot be read is of one that a disk has lost
    parts of."""
    return bool(object_in(folder / MARKER))


@contextmanager
def making(
    folder: Path, kind: str, about: dict[str, Any], report: Callable[[str], None], lock: str = ""
) -> Iterator[Path | None]:
    """A folder to write into, which takes the place of `folder` by one rename when the block ends
    well: whole, or absent. None where another process has made `folder` meanwhile, of the same.

    kind: of its name until then. about: what its marker says, to which the block may add. lock: of
    folders with the same, "" is the folder's own, one process makes one at a time, and deletes what
    a killed one had begun. Raises CacheFolderError, as writing_to_cache does.
    """
    from filelock import FileLock, Timeout

    with writing_to_cache():
        folder.parent.mkdir(parents=True, exist_ok=True)
        name = lock or folder.name
        alone = FileLock(folder.parent / f".{name}.lock")
        try:
            held = alone.acquire(timeout=0)
        except Timeout:
            report(f"Another process is making {name}; waiting for it")
            held = alone.acquire()
        with held:
            for begun in folder.parent.glob(f".*-{folder.name}-*"):
                shutil.rmtree(begun, ignore_errors=True)
            if about.items() <= object_in(folder / MARKER).items():
                yield None
                return
            scratch = Path(tempfile.mkdtemp(prefix=f".{kind}-{folder.name}-", dir=folder.parent))
            try:
                yield scratch
                text = json.dumps(about, indent=1) + "\n"
                (scratch / MARKER).write_text(text, encoding="utf-8")
                for file in scratch.iterdir():
                    file.chmod(0o644)
                scratch.chmod(0o755)
                if folder.exists():  # not made here: perhaps incomplete
                    shutil.rmtree(folder)
                scratch.rename(folder)
            except BaseException:
                shutil.rmtree(scratch, ignore_errors=True)
                raise


@contextmanager
def writing_to_cache() -> Iterator[None]:
    """Turn errors of a full or read-only disk inside the block into a CacheFolderError that says
    what to do. Other errors pass."""
    try:
        yield
    except Exception as error:
        what = _problem_of_the_disk(error)
        if not what:
            raise
        where = getattr(error, "filename", None)
        raise CacheFolderError(
            f"the cache folder {cache_dir()} cannot be written: {what}"
            f"{f' ({where})' if where else ''}. Free space there, let this user write to it, or "
            "name another folder in TAILOR_CACHE_DIR."
        ) from None


def _problem_of_the_disk(error: Exception) -> str:
    """In a few words; "" when the error is another one."""
    if isinstance(error, OSError) and error.errno is not None and error.errno in _DISK_ERRORS:
        return error.strerror or os.strerror(error.errno)
    # safetensors and tokenizers write in Rust, and raise errors of their own.
    full = os.strerror(errno.ENOSPC)
    return full if full in str(error) or "os error 28" in str(error) else ""


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """sha256 of a file, kept in the cache folder by (path, size, inode, times).

    Hashing reads every byte, a second per gigabyte or two; a file that was hashed and has not
    changed since is not read again. The time of the inode's last change counts too, because
    tools may reset the modification time, but not that one.
    """
    stat = path.stat()
    key = "|".join(
        str(part)
        for part in (path.resolve(), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    )
    store = cache_dir() / "sha256.json"
    known = object_in(store)
    if isinstance(known.get(key), str):
        return str(known[key])
    value = sha256_of(path)
    known = dict(list(known.items())[-_MAX_REMEMBERED:]) | {key: value}
    # A read-only or full cache only costs the next start a second.
    with suppress(OSError):
        store.parent.mkdir(parents=True, exist_ok=True)
        with replacing(store) as file:
            file.write(json.dumps(known, indent=1).encode())
    return value


def hashes_of(folder: Path) -> dict[str, str]:
    """sha256 of every file of a folder, by name, but of its marker, of what known_config.py keeps,
    which is checked where it is read and made anew, and of the chat template, in whose place an
    operator may put another."""
    return {
        file.name: sha256_of(file)
        for file in sorted(folder.iterdir())
        if file.is_file() and not _UNCHECKED.fullmatch(file.name)
    }


def check_kept(folder: Path) -> Path:
    """Check the hashes of a converted folder; any other folder passes. Returns it.

    A folder that was converted before hashes were kept is taken as it is. Raises IntegrityError.
    """
    listed = object_in(folder / MARKER).get("files")
    for name, wanted in listed.items() if isinstance(listed, dict) else ():
        file = folder / name
        if not file.is_file():
            problem = "is gone"
        elif remembered_sha256(file) != wanted:
            problem = "has changed since it was converted: it is damaged, or was edited"
        else:
            continue
        raise IntegrityError(f"{file} {problem}. Delete this folder, and it is made anew: {folder}")
    return folder


def origin_of(file: Path) -> str:
    """sha256 of what a file of a folder that `check_kept` passed was converted from, or of the file
    itself."""
    marker = object_in(file.parent / MARKER)
    listed, source = marker.get("files"), marker.get("source_sha256")
    is_converted = isinstance(listed, dict) and file.name in listed
    return source if is_converted and isinstance(source, str) else remembered_sha256(file)
