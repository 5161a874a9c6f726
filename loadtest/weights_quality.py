"""What keeping weights as integers costs in quality: every form against float32, on given texts.

    python -m loadtest.weights_quality --data DIR/test.jsonl [--adapter DIR] [--num 160]

Each line of --data has `prompt` and `completion`; they are read as prompt, a blank, completion and
the end token, in one teacher-forced step. Reported a form: perplexity of the completions; `exact`,
the share of completions that greedy decoding would give whole (each of their tokens and the end is
the argmax after the gold tokens before it, which is the same thing); `tokens_agree`, the share of
positions whose argmax is float32's; `texts_agree`, of texts where all are; mean |difference| of the
gold tokens' log-probabilities. A form may say what K and V are kept as: int8:float16. All in this
server; float32 of a built-in model is its GGUF
dequantised. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from loadtest import machine
from loadtest.options import emit
from loadtest.weight_forms import FORMS, forms_of, runner_of
from server.engine.batch import Batch, Runner

_BLOCK = 16


@dataclass(frozen=True)
class Text:
    """Ids of one text; from index `start` on they are scored."""

    ids: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Scores:
    """Of the scored positions of all texts, in order: log-probability of the id that is there, its
    rank, the likeliest id; text: which text each is of."""

    logprobs: npt.NDArray[np.float64]
    ranks: npt.NDArray[np.int64]
    best: npt.NDArray[np.int64]
    text: npt.NDArray[np.int64]


def read_texts(data: Path, tokenizer: Tokenizer, eos: int, num: int, longest: int) -> list[Text]:
    """The first `num` texts of at most `longest` ids. Raises ValueError when there is none."""
    texts = []
    with data.open(encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            start = len(tokenizer.encode(entry["prompt"]).ids)
            ids = (*tokenizer.encode(f"{entry['prompt']} {entry['completion']}").ids, eos)
            if start < len(ids) <= longest:
                texts.append(Text(ids, start))
            if len(texts) == num:
                break
    if not texts:
        raise ValueError(f"{data} holds no text of at most {longest} tokens")
    return texts


def _batch(text: Text, num_top: int = 1) -> Batch:
    """All ids but the last as prompt rows, each scored id under the row before it."""
    num = len(text.ids) - 1
    rows = np.arange(num, dtype=np.int32)
    none, minus = np.empty(0, np.int32), np.full(num, -1, np.int32)
    zeros = np.zeros(num, np.int32)
    scored = rows[text.start - 1 :]
    return Batch(
        token_ids=np.array(text.ids[:-1], np.int32),
        token_from=minus,
        positions=rows,
        seq_ids=zeros,
        slots=rows,
        prefix_len=rows + np.int32(1),
        path_start=zeros,
        path_len=zeros,
        path_slots=none,
        block_tables=np.arange(-(-num // _BLOCK), dtype=np.int32)[None],
        draw_rows=none,
        draw_params=none,
        draw_parent=none,
        draw_positions=none,
        draw_mask=none,
        masks=np.empty((0, 1), np.uint32),
        params=(),
        score_rows=scored,
        score_targets=np.array(text.ids[text.start :], np.int32),
        score_top=np.full(len(scored), num_top, np.int32),
        num_prefill_rows=num,
        num_draft_rows=0,
    )


def score(runner: Runner, texts: list[Text]) -> Scores:
    """Teacher-forced scores of all texts."""
    parts = []
    for number, text in enumerate(texts):
        runner.launch(_batch(text))
        drawn = runner.wait()
        best = [top[0][0] for top in drawn.score_top]
        parts.append((drawn.score_logprobs, drawn.score_ranks, best, [number] * len(best)))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Scores(
        columns[0].astype(np.float64), *(column.astype(np.int64) for column in columns[1:])
    )


def top_ids(runner: Runner, texts: list[Text], num: int) -> list[tuple[tuple[int, float], ...]]:
    """The `num` likeliest ids of every scored position, with their log-probabilities."""
    found: list[tuple[tuple[int, float], ...]] = []
    for text in texts:
        runner.launch(_batch(text, num))
        found += runner.wait().score_top
    return found


def compare(scores: Scores, base: Scores) -> dict[str, float]:
    """Figures of a form, against those of float32 on the same texts."""
    num = int(base.text.max()) + 1
    gold, same = scores.ranks == 1, scores.best == base.best
    wrong = np.bincount(scores.text, ~gold, num)
    other = np.bincount(scores.text, ~same, num)
    return {
        "perplexity": round(float(np.exp(-scores.logprobs.mean())), 4),
        "exact": round(float((wrong == 0).mean()), 4),
        "tokens_agree": round(float(same.mean()), 4),
        "texts_agree": round(float((other == 0).mean()), 4),
        "logprob_error": round(float(np.abs(scores.logprobs - base.logprobs).mean()), 4),
    }


def main() -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m loadtest.weights_quality --data data/massive_en/test.jsonl",
    )
    parser.add_argument("--data", type=Path, required=True, help="JSON lines: prompt, completion")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--adapter", default=None)
    parser.add_argument(
        "--weights",
        default=",".join(FORMS),
        help="forms, float32 is added; form:DTYPE says what K and V are kept as",
    )
    parser.add_argument("--num", type=int, default=160, help="texts")
    parser.add_argument("--longest", type=int, default=512, help="longest text, in tokens")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, help="append the JSON line to this file too")
    args = parser.parse_args()
    texts: list[Text] = []
    base: Scores | None = None
    found: dict[str, dict[str, float]] = {}
    for form in forms_of(args.weights):
        runner, folder = runner_of(
            args.model, form, adapter=args.adapter, threads=args.threads, max_rows=args.longest
        )
        if not texts:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            eos = runner.info.eos_token_ids[0]
            texts = read_texts(args.data, tokenizer, eos, args.num, args.longest)
        scores = score(runner, texts)
        runner.close()
        base = base or scores
        found[form] = compare(scores, base)
        print(f"{form:18s} {found[form]}", flush=True)
    summary: dict[str, Any] = {
        "model": args.model,
        "adapted": args.adapter is not None,
        "data": args.data.parent.name,
        "texts": len(texts),
        "positions": 0 if base is None else len(base.ranks),
        "forms": found,
        "machine": machine.describe(),
    }
    emit(summary, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
