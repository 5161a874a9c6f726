"""What one API key can observe never depends on what another has asked (docs/isolation.md).

Each test asks a *probe* with key b twice: on a server where nobody else has been, and on one where
key a has sent its secret before. All that b is told must be the same. Over a real socket, with the
real Engine on the FakeRunner; `calls` and `jobs` stand for time, which a test cannot compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import httpx
import numpy as np
import pytest

from server.api import grammars
from server.config import ServerConfig, SpeculationConfig, TaskConfig, VocabularyConfig
from server.config.server import MetricsConfig
from server.engine import grammar
from server.engine.task_store import TaskStore
from server.grammar_text import grammar_problem, grammar_text
from tests.api.live import TABLE, TOKENIZER, LiveServer, encode
from tests.api.real_engine import FINGERPRINT, spec, task_drafters
from vocab_store.profile import VocabProfile
from vocab_store.slice import RequiredIds, VocabSlice

VOCAB = TABLE.vocab_size
EOS = 0
KEYS = (
    {"id": "a", "key": "sk-a"},
    {"id": "b", "key": "sk-b"},
    {"id": "root", "key": "sk-root", "admin": True},
)
TASKS = {
    "sliced": TaskConfig(
        name="sliced", vocabulary=VocabularyConfig(mode="slice", profile="t.vocab")
    ),
    "exact": TaskConfig(name="exact", vocabulary=VocabularyConfig(mode="exact", profile="t.vocab")),
    "drafted": TaskConfig(
        name="drafted", speculation=SpeculationConfig(drafter="auto", max_draft_tokens=8)
    ),
    "plain": TaskConfig(name="plain"),
}
SECRET = "Once upon a time there was a small model"
PROBE = "Once upon a time"


def _profile(_: str) -> VocabProfile:
    """T holds the ids that the FakeModel likes least: outputs of `exact` miss all the time."""
    required = RequiredIds.of(VOCAB, eos_ids=[EOS])
    made = VocabSlice.make([EOS, *range(300, VOCAB)], required)
    none = np.empty(0, np.int32)
    return VocabProfile(made, none, none.astype(np.float32))


@contextmanager
def _server(**config: Any) -> Iterator[LiveServer]:
    memory = TaskStore(None, fingerprint=FINGERPRINT, build_share=1e9)
    engine = spec(
        tokenizer=TOKENIZER,
        profiles=_profile,
        memory=memory,
        drafters=task_drafters(memory, "auto", "suffix"),
        model={"context": 1, "boost": 9.0, "alphabet": 40},
    )
    made = ServerConfig.model_validate({"keys": KEYS, **config})
    with LiveServer([engine], config=made, tasks=TASKS, drafters=("off", "suffix", "auto")) as live:
        yield live


def _ask(server: LiveServer, key: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(
        f"{server.url}/v1/completions",
        json={"temperature": 0, "max_tokens": 24, "include_speculation": True, **body},
        headers={"authorization": f"Bearer sk-{key}"},
        timeout=60.0,
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _told(answer: dict[str, Any]) -> dict[str, Any]:
    """All of an answer but its name and its times."""
    speculation = dict(answer["speculation"])
    vocabulary = {
        name: value
        for name, value in speculation.pop("vocabulary", {}).items()
        if name != "verify_seconds"
    }
    speculation = {k: v for k, v in speculation.items() if not k.endswith("seconds")}
    return {
        "choices": answer["choices"],
        "usage": answer["usage"],
        "speculation": speculation,
        "vocabulary": vocabulary,
    }


Probe = Callable[[LiveServer], Any]


def _seen(probe: Probe, before: Probe | None) -> Any:
    with _server() as server:
        if before is not None:
            before(server)
        return probe(server)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sliced": ("sliced", {"ignore_eos": True}),
    "exact": ("exact", {"ignore_eos": True}),
    "exact, by four": (
        "exact", {"ignore_eos": True, "vocabulary": {"mode": "exact", "verify_every": 4}},
    ),
    "drafted": ("drafted", {"ignore_eos": True}),
    "plain": ("plain", {"ignore_eos": True}),
}  # fmt: skip
"""A task, and what its requests ask for besides."""


def _probe(case: str, server: LiveServer) -> dict[str, Any]:
    task, extra = CASES[case]
    return _told(_ask(server, "b", model=task, prompt=PROBE, **extra))


@cache
def _alone(case: str) -> dict[str, Any]:
    """What the probe is told where nobody else has been."""
    found: dict[str, Any] = _seen(partial(_probe, case), None)
    return found


@pytest.mark.parametrize("salted", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=pytest.mark.slow if "," in name else ()) for name in CASES],
)
def test_nothing_told_depends_on_what_another_has_asked(case: str, salted: bool) -> None:
    """salted: the other is the same key with another cache_salt."""
    task, extra = CASES[case]
    times = 6 if task == "drafted" else 2  # calibration is folded in now and then

    def before(server: LiveServer) -> None:
        for i in range(times):
            whose: dict[str, Any] = {"cache_salt": f"s{i}"} if salted else {}
            key = "b" if salted else "a"
            _ask(server, key, model=task, prompt=SECRET, max_tokens=60, **extra, **whose)
            _ask(server, key, model=task, prompt=PROBE, **extra, **whose)

    assert _seen(partial(_probe, case), before) == _alone(case)
    if task != "plain" and not salted:
        # The same key's own requests do change it: the probe is able to tell.
        def own(server: LiveServer) -> None:
            for _ in range(2 * times):
                _ask(server, "b", model=task, prompt=SECRET, max_tokens=60, **extra)

        assert _seen(partial(_probe, case), own) != _alone(case)


def test_loaded_rows_are_those_that_one_s_own_requests_have_not_used() -> None:
    """A probe of one unusual id: 0 rows loaded would say that it was in the other's prompt."""
    with _server() as server:
        ids = encode(PROBE)

        def rows(key: str) -> int:
            answer = _ask(server, key, model="sliced", prompt=ids, max_tokens=1)
            return int(answer["speculation"]["vocabulary"]["loaded_rows"])

        assert rows("a") == len(set(ids) - set(range(300, VOCAB)) - {EOS})
        assert rows("a") == 0
        assert rows("b") == len(set(ids) - set(range(300, VOCAB)) - {EOS})


def test_a_slice_does_not_grow_by_what_another_s_outputs_missed() -> None:
    with _server() as server:

        def size(key: str, num_tokens: int) -> int:
            answer = _ask(
                server, key, model="exact", prompt=PROBE, max_tokens=num_tokens, ignore_eos=True
            )
            return int(answer["speculation"]["vocabulary"]["slice_size"])

        first = size("b", 1)
        grown = size("a", 60)
        assert grown > first + 3
        assert size("a", 1) >= grown, "a key's own misses are kept"
        assert size("b", 1) == first


def test_a_grammar_of_another_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled already comes at once: the time would tell who asks with the same schema."""
    checked: list[str] = []
    compiled: list[str] = []
    check, text = grammar_problem, grammar_text

    def count_check(spec: Any) -> str:
        checked.append(spec.source)
        return check(spec)

    def count_compiled(spec: Any) -> Any:
        compiled.append(spec.source)
        return text(spec)

    monkeypatch.setattr(grammars, "grammar_problem", count_check)
    monkeypatch.setattr(grammar, "grammar_text", count_compiled)
    with _server() as server:
        checked.clear()

        def jobs(key: str, **extra: Any) -> tuple[int, int]:
            before = len(checked), len(compiled)
            _ask(
                server, key, model="plain", prompt=PROBE,
                structured_outputs={"regex": "secret-[0-9]{3}"}, **extra,
            )  # fmt: skip
            return len(checked) - before[0], len(compiled) - before[1]

        assert jobs("a") == (1, 1)
        assert jobs("a") == (0, 0)
        assert jobs("b") == (1, 1)
        assert jobs("a", cache_salt="x") == (1, 1)


def test_cached_tokens_are_one_s_own() -> None:
    with _server() as server:

        def cached(key: str, **extra: Any) -> int:
            usage = _ask(server, key, model="plain", prompt=SECRET, max_tokens=1, **extra)["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert cached("a") == 0 and cached("a") > 0
        for salt in ("", "a", "\0a", "a\0"):  # none names another key
            assert cached("b", cache_salt=salt) == 0
        assert cached("a", cache_salt="x") == 0


def test_the_same_request_id_is_two_requests() -> None:
    """A client may name its request; that another has one of this name open is not told."""
    with _server() as server:
        answers = [
            httpx.post(
                f"{server.url}/v1/completions",
                json={"model": "plain", "prompt": "the", "max_tokens": 2},
                headers={"authorization": f"Bearer sk-{key}", "x-request-id": "mine"},
                timeout=30.0,
            )
            for key in ("a", "b")
        ]
        assert [a.status_code for a in answers] == [200, 200]
        assert [a.headers["x-request-id"] for a in answers] == ["mine", "mine"]
        assert answers[0].json()["id"] != answers[1].json()["id"]


def test_sums_over_all_keys_can_be_kept_to_admins() -> None:
    def get(server: LiveServer, path: str, key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer sk-{key}"} if key else {}
        return httpx.get(server.url + path, headers=headers, timeout=30.0)

    def steady(figures: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in figures.items() if name != "now_s"}

    with _server(metrics=MetricsConfig(admin_only=True).model_dump()) as server:
        assert get(server, "/metrics", "").status_code == 401
        assert get(server, "/metrics", "b").status_code == 403
        assert get(server, "/metrics", "root").status_code == 200
        before = steady(get(server, "/dashboard/data", "b").json())
        _ask(server, "a", model="plain", prompt=SECRET)
        after = steady(get(server, "/dashboard/data", "b").json())
        assert after == before
        assert after["drafts"] == after["tasks"] == after["slices"] == after["open"] == []
        assert set(after["engines"][0]) >= {"up", "running", "waiting", "kv_usage"}
        whole = get(server, "/dashboard/data", "root").json()
        assert any(entry["tokens"] for entry in whole["drafts"])
    with _server() as server:
        assert get(server, "/metrics", "b").status_code == 200


def test_what_tasks_have_learned_is_told_to_admins_alone() -> None:
    with _server() as server:
        for path in ("/v1/tasks", "/v1/tasks/drafted", "/v1/tasks/drafted/corpus"):
            for key, status in (("b", 403), ("root", 200)):
                response = httpx.get(
                    server.url + path, headers={"authorization": f"Bearer sk-{key}"}, timeout=30.0
                )
                assert response.status_code == status, path
