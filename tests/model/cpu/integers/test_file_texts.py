"""A GGUF that is served as it is: whatever drafts, slices, chunks, shares blocks and preempts, the
texts are those of one sequence alone, token by token. Hypothesis draws a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Literal, cast

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from drafters import make_drafter
from server.model.build import RunnerSpec, build_runner
from server.model.catalog import model_folder
from server.model.cpu.runner import CpuRunner
from server.types import EngineSizes, Request, SpeculationParams, VocabularyParams
from tests.fakes.fake_drafters import liar_drafter
from tests.model.gguf_models import BLOCKS, K_FORMS, MODELS, VOCAB_SIZE, WIDE, write
from tests.model.slice_engines import SAMPLINGS, assert_same, profile, serve
from tests.profiles import examples

PROFILES = {"medium": profile(1, 90, VOCAB_SIZE)}


@pytest.fixture(scope="module", params=["blocks", "K", "all, the head in its file"])
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, files_cache: None
) -> Iterator[CpuRunner]:
    what, path = str(request.param), tmp_path_factory.mktemp("file") / "m.gguf"
    model = MODELS["llama"] if what == "blocks" else WIDE
    forms = {"blocks": BLOCKS, "K": K_FORMS}.get(what, (*BLOCKS, *K_FORMS))
    write(model, model.build(), path, *forms)
    sizes = EngineSizes(max_num_seqs=6, max_num_batched_tokens=256, kv_bytes=4 << 20)
    spec = RunnerSpec(
        "m", str(model_folder(str(path), "file")), sizes=sizes, threads=1, max_model_len=256,
        kv_dtype="int8" if what == "K" else "auto",
        full_head="stream" if what.endswith("file") else "device",
    )  # fmt: skip
    made = build_runner(spec)
    assert made.info.dtype == "file" and made.info.num_blocks >= 64
    yield cast("CpuRunner", made)
    cast("CpuRunner", made).close()


def _requests(rng: Random) -> list[Request]:
    """Prompts that begin alike and repeat themselves, so that blocks are shared and drafts hit."""
    shared, made = [rng.randrange(3, VOCAB_SIZE) for _ in range(9)] * 2, []
    for i in range(rng.randint(2, 4)):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 4))] * rng.randint(1, 5)
        length, seed = rng.randint(2, 10), rng.randrange(1 << 40)
        request = Request(
            f"r{i}", "task", "m", tuple(shared[: rng.choice((0, 7, 16, 18))] + own),
            replace(rng.choice(SAMPLINGS), max_tokens=length, seed=seed),
            num_choices=rng.choice((1, 1, 2)), echo_logprobs=rng.choice((None, None, 1)),
        )  # fmt: skip
        made.append(request)
    return made


@settings(max_examples=examples(200), print_blob=True)
@given(
    seed=st.integers(0, 2**48),
    mode=st.sampled_from(("full", "slice", "exact")),
)
def test_a_files_texts_are_those_of_one_sequence_alone(
    runner: CpuRunner, seed: int, mode: Literal["full", "slice", "exact"]
) -> None:
    rng = Random(seed)
    asked = _requests(rng)
    note(asked)
    if mode == "slice":
        asked = [replace(r, vocabulary=VocabularyParams("slice", "medium", 0)) for r in asked]
    want, _ = serve(
        runner, asked, num_blocks=64, max_num_seqs=1, max_num_batched_tokens=256,
        chunked_prefill_rows=None, prefix_cache=False, profiles=PROFILES,
    )  # fmt: skip
    texts = [[*r.prompt_ids, *want[r.request_id, 0].ids] for r in asked]
    drafted = []
    for request in asked:
        budget = rng.choice((1, 4, 8))
        speculation = SpeculationParams(rng.choice(("off", "auto", "liar", "liar")), budget)
        own = replace(request, speculation=speculation)
        if mode == "exact":
            vocabulary = VocabularyParams(mode, "medium", rng.choice((0, 1, 3)))
            own = replace(own, vocabulary=vocabulary)
        drafted.append(own)
    got, _ = serve(
        runner, drafted, num_blocks=rng.choice((6, 9, 48)), max_num_seqs=rng.choice((1, 3, 6)),
        max_num_batched_tokens=rng.choice((12, 48)), chunked_prefill_rows=rng.choice((1, 5, 16)),
        prefix_cache=rng.random() < 0.8, profiles=PROFILES,
        drafters={"liar": liar_drafter(seed, texts, VOCAB_SIZE), "auto": make_drafter("auto")},
    )  # fmt: skip
    assert_same(got, want, 0.0)
    for key, result in got.items():
        assert result.prompt_logprobs == want[key].prompt_logprobs
