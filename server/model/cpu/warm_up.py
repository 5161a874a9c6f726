"""Steps that compile, at a start, what requests of every kind run: later the first one would wait.

numba compiles a function when it is first called, and keeps it. Of an installation that is a
quarter of a minute for a sampled draw, in which every client of the engine would wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np

from server.engine.batch import Batch, DrawError, DrawParams, Int32
from server.model.cpu.runner import CpuRunner
from server.types import SamplingParams

_NUM_ROWS = 2  # a root and a drafted token
_FULL_WORD = np.uint32(0xFFFFFFFF)
_NONE = np.empty(0, np.int32)
_GREEDY = DrawParams(SamplingParams(temperature=0.0), 0, _NONE, _NONE, _NONE, _NONE, 0)


def warm_up(runner: CpuRunner) -> None:
    """Draw in every way, score a prompt, and copy keys and values. No step may be in flight, and no
    sequence may be there: the first blocks of the KV memory are written."""
    for batch in _batches(runner):
        runner.launch(batch)
        with suppress(DrawError):  # of a model that cannot be drawn from: the first request tells
            runner.wait()
    runner.move_slots(_ints(1), _ints(0))
    runner.copy_blocks(_ints(0), _ints(0))


def _ints(*values: int) -> Int32:
    return np.array(values, np.int32)


def _plain() -> Batch:
    """Position 1 of a sequence in block 0 and one drafted token behind it; both draw greedily."""
    zeros = np.zeros(_NUM_ROWS, np.int32)
    return Batch(
        token_ids=zeros, token_from=zeros - np.int32(1), positions=_ints(1, 2), seq_ids=zeros,
        slots=_ints(1, 2), prefix_len=_ints(2, 2), path_start=zeros, path_len=_ints(0, 1),
        path_slots=_ints(2), block_tables=_ints(0)[None], draw_rows=_ints(0, 1),
        draw_params=zeros, draw_parent=_ints(-1, 0), draw_positions=_ints(2, 3),
        draw_mask=_ints(-1, -1), params=(_GREEDY,), num_draft_rows=1,
    )  # fmt: skip


def _batches(runner: CpuRunner) -> Iterator[Batch]:
    """A root and a drafted token that both draw: plainly, with likely ids, with each constraint."""
    plain = _plain()
    yield plain
    yield replace(plain, num_likely=4)
    zeros = np.zeros(_NUM_ROWS, np.int32)
    words = -(-runner.info.vocab_size // 32)
    masks = np.full((1, words), _FULL_WORD, np.uint32)
    greedy = _GREEDY.sampling
    sampled = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=5, min_p=0.01, presence_penalty=0.1,
        frequency_penalty=0.1, repetition_penalty=1.1, logit_bias=((1, 0.5),), min_tokens=2,
        num_logprobs=2,
    )  # fmt: skip
    chosen = replace(greedy, num_logprobs=2, logprob_token_ids=(0, 1))
    for params, mask in ((greedy, 0), (sampled, -1), (sampled, 0), (chosen, -1)):
        own = _GREEDY
        if params is not greedy:
            own = DrawParams(params, 0, _ints(0), _ints(1), _ints(1), _ints(1), 0)
        yield replace(
            plain, params=(own,), draw_mask=zeros + np.int32(mask), masks=masks, num_likely=4,
            score_rows=zeros[:1], score_targets=zeros[:1], score_top=zeros[:1] + np.int32(2),
        )  # fmt: skip
