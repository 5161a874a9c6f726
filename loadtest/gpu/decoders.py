"""Our fused decoder beside transformers' modules: the same weights, cache and attention.

Logprobs of a prompt and of a chain of nodes, greedy ids, and the times of a step. What differs is
rounding: an operation of the fused decoder rounds once where the modules round after each of its
steps, so that bfloat16 ids may part where two are nearly alike; that is told and is no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loadtest.gpu.correct import CHAIN, PROMPT, apart_bound, random_ids, rows_of, run
from loadtest.gpu.shapes import SHAPES, Asked, build, info_of
from loadtest.gpu.steps import Case, batch_of, blocks_needed, measure
from server.model.gpu.runner import TorchRunner
from server.model.gpu.spec import TorchModel, Ways

__all__ = ["NEW", "check"]

NEW = 64
"""Tokens that are decoded greedily."""


class Found(NamedTuple):
    """Of one decoder: logprobs of the asked ids, the argmax of each row, and greedy ids."""

    logprobs: npt.NDArray[np.float32]
    best: list[int]
    greedy: list[int]


def _answers(runner: TorchRunner, ids: list[int]) -> Found:
    total = PROMPT + 1 + CHAIN
    prompt = run(runner, rows_of(ids[:PROMPT], 0, root=None, targets=ids[1 : PROMPT + 1]))
    chain = rows_of(ids[PROMPT:total], PROMPT, root=PROMPT, targets=ids[PROMPT + 1 : total + 1])
    nodes = run(runner, chain)
    greedy = [int(prompt.token_ids[-1])]
    for i in range(NEW - 1):
        row = rows_of(greedy[-1:], PROMPT + i, root=None, targets=[0])
        greedy.append(int(run(runner, row).token_ids[0]))
    return Found(
        np.concatenate([prompt.score_logprobs, nodes.score_logprobs]),
        [*prompt.token_ids.tolist(), *nodes.token_ids.tolist()],
        greedy,
    )


def check(asked: Asked) -> Iterator[dict[str, Any]]:
    """A line for each decoder with its times, and one for how far apart they are."""
    name, device, dtype = asked.name, asked.device, asked.dtype
    shape = SHAPES[name]
    ids = random_ids(shape)
    history = 32 if name.startswith("tiny") else 512
    timed = [Case("decode", 1, 1, history), Case("tree", 1, 8, history), Case("chunk", 1, 32, 0)]
    found: dict[str, Found] = {}
    times: dict[str, list[float]] = {}
    for decoder in ("modules", "fused"):
        module = build(shape, device, dtype)
        info = info_of(
            module, device, num_blocks=max(64, *map(blocks_needed, timed)),
            max_model_len=shape.max_model_len, max_num_seqs=8, max_num_batched_tokens=256,
        )  # fmt: skip
        graphs = device.type == "cuda"
        runner = TorchRunner(TorchModel(module), info, Ways(decoder=decoder, cuda_graphs=graphs))
        found[decoder] = _answers(runner, ids)
        times[decoder] = [
            1e3 * measure(runner, batch_of(case, shape.vocab_size), asked.repeats)[0]
            for case in timed
        ]
        runner.close()
        yield {
            "what": f"decoder, {decoder}", "shape": name, "graphs": graphs,
            **{f"{c.kind}_ms": round(t, 4) for c, t in zip(timed, times[decoder], strict=True)},
        }  # fmt: skip
    old, new = found["modules"], found["fused"]
    apart = float(np.abs(old.logprobs - new.logprobs).max())
    agree = float(np.mean([a == b for a, b in zip(old.best, new.best, strict=True)]))
    equal = [a == b for a, b in zip(old.greedy, new.greedy, strict=True)]
    bound = apart_bound(dtype, float(old.logprobs.std()))
    yield {
        "what": "fused against modules", "shape": name, "logprobs_apart": round(apart, 6),
        "bound": round(bound, 4), "same_argmax": round(agree, 4),
        "same_greedy_ids": equal.index(False) if False in equal else NEW,
        "times_faster": [
            round(a / b, 2) for a, b in zip(times["modules"], times["fused"], strict=True)
        ],
        "ok": apart <= bound and agree >= 0.9,
    }  # fmt: skip
