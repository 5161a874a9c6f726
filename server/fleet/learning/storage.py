"""Storage: bytes under names, in a folder or in whatever fsspec can reach.

A file is there whole or not at all: in a folder it is written beside its place and moved there, an
object store puts objects whole. Where neither holds, readers find out: names tell the hash of what
they hold (places.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafters.atomic_file import replacing


class StorageError(OSError):
    """The storage is away or refuses."""


class Storage:
    """url: a folder, or a URL as fsspec reads it; credentials are where fsspec finds them.

    Paths are relative, with slashes. Every method may block. Raises StorageError; `read` also
    FileNotFoundError.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._fs: Any = None
        self._root = ""

    def read(self, path: str, *, most: int) -> bytes:
        """What is in a file, which may hold `most` bytes."""
        try:
            fs, place = self._at(path)
            data: bytes = fs.cat_file(place, start=0, end=most + 1)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise _away(error) from error
        if len(data) > most:
            raise StorageError(f"{path} has more than {most} bytes")
        return data

    def write(self, path: str, data: bytes) -> None:
        """Put a file there, in place of what there is."""
        try:
            fs, place = self._at(path)
            if "file" in _names(fs):
                local = Path(place)
                local.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                with replacing(local) as out:
                    out.write(data)
            else:
                fs.pipe_file(place, data)
        except Exception as error:
            raise _away(error) from error

    def files(self, path: str = "") -> list[str]:
        """All files below a folder, in order; none where there is no such folder."""
        try:
            fs, place = self._at(path)
            found = fs.find(place)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise _away(error) from error
        return sorted(str(name)[len(self._root) :].lstrip("/") for name in found)

    def folders(self, path: str = "") -> list[str]:
        """The names of the folders in a folder."""
        try:
            fs, place = self._at(path)
            found = fs.ls(place, detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise _away(error) from error
        names = (str(f["name"]).rstrip("/") for f in found if f["type"] == "directory")
        return sorted(name.rpartition("/")[2] for name in names if name != place)

    def delete(self, path: str) -> None:
        """A file, if it is there."""
        self._remove(path, recursive=False)

    def delete_folder(self, path: str) -> None:
        """A folder with all that is in it, if it is there."""
        self._remove(path, recursive=True)

    def _remove(self, path: str, *, recursive: bool) -> None:
        try:
            fs, place = self._at(path)
            fs.rm(place, recursive=recursive)
        except FileNotFoundError:
            pass
        except Exception as error:
            raise _away(error) from error

    def _at(self, path: str) -> tuple[Any, str]:
        """The file system and the place in it."""
        if self._fs is None:
            import fsspec

            # Others write there, too: nothing is remembered of what a folder holds.
            self._fs, root = fsspec.url_to_fs(self._url, use_listings_cache=False)
            self._root = root.rstrip("/")
        return self._fs, f"{self._root}/{path}" if path else self._root


def _names(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _away(error: Exception) -> StorageError:
    return StorageError(f"{type(error).__name__}: {str(error)[:200]}")
