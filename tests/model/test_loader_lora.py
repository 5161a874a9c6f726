"""LoRA merged on read, against peft's own merge_and_unload."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.errors import ModelError, UnsupportedModelError
from server.model.loader import build_module, open_model
from tests.installed import needs
from tests.model.peft_adapters import lora
from tests.model.tiny_models import save_tiny

pytestmark = [needs("peft"), pytest.mark.usefixtures("own_cache")]


def _adapter(model: Any, out: Path, **settings: Any) -> Any:
    """A random adapter saved to `out`, of PEFT's own alpha; returns the merged model."""
    return lora(model, out, 3, **({"lora_alpha": 8} | settings)).merge_and_unload()


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"r": 4, "lora_alpha": 8, "target_modules": ALL}),
        ("qwen2", {"r": 4, "lora_alpha": 3, "target_modules": ALL, "use_rslora": True}),
        (
            "qwen3",
            {
                "r": 4,
                "target_modules": ALL,
                "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 6},
                "alpha_pattern": {"model.layers.0.self_attn.k_proj": 5, "down_proj": 1},
            },
        ),
        ("mistral", {"r": 2, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}),
        ("mistral", {"r": 2, "target_modules": ["lm_head"]}),
        ("gemma3", {"r": 3, "target_modules": "all-linear"}),
    ],
)
def test_merge_equals_peft(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", family)
    base = open_model(tmp_path / "model")
    merged = _adapter(model, tmp_path / "adapter", **settings)
    opened = open_model(tmp_path / "model", adapter=tmp_path / "adapter")
    assert opened.fingerprint != base.fingerprint
    changed = 0
    weights: Any = opened.weights
    plain: Any = base.weights
    for name, value in merged.state_dict().items():
        assert torch.equal(weights.get(name), value), name
        changed += not torch.equal(plain.get(name), value)
    assert changed > 0
    module = build_module(opened, torch.float32, torch.device("cpu"))
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(module(ids).logits, merged(ids).logits)


def _rewrite(
    folder: Path, change: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Change each tensor of an adapter's file; what is in it then."""
    file = folder / "adapter_model.safetensors"
    changed = {name: change(tensor) for name, tensor in load_file(file).items()}
    save_file(changed, file, metadata={"format": "pt"})
    return changed


def test_half_precision_adapter_is_merged_in_float32(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "llama")
    _adapter(model, tmp_path / "adapter", r=4, target_modules=ALL)
    halves = _rewrite(tmp_path / "adapter", torch.Tensor.half)
    name = "model.layers.0.mlp.up_proj.weight"
    prefix = "base_model.model.model.layers.0.mlp.up_proj.lora_"
    delta = halves[prefix + "B.weight"].float() @ halves[prefix + "A.weight"].float()
    base: Any = open_model(tmp_path / "model").weights.get(name)
    got: Any = open_model(tmp_path / "model", adapter=tmp_path / "adapter").weights.get(name)
    assert got.dtype == torch.float32
    assert torch.equal(got, base + delta * 2.0)  # alpha 8 / r 4


# --- refusals -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama, "model", and of a LoRA of all its matrices, "adapter"."""
    folder = tmp_path_factory.mktemp("plain")
    model = save_tiny(folder / "model", "llama")
    _adapter(model, folder / "adapter", r=4, target_modules=ALL)
    return folder


@pytest.fixture
def refused(plain: Path, tmp_path: Path) -> Callable[[str], None]:
    """Opens the model with the adapter in tmp_path, a copy of the plain one, and holds the refusal
    to a reason."""
    shutil.copytree(plain / "adapter", tmp_path, dirs_exist_ok=True)

    def open_it(reason: str) -> None:
        with pytest.raises(ModelError, match=reason):
            open_model(plain / "model", adapter=tmp_path)

    return open_it


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t * float("nan"), "holds nan, which is no weight"),
        (lambda t: t + 1e38, "holds 1e[+]38, which is no weight"),
        (lambda t: t * 0 + 9e5, "changes by numbers that are no weights"),
        (torch.sum, r"in the model, and \[\] x \[\]"),
        (lambda t: t.to(torch.int8), "is stored as I8"),
        (lambda t: t.to(torch.float8_e4m3fn), "is stored as F8_E4M3"),
    ],
)
def test_numbers_that_are_no_weights_are_refused(
    change: Callable[[torch.Tensor], torch.Tensor],
    reason: str,
    refused: Callable[[str], None],
    tmp_path: Path,
) -> None:
    _rewrite(tmp_path, change)
    refused(reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "trains biases"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
        ({"some_future_switch": {"on": 1}}, "some_future_switch"),
        ({"r": 5}, "has rank 4, config says 5"),
        # as a regular expression it runs for ever
        ({"rank_pattern": {"([a-z_.0-9]+)+!": 8}}, "only names of modules are read"),
        ({"rank_pattern": {"q_proj": "4"}}, "r is '4'"),
        ({"r": None}, "r is 'None'"),
        ({"lora_alpha": 1e308}, "lora_alpha is '1e[+]308'"),
        ({"trainable_token_indices": [-1_000_000_000]}, "holds what is no id"),
        ({"trainable_token_indices": [5, 5]}, "names an id twice"),
        ({"trainable_token_indices": [1.5]}, "holds what is no id"),
        ({"trainable_token_indices": {"lm_head": []}}, "holds what is no id, or none"),
    ],
)
def test_adapter_config_is_believed_only_where_known(
    change: dict[str, Any], reason: str, refused: Callable[[str], None], tmp_path: Path
) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    refused(reason)


def test_a_lora_of_the_embedding_is_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "mistral")
    _adapter(model, tmp_path / "adapter", target_modules=["embed_tokens"])
    with pytest.raises(UnsupportedModelError, match="lora_embedding"):
        open_model(tmp_path / "model", adapter=tmp_path / "adapter")


def test_adapter_of_another_model(tmp_path: Path) -> None:
    for name, layers in (("model", 3), ("deeper", 4)):
        model = save_tiny(tmp_path / name, "llama", num_hidden_layers=layers)
    _adapter(model, tmp_path / "adapter", r=4, target_modules=ALL)
    with pytest.raises(ModelError, match=r"layers\.3\.mlp\.down_proj\.weight, which is not there"):
        open_model(tmp_path / "model", adapter=tmp_path / "adapter")
    save_tiny(tmp_path / "wider", "llama", num_hidden_layers=4, intermediate_size=50)
    with pytest.raises(ModelError, match=r"in the model, and \["):
        open_model(tmp_path / "wider", adapter=tmp_path / "adapter")


def test_missing_adapter(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    with pytest.raises(ModelError, match=r"holds no adapter_config\.json"):
        open_model(tmp_path / "model", adapter=tmp_path / "nothing")
