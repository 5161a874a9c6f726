"""Random PEFT adapters of tiny models, saved as PEFT saves them, with PEFT's own model beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from server.training.lora import LoraOptions, prepare, save
from vocab_store.enrichment import Enrichment


def shaken(model: Any, seed: int, scale: float = 0.1) -> Any:
    """Every trained parameter of a PEFT model moved at random."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * scale)
    return model.eval()


def lora(model: Any, folder: Path, seed: int = 1, **settings: Any) -> Any:
    """PEFT's model over `model` with a random LoRA, which is saved into `folder`."""
    import peft

    torch.manual_seed(seed)  # peft draws A
    config = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **settings}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    shaken(wrapped, seed)
    wrapped.save_pretrained(folder, save_embedding_layers=False)
    return wrapped


def enriched(model: Any, folder: Path, seed: int = 1, num: int = 5, tokenizer: str = "t") -> Any:
    """The same, with tokens of its own for the pairs (3, 4), (4, 5), ..."""
    torch.manual_seed(seed)
    base = model.config.vocab_size
    parts = tuple((3 + i, 4 + i) for i in range(num))
    enrichment = Enrichment(tokenizer, base, tuple(range(base, base + num)), parts)
    tuned = prepare(model, enrichment, LoraOptions(rank=4, dropout=0.0), tokenizer=tokenizer)
    shaken(tuned.model, seed)
    save(tuned, folder)
    return tuned.model
