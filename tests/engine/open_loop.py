"""An engine under an open loop of arrivals, in the time of a cost table: no clock, no machine.

Requests arrive whether or not others are done (Poisson), each step takes what the table says of its
rows, and what comes of it is exact and the same on every run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from random import Random

from drafters.tree import DraftTree
from server.engine.batch import Drawn
from server.engine.step_times import CostTable
from server.types import ModelInfo, Request, SpeculationParams
from tests.engine.one_token_loop import one_token_loop
from tests.engine.requests import engine_over, request_of
from tests.fakes.fake_drafters import FakeDrafter, chain
from tests.fakes.fake_runner import FakeModel, FakeRunner

VOCAB = 64
MODEL = FakeModel(VOCAB, seed=3, context=2, boost=4.0)
SCALE = 1000.0
"""Steps take this many times as long as on a machine, so that the time which drafting really takes
in this process is nothing beside them."""


@dataclass(frozen=True, slots=True)
class Served:
    """Seconds of the table, by request: to the first token and to the last. end_s: of the last."""

    first_s: list[float]
    whole_s: list[float]
    end_s: float
    num_draft_rows: int


class CostRunner(FakeRunner):
    """Says of each step that it took what a table says."""

    def __init__(self, model: FakeModel, info: ModelInfo) -> None:
        super().__init__(model, info)
        self._cost = cpu_table()
        self.num_draft_rows = 0
        self.now_s = 0.0

    def launch(self, batch) -> None:  # type: ignore[no-untyped-def]
        self._rows = batch.num_rows
        self._keys = float(batch.prefix_len.sum() + batch.path_len.sum())
        self.num_draft_rows += batch.num_draft_rows
        super().launch(batch)

    def wait(self) -> Drawn:
        drawn = super().wait()
        seconds = self._cost.cost(self._rows, self._keys)
        self.now_s += seconds
        return replace(drawn, model_s=seconds)


def cpu_table() -> CostTable:
    """Like a small model on a few cores: 15 ms a row, few more up to 8, then 1.5 ms a row."""
    rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    ms = [15.0, 16.5, 18.0, 22.0, 34.0, 58.0, 106.0, 202.0, 394.0, 778.0]
    return CostTable(rows, [SCALE * m / 1e3 for m in ms], SCALE * 2e-8)


def guessing_drafter(texts: list[list[int]], chance: float, seed: int) -> FakeDrafter:
    """Knows the texts and proposes a chain that is right with `chance` a token, and says so."""
    known = {tuple(t[:8]): t for t in texts}
    rng = Random(seed)

    def propose(tokens: list[int], budget: int, max_depth: int) -> DraftTree:
        text = known.get(tuple(tokens[:8]), [])
        ids: list[int] = []
        for token in text[len(tokens) : len(tokens) + min(budget, max_depth)]:
            ids.append(token if rng.random() < chance else (token + 1) % VOCAB)
        return chain(ids, [chance ** (i + 1) for i in range(len(ids))])

    return FakeDrafter(propose)


def requests_of(
    num: int, seed: int, prompt: tuple[int, int], output: tuple[int, int]
) -> list[Request]:
    """With so many tokens of prompt and output, from the first number to the second."""
    rng = Random(seed)
    return [
        request_of(
            str(i), [rng.randrange(2, VOCAB) for _ in range(rng.randint(*prompt))],
            max_tokens=rng.randint(*output), arrival_s=1.0 + i * 1e-6,
        )
        for i in range(num)
    ]  # fmt: skip


def serve(
    requests: list[Request],
    gaps_s: list[float] | None,
    *,
    drafts: bool,
    num_seqs: int = 16,
    chance: float = 0.7,
    max_draft_tokens: int = 8,
) -> Served:
    """Serve them. gaps_s: between arrivals; None: all of them are there at once."""
    texts = [_text(request) for request in requests if drafts]
    engine, runner = engine_over(
        MODEL, {"d": guessing_drafter(texts, chance, 5)} if drafts else {}, kind=CostRunner,
        num_blocks=8192, block_size=16, max_model_len=1024, max_num_seqs=num_seqs,
        max_num_batched_tokens=512, target_step_s=SCALE * 0.15, prefix_cache=False,
        cost=cpu_table(),
    )  # fmt: skip
    assert isinstance(runner, CostRunner)
    speculation = SpeculationParams("d", max_draft_tokens) if drafts else SpeculationParams()
    arrivals, at = [], 0.0
    for i in range(len(requests)):
        at += gaps_s[i] if gaps_s is not None else 0.0
        arrivals.append(at)
    first: dict[int, float] = {}
    whole: dict[int, float] = {}
    coming = 0
    while len(whole) < len(requests):
        if not engine.has_work and coming < len(requests):
            runner.now_s = max(runner.now_s, arrivals[coming])
        while coming < len(requests) and arrivals[coming] <= runner.now_s:
            engine.submit(replace(requests[coming], speculation=speculation))
            coming += 1
        for delta in engine.step():
            i = int(delta.request_id)
            if delta.token_ids and i not in first:
                first[i] = runner.now_s - arrivals[i]
            if delta.finish_reason:
                whole[i] = runner.now_s - arrivals[i]
    num = range(len(requests))
    return Served(
        [first[i] / SCALE for i in num],
        [whole[i] / SCALE for i in num],
        runner.now_s / SCALE,
        runner.num_draft_rows,
    )


def poisson(num: int, rate: float, seed: int) -> list[float]:
    """Gaps between arrivals at `rate` a second of the table."""
    rng = Random(seed)
    return [SCALE * rng.expovariate(rate) for _ in range(num)]


@functools.cache
def _text(request: Request) -> list[int]:
    """A request's prompt and answer."""
    out = one_token_loop(MODEL, request, 0, eos=(1,), max_model_len=1024, token_bytes=[])
    return [*request.prompt_ids, *out.ids]
