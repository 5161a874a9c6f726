"""EngineSettings: the numbers of one engine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineSettings"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The engine's numbers.

    max_num_seqs, max_num_batched_tokens: sequences and rows a step. chunked_prefill_rows: prompt
    rows a step while others decode (chunked_prefill.py). target_step_s: when above 0 and a cost
    table is there, prompt rows follow it (never below min_chunked_prefill_rows); prefill_ratio:
    where a step is slow they may take this many times as long as those who decode take alone, up to
    chunked_prefill_rows. Chunks cut to a fixed time would be so small on a slow machine, or with a
    large model, that most of a prompt's time went to the decoders' part of its many steps.
    max_waiting_requests, max_waiting_tokens: bound of the queue. prefix_cache: on or off.
    max_draft_rows: tree nodes a step, over all sequences; 0 is off. max_failures: failed steps in
    a row after which the runner counts as broken. slice_rows: dynamic LM-head rows beside the
    profiles' own. max_window: most unverified tokens of an `exact`
    sequence; adapts_windows: whether the full head takes over where it is cheaper.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    chunked_prefill_rows: int = 256
    min_chunked_prefill_rows: int = 16
    target_step_s: float = 0.0
    prefill_ratio: float = 8.0
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1 << 20
    prefix_cache: bool = True
    max_draft_rows: int = 512
    max_failures: int = 8
    slice_rows: int = 4096
    max_window: int = 64
    adapts_windows: bool = True
