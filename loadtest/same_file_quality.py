"""Next-token distributions of Tailor and llama.cpp on the same GGUF: KL, greedy agreement.

    python -m loadtest.same_file_quality --gguf MODEL.gguf --llamacpp BIN/llama-server \\
        --data DIR/test.jsonl --num 20

At every scored position of the texts of --data (loadtest.weights_quality: prompt, a blank,
completion) llama.cpp is asked for its --top likeliest ids, from the logits before any sampling,
after the gold tokens, by ids. Tailor is scored with the numbers of the file as they are (integer
products), and with the file dequantised to float32, which is the truth that both round. Told for
each pair: the mean KL divergence in nats over the --top ids of the first, what is left of either as
one more outcome (so it is a lower bound), and the share of positions with the same likeliest id.
llama.cpp answers one position a request, which takes long with a large vocabulary: --positions asks
for so many of them, evenly over the texts.
Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer

from loadtest import machine
from loadtest.options import emit
from loadtest.peer import Peer, PeerFailed, bring_down, bring_up, stop_on_sigterm
from loadtest.same_file import LLAMACPP, servers
from loadtest.weight_forms import runner_of
from loadtest.weights_quality import read_texts
from server.model.scoring import Text, top_ids

Top = Mapping[int, float]
"""id -> log-probability, of the likeliest ids."""

_FLOOR = 1e-9


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


def compare(ours: Sequence[Top], theirs: Sequence[Top]) -> dict[str, float]:
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
    peer: Peer, texts: Sequence[Text], num: int, places: Sequence[int] | None = None
) -> list[Top]:
    """llama.cpp's distributions at the scored positions, or at those of these numbers, ascending.
    Raises PeerFailed."""
    found: list[Top] = []
    asked = None if places is None else set(places)
    number = -1
    async with httpx.AsyncClient(timeout=600.0) as client:
        for text in texts:
            for at in range(text.start, len(text.ids)):
                number += 1
                if asked is not None and number not in asked:
                    continue
                body = {
                    "prompt": list(text.ids[:at]), "n_predict": 1, "n_probs": num,
                    "temperature": 0.0, "cache_prompt": True, "id_slot": 0,
                }  # fmt: skip
                response = await client.post(f"{peer.url}/completion", json=body)
                if response.status_code != 200:
                    raise PeerFailed(f"{peer.name}: {response.text[:300]}")
                (told,) = response.json()["completion_probabilities"]
                found.append({int(t["id"]): float(t["logprob"]) for t in told["top_logprobs"]})
    return found


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m loadtest.same_file_quality --gguf m.gguf --llamacpp "
        "llama-server --data data/massive_en/test.jsonl",
    )
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--llamacpp", type=Path, required=True, help="llama.cpp's llama-server")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines: prompt, completion")
    parser.add_argument("--num", type=int, default=20, help="texts")
    parser.add_argument("--longest", type=int, default=512, help="longest text, in tokens")
    parser.add_argument("--top", type=int, default=200, help="ids of a distribution")
    parser.add_argument("--positions", type=int, help="of how many positions; default: all")
    parser.add_argument("--weights", default="file", help="forms that are compared, with commas")
    parser.add_argument("--llamacpp-args", default="", help="more options of llama-server")
    parser.add_argument("--log-dir", type=Path, default=Path("loadtest/results/logs"))
    parser.add_argument("--json", type=Path, help="append the JSON line to this file too")
    return parser


def main() -> int:
    """The command. Returns the exit status."""
    options = _options().parse_args()
    model = str(options.gguf.resolve())
    tops: dict[str, list[Top]] = {}
    texts: list[Text] = []
    places: list[int] = []
    for form in ("float32", *options.weights.split(",")):
        runner, folder = runner_of(
            model, form, adapter=None, threads=None, max_rows=options.longest
        )
        if not texts:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            eos = runner.info.eos_token_ids[0]
            texts = read_texts(options.data, tokenizer, eos, options.num, options.longest)
        places = spread(sum(len(t.ids) - t.start for t in texts), options.positions)
        told = list(top_ids(runner, texts, options.top))
        tops[form] = [dict(told[place]) for place in places]
        runner.close()
        del runner, told
    arguments = {LLAMACPP: options.llamacpp_args, "tailor": ""}
    peers = servers(options.gguf.resolve(), options.llamacpp.resolve(), arguments)[:1]
    stop_on_sigterm()

    async def ask() -> list[Top]:
        await bring_up(peers, options.log_dir)
        return await llamacpp_tops(peers[0], texts, options.top, places)

    try:
        tops[LLAMACPP] = asyncio.run(ask())
    except PeerFailed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        bring_down(peers)
    found: dict[str, Any] = {}
    names = list(tops)
    for first in range(len(names)):
        for second in range(first + 1, len(names)):
            pair = f"{names[first]} || {names[second]}"
            found[pair] = compare(tops[names[first]], tops[names[second]])
            print(f"{pair:24s} {found[pair]}")
    summary = {
        "tool": "same_file_quality",
        "gguf": options.gguf.name,
        "data": options.data.parent.name,
        "texts": len(texts),
        "positions": len(tops[LLAMACPP]),
        "top": options.top,
        "pairs": found,
        "llamacpp": peers[0].version,
        "machine": machine.describe(),
    }
    emit(summary, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
