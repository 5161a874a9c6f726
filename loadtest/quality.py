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

`adapters`: two adapters of one recipe, in own tokens and in base ids (a second seed without --base:
the first alone). Both answer the same test prompts greedily, merged into the model, one after the
other in this process. Reported of each: the share of exact answers and word F1, with the paired
difference and its 95 % bootstrap interval (of answers "intent: I, slot fills: {slot: value, ...}"
also the share of right intents and the mean F1 of an answer's slots; exact is then the joint
accuracy); ids of a prompt and of an answer, its base ids; forward passes an answer without drafts
and with 2, 4 and 16 nodes of `auto` with a corpus of --train (answers replayed, the first tree in
the prefill pass); adoption: enriched ids that the model wrote over those in the fewest ids for the
same text. (Speed of such adapters in servers: `python -m loadtest.load --mix`, by characters a
second.)

`damage` (TASC, section 8): texts of another kind, scored by a base that holds no adapter, by one
that holds it for a request of the base (exit 1 when a bit differs), and by the adapter.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import compress, islice
from operator import not_
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from cyclopts import Parameter
from tokenizers import Tokenizer

from loadtest.options import (
    ModelChoice,
    ResultOptions,
    emit,
    head_of,
    listed,
    program,
    row_of,
)
from loadtest.prompts import Example as Document
from loadtest.prompts import data_sets, read_examples
from loadtest.recordings import Ids, open_ids
from loadtest.steps import FORMS, forms_of, runner_of
from server.commands.data import FieldOptions, read_task_data
from server.commands.enrich import count_passes, spelled
from server.commands.options import DEFAULT_MODEL, Bar, ModelOptions, WeightsForm, as_options
from server.commands.own_engine import OwnTokenizer, own_engine
from server.commands.quality import METRICS, estimate, exact, f1
from server.commands.record import Answer, Prompt, answered, ask_engine, in_order
from server.datasets import ExampleReader
from server.engine.batch import Runner
from server.engine.engine import Engine
from server.model.scoring import Scores, Text, compare, score
from server.types import SamplingParams, SpeculationParams, VocabularyParams
from vocab_store.enrichment import Enrichment
from vocab_store.errors import VocabStoreError
from vocab_store.profile import (
    Example,
    VocabProfile,
    document_frequencies,
    measure_coverage,
    tolerance_filter,
)
from vocab_store.slice import RequiredIds, VocabSlice
from vocab_store.unicode_blocks import blocks_of_languages


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


app, main = program("quality", __doc__)


@as_options
class FormOptions(ModelChoice):
    """The forms and the texts."""

    data: Annotated[Path, Parameter(help="JSON lines: prompt, completion")]
    forms: Annotated[str, Parameter(help="with commas; float32 is added")] = ",".join(FORMS)
    num: Annotated[int, Parameter(help="texts")] = 160
    longest: Annotated[int, Parameter(help="longest text, in tokens")] = 512


_RESULTS = ResultOptions()


@contextmanager
def scorer(
    options: FormOptions, form: str, adapter: str | None = None
) -> Iterator[tuple[Runner, list[Text]]]:
    """(a runner of the form, the texts in its ids)."""
    with runner_of(
        options.model, form, adapter=adapter, threads=options.threads, max_rows=options.longest
    ) as (runner, folder):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        eos = runner.info.eos_token_ids[0]
        yield runner, read_texts(options.data, tokenizer, eos, options.num, options.longest)


def read_texts(data: Path, tokenizer: Tokenizer, eos: int, num: int, longest: int) -> list[Text]:
    """The first `num` texts of at most `longest` ids. Raises ValueError when there is none."""
    examples = ExampleReader(tokenizer, eos).read([data])
    texts = (Text((*prompt, *output), len(prompt)) for prompt, output in examples)
    found = list(islice((text for text in texts if 0 < text.start < len(text.ids) <= longest), num))
    if not found:
        raise ValueError(f"{data} holds no text of at most {longest} tokens")
    return found


@app.command
def forms(*, options: FormOptions, results: ResultOptions = _RESULTS) -> int:
    """Every form of the weights against float32; see above.

    Example: python -m loadtest.quality forms --data data/massive_en/test.jsonl --forms int8,int4
    """
    base: Scores | None = None
    found: dict[str, dict[str, float]] = {}
    adapter = None if options.adapter is None else str(options.adapter)
    for form in forms_of(options.forms):
        with scorer(options, form, adapter) as (runner, texts):
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
        with scorer(options, "float32") as (runner, texts):
            if places != (None,):
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


@as_options
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


def make_rows(train: list[Example], languages: tuple[str, ...], ids: Ids) -> dict[str, Row]:
    """All rows of one task by name."""
    required, num = ids.required, ids.required.vocab_size
    every = document_frequencies(train, num, input_aware=False)
    df = document_frequencies(train, num)
    blocks = blocks_of_languages(languages)

    def row(kept: Any, *, dynamic: bool = True) -> Row:
        made = VocabSlice.make(np.union1d(kept, required.ids), required)
        return Row(made, len(kept), dynamic)

    def in_blocks(kept: Any) -> Any:
        return np.asarray(
            [i for i in kept if blocks.has_token(ids.table.bytes_of(int(i)))], np.int64
        )

    aware = np.flatnonzero(df)
    language = in_blocks(aware)
    rows = {
        f"tau {tau}": row(tolerance_filter(language, df, tau, len(train))) for tau in TOLERANCES
    }
    spec = ids.tokenizer.to_str()
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
    reader = ExampleReader(tokenizer, 0)
    return [
        Example(
            np.asarray(tokenizer.encode(prompt).ids, np.int32),
            np.asarray(reader.of({"prompt": prompt, "completion": out}, "")[1][:-1], np.int32),
        )
        for prompt, out in pairs
    ]


def load_task(ids: Ids, task: str, options: SliceOptions) -> SlicedTask:
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
    head_ids = np.asarray(ids.tokenizer.encode(head).ids if head else [], np.int32)
    # Training prompts are joined to the shots in ids, which is enough for counting.
    documents = [
        Example(np.concatenate((head_ids, e.input_ids)), e.output_ids)
        for e in in_ids(((e.prompt, e.completion) for e in train), ids.tokenizer)
    ]
    prompts = [head + e.prompt for e in tests]
    pairs = zip(prompts, (e.completion for e in tests), strict=True)
    golds = [e.completion.split("\n")[0].strip() for e in tests]
    return SlicedTask(documents, in_ids(pairs, ids.tokenizer), prompts, golds)


@dataclass(frozen=True, slots=True)
class Texts:
    """Greedy answers of an engine over any set of ids. folder: profiles are written there, one for
    each row that is asked."""

    engine: Engine
    ids: Ids
    folder: Path
    options: SliceOptions
    bar: Bar

    def of(self, prompts: Sequence[Sequence[int]], row: Row | None, what: str) -> list[str]:
        """The text of each prompt over a row's ids, as a client sees it: up to the line's end,
        without EOS. None is the full vocabulary."""
        asked = [Prompt(i, None, tuple(ids)) for i, ids in enumerate(prompts)]
        groups: list[tuple[Iterable[Prompt], VocabularyParams | None, tuple[int, ...] | None]]
        groups = [(asked, None, None)]
        if row is not None:
            profile = self.folder / f"{what}.vocab"
            none = np.empty(0, np.int32)
            manifest = {"fingerprint": self.ids.table.fingerprint.hex()}
            VocabProfile(row.slice, none, none.astype(np.float32), manifest).save(profile)
            sliced = [row.dynamic or bool((row.slice.positions(p) >= 0).all()) for p in prompts]
            groups = [
                (compress(asked, sliced), VocabularyParams("slice", str(profile)), None),
                (compress(asked, map(not_, sliced)), None, tuple(row.slice.ids.tolist())),
            ]
        texts: dict[int, str] = {}
        for some, vocabulary, allowed in groups:
            sampling = SamplingParams(
                temperature=0.0, max_tokens=self.options.tokens, stop=(b"\n",),
                allowed_token_ids=allowed,
            )  # fmt: skip
            found = ask_engine(
                self.engine, self.ids.tokenizer, some, sampling,
                vocabulary=vocabulary, num_open=self.options.at_once,
            )  # fmt: skip
            for answer in answered(found):
                raw = self.ids.table.join(answer.output_ids, skip_special=True)
                text = raw.decode("utf-8", "replace")
                texts[answer.prompt.line] = text.split("\n")[0].strip()
                self.bar(what, len(texts), len(prompts))
        return [texts[i] for i in range(len(prompts))]


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


HEAD = ("task", "row", "T + [dynamic]", "% of V", "gold recall", "documents with a miss",
        "same text as full", "slice (full)")  # fmt: skip


def line_of(task: str, name: str, cell: dict[str, Any]) -> tuple[str, ...]:
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
        task, name, f"{cell['t']} + [{cell['dynamic']:.0f}]", f"{cell['share']:.2%}",
        f"{cell['recall']:.2%}", f"{cell['documents_missed']:.1%}{changed}", same, both or "-",
    )  # fmt: skip


@app.command
def slices(*, options: SliceOptions, results: ResultOptions = _RESULTS) -> int:
    """What a vocabulary slice keeps, misses and costs in quality; see loadtest.quality.

    Example: python -m loadtest.quality slices --model gemma-3-270m --data data --texts 60
    """
    if min(options.train, options.tokens, options.at_once) < 1 or options.texts < 0:
        raise ValueError("--train, --tokens and --at-once want at least 1, --texts 0")
    tasks = listed(options.task) or data_sets(options.data)
    ids = open_ids(options.model)
    loaded = {task: load_task(ids, task, options) for task in tasks}
    names = (*ROWS, *ABLATIONS) if options.ablations else ROWS
    print(f"{options.model}: V {ids.required.vocab_size}, always inside "
          f"{ids.required.ids.size}", file=sys.stderr)  # fmt: skip
    print(head_of(HEAD), flush=True)
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
            texts = Texts(engine, ids, folder, options, bar)
        for task, data in loaded.items():
            rows = make_rows(data.train, LANGUAGES.get(task, ("en",)), ids)
            prompts = [e.input_ids.tolist() for e in data.test]
            full = [] if texts is None else texts.of(prompts, None, f"{task}, full")
            found[task] = {}
            for name in names:
                row, asked = rows[name], prompts
                cell = row.figures(data.test) | {"num_prompts": len(prompts)}
                if row.tokenizer is not None:
                    encoded = row.tokenizer.encode_batch_fast(data.prompts)
                    asked = [row.slice.ids[e.ids].tolist() for e in encoded]
                    changed = sum(a != b for a, b in zip(asked, prompts, strict=True))
                    cell["prompts_changed"] = changed
                if texts is not None:
                    own, golds = texts.of(asked, row, f"{task}, {name}"), data.golds
                    cell["same_texts"] = sum(a == b for a, b in zip(own, full, strict=True))
                    cell["scores"] = {"slice": judge(own, golds), "full": judge(full, golds)}
                found[task][name] = cell
                print(row_of(line_of(task, name, cell)), flush=True)
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


@as_options
class AdapterOptions:
    """The adapters and the data."""

    train: Annotated[Path, Parameter(help="for the corpus and the tokens")]
    test: Path
    enriched: Annotated[Path, Parameter(help="the adapter with tokens of its own")]
    base: Annotated[Path | None, Parameter(help="the one in base ids, to compare with")] = None
    model: str = DEFAULT_MODEL
    prompts: Annotated[int | None, Parameter(help="only the first N test prompts")] = None
    tokens: Annotated[int, Parameter(help="most ids of an answer")] = 64
    weights: Annotated[WeightsForm, Parameter(help="the form that answers")] = "auto"
    threads: int | None = None


def ask(options: AdapterOptions, adapter: Path, tests: Pairs) -> list[Answer]:
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
        return in_order(found)


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


def scores(texts: Sequence[str], golds: Sequence[str]) -> dict[str, list[float]]:
    """What each answer scores, by metric."""
    return {
        metric.__name__: [metric(gold, text) for gold, text in zip(golds, texts, strict=True)]
        for metric in metrics_of(golds)
    }


def figures(answers: Sequence[Answer], enrichment: Enrichment | None) -> dict[str, Any]:
    """The ids of one adapter's answers; see the top of this file."""
    num, outputs = len(answers), [one.output_ids for one in answers]
    base = [ids if enrichment is None else enrichment.expand(ids) for ids in outputs]
    found: dict[str, Any] = {
        "prompt_ids": sum(len(one.prompt.ids or ()) for one in answers) / num,
        "ids": sum(map(len, outputs)) / num,
        "base_ids": sum(map(len, base)) / num,
    }
    if enrichment is not None:
        own = frozenset(enrichment.ids)
        fewest = [enrichment.segment(ids) for ids in base]
        possible = sum(i in own for ids in fewest for i in ids)
        found |= {
            "fewest_ids": sum(map(len, fewest)) / num,
            "adoption": sum(i in own for ids in outputs for i in ids) / max(1, possible),
        }
    return found


@app.command
def adapters(*, options: AdapterOptions, results: ResultOptions = _RESULTS) -> int:
    """Two adapters of one recipe: base ids and tokens of its own; see loadtest.quality.

    Example: python -m loadtest.quality adapters --base b --enriched e --train a --test t
    """
    data = read_task_data(options.model, [options.train], FieldOptions())
    tests = list(islice(data.text.reader.read([options.test]), options.prompts))
    join = data.text.table.join
    golds = [join(ids, skip_special=True).decode(errors="replace") for _, ids in tests]
    enrichment = Enrichment.load(
        options.enriched / "enrichment.json", tokenizer=data.text.fingerprint
    )
    train = [*data.train, *data.held_out]
    scored: dict[str, dict[str, list[float]]] = {}
    found: dict[str, Any] = {}
    for name, adapter, own in (
        ("base", options.base, None), ("enriched", options.enriched, enrichment),
    ):  # fmt: skip
        if adapter is None:
            continue
        answers = ask(options, adapter, tests)
        scored[name] = scores([one.text for one in answers], golds)
        prompts = [prompt for prompt, _ in spelled(tests, own)]
        outputs = [list(one.output_ids) for one in answers]
        written = list(zip(prompts, outputs, strict=True))
        passes = count_passes(spelled(train, own), written, data.text.fingerprint, lambda *_: None)
        judged = {metric: asdict(estimate(each)) for metric, each in scored[name].items()}
        found[name] = judged | figures(answers, own) | {"passes": passes}
        print(name, found[name], flush=True)
    if "base" in scored:
        found["difference"] = {
            metric: asdict(estimate(np.subtract(each, scored["base"][metric]).tolist()))
            for metric, each in scored["enriched"].items()
        }
        print("enriched - base", found["difference"], flush=True)
    emit("quality adapters", {"model": options.model, "prompts": len(tests), **found}, results.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
