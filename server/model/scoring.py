"""Scores given texts with a runner: log-probabilities of their own ids, one text at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from server.engine.batch import Batch, Runner

_BLOCK = 16


@dataclass(frozen=True)
class Text:
    """Ids of one text; from index `start` on they are scored."""

    ids: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Scores:
    """Of the scored positions of all texts, in order: log-probability of the id that is there, its
    rank, the likeliest id; text: which text each is of."""

    logprobs: npt.NDArray[np.float64]
    ranks: npt.NDArray[np.int64]
    best: npt.NDArray[np.int64]
    text: npt.NDArray[np.int64]


def prompt_batch(text: Text, first: int = 0, most: int | None = None) -> Batch:
    """All ids but the last as rows of one prompt, each scored id under the row before it, with the
    likeliest id beside it. Slots and blocks are the first ones. first, most: of a chunk, its first
    row and the most rows that it may have."""
    num = len(text.ids) - 1
    rows = np.arange(num, dtype=np.int32)[first:][:most]
    zeros = np.zeros_like(rows)
    scored = rows[max(text.start - 1 - first, 0) :] - np.int32(first)
    ids = np.array(text.ids[first:], np.int32)
    return Batch(
        token_ids=ids[: len(rows)],
        positions=rows,
        seq_ids=zeros,
        slots=rows,
        prefix_len=rows + np.int32(1),
        path_start=zeros,
        path_len=zeros,
        block_tables=np.arange(-(-num // _BLOCK), dtype=np.int32)[None],
        score_rows=scored,
        score_targets=ids[scored + 1],
        score_top=np.ones(len(scored), np.int32),
    )


def score(runner: Runner, texts: list[Text], *, adapter: int | None = None) -> Scores:
    """Teacher-forced scores of all texts, of which there is one, in steps of the most rows that the
    runner takes. adapter: its place (Runner), -1 for the base. Raises ValueError for a text
    that is longer than the runner's context."""
    parts, most, longest = [], runner.info.max_num_batched_tokens, runner.info.max_model_len
    of_seq = None if adapter is None else np.array([adapter], np.int32)
    for number, text in enumerate(texts):
        if len(text.ids) > longest + 1:  # the last is only scored
            raise ValueError(f"a text of {len(text.ids)} ids, and a context of {longest}")
        for first in range(0, len(text.ids) - 1, most):
            runner.launch(replace(prompt_batch(text, first, most), seq_adapters=of_seq))
            drawn = runner.wait()
            best = [top[0][0] for top in drawn.score_top]
            parts.append((drawn.score_logprobs, drawn.score_ranks, best, [number] * len(best)))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Scores(
        columns[0].astype(np.float64), *(column.astype(np.int64) for column in columns[1:])
    )


def compare(scores: Scores, base: Scores) -> dict[str, float]:
    """Figures of a form, against those of float32 on the same texts."""
    num = int(base.text.max()) + 1
    gold, same = scores.ranks == 1, scores.best == base.best
    wrong = np.bincount(scores.text, ~gold, num)
    other = np.bincount(scores.text, ~same, num)
    return {
        "perplexity": round(float(np.exp(-scores.logprobs.mean())), 4),
        "exact": round(float((wrong == 0).mean()), 4),
        "tokens_agree": round(float(same.mean()), 4),
        "texts_agree": round(float((other == 0).mean()), 4),
        "logprob_error": round(float(np.abs(scores.logprobs - base.logprobs).mean()), 4),
    }
