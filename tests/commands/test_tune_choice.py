"""What a way to draft is expected to gain: replayed and priced, or served with and without."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from drafters.replay import Recording
from drafters.tree import DraftTree
from server.commands.record import Answer
from server.commands.tune_choice import TURN, Pricing, ratio_error, serve, taken
from server.engine.batch import Batch
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.engine.task_store import TaskStore
from server.engine.trees import DraftError
from server.types import Request, SamplingParams, SpeculationParams
from tests.commands.fixed_cost import fixed_cost
from tests.engine.one_token_loop import one_token_loop
from tests.fakes.fake_drafters import FakeDrafter, oracle_drafter, random_drafter
from tests.fakes.fake_runner import FakeModel, FakeRunner, fake_info

PROMPTS = [[3, 5, 2 + i // 10, 2 + i % 10] for i in range(20)]
SAMPLING = SamplingParams(temperature=0.7, max_tokens=12, seed=5)
DRAFTS = SpeculationParams("oracle", 4, learn_tokens=1000)


def _texts(model: FakeModel) -> list[list[int]]:
    """The answer to each prompt, by the rules alone."""
    found = []
    for at, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=0.7, max_tokens=12, seed=5 + at)
        request = Request("", "", "fake", tuple(prompt), sampling)
        rules: dict[str, Any] = {"eos": (1,), "max_model_len": 64, "token_bytes": []}
        found.append(one_token_loop(model, request, 0, **rules).ids)
    return found


def _engine(
    first_s: float = 100.0,
    per_row: float = 1.0,
    *,
    fail: Callable[[Batch], None] | None = None,
    max_model_len: int = 64,
) -> tuple[Engine, list[list[int]], list[str]]:
    """An engine over a fake model whose drafts know its texts, and the scopes that it made drafters
    for."""
    model = FakeModel(13, seed=4)
    texts = _texts(model)
    info = fake_info(vocab_size=13, num_blocks=64, max_model_len=max_model_len, eos_token_ids=(1,))
    given: list[str] = []

    def make(task: str, asked: SpeculationParams) -> Any:
        assert (task, asked.learn_tokens) == ("town", 1000)
        given.append(asked.scope)
        return oracle_drafter([p + t for p, t in zip(PROMPTS, texts, strict=True)])

    return (
        Engine(
            FakeRunner(model, info, fail=fail),
            {"oracle": make},
            EngineSettings(max_num_seqs=4),
            cost=fixed_cost(first_s, per_row),
            memory=TaskStore(None, fingerprint="f"),
        ),
        texts,
        given,
    )


# --- served ---------------------------------------------------------------------------------------


def _served(engine: Engine, **more: Any) -> tuple[list[Answer], list[Answer]]:
    return serve(engine, PROMPTS, SAMPLING, DRAFTS, task="town", **more)


def _ids(answers: Sequence[Answer]) -> list[list[int]]:
    return [list(answer.output_ids) for answer in answers]


@pytest.mark.parametrize("num_clients", [1, 3])
def test_both_sides_answer_alike_and_each_begins_with_nothing(num_clients: int) -> None:
    engine, texts, given = _engine()
    for _ in range(2):
        plain, drafted = _served(engine, num_clients=num_clients)
        assert _ids(plain) == _ids(drafted) == texts
        found = taken(plain, drafted)
        assert found.tokens_per_step > 2.0
        for seconds in (found.plain_s, found.seconds):
            assert len(seconds) == len(PROMPTS) and min(seconds) > 0.0
        assert found.speedup == sum(found.plain_s) / sum(found.seconds)
        assert not engine.num_open
        engine.check()
    assert len(set(given)) == 2, "what was learned in one measurement is not used in the next"


def test_it_ends_behind_the_turn_in_which_the_time_is_over() -> None:
    engine, texts, _ = _engine()
    assert [_ids(side) for side in _served(engine, most_s=0.0)] == [texts[:TURN]] * 2


def test_a_request_that_fails_is_told() -> None:
    def fail(batch: Batch) -> None:
        raise MemoryError("no room")

    engine, _, _ = _engine(fail=fail)
    with pytest.raises(RuntimeError, match=r"no room|failed"):
        _served(engine)
    assert not engine.num_open


def test_the_error_of_a_ratio_is_what_resampling_finds() -> None:
    rng = np.random.default_rng(3)
    below = rng.gamma(4.0, 1.0, 400)
    above = below * rng.normal(1.4, 0.3, 400)
    picked = rng.integers(0, 400, (2000, 400))
    spread = float(np.std(above[picked].sum(1) / below[picked].sum(1)))
    assert ratio_error(list(above), list(below)) == pytest.approx(spread, rel=0.1)
    assert ratio_error([2.0, 4.0], [1.0, 2.0]) == ratio_error([2.0], [1.0]) == 0.0


# --- replayed and priced --------------------------------------------------------------------------

TEXTS = [[2 + (i * k) % 9 for i in range(24)] for k in (1, 2, 4)]
RECORDINGS = [Recording(text[:3], text[3:]) for text in TEXTS]


def _replay(drafter: Any, per_row: float, recordings: Sequence[Recording] = RECORDINGS) -> Any:
    return Pricing(_engine(100.0, per_row)[0]).replay(drafter, recordings, 4)


def test_drafts_that_come_true_are_priced_by_their_steps() -> None:
    """Twenty tokens after the first one in four steps of five: each takes its rows."""
    found = _replay(oracle_drafter(TEXTS), 1.0)
    host = _engine(100.0, 1.0)[0].gain.host
    # The tree that hangs off the prompt's row brings four, so that 16 are left.
    assert found.tokens_per_step == 60 / found.num_steps and found.num_steps <= 12
    plain_s = 3 * (102.0 + 20 * (100.0 + host.plain(1)))
    assert sum(found.plain_s) == pytest.approx(plain_s, rel=0.001)
    asked_s = host.asking(1)
    steps_s = found.num_steps * (104.0 + host.plain(1) + asked_s) + 3 * (106.0 + asked_s)
    steps_s += 3 * host.opening
    assert sum(found.seconds) == pytest.approx(steps_s, rel=0.02)
    assert found.speedup > 3.0


def test_nodes_that_cost_as_much_as_steps_or_never_come_are_not_taken() -> None:
    dear = _replay(oracle_drafter(TEXTS), 120.0)
    assert dear.num_rows == 0 and dear.speedup == pytest.approx(1.0)
    wrong = _replay(random_drafter(1, 13), 20.0)
    assert wrong.num_rows < 3 * 24 * 4 / 2, "fewer and fewer, as they are found out"
    assert 0.7 < wrong.speedup < 1.1


def test_whose_drafts_do_not_pay_is_hardly_asked_in_a_replay_either() -> None:
    recordings = [Recording([9, i], [*range(10 + i, 90 + i)]) for i in range(40)]
    asked = list[int]()
    wrong = random_drafter(1, 13)

    def propose(tokens: list[int], budget: int, depth: int) -> DraftTree:
        asked.append(len(tokens))
        return wrong.propose_from(tokens, budget, depth)

    found = _replay(FakeDrafter(propose), 20.0, recordings)
    assert len(asked) < 0.1 * found.num_steps and found.speedup > 0.98


def test_a_prompt_s_blocks_that_an_earlier_one_has_cost_nothing() -> None:
    shared = [Recording([3] * 16 + [i], [4, 5]) for i in range(4)]
    apart = [Recording([3 + i] * 17, [4, 5]) for i in range(4)]
    costs = [_replay(oracle_drafter([[1]]), 10.0, recordings) for recordings in (shared, apart)]
    size = fake_info().block_size
    saved = sum(costs[1].plain_s) - sum(costs[0].plain_s)
    assert saved == pytest.approx(3 * 10.0 * (16 // size * size))
    tracemalloc.start()
    long = [Recording([2 + i, *[3] * 1999], [4, 5]) for i in range(8)]
    _replay(oracle_drafter([[1]]), 10.0, long)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4 << 20, "a long prompt is kept once, not once a block"


def test_what_cannot_be_replayed_is_told() -> None:
    with pytest.raises(DraftError, match="outside the vocabulary"):
        _replay(random_drafter(1, 1 << 14), 1.0)


def test_what_the_model_held_likely_is_told_to_the_session() -> None:
    """Five tokens whose order never comes again: only the rows say what follows each."""
    output = [2, 3, 4, 2, 4, 3, 2, 5, 3, 5, 4, 5, 2, 2, 3, 3]
    rows = [[after] for after in output]
    noted: list[int] = []

    class Noting(FakeDrafter):
        def open(self, *arguments: Any, **more: Any) -> Any:
            session = super().open(*arguments, **more)

            class Wants:
                num_likely = 1

                def __getattr__(self, name: str) -> Any:
                    return getattr(session, name)

                def note_likely(self, path: Any, parents: Any, ids: Any, chances: Any) -> None:
                    noted.extend(int(i) for i in ids[:, 0])

            return Wants()

    drafter = Noting(oracle_drafter([[9, 8, *output]]).propose_from)
    _replay(drafter, 1.0, [Recording([9, 8], output, rows, [[1.0]] * len(output))])
    assert noted == output, "a row of every token that was accepted or drawn"
    noted.clear()
    _replay(drafter, 1.0, [Recording([9, 8], output)])
    assert not noted
