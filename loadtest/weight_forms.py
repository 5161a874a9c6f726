"""What the weights_* tools share: runners of one model with its weights kept in several ways."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from server.engine.batch import Runner
from server.errors import ModelError
from server.model.build import RunnerSpec, build_runner
from server.model.catalog import model_folder
from server.model.gguf_folder import file_folder
from server.types import EngineSizes

FORMS = ("float32", "bfloat16", "int8", "int8-blocks", "int4")
"""What `engine.weights` can be for every model."""


def runner_of(
    model: str, form: str, *, adapter: str | None, threads: int | None, max_rows: int
) -> tuple[Runner, Path]:
    """(a runner of the model, its folder). form: one of FORMS or "file"; behind a colon, what K and
    V are kept as (auto). Raises ModelError for what cannot be served so."""
    weights, _, kv_dtype = form.partition(":")
    if weights not in (*FORMS, "file"):
        raise ModelError(f"{form!r} is none of {', '.join(FORMS)}, file")
    folder = file_folder(model) if weights == "file" else model_folder(model)
    sizes = EngineSizes(max_num_seqs=1, max_num_batched_tokens=max_rows, kv_bytes=256 << 20)
    spec = RunnerSpec(
        name=form,
        folder=str(folder),
        adapter=adapter,
        weights=weights,
        kv_dtype=kv_dtype or "auto",
        sizes=sizes,
        threads=threads,
    )
    return build_runner(spec), folder


def forms_of(names: str) -> Sequence[str]:
    """A list with commas, float32 first: everything is compared with it."""
    given = [name for name in names.split(",") if name != "float32"]
    return ["float32", *given]
