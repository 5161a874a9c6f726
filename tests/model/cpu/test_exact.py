"""`exact` on a real CPU runner is `full` to the last bit: ids, logprobs and finish reasons, with
and without drafts, alone and in a batch with other modes, with too few blocks for all."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from drafters import make_drafter
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.engine.stops import StopTable
from server.model.cpu.runner import CpuRunner
from server.types import Request, SamplingParams, SpeculationParams, VocabularyParams
from tests.engine.scenarios import Result, run_requests
from tests.model import families
from tests.model.cpu_models import cpu_runner
from vocab_store.profile import VocabProfile
from vocab_store.slice import RequiredIds, VocabSlice

V = families.VOCAB_SIZE
EOS = 2


def _profile(seed: int, num: int) -> VocabProfile:
    rng = Random(seed)
    ids = sorted({EOS, *rng.sample(range(3, V), num)})
    fill = np.setdiff1d(np.arange(3, V, dtype=np.int32), np.asarray(ids))
    made = VocabSlice.make(ids, RequiredIds.of(V, eos_ids=[EOS]))
    return VocabProfile(made, fill, np.zeros(fill.shape[0], np.float32))


PROFILES = {"small": _profile(1, 40), "large": _profile(2, 150)}


def _requests(seed: int) -> list[Request]:
    rng = Random(seed)
    samplings = [
        SamplingParams(temperature=0.0, num_logprobs=2),
        SamplingParams(temperature=0.7, top_p=0.9, num_logprobs=0),
        SamplingParams(temperature=1.3, top_k=20, min_p=0.02),
        SamplingParams(
            temperature=0.8,
            repetition_penalty=1.3,
            frequency_penalty=0.4,
            presence_penalty=0.2,
            num_logprobs=1,
        ),
        SamplingParams(temperature=0.9, min_tokens=6, stop_token_ids=(9, 14, 77)),
        SamplingParams(temperature=0.9, stop=(b"<5", b"7><1")),
        SamplingParams(temperature=0.6, logit_bias=((5, 3.0), (8, -100.0)), num_logprobs=3),
    ]
    requests = []
    for i, sampling in enumerate(samplings * 2):
        phrase = [rng.randrange(3, V) for _ in range(5)]
        prompt = (phrase * 4)[: rng.randint(3, 18)]
        requests.append(
            Request(
                f"r{i}",
                "task",
                "tiny",
                tuple(prompt),
                replace(sampling, max_tokens=rng.randint(8, 24), seed=rng.randrange(1 << 40)),
                num_choices=2 if i == 3 else 1,
            )
        )
    return requests


def _run(
    runner: CpuRunner, requests: list[Request], *, num_blocks: int, max_num_seqs: int
) -> dict[tuple[str, int], Result]:
    runner.info = replace(runner.info, num_blocks=num_blocks)
    engine = Engine(
        runner,
        {name: make_drafter(name) for name in ("suffix", "auto")},
        EngineSettings(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=64, chunked_prefill_rows=16
        ),
        stop_table=StopTable.from_list([b"<%d>" % i for i in range(V)], ()),
        profiles=PROFILES.__getitem__,
    )
    results = run_requests(engine, [(0, request) for request in requests])
    assert engine.num_failed_steps == 0 and engine.num_drafter_errors == 0
    for table in range(8):  # the runner lives on
        runner.drop_table(table)
    return results


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_exact_is_full_to_the_last_bit(family: str) -> None:
    runner = cpu_runner(families.build(family), num_blocks=48)
    rng = Random(7)
    num_missed = num_verifications = num_accepted = num_likely = 0
    try:
        for seed in range(3):
            requests = _requests(seed)
            want = _run(runner, requests, num_blocks=48, max_num_seqs=1)
            for blocks, seats, modes in ((48, 8, ("exact",)), (6, 4, ("exact", "full"))):
                asked = [
                    replace(
                        request,
                        vocabulary=VocabularyParams(
                            rng.choice(modes),  # type: ignore[arg-type]
                            rng.choice(("small", "large")),
                            rng.choice((0, 1, 3, 7)),
                        ),
                        speculation=rng.choice(
                            (
                                SpeculationParams(),
                                SpeculationParams("suffix", 6),
                                SpeculationParams("auto", 6),
                            )
                        ),
                    )
                    for request in requests
                ]
                got = _run(runner, asked, num_blocks=blocks, max_num_seqs=seats)
                assert set(got) == set(want)
                for key, result in got.items():
                    full = want[key]
                    assert result.ids == full.ids
                    assert (result.finish_reason, result.stop_reason) == (
                        full.finish_reason,
                        full.stop_reason,
                    )
                    assert result.logprobs == full.logprobs
                    num_missed += sum(v.num_missed for v in result.vocabulary)
                    num_verifications += sum(v.num_verifications for v in result.vocabulary)
                    num_accepted += sum(c.num_accepted for c in result.counts)
                    num_likely += sum(
                        kept for c in result.counts for s, _, kept in c.by_source if s == "logits"
                    )
    finally:
        runner.close()
    assert num_missed > 30 and num_verifications > num_missed
    assert num_accepted > 10 and num_likely > 5
