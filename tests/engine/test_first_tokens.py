"""First tokens under load: drafts make nobody wait. All in the time of a cost table."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from drafters.tree import DraftTree
from server.engine.batch import Batch
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.engine.step_times import CostTable
from server.types import Request, SpeculationParams
from tests.engine.open_loop import Served, poisson, requests_of, serve
from tests.engine.requests import finish, request_of
from tests.engine.scenarios import fake_runner, make_engine, random_workload
from tests.fakes.fake_drafters import LikelyDrafter, LikelySession
from tests.fakes.fake_runner import FakeModel

SEEDS = (7, 8, 9)
NUM = 40


@functools.cache
def _without_drafts(load: float, seed: int) -> tuple[list[Request], list[float], Served]:
    """A seed's requests, the gaps between them at `load` of what goes, and how they are served."""
    asked = requests_of(NUM, seed, prompt=(20, 60), output=(16, 48))
    gaps_s = poisson(NUM, load * NUM / _whole_s(), seed)
    return asked, gaps_s, serve(asked, gaps_s, drafts=False)


@functools.cache
def _whole_s() -> float:
    """Seconds that about as many requests take when all are there at once."""
    asked = requests_of(NUM, SEEDS[0], prompt=(20, 60), output=(16, 48))
    return serve(asked, None, drafts=False).end_s


def _pooled(load: float, chance: float) -> tuple[Served, Served]:
    """The requests of all seeds without drafts and with them, at `load` of what goes without."""
    runs: list[tuple[Served, Served]] = []
    for seed in SEEDS:
        asked, gaps_s, off = _without_drafts(load, seed)
        runs.append((off, serve(asked, gaps_s, drafts=True, chance=chance)))
    assert sum(on.num_draft_rows for _, on in runs) > 300, "nothing was drafted"
    off, on = (
        Served(
            [s for run in runs for s in run[i].first_s],
            [s for run in runs for s in run[i].whole_s],
            sum(run[i].end_s for run in runs),
            0,
        )
        for i in (0, 1)
    )
    return off, on


@pytest.mark.slow
@pytest.mark.parametrize(("load", "chance"), [(0.5, 0.5), (0.8, 0.8)])
def test_first_tokens_come_as_early_with_drafts_and_answers_earlier(
    load: float, chance: float
) -> None:
    off, on = _pooled(load, chance)
    for share in (0.5, 0.95):
        assert np.quantile(on.first_s, share) <= 1.05 * np.quantile(off.first_s, share)
    assert np.mean(on.first_s) <= 1.02 * np.mean(off.first_s)
    assert np.mean(on.whole_s) < 0.99 * np.mean(off.whole_s)
    assert on.end_s <= 1.005 * off.end_s


def test_drafts_bring_more_answers_a_second_where_all_requests_are_there_at_once() -> None:
    """Who waits for a seat is helped by drafts: these are not given up for the queue's sake."""
    asked = requests_of(24, 1, prompt=(20, 40), output=(40, 80))
    off = serve(asked, None, drafts=False, num_seqs=4)
    on = serve(asked, None, drafts=True, chance=0.8, num_seqs=4)
    assert on.end_s < 0.8 * off.end_s


def test_the_row_of_a_first_token_is_noted_where_prompts_leave_no_room_for_drafts() -> None:
    """Nobody drafts in a step full of prompts, and yet its last rows are what the next step
    drafts from."""
    work = random_workload(Random(0))
    prompt = [i % work.model.vocab_size for i in range(16)]
    work.drafter = "likely"
    work.num_blocks = 100
    work.max_model_len = 48
    # Up to four rows cost nothing more, a prompt's rows cost a lot.
    work.cost = CostTable([1, 4, 8, 16], [1.0, 1.0, 10.0, 100.0])
    work.settings = EngineSettings(
        max_num_seqs=2, max_num_batched_tokens=32, chunked_prefill_rows=32, max_draft_rows=8
    )
    drafter = LikelyDrafter(work.model)
    engine, _ = make_engine(work, drafter)
    engine.gain.is_asked = lambda seat: True  # type: ignore[method-assign]
    engine.submit(request_of("r", prompt, max_tokens=4, speculation=SpeculationParams("likely", 8)))
    deltas = engine.step()
    assert [len(delta.token_ids) for delta in deltas] == [1]
    assert deltas[0].counts.num_drafted == 0
    (session,) = drafter.sessions
    assert isinstance(session, LikelySession) and session.num_rows == 1
    finish(engine)


def _request(salt: str) -> Request:
    """Four tokens in a scope, drafted by the drafter "own"."""
    drafts = SpeculationParams("own", 8)
    return request_of("r", (1, 2, 3), max_tokens=4, speculation=drafts, cache_salt=salt)


class _Sessions:
    """What is done for drafts, and the launches of steps, in their order."""

    def __init__(self, model: FakeModel, *, knows_starts: bool) -> None:
        self._model = model
        self._knows_starts = knows_starts
        self.events: list[str] = []

    def make(self, task: str, speculation: SpeculationParams) -> LikelyDrafter:
        outer = self
        self.events.append("made")

        class Drafter(LikelyDrafter):
            knows_starts = self._knows_starts

            def open(self, prompt_ids: Sequence[int], **others: Any) -> LikelySession:
                outer.events.append("opened")
                return super().open(prompt_ids, **others)

        return Drafter(self._model)


@pytest.mark.parametrize("knows_starts", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_can_wait_is_done_for_drafts_once_a_prompt_is_under_way(
    device: str, knows_starts: bool
) -> None:
    """On a device of its own while it computes; on the host's cores once the first token is out."""
    work = random_workload(Random(0))
    sessions = _Sessions(work.model, knows_starts=knows_starts)
    runner = fake_runner(work)
    runner.info = replace(runner.info, device=device)
    settings = EngineSettings(max_num_seqs=4, max_num_batched_tokens=64, max_draft_rows=8)
    engine = Engine(runner, {"own": sessions.make}, settings)
    launch = runner.launch

    def launched(batch: Batch) -> None:
        sessions.events.append("launched")
        launch(batch)

    runner.launch = launched  # type: ignore[method-assign]
    found = []
    for salt in ("a", "b", "b"):
        sessions.events.clear()
        engine.submit(_request(salt))
        assert engine.step()
        sessions.events.append("told")
        engine.step()
        found.append(tuple(sessions.events))
        finish(engine)
    # The very first drafter is made to find out whether it can be; nothing is known in scope "b".
    order = ("launched", "told", "opened", "launched")
    if knows_starts:
        order = ("opened", "launched", "told", "launched")
    elif device == "cuda":
        order = ("launched", "opened", "told", "launched")
    first = ("launched", "made", "opened", "told", "launched")
    if device == "cpu":
        first = ("launched", "told", "made", "opened", "launched")
    assert found == [("made", *order), first, order]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_who_is_asked_first_has_heard_what_the_first_token_was_drawn_from(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its session is opened for the ask; that the state is the right one is checked by
    the session."""
    work, heard, propose = random_workload(Random(0)), list[int](), LikelySession.propose

    def asked(session: LikelySession, budget: int, max_depth: int) -> DraftTree:
        heard.append(session.num_states)
        return propose(session, budget, max_depth)

    monkeypatch.setattr(LikelySession, "propose", asked)
    runner = fake_runner(work)
    runner.info = replace(runner.info, device=device)
    drafts = _Sessions(work.model, knows_starts=False)
    settings = EngineSettings(max_num_seqs=4, max_num_batched_tokens=64, max_draft_rows=8)
    engine = Engine(runner, {"own": drafts.make}, settings)
    for salt in "ab":
        finish(engine, _request(salt))
    assert heard[0] == 1 and heard.count(1) == 2


def test_no_drafter_is_made_for_a_scope_that_is_never_asked() -> None:
    """But one, to find out whether it can be."""
    work = random_workload(Random(0))
    sessions = _Sessions(work.model, knows_starts=False)
    settings = EngineSettings(max_num_seqs=4, max_num_batched_tokens=64, max_draft_rows=8)
    cost = CostTable([1, 8], [1.0, 1.1])
    engine = Engine(fake_runner(work), {"own": sessions.make}, settings, cost=cost)
    for salt in ("a", "b", "b"):
        told = finish(engine, _request(salt))["r"]
        reasons = [delta.counts.no_draft_reason for delta in told]
        assert reasons == ["prefill", "cooldown", "cooldown", "length"]
    assert sessions.events == ["made"]
