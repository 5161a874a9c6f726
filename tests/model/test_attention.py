"""Both paged attentions against a float64 answer, on the same cases.

Triton's interpreter must be chosen before triton is first imported, and torch may import it, so
the Triton half runs in a process of its own (test_triton_in_the_interpreter); there this module's
`triton` cases run, elsewhere they are left out. tests/gpu runs the cases on CUDA.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from server.engine import sampling
from server.model import sampler
from tests.model import attention_cases as cases

CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).resolve().parents[2]

needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs under TRITON_INTERPRET=1")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


KINDS = ["decode", "tree", "chunk", "mixed"]
TORCH_CASES = [("torch", kind, shape) for shape in cases.SHAPES for kind in KINDS]
# The interpreter is slow: every shape on the batch that has all kinds of rows, and one on each.
TRITON_CASES = [
    ("triton", "tree" if shape == "grouped_by_32" else "mixed", shape) for shape in cases.SHAPES
] + [("triton", kind, "mqa") for kind in KINDS[:-1]]


@pytest.mark.parametrize(
    ("implementation", "kind", "shape"),
    [*TORCH_CASES, *(pytest.param(*case, marks=needs_interpreter) for case in TRITON_CASES)],
)
def test_every_row_attends_to_exactly_its_keys(implementation: str, kind: str, shape: str) -> None:
    p = cases.problem(cases.batch_of(kind), cases.SHAPES[shape], torch.float32, CPU)
    want = cases.expected(p)
    got = cases.run_triton(p) if implementation == "triton" else cases.run_torch(p)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)


@needs_interpreter
def test_triton_without_room_for_splits_is_the_same() -> None:
    p = cases.problem(cases.batch_of("tree"), cases.SHAPES["odd_dim"], torch.float32, CPU)
    want = cases.expected(p)
    torch.testing.assert_close(cases.run_triton(p, num_bytes=0).double(), want, rtol=0, atol=2e-5)


@needs_interpreter
def test_triton_gives_a_row_the_same_bits_whatever_its_neighbours() -> None:
    """Window edges included: blocks, splits and their order depend on the row alone."""
    shape = cases.SHAPES["odd_dim"]
    whole = cases.problem(cases.batch_of("mixed"), shape, torch.float32, CPU)
    together = cases.run_triton(whole)
    for rows, batch in cases.rows_alone(whole.batch):
        p = cases.problem(batch, shape, torch.float32, CPU)
        p.query.copy_(whole.query[rows])
        p.key.copy_(whole.key[rows])
        p.value.copy_(whole.value[rows])
        assert torch.equal(cases.run_triton(p), together[rows])


@needs_interpreter
def test_triton_gumbel_max_is_the_torch_one() -> None:
    from server.model import triton_kernels

    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((9, 20_000), generator=generator, dtype=torch.float64)
    logits[2, 100:] = float("-inf")
    logits[3] = 1.0  # greedy below: the lowest id
    logits[4] = float("-inf")
    words = [sampling.noise_key(5, i, 1000 + i) for i in range(9)]
    keys = np.ones((9, 3), np.uint32)
    keys[:, :2] = words
    keys[3, 2] = 0
    device_keys = torch.from_numpy(keys.view(np.int32))
    value, ids = triton_kernels.gumbel_max(logits, device_keys)
    want_value, want_ids = sampler.gumbel_max(logits, device_keys)
    keep = [0, 1, 2, 3, 5, 6, 7, 8]
    assert ids[keep].tolist() == want_ids[keep].tolist() and ids[3] == 0
    torch.testing.assert_close(value, want_value, rtol=1e-14, atol=0)


@pytest.mark.skipif(INTERPRETED, reason="starts the process this one is")
@needs_triton
def test_triton_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", "triton", str(Path(__file__))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{len(TRITON_CASES) + 3} passed" in done.stdout, done.stdout[-400:]
