"""Data sets derived from a git repository on this disk, for tables that no default was fitted on.

    python -m loadtest.repository_sets commits --repository REPO -o DIR/NAME

Writes DIR/NAME/train.jsonl and test.jsonl, lines of {"prompt", "completion"}, for replays:

    commits     a change as a diff -> its message; the test part is the newest
    docstrings  a Python function without its docstring -> the docstring
    manifests   a YAML document -> the same as indented JSON

Mind the repository's licence: what is written is its text. Each text stands in one part only, and
the examples of one folder (docstrings: of one file) do as well. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

Example = tuple[str, str, str]
"""(group, prompt, completion): a group goes into one part."""

MAX_PROMPT, MIN_COMPLETION, MAX_COMPLETION = 2500, 40, 1600  # characters
BOTS = ("bot", "robot")


def _git(repository: Path, *arguments: str) -> str:
    """What git prints, up to where it fails: a partial clone lacks some of its files. Raises
    OSError where it prints nothing."""
    done = subprocess.run(
        ["git", "-C", str(repository), *arguments], capture_output=True, check=False
    )
    if done.returncode and not done.stdout:
        raise OSError(f"git {arguments[0]}: {done.stderr.decode('utf-8', 'replace').strip()}")
    return done.stdout.decode("utf-8", "replace")


def _files(repository: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(path, text) of the newest commit's files."""
    names = _git(repository, "ls-tree", "-r", "-z", "--name-only", "HEAD").split("\0")
    for name in sorted(name for name in names if name.endswith(suffixes)):
        with contextlib.suppress(OSError):
            yield name, _git(repository, "show", f"HEAD:{name}")


def commits(repository: Path) -> Iterator[Example]:
    """Oldest first, of people; each is its own group."""
    form = "%x00%H%x01%an%x01%B%x01"
    told = _git(
        repository, "log", "--no-merges", "--max-count=4000", "-p", "-U1", f"--format={form}",
        "--diff-filter=AM", "--", "*.py", "*.ts", "*.go", "*.rs", "*.md", ":!*CHANGELOG*",
    )  # fmt: skip
    for part in reversed(told.split("\0")[1:]):
        number, author, message, diff = part.split("\1", 3)
        if any(word in BOTS for word in author.lower().split()):
            continue
        shown = "\n".join(line[:200] for line in diff.strip().splitlines())[:1800]
        if shown:
            yield (
                number,
                f"Write the commit message of this change.\n\n{shown}\n\nMessage:\n",
                (message.strip()),
            )


def docstrings(repository: Path) -> Iterator[Example]:
    """Of the functions of every Python file."""
    for name, text in _files(repository, (".py",)):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            told = ast.get_docstring(node)
            if not told or len(node.body) < 2:
                continue
            head = lines[node.lineno - 1 : node.body[0].lineno - 1]
            body = lines[node.body[1].lineno - 1 : node.end_lineno]
            source = "\n".join([*head, *body])[:1500]
            yield name, f"Write the docstring of this function.\n\n{source}\n\nDocstring:\n", told


def manifests(repository: Path) -> Iterator[Example]:
    """Of every document of the YAML files; a group is the first two folders of the path."""
    import yaml

    for name, text in _files(repository, (".yaml", ".yml")):
        for document in text.split("\n---\n"):
            try:
                body = json.dumps(yaml.safe_load(document), indent=2)
            except (yaml.YAMLError, TypeError, ValueError):
                continue
            group = "/".join(name.split("/")[:2])
            yield group, f"Convert this YAML to JSON.\n\n{document.strip()}\n\nJSON:\n", body


KINDS: dict[str, Callable[[Path], Iterator[Example]]] = {
    "commits": commits,
    "docstrings": docstrings,
    "manifests": manifests,
}


def parts(
    examples: Sequence[Example], num_test: int, *, in_turn: bool
) -> tuple[list[Example], list[Example]]:
    """(train, test). in_turn: the last are the test; else whole groups, by a hash of their name."""
    usable, seen = [], set()
    for example in examples:
        _, prompt, completion = example
        if prompt in seen or not MIN_COMPLETION <= len(completion) <= MAX_COMPLETION:
            continue
        if len(prompt) <= MAX_PROMPT:
            seen.add(prompt)
            usable.append(example)
    if in_turn:
        return usable[:-num_test], usable[-num_test:]
    groups: dict[str, list[Example]] = {}
    for example in usable:
        groups.setdefault(example[0], []).append(example)
    train: list[Example] = []
    test: list[Example] = []
    for name in sorted(groups, key=lambda name: hashlib.sha256(name.encode()).digest()):
        (test if len(test) < num_test else train).extend(groups[name])
    return train, test[:num_test]


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=sorted(KINDS))
    parser.add_argument("--repository", type=Path, required=True, nargs="+", help="git folders")
    parser.add_argument("--test", type=int, default=300, help="test examples")
    parser.add_argument("--train", type=int, default=2000, help="most train examples, the last")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the set's folder")
    options = parser.parse_args(argv)
    try:
        examples = [e for path in options.repository for e in KINDS[options.what](path)]
    except OSError as error:
        parser.error(str(error))
    train, test = parts(examples, options.test, in_turn=options.what == "commits")
    options.output.mkdir(parents=True, exist_ok=True)
    for split, chosen in (("train", train[-options.train :]), ("test", test)):
        lines = [json.dumps({"prompt": p, "completion": c}) + "\n" for _, p, c in chosen]
        (options.output / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    sizes = {"train": min(len(train), options.train), "test": len(test)}
    print(json.dumps({"tool": "repository_sets", "what": options.what, **sizes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
