"""`tailor record` and `tailor corpus generate`: a model's own outputs for a file of prompts.
`tailor replay`: such recordings fed through a drafter (drafters.replay does the work)."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from server.commands.options import (
    CallOptions,
    ModelOptions,
    OutputFile,
    PromptField,
    SamplingOptions,
    sampling_of,
)
from server.commands.own_engine import OwnTokenizer, own_engine
from server.commands.progress import Bar
from server.errors import ConfigError

if TYPE_CHECKING:
    from server.client.http import Endpoint
    from server.commands.recorder import Answer, Failure, Prompt

    Ask = Callable[[Iterable[Prompt]], Iterator[Answer | Failure]]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """The prompts, and how many are asked at once."""

    data: Annotated[
        Path, Parameter(metavar="FILE", help="JSON lines with a prompt, or with prompt_ids")
    ]
    prompt_field: PromptField = "prompt"
    limit: Annotated[int | None, Parameter(help="only the first N prompts")] = None
    concurrency: Annotated[int, Parameter(help="prompts at once (16)")] = 16

    def read(self) -> list[Prompt]:
        """The prompts. Raises ConfigError."""
        from server.commands.recorder import read_prompts

        if self.concurrency < 1:
            raise ConfigError("--concurrency: must be at least 1")
        return read_prompts(self.data, self.prompt_field)[: self.limit]


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
    from server.commands.recorder import ServerAddress, ask_server

    sampling_of(sampling)
    asked = prompts.read()
    endpoint = call.endpoint()
    fields = tuple(sampling.fields().items())
    name = task or _first_model(endpoint)
    address = ServerAddress(endpoint, name, fields, call.timeout)
    ask = functools.partial(ask_server, address, num_open=prompts.concurrency)
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
    from server.commands.recorder import ask_engine
    from server.types import SpeculationParams

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
    from server.commands import recorder

    num, num_resumed, failures = recorder.record(
        asked,
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
    from server.client.http import CallFailedError, call

    try:
        return str(call(endpoint, "GET", "/models")["data"][0]["id"])
    except CallFailedError as error:
        raise ConfigError(f"{error.message}; is a Tailor server running there?") from None
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
    max_draft_tokens: Annotated[int, Parameter(help="nodes a step (16)")] = 16,
    limit: Annotated[int | None, Parameter(help="only the first N recordings")] = None,
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
    for pair in option:
        words += ["--option", pair]
    return main(words)
