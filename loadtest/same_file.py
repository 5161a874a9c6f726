"""Tailor and llama.cpp on the same GGUF, in turns: decode speed, first tokens, streams at once.

    python -m loadtest.same_file --gguf MODEL.gguf --llamacpp BIN/llama-server --rounds 9
    python -m loadtest.same_file --gguf MODEL.gguf --llamacpp BIN/llama-server --make q8_0 OUT.gguf

Both servers are started on the file (peers/tailor.sh, peers/llamacpp.sh) and stay up, with the
threads of all cores and the default KV cache of each, which is float16 in both. Tailor is asked
twice: `tailor-off` without drafts, `tailor` as it comes (`auto`). In every round each cell asks
each of them, in an order drawn anew, with the same prompts:

    prose, copy              one stream: decode tokens/s after the first chunk
    first-200, first-1500    milliseconds to the first token of a prompt of about so many tokens
    8-streams, 32-streams    tokens/s of all, prefill included
    history-4000, 8-histories   one stream, and 8 at once, behind about 4,000 tokens each, which
                             are asked once before the first round and kept: tokens/s while all
                             are being answered. llama.cpp reads 32,000 tokens for the second

Told: medians, and the ratio to llama.cpp, round by round, with its 95 % bootstrap interval (above
1 = Tailor is better). Nothing else is read from a prefix cache. `--make FORM OUT` writes the file
with its matrices dequantised and rounded to FORM first, and measures that: one of 4 bits rounded to
8 says nothing of quality, only its speed is a Q8_0's. Ends in one JSON line; 1 when a
request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from loadtest import machine
from loadtest.cells import Ask, Level, run_cell
from loadtest.completion import Timing
from loadtest.options import add_result_options, describe_servers, emit, refuse_busy_machine
from loadtest.peer import (
    SETTLE_S,
    Peer,
    PeerFailed,
    bring_down,
    bring_up,
    parse_peers,
    shuffled,
    stop_on_sigterm,
)
from loadtest.prompts import COPY, LONG, PLAIN, Example, distinct_prompts
from loadtest.requantise import FORMS, requantise
from loadtest.stats import ratio

PEERS = Path(__file__).parent / "peers"
LLAMACPP = "llamacpp"


@dataclass(frozen=True, slots=True)
class Kind:
    """One cell: `streams` prompts at once, of max_tokens each. figure: what of it counts. is_kept:
    they are asked once before, so that the servers have them in their caches."""

    name: str
    prompts: Sequence[str]
    max_tokens: int
    figure: str  # decode, first or all
    is_kept: bool = False

    @property
    def less_is_better(self) -> bool:
        return self.figure == "first"


def kinds(tokens: int, names: Sequence[str] | None) -> list[Kind]:
    """All cells, or those that are named. Raises ValueError for one that is not there."""
    histories = [f"{i}. {' '.join(distinct_prompts(19 + i)[i:])}" for i in range(1, 9)]
    found = {
        "prose": Kind("prose", [PLAIN], tokens, "decode"),
        "copy": Kind("copy", [COPY], tokens, "decode"),
        "first-200": Kind("first-200", [PLAIN], 2, "first"),
        "first-1500": Kind("first-1500", [LONG], 2, "first"),
        "8-streams": Kind("8-streams", distinct_prompts(8), tokens, "all"),
        "32-streams": Kind("32-streams", distinct_prompts(32), tokens, "all"),
        "history-4000": Kind("history-4000", histories[:1], tokens, "decode", True),
        "8-histories": Kind("8-histories", histories, tokens, "decode", True),
    }
    unknown = sorted(set(names or ()) - set(found))
    if unknown:
        raise ValueError(f"no cell {unknown[0]!r}; there are {', '.join(found)}")
    return [kind for name, kind in found.items() if names is None or name in names]


def servers(gguf: Path, binary: Path, args: Mapping[str, str]) -> list[Peer]:
    """llama.cpp, Tailor without drafts and Tailor as it comes, not started. args: of each."""
    made = parse_peers(
        [f"{LLAMACPP}={PEERS}/llamacpp.sh", f"tailor-off={PEERS}/tailor.sh", "tailor=@tailor-off"],
        extras=['tailor-off={"speculation": {"drafter": "off"}}'],
    )
    # The script asks for float32 keys and values; here each server keeps its own default. Its 32
    # slots share one memory, which eight histories need to fit in.
    kept = f"--cache-type-k f16 --cache-type-v f16 {args[LLAMACPP]}"
    made[0].env = {
        "LLAMACPP_BIN": str(binary), "LLAMACPP_MODEL": str(gguf), "LLAMACPP_ARGS": kept,
        "LLAMACPP_CTX": "40960",
    }  # fmt: skip
    made[1].env = {
        "PYTHON": sys.executable, "TAILOR_MODEL": str(gguf), "TAILOR_ARGS": args["tailor"],
    }  # fmt: skip
    return made


async def figure_of(
    client: httpx.AsyncClient, peer: Peer, kind: Kind, round_id: int, salt: str
) -> float:
    """One cell of one server: tokens a second, or milliseconds. Raises PeerFailed."""
    asks = [Ask(Example("", "", prompt, ""), "", kind.max_tokens) for prompt in kind.prompts]
    level = Level(concurrency=len(asks))
    if kind.is_kept:
        if peer.dialect == LLAMACPP:
            peer = replace(peer, extra=peer.extra | {"cache_prompt": True})
        first = [replace(ask, max_tokens=1) for ask in asks]
        await run_cell(client, peer, Level(concurrency=1), round_id, first, salt=peer.salt(salt))
    cell = await run_cell(client, peer, level, round_id, asks, salt=peer.salt(salt))
    if cell.failures:
        raise PeerFailed(f"{peer.name}, {kind.name}: {cell.failures[0]}")
    if kind.figure == "all":
        return cell.tokens_per_s
    if kind.figure == "first":
        (timing,) = cell.timings
        return 1e3 * timing.ttft_s
    rate = rate_together(cell.timings)
    if rate is None:
        raise PeerFailed(f"{peer.name}, {kind.name}: an answer came in one chunk")
    return rate


def rate_together(timings: Sequence[Timing]) -> float | None:
    """Tokens a second of all streams, from when the last has begun until the first ends; None where
    there is no such time."""
    began = max(timing.chunk_s[0] for timing in timings)
    ended = min(timing.chunk_s[-1] for timing in timings)
    if ended <= began:
        return None
    num = sum(  # a server may tell of tokens without a text only at the end
        tokens * timing.num_tokens / sum(timing.chunk_tokens)
        for timing in timings
        for at, tokens in zip(timing.chunk_s, timing.chunk_tokens, strict=True)
        if began < at <= ended
    )
    return num / (ended - began)


Found = dict[str, dict[str, list[float]]]
"""cell -> server -> its figure in each round."""


async def measure(
    peers: Sequence[Peer], chosen: Sequence[Kind], rounds: int, pause_s: float
) -> Found:
    """All rounds; the first of each cell and server warms up and is left out."""
    found: Found = {kind.name: {peer.name: [] for peer in peers} for kind in chosen}
    salt = f"{time.time_ns():x}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=900.0, limits=limits) as client:
        for round_id in range(-1, rounds):
            print(f"round {round_id + 1} of {rounds}", file=sys.stderr, flush=True)
            for kind in chosen:
                for peer in shuffled(peers, round_id, kind.name):
                    # What is kept is read once, before the first round, and found by the others.
                    key = f"{salt}-{'kept' if kind.is_kept else round_id}-{kind.name}"
                    value = await figure_of(client, peer, kind, round_id, key)
                    if round_id >= 0:
                        found[kind.name][peer.name].append(value)
                    await asyncio.sleep(pause_s)
    return found


def summary_of(found: Found, chosen: Sequence[Kind]) -> dict[str, dict[str, Any]]:
    """cell -> server -> median, best and the ratio to llama.cpp."""
    table: dict[str, dict[str, Any]] = {}
    for kind in chosen:
        theirs = found[kind.name][LLAMACPP]
        best = min if kind.less_is_better else max
        row: dict[str, Any] = {}
        for name, ours in found[kind.name].items():
            pair = (theirs, ours) if kind.less_is_better else (ours, theirs)
            row[name] = {
                "median": round(statistics.median(ours), 2),
                "best": round(best(ours), 2),
                "ratio": None if name == LLAMACPP else ratio(*pair).to_json(),
            }
        table[kind.name] = row
    return table


def print_table(table: Mapping[str, Mapping[str, Any]]) -> None:
    for cell, row in table.items():
        for name, figures in row.items():
            against = figures["ratio"]
            told = "" if against is None else (
                f"  {against['median']:.2f} ({against['low']:.2f}-{against['high']:.2f})"
            )  # fmt: skip
            unit = "ms" if cell.startswith("first") else "tok/s"
            print(f"{cell:11s} {name:11s} {figures['median']:9.1f} {unit:5s}{told}")


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m loadtest.same_file --gguf m.gguf --llamacpp llama-server",
    )
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--llamacpp", type=Path, required=True, help="llama.cpp's llama-server")
    parser.add_argument("--make", nargs=2, metavar=("FORM", "OUT"),
                        help=f"measure the file rounded to one of {', '.join(FORMS)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--cells", help="some of them, with commas")
    parser.add_argument("--tailor-args", default="", help="more options of `tailor serve`")
    parser.add_argument("--llamacpp-args", default="", help="more options of llama-server")
    parser.add_argument("--pause", type=float, default=SETTLE_S, help="seconds between turns")
    parser.add_argument("--log-dir", type=Path, default=Path("loadtest/results/logs"))
    add_result_options(parser)
    return parser


def main() -> int:
    """The command. Returns the exit status."""
    parser = _options()
    options = parser.parse_args()
    names = None if options.cells is None else options.cells.split(",")
    try:
        chosen = kinds(options.tokens, names)
    except ValueError as error:
        parser.error(str(error))
    gguf, made = options.gguf, None
    if options.make is not None:
        made, gguf = options.make[0], Path(options.make[1])
        if not gguf.exists():
            requantise(options.gguf, gguf, made)
    refuse_busy_machine(options.max_load)
    args = {"tailor": options.tailor_args, LLAMACPP: options.llamacpp_args}
    peers = servers(gguf.resolve(), options.llamacpp.resolve(), args)
    stop_on_sigterm()
    about = machine.describe()

    async def run() -> Found:
        await bring_up(peers, options.log_dir)
        return await measure(peers, chosen, options.rounds, options.pause)

    try:
        table = summary_of(asyncio.run(run()), chosen)
    except PeerFailed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        bring_down(peers)
    print_table(table)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    emit(
        {
            "tool": "same_file",
            "gguf": gguf.name,
            "sha256": digest,
            "rounded_to": made,
            "rounds": options.rounds,
            "servers": describe_servers(peers),
            "cells": table,
            "machine": about,
        },
        options.json,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
