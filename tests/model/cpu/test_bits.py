"""On a CPU every row has the same bits however it got there (docs/DESIGN.md 1.1, Numerics).

The truth here is our own one-token-at-a-time loop; test_families.py ties it to transformers.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple

import numpy as np
import pytest
import torch

from server.engine.batch import Runner
from server.model.cpu.threads import KernelThreads, Team
from server.model.scoring import Text, score
from tests.model import families
from tests.model.batches import BatchBuilder, Pages
from tests.model.cpu_models import cpu_runner
from tests.model.families import Logprobs, prefill, step, tokens
from tests.model.row_cases import NUM_BLOCKS, ROOTS, RowCases
from tests.waiting import wait_until


def one_by_one(runner: Runner, ids: Sequence[int], start: int = 0) -> Logprobs:
    """One step a token from `start` on, behind one chunk."""
    table, builder = Pages(NUM_BLOCKS, seed=1).sequence(len(ids)), BatchBuilder()
    if builder.add_rows(table, ids[:start], 0):
        step(runner, builder, [])
    got = []
    for i in range(start, len(ids)):
        builder = BatchBuilder()
        got.append(step(runner, builder, builder.add_rows(table, ids[i : i + 1], i)))
    return np.concatenate(got)


def to_the_bit(runner: Runner) -> RowCases:
    """Cases of a runner whose truth is its own loop of one token at a time."""
    known = functools.cache(functools.partial(one_by_one, runner))
    equal = np.testing.assert_array_equal
    return RowCases(runner, lambda ids, start: known(tuple(ids), start), equal)


# Families that rows of a prompt, a tree or a window differ in: by windows, rotary positions, caps,
# scales by position, convolutions. test_family_engines.py has the texts of every family.
_FAMILIES = ["llama", "qwen2", "gemma2", "smollm3", "phi3", "ministral3", "lfm2"]
_INTEGERS = ["int8 gemma3", "int8-blocks llama", "int4 qwen2"]
_SMALL_CACHES = ["float32:float16 qwen3", "float32:int8 gemma3", "int8-blocks:int8 llama"]


@pytest.fixture(scope="module", params=[*_FAMILIES, *_INTEGERS, *_SMALL_CACHES])
def cases(request: pytest.FixtureRequest) -> Iterator[RowCases]:
    form, _, family = str(request.param).rpartition(" ")
    dtype, _, kv_dtype = form.partition(":")
    made = cpu_runner(
        families.build(family), dtype=dtype or "float32", kv_dtype=kv_dtype or "float32"
    )
    yield to_the_bit(made)
    made.close()


@pytest.mark.parametrize("chunk", [2, 13, 70])
def test_chunks_of_any_size(cases: RowCases, chunk: int) -> None:
    cases.chunks(70, chunk)


def test_neighbours_change_nothing_and_copied_blocks_are_read_as_the_first(cases: RowCases) -> None:
    cases.neighbours()
    cases.fork()


def test_rows_that_nobody_asks_for_change_nothing(cases: RowCases) -> None:
    """Of most rows of a prompt a last layer makes keys and values alone."""
    pages, builder = Pages(NUM_BLOCKS, seed=9), BatchBuilder()
    texts = [tokens(num, 30 + num) for num in (60, 5, 33)]
    tables = [pages.sequence(len(ids)) for ids in texts]
    rows = [builder.add_rows(t, ids[:-1], 0) for t, ids in zip(tables, texts, strict=True)]
    got = [step(cases.runner, builder, [rows[0][10], rows[0][-1], rows[2][-1]])]
    for table, ids in zip(tables, texts, strict=True):
        builder = BatchBuilder()
        last = builder.add_rows(table, ids[-1:], len(ids) - 1)
        got.append(step(cases.runner, builder, last))
    first, _, third = texts
    want = [cases.truth(ids, len(ids) - 1) for ids in (first[:11], first[:-1], third[:-1], *texts)]
    cases.equal(np.concatenate(got), np.concatenate(want))


@pytest.mark.parametrize("root", ROOTS)
def test_tree_rows_and_what_follows_an_accepted_path(cases: RowCases, root: int) -> None:
    cases.tree(root)


def test_a_text_of_more_rows_than_a_step_takes_is_scored_in_several() -> None:
    found = []
    for max_rows in (64, 256):
        made = cpu_runner(families.build("llama"), max_rows=max_rows)
        found.append(astuple(score(made, [Text(tuple(tokens(150, 4)), 40), Text((5, 6, 7), 1)])))
        with pytest.raises(ValueError, match="a text of 258 ids, and a context of 256"):
            score(made, [Text(tuple(tokens(258, 4)), 40)])
        made.close()
    np.testing.assert_equal(found[0], found[1])


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
