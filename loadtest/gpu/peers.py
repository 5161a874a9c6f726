"""The engine in this process, drafts off and on, and transformers' own ways on the same module.

Random weights: texts mean nothing, and a drafter finds what greedy decoding repeats. Prompts of 200
random ids, 128 new tokens each, no end of sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers

from drafters import make_drafter
from loadtest.gpu.shapes import BLOCK_SIZE, SHAPES, Asked, Shape, build, info_of
from loadtest.gpu.steps import named, timed
from server.engine.engine import Engine
from server.engine.settings import EngineSettings
from server.model.gpu.runner import TorchModel, TorchRunner, Ways
from server.types import Request, SamplingParams, SpeculationParams

__all__ = ["engine", "transformers_own"]


def _prompts(shape: Shape, num: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    result: list[list[int]] = rng.integers(0, shape.vocab_size, (num, length)).tolist()
    return result


def _lengths(name: str) -> tuple[int, int]:
    return (20, 8) if name.startswith("tiny") else (200, 128)


def engine(asked: Asked) -> Iterator[dict[str, Any]]:
    """Tokens a second of 1 and 8 streams, off and with n-grams of what was written, after a run to
    warm up."""
    name, device, dtype = asked.name, asked.device, asked.dtype
    shape = SHAPES[name]
    length, new = _lengths(name)
    module = build(shape, device, dtype)
    info = info_of(
        module, device, num_blocks=16 * (-(-(length + new + 64) // BLOCK_SIZE)),
        max_model_len=min(shape.max_model_len, 1024), max_num_seqs=8, max_num_batched_tokens=2048,
    )  # fmt: skip
    runner = TorchRunner(TorchModel(module), info, Ways(cuda_graphs=device.type == "cuda"))
    made = Engine(
        runner, {"suffix": make_drafter("suffix")},
        EngineSettings(max_num_seqs=8, max_num_batched_tokens=2048, prefix_cache=False),
    )  # fmt: skip
    texts: dict[int, list[dict[str, list[int]]]] = {}
    for count in (1, 8):
        for drafter in ("off", "suffix"):
            for attempt in ("warm-up", "measured"):
                found: dict[str, list[int]] = {}
                for i, ids in enumerate(_prompts(shape, count, length)):
                    made.submit(
                        Request(
                            request_id=f"{attempt}-{count}-{drafter}-{i}", task="gpu", model=name,
                            prompt_ids=tuple(ids),
                            sampling=SamplingParams(
                                temperature=0.0, max_tokens=new, ignore_eos=True
                            ),
                            speculation=SpeculationParams(drafter, 0 if drafter == "off" else 16),
                        )
                    )  # fmt: skip
                began, model_s, steps = time.perf_counter(), made.steps.sums[1], 0
                while made.has_work:
                    for delta in made.step():
                        found.setdefault(delta.request_id, []).extend(delta.token_ids)
                    steps += 1
                wall = time.perf_counter() - began
                model_s = made.steps.sums[1] - model_s
            texts.setdefault(count, []).append(found)
            same = list(found.values()) == list(texts[count][0].values())
            yield {
                "what": f"engine, {drafter}", "shape": name, "streams": count,
                "tokens_per_s": round(count * new / wall, 1),
                "tokens_per_step": round(count * new / steps, 2),
                "device_share": round(model_s / wall, 3), "same_text_as_off": same,
            }  # fmt: skip
    made.close()


def transformers_own(asked: Asked) -> Iterator[dict[str, Any]]:
    """generate with a static cache (compiled on CUDA), with prompt lookup, and the continuous
    batching of transformers; a way that it lacks is a line with its error."""
    name, device, dtype = asked.name, asked.device, asked.dtype
    shape = SHAPES[name]
    length, new = _lengths(name)
    module: Any = build(shape, device, dtype)
    prompts = _prompts(shape, 8, length)
    one = torch.tensor(prompts[:1], device=device)
    eight = torch.tensor(prompts, device=device)
    common = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    static = common | {"cache_implementation": "static", "disable_compile": device.type != "cuda"}
    config: Any = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=new, do_sample=False, pad_token_id=0
    )

    ways: list[tuple[str, int, Callable[[], Any]]] = [
        ("static cache, compiled", 1, lambda: module.generate(one, **static)),
        ("static cache, compiled", 8, lambda: module.generate(eight, **static)),
        ("prompt lookup", 1, lambda: module.generate(one, prompt_lookup_num_tokens=10, **common)),
    ]
    if device.type == "cuda":  # on a CPU it does not come back
        ways.append(("continuous batching", 8, lambda: module.generate_batch(prompts, config)))
    for what, count, work in ways:
        line: dict[str, Any] = {"what": f"transformers, {what}", "shape": name, "streams": count}
        try:
            with torch.inference_mode():
                timed(work, device)  # compiles
                seconds = min(timed(work, device) for _ in range(min(3, asked.repeats)))
            yield line | {"tokens_per_s": round(count * new / seconds, 1)}
        except Exception as error:  # what this version of transformers cannot do is a line too
            yield line | {"tokens_per_s": None, "error": named(error)}
