"""Chunked prefill: how many prompt rows a step computes while others decode.

A long prompt in one step would delay every sequence that decodes. So it comes in chunks, as rows of
the same batches (scheduler.py). The size of a chunk follows the measured cost of rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from server.engine.budget import CostTable
from server.engine.sequence import Sequence
from server.engine.settings import EngineSettings


def chunked_prefill_rows(
    settings: EngineSettings, cost: CostTable | None, running: Iterable[Sequence]
) -> int:
    """Most prompt rows of the next step, if any sequence decodes in it: see EngineSettings."""
    if cost is None or settings.target_step_s <= 0.0:
        return settings.most_prefill_rows
    num_decoding = num_keys = 0
    for sequence in running:
        if sequence.num_pending == 1:
            num_decoding += 1
            num_keys += sequence.num_tokens
    alone_s = cost.cost(num_decoding, num_keys)
    return max(
        settings.min_chunked_prefill_rows,
        cost.rows_within(settings.target_step_s),
        min(settings.most_prefill_rows, cost.rows_within(settings.prefill_ratio * alone_s)),
    )
