"""What a task is tuned on: its data, the model's own outputs for it and how good they are, and the
part held back."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from server.commands.options import as_options, bounded, check_place, refused
from server.commands.quality import estimate, exact, f1, on_a_line, repetition
from server.commands.record import (
    Answer,
    Kept,
    Progress,
    Prompt,
    ask_engine,
    kept_file,
    prompt_of,
)
from server.config import DEFAULT_TASKS, TaskConfig
from server.datasets import ExampleReader, Fields, Render, answered_turn, rows, turn_of
from server.errors import ConfigError
from server.types import SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from drafters.base import Drafter
    from drafters.corpus import Corpus
    from drafters.replay import Recording
    from server.engine.engine import Engine
    from server.token_bytes import TokenBytes
    from vocab_store.enrichment import Enrichment

Ids = Sequence[int]
Example = tuple[Ids, Ids]
Options = tuple[tuple[str, float], ...]
"""Of a drafter, by key, where they are not the defaults."""
Data = tuple[list[Example | None], list[Prompt], list[str | None]]
"""(examples, prompts to be recorded, outputs as text) of the rows, None where one has none."""

_MAX_HELD = 200
_MAX_HELD_TOKENS = 12_000
_MIN_EXAMPLES = 10
_RECORDED_HELD = 4  # one in so many of the recorded prompts is held back
_MAX_SERVED = 200  # prompts
_HELD_BLOCKS = 8
OWN, DATA, BOTH = "own outputs", "completions", "both"

_STOPS = ("\n\n", "\n", "###", "</s>", ";")
_FEW = 20  # outputs below which nothing is said of the model
_BETTER = 0.05  # what a stop must add to the mean F1 to be suggested
_FAILS = 0.2  # mean F1 below which the model does not do the task
_LOOPS = 0.5  # repetition from which on an output goes round in a circle
_SHOWN = 3
_MAX_TEXT = 90


BUSY = 0.5
"""Share of the machine that others use, above which no measurement is used."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One prompt's output beside the data's. hit_max: whether only max_tokens ended it."""

    gold: str
    output: str
    hit_max: bool


@as_options
class RecordOptions:
    """Which outputs the drafts are replayed on."""

    outputs: Annotated[
        Literal["gold", "model"],
        Parameter(
            help="judge drafts by the model's own outputs, recorded now, or by the data's (model)"
        ),
    ] = "model"
    limit: Annotated[int, bounded("most prompts to record (200)", gte=1)] = 200
    record_seconds: Annotated[
        float,
        bounded("record for so long at most; what is there then is used (180)", gt=0, metavar="S"),
    ] = 180.0
    serve_seconds: Annotated[
        float,
        bounded(
            "serve with drafts and without for so long at most; 0: forecast alone (60)",
            gte=0,
            metavar="S",
        ),
    ] = 60.0


@as_options
class TaskFile:
    """The file that is made."""

    name: Annotated[str, Parameter(help="the task's name")]
    description: Annotated[str, Parameter(metavar="TEXT", help="goes into the file")] = ""
    served_model_name: Annotated[
        str | None,
        Parameter(metavar="NAME", help="the task's model in server.yaml (the server's first)"),
    ] = None
    output: Annotated[
        Path | None,
        Parameter(
            name=("--output", "-o"),
            metavar="FILE",
            help=f"the task file ({DEFAULT_TASKS}/NAME.yaml); its corpus goes beside it",
        ),
    ] = None
    force: Annotated[bool, Parameter(help="replace a file that is there")] = False
    metric: Annotated[Literal["exact", "f1", "rouge_l", "json"] | None, Parameter(parse=False)] = (
        None  # what `make` finds in the data
    )

    @property
    def place(self) -> Path:
        """Where the task file goes; its corpus and its profile lie beside it."""
        return self.output or DEFAULT_TASKS / f"{self.name}.yaml"

    def lines(
        self,
        *,
        max_tokens: str,
        drafter: Sequence[str],
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        has_corpus: bool = False,
        is_exact: bool = False,
    ) -> list[str]:
        """What the server reads of it. max_tokens: with a comment. drafter: its lines in
        `speculation`. has_corpus, is_exact: it names the corpus, and the profile, beside it."""

        def text(value: Any) -> str:
            return json.dumps(value, ensure_ascii=False)

        lines = [f"name: {text(self.name)}"]
        lines += [f"description: {text(self.description)}"] if self.description else []
        lines += [f"model: {text(self.served_model_name)}"] if self.served_model_name else []
        lines += ["sampling:", f"  temperature: {temperature:g}", f"  max_tokens: {max_tokens}"]
        lines += [f"  stop: {text(list(stop))}"] if stop else []
        lines += ["speculation:", *(f"  {line}" for line in drafter)]
        if has_corpus:
            lines.append(f"  corpus: {text(self.place.with_suffix('.corpus').name)}")
        if is_exact:
            profile = text(self.place.with_suffix(".vocab").name)
            lines += ["vocabulary:", "  mode: exact", f"  profile: {profile}"]
        lines += [f"metric: {self.metric}"] if self.metric else []
        return lines

    def check(self) -> None:
        """Raise ConfigError for a place or name that cannot be."""
        if self.place.suffix not in (".yaml", ".yml"):
            raise ConfigError(f"{self.place}: a task file ends in .yaml")
        # An interrupted run goes on with its own file; `tune` looks whether it is this one.
        if not kept_file(self.place).exists():
            refuse_to_replace(self.place, self.force)
        with refused():
            check_place(self.place)
        try:
            TaskConfig(name=self.name, description=self.description)
        except ValueError:
            raise ConfigError(f"--name: {self.name!r} cannot be a task's name") from None


def refuse_to_replace(path: Path, force: bool) -> None:
    """Raise ConfigError for a file that is there and may not be replaced."""
    if path.exists() and not force:
        raise ConfigError(f"{path}: is there already; --force replaces it")


@dataclass(slots=True)
class Material:
    """Outputs to replay, and what corpora may be built from. Written by `gather`.

    compared: the model's outputs beside the data's. has_plain_prompts: not all are rendered chats.
    held: replayed. to_serve: held-back prompts, recorded or not, in no order. parts: examples by
    corpus label, without those of either; whole: with them. corpora: of the parts, with their
    files, by `tune`.
    """

    held: list[Recording] = field(default_factory=list)
    to_serve: list[tuple[int, ...]] = field(default_factory=list)
    parts: dict[str, list[Example]] = field(default_factory=dict)
    whole: dict[str, list[Example]] = field(default_factory=dict)
    corpora: dict[str, tuple[Path, Corpus]] = field(default_factory=dict)
    num_lines: int = 0
    num_recorded: int = 0
    compared: list[Compared] = field(default_factory=list)
    has_plain_prompts: bool = False
    longest: int = 0
    max_tokens: int = 0


@dataclass(slots=True)
class Tuning:
    """One run of the command, as all its parts take it.

    data: rows with a prompt and, for outputs "gold", an output, with messages, or recordings;
    fields: where they are. engine: idle, with a table of costs and all drafters. tokenizer: a
    tokenizers.Tokenizer. tokens: its table. make_drafter: as the server's. head: seconds of the LM
    head for one row and for each further one (server.engine.probe.measure_head). sampling: as the
    task will have it, but for max_tokens; that: None takes a bound from the completions, or 256
    without any. budgets: most nodes a step, to be tried. head_share: the LM head's share of the
    bytes that a step of one row reads, or None where it is not known. busy: share of the machine
    that others used while its steps were measured. render: a chat as the model's template writes
    it, and its ids; None for a model without one. compare_forms: (prompt, output) of examples ->
    figures of the forms of weights, by their names. enrichment: the model's own tokens: the data's
    outputs are written in them. kept: by `tune`.
    """

    data: Path
    fields: Fields
    file: TaskFile
    recording: RecordOptions
    engine: Engine
    tokenizer: Any
    tokens: TokenBytes
    make_drafter: Callable[[SpeculationParams], Drafter]
    head: tuple[float, float]
    progress: Progress
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    max_tokens: int | None = None
    budgets: tuple[int, ...] = (4, 8, 16, 32)
    head_share: float | None = None
    busy: float = 0.0
    render: Render | None = None
    compare_forms: Callable[[Sequence[Example]], dict[str, dict[str, float]]] | None = None
    enrichment: Enrichment | None = None
    material: Material = field(default_factory=Material)
    kept: Kept = field(init=False)

    @property
    def identity(self) -> str:
        """Of all that decides what is found."""
        info = self.engine.info
        told = replace(self.file, description="", output=self.file.place, force=True)
        given = (
            info.fingerprint, info.dtype, info.device, self.tokens.fingerprint.hex(), told,
            self.data, self.fields, self.recording, self.sampling, self.max_tokens, self.budgets,
            hashlib.sha256(self.data.read_bytes()).hexdigest(),
        )  # fmt: skip
        return repr(given)

    def speculation(
        self, name: str, budget: int, label: str | None, options: Options = ()
    ) -> SpeculationParams:
        """Of a drafter with the corpus of a part."""
        path = None if label is None else str(self.material.corpora[label][0])
        given = tuple((f"{name}.{key}", value) for key, value in options)
        return SpeculationParams(name, budget, given, path)

    def drafter(self, name: str, label: str | None, options: Options = ()) -> Drafter:
        """The same, made anew: a drafter learns from what it sees."""
        return self.make_drafter(self.speculation(name, 16, label, options))

    @property
    def stop(self) -> list[str]:
        """What ends an output, as text."""
        return [text.decode() for text in self.sampling.stop]


def gather(run: Tuning, data: Data) -> None:
    """Record outputs where they are asked for, and hold a part of the data back: `material`."""
    from drafters.replay import Recording

    gold, prompts, texts = data
    engine, material = run.engine, run.material
    num = material.num_lines = len(gold)
    known = [(line, example) for line, example in enumerate(gold) if example is not None]
    # In base ids: an answer may be written without the tokens that it could have.
    base = list if run.enrichment is None else run.enrichment.expand
    material.longest = max((len(base(output)) for _, (_, output) in known), default=0)
    bound = 16 * math.ceil(1.25 * material.longest / 16) if known else 256
    material.max_tokens = run.max_tokens or bound
    is_gold = run.recording.outputs == "gold"
    one_in = max(5, math.ceil(num / _MAX_HELD)) if is_gold else _RECORDED_HELD
    held_lines = {line for line in range(num) if is_held(line, num, one_in)}
    seen: set[tuple[int, ...]] = set()

    def put(label: str, examples: Sequence[tuple[int, Example]]) -> None:
        """Those with other prompts than are held back are a part: repeats would flatter it."""
        part = [e for i, e in examples if i not in held_lines and tuple(e[0]) not in seen]
        material.whole[label] = [example for _, example in examples]
        if part:
            material.parts[label] = part

    if is_gold:
        _hold(material, [Recording(list(p), list(o)) for i, (p, o) in known if i in held_lines])
        seen |= {tuple(r.prompt_ids) for r in material.held}
        put(DATA, known)
        return
    material.has_plain_prompts = any(prompt.text is not None for prompt in prompts)
    answers = _record(run, prompts)
    for answer in answers:  # beside the data's output, where it has one
        gold_text = texts[answer.prompt.line]
        if gold_text is not None:
            hit_max = len(answer.output_ids) >= material.max_tokens
            material.compared.append(Compared(gold_text, answer.text, hit_max))
    held = [answer for answer in answers if answer.prompt.line in held_lines]
    _hold(material, map(recording_of, held or answers[::_RECORDED_HELD]))
    for i in sorted(held_lines, key=_shuffle)[:_MAX_SERVED]:
        ids = prompts[i].ids or tuple(run.tokenizer.encode(prompts[i].text).ids)
        fits = len(ids) + material.max_tokens <= engine.info.max_model_len
        if ids and fits and max(ids) < engine.info.vocab_size:
            material.to_serve.append(ids)
    seen |= {tuple(r.prompt_ids) for r in material.held} | set(material.to_serve)
    own = [(a.prompt.line, (a.prompt.ids or (), a.output_ids)) for a in answers]
    put(OWN, own)
    if known:
        put(DATA, known)
        put(BOTH, [*known, *own])


def read_data(run: Tuning) -> Data:
    """See Data. Raises ConfigError with file and line for a row that cannot be used."""
    gold: list[Example | None] = []
    prompts: list[Prompt] = []
    texts: list[str | None] = []
    fields, outputs, own = run.fields, run.recording.outputs, run.enrichment
    eos = run.engine.info.eos_token_ids[0]
    reader = ExampleReader(run.tokenizer, eos, fields=fields, render=run.render)
    for number, row in rows(run.data):
        where = f"{run.data}:{number}"
        entry = _plain(row, where, run)
        has_output = "output_ids" in entry or fields.field in entry
        if outputs == "gold" or has_output:
            prompt, output = reader.of(row, where)
            if not prompt:
                raise ConfigError(f"{where}: {fields.prompt_field}: must be a string, not empty")
            if own is not None:
                prompt, output = own.read(prompt), own.segment(output)
            gold.append((prompt, output))
        else:
            gold.append(None)
        told = None if "output_ids" in entry else entry.get(fields.field)
        texts.append(told if isinstance(told, str) else None)
        if outputs == "model":
            prompts.append(prompt_of(number, entry, run.data, fields.prompt_field))
        if len(gold) % 200 == 0:
            run.progress("reading", len(gold), None)
    return gold, prompts, texts


def _plain(row: dict[str, Any], where: str, run: Tuning) -> dict[str, Any]:
    """A row of messages as prompt, its ids and output; other rows as they are."""
    if "messages" not in row:
        return row
    turn = turn_of(row, where, run.fields)
    prompt, ids = turn.rendered(where, run.render)
    output = {} if turn.gold is None else {run.fields.field: turn.gold}
    return {run.fields.prompt_field: prompt, "prompt_ids": ids, **output}


def check_data(data: Path, outputs: str, fields: Fields) -> None:
    """Raise ConfigError for data that cannot be used, before a model is loaded."""
    num = 0
    for number, row in rows(data):
        num += 1
        where = f"{data}:{number}"
        if "prompt_ids" in row or "output_ids" in row:
            continue
        (answered_turn if outputs == "gold" else turn_of)(row, where, fields)
    if num < _MIN_EXAMPLES:
        raise ConfigError(f"{data}: {num} examples; tuning needs {_MIN_EXAMPLES}")


def is_held(line: int, num_lines: int, one_in: int) -> bool:
    """Whether a line is held back: one in `one_in`, in blocks of neighbours spread over the data.
    Lines that stand together often share a passage, and one of them in the corpus would promise
    of the next what no prompt to come has."""
    return line * _HELD_BLOCKS * one_in // num_lines % one_in == one_in - 1


def recording_of(answer: Answer) -> Recording:
    """An answer to be replayed, with what the model held likely where that was asked for."""
    from drafters.replay import Recording

    tops = [row.top for row in answer.likely]
    return Recording(
        list(answer.prompt.ids or ()),
        list(answer.output_ids),
        [[token for token, _ in top] for top in tops],
        [[math.exp(logprob) for _, logprob in top] for top in tops],
    )


def _hold(material: Material, recordings: Iterable[Recording]) -> None:
    num_tokens = 0
    for recording in recordings:
        if not recording.prompt_ids or not recording.output_ids:
            continue
        if num_tokens < _MAX_HELD_TOKENS or not material.held:
            material.held.append(recording)
            num_tokens += len(recording.output_ids)
    if not material.held:
        raise ConfigError("no held-back example has a prompt and an output")


def sampling_of(run: Tuning) -> SamplingParams:
    """As the task will have it."""
    return replace(run.sampling, max_tokens=run.material.max_tokens)


def _record(run: Tuning, prompts: Sequence[Prompt]) -> list[Answer]:
    """The model's own outputs in the order of the data; `line` is the index of a line. Those to be
    held back come with what the model held likely. Those that are kept are not asked again."""
    from drafters.auto.likely import NUM_LIKELY

    kept, engine = run.kept, run.engine
    num = min(run.recording.limit, len(prompts))
    picked = [i * len(prompts) // num for i in range(num)]
    # In no order, so that some of each part are there should the time run out.
    asked = [replace(prompts[i], line=i) for i in picked]
    asked.sort(key=lambda prompt: _shuffle(prompt.line))
    end_s = time.monotonic() + run.recording.record_seconds
    ask = partial(
        ask_engine,
        engine,
        run.tokenizer,
        sampling=sampling_of(run),
        speculation=SpeculationParams("auto", 8),
        num_open=min(16, engine.settings.max_num_seqs),
        num_likely=lambda prompt: (
            NUM_LIKELY if is_held(prompt.line, len(prompts), _RECORDED_HELD) else 0
        ),
    )
    answers, failures = kept.recorded(
        asked, ask, run.progress, lambda: _RECORDED not in kept and time.monotonic() <= end_s
    )
    run.material.num_recorded = len(answers)
    if len(answers) < _MIN_EXAMPLES:
        reason = f": {failures[0].message}" if failures else "; give it more time"
        raise ConfigError(f"only {len(answers)} outputs were recorded{reason}")
    # What was replayed since then was replayed on these: no further ones are asked for.
    kept.once(_RECORDED, lambda: True)
    return [answers[line] for line in sorted(answers)]


_RECORDED = "recorded"


def _shuffle(number: int) -> int:
    """An order without meaning that is the same every time."""
    return (number * 0x9E3779B1) & 0xFFFFFFFF


# --- how good the outputs are ---------------------------------------------------------------------


def quality(
    compared: Sequence[Compared], *, stops: Sequence[str], can_chat: bool
) -> dict[str, Any]:
    """Figures, examples and suggestions, as plain values; {} where there is nothing to compare.

    stops: the task's. can_chat: the model has a chat template, and the prompts are plain text.
    """
    if not compared:
        return {}
    scores = [f1(c.gold, c.output) for c in compared]
    right = estimate([exact(c.gold, c.output) for c in compared])
    overlap = estimate(scores)
    at_limit = sum(c.hit_max for c in compared) / len(compared)
    looping = sum(repetition(c.output) >= _LOOPS for c in compared) / len(compared)
    begins = sum(c.output.split()[:2] == c.gold.split()[:2] for c in compared) / len(compared)
    stop, with_stop = _best_stop(compared, overlap.mean)
    best_mean = max(overlap.mean, with_stop)
    fails = len(compared) >= _FEW and best_mean < _FAILS
    worst = sorted(range(len(compared)), key=lambda i: scores[i])
    shown = [compared[worst[i * (len(worst) - 1) // max(1, _SHOWN - 1)]] for i in range(_SHOWN)]

    def suggestions() -> Iterator[str]:
        if stop is not None and stop not in stops:
            # As a shell takes it: within plain quotes \n stays two letters.
            typed = f"--stop $'{stop.encode('unicode_escape').decode()}'"
            yield f"stop: {json.dumps([stop])} would bring F1 to {with_stop:.0%} ({typed})"
        if at_limit > 0.1:
            ends = "give a stop, or raise it" if stop is None else "with that stop they would end"
            yield f"{at_limit:.0%} of the outputs were ended by max_tokens alone: {ends}"
        if can_chat and (fails or with_stop < 0.5):
            yield (
                "the model has a chat template and these prompts are plain text: give the data as "
                "messages"
            )
        if fails:
            yield (
                "train the model on the task (tailor tasks train), or put examples into the prompt"
            )

    return {
        "compared": len(compared),
        "exact_match": _interval(right),
        "f1": _interval(overlap),
        "begins_like_the_data": round(begins, 3),
        "hit_max_tokens": round(at_limit, 3),
        "repeats_itself": round(looping, 3),
        "does_the_task": not fails,
        "suggestions": list(suggestions()),
        "examples": [{"data": c.gold, "model": c.output} for c in dict.fromkeys(shown)],
    }


def _interval(found: Any) -> dict[str, float]:
    return {"mean": round(found.mean, 3), "low": round(found.low, 3), "high": round(found.high, 3)}


def _best_stop(compared: Sequence[Compared], mean: float) -> tuple[str | None, float]:
    """The stop string that brings the outputs closest to the data, and the mean F1 with it."""
    best: tuple[str | None, float] = (None, mean)
    for stop in _STOPS:
        if any(stop in c.gold.strip() for c in compared):
            continue
        cut = [f1(c.gold, c.output.lstrip().partition(stop)[0]) for c in compared]
        if sum(cut) / len(cut) >= best[1] + _BETTER:
            best = (stop, sum(cut) / len(cut))
    return best


def quality_lines(found: dict[str, Any]) -> list[str]:
    """The figures as lines for people to read: at most 100 columns, examples side by side."""
    if not found:
        return []
    right, overlap = found["exact_match"], found["f1"]
    lines = [
        f"Quality: {found['compared']} outputs beside the data's: exact match {right['mean']:.0%} "
        f"({right['low']:.0%} to {right['high']:.0%}),",
        f"     F1 {overlap['mean']:.0%} ({overlap['low']:.0%} to {overlap['high']:.0%}); "
        f"{found['begins_like_the_data']:.0%} begin like the data, {found['hit_max_tokens']:.0%} "
        f"hit max_tokens, {found['repeats_itself']:.0%} repeat themselves.",
    ]
    if not found["does_the_task"]:
        lines.append(
            "     The model does not do this task: the speedups below are those of wrong answers."
        )
    lines += [f"     Try: {line}." for line in found["suggestions"]]
    for example in found["examples"]:
        lines.append(f"     data   {on_a_line(example['data'], _MAX_TEXT)}")
        lines.append(f"     model  {on_a_line(example['model'], _MAX_TEXT)}")
    return lines
