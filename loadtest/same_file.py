"""One model file: Tailor and llama.cpp on it in turns, its steps, its starts.

    python -m loadtest.same_file --gguf MODEL.gguf --llamacpp BIN/llama-server --rounds 9
    python -m loadtest.same_file --gguf MODEL.gguf --llamacpp BIN/llama-server --make q8_0 OUT.gguf
    python -m loadtest.same_file steps --forms int8,int4 --rows 1,16
    python -m loadtest.same_file host --forms int8 --sequences 1,8 --drafters off,auto
    python -m loadtest.same_file starts --model smollm2-135m-instruct --starts 5

Both servers are started on the file (peers/tailor.sh, peers/llamacpp.sh) and stay up, with the
threads of all cores and the default KV cache of each, which is float16 in both. Tailor is asked
twice: `tailor-off` without drafts, `tailor` as it comes (`auto`). They take turns, in an order
drawn anew in each round, with prompts that are not read from a prefix cache: one stream with prose,
with code that copies itself and with 1,500 tokens of prose, then --streams at once. The figures are
those of `python -m loadtest.load`, the ratios server / llama.cpp.

`--make FORM OUT` writes the file with its matrices dequantised and rounded to FORM first, and
measures that; `--make SHAPE:FORM OUT` writes random weights in the shape of another model with this
file's tokenizer. Both are for speed alone. Ends in one JSON line; 1 when a request failed. What
such files say is worth nothing: numbers that had 4 bits and get 8 are no 8-bit model, and random
weights say noise.

`steps` and `host` are in loadtest.steps: a runner's steps in every form, with adapters, and the
host's part of an engine's steps.

`starts`: seconds to /ready, and resident memory. It starts `tailor serve` on a free port and waits
for /ready, several times, for each model; caches are warm from the second start on; the first, the
median and the least time of them all are reported. Then it reads the engine process's resident
memory from /proc/PID/smaps_rollup: with nothing open, and after a request with a JSON schema, which
builds what grammars need. Before the models comes the same engine with a model of 50 KB, "nothing":
Python, the libraries and the compiled kernels.

Reported too: seconds of the first and the second request with a schema, and in MiB: the model's
file, the KV pages that are ready ahead, resident and anonymous memory, and (resident - nothing's) /
(file + KV). --serve gives further options to every start, a configuration in which tasks use slices
for example. Linux only.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import gguf
import httpx
import numpy as np
import numpy.typing as npt
import psutil
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from tokenizers import pre_tokenizers

from loadtest.cells import Cell, Conduct, Level, Plan, measure, refuse_failures
from loadtest.figures import print_report, report
from loadtest.load import fixed_examples
from loadtest.options import (
    ResultOptions,
    ask_servers,
    describe_machine,
    describe_servers,
    emit,
    listed,
    numbers,
    program,
    stopped_afterwards,
)
from loadtest.peer import SETTLE_S, Peer, start, tailor_peer, wait_ready
from loadtest.prompts import FIXED, SCHEMA
from server.commands.options import as_options
from server.commands.own_engine import model_name
from server.config import EngineConfig, ModelConfig
from server.wiring.model import ready_folder

FORMS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "f32")
"""What gguf's Python package can round to."""
_POOL = 1 << 22  # random blocks of 32 numbers that matrices are filled with, in turn


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model's config.json says of its sizes."""

    architecture: str
    pre: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_base: float

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """(name, outputs, inputs) in the order of the file."""
        yield "token_embd.weight", self.vocab, self.hidden
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for i in range(self.layers):
            yield f"blk.{i}.attn_q.weight", q, self.hidden
            yield f"blk.{i}.attn_k.weight", kv, self.hidden
            yield f"blk.{i}.attn_v.weight", kv, self.hidden
            yield f"blk.{i}.attn_output.weight", self.hidden, q
            yield f"blk.{i}.ffn_gate.weight", self.inner, self.hidden
            yield f"blk.{i}.ffn_up.weight", self.inner, self.hidden
            yield f"blk.{i}.ffn_down.weight", self.hidden, self.inner

    def vectors(self) -> Iterator[tuple[str, int]]:
        """(name, size) of the norms."""
        yield "output_norm.weight", self.hidden
        for i in range(self.layers):
            yield f"blk.{i}.attn_norm.weight", self.hidden
            yield f"blk.{i}.ffn_norm.weight", self.hidden
            if self.architecture == "qwen3":
                yield f"blk.{i}.attn_q_norm.weight", self.head_dim
                yield f"blk.{i}.attn_k_norm.weight", self.head_dim


SHAPES = {
    "qwen3-0.6b": Shape("qwen3", "qwen2", 28, 1024, 3072, 16, 8, 128, 151_936, 40_960, 1e6),
    "llama-3.2-1b": Shape("llama", "llama-bpe", 16, 2048, 8192, 32, 8, 64, 128_256, 131_072, 5e5),
}
NOTHING = Shape("llama", "smollm", 1, 64, 64, 1, 1, 64, 259, 256, 1e4)
"""A model of 50 KB."""


def requantise(source: Path, out: Path, form: str) -> None:
    """Write `out`: a GGUF with its matrices dequantised, and rounded as ggml's reference does.
    Vectors, metadata and the tokenizer stay what they are."""
    reader = gguf.GGUFReader(source)
    fields = reader.fields
    architecture: Any = fields["general.architecture"].contents()
    with _writing(out, architecture) as writer:
        for key, field in fields.items():
            if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
                continue
            value: Any = field.contents()
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, value, field.types[0], inner)
        writer.add_file_type(gguf.LlamaFileType[_file_type(form)])
        kind = gguf.GGMLQuantizationType[form.upper()]
        for tensor in reader.tensors:
            if len(tensor.shape) != 2:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
                continue
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            rounded = values if form == "f32" else gguf.quants.quantize(values, kind)
            writer.add_tensor(tensor.name, rounded, raw_dtype=kind)


def write_random(tokenizer: Path, out: Path, shape: Shape, form: str) -> None:
    """Write `out`: random weights in a known model's shape, so that a step reads as many bytes and
    does the same arithmetic. tokenizer: a GGUF with a byte-level BPE, whose tokens are taken and
    filled up with others that no text is cut into. Raises ValueError for another."""
    fields = gguf.GGUFReader(tokenizer).fields

    def of(key: str) -> Any:
        return fields[f"tokenizer.ggml.{key}"].contents()

    if of("model") != "gpt2":
        raise ValueError(f"the tokenizer is no byte-level BPE but {of('model')!r}")
    tokens = list(of("tokens"))
    more = range(shape.vocab - len(tokens))
    blocks = np.random.default_rng(0).normal(scale=0.02, size=(_POOL, 32)).astype(np.float32)
    _write_shape(
        out, shape, form, blocks, [*tokens, *(f"qzx{i:06d}" for i in more)],
        [*(int(t) for t in of("token_type")), *(1 for _ in more)], list(of("merges")),
        (int(of("bos_token_id")), int(of("eos_token_id"))),
    )  # fmt: skip


def write_nothing(out: Path) -> None:
    """Write `out`: NOTHING, one layer of ones, and a tokenizer of the bytes."""
    tokens = ["<s>", "</s>", "ab", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    types = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 257
    ones = np.ones((1, 32), np.float32)
    _write_shape(out, NOTHING, "q8_0", ones, tokens, types, ["a b"], (0, 1))


def _write_shape(
    out: Path, shape: Shape, form: str, blocks: npt.NDArray[np.float32], tokens: Sequence[str],
    types: Sequence[int], merges: Sequence[str], ends: tuple[int, int],
) -> None:  # fmt: skip
    """blocks: [any number, 32] values that matrices are filled with in turn, rounded to the form.
    ends: the ids of BOS and EOS."""
    kind = gguf.GGMLQuantizationType[form.upper()]
    pool = blocks if form == "f32" else gguf.quants.quantize(blocks, kind)
    with _writing(out, shape.architecture) as writer:
        writer.add_context_length(shape.context)
        writer.add_embedding_length(shape.hidden)
        writer.add_block_count(shape.layers)
        writer.add_feed_forward_length(shape.inner)
        writer.add_head_count(shape.heads)
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        writer.add_rope_dimension_count(shape.head_dim)
        writer.add_rope_freq_base(shape.rope_base)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_vocab_size(shape.vocab)
        writer.add_file_type(gguf.LlamaFileType[_file_type(form)])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(shape.pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(ends[0])
        writer.add_eos_token_id(ends[1])
        writer.add_add_bos_token(False)
        for name, size in shape.vectors():
            writer.add_tensor(name, np.ones(size, np.float32))
        for number, (name, outputs, inputs) in enumerate(shape.matrices()):
            first = 7919 * number
            at = np.arange(first, first + outputs * (inputs // 32)) % len(pool)
            writer.add_tensor(name, pool[at].reshape(outputs, -1), raw_dtype=kind)


@contextmanager
def _writing(out: Path, architecture: str) -> Iterator[gguf.GGUFWriter]:
    """A writer whose file takes the place of `out` when the block ends well."""
    scratch = out.with_name(f".{out.name}.part")
    writer = gguf.GGUFWriter(scratch, architecture)
    try:
        yield writer
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        scratch.rename(out)
    finally:
        scratch.unlink(missing_ok=True)


def _file_type(form: str) -> str:
    """gguf's name of a file whose matrices have that form."""
    return "ALL_F32" if form == "f32" else f"MOSTLY_{form.upper()}"


app, main = program("same_file", __doc__)
for part in ("steps:steps", "steps:host"):
    app.command(f"loadtest.{part}")

LLAMACPP = "llamacpp"


def servers(gguf: Path, binary: Path, args: Mapping[str, str]) -> list[Peer]:
    """llama.cpp, Tailor without drafts and Tailor as it comes, not started. args: of each."""
    # The script asks for float32 keys and values; here each server keeps its own default.
    kept = f"--cache-type-k f16 --cache-type-v f16 {args[LLAMACPP]}"
    env = {"LLAMACPP_BIN": str(binary), "LLAMACPP_MODEL": str(gguf), "LLAMACPP_ARGS": kept}
    off = tailor_peer("tailor-off", str(gguf), args["tailor"])
    off.extra = {"speculation": {"drafter": "off"}}
    return [
        Peer(LLAMACPP, str(Path(__file__).parent / "peers/llamacpp.sh"), "llamacpp", env=env),
        off,
        Peer("tailor", "@tailor-off", "tailor"),
    ]


@as_options
class SameFileOptions:
    """The file, and what is asked."""

    gguf: Path
    llamacpp: Annotated[Path, Parameter(help="llama.cpp's llama-server")]
    make: Annotated[
        tuple[str, Path] | None, Parameter(help="measure FORM or SHAPE:FORM of it, written to OUT")
    ] = None
    rounds: int = 9
    tokens: Annotated[int, Parameter(help="of an answer")] = 96
    prompts: Annotated[str, Parameter(help="of one stream, with commas")] = ",".join(FIXED)
    streams: Annotated[str, Parameter(help="several at once, with commas")] = "8,32"
    tailor_args: Annotated[str, Parameter(help="more options of `tailor serve`")] = ""
    llamacpp_args: Annotated[str, Parameter(help="more options of llama-server")] = ""
    pause: Annotated[float, Parameter(help="seconds between turns")] = SETTLE_S
    log_dir: Path = Path("loadtest/results/logs")


_RESULTS = ResultOptions()


def make_file(source: Path, kind: str, out: Path) -> None:
    """Write `out` from a GGUF: FORM rounds its matrices, SHAPE:FORM takes its tokenizer alone.
    Raises ValueError."""
    shape, colon, form = kind.rpartition(":")
    if form not in FORMS:
        raise ValueError(f"no form {form!r}; there are {', '.join(FORMS)}")
    if not colon:
        requantise(source, out, form)
        return
    if shape not in SHAPES:
        raise ValueError(f"no shape {shape!r}; there are {', '.join(SHAPES)}")
    write_random(source, out, SHAPES[shape], form)


@app.default
def same_file(*, options: SameFileOptions, results: ResultOptions = _RESULTS) -> int:
    """Ask both servers. Raises ValueError for what cannot be asked, PeerFailed."""
    one, several = [Level(concurrency=1)], []
    for num in listed(options.streams):
        several += [Level(concurrency=n) for n in numbers(num, "--streams")]
    parts = [(one, Plan(fixed_examples(name, one), options.tokens, wave=1))
             for name in listed(options.prompts)]  # fmt: skip
    if several:
        parts.append((several, Plan(fixed_examples("distinct", several), options.tokens, wave=1)))
    gguf, made = options.gguf, None
    if options.make is not None:
        made, gguf = options.make
        if not gguf.exists():
            make_file(options.gguf, made, gguf)
    results.refuse_busy_machine()
    args = {"tailor": options.tailor_args, LLAMACPP: options.llamacpp_args}
    peers = servers(gguf.resolve(), options.llamacpp.resolve(), args)
    about = describe_machine()

    conduct = Conduct(options.rounds, 1, options.pause)
    console = Console(stderr=True, width=180)
    figures: dict[str, Any] = {}

    async def ask() -> None:
        for levels, plan in parts:
            cells: list[Cell] = []
            await measure(peers, levels, plan, conduct, cells, console)
            refuse_failures(cells)
            found = report(cells, peers, levels, {})
            print_report(console, found)
            for label, rows in found["figures"].items():
                figures[f"{plan.examples[0].task}, {label}"] = rows

    ask_servers(peers, options.log_dir, ask)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    emit(
        "same_file",
        {"gguf": gguf.name, "sha256": digest, "made": made, "rounds": options.rounds,
         "servers": describe_servers(peers), "figures": figures},
        results.json,
        about,
    )  # fmt: skip
    return 0


MIB = 1 << 20
READY_BYTES_A_PLANE = 2 * (64 << 10)
"""KV pages of one head's keys or values in one layer that are ready before the first request."""


@as_options
class StartOptions:
    """What is started, and how often."""

    model: Annotated[tuple[str, ...], Parameter(help="repeat")] = ("smollm2-135m-instruct",)
    starts: int = 3
    serve: Annotated[str, Parameter(help="more options of `tailor serve`, in one string")] = ""


_STARTS = StartOptions()


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


def measure_starts(model: str, num: int, serve: str) -> dict[str, Any]:
    """The figures of one model. Raises PeerFailed."""
    took: list[float] = []
    found: dict[str, Any] = {"model": Path(model).name}
    with tempfile.TemporaryDirectory() as logs:
        for i in range(num):
            peer = tailor_peer("tailor", model, serve)
            with stopped_afterwards([peer]):
                began = time.perf_counter()
                start(peer, Path(logs))
                asyncio.run(wait_ready(peer, every_s=0.01))
                took.append(time.perf_counter() - began)
                if i < num - 1:
                    continue
                time.sleep(2.0)  # pages that are made ready beside
                found |= resident(peer)
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
        line += [f"{row['anonymous']:.0f}", f"{row['resident'] - base:.0f}"]
        if size:
            row["above"] = (row["resident"] - base) / size
            row["above_with_schema"] = (row["with_schema"] - base) / size
        told = [f"{row[key]:.2f}" if size else "" for key in ("above", "above_with_schema")]
        line += [told[0], f"{row['with_schema']:.0f}", told[1]]
        line += [f"{row['schema_first_s']:.2f}, then {row['schema_next_s']:.2f}"]
        shown.add_row(*line)
    return shown


@app.command
def starts(*, options: StartOptions = _STARTS, results: ResultOptions = _RESULTS) -> int:
    """Seconds to /ready and resident memory of servers; see loadtest.same_file.

    Example: python -m loadtest.same_file starts --model smollm2-135m-instruct --starts 5
    """
    if options.starts < 1:
        raise ValueError("--starts wants at least 1")
    results.refuse_busy_machine()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        empty = Path(scratch) / "nothing.gguf"
        write_nothing(empty)
        nothing = measure_starts(str(empty), 2, "") | {"model": "nothing"}
        for model in options.model:
            file, kv = sizes(model)
            row = measure_starts(model, options.starts, options.serve)
            rows.append({**row, "file_and_kv": file + kv})
    Console(width=160).print(table(rows, nothing))
    emit("same_file starts", {"nothing": nothing, "models": rows}, results.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
