"""What a cheaper model costs in quality: forms of the weights, slices, adapters with own tokens.

    python -m loadtest.quality forms --data DIR/test.jsonl --forms int8,int4 [--adapter DIR]
    python -m loadtest.quality forms --data DIR/test.jsonl --model m.gguf --forms file \\
        --llamacpp llama-server
    python -m loadtest.quality slices --model gemma-3-270m --data DIR --task squad,snips
    python -m loadtest.quality adapters --base DIR --enriched DIR --train A.jsonl --test B.jsonl

`forms` reads each line of --data as prompt, a blank, completion and the end token, in one
teacher-forced step. Reported of each form, float32 first: perplexity of the completions; `exact`,
the share of completions that greedy decoding would give whole (each of their tokens and the end is
the argmax after the gold tokens before it, which is the same thing); `tokens_agree`, the share of
positions whose argmax is float32's; `texts_agree`, of texts where all are; mean |difference| of the
gold tokens' log-probabilities. A form may name the type of K and V: int8:float16. float32 of a
built-in model is its GGUF dequantised.

With --llamacpp the model is a GGUF that llama.cpp serves too, and every pair of forms and llama.cpp
is compared at the same positions: the mean KL divergence in nats over the --top ids of the first,
what is left of either as one more outcome (so it is a lower bound), and the share of positions with
the same likeliest id. llama.cpp answers one position a request: --positions asks for so many,
evenly over the texts.

`slices` is in loadtest.slice_quality, `adapters` in loadtest.adapter_quality. Each ends in one JSON
line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated

import httpx
import numpy as np
from cyclopts import Parameter
from tokenizers import Tokenizer

from loadtest.options import ResultOptions, emit, program, run, stopped_afterwards
from loadtest.peer import Peer, PeerFailed, bring_up
from loadtest.same_file import LLAMACPP, servers
from loadtest.steps import FORMS, forms_of, runner_of
from server.model.scoring import Scores, Text, compare, score, top_ids

Top = Mapping[int, float]
"""id -> log-probability, of the likeliest ids."""
_FLOOR = 1e-9

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
    llamacpp: Annotated[Path | None, Parameter(help="llama.cpp's llama-server")] = None
    llamacpp_args: Annotated[str, Parameter(help="more options of llama-server")] = ""
    top: Annotated[int, Parameter(help="ids of a distribution")] = 200
    positions: Annotated[int | None, Parameter(help="of llama.cpp; default: all")] = None
    log_dir: Path = Path("loadtest/results/logs")


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


def divergence(p: Top, q: Top) -> float:
    """KL(p || q) in nats over the ids of p that q has too; the rest of each is one outcome."""
    shared = [i for i in p if i in q]
    ours = np.exp([p[i] for i in shared])
    theirs = np.exp([q[i] for i in shared])
    rest = max(1.0 - float(ours.sum()), _FLOOR), max(1.0 - float(theirs.sum()), _FLOOR)
    inside = float((ours * np.log(ours / np.maximum(theirs, _FLOOR))).sum()) if shared else 0.0
    return inside + rest[0] * float(np.log(rest[0] / rest[1]))


def best(top: Top) -> int:
    """The likeliest id; of equal ones the lowest."""
    return min(top, key=lambda i: (-top[i], i))


def apart(ours: Sequence[Top], theirs: Sequence[Top]) -> dict[str, float]:
    """Figures of two models at the same positions, the first as the truth."""
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "kl": round(float(np.mean([divergence(p, q) for p, q in pairs])), 5),
        "greedy_agree": round(float(np.mean([best(p) == best(q) for p, q in pairs])), 4),
    }


def spread(total: int, num: int | None) -> list[int]:
    """num of the numbers 0 .. total - 1, evenly, in order; all for None."""
    num = total if num is None else min(num, total)
    return [total * i // num for i in range(num)]


async def llamacpp_tops(
    peer: Peer, texts: Sequence[Text], num: int, places: Sequence[int]
) -> list[Top]:
    """llama.cpp's distributions at those of the scored positions, ascending. Raises PeerFailed."""
    found: list[Top] = []
    asked, number = set(places), -1
    async with httpx.AsyncClient(timeout=600.0) as client:
        for text in texts:
            for at in range(text.start, len(text.ids)):
                number += 1
                if number not in asked:
                    continue
                body = {
                    "prompt": list(text.ids[:at]), "n_predict": 1, "n_probs": num,
                    "temperature": 0.0, "cache_prompt": True, "id_slot": 0,
                }  # fmt: skip
                response = await client.post(f"{peer.url}/completion", json=body)
                if response.status_code != 200:
                    raise PeerFailed(f"{peer.name}: {response.text[:300]}")
                (said,) = response.json()["completion_probabilities"]
                found.append({int(t["id"]): float(t["logprob"]) for t in said["top_logprobs"]})
    return found


def ask_llamacpp(
    options: FormOptions, binary: Path, texts: Sequence[Text], places: Sequence[int]
) -> list[Top]:
    """Start llama.cpp on the model, and ask it. Raises PeerFailed."""
    args = {LLAMACPP: options.llamacpp_args, "tailor": ""}
    peers = servers(Path(options.model).resolve(), binary.resolve(), args)[:1]

    async def ask() -> list[Top]:
        await bring_up(peers, options.log_dir)
        return await llamacpp_tops(peers[0], texts, options.top, places)

    with stopped_afterwards(peers):
        return asyncio.run(ask())


@app.command
def forms(*, options: FormOptions, results: ResultOptions = _RESULTS) -> int:
    """Every form of the weights against float32, and llama.cpp on the same file; see above.

    Example: python -m loadtest.quality forms --data data/massive_en/test.jsonl --forms int8,int4
    """
    texts: list[Text] = []
    places: list[int] = []
    base: Scores | None = None
    found: dict[str, dict[str, float]] = {}
    tops: dict[str, list[Top]] = {}
    adapter = None if options.adapter is None else str(options.adapter)
    for form in forms_of(options.forms):
        with runner_of(
            options.model, form, adapter=adapter, threads=options.threads, max_rows=options.longest
        ) as (runner, folder):
            if not texts:
                tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
                eos = runner.info.eos_token_ids[0]
                texts = read_texts(options.data, tokenizer, eos, options.num, options.longest)
                places = spread(sum(len(t.ids) - t.start for t in texts), options.positions)
            scores = score(runner, texts)
            base = base or scores
            found[form] = compare(scores, base)
            print(f"{form:18s} {found[form]}", flush=True)
            if options.llamacpp is not None:
                every = list(top_ids(runner, texts, options.top))
                tops[form] = [dict(every[place]) for place in places]
    if options.llamacpp is not None:
        tops[LLAMACPP] = ask_llamacpp(options, options.llamacpp, texts, places)
    pairs = {f"{a} || {b}": apart(tops[a], tops[b]) for a, b in combinations(tops, 2)}
    for pair, figures in pairs.items():
        print(f"{pair:24s} {figures}")
    emit(
        "quality forms",
        {"model": Path(options.model).name, "adapted": adapter is not None,
         "data": options.data.parent.name, "texts": len(texts),
         "positions": 0 if base is None else len(base.ranks), "forms": found,
         "top": options.top, "pair_positions": len(places), "pairs": pairs},
        results.json,
    )  # fmt: skip
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    return run(app, arguments)


if __name__ == "__main__":
    sys.exit(main())
