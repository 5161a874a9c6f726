"""`tailor tasks tune`: a task's file from its data, with reasons.

    data -> corpus; outputs (the data's completions, or the model's own, recorded now)
    the model's outputs beside the data's -> how good they are, and what would make them better
    held-back outputs -> every drafter, corpus and node budget, replayed (server.engine.forecast)
    tokens per step x this machine's cost of a step -> expected speedup -> the choice
    held-back prompts, served with the chosen drafts and without -> what is told (tune_gain)
    -> NAME.yaml, NAME.corpus and, in the file's comments, what was expected and why; where a
       slice of the LM head saves more than its verifications cost, NAME.vocab and mode `exact`

What is measured is measured on examples that the corpus of that replay did not hold. The corpus
that is written holds them all.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.commands.tune_choice import (
    Choice,
    DrafterOf,
    Options,
    best_of,
    bigram_coverage,
    corpus_fit,
    prompt_coverage,
    replay_all,
    vocabulary,
)
from server.commands.tune_file import (
    is_ours,
    remove,
    save,
    task_text,
    write_checked,
)
from server.commands.tune_gain import MANY_STREAMS, Expected, expected_gains
from server.commands.tune_machine import served_by_engine
from server.commands.tune_material import (
    BUSY,
    DATA,
    Example,
    Material,
    Progress,
    TuneSettings,
    gather,
    sampling_of,
)
from server.commands.tune_quality import quality
from server.types import SpeculationParams

if TYPE_CHECKING:
    from drafters.base import Drafter
    from drafters.corpus import Corpus
    from server.engine.engine import Engine
    from server.engine.served_gain import MakeDrafter
    from server.engine.step_times import CostTable
    from server.token_bytes import TokenBytes
    from vocab_store.profile import VocabProfile

Corpora = dict[str, "tuple[Path, Corpus]"]
"""The corpora that are tried, by what they hold: their files and themselves."""


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
    from server.engine.served_gain import GainMeter
    from server.engine.stops import StopTable

    began = time.monotonic()
    fingerprint = tokens.fingerprint.hex()
    material = gather(settings, engine, tokenizer, progress)
    with tempfile.TemporaryDirectory(prefix="tailor-tune-") as scratch:
        corpora = _build_corpora(settings, material, Path(scratch), fingerprint, progress)

        def drafter_of(name: str, label: str | None, options: Options) -> Drafter:
            path = None if label is None else str(corpora[label][0])
            given = tuple((f"{name}.{key}", value) for key, value in options)
            return make_drafter(name, settings.name, SpeculationParams(name, 16, given, path), None)

        progress("measuring the host's part of a step", 0, None)
        served_by = served_by_engine(engine, cost, material.held)
        choices = replay_all(settings, material, drafter_of, list(corpora), served_by, progress)
        best = best_of(choices)
        meter = GainMeter(
            engine, make_drafter, cost, settings.name, sampling_of(settings, material), fingerprint,
            StopTable(tokens.offsets, tokens.blob, (int(i) for i in tokens.special_ids)),
        )  # fmt: skip
        corpus = str(corpora[best.corpus][0]) if best is not None and best.corpus else None
        gains = expected_gains(
            settings, material, best, drafter_of, served_by, meter, corpus, progress
        )
        why = corpus_fit(choices) | _why(best, material, drafter_of, corpora)
    progress("vocabulary", 0, None)
    slices, profile = vocabulary(material, best, engine, tokens, cost, head, settings)
    label = best.corpus if best is not None else None
    report = _report(settings, material, best, label, gains)
    report |= {"why": why, "vocabulary": slices, "weights": {}}
    if settings.compare_forms is not None:
        shown = material.whole.get(DATA) or [(r.prompt_ids, r.output_ids) for r in material.held]
        report["weights"] = settings.compare_forms(shown)
    text = task_text(settings, material, engine, cost, choices, best, report)
    _write(settings, material, text, label, profile, fingerprint, progress)
    report["seconds"] = round(time.monotonic() - began, 1)
    return report


def _corpus(settings: TuneSettings, examples: Sequence[Example], fingerprint: str) -> Corpus:
    """Of these examples, their prompts as drafters read them: in the model's own tokens."""
    from drafters.auto.held_out import build_calibrated

    own = settings.enrichment
    read = list if own is None else own.segment
    spelled = ((read(prompt), list(output)) for prompt, output in examples)
    return build_calibrated(spelled, fingerprint=fingerprint)


def _build_corpora(
    settings: TuneSettings,
    material: Material,
    scratch: Path,
    fingerprint: str,
    progress: Progress,
) -> Corpora:
    """A corpus of each part of the data, without what is held back, in files of `scratch`."""
    corpora: Corpora = {}
    for i, (part, examples) in enumerate(material.parts.items()):
        progress("building corpora", i, len(material.parts))
        built = _corpus(settings, examples, fingerprint)
        file = scratch / f"{i}.corpus"
        built.save(file)
        corpora[part] = (file, built)
    progress("building corpora", len(material.parts), len(material.parts))
    return corpora


def _why(
    best: Choice | None,
    material: Material,
    drafter_of: DrafterOf,
    corpora: Corpora,
) -> dict[str, Any]:
    """What explains the choice: how the outputs repeat themselves, and where drafts came from."""
    import numpy as np

    from drafters.replay import replay

    why: dict[str, Any] = {}
    measured = (best.corpus if best is not None else None) or next(iter(corpora), None)
    if measured is not None:
        corpus = corpora[measured][1]
        entropy, k80 = corpus.bigram_measures()
        why = {
            "corpus": measured,
            "bigram_entropy_bits": round(entropy, 2),
            "k80": k80,
            "corpus_bigram_coverage": round(bigram_coverage(corpus, material.held), 3),
        }
    why["prompt_bigram_coverage"] = round(prompt_coverage(material.held), 3)
    if best is None:
        return why
    drafter = drafter_of(best.drafter, best.corpus, best.options)
    shown = replay(drafter, material.held, budget=best.budget, in_prefill=True)
    if shown.num_accepted:
        why["accepted_by_source"] = {
            name: round(hits / shown.num_accepted, 3)
            for name, (_, hits) in sorted(shown.by_source.items(), key=lambda s: -s[1][1])
            if hits
        }
        why["propose_us"] = round(1e6 * float(np.median(shown.propose_s)), 1)
    return why


def _report(
    settings: TuneSettings,
    material: Material,
    best: Choice | None,
    label: str | None,
    gains: dict[int, Expected],
) -> dict[str, Any]:
    corpus_file = settings.output.with_suffix(".corpus")
    alone, many = gains[1], gains[MANY_STREAMS]
    return {
        "task": settings.name,
        "file": str(settings.output),
        "corpus": None if label is None else str(corpus_file),
        "examples": material.num_lines,
        "held_back": len(material.held),
        "held_back_tokens": sum(len(r.output_ids) for r in material.held),
        "recorded": material.num_recorded,
        "outputs": settings.outputs,
        "quality": quality(
            material.compared,
            stops=settings.stop,
            can_chat=settings.render is not None and material.has_plain_prompts,
        ),
        "drafter": "off" if best is None else best.drafter,
        "max_draft_tokens": 0 if best is None else best.budget,
        "tokens_per_step": round(alone.tokens_per_step, 3),
        "expected_speedup": round(alone.speedup, 3),
        "expected_range": [round(alone.low, 3), round(alone.high, 3)],
        "expected_of": alone.num_served,
        "expected_decode_speedup": (
            1.0 if best is None else round(best.forecast.decode_speedup, 3)
        ),
        f"expected_speedup_{MANY_STREAMS}_streams": round(many.speedup, 3),
        f"expected_range_{MANY_STREAMS}_streams": [round(many.low, 3), round(many.high, 3)],
        f"expected_of_{MANY_STREAMS}_streams": many.num_served,
        "busy": round(settings.busy, 2) if settings.busy > BUSY else None,
    }


def _write(
    settings: TuneSettings,
    material: Material,
    text: str,
    label: str | None,
    profile: VocabProfile | None,
    fingerprint: str,
    progress: Progress,
) -> None:
    """The task's files; what an earlier tuning wrote and this one does not name goes."""
    profile_file = settings.output.with_suffix(".vocab")
    corpus_file = settings.output.with_suffix(".corpus")
    if profile is not None:
        save(profile_file, profile.save)
    if label is not None:
        progress("building the corpus", 0, None)
        whole = material.whole[label]
        save(corpus_file, lambda file: _corpus(settings, whole, fingerprint).save(file))
    replaced = is_ours(settings.output)
    save(settings.output, lambda file: write_checked(file, text, settings.name))
    if replaced:
        for file, kept in ((profile_file, profile is not None), (corpus_file, label is not None)):
            if not kept:
                remove(file)
