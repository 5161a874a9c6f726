"""Is a step right on this device, in the dtype that is served?

Logprobs of every position of a random prompt, and of a chain and a tree of nodes behind it, against
transformers' own forward (scaled dot product attention) on the same device; the same rows plainly
and replayed from a graph, which must be equal to the bit where the bucket holds no padding; a
drafted row against the decoded row of the same token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from loadtest.gpu.shapes import BLOCK_SIZE, SHAPES, Asked, Shape, build, info_of
from server.engine.batch import Batch, Drawn, DrawParams
from server.model.gpu.runner import GpuOptions, TorchModel, TorchRunner
from server.types import SamplingParams

PROMPT = 48
CHAIN = 7
"""Nodes behind the root: eight rows, a bucket without padding."""

__all__ = ["apart_bound", "check", "random_ids", "rows_of", "run"]


def rows_of(token_ids: Sequence[int], start: int, *, root: int | None, targets: Any) -> Batch:
    """Rows of one sequence from position `start` on, all scored and drawn from greedily.

    root: position of the last token, when the rows after it are nodes of a chain; None for rows of
    a prompt. targets: the ids that the rows' logprobs are asked for.
    """
    num = len(token_ids)
    positions = np.arange(start, start + num, dtype=np.int32)
    depth = np.zeros(num, np.int32) if root is None else np.maximum(0, positions - root)
    rows, none = np.arange(num, dtype=np.int32), np.empty(0, np.int32)
    params = DrawParams(SamplingParams(temperature=0.0), 0, none, none, none, none, 0)
    num_blocks = -(-(start + num) // BLOCK_SIZE)
    is_chain = root is not None
    return Batch(
        token_ids=np.asarray(token_ids, np.int32),
        positions=positions,
        seq_ids=np.zeros(num, np.int32),
        slots=positions,
        prefix_len=(positions - depth + 1).astype(np.int32),
        path_start=np.zeros(num, np.int32),
        path_len=depth.astype(np.int32),
        path_slots=positions[depth > 0],
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        draw_rows=rows,
        draw_params=np.zeros(num, np.int32),
        draw_parent=rows - 1 if is_chain else np.full(num, -1, np.int32),
        draw_positions=positions + 1,
        draw_mask=np.full(num, -1, np.int32),
        masks=np.empty((0, 0), np.uint32),
        params=(params,),
        score_rows=rows,
        score_targets=np.asarray(targets, np.int32),
        score_top=np.ones(num, np.int32),
        num_prefill_rows=0 if is_chain else num,
        num_draft_rows=num - 1 if is_chain else 0,
    )


def run(runner: TorchRunner, batch: Batch) -> Drawn:
    """One step, to its end."""
    runner.launch(batch)
    return runner.wait()


def random_ids(shape: Shape) -> list[int]:
    """Of the prompt, of the chain behind it, and what follows."""
    rng = np.random.default_rng(3)
    ids: list[int] = rng.integers(0, shape.vocab_size, PROMPT + CHAIN + 2).tolist()
    return ids


def apart_bound(dtype: torch.dtype, spread: float) -> float:
    """How far logprobs of that standard deviation may be apart: bfloat16 keeps 8 bits, and layers
    of other sums are apart by that times their spread."""
    return (0.05 if dtype == torch.bfloat16 else 2e-3) * max(1.0, spread)


def check(asked: Asked) -> Iterator[dict[str, Any]]:
    """Lines with `what`, `ok` and how far apart logprobs are."""
    name, device, dtype = asked.name, asked.device, asked.dtype
    shape = SHAPES[name]
    total = PROMPT + 1 + CHAIN
    ids = random_ids(shape)
    module = build(shape, device, dtype)
    with torch.inference_mode():
        logits = module(torch.tensor([ids[:total]], device=device)).logits[0].float()
        table = torch.log_softmax(logits, dim=-1)
        targets = torch.tensor(ids[1 : total + 1], device=device)
        want = table.gather(1, targets[:, None])[:, 0].cpu().numpy()
        best = table.argmax(dim=-1).cpu().numpy()
        spread = float(table.std())
    del logits, table, module
    chain = slice(PROMPT, total)
    drawn: dict[bool, Drawn] = {}
    for graphs in (False, True) if device.type == "cuda" else (False,):
        module = build(shape, device, dtype)
        info = info_of(
            module, device, num_blocks=64, max_model_len=shape.max_model_len, max_num_seqs=8,
            max_num_batched_tokens=256,
        )  # fmt: skip
        runner = TorchRunner(TorchModel(module), info, GpuOptions(cuda_graphs=graphs))
        prompt = run(runner, rows_of(ids[:PROMPT], 0, root=None, targets=ids[1 : PROMPT + 1]))
        step = rows_of(ids[chain], PROMPT, root=PROMPT, targets=ids[PROMPT + 1 : total + 1])
        began = time.perf_counter()
        drawn[graphs] = run(runner, step)
        first_s = time.perf_counter() - began
        again = run(runner, step)
        if not graphs:
            for what, found, own in (
                ("prompt", prompt, slice(0, PROMPT)), ("chain of nodes", drawn[graphs], chain)
            ):  # fmt: skip
                apart = np.abs(found.score_logprobs - want[own])
                agree = float((found.token_ids == best[own]).mean())
                bound = apart_bound(dtype, spread)
                yield {
                    "what": f"{what} against transformers", "shape": name,
                    "logprobs_apart": round(float(apart.max()), 6), "bound": round(bound, 4),
                    "same_argmax": round(agree, 4),
                    "ok": bool(apart.max() <= bound and agree >= 0.9),
                }  # fmt: skip
            decoded = [
                run(runner, rows_of([ids[i]], i, root=None, targets=[ids[i + 1]]))
                for i in range(PROMPT, total)
            ]
            ids_alone = [int(d.token_ids[0]) for d in decoded]
            alone = np.array([d.score_logprobs[0] for d in decoded])
            apart = np.abs(alone - drawn[graphs].score_logprobs)
            yield {
                "what": "drafted rows against decoded ones", "shape": name,
                "logprobs_apart": round(float(apart.max()), 6),
                "same_bits": bool((apart == 0).all()),
                "same_ids": ids_alone == drawn[graphs].token_ids.tolist(),
                "ok": bool(apart.max() <= bound),
            }  # fmt: skip
        yield {
            "what": "twice the same step", "shape": name, "graphs": graphs,
            "first_s": round(first_s, 4),
            "ok": bool((again.score_logprobs == drawn[graphs].score_logprobs).all()),
        }  # fmt: skip
        runner.close()
    if True in drawn:
        apart = np.abs(drawn[True].score_logprobs - drawn[False].score_logprobs)
        yield {
            "what": "graph against plain", "shape": name,
            "logprobs_apart": float(apart.max()), "ok": bool((apart == 0).all()),
        }  # fmt: skip
