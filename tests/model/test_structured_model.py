"""Grammars on real arithmetic: the same ids and logprobs whatever drafts, and text that matches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from drafters import make_drafter
from server import token_bytes
from server.engine.batch import Runner
from server.engine.engine import Engine
from server.engine.grammar import GrammarCompiler
from server.engine.plan import EngineSettings
from server.types import GrammarSpec, Request, SamplingParams, SpeculationParams
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.engine.scenarios import Result, run_requests
from tests.engine.tiny_vocabularies import read_grammar_tokenizer
from tests.model.cpu_models import cpu_runner
from tests.model.tiny_models import tiny_config

VOCAB = 400
TOKENIZER = byte_level_tokenizer()
TABLE = token_bytes.build(TOKENIZER, VOCAB)
SCHEMA = {
    "type": "array",
    "minItems": 1,
    "maxItems": 2,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "size": {"enum": ["the small", "the large"]},
            "year": {"type": "integer", "minimum": 0, "maximum": 2099},
        },
        "required": ["name", "size", "year"],
        "additionalProperties": False,
    },
}
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.2, "top_k": 20, "frequency_penalty": 0.6, "min_tokens": 20, "seed": 5},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": ((90, 3.0), (91, -100.0))},
]


def _module() -> LlamaForCausalLM:
    torch.manual_seed(11)
    config = tiny_config("llama", vocab_size=VOCAB, eos_token_id=0, bos_token_id=1, pad_token_id=0)
    module: LlamaForCausalLM = LlamaForCausalLM(config)
    module.eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3.0)  # so that one id stands out
    return module


def _engine(runner: Runner) -> Engine:
    load = partial(read_grammar_tokenizer, TOKENIZER, VOCAB)
    return Engine(
        runner,
        {name: make_drafter(name) for name in ("suffix", "auto")},
        EngineSettings(max_num_seqs=8, max_num_batched_tokens=128),
        grammars=GrammarCompiler(load, VOCAB),
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    runner = cpu_runner(_module())
    runner.info = replace(runner.info, eos_token_ids=(0,))
    made = _engine(runner)
    yield made
    made.close()


def _run(
    engine: Engine,
    drafter: str,
    sampling: dict[str, Any],
) -> dict[tuple[str, int], Result]:
    requests = [
        Request(
            f"r{i}",
            "task",
            "tiny",
            tuple(TOKENIZER.encode("The answer is a small list of three things.").ids),
            SamplingParams(max_tokens=110, num_logprobs=2, **sampling),
            SpeculationParams() if drafter == "off" else SpeculationParams(drafter, 12),
            num_choices=2,
            grammar=GrammarSpec("json_schema", json.dumps(SCHEMA), whitespace),
        )
        for i, whitespace in enumerate(("", r" |\n ?"))
    ]
    return run_requests(engine, [(0, request) for request in requests])


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: "-".join(map(str, s.values()))[:40])
def test_drafts_change_nothing(engine: Engine, sampling: dict[str, Any]) -> None:
    plain = _run(engine, "off", sampling)
    for drafter in ("suffix", "auto"):
        drafted = _run(engine, drafter, sampling)
        num_accepted = 0
        for key, want in plain.items():
            got = drafted[key]
            assert (got.ids, got.finish_reason) == (want.ids, want.finish_reason)
            assert got.logprobs == want.logprobs  # to the last bit
            num_accepted += sum(c.num_accepted for c in got.counts)
        assert num_accepted > 20
    for key, want in plain.items():
        text = TABLE.join(want.ids, skip_special=True)
        if want.finish_reason == "stop":
            items = json.loads(text)
            assert 1 <= len(items) <= 2
            assert all(list(item) == ["name", "size", "year"] for item in items)
            assert key[0] != "r0" or b'{"name":"' in text
        # The logprobs are the model's own, before the grammar: what it forces may be unlikely.
        assert any(lp.rank > 2 for lp in want.logprobs)
    if "repetition_penalty" not in sampling:  # it soon bans the digits and quotes
        assert any(r.finish_reason == "stop" for r in plain.values())
