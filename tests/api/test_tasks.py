"""The admin routes: tasks told, corpora uploaded and deleted, reloads under load; options."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from drafters.corpus import Corpus, build_corpus
from drafters.learned import LearnedOutputs
from server.api import admin as tasks_module
from server.api.engines.client import EngineSpec
from server.config import KeyConfig, LimitsConfig, ServerConfig, load_tasks
from server.engine.calibrations import digest
from server.engine.engine import Engine
from server.engine.task_store import TaskStore
from server.errors import ConfigError
from server.types import CORPUS_FITS
from server.wiring import task_set as task_set_module
from server.wiring.task_set import TaskSet
from tests.api.live import TOKENIZER, LiveServer, as_key, encode, post_bytes, served
from tests.api.real_engine import CONTEXT, FINGERPRINT, make_engine, task_drafters
from tests.fakes.engine_thread import start_thread
from tests.fakes.scripted_engine import ScriptedEngine, saying
from tests.waiting import wait_until

DRAFTERS = ("off", "auto", "mix", "suffix", "trie")
SQL = "description: SQL\nspeculation: {drafter: auto, max_draft_tokens: 8}\n"
ADMIN, TEAM = as_key("the-admin-key"), as_key("the-team-key")


def _make_engine(folder: Path) -> Engine:
    memory = TaskStore(folder, fingerprint=FINGERPRINT, build_share=1e9)
    return make_engine(memory=memory, drafters=task_drafters(memory, *DRAFTERS[1:]))


class Place:
    """A folder of tasks, a model's folder, uploads, and a server over two engines of one model."""

    def __init__(self, folder: Path) -> None:
        self.tasks = folder / "tasks"
        self.model = folder / "model"
        self.kept = folder / "kept"
        self.tasks.mkdir()
        self.model.mkdir()
        TOKENIZER.save(str(self.model / "tokenizer.json"))
        (self.model / "config.json").write_text('{"vocab_size": 400, "eos_token_id": 0}')
        self.write("sql", SQL)
        self.write("learner", "speculation: {drafter: auto, max_draft_tokens: 8, learn: persist}\n")
        self.write(
            "limited",
            "limits: {max_draft_tokens: 8}\nspeculation:\n  drafter: mix\n  max_draft_tokens: 4\n"
            "  mix: {n_max: 4}\n  allowed_drafters: [mix, trie, 'off']\n  allowed_corpora: [sql]\n",
        )
        self.write("plain", "speculation: {drafter: suffix}\n")

    def write(self, name: str, text: str) -> None:
        (self.tasks / f"{name}.yaml").write_text(text)

    def task_set(self, run: Any = lambda build: build()) -> TaskSet:
        return TaskSet(
            load_tasks(self.tasks),
            load=lambda: load_tasks(self.tasks, ("tiny",), DRAFTERS),
            models={"tiny": (self.model, FINGERPRINT)},
            kept=self.kept,
            run=run,
        )

    def serve(self, **limits: Any) -> LiveServer:
        task_set = self.task_set()
        specs = [
            EngineSpec(
                f"e{i}",
                "tiny",
                "cpu",
                partial(start_thread, partial(_make_engine, self.kept / "engines" / f"e{i}")),
            )
            for i in range(2)
        ]
        config = ServerConfig(
            limits=LimitsConfig(**limits),
            keys=(
                KeyConfig(id="ops", key=SecretStr("the-admin-key"), admin=True),
                KeyConfig(id="team", key=SecretStr("the-team-key")),
                KeyConfig(id="other", key=SecretStr("the-other-key")),
            ),
        )
        return LiveServer(
            specs,
            config=config,
            tasks=task_set.tasks,
            drafters=DRAFTERS,
            max_model_len=CONTEXT,
            task_admin=task_set,
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def live(place: Place) -> Iterator[LiveServer]:
    with place.serve() as server:
        yield server


@pytest.fixture(scope="module")
def calm_place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """For the server that nothing changes."""
    return Place(tmp_path_factory.mktemp("calm"))


@pytest.fixture(scope="module")
def calm(calm_place: Place) -> Iterator[LiveServer]:
    """One server for all that is only looked at or refused."""
    with calm_place.serve(max_upload_bytes=20_000) as server:
        yield server


@pytest.fixture
def mended(calm: LiveServer, calm_place: Place) -> Iterator[LiveServer]:
    """The same for what changes the task sql: its file comes back, and its corpus goes."""
    yield calm
    calm_place.write("sql", SQL)
    call(calm, "DELETE", "/v1/tasks/sql/corpus")


def call(live: LiveServer, method: str, path: str, status: int = 200, **kwargs: Any) -> Any:
    response = live.http.request(method, live.url + path, **{"headers": ADMIN, **kwargs})
    assert response.status_code == status, response.text
    return response.json()


def complete(
    live: LiveServer, model: str, prompt: str = "the", secret: str = "the-team-key", **body: Any
) -> dict[str, Any]:
    asked = {
        "max_tokens": 20, "temperature": 0, "ignore_eos": True, "include_speculation": True, **body,
    }  # fmt: skip
    answer = live.post("/v1/completions", secret, model=model, prompt=prompt, **asked)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


# --- looking ---


def test_tasks_are_listed_and_told(live: LiveServer) -> None:
    listed = call(live, "GET", "/v1/tasks")
    names = ["learner", "limited", "plain", "sql", "completion"]
    assert [task["id"] for task in listed["data"]] == names
    sql = next(task for task in listed["data"] if task["id"] == "sql")
    assert sql == {
        "id": "sql", "object": "task", "description": "SQL", "model": "tiny", "drafter": "auto",
        "max_draft_tokens": 8, "learn": True, "corpus": None,
    }  # fmt: skip
    for i in range(12):
        complete(live, "sql", prompt=f"a b c d a b {i}")
    told = call(live, "GET", "/v1/tasks/sql")
    assert told["expected_tokens_per_step"] > 1
    assert told["measured_steps"] == pytest.approx(240 / told["expected_tokens_per_step"], abs=1)
    assert [engine["answered"] for engine in told["engines"]] == [True, True]
    cells = told["calibration"]
    assert cells and cells == sorted(cells, key=lambda cell: -cell["offered"])
    for cell in cells:
        assert set(cell) == {
            "source", "min_match_length", "predicted_share", "offered", "accepted", "chance",
        }  # fmt: skip
        assert 0 <= cell["accepted"] <= cell["offered"] + 0.2
        assert cell["chance"] == pytest.approx(
            (cell["accepted"] + 1) / (cell["offered"] + 2), abs=0.02
        )
    assert told["speculation"]["drafter"] == "auto" and told["vocabulary"] == {"mode": "full"}
    limited = call(live, "GET", "/v1/tasks/limited")
    assert limited["limits"] == {"max_draft_tokens": 8}
    assert limited["speculation"]["mix"]["n_max"] == 4
    assert limited["expected_tokens_per_step"] is None and limited["calibration"] == []


@pytest.mark.parametrize(
    "name",
    ["none", "..", "%2e%2e", "..%2f..%2fetc", "a/b", "a%00b", "sql%2F..", "\u00e9", "a" * 3000],
)
def test_names_that_are_no_task_reach_nothing(
    calm: LiveServer, calm_place: Place, name: str
) -> None:
    body = {"examples": [{"prompt": "a", "completion": "b"}]}
    for method, json_body in (("GET", None), ("POST", body), ("DELETE", None)):
        path = f"/v1/tasks/{name}/corpus"
        response = httpx.request(method, calm.url + path, headers=ADMIN, json=json_body)
        assert response.status_code in (404, 405, 403), response.text
        assert len(response.text) < 1000
    assert not list(calm_place.kept.glob("uploads/*"))


def test_whether_a_corpus_fits_is_told_by_the_tokens_a_step_with_it_and_without(
    live: LiveServer,
) -> None:
    assert call(live, "GET", "/v1/tasks/sql")["corpus_fit"] is None, "there is none"
    said = complete(live, "sql", return_token_ids=True)["choices"][0]
    told = [{"prompt_ids": encode("the"), "output_ids": said["token_ids"]}] * 4
    call(live, "POST", "/v1/tasks/sql/corpus", json={"examples": told})
    assert call(live, "GET", "/v1/tasks/sql")["corpus_fit"] is None, "too little was compared"
    for i in range(30):
        complete(live, "sql", prompt=f"a b c d a b {i}")
    fit = call(live, "GET", "/v1/tasks/sql")["corpus_fit"]
    assert fit["steps"] >= 60 and 0.5 < fit["gain"] < 2.0
    assert fit["fits"] is (fit["gain"] >= CORPUS_FITS)
    assert fit["fits"] is not fit["message"].startswith("this corpus does not fit")


# --- corpora ---

EXAMPLES = [
    {"prompt": f"Question {i}:", "completion": "SELECT name FROM users WHERE id = 1;"}
    for i in range(20)
]


def corpus_of(live: LiveServer, task: str = "sql") -> Any:
    return call(live, "GET", f"/v1/tasks/{task}/corpus")["corpus"]


def test_an_upload_is_drafted_from_at_once_grows_and_goes(live: LiveServer, place: Place) -> None:
    said = complete(live, "sql", return_token_ids=True)["choices"][0]
    text, path = said["text"], "/v1/tasks/sql/corpus"
    # What the model says, so that the corpus is right about it.
    examples = [{"prompt_ids": encode("the"), "output_ids": said["token_ids"]}] * 4
    told = call(live, "POST", path, json={"examples": examples})
    assert told["corpus"]["documents"] == 4 and told["corpus"]["uploaded"]
    drafted = complete(live, "sql")
    assert drafted["choices"][0]["text"] == text
    assert drafted["speculation"]["mean_tokens_per_step"] > 2
    assert live.sample("tailor_corpus_tokens", task="sql") == told["corpus"]["tokens"]

    grown = call(live, "POST", path, json={"examples": EXAMPLES})
    assert grown["corpus"]["documents"] == 24
    ids = [{"prompt_ids": encode("the"), "output_ids": [5, 6, 7, 0]}]
    replaced = call(live, "POST", path, json={"examples": ids, "mode": "replace"})
    assert replaced["corpus"]["documents"] == 1 and replaced["corpus"]["tokens"] == 4
    assert complete(live, "sql")["choices"][0]["text"] == text

    # A restart finds it; two files are kept at most.
    again = place.task_set()
    size = again.corpus_size("sql")
    assert size is not None and size.tokens == 4
    (folder,) = (place.kept / "uploads").iterdir()
    assert len(list(folder.glob("*.corpus"))) == 2 and len(list(folder.glob("*.bin"))) == 1
    assert folder.stat().st_mode & 0o077 == 0

    assert call(live, "DELETE", path)["deleted"] is True
    assert corpus_of(live) is None and not folder.exists()
    assert live.sample("tailor_corpus_tokens", task="sql") == 0
    assert complete(live, "sql")["choices"][0]["text"] == text
    assert call(live, "DELETE", path)["deleted"] is True, "twice is fine"


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({}, "examples", "required"),
        ({"examples": []}, "examples", "at least 1"),
        ({"examples": [{"prompt": "a"}]}, "examples[0]", "either completion or output_ids"),
        (
            {"examples": [{"completion": "a"}, {"completion": "a", "output_ids": [1]}]},
            "examples[1]",
            "either completion or output_ids",
        ),
        ({"examples": [{"completion": 3}]}, "examples[0].completion", "string"),
        ({"examples": [{"completion": "a", "x": 3}]}, "examples[0].x", "Unknown field"),
        ({"examples": [{"output_ids": [1 << 31]}]}, "examples[0].output_ids[0]", "less than"),
        ({"examples": [{"output_ids": [401]}]}, "examples", "not below"),
        ({"examples": [{"output_ids": [1], "prompt": "a"}]}, "examples[0].prompt", "prompt_ids"),
        ({"examples": [{"completion": "a"}], "mode": "add"}, "mode", "append"),
        ({"examples": [{"completion": "a"}], "mod": "append"}, "mod", "Unknown field"),
    ],
)
def test_an_upload_that_is_wrong_changes_nothing(
    calm: LiveServer, calm_place: Place, body: Any, param: str, told: str
) -> None:
    error = call(calm, "POST", "/v1/tasks/sql/corpus", 400, json=body)["error"]
    assert error["param"] == param and told in error["message"]
    assert corpus_of(calm) is None
    assert not [*(calm_place.kept / "uploads").glob("*")], "no folder of a task without uploads"


@pytest.mark.parametrize("leaves", [True, False])
def test_an_upload_whose_client_has_left_is_not_applied(
    mended: LiveServer, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """It is all there and being read when the client goes: nobody hears of it, so nothing is."""
    reads, may_go_on = threading.Event(), threading.Event()
    read = tasks_module._read_upload

    def held(raw: bytes) -> Any:
        reads.set()
        assert may_go_on.wait(30)
        return read(raw)

    def counted(status: str) -> float:
        route = "/v1/tasks/{task}/corpus"
        return mended.sample("tailor_http_responses_total", route=route, status=status)

    monkeypatch.setattr(tasks_module, "_read_upload", held)
    upload = post_bytes("/v1/tasks/sql/corpus", {"examples": EXAMPLES}, "the-admin-key")
    before = counted("499")
    with socket.create_connection(("127.0.0.1", mended.port), timeout=10) as visitor:
        visitor.sendall(upload)
        assert reads.wait(30)
        if leaves:
            visitor.close()
        # This is answered on the loop, which has seen the other's end by then.
        assert corpus_of(mended) is None
        may_go_on.set()
        if leaves:
            wait_until(lambda: counted("499") == before + 1)
        else:
            assert visitor.recv(100).startswith(b"HTTP/1.1 200")
    assert (corpus_of(mended) is None) == leaves


@pytest.mark.parametrize("served_before", [False, True])
@pytest.mark.parametrize("at", ["the examples", "the corpus", "current.json"])
def test_a_full_disk_is_the_server_s_fault_and_leaves_nothing_behind(
    mended: LiveServer,
    calm_place: Place,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    served_before: bool,
) -> None:
    def files() -> set[str]:
        return {str(path) for path in (calm_place.kept / "uploads").rglob("*")}

    if served_before:
        call(mended, "POST", "/v1/tasks/sql/corpus", json={"examples": EXAMPLES})
    before, corpus = files(), corpus_of(mended)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner, name = {
        "the examples": (LearnedOutputs, "save"),
        "the corpus": (Corpus, "save"),
        "current.json": (task_set_module, "replacing"),
    }[at]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        body = {"examples": [*EXAMPLES, {"completion": "one more"}], "mode": "replace"}
        error = call(mended, "POST", "/v1/tasks/sql/corpus", 507, json=body)["error"]
    assert (error["code"], error["type"], error["param"]) == (
        "storage_error", "server_error", None,
    )  # fmt: skip
    assert "No space left on device" in error["message"] and "not changed" in error["message"]
    assert files() == before and corpus_of(mended) == corpus
    call(mended, "POST", "/v1/tasks/sql/corpus", json=body)
    assert corpus_of(mended)["documents"] == len(EXAMPLES) + 1


@pytest.mark.parametrize("at", ["what it learned", "the upload"])
def test_what_cannot_be_deleted_is_the_server_s_fault_and_may_be_tried_again(
    mended: LiveServer, calm_place: Place, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    call(mended, "POST", "/v1/tasks/sql/corpus", json={"examples": EXAMPLES})
    learned = calm_place.kept / "engines" / "e" / f"learned-{digest('sql')}-0.bin"
    learned.parent.mkdir(parents=True, exist_ok=True)
    learned.write_bytes(b"")
    held = learned.name if at == "what it learned" else "current.json"
    unlink = Path.unlink

    def is_held(path: Path, missing_ok: bool = False) -> None:
        if path.name == held:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", is_held)
        error = call(mended, "DELETE", "/v1/tasks/sql/corpus", 507)["error"]
    assert error["message"] == "The server could not delete all of it (Read-only file system)."
    assert corpus_of(mended)["uploaded"] is True, "all of it or nothing is served"
    call(mended, "DELETE", "/v1/tasks/sql/corpus")
    assert corpus_of(mended) is None and not learned.exists()


def test_a_file_in_the_folder_s_place_is_the_server_s_fault(live: LiveServer, place: Place) -> None:
    place.kept.mkdir(exist_ok=True)
    (place.kept / "uploads").write_text("in the way")
    error = call(live, "POST", "/v1/tasks/sql/corpus", 507, json={"examples": EXAMPLES})["error"]
    assert error["param"] is None and "could not write it" in error["message"]
    assert str(place.kept) not in error["message"], "nothing about the machine"


@pytest.mark.server_error
def test_a_model_that_cannot_be_read_is_no_full_disk(
    mended: LiveServer, calm_place: Place, tmp_path: Path
) -> None:
    config = calm_place.model / "config.json"
    config.rename(tmp_path / "config.json")
    error = call(mended, "POST", "/v1/tasks/sql/corpus", 500, json={"examples": EXAMPLES})["error"]
    (tmp_path / "config.json").rename(config)
    assert (error["code"], error["param"]) == ("model_error", None)
    assert "model's files cannot be read (No such file or directory)" in error["message"]
    assert corpus_of(mended) is None


def test_uploads_are_bounded_and_need_a_drafter_that_uses_them(
    calm: LiveServer, calm_place: Place
) -> None:
    body = {"examples": EXAMPLES * 20}
    error = call(calm, "POST", "/v1/tasks/sql/corpus", 413, json=body)["error"]
    assert error["code"] == "request_too_large" and "20000 bytes" in error["message"]
    body = {"examples": EXAMPLES[:1]}
    error = call(calm, "POST", "/v1/tasks/plain/corpus", 400, json=body)["error"]
    assert "drafts with suffix, which uses no corpus" in error["message"]
    assert not list(calm_place.kept.glob("uploads/*"))


def test_a_corpus_of_another_tokenizer_is_told_and_left_aside(
    live: LiveServer, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    call(live, "POST", "/v1/tasks/sql/corpus", json={"examples": EXAMPLES})
    models = {"tiny": (place.model, "0" * 64)}
    other = TaskSet(
        load_tasks(place.tasks),
        load=lambda: load_tasks(place.tasks),
        models=models,
        kept=place.kept,
    )
    assert other.corpus_size("sql") is None
    assert "made for another model's tokenizer" in caplog.text
    (file,) = place.kept.glob("uploads/*/corpus-*")
    file.unlink()
    assert place.task_set().corpus_size("sql") is None
    assert f"task sql is served without a corpus: {file}: No such file" in caplog.text
    build_corpus([([1], [2, 0])] * 3, fingerprint="0" * 64).save(place.tasks / "sql.corpus")
    place.write("sql", "speculation: {drafter: auto, corpus: sql.corpus}\n")
    call(live, "DELETE", "/v1/tasks/sql/corpus")
    error = call(live, "POST", "/v1/tasks/reload", 400)["error"]
    assert error["message"].startswith("The tasks were not reloaded, the old ones stay: task sql:")
    assert "another model's tokenizer; build it again" in error["message"]
    with pytest.raises(ConfigError, match="another model's tokenizer"):
        place.task_set()
    assert corpus_of(live) is None


def test_a_damaged_corpus_is_named_with_its_task_set_aside_and_harms_nobody(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    file = place.tasks / "sql.corpus"
    build_corpus([([1], [2, 3, 0])] * 30, fingerprint=FINGERPRINT).save(file)
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[-100:] = bytes(100)
    place.write("sql", "speculation: {drafter: auto, corpus: sql.corpus, max_draft_tokens: 8}\n")
    with place.serve() as live:
        text = complete(live, "sql")["choices"][0]["text"]
        assert corpus_of(live) is not None
        file.unlink()
        file.write_bytes(damaged)
        error = call(live, "POST", "/v1/tasks/reload", 400)["error"]["message"]
        assert f"task sql: speculation.corpus: {file} is damaged" in error
        # An engine meets it all the same, for a key that has not drafted before.
        assert complete(live, "sql", secret="the-other-key")["choices"][0]["text"] == text
        assert complete(live, "learner")["choices"][0]["text"]
        told = [r.message for r in caplog.records if "drafts without its corpus" in r.message]
        assert (
            len(told) == 1 and f"task sql drafts without its corpus: {file} is damaged" in told[0]
        )
    with place.serve() as live:  # one that starts with it
        assert corpus_of(live) is None
        assert f"task sql is served without a corpus: {file} is damaged" in caplog.text
        assert complete(live, "sql")["choices"][0]["text"] == text
        file.unlink()
        file.write_bytes(whole)
        call(live, "POST", "/v1/tasks/reload")
        assert corpus_of(live) is not None


# --- reload ---


def test_a_reload_changes_what_new_requests_get(live: LiveServer, place: Place) -> None:
    place.write("sql", "sampling: {max_tokens: 3}\nspeculation: {drafter: suffix}\n")
    place.write("fresh", "sampling: {max_tokens: 2, stop_token_ids: [7, 399]}\n")
    (place.tasks / "limited.yaml").unlink()
    told = call(live, "POST", "/v1/tasks/reload")
    assert told["added"] == ["fresh"] and told["removed"] == ["limited"]
    assert told["changed"] == ["sql"]
    # Before its first request: a rate needs the 0 that its first error is counted from.
    assert b'outcome="error",task="fresh"} 0.0' in live.metrics.exposition()
    answer = live.post("/v1/completions", "the-team-key", model="sql").json()
    assert answer["usage"]["completion_tokens"] == 3
    names = [m["id"] for m in call(live, "GET", "/v1/models", headers=TEAM)["data"]]
    assert "fresh" in names and "limited" not in names


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sampling: {temprature: 1}\n", "sql.yaml:1: sampling.temprature: unknown key"),
        ("speculation: {drafter: magic}\n", "sql.yaml:1: speculation.drafter: no drafter 'magic'"),
        ("speculation: {drafter: auto, corpus: none.corpus}\n", "no file"),
        ("model: other\n", "no model 'other'"),
        (
            "sampling: {stop_token_ids: [7, 400]}\n",
            "task sql: sampling.stop_token_ids: 400 is not below the vocabulary size, 400",
        ),
    ],
)
def test_a_reload_that_fails_leaves_everything_as_it_was(
    mended: LiveServer, calm_place: Place, text: str, told: str
) -> None:
    before = call(mended, "GET", "/v1/tasks")
    calm_place.write("fresh", "")
    calm_place.write("sql", text)
    error = call(mended, "POST", "/v1/tasks/reload", 400)["error"]
    (calm_place.tasks / "fresh.yaml").unlink()
    assert told in error["message"] and "the old ones stay" in error["message"]
    assert call(mended, "GET", "/v1/tasks") == before
    complete(mended, "sql")


def test_reloads_and_uploads_under_load_lose_nothing(live: LiveServer, place: Place) -> None:
    prompts = ["the quick", "SELECT name", "hello world", "once upon"]
    plain = {p: complete(live, "sql", p, speculation={"drafter": "off"}) for p in prompts}
    texts = {p: answer["choices"][0]["text"] for p, answer in plain.items()}

    def one(i: int) -> bool:
        prompt = prompts[i % 4]
        model = ("sql", "learner")[i % 2]
        return bool(complete(live, model, prompt)["choices"][0]["text"] == texts[prompt])

    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(one, i) for i in range(32)]
        turn = 0
        while not all(future.done() for future in futures):
            place.write("sql", f"speculation: {{drafter: auto, max_draft_tokens: {4 + turn % 8}}}")
            call(live, "POST", "/v1/tasks/reload")
            if turn % 3 == 0:
                examples = [{"prompt": p, "completion": texts[p]} for p in prompts]
                body = {"examples": examples[: 1 + turn % 4], "mode": "replace"}
                call(live, "POST", "/v1/tasks/sql/corpus", json=body)
            turn += 1
        assert all(future.result() for future in futures)
    assert turn >= 3
    wait_until(lambda: live.client.num_open == 0)


# --- learning over HTTP ---


def test_a_task_learns_from_its_requests_apart_for_each_key(live: LiveServer, place: Place) -> None:
    def steps(**body: Any) -> float:
        told = complete(live, "learner", **body)["speculation"]
        return float(told["mean_tokens_per_step"])

    cold = steps()
    text = complete(live, "learner")["choices"][0]["text"]
    wait_until(lambda: steps() > 1.5 * cold, 10)
    assert complete(live, "learner")["choices"][0]["text"] == text
    assert steps(secret="the-other-key") <= 1.2 * cold
    assert steps(cache_salt="salt") <= 1.2 * cold
    assert steps(speculation={"corpus": "off"}) <= 1.2 * cold

    def counted() -> float:
        return live.sample("tailor_learned_outputs_total", task="learner")

    def learned() -> dict[str, int]:
        told: dict[str, int] = call(live, "GET", "/v1/tasks/learner")["learned"]
        return told

    # All but the one that drafted from no corpus; 20 tokens each. A fleet is told a little later.
    wait_until(lambda: learned()["outputs"] == counted() >= 4, 10)
    num_learned = counted()
    # Each scope holds the one answer once, however often it gave it.
    assert learned() == {"tokens": 20 * 3, "outputs": num_learned, "scopes": 3}
    wait_until(lambda: live.sample("tailor_learned_tokens", task="learner") == 20 * 3)

    call(live, "DELETE", "/v1/tasks/learner/corpus")
    wait_until(
        lambda: (
            call(live, "GET", "/v1/tasks/learner/corpus")["learned"]
            == {"tokens": 0, "outputs": 0, "scopes": 0}
        )
    )
    assert steps() <= 1.2 * cold
    assert not list((place.kept / "engines").glob("*/learned-*"))


# --- a request's own options ---


def test_options_of_a_request_go_over_the_task_s(mended: LiveServer) -> None:
    call(mended, "POST", "/v1/tasks/sql/corpus", json={"examples": EXAMPLES})
    text = complete(mended, "limited")["choices"][0]["text"]
    for speculation in (
        {"mix": {"n_max": 2, "horizon": 4, "lambda": 0.5}},
        {"drafter": "trie", "trie": {"n": 6, "prefix_length": 2, "num_draft": 8}},
        {"corpus": "sql"},
        {"corpus": "off"},
        {"max_draft_tokens": 8},
    ):
        assert complete(mended, "limited", speculation=speculation)["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("speculation", "param", "told"),
    [
        ({"trie": {"n": 6}}, "speculation.trie", "drafted by mix"),
        ({"drafter": "off", "mix": {"n_max": 2}}, "speculation.mix", "drafted by off"),
        ({"drafter": "auto"}, "speculation.drafter", "choose from off, mix, trie"),
        ({"max_draft_tokens": 9}, "speculation.max_draft_tokens", "at most 8"),
        ({"mix": {"horizon": 9}}, "speculation.mix.horizon", "at most 8"),
        ({"mix": {"n_max": 99}}, "speculation.mix.n_max", "less than or equal to 16"),
        ({"mix": {"lambda": 1.5}}, "speculation.mix.lambda", "less than or equal to 1"),
        ({"mix": {"weight": 0.5}}, "speculation.mix.weight", "Unknown field"),
        (
            {"drafter": "trie", "trie": {"num_draft": 9}},
            "speculation.trie.num_draft",
            "at most 8",
        ),
        (
            {"drafter": "trie", "trie": {"n": 3, "prefix_length": 3}},
            "speculation.trie.prefix_length",
            "below n",
        ),
        ({"corpus": "learner"}, "speculation.corpus", "choose from off"),
        ({"corpus": "../../etc/passwd"}, "speculation.corpus", "choose from off"),
        ({"drafter": "trie", "corpus": "off"}, "speculation.corpus", "uses no corpus"),
    ],
)
def test_options_outside_the_task_s_limits_are_refused(
    calm: LiveServer, speculation: dict[str, Any], param: str, told: str
) -> None:
    asked = {"model": "limited", "speculation": speculation}
    answer = calm.post("/v1/completions", "the-team-key", **asked)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and told in error["message"]


def test_without_who_changes_tasks_they_can_be_looked_at() -> None:
    engine = ScriptedEngine(saying([5, 6]))
    keys = (KeyConfig(id="ops", key=SecretStr("the-admin-key"), admin=True),)
    with LiveServer([engine], config=ServerConfig(keys=keys), models={"tiny": served()}) as live:
        assert call(live, "GET", "/v1/tasks")["data"][0]["id"] == "completion"
        assert (
            "cannot be changed" in call(live, "POST", "/v1/tasks/reload", 400)["error"]["message"]
        )


def test_the_document_tells_the_upload_s_body_and_every_answer(mended: LiveServer) -> None:
    paths = call(mended, "GET", "/openapi.json")["paths"]
    post = paths["/v1/tasks/{task}/corpus"]["post"]
    body = post["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == {"examples", "mode"} and body["required"] == ["examples"]
    example = body["properties"]["examples"]["items"]["properties"]
    assert set(example) == {"prompt", "completion", "prompt_ids", "output_ids"}
    complete(mended, "sql")
    for method, route, given in (
        ("GET", "/v1/tasks", None),
        ("POST", "/v1/tasks/{task}/corpus", {"examples": EXAMPLES}),
        ("GET", "/v1/tasks/{task}/corpus", None),
        ("GET", "/v1/tasks/{task}", None),
        ("POST", "/v1/tasks/reload", None),
        ("DELETE", "/v1/tasks/{task}/corpus", None),
    ):
        answer = call(mended, method, route.replace("{task}", "sql"), json=given)
        responses = paths[route][method.lower()]["responses"]
        told = responses["200"]["content"]["application/json"]["schema"]
        assert set(answer) == set(told["properties"]) == set(told["required"]), route
        assert answer["object"] == told["properties"]["object"]["const"]
        assert {"401", "403"} <= set(responses)
