"""How far a bulk run is: a bar on a terminal, a line now and then in a log. All on stderr."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from server.client.bulk import BulkOutcome

LINE_EVERY_S = 5.0


class BulkProgress:
    """Called with the outcome after each line; `close` prints the summary. A context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._task: Any = None
        self._started_s = self._told_s = time.monotonic()
        if self._console.is_terminal:
            self._bar = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("run", rate="")

    def __enter__(self) -> BulkProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, outcome: BulkOutcome) -> None:
        now_s = time.monotonic()
        rate = outcome.tally.num_tokens / max(1e-9, now_s - self._started_s)
        failed = f", {outcome.num_failed} failed" if outcome.num_failed else ""
        if self._bar is not None:
            self._bar.update(
                self._task,
                completed=outcome.num_done,
                total=outcome.num_lines,
                rate=f"{rate:.0f} tokens/s{failed}",
            )
        elif now_s - self._told_s >= LINE_EVERY_S:
            self._told_s = now_s
            self.say(f"{outcome.num_done} of {outcome.num_lines}{failed}, {rate:.0f} tokens/s")

    def say(self, line: str) -> None:
        """A line of its own."""
        self._console.print(line, markup=False, soft_wrap=True)

    def close(self, outcome: BulkOutcome) -> None:
        """End the bar and print the summary, if there is anything to sum up."""
        if self._bar is not None:
            self._bar.stop()
        if not outcome.num_done:
            return
        for line in outcome.summary():
            self.say(line)
