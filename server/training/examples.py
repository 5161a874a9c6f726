"""Prompts and outputs as ids, in batches of alike lengths, in an order that a seed fixes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vocab_store.enrichment import Enrichment


@dataclass(frozen=True, slots=True)
class TrainExample:
    """A prompt and its output in ids; output_ids end with EOS."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Padded ids of a few examples.

    input_ids, attention_mask: int64 [b, t]. rows: int64 [n], places in the flattened [b * t] whose
    hidden state predicts an output id; targets: int64 [n], those ids. The loss is on the outputs
    alone, so the head is computed for these rows only.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor


def segmented(
    example: TrainExample,
    enrichment: Enrichment | None,
    *,
    chooser: random.Random | None = None,
    spell_out: float = 0.0,
) -> TrainExample:
    """The example with its output in the fewest ids of `enrichment` (None: as it is).

    spell_out: chance that a token of the enrichment is written in its base ids instead, drawn from
    `chooser`. A model that now and then sees the long form can still write around a token that a
    grammar, a bias or a stop forbids. The prompt keeps its base ids, unless the enrichment says
    that prompts are read in its tokens.
    """
    if enrichment is None:
        return example
    ids = enrichment.segment(example.output_ids)
    if chooser is not None and spell_out > 0.0:
        ids = [
            part
            for token_id in ids
            for part in (
                enrichment.parts_of(token_id) if chooser.random() < spell_out else (token_id,)
            )
        ]
    return TrainExample(tuple(enrichment.read(example.prompt_ids)), tuple(ids))


def microbatches(
    examples: Sequence[TrainExample], max_tokens: int, chooser: random.Random
) -> Iterator[list[TrainExample]]:
    """All examples once, in groups of at most `max_tokens` padded tokens.

    Examples of alike lengths stand together, so that little is computed for padding; which of them,
    and the order of the groups, are drawn from `chooser`. An example longer than max_tokens is a
    group of its own.
    """
    order = sorted(range(len(examples)), key=lambda i: (len(examples[i]), chooser.random()))
    groups: list[list[TrainExample]] = []
    group: list[TrainExample] = []
    for index in order:
        example = examples[index]
        if group and len(example) * (len(group) + 1) > max_tokens:
            groups.append(group)
            group = []
        group.append(example)
    if group:
        groups.append(group)
    chooser.shuffle(groups)
    yield from groups


def collate(examples: Iterable[TrainExample], device: torch.device) -> Microbatch:
    """Pad on the right. The row before an output id predicts it; an empty prompt predicts from its
    output's first id on."""
    group = list(examples)
    longest = max(len(example) for example in group)
    ids = torch.zeros((len(group), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    rows: list[int] = []
    targets: list[int] = []
    for b, example in enumerate(group):
        text = (*example.prompt_ids, *example.output_ids)
        ids[b, : len(text)] = torch.tensor(text)
        mask[b, : len(text)] = 1
        for at in range(max(1, len(example.prompt_ids)), len(text)):
            rows.append(b * longest + at - 1)
            targets.append(text[at])
    return Microbatch(
        ids.to(device), mask.to(device), torch.tensor(rows).to(device),
        torch.tensor(targets).to(device),
    )  # fmt: skip
