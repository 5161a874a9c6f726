"""`tailor tasks tune`: what is held back, what is chosen and why, and the whole way to a server."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from drafters.corpus import Corpus
from server import token_bytes
from server.commands.record import Progress
from server.commands.tune import tune
from server.commands.tune_choice import Choice, Taken, best_of, corpus_fit, within
from server.commands.tune_data import RecordOptions, TaskFile, Tuning, is_held
from server.config import load_task, load_tasks
from server.datasets import Fields
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.engine.step_times import CostTable
from server.errors import ConfigError
from server.machine import OtherProcesses
from server.types import SamplingParams, SpeculationParams
from server.wiring.drafter import make_task_drafter
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.commands.command_line import Tailor
from tests.commands.fixed_cost import fixed_cost
from tests.fakes.fake_drafters import random_drafter
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info
from tests.json_lines import write_lines
from tests.setup.serve_here import serve_here
from vocab_store.profile import VocabProfile

TOKENIZER = byte_level_tokenizer()
TABLE = token_bytes.build(TOKENIZER, TOKENIZER.get_vocab_size())
FINGERPRINT = TABLE.fingerprint.hex()


def _lines(num: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Town {i}:", "completion": f"kind: town, river: {'yes' if i % 3 else 'no'}"}
        | more
        for i in range(num)
    ]


def _drafter(others: str | None, name: str, task: str, speculation: SpeculationParams) -> Any:
    """As the server makes it. others: what is made instead of those that are no paper's."""
    made = others if others and name in ("auto", "suffix", "prompt", "grammys") else name
    return make_task_drafter(made, FINGERPRINT, (0,), task, speculation)


def _engine(cost: CostTable) -> Engine:
    vocab = TABLE.vocab_size
    info = fake_info(vocab_size=vocab, num_blocks=256, max_model_len=128, eos_token_ids=(0,))
    runner = FakeRunner(FakeModel(vocab, seed=2, context=1, boost=60.0), info)
    settings = EngineSettings(max_num_seqs=8, max_num_batched_tokens=64)
    own = {name: partial(_drafter, None, name) for name in ("mix", "suffix", "prompt", "trie")}
    drafters: dict[str, Any] = {**own, "auto": random_drafter(1, vocab)}
    return Engine(runner, drafters, settings, stop_table=TABLE, cost=cost)


def _tune(
    data: Path, *, per_row: float = 1.0, head_s: float = 0.1, first_s: float = 100.0,
    others: str | None = None, progress: Progress = lambda *_: None,
    work: Counter[str] | None = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """tune() over a fake model, with the drafters that the server would make. others: see
    _drafter. work: is told, as the report is, of the replays (each makes a drafter) and of the
    engine's steps."""
    done: Counter[str] = Counter() if work is None else work

    def taken(**defaults: Any) -> dict[str, Any]:
        return {name: more.pop(name, default) for name, default in defaults.items()}

    output = data.parent / "tasks" / "town.yaml"
    file = TaskFile(name="town", output=output, **taken(description="", force=True))
    recording = RecordOptions(
        **taken(outputs="gold", limit=200, record_seconds=180.0, serve_seconds=60.0)
    )

    def made(speculation: SpeculationParams) -> Any:
        done["replays"] += 1
        return _drafter(others, speculation.drafter, file.name, speculation)

    stop = tuple(text.encode() for text in more.pop("stop", ()))
    engine: Any = _engine(fixed_cost(first_s, per_row))
    run = Tuning(
        data, Fields(), file, recording, engine, TOKENIZER, TABLE, made,
        (head_s, 0.01 * head_s), progress,
        SamplingParams(temperature=0.0, stop=stop), **{"budgets": (16,)} | more,
    )  # fmt: skip
    try:
        report = tune(run)
    finally:
        done["steps"] += engine.runner.num_steps
    json.dumps(report)
    return report | {"work": done}


@dataclass(frozen=True)
class Written:
    """What a run reported, and a copy of the tasks' folder as it left it."""

    report: dict[str, Any]
    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "town.yaml"

    @property
    def names(self) -> list[str]:
        return sorted(file.name for file in self.folder.iterdir())


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    """Runs of the same task, one after the other: where drafts are dear and the head is large,
    where drafts are cheap, where nothing pays, and where another's task lies."""
    folder = tmp_path_factory.mktemp("turns")
    data, tasks = write_lines(folder / "train.jsonl", _lines(60)), folder / "tasks"
    found: dict[str, Written] = {}

    def run(name: str, **more: Any) -> None:
        report = _tune(data, **more)
        found[name] = Written(report, shutil.copytree(tasks, folder / name))

    run("large head", per_row=120.0, head_s=60.0)
    run("drafts", budgets=(4, 16), description='says "no"')
    run("nothing", per_row=120.0, stop=("\n",))
    (tasks / "town.yaml").write_text("name: town\n")
    (tasks / "town.vocab").write_text("of somebody's own")
    run("another's", per_row=120.0)
    return found


# --- the choice ---


def test_a_task_that_repeats_itself_gets_its_corpus(in_turn: dict[str, Written]) -> None:
    report, file = in_turn["drafts"].report, in_turn["drafts"].file
    task = load_task(file)
    assert (task.name, task.description) == ("town", 'says "no"')
    assert (task.speculation.drafter, report["drafter"]) == ("auto", "auto")
    assert task.speculation.max_draft_tokens == report["max_draft_tokens"] == 16
    assert task.sampling.temperature == 0 and task.vocabulary.mode == "full"
    longest = max(len(TOKENIZER.encode(" " + li["completion"]).ids) for li in _lines(60)) + 1
    assert task.sampling.max_tokens == -(-longest * 5 // 4 // 16) * 16
    # The corpus that is written holds the held-back examples too.
    assert task.speculation.corpus == str(file.with_suffix(".corpus"))
    corpus = Corpus.load(task.speculation.corpus, fingerprint=FINGERPRINT)
    assert corpus.num_documents == report["examples"] == 60
    assert report["held_back"] == 12 and report["recorded"] == 0
    assert report["tokens_per_step"] > 4
    assert report["expected_speedup"] > 3
    assert report["why"]["corpus_bigram_coverage"] == 1.0
    assert report["vocabulary"]["miss_rate"] == 0.0
    # The reasons are in the file, as comments.
    text = file.read_text()
    assert f"# Expected: {report['expected_speedup']:.2f}x (" in text
    assert f"{report['tokens_per_step']:.2f} tokens a decode step" in text
    # Nobody is asked for the data's outputs: what they gain is forecast.
    assert report["expected_of"] == report["expected_of_8_streams"] == 0
    assert "Forecast: held-back outputs" in text and "Measured:" not in text
    assert "bigram entropy" in text and "K80" in text
    for name in ("auto", "mix", "suffix", "prompt", "trie", "grammys"):
        assert f"# {name} " in text


def test_held_back_examples_are_not_in_the_corpus_that_judges_them(tmp_path: Path) -> None:
    """Outputs that occur once: a corpus that held them would promise everything."""
    rng = Random(4)
    letters = [chr(code) for code in range(33, 127)]
    lines = [
        {"prompt": f"Number {i}:", "completion": "".join(rng.choices(letters, k=20))}
        for i in range(60)
    ]
    # Each stands there twice: repeats of a held-back prompt are kept out as well.
    twice = _tune(write_lines(tmp_path / "twice.jsonl", [li for li in lines for _ in range(2)]))
    assert twice["tokens_per_step"] < 1.5


@pytest.mark.parametrize(("num", "one_in"), [(10, 4), (60, 5), (80, 4), (2000, 10)])
def test_lines_are_held_back_in_blocks(num: int, one_in: int) -> None:
    held = [is_held(line, num, one_in) for line in range(num)]
    assert num / one_in - 4 <= sum(held) <= num / one_in + 4 and sum(held) >= 1
    begins = sum(now and not before for before, now in itertools.pairwise([False, *held]))
    assert begins <= 8, "few of them have a neighbour in the corpus"


def test_what_the_papers_vary_is_varied_where_their_drafters_are_near(tmp_path: Path) -> None:
    """Answers that copy their prompts in few letters: the longer the match, the surer the copy."""
    rng = Random(3)
    texts = ["".join(rng.choices("abcd", k=40)) for _ in range(80)]
    lines = [{"prompt": f"Copy {text}:", "completion": text} for text in texts]
    data, file = write_lines(tmp_path / "train.jsonl", lines), tmp_path / "tasks" / "town.yaml"
    report = _tune(data, others="trie", budgets=(8,))
    told, speculation = file.read_text(), load_task(file).speculation
    assert report["drafter"] == speculation.drafter == "trie"
    assert vars(speculation)["trie"].prefix_length > 3 and "prefix_length 2 -" in told
    assert "mix lambda" not in told, "far from the best: not looked into"
    # Answers that the corpus knows: there it is mix.
    _tune(write_lines(tmp_path / "known.jsonl", _lines(60)), others="trie", budgets=(8,))
    told = file.read_text()
    assert load_task(file).speculation.drafter == "mix"
    assert "mix lambda 0.5 " in told and "mix lambda 0.9 " in told and "trie n" not in told


def test_where_rows_cost_as_much_as_steps_nothing_is_drafted(in_turn: dict[str, Written]) -> None:
    report, file = in_turn["nothing"].report, in_turn["nothing"].file
    task = load_task(file)
    assert task.speculation.drafter == report["drafter"] == "off"
    assert task.speculation.corpus is None and task.sampling.stop == ("\n",)
    assert report["corpus"] is None and report["expected_speedup"] == 1.0
    assert "Nothing is worth drafting" in file.read_text()


_SERVED: dict[str, Any] = {
    "outputs": "model", "limit": 40, "max_tokens": 24, "first_s": 0.02, "per_row": 0.0002,
    "stop": ("no such text",), "force": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A run that records the model's own outputs and has the time to serve its prompts."""
    folder = tmp_path_factory.mktemp("served")
    report = _tune(write_lines(folder / "train.jsonl", _lines(80)), **_SERVED)
    return Written(report, folder / "tasks")


def test_the_models_own_outputs_are_recorded_and_judge(served: Written, tmp_path: Path) -> None:
    report = served.report
    assert report["recorded"] == 40 and 8 <= report["held_back"] <= 12
    assert report["held_back_tokens"] <= 12 * 24
    # The model says other things than the data: its own outputs are what helps.
    assert report["why"]["corpus"] in ("own outputs", "both")
    assert "the model's own for 40 of its prompts" in served.file.read_text()
    assert load_task(served.file).sampling.max_tokens == 24
    # Prompts alone are enough.
    bare = write_lines(tmp_path / "bare.jsonl", [{"prompt": f"Town {i}"} for i in range(40)])
    report = _tune(bare, outputs="model", max_tokens=24)
    assert report["recorded"] == 40 and report["why"]["corpus"] == "own outputs"


def test_what_the_drafts_gain_is_measured_where_there_is_time(
    served: Written, tmp_path: Path
) -> None:
    """The held-back prompts are served, recorded or not; their range is told."""
    report, num = served.report, sum(is_held(line, 80, 4) for line in range(80))
    assert report["expected_of"] == report["expected_of_8_streams"] == num >= 16
    for at in ("", "_8_streams"):
        low, high = report[f"expected_range{at}"]
        assert 0.0 <= low < report[f"expected_speedup{at}"] < high
    text, (low, high) = served.file.read_text(), report["expected_range"]
    speedup = f"{report['expected_speedup']:.2f}x ({low:.2f} to {high:.2f})"
    assert f"# Expected: {speedup} a whole request" in text and "Forecast:" not in text
    assert f"Measured: {num} and {num} held-back prompts" in text
    data = write_lines(tmp_path / "train.jsonl", _lines(80))
    report = _tune(data, **_SERVED, serve_seconds=0.0)
    assert report["expected_of"] == report["expected_of_8_streams"] == 0
    assert report["tokens_per_step"] > 1.5
    low, high = report["expected_range"]
    assert low < report["expected_speedup"] < high
    text = (tmp_path / "tasks" / "town.yaml").read_text()
    assert "Forecast: held-back outputs" in text and "Measured:" not in text


def test_a_range_is_wider_for_fewer_requests() -> None:
    few, many = within(1.5, 0.1, 16, 0.02), within(1.5, 0.03, 200, 0.02)
    assert few[0] < many[0] < 1.4 and 1.6 < many[1] < few[1]
    assert within(1.5, 0.0, 100, 0.0) == (1.5, 1.5)


def test_a_large_head_is_cut_to_the_tasks_vocabulary(
    in_turn: dict[str, Written], tmp_path: Path
) -> None:
    """Where steps are mostly head and drafts are dear, `exact` pays; beside a small head not."""
    small, task = in_turn["nothing"].report["vocabulary"], load_task(in_turn["nothing"].file)
    assert small["mode"] == "full"
    assert (task.vocabulary.mode, task.vocabulary.profile) == ("full", None)
    large, task = in_turn["large head"].report["vocabulary"], load_task(in_turn["large head"].file)
    assert large["mode"] == task.vocabulary.mode == "exact"
    assert large["exact_speedup"] > 1.05
    profile = VocabProfile.load(str(task.vocabulary.profile), fingerprint=TABLE.fingerprint)
    assert profile.slice.num_ids == large["ids"] < TABLE.vocab_size
    assert profile.miss_rate == large["miss_rate"] == 0.0
    # Drafts take the head's share of a token: eight tokens a step leave little to save.
    data = write_lines(tmp_path / "train.jsonl", _lines(60))
    drafted = _tune(data, per_row=0.1, head_s=60.0)["vocabulary"]
    assert drafted["exact_speedup"] < large["exact_speedup"]


@pytest.mark.parametrize(
    ("run", "left"),
    [
        ("large head", ["town.vocab", "town.yaml"]),
        ("drafts", ["town.corpus", "town.yaml"]),
        ("nothing", ["town.yaml"]),
        ("another's", ["town.vocab", "town.yaml"]),
    ],
)
def test_tuning_again_leaves_nothing_of_the_old_task(
    run: str, left: list[str], in_turn: dict[str, Written]
) -> None:
    """What the new file does not name is gone; a file that tuning did not write keeps its own."""
    assert in_turn[run].names == left


class Stopped(Exception):
    """Whatever ends a run: a signal, a full disk."""


class StopAt:
    """The progress of a run that ends when it came to a stage more than `times` times; told has
    the stages, left what the task's file held then, work what was done until then."""

    def __init__(self, stage: str, times: int) -> None:
        self.stage, self.times, self.told, self.left = stage, times, list[str](), ""
        self.work = Counter[str]()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        self.told.append(stage)
        if self.told.count(self.stage) > self.times:
            raise Stopped


_STAGES = [
    ("recording", 12, False),
    ("replaying drafters", 5, False),
    ("serving 1 at once with drafts and without", 0, True),
    ("vocabulary", 0, True),
]
"""Where a run is stopped, how often it comes there first, and whether there is a task file then."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[StopAt], dict[str, Any]]:
    """Runs that were stopped one after the other, each a stage later, and the last, which was not:
    what they told, and its report."""
    folder = tmp_path_factory.mktemp("stopped")
    data, file = write_lines(folder / "train.jsonl", _lines(80)), folder / "tasks" / "town.yaml"
    runs = [StopAt(stage, times) for stage, times, _ in _STAGES]
    for progress in runs:
        with pytest.raises(Stopped):
            _tune(data, progress=progress, work=progress.work, **_SERVED)
        progress.left = file.read_text() if file.exists() else ""
    runs.append(StopAt("nothing", 0))
    return runs, _tune(data, progress=runs[-1], work=runs[-1].work, **_SERVED)


@pytest.mark.parametrize("at", range(4), ids=[stage for stage, *_ in _STAGES])
def test_a_run_that_was_stopped_goes_on(
    at: int, stopped: tuple[list[StopAt], dict[str, Any]]
) -> None:
    first, again = stopped[0][at : at + 2]
    assert bool(first.left) == _STAGES[at][2]
    if first.left:
        assert "drafter: auto" in first.left
        assert "# Not whole: what drafts gain is forecast." in first.left
    # What was found is not looked for again.
    assert any(line.startswith("going on with ") for line in again.told)
    recorded = [run.told.count("recording") for run in stopped[0][: at + 2]]
    assert max(recorded[:-1]) + recorded[-1] <= 40 + 3


def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    stopped: tuple[list[StopAt], dict[str, Any]], served: Written
) -> None:
    report = stopped[1]
    told = ("drafter", "recorded", "held_back_tokens", "quality", "vocabulary")
    assert [report[name] for name in told] == [served.report[name] for name in told]
    assert report["recorded"] == 40
    # Each thing was looked for once, whatever run it fell into.
    replays = [progress.work["replays"] for progress in stopped[0]]
    assert replays[0] == 0 < replays[1] < replays[2] and replays[3:] == [0, 0]
    assert sum(replays) == served.report["work"]["replays"]
    assert [bool(progress.work["steps"]) for progress in stopped[0]] == [
        True,
        True,
        False,
        True,
        False,
    ]
    file = Path(report["file"])
    assert "# Not whole" not in file.read_text()
    assert load_task(file).speculation.corpus == report["corpus"]
    assert sorted(p.name for p in file.parent.iterdir()) == ["town.corpus", "town.yaml"]


def test_a_run_with_other_data_or_options_begins_anew(tmp_path: Path) -> None:
    data, file = write_lines(tmp_path / "train.jsonl", _lines(80)), tmp_path / "tasks" / "town.yaml"
    fields: dict[str, Any] = {"outputs": "model", "limit": 40, "max_tokens": 24}
    with pytest.raises(Stopped):
        _tune(data, progress=StopAt("recording", 12), **fields)
    other, anew = StopAt("nothing", 0), StopAt("building corpora", 0)
    write_lines(data, _lines(90))
    with pytest.raises(Stopped):
        _tune(data, progress=anew, **fields)
    file.write_text("name: town\n")
    with pytest.raises(ConfigError, match="is there already; --force replaces it"):
        _tune(data, progress=other, **fields | {"max_tokens": 16, "force": False})
    assert anew.told.count("recording") >= 40
    assert not any(line.startswith("going on with ") for line in other.told + anew.told)


def test_time_for_recording_is_bounded(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "train.jsonl", _lines(40))
    with pytest.raises(ConfigError, match="only 0 outputs were recorded; give it more time"):
        _tune(data, outputs="model", record_seconds=-1.0)
    long = write_lines(tmp_path / "long.jsonl", [{"prompt": "x y " * 100}] * 20)
    with pytest.raises(ConfigError, match=r"only 0 outputs were recorded: .* do not fit the model"):
        _tune(long, outputs="model")


def test_ids_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    """What else is wrong with data is told before: tests/commands/test_tune_data.py."""
    lines = [*_lines(12), {"prompt_ids": [], "output_ids": [1]}]
    data = write_lines(tmp_path / "train.jsonl", lines)
    with pytest.raises(ConfigError, match=r"train\.jsonl:13: prompt: must be a string, not empty"):
        _tune(data)
    assert not (tmp_path / "tasks").exists()


def _choice(drafter: str, corpus: str | None, budget: int, speedup: float) -> Choice:
    return Choice(drafter, corpus, budget, Taken(10, 5, 8, [speedup], [1.0]))


def test_among_equals_the_sturdier_choice() -> None:
    auto, few = _choice("auto", None, 16, 1.995), _choice("auto", None, 8, 1.99)
    mix, slow = _choice("mix", "completions", 4, 2.0), _choice("auto", "both", 4, 1.9)
    assert best_of([mix, auto, few, slow]) is few
    corpus = _choice("auto", "completions", 8, 1.991)
    assert best_of([corpus, few]) is few
    assert best_of([_choice("mix", "completions", 4, 2.1), few]).drafter == "mix"  # type: ignore[union-attr]
    assert best_of([_choice("auto", None, 4, 1.005)]) is None


# --- a busy machine ---


def test_what_others_use_is_told_from_what_this_process_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Machine = namedtuple("Machine", "user nice idle iowait guest guest_nice")

    def spent(clock: float, busy: float, own: float) -> None:
        """psutil's figures: one core's clock, and what the machine and this process did of it."""
        times = Machine(busy + 7, 3, clock - busy - 15, 5, 7, 3)
        process = SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=own, system=0.0))
        monkeypatch.setattr("psutil.cpu_times", lambda: times)
        monkeypatch.setattr("psutil.Process", lambda pid: process)

    spent(100.0, 100.0, 100.0)
    others = OtherProcesses()
    spent(110.0, 109.0, 107.0)
    assert others.share() == pytest.approx(0.2)
    spent(110.0, 109.0, 200.0)  # clocks that are read one after the other
    assert others.share() == 0.0


@pytest.mark.parametrize("shares", [(0.9,), (0.1, 0.6)], ids=["at once", "while it measured"])
def test_a_busy_machine_decides_nothing(
    tmp_path: Path,
    run: Callable[..., Any],
    shares: tuple[float, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused before the model is loaded, or before anything is recorded with it."""
    told = iter(shares)
    monkeypatch.setattr(OtherProcesses, "share", lambda self: next(told))
    words = ("--data", str(write_lines(tmp_path / "train.jsonl", _lines(20))), "--name", "town")
    output = tmp_path / "tasks" / "town.yaml"
    told_user = run("tasks", "tune", *words, "-o", str(output), status=1)
    assert f"others use {shares[-1]:.0%} of this machine" in told_user
    assert "--even-if-busy" in told_user and not output.exists()


# --- as a person does it: data, tune, serve, ask ---


@pytest.fixture
def run(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, tailor: Tailor) -> Callable[..., Any]:
    monkeypatch.setenv("TAILOR_CACHE_DIR", str(tiny_folder.parent / "tuned"))

    def run(*words: str, status: int = 0) -> Any:
        """A command with the tiny model: its last line's JSON, or what it says of its failure."""
        told = tailor(*words, "--model", tiny_folder, status=status)
        return told.err if status else told.json

    return run


def test_from_data_to_answers(
    run: Callable[..., Any], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.commands.tasks._FORMS", ("float32", "int8"))
    data = write_lines(tmp_path / "train.jsonl", _lines(48))
    output = tmp_path / "town.yaml"
    words = ["--data", str(data), "--name", "town", "-o", str(output), "--max-tokens", "24"]
    words += ["--even-if-busy"]  # other tests may run beside this one
    report = run("task", "tune", *words, "--limit", "24", "--json")
    assert (report["examples"], report["recorded"]) == (48, 24) and report["weights"]
    told = run("tasks", "tune", *words, status=1)
    assert "is there already; --force replaces it" in told
    # A run that was stopped goes on, and the forms of the weights, which choose nothing, are left.
    kept = tmp_path / "town.yaml.partial"
    kept.write_text("")
    assert "is there already" in run("tasks", "tune", *words, status=1)
    # The tiny model's steps are quicker than any draft; those of a model worth serving are not.
    (costs,) = (tiny_folder.parent / "tuned" / "costs").iterdir()
    costs.write_text(json.dumps(json.loads(costs.read_text()) | fixed_cost().as_dict()))
    words += ["--force", "--skip-forms"]
    gold = run("tasks", "tune", *words, "--outputs", "gold", "--json")
    assert gold["weights"] == {} and not kept.exists()
    assert gold["outputs"] == "gold" and gold["tokens_per_step"] > 2
    assert set(load_tasks(tmp_path)) == {"completion", "town"}

    # A table of the model's own bigrams, for the drafter of another task.
    table = run("corpus", "bigrams", "-k", "4", "-o", str(tmp_path / "tiny.bigrams"))
    assert table["tokens"] == 128 and table["next"] == 4
    (tmp_path / "bigrams.yaml").write_text(
        "sampling: {temperature: 0, max_tokens: 24}\n"
        "speculation: {drafter: grammys, grammys: {table: tiny.bigrams, strategy: bigram}}\n"
    )
    body: dict[str, Any] = {"model": "town", "prompt": "Town 7:", "include_speculation": True}
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"Town {i}:"} for i in range(6)])
    common = ("--data", str(prompts), "--temperature", "0", "--max-tokens", "20")
    asked, own = tmp_path / "asked.jsonl", tmp_path / "own.jsonl"
    with serve_here("--model", str(tiny_folder), "--tasks", str(tmp_path)) as served:
        answer = served.post(**body).json()
        plain = served.post(**body, speculation={"drafter": "off"}).json()
        guessed = served.post(**body | {"model": "bigrams"}).json()
        figures = run("corpus", "generate", *common, "--url", served.url, "-o", str(asked))
    assert answer["speculation"]["drafter"] == gold["drafter"]
    assert answer["usage"]["completion_tokens"] <= 24
    assert plain["choices"][0]["text"] == answer["choices"][0]["text"]
    assert guessed["choices"][0]["text"] == plain["choices"][0]["text"]
    assert guessed["speculation"]["drafter"] == "grammys"
    assert guessed["speculation"]["drafted_tokens"] > 0

    # Its own outputs, from the running server and from an engine in this process: the same.
    assert figures == {"file": str(asked), "recordings": 6, "resumed": 0, "failed": 0}
    run("corpus", "generate", *common, "-o", str(own))
    assert _ids(asked) == _ids(own)
    corpus = tmp_path / "own.corpus"
    assert run("corpus", "build", "--data", str(own), "-o", str(corpus))["documents"] == 6


def _ids(file: Path) -> list[tuple[list[int], list[int], str]]:
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    return [(e["prompt_ids"], e["output_ids"], e["finish_reason"]) for e in entries]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("tasks", "tune", "--name", "a b", "--data", "x"), "--name: 'a b' cannot be"),
        (("tasks", "tune", "--name", "t", "--data", "no.jsonl"), "no.jsonl: No such file"),
        (("tasks", "tune", "--name", "t", "--data", "x", "-o", "t.txt"), "ends in .yaml"),
        (("corpus", "generate", "--data", "no.jsonl", "-o", "x"), "no.jsonl: No such file"),
        (("corpus", "generate", "--data", "x", "-o", "x", "--stop", ""), "--stop"),
    ],
)
def test_wrong_options_are_told_before_a_model_is_loaded(
    words: tuple[str, ...], told: str, run: Callable[..., Any]
) -> None:
    assert told in run(*words, status=1)


def test_a_server_that_is_not_there(run: Callable[..., Any], tmp_path: Path) -> None:
    data = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "x"}])
    words = ("corpus", "generate", "--data", str(data), "-o", str(tmp_path / "own.jsonl"))
    told = run(*words, "--url", "http://127.0.0.1:9", status=1)
    assert told.endswith("nothing answers there; is the server running?\n")
    told = run(*words, "--url", "http://127.0.0.1:9", "--task", "t", status=1)
    assert "http://127.0.0.1:9/v1 cannot be reached" in told
    assert "--task needs --url" in run(*words, "--task", "t", status=1)


def test_a_corpus_that_does_not_fit_is_said() -> None:
    def tried(corpus: str | None, num_steps: int) -> Choice:
        return Choice("auto", corpus, 4, Taken(100, num_steps, 8, [1.5], [1.0]))

    assert corpus_fit([tried(None, 50)]) == {}
    assert corpus_fit([tried(None, 50), tried("both", 40)])["corpus_fits"] is True
    unfit = corpus_fit([tried(None, 40), tried("both", 50)])
    assert unfit == {"corpus_gain": 0.8, "corpus_fits": False, "corpus_gains": {"both": 0.8}}
    assert "This corpus does not fit" in _why_told(unfit) and "0.80 times" in _why_told(unfit)
    # The model's own outputs fit, but what the data says is not what the model says.
    mixed = corpus_fit([tried(None, 40), tried("completions", 40), tried("own outputs", 25)])
    assert mixed["corpus_fits"] and mixed["corpus_gains"]["completions"] == 1.0
    assert "The data's completions do not fit" in _why_told(mixed)
    assert "own outputs 1.60 times" in _why_told(mixed)
    assert "fit" not in _why_told(corpus_fit([tried(None, 40), tried("completions", 30)]))


def _why_told(fit: dict[str, Any]) -> str:
    from server.commands.tune import _why_lines

    return "\n".join(_why_lines({"prompt_bigram_coverage": 0.5, **fit}))


def test_what_a_model_wrote_is_a_comment_that_yaml_can_hold() -> None:
    from server.commands.tune import _printable
    from server.config.yaml_file import parse_yaml

    wrote = "".join(map(chr, [0, 7, 27, 127, 133, 0x2028, 0xFEFF, 0xD800, 65, 0x1F600]))
    text = f"# {_printable(wrote)}\ndescription: x\n"
    assert parse_yaml(text, "t").data == {"description": "x"}
    assert "A" in text and chr(0x1F600) in text
