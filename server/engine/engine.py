"""Engine: the step loop. `step` is the loop's body; the other methods are the verbs that it uses.

    schedule -> propose -> build -> launch -> (the device works) -> wait -> accept

The engine owns its sequences, blocks and queues, runs on one thread, and knows neither torch nor
HTTP. A Runner turns Batches into ids, Drafters propose, the host calls `submit` and `abort`, and
`step` returns Deltas. A request that fails fails alone; the others of its step are computed again.

Its parts hand data back and never call it: admission.py (who may be served), step_drafts.py and
planner.py (who drafts), steady.py (steps like the one before),
emission.py (from drawn ids to tokens), exact.py (verification), deltas.py (what is handed out),
step_figures.py (what it took), recovery.py (after a failed step), control.py (what is kept of
tasks).
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
from server.engine.batch import Runner
from server.engine.blocks import BlockPool
from server.engine.budget import CostTable, DraftBudget
from server.engine.build import build_batch
from server.engine.chunked_prefill import chunked_prefill_rows
from server.engine.control import TaskControl
from server.engine.deltas import Ending, next_delta, refused
from server.engine.drafting import DrafterFactory, DrafterRegistry
from server.engine.emission import Emission
from server.engine.exact import ExactVerifier, Outcome
from server.engine.grammar_compiler import GrammarCompiler
from server.engine.invariants import check_state
from server.engine.masks import step_masks
from server.engine.plan import Plan, Scheduled, Span
from server.engine.planner import DraftPlanner
from server.engine.recovery import Recovery, RunnerBrokenError
from server.engine.results import (
    Results,
    StepFailedError,
    draw_failure,
    guarded,
    take_scores,
    wait_for,
)
from server.engine.scheduler import Scheduler
from server.engine.sequence import Sequence, Status
from server.engine.sessions import DraftSessions
from server.engine.settings import EngineSettings
from server.engine.slices import ProfileSource, SliceBook
from server.engine.steady import SteadySteps
from server.engine.step_drafts import Step, StepDrafts
from server.engine.step_figures import StepFigures
from server.engine.stops import StopTable
from server.engine.task_store import TaskStore
from server.types import Delta, EngineStats, Request

_log = logging.getLogger(__name__)


def _nothing() -> None:
    """What `meanwhile` is where nothing is to be done."""


class Engine:
    """One model on one device. Not thread safe: everything is called from its own loop."""

    def __init__(
        self,
        runner: Runner,
        drafters: Mapping[str, Drafter | DrafterFactory],
        settings: EngineSettings,
        *,
        stop_table: StopTable | None = None,
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
        self.pool = BlockPool(info.num_blocks, info.block_size, prefix_cache=settings.prefix_cache)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            chunked_prefill_rows=settings.most_prefill_rows,
        )
        self.budget = DraftBudget(cost)
        self.planner = DraftPlanner(self.budget, info.vocab_size)
        control = settings.exact_control(info.vocab_size)
        self.slices = SliceBook(
            runner, profiles, control, capacity=settings.slice_cache_rows,
            slices_only=settings.slices_only,
        )  # fmt: skip
        self.sessions = DraftSessions(
            self.drafters, drafts=settings.max_draft_rows > 0, is_beside=info.device != "cpu"
        )
        self.recovery = Recovery(settings.max_failures)
        self._cost = cost
        self._grammars = grammars
        self._open: dict[str, list[Sequence]] = {}
        self.admission = Admission(
            info, settings, self.scheduler, self.slices, self.drafters, self._open,
            adapters=self.adapters,
            vocabulary=Vocabulary(stop_table=stop_table, grammars=grammars),
        )  # fmt: skip
        self._drafts = StepDrafts(
            self.scheduler, self.sessions, self.planner, settings.max_draft_rows
        )
        self._exact = ExactVerifier(self.slices, self.sessions)
        self._emission = Emission(self.slices, self.sessions, self._exact)
        self._steady = SteadySteps(self.scheduler, self._drafts, self.admission, self.adapters)
        self._deltas: list[Delta] = []
        self._figures = StepFigures(cost, self.budget, self.slices)

    # -- the loop ---------------------------------------------------------------------------

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[Delta]:
        """One step of every sequence that has rows; the Deltas since the last call. meanwhile:
        called once while the device works, e.g. to send the last Deltas. What it raises is raised
        once the step is done, whose Deltas the next call gives. Raises RunnerBrokenError."""
        began = time.perf_counter()
        self.sessions.settle_rest()
        step = self._steady.next() or self._begin()
        if step is None:
            return self.take_deltas()
        unheard: Exception | None = None
        try:
            self._launch(step)
            launched = time.perf_counter()
            try:
                (meanwhile or _nothing)()
            except Exception as error:
                unheard = error
            results = self._complete(step, lambda: time.perf_counter() - launched)
        except StepFailedError as failure:
            self._steady.drop()
            self._recover(step.plan, failure.error)
        else:
            self._figures.observe(step, began, results, is_steady=self._steady.has(step))
        if unheard is not None:
            raise unheard
        return self.take_deltas()

    @property
    def has_work(self) -> bool:
        """Whether step() has anything to do."""
        admission = self.admission
        return len(self._open) > admission.num_preparing or admission.has_prepared

    @property
    def is_preparing(self) -> bool:
        """Whether a request waits for its grammar or adapter: has_work may turn true by itself."""
        return self.admission.num_preparing > 0

    @property
    def num_open(self) -> int:
        """Requests that are not finished."""
        return len(self._open)

    @property
    def num_drafter_errors(self) -> int:
        """Draft sessions that failed and were closed."""
        return self.sessions.num_errors

    @property
    def num_failed_steps(self) -> int:
        """Steps that the runner failed, all of them recomputed or failed for good."""
        return self.recovery.num_failed_steps

    def take_deltas(self) -> list[Delta]:
        """Deltas not handed out yet (of refused and aborted requests too)."""
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def steps(self) -> figures.StepTotals:
        """What all steps took."""
        return self._figures.totals

    def stats(self) -> EngineStats:
        """A snapshot; the figures of a step are those of the last one."""
        scheduler, slices = self.scheduler, self.slices
        return EngineStats(
            num_total_blocks=self.pool.num_blocks,
            slice_rows=slices.num_rows,
            slice_bytes=slices.num_bytes,
            slice_hits=slices.index.num_hits,
            slice_loads=slices.index.num_loads,
            slice_evictions=slices.index.num_evictions,
            verify_every=slices.last_verify_every,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + self.admission.num_preparing,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            num_free_blocks=self.pool.num_free,
            num_cached_blocks=self.pool.num_cached,
            num_preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            **self._figures.figures,
            **self.tasks.figures,
            adapters=self.adapters.figures,
        )

    @property
    def has_news(self) -> bool:
        """Whether stats() has changed although no step was done."""
        return self.memory is not None and self.memory.has_news

    def tend(self) -> int | None:
        """Upkeep while idle. Returns milliseconds until the next; None: not before a step."""
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
            self._deltas += refused(request, refusal.message, refusal.code)
            return
        sequences = self.admission.open(request)
        leader = sequences[0]
        self._open[request.request_id] = sequences
        if leader.rules.max_output == 0 and not (leader.scores_prompt or request.label_ids):
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
        if self.memory is not None:
            self.memory.close()
        if self._grammars is not None:
            self._grammars.close()
        self.adapters.close()
        self.runner.close()

    def check(self) -> None:
        """Raise AssertionError unless blocks, queues and open requests agree."""
        check_state(self.pool, self.scheduler, self._open.values())

    # -- verbs of the step ------------------------------------------------------------------

    def _schedule(self) -> Plan:
        """The rows of the step. First, requests whose wait is over are queued or failed."""
        self.adapters.poll()
        if self.admission.num_preparing:
            ready, failed = self.admission.prepared()
            for leader in ready:
                self.scheduler.enqueue(leader)
            for failure in failed:
                self._fail(*failure)
        self._tend_queue()
        self.scheduler.chunked_prefill_rows = chunked_prefill_rows(
            self.settings, self._cost, self.scheduler.running
        )
        suspect = self.recovery.suspect
        plan = self.scheduler.schedule(suspect)
        if not plan.items and suspect is not None and not plan.failed:
            self.recovery.give_up()
            plan = self.scheduler.schedule()
        for sequence in plan.failed:
            self._fail(sequence, "the KV cache is too small for this request", "kv_exhausted")
        now = time.monotonic()
        for item in plan.items:
            if item.sequence.first_step_s == 0.0:
                item.sequence.first_step_s = now
                self.slices.seat(item.sequence)
                self.sessions.seat(item.sequence)
        self.slices.decide(plan.items)
        return plan

    def _tend_queue(self) -> None:
        """What has to be looked at in every step, those that are launched ahead too."""
        self.tasks.take_learned(gives_way=bool(self.scheduler.waiting))
        for failure in self.admission.expired():
            self._fail(*failure)

    def _begin(self) -> Step | None:
        """Plan the next step; None without rows."""
        plan = self._schedule()
        if not plan.items:
            return None
        is_plain = self.recovery.suspect is not None  # an isolated step runs without drafts
        drafts = self._drafts.propose(plan, is_plain=is_plain)
        items, trees = plan.items, drafts.trees
        masks = step_masks(items, trees)
        likely = self.sessions.num_likely(items, drafts.ceiling)
        built = build_batch(items, trees, plan.num_prefill_rows, masks, likely)
        batch = self.slices.attach(items, built.spans, built.batch, self.scheduler.running)
        return Step(plan, drafts, replace(built, batch=batch))

    def _launch(self, step: Step) -> None:
        """Give a step to the runner. Raises StepFailedError."""
        if step.plan.copies:
            copies = np.array(step.plan.copies, np.int32)
            guarded(self.runner.copy_blocks, copies[:, 0].copy(), copies[:, 1].copy())
        guarded(self.runner.launch, step.built.batch)

    def _complete(self, step: Step, clock: Callable[[], float]) -> Results:
        """What is done while a step computes, and with what it drew. Raises StepFailedError.
        clock: the step's seconds so far."""
        if self._steady.has(step):
            results = wait_for(self.runner.wait, clock)
            for sequence, draw in self._steady.accept(results, self._deltas):
                self._conclude(self._emission.emit(sequence, None, draw, results))
            return results
        sequences = [item.sequence for item in step.plan.items]
        self.sessions.settle(sequences, draws_first=step.plan.num_prefill_rows > 0)
        results = wait_for(self.runner.wait, clock)
        self._accept(step, results)
        self._verify_exact()
        self._move()
        self._steady.keep(step, results)
        return results

    def _accept(self, step: Step, results: Results) -> None:
        plan, built = step.plan, step.built
        for item, tree, span in zip(plan.items, step.drafts.trees, built.spans, strict=True):
            if item.sequence.status is Status.FINISHED:
                continue  # another choice of its request has failed in this step
            item.sequence.num_computed = item.start + item.num_rows
            take_scores(item.sequence, built.batch, results, span)
            if not item.draws:
                self.scheduler.publish(item.sequence)
            elif item.sequence.rules.max_output == 0:
                self._finish_scored(item, span, results)
            elif item.sequence.siblings:
                self._fork(item.sequence, span, results)
            else:
                self._conclude(self._emission.emit(item.sequence, tree, span.draw, results))
        self.recovery.step_done(any(item.draws for item in plan.items))

    def _finish_scored(self, item: Scheduled, span: Span, results: Results) -> None:
        """Finish a request that wants logprobs of its prompt or of labels, and no tokens."""
        sequence = item.sequence
        self.scheduler.publish(sequence)
        first = span.score + span.num_scores
        sequence.label_logprobs = tuple(
            results.drawn.score_logprobs[first : first + span.num_labels].tolist()
        )
        for choice in (*sequence.siblings, sequence):
            choice.prompt_logprobs = sequence.prompt_logprobs
            choice.num_cached_tokens = sequence.num_cached_tokens
            self._finish(choice, Ending("length"))

    def _fork(self, leader: Sequence, span: Span, results: Results) -> None:
        """Every choice draws its own first token from the prompt's last row, then runs alone."""
        children, leader.siblings = leader.siblings, []
        self.scheduler.publish(leader)
        for child in children:
            child.prompt_logprobs = leader.prompt_logprobs
            child.num_cached_tokens = leader.num_cached_tokens
            child.first_step_s = leader.first_step_s
            child.no_draft_reason = "prefill"
            self.slices.seat(child)
            self.sessions.seat(child)
        for i, child in enumerate(children):
            self._conclude(self._emission.emit(child, None, span.draw + 1 + i, results))
            if leader.status is Status.FINISHED:
                return  # a choice that failed has taken the request with it
            if child.status is Status.NEW:
                self.scheduler.fork(leader, child)
        leader.no_draft_reason = "prefill"
        self._conclude(self._emission.emit(leader, None, span.draw, results))

    def _verify_exact(self) -> None:
        """Verify the tokens of `exact` sequences, when some are due."""
        if not self._exact.is_due:
            for sequence in self._exact.keep_waiting():
                self.scheduler.trim(sequence)
            return
        for outcome in self._exact.check():
            self._conclude(outcome)

    def _conclude(self, outcome: Outcome | None) -> None:
        """The verified mark has moved: publish blocks, then finish, fail or release."""
        if outcome is None:  # its tokens wait to be verified
            return
        sequence, end = outcome.sequence, outcome.end
        if outcome.problem:
            self._fail(sequence, *draw_failure(outcome.problem, sequence))
            return
        self.scheduler.publish(sequence)
        if end.finish_reason is not None:
            self._finish(sequence, Ending(end.finish_reason, end.stop_reason))
            return
        if sequence.status is Status.RUNNING:
            self.scheduler.trim(sequence)
        if sequence.num_verified > sequence.num_released:
            self._deltas.append(next_delta(sequence, self.slices))

    def _move(self) -> None:
        """Copy the KV of accepted nodes to their slots."""
        moves = self._emission.moves.take()
        if moves is not None:
            guarded(self.runner.move_slots, *moves)

    # -- ends -------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence, ending: Ending) -> None:
        """Hand out the last Delta of a choice; give back its blocks, seat and session."""
        self._deltas.append(next_delta(sequence, self.slices, ending))
        self.scheduler.remove(sequence)
        self._steady.drop()
        self.sessions.close(sequence)
        self.slices.leave(sequence)
        request_id = sequence.request.request_id
        sequences = self._open[request_id]
        sequences.remove(sequence)
        if not sequences:
            del self._open[request_id]
            if sequence.adapter is not None:
                self.adapters.release(sequence.adapter)
        finished = ending.finish_reason in ("stop", "length")
        self.tasks.remember(sequence, finished, is_last=not sequences)

    def _fail(self, sequence: Sequence, message: str, code: str) -> None:
        """Fail a whole request: every open choice gets the error."""
        for choice in list(self._open.get(sequence.request.request_id, ())):
            self._finish(choice, Ending("error", None, message, code))

    def _recover(self, plan: Plan, error: Exception) -> None:
        """The runner raised: drop the step and everything in the KV cache.

        Raises RunnerBrokenError after too many failures in a row.
        """
        self._emission.moves.take()
        self._exact.drop()
        self.pool.drop_cache()
        text = f"{type(error).__name__}: {error}"[:300]
        _log.error("a step failed: %s", text, exc_info=error)
        was_too_large = isinstance(error, MemoryError) and self.scheduler.make_smaller(
            plan.num_rows
        )
        blame = self.recovery.step_failed(plan.items, was_too_large=was_too_large)
        if blame.culprit is not None:
            self._fail(blame.culprit, "the model failed on this request", "engine_error")
        for sequence in blame.others:
            self.scheduler.preempt(sequence)
        if self.recovery.is_broken:
            raise RunnerBrokenError(text) from error
