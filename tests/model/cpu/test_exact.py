"""`exact` on a real CPU runner is `full` to the last bit: ids, logprobs and finish reasons, with
and without drafts, alone and in a batch with other modes, with too few blocks for all."""

from __future__ import annotations

from random import Random

import pytest

from tests.model import families
from tests.model.cpu_models import cpu_runner
from tests.model.slice_engines import asking, assert_same, requests_of, serve


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_exact_is_full_to_the_last_bit(family: str) -> None:
    runner = cpu_runner(families.build(family), num_blocks=48)
    rng = Random(7)
    num_missed = num_verifications = num_accepted = num_likely = 0
    try:
        for seed in range(3):
            requests = requests_of(seed, times=2)
            want, _ = serve(runner, requests, max_num_seqs=1)
            for blocks, seats, modes in ((48, 8, ("exact",)), (6, 4, ("exact", "full"))):
                asked = asking(requests, rng, modes)
                got, _ = serve(runner, asked, num_blocks=blocks, max_num_seqs=seats)
                assert_same(got, want, 0.0)
                for key, result in got.items():
                    assert result.logprobs == want[key].logprobs
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
