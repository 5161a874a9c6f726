"""The prompts of the load tests: three fixed ones, and the task data sets of a folder.

PLAIN and COPY were written for this file. With SmolLM2's tokenizer PLAIN is 200 tokens of prose,
COPY 165 tokens of code that invites copying, and LONG 1,500 of prose (`distinct_prompts`).

A data folder holds one folder per task with `test.jsonl` and `train.jsonl`: a JSON object a line
with at least `id` and `prompt`, mostly with `completion`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def read_examples(data_dir: Path, task: str, split: str = "test") -> Iterator[Example]:
    """The examples of one split, in file order; without an `id` the line's number is its name.

    Raises OSError, KeyError or ValueError.
    """
    with (data_dir / task / f"{split}.jsonl").open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                record = json.loads(line)
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
    pools: dict[str, list[Example]] = {}
    for name in weights:
        pool = [
            example
            for example in read_examples(data_dir, name)
            if max_prompt_chars is None or len(example.prompt) <= max_prompt_chars
        ]
        if not pool:
            raise ValueError(f"data set {name!r} has no prompt of at most {max_prompt_chars} chars")
        rng.shuffle(pool)
        pools[name] = pool
    names = sorted(weights)
    cursors = dict.fromkeys(names, 0)
    chosen: list[Example] = []
    for name in rng.choices(names, [weights[name] for name in names], k=num_examples):
        pool = pools[name]
        chosen.append(pool[cursors[name] % len(pool)])
        cursors[name] += 1
    return chosen


def spread_examples(
    data_dir: Path,
    num_examples: int,
    *,
    max_prompt_chars: int | None = None,
    names: Sequence[str] | None = None,
) -> Sequence[Example]:
    """The first short-enough test prompts, one data set (of `names`) after the other in turn."""
    queues = []
    for name in task_names(data_dir) if names is None else names:
        queue = [
            example
            for example in read_examples(data_dir, name)
            if max_prompt_chars is None or len(example.prompt) <= max_prompt_chars
        ]
        if queue:
            queues.append(queue)
    chosen: list[Example] = []
    depth = 0
    while len(chosen) < num_examples and any(depth < len(queue) for queue in queues):
        for queue in queues:
            if depth < len(queue) and len(chosen) < num_examples:
                chosen.append(queue[depth])
        depth += 1
    return chosen
