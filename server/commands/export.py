"""A model folder with a task's tokens as added tokens, for transformers and vLLM.

There an enrichment's tokens are strings that the tokenizer cuts out of any text, prompts too
(TASC-ft's own way; vocab_store.enrichment says what that costs). Their ids may differ from the
enrichment's: a tokenizer numbers added tokens itself.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from server.errors import ConfigError

if TYPE_CHECKING:
    from server.token_bytes import TokenBytes
    from vocab_store.enrichment import Enrichment


_KEPT = (
    "chat_template.jinja",
    "special_tokens_map.json",
    "tokenizer_config.json",
)  # beside what is written anew


def export_model(
    folder: Path, enrichment: Enrichment, table: TokenBytes, adapter: Path | None, out: Path
) -> int:
    """Write the model into `out`, with `adapter` merged and the rows that it trained, or without
    one and with rows as training begins; the number of tokens that could not be added.

    table: of the base tokenizer. Left out are tokens that are no text by themselves (half a
    character), and those that the tokenizer knows as one. Raises ConfigError and ModelError.
    """
    import torch

    from server.model.loader import build_module, open_model

    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out}: is not empty")
    opened = open_model(folder, adapter=adapter)
    if adapter is not None and opened.enrichment != enrichment:
        raise ConfigError(f"{adapter}: was trained with another enrichment")
    module: Any = build_module(opened, opened.dtype, torch.device("cpu"))
    if adapter is None:
        give_rows(module, enrichment)
    out.mkdir(parents=True, exist_ok=True)
    ids = _add_tokens(folder, enrichment, table, out)
    _move_rows(module, ids)
    module.save_pretrained(out)
    for name in _KEPT:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
    return len(enrichment) - len(ids)


def give_rows(module: Any, enrichment: Enrichment) -> None:
    """Untie transformers' causal LM and give both tables the enrichment's rows, as they begin."""
    import torch
    from torch import nn

    from server.training.lora import initial_rows

    sides: tuple[tuple[Any, Literal["input", "head"]], ...] = (
        (module.get_input_embeddings(), "input"),
        (module.get_output_embeddings(), "head"),
    )
    for table, side in sides:
        old = table.weight.detach()
        wide = torch.empty((enrichment.vocab_size, old.shape[1]), dtype=old.dtype)
        wide[: old.shape[0]] = old
        rows = initial_rows(lambda ids: old[ids].float(), enrichment.parts, side=side)  # noqa: B023
        wide[torch.tensor(enrichment.ids)] = rows.to(old.dtype)
        table.weight = nn.Parameter(wide, requires_grad=False)
    module.config.tie_word_embeddings = False
    module.config.vocab_size = module.vocab_size = enrichment.vocab_size


def _add_tokens(
    folder: Path, enrichment: Enrichment, table: TokenBytes, out: Path
) -> dict[int, int]:
    """Write tokenizer.json; {the enrichment's id: the tokenizer's} of what was added."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: dict[int, int] = {}
    for token_id, parts in zip(enrichment.ids, enrichment.parts, strict=True):
        data = table.join(parts, skip_special=False)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if tokenizer.token_to_id(text) is not None:
            continue
        tokenizer.add_tokens([AddedToken(text, normalized=False)])
        added = tokenizer.token_to_id(text)
        if added is not None:
            ids[token_id] = added
    tokenizer.save(str(out / "tokenizer.json"))
    return ids


def _move_rows(module: Any, ids: dict[int, int]) -> None:
    """Put the rows of the enrichment's ids where the tokenizer has them."""
    import torch
    from torch import nn

    for owner in (module.get_input_embeddings(), module.get_output_embeddings()):
        old = owner.weight.detach()
        num = max(old.shape[0], *(i + 1 for i in ids.values()))
        new = torch.zeros((num, old.shape[1]), dtype=old.dtype)
        new[: old.shape[0]] = old
        for source, target in ids.items():
            new[target] = old[source]
        owner.weight = nn.Parameter(new, requires_grad=False)
    module.config.vocab_size = module.get_input_embeddings().weight.shape[0]
