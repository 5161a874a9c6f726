"""Structured logs: one line an event, as JSON or for people, from every logger of the process.

    configure("json", "info")

Modules log through the standard library with fields in `extra`:

    log.info("request", extra={"request_id": "req-1", "status": 200})

A field cannot leave its line: control characters (line ends, ANSI sequences) are escaped. A
traceback shows code and never the values of variables: those may be prompts.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import Processor

LogFormat = Literal["console", "json"]
_Event = MutableMapping[str, Any]


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
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=before, processors=after)
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        if isinstance(old.formatter, structlog.stdlib.ProcessorFormatter):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # The server logs the same itself, or it is noise.
    logging.getLogger("uvicorn").setLevel(logging.WARNING if level == "info" else logging.NOTSET)


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
