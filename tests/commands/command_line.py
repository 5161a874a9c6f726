"""The command line as the tests of documents and of help see it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from server.commands.cli import COMMANDS, OLD_OPTIONS, build_app


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
