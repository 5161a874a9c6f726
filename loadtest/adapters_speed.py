"""Steps of many clients, each with an adapter of its own, beside steps of the base: what they cost.

    python -m loadtest.adapters_speed
    python -m loadtest.adapters_speed --clients 1,8,32 --adapters 50 --dtype float16 --weights int8

One process, one runner, random adapters on every linear layer. A step is one row a client, as in
decoding without drafts, each drawn from the full head. A merged adapter's step is the base's: the
shapes are the same. In every round each case runs once: `base` (no adapter in the step), `one` (all
clients have the same adapter) and `mixed` (each draws one of --adapters at random). Milliseconds
are medians; `throughput` is the base's time over the case's in the same round (0.8 = four fifths
of the tokens a second), with a bootstrap interval. `load_ms`: of reading and packing one adapter;
`mb`: its memory. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from loadtest import machine
from loadtest.options import emit, refuse_busy_machine
from loadtest.stats import ratio
from loadtest.turns import add_step_options, in_turns
from loadtest.weight_forms import runner_of
from server.engine.batch import AdaptingRunner, Batch
from server.engine.probe import probe_batch
from server.model.cpu.lora import FORMS
from server.model.loader import open_model

CASES = ("base", "one", "mixed")


def write_adapter(
    model: Path, folder: Path, rank: int, seed: int, dtype: torch.dtype = torch.float32
) -> None:
    """A random LoRA on every linear layer of a model, as PEFT would save it."""
    rng = torch.Generator().manual_seed(seed)
    weights = open_model(model).weights
    tensors: dict[str, torch.Tensor] = {}
    for name in weights.names():
        shape = weights.shape(name)
        if not name.startswith("model.layers.") or len(shape) != 2:
            continue
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, shape[1], generator=rng) * 0.02
        tensors[f"{module}.lora_B.weight"] = torch.randn(shape[0], rank, generator=rng) * 0.02
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _batch(runner: AdaptingRunner, keys: int, adapters: list[int] | None, clients: int) -> Batch:
    """One row of each client, all with the same history."""
    batch = probe_batch(runner, clients, keys)
    zeros = np.zeros(clients, np.int32)
    return replace(
        batch,
        seq_ids=np.arange(clients, dtype=np.int32),
        path_start=zeros,
        path_len=zeros,
        block_tables=np.repeat(batch.block_tables, clients, axis=0),
        draw_parent=zeros - 1,
        seq_adapters=None if adapters is None else np.asarray(adapters, np.int32),
    )


def measure(
    runner: AdaptingRunner, num_adapters: int, clients: int, keys: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """case -> figures of a step of so many clients. Places 0 .. num_adapters - 1 are taken."""
    draw = random.Random(clients)

    def step(case: str) -> float:
        mixed = [draw.randrange(num_adapters) for _ in range(clients)]
        adapters = {"base": None, "one": [0] * clients, "mixed": mixed}[case]
        batch = _batch(runner, keys, adapters, clients)
        began = time.perf_counter()
        runner.launch(batch)
        runner.wait()
        return time.perf_counter() - began

    took = in_turns({case: functools.partial(step, case) for case in CASES}, rounds)
    return {
        case: {
            "ms": round(1e3 * statistics.median(took[case]), 3),
            "throughput": ratio(took["base"], took[case]).to_json(),
        }
        for case in CASES
    }


def main() -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m loadtest.adapters_speed --clients 1,8",
    )
    parser.add_argument("--weights", default="float32")
    parser.add_argument("--adapters", type=int, default=50)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--dtype", choices=FORMS, default="float32", help="of the adapters' files, and in memory"
    )
    parser.add_argument("--clients", default="1,8,32")
    add_step_options(parser)
    args = parser.parse_args()
    refuse_busy_machine(args.max_load)
    clients = [int(part) for part in args.clients.split(",")]
    runner, folder = runner_of(
        args.model, args.weights, adapter=None, threads=args.threads, max_rows=max(clients)
    )
    assert isinstance(runner, AdaptingRunner)
    loads, num_bytes = [], 0
    with tempfile.TemporaryDirectory() as place:
        for i in range(args.adapters):
            write_adapter(folder, Path(place) / "a", args.rank, i, getattr(torch, args.dtype))
            began = time.perf_counter()
            packed = runner.pack_adapter(str(Path(place) / "a"))
            loads.append(time.perf_counter() - began)
            runner.hold_adapter(i, packed)
            num_bytes = packed.num_bytes
    steps = {}
    for num in clients:
        steps[str(num)] = measure(runner, args.adapters, num, args.keys, args.rounds)
        for case, figures in steps[str(num)].items():
            print(f"{num:4d} clients  {case:6s} {figures}", flush=True)
    runner.close()
    summary = {
        "model": args.model,
        "weights": args.weights,
        "adapters": args.adapters,
        "rank": args.rank,
        "dtype": args.dtype,
        "keys": args.keys,
        "load_ms": round(1e3 * statistics.median(loads), 1),
        "mb": round(num_bytes / 1e6, 1),
        "steps": steps,
        "machine": machine.describe(),
    }
    emit(summary, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
