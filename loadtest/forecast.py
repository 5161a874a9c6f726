"""What `tailor tasks tune` forecasts, beside what an engine then does: steps, nodes, times.

    python -m loadtest.forecast --data ../shared/data --sets gsm8k squad

For each data set a task is tuned on train prompts (the model's own outputs, as `tailor tasks tune`
records them), and an engine like the server's, in this process, answers test prompts with the
tuned task's drafts and without, in turn, by --clients at once. Every pass begins with nothing
cached and nothing learned, and nothing of the answers is learned but how far drafts are to be
trusted: what a task will learn no forecast knows (--learn measures it). Steps are priced by one
cost table that is not refreshed, so that the counts do not depend on what else the machine does.
Told for each number of clients:

    counted     tokens a step and draft nodes a step, which a busy machine changes little
    timed       seconds without drafts over seconds with them, of the least of --rounds passes each

--priced FILE (a server's cost table) times no model: each step takes what the table says and the
host its CPU seconds (loadtest.priced_runner), so that what the engine does stands beside its
forecast on a busy machine too, and with no costs but those of the table.

The forecast stands beside it twice: tune's own, of held-back train prompts, which is what a user
is told (`tune_`), and the same forecast of the very answers that were measured, in which no luck of
the prompts is left (`again_`). The last line is JSON with the ratios forecast / measured; exits 1
when a text differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from drafters.auto.likely import NUM_LIKELY
from drafters.replay import Recording
from loadtest import machine
from loadtest.priced_runner import PricedClock, PricedRunner, priced_time
from server.commands.options import ModelOptions
from server.commands.own_engine import own_engine
from server.commands.progress import Bar
from server.commands.recorder import Answer, Prompt, ask_engine
from server.commands.tune import tune
from server.commands.tune_machine import cost_now, head_seconds, served_by_engine
from server.commands.tune_material import TuneSettings, recording_of
from server.engine.budget import CostTable
from server.engine.engine import Engine
from server.engine.forecast import Forecast, ServedBy, forecast
from server.engine.task_store import TaskStore
from server.types import Request, SamplingParams, SpeculationParams
from server.wiring.drafter import make_task_drafter

if TYPE_CHECKING:
    from drafters.base import Drafter
    from server.api.served_model import ServedModel
    from server.engine.batch import Runner

LEARN_TOKENS = 200_000  # as a task's by default


class FixedCost(CostTable):
    """A table that no step refreshes."""

    def observe(self, num_rows: int, keys: float, seconds: float) -> None:
        """Nothing is noted."""


@dataclass(slots=True)
class Pass:
    """One way of answering all prompts. num_steps: of all choices, the one that ends a prompt not
    counted. seconds: from the first request to the last answer. host_s: of them outside the model.
    """

    outputs: list[list[int]]
    num_steps: int = 0
    num_nodes: int = 0
    seconds: float = 0.0
    host_s: float = 0.0
    sources: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> float:
        return sum(len(output) - 1 for output in self.outputs) / max(1, self.num_steps)

    @property
    def nodes_per_step(self) -> float:
        return self.num_nodes / max(1, self.num_steps)


class Bench:
    """A model in this process, and engines over it that have learned nothing yet. cost_of: of the
    engine's steps, at this moment."""

    def __init__(
        self, served: ServedModel, engine: Engine, cost_of: Callable[[Engine], CostTable] = cost_now
    ) -> None:
        self.served = served
        self.engine = engine
        self.fingerprint = served.table.fingerprint.hex()
        self._cost_of = cost_of

    def cost(self) -> CostTable:
        """Measured anew, as `tailor tasks tune` does."""
        plain = self._cost_of(self.engine).as_dict()
        return FixedCost(plain["rows"], plain["seconds"], plain["key_s"], plain["likely_s"])

    def drafter(
        self, name: str, task: str, speculation: SpeculationParams, memory: TaskStore | None = None
    ) -> Drafter:
        """As the server makes it."""
        return make_task_drafter(
            name, self.fingerprint, self.engine.info.eos_token_ids, task, speculation,
            memory=memory,
        )  # fmt: skip

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        speculation: SpeculationParams,
        max_tokens: int,
        num_clients: int,
        cost: CostTable,
    ) -> Pass:
        """Greedy answers to all prompts, num_clients at once, by an engine of its own."""
        memory = TaskStore(None, fingerprint=self.fingerprint)

        def make(task: str, asked: SpeculationParams) -> Drafter:
            return self.drafter(asked.drafter, task, asked, memory)

        engine = Engine(
            self.engine.runner, {speculation.drafter: make}, self.engine.settings,
            cost=cost, memory=memory,
        )  # fmt: skip
        found = Pass([[] for _ in prompts])
        waiting = list(enumerate(prompts))[::-1]
        num_open = 0
        began = time.perf_counter()
        while waiting or num_open:
            while waiting and num_open < num_clients:
                at, prompt = waiting.pop()
                engine.submit(_request(at, prompt, speculation, max_tokens))
                num_open += 1
            for delta in engine.step():
                found.outputs[int(delta.request_id)] += delta.token_ids
                if delta.finish_reason == "error":
                    raise RuntimeError(delta.error)
                num_open -= delta.finish_reason is not None
                found.num_steps += delta.counts.num_steps
                found.num_nodes += delta.counts.num_drafted
                for source, _, kept in delta.counts.by_source:
                    found.sources[source] = found.sources.get(source, 0) + kept
            found.host_s += engine.stats().host_s
        found.seconds = time.perf_counter() - began
        found.num_steps -= len(prompts)
        memory.close()
        # This engine wrote over the runner's blocks: what the long-lived one has cached is gone.
        self.engine.pool.drop_cache()
        return found

    def record(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Recording]:
        """The same answers with what the model held likely."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        found = ask_engine(
            self.engine, self.served.tokenizer,
            (Prompt(i, None, tuple(prompt)) for i, prompt in enumerate(prompts)), sampling,
            speculation=SpeculationParams("auto", 8), num_likely=lambda _: NUM_LIKELY,
        )  # fmt: skip
        answers = [answer for answer in found if isinstance(answer, Answer)]
        return [recording_of(a) for a in sorted(answers, key=lambda a: a.prompt.line)]

    def forecast(
        self,
        outputs: Sequence[Recording],
        speculation: SpeculationParams,
        served_by: ServedBy,
        num_clients: int,
        max_tokens: int,
    ) -> Forecast:
        """tune's forecast of these answers."""
        drafter = self.drafter(speculation.drafter, "", replace(speculation, learn_tokens=0))
        return forecast(
            drafter, outputs, served_by,
            max_draft_tokens=speculation.max_draft_tokens,
            num_streams=num_clients,
            max_tokens=max_tokens,
        )  # fmt: skip


def _request(
    at: int, prompt: Sequence[int], speculation: SpeculationParams, max_tokens: int
) -> Request:
    return Request(
        request_id=str(at), task="forecast", model="model", prompt_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens), speculation=speculation,
        arrival_s=time.monotonic(),
    )  # fmt: skip


def measure(
    bench: Bench,
    prompts: Sequence[Sequence[int]],
    speculation: SpeculationParams,
    max_tokens: int,
    num_clients: int,
    num_rounds: int,
    cost: CostTable,
) -> tuple[list[Pass], list[Pass]]:
    """(passes without drafts, passes with them), in turn."""
    off = SpeculationParams()
    plain, drafted = [], []
    for _ in range(num_rounds):
        plain.append(bench.answer(prompts, off, max_tokens, num_clients, cost))
        drafted.append(bench.answer(prompts, speculation, max_tokens, num_clients, cost))
    return plain, drafted


def tuned(
    bench: Bench, name: str, train: Path, folder: Path, options: argparse.Namespace
) -> tuple[dict[str, Any], SpeculationParams]:
    """tune's report on train prompts, and the speculation of the task that it wrote."""
    settings = TuneSettings(
        name=name, data=train, output=folder / f"{name}.yaml", outputs="model",
        num_prompts=options.train, max_tokens=options.max_tokens, budgets=tuple(options.budgets),
    )  # fmt: skip
    report = tune(
        settings, bench.engine, bench.served.tokenizer, bench.served.table, bench.drafter,
        bench.cost(), head_seconds(bench.engine.runner), lambda *_: None,
    )  # fmt: skip
    corpus = report["corpus"]
    speculation = SpeculationParams(
        report["drafter"] if report["max_draft_tokens"] else "auto",
        report["max_draft_tokens"] or max(options.budgets),
        corpus=corpus,
        learn_tokens=LEARN_TOKENS if options.learn else 0,
    )
    return report, speculation


def compare(
    bench: Bench, name: str, folder: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each number of clients."""
    train = folder / f"{name}.jsonl"
    with train.open("w", encoding="utf-8") as out:
        for line in _lines(options.data / name / "train.jsonl", bench, options, options.lines):
            out.write(json.dumps(line) + "\n")
    began = time.perf_counter()
    report, speculation = tuned(bench, name, train, folder, options)
    tune_s = time.perf_counter() - began
    encode = bench.served.tokenizer.encode
    prompts = [
        encode(line["prompt"]).ids
        for line in _lines(options.data / name / "test.jsonl", bench, options, options.prompts)
    ]
    recordings = bench.record(prompts, options.max_tokens)
    rows = []
    for clients in options.clients:
        began = time.perf_counter()
        served_by = served_by_engine(bench.engine, bench.cost(), recordings)
        plain, drafted = measure(
            bench, prompts, speculation, options.max_tokens, clients, options.rounds,
            served_by.cost,
        )  # fmt: skip
        one = drafted[0]
        outputs = [list(r.output_ids) for r in recordings]
        same = all(found.outputs == outputs for found in (*plain, *drafted))
        measured = min(p.seconds for p in plain) / min(p.seconds for p in drafted)
        again = bench.forecast(recordings, speculation, served_by, clients, options.max_tokens)
        told = report["expected_speedup"] if clients == 1 else report.get(
            f"expected_speedup_{clients}_streams"
        )  # fmt: skip
        row = {
            "data": name,
            "clients": clients,
            "drafter": speculation.drafter,
            "nodes": speculation.max_draft_tokens,
            "corpus": report["corpus"] is not None,
            "tokens": sum(len(output) for output in plain[0].outputs),
            "same_text": same,
            "tokens_per_step": round(one.tokens_per_step, 3),
            "nodes_per_step": round(one.nodes_per_step, 3),
            "speedup": round(measured, 3),
            "tune_tokens_per_step": report["tokens_per_step"],
            "tune_speedup": told,
            "again_tokens_per_step": round(again.tokens_per_step, 3),
            "again_nodes_per_step": round(again.num_rows / max(1, again.num_steps), 3),
            "again_speedup": round(again.speedup, 3),
            "plain_s": round(min(p.seconds for p in plain), 3),
            "drafted_s": round(min(p.seconds for p in drafted), 3),
            "again_plain_s": round(again.plain_s, 3),
            "again_drafted_s": round(again.seconds, 3),
            "prefill_s": round(again.prefill_s, 3),
            "host": None if served_by.host is None else asdict(served_by.host),
            "undrawn_row_s": served_by.undrawn_row_s,
            "cold": round(served_by.cold, 2),
            "host_s": [round(min(p.host_s for p in of), 3) for of in (plain, drafted)],
            "sources": one.sources,
            "wall_s": [round(tune_s, 1), round(time.perf_counter() - began, 1)],
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def _lines(file: Path, bench: Bench, options: argparse.Namespace, num: int) -> list[dict[str, Any]]:
    """The first lines whose prompts are not too long."""
    found = []
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            if len(bench.served.tokenizer.encode(entry["prompt"]).ids) <= options.max_prompt:
                found.append(entry)
            if len(found) == num:
                break
    return found


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Forecast / measured, least and most over the sets, by clients; of tune's counted parts those
    of one client alone, which is what it replays."""
    found: dict[str, dict[str, list[float]]] = {}
    for clients in sorted({row["clients"] for row in rows}):
        own = [row for row in rows if row["clients"] == clients]
        for of in ("again", "tune"):
            for what in ("tokens_per_step", "nodes_per_step", "speedup"):
                shares = [
                    row[f"{of}_{what}"] / row[what]
                    for row in own
                    if row.get(f"{of}_{what}") is not None and row[what]
                ]
                if shares and (of == "again" or what == "speedup" or clients == 1):
                    found.setdefault(str(clients), {})[f"{of}_{what}"] = [
                        round(min(shares), 3), round(max(shares), 3),
                    ]  # fmt: skip
    return found


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=root.parent / "shared" / "data")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--sets", nargs="*", help="data sets (default: all)")
    parser.add_argument("--train", type=int, default=48, help="train prompts that tune records")
    parser.add_argument("--lines", type=int, default=300, help="train lines that tune reads")
    parser.add_argument("--prompts", type=int, default=16, help="test prompts")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--max-prompt", type=int, default=400, help="longer prompts are left out")
    parser.add_argument("--budgets", type=int, nargs="*", default=[8])
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--priced", type=Path, metavar="FILE", help="steps take what it says")
    parser.add_argument("--learn", action="store_true", help="outputs are learned, as served")
    return parser


def _priced(
    served: ServedModel, engine: Engine, clock: PricedClock, options: argparse.Namespace
) -> Bench:
    """A Bench whose steps take what the table of --priced says."""
    cost = CostTable.from_dict(json.loads(options.priced.read_text(encoding="utf-8")))
    runner = PricedRunner(engine.runner, clock, cost)
    memory = TaskStore(None, fingerprint=served.table.fingerprint.hex())
    bench = Bench(served, engine, lambda _: cost)

    def make(task: str, asked: SpeculationParams) -> Drafter:
        return bench.drafter(asked.drafter, task, asked, memory)

    bench.engine = Engine(
        cast("Runner", runner), {"auto": make}, engine.settings, cost=cost, memory=memory
    )
    return bench


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    from loadtest.recordings import data_sets

    options = build_parser().parse_args(argv)
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="forecast-") as folder,
        Bar() as bar,
        own_engine(ModelOptions(model=options.model), bar, ("auto",)) as (served, engine),
        priced_time() if options.priced else contextlib.nullcontext() as clock,
    ):
        bench = Bench(served, engine) if clock is None else _priced(served, engine, clock, options)
        for name in options.sets or data_sets(options.data):
            rows += compare(bench, name, Path(folder), options)
    told = {"tool": "forecast", "machine": machine.describe(), "ratios": ratios(rows), "rows": rows}
    print(json.dumps(told))
    return 0 if all(row["same_text"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
