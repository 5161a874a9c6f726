"""Quantised weights that are kept: mapped by the next start, and which layers are in blocks."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from server.commands.cli import main
from server.engine.batch import Runner
from server.errors import IntegrityError
from server.model import packed_folder
from server.model.build import RunnerSpec, build_runner
from server.model.cache_folder import cache_dir
from server.model.cpu.integers import outliers, packed, weights
from server.model.cpu.integers.forms import BY_NAME
from server.model.cpu.integers.outliers import errors, factors_of
from server.model.cpu.integers.weights import dequantised, quantised, spread, spread_weights
from server.model.cpu.tensors import Rows
from server.model.scoring import Text, prompt_batch, score
from server.types import EngineSizes
from tests.model.batches import run
from tests.model.tiny_models import save_tiny

TEXTS = [Text(tuple(range(3, 60)), 1), Text(tuple(range(90, 40, -1)), 1)]
WIDE = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(autouse=True)
def cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packed_folder, "WORTH_BYTES", 0)
    return own_cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_tiny(made, "llama", **WIDE)
    return made


def _runner(folder: Path, form: str) -> Runner:
    sizes = EngineSizes(max_num_seqs=1, max_num_batched_tokens=64, kv_bytes=1 << 20)
    spec = RunnerSpec(name="m", folder=str(folder), weights=form, sizes=sizes, threads=2)
    return build_runner(spec)


def _weights(runner: Any) -> Any:
    """What a runner multiplies by."""
    return runner._weights


def _logprobs(folder: Path, form: str) -> np.ndarray[Any, Any]:
    runner = _runner(folder, form)
    found = score(runner, TEXTS).logprobs
    runner.close()
    return found


def _one_kept(cache: Path) -> Path:
    (found,) = (cache / "models").glob("packed-*")
    return found


def _measured(answer: Callable[[int], tuple[float, float]]) -> Callable[..., tuple[float, float]]:
    seen = iter(range(10_000))
    return lambda x, parts, factors: answer(next(seen))


@pytest.mark.parametrize("form", ["int8", "int8-blocks", "int4"])
def test_the_second_start_maps_what_the_first_one_made(
    form: str, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _logprobs(folder, form)
    assert (_one_kept(cache) / "panels.bin").stat().st_size > 0
    with monkeypatch.context() as patch:
        for name in ("quantised", "pack"):
            patch.setattr(packed, name, None)  # nothing is made again
        patch.setattr(packed_folder, "_measured", None)
        runner: Any = _runner(folder, form)
        assert isinstance(_weights(runner).parts["head"][0].panels, np.memmap)
        assert np.array_equal(score(runner, TEXTS).logprobs, first)
        runner.close()
    # Other weights, or another form, are not what is kept.
    other = folder.parent / "other"
    save_tiny(other, "llama", seed=1, **WIDE)
    assert not np.array_equal(_logprobs(other, form), first)


def test_a_damaged_folder_is_named_and_not_served(folder: Path, cache: Path) -> None:
    _logprobs(folder, "int4")
    panels = _one_kept(cache) / "panels.bin"
    panels.chmod(0o644)
    raw = bytearray(panels.read_bytes())
    raw[len(raw) // 2] ^= 1
    panels.write_bytes(raw)
    with pytest.raises(IntegrityError, match=r"Delete this folder.*packed-"):
        _runner(folder, "int4")


def test_a_full_disk_costs_the_next_start_its_time(
    folder: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packed_folder, "write_panels", full)
    with caplog.at_level(logging.WARNING):
        assert np.isfinite(_logprobs(folder, "int4")).all()
    assert "Free space there" in caplog.text and str(cache) in caplog.text
    assert not list((cache / "models").glob("*packed-*/"))


def test_layers_with_outliers_are_in_blocks_and_are_listed(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(outliers, "errors", _measured(lambda _: (1.0, 0.0)))
    assert np.array_equal(_logprobs(folder, "int8"), _logprobs(folder, "int8-blocks"))
    for place in (cache_dir() / "models").glob("packed-*"):
        shutil.rmtree(place)
    # Four products of each layer, and the head: one of the first layer's, and the head.
    head = 4 * int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])
    asked = _measured(lambda n: (1.0 if n in (0, head) else 0.0, 0.0))
    monkeypatch.setattr(outliers, "errors", asked)
    with caplog.at_level(logging.INFO):
        mixed = _logprobs(folder, "int8")
    assert "inputs spread; in blocks:" in caplog.text and "of layers 0, head)" in caplog.text
    assert not np.array_equal(mixed, _logprobs(folder, "int8-blocks"))
    assert main(["models", "show", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "weights int8 " in out and "of layers 0, head" in out and "weights int8-blocks" in out


def test_without_outliers_nothing_is_in_blocks(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        runner: Any = _runner(folder, "int8")
    forms = {part.form.name for parts in _weights(runner).parts.values() for part in parts}
    runner.close()
    assert forms == {"int8"}
    assert "inputs spread; in blocks: none" in caplog.text
    assert main(["models", "show", str(folder)]) == 0
    assert "in blocks: none" in capsys.readouterr().out


def test_inputs_that_are_much_larger_and_say_nothing_are_outliers() -> None:
    """A block of a row that is large and whose products cancel; in each row another, so that no
    factor helps."""
    rng = np.random.default_rng(0)
    signs = np.repeat(np.array([1.0, -1.0], np.float32), 16)
    weight = rng.permuted(np.tile(signs, (64, 8, 1)), axis=2).reshape(64, 256)
    parts = [Rows("w", torch.from_numpy(weight))]
    x = rng.normal(size=(24, 256)).astype(np.float32)
    one, blocks = errors(x, parts, factors_of(x, parts))
    assert one < outliers.LIMIT and blocks < outliers.LIMIT
    for row in range(24):
        x[row].reshape(8, 32)[row % 8] = 1000
    one, blocks = errors(x, parts, factors_of(x, parts))
    assert blocks < outliers.LIMIT < one


def test_an_input_that_is_always_larger_is_no_outlier_once_it_is_spread() -> None:
    rng = np.random.default_rng(5)
    parts = [Rows("w", torch.from_numpy(rng.normal(size=(64, 250)).astype(np.float32)))]
    x = rng.normal(size=(20, 250)).astype(np.float32)
    x[:, 7] *= 100
    x[:, 9] *= 0
    factors = factors_of(x, parts)
    assert factors.shape == (256,) and np.isfinite(factors).all() and (factors > 0).all()
    one, blocks = errors(x, parts, factors)
    assert one < blocks and one < outliers.LIMIT
    assert one < errors(x, parts, np.ones(256, np.float32))[0]
    # A row counts for as much as another, however large it is.
    x[3] *= 2.0**40
    assert np.array_equal(factors_of(x, parts), factors)


def test_what_is_measured_is_exact_and_the_same_in_any_order_of_sums() -> None:
    rng = np.random.default_rng(1)
    weight = (rng.normal(size=(5000, 96)) * np.exp(rng.normal(size=(5000, 1)))).astype(np.float32)
    x = (rng.normal(size=(9, 96)) * np.exp(2 * rng.normal(size=(9, 1)))).astype(np.float32)
    x[:, 40] *= 50
    x[3], weight[7] = 0.0, 0.0
    factors = np.exp(rng.normal(size=96)).astype(np.float32)
    found = errors(x, [Rows("w", torch.from_numpy(weight))], factors)
    # Another order of blocks, of outputs, of parts and of rows.
    inputs = np.concatenate([np.arange(b, b + 32) for b in (64, 0, 32)])
    outputs = rng.permutation(5000)
    mixed = torch.from_numpy(weight[outputs][:, inputs].copy())
    parts = [Rows("a", mixed[:300]), Rows("b", mixed[300:])]
    x, weight = x[rng.permutation(9)][:, inputs].copy(), mixed.numpy()
    assert errors(x, parts, factors[inputs]) == found
    assert np.array_equal(
        factors_of(x, parts),
        factors_of(x[:, inputs], [Rows("w", mixed[:, inputs])])[inputs.argsort()],
    )
    want = x.astype(np.float64) @ weight.T.astype(np.float64)
    spread_x, spread_w = spread(x, factors[inputs]), spread_weights(weight, factors[inputs])
    ways = (("int8", 96, spread_x, spread_w, found[0]), ("q8_0", 32, x, weight, found[1]))
    for form, width, inputs_, matrix, value in ways:
        stored = dequantised(quantised(BY_NAME[form], matrix)).astype(np.float64)
        got = outliers.rounded(inputs_, width).astype(np.float64) @ stored.T
        rows = np.linalg.norm(got - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), 1e-20)
        assert value == pytest.approx(rows.mean(), rel=2e-3)


def test_what_is_measured_is_what_goes_into_the_products(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers: the inputs of its linear layers on the same ids."""
    import transformers
    from tokenizers import Tokenizer

    seen: dict[str, np.ndarray[Any, Any]] = {}

    def noted(x: np.ndarray[Any, Any], parts: list[Rows], _: Any) -> tuple[float, float]:
        seen[parts[0].name] = np.array(x)
        return 0.0, 0.0

    monkeypatch.setattr(outliers, "errors", noted)
    _runner(folder, "int8").close()
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(outliers.TEXT).ids
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted: dict[str, np.ndarray[Any, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):

            def note(_: Any, args: Any, name: str = f"{name}.weight") -> None:
                wanted[name] = args[0][0].numpy()

            module.register_forward_pre_hook(note)
    (num, _) = next(iter(seen.values())).shape
    with torch.no_grad():
        model(torch.tensor([ids[:num]]))
    assert len(seen) == 4 * model.config.num_hidden_layers + 1
    head = seen.pop(
        "model.embed_tokens.weight" if "lm_head.weight" not in seen else "lm_head.weight"
    )
    seen["lm_head.weight"] = head
    for name, x in seen.items():
        error = np.linalg.norm(x - wanted[name]) / np.linalg.norm(wanted[name])
        assert error < 0.4, name  # rounded to 8 bits on the way; of another tensor it is above 1


def test_layers_one_by_one_give_what_a_step_gives(folder: Path) -> None:
    runner: Any = _runner(folder, "int8-blocks")
    batch = prompt_batch(TEXTS[0])
    run(runner, batch)
    whole = np.array(runner.embed(batch).hidden)
    for layer in range(len(_weights(runner).layers.norms)):
        buffers = runner.run_layer(batch, layer)
    runner.close()
    assert whole[: batch.num_rows].any() and np.array_equal(buffers.hidden, whole)


def test_layers_are_told_as_runs() -> None:
    told = weights.told({"down": (0, 1, 2), "qkv": (0, 2)}, 3)
    assert told == "down, qkv of layers 0, 2"
    assert weights.told({"out": (1, 2, 3, 7), "head": (0,)}, 9) == "out of layers 1-3, 7, head"
