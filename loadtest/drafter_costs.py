"""`python -m loadtest.replay costs`: what drafting costs the host, in time and memory.

A corpus of --corpus-tokens output tokens is made of the data sets' train outputs: themselves first,
then crossings of two of one set at a token that both hold, so that it repeats itself as a task's
does. It is built by `tailor corpus build` in a process of its own (time and peak memory are that
process's) and mapped. Then each drafter proposes and is extended by held-back train examples, token
by token, with 1 session and with 8 in turn: microseconds of a proposal and of a token (medians),
nanoseconds of a proposed node (all proposals' time over all their nodes), and of noting a row of
likely ids. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from cyclopts import Parameter

from drafters import Need, make_drafter
from drafters.auto.likely import NUM_LIKELY
from drafters.auto.seen import Seen
from drafters.base import Drafter, LikelySession
from drafters.catalog import OURS, that_use
from drafters.corpus import Corpus
from drafters.replay import Recording
from loadtest.options import ResultOptions, emit
from loadtest.recordings import SetOptions, open_ids

BUDGET = 16
TRIE_TOKENS = 2000
NUM_HELD = 20  # a set
NUM_SESSIONS = 8  # at once, where every drafter is measured


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class CostOptions:
    """The corpus."""

    corpus_tokens: Annotated[int, Parameter(help="output tokens of the corpus")] = 5_000_000
    folder: Annotated[Path | None, Parameter(help="for the files (a temporary one)")] = None


_SETS, _COSTS, _RESULTS = SetOptions(), CostOptions(), ResultOptions()


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
        ids = [*first.output_ids[: at + 1], *examples[number].output_ids[other + 1 :]]
        yield Recording(first.prompt_ids, ids)


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
print(json.dumps({"said": done.stderr[-500:], "status": done.returncode,
                  "cpu_s": used.ru_utime + used.ru_stime, "peak_kib": used.ru_maxrss}))
"""
"""A small process between: the peak of a child is at least that of the process that forked it."""


def build_in_child(data: Path, output: Path, model: str) -> dict[str, float]:
    """`tailor corpus build`: wall and CPU seconds, and its peak resident memory in GiB."""
    command = [sys.executable, "-m", "server.commands.cli", "corpus", "build", "--model", model]
    began = time.perf_counter()
    watched = subprocess.run(
        [sys.executable, "-c", _WATCH, *command, "--data", str(data), "-o", str(output)],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    used = json.loads(watched.stdout)
    if used["status"]:
        raise RuntimeError(f"tailor corpus build failed: {used['said']}")
    return {
        "wall_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(used["cpu_s"], 1),
        "peak_gib": round(used["peak_kib"] / (1 << 20), 2),
        "file_mib": round(output.stat().st_size / (1 << 20), 1),
    }


def trie_build_ms(prompt_ids: Sequence[int]) -> float:
    """Median milliseconds of building the trie of one prompt, in settle()."""
    drafter = make_drafter("trie")
    taken = []
    for _ in range(30):
        session = drafter.open(prompt_ids)
        start = time.perf_counter()
        session.settle()
        taken.append(time.perf_counter() - start)
        session.close()
    return round(1e3 * float(np.median(taken)), 3)


def costs_of(
    drafter: Drafter, held: Sequence[Recording], num_sessions: int, *, with_rows: bool
) -> dict[str, float]:
    """See the top of this file. with_rows: sessions note rows of likely ids, too."""
    taken: dict[str, list[float]] = {"propose_us": [], "extend_us": [], "note_us": []}
    num_nodes = 0

    def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        found = call(*arguments)
        taken[name].append(1e6 * (time.perf_counter() - began))
        return found

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
                num_nodes += len(timed("propose_us", session.propose, BUDGET, BUDGET))
                token = recording.output_ids[at]
                if with_rows:
                    ids = rng.integers(0, 40_000, (1, NUM_LIKELY), np.int32)
                    ids[0, 0] = token
                    note = cast("LikelySession", session).note_likely
                    timed("note_us", note, (), (), ids, chances)
                timed("extend_us", session.extend, [token])
        for session in sessions:
            session.close()
    found = {name: round(float(np.median(us)), 2) for name, us in taken.items() if us}
    found["propose_p90_us"] = round(float(np.quantile(taken["propose_us"], 0.9)), 2)
    return found | {"ns_a_node": round(1e3 * sum(taken["propose_us"]) / max(1, num_nodes), 1)}


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
        print(f"{name}, by sessions at once: {found[name]}", flush=True)
    return found


def costs(
    *,
    sets: SetOptions = _SETS,
    options: CostOptions = _COSTS,
    results: ResultOptions = _RESULTS,
) -> int:
    """Time and memory of drafting: propose, extend, a node, a corpus; see loadtest.drafter_costs.

    Example: python -m loadtest.replay costs --data data --corpus-tokens 5000000
    """
    ids, names = open_ids(sets.model), replace(sets, recorded=None).names()
    results.refuse_busy_machine()
    parts, held = [], []
    for name in names:
        examples = sets.read(ids, name, "train", 2000)
        num_held = min(NUM_HELD, len(examples) // 5)
        parts.append(examples[num_held:])
        held.append(examples[:num_held])
    figures: dict[str, Any] = {"sets": names}
    with tempfile.TemporaryDirectory(prefix="drafter-costs-", dir=options.folder) as scratch:
        data, file = Path(scratch) / "examples.jsonl", Path(scratch) / "task.corpus"
        num_tokens = write_examples(parts, options.corpus_tokens, data)
        figures["corpus"] = {"tokens": num_tokens, **build_in_child(data, file, sets.model)}
        print(f"corpus: {figures['corpus']}", flush=True)
        start = time.perf_counter()
        corpus = Corpus.load(file, fingerprint=None)
        figures["corpus"]["load_ms"] = round(1e3 * (time.perf_counter() - start), 1)
        some = [r for turn in zip(*held, strict=False) for r in turn]
        figures["drafters"] = costs_by_drafter(corpus, some[: 3 * NUM_SESSIONS], ids.eos)
        del corpus
    prompt = [token for part in held for e in part for token in e.prompt_ids][:TRIE_TOKENS]
    figures["trie"] = {"prompt_tokens": len(prompt), "build_ms": trie_build_ms(prompt)}
    print(f"trie: {figures['trie']}")
    emit("replay costs", figures, results.json)
    return 0
