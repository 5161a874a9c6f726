"""DraftRecord: how the drafts of one choice have fared, and when it is not asked for any."""

from __future__ import annotations

from server.engine.draft_worth import DraftWorth, WorthCell


class DraftRecord:
    """How one sequence's drafts have fared: its trust and its cool-down.

    trust scales the survivals a drafter claims: accepted over predicted tokens, decayed, with a
    prior of 1, never above 1. Once drafts in a row without one accepted token have claimed PATIENCE
    hits, the sequence is not asked for `pause` steps, which double up to a bound; then it is asked
    for one small probe. Drafts that claim little may miss often and still pay: counted alike, four
    misses in a row were a pause, and on twenty data sets answers took 2.4 % longer.

    A sequence whose proposals promise less than asking for them costs (`record_value`) rests as
    well, for steps that double up to LAST_REST. With one stream, asking costs thousandths of a
    token and no sequence rests; with 32 streams it would cost a twentieth of the step, and few
    nodes are taken.

    worth: of its scope (draft_worth.py); None where that is not followed.
    """

    __slots__ = (
        "_accepted", "_cell", "_left", "_misses", "_pause", "_predicted", "_rest", "_value",
        "worth",
    )  # fmt: skip

    PRIOR = 2.0  # tokens of prior evidence
    DECAY = 0.95
    PATIENCE = 4.0  # hits that were claimed
    FIRST_PAUSE = 4
    LAST_PAUSE = 64
    PROBE_NODES = 4
    FIRST_VALUE = 0.2  # tokens that an unknown sequence's proposals are taken to be worth
    VALUE_REFRESH = 0.25
    LAST_REST = 16

    def __init__(self, worth: DraftWorth | None = None) -> None:
        self.worth = worth
        self._cell: WorthCell | None = None
        self._value = self.FIRST_VALUE
        self._rest = 0
        self._predicted = 0.0
        self._accepted = 0.0
        self._misses = 0.0
        self._left = 0
        self._pause = 0

    @property
    def trust(self) -> float:
        """Factor on claimed survivals, 0..1."""
        return min(1.0, (self._accepted + self.PRIOR) / (self._predicted + self.PRIOR))

    @property
    def is_resting(self) -> bool:
        """Whether the next allowance() is 0."""
        return self._left > 0

    def allowance(self, *, counts: bool = True) -> int:
        """Most nodes it may ask for in this step, 0 while cooling. counts: whether a step of its
        cool-down is over by this; once a step."""
        if self._left > 0:
            self._left -= counts
            return 0
        return self.PROBE_NODES if self._pause else 1 << 30

    def sits_out(self) -> bool:
        """Whether it cools down or rests in this step, without being asked. Called once a step."""
        if self._left > 0:
            self._left -= 1
            self.asked_in_vain()
            return True
        return False

    def cell_at(self, num_draws: int) -> WorthCell | None:
        """Its scope's cell in a step where so many choices draw."""
        return None if self.worth is None else self.worth.at(num_draws)

    def note_in(self, cell: WorthCell | None) -> None:
        """From now on what its drafts bring is noted in this cell; None: nowhere."""
        self._cell = cell

    def rests_at(self, num_draws: int) -> bool:
        """Whether it or its scope rests in a step where so many choices draw."""
        cell = self.cell_at(num_draws)
        return self._left > 0 or (cell is not None and cell.is_resting)

    def asked_in_vain(self) -> None:
        """It was asked, and nothing is verified."""
        if self._cell is not None:
            self._cell.observe(0, 0)

    def observe(self, predicted: float, num_accepted: int, num_nodes: int = 0) -> None:
        """A draft was verified. predicted: the sum of its nodes' claimed survivals."""
        if self._cell is not None:
            self._cell.observe(num_nodes, num_accepted)
        self._predicted = self.DECAY * self._predicted + predicted
        self._accepted = self.DECAY * self._accepted + num_accepted
        if num_accepted:
            self._misses = 0.0
            self._pause = 0
            return
        # Its mean claim: at most what was claimed of the first token of its likeliest path.
        self._misses += min(1.0, predicted / max(num_nodes, 1))
        if self._pause or self._misses >= self.PATIENCE:
            self._pause = min(max(2 * self._pause, self.FIRST_PAUSE), self.LAST_PAUSE)
            self._left = self._pause

    def record_value(self, value: float, price: float) -> None:
        """A proposal was made. value: tokens that the nodes taken from it promise, less the
        tokens that their rows cost. price: tokens that could have been made in the time that
        asking took."""
        self._value += self.VALUE_REFRESH * (value - self._value)
        if self._value >= price:
            self._rest = 0
            return
        self._rest = min(max(2 * self._rest, 2), self.LAST_REST)
        self._left = max(self._left, self._rest)

    def decay(self) -> None:
        """A proposal was made and nothing of it was taken: old evidence fades, so that it is asked
        again."""
        self._predicted *= self.DECAY
        self._accepted *= self.DECAY
