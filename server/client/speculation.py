"""Sums over the `speculation` and `usage` objects of responses, and how they are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Tally:
    """What responses add up to; `add` is the only writer."""

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    by_source: dict[str, list[int]] = field(default_factory=dict)

    def add(self, response: dict[str, Any]) -> None:
        """Count a response, or the last chunk of a stream. Members that are missing count 0."""
        usage = response.get("usage") or {}
        self.num_prompt_tokens += int(usage.get("prompt_tokens", 0))
        self.num_tokens += int(usage.get("completion_tokens", 0))
        report = response.get("speculation") or {}
        self.num_steps += int(report.get("steps", 0))
        for source, counts in (report.get("by_source") or {}).items():
            sums = self.by_source.setdefault(str(source), [0, 0])
            sums[0] += int(counts.get("drafted_tokens", 0))
            sums[1] += int(counts.get("accepted_tokens", 0))

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens of a decode step, drafted or not; None before any step."""
        return self.num_tokens / self.num_steps if self.num_steps else None

    def summary(self) -> str:
        """ "2.31 tokens/step; accepted: suffix 120 of 200, prompt 8 of 40" """
        mean = self.tokens_per_step
        parts = [f"{mean:.2f} tokens/step"] if mean is not None else []
        sources = ", ".join(f"{name} {a} of {d}" for name, (d, a) in sorted(self.by_source.items()))
        return "; ".join([*parts, f"accepted: {sources}" if sources else "no drafts"])
