"""What drafting costs: propose, extend, the trie's build, and `tailor corpus build`.

    python -m loadtest.drafter_costs --data ../shared/data

A corpus of 5M output tokens is made of the data sets' train outputs: themselves first, then
crossings of two of one set at a token that both hold, so that it repeats itself as a task's does.
It is built by `tailor corpus build` in a process of its own (time and peak memory are that
process's), mapped, and held-back train examples of each set are replayed on it. Then each drafter
proposes and is told, token by token, with 1 session and with 8 in turn. Timings are
medians; run it on a machine that does nothing else. The last line is JSON, with each figure beside
its bound; the exit status is 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from drafters import Need, make_drafter
from drafters.auto.likely import NUM_LIKELY
from drafters.auto.seen import Seen
from drafters.catalog import OURS, that_use
from drafters.corpus import Corpus
from drafters.replay import Recording, replay
from loadtest import machine
from loadtest.recordings import EOS, data_sets, load_tokenizer, read_split

if TYPE_CHECKING:
    from drafters.base import Drafter, LikelySession

PROPOSE_US, EXTEND_US, TRIE_MS = 50.0, 10.0, 3.0
COUNT_S_PER_MILLION = 10.0
PEAK_GIB = 8.0
BUDGET = 16
TRIE_TOKENS = 2000
NUM_HELD = 20  # a set
NUM_SESSIONS = 8  # at once, where every drafter is measured


def crossings(examples: Sequence[Recording], rng: random.Random) -> Iterator[Recording]:
    """The examples, then new ones without end: one's output up to a token, another's after it."""
    yield from examples
    places: dict[int, list[tuple[int, int]]] = {}
    for number, example in enumerate(examples):
        for at, token in enumerate(example.output_ids[:-1]):
            places.setdefault(token, []).append((number, at))
    while True:
        first = rng.choice(examples)
        at = rng.randrange(max(1, len(first.output_ids) - 1))
        number, other = rng.choice(places.get(first.output_ids[at], [(0, 0)]))
        second = examples[number]
        yield Recording(
            first.prompt_ids, [*first.output_ids[: at + 1], *second.output_ids[other + 1 :]]
        )


def write_examples(sets: Sequence[Sequence[Recording]], num_tokens: int, file: Path) -> int:
    """Examples of all sets in turn, until they hold so many output tokens; returns that number.

    Prompts are cut to their last 64 tokens: what is measured here is outputs.
    """
    rng = random.Random(0)
    sources = [crossings(examples, rng) for examples in sets]
    num = 0
    with file.open("w") as out:
        while num < num_tokens:
            for source in sources:
                example = next(source)
                line = {"prompt_ids": example.prompt_ids[-64:], "output_ids": example.output_ids}
                out.write(json.dumps(line) + "\n")
                num += len(example.output_ids)
    return num


_WATCH = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"told": done.stderr[-500:], "status": done.returncode,
                  "cpu_s": used.ru_utime + used.ru_stime, "peak_kib": used.ru_maxrss}))
"""
"""A small process between: the peak of a child is at least that of the process that forked it."""


def build_in_child(data: Path, output: Path, model: str) -> dict[str, float]:
    """`tailor corpus build`: wall and CPU seconds, and its peak resident memory in GiB."""
    command = [sys.executable, "-m", "server.commands.cli", "corpus", "build", "--model", model]
    began = time.perf_counter()
    watched = subprocess.run(
        [sys.executable, "-c", _WATCH, *command, "--data", str(data), "-o", str(output)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    used = json.loads(watched.stdout)
    if used["status"]:
        raise RuntimeError(f"tailor corpus build failed: {used['told']}")
    return {
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(used["cpu_s"], 1),
        "peak_gib": round(used["peak_kib"] / (1 << 20), 2),
        "file_mib": round(output.stat().st_size / (1 << 20), 1),
    }


def trie_build_ms(prompt_ids: Sequence[int]) -> float:
    """Median time of building the trie of one prompt, in settle()."""
    drafter = make_drafter("trie")
    taken = []
    for _ in range(30):
        session = drafter.open(prompt_ids)
        start = time.perf_counter()
        session.settle()
        taken.append(time.perf_counter() - start)
        session.close()
    return 1e3 * float(np.median(taken))


def propose_and_extend(
    corpus: Corpus, held: Sequence[Recording], eos: int
) -> tuple[float, float, float]:
    """(propose, its 90th percentile, extend a token) of `auto` in us; the first run warms up."""
    drafter = make_drafter("auto", corpus=corpus, eos_token_ids=(eos,))
    for recordings in (held[:3], held):
        result = replay(drafter, recordings, budget=BUDGET, in_prefill=True)
    return (
        1e6 * float(np.median(result.propose_s)),
        1e6 * float(np.quantile(result.propose_s, 0.9)),
        1e6 * float(np.median(result.extend_s)),
    )


def costs_of(
    drafter: Drafter, held: Sequence[Recording], num_sessions: int, *, with_rows: bool = False
) -> dict[str, float]:
    """Median us of a propose and of an extend by one token, of so many sessions in turn, as the
    choices of a step are. with_rows: each step's row comes with likeliest ids, as a server's does;
    then `note_us` is what telling it takes, and extend_us has what adding it takes.
    """
    taken: dict[str, list[float]] = {"propose_us": [], "extend_us": [], "note_us": []}

    def timed(name: str, call: Callable[..., object], *arguments: Any) -> None:
        began = time.perf_counter()
        call(*arguments)
        taken[name].append(1e6 * (time.perf_counter() - began))

    rng = np.random.default_rng(0)
    chances = np.sort(rng.dirichlet(np.ones(NUM_LIKELY)).astype(np.float32))[::-1][None]
    for first in range(0, len(held) - num_sessions + 1, num_sessions):
        group = held[first : first + num_sessions]
        sessions = [drafter.open(recording.prompt_ids) for recording in group]
        for at in range(max(len(recording.output_ids) for recording in group)):
            for session, recording in zip(sessions, group, strict=True):
                if at >= len(recording.output_ids):
                    continue
                session.settle()
                timed("propose_us", session.propose, BUDGET, BUDGET)
                token = recording.output_ids[at]
                if with_rows:
                    ids = rng.integers(0, 40_000, (1, NUM_LIKELY), np.int32)
                    ids[0, 0] = token
                    note = cast("LikelySession", session).note_likely
                    timed("note_us", note, (), (), ids, chances)
                timed("extend_us", session.extend, [token])
        for session in sessions:
            session.close()
    return {name: round(float(np.median(us)), 2) for name, us in taken.items() if us}


def costs_by_drafter(
    corpus: Corpus, held: Sequence[Recording], eos: int
) -> dict[str, dict[str, dict[str, float]]]:
    """costs_of every drafter of ours, with the corpus where it takes one, by name and number of
    sessions. `auto` has no rows and no corpus; `auto, logits` rows; `auto, corpus` a corpus."""
    takes_corpus, takes_eos = that_use(Need.CORPUS), that_use(Need.EOS)
    ends = {"eos_token_ids": (eos,)}
    made = {
        spec.name: make_drafter(
            spec.name,
            **({"corpus": corpus} if spec.name in takes_corpus and spec.name != "auto" else {}),
            **(ends if spec.name in takes_eos else {}),
            **({"num_likely": 0} if spec.name == "auto" else {}),
        )
        for spec in OURS
    }
    made["auto, logits"] = make_drafter("auto", seen=Seen(), **ends)
    made["auto, corpus"] = make_drafter("auto", corpus=corpus, num_likely=0, **ends)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, drafter in made.items():
        rows = name == "auto, logits"
        costs_of(drafter, held[:NUM_SESSIONS], NUM_SESSIONS, with_rows=rows)  # compiled code
        found[name] = {
            str(num): costs_of(drafter, held, num, with_rows=rows) for num in (1, NUM_SESSIONS)
        }
    return found


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m loadtest.drafter_costs --data ../shared/data",
    )
    parser.add_argument("--data", type=Path, default=root.parent / "shared" / "data")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="its tokenizer.json (default: SmolLM2's)")
    parser.add_argument("--sets", nargs="*", help="data sets (default: all)")
    parser.add_argument(
        "--corpus-tokens", type=int, default=5_000_000, help="of the corpus drafted from (5M)"
    )
    parser.add_argument(
        "--build-tokens",
        type=int,
        nargs="*",
        default=[1_000_000, 50_000_000],
        help="sizes to build as well (1M and 50M; 50M takes minutes and 6 GB of disk)",
    )
    parser.add_argument("--folder", type=Path, help="for the files (a temporary one)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(argv)
    try:
        tokenizer = load_tokenizer(options.tokenizer)
        names = [n for n in data_sets(options.data) if not options.sets or n in options.sets]
    except FileNotFoundError as error:
        parser.error(str(error))
    if not names:
        parser.error("none of these data sets is there")
    about = machine.describe()
    eos = int(tokenizer.token_to_id(EOS))
    sets, held = [], {}
    for name in names:
        examples = read_split(tokenizer, options.data, name, "train", 2000)
        num_held = min(NUM_HELD, len(examples) // 5)
        sets.append(examples[num_held:])
        held[name] = examples[:num_held]
    figures: dict[str, Any] = {}
    bounds: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="drafter-costs-", dir=options.folder) as scratch:
        data, file = Path(scratch) / "examples.jsonl", Path(scratch) / "task.corpus"
        for size in sorted({*options.build_tokens, options.corpus_tokens}):
            num_tokens = write_examples(sets, size, data)
            built = build_in_child(data, file, options.model)
            figures[f"build_{size / 1e6:g}M"] = {"tokens": num_tokens, **built}
            print(f"{size / 1e6:g}M tokens: {built}", flush=True)
            if size == 1_000_000:
                bounds["build 1M, s"] = (built["wall_s"], COUNT_S_PER_MILLION)
            bounds[f"build {size / 1e6:g}M, peak GiB"] = (built["peak_gib"], PEAK_GIB)
            data.unlink()
            if size == options.corpus_tokens:
                start = time.perf_counter()
                corpus = Corpus.load(file, fingerprint=None)
                figures["load_ms"] = round(1e3 * (time.perf_counter() - start), 1)
                for name, recordings in held.items():
                    median, high, extend = propose_and_extend(corpus, recordings, eos)
                    figures[name] = {
                        "propose_us": round(median, 1),
                        "propose_p90_us": round(high, 1),
                        "extend_us": round(extend, 2),
                    }
                    print(f"{name}: {figures[name]}", flush=True)
                some = [r for turn in zip(*held.values(), strict=False) for r in turn]
                figures["drafters"] = costs_by_drafter(corpus, some[: 3 * NUM_SESSIONS], eos)
                for name, by_number in figures["drafters"].items():
                    print(f"{name}, by sessions at once: {by_number}", flush=True)
                of_sets = [figures[name] for name in names]
                for key, bound in (("propose_us", PROPOSE_US), ("extend_us", EXTEND_US)):
                    every = [figure[key] for figure in of_sets]
                    figures[key] = round(float(np.median(every)), 1)
                    bounds[f"{key}, median set"] = (figures[key], bound)
                del corpus
            file.unlink()
    prompt = [token for name in names for e in held[name] for token in e.prompt_ids][:TRIE_TOKENS]
    figures["trie_build_ms"] = round(trie_build_ms(prompt), 3)
    bounds[f"trie of {len(prompt)} tokens, ms"] = (figures["trie_build_ms"], TRIE_MS)
    missed = []
    for what, (value, bound) in bounds.items():
        print(f"{what}: {value} (bound {bound:g})")
        if value > bound:
            missed.append(what)
    print(json.dumps({"tool": "drafter_costs", "machine": about, **figures, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
