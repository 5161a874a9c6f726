"""`mix` follows TASC-spec's rules on cases worked by hand."""

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


def first(drafter: MixDrafter, prompt: list[int]) -> int:
    return int(drafter.open(prompt).propose(1, 1).token_ids[0])


def test_the_longest_context_that_the_tables_hold_decides() -> None:
    drafter = MixDrafter(corpus=CORPUS, mixing=1.0)
    assert first(drafter, [1, 2]) == 3
    assert first(drafter, [9, 2]) == 5
    assert first(drafter, [7, 2]) == 5  # "7 2" is unknown: M_2 after 2
    assert first(drafter, [77]) == 2  # nothing matches: the corpus' most frequent token


def test_mixing_weighs_corpus_against_prompt() -> None:
    # In the prompt 2 is always followed by 4: p_prompt(4) = 1. In the corpus after "1 2":
    # p_corp(3) = 0.8, p_corp(4) = 0.2.
    # In the second prompt 2 alone is also followed by 5, later: the longer match decides.
    for prompt in ([1, 2, 4, 8, 1, 2], [1, 2, 4, 8, 7, 2, 5, 1, 2]):
        assert first(MixDrafter(corpus=CORPUS, mixing=1.0), prompt) == 3
        assert first(MixDrafter(corpus=CORPUS, mixing=0.0), prompt) == 4
        # p(3) = 0.8 m, p(4) = 0.2 m + 1 - m: equal at m = 0.625.
        assert first(MixDrafter(corpus=CORPUS, mixing=0.62), prompt) == 4
        assert first(MixDrafter(corpus=CORPUS, mixing=0.63), prompt) == 3
        for mixing, source in ((0.5, "prompt"), (0.7, "corpus")):  # what most of p comes from
            tree = MixDrafter(corpus=CORPUS, mixing=mixing).open(prompt).propose(1, 1)
            assert MixDrafter.sources[tree.source[0]] == source
    # Either may be all: without a match it gives its most frequent token.
    assert first(MixDrafter(corpus=CORPUS, mixing=1.0), [50, 60, 50]) == 2
    assert first(MixDrafter(corpus=CORPUS, mixing=0.0), [9, 2]) == 9


def test_the_prompts_tables_grow_with_the_output_and_roll_back() -> None:
    session = MixDrafter(corpus=CORPUS, mixing=0.0).open([1])
    session.extend([30, 31, 30])
    assert session.propose(2, 2).token_ids.tolist() == [31, 30]
    session.rollback(1)
    session.extend([40, 41, 30])
    assert session.propose(1, 1).token_ids.tolist() == [40]
    session = MixDrafter(mixing=0.0).open([7, 7, 7])
    session.extend(range(100, 900))  # more than it has room for; the last one is new
    assert session.propose(1, 1).token_ids.tolist() == [7], "still the most frequent"


def test_pruning_is_by_p_min() -> None:
    pruned = build_corpus([([], o) for o in OUTPUTS], fingerprint="", p_min=5)
    # "1 2 3" occurs four times only, so after "1 2" M_2 decides: 2 -> 5 six times.
    assert first(MixDrafter(corpus=pruned, mixing=1.0), [1, 2]) == 5


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


def test_without_a_corpus_the_prompt_is_all_there_is() -> None:
    assert first(MixDrafter(), [5, 6, 7, 5]) == 6
    assert len(MixDrafter(mixing=1.0).open([5, 6, 5]).propose(4, 4)) == 0


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
)
def test_each_token_is_the_likeliest_of_the_plain_mixture(
    outputs: list[list[int]], text: list[int], p_min: int, n_max: int, mixing: float
) -> None:
    corpus = build_corpus([([], o) for o in outputs], fingerprint="", p_min=p_min)
    drafter = MixDrafter(corpus=corpus, n_max=n_max, mixing=mixing)
    behind = list(text)
    for token in drafter.open(text).propose(6, 6).token_ids.tolist():
        of_corpus = chances(outputs, p_min, behind, n_max) if mixing > 0 else {}
        own = chances([text], 1, behind, n_max, 2) if mixing < 1 else {}
        if mixing < 1 and not own:  # the most frequent token; of several who got there first
            before = [(text[: i + 1].count(t), -i, t) for i, t in enumerate(text)]
            own = {max(before)[2]: max(before)[0] / len(text)}
        share = (mixing if own else 1.0) if of_corpus else 0.0
        mixed = {
            t: share * of_corpus.get(t, 0.0) + (1 - share) * own.get(t, 0.0)
            for t in {*of_corpus, *own}
        }
        best = max(mixed.values())
        assert token == min(t for t, p in mixed.items() if p > best - 1e-9)
        behind.append(token)
    has_any = mixing < 1 or chances(outputs, p_min, [], 1)
    assert len(behind) == len(text) + (6 if has_any else 0)
