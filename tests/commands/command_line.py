"""The command line as the tests of documents and of help see it."""

from __future__ import annotations

from dataclasses import dataclass

from server.commands.cli import COMMANDS, OLD_OPTIONS, build_app


@dataclass(frozen=True)
class Facts:
    """One command: its options (older names too) and the example of its help."""

    options: frozenset[str]
    example: str


def _facts() -> dict[str, Facts]:
    app = build_app()
    found = {}
    for command in COMMANDS:
        sub = app
        for word in command.words.split():
            sub = sub[word]
        names = {name for argument in sub.assemble_argument_collection() for name in argument.names}
        older = OLD_OPTIONS.get(command.words, {})
        options = frozenset(n for n in {*names, *older, "--help"} if n.startswith("-"))
        found[f"tailor {command.words}"] = Facts(options, command.example)
    return found


ALL = _facts()
"""Every command by its words ("tailor tasks check")."""
