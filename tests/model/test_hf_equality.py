"""The GPU's paged forward, on the CPU, against transformers' own, to 1e-4 in float32.

The runner gives log-softmax over whole rows through scores that ask for all ids; transformers'
untouched eager forward on the full sequence is the truth. For the CPU's path test_families.py ties
every family to transformers, cpu/test_bits.py chunks, trees and forks to a plain prefill.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from server.model.loader import finish_module
from tests.model import families
from tests.model.families import Logprobs, tokens
from tests.model.row_cases import ROOTS, RowCases
from tests.model.torch_runners import runner_over

TOLERANCE = 1e-4
FAMILIES = tuple(families.FAMILIES)

BATTERY = pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma3", "lfm2"], indirect=True, scope="module"
)
"""Those that this path treats differently; the others run once."""


def against(runner: Any, module: Any, atol: float = TOLERANCE) -> RowCases:
    """Cases of a runner whose truth is transformers' own forward of a module."""
    module.set_attn_implementation("eager")

    def close(got: Logprobs, want: Logprobs) -> None:
        np.testing.assert_allclose(got, want, rtol=0.0, atol=atol)

    return RowCases(runner, lambda ids, start: families.truth(module, ids)[start:], close)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cases(family: str) -> RowCases:
    return against(runner_over(finish_module(families.build(family))), families.build(family))


def test_whole_prefill_of_models_that_attend(cases: RowCases) -> None:
    """A changed early token must change late logits, or equality would say little."""
    cases.chunks(70, 70)
    ids = tokens(40, 1)
    changed = [ids[0] ^ 1, *ids[1:]]
    near = [*ids[:35], ids[35] ^ 1, *ids[36:]]
    plain = cases.truth(ids, 0)
    assert np.abs(plain[20] - cases.truth(changed, 20)[0]).max() > 100 * TOLERANCE
    assert np.abs(plain[39] - cases.truth(near, 39)[0]).max() > 100 * TOLERANCE


@BATTERY
@pytest.mark.parametrize(("num", "chunk"), [(24, 1), (70, 33)])
def test_chunked_prefill(cases: RowCases, num: int, chunk: int) -> None:
    cases.chunks(num, chunk)


@BATTERY
@pytest.mark.parametrize("root", ROOTS)
def test_tree_rows_and_what_follows_are_the_path_fed_linearly(cases: RowCases, root: int) -> None:
    cases.tree(root)


@BATTERY
def test_several_sequences_in_one_batch_and_a_fork(cases: RowCases) -> None:
    cases.neighbours()
    cases.fork()
