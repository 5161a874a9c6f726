"""Files, functions and parameter lists stay small enough to read.

Bounds: 500 lines a file, 70 lines a function (its docstring included, decorators not), 8 parameters
(`self` and `cls` not counted, nor a Triton kernel's: a launch passes each pointer, stride and
compile-time constant by itself). What is larger stands in tests/size_exceptions.txt with its
present figure, a line each: `kind name figure`; lines that begin with # say why it stays. That list
may only shrink: an entry that is no longer needed, or that is smaller than its line says, fails the
test.

    python tests/test_size.py --write

brings the list up to date: it lowers figures, drops entries, and follows what was moved to another
file or renamed in the same file without growing. It never adds an entry and never raises a figure.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("server", "drafters", "vocab_store", "loadtest")
LIST = Path(__file__).with_name("size_exceptions.txt")
BOUNDS = {"file": 500, "function": 70, "parameters": 8}

# (kind, name) -> lines or parameters. A name is a path, or path::Class.method.
Sizes = dict[tuple[str, str], int]


def _functions(
    node: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """(qualified name, function, whether it is a method), the ones inside functions too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", child, isinstance(node, ast.ClassDef)
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool) -> int:
    arguments = function.args
    told = [*arguments.posonlyargs, *arguments.args]
    own = bool(is_method and told and told[0].arg in ("self", "cls", "mcs"))
    return (
        len(told) - own + len(arguments.kwonlyargs) + (arguments.vararg is not None)
        + (arguments.kwarg is not None)
    )  # fmt: skip


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(d).startswith("triton.jit") for d in function.decorator_list)


def sizes_of(name: str, source: str) -> Sizes:
    """Every file, function and parameter list of one file that is over its bound."""
    found: Sizes = {("file", name): len(source.splitlines())}
    for function, node, is_method in _functions(ast.parse(source)):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        # The same name twice in one file (overloads, branches): the larger one counts.
        parameters = 0 if _is_kernel(node) else _parameters(node, is_method)
        for kind, figure in (("function", lines), ("parameters", parameters)):
            key = (kind, f"{name}::{function}")
            found[key] = max(figure, found.get(key, 0))
    return {key: figure for key, figure in found.items() if figure > BOUNDS[key[0]]}


def measure() -> Sizes:
    """`sizes_of` over every part of the project."""
    found: Sizes = {}
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            found |= sizes_of(name, path.read_text(encoding="utf-8"))
    return found


def _lines(comments: bool = False) -> list[str]:
    """The lines of the list that are comments, or the others."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("#") == comments]


def read_list() -> Sizes:
    """The exceptions. Of two lines for one name (a merge of two branches), the lower one holds."""
    listed: Sizes = {}
    for line in _lines():
        kind, name, figure = line.split()
        listed[kind, name] = min(int(figure), listed.get((kind, name), int(figure)))
    return listed


def _same_thing(old: str, new: str) -> bool:
    """Whether `new` may be what `old` was: moved with its last name, or renamed in its file."""
    old_path, _, old_function = old.partition("::")
    new_path, _, new_function = new.partition("::")
    if bool(old_function) != bool(new_function):
        return False
    if not old_function:
        return old_path.rpartition("/")[2] == new_path.rpartition("/")[2]
    return old_path == new_path or old_function.split(".")[-1] == new_function.split(".")[-1]


def shrink(listed: Sizes, found: Sizes) -> Sizes:
    """The list after `--write`: nothing new, nothing larger."""
    kept = {key: min(figure, listed[key]) for key, figure in found.items() if key in listed}
    gone = {key: figure for key, figure in listed.items() if key not in found}
    for key, figure in sorted(found.items()):
        if key in listed:
            continue
        moved = [
            other for other, before in gone.items()
            if other[0] == key[0] and before >= figure and _same_thing(other[1], key[1])
        ]  # fmt: skip
        if moved:
            kept[key] = figure
            del gone[min(moved, key=lambda other: gone[other])]
    return kept


def _text(sizes: Sizes) -> str:
    lines = [f"{kind} {name} {sizes[kind, name]}" for kind, name in sorted(sizes)]
    return "".join(f"{line}\n" for line in (*_lines(comments=True), *lines))


def test_files_functions_and_parameters_are_within_bounds() -> None:
    listed, found = read_list(), measure()
    problems = [
        f"{kind} {name}: {figure}, at most {max(BOUNDS[kind], listed.get((kind, name), 0))}"
        for (kind, name), figure in sorted(found.items())
        if figure > listed.get((kind, name), BOUNDS[kind])
    ]
    assert not problems, "too large; split it:\n" + "\n".join(problems)


def test_the_list_of_exceptions_only_shrinks() -> None:
    listed, found = read_list(), measure()
    problems = []
    for (kind, name), figure in sorted(listed.items()):
        now = found.get((kind, name))
        if now is None:
            problems.append(f"remove: {kind} {name} {figure}")
        elif now < figure:
            problems.append(f"change: {kind} {name} {figure} -> {now}")
    advice = "smaller than its line in tests/size_exceptions.txt says; python tests/test_size.py"
    assert not problems, f"{advice} --write:\n" + "\n".join(problems)
    names = Counter(tuple(line.split()[:2]) for line in _lines())
    twice = [name for name, times in names.items() if times > 1]
    assert not twice, f"named twice; python tests/test_size.py --write: {twice}"


def test_what_is_counted() -> None:
    body = "\n".join("        x = 1" for _ in range(70))
    many = ", ".join(f"p{i}" for i in range(9))
    source = f"class A:\n    def long(self):\n{body}\n    def wide(self, {many}): ...\n"
    assert sizes_of("a.py", source) == {
        ("function", "a.py::A.long"): 71,
        ("parameters", "a.py::A.wide"): 9,
    }
    assert sizes_of("a.py", f"def f(self, *, {many[:-4]}): ...\n") == {("parameters", "a.py::f"): 9}
    assert sizes_of("a.py", "x = 1\n" * 501) == {("file", "a.py"): 501}
    assert sizes_of("a.py", "x = 1\n" * 500) == {}


def test_write_lowers_and_follows_but_never_adds() -> None:
    listed = {("file", "a/x.py"): 600, ("function", "a/x.py::f"): 90, ("file", "a/y.py"): 510}
    assert shrink(listed, {("file", "a/x.py"): 700}) == {("file", "a/x.py"): 600}
    assert shrink(listed, {("file", "b/x.py"): 590}) == {("file", "b/x.py"): 590}
    assert shrink(listed, {("file", "b/x.py"): 601}) == {}
    assert shrink(listed, {("function", "b/z.py::K.f"): 80}) == {("function", "b/z.py::K.f"): 80}
    assert shrink(listed, {("function", "b/z.py::g"): 80, ("file", "new.py"): 501}) == {}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/test_size.py --write")
    over = measure()
    LIST.write_text(_text(shrink(read_list(), over)), encoding="utf-8")
    left = {key: figure for key, figure in over.items() if figure > read_list().get(key, 0)}
    sys.exit(f"still too large, split it:\n{_text(left)}" if left else 0)
