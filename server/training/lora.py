"""The model with its adapter: PEFT's LoRA on every linear layer, and rows for an enrichment.

The new rows of embedding and head are trained apart (`trainable_token_indices` of both layers), so
a model with a tied head is untied first: PEFT gives a tied head the embedding's rows, but the two
rows of a token differ. The rows are absolute, so whoever loads
the adapter needs the base model's files and nothing else.

An adapter's folder: adapter_config.json and adapter_model.safetensors as PEFT writes them, without
the full tables (`save_embedding_layers=False`: 20 MB instead of 250), and enrichment.json. To load
it with PEFT: untie the base, resize its tables to the enrichment's vocab_size, then
PeftModel.from_pretrained.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from server.errors import ConfigError
from server.training.rows import START, Start, initial_rows
from vocab_store.enrichment import Enrichment

ENRICHMENT_FILE = "enrichment.json"


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """The adapter's shape. rank, alpha, dropout: of every linear layer's LoRA (the paper's
    defaults). start: how the rows of new tokens begin."""

    rank: int = 16
    alpha: int = 16
    dropout: float = 0.05
    start: Start = START


@dataclass(frozen=True, slots=True)
class Tuned:
    """A PEFT model in training, and the two tables outside its layers.

    model: the PeftModel. body: transformers' decoder inside it (ids -> hidden states). head: its
    LM head. enrichment: the new tokens, or None.
    """

    model: Any
    body: nn.Module
    head: nn.Module
    enrichment: Enrichment | None

    def groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """(LoRA parameters, new rows): they train at rates of their own."""
        trained = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        rows = [p for n, p in trained if "trainable_tokens_delta" in n]
        return [p for n, p in trained if "trainable_tokens_delta" not in n], rows


def prepare(
    model: Any, enrichment: Enrichment | None, options: LoraOptions, *, tokenizer: str
) -> Tuned:
    """transformers' causal LM `model` with a fresh adapter; the base stays as it is.

    tokenizer: fingerprint (hex) of the model's tokenizer. Raises ConfigError for an enrichment of
    another tokenizer or of another vocabulary.
    """
    from peft import LoraConfig, get_peft_model

    indices: dict[str, list[int]] | None = None
    if enrichment is not None:
        if enrichment.tokenizer != tokenizer:
            raise ConfigError("the enrichment was made for another tokenizer")
        if enrichment.base_vocab_size != model.config.vocab_size:
            raise ConfigError(
                f"the enrichment is of {enrichment.base_vocab_size} ids, the model has "
                f"{model.config.vocab_size}"
            )
        widen(model, enrichment, options.start)
        ids = list(enrichment.ids)
        indices = {"embed_tokens": ids, "lm_head": ids}
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        trainable_token_indices=indices,
    )
    peft = get_peft_model(model, config)
    inner: Any = peft.get_base_model()
    return Tuned(peft, inner.model, inner.lm_head, enrichment)


def widen(model: Any, enrichment: Enrichment, start: Start = START) -> None:
    """Untie the model and give both tables the enrichment's rows, as they begin."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    inputs = initial_rows(embedding.detach(), enrichment.parts, side="input", start=start)
    heads = initial_rows(head.detach(), enrichment.parts, side="head", start=start)
    model.config.tie_word_embeddings = False
    model.config.get_text_config().tie_word_embeddings = False
    for table, rows, put in (
        (embedding, inputs, model.set_input_embeddings),
        (head, heads, model.set_output_embeddings),
    ):
        wide = torch.empty((enrichment.vocab_size, table.shape[1]), dtype=table.dtype)
        wide[: table.shape[0]] = table.detach()
        wide[torch.tensor(enrichment.ids)] = rows.to(table.dtype)
        weight = nn.Parameter(wide.to(table.device), requires_grad=False)
        if put == model.set_input_embeddings:
            old = model.get_input_embeddings()
            old.weight, old.num_embeddings = weight, wide.shape[0]
        else:
            old = model.get_output_embeddings()
            old.weight, old.out_features = weight, wide.shape[0]
    model.config.vocab_size = enrichment.vocab_size
    model.vocab_size = enrichment.vocab_size


def hidden_states(tuned: Tuned, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[b, t, width]: what the head reads. The head itself is left to the caller's rows."""
    output = tuned.body(input_ids=input_ids, attention_mask=mask, use_cache=False)
    states: torch.Tensor = output.last_hidden_state
    return states


def save(tuned: Tuned, folder: Path, saved_as: str = "float32") -> None:
    """Write the adapter into `folder` (made if needed). saved_as: what its matrices are stored in,
    float32, bfloat16 or float16; rows of new tokens stay as they are. Raises OSError."""
    from peft.utils import SAFETENSORS_WEIGHTS_NAME
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    tuned.model.save_pretrained(folder, save_embedding_layers=False)
    if saved_as != "float32":
        file = folder / SAFETENSORS_WEIGHTS_NAME
        kind: torch.dtype = getattr(torch, saved_as)
        tensors = load_file(file)
        stored = {n: t.to(kind) if ".lora_" in n else t for n, t in tensors.items()}
        save_file(stored, file, metadata={"format": "pt"})
    if tuned.enrichment is not None:
        tuned.enrichment.save(folder / ENRICHMENT_FILE)
