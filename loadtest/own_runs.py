"""`python -m loadtest.replay record` and `live`: drafters on a real model, every node verified.

`record` writes OUT/SET/train.jsonl and test.jsonl: a model's own greedy answers with, at every
position, the ids that it held likeliest. `live` answers the same prompts with each drafter and a
fixed number of nodes a step, unpruned: there the rows of rejected nodes are seen too, which no
replay knows, and the answers must equal the recorded ones; else it exits 1.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from drafters import make_drafter
from drafters.atomic_file import EVERYBODY, replacing
from drafters.auto.likely import NUM_LIKELY
from drafters.auto.seen import Seen
from drafters.base import Drafter
from loadtest.answers import answer_all, answered
from loadtest.options import emit, listed, numbers
from loadtest.peer_drafters import LogitSpec, TokenRecycling
from loadtest.prompts import data_sets, read_examples
from loadtest.recordings import SetOptions, open_ids
from server.commands.options import ModelOptions
from server.commands.own_engine import own_engine
from server.commands.progress import Bar
from server.commands.recorder import Answer, Prompt, ask_engine
from server.engine.engine import Engine
from server.engine.settings import EngineSettings
from server.model.build import RunnerSpec, build_runner
from server.model.catalog import model_folder
from server.types import EngineSizes, Request, SamplingParams, SpeculationParams

_SETS = SetOptions(examples=30)
_MODEL = ModelOptions()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class RecordOptions:
    """The prompts, and where the answers go."""

    data: Annotated[Path, Parameter(help="folder of task data sets")]
    output: Annotated[Path, Parameter(name=("--output", "-o"), help="the folder")]
    sets: Annotated[str, Parameter(help="data sets, with commas (all)")] = ""
    examples: Annotated[int, Parameter(help="prompts of each part of a set")] = 30
    max_tokens: int = 64
    max_prompt: Annotated[int, Parameter(help="longer prompts are left out")] = 400
    chat: Annotated[bool, Parameter(help="prompts as a user's message")] = False


def record(*, options: RecordOptions, model: ModelOptions = _MODEL) -> int:
    """A model's own answers with what it held likely; see loadtest.own_runs.

    Example: python -m loadtest.replay record --data data --sets gsm8k --chat -o own
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    written: dict[str, int] = {}
    with Bar() as bar, own_engine(model, bar, ()) as (served, engine):
        for name in listed(options.sets) or data_sets(options.data):
            for split in ("train", "test"):
                prompts: list[Prompt] = []
                for number, example in enumerate(read_examples(options.data, name, split)):
                    text = example.prompt
                    if options.chat:
                        text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
                    if len(served.tokenizer.encode(text).ids) <= options.max_prompt:
                        prompts.append(Prompt(number, text))
                    if len(prompts) == options.examples:
                        break
                found = ask_engine(
                    engine, served.tokenizer, prompts, sampling,
                    speculation=SpeculationParams("off"), num_likely=lambda _: NUM_LIKELY,
                )  # fmt: skip
                answers = sorted(map(answered, found), key=lambda answer: answer.prompt.line)
                target = options.output / name / f"{split}.jsonl"
                target.parent.mkdir(parents=True, exist_ok=True)
                with replacing(target, EVERYBODY) as out:
                    for answer in answers:
                        out.write((json.dumps(_entry(answer)) + "\n").encode())
                written[f"{name}/{split}"] = sum(len(answer.output_ids) for answer in answers)
                print(f"{name}/{split}: {written[f'{name}/{split}']} tokens", flush=True)
    emit("replay record", {"model": served.name, "tokens": written}, None)
    return 0


def _entry(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_ids": list(answer.prompt.ids or ()),
        "output_ids": list(answer.output_ids),
        "likely_ids": [[token for token, _ in one.top] for one in answer.likely],
        "likely_chances": [[round(math.exp(p), 5) for _, p in one.top] for one in answer.likely],
    }


def columns(eos: int) -> dict[str, Drafter]:
    """The drafters that are compared, without a corpus. What they learn stays from request to
    request."""
    return {
        "auto, no logits": make_drafter("auto", eos_token_ids=(eos,), num_likely=0),
        "auto": make_drafter("auto", eos_token_ids=(eos,), seen=Seen()),
        "token recycling": TokenRecycling(),
        "logitspec": LogitSpec(),
    }


def build_engine(folder: Path, drafters: Mapping[str, Drafter], nodes: int) -> Engine:
    """An engine on this CPU whose trees are not pruned by what they cost."""
    sizes = EngineSizes(max_num_seqs=16, kv_bytes=512 << 20)
    runner = build_runner(RunnerSpec("model", str(folder), sizes, max_model_len=1024))
    settings = EngineSettings(max_num_seqs=16, max_draft_rows=max(1, 16 * nodes))
    return Engine(runner, drafters, settings)


def live(
    *,
    sets: SetOptions = _SETS,
    budgets: Annotated[str, Parameter(help="nodes a step, with commas")] = "8,16",
    json: Annotated[Path | None, Parameter(help="append the JSON line to this file too")] = None,
) -> int:
    """Each drafter on the model itself, its recorded answers the reference; see loadtest.own_runs.

    Example: python -m loadtest.replay live --recorded own --budgets 8,16
    """
    sets = replace(sets, data=None)
    eos = open_ids(sets.model).eos
    cells = []
    for name in sets.names():
        tests = sets.read(open_ids(sets.model), name, "test", sets.examples)
        num_tokens = sum(len(test.output_ids) - 1 for test in tests)
        longest = max(len(test.output_ids) for test in tests)
        for nodes in numbers(budgets, "--budgets"):
            cell: dict[str, Any] = {"data": name, "nodes": nodes, "tokens": num_tokens}
            engine = build_engine(model_folder(sets.model), drafters := columns(eos), nodes)
            for column in drafters:
                drawn = SamplingParams(temperature=0.0, max_tokens=longest)
                how = SpeculationParams(column, nodes)
                found = answer_all(
                    engine,
                    [
                        Request(str(i), "runs", "model", tuple(one.prompt_ids), drawn, how)
                        for i, one in enumerate(tests)
                    ],
                    at_once=8,
                ).values()
                counts = [one.by_source for one in found]
                same = [tuple(test.output_ids) for test in tests] == [one.ids for one in found]
                num_steps = sum(one.num_steps for one in found) - len(tests)  # behind the prompts'
                cell[column] = round(num_tokens / num_steps, 3)
                cell[f"{column}: sources"] = {
                    source: [sum(of.get(source, (0, 0))[i] for of in counts) for i in (0, 1)]
                    for source in dict.fromkeys(itertools.chain(*counts))
                }
                cell["same text"] = cell.get("same text", True) and same
            engine.close()
            cells.append(cell)
            print(cell, flush=True)
    emit("replay live", {"model": sets.model, "cells": cells}, json)
    return 0 if all(cell["same text"] for cell in cells) else 1
