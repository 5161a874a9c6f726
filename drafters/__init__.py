"""Drafters: they propose what a model will say next, on the CPU, without a second model.

    drafter = make_drafter("suffix")
    session = drafter.open(prompt_ids)
    tree = session.propose(budget=16, max_depth=16)

The package is usable alone: it needs numpy and numba, no torch and no server. drafters.catalog
lists the drafters, drafters.base describes the life of a session, and drafters.tree what it
proposes. This module imports a submodule only when one of its names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drafters.base import Drafter as Drafter
    from drafters.base import DraftSession as DraftSession
    from drafters.base import SessionClosedError as SessionClosedError
    from drafters.catalog import DrafterSpec as DrafterSpec
    from drafters.catalog import Need as Need
    from drafters.catalog import make_drafter as make_drafter
    from drafters.tree import DraftTree as DraftTree

    DRAFTER_NAMES: tuple[str, ...]

_HOMES = {
    "DraftSession": "drafters.base",
    "DraftTree": "drafters.tree",
    "Drafter": "drafters.base",
    "DrafterSpec": "drafters.catalog",
    "Need": "drafters.catalog",
    "SessionClosedError": "drafters.base",
    "make_drafter": "drafters.catalog",
}


def __getattr__(name: str) -> Any:
    if name == "DRAFTER_NAMES":  # what a task may name; "off" makes no drafter at all
        from drafters.catalog import drafter_names

        return drafter_names()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
