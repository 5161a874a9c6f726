"""The direction of imports (docs/DESIGN.md section 3), read from source and tried in a process."""

from __future__ import annotations

import ast
import sys
from collections.abc import Container, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.processes import run_python

ROOT = Path(__file__).parents[1]
OURS = ("server", "drafters", "vocab_store")
EVERYONE = {"server.types", "server.errors", "server.config"}
# Names and options of drafters: of the standard library alone, so that all who tell them can.
CATALOG = {"drafters.catalog", "drafters.options"}
FILES = {"drafters.atomic_file", "drafters.json_text"}  # of the standard library alone: for all

# What `tailor tasks tune` and its parts may import.
TUNE = {
    "server",
    "server.config",
    "server.datasets",
    "server.engine",
    "server.errors",
    "server.commands.options",
    "server.commands.record",
    "server.commands.quality",
    "server.commands.tune_choice",
    "server.commands.tune_data",
    "server.token_bytes",
    "server.types",
    "drafters",
    "vocab_store",
}

# What each part may import of ours, beside itself. The longest prefix decides. None: anything.
ALLOWED: dict[str, set[str] | None] = {
    "drafters": set(),
    "vocab_store": FILES,
    "server": set(),
    "server.types": set(),
    "server.errors": set(),
    "server.config": {"server.errors", "server.types", *CATALOG},
    "server.channel": {"server.types"},
    "server.metrics": {"server.types", "server.errors", "server.config"},
    "server.logs": set(),
    "server.token_bytes": {"drafters.array_file", "server.errors", "server.types"},
    "server.grammar_text": {"server.types"},
    "server.client": {*FILES, "server.datasets", "server.errors"},
    "server.api": {
        *EVERYONE,
        *CATALOG,
        "server",
        "server.machine",
        "server.metrics",
        "server.channel",
        "server.token_bytes",
        "server.grammar_text",
    },
    "server.engine": {
        *EVERYONE,
        "server.channel",
        "server.grammar_text",
        "server.machine",
        "server.token_bytes",
        "drafters",
        "vocab_store",
    },
    "server.machine": set(),
    "server.machine_code": {"drafters.library", "drafters.target", "server.machine"},
    "server.model": {
        *EVERYONE,
        "server.machine",
        "server.engine.batch",
        *FILES,
        "drafters.array_file",
        "drafters.jit",
        "drafters.ahead",
        "drafters.library",
        "drafters.target",
        "vocab_store",
    },
    "server.training": {*FILES, "server.errors", "server.model", "vocab_store"},
    "server.wiring": None,
    "server.fleet": None,
    # The policies of a fleet, and what a request needs of it, know nothing of how it is run.
    "server.fleet.scaling": {"server.config", "server.types"},
    "server.fleet.routing": {"server.fleet.scaling"},
    "server.fleet.desk": {"server.types"},
    "server.fleet.budgets": {"server.api.keys"},
    "server.fleet.changes": {
        "server.api.shapes",
        "server.api.admin",
        "server.config",
        "server.errors",
        "server.types",
    },
    "server.fleet.replica": {
        *EVERYONE,
        "server.api.engines",
        "server.channel",
        "server.fleet.scaling",
        "server.metrics",
    },
    "server.fleet.far_engine": {
        *EVERYONE,
        "server.channel",
        "server.fleet.desk",
        "server.fleet.replica",
        "server.fleet.routing",
    },
    "server.wiring.task_set": {
        "server.api.shapes",
        "server.config",
        "server.errors",
        "server.datasets",
        "drafters",
        "vocab_store",
    },
    "server.datasets": {*FILES, "server.errors", "server.model.families", "server.token_bytes"},
    "server.commands.tune": TUNE,
    "server.commands.tune_choice": TUNE,
    "server.commands.tune_data": TUNE,
    "server.commands": None,
}

# What those that may import anything may not: it is above them.
ABOVE: dict[str, tuple[str, ...]] = {
    "server.wiring": ("server.fleet", "server.commands"),
    "server.fleet": ("server.commands",),
}

# What each part may never import from outside.
FORBIDDEN: dict[str, set[str]] = {
    "drafters": {"torch", "transformers", "fastapi", "starlette", "tokenizers", "pydantic"},
    "vocab_store": {"torch", "transformers", "fastapi", "starlette", "pydantic"},
    "server.types": {"torch", "numpy", "fastapi", "pydantic"},
    "server.config": {"torch", "transformers", "fastapi", "starlette"},
    "server.channel": {"torch", "transformers", "fastapi", "starlette"},
    "server.api": {"torch", "transformers", "accelerate", "safetensors"},
    "server.client": {"torch", "transformers", "fastapi", "starlette", "numpy", "tokenizers"},
    "server.engine": {"torch", "transformers", "fastapi", "starlette", "uvicorn", "tokenizers"},
    "server.model": {"fastapi", "starlette", "uvicorn"},
    "server.training": {"fastapi", "starlette", "uvicorn"},
}

# drafters and vocab_store stand without the server: beside the standard library, only these.
LIBRARIES = {"drafters": {"numpy", "numba", "llvmlite"}, "vocab_store": {"numpy", "drafters"}}


def _modules() -> Iterator[tuple[str, Path]]:
    for top in OURS:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@cache
def _imports(path: Path) -> tuple[tuple[str, int, bool], ...]:
    """(imported module, line, whether at module level); imports for type checkers count too."""
    return tuple(_imported(ast.parse(path.read_text(encoding="utf-8")), path, top=True))


def _imported(parent: ast.AST, path: Path, *, top: bool) -> Iterator[tuple[str, int, bool]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.expr):
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            name = node.module or ""
            if name in OURS or any(name.startswith(f"{o}.") for o in OURS):
                for alias in node.names:
                    full = f"{name}.{alias.name}"
                    is_module = (ROOT / Path(*full.split("."))).with_suffix(".py").is_file() or (
                        ROOT / Path(*full.split("."))
                    ).is_dir()
                    yield (full if is_module else name), node.lineno, top
            else:
                yield name, node.lineno, top
        else:
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from _imported(node, path, top=top and not is_function)


def _part(module: str, table: Container[str]) -> str | None:
    """The longest beginning of a module's name that is in a table."""
    while module:
        if module in table:
            return module
        module = module.rpartition(".")[0]
    return None


def _is_ours(name: str) -> bool:
    return name.split(".")[0] in OURS


def _wrong(module: str, path: Path) -> Iterator[str]:
    """What a module imports though its part may not."""
    part = _part(module, ALLOWED)
    assert part is not None
    allowed = ALLOWED[part]
    if part == "server" and module != "server":
        pytest.fail(f"{path} is a new part of the server: say in this test what it may import")
    forbidden = FORBIDDEN.get(_part(module, FORBIDDEN) or "", set())
    for name, line, _ in _imports(path):
        if not _is_ours(name):
            is_right = name.split(".")[0] not in forbidden
        elif allowed is None:
            is_right = not name.startswith(ABOVE.get(part, ()))
        elif name == part or name.startswith(f"{part}."):
            is_right = True
        else:
            inner = tuple(f"{other}." for other in allowed if other != "server")
            is_right = name in allowed or name.startswith(inner)
        if not is_right:
            yield f"{path.relative_to(ROOT)}:{line}: {part} may not import {name}"


def test_imports_point_one_way() -> None:
    problems = [problem for module, path in _modules() for problem in _wrong(module, path)]
    assert not problems, "\n".join(problems)


def test_imports_go_in_no_circle() -> None:
    modules = dict(_modules())
    arrows = {
        module: {name for name, *_ in _imports(path) if name in modules and name != module}
        for module, path in modules.items()
    }
    TopologicalSorter(arrows).prepare()  # raises CycleError, which names the modules


@pytest.mark.parametrize("package", sorted(LIBRARIES))
def test_drafters_and_vocab_store_need_little(package: str) -> None:
    problems = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for module, path in _modules()
        if module.split(".")[0] == package
        for name, line, top in _imports(path)
        if top
        and name.split(".")[0] not in sys.stdlib_module_names | LIBRARIES[package] | {package}
    ]
    assert not problems, "\n".join(problems)


KNOW_RAY = {f"server.fleet.{name}" for name in ("app", "local", "task_router")}


def test_ray_is_known_to_three_modules_of_the_fleet() -> None:
    users = {
        module
        for module, path in _modules()
        for name, _, _ in _imports(path)
        if name.split(".")[0] == "ray"
    }
    assert users == KNOW_RAY


def test_no_module_is_called_utils() -> None:
    names = {module.rpartition(".")[2] for module, _ in _modules()}
    assert not names & {"utils", "util", "helpers", "helper", "common", "manager", "misc"}


@pytest.mark.parametrize(
    "steps",
    [
        [
            (("vocab_store",), ("torch", "transformers", "server", "fastapi", "numba")),
            (
                ("drafters.corpus_file", "server.model.catalog"),
                ("numba", "torch", "transformers", "huggingface_hub"),
            ),
            (("server.wiring.engine",), ("torch", "transformers", "fastapi", "pydantic", "yaml")),
            (("drafters",), ("torch", "transformers", "fastapi", "pydantic")),
            (("server.engine", "server.wiring"), ("torch", "transformers", "fastapi")),
        ],
        [
            (("drafters.catalog", "drafters.atomic_file"), ("numpy", "numba", "pydantic")),
            (
                ("server.commands.cli", "server.commands.fleet"),
                ("torch", "transformers", "fastapi", "numpy", "ray"),
            ),
            (("server.fleet.routing",), ("ray", "fastapi", "torch")),
            (("server.api",), ("torch", "transformers", "server.engine", "numba")),
        ],
    ],
    ids=["engine", "api"],
)
def test_importing_pulls_in_no_more(
    steps: list[tuple[tuple[str, ...], tuple[str, ...]]],
) -> None:
    """Import every module of the parts in a fresh interpreter, one step behind the other, and look
    after each at what has come along; the parts that bring least come first."""
    named = [([m for m, _ in _modules() if _part(m, parts)], absent) for parts, absent in steps]
    assert all(names for names, _ in named)
    code = (
        "import importlib, sys\n"
        f"for names, absent in {named!r}:\n"
        "    for name in names: importlib.import_module(name)\n"
        "    print([m for m in absent if m in sys.modules])\n"
    )
    assert run_python("-c", code).splitlines() == ["[]"] * len(steps)
