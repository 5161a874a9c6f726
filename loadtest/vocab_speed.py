"""Decode speed of the vocabulary modes on one model: full, slices of 1 % and 10 %, exact.

    python -m loadtest.vocab_speed --folder MODEL_FOLDER --data DIR [--prompts 30]

DIR is a task's folder with train.jsonl and test.jsonl, lines of prompt and completion. The profile
is Algorithm 1's on the training part, filled up with its own fill order to 1 % and 10 % of the
vocabulary, so that sizes are comparable between tasks. Engine and runner run in this process, one
request at a time, greedily, without drafts. Every prompt is a round: all modes answer it, one after
the other, in an order that turns. Figures are of decode steps alone, from a choice's first token to
its last; ratios are within a prompt.

`full` beside `full` (the first and the last column are the same mode) shows the noise. `exact` must
give the text of `full`: exit status 1 if one answer differs.

    python -m loadtest.vocab_speed --folder MODEL_FOLDER --data DIR --first-token [--prompts 30]

measures the time to the first token instead (vocab_first_token.py).

Both tell the memory of head and embedding: bytes that each mode's head needs, counted from the most
rows that a slice had. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest import machine
from loadtest.options import add_result_options, emit, refuse_busy_machine
from loadtest.stats import ratio, summarize
from loadtest.vocab_first_token import ROOM, head_memory, measure, most_dynamic
from server.engine.engine import Engine
from server.engine.settings import EngineSettings
from server.types import EngineSizes, Request, SamplingParams, SpeculationParams, VocabularyParams
from vocab_store.profile import VocabProfile

SHARES = {"slice_1": 0.01, "slice_10": 0.10}
Mode = tuple[str, VocabularyParams, str]
"""(name, vocabulary, drafter)"""
PARTS = ("body", "head", "draw", "verify", "host")


@dataclass
class Run:
    """What one mode did with one prompt. Seconds are of decode steps; num_ids: of the largest
    slice, 0 without one."""

    num_tokens: int = 0
    seconds: float = 0.0
    num_steps: int = 0
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    num_verifications: int = 0
    num_checked: int = 0
    num_missed: int = 0
    num_dropped: int = 0
    num_full_steps: int = 0
    num_ids: int = 0
    outputs: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def run_mode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    vocabulary: VocabularyParams,
    *,
    max_tokens: int,
    name: str,
    drafter: str = "off",
) -> Run:
    """Every prompt, one after the other, in one mode."""
    run = Run()
    runner: Any = engine.runner
    for i, prompt in enumerate(prompts):
        engine.submit(
            Request(
                request_id=f"{name}-{i}",
                task="speed",
                model=engine.info.name,
                prompt_ids=tuple(prompt),
                sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
                speculation=SpeculationParams(drafter, 0 if drafter == "off" else 16),
                vocabulary=vocabulary,
            )
        )
        output: list[int] = []
        num_first = 0
        while engine.has_work:
            began = time.perf_counter()
            deltas = engine.step()
            step_s = time.perf_counter() - began
            decodes = bool(output)
            verify_s = 0.0
            for delta in deltas:
                if delta.finish_reason == "error":
                    raise RuntimeError(f"{name}: {delta.error}")
                output.extend(delta.token_ids)
                if delta.vocabulary is not None:
                    counts = delta.vocabulary
                    verify_s += counts.verify_s
                    run.num_verifications += counts.num_verifications
                    run.num_checked += counts.num_checked
                    run.num_missed += counts.num_missed
                    run.num_dropped += counts.num_dropped
                    run.num_full_steps += counts.num_full_steps
                    run.num_ids = max(run.num_ids, counts.num_ids)
            if not decodes:
                num_first = len(output)
                continue
            run.num_steps += 1
            run.seconds += step_s
            parts = {"body": runner.body_s, "head": runner.head_s, "draw": runner.draw_s}
            parts["verify"] = verify_s
            parts["host"] = step_s - sum(parts.values())
            for part, value in parts.items():
                run.parts_s[part] += value
        run.num_tokens += len(output) - num_first
        run.outputs.append(tuple(output))
    return run


def sized(profile: VocabProfile, share: float) -> VocabProfile:
    """The profile with T of a share of the vocabulary: filled, or its first ids where it is larger.

    Raises ValueError where the fill order is too short.
    """
    wanted = round(share * profile.slice.vocab_size)
    more = wanted - profile.slice.num_ids
    if more > profile.fill_ids.shape[0]:
        raise ValueError(f"the profile can be filled to {profile.fill_ids.shape[0]} more ids only")
    if more <= 0:
        return profile
    return VocabProfile(
        profile.filled(more), profile.fill_ids[more:], profile.fill_gains[more:], profile.manifest
    )


def figures(rounds: dict[str, list[Run]]) -> dict[str, Any]:
    """Per mode: tokens/s, its ratio to full within a round, milliseconds of a step's parts.

    Raises ValueError when no round has decode steps in every mode.
    """
    found: dict[str, Any] = {}
    # An answer of one token has no decode step: its prompt is no round.
    timed = [all(run.num_tokens for run in one) for one in zip(*rounds.values(), strict=True)]
    if not any(timed):
        raise ValueError("no prompt has an answer of two tokens in every mode")
    rounds = {
        mode: [run for run, has_steps in zip(runs, timed, strict=True) if has_steps]
        for mode, runs in rounds.items()
    }
    for mode, runs in rounds.items():
        speeds = [run.tokens_per_s for run in runs]
        steps = sum(run.num_steps for run in runs)
        summary = summarize(speeds)
        assert summary is not None
        found[mode] = {
            "tokens_per_s": summary.to_json(),
            "against_full": ratio(speeds, [run.tokens_per_s for run in rounds["full"]]).to_json(),
            "tokens_per_step": sum(run.num_tokens for run in runs) / steps,
            **{
                f"{part}_ms": 1000 * sum(run.parts_s[part] for run in runs) / steps
                for part in PARTS
            },
            "tokens": sum(run.num_tokens for run in runs),
            "verifications": sum(run.num_verifications for run in runs),
            "misses": sum(run.num_missed for run in runs),
            "verified": sum(run.num_checked for run in runs),
            "dropped": sum(run.num_dropped for run in runs),
            "full_head_steps": sum(run.num_full_steps for run in runs),
        }
    return found


def _build(
    folder: Path, data: Path, threads: int | None, limit: int, *, for_first_token: bool
) -> Any:
    from tokenizers import Tokenizer

    from drafters import make_drafter
    from server import token_bytes
    from server.model.build import RunnerSpec, build_runner
    from vocab_store.command import model_facts
    from vocab_store.documents import read_pairs, tokenize_pairs
    from vocab_store.profile import ProfileSettings, build_profile
    from vocab_store.slice import RequiredIds

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocab_size, _, eos_ids = model_facts(folder)
    tokens = token_bytes.build(tokenizer, vocab_size)
    required = RequiredIds.from_tokens(tokens, eos_ids)
    train = tokenize_pairs(list(read_pairs(data / "train.jsonl")), tokenizer)
    test = tokenize_pairs(list(read_pairs(data / "test.jsonl"))[:limit], tokenizer)
    made = build_profile(
        [e for i, e in enumerate(train) if i % 10 != 9],
        tokens,
        required,
        ProfileSettings(tolerance=0.01, max_fill=vocab_size),
        heldout=train[9::10],
    )
    prompts = [e.input_ids.tolist() for e in test]
    settings = EngineSettings(max_num_seqs=4, prefix_cache=True)
    if for_first_token:
        profiles = {"first": made}
        # Room for one request's rows: the next one with other ids has to copy all of its own.
        rows = most_dynamic(prompts, made) + ROOM
        settings = replace(settings, slice_cache_rows=rows)
    else:
        profiles = {name: sized(made, share) for name, share in SHARES.items()}
        profiles["exact"] = profiles["slice_1"]
    runner = build_runner(
        RunnerSpec(
            "speed", str(folder), EngineSizes(kv_bytes=1 << 29), threads=threads, max_model_len=4096
        )
    )
    engine = Engine(
        runner,
        {"suffix": make_drafter("suffix")},
        settings,
        profiles=profiles.__getitem__,
    )
    return engine, made, profiles, prompts


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.vocab_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, required=True, help="a converted model")
    parser.add_argument("--data", type=Path, required=True, help="a task's folder")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=3, help="prompts before those")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--verify-every", type=int, default=0, help="of exact; 0 is adapted")
    parser.add_argument("--drafts", action="store_true", help="exact and full with drafts, too")
    parser.add_argument("--first-token", action="store_true", help="time first tokens instead")
    add_result_options(parser)
    return parser


def run_rounds(
    engine: Engine, prompts: list[list[int]], modes: list[Mode], options: argparse.Namespace
) -> tuple[dict[str, list[Run]], int]:
    """(each mode's runs, one a prompt; answers that are not those of `full`, slices aside)."""
    rounds: dict[str, list[Run]] = {name: [] for name, _, _ in modes}
    num_different = 0
    for i, prompt in enumerate(prompts):
        turn = i % len(modes)
        for name, vocabulary, drafter in modes[turn:] + modes[:turn]:
            run = run_mode(
                engine, [prompt], vocabulary, max_tokens=options.tokens,
                name=f"{i}-{name}", drafter=drafter,
            )  # fmt: skip
            if i >= options.warm_up:
                rounds[name].append(run)
    for name, runs in rounds.items():
        if not name.startswith("slice"):
            for run, full in zip(runs, rounds["full"], strict=True):
                pairs = zip(run.outputs, full.outputs, strict=True)
                num_different += sum(a != b for a, b in pairs)
    return rounds, num_different


def show(result: dict[str, Any]) -> None:
    """The table of the modes, on stderr."""
    table = Table(title=f"{result['model']}, {result['task']}: decode steps, one stream")
    columns = ["tokens/s", "against full", "95 %", *(f"{part} ms" for part in PARTS), "misses"]
    for column in ("mode", *columns):
        table.add_column(column, justify="right")
    for name, row in result["modes"].items():
        against = row["against_full"]
        table.add_row(
            name,
            f"{row['tokens_per_s']['p50']:.1f}",
            f"{against['median']:.2f}",
            f"{against['low']:.2f}-{against['high']:.2f}",
            *(f"{row[f'{part}_ms']:.2f}" for part in PARTS),
            f"{row['misses']}/{row['verified']}",
        )
    Console(stderr=True, width=150).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    if min(options.prompts, options.tokens - 1, options.warm_up) < 1:
        parser.error("--prompts and --warm-up want at least 1, --tokens at least 2")
    refuse_busy_machine(options.max_load)
    num_prompts = options.prompts + options.warm_up
    engine, made, profiles, prompts = _build(
        options.folder, options.data, options.threads, num_prompts,
        for_first_token=options.first_token,
    )  # fmt: skip
    if len(prompts) < num_prompts:
        parser.error(f"{options.data} has {len(prompts)} prompts: lower --prompts")
    if options.first_token:
        return measure(engine, made, prompts, options)
    modes: list[Mode] = [
        ("full", VocabularyParams(), "off"),
        *((name, VocabularyParams("slice", name), "off") for name in SHARES),
        ("exact", VocabularyParams("exact", "exact", options.verify_every), "off"),
        ("full_again", VocabularyParams(), "off"),
    ]
    if options.drafts:
        modes.append(("full_suffix", VocabularyParams(), "suffix"))
        exact = VocabularyParams("exact", "exact", options.verify_every)
        modes.append(("exact_suffix", exact, "suffix"))
    try:
        rounds, num_different = run_rounds(engine, prompts, modes, options)
        result = {
            "tool": "vocab_speed",
            "machine": machine.describe(),
            "model": options.folder.name,
            "task": options.data.name,
            "vocab_size": made.slice.vocab_size,
            "profile_ids": made.slice.num_ids,
            "profile_miss_rate": made.miss_rate,
            "slice_ids": {name: p.slice.num_ids for name, p in profiles.items()},
            "slice_bytes": engine.stats().slice_bytes,
            "different_answers": num_different,
            "modes": figures(rounds),
            "memory": head_memory(
                options.folder,
                made.slice.vocab_size,
                engine.runner.head_row_bytes,
                {name: max(run.num_ids for run in runs) for name, runs in rounds.items()},
            ),
            "num_answers": options.prompts,
            "same_as_full": {
                name: sum(
                    a == b
                    for run, full in zip(runs, rounds["full"], strict=True)
                    for a, b in zip(run.outputs, full.outputs, strict=True)
                )
                for name, runs in rounds.items()
            },
        }
    finally:
        engine.close()
    show(result)
    emit(result, options.json)
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
