"""Prompts and outputs as ids, in batches whose examples share their prompts' beginning."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vocab_store.enrichment import Enrichment


@dataclass(frozen=True, slots=True)
class TrainExample:
    """A prompt and its output in ids; output_ids end with EOS. spelled: of each output id,
    whether it begins a token's long form; empty where none does."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    spelled: tuple[bool, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where examples stand in one row of ids: num_prefix ids that all of them begin with, then what
    each goes on with, one after another.

    places: int64 [b, t], the place in the row of an example's t-th own id; past its end, of any.
    back: int64 [row - num_prefix], where each place behind the prefix is found in `places`
    flattened.
    """

    num_prefix: int
    places: torch.Tensor
    back: torch.Tensor


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The examples of one forward pass.

    input_ids, positions: int64 [1, T] with a layout; else [b, t], an example a line, padded on the
    right. rows: int64 [n], places in the flattened ids whose hidden state predicts an output id;
    targets: int64 [n], those ids; spelled: bool [n], where tokens of the task's own are not to
    be chosen. The loss is on the outputs alone, so the head is computed for these rows only.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    layout: Layout | None
    rows: torch.Tensor
    targets: torch.Tensor
    spelled: torch.Tensor


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
    grammar, a bias or a stop forbids. Where one begins, the loss leaves the enrichment's tokens
    out: it is learned as what follows without them, and never as better than one of them. The
    prompt keeps its base ids, unless the enrichment says that prompts are read in its tokens.
    """
    if enrichment is None:
        return example
    ids: list[int] = []
    begins: list[bool] = []
    for token_id in enrichment.segment(example.output_ids):
        spelled = chooser is not None and spell_out > 0.0 and chooser.random() < spell_out
        parts = enrichment.parts_of(token_id) if spelled else (token_id,)
        ids += parts
        begins += [parts[0] != token_id, *[False] * (len(parts) - 1)]
    return TrainExample(tuple(enrichment.read(example.prompt_ids)), tuple(ids), tuple(begins))


def shared_prefix(examples: Sequence[TrainExample]) -> int:
    """Ids that all prompts begin with, less than the shortest prompt: its last id predicts."""
    if len(examples) < 2:
        return 0
    first = min(example.prompt_ids for example in examples)
    last = max(example.prompt_ids for example in examples)  # the two that differ soonest
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    most = min(len(example.prompt_ids) for example in examples) - 1
    return max(0, most if shared is None else min(shared, most))


def microbatches(
    examples: Sequence[TrainExample], max_tokens: int, chooser: random.Random, *, packed: bool
) -> Iterator[list[TrainExample]]:
    """All examples once, in groups of at most `max_tokens` ids: computed ones where they are
    packed, padded ones else.

    Examples of alike lengths stand together, so that little is computed for padding; which of them,
    and the order of the groups, are drawn from `chooser`. An example longer than max_tokens is a
    group of its own.
    """
    prefix = shared_prefix(examples) if packed else 0
    order = sorted(range(len(examples)), key=lambda i: (len(examples[i]), chooser.random()))
    groups: list[list[TrainExample]] = []
    group: list[TrainExample] = []
    size = 0
    for index in order:
        example = examples[index]
        own = len(example) - prefix
        if group and (prefix + size + own if packed else own * (len(group) + 1)) > max_tokens:
            groups.append(group)
            group, size = [], 0
        group.append(example)
        size += own
    if group:
        groups.append(group)
    chooser.shuffle(groups)
    yield from groups


def collate(group: Sequence[TrainExample], device: torch.device, *, packed: bool) -> Microbatch:
    """The ids of a group. packed: in one row behind their shared beginning, which is computed once;
    every example has the numbers that it has alone.

    The row before an output id predicts it; an empty prompt predicts from its output's second id
    on.
    """
    prefix = shared_prefix(group) if packed else 0
    longest = max(len(example) for example in group) - prefix
    ids = list(group[0].prompt_ids[:prefix])
    positions = list(range(prefix))
    places: list[list[int]] = []
    back: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    spelled: list[bool] = []
    for b, example in enumerate(group):
        text = (*example.prompt_ids, *example.output_ids)
        own = len(text) - prefix
        first = len(ids)  # of its own ids
        num = len(example.prompt_ids)
        for at in range(max(1, num), len(text)):
            rows.append(first + at - prefix - 1)
            targets.append(text[at])
            spelled.append(bool(example.spelled) and example.spelled[at - num])
        pad = 0 if packed else longest - own
        ids += [*text[prefix:], *[0] * pad]
        positions += range(prefix, len(text) + pad)
        places.append([*range(first, first + own), *[first] * (longest - own)])
        back += range(b * longest, b * longest + own)

    def tensor(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    layout = Layout(prefix, tensor(places), tensor(back)) if packed else None
    shape = (1, -1) if packed else (len(group), longest)
    return Microbatch(
        tensor(ids).view(shape), tensor(positions).view(shape), layout, tensor(rows),
        tensor(targets), tensor(spelled).bool(),
    )  # fmt: skip
