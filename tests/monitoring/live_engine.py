"""The engine behind the monitored server: the real one on the FakeRunner, with long contexts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from drafters.published.suffix import SuffixDrafter
from server.api.engines.client import EngineSpec
from server.config import SpeculationConfig, TaskConfig
from server.engine.batch import Batch
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.machine_code import make_ready
from server.types import DeviceFigures
from tests.api.chat_models import template
from tests.api.live import LiveServer, served
from tests.api.real_engine import TABLE
from tests.fakes.engine_thread import start_thread
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info
from vocab_store.profile import VocabProfile
from vocab_store.slice import RequiredIds, VocabSlice

CONTEXT = 2048
POISON = TABLE.vocab_size - 1
"""A prompt that begins with this id cannot be computed: its request fails, and no other does."""


def _fail_on_poison(batch: Batch) -> None:
    if POISON in batch.token_ids[batch.positions == 0]:
        raise MemoryError("out of memory")


def half_the_vocabulary() -> VocabProfile:
    """A vocabulary profile that misses often: every other id."""
    ids = list(range(0, TABLE.vocab_size, 2))
    made = VocabSlice.make(ids, RequiredIds.of(TABLE.vocab_size, eos_ids=(0,)))
    none = np.empty(0, np.int32)
    return VocabProfile(made, none, none.astype(np.float32))


class OnDevice(FakeRunner):
    """As if it were on a GPU that 6 of 8 GB of are taken."""

    def device_figures(self) -> DeviceFigures:
        """See MeasuredRunner."""
        return DeviceFigures(5 << 30, 4 << 30, 2 << 30, 8 << 30, 0.75)


def make_engine(step_s: float) -> Engine:
    """Texts repeat themselves, not always, so that drafts are often right, not always.

    step_s: seconds a step takes.
    """
    info = fake_info(
        vocab_size=TABLE.vocab_size,
        num_blocks=1024,
        block_size=16,
        max_model_len=CONTEXT,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        eos_token_ids=(0,),
    )
    model = FakeModel(TABLE.vocab_size, context=1, boost=5.5)
    runner = OnDevice(model, info, step_s=step_s, fail=_fail_on_poison)
    return Engine(
        runner,
        {"suffix": SuffixDrafter()},
        # Steps take no time here: where the full head would win is a matter of the clock's noise.
        EngineSettings(
            max_num_seqs=16,
            max_num_batched_tokens=256,
            chunked_prefill_rows=128,
            may_use_full_head=False,
        ),
        stop_table=TABLE,
        profiles=lambda name: half_the_vocabulary(),
    )


def suffix_task(name: str, **fields: Any) -> TaskConfig:
    """A task that drafts with what the engine has."""
    return TaskConfig(name=name, speculation=SpeculationConfig(drafter="suffix"), **fields)


def monitored(*, step_s: float = 0.0, **options: Any) -> LiveServer:
    """A LiveServer with one such engine. The drafter is compiled before it starts."""
    make_ready()
    start = partial(start_thread, partial(make_engine, step_s))
    spec = EngineSpec("tiny/0", "tiny", "cpu", start)
    models = {"tiny": replace(served("tiny", CONTEXT), chat=template("hermes"))}
    return LiveServer([spec], models=models, **options)
