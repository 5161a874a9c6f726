"""The compiled functions of the CPU runner. What Python calls of them has its name here.

Importing this imports neither numba nor llvmlite, which only compiling needs (drafters/jit.py).
"""

from __future__ import annotations

from drafters.jit import entry_of

_ATTENTION, _BLOCKS, _LINEAR, _ROWS, _SAMPLING, _SCREEN, _STEP, _TEAM, _DELTA = (
    f"{__name__}.{name}"
    for name in (
        "attention", "blocks", "linear", "integer_rows", "sampling", "screen", "step", "team",
        "delta",
    )
)  # fmt: skip

attend_layer = entry_of(_ATTENTION, "attend_layer")
lay_out = entry_of(_BLOCKS, "lay_out")
take_apart = entry_of(_BLOCKS, "take_apart")
product = entry_of(_LINEAR, "product")
spread_rows = entry_of(_ROWS, "spread_rows")
argmax = entry_of(_SAMPLING, "argmax")
copy_bytes = entry_of(_SAMPLING, "copy_bytes")
draw = entry_of(_SAMPLING, "draw")
gather_logits = entry_of(_SAMPLING, "gather_logits")
greedy = entry_of(_SAMPLING, "greedy")
is_finite_row = entry_of(_SAMPLING, "is_finite_row")
likeliest = entry_of(_SAMPLING, "likeliest")
logprob = entry_of(_SAMPLING, "logprob")
logprobs_at = entry_of(_SAMPLING, "logprobs_at")
masked_argmax = entry_of(_SAMPLING, "masked_argmax")
allowed = entry_of(_SCREEN, "allowed")
build_screen = entry_of(_SCREEN, "build")
screened = entry_of(_SCREEN, "screened")
embed_rows = entry_of(_STEP, "embed_rows")
step = entry_of(_STEP, "step")
serve = entry_of(_TEAM, "serve")
stop = entry_of(_TEAM, "stop")
delta_rule = entry_of(_DELTA, "delta_rule")
