"""Sizes, circles and repetition of server, drafters and vocab_store, a column a revision.

    python -m tests.size_table                  # the files as they are
    python -m tests.size_table dbd2087 HEAD     # committed states beside them

Prints a table in Markdown, then lines a folder. Lines of code have a token and are no docstring.
Circles are groups of modules that import each other when they are loaded, TYPE_CHECKING apart. A
repetition is a longest stretch of six equal lines or more in two places, without blank lines,
comments and imports.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.test_size import ROOT, sizes_of

PARTS = ("server", "drafters", "vocab_store")
RUN = 6


def sources(revision: str | None) -> dict[str, str]:
    """path -> text of every module; None: as the files are."""
    if revision is None:
        paths = (path for part in PARTS for path in (ROOT / part).rglob("*.py"))
        return {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in paths}

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout

    names = git("ls-tree", "-r", "--name-only", revision, *PARTS).splitlines()
    return {name: git("show", f"{revision}:{name}") for name in names if name.endswith(".py")}


def code_lines(text: str) -> int:
    """Lines with a token that is no comment, docstrings apart."""
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*blank, tokenize.ENDMARKER):
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def _imports(body: list[ast.stmt]) -> Iterator[str]:
    """What is imported when the module is loaded, as names of modules or of things in them."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from _imports([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _imports([*node.body, *node.orelse, *node.finalbody])


def circles(texts: Mapping[str, str]) -> int:
    """Groups of modules of which each imports all others, directly or not."""
    names = {p.removesuffix(".py").removesuffix("/__init__").replace("/", "."): p for p in texts}
    arrows = {
        name: {m for m in _imports(ast.parse(texts[path]).body) if m in names and m != name}
        for name, path in names.items()
    }

    def reached(start: str) -> set[str]:
        seen, todo = set[str](), list(arrows[start])
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += arrows[name]
        return seen

    reach = {name: reached(name) for name in names}
    own = {name for name in names if name in reach[name]}
    return len({frozenset(m for m in own if m in reach[n] and n in reach[m]) for n in own})


def repetitions(texts: Mapping[str, str]) -> int:
    """Pairs of places that share a longest stretch of RUN equal lines or more."""
    lines: list[tuple[str, str]] = []
    for path, text in sorted(texts.items()):
        tree = ast.parse(text)
        imports = {
            line
            for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }  # fmt: skip
        for number, line in enumerate(text.splitlines(), 1):
            plain = line.strip()
            if plain and number not in imports and not plain.startswith("#"):
                lines.append((path, plain))
        lines.append((path, f"\0{path}"))
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for start in range(len(lines) - RUN + 1):
        places[tuple(line for _, line in lines[start : start + RUN])].append(start)
    shared = {
        (a, b)
        for found in places.values()
        for i, a in enumerate(found)
        for b in found[i + 1 :]
        if b - a >= RUN
    }
    return sum((a - 1, b - 1) not in shared for a, b in shared)


def column(texts: Mapping[str, str]) -> dict[str, int]:
    """The figures of one state."""
    over = Counter(kind for path, text in texts.items() for kind, _ in sizes_of(path, text))
    return {
        "files": len(texts),
        "lines": sum(len(text.splitlines()) for text in texts.values()),
        "lines of code": sum(map(code_lines, texts.values())),
        "files over 500 lines": over["file"],
        "functions over 70 lines": over["function"],
        "functions over 8 parameters": over["parameters"],
        "import circles": circles(texts),
        f"repetitions of {RUN} lines and more": repetitions(texts),
    }


def main(revisions: list[str]) -> None:
    """Print the table."""
    states = {name: sources(name) for name in revisions} | {"now": sources(None)}
    columns = {name: column(texts) for name, texts in states.items()}
    folders: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(states, 0))
    for name, texts in states.items():
        for path, text in texts.items():
            folder = "/".join(Path(path).parts[:2]) if path.count("/") > 1 else path.split("/")[0]
            folders[folder][name] += len(text.splitlines())
    print(f"| | {' | '.join(states)} |\n{'|---' * (len(states) + 1)}|")
    for row in columns["now"]:
        print(f"| {row} | {' | '.join(f'{columns[name][row]:,}' for name in states)} |")
    for folder, found in sorted(folders.items()):
        print(f"| lines of {folder} | {' | '.join(f'{n:,}' for n in found.values())} |")


if __name__ == "__main__":
    main(sys.argv[1:])
