"""The command line as the tests of documents and of help see it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from server.commands.cli import COMMANDS, OLD_OPTIONS, build_app


@dataclass(frozen=True)
class Facts:
    """One command: its options (older names too), what values they take, and its example."""

    options: frozenset[str]
    types: dict[str, str]
    example: str


WORDS = sorted(f"tailor {command.words}" for command in COMMANDS)


@cache
def commands() -> dict[str, Facts]:
    """Every command by its words ("tailor tasks check"): asked for in tests, as it takes a second
    which collection need not."""
    app = build_app()
    found = {}
    for command in COMMANDS:
        sub = app
        for word in command.words.split():
            sub = sub[word]
        arguments = [argument for argument in sub.assemble_argument_collection() if argument.names]
        names = {name for argument in arguments for name in argument.names}
        older = OLD_OPTIONS.get(command.words, {})
        options = frozenset(n for n in {*names, *older, "--help"} if n.startswith("-"))
        types = {argument.names[0]: str(argument.hint) for argument in arguments}
        found[f"tailor {command.words}"] = Facts(options, types, command.example)
    return found
