"""Marks of tests that need a package which not every environment has.

It is asked for and not imported: every worker of a parallel run reads all files, and most of them
run none of these tests.
"""

from __future__ import annotations

import importlib.util

import pytest


def needs(package: str) -> pytest.MarkDecorator:
    """Skips where a package is not installed."""
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"{package} is not installed")
