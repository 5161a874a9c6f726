"""`tailor run`: every line once, whatever stops it; errors stay with their lines; retries wait."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.client.bulk import BulkError, BulkOutcome, answer_file
from server.client.http import Caller, CallFailedError, Endpoint
from server.commands.cli import main
from server.errors import TailorError
from tests.api.live import LiveServer, encode
from tests.client.conftest import REPLY
from tests.fakes.scripted_engine import ScriptedEngine
from tests.json_lines import write_lines
from tests.small_server import Handler, serving
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


def write(path: Path, *lines: Any) -> Path:
    return write_lines(path, lines)


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def go(url: str, source: Path, target: Path, task: str = "tiny", **options: Any) -> BulkOutcome:
    outcome = BulkOutcome()
    answer_file(Endpoint(url), task, source, target, outcome, **options)
    return outcome


def test_answers_come_in_order_with_ids_and_errors_on_their_lines(
    server: LiveServer, tmp_path: Path
) -> None:
    source = write(
        tmp_path / "in.jsonl",
        "the quick",
        {"prompt": "brown", "id": "b", "request": {"max_tokens": 3, "seed": 1}, "label": "kept"},
        {"prompt": "fox", "request": {"temperature": 9}},
        {"prompt": "jumps", "request": {"n": 2, "max_tokens": 1}},
    )
    outcome = go(server.url, source, tmp_path / "out.jsonl", max_tokens=4, concurrency=3)
    first, second, third, fourth = read(tmp_path / "out.jsonl")
    assert [r["line"] for r in (first, second, third, fourth)] == [1, 2, 3, 4]
    assert first["usage"]["completion_tokens"] == 4 and first["finish_reason"] == "length"
    assert REPLY.startswith(first["text"]) and first["id"] is None
    assert second["id"] == "b" and second["usage"]["completion_tokens"] == 3
    assert (third["error"]["status"], third["error"]["param"]) == (400, "temperature")
    assert len(fourth["texts"]) == 2
    assert (outcome.num_answered, outcome.num_failed, outcome.num_before) == (3, 1, 0)
    tally = outcome.tally
    assert tally.num_tokens == 4 + 3 + 2
    assert tally.by_source["suffix"][1] == tally.num_tokens - tally.num_steps
    assert not list(tmp_path.glob("*.lock")) and not list(tmp_path.glob("*.tmp"))


def test_a_second_run_sends_only_what_failed(
    server: LiveServer, engine: ScriptedEngine, tmp_path: Path
) -> None:
    lines: list[Any] = ["the", {"prompt": "x", "request": {"temperature": 9}}, "dog"]
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    go(server.url, source, target, max_tokens=1)
    before = target.read_bytes()
    engine.submitted.clear()
    outcome = go(server.url, source, target, max_tokens=1)
    assert engine.submitted == [] and target.read_bytes() == before
    assert (outcome.num_before, outcome.num_answered, outcome.num_failed) == (2, 0, 1)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_goes_on_where_it_stopped(
    server: LiveServer, engine: ScriptedEngine, tmp_path: Path, end: signal.Signals
) -> None:
    num = 60
    source = write(tmp_path / "in.jsonl", *(f"the {i}" for i in range(num)))
    target = tmp_path / "out.jsonl"
    words = [sys.executable, "-m", "server.commands.cli", "run", "--task", "tiny",
             "--url", server.url,
             "--in", str(source), "--out", str(target), "--max-tokens", "6",
             "--concurrency", "2"]  # fmt: skip
    engine.step_s = 0.01
    # A suite that runs in the background of a shell passes on that SIGINT is ignored.
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    run = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=listens)
    wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") >= 7)
    assert run.poll() is None
    run.send_signal(end)
    _, told = run.communicate(timeout=20)
    engine.step_s = 0.0
    assert run.returncode == (130 if end == signal.SIGINT else -end)
    done = target.read_bytes().count(b"\n")
    assert 7 <= done < num
    if end == signal.SIGINT:
        assert "goes on from here" in told and "Traceback" not in told
    with target.open("ab") as file:
        file.write(b'{"line": 59, "te')  # torn
    outcome = go(server.url, source, target, max_tokens=6)
    assert outcome.num_before == done and outcome.num_answered == num - done
    records = read(target)
    assert [record["line"] for record in records] == list(range(1, num + 1))
    assert all("text" in record for record in records)


def test_answers_to_other_prompts_are_noticed(server: LiveServer, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    go(server.url, write(tmp_path / "in.jsonl", "the", "dog"), target, max_tokens=1)
    with pytest.raises(BulkError, match=r"out\.jsonl:2: an answer to another request"):
        go(server.url, write(tmp_path / "in.jsonl", "the", "cat"), target, max_tokens=1)
    target.write_text("my notes\n")
    with pytest.raises(BulkError, match=r"out\.jsonl:1: not a line of answers"):
        go(server.url, tmp_path / "in.jsonl", target)
    assert target.read_text() == "my notes\n"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "no JSON"),
        ("[1]", "a line must be an object"),
        ('{"id": 1}', "prompt: is missing .there are: id."),
        ('{"prompt": "a", "messages": []}', "either a prompt or messages"),
        ('{"prompt": "a", "request": {"stream": true}}', "without stream"),
        ('{"prompt": "a", "request": {"model": "other"}}', "without stream and another model or p"),
        ('{"prompt": "a", "request": {"prompt": "b"}}', "another model or prompt"),
        ('{"prompt": NaN}', "a number that JSON does not have"),
        ('"\\ud800"', "half a character"),
        ('"\udcff"', "not UTF-8"),
    ],
)
def test_a_wrong_line_is_told_before_anything_is_sent(tmp_path: Path, line: str, told: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'"fine"\n\n' + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(TailorError, match=rf"in\.jsonl:3: .*{told}"):
        go("http://127.0.0.1:9", source, tmp_path / "out.jsonl")


def test_a_prompt_is_where_the_command_says_whatever_kind_of_file_it_is(
    server: LiveServer, tmp_path: Path
) -> None:
    """And a byte order mark, as spreadsheets write it, is none of the text."""
    for name, text in {
        "in.csv": '\ufefftext,request\n"the quick",x\n',
        "in.jsonl": '\ufeff{"text": "the quick", "prompt": 1, "request": {"seed": 1}}\n',
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        out = tmp_path / f"{name}.out"
        go(server.url, tmp_path / name, out, max_tokens=2, prompt_field="text")
        assert read(out)[0]["usage"]["prompt_tokens"] == len(encode("the quick"))


def test_what_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    """A pipe has nothing left for the second reading: no line was sent, and all seemed well."""
    source, end = os.pipe()
    with open(source, "rb"), open(end, "wb") as pipe:
        pipe.write(b'"the"\n')
        pipe.flush()
        with pytest.raises(TailorError, match="is no file; it is read more than once"):
            go("http://127.0.0.1:9", Path(f"/dev/fd/{source}"), tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_an_id_of_a_table_need_not_be_json(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"id": date(2026, 1, 2), "prompt": "the"}  # of Parquet, whose package is not here
    monkeypatch.setattr("server.client.bulk.rows", lambda _: [(1, row)])
    source = write(tmp_path / "in.parquet", "the")
    assert go(server.url, source, tmp_path / "out.jsonl", max_tokens=1).num_answered == 1
    assert read(tmp_path / "out.jsonl")[0]["id"] == "2026-01-02"


def test_two_runs_do_not_share_a_file(server: LiveServer, tmp_path: Path) -> None:
    from filelock import FileLock

    source = write(tmp_path / "in.jsonl", "the")
    with FileLock(tmp_path / "out.jsonl.lock"):
        with pytest.raises(BulkError, match="another run is writing"):
            go(server.url, source, tmp_path / "out.jsonl")


# -- refusals and lost servers ---------------------------------------------------------------------

Answer = tuple[int, dict[str, str], Any]
GOOD = {"choices": [{"text": "ok", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
BUSY = {"error": {"message": "busy", "type": "x", "param": None, "code": "queue_full"}}


@contextmanager
def answering(answer: Callable[[int, Any], Answer | None]) -> Iterator[tuple[str, list[float]]]:
    """A server that answers the i-th POST by `answer`; None hangs up. Yields its address and the
    times of the POSTs."""
    times: list[float] = []
    lock = threading.Lock()

    class Scripted(Handler):
        def do_GET(self) -> None:
            self.reply({"id": "tiny"})

        def do_POST(self) -> None:
            body = json.loads(self.body())
            with lock:
                i = len(times)
                times.append(time.monotonic())
            given = answer(i, body)
            if given is None:
                self.close_connection = True
                self.connection.close()
            else:
                status, headers, told = given
                self.reply(told, status, headers)

    with serving(Scripted) as url:
        yield url, times


@pytest.mark.parametrize(
    ("status", "header", "num_retries"),
    [
        (429, {"retry-after": "0.4"}, 1),
        (503, {"retry-after": "0.4"}, 1),
        *((status, {"x-should-retry": "false"}, 0) for status in (500, 503, 504)),
    ],
)
def test_what_the_server_says_of_another_try_is_kept(
    tmp_path: Path, status: int, header: dict[str, str], num_retries: int
) -> None:
    source = write(tmp_path / "in.jsonl", "a", "b")

    def answer(i: int, body: Any) -> Answer:
        return (200, {}, GOOD) if i else (status, header, BUSY)

    with answering(answer) as (url, times):
        outcome = go(url, source, tmp_path / "out.jsonl", concurrency=1)
    assert (outcome.num_answered, outcome.num_failed) == (1 + num_retries, 1 - num_retries)
    assert outcome.num_retries == num_retries and len(times) == 2 + num_retries
    assert not num_retries or times[1] - times[0] >= 0.4


FAULT = {"error": {"message": "died", "type": "x", "param": None, "code": "engine_died"}}


def test_a_fault_of_the_server_is_tried_again_a_few_times_and_holds_up_nobody(
    tmp_path: Path,
) -> None:
    source = write(tmp_path / "in.jsonl", "unlucky", "poison", *(f"good {i}" for i in range(6)))
    tries: dict[str, list[float]] = {}

    def answer(i: int, body: Any) -> Answer:
        seen = tries.setdefault(body["prompt"], [])
        seen.append(time.monotonic())
        if body["prompt"] == "poison" or (body["prompt"] == "unlucky" and len(seen) == 1):
            return 500, {"retry-after": "0.6"}, FAULT
        return 200, {}, GOOD

    target = tmp_path / "out.jsonl"
    with answering(answer) as (url, _):
        outcome = go(url, source, target, concurrency=3)
        records = read(target)
        assert records[0]["text"] == "ok" and len(tries["unlucky"]) == 2
        assert records[1]["error"]["code"] == "engine_died" and len(tries["poison"]) == 3
        assert all(record["text"] == "ok" for record in records[2:])
        assert (outcome.num_answered, outcome.num_failed, outcome.num_retries) == (7, 1, 3)
        # The others were done before the first of the two came back.
        again = min(tries["unlucky"][1], tries["poison"][1])
        assert all(times[0] < again for name, times in tries.items() if "good" in name)
        outcome = go(url, source, target)  # the next run sends that line again, and no other
        assert outcome.num_before == 7 and len(tries["poison"]) == 6


def test_a_line_that_is_refused_for_ever_fails_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", "a", "b", "c")

    def answer(i: int, body: Any) -> Answer:
        if body["prompt"] == "a":
            return 503, {"retry-after": "0"}, BUSY
        return (200, {}, GOOD) if body["prompt"] == "b" else (200, {}, b"<html>")

    with answering(answer) as (url, times):
        outcome = go(url, source, tmp_path / "out.jsonl", max_retries=2)
    assert len(times) == 3 + 2
    first, second, third = read(tmp_path / "out.jsonl")
    assert first["error"]["code"] == "queue_full" and first["error"]["status"] == 503
    assert second["text"] == "ok" and "something else" in third["error"]["message"]
    assert outcome.num_failed == 2


def test_a_server_that_is_gone_ends_the_run_and_costs_no_line(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", "a", "b", "c"), tmp_path / "out.jsonl"
    with answering(lambda i, body: (200, {}, GOOD) if i == 1 else None) as (url, times):
        with pytest.raises(CallFailedError, match="1 of 3 lines are done"):
            go(url, source, target, max_retries=1, concurrency=1)
    assert [record["line"] for record in read(target)] == [1]
    assert len(times) == 2 + 2, "each was tried again once"
    with answering(lambda i, body: (200, {}, GOOD)) as (url, times):
        outcome = go(url, source, target)
    assert (outcome.num_before, outcome.num_answered, len(times)) == (1, 2, 2)
    with pytest.raises(CallFailedError):
        go(url, source, tmp_path / "other.jsonl", max_retries=0)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_what_was_answered_comes_before_what_was_lost_and_nothing_is_told_behind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send(self: Caller, method: str, url: str, body: Any, *, may_be_lost: bool) -> Any:
        if body["prompt"] == "good":
            return httpx.Response(200)
        raise httpx.ReadError("lost")

    monkeypatch.setattr(Caller, "_send", send)
    asked = [(i, "/completions", {"prompt": "good" if i == 7 else "bad"}) for i in range(8)]
    with Caller(Endpoint("http://127.0.0.1:9"), num_open=8) as caller:
        answers = caller.answers(asked)
        assert next(answers)[0] == 7
        with pytest.raises(CallFailedError, match="the server is lost: lost"):
            next(answers)
    del caller, answers
    gc.collect()
    assert not caplog.records


# -- the command -----------------------------------------------------------------------------------


def test_the_command_sums_up_and_says_what_failed(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    words = ["run", "--task", "tiny", "--in", str(source), "--out", str(target), "--url"]
    write(source, "the", "dog")
    assert main([*words, server.url + "/v1", "--max-tokens", "4"]) == 0
    told = capsys.readouterr().err
    assert "2 answered, 0 failed" in told and "8 out" in told
    assert "2.00 tokens/step; accepted: suffix 4 of 8" in told
    write(source, "the", {"prompt": "dog", "request": {"n": -1}})
    assert main([*words, server.url, "--max-tokens", "4"]) == 1
    assert "an answer to another request" in capsys.readouterr().err
    target.unlink()
    assert main([*words, server.url, "--max-tokens", "4"]) == 1
    assert "1 answered, 1 failed" in capsys.readouterr().err
    write(source, "the", {"prompt": "dog", "request": {"n": 1}})  # mended, and so another key
    assert main([*words, server.url, "--max-tokens", "4"]) == 0
    assert "1 answered, 0 failed, 1 of an earlier run kept" in capsys.readouterr().err
    assert main([*words[:2], "nobody", *words[3:], server.url, "--max-tokens", "4"]) == 1
    target.unlink()
    capsys.readouterr()
    assert main([*words, "http://127.0.0.1:9"]) == 1
    told = capsys.readouterr().err
    assert "cannot be reached: nothing answers there; is the server running?" in told
    assert "answered" not in told
