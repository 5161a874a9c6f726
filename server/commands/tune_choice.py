"""Chooses how a task drafts, tells what that gains, and whether a slice of the LM head pays.

Recorded outputs are replayed through every way to draft (drafters.replay). Each tree is cut to the
nodes that the engine's own estimate would verify (server.engine.gain), and each step is priced by
what that engine's steps took (server.engine.step_times, corrected by all that it has served). That
chooses; what the choice gains is measured, where there are prompts and time for it, by serving
held-back prompts with drafts and without.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np

from drafters.arrays import Float64
from drafters.base import Drafter, DraftSession
from drafters.catalog import Need, catalog, that_use
from drafters.corpus import Corpus
from drafters.replay import Recording, replay
from drafters.tree import DraftTree
from server.commands.record import Answer, Prompt, ask_engine, in_order
from server.commands.tune_data import BOTH, BUSY, DATA, OWN, Options, Tuning, sampling_of
from server.config import SpeculationConfig
from server.engine.engine import Engine
from server.engine.gain import Gain, StepShape
from server.engine.step_times import CostTable
from server.engine.trees import checked
from server.types import CORPUS_FITS, SamplingParams, SpeculationParams
from vocab_store.cost import HeadCosts, best_fill, full_cost_s, slice_head_s
from vocab_store.profile import ProfileSettings, VocabProfile, build_profile
from vocab_store.slice import RequiredIds

_log = logging.getLogger(__name__)

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
MANY_STREAMS = 8
FURTHER = 100
"""Requests of a user's own measurement, which the range is told for."""
TURN = 8
"""Prompts that are served with drafts or without before the other side's turn, for each client."""
_FEWEST = 16  # prompts that are worth measuring
_ALONE_SHARE = 2.0 / 3.0  # of the time for measuring is spent on one client
_MACHINE = 0.02  # two measurements of the same requests on one machine differ by so much
_REPLAYED = 0.05  # ... and a replay from a measurement


# --- replayed and priced --------------------------------------------------------------------------


@dataclass(slots=True)
class Taken:
    """What outputs take, drafted one way: recordings as the engine that prices them would take
    them, or prompts as they were served.

    num_tokens: output tokens after each first one. num_steps: decode steps, the one that ends a
    prompt not counted. plain_s, seconds: of each output without drafts and with them. Of recordings
    alone: num_rows: draft rows; by_source: nodes drafted and accepted.
    """

    num_tokens: int = 0
    num_steps: int = 0
    num_rows: int = 0
    plain_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> float:
        """The number of tokens without any step."""
        return self.num_tokens / max(1, self.num_steps)

    @property
    def speedup(self) -> float:
        """Of whole requests, prompts included: above 1 is faster than without drafts."""
        return sum(self.plain_s) / sum(self.seconds)


@dataclass(frozen=True, slots=True)
class Pricing:
    """What a replay is priced by. engine: whose steps they would be, with a table of costs.
    undrawn_row_s: seconds that a row of a prompt takes less, because it has no LM head."""

    engine: Engine
    undrawn_row_s: float = 0.0

    @property
    def cost(self) -> CostTable:
        """Of the engine's steps, as those that it has served have corrected it."""
        cost = self.engine.gain.cost
        assert cost is not None  # build_engine measures it
        return cost

    def replay(
        self, drafter: Drafter, held: Sequence[Recording], budget: int, num_streams: int = 1
    ) -> Taken:
        """Replay recordings with prompts and outputs, each step as one of num_streams like it.
        Raises DraftError for a tree that an engine would refuse."""
        priced = _Priced(drafter, self, held, num_streams)
        found = replay(priced, held, budget=budget, in_prefill=True)
        told, steps = priced.told, found.num_steps
        told.num_tokens, told.num_steps = sum(found.num_tokens), sum(steps)
        told.num_rows, told.by_source = found.num_drafted, found.by_source
        return told

    def prompt_s(self, num_cached: int, prompt_len: int) -> float:
        """Of a prompt of which so many tokens are cached."""
        rows = prompt_len - num_cached
        whole = self.cost.cost(rows, rows * (num_cached + 0.5 * rows))
        # At least half of it: what heads take was measured at another number of rows.
        return max(0.5 * whole, whole - self.undrawn_row_s * (rows - 1))


class _Priced:
    """A drafter whose trees are cut to what pays, and which notes what its steps would take. It is
    its own session: recordings are replayed one after the other.

    What is chosen is what the engine's Gain chooses, in a scope in which as much comes as is
    claimed until the recordings say otherwise.
    """

    def __init__(
        self, drafter: Drafter, pricing: Pricing, recordings: Sequence[Recording], num_streams: int
    ) -> None:
        self.name, self.told = drafter.name, Taken()
        self.sources = getattr(drafter, "sources", (drafter.name,))
        self._drafter, self._pricing, self._num_streams = drafter, pricing, num_streams
        self._gain = Gain(pricing.cost)
        self._gain.host = pricing.engine.gain.host
        self._seat = self._gain.seat("replay", knows=True)
        for claim in (0.05, 0.25, 0.5, 0.75, 0.95):
            claims = np.full(100, claim)
            self._observe(claims, range(round(100 * claim)))
        info = pricing.engine.info
        self._vocab_size = info.vocab_size
        self._block_size = info.block_size if pricing.engine.settings.prefix_cache else 0
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}  # blocks, by the one before them
        self._recordings = iter(recordings)
        self._session: Any = None
        self._ids, self._length, self._told = np.empty(0, np.int32), 0, 0  # as Gain.watch has them
        self._is_asked, self._prompt_s = False, 0.0  # in this step; of the prompt of its first tree
        self._is_open = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def open(self, prompt_ids: Sequence[int], **_: Any) -> DraftSession:
        """The next recording's: its prompt and its plain path are priced."""
        recording = next(self._recordings)
        pricing, told, num = self._pricing, self.told, len(prompt_ids)
        prompt_s = pricing.prompt_s(self._cached(prompt_ids), num)
        steps = len(recording.output_ids) - 1
        told.plain_s.append(prompt_s + steps * self._step_s(0, num + 0.5 * steps))
        told.seconds.append(0.0)
        self._session = self._drafter.open(list(map(int, prompt_ids)))
        self._ids = np.array([*prompt_ids, *recording.output_ids], np.int32)
        self._length, self._told, self._prompt_s = num, num, prompt_s
        self._gain.leave(self._seat)
        self._seat, self._is_open = self._gain.seat("replay"), False
        return cast("DraftSession", self)

    def _observe(self, claims: Float64, accepted: Sequence[int]) -> None:
        """Nodes with these claims were verified. accepted: indexes of those that came true."""
        came, num = np.zeros(len(claims), np.int32), np.zeros(1, np.int32)
        came[list(accepted)] = 1
        start = np.array([0, len(claims)], np.int32)
        self._gain.observe_drafts(np.array([self._seat]), start, num, claims, came)

    def _cached(self, prompt_ids: Sequence[int]) -> int:
        """Tokens of a prompt that need not be computed: whole blocks that an earlier one has."""
        size, num, place = self._block_size, 0, -1
        for end in range(size, len(prompt_ids) + 1, size) if size else ():
            block = place, tuple(prompt_ids[end - size : end])
            if block in self._known and end < len(prompt_ids):
                num = end
            place = self._known.setdefault(block, len(self._known))
        return num

    def _step_s(self, num_nodes: int, mean_len: float) -> float:
        """A choice's share of a decode step in which each has so many nodes."""
        num, rows = self._num_streams, 1 + num_nodes
        model_s = self._pricing.cost.cost(num * rows, num * rows * mean_len)
        return (model_s + self._gain.host.plain(num)) / num

    def propose(self, max_nodes: int, max_depth: int) -> DraftTree:
        """The nodes of the drafter's tree that pay; the step is priced with them."""
        num, gain = self._num_streams, self._gain
        shape, room = StepShape(num, num, float(self._length)), num * max_nodes
        tree, kept, ask_s, seats = DraftTree.empty(), 0, 0.0, np.full(num, self._seat)
        gain.watch(self._seat, self._ids[: self._length], self._told)
        _, most = gain.ask(seats, shape, room)
        self._is_asked = most > 0
        if most:
            began = time.thread_time()
            bounds = np.array([(self._vocab_size, max_depth)])
            trees, errors = checked([self._session.propose(max_nodes, max_depth)], bounds)
            if errors:
                raise errors[0][1]
            ask_s = max(time.thread_time() - began, gain.host.asking(num) / num)
            if not self._is_open:
                gain.opened(self._seat)
                self._is_open = True
                ask_s += gain.host.opening
            claims, certain = np.tile(trees.survival, num), np.zeros(num, np.int32)
            start = np.arange(num + 1, dtype=np.int32) * len(trees.survival)
            gain.observe_asks(seats, start, certain, claims)
            kept = int(gain.choose(seats, start, certain, claims, shape, room, num)[0])
            trees.prune(np.array([kept]))
            tree = trees.proposed(0, [])[0]
        seconds, self._prompt_s = self._prompt_s, 0.0
        if seconds:  # the prompt's step, with the nodes that hang off its last row
            cost = self._pricing.cost
            seconds += (cost.cost(num * (1 + kept)) - cost.cost(num)) / num
        else:
            seconds = self._step_s(kept, self._length)
        self.told.seconds[-1] += seconds + ask_s
        return tree

    def feedback(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """As DraftSession.feedback; the estimate hears of it too."""
        self._observe(tree.survival.astype("float64"), accepted)
        self._session.feedback(tree, accepted)

    def extend(self, token_ids: Sequence[int]) -> None:
        """As DraftSession.extend."""
        self._length += len(token_ids)
        if self._is_asked:
            self._told = self._length
        self._session.extend(token_ids)


# --- the choice -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to draft, and what it is expected to bring. corpus: which examples it holds."""

    drafter: str
    corpus: str | None
    budget: int
    forecast: Taken
    options: Options = ()

    @property
    def title(self) -> str:
        """The drafter with its options."""
        return " ".join([self.drafter, *(f"{key} {value:g}" for key, value in self.options)])


def replay_all(run: Tuning, pricing: Pricing) -> list[Choice]:
    """Every drafter with every corpus it can use, at every budget, and where a published one is
    among the best its options; one stream. Those that are kept are not replayed again."""

    def tried(name: str, label: str | None, budget: int, options: Options = ()) -> Choice:
        def replayed() -> dict[str, Any]:
            drafter = run.drafter(name, label, options)
            return asdict(pricing.replay(drafter, run.material.held, budget))

        found = run.kept.once(f"taken {(name, label, budget, options)}", replayed)
        return Choice(name, label, budget, Taken(**found), options)

    budgets = run.budgets
    cells: list[tuple[str, str | None, int]] = [
        (spec.name, None, n) for spec in catalog().values() if spec.without_corpus for n in budgets
    ]
    cells += [
        (name, label, n)
        for name in that_use(Need.CORPUS)
        for label in run.material.corpora
        for n in budgets
    ]
    choices = []
    for i, (name, label, budget) in enumerate(cells):
        run.progress("replaying drafters", i, len(cells))
        choices.append(tried(name, label, budget))
    run.progress("replaying drafters", len(cells), len(cells))

    def speedup(choice: Choice) -> float:
        return choice.forecast.speedup

    # Options vary one after the other, each beside the best value of those before.
    top, varied = max(map(speedup, choices)), []
    for name, options in _VARIED.items():
        best = max((c for c in choices if c.drafter == name), key=speedup, default=None)
        if best is None or top < WORTH or speedup(best) < _NEAR * top:
            continue
        for key, values in options.items():
            run.progress(f"varying {name}'s {key}", 0, None)
            given = best.options
            for value in values:
                choice = tried(name, best.corpus, best.budget, (*given, (key, value)))
                varied.append(choice)
                best = max(best, choice, key=speedup)
    return choices + varied


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


# --- what it gains --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expected:
    """A speedup of whole requests and the range in which FURTHER requests like these will have
    theirs, in 19 of 20 cases. num_served: requests that it was measured on, 0 where it was
    forecast. tokens_per_step: of decode steps, in these requests."""

    speedup: float = 1.0
    low: float = 1.0
    high: float = 1.0
    num_served: int = 0
    tokens_per_step: float = 1.0


def ratio_error(above: Sequence[float], below: Sequence[float]) -> float:
    """Standard error of sum(above) / sum(below), of pairs that were drawn together (the delta
    method); 0 where there is one pair."""
    num = len(above)
    if num < 2:
        return 0.0
    ratio = sum(above) / sum(below)
    left = sum((a - ratio * b) ** 2 for a, b in zip(above, below, strict=True))
    return math.sqrt(left * num / (num - 1)) / sum(below)


def within(speedup: float, error: float, num: int, other: float) -> tuple[float, float]:
    """The range. error: standard error of a speedup of `num` requests; other: of what is not in the
    requests, as a share."""
    own = error * math.sqrt(1.0 + num / FURTHER)
    half = 2.0 * math.hypot(own, other * speedup)
    return max(0.0, speedup - half), speedup + half


def expected_gain(told: Taken, *, num_served: int = 0) -> Expected:
    """Of a replay, or of so many prompts that were served."""
    error, other = ratio_error(told.plain_s, told.seconds), _MACHINE if num_served else _REPLAYED
    low, high = within(told.speedup, error, len(told.plain_s), other)
    return Expected(told.speedup, low, high, num_served, told.tokens_per_step)


def forecast_gains(run: Tuning, best: Choice | None, pricing: Pricing) -> dict[int, Taken]:
    """What a choice is expected to bring one client and MANY_STREAMS, by replay; {} for none."""
    if best is None:
        return {}

    def replayed() -> dict[str, Any]:
        drafter = run.drafter(best.drafter, best.corpus, best.options)
        return asdict(pricing.replay(drafter, run.material.held, best.budget, MANY_STREAMS))

    many = Taken(**run.kept.once(f"taken by {MANY_STREAMS} streams", replayed))
    return {1: best.forecast, MANY_STREAMS: many}


def measured_gains(
    run: Tuning, best: Choice, forecasts: Mapping[int, Taken]
) -> dict[int, Expected]:
    """Of a choice, for so many clients as were forecast: measured where there are prompts and time
    for it. What is held back is in no corpus."""
    speculation = run.speculation(best.drafter, best.budget, best.corpus, best.options)
    if best.drafter in that_use(Need.LEARNED):  # as a task's requests do
        speculation = replace(speculation, learn_tokens=SpeculationConfig().learn_max_tokens)

    def measured(clients: int, told: Taken) -> Expected:
        share = _ALONE_SHARE if clients == 1 else 1.0 - _ALONE_SHARE
        most_s = share * run.recording.serve_seconds
        each_s = (sum(told.plain_s) + sum(told.seconds)) / len(told.seconds)
        prompts = run.material.to_serve[: int(most_s / each_s)]
        if len(prompts) < _FEWEST:
            return expected_gain(told)
        try:
            plain, drafted = serve(
                run.engine, prompts, sampling_of(run), speculation,
                task=run.file.name, num_clients=clients, most_s=most_s,
            )  # fmt: skip
        except RuntimeError as error:
            _log.warning("a held-back prompt failed, so its gain is forecast: %s", error)
            return expected_gain(told)
        return expected_gain(taken(plain, drafted), num_served=len(drafted))

    found = {}
    for clients, told in forecasts.items():
        run.progress(f"serving {clients} at once with drafts and without", 0, None)
        gain = run.kept.once(f"gain {clients}", lambda: asdict(measured(clients, told)))  # noqa: B023
        found[clients] = Expected(**gain)
    return found


def taken(plain: Sequence[Answer], drafted: Sequence[Answer]) -> Taken:
    """Of the same prompts, answered without drafts and with them."""
    return Taken(
        num_tokens=sum(len(answer.output_ids) - 1 for answer in drafted),
        num_steps=sum(answer.num_steps - 1 for answer in drafted),
        plain_s=[answer.seconds for answer in plain],
        seconds=[answer.seconds for answer in drafted],
    )


def serve(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    speculation: SpeculationParams,
    *,
    task: str,
    num_clients: int = 1,
    most_s: float = math.inf,
) -> tuple[list[Answer], list[Answer]]:
    """The answers to prompts without drafts and with these, num_clients at once, until all are
    answered or most_s seconds are over (then as many turns as there were). engine: idle.

    The two sides take turns of TURN prompts a client, so that what else the machine does meets
    both. Each has a cache_salt that nobody had before: nothing is cached, nothing was learned, no
    drafts were judged, so its first prompts are what a key's first requests are, and answers are
    learned as a task's are. Raises RuntimeError for a request that fails.
    """
    sides: tuple[list[Answer], list[Answer]] = ([], [])
    salt, began, size = secrets.token_hex(8), time.monotonic(), TURN * num_clients
    for first in range(0, len(prompts), size):
        if first and time.monotonic() - began > most_s:
            break
        turn = [
            Prompt(at, None, tuple(map(int, ids)))
            for at, ids in enumerate(prompts[first : first + size], first)
        ]
        for side, drafts in enumerate((SpeculationParams(), speculation)):
            found = ask_engine(
                engine, None, turn, sampling, speculation=drafts, num_open=num_clients, task=task,
                cache_salt=f"{salt}-{side}",
            )  # fmt: skip
            sides[side].extend(in_order(found))
    return sides


# --- a slice of the LM head -----------------------------------------------------------------------


def vocabulary(
    run: Tuning, best: Choice | None, cost: CostTable
) -> tuple[dict[str, Any], VocabProfile | None]:
    """How much a slice of the LM head would miss and save in the chosen way of drafting
    (VocabTailor's Algorithm 1, vocab_store.cost), and the profile for `exact` where that is worth
    its verifications.

    Costs are per token, as server.engine.slices takes them: a step with drafts has more rows
    and emits more tokens, and a verification still reads the whole head once.
    """
    parts, tokens, info = run.material.parts, run.tokens, run.engine.info
    label = next((name for name in (BOTH, DATA, OWN) if parts.get(name)), None)
    if label is None:
        return {}, None
    profile = build_profile(
        parts[label],
        tokens,
        RequiredIds.from_tokens(tokens, info.eos_token_ids),
        ProfileSettings(),
        heldout=[(r.prompt_ids, r.output_ids) for r in run.material.held],
    )
    held = profile.manifest["report"]["heldout"]
    costs, share = _head_costs(best, tokens.vocab_size, cost, run.head, run.head_share)
    _, cost_s = best_fill(
        costs,
        profile.slice.num_ids,
        profile.miss_rate or 0.0,
        profile.fill_gains,
        num_dynamic=held["mean_dynamic"],
    )
    slice_s = costs.body_s + slice_head_s(costs, profile.slice.num_ids + held["mean_dynamic"])
    full_s = full_cost_s(costs)
    speedup = full_s / cost_s
    # Slices are there on the CPU only; text that comes in groups should be worth the wait.
    exact = info.device == "cpu" and speedup >= _WORTH_EXACT and run.busy <= BUSY
    return {
        "mode": "exact" if exact else "full",
        "ids": profile.slice.num_ids,
        "share": round(profile.slice.share, 4),
        "miss_rate": round(profile.miss_rate or 0.0, 5),
        "head_share": round(share, 3),
        "exact_speedup": round(speedup, 3),
        "slice_speedup": round(full_s / slice_s, 3),
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


def bigram_coverage(held: Sequence[Recording], corpus: Corpus | None = None) -> float:
    """Share of the held-back outputs' token bigrams that a corpus holds, or their own prompts."""
    in_corpus = None if corpus is None else set(map(tuple, corpus.count_grams(2)[0].tolist()))
    hits = num = 0
    for r in held:
        known = set(pairwise(r.prompt_ids)) if in_corpus is None else in_corpus
        pairs = list(pairwise(r.output_ids))
        hits += sum(pair in known for pair in pairs)
        num += len(pairs)
    return hits / max(1, num)


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
