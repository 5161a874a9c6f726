"""A model with a task's tokens as added tokens, read by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from server.commands.enrich import export_model, give_rows
from server.datasets import open_table
from server.model.loader import build_module, open_model
from tests.commands.command_line import Tailor
from tests.installed import needs
from vocab_store.enrichment import Enrichment

pytestmark = needs("peft")


def test_tokens_become_added_tokens(folder: Path, tmp_path: Path) -> None:
    _, table, _ = open_table(folder)
    parts = ((3, 4), (4, 5), (5, 6, 7), (9, 3))
    num = table.vocab_size
    enrichment = Enrichment(table.fingerprint.hex(), num, tuple(range(num, num + 4)), parts)
    out = tmp_path / "out"
    assert export_model(folder, enrichment, table, out) == 0
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    texts = [table.join(parts, skip_special=False).decode() for parts in enrichment.parts]
    ids = [tokenizer.convert_tokens_to_ids(text) for text in texts]
    assert tokenizer.encode(f"A{texts[0]}B{texts[3]}")[1::2] == [ids[0], ids[3]]
    assert tokenizer.decode([ids[1]]) == texts[1]
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    ours = build_module(open_model(folder), torch.float32, torch.device("cpu"))
    give_rows(ours, dict(zip(enrichment.ids, parts, strict=True)))
    with torch.no_grad():
        theirs = model(torch.tensor([[5, ids[2], 9]])).logits
        want = ours(torch.tensor([[5, enrichment.ids[2], 9]])).logits
    base = enrichment.base_vocab_size
    torch.testing.assert_close(theirs[..., :base], want[..., :base])
    torch.testing.assert_close(theirs[..., ids], want[..., list(enrichment.ids)])


def test_enrich_writes_an_export(folder: Path, data: Path, tmp_path: Path, tailor: Tailor) -> None:
    command = ["tasks", "enrich", "--model", folder, "--data", data, "--tokens", 4]
    command += ["-o", tmp_path / "e.json", "--export", tmp_path / "out"]
    assert str(tmp_path / "out") in tailor(*command, "--reads-prompts").out
    assert Enrichment.load(tmp_path / "e.json").prompts
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == model.config.vocab_size > 128
    assert len(tokenizer.encode(" !!ok!! x ##")) < len(" !!ok!! x ##")
    data.unlink()
    told = tailor(*command, status=1).err
    assert told.endswith(f"tailor: {tmp_path / 'out'}: is not empty\n"), "before the data is read"
