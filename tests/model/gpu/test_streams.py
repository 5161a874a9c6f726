"""The products of few rows that read the residual stream or add to it, against their reference.

The Triton half runs in the interpreter's process (tests/model/gpu/test_attention.py starts it); a
whole model on them is there too (test_triton_runner_is_the_torch_runner).
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from server.model.gpu.decoder_ops import Adapted, Product, Residual, Rows, TorchOps
from server.model.gpu.lora import LoraTable
from server.model.gpu.narrow import narrowed
from tests.model.gpu.ahead_of_time import compiled, stack_bytes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs under TRITON_INTERPRET=1")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

HIDDEN, INNER, MIXED = 72, 40, 104  # no multiples of a block; MIXED is what attention gives back
DTYPES = {"fp32": (torch.float32, 2e-5), "fp16": (torch.float16, 4e-3)}


def random(*size: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(outputs: int, inputs: int, dtype: torch.dtype, form: str, seed: int) -> Product:
    weight = random(outputs, inputs, dtype=dtype, seed=seed) / inputs**0.5
    bias = random(outputs, dtype=dtype, seed=seed + 100) if form == "biased" else None
    return Product(narrowed(weight, "int8") if form == "int8" else weight, bias)


def tables(dtype: torch.dtype) -> list[LoraTable]:
    """Of q, k and v, out, gate and up, and down: two places."""
    sizes = ((HIDDEN, MIXED), (MIXED, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN))
    return [
        LoraTable(random(2, k, 16, dtype=dtype, seed=50 + i) / k**0.5, random(2, 16, seed=60 + i),
                  random(2, 16, n, dtype=dtype, seed=70 + i) / 4)
        for i, (k, n) in enumerate(sizes)
    ]  # fmt: skip


def layers(
    ops: Any, rows: torch.Tensor, placement: str, form: str, dtype: torch.dtype,
    spans: list[list[int]] | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Two layers without attention on rows of a table: what each operation gives, and the stream
    wherever it is read. spans: of adapters."""
    table = random(40, HIDDEN, dtype=dtype)
    norms = [1 + random(HIDDEN, seed=20 + i) / 4 for i in range(4)]
    before, after = placement != "after", placement != "before"
    first, post, second, last = (
        norm if there else None
        for norm, there in zip(norms, (before, after, before, after), strict=True)
    )
    made = [product(n, k, dtype, form, 30 + i) for i, (n, k) in enumerate(
        ((MIXED, HIDDEN), (HIDDEN, MIXED), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    )]  # fmt: skip
    at = None if spans is None else torch.tensor(spans, dtype=torch.int32)
    mix, out, gate_up, down = (
        None if at is None else Adapted(at, own) for own in tables(dtype)
    )  # fmt: skip
    stream = ops.enter(Rows(table, rows, 1.5), first, 1e-5)
    found = []
    for _layer in range(2):
        x, mixed = ops.read(stream, made[0], mix)
        found += [x.clone(), mixed]
        stream = ops.add(x, mixed, made[1], Residual(post, 0.7, second, 1e-5), out)
        x, gated = ops.gated(stream, made[2], form == "biased", gate_up)
        found += [x.clone(), gated]
        stream = ops.add(x, gated, made[3], Residual(last, 0.7, first, 1e-5), down)
    x, mixed = ops.read(stream, made[0], mix)
    final = ops.leave(x, mixed, made[1], Residual(post, 0.7, norms[3], 1e-5), out)
    return [*found, final, x]


def ids(num: int) -> torch.Tensor:
    return torch.arange(3, 3 + num, dtype=torch.int32)


@needs_interpreter
@pytest.mark.parametrize(
    ("placement", "form", "kind"),
    [("before", "plain", "fp32"), ("before", "biased", "fp16"), ("both", "int8", "fp32"),
     ("both", "plain", "fp16"), ("after", "biased", "fp32")],
)  # fmt: skip
def test_triton_reads_and_adds_as_the_reference(placement: str, form: str, kind: str) -> None:
    """Norms before products, behind them and both; a row has the same bits beside none, some and as
    many rows as a tile has. More rows go through the separate launches."""
    from server.model.gpu.decoder_kernels import TritonOps

    dtype, atol = DTYPES[kind]
    full = layers(TritonOps(), ids(16), placement, form, dtype)
    for rows, of_few in ((ids(16), full), (ids(17), None)):
        want = layers(TorchOps(), rows, placement, form, dtype)
        got = of_few or layers(TritonOps(), rows, placement, form, dtype)
        for own, other in zip(got, want, strict=True):
            torch.testing.assert_close(own, other, rtol=atol, atol=4 * atol)
    # At the same place in the tile: numpy's product, the interpreter's, adds by place.
    for rows in (ids(1), ids(6), torch.cat([ids(6), ids(24)[14:]])):
        few = layers(TritonOps(), rows, placement, form, dtype)
        alike = slice(0, min(6, len(rows)))
        assert all(torch.equal(a[alike], b[alike]) for a, b in zip(few, full, strict=True))


@needs_interpreter
@pytest.mark.parametrize(("placement", "kind"), [("before", "fp32"), ("both", "fp16")])
def test_triton_rows_beside_adapters_keep_their_bits(placement: str, kind: str) -> None:
    from server.model.gpu.decoder_kernels import TritonOps

    dtype, atol = DTYPES[kind]
    spans = [[1, 3, 1], [6, 1, 0], [0, 0, 0]]
    got = layers(TritonOps(), ids(9), placement, "plain", dtype, spans)
    want = layers(TorchOps(), ids(9), placement, "plain", dtype, spans)
    for own, other in zip(got, want, strict=True):
        torch.testing.assert_close(own, other, rtol=atol, atol=8 * atol)
    base = layers(TritonOps(), ids(9), placement, "plain", dtype)
    beside = [0, 4, 5, 7, 8]
    assert all(torch.equal(a[beside], b[beside]) for a, b in zip(got, base, strict=True))
    assert all(
        not torch.equal(a[[1, 6]], b[[1, 6]]) for a, b in zip(got[1:], base[1:], strict=True)
    )


# Of public models: type, outputs and inputs of the weights, and what stands in the product.
READS = {
    "Qwen3-4B, q k v": ("bf16", 6144, 2560, {"HAS_NORM": 1}),
    "Qwen3-4B, gate and up": ("bf16", 9728, 2560, {"HAS_NORM": 1, "GATES": 1}),
    "Gemma 3, gate and up": (
        "bf16", 6912, 1152, {"HAS_NORM": 1, "HAS_POST": 1, "GATES": 1, "GELU": 1}
    ),
    "Gemma 3 with adapters": (
        "bf16", 2048, 640, {"HAS_NORM": 1, "HAS_POST": 1, "KEEPS_NORMED": 1}
    ),
    "OLMo 2, q k v, fp32": ("fp32", 6144, 2048, {"HAS_POST": 1}),
    "SmolLM2, gate and up, fp32": ("fp32", 1536, 576, {"HAS_NORM": 1, "GATES": 1}),
    "Llama, gate and up, int8": ("i8", 8192, 2048, {"HAS_NORM": 1, "GATES": 1, "HAS_SCALES": 1}),
    "Qwen2, q k v, fp8": ("fp8e4nv", 2048, 1536, {"HAS_NORM": 1, "HAS_BIAS": 1, "HAS_SCALES": 1}),
}  # fmt: skip
ADDS = {
    "Qwen3-4B, down": ("bf16", 2560, 9728, {}),
    "Gemma 3, down": ("bf16", 640, 2048, {"HAS_POST": 1, "HAS_ADDED": 1}),
    "SmolLM2, down, fp32": ("fp32", 576, 1536, {}),
    "Llama, out, int8": ("i8", 2048, 2048, {"HAS_SCALES": 1, "HAS_BIAS": 1}),
}
KINDS = {
    **dict.fromkeys(("parts", "post", "norm", "scales", "added"), "*fp32"),
    "num_rows": "i32", "scale": "fp32", "eps": "fp32",
}  # fmt: skip
STORED = {"bf16": torch.bfloat16, "fp32": torch.float32, "i8": torch.int8}


@pytest.mark.skipif(INTERPRETED, reason="compiles for a GPU")
@needs_triton
@pytest.mark.parametrize(
    ("case", "capability"),
    [(case, 90) for case in (*READS, *ADDS)]
    + [("Qwen3-4B, gate and up", 80), ("Qwen3-4B, gate and up", 89), ("Qwen3-4B, gate and up", 100)]
    + [("Qwen3-4B, down", capability) for capability in (80, 89, 100)],
)
def test_products_of_few_rows_compile_for_a_gpu(
    case: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to machine code, without a GPU; nothing spills."""
    from server.model.gpu import stream_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    name = "_read_stream" if case in READS else "_add_to_stream"
    kind, outputs, inputs, flags = (READS | ADDS)[case]
    weight = torch.empty(
        outputs, inputs, dtype=STORED.get(kind, torch.float8_e4m3fn), device="meta"
    )
    options = stream_kernels.blocks(Product(weight, None), bool(flags.get("GATES")))
    constants: dict[str, Any] = {
        "N": outputs, "K": inputs, "NUM_PARTS": 160, "BLOCK_PARTS": 256, "HAS_POST": 0,
        "HAS_NORM": 0, "KEEPS_NORMED": 0, "HAS_SCALES": 0, "HAS_BIAS": 0, "HAS_ADDED": 0,
        "GATES": 0, "GELU": 0, **flags, **{k: v for k, v in options.items() if k.isupper()},
    }  # fmt: skip
    kernel = getattr(stream_kernels, name)
    made = compiled(
        kernel, KINDS | {"weight": f"*{kind}"},
        {k: v for k, v in constants.items() if k in kernel.arg_names},
        capability=capability, other="*fp32" if kind == "fp32" else "*bf16", enable_fp_fusion=True,
        **{k: v for k, v in options.items() if not k.isupper()},
    )  # fmt: skip
    assert stack_bytes(made, tmp_path) == 0
    assert made.metadata.shared <= 99 << 10  # of compute capability 8.6 and 8.9
