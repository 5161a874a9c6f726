"""Sequence: the engine's mutable state of one choice of a Request.

Its numbers lie in the engine's Table, at its seat; here is what only Python can hold. Fields are
grouped by the one module that writes them. A sequence has three marks over its output
tokens, emitted >= verified >= released: emitted ids exist and may be extended, verified ids can
no longer change, released ids were handed out in a Delta. With a full LM head the three move
together; an `exact` slice lets `verified` lag and cuts the sequence back with `rollback`
(docs/DESIGN.md section 6).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from drafters.arrays import Float32
from drafters.base import Drafter, DraftSession
from server.engine.adapters import Adapter
from server.engine.batch import DrawParams, HeadSlice, Int32, UInt32
from server.engine.grammar import GrammarState
from server.engine.stops import StopMatcher
from server.engine.table import LAST_ID, MAX_OUTPUT, NUM_TOKENS, PROMPT_LEN, Column, Table
from server.token_bytes import TokenBytes
from server.types import Request, StepCounts, TokenLogprob, VocabularyCounts
from vocab_store.slice import VocabSlice

_NO_IDS: Int32 = np.empty(0, np.int32)
_NO_COUNTS = StepCounts()

PRIORITY_STEP_S = 5.0
"""How long a request of one priority waits before it goes ahead of a new one of the next."""

MAX_PRIORITY = 64
"""Priorities beyond this order ties only: nobody waits more than 2 * 64 * 5 s for others, and a
look at the queue is one at so many levels."""


def _no_ids() -> Int32:
    return _NO_IDS


class Status(Enum):
    """Where a sequence stands. NEW: in no queue, as a choice is until it forks off the first."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


# -- what part of the LM head it sees --------------------------------------------------------------


ScopedProfile = tuple[str, str]
"""(key of a profile version, scope)"""


@dataclass(frozen=True, slots=True, eq=False)
class Unverified:
    """One emitted, unverified token: where its hidden state is kept, and its grammar mask."""

    place: int
    mask: UInt32 | None


@dataclass(slots=True, eq=False)
class SequenceHead:
    """What part of the LM head one sequence sees. Written by SliceBook and the engine's accept.

    profile: key of the profile version it was opened with. scope: of its request. static: T, as
    that profile's table has it. slice: all ids it may draw; `exact` adds missed ones. miss_rate:
    the profile's expectation, if it has one. where: for the Batch, None until it is seated.
    proposes: whether this step's draws come from the slice. unverified: emitted tokens in order.
    params: DrawParams before the first of them.
    """

    mode: str
    profile: str
    scope: str
    static: VocabSlice
    slice: VocabSlice
    verify_every: int
    miss_rate: float | None = None
    where: HeadSlice | None = None
    proposes: bool = False
    unverified: list[Unverified] = field(default_factory=list)
    params: DrawParams | None = None
    counts: VocabularyCounts = field(default_factory=VocabularyCounts)

    @property
    def key(self) -> ScopedProfile:
        """The key of its misses and its plan (slices.py)."""
        return self.profile, self.scope

    def add(self, **more: float) -> None:
        """Add to the counts."""
        values = {name: getattr(self.counts, name) + value for name, value in more.items()}
        self.counts = replace(self.counts, **values)

    def take_counts(self, verify_every: int) -> VocabularyCounts:
        """The counts since the last call, with the slice's size and N now."""
        counts = replace(self.counts, num_ids=self.slice.num_ids, verify_every=verify_every)
        self.counts = VocabularyCounts()
        return counts


# -- a choice --------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One choice. `ids` holds prompt and output; position p is ids[p].

    The KV of positions [0, num_computed) is in the cache. The rows still to be computed are
    [num_computed, num_tokens); the last of them is drawn from.
    """

    # Identity: never written again; the adapter by Admission.
    request: Request
    choice_id: int
    arrival_no: int
    _: KW_ONLY
    max_model_len: InitVar[int]
    table: Table
    eos_ids: frozenset[int]
    """EOS of the model. Those that end this choice: none under ignore_eos."""
    root_key: bytes
    adapter: Adapter | None = None
    order: tuple[float, int, int, int] = field(init=False)
    place: tuple[int, str] = field(init=False)
    """Its priority and its key, which share the engine (plan.py)."""
    seat: int = field(init=False)
    prompt_len = Column()
    max_output = Column()
    """Most tokens it may have, the context's limit included."""
    banned_until: Int32 = field(default_factory=_no_ids)

    # Tokens: written by append() and rollback() only.
    ids: Int32 = field(init=False)
    num_tokens = Column()
    last_id = Column()
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_sources: list[str] = field(default_factory=list)
    """One per emitted token, when the request asks."""
    count_ids: Int32 = field(default_factory=_no_ids)
    count_out: Int32 = field(default_factory=_no_ids)
    count_prompt: Int32 = field(default_factory=_no_ids)
    matcher: StopMatcher | None = None
    params: DrawParams | None = None
    """For the sampler, while nothing in them changes."""

    # Set by the engine once it is compiled; consumes in commit.cut, goes back in rollback().
    grammar: GrammarState | None = None

    # Marks (beside num_tokens): written by the engine through verify() and release().
    num_verified = Column()
    num_released = Column()

    # KV: written by the scheduler and, after a step, by the engine.
    status: Status = Status.NEW
    num_blocks = Column()
    room = Column()
    num_computed = Column()
    keys: list[bytes] = field(default_factory=list)
    """Content keys of the leading full blocks, computed lazily."""
    num_published = Column()
    num_cached_tokens: int = -1
    """-1: not admitted yet."""
    siblings: list[Sequence] = field(default_factory=list)
    """Choices that fork off this one at the last prompt row."""

    # Reporting: written by the engine.
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    label_logprobs: tuple[float, ...] = ()
    counts: StepCounts = _NO_COUNTS
    has_spoken: bool = False
    """Its first Delta went out."""
    rejected_drafts: list[tuple[int, str, tuple[int, ...]]] = field(default_factory=list)
    """Not told yet, when it asks."""
    first_step_s: float = 0.0
    num_steps = Column()
    """Decode steps so far."""

    # Both written by speak().
    is_plain = Column()
    """Whether nothing but its length changes from step to step for the runner."""
    is_simple = Column()
    """Whether its tokens need nothing but numbers either: no text is looked at, and nothing is told
    of them but themselves."""

    # Vocabulary: written by SliceBook and, after a step, by the engine. None in mode "full".
    head: SequenceHead | None = None

    # Speculation: written by Drafts.
    drafter: Drafter | None = None
    """Where it has a seat at Gain: found when it is first wanted."""
    session: DraftSession | None = None
    """Opened when it is first wanted."""
    drafter_name: str = "off"
    sources: tuple[str, ...] = ("off",)
    gain_seat = Column()
    """Of Gain, while it may draft, else -1."""
    is_resting: bool = False
    """Gain does not ask it now: its session gets no updates and may not exist."""
    num_told: int = 0
    """Output tokens that the session was told of."""
    first_state: Float32 | None = None
    """What the first token was drawn from (StateRunner), until its session is opened."""
    has_failed: bool = False
    """A step with drafts of its choices has failed. Written by the engine."""

    def __post_init__(self, max_model_len: int) -> None:
        request, sampling = self.request, self.request.sampling
        # Ageing: each step of priority is worth so many seconds of waiting, so a request is
        # overtaken by those that arrive within that time and by no others; nobody starves.
        level = max(-MAX_PRIORITY, min(MAX_PRIORITY, request.priority))
        due_s = request.arrival_s + level * PRIORITY_STEP_S
        self.place = (level, request.tenant)
        self.order = (due_s, request.priority, self.arrival_no, self.choice_id)
        prompt_len = len(request.prompt_ids)
        max_output = max(0, min(sampling.max_tokens, max_model_len - prompt_len))
        if sampling.ignore_eos:
            self.eos_ids = frozenset()
        end_ids = sorted(self.eos_ids.union(sampling.stop_token_ids))
        if sampling.min_tokens > 0:
            self.banned_until = np.asarray(end_ids, np.int32)
        self.ids = np.empty(prompt_len + max_output, np.int32)
        self.ids[:prompt_len] = request.prompt_ids
        self.seat = self.table.take_seat(end_ids)
        lines = (PROMPT_LEN, NUM_TOKENS, MAX_OUTPUT, LAST_ID)
        numbers = (prompt_len, prompt_len, max_output, request.prompt_ids[-1])
        self.table.numbers[lines, self.seat] = numbers
        if sampling.has_penalties:
            self._recount()
        if request.echo_logprobs is not None:
            self.prompt_logprobs.append(None)

    def match_stops(self, table: TokenBytes) -> None:
        """Match the request's stop strings on a table's bytes. Called before the first token."""
        sampling = self.request.sampling
        self.matcher = StopMatcher(sampling.stop, table, sampling.skip_special_tokens)

    @property
    def num_output(self) -> int:
        """Tokens emitted."""
        item, seat = self.table.numbers.item, self.seat
        return int(item(NUM_TOKENS, seat) - item(PROMPT_LEN, seat))

    @property
    def num_left(self) -> int:
        """Tokens that may still be emitted."""
        item, seat = self.table.numbers.item, self.seat
        return int(item(MAX_OUTPUT, seat) + item(PROMPT_LEN, seat) - item(NUM_TOKENS, seat))

    def speak(self) -> None:
        """Its first Delta, which tells more than others, goes out: note whether later steps need
        more of it than numbers. They never need more than they did."""
        request, sampling = self.request, self.request.sampling
        self.has_spoken = True
        is_plain = (
            self.grammar is None
            and self.head is None
            and not sampling.has_penalties
            and sampling.min_tokens == 0
        )
        self.is_plain = is_plain
        self.is_simple = (
            is_plain
            and self.matcher is None
            and sampling.num_logprobs is None
            and not request.report_sources
            and not request.report_rejected
        )

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt positions still lack the logprobs the request asked for."""
        return (
            self.request.echo_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len
        )

    def blocks(self) -> list[int]:
        """The blocks in position order."""
        blocks: list[int] = self.table.blocks[self.seat, : self.num_blocks].tolist()
        return blocks

    def output_ids(self, start: int = 0) -> tuple[int, ...]:
        """Emitted ids from output index `start` on."""
        item, seat = self.table.numbers.item, self.seat
        first = item(PROMPT_LEN, seat) + start
        return tuple(self.ids[first : item(NUM_TOKENS, seat)].tolist())

    def draw_params(self) -> DrawParams:
        """What the sampler needs at the current root."""
        if self.params is not None:
            return self.params
        params = DrawParams(
            self.request.sampling,
            self.choice_id,
            self.banned_until,
            self.count_ids,
            self.count_out,
            self.count_prompt,
            self.num_tokens - self.prompt_len,
        )
        sampling = self.request.sampling
        if not sampling.has_penalties and sampling.min_tokens == 0:
            self.params = params  # nothing in them changes
        return params

    def append(self, token_ids: list[int]) -> None:
        """Emit tokens. The stop matcher has taken them already (commit.cut)."""
        start = self.num_tokens
        end = start + len(token_ids)
        self.ids[start:end] = token_ids
        self.num_tokens = end
        self.last_id = token_ids[-1]
        if self.request.sampling.has_penalties:
            for token in token_ids:
                self._count(token)

    def verify(self, num_output: int) -> None:
        """The first num_output emitted tokens can no longer change."""
        if not self.num_verified <= num_output <= self.num_output:
            raise ValueError(f"cannot verify {num_output} of {self.num_output} tokens")
        self.num_verified = num_output

    def rollback(self, num_output: int) -> None:
        """Forget every token emitted after the first num_output, with its counts, logprobs and stop
        state.

        The KV past the new root is forgotten too; the caller releases blocks that became
        superfluous. Raises ValueError when so many were never emitted or verified tokens would go.
        """
        if not self.num_verified <= num_output <= self.num_output:
            raise ValueError(
                f"cannot roll back to {num_output}: {self.num_verified} tokens are verified, "
                f"{self.num_output} emitted"
            )
        if num_output == self.num_output:
            return
        self.num_tokens = self.prompt_len + num_output
        self.last_id = int(self.ids[self.num_tokens - 1])
        self.num_computed = min(self.num_computed, self.num_tokens - 1)
        del self.logprobs[num_output:]
        del self.token_sources[num_output:]
        self.rejected_drafts = [d for d in self.rejected_drafts if d[0] < num_output]
        if self.head is not None:
            del self.head.unverified[num_output - self.num_verified :]
        if self.matcher is not None:
            self.matcher.replay(self.output_ids())
        if self.grammar is not None:
            self.grammar.rollback(min(self.grammar.num_consumed, num_output))
        if self.request.sampling.has_penalties:
            self._recount()

    def release(self) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Verified ids that were not handed out yet, with their logprobs when asked for."""
        start, end = self.num_released, self.num_verified
        self.num_released = end
        ids = self.ids[self.prompt_len + start : self.prompt_len + end].tolist()
        return tuple(ids), tuple(self.logprobs[start:end])

    def take_rejected(self, start: int) -> tuple[tuple[int, str, tuple[int, ...]], ...]:
        """Delta.rejected_drafts of the tokens that were released from output index `start` on; once
        each, so that a long text's are not gone through at every step."""
        drafts, end = self.rejected_drafts, self.num_released
        self.rejected_drafts = [draft for draft in drafts if draft[0] >= end]
        return tuple((at - start, source, ids) for at, source, ids in drafts if at < end)

    def _count(self, token: int) -> None:
        # The arrays of the step under way may still be read by a device: never changed in place.
        at = int(np.searchsorted(self.count_ids, token))
        if at < self.count_ids.shape[0] and self.count_ids[at] == token:
            self.count_out = self.count_out.copy()
            self.count_out[at] += 1
        else:
            self.count_ids = _insert(self.count_ids, at, token)
            self.count_out = _insert(self.count_out, at, 1)
            self.count_prompt = _insert(self.count_prompt, at, 0)

    def _recount(self) -> None:
        out_ids, out = np.unique(self.ids[self.prompt_len : self.num_tokens], return_counts=True)
        prompt = (
            np.unique(self.ids[: self.prompt_len])
            if self.request.sampling.counts_prompt
            else _NO_IDS
        )
        ids = np.union1d(out_ids, prompt).astype(np.int32)
        count_out = np.zeros(ids.shape[0], np.int32)
        count_out[np.searchsorted(ids, out_ids)] = out
        self.count_ids = ids
        self.count_out = count_out
        self.count_prompt = np.isin(ids, prompt).astype(np.int32)


def _insert(array: npt.NDArray[np.int32], at: int, value: int) -> Int32:
    grown = np.empty(array.shape[0] + 1, np.int32)
    grown[:at] = array[:at]
    grown[at] = value
    grown[at + 1 :] = array[at:]
    return grown
