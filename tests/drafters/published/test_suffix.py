"""`suffix`: what it finds, how deep and wide it goes, and that its chances mean something."""

from __future__ import annotations

import random

from drafters import make_drafter
from drafters.auto.text_index import TextIndex
from tests.drafters.trees import paths


def test_a_long_match_is_followed_to_its_end() -> None:
    text = list(range(100, 140))
    session = make_drafter("suffix").open([*text, 1, 2, 3, *text[:10]])
    tree = session.propose(16, 32)
    # The likeliest path comes first, and it copies the text from where the match stands.
    assert paths(tree)[15] == tuple(text[10:26])
    assert tree.survival[0] > 0.7


def test_longer_contexts_outweigh_more_frequent_short_ones() -> None:
    # After "1 2 3" came 9 once; after "3" alone mostly 8.
    prompt = [1, 2, 3, 9, *([7, 3, 8] * 3), 5, 1, 2, 3]
    tree = make_drafter("suffix").open(prompt).propose(8, 1)
    assert tree.token_ids[0] == 9
    assert 8 in tree.token_ids.tolist()  # the short context has its place behind


def test_output_matches_across_the_end_of_the_prompt_and_own_output() -> None:
    session = make_drafter("suffix").open([1, 2, 3, 4])
    session.extend([5, 6, 1, 2, 3, 4])
    assert session.propose(4, 4).token_ids[:2].tolist() == [5, 6]
    # Periodic text goes on through what was drafted itself.
    session = make_drafter("suffix").open([1])
    session.extend([7, 8, 7, 8, 7])
    assert session.propose(6, 6).token_ids.tolist()[:6] == [8, 7, 8, 7, 8, 7]


def test_nothing_to_say() -> None:
    session = make_drafter("suffix").open([1, 2, 3, 4])
    assert len(session.propose(16, 16)) == 0  # 4 was never seen before


def test_old_matches_of_a_common_token_are_found() -> None:
    # 3,000 later occurrences of token 7 hide the one that matches three tokens.
    rng = random.Random(0)
    noise = [x for _ in range(3000) for x in (7, rng.randrange(20, 400))]
    session = make_drafter("suffix").open([11, 12, 7, 13, 14, *noise, 11, 12, 7])
    assert session.propose(4, 4).token_ids[:2].tolist() == [13, 14]


def test_endless_rollbacks_neither_fill_the_index_nor_grow_it() -> None:
    rng = random.Random(3)
    prompt = [rng.randrange(50) for _ in range(100)]
    index = TextIndex(100)
    index.append(prompt)
    for _ in range(2000):
        index.append([rng.randrange(1 << 20) for _ in range(8)])
        index.truncate(100)
    assert index.text.shape[1] <= 512
    fresh = TextIndex(100)
    fresh.append(prompt)
    assert index.text[:, :100].tolist() == fresh.text[:, :100].tolist()


def test_a_growing_text_keeps_its_chains() -> None:
    rng = random.Random(4)
    ids = [rng.randrange(30) for _ in range(3000)]
    grown, whole = TextIndex(0), TextIndex(3000)
    for start in range(0, 3000, 7):
        grown.append(ids[start : start + 7])
    whole.append(ids)
    assert grown.text[:, :3000].tolist() == whole.text[:, :3000].tolist()
