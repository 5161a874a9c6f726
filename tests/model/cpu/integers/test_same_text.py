"""The same text on another CPU: a whole model's logprobs from AVX2 and from the widest kernel.

Integer products are exact; attention, norms and softmax add in one order with fused multiply-adds,
which AVX2 machines have. So ids *and* logprobs are equal to the last bit.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from drafters.target import TARGETS, chosen, runs_here
from server.model.cpu.records import INTEGER_KERNEL as KERNEL
from tests.model import families
from tests.model.batches import BatchBuilder, Pages
from tests.model.cpu.test_kernels import digest
from tests.model.cpu_models import cpu_runner
from tests.processes import run_python

_PROMPT, _NEW = 90, 12  # more rows at once than half a span: each thread fills its buffer


def greedy() -> str:
    """Ids of a greedy text, and a digest of every logprob on its way."""
    runner = cpu_runner(
        families.build("llama"), dtype="int8-blocks", kv_dtype="float16", num_threads=2
    )
    table = Pages(64, seed=1).sequence(_PROMPT + _NEW)
    ids = np.random.default_rng(4).integers(3, families.VOCAB_SIZE, _PROMPT).tolist()
    text: list[int] = []
    digest = hashlib.sha256()
    fed = 0
    for _ in range(_NEW):
        builder = BatchBuilder()
        rows = builder.add_rows(table, (ids + text)[fed:], fed)
        logprobs = families.step(runner, builder, rows)
        digest.update(logprobs.tobytes())
        fed = len(ids) + len(text)
        text.append(int(logprobs[-1].argmax()))
    runner.close()
    return f"{text} {digest.hexdigest()}"


@pytest.mark.slow
def test_avx2_gives_the_products_and_the_text_of_the_widest_kernel() -> None:
    """Also the float products of registers of 256 bits, whose weights are laid out for them."""
    if not runs_here(TARGETS["avx2"]) or chosen().name == "avx2":
        pytest.skip("this CPU has no AVX2, or nothing wider to compare it with")
    code = (
        "from tests.model.cpu.integers.test_same_text import KERNEL, digest, greedy; "
        "assert KERNEL == 'avx2'; print(digest()); print(greedy())"
    )
    told = run_python("-c", code, TAILOR_CPU="avx2").splitlines()
    assert told == [digest(), greedy()], f"AVX2 and {KERNEL} differ"
