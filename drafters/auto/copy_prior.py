"""CopyPrior: which parts of a task's prompts are copied into outputs, and which tokens.

Outputs copy passages more often than instructions, and names more often than function words. For
every output token, each earlier prompt position with the same preceding token is checked: would
copying from it have been right? The rates by distance from the prompt's start, by distance from its
end, by whether the pair is template text, and by the token itself, each over the task's mean rate,
multiply to a weight for every prompt position (naive Bayes, tempered).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drafters.arrays import Float32, Float32x2, Float64, Float64x2, Int32
from drafters.corpus_file import NUM_DISTANCES
from drafters.jit import compiled, entry

MAX_EXAMPLES = 1000
STRENGTH = 12.0  # asks that the mean rate counts for


@compiled
def distance_bucket(distance: int) -> int:
    """Half-octave bucket of a distance >= 0."""
    return min(NUM_DISTANCES - 1, int(2.0 * np.log2(distance + 1.0)))


@entry
@compiled
def _ask(
    prompt: Int32,
    output: Int32,
    starts: Float64x2,
    ends: Float64x2,
    tokens: Int32,
    rates: Float64x2,
) -> None:
    """Count one example. starts, ends: float64 [2, NUM_DISTANCES] asked and right; tokens: int32
    ascending ids with rates float64 [2, tokens]."""
    num = prompt.shape[0]
    for t in range(1, output.shape[0]):
        # Positions asked share one unit of evidence, so that common tokens do not drown the rest.
        asked = 0
        for i in range(num - 1):
            if prompt[i] == output[t - 1]:
                asked += 1
        if asked == 0:
            continue
        unit = 1.0 / asked
        for i in range(num - 1):
            if prompt[i] != output[t - 1]:
                continue
            right = unit if prompt[i + 1] == output[t] else 0.0
            bucket = distance_bucket(i)
            starts[0, bucket] += unit
            starts[1, bucket] += right
            bucket = distance_bucket(num - 1 - i)
            ends[0, bucket] += unit
            ends[1, bucket] += right
            low = np.searchsorted(tokens, prompt[i + 1])
            if low < tokens.shape[0] and tokens[low] == prompt[i + 1]:
                rates[0, low] += unit
                rates[1, low] += right


@entry
@compiled
def _weigh(
    prompt: Int32,
    starts: Float32,
    ends: Float32,
    tokens: Int32,
    lifts: Float32,
    out: Float32x2,
) -> None:
    num = prompt.shape[0]
    for i in range(num - 1):
        weight = starts[distance_bucket(i)] * ends[distance_bucket(num - 1 - i)]
        low = np.searchsorted(tokens, prompt[i + 1])
        if low < tokens.shape[0] and tokens[low] == prompt[i + 1]:
            weight *= lifts[low]
        out[0, i] *= weight


@dataclass(frozen=True, slots=True)
class CopyPrior:
    """Lifts over the mean rate, tempered. start_lift, end_lift: float32 [NUM_DISTANCES];
    token_ids: int32 [tokens] ascending, token_lift: float32 [tokens]."""

    start_lift: Float32
    end_lift: Float32
    token_ids: Int32
    token_lift: Float32

    def weigh(self, prompt_ids: Int32, out: Float32) -> None:
        """Multiply out[0, i] by the weight of copying the token after prompt position i."""
        _weigh(prompt_ids, self.start_lift, self.end_lift, self.token_ids, self.token_lift, out)

    @staticmethod
    def flat() -> CopyPrior:
        """A prior without evidence: every weight is 1."""
        ones = np.ones(NUM_DISTANCES, np.float32)
        return CopyPrior(ones, ones, np.empty(0, np.int32), np.empty(0, np.float32))


def learn_copy_prior(
    prompts: Sequence[Int32], outputs: Sequence[Int32], *, temper: float = 0.7
) -> CopyPrior:
    """From a task's examples; the last MAX_EXAMPLES of them. temper: power of the lifts."""
    prompts, outputs = prompts[-MAX_EXAMPLES:], outputs[-MAX_EXAMPLES:]
    if not prompts:
        return CopyPrior.flat()
    tokens, counts = np.unique(np.concatenate(prompts), return_counts=True)
    tokens = tokens[counts >= 3].astype(np.int32)
    starts = np.zeros((2, NUM_DISTANCES), np.float64)
    ends = np.zeros((2, NUM_DISTANCES), np.float64)
    rates = np.zeros((2, tokens.shape[0]), np.float64)
    for prompt, output in zip(prompts, outputs, strict=True):
        _ask(prompt, output, starts, ends, tokens, rates)
    asked, right = starts.sum(axis=1)
    if right < 1.0:
        return CopyPrior.flat()
    mean = right / asked

    def lift(counts: Float64) -> Float32:
        rate = (counts[1] + STRENGTH * mean) / (counts[0] + STRENGTH)
        out: Float32 = np.clip((rate / mean) ** temper, 0.02, 4.0).astype(np.float32)
        return out

    told = rates[0] > 1.0
    return CopyPrior(lift(starts), lift(ends), tokens[told], lift(rates[:, told]))
