"""From what a task's file or a request says of drafting to a Drafter with its corpus.

The same function makes the drafters of an engine and those that `tailor tasks tune` tries.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drafters.base import Drafter
    from server.engine.task_store import TaskMemory
    from server.types import SpeculationParams

__all__ = ["WARM_UP", "content_id", "make_task_drafter"]

WARM_UP = "warm-up"
"""The task of the requests that an engine answers itself before it is ready."""

_OPTION_NAMES = {"mix.lambda": "mix.mixing"}
"""Where a drafter's parameter is called otherwise than in the papers and in task files."""


def make_task_drafter(
    name: str,
    fingerprint: str,
    eos_token_ids: tuple[int, ...],
    task: str,
    speculation: SpeculationParams,
    *,
    model: str | None = None,
    memory: TaskMemory | None = None,
) -> Drafter:
    """The drafter that a task or request names, with its options and the task's corpus.

    memory: what the task has learned is drafted from too, and its calibration goes on.
    fingerprint: of the tokenizer; a corpus of another one is refused. eos_token_ids: never
    drafted, because what comes after them is cut off. model: the model's fingerprint; bigrams of
    another one are refused (None: not checked). Raises ValueError.
    """
    from drafters import make_drafter

    options: dict[str, Any] = {}
    if name in ("auto", "prompt", "suffix"):
        options["eos_token_ids"] = eos_token_ids
    for key, value in speculation.options:
        section, _, option = _OPTION_NAMES.get(key, key).partition(".")
        if section == name:
            options[option] = value
    corpus_id = ""
    if speculation.corpus is not None and name in ("auto", "mix"):
        from drafters.corpus import Corpus

        try:
            options["corpus"] = Corpus.load(speculation.corpus, fingerprint=fingerprint)
            corpus_id = content_id(Path(speculation.corpus))
        except OSError as error:
            raise ValueError(f"corpus of task {task}: {error.strerror}") from None
    if name == "grammys" and "table" in options:
        from drafters.array_file import FingerprintError
        from drafters.published.grammys import BigramTable
        from server.engine.bigrams import model_fingerprint

        expected = None if model is None else model_fingerprint(model)
        try:
            options["table"] = BigramTable.load(options["table"], fingerprint=expected)
        except OSError as error:
            raise ValueError(f"bigrams of task {task}: {error.strerror}") from None
        except FingerprintError:
            raise ValueError(
                f"bigrams of task {task}: {options['table']} was taken from another model; make it "
                "again with `tailor corpus bigrams`"
            ) from None
    if memory is not None and speculation.learn_tokens > 0 and name in ("auto", "mix"):
        layer = memory.learned(
            task, speculation.learn_scope, speculation.corpus, speculation.learn_tokens
        )
        if layer is not None:
            options["learned" if name == "auto" else "corpus"] = layer
    drafter = make_drafter(name, **options)
    if memory is not None and task != WARM_UP:
        memory.calibrate(task, drafter, corpus_id)
    return drafter


def content_id(path: Path) -> str:
    """Names a file by its size and samples of its content: a copy is the same, an edit is not.

    Raises OSError.
    """
    import hashlib

    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        for i in range(16):
            file.seek(size * i // 16)
            digest.update(file.read(4096))
    return digest.hexdigest()[:24]
