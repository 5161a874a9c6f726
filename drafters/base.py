"""What a drafter is: two public protocols.

A *Drafter* belongs to a task (or to a request's own choice of drafter) and holds what is shared:
corpus tables, calibration. A *DraftSession* belongs to one Sequence. Its life is explicit:

    session = drafter.open(prompt_ids)                  # admission; must be cheap
    session.settle()                                    # heavy work, off the step's critical path
    tree = session.propose(budget=16, max_depth=16)     # any number of times
    session.extend(emitted_ids)                         # after each accept
    mark = session.checkpoint(); session.rollback(mark) # exact slices, re-verification
    session.close()                                     # idempotent; any later call raises

All run on the CPU, on the engine's thread, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from drafters.tree import DraftTree


class SessionClosedError(RuntimeError):
    """A DraftSession was used after close()."""


@runtime_checkable
class DraftSession(Protocol):
    """Proposes continuations of one Sequence. It never changes which ids the target draws."""

    def propose(self, budget: int, max_depth: int) -> DraftTree:
        """At most `budget` nodes, none deeper than `max_depth` (a root's child has depth 1).

        Nodes are in topological order (a parent before its children), siblings by survival,
        the likeliest path first where that is possible, so that KV of it need not move.
        Returns DraftTree.empty() when nothing matches or budget or max_depth is 0. Never padded.
        """

    def extend(self, token_ids: Sequence[int]) -> None:
        """Tokens that were emitted (verified) after the last call, in order."""

    def feedback(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """The outcome of a proposed tree. accepted: the node indexes on the accepted path.

        Called before `extend` of the same step; calibration learns here. Not called where a session
        has a bool `wants_feedback` that is False.
        """

    def settle(self) -> None:
        """Do deferred heavy work (index building); called while the device works."""

    def checkpoint(self) -> int:
        """A mark of the present state: the number of tokens it has seen since open()."""

    def rollback(self, mark: int) -> None:
        """Forget everything after `mark`. Raises ValueError for a mark beyond the present state."""

    def close(self) -> None:
        """Release what the session holds. Idempotent."""


class ResumedSession(DraftSession, Protocol):
    """A DraftSession that learns from what it is told, and need not from what it missed."""

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Tokens that were emitted while nobody asked it or told it of any. As `extend`, without
        learning from them. Where a session has no such method, `extend` is called."""


class LikelySession(DraftSession, Protocol):
    """A DraftSession that also drafts from the model's own logits.

    num_likely: how many likeliest ids of every verified row it wants. With 0, `note_likely` is not
    called.
    """

    num_likely: int

    def note_likely(
        self,
        token_ids: Sequence[int],
        parents: Sequence[int],
        ids: npt.NDArray[np.int32],
        chances: npt.NDArray[np.float32],
    ) -> None:
        """What the model held likeliest in the step that was just verified.

        token_ids, parents: of the nodes that were verified, -1 = the last emitted token. ids: int32
        [1 + nodes, K], chances: float32 [1 + nodes, K]: what may follow the last emitted token,
        then each node; -1 and 0 where there is nothing. K is at least num_likely. Called before
        `feedback` and `extend` of the same step.
        """


class PricedSession(DraftSession, Protocol):
    """A DraftSession that need not look for nodes that would not be verified.

    least: float64 [any]: survivals below which the i-th likeliest node of a tree is of no use, the
    last of them for all further nodes. The likeliest is proposed in any case. Written before each
    `propose`.
    """

    least: npt.NDArray[np.float64]


class StateSession(DraftSession, Protocol):
    """A DraftSession that also reads the model's last hidden state, if wants_state."""

    wants_state: bool

    def note_state(self, state: npt.NDArray[np.float32]) -> None:
        """What the LM head was given, float32 [hidden size], where the last token of the step that
        was just verified was drawn. Called before `feedback` and `extend` of the same step, where
        the runner tells it (server.engine.batch.StateRunner)."""


@runtime_checkable
class Drafter(Protocol):
    """Makes sessions. Shared state only; safe to use for many sessions at once on one thread.

    A drafter may have a bool `knows_starts`: whether a session can propose an answer's first tokens
    from more than its prompt. Where it is False, sessions are opened while the prompt is computed,
    so that its first token does not wait for them. And a bool `reads_states`: whether its sessions
    are StateSessions that want one, and so know more than their prompt from then on.
    """

    name: str

    def open(
        self,
        prompt_ids: Sequence[int],
        *,
        context_span: tuple[int, int] | None = None,
        prediction_ids: Sequence[int] = (),
    ) -> DraftSession:
        """A session for a prompt. context_span: start and end of the prompt's context, for the
        trie. prediction_ids: the output the client expects (`prediction`). Other drafters ignore
        them."""
