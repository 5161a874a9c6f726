"""`tailor tasks make`: from a file of examples to a served task, in steps that are kept.

    look      the data: which columns, which metric, what ends an answer; a tenth is held out
    analyze   how the answers repeat themselves; the first NAME.yaml, of the model as it is
    enrich    tokens of the task's own, where they pay
    train     an adapter with them
    form      without one: whether plain prompts are better asked as chats
    tune      drafter, corpus and node budget, by what this machine's steps cost: NAME.yaml anew
    evaluate  what is held out, answered; what it is worth goes into NAME.yaml

All but the task's files lies in NAME.make, beside them. Each step writes down a digest of what it
was made from, so that another start goes on behind the last step whose digest is still right.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from drafters.atomic_file import replacing
from drafters.json_text import object_in
from server.client.bulk import AnswerFile
from server.commands.data import (
    FieldOptions,
    as_body,
    chat_render,
    hold_back,
    open_text,
    read_task_data,
)
from server.commands.enrich import (
    BUDGETS,
    ROW_COST,
    MiningOptions,
    analyze_task,
    mine_tokens,
    reading_pays,
    what_tokens_lack,
)
from server.commands.options import (
    Bar,
    ModelOptions,
    SamplingOptions,
    duration,
    sampling_of,
    writing,
)
from server.commands.own_engine import OwnTokenizer, checked_model, own_engine
from server.commands.quality import METRICS, estimate
from server.commands.record import Answer, Prompt, ask_engine
from server.commands.tasks import tune_task
from server.commands.train import (
    BaseOptions,
    RecipeOptions,
    has_bfloat16,
    train_adapter,
    wait_asleep,
)
from server.commands.tune_data import RecordOptions, TaskFile
from server.config import load_task
from server.datasets import ExampleReader, Turn, answered_turn, check_file, open_table, rows
from server.errors import ConfigError
from server.types import SpeculationParams

Step = Literal["enrich", "train", "tune", "evaluate"]

_PROMPTS = ("prompt", "question", "input", "instruction", "text", "query", "sentence")
_OUTPUTS = ("completion", "answer", "output", "response", "label", "target", "gold")
_STOPS = ("\n", "\n\n")
_MOST_JUDGED = 200  # rows that are held out
_LEAST_JUDGED = 5
_OPEN = 16  # prompts that are answered at once
_MOST_LOOKED_AT = 2000  # rows, before the plan: some seconds
_FIRST_MAX_TOKENS = 256  # until `tune` takes the data's
_EVALUATED = "# Evaluated on"
_MOST_SCORED = 24  # rows, to choose the form
_LONGEST = 1024  # ids of a prompt of these
_CLEARLY = 0.95  # of the nats of plain prompts: a chat has fewer
_SHORT, _LONG = 3, 40  # words of an answer
_MULTIPLY_ADDS = 3  # of a token in training, a parameter: forward, backward to inputs, all else


# --- what the data says ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a task's own data says of it. chats: rows are messages. stop: what ends an answer of a
    model that was not trained on the task."""

    metric: Literal["exact", "f1", "rouge_l", "json"]
    stop: tuple[str, ...]
    chats: bool


def propose(turns: Sequence[Turn]) -> Proposal:
    """turns: all with an output."""
    outputs = [turn.gold or "" for turn in turns]
    chats = any("messages" in turn.asked for turn in turns)
    # A chat's answer ends by itself.
    stop = next((s for s in _STOPS if not any(s in text.rstrip() for text in outputs)), None)
    return Proposal(_metric_of(outputs), () if chats or stop is None else (stop,), chats)


def _metric_of(outputs: Sequence[str]) -> Literal["exact", "f1", "rouge_l", "json"]:
    if sum(map(_is_json, outputs)) >= 0.95 * len(outputs):
        return "json"
    words = sum(len(text.split()) for text in outputs) / len(outputs)
    if words <= _SHORT:
        return "exact"
    return "f1" if words <= _LONG else "rouge_l"


def _is_json(text: str) -> bool:
    """Whether it is a JSON object or list."""
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def find_fields(row: Mapping[str, Any], given: FieldOptions) -> FieldOptions:
    """The columns that are meant: the given ones, else those with a usual name."""
    if "messages" in row:
        return given

    def of(name: str, default: str, usual: Sequence[str]) -> str:
        if name in row or name != default:
            return name
        by_name = {str(column).casefold(): str(column) for column in row}
        return next((by_name[one] for one in usual if one in by_name), name)

    return replace(
        given,
        field=of(given.field, "completion", _OUTPUTS),
        prompt_field=of(given.prompt_field, "prompt", _PROMPTS),
    )


def read_turns(data: Path, given: FieldOptions) -> tuple[list[Turn], FieldOptions]:
    """The rows, all with an output, and the columns that they are in. Raises ConfigError."""
    turns: list[Turn] = []
    fields = given
    for number, row in rows(data):
        if not turns:
            fields = find_fields(row, given)
        turn = answered_turn(row, f"{data}:{number}", fields)
        turns.append(replace(turn, asked=as_body(turn.asked)))
    return turns, fields


def split(turns: Sequence[Turn]) -> tuple[list[Turn], list[Turn]]:
    """(to learn from, held out) by `hold_back`, in the order of a digest of what is asked, so that
    further rows move none to the other side."""

    def prompt_of(turn: Turn) -> str:
        return _digest(turn.asked)

    return hold_back(sorted(turns, key=prompt_of), prompt_of, _MOST_JUDGED)


def num_own_ids(turns: Sequence[Turn], tokenizer: Any) -> float:
    """Of what is learned from, without what all prompts begin with: that is computed once a step.
    Letters, by what those of some rows take: 4 of English an id, half a Chinese one."""
    some = slice(0, _MOST_SCORED)
    asked = [t.asked.get("prompt") or json.dumps(t.asked, ensure_ascii=False) for t in turns]
    text = "\n".join([*asked[some], *(turn.gold or "" for turn in turns[some])])
    ends = min(asked), max(asked)  # the two that differ soonest
    shared = next((i for i, (a, b) in enumerate(zip(*ends, strict=False)) if a != b), 0)
    letters = sum(len(turn.gold or "") for turn in turns) + sum(map(len, asked))
    return (letters - shared * len(asked)) * len(tokenizer.encode(text).ids) / len(text)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def as_chats(turns: Sequence[Turn]) -> list[Turn]:
    """Plain prompts as a user's messages."""
    return [
        Turn({"messages": [{"role": "user", "content": turn.asked["prompt"]}]}, turn.gold)
        for turn in turns
    ]


def _row(turn: Turn) -> dict[str, Any]:
    """As data files hold it."""
    if "messages" not in turn.asked:
        return {"completion": turn.gold, **turn.asked}
    answer = {"role": "assistant", "content": turn.gold}
    return {**turn.asked, "messages": [*turn.asked["messages"], answer]}


# --- the command ----------------------------------------------------------------------------------


_FIELDS, _MODEL, _RECIPE, _RECORDING = (
    FieldOptions(), ModelOptions(), RecipeOptions(), RecordOptions()
)  # fmt: skip


def make(
    data: Annotated[
        Path,
        Parameter(
            name="FILE",
            help="JSON lines, CSV or Parquet with prompts and completions, or messages",
        ),
    ],
    /,
    *,
    file: TaskFile,
    fields: FieldOptions = _FIELDS,
    skip: Annotated[
        tuple[Step, ...], Parameter(help="a step that is left out; may be repeated")
    ] = (),
    plan: Annotated[bool, Parameter(help="show the plan and its price, and do nothing")] = False,
    reads_prompts: Annotated[
        bool,
        Parameter(
            negative="--no-reads-prompts",
            help="prompts are read in the task's own tokens, too, where that makes them 1.2 times "
            "shorter (yes)",
        ),
    ] = True,
    recipe: RecipeOptions = _RECIPE,
    recording: RecordOptions = _RECORDING,
    model: ModelOptions = _MODEL,
    even_if_busy: Annotated[
        bool, Parameter(help="tune although others use the machine; without mode exact")
    ] = False,
) -> int:
    made = _Make(data, file, fields, skip, reads_prompts, recipe, recording, model, even_if_busy)
    for line in made.plan():
        print(line)
    if plan:
        return 0
    try:
        with writing(made.output), AnswerFile(made.output):
            made.run()
    except KeyboardInterrupt:
        print("what is done is kept: start it again to go on", file=sys.stderr)
        raise
    print(made.output.read_text(encoding="utf-8"))
    print(f"written: {made.output}\nnext: {made.serve}, and ask for model {file.name!r}")
    return 0


@dataclass
class _Make:
    """One run of the command. Raises ConfigError for what cannot be, before anything is written."""

    data: Path
    file: TaskFile
    fields: FieldOptions
    skipped: Sequence[str]
    reads_prompts: bool
    recipe: RecipeOptions
    recording: RecordOptions
    model: ModelOptions
    even_if_busy: bool

    def __post_init__(self) -> None:
        wait_asleep()
        from server.model.catalog import text_folder
        from server.model.loader import open_model

        check_file(self.data)
        checked_model(self.model)
        turns, self._columns = read_turns(self.data, self.fields)
        self._learned, self._held = split(turns)
        if len(self._held) < _LEAST_JUDGED:
            raise ConfigError(
                f"{self.data}: {len(turns)} rows; {10 * _LEAST_JUDGED} are needed, most of them "
                "with a prompt of their own"
            )
        self._proposal = propose(turns)
        self.file = replace(self.file, metric=self._proposal.metric)
        self._skip = {*self.skipped, *(() if self.model.adapter is None else ("train",))}
        if "train" in self._skip:
            self._skip.add("enrich")
        elif self.model.weights in ("int4", "file", "nf4"):
            raise ConfigError(
                f"--weights {self.model.weights}: an adapter that is merged and rounded so is "
                "lost; train it over that form with `tailor tasks train --weights`, or --skip train"
            )
        self.output = self.file.place
        self._work = self.output.with_suffix(".make")
        # The folder is there before the first file.
        replace(self.file, force=self.file.force or self._work.is_dir()).check()
        self._known = object_in(self._work / "made.json")
        self._served = self.model  # that the task's file is for: with the adapter once there is one
        self._miss("enrich", (self._work / "enrichment.json").exists(), "enrich")
        adapter = self._work / "adapter" / "adapter_config.json"
        self._miss("train", adapter.exists(), "train", "tune", "evaluate")
        self._train, self._test = self._work / "train.jsonl", self._work / "test.jsonl"
        # Of the two parts: their columns have the usual names.
        self._read = FieldOptions(joint=self._columns.joint)
        self._base = open_model(text_folder(self.model.model))
        self._source = _digest([[*map(asdict, turns)], self._read.joint, self._base.fingerprint])
        if "train" not in self._skip or self._proposal.chats:
            self._skip.add("form")
        if self._figures("analyze") is None:  # a row that cannot be read is told before the work
            for _ in open_text(self.model.model, self._columns).reader.read([self.data]):
                pass
        self._lack = ""  # why it has no tokens of its own
        self._heed(self._figures("analyze"))
        self._ask(self._figures("form"))
        if self._figures("train") is not None:
            self._served = self._trained
        self._miss("analyze", self._is_written, "tune", "evaluate")

    @property
    def _trained(self) -> ModelOptions:
        return replace(self.model, adapter=str(self._work / "adapter"))

    @property
    def serve(self) -> str:
        """The command that serves the task."""
        words = ["tailor", "serve", "--model", self._served.model]
        options = {"--adapter": self._served.adapter, "--weights": self._served.weights}
        for option, value in options.items():
            words += [] if value is None else [option, value]
        return shlex.join([*words, "--tasks", str(self.output.parent)])

    def _heed(self, analysis: Mapping[str, Any] | None) -> None:
        if analysis is not None and not analysis["tokens"]:
            self._skip.add("enrich")
            self._lack = analysis["lack"]

    def _ask(self, form: Mapping[str, Any] | None) -> None:
        if form and form["chats"] and not self._proposal.chats:
            self._proposal = replace(self._proposal, chats=True, stop=())
            self._learned, self._held = as_chats(self._learned), as_chats(self._held)

    # What each step is made from: what it reads, and what the steps before it read.

    def _made_from(self, step: str) -> str:
        named = [self.file.description, self.file.served_model_name, self.model.model]
        own: dict[str, list[Any]] = {
            "analyze": [],
            "enrich": [self.reads_prompts],
            "train": [asdict(self.recipe), self.model.device],
            "form": [self.model.adapter],
            "file": [self._served.adapter is None, *named, self._proposal.chats],
            "tune": [asdict(self.model), asdict(self.recording)],
            "evaluate": [],
        }
        made: list[Any] = [self._source]
        for name, options in own.items():
            made += [name, options, name in self._skip]
            if name == step:
                break
        return _digest(made)

    # What was done: step -> the digest of what it was made from, and its figures once it has ended.

    def _kept(self, step: str) -> dict[str, Any]:
        """Of a step that was begun with this before; {} of others."""
        found: dict[str, Any] = self._known.get(step, {})
        return found if found.get("made_from") == self._made_from(step) else {}

    def _figures(self, step: str) -> dict[str, Any] | None:
        return self._kept(step).get("figures")

    @property
    def _is_written(self) -> bool:
        """Whether the task's file is there, as it would be made now, with the files it names."""
        return bool(self._kept("file")) and self.output.exists() and all(
            Path(file).exists() for _, file in load_task(self.output).files()
        )  # fmt: skip

    def _miss(self, step: str, is_there: bool, *lost: str) -> None:
        """What was done is lost where the file is gone that a step left."""
        if "figures" in self._known.get(step, {}) and not is_there:
            for one in lost:
                self._known.pop(one, None)

    def _note(self, step: str, **figures: Any) -> None:
        self._known[step] = {"made_from": self._made_from(step), **figures}
        with replacing(self._work / "made.json") as out:
            out.write((json.dumps(self._known, indent=1) + "\n").encode())

    def plan(self) -> Iterator[str]:
        """What will be done and what it takes, in lines for people to read."""
        found, num = self._proposal, len(self._learned)
        columns = f"{self._columns.prompt_field!r} to {self._columns.field!r}"
        yield (
            f"{self.data.name}: {num + len(self._held):,} rows, "
            f"{'messages' if found.chats else columns}; {num:,} to learn from, "
            f"{len(self._held)} to judge by"
        )
        ends = f", stop {list(self._stop)}" if self._stop else ""
        yield f"metric {found.metric}{ends}; {self.output} and {self._work} are written\n"
        left = 0.0
        for number, (step, what, seconds, why) in enumerate(self._planned(), 1):
            left += 0.0 if why else seconds
            yield f"  {number} {step:9} {why or f'about {duration(seconds)}':22} {what}"
        yield f"  about {duration(left)} in all. What is done is kept: start it again to go on."

    @property
    def _stop(self) -> tuple[str, ...]:
        """A model that was trained ends its answers by itself."""
        return self._proposal.stop if "train" in self._skip else ()

    def _planned(self) -> Iterator[tuple[str, str, float, str]]:
        """(step, what it is, its price in seconds, why it is not done, "" where it is)."""
        letters = sum(len(json.dumps(asdict(turn))) for turn in self._learned)
        record, served = self.recording.record_seconds, self.recording.serve_seconds
        made = self._figures("enrich")
        reading = ", and prompts read in them, if that pays" if self.reads_prompts else ""
        if made:
            reading = ", and prompts read in them" if made["reads_prompts"] else ""
        steps = {
            "analyze": ("how the answers repeat; the first task file", 5.0 + letters / 2e5),
            "enrich": (f"tokens of the task's own, if they pay{reading}", 2.0 + letters / 2e5),
            "train": ("an adapter", 0.0 if "train" in self._skip else self._training_s()),
            "form": ("whether it is better asked as a chat", 20.0),
            "tune": ("drafter, corpus and nodes on this machine", 120.0 + record + served),
            "evaluate": (f"{len(self._held)} held-out rows answered", 5.0 + 0.3 * len(self._held)),
        }
        lack = self._lack or self._lack_at_first_sight()
        for step, (what, seconds) in steps.items():
            if step == "form" and step in self._skip:
                continue
            why = "left out" if step in self._skip else ""
            if step == "enrich" and lack:
                what, why = lack, "left out"
            if self._figures(step) is not None:
                why = "done"
            yield step, what, seconds, why

    def _lack_at_first_sight(self) -> str:
        """Why few rows will have no tokens of their own; "" of many, which `analyze` looks at."""
        num = len(self._learned) + len(self._held)
        if "enrich" in self._skip or self._figures("enrich") or num > _MOST_LOOKED_AT:
            return ""
        found = read_task_data(self.model.model, [self.data], self._columns, max_held_out=100)
        with Bar() as bar:
            return what_tokens_lack(found, bar)

    def _training_s(self) -> float:
        """By the size of the model's layers and what this machine multiplies a second."""
        import torch

        config = self._base.config
        hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
        inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        parameters = layers * hidden * (3 * inner + 3 * hidden) + hidden * int(config.vocab_size)
        share = min(1.0, (self.recipe.max_examples or 1 << 40) / len(self._learned))
        num = num_own_ids(self._learned, open_table(self._base.path)[0])
        if self.model.threads is not None:
            torch.set_num_threads(self.model.threads)
        dtype = torch.bfloat16 if has_bfloat16(self.model.device) else torch.float32
        square = torch.ones(512, 512, dtype=dtype)
        square @ square  # torch reads and prepares then what multiplies: seconds of a cold disk
        ends = time.perf_counter() + 0.2
        took = float("inf")  # the shortest: of a busy machine, too, it is what the machine can
        while (began := time.perf_counter()) < ends:
            square @ square
            took = min(took, time.perf_counter() - began)
        seconds = _MULTIPLY_ADDS * parameters * num * share * self.recipe.epochs * took / 512**3
        return min(seconds, 60.0 * (self.recipe.time_limit or float("inf")))

    # The steps.

    def run(self) -> None:
        self._work.mkdir(parents=True, exist_ok=True)
        self._write_parts()
        analysis = self._do("analyze", self._analyze)
        self._heed(analysis)
        self._write_first()
        self._do("enrich", lambda: self._enrich(analysis["tokens"]))
        self._do("train", self._train_adapter)
        self._ask(self._do("form", self._form))
        self._write_parts()
        self._write_first()
        self._do("tune", self._tune)
        self._do("evaluate", self._evaluate)

    def _write_parts(self) -> None:
        for turns, file in ((self._learned, self._train), (self._held, self._test)):
            with replacing(file) as out:
                for turn in turns:
                    out.write((json.dumps(_row(turn), ensure_ascii=False) + "\n").encode())

    def _do(self, step: str, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The figures of a step: kept ones, or those of doing it now; {} where it is left out."""
        kept = self._figures(step)
        if kept is not None:
            return kept
        if step in self._skip:
            return {}
        print(f"{self.file.name}: {step}", file=sys.stderr)
        figures = act()
        self._note(step, figures=figures)
        return figures

    def _analyze(self) -> dict[str, Any]:
        found = read_task_data(self.model.model, [self._train], self._read, max_held_out=100)
        with Bar() as bar:
            report = analyze_task(found, BUDGETS, ROW_COST, bar)
        tokens = report.recommended if report.tokens_pay else 0
        return {"tokens": tokens, "lack": report.lack, "advice": report.advice}

    def _enrich(self, budget: int) -> dict[str, Any]:
        found = read_task_data(self.model.model, [self._train], self._read)
        mining, reads = MiningOptions(budget=budget), self.reads_prompts
        with Bar() as bar:
            enrichment = mine_tokens(found, mining, bar, reads_prompts=reads)
            if reads and not reading_pays(found, enrichment):
                enrichment = mine_tokens(found, mining, bar)
        enrichment.save(self._work / "enrichment.json")
        return {"tokens": len(enrichment), "reads_prompts": enrichment.prompts}

    def _train_adapter(self) -> dict[str, Any]:
        adapter = self._work / "adapter"
        if not self._kept("train"):  # else its parts are used
            shutil.rmtree(adapter, ignore_errors=True)
            self._note("train")
        own = None if "enrich" in self._skip else self._work / "enrichment.json"
        base = BaseOptions(
            model=self.model.model, device=self.model.device, threads=self.model.threads
        )
        figures = object_in(adapter / "training.json")  # an earlier start was stopped behind it
        if not figures:
            with Bar() as bar:
                figures = asdict(
                    train_adapter([self._train], adapter, own, base, self._read, self.recipe, bar)
                )
        self._served = self._trained
        return figures

    def _form(self) -> dict[str, Any]:
        """Whether the data's answers are likelier behind a chat than behind the plain prompt."""
        from server.model.scoring import Text, score

        some = self._learned[:_MOST_SCORED]
        with Bar() as bar, own_engine(self.model, bar, ()) as (served, engine):
            if served.chat is None:
                return {"chats": False}
            reader = ExampleReader(
                served.tokenizer, engine.info.eos_token_ids[0], render=chat_render(served.chat)
            )
            nats = {}
            for form, turns in (("plain", some), ("chat", as_chats(some))):
                pairs = [reader.of(_row(turn), self.data.name) for turn in turns]
                texts = [
                    Text((*p, *out), len(p))
                    for p, out in pairs
                    if 0 < len(p) < _LONGEST and len(p) + len(out) <= engine.info.max_model_len
                ]
                if not texts:
                    return {"chats": False}
                nats[form] = -float(score(engine.runner, texts).logprobs.sum()) / len(texts)
                bar("Forms", len(nats), 2)
        return {"chats": nats["chat"] < _CLEARLY * nats["plain"], "nats": nats}

    def _tune(self) -> dict[str, Any]:
        report = tune_task(
            self._train, replace(self.file, force=True), self._read, self.recording,
            SamplingOptions(stop=self._stop), self._served, even_if_busy=self.even_if_busy,
        )  # fmt: skip
        self._write_task(self.output.read_text(encoding="utf-8"))
        return report

    def _evaluate(self) -> dict[str, Any]:
        """How good answers to the held-out rows are, the task's metric first."""
        task = load_task(self.output)
        drawn = SamplingOptions(max_tokens=task.sampling.max_tokens, stop=self._stop)
        outputs = [""] * len(self._held)
        with Bar() as bar, own_engine(self._served, bar, ("auto",)) as (served, engine):
            render = None if served.chat is None else chat_render(served.chat)

            def asked() -> Iterator[Prompt]:
                for number, turn in enumerate(self._held):
                    if "prompt" in turn.asked:
                        yield Prompt(number, turn.asked["prompt"])
                    else:
                        _, ids = turn.rendered(self.data.name, render)
                        yield Prompt(number, None, tuple(served.prompt_ids(ids)))

            answers = ask_engine(
                engine, OwnTokenizer(served), asked(), sampling_of(drawn),
                speculation=SpeculationParams("auto", 8), num_open=_OPEN,
            )  # fmt: skip
            for done, answer in enumerate(answers, 1):
                if isinstance(answer, Answer):
                    outputs[answer.prompt.line] = answer.text
                bar("answers", done, len(self._held))
        names = [self._proposal.metric, *(name for name in METRICS if name != "json")]
        pairs = [(turn.gold or "", text) for turn, text in zip(self._held, outputs, strict=True)]
        found = {n: estimate([METRICS[n](gold, text) for gold, text in pairs]) for n in names}
        told = [f"{n} {one.mean:.1%} ({one.low:.1%} to {one.high:.1%})" for n, one in found.items()]
        line = f"{_EVALUATED} {len(self._held)} rows that were held out: {', '.join(told)}."
        self._write_task(self.output.read_text(encoding="utf-8"), line)
        return {name: asdict(one) for name, one in found.items()}

    def _write_first(self) -> None:
        """The task of its data alone, with a corpus in the ids that the model writes now; nothing
        where its file is there."""
        from server.commands.corpus import corpus_of

        if self._is_written:
            return
        model, adapter = self._served.model, self._served.adapter
        corpus = corpus_of(model, [self._train], adapter=adapter, fields=self._read)
        file = self.output.with_suffix(".corpus")
        with writing(file):
            corpus.save(file)
        told = "# Made by `tailor tasks make` of the data alone; nothing is measured yet."
        lines = self.file.lines(
            max_tokens=str(_FIRST_MAX_TOKENS),
            drafter=("drafter: auto", "max_draft_tokens: 8"),
            stop=self._stop,
            has_corpus=True,
        )
        self._write_task("\n".join([told, *lines]))
        self._note("file")

    def _write_task(self, text: str, evaluated: str | None = None) -> None:
        """The task's file: `text`, which a step has written, and what is known beside it."""
        from server.commands.tune import write_checked

        old = ("# Serve: ", "# Ask it", *(() if evaluated is None else (_EVALUATED,)))
        head, *rest = (line for line in text.splitlines() if not line.startswith(old))
        known = [] if evaluated is None else [evaluated]
        if self._proposal.chats:
            known.append("# Ask it as a chat: /v1/chat/completions.")
        whole = "\n".join([head, *known, f"# Serve: {self.serve}", *rest]) + "\n"
        write_checked(self.output, whole, self.file.name)
