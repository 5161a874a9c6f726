"""Vocabulary slices in the engine: who sees which rows of the LM head (docs/DESIGN.md section 6).

    open    a request's slice is frozen at admission, from the request and its pinned profile alone
    seat    its rows beyond the profile's T are pinned and copied, when the sequence gets its seat
    attach  the Batch gets the slice of each draw, and which hidden states the runner keeps
    keep    emitted tokens of `exact` wait in the sequence's SequenceHead.unverified
    verify  they are drawn again with the full head; settle: a sequence has none any more
    leave   the rows are unpinned; they stay cached until their places are needed

A sequence in mode "full" has no SequenceHead; nothing here is done for it.

The full head is the fallback in four places: a first token of `exact` and all of them while that is
cheaper (`decide`); rows that find no room (`seat`); a draw whose constraints leave nothing of its
slice (the runners' samplers); a wrong token of `exact` (commit.py).

T and its copy are the task's and shared by all. What comes from requests is kept per scope (tenant
and cache_salt): dynamic rows, missed ids, and the N that misses lead to. `loaded_rows`, the
slice's size and N then tell a client nothing about the text of others.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np

from server.engine.batch import (
    Batch,
    Drawn,
    DrawParams,
    HeadSlice,
    Int32,
    Runner,
    UInt32,
)
from server.engine.build import Built, as_wide
from server.engine.plan import Rows
from server.engine.sequence import ScopedProfile, Sequence, SequenceHead, Unverified
from server.engine.trees import DRAW, END_NODE, FIRST_NODE
from server.types import BANNED, Request, VocabularyParams
from vocab_store.cost import HeadCosts, best_fill, best_verify_every, full_cost_s
from vocab_store.profile import VocabProfile
from vocab_store.slice import VocabSlice
from vocab_store.slice_cache import Placement, SliceCacheIndex

_log = logging.getLogger(__name__)

NO_PROFILE = "profile_unreadable"
"""The code of a request whose task's profile cannot be read: the server's fault."""

ProfileSource = Callable[[str], VocabProfile]
"""Reads a profile by the name that a request gives (its file). Raises ValueError or OSError."""

_MAX_LEARNED = 256  # missed ids of a scope's profile that later `exact` sequences begin with
_MAX_SCOPES = 1024  # scopes of which missed ids and miss rates are kept


# -- when the full head verifies -------------------------------------------------------------------


_FIRST_VERIFY_EVERY = 8  # N until costs are measured
_RATE = 0.1  # weight of a new measurement
_PRIOR_TOKENS = 32.0  # how many tokens the profile's own miss rate counts for
_MEMORY_TOKENS = 4096.0  # older misses count half from here on
_END_RATE = 0.02  # ends are rare: their chance needs a longer memory
_REFRESH_TOKENS = 32  # a plan is priced again after so many tokens
_STEPS_TO_FILL = 16  # the size of T is chosen once: not by the first steps
_MAX_PLANS = 4096  # the least recently used go first
_ALIKE = 1e-3  # of the rows of a verification, squared: a spread that tells little
_GAIN_TO_RETURN = 0.95  # the slice must be this much cheaper to take over from the full head


@dataclass(slots=True)
class ExactPlan:
    """What the sequences of one key do now: N, and whether they draw from the slice. The others are
    what that is made of: rows of a slice, verified tokens and misses (decayed), those since it was
    made, and tokens a step."""

    verify_every: int
    uses_slice: bool = True
    num_ids: int = 0
    tokens: float = _PRIOR_TOKENS
    misses: float = 0.0
    since: int = 0
    tokens_per_step: float = 1.0


def _moved(old: float, new: float) -> float:
    """A running mean that follows falling times fast and rising times slowly: the first steps load
    compiled code, and any step may be disturbed."""
    if old == 0.0:
        return new
    return old + (3 * _RATE if new < old else _RATE) * (min(new, 3 * old) - old)


class ExactControl:
    """How many tokens an `exact` slice runs ahead, and when it does not pay: one plan per key (a
    profile and a scope). One writer, one thread.

    It puts measured seconds (of the body, the full head, slices and verifications) and measured
    misses into the cost model of vocab_store.cost. It does not decide which tokens are verified
    (commit.py) or which rows a slice has. It takes and returns numbers, reads no clock, and cannot
    change a text.

    Emitted tokens of one sequence that wait for the full head are its unverified tokens. When
    `verify_every` (N) of them wait, the full head verifies them. Times are those of the batches
    that run now. With trees a step yields several tokens: costs are taken per token of a sequence,
    so that N tokens are N / tokens-per-step steps.

    Misses and tokens a step depend on texts. They are counted per key, and a key serves one scope,
    so that its plans tell a client nothing about the texts of others. Times, ends and sizes of
    batches are counted per device.

    max_verify_every: most tokens held back. may_use_full_head: whether `exact` may draw from the
    full head where that is cheaper (tests of verification switch it off).
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        max_verify_every: int = 64,
        may_use_full_head: bool = True,
    ) -> None:
        self.max_verify_every = max_verify_every
        self._vocab_size = vocab_size
        self._first_verify_every = min(_FIRST_VERIFY_EVERY, max_verify_every)
        self._may_use_full_head = may_use_full_head
        self._num_steps = 0
        self._body_s = 0.0
        self._full_s = 0.0
        self._slice_s = 0.0
        self._slice_ids = 0.0
        # Running means of a verification's rows, seconds, rows squared, and both multiplied.
        self._verified = np.zeros(4)
        self._num_sequences = 1.0
        self._ends = 0.0  # chance per step
        self._plans: OrderedDict[Hashable, ExactPlan] = OrderedDict()

    def add(self, key: Hashable, num_ids: int, miss_rate: float | None) -> None:
        """Begin to plan for a key with slices of about num_ids; a known one is kept."""
        if key not in self._plans:
            miss = 0.02 if miss_rate is None else min(1.0, max(0.0, miss_rate))
            plan = ExactPlan(self._first_verify_every, num_ids=num_ids)
            plan.misses = plan.tokens * miss
            self._plans[key] = plan
            self._refresh(plan)
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)

    def plan(self, key: Hashable) -> ExactPlan:
        """The plan of a key; one with the first N for an unknown key."""
        return self._plans.get(key) or ExactPlan(self._first_verify_every)

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
        plan = self.plan(key)
        plan.tokens_per_step = _moved(plan.tokens_per_step, float(max(1, num_tokens)))

    def observe_ends(self, any_ended: bool) -> None:
        """One more step of sequences in `exact`, whichever head they draw from. any_ended: whether
        one of them has left since the step before, which verifies the others early."""
        self._ends += _END_RATE * (any_ended - self._ends)

    def observe_verify(self, seconds: float, num_rows: int, num_sequences: int) -> None:
        """One verification: num_rows tokens of num_sequences sequences in `seconds`."""
        self._num_sequences = _moved(self._num_sequences, float(num_sequences))
        old = self._verified
        seconds = min(seconds, 3.0 * float(old[1])) if old[0] else seconds
        new = np.array((num_rows, seconds, num_rows * num_rows, num_rows * seconds), np.float64)
        self._verified = old + _RATE * (new - old) if old[0] else new

    def observe_checked(self, key: Hashable, num_tokens: int, missed: bool) -> None:
        """num_tokens tokens of a key were verified; missed: the last of them was wrong."""
        plan = self.plan(key)
        plan.tokens += num_tokens
        plan.misses += missed
        if plan.tokens > _MEMORY_TOKENS:
            plan.tokens *= 0.5
            plan.misses *= 0.5
        plan.since += num_tokens
        if plan.since >= _REFRESH_TOKENS:
            self._refresh(plan)

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
        # A verification multiplies the whole head, and a step may look at a part of it (a Screen).
        verify_s, row_s = self._full_s, 0.0
        rows, seconds, squares, products = self._verified.tolist()
        if rows:  # a line; flat where all have had as many rows
            spread = squares - rows * rows
            row_s = (products - rows * seconds) / (max(0.0, spread) + _ALIKE * rows * rows)
            row_s = min(max(0.0, row_s), seconds / rows)
            verify_s = max(verify_s, seconds - row_s * rows)
        per_token = 1.0 / tokens_per_step
        return HeadCosts(
            body_s=self._body_s * per_token,
            full_s=self._full_s * per_token,
            vocab_size=self._vocab_size,
            slice_fixed_s=fixed_s * per_token,
            verify_s=verify_s,
            verify_row_s=row_s * self._num_sequences,
            early_end=self._ends * per_token,
        )

    def fill(self, profile: VocabProfile) -> int | None:
        """How much of the fill order an `exact` T should take; None while costs are not known.

        All scopes share T, so it is priced by the device's times alone, for steps without drafts.
        """
        costs = self.costs()
        if costs is None or profile.miss_rate is None or self._num_steps < _STEPS_TO_FILL:
            return None
        num, _ = best_fill(
            costs,
            profile.slice.num_ids,
            profile.miss_rate,
            profile.fill_gains,
            max_verify_every=self.max_verify_every,
        )
        return num

    def _refresh(self, plan: ExactPlan) -> None:
        plan.since = 0
        costs = self.costs(plan.tokens_per_step)
        if costs is None:
            return
        miss = min(1.0, plan.misses / plan.tokens)
        plan.verify_every, cost_s = best_verify_every(
            costs, plan.num_ids, miss, self.max_verify_every
        )
        limit = full_cost_s(costs) * (1.0 if plan.uses_slice else _GAIN_TO_RETURN)
        plan.uses_slice = not self._may_use_full_head or cost_s < limit


# -- which rows a sequence sees --------------------------------------------------------------------


class SliceBook:
    """All slices of one engine. Not thread safe: the engine's loop owns it. index: in which rows
    they lie."""

    def __init__(
        self,
        runner: Runner,
        profiles: ProfileSource | None,
        control: ExactControl,
        *,
        capacity: int,
        slices_only: bool = False,
    ) -> None:
        """capacity: dynamic rows. profiles: None refuses every slice. slices_only: all other modes
        are refused."""
        self.control = control
        self._runner = runner
        self._vocab_size = runner.info.vocab_size
        self._profiles = profiles
        self.index = SliceCacheIndex(capacity)
        self._tables: dict[str, int] = {}  # profile key -> the runner's number
        self._next_table = 0
        self._newest: dict[str, str] = {}  # mode and profile name -> key
        self._fills: dict[str, int] = {}
        # Missed ids; the scope whose last miss is oldest comes first.
        self._learned: OrderedDict[ScopedProfile, OrderedDict[int, None]] = OrderedDict()
        self._batch: Batch | None = None  # of a step with slices
        self.last_verify_every = 0
        self._has_warned = False
        self._slices_only = slices_only
        self._has_left = False  # a sequence in `exact`, since the last step that had one
        self._found: tuple[VocabProfile, str, VocabSlice]  # by the last `refusal`

    # -- requests ---------------------------------------------------------------------------

    def refusal(self, request: Request) -> tuple[str, str] | None:
        """(message, code) for a request whose slice cannot be had, or None."""
        asked = request.vocabulary
        if self._slices_only and asked.mode != "slice":
            return (
                f"vocabulary.mode: {asked.mode} needs the whole LM head of {request.model}, which "
                "stays in its file, because all of the model's tasks say `mode: slice`; ask for "
                "one of them, or have the server started with `engine.full_head: device`",
                "unsupported_parameter",
            )
        if asked.mode == "full":
            return None
        if self._profiles is None:
            return "vocabulary slices are not available on this device", "unsupported_parameter"
        if asked.profile is None:
            return (
                f"vocabulary.mode: {asked.mode} needs a profile; the task has none",
                "invalid_value",
            )
        try:
            self._found = self._profile(asked)
        except (ValueError, OSError) as error:  # whose words may name the server's folders
            _log.error("vocabulary profile %s: %s", asked.profile, error)
            return "The task's vocabulary profile cannot be read.", NO_PROFILE
        return None

    def open(self, request: Request) -> SequenceHead | None:
        """The slice of one choice; None in mode "full". Called right after `refusal`: the choices
        get the profile that it found, whatever becomes of its file.

        `slice`: T, the prompt and the ids that the request names, and nothing else. `exact` may
        begin with more: frequent ids, while they lower the expected cost, and ids missed before.
        """
        asked = request.vocabulary
        if asked.mode == "full":
            return None
        profile, key, static = self._found
        self._newest[f"{asked.mode}:{asked.profile}"] = key
        sampling, num = request.sampling, self._vocab_size
        # A request that names an id means it to be able to win.
        slice_ = static.union(
            np.asarray(request.prompt_ids, np.int32),
            [i for i, bias in sampling.logit_bias if bias > BANNED and i < num],
            [i for i in sampling.stop_token_ids if i < num],
            [i for i in sampling.allowed_token_ids or () if i < num],
        )
        if asked.mode == "exact":
            slice_ = slice_.union(list(self._learned.get((key, request.scope), ())))
        return SequenceHead(
            asked.mode,
            key,
            request.scope,
            static,
            slice_,
            asked.verify_every,
            profile.miss_rate,
            proposes=asked.mode == "slice",
        )

    def _profile(self, asked: VocabularyParams) -> tuple[VocabProfile, str, VocabSlice]:
        """(profile, key of T, T). The key names the version, so running requests keep theirs."""
        assert self._profiles is not None and asked.profile is not None
        profile = self._profiles(asked.profile)
        if profile.slice.num_ids and int(profile.slice.ids[-1]) >= self._vocab_size:
            raise ValueError("it holds ids that the model never draws")
        if asked.mode == "slice":
            return profile, profile.version, profile.slice
        if profile.version not in self._fills:
            fill = self.control.fill(profile)
            if fill is None:  # nothing measured yet: ask again
                return profile, f"{profile.version}+0", profile.slice
            self._fills[profile.version] = fill
        num_fill = self._fills[profile.version]
        return profile, f"{profile.version}+{num_fill}", profile.filled(num_fill)

    # -- seats ------------------------------------------------------------------------------

    def seat(self, sequence: Sequence) -> None:
        """Pin and copy a sequence's rows. Where they do not fit, or a copy fails, the full head is
        computed and read at the slice's ids: the same draws, only slower. No step may be in
        flight."""
        head = sequence.head
        if head is None or head.where is not None:
            return
        if head.mode == "exact":
            self.control.add(head.key, head.slice.num_ids, head.miss_rate)
        try:
            self._load_table(head)
            placement = self.index.acquire(sequence, head.profile, head.slice, scope=head.scope)
            try:
                self._load_rows(sequence, head, placement)
            except Exception:
                self.index.release(sequence)
                raise
        except Exception as error:  # the choices of others do not fail for it
            level = logging.DEBUG if self._has_warned else logging.WARNING
            _log.log(level, "a slice is not cached, the full head stands in for it: %s", error)
            self._has_warned = True
            ids = head.slice.ids.copy()
            head.where = HeadSlice(ids, np.empty(0, np.int32), -1, 0)
            return
        self._find(sequence, head)
        self._drop_old()

    def extend(self, sequence: Sequence, token_id: int) -> None:
        """Add a missed id to a slice (`exact` only) and to those of its scope that begin later."""
        head = sequence.head
        assert head is not None and head.mode == "exact"
        learned = self._learned.setdefault(head.key, OrderedDict())
        self._learned.move_to_end(head.key)
        if len(self._learned) > _MAX_SCOPES:
            self._learned.popitem(last=False)
        learned[token_id] = None
        learned.move_to_end(token_id)
        if len(learned) > _MAX_LEARNED:
            learned.popitem(last=False)
        if token_id in head.slice:
            return
        if head.where is not None and head.where.table >= 0:
            try:
                placement = self.index.extend(sequence, [token_id])
                self._load_rows(sequence, head, placement)
            except Exception as error:
                _log.debug("a missed id is not cached: %s", error)  # it will be missed again
                return
            head.slice = head.slice.union([token_id])
            self._find(sequence, head)

    def leave(self, sequence: Sequence) -> None:
        """Unpin a sequence's rows. Idempotent."""
        head = sequence.head
        if head is None or head.where is None:
            return
        self._has_left |= head.mode == "exact"
        if head.where.table >= 0:
            self.index.release(sequence)
            head.where = None
            self._drop_old()

    def _load_table(self, head: SequenceHead) -> None:
        if head.profile not in self._tables:
            self._runner.load_table(self._next_table, head.static.ids.copy())
            self._tables[head.profile] = self._next_table
            self._next_table += 1
        self.index.add_profile(head.profile, head.static)

    def _drop_old(self) -> None:
        """Forget tables of replaced profile versions, once no sequence uses them."""
        wanted = set(self._newest.values())
        for key in [k for k in self._tables if k not in wanted]:
            if self.index.drop_profile(key):
                self._runner.drop_table(self._tables.pop(key))

    def _load_rows(self, sequence: Sequence, head: SequenceHead, placement: Placement) -> None:
        """Copy the rows that a placement lists. Raises what the runner raises; then none of them is
        cached."""
        if placement.num_loads:
            try:
                self._runner.load_rows(placement.load_ids, placement.load_positions)
            except Exception:
                self.index.take_back(sequence, placement.load_ids)
                raise
            head.add(num_loaded=placement.num_loads)

    def _find(self, sequence: Sequence, head: SequenceHead) -> None:
        ids, columns, num_static = self.index.columns(sequence)
        head.where = HeadSlice(ids, columns, self._tables[head.profile], num_static)

    # -- steps ------------------------------------------------------------------------------

    def decide(self, rows: Rows) -> None:
        """Which sequences draw from their slice in this step.

        `exact` draws its first token from the full head, and every token while that is cheaper:
        by the measured costs, or because others in the batch read the full head anyway.
        """
        heads = [sequence.head for sequence in rows.sequences]
        if all(head is None for head in heads):
            return
        if any(head is not None and head.mode == "exact" for head in heads):
            self.control.observe_ends(self._has_left)
            self._has_left = False
        is_read = any(draws and head is None for draws, head in zip(rows.draws, heads, strict=True))
        for sequence, head in zip(rows.sequences, heads, strict=True):
            if head is None or head.mode == "slice":
                continue
            if sequence.num_output == 0 or head.where is None or head.where.table < 0:
                head.proposes = False
            else:
                head.proposes = bool(head.unverified) or (
                    not is_read and self.control.plan(head.key).uses_slice
                )

    def attach(self, rows: Rows, built: Built, running: Iterable[Sequence]) -> Batch:
        """The Batch of a step with the slices of its draws.

        running: sequences whose unverified tokens have hidden states that must stay.
        """
        self._batch = None
        batch, choices = built.batch, built.choices
        if rows.is_plain or not any(sequence.head is not None for sequence in rows.sequences):
            return batch
        draw_slice = np.full(batch.num_draws, -1, np.int32)
        draw_keep = np.full(batch.num_draws, -1, np.int32)
        slices: list[HeadSlice] = []
        used = {kept.place for s in running if s.head is not None for kept in s.head.unverified}
        place = 0
        for c, item in enumerate(built.item_of):
            head = rows.sequences[item].head
            if head is None or not head.proposes:
                continue
            first = int(choices[DRAW, c])
            last = first + 1 + int(choices[END_NODE, c] - choices[FIRST_NODE, c])
            assert head.where is not None
            draw_slice[first:last] = len(slices)
            slices.append(head.where)
            if head.mode != "exact":
                continue
            for d in range(first, last):
                while place in used:
                    place += 1
                draw_keep[d] = place
                place += 1
        if not slices:
            return batch
        keeps = draw_keep if (draw_keep >= 0).any() else None
        self._batch = replace(batch, draw_slice=draw_slice, slices=tuple(slices), draw_keep=keeps)
        return self._batch

    def keep(self, sequence: Sequence, draws: SequenceOf[int], num_emitted: int) -> None:
        """The first num_emitted of the step's draws were emitted and wait for the full head."""
        head, batch = sequence.head, self._batch
        assert head is not None and batch is not None and batch.draw_keep is not None
        if not head.unverified:
            head.params = batch.params[int(batch.draw_params[draws[0]])]
        for d in draws[:num_emitted]:
            mask = int(batch.draw_mask[d])
            bits = batch.masks[mask] if mask >= 0 else None
            head.unverified.append(Unverified(int(batch.draw_keep[d]), bits))
        self.control.observe_tokens(head.key, num_emitted)

    def is_due(self, sequence: Sequence) -> bool:
        """Whether N tokens of a sequence wait."""
        head = sequence.head
        assert head is not None
        return len(head.unverified) >= self.verify_every(head)

    def verify_every(self, head: SequenceHead) -> int:
        """N of a sequence, 0 if it never verifies: the request's, else what costs least now."""
        if head.mode != "exact" or head.where is None or head.where.table < 0:
            return 0
        self.last_verify_every = head.verify_every or self.control.plan(head.key).verify_every
        return self.last_verify_every

    def count_step(self, sequence: Sequence) -> None:
        """One decode step of a sequence, for its counts."""
        head = sequence.head
        if head is None:
            return
        if head.proposes:
            head.add(num_slice_steps=1, head_rows=head.slice.num_ids)
        else:
            head.add(num_full_steps=1, head_rows=self._vocab_size)

    def observe(self, batch: Batch, body_s: float, head_s: float, has_prompt_rows: bool) -> None:
        """The times of a step, for the control."""
        if has_prompt_rows:
            if batch.draw_slice is None:
                self.control.observe_first(head_s)
            return
        if batch.draw_slice is None:
            self.control.observe_step(body_s, head_s, batch.num_draws, 0, 0.0)
            return
        sliced = int((batch.draw_slice >= 0).sum())
        if any(s.table < 0 for s in batch.slices):
            return
        mean = sum(s.ids.shape[0] for s in batch.slices) / len(batch.slices)
        self.control.observe_step(body_s, head_s, batch.num_draws - sliced, sliced, mean)

    # -- verification -----------------------------------------------------------------------

    def learn(self, sequence: Sequence, token_ids: SequenceOf[int]) -> None:
        """Note tokens that an `exact` sequence drew from the full head: ids outside its slice are
        misses."""
        head = sequence.head
        assert head is not None
        for token in token_ids:
            missed = token not in head.slice
            self.control.observe_checked(head.key, 1, missed)
            if missed:
                self.extend(sequence, token)

    def verify(self, sequences: SequenceOf[Sequence]) -> Drawn:
        """All unverified tokens of these sequences, one sequence after the other, drawn again.
        Raises what the runner raises, but no MemoryError: it takes no more in a larger step."""
        try:
            return self._runner.verify(*self._check_batch(sequences))
        except MemoryError as error:
            raise RuntimeError(f"no memory to verify: {error}") from error

    def observe_verify(self, sequences: SequenceOf[Sequence], seconds: float) -> list[int]:
        """Count a verification; how many tokens of each sequence it looked at."""
        heads = [s.head for s in sequences if s.head is not None]
        lengths = [len(head.unverified) for head in heads]
        self.control.observe_verify(seconds, sum(lengths), len(heads))
        for head in heads:
            head.add(
                num_verifications=1,
                verify_s=seconds,
                head_rows=self._vocab_size // max(1, len(heads)),
            )
        return lengths

    def settle(self, sequence: Sequence, num_right: int, num_checked: int) -> None:
        """Of num_checked tokens the first num_right stand; the others are dropped."""
        head = sequence.head
        assert head is not None
        missed = num_right < num_checked
        head.unverified.clear()
        head.params = None
        head.add(
            num_checked=num_right + missed, num_missed=missed, num_dropped=num_checked - num_right
        )
        self.control.observe_checked(head.key, num_right + missed, missed)

    def _check_batch(self, sequences: SequenceOf[Sequence]) -> tuple[Batch, Int32]:
        drawn: list[tuple[int, ...]] = []
        params: list[DrawParams] = []
        masks: list[UInt32] = []
        for sequence in sequences:
            head = sequence.head
            assert head is not None and head.params is not None
            start = sequence.prompt_len + sequence.num_verified
            for i, waiting in enumerate(head.unverified):
                token, mask = int(sequence.ids[start + i - 1]), -1
                if waiting.mask is not None:
                    mask = len(masks)
                    masks.append(waiting.mask[None])
                parent = len(drawn) - 1 if i else -1
                drawn.append((token, start + i, parent, len(params), mask, waiting.place))
            params.append(head.params)
        columns: Int32 = np.array(drawn, np.int32).reshape(-1, 6).T.copy()
        token_ids, positions, parents, draw_params, draw_mask, kept = columns
        rows = np.arange(len(drawn), dtype=np.int32)
        zeros = np.zeros(len(drawn), np.int32)
        batch = Batch(
            token_ids=token_ids,
            positions=positions - 1,
            seq_ids=zeros,
            slots=zeros,
            prefix_len=zeros,
            path_start=zeros,
            path_len=zeros,
            block_tables=np.zeros((1, 1), np.int32),
            draw_rows=rows,
            draw_params=draw_params,
            draw_parent=parents,
            draw_positions=positions,
            draw_mask=draw_mask,
            masks=as_wide(masks),
            params=tuple(params),
        )
        return batch, kept

    # -- figures ----------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """LM-head rows that are copied beside the head."""
        return self.index.num_static_rows + self.index.num_cached_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of these rows."""
        return self.num_rows * self._runner.head_row_bytes
