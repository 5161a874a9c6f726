"""ExactControl: how many tokens an `exact` slice runs ahead, and when it does not pay.

It puts measured seconds (of the body, the full head, slices and verifications) and measured misses
into the cost model of vocab_store.cost. It does not decide which tokens are verified (commit.py) or
which rows a slice has (slices.py). It takes and returns numbers, reads no clock, and cannot change
a text.

Emitted tokens of one sequence that wait for the full head are its unverified tokens. When
`verify_every` (N) of them wait, the full head verifies them.

Times are those of the batches that run now. With trees a step yields several tokens: costs are
taken per token of a sequence, so that N tokens are N / tokens-per-step steps.

Misses and tokens a step depend on texts. They are counted per key, and a key serves one scope, so
that its plans tell a client nothing about the texts of others. Times, ends and sizes of batches are
counted per device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from vocab_store.cost import Fill, HeadCosts, best_fill, exact_cost_s, full_cost_s
from vocab_store.profile import VocabProfile

_RATE = 0.1  # weight of a new measurement
_PRIOR_TOKENS = 32.0  # how many tokens the profile's own miss rate counts for
_MEMORY_TOKENS = 4096.0  # older misses count half from here on
_END_RATE = 0.02  # ends are rare: their chance needs a longer memory
_REFRESH_TOKENS = 32  # a plan is priced again after so many tokens
_STEPS_TO_FILL = 16  # the size of T is chosen once: not by the first steps
_MAX_RECORDS = 4096  # the least recently used go first
_GAIN_TO_RETURN = 0.95  # the slice must be this much cheaper to take over from the full head


@dataclass(slots=True)
class ExactPlan:
    """What the sequences of one key do now: N, and whether they draw from the slice."""

    verify_every: int
    uses_slice: bool = True


@dataclass(slots=True)
class _Record:
    num_ids: int
    tokens: float
    misses: float
    plan: ExactPlan
    since: int = 0
    tokens_per_step: float = 1.0


def _moved(old: float, new: float) -> float:
    """A running mean that follows falling times fast and rising times slowly: the first steps load
    compiled code, and any step may be disturbed."""
    if old == 0.0:
        return new
    return old + (3 * _RATE if new < old else _RATE) * (min(new, 3 * old) - old)


class ExactControl:
    """One plan per key (a profile and a scope). One writer, one thread.

    max_verify_every: most tokens held back. first_verify_every: N until costs are measured.
    may_use_full_head: whether `exact` may draw from the full head where that is cheaper (tests of
    verification switch it off).
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        max_verify_every: int = 64,
        first_verify_every: int = 8,
        may_use_full_head: bool = True,
    ) -> None:
        if not 1 <= first_verify_every <= max_verify_every:
            raise ValueError("1 <= first_verify_every <= max_verify_every must hold")
        self.max_verify_every = max_verify_every
        self._vocab_size = vocab_size
        self._first_verify_every = first_verify_every
        self._may_use_full_head = may_use_full_head
        self._num_steps = 0
        self._body_s = 0.0
        self._full_s = 0.0
        self._slice_s = 0.0
        self._slice_ids = 0.0
        self._row_s = 0.0
        self._num_sequences = 1.0
        self._ends = 0.0  # chance per step
        self._records: OrderedDict[Hashable, _Record] = OrderedDict()

    def add(self, key: Hashable, num_ids: int, miss_rate: float | None) -> None:
        """Begin to plan for a key with slices of about num_ids; a known one is kept."""
        if key not in self._records:
            miss = 0.02 if miss_rate is None else min(1.0, max(0.0, miss_rate))
            plan = ExactPlan(self._first_verify_every)
            self._records[key] = _Record(num_ids, _PRIOR_TOKENS, _PRIOR_TOKENS * miss, plan)
            self._refresh(self._records[key])
            if len(self._records) > _MAX_RECORDS:
                self._records.popitem(last=False)
        self._records.move_to_end(key)

    def forget(self, is_gone: Callable[[Hashable], bool]) -> None:
        """Forget every key that is gone."""
        for key in [key for key in self._records if is_gone(key)]:
            del self._records[key]

    def plan(self, key: Hashable) -> ExactPlan:
        """The plan of a key; one with first_verify_every for an unknown key."""
        record = self._records.get(key)
        return ExactPlan(self._first_verify_every) if record is None else record.plan

    # -- measurements -----------------------------------------------------------------------

    def observe_step(
        self, body_s: float, head_s: float, num_full: int, num_sliced: int, num_ids: float
    ) -> None:
        """One step without prompt rows. num_full, num_sliced: draws; num_ids: mean slice."""
        if head_s <= 0.0 or body_s <= 0.0:
            return
        self._num_steps += 1
        self._body_s = _moved(self._body_s, body_s)
        if num_sliced == 0 and num_full > 0:
            self._full_s = _moved(self._full_s, head_s)
        elif num_full == 0 and num_sliced > 0:
            self._slice_s = _moved(self._slice_s, head_s)
            self._slice_ids = _moved(self._slice_ids, num_ids)

    def observe_first(self, head_s: float) -> None:
        """Seconds of the full head in a step that ends prompts; used until a better one comes."""
        if head_s > 0.0 and self._full_s == 0.0:
            self._full_s = head_s

    def observe_tokens(self, key: Hashable, num_tokens: int) -> None:
        """Tokens that one sequence gained in one step from its slice."""
        record = self._records.get(key)
        if record is not None:
            record.tokens_per_step = _moved(record.tokens_per_step, float(max(1, num_tokens)))

    def observe_ends(self, any_ended: bool) -> None:
        """One more step of sequences in `exact`, whichever head they draw from. any_ended: whether
        one of them has left since the step before, which verifies the others early."""
        self._ends += _END_RATE * (any_ended - self._ends)

    def observe_verify(self, seconds: float, num_rows: int, num_sequences: int) -> None:
        """One verification: num_rows tokens of num_sequences sequences in `seconds`."""
        self._num_sequences = _moved(self._num_sequences, float(num_sequences))
        if self._full_s > 0.0 and num_rows > 1:
            self._row_s = _moved(self._row_s, max(0.0, seconds - self._full_s) / num_rows)

    def observe_checked(self, key: Hashable, num_tokens: int, missed: bool) -> None:
        """num_tokens tokens of a key were verified; missed: the last of them was wrong."""
        record = self._records.get(key)
        if record is None:
            return
        record.tokens += num_tokens
        record.misses += missed
        if record.tokens > _MEMORY_TOKENS:
            record.tokens *= 0.5
            record.misses *= 0.5
        record.since += num_tokens
        if record.since >= _REFRESH_TOKENS:
            self._refresh(record)

    # -- plans ------------------------------------------------------------------------------

    def costs(self, tokens_per_step: float = 1.0) -> HeadCosts | None:
        """The measured costs per token of a sequence that gains tokens_per_step tokens a step; None
        until body and full head are measured."""
        if self._body_s <= 0.0 or self._full_s <= 0.0:
            return None
        fixed_s = 0.0
        if self._slice_s > 0.0:
            share = self._slice_ids / self._vocab_size
            fixed_s = max(0.0, self._slice_s - self._full_s * share)
        per_token = 1.0 / tokens_per_step
        return HeadCosts(
            body_s=self._body_s * per_token,
            full_s=self._full_s * per_token,
            vocab_size=self._vocab_size,
            slice_fixed_s=fixed_s * per_token,
            verify_s=self._full_s,
            verify_row_s=self._row_s * self._num_sequences,
            early_end=self._ends * per_token,
        )

    def fill(self, profile: VocabProfile) -> Fill | None:
        """How much of the fill order an `exact` T should take; None while costs are not known.

        All scopes share T, so it is priced by the device's times alone, for steps without drafts.
        """
        costs = self.costs()
        if costs is None or profile.miss_rate is None or self._num_steps < _STEPS_TO_FILL:
            return None
        return best_fill(
            costs,
            profile.slice.num_ids,
            profile.miss_rate,
            profile.fill_gains,
            max_verify_every=self.max_verify_every,
        )

    def _refresh(self, record: _Record) -> None:
        record.since = 0
        costs = self.costs(record.tokens_per_step)
        if costs is None:
            return
        miss = min(1.0, record.misses / record.tokens)
        cost_s, every = min(
            (exact_cost_s(costs, record.num_ids, miss, n), n)
            for n in range(1, self.max_verify_every + 1)
        )
        full_s = full_cost_s(costs)
        limit = full_s if record.plan.uses_slice else full_s * _GAIN_TO_RETURN
        record.plan = ExactPlan(every, not self._may_use_full_head or cost_s < limit)
