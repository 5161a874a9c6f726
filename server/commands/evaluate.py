"""`tailor eval`: how good a file of answers, or a running server, is on a task's data."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from server.client.http import Caller, RefusedError
from server.commands.data import FieldOptions, as_body
from server.commands.options import Bar, CallOptions, bounded, writing
from server.commands.quality import METRICS, estimate, on_a_line
from server.config import load_tasks
from server.datasets import Turn, answered_turn, json_lines, rows
from server.errors import ConfigError
from server.wiring.task_set import tasks_folder

_FIELDS, _CALL = FieldOptions(), CallOptions()
_MAX_TEXT = 120


def evaluate(
    *,
    data: Annotated[
        Path,
        Parameter(metavar="FILE", help="JSON lines, CSV or Parquet with prompts and outputs"),
    ],
    answers: Annotated[
        Path | None,
        Parameter(
            metavar="FILE",
            help="answers of `tailor run`, or recordings; without it --task is asked at --url",
        ),
    ] = None,
    task: Annotated[
        str | None, Parameter(metavar="NAME", help="the task; its file may name a metric")
    ] = None,
    tasks: Annotated[
        Path | None, Parameter(metavar="DIR", help="folder of task files (configs/tasks)")
    ] = None,
    concurrency: Annotated[int, bounded("requests open at once (8)", gte=1)] = 8,
    max_tokens: Annotated[int | None, bounded("longest output (the task's)", gte=1)] = None,
    fields: FieldOptions = _FIELDS,
    metric: Annotated[
        Literal["exact", "f1", "rouge_l", "json"] | None,
        Parameter(help="what counts (the task's, else f1); the others are told too"),
    ] = None,
    limit: Annotated[int | None, bounded("only the first N rows", gte=1)] = None,
    examples: Annotated[int, bounded("worst answers that are shown (3)", gte=0)] = 3,
    as_json: Annotated[bool, Parameter(name="--json", help="one line of JSON, no text")] = False,
    call: CallOptions = _CALL,
) -> int:
    turns = _turns(data, fields, limit)
    if answers is not None:
        outputs = _from_file(answers, turns)
    elif task is not None:
        outputs = _from_server(task, turns, call, concurrency, max_tokens)
    else:
        raise ConfigError("give --answers FILE, or --task NAME of a running server")
    chosen = metric or _metric_of(task, tasks) or "f1"
    scores = {
        name: [
            0.0 if out is None else score(turns[n].gold or "", out) for n, out in outputs.items()
        ]
        for name, score in METRICS.items()
    }
    if chosen != "json" and not any(scores["json"]):
        del scores["json"]
    estimates = {name: estimate(values) for name, values in scores.items()}
    num_missing = sum(output is None for output in outputs.values())
    if as_json:
        report = {
            "data": str(data),
            "metric": chosen,
            "score": round(estimates[chosen].mean, 4),
            "rows": estimates[chosen].num,
            "without_an_answer": num_missing,
            "metrics": {
                name: {key: round(value, 4) for key, value in asdict(one).items()}
                for name, one in estimates.items()
            },
        }
        print(json.dumps(report))
        return 0
    missing = f", {num_missing} without an answer count 0" if num_missing else ""
    print(f"{len(outputs)} rows{missing}\n")
    for name, one in sorted(estimates.items(), key=lambda item: item[0] != chosen):
        mark = "  <- what counts" if name == chosen else ""
        print(f"{name:8} {one.mean:6.1%}   95 %: {one.low:.1%} to {one.high:.1%}{mark}")
    worst = sorted(zip(scores[chosen], outputs, strict=True), key=lambda one: one[0])
    for value, line in worst[:examples]:
        if value < 1.0:
            print(f"\nline {line}, {chosen} {value:.2f}")
            print(f"  data    {on_a_line(turns[line].gold, _MAX_TEXT)}")
            print(f"  answer  {on_a_line(outputs[line], _MAX_TEXT)}")
    return 0


def _turns(data: Path, fields: FieldOptions, limit: int | None) -> dict[int, Turn]:
    """The rows that have an output, by line. Raises ConfigError."""
    turns: dict[int, Turn] = {}
    for number, entry in rows(data):
        if limit is not None and len(turns) >= limit:
            break
        turns[number] = answered_turn(entry, f"{data}:{number}", fields)
    if not turns:
        raise ConfigError(f"{data}: no rows")
    return turns


def _from_file(answers: Path, turns: dict[int, Turn]) -> dict[int, str | None]:
    """Answers of `tailor run` by line, recordings by prompt; None for rows without one."""
    by_line: dict[int, str | None] = {}
    by_prompt: dict[str, list[str]] = {}
    with writing(answers):
        found = list(json_lines(answers))
    for number, entry in found:
        if isinstance(entry.get("line"), int):
            by_line[entry["line"]] = _text_of(entry)
        elif isinstance(entry.get("prompt"), str) and isinstance(entry.get("completion"), str):
            by_prompt.setdefault(entry["prompt"], []).append(entry["completion"])
        else:
            raise ConfigError(f"{answers}:{number}: neither an answer nor a recording")
    for line, turn in turns.items():
        same = by_prompt.get(turn.asked.get("prompt", ""))
        if line not in by_line:
            by_line[line] = same.pop(0) if same else None
    outputs = {line: by_line[line] for line in turns}
    if not any(output is not None for output in outputs.values()):
        raise ConfigError(f"{answers}: holds no answer to a row of the data")
    return outputs


def _text_of(entry: dict[str, Any]) -> str | None:
    """The text of an answer of `tailor run`; None for an error."""
    text = entry.get("text")
    if text is None and isinstance(entry.get("message"), dict):
        text = entry["message"].get("content") or ""
    if text is None and entry.get("texts"):
        text = entry["texts"][0]
    return text if isinstance(text, str) else None


def _from_server(
    task: str, turns: dict[int, Turn], call: CallOptions, num_open: int, max_tokens: int | None
) -> dict[int, str | None]:
    """Every row asked of a running server. Raises CallFailedError."""
    fields = {} if max_tokens is None else {"max_tokens": max_tokens}
    asked = (
        (
            line,
            "/completions" if "prompt" in turn.asked else "/chat/completions",
            {"model": task, **fields, **as_body(turn.asked)},
        )
        for line, turn in turns.items()
    )
    texts: dict[int, str | None] = dict.fromkeys(turns)
    is_told = False  # why the first that is refused is
    with (
        Caller(call.endpoint(), num_open=num_open, timeout_s=call.timeout) as caller,
        Bar() as bar,
    ):
        caller.check_task(task)
        for done, (line, answer) in enumerate(caller.answers(asked), 1):
            if isinstance(answer, RefusedError):
                if not is_told:
                    bar.say(f"line {line} is refused: {answer}")
                is_told = True
            else:
                with suppress(ValueError, KeyError, IndexError, TypeError, AttributeError):
                    texts[line] = _text_of(answer.json()["choices"][0])
            bar("answering", done, len(turns))
    return texts


def _metric_of(name: str | None, tasks: Path | None) -> str | None:
    """The metric of the task's file. Raises ConfigError."""
    folder = tasks_folder(tasks)
    if name is None or folder is None:
        return None
    task = load_tasks(folder).get(name)
    return None if task is None else task.metric
