"""`python -m loadtest.same_file starts`: seconds to /ready, and resident memory.

Starts `tailor serve` on a free port and waits for /ready, several times, for each model; caches are
warm from the second start on; the first, the median and the least time of them all are reported.
Then it reads the engine process's resident memory from /proc/PID/smaps_rollup: with nothing open,
and after a request with a JSON schema, which builds what grammars need. Before the models comes the
same engine with a model of 50 KB, "nothing": Python, the libraries and the compiled kernels.

Reported too: seconds of the first and the second request with a schema, and in MiB: the model's
file, the KV pages that are ready ahead, resident and anonymous memory, and (resident - nothing's) /
(file + KV). --serve gives further options to every start, a configuration in which tasks use slices
for example. Linux only.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from loadtest.files import write_nothing
from loadtest.options import ResultOptions, emit, stopped_afterwards
from loadtest.peer import Peer, start, tailor_peer, wait_ready
from server.commands.own_engine import model_name
from server.config import EngineConfig, ModelConfig
from server.wiring.model import ready_folder

MIB = 1 << 20
READY_BYTES_A_PLANE = 2 * (64 << 10)
"""KV pages of one head's keys or values in one layer that are ready before the first request."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "year": {"type": "integer"}},
    "required": ["name", "year"],
    "additionalProperties": False,
}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class StartOptions:
    """What is started, and how often."""

    model: Annotated[tuple[str, ...], Parameter(help="repeat")] = ("smollm2-135m-instruct",)
    starts: int = 3
    serve: Annotated[str, Parameter(help="more options of `tailor serve`, in one string")] = ""


_STARTS, _RESULTS = StartOptions(), ResultOptions()


def sizes(model: str) -> tuple[float, float]:
    """(MiB of the model's file, MiB of KV pages that are ready ahead). Converts it, if it is not
    yet."""
    folder = ready_folder(ModelConfig(name=model_name(model), path=model), EngineConfig())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    planes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
    path = Path(model).expanduser()
    files = [path] if path.suffix == ".gguf" else sorted(folder.glob("model*.*"))
    file = sum(one.stat().st_size for one in files if one.suffix in (".gguf", ".safetensors"))
    return file / MIB, planes * READY_BYTES_A_PLANE / MIB


@contextmanager
def server(model: str, log_dir: Path, serve: str) -> Iterator[tuple[Peer, float]]:
    """(a server that is ready, seconds from its start to /ready). Raises PeerFailed."""
    peer = tailor_peer("tailor", model, serve)
    with stopped_afterwards([peer]):
        began = time.perf_counter()
        start(peer, log_dir)
        asyncio.run(wait_ready(peer, every_s=0.01))
        yield peer, time.perf_counter() - began


def resident(peer: Peer) -> dict[str, float]:
    """MiB of the engine's process, the largest below the server's: "resident" and "anonymous"."""
    assert peer.process is not None
    below = psutil.Process(peer.process.pid).children(recursive=True)
    engine = max(below, key=lambda process: int(process.memory_info().rss))
    text = Path(f"/proc/{engine.pid}/smaps_rollup").read_text(encoding="ascii")
    kib = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
    return {"resident": kib["Rss"] / 1024, "anonymous": kib["Anonymous"] / 1024}


def ask_schema(peer: Peer) -> float:
    """Seconds of a completion of one token under a schema."""
    began = time.perf_counter()
    answer = httpx.post(
        f"{peer.url}/v1/completions",
        json={"model": peer.model, "prompt": "A", "max_tokens": 1, "temperature": 0,
              "structured_outputs": {"json": SCHEMA}},
        timeout=60.0,
    )  # fmt: skip
    answer.raise_for_status()
    return time.perf_counter() - began


def measure(model: str, num: int, serve: str, *, grammars: bool = True) -> dict[str, Any]:
    """The figures of one model."""
    took: list[float] = []
    found: dict[str, Any] = {"model": Path(model).name}
    with tempfile.TemporaryDirectory() as logs:
        for i in range(num):
            with server(model, Path(logs), serve) as (peer, ready_s):
                took.append(ready_s)
                if i < num - 1:
                    continue
                time.sleep(2.0)  # pages that are made ready beside
                found |= resident(peer)
                if grammars:
                    found |= {"schema_first_s": ask_schema(peer), "schema_next_s": ask_schema(peer)}
                    time.sleep(1.0)
                    found["with_schema"] = resident(peer)["resident"]
    return found | {
        "first_s": took[0], "ready_s": min(took), "median_s": statistics.median(took),
    }  # fmt: skip


def table(rows: list[dict[str, Any]], nothing: dict[str, Any]) -> Table:
    """One line a model; adds "above" and "above_with_schema" to each row."""
    shown = Table("model", "ready, s (first, median)", "file + KV", "resident", "anonymous",
                  "above nothing", "of file + KV", "with a schema", "of file + KV", "schema, s",
                  title="MiB of the engine's process")  # fmt: skip
    for row in [nothing, *rows]:
        size, base = row.get("file_and_kv", 0.0), nothing["resident"]
        ready = f"{row['ready_s']:.2f} ({row['first_s']:.2f}, {row['median_s']:.2f})"
        line = [row["model"], ready, f"{size:.0f}", f"{row['resident']:.0f}"]
        line += [f"{row['anonymous']:.0f}"]
        if size:
            row["above"] = (row["resident"] - base) / size
            row["above_with_schema"] = (row["with_schema"] - base) / size
            line += [f"{row['resident'] - base:.0f}", f"{row['above']:.2f}"]
            line += [f"{row['with_schema']:.0f}", f"{row['above_with_schema']:.2f}"]
            line += [f"{row['schema_first_s']:.2f}, then {row['schema_next_s']:.2f}"]
        shown.add_row(*line)
    return shown


def starts(*, options: StartOptions = _STARTS, results: ResultOptions = _RESULTS) -> int:
    """Seconds to /ready and resident memory of servers; see loadtest.starts.

    Example: python -m loadtest.same_file starts --model smollm2-135m-instruct --starts 5
    """
    if options.starts < 1:
        raise ValueError("--starts wants at least 1")
    results.refuse_busy_machine()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        empty = Path(scratch) / "nothing.gguf"
        write_nothing(empty)
        nothing = measure(str(empty), 2, "", grammars=False) | {"model": "nothing"}
        for model in options.model:
            file, kv = sizes(model)
            row = measure(model, options.starts, options.serve)
            rows.append({**row, "file_and_kv": file + kv})
    Console(width=160).print(table(rows, nothing))
    emit("same_file starts", {"nothing": nothing, "models": rows}, results.json)
    return 0
