"""Options that several commands share, under one name each, and what is read from them.

A command takes one or more of these dataclasses; `Parameter(name="*")` puts their fields on the
command line as they are called here (`max_tokens` is --max-tokens).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from server.errors import ConfigError

if TYPE_CHECKING:
    from server.client.http import Endpoint
    from server.types import SamplingParams

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_URL = "http://127.0.0.1:8000"

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
WeightsForm = Literal[
    "auto", "float32", "bfloat16", "int8", "int8-blocks", "int4", "file", "nf4", "fp8"
]
WEIGHTS_HELP = (
    "how a cpu keeps weights: floats, int8, int8-blocks, int4, or as a GGUF has them: file; on "
    "cuda fp8"
)
PromptField = Annotated[str, Parameter(help="where the prompt is (prompt)")]
OutputFile = Annotated[Path, Parameter(name=("--output", "-o"), help="the file that is written")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Options of the commands that run a model themselves."""

    model: Annotated[str, Parameter(help=f"the model ({DEFAULT_MODEL})")] = DEFAULT_MODEL
    adapter: Annotated[
        str | None, Parameter(metavar="DIR", help="a PEFT LoRA to merge into the model")
    ] = None
    device: Annotated[str, Parameter(help="cpu, cuda or cuda:N (cpu)")] = "cpu"
    dtype: Annotated[Dtype | None, Parameter(help="number format of the weights")] = None
    weights: Annotated[WeightsForm | None, Parameter(help=WEIGHTS_HELP)] = None
    threads: Annotated[int | None, Parameter(help="CPU threads")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """How outputs are drawn. None: the default of the command or task."""

    max_tokens: Annotated[int | None, Parameter(help="longest output (the task's, else 256)")] = (
        None
    )
    temperature: Annotated[
        float | None, Parameter(help="0 is greedy (the task's on a server, else 0)")
    ] = None
    stop: Annotated[
        tuple[str, ...], Parameter(metavar="TEXT", help="ends an output; up to 16")
    ] = ()
    seed: Annotated[int | None, Parameter(help="of the draws, with a temperature (0)")] = None

    def fields(self) -> dict[str, Any]:
        """What was given, as fields of a request's body."""
        given = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stop": list(self.stop) or None,
            "seed": self.seed,
        }
        return {name: value for name, value in given.items() if value is not None}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class CallOptions:
    """How a running server is called."""

    url: Annotated[str | None, Parameter(help=f"the server ({DEFAULT_URL})")] = None
    api_key: Annotated[
        str | None,
        Parameter(metavar="KEY", help="a key of the server (better: set TAILOR_API_KEY)"),
    ] = None
    timeout: Annotated[
        float, Parameter(metavar="S", help="longest silence of the server in seconds (600)")
    ] = 600.0

    def endpoint(self) -> Endpoint:
        """The server that is meant."""
        from server.client.http import Endpoint

        key = self.api_key or os.environ.get("TAILOR_API_KEY") or None
        return Endpoint(self.url or DEFAULT_URL, key)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What goes wrong with a file, as an error of the command line. Raises ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def sampling_of(options: SamplingOptions) -> SamplingParams:
    """SamplingParams of a command's options; greedy without a temperature. Raises ConfigError."""
    from server.types import SamplingParams

    if options.max_tokens is not None and options.max_tokens < 1:
        raise ConfigError("--max-tokens: must be at least 1")
    if options.temperature is not None and not 0.0 <= options.temperature <= 2.0:
        raise ConfigError("--temperature: must lie in 0..2")
    if len(options.stop) > 16 or not all(options.stop):
        raise ConfigError("--stop: at most 16 texts, none of them empty")
    if options.seed is not None and not 0 <= options.seed < 1 << 62:
        raise ConfigError("--seed: must be 0 or more")
    return SamplingParams(
        temperature=options.temperature or 0.0,
        max_tokens=options.max_tokens or 256,
        stop=tuple(text.encode() for text in options.stop),
        seed=options.seed or 0,
    )
