"""Chunked prefill: how many prompt rows a step computes while others decode.

A long prompt in one step would hold up every sequence that decodes, so it comes in chunks, as rows
of the same batches (scheduler.py). How large a chunk may be follows the measured cost of rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from server.engine.budget import CostTable
from server.engine.sequence import Sequence
from server.engine.settings import EngineSettings


def chunked_prefill_rows(
    settings: EngineSettings, cost: CostTable | None, running: Iterable[Sequence]
) -> int:
    """Prompt rows of the next step, should anybody decode in it: see EngineSettings."""
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
