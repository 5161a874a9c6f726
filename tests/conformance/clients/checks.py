"""What the programs of this folder share. They run in an environment of their library's own, where
nothing of this project is installed: see ../client_libraries.py."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

BASE_URL = os.environ["BASE_URL"]
MODEL = os.environ["MODEL"]

_failed: list[str] = []


def check(name: str) -> Callable[[Callable[[], Any]], None]:
    """Run the decorated function now and print one line about it."""

    def decorate(function: Callable[[], Any]) -> None:
        try:
            result = function()
            if inspect.iscoroutine(result):
                asyncio.run(result)
            print("ok     ", name, flush=True)
        except Exception:
            _failed.append(name)
            print("FAILED ", name, flush=True)
            traceback.print_exc()

    return decorate


def finish() -> NoReturn:
    """End the program: 1 when a check failed."""
    sys.exit(1 if _failed else 0)
