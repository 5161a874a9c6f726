"""FusedDecoder's kernels against their torch reference, and how much is launched for a layer.

The Triton half runs in the interpreter's process (tests/model/gpu/test_attention.py starts it);
FusedDecoder on the reference against transformers' forward is tests/model/test_hf_equality.py.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from server.errors import UnsupportedModelError
from server.model.gpu.body import ModuleBody
from server.model.gpu.convolution import FIRST_ROW, NOTHING, Inputs, input_sources
from server.model.gpu.decoder import FusedDecoder
from server.model.gpu.decoder_ops import (
    HeadSizes,
    Places,
    Residual,
    Rotation,
    Rows,
    TorchOps,
)
from server.model.gpu.runner import TorchRunner
from server.model.shape import shape_of
from tests.model import families, generic_models
from tests.model.batches import BatchBuilder, Pages, draw_params
from tests.model.gpu.ahead_of_time import compiled, stack_bytes
from tests.model.gpu.launches import Launched
from tests.model.torch_runners import runner_over

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs under TRITON_INTERPRET=1")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

# Heads of q, heads of k, head_dim, rotary_dim, interleaved, norm ("", before, after), scales of q.
HEADS = {
    "llama": (6, 2, 16, 16, False, "", False),
    "qwen3": (4, 1, 32, 32, False, "before", False),
    "hunyuan": (4, 2, 12, 12, False, "after", False),
    "glm4": (4, 2, 12, 6, True, "", False),
    "phi4": (2, 1, 96, 72, False, "", False),
    "ministral3": (4, 2, 12, 12, False, "", True),
}
DTYPES = {"fp32": (torch.float32, 2e-6), "fp16": (torch.float16, 2e-3)}


def random(*size: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both() -> tuple[TorchOps, Any]:
    from server.model.gpu.decoder_kernels import TritonOps

    return TorchOps(), TritonOps()


@needs_interpreter
@pytest.mark.parametrize("case", [(name, "fp32") for name in HEADS] + [("phi4", "fp16")], ids=str)
def test_triton_places_heads_as_the_reference(case: tuple[str, str]) -> None:
    """Normed, rotated and written: q in place, k and v to slots that are not in order."""
    dtype, atol = DTYPES[case[1]]
    heads, kv_heads, dim, rotary, interleaved, norm, scales = HEADS[case[0]]
    sizes = HeadSizes(heads, kv_heads, dim, rotary, interleaved, norm == "after", 1e-5)
    rotation = Rotation(
        random(40, rotary // 2, seed=2), random(40, rotary // 2, seed=3),
        1 + random(40, seed=4).abs() if scales else None,
    )  # fmt: skip
    norms = 1 + random(2, dim, seed=5) if norm else None
    results = []
    for ops in both():
        qkv = random(5, (heads + 2 * kv_heads) * dim, dtype=dtype)
        keys, values = (torch.zeros(16, kv_heads, dim, dtype=dtype) for _ in range(2))
        rows = (
            torch.tensor(own, dtype=torch.int32) for own in ([7, 0, 39, 8, 9], [3, 15, 0, 4, 9])
        )
        ops.place(qkv, sizes, norms, rotation, Places(*rows, keys, values))
        results.append((qkv[:, : heads * dim], keys, values))
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=atol, atol=atol * 4)
    assert results[0][1].abs().sum(dim=(1, 2)).count_nonzero() == 5


@needs_interpreter
@pytest.mark.parametrize("kind", DTYPES)
def test_triton_embeds_norms_and_gates_as_the_reference(kind: str) -> None:
    dtype, atol = DTYPES[kind]
    table, weight = random(30, 48, dtype=dtype), 1 + random(48, seed=6)
    ids = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    results: list[list[torch.Tensor]] = []
    for ops in both():
        found: list[torch.Tensor] = []
        for rows in (
            Rows(table, ids, 1.0),
            Rows(table, ids, 6.93),
            Rows(table[:4], None, 0.5),
        ):
            for norm in (None, weight):
                found += ops.embed(rows, norm, 1e-6)
        for post, following in ((None, weight), (weight, weight), (weight, None)):
            x, y = random(4, 48, dtype=dtype, seed=7), random(4, 48, dtype=dtype, seed=8)
            found += [ops.add_norm(x, y, Residual(post, 0.4, following, 1e-5)), x]
        whole = random(4, 144, dtype=dtype, seed=9)
        ops.norm_heads(whole[:, 48:96], weight, 1e-5)
        found.append(whole)
        found += [ops.gate(random(3, 2 * 96, dtype=dtype, seed=10), gelu) for gelu in (True, False)]
        results.append(found)
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=atol, atol=atol * 4)
    assert torch.equal(results[0][4], (table[[1, 2, 3, 4]].float() * 6.93).to(dtype))


TAPS, BLOCK = 3, 16


def branched() -> Any:
    """Prompt rows that begin before position TAPS, a decode row, a tree of two branches, and rows
    of a sequence that reads a block of another, written in this step."""
    pages, builder = Pages(32, seed=3), BatchBuilder()
    first, second = pages.sequence(40), pages.sequence(40)
    builder.add_rows(first, [1] * 18, 0)
    builder.add_rows(second, [1], 16)
    builder.add_tree(second, 16, [1] * 5, [-1, 0, 1, 0, -1])
    sharing = Pages.Table([first.blocks[0], pages.sequence(16).blocks[0]], BLOCK)
    builder.add_rows(sharing, [1, 1], 16)
    return builder.build()


def test_a_row_reads_the_inputs_of_its_own_ancestors() -> None:
    batch = branched()
    sources = input_sources(batch, TAPS, BLOCK)
    row_of = {int(slot): row for row, slot in enumerate(batch.slots)}
    for row in range(batch.num_rows):
        start, count = int(batch.path_start[row]), int(batch.path_len[row])
        table = batch.block_tables[batch.seq_ids[row]]
        slots = [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(int(batch.prefix_len[row]))]
        slots = [NOTHING] * TAPS + slots + batch.path_slots[start : start + count].tolist()
        want = [FIRST_ROW - row_of[s] if s in row_of else s for s in slots[-TAPS:]]
        assert sources[row].tolist() == want
    assert (sources[:, -1] == FIRST_ROW - np.arange(batch.num_rows)).all(), "its own is the last"
    assert (sources >= 0).any() and (sources == NOTHING).sum() == 3


@needs_interpreter
@pytest.mark.parametrize("kind", DTYPES)
def test_triton_convolves_as_the_reference(kind: str) -> None:
    """More channels than a program has; a row has the same bits alone, after the others' step."""
    dtype, atol = DTYPES[kind]
    batch, size = branched(), 600
    slots = torch.from_numpy(batch.slots)
    sources = torch.from_numpy(input_sources(batch, TAPS, BLOCK))
    projected = random(batch.num_rows, 3 * size, dtype=dtype)
    taps, before = random(TAPS, size, seed=2), random(33 * BLOCK, size, dtype=dtype, seed=3)
    results = []
    for ops in both():
        kept = before.clone()
        results.append((ops.convolve(projected, taps, Inputs(slots, sources, kept)), kept))
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=atol, atol=atol * 4)
    out, kept = results[1]
    row_slots = torch.where(sources < NOTHING, slots[(FIRST_ROW - sources).clamp(min=0)], sources)
    for row in (1, 17, 18, 21, 25):
        alone = row_slots[row : row + 1].clone()
        alone[0, -1] = FIRST_ROW
        at = Inputs(slots[row : row + 1], alone, kept.clone())
        assert torch.equal(both()[1].convolve(projected[row : row + 1], taps, at)[0], out[row])


def runner_of(family: str, **options: Any) -> TorchRunner:
    return runner_over(
        families.build(family), num_blocks=32, max_num_seqs=4, max_num_batched_tokens=64, **options
    )


LAUNCHES_A_LAYER = 6
"""Four products, placing, attention; one more where keys are split."""

LAUNCHES_OF_MANY_ROWS = 9
"""Two residuals and the gate, too; the four products are torch's."""


@needs_interpreter
@pytest.mark.parametrize(
    ("family", "rows", "more"),
    [("llama", 16, 0), ("llama", 17, 0), ("gemma3", 1, 0), ("olmo2", 1, 6), ("lfm2", 1, -2)],
)
def test_triton_launches_of_a_layer_are_bounded(
    family: str, rows: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """more: norms over all heads of q and of k; a convolution is one launch instead of two."""
    from triton.runtime import interpreter

    launched = Launched()
    kernels = 0
    execute = interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal kernels
        kernels += 1
        products = launched.num
        result = execute(self, *args, **kwargs)
        launched.num = products  # the interpreter's own torch operations are no launches
        return result

    runner = runner_of(family, attention="triton")
    body = runner._body.body
    assert isinstance(body, FusedDecoder)

    def watched(*given: Any) -> torch.Tensor:
        with launched, monkeypatch.context() as patch:
            patch.setattr(interpreter.GridExecutor, "__call__", counted)
            return body(*given)

    monkeypatch.setattr(runner._body, "body", watched)
    builder = BatchBuilder()
    row = builder.add_rows(Pages(32).sequence(20), [5] * rows, 0)[0]
    builder.draw(row, builder.add_params(draw_params()))
    runner.launch(builder.build())
    runner.wait()
    runner.close()
    layers = 3
    if rows > 16:
        assert launched.num == 4 * layers, "the products, and nothing else of torch"
        assert kernels == 1 + (LAUNCHES_OF_MANY_ROWS - 4) * layers + more
    else:
        assert launched.num == 0
        assert kernels == 2 + LAUNCHES_A_LAYER * layers + more, "embedding and last norm beside"


def test_the_module_stays_usable_and_no_weight_is_there_twice() -> None:
    """q, k and v of the module become views of the decoder's one matrix."""
    module = families.build("llama")
    ids = torch.tensor([[5, 9, 11]])
    with torch.no_grad():
        before = module(ids).logits
    shape = shape_of(module.config)
    decoder = FusedDecoder(module, shape, 16, TorchOps())
    with torch.no_grad():
        torch.testing.assert_close(module(ids).logits, before, rtol=0, atol=0)
    own = module.model.layers[1].self_attn
    fused = decoder._layers[1].mix.weight
    assert own.q_proj.weight.data_ptr() == fused.data_ptr()
    assert own.v_proj.weight.data_ptr() == fused[-own.v_proj.weight.shape[0] :].data_ptr()


def test_who_gets_which_body() -> None:
    """Where nothing is asked for, our decoder belongs to Triton's attention."""
    for family, options, kind in (
        ("llama", {}, ModuleBody),
        ("llama", {"decoder": "fused"}, FusedDecoder),
        ("llama", {"decoder": "modules"}, ModuleBody),
        ("lfm2", {}, FusedDecoder),
    ):
        runner = runner_of(family, **options)
        assert isinstance(runner._body.body, kind)
        assert runner.info.decoder == runner._body.body.name
        runner.close()


@needs_triton
@pytest.mark.parametrize(("family", "decoder", "found"), [
    ("llama", "auto", "fused"), ("llama", "modules", "modules"), ("gpt2", "auto", "modules"),
])  # fmt: skip
def test_who_gets_which_body_on_the_kernels(family: str, decoder: str, found: str) -> None:
    build = families.build if family in families.FAMILIES else generic_models.build
    runner = runner_over(build(family), decoder=decoder, attention="triton")
    assert runner.info.decoder == found
    runner.close()


def test_a_decoder_that_does_not_compute_the_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="fused does not compute gpt2: it is none of o"):
        runner_over(generic_models.build("gpt2"), decoder="fused")
    with pytest.raises(UnsupportedModelError, match="modules does not compute lfm2: its short con"):
        runner_of("lfm2", decoder="modules")


COMPILED = {
    "_embed_rows": {"SIZE": 640, "BLOCK": 1024, "HAS_IDS": 1, "TAKES_DRAWN": 1, "HAS_NORM": 1},
    "_norm_rows": {"SIZE": 4096, "BLOCK": 4096},
    "_place_heads": {
        "NUM_HEADS": 4, "NUM_KV_HEADS": 1, "HEAD_DIM": 96, "HALF": 36, "BLOCK": 64, "REST": 24,
        "BLOCK_REST": 32, "INTERLEAVED": 1, "NORM_BEFORE": 1, "NORM_AFTER": 0, "SCALES": 1,
    },
    "_add_norm_rows": {"SIZE": 5120, "BLOCK": 8192, "HAS_POST": 1, "HAS_FOLLOWING": 1},
    "_gate_rows": {"SIZE": 2048, "BLOCK": 1024, "GELU": 1},
    "_convolve_rows": {"SIZE": 2048, "BLOCK": 512, "NUM_TAPS": 3},
}  # fmt: skip
INTEGERS = {"ids", "positions", "slots", "sources"}
WIDE = {"norm", "norms", "weight", "post", "following", "cos", "sin", "query_scales", "taps"}
SCALARS = {"scale": "fp32", "eps": "fp32", "stride_row": "i32"}


@pytest.mark.skipif(INTERPRETED, reason="compiles for a GPU")
@needs_triton
@pytest.mark.parametrize(
    ("name", "capability"),
    [(name, 80) for name in COMPILED]
    + [("_place_heads", 90), ("_add_norm_rows", 100)]
    + [("_convolve_rows", capability) for capability in (89, 90, 100)],
)
def test_decoder_kernels_compile_for_a_gpu(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to machine code, without a GPU; nothing spills."""
    from server.model.gpu import decoder_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kinds = dict.fromkeys(INTEGERS, "*i32") | dict.fromkeys(WIDE, "*fp32") | SCALARS
    made = compiled(
        getattr(decoder_kernels, name), kinds, COMPILED[name],
        capability=capability, other="*bf16", num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    assert stack_bytes(made, tmp_path) == 0
