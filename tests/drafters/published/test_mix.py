"""`mix` follows TASC-spec's rules: each token is that of the plain mixture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.corpus import build_corpus
from drafters.published.mix import MixDrafter
from tests.fakes.fake_drafters import check_tree
from tests.profiles import examples

# 1 2 -> 3 four times, 1 2 -> 4 once; 9 2 -> 5 six times. M_2 after 2: 5 x6, 3 x4, 4 x1.
OUTPUTS = [[1, 2, 3]] * 4 + [[1, 2, 4]] + [[9, 2, 5]] * 6
CORPUS = build_corpus([([], o) for o in OUTPUTS], fingerprint="", p_min=1)


def test_the_prompt_s_tables_grow_with_the_output() -> None:
    session = MixDrafter(mixing=0.0).open([7, 7, 7])
    session.extend(range(100, 900))  # more than it has room for; the last one is new
    assert session.propose(1, 1).token_ids.tolist() == [7], "still the most frequent"


def test_drafts_are_chains_as_long_as_the_horizon() -> None:
    drafter = MixDrafter(corpus=CORPUS, horizon=7)
    tree = drafter.open([1]).propose(16, 16)
    check_tree(tree)
    assert tree.parents.tolist() == list(range(-1, 6))
    assert len(drafter.open([1]).propose(16, 3)) == len(drafter.open([1]).propose(3, 16)) == 3


def test_calibration_turns_outcomes_into_survival() -> None:
    drafter = MixDrafter(corpus=CORPUS, mixing=0.9)
    cell = drafter.open([1, 2]).propose(1, 1).cell
    assert cell == drafter.calibration.cells(0, 2, 0.9 * 0.8), "of the longer match, the corpus'"
    drafter = MixDrafter(corpus=CORPUS)
    session = drafter.open([1, 2])
    before = float(session.propose(1, 1).survival[0])
    for _ in range(50):
        session.feedback(session.propose(1, 1), [])
    assert session.propose(1, 1).survival[0] < 0.2 * before
    for _ in range(500):
        session.feedback(session.propose(1, 1), [0])
    assert session.propose(1, 1).survival[0] > 0.8


def chances(
    texts: Sequence[Sequence[int]], p_min: int, behind: list[int], n_max: int, least: int = 1
) -> dict[int, float]:
    """p(x | behind) of the texts' M_n, of the largest n from n_max to least that knows any x."""
    for n in range(min(n_max, len(behind) + 1), least - 1, -1):
        context = tuple(behind[len(behind) - n + 1 :])
        grams = Counter(tuple(t[i : i + n]) for t in texts for i in range(len(t) - n + 1))
        num = {g[-1]: c for g, c in grams.items() if g[:-1] == context and c >= p_min}
        if num:
            return {token: c / sum(num.values()) for token, c in num.items()}
    return {}


ids = st.integers(0, 4)


@settings(max_examples=examples(1500))
@given(
    outputs=st.lists(st.lists(ids, max_size=11), max_size=6),
    text=st.lists(ids, min_size=1, max_size=14),
    p_min=st.integers(1, 3),
    n_max=st.integers(2, 5),
    mixing=st.sampled_from([0.0, 0.3, 0.5, 0.75, 1.0]),
    num_prompt=st.integers(1, 14),
)
def test_each_token_is_the_likeliest_of_the_plain_mixture(
    outputs: list[list[int]],
    text: list[int],
    p_min: int,
    n_max: int,
    mixing: float,
    num_prompt: int,
) -> None:
    """And has the source that most of its chance comes from."""
    corpus = build_corpus([([], o) for o in outputs], fingerprint="", p_min=p_min)
    drafter = MixDrafter(corpus=corpus, n_max=n_max, mixing=mixing)
    behind = list(text)
    session = drafter.open(text[:num_prompt])
    session.extend(text[num_prompt:])
    tree = session.propose(6, 6)
    for token, source in zip(tree.token_ids.tolist(), tree.source.tolist(), strict=True):
        of_corpus = chances(outputs, p_min, behind, n_max) if mixing > 0 else {}
        own = chances([text], 1, behind, n_max, 2) if mixing < 1 else {}
        if mixing < 1 and not own:  # the most frequent token; of several who got there first
            before = [(text[: i + 1].count(t), -i, t) for i, t in enumerate(text)]
            own = {max(before)[2]: max(before)[0] / len(text)}
        share = (mixing if own else 1.0) if of_corpus else 0.0
        parts = {
            t: (share * of_corpus.get(t, 0.0), (1 - share) * own.get(t, 0.0))
            for t in {*of_corpus, *own}
        }
        mixed = {t: sum(part) for t, part in parts.items()}
        best = max(mixed.values())
        assert token == min(t for t, p in mixed.items() if p > best - 1e-9)
        assert parts[token][source] >= parts[token][1 - source] - 1e-9
        behind.append(token)
    has_any = mixing < 1 or chances(outputs, p_min, [], 1)
    assert len(behind) == len(text) + (6 if has_any else 0)
