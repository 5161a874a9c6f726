"""What one API key can observe never depends on what another has asked (docs/isolation.md).

A key asks a *probe* on a server where nobody has been. Then another key sends its secret, and a
key that has asked nothing sends the probe again: all that it is told must be the same. Over a real
socket, with the real Engine on the FakeRunner; `calls` and `jobs` stand for time, which a test
cannot compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from server.api import grammars
from server.config import ServerConfig, SpeculationConfig, TaskConfig
from server.config.server import MetricsConfig
from server.config.task import VocabularyConfig
from server.engine import grammar
from server.engine.task_store import TaskStore
from tests.api.fixtures import noted
from tests.api.live import TABLE, TOKENIZER, LiveServer, as_key, encode
from tests.api.real_engine import FINGERPRINT, spec, task_drafters
from vocab_store.profile import VocabProfile
from vocab_store.slice import RequiredIds, VocabSlice

VOCAB = TABLE.vocab_size
EOS = 0
NAMES = "abcdefghijkl"
KEYS = (
    *({"id": name, "key": f"sk-{name}"} for name in NAMES),
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


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with _server() as live:
        yield live


@pytest.fixture(scope="module")
def unused() -> Iterator[str]:
    return iter(NAMES)


@pytest.fixture
def keys(unused: Iterator[str]) -> tuple[str, str]:
    """Two keys that have asked nothing of the server yet."""
    return next(unused), next(unused)


def _get(server: LiveServer, path: str, key: str = "") -> httpx.Response:
    return server.http.get(server.url + path, headers=as_key(key and f"sk-{key}"))


def _post(server: LiveServer, key: str, name: str = "", **body: Any) -> httpx.Response:
    headers = as_key(f"sk-{key}") | ({"x-request-id": name} if name else {})
    url = f"{server.url}/v1/completions"
    return server.http.post(url, json=body, headers=headers, timeout=60.0)


def _ask(server: LiveServer, key: str, **body: Any) -> dict[str, Any]:
    body = {"temperature": 0, "max_tokens": 12, "include_speculation": True, **body}
    response = _post(server, key, **body)
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


@dataclass
class Used:
    """A server on which key a was the first and b has told its secret since.

    alone: what a's probe was told. times: how often a secret is told.
    """

    server: LiveServer
    task: str
    alone: dict[str, Any]
    times: int

    def ask(self, key: str, prompt: str, **more: Any) -> dict[str, Any]:
        return _told(
            _ask(self.server, key, model=self.task, prompt=prompt, ignore_eos=True, **more)
        )

    def tell_secret(self, key: str, salts: Sequence[str]) -> None:
        for salt in salts:
            self.ask(key, SECRET, max_tokens=20, cache_salt=salt)
            self.ask(key, PROBE, cache_salt=salt)


@pytest.fixture(scope="module", params=TASKS)
def used(request: pytest.FixtureRequest) -> Iterator[Used]:
    task = request.param
    times = 6 if task == "drafted" else 2  # calibration is folded in now and then
    with _server() as server:
        made = Used(server, task, {}, times)
        made.alone = made.ask("a", PROBE)
        made.tell_secret("b", [""] * times)
        yield made


def test_nothing_told_depends_on_what_another_key_has_asked(used: Used) -> None:
    assert used.ask("c", PROBE) == used.alone


@pytest.mark.slow
def test_nothing_told_depends_on_what_was_asked_with_a_salt(used: Used) -> None:
    used.tell_secret("d", [f"s{i}" for i in range(used.times)])
    assert used.ask("d", PROBE) == used.alone


def test_what_a_key_itself_has_asked_is_seen_in_what_it_is_told(used: Used) -> None:
    """The probe is able to tell."""
    if used.task != "plain":
        for _ in range(2 * used.times):
            used.ask("e", SECRET, max_tokens=20)
        assert used.ask("e", PROBE) != used.alone


def test_loaded_rows_are_those_that_one_s_own_requests_have_not_used(
    server: LiveServer, keys: tuple[str, str]
) -> None:
    """A probe of one unusual id: 0 rows loaded would say that it was in the other's prompt."""
    ids = encode(PROBE)

    def rows(key: str) -> int:
        answer = _ask(server, key, model="sliced", prompt=ids, max_tokens=1)
        return int(answer["speculation"]["vocabulary"]["loaded_rows"])

    a, b = keys
    unusual = len(set(ids) - set(range(300, VOCAB)) - {EOS})
    assert [rows(key) for key in (a, a, b)] == [unusual, 0, unusual]


def test_a_slice_does_not_grow_by_what_another_s_outputs_missed(
    server: LiveServer, keys: tuple[str, str]
) -> None:
    def size(key: str, num_tokens: int) -> int:
        answer = _ask(
            server, key, model="exact", prompt=PROBE, max_tokens=num_tokens, ignore_eos=True
        )
        return int(answer["speculation"]["vocabulary"]["slice_size"])

    a, b = keys
    first = size(b, 1)
    grown = size(a, 30)
    assert grown > first + 3
    assert size(a, 1) >= grown, "a key's own misses are kept"
    assert size(b, 1) == first


def test_a_grammar_of_another_is_compiled_again(
    server: LiveServer, keys: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled already comes at once: the time would tell who asks with the same schema."""
    checked = noted(monkeypatch, grammars, "grammar_problem", lambda spec: spec.source)
    compiled = noted(monkeypatch, grammar, "grammar_text", lambda spec: spec.source)

    def jobs(key: str, **extra: Any) -> tuple[int, int]:
        checked.clear()
        compiled.clear()
        _ask(
            server, key, model="plain", prompt=PROBE,
            structured_outputs={"regex": "secret-[0-9]{3}"}, **extra,
        )  # fmt: skip
        return len(checked), len(compiled)

    a, b = keys
    assert [jobs(key) for key in (a, a, b)] == [(1, 1), (0, 0), (1, 1)]
    assert jobs(a, cache_salt="x") == (1, 1)


def test_cached_tokens_are_one_s_own(server: LiveServer, keys: tuple[str, str]) -> None:
    def cached(key: str, **extra: Any) -> int:
        usage = _ask(server, key, model="plain", prompt=SECRET, max_tokens=1, **extra)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    a, b = keys
    assert cached(a) == 0 and cached(a) > 0
    for salt in ("", a, f"\0{a}", f"{a}\0"):  # none names another key
        assert cached(b, cache_salt=salt) == 0
    assert cached(a, cache_salt="x") == 0


def test_the_same_request_id_is_two_requests(server: LiveServer) -> None:
    """A client may name its request; that another has one of this name open is not told."""
    body = {"model": "plain", "prompt": "the", "max_tokens": 2}
    answers = [_post(server, key, "mine", **body) for key in "ab"]
    assert [a.status_code for a in answers] == [200, 200]
    assert [a.headers["x-request-id"] for a in answers] == ["mine", "mine"]
    assert answers[0].json()["id"] != answers[1].json()["id"]


def test_sums_over_all_keys_can_be_kept_to_admins(server: LiveServer) -> None:
    def figures(key: str) -> dict[str, Any]:
        told: dict[str, Any] = _get(cautious, "/dashboard/data", key).json()
        return {name: value for name, value in told.items() if name != "now_s"}

    assert _get(server, "/metrics", "b").status_code == 200
    with _server(metrics=MetricsConfig(admin_only=True).model_dump()) as cautious:
        for key, status in (("", 401), ("b", 403), ("root", 200)):
            assert _get(cautious, "/metrics", key).status_code == status
        before = figures("b")
        _ask(cautious, "a", model="plain", prompt=SECRET)
        after = figures("b")
        assert after == before
        assert after["drafts"] == after["tasks"] == after["slices"] == after["open"] == []
        assert set(after["engines"][0]) >= {"up", "running", "waiting", "kv_usage"}
        assert any(entry["tokens"] for entry in figures("root")["drafts"])
