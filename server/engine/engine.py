"""Engine: the step loop. `step` is the loop's body; the other methods are the verbs that it uses.

    plan -> draft -> build -> launch -> (the device works) -> wait -> commit

The engine owns its sequences, blocks and queues, runs on one thread, and knows neither torch nor
HTTP. A Runner turns Batches into ids, Drafters propose, the host calls `submit` and `abort`, and
`step` returns Deltas. A request that fails fails alone; the others of its step are computed again.

What it knows of its choices lies in a Table (table.py), which all parts read and write. They hand
data back and never call it: admission.py (who may be served), plan.py (which rows a step computes),
draft.py (who drafts what), build.py (from rows to a Batch), run.py (what was drawn, and what
failed), commit.py (from drawn ids to tokens and Deltas), figures.py (what a step took),
task_store.py (what is kept of tasks).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from drafters.base import Drafter
from server.engine import figures
from server.engine.adapters import AdapterShelf, Vocabulary
from server.engine.admission import Admission
from server.engine.batch import Batch, Drawn, Runner, StateRunner
from server.engine.blocks import BlockPool
from server.engine.build import Builder, Built
from server.engine.commit import Committer, Ending, ExactVerifier, Outcome
from server.engine.draft import DrafterFactory, DrafterRegistry, Drafts
from server.engine.figures import StepFigures
from server.engine.gain import Gain
from server.engine.grammar import GrammarCompiler
from server.engine.plan import EngineSettings, Rows, Scheduler
from server.engine.run import (
    MAX_FAILURES,
    Recovery,
    RunnerBrokenError,
    StepFailedError,
    draw_failure,
    guarded,
    wait_for,
)
from server.engine.sequence import Sequence, Status
from server.engine.slices import ExactControl, ProfileSource, SliceBook
from server.engine.step_times import CostTable
from server.engine.table import Table
from server.engine.task_store import TaskControl, TaskStore
from server.engine.trees import Trees
from server.token_bytes import TokenBytes
from server.types import Delta, Request

_log = logging.getLogger(__name__)


class Engine:
    """One model on one device. Not thread safe: everything is called from its own loop."""

    def __init__(
        self,
        runner: Runner,
        drafters: Mapping[str, Drafter | DrafterFactory],
        settings: EngineSettings,
        *,
        stop_table: TokenBytes | None = None,
        cost: CostTable | None = None,
        grammars: GrammarCompiler | None = None,
        profiles: ProfileSource | None = None,
        memory: TaskStore | None = None,
    ) -> None:
        """stop_table: id -> bytes, for stop strings. cost: the draft budget's (None: no pruning).

        grammars: for requests with a grammar (None: they are refused); closed with the engine.
        profiles: vocabulary profiles by the name that requests give (None: no slices). memory:
        what is kept of tasks; closed with the engine.
        """
        self.runner = runner
        self.settings = settings
        self.info = info = replace(
            runner.info,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            figures=figures.declared(),
        )
        self.memory = memory
        self.drafters = DrafterRegistry(drafters)
        self.tasks = TaskControl(self.drafters, memory)
        self.adapters = AdapterShelf(runner, settings.max_adapters)
        self.controls: dict[str, Callable[[Any], Any]] = {
            **self.tasks.controls,
            **self.adapters.controls,
            "figures": lambda _: figures.values(self),
        }
        """What ("control", ...) messages may call, by name, with plain values."""
        self.pool = BlockPool(info.num_blocks, info.block_size)
        self.table = Table(block_size=info.block_size, max_model_len=info.max_model_len)
        self.scheduler = Scheduler(self.table, self.pool, settings, cost)
        self.gain = Gain(cost)
        control = ExactControl(
            info.vocab_size, max_verify_every=settings.max_verify_every,
            may_use_full_head=settings.may_use_full_head,
        )  # fmt: skip
        self.slices = SliceBook(
            runner, profiles, control, capacity=settings.slice_cache_rows,
            slices_only=settings.slices_only,
        )  # fmt: skip
        self.drafts = Drafts(
            self.drafters, self.gain, self.scheduler, vocab_size=info.vocab_size,
            max_rows=settings.max_draft_rows, is_beside=info.device != "cpu",
            states=runner.last_states if isinstance(runner, StateRunner) else None,
        )  # fmt: skip
        self.recovery = Recovery()
        self._grammars = grammars
        self._open: dict[str, list[Sequence]] = {}
        self._ended: list[tuple[Sequence, bool, bool]] = []  # see _tidy
        self.admission = Admission(
            info, self.scheduler, self.slices, self.drafters, self._open,
            adapters=self.adapters,
            vocabulary=Vocabulary(stop_table=stop_table, grammars=grammars),
        )  # fmt: skip
        self._exact = ExactVerifier(self.slices, self.drafts)
        self._builder = Builder(self.table)
        self._committer = Committer(self.scheduler, self.slices, self.drafts, self._exact)
        self._figures = StepFigures(cost, self.gain, self.slices)
        self.steps = self._figures.totals

    # -- the loop ---------------------------------------------------------------------------

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[Delta]:
        """One step of every sequence that has rows; the Deltas since the last call. meanwhile:
        called once while the device works, e.g. to send the last Deltas. What it raises is raised
        once the step is done, whose Deltas the next call gives. Raises RunnerBrokenError."""
        began = time.perf_counter()
        rows = self._plan()
        if not rows.num_rows:
            return self.take_deltas()
        # An isolated step runs without drafts.
        trees = self.drafts.draft(rows, is_plain=self.recovery.is_isolating)
        built = self._builder.build(rows, trees)
        if not rows.is_plain:
            built.batch = self.slices.attach(rows, built, self.scheduler.running)
        unheard: list[Exception] = []
        try:
            results = self._run(rows, built.batch, meanwhile, unheard)
            self._commit(rows, trees, built, results)
        except StepFailedError as failure:
            self._recover(rows, built.batch.num_rows, failure.error)
        else:
            self._figures.observe(rows, trees, built, results, began)
        if unheard:
            raise unheard[0]
        return self.take_deltas()

    @property
    def has_work(self) -> bool:
        """Whether step() has anything to do."""
        admission = self.admission
        return len(self._open) > len(admission.preparing) or admission.has_prepared

    @property
    def is_preparing(self) -> bool:
        """Whether a request waits for its grammar or adapter: work may appear by itself."""
        return bool(self.admission.preparing)

    @property
    def num_open(self) -> int:
        """Requests that are not finished."""
        return len(self._open)

    def take_deltas(self) -> list[Delta]:
        """Deltas not handed out yet (of refused and aborted requests too)."""
        deltas, self._committer.deltas = self._committer.deltas, []
        return deltas

    def tend(self) -> int | None:
        """Upkeep while idle. Returns milliseconds until the next; None: not before a step."""
        self._tidy()
        self.tasks.take_learned()
        return None if self.memory is None else self.memory.due_ms()

    # -- requests ---------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. One that cannot be served gets an error Delta; nothing is raised."""
        if request.speculation.drafter != "off":
            spec = replace(request.speculation, scope=request.scope, adapter=request.adapter)
            request = replace(request, speculation=spec)
        refusal = self.admission.refusal(request)
        if refusal is not None:
            self._committer.refuse(request, *refusal)
            return
        sequences = self.admission.open(request)
        leader = sequences[0]
        self._open[request.request_id] = sequences
        if leader.max_output == 0 and not (leader.scores_prompt or request.label_ids):
            for sequence in list(sequences):  # nothing to compute
                sequence.num_cached_tokens = 0
                self._finish(sequence, Ending("length"))
        elif not self.admission.hold(leader):
            self.scheduler.enqueue(leader)

    def abort(self, request_id: str) -> None:
        """End every open choice of a request now; unknown ids are fine (it has just finished)."""
        for sequence in list(self._open.get(request_id, ())):
            self._finish(sequence, Ending("abort"))

    def abort_all(self) -> None:
        """End everything: the engine is about to stop."""
        for request_id in list(self._open):
            self.abort(request_id)

    def fail_all(self, message: str) -> None:
        """End every open request with an error."""
        for sequences in list(self._open.values()):
            self._fail(sequences[0], message, "engine_error")

    def close(self) -> None:
        """Abort open requests, write what is kept to disk, release the device. Idempotent."""
        self.abort_all()
        self._tidy()
        if self.memory is not None:
            self.memory.close()
        if self._grammars is not None:
            self._grammars.close()
        self.adapters.close()
        self.runner.close()

    def check(self) -> None:
        """Raise AssertionError unless table, blocks, queues and open requests agree."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        alive = [s for sequences in self._open.values() for s in sequences]
        tables = [s.blocks() for s in alive]
        self.pool.check(tables)
        assert {id(s) for s in running} == {id(s) for s in alive if s.status is Status.RUNNING}
        assert {id(s) for s in waiting} == {id(s) for s in alive if s.status is Status.WAITING}
        assert running == sorted(running, key=lambda s: s.order)
        assert len(waiting) == sum(s.status is Status.WAITING for s in alive)
        assert self.scheduler.num_waiting_tokens == sum(s.num_tokens for s in waiting)
        self.table.check([s.seat for s in alive], [s.seat for s, *_ in self._ended])
        for s, blocks in zip(alive, tables, strict=True):
            assert s.last_id == s.ids[s.num_tokens - 1]
            assert s.status is Status.RUNNING or s.num_blocks == 0
            size = self.table.block_size
            open_blocks = blocks[s.num_computed // size : -(-s.room // size)]
            assert all(map(self.pool.writable, open_blocks)), "room in a block of others"

    # -- verbs of the step ------------------------------------------------------------------

    def _plan(self) -> Rows:
        """The rows of the step. First, requests whose wait is over are queued or failed."""
        if self._ended:
            self._tidy()
        if self.adapters.known:
            self.adapters.poll()
        if self.admission.preparing:
            ready, failed = self.admission.prepared()
            for leader in ready:
                self.scheduler.enqueue(leader)
            for leader, why in failed:
                self._fail(leader, *why)
        if self.memory is not None:
            self.tasks.take_learned(gives_way=self.scheduler.num_waiting_tokens > 0)
        if self.admission.expiries:
            for leader, why in self.admission.expired():
                self._fail(leader, *why)
        suspect = self.recovery.suspect
        rows = self.scheduler.plan(suspect)
        if not rows.num_rows and suspect is not None and not rows.failed:
            self.recovery.give_up()
            rows = self.scheduler.plan()
        for sequence in rows.failed:
            self._fail(sequence, "the KV cache is too small for this request", "kv_exhausted")
        if not rows.is_plain:
            now = time.monotonic()
            for sequence in rows.sequences:
                if sequence.first_step_s == 0.0:
                    sequence.first_step_s = now
                    self.slices.seat(sequence)
                    self.drafts.seat(sequence)
            self.slices.decide(rows)
        return rows

    def _run(
        self,
        rows: Rows,
        batch: Batch,
        meanwhile: Callable[[], None] | None,
        unheard: list[Exception],
    ) -> Drawn:
        """What the runner draws. What `meanwhile` raises is added to `unheard`. Raises
        StepFailedError."""
        if rows.copies:
            copies = np.array(rows.copies, np.int32)
            guarded(self.runner.copy_blocks, copies[:, 0].copy(), copies[:, 1].copy())
        guarded(self.runner.launch, batch)
        launched = time.perf_counter()
        if meanwhile is not None:
            try:
                meanwhile()
            except Exception as error:
                unheard.append(error)
        if not self.drafts.is_off:
            self.drafts.settle(rows.sequences, draws_first=rows.num_prefill_rows > 0)
        return wait_for(self.runner.wait, launched)

    def _commit(self, rows: Rows, trees: Trees, built: Built, results: Drawn) -> None:
        """Emit what was drawn. Raises StepFailedError."""
        committer = self._committer
        for outcome in committer.commit(rows, trees, built, results):
            self._conclude(outcome)
        self.recovery.step_done(rows.draws)
        if not rows.is_plain:
            self._verify_exact()
        if committer.moves.shape[1]:
            guarded(self.runner.move_slots, *committer.moves)

    def _verify_exact(self) -> None:
        """Verify the tokens of `exact` sequences, when some are due; of a suspect all that it has,
        because a verification may be what fails."""
        if not self._exact.is_due(at_once=self.recovery.is_isolating):
            for sequence in self._exact.keep_waiting():
                self.scheduler.trim(sequence)
            return
        for outcome in self._exact.check():
            self._conclude(outcome)

    def _conclude(self, outcome: Outcome) -> None:
        """The verified mark has moved: publish blocks, then finish, fail or release."""
        sequence, end = outcome.sequence, outcome.end
        if outcome.problem:
            self._fail(sequence, *draw_failure(outcome.problem, sequence))
            return
        self.scheduler.publish(sequence)
        if end.finish_reason is not None:
            self._finish(sequence, end)
            return
        if sequence.status is Status.RUNNING:
            self.scheduler.trim(sequence)
        if sequence.num_verified > sequence.num_released:
            self._committer.release(sequence)

    # -- ends -------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence, ending: Ending) -> None:
        """Hand out the last Delta of a choice, and give back its blocks."""
        self._committer.release(sequence, ending)
        self.scheduler.remove(sequence)
        self.slices.leave(sequence)
        request_id = sequence.request.request_id
        sequences = self._open[request_id]
        sequences.remove(sequence)
        if not sequences:
            del self._open[request_id]
            if sequence.adapter is not None:
                self.adapters.release(sequence.adapter)
        finished = ending.finish_reason in ("stop", "length")
        self._ended.append((sequence, finished, not sequences))

    def _tidy(self) -> None:
        """Close the sessions of choices that have ended, learn their answers, give back their
        seats. Nobody waits for it: their last Deltas are told first."""
        ended, self._ended = self._ended, []
        for sequence, finished, is_last in ended:
            self.drafts.close(sequence)
            self.tasks.remember(sequence, finished, is_last)
            self.table.give_back(sequence.seat)

    def _fail(self, sequence: Sequence, message: str, code: str) -> None:
        """Fail a whole request: every open choice gets the error."""
        for choice in list(self._open.get(sequence.request.request_id, ())):
            self._finish(choice, Ending("error", None, message, code))

    def _recover(self, rows: Rows, num_rows: int, error: Exception) -> None:
        """The runner raised: drop the step and everything in the KV cache. num_rows: the step's,
        with those of drafts.

        Raises RunnerBrokenError after too many failures in a row.
        """
        self._exact.drop()
        self.pool.drop_cache()
        text = f"{type(error).__name__}: {error}"[:300]
        _log.error("a step failed: %s", text, exc_info=error)
        was_too_large = isinstance(error, MemoryError) and self.scheduler.make_smaller(num_rows)
        culprit, others = self.recovery.step_failed(rows.sequences, was_too_large=was_too_large)
        if culprit is not None:
            self._fail(culprit, "the model failed on this request", "engine_error")
        for sequence in others:
            if num_rows > rows.num_rows and not was_too_large:
                if sequence.has_failed:  # else what fails with drafts alone fails at every step
                    self.drafts.close(sequence)
                sequence.has_failed = True
            self.scheduler.preempt(sequence)
        if self.recovery.num_in_a_row >= MAX_FAILURES:
            raise RunnerBrokenError(text) from error
