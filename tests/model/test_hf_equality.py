"""The GPU's paged forward, on the CPU, against transformers' own, to 1e-4 in float32.

The runner gives log-softmax over whole rows through scores that ask for all ids; transformers'
untouched eager forward on the full sequence is the truth. For the CPU's path test_families.py and
test_greedy.py tie every family to transformers, cpu/test_bits.py chunks, trees and forks to a
plain prefill.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from transformers import PreTrainedModel

from server.engine.batch import Runner
from server.model.loader import finish_module
from tests.model import families
from tests.model.batches import BLOCK_SIZE, BatchBuilder, Pages, leaf_paths
from tests.model.families import Logprobs, step, tokens
from tests.model.torch_runners import runner_over

TOLERANCE = 1e-4
NUM_BLOCKS = 64
V = families.VOCAB_SIZE
FAMILIES = tuple(families.FAMILIES)


class Truth:
    """transformers' own forward of a module."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._module.set_attn_implementation("eager")

    def __call__(self, token_ids: list[int]) -> Logprobs:
        """float32 [n, V]: log-softmax at every position of a sequence."""
        return families.truth(self._module, token_ids)


BATTERY = pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma3", "lfm2"], indirect=True, scope="module"
)
"""Those that this path treats differently; the others run once."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def truth(family: str) -> Truth:
    return Truth(families.build(family))


@pytest.fixture(scope="module")
def runner(family: str) -> Iterator[Runner]:
    made = runner_over(finish_module(families.build(family)))
    yield made
    made.close()


def close(got: Logprobs, want: Logprobs) -> None:
    np.testing.assert_allclose(got, want, rtol=0.0, atol=TOLERANCE)


def test_the_models_attend(truth: Truth) -> None:
    """A changed early token must change late logits, or equality would say little."""
    ids = tokens(40, 1)
    changed = [ids[0] ^ 1, *ids[1:]]
    near = [*ids[:35], ids[35] ^ 1, *ids[36:]]
    plain = truth(ids)
    assert np.abs(plain[20] - truth(changed)[20]).max() > 100 * TOLERANCE
    assert np.abs(plain[39] - truth(near)[39]).max() > 100 * TOLERANCE


def test_whole_prefill(runner: Runner, truth: Truth) -> None:
    ids = tokens(70, 2)
    builder = BatchBuilder()
    rows = builder.add_rows(Pages(NUM_BLOCKS).sequence(70), ids, 0)
    close(step(runner, builder, rows), truth(ids))


@BATTERY
@pytest.mark.parametrize("chunk", [1, 5, 16, 33])
def test_chunked_prefill(runner: Runner, truth: Truth, chunk: int) -> None:
    num = 24 if chunk == 1 else 70
    ids = tokens(num, 3)
    table = Pages(NUM_BLOCKS, seed=chunk).sequence(num)
    got = []
    for start in range(0, num, chunk):
        builder = BatchBuilder()
        rows = builder.add_rows(table, ids[start : start + chunk], start)
        got.append(step(runner, builder, rows))
    close(np.concatenate(got), truth(ids))


@BATTERY
def test_several_sequences_in_one_batch(runner: Runner, truth: Truth) -> None:
    """A prompt chunk, two decode rows and a second chunk of another prompt, on scattered blocks."""
    pages = Pages(NUM_BLOCKS, seed=7)
    lengths = [37, 21, 18, 50]
    ids = [tokens(n, 10 + n) for n in lengths]
    tables = [pages.sequence(n) for n in lengths]
    done = [0, 20, 17, 23]
    for i in (1, 2, 3):
        builder = BatchBuilder()
        builder.add_rows(tables[i], ids[i][: done[i]], 0)
        step(runner, builder, [])
    builder = BatchBuilder()
    rows = [builder.add_rows(tables[i], ids[i][done[i] :], done[i]) for i in range(4)]
    got = step(runner, builder, [r for part in rows for r in part])
    close(got, np.concatenate([truth(ids[i])[done[i] :] for i in range(4)]))


TREE = [-1, 0, 1, 2, 0, 4, -1, 6, 7, 8, 9, 10]


@BATTERY
@pytest.mark.parametrize("root", [0, 3, 6, 7, 8, 15, 30])
def test_tree_rows_are_the_path_fed_linearly(runner: Runner, truth: Truth, root: int) -> None:
    """Every node, for roots on both sides of the window's and the blocks' edges; the tree hangs
    off the last prompt row in one batch."""
    ids = tokens(root + 1, 20 + root)
    nodes = tokens(len(TREE), 50 + root)
    table = Pages(NUM_BLOCKS, seed=root).sequence(root + 1 + len(TREE))
    builder = BatchBuilder()
    last = builder.add_rows(table, ids, 0)[-1]
    rows = builder.add_tree(table, root, nodes, TREE)
    got = step(runner, builder, [*rows, last])
    for path in leaf_paths(TREE):
        close(got[[-1, *path]], truth([*ids, *(nodes[i] for i in path)])[root:])


@BATTERY
def test_decode_after_an_accepted_path(runner: Runner, truth: Truth) -> None:
    """KV of the accepted path is moved to its positions; what follows reads it there."""
    ids, nodes = tokens(20, 60), tokens(6, 61)
    parents = [-1, 0, -1, 2, 3, 1]
    table = Pages(NUM_BLOCKS, seed=5).sequence(40)
    builder = BatchBuilder()
    builder.add_rows(table, ids, 0)
    builder.add_tree(table, 19, nodes, parents)
    step(runner, builder, [])
    accepted = [2, 3, 4]  # overlaps with its destinations: positions 22.. -> 20..
    runner.move_slots(
        np.asarray([table.slot(20 + i) for i in accepted], np.int32),
        np.asarray([table.slot(20 + i) for i in range(3)], np.int32),
    )
    ids += [nodes[i] for i in accepted]
    for token in tokens(3, 62):
        ids.append(token)
        builder = BatchBuilder()
        rows = builder.add_rows(table, [token], len(ids) - 1)
        close(step(runner, builder, rows), truth(ids)[-1:])


@BATTERY
def test_a_fork_reads_its_copied_block(runner: Runner, truth: Truth) -> None:
    """The tail block is copied; both choices then write their own continuation."""
    ids = tokens(20, 70)
    pages = Pages(NUM_BLOCKS, seed=9)
    table = pages.sequence(32)
    fork = Pages.Table([table.blocks[0], pages.sequence(16).blocks[0]], BLOCK_SIZE)
    builder = BatchBuilder()
    builder.add_rows(table, ids, 0)
    step(runner, builder, [])
    runner.copy_blocks(
        np.asarray([table.blocks[1]], np.int32), np.asarray([fork.blocks[1]], np.int32)
    )
    builder = BatchBuilder()
    rows = builder.add_rows(table, [11], 20) + builder.add_rows(fork, [12], 20)
    got = step(runner, builder, rows)
    close(got[:1], truth([*ids, 11])[-1:])
    close(got[1:], truth([*ids, 12])[-1:])
