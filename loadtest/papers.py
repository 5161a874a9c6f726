"""The papers' experiments on the data sets that are here: the paper's figures beside ours.

    python -m loadtest.papers tasc --data DIR
    python -m loadtest.papers trie --data DIR
    python -m loadtest.papers vocabtailor --data DIR --model gemma-3-270m

All but times are counts, which do not depend on the machine: gold answers of test.jsonl are
replayed, the first token given, with corpora of train answers; tokens a step are those after the
first over the decode steps. A set that is not in DIR is named and left out. What cannot be done
here is in docs/benchmarks/papers.md. The last line is JSON.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

from drafters import make_drafter
from drafters.base import Drafter
from drafters.corpus import build_corpus
from drafters.published.grammys import BigramTable
from drafters.published.trie import NGramTrie
from drafters.replay import Recording, replay
from loadtest.options import emit, head_of, listed, program, row_of
from loadtest.prompts import task_names
from loadtest.recordings import SetOptions, open_ids
from server.commands.data import FieldOptions, read_task_data
from server.commands.enrich import MiningOptions, Report, analyze_task, mine_tokens
from server.commands.options import Bar, as_options

LAMBDAS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
N_MAX = (2, 3, 4, 5, 6, 8)
BUDGETS = (100, 250, 500, 1000)  # tokens of a task's own
ALPHAS = (0.005, 0.02, 0.1, 1.0)
AS_PRINTED = MiningOptions(budget=1000, least=0, copies=True)
N = (8, 10, 13, 16)
L_P = (2, 3, 4, 5)
NUM_DRAFT = (8, 16, 32, 64, 128, 256)
NODES = 32
DEEPEST = 6  # position whose acceptance is told
SPEC_SETS = ("medquad", "eurlex57k", "massive_en", "hagrid")
FT_SETS = ("eurlex57k", "massive_en", "snips", "advising_sql")
TRIE_SETS = ("hagrid", "quotesum", "triviaqa_rag", "squad")
SLICE_SETS = ("squad", "gsm8k", "mt_en_it", "humaneval_infill", "massive_en")
# The papers' own figures, of other models, machines and examples.
TRIE_STEPS = {"hagrid": "2.34 to 3.07", "triviaqa_rag": "1.86 to 2.88"}
SHORTER = {"eurlex57k": "0.423 to 0.592, 2.65"}
SLICES = {"squad": "0 + [105]", "humaneval_infill": "SAFIM 3,521 + [58]",
          "gsm8k": "MAWPS 5,135 + [14]", "mt_en_it": "24,185 + [14]"}  # fmt: skip

app, main = program("papers", __doc__)


@as_options
class PaperOptions:
    """N-Grammys' table, and where the JSON line goes too."""

    bigrams: Annotated[
        Path | None, Parameter(help="`tailor corpus bigrams` of the model, for N-Grammys")
    ] = None
    json: Annotated[Path | None, Parameter(help="append the JSON line to this file too")] = None


_SETS, _PAPER = SetOptions(examples=50), PaperOptions()


Table = dict[str, Any]
"""One experiment: its title, its columns, its lines: first of all a set's name."""


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


class Sets:
    """The sets of a program that are here, in ids; each part is read once."""

    def __init__(self, options: SetOptions, wanted: Sequence[str]) -> None:
        if options.data is None or not options.data.is_dir():
            raise ValueError("name the folder of task data sets with --data")
        self.model, self.folder, self._options = options.model, options.data, options
        self.ids = open_ids(options.model)
        asked, here = listed(options.sets) or wanted, task_names(options.data)
        self.names = [name for name in asked if name in here]
        for name in sorted(set(asked) - set(here)):
            print(f"{name} is not in {options.data}: left out", file=sys.stderr)
        self._read = functools.cache(partial(options.read, self.ids))

    def tests(self, name: str) -> list[Recording]:
        """The first --examples of the test part."""
        return self._read(name, "test", self._options.examples)

    def train(self, name: str) -> list[tuple[Sequence[int], Sequence[int]]]:
        """(prompt, output) of the first --corpus-examples of the train part."""
        part = self._read(name, "train", self._options.corpus_examples)
        return [(one.prompt_ids, one.output_ids) for one in part]

    def table(
        self, title: str, columns: Iterable[Any], line_of: Callable[[str], Iterable[Any]]
    ) -> Table:
        """A line of each set. line_of: what stands behind a set's name."""
        lines = [[name, *line_of(name)] for name in self.names]
        return {"title": title, "columns": ["set", *columns], "lines": lines}


def per_step(drafter: Drafter, tests: Sequence[Recording], budget: int = NODES) -> float:
    """Tokens a step of these answers through a drafter."""
    return replay(drafter, tests, budget=budget).decode_tokens_per_step


def finish(paper: str, sets: Sets, tables: Iterable[Table], path: Path | None) -> int:
    """Print every table once it is there, as a document has it, and the line of JSON."""
    cells = []
    for table in tables:
        print(f"\n### {table['title']}\n\n{head_of(table['columns'])}")
        for line in table["lines"]:
            print(row_of(map(_shown, line)), flush=True)
        cells.append(table)
    emit(f"papers {paper}", {"model": sets.model, "tables": cells}, path)
    return 0


# --- TASC -----------------------------------------------------------------------------------------


@app.command
def tasc(*, sets: SetOptions = _SETS, options: PaperOptions = _PAPER) -> int:
    """TASC (arXiv 2602.24174): table 1, lambda, n_max, acceptance, N-Grammys, tables 6 and 9.

    Example: python -m loadtest.papers tasc --data data
    """
    spec, ft = Sets(sets, SPEC_SETS), Sets(sets, FT_SETS)
    tables = itertools.chain(fine_tuned(ft), speculative(spec, options))
    return finish("tasc", spec, tables, options.json)


def speculative(sets: Sets, options: PaperOptions) -> Iterator[Table]:
    """TASC-spec, which is `mix`, and N-Grammys beside it."""
    corpora = {
        name: build_corpus(sets.train(name), fingerprint="replay", n_max=max(N_MAX))
        for name in sets.names
    }

    def mix(name: str, **given: Any) -> Drafter:
        return make_drafter("mix", corpus=corpora[name], **given)

    def steps(name: str, key: str, values: Iterable[Any]) -> Iterator[float]:
        return (per_step(mix(name, **{key: v}), sets.tests(name)) for v in values)

    def accepted(name: str) -> Iterator[float]:
        found = replay(mix(name), sets.tests(name), budget=NODES)
        pairs = zip(found.accepted_by_depth, found.offered_by_depth, strict=True)
        return (hits / max(1, num) for hits, num in itertools.islice(pairs, DEEPEST))

    title = "lambda (paper: best in .5 to .75), tokens a step"
    yield sets.table(title, LAMBDAS, lambda name: steps(name, "mixing", LAMBDAS))
    title = "n_max (not printed), tokens a step"
    yield sets.table(title, N_MAX, lambda name: steps(name, "n_max", N_MAX))
    title = "Acceptance by position (paper: the first 0.39 MedQuAD)"
    yield sets.table(title, range(1, DEEPEST + 1), accepted)
    grammys: dict[str, dict[str, Any]] = {"own text": {}}
    if options.bigrams is not None:
        table = BigramTable.load(options.bigrams, fingerprint=None)
        grammys |= {"bigram": {"table": table, "strategy": "bigram"}, "mixed": {"table": table}}
    yield sets.table(
        "N-Grammys, tokens a step (paper: MedQuAD 1.01x bigram, 1.32x mixed; EUR-LEX 1.04x, 1.98x)",
        [*grammys, "TASC-spec"],
        lambda name: [
            *(per_step(make_drafter("grammys", **g), sets.tests(name)) for g in grammys.values()),
            per_step(mix(name), sets.tests(name)),
        ],
    )


def fine_tuned(sets: Sets) -> Iterator[Table]:
    """TASC-ft as far as it needs no training: entropies, lengths, forward passes."""
    reports: dict[str, Report] = {}
    alphas: dict[str, list[float]] = {}
    with Bar() as bar:
        for name in sets.names:
            file = sets.folder / name / "train.jsonl"
            data = read_task_data(sets.model, [file], FieldOptions(), max_held_out=100)
            reports[name] = analyze_task(data, BUDGETS, 0.06, bar, AS_PRINTED)
            alphas[name] = []
            for alpha in ALPHAS:
                own = mine_tokens(data, replace(AS_PRINTED, alpha=alpha), bar)
                lengths = [len(own.segment(out)) for _, out in data.held_out]
                alphas[name].append(float(np.mean(lengths)))

    def words(name: str) -> Iterator[Any]:
        of = reports[name].words
        yield from (h / math.log(2) for h in (of.outputs.h1, of.inputs.h1, of.delta_h))
        yield from (of.outputs.k80, of.inputs.k80, of.ratio)

    def lengths_of(name: str) -> Iterator[Any]:
        report = reports[name]
        ids, entropies, last = report.ids_per_answer, report.entropies, max(report.entropies)
        yield SHORTER.get(name, "-")
        yield f"{entropies[0].normalised_h1:.3f} to {entropies[last].normalised_h1:.3f}"
        yield from (last, ids[0], ids[last], ids[0] / ids[last], report.recommended)
        yield "-" if report.tau is None else f"{report.tau:.2f}"

    def passes(name: str) -> list[float]:
        base, own = (reports[name].passes[ids] for ids in ("base", "enriched"))
        return [base[0], base[16], own[0], own[16]]

    title = "Table 1: word bigrams of outputs and of inputs, bits"
    yield sets.table(title, ("H out", "H in", "dH", "K80 out", "K80 in", "ratio"), words)
    title = "Table 9: normalised H_1, and ids an answer, in base ids and with tokens of its own"
    columns = ("paper", "H_1 / ln V", "tokens", "ids", "ids then", "shorter", "enough", "tau")
    yield sets.table(title, columns, lengths_of)
    title = "Table 6 as forward passes (paper, EUR-LEX: 2.1x by own tokens, 2.17x by drafts)"
    yield sets.table(title, ("neither", "drafts, 16 nodes", "own tokens", "both"), passes)
    title = "alpha of prefix collisions (paper: .02): ids of a held-out answer at 1,000 tokens"
    yield sets.table(title, ALPHAS, lambda name: alphas[name])


# --- N-Gram-Trie ----------------------------------------------------------------------------------


@app.command
def trie(*, sets: SetOptions = _SETS, options: PaperOptions = _PAPER) -> int:
    """N-Gram-Trie (EMNLP 2025): n and L_p, num_draft, time, histogram, noisy context.

    Example: python -m loadtest.papers trie --data data
    """
    own = Sets(sets, TRIE_SETS)
    return finish("trie", own, tries(own), options.json)


def tries(sets: Sets) -> Iterator[Table]:
    """All of it."""

    def windows(name: str) -> Iterator[float]:
        pairs = itertools.product(N, L_P)
        return (
            per_step(make_drafter("trie", n=n, prefix_length=l_p), sets.tests(name))
            for n, l_p in pairs
        )

    def nodes(name: str) -> Iterator[float]:
        return (
            per_step(make_drafter("trie", num_draft=num), sets.tests(name), num)
            for num in NUM_DRAFT
        )

    def times(name: str) -> Iterator[Any]:
        tests, began = sets.tests(name), time.perf_counter()
        for test in tests:
            NGramTrie(test.prompt_ids, 13, 3)
        build_ms = 1e3 * (time.perf_counter() - began) / len(tests)
        found = replay(make_drafter("trie"), tests, budget=NODES)
        told = found.summary()
        yield from (TRIE_STEPS.get(name, "-"), found.decode_tokens_per_step, build_ms)
        yield from (told["propose_us"], told["extend_us_per_token"])

    def histogram(name: str) -> Iterator[float]:
        found = replay(make_drafter("trie"), sets.tests(name), budget=NODES)
        drafted = max([1, *found.offered_by_depth[:1]])
        at_least = [drafted, *found.accepted_by_depth, *[0] * 8][:9]
        return ((a - b) / drafted for a, b in itertools.pairwise([*at_least, 0]))

    def noisy(name: str) -> Iterator[float]:
        """The prompt of another request before the own one, as bad retrieval gives."""
        clean = sets.tests(name)
        mixed = [
            replace(test, prompt_ids=[*other.prompt_ids, *test.prompt_ids])
            for test, other in zip(clean, [*clean[1:], clean[0]], strict=True)
        ]
        pairs = itertools.product(("trie", "auto"), (clean, mixed))
        return (per_step(make_drafter(drafter), tests) for drafter, tests in pairs)

    grid = [f"{n}/{l_p}" for n, l_p in itertools.product(N, L_P)]
    yield sets.table("n/L_p (paper: best 13/3 on RAG), tokens a step", grid, windows)
    title = "num_draft (paper: flat from 8 to 32, 256 a little worse), tokens a step"
    yield sets.table(title, NUM_DRAFT, nodes)
    title = "13/3, 32 nodes: tokens a step; times (paper: a trie is built in 8 to 14 ms)"
    columns = ("paper", "ours", "build ms", "propose us", "extend us a token")
    yield sets.table(title, columns, times)
    title = "Steps with drafts by how many of these were accepted"
    yield sets.table(title, [*range(8), "8 or more"], histogram)
    title = "Context (paper, noisy and clean: RAG 1.22x, 1.87x, HAGRID 2.10x, 1.84x), tokens a step"
    yield sets.table(title, ("trie, clean", "trie, noisy", "auto, clean", "auto, noisy"), noisy)


# --- VocabTailor ----------------------------------------------------------------------------------


@app.command
def vocabtailor(*, sets: SetOptions = _SETS, options: PaperOptions = _PAPER) -> int:
    """VocabTailor (arXiv 2508.15229): tau, its filters, static pruning; memory by account.

    Texts over slices and their quality: python -m loadtest.quality slices --texts 60.

    Example: python -m loadtest.papers vocabtailor --data data --model gemma-3-270m
    """
    from loadtest.quality import LANGUAGES, SliceOptions, load_task, make_rows
    from server.model.catalog import model_folder
    from vocab_store.profile import model_facts

    own = Sets(sets, SLICE_SETS)
    row_mb = 4e-6 * model_facts(model_folder(sets.model))[0]
    asked = SliceOptions(data=own.folder, model=sets.model, train=sets.corpus_examples)
    lines: list[list[Any]] = []
    for name in own.names:
        data = load_task(own.ids, name, asked)
        for row, made in make_rows(data.train, LANGUAGES.get(name, ("en",)), own.ids).items():
            cell = made.figures(data.test)
            size, dynamic = cell["t"], cell["dynamic"]
            shares = [f"{cell[key]:.2%}" for key in ("share", "recall", "documents_missed")]
            printed = SLICES.get(name, "-") if row == "tau 0.01" else ""
            ours = f"{size:,} + [{dynamic:.0f}]"
            lines.append([name, row, printed, ours, *shares, float((size + dynamic) * row_mb)])
    whole = own.ids.required.vocab_size
    title = f"T + [dynamic]; the head's {whole:,} rows are {whole * row_mb:,.0f} MB in float32"
    columns = ("set", "row", "paper", "ours", "of V", "recall", "with a miss", "head MB")
    table = {"title": title, "columns": columns, "lines": lines}
    return finish("vocabtailor", own, [table], options.json)


if __name__ == "__main__":
    sys.exit(main())
