"""`tailor tasks tune`: a task's file from its data, with reasons.

    data -> corpus; outputs (the data's completions, or the model's own, recorded now)
    the model's outputs beside the data's -> how good they are, and what would make them better
    held-back outputs -> every drafter, corpus and node budget, replayed (tune_choice)
    tokens per step x what this engine's steps took -> expected speedup -> the choice
    held-back prompts, served with the chosen drafts and without -> what is told
    -> NAME.yaml, NAME.corpus and, in the file's comments, what was expected and why; where a
       slice of the LM head saves more than its verifications cost, NAME.vocab and mode `exact`

What is measured is measured on examples that the corpus of that replay did not hold. The corpus
that is written holds them all. The task file is there once drafts are chosen, and what was found
is kept in NAME.yaml.partial until the end: the same command goes on where it was stopped
(record.Kept).
"""

from __future__ import annotations

import datetime
import hashlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from drafters.auto.held_out import build_calibrated
from drafters.corpus import Corpus
from server import __version__
from server.commands.options import writing
from server.commands.record import Kept
from server.commands.tune_choice import (
    FURTHER,
    MANY_STREAMS,
    WORTH,
    Choice,
    Expected,
    Pricing,
    best_of,
    bigram_coverage,
    corpus_fit,
    expected_gain,
    forecast_gains,
    measured_gains,
    replay_all,
    vocabulary,
)
from server.commands.tune_data import (
    BUSY,
    DATA,
    OWN,
    Example,
    Material,
    TaskFile,
    Tuning,
    gather,
    quality,
    quality_lines,
    read_data,
    refuse_to_replace,
)
from server.config import load_task
from server.engine.step_times import CostTable
from server.types import CORPUS_FITS
from vocab_store.entropy import measure


def tune(run: Tuning) -> dict[str, Any]:
    """Tune a task and write its files; returns what the command prints, as plain values.

    Raises ConfigError for data that cannot be used (with file and line) and for files that cannot
    be written.
    """
    began, file, material, progress = time.monotonic(), run.file, run.material, run.progress
    data = read_data(run)
    with (
        Kept(file.place, run.identity, is_dropped=True) as run.kept,
        tempfile.TemporaryDirectory(prefix="tailor-tune-") as scratch,
    ):
        if run.kept.num_found:
            progress(f"going on with {run.kept.num_found} findings of an earlier run", 0, None)
        else:
            refuse_to_replace(file.place, file.force)
        gather(run, data)
        for i, (part, examples) in enumerate(material.parts.items()):
            progress("building corpora", i, len(material.parts))
            built, path = _corpus(run, examples), Path(scratch) / f"{i}.corpus"
            with writing(path):
                built.save(path)
            material.corpora[part] = (path, built)
        progress("building corpora", len(material.parts), len(material.parts))
        pricing = Pricing(run.engine, run.head[1])
        choices = replay_all(run, pricing)
        best = best_of(choices)
        label = best.corpus if best is not None else None
        progress(f"replaying {MANY_STREAMS} streams", 0, None)
        forecasts = forecast_gains(run, best, pricing)
        gains = {clients: expected_gain(told) for clients, told in forecasts.items()}
        report = _report(run, best, gains)
        report["why"] = corpus_fit(choices) | _why(best, material)
        told = partial(task_text, run, pricing.cost, choices, best)
        # The choice is made: from here on there is a task file, whatever ends the run.
        was_ours = run.kept.once("was ours", lambda: is_ours(file.place))
        if label is not None:
            progress("building the corpus", 0, None)
            corpus_file = file.place.with_suffix(".corpus")
            with writing(corpus_file):
                _corpus(run, material.whole[label]).save(corpus_file)
        _write(file, told(report), {".corpus": label is not None} if was_ours else {})
        if best is not None:
            report |= _gains_told(measured_gains(run, best, forecasts))
        progress("vocabulary", 0, None)
        slices, profile = vocabulary(run, best, pricing.cost)
        report["vocabulary"] = slices
        if run.compare_forms is not None:
            held = [(r.prompt_ids, r.output_ids) for r in material.held]
            compared = partial(run.compare_forms, material.whole.get(DATA) or held)
            report["weights"] = run.kept.once("forms", compared)
        report["is_whole"] = True
        if profile is not None:
            profile_file = file.place.with_suffix(".vocab")
            with writing(profile_file):
                profile.save(profile_file)
        _write(file, told(report), {".vocab": profile is not None} if was_ours else {})
    report["seconds"] = round(time.monotonic() - began, 1)
    return report


def _corpus(run: Tuning, examples: Sequence[Example]) -> Corpus:
    """Of these examples, their prompts as drafters read them: in the model's own tokens."""
    own = run.enrichment
    read = list if own is None else own.segment
    spelled = ((read(prompt), list(output)) for prompt, output in examples)
    return build_calibrated(spelled, fingerprint=run.tokens.fingerprint.hex())


def _why(best: Choice | None, material: Material) -> dict[str, Any]:
    """What explains the choice: how the outputs repeat themselves, and where drafts came from."""
    why: dict[str, Any] = {}
    measured = (best.corpus if best is not None else None) or next(iter(material.corpora), None)
    if measured is not None:
        corpus = material.corpora[measured][1]
        bigrams = measure(corpus.count_grams(2)[1].tolist())
        why = {
            "corpus": measured,
            "bigram_entropy_bits": round(bigrams.bits, 2),
            "k80": bigrams.k80,
            "corpus_bigram_coverage": round(bigram_coverage(material.held, corpus), 3),
        }
    why["prompt_bigram_coverage"] = round(bigram_coverage(material.held), 3)
    accepted = 0 if best is None else sum(hits for _, hits in best.forecast.by_source.values())
    if best is not None and accepted:
        why["accepted_by_source"] = {
            name: round(hits / accepted, 3)
            for name, (_, hits) in sorted(best.forecast.by_source.items(), key=lambda s: -s[1][1])
            if hits
        }
    return why


def _report(run: Tuning, best: Choice | None, gains: dict[int, Expected]) -> dict[str, Any]:
    file, material = run.file, run.material
    corpus = None if best is None or best.corpus is None else file.place.with_suffix(".corpus")
    return {
        "task": file.name,
        "file": str(file.place),
        "corpus": None if corpus is None else str(corpus),
        "examples": material.num_lines,
        "held_back": len(material.held),
        "held_back_tokens": sum(len(r.output_ids) for r in material.held),
        "recorded": material.num_recorded,
        "outputs": run.recording.outputs,
        "quality": quality(
            material.compared,
            stops=run.stop,
            can_chat=run.render is not None and material.has_plain_prompts,
        ),
        "drafter": "off" if best is None else best.drafter,
        "max_draft_tokens": 0 if best is None else best.budget,
        "busy": round(run.busy, 2) if run.busy > BUSY else None,
        "vocabulary": {},
        "weights": {},
        "is_whole": False,
        **_gains_told(gains),
    }


def _gains_told(gains: Mapping[int, Expected]) -> dict[str, Any]:
    """What a report says of them. Empty: nothing is drafted."""
    found: dict[str, Any] = {}
    for clients, suffix in ((1, ""), (MANY_STREAMS, f"_{MANY_STREAMS}_streams")):
        gain = gains.get(clients, Expected())
        found[f"expected_speedup{suffix}"] = round(gain.speedup, 3)
        found[f"expected_range{suffix}"] = [round(gain.low, 3), round(gain.high, 3)]
        found[f"expected_of{suffix}"] = gain.num_served
    return found | {"tokens_per_step": round(gains.get(1, Expected()).tokens_per_step, 3)}


def _write(task: TaskFile, text: str, is_named: Mapping[str, bool]) -> None:
    """The task file. is_named: of the files of an earlier tuning, by suffix; others go."""
    write_checked(task.place, text, task.name)
    for suffix, stays in is_named.items():
        file = task.place.with_suffix(suffix)
        with writing(file):
            if not stays:
                file.unlink(missing_ok=True)


# --- the file -------------------------------------------------------------------------------------


def task_text(
    run: Tuning,
    cost: CostTable,
    choices: Sequence[Choice],
    best: Choice | None,
    report: dict[str, Any],
) -> str:
    """The YAML text: reasons as comments, then what the server reads."""
    lines = _origin_lines(run, cost, report["held_back_tokens"])
    if not report["is_whole"]:
        lines.append("Not whole: what drafts gain is forecast. The same command measures it.")
    lines += quality_lines(report["quality"])
    if report["busy"] is not None:
        lines.append(
            f"Others used {report['busy']:.0%} of the machine: the speedups are not to be believed "
            "and mode `exact` was not decided. Tune again when it is idle."
        )
    if best is None:
        lines.append(
            f"Nothing is worth drafting here: no drafter is expected to gain {WORTH - 1:.0%}."
        )
    else:
        lines += _expected_lines(report)
    lines += _why_lines(report["why"])
    lines += _vocabulary_lines(report["vocabulary"])
    lines += form_lines(report["weights"], run.engine.info.dtype)
    lines += ["", "Expected tokens a decode step / speedup of a request, by most draft tokens:"]
    lines += _table(run.budgets, choices, best)
    comments = [f"# {_printable(line)}".rstrip() for line in lines]
    return "\n".join([*comments, *_body(run, best, report)]) + "\n"


def _expected_lines(report: dict[str, Any]) -> list[str]:
    """The speedups with their ranges, of what, and how they are known."""

    def told(name: str) -> str:
        low, high = report[f"expected_range{name}"]
        return f"{report[f'expected_speedup{name}']:.2f}x ({low:.2f} to {high:.2f})"

    many = f"_{MANY_STREAMS}_streams"
    alone, crowd = report["expected_of"], report[f"expected_of{many}"]
    lines = [
        f"Expected: {told('')} a whole request, one at a time; {told(many)} with {MANY_STREAMS} at "
        "once.",
    ]
    if alone or crowd:
        nums = " and ".join(str(num) for num in (alone, crowd) if num)
        lines.append(
            f"     Measured: {nums} held-back prompts served with these drafts and without, the "
            "first after a start; answers are learned."
        )
    if not (alone and crowd):
        lines.append(
            "     Forecast: held-back outputs replayed, the first after a start, nothing learned."
        )
    lines.append(
        f"     {report['tokens_per_step']:.2f} tokens a decode step. {FURTHER} requests like these "
        "lie in the range in 19 of 20 cases."
    )
    return lines


def _printable(line: str) -> str:
    """The line as YAML may hold it: what a model wrote can have control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _origin_lines(run: Tuning, cost: CostTable, num_held_tokens: int) -> list[str]:
    """What the task was tuned on."""
    material, info = run.material, run.engine.info
    data = hashlib.sha256(run.data.read_bytes()).hexdigest()[:12]
    outputs = (
        f"the data's {run.fields.field}s"
        if run.recording.outputs == "gold"
        else f"the model's own for {material.num_recorded} of its prompts"
    )
    return [
        f"Made by `tailor tasks tune` {__version__} on {datetime.date.today().isoformat()}.",
        f"data      {run.data.name} ({data}), {material.num_lines} lines",
        f"model     {info.name} ({info.fingerprint[:12]}, {info.dtype})",
        f"outputs   {outputs}; {len(material.held)} held back and replayed, "
        f"{num_held_tokens} tokens",
        f"cost      1 row {cost.cost(1) * 1e3:.2f} ms, 8 rows {cost.cost(8) * 1e3:.2f} ms, "
        f"16 rows {cost.cost(16) * 1e3:.2f} ms on {info.device}",
        "",
    ]


def _body(run: Tuning, best: Choice | None, report: dict[str, Any]) -> list[str]:
    """The lines that the server reads."""
    longest, drafter = run.material.longest, ["drafter: off"]
    if best is not None:
        drafter = [f"drafter: {best.drafter}", f"max_draft_tokens: {best.budget}"]
        if best.options:
            options = ", ".join(f"{key}: {value:g}" for key, value in best.options)
            drafter.append(f"{best.drafter}: {{{options}}}")
    told = f"  # the longest output has {longest}" if longest else ""
    return run.file.lines(
        max_tokens=f"{run.material.max_tokens}{told}",
        drafter=drafter,
        stop=run.stop,
        temperature=run.sampling.temperature,
        has_corpus=report["corpus"] is not None,
        is_exact=report["vocabulary"].get("mode") == "exact",
    )


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
    gains = {name: f"{gain:.2f}" for name, gain in why.get("corpus_gains", {}).items()}
    if why.get("corpus_fits") is False:
        lines.append(
            "     This corpus does not fit: the held-back outputs do not follow it. `auto` makes "
            f"{why['corpus_gain']:.2f} times the tokens a step that it makes without."
        )
    elif why.get("corpus_gains", {}).get(DATA, CORPUS_FITS) < CORPUS_FITS:
        lines.append(
            "     The data's completions do not fit as a corpus: the model's outputs do not follow "
            f"them. `auto` makes {gains[DATA]} times the tokens a step that it makes without; with "
            f"its own outputs {gains.get(OWN, '-')} times."
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


def form_lines(found: dict[str, dict[str, float]], served: str) -> list[str]:
    """The table as lines for people to read, with the served form marked."""
    if not found:
        return []
    lines = [
        "Weights on this data (`weights`): perplexity, outputs that are whole, ms a step of 1 and "
        "16 rows:"
    ]
    for form, figures in found.items():
        lines.append(
            f"     {form:11} {figures['perplexity']:9.3f} {figures['exact']:6.1%} "
            f"{figures['step_ms']:7.1f} {figures['step_16_rows_ms']:7.1f}"
            + ("  as tuned" if form == served else "")
        )
    return lines


def _table(budgets: Sequence[int], choices: Sequence[Choice], best: Choice | None) -> list[str]:
    rows: dict[tuple[str, str | None], dict[int, str]] = {}
    for choice in choices:
        mark = "*" if choice is best else ""
        rows.setdefault((choice.title, choice.corpus), {})[choice.budget] = (
            f"{choice.forecast.tokens_per_step:.2f} / {choice.forecast.speedup:.2f}{mark}"
        )
    wide = max(8, *(len(name) for name, _ in rows))
    lines = [f"{'drafter':<{wide}} corpus        " + "".join(f"{budget:<14}" for budget in budgets)]
    for (name, label), cells in rows.items():
        lines.append(
            f"{name:<{wide}} {label or '-':<13} "
            + "".join(f"{cells.get(budget, '-'):<14}" for budget in budgets)
        )
    return lines


def write_checked(file: Path, text: str, name: str) -> None:
    """Write a task's file once it was read, beside its place, as the server will. Raises
    ConfigError."""
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.stem}-") as folder:
            made = Path(folder) / file.name
            made.write_text(text, encoding="utf-8")
            if load_task(made).name != name:
                raise AssertionError(f"{file} does not hold the task {name}")
            made.replace(file)


def is_ours(file: Path) -> bool:
    """Whether there is a task file that a command of `tailor tasks` wrote."""
    try:
        return file.read_text(encoding="utf-8").startswith("# Made by `tailor tasks ")
    except (OSError, UnicodeDecodeError):
        return False
