"""The real Engine on a FakeRunner, for tests of the API: in a thread, or in a process of its own.

A process that is started imports this module: it leaves the API and its clients out.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters import make_drafter
from server import token_bytes
from server.engine.batch import Batch
from server.engine.engine import Engine
from server.engine.host import start_thread
from server.engine.plan import EngineSettings
from server.engine.stops import StopTable
from server.engine.task_store import TaskStore
from server.machine_code import make_ready
from server.token_bytes import TokenBytes
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from server.api.engines.client import EngineSpec

TOKENIZER = byte_level_tokenizer()
TABLE = token_bytes.build(TOKENIZER, 400)
CONTEXT = 256


def make_engine(
    *,
    drafts: bool = True,
    max_num_seqs: int = 16,
    drafters: dict[str, Any] | None = None,
    memory: TaskStore | None = None,
    table: TokenBytes = TABLE,
    max_model_len: int = CONTEXT,
    tokenizer_file: Path | None = None,
    context: int = 1,
    boost: float = 9.0,
    seed: int = 0,
    **runner: Any,
) -> Engine:
    """An Engine whose texts repeat themselves, so that drafts are often right.

    drafts: False leaves numba out, which takes seconds to start in a new process. drafters: in
    place of `suffix`. memory: what it keeps of tasks. tokenizer_file: of grammars, None where there
    are none. context, boost, seed: FakeModel's; another seed writes other texts. runner:
    FakeRunner's step_s, row_s and fail.
    """
    grammars = None
    if tokenizer_file is not None:
        from server.engine.grammar import GrammarCompiler
        from tests.engine.tiny_vocabularies import read_grammar_tokenizer

        read = partial(read_grammar_tokenizer, tokenizer_file, table.vocab_size, (0,))
        grammars = GrammarCompiler(read, table.vocab_size)
    info = fake_info(
        vocab_size=table.vocab_size,
        num_blocks=256,
        block_size=8,
        max_model_len=max_model_len,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        eos_token_ids=(0,),
    )
    model = FakeModel(table.vocab_size, context=context, boost=boost, seed=seed)
    return Engine(
        FakeRunner(model, info, **runner),
        drafters or ({"suffix": make_drafter("suffix")} if drafts else {}),
        EngineSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=128,
            chunked_prefill_rows=64,
        ),
        stop_table=StopTable(table.offsets, table.blob, table.special_ids.tolist()),
        grammars=grammars,
        memory=memory,
    )


def make_learning_engine(share: Any, folder: Path, *, step_s: float = 0.0) -> Engine:
    """The same with the drafter `auto` and what its tasks learn. share: server.wiring.engine's."""
    from server.wiring.drafter import make_task_drafter

    make_ready()  # not while it works: then it would seem to hang
    fingerprint = TABLE.fingerprint.hex()
    memory = TaskStore(
        folder,
        fingerprint=fingerprint,
        exchange=share("tiny", folder),
        save_every_s=0.1,
        build_share=1.0,
    )
    drafters = {"auto": partial(make_task_drafter, "auto", fingerprint, (0,), memory=memory)}
    return make_engine(step_s=step_s, drafters=drafters, memory=memory)


def hang(batch: Batch) -> None:
    """A FakeRunner's failure: the step never ends, while other threads of the engine go on."""
    time.sleep(3600)


def spec(start: Any = start_thread, i: int = 0, **options: Any) -> EngineSpec:
    """An engine for LiveServer; options: make_engine's."""
    from server.api.engines.client import EngineSpec

    name = f"engine-{i}"
    factory = partial(make_engine, **options)
    return EngineSpec(name, "tiny", "cpu", partial(start, factory, name=name, device="cpu"))


def grammar_spec(
    folder: Path,
    model: str = "tiny",
    name: str = "e",
    *,
    tokenizer: Tokenizer = TOKENIZER,
    **options: Any,
) -> EngineSpec:
    """One that holds texts to grammars, too. folder: for its tokenizer's file."""
    from server.api.engines.client import EngineSpec

    file = folder / "tokenizer.json"
    file.write_text(tokenizer.to_str(), encoding="utf-8")
    factory = partial(make_engine, tokenizer_file=file, **options)
    return EngineSpec(name, model, "cpu", partial(start_thread, factory, name=name, device="cpu"))
