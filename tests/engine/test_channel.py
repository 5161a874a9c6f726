"""What crosses the channel arrives as it was sent, with the same types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server import channel
from server.types import Delta, ModelInfo, Request, SamplingParams, SpeculationParams
from tests.profiles import examples

st.register_type_strategy(int, st.integers(-(1 << 63), (1 << 64) - 1))  # a seed has 64 bits
st.register_type_strategy(float, st.floats(allow_nan=False))  # which equals nothing
OPTIONS = (("a", 1), ("b", 1.0), ("c", True), ("d", "1"))
REQUEST = Request(
    "r", "t", "m", (1,), SamplingParams(stop=(b"\n",)), SpeculationParams("auto", 4, OPTIONS)
)
MESSAGES: tuple[tuple[object, ...], ...] = (
    ("stop",), ("abort", "r"), ("beat", 0.5), ("failed", "why", True),
    ("control", 3, "reload", {"task": "t", "ids": [1, 2]}),
)  # fmt: skip


def _there(*message: object) -> tuple[object, ...]:
    return channel.decode(channel.encode(message))


@settings(max_examples=examples(1000), deadline=None)
@given(
    st.tuples(st.just("submit"), st.from_type(Request))
    | st.tuples(st.just("deltas"), st.lists(st.from_type(Delta)))
    | st.tuples(st.just("ready"), st.from_type(ModelInfo))
    | st.sampled_from(MESSAGES)
)
@example(("submit", REQUEST))
def test_what_is_sent_arrives(message: tuple[Any, ...]) -> None:
    """Types are kept to the last, as repr shows: 1 is not 1.0 and not True, and ids come as tuples,
    for drafters and caches compare them."""
    assert _there(*message) == message and repr(_there(*message)) == repr(message)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="prompt_ids"):
        _there("submit", replace(REQUEST, prompt_ids=("x",)))  # type: ignore[arg-type]
    too_few_and_too_many: tuple[tuple[object, ...], ...] = ("submit",), ("deltas", [], None)
    for message in too_few_and_too_many:
        with pytest.raises(ValueError, match="zip"):
            _there(*message)
    with pytest.raises(ValueError, match="unsupported"):
        channel.encode(("submit", object()))
