"""The probabilities of /v1/decisions are those of the model."""

from __future__ import annotations

from copy import deepcopy

import pytest

from server.api.engines.client import EngineSpec
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from tests.api.live import TOKENIZER, LiveServer, served
from tests.api.orders import decisions, orders
from tests.api.test_decisions import CHOICE, PREDICATE, SCORE, ask
from tests.fakes.engine_thread import start_thread


def test_probabilities_are_those_of_a_plain_forward() -> None:
    """Through API, engine, chunked prefill and prefix cache: transformers' own softmax, to 1e-5."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.model.torch_runners import runner_over

    torch.manual_seed(3)
    module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
            initializer_range=0.4, eos_token_id=0, bos_token_id=1,
        )
    ).eval()  # fmt: skip

    def make() -> Engine:
        runner = runner_over(
            deepcopy(module), num_blocks=256, max_model_len=512, max_num_batched_tokens=64
        )
        settings = EngineSettings(
            max_num_seqs=8, max_num_batched_tokens=64, chunked_prefill_rows=48
        )
        return Engine(runner, {}, settings)

    given = "Once upon a time the quick brown fox jumps over the lazy dog. " * 3
    questions = [PREDICATE, CHOICE, SCORE, {**PREDICATE, "instructions": "A fox is quick."}]
    spec = EngineSpec("e", "tiny", "cpu", lambda: start_thread(make))
    with LiveServer([spec], max_model_len=512) as live:
        body = ask(live, *questions, given=given).json()
    requests = decisions(orders(models=[served(max_model_len=512)]), given, questions)
    for request, answer in zip(requests, body["answers"], strict=True):
        with torch.no_grad():
            logits = module(torch.tensor([request.prompt_ids])).logits[0, -1].double()
        want = torch.softmax(logits[list(request.label_ids)], dim=0).tolist()
        assert max(want) < 0.999, "the model is too sure for this to be a test"
        if answer["type"] == "predicate":
            assert answer["probability"] == pytest.approx(want[0], abs=1e-5)
        else:
            got = [p["probability"] for p in answer["probabilities"]]
            assert got == pytest.approx(want, abs=1e-5)
    cached = body["usage"]["input_tokens_details"]["cached_tokens"]
    shared = len(TOKENIZER.encode(given).ids) // 16 * 16
    assert cached >= 3 * (shared - 16) > 0
