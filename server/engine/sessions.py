"""DraftSessions: the life of the draft sessions of an engine's sequences.

    seat -> (settle, ask, learn)* -> close

Nothing is done for drafts between a request's arrival and the end of its prompt's step that can
wait until that step is under way: the first drafter of a scope is made while the device works, and
so is a session opened that knows of no other output; on a CPU, whose cores the step computes on,
both once the first tokens are told. Any other is opened when it is first wanted.
While a sequence rests (`Sequence.is_resting`) its session gets no updates and may not exist.
What was emitted meanwhile it is told before it is next asked, if it ever is.

If a drafter raises, its session is closed and the request goes on without drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import cast

import numpy as np
import numpy.typing as npt

from drafters.arrays import Int32
from drafters.base import DraftSession, LikelySession
from server.engine.batch import Likely
from server.engine.drafting import CheckedTree, DrafterRegistry
from server.engine.gain import Gain
from server.engine.grammar import FORCED
from server.engine.plan import Rows
from server.engine.planner import Ask
from server.engine.sequence import Sequence, SequenceMark, Status
from server.engine.trees import Trees

_log = logging.getLogger(__name__)


class DraftSessions:
    """Writes the sequences' `drafter`, `session`, `drafter_name`, `sources`, `num_told` and
    `is_resting`."""

    def __init__(
        self,
        drafters: DrafterRegistry,
        gain: Gain,
        *,
        drafts: bool = True,
        is_beside: bool = True,
    ) -> None:
        """gain: gives seats, and learns what became of drafts. drafts: whether the engine has rows
        for drafts at all. is_beside: whether the host works beside a step that computes, and not on
        its cores."""
        self.num_errors = 0
        self._gain = gain
        self._drafts = drafts
        self._drafters = drafters
        self._logged: set[str] = set()
        self._is_beside = is_beside
        self._first: list[Sequence] = []  # the first of their scopes, whose drafters wait
        self._unsettled: list[Sequence] = []  # of a step with prompts

    def seat(self, sequence: Sequence) -> None:
        """Find a sequence's drafter, unless the request wants no drafts. Called when it is
        seated. Where none was made for its scope, and it would know nothing, `settle` makes it."""
        request, spec = sequence.request, sequence.request.speculation
        may_wait = not spec.prediction_ids and sequence.grammar is None
        if (
            may_wait
            and not self._gain.knows(self._scope(sequence))
            and spec.max_draft_tokens > 0
            and self._drafters.may_wait(request.task, spec)
        ):
            self._first.append(sequence)
        else:
            self._find_drafter(sequence)

    @staticmethod
    def _scope(sequence: Sequence) -> tuple[str, str, str, bool]:
        request = sequence.request
        spec = request.speculation
        return request.task, request.scope, spec.drafter, bool(spec.prediction_ids)

    def _find_drafter(self, sequence: Sequence) -> None:
        request = sequence.request
        try:
            drafter = self._drafters.resolve(request.task, request.speculation)
            if drafter is None:
                return
            sequence.drafter, sequence.drafter_name = drafter, drafter.name
            knows = bool(request.speculation.prediction_ids) or getattr(
                drafter, "knows_starts", True
            )
            sequence.gain_seat = self._gain.seat(self._scope(sequence), knows=knows)
            sequence.is_resting = not self._gain.is_asked(sequence.gain_seat)
            sequence.sources = tuple(getattr(drafter, "sources", ())) or (drafter.name,)
            if sequence.grammar is not None:
                sequence.sources = (*sequence.sources, FORCED)
        except Exception as error:
            self.disable(sequence, error)

    def has_drafters(self, sequences: Iterable[Sequence]) -> bool:
        """Whether any of a step's choices drafts, or will; else the reason of all is noted."""
        if self._first or any(s.drafter is not None for s in sequences):
            return True
        for sequence in sequences:
            sequence.no_draft_reason = "off"
        return False

    def settle(self, sequences: Iterable[Sequence], *, draws_first: bool) -> None:
        """Let every session do its deferred work; called while the device works. Where that takes
        the host's cores away from first tokens, settle_rest() does it instead.

        draws_first: whether the step computes prompts.
        """
        if draws_first and not self._is_beside:
            self._unsettled = list(sequences)
        else:
            self._settle(sequences)

    def settle_rest(self) -> None:
        """Do what settle() left, if anything. Called before a step, the last one's Deltas told."""
        if self._unsettled:
            unsettled, self._unsettled = self._unsettled, []
            self._settle(s for s in unsettled if s.status is Status.RUNNING)

    def _settle(self, sequences: Iterable[Sequence]) -> None:
        first, self._first = self._first, []
        for sequence in first:
            if sequence.status is not Status.FINISHED:
                self._find_drafter(sequence)
        for sequence in sequences:
            if sequence.is_resting or (sequence.session is None and self.no_draft_reason(sequence)):
                continue
            try:
                # One that is there knows all tokens, unless it rests.
                (sequence.session or _opened(sequence)).settle()
            except Exception as error:
                self.disable(sequence, error)

    def no_draft_reason(self, sequence: Sequence) -> str:
        """Why the planner does not consider a sequence that draws, or ""."""
        is_first = sequence in self._first
        if not self._drafts or (sequence.drafter is None and not is_first):
            return "off"
        if sequence.siblings:
            return "prefill"
        if sequence.num_left <= 1:
            return "length"
        return "prefill" if is_first else ""

    def begins_blank(self, sequence: Sequence) -> bool:
        """Whether a sequence with a drafter has no output, and nothing is known of how it begins:
        its session is opened while the device computes its prompt, and is not asked before."""
        return (
            not sequence.num_output
            and sequence.grammar is None
            and not sequence.request.speculation.prediction_ids
            and not getattr(sequence.drafter, "knows_starts", True)
        )

    def may_draft(self, sequence: Sequence, is_resting: bool) -> bool:
        """Whether a sequence with a drafter is to be planned for in this step: it does not rest, or
        its grammar may force tokens, which are certain. Its session is told what it has missed."""
        sequence.is_resting = is_resting
        if is_resting and sequence.grammar is None:
            return False
        try:
            _opened(sequence)
        except Exception as error:
            self.disable(sequence, error)
        return sequence.session is not None

    def ask(self, sequence: Sequence) -> Ask:
        """The Ask of a sequence that has a session."""
        session, head = sequence.session, sequence.head
        assert session is not None
        allowed = None
        if head is not None and head.proposes:
            # A node outside the slice could not be drawn, so it is dropped and never added.
            slice_ = head.slice

            def allowed(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
                return slice_.positions(ids) >= 0

        return Ask(
            session,
            sequence.gain_seat,
            sequence.request.speculation.max_draft_tokens,
            sequence.num_left - 1,
            sequence.grammar,
            len(sequence.sources) - 1,
            allowed,
            0 if sequence.adapter is None else sequence.adapter.order.vocab_size,
            sequence.no_draft_reason,
        )

    def num_likely(self, rows: Rows) -> int:
        """How many likeliest ids the rows of a step return: the most that any session wants that is
        asked now, or in the step after its prompt."""
        wanted = 0
        for sequence, draws in zip(rows.sequences, rows.draws.tolist(), strict=True):
            if draws and not sequence.is_resting:
                wanted = max(wanted, getattr(sequence.session, "num_likely", 0))
        return wanted

    def note_likely(
        self, sequence: Sequence, tree: CheckedTree | None, likely: Likely | None
    ) -> None:
        """Tell the sessions that want them which ids were likeliest in a step's rows: at the last
        token, and behind each node of the tree. Called before `learn`: those that do not rest know
        all tokens before the step."""
        session = sequence.session
        if likely is None or sequence.is_resting or not getattr(session, "num_likely", 0):
            return
        nodes: tuple[list[int], list[int]] = ([], [])
        if tree is not None:
            nodes = (tree.token_ids, tree.parents)
        try:
            cast("LikelySession", session).note_likely(*nodes, likely.ids, likely.chances)
        except Exception as error:
            self.disable(sequence, error)

    def observe(self, rows: Rows, trees: Trees, came: Int32) -> None:
        """Tell Gain what became of a step's nodes. came: as `follow` writes it."""
        seats = np.array([sequence.gain_seat for sequence in rows.sequences], np.int64)
        self._gain.observe_drafts(seats, trees.start, trees.certain, trees.survival, came)

    def learn(
        self,
        sequence: Sequence,
        tree: CheckedTree | None = None,
        accepted: list[int] | None = None,
    ) -> None:
        """Tell a session what was emitted since it was last told, and which nodes of its tree were
        accepted. Called after the tokens were appended."""
        accepted = accepted or []
        session = sequence.session
        if session is None or sequence.is_resting:
            return
        try:
            known = None if tree is None else tree.for_session(accepted)
            if known is not None:
                session.feedback(*known)
            told, sequence.num_told = sequence.num_told, sequence.num_output
            session.extend(sequence.output_ids(told))
        except Exception as error:
            self.disable(sequence, error)

    def roll_back(self, sequence: Sequence, num_output: int) -> None:
        """Take a sequence back to its first num_output tokens; a session that cannot go back is
        closed."""
        try:
            sequence.rollback(SequenceMark(num_output))
        except (NotImplementedError, ValueError) as error:
            if sequence.session is None:
                raise
            self.disable(sequence, error)
            sequence.rollback(SequenceMark(num_output))

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
        sequence.drafter = None
        if sequence.gain_seat >= 0:
            self._gain.leave(sequence.gain_seat)
            sequence.gain_seat = -1
        try:
            sequence.close_session()
        except Exception as error:
            self.num_errors += 1
            _log.debug("closing a draft session failed", exc_info=error)


def _opened(sequence: Sequence) -> DraftSession:
    """The session of a sequence with a drafter; one that has rested knows what it missed."""
    session, told = sequence.session, sequence.num_told
    if session is None:
        assert sequence.drafter is not None
        request = sequence.request
        session = sequence.session = sequence.drafter.open(
            request.prompt_ids,
            context_span=request.speculation.context_span,
            prediction_ids=request.speculation.prediction_ids,
        )
    if told < sequence.num_output:
        sequence.num_told = sequence.num_output
        # Learning from each token that it missed would take a millisecond of a step.
        catch_up = getattr(session, "catch_up", session.extend)
        catch_up(sequence.output_ids(told))
    return session
