"""What a cheaper model costs in quality: forms of the weights, slices, adapters with own tokens.

    python -m loadtest.quality forms --data DIR/test.jsonl --forms int8,int4 [--adapter DIR]
    python -m loadtest.quality slices --model gemma-3-270m --data DIR --task squad,snips
    python -m loadtest.quality adapters --base DIR --enriched DIR --train A.jsonl --test B.jsonl
    python -m loadtest.quality damage --adapter DIR --data DIR/test.jsonl

`forms` reads each line of --data as prompt, a blank, completion and the end token, in one
teacher-forced step. Reported of each form, float32 first: perplexity of the completions; `exact`,
the share of completions that greedy decoding would give whole (each of their tokens and the end is
the argmax after the gold tokens before it, which is the same thing); `tokens_agree`, the share of
positions whose argmax is float32's; `texts_agree`, of texts where all are; mean |difference| of the
gold tokens' log-probabilities. A form may name the type of K and V: int8:float16. float32 of a
built-in model is its GGUF dequantised.

Answers come from an Engine in this process, many at once: nothing is timed, and what runs beside a
request never changes its answer. Each command ends in one JSON line.

`slices`: what a vocabulary slice keeps, misses and costs in quality. DIR holds a folder per task
with train.jsonl (profiled) and test.jsonl (measured). For each model, task and row: |T| + [mean
dynamic], % of V, token-level recall of the gold answers and documents with a miss. The rows are
tolerances (tau) of VocabTailor's Algorithm 1 and its baseline, static pruning (VP), which cuts the
tokenizer too (it writes the same texts with other, more ids: prompts no longer look as the model
learned them; arXiv 2508.15229, table 2); with --ablations also the filters one by one, dynamic only
and static only. |T| leaves out the ids that are always inside (EOS, specials, byte tokens), as the
paper counts; recall has them.

With --texts N the model answers N test prompts, each behind --shots examples of the training part,
so that a base model knows what is asked, and the row also has: the share of greedy texts that are
those of the full head, and exact match, word F1, ROUGE-L, JSON fields and (with sacrebleu) BLEU
and chrF of both against the gold answers. "Static only" asks for the full head with
`allowed_token_ids`: a server always adds the prompt's ids to a slice.

`adapters`: two adapters of one recipe, in base ids and in own tokens. Both answer the same test
prompts greedily, merged into the model, one after the other in this process. Reported of each: the
share of exact answers and word F1, with the paired difference and its 95 % bootstrap interval (of
answers "intent: I, slot fills: {slot: value, ...}" also the share of right intents and the mean F1
of an answer's slots; exact is then the joint accuracy); ids of a prompt and of an answer, its base
ids; forward passes an answer without drafts and with 2, 4 and 16 nodes of `auto` with a corpus of
--train (answers replayed, the first tree in the prefill pass); adoption: enriched ids that the
model wrote over those in the fewest ids for the same text. (Speed of such adapters in servers:
`python -m loadtest.load --mix`, by characters a second.)

`damage` (TASC, section 8): texts of another kind, scored by a base that holds no adapter, by one
that holds it for a request of the base (exit 1 when a bit differs), and by the adapter.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from cyclopts import Parameter
from tokenizers import Tokenizer

from loadtest.options import ModelChoice, ResultOptions, emit, listed, program, run
from loadtest.prompts import Example as Document
from loadtest.prompts import data_sets, read_examples
from loadtest.steps import FORMS, forms_of, runner_of
from server import token_bytes
from server.commands import record
from server.commands.data import FieldOptions, TaskData, read_task_data
from server.commands.enrich import count_passes, spelled
from server.commands.options import DEFAULT_MODEL, Bar, ModelOptions, WeightsForm
from server.commands.own_engine import OwnTokenizer, own_engine
from server.commands.quality import METRICS, estimate, exact, f1
from server.commands.record import Prompt, ask_engine
from server.datasets import ExampleReader, open_table, tokenize_in_place
from server.engine.batch import AdaptingRunner
from server.engine.engine import Engine
from server.model.catalog import model_folder
from server.model.scoring import Scores, Text, compare, score
from server.token_bytes import TokenBytes
from server.types import Request, SamplingParams, SpeculationParams, VocabularyParams
from vocab_store.enrichment import Enrichment
from vocab_store.errors import VocabStoreError
from vocab_store.profile import (
    Example,
    VocabProfile,
    document_frequencies,
    measure_coverage,
    model_facts,
    tolerance_filter,
)
from vocab_store.slice import RequiredIds, VocabSlice
from vocab_store.unicode_blocks import blocks_of_languages


@dataclass(slots=True)
class Answer:
    """One choice, whole. `ids` hold an EOS or stop id, if one ended it. by_source: draft tokens
    that were offered, and accepted."""

    ids: tuple[int, ...] = ()
    num_steps: int = 0
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)


def answered(found: record.Answer | record.Failure) -> record.Answer:
    """An answer of `ask_engine`. Raises RuntimeError for a failure."""
    if isinstance(found, record.Failure):
        raise RuntimeError(found.message)
    return found


def answer_all(
    engine: Engine,
    requests: Sequence[Request],
    at_once: int = 16,
    told: Callable[[int], None] = lambda _: None,
) -> dict[str, Answer]:
    """The answers by request id. told: called with the number of those that are done.

    Raises RuntimeError when a request fails.
    """
    answers: dict[str, Answer] = {request.request_id: Answer() for request in requests}
    waiting = list(reversed(requests))
    num_open = num_done = 0
    while num_done < len(requests):
        while waiting and num_open < at_once:
            engine.submit(waiting.pop())
            num_open += 1
        for delta in engine.step():
            if delta.finish_reason == "error":
                raise RuntimeError(f"{delta.request_id}: {delta.error}")
            answer = answers[delta.request_id]
            answer.ids += tuple(delta.token_ids)
            answer.num_steps += delta.counts.num_steps
            for source, drafted, accepted in delta.counts.by_source:
                before = answer.by_source.get(source, (0, 0))
                answer.by_source[source] = (before[0] + drafted, before[1] + accepted)
            if delta.finish_reason is not None:
                num_open, num_done = num_open - 1, num_done + 1
                told(num_done)
    return answers


def static_pruning_ids(examples: Sequence[Example], required: RequiredIds) -> VocabSlice:
    """The paper's "VP": every id of the corpus, inputs and outputs, and the required ones."""
    seen = np.zeros(required.vocab_size, bool)
    seen[required.ids] = True
    for example in examples:
        seen[example.input_ids] = True
        seen[example.output_ids] = True
    return VocabSlice.make(np.flatnonzero(seen), required)


def close_under_merges(tokenizer_json: str, ids: npt.NDArray[np.integer[Any]]) -> list[int]:
    """ids and every part that a BPE merges on the way to them; ascending.

    Without the parts a kept token is never written: "the" needs "th" or "he" in between. All
    merges that make a token are followed, as which of them runs depends on what stands around
    it: so a text whose ids are all in `ids` keeps its ids exactly.
    """
    vocab, merges = _bpe(json.loads(tokenizer_json)["model"])
    parts: dict[int, set[int]] = {}
    for left, right in merges:
        parts.setdefault(vocab[left + right], set()).update((vocab[left], vocab[right]))
    closed: set[int] = set()
    waiting = [int(i) for i in ids]
    while waiting:
        token_id = waiting.pop()
        if token_id not in closed:
            closed.add(token_id)
            waiting.extend(parts.get(token_id, ()))
    return sorted(closed)


def _bpe(model: dict[str, Any]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    if model.get("type") != "BPE":
        raise VocabStoreError(f"cannot prune a {model.get('type')} tokenizer, only BPE")
    pairs = (m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"])
    return model["vocab"], [(left, right) for left, right in pairs]


def prune_tokenizer(tokenizer_json: str, keep: VocabSlice) -> tuple[str, npt.NDArray[np.int32]]:
    """A BPE tokenizer cut to `keep`: (its JSON, old id of each new id int32 [n]).

    New ids are the ranks of the kept old ones, so rows of embedding and head are cut to
    `keep.ids`. A merge stays when both its parts and its result do: close `keep` under merges
    first (close_under_merges), or kept tokens are never written. Special
    tokens must be in `keep` (RequiredIds has them); those that are not vanish.

    Raises VocabStoreError for a tokenizer that is not BPE.
    """
    spec: dict[str, Any] = json.loads(tokenizer_json)
    model = spec["model"]
    old_vocab, old_merges = _bpe(model)
    new_id = {int(old): new for new, old in enumerate(keep.ids)}
    vocab = {token: new_id[i] for token, i in old_vocab.items() if i in new_id}
    model["vocab"] = vocab
    model["merges"] = [
        [left, right]
        for left, right in old_merges
        if left in vocab and right in vocab and left + right in vocab
    ]
    spec["added_tokens"] = [
        {**token, "id": new_id[token["id"]]}
        for token in spec.get("added_tokens", ())
        if token["id"] in new_id
    ]
    post = spec.get("post_processor")
    for step in post.get("processors", [post]) if post else ():
        for token in step.get("special_tokens", {}).values():
            token["ids"] = [new_id[i] for i in token["ids"]]
    return json.dumps(spec), keep.ids


app = program("quality", __doc__)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class FormOptions(ModelChoice):
    """The forms and the texts."""

    data: Annotated[Path, Parameter(help="JSON lines: prompt, completion")]
    forms: Annotated[str, Parameter(help="with commas; float32 is added")] = ",".join(FORMS)
    num: Annotated[int, Parameter(help="texts")] = 160
    longest: Annotated[int, Parameter(help="longest text, in tokens")] = 512


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


@app.command
def damage(*, options: FormOptions, results: ResultOptions = _RESULTS) -> int:
    """What an adapter does to texts that are not its task's; see loadtest.quality.

    Example: python -m loadtest.quality damage --adapter sql-adapter --data data/medquad/test.jsonl
    """
    if options.adapter is None:
        raise ValueError("name the adapter's folder with --adapter")
    scores: list[Scores] = []
    for places in ((None,), (-1, 0)):  # the base alone; beside the adapter: without it, with it
        with runner_of(
            options.model, "float32", threads=options.threads, max_rows=options.longest
        ) as (runner, folder):
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            eos = runner.info.eos_token_ids[0]
            texts = read_texts(options.data, tokenizer, eos, options.num, options.longest)
            if places != (None,):
                if not isinstance(runner, AdaptingRunner):
                    raise ValueError(f"{options.model}: its runner holds no adapters")
                runner.hold_adapter(0, runner.pack_adapter(str(options.adapter)))
            scores += [score(runner, texts, adapter=place) for place in places]
    base, off, on = scores
    found = {name: compare(each, base) for name, each in (("off", off), ("on", on))}
    same = bool(np.array_equal(base.logprobs, off.logprobs))
    print(f"adapter off {found['off']}, {'the same bits' if same else 'OTHER BITS'}")
    print(f"adapter on {found['on']}", flush=True)
    emit(
        "quality damage",
        {"model": Path(options.model).name, "data": options.data.parent.name, "texts": len(texts),
         "positions": len(base.ranks), "same_bits": same, **found},
        results.json,
    )  # fmt: skip
    return 0 if same else 1


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
class SliceOptions(ModelChoice):
    """The tasks, and what is answered."""

    data: Annotated[Path, Parameter(help="folder of task data sets")]
    task: Annotated[str, Parameter(help="folders of --data, with commas (all)")] = ""
    ablations: bool = False
    train: Annotated[int, Parameter(help="most training examples")] = 4000
    texts: Annotated[int, Parameter(help="prompts that are answered; 0 runs no model")] = 0
    shots: Annotated[int, Parameter(help="examples before each prompt")] = 2
    tokens: Annotated[int, Parameter(help="most tokens of an answer")] = 40
    at_once: int = 16


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
class SlicedTask:
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


def load_task(files: ModelFiles, task: str, options: SliceOptions) -> SlicedTask:
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
    return SlicedTask(documents, in_ids(pairs, files.tokenizer), prompts, golds)


@dataclass(frozen=True, slots=True)
class Texts:
    """Greedy answers of an engine over any set of ids. folder: profiles are written there, one for
    each row that is asked. told: (row, answers that are done, all of them)."""

    engine: Engine
    files: ModelFiles
    folder: Path
    options: SliceOptions
    told: Callable[[str, int, int], None] = lambda *_: None

    def of(self, prompts: Sequence[Sequence[int]], row: Row | None, what: str) -> list[str]:
        """The text of each prompt over a row's ids; None is the full vocabulary."""
        profile = self.folder / f"{what}.vocab"
        if row is not None:
            none = np.empty(0, np.int32)
            manifest = {"fingerprint": self.files.tokens.fingerprint.hex()}
            VocabProfile(row.slice, none, none.astype(np.float32), manifest).save(profile)
        requests = [self._request(f"{what}/{i}", p, row, profile) for i, p in enumerate(prompts)]
        found = answer_all(
            self.engine, requests, self.options.at_once,
            lambda num: self.told(what, num, len(requests)),
        )  # fmt: skip
        return [self._text(found[request.request_id]) for request in requests]

    def _request(self, name: str, prompt: Sequence[int], row: Row | None, profile: Path) -> Request:
        vocabulary, allowed = VocabularyParams(), None
        if row is not None and (row.dynamic or (row.slice.positions(prompt) >= 0).all()):
            vocabulary = VocabularyParams("slice", str(profile))
        elif row is not None:
            allowed = tuple(row.slice.ids.tolist())
        sampling = SamplingParams(
            temperature=0.0, max_tokens=self.options.tokens, stop=(b"\n",),
            allowed_token_ids=allowed,
        )  # fmt: skip
        model = self.engine.info.name
        return Request(name, "slices", model, tuple(prompt), sampling, vocabulary=vocabulary)

    def _text(self, answer: Answer) -> str:
        """What a client sees: up to the line's end, without EOS."""
        raw = self.files.tokens.join(answer.ids, skip_special=True)
        return raw.decode("utf-8", "replace").split("\n")[0].strip()


def judge(texts: Sequence[str], golds: Sequence[str]) -> dict[str, float]:
    """Every metric's mean over the texts; where sacrebleu is there BLEU and chrF of the whole, in
    0..1."""
    found = {
        name: float(np.mean([metric(g, t) for g, t in zip(golds, texts, strict=True)]))
        for name, metric in METRICS.items()
    }
    try:
        from sacrebleu import corpus_bleu, corpus_chrf
    except ImportError:
        return found
    scored = {"bleu": corpus_bleu, "chrf": corpus_chrf}
    return found | {
        name: float(of(list(texts), [list(golds)]).score / 100.0) for name, of in scored.items()
    }


def measure_task(
    files: ModelFiles, data: SlicedTask, task: str, names: Sequence[str], texts: Texts | None
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


@app.command
def slices(*, options: SliceOptions, results: ResultOptions = _RESULTS) -> int:
    """What a vocabulary slice keeps, misses and costs in quality; see loadtest.quality.

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
    emit(
        "quality slices",
        {"model": options.model, "adapted": options.adapter is not None, "shots": options.shots,
         "max_tokens": options.tokens, "tasks": found},
        results.json,
    )  # fmt: skip
    return 0


Pairs = Sequence[tuple[list[int], list[int]]]
Metric = Callable[[str, str], float]

_FILLED = re.compile(r"\s*intent: (\w*)(?:, slot fills: \{(.*)\})?", re.DOTALL)
_SLOT = re.compile(r"(\w+): (.*?)(?=, \w+: |$)", re.DOTALL)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOptions:
    """The adapters and the data."""

    train: Annotated[Path, Parameter(help="for the corpus and the tokens")]
    test: Path
    base: Annotated[Path, Parameter(help="the adapter in base ids")]
    enriched: Annotated[Path, Parameter(help="the one with tokens of its own")]
    model: str = DEFAULT_MODEL
    prompts: Annotated[int | None, Parameter(help="only the first N test prompts")] = None
    tokens: Annotated[int, Parameter(help="most ids of an answer")] = 64
    weights: Annotated[WeightsForm, Parameter(help="the form that answers")] = "auto"
    threads: int | None = None


@dataclass(slots=True)
class Side:
    """What one adapter read and wrote. outputs: ids of each answer, its EOS id included. texts:
    without. prompt_ids: ids that it read, of a prompt."""

    outputs: list[list[int]]
    texts: list[str]
    prompt_ids: float


def ask(options: AdapterOptions, adapter: Path, tests: Pairs) -> Side:
    """Greedy answers of a model with an adapter merged into it, without drafts."""
    chosen = ModelOptions(
        model=options.model, adapter=str(adapter), weights=options.weights, threads=options.threads
    )
    with Bar() as bar, own_engine(chosen, bar, ()) as (served, engine):
        prompts = [
            Prompt(i, None, tuple(served.prompt_ids(ids))) for i, (ids, _) in enumerate(tests)
        ]
        found = ask_engine(
            engine, OwnTokenizer(served), prompts,
            SamplingParams(temperature=0.0, max_tokens=options.tokens),
            speculation=SpeculationParams("off"),
        )  # fmt: skip
        answers = sorted(map(answered, found), key=lambda one: one.prompt.line)
        outputs = [list(one.output_ids) for one in answers]
        join = served.table.join
        texts = [join(ids, skip_special=True).decode(errors="replace") for ids in outputs]
        read = sum(len(prompt.ids or ()) for prompt in prompts) / len(prompts)
        return Side(outputs, texts, read)


def filled(answer: str) -> tuple[str, Counter[tuple[str, str]]]:
    """(intent, slots with their values) of an answer; ("", none) where it has another form."""
    found = _FILLED.match(answer)
    if found is None:
        return "", Counter()
    return found[1], Counter((name, value.strip()) for name, value in _SLOT.findall(found[2] or ""))


def intent(gold: str, output: str) -> float:
    """Whether it is the right one."""
    return float(filled(gold)[0] == filled(output)[0])


def slots(gold: str, output: str) -> float:
    """F1 of the slots with their values; 1 where neither has any."""
    theirs, ours = filled(gold)[1], filled(output)[1]
    num = theirs.total() + ours.total()
    return 2 * (theirs & ours).total() / num if num else 1.0


def metrics_of(golds: Sequence[str]) -> tuple[Metric, ...]:
    """Those that the data's answers can be judged by."""
    return (exact, f1, intent, slots) if all(filled(gold)[0] for gold in golds) else (exact, f1)


def scores(metric: Metric, side: Side, golds: Sequence[str]) -> list[float]:
    """A metric of each answer."""
    return [metric(gold, text) for gold, text in zip(golds, side.texts, strict=True)]


def figures(side: Side, enrichment: Enrichment | None, golds: Sequence[str]) -> dict[str, Any]:
    """Quality and ids of one side; see the top of this file."""
    num = len(side.outputs)
    base = [ids if enrichment is None else enrichment.expand(ids) for ids in side.outputs]
    found: dict[str, Any] = {
        **{m.__name__: asdict(estimate(scores(m, side, golds))) for m in metrics_of(golds)},
        "prompt_ids": side.prompt_ids,
        "ids": sum(map(len, side.outputs)) / num,
        "base_ids": sum(map(len, base)) / num,
    }
    if enrichment is not None:
        own = frozenset(enrichment.ids)
        fewest = [enrichment.segment(ids) for ids in base]
        possible = sum(i in own for ids in fewest for i in ids)
        found |= {
            "fewest_ids": sum(map(len, fewest)) / num,
            "adoption": sum(i in own for ids in side.outputs for i in ids) / max(1, possible),
        }
    return found


def measure_adapters(
    options: AdapterOptions, data: TaskData, tests: Pairs, golds: Sequence[str]
) -> dict[str, Any]:
    """Of both adapters, and enriched minus base over the same prompts."""
    enrichment = Enrichment.load(options.enriched / "enrichment.json", tokenizer=data.fingerprint)
    train = [*data.train, *data.held_out]
    sides: dict[str, Side] = {}
    found: dict[str, Any] = {}
    for name, adapter, own in (
        ("base", options.base, None), ("enriched", options.enriched, enrichment),
    ):  # fmt: skip
        side = sides[name] = ask(options, adapter, tests)
        prompts = [prompt for prompt, _ in spelled(tests, own)]
        written = list(zip(prompts, side.outputs, strict=True))
        passes = count_passes(spelled(train, own), written, data.fingerprint, lambda *_: None)
        found[name] = figures(side, own, golds) | {"passes": passes}
        print(name, found[name], flush=True)
    pairs = {
        metric.__name__: zip(
            scores(metric, sides["enriched"], golds), scores(metric, sides["base"], golds),
            strict=True,
        )
        for metric in metrics_of(golds)
    }  # fmt: skip
    found["difference"] = {
        name: asdict(estimate([a - b for a, b in both])) for name, both in pairs.items()
    }
    print("enriched - base", found["difference"], flush=True)
    return found


@app.command
def adapters(*, options: AdapterOptions, results: ResultOptions = _RESULTS) -> int:
    """Two adapters of one recipe: base ids and tokens of its own; see loadtest.quality.

    Example: python -m loadtest.quality adapters --base b --enriched e --train a --test t
    """
    folder = model_folder(options.model)
    data = read_task_data(folder, [options.train], FieldOptions())
    tokenizer, table, eos = open_table(folder)
    tests = list(ExampleReader(tokenizer, eos).read([options.test]))
    tests = tests[: options.prompts]
    golds = [table.join(ids, skip_special=True).decode(errors="replace") for _, ids in tests]
    found = measure_adapters(options, data, tests, golds)
    emit("quality adapters", {"model": options.model, "prompts": len(tests), **found}, results.json)
    return 0


main = partial(run, app)

if __name__ == "__main__":
    sys.exit(main())
