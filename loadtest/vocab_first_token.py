"""Time to the first token where every row of the prompt has to be copied.

`vocab_speed --first-token` runs it. Time is counted from the request to the engine's first Delta.
Before each request a prompt of other ids pushes all rows out of the cache, and no prompt is read
from the prefix cache. T is the profile as it is, so that most rows are the prompt's. Bytes copied
are counted for each request.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from loadtest import machine
from loadtest.options import emit
from loadtest.stats import ratio, summarize
from server.engine.engine import Engine
from server.model.adapter import EMBEDDING, open_safetensors
from server.types import Request, SamplingParams, VocabularyParams
from vocab_store.profile import VocabProfile

ROOM = 256
"""Rows of ids that `exact` may have learned, beside a prompt's."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """From submit to the first Delta of one request. num_loaded: LM-head rows copied for it."""

    seconds: float
    num_loaded: int
    num_ids: int
    token_id: int


def first_token(
    engine: Engine, prompt: Sequence[int], vocabulary: VocabularyParams, name: str
) -> FirstToken:
    """Time one request's first token; the rest of it is not looked at. Raises RuntimeError."""
    request = Request(
        request_id=name,
        task="speed",
        model=engine.info.name,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
        vocabulary=vocabulary,
        cache_salt=name,
    )
    seconds = 0.0
    num_loaded = num_ids = 0
    token_ids: list[int] = []
    began = time.perf_counter()
    engine.submit(request)
    while engine.has_work:
        for delta in engine.step():
            if delta.finish_reason == "error":
                raise RuntimeError(f"{name}: {delta.error}")
            if delta.token_ids and not token_ids:
                seconds = time.perf_counter() - began
            token_ids += delta.token_ids
            if delta.vocabulary is not None:
                num_loaded += delta.vocabulary.num_loaded
                num_ids = max(num_ids, delta.vocabulary.num_ids)
    return FirstToken(seconds, num_loaded, num_ids, token_ids[0])


def unseen_ids(
    prompts: Sequence[Sequence[int]], profile: VocabProfile, num: int, vocab_size: int
) -> list[int]:
    """num ids that no prompt and no slice holds. Raises ValueError where there are too few."""
    seen = np.zeros(vocab_size, bool)
    seen[profile.slice.ids] = True
    for prompt in prompts:
        seen[list(prompt)] = True
    # From above: the rare ids, none of which means anything to a tokenizer's post-processor.
    found = np.flatnonzero(~seen)[::-1][:num]
    if found.shape[0] < num:
        raise ValueError(f"the vocabulary has only {found.shape[0]} ids that are nowhere used")
    return [int(i) for i in found]


def most_dynamic(prompts: Sequence[Sequence[int]], profile: VocabProfile) -> int:
    """Most ids of a prompt that T lacks: the pool that just holds one request's rows."""
    held = profile.slice.ids
    return max(int(np.setdiff1d(np.asarray(p, np.int32), held).shape[0]) for p in prompts)


def measure_first_tokens(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    flush: Sequence[int],
    *,
    profile: str,
    num_warm_up: int,
    row_bytes: int,
) -> dict[str, Any]:
    """Per mode: milliseconds, their ratio to full within a prompt, bytes copied a request."""
    modes = {
        "full": VocabularyParams(),
        "slice": VocabularyParams("slice", profile),
        "exact": VocabularyParams("exact", profile),
        "full_again": VocabularyParams(),
    }
    names = list(modes)
    rounds: dict[str, list[FirstToken]] = {name: [] for name in names}
    for i, prompt in enumerate(prompts):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            first_token(engine, flush, modes["slice"], f"{i}-{name}-flush")
            found = first_token(engine, prompt, modes[name], f"{i}-{name}")
            if i >= num_warm_up:
                rounds[name].append(found)
    full_s = [one.seconds for one in rounds["full"]]
    figures_of: dict[str, Any] = {}
    for name, found_all in rounds.items():
        summary = summarize([1000 * one.seconds for one in found_all])
        copied = summarize([float(one.num_loaded * row_bytes) for one in found_all])
        assert summary is not None and copied is not None
        figures_of[name] = {
            "ms": summary.to_json(),
            "against_full": ratio([one.seconds for one in found_all], full_s).to_json(),
            "bytes_copied": copied.to_json(),
            "most_ids": max(one.num_ids for one in found_all),
            "same_as_full": sum(
                one.token_id == full.token_id
                for one, full in zip(found_all, rounds["full"], strict=True)
            ),
        }
    return figures_of


def head_memory(
    folder: Path, vocab_size: int, row_bytes: int, num_ids: dict[str, int]
) -> dict[str, Any]:
    """Bytes of embedding and head, counted. num_ids: by mode, ids of its largest slice (0: full).

    beside_arithmetic: what has to lie where the head is computed. host: what else the mode reads;
    on a CPU both are one memory, and a slice's rows are a second copy of that part of the head.
    The embedding table is mapped from the model's file, once a host, in every mode.
    """
    whole = vocab_size * row_bytes
    files = [open_safetensors(path) for path in sorted(folder.glob("*.safetensors"))]
    table = next(file.get_tensor(EMBEDDING) for file in files if EMBEDDING in file.keys())  # noqa: SIM118
    return {
        "embedding_table_mapped": table.nbytes,
        "modes": {
            mode: {
                "beside_arithmetic": num * row_bytes if num else whole,
                "host_head": whole if mode.startswith("exact") else 0,
            }
            for mode, num in num_ids.items()
        },
    }


def measure(
    engine: Any, made: VocabProfile, prompts: list[list[int]], options: argparse.Namespace
) -> int:
    """Time the first tokens, show them, and return the exit status."""
    vocab_size, row_bytes = made.slice.vocab_size, engine.runner.head_row_bytes
    try:
        flush = unseen_ids(prompts, made, engine.settings.slice_cache_rows, vocab_size)
        found = measure_first_tokens(
            engine, prompts, flush,
            profile="first", num_warm_up=options.warm_up, row_bytes=row_bytes,
        )  # fmt: skip
        result = {
            "tool": "vocab_speed",
            "what": "first token",
            "machine": machine.describe(),
            "model": options.folder.name,
            "task": options.data.name,
            "vocab_size": vocab_size,
            "profile_ids": made.slice.num_ids,
            "row_bytes": row_bytes,
            "mean_prompt_tokens": float(np.mean([len(p) for p in prompts[options.warm_up :]])),
            "modes": found,
            "memory": head_memory(
                options.folder,
                vocab_size,
                row_bytes,
                {name: row["most_ids"] for name, row in found.items()},
            ),
        }
    finally:
        engine.close()
    table = Table(title=f"{result['model']}, {result['task']}: first token, rows copied")
    for column in ("mode", "ms", "against full", "95 %", "KB copied", "first ids as full"):
        table.add_column(column, justify="right")
    for name, row in found.items():
        against = row["against_full"]
        table.add_row(
            name,
            f"{row['ms']['p50']:.1f}",
            f"{against['median']:.3f}",
            f"{against['low']:.3f}-{against['high']:.3f}",
            f"{row['bytes_copied']['mean'] / 1000:.0f}",
            f"{row['same_as_full']}/{options.prompts}",
        )
    Console(stderr=True, width=150).print(table)
    emit(result, options.json)
    return 1 if found["exact"]["same_as_full"] < options.prompts else 0
