"""Structured logs: one line an event, as JSON or for people, from every logger of the process.

    configure("json", "info")

Modules log through the standard library with fields in `extra`:

    log.info("request", extra={"request_id": "req-1", "status": 200})

A field cannot leave its line: control characters (line ends, ANSI sequences) are escaped. A
traceback shows code and never the values of variables: those may be prompts. Nobody need read what
is written: a pipe that is full loses lines, and the process goes on.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import Processor

LogFormat = Literal["console", "json"]
_Event = MutableMapping[str, Any]

PATIENCE_S = 0.5
"""How long a full pipe is waited for before its lines are dropped."""


def configure(
    format: LogFormat, level: str, *, engine: str = "", stream: TextIO | None = None
) -> None:
    """Send every logger of this process to `stream` (stderr), one line an event.

    level: debug, info, warning or error. engine: a field of each line of an engine's process.
    Calling it again replaces what was there.
    """
    stream = stream or sys.stderr

    def name_engine(_: Any, __: str, event: _Event) -> _Event:
        if engine:
            event["engine"] = engine
        return event

    before: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        name_engine,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    after: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if format == "json":
        after.append(structlog.processors.JSONRenderer(default=repr))
    else:
        after += [
            _printable,
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(),
                pad_event_to=0,
                exception_formatter=structlog.dev.plain_traceback,
                sort_keys=False,
            ),
        ]
    handler = _handler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=before, processors=after)
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        if isinstance(old.formatter, structlog.stdlib.ProcessorFormatter):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in ("uvicorn", "httpx"):  # the server logs the same itself, or it is noise
        logging.getLogger(name).setLevel(logging.WARNING if level == "info" else logging.NOTSET)


def _handler(stream: TextIO) -> logging.Handler:
    """Writes to a stream; to one that is a pipe without waiting for its reader."""
    try:
        number = stream.fileno()
        if stat.S_ISFIFO(os.fstat(number).st_mode):
            return _PipeHandler(number)
    except (OSError, ValueError):  # it has no descriptor, or there is no /proc
        pass
    return logging.StreamHandler(stream)


class _PipeHandler(logging.Handler):
    """Lines into a pipe. One that is full for PATIENCE_S loses lines until it is read again; then a
    line tells how many. A write would wait for ever, and the server with it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        # A description of its own: others of this pipe go on waiting.
        self._pipe = os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK)
        self._num_dropped = 0
        self._is_torn = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line, or drop it."""
        try:
            lines = [self.format(record)]
            if self._num_dropped:
                told = (
                    f"{self._num_dropped} lines before this one were dropped: nobody read the log"
                )
                fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
                lines.insert(0, self.format(logging.makeLogRecord({**fields, "msg": told})))
            start = "\n" if self._is_torn else ""
            is_written = self._write("".join([start, *(f"{line}\n" for line in lines)]).encode())
            self._num_dropped = 0 if is_written else self._num_dropped + 1
        except OSError:  # the reader is gone
            self._num_dropped += 1
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._pipe)
        super().close()

    def _write(self, data: bytes) -> bool:
        """False where there was no room for all of it."""
        view = memoryview(data)
        while view:
            patience_ms = 0 if self._num_dropped else round(1000 * PATIENCE_S)
            try:
                view = view[os.write(self._pipe, view) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._pipe, select.POLLOUT)
                if not poll.poll(patience_ms):
                    self._is_torn = len(view) < len(data) or self._is_torn
                    return False
        self._is_torn = False
        return True


def _printable(_: Any, __: str, event: _Event) -> _Event:
    """Escape control characters. JSON needs none of this: it is ASCII already."""
    for key, value in event.items():
        if not isinstance(value, str):
            continue
        if key == "exception":  # its lines stay lines, set apart from those of the log
            event[key] = "\n".join("    " + _escaped(line) for line in value.splitlines())
        else:
            event[key] = _escaped(value)
    return event


def _escaped(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
