"""The command line: as tests run it, and as those of documents and of help see it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from server.commands.cli import COMMANDS, OLD_OPTIONS, build_app


class Told(NamedTuple):
    """What a command printed."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        """The JSON line that it ended in."""
        return json.loads(self.out.splitlines()[-1])


Tailor = Callable[..., Told]
"""The fixture `tailor`: its words, which are made text, and the exit status that it must have."""


@dataclass(frozen=True)
class Facts:
    """One command: its options (older names too), and what values they take."""

    options: frozenset[str]
    types: dict[str, str]


@cache
def known() -> dict[str, Facts]:
    """Every command by its words ("tailor tasks check"). All modules of commands are imported."""
    app, found = build_app(), {}
    for command in COMMANDS:
        sub = app
        for word in command.words.split():
            sub = sub[word]
        arguments = sub.assemble_argument_collection()
        names = {name for argument in arguments for name in argument.names}
        older = OLD_OPTIONS.get(command.words, {})
        options = frozenset(n for n in {*names, *older, "--help"} if n.startswith("-"))
        types = {argument.names[0]: str(argument.hint) for argument in arguments if argument.names}
        found[f"tailor {command.words}"] = Facts(options, types)
    return found
