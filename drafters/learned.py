"""Learned outputs: outputs of finished requests, bounded and decayed, as a layer over a corpus.

`LearnedOutputs` is a biased reservoir (Aggarwal, "On biased reservoir sampling in the presence of
stream evolution", VLDB 2006): once it is full, each new output replaces older ones drawn at random,
so that the chance that an output is still held decays exponentially with the outputs after it.
`build_corpus` makes a Corpus of it, as of any examples, that is drafted from beside the task's.

    outputs = LearnedOutputs(200_000)
    outputs.add(prompt_ids, output_ids)
    layer = build_corpus(outputs.examples(), base=corpus, fingerprint=corpus.fingerprint)
    drafter = AutoDrafter(corpus=corpus, learned=layer)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drafters.array_file import ArrayFileError, ArrayFormat, Column
from drafters.arrays import Int32
from drafters.corpus import joined, starts_of

FORMAT = ArrayFormat(
    "learned outputs",
    1,
    {
        "prompt_ids": Column("int32", ("prompt_tokens",), low=0),
        "prompt_starts": Column("int64", ("examples+1",), cuts="prompt_tokens"),
        "output_ids": Column("int32", ("tokens",), low=0),
        "output_starts": Column("int64", ("examples+1",), cuts="tokens"),
    },
)
"""Of a file of learned outputs; what several writers share has more (drafters.shared_outputs)."""


class LearnedOutputs:
    """Finished outputs with their prompts, bounded in tokens. One writer.

    max_tokens: of outputs held; of prompts there are up to PROMPT_SHARE times as many. max_prompt,
    max_output: longer prompts lose their start, longer outputs their end. seed: of the draw of
    what is replaced. repeats: equal outputs of equal prompts are held as often as they are added.
    """

    PROMPT_SHARE = 4

    def __init__(
        self,
        max_tokens: int,
        *,
        max_prompt: int = 1024,
        max_output: int = 4096,
        seed: int = 0,
        repeats: bool = False,
    ) -> None:
        if max_tokens < 1 or max_prompt < 0 or max_output < 1:
            raise ValueError("max_tokens and max_output must be positive, max_prompt not negative")
        self.max_tokens = max_tokens
        self.max_prompt = max_prompt
        self.max_output = max_output
        self.repeats = repeats
        self.num_tokens = 0
        self.num_prompt_tokens = 0
        self.num_seen = 0
        self._examples: list[tuple[Int32, Int32]] = []
        self._texts: set[int] = set()
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._examples)

    def add(self, prompt_ids: Sequence[int] | Int32, output_ids: Sequence[int] | Int32) -> bool:
        """Add an output; others are dropped until it fits. Returns whether it was added: an empty
        one is ignored, and one that is held with the same prompt is seen, and held once (but for
        `repeats`)."""
        most_prompt = self.PROMPT_SHARE * self.max_tokens
        prompt = np.array(prompt_ids, np.int32)
        prompt = prompt[max(0, prompt.shape[0] - self.max_prompt) :][:most_prompt].copy()
        output = np.array(output_ids[: min(self.max_output, self.max_tokens)], np.int32)
        if output.shape[0] == 0:
            return False
        self.num_seen += 1
        text = text_of(prompt, output)
        if text in self._texts and not self.repeats:
            return False
        examples = self._examples
        while examples and (
            self.num_tokens + output.shape[0] > self.max_tokens
            or self.num_prompt_tokens + prompt.shape[0] > most_prompt
        ):
            at = self._random.randrange(len(examples))
            examples[at], examples[-1] = examples[-1], examples[at]
            old_prompt, old_output = examples.pop()
            self._texts.discard(text_of(old_prompt, old_output))
            self.num_tokens -= int(old_output.shape[0])
            self.num_prompt_tokens -= int(old_prompt.shape[0])
        examples.append((prompt, output))
        self._texts.add(text)
        self.num_tokens += int(output.shape[0])
        self.num_prompt_tokens += int(prompt.shape[0])
        return True

    def examples(self) -> list[tuple[Int32, Int32]]:
        """(prompt ids, output ids) of all that is held; a list of the caller's own."""
        return list(self._examples)

    def save(self, path: Path | str, *, fingerprint: str, scope: str) -> None:
        """Write atomically. fingerprint: of the tokenizer; scope: whose outputs these are."""
        meta = {"scope": scope, "num_seen": self.num_seen}
        FORMAT.write(path, arrays_of(self._examples), fingerprint=fingerprint, meta=meta)

    def restore(self, path: Path | str, *, fingerprint: str, scope: str) -> None:
        """Take over what save() wrote, in place of what there is; more than fits is driven out.

        Raises FileNotFoundError; FingerprintError for another tokenizer's; ArrayFileError for
        another scope's, and for any other fault.
        """
        meta, arrays, _ = FORMAT.read(path, fingerprint=fingerprint)
        if meta.get("scope") != scope:
            raise ArrayFileError(f"{path} holds what another task or client taught")
        num_seen = meta.get("num_seen")
        if type(num_seen) is not int or not 0 <= num_seen < 1 << 60:
            raise ArrayFileError(f"{path} is damaged: it does not say how many were seen")
        self._examples, self._texts = [], set()
        self.num_tokens = self.num_prompt_tokens = 0
        for prompt, output in examples_of(arrays):
            self.add(prompt, output)
        self.num_seen = num_seen


def text_of(prompt: Int32, output: Int32) -> int:
    """The same for equal prompts with equal outputs, and else another, for as long as the process
    lives. A text that comes again and again must not be most of what is held: what most prompts
    share is taken for their template (drafters.auto.nearest), and so it would not be found."""
    return hash((prompt.tobytes(), output.tobytes()))


def arrays_of(examples: Sequence[tuple[Int32, Int32]]) -> dict[str, npt.NDArray[Any]]:
    """(prompt ids, output ids) as FORMAT has them. The inverse of `examples_of`."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, parts in (("prompt", [p for p, _ in examples]), ("output", [o for _, o in examples])):
        arrays |= {f"{name}_ids": joined(parts), f"{name}_starts": starts_of(parts)}
    return arrays


def examples_of(arrays: Mapping[str, npt.NDArray[Any]]) -> list[tuple[Int32, Int32]]:
    """(prompt ids, output ids) of arrays that FORMAT holds for; copies."""

    def parts(name: str) -> list[Int32]:
        ids, bounds = arrays[f"{name}_ids"], arrays[f"{name}_starts"].tolist()
        return [np.array(ids[a:b], np.int32) for a, b in itertools.pairwise(bounds)]

    return list(zip(parts("prompt"), parts("output"), strict=True))
