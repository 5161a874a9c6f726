"""README and docs are true: commands exist, files are valid, the reference is the code's.

    TAILOR_WRITE_README=1 python -m pytest tests/setup/test_readme.py

writes the configuration reference anew.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from server.commands.cli import parse
from server.config import ServerConfig, TaskConfig, load_server_config, load_task
from server.config.cluster import ClusterConfig
from server.config.yaml_file import MemorySize, read_yaml, section_of, validate
from tests.commands.command_line import known
from tests.setup import pages

ROOT = pages.ROOT
CONFIGURATION = pages.DOCS / "configuration.md"
BEGIN, END = "<!-- reference:begin", "<!-- reference:end -->"


# --- the configuration reference ---


def _shown(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None or isinstance(value, BaseModel) or value == "":
        return ""
    if isinstance(value, MemorySize):
        amount = f"{(value.num_bytes or 0) >> 20}MiB"
        return f"`{value.fraction if value.num_bytes is None else amount}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`" if value else ""
    return f"`{value}`"


_MOST_TOLD = 1000


def _bounds(field: Any) -> str:
    """What is allowed: " (1 to 256)", " (at least 16)", " (auto or none)" or "". Bounds that keep
    out only what nobody means (0, 1, above a thousand) are left to the error."""
    limits = {
        name: getattr(item, name)
        for item in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if getattr(item, name, None) is not None
    }
    if max(limits.get("le", 0), limits.get("lt", 0)) > _MOST_TOLD:
        limits = {"ge": limits["ge"]} if limits.get("ge", 0) > 1 else {}
    begin = f"above {limits['gt']}" if "gt" in limits else str(limits.get("ge", ""))
    end = f"below {limits['lt']}" if "lt" in limits else str(limits.get("le", ""))
    told = f"{begin} to {end}" if begin and end else end
    if begin and not end:
        told = begin if "gt" in limits else f"at least {begin}"
    choices = [str(c) for c in get_args(field.annotation) if isinstance(c, str | int)]
    for argument in get_args(field.annotation):
        choices += [c for c in get_args(argument) if isinstance(c, str)]
    if choices and bool in get_args(field.annotation):
        choices = ["true", "false", *choices]
    if choices:
        told = " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
    return f" ({told})" if told else ""


def _rows(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inner = section_of(field.annotation)
        many = "tuple" in str(field.annotation)
        named = "Mapping" in str(field.annotation)
        if inner is not None:
            if field.description:
                yield f"| `{key}{'.NAME' * named}` | | {field.description} |"
            if not named:  # what stands by name has the keys of another section, which it names
                yield from _rows(inner, f"{key}{'[]' * many}.")
            continue
        default = field.get_default(call_default_factory=True, validated_data={})
        told = f"{field.description or ''}{_bounds(field)}".strip()
        yield f"| `{key}` | {_shown(default)} | {told} |"


def _reference() -> str:
    parts = []
    for title, model in (
        ("server.yaml", ServerConfig),
        ("a task file", TaskConfig),
        ("cluster.yaml", ClusterConfig),
    ):
        rows = "\n".join(_rows(model))
        parts.append(f"Keys of {title}:\n\n| key | default | |\n|---|---|---|\n{rows}")
    return "\n\n".join(parts)


def test_configuration_reference_is_the_code_s() -> None:
    text = CONFIGURATION.read_text(encoding="utf-8")
    begin = text.index("\n", text.index(BEGIN)) + 1
    end = text.index(END)
    expected = f"\n{_reference()}\n\n"
    if os.environ.get("TAILOR_WRITE_README"):
        CONFIGURATION.write_text(text[:begin] + expected + text[end:], encoding="utf-8")
        return
    assert text[begin:end] == expected, "run this test once with TAILOR_WRITE_README=1"


def test_every_environment_variable_is_in_the_reference() -> None:
    """Those of who builds wheels (TAILOR_WHEEL_TARGETS, _MACHINE) stand in setup.py."""
    table = CONFIGURATION.read_text(encoding="utf-8").split("## Environment variables")[1]
    told = set(re.findall(r"^\| `(TAILOR_\w+)`", table, re.MULTILINE))
    code = [p for top in ("server", "drafters", "vocab_store") for p in (ROOT / top).rglob("*.py")]
    read = {name for path in code for name in re.findall(r"TAILOR_[A-Z]\w+", path.read_text())}
    assert told == {name for name in read if not name.startswith("TAILOR_WHEEL_")} | {
        "TAILOR_WHEEL_DIR"
    }


def test_every_key_says_what_it_is() -> None:
    def bare(model: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            inner = section_of(field.annotation)
            if inner is not None:
                assert inner.__doc__
                yield from bare(inner, f"{prefix}{name}.")
            elif not field.description and not prefix.startswith("sampling."):
                yield prefix + name

    known = {  # told by their names and by the sections' docstrings
        "description", "limits.max_tokens", "limits.max_prompt_tokens", "limits.max_prompts",
        "limits.max_choices", "limits.max_logprobs", "speculation.context.after",
        "speculation.context.before",
    }  # fmt: skip
    assert set(bare(ServerConfig, "")) == set(bare(ClusterConfig, "")) == set()
    assert set(bare(TaskConfig, "")) <= known


# --- commands and options ---


def test_the_readme_is_short_and_shows_a_picture_first() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert any(line.startswith("![") for line in lines[:15])


def test_every_command_is_in_the_documents() -> None:
    page = (ROOT / "docs/commands.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert set(re.findall(r"`(tailor [a-z ]+)`", page)) == set(known())


def test_commands_and_options_of_the_documents_exist() -> None:
    quoted = re.findall(r"`(tailor [^`]+)`", pages.text())
    assert len(quoted) >= 5
    for line in quoted:
        words = shlex.split(line)
        found = [c for c in known() if line.startswith(c)]
        assert found, line
        options = known()[max(found, key=len)].options
        assert all(w.split("=")[0] in options for w in words if w.startswith("--")), line
    for option in re.findall(r"`(--[a-z-]+)[^`]*`", pages.text()):
        assert any(option in c.options for c in known().values()), option


def test_commands_in_blocks_parse() -> None:
    lines = re.findall(r"^(?:    )?tailor (.*)$", pages.text(), re.M)
    assert len(lines) >= 4
    for line in lines:
        assert callable(parse(shlex.split(line))), line


def test_make_targets_of_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)|`make (\w+)`", pages.text(), re.M):
        assert re.search(rf"^{''.join(target)}:", makefile, re.M), target


def test_constraints_hold_every_dependency() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        re.split(r"==", line)[0].lower().replace("_", "-")
        for name in ("constraints.txt", "constraints-triton.txt")
        for line in (ROOT / name).read_text().splitlines()
        if "==" in line
    }
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {re.split(r"[<>=;\[ ]", w)[0].lower().replace("_", "-") for w in wanted}
    assert names <= pinned, names - pinned
    assert project["requires-python"] == ">=3.11"


def test_every_pin_takes_the_oldest_python() -> None:
    """Debian 12 has Python 3.11.2: pins are chosen on a newer one, where pip does not say so."""
    from importlib.metadata import distributions

    from packaging.specifiers import SpecifierSet

    pinned = set((ROOT / "constraints.txt").read_text().splitlines())
    asked = {
        pin: found.metadata["Requires-Python"] or ""
        for found in distributions()
        if (pin := f"{found.name.lower().replace('_', '-')}=={found.version}") in pinned
    }
    assert len(asked) > 50
    assert [pin for pin, python in asked.items() if "3.11.0" not in SpecifierSet(python)] == []


def test_task_example_is_a_task(tmp_path: Path) -> None:
    blocks = pages.blocks("yaml")
    assert blocks
    for i, block in enumerate(blocks):
        file = tmp_path / f"task-{i}.yaml"
        file.write_text(block)
        if block.startswith("# server.yaml\n"):
            load_server_config(file)
        elif block.startswith("# cluster.yaml\n"):
            validate(ClusterConfig, read_yaml(file))
        else:
            load_task(file)


@pytest.mark.parametrize("word", ["TODO", "FIXME", "/work/", "/root/", "../shared", "pypi.org"])
def test_documents_have_no_leftovers(word: str) -> None:
    assert word not in pages.text()
