"""Does `exact` have the text of `full`? Real model, real prompts, with and without drafts.

    python -m loadtest.vocab_lossless --model gemma-3-270m --data DIR [--limit 200]

DIR holds a folder per task with train.jsonl and test.jsonl. Each task gets the profile of (a part
of) its training data; test prompts are taken from the tasks in turn. Every prompt is asked in every
setting: once with the full head and no drafts, the reference, and then with `exact`: without drafts
and with the drafter `auto` (trees), with a verify_every that turns from prompt to prompt
(adapted, and 1, 3, 7, 16 tokens). `exact` requests of one verify_every (a verification takes every
sequence of the batch, so the smallest one rules) and of all tasks, settings and drafters are
shuffled and run --at-once side by side. Ids, finish reasons and the logprobs of every token must
be equal to the last bit.

The engine runs in this process. The full head may not take over where it is cheaper, so that
verifications are tested on a busy machine too; --may-fall-back lets it, as a server does.

Exits 0 when all are equal, 1 on a difference, 3 when nothing was shown: no token was ever missed,
or no draft accepted. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtest import machine
from loadtest.answers import Answer, answer_all, make_engine, open_files, total
from loadtest.options import emit
from loadtest.prompts import Example, read_examples, spread_examples
from loadtest.recordings import data_sets
from server.types import Request, SamplingParams, SpeculationParams, VocabularyParams
from vocab_store.profile import ProfileSettings, VocabProfile

SETTINGS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "penalties": SamplingParams(
        temperature=0.8, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1
    ),
}
VERIFY_EVERY = (7, 1, 16, 0, 3)
"""verify_every, by prompt in turn; 0 is adapted."""
DRAFTERS = ("off", "auto")
CHUNK = 32
"""Prompts that are asked in every way before the next ones, so that the prefix cache holds them."""


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt in one setting, and how `exact` is asked for it."""

    prompt_id: int
    setting: str
    drafter: str
    every: int

    @property
    def request_id(self) -> str:
        return f"{self.prompt_id}/{self.setting}/{self.drafter}"


def cases_of(num_prompts: int, settings: Sequence[str], drafters: Sequence[str]) -> list[Case]:
    """All cases, shuffled: neighbours differ in task, setting and drafter."""
    cases = [
        Case(p, setting, drafter, VERIFY_EVERY[(p + s + d) % len(VERIFY_EVERY)])
        for p in range(num_prompts)
        for s, setting in enumerate(settings)
        for d, drafter in enumerate(drafters)
    ]
    random.Random(0).shuffle(cases)
    return cases


def request_of(
    request_id: str, task: str, prompt_ids: Sequence[int], prompt_id: int, setting: str,
    max_tokens: int, model: str,
) -> Request:  # fmt: skip
    """The reference's request. The seed depends on the prompt only."""
    sampling = replace(
        SETTINGS[setting],
        max_tokens=max_tokens,
        seed=1_000_003 * (prompt_id + 1),
        num_logprobs=1,
    )
    return Request(
        request_id=request_id,
        task=task,
        model=model,
        prompt_ids=tuple(prompt_ids),
        sampling=sampling,
        speculation=SpeculationParams(),
    )


def first_difference(want: Answer, got: Answer) -> str:
    """Where two answers that are not the same differ first."""
    for i, (a, b) in enumerate(zip(want.ids, got.ids, strict=False)):
        if a != b:
            return f"token {i}: {a} in full, {b} in exact"
    if len(want.ids) != len(got.ids):
        return f"{len(want.ids)} tokens in full, {len(got.ids)} in exact"
    if want.finish_reason != got.finish_reason or want.stop_reason != got.stop_reason:
        return f"ends with {want.finish_reason} in full, {got.finish_reason} in exact"
    for i, (x, y) in enumerate(zip(want.logprobs, got.logprobs, strict=True)):
        if x != y:
            return f"logprob {i}: {x} in full, {y} in exact"
    raise ValueError("they do not differ")


def _answers(
    engine: Any,
    examples: Sequence[Example],
    prompts: Sequence[Sequence[int]],
    settings: Sequence[str],
    cases: Sequence[Case],
    *,
    max_tokens: int,
    console: Console,
) -> tuple[dict[str, Answer], dict[str, Answer]]:
    """Ask everything: (answers of the full head, answers of `exact`), by request id."""
    model = engine.info.name

    def reference(p: int, setting: str, request_id: str) -> Request:
        task = examples[p].task
        return request_of(request_id, task, prompts[p], p, setting, max_tokens, model)

    full: dict[str, Answer] = {}
    exact: dict[str, Answer] = {}
    for first in range(0, len(prompts), CHUNK):
        chunk = range(first, min(first + CHUNK, len(prompts)))
        where = f"prompts {first} to {chunk[-1]} of {len(prompts)}, "
        for setting in settings:  # not at once: the second reads the prompts from the cache
            requests = [reference(p, setting, f"{p}/{setting}") for p in chunk]
            full |= answer_all(engine, requests, where + "full", console)
        # The misses of the first are learned, and missed by no later one: the order turns.
        turn = first // CHUNK % len(VERIFY_EVERY)
        for every in VERIFY_EVERY[turn:] + VERIFY_EVERY[:turn]:
            group = [case for case in cases if case.prompt_id in chunk and case.every == every]
            requests = [
                replace(
                    reference(case.prompt_id, case.setting, case.request_id),
                    vocabulary=VocabularyParams(
                        "exact", examples[case.prompt_id].task, verify_every=every
                    ),
                    speculation=SpeculationParams(case.drafter, 0 if case.drafter == "off" else 16),
                )
                for case in group
            ]
            name = f"exact, verify_every {every or 'adapted'}"
            exact |= answer_all(engine, requests, where + name, console)
    return full, exact


def check(
    engine: Any,
    examples: Sequence[Example],
    prompts: Sequence[Sequence[int]],
    settings: Sequence[str],
    drafters: Sequence[str],
    *,
    max_tokens: int,
    console: Console,
) -> dict[str, Any]:
    """Ask everything; figures and differences as JSON values. Profiles are named by task."""
    cases = cases_of(len(prompts), settings, drafters)
    full, exact = _answers(
        engine, examples, prompts, settings, cases, max_tokens=max_tokens, console=console
    )
    differences: list[dict[str, Any]] = []
    by_part: dict[str, list[Answer]] = {}
    for case in cases:
        want, got = full[f"{case.prompt_id}/{case.setting}"], exact[case.request_id]
        for part in (
            "all", case.setting, f"drafter {case.drafter}",
            f"verify_every {case.every or 'adapted'}",
        ):  # fmt: skip
            by_part.setdefault(part, []).append(got)
        if not got.same_as(want):
            example = examples[case.prompt_id]
            differences.append(
                {
                    "task": example.task,
                    "example": example.example_id,
                    "setting": case.setting,
                    "drafter": case.drafter,
                    "verify_every": case.every,
                    "difference": first_difference(want, got),
                }
            )
            console.print(f"DIFFERENT: {differences[-1]}", markup=False)
    return {
        "num_prompts": len(prompts),
        "num_tasks": len({e.task for e in examples}),
        "settings": list(settings),
        "max_tokens": max_tokens,
        "num_compared": len(cases),
        "num_different": len(differences),
        "differences": differences[:50],
        "full": total(full.values()),
        "exact": {part: total(answers) for part, answers in sorted(by_part.items())},
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.vocab_lossless",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a built-in model or a converted folder")
    parser.add_argument("--adapter", type=Path, help="a PEFT LoRA's folder")
    parser.add_argument("--data", type=Path, required=True, help="folder of task data sets")
    parser.add_argument("--limit", type=int, default=200, help="prompts (default 200)")
    parser.add_argument("--skip", type=int, default=0, help="prompts before those")
    parser.add_argument("--train", type=int, default=1000, help="training examples of a profile")
    parser.add_argument("--settings", default="greedy,temperature")
    parser.add_argument("--drafters", default=",".join(DRAFTERS))
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--max-prompt-chars", type=int, default=1500)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--weights", default="auto", help="as engine.weights: int8, file, ...")
    parser.add_argument("--may-fall-back", action="store_true")
    parser.add_argument("--json", type=Path, help="append the JSON line to this file too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    settings, drafters = options.settings.split(","), options.drafters.split(",")
    try:
        if unknown := set(settings) - set(SETTINGS):
            raise ValueError(f"no setting {unknown}; there are {', '.join(SETTINGS)}")
        if min(options.limit, options.at_once, options.tokens, options.train, options.skip + 1) < 1:
            raise ValueError("--limit, --at-once, --tokens and --train want at least 1, --skip 0")
        examples = spread_examples(
            options.data,
            options.skip + options.limit,
            max_prompt_chars=options.max_prompt_chars,
            names=data_sets(options.data),
        )[options.skip :]
        if not examples:
            raise ValueError(f"no task data with short enough prompts in {options.data}")
        files = open_files(options.model, options.adapter, weights=options.weights)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    console = Console(stderr=True, width=120)
    about = machine.describe()
    began = time.perf_counter()
    profiles: dict[str, VocabProfile] = {}
    for task in dict.fromkeys(e.task for e in examples):
        train = islice(read_examples(options.data, task, "train"), options.train)
        pairs = [(e.prompt, e.completion) for e in train]
        profiles[task] = files.profile(
            files.examples(pairs), ProfileSettings(languages=("en",), tolerance=0.01)
        )
    engine = make_engine(
        files,
        profiles,
        drafters=[name for name in drafters if name != "off"],
        at_once=options.at_once,
        threads=options.threads,
        may_use_full_head=options.may_fall_back,
        weights=options.weights,
    )
    try:
        prompts = [e.ids for e in files.tokenizer.encode_batch_fast([e.prompt for e in examples])]
        figures = check(
            engine, examples, prompts, settings, drafters,
            max_tokens=options.tokens, console=console,
        )  # fmt: skip
    finally:
        engine.close()
    result = {
        "tool": "vocab_lossless",
        "machine": about,
        "model": options.model,
        "weights": options.weights,
        "skip": options.skip,
        "at_once": options.at_once,
        "train_examples": options.train,
        "may_fall_back": options.may_fall_back,
        **figures,
        "wall_s": round(time.perf_counter() - began, 1),
    }
    every = figures["exact"]["all"]
    console.print(
        f"{figures['num_different']} of {figures['num_compared']} answers differ; "
        f"{every['num_missed']} misses in {every['num_verifications']} verifications, "
        f"{every['num_accepted']} drafts accepted"
    )
    emit(result, options.json)
    if figures["num_different"]:
        return 1
    is_shown = every["num_missed"] and (every["num_accepted"] or drafters == ["off"])
    return 0 if is_shown else 3


if __name__ == "__main__":
    sys.exit(main())
