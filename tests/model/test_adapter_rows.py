"""Adapters with rows of their own give the logits that PEFT gives, whoever trained them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from server.errors import ModelError, UnsupportedModelError
from server.model.adapter import EMBEDDING, HEAD
from server.model.loader import build_module, open_model
from tests.installed import needs
from tests.model.peft_adapters import lora, with_tokens
from tests.model.tiny_models import save_tiny
from vocab_store.enrichment import Enrichment

pytestmark = [needs("peft"), pytest.mark.usefixtures("own_cache")]

IDS = torch.arange(20)[None]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_tokens_of_a_trained_adapter_are_served(family: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", family)
    num = model.config.vocab_size
    enrichment = Enrichment("tok", num, (num, num + 1, num + 2), ((3, 4), (5, 6, 7), (8, 9)))
    tuned = with_tokens(model, tmp_path / "adapter", enrichment, 4)

    base = open_model(tmp_path / "model")
    opened = open_model(tmp_path / "model", adapter=tmp_path / "adapter")
    assert opened.enrichment == enrichment
    assert opened.config.vocab_size == num + 3
    assert opened.num_token_ids == num + 3
    assert opened.fingerprint != base.fingerprint
    got: Any = opened.weights
    for table in (EMBEDDING, HEAD):
        assert opened.weights.shape(table) == (num + 3, base.weights.shape(table)[1])
        assert torch.equal(got.get(table)[:num], cast("Any", base.weights).get(table))
    merged = tuned.merge_and_unload()
    module = build_module(opened, torch.float32, torch.device("cpu"))
    ids = torch.tensor([[3, num, 11, num + 2, num + 1]])
    with torch.inference_mode():
        expected, found = merged(ids).logits, module(ids).logits
    assert expected.shape[-1] == num + 3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_enrichment_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "llama")
    num = model.config.vocab_size
    with_tokens(model, tmp_path / "adapter", Enrichment("t", num, (num,), ((1, 2),)))
    before = open_model(tmp_path / "model", adapter=tmp_path / "adapter").fingerprint
    # Nobody checks what an adapter's folder says of itself: it may not pass for another adapter.
    told = {"files": {"adapter_model.safetensors": "0"}, "source_sha256": "0"}
    (tmp_path / "adapter" / "tailor.json").write_text(json.dumps(told))
    assert open_model(tmp_path / "model", adapter=tmp_path / "adapter").fingerprint == before
    Enrichment("t", num, (num,), ((1, 3),)).save(tmp_path / "adapter" / "enrichment.json")
    assert open_model(tmp_path / "model", adapter=tmp_path / "adapter").fingerprint != before


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_rows_of_base_ids_are_put_in_as_peft_does(family: str, tmp_path: Path) -> None:
    """A tied head has the embedding's new rows, a head of its own does not."""
    model = save_tiny(tmp_path / "model", family)
    rows: dict[str, Any] = {"r": 2, "trainable_token_indices": [3, 17]}
    wrapped = lora(model, tmp_path / "adapter", 4, target_modules=["q_proj"], **rows)
    opened = open_model(tmp_path / "model", adapter=tmp_path / "adapter")
    module = build_module(opened, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        expected = wrapped.merge_and_unload()(IDS).logits
        torch.testing.assert_close(module(IDS).logits, expected, rtol=0, atol=1e-5)


def test_ids_without_a_text_or_without_a_row_are_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "llama")
    num = model.config.vocab_size
    enrichment = Enrichment("t", num, (num, num + 1), ((1, 2), (3, 4)))
    with_tokens(model, tmp_path / "adapter", enrichment)
    file = tmp_path / "adapter" / "enrichment.json"

    def refused(error: type[Exception], reason: str) -> None:
        with pytest.raises(error, match=reason):
            open_model(tmp_path / "model", adapter=tmp_path / "adapter")

    file.unlink()
    refused(UnsupportedModelError, "what they stand for")
    Enrichment("t", num - 1, (num - 1, num), ((1, 2), (3, 4))).save(file)
    refused(ModelError, "no row|base ids")
    Enrichment("t", num, (num, num + 1, num + 2), ((1, 2), (3, 4), (5, 6))).save(file)
    refused(ModelError, "names ids that have no row")
    file.write_text("{}")
    refused(ModelError, "no enrichment")
    enrichment.save(file)
    config_file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(config_file.read_text())
    rows = {"embed_tokens": [num, num + 2], "lm_head": [num, num + 2]}
    config_file.write_text(json.dumps(config | {"trainable_token_indices": rows}))
    refused(ModelError, "no row|do not follow")
    config_file.write_text(json.dumps(config | {"trainable_token_indices": {"mlp.up_proj": [1]}}))
    refused(UnsupportedModelError, "up_proj")
