"""`suffix`: its index of a text. What is drafted from it is held by test_golden_trees.py."""

from __future__ import annotations

import random

from drafters import make_drafter
from drafters.auto.text_index import TextIndex


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
