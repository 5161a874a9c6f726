"""Drafts: the life of the draft sessions of an engine's choices, and the trees of a step.

    seat -> (draft, settle, teach)* -> close

Gain (gain.py) decides who is asked, and how many of all proposed nodes are verified. `draft` asks
the sessions, a grammar adds and drops nodes, a slice of the LM head drops nodes; then the trees of
all choices are one (trees.py): checked, pruned to what pays and fitted to blocks in compiled loops.

Nothing is done for drafts between a request's arrival and the end of its prompt's step that can
wait until that step is under way: a session that knows of no other output is opened while the
device works; on a CPU, whose cores the step computes on, once it is asked. Any other is opened when
it is first wanted. While a choice rests (`Sequence.is_resting`) its session gets no
updates and may not exist, nor may a drafter of its scope. What was emitted meanwhile it is told
before it is next asked, if it ever is.

If a drafter raises, its session is closed and the request goes on without drafts.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from drafters.arrays import Float32, Int32, Int64, Int64x2
from drafters.base import Drafter, DraftSession, LikelySession, StateSession
from drafters.tree import DraftTree
from server.engine.batch import Drawn
from server.engine.gain import REST, Gain, StepShape
from server.engine.grammar import FORCED, constrain
from server.engine.plan import Rows, Scheduler
from server.engine.sequence import Sequence
from server.engine.table import (
    ASKED,
    FIRST,
    FOUND,
    LEFT,
    NOT_DRAWN,
    NUM_TOLD,
    OF_GAIN,
    consider,
)  # fmt: skip
from server.engine.trees import ALL_STAY, DEPTH, ID, Trees, checked, no_trees
from server.types import SpeculationParams

_log = logging.getLogger(__name__)

_REASONS = ("", "prefill", "off", "length", "prefill")
"""Why what `consider` finds does not draft."""


# -- drafters -------------------------------------------------------------------------------------


DrafterFactory = Callable[[str, SpeculationParams], Drafter]
"""(task, speculation) -> Drafter. Raises ValueError for options it refuses."""

_WATCHED = 2  # choices a step: the tokens of all others wait for their turn
_MAX_KINDS = 1024  # of drafters that are known to be possible


class Unmade(NamedTuple):
    """What a drafter will be that may know nothing of how an answer begins (its `knows_starts`)."""

    name: str
    reads_states: bool


class DrafterRegistry:
    """Resolves a request's speculation to a Drafter, which is made once per distinct options.

    server.wiring registers, per drafter name, either a ready Drafter or a factory. A factory gets
    the task's name and the request's SpeculationParams, and may read `options` and `corpus`. Its
    result is kept for requests with the same (name, task, corpus, options, scope); the least
    recently used ones are dropped past a bound. A drafter serves one scope, because its calibration
    is made of that scope's outcomes alone.
    """

    def __init__(
        self, entries: Mapping[str, Drafter | DrafterFactory], *, max_made: int = 128
    ) -> None:
        self._entries = dict(entries)
        # Asked once: isinstance() of a Protocol looks through all its members.
        self._ready = {
            name: entry
            for name, entry in entries.items()
            if isinstance(entry, Drafter) and not isinstance(entry, type)
        }
        self._made: OrderedDict[tuple[object, ...], Drafter] = OrderedDict()
        self._max_made = max_made
        # By (name, task, corpus, options) of drafters that were made; None: these know something.
        self._kinds: dict[tuple[object, ...], Unmade | None] = {}

    def resolve(self, task: str, speculation: SpeculationParams) -> Drafter | None:
        """The drafter, or None for "off". Raises ValueError for an unknown name or bad options."""
        name = speculation.drafter
        if name == "off" or speculation.max_draft_tokens <= 0:
            return None
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(["off", *sorted(self._entries.keys() - {"off"})])
            raise ValueError(f"unknown drafter {name!r}; known: {known}")
        if name in self._ready:
            return self._ready[name]
        key = self._key(task, speculation)
        drafter = self._made.get(key)
        if drafter is None:
            drafter = cast("DrafterFactory", entry)(task, speculation)
            self._made[key] = drafter
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            self._kinds[key[:4]] = None
            if hasattr(drafter, "knows_starts"):
                self._kinds[key[:4]] = Unmade(drafter.name, getattr(drafter, "reads_states", False))
            if len(self._made) > self._max_made:
                self._made.popitem(last=False)
        else:
            self._made.move_to_end(key)
        return drafter

    def check(self, task: str, speculation: SpeculationParams) -> None:
        """Raise what `resolve` would, making no drafter if one was made for any scope, or to have
        what the scope's outputs left on disk read meanwhile."""
        if speculation.persists or self._key(task, speculation)[:4] not in self._kinds:
            self.resolve(task, speculation)

    def unmade(self, task: str, speculation: SpeculationParams) -> Unmade | None:
        """What the drafter will be, where it has still to be made and may know nothing but the
        prompt."""
        key = self._key(task, speculation)
        may_know = speculation.corpus or speculation.prediction_ids
        if may_know or speculation.max_draft_tokens <= 0 or key in self._made:
            return None
        return self._kinds.get(key[:4])

    @staticmethod
    def _key(task: str, speculation: SpeculationParams) -> tuple[object, ...]:
        own = speculation.scope, speculation.learn_tokens > 0
        return speculation.drafter, task, speculation.corpus, speculation.options, *own

    def forget(self, task: str | None = None, scope: str | None = None) -> None:
        """Make a task's drafters anew from now on (None: everyone's). Open sessions keep theirs.

        scope: only the drafters that draft from what this scope has learned.
        """
        for key in [
            k
            for k in self._made
            if (task is None or k[1] == task) and (scope is None or (k[4] == scope and k[5]))
        ]:
            del self._made[key]
        if scope is None:
            self._kinds.clear()  # what they are made of may have changed


# -- sessions and steps ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Rest:
    """Steps of the same choices in which nobody is asked, until a scope begins to repeat what stood
    before: they are watched in turn, one a step, and each is once. trees: of each such step.
    gain_seats: of those that have a drafter. num_left: of them that are still to come; num_done:
    that were."""

    seats: Int32
    trees: Trees
    gain_seats: list[int]
    num_left: int
    num_done: int = 0


class Drafts:
    """Writes the sequences' `drafter`, `session`, `drafter_name`, `sources`, `gain_seat`,
    `num_told`, `first_state` and `is_resting`. is_off: nobody in the last step had a drafter.
    num_errors: sessions that failed and were closed."""

    def __init__(
        self,
        drafters: DrafterRegistry,
        gain: Gain,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        max_rows: int,
        is_beside: bool = True,
        states: Callable[[int], Float32] | None = None,
    ) -> None:
        """gain: gives seats, decides, and learns what became of drafts. vocab_size: bound on ids.
        max_rows: most nodes a step; 0: nobody drafts. is_beside: whether the host works beside a
        step that computes, and not on its cores. states: of a StateRunner."""
        self.num_errors = self._num_opened = 0
        self.is_off = True
        self._gain = gain
        self._drafters = drafters
        self._scheduler = scheduler
        self._table = scheduler.table
        scheduler.roll_back = self.roll_back
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._is_beside = is_beside
        self._states = states
        self._logged: set[str] = set()
        self.num_open = 0  # choices that have a drafter
        self._rest: _Rest | None = None
        self._turn = 0  # whose tokens were watched last

    # -- before a step ----------------------------------------------------------------------

    def seat(self, sequence: Sequence) -> None:
        """Give a sequence its seat at Gain, unless the request wants no drafts. Called when it is
        seated. Where its scope is new or rests, and its drafter would know nothing but the prompt,
        that is made once it is wanted."""
        request = sequence.request
        task, spec = request.task, request.speculation
        if self._max_rows <= 0:
            return
        try:
            scope, unmade = (task, request.scope, spec.drafter, bool(spec.prediction_ids)), None
            if sequence.grammar is None and self._gain.rests(scope):
                unmade = self._drafters.unmade(task, spec)
            if unmade is None:
                drafter = self._drafters.resolve(task, spec)
                if drafter is None:
                    return
                reads_states = getattr(drafter, "reads_states", False)
                knows = bool(spec.prediction_ids) or getattr(drafter, "knows_starts", True)
                sequence.drafter_name = drafter.name
                self._give(sequence, drafter)
            else:
                (sequence.drafter_name, reads_states), knows = unmade, False
            foresees, scheduler = 0, self._scheduler
            if self._states is not None and reads_states:
                num_choices = len(scheduler.running) + len(scheduler.waiting)
                foresees = max(1, min(num_choices, scheduler.max_num_seqs))
            sequence.gain_seat = seat = self._gain.seat(scope, knows=knows, foresees=foresees)
            self.num_open += 1
            sequence.is_resting = not self._gain.is_asked(seat)
        except Exception as error:
            self.disable(sequence, error)

    @staticmethod
    def _give(sequence: Sequence, drafter: Drafter) -> None:
        sequence.drafter = drafter
        sequence.sources = tuple(getattr(drafter, "sources", ())) or (drafter.name,)
        if sequence.grammar is not None:
            sequence.sources = (*sequence.sources, FORCED)

    def draft(self, rows: Rows, *, is_plain: bool) -> Trees:
        """The trees of a step; what is chosen has its blocks. is_plain: nobody may draft."""
        num_opened = self._num_opened
        num = len(rows.sequences)
        self.is_off = not self.num_open
        if self.is_off:
            return no_trees(num)
        rest = self._rest
        if rest is not None:
            if rest.num_left and rest.seats is rows.seats:
                if not self._watch(rows.sequences, 1):
                    rest.num_left -= 1
                    rest.num_done += 1
                    return rest.trees
            self._end_rest()
        began = time.perf_counter()
        told: Int64x2 = np.empty((NUM_TOLD, num), np.int64)
        num_draws, num_keys = consider(self._table.numbers, rows.seats, rows.draws, told)
        lines = told.tolist()
        codes, num_left = lines[FOUND], lines[LEFT]
        why = [_REASONS[code] for code in codes]
        if FIRST in codes:
            for i, code in enumerate(codes):
                if code == FIRST:
                    why[i] = self._why_not_first(rows.sequences[i], num_left[i])
        places = [i for i, reason in enumerate(why) if not reason]
        if places and not is_plain:
            shape = StepShape(num_draws, rows.num_rows, num_keys / num_draws, 0)
            trees = self._asked(rows, why, places, told, lines, shape, began)
        else:
            trees = no_trees(num).told(why)
        wanted = 0
        for sequence, code in zip(rows.sequences, codes, strict=True):
            if sequence.session is not None and code != NOT_DRAWN and not sequence.is_resting:
                wanted = max(wanted, getattr(sequence.session, "num_likely", 0))
        trees.num_likely, trees.num_opened = wanted, self._num_opened - num_opened
        return trees

    def _why_not_first(self, sequence: Sequence, num_left: int) -> str:
        """Why a choice does not draft beside its first token, or ""."""
        if sequence.gain_seat < 0:
            return "off"
        if sequence.siblings:
            return "prefill"
        if num_left <= 1:
            return "length"
        # Without an output, and where nothing is known of how it begins, its session is not needed
        # yet.
        is_blank = sequence.drafter is None or (
            sequence.grammar is None
            and not sequence.request.speculation.prediction_ids
            and not getattr(sequence.drafter, "knows_starts", True)
        )
        return "prefill" if is_blank else ""

    def _asked(
        self,
        rows: Rows,
        why: list[str],
        places: list[int],
        told: Int64x2,
        lines: list[list[int]],
        shape: StepShape,
        began: float,
    ) -> Trees:
        """The trees of the items `places`, which may draft. why: of all items, written to. told:
        of `consider`, and the same numbers as lines. shape: nobody waits in it yet. began: when
        drafting did."""
        table, scheduler, gain = self._table, self._scheduler, self._gain
        choices = [rows.sequences[i] for i in places]
        decodes = not rows.num_prefill_rows and len(rows.sequences) == len(scheduler.running)
        if scheduler.num_waiting_tokens or not decodes:
            # A prompt that is alone in its step waits for nobody: its first tokens come together.
            is_alone = shape.num_draws == scheduler.num_awaiting_first == 1
            num_waiting = 0 if is_alone else scheduler.num_awaiting_first
            shape = shape._replace(num_waiting=num_waiting)
        room = min(self._max_rows, scheduler.max_num_batched_tokens - rows.num_rows)
        wanted = 0
        self._watch(choices, _WATCHED)
        for choice in choices:
            wanted += choice.request.speculation.max_draft_tokens
        num, left, of_gain = len(rows.sequences), lines[LEFT], lines[OF_GAIN]
        reasons, ceiling = gain.ask([of_gain[i] for i in places], shape, min(wanted, room))
        each: list[DraftTree | None] = [None] * num
        bounds = np.zeros((num, 2), np.int64)
        most, certain = [0] * num, np.zeros(num, np.int32)
        seats, asked, sliced, is_planned = told[OF_GAIN], told[ASKED], list[int](), False
        num_errors = self.num_errors
        for i, choice, reason in zip(places, choices, reasons, strict=True):
            why[i] = reason
            grammar, was_resting = choice.grammar, choice.is_resting
            # Without room beside its prompt, the step after it drafts from this one's rows.
            is_first = why[i] and left[i] == table.max_output[choice.seat]
            choice.is_resting = bool(reason)
            if is_first and gain.is_asked(choice.gain_seat):
                choice.is_resting, grammar = False, None
            if choice.is_resting and grammar is None:
                continue
            try:
                session = choice.session
                if session is None or was_resting:
                    session = self._opened(choice)
                if reason and grammar is None:
                    continue
                is_planned = True
                if room <= 0:
                    continue
                why[i] = why[i] or "no_match"
                adapter, depth = choice.adapter, left[i] - 1
                vocab_size = self._vocab_size if adapter is None else adapter.order.vocab_size
                bounds[i] = vocab_size, depth
                most[i] = min(
                    choice.request.speculation.max_draft_tokens, room if reason else ceiling
                )
                if not reason:
                    asked[i] = of_gain[i]
                    if hasattr(session, "least"):
                        session.least = gain.least
                if grammar is not None:
                    each[i], certain[i] = self._constrained(
                        choice, session, most[i], bounds[i], is_asked=not reason
                    )
                    continue
                each[i] = session.propose(most[i], depth)
                if choice.head is not None and choice.head.proposes:
                    sliced.append(i)
            except Exception as error:
                self.disable(choice, error)
        if not is_planned:
            trees = no_trees(num).told(why)
            self._begin_rest(rows, choices, trees, left)
            trees.seconds = time.perf_counter() - began
            return trees
        trees, errors = checked(each, bounds)
        for i, fault in errors:
            self.disable(rows.sequences[i], fault)
        if self.num_errors > num_errors:  # who has failed has no seat any more
            seats[:] = table.gain_seat[rows.seats]
            asked[seats < 0] = -1
        trees.certain, start = certain, trees.start.tolist()
        if sliced or any(start[i + 1] - start[i] > most[i] for i in range(num)):
            stays = np.ones(trees.nodes.shape[1], np.int32)
            for i in sliced:
                head, at = rows.sequences[i].head, slice(start[i], start[i + 1])
                assert head is not None
                # A node outside the slice could not be drawn, so it is dropped and never added.
                stays[at] = head.slice.positions(trees.nodes[ID, at]) >= 0
            trees.prune(np.array(most, np.int64), stays)
        columns = trees.start, trees.certain, trees.survival
        num_asked = gain.observe_asks(asked, *columns)
        taken = gain.choose(seats, *columns, shape, room, num_asked)
        self._fit(rows, trees, taken, why)
        trees.why, trees.gain_seats = why, seats
        trees.ceiling, trees.num_asked = ceiling, num_asked
        trees.seconds = time.perf_counter() - began
        return trees

    def _watch(self, choices: SequenceOf[Sequence], most: int) -> bool:
        """Let Gain see what some of these choices, in turn, drew while they were not asked; whether
        a scope begins to repeat what stood before."""
        repeats = False
        for _ in range(min(most, len(choices))):
            self._turn = (self._turn + 1) % len(choices)
            choice = choices[self._turn]
            if choice.is_resting:
                told, ids = choice.prompt_len + choice.num_told, choice.ids[: choice.num_tokens]
                repeats |= self._gain.watch(choice.gain_seat, ids, told)
        return repeats

    def _fit(self, rows: Rows, trees: Trees, taken: Int64, why: list[str]) -> None:
        """Keep as much of the chosen nodes as gets blocks; drafts never preempt anybody for
        theirs."""
        start, seats = trees.start.tolist(), rows.seats.tolist()
        num_tokens, room = self._table.num_tokens, self._table.room
        for i, num in enumerate(taken.tolist()):
            if start[i] == start[i + 1]:
                continue
            why[i] = "" if num else "budget"
            if num and num_tokens[seats[i]] + num > room[seats[i]]:
                taken[i] = num = self._scheduler.reserve_drafts(rows.sequences[i], num)
                why[i] = "" if num else "room"
        trees.prune(taken)

    def _constrained(
        self,
        sequence: Sequence,
        session: DraftSession,
        max_nodes: int,
        bounds: Int64,
        *,
        is_asked: bool,
    ) -> tuple[DraftTree | None, int]:
        """What a grammar forces, then the drafter's own nodes that it permits; how many of the
        first are certain. bounds: on ids and on depth."""
        state, depth = sequence.grammar, int(bounds[1])
        assert state is not None
        forced = state.forced()[: min(max_nodes, depth)]
        num_left = max_nodes - len(forced) if is_asked else 0
        proposed = None
        if num_left > 0 and len(forced) < depth:
            try:
                mark = session.checkpoint() if forced else 0
                if forced:  # the drafter proposes what follows them
                    session.extend(forced)
                tree = session.propose(num_left, depth - len(forced))
                proposed, errors = checked([tree], (bounds - (0, len(forced)))[None])
                if errors:
                    raise errors[0][1]
                stays, head = ALL_STAY, sequence.head
                if head is not None and head.proposes:
                    stays = (head.slice.positions(proposed.nodes[ID]) >= 0).astype(np.int32)
                proposed.prune(np.array([num_left]), stays)
                if forced:
                    session.rollback(mark)
            except Exception as error:
                self.disable(sequence, error)
                proposed = None
        return constrain(
            state, forced, proposed, max_nodes=max_nodes, max_depth=depth,
            source=len(sequence.sources) - 1,
        )  # fmt: skip

    # Most steps of a server with many clients are like the one before and draft nothing. What is
    # known not to pay must not cost a tenth of a millisecond in each of them either.

    def _begin_rest(
        self,
        rows: Rows,
        choices: list[Sequence],
        trees: Trees,
        left: list[int],
    ) -> None:
        """Nobody drafts in this step. Some like it follow without a look at each choice, none that
        brings a choice to its last token. choices: that might draft."""
        if rows.num_rows != len(rows.sequences) or len(choices) != len(rows.sequences):
            return  # a prompt's rows, or choices without a drafter
        num_left = min(max(REST, len(choices)) - 1, min(left) - 2)
        if num_left > 0 and all(choice.is_resting for choice in choices):
            gain_seats = [choice.gain_seat for choice in choices]
            self._rest = _Rest(rows.seats, trees, gain_seats, num_left)

    def _end_rest(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            self._gain.rested(rest.gain_seats, rest.num_done)

    # -- while it computes ------------------------------------------------------------------

    def settle(self, sequences: Iterable[Sequence], *, draws_first: bool) -> None:
        """Let every session do its deferred work; called while the device works. Where that takes
        the host's cores away from first tokens, it waits until the session is asked.

        draws_first: whether the step computes prompts.
        """
        if draws_first and not self._is_beside:
            return
        for sequence in sequences:
            session = sequence.session
            if sequence.is_resting or (sequence.drafter is None and sequence.gain_seat < 0):
                continue
            if session is None and (sequence.siblings or sequence.num_left <= 1):
                continue
            try:
                # One that is there knows all tokens, unless it rests.
                (session or self._opened(sequence)).settle()
            except Exception as error:
                self.disable(sequence, error)

    def _opened(self, sequence: Sequence) -> DraftSession:
        """The session of a sequence that may draft; one that has rested knows what it missed."""
        session, told, request = sequence.session, sequence.num_told, sequence.request
        if session is None:
            if sequence.drafter is None:
                drafter = self._drafters.resolve(request.task, request.speculation)
                assert drafter is not None
                self._give(sequence, drafter)
            assert sequence.drafter is not None
            session = sequence.session = sequence.drafter.open(
                request.prompt_ids,
                context_span=request.speculation.context_span,
                prediction_ids=request.speculation.prediction_ids,
            )
            self._gain.opened(sequence.gain_seat)
            self._num_opened += 1
        state, sequence.first_state = sequence.first_state, None
        if told < sequence.num_output:
            missed = sequence.output_ids(told)
            sequence.num_told = sequence.num_output
            if state is not None and len(missed) == 1 and getattr(session, "wants_state", False):
                cast("StateSession", session).note_state(state)
                session.extend(missed)
            else:
                # Learning from each token that it missed would take a millisecond of a step.
                getattr(session, "catch_up", session.extend)(missed)
        return session

    # -- after it ---------------------------------------------------------------------------

    def observe(self, rows: Rows, trees: Trees, came: Int32) -> None:
        """Tell Gain what became of a step's nodes. came: as `follow` writes it."""
        assert trees.gain_seats is not None
        columns = trees.start, trees.certain, trees.survival
        self._gain.observe_drafts(trees.gain_seats, *columns, came)

    def teach(
        self,
        sequence: Sequence,
        ids: list[int],
        trees: Trees,
        item: int,
        path: list[int],
        draw: int,
        results: Drawn,
    ) -> None:
        """Tell a choice's session what a step has shown: the ids that were likeliest at the last
        token and behind each of its nodes, which of these were accepted, the state that the last
        token was drawn from, and what was emitted. ids: that, which is appended. item, draw: its
        tree's, and its root's draw."""
        session = sequence.session
        if session is None or sequence.is_resting:
            if self._states is not None and session is None and sequence.num_output == 1:
                # Whoever is asked next, and not opened yet, drafts from it.
                rests = sequence.is_resting or sequence.gain_seat < 0
                sequence.first_state = None if rests else self._states(draw)
            return
        first, end = trees.start[item : item + 2].tolist()
        likely = results.likely
        try:
            if likely is not None and getattr(session, "num_likely", 0) > 0:
                at = slice(draw, draw + 1 + end - first)
                nodes, parents = trees.nodes[:DEPTH, first:end].tolist()
                cast("LikelySession", session).note_likely(
                    nodes, parents, likely.ids[at], likely.chances[at]
                )
            if self._states is not None and getattr(session, "wants_state", False):
                last = draw if len(ids) < 2 else draw + 1 + path[len(ids) - 2]
                cast("StateSession", session).note_state(self._states(last))
            if first < end and getattr(session, "wants_feedback", True):
                forced = -1 if sequence.grammar is None else len(sequence.sources) - 1
                tree, accepted = trees.proposed(item, path, forced)
                if tree.token_ids.shape[0]:
                    session.feedback(tree, accepted)
            sequence.num_told += len(ids)
            session.extend(ids)
        except Exception as error:
            self.disable(sequence, error)

    def correct(self, sequence: Sequence, token: int) -> None:
        """Tell a choice's session of a token that was drawn again, and appended."""
        if sequence.session is None or sequence.is_resting:
            return
        try:
            sequence.num_told += 1
            sequence.session.extend((token,))
        except Exception as error:
            self.disable(sequence, error)

    def roll_back(self, sequence: Sequence, num_output: int) -> None:
        """Take a sequence and its session back to its first num_output tokens."""
        sequence.rollback(num_output)
        if sequence.session is None or sequence.num_told <= num_output:
            return
        try:
            sequence.num_told = num_output
            sequence.session.rollback(num_output)
        except Exception as error:
            self.disable(sequence, error)

    def disable(self, sequence: Sequence, error: Exception) -> None:
        """Close the session of a drafter that failed; the request goes on without drafts."""
        self.num_errors += 1
        name = sequence.request.speculation.drafter
        if name not in self._logged:
            self._logged.add(name)
            _log.exception("drafter %r failed and is off for this sequence", name, exc_info=error)
        self.close(sequence)

    def close(self, sequence: Sequence) -> None:
        """End a session: the sequence drafts no more. Idempotent."""
        session = sequence.session
        sequence.drafter = sequence.session = None
        if sequence.gain_seat >= 0:
            self._end_rest()  # it may be one of those that rest
            self._gain.leave(sequence.gain_seat)
            sequence.gain_seat = -1
            self.num_open -= 1
        try:
            if session is not None:
                session.close()
        except Exception as error:
            self.num_errors += 1
            _log.debug("closing a draft session failed", exc_info=error)
