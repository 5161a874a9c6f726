"""The loader: every family's weights, sharded or not, and what it refuses."""

from __future__ import annotations

import ctypes
import json
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from server.errors import IntegrityError, ModelError, UnsupportedModelError
from server.model import cache_folder
from server.model.loader import build_module, open_model
from tests.model.tiny_models import FAMILIES, save_tiny

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    return path


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_weights_and_forward_equal_transformers(family: str, folder: Path) -> None:
    saved = save_tiny(folder, family)
    opened = open_model(folder)
    state, weights = saved.state_dict(), cast("Any", opened.weights)
    assert set(opened.weights.names()) == set(state)
    for name in opened.weights.names():
        assert torch.equal(weights.get(name), state[name]), name
        assert opened.weights.shape(name) == tuple(state[name].shape)
    module: Any = build_module(opened, torch.float32, torch.device("cpu"))
    is_tied = module.lm_head.weight is module.model.embed_tokens.weight
    assert is_tied == saved.config.tie_word_embeddings
    ids = torch.arange(40)[None] * 3 % 128
    with torch.inference_mode():
        assert torch.equal(module(ids).logits, saved(ids).logits)
    assert not any(p.is_meta or p.requires_grad for p in module.parameters())


def test_sharded_equals_whole(tmp_path: Path) -> None:
    for name, shard in (("one", "1GB"), ("many", "20KB")):
        save_tiny(tmp_path / name, "llama", max_shard_size=shard)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = (cast("Any", open_model(tmp_path / name).weights) for name in ("one", "many"))
    assert one.names() == many.names()
    for name in one.names():
        assert torch.equal(one.get(name), many.get(name))


def test_module_in_bfloat16_keeps_rotary_frequencies(folder: Path) -> None:
    save_tiny(folder, "gemma3")
    module = build_module(open_model(folder), torch.bfloat16, torch.device("cpu"))
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    rotary = {n: b.dtype for n, b in module.named_buffers() if "inv_freq" in n}
    assert rotary and set(rotary.values()) == {torch.float32}


def test_module_owns_its_memory(folder: Path) -> None:
    """Overwriting the file under a running server must not change its weights."""
    save_tiny(folder, "llama")
    module = build_module(open_model(folder), torch.float32, torch.device("cpu"))
    before = module.get_parameter("model.embed_tokens.weight").clone()
    file = folder / "model.safetensors"
    with file.open("r+b") as out:
        out.seek(file.stat().st_size // 2)
        out.write(b"\xff" * (file.stat().st_size // 2))
    assert torch.equal(module.get_parameter("model.embed_tokens.weight"), before)


def test_every_eos_id_is_known(folder: Path) -> None:
    save_tiny(folder, "llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, 4000, True]}))
    assert open_model(folder).eos_token_ids == (2, 5, 7)


def test_fingerprint_follows_weights_and_config(tmp_path: Path) -> None:
    prints = set()
    for name, seed, changes in (
        ("a", 0, {}),
        ("b", 1, {}),
        ("c", 0, {"rms_norm_eps": 1e-5}),
    ):
        save_tiny(tmp_path / name, "llama", seed, **changes)
        prints.add(open_model(tmp_path / name).fingerprint)
    save_tiny(tmp_path / "again", "llama", 0)
    assert len(prints) == 3 and open_model(tmp_path / "again").fingerprint in prints
    for told in ({"files": None}, {"files": ["model.safetensors"], "source_sha256": 7}):
        (tmp_path / "again" / "tailor.json").write_text(json.dumps(told))  # somebody else's
        assert open_model(tmp_path / "again").fingerprint in prints


def test_fingerprint_is_not_hashed_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(folder, "llama")
    first = open_model(folder).fingerprint
    hashed: list[Path] = []
    real = cache_folder.sha256_of

    def noted(path: Path) -> str:
        hashed.append(path)
        return real(path)

    monkeypatch.setattr(cache_folder, "sha256_of", noted)
    assert open_model(folder).fingerprint == first
    assert hashed == []
    # A changed file is hashed again even if its size is the same.
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert open_model(folder).fingerprint != first


def _rewrite(folder: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_extra_and_misshapen_tensors(folder: Path) -> None:
    save_tiny(folder, "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    _rewrite(folder, lambda t: t.update({name: t[name][:-1].clone()}))
    with pytest.raises(ModelError, match=r"up_proj\.weight is \(47, 32\)"):
        open_model(folder)
    _rewrite(folder, lambda t: t.pop(name))
    with pytest.raises(ModelError, match=r"lacks 1 tensors, first model\.layers\.1\.mlp"):
        open_model(folder)
    _rewrite(folder, lambda t: t.update({name: torch.zeros(48, 32), "model.x": torch.zeros(1)}))
    with pytest.raises(UnsupportedModelError, match=r"not computed, first model\.x"):
        open_model(folder)
    _rewrite(folder, lambda t: (t.pop("model.x"), t.update({name: t[name].to(torch.int8)})))
    with pytest.raises(UnsupportedModelError, match="is stored as I8, not as floats"):
        open_model(folder)


def test_broken_folders(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        open_model(folder)
    save_tiny(folder, "llama")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        open_model(folder)
    weights.unlink()
    with pytest.raises(ModelError, match=r"holds no model\.safetensors"):
        open_model(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        open_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        open_model(folder)


def test_index_may_not_leave_the_folder(folder: Path) -> None:
    save_tiny(folder, "llama")
    index = folder / "model.safetensors.index.json"
    for name in ("../../elsewhere.safetensors", ["elsewhere.safetensors"], None):
        index.write_text(json.dumps({"weight_map": {"a": name, "b": "model.safetensors"}}))
        with pytest.raises(ModelError, match=r"index\.json names .*, which is not there"):
            open_model(folder)


def test_peak_memory_is_one_copy(folder: Path) -> None:
    """Loading allocates the model once, plus at most one tensor and small change."""
    save_tiny(folder, "llama", vocab_size=128, hidden_size=512, intermediate_size=4096)
    size, largest = (folder / "model.safetensors").stat().st_size, 4096 * 512 * 4
    opened, done, seen = open_model(folder), threading.Event(), list[int]()

    def watch() -> None:
        while not done.wait(0.001):
            seen.append(private())

    def private() -> int:
        (line,) = [x for x in status.read_text().splitlines() if x.startswith("RssAnon")]
        return int(line.split()[1]) * 1024

    status = Path("/proc/self/status")
    watcher = threading.Thread(target=watch)
    ctypes.CDLL(None).malloc_trim(0)  # else what earlier tests gave back would be used first
    before = private()
    watcher.start()
    module = build_module(opened, torch.float32, torch.device("cpu"))
    done.set()
    watcher.join()
    assert 0.9 * size < max(seen) - before < size + 2 * largest + (32 << 20)
    assert module is not None


def test_real_model(real_model_folder: Path) -> None:
    """The built-in model's greedy text is that of its fp32 weights elsewhere (issue 2)."""
    from tokenizers import Tokenizer

    opened = open_model(real_model_folder)
    assert opened.eos_token_ids == (2,)
    module: Any = build_module(opened, torch.float32, torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(opened.tokenizer_file))
    ids, text = (
        tokenizer.encode(text).ids
        for text in ("The capital of France is", " Paris.\n\nThe answer is: 201")
    )
    with torch.inference_mode():
        likeliest = module(torch.tensor([[*ids, *text]])).logits[0].argmax(-1).tolist()
    assert likeliest[len(ids) - 1 : -1] == text
