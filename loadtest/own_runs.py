"""Drafters on a real model, every node verified: tokens per step, with what the model's logits say.

    python -m loadtest.own_runs record --model FOLDER --data ../shared/data --sets gsm8k -o DIR
    python -m loadtest.own_runs replay --recorded DIR --budgets 8 16
    python -m loadtest.own_runs live --model FOLDER --recorded DIR --budgets 8 16

`record` writes DIR/SET/train.jsonl and test.jsonl: a model's own greedy answers with, at every
position, the ids that it held likeliest. `replay` feeds them to each drafter. `live` answers the
same prompts with each drafter and a fixed number of nodes a step, unpruned: there the rows of
rejected nodes are seen too, which no replay knows, and the answers must equal the recorded ones.
The last line is JSON; `live` exits 1 where they do not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drafters import make_drafter
from drafters.auto.likely import NUM_LIKELY
from drafters.base import Drafter
from drafters.replay import Recording, read_recordings, replay
from drafters.tree import DraftTree
from loadtest import machine
from loadtest.recordings import EOS, load_tokenizer
from server.engine.engine import Engine
from server.engine.settings import EngineSettings
from server.model.build import RunnerSpec, build_runner
from server.types import EngineSizes, Request, SamplingParams, SpeculationParams


class Watch:
    """A drafter that drafts nothing and keeps what the model held likely. sessions: in order."""

    name = "watch"
    sources = ("watch",)

    def __init__(self) -> None:
        self.sessions: list[WatchSession] = []

    def open(
        self,
        prompt_ids: Sequence[int],
        *,
        context_span: tuple[int, int] | None = None,
        prediction_ids: Sequence[int] = (),
    ) -> WatchSession:
        self.sessions.append(WatchSession(prompt_ids))
        return self.sessions[-1]


class WatchSession:
    """rows: the likeliest ids and their chances of every position of the output."""

    num_likely = NUM_LIKELY

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.rows: list[tuple[list[int], list[float]]] = []
        self._num_tokens = 0

    def propose(self, budget: int, max_depth: int) -> DraftTree:
        return DraftTree.empty()

    def note_likely(
        self,
        token_ids: Sequence[int],
        parents: Sequence[int],
        ids: npt.NDArray[np.int32],
        chances: npt.NDArray[np.float32],
    ) -> None:
        self.rows.append((ids[0].tolist(), [round(float(c), 5) for c in chances[0]]))

    def extend(self, token_ids: Sequence[int]) -> None:
        """A token that was drawn in a step where nobody could draft has no row."""
        self._num_tokens += len(token_ids)
        self.rows += [([], [])] * (self._num_tokens - len(self.rows))

    def feedback(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Nothing is drafted."""

    def settle(self) -> None:
        """Nothing is deferred."""

    def checkpoint(self) -> int:
        return len(self.rows)

    def rollback(self, mark: int) -> None:
        del self.rows[mark:]

    def close(self) -> None:
        """The rows stay."""


def build_engine(folder: Path, drafters: Mapping[str, Drafter], nodes: int) -> Engine:
    """An engine on this CPU whose trees are not pruned by what they cost."""
    sizes = EngineSizes(max_num_seqs=16, kv_bytes=512 << 20)
    runner = build_runner(RunnerSpec("model", str(folder), sizes, max_model_len=1024))
    settings = EngineSettings(max_num_seqs=16, max_draft_rows=max(1, 16 * nodes))
    return Engine(runner, drafters, settings)


def answers(
    engine: Engine, prompts: Sequence[Sequence[int]], drafter: str, nodes: int, max_tokens: int
) -> tuple[list[list[int]], int, dict[str, tuple[int, int]]]:
    """(output ids in order, decode steps behind the prefill steps, (drafted, accepted) by source)
    of greedy answers, at most 8 at a time."""
    outputs: list[list[int]] = [[] for _ in prompts]
    waiting = list(enumerate(prompts))[::-1]
    num_steps, num_open = 0, 0
    by_source: dict[str, tuple[int, int]] = {}
    while waiting or num_open:
        while waiting and num_open < 8:
            at, prompt = waiting.pop()
            engine.submit(_request(at, prompt, drafter, nodes, max_tokens))
            num_open += 1
        for delta in engine.step():
            outputs[int(delta.request_id)] += delta.token_ids
            if delta.finish_reason is not None:
                if delta.finish_reason == "error":
                    raise RuntimeError(delta.error)
                num_open -= 1
            num_steps += delta.counts.num_steps
            for source, drafted, kept in delta.counts.by_source:
                old = by_source.get(source, (0, 0))
                by_source[source] = (old[0] + drafted, old[1] + kept)
    return outputs, num_steps - len(prompts), by_source


def _request(at: int, prompt: Sequence[int], drafter: str, nodes: int, max_tokens: int) -> Request:
    return Request(
        request_id=str(at),
        task="runs",
        model="model",
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        speculation=SpeculationParams(drafter, nodes),
    )


def record(arguments: argparse.Namespace) -> dict[str, Any]:
    """See the top of this file."""
    tokenizer = load_tokenizer(arguments.tokenizer)
    watch = Watch()
    engine = build_engine(arguments.model, {"watch": watch}, 1)
    written = {}
    for name in arguments.sets:
        for split in ("train", "test"):
            path = arguments.data / name / f"{split}.jsonl"
            if not path.is_file():
                continue
            prompts = list(_prompts(tokenizer, path, arguments))
            watch.sessions.clear()
            outputs, _, _ = answers(engine, prompts, "watch", 1, arguments.max_tokens)
            rows = {session.prompt_ids: session.rows for session in watch.sessions}
            target = arguments.output / name / f"{split}.jsonl"
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("w") as out:
                for prompt, output in zip(prompts, outputs, strict=True):
                    likely = rows[tuple(prompt)]
                    assert len(likely) == len(output), (len(likely), len(output))
                    entry = {
                        "prompt_ids": prompt,
                        "output_ids": output,
                        "likely_ids": [ids for ids, _ in likely],
                        "likely_chances": [chances for _, chances in likely],
                    }
                    out.write(json.dumps(entry) + "\n")
            written[f"{name}/{split}"] = sum(len(output) for output in outputs)
            print(f"{name}/{split}: {written[f'{name}/{split}']} tokens", flush=True)
    engine.close()
    return {"tool": "own_runs record", "tokens": written}


def _prompts(tokenizer: Any, path: Path, arguments: argparse.Namespace) -> Iterator[list[int]]:
    num = 0
    with path.open() as lines:
        for line in lines:
            prompt = json.loads(line)["prompt"]
            if arguments.chat:
                prompt = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
            ids = list(tokenizer.encode(prompt, add_special_tokens=False).ids)
            if len(ids) <= arguments.max_prompt:
                num += 1
                yield ids
            if num >= arguments.examples:
                return


def columns(eos: int) -> dict[str, Drafter]:
    """The drafters that are compared, without a corpus. What they learn stays from request to
    request."""
    from loadtest.logits_drafters import LogitSpec, TokenRecycling

    return {
        "auto, no logits": make_drafter("auto", eos_token_ids=(eos,), num_likely=0),
        "auto": _sharing(eos),
        "token recycling": TokenRecycling(),
        "logitspec": LogitSpec(),
    }


def _sharing(eos: int) -> Drafter:
    from drafters.auto.seen import Seen

    return make_drafter("auto", eos_token_ids=(eos,), seen=Seen())


def _tests(arguments: argparse.Namespace) -> Iterator[tuple[str, list[Recording]]]:
    """(name, recorded test answers) of every set."""
    found = sorted(path.parent.name for path in arguments.recorded.glob("*/test.jsonl"))
    for name in arguments.sets or found:
        tests = list(read_recordings(arguments.recorded / name / "test.jsonl"))
        yield name, tests[: arguments.examples]


def replayed(arguments: argparse.Namespace) -> dict[str, Any]:
    """See the top of this file."""
    eos = int(load_tokenizer(arguments.tokenizer).token_to_id(EOS))
    cells = []
    for name, tests in _tests(arguments):
        for budget in arguments.budgets:
            cell: dict[str, Any] = {"data": name, "budget": budget}
            for column, drafter in columns(eos).items():
                cell[column] = round(
                    replay(drafter, tests, budget=budget).decode_tokens_per_step, 3
                )
            cells.append(cell)
            print(json.dumps(cell), flush=True)
    gains = {
        budget: [c["auto"] / c["auto, no logits"] for c in cells if c["budget"] == budget]
        for budget in arguments.budgets
    }
    medians = {budget: round(float(np.median(gain)), 3) for budget, gain in gains.items()}
    return {"tool": "own_runs replay", "gain, median": medians, "cells": cells}


def live(arguments: argparse.Namespace) -> dict[str, Any]:
    """See the top of this file."""
    eos = int(load_tokenizer(arguments.tokenizer).token_to_id(EOS))
    cells = []
    for name, tests in _tests(arguments):
        num_tokens = sum(len(test.output_ids) - 1 for test in tests)
        longest = max(len(test.output_ids) for test in tests)
        for budget in arguments.budgets:
            cell: dict[str, Any] = {"data": name, "budget": budget, "tokens": num_tokens}
            drafters = columns(eos)
            engine = build_engine(arguments.model, drafters, budget)
            for column in arguments.columns or drafters:
                outputs, num_steps, by_source = answers(
                    engine, [test.prompt_ids for test in tests], column, budget, longest
                )
                same = [list(test.output_ids) for test in tests] == outputs
                cell[column] = round(num_tokens / num_steps, 3)
                cell[f"{column}: sources"] = by_source
                cell["same text"] = cell.get("same text", True) and same
            engine.close()
            cells.append(cell)
            print(json.dumps(cell), flush=True)
    return {"tool": "own_runs live", "machine": machine.describe(), "cells": cells}


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("record", "replay", "live"))
    parser.add_argument("--model", type=Path, help="record, live: the model's folder")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: SmolLM2's)")
    parser.add_argument("--data", type=Path, default=root.parent / "shared" / "data")
    parser.add_argument("--recorded", type=Path, help="replay, live: what record wrote")
    parser.add_argument("--sets", nargs="*", default=[])
    parser.add_argument("--columns", nargs="*", help="live: drafters (default: all)")
    parser.add_argument("--examples", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-prompt", type=int, default=400, help="longer prompts are left out")
    parser.add_argument("--chat", action="store_true", help="record: prompts as a user's message")
    parser.add_argument("--budgets", type=int, nargs="*", default=[8, 16])
    parser.add_argument("-o", "--output", type=Path, help="record: the folder")
    arguments = parser.parse_args(argv)
    wanted = {"record": ("model", "output"), "replay": ("recorded",), "live": ("model", "recorded")}
    for option in wanted[arguments.what]:
        if getattr(arguments, option) is None:
            parser.error(f"--{option} is missing")
    run = {"record": record, "replay": replayed, "live": live}[arguments.what]
    found = run(arguments)
    print(json.dumps(found))
    return 0 if all(cell.get("same text", True) for cell in found.get("cells", ())) else 1


if __name__ == "__main__":
    sys.exit(main())
