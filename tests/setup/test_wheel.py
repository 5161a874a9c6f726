"""The wheel, built and installed as a user does it, serves where no compiler is.

Its dependencies are those of the environment that runs the test, less numba and llvmlite: fetching
them again would take minutes and say nothing about the wheel.
"""

from __future__ import annotations

import os
import shutil
import signal
import site
import subprocess
import sys
import urllib.request
import venv
import zipfile
from pathlib import Path

import psutil
import pytest

from drafters.target import chosen
from server.api.dashboard import PAGE_PATHS
from server.machine_code import PACKAGES, jobs_of
from tests.processes import Running
from tests.setup.test_first_minutes import TASKS

ROOT = Path(__file__).parents[2]
_NO_COMPILER = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "llvmlite", "ziglang"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Without())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With code for this CPU alone, which the user's cache has; `make wheel` makes others', too.

    Made by this environment's numba and setuptools: a build apart from it would fetch them first.
    """
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in "LICENSE README.md pyproject.toml setup.py build_backend.py".split():
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "_code", "*.egg-info")
    for name in ("server", "drafters", "vocab_store", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    made = subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)],
        env={**os.environ, "TAILOR_WHEEL_TARGETS": chosen().name}, capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-3000:]
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel, and no compiler."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    libraries = next((folder / "lib").glob("python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [*pip, "--python", str(python), "install", "--no-deps", "--no-compile", str(wheel)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (libraries / "sitecustomize.py").write_text(_NO_COMPILER)
    others = [p for p in sys.path if p.endswith("site-packages")] or site.getsitepackages()
    (libraries / "z_others.pth").write_text("\n".join(others))
    return python


@pytest.mark.slow
def test_a_wheel_has_its_machine_code_and_what_the_package_reads_beside_it(wheel: Path) -> None:
    trust = "drafters/auto/default_trust.json"
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        assert file.read(trust) == (ROOT / trust).read_bytes()
    for job in jobs_of(chosen()):
        assert f"{job.package.replace('.', '/')}/_code/{job.target}.so" in names
    assert "drafters/_code/door.so" in names
    assert "-py3-none-manylinux" in wheel.name
    assert {job.package for job in jobs_of(chosen())} == set(PACKAGES)
    assert wheel.stat().st_size < 8 << 20


@pytest.mark.slow
def test_it_serves_its_tasks_and_page_in_an_environment_without_a_compiler(
    installed: Path, tmp_path: Path, tiny_file: Path
) -> None:
    words = ["--model", str(tiny_file), "--served-model-name", "tiny", "--max-num-seqs", "8"]
    env = {
        "TAILOR_CACHE_DIR": str(tmp_path / "cache"), "TAILOR_CODE_DIR": str(tmp_path / "code"),
        "PATH": str(installed.parent), "PYTHONPATH": "",
    }  # fmt: skip
    tailor = [str(installed), str(installed.parent / "tailor")]
    with Running(words, env, tailor=tailor, cwd=tmp_path) as running:
        asked = {"model": "tiny", "prompt": "the the", "max_tokens": 8, "temperature": 0}
        plain = running.ask("/v1/completions", asked)
        drafted = running.ask("/v1/completions", asked | {"speculation": {"drafter": "auto"}})
        assert plain["choices"][0]["text"] == drafted["choices"][0]["text"]
        served = {model["id"] for model in running.ask("/v1/models")["data"]}
        assert served == TASKS | {"tiny"}
        for path in PAGE_PATHS:
            with urllib.request.urlopen(running.url + path, timeout=60) as page:
                assert page.read(), path
        engines = psutil.Process(running.process.pid).children()
        code = {m.path for one in engines for m in one.memory_maps() if "/_code/" in m.path}
        assert code and all(Path(path).is_relative_to(installed.parents[1]) for path in code)
        assert running.stop(signal.SIGTERM) == 0
    assert not (tmp_path / "code").exists(), "nothing was compiled"
