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
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from loadtest import machine
from loadtest.options import emit
from loadtest.weight_forms import FORMS, forms_of, runner_of
from server.model.scoring import Scores, Text, compare, score


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
