"""Random draws that both samplers must make as the numpy reference does: trees of several
sequences, each with parameters of its own, over rows with ties and infinities."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from server.engine.batch import Batch
from server.types import SamplingParams
from tests.model.batches import BatchBuilder, Pages, draw_params

V = 130  # not a multiple of 32: the last mask word is partly used

Logits = npt.NDArray[np.float32]

Case = tuple[Batch, Logits]
"""Draws, and the logits [R, V] of their rows."""


def ids_in(low: int, high: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.sets(st.integers(0, V - 1), min_size=low, max_size=high).map(
        lambda s: tuple(sorted(s))
    )


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    biases = draw(ids_in(0, 4))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.1, 0.3, 0.8, 1.0, 1.7, 2.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 7, 10, 50, V, 10 * V])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 0.9, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -0.5, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, 2.0, -0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        logit_bias=tuple((i, draw(st.sampled_from([-100.0, -3.0, 5.0, 100.0]))) for i in biases),
        allowed_token_ids=draw(st.none() | st.none() | ids_in(1, 40)),
        min_tokens=draw(st.integers(0, 6)),
        seed=draw(st.integers(0, 2**64 - 1)),
    )


def spoiled(logits: Logits, kind: str, column: int) -> Logits:
    """Logits of a kind that draws must stand. column: of the first row, where "nan" puts one."""
    if kind == "ties":
        return np.round(logits / 3).astype(np.float32) * np.float32(3)
    if kind == "flat":
        logits[:] = 0.25
    elif kind == "padded":
        logits[:, V - 20 :] = -np.inf
    elif kind == "nan":
        logits[0, column] = np.nan
    return logits


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Trees of several sequences, each with its own parameters; rows with ties and infinities."""
    builder = BatchBuilder()
    pages = Pages(960)
    for _ in range(draw(st.integers(1, 3))):
        root = draw(st.integers(0, 20) | st.integers(0, 5000))
        table = pages.sequence(root + 6)
        parents = [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, 5)))]
        row = builder.add_rows(table, [draw(st.integers(0, V - 1))], root)[0]
        nodes = builder.add_tree(
            table, root, [draw(st.integers(0, V - 1)) for _ in parents], parents
        )
        counts = {
            i: (draw(st.integers(0, 5)), draw(st.integers(0, 1))) for i in draw(ids_in(0, 12))
        }
        for choice_id in range(draw(st.integers(1, 2))):
            params = builder.add_params(
                draw_params(
                    draw(sampling_params()),
                    choice_id=choice_id,
                    banned_until=draw(ids_in(0, 3)),
                    counts=counts,
                    num_generated=draw(st.integers(0, 4)),
                )
            )
            num = draw(st.sampled_from([1, 2, 31, V // 2, V]))
            of_mask = np.random.default_rng(num).permutation(V)[:num].tolist()
            masks = [builder.add_mask(of_mask, V), -1, -1]
            drawn = {-1: builder.draw(row, params, mask=draw(st.sampled_from(masks)))}
            for i, parent in enumerate(parents):
                drawn[i] = builder.draw(
                    nodes[i], params, drawn[parent], draw(st.sampled_from(masks))
                )
    batch = builder.build()
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = (rng.standard_normal((batch.num_rows, V)) * 4).astype(np.float32)
    kind = draw(st.sampled_from(["plain", "plain", "ties", "flat", "padded", "nan"]))
    logits = spoiled(logits, kind, int(rng.integers(V)))
    return batch, logits
