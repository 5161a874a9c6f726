"""What a server of a model takes before it does anything: seconds to /ready, and resident memory.

    python -m loadtest.footprint --model smollm2-135m-instruct --model gemma-3-270m --starts 3

Starts `tailor serve` on a free port and waits for /ready, several times, for each model; caches are
warm from the second start on, and the least time counts. Then reads the engine process's resident
memory from /proc/PID/smaps_rollup: with nothing open, and after a request with a JSON schema, which
builds what grammars need. Before the models comes the same engine with a model of 50 KB,
"nothing": Python, the libraries and the compiled kernels.

Told: seconds from the start of the process to /ready, of the first and the second request with a
schema, and in MiB: the model's file, the KV pages that are ready ahead, resident and anonymous
memory, and (resident - nothing's) / (file + KV). Linux only. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from loadtest import machine
from loadtest.options import add_result_options, emit, refuse_busy_machine
from loadtest.peer import Peer, free_port, stop, stop_on_sigterm
from loadtest.random_gguf import Shape, add_sizes

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
READY_BYTES_A_PLANE = 2 * (64 << 10)
"""KV pages of one head's keys or values in one layer that are ready before the first request."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "year": {"type": "integer"}},
    "required": ["name", "year"],
    "additionalProperties": False,
}
NOTHING = Shape("llama", "smollm", 1, 64, 64, 1, 1, 64, 259, 256, 1e4)
"""A model without size."""


def write_nothing(out: Path) -> None:
    """A GGUF of 50 KB: one layer of ones, and a tokenizer of the bytes."""
    import gguf
    import numpy as np
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    kind, shape = gguf.GGMLQuantizationType.Q8_0, NOTHING
    writer = gguf.GGUFWriter(out, shape.architecture)
    add_sizes(writer, shape, "q8_0")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape.pre)
    writer.add_token_list(["<s>", "</s>", "ab", *alphabet])
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, size in shape.vectors():
        writer.add_tensor(name, np.ones(size, np.float32))
    for name, outputs, inputs in shape.matrices():
        rows = gguf.quants.quantize(np.ones((outputs, inputs), np.float32), kind)
        writer.add_tensor(name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sizes(model: str) -> tuple[float, float]:
    """(MiB of the model's file, MiB of KV pages that are ready ahead). Converts it, if it is not
    yet."""
    from server.commands.own_engine import model_name, ready_folder
    from server.config import EngineConfig, ModelConfig

    folder = ready_folder(ModelConfig(name=model_name(model), path=model), EngineConfig())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    planes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
    path = Path(model).expanduser()
    files = [path] if path.suffix == ".gguf" else sorted(folder.glob("model*.*"))
    file = sum(one.stat().st_size for one in files if one.suffix in (".gguf", ".safetensors"))
    return file / MIB, planes * READY_BYTES_A_PLANE / MIB


@contextmanager
def server(model: str, log: Path) -> Iterator[tuple[Peer, float]]:
    """(a server that is ready, seconds from its start to /ready)."""
    port = free_port()
    peer = Peer(model, "", "tailor", url=f"http://127.0.0.1:{port}")
    peer.log_path = log
    command = [sys.executable, "-m", "server.commands.cli", "serve", "--host", "127.0.0.1"]
    began = time.perf_counter()
    with log.open("wb") as out:
        peer.process = subprocess.Popen(
            [*command, "--port", str(port), "--model", model], stdin=subprocess.DEVNULL,
            stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=dict(os.environ),
            start_new_session=True,
        )  # fmt: skip
    try:
        yield peer, _wait(peer, began)
    finally:
        stop(peer)


def _wait(peer: Peer, began: float) -> float:
    """Seconds from `began` to the first 200 of /ready, to 10 ms."""
    assert peer.process is not None and peer.log_path is not None
    with httpx.Client(timeout=10.0) as client:
        while peer.process.poll() is None:
            with suppress(httpx.HTTPError):
                if client.get(f"{peer.url}/ready").status_code == 200:
                    return time.perf_counter() - began
            time.sleep(0.01)
    raise SystemExit(f"the server ended:\n{peer.log_path.read_text(errors='replace')[-1500:]}")


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
        json={"model": _name(peer), "prompt": "A", "max_tokens": 1, "temperature": 0,
              "structured_outputs": {"json": SCHEMA}},
        timeout=60.0,
    )  # fmt: skip
    answer.raise_for_status()
    return time.perf_counter() - began


def _name(peer: Peer) -> str:
    return str(httpx.get(f"{peer.url}/v1/models").json()["data"][0]["id"])


def measure(model: str, starts: int, log: Path, *, grammars: bool = True) -> dict[str, Any]:
    """The figures of one model."""
    took: list[float] = []
    for i in range(starts):
        with server(model, log) as (peer, ready_s):
            took.append(ready_s)
            if i < starts - 1:
                continue
            time.sleep(2.0)  # pages that are made ready beside
            found: dict[str, Any] = {"model": model, "ready_s": min(took), **resident(peer)}
            if grammars:
                found |= {"schema_first_s": ask_schema(peer), "schema_next_s": ask_schema(peer)}
                time.sleep(1.0)
                found["with_schema"] = resident(peer)["resident"]
    return found


def table(rows: list[dict[str, Any]], nothing: dict[str, Any]) -> Table:
    """One line a model; adds "above" and "above_with_schema" to each row."""
    shown = Table("model", "ready, s", "file + KV", "resident", "anonymous", "above nothing",
                  "of file + KV", "with a schema", "of file + KV", "schema, s")  # fmt: skip
    for row in [nothing, *rows]:
        size, base = row.get("file_and_kv", 0.0), nothing["resident"]
        line = [row["model"], f"{row['ready_s']:.2f}", f"{size:.0f}", f"{row['resident']:.0f}"]
        line += [f"{row['anonymous']:.0f}"]
        if size:
            row["above"] = (row["resident"] - base) / size
            row["above_with_schema"] = (row["with_schema"] - base) / size
            line += [f"{row['resident'] - base:.0f}", f"{row['above']:.2f}"]
            line += [f"{row['with_schema']:.0f}", f"{row['above_with_schema']:.2f}"]
            line += [f"{row['schema_first_s']:.2f}, then {row['schema_next_s']:.2f}"]
        shown.add_row(*line)
    return shown


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", action="append", required=True, help="may be given repeatedly")
    parser.add_argument("--starts", type=int, default=3)
    add_result_options(parser)
    options = parser.parse_args(argv)
    refuse_busy_machine(options.max_load)
    stop_on_sigterm()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        empty, log = Path(scratch) / "nothing.gguf", Path(scratch) / "server.log"
        write_nothing(empty)
        nothing = measure(str(empty), 2, log, grammars=False) | {"model": "nothing"}
        for model in options.model:
            file, kv = sizes(model)
            rows.append({**measure(model, options.starts, log), "file_and_kv": file + kv})
    Console(width=140).print(table(rows, nothing))
    emit({"tool": "footprint", "machine": machine.describe(), "nothing": nothing, "models": rows},
         options.json)  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
