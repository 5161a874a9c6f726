"""Is a step right on this device, in the dtype that is served?

Logprobs of every position of a random prompt, and of a chain and a tree of nodes behind it, against
transformers' own forward (scaled dot product attention) on the same device; the same rows plainly
and replayed from a graph, which must be equal to the bit where the bucket holds no padding; a
drafted row against the decoded row of the same token.

Weights are random ones in the shapes of public models (SHAPES), and a slice of a real model with
texts that were recorded on a CPU:

    python -m loadtest.gpu.correct build/gpu-slice      # where the model is; then carry the folder

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
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers

from server.engine.batch import Batch, Drawn
from server.model.gpu.runner import TorchModel, TorchRunner
from server.types import ModelInfo
from tests.model.batches import BLOCK_SIZE, BatchBuilder, Pages, draw_params


@dataclass(frozen=True)
class Asked:
    """What a part of the check is run on. name: of SHAPES. repeats: of each timing."""

    name: str
    device: torch.device
    dtype: torch.dtype
    repeats: int


@dataclass(frozen=True)
class Shape:
    """A dense model's sizes. max_model_len: the runner's; attention plans for that many keys."""

    family: Literal["llama", "qwen3", "gemma3_text"]
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int = 9216


SHAPES = {
    "smollm2-135m": Shape("llama", 576, 1536, 30, 9, 3, 64, 49152),
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936),
    "gemma-3-270m": Shape("gemma3_text", 640, 2048, 18, 4, 1, 256, 262144),
    "tiny": Shape("llama", 64, 128, 2, 4, 2, 16, 256, 256),
    "tiny-gemma": Shape("gemma3_text", 32, 64, 2, 2, 1, 16, 1024, 256),
}


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Random weights, made on the device, the same at every call; input and output are tied."""
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": max(16384, shape.max_model_len),
        "tie_word_embeddings": True,
    }
    if shape.family == "gemma3_text":
        sizes |= {"query_pre_attn_scalar": shape.head_dim, "sliding_window": 512}
        every = range(shape.num_layers)
        sizes["layer_types"] = [
            "full_attention" if i % 6 == 5 else "sliding_attention" for i in every
        ]
    config = transformers.AutoConfig.for_model(shape.family, **sizes)
    auto: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    with device:
        return auto.from_config(config, dtype=dtype).eval()  # type: ignore[no-any-return]


def runner_of(
    module: Any,
    device: torch.device,
    max_model_len: int,
    *,
    num_blocks: int = 64,
    num_seqs: int = 8,
    num_rows: int = 256,
    model: TorchModel | None = None,
    **options: Any,
) -> TorchRunner:
    """A runner with so much room; the module is its own from now on. model: what it runs, where
    that is not all of the module. options: TorchRunner's."""
    dtype = str(module.dtype).removeprefix("torch.")
    info = ModelInfo(
        name=module.config.model_type, vocab_size=module.config.vocab_size,
        max_model_len=max_model_len, eos_token_ids=(), num_blocks=num_blocks,
        block_size=BLOCK_SIZE, device=str(device), dtype=dtype, fingerprint="",
        max_num_seqs=num_seqs, max_num_batched_tokens=num_rows, kv_dtype=dtype,
    )  # fmt: skip
    return TorchRunner(model or TorchModel(module), info, **options)


def weight_bytes(module: transformers.PreTrainedModel) -> int:
    """Bytes of weights that a step reads: all but the embedding table, unless it is the head."""
    head: Any = module.lm_head
    embedding: Any = module.get_input_embeddings()
    total = sum(p.numel() * p.element_size() for p in module.parameters())
    if embedding.weight is head.weight:
        return total
    return total - int(embedding.weight.numel()) * int(embedding.weight.element_size())


PROMPT = 48
CHAIN = 7
"""Nodes behind the root: eight rows, a bucket without padding."""


def rows_of(
    token_ids: Sequence[int], start: int, targets: Sequence[int], *, is_chain: bool = False
) -> Batch:
    """Rows of one sequence from position `start` on, all scored and drawn from greedily.

    targets: the ids that the rows' logprobs are asked for. is_chain: each row after the first is a
    node below the one before; else they are rows of a prompt.
    """
    num = len(token_ids)
    table = Pages.Table([*range(-(-(start + num) // BLOCK_SIZE))], BLOCK_SIZE)
    builder = BatchBuilder()
    params, drawn = builder.add_params(draw_params()), -1
    rows = builder.add_rows(table, token_ids[: 1 if is_chain else num], start)
    rows += builder.add_tree(table, start, token_ids[len(rows) :], range(-1, num - len(rows) - 1))
    for row, target in zip(rows, targets, strict=True):
        drawn = builder.draw(row, params, drawn if is_chain else -1)
        builder.score(row, target, 1)
    return builder.build()


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
        runner = runner_of(module, device, shape.max_model_len, cuda_graphs=graphs)
        prompt = run(runner, rows_of(ids[:PROMPT], 0, ids[1 : PROMPT + 1]))
        step = rows_of(ids[chain], PROMPT, ids[PROMPT + 1 : total + 1], is_chain=True)
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
                run(runner, rows_of([ids[i]], i, [ids[i + 1]])) for i in range(PROMPT, total)
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


FOLDER = Path(__file__).resolve().parents[2] / "build" / "gpu-slice"
LAYERS, VOCABULARY = 6, 8192
PROMPTS, PROMPT_IDS, NEW, STEP_ROWS = 4, 40, 32, 8
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
    return runner_of(module.to(device).eval(), device, 256, cuda_graphs=graphs)


def _decoded(runner: TorchRunner, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    """The greedy text behind a prompt, a token a step, and its logprobs."""
    ids, text, logprobs, start = list(prompt), list[int](), list[float](), 0
    for _ in range(NEW):
        rows = ids[start:]
        found = run(runner, rows_of(rows, start, [0] * len(rows)))
        start, token = len(ids), int(found.token_ids[-1])
        # The same row again, to score what it drew: the draw comes before its score is asked for.
        last = rows_of(ids[-1:], start - 1, [token])
        logprobs.append(float(run(runner, last).score_logprobs[0]))
        text.append(token)
        ids.append(token)
    return text, logprobs


def _drafted(runner: TorchRunner, prompt: Sequence[int], text: Sequence[int]) -> list[int]:
    """What is drawn behind the recorded text, STEP_ROWS of its ids as one chain a step."""
    run(runner, rows_of(prompt, 0, [0] * len(prompt)))
    drawn: list[int] = []
    whole = [*prompt, *text]
    for start in range(len(prompt) - 1, len(whole) - 1, STEP_ROWS):
        rows = whole[start : min(start + STEP_ROWS, len(whole) - 1)]
        step = rows_of(rows, start, [0] * len(rows), is_chain=True)
        drawn += run(runner, step).token_ids.tolist()
    return drawn


def check_real(asked: Asked, folder: Path = FOLDER) -> Iterator[dict[str, Any]]:
    """A line for each dtype, without graphs and with them; on a CPU float32 alone."""
    if not (folder / RECORDED).is_file():
        yield {
            "what": "trained weights", "shape": "slice",
            "skipped": f"{folder} is not here: `python -m loadtest.gpu.correct {folder}` makes it",
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
    from server.model.catalog import model_folder

    make(model_folder("smollm2-135m-instruct"), Path(sys.argv[1]))
