"""What several commands share: options, under one name each, what is read from them, and progress.

A command takes one or more classes of options (`as_options`); their fields are on the command line
as they are called there (`max_tokens` is --max-tokens).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, dataclass_transform

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from server.errors import ConfigError

if TYPE_CHECKING:
    from server.client.http import Endpoint
    from server.types import SamplingParams

_T = TypeVar("_T")

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_URL = "http://127.0.0.1:8000"

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
WeightsForm = Literal[
    "auto", "float32", "bfloat16", "int8", "int8-blocks", "int4", "file", "nf4", "fp8"
]


def bounded(
    help: str, *, name: str | None = None, metavar: str | None = None, **bounds: float
) -> Parameter:
    """An option with a number, or numbers, within bounds: gt, gte, lt, lte."""
    return Parameter(name=name, help=help, metavar=metavar, validator=Number(**bounds))


def _check_device(_: Any, device: str) -> None:
    from server.config.yaml_file import check_device

    check_device(device)


def check_place(file: Path) -> None:
    """Raise ValueError where no file can be written, nor the folders that it lacks be made. Told
    before the work, not after it."""
    if os.path.isdir(file):
        raise ValueError(f"{file}: is a folder")
    there = next(folder for folder in file.absolute().parents if os.path.exists(folder))
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{there}: cannot be written to")


def _check_output(_: Any, output: Path | None) -> None:
    if output is None:
        return
    if not os.path.isdir(output.parent):
        raise ValueError(f"{output.parent}: no such folder")
    check_place(output)


def _check_folder(_: Any, folder: Path | None) -> None:
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder}: is no folder")
        check_place(folder / "file")


Device = Annotated[str, Parameter(help="cpu, cuda or cuda:N (cpu)", validator=_check_device)]
Threads = Annotated[int | None, bounded("CPU threads", gte=1)]
PromptField = Annotated[str, Parameter(help="where the prompt is (prompt)")]
OUTPUT = Parameter(
    name=("--output", "-o"), help="the file that is written", validator=_check_output
)
OutputFile = Annotated[Path, OUTPUT]
FOLDER = Parameter(metavar="DIR", validator=_check_folder)
"""Of a folder that is written."""
WEIGHTS = Parameter(
    help="how a cpu keeps weights: auto, float32, bfloat16, int8, int8-blocks, int4, or file, as a "
    "GGUF has them; on cuda fp8",
    show_choices=False,  # nf4 is for training
)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def as_options(cls: type[_T]) -> type[_T]:
    """A class of options: a frozen dataclass whose fields a command has as its own."""
    return Parameter(name="*")(dataclass(frozen=True, kw_only=True, slots=True)(cls))


@as_options
class ModelOptions:
    """Options of the commands that run a model themselves."""

    model: Annotated[str, Parameter(help=f"the model ({DEFAULT_MODEL})")] = DEFAULT_MODEL
    adapter: Annotated[
        str | None, Parameter(metavar="DIR", help="a PEFT LoRA to merge into the model")
    ] = None
    device: Device = "cpu"
    dtype: Annotated[Dtype | None, Parameter(help="number format of the weights")] = None
    weights: Annotated[WeightsForm | None, WEIGHTS] = None
    threads: Threads = None


@as_options
class IdOptions:
    """Whose ids a file holds."""

    model: Annotated[str, Parameter(help=f"the model ({DEFAULT_MODEL})")] = DEFAULT_MODEL
    adapter: Annotated[
        str | None, Parameter(metavar="DIR", help="a PEFT LoRA whose own tokens are in the ids")
    ] = None


@as_options
class SamplingOptions:
    """How outputs are drawn. None: the default of the command or task."""

    max_tokens: Annotated[
        int | None, bounded("longest output (the task's or what the data needs, else 256)", gte=1)
    ] = None
    temperature: Annotated[
        float | None, bounded("0 is greedy (the task's on a server, else 0)", gte=0, lte=2)
    ] = None
    stop: Annotated[
        tuple[str, ...], Parameter(metavar="TEXT", help="ends an output; up to 16")
    ] = ()
    seed: Annotated[
        int | None, bounded("of the draws, with a temperature (0)", gte=0, lt=1 << 62)
    ] = None

    def fields(self) -> dict[str, Any]:
        """What was given, as fields of a request's body."""
        return {name: value for name, value in asdict(self).items() if value not in (None, ())}


@as_options
class CallOptions:
    """How a running server is called."""

    url: Annotated[str | None, Parameter(help=f"the server ({DEFAULT_URL})")] = None
    api_key: Annotated[
        str | None,
        Parameter(metavar="KEY", help="a key of the server (better: set TAILOR_API_KEY)"),
    ] = None
    timeout: Annotated[
        float, bounded("longest silence of the server in seconds (600)", gt=0, metavar="S")
    ] = 600.0

    def endpoint(self) -> Endpoint:
        """The server that is meant. Raises ConfigError for what is no key."""
        from server.client.http import Endpoint

        key = self.api_key or os.environ.get("TAILOR_API_KEY") or None
        if key and not (key.isascii() and key.isprintable() and " " not in key):
            source = "--api-key" if self.api_key else "TAILOR_API_KEY"
            raise ConfigError(f"{source}: a key is printable ASCII without spaces")
        return Endpoint(self.url or DEFAULT_URL, key)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What goes wrong with a file, as an error of the command line. Raises ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """What a part that knows no ConfigError says is wrong, as one. Raises ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None


def sampling_of(options: SamplingOptions) -> SamplingParams:
    """SamplingParams of a command's options; greedy without a temperature. Raises ConfigError."""
    from server.types import SamplingParams

    if len(options.stop) > 16 or not all(options.stop):
        raise ConfigError("--stop: at most 16 texts, none of them empty")
    return SamplingParams(
        temperature=options.temperature or 0.0,
        max_tokens=options.max_tokens or 256,
        stop=tuple(text.encode() for text in options.stop),
        seed=options.seed or 0,
    )


# --- progress on stderr ---------------------------------------------------------------------------

# Of a long command: bars and spinners on a terminal, plain lines in a log.


class Bar:
    """A progress bar on a terminal; in a log, a line now and then and when a stage is done.

    Called with (stage, done, total or None), with a note that stands behind the bar and, where the
    caller knows better than the share that is done, the seconds that are left. A stage without a
    total ends where the next one begins.
    """

    LOG_EVERY_S = 10.0

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bars = _bars(self._console)
        self._tasks: dict[str, Any] = {}
        self._began: dict[str, tuple[float, int]] = {}  # when, and what was done by then
        self._told_s = time.monotonic()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def __call__(
        self,
        stage: str,
        done: int,
        total: int | None,
        *,
        left_s: float | None = None,
        note: str = "",
    ) -> None:
        now = time.monotonic()
        began_s, before = self._began.setdefault(stage, (now, done))
        if self._console.is_terminal:
            self._bars.start()
            if stage not in self._tasks:
                self._end()
                self._tasks[stage] = self._bars.add_task(stage, total=total, note="")
            self._bars.update(self._tasks[stage], completed=done, total=total, note=note)
        elif total is not None and done >= total and (stage, total) not in self._tasks.items():
            self._tasks[stage] = total
            self._console.print(f"{stage} {done}", soft_wrap=True, markup=False)
        elif total is None and stage not in self._tasks:
            self._tasks[stage] = None
            self._console.print(stage, soft_wrap=True, markup=False)
        elif total and done < total and now - self._told_s >= self.LOG_EVERY_S:
            self._told_s = now
            if left_s is None and done > before:
                left_s = (now - began_s) / (done - before) * (total - done)
            note += "" if left_s is None else f", about {duration(left_s)} left"
            self._console.print(f"{stage} {done} of {total}{note}", soft_wrap=True, markup=False)

    def _end(self) -> None:
        """What had no total is done."""
        for task in self._bars.tasks:
            if task.total is None:
                self._bars.update(task.id, completed=1, total=1)

    def stage(self, line: str) -> None:
        """What begins now, of which nobody knows how long it takes."""
        if line.startswith("Fetching"):  # it has a bar of its own
            self.say(line)
        else:
            self(line, 0, None)

    def say(self, line: str) -> None:
        """A line beside the bars."""
        self._console.print(line, soft_wrap=True, markup=False)


def duration(seconds: float) -> str:
    """40 s, 12 min or 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _bars(console: Console) -> Progress:
    """Bars of one line each; on a narrow terminal the stage's name is shortened."""
    return Progress(
        TextColumn(
            "{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
        ),
        BarColumn(bar_width=20),
        TaskProgressColumn("{task.percentage:>3.0f}%{task.fields[note]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        transient=True,
        expand=True,
    )
