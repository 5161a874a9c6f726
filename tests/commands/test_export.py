"""A model with a task's tokens as added tokens, read by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from server.commands.enrich import give_rows
from server.datasets import open_table
from server.model.loader import build_module, open_model
from tests.commands.command_line import Tailor
from tests.installed import needs
from vocab_store.enrichment import Enrichment

pytestmark = needs("peft")


def test_tokens_become_added_tokens(
    folder: Path, data: Path, tmp_path: Path, tailor: Tailor
) -> None:
    out = tmp_path / "out"
    command = ["tasks", "enrich", "--model", folder, "--data", data, "--tokens", 4]
    command += ["-o", tmp_path / "e.json", "--export", out]
    told = tailor(*command, "--reads-prompts").out
    assert f"written: {out}; 0 tokens are no text" in told
    enrichment, (_, table, _) = Enrichment.load(tmp_path / "e.json"), open_table(folder)
    assert enrichment.prompts
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    texts = [table.join(parts, skip_special=False).decode() for parts in enrichment.parts]
    ids = [tokenizer.convert_tokens_to_ids(text) for text in texts]
    assert [tokenizer.encode(f"A{text}B")[1:-1] for text in texts] == [[i] for i in ids]
    assert [tokenizer.decode([i]) for i in ids] == texts
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert len(tokenizer) == model.config.vocab_size > 128
    ours = build_module(open_model(folder), torch.float32, torch.device("cpu"))
    give_rows(ours, dict(zip(enrichment.ids, enrichment.parts, strict=True)))
    with torch.no_grad():
        theirs = model(torch.tensor([[5, ids[2], 9]])).logits
        want = ours(torch.tensor([[5, enrichment.ids[2], 9]])).logits
    base = enrichment.base_vocab_size
    torch.testing.assert_close(theirs[..., :base], want[..., :base])
    torch.testing.assert_close(theirs[..., ids], want[..., list(enrichment.ids)])
    data.unlink()
    told = tailor(*command, status=1).err
    assert told.endswith(f"tailor: {out}: is not empty\n"), "before the data is read"
