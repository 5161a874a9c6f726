"""Engine: the step loop. `step` is the whole of it, on one screen; the rest are its verbs.

    schedule -> propose -> build -> launch -> (the device works) -> wait -> accept

The engine owns its sequences, blocks and queues, runs on one thread, and knows neither torch nor
HTTP: a Runner turns Batches into ids, Drafters propose, `submit` and `abort` come in, Deltas go
out. A request that fails fails alone; what a failed step leaves behind is recomputed.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from drafters.base import Drafter
from server.engine.accept import (
    StopCut,
    count_step,
    cut,
    follow,
    merge_counts,
    rejected_paths,
    sources_of,
)
from server.engine.batch import NO_TOKEN_LEFT, Batch, DrawError, Drawn, Int32, Runner, UInt32
from server.engine.blocks import BlockPool, root_key
from server.engine.budget import CostTable, DraftBudget
from server.engine.build import build_batch
from server.engine.drafting import CheckedTree, DrafterFactory, DrafterRegistry
from server.engine.exact_control import WindowControl
from server.engine.grammar import FORCED, GrammarState, fill_masks
from server.engine.grammar_compiler import GrammarCompiler, GrammarTemplate
from server.engine.plan import Built, Plan, Span
from server.engine.planner import Ask, DraftPlanner, StepShape
from server.engine.scheduler import Scheduler
from server.engine.sequence import Sequence, SequenceMark, Status
from server.engine.slices import ProfileSource, SliceBook
from server.engine.stops import StopTable
from server.engine.task_store import TaskMemory
from server.types import (
    Delta,
    EngineStats,
    FinishReason,
    Request,
    SpeculationParams,
    StepCounts,
    TokenLogprob,
)

__all__ = ["Engine", "EngineSettings", "RunnerBrokenError", "Verdict", "Verifier"]

_log = logging.getLogger(__name__)
_NO_COUNTS = StepCounts()


class RunnerBrokenError(RuntimeError):
    """Step after step failed, each request alone too: the runner is beyond repair."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The engine's numbers.

    max_num_seqs, max_num_batched_tokens: seats, and rows a step. prefill_rows: prompt rows a step
    while others decode. target_step_s: when above 0 and a cost table is there, prompt rows follow
    it (never below min_prefill_rows); prefill_ratio: where a step is slow they may take this many
    times as long as those who decode take alone, up to prefill_rows. Chunks cut to a fixed time
    would be so small on a slow machine, or with a large model, that most of a prompt's time went
    to the decoders' part of its many steps.
    max_waiting_requests, max_waiting_tokens: bound of the queue. prefix_cache: on or off.
    max_draft_rows: tree nodes a step, over all sequences; 0 is off. max_failures: failed steps in
    a row after which the runner counts as broken. slice_rows: dynamic LM-head rows beside the
    profiles' own. max_window: most unverified tokens of an `exact`
    sequence; adapts_windows: whether the full head takes over where it is cheaper.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    prefill_rows: int = 256
    min_prefill_rows: int = 16
    target_step_s: float = 0.0
    prefill_ratio: float = 8.0
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1 << 20
    prefix_cache: bool = True
    max_draft_rows: int = 512
    max_failures: int = 8
    slice_rows: int = 4096
    max_window: int = 64
    adapts_windows: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a Verifier says: so many output tokens stand; cut back to `cut_to` when one does not."""

    num_verified: int
    cut_to: int | None = None


class Verifier(Protocol):
    """Decides when emitted tokens are verified. Without one they are at once (full head)."""

    def verify(self, sequence: Sequence, final: bool) -> Verdict:
        """Called after each accept. `final`: the choice would end here, so decide on every token.

        num_verified <= cut_to when there is a cut; the sequence goes on from cut_to and draws
        again. Without a cut and with `final`, everything must stand.
        """


@dataclass(frozen=True, slots=True)
class _Compiling:
    """A request that waits for its grammar, at most until deadline_s (time.monotonic())."""

    leader: Sequence
    template: Future[GrammarTemplate]
    deadline_s: float


class _StepFailed(Exception):
    """The runner raised `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


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
        verifier: Verifier | None = None,
        grammars: GrammarCompiler | None = None,
        controls: Mapping[str, Callable[[Any], Any]] | None = None,
        profiles: ProfileSource | None = None,
        memory: TaskMemory | None = None,
    ) -> None:
        """stop_table: id -> bytes, for stop strings. cost: the draft budget's (None: no pruning).

        grammars: for requests with a grammar (None: they are refused); closed with the engine.
        profiles: vocabulary profiles by the name that requests give (None: no slices).
        controls: what ("control", ...) messages may call, by name, with plain values; beside
        these: task_report, task_forget and drafters_reload. memory: what is kept of tasks; closed
        with the engine.
        """
        self.runner = runner
        self.settings = settings
        self.info = replace(
            runner.info,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
        )
        self.drafters = DrafterRegistry(drafters)
        self.controls: dict[str, Callable[[Any], Any]] = {
            "task_report": self._task_report,
            "task_forget": self._task_forget,
            "drafters_reload": self._drafters_reload,
            **(controls or {}),
        }
        self.memory = memory
        self._outputs: dict[str, list[Int32] | None] = {}  # of open requests; None: not to learn
        self.pool = BlockPool(
            self.info.num_blocks, self.info.block_size, prefix_cache=settings.prefix_cache
        )
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            prefill_rows=settings.prefill_rows,
        )
        self.budget = DraftBudget(cost)
        self.planner = DraftPlanner(self.budget, self.info.vocab_size)
        self.slices = SliceBook(
            runner,
            profiles,
            WindowControl(
                self.info.vocab_size,
                max_window=settings.max_window,
                first_window=min(8, settings.max_window),
                adapts=settings.adapts_windows,
            ),
            capacity=settings.slice_rows,
        )
        self.num_drafter_errors = self.num_failed_steps = 0
        self._cost = cost
        self._verifier = verifier
        self._grammars = grammars
        self._compiling: list[_Compiling] = []
        self._problems: dict[int, str] = {}  # why a draw of the last step has no answer
        self._stop_table = stop_table
        self._eos = frozenset(self.info.eos_token_ids)
        self._open: dict[str, list[Sequence]] = {}
        self._expiries: list[tuple[float, str]] = []  # a heap of (monotonic seconds, request id)
        self._num_arrived = 0
        self._deltas: list[Delta] = []
        self._moves: tuple[list[int], list[int]] = ([], [])
        self._unchecked: list[tuple[Sequence, StopCut, bool]] = []  # in the step: end, due now
        self._suspects: list[Sequence] = []
        self._num_failures = 0
        self._model_s = 0.0  # of the step that is being accepted
        self._logged: set[str] = set()
        self._most_drafts = 0
        self._stats = EngineStats(num_total_blocks=self.pool.num_blocks)

    # -- the loop ---------------------------------------------------------------------------

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[Delta]:
        """One step of every sequence that has rows; the Deltas since the last call.

        meanwhile: called once while the device works, e.g. to send the last Deltas. Raises
        RunnerBrokenError, and what `meanwhile` raises.
        """
        began = time.perf_counter()
        if self._compiling:
            self._admit_compiled()
        plan = self._schedule()
        if not plan.items:
            return self.take_deltas()
        trees, propose_s = self._propose(plan)
        masks = self._masks(plan, trees)
        built = build_batch(plan.items, trees, num_prefill_rows=plan.num_prefill_rows, masks=masks)
        batch = self._cut_heads(plan, built)
        try:
            launched = time.perf_counter()
            self._launch(plan, batch)
            if meanwhile is not None:
                meanwhile()
            self._settle(plan)
            drawn = self._wait()
            self._model_s = model_s = drawn.model_s or time.perf_counter() - launched
            self._accept(plan, trees, built, drawn)
            self._check_windows()
            self._move()
        except _StepFailed as failure:
            self._recover(plan, failure.error)
            return self.take_deltas()
        self._observe(plan, built, began, propose_s, model_s)
        self.slices.observe(
            batch, drawn.model_s - drawn.head_s, drawn.head_s, plan.num_prefill_rows > 0
        )
        return self.take_deltas()

    @property
    def has_work(self) -> bool:
        """Whether step() has anything to do."""
        return len(self._open) > len(self._compiling) or any(
            wait.template.done() or time.monotonic() > wait.deadline_s for wait in self._compiling
        )

    @property
    def is_compiling(self) -> bool:
        """Whether a request waits for its grammar: has_work may turn true by itself."""
        return bool(self._compiling)

    @property
    def num_open(self) -> int:
        """Requests that are not finished."""
        return len(self._open)

    def take_deltas(self) -> list[Delta]:
        """Deltas not handed out yet (of refused and aborted requests too)."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def stats(self) -> EngineStats:
        """A snapshot; the figures of a step are those of the last one."""
        scheduler, slices = self.scheduler, self.slices
        return replace(
            self._stats,
            slice_rows=slices.num_rows,
            slice_bytes=slices.num_bytes,
            slice_hits=slices.index.num_hits,
            slice_loads=slices.index.num_loads,
            slice_evictions=slices.index.num_evictions,
            verify_window=slices.last_window,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._compiling),
            num_waiting_tokens=scheduler.num_waiting_tokens,
            num_free_blocks=self.pool.num_free,
            num_cached_blocks=self.pool.num_cached,
            num_preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            learned=() if self.memory is None else self.memory.sizes(),
        )

    @property
    def has_news(self) -> bool:
        """Whether stats() has changed although no step was done."""
        return self.memory is not None and self.memory.has_news

    def tend(self) -> int | None:
        """Upkeep while idle. Milliseconds after which there is more; None: only after a step."""
        self._take_learned()
        return None if self.memory is None else self.memory.due_ms()

    # -- requests ---------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. One that cannot be served gets an error Delta; nothing is raised."""
        if request.speculation.max_draft_tokens > 0:
            spec = replace(request.speculation, scope=request.scope)
            request = replace(request, speculation=spec)
        refusal = self._refusal(request)
        if refusal is not None:
            self._refuse(request, *refusal)
            return
        self._num_arrived += 1
        sequences = [
            Sequence(
                request,
                choice_id,
                self._num_arrived,
                max_model_len=self.info.max_model_len,
                block_size=self.info.block_size,
                eos_token_ids=self._eos,
                stop_table=self._stop_table,
                root_key=root_key(self.info.fingerprint, request.scope),
            )
            for choice_id in range(request.num_choices)
        ]
        for sequence in sequences:
            sequence.head = self.slices.open(request)
        leader = sequences[0]
        leader.siblings = sequences[1:]
        self._open[request.request_id] = sequences
        if leader.rules.max_output == 0 and not (leader.scores_prompt or request.label_ids):
            for sequence in list(sequences):  # nothing to compute
                sequence.num_cached_tokens = 0
                self._finish(sequence, "length")
            return
        if request.queue_timeout_s > 0.0:
            heapq.heappush(
                self._expiries, (request.arrival_s + request.queue_timeout_s, request.request_id)
            )
            if len(self._expiries) > 2 * len(self._open) + 1024:  # most have begun or are over
                self._expiries = [e for e in self._expiries if e[1] in self._open]
                heapq.heapify(self._expiries)
        if request.grammar is None:
            self.scheduler.enqueue(leader)
            return
        assert self._grammars is not None
        template = self._grammars.compile(request.grammar, request.scope)
        deadline_s = time.monotonic() + self._grammars.timeout_s
        self._compiling.append(_Compiling(leader, template, deadline_s))

    def _admit_compiled(self) -> None:
        """Requests whose grammar is there join the queue; those whose grammar is not fail."""
        waiting, self._compiling = self._compiling, []
        now = time.monotonic()
        for wait in waiting:
            leader = wait.leader
            if leader.status is Status.FINISHED:  # aborted meanwhile
                continue
            if not wait.template.done():
                if now > wait.deadline_s:
                    self._fail(leader, "the grammar takes too long to compile", "limit_exceeded")
                else:
                    self._compiling.append(wait)
                continue
            error = wait.template.exception()
            if error is None:
                for sequence in (leader, *leader.siblings):
                    sequence.grammar = GrammarState(wait.template.result())
                self.scheduler.enqueue(leader)
            elif isinstance(error, ValueError):
                self._fail(leader, f"the grammar cannot be used: {error}"[:200], "invalid_value")
            else:
                _log.error("a grammar could not be compiled", exc_info=error)
                self._fail(leader, "the grammar could not be compiled", "engine_error")

    def abort(self, request_id: str) -> None:
        """End every open choice of a request now; unknown ids are fine (it has just finished)."""
        for sequence in list(self._open.get(request_id, ())):
            self._finish(sequence, "abort")

    def abort_all(self) -> None:
        """End everything: the engine is about to stop."""
        for request_id in list(self._open):
            self.abort(request_id)

    def fail_all(self, message: str) -> None:
        """End every open request with an error."""
        for sequences in list(self._open.values()):
            self._fail(sequences[0], message, "engine_error")

    def close(self) -> None:
        """Abort what is open, write down what is kept, release the device. Idempotent."""
        self.abort_all()
        if self.memory is not None:
            self.memory.close()
        if self._grammars is not None:
            self._grammars.close()
        self.runner.close()

    def check(self) -> None:
        """Raise AssertionError unless blocks, queues and open requests agree."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        alive = [s for sequences in self._open.values() for s in sequences]
        self.pool.check([s.blocks() for s in alive])
        assert {id(s) for s in running} == {id(s) for s in alive if s.status is Status.RUNNING}
        assert {id(s) for s in waiting} == {id(s) for s in alive if s.status is Status.WAITING}
        assert running == sorted(running, key=lambda s: s.order)
        assert waiting == sorted(waiting, key=lambda s: s.order)
        assert self.scheduler.num_waiting_tokens == sum(s.num_tokens for s in waiting)
        for s in alive:
            assert s.num_released <= s.num_verified <= s.num_output
            assert s.num_computed <= s.num_tokens
            assert s.status is Status.RUNNING or s.num_blocks == 0
            assert s.num_computed <= s.num_blocks * s.block_size
            assert s.num_published * s.block_size <= s.prompt_len + s.num_verified

    # -- verbs of the step ------------------------------------------------------------------

    def _expire(self) -> None:
        """Requests that waited too long for their first step fail."""
        now = time.monotonic()
        while self._expiries and self._expiries[0][0] <= now:
            _, request_id = heapq.heappop(self._expiries)
            for sequence in self._open.get(request_id, ())[:1]:
                if sequence.first_step_s == 0.0:
                    self._fail(
                        sequence, "the request waited too long in the queue", "queue_timeout"
                    )

    def _rows_beside_decodes(self, cost: CostTable) -> int:
        """Prompt rows of a step while others decode: see EngineSettings."""
        num_decoding = num_keys = 0
        for sequence in self.scheduler.running:
            if sequence.num_pending == 1:
                num_decoding += 1
                num_keys += sequence.num_tokens
        settings = self.settings
        alone_s = cost.cost(num_decoding, num_keys)
        return max(
            settings.min_prefill_rows,
            cost.rows_within(settings.target_step_s),
            min(settings.prefill_rows, cost.rows_within(settings.prefill_ratio * alone_s)),
        )

    def _schedule(self) -> Plan:
        self._take_learned()
        if self._expiries:
            self._expire()
        while self._suspects and self._suspects[0].status is Status.FINISHED:
            self._suspects.pop(0)
        if self._cost is not None and self.settings.target_step_s > 0.0:
            self.scheduler.prefill_rows = self._rows_beside_decodes(self._cost)
        plan = self.scheduler.schedule(self._suspects[0] if self._suspects else None)
        if not plan.items and self._suspects and not plan.failed:
            self._suspects.clear()  # the suspect cannot be seated: go on with everyone
            plan = self.scheduler.schedule()
        for sequence in plan.failed:
            self._fail(sequence, "the KV cache is too small for this request", "kv_exhausted")
        now = time.monotonic()
        for item in plan.items:
            if item.sequence.first_step_s == 0.0:
                item.sequence.first_step_s = now
                self.slices.seat(item.sequence)
                self._open_session(item.sequence)
        self.slices.decide(plan.items)
        return plan

    def _propose(self, plan: Plan) -> tuple[list[CheckedTree | None], float]:
        """A tree or None per item, and the seconds it took; what is chosen has its blocks."""
        trees: list[CheckedTree | None] = [None] * len(plan.items)
        self._most_drafts = 0
        drawing = [(i, item) for i, item in enumerate(plan.items) if item.draws]
        places: list[int] = []
        asks: list[Ask] = []
        for i, item in drawing:
            item.sequence.no_draft_reason = reason = self._no_draft_reason(item.sequence)
            if not reason:
                places.append(i)
                asks.append(_ask(item.sequence))
        if not asks or self._suspects:
            return trees, 0.0
        began = time.perf_counter()
        shape = StepShape(
            len(drawing),
            plan.num_rows,
            sum(item.start + item.num_rows for _, item in drawing) / len(drawing),
        )
        settings = self.settings
        room = min(settings.max_draft_rows, settings.max_num_batched_tokens - plan.num_rows)
        drafts = self.planner.plan(asks, shape, room)
        self._most_drafts = drafts.ceiling
        for at, error in drafts.errors:
            self._disable_drafts(plan.items[places[at]].sequence, error)
        for i, tree, reason in zip(places, drafts.trees, drafts.reasons, strict=True):
            sequence = plan.items[i].sequence
            sequence.no_draft_reason = reason
            if tree is None:
                continue
            num = self.scheduler.reserve_drafts(sequence, len(tree.token_ids))
            if num:
                trees[i] = tree.keep(num)
            else:
                sequence.draft_record.decay()
                sequence.no_draft_reason = "budget"
        return trees, time.perf_counter() - began

    def _masks(self, plan: Plan, trees: list[CheckedTree | None]) -> list[UInt32 | None] | None:
        """The grammars' masks per item: of the root, then of each node. None: nobody has one."""
        if not any(item.draws and item.sequence.grammar is not None for item in plan.items):
            return None
        return [
            self._masks_of(grammar, tree)
            if item.draws
            and (grammar := item.sequence.grammar) is not None
            and item.sequence.rules.max_output > 0
            else None
            for item, tree in zip(plan.items, trees, strict=True)
        ]

    def _masks_of(self, grammar: GrammarState, tree: CheckedTree | None) -> UInt32:
        try:
            return fill_masks(grammar, tree)
        except Exception as error:  # its draws fail, and so does its request alone
            _log.exception("a grammar failed", exc_info=error)
            grammar.problem = "an internal error"
            num_nodes = 0 if tree is None else len(tree.token_ids)
            return np.zeros((1 + num_nodes, grammar.num_words), np.uint32)

    def _launch(self, plan: Plan, batch: Batch) -> None:
        try:
            if plan.copies:
                self.runner.copy_blocks(
                    np.array([src for src, _ in plan.copies], np.int32),
                    np.array([dst for _, dst in plan.copies], np.int32),
                )
            self.runner.launch(batch)
        except Exception as error:
            raise _StepFailed(error) from error

    def _settle(self, plan: Plan) -> None:
        for item in plan.items:
            session = item.sequence.session
            if session is not None:
                try:
                    session.settle()
                except Exception as error:
                    self._disable_drafts(item.sequence, error)

    def _wait(self) -> Drawn:
        self._problems = {}
        try:
            return self.runner.wait()
        except DrawError as error:
            self._problems = dict(error.failed)
            return error.drawn  # some ids are -1: only the requests they belong to fail
        except Exception as error:
            raise _StepFailed(error) from error

    def _accept(
        self, plan: Plan, trees: list[CheckedTree | None], built: Built, drawn: Drawn
    ) -> None:
        drawn_ids: list[int] = drawn.token_ids.tolist()
        for item, tree, span in zip(plan.items, trees, built.spans, strict=True):
            sequence = item.sequence
            if sequence.status is Status.FINISHED:
                continue  # another choice of its request has failed, and taken it along
            sequence.num_computed = item.start + item.num_rows
            if span.num_scores:
                _take_scores(sequence, built.batch, drawn, span)
            if not item.draws:
                self.scheduler.publish(sequence)
            elif sequence.rules.max_output == 0:
                self.scheduler.publish(sequence)
                first = span.score + span.num_scores
                sequence.label_logprobs = tuple(
                    drawn.score_logprobs[first : first + span.num_labels].tolist()
                )
                for choice in (*sequence.siblings, sequence):
                    choice.prompt_logprobs = sequence.prompt_logprobs
                    choice.num_cached_tokens = sequence.num_cached_tokens
                    self._finish(choice, "length")
            elif sequence.siblings:
                self._fork(sequence, span, drawn, drawn_ids)
            else:
                self._accept_run(sequence, tree, span.draw, drawn, drawn_ids)
        self._num_failures = 0
        if self._suspects and any(item.draws for item in plan.items):
            self._suspects.pop(0)

    def _accept_run(
        self,
        sequence: Sequence,
        tree: CheckedTree | None,
        draw: int,
        drawn: Drawn,
        drawn_ids: list[int],
    ) -> None:
        """Emit what was drawn for one choice, whose root draw is `draw`."""
        path: list[int] = []
        if tree is not None:
            nodes = drawn_ids[draw + 1 : draw + 1 + len(tree.token_ids)]
            path = follow(drawn_ids[draw], tree.token_ids, tree.parents, nodes)
        draws = [draw, *(draw + 1 + node for node in path)]
        run = [drawn_ids[d] for d in draws]
        head = sequence.head
        is_kept = head is not None and head.mode == "exact" and head.proposes
        is_short = min(run) < 0
        if is_short:
            # What comes before the failed draw stands, as it would without drafts, and its last
            # token is the next step's root, where the draw fails again. Tokens of a slice may be
            # wrong: they are checked first.
            if run[0] < 0 and not (is_kept and sequence.num_output > sequence.num_verified):
                self._fail_draw(sequence, self._problems.get(draw, NO_TOKEN_LEFT))
                return
            run = run[: next(i for i, token in enumerate(run) if token < 0)]
            path, draws = path[: max(0, len(run) - 1)], draws[: len(run)]
            if not run:
                sequence.num_computed -= 1
                self._unchecked.append((sequence, StopCut(0), True))
                return
        end = cut(run, sequence.num_output, sequence.rules, sequence.matcher, sequence.grammar)
        has_problem = sequence.grammar is not None and sequence.grammar.problem != ""
        if has_problem and is_kept:  # perhaps a wrong token's: checked before anything ends
            end, is_short = StopCut(end.num_kept), True
        elif has_problem:
            self._fail_draw(sequence, NO_TOKEN_LEFT)
            return
        kept = run[: end.num_kept]
        accepted = path[: end.num_kept]
        if is_kept:
            self.slices.keep(sequence, draws, len(kept))
        elif sequence.request.sampling.num_logprobs is not None:
            for d in draws[: len(kept)]:
                sequence.logprobs.append(_logprob_of(drawn, d))
        source = tree.tree.source.tolist() if tree is not None else []
        if sequence.request.report_sources:
            sequence.token_sources += sources_of(accepted, len(kept), source, sequence.sources)
        counts = count_step(
            tree.parents if tree is not None else (),
            source,
            accepted,
            sequence.sources,
            sequence.no_draft_reason,
            tree.survival.tolist() if tree is not None else (),
            self._model_s,
        )
        sequence.counts = merge_counts(sequence.counts, counts)
        self.slices.count_step(sequence)
        if tree is not None and sequence.request.report_rejected:
            self._keep_rejected(sequence, tree, accepted, len(kept))
        self._plan_moves(sequence, accepted)
        sequence.num_computed += len(accepted)
        sequence.num_steps += 1
        sequence.append(kept)
        self._teach(sequence, tree, accepted, kept)
        if is_kept:
            self._unchecked.append((sequence, end, is_short))
            return
        if head is not None and head.mode == "exact":
            self.slices.learn(sequence, kept)
        self._conclude(sequence, self._verify(sequence, end))

    def _conclude(self, sequence: Sequence, finish: StopCut) -> None:
        """After the verified mark has moved: publish, finish or release."""
        self.scheduler.publish(sequence)
        if finish.finish_reason is not None:
            self._finish(sequence, finish.finish_reason, finish.stop_reason)
            return
        if sequence.status is Status.RUNNING:
            self.scheduler.trim(sequence)
        if sequence.num_verified > sequence.num_released:
            self._deltas.append(self._delta(sequence))

    def _keep_rejected(
        self, sequence: Sequence, tree: CheckedTree, accepted: list[int], num_kept: int
    ) -> None:
        """What was drafted beside the step's num_kept tokens, which are appended next."""
        start, names = sequence.num_output, sequence.sources
        source = tree.tree.source.tolist()
        sequence.rejected_drafts.extend(
            (start + place, names[first] if first < len(names) else names[0], ids)
            for place, first, ids in rejected_paths(tree.token_ids, tree.parents, source, accepted)
            if place < num_kept  # what lies past the end of the answer is left out
        )

    def _fork(self, leader: Sequence, span: Span, drawn: Drawn, drawn_ids: list[int]) -> None:
        """Every choice draws its own first token from the prompt's last row, then runs alone."""
        children, leader.siblings = leader.siblings, []
        self.scheduler.publish(leader)
        for child in children:
            child.prompt_logprobs = leader.prompt_logprobs
            child.num_cached_tokens = leader.num_cached_tokens
            child.first_step_s = leader.first_step_s
            child.no_draft_reason = "prefill"
            self.slices.seat(child)
            self._open_session(child)
        for i, child in enumerate(children):
            self._accept_run(child, None, span.draw + 1 + i, drawn, drawn_ids)
            if leader.status is Status.FINISHED:
                return  # a choice that failed has taken the request with it
            if child.status is Status.NEW:
                self.scheduler.fork(leader, child)
        leader.no_draft_reason = "prefill"
        self._accept_run(leader, None, span.draw, drawn, drawn_ids)

    def _plan_moves(self, sequence: Sequence, accepted: list[int]) -> None:
        """KV of the accepted nodes goes to the slots of their positions; usually it is there."""
        size, table, first = sequence.block_size, sequence.table, sequence.num_computed
        src, dst = self._moves
        for i, node in enumerate(accepted):
            if node != i:
                at, to = first + node, first + i
                src.append(int(table[at // size]) * size + at % size)
                dst.append(int(table[to // size]) * size + to % size)

    def _move(self) -> None:
        src, dst = self._moves
        if not src:
            return
        self._moves = ([], [])
        try:
            self.runner.move_slots(np.array(src, np.int32), np.array(dst, np.int32))
        except Exception as error:
            raise _StepFailed(error) from error

    def _verify(self, sequence: Sequence, end: StopCut) -> StopCut:
        """Move the verified mark; a cut-back sequence does not finish."""
        if self._verifier is None:
            sequence.verify(sequence.num_output)
            return end
        verdict = self._verifier.verify(sequence, end.finish_reason is not None)
        if verdict.cut_to is not None and verdict.cut_to < sequence.num_output:
            self._cut_back(sequence, verdict.cut_to)
            end = StopCut(0)
        sequence.verify(verdict.num_verified)
        if end.finish_reason is not None and sequence.num_verified != sequence.num_output:
            raise RuntimeError("a choice ended with tokens that were never verified")
        return end

    def _cut_heads(self, plan: Plan, built: Built) -> Batch:
        return self.slices.attach(plan.items, built.spans, built.batch, self.scheduler.running)

    def _check_windows(self) -> None:
        """Draw unverified tokens again with the full head: when a window is full or its sequence
        would end, all windows at once, since reading the head is what costs."""
        unchecked, self._unchecked = self._unchecked, []
        unchecked = [u for u in unchecked if u[0].status is Status.RUNNING]
        if not any(
            due or end.finish_reason is not None or self.slices.is_due(sequence)
            for sequence, end, due in unchecked
        ):
            for sequence, _, _ in unchecked:
                self.scheduler.trim(sequence)
            return
        sequences = [sequence for sequence, _, _ in unchecked]
        began = time.perf_counter()
        try:
            self._problems = {}
            drawn = self.slices.verify(sequences)
        except DrawError as error:
            self._problems = dict(error.failed)
            drawn = error.drawn
        except Exception as error:
            raise _StepFailed(error) from error
        seconds = time.perf_counter() - began
        first = 0
        for (sequence, end, _), num in zip(
            unchecked, self.slices.observe_verify(sequences, seconds), strict=True
        ):
            if sequence.status is Status.RUNNING:  # no other choice has failed
                self._apply_check(sequence, end, drawn, range(first, first + num))
            first += num

    def _apply_check(self, sequence: Sequence, end: StopCut, drawn: Drawn, draws: range) -> None:
        """The tokens before the first wrong one stand; that one is replaced by the right one."""
        base, num = sequence.num_verified, len(draws)
        emitted = sequence.output_ids(base)
        right: list[int] = drawn.token_ids[draws.start : draws.stop].tolist()
        stands = next((i for i in range(num) if right[i] != emitted[i]), num)
        num_computed = sequence.num_computed
        if stands < num:
            self._cut_back(sequence, base + stands)
        self.slices.settle(sequence, stands, num)
        wants = sequence.request.sampling.num_logprobs is not None
        for i in range(min(stands + 1, num) if wants else 0):
            if right[i] >= 0:
                sequence.logprobs.append(_logprob_of(drawn, draws[i]))
        sequence.verify(sequence.num_output)
        if stands < num:
            token = right[stands]
            if token < 0:
                self._fail_draw(sequence, self._problems.get(draws[stands], NO_TOKEN_LEFT))
                return
            rules, grammar = sequence.rules, sequence.grammar
            end = cut([token], sequence.num_output, rules, sequence.matcher, grammar)
            if grammar is not None and grammar.problem:
                self._fail_draw(sequence, NO_TOKEN_LEFT)
                return
            if sequence.request.report_sources:
                sequence.token_sources.append("")
            sequence.append([token])
            # The rows before the right token are those of tokens that stand.
            sequence.num_computed = min(num_computed, sequence.num_tokens - 1)
            self._teach(sequence, None, [], [token])
            sequence.verify(sequence.num_output)
            self.slices.extend(sequence, token)
        elif sequence.grammar is not None and sequence.grammar.problem:
            self._fail_draw(sequence, NO_TOKEN_LEFT)
            return
        self._conclude(sequence, end)

    def _cut_back(self, sequence: Sequence, num_output: int) -> None:
        try:
            sequence.rollback(SequenceMark(num_output))
        except (NotImplementedError, ValueError) as error:
            if sequence.session is None:
                raise
            self._disable_drafts(sequence, error)  # a drafter that cannot go back is left behind
            sequence.rollback(SequenceMark(num_output))

    def _observe(
        self, plan: Plan, built: Built, began: float, propose_s: float, model_s: float
    ) -> None:
        batch = built.batch
        if self._cost is not None:
            self._cost.observe(batch.num_rows, built.num_keys, model_s)
        step_s = time.perf_counter() - began
        host_s = max(0.0, step_s - model_s)
        self.budget.observe_host(host_s)
        self._stats = EngineStats(
            num_total_blocks=self.pool.num_blocks,
            step_s=step_s,
            model_s=model_s,
            propose_s=propose_s,
            host_s=host_s,
            num_rows=batch.num_rows,
            num_prefill_rows=plan.num_prefill_rows,
            num_draft_rows=batch.num_draft_rows,
            draft_budget=self._most_drafts,
        )

    # -- drafts -----------------------------------------------------------------------------

    def _open_session(self, sequence: Sequence) -> None:
        request = sequence.request
        try:
            drafter = self.drafters.resolve(request.task, request.speculation)
            if drafter is None:
                return
            sequence.session = drafter.open(
                request.prompt_ids,
                context_span=request.speculation.context_span,
                prediction_ids=request.speculation.prediction_ids,
            )
            sequence.drafter_name = drafter.name
            sequence.sources = tuple(getattr(drafter, "sources", ())) or (drafter.name,)
            if sequence.grammar is not None:
                sequence.sources = (*sequence.sources, FORCED)
        except Exception as error:
            self._disable_drafts(sequence, error)

    def _no_draft_reason(self, sequence: Sequence) -> str:
        if sequence.session is None or self.settings.max_draft_rows == 0:
            return "off"
        if sequence.siblings:
            return "prefill"
        if sequence.rules.max_output - sequence.num_output <= 1:
            return "length"
        return ""

    def _teach(
        self,
        sequence: Sequence,
        tree: CheckedTree | None,
        accepted: list[int],
        kept: list[int],
    ) -> None:
        evidence = None if tree is None else tree.evidence(accepted)
        if evidence is not None:
            sequence.draft_record.observe(*evidence)
        session = sequence.session
        if session is None:
            return
        try:
            known = None if tree is None else tree.for_session(accepted)
            if known is not None:
                session.feedback(*known)
            session.extend(kept)
        except Exception as error:
            self._disable_drafts(sequence, error)

    def _disable_drafts(self, sequence: Sequence, error: Exception) -> None:
        """A drafter that fails costs the request its drafts and nothing else."""
        self.num_drafter_errors += 1
        name = sequence.request.speculation.drafter
        if name not in self._logged:
            self._logged.add(name)
            _log.exception("drafter %r failed and is off for this sequence", name, exc_info=error)
        self._close_session(sequence)

    def _close_session(self, sequence: Sequence) -> None:
        try:
            sequence.close_session()
        except Exception as error:
            self.num_drafter_errors += 1
            _log.debug("closing a draft session failed", exc_info=error)

    # -- what is kept of tasks --------------------------------------------------------------

    def _take_learned(self) -> None:
        """New drafters for those whose learned outputs have a new layer."""
        if self.memory is not None:
            for task, scope in self.memory.poll():
                self.drafters.forget(task, scope)

    def _remember(self, memory: TaskMemory, sequence: Sequence, finished: bool) -> None:
        """Hand on what a choice ended with, once its whole request has finished well."""
        request, num_output = sequence.request, sequence.num_output
        if finished and num_output:
            scope, name = request.scope, sequence.drafter_name
            memory.observe(request.task, name, scope, sequence.num_steps, num_output)
        spec = request.speculation
        if spec.learn_tokens <= 0:
            return
        outputs = self._outputs.pop(request.request_id, [])
        if not finished:
            outputs = None
        elif outputs is not None and num_output:
            outputs.append(sequence.ids[sequence.prompt_len : sequence.num_tokens])
        if request.request_id in self._open:
            self._outputs[request.request_id] = outputs
            return
        prompt = sequence.ids[: sequence.prompt_len]
        for output in outputs or ():
            memory.learn(
                request.task, request.scope, spec.corpus, spec.learn_tokens, prompt, output
            )

    def _task_report(self, payload: Any) -> dict[str, Any]:
        """Control: {"task", "drafter", "options", "corpus", "learn_tokens"} of a task."""
        if self.memory is None:
            return {}
        spec = SpeculationParams(
            payload["drafter"],
            1,
            tuple((name, value) for name, value in payload["options"]),
            payload["corpus"],
        )
        drafter = self.drafters.resolve(payload["task"], spec)
        return self.memory.report(payload["task"], drafter)

    def _drafters_reload(self, _: Any) -> None:
        """Control: drafters are made anew for requests that come; corpora may have changed."""
        self.drafters.forget()
        if self.memory is not None:
            self.memory.refresh()

    def _task_forget(self, payload: Any) -> None:
        """Control: {"task"}: what the task has learned is dropped."""
        if self.memory is not None:
            self.memory.forget(payload["task"])
        self.drafters.forget(payload["task"])

    # -- ends -------------------------------------------------------------------------------

    def _refusal(self, request: Request) -> tuple[str, str] | None:
        """(message, code) of a request that cannot be served, or None."""
        num_prompt, size = len(request.prompt_ids), self.info.block_size
        settings, scheduler = self.settings, self.scheduler
        if request.request_id in self._open:
            return "this request id is open already", "invalid_value"
        if num_prompt == 0 or request.num_choices < 1:
            return "a request needs a prompt and at least one choice", "invalid_value"
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self.info.vocab_size:
            return "a prompt id lies outside the vocabulary", "invalid_value"
        sampling = request.sampling
        for name, ids in (
            ("logit_bias", [token for token, _ in sampling.logit_bias]),
            ("allowed_token_ids", sampling.allowed_token_ids or ()),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            # A sampler's compiled code does not look at the bounds of its arrays.
            if ids and (min(ids) < 0 or max(ids) >= self.info.vocab_size):
                return f"{name}: an id lies outside the vocabulary", "invalid_value"
        if request.label_ids:
            if sampling.max_tokens > 0 or request.num_choices > 1:
                return "label ids go with max_tokens 0 and one choice", "invalid_value"
            if min(request.label_ids) < 0 or max(request.label_ids) >= self.info.vocab_size:
                return "a label id lies outside the vocabulary", "invalid_value"
        limit = self.info.max_model_len
        if num_prompt > limit or (num_prompt == limit and request.sampling.max_tokens > 0):
            return f"the prompt has {num_prompt} tokens, the model {limit}", (
                "context_length_exceeded"
            )
        if -(-num_prompt // size) > self.pool.num_blocks:
            return "the KV cache is too small for this prompt", "context_length_exceeded"
        if len(scheduler.waiting) + len(self._compiling) >= settings.max_waiting_requests:
            return "too many requests are waiting", "queue_full"
        if scheduler.waiting and (
            scheduler.num_waiting_tokens + num_prompt > settings.max_waiting_tokens
        ):
            return "too many tokens are waiting", "queue_full"
        if request.sampling.stop and (self._stop_table is None or not all(request.sampling.stop)):
            return "stop strings are not available", "unsupported_parameter"
        if request.grammar is not None:
            if self._grammars is None or not self._eos:
                return "structured outputs are not available", "unsupported_parameter"
            if request.sampling.ignore_eos:
                return "ignore_eos cannot be combined with a grammar", "unsupported_parameter"
        refusal = self.slices.refusal(request)
        if refusal is not None:
            return refusal
        try:
            self.drafters.resolve(request.task, request.speculation)
        except ValueError as error:
            return str(error)[:200], "invalid_value"
        except Exception as error:  # a factory's own failure: drafts are off, see _open_session
            _log.debug("a drafter factory failed", exc_info=error)
        return None

    def _refuse(self, request: Request, message: str, code: str) -> None:
        for choice_id in range(max(1, request.num_choices)):
            self._deltas.append(
                Delta(
                    request.request_id,
                    choice_id,
                    (),
                    finish_reason="error",
                    error=message,
                    error_code=code,
                )
            )

    def _delta(
        self,
        sequence: Sequence,
        finish_reason: FinishReason | None = None,
        stop_reason: int | bytes | None = None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> Delta:
        """Everything verified and not released yet."""
        request = sequence.request
        is_first = sequence.num_released == 0 and not sequence.has_spoken
        start = sequence.num_released
        token_ids, logprobs = sequence.release()
        sources = tuple(sequence.token_sources[start : start + len(token_ids)])
        counts, sequence.counts = sequence.counts, _NO_COUNTS
        head = sequence.head
        vocabulary = None if head is None else head.take_counts(self.slices.window_of(head))
        rejected = sequence.rejected_since(start) if request.report_rejected else ()
        if not is_first:
            return Delta(
                request.request_id,
                sequence.choice_id,
                token_ids,
                logprobs,
                (),
                finish_reason,
                stop_reason,
                error,
                error_code,
                counts=counts,
                sources=sources,
                vocabulary=vocabulary,
                rejected_drafts=rejected,
            )
        sequence.has_spoken = True
        queue_s = 0.0
        if request.arrival_s > 0.0 and sequence.first_step_s > 0.0:
            queue_s = max(0.0, sequence.first_step_s - request.arrival_s)
        return Delta(
            request.request_id,
            sequence.choice_id,
            token_ids,
            logprobs,
            tuple(sequence.prompt_logprobs) if not sequence.scores_prompt else (),
            finish_reason,
            stop_reason,
            error,
            error_code,
            num_cached_tokens=max(0, sequence.num_cached_tokens),
            queue_s=queue_s,
            counts=counts,
            sources=sources,
            label_logprobs=sequence.label_logprobs,
            vocabulary=vocabulary,
            rejected_drafts=rejected,
        )

    def _finish(
        self,
        sequence: Sequence,
        finish_reason: FinishReason,
        stop_reason: int | bytes | None = None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> None:
        """The last Delta of a choice; its blocks, seat and session go back."""
        self._deltas.append(self._delta(sequence, finish_reason, stop_reason, error, error_code))
        self.scheduler.remove(sequence)
        self._close_session(sequence)
        self.slices.leave(sequence)
        request_id = sequence.request.request_id
        sequences = self._open[request_id]
        sequences.remove(sequence)
        if not sequences:
            del self._open[request_id]
        if self.memory is not None:
            self._remember(self.memory, sequence, finish_reason in ("stop", "length"))

    def _fail_draw(self, sequence: Sequence, problem: str) -> None:
        """No token could be drawn for a choice: its request fails, and says why."""
        if problem != NO_TOKEN_LEFT:
            self._fail(sequence, problem, "engine_error")
            return
        grammar = sequence.grammar
        if grammar is not None and grammar.problem and not grammar.is_dead_end:
            self._fail(
                sequence,
                f"the grammar cannot be followed any further: {grammar.problem}",
                "limit_exceeded",
            )
            return
        what = "grammar, " if grammar is not None else ""
        self._fail(
            sequence,
            f"No token satisfies the request's constraints after {sequence.num_output} tokens: "
            f"{what}allowed_token_ids, logit_bias and min_tokens together exclude every one.",
            "constraint_unsatisfiable",
        )

    def _fail(self, sequence: Sequence, message: str, code: str) -> None:
        """A request fails as a whole: every open choice gets the error."""
        for choice in list(self._open.get(sequence.request.request_id, ())):
            self._finish(choice, "error", None, message, code)

    def _recover(self, plan: Plan, error: Exception) -> None:
        """The runner raised: nothing of the step counts, and what is in the KV cache is doubted.

        The step's sequences lose their blocks and recompute, one at a time at first; who fails
        alone fails for good. Raises RunnerBrokenError after too many failures in a row.
        """
        self._num_failures += 1
        self.num_failed_steps += 1
        self._moves = ([], [])
        self._unchecked = []
        self.pool.drop_cache()
        text = f"{type(error).__name__}: {error}"[:300]
        _log.error("a step failed: %s", text, exc_info=error)
        alive = [i.sequence for i in plan.items if i.sequence.status is Status.RUNNING]
        if len(alive) == 1 and len(plan.items) == 1:
            self._fail(alive[0], "the model failed on this request", "engine_error")
        else:
            for sequence in alive:
                self.scheduler.preempt(sequence)
            self._suspects = sorted(
                {id(s): s for s in (*self._suspects, *alive)}.values(), key=lambda s: s.order
            )
        if self._num_failures >= self.settings.max_failures:
            raise RunnerBrokenError(text) from error


def _ask(sequence: Sequence) -> Ask:
    """For a sequence with a session that may draft at all."""
    session, head = sequence.session, sequence.head
    assert session is not None
    allowed = None
    if head is not None and head.proposes:
        slice_ = head.slice
        allowed = lambda ids: slice_.positions(ids) >= 0  # noqa: E731
    return Ask(
        session,
        sequence.draft_record,
        sequence.request.speculation.max_draft_tokens,
        sequence.rules.max_output - sequence.num_output - 1,
        sequence.grammar,
        len(sequence.sources) - 1,
        allowed,
    )


def _logprob_of(drawn: Drawn, d: int) -> TokenLogprob:
    return TokenLogprob(
        int(drawn.token_ids[d]), float(drawn.logprobs[d]), int(drawn.ranks[d]), tuple(drawn.top[d])
    )


def _take_scores(sequence: Sequence, batch: Batch, drawn: Drawn, span: Span) -> None:
    for c in range(span.score, span.score + span.num_scores):
        sequence.prompt_logprobs.append(
            TokenLogprob(
                int(batch.score_targets[c]),
                float(drawn.score_logprobs[c]),
                int(drawn.score_ranks[c]),
                tuple(drawn.score_top[c]),
            )
        )
