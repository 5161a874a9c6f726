"""What a cheaper model costs in quality: forms of the weights, slices, adapters with own tokens.

    python -m loadtest.quality forms --data DIR/test.jsonl --forms int8,int4 [--adapter DIR]
    python -m loadtest.quality slices --model gemma-3-270m --data DIR --task squad,snips
    python -m loadtest.quality adapters --base DIR --enriched DIR --train A.jsonl --test B.jsonl

`forms` reads each line of --data as prompt, a blank, completion and the end token, in one
teacher-forced step. Reported of each form, float32 first: perplexity of the completions; `exact`,
the share of completions that greedy decoding would give whole (each of their tokens and the end is
the argmax after the gold tokens before it, which is the same thing); `tokens_agree`, the share of
positions whose argmax is float32's; `texts_agree`, of texts where all are; mean |difference| of the
gold tokens' log-probabilities. A form may name the type of K and V: int8:float16. float32 of a
built-in model is its GGUF dequantised.

`slices` is in loadtest.slice_quality, `adapters` in loadtest.adapter_quality. Each ends in one JSON
line.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from tokenizers import Tokenizer

from loadtest.options import ResultOptions, emit, program, run
from loadtest.steps import FORMS, forms_of, runner_of
from server.model.scoring import Scores, Text, compare, score

app = program("quality", __doc__)
for part in ("slice_quality:slices", "adapter_quality:adapters"):
    app.command(f"loadtest.{part}")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class FormOptions:
    """The forms and the texts."""

    data: Annotated[Path, Parameter(help="JSON lines: prompt, completion")]
    model: str = "smollm2-135m-instruct"
    adapter: Path | None = None
    forms: Annotated[str, Parameter(help="with commas; float32 is added")] = ",".join(FORMS)
    num: Annotated[int, Parameter(help="texts")] = 160
    longest: Annotated[int, Parameter(help="longest text, in tokens")] = 512
    threads: int | None = None


_RESULTS = ResultOptions()


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


@app.command
def forms(*, options: FormOptions, results: ResultOptions = _RESULTS) -> int:
    """Every form of the weights against float32; see above.

    Example: python -m loadtest.quality forms --data data/massive_en/test.jsonl --forms int8,int4
    """
    texts: list[Text] = []
    base: Scores | None = None
    found: dict[str, dict[str, float]] = {}
    adapter = None if options.adapter is None else str(options.adapter)
    for form in forms_of(options.forms):
        with runner_of(
            options.model, form, adapter=adapter, threads=options.threads, max_rows=options.longest
        ) as (runner, folder):
            if not texts:
                tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
                eos = runner.info.eos_token_ids[0]
                texts = read_texts(options.data, tokenizer, eos, options.num, options.longest)
            scores = score(runner, texts)
            base = base or scores
            found[form] = compare(scores, base)
            print(f"{form:18s} {found[form]}", flush=True)
    emit(
        "quality forms",
        {"model": Path(options.model).name, "adapted": adapter is not None,
         "data": options.data.parent.name, "texts": len(texts),
         "positions": 0 if base is None else len(base.ranks), "forms": found},
        results.json,
    )  # fmt: skip
    return 0


main = partial(run, app)

if __name__ == "__main__":
    sys.exit(main())
