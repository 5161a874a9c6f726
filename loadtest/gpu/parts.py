"""Parts of the GPU check, in this process: a line of JSON for each result, as it comes.

    python -m loadtest.gpu.parts steps:qwen3-0.6b machine:tiny --device cuda:0 --dtype bfloat16

Behind each part's results stands a line with `done`, its seconds. The parts and their order are
VERDICT's; `python loadtest/gpu_check.py` runs them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loadtest.gpu import correct, options, steps, vocabulary
from loadtest.gpu.correct import SHAPES, Asked, build, runner_of
from server.model.build import MARGIN, num_blocks_for
from server.model.gpu.attention import Kept
from server.model.gpu.runner import FEW_SLOTS
from server.types import DEFAULT_ROWS, DEFAULT_SEQS
from tests.model.batches import BLOCK_SIZE

Part = Callable[[Asked], Iterator[dict[str, Any]]]

PACKAGES = ("torch", "transformers", "triton", "numpy", "numba", "pytest")


def machine(asked: Asked) -> Iterator[dict[str, Any]]:
    """Versions, the device's name and memory, its copy bandwidth, and on CUDA what a launch costs:
    of a kernel in a graph of 1,000, and of 4 bytes on their way back."""
    device = asked.device
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    yield {"what": "versions", **versions}
    line: dict[str, Any] = {
        "what": "device", "name": str(device), "gb_s": round(steps.bandwidth(device) / 1e9, 1)
    }  # fmt: skip
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        line |= {"name": torch.cuda.get_device_name(device), "free_gib": round(free / 2**30, 1)}
        line |= {"total_gib": round(total / 2**30, 1), "cuda": torch.version.cuda}
        x = torch.zeros(1, device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(1000):
                x += 1
        seconds = min(steps.timed(graph.replay, device) for _ in range(10))
        line["graph_kernel_us"] = round(1e3 * seconds, 3)
        line["launch_us"] = round(
            1e6 * min(steps.timed(lambda: x.add_(1), device) for _ in range(50)), 2
        )
        line["copy_back_us"] = round(1e6 * min(steps.timed(x.item, device) for _ in range(50)), 2)
    yield line


def check_reserve(asked: Asked) -> Iterator[dict[str, Any]]:
    """Whether a KV cache fits beside the largest steps, as the engine makes it at its start: a
    line. The cache takes all that those steps leave, they run again and the graphs are captured:
    what is free at the end says how much of the margin is left."""
    device, shape = asked.device, SHAPES[asked.name]
    on_gpu = device.type == "cuda"
    module = build(shape, device, asked.dtype)
    rows, seqs = (DEFAULT_ROWS["cuda"], DEFAULT_SEQS["cuda"]) if on_gpu else (64, 4)
    runner = runner_of(
        module, device, shape.max_model_len, num_blocks=-(-FEW_SLOTS // BLOCK_SIZE), num_seqs=seqs,
        num_rows=rows, cuda_graphs=on_gpu,
    )  # fmt: skip

    def free() -> int:
        return torch.cuda.mem_get_info(device)[0] if on_gpu else 1 << 30

    runner.take_room((), 0)
    before = free()
    kept = Kept(shape.num_layers, shape.num_kv_heads, shape.head_dim)
    per_block = kept.block_bytes(BLOCK_SIZE, asked.dtype)
    blocks = 64
    if on_gpu:
        blocks = num_blocks_for(per_block, device, fraction=1.0, reserve=MARGIN)
    runner.resize_kv(blocks, shape.max_model_len)
    runner.warm_up()
    runner.try_out(runner.trials.largest())
    yield {
        "what": "reserve", "shape": asked.name, "free_mib": before >> 20,
        "kv_tokens": blocks * BLOCK_SIZE, "free_at_the_end_mib": free() >> 20,
        "ok": free() > 0,
    }  # fmt: skip
    runner.close()


PARTS: dict[str, Part] = {
    "machine": machine,
    "real": correct.check_real,
    "correct": correct.check,
    "adapters": options.adapters,
    "own-tokens": options.own_tokens,
    "eight-bits": options.eight_bits,
    "steps": steps.time_shape,
    "reserve": check_reserve,
    "vocabulary": vocabulary.check,
}


@dataclass(frozen=True)
class Planned:
    """A part on a shape, and the most seconds that it may take."""

    part: str
    shape: str
    limit_s: float

    @property
    def word(self) -> str:
        """How the command line names it."""
        return f"{self.part}:{self.shape}"


# What says most comes first: a run that is cut off after any part has been worth its time.
VERDICT = (
    Planned("machine", "smollm2-135m", 40),
    Planned("real", "tiny", 60),
    Planned("correct", "smollm2-135m", 40),
    Planned("correct", "qwen3-0.6b", 40),
    Planned("correct", "gemma-3-270m", 40),
    Planned("adapters", "smollm2-135m", 30),
    Planned("own-tokens", "smollm2-135m", 30),
    Planned("eight-bits", "smollm2-135m", 40),
    Planned("reserve", "qwen3-0.6b", 25),
    Planned("steps", "smollm2-135m", 50),
    Planned("steps", "qwen3-0.6b", 50),
    Planned("vocabulary", "gemma-3-270m", 50),
)
"""The whole verdict, within nine minutes with the tests that stand before its steps."""


def lines_of(
    planned: Planned, device: torch.device, dtype: torch.dtype, repeats: int
) -> Iterator[dict[str, Any]]:
    """The part's lines; an exception that ends it is its last one."""
    try:
        for line in PARTS[planned.part](Asked(planned.shape, device, dtype, repeats)):
            yield {"part": planned.part, **line}
    except Exception as error:
        yield {"part": planned.part, "shape": planned.shape, "error": steps.named(error)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts; 1 when a line has an error or is not ok."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", metavar="PART:SHAPE")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--repeats", type=int, default=10)
    chosen = parser.parse_args(arguments)
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
    fine = True
    for word in chosen.parts:
        part, _, shape = word.partition(":")
        began = time.monotonic()
        for line in lines_of(Planned(part, shape, 0.0), device, dtype, chosen.repeats):
            fine = fine and "error" not in line and line.get("ok", True)
            print(json.dumps(line), flush=True)
        print(json.dumps({"done": word, "s": round(time.monotonic() - began, 2)}), flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
