"""Measures what a step costs on the real runner, and keeps the figures for the next start.

Gain (gain.py) needs cost(rows, keys) of *this* model on *this* device with *this*
dtype and thread count. The prober runs real steps before the first request: one sequence with a
history of `kv_len` positions, its last token and a draft of num_rows - 1 nodes, every row drawn, as
in decoding with drafts. No block is published, so what it writes into the KV memory is never read.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from drafters.atomic_file import replacing
from drafters.json_text import parsed
from server.engine.batch import Batch, DrawParams, Runner
from server.engine.step_times import CostTable, Prober
from server.types import SamplingParams

_log = logging.getLogger(__name__)
VERSION = 8
"""Of the measurement and of the kernels measured: attention and products are quicker since 8."""

_SLOW_S = 0.25  # a step of 8 rows: measuring would delay the start
_NUM_LIKELY = 8  # ids of a row that drafters ask for
_MOST_LIKELY_S = 1e-9  # an id of the vocabulary: a quarter of it was measured, quiet


def probe_batch(runner: Runner, num_rows: int, kv_len: int, *, drawn: bool = True) -> Batch:
    """One sequence: a root at position kv_len, or as far as num_rows fit, and a chain of
    num_rows - 1 drafted tokens. drawn: whether the rows draw."""
    info = runner.info
    kv_len = min(kv_len, info.max_model_len - num_rows)
    num_blocks = -(-(kv_len + num_rows) // info.block_size)
    rows = np.arange(num_rows, dtype=np.int32)
    slots = kv_len + rows
    none = np.empty(0, np.int32)
    params = DrawParams(SamplingParams(temperature=0.0), 0, none, none, none, none, 0)
    zeros = np.zeros(num_rows, np.int32)
    draws: dict[str, Any] = {
        "draw_rows": rows,
        "draw_params": zeros,
        "draw_parent": rows - 1,
        "draw_positions": slots + 1,
        "draw_mask": zeros - 1,
    }
    # Row r is at depth r: its path is the slots of rows 1..r, a slice of one array.
    return Batch(
        # A rare id again and again: of a head that is screened (kernels/screen.py) little more is
        # multiplied than for a text; for ids without sense it may be all.
        token_ids=zeros + np.int32(info.vocab_size // 4),
        positions=slots,
        seq_ids=zeros,
        slots=slots,
        prefix_len=np.full(num_rows, kv_len + 1, np.int32),
        path_start=zeros,
        path_len=rows,
        path_slots=slots[1:],
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        params=(params,),
        num_draft_rows=num_rows - 1,
        **(draws if drawn else {}),
    )


def _step_s(runner: Runner, batch: Batch) -> float:
    """Seconds that a step takes."""
    began = time.perf_counter()
    runner.launch(batch)
    runner.wait()
    return time.perf_counter() - began


def make_prober(runner: Runner, *, drawn: bool = True) -> Prober:
    """(num_rows, kv_len) -> seconds of one such step on this runner.

    drawn: whether the rows draw; without it the step is that of the body alone, no LM head, as it
    is where the head stays in its file.
    """
    drawn = drawn and not runner.info.head_bytes_in_file
    return lambda rows, kv_len: _step_s(runner, probe_batch(runner, rows, kv_len, drawn=drawn))


def measure_head(runner: Runner) -> tuple[float, float]:
    """(seconds of the LM head and its draw for one row, for each further row), medians.

    The difference between steps that draw from every row and steps that draw from none.
    """
    with_head, body = make_prober(runner), make_prober(runner, drawn=False)
    many = max(2, min(8, runner.info.max_num_batched_tokens, runner.info.max_model_len // 2))
    kv_len, repeats = max(1, min(64, runner.info.max_model_len - many)), 7
    seconds = []
    for num_rows in (1, many):
        with_head(num_rows, kv_len), body(num_rows, kv_len)  # what is set up on first use
        pairs = [(with_head(num_rows, kv_len), body(num_rows, kv_len)) for _ in range(repeats)]
        drawn_s, body_s = (sorted(times)[repeats // 2] for times in zip(*pairs, strict=True))
        seconds.append(max(drawn_s - body_s, 1e-9))
    return seconds[0], max(0.0, (seconds[1] - seconds[0]) / (many - 1))


def measure_likely(runner: Runner) -> float:
    """Seconds that the likeliest ids of one row take: the difference between steps of 16 rows with
    them and without, the least of each. What others on the machine add is bounded."""
    info = runner.info
    if info.head_bytes_in_file:
        return 0.0
    many = max(1, min(16, info.max_num_batched_tokens, info.max_model_len // 2))
    plain = probe_batch(runner, many, max(1, min(64, info.max_model_len - many)))
    batches = (plain, replace(plain, num_likely=_NUM_LIKELY))
    least = [float("inf")] * 2
    for turn in range(6):  # the first one pays for what is set up on first use
        for i, batch in enumerate(batches):
            seconds = _step_s(runner, batch)
            least[i] = min(least[i], seconds) if turn else least[i]
    return min(max(0.0, least[1] - least[0]) / many, _MOST_LIKELY_S * info.vocab_size)


def _improved(table: CostTable, runner: Runner, short_len: int, most: int) -> CostTable:
    """The table with the steps that are quicker today: whoever uses the machine beside only adds to
    a step, and a table that was measured beside other work makes drafts look cheap for ever. A
    tenth of a second where the machine is quiet."""
    if table.cost(8) > _SLOW_S:
        return table
    plain = table.as_dict()
    probe = make_prober(runner)
    num_known = sum(rows <= min(16, most) for rows in plain["rows"])
    probe(1, short_len)
    for i, rows in enumerate(plain["rows"][:num_known]):
        seconds = probe(rows, short_len) - table.key_s * rows * short_len
        plain["seconds"][i] = min(plain["seconds"][i], max(seconds, 1e-9))
    return CostTable.from_dict(plain)


def load_or_measure(runner: Runner, path: Path | None, *, max_rows: int) -> CostTable:
    """The runner's CostTable: from `path` when it holds one, else measured and written there.

    path: a file whose name says device, model, dtype and threads; None measures every time. A
    damaged file is measured again; steps of a few rows that are quicker now than in the file take
    their place there. Whatever it says, served steps correct it (step_times.py). Sizes beyond
    max_rows are extrapolated in proportion.
    """
    info = runner.info
    most = max(1, min(max_rows, info.max_num_batched_tokens, info.max_model_len // 2))
    short = max(1, min(64, info.max_model_len // 4))  # keys before the rows of a measured step
    if path is not None:
        try:
            plain = parsed(path.read_text(encoding="utf-8"))
            if plain["version"] == VERSION:
                known = CostTable.from_dict(plain)
                table = _improved(known, runner, short, most)
                if table.as_dict() != known.as_dict():
                    _write(path, {"version": VERSION, **table.as_dict()})
                return table
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("the cost table %s cannot be read (%s): measuring again", path, error)
    began = time.perf_counter()
    long = max(short, min(512, info.max_model_len - most))
    table = CostTable.measure(
        make_prober(runner), most, short_len=short, long_len=long,
        body=make_prober(runner, drawn=False),
    )  # fmt: skip
    table = CostTable.from_dict({**table.as_dict(), "likely_s": measure_likely(runner)})
    _log.info(
        "measured the cost of a step in %.1f s: 1 row %.2f ms, 8 rows %.2f ms",
        time.perf_counter() - began,
        table.cost(1) * 1e3,
        table.cost(8) * 1e3,
    )
    if path is not None:
        _write(path, {"version": VERSION, **table.as_dict()})
    return table


def _write(path: Path, plain: dict[str, object]) -> None:
    """Write atomically; an OSError is ignored, because a start need not keep its measurement."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(plain).encode())
    except OSError as error:
        _log.warning("the cost table cannot be kept in %s: %s", path, error)
