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
file's tokenizer. Both are for speed alone (loadtest.files). Ends in one JSON line; 1 when a request
failed.

`steps` and `host` are in loadtest.steps: a runner's steps in every form, with adapters, and the
host's part of an engine's steps. `starts` is in loadtest.starts: seconds to /ready, and memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from loadtest import machine
from loadtest.cells import Cell, Conduct, Level, Plan, measure
from loadtest.load import fixed_examples
from loadtest.load_figures import print_report, report
from loadtest.options import (
    ResultOptions,
    describe_servers,
    emit,
    listed,
    numbers,
    program,
    run,
    stopped_afterwards,
)
from loadtest.peer import SETTLE_S, Peer, PeerFailed, bring_up, parse_peers
from loadtest.prompts import FIXED

app = program("same_file", __doc__)
for part in ("steps:steps", "steps:host", "starts:starts"):
    app.command(f"loadtest.{part}")

PEERS = Path(__file__).parent / "peers"
LLAMACPP = "llamacpp"


def servers(gguf: Path, binary: Path, args: Mapping[str, str]) -> list[Peer]:
    """llama.cpp, Tailor without drafts and Tailor as it comes, not started. args: of each."""
    made = parse_peers(
        [f"{LLAMACPP}={PEERS}/llamacpp.sh", f"tailor-off={PEERS}/tailor.sh", "tailor=@tailor-off"],
        extras=['tailor-off={"speculation": {"drafter": "off"}}'],
    )
    # The script asks for float32 keys and values; here each server keeps its own default.
    kept = f"--cache-type-k f16 --cache-type-v f16 {args[LLAMACPP]}"
    made[0].env = {
        "LLAMACPP_BIN": str(binary), "LLAMACPP_MODEL": str(gguf), "LLAMACPP_ARGS": kept,
    }  # fmt: skip
    made[1].env = {
        "PYTHON": sys.executable, "TAILOR_MODEL": str(gguf), "TAILOR_ARGS": args["tailor"],
    }  # fmt: skip
    return made


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
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
    from loadtest.files import SHAPES, requantise, write_random

    shape, colon, form = kind.rpartition(":")
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
    about = machine.describe()

    conduct = Conduct(options.rounds, 1, options.pause)
    console = Console(stderr=True, width=180)
    figures: dict[str, Any] = {}

    async def ask() -> None:
        await bring_up(peers, options.log_dir)
        for levels, plan in parts:
            cells: list[Cell] = []
            await measure(peers, levels, plan, conduct, cells, console)
            for cell in cells:
                if cell.failures:
                    raise PeerFailed(f"{cell.server}: {cell.failures[0]}")
            found = report(cells, peers, levels, {})
            print_report(console, found)
            for label, rows in found["figures"].items():
                figures[f"{plan.examples[0].task}, {label}"] = rows

    with stopped_afterwards(peers):
        asyncio.run(ask())
        described = describe_servers(peers)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    emit(
        "same_file",
        {"gguf": gguf.name, "sha256": digest, "made": made, "rounds": options.rounds,
         "servers": described, "figures": figures},
        results.json,
        about,
    )  # fmt: skip
    return 0


main = partial(run, app)

if __name__ == "__main__":
    sys.exit(main())
