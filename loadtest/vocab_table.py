"""Vocabulary profiles on task data: what Algorithm 1 keeps and what it misses. No model is run.

    python -m loadtest.vocab_table --data DIR [--model smollm2-135m-instruct ...] [--task NAME ...]

DIR holds a folder per task with train.jsonl (profiled) and test.jsonl (measured), lines of prompt
and completion. Models are the built-in ones in the user's cache, or folders. For each model and
task: |T| + [mean dynamic], % of V, token-level recall of the gold completions and documents with a
miss for tau in {0, .01, .02, .1}; ablations (dynamic only, static only, filters one by one); and
static pruning (VP), with the share of test prompts that its tokenizer writes in other ids.

|T| excludes the ids that are always inside (EOS, specials, byte tokens), as the paper counts it;
recall includes them. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from loadtest.vocab_pruning import close_under_merges, prune_tokenizer, static_pruning_ids
from server import token_bytes
from vocab_store.command import model_facts
from vocab_store.documents import Example, read_pairs, tokenize_pairs
from vocab_store.profile import (
    document_frequencies,
    measure_coverage,
    tolerance_filter,
)
from vocab_store.slice import RequiredIds, VocabSlice
from vocab_store.unicode_blocks import blocks_of_languages

TOLERANCES = (0.0, 0.01, 0.02, 0.1)
LANGUAGES = {"mt_en_zh": ("en", "zh")}
"""By task, where not English alone. mt_en_it needs none: Italian has English's blocks."""
MODELS = ("smollm2-135m-instruct", "gemma-3-270m")


@dataclass(frozen=True, slots=True)
class Row:
    """What a row of the table lets a request draw.

    slice: T with the required ids. num_t: |T| without them, as the paper counts. dynamic: whether
    the request's prompt ids belong to it. tokenizer: VP's own, whose id i is slice.ids[i].
    """

    slice: VocabSlice
    num_t: int
    dynamic: bool = True
    tokenizer: Tokenizer | None = None

    def figures(self, test: list[Example]) -> dict[str, Any]:
        """One cell of the table, on documents that it was not made from."""
        coverage = measure_coverage(self.slice, test, dynamic=self.dynamic)
        return {
            "t": self.num_t,
            "dynamic": round(coverage.mean_dynamic, 1),
            "share": self.num_t / self.slice.vocab_size,
            "share_with_required": self.slice.share,
            "recall": coverage.recall,
            "documents_missed": coverage.document_miss_rate,
        }


def make_rows(
    train: list[Example],
    languages: tuple[str, ...],
    tokens: token_bytes.TokenBytes,
    required: RequiredIds,
    tokenizer: Tokenizer,
) -> dict[str, Row]:
    """All rows of one task by name, in the table's order."""
    num = required.vocab_size
    every = document_frequencies(train, num, input_aware=False)
    df = document_frequencies(train, num)
    blocks = blocks_of_languages(languages)

    def row(ids: Any, *, dynamic: bool = True) -> Row:
        made = VocabSlice.make(np.union1d(ids, required.ids), required)
        return Row(made, len(ids), dynamic)

    def in_blocks(ids: Any) -> Any:
        return np.asarray([i for i in ids if blocks.has_token(tokens.bytes_of(int(i)))], np.int64)

    aware = np.flatnonzero(df)
    language = in_blocks(aware)
    rows = {
        "unfiltered": row(np.flatnonzero(every)),
        "+ input-aware": row(aware),
        "+ language": row(language),
    }
    for tau in TOLERANCES:
        rows[f"tau {tau}"] = row(tolerance_filter(language, df, tau, len(train)))
    rows["dynamic only"] = row(np.empty(0, np.int64))
    kept = tolerance_filter(language, df, 0.01, len(train))
    rows["static only, tau 0.01"] = row(kept, dynamic=False)
    unaware = in_blocks(np.flatnonzero(every))
    rows["static only, not input-aware, tau 0.01"] = row(
        tolerance_filter(unaware, every, 0.01, len(train)), dynamic=False
    )
    spec = tokenizer.to_str()
    pruned = VocabSlice.make(
        close_under_merges(spec, static_pruning_ids(train, required).ids), required
    )
    cut = Tokenizer.from_str(prune_tokenizer(spec, pruned)[0])
    rows["VP"] = Row(pruned, pruned.num_ids, dynamic=False, tokenizer=cut)
    return rows


def measure_task(
    rows: dict[str, Row], test: list[Example], prompts: list[str], tokenizer: Tokenizer
) -> dict[str, Any]:
    """All rows of one model on one task; VP's with the share of prompts it writes otherwise."""
    cells = {name: row.figures(test) for name, row in rows.items()}
    cut, ids = rows["VP"].tokenizer, rows["VP"].slice.ids
    assert cut is not None
    changed = sum(
        not np.array_equal(ids[new.ids], old.ids)
        for new, old in zip(
            cut.encode_batch_fast(prompts), tokenizer.encode_batch_fast(prompts), strict=True
        )
    )
    cells["VP"]["prompts_changed"] = changed / max(1, len(prompts))
    return cells


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 when there is nothing to measure."""
    root = Path(args.data)
    if not root.is_dir():
        print(f"{root}: no such folder; --data names the folder of the task data", file=sys.stderr)
        return 1
    tasks = args.task or sorted(
        path.name for path in root.iterdir() if (path / "train.jsonl").exists()
    )
    results: dict[str, Any] = {}
    for model in args.model or MODELS:
        folder = Path(model)
        if not folder.is_dir():
            from server.model.catalog import cached_folder

            found = cached_folder(model)
            if found is None:
                print(f"{model}: not in the cache (tailor models fetch), left out", file=sys.stderr)
                continue
            folder = found
        vocab_size, _, eos_ids = model_facts(folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokens = token_bytes.build(tokenizer, vocab_size)
        required = RequiredIds.from_tokens(tokens, eos_ids)
        print(f"\n{model}: V {vocab_size}, always inside {required.ids.size}\n")
        print("| task | row | T + [dynamic] | % of V | recall | documents with a miss |")
        print("|---|---|---|---|---|---|")
        for task in tasks:
            start = time.perf_counter()
            tests = list(read_pairs(root / task / "test.jsonl"))
            train = tokenize_pairs(list(read_pairs(root / task / "train.jsonl")), tokenizer)
            test = tokenize_pairs(tests, tokenizer)
            languages = LANGUAGES.get(task, ("en",))
            rows = make_rows(train, languages, tokens, required, tokenizer)
            cells = measure_task(rows, test, [prompt for prompt, _ in tests], tokenizer)
            results.setdefault(model, {})[task] = cells
            for name, cell in cells.items():
                note = f"; {cell['prompts_changed']:.0%} prompts other" if name == "VP" else ""
                print(
                    f"| {task} | {name} | {cell['t']} + [{cell['dynamic']:.0f}] | "
                    f"{cell['share']:.2%} | {cell['recall']:.2%} | "
                    f"{cell['documents_missed']:.1%}{note} |",
                    flush=True,
                )
            print(f"{model} {task} {time.perf_counter() - start:.1f} s", file=sys.stderr)
    if not results:
        return 1
    print(json.dumps({"benchmark": "vocab_table", "results": results}, sort_keys=True))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Vocabulary profiles on task data.")
    parser.add_argument("--data", required=True, help="folder of the task data")
    parser.add_argument("--model", action="append", help="built-in name or folder; repeatable")
    parser.add_argument("--task", action="append", help="task folder; repeatable; default: all")
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
