"""SharedOutputs: what several writers learned of one task, merged in any order to the same.

Each example has a place among all: when it was written, in which segment, and its number there. The
newest that fit are held. `floor` is the place of the newest one that was given up: whatever is not
newer is given up too, wherever it turns up again. So merging is commutative, associative and
idempotent: a segment that is merged twice, late, or by two builders at once, changes nothing.

Beside the examples, a file holds counts of drafts that came true (drafters.shared_counts). It is a
file of drafters.learned with more arrays: LearnedOutputs.restore reads it, too.

    parts = [load_shared(path, fingerprint=..., scope=...) for path in segments]
    merge([part.outputs for part in parts], max_tokens=200_000)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drafters.array_file import ArrayFileError, Column
from drafters.arrays import Int32
from drafters.learned import FORMAT, LearnedOutputs, arrays_of, examples_of, text_of
from drafters.shared_counts import Counts, TableId, pack, unpack

Place = tuple[int, int, int]
"""(time.time_ns() of its segment, a number of the segment, number of the example in it)"""

NOWHERE: Place = (0, 0, 0)

_FORMAT = replace(
    FORMAT,
    columns={
        **FORMAT.columns,
        "places": Column("int64", ("examples+1", 3), low=0),
        "counts.*.cells": Column("int64", (None,), low=0, ascends=True),
        "counts.*.values": Column("float64", (None,), low=0),
    },
)


@dataclass(frozen=True, slots=True)
class SharedOutputs:
    """examples: (prompt ids, output ids) by place, all newer than floor."""

    examples: Mapping[Place, tuple[Int32, Int32]] = field(default_factory=dict)
    floor: Place = NOWHERE

    @property
    def num_tokens(self) -> int:
        """Tokens of the outputs."""
        return sum(int(output.shape[0]) for _, output in self.examples.values())

    def oldest_first(self) -> list[tuple[Int32, Int32]]:
        """As LearnedOutputs takes them."""
        return [self.examples[place] for place in sorted(self.examples)]


@dataclass(frozen=True, slots=True)
class SharedFile:
    """What a file holds. meta: of plain values, as the writer said."""

    outputs: SharedOutputs
    counts: Mapping[TableId, Counts]
    meta: Mapping[str, Any]


def segment_of(
    examples: Iterable[tuple[Int32, Int32]], written_ns: int, number: int
) -> SharedOutputs:
    """What one writer appends at once; its examples in the order in which they came."""
    return SharedOutputs(
        {(written_ns, number, i + 1): example for i, example in enumerate(examples)}
    )


def merge(parts: Iterable[SharedOutputs], *, max_tokens: int, oldest_ns: int = 0) -> SharedOutputs:
    """The newest examples of all parts whose outputs have max_tokens in all, and their prompts
    LearnedOutputs.PROMPT_SHARE times as many; none written before oldest_ns, and of equal ones the
    newest."""
    parts = list(parts)
    floor = max([(oldest_ns, 0, 0), *(part.floor for part in parts)])
    found = {
        place: example
        for part in parts
        for place, example in part.examples.items()
        if place > floor
    }
    left, prompts_left = max_tokens, LearnedOutputs.PROMPT_SHARE * max_tokens
    kept: dict[Place, tuple[Int32, Int32]] = {}
    texts: set[int] = set()
    for place in sorted(found, reverse=True):
        prompt, output = found[place]
        if (text := text_of(prompt, output)) in texts:
            continue
        texts.add(text)
        left -= int(output.shape[0])
        prompts_left -= int(prompt.shape[0])
        if left < 0 or prompts_left < 0:
            floor = place
            break
        kept[place] = found[place]
    return SharedOutputs(kept, floor)


def save_shared(path: Path, file: SharedFile, *, fingerprint: str, scope: str) -> None:
    """Write atomically. fingerprint: of the tokenizer; scope: whose outputs these are."""
    places = sorted(file.outputs.examples)
    arrays = arrays_of(file.outputs.oldest_first())
    arrays["places"] = np.asarray([*places, file.outputs.floor], np.int64)
    tables = []
    for i, (table, counts) in enumerate(sorted(file.counts.items())):
        shapes = {}
        for name, (cells, values, shape) in pack(counts).items():
            arrays[f"counts.{i}.{name}.cells"] = cells
            arrays[f"counts.{i}.{name}.values"] = values
            shapes[name] = list(shape)
        tables.append([*table, shapes])
    meta = {**file.meta, "scope": scope, "num_seen": len(places), "tables": tables}
    _FORMAT.write(path, arrays, fingerprint=fingerprint, meta=meta)


def load_shared(path: Path, *, fingerprint: str | None, scope: str | None) -> SharedFile:
    """What save_shared wrote; None: of any tokenizer, of any scope.

    Raises FileNotFoundError; FingerprintError; ArrayFileError for all else that is not right.
    """
    meta, arrays, _ = _FORMAT.read(path, fingerprint=fingerprint)
    if scope is not None and meta.get("scope") != scope:
        raise ArrayFileError(f"{path} holds what another task or client taught")
    try:
        *places, floor = (tuple(row) for row in arrays["places"].tolist())
        if len(places) != len(set(places)):
            raise ValueError("two examples have one place")
        if type(meta.get("max_tokens", 0)) is not int:
            raise ValueError("max_tokens is no number")
        held = dict(zip(places, examples_of(arrays), strict=True))
        counts = {
            (str(drafter), str(corpus)): _counts(arrays, i, shapes)
            for i, (drafter, corpus, shapes) in enumerate(meta["tables"])
        }
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ArrayFileError(f"{path} is damaged: {error}") from error
    return SharedFile(SharedOutputs(held, floor), counts, meta)


def _counts(arrays: Mapping[str, npt.NDArray[Any]], i: int, shapes: Mapping[str, Any]) -> Counts:
    parts = {}
    for name, (num_rows, num_cells) in shapes.items():
        if not (0 < num_rows < 16 and 0 < num_cells < 1 << 20):
            raise ValueError("its counts have another shape")
        cells, values = (arrays[f"counts.{i}.{name}.{what}"] for what in ("cells", "values"))
        parts[name] = cells, values, (num_rows, num_cells)
    return unpack(parts)
