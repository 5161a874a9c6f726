"""A tiny model in training, and a task that it can learn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from server.training.examples import TrainExample
from server.training.lora import LoraOptions, Tuned, prepare
from server.training.stored import Floats, Matrix
from vocab_store.enrichment import Enrichment

V, EOS = 40, 39
ENRICHMENT = Enrichment("tok", V, (V, V + 1), ((7, 8, 9), (5, 6)))


def base(tied: bool = True) -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied,
        eos_token_id=EOS, bos_token_id=None, pad_token_id=None, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).float()


def over(model: Any, enrichment: Enrichment | None, options: LoraOptions | None = None) -> Tuned:
    """A fresh adapter over a model of floats, in float32."""
    weights = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}

    def matrix_of(name: str) -> Matrix:
        return Floats(weights[name])

    torch.manual_seed(2)
    return prepare(model, matrix_of, enrichment, options or LoraOptions(4, 8), tokenizer="tok")


def tuned(enrichment: Enrichment | None = ENRICHMENT, *, dropout: float = 0.0) -> Tuned:
    return over(base(), enrichment, LoraOptions(4, 8, dropout))


def shake(given: Tuned, seed: int = 3, scale: float = 0.1) -> Tuned:
    """Every trained parameter moved at random."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, parameter in given.trained():
            parameter.add_(torch.randn_like(parameter) * scale)
    return given


def next_id(given: Tuned, prompt: Sequence[int], but: int | None = None) -> int:
    """The likeliest id behind a prompt, which is not `but`."""
    given.module.eval()
    given.module.config.tailor_layout = None
    with torch.no_grad():
        states = given.module.get_decoder()(
            input_ids=torch.tensor([list(prompt)]), use_cache=False
        ).last_hidden_state
        rows = given.head.rows
        assert rows is not None
        logits = given.head.logits(states[0, -1:], rows)[0]
        if but is not None:
            logits[but] = -torch.inf
        return int(logits.argmax())


def examples(num: int = 10) -> list[TrainExample]:
    """The output copies the prompt's last id behind a fixed phrase; prompts begin alike."""
    chooser = random.Random(5)
    made = []
    for _ in range(num):
        own = tuple(chooser.randrange(10, 38) for _ in range(chooser.randrange(1, 5)))
        made.append(TrainExample((3, 4, *own), (7, 8, 9, own[-1], 5, 6, EOS)))
    return made
