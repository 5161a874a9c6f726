"""Recordings of a model's own outputs: prompts in, JSON lines of prompt and output ids out.

One line a prompt, in the order of the data: {"prompt_ids", "output_ids", "finish_reason",
"prompt", "completion"}; an output that ended by itself ends with its EOS id. That is what
`tailor corpus build`, `tailor task tune` and `tailor replay` read.

The model is an Engine in this process (`ask_engine`) or a running server (`ask_server`). Until
everything is there the answers are kept in FILE.partial, a line each as they come, so that an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.datasets import ids_of, json_lines
from server.errors import ConfigError
from server.types import Request, SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from server.engine.engine import Engine

__all__ = [
    "Answer",
    "Failure",
    "Prompt",
    "ServerAddress",
    "ask_engine",
    "ask_server",
    "prompt_of",
    "read_prompts",
    "record",
    "recording_line",
]

_TRIES = 8
_TIMEOUT_S = 600.0
_LONGEST_WAIT_S = 60.0


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
    """What the model wrote. output_ids: with the EOS id where it ended by itself."""

    prompt: Prompt
    output_ids: tuple[int, ...]
    finish_reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A prompt that got no answer, and why."""

    prompt: Prompt
    message: str


def read_prompts(data: Path, prompt_field: str = "prompt") -> list[Prompt]:
    """The prompts of a JSONL file: `prompt_field` as text, or `prompt_ids`.

    Raises ConfigError with file and line for a line that has neither, and for no line at all.
    """
    prompts = [prompt_of(number, entry, data, prompt_field) for number, entry in json_lines(data)]
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
    prompt = entry.get(prompt_field)
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"{where}: {prompt_field}: must be a string, not empty")
    return Prompt(number, prompt)


def recording_line(answer: Answer) -> str:
    """An answer as one JSON line, without the line's end."""
    prompt = answer.prompt
    entry: dict[str, Any] = {
        "prompt_ids": list(prompt.ids or ()),
        "output_ids": list(answer.output_ids),
        "finish_reason": answer.finish_reason,
    }
    if prompt.text is not None:
        entry["prompt"] = prompt.text
    entry["completion"] = answer.text
    return json.dumps(entry, ensure_ascii=False)


# --- an engine in this process --------------------------------------------------------------------


def ask_engine(
    engine: Engine,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    sampling: SamplingParams,
    *,
    speculation: SpeculationParams | None = None,
    num_open: int = 16,
) -> Iterator[Answer | Failure]:
    """Answers as they finish, at most `num_open` prompts at once.

    tokenizer: a tokenizers.Tokenizer; prompts get the special tokens that the server would give
    them. sampling: max_tokens is cut to the model's context; with a temperature each prompt's seed
    is sampling.seed plus its line number. Closing the iterator aborts what is open.
    """
    waiting = iter(prompts)
    speculation = speculation or SpeculationParams()
    asked: dict[str, Prompt] = {}
    outputs: dict[str, list[int]] = {}
    more = True
    try:
        while True:
            while more and len(asked) < num_open:
                prompt = next(waiting, None)
                if prompt is None:
                    more = False
                    break
                ids = prompt.ids
                if ids is None:
                    ids = tuple(tokenizer.encode(prompt.text, add_special_tokens=True).ids)
                prompt = replace(prompt, ids=ids)
                room = engine.info.max_model_len - len(ids)
                if not ids or room < 1 or max(ids) >= engine.info.vocab_size:
                    yield Failure(
                        prompt,
                        f"{len(ids)} tokens do not fit the model (context "
                        f"{engine.info.max_model_len}, vocabulary {engine.info.vocab_size})",
                    )
                    continue
                name = f"record-{prompt.line}"
                asked[name], outputs[name] = prompt, []
                engine.submit(
                    Request(
                        request_id=name,
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
                )
            if not asked:
                return
            deltas = engine.take_deltas()
            if not deltas:
                deltas = engine.step()
            for delta in deltas:
                name = delta.request_id
                if name not in asked:
                    continue
                outputs[name] += delta.token_ids
                if delta.finish_reason is None:
                    continue
                prompt, output = asked.pop(name), outputs.pop(name)
                if delta.finish_reason in ("error", "abort"):
                    yield Failure(prompt, delta.error or delta.finish_reason)
                else:
                    text = tokenizer.decode(output, skip_special_tokens=True)
                    yield Answer(prompt, tuple(output), delta.finish_reason, text)
    finally:
        for name in asked:
            engine.abort(name)
        engine.take_deltas()


# --- a running server -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A running server. model: what the `model` field says, a task's name or a model's.

    fields: further fields of each body; what is left out is the task's own.
    """

    url: str
    model: str
    key: str | None = None
    fields: tuple[tuple[str, Any], ...] = ()


class _Refused(Exception):
    """The server refused one prompt; the others go on."""


def ask_server(
    server: ServerAddress, prompts: Iterable[Prompt], *, num_open: int = 16
) -> Iterator[Answer | Failure]:
    """Answers as they finish, at most `num_open` requests at once.

    429 and 503 are tried again after what Retry-After says. Raises ConfigError when the server
    cannot be reached or refuses every request (a wrong key, an unknown model).
    """
    waiting = iter(prompts)
    pool = ThreadPoolExecutor(num_open, thread_name_prefix="record")
    asked: dict[Future[Answer], Prompt] = {}
    more = True
    try:
        while True:
            while more and len(asked) < num_open:
                prompt = next(waiting, None)
                if prompt is None:
                    more = False
                    break
                asked[pool.submit(_ask, server, prompt)] = prompt
            if not asked:
                return
            done, _ = wait(asked, return_when=FIRST_COMPLETED)
            for future in done:
                prompt = asked.pop(future)
                try:
                    answer: Answer | Failure = future.result()
                except _Refused as error:
                    answer = Failure(prompt, str(error))
                yield answer
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _ask(server: ServerAddress, prompt: Prompt) -> Answer:
    import http.client
    import urllib.error
    import urllib.request

    body: dict[str, Any] = {
        "model": server.model,
        "prompt": prompt.text if prompt.ids is None else list(prompt.ids),
        "return_token_ids": True,
        **dict(server.fields),
    }
    headers = {"content-type": "application/json"}
    if server.key is not None:
        headers["authorization"] = f"Bearer {server.key}"
    url = f"{server.url.rstrip('/')}/v1/completions"
    for attempt in range(_TRIES):
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                choice = json.load(response)["choices"][0]
            return Answer(
                replace(prompt, ids=tuple(choice["prompt_token_ids"])),
                tuple(choice["token_ids"]),
                str(choice["finish_reason"]),
                str(choice["text"]),
            )
        except urllib.error.HTTPError as error:
            with error:
                told = _message(error.read(4096)) or f"HTTP {error.code}"
                status, after = error.code, error.headers.get("retry-after", "")
            if status in (429, 503) and attempt + 1 < _TRIES:
                wait_s = float(after) if after.replace(".", "", 1).isdigit() else 2.0**attempt
                time.sleep(min(wait_s, _LONGEST_WAIT_S))
                continue
            if status in (401, 403, 404, 405):
                raise ConfigError(f"{url}: {told}") from None
            raise _Refused(told) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise ConfigError(f"{url}: {reason}") from None
        except (KeyError, IndexError, TypeError, ValueError):
            raise ConfigError(
                f"{url}: the answer has no token ids: only a Tailor server gives them"
            ) from None
    raise AssertionError("the loop returns or raises")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return ""


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
    and its settings; a FILE.partial with the same identity and prompts is gone on with. progress:
    (done, all). Raises ConfigError for another run's FILE.partial, for a file that cannot be
    written, and when no prompt was answered.
    """
    partial = output.with_name(output.name + ".partial")
    header = json.dumps({"recordings_of": _digest(prompts, identity)})
    done = _resume(partial, header)
    todo = [prompt for prompt in prompts if prompt.line not in done]
    num_resumed = len(prompts) - len(todo)
    failures: list[Failure] = []
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("a", encoding="utf-8") as file:
            if partial.stat().st_size == 0:
                file.write(header + "\n")
            if progress is not None:
                progress(num_resumed, len(prompts))
            for answer in ask(todo):
                if isinstance(answer, Failure):
                    failures.append(answer)
                else:
                    line = recording_line(answer)
                    done[answer.prompt.line] = line
                    file.write(f'{{"line": {answer.prompt.line}, "recording": {line}}}\n')
                    file.flush()
                if progress is not None:
                    progress(len(done) + len(failures), len(prompts))
        if not done:
            partial.unlink()
            raise ConfigError(
                f"no prompt was answered; line {failures[0].prompt.line}: {failures[0].message}"
            )
        _write(output, "".join(done[number] + "\n" for number in sorted(done)))
        partial.unlink()
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror}") from None
    return len(done), num_resumed, failures


def _digest(prompts: Sequence[Prompt], identity: str) -> str:
    digest = hashlib.sha256(identity.encode())
    for prompt in prompts:
        digest.update(f"\n{prompt.line} {prompt.text!r} {prompt.ids!r}".encode())
    return digest.hexdigest()


def _resume(partial: Path, header: str) -> dict[int, str]:
    """Recordings by line number of an interrupted run; a last line cut short is dropped."""
    try:
        text = partial.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{partial}: {error.strerror}") from None
    head, _, rest = text.partition("\n")
    if head != header:
        raise ConfigError(
            f"{partial}: left by a run with another model, other settings or other data; delete it"
        )
    done: dict[int, str] = {}
    for line in rest.split("\n"):
        try:
            entry = json.loads(line)
            done[int(entry["line"])] = json.dumps(entry["recording"], ensure_ascii=False)
        except (ValueError, KeyError, TypeError):
            continue
    _write(
        partial,
        header
        + "\n"
        + "".join(
            f'{{"line": {number}, "recording": {done[number]}}}\n' for number in sorted(done)
        ),
    )
    return done


def _write(path: Path, text: str) -> None:
    """Atomically, into the file's own folder."""
    import tempfile

    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
