"""AheadPolicy: whether it pays to launch the step behind one with trees before these are accepted.

The device never waits then, but some trees are lost: what nobody foresaw has none (foresight.py).
Which of the two is more depends on the device, the drafters and the text, so both ways are measured
as they are served: tokens a choice and the seconds of their steps, in decayed sums. The better way
is taken; the other one is tried for a few steps now and then.
"""

from __future__ import annotations

_DECAY = 0.98
_TRIAL_STEPS = 6
_TRIAL_EVERY = 192
_FIRST_STEPS = 24
"""Steps of each way before they are compared."""


class _Way:
    """Decayed sums of one way's steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._tokens = 0.0
        self._seconds = 1e-9

    def observe(self, tokens: float, seconds: float) -> None:
        self.num_steps += 1
        self._tokens = _DECAY * self._tokens + tokens
        self._seconds = _DECAY * self._seconds + seconds

    @property
    def rate(self) -> float:
        """Tokens a second of a choice."""
        return self._tokens / self._seconds


class AheadPolicy:
    """is_always: no comparison is made, for tests and measurements."""

    def __init__(self, *, is_always: bool = False) -> None:
        self.is_always = is_always
        self._ahead, self._waiting = _Way(), _Way()
        self._num_asked = 0

    def pays(self) -> bool:
        """Whether the next step shall be launched ahead. Called once a step that could be."""
        self._num_asked += 1
        if self.is_always:
            return True
        # In blocks: what is prepared for a step ahead takes time of the step before it.
        if self._ahead.num_steps < _FIRST_STEPS:
            return True
        if self._waiting.num_steps < _FIRST_STEPS:
            return False
        is_better = self._ahead.rate > self._waiting.rate
        is_trial = self._num_asked % _TRIAL_EVERY < _TRIAL_STEPS
        return is_better != is_trial

    def observe(self, *, is_ahead: bool, num_tokens: int, num_choices: int, seconds: float) -> None:
        """A step in which num_choices drew num_tokens, none of them from a prompt's end. seconds:
        since the step before it was accepted."""
        way = self._ahead if is_ahead else self._waiting
        way.observe(num_tokens / num_choices, seconds)
