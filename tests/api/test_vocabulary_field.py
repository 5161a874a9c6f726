"""The body field `vocabulary`, over HTTP: what reaches the engine, what is refused, what is
reported in the response and in /metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from server.config import TaskConfig
from server.config.task import VocabularyConfig
from server.types import Delta, Request, VocabularyCounts, VocabularyParams
from tests.api.fixtures import served_by
from tests.api.live import LiveServer
from tests.api.orders import completion, orders
from tests.fakes.scripted_engine import ScriptedEngine, saying

TASKS = {
    "exact": TaskConfig(
        name="exact", vocabulary=VocabularyConfig(mode="exact", profile="t.vocab", verify_every=6)
    ),
    "sliced": TaskConfig(
        name="sliced", vocabulary=VocabularyConfig(mode="slice", profile="s.vocab")
    ),
    "closed": TaskConfig(
        name="closed",
        vocabulary=VocabularyConfig(mode="slice", profile="s.vocab", allowed_modes=("slice",)),
    ),
    "plain": TaskConfig(name="plain"),
}


def _script(request: Request) -> Iterable[list[Delta]]:
    steps = saying([5, 6, 7])(request)
    if request.vocabulary.mode == "full":
        return steps
    counts = VocabularyCounts(
        num_ids=40, num_loaded=3, num_slice_steps=2, num_full_steps=1, head_rows=480,
        num_verifications=1, num_checked=2, num_missed=1, num_dropped=4, verify_every=8,
        verify_s=0.5,
    )  # fmt: skip
    return [[d._replace(vocabulary=counts) for d in step] for step in steps]


engine, server = served_by(lambda: ScriptedEngine(_script), tasks=TASKS)


@pytest.mark.parametrize(
    ("model", "field", "expected"),
    [
        ("exact", None, VocabularyParams("exact", "t.vocab", 6)),
        ("exact", {"verify_every": 3}, VocabularyParams("exact", "t.vocab", 3)),
        ("exact", {"mode": "full"}, VocabularyParams()),
        ("sliced", None, VocabularyParams("slice", "s.vocab", 0)),
        ("sliced", {"mode": "exact"}, VocabularyParams("exact", "s.vocab", 0)),
        ("sliced", {"mode": "exact", "verify_every": 2}, VocabularyParams("exact", "s.vocab", 2)),
        ("plain", {"mode": "full"}, VocabularyParams()),
    ],
)
def test_what_reaches_the_engine(
    model: str, field: dict[str, Any] | None, expected: VocabularyParams
) -> None:
    [request] = completion(orders(*TASKS.values()), model=model, vocabulary=field).requests
    assert request.vocabulary == expected


@pytest.mark.parametrize(
    ("model", "field", "param"),
    [
        ("exact", {"mode": "slice"}, "vocabulary.mode"),
        ("plain", {"mode": "exact"}, "vocabulary.mode"),
        ("closed", {"mode": "full"}, "vocabulary.mode"),
        ("plain", {"mode": "half"}, "vocabulary.mode"),
        ("plain", {"verify_every": 4}, "vocabulary.verify_every"),
        ("exact", {"mode": "full", "verify_every": 4}, "vocabulary.verify_every"),
        ("exact", {"verify_every": 0}, "vocabulary.verify_every"),
        ("exact", {"profile": "other.vocab"}, "vocabulary.profile"),
    ],
)
def test_what_is_refused(server: LiveServer, model: str, field: dict[str, Any], param: str) -> None:
    error = server.post(model=model, max_tokens=1, vocabulary=field).json()["error"]
    assert error["param"] == param


def test_reported_when_asked_and_counted_always(server: LiveServer, engine: ScriptedEngine) -> None:
    def sample(name: str, mode: str, task: str) -> float:
        found = server.metrics.registry.get_sample_value(
            f"tailor_{name}", {"task": task, "mode": mode, "model": engine.info.name}
        )
        return found or 0.0

    before = sample("vocab_slice_misses_total", "exact", "exact")
    body = server.post(model="exact", max_tokens=2, include_speculation=True).json()
    assert body["speculation"]["vocabulary"] == {
        "mode": "exact", "slice_size": 40, "loaded_rows": 6, "steps_from_slice": 4,
        "steps_from_full_head": 2, "head_rows": 960, "verify_every": 8, "windows": 2,
        "verified_tokens": 4, "misses": 2, "dropped_tokens": 8, "verify_seconds": 1.0,
    }  # fmt: skip
    assert sample("vocab_slice_misses_total", "exact", "exact") == before + 2
    assert sample("vocab_slice_ids", "exact", "exact") == 40
    body = server.post(model="sliced", max_tokens=2, include_speculation=True).json()
    assert body["speculation"]["vocabulary"] == {
        "mode": "slice", "slice_size": 40, "loaded_rows": 6, "steps_from_slice": 4,
        "steps_from_full_head": 2, "head_rows": 960,
    }  # fmt: skip
    body = server.post(model="plain", max_tokens=2, include_speculation=True).json()
    assert "vocabulary" not in body["speculation"]
