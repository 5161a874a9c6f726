"""Learned outputs: outputs of finished requests, bounded and decayed, as a layer over a corpus.

`LearnedOutputs` is a biased reservoir (Aggarwal, "On biased reservoir sampling in the presence of
stream evolution", VLDB 2006): once it is full, each new output replaces older ones drawn at random,
so that the chance that an output is still held decays exponentially with the outputs after it.
`build_layer` makes a Corpus of it, which is drafted from beside the task's own corpus.

    outputs = LearnedOutputs(200_000)
    outputs.add(prompt_ids, output_ids)
    layer = build_layer(outputs.examples(), base=corpus, fingerprint=corpus.fingerprint)
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

from drafters.array_file import ArrayFileError, Column, read_arrays, write_arrays
from drafters.arrays import Int32, Int64
from drafters.auto.automaton import build_automaton
from drafters.auto.nearest import build_nearest
from drafters.corpus import Corpus
from drafters.published.ngram_tables import count_ngrams

KIND = "learned outputs"
VERSION = 1
COLUMNS = {
    "prompt_ids": Column("int32", ("prompt_tokens",), low=0),
    "prompt_starts": Column("int64", ("examples+1",), cuts="prompt_tokens"),
    "output_ids": Column("int32", ("tokens",), low=0),
    "output_starts": Column("int64", ("examples+1",), cuts="tokens"),
}
"""Of a file of learned outputs; what several writers share has more (drafters.shared_outputs)."""
MAX_MERGED_TOKENS = 250_000
"""A corpus of at most so many tokens is indexed together with the learned outputs. A larger one
keeps its own index; learned outputs are then used only as retrieved examples."""


class LearnedOutputs:
    """Finished outputs with their prompts, bounded in tokens. One writer.

    max_tokens: of outputs held; of prompts there are up to PROMPT_SHARE times as many. max_prompt,
    max_output: longer prompts lose their start, longer outputs their end. seed: of the draw of
    what is replaced.
    """

    PROMPT_SHARE = 4

    def __init__(
        self, max_tokens: int, *, max_prompt: int = 1024, max_output: int = 4096, seed: int = 0
    ) -> None:
        if max_tokens < 1 or max_prompt < 0 or max_output < 1:
            raise ValueError("max_tokens and max_output must be positive, max_prompt not negative")
        self.max_tokens = max_tokens
        self.max_prompt = max_prompt
        self.max_output = min(max_output, max_tokens)
        self.num_tokens = 0
        self.num_prompt_tokens = 0
        self.num_seen = 0
        self._examples: list[tuple[Int32, Int32]] = []
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._examples)

    def add(self, prompt_ids: Sequence[int] | Int32, output_ids: Sequence[int] | Int32) -> None:
        """Add an output; others are dropped until it fits. An empty output is ignored."""
        prompt = np.array(prompt_ids, np.int32)
        prompt = prompt[max(0, prompt.shape[0] - self.max_prompt) :].copy()
        output = np.array(output_ids[: self.max_output], np.int32)
        if output.shape[0] == 0:
            return
        examples = self._examples
        most_prompt = self.PROMPT_SHARE * self.max_tokens
        while examples and (
            self.num_tokens + output.shape[0] > self.max_tokens
            or self.num_prompt_tokens + prompt.shape[0] > most_prompt
        ):
            at = self._random.randrange(len(examples))
            examples[at], examples[-1] = examples[-1], examples[at]
            old_prompt, old_output = examples.pop()
            self.num_tokens -= int(old_output.shape[0])
            self.num_prompt_tokens -= int(old_prompt.shape[0])
        examples.append((prompt[:most_prompt], output))
        self.num_tokens += int(output.shape[0])
        self.num_prompt_tokens += int(examples[-1][0].shape[0])
        self.num_seen += 1

    def examples(self) -> list[tuple[Int32, Int32]]:
        """(prompt ids, output ids) of all that is held; a list of the caller's own."""
        return list(self._examples)

    def save(self, path: Path | str, *, fingerprint: str, scope: str) -> None:
        """Write atomically. fingerprint: of the tokenizer; scope: whose outputs these are."""
        prompts = [prompt for prompt, _ in self._examples]
        outputs = [output for _, output in self._examples]
        write_arrays(
            path,
            kind=KIND,
            version=VERSION,
            fingerprint=fingerprint,
            meta={"scope": scope, "num_seen": self.num_seen},
            arrays={
                "prompt_ids": joined(prompts),
                "prompt_starts": starts_of(prompts),
                "output_ids": joined(outputs),
                "output_starts": starts_of(outputs),
            },
        )

    def restore(self, path: Path | str, *, fingerprint: str, scope: str) -> None:
        """Take over what save() wrote, in place of what there is; more than fits is driven out.

        Raises FileNotFoundError; FingerprintError for another tokenizer's; ArrayFileError for
        another scope's, and for any other fault.
        """
        meta, arrays, _ = read_arrays(
            path, kind=KIND, version=VERSION, fingerprint=fingerprint, columns=COLUMNS
        )
        if meta.get("scope") != scope:
            raise ArrayFileError(f"{path} holds what another task or client taught")
        num_seen = meta.get("num_seen")
        if type(num_seen) is not int or not 0 <= num_seen < 1 << 60:
            raise ArrayFileError(f"{path} is damaged: it does not say how many were seen")
        self._examples = []
        self.num_tokens = self.num_prompt_tokens = 0
        for prompt, output in examples_of(arrays):
            self.add(prompt, output)
        self.num_seen = num_seen


def joined(parts: list[Int32]) -> Int32:
    """int32: all parts in a row."""
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def starts_of(parts: Sequence[Int32]) -> Int64:
    """int64 [parts + 1]: where each begins in `joined`, and its length."""
    starts = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([part.shape[0] for part in parts], out=starts[1:])
    return starts


def examples_of(arrays: Mapping[str, npt.NDArray[Any]]) -> list[tuple[Int32, Int32]]:
    """(prompt ids, output ids) of arrays that COLUMNS hold for; copies."""

    def parts(name: str) -> list[Int32]:
        ids, bounds = arrays[f"{name}_ids"], arrays[f"{name}_starts"].tolist()
        return [np.array(ids[a:b], np.int32) for a, b in itertools.pairwise(bounds)]

    return list(zip(parts("prompt"), parts("output"), strict=True))


def build_layer(
    examples: Sequence[tuple[Int32, Int32]],
    *,
    base: Corpus | None,
    fingerprint: str,
    max_merged_tokens: int = MAX_MERGED_TOKENS,
) -> Corpus:
    """The learned outputs as a Corpus to draft from beside `base`, the task's own (None: none).

    Its outputs and prompts are the learned ones alone. Its automaton and n-gram tables
    cover `base` as well, if that has at most `max_merged_tokens` tokens; otherwise they are the
    base's own. Takes about 5 us a token.
    """
    prompts = [prompt for prompt, _ in examples]
    outputs = [output for _, output in examples]
    ids, starts = joined(outputs), starts_of(outputs)
    if base is not None and base.num_tokens > max_merged_tokens:
        automaton, tables = base.automaton, base.tables
    else:
        all_ids, all_starts = ids, starts[:-1]
        n_max, p_min = 5, 5
        if base is not None:
            all_ids = np.concatenate([base.token_ids, ids])
            all_starts = np.concatenate([base.document_starts[:-1], starts[:-1] + base.num_tokens])
            n_max, p_min = base.tables.n_max, base.tables.p_min
        automaton = build_automaton(all_ids, all_starts)
        tables = count_ngrams(all_ids, all_starts, n_max=n_max, p_min=p_min)
    return Corpus(
        fingerprint,
        ids,
        starts,
        tables,
        automaton,
        build_nearest(prompts if any(p.shape[0] for p in prompts) else []),
        np.empty((2, 0), np.float64),
        np.empty((3, 0), np.float64),
    )
