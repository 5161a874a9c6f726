"""`prompt` follows transformers' prompt lookup."""

from __future__ import annotations

from drafters.published.prompt import PromptDrafter


def test_the_first_occurrence_of_the_longest_match_is_copied() -> None:
    session = PromptDrafter().open([1, 2, 3, 4, 1, 2, 5, 6, 2, 7, 1, 2])
    assert session.propose(16, 16).token_ids.tolist() == [3, 4, 1, 2, 5, 6, 2, 7, 1, 2]
    session.extend([2])  # "2 2" is new; the first "2" is followed by 3
    assert session.propose(16, 16).token_ids.tolist()[:2] == [3, 4]


def test_lengths_are_bounded() -> None:
    text = list(range(20)) + list(range(5))
    session = PromptDrafter(num_tokens=10).open(text)
    assert session.propose(16, 16).token_ids.tolist() == list(range(5, 15))
    assert session.propose(3, 16).token_ids.tolist() == [5, 6, 7]
    assert session.propose(16, 4).token_ids.tolist() == [5, 6, 7, 8]


def test_a_draft_ends_before_eos() -> None:
    session = PromptDrafter(eos_token_ids=[9]).open([1, 2, 3, 9, 4, 1, 2])
    assert session.propose(8, 8).token_ids.tolist() == [3]
    session = PromptDrafter(eos_token_ids=[9]).open([1, 2, 9, 4, 1, 2])
    assert len(session.propose(8, 8)) == 0


def test_no_match_no_draft() -> None:
    assert len(PromptDrafter().open([1, 2, 3]).propose(8, 8)) == 0
    assert len(PromptDrafter().open([1]).propose(8, 8)) == 0


def test_matches_transformers_rule_on_overlaps() -> None:
    # The match may overlap what is looked up: "1 1" in "1 1 1" ends before the last token.
    assert PromptDrafter().open([1, 1, 1]).propose(8, 8).token_ids.tolist() == [1]
