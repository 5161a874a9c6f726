"""An Engine in this process that answers many requests at once, each answer with its counts.

For benchmarks that count (agreement, misses, bytes) and time nothing: what runs beside a request
never changes its answer, so a batch is only a quicker way to the same figures.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from server.types import EngineSizes, Request, TokenLogprob, VocabularyCounts
from vocab_store.documents import tokenize_pairs
from vocab_store.profile import ProfileSettings, VocabProfile, build_profile
from vocab_store.slice import RequiredIds

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from server.engine.engine import Engine
    from server.token_bytes import TokenBytes
    from vocab_store.documents import Example

_NO_SUMS = ("num_ids", "verify_every")  # of VocabularyCounts: what is so now
_TICK_S = 20.0


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A converted model's folder, with what profiles are made and checked with."""

    folder: Path
    adapter: Path | None
    tokenizer: Tokenizer
    tokens: TokenBytes
    required: RequiredIds

    def examples(self, pairs: list[tuple[str, str]]) -> list[Example]:
        """Prompts and completions in ids."""
        return tokenize_pairs(pairs, self.tokenizer)

    def profile(self, train: list[Example], settings: ProfileSettings) -> VocabProfile:
        """Algorithm 1 on nine tenths of `train`; the last tenth tells the expected misses."""
        return build_profile(
            [e for i, e in enumerate(train) if i % 10 != 9],
            self.tokens,
            self.required,
            settings,
            heldout=train[9::10],
        )


def open_files(model: str, adapter: Path | None = None, *, weights: str = "float32") -> ModelFiles:
    """A built-in model or GGUF of the user's cache, or a folder. weights: as engine.weights; "file"
    is a GGUF as it is. Raises ValueError for one that is not there."""
    from tokenizers import Tokenizer

    from server import token_bytes
    from server.model.catalog import cached_folder
    from server.model.gguf_folder import cached_file_folder
    from vocab_store.command import model_facts

    form = "file" if weights == "file" else "float32"
    folder = (cached_file_folder if form == "file" else cached_folder)(model)
    if folder is None:
        raise ValueError(f"{model} is not in the cache: tailor models fetch --form {form} {model}")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocab_size, _, eos_ids = model_facts(folder)
    tokens = token_bytes.build(tokenizer, vocab_size)
    return ModelFiles(folder, adapter, tokenizer, tokens, RequiredIds.from_tokens(tokens, eos_ids))


def make_engine(
    files: ModelFiles,
    profiles: Mapping[str, VocabProfile],
    *,
    drafters: Iterable[str] = (),
    at_once: int = 16,
    threads: int | None = None,
    may_use_full_head: bool = True,
    weights: str = "auto",
) -> Engine:
    """An Engine on the CPU. profiles: looked up when a request arrives, so it may still grow.
    weights: as engine.weights."""
    from drafters import make_drafter
    from server.engine.engine import Engine
    from server.engine.settings import EngineSettings
    from server.engine.stops import StopTable
    from server.model.build import RunnerSpec, build_runner

    runner = build_runner(
        RunnerSpec(
            name=files.folder.name,
            folder=str(files.folder),
            sizes=EngineSizes(kv_bytes=1 << 30, max_num_seqs=at_once),
            adapter=None if files.adapter is None else str(files.adapter),
            threads=threads,
            weights=weights,
            max_model_len=4096,
        )
    )
    table = files.tokens
    return Engine(
        runner,
        {name: make_drafter(name) for name in drafters},
        EngineSettings(
            max_num_seqs=at_once,
            max_waiting_requests=4 * at_once,
            may_use_full_head=may_use_full_head,
        ),
        stop_table=StopTable(table.offsets, table.blob, (int(i) for i in table.special_ids)),
        profiles=profiles.__getitem__,
    )


@dataclass(slots=True)
class Answer:
    """One choice, whole. `ids` hold an EOS or stop id, if one ended it."""

    ids: tuple[int, ...] = ()
    finish_reason: str = ""
    stop_reason: int | bytes | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    vocabulary: VocabularyCounts = field(default_factory=VocabularyCounts)
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def same_as(self, other: Answer) -> bool:
        """Whether a client saw the same: ids, logprobs, how it ended."""
        return (self.ids, self.finish_reason, self.stop_reason, self.logprobs) == (
            other.ids,
            other.finish_reason,
            other.stop_reason,
            other.logprobs,
        )


def add_counts(a: VocabularyCounts, b: VocabularyCounts) -> VocabularyCounts:
    """Sums; slice size and verify_every are b's."""
    return VocabularyCounts(
        **{
            f.name: getattr(b, f.name) + (0 if f.name in _NO_SUMS else getattr(a, f.name))
            for f in fields(VocabularyCounts)
        }
    )


def answer_all(
    engine: Engine, requests: list[Request], what: str, console: Console
) -> dict[str, Answer]:
    """The answers by request id, with progress: a bar on a terminal, else a line now and then.

    Raises RuntimeError when a request fails.
    """
    answers: dict[str, Answer] = {request.request_id: Answer() for request in requests}
    waiting = iter(requests)
    num_done = 0
    told_s = time.monotonic()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(what, total=len(requests))
        while num_done < len(requests):
            while engine.num_open < engine.settings.max_num_seqs:
                request = next(waiting, None)
                if request is None:
                    break
                engine.submit(request)
            for delta in engine.step():
                if delta.finish_reason == "error":
                    raise RuntimeError(f"{delta.request_id}: {delta.error}")
                answer = answers[delta.request_id]
                answer.ids += delta.token_ids
                answer.logprobs += delta.logprobs
                answer.num_steps += delta.counts.num_steps
                answer.num_drafted += delta.counts.num_drafted
                answer.num_accepted += delta.counts.num_accepted
                if delta.vocabulary is not None:
                    answer.vocabulary = add_counts(answer.vocabulary, delta.vocabulary)
                if delta.finish_reason is not None:
                    answer.finish_reason = delta.finish_reason
                    answer.stop_reason = delta.stop_reason
                    num_done += 1
                    progress.update(bar, completed=num_done)
            if not console.is_terminal and time.monotonic() - told_s > _TICK_S:
                told_s = time.monotonic()
                print(f"{what}: {num_done} of {len(requests)}", file=sys.stderr, flush=True)
    if engine.num_failed_steps:
        raise RuntimeError(f"{engine.num_failed_steps} steps failed and were done again")
    return answers


def total(answers: Iterable[Answer]) -> dict[str, Any]:
    """Sums over answers as JSON values."""
    answers = list(answers)
    counts = VocabularyCounts()
    for answer in answers:
        counts = add_counts(counts, answer.vocabulary)
    names = [f.name for f in fields(VocabularyCounts) if f.name not in (*_NO_SUMS, "verify_s")]
    return {
        "num_answers": len(answers),
        "num_tokens": sum(len(a.ids) for a in answers),
        "num_decode_steps": sum(a.num_steps for a in answers),
        "num_drafted": sum(a.num_drafted for a in answers),
        "num_accepted": sum(a.num_accepted for a in answers),
        **{name: getattr(counts, name) for name in names},
    }
