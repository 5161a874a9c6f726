"""Chooses by forecasts how a task drafts, and whether a slice of the LM head pays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drafters.catalog import Need, catalog, that_use
from server.commands.tune_material import (
    BOTH,
    BUSY,
    DATA,
    OWN,
    Example,
    Material,
    Progress,
    TuneSettings,
)
from server.types import CORPUS_FITS

if TYPE_CHECKING:
    from drafters.base import Drafter
    from drafters.corpus import Corpus
    from drafters.replay import Recording
    from server.engine.engine import Engine
    from server.engine.forecast import Forecast, ServedBy
    from server.engine.step_times import CostTable
    from server.token_bytes import TokenBytes
    from vocab_store.cost import HeadCosts
    from vocab_store.profile import VocabProfile

_VARIED: dict[str, dict[str, tuple[float, ...]]] = {
    "mix": {"lambda": (0.25, 0.5, 0.9), "n_max": (3, 4)},
    "trie": {"n": (8, 16), "prefix_length": (2, 4, 5)},
}
"""What the papers vary, by drafter; their own values are the defaults."""
_NEAR = 0.9  # of the best speedup: from there on a drafter's options are varied
_TIE = 0.01  # speedups this close are equal: the choice is then made by what is sturdier
WORTH = 1.01  # below this expected speedup a task drafts nothing
_SLACK = 1.5  # the head may take so many times its share of the bytes
_WORTH_EXACT = 1.05  # ... and a task's text does not come in groups


Options = tuple[tuple[str, float], ...]
DrafterOf = Callable[[str, "str | None", Options], "Drafter"]
"""(drafter, corpus, options) -> it, anew."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to draft, and what it is expected to bring. corpus: which examples it holds. options:
    of the drafter, by key, where they are not the defaults."""

    drafter: str
    corpus: str | None
    budget: int
    forecast: Forecast
    options: Options = ()

    @property
    def title(self) -> str:
        """The drafter with its options."""
        return " ".join([self.drafter, *(f"{key} {value:g}" for key, value in self.options)])


def replay_all(
    settings: TuneSettings,
    material: Material,
    drafter_of: DrafterOf,
    corpora: Sequence[str],
    served_by: ServedBy,
    progress: Progress,
) -> list[Choice]:
    """Every drafter with every corpus it can use, at every budget, and where a published one is
    among the best its options; one stream."""
    from server.engine.forecast import forecast

    def tried(name: str, label: str | None, budget: int, options: Options = ()) -> Choice:
        drafter = drafter_of(name, label, options)  # anew: a drafter learns from what it sees
        expected = forecast(
            drafter,
            material.held,
            served_by,
            max_draft_tokens=budget,
            max_tokens=material.max_tokens,
        )
        return Choice(name, label, budget, expected, options)

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
        choices.append(tried(name, label, budget))
    progress("replaying drafters", len(cells), len(cells))
    return choices + list(_varied(choices, tried, progress))


def _varied(
    choices: Sequence[Choice], tried: Callable[..., Choice], progress: Progress
) -> Iterator[Choice]:
    """The best choice of each drafter of _VARIED that is near the best of all, with other options:
    one after the other, each beside the best value of those before."""

    def speedup(choice: Choice) -> float:
        return choice.forecast.speedup

    top = max(map(speedup, choices))
    for name, options in _VARIED.items():
        best = max((c for c in choices if c.drafter == name), key=speedup, default=None)
        if best is None or top < WORTH or speedup(best) < _NEAR * top:
            continue
        for key, values in options.items():
            progress(f"varying {name}'s {key}", 0, None)
            given = best.options
            for value in values:
                choice = tried(name, best.corpus, best.budget, (*given, (key, value)))
                yield choice
                best = max(best, choice, key=speedup)


def best_of(choices: Sequence[Choice]) -> Choice | None:
    """The choice with the highest expected speedup; None where nothing is worth its drafts.

    Among equals `auto`, whose chances are calibrated while it runs, then the papers' options, then
    fewer nodes, then no corpus, then the largest one.
    """
    top = max(choice.forecast.speedup for choice in choices)
    if top < WORTH:
        return None
    near = [choice for choice in choices if choice.forecast.speedup >= top * (1.0 - _TIE)]
    sizes = {None: 0, BOTH: 1, DATA: 2, OWN: 3}

    def rank(c: Choice) -> tuple[bool, int, int, int]:
        return c.drafter != "auto", len(c.options), c.budget, sizes.get(c.corpus, 9)

    return min(near, key=rank)


def vocabulary(
    material: Material,
    best: Choice | None,
    engine: Engine,
    tokens: TokenBytes,
    cost: CostTable,
    head: tuple[float, float],
    settings: TuneSettings,
) -> tuple[dict[str, Any], VocabProfile | None]:
    """How much a slice of the LM head would miss and save in the chosen way of drafting
    (VocabTailor's Algorithm 1, vocab_store.cost), and the profile for `exact` where that is worth
    its verifications.

    Costs are per token, as server.engine.exact_control takes them: a step with drafts has more rows
    and emits more tokens, and a verification still reads the whole head once.
    """
    import numpy as np

    from vocab_store.cost import best_fill, slice_head_s
    from vocab_store.documents import Example as Document
    from vocab_store.profile import ProfileSettings, build_profile
    from vocab_store.slice import RequiredIds

    def documents(examples: Iterable[Example]) -> list[Document]:
        return [Document(np.asarray(p, np.int32), np.asarray(o, np.int32)) for p, o in examples]

    label = next((name for name in (BOTH, DATA, OWN) if material.parts.get(name)), None)
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
    costs, share = _head_costs(best, tokens.vocab_size, cost, head, settings.head_share)
    fill = best_fill(
        costs,
        profile.slice.num_ids,
        profile.miss_rate or 0.0,
        profile.fill_gains,
        num_dynamic=held["mean_dynamic"],
    )
    slice_s = costs.body_s + slice_head_s(costs, profile.slice.num_ids + held["mean_dynamic"])
    speedup = fill.full_s / fill.cost_s
    # Slices are there on the CPU only; text that comes in groups should be worth the wait.
    exact = engine.info.device == "cpu" and speedup >= _WORTH_EXACT and settings.busy <= BUSY
    return {
        "mode": "exact" if exact else "full",
        "ids": profile.slice.num_ids,
        "share": round(profile.slice.share, 4),
        "miss_rate": round(profile.miss_rate or 0.0, 5),
        "outputs_with_a_miss": round(held["num_documents_missed"] / held["num_documents"], 3),
        "head_share": round(share, 3),
        "exact_speedup": round(speedup, 3),
        "exact_ids": fill.num_ids,
        "exact_window": fill.verify_every,
        "slice_speedup": round(fill.full_s / slice_s, 3),
    }, (profile if exact else None)


def _head_costs(
    best: Choice | None,
    vocab_size: int,
    cost: CostTable,
    head: tuple[float, float],
    head_share: float | None,
) -> tuple[HeadCosts, float]:
    """What a token costs in the body and in the head, and the head's share of a step.

    A step of few rows takes the time of the bytes that it reads, so a head that was measured to
    take much more than its share of them was measured on a disturbed machine: head_share bounds it.
    """
    from vocab_store.cost import HeadCosts

    num_rows, per_step = 1.0, 1.0
    if best is not None:
        num_rows += best.forecast.num_rows / max(1, best.forecast.num_steps)
        per_step = best.forecast.tokens_per_step
    first_s, further_s = head
    if head_share is not None:
        most_s = min(0.95, _SLACK * head_share) * cost.cost(1)
        scale = min(1.0, most_s / first_s) if first_s > 0 else 1.0
        first_s, further_s = scale * first_s, scale * further_s
    head_s = first_s + further_s * (num_rows - 1.0)
    step_s = max(cost.cost(num_rows), 1.01 * head_s)
    return HeadCosts(
        body_s=(step_s - head_s) / per_step,
        full_s=head_s / per_step,
        vocab_size=vocab_size,
        verify_s=first_s,
        verify_row_s=further_s,
    ), head_s / step_s


def bigram_coverage(corpus: Corpus, held: Sequence[Recording]) -> float:
    """Share of the held-back outputs' token bigrams that the corpus holds."""
    grams, _ = corpus.count_grams(2)
    known = set(map(tuple, grams.tolist()))
    pairs = [pair for r in held for pair in zip(r.output_ids, r.output_ids[1:], strict=False)]
    return sum(pair in known for pair in pairs) / max(1, len(pairs))


def corpus_fit(choices: Sequence[Choice]) -> dict[str, Any]:
    """corpus_gain: tokens a step of `auto` with the best corpus over those without, at the budget
    where that is most; corpus_fits; corpus_gains: of each corpus by itself. Nothing where no corpus
    was tried."""
    tried = [c for c in choices if c.drafter == "auto"]
    plain = {c.budget: c.forecast.tokens_per_step for c in tried if c.corpus is None}
    gains: dict[str, float] = {}
    for c in tried:
        if c.corpus is not None and plain.get(c.budget):
            gain = round(c.forecast.tokens_per_step / plain[c.budget], 3)
            gains[c.corpus] = max(gain, gains.get(c.corpus, 0.0))
    if not gains:
        return {}
    best = max(gains.values())
    return {"corpus_gain": best, "corpus_fits": best >= CORPUS_FITS, "corpus_gains": gains}


def prompt_coverage(held: Sequence[Recording]) -> float:
    """Share of the held-back outputs' token bigrams that their own prompts hold."""
    hits = num = 0
    for r in held:
        known = set(zip(r.prompt_ids, r.prompt_ids[1:], strict=False))
        pairs = list(zip(r.output_ids, r.output_ids[1:], strict=False))
        hits += sum(pair in known for pair in pairs)
        num += len(pairs)
    return hits / max(1, num)
