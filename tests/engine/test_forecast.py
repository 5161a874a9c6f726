"""Forecasts: recorded outputs priced by a cost table, as the engine would step through them."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from drafters.replay import Recording
from server.engine.engine import Engine
from server.engine.forecast import ServedBy, forecast
from server.engine.host_cost import HostCost, HostCosts
from server.engine.settings import EngineSettings
from server.engine.step_times import CostTable, row_grid
from server.types import Request, SamplingParams, SpeculationParams
from tests.fakes.fake_drafters import FakeDrafter, liar_drafter, oracle_drafter, random_drafter
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info

PROMPTS = [[3, 5, 7, i] for i in range(4)]
OUTPUTS = [[(7 * i + j) % 13 + 2 for j in range(21)] + [1] for i in range(4)]
RECORDINGS = [Recording(p, o) for p, o in zip(PROMPTS, OUTPUTS, strict=True)]
TEXTS = [p + o for p, o in zip(PROMPTS, OUTPUTS, strict=True)]


def _served_by(first: float, per_row: float, key_s: float = 0.0, **more: Any) -> ServedBy:
    rows = row_grid(512)
    return ServedBy(CostTable(rows, [first + per_row * (r - 1) for r in rows], key_s), **more)


def test_without_a_drafter_every_token_is_a_step() -> None:
    plain = forecast(None, RECORDINGS, _served_by(100.0, 1.0))
    assert plain.num_tokens == plain.num_steps == 4 * 21
    assert plain.tokens_per_step == plain.speedup == plain.decode_speedup == 1.0
    # 4 prompts of 4 rows, and 21 decode steps each.
    assert plain.plain_s == pytest.approx(4 * 103.0 + 84 * 100.0)
    assert plain.prefill_s == pytest.approx(4 * 103.0)


def test_keys_are_paid_for() -> None:
    free, paid = (
        forecast(None, RECORDINGS[:1], _served_by(1.0, 0.0, key_s)) for key_s in (0.0, 1.0)
    )
    # The prompt's rows see 4 * 2 keys on average; decode step t has 4 + t.
    assert paid.plain_s - free.plain_s == pytest.approx(4 * 2 + sum(4 + t for t in range(1, 22)))


def test_an_oracle_saves_what_the_table_says() -> None:
    found = forecast(oracle_drafter(TEXTS), RECORDINGS, _served_by(100.0, 1.0), max_draft_tokens=4)
    # The first tree hangs off the prompt: 5 of 22 tokens there, then 5 a step.
    assert found.num_steps == 4 * 4
    assert found.tokens_per_step == pytest.approx(21 / 4)
    assert found.num_rows == 4 * 4 * 4 + 4 * 2  # the last step has two tokens left to draft
    seconds = 4 * (107.0 + 3 * 104.0 + 101.0)
    assert found.seconds == pytest.approx(seconds + 4 * 1.0, rel=0.01)
    assert found.speedup == pytest.approx(found.plain_s / found.seconds)
    assert found.decode_speedup > found.speedup > 3.5


def test_rows_that_cost_as_much_as_steps_are_not_bought() -> None:
    found = forecast(oracle_drafter(TEXTS), RECORDINGS, _served_by(100.0, 100.0))
    assert found.num_rows == 0 and found.speedup == pytest.approx(1.0, rel=1e-3)


def test_drafts_that_miss_cost_little() -> None:
    wrong = liar_drafter(1, [], 16)
    assert forecast(wrong, RECORDINGS, _served_by(100.0, 1.0)).speedup == pytest.approx(
        1.0, rel=1e-3
    )
    guesses = forecast(random_drafter(1, 1 << 14), RECORDINGS, _served_by(100.0, 20.0))
    assert 0.8 < guesses.speedup <= 1.0
    assert guesses.num_steps == guesses.num_tokens


@pytest.mark.parametrize("num_streams", [1, 2, 3, 8])
def test_streams_share_steps_and_keep_every_token(num_streams: int) -> None:
    cost = _served_by(100.0, 1.0)
    drafter = oracle_drafter(TEXTS)
    found = forecast(drafter, RECORDINGS, cost, max_draft_tokens=4, num_streams=num_streams)
    assert found.num_tokens == 84 and found.num_steps == 16
    assert drafter.num_open == 0, "every session is closed"
    alone = forecast(None, RECORDINGS, cost)
    rounds = -(-4 // num_streams)
    assert found.plain_s == pytest.approx(alone.plain_s * rounds / 4, rel=0.1)
    assert found.speedup > 1.5


def test_long_prompts_come_in_chunks() -> None:
    long = Recording(list(range(2, 12)), [4, 5, 6])
    one = forecast(None, [long], _served_by(10.0, 1.0, max_rows=64))
    four = forecast(None, [long], _served_by(10.0, 1.0, max_rows=4))
    assert one.plain_s == pytest.approx(19.0 + 2 * 10.0)
    assert four.plain_s == pytest.approx(13.0 + 13.0 + 11.0 + 2 * 10.0)
    # While one decodes, the other's prompt has the rows that are left.
    both = forecast(None, [RECORDINGS[0], long], _served_by(10.0, 1.0, max_rows=4), num_streams=2)
    assert both.num_steps == 21 + 2


def test_recordings_that_say_nothing_are_left_out() -> None:
    empty = [Recording([], [2, 3]), Recording([2], [])]
    assert forecast(None, [*empty, RECORDINGS[0]], _served_by(1.0, 0.1)).num_tokens == 21
    with pytest.raises(ValueError, match="at least one recording"):
        forecast(None, empty, _served_by(1.0, 0.1))


def test_what_the_drafter_costs_is_counted() -> None:
    def slow(tokens: list[int], budget: int, depth: int):  # type: ignore[no-untyped-def]
        end_s = time.thread_time() + 0.002
        while time.thread_time() < end_s:
            pass
        return oracle_drafter(TEXTS)._propose_from(tokens, budget, depth)

    quick = forecast(oracle_drafter(TEXTS), RECORDINGS[:1], _served_by(1e-4, 1e-6))
    found = forecast(FakeDrafter(slow), RECORDINGS[:1], _served_by(1e-4, 1e-6))
    assert found.seconds > quick.seconds and found.seconds > 0.002


class _FixedCost(CostTable):
    """A table that no real step refreshes: an engine over a fake runner then plans by the same
    figures as a forecast does."""

    def observe(self, num_rows: int, keys: float, seconds: float) -> None:
        pass


def _nodes_of_an_engine(
    drafter: FakeDrafter, recordings: list[Recording], model: FakeModel, cost: CostTable, seats: int
) -> list[tuple[int, int]]:
    """(rows, draft rows) of every step of an engine that serves the recordings' prompts."""
    info = fake_info(
        vocab_size=model.vocab_size, num_blocks=400, max_num_seqs=seats, max_num_batched_tokens=512
    )
    steps: list[tuple[int, int]] = []
    runner = FakeRunner(
        model, info, fail=lambda batch: steps.append((batch.num_rows, batch.num_draft_rows))
    )
    settings = EngineSettings(
        max_num_seqs=seats, max_num_batched_tokens=512, chunked_prefill_rows=512, prefix_cache=False
    )
    engine = Engine(runner, {"fake": drafter}, settings, cost=cost)
    for i, recording in enumerate(recordings):
        engine.submit(
            Request(f"r{i}", "task", "fake", tuple(recording.prompt_ids),
                    SamplingParams(temperature=0.0, max_tokens=64),
                    SpeculationParams("fake", 5))
        )  # fmt: skip
    ids: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step():
            ids.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert [ids[f"r{i}"] for i in range(len(recordings))] == [r.output_ids for r in recordings]
    return steps


def test_what_the_host_does_is_priced() -> None:
    host = HostCosts(HostCost(10.0, 1.0, 0.0), HostCost(20.0, 2.0, 0.5))
    free = forecast(oracle_drafter(TEXTS), RECORDINGS, _served_by(100.0, 1.0), max_draft_tokens=4)
    served_by = _served_by(100.0, 1.0, host=host)
    found = forecast(oracle_drafter(TEXTS), RECORDINGS, served_by, max_draft_tokens=4)
    # 22 steps without drafts, the prompt's too; 5 with them, of one choice each. What proposing
    # took is in both.
    assert found.plain_s - free.plain_s == pytest.approx(4 * 22 * 11.0)
    expected = 4 * 5 * 22.0 + 0.5 * found.num_rows
    assert found.seconds - free.seconds == pytest.approx(expected, rel=1e-2)
    assert found.num_rows == free.num_rows


def test_asking_between_model_steps_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay's caches are warm: what asking took in it counts `cold` times."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: float(next(ticks)))
    once, thrice = (
        forecast(
            oracle_drafter(TEXTS), RECORDINGS, _served_by(1e6, 1.0, cold=c), max_draft_tokens=4
        )
        for c in (1.0, 3.0)
    )
    assert once.num_steps == thrice.num_steps and once.ask_s == thrice.ask_s > 0.0
    assert thrice.plain_s == once.plain_s
    num_asked = once.num_steps + len(RECORDINGS)  # the first tree hangs off the prompt's last row
    assert thrice.seconds - once.seconds == pytest.approx(2 * num_asked * once.ask_s, rel=0.15)


def test_rows_of_prompts_have_no_head() -> None:
    whole, body = (
        forecast(None, RECORDINGS, _served_by(100.0, 1.0, undrawn_row_s=s)) for s in (0.0, 0.25)
    )
    assert whole.plain_s - body.plain_s == pytest.approx(4 * 3 * 0.25)
    assert whole.prefill_s - body.prefill_s == pytest.approx(4 * 3 * 0.25)


@pytest.mark.parametrize("num_streams", [1, 4])
def test_prompts_share_their_blocks(num_streams: int) -> None:
    recordings = [Recording([*range(2, 12), 20 + i], [4, 5, 6]) for i in range(4)]
    every = forecast(None, recordings, _served_by(10.0, 1.0), num_streams=num_streams)
    served_by = _served_by(10.0, 1.0, block_size=4)
    found = forecast(None, recordings, served_by, num_streams=num_streams)
    # Two whole blocks of each prompt but the first are there; none where all come in one step.
    shared = 3 * 8.0 if num_streams == 1 else 0.0
    assert every.plain_s - found.plain_s == pytest.approx(shared)
    assert every.prefill_s - found.prefill_s == pytest.approx(3 * 8.0)


def test_nothing_is_drafted_past_the_longest_output() -> None:
    served_by = _served_by(100.0, 1.0)
    found = forecast(oracle_drafter(TEXTS), RECORDINGS, served_by, max_tokens=22)
    free = forecast(oracle_drafter(TEXTS), RECORDINGS, served_by)
    assert found.num_steps == free.num_steps and found.num_rows < free.num_rows
    short = [Recording(r.prompt_ids, r.output_ids[:1]) for r in RECORDINGS]
    assert forecast(oracle_drafter(TEXTS), short, served_by, max_tokens=1).num_rows == 0


def test_what_the_model_held_likely_is_drafted_from() -> None:
    """Five tokens whose order never comes again: only the rows say what follows each."""
    output = [2, 3, 4, 2, 4, 3, 2, 5, 3, 5, 4, 5, 2, 2, 3, 3]
    rows = [[after] for after in output]
    known = Recording([9, 8], output, rows, [[1.0]] * len(output))
    unknown = Recording([9, 8], output)
    sessions: list[Any] = []

    class Noting(FakeDrafter):
        def open(self, *arguments: Any, **more: Any) -> Any:
            session = super().open(*arguments, **more)
            noted: list[int] = []
            sessions.append(noted)

            class Wants:
                num_likely = 1

                def __getattr__(self, name: str) -> Any:
                    return getattr(session, name)

                def note_likely(self, path: Any, parents: Any, ids: Any, chances: Any) -> None:
                    noted.extend(int(i) for i in ids[:, 0])

            return Wants()

    for recording in (known, unknown):
        drafter = Noting(oracle_drafter([[9, 8, *output]])._propose_from)
        forecast(drafter, [recording], _served_by(100.0, 1.0), max_draft_tokens=4)
    assert sessions == [output, []], "a row of every token that was accepted or drawn"
