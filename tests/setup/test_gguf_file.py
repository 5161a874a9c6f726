"""A GGUF that is served as it is: its own numbers, no conversion, and what cannot be is said."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open

from server.commands.cli import main
from server.config import EngineConfig, ModelConfig
from server.errors import ModelError, UnsupportedModelError
from server.model.build import RunnerSpec, build_runner
from server.model.catalog import Form, cached_folder, gguf_of, model_folder
from server.model.cpu.integers.weights import dequantised, from_ggml
from server.model.gguf_file import GgufWeights
from server.model.gguf_index import GgufIndex
from server.model.gguf_tokenizer import gguf_fields
from server.model.loader import open_model
from server.types import EngineSizes
from tests.model.gguf_models import BLOCKS, finish, write_llama
from tests.processes import run_python


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "tiny.gguf"
    write_llama(path, *BLOCKS)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.getbasetemp() / "gguf-cache"
    monkeypatch.setenv("TAILOR_CACHE_DIR", str(folder))


def test_the_numbers_are_those_of_the_converted_model(model: Path) -> None:
    folder = model_folder(str(model), "file")
    assert gguf_of(folder) == model
    assert not list(folder.glob("*.safetensors")), "nothing is converted"
    opened = open_model(folder)
    weights = opened.weights
    assert isinstance(weights, GgufWeights)
    assert cached_folder(str(model), "file") == folder
    converted = model_folder(str(model))
    with safe_open(converted / "model.safetensors", framework="pt") as reader:
        names = set(reader.keys())
        assert names | {"lm_head.weight"} == set(weights.names())
        for name in names:
            want, got = reader.get_tensor(name).numpy(), weights.get(name)
            if got.dtype == np.uint8:
                got = dequantised(from_ggml(weights.form(name), got))
            assert np.array_equal(got, want), name
    both = [open_model(converted), opened]
    assert both[0].tokenizer_file.read_bytes() == both[1].tokenizer_file.read_bytes()
    assert both[0].eos_token_ids == both[1].eos_token_ids
    assert both[0].fingerprint == both[1].fingerprint, "bigrams and a prior of one serve the other"


def test_a_file_under_two_paths_has_a_folder_for_each(model: Path, tmp_path: Path) -> None:
    """Two containers with one cache folder may mount it differently: neither takes the other's."""
    other = tmp_path / "other.gguf"
    other.write_bytes(model.read_bytes())
    folders = {model_folder(str(path), "file"): path for path in (model, other)}
    assert {folder: gguf_of(folder) for folder in folders} == folders
    assert cached_folder(str(model), "file") in folders and len(folders) == 2
    assert model_folder(str(other)) == model_folder(str(model)), "floats are of the bytes alone"


def test_what_was_fetched_is_opened_without_torch(model: Path) -> None:
    assert main(["models", "fetch", str(model)]) == 0
    code = (
        "import sys; from server.model.loader import open_model;"
        f"found = open_model({str(model_folder(str(model), 'file'))!r}, remembers=True);"
        "assert found.ropes(16)[0].shape[1] and found.num_token_ids;"
        "print(*{'torch', 'transformers', 'tokenizers'} & set(sys.modules))"
    )
    assert run_python("-c", code).split() == []


def test_what_is_computed_is_called_by_its_form(model: Path) -> None:
    """How near the two forms are: tests/model/test_gguf_families.py."""
    sizes = EngineSizes(max_num_seqs=1, kv_bytes=1 << 20)
    forms: tuple[Form, ...] = ("file", "float32")
    for form in forms:
        folder = str(model_folder(str(model), form))
        with closing(build_runner(RunnerSpec("m", folder, sizes, threads=2))) as runner:
            assert runner.info.dtype == form and f":{form}" in runner.info.fingerprint


def test_what_cannot_be_served_as_it_is_says_so(model: Path, tmp_path: Path) -> None:
    floats = tmp_path / "floats.gguf"
    write_llama(floats, "F16")
    with pytest.raises(UnsupportedModelError, match=r"weights: int8"):
        model_folder(str(floats), "file")
    with pytest.raises(ModelError, match="needs a GGUF"):
        model_folder(str(tmp_path), "file")
    folder = model_folder(str(model), "file")
    with pytest.raises(UnsupportedModelError, match="cannot be merged"):
        open_model(folder, adapter=tmp_path)
    with pytest.raises(ValueError, match="needs a GGUF"):
        build_runner(RunnerSpec(name="m", folder=str(folder), weights="int8"))


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [("blk.0.ffn_down.weight", "Q8_1"), ("output_norm.weight", "BF16"),
     ("output_norm.weight", "Q8_0")],
)  # fmt: skip
def test_a_tensor_that_no_kernel_reads_is_made_floats_where_its_form_is_known(
    tensor: str, kind: str, model: Path, tmp_path: Path
) -> None:
    raw, path = bytearray(model.read_bytes()), tmp_path / "other.gguf"
    at = raw.index(tensor.encode()) + len(tensor)
    dimensions = int.from_bytes(raw[at : at + 4], "little")
    at += 4 + 8 * dimensions
    raw[at : at + 4] = int(gguf.GGMLQuantizationType[kind]).to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(UnsupportedModelError, match=rf"{tensor} \({kind.lower()}\) is of no form"):
        model_folder(str(path), "file")
    if kind == "Q8_1":
        with pytest.raises(UnsupportedModelError, match=r"mlp.down_proj.weight is q8_1, which is"):
            model_folder(str(path))
    else:
        weights = open_model(model_folder(str(path), "auto")).floats
        assert weights.get("model.norm.weight").shape == (32,)


def test_a_file_of_ones_own_is_served_as_it_is_unless_something_else_is_asked(model: Path) -> None:
    from server.wiring.model import serves_file

    def asked(engine: EngineConfig | None = None, **given: object) -> bool:
        config = ModelConfig.model_validate({"name": "m", "path": str(model), **given})
        return serves_file(config, engine or EngineConfig())

    assert asked()
    assert not asked(weights="int8")
    assert not asked(dtype="bfloat16")
    assert not asked(adapter="x")
    assert not asked(devices=("cuda",))
    assert not asked(EngineConfig(weights="float32"))
    assert asked(path="smollm2-135m-instruct")
    assert not asked(path="smollm2-135m-instruct", adapter="x")
    assert not asked(path="smollm2-135m-instruct", weights="float32")
    assert not asked(path=str(model.parent))


def test_the_index_is_that_of_ggmls_own_reader(model: Path) -> None:
    index, theirs = GgufIndex(model), gguf.GGUFReader(model)
    assert set(index.tensors) == {tensor.name for tensor in theirs.tensors}
    for _ in range(2):
        for tensor in theirs.tensors:
            own = index.tensors[tensor.name]
            assert own.form == tensor.tensor_type.name.lower()
            assert own.shape == tuple(int(n) for n in reversed(tensor.shape))
            assert np.array_equal(own.data, tensor.data)
        index.release_pages()
    scalars = {
        key: field.contents()
        for key, field in theirs.fields.items()
        if not key.startswith("GGUF.") and not isinstance(field.contents(), list)
    }
    lists = {key: list(value) for key, value in index.fields.items() if isinstance(value, tuple)}
    assert index.fields == scalars | {key: index.fields[key] for key in lists}
    assert lists == {key: theirs.fields[key].contents() for key in lists}
    assert set(lists) == {"tokenizer.ggml.token_type"}, "short ones of numbers, not texts"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw[: len(raw) // 2], "past the file's end"),
        (lambda raw: raw[:100], "no complete GGUF: it ends in its header"),
        (lambda raw: b"", "is empty"),
        (lambda raw: b"PK" + raw[2:], "does not begin with GGUF"),
        (lambda raw: raw[:4] + b"\x01\0\0\0" + raw[8:], "version 1"),
    ],
)
def test_what_is_no_whole_file_says_so(
    change: Callable[[bytes], bytes], words: str, model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(change(model.read_bytes()))
    with pytest.raises(ModelError, match=words):
        GgufIndex(broken)


@pytest.mark.parametrize(
    ("architecture", "eos", "told"),
    [
        ("llama", 2, r"it lacks tokenizer\.ggml\.scores"),
        ("gemma3", 2, ""),
        ("gemma3", True, r"tokenizer\.ggml\.eos_token_id is True, of 3 tokens"),
    ],
)
def test_sentencepiece_needs_scores_but_in_gemma_and_an_end_that_is_an_id(
    architecture: str, eos: int, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "tokens.gguf"
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a", "b", "ab"])
    kind = gguf.GGUFValueType.BOOL if eos is True else gguf.GGUFValueType.UINT32
    writer.add_key_value("tokenizer.ggml.eos_token_id", eos, kind)
    writer.add_tensor("token_embd.weight", np.zeros((3, 8), np.float32))
    finish(writer)
    if not told:
        assert gguf_fields(GgufIndex(file))["tokens"] == ["a", "b", "ab"]
    else:
        with pytest.raises(ModelError, match=told):
            gguf_fields(GgufIndex(file))
