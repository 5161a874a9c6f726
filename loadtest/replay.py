"""Drafters without a model's steps: recorded answers through each of them, and what they cost.

    python -m loadtest.replay table --data DIR --budgets 1,4,8,16
    python -m loadtest.replay curves --data DIR --sets commits,docstrings,manifests
    python -m loadtest.replay record --model FOLDER --data DIR --sets gsm8k -o OWN
    python -m loadtest.replay table --recorded OWN
    python -m loadtest.replay live --model FOLDER --recorded OWN --budgets 8,16
    python -m loadtest.replay ablations --recorded OWN
    python -m loadtest.replay repeats --data DIR --sets medquad
    python -m loadtest.replay costs --data DIR
    python -m loadtest.replay fit --data DIR

`table` and `curves` feed the gold completions of test.jsonl to each drafter, the first token given,
one answer after the other, or with --recorded a model's own answers (`record`, or `tailor corpus
generate`) with what it held likely at each token. The corpus is made of train answers only. Figures
are tokens a step: output tokens after the first over the decode steps. Columns of `table` learn
nothing between requests; those of `curves` do, as a server does by default (the last few answers at
once, a layer of all every three requests), and have three figures: of the first 30, 100 and all
requests. Other projects' drafters (loadtest.peer_drafters) are columns where their packages can be
imported: Arctic's suffix decoding at its defaults, as trees, with the corpus, and in `curves` with
its memory of every answer; Token Recycling and LogitSpec, where the answers have
what the model held likely. In every cell `auto` is compared with the best other column, with the
95 % bootstrap interval over answers in pairs.

`record` writes OUT/SET/train.jsonl and test.jsonl: a model's own greedy answers with, at every
position, the ids that it held likeliest. `live` answers the same prompts with each drafter and a
fixed number of nodes a step, unpruned: there the rows of rejected nodes are seen too, which no
replay knows, and the answers must equal the recorded ones; else it exits 1.

`ablations`: `auto` with a corpus, learning, and one of its sources off in turn; the summary has
what all together are over each column. --cold: without corpus and learning. Where nothing is copied
by text, templates do not know numbers. The prior's is in `live`: recordings have no states.

`repeats`: long answers that repeat what came before, made of a set's train answers: a text whose
mistakes are corrected, a text in which one word is replaced, and calls of a tool in a conversation,
each with one argument changed. No corpus; `auto, learning` learns from the answers before.

`costs`: what drafting costs the host, in time and memory. A corpus of --corpus-tokens output tokens
is made of the data sets' train outputs: themselves first, then crossings of two of one set at a
token that both hold, so that it repeats itself as a task's does. It is built by `tailor corpus
build` in a process of its own (time and peak memory are that process's) and mapped. Then
held-back train examples are replayed through each drafter: microseconds of a proposal and of a
token (medians), nanoseconds of a proposed node (all proposals' time over all their nodes). Run it
on a machine that does nothing else.

`fit`: the trust that `auto` and `suffix` start with. It writes drafters/auto/default_trust.json and
reads train splits only. Of each data set the last part is held out and replayed on a corpus of the
rest: with that corpus, without it, and with a prediction made from the output by random edits;
every data set counts for the same number of tokens. Expectation maximisation for the weights, then
the factors that correct what they claim.

With --recorded it fits what the model's own logits are worth, and leaves the rest as it is:
DIR/SET/train.jsonl are a model's own answers with what it held likely (`record`).

The last line is JSON.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import numpy.typing as npt
from cyclopts import Parameter

from drafters import Need, make_drafter
from drafters.atomic_file import EVERYBODY, replacing
from drafters.auto.cells import (
    COPIED,
    LOGITS,
    NUM_CELLS,
    NUM_FACTORS,
    NUM_LEVELS,
    NUM_SOURCES,
    SOURCES,
)
from drafters.auto.copying import Pieces
from drafters.auto.drafter import AutoDrafter
from drafters.auto.held_out import build_calibrated
from drafters.auto.likely import NUM_LIKELY
from drafters.auto.prior import Prior
from drafters.auto.retrieval import Seen
from drafters.auto.trust import DEFAULT_TRUST, Trust
from drafters.base import Drafter
from drafters.catalog import OURS, that_use
from drafters.corpus import Corpus, build_corpus
from drafters.learned import LearnedOutputs
from drafters.published.grammys import BigramTable
from drafters.published.trie import NGramTrie
from drafters.replay import Recording, note_rows, read_recordings, replay
from loadtest.options import (
    ResultOptions,
    emit,
    head_of,
    listed,
    numbers,
    program,
    row_of,
)
from loadtest.peer_drafters import ArcticSuffix, LogitSpec, TokenRecycling
from loadtest.prompts import data_sets, edited, read_examples
from loadtest.recordings import Ids, SetOptions, open_ids
from server.commands.options import Bar, ModelOptions, as_options
from server.commands.own_engine import own_engine
from server.commands.record import Answer, Prompt, ask_engine, in_order
from server.datasets import ExampleReader
from server.engine.batch import Runner
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.types import SamplingParams, SpeculationParams, StepCounts

NUM_RESAMPLES = 2000
BUILD_EVERY = 3
MAX_LEARNED = 200_000  # tokens, as a task's by default
LONG_WORDS = 120  # of a text that is repeated, at least
Counts = list[tuple[int, int]]
"""(tokens after the first, decode steps) of each request."""
Column = Callable[[Sequence[Recording], int], Counts]
"""(answers, nodes a step) -> what a drafter made of them."""

app, main = program("replay", __doc__)


@as_options
class TableOptions:
    """What is replayed, and what is printed."""

    budgets: Annotated[str, Parameter(help="nodes a step, with commas")] = "1,4,8,16"
    columns: Annotated[str, Parameter(help="those that are replayed, with ; between (all)")] = ""
    bigrams: Annotated[
        Path | None, Parameter(help="`tailor corpus bigrams` of the model: two more columns")
    ] = None
    json: Annotated[Path | None, Parameter(help="append the JSON line to this file too")] = None


_SETS, _TABLE = SetOptions(), TableOptions()


def counted(make: Callable[[], Drafter], **options: Any) -> Column:
    """A column of a drafter that is made anew for each cell, and keeps what it learns itself."""

    def column(tests: Sequence[Recording], budget: int) -> Counts:
        bounds = {"budget": budget} | options
        result = replay(make(), tests, **bounds)
        return list(zip(result.num_tokens, result.num_steps, strict=True))

    return column


def learning(corpus: Corpus | None, ids: Ids, *, templates: bool = True, **options: Any) -> Column:
    """The same for `auto` with a layer of the answers before, and the last ones. options: in place
    of its own."""
    of_ids = ids.own | options

    def column(tests: Sequence[Recording], budget: int) -> Counts:
        outputs, seen, trust = LearnedOutputs(MAX_LEARNED), Seen(), Trust()
        if corpus is not None:
            trust.start_from(corpus.evidence, corpus.outcomes)
        layer: Corpus | None = None
        counts: Counts = []
        for number, test in enumerate(tests, 1):
            made = cast(
                "AutoDrafter",
                make_drafter(
                    "auto", corpus=corpus, learned=layer, trust=trust, seen=seen, **of_ids
                ),
            )
            made.templates = templates
            result = replay(made, [test], budget=budget)
            counts += zip(result.num_tokens, result.num_steps, strict=True)
            outputs.add(np.asarray(test.prompt_ids), np.asarray(test.output_ids))
            seen.add(test.output_ids)
            if number % BUILD_EVERY == 0:
                layer = build_corpus(outputs.examples(), base=corpus, fingerprint="replay")
        return counts

    return column


def peers(corpus: Corpus | None, *, remember: bool, likely: bool) -> dict[str, Column]:
    """Columns of other projects' drafters, of those that are installed. remember: Arctic keeps
    every answer, as it does by itself. likely: the answers have what the model held likely."""
    made: dict[str, Column] = {}
    if likely:
        made |= {"token recycling": counted(TokenRecycling), "logitspec": counted(LogitSpec)}
    try:
        ArcticSuffix()  # raises where the package is missing
    except ImportError:
        print("arctic-inference is not installed: its columns are left out", file=sys.stderr)
    else:
        # Anew for each budget too: evicting what it saw of a request at its close leaves it 1.6 to
        # 2.4 % better when it sees the same requests again.
        def arctic(**options: Any) -> Callable[[], Drafter]:
            return lambda: ArcticSuffix(remembers=remember, **options)

        own = None if remember else corpus
        made["arctic"] = counted(arctic(corpus=own))
        made["arctic tree 4"] = counted(arctic(corpus=own, use_tree_spec=True, max_spec_factor=4.0))
    return made


def table_columns(
    corpus: Corpus | None, ids: Ids, bigrams: BigramTable | None, *, likely: bool
) -> dict[str, Column]:
    """The columns that learn nothing between requests; `auto` is the last but one."""
    of_task = {} if corpus is None else {"corpus": corpus}
    made = {
        "prompt": counted(lambda: make_drafter("prompt", **ids.ends)),
        "trie": counted(lambda: make_drafter("trie")),
        "mix": counted(lambda: make_drafter("mix", **of_task)),
        "grammys": counted(lambda: make_drafter("grammys")),
        "suffix": counted(lambda: make_drafter("suffix", **ids.ends)),
    }
    if bigrams is not None:
        made["bigram"] = counted(lambda: make_drafter("grammys", table=bigrams, strategy="bigram"))
        made["grammys, table"] = counted(lambda: make_drafter("grammys", table=bigrams))
    made |= peers(corpus, remember=False, likely=likely)

    def auto(num_likely: int = NUM_LIKELY) -> Drafter:
        return make_drafter("auto", **ids.own, **of_task, num_likely=num_likely)

    if likely:
        made["auto, no logits"] = counted(lambda: auto(0))
    return made | {"auto": counted(auto), "auto, tree in prefill": counted(auto, in_prefill=True)}


def curve_columns(
    corpus: Corpus | None, wrong: Corpus | None, ids: Ids, *, likely: bool
) -> dict[str, Column]:
    """The columns of requests in turn. wrong: the corpus of another set."""

    def auto(of: Corpus | None) -> Column:
        given = {} if of is None else {"corpus": of}
        return counted(lambda: make_drafter("auto", **ids.own, **given))

    made = {"auto, cold": auto(None), "auto, learning": learning(None, ids)}
    if likely:
        made["auto, learning, no logits"] = learning(None, ids, num_likely=0)
    if corpus is not None:
        made["auto, corpus"] = auto(corpus)
        made["auto, corpus and learning"] = learning(corpus, ids)
    if wrong is not None:
        made["auto, wrong corpus"] = auto(wrong)
    return made | peers(corpus, remember=True, likely=likely)


def ablation_columns(
    corpus: Corpus | None, ids: Ids, *, cold: bool, likely: bool
) -> dict[str, Column]:
    """`auto` with all that it has, and with one part of it off in turn. cold: it knows nothing but
    its request."""
    alone = partial(make_drafter, "auto", **ids.own)
    if cold:
        made = {"auto": counted(alone), "auto, no copied": counted(partial(alone, pieces=None))}
        if likely:
            made["auto, no logits"] = counted(partial(alone, num_likely=0))
        return made
    made = {
        "auto": learning(corpus, ids),
        "auto, no template": learning(corpus, ids, templates=False),
        "auto, no copied": learning(corpus, ids, pieces=None),
    }
    if likely:
        made["auto, no logits"] = learning(corpus, ids, num_likely=0)
    return made | {
        "auto, no corpus": learning(None, ids),
        "auto, no learning": counted(partial(alone, corpus=corpus)),
    }


def tokens_per_step(counts: Counts) -> float:
    """Of all these requests."""
    tokens, steps = np.sum(counts, axis=0)
    return float(tokens / max(1, steps))


def curve(counts: Counts) -> list[float]:
    """Tokens a step of the first 30, 100 and all requests."""
    return [round(tokens_per_step(counts[:num]), 3) for num in (30, 100, len(counts))]


def ratio_interval(ours: Counts, other: Counts) -> tuple[float, float]:
    """95 % interval of tokens per step, ours over the other's, answers resampled in pairs."""
    rng = np.random.default_rng(0)
    pick = rng.integers(0, len(ours), (NUM_RESAMPLES, len(ours)))
    # Both made the same tokens, so the ratio is that of the steps.
    mine, theirs = (
        np.maximum(1, np.asarray([steps for _, steps in counts])[pick].sum(axis=1))
        for counts in (ours, other)
    )
    low, high = np.quantile(theirs / mine, [0.025, 0.975])
    return float(low), float(high)


def cell_of(counts: dict[str, Counts], first: str) -> dict[str, Any]:
    """All columns of one set and number of nodes, and the column `first` beside the best of those
    that are not `auto`."""
    cell: dict[str, Any] = {"tokens_per_step": {c: curve(own) for c, own in counts.items()}}
    others = {c: tokens_per_step(own) for c, own in counts.items() if not c.startswith("auto")}
    if others and first in counts:
        best = max(others, key=lambda c: others[c])
        low, high = ratio_interval(counts[first], counts[best])
        cell |= {
            "best_other": best,
            "ratio": round(tokens_per_step(counts[first]) / others[best], 3),
            "ratio_95": [round(low, 3), round(high, 3)],
        }
    return cell


def measure(
    sets: SetOptions, options: TableOptions, first: str, columns: Callable[..., dict[str, Column]]
) -> list[dict[str, Any]]:
    """Every cell, printed as it is done. columns: (corpus, wrong corpus, ids, likely) -> columns,
    of which the wrong corpus is the next set's."""
    ids, names = open_ids(sets.model), sets.names()
    budgets = numbers(options.budgets, "--budgets")

    def corpus_of(name: str) -> Corpus | None:
        train = sets.read(ids, name, "train", sets.corpus_examples)
        pairs = [(e.prompt_ids, e.output_ids) for e in train]
        return (
            build_calibrated(pairs, fingerprint="replay", p_min=5, pieces=ids.pieces)
            if pairs
            else None
        )

    cells = []
    for place, name in enumerate(names):
        tests = sets.read(ids, name, "test", sets.examples)
        following = names[(place + 1) % len(names)]
        wrong = corpus_of(following) if following != name else None
        made = columns(corpus_of(name), wrong, ids, likely=any(t.likely_ids for t in tests))
        wanted = [name.strip() for name in options.columns.split(";") if name.strip()] or list(made)
        for budget in budgets:
            cell: dict[str, Any] = {"data": name, "nodes": budget, "requests": len(tests)}
            counts = {c: made[c](tests, budget) for c in wanted if c in made}
            cells.append(cell | cell_of(counts, first))
            print(json.dumps(cells[-1]), file=sys.stderr, flush=True)
    return cells


def summary_of(cells: Sequence[dict[str, Any]], first: str) -> dict[str, Any]:
    """nodes -> the median and the lowest of the ratios to the best other column, and the least,
    median and largest of those to each column, of all requests."""
    found: dict[str, Any] = {}
    for budget in sorted({cell["nodes"] for cell in cells}):
        rows = [cell for cell in cells if cell["nodes"] == budget]
        ratios = [cell["ratio"] for cell in rows if "ratio" in cell]
        to: dict[str, list[float]] = {}
        for cell in rows:
            figures = cell["tokens_per_step"]
            for column in figures:
                if column != first and first in figures:
                    to.setdefault(column, []).append(figures[first][-1] / figures[column][-1])
        found[str(budget)] = {
            "median_ratio": round(float(np.median(ratios)), 3) if ratios else None,
            "lowest_ratio": min(ratios, default=None),
            "over": {
                column: [round(v, 3) for v in (min(s), float(np.median(s)), max(s))]
                for column, s in to.items()
            },
        }
    return found


def markdown(cells: Sequence[dict[str, Any]], which: slice) -> Iterator[str]:
    """A table for each number of nodes. which: of the figures of 30, 100 and all requests."""
    for budget in sorted({cell["nodes"] for cell in cells}):
        rows = [cell for cell in cells if cell["nodes"] == budget]
        names = list(dict.fromkeys(c for cell in rows for c in cell["tokens_per_step"]))
        yield f"\n### {budget} nodes a step\n"
        yield head_of(["data", *names, "over the best other"])
        for cell in rows:
            figures = [
                " ".join(f"{value:.2f}" for value in cell["tokens_per_step"].get(c, [])[which])
                for c in names
            ]
            best = "-"
            if "ratio" in cell:
                low, high = cell["ratio_95"]
                best = f"{cell['ratio']:.2f} ({low:.2f}-{high:.2f}) {cell['best_other']}"
            yield row_of([cell["data"], *figures, best])


def _finish(
    tool: str, cells: list[dict[str, Any]], first: str, which: slice, path: Path | None
) -> int:
    for line in markdown(cells, which):
        print(line)
    emit(f"replay {tool}", {"summary": summary_of(cells, first), "cells": cells}, path)
    return 0


@app.command
def table(*, sets: SetOptions = _SETS, options: TableOptions = _TABLE) -> int:
    """Tokens a step of every drafter, set and number of nodes; nothing is learned between answers.

    Example: python -m loadtest.replay table --data data --sets gsm8k,squad --budgets 16
    """
    path = options.bigrams
    bigrams = None if path is None else BigramTable.load(path, fingerprint=None)
    cells = measure(
        sets, options, "auto",
        lambda corpus, _, ids, likely: table_columns(corpus, ids, bigrams, likely=likely),
    )  # fmt: skip
    return _finish("table", cells, "auto", slice(2, 3), options.json)


@app.command
def curves(*, sets: SetOptions = _SETS, options: TableOptions = _TABLE) -> int:
    """Tokens a step of requests in turn, which are learned and remembered.

    Example: python -m loadtest.replay curves --data data --examples 300
    """
    cells = measure(sets, options, "auto, learning", curve_columns)
    return _finish("curves", cells, "auto, learning", slice(None), options.json)


@app.command
def ablations(
    *,
    sets: SetOptions = _SETS,
    options: TableOptions = _TABLE,
    cold: Annotated[bool, Parameter(help="no corpus, and nothing is learned")] = False,
) -> int:
    """Tokens a step of `auto` with each of its sources off in turn; see loadtest.replay.

    Example: python -m loadtest.replay ablations --recorded own --budgets 4,16
    """
    cells = measure(
        sets, options, "auto",
        lambda corpus, _, ids, likely: ablation_columns(corpus, ids, cold=cold, likely=likely),
    )  # fmt: skip
    return _finish("ablations", cells, "auto", slice(2, 3), options.json)


def long_texts(sets: SetOptions, name: str) -> Iterator[list[str]]:
    """Words of a set's train answers, LONG_WORDS at least, as many answers as that takes."""
    assert sets.data is not None
    words: list[str] = []
    for example in read_examples(sets.data, name, "train"):
        words += example.completion.split()
        if len(words) >= LONG_WORDS:
            yield words
            words = []


def corrected(words: Sequence[str], rng: random.Random) -> tuple[str, str]:
    """(prompt, answer): a text with mistakes in one word of ten, and without."""
    wrong = list(words)
    for i in rng.sample(range(len(words)), len(words) // 10):
        half = len(words[i]) // 2
        wrong[i] = rng.choice((words[i][half:] + words[i][:half], "", f"{words[i]} {words[i]}"))
    text, own = " ".join(word for word in wrong if word), " ".join(words)
    return f"Correct the mistakes in this text.\n\n{text}\n\nCorrected:", f" {own}"


def replaced(words: Sequence[str], rng: random.Random) -> tuple[str, str]:
    """(prompt, answer): a text, and itself with another word for its commonest long one."""
    old = max((word for word in words if len(word) > 3), key=words.count, default=words[0])
    new = rng.choice(words)[:4] + rng.choice(words)[:4]
    text, own = " ".join(words), " ".join(new if word == old else word for word in words)
    return f"Write {new} for {old} in this text.\n\n{text}\n\nText:", f" {own}"


def called(words: Sequence[str], rng: random.Random) -> tuple[str, str]:
    """(prompt, answer): four turns of a conversation, of which each calls a tool with one argument
    changed; the last call is the answer."""
    names = sorted({word.strip(".,:;()").lower() for word in words if word.isascii()})
    arguments = {name: " ".join(rng.choices(words, k=6)) for name in rng.sample(names, 6)}
    told = ""
    for turn in range(4):
        changed = rng.choice(sorted(arguments))
        arguments[changed] = value = " ".join(rng.choices(words, k=4))
        call = json.dumps({"name": "update_record", "arguments": arguments})
        told += f"User: let {changed} be {value}.\nAssistant:"
        if turn < 3:
            told += f' {call}\nTool: {{"status": "done", "id": {rng.randrange(10_000)}}}\n'
    return told, f" {call}"


@app.command
def repeats(*, sets: SetOptions = _SETS, options: TableOptions = _TABLE) -> int:
    """Tokens a step of long answers that repeat what came before; see loadtest.replay.

    Example: python -m loadtest.replay repeats --data data --sets medquad --budgets 4,16
    """
    ids, cells = open_ids(sets.model), []
    made = table_columns(None, ids, None, likely=False) | {"auto, learning": learning(None, ids)}
    wanted = listed(options.columns) or list(made)
    texts = itertools.chain.from_iterable(long_texts(sets, name) for name in sets.names())
    used = list(itertools.islice(texts, sets.examples))
    for kind in (corrected, replaced, called):
        rng = random.Random(0)
        reader = ExampleReader(ids.tokenizer, ids.eos)
        pairs = (kind(words, rng) for words in used)
        tests = [Recording(*reader.of({"prompt": p, "completion": out}, "")) for p, out in pairs]
        for budget in numbers(options.budgets, "--budgets"):
            cell: dict[str, Any] = {"data": kind.__name__, "nodes": budget, "requests": len(tests)}
            cells.append(cell | cell_of({c: made[c](tests, budget) for c in wanted}, "auto"))
    return _finish("repeats", cells, "auto", slice(2, 3), options.json)


_OWN_SETS = SetOptions(examples=30)
_MODEL = ModelOptions()


@as_options
class RecordOptions:
    """The prompts, and where the answers go."""

    data: Annotated[Path, Parameter(help="folder of task data sets")]
    output: Annotated[Path, Parameter(name=("--output", "-o"), help="the folder")]
    sets: Annotated[str, Parameter(help="data sets, with commas (all)")] = ""
    examples: Annotated[int, Parameter(help="prompts of each part of a set")] = 30
    max_tokens: int = 64
    max_prompt: Annotated[int, Parameter(help="longer prompts are left out")] = 400
    chat: Annotated[bool, Parameter(help="prompts as a user's message")] = False


@app.command
def record(*, options: RecordOptions, model: ModelOptions = _MODEL) -> int:
    """A model's own answers with what it held likely; see loadtest.replay.

    Example: python -m loadtest.replay record --data data --sets gsm8k --chat -o own
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    written: dict[str, int] = {}
    with Bar() as bar, own_engine(model, bar, ()) as (served, engine):
        for name in listed(options.sets) or data_sets(options.data):
            for split in ("train", "test"):
                prompts: list[Prompt] = []
                for number, example in enumerate(read_examples(options.data, name, split)):
                    text = example.prompt
                    if options.chat:
                        text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
                    if len(served.tokenizer.encode(text).ids) <= options.max_prompt:
                        prompts.append(Prompt(number, text))
                    if len(prompts) == options.examples:
                        break
                found = ask_engine(
                    engine, served.tokenizer, prompts, sampling,
                    speculation=SpeculationParams("off"), num_likely=lambda _: NUM_LIKELY,
                )  # fmt: skip
                answers = in_order(found)
                target = options.output / name / f"{split}.jsonl"
                target.parent.mkdir(parents=True, exist_ok=True)
                with replacing(target, EVERYBODY) as out:
                    for answer in answers:
                        out.write((json.dumps(_entry(answer)) + "\n").encode())
                written[f"{name}/{split}"] = sum(len(answer.output_ids) for answer in answers)
                print(f"{name}/{split}: {written[f'{name}/{split}']} tokens", flush=True)
    emit("replay record", {"model": served.name, "tokens": written}, None)
    return 0


def _entry(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_ids": list(answer.prompt.ids or ()),
        "output_ids": list(answer.output_ids),
        "likely_ids": [[token for token, _ in one.top] for one in answer.likely],
        "likely_chances": [[round(math.exp(p), 5) for _, p in one.top] for one in answer.likely],
    }


def columns(ids: Ids, prior: Prior | None = None) -> dict[str, Drafter]:
    """The drafters that are compared, without a corpus. What they learn stays from request to
    request."""
    with_prior = {}
    if prior is not None:
        with_prior["auto, prior"] = make_drafter("auto", **ids.own, seen=Seen(), model_prior=prior)
    return with_prior | {
        "auto, no logits": make_drafter("auto", **ids.own, num_likely=0),
        "auto": make_drafter("auto", **ids.own, seen=Seen()),
        "token recycling": TokenRecycling(),
        "logitspec": LogitSpec(),
    }


def unpruned(runner: Runner, drafters: Mapping[str, Drafter], nodes: int) -> Engine:
    """An engine whose trees are not pruned by what they cost."""
    settings = EngineSettings(max_num_seqs=16, max_draft_rows=max(1, 16 * nodes))
    return Engine(runner, drafters, settings)


@app.command
def live(
    *,
    sets: SetOptions = _OWN_SETS,
    budgets: Annotated[str, Parameter(help="nodes a step, with commas")] = "8,16",
    prior: Annotated[Path | None, Parameter(help="a file of `tailor models prior`")] = None,
    json: Annotated[Path | None, Parameter(help="append the JSON line to this file too")] = None,
) -> int:
    """Each drafter on the model itself, its recorded answers the reference; see loadtest.replay.

    Example: python -m loadtest.replay live --recorded own --budgets 8,16
    """
    sets = replace(sets, data=None)
    ids = open_ids(sets.model)
    head = None if prior is None else Prior.load(prior, fingerprint=None)
    cells = []
    with Bar() as bar, own_engine(ModelOptions(model=sets.model), bar, ()) as (_, model):
        for name in sets.names():
            tests = sets.read(ids, name, "test", sets.examples)
            num_tokens = sum(len(test.output_ids) - 1 for test in tests)
            longest = max(len(test.output_ids) for test in tests)
            for nodes in numbers(budgets, "--budgets"):
                cell: dict[str, Any] = {"data": name, "nodes": nodes, "tokens": num_tokens}
                engine = unpruned(model.runner, drafters := columns(ids, head), nodes)
                for column in drafters:
                    found = in_order(
                        ask_engine(
                            engine, ids.tokenizer,
                            [Prompt(i, None, tuple(one.prompt_ids)) for i, one in enumerate(tests)],
                            SamplingParams(temperature=0.0, max_tokens=longest),
                            speculation=SpeculationParams(column, nodes), num_open=8,
                        )
                    )  # fmt: skip
                    wanted = [tuple(test.output_ids) for test in tests]
                    same = wanted == [one.output_ids for one in found]
                    told = reduce(StepCounts.plus, (part for one in found for part in one.counts))
                    num_steps = told.num_steps - len(tests)  # after the prompts
                    cell[column] = round(num_tokens / num_steps, 3)
                    cell[f"{column}: sources"] = {name: both for name, *both in told.by_source}
                    cell["same text"] = cell.get("same text", True) and same
                cells.append(cell)
                print(cell, flush=True)
    emit("replay live", {"model": sets.model, "cells": cells}, json)
    return 0 if all(cell["same text"] for cell in cells) else 1


BUDGET = 16
TRIE_TOKENS = 2000
NUM_HELD = 20  # a set
NUM_REPLAYED = 24


@as_options
class CostOptions:
    """The corpus."""

    corpus_tokens: Annotated[int, Parameter(help="output tokens of the corpus")] = 5_000_000
    folder: Annotated[Path | None, Parameter(help="for the files (a temporary one)")] = None


_COSTS, _RESULTS = CostOptions(), ResultOptions()


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


def costs_by_drafter(
    corpus: Corpus, held: Sequence[Recording], ids: Ids
) -> dict[str, dict[str, float]]:
    """Times of every drafter of ours, with the corpus where it takes one; see the top of this file.
    `auto` has none, `auto, corpus` has it."""
    takes_corpus, takes_eos = that_use(Need.CORPUS), that_use(Need.EOS)
    made = {
        spec.name: make_drafter(
            spec.name,
            **({"corpus": corpus} if spec.name in takes_corpus and spec.name != "auto" else {}),
            **(ids.ends if spec.name in takes_eos else {}),
            **({"num_likely": 0, "pieces": ids.pieces} if spec.name == "auto" else {}),
        )
        for spec in OURS
    }
    made["auto, corpus"] = make_drafter("auto", corpus=corpus, num_likely=0, **ids.own)
    found: dict[str, dict[str, float]] = {}
    for name, drafter in made.items():
        replay(drafter, held[:2], budget=BUDGET)  # compiled code
        took = replay(drafter, held, budget=BUDGET)
        told, proposed_s = took.summary(), sum(took.propose_s)
        found[name] = {key: told[key] for key in ("propose_us", "extend_us_per_token")}
        found[name]["ns_a_node"] = round(1e9 * proposed_s / max(1, took.num_drafted), 1)
        print(f"{name}: {found[name]}", flush=True)
    return found


@app.command
def costs(
    *,
    sets: SetOptions = _SETS,
    options: CostOptions = _COSTS,
    results: ResultOptions = _RESULTS,
) -> int:
    """Time and memory of drafting: propose, extend, a node, a corpus; see loadtest.replay.

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
        figures["drafters"] = costs_by_drafter(corpus, some[:NUM_REPLAYED], ids)
        del corpus
    prompt = [token for part in held for e in part for token in e.prompt_ids][:TRIE_TOKENS]
    taken = []
    for _ in range(30):
        start = time.perf_counter()
        NGramTrie(np.asarray(prompt, np.int32), 13, 3)
        taken.append(1e3 * (time.perf_counter() - start))
    build_ms = round(float(np.median(taken)), 3)
    figures["trie"] = {"prompt_tokens": len(prompt), "build_ms": build_ms}
    print(f"trie: {figures['trie']}")
    emit("replay costs", figures, results.json)
    return 0


Floats = npt.NDArray[np.float64]

ROUNDS = 8
TOKENS_PER_SET = 2500.0
SMOOTHING = 6.0


def predicted(held: Sequence[Recording], example: Recording, rng: random.Random) -> list[int]:
    """A prediction of an output: itself with random edits, or now and then another's output."""
    if rng.random() < 0.15:
        return list(rng.choice(held).output_ids)
    return edited(example.output_ids[:-1], rng.choice((0.02, 0.05, 0.1, 0.25)), rng)


def fitted(
    start: Trust,
    sources: tuple[int, int],
    observe: Callable[[Callable[[], Trust], int], Iterator[tuple[Trust, float]]],
) -> tuple[Floats, Floats]:
    """(weights, factors) by expectation maximisation: those of the sources from the first to before
    the last number, from `start` on; the others stay. observe: (what makes a Trust to teach, round)
    -> each of them taught, and what its evidence counts."""
    weights, factors = start.weights.copy(), start.factors.copy()
    own_weights = slice(*(n * NUM_CELLS // NUM_SOURCES for n in sources))
    own_factors = slice(*(n * NUM_FACTORS // NUM_SOURCES for n in sources))
    for turn in range(ROUNDS):
        evidence = np.zeros((2, NUM_CELLS))
        outcomes = np.zeros((3, NUM_FACTORS))
        for trust, share in observe(lambda: Trust(weights, factors, memory=1e12), turn):
            evidence += share * trust.evidence
            outcomes += share * trust.outcomes
        moved = (evidence[1] + SMOOTHING * weights) / (evidence[0] + SMOOTHING)
        weights[own_weights] = moved[own_weights]
        factors[own_factors] = ((outcomes[1] + 2.0) / (outcomes[0] + 2.0))[own_factors]
        mean = np.average(weights[own_weights], weights=evidence[0, own_weights])
        print(f"round {turn + 1}: mean weight asked {mean:.4f}")
    return weights, factors


def fit_logits(folder: Path) -> tuple[Floats, Floats]:
    """(weights, factors) with those of the logits fitted anew: half of the runs share what the
    model held likely among a set's requests, half of them do not."""
    parts = [list(read_recordings(path)) for path in sorted(folder.glob("*/train.jsonl"))]
    if not parts:
        raise ValueError(f"{folder} has no SET/train.jsonl")

    def observe(new: Callable[[], Trust], _: int) -> Iterator[tuple[Trust, float]]:
        for recordings, seen in itertools.product(parts, (True, False)):
            trust = new()
            drafter = AutoDrafter(trust=trust, seen=Seen() if seen else None)
            for recording in recordings:  # token by token, as without drafts
                session = drafter.open(recording.prompt_ids)
                session.settle_once()
                for place, token in enumerate(recording.output_ids):
                    note_rows(session, recording, place, 1)
                    session.extend([token])
                session.close()
            yield trust, 1.0

    return fitted(Trust(), (LOGITS, COPIED), observe)


def _write(path: Path, weights: Floats, factors: Floats) -> None:
    """Write the package's default trust, a row a line: of weights, per mille, a level (source x
    match-length bucket); of factors, per cent, a source x match length x situation."""
    per_mille = np.clip(np.rint(1000 * weights), 1, 999).astype(int).reshape(NUM_LEVELS, -1)
    per_cent = np.clip(np.rint(100 * factors), 1, 800).astype(int).reshape(-1, 10)
    parts = []
    for name, rows in (("weights_per_mille", per_mille), ("factors_per_cent", per_cent)):
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows.tolist())
        parts.append(f'"{name}": [\n{lines}\n]')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    print(f"wrote {path}")


def fit_sources(
    parts: Sequence[tuple[Corpus, Sequence[Recording]]], pieces: Pieces, only: int
) -> tuple[Floats, Floats]:
    """(weights, factors), from held-out examples beside a corpus of the rest. only: the first
    source that is fitted, those before it stay as they are; 0: every source."""
    # A flat start: longer matches are trusted more.
    flat = np.repeat(
        np.tile([0.02, 0.3, 0.5, 0.62, 0.7, 0.76, 0.82, 0.87, 0.91, 0.94], NUM_LEVELS // 10),
        NUM_CELLS // NUM_LEVELS,
    )
    known = Trust()
    weights, factors = known.weights.copy(), known.factors.copy()
    weights[only * NUM_CELLS // NUM_SOURCES :] = flat[only * NUM_CELLS // NUM_SOURCES :]
    factors[only * NUM_FACTORS // NUM_SOURCES :] = 1.0

    def observe(new: Callable[[], Trust], turn: int) -> Iterator[tuple[Trust, float]]:
        for corpus, held in parts:
            num_tokens = sum(len(e.output_ids) for e in held)
            rng = random.Random(turn)
            for use, share, predicts in (
                (corpus, 1.0, False),
                (None, 0.5, False),
                (None, 0.5, True),
            ):
                trust = new()
                drafter = AutoDrafter(
                    corpus=use, trust=trust, eos_token_ids=corpus.end_ids(), seen=Seen(),
                    pieces=pieces,
                )  # fmt: skip
                for example in held:
                    session = drafter.open(
                        example.prompt_ids,
                        prediction_ids=predicted(held, example, rng) if predicts else (),
                    )
                    session.settle_once()
                    session.extend(example.output_ids)
                    session.close()
                yield trust, share * min(1.0, TOKENS_PER_SET / num_tokens)

    return fitted(Trust(weights, factors), (only, NUM_SOURCES), observe)


@app.command
def fit(
    *,
    sets: SetOptions = _SETS,
    output: Annotated[Path, Parameter(name=("--output", "-o"))] = DEFAULT_TRUST,
    held_out: Annotated[int, Parameter(help="train examples of a set to fit on")] = 100,
    only: Annotated[str, Parameter(help="source that is fitted, with those behind it")] = "corpus",
) -> int:
    """Fit the trust that drafters start with, from train splits; see loadtest.replay.

    Example: python -m loadtest.replay fit --data data -o trust.json
    """
    if sets.recorded is not None:
        _write(output, *fit_logits(sets.recorded))
        return 0
    ids, parts = open_ids(sets.model), []
    for name in sets.names():
        examples = sets.read(ids, name, "train", sets.corpus_examples + 4 * held_out)
        num_held = max(10, min(held_out, len(examples) // 4))
        held, rest = examples[-num_held:], examples[:-num_held][-sets.corpus_examples :]
        corpus = build_corpus(((e.prompt_ids, e.output_ids) for e in rest), fingerprint="")
        parts.append((corpus, held))
        print(f"{name}: {corpus.num_tokens} tokens of corpus, {num_held} examples held out")
    _write(output, *fit_sources(parts, ids.pieces, SOURCES.index(only)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
