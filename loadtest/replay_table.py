"""The replay table: all drafters x data sets x budgets, with paired bootstrap.

    python -m loadtest.replay_table --data ../shared/data

Outputs are the gold completions of the test splits, or the model's own where --recorded DIR holds
NAME/test.jsonl (and NAME/train.jsonl for the corpus), made by `tailor corpus generate`. The corpus
is made of train outputs only; tests are read for this table and for nothing else. Columns of other
projects' drafters (loadtest.peer_drafters) appear where their packages can be imported. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafters import make_drafter
from drafters.auto.held_out import build_calibrated
from drafters.corpus import Corpus
from drafters.published.grammys import BigramTable
from drafters.replay import Recording, ReplayResult, read_recordings, replay
from loadtest import machine
from loadtest.recordings import EOS, data_sets, load_tokenizer, read_split

NUM_RESAMPLES = 2000


def columns(corpus: Corpus, eos: int, bigrams: BigramTable | None) -> dict[str, Callable[[], Any]]:
    """How each column's drafter is made: anew for each cell, so that ours learn nothing between."""
    made: dict[str, Callable[[], Any]] = {
        "prompt": lambda: make_drafter("prompt", eos_token_ids=(eos,)),
        "trie": lambda: make_drafter("trie"),
        "mix": lambda: make_drafter("mix", corpus=corpus),
        "grammys": lambda: make_drafter("grammys"),
        "suffix": lambda: make_drafter("suffix", eos_token_ids=(eos,)),
    }
    if bigrams is not None:
        made["bigram"] = lambda: make_drafter("grammys", table=bigrams, strategy="bigram")
        made["grammys, table"] = lambda: make_drafter("grammys", table=bigrams)
    try:
        from loadtest.peer_drafters import ArcticSuffix

        # Anew for each budget too: evicting what it saw of a request at its close leaves it 1.6 to
        # 2.4 % better when it sees the same requests again.
        ArcticSuffix()  # raises where the package is missing
        made["arctic"] = functools.partial(ArcticSuffix, corpus=corpus)
        made["arctic tree 4"] = functools.partial(
            ArcticSuffix, corpus=corpus, use_tree_spec=True, max_spec_factor=4.0
        )
    except ImportError:
        print("arctic-inference is not installed: its columns are left out")
    try:
        from loadtest.peer_drafters import Aded

        aded = Aded(corpus=corpus)
    except ImportError:
        print("draftretriever is not installed: its column is left out")
    else:
        made["aded"] = lambda: aded
    made["auto"] = lambda: make_drafter("auto", corpus=corpus, eos_token_ids=(eos,))
    return made


def ratio_interval(ours: ReplayResult, other: ReplayResult, seed: int) -> tuple[float, float]:
    """95 % interval of tokens per step, ours over the other's, examples resampled in pairs."""
    rng = np.random.default_rng(seed)
    num = len(ours.num_steps)
    pick = rng.integers(0, num, (NUM_RESAMPLES, num))
    # Both made the same tokens, so the ratio is that of the steps.
    mine = np.maximum(1, np.asarray(ours.num_steps)[pick].sum(axis=1))
    theirs = np.maximum(1, np.asarray(other.num_steps)[pick].sum(axis=1))
    low, high = np.quantile(theirs / mine, [0.025, 0.975])
    return float(low), float(high)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m loadtest.replay_table --data ../shared/data --budgets 16",
    )
    parser.add_argument("--data", type=Path, default=root.parent / "shared" / "data")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: SmolLM2's)")
    parser.add_argument("--recorded", type=Path, help="folder of the model's own outputs")
    parser.add_argument("--sets", nargs="*", help="data sets (default: all)")
    parser.add_argument("--budgets", type=int, nargs="*", default=[4, 8, 16, 32])
    parser.add_argument("--examples", type=int, default=100, help="test examples a set")
    parser.add_argument("--corpus-examples", type=int, default=2000)
    parser.add_argument(
        "--split", choices=("test", "tune"), default="test", help="tune: a held-back part of train"
    )
    parser.add_argument(
        "--bigrams", type=Path, help="`tailor corpus bigrams` of the model: two more columns"
    )
    parser.add_argument(
        "--from-json", type=Path, help="print the tables of an earlier run's cells, replay nothing"
    )
    return parser


def measure_cell(
    made: Mapping[str, Callable[[], Any]], test: Sequence[Recording], budget: int
) -> dict[str, Any]:
    """All columns of one data set and budget as JSON values: `auto` against the best other one."""
    results: dict[str, ReplayResult] = {}
    for column, make in made.items():
        results[column] = replay(make(), test, budget=budget)
    prefill = replay(
        made["auto"](),
        test,
        budget=budget,
        in_prefill=True,
    )
    others = {c: r for c, r in results.items() if c != "auto"}
    best = max(others, key=lambda c: others[c].decode_tokens_per_step)
    low, high = ratio_interval(results["auto"], results[best], seed=0)
    return {
        "tokens_per_step": {c: round(r.decode_tokens_per_step, 3) for c, r in results.items()},
        "auto_prefill": round(prefill.decode_tokens_per_step, 3),
        "best_other": best,
        "ratio": round(
            results["auto"].decode_tokens_per_step / results[best].decode_tokens_per_step, 3
        ),
        "ratio_95": [round(low, 3), round(high, 3)],
        "propose_us": results["auto"].summary()["propose_us"],
        "extend_us": results["auto"].summary()["extend_us_per_token"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.from_json is not None:
        lines = arguments.from_json.read_text().splitlines()
        cells = [json.loads(line) for line in lines if line.startswith('{"data"')]
        _print_tables(cells, sorted({cell["budget"] for cell in cells}))
        return 0
    try:
        bigrams = (
            None
            if arguments.bigrams is None
            else BigramTable.load(arguments.bigrams, fingerprint=None)
        )
        tokenizer = load_tokenizer(arguments.tokenizer)
        names = (
            data_sets(arguments.data)
            if arguments.recorded is None
            else sorted(path.parent.name for path in arguments.recorded.glob("*/test.jsonl"))
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if arguments.sets:
        names = [name for name in names if name in arguments.sets]
    eos = int(tokenizer.token_to_id(EOS))
    cells = []
    for name in names:
        train, test = _examples(arguments, tokenizer, name)
        start = time.perf_counter()
        corpus = build_calibrated(
            ((e.prompt_ids, e.output_ids) for e in train), fingerprint="replay", p_min=5
        )
        built_s = time.perf_counter() - start
        made = columns(corpus, eos, bigrams)
        for budget in arguments.budgets:
            cell: dict[str, Any] = {"data": name, "budget": budget, "examples": len(test)}
            cell |= measure_cell(made, test, budget) | {"corpus_s": round(built_s, 2)}
            cells.append(cell)
            print(json.dumps(cell), flush=True)
    _print_tables(cells, arguments.budgets)
    return 0


def _examples(
    arguments: argparse.Namespace, tokenizer: Any, name: str
) -> tuple[list[Recording], list[Recording]]:
    """(corpus examples, examples to replay) of a data set."""
    if arguments.recorded is not None:
        test = list(read_recordings(arguments.recorded / name / "test.jsonl"))
        path = arguments.recorded / name / "train.jsonl"
        train = list(read_recordings(path)) if path.is_file() else []
        return train[: arguments.corpus_examples], test[: arguments.examples]
    if arguments.split == "test":
        return (
            read_split(tokenizer, arguments.data, name, "train", arguments.corpus_examples),
            read_split(tokenizer, arguments.data, name, "test", arguments.examples),
        )
    train = read_split(tokenizer, arguments.data, name, "train", arguments.corpus_examples + 400)
    num_held = min(arguments.examples, len(train) // 4)
    return train[:-num_held][: arguments.corpus_examples], train[-num_held:]


def _best_other(cell: dict[str, Any]) -> float:
    best: float = cell["tokens_per_step"][cell["best_other"]]
    return best


def _print_tables(cells: list[dict[str, Any]], budgets: list[int]) -> None:
    """One Markdown table a budget, and the summary as the last line."""
    summary: dict[str, Any] = {"tool": "replay_table", "machine": machine.describe()}
    for budget in budgets:
        rows = [cell for cell in cells if cell["budget"] == budget]
        if not rows:
            continue
        names = list(rows[0]["tokens_per_step"])
        print(f"\n### {budget} nodes a step\n")
        print("| data | " + " | ".join(names) + " | auto, tree in prefill | auto / best other |")
        print("|---" * (len(names) + 3) + "|")
        for cell in rows:
            figures = " | ".join(f"{cell['tokens_per_step'][c]:.2f}" for c in names)
            low, high = cell["ratio_95"]
            print(
                f"| {cell['data']} | {figures} | {cell['auto_prefill']:.2f} |"
                f" {cell['ratio']:.2f} ({low:.2f}-{high:.2f}) {cell['best_other']} |"
            )
        auto = np.asarray([cell["tokens_per_step"]["auto"] for cell in rows])
        summary[str(budget)] = {
            "median_ratio_to_best_other": round(float(np.median([c["ratio"] for c in rows])), 3),
            "lowest_ratio": min(c["ratio"] for c in rows),
            "median_prefill_ratio": round(
                float(np.median([c["auto_prefill"] / _best_other(c) for c in rows])), 3
            ),
            "lowest_prefill_ratio": round(min(c["auto_prefill"] / _best_other(c) for c in rows), 3),
            "median_ratio_to": {
                c: round(
                    float(np.median(auto / np.asarray([r["tokens_per_step"][c] for r in rows]))), 3
                )
                for c in names
                if c != "auto"
            },
            "median_prefill_gain": round(
                float(np.median([c["auto_prefill"] / c["tokens_per_step"]["auto"] for c in rows])),
                3,
            ),
            "median_propose_us": round(float(np.median([c["propose_us"] for c in rows])), 1),
            "median_extend_us": round(float(np.median([c["extend_us"] for c in rows])), 2),
        }
    print(json.dumps(summary))


if __name__ == "__main__":
    sys.exit(main())
