"""The real Engine on a FakeRunner, for tests of the API: in a thread, or in a process of its own.

A process that is started imports this module: it leaves the API and its clients out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters import make_drafter
from server import token_bytes
from server.engine.batch import Batch
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.engine.task_store import TaskStore
from server.machine_code import make_ready
from server.token_bytes import TokenBytes
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.fakes.engine_thread import start_thread
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from server.api.engines.client import EngineSpec
    from server.token_bytes import TokenBytes
    from vocab_store.profile import VocabProfile

TOKENIZER = byte_level_tokenizer()
TABLE = token_bytes.build(TOKENIZER, 400)
FINGERPRINT = TABLE.fingerprint.hex()
CONTEXT = 256
MODEL = {"context": 1, "boost": 9.0}


def task_drafters(memory: TaskStore | None, *names: str) -> dict[str, Any]:
    """Drafters as a server makes them, each for a task, over what the engine keeps of tasks."""
    from server.wiring.drafter import make_task_drafter

    return {
        name: partial(make_task_drafter, name, FINGERPRINT, (0,), memory=memory) for name in names
    }


def make_engine(
    *,
    drafts: bool = True,
    max_num_seqs: int = 16,
    drafters: dict[str, Any] | None = None,
    memory: TaskStore | None = None,
    max_model_len: int = CONTEXT,
    table: TokenBytes = TABLE,
    tokenizer: Tokenizer | None = None,
    profiles: Callable[[str], VocabProfile] | None = None,
    model: Mapping[str, Any] = MODEL,
    max_grammars: int = 64,
    **runner: Any,
) -> Engine:
    """An Engine whose texts repeat themselves, so that drafts are often right.

    drafts: False leaves numba out, which takes seconds to start in a new process. drafters: in
    place of `suffix`. memory: what it keeps of tasks. table: of its ids. tokenizer: the same, for
    grammars, of which it keeps max_grammars; without one it has none. model: FakeModel's. runner:
    FakeRunner's step_s, row_s, fail.
    """
    vocab_size = table.vocab_size
    grammars = None
    if tokenizer is not None:
        from server.engine.grammar import GrammarCompiler
        from tests.engine.tiny_vocabularies import read_grammar_tokenizer

        grammars = GrammarCompiler(
            partial(read_grammar_tokenizer, tokenizer, vocab_size),
            max_kept=max_grammars,
        )
    info = fake_info(
        vocab_size=vocab_size,
        num_blocks=256,
        block_size=8,
        max_model_len=max_model_len,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        eos_token_ids=(0,),
    )
    return Engine(
        FakeRunner(FakeModel(vocab_size, **model), info, **runner),
        drafters or ({"suffix": make_drafter("suffix")} if drafts else {}),
        EngineSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=128,
            chunked_prefill_rows=64,
        ),
        stop_table=table,
        grammars=grammars,
        profiles=profiles,
        memory=memory,
    )


def make_learning_engine(
    share: Any, folder: Path, *, step_s: float = 0.0, model: Mapping[str, Any] = MODEL
) -> Engine:
    """The same with the drafter `auto` and what its tasks learn. share: server.wiring.engine's."""
    make_ready()  # not while it works: then it would seem to hang
    memory = TaskStore(
        folder,
        fingerprint=FINGERPRINT,
        exchange=share("tiny"),
        save_every_s=0.1,
        build_share=1.0,
    )
    drafters = task_drafters(memory, "auto")
    return make_engine(step_s=step_s, drafters=drafters, memory=memory, model=model)


HANGS = 399


def hang(batch: Batch) -> None:
    """A FakeRunner's failure: a step with this id never ends, while other threads of the engine go
    on."""
    if HANGS in batch.token_ids:
        time.sleep(3600)


def spec(start: Any = start_thread, i: int = 0, of: str = "tiny", **options: Any) -> EngineSpec:
    """An engine for LiveServer. of: its model. options: make_engine's."""
    from server.api.engines.client import EngineSpec

    factory = partial(make_engine, **options)
    return EngineSpec(f"engine-{i}", of, "cpu", partial(start, factory))
