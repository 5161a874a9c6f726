"""What the load tests' command lines share: servers, where results go, the JSON line at the end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest import machine
from loadtest.peer import Peer, parse_peers


def add_server_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The options that name servers and say where the result goes; shared by the load tests.

    required: whether a server must be named, the first of which is ours; else none is.
    """
    parser.add_argument(
        "--server", action="append", required=required, default=None if required else [],
        metavar="NAME=WHERE",
        help="URL, start script, or @NAME; repeat" + ("; the first one is ours" * required),
    )  # fmt: skip
    parser.add_argument("--model", action="append", default=[], metavar="NAME=MODEL")
    parser.add_argument("--extra", action="append", default=[], metavar="NAME=JSON",
                        help="fields merged into that server's requests")  # fmt: skip
    parser.add_argument("--dialect", action="append", default=[], metavar="NAME=DIALECT")
    parser.add_argument("--key", action="append", default=[], metavar="NAME=VARIABLE",
                        help="environment variable that holds that server's API key")  # fmt: skip
    parser.add_argument("--log-dir", type=Path, default=Path("loadtest/results/logs"))
    add_result_options(parser)


def peers_of(options: argparse.Namespace) -> list[Peer]:
    """The servers that `add_server_options` took. Raises ValueError as `parse_peers` does."""
    return parse_peers(
        options.server,
        models=options.model,
        extras=options.extra,
        dialects=options.dialect,
        keys=options.key,
    )


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """Where the JSON line goes (`emit`), and how busy a machine is too busy to measure on."""
    parser.add_argument("--json", type=Path, help="append the JSON line to this file too")
    parser.add_argument(
        "--max-load", type=float, default=0.5,
        help="refuse to measure while the machine's 1-minute load is above this "
        "(read before servers are started)",
    )  # fmt: skip


def refuse_busy_machine(max_load: float) -> None:
    """Exit 2 when the machine is busy: figures taken then say nothing."""
    load = machine.describe()["load_1min"]
    if load > max_load:
        print(f"load is {load}, above --max-load {max_load}: not measuring", file=sys.stderr)
        raise SystemExit(2)


def emit(result: Mapping[str, Any], path: Path | None) -> None:
    """Print the JSON line, last, and append it to `path`."""
    line = json.dumps(result, ensure_ascii=False)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as out:
            out.write(line + "\n")
    print(line)


def describe_servers(peers: Sequence[Peer]) -> dict[str, dict[str, Any]]:
    """What the JSON line says of each server: no path of this machine."""
    return {
        peer.name: {
            "dialect": peer.dialect,
            "model": Path(peer.model).name,
            "version": peer.version,
            "extra": peer.extra,
            "started_by": Path(peer.where).name if peer.process else "",
        }
        for peer in peers
    }
