"""Why our own matrix product: bits and times of oneDNN's prepacked linear beside ours.

    python -m loadtest.linear_bits
    python -m loadtest.linear_bits --times

For the shapes of SmolLM2-135M, Gemma 3 270M and some odd ones: at how many row counts does a row
differ from the same row alone? Then, with --times, milliseconds of a SmolLM2 body (30 layers) and
head, products only, alternating. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from loadtest.machine import describe
from server.model.cpu import linear
from server.model.cpu.kernels import PANEL, pack_panels

SHAPES = [
    (576, 960), (576, 576), (576, 3072), (1536, 576), (640, 2048), (2048, 640), (640, 1536),
    (1024, 640), (64, 192), (48, 128), (100, 70),
]  # fmt: skip
BODY = [(576, 960), (576, 576), (576, 3072), (1536, 576)]
HEAD = (576, 49152)
ROWS = [*range(1, 70), 100, 128, 200, 255, 256]

Product = Callable[[torch.Tensor], Any]


def one_dnn(weight: torch.Tensor) -> Product:
    """oneDNN's linear with weights reordered once."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def ours(weight: torch.Tensor, threads: int) -> Product:
    """Our panels; returns the padded output."""
    num, k = weight.shape
    panels = np.empty((-(-num // PANEL), k, PANEL), np.float32)
    pack_panels(weight.numpy(), panels)
    weights, work = linear.float_linear(panels), linear.new_work(threads)

    def product(x: torch.Tensor) -> torch.Tensor:
        out = np.empty((x.shape[0], panels.shape[0] * PANEL), np.float32)
        linear.product(x.numpy(), x.shape[0], weights, out, work)
        return torch.from_numpy(out)

    return product


def mismatches(make: Callable[[torch.Tensor], Product]) -> dict[str, int]:
    """Per shape, row counts at which some row has other bits than alone."""
    torch.manual_seed(0)
    found = {}
    for k, num in SHAPES:
        product = make(torch.randn(num, k))
        x = torch.randn(256, k)
        alone = torch.cat([product(x[i : i + 1].contiguous()) for i in range(256)])
        found[f"{k}x{num}"] = sum(
            not torch.equal(product(x[:rows].contiguous()), alone[:rows]) for rows in ROWS
        )
    return found


def times(threads: int, repeats: int) -> dict[str, dict[int, list[float]]]:
    """name -> rows -> [body ms, head ms], medians of alternating runs."""
    made: dict[str, list[list[Product]]] = {"one_dnn": [], "ours": []}
    for k, num in [*BODY, HEAD]:
        layers = 30 if (k, num) != HEAD else 1
        weights = [torch.randn(num, k) for _ in range(layers)]
        made["one_dnn"].append([one_dnn(w) for w in weights])
        made["ours"].append([ours(w, threads) for w in weights])
    result: dict[str, dict[int, list[float]]] = {"one_dnn": {}, "ours": {}}
    for rows in (1, 2, 4, 8, 16, 32, 64, 256):
        inputs = [torch.randn(rows, k) for k, _ in [*BODY, HEAD]]
        taken: dict[str, list[list[float]]] = {"one_dnn": [], "ours": []}
        for _ in range(repeats + 1):
            for name, shapes in made.items():
                spans = []
                for x, layers_of in zip(inputs, shapes, strict=True):
                    began = time.perf_counter()
                    for product in layers_of:
                        product(x)
                    spans.append(1e3 * (time.perf_counter() - began))
                taken[name].append([sum(spans[:-1]), spans[-1]])
        for name, runs in taken.items():
            result[name][rows] = [
                round(statistics.median(run[i] for run in runs[1:]), 2) for i in (0, 1)
            ]
        print(rows, {name: result[name][rows] for name in result}, flush=True)
    return result


def main() -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m loadtest.linear_bits --times",
    )
    parser.add_argument("--times", action="store_true", help="measure times too (a minute)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    summary: dict[str, Any] = {
        "row_counts": len(ROWS),
        "mismatches": {
            "one_dnn": mismatches(one_dnn),
            "ours": mismatches(lambda w: ours(w, args.threads)),
        },
    }
    for name, found in summary["mismatches"].items():
        print(name, found)
    if args.times:
        summary["ms"] = times(args.threads, args.repeats)
    summary["machine"] = describe()
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
