"""Trained weights on a GPU: a slice of a real model, with texts that were recorded on a CPU.

    python -m loadtest.gpu.real build/gpu-slice        # where the model is; then carry the folder

A slice is the first LAYERS layers and the first VOCABULARY ids (the commonest merges of a byte-pair
tokenizer) of the built-in SmolLM2 135M, in bfloat16: 51 MB, small enough to be carried to a machine
without a network. It is no good model, but its numbers are trained ones: outliers, near ties, rows
of very different sizes. What is recorded: greedy texts and logprobs of TorchRunner with the torch
attention, in float32, over the same rounded weights.

On a device the texts come again, a token a step and as chains of drafted nodes, plainly and from
graphs: in float32 every id must be the recorded one; in bfloat16 logprobs must be near.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from loadtest.gpu.correct import apart_bound, rows_of, run
from loadtest.gpu.shapes import Asked, info_of
from server.model.gpu.runner import GpuOptions, TorchModel, TorchRunner

__all__ = ["FOLDER", "check", "make", "record"]

FOLDER = Path(__file__).resolve().parents[2] / "build" / "gpu-slice"
LAYERS, VOCABULARY = 6, 8192
PROMPTS, PROMPT_IDS, NEW, CHAIN = 4, 40, 32, 8
FIRST_ID = 300  # special ids and single bytes are below
RECORDED = "recorded.json"


def make(source: Path, folder: Path) -> None:
    """Write the slice of a Llama-like model folder with tied tables, and what is recorded of it."""
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    module.model.layers = module.model.layers[:LAYERS]
    module.config.num_hidden_layers = LAYERS
    module.resize_token_embeddings(VOCABULARY, mean_resizing=False)
    folder.mkdir(parents=True, exist_ok=True)
    module.save_pretrained(folder)
    (folder / RECORDED).write_text(json.dumps(record(folder)), encoding="utf-8")


def record(folder: Path) -> list[dict[str, Any]]:
    """Of each prompt: ids of prompt and text, and the logprob of each of the text's."""
    runner = _runner(folder, torch.device("cpu"), torch.float32, graphs=False)
    rng = np.random.default_rng(7)
    recorded = []
    for _ in range(PROMPTS):
        prompt = rng.integers(FIRST_ID, VOCABULARY, PROMPT_IDS).tolist()
        text, logprobs = _decoded(runner, prompt)
        recorded.append({"prompt": prompt, "text": text, "logprobs": logprobs})
    runner.close()
    return recorded


def _runner(folder: Path, device: torch.device, dtype: torch.dtype, *, graphs: bool) -> TorchRunner:
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    module = module.to(device).eval()
    info = info_of(
        module, device, num_blocks=64, max_model_len=256, max_num_seqs=4,
        max_num_batched_tokens=128,
    )  # fmt: skip
    return TorchRunner(TorchModel(module), info, GpuOptions(cuda_graphs=graphs))


def _decoded(runner: TorchRunner, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    """The greedy text behind a prompt, a token a step, and its logprobs."""
    ids, text, logprobs, start = list(prompt), list[int](), list[float](), 0
    for _ in range(NEW):
        rows = ids[start:]
        found = run(runner, rows_of(rows, start, root=None, targets=[0] * len(rows)))
        start, token = len(ids), int(found.token_ids[-1])
        # The same row again, to score what it drew: the draw comes before its score is asked for.
        last = rows_of(ids[-1:], start - 1, root=None, targets=[token])
        logprobs.append(float(run(runner, last).score_logprobs[0]))
        text.append(token)
        ids.append(token)
    return text, logprobs


def _drafted(runner: TorchRunner, prompt: Sequence[int], text: Sequence[int]) -> list[int]:
    """What is drawn behind the recorded text, CHAIN of its ids as one chain of nodes a step."""
    run(runner, rows_of(prompt, 0, root=None, targets=[0] * len(prompt)))
    drawn: list[int] = []
    whole = [*prompt, *text]
    for start in range(len(prompt) - 1, len(whole) - 1, CHAIN):
        rows = whole[start : min(start + CHAIN, len(whole) - 1)]
        step = rows_of(rows, start, root=start, targets=[0] * len(rows))
        drawn += run(runner, step).token_ids.tolist()
    return drawn


def check(asked: Asked, folder: Path = FOLDER) -> Iterator[dict[str, Any]]:
    """A line for each dtype, without graphs and with them; on a CPU float32 alone."""
    if not (folder / RECORDED).is_file():
        yield {
            "what": "trained weights", "shape": "slice",
            "skipped": f"{folder} is not here: `python -m loadtest.gpu.real {folder}` makes it",
        }  # fmt: skip
        return
    recorded = json.loads((folder / RECORDED).read_text(encoding="utf-8"))
    device = asked.device
    on_gpu = device.type == "cuda"
    for dtype in (
        (torch.float32, torch.bfloat16) if on_gpu else (torch.float32,)
    ):  # bfloat16 takes minutes
        for graphs in (False, True) if on_gpu else (False,):
            runner = _runner(folder, device, dtype, graphs=graphs)
            same = apart = drafted = total = 0.0
            spread = 1.0
            for one in recorded:
                text, logprobs = _decoded(runner, one["prompt"])
                agree = np.array(text) == np.array(one["text"])
                # Behind another id the text is another one: what follows is not compared.
                num = NEW if agree.all() else int(agree.argmin())
                gaps = np.abs(np.array(logprobs) - one["logprobs"])[:num]
                spread = max(spread, float(np.std(one["logprobs"])))
                apart = max(apart, float(gaps.max(initial=0.0)))
                same += num
                total += NEW
                drawn = np.array(_drafted(runner, one["prompt"], one["text"]))
                drafted += float((drawn == one["text"]).sum())
            runner.close()
            exact = dtype == torch.float32
            bound = apart_bound(dtype, spread)
            yield {
                "what": "trained weights", "shape": "slice", "dtype": str(dtype), "graphs": graphs,
                "same_ids": same / total, "same_drafted_ids": drafted / total,
                "logprobs_apart": round(apart, 6), "bound": round(bound, 4),
                "ok": apart <= bound and min(same, drafted) >= total * (1.0 if exact else 0.5),
            }  # fmt: skip


if __name__ == "__main__":
    from server.model.catalog import BUILT_IN, fetch_built_in

    make(fetch_built_in(BUILT_IN["smollm2-135m-instruct"]), Path(sys.argv[1]))
