"""Drafters: they propose what a model will say next, for free, on the CPU.

    drafter = make_drafter("suffix")
    session = drafter.open(prompt_ids)
    tree = session.propose(budget=16, max_depth=16)

Usable alone: needs numpy and numba, no torch and no server. See drafters.base for the life of a
session and drafters.tree for what it proposes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drafters.base import Drafter, DraftSession, SessionClosedError
from drafters.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DRAFTER_NAMES",
    "DraftSession",
    "DraftTree",
    "Drafter",
    "SessionClosedError",
    "make_drafter",
]

_CLASSES: Mapping[str, tuple[str, str]] = {
    "auto": ("drafters.auto.drafter", "AutoDrafter"),
    "grammys": ("drafters.published.grammys", "GrammysDrafter"),
    "mix": ("drafters.published.mix", "MixDrafter"),
    "prompt": ("drafters.published.prompt", "PromptDrafter"),
    "suffix": ("drafters.published.suffix", "SuffixDrafter"),
    "trie": ("drafters.published.trie", "TrieDrafter"),
}

DRAFTER_NAMES = ("off", *sorted(_CLASSES))
"""What a task may name. "off" makes no drafter at all."""


def make_drafter(name: str, **options: Any) -> Drafter:
    """The drafter called `name` with its options; the module is imported only now (numba).

    Raises ValueError for a name that is not in DRAFTER_NAMES, for "off" (which has no drafter:
    the caller runs the plain path), for an option the drafter does not have, and for a value out
    of range.
    """
    import importlib
    import inspect

    if name == "off":
        raise ValueError("'off' has no drafter: run the plain decode path instead")
    if name not in _CLASSES:
        raise ValueError(f"unknown drafter {name!r}; known: {', '.join(DRAFTER_NAMES)}")
    module, attribute = _CLASSES[name]
    factory = getattr(importlib.import_module(module), attribute)
    known = list(inspect.signature(factory).parameters)
    for option in options:
        if option not in known:
            raise ValueError(
                f"drafter {name!r} has no option {option!r}; it has: {', '.join(known) or 'none'}"
            )
    drafter: Drafter = factory(**options)
    return drafter
