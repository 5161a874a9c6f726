"""The data sets that speculation is measured on end to end, their corpora and their task files.

A set is a folder of the data (`test.jsonl`, `train.jsonl`), or one category of it. `prepare` makes
what a server needs to draft for it: three tasks, NAME-cold and NAME-learned (`auto` without a
corpus) and NAME-warm (`auto` with the model's own outputs for the first train prompts). They are
not one with three requests, because what a task learns about its drafts (calibration) must not pass
from one to another. A set without a train split, or with no train prompts asked for, has no warm
task.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from loadtest.prompts import Example, read_examples


@dataclass(frozen=True, slots=True)
class TaskSet:
    """One row of the table. folder: below the data folder. category: of the test lines that count;
    None takes all. adapter: below the models' folder, of a model tuned for the task."""

    name: str
    folder: str
    category: str | None = None
    adapter: str | None = None
    high_entropy: bool = False


SETS = {
    task_set.name: task_set
    for task_set in (
        TaskSet("eurlex57k", "eurlex57k"),
        TaskSet("massive_en", "massive_en"),
        TaskSet("medquad", "medquad"),
        TaskSet("advising_sql", "advising_sql"),
        TaskSet("bfcl", "bfcl"),
        TaskSet("squad", "squad"),
        TaskSet("hagrid", "hagrid"),
        TaskSet("spec_bench-summarization", "spec_bench", category="summarization"),
        TaskSet("spec_bench-rag", "spec_bench", category="rag"),
        TaskSet("mt_en_it", "mt_en_it", high_entropy=True),
        TaskSet("gsm8k", "gsm8k", high_entropy=True),
        TaskSet("massive_en-lora", "massive_en", adapter="massive_en-lora"),
    )
}


def examples_of(data_dir: Path, task_set: TaskSet) -> list[Example]:
    """The set's test examples in file order. Raises OSError, KeyError or ValueError."""
    if task_set.category is None:
        return list(read_examples(data_dir, task_set.folder))
    with (data_dir / task_set.folder / "test.jsonl").open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines if line.strip()]
    return [
        Example(task_set.folder, str(record["id"]), record["prompt"], record.get("completion", ""))
        for record in records
        if record["category"] == task_set.category
    ]


def train_prompts(data_dir: Path, task_set: TaskSet, num: int) -> list[str]:
    """The first `num` train prompts of a set; fewer where there are fewer."""
    if num == 0 or not (data_dir / task_set.folder / "train.jsonl").is_file():
        return []
    examples = read_examples(data_dir, task_set.folder, "train")
    return [example.prompt for example in itertools.islice(examples, num)]


def _tailor(*arguments: str) -> None:
    """Run a `tailor` command; its progress goes to stderr. Raises RuntimeError when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "server.commands.cli", *arguments], stdout=sys.stderr, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"tailor {' '.join(arguments[:2])} ended with {done.returncode}")


class Places(NamedTuple):
    """Folders. data: of the sets. models: of adapters. work: corpora, recordings and tasks are
    written there. recorded: holds NAME/train.jsonl as `tailor corpus generate` writes it, for the
    sets whose outputs are recorded already."""

    data: Path
    models: Path
    work: Path
    recorded: Path | None = None


def prepare(
    sets: Sequence[TaskSet],
    places: Places,
    *,
    model: str,
    num_train: int,
    max_tokens: int,
    max_nodes: int,
    tell: Callable[[str], None],
) -> dict[str, Path]:
    """Build the corpora that are missing in work/corpora and write work/tasks.

    Sets whose outputs are not in `recorded` are recorded now, num_train prompts each; 0 makes no
    corpora. Returns the corpus of each set that has one. Raises RuntimeError when a command fails.
    """
    work_dir, recorded_dir = places.work, places.recorded
    corpora, recordings = work_dir / "corpora", work_dir / "recordings"
    corpora.mkdir(parents=True, exist_ok=True)
    recordings.mkdir(exist_ok=True)
    found: dict[str, Path] = {}
    for task_set in sets:
        train = places.data / task_set.folder / "train.jsonl"
        if not train.is_file() or num_train == 0:
            continue
        corpus = corpora / f"{task_set.name}.corpus"
        found[task_set.name] = corpus
        if corpus.is_file():
            continue
        own = recordings / f"{task_set.name}.jsonl"
        if recorded_dir is not None and (recorded_dir / task_set.name / "train.jsonl").is_file():
            own = recorded_dir / task_set.name / "train.jsonl"
        elif not own.is_file():
            tell(f"recording {num_train} outputs for {task_set.name}")
            adapted = (
                ["--adapter", str(places.models / task_set.adapter)] if task_set.adapter else []
            )
            _tailor(
                "corpus", "generate", "--model", model, *adapted, "--data", str(train),
                "--limit", str(num_train), "--max-tokens", str(max_tokens), "-o", str(own),
            )  # fmt: skip
        tell(f"building the corpus of {task_set.name}")
        _tailor("corpus", "build", "--model", model, "--data", str(own), "-o", str(corpus))
    for adapter in {task_set.adapter for task_set in sets}:
        tasks = tasks_dir(work_dir, adapter)
        tasks.mkdir(parents=True, exist_ok=True)
        for task_set in sets:
            if task_set.adapter == adapter:
                _write_tasks(tasks, task_set, found.get(task_set.name), max_nodes)
    return found


def tasks_dir(work_dir: Path, adapter: str | None) -> Path:
    """Where the tasks of one model are: a server has one folder of them."""
    return work_dir / "tasks" / (adapter or "base")


def _write_tasks(folder: Path, task_set: TaskSet, corpus: Path | None, max_nodes: int) -> None:
    head = "sampling:\n  temperature: 0\nspeculation:\n  drafter: auto\n"
    head += f"  max_draft_tokens: {max_nodes}\n"
    name = task_set.name
    for kind in ("cold", "learned"):
        (folder / f"{name}-{kind}.yaml").write_text(f"name: {name}-{kind}\n{head}")
    if corpus is not None:
        at = json.dumps(str(corpus.resolve()))
        (folder / f"{name}-warm.yaml").write_text(f"name: {name}-warm\n{head}  corpus: {at}\n")
