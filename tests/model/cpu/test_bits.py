"""On a CPU every row has the same bits however it got there (docs/DESIGN.md 1.1, Numerics).

The truth here is our own one-token-at-a-time loop; test_families.py and test_greedy.py tie it to
transformers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from server.model.cpu.runner import CpuRunner
from server.model.cpu.threads import KernelThreads, Team
from tests.model import families
from tests.model.batches import BatchBuilder, Pages, leaf_paths
from tests.model.cpu_models import cpu_runner
from tests.model.families import Logprobs, prefill, step, tokens
from tests.waiting import wait_until

_INTEGERS = ["int8 gemma3", "int8-blocks llama", "int4 qwen2"]
_SMALL_CACHES = ["float32:float16 qwen3", "float32:int8 gemma3", "int8-blocks:int8 llama"]


@pytest.fixture(scope="module", params=[*families.FAMILIES, *_INTEGERS, *_SMALL_CACHES])
def runner(request: pytest.FixtureRequest) -> Iterator[CpuRunner]:
    form, _, family = str(request.param).rpartition(" ")
    dtype, _, kv_dtype = form.partition(":")
    made = cpu_runner(
        families.build(family), dtype=dtype or "float32", kv_dtype=kv_dtype or "float32"
    )
    yield made
    made.close()


def one_by_one(runner: CpuRunner, ids: list[int], seed: int) -> Logprobs:
    return go_on(runner, Pages(64, seed=seed).sequence(len(ids)), ids, 0)


def go_on(runner: CpuRunner, table: Pages.Table, ids: list[int], start: int) -> Logprobs:
    """One step a token, behind what the sequence holds before `start`."""
    got = []
    for i, token in enumerate(ids, start):
        builder = BatchBuilder()
        rows = builder.add_rows(table, [token], i)
        got.append(step(runner, builder, rows))
    return np.concatenate(got)


@dataclass(frozen=True)
class Text:
    """Some ids and the truth about each of them."""

    ids: list[int]
    truth: Logprobs


def texts_of(runner: CpuRunner, *lengths: int) -> list[Text]:
    """Texts of these lengths."""
    prompts = [tokens(n, 30 + n) for n in lengths]
    return [Text(ids, one_by_one(runner, ids, i)) for i, ids in enumerate(prompts)]


@pytest.fixture(scope="module")
def texts(runner: CpuRunner) -> list[Text]:
    return texts_of(runner, 90, 5, 17, 33)


@pytest.mark.parametrize("chunk", [2, 7, 13, 48, 90])
def test_chunks_of_any_size(runner: CpuRunner, texts: list[Text], chunk: int) -> None:
    ids = texts[0].ids
    table = Pages(64, seed=4).sequence(len(ids))
    got = []
    for start in range(0, len(ids), chunk):
        builder = BatchBuilder()
        got.append(
            step(runner, builder, builder.add_rows(table, ids[start : start + chunk], start))
        )
    assert np.array_equal(np.concatenate(got), texts[0].truth)


def test_copied_blocks_are_read_as_the_first_ones(runner: CpuRunner, texts: list[Text]) -> None:
    """A fork's tail block, and a shared prefix."""
    ids, want = texts[0].ids[:40], texts[0].truth[35:40]
    pages = Pages(64, seed=5)
    table, fork = pages.sequence(40), pages.sequence(40)
    builder = BatchBuilder()
    builder.add_rows(table, ids[:35], 0)
    step(runner, builder, [])
    blocks = [np.asarray([t.slot(p) // 16 for p in (0, 16, 32)], np.int32) for t in (table, fork)]
    runner.copy_blocks(*blocks)
    builder = BatchBuilder()
    assert np.array_equal(step(runner, builder, builder.add_rows(fork, ids[35:], 35)), want)


def test_neighbours_change_nothing(runner: CpuRunner, texts: list[Text]) -> None:
    pages = Pages(64, seed=8)
    builder = BatchBuilder()
    rows = [builder.add_rows(pages.sequence(len(text.ids)), text.ids, 0) for text in texts]
    got = step(runner, builder, [r for part in rows for r in part])
    assert np.array_equal(got, np.concatenate([text.truth for text in texts]))


def test_rows_that_nobody_asks_for_change_nothing(runner: CpuRunner, texts: list[Text]) -> None:
    """Of most rows of a prompt a last layer makes keys and values alone."""
    pages = Pages(64, seed=9)
    tables = [pages.sequence(len(text.ids)) for text in texts]
    builder = BatchBuilder()
    rows = [builder.add_rows(t, text.ids[:-1], 0) for t, text in zip(tables, texts, strict=True)]
    got = step(runner, builder, [rows[0][10], rows[0][-1], rows[3][-1]])
    assert np.array_equal(got, [texts[0].truth[10], texts[0].truth[-2], texts[3].truth[-2]])
    for table, text in zip(tables, texts, strict=True):
        builder = BatchBuilder()
        last = builder.add_rows(table, text.ids[-1:], len(text.ids) - 1)
        assert np.array_equal(step(runner, builder, last), text.truth[-1:])


@pytest.mark.parametrize("root", [0, 6, 7, 14, 15, 16, 31])
def test_tree_rows_and_what_follows_an_accepted_path(runner: CpuRunner, root: int) -> None:
    parents = [-1, 0, -1, 2, 3, 3, 1, 4]
    *others, accepted = leaf_paths(parents)
    ids, nodes = tokens(root + 1, root), tokens(len(parents), 90 + root)
    table = Pages(64, seed=root).sequence(root + 1 + len(parents) + 8)
    builder = BatchBuilder()
    builder.add_rows(table, ids, 0)
    got = step(runner, builder, builder.add_tree(table, root, nodes, parents))
    runner.move_slots(
        np.asarray([table.slot(root + 1 + i) for i in accepted], np.int32),
        np.asarray([table.slot(root + 1 + i) for i in range(4)], np.int32),
    )
    builder = BatchBuilder()
    after = step(runner, builder, builder.add_rows(table, [9, 8, 7], root + 5))
    # Nobody reads these blocks any more, so that those of the truth may be the same.
    alone = Pages(64, seed=1).sequence(root + 1 + len(parents))
    builder = BatchBuilder()
    builder.add_rows(alone, ids, 0)  # in one chunk, which gives what one by one gives
    step(runner, builder, [])
    for path in (*others, accepted):
        linear = go_on(runner, alone, [nodes[i] for i in path], root + 1)
        assert np.array_equal(got[path], linear), path
    assert np.array_equal(after, go_on(runner, alone, [9, 8, 7], root + 5))


def test_thread_count_changes_nothing() -> None:
    module = families.build("gemma3")
    ids = tokens(60, 2)
    results = []
    for threads in (1, 2, 3):
        made = cpu_runner(module, num_threads=threads)
        results.append(prefill(made, ids))
        made.close()
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_bfloat16_weights_give_the_forward_of_the_rounded_model() -> None:
    module = families.build("llama")
    ids = tokens(40, 5)
    made = cpu_runner(module, dtype="bfloat16")
    got = prefill(made, ids)
    made.close()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if (parameter.dim() == 2 and "embed" not in name) or "lm_head" in name:
                parameter.copy_(parameter.to(torch.bfloat16).float())
    assert np.abs(got - families.truth(module, ids)).max() < 1e-4


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are pinned on Linux only")
def test_threads_that_slept_start_on_a_core_each_and_are_let_go() -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) == 1:
        pytest.skip("one core")

    def places() -> list[set[int]]:
        return [os.sched_getaffinity(thread_id) for thread_id in threads.thread_ids]

    team = Team(len(cores))
    with ThreadPoolExecutor(1) as worker:
        made = worker.submit(KernelThreads, team.thread_ids, pause_s=0.2, pinned_s=0.15)
        threads = made.result()
        assert len(set(threads.thread_ids)) == len(cores)
        worker.submit(threads.wake).result()  # has not slept
        assert places() == [cores] * len(cores)
        time.sleep(0.25)
        worker.submit(threads.wake).result()
        assert sorted(core for place in places() for core in place) == sorted(cores)
        worker.submit(threads.rest).result()
        wait_until(lambda: places() == [cores] * len(cores), 10.0)
        fewer = worker.submit(KernelThreads, team.thread_ids[1:]).result()
        assert fewer.thread_ids == ()
