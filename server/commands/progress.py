"""Progress of a long command on stderr: bars and spinners on a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column


class Bar:
    """A progress bar on a terminal; in a log, a line now and then and when a stage is done.

    Called with (stage, done, total or None), with a note that stands behind the bar and, where the
    caller knows better than the share that is done, the seconds that are left.
    """

    LOG_EVERY_S = 10.0

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bars = _bars(self._console)
        self._tasks: dict[str, Any] = {}
        self._began_s: dict[str, float] = {}
        self._told_s = time.monotonic()

    def __enter__(self) -> Bar:
        if self._console.is_terminal:
            self._bars.start()
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
        began = self._began_s.setdefault(stage, now)
        if self._console.is_terminal:
            if stage not in self._tasks:
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
            if left_s is None and done:
                left_s = (now - began) / done * (total - done)
            note += "" if left_s is None else f", about {duration(left_s)} left"
            self._console.print(f"{stage} {done} of {total}{note}", soft_wrap=True, markup=False)

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
        TimeRemainingColumn(),
        console=console,
        transient=True,
        expand=True,
    )


class Stages:
    """Tells the stages of a long command: a spinner with seconds on a terminal, else plain lines.

    Called with one line when a stage begins; leaving the context ends the last one.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = contextlib.ExitStack()
        self._line = ""
        self._start_s = 0.0

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._end(kind is None)

    def __call__(self, line: str) -> None:
        self._end(True)
        self._line, self._start_s = line, time.monotonic()
        if not self._console.is_terminal:
            self._console.print(line, soft_wrap=True, markup=False)
        elif line.startswith("Fetching"):  # a bar of its own comes below it
            self._console.print(line, markup=False)
        else:
            self._live.enter_context(self._console.status(line))

    def _end(self, well: bool) -> None:
        self._live.close()
        if self._line and self._console.is_terminal:
            took_s = time.monotonic() - self._start_s
            mark = "done" if well else "failed"
            self._console.print(f"  {self._line}: {mark}, {took_s:.0f} s", markup=False)
        self._line = ""
