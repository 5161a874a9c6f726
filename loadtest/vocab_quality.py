"""What a vocabulary slice costs in quality: the texts of `slice` against `full`, and both against
the gold answers.

    python -m loadtest.vocab_quality --model gemma-3-270m --data DIR [--task squad ...]

DIR holds a folder per task with train.jsonl (profiled) and test.jsonl (measured). Each prompt
stands behind --shots examples of the training part, so that a base model knows what is asked;
profiles are made of prompts with the same examples. For each row (tolerances, VP; with --ablations
also the filters one by one, dynamic only and static only): |T| + [mean dynamic], % of V,
token-level recall of the gold answers, the share of greedy texts that are those of `full`, and the
task's metric of both: exact match, micro-F1 of labels or of (type, entity) pairs, ROUGE-L, chrF.
The last two need the extra `quality` (pip install 'tailor-server[quality]').

The engine runs in this process. A greedy text over some ids is the text over every subset of them
that holds its tokens, as the argmax of a set is that of each subset it lies in: such texts are
taken over and not computed again, unless --ask-all is given, which checks them. "Static only" asks
for the full head with `allowed_token_ids`: a server always adds the prompt's ids to a slice.

Exits 0, 1 when --ask-all finds a text that should be another. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from loadtest import machine
from loadtest.answers import Answer, ModelFiles, answer_all, make_engine, open_files
from loadtest.options import emit
from loadtest.prompts import Example as Document
from loadtest.prompts import read_examples
from loadtest.vocab_table import LANGUAGES, Row, make_rows
from server.types import Request, SamplingParams, VocabularyParams
from vocab_store.documents import Example
from vocab_store.profile import VocabProfile

Int32 = npt.NDArray[np.int32]
CELL = "cell"
"""The one profile name: an engine forgets a T whose name means another."""

# -- metrics -----------------------------------------------------------------------------------


def exact_match(texts: Sequence[str], golds: Sequence[str]) -> float:
    """Share of equal texts, letter case and blanks aside."""

    def plain(text: str) -> str:
        return " ".join(text.casefold().split())

    return float(np.mean([plain(a) == plain(b) for a, b in zip(texts, golds, strict=True)]))


def micro_f1(found: Iterable[Counter[Hashable]], gold: Iterable[Counter[Hashable]]) -> float:
    """Over all documents' members together; 0 without any."""
    pairs = list(zip(found, gold, strict=True))
    right = sum((a & b).total() for a, b in pairs)
    members = sum(a.total() + b.total() for a, b in pairs)
    return 2 * right / members if members else 0.0


def labels_of(text: str) -> Counter[Hashable]:
    """The labels of a list with semicolons, each once."""
    return Counter({part.strip().casefold() for part in text.split(";") if part.strip()})


def entities_of(text: str) -> Counter[Hashable]:
    """(type, entity) pairs of a JSON object of lists; none where it is no such object."""
    try:
        found = json.loads(text)
    except ValueError:
        return Counter()
    if not isinstance(found, dict):
        return Counter()
    lists = ((kind, names) for kind, names in found.items() if isinstance(names, list))
    return Counter((kind, str(name)) for kind, names in lists for name in names)


def rouge_l(texts: Sequence[str], golds: Sequence[str]) -> float:
    """Mean ROUGE-L F of rouge-score, with its stemmer."""
    from rouge_score import rouge_scorer

    scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)
    pairs = zip(golds, texts, strict=True)
    return float(np.mean([scorer.score(gold, text)["rougeL"].fmeasure for gold, text in pairs]))


def chrf(texts: Sequence[str], golds: Sequence[str]) -> float:
    """Corpus chrF of sacrebleu, in 0..1."""
    from sacrebleu import corpus_chrf

    return float(corpus_chrf(list(texts), [list(golds)]).score / 100.0)


def label_f1(texts: Sequence[str], golds: Sequence[str]) -> float:
    """micro_f1 of labels_of."""
    return micro_f1(map(labels_of, texts), map(labels_of, golds))


def entity_f1(texts: Sequence[str], golds: Sequence[str]) -> float:
    """micro_f1 of entities_of."""
    return micro_f1(map(entities_of, texts), map(entities_of, golds))


Metric = Callable[[Sequence[str], Sequence[str]], float]
EXACT, CHRF, ROUGE = ("exact match", exact_match), ("chrF", chrf), ("ROUGE-L", rouge_l)
METRICS: dict[str, tuple[tuple[str, Metric], ...]] = {
    "massive_en": (EXACT, CHRF),
    "snips": (EXACT, CHRF),
    "squad": (EXACT, CHRF),
    "nq_rag": (EXACT, CHRF),
    "eurlex57k": (("label F1", label_f1),),
    "wnut17_json": (("entity F1", entity_f1), CHRF),
    "advising_sql": (CHRF,),
    "bfcl": (CHRF,),
    "mt_en_it": (CHRF,),
    "medquad": (ROUGE,),
    "scitldr": (ROUGE,),
    "pubmedqa": (ROUGE,),
}
"""A task's own, and chrF where a model that is not tuned may have none of that."""
DEFAULT_TASKS = (
    "massive_en", "squad", "eurlex57k", "advising_sql", "medquad", "mt_en_it", "wnut17_json",
)  # fmt: skip
TOLERANCE_ROWS = ("tau 0.0", "tau 0.01", "tau 0.02", "tau 0.1", "VP")
ABLATION_ROWS = (
    "unfiltered",
    "+ input-aware",
    "+ language",
    "dynamic only",
    "static only, tau 0.01",
    "static only, not input-aware, tau 0.01",
)

# -- texts -------------------------------------------------------------------------------------


class Texts:
    """Greedy answers of an engine over any set of ids; what is known already is not asked again.

    One writer. num_asked, num_known: answers computed, and taken over.
    """

    def __init__(
        self, engine: Any, profiles: dict[str, VocabProfile], files: ModelFiles, *,
        max_tokens: int, ask_all: bool, console: Console,
    ) -> None:  # fmt: skip
        """profiles: the engine's, of which this writes CELL. ask_all: never take over."""
        self.num_asked = 0
        self.num_known = 0
        self.num_wrong = 0
        self._engine = engine
        self._profiles = profiles
        self._files = files
        self._max_tokens = max_tokens
        self._ask_all = ask_all
        self._console = console
        self._num_cells = 0
        self._known: dict[tuple[int, ...], list[tuple[Int32 | None, Answer]]] = {}

    def of(self, prompts: Sequence[Sequence[int]], row: Row | None, what: str) -> list[Answer]:
        """The answer to each prompt over a row's ids; None is the full vocabulary."""
        vocab_size = self._files.required.vocab_size
        allowed: list[Int32 | None] = [None] * len(prompts)
        if row is not None:
            for i, prompt in enumerate(prompts):
                made = row.slice
                if row.dynamic:
                    made = made.for_request([t for t in prompt if t < vocab_size])
                allowed[i] = made.ids
        answers = [
            self._taken_over(p, a) for p, a in zip(map(tuple, prompts), allowed, strict=True)
        ]
        wanted = [i for i, known in enumerate(answers) if known is None or self._ask_all]
        if row is not None:
            none = np.empty(0, np.int32)
            self._profiles[CELL] = VocabProfile(row.slice, none, none.astype(np.float32))
        self._num_cells += 1
        names = {i: f"{self._num_cells}/{i}" for i in wanted}
        requests = [self._request(names[i], prompts[i], row) for i in wanted]
        found = answer_all(self._engine, requests, what, self._console)
        for i in wanted:
            answer, known = found[names[i]], answers[i]
            self.num_wrong += known is not None and known.ids != answer.ids
            answers[i] = answer
            self._known.setdefault(tuple(prompts[i]), []).append((allowed[i], answer))
        self.num_asked += len(wanted)
        self.num_known += len(prompts) - len(wanted)
        return [answer for answer in answers if answer is not None]

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

    def _request(self, name: str, prompt: Sequence[int], row: Row | None) -> Request:
        vocabulary, allowed = VocabularyParams(), None
        if row is not None and (row.dynamic or (row.slice.positions(prompt) >= 0).all()):
            vocabulary = VocabularyParams("slice", CELL)
        elif row is not None:
            allowed = tuple(row.slice.ids.tolist())
        return Request(
            request_id=name,
            task=CELL,
            model=self._engine.info.name,
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(
                temperature=0.0,
                max_tokens=self._max_tokens,
                stop=(b"\n",),
                allowed_token_ids=allowed,
            ),
            vocabulary=vocabulary,
        )

    def text(self, answer: Answer) -> str:
        """What a client sees: up to the line's end, without EOS."""
        table = self._files.tokens
        special = {int(i) for i in table.special_ids}
        raw = b"".join(table.bytes_of(i) for i in answer.ids if i not in special)
        return raw.decode("utf-8", "replace").split("\n")[0].strip()


# -- tasks -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskData:
    """A task's documents in ids, all behind the same shots. prompts: texts of the test part."""

    train: list[Example]
    test: list[Example]
    prompts: list[str]
    golds: list[str]


def _joint(document: Document) -> str:
    blank = document.prompt[-1:].isspace() or document.completion[:1].isspace()
    return document.prompt + ("" if blank else " ") + document.completion


def load_task(
    files: ModelFiles, data: Path, task: str, *, num_prompts: int, num_shots: int, num_train: int
) -> TaskData:
    """Read, tokenize, and put the shots in front: the first short examples of the training part.

    Raises OSError, KeyError or ValueError.
    """
    train = list(islice(read_examples(data, task, "train"), num_train))
    tests = [e for e in islice(read_examples(data, task), num_prompts) if e.completion and e.prompt]
    short = [e for e in train if len(_joint(e)) < 3000 and "\n" not in e.completion]
    head = "".join(_joint(e) + "\n\n" for e in short[:num_shots])
    head_ids = np.asarray(files.tokenizer.encode(head).ids if head else [], np.int32)
    # Training prompts are joined to the shots in ids, which is enough for counting.
    documents = [
        Example(np.concatenate((head_ids, e.input_ids)), e.output_ids)
        for e in files.examples([(e.prompt, e.completion) for e in train])
    ]
    prompts = [head + e.prompt for e in tests]
    test = files.examples(list(zip(prompts, (e.completion for e in tests), strict=True)))
    golds = [e.completion.split("\n")[0].strip() for e in tests]
    return TaskData(documents, test, prompts, golds)


def measure_task(
    texts: Texts, files: ModelFiles, data: TaskData, task: str, names: Sequence[str],
    on_row: Callable[[str, dict[str, Any]], None],
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """All rows of a task. on_row(name, cell) is called as each is done."""
    rows = make_rows(
        data.train, LANGUAGES.get(task, ("en",)), files.tokens, files.required, files.tokenizer
    )
    prompts = [e.input_ids.tolist() for e in data.test]
    full = [texts.text(a) for a in texts.of(prompts, None, f"{task}, full")]
    cells: dict[str, dict[str, Any]] = {}
    metrics = METRICS[task]
    of_full = {name: metric(full, data.golds) for name, metric in metrics}
    for name in names:
        row = rows[name]
        asked = prompts
        if row.tokenizer is not None:
            encoded = row.tokenizer.encode_batch_fast(data.prompts)
            asked = [row.slice.ids[e.ids].tolist() for e in encoded]
        answers = [texts.text(a) for a in texts.of(asked, row, f"{task}, {name}")]
        cells[name] = {
            **row.figures(data.test),
            "num_prompts": len(prompts),
            "same_texts": sum(a == b for a, b in zip(answers, full, strict=True)),
            "scores": {
                metric_name: {"slice": metric(answers, data.golds), "full": of_full[metric_name]}
                for metric_name, metric in metrics
            },
        }
        if row.tokenizer is not None:
            cells[name]["prompts_changed"] = sum(
                a != b for a, b in zip(asked, prompts, strict=True)
            )
        on_row(name, cells[name])
    return cells


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.vocab_quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="a built-in model or a converted folder")
    parser.add_argument("--adapter", type=Path, help="a PEFT LoRA's folder")
    parser.add_argument("--data", type=Path, required=True, help="folder of task data sets")
    parser.add_argument("--task", action="append", choices=sorted(METRICS), help="repeatable")
    parser.add_argument("--ablations", action="append", default=[], metavar="TASK",
                        help="tasks that get the ablation rows too; repeatable")  # fmt: skip
    parser.add_argument("--prompts", type=int, default=60, help="test prompts a task")
    parser.add_argument("--train", type=int, default=4000, help="most training examples")
    parser.add_argument("--shots", type=int, default=2, help="examples before each prompt")
    parser.add_argument("--tokens", type=int, default=40, help="most tokens of an answer")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ask-all", action="store_true", help="compute every text, and check")
    parser.add_argument("--json", type=Path, help="append the JSON line to this file too")
    return parser


HEAD = (
    "| task | row | T + [dynamic] | % of V | gold recall | documents with a miss | "
    "same text as full | slice (full) |\n|---|---|---|---|---|---|---|---|"
)


def markdown(task: str, name: str, cell: dict[str, Any]) -> str:
    """One line of the table."""
    changed = ""
    if "prompts_changed" in cell:
        changed = f"; {cell['prompts_changed'] / cell['num_prompts']:.0%} prompts other"
    scores = ", ".join(
        f"{metric} {both['slice']:.3f} ({both['full']:.3f})"
        for metric, both in cell["scores"].items()
    )
    return (
        f"| {task} | {name} | {cell['t']} + [{cell['dynamic']:.0f}] | {cell['share']:.2%} | "
        f"{cell['recall']:.1%} | {cell['documents_missed']:.0%}{changed} | "
        f"{cell['same_texts']}/{cell['num_prompts']} | {scores} |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    if min(options.prompts, options.tokens, options.train, options.at_once) < 1:
        parser.error("--prompts, --tokens, --train and --at-once want at least 1")
    tasks = options.task or DEFAULT_TASKS
    try:
        files = open_files(options.model, options.adapter)
        loaded = {
            task: load_task(
                files, options.data, task, num_prompts=options.prompts,
                num_shots=options.shots, num_train=options.train,
            )
            for task in tasks
        }  # fmt: skip
        for _, metric in (both for task in tasks for both in METRICS[task]):
            metric(["a"], ["a"])
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except ImportError as error:
        parser.error(f"{error}; pip install 'tailor-server[quality]'")
    console = Console(stderr=True, width=120)
    about = machine.describe()
    began = time.perf_counter()
    profiles: dict[str, VocabProfile] = {}
    engine = make_engine(files, profiles, at_once=options.at_once, threads=options.threads)
    texts = Texts(
        engine, profiles, files,
        max_tokens=options.tokens, ask_all=options.ask_all, console=console,
    )  # fmt: skip
    results: dict[str, Any] = {}
    print(HEAD, flush=True)
    try:
        for task in tasks:
            names = TOLERANCE_ROWS + (ABLATION_ROWS if task in options.ablations else ())

            def show(name: str, cell: Any, task: str = task) -> None:
                print(markdown(task, name, cell), flush=True)

            results[task] = measure_task(texts, files, loaded[task], task, names, show)
    finally:
        engine.close()
    emit(
        {
            "tool": "vocab_quality",
            "machine": about,
            "model": options.model,
            "adapter": None if options.adapter is None else options.adapter.name,
            "prompts": options.prompts,
            "shots": options.shots,
            "max_tokens": options.tokens,
            "num_asked": texts.num_asked,
            "num_taken_over": texts.num_known,
            "num_wrong": texts.num_wrong,
            "tasks": results,
            "wall_s": round(time.perf_counter() - began, 1),
        },
        options.json,
    )
    return 1 if texts.num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
