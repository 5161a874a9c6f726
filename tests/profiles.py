"""How many examples property tests draw: few while you work, more in `make test`, most at night.

    pytest --hypothesis-profile check      make check
    pytest                                 make test
    pytest --hypothesis-profile nightly    make nightly

A test that says `@settings(max_examples=examples(1500))` draws 1,500 at night, a tenth of them in
`make test` and a thirtieth in `make check`, never fewer than 20. Those two draw the same examples
each time, so that what passed once passes again; `make nightly` looks for new ones.
"""

from __future__ import annotations

import time
from contextlib import suppress

from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

from tests.kept import kept_folder

SHARES = {"check": 1 / 30, "test": 1 / 10, "nightly": 1.0}


def register() -> None:
    """Make the profiles known and take `test`; the option --hypothesis-profile wins over it."""
    for name in SHARES:
        # A busy machine is no failing test: by no deadline, nor by examples that are drawn slowly.
        settings.register_profile(
            name,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize=name != "nightly",
        )
    settings.load_profile("test")
    # What it reads in our sources, 3 s a process: for all clones, and for a month, as edits add up.
    with suppress(OSError):
        set_hypothesis_home_dir(kept_folder("hypothesis", time.strftime("%Y-%m")))


def share() -> float:
    """The part of a nightly run's work that the current profile asks for."""
    return SHARES.get(settings.get_current_profile_name(), SHARES["test"])


def examples(nightly: int) -> int:
    """Examples of a test that draws `nightly` of them at night."""
    return min(nightly, max(20, round(nightly * share())))
