"""Tasks, their corpora and profiles without requests; test_tasks.py has the routes."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from server.api.admin import CorpusBody, _Report
from server.api.faces.completions import CompletionBody
from server.channel import merged
from server.config import load_tasks
from server.config.task import VocabularyConfig
from server.errors import ConfigError, TaskNotFoundError
from server.wiring.task_set import TaskSet
from tests.api.live import LiveServer
from tests.api.real_engine import FINGERPRINT
from tests.api.test_tasks import Place
from tests.api.test_tasks import place as place  # a fixture
from tests.fakes.scripted_engine import ScriptedEngine, saying
from vocab_store.profile import VocabProfile
from vocab_store.slice import VocabSlice


@pytest.mark.parametrize(("with_it", "fits"), [(102.5, True), (101.5, False), (60.0, False)])
def test_a_corpus_fits_at_the_gain_at_which_tune_says_so(with_it: float, fits: bool) -> None:
    counts = {"corpus_steps": 30.0, "tokens_with": with_it / 2, "tokens_without": 50.0}
    one, two = (merged([{"ok": True, "value": counts}] * num)["value"] for num in (1, 2))
    assert _Report(one, []).corpus_fit() is None, "two engines' counts make enough"
    found = _Report(two, []).corpus_fit()
    assert found is not None and found.fits is fits
    assert found.gain == round(with_it / 100, 3) and found.steps == 60


def test_a_cache_folder_that_is_a_file_holds_no_upload(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """The start has told it, once; no task has an upload that could not be read."""
    place.kept.write_text("a file")
    assert place.task_set().tasks["sql"].speculation.corpus is None
    assert not caplog.records


def test_building_runs_in_a_process_and_says_what_is_wrong(place: Place) -> None:
    """The build as it is composed: a spawned process, whose error comes back whole."""
    task_set = place.task_set(run=None)
    examples = [{"prompt_ids": [], "output_ids": [9999]}]
    with pytest.raises(ConfigError, match=r"examples\[0\]: output_ids: 9999 is not below"):
        asyncio.run(task_set.upload("sql", examples, append=False))


def test_a_change_that_waited_while_its_task_was_taken_away_finds_none(place: Place) -> None:
    task_set = place.task_set()

    async def change() -> Any:
        (place.tasks / "sql.yaml").unlink()
        upload = task_set.upload("sql", [{"completion": "x"}], append=False)
        waiting = task_set.reload(), upload, task_set.delete("sql")
        return await asyncio.gather(*waiting, return_exceptions=True)

    _, *errors = asyncio.run(change())
    assert [type(error) for error in errors] == [TaskNotFoundError] * 2


def test_an_adapter_and_a_reload_wait_for_no_upload(place: Place) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def run(build: Any) -> Any:
        begun.set()
        assert may_end.wait(30)
        return build()

    task_set = place.task_set(run=run)

    async def change() -> None:
        upload = asyncio.create_task(task_set.upload("sql", [{"completion": "x"}], append=False))
        assert await asyncio.to_thread(begun.wait, 30)
        async with asyncio.timeout(10), task_set.adapter_turn():
            pass
        async with asyncio.timeout(10):
            await task_set.reload()
        may_end.set()
        assert (await upload)["sql"].speculation.corpus is not None

    try:
        asyncio.run(change())
    finally:
        may_end.set()


def test_the_documents_tell_every_route() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `([A-Z]+ /v1/tasks[^`]*)` \|", page, re.M))
    with LiveServer([ScriptedEngine(saying([5, 6]))]) as live:
        paths = httpx.get(live.url + "/openapi.json").json()["paths"]
    there = {
        f"{method.upper()} {path}"
        for path, methods in paths.items()
        if path.startswith("/v1/tasks")
        for method in methods
    }
    assert told == there
    example = re.search(r"tasks/sql/corpus -H .*?-d '(.*?)'\n", page, re.S)
    assert example is not None
    CorpusBody.model_validate(json.loads(example[1]))
    page = (Path(__file__).parents[2] / "docs" / "drafting.md").read_text(encoding="utf-8")
    body = re.search(r"```json\n(\{.*?\})\n```", page, re.S)
    assert body is not None
    CompletionBody.model_validate(json.loads(body[1]))


def test_a_vocabulary_profile_is_told(place: Place) -> None:
    path = place.tasks / "sql.vocab"
    profile = VocabProfile(
        VocabSlice(np.arange(0, 40, 2, dtype=np.int32), 400),
        np.empty(0, np.int32),
        np.empty(0, np.float32),
        {"report": {"heldout": {"num_tokens": 200, "num_missed": 3}}},
    )
    profile.save(path)
    tasks = load_tasks(place.tasks)
    vocabulary = VocabularyConfig.model_construct(mode="slice", profile=str(path))
    tasks["sql"] = tasks["sql"].model_copy(update={"vocabulary": vocabulary})
    models = {"tiny": (place.model, FINGERPRINT)}
    task_set = TaskSet(tasks, load=lambda: tasks, models=models, kept=place.kept)
    summary = task_set.profile_summary("sql")
    assert summary == {
        "version": profile.version, "num_ids": 20, "vocab_size": 400,
        "expected_misses_per_token": 0.015,
    }  # fmt: skip
    assert task_set.profile_summary("limited") is None
    path.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="not a vocabulary profile"):
        task_set.profile_summary("sql")
