"""What a task is tuned on: its data, the model's own outputs for it and how good they are, and the
part held back."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from server.client.bulk import AnswerFile, BulkError
from server.commands.quality import estimate, exact, f1, repetition
from server.commands.record import Answer, Failure, Prompt, ask_engine, prompt_of
from server.datasets import ExampleReader, Fields, rows, turn_of
from server.errors import ConfigError, TailorError
from server.types import SamplingParams, SpeculationParams, TokenLogprob

if TYPE_CHECKING:
    from drafters.replay import Recording
    from server.engine.engine import Engine
    from server.token_bytes import TokenBytes
    from vocab_store.enrichment import Enrichment

Ids = Sequence[int]
Example = tuple[Ids, Ids]
Progress = Callable[[str, int, int | None], None]
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
_MOST_KEPT = 100_000  # findings of one run


BUSY = 0.5
"""Share of the machine that others use, above which no measurement is used."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One prompt's output beside the data's. hit_max: whether only max_tokens ended it."""

    gold: str
    output: str
    hit_max: bool


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """The settings of the command line.

    name: the task's. model: the model's name in server.yaml, or None for the server's first.
    data: rows with a prompt and, for outputs "gold", an output, with messages, or recordings;
    fields: where they are.
    output: the task file; the corpus goes beside it. replaces: whether it may be there already.
    outputs: what drafts are judged by.
    num_prompts, record_s: most prompts and seconds of recording. serve_s: seconds for measuring
    what the choice gains; 0: it is told as it was forecast. max_tokens: None takes a bound
    from the completions, or 256 without any. budgets: most nodes a step, to be tried.
    head_share: the LM head's share of the bytes that a step of one row reads, or None where it is
    not known. busy: share of the machine that others used while its steps were measured. render: a
    chat as the model's template writes it, and its ids; None for a model without one.
    compare_forms: (prompt, output) of examples -> figures of the forms of weights, by their names.
    enrichment: the model's own tokens: the data's outputs are written in them.
    """

    name: str
    data: Path
    output: Path
    outputs: Literal["gold", "model"]
    replaces: bool = True
    description: str = ""
    model: str | None = None
    fields: Fields = field(default_factory=Fields)
    num_prompts: int = 200
    record_s: float = 180.0
    serve_s: float = 60.0
    temperature: float = 0.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int = 0
    head_share: float | None = None
    busy: float = 0.0
    render: Callable[[list[dict[str, Any]]], tuple[str, list[int]]] | None = None
    budgets: tuple[int, ...] = (4, 8, 16, 32)
    compare_forms: Callable[[Sequence[Example]], dict[str, dict[str, float]]] | None = None
    enrichment: Enrichment | None = None


def kept_file(output: Path) -> Path:
    """Where a run that writes this task file keeps what it has found until its end."""
    return output.with_name(output.name + ".partial")


class Kept:
    """What a run has found so far, in a file beside the task's; the same run, typed again, goes on
    with it. A context manager: the file goes with the block, unless an error or a signal ends it.

    identity: of what decides what is found, beside the settings and the data. What a run of another
    identity kept is dropped; raises ConfigError where the task file is there, too, and may not be
    replaced. num_found: findings of an earlier run.
    """

    def __init__(self, settings: TuneSettings, identity: str) -> None:
        told = replace(settings, description="", replaces=True, busy=0.0, head_share=None)
        told = replace(told, render=None, compare_forms=None, enrichment=None)
        digest = hashlib.sha256(f"{identity} {told!r}".encode())
        digest.update(settings.data.read_bytes())
        self._settings, self._key = settings, digest.hexdigest()
        self._file = AnswerFile(kept_file(settings.output))
        self._found: dict[str, Any] = {}
        self.num_found = 0

    def __enter__(self) -> Kept:
        output = self._settings.output
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{output}: {error.strerror}") from None
        self._file.__enter__()
        try:
            records = self._file.take_up(dict.fromkeys(range(_MOST_KEPT), self._key))
        except BulkError:  # of another run
            records = {}
        if not records and output.exists() and not self._settings.replaces:
            self._file.__exit__(None, None, None)
            raise ConfigError(f"{output}: is there already; --force replaces it")
        if not records:
            self._file.path.write_bytes(b"")
        self._found = {record["name"]: record["value"] for record in records.values()}
        self.num_found = len(self._found)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is None or not self._found:
            self._file.path.unlink(missing_ok=True)
        self._file.__exit__(kind, *rest)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> Any:
        return self._found[name]

    def note(self, name: str, value: Any) -> None:
        """Keep a finding: plain values."""
        record = {"line": len(self._found), "key": self._key, "name": name, "value": value}
        with self._file.appending() as append:
            append(record)
        self._found[name] = value

    def once(self, name: str, find: Callable[[], Any]) -> Any:
        """What is kept under this name, or what `find` finds now: plain values."""
        if name not in self._found:
            self.note(name, find())
        return self._found[name]


@dataclass(slots=True)
class Material:
    """Outputs to replay, and what corpora may be built from. Written by `gather`.

    compared: the model's outputs beside the data's. has_plain_prompts: not all are rendered chats.
    held: replayed. to_serve: held-back prompts, recorded or not, in no order. parts: examples by
    corpus label, without those of either; whole: with them.
    """

    held: list[Recording] = field(default_factory=list)
    to_serve: list[tuple[int, ...]] = field(default_factory=list)
    parts: dict[str, list[Example]] = field(default_factory=dict)
    whole: dict[str, list[Example]] = field(default_factory=dict)
    num_lines: int = 0
    num_recorded: int = 0
    compared: list[Compared] = field(default_factory=list)
    has_plain_prompts: bool = False
    longest: int = 0
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tuning:
    """One run of the command, as all its parts take it.

    engine: idle, with a table of costs and all drafters. tokenizer: a tokenizers.Tokenizer. tokens:
    its table. head: seconds of the LM head for one row and for each further one
    (server.engine.probe.measure_head).
    """

    settings: TuneSettings
    engine: Engine
    tokenizer: Any
    tokens: TokenBytes
    head: tuple[float, float]
    progress: Progress
    kept: Kept
    material: Material = field(default_factory=Material)


def gather(run: Tuning, data: Data) -> None:
    """Record outputs where they are asked for, and hold a part of the data back: `material`."""
    gold, prompts, texts = data
    settings, engine, tokenizer, material = run.settings, run.engine, run.tokenizer, run.material
    material.num_lines = len(gold)
    enrichment = settings.enrichment
    # In base ids: an answer may be written without the tokens that it could have.
    outputs = [
        len(example[1] if enrichment is None else enrichment.expand(example[1]))
        for example in gold
        if example is not None
    ]
    material.longest = max(outputs, default=0)
    bound = 16 * math.ceil(1.25 * material.longest / 16) if outputs else 256
    material.max_tokens = settings.max_tokens or bound
    if settings.outputs == "gold":
        examples = [example for example in gold if example is not None]
        from drafters.replay import Recording

        one_in = max(5, math.ceil(len(examples) / _MAX_HELD))
        is_out = [is_held(i, len(examples), one_in) for i in range(len(examples))]
        pairs = list(zip(examples, is_out, strict=True))
        _hold(material, [Recording(list(p), list(o)) for (p, o), out in pairs if out])
        seen = {tuple(r.prompt_ids) for r in material.held}
        rest = [example for example, out in pairs if not out]
        material.parts[DATA] = _without(rest, seen)
        material.whole[DATA] = examples
        return
    material.has_plain_prompts = any(prompt.text is not None for prompt in prompts)
    answers = _record(run, prompts)
    own: list[Example] = [(answer.prompt.ids or (), answer.output_ids) for answer in answers]
    own_lines = [answer.prompt.line for answer in answers]
    for answer in answers:  # beside the data's output, where it has one
        gold_text = texts[answer.prompt.line]
        if gold_text is not None:
            output = tokenizer.decode(list(answer.output_ids), skip_special_tokens=True)
            hit_max = len(answer.output_ids) >= material.max_tokens
            material.compared.append(Compared(gold_text, output, hit_max))
    num = len(gold)
    held = [a for a in answers if is_held(a.prompt.line, num, _RECORDED_HELD)]
    _hold(material, map(recording_of, held or answers[::_RECORDED_HELD]))
    held_lines = {i for i in range(num) if is_held(i, num, _RECORDED_HELD)}
    for i in sorted(held_lines, key=_shuffle)[:_MAX_SERVED]:
        ids = prompts[i].ids or tuple(tokenizer.encode(prompts[i].text).ids)
        fits = len(ids) + material.max_tokens <= engine.info.max_model_len
        if ids and fits and max(ids) < engine.info.vocab_size:
            material.to_serve.append(ids)
    seen = {tuple(r.prompt_ids) for r in material.held} | set(material.to_serve)
    parts = {
        OWN: _without([e for e, i in zip(own, own_lines, strict=True) if i not in held_lines], seen)
    }
    whole = {OWN: own}
    known = [(i, example) for i, example in enumerate(gold) if example is not None]
    if known:
        parts[DATA] = _without([e for i, e in known if i not in held_lines], seen)
        whole[DATA] = [e for _, e in known]
        parts[BOTH] = parts[DATA] + parts[OWN]
        whole[BOTH] = whole[DATA] + whole[OWN]
    material.parts = {label: part for label, part in parts.items() if part}
    material.whole = whole


def read_data(
    settings: TuneSettings, tokenizer: Any, eos_token_id: int, progress: Progress
) -> Data:
    """See Data. Raises ConfigError with file and line for a row that cannot be used."""
    gold: list[Example | None] = []
    prompts: list[Prompt] = []
    texts: list[str | None] = []
    fields = settings.fields
    reader = ExampleReader(tokenizer, eos_token_id, fields=fields, render=settings.render)
    for number, row in rows(settings.data):
        where = f"{settings.data}:{number}"
        entry = _plain(row, where, settings)
        has_output = "output_ids" in entry or fields.output in entry
        if settings.outputs == "gold" or has_output:
            prompt, output = reader.of(row, where)
            if not prompt:
                raise ConfigError(f"{where}: {fields.prompt}: must be a string, not empty")
            if settings.enrichment is not None:
                prompt = settings.enrichment.read(prompt)
                output = settings.enrichment.segment(output)
            gold.append((prompt, output))
        else:
            gold.append(None)
        told = None if "output_ids" in entry else entry.get(fields.output)
        texts.append(told if isinstance(told, str) else None)
        if settings.outputs == "model":
            prompts.append(prompt_of(number, entry, settings.data, fields.prompt))
        if len(gold) % 200 == 0:
            progress("reading", len(gold), None)
    if len(gold) < _MIN_EXAMPLES:
        raise ConfigError(f"{settings.data}: {len(gold)} examples; tuning needs {_MIN_EXAMPLES}")
    return gold, prompts, texts


def _plain(row: dict[str, Any], where: str, settings: TuneSettings) -> dict[str, Any]:
    """A row of messages as prompt, its ids and output; other rows as they are."""
    if "messages" not in row:
        return row
    turn = turn_of(row, where, settings.fields)
    if settings.render is None:
        raise ConfigError(f"{where}: messages: the model has no chat template")
    try:
        prompt, ids = settings.render(turn.asked["messages"])
    except TailorError as error:
        raise ConfigError(f"{where}: {error.message}") from None
    output = {} if turn.gold is None else {settings.fields.output: turn.gold}
    return {settings.fields.prompt: prompt, "prompt_ids": ids, **output}


def check_data(data: Path, outputs: str, fields: Fields) -> None:
    """Raise ConfigError for data that cannot be used, before a model is loaded."""
    num = 0
    for number, row in rows(data):
        num += 1
        where = f"{data}:{number}"
        if "prompt_ids" in row or "output_ids" in row:
            continue
        turn = turn_of(row, where, fields)
        if outputs == "gold" and turn.gold is None:
            raise ConfigError(f"{where}: {fields.output}: must be a string")
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


def _without(examples: Sequence[Example], prompts: set[tuple[int, ...]]) -> list[Example]:
    """Examples with other prompts than those held back: repeats would flatter the corpus."""
    return [example for example in examples if tuple(example[0]) not in prompts]


def sampling_of(run: Tuning) -> SamplingParams:
    """As the task will have it."""
    settings = run.settings
    return SamplingParams(
        temperature=settings.temperature,
        max_tokens=run.material.max_tokens,
        stop=tuple(s.encode() for s in settings.stop),
        seed=settings.seed,
    )


def _record(run: Tuning, prompts: Sequence[Prompt]) -> list[Answer]:
    """The model's own outputs in the order of the data; `line` is the index of a line. Those to be
    held back come with what the model held likely. Those that are kept are not asked again."""
    from drafters.auto.likely import NUM_LIKELY

    settings, kept, engine = run.settings, run.kept, run.engine
    num = min(settings.num_prompts, len(prompts))
    picked = [i * len(prompts) // num for i in range(num)]
    # In no order, so that some of each part are there should the time run out.
    asked = [replace(prompts[i], line=i) for i in picked]
    asked.sort(key=lambda prompt: _shuffle(prompt.line))
    end_s = time.monotonic() + settings.record_s
    answers = {p.line: _answer(p, kept[_name(p)]) for p in asked if _name(p) in kept}
    failures: list[Failure] = []

    def in_time() -> Iterator[Prompt]:
        for prompt in asked:
            if prompt.line in answers:
                continue
            if _RECORDED in kept or time.monotonic() > end_s:
                return
            yield prompt

    run.progress("recording", len(answers), num)
    for answer in ask_engine(
        engine,
        run.tokenizer,
        in_time(),
        sampling_of(run),
        speculation=SpeculationParams("auto", 8),
        num_open=min(16, engine.settings.max_num_seqs),
        num_likely=lambda prompt: (
            NUM_LIKELY if is_held(prompt.line, len(prompts), _RECORDED_HELD) else 0
        ),
    ):
        if isinstance(answer, Failure):
            failures.append(answer)
        else:
            answers[answer.prompt.line] = answer
            kept.note(_name(answer.prompt), asdict(answer))
        run.progress("recording", len(answers) + len(failures), num)
    run.material.num_recorded = len(answers)
    if len(answers) < _MIN_EXAMPLES:
        reason = f": {failures[0].message}" if failures else "; give it more time"
        raise ConfigError(f"only {len(answers)} outputs were recorded{reason}")
    # What was replayed since then was replayed on these: no further ones are asked for.
    kept.once(_RECORDED, lambda: True)
    return [answers[line] for line in sorted(answers)]


_RECORDED = "recorded"


def _name(prompt: Prompt) -> str:
    """Of its answer among what is kept."""
    return f"answer {prompt.line}"


def _answer(prompt: Prompt, told: dict[str, Any]) -> Answer:
    """An answer that is kept. prompt: without ids."""
    likely = (
        TokenLogprob(row["token_id"], row["logprob"], row["rank"], tuple(map(tuple, row["top"])))
        for row in told["likely"]
    )
    return Answer(
        replace(prompt, ids=tuple(told["prompt"]["ids"])),
        tuple(told["output_ids"]),
        told["finish_reason"],
        told["text"],
        tuple(likely),
    )


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
    return {
        "compared": len(compared),
        "exact_match": _interval(right),
        "f1": _interval(overlap),
        "begins_like_the_data": round(begins, 3),
        "hit_max_tokens": round(at_limit, 3),
        "repeats_itself": round(looping, 3),
        "does_the_task": not fails,
        "suggestions": list(_suggestions(stop, stops, with_stop, at_limit, fails, can_chat)),
        "examples": [{"data": c.gold, "model": c.output} for c in dict.fromkeys(shown)],
    }


def _interval(found: Any) -> dict[str, float]:
    return {
        "mean": round(found.mean, 3), "low": round(found.low, 3), "high": round(found.high, 3)
    }  # fmt: skip


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


def _suggestions(
    stop: str | None,
    stops: Sequence[str],
    with_stop: float,
    at_limit: float,
    fails: bool,
    can_chat: bool,
) -> Iterable[str]:
    if stop is not None and stop not in stops:
        # As a shell takes it: within plain quotes \n stays two letters.
        typed = f"--stop $'{stop.encode('unicode_escape').decode()}'"
        yield f"stop: {json.dumps([stop])} would bring F1 to {with_stop:.0%} ({typed})"
    if at_limit > 0.1:
        yield (
            f"{at_limit:.0%} of the outputs were ended by max_tokens alone: "
            + ("with that stop they would end" if stop is not None else "give a stop, or raise it")
        )
    if can_chat and (fails or with_stop < 0.5):
        yield (
            "the model has a chat template and these prompts are plain text: give the data as "
            "messages"
        )
    if fails:
        yield "train the model on the task (tailor tasks train), or put examples into the prompt"


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
        lines.append(f"     data   {_short(example['data'])}")
        lines.append(f"     model  {_short(example['model'])}")
    return lines


def _short(text: str) -> str:
    shown = json.dumps(text, ensure_ascii=False)[1:-1]
    return shown if len(shown) <= _MAX_TEXT else f"{shown[:_MAX_TEXT]} ..."
