"""The prompts of the load tests: three fixed ones, and the task data sets of a folder.

PLAIN and COPY were written for this file. With SmolLM2's tokenizer PLAIN is 200 tokens of prose,
COPY 165 tokens of code that invites copying, and LONG 1,500 of prose (`distinct_prompts`).

A data folder holds one folder per task with `test.jsonl` and `train.jsonl`: a JSON object a line
with at least `id` and `prompt`, mostly with `completion`.

A TaskSet is what servers are measured on end to end: it is a folder of the data (`test.jsonl`,
`train.jsonl`), or one category of it. `prepare` makes what a server needs for it: a task of each
kind of TASKS that is asked for. They are not one task with several kinds of requests, because what
a task learns about its drafts (calibration) must not pass from one to another. With `profiles` each
task has a vocabulary profile of the train part too, so that a request may ask for `slice` or
`exact`. A set without a train part has no profile and no task with a corpus.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from loadtest.peer import PeerFailed

PLAIN = (
    "The harbour town of Brennick lies where the river widens and slows before it meets the sea. "
    "For three hundred years its people lived from herring, and every morning the boats went out "
    "past the lighthouse in a long line, their lamps swaying. When the herring left, the town did"
    " not know what to do with itself. The nets were hung in the barns, the smokehouses fell "
    "quiet, and the young went inland to find work in the mills. Then a schoolteacher named Ada "
    "Merrow bought one of the empty smokehouses and began to build clocks in it. She had learned "
    "the trade from her father, and she taught it to anyone who came to the door. Within ten "
    "years there were four workshops along the quay, and people came a long way to buy a clock "
    "from Brennick. The sailors who had once read the tides now read the gears and the springs. "
    "What happened to the town in the years that followed is a story that the old people still "
    "like to tell:"
)

COPY = """class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, count):
        if name not in self.items:
            self.items[name] = 0
        self.items[name] += count
        return self.items[name]

    def total(self):
        result = 0
        for name, count in self.items.items():
            result += count
        return result

    def report(self):
        for name, count in self.items.items():
            print(f"{name}: {count}")


# A copy of the class above, with a new name:
class Warehouse:
    def __init__(self):
        self.items = {}

    def add(self, name, count):
        if"""


def distinct_prompts(num_prompts: int) -> list[str]:
    """Prompts of about equal length that differ from the first word on: no prefix is shared."""
    sentences = [sentence.strip() for sentence in PLAIN.split(". ")]
    prompts = []
    for index in range(num_prompts):
        turn = index % len(sentences)
        told = ". ".join([*sentences[turn:], *sentences[:turn]])
        prompts.append(f"{index + 1}. Story number {index + 1} of the harbour. {told}")
    return prompts


LONG = " ".join(distinct_prompts(8))[:6804]
FIXED = {"plain": PLAIN, "copy": COPY, "long": LONG}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "year": {"type": "integer"}},
    "required": ["name", "year"],
    "additionalProperties": False,
}
"""What answers under a schema are held to."""


T = TypeVar("T")


def edited(items: Sequence[T], share: float, rng: random.Random) -> list[T]:
    """Words or ids with so many of them changed, dropped or followed by another: a prediction that
    is nearly right."""
    out: list[T] = []
    for item in items:
        edit = rng.random()
        if edit >= share:
            out.append(item)
        elif edit < 0.6 * share:
            out.append(rng.choice(items))
        elif edit < 0.8 * share:
            out += [item, rng.choice(items)]
    return out


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt of a task data set. completion is the gold answer, "" where there is none."""

    task: str
    example_id: str
    prompt: str
    completion: str


def task_names(data_dir: Path) -> list[str]:
    """The data sets below `data_dir` that have test prompts, sorted."""
    return sorted(path.parent.name for path in data_dir.glob("*/test.jsonl"))


def data_sets(data_dir: Path) -> list[str]:
    """Those of them that have a train part too. Raises ValueError for a folder that is missing."""
    if not data_dir.is_dir():
        raise ValueError(f"{data_dir} is missing: name the data sets' folder with --data")
    return [name for name in task_names(data_dir) if (data_dir / name / "train.jsonl").is_file()]


def read_examples(
    data_dir: Path,
    task: str,
    split: str = "test",
    *,
    category: str | None = None,
    max_prompt_chars: int | None = None,
) -> Iterator[Example]:
    """The examples of one split, of one category or of all, in file order, those with longer
    prompts left out; without an `id` the line's number is its name.

    Raises OSError, KeyError or ValueError.
    """
    with (data_dir / task / f"{split}.jsonl").open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            record = json.loads(line) if line.strip() else {}
            if not record or (category is not None and record["category"] != category):
                continue
            if max_prompt_chars is None or len(record["prompt"]) <= max_prompt_chars:
                name = str(record.get("id", number))
                yield Example(task, name, record["prompt"], record.get("completion") or "")


def parse_mix(text: str) -> dict[str, float]:
    """`squad=2,massive_en=1` as weights; a name without a weight counts 1.

    Raises ValueError on a repeated name or a weight that is not positive.
    """
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, weight_text = part.partition("=")
        weight = float(weight_text) if weight_text else 1.0
        if name in weights:
            raise ValueError(f"data set {name!r} is named twice")
        if not 0 < weight < float("inf"):
            raise ValueError(f"the weight of {name!r} must be positive")
        weights[name] = weight
    if not weights:
        raise ValueError("no data set named")
    return weights


def mixed_examples(
    data_dir: Path,
    weights: dict[str, float],
    num_examples: int,
    *,
    seed: int = 0,
    max_prompt_chars: int | None = None,
) -> list[Example]:
    """`num_examples` draws: the data set by weight, then its examples in a shuffled order.

    An example comes back only after all others of its data set have been used. The same arguments
    give the same list. Raises ValueError when a data set has no prompt short enough.
    """
    rng = random.Random(seed)
    pools: dict[str, Iterator[Example]] = {}
    for name in weights:
        pool = list(read_examples(data_dir, name, max_prompt_chars=max_prompt_chars))
        if not pool:
            raise ValueError(f"data set {name!r} has no prompt of at most {max_prompt_chars} chars")
        rng.shuffle(pool)
        pools[name] = itertools.cycle(pool)
    names = sorted(weights)
    drawn = rng.choices(names, [weights[name] for name in names], k=num_examples)
    return [next(pools[name]) for name in drawn]


def spread_examples(
    data_dir: Path,
    num_examples: int,
    *,
    max_prompt_chars: int | None = None,
    names: Sequence[str] | None = None,
) -> Sequence[Example]:
    """The first short-enough test prompts, one data set (of `names`) after the other in turn."""
    queues = [
        read_examples(data_dir, name, max_prompt_chars=max_prompt_chars)
        for name in (task_names(data_dir) if names is None else names)
    ]
    turns = itertools.zip_longest(*queues)
    return [example for turn in turns for example in turn if example is not None][:num_examples]


@dataclass(frozen=True, slots=True)
class TaskSet:
    """One row of the table. place: the folder below the data folder, if it has another name.
    category: of the test lines that count; None takes all. adapter: below the models' folder, of a
    model tuned for the task."""

    name: str
    place: str = ""
    category: str | None = None
    adapter: str | None = None

    @property
    def folder(self) -> str:
        """Below the data folder."""
        return self.place or self.name


SETS = {
    task_set.name: task_set
    for task_set in (
        *map(TaskSet, ("eurlex57k", "massive_en", "medquad", "advising_sql", "bfcl", "squad")),
        TaskSet("hagrid"),
        TaskSet("spec_bench-summarization", "spec_bench", "summarization"),
        TaskSet("spec_bench-rag", "spec_bench", "rag"),
        *map(TaskSet, ("mt_en_it", "gsm8k")),
        TaskSet("massive_en-lora", "massive_en", adapter="massive_en-lora"),
    )
}
"""The sets that are measured unless others are named; the name of any other folder is a set too."""


TASKS = {
    "cold": ("auto", False), "learned": ("auto", False), "warm": ("auto", True),
    "mix": ("mix", True), "trie": ("trie", False), "grammys": ("grammys", False),
}  # fmt: skip
"""Kind of task -> its drafter, and whether it has a corpus: the model's own outputs for the first
train prompts. `grammys` has the model's bigrams."""


def set_of(name: str) -> TaskSet:
    """The set of a name."""
    return SETS.get(name) or TaskSet(name)


def examples_of(data_dir: Path, task_set: TaskSet) -> list[Example]:
    """The set's test examples in file order. Raises OSError, KeyError or ValueError."""
    return list(read_examples(data_dir, task_set.folder, category=task_set.category))


def train_prompts(data_dir: Path, task_set: TaskSet, num: int) -> list[str]:
    """The first `num` train prompts of a set; fewer where there are fewer."""
    if num == 0 or not (data_dir / task_set.folder / "train.jsonl").is_file():
        return []
    examples = read_examples(data_dir, task_set.folder, "train")
    return [example.prompt for example in itertools.islice(examples, num)]


def tailor(*arguments: str) -> str:
    """Run a `tailor` command; all that it says goes to stderr. Its last line of output. Raises
    PeerFailed when it fails."""
    command = [sys.executable, "-m", "server.commands.cli", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", file=sys.stderr)
    if done.returncode != 0:
        raise PeerFailed(f"tailor {' '.join(arguments[:2])} ended with {done.returncode}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def write_task(
    folder: Path, name: str, *, drafter: str = "auto", corpus: Path | None = None,
    table: Path | None = None, profile: Path | None = None, max_nodes: int = 16,
) -> None:  # fmt: skip
    """A greedy task: its YAML file in `folder`. table: bigrams of the model, for `grammys`."""
    text = f"name: {name}\nsampling:\n  temperature: 0\nspeculation:\n  drafter: {drafter}\n"
    text += f"  max_draft_tokens: {max_nodes}\n"
    if corpus is not None:
        text += f"  corpus: {json.dumps(str(corpus.resolve()))}\n"
    if table is not None:
        text += f"  grammys:\n    table: {json.dumps(str(table.resolve()))}\n"
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

    def recording(self, task_set: TaskSet) -> Path:
        """The outputs of a set's train prompts: those that are recorded already, or our own."""
        given = self.recorded and self.recorded / task_set.name / "train.jsonl"
        own = self.work / "recordings" / f"{task_set.name}.jsonl"
        return given if given is not None and given.is_file() else own


def prepare(
    sets: Sequence[TaskSet],
    places: Places,
    kinds: Collection[str],
    *,
    model: str,
    num_train: int,
    max_tokens: int,
    max_nodes: int,
    profiles: bool,
    report: Callable[[str], None],
) -> dict[str, Path]:
    """Build the corpora and profiles that are missing, and write the tasks of these kinds.

    Sets whose outputs are not in `recorded` are recorded now, num_train prompts each, where a kind
    has a corpus. Returns the corpus of each set that has one. Raises PeerFailed when a command
    fails.
    """
    found: dict[str, Path] = {}
    for task_set in sets:
        folder, profile = places.tasks(task_set.adapter), None
        folder.mkdir(parents=True, exist_ok=True)
        own = task_set.adapter
        merged = ["--model", model, *(["--adapter", str(places.models / own)] if own else [])]
        table = places.work / "bigrams" / (own or "base") if "grammys" in kinds else None
        if table is not None and not table.is_file():
            report(f"the bigrams of {own or model}")
            table.parent.mkdir(exist_ok=True)
            tailor("corpus", "bigrams", *merged, "-o", str(table))
        train = places.data / task_set.folder / "train.jsonl"
        if train.is_file() and any(TASKS[kind][1] for kind in kinds):
            corpus = found[task_set.name] = places.work / "corpora" / f"{task_set.name}.corpus"
            if not corpus.is_file():
                data = places.recording(task_set)
                if not data.is_file():
                    report(f"recording {num_train} outputs for {task_set.name}")
                    data.parent.mkdir(exist_ok=True)
                    tailor(
                        "corpus", "generate", *merged, "--data", str(train),
                        "--limit", str(num_train), "--max-tokens", str(max_tokens), "-o", str(data),
                    )  # fmt: skip
                report(f"building the corpus of {task_set.name}")
                corpus.parent.mkdir(parents=True, exist_ok=True)
                tailor("corpus", "build", "--model", model, "--data", str(data), "-o", str(corpus))
        if train.is_file() and profiles:
            report(f"the vocabulary profile of {task_set.name}")
            profile = places.work / "profiles" / f"{task_set.name}.vocab"
            make_profile(model, train, profile, 4000)
        for kind in kinds:
            drafter, has_corpus = TASKS[kind]
            if not has_corpus or task_set.name in found:
                write_task(
                    folder, f"{task_set.name}-{kind}", drafter=drafter,
                    corpus=found[task_set.name] if has_corpus else None,
                    table=table if kind == "grammys" else None,
                    profile=profile, max_nodes=max_nodes,
                )  # fmt: skip
    return found
