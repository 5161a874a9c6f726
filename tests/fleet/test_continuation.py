"""A request that lost its replica goes on where it stopped: nothing twice, nothing left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.fleet.far_engine import Continuation, TextChangedError
from server.types import Delta, Request, SamplingParams, StepCounts, TokenLogprob


def _request(num_choices: int = 1) -> Request:
    return Request("r", "task", "m", (1, 2), SamplingParams(), num_choices=num_choices)


def _run(tokens: list[int], cuts: list[int], choice_id: int = 0) -> list[Delta]:
    """The Deltas of a run whose steps end at `cuts`."""
    ends = sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)})
    deltas, start = [], 0
    for end in ends:
        ids = tuple(tokens[start:end])
        deltas.append(
            Delta(
                "r",
                choice_id,
                ids,
                logprobs=tuple(TokenLogprob(i, -float(i), 1) for i in ids),
                prompt_logprobs=(None, TokenLogprob(2, -1.0, 1)) if start == 0 else (),
                finish_reason="length" if end == len(tokens) else None,
                num_cached_tokens=16 if start == 0 else 0,
                counts=StepCounts(num_steps=1),
                sources=("",) * len(ids),
                rejected_drafts=((len(ids) - 1, "s", (7,)),) if ids else (),
            )
        )
        start = end
    return deltas


CUTS = st.lists(st.integers(1, 40), max_size=8)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), CUTS, CUTS, st.integers(0, 9))
def test_what_is_passed_on_is_one_whole_run(
    tokens: list[int], first: list[int], second: list[int], lost_after: int
) -> None:
    continuation = Continuation(_request())
    told = continuation.pass_on(_run(tokens, first)[:lost_after])
    if not continuation.is_over:
        continuation.run_again()
        for delta in _run(tokens, second):
            told += continuation.pass_on([delta])
    assert continuation.is_over
    assert [i for d in told for i in d.token_ids] == tokens
    assert [lp.token_id for d in told for lp in d.logprobs] == tokens
    assert sum(len(d.sources) for d in told) == len(tokens)
    assert [d.finish_reason for d in told if d.finish_reason] == ["length"]
    assert told[-1].finish_reason == "length"
    assert sum(d.num_cached_tokens for d in told) == 16
    assert sum(bool(d.prompt_logprobs) for d in told) == 1
    for delta in told:
        assert all(0 <= i < len(delta.token_ids) for i, _, _ in delta.rejected_drafts)
        assert delta.token_ids or delta.finish_reason
    assert sum(d.counts.num_steps for d in told) <= len(told)
    assert continuation.pass_on(_run(tokens, [])) == []  # nothing after the end


def test_choices_go_on_apart() -> None:
    continuation = Continuation(_request(2))
    a, b = _run([1, 2, 3], [1, 2]), _run([4, 5, 6], [1, 2], choice_id=1)
    told = continuation.pass_on([*a, b[0]])  # choice 0 is over, choice 1 has one token
    continuation.run_again()
    told += continuation.pass_on([b[0], a[0], b[1]])
    assert not continuation.is_over
    told += continuation.pass_on([a[1], b[2], a[2]])
    assert continuation.is_over
    assert [i for d in told if d.choice_id == 0 for i in d.token_ids] == [1, 2, 3]
    assert [i for d in told if d.choice_id == 1 for i in d.token_ids] == [4, 5, 6]


def test_another_text_is_never_passed_on() -> None:
    continuation = Continuation(_request())
    continuation.pass_on(_run([1, 2, 3, 4], [2])[:1])
    continuation.run_again()
    with pytest.raises(TextChangedError):
        continuation.pass_on(_run([1, 9, 3, 4], [4]))
    continuation.run_again()
    with pytest.raises(TextChangedError, match="ends after 1"):
        continuation.pass_on(_run([1], []))


def test_an_error_ends_every_choice() -> None:
    continuation = Continuation(_request(2))
    error = _run([1], [])[0]._replace(token_ids=(), finish_reason="error", error="no")
    assert continuation.pass_on([error]) == [error]
    assert continuation.is_over
