"""The documentation's site builds without a broken link, and its pages name what is there."""

from __future__ import annotations

import contextlib
import csv
import importlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import CoercionError, MissingArgumentError

from server import __version__
from server.commands.cli import COMMANDS, build_app
from tests.setup.pages import DOCS, GENERATED, ROOT, every_page
from tests.setup.pages import text as pages_text

SETTINGS = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]


def _entries(nav: list[object]) -> Iterator[str]:
    for entry in nav:
        assert isinstance(entry, dict)
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from _entries(value)


def test_the_navigation_has_every_page_once() -> None:
    entries = list(_entries(SETTINGS["nav"]))
    pages = [page.relative_to(DOCS).as_posix() for page in every_page() if DOCS in page.parents]
    assert sorted(entries) == sorted([*pages, GENERATED]), "zensical.toml: nav"
    assert SETTINGS["copyright"].startswith(f"Tailor {__version__},")


def test_links_pictures_and_data_exist() -> None:
    """Also what the site's own check leaves out: pictures, data files, README."""
    for page in every_page():
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not target.startswith("#"):
                assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"


def test_no_paragraph_behind_code_begins_in_lower_case() -> None:
    """A sentence that goes on behind a block of code is read as a fragment."""
    for page in every_page():
        text = page.read_text(encoding="utf-8")
        found = re.findall(r"^(?:```|    \S.*)\n\n([a-z].{0,30})", text, re.MULTILINE)
        assert not found, f"{page.name}: {found}"


def test_every_table_of_data_is_linked_and_is_a_table() -> None:
    told = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "benchmarks").glob("*.md"))
    tables = sorted((DOCS / "benchmarks" / "data").glob("*.csv"))
    assert len(tables) >= 10
    for table in tables:
        assert f"(data/{table.name})" in told, table.name
        with table.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.reader(lines))
        assert len(rows) > 10 and {len(row) for row in rows} == {len(rows[0])}, table.name


def test_what_the_code_cites_of_the_design_is_there() -> None:
    numbers = set(re.findall(r"^#+ ([\d.]+?)\.? ", (DOCS / "DESIGN.md").read_text(), re.M))
    cited = 0
    for part in ("server", "drafters", "vocab_store", "loadtest", "tests"):
        for path in (ROOT / part).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for number in re.findall(r"docs/DESIGN\.md (?:section )?(\d[\d.]*\d|\d)", text):
                assert number in numbers, f"{path}: section {number}"
                cited += 1
    assert cited >= 8


def test_files_named_by_any_page_exist() -> None:
    places = "server|drafters|vocab_store|configs|tests|loadtest|docker"
    for page in every_page():
        for name in re.findall(rf"`((?:{places})/[\w./-]+)`", page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_load_tests_named_by_followed_pages_exist_with_their_options() -> None:
    named = re.findall(r"python -m (loadtest\.\w+)([^`\n\\]*)", pages_text())
    assert len(named) >= 12
    for module, words in named:
        app = getattr(importlib.import_module(module), "app", None)
        if app is None:  # its options are argparse's still
            continue
        # A page may leave required options out and write a name for a value.
        with contextlib.suppress(MissingArgumentError, CoercionError):
            app.parse_args(
                shlex.split(words.replace("...", "")), exit_on_error=False, print_error=False
            )


def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    program = shutil.which("zensical", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("the extra docs is not installed")
    shutil.copytree(DOCS, tmp_path / "docs")
    # One link is broken, by which the build tells that it looks.
    told = f"{build_app().generate_docs()}\n\n[gone](gone.md)\n"
    (tmp_path / "docs" / GENERATED).write_text(told, encoding="utf-8")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    done = subprocess.run(
        [program, "build", "--clean", "--strict"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    told = done.stdout + done.stderr
    assert done.returncode != 0 and "page does not exist" in told and GENERATED in told
    assert "\n1 issue found" in told, told
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert {"index.html", "api.html", "DESIGN.html"} <= {page.name for page in pages}
    told = (tmp_path / "site" / "command-line.html").read_text(encoding="utf-8")
    assert all(f"tailor {command.words}" in told for command in COMMANDS)
    for page in pages:  # the site asks no other host for anything
        asked = re.findall(r'(?:src|href)="(https?://[^"]+)"[^>]*>', page.read_text())
        hosts = {url.split("/")[2] for url in asked}
        assert not hosts & {"fonts.googleapis.com", "fonts.gstatic.com"}, page.name
