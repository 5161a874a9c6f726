"""Steps of one process in turns: what load tests that time a runner's steps share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TypeVar

from loadtest.options import add_result_options

T = TypeVar("T")


def in_turns(runs: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each run gave, a value a round. In a round each runs once, so that a slow minute of the
    machine hits all. Two rounds come before: they compile, and touch what was not touched yet."""
    gave: dict[str, list[T]] = {name: [] for name in runs}
    for number in range(rounds + 2):
        for name, run in runs.items():
            value = run()
            if number >= 2:
                gave[name].append(value)
    return gave


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """The model, the step and how often it runs, and `add_result_options`."""
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--keys", type=int, default=128, help="positions before the step")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=None)
    add_result_options(parser)
