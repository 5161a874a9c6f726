"""Integer weights of a model: made from its tensors, kept in the cache folder, mapped next time.

Quantising reads every weight and takes seconds to minutes, and `int8` is measured first
(integers/outliers.py). The result is kept under what it was made of: the fingerprint of config,
weights and adapter, the form, and our own code that rounds. A kept folder has the marker of
converted ones (cache_folder.py), is checked and removed like them, and a damaged one is refused. On
a full disk nothing is kept, and the next start quantises again.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from drafters.json_text import object_in
from server.errors import CacheFolderError
from server.machine import cores
from server.model.cache_folder import (
    MARKER,
    cache_dir,
    check_kept,
    hashes_of,
    is_made,
    making,
)
from server.model.cpu.integers import forms, outliers, packed, weights
from server.model.cpu.integers.packed import IntegerWeights
from server.model.cpu.integers.weights import KeptWeights, Measured, write_panels
from server.model.scoring import Text, prompt_batch
from server.model.shape import ModelShape
from server.types import ModelInfo

if TYPE_CHECKING:
    from server.model.cpu.records import Scratch
    from server.model.loader import ModelFolder

_log = logging.getLogger(__name__)

WORTH_BYTES = 32 << 20
"""Smaller panels are made faster than they are found in the cache, and are not kept."""

_TELL_S = 3.0  # between lines of the log


def integer_weights(
    folder: ModelFolder,
    shape: ModelShape,
    *,
    form: str,
    max_rows: int,
    threads: int | None,
    head_in_file: bool = False,
) -> tuple[IntegerWeights, str]:
    """(the weights, a phrase that says how they are kept). form, head_in_file: as IntegerWeights;
    what is rounded here is mapped from the cache, head and all.

    Raises IntegrityError for a kept folder that is damaged.
    """
    if form == "file":
        weights = folder.weights
        return IntegerWeights(
            shape, weights, form=form, max_rows=max_rows, head_in_file=head_in_file
        ), ""
    place = _place(folder, form, shape.vocab_size)
    if is_made(place):
        found = KeptWeights(check_kept(place))
        made = IntegerWeights(shape, folder.weights, form=form, max_rows=max_rows, kept=found)
        return made, _told(found.measured, form, shape)
    _log.info("rounding the weights to %s; the next start finds them in the cache", form)
    measured = _measured(folder, shape, threads) if form == "int8" else Measured()
    made = IntegerWeights(
        shape, folder.weights, form=form, max_rows=max_rows, measured=measured,
        progress=_telling("layers rounded"),
    )  # fmt: skip
    if made.num_bytes >= WORTH_BYTES:
        try:
            about: dict[str, Any] = {
                "source": f"{folder.path.name}, weights {form}",
                "model": str(folder.path), "form": form,
            }  # fmt: skip
            with making(place, "pack", about, _log.info) as scratch:
                if scratch is not None:
                    write_panels(scratch, made.parts, measured)
                    about["files"] = hashes_of(scratch)
        except CacheFolderError as error:
            _log.warning("the quantised weights are not kept for the next start: %s", error)
    return made, _told(measured, form, shape)


def measured_inputs(folder: ModelFolder, shape: ModelShape, *, threads: int | None) -> Measured:
    """What `int8` measures of a model: as it is kept, else measured now.

    Raises IntegrityError for a kept folder that is damaged.
    """
    place = _place(folder, "int8", shape.vocab_size)
    if is_made(place):
        return KeptWeights(check_kept(place)).measured
    return _measured(folder, shape, threads)


def _telling(what: str) -> Callable[[int, int], None]:
    """Tells the log (done, all) every few seconds."""
    told = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= _TELL_S:
            told = time.monotonic()
            _log.info("%s: %d of %d", what, done, total)

    return tell


def _told(measured: Measured, form: str, shape: ModelShape) -> str:
    if form != "int8":
        return ""
    in_blocks = weights.told(measured.in_blocks, shape.num_layers)
    return f"inputs spread; in blocks: {in_blocks or 'none'}"


def kept_folders(model: Path) -> list[tuple[str, Path]]:
    """(form, folder) of what is kept of a model's folder."""
    found = []
    for marker in sorted((cache_dir() / "models").glob(f"packed-*/{MARKER}")):
        told = object_in(marker)
        if told.get("model") == str(model):
            found.append((str(told.get("form")), marker.parent))
    return found


def _place(folder: ModelFolder, form: str, vocab_size: int) -> Path:
    # The tokenizer, which is no part of the fingerprint, says how many rows the head has.
    digest = hashlib.sha256(f"{folder.fingerprint}|{form}|{vocab_size}".encode())
    for module in (forms, outliers, packed, weights):
        digest.update(Path(str(module.__file__)).read_bytes())
    return cache_dir() / "models" / f"packed-{digest.hexdigest()[:24]}"


def _measured(folder: ModelFolder, shape: ModelShape, threads: int | None) -> Measured:
    """What inputs are spread with and which layers are in blocks, of a run with all in blocks."""
    from tokenizers import Tokenizer

    from server.model.cpu.runner import BLOCK_SIZE, CpuRunner

    tokenizer = Tokenizer.from_file(str(folder.tokenizer_file))
    ids = [i for i in tokenizer.encode(outliers.TEXT).ids if i < shape.vocab_size]
    ids = ids[: min(outliers.NUM_TOKENS, shape.max_position_embeddings)]
    # Nothing is drawn, so one panel of the head will do.
    small = replace(shape, vocab_size=min(shape.vocab_size, forms.PANEL))
    blocks = IntegerWeights(small, folder.weights, form="int8-blocks", max_rows=len(ids))
    info = ModelInfo(
        name="outliers", vocab_size=small.vocab_size, max_model_len=len(ids), eos_token_ids=(),
        num_blocks=-(-len(ids) // BLOCK_SIZE), block_size=BLOCK_SIZE, device="cpu",
        dtype="int8-blocks", fingerprint="", max_num_seqs=1, max_num_batched_tokens=len(ids),
        kv_dtype="float32",
    )  # fmt: skip
    runner = CpuRunner(small, blocks, folder.ropes(len(ids)), info, num_threads=threads)
    batch = prompt_batch(Text((*ids, 0), len(ids)))  # the last is only scored

    def run(num_layers: int) -> Scratch:
        return runner.run_layer(batch, num_layers - 1) if num_layers else runner.embed(batch)

    try:
        norms = np.asarray(blocks.layers.norms)
        return outliers.measured(
            shape, folder.weights, norms, run, len(ids), threads=threads or cores(),
            progress=_telling("layers measured"),
        )  # fmt: skip
    finally:
        runner.close()
