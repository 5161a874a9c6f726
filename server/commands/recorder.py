"""Recordings of a model's own outputs: prompts in, JSON lines of prompt and output ids out.

One line a prompt, in the order of the data: {"prompt_ids", "output_ids", "finish_reason",
"prompt", "completion"}; an output that ended by itself ends with its EOS id. That is what
`tailor corpus build`, `tailor tasks tune` and `tailor replay` read.

The model is an Engine in this process (`ask_engine`) or a running server (`ask_server`). Until
everything is there the answers are kept in FILE.partial, a line each as they come, so that an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from drafters.atomic_file import EVERYBODY, replacing
from server.client.bulk import AnswerFile, BulkError
from server.client.http import Caller, CallFailedError, Endpoint, RefusedError
from server.datasets import Fields, ids_of, rows
from server.errors import ConfigError
from server.types import Request, SamplingParams, SpeculationParams, TokenLogprob

if TYPE_CHECKING:
    from server.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the data. line: its number, from 1. text: None where the line holds ids.

    ids: None until tokenized; a server tokenizes text itself.
    """

    line: int
    text: str | None
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote. output_ids: with the EOS id where it ended by itself. likely: of each
    of them, where the likeliest ids were asked for."""

    prompt: Prompt
    output_ids: tuple[int, ...]
    finish_reason: str
    text: str
    likely: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """A prompt that got no answer, and why."""

    prompt: Prompt
    message: str


def read_prompts(data: Path, prompt_field: str = "prompt") -> list[Prompt]:
    """The prompts of a file: `prompt_field` as text, or `prompt_ids`.

    Raises ConfigError with file and line for a line that has neither, and for no line at all.
    """
    prompts = [prompt_of(number, entry, data, prompt_field) for number, entry in rows(data)]
    if not prompts:
        raise ConfigError(f"{data}: no prompts")
    return prompts


def prompt_of(number: int, entry: dict[str, Any], data: Path, prompt_field: str) -> Prompt:
    """One line's prompt; see read_prompts."""
    where = f"{data}:{number}"
    if "prompt_ids" in entry:
        ids = ids_of(entry["prompt_ids"], where, "prompt_ids")
        if not ids:
            raise ConfigError(f"{where}: prompt_ids: is empty")
        return Prompt(number, None, tuple(ids))
    return Prompt(number, Fields(prompt=prompt_field).prompt_of(entry, where))


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
    num_open: int = 16,
    num_likely: Callable[[Prompt], int] = lambda _: 0,
) -> Iterator[Answer | Failure]:
    """Answers as they finish, at most `num_open` prompts at once.

    tokenizer: a tokenizers.Tokenizer; prompts get the special tokens that the server would give
    them. sampling: max_tokens is cut to the model's context; with a temperature each prompt's seed
    is sampling.seed plus its line number. num_likely: how many likeliest ids of every position of
    an answer are wanted. Closing the iterator aborts what is open.
    """
    waiting = iter(prompts)
    speculation = speculation or SpeculationParams()
    asked: dict[str, Prompt] = {}
    outputs: dict[str, list[int]] = {}
    likely: dict[str, list[TokenLogprob]] = {}
    more = True
    try:
        while True:
            while more and len(asked) < num_open:
                prompt = next(waiting, None)
                if prompt is None:
                    more = False
                    break
                drawn = replace(sampling, num_logprobs=num_likely(prompt) or None)
                request = _request(engine, tokenizer, prompt, drawn, speculation)
                if isinstance(request, Failure):
                    yield request
                    continue
                name = request.request_id
                asked[name] = replace(prompt, ids=request.prompt_ids)
                outputs[name], likely[name] = [], []
                engine.submit(request)
            if not asked:
                return
            for delta in engine.take_deltas() or engine.step():
                name = delta.request_id
                if name not in asked:
                    continue
                outputs[name] += delta.token_ids
                likely[name] += delta.logprobs
                if delta.finish_reason is None:
                    continue
                prompt, output, rows = asked.pop(name), outputs.pop(name), likely.pop(name)
                if delta.finish_reason in ("error", "abort"):
                    yield Failure(prompt, delta.error or delta.finish_reason)
                else:
                    text = tokenizer.decode(output, skip_special_tokens=True)
                    yield Answer(prompt, tuple(output), delta.finish_reason, text, tuple(rows))
    finally:
        for name in asked:
            engine.abort(name)
        engine.take_deltas()


def _request(
    engine: Engine,
    tokenizer: Any,
    prompt: Prompt,
    sampling: SamplingParams,
    speculation: SpeculationParams,
) -> Request | Failure:
    """The Request of one prompt; a Failure where it does not fit the model."""
    ids = prompt.ids
    if ids is None:
        ids = tuple(tokenizer.encode(prompt.text, add_special_tokens=True).ids)
    room = engine.info.max_model_len - len(ids)
    if not ids or room < 1 or max(ids) >= engine.info.vocab_size:
        return Failure(
            replace(prompt, ids=ids),
            f"{len(ids)} tokens do not fit the model (context {engine.info.max_model_len}, "
            f"vocabulary {engine.info.vocab_size})",
        )
    return Request(
        request_id=f"record-{prompt.line}",
        task="record",
        model=engine.info.name,
        prompt_ids=ids,
        sampling=replace(
            sampling,
            max_tokens=min(sampling.max_tokens, room),
            seed=(sampling.seed + prompt.line) % (1 << 63),
        ),
        speculation=speculation,
        arrival_s=time.monotonic(),
    )


# --- a running server -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A running server. model: what the `model` field says, a task's name or a model's.

    fields: further fields of each body; what is left out is the task's own. timeout_s: longest
    silence of the server during one request.
    """

    endpoint: Endpoint
    model: str
    fields: tuple[tuple[str, Any], ...] = ()
    timeout_s: float = 600.0


def ask_server(
    server: ServerAddress, prompts: Iterable[Prompt], *, num_open: int = 16
) -> Iterator[Answer | Failure]:
    """Answers as they finish, at most `num_open` requests at once.

    server.client.http decides which requests are tried again, and when. Raises CallFailedError when
    the server cannot be reached, refuses every request (a wrong key, an unknown model) or is no
    Tailor server.
    """
    waiting = iter(prompts)
    with asyncio.Runner() as runner:
        caller = runner.run(_open(server, num_open))
        asked: set[asyncio.Task[Answer | Failure]] = set()
        try:
            while True:
                for prompt in itertools.islice(waiting, num_open - len(asked)):
                    asked.add(runner.get_loop().create_task(_ask(server, caller, prompt)))
                if not asked:
                    return
                done, asked = runner.run(_first(asked))
                for task in done:
                    yield task.result()
        finally:
            for task in asked:
                task.cancel()
            runner.run(caller.__aexit__(None, None, None))


async def _open(server: ServerAddress, num_open: int) -> Caller:
    caller = Caller(server.endpoint, num_open=num_open, timeout_s=server.timeout_s)
    try:
        await caller.check_task(server.model)
    except BaseException:
        await caller.__aexit__(None, None, None)
        raise
    return caller


async def _first(
    asked: set[asyncio.Task[Answer | Failure]],
) -> tuple[set[asyncio.Task[Answer | Failure]], set[asyncio.Task[Answer | Failure]]]:
    return await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)


async def _ask(server: ServerAddress, caller: Caller, prompt: Prompt) -> Answer | Failure:
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": prompt.text if prompt.ids is None else list(prompt.ids),
        "return_token_ids": True,
        **dict(server.fields),
    }
    base = server.endpoint.base
    try:
        choice = (await caller.post("/completions", body)).json()["choices"][0]
        return Answer(
            replace(prompt, ids=tuple(choice["prompt_token_ids"])),
            tuple(choice["token_ids"]),
            str(choice["finish_reason"]),
            str(choice["text"]),
        )
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise CallFailedError(f"{base}: the server is lost: {reason}") from None
    except RefusedError as error:
        if error.refusal.status in (401, 403, 404, 405):
            raise CallFailedError(f"{base}: {error}") from None
        return Failure(prompt, str(error)[:300])
    except (KeyError, IndexError, TypeError, ValueError):
        raise CallFailedError(
            f"{base}: the answer has no token ids: only a Tailor server gives them"
        ) from None


# --- the file -------------------------------------------------------------------------------------


def record(
    prompts: Sequence[Prompt],
    ask: Callable[[Iterable[Prompt]], Iterator[Answer | Failure]],
    output: Path,
    *,
    identity: str,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, int, list[Failure]]:
    """Ask for every prompt and write the recordings; (lines, lines that were there, failures).

    ask: one of the generators above, with everything but its prompts. identity: names the model
    and its settings; a FILE.partial with the same identity and prompts is continued. progress:
    (done, all). Raises ConfigError for another run's FILE.partial, for a file that cannot be
    written, and when no prompt was answered.
    """
    keys = dict.fromkeys((prompt.line for prompt in prompts), _digest(prompts, identity))
    failures: list[Failure] = []
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with AnswerFile(output.with_name(output.name + ".partial")) as partial:
            done = _take_up(partial, keys)
            num_resumed = len(done)
            if progress is not None:
                progress(num_resumed, len(prompts))
            with partial.appending() as append:
                for answer in ask([prompt for prompt in prompts if prompt.line not in done]):
                    if isinstance(answer, Failure):
                        failures.append(answer)
                    else:
                        line = answer.prompt.line
                        done[line] = entry_of(answer)
                        append({"line": line, "key": keys[line], "recording": done[line]})
                    if progress is not None:
                        progress(len(done) + len(failures), len(prompts))
            if done:
                recordings = (json.dumps(done[n], ensure_ascii=False) + "\n" for n in sorted(done))
                with replacing(output, EVERYBODY) as out:
                    out.writelines(line.encode() for line in recordings)
            partial.path.unlink()
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror}") from None
    if not done:
        raise ConfigError(
            f"no prompt was answered; line {failures[0].prompt.line}: {failures[0].message}"
        )
    return len(done), num_resumed, failures


def _digest(prompts: Sequence[Prompt], identity: str) -> str:
    """Names a run: the same prompts of the same model and settings."""
    digest = hashlib.sha256(identity.encode())
    for prompt in prompts:
        digest.update(f"\n{prompt.line} {prompt.text!r} {prompt.ids!r}".encode())
    return digest.hexdigest()


def _take_up(partial: AnswerFile, keys: dict[int, str]) -> dict[int, dict[str, Any]]:
    """Recordings by line number of an interrupted run."""
    try:
        found = partial.take_up(keys)
    except BulkError:
        raise ConfigError(
            f"{partial.path}: left by a run with another model, other settings or other data; "
            "delete it"
        ) from None
    return {line: record["recording"] for line, record in found.items()}
