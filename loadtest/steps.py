"""`python -m loadtest.same_file steps` and `host`: a model's steps in this process, in turns.

`steps` times the runner alone. One process, one runner for each form of the weights. A step is one
sequence with a history of --keys positions and a chain of rows, each drawn from the full LM head,
as in decoding with drafts (engine/probe.py). In every round each form runs once, so that a slow
minute of the machine affects all of them. Milliseconds are medians; ratios are of the same round,
float32 over the form (2 = twice as fast), with a bootstrap interval; `cpu_ms` is the processor time
of the step in all threads, which other processes disturb less; `rows_cost` is a step's time over
that of the fewest rows. In every round as many threads read memory, too, plain sums of as many
bytes as the largest form has: `of_reading` is a step's time over what reading the form's weights
takes at that speed.

`host` steps the Engine as a server has it, by hand, and takes the steps in which all sequences
decode: milliseconds of a step, in the model (with its head and draws), and in the host (what is
left), by form, number of sequences and drafter.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from cyclopts import Parameter

from loadtest.figures import ratio
from loadtest.options import ResultOptions, emit, listed, numbers
from loadtest.prompts import distinct_prompts
from server.commands.options import Bar, ModelOptions, as_options
from server.commands.own_engine import own_engine
from server.engine.batch import Runner
from server.engine.engine import Engine
from server.engine.probe import make_prober
from server.errors import ModelError
from server.machine import cores
from server.model.build import RunnerSpec, build_runner
from server.model.catalog import model_folder
from server.model.cpu.runner import CpuRunner
from server.types import EngineSizes, Request, SamplingParams, SpeculationParams

T = TypeVar("T")
FORMS = ("float32", "bfloat16", "int8", "int8-blocks", "int4")
"""What `engine.weights` can be for every model."""
_MEMORY = "memory"  # stands among the forms of a round


@as_options
class StepOptions:
    """The model, the step and how often it runs."""

    model: str = "smollm2-135m-instruct"
    forms: Annotated[
        str, Parameter(help="float32 is added; form:DTYPE is also what K and V are kept as")
    ] = ",".join(FORMS)
    rows: str = "1,4,16,32,256"
    keys: Annotated[int, Parameter(help="positions before the step")] = 128
    rounds: int = 9
    threads: int | None = None


_STEPS, _RESULTS = StepOptions(), ResultOptions()


@contextmanager
def runner_of(
    model: str, form: str, *, adapter: str | None = None, threads: int | None = None,
    max_rows: int = 512,
) -> Iterator[tuple[CpuRunner, Path]]:  # fmt: skip
    """(a runner of the model, its folder). form: one of FORMS or "file"; behind a colon, what K and
    V are kept as (auto). Raises ModelError for what cannot be served so."""
    weights, _, kv_dtype = form.partition(":")
    if weights not in (*FORMS, "file"):
        raise ModelError(f"{form!r} is none of {', '.join(FORMS)}, file")
    folder = model_folder(model, "file" if weights == "file" else "float32")
    spec = RunnerSpec(
        name=form,
        folder=str(folder),
        adapter=adapter,
        weights=weights,
        kv_dtype=kv_dtype or "auto",
        sizes=EngineSizes(max_num_seqs=1, max_num_batched_tokens=max_rows, kv_bytes=256 << 20),
        threads=threads,
    )
    with closing(build_runner(spec)) as runner:
        assert isinstance(runner, CpuRunner)
        yield runner, folder


def forms_of(names: str) -> list[str]:
    """A list with commas, float32 first: everything is compared with it."""
    return ["float32", *(name for name in listed(names) if name != "float32")]


def in_turns(runs: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each run gave, a value a round. In a round each runs once, so that a slow minute of the
    machine affects all. Two rounds come before: they compile, and touch what was not touched."""
    gave: dict[str, list[T]] = {name: [] for name in runs}
    for number in range(rounds + 2):
        for name, run in runs.items():
            value = run()
            if number >= 2:
                gave[name].append(value)
    return gave


class MemoryReader:
    """Reads num_bytes, cut between the pool's threads; they must be more than the caches hold."""

    def __init__(self, num_bytes: int, pool: ThreadPoolExecutor, threads: int) -> None:
        self.num_bytes = num_bytes // (64 * threads) * 64 * threads
        self._shares = np.array_split(np.ones(self.num_bytes // 8, np.int64), threads)
        self._pool = pool

    def read_s(self) -> float:
        """Seconds that all threads take for all bytes."""
        began = time.perf_counter()
        list(self._pool.map(np.sum, self._shares))  # which holds no interpreter lock meanwhile
        return time.perf_counter() - began


def measure_forms(
    runners: Mapping[str, CpuRunner], rows: int, keys: int, rounds: int, reader: MemoryReader
) -> dict[str, dict[str, Any]]:
    """form -> figures of a step with so many rows. float32 must be among the forms."""
    probes = {form: make_prober(runner) for form, runner in runners.items()}

    def step(form: str) -> tuple[float, float]:
        began = time.process_time()
        wall_s = probes[form](rows, keys)
        return wall_s, time.process_time() - began

    runs: dict[str, Callable[[], tuple[float, float]]] = {
        _MEMORY: lambda: (reader.read_s(), 0.0),
        **{form: functools.partial(step, form) for form in runners},
    }
    took = in_turns(runs, rounds)
    bytes_s = [reader.num_bytes / wall_s for wall_s, _ in took[_MEMORY]]
    wall = {form: [wall_s for wall_s, _ in times] for form, times in took.items()}
    return {
        form: {
            "ms": round(1e3 * statistics.median(wall[form]), 3),
            "best_ms": round(1e3 * min(wall[form]), 3),
            "cpu_ms": round(1e3 * statistics.median(cpu_s for _, cpu_s in took[form]), 3),
            "speed": ratio(wall["float32"], wall[form]),
            "of_reading": round(
                statistics.median(
                    seconds * each / runner.weight_bytes
                    for seconds, each in zip(wall[form], bytes_s, strict=True)
                ),
                2,
            ),
            "read_gb_s": round(1e-9 * statistics.median(bytes_s), 3),
        }
        for form, runner in runners.items()
    }


def steps(*, options: StepOptions = _STEPS, results: ResultOptions = _RESULTS) -> int:
    """Steps of a model's forms, in turns; see loadtest.steps.

    Example: python -m loadtest.same_file steps --forms int8,int4 --rows 1,16
    """
    rows = numbers(options.rows, "--rows")
    results.refuse_busy_machine()
    found: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        runners = {
            form: stack.enter_context(
                runner_of(options.model, form, threads=options.threads, max_rows=max(rows))
            )[0]
            for form in forms_of(options.forms)
        }
        largest = max(runner.weight_bytes for runner in runners.values())
        threads = options.threads or cores()
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        reader = MemoryReader(largest, pool, threads)
        for num in rows:
            by_form = measure_forms(runners, num, options.keys, options.rounds, reader)
            for form, figures in by_form.items():
                first = found.setdefault(form, {}).get(str(rows[0]), figures)
                figures["rows_cost"] = round(figures["ms"] / first["ms"], 2)
                found[form][str(num)] = figures
                print(f"{num:4d} rows  {form:12s} {figures}", flush=True)
    emit(
        "same_file steps",
        {"model": Path(options.model).name, "threads": options.threads, "keys": options.keys,
         "rounds": options.rounds, "steps": found},
        results.json,
    )  # fmt: skip
    return 0


class TimedRunner:
    """The engine's runner, and the seconds that its last step took in the model."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.model_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def wait(self) -> Any:
        """As the runner's."""
        drawn = self._runner.wait()
        self.model_s += drawn.model_s
        return drawn


def decode_steps(
    engine: Engine, model: str, prompts: Sequence[Sequence[int]], drafter: str, num_tokens: int
) -> dict[str, float]:
    """Median milliseconds of the steps in which all prompts decode; nothing where there was none.
    The engine's runner is a TimedRunner."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for index, ids in enumerate(prompts):
        name = f"{time.monotonic_ns()}-{index}"
        speculation = SpeculationParams(drafter)
        engine.submit(Request(name, "steps", model, tuple(ids), sampling, speculation))
    runner: Any = engine.runner
    samples: list[tuple[float, float]] = []
    num_tokens_seen, begun = 0, set[str]()
    while engine.has_work:
        runner.model_s, began = 0.0, time.perf_counter()
        deltas = engine.step()
        step_s = time.perf_counter() - began
        gave = {delta.request_id for delta in deltas if delta.token_ids}
        ended = any(delta.finish_reason is not None for delta in deltas)
        if len(gave) == len(prompts) and gave == begun and not ended:
            samples.append((step_s, runner.model_s))
            num_tokens_seen += sum(len(delta.token_ids) for delta in deltas)
        begun |= gave
    if not samples:
        return {}
    step_ms = 1e3 * statistics.median(step_s for step_s, _ in samples)
    return {
        "num_steps": len(samples),
        "step_ms": round(step_ms, 3),
        "model_ms": round(1e3 * statistics.median(model_s for _, model_s in samples), 3),
        "host_ms": round(1e3 * statistics.median(a - b for a, b in samples), 4),
        "tokens_per_step": round(num_tokens_seen / len(samples) / len(prompts), 3),
    }


@as_options
class HostOptions:
    """Whose steps, and how many."""

    model: str = "smollm2-135m-instruct"
    forms: Annotated[str, Parameter(help="engine.weights, with commas")] = "auto"
    sequences: str = "1,8,32"
    drafters: str = "off,auto"
    tokens: Annotated[int, Parameter(help="of each sequence")] = 128
    rounds: int = 3
    threads: int | None = None


_HOST = HostOptions()


def host(*, options: HostOptions = _HOST, results: ResultOptions = _RESULTS) -> int:
    """The host's part of a decode step; see loadtest.steps.

    Example: python -m loadtest.same_file host --forms int8 --sequences 1,8 --drafters off,auto
    """
    sequences, drafters = numbers(options.sequences, "--sequences"), listed(options.drafters)
    results.refuse_busy_machine()
    found: dict[str, dict[str, float]] = {}
    for form in listed(options.forms):
        chosen: Any = form  # own_engine checks it
        model = ModelOptions(model=options.model, weights=chosen, threads=options.threads)
        compiled = tuple(name for name in drafters if name != "off")
        with Bar() as bar, own_engine(model, bar, compiled) as (served, engine):
            engine.runner = TimedRunner(engine.runner)
            encode = served.tokenizer.encode
            for number in range(options.rounds + 1):  # the first one warms up
                for count in sequences:
                    prompts = [encode(text).ids for text in distinct_prompts(count)]
                    for drafter in drafters:
                        case = f"{form}, {count} x {drafter}"
                        figures = decode_steps(
                            engine, served.name, prompts, drafter, options.tokens
                        )
                        if number and figures:
                            before = found.get(case, figures)
                            found[case] = min(before, figures, key=lambda one: one["host_ms"])
    for case, figures in found.items():
        print(f"{case:24s} {figures}", flush=True)
    emit("same_file host", {"model": Path(options.model).name, "steps": found}, results.json)
    return 0
