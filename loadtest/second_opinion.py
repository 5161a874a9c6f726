"""guidellm and aiperf beside loadtest.load: the same closed loop, told by three programs in turn.

    python -m loadtest.second_opinion --server http://127.0.0.1:8000 \\
        --model smollm2-135m-instruct --tokenizer $(tailor models fetch smollm2-135m-instruct) \\
        --guidellm guidellm-env/bin/guidellm --aiperf aiperf-env/bin/aiperf --streams 4 --rounds 8

Every round gives each program, in an order drawn anew, the same prompts, the same number of tokens
each (`ignore_eos`) and the same number of streams, against a Tailor server that is running. Our own
load runs twice a round: its second run beside its first one is the noise. Told: requests/s, the
mean time to the first token, and the mean inter-token latency as both tools define it,
(last token - first token) / (tokens - 1); loadtest.load's TPOT leaves out what the first chunk
brought beside its first token, which is the same where drafting is off.

A program agrees when the 95 % bootstrap interval of its paired ratios to ours meets that of the
noise. One that takes cores from the server slows what it measures; whether it measures *right* is
told by the server's own books of the same requests (from /metrics, before and after the run):
"of server" is what the program told / what the server booked. The server must have no other work.
Prints a table, then ends in one JSON line. Exits 1 when a request failed.

The versions that this was written for, each in an environment of its own:

    python3 -m venv guidellm-env && guidellm-env/bin/pip install torch==2.13.0 guidellm==0.8.1
    python3 -m venv aiperf-env && aiperf-env/bin/pip install aiperf==0.13.0
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtest import machine
from loadtest.cells import Ask, Level, run_cell
from loadtest.options import add_result_options, emit, refuse_busy_machine
from loadtest.peer import SETTLE_S, Peer, PeerFailed, stop_on_sigterm, wait_ready
from loadtest.prompts import Example, distinct_prompts
from loadtest.stats import median_interval, ratio

OURS, AGAIN = "load", "load again"
TOOL_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What one program told of one round: requests a second, and means in seconds.

    served_ttft_s, served_itl_s: the server's books of the same requests, where it keeps any.
    """

    requests_per_s: float
    ttft_s: float
    itl_s: float
    served_ttft_s: float | None = None
    served_itl_s: float | None = None


METRICS = ("requests_per_s", "ttft_s", "itl_s")
BOOKS = {"ttft_s": "tailor_time_to_first_token_seconds",
         "itl_s": "tailor_request_time_per_output_token_seconds"}  # fmt: skip
"""The server's histogram of each latency."""


@dataclass(frozen=True, slots=True)
class Job:
    """One round's work, the same for every program. fields: merged into each request's body."""

    url: str
    model: str
    tokenizer: Path
    prompts: Sequence[str]
    max_tokens: int
    num_streams: int
    fields: Mapping[str, Any]

    def body_fields(self, salt: str) -> dict[str, Any]:
        """Greedy, of full length, and no prefix of another program's run."""
        return {"temperature": 0.0, "ignore_eos": True, "cache_salt": salt, **self.fields}


class ToolFailed(Exception):
    """A program ended with an error, or did not answer every request."""


def read_books(url: str) -> dict[str, tuple[float, float]]:
    """(sum of seconds, number) of each latency that the server has booked so far; {} for one that
    has no such metrics."""
    answer = httpx.get(f"{url}/metrics", timeout=60)
    if answer.status_code != 200:
        return {}
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return {
        metric: (totals[f"{name}_sum"], totals[f"{name}_count"])
        for metric, name in BOOKS.items()
        if f"{name}_count" in totals
    }


def booked_between(
    before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """Mean seconds of what was booked between two readings, as fields of Figures."""
    return {
        f"served_{metric}": (total - before[metric][0]) / (num - before[metric][1])
        for metric, (total, num) in after.items()
        if metric in before and num > before[metric][1]
    }


async def run_ours(job: Job, salt: str) -> Figures:
    """loadtest.load's own closed loop. Raises ToolFailed when a request failed."""
    peer = Peer("tailor", job.url, "tailor", job.model, job.body_fields(""), url=job.url)
    del peer.extra["cache_salt"]  # run_cell gives each request its own
    asks = [Ask(Example("", "", prompt, ""), "", job.max_tokens) for prompt in job.prompts]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=900.0, limits=limits) as client:
        level = Level(concurrency=job.num_streams)
        cell = await run_cell(client, peer, level, 0, asks, salt=salt)
    if cell.failures:
        raise ToolFailed(f"{OURS}: {cell.failures[0]}")
    gaps = [(t.chunk_s[-1] - t.chunk_s[0]) / (t.num_tokens - 1) for t in cell.timings]
    return Figures(
        len(cell.timings) / cell.wall_s,
        sum(timing.ttft_s for timing in cell.timings) / len(cell.timings),
        sum(gaps) / len(gaps),
    )


def run_guidellm(binary: Path, job: Job, salt: str, folder: Path) -> Figures:
    """`guidellm run`. Raises ToolFailed."""
    data, out = folder / "guidellm.jsonl", folder / "guidellm.json"
    write_lines(
        data,
        [{"prompt": prompt, "output_tokens_count": job.max_tokens} for prompt in job.prompts],
    )
    backend = {
        "kind": "openai_http",
        "target": job.url,
        "model": job.model,
        "request_format": "/v1/completions",
        "extras": {"body": job.body_fields(salt)},
    }
    arguments = [
        *("--backend", json.dumps(backend)),
        *("--profile", json.dumps({"kind": "concurrent", "streams": [job.num_streams]})),
        *("--constraint", json.dumps({"kind": "max_requests", "count": len(job.prompts)})),
        *("--data", json.dumps({"kind": "json_file", "path": str(data)})),
        *("--tokenizer", json.dumps({"kind": "huggingface_auto", "model": str(job.tokenizer)})),
        *("--output", json.dumps({"kind": "json", "path": str(out)})),
        "--disable-console",
    ]
    # One worker process: the two cores are the server's.
    environment = {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"}
    run_tool([str(binary), "run", *arguments], environment, out)
    return read_guidellm(json.loads(out.read_text(encoding="utf-8")), len(job.prompts))


def read_guidellm(told: Mapping[str, Any], num_requests: int) -> Figures:
    """The figures of guidellm's JSON report. Raises ToolFailed when requests are missing."""
    metrics = told["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    if totals["successful"] != num_requests:
        raise ToolFailed(f"guidellm: {totals} of {num_requests} requests")
    return Figures(
        metrics["requests_per_second"]["successful"]["mean"],
        metrics["time_to_first_token_ms"]["successful"]["mean"] / 1e3,
        metrics["inter_token_latency_ms"]["successful"]["mean"] / 1e3,
    )


def run_aiperf(binary: Path, job: Job, salt: str, folder: Path) -> Figures:
    """`aiperf profile`. Raises ToolFailed."""
    data, out = folder / "aiperf.jsonl", folder / "aiperf"
    write_lines(data, [{"text": prompt} for prompt in job.prompts])
    fields = {"max_tokens": job.max_tokens, **job.body_fields(salt)}
    arguments = [
        *("--model", job.model, "--url", job.url, "--endpoint-type", "completions"),
        *("--streaming", "--use-server-token-count", "--tokenizer", str(job.tokenizer)),
        *("--custom-dataset-type", "single_turn", "--input-file", str(data)),
        *("--dataset-sampling-strategy", "sequential"),
        *("--concurrency", str(job.num_streams), "--request-count", str(len(job.prompts))),
        *("--extra-inputs", json.dumps(fields), "--output-artifact-dir", str(out)),
        *("--workers-max", "1", "--record-processor-service-count", "1", "--ui-type", "none"),
        *("--no-gpu-telemetry", "--no-server-metrics"),
    ]
    report = out / "profile_export_aiperf.json"
    # Not HF_HUB_OFFLINE: with it aiperf 0.13.0 takes the tokenizer's folder for a hub's name.
    run_tool([str(binary), "profile", *arguments], {}, report)
    return read_aiperf(json.loads(report.read_text(encoding="utf-8")), len(job.prompts))


def read_aiperf(told: Mapping[str, Any], num_requests: int) -> Figures:
    """The figures of aiperf's JSON report. Raises ToolFailed when requests are missing."""
    answered = told["request_count"]["avg"]
    if answered != num_requests:
        raise ToolFailed(f"aiperf: {answered} of {num_requests} requests")
    return Figures(
        told["request_throughput"]["avg"],
        told["time_to_first_token"]["avg"] / 1e3,
        told["inter_token_latency"]["avg"] / 1e3,
    )


def write_lines(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def run_tool(command: Sequence[str], environment: Mapping[str, str], report: Path) -> None:
    """Run a program that must leave `report`; ToolFailed with its last words otherwise."""
    report.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TOOL_LIMIT_S, check=False,
            env={**os.environ, **environment},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolFailed(f"{Path(command[0]).name}: {error}") from None
    if done.returncode or not report.exists():
        said = (done.stdout + done.stderr)[-2000:]
        raise ToolFailed(f"{Path(command[0]).name} ended with {done.returncode}:\n{said}")


def version_of(binary: Path) -> str:
    """The last word of `BINARY --version`, "" when it says none."""
    try:
        done = subprocess.run(
            [str(binary), "--version"], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    words = done.stdout.split()
    return words[-1] if words else ""


def report(rounds: Sequence[Mapping[str, Figures]]) -> dict[str, Any]:
    """Each program's figures and its ratios to ours. rounds: by program's name, a round each.

    agrees: the interval of the ratio meets that of our own second run.
    """
    programs: dict[str, Any] = {}
    noise = {
        metric: ratio(
            [getattr(one[AGAIN], metric) for one in rounds],
            [getattr(one[OURS], metric) for one in rounds],
        )
        for metric in METRICS
    }
    for name in rounds[0]:
        row: dict[str, Any] = {}
        for metric in METRICS:
            values = [getattr(one[name], metric) for one in rounds]
            row[metric] = median_interval(values).to_json()
            if name != OURS:
                against = ratio(values, [getattr(one[OURS], metric) for one in rounds])
                row[metric]["ratio"] = against.to_json()
                row[metric]["agrees"] = (
                    against.low <= noise[metric].high and against.high >= noise[metric].low
                )
            if metric in BOOKS:
                booked = [getattr(one[name], f"served_{metric}") for one in rounds]
                if None not in booked:
                    row[metric]["of_server"] = ratio(values, booked).to_json()
        programs[name] = row
    return {"programs": programs}


def print_report(console: Console, result: Mapping[str, Any]) -> None:
    table = Table(title=f"{result['num_streams']} streams, medians of rounds; ratio = tool / load")
    table.add_column("program")
    for column in ("requests/s", "ratio", "TTFT ms", "ratio", "of server",
                   "ITL ms", "ratio", "of server"):  # fmt: skip
        table.add_column(column, justify="right")
    for name, row in result["programs"].items():
        cells = []
        for metric, scale in zip(METRICS, (1.0, 1000.0, 1000.0), strict=True):
            found = row[metric]
            cells.append(f"{found['median'] * scale:.4g}")
            against = found.get("ratio")
            cells.append(
                ""
                if against is None
                else f"{against['median']:.3f} [{against['low']:.3f}, {against['high']:.3f}]"
                + ("" if found["agrees"] else " differs")
            )
            if metric in BOOKS:
                booked = found.get("of_server")
                cells.append("" if booked is None else f"{booked['median']:.3f}")
        table.add_row(name, *cells)
    console.print(table)


def measure(
    job: Job, tools: Mapping[str, Path], num_rounds: int, pause_s: float, console: Console
) -> list[dict[str, Figures]]:
    """Every round's figures by program. Raises ToolFailed."""
    rounds: list[dict[str, Figures]] = []
    stamp = f"{time.time_ns():x}"
    with (
        tempfile.TemporaryDirectory(prefix="second-opinion-") as folder,
        Progress(console=console) as progress,
    ):
        bar = progress.add_task("runs", total=num_rounds * (len(tools) + 2))
        asyncio.run(run_ours(job, f"{stamp}-warm"))
        for round_id in range(num_rounds):
            found: dict[str, Figures] = {}
            names = [OURS, AGAIN, *tools]
            for name in random.Random(round_id).sample(names, len(names)):
                progress.update(bar, description=name)
                salt = f"{stamp}-{round_id}-{name}"
                before = read_books(job.url)
                if name == "guidellm":
                    found[name] = run_guidellm(tools[name], job, salt, Path(folder))
                elif name == "aiperf":
                    found[name] = run_aiperf(tools[name], job, salt, Path(folder))
                else:
                    found[name] = asyncio.run(run_ours(job, salt))
                booked = booked_between(before, read_books(job.url))
                found[name] = replace(found[name], **booked)
                progress.update(bar, advance=1)
                time.sleep(pause_s)
            rounds.append({name: found[name] for name in names})
    return rounds


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.second_opinion",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="a Tailor server")
    parser.add_argument("--model", required=True, help="what requests put into `model`")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the model's folder")
    parser.add_argument("--guidellm", type=Path, help="its program; left out without")
    parser.add_argument("--aiperf", type=Path, help="its program; left out without")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--requests", type=int, default=32, help="of each run")
    parser.add_argument("--tokens", type=int, default=64, help="of each request")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--extra", default="{}", metavar="JSON", help="fields of every request")
    parser.add_argument("--pause", type=float, default=SETTLE_S, help="seconds between runs")
    add_result_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    tools = {
        name: path
        for name, path in (("guidellm", options.guidellm), ("aiperf", options.aiperf))
        if path is not None
    }
    try:
        fields = json.loads(options.extra)
        if not isinstance(fields, dict):
            raise ValueError("--extra wants a JSON object")
        if not tools:
            raise ValueError("name a program with --guidellm or --aiperf")
        if min(options.streams, options.requests, options.rounds) < 1 or options.tokens < 2:
            raise ValueError("--streams, --requests, --rounds want at least 1, --tokens 2")
    except ValueError as error:
        parser.error(str(error))
    refuse_busy_machine(options.max_load)
    about = machine.describe()
    console = Console(stderr=True, width=140)
    stop_on_sigterm()
    job = Job(
        options.server.rstrip("/"), options.model, options.tokenizer,
        distinct_prompts(options.requests), options.tokens, options.streams, fields,
    )  # fmt: skip
    try:
        peer = Peer("tailor", job.url, "tailor", job.model, url=job.url)
        asyncio.run(wait_ready(peer))
        rounds = measure(job, tools, options.rounds, options.pause, console)
    except (PeerFailed, ToolFailed) as error:
        print(error, file=sys.stderr)
        return 1
    result = {
        "tool": "second_opinion",
        "machine": about,
        "versions": {name: version_of(path) for name, path in tools.items()},
        "server": peer.version,
        "model": options.model,
        "extra": fields,
        "num_streams": options.streams,
        "num_requests": options.requests,
        "num_tokens": options.tokens,
        "num_rounds": options.rounds,
        **report(rounds),
        "rounds": [{name: asdict(told) for name, told in one.items()} for one in rounds],
    }
    print_report(console, result)
    emit(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
