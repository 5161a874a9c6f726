"""`python -m loadtest.quality slices`: what a vocabulary slice keeps, misses and costs in quality.

DIR holds a folder per task with train.jsonl (profiled) and test.jsonl (measured). For each model,
task and row: |T| + [mean dynamic], % of V, token-level recall of the gold answers and documents
with a miss. The rows are tolerances (tau) of VocabTailor's Algorithm 1 and its baseline, static
pruning (VP), which cuts the tokenizer too; with --ablations also the filters one by one, dynamic
only and static only. |T| leaves out the ids that are always inside (EOS, specials, byte tokens), as
the paper counts; recall has them.

With --texts N the model answers N test prompts, each behind --shots examples of the training part,
so that a base model knows what is asked, and the row also has: the share of greedy texts that are
those of the full head, and exact match, word F1, ROUGE-L, JSON fields and (with sacrebleu) chrF of
both against the gold answers. The engine runs in this process. A greedy text over some ids is the
text over every subset of them that holds its tokens, as the argmax of a set is that of each subset
it lies in: such texts are taken over and not computed again. "Static only" asks for the full head
with `allowed_token_ids`: a server always adds the prompt's ids to a slice.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from cyclopts import Parameter
from tokenizers import Tokenizer

from loadtest.answers import Answer, answer_all
from loadtest.options import ResultOptions, emit, listed
from loadtest.prompts import Example as Document
from loadtest.prompts import data_sets, read_examples
from loadtest.pruning import close_under_merges, prune_tokenizer, static_pruning_ids
from server import token_bytes
from server.commands.options import ModelOptions
from server.commands.own_engine import own_engine
from server.commands.progress import Bar
from server.commands.quality import METRICS
from server.datasets import tokenize_in_place
from server.engine.engine import Engine
from server.token_bytes import TokenBytes
from server.types import Request, SamplingParams, VocabularyParams
from vocab_store.documents import Example
from vocab_store.profile import (
    VocabProfile,
    document_frequencies,
    measure_coverage,
    model_facts,
    tolerance_filter,
)
from vocab_store.slice import RequiredIds, VocabSlice
from vocab_store.unicode_blocks import blocks_of_languages

Int32 = npt.NDArray[np.int32]
TOLERANCES = (0.0, 0.01, 0.02, 0.1)
LANGUAGES = {"mt_en_zh": ("en", "zh")}
"""By task, where not English alone. mt_en_it needs none: Italian has English's blocks."""
ROWS = (*(f"tau {tau}" for tau in TOLERANCES), "VP")
ABLATIONS = (
    "unfiltered",
    "+ input-aware",
    "+ language",
    "dynamic only",
    "static only, tau 0.01",
    "static only, not input-aware, tau 0.01",
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class SliceOptions:
    """The model and the tasks."""

    data: Annotated[Path, Parameter(help="folder of task data sets")]
    model: str = "smollm2-135m-instruct"
    adapter: Path | None = None
    task: Annotated[str, Parameter(help="folders of --data, with commas (all)")] = ""
    ablations: bool = False
    train: Annotated[int, Parameter(help="most training examples")] = 4000
    texts: Annotated[int, Parameter(help="prompts that are answered; 0 runs no model")] = 0
    shots: Annotated[int, Parameter(help="examples before each prompt")] = 2
    tokens: Annotated[int, Parameter(help="most tokens of an answer")] = 40
    at_once: int = 16
    threads: int | None = None


_RESULTS = ResultOptions()


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What profiles of a model are made and checked with."""

    tokenizer: Tokenizer
    tokens: TokenBytes
    required: RequiredIds


def open_files(model: str) -> ModelFiles:
    """Of a model of the user's cache, or a folder. Raises ValueError for one that is not there."""
    from server.model.catalog import cached_folder

    folder = cached_folder(model)
    if folder is None:
        raise ValueError(f"{model} is not in the cache: tailor models fetch --form float32 {model}")
    vocab_size, _, eos_ids = model_facts(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokens = token_bytes.build(tokenizer, vocab_size)
    return ModelFiles(tokenizer, tokens, RequiredIds.from_tokens(tokens, eos_ids))


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
    train: list[Example], languages: tuple[str, ...], files: ModelFiles
) -> dict[str, Row]:
    """All rows of one task by name."""
    required, num = files.required, files.required.vocab_size
    every = document_frequencies(train, num, input_aware=False)
    df = document_frequencies(train, num)
    blocks = blocks_of_languages(languages)

    def row(ids: Any, *, dynamic: bool = True) -> Row:
        made = VocabSlice.make(np.union1d(ids, required.ids), required)
        return Row(made, len(ids), dynamic)

    def in_blocks(ids: Any) -> Any:
        has = (blocks.has_token(files.tokens.bytes_of(int(i))) for i in ids)
        return np.asarray([i for i, keep in zip(ids, has, strict=True) if keep], np.int64)

    aware = np.flatnonzero(df)
    language = in_blocks(aware)
    rows = {
        f"tau {tau}": row(tolerance_filter(language, df, tau, len(train))) for tau in TOLERANCES
    }
    spec = files.tokenizer.to_str()
    pruned = VocabSlice.make(
        close_under_merges(spec, static_pruning_ids(train, required).ids), required
    )
    cut = Tokenizer.from_str(prune_tokenizer(spec, pruned)[0])
    rows["VP"] = Row(pruned, pruned.num_ids, dynamic=False, tokenizer=cut)
    rows["unfiltered"] = row(np.flatnonzero(every))
    rows["+ input-aware"] = row(aware)
    rows["+ language"] = row(language)
    rows["dynamic only"] = row(np.empty(0, np.int64))
    static = tolerance_filter(language, df, 0.01, len(train))
    rows["static only, tau 0.01"] = row(static, dynamic=False)
    unaware = tolerance_filter(in_blocks(np.flatnonzero(every)), every, 0.01, len(train))
    rows["static only, not input-aware, tau 0.01"] = row(unaware, dynamic=False)
    return rows


@dataclass(frozen=True, slots=True)
class TaskData:
    """A task's documents in ids, all behind the same shots. prompts: texts of the test part."""

    train: list[Example]
    test: list[Example]
    prompts: list[str]
    golds: list[str]


def in_ids(pairs: Iterable[tuple[str, str]], tokenizer: Tokenizer) -> list[Example]:
    """(prompt, output) in ids: prompts as they are served, outputs as they stand behind them."""
    return [
        Example(
            np.asarray(tokenizer.encode(prompt).ids, np.int32),
            np.asarray(tokenize_in_place(tokenizer, prompt, out, 0)[1][:-1], np.int32),
        )
        for prompt, out in pairs
    ]


def load_task(files: ModelFiles, task: str, options: SliceOptions) -> TaskData:
    """Read, tokenize, and put the shots in front: the first short examples of the training part.
    All test documents, or those that are answered. Raises OSError, KeyError or ValueError."""

    def joint(document: Document) -> str:
        blank = document.prompt[-1:].isspace() or document.completion[:1].isspace()
        return document.prompt + ("" if blank else " ") + document.completion

    train = list(islice(read_examples(options.data, task, "train"), options.train))
    tests = [
        e for e in islice(read_examples(options.data, task), options.texts or None) if e.completion
    ]
    short = [e for e in train if len(joint(e)) < 3000 and "\n" not in e.completion]
    num_shots = options.shots if options.texts else 0
    head = "".join(joint(e) + "\n\n" for e in short[:num_shots])
    head_ids = np.asarray(files.tokenizer.encode(head).ids if head else [], np.int32)
    # Training prompts are joined to the shots in ids, which is enough for counting.
    documents = [
        Example(np.concatenate((head_ids, e.input_ids)), e.output_ids)
        for e in in_ids(((e.prompt, e.completion) for e in train), files.tokenizer)
    ]
    prompts = [head + e.prompt for e in tests]
    pairs = zip(prompts, (e.completion for e in tests), strict=True)
    golds = [e.completion.split("\n")[0].strip() for e in tests]
    return TaskData(documents, in_ids(pairs, files.tokenizer), prompts, golds)


class Texts:
    """Greedy answers of an engine over any set of ids; what is known already is not asked again.

    One writer. num_asked, num_known: answers computed, and taken over. folder: profiles are written
    there, one for each row that is asked. told: (row, answers that are done, all of them).
    """

    def __init__(
        self,
        engine: Engine,
        files: ModelFiles,
        folder: Path,
        options: SliceOptions,
        told: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        self.num_asked = 0
        self.num_known = 0
        self._engine = engine
        self._files = files
        self._folder = folder
        self._options = options
        self._told = told
        self._num_rows = 0
        self._known: dict[tuple[int, ...], list[tuple[Int32 | None, Answer]]] = {}

    def of(self, prompts: Sequence[Sequence[int]], row: Row | None, what: str) -> list[str]:
        """The text of each prompt over a row's ids; None is the full vocabulary."""
        allowed = [self._allowed(prompt, row) for prompt in prompts]
        answers = [
            self._taken_over(p, a) for p, a in zip(map(tuple, prompts), allowed, strict=True)
        ]
        wanted = [i for i, known in enumerate(answers) if known is None]
        self._num_rows += 1
        profile = self._folder / f"{self._num_rows}.vocab"
        if row is not None:
            none = np.empty(0, np.int32)
            manifest = {"fingerprint": self._files.tokens.fingerprint.hex()}
            VocabProfile(row.slice, none, none.astype(np.float32), manifest).save(profile)
        names = {i: f"{self._num_rows}/{i}" for i in wanted}
        requests = [self._request(names[i], prompts[i], row, profile) for i in wanted]
        found = answer_all(
            self._engine, requests, self._options.at_once,
            lambda num: self._told(what, num, len(requests)),
        )  # fmt: skip
        for i in wanted:
            answers[i] = found[names[i]]
            self._known.setdefault(tuple(prompts[i]), []).append((allowed[i], found[names[i]]))
        self.num_asked += len(wanted)
        self.num_known += len(prompts) - len(wanted)
        return [self._text(answer) for answer in answers if answer is not None]

    def _allowed(self, prompt: Sequence[int], row: Row | None) -> Int32 | None:
        if row is None:
            return None
        if not row.dynamic:
            return row.slice.ids
        return row.slice.for_request([t for t in prompt if t < row.slice.vocab_size]).ids

    def _taken_over(self, prompt: tuple[int, ...], allowed: Int32 | None) -> Answer | None:
        for wider, answer in self._known.get(prompt, ()):
            if allowed is None:
                if wider is None:
                    return answer
                continue
            holds = np.isin(np.asarray(answer.ids, np.int32), allowed).all()
            if holds and (wider is None or np.isin(allowed, wider, assume_unique=True).all()):
                return answer
        return None

    def _request(self, name: str, prompt: Sequence[int], row: Row | None, profile: Path) -> Request:
        vocabulary, allowed = VocabularyParams(), None
        if row is not None and (row.dynamic or (row.slice.positions(prompt) >= 0).all()):
            vocabulary = VocabularyParams("slice", str(profile))
        elif row is not None:
            allowed = tuple(row.slice.ids.tolist())
        sampling = SamplingParams(
            temperature=0.0, max_tokens=self._options.tokens, stop=(b"\n",),
            allowed_token_ids=allowed,
        )  # fmt: skip
        model = self._engine.info.name
        return Request(name, "slices", model, tuple(prompt), sampling, vocabulary=vocabulary)

    def _text(self, answer: Answer) -> str:
        """What a client sees: up to the line's end, without EOS."""
        table = self._files.tokens
        special = {int(i) for i in table.special_ids}
        raw = b"".join(table.bytes_of(i) for i in answer.ids if i not in special)
        return raw.decode("utf-8", "replace").split("\n")[0].strip()


def judge(texts: Sequence[str], golds: Sequence[str]) -> dict[str, float]:
    """Every metric's mean over the texts; chrF (of the whole, in 0..1) where sacrebleu is there."""
    found = {
        name: float(np.mean([metric(g, t) for g, t in zip(golds, texts, strict=True)]))
        for name, metric in METRICS.items()
    }
    try:
        from sacrebleu import corpus_chrf
    except ImportError:
        return found
    return found | {"chrf": float(corpus_chrf(list(texts), [list(golds)]).score / 100.0)}


def measure_task(
    files: ModelFiles, data: TaskData, task: str, names: Sequence[str], texts: Texts | None
) -> dict[str, dict[str, Any]]:
    """All rows of a task, printed as each is done. texts: None where no model runs."""
    rows = make_rows(data.train, LANGUAGES.get(task, ("en",)), files)
    prompts = [e.input_ids.tolist() for e in data.test]
    full = [] if texts is None else texts.of(prompts, None, f"{task}, full")
    cells: dict[str, dict[str, Any]] = {}
    for name in names:
        row, asked = rows[name], prompts
        cell = cells[name] = row.figures(data.test) | {"num_prompts": len(prompts)}
        if row.tokenizer is not None:
            encoded = row.tokenizer.encode_batch_fast(data.prompts)
            asked = [row.slice.ids[e.ids].tolist() for e in encoded]
            cell["prompts_changed"] = sum(a != b for a, b in zip(asked, prompts, strict=True))
        if texts is not None:
            own = texts.of(asked, row, f"{task}, {name}")
            cell["same_texts"] = sum(a == b for a, b in zip(own, full, strict=True))
            cell["scores"] = {"slice": judge(own, data.golds), "full": judge(full, data.golds)}
        print(markdown(task, name, cell), flush=True)
    return cells


HEAD = (
    "| task | row | T + [dynamic] | % of V | gold recall | documents with a miss | "
    "same text as full | slice (full) |\n|---|---|---|---|---|---|---|---|"
)


def markdown(task: str, name: str, cell: dict[str, Any]) -> str:
    """One line of the table."""
    changed = ""
    if "prompts_changed" in cell:
        changed = f"; {cell['prompts_changed'] / max(1, cell['num_prompts']):.0%} prompts other"
    scores = cell.get("scores", {"slice": {}, "full": {}})
    both = ", ".join(
        f"{metric} {value:.3f} ({scores['full'][metric]:.3f})"
        for metric, value in scores["slice"].items()
    )
    same = f"{cell['same_texts']}/{cell['num_prompts']}" if "same_texts" in cell else "-"
    return (
        f"| {task} | {name} | {cell['t']} + [{cell['dynamic']:.0f}] | {cell['share']:.2%} | "
        f"{cell['recall']:.2%} | {cell['documents_missed']:.1%}{changed} | {same} | {both or '-'} |"
    )


def slices(*, options: SliceOptions, results: ResultOptions = _RESULTS) -> int:
    """What a vocabulary slice keeps, misses and costs in quality; see loadtest.slice_quality.

    Example: python -m loadtest.quality slices --model gemma-3-270m --data data --texts 60
    """
    if min(options.train, options.tokens, options.at_once) < 1 or options.texts < 0:
        raise ValueError("--train, --tokens and --at-once want at least 1, --texts 0")
    tasks = listed(options.task) or data_sets(options.data)
    files = open_files(options.model)
    loaded = {task: load_task(files, task, options) for task in tasks}
    names = (*ROWS, *ABLATIONS) if options.ablations else ROWS
    print(f"{options.model}: V {files.required.vocab_size}, always inside "
          f"{files.required.ids.size}", file=sys.stderr)  # fmt: skip
    print(HEAD, flush=True)
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        texts: Texts | None = None
        if options.texts:
            adapter = None if options.adapter is None else str(options.adapter)
            model = ModelOptions(
                model=options.model, adapter=adapter, weights="float32", threads=options.threads
            )
            bar = stack.enter_context(Bar())
            _, engine = stack.enter_context(own_engine(model, bar, ()))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slices-")))
            texts = Texts(engine, files, folder, options, bar)
        for task, data in loaded.items():
            found[task] = measure_task(files, data, task, names, texts)
        counts = {} if texts is None else {"asked": texts.num_asked, "taken_over": texts.num_known}
    emit(
        "quality slices",
        {"model": options.model, "adapted": options.adapter is not None, "shots": options.shots,
         "max_tokens": options.tokens, "answers": counts, "tasks": found},
        results.json,
    )  # fmt: skip
    return 0
