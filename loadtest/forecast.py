"""What `tailor tasks tune` forecasts, beside what an engine then does: steps, nodes, times.

    python -m loadtest.forecast --data ../shared/data --sets gsm8k squad

For each data set a task is tuned on train prompts as `tailor tasks tune` does it, and test prompts
are served with the tuned task's drafts and without, by --clients at once, by the same code that
tune measures with (server.engine.served_gain): the first requests after a start, prompts in no
order, answers learned. So both are of the same thing, and differ by their prompts and the moment.
Told for each number of clients:

    tune_speedup, tune_range   what a user is told, and the range that it is told with
    speedup, range             measured here; each request's least seconds of --rounds rounds
    in_range                   whether the measured speedup lies in tune's range
    again_*                    a replay of the very answers that were measured, nothing learned,
                               priced with this machine's costs

Steps are priced by one cost table at the beginning of each side. --priced FILE (a server's cost
table) times no model: each step takes what the table says and the host its CPU seconds
(loadtest.priced_runner), so that a busy machine changes little.

The last line is JSON with the ratios forecast / measured; exits 1 when a text differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
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
from server.config import SpeculationConfig
from server.engine.budget import CostTable
from server.engine.engine import Engine
from server.engine.forecast import Forecast, ServedBy, forecast
from server.engine.served_gain import Gain, GainMeter
from server.engine.task_store import TaskStore
from server.types import SamplingParams, SpeculationParams
from server.wiring.drafter import make_task_drafter

if TYPE_CHECKING:
    from drafters.base import Drafter
    from server.api.served_model import ServedModel
    from server.engine.batch import Runner


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
        return self._cost_of(self.engine)

    def drafter(
        self, name: str, task: str, speculation: SpeculationParams, memory: TaskStore | None = None
    ) -> Drafter:
        """As the server makes it."""
        return make_task_drafter(
            name, self.fingerprint, self.engine.info.eos_token_ids, task, speculation,
            memory=memory,
        )  # fmt: skip

    def meter(self, task: str, max_tokens: int, cost: CostTable) -> GainMeter:
        """Of greedy answers."""
        return GainMeter(
            self.engine, self.drafter, cost, task,
            SamplingParams(temperature=0.0, max_tokens=max_tokens), self.fingerprint,
        )  # fmt: skip

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


def least(gains: Sequence[Gain]) -> Gain:
    """Of rounds over the same prompts: each request's least seconds."""
    found = [
        replace(
            sides[0],
            seconds=[min(s) for s in zip(*(side.seconds for side in sides), strict=True)],
        )
        for sides in ([g.plain for g in gains], [g.drafted for g in gains])
    ]
    return Gain(found[0], found[1], gains[0].num_clients)


def tuned(
    bench: Bench, name: str, train: Path, folder: Path, options: argparse.Namespace
) -> tuple[dict[str, Any], SpeculationParams]:
    """tune's report on train prompts, and the speculation of the task that it wrote."""
    settings = TuneSettings(
        name=name, data=train, output=folder / f"{name}.yaml", outputs="model",
        num_prompts=options.train, max_tokens=options.max_tokens, budgets=tuple(options.budgets),
        serve_s=options.serve_seconds,
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
        learn_tokens=SpeculationConfig().learn_max_tokens,
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
    lines = _lines(options.data / name / "test.jsonl", bench, options, options.prompts)
    prompts = [encode(line["prompt"]).ids for line in lines]
    recordings = bench.record(prompts, options.max_tokens)
    rows = []
    for clients in options.clients:
        began = time.perf_counter()
        served_by = served_by_engine(bench.engine, bench.cost(), recordings)
        meter = bench.meter(name, options.max_tokens, served_by.cost)
        gains = [
            meter.measure(prompts, speculation, num_clients=clients) for _ in range(options.rounds)
        ]
        outputs = [list(r.output_ids) for r in recordings]
        same = all(side.outputs == outputs for gain in gains for side in (gain.plain, gain.drafted))
        again = bench.forecast(recordings, speculation, served_by, clients, options.max_tokens)
        row = {"data": name, "clients": clients, "same_text": same}
        row |= row_of(least(gains), again, report)
        row |= {
            "host": None if served_by.host is None else asdict(served_by.host),
            "undrawn_row_s": served_by.undrawn_row_s,
            "cold": round(served_by.cold, 2),
            "wall_s": [round(tune_s, 1), round(time.perf_counter() - began, 1)],
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def row_of(gain: Gain, again: Forecast, report: dict[str, Any]) -> dict[str, Any]:
    """What was measured, beside tune's report of the task and a replay of these answers."""
    clients = gain.num_clients
    of = "" if clients == 1 else f"_{clients}_streams"
    told, told_range = report.get(f"expected_speedup{of}"), report.get(f"expected_range{of}")
    measured, sides = gain.speedup, (gain.plain, gain.drafted)
    return {
        "drafter": report["drafter"],
        "nodes": report["max_draft_tokens"],
        "corpus": report["corpus"] is not None,
        "prompts": len(gain.plain.outputs),
        "tokens": sum(len(output) for output in gain.plain.outputs),
        "tokens_per_step": round(gain.drafted.tokens_per_step, 3),
        "nodes_per_step": round(gain.drafted.nodes_per_step, 3),
        "speedup": round(measured, 3),
        "range": [round(measured + 2.0 * by * gain.error, 3) for by in (-1.0, 1.0)],
        "tune_tokens_per_step": report["tokens_per_step"],
        "tune_speedup": told,
        "tune_range": told_range,
        "tune_prompts": report.get(f"expected_of{of}"),
        "in_range": told_range and told_range[0] <= measured <= told_range[1],
        "again_tokens_per_step": round(again.tokens_per_step, 3),
        "again_nodes_per_step": round(again.num_rows / max(1, again.num_steps), 3),
        "again_speedup": round(again.speedup, 3),
        "seconds": [round(sum(side.seconds), 3) for side in sides],
        "again_s": [round(again.plain_s, 3), round(again.seconds, 3)],
        "prefill_s": round(again.prefill_s, 3),
        "host_s": [round(side.host_s, 3) for side in sides],
        "sources": gain.drafted.sources,
    }


def _lines(file: Path, bench: Bench, options: argparse.Namespace, num: int) -> list[dict[str, Any]]:
    """Lines whose prompts are not too long, from all of the file, in no order: neighbours may share
    a passage, and requests do not come in the order of a data set."""
    found = []
    lines = file.read_text(encoding="utf-8").splitlines()
    Random(0).shuffle(lines)
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
    parser.add_argument("--train", type=int, default=200, help="train prompts that tune records")
    parser.add_argument("--serve-seconds", type=float, default=60.0, help="tune serves so long")
    parser.add_argument("--lines", type=int, default=2000, help="train lines that tune reads")
    parser.add_argument("--prompts", type=int, default=100, help="test prompts")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--max-prompt", type=int, default=400, help="longer prompts are left out")
    parser.add_argument("--budgets", type=int, nargs="*", default=[8])
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--priced", type=Path, metavar="FILE", help="steps take what it says")
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
