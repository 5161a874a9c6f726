"""Fixtures that several suites share, and what a parallel run needs before its workers start."""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import importlib.util
import inspect
import logging
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from server.machine_code import make_ready
from tests.profiles import register

if TYPE_CHECKING:  # imported by those who ask for it
    from tests.commands.command_line import Tailor

register()

# Threads of torch and of our teams sleep when they have nothing to do, here and in processes that
# tests start: those of tiny models would spin in each other's way, for ten times the work. Before
# torch comes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What is served to tests asks for no key, unless they say so.
for _name in ("TAILOR_API_KEY", "TAILOR_ADMIN_KEY"):
    os.environ.pop(_name, None)

# Every client of httpx reads the list of authorities, 22 ms each time; tests make thousands.
ssl.create_default_context = functools.cache(  # type: ignore[assignment]
    ssl.create_default_context
)


def pytest_configure(config: pytest.Config) -> None:
    """With xdist (-n), make machine code once here, on all cores, instead of once in a worker."""
    # peft 0.21 asks transformers 5.23 by an old name.
    config.addinivalue_line("filterwarnings", "ignore:.is_gradient_checkpointing:FutureWarning")
    if hasattr(config, "workerinput"):
        # It has told all that it found. To take apart what it imported would take seconds more.
        atexit.register(os._exit, 0)
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        gc.disable()  # until all is collected: next to nothing of that is garbage
        return
    if not config.option.collectonly:
        make_ready()
        _write_bytecode()


def pytest_collection(session: pytest.Session) -> None:
    """In a new clone a worker imports its own part of the files first: all workers would compile
    the same ones at the same time, and now find what the others have compiled."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    paths = [Path(arg.partition("::")[0]).absolute() for arg in session.config.args]
    files = [file for path in paths for file in sorted(path.glob("**/test_*.py")) or [path]]
    begin = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for file in files[begin:]:
        with suppress(Exception, pytest.skip.Exception):  # collecting it tells what is wrong
            module = file.with_suffix("").relative_to(session.config.rootpath)
            importlib.import_module(".".join(module.parts))


def _write_bytecode() -> None:
    """In a new environment, whose largest packages have no bytecode (Makefile), write it here."""
    torch = importlib.util.find_spec("torch")
    if sys.dont_write_bytecode or torch is None or Path(str(torch.cached)).exists():
        return
    words = "import torch, transformers.models.llama.modeling_llama"
    subprocess.run([sys.executable, "-c", words], check=False)


# The longest files come first, so that no process is left alone with one of them at the end of a
# parallel run. Then the folders where few tests take long: they start servers, commands and other
# people's clients, or compile.
_FIRST = (
    "fleet/test_ray.py", "fleet/test_fleet_page.py", "engine/test_lossless.py",
    "setup/test_first_hour.py", "model/gpu/test_attention.py", "model/test_masked_distribution.py",
    "drafters/test_machine_code.py", "model/cpu/test_generic.py", "setup/test_serve.py",
    "commands/test_tune.py", "api/test_timeouts.py", "model/test_gguf_families.py",
    "commands/test_make.py", "api/test_attacks_chat.py", "model/gpu/test_slices.py",
    "model/cpu/test_family_engines.py", "api/test_faults.py", "setup/test_readme_runs.py",
)  # fmt: skip
_LONG = (
    "setup", "conformance", "docker", "monitoring", "loadtest", "commands", "training", "fleet",
    "model", "engine", "client", "api",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files, then those of the long folders; the order within these stays."""
    tests = Path(__file__).parent

    def rank(item: pytest.Item) -> tuple[int, int]:
        path = item.path.relative_to(tests)
        if path.as_posix() in _FIRST:
            return 0, _FIRST.index(path.as_posix())
        folder = path.parts[0]
        return 1, _LONG.index(folder) if folder in _LONG else len(_LONG)

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the garbage collector need not look at it
    each time that it runs (1.5 s, and tests of leaks ask for it again and again)."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same for what a file leaves behind: modules that it imported, and what they keep."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


# At the very end libraries look at their own: what is frozen would be told as leaked. Not sooner:
# pytest collects garbage when it ends, for seconds if it had to look at all that was imported.
atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine gets a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """A command that a test runs takes over the root logger; its stream ends with the test, and
    what logs later in this process would write into a closed file."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


class _Faults(logging.Handler):
    """What a server in this process logs as its own fault: an exception that nobody expected, and
    each answer of status 500."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        known = ("path", "status", "code", "error", "at")
        self.told.append(" ".join(str(getattr(record, name, "")) for name in known).strip())


@pytest.fixture(autouse=True)
def _no_server_error(request: pytest.FixtureRequest) -> Iterator[None]:
    """A 500 is a fault wherever it comes: it fails the test in which it is seen, except one that
    asks for it (the mark server_error)."""
    faults = _Faults()
    logger = logging.getLogger("tailor.http")
    logger.addHandler(faults)
    yield
    logger.removeHandler(faults)
    if request.node.get_closest_marker("server_error") is None:
        assert not faults.told, "the server had an internal error"


@pytest.fixture
def tailor(capsys: pytest.CaptureFixture[str]) -> Tailor:
    """Runs a command line in this process and returns what it printed."""
    from server.commands.cli import main
    from tests.commands.command_line import Told

    def run(*words: object, status: int = 0) -> Told:
        capsys.readouterr()
        try:
            ended: object = main([str(word) for word in words])
        except SystemExit as exited:
            ended = exited.code
        assert ended == status, words
        return Told(*capsys.readouterr())

    return run


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, which nobody has made yet."""
    monkeypatch.setenv("TAILOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def files_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder that the tests of one file share with nobody else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAILOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama called "tiny"; who changes it copies it first."""
    from tests.model.tiny_models import save_tiny

    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny(folder, "llama")
    return folder


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama that is served as its GGUF is: a process that does so imports
    neither torch nor transformers, which is most of what another start takes."""
    from server.model.catalog import model_folder
    from tests.model.gguf_models import BLOCKS, write_llama

    made = tmp_path_factory.mktemp("file")
    write_llama(made / "tiny.gguf", *BLOCKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAILOR_CACHE_DIR", str(made))
        return model_folder(str(made / "tiny.gguf"), "file")


@pytest.fixture(scope="session")
def real_model_folder() -> Path:
    """The converted smollm2-135m-instruct folder. Fetched and converted once into the cache."""
    from server.model.catalog import model_folder

    return model_folder("smollm2-135m-instruct")
