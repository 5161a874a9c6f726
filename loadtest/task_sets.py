"""The data sets that servers are measured on end to end, and the tasks that are served for them.

A set is a folder of the data (`test.jsonl`, `train.jsonl`), or one category of it. `prepare` makes
what a server needs for it: tasks NAME-cold and NAME-learned (`auto` without a corpus) and NAME-warm
(`auto` with the model's own outputs for the first train prompts). They are not one task with three
kinds of requests, because what a task learns about its drafts (calibration) must not pass from one
to another. With `profiles` each task has a vocabulary profile of the train part too, so that a
request may ask for `slice` or `exact`. A set without a train part has no warm task and no profile.
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

from loadtest.peer import PeerFailed
from loadtest.prompts import Example, read_examples


@dataclass(frozen=True, slots=True)
class TaskSet:
    """One row of the table. folder: below the data folder. category: of the test lines that count;
    None takes all. adapter: below the models' folder, of a model tuned for the task."""

    name: str
    folder: str
    category: str | None = None
    adapter: str | None = None


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
        TaskSet("mt_en_it", "mt_en_it"),
        TaskSet("gsm8k", "gsm8k"),
        TaskSet("massive_en-lora", "massive_en", adapter="massive_en-lora"),
    )
}
"""The sets that are measured unless others are named; the name of any other folder is a set too."""


def set_of(name: str) -> TaskSet:
    """The set of a name."""
    return SETS.get(name) or TaskSet(name, name)


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


def tailor(*arguments: str) -> None:
    """Run a `tailor` command; its progress goes to stderr. Raises PeerFailed when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "server.commands.cli", *arguments], stdout=sys.stderr, check=False
    )
    if done.returncode != 0:
        raise PeerFailed(f"tailor {' '.join(arguments[:2])} ended with {done.returncode}")


def write_task(
    folder: Path, name: str, *, corpus: Path | None = None, profile: Path | None = None,
    max_nodes: int = 16,
) -> None:  # fmt: skip
    """A greedy task with `auto`: its YAML file in `folder`."""
    text = f"name: {name}\nsampling:\n  temperature: 0\nspeculation:\n  drafter: auto\n"
    text += f"  max_draft_tokens: {max_nodes}\n"
    if corpus is not None:
        text += f"  corpus: {json.dumps(str(corpus.resolve()))}\n"
    if profile is not None:
        text += f"vocabulary:\n  profile: {json.dumps(str(profile.resolve()))}\n"
        text += "  allowed_modes: [full, slice, exact]\n"
    (folder / f"{name}.yaml").write_text(text)


def make_profile(model: str, train: Path, profile: Path, num_train: int) -> None:
    """The vocabulary profile of the first `num_train` train examples, unless it is there."""
    if profile.is_file():
        return
    profile.parent.mkdir(parents=True, exist_ok=True)
    part = profile.with_suffix(".jsonl")
    with train.open(encoding="utf-8") as lines:
        part.write_text("".join(itertools.islice(lines, num_train)), encoding="utf-8")
    tailor("vocab", "profile", "--model", model, "--data", str(part), "--output", str(profile))


class Places(NamedTuple):
    """Folders. data: of the sets. models: of adapters. work: corpora, profiles, recordings and
    tasks are written there. recorded: holds NAME/train.jsonl as `tailor corpus generate` writes it,
    for the sets whose outputs are recorded already."""

    data: Path
    models: Path
    work: Path
    recorded: Path | None = None

    def tasks(self, adapter: str | None) -> Path:
        """Where the tasks of one model are: a server has one folder of them."""
        return self.work / "tasks" / (adapter or "base")


def prepare(
    sets: Sequence[TaskSet],
    places: Places,
    *,
    model: str,
    num_train: int,
    max_tokens: int,
    max_nodes: int,
    profiles: bool,
    report: Callable[[str], None],
) -> dict[str, Path]:
    """Build the corpora and profiles that are missing, and write the tasks.

    Sets whose outputs are not in `recorded` are recorded now, num_train prompts each; 0 makes no
    corpora. Returns the corpus of each set that has one. Raises PeerFailed when a command fails.
    """
    found: dict[str, Path] = {}
    for task_set in sets:
        folder, profile = places.tasks(task_set.adapter), None
        folder.mkdir(parents=True, exist_ok=True)
        train = places.data / task_set.folder / "train.jsonl"
        if train.is_file() and num_train:
            corpus = places.work / "corpora" / f"{task_set.name}.corpus"
            if not corpus.is_file():
                _make_corpus(task_set, places, corpus, model, num_train, max_tokens, report)
            found[task_set.name] = corpus
        if train.is_file() and profiles:
            report(f"the vocabulary profile of {task_set.name}")
            profile = places.work / "profiles" / f"{task_set.name}.vocab"
            make_profile(model, train, profile, 4000)
        for kind in ("cold", "learned"):
            write_task(folder, f"{task_set.name}-{kind}", profile=profile, max_nodes=max_nodes)
        if task_set.name in found:
            write_task(
                folder, f"{task_set.name}-warm",
                corpus=found[task_set.name], profile=profile, max_nodes=max_nodes,
            )  # fmt: skip
    return found


def _make_corpus(
    task_set: TaskSet, places: Places, corpus: Path, model: str, num_train: int, max_tokens: int,
    report: Callable[[str], None],
) -> None:  # fmt: skip
    corpus.parent.mkdir(parents=True, exist_ok=True)
    own = places.work / "recordings" / f"{task_set.name}.jsonl"
    own.parent.mkdir(exist_ok=True)
    recorded = places.recorded and places.recorded / task_set.name / "train.jsonl"
    if recorded is not None and recorded.is_file():
        own = recorded
    elif not own.is_file():
        report(f"recording {num_train} outputs for {task_set.name}")
        adapted = ["--adapter", str(places.models / task_set.adapter)] if task_set.adapter else []
        tailor(
            "corpus", "generate", "--model", model, *adapted,
            "--data", str(places.data / task_set.folder / "train.jsonl"),
            "--limit", str(num_train), "--max-tokens", str(max_tokens), "-o", str(own),
        )  # fmt: skip
    report(f"building the corpus of {task_set.name}")
    tailor("corpus", "build", "--model", model, "--data", str(own), "-o", str(corpus))
