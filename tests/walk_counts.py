"""What a step and a request pass on their way, and how large the house is, for one or two commits.

    python -m tests.walk_counts                    # the working tree
    python -m tests.walk_counts dff5c7d            # a commit beside the working tree
    python -m tests.walk_counts dff5c7d HEAD       # two commits
    python -m tests.walk_counts --times dff5c7d HEAD   # microseconds of the same steps instead

Walks are counted with sys.setprofile on a real engine whose runner computes nothing, and on the
real API in front of it: Python calls of ours, distinct functions and files among them, and records,
which are classes of ours of which an object was made. A walk's figures are those of its median
step or request; the first ones, which make what is kept, are left out. Another commit is checked
out into a temporary worktree and counted by this very file, in a process of its own.

--times: what the host takes of a step, the runner's own time left out, in microseconds of CPU: of
four steps in a row, as of these one is looked at where nobody drafts, the lowest tenth; of each
commit the lowest of PASSES alternating processes. Steps follow each other at once, so what the host
needs lies in the core's caches, as it does not behind a model's step.

`BOUNDS` is what tests/test_walk_counts.py holds the working tree to. Whoever makes a walk shorter
lowers it, in the same commit.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
OURS = ("server", "drafters", "vocab_store")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

BOUNDS = {
    "plain step, 1 choice: calls": 17,
    "plain step, 1 choice: files": 7,
    "plain step, 8 choices: calls": 17,
    "drafting step, 1 choice: calls": 61,
    "drafting step, 1 choice: files": 15,
    "drafting step, 8 choices: calls": 205,
    "request, API: calls": 198,
    "request, API: files": 17,
    "request, engine: calls": 430,
    "request, engine: files": 26,
}
"""The most that the working tree may have."""

PASSES = 3

# -- the house: what is counted without running it ------------------------------------------------


def _used_once(nodes: Sequence[ast.AST]) -> tuple[int, int]:
    """(how many, lines) of the functions and methods whose name stands in one place beside its
    definition; imports do not count."""
    defined: defaultdict[str, list[int]] = defaultdict(list)
    uses: Counter[str] = Counter()
    for node in nodes:
        if isinstance(node, _FUNCTIONS):
            defined[node.name].append((node.end_lineno or node.lineno) - node.lineno + 1)
        elif isinstance(node, ast.Name):
            uses[node.id] += 1
        elif isinstance(node, ast.Attribute):
            uses[node.attr] += 1
    once = [
        lines[0]
        for name, lines in defined.items()
        if len(lines) == 1 and uses[name] == 1 and not name.startswith("__")
    ]
    return len(once), sum(once)


def house(root: Path) -> dict[str, int]:
    """Sizes of the tree at `root`."""
    nodes: list[ast.AST] = []
    rooms: Counter[str] = Counter()
    num_modules = 0
    for path in chain.from_iterable((root / top).rglob("*.py") for top in OURS):
        text = path.read_text(encoding="utf-8")
        parts = path.relative_to(root).with_suffix("").parts
        # The folder of a module, of the server one deeper.
        room = ".".join(parts[: 1 + (parts[0] == "server")]).removesuffix(".__init__")
        rooms[room] += len(text.splitlines())
        num_modules += bool(text.strip())
        nodes += ast.walk(ast.parse(text))
    num_once, lines_once = _used_once(nodes)
    return {
        "modules": num_modules,
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "functions": sum(isinstance(node, _FUNCTIONS) for node in nodes),
        "functions used once": num_once,
        "lines of functions used once": lines_once,
        "lines": sum(rooms.values()),
        **{f"lines of {room}": num for room, num in sorted(rooms.items(), key=lambda r: -r[1])},
    }


# -- walks: what is counted while it runs ---------------------------------------------------------


@dataclass
class Walk:
    """What was passed since the last `take`. One thread's, or of all threads that share it."""

    calls: int = 0
    functions: set[Any] = field(default_factory=set)
    records: set[type] = field(default_factory=set)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """For sys.setprofile."""
        if event != "call":
            return
        code = frame.f_code
        if code.co_name in ("__init__", "__new__") and code.co_argcount:
            made = frame.f_locals.get(code.co_varnames[0])
            kind = made if isinstance(made, type) else type(made)
            if kind.__module__.split(".")[0] in OURS:
                self.records.add(kind)
        if _is_ours(code.co_filename) and code.co_name not in _INLINE:
            self.calls += 1
            self.functions.add(code)

    def take(self) -> tuple[int, int, int, int]:
        """(calls, functions, files, records) since the last call."""
        files = {code.co_filename for code in self.functions}
        found = self.calls, len(self.functions), len(files), len(self.records)
        self.calls, self.functions, self.records = 0, set(), set()
        return found


_KNOWN: dict[str, bool] = {}
_INLINE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Parts of the function that they stand in, as Python 3.12 has most of them."""


def _is_ours(filename: str) -> bool:
    known = _KNOWN.get(filename)
    if known is None:
        path = os.path.relpath(filename, os.getcwd())
        known = _KNOWN[filename] = path.split(os.sep)[0] in OURS
    return known


def _told(name: str, walks: list[tuple[int, int, int, int]]) -> dict[str, int]:
    """The figures of the median walk."""
    median = sorted(walks)[len(walks) // 2]
    return {
        f"{name}: {what}": num
        for what, num in zip(("calls", "functions", "files", "records"), median, strict=True)
    }


class NullRunner:
    """Draws the id after each row's, and a random one at every other position. A step is told to
    have taken so long that what the host does is nothing beside it."""

    max_in_flight = 1  # which engines once asked for
    head_row_bytes = 0
    step_s = 1000.0
    own_s = 0.0
    """What drawing took, of all steps."""

    def __init__(self, info: Any) -> None:
        self.info = info

    def launch(self, batch: Any) -> None:
        """Note the step."""
        self._batch = batch

    def wait(self) -> Any:
        """Its draws."""
        began = time.thread_time()
        drawn = self._drawn()
        self.own_s += time.thread_time() - began
        return drawn

    def _drawn(self) -> Any:
        import numpy as np

        from server.engine.batch import Drawn, Likely

        batch = self._batch
        rows, at = batch.draw_rows, batch.draw_positions.astype(np.int64)
        noise = (at * 2654435761) >> 7 & 0xFFFF
        ids = np.where(noise % 2, batch.token_ids[rows] + 1, noise) % 11 + 3
        num, none = ids.shape[0], np.zeros(0, np.int32)
        likely = None
        if batch.num_likely:
            others = np.arange(batch.num_likely)
            chances = np.repeat((0.5 ** (1 + others))[None], num, 0).astype(np.float32)
            likely = Likely((ids[:, None] + others).astype(np.int32), chances)
        return Drawn(
            ids.astype(np.int32), np.full(num, np.nan, np.float32), np.zeros(num, np.int32),
            [()] * num, none.astype(np.float32), none, [], self.step_s, 0.0, likely,
        )  # fmt: skip

    def move_slots(self, src: Any, dst: Any) -> None:
        """There is no KV."""

    def copy_blocks(self, src: Any, dst: Any) -> None:
        """There is no KV."""

    def close(self) -> None:
        """There is no device."""


def _info(**numbers: Any) -> Any:
    from server.types import ModelInfo

    fields = {
        "name": "tiny", "vocab_size": 400, "max_model_len": 1024, "eos_token_ids": (0,),
        "num_blocks": 1024, "block_size": 16, "device": "cpu", "dtype": "float32",
        "fingerprint": "null", "max_num_seqs": 16, "max_num_batched_tokens": 512,
    }  # fmt: skip
    return ModelInfo(**{**fields, **numbers})


def _cost_table(rows: list[int], seconds: list[float]) -> Any:
    """The CostTable of whichever commit is counted."""
    at = "step_times" if importlib.util.find_spec("server.engine.step_times") else "budget"
    return importlib.import_module(f"server.engine.{at}").CostTable(rows, seconds)


def _engine(num_choices: int, drafter: str) -> tuple[Any, NullRunner]:
    """One that decodes so many requests, all of which draft in each step or none in any."""
    from drafters import make_drafter
    from server.engine.engine import Engine
    from server.engine.plan import EngineSettings
    from server.types import Request, SamplingParams, SpeculationParams

    made = {} if drafter == "off" else {drafter: make_drafter(drafter)}
    settings = EngineSettings(max_num_seqs=num_choices, max_num_batched_tokens=512)
    runner: Any = NullRunner(_info(max_num_seqs=num_choices))
    # Nodes cost nothing, so that all choices draft in every step, whatever the machine does.
    cost = _cost_table([1, 512], [NullRunner.step_s] * 2)
    engine = Engine(runner, made, settings, cost=cost)
    for i in range(num_choices):
        prompt = tuple((i + j) % 11 + 3 for j in range(40))
        engine.submit(
            Request(
                f"r{i}", "task", "tiny", prompt,
                SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True),
                SpeculationParams(drafter, 0 if drafter == "off" else 8),
            )
        )  # fmt: skip
    return engine, runner


def _steps(num_choices: int, drafter: str) -> list[tuple[int, int, int, int]]:
    """What each of its steps passed."""
    engine, _ = _engine(num_choices, drafter)
    walk, found = Walk(), []
    for _ in range(90):
        sys.setprofile(walk)
        deltas = engine.step()
        sys.setprofile(None)
        taken = walk.take()
        if all(delta.counts.num_drafts == (drafter != "off") for delta in deltas):
            found.append(taken)
    assert len(found) > 50, "hardly any step drafted"
    engine.close()
    return found[20:]


def requests() -> dict[str, int]:
    """Completions of eight tokens, through a real server on a socket and a real engine's loop."""
    import socket
    from http.client import HTTPResponse

    from server.engine.engine import Engine
    from server.engine.plan import EngineSettings
    from tests.api.live import LiveServer
    from tests.api.real_engine import spec
    from tests.fakes.engine_thread import start_thread

    api, engine = Walk(), Walk()
    pause = threading.Event()

    class Slow(NullRunner):
        """Steps are so far apart that each one's tokens are read before the next come."""

        def wait(self) -> Any:
            pause.wait(0.02)
            return super().wait()

    def build() -> Any:
        sys.setprofile(engine)
        runner: Any = Slow(_info(max_model_len=256))
        return Engine(runner, {}, EngineSettings(max_num_seqs=16))

    def start(factory: Any) -> Any:
        threading.setprofile(None)  # the engine's own threads are not the API's
        try:
            return start_thread(build)
        finally:
            threading.setprofile(api)

    class Counted(LiveServer):
        """Its loop's thread is counted."""

        def _run(self) -> None:
            sys.setprofile(api)
            threading.setprofile(api)
            super()._run()

    found = []
    server, body = Counted([spec(start)], drafters=("off",)), json.dumps({
        "model": "tiny", "prompt": "the", "max_tokens": 8, "temperature": 0,
        "ignore_eos": True, "speculation": {"drafter": "off"},
    })  # fmt: skip
    # In one piece: whether the API reads a head before its body comes is nobody's doing.
    sent = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    )
    with server, socket.create_connection(("127.0.0.1", server.port)) as client:
        for _ in range(13):
            pause.wait(0.05)
            api.take(), engine.take()
            client.sendall(sent.encode())
            with HTTPResponse(client) as response:
                response.begin()
                assert response.status == 200 and response.read()
            pause.wait(0.05)
            found.append((api.take(), engine.take()))
    threading.setprofile(None)
    walks = found[4:]
    return {
        **_told("request, API", [pair[0] for pair in walks]),
        **_told("request, engine", [pair[1] for pair in walks]),
    }


def walks() -> dict[str, int]:
    """The figures of all walks, of the product in the current folder."""
    return {
        **_told("plain step, 1 choice", _steps(1, "off")),
        **_told("plain step, 8 choices", _steps(8, "off")),
        **_told("drafting step, 1 choice", _steps(1, "auto")),
        **_told("drafting step, 8 choices", _steps(8, "auto")),
        **requests(),
    }


def times() -> dict[str, float]:
    """Microseconds of CPU of the host in a step."""
    found = {}
    for drafter, numbers in (("off", (1, 8, 32)), ("auto", (1, 8))):
        for num_choices in numbers:
            taken = []
            for _ in range(4):
                engine, runner = _engine(num_choices, drafter)
                for _ in range(25):
                    own, began = runner.own_s, time.thread_time()
                    for _ in range(4):
                        engine.step()
                    taken.append((time.thread_time() - began - (runner.own_s - own)) / 4.0)
                engine.close()
            kind = "plain" if drafter == "off" else "drafting"
            name = f"{kind} step, {num_choices} choice{'s' * (num_choices > 1)}: us"
            found[name] = round(1e6 * sorted(taken)[len(taken) // 10], 1)
    return found


# -- both, of a commit ----------------------------------------------------------------------------


def figures(root: Path) -> dict[str, int]:
    """All figures of the tree at `root`. Raises CalledProcessError where its product fails."""
    return {**run(root, "walks"), **house(root)}


def run(root: Path, function: str) -> dict[str, Any]:
    """What a function of this file finds of the product at `root`."""
    here = str(ROOT / "tests" / "walk_counts.py")
    code = (
        "import importlib.util, json, sys\n"
        f"spec = importlib.util.spec_from_file_location('walk_counts', {here!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['walk_counts'] = module\n"
        "spec.loader.exec_module(module)\n"
        f"print(json.dumps(module.{function}()))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def _tree(revision: str | None) -> Iterator[Path]:
    """The tree of a commit (None: the working tree), in a worktree that is removed again."""
    if revision is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory(prefix="walk-counts-") as folder:
        tree = Path(folder) / "tree"
        git: Callable[..., Any] = lambda *words: subprocess.run(  # noqa: E731
            ["git", "-C", str(ROOT), *words], check=True, stdout=subprocess.DEVNULL
        )
        git("worktree", "add", "--quiet", "--detach", str(tree), revision)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def _compared(revisions: Sequence[str | None], *, timed: bool) -> list[dict[str, Any]]:
    """The figures of each commit."""
    with ExitStack() as stack:
        trees = [stack.enter_context(_tree(revision)) for revision in revisions]
        if not timed:
            return [figures(tree) for tree in trees]
        passes = [[run(tree, "times") for tree in trees] for _ in range(PASSES)]
        return [
            {name: min(each[name] for each in of_tree) for name in of_tree[0]}
            for of_tree in zip(*passes, strict=True)
        ]


def _lines(names: list[str], columns: list[dict[str, Any]]) -> Iterator[str]:
    rows = list(dict.fromkeys(key for column in columns for key in column))
    width = max(len(row) for row in rows)
    yield " " * width + "".join(f"{name[:14]:>15}" for name in names)
    for row in rows:
        values = [column.get(row) for column in columns]
        told = "".join(f"{'-' if value is None else value:>15}" for value in values)
        first, last = values[0], values[-1]
        if len(values) > 1 and first and last is not None:
            told += f"{last / first:>8.2f}"
        yield f"{row:<{width}}{told}"


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.walk_counts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("revisions", nargs="*", metavar="REV", help="at most two commits")
    parser.add_argument("--times", action="store_true", help="microseconds of the host instead")
    options = parser.parse_args(arguments)
    if len(options.revisions) > 2:
        parser.error("at most two commits are compared")
    revisions = [*options.revisions, None][:2]
    names = ["working tree" if revision is None else revision for revision in revisions]
    try:
        columns = _compared(revisions, timed=options.times)
    except subprocess.CalledProcessError:
        return 1  # git, or the product, has said why
    for line in _lines(names, columns):
        print(line)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
