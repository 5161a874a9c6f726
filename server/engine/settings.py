"""EngineSettings: the numbers of one engine's step loop."""

from __future__ import annotations

from dataclasses import dataclass

from server.types import EngineSizes


@dataclass(frozen=True, slots=True)
class EngineSettings(EngineSizes):
    """An engine's sizes, and the numbers of its step loop.

    chunked_prefill_rows: prompt rows a step while others decode (plan.py), None for half
    of max_num_batched_tokens. target_step_s: if above 0 and costs are measured, prompt rows are
    chosen so that a step takes about so long (never below min_chunked_prefill_rows). prefill_ratio:
    where a step is slow, prompt rows may take this many times as long as the decoding rows alone,
    up to chunked_prefill_rows; with a fixed time alone, chunks on a slow machine or with a large
    model would be so small that most of a prompt's time went to the decoding rows of its many
    steps. max_draft_rows: tree nodes a step, over all sequences; 0 is off. max_failures: failed
    steps in a row after which the runner counts as broken. max_verify_every: most unverified tokens
    of an `exact` sequence. may_use_full_head: whether `exact` draws from the full head where that
    is cheaper. slices_only: requests that need the full head are refused: it is in its file.
    """

    chunked_prefill_rows: int | None = None
    min_chunked_prefill_rows: int = 16
    target_step_s: float = 0.0
    prefill_ratio: float = 8.0
    max_draft_rows: int = 512
    max_failures: int = 8
    max_verify_every: int = 64
    may_use_full_head: bool = True
    slices_only: bool = False

    @property
    def most_prefill_rows(self) -> int:
        """chunked_prefill_rows as a number."""
        if self.chunked_prefill_rows is not None:
            return self.chunked_prefill_rows
        return max(16, self.max_num_batched_tokens // 2)
