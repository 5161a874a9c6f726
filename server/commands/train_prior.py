"""Trains a model's prior (drafters.auto.prior) on what the model itself holds likely.

    tasks = [[encode(part) for part in task] for task in TASKS]
    texts = own_texts(runner, 100_000, tasks, seed=0)   # needs no text of anybody
    prior = fit(texts, embeddings_of(runner))

Most texts begin with any id of the vocabulary, and are drawn from the model's likeliest ids to
their end, or for a few ids and are then what the model writes greedily, as most requests of tasks
do. The others have the shape of tasks (as in Magpie, arXiv 2406.08464, the model writes the inputs,
too): words that ask for something, an input that is drawn, and the greedy answer behind a label.
Every row gives the state that the LM head was given and what the model held likely there: the head
is distilled from these, behind the state and up to MOST_FOLLOWED ids later. Texts of the user's own
are computed as they are, and nothing but the model's own next ids is learned of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from drafters.auto.prior import LANES, MOST_FOLLOWED, WIDTH, Prior, integers_of
from server.engine.batch import Float32, Int32, StateRunner
from server.engine.probe import probe_batch
from server.model.cpu.runner import CpuRunner

NUM_LIKELY = 8
NUM_TEXTS = 64  # side by side
NUM_OUTPUTS = 2048

TASKS = (
    ("\n\nSummarize the text.\n\n", "\n\nSummary:"),
    ("\n\nText: ", "\n\nThe text in one sentence:"),
    ("\n\nTranslate into French.\n\n", "\n\nFrench:"),
    ("\n\nTranslate the sentence to German: ", "\nGerman:"),
    ("\n\nQuestion: ", "\nAnswer:"),
    ("\n\nContext: ", "\n\nQuestion: What is this about?\nAnswer:"),
    ("\n\nAnswer from the document.\n\nDocument: ", "\n\nAnswer:"),
    ("\n\nExtract names, places and dates as JSON.\n\n", "\n\nJSON:"),
    ("\n\nList what is mentioned: ", "\n-"),
    ("\n\nWrite an SQL query for this: ", "\nSQL: SELECT"),
    ("\n\nMessage: ", "\nCategory:"),
    ("\n\nIs the review positive or negative?\n\nReview: ", "\nSentiment:"),
    ("\n\nExplain how to solve it.\n\nProblem: ", "\nSolution:"),
    ("\n\nRewrite in plain English: ", "\nRewritten:"),
    ("\n\nCorrect the spelling.\n\n", "\n\nCorrected:"),
    ("\n\nDialogue:\n", "\n\nNotes:"),
    ("\n\nArticle: ", "\nHeadline:"),
    ("\n\nAbstract: ", "\nKeywords:"),
    ("\n\nFacts: ", "\nDescription:"),
    ("\n\nUser: ", "\nAssistant:"),
    ("\n\nFix the code.\n\n```\n", "\n```\n\nFixed:\n```"),
    ("\n\nEmail:\n", "\n\nReply:\n"),
    ("\n\nCommand: ", "\nAction:"),
    ("\n\nMark the words.\n\nSentence: ", "\nMarked:"),
)
"""What stands before an input, and between it and the answer: such as people write."""

Progress = Callable[[str, int, int], None]
"""(what is done, how far, of how much)."""


class Written(NamedTuple):
    """A text. ids: int32 [n]. states: float16 [n, hidden size], what the next id is drawn from.
    likely, chances: int32 and float32 [n, NUM_LIKELY]: what the model held likely to come next."""

    ids: Int32
    states: npt.NDArray[np.float16]
    likely: Int32
    chances: Float32


class _Rows:
    """Computes rows of some texts on a runner that nobody else uses."""

    def __init__(self, runner: StateRunner, num_texts: int, most_tokens: int) -> None:
        info = runner.info
        width = -(-most_tokens // info.block_size)
        if num_texts * width > info.num_blocks:
            raise ValueError(f"{num_texts} texts of {most_tokens} ids do not fit the KV cache")
        self._runner, self._size = runner, info.block_size
        self._tables = np.arange(num_texts * width, dtype=np.int32).reshape(num_texts, width)

    def compute(self, texts: Int32, positions: Int32, ids: Int32) -> tuple[Float32, Int32, Float32]:
        """States, likely ids and chances of rows: id ids[r] of text texts[r] at positions[r]."""
        zeros = np.zeros(ids.shape[0], np.int32)
        slots = self._tables[texts, positions // self._size] * self._size
        batch = replace(
            probe_batch(self._runner, ids.shape[0], 1),
            token_ids=ids,
            positions=positions,
            seq_ids=texts,
            slots=slots + positions % self._size,
            prefix_len=positions + 1,
            path_len=zeros,
            block_tables=self._tables,
            draw_parent=zeros - 1,
            draw_positions=positions + 1,
            num_draft_rows=0,
            num_likely=NUM_LIKELY,
        )
        self._runner.launch(batch)
        likely = self._runner.wait().likely
        assert likely is not None
        return self._runner.last_states(batch.draw_rows), likely.ids, likely.chances


def own_texts(
    runner: StateRunner,
    num_tokens: int,
    tasks: Sequence[Sequence[Sequence[int]]],
    *,
    seed: int,
    progress: Progress = lambda *_: None,
) -> list[Written]:
    """Texts of at least num_tokens ids in all, written by the model from nothing.

    tasks: for each, the ids before an input and those between it and the answer.
    """
    info = runner.info
    num = min(NUM_TEXTS, info.max_num_batched_tokens)
    texts: list[Written] = []
    every, done = np.arange(num, dtype=np.int32), 0
    while done < num_tokens:
        rng = np.random.default_rng((seed, done))
        turn = len(texts) // num % len(_TURNS)
        length = min(_TURNS[turn][0], info.max_model_len)
        scripts = [_TURNS[turn][1](rng, info.vocab_size, tasks) for _ in range(num)]
        rows, told = _Rows(runner, num, length), []
        ids = np.zeros((num, length), np.int32)
        ids[:, 0] = [next(script) for script in scripts]
        for at in range(length):
            told.append(rows.compute(every, np.full(num, at, np.int32), ids[:, at].copy()))
            _, likely, chances = told[-1]
            if at + 1 < length:
                ends = np.isin(likely, info.eos_token_ids)
                ended = ends[every, chances.argmax(axis=1)]
                moves = np.array([s.send(bool(end)) for s, end in zip(scripts, ended, strict=True)])
                weights = np.where(ends, 0.0, chances.astype(np.float64)) + 1e-9
                summed = (weights / weights.sum(axis=1, keepdims=True)).cumsum(axis=1)
                drawn = (summed < rng.random((num, 1))).sum(axis=1).clip(max=NUM_LIKELY - 1)
                column = np.where(moves == _DRAWN, drawn, weights.argmax(axis=1))
                ids[:, at + 1] = np.where(moves >= 0, moves, likely[every, column].clip(min=0))
        states, likelies, shares = (np.stack(part, axis=1) for part in zip(*told, strict=True))
        halves = states.astype(np.float16)
        texts += [Written(ids[i], halves[i], likelies[i], shares[i]) for i in range(num)]
        done += num * length
        progress("texts of the model's own", min(done, num_tokens), num_tokens)
    return texts


_Script = Generator[int, bool, None]
"""How a text gets its ids: one that is given, or _DRAWN or _GREEDY from what the model held likely.
It is told whether the model would end there; what is taken is no end."""
_DRAWN, _GREEDY = -1, -2


def _any_text(num_drawn: int, rng: np.random.Generator, vocab_size: int, _: object) -> _Script:
    yield int(rng.integers(vocab_size))
    for _ in range(num_drawn):
        yield _DRAWN
    while True:
        yield _GREEDY


def _tasks(rng: np.random.Generator, _: int, tasks: Sequence[Sequence[Sequence[int]]]) -> _Script:
    """One task after the other."""
    while True:
        before, label = tasks[int(rng.integers(len(tasks)))]
        for token in before:
            yield token
        for _ in range(rng.integers(12, 96)):
            yield _DRAWN
        for token in label:
            yield token
        for _ in range(rng.integers(48, 128)):
            if (yield _GREEDY):
                break


_DRAWN_TEXTS = (96, functools.partial(_any_text, 96))
_GREEDY_TEXTS = (96, functools.partial(_any_text, 16))
_TURNS = (_DRAWN_TEXTS, _GREEDY_TEXTS, _DRAWN_TEXTS, _GREEDY_TEXTS, (192, _tasks))
"""What is written in turn: how many ids a text has, and its script."""


def read_texts(
    runner: StateRunner, texts: Sequence[Sequence[int]], progress: Progress = lambda *_: None
) -> Iterator[Written]:
    """What the model holds likely in texts that are given, in pieces that it can read at once."""
    most = min(runner.info.max_num_batched_tokens, runner.info.max_model_len)
    rows = _Rows(runner, 1, most)
    for number, text in enumerate(texts, 1):
        for first in range(0, len(text), most):
            ids = np.array(text[first : first + most], np.int32)
            if ids.shape[0] > 1:
                at = np.arange(ids.shape[0], dtype=np.int32)
                states, likely, chances = rows.compute(np.zeros_like(at), at, ids)
                yield Written(ids, states.astype(np.float16), likely, chances)
        progress("texts that were given", number, len(texts))


def embeddings_of(runner: CpuRunner) -> Float32:
    """The model's embeddings, float32 [vocabulary, hidden size]."""
    num, at_once = runner.info.vocab_size, min(256, runner.info.max_num_batched_tokens)
    found: list[Float32] = []
    for first in range(0, num, at_once):
        ids = np.arange(first, min(first + at_once, num), dtype=np.int32)
        batch = replace(probe_batch(runner, ids.shape[0], 1), token_ids=ids)
        found.append(runner.embed(batch).x[: ids.shape[0]].copy())
    return np.concatenate(found)


class _Head(nn.Module):
    """The head in floats. Ids are read and written by projections of the model's embeddings, so
    that those that no text had are known, too; an output has numbers of its own beside that."""

    def __init__(self, embeddings: Tensor, ids: Tensor, shares: Tensor, state_scale: float) -> None:
        super().__init__()
        hidden = embeddings.shape[1]
        self._embeddings, self.scale = embeddings, state_scale
        self._output_rows = torch.cat((embeddings[ids], torch.zeros(1, hidden)))
        self.project, self.recur = nn.Linear(hidden, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.read, self.write = (nn.Linear(hidden, WIDTH, bias=False) for _ in range(2))
        # Outputs begin near what is frequent: large random logits have to be unlearned first.
        for layer, share in ((self.project, 1.0), (self.read, 1.0), (self.write, 0.3)):
            nn.init.normal_(layer.weight, std=share * hidden**-0.5)
        self.own = nn.Parameter(torch.zeros(ids.shape[0] + 1, WIDTH))
        self.bias = nn.Parameter((shares + 1e-5).log())

    def behind(self, sums: Tensor, ids: Tensor) -> Tensor:
        """States behind ids. sums: what the model's states, or own ones, give before them."""
        states: Tensor = functional.softsign(sums + self.read(self._embeddings[ids]))
        return states

    def outputs(self) -> Tensor:
        """What a state is multiplied by, the last row for all other ids."""
        matrix: Tensor = self.write(self._output_rows) + 3.0 * self.own
        return matrix

    def prior(self, ids: Int32) -> Prior:
        """As integers, padded to whole groups of outputs."""
        with torch.no_grad():
            embed, embed_scale = integers_of(self.read(self._embeddings).numpy())
            num = ids.shape[0] + 1
            pad = -num % LANES
            output, output_scale = integers_of(
                functional.pad(self.outputs(), (0, 0, 0, pad)).numpy()
            )
            return Prior(
                np.concatenate((ids, np.full(1 + pad, -1, np.int32))),
                *integers_of((self.project.weight * self.scale).numpy()),
                self.project.bias.numpy().copy(),
                embed,
                embed_scale,
                *integers_of(self.recur.weight.numpy()),
                self.recur.bias.numpy().copy(),
                output,
                output_scale,
                functional.pad(self.bias, (0, pad), value=-100.0).numpy(),
            )


def fit(
    texts: list[Written],
    embeddings: Float32,
    *,
    num_steps: int = 6000,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> Prior:
    """The head that says best what the model held likely in these texts.

    texts: emptied, so that their states are not held twice while it learns. Raises ValueError where
    they are too short.
    """
    if not any(text.ids.shape[0] > MOST_FOLLOWED + 1 for text in texts):
        raise ValueError("the texts are too short to learn from")
    ids, likely, chances = (
        np.concatenate([getattr(text, name) for text in texts])
        for name in ("ids", "likely", "chances")
    )
    ends = np.cumsum([text.ids.shape[0] for text in texts])
    depth = MOST_FOLLOWED + 1
    starts = np.concatenate(
        [
            np.arange(end - text.ids.shape[0], end - depth)
            for text, end in zip(texts, ends, strict=True)
        ]
    )
    states = torch.from_numpy(np.concatenate([text.states for text in texts]))
    texts.clear()
    shares = np.zeros(embeddings.shape[0])
    np.add.at(shares, likely.clip(min=0).ravel(), chances.ravel())
    frequent = np.argsort(-shares, kind="stable")[: min(NUM_OUTPUTS - 1, shares.shape[0])]
    output_of = np.full(shares.shape[0], frequent.shape[0])
    output_of[frequent] = np.arange(frequent.shape[0])
    shares = np.append(shares[frequent], shares.sum() - shares[frequent].sum()) / shares.sum()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        table = torch.from_numpy(embeddings / max(float(embeddings.std()), 1e-6))
        scale = 1.0 / max(float(states[:: -(-len(states) // 65536)].float().std()), 1e-6)
        head = _Head(table, torch.from_numpy(frequent), torch.from_numpy(shares).float(), scale)
        inputs, outputs = torch.from_numpy(ids).long(), torch.from_numpy(output_of[likely.clip(0)])
        wanted = torch.from_numpy(chances)
        optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=num_steps)
        rng = np.random.default_rng(seed)
        for step in range(num_steps):
            rows = torch.from_numpy(rng.choice(starts, 256))
            loss = _loss(head, rows, (states, inputs, outputs, wanted))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            if step % 20 == 19 or step + 1 == num_steps:
                progress("training", step + 1, num_steps)
        return head.prior(frequent.astype(np.int32))


def _loss(head: _Head, rows: Tensor, data: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Cross-entropy with what the model held likely, the nearer the heavier. rows: of states."""
    states, inputs, outputs, wanted = data
    own = head.behind(head.project(states[rows].float() * head.scale), inputs[rows + 1])
    matrix, loss = head.outputs().T, torch.zeros(())
    for depth in range(MOST_FOLLOWED):
        at = rows + 1 + depth
        if depth:
            own = head.behind(head.recur(own), inputs[at])
        told = functional.log_softmax(own @ matrix + head.bias, dim=1)
        chances = wanted[at]
        other = (1.0 - chances.sum(dim=1)).clamp(min=0.0)
        missed = (chances * told.gather(1, outputs[at])).sum(dim=1) + other * told[:, -1]
        loss = loss - 0.7**depth * missed.mean()
    return loss
