"""Where the time of a decode step goes: body, head, sampler, drafter, host.

    python -m loadtest.step_profile --folder MODEL_FOLDER            # in this process
    python -m loadtest.step_profile --url http://127.0.0.1:8000      # a running server

In process: the engine and the runner alone, as the engine process has them, stepped by hand. Body,
head (with greedy draws) and sampler (all other draws) are the runner's own clocks, drafter is the
engine's `propose`, host is what is left of the step (schedule, build, accept, extend, settle).

Of a server: N streams are started; from the moment all have their first token to the moment the
first one ends only decode steps run. Counters of /metrics at both ends and the wall clock give the
mean step as a client sees it. `outside` is the wall time between steps (channel, API, sockets,
idle), `overhead` = all that is not the model = wall - model.

Prefill steps are left out of both. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from rich.console import Console
from rich.table import Table

from loadtest import machine
from loadtest.completion import Timing, request_body, stream
from loadtest.options import add_result_options, emit, refuse_busy_machine
from loadtest.peer import PeerFailed, parse_peers, wait_ready
from loadtest.prompts import distinct_prompts
from loadtest.stats import summarize

if TYPE_CHECKING:
    from server.engine.engine import Engine

SERIES = ("step_time", "step_model_time", "propose_time", "step_host_time")
SAMPLE = re.compile(r"^tailor_(\w+?)_seconds_(sum|count)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
ROWS = re.compile(r"^tailor_step_rows_sum(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
PARTS = ("body", "head", "sampler", "drafter", "host")


def parse_steps(metrics: str) -> dict[str, float]:
    """Sums over all engines: `num_steps`, `rows` and the seconds of each of SERIES."""
    found = dict.fromkeys(SERIES, 0.0) | {"num_steps": 0.0}
    for name, kind, value in SAMPLE.findall(metrics):
        if kind == "sum" and name in SERIES:
            found[name] += float(value)
        elif kind == "count" and name == "step_time":
            found["num_steps"] += float(value)
    found["rows"] = sum(float(value) for value in ROWS.findall(metrics))
    return found


def per_step(before: dict[str, float], after: dict[str, float], wall_s: float) -> dict[str, float]:
    """Mean milliseconds a step between two readings of parse_steps, wall_s apart.

    Raises ValueError when no step was made.
    """
    steps = after["num_steps"] - before["num_steps"]
    if steps <= 0:
        raise ValueError("no step between the two readings")
    mean = {name: (after[name] - before[name]) / steps for name in (*SERIES, "rows")}
    wall = wall_s / steps
    return {
        "num_steps": steps,
        "rows": mean["rows"],
        "wall_ms": 1000 * wall,
        "step_ms": 1000 * mean["step_time"],
        "model_ms": 1000 * mean["step_model_time"],
        "drafter_ms": 1000 * mean["propose_time"],
        "host_ms": 1000 * mean["step_host_time"],
        "outside_ms": 1000 * (wall - mean["step_time"]),
        "overhead_ms": 1000 * (wall - mean["step_model_time"]),
        "overhead_share": (wall - mean["step_model_time"]) / wall,
    }


async def profile_server(
    url: str, counts: Sequence[int], drafters: Sequence[str], *, num_tokens: int, num_rounds: int
) -> dict[str, Any]:
    """Figures by number of streams and drafter; the median over the rounds of each mean."""
    [peer] = parse_peers([f"tailor={url}"])
    peer.url = url.rstrip("/")
    await wait_ready(peer, timeout_s=60.0)
    figures: dict[str, Any] = {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=900.0, limits=limits) as client:

        async def read() -> tuple[dict[str, float], float]:
            response = await client.get(f"{peer.url}/metrics")
            return parse_steps(response.text), time.perf_counter()

        async def one_round(count: int, drafter: str, salt: str) -> dict[str, float]:
            all_began = asyncio.Event()
            num_begun = 0

            def began() -> None:
                nonlocal num_begun
                num_begun += 1
                if num_begun == count:
                    all_began.set()

            extra = {"speculation": {"drafter": drafter}, "ignore_eos": True}
            tasks: list[asyncio.Task[Timing]] = [
                asyncio.create_task(
                    stream(
                        client, peer.url,
                        request_body(
                            "tailor", peer.model, prompt, max_tokens=num_tokens,
                            salt=f"{salt}-{index}", extra=extra,
                        ),
                        on_first_token=began,
                    )
                )
                for index, prompt in enumerate(distinct_prompts(count))
            ]  # fmt: skip
            waiter = asyncio.create_task(all_began.wait())
            await asyncio.wait([waiter, *tasks], return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()
            before, start_s = await read()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            after, end_s = await read()
            await asyncio.gather(*tasks)
            return per_step(before, after, end_s - start_s)

        salt = f"{time.time_ns():x}"
        for count in counts:
            for drafter in drafters:
                await one_round(count, drafter, f"{salt}-warm-{count}-{drafter}")
        rounds: dict[tuple[int, str], list[dict[str, float]]] = {}
        for round_id in range(num_rounds):
            for count in counts:
                for drafter in drafters:
                    found = await one_round(count, drafter, f"{salt}-{round_id}-{count}-{drafter}")
                    rounds.setdefault((count, drafter), []).append(found)
    for (count, drafter), several in rounds.items():
        medians = {}
        for key in several[0]:
            summary = summarize([one[key] for one in several])
            medians[key] = summary.p50 if summary is not None else 0.0
        figures[f"{count} x {drafter}"] = medians
    return figures


def profile_in_process(
    folder: Path,
    counts: Sequence[int],
    drafters: Sequence[str],
    *,
    num_tokens: int,
    threads: int | None,
    weights: str = "auto",
    steps_ahead: Sequence[int] = (0,),
) -> dict[str, Any]:
    """Median milliseconds of each part of a decode step, by sequences, drafter and, where several
    are asked for, steps ahead (EngineSettings)."""
    from tokenizers import Tokenizer

    from drafters import make_drafter
    from server.engine.engine import Engine
    from server.engine.settings import EngineSettings
    from server.model.build import RunnerSpec, build_runner
    from server.types import EngineSizes

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sizes = EngineSizes(kv_bytes=1 << 30)
    runner = build_runner(
        RunnerSpec("profiled", str(folder), sizes, weights=weights, threads=threads)
    )
    made = {name: make_drafter(name) for name in drafters if name != "off"}
    engines = [
        Engine(runner, made, EngineSettings(max_num_seqs=64, prefix_cache=False, steps_ahead=ahead))
        for ahead in steps_ahead
    ]
    figures: dict[str, Any] = {}
    try:
        for attempt in ("warm-up", "measured"):
            for count in counts:
                prompts = [tuple(tokenizer.encode(text).ids) for text in distinct_prompts(count)]
                for drafter, (ahead, engine) in itertools.product(
                    drafters, zip(steps_ahead, engines, strict=True)
                ):
                    found = _profile_steps(engine, prompts, drafter, num_tokens)
                    if attempt == "measured" and found:
                        behind = f", {ahead} ahead" if len(engines) > 1 else ""
                        figures[f"{count} x {drafter}{behind}"] = found
    finally:
        runner.close()
    return figures


def _profile_steps(
    engine: Engine, prompts: Sequence[tuple[int, ...]], drafter: str, num_tokens: int
) -> dict[str, float]:
    """The decode steps while all prompts run; nothing where there was none."""
    from server.types import Request, SamplingParams, SpeculationParams

    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    speculation = SpeculationParams(drafter)
    for index, ids in enumerate(prompts):
        name = f"{time.monotonic_ns()}-{index}"
        engine.submit(Request(name, "profile", "profiled", ids, sampling, speculation))
    runner: Any = engine.runner
    samples: dict[str, list[float]] = {part: [] for part in (*PARTS, "step")}
    num_rows = num_emitted = num_steps = 0
    while engine.has_work:
        began = time.perf_counter()
        deltas = engine.step()
        step_s = time.perf_counter() - began
        stats = engine.stats()
        if stats.num_prefill_rows or stats.num_running < len(prompts):
            continue  # prompts still come in, or the first answer has ended
        parts = (runner.body_s, runner.head_s, runner.draw_s, stats.propose_s)
        for part, value in zip(PARTS, (*parts, step_s - sum(parts)), strict=True):
            samples[part].append(1000 * value)
        samples["step"].append(1000 * step_s)
        num_rows += stats.num_rows
        num_steps += 1
        num_emitted += sum(len(delta.token_ids) for delta in deltas)
    if not num_steps:
        return {}
    found = {
        f"{part}_ms": summary.p50
        for part, values in samples.items()
        if (summary := summarize(values)) is not None
    }
    overhead_ms = found["drafter_ms"] + found["host_ms"]
    return found | {
        "num_steps": num_steps,
        "rows": num_rows / num_steps,
        "tokens_per_step_and_sequence": num_emitted / num_steps / len(prompts),
        "overhead_ms": overhead_ms,
        "overhead_share": overhead_ms / found["step_ms"],
    }


def print_report(console: Console, title: str, figures: dict[str, Any]) -> None:
    """One row a case; milliseconds a step."""
    if not figures:
        return
    table = Table(title=title)
    table.add_column("sequences x drafter")
    columns = list(next(iter(figures.values())))
    for column in columns:
        table.add_column(column, justify="right")
    for case, row in figures.items():
        table.add_row(case, *(f"{row[column]:.3g}" for column in columns))
    console.print(table)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.step_profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, help="a converted model, to profile in process")
    parser.add_argument("--url", help="a running Tailor server, to profile from outside")
    parser.add_argument("--sequences", default="1,16")
    parser.add_argument("--drafters", default="off,suffix")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="of the server's profile")
    parser.add_argument("--threads", type=int, help="of the in-process runner")
    parser.add_argument("--weights", default="auto", help="of the in-process runner")
    parser.add_argument("--steps-ahead", default="0", help="in process: 0, 1 or both, 0,1")
    add_result_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        counts = [int(count) for count in options.sequences.split(",")]
        ahead = [int(number) for number in options.steps_ahead.split(",")]
        if not set(ahead) <= {0, 1}:
            raise ValueError("--steps-ahead wants 0, 1 or 0,1")
        if min(*counts, options.tokens, options.rounds) < 1:
            raise ValueError("--sequences, --tokens and --rounds want at least 1")
        if not options.folder and not options.url:
            raise ValueError("name --folder, --url, or both")
    except ValueError as error:
        parser.error(str(error))
    refuse_busy_machine(options.max_load)
    drafters = options.drafters.split(",")
    result: dict[str, Any] = {"tool": "step_profile", "machine": machine.describe()}
    try:
        if options.url:
            result["server"] = asyncio.run(
                profile_server(
                    options.url, counts, drafters,
                    num_tokens=options.tokens, num_rounds=options.rounds,
                )
            )  # fmt: skip
    except (PeerFailed, httpx.HTTPError, ValueError) as error:
        print(f"{options.url}: {error or type(error).__name__}", file=sys.stderr)
        return 1
    if options.folder:
        result["in_process"] = profile_in_process(
            options.folder, counts, drafters, num_tokens=options.tokens, threads=options.threads,
            weights=options.weights, steps_ahead=ahead,
        )  # fmt: skip
    console = Console(stderr=True, width=150)
    with suppress(KeyError):
        print_report(console, "server: mean ms a decode step", result["server"])
    with suppress(KeyError):
        print_report(console, "in process: median ms a decode step", result["in_process"])
    emit(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
