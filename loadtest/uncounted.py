"""`tailor` with metrics that count nothing: what loadtest.overhead compares the real one with.

    python -m loadtest.uncounted serve --model smollm2-135m-instruct

The server is the same but for what it books: /metrics stays at 0 and the page shows nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from server.commands import cli
from server.metrics.series import Metrics

STEPS = ("count_step", "count_vocabulary", "engine_stats")


def nothing(*_: Any, **__: Any) -> None:
    """Book nothing."""


def stop_counting() -> None:
    """From now on this process books no figure."""
    for kind, name in ((Counter, "inc"), (Gauge, "set"), (Histogram, "observe")):
        setattr(kind, name, nothing)
    for name in STEPS:
        setattr(Metrics, name, nothing)


if __name__ == "__main__":
    stop_counting()
    sys.exit(cli.main())
