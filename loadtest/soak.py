"""Hours of mixed load with clients that leave, and whether anything grows or does not add up.

    python -m loadtest.soak --model smollm2-135m-instruct --minutes 30

Starts a server of its own (`tailor serve`, with a small KV cache, so that its memory is all touched
early) and sends it, from `--clients` at once: completions and chats, whole answers and streams,
several prompts and choices, log-probabilities, stop strings, seeds, every drafter, long prompts,
tools, schemas (one in two is new to the server), decisions, wrong requests. One request in five
(`--abort-share`) is left by its client: streams after some chunks, whole answers after some time.
These go to a task of their own, as decisions do (their usage tells no steps), so that the counters
of the other task must equal the sums of `usage` to the token.

What it checks: memory, handles and threads of the server and its engines (medians of the second and
of the last quarter of the time); at the end, with nothing open: KV use 0, nothing running, waiting
or open, no restart, counters equal usage, no answer with an unexpected status, and no line of log
that is an error. Ends in one JSON line; exits 1 when a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.progress import Progress

from loadtest import machine
from loadtest.options import emit
from loadtest.soak_traffic import (
    COUNTED,
    CUT,
    DRAFTERS,
    KEPT,
    Options,
    Reading,
    Tally,
    expect,
    send,
)

SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class SoakFailed(Exception):
    """The server did not start, or went away."""


# --- the server ---


class Server:
    """A `tailor serve` process of ours, its address and what it logged."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.errors: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._threads = [
            threading.Thread(target=self._read_out, daemon=True),
            threading.Thread(target=self._read_log, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"ready on (http://\S+) after", line):
                self.url = found[1]
                self._ready.set()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                level = json.loads(line).get("level")
            except (ValueError, AttributeError):
                level = None  # no line of ours: a library's, or Python's own
            if level != "info" and len(self.errors) < 100:
                self.errors.append(line.strip()[:300])

    def wait_ready(self, timeout_s: float) -> None:
        """Raises SoakFailed when it ends or is not ready in time."""
        end_s = time.monotonic() + timeout_s
        while not self._ready.wait(0.2):
            if self.process.poll() is not None or time.monotonic() > end_s:
                raise SoakFailed(f"the server did not start: {self.errors[-3:]}")

    def read(self, began_s: float) -> Reading:
        """Sums over the process and all below it; one that just ended counts nothing."""
        memory = handles = threads = 0
        try:
            main = psutil.Process(self.process.pid)
            for process in (main, *main.children(recursive=True)):
                try:
                    memory += process.memory_info().rss
                    handles += process.num_fds()
                    threads += process.num_threads()
                except psutil.NoSuchProcess:
                    continue
        except psutil.NoSuchProcess:
            raise SoakFailed("the server is gone") from None
        return Reading(time.monotonic() - began_s, memory / 2**20, handles, threads)


@contextmanager
def serving(model: str, options: Sequence[str], timeout_s: float) -> Iterator[Server]:
    """A running server with the two tasks; SIGTERM and its exit status at the end.

    Raises SoakFailed when it does not start, or does not end with status 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in (KEPT, CUT):
            (Path(folder) / f"{name}.yaml").write_text("description: soak\n", encoding="utf-8")
        command = [
            sys.executable, "-m", "server.commands.cli", "serve", "--port", "0", "--model", model,
            "--tasks", folder, "--log-format", "json", *options,
        ]  # fmt: skip
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        server = Server(process)
        try:
            server.wait_ready(timeout_s)
            yield server
            process.send_signal(signal.SIGTERM)
            if (status := process.wait(60)) != 0:
                raise SoakFailed(f"the server ended with status {status}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


# --- the clients ---


async def load(server: Server, options: Options, tally: Tally, progress: Progress) -> None:
    """All clients until the time is up; then every request is over."""
    began_s = time.monotonic()
    end_s = began_s + options.minutes * 60
    bar = progress.add_task("soak", total=options.minutes * 60)

    async def client_loop(k: int) -> None:
        rng = random.Random(options.seed * 1000 + k)
        async with httpx.AsyncClient(timeout=options.patience_s) as client:
            while time.monotonic() < end_s:
                try:
                    await send(client, server.url, rng, tally, options)
                except httpx.TransportError as error:
                    expect(tally, "connection", False, type(error).__name__)
                    await asyncio.sleep(0.2)

    async def watch() -> None:
        told_s = 0.0
        while True:
            tally.readings.append(server.read(began_s))
            now_s = time.monotonic() - began_s
            progress.update(bar, completed=now_s)
            if not progress.console.is_terminal and now_s - told_s >= 60:
                told_s = now_s
                reading = tally.readings[-1]
                progress.console.print(
                    f"{now_s / 60:.0f} min: {sum(tally.outcomes.values())} requests, "
                    f"{reading.memory_mib:.0f} MiB, {reading.num_handles} handles",
                    highlight=False,
                )
            await asyncio.sleep(min(2.0, options.minutes * 60 / 40))

    watching: asyncio.Future[Any] = asyncio.create_task(watch())
    clients: asyncio.Future[Any] = asyncio.gather(
        *(client_loop(k) for k in range(options.num_clients))
    )
    try:
        done, _ = await asyncio.wait({watching, clients}, return_when=asyncio.FIRST_COMPLETED)
        for finished in done:
            finished.result()
    finally:
        watching.cancel()
        clients.cancel()
        await asyncio.gather(watching, clients, return_exceptions=True)


# --- the verdict ---


def metric(page: str, name: str, **labels: str) -> float:
    """Sum of a series over the labels that are not given; 0.0 without one."""
    total = 0.0
    for found, text, value in SAMPLE.findall(page):
        if found == name and all(f'{k}="{v}"' in text for k, v in labels.items()):
            total += float(value)
    return total


def growth(readings: Sequence[Reading], value: str) -> tuple[float, float]:
    """(median of the second quarter, median of the last quarter) of a reading's value."""
    num = len(readings)
    early = [getattr(r, value) for r in readings[num // 4 : max(num // 4 + 1, num // 2)]]
    late = [getattr(r, value) for r in readings[min(num - 1, 3 * num // 4) :]]
    return statistics.median(early), statistics.median(late)


async def settle(server: Server, wait_s: float = 20.0) -> dict[str, Any]:
    """What is left once nothing is asked any more: /metrics and /health when idle, or as they are
    after wait_s."""
    async with httpx.AsyncClient(timeout=30.0) as client:
        end_s = time.monotonic() + wait_s
        while True:
            page = (await client.get(f"{server.url}/metrics")).text
            health = (await client.get(f"{server.url}/health")).json()
            left = {
                "kv_cache_usage": metric(page, "tailor_kv_cache_usage_perc"),
                "running": metric(page, "tailor_num_requests_running"),
                "waiting": metric(page, "tailor_num_requests_waiting"),
                "open": sum(engine["open_requests"] for engine in health["engines"]),
            }
            if not any(left.values()) or time.monotonic() > end_s:
                restarts = sum(engine["restarts"] for engine in health["engines"])
                return {**left, "restarts": restarts, "page": page}
            await asyncio.sleep(0.3)


def judge(
    tally: Tally, left: Mapping[str, Any], errors: Sequence[str], *, slack_mib: float, share: float
) -> dict[str, Any]:
    """Every check with its figures, and the whole verdict.

    slack_mib, share: what memory may grow by, whichever is more.
    """
    memory = growth(tally.readings, "memory_mib")
    handles = growth(tally.readings, "num_handles")
    threads = growth(tally.readings, "num_threads")
    counters = {
        name: (metric(left["page"], name, task=KEPT), float(tally.usage[told]))
        for name, told in COUNTED.items()
    }
    checks = {
        "memory": memory[1] - memory[0] <= max(slack_mib, share * memory[0]),
        "handles": handles[1] - handles[0] <= 8,
        "threads": threads[1] - threads[0] <= 4,
        "blocks": left["kv_cache_usage"] == 0,
        "idle": not (left["running"] or left["waiting"] or left["open"]),
        "restarts": left["restarts"] == 0,
        "counters": all(a == b for a, b in counters.values()) and tally.usage["steps"] > 0,
        "answers": not tally.unexpected,
        "log": not errors,
    }
    return {
        "passed": all(checks.values()),
        "checks": checks,
        "outcomes": dict(tally.outcomes),
        "memory_mib": [round(v, 1) for v in memory],
        "handles": handles,
        "threads": threads,
        "left": {k: v for k, v in left.items() if k != "page"},
        "counters": {k: list(v) for k, v in counters.items()},
        "unexpected": tally.unexpected,
        "log_errors": list(errors)[:20],
    }


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.soak",
        description="Mixed load with clients that leave; whether anything grows or is lost.",
        epilog="example: python -m loadtest.soak --model smollm2-135m-instruct --minutes 30",
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what to serve")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (30)")
    parser.add_argument("--clients", type=int, default=8, help="requests at once (8)")
    parser.add_argument(
        "--abort-share", type=float, default=0.2, help="share of requests left early (0.2)"
    )
    parser.add_argument("--tokens", type=int, default=48, help="most tokens an answer (48)")
    parser.add_argument("--kv", default="128MiB", help="the server's KV cache (128MiB)")
    parser.add_argument(
        "--drafters", default=",".join(DRAFTERS), help="drafters to mix, with commas"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the mix (1)")
    parser.add_argument(
        "--memory-slack", type=float, default=32.0, metavar="MIB", help="growth allowed (32)"
    )
    parser.add_argument(
        "--patience", type=float, default=900.0, metavar="SECONDS",
        help="longest silence of the server that is not a failure (900)",
    )  # fmt: skip
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the JSON line here too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak. 0 when every check held, 1 when one did not, 2 for a wrong command line."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    if not (args.minutes > 0 and args.clients > 0 and 0 <= args.abort_share < 0.95):
        parser.error("--minutes and --clients must be positive, --abort-share below 0.95")
    options = Options(
        args.minutes, args.clients, args.abort_share, args.tokens,
        tuple(filter(None, args.drafters.split(","))), args.seed, args.patience,
    )  # fmt: skip
    console = Console(stderr=True)
    tally = Tally()
    try:
        with serving(args.model, ["--kv-cache-memory", args.kv], args.start_timeout) as server:
            with Progress(console=console, disable=not console.is_terminal) as progress:
                asyncio.run(load(server, options, tally, progress))
            left = asyncio.run(settle(server))
    except SoakFailed as error:
        console.print(f"failed: {error}", markup=False)
        return 1
    result = judge(tally, left, server.errors, slack_mib=args.memory_slack, share=0.02)
    for name, well in result["checks"].items():
        console.print(f"{'ok  ' if well else 'FAIL'} {name}", highlight=False)
    emit(
        {
            "tool": "soak",
            "minutes": args.minutes,
            "clients": args.clients,
            "abort_share": args.abort_share,
            "model": args.model if "/" not in args.model else Path(args.model).name,
            **result,
            "machine": machine.describe(),
        },
        args.json,
    )
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
