"""Recordings of a model's own outputs: prompts in, JSON lines of prompt and output ids out.

`tailor record` and `tailor corpus generate` make them of a file of prompts; `tailor replay` feeds
them through a drafter (drafters.replay does the work), and `tailor corpus build` and `tailor tasks
tune` read them. One line a prompt, in the order of the data: {"prompt_ids", "output_ids",
"finish_reason", "prompt", "completion"}; an output that ended by itself ends with its EOS id.

The model is an Engine in this process (`ask_engine`) or a running server (`ask_server`). Until
everything is there the answers are kept in FILE.partial, a line each as they come, so that an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from drafters.atomic_file import EVERYBODY, OWNER, replacing
from server.client.bulk import AnswerFile, BulkError
from server.client.http import Caller, CallFailedError, Endpoint, RefusedError
from server.client.http import call as request
from server.commands.options import (
    Bar,
    CallOptions,
    ModelOptions,
    OutputFile,
    PromptField,
    SamplingOptions,
    as_options,
    bounded,
    sampling_of,
    writing,
)
from server.commands.own_engine import OwnTokenizer, own_engine
from server.datasets import Fields, ids_of, rows
from server.errors import ConfigError
from server.types import (
    Request,
    SamplingParams,
    SpeculationParams,
    StepCounts,
    TokenLogprob,
    VocabularyParams,
)

if TYPE_CHECKING:
    from server.engine.engine import Engine


@as_options
class PromptOptions:
    """The prompts, and how many are asked at once."""

    data: Annotated[
        Path, Parameter(metavar="FILE", help="JSON lines, CSV or Parquet with prompts or their ids")
    ]
    prompt_field: PromptField = "prompt"
    limit: Annotated[int | None, bounded("only the first N prompts", gte=1)] = None
    concurrency: Annotated[int, bounded("prompts at once (16)", gte=1)] = 16

    def read(self) -> list[Prompt]:
        """The prompts. Raises ConfigError: with file and line for a line that has none, and for no
        line at all."""
        found = [prompt_of(n, row, self.data, self.prompt_field) for n, row in rows(self.data)]
        if not found:
            raise ConfigError(f"{self.data}: no prompts")
        return found[: self.limit]


_MODEL, _SAMPLING, _CALL = ModelOptions(), SamplingOptions(), CallOptions()

TaskName = Annotated[
    str | None,
    Parameter(metavar="NAME", help="the server's task or model to ask for (its first model)"),
]


def record(
    *,
    prompts: PromptOptions,
    output: OutputFile,
    task: TaskName = None,
    sampling: SamplingOptions = _SAMPLING,
    call: CallOptions = _CALL,
) -> int:
    sampling_of(sampling)
    asked = prompts.read()
    endpoint = call.endpoint()
    fields = tuple(sampling.fields().items())
    name = task or _first_model(endpoint)
    ask = functools.partial(
        ask_server, endpoint, name,
        fields=dict(fields), timeout_s=call.timeout, num_open=prompts.concurrency,
    )  # fmt: skip
    with Bar() as bar:
        return _record(prompts, asked, output, ask, json.dumps([endpoint.url, name, fields]), bar)


def generate(
    *,
    prompts: PromptOptions,
    output: OutputFile,
    model: ModelOptions = _MODEL,
    sampling: SamplingOptions = _SAMPLING,
    task: TaskName = None,
    call: CallOptions = _CALL,
) -> int:
    if call.url is not None:
        return record(prompts=prompts, output=output, task=task, sampling=sampling, call=call)
    if task is not None:
        raise ConfigError("--task needs --url")
    drawn = sampling_of(sampling)
    asked = prompts.read()  # before a model is loaded
    with Bar() as bar, own_engine(model, bar, ("auto",)) as (served, engine):
        ask = functools.partial(
            ask_engine,
            engine,
            OwnTokenizer(served),
            sampling=drawn,
            speculation=SpeculationParams("auto", 8),
            num_open=prompts.concurrency,
        )
        identity = json.dumps([engine.info.fingerprint, repr(drawn)])
        return _record(prompts, asked, output, ask, identity, bar)


def _record(
    prompts: PromptOptions,
    asked: Sequence[Prompt],
    output: Path,
    ask: Ask,
    identity: str,
    bar: Bar,
) -> int:
    num, num_resumed, failures = write_recordings(asked, ask, output, identity, bar)
    for failure in failures[:10]:
        line = f"{prompts.data}:{failure.prompt.line}"
        print(f"tailor: {line}: {failure.message}", file=sys.stderr)
    if len(failures) > 10:
        print(f"tailor: and {len(failures) - 10} more prompts without an answer", file=sys.stderr)
    figures: dict[str, Any] = {
        "file": str(output),
        "recordings": num,
        "resumed": num_resumed,
        "failed": len(failures),
    }
    print(json.dumps(figures))
    return 0


def _first_model(endpoint: Endpoint) -> str:
    """The name of a server's first model. Raises CallFailedError."""
    try:
        return str(request(endpoint, "GET", "/models")["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ConfigError(f"{endpoint.url}: is a Tailor server running there?") from None


def replay(
    *,
    drafter: Annotated[str, Parameter(metavar="NAME", help="the drafter")],
    data: Annotated[
        Path, Parameter(metavar="FILE", help="JSON lines with prompt_ids and output_ids")
    ],
    corpus: Annotated[
        Path | None, Parameter(metavar="FILE", help="for the drafters that use one")
    ] = None,
    max_draft_tokens: Annotated[int, bounded("nodes a step (16)", gte=0)] = 16,
    limit: Annotated[int | None, bounded("only the first N recordings", gte=1)] = None,
    prefill: Annotated[
        bool, Parameter(help="the first tree hangs off the last prompt row")
    ] = False,
    option: Annotated[
        tuple[str, ...],
        Parameter(metavar="NAME=VALUE", help="a drafter's parameter; may be repeated"),
    ] = (),
) -> int:
    from drafters.replay import main

    words = ["--drafter", drafter, "--data", str(data), "--budget", str(max_draft_tokens)]
    words += ["--corpus", str(corpus)] if corpus is not None else []
    words += ["--limit", str(limit)] if limit is not None else []
    words += ["--prefill"] if prefill else []
    words += [f"--option={pair}" for pair in option]
    return min(1, main(words, "tailor"))


# --- what is asked and answered -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the data. line: its number, from 1. text: None where the line holds ids.

    ids: None until tokenized; a server tokenizes text itself.
    """

    line: int
    text: str | None
    ids: tuple[int, ...] | None = None


@dataclass(slots=True)
class Answer:
    """What the model wrote. output_ids: with the EOS id where it ended by itself. likely: of each
    of them, where the likeliest ids were asked for. counts, seconds: of the steps of an engine in
    this process, and its shares of all that it was open in. Written by whoever asks."""

    prompt: Prompt
    output_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    text: str = ""
    likely: tuple[TokenLogprob, ...] = ()
    counts: tuple[StepCounts, ...] = field(default=(), compare=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def num_steps(self) -> int:
        """Decode steps."""
        return sum(one.num_steps for one in self.counts)


@dataclass(frozen=True, slots=True)
class Failure:
    """A prompt that got no answer, and why."""

    prompt: Prompt
    message: str


Progress = Callable[[str, int, int | None], None]
"""(what is done, how far, of how much)."""

Ask = Callable[[Iterable[Prompt]], Iterator[Answer | Failure]]
"""`ask_engine` or `ask_server`, with everything but its prompts."""


def prompt_of(number: int, entry: dict[str, Any], data: Path, prompt_field: str) -> Prompt:
    """One line's prompt: `prompt_field` as text, or `prompt_ids`. Raises ConfigError with file and
    line for a line that has neither."""
    where = f"{data}:{number}"
    if "prompt_ids" in entry:
        return Prompt(number, None, tuple(ids_of(entry["prompt_ids"], where, "prompt_ids")))
    return Prompt(number, Fields(prompt_field=prompt_field).prompt_of(entry, where))


def entry_of(answer: Answer) -> dict[str, Any]:
    """An answer as one line of a recording holds it."""
    prompt = answer.prompt
    entry: dict[str, Any] = {
        "prompt_ids": list(prompt.ids or ()),
        "output_ids": list(answer.output_ids),
        "finish_reason": answer.finish_reason,
    }
    if prompt.text is not None:
        entry["prompt"] = prompt.text
    entry["completion"] = answer.text
    return entry


# --- an engine in this process --------------------------------------------------------------------


def ask_engine(
    engine: Engine,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    sampling: SamplingParams,
    *,
    speculation: SpeculationParams | None = None,
    vocabulary: VocabularyParams | None = None,
    num_open: int = 16,
    num_likely: Callable[[Prompt], int] = lambda _: 0,
    task: str = "record",
    cache_salt: str = "",
) -> Iterator[Answer | Failure]:
    """Answers as they finish, at most `num_open` prompts at once.

    tokenizer: a tokenizers.Tokenizer; prompts get the special tokens that the server would give
    them. None: prompts have ids, and answers no text. sampling: max_tokens is cut to the model's
    context; with a temperature each prompt's seed is sampling.seed plus its line number.
    num_likely: how many likeliest ids of every position of an answer are wanted. task, cache_salt:
    of the requests. Closing the iterator aborts what is open.
    """
    waiting, info = iter(prompts), engine.info
    speculation = speculation or SpeculationParams()
    vocabulary = vocabulary or VocabularyParams()
    asked: dict[str, Answer] = {}
    more = True
    try:
        while True:
            began = time.perf_counter()
            while more and len(asked) < num_open:
                prompt = next(waiting, None)
                if prompt is None:
                    more = False
                    break
                ids = prompt.ids
                if ids is None:
                    ids = tuple(tokenizer.encode(prompt.text, add_special_tokens=True).ids)
                prompt = replace(prompt, ids=ids)
                room = info.max_model_len - len(ids)
                if not ids or room < 1 or max(ids) >= info.vocab_size:
                    told = f"(context {info.max_model_len}, vocabulary {info.vocab_size})"
                    yield Failure(prompt, f"{len(ids)} tokens do not fit the model {told}")
                    continue
                drawn = replace(
                    sampling,
                    num_logprobs=num_likely(prompt) or None,
                    max_tokens=min(sampling.max_tokens, room),
                    seed=(sampling.seed + prompt.line) % (1 << 63),
                )
                name = f"record-{prompt.line}"
                asked[name] = Answer(prompt)
                engine.submit(
                    Request(
                        name, task, info.name, ids, drawn, speculation=speculation,
                        vocabulary=vocabulary, cache_salt=cache_salt, arrival_s=time.monotonic(),
                    )
                )  # fmt: skip
            if not asked:
                return
            deltas = engine.take_deltas() or engine.step()
            share_s = (time.perf_counter() - began) / len(asked)
            for one in asked.values():
                one.seconds += share_s
            for delta in deltas:
                if delta.request_id not in asked:
                    continue
                one = asked[delta.request_id]
                one.output_ids += delta.token_ids
                one.likely += delta.logprobs
                one.counts += (delta.counts,)
                if delta.finish_reason is None:
                    continue
                del asked[delta.request_id]
                if delta.finish_reason in ("error", "abort"):
                    yield Failure(one.prompt, delta.error or delta.finish_reason)
                    continue
                one.finish_reason = delta.finish_reason
                if tokenizer is not None:
                    one.text = tokenizer.decode(one.output_ids, skip_special_tokens=True)
                yield one
    finally:
        for name in asked:
            engine.abort(name)
        engine.take_deltas()


def answered(found: Iterable[Answer | Failure]) -> Iterator[Answer]:
    """What `ask_engine` gives. Raises RuntimeError for a failure."""
    for one in found:
        if isinstance(one, Failure):
            raise RuntimeError(one.message)
        yield one


def in_order(found: Iterable[Answer | Failure]) -> list[Answer]:
    """The same, in the order of the prompts."""
    return sorted(answered(found), key=lambda answer: answer.prompt.line)


# --- a running server -----------------------------------------------------------------------------


def ask_server(
    endpoint: Endpoint,
    model: str,
    prompts: Iterable[Prompt],
    *,
    fields: Mapping[str, Any] = {},
    timeout_s: float = 600.0,
    num_open: int = 16,
) -> Iterator[Answer | Failure]:
    """Answers as they finish, at most `num_open` requests at once.

    model: what the `model` field says, a task's name or a model's. fields: further ones of each
    body; what is left out is the task's own. timeout_s: longest silence of the server during one
    request. server.client.http decides which requests are tried again, and when.

    Raises CallFailedError when the server cannot be reached, refuses every request (a wrong key, an
    unknown model) or is no Tailor server.
    """
    body = {"model": model, "return_token_ids": True, **fields}
    with Caller(endpoint, num_open=num_open, timeout_s=timeout_s) as caller:
        caller.check_task(model)
        texts = ((prompt, prompt.text if prompt.ids is None else prompt.ids) for prompt in prompts)
        asked = ((prompt, "/completions", {**body, "prompt": text}) for prompt, text in texts)
        for prompt, answer in caller.answers(asked, hopeless=(401, 403, 404, 405)):
            if isinstance(answer, RefusedError):
                yield Failure(prompt, str(answer)[:300])
                continue
            try:
                choice = answer.json()["choices"][0]
                ids, output = tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"])
                reason, text = str(choice["finish_reason"]), str(choice["text"])
            except (KeyError, IndexError, TypeError, ValueError):
                raise CallFailedError(
                    f"{endpoint.base}: the answer has no token ids: only a Tailor server gives them"
                ) from None
            yield Answer(replace(prompt, ids=ids), output, reason, text)


# --- the file -------------------------------------------------------------------------------------


class Kept:
    """What a run has found so far, in OUTPUT.partial; the same run, typed again, goes on with it. A
    context manager: the file goes with the block, unless an error or a signal ends it.

    identity: of all that decides what is found. is_dropped: whether what a run of another identity
    left is; else it raises ConfigError. num_found: findings of an earlier run.
    """

    def __init__(self, output: Path, identity: str, *, is_dropped: bool = False) -> None:
        self._output, self._is_dropped = output, is_dropped
        # Other versions kept answers in another form, under the identity alone.
        self._key = hashlib.sha256(f"findings and answers of {identity}".encode()).hexdigest()
        self._file = AnswerFile(kept_file(output))
        self._found: dict[str, Any] = {}
        self.num_found = 0

    def __enter__(self) -> Kept:
        """Raises ConfigError and BulkError for a file that cannot be written."""
        with writing(self._output):
            self._output.parent.mkdir(parents=True, exist_ok=True)
            kept_file(self._output).touch(OWNER)  # it holds what the data asks
        self._file.__enter__()
        try:
            records = self._file.take_up(lambda _: self._key)
        except BulkError:
            if not self._is_dropped:
                self._file.__exit__()
                raise ConfigError(
                    f"{self._file.path}: left by a run with another model, other settings or other "
                    "data; delete it"
                ) from None
            records = {}
            self._file.path.write_bytes(b"")
        self._found = {record["name"]: record["value"] for record in records.values()}
        self.num_found = len(self._found)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None or not self._found:
            self._file.path.unlink(missing_ok=True)
        self._file.__exit__()

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def note(self, name: str, value: Any) -> None:
        """Keep a finding: plain values."""
        record = {"line": len(self._found), "key": self._key, "name": name, "value": value}
        with self._file.appending() as append:
            append(record)
        self._found[name] = value

    def once(self, name: str, find: Callable[[], Any]) -> Any:
        """What is kept under this name, or what `find` finds now: plain values."""
        if name not in self._found:
            self.note(name, find())
        return self._found[name]

    def recorded(
        self,
        prompts: Sequence[Prompt],
        ask: Ask,
        progress: Progress,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> tuple[dict[int, Answer], list[Failure]]:
        """The answers to prompts by line, and those that have none. What is kept is not asked
        again. goes_on: asked before each further prompt; the rest is left out where it says no."""
        kept = {p.line: self._found.get(f"answer {p.line}") for p in prompts}
        answers = {line: msgspec.convert(it, Answer) for line, it in kept.items() if it is not None}
        failures: list[Failure] = []
        todo = [prompt for prompt in prompts if prompt.line not in answers]
        progress("recording", len(answers), len(prompts))
        for answer in ask(itertools.takewhile(lambda _: goes_on(), todo)):
            if isinstance(answer, Failure):
                failures.append(answer)
            else:
                answers[answer.prompt.line] = answer
                self.note(f"answer {answer.prompt.line}", asdict(replace(answer, counts=())))
            progress("recording", len(answers) + len(failures), len(prompts))
        return answers, failures


def kept_file(output: Path) -> Path:
    """Where a run that writes this file keeps what it has found until its end."""
    return output.with_name(output.name + ".partial")


def write_recordings(
    prompts: Sequence[Prompt],
    ask: Ask,
    output: Path,
    identity: str,
    progress: Progress = lambda *_: None,
) -> tuple[int, int, list[Failure]]:
    """Ask for every prompt and write the recordings; (lines, lines that were there, failures).

    identity: names the model and its settings; a FILE.partial with the same identity and prompts is
    continued. Raises ConfigError for another run's FILE.partial, for a file that cannot be written,
    and when no prompt was answered.
    """
    told = "".join(f"\n{p.line} {p.text!r} {p.ids!r}" for p in prompts)
    with writing(output), Kept(output, identity + told) as kept:
        answers, failures = kept.recorded(prompts, ask, progress)
        found = [entry_of(answers[prompt.line]) for prompt in prompts if prompt.line in answers]
        if not found:
            raise ConfigError(
                f"no prompt was answered; line {failures[0].prompt.line}: {failures[0].message}"
            )
        with replacing(output, EVERYBODY) as out:
            for entry in found:
                out.write((json.dumps(entry, ensure_ascii=False) + "\n").encode())
    return len(found), kept.num_found, failures
