"""`trie` follows N-Gram-Trie's rules: those of the plain algorithm, and a draft worked by hand."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.published.trie import NGramTrie, TrieDrafter
from tests.drafters.trees import paths
from tests.profiles import examples

A, B, C, D, E = range(5)
CONTEXT = [A, B, C, D, A, B, E]


def frequencies_of(trie: NGramTrie) -> dict[tuple[int, ...], int]:
    """Every path with its frequency."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in trie.nodes[:2, 1:].T.tolist():
        paths.append((*paths[parent], token))
    return dict(zip(paths, trie.nodes[2].tolist(), strict=True))


ids = st.integers(0, 3)


@settings(max_examples=examples(1500))
@given(
    context=st.lists(ids, max_size=24),
    sizes=st.tuples(st.integers(2, 8), st.integers(1, 7)).filter(lambda s: s[1] < s[0]),
    output=st.lists(ids, max_size=5),
    limits=st.tuples(st.integers(1, 12), st.integers(1, 14), st.integers(1, 5)),
)
def test_the_trie_and_its_draft_are_those_of_the_plain_algorithm(
    context: list[int], sizes: tuple[int, int], output: list[int], limits: tuple[int, int, int]
) -> None:
    (n, prefix_length), (num_draft, budget, depth) = sizes, limits
    windows = [(at, min(at + n, len(context))) for at in range(len(context) - prefix_length + 1)]
    spans = {(at + j, end) for at, end in windows for j in range(prefix_length) if at + j < end}
    frequency = Counter(tuple(context[a:e]) for a, end in spans for e in range(a + 1, end + 1))
    found = frequencies_of(NGramTrie(context, n, prefix_length))
    assert {path: num for path, num in found.items() if path} == frequency
    session = TrieDrafter(n=n, prefix_length=prefix_length, num_draft=num_draft).open(context)
    session.extend(output)
    want: list[tuple[int, int]] = []
    for length in range(min(prefix_length, len(output)), 0, -1):
        match = tuple(output[-length:])
        below = [p for p in frequency if len(p) > length and p[:length] == match]
        if below:  # frequency, then depth; of equal ones any
            ranks = sorted((-frequency[p], len(p)) for p in below if len(p) <= length + depth)
            want = ranks[: min(num_draft, budget)]
            break
    drafted = [(*match, *path) for path in paths(session.propose(budget, depth))]
    assert sorted((-frequency[p], len(p)) for p in drafted) == want


def test_the_worked_draft() -> None:
    drafter = TrieDrafter(n=4, prefix_length=2)
    session = drafter.open(CONTEXT)
    session.extend([A, B])
    tree = session.propose(32, 32)
    assert paths(tree) == [(C,), (C, D), (E,)]
    # Match lengths and shares: a b occurs twice, each of the three once.
    assert tree.cell.tolist() == drafter.calibration.cells(0, [2, 3, 2], [0.5, 1.0, 0.5]).tolist()


def test_a_marked_context_is_all_that_is_used() -> None:
    drafter = TrieDrafter(n=4, prefix_length=2)
    session = drafter.open([A, 7, *CONTEXT, A, 8], context_span=(2, 9))
    session.extend([A])
    assert set(session.propose(8, 1).token_ids.tolist()) == {B}
    with pytest.raises(ValueError, match="context span"):
        drafter.open(CONTEXT, context_span=(3, 99))


def test_the_build_is_quick_and_off_the_critical_path() -> None:
    rng = random.Random(2)
    prompt = [int(rng.paretovariate(0.7)) % 20_000 for _ in range(2000)]
    drafter = TrieDrafter()
    drafter.open(prompt).settle()  # compiled, or loaded
    opened, settled = [], []
    for _ in range(5):
        start = time.thread_time()
        session = drafter.open(prompt)
        opened.append(time.thread_time() - start)
        start = time.thread_time()
        session.settle()
        settled.append(time.thread_time() - start)
    # Bounds leave room for a busy machine; measured medians are in docs/benchmarks/drafters.md.
    assert min(opened) < 0.001
    assert min(settled) < 0.015
