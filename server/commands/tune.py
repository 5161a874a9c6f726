"""`tailor tasks tune`: a task's file from its data, with reasons.

    data -> corpus; outputs (the data's completions, or the model's own, recorded now)
    held-back outputs -> every drafter, corpus and node budget, replayed (server.engine.forecast)
    tokens per step x this machine's cost of a step -> expected speedup -> the choice
    -> NAME.yaml, NAME.corpus and, in the file's comments, what was expected and why; where a
       slice of the LM head saves more than its windows cost, NAME.vocab and mode `exact`

What is measured is measured on examples that the corpus of that replay did not hold. The corpus
that is written holds them all.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drafters.catalog import Need, catalog, that_use
from server.commands.recorder import Answer, Failure, Prompt, ask_engine, prompt_of
from server.datasets import example_of, json_lines
from server.errors import ConfigError
from server.types import SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from drafters.base import Drafter
    from drafters.corpus import Corpus
    from drafters.replay import Recording
    from server.engine.budget import CostTable
    from server.engine.engine import Engine
    from server.engine.forecast import Forecast
    from server.token_bytes import TokenBytes
    from vocab_store.profile import VocabProfile

__all__ = ["Choice", "TuneSettings", "tune"]

Ids = Sequence[int]
Example = tuple[Ids, Ids]
Progress = Callable[[str, int, int | None], None]
MakeDrafter = Callable[[str, str, SpeculationParams], "Drafter"]
"""(drafter's name, task, speculation) -> Drafter, as the server makes it."""

_MAX_HELD = 200
_MAX_HELD_TOKENS = 12_000
_MIN_EXAMPLES = 10
_RECORDED_HELD = 4  # every so many of the recorded prompts is held back
_TIE = 0.01  # speedups this close are equal: the choice is then made by what is sturdier
_WORTH = 1.01  # below this expected speedup a task drafts nothing
_WORTH_WINDOWS = 1.05  # ... and a task's text does not come in windows
_MANY_STREAMS = 8
_BUSY = 0.5  # runnable threads a core, of others, from which on measured costs are doubtful
_MADE_BY = "Made by `tailor tasks tune`"
_OWN, _DATA, _BOTH = "own outputs", "completions", "both"


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """What the command line says.

    name: the task's. model: what server.yaml calls the model, or None for the server's first.
    data: JSONL with `prompt_field` and, for outputs "gold", `field` a line, or recordings.
    output: the task file; the corpus goes beside it. outputs: what drafts are judged by.
    num_prompts, record_s: most prompts and seconds of recording. max_tokens: None takes a bound
    from the completions, or 256 without any. budgets: most nodes a step, to be tried.
    """

    name: str
    data: Path
    output: Path
    outputs: Literal["gold", "model"]
    description: str = ""
    model: str | None = None
    field: str = "completion"
    prompt_field: str = "prompt"
    num_prompts: int = 200
    record_s: float = 180.0
    temperature: float = 0.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int = 0
    budgets: tuple[int, ...] = (4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to draft, and what it is expected to bring. corpus: which examples it holds."""

    drafter: str
    corpus: str | None
    budget: int
    forecast: Forecast


@dataclass(slots=True)
class _Material:
    """Outputs to replay, and what corpora may be built from. Written by `_gather`.

    held: replayed. parts: examples by corpus label, without the held-back ones; whole: with them.
    """

    held: list[Recording] = field(default_factory=list)
    parts: dict[str, list[Example]] = field(default_factory=dict)
    whole: dict[str, list[Example]] = field(default_factory=dict)
    num_lines: int = 0
    num_recorded: int = 0
    num_failed: int = 0
    longest: int = 0
    max_tokens: int = 0


def tune(
    settings: TuneSettings,
    engine: Engine,
    tokenizer: Any,
    tokens: TokenBytes,
    make_drafter: MakeDrafter,
    cost: CostTable,
    head: tuple[float, float],
    progress: Progress,
) -> dict[str, Any]:
    """Tune a task and write its files; returns what the command prints, as plain values.

    tokenizer: a tokenizers.Tokenizer. tokens: its table. cost: of this machine. head: seconds of
    the LM head for one row and for each further one (server.engine.probe.measure_head). Raises
    ConfigError for data that cannot be used (with file and line) and for files that cannot be
    written.
    """
    import numpy as np

    from drafters.auto.held_out import build_calibrated
    from drafters.replay import replay

    began = time.monotonic()
    load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    fingerprint = tokens.fingerprint.hex()
    material = _gather(settings, engine, tokenizer, progress)
    with tempfile.TemporaryDirectory(prefix="tailor-tune-") as scratch:
        corpora: dict[str, tuple[Path, Corpus]] = {}
        for i, (part, examples) in enumerate(material.parts.items()):
            progress("building corpora", i, len(material.parts))
            built = build_calibrated(examples, fingerprint=fingerprint)
            file = Path(scratch) / f"{i}.corpus"
            built.save(file)
            corpora[part] = (file, built)
        progress("building corpora", len(material.parts), len(material.parts))

        def drafter_of(name: str, label: str | None) -> Drafter:
            path = None if label is None else str(corpora[label][0])
            speculation = SpeculationParams(name, 16, (), path)
            made = make_drafter(name, settings.name, speculation)
            if hasattr(made, "warm_up"):
                made.warm_up()
            return made

        choices = _replay_all(
            settings, material, drafter_of, list(corpora), cost, engine.info.vocab_size, progress
        )
        best = _best(choices)
        from server.engine.forecast import forecast

        progress(f"replaying {_MANY_STREAMS} streams", 0, None)
        many = forecast(
            None if best is None else drafter_of(best.drafter, best.corpus),
            material.held,
            cost,
            max_draft_tokens=0 if best is None else best.budget,
            num_streams=_MANY_STREAMS,
            vocab_size=engine.info.vocab_size,
        )
        shown = None
        if best is not None:
            shown = replay(
                drafter_of(best.drafter, best.corpus),
                material.held,
                budget=best.budget,
                in_prefill=True,
            )
        label = best.corpus if best is not None else None
        measured = label or next(iter(corpora), None)
        why: dict[str, Any] = {}
        if measured is not None:
            entropy, k80 = corpora[measured][1].bigram_measures()
            why = {
                "corpus": measured,
                "bigram_entropy_bits": round(entropy, 2),
                "k80": k80,
                "corpus_bigram_coverage": round(
                    _bigram_coverage(corpora[measured][1], material.held), 3
                ),
            }
        why["prompt_bigram_coverage"] = round(_prompt_coverage(material.held), 3)
        if shown is not None and shown.num_accepted:
            why["accepted_by_source"] = {
                name: round(hits / shown.num_accepted, 3)
                for name, (_, hits) in sorted(shown.by_source.items(), key=lambda s: -s[1][1])
                if hits
            }
            why["propose_us"] = round(1e6 * float(np.median(shown.propose_s)), 1)

    progress("vocabulary", 0, None)
    vocabulary, profile = _vocabulary(material, best, engine, tokens, cost, head)
    profile_file = settings.output.with_suffix(".vocab")
    if profile is not None:
        _save(profile_file, profile.save)
    corpus_file = settings.output.with_suffix(".corpus")
    if label is not None:
        progress("building the corpus", 0, None)
        _save(
            corpus_file,
            build_calibrated(material.whole[label], fingerprint=fingerprint).save,
        )
    report: dict[str, Any] = {
        "task": settings.name,
        "file": str(settings.output),
        "corpus": None if label is None else str(corpus_file),
        "examples": material.num_lines,
        "held_back": len(material.held),
        "held_back_tokens": sum(len(r.output_ids) for r in material.held),
        "recorded": material.num_recorded,
        "outputs": settings.outputs,
        "drafter": "off" if best is None else best.drafter,
        "max_draft_tokens": 0 if best is None else best.budget,
        "tokens_per_step": 1.0 if best is None else round(best.forecast.tokens_per_step, 3),
        "expected_speedup": 1.0 if best is None else round(best.forecast.speedup, 3),
        "expected_decode_speedup": (
            1.0 if best is None else round(best.forecast.decode_speedup, 3)
        ),
        f"expected_speedup_{_MANY_STREAMS}_streams": round(many.speedup, 3),
        "busy": round(load, 2) if load > _BUSY else None,
        "why": why,
        "vocabulary": vocabulary,
    }
    text = _task_text(settings, material, engine, cost, choices, best, report)
    replaced = _is_ours(settings.output)
    _save(settings.output, lambda file: _write_checked(file, text, settings.name))
    if replaced:
        # What an earlier tuning wrote beside the file, and this one's file no longer names.
        for file, kept in ((profile_file, profile is not None), (corpus_file, label is not None)):
            if not kept:
                _remove(file)
    report["seconds"] = round(time.monotonic() - began, 1)
    return report


# --- material -------------------------------------------------------------------------------------


def _gather(
    settings: TuneSettings, engine: Engine, tokenizer: Any, progress: Progress
) -> _Material:
    """Read the data, record outputs where they are asked for, and hold a part back."""
    eos_token_id = engine.info.eos_token_ids[0]
    gold: list[Example | None] = []
    prompts: list[Prompt] = []
    for number, entry in json_lines(settings.data):
        where = f"{settings.data}:{number}"
        has_output = "output_ids" in entry or settings.field in entry
        if settings.outputs == "gold" or has_output:
            gold.append(
                example_of(
                    entry, where, settings.field, settings.prompt_field, tokenizer, eos_token_id
                )
            )
            if not gold[-1][0]:  # type: ignore[index]
                raise ConfigError(f"{where}: {settings.prompt_field}: must be a string, not empty")
        else:
            gold.append(None)
        if settings.outputs == "model":
            prompts.append(prompt_of(number, entry, settings.data, settings.prompt_field))
        if len(gold) % 200 == 0:
            progress("reading", len(gold), None)
    if len(gold) < _MIN_EXAMPLES:
        raise ConfigError(f"{settings.data}: {len(gold)} examples; tuning needs {_MIN_EXAMPLES}")
    material = _Material(num_lines=len(gold))
    outputs = [len(example[1]) for example in gold if example is not None]
    material.longest = max(outputs, default=0)
    bound = 16 * math.ceil(1.25 * material.longest / 16) if outputs else 256
    material.max_tokens = settings.max_tokens or bound
    if settings.outputs == "gold":
        examples = [example for example in gold if example is not None]
        step = max(5, math.ceil(len(examples) / _MAX_HELD))
        held = set(range(step - 1, len(examples), step))
        _hold(material, [examples[i] for i in sorted(held)])
        seen = {tuple(r.prompt_ids) for r in material.held}
        material.parts[_DATA] = _without(examples, seen)
        material.whole[_DATA] = examples
        return material
    own, own_lines = _record(settings, material, engine, tokenizer, prompts, progress)
    held_own = [example for i, example in enumerate(own) if i % _RECORDED_HELD == 0]
    _hold(material, held_own)
    seen = {tuple(r.prompt_ids) for r in material.held}
    held_lines = {own_lines[i] for i in range(0, len(own), _RECORDED_HELD)}
    parts = {_OWN: _without(own, seen)}
    whole = {_OWN: own}
    known = [(i, example) for i, example in enumerate(gold) if example is not None]
    if known:
        same = {tuple(gold[i][0]) for i in held_lines if gold[i] is not None}  # type: ignore[index]
        parts[_DATA] = [e for i, e in known if i not in held_lines and tuple(e[0]) not in same]
        whole[_DATA] = [e for _, e in known]
        parts[_BOTH] = parts[_DATA] + parts[_OWN]
        whole[_BOTH] = whole[_DATA] + whole[_OWN]
    material.parts = {label: part for label, part in parts.items() if part}
    material.whole = whole
    return material


def _hold(material: _Material, examples: Iterable[Example]) -> None:
    from drafters.replay import Recording

    num_tokens = 0
    for prompt, output in examples:
        if prompt and output and (num_tokens < _MAX_HELD_TOKENS or not material.held):
            material.held.append(Recording(list(prompt), list(output)))
            num_tokens += len(output)
    if not material.held:
        raise ConfigError("no held-back example has a prompt and an output")


def _without(examples: Sequence[Example], prompts: set[tuple[int, ...]]) -> list[Example]:
    """Examples with other prompts than those held back: repeats would flatter the corpus."""
    return [example for example in examples if tuple(example[0]) not in prompts]


def _record(
    settings: TuneSettings,
    material: _Material,
    engine: Engine,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    progress: Progress,
) -> tuple[list[Example], list[int]]:
    """(examples of the model's own outputs, the index of the line of each), in the data's order."""
    num = min(settings.num_prompts, len(prompts))
    picked = [i * len(prompts) // num for i in range(num)]
    # Every fourth is held back: the first pass takes some of each, should the time run out.
    asked = [replace(prompts[i], line=i) for i in picked]
    asked.sort(key=lambda prompt: _shuffle(prompt.line))
    end_s = time.monotonic() + settings.record_s

    def in_time() -> Iterator[Prompt]:
        for prompt in asked:
            if time.monotonic() > end_s:
                return
            yield prompt

    sampling = SamplingParams(
        temperature=settings.temperature,
        max_tokens=material.max_tokens,
        stop=tuple(s.encode() for s in settings.stop),
        seed=settings.seed,
    )
    answers: dict[int, Answer] = {}
    failures: list[Failure] = []
    progress("recording", 0, num)
    for answer in ask_engine(
        engine,
        tokenizer,
        in_time(),
        sampling,
        speculation=SpeculationParams("auto", 8),
        num_open=min(16, engine.settings.max_num_seqs),
    ):
        if isinstance(answer, Failure):
            failures.append(answer)
        else:
            answers[answer.prompt.line] = answer
        progress("recording", len(answers) + len(failures), num)
    material.num_recorded, material.num_failed = len(answers), len(failures)
    if len(answers) < _MIN_EXAMPLES:
        reason = f": {failures[0].message}" if failures else "; give it more time"
        raise ConfigError(f"only {len(answers)} outputs were recorded{reason}")
    lines = sorted(answers)
    examples: list[Example] = [(answers[i].prompt.ids or (), answers[i].output_ids) for i in lines]
    return examples, lines


def _shuffle(number: int) -> int:
    """An order without meaning that is the same every time."""
    return (number * 0x9E3779B1) & 0xFFFFFFFF


# --- the choice -----------------------------------------------------------------------------------


def _replay_all(
    settings: TuneSettings,
    material: _Material,
    drafter_of: Callable[[str, str | None], Drafter],
    corpora: Sequence[str],
    cost: CostTable,
    vocab_size: int,
    progress: Progress,
) -> list[Choice]:
    """Every drafter with every corpus it can use, at every budget; one stream."""
    from server.engine.forecast import forecast

    budgets = settings.budgets
    cells: list[tuple[str, str | None, int]] = [
        (spec.name, None, n) for spec in catalog().values() if spec.without_corpus for n in budgets
    ]
    cells += [
        (name, label, n) for name in that_use(Need.CORPUS) for label in corpora for n in budgets
    ]
    choices = []
    for i, (name, label, budget) in enumerate(cells):
        progress("replaying drafters", i, len(cells))
        expected = forecast(
            drafter_of(name, label),  # anew: a drafter learns from what it sees
            material.held,
            cost,
            max_draft_tokens=budget,
            vocab_size=vocab_size,
        )
        choices.append(Choice(name, label, budget, expected))
    progress("replaying drafters", len(cells), len(cells))
    return choices


def _best(choices: Sequence[Choice]) -> Choice | None:
    """The choice with the highest expected speedup; None where nothing is worth its drafts.

    Among equals `auto`, whose chances are calibrated while it runs, then fewer nodes, then no
    corpus, then the largest one.
    """
    top = max(choice.forecast.speedup for choice in choices)
    if top < _WORTH:
        return None
    near = [choice for choice in choices if choice.forecast.speedup >= top * (1.0 - _TIE)]
    sizes = {None: 0, _BOTH: 1, _DATA: 2, _OWN: 3}
    return min(near, key=lambda c: (c.drafter != "auto", c.budget, sizes.get(c.corpus, 9)))


def _vocabulary(
    material: _Material,
    best: Choice | None,
    engine: Engine,
    tokens: TokenBytes,
    cost: CostTable,
    head: tuple[float, float],
) -> tuple[dict[str, Any], VocabProfile | None]:
    """What a slice of the LM head would miss and save in the chosen way of drafting (VocabTailor's
    Algorithm 1, vocab_store.cost), and the profile for `exact` where that is worth its windows.

    Costs are per token, as server.engine.exact_control takes them: a step with drafts has more rows
    and emits more tokens, and a window still reads the whole head once.
    """
    import numpy as np

    from vocab_store.cost import HeadCosts, best_fill, slice_head_s
    from vocab_store.profile import Example as Document
    from vocab_store.profile import ProfileSettings, build_profile
    from vocab_store.slice import RequiredIds

    def documents(examples: Iterable[Example]) -> list[Document]:
        return [Document(np.asarray(p, np.int32), np.asarray(o, np.int32)) for p, o in examples]

    label = next((name for name in (_BOTH, _DATA, _OWN) if material.parts.get(name)), None)
    if label is None:
        return {}, None
    profile = build_profile(
        documents(material.parts[label]),
        tokens,
        RequiredIds.from_tokens(tokens, engine.info.eos_token_ids),
        ProfileSettings(),
        heldout=documents((r.prompt_ids, r.output_ids) for r in material.held),
    )
    held = profile.manifest["report"]["heldout"]
    num_rows, per_step = 1.0, 1.0
    if best is not None:
        num_rows += best.forecast.num_rows / max(1, best.forecast.num_steps)
        per_step = best.forecast.tokens_per_step
    head_s = head[0] + head[1] * (num_rows - 1.0)
    step_s = max(cost.cost(num_rows), 1.01 * head_s)
    costs = HeadCosts(
        body_s=(step_s - head_s) / per_step,
        full_s=head_s / per_step,
        vocab_size=tokens.vocab_size,
        verify_s=head[0],
        verify_row_s=head[1],
    )
    fill = best_fill(
        costs,
        profile.slice.num_ids,
        profile.miss_rate or 0.0,
        profile.fill_gains,
        num_dynamic=held["mean_dynamic"],
    )
    slice_s = costs.body_s + slice_head_s(costs, profile.slice.num_ids + held["mean_dynamic"])
    speedup = fill.full_s / fill.cost_s
    # Slices are there on the CPU only; text that comes in windows should be worth the wait.
    exact = engine.info.device == "cpu" and speedup >= _WORTH_WINDOWS
    return {
        "mode": "exact" if exact else "full",
        "ids": profile.slice.num_ids,
        "share": round(profile.slice.share, 4),
        "miss_rate": round(profile.miss_rate or 0.0, 5),
        "outputs_with_a_miss": round(held["num_documents_missed"] / held["num_documents"], 3),
        "head_share": round(head_s / step_s, 3),
        "exact_speedup": round(speedup, 3),
        "exact_ids": fill.num_ids,
        "exact_window": fill.window,
        "slice_speedup": round(fill.full_s / slice_s, 3),
    }, (profile if exact else None)


def _bigram_coverage(corpus: Corpus, held: Sequence[Recording]) -> float:
    """Share of the held-back outputs' token bigrams that the corpus holds."""
    grams, _ = corpus.count_grams(2)
    known = set(map(tuple, grams.tolist()))
    pairs = [pair for r in held for pair in zip(r.output_ids, r.output_ids[1:], strict=False)]
    return sum(pair in known for pair in pairs) / max(1, len(pairs))


def _prompt_coverage(held: Sequence[Recording]) -> float:
    """Share of the held-back outputs' token bigrams that their own prompts hold."""
    hits = num = 0
    for r in held:
        known = set(zip(r.prompt_ids, r.prompt_ids[1:], strict=False))
        pairs = list(zip(r.output_ids, r.output_ids[1:], strict=False))
        hits += sum(pair in known for pair in pairs)
        num += len(pairs)
    return hits / max(1, num)


# --- the file -------------------------------------------------------------------------------------


def _task_text(
    settings: TuneSettings,
    material: _Material,
    engine: Engine,
    cost: CostTable,
    choices: Sequence[Choice],
    best: Choice | None,
    report: dict[str, Any],
) -> str:
    """The YAML text: reasons as comments, then what the server reads."""
    from server import __version__

    data = hashlib.sha256(settings.data.read_bytes()).hexdigest()[:12]
    outputs = (
        f"the data's {settings.field}s"
        if settings.outputs == "gold"
        else f"the model's own for {material.num_recorded} of its prompts"
    )
    lines = [
        f"{_MADE_BY} {__version__} on {datetime.date.today().isoformat()}.",
        f"data      {settings.data.name} ({data}), {material.num_lines} lines",
        f"model     {engine.info.name} ({engine.info.fingerprint[:12]}, {engine.info.dtype})",
        f"outputs   {outputs}; {len(material.held)} held back and replayed, "
        f"{report['held_back_tokens']} tokens",
        f"cost      1 row {cost.cost(1) * 1e3:.2f} ms, 8 rows {cost.cost(8) * 1e3:.2f} ms, "
        f"16 rows {cost.cost(16) * 1e3:.2f} ms on {engine.info.device}",
        "",
    ]
    if report["busy"] is not None:
        lines.append(
            f"The machine was busy (load {report['busy']:.1f} a core): tune again when it is not, "
            "if the speedups matter."
        )
    if best is None:
        lines.append(
            f"Nothing is worth drafting here: no drafter is expected to gain {_WORTH - 1:.0%}."
        )
    else:
        chosen = best.forecast
        lines.append(
            f"Expected: {chosen.tokens_per_step:.2f} tokens a step, "
            f"{chosen.decode_speedup:.2f}x in decoding, {chosen.speedup:.2f}x a whole request "
            f"(one at a time); {report[f'expected_speedup_{_MANY_STREAMS}_streams']:.2f}x with "
            f"{_MANY_STREAMS} at once."
        )
    lines += _why_lines(report["why"])
    lines += _vocabulary_lines(report["vocabulary"])
    lines += ["", "Expected tokens a step / speedup of a request, by most draft tokens a step:"]
    lines += _table(settings, choices, best)
    body: list[str] = [f"name: {json.dumps(settings.name)}"]
    if settings.description:
        body.append(f"description: {json.dumps(settings.description, ensure_ascii=False)}")
    if settings.model is not None:
        body.append(f"model: {json.dumps(settings.model)}")
    body += [
        "sampling:",
        f"  temperature: {settings.temperature:g}",
        f"  max_tokens: {material.max_tokens}"
        + (f"  # the longest output has {material.longest}" if material.longest else ""),
    ]
    if settings.stop:
        body.append(f"  stop: {json.dumps(list(settings.stop), ensure_ascii=False)}")
    body.append("speculation:")
    if best is None:
        body.append("  drafter: off")
    else:
        body += [f"  drafter: {best.drafter}", f"  max_draft_tokens: {best.budget}"]
    if report["corpus"] is not None:
        body.append(f"  corpus: {json.dumps(Path(report['corpus']).name)}")
    if report["vocabulary"].get("mode") == "exact":
        profile = settings.output.with_suffix(".vocab").name
        body += ["vocabulary:", "  mode: exact", f"  profile: {json.dumps(profile)}"]
    comments = [f"# {line}".rstrip() for line in lines]
    return "\n".join([*comments, *body]) + "\n"


def _why_lines(why: dict[str, Any]) -> list[str]:
    lines = []
    if "bigram_entropy_bits" in why:
        lines.append(
            f"Why: bigram entropy {why['bigram_entropy_bits']:.2f} bits, K80 {why['k80']} (the "
            f"corpus of {why['corpus']}; TASC, table 1, of tokens): the lower, the more it repeats."
        )
        lines.append(
            f"     {why['corpus_bigram_coverage']:.0%} of the held-back outputs' bigrams are in "
            f"the corpus, {why['prompt_bigram_coverage']:.0%} in their own prompts."
        )
    else:
        lines.append(
            f"Why: {why['prompt_bigram_coverage']:.0%} of the outputs' bigrams are in the prompts."
        )
    if "accepted_by_source" in why:
        shares = ", ".join(
            f"{name} {share:.0%}" for name, share in why["accepted_by_source"].items()
        )
        lines.append(f"     Accepted drafts came from: {shares}.")
    return lines


def _vocabulary_lines(vocabulary: dict[str, Any]) -> list[str]:
    if not vocabulary:
        return []
    return [
        f"Vocabulary: {vocabulary['ids']} ids ({vocabulary['share']:.1%}) hold all but "
        f"{vocabulary['miss_rate']:.2%} of the held-back tokens; the head is "
        f"{vocabulary['head_share']:.0%} of a step.",
        f"     Beside these drafts `exact` should bring {vocabulary['exact_speedup']:.2f}x, "
        f"`slice`, which may change tokens, {vocabulary['slice_speedup']:.2f}x.",
    ]


def _table(settings: TuneSettings, choices: Sequence[Choice], best: Choice | None) -> list[str]:
    rows: dict[tuple[str, str | None], dict[int, str]] = {}
    for choice in choices:
        mark = "*" if choice is best else ""
        rows.setdefault((choice.drafter, choice.corpus), {})[choice.budget] = (
            f"{choice.forecast.tokens_per_step:.2f} / {choice.forecast.speedup:.2f}{mark}"
        )
    lines = ["drafter  corpus        " + "".join(f"{budget:<14}" for budget in settings.budgets)]
    for (name, label), cells in rows.items():
        lines.append(
            f"{name:<8} {label or '-':<13} "
            + "".join(f"{cells[budget]:<14}" for budget in settings.budgets)
        )
    return lines


def _write_checked(file: Path, text: str, name: str) -> None:
    """Write the task and read it back as the server will."""
    from server.config import load_task

    file.write_text(text, encoding="utf-8")
    if load_task(file).name != name:
        raise AssertionError(f"{file} does not hold the task {name}")


def _is_ours(file: Path) -> bool:
    """Whether there is a task file that an earlier tuning wrote."""
    try:
        return file.read_text(encoding="utf-8").startswith(f"# {_MADE_BY}")
    except (OSError, UnicodeDecodeError):
        return False


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None


def _save(path: Path, write: Callable[[Path], None]) -> None:
    """`write` to a temporary file beside `path`, then put it in its place."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as folder:
            file = Path(folder) / path.name
            write(file)
            file.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
