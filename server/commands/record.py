"""`tailor record` and `tailor corpus generate`: a model's own outputs for a file of prompts."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from server.commands.options import (
    CallOptions,
    ModelOptions,
    OutputFile,
    SamplingOptions,
    sampling_of,
)
from server.commands.own_engine import OwnTokenizer, own_engine
from server.commands.progress import Bar
from server.errors import ConfigError

if TYPE_CHECKING:
    from server.client.connection import Endpoint
    from server.commands.recorder import Answer, Failure, Prompt

    Ask = Callable[[Iterable[Prompt]], Iterator[Answer | Failure]]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """The prompts, and how many are asked at once."""

    data: Annotated[
        Path, Parameter(metavar="FILE", help="JSON lines with a prompt, or with prompt_ids")
    ]
    prompt_field: Annotated[str, Parameter(help="where the prompt is (prompt)")] = "prompt"
    limit: Annotated[int | None, Parameter(help="only the first N prompts")] = None
    concurrency: Annotated[int, Parameter(help="prompts at once (16)")] = 16


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
    ask, identity = _server(call, task, sampling, prompts.concurrency)
    with Bar() as bar:
        return _record(prompts, output, ask, identity, bar)


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
    from server.commands.recorder import ask_engine
    from server.types import SpeculationParams

    drawn = sampling_of(sampling)
    _check(prompts)
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
        return _record(prompts, output, ask, identity, bar)


def _check(prompts: PromptOptions) -> None:
    """Raise ConfigError for wrong prompts before a model is loaded."""
    from server.commands.recorder import read_prompts

    if prompts.concurrency < 1:
        raise ConfigError("--concurrency: must be at least 1")
    read_prompts(prompts.data, prompts.prompt_field)


def _server(
    call: CallOptions, task: str | None, sampling: SamplingOptions, num_open: int
) -> tuple[Ask, str]:
    """What asks a running server, and what names it in a recording's header."""
    from server.commands.recorder import ServerAddress, ask_server

    if num_open < 1:
        raise ConfigError("--concurrency: must be at least 1")
    endpoint = call.endpoint()
    fields = tuple(sampling.fields().items())
    name = task or _first_model(endpoint)
    address = ServerAddress(endpoint, name, fields, call.timeout)
    return functools.partial(ask_server, address, num_open=num_open), json.dumps(
        [endpoint.url, name, fields]
    )


def _record(prompts: PromptOptions, output: Path, ask: Ask, identity: str, bar: Bar) -> int:
    from server.commands import recorder

    num, num_resumed, failures = recorder.record(
        recorder.read_prompts(prompts.data, prompts.prompt_field)[: prompts.limit],
        ask,
        output,
        identity=identity,
        progress=lambda done, total: bar("recording", done, total),
    )
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
    from server.client.connection import CallFailedError
    from server.client.http import call

    try:
        return str(call(endpoint, "GET", "/models")["data"][0]["id"])
    except CallFailedError as error:
        raise ConfigError(f"{error.message}; is a Tailor server running there?") from None
    except (KeyError, IndexError, TypeError):
        raise ConfigError(f"{endpoint.url}: is a Tailor server running there?") from None
