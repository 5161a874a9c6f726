"""Recordings: from an engine in this process and from a server; interrupted, resumed, refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drafters.replay import read_recordings
from server.client.http import CallFailedError, Endpoint
from server.commands.cli import main
from server.commands.record import (
    Answer,
    Failure,
    Prompt,
    PromptOptions,
    ask_engine,
    ask_server,
    write_recordings,
)
from server.datasets import ExampleReader
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.errors import ConfigError
from server.types import SamplingParams, SpeculationParams
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.fakes.fake_drafters import random_drafter
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info
from tests.json_lines import write_lines
from tests.small_server import Handler, serving

TOKENIZER = byte_level_tokenizer()
VOCAB = TOKENIZER.get_vocab_size()
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def _engine() -> Engine:
    info = fake_info(vocab_size=VOCAB, num_blocks=128, max_model_len=64, eos_token_ids=(0, 1))
    runner = FakeRunner(FakeModel(VOCAB, seed=5, alphabet=6), info)
    settings = EngineSettings(max_num_seqs=8, max_num_batched_tokens=64)
    return Engine(runner, {"d": random_drafter(1, VOCAB, 6)}, settings)


def _prompts(num: int) -> list[Prompt]:
    return [Prompt(i + 1, f"question {i}?") for i in range(num)]


def _outputs(engine: Engine, prompts: Iterable[Prompt], **more: Any) -> dict[int, Answer | Failure]:
    return {a.prompt.line: a for a in ask_engine(engine, TOKENIZER, prompts, **more)}


# --- an engine ---


def test_an_engine_answers_each_prompt_as_if_it_were_alone() -> None:
    engine = _engine()
    answers = _outputs(
        engine,
        _prompts(7),
        sampling=GREEDY,
        speculation=SpeculationParams("d", 4),
        num_open=3,
    )
    assert sorted(answers) == list(range(1, 8)) and not engine.has_work
    alone = _outputs(_engine(), _prompts(7)[4:5], sampling=GREEDY)[5]
    for i, answer in answers.items():
        assert isinstance(answer, Answer)
        assert list(answer.prompt.ids or ()) == TOKENIZER.encode(f"question {i - 1}?").ids
        ended = answer.output_ids[-1] in (0, 1)
        assert answer.finish_reason == ("stop" if ended else "length")
        assert ended or len(answer.output_ids) == 12
        assert answer.text == TOKENIZER.decode(list(answer.output_ids))
    assert answers[5] == alone, "neighbours and drafts change nothing"
    engine.check()


def test_the_likeliest_ids_come_with_the_answers_that_are_asked_for_them() -> None:
    asked = list(
        ask_engine(_engine(), TOKENIZER, _prompts(4), GREEDY, num_likely=lambda p: 3 * (p.line % 2))
    )
    for answer in asked:
        assert isinstance(answer, Answer)
        if answer.prompt.line % 2 == 0:
            assert answer.likely == ()
            continue
        assert [row.top[0][0] for row in answer.likely] == list(answer.output_ids)
        assert all(len(row.top) == 3 for row in answer.likely)
    assert {a.prompt.line for a in asked if isinstance(a, Answer) and a.likely}


def test_seeds_follow_the_line_and_not_the_order() -> None:
    warm = SamplingParams(temperature=1.0, max_tokens=8, seed=3)
    both = _outputs(_engine(), _prompts(4), sampling=warm)
    assert both[3] == _outputs(_engine(), _prompts(4)[2:3], sampling=warm)[3]
    other = SamplingParams(temperature=1.0, max_tokens=8, seed=4)
    assert both[3] != _outputs(_engine(), _prompts(4)[2:3], sampling=other)[3]


def test_what_does_not_fit_fails_alone() -> None:
    prompts = [Prompt(1, "x " * 200), Prompt(2, None, (5, VOCAB + 7)), Prompt(3, "short")]
    engine = _engine()
    answers = _outputs(engine, prompts, sampling=GREEDY)
    assert [type(answers[i]) for i in (1, 2, 3)] == [Failure, Failure, Answer]
    assert "context 64" in answers[1].message  # type: ignore[union-attr]
    # A long prompt leaves less room for the output.
    ids = tuple(range(2, 62))
    answer = _outputs(engine, [Prompt(1, None, ids)], sampling=GREEDY)[1]
    assert isinstance(answer, Answer) and len(answer.output_ids) <= 4


def test_leaving_early_aborts_what_is_open() -> None:
    engine = _engine()
    answers = ask_engine(engine, TOKENIZER, _prompts(6), GREEDY, num_open=4)
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert not engine.has_work and engine.take_deltas() == []


# --- the file ---


class _Interrupted(Exception):
    pass


def _recorded(
    prompts: list[Prompt], output: Path, *, stop_after: int | None = None, identity: str = "m"
) -> tuple[int, int, list[Failure], list[int]]:
    """write_recordings() with an engine that is interrupted after answers; and what it asked."""
    asked: list[int] = []

    def ask(some: Iterable[Prompt]) -> Iterator[Answer | Failure]:
        def noted() -> Iterator[Prompt]:
            for prompt in some:
                asked.append(prompt.line)
                yield prompt

        for i, answer in enumerate(ask_engine(_engine(), TOKENIZER, noted(), GREEDY, num_open=2)):
            if i == stop_after:
                raise _Interrupted
            yield answer

    return (*write_recordings(prompts, ask, output, identity=identity), asked)


def test_a_recording_is_read_by_replay_and_by_corpora(tmp_path: Path) -> None:
    output = tmp_path / "new" / "own.jsonl"
    num, num_resumed, failures, _ = _recorded(_prompts(9), output)
    assert (num, num_resumed, failures) == (9, 0, [])
    recordings = list(read_recordings(output))
    assert [list(r.prompt_ids) for r in recordings] == [
        TOKENIZER.encode(f"question {i}?").ids for i in range(9)
    ]
    examples = list(ExampleReader(TOKENIZER, 0).read([output]))
    assert [e[1] for e in examples] == [list(r.output_ids) for r in recordings]
    assert json.loads(output.read_text().splitlines()[3])["prompt"] == "question 3?"
    assert [p.name for p in output.parent.iterdir()] == ["own.jsonl"]


def test_an_interrupted_recording_goes_on(tmp_path: Path) -> None:
    whole, output = tmp_path / "whole.jsonl", tmp_path / "own.jsonl"
    _recorded(_prompts(9), whole)
    with pytest.raises(_Interrupted):
        _recorded(_prompts(9), output, stop_after=5)
    assert not output.exists()
    partial = tmp_path / "own.jsonl.partial"
    with partial.open("a") as file:
        file.write('{"line": 9, "recor')  # the machine went down in a line
    with pytest.raises(_Interrupted):
        _recorded(_prompts(9), output, stop_after=1)
    assert partial.stat().st_mode & 0o077 == 0, "it holds prompts"
    num, num_resumed, _, asked = _recorded(_prompts(9), output)
    assert (num, num_resumed) == (9, 6) and len(asked) == 3
    assert output.read_text() == whole.read_text()
    assert not partial.exists()


def test_another_runs_partial_file_is_not_mixed_in(tmp_path: Path) -> None:
    output = tmp_path / "own.jsonl"
    with pytest.raises(_Interrupted):
        _recorded(_prompts(9), output, stop_after=5)
    for prompts, identity in ((_prompts(9), "other model"), (_prompts(8), "m")):
        with pytest.raises(ConfigError, match=r"own\.jsonl\.partial: left by a run with another"):
            _recorded(prompts, output, identity=identity)
    assert _recorded(_prompts(9), output)[1] == 5


def test_a_recording_without_any_answer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompt was answered; line 1: 200 tokens"):
        _recorded([Prompt(1, None, (5,) * 200)], tmp_path / "own.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"prompt": ""}', "1: prompt: is empty; it must be a string"),
        ('{"prompt_ids": [1, -1]}', "1: prompt_ids: must be a list of token ids"),
        ('{"prompt_ids": []}', "1: prompt_ids: is empty"),
        ("", "no prompts"),
    ],
)
def test_bad_prompts_name_file_and_line(line: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError, match=what) as caught:
        PromptOptions(data=file).read()
    assert str(file) in str(caught.value)


# --- a server ---


class _Handler(Handler):
    """Answers with the prompt's length; some prompts are refused, the first try of each is 429."""

    bodies: ClassVar[list[dict[str, Any]]] = []
    tried: ClassVar[set[str]] = set()
    keys: ClassVar[set[str | None]] = set()

    def do_GET(self) -> None:
        known = not self.path.endswith("/none")
        self.reply({"id": "m"}) if known else self.reply({"error": {"message": "no none"}}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.body())
        prompt = body["prompt"]
        self.bodies.append(body)
        self.keys.add(self.headers["authorization"])
        ids = {"prompt_token_ids": [len(prompt)], "token_ids": [4, 0]}
        answer: dict[str, Any] = {"choices": [{"text": " yes", "finish_reason": "stop", **ids}]}
        status, headers = 200, {}
        if body["model"] == "none":
            status, answer = 404, {"error": {"message": "there is no model none"}}
        elif body["model"] == "other":
            answer = {"choices": [{"text": "x", "finish_reason": "stop"}]}
        elif "bad" in prompt:
            status, answer = 400, {"error": {"message": "prompt: too long"}}
        elif prompt not in self.tried:
            self.tried.add(prompt)
            status, answer = 429, {"error": {"message": "busy"}}
            headers = {"retry-after": "0.01"}
        self.reply(answer, status, headers)


@pytest.fixture
def url() -> Iterator[str]:
    for record_of in (_Handler.bodies, _Handler.tried, _Handler.keys):
        record_of.clear()
    with serving(_Handler) as at:
        yield f"{at}/"


def test_a_server_is_asked_again_when_it_is_busy(url: str) -> None:
    prompts = [*_prompts(5), Prompt(6, "a bad one"), Prompt(7, "q", None)]
    asked = ask_server(Endpoint(url, "key"), "task", prompts, fields={"max_tokens": 9}, num_open=3)
    answers = {a.prompt.line: a for a in asked}
    failure = answers.pop(6)
    assert isinstance(failure, Failure) and failure.message == "prompt: too long"
    for answer in answers.values():
        assert isinstance(answer, Answer)
        assert answer.prompt.ids == (len(answer.prompt.text or ""),)
        assert (answer.output_ids, answer.finish_reason, answer.text) == ((4, 0), "stop", " yes")
    assert len(answers) == 6 and len(_Handler.bodies) == 2 * 6 + 1
    assert _Handler.keys == {"Bearer key"}
    assert all(b["max_tokens"] == 9 and b["return_token_ids"] for b in _Handler.bodies)
    assert "temperature" not in _Handler.bodies[0], "what is not said is the task's own"


def test_the_record_command_asks_the_running_server(url: str, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"p{i}"} for i in range(3)])
    output = tmp_path / "own.jsonl"
    command = ["record", "--url", url, "--task", "sql", "--data", str(data), "-o", str(output)]
    assert main([*command, "--max-tokens", "9"]) == 0
    assert [r.output_ids for r in read_recordings(output)] == [[4, 0]] * 3
    assert {(b["model"], b["max_tokens"]) for b in _Handler.bodies} == {("sql", 9)}


@pytest.mark.parametrize(
    ("model", "told"), [("none", "no none"), ("other", "only a Tailor server")]
)
def test_a_server_that_cannot_help_ends_it(url: str, model: str, told: str) -> None:
    with pytest.raises(CallFailedError, match=told):
        list(ask_server(Endpoint(url), model, [Prompt(1, "x")]))
