"""The life of a fine-tuned task at tiny size: analyze, enrich, train, serve; what goes wrong."""

from __future__ import annotations

import errno
import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafters.corpus import Corpus
from server.commands.data import FieldOptions, read_task_data
from server.config import EngineConfig, ModelConfig, ServerConfig
from server.training.loop import TrainOptions
from server.types import SpeculationParams
from server.wiring.engine import build_engine
from server.wiring.server import plan_server
from tests.commands.command_line import Tailor
from tests.engine.requests import finish, ids_of, request_of
from tests.installed import needs
from tests.json_lines import write_lines
from vocab_store.enrichment import Enrichment

pytestmark = needs("peft")


def test_from_data_to_a_served_adapter(
    folder: Path, data: Path, tmp_path: Path, tailor: Tailor
) -> None:
    shared = ["--model", folder, "--data", data]
    report = tailor("tasks", "analyze", *shared, "--tokens", 4, "--json").json
    assert min(report["ids_per_answer"].values()) < 0.6 * report["ids_per_answer"]["0"]
    assert report["passes"]["base"]["0"] == pytest.approx(report["ids_per_answer"]["0"])
    assert report["passes"]["base"]["4"] < report["passes"]["base"]["0"]
    assert report["gains"]["1"]["drafting"] > 1.5
    assert report["recommended"] in (1, 2, 3, 4)
    best = report["ids_per_answer"][str(report["recommended"])]
    assert best <= 1.02 * min(report["ids_per_answer"].values())
    # The id that ends every answer is no choice of the tokenizer's: it is in no entropy.
    assert report["entropies"]["0"]["num"] == 54 * (report["ids_per_answer"]["0"] - 1)
    assert report["words"]["outputs"]["k80"] < 10

    told = tailor("tasks", "analyze", *shared, "--tokens", 4, "--details").out
    assert "are enough" in told and "table 1" in told and "H_2" in told
    assert "H_2" not in tailor("tasks", "analyze", *shared, "--tokens", 4).out

    file = tmp_path / "t.enrichment.json"
    printed = tailor("tasks", "enrich", *shared, "--tokens", 4, "-o", file).out
    enrichment = Enrichment.load(file)
    assert "fewer" in printed and str(file) in printed
    assert 1 <= len(enrichment) <= 4

    adapter = tmp_path / "adapter"
    trained = ["tasks", "train", *shared, "--enrichment", file, "-o", adapter,
               "--epochs", 12, "--learning-rate", 0.02, "--rows-learning-rate", 0.05,
               "--batch-size", 8, "--rank", 4, "--saved-as", "float16"]  # fmt: skip
    assert f"--adapter {adapter}" in tailor(*trained).out
    figures = json.loads((adapter / "training.json").read_text())
    assert figures["nats_after"] < 0.2 * figures["nats_before"]
    stored = load_file(adapter / "adapter_model.safetensors")
    kinds = {name.rpartition(".lora_")[1]: tensor.dtype for name, tensor in stored.items()}
    assert kinds == {".lora_": torch.float16, "": torch.float32}
    assert "an adapter is there already" in tailor(*trained, status=1).err

    corpus = tmp_path / "t.corpus"
    built = tailor("corpus", "build", *shared, "--adapter", adapter, "-o", corpus).json
    assert built["tokens"] < 60 * 0.6 * 11
    config = ServerConfig(
        models=(ModelConfig(name="m", path="m", adapter=str(adapter), devices=("cpu",)),),
        engine=EngineConfig(max_num_seqs=2, max_num_batched_tokens=64),
    )
    plan = plan_server(config, {}, {"m": folder})
    model = plan.models["m"]
    engine = build_engine(plan.orders[0])
    try:
        assert Corpus.load(corpus, fingerprint=model.table.fingerprint.hex()).num_documents == 60
        prompt = tuple(model.tokenizer.encode("c:", add_special_tokens=False).ids)
        speculation = SpeculationParams(drafter="auto", corpus=str(corpus))
        asked = request_of("r", prompt, max_tokens=24, ignore_eos=False, speculation=speculation)
        [deltas] = finish(engine, asked).values()
        ids = ids_of(deltas)
        assert deltas[-1].finish_reason == "stop"
        assert model.table.join(ids, skip_special=True) == b"!!ok!!x##"  # its alphabet has no blank
        assert len(ids) < 0.6 * len(enrichment.expand(ids))
    finally:
        engine.close()


@pytest.mark.parametrize("num_prompts", [0, 1, 40])
def test_rows_of_a_prompt_are_held_back_together_where_others_are_left(
    num_prompts: int, weightless: Path, tmp_path: Path
) -> None:
    asked = [{"prompt": f"{i % num_prompts}:"} if num_prompts else {} for i in range(80)]
    file = write_lines(tmp_path / "d.jsonl", [{**row, "completion": "!"} for row in asked])
    found = read_task_data(str(weightless), [file], FieldOptions())
    assert (len(found.train), len(found.held_out)) == (72, 8)
    learned, held = (
        {tuple(prompt) for prompt, _ in part} for part in (found.train, found.held_out)
    )
    assert bool(learned & held) == (num_prompts < 40)


def test_what_was_trained_outlives_a_disk_without_room_for_the_adapter(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tailor: Tailor
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    adapter = tmp_path / "adapter"
    words = ["tasks", "train", "--model", folder, "--data", data, "-o", adapter,
             "--epochs", "0.5", "--rank", "2"]  # fmt: skip
    monkeypatch.setattr(
        "server.training.loop.TrainOptions", partial(TrainOptions, save_every_s=0.0)
    )
    with monkeypatch.context() as disk:
        disk.setattr("server.training.lora.save", full)
        told = tailor(*words, status=1).err
    assert "No space left" in told and "Steps" in told
    assert "Steps" not in tailor(*words).err, "none is done again"
    assert (adapter / "adapter_model.safetensors").is_file()
    assert not (adapter / "checkpoint.pt").exists()


def test_training_without_prompts_or_rows_is_said(
    folder: Path, tmp_path: Path, tailor: Tailor
) -> None:
    lines = [{"question": f"q {i}", "completion": "yes"} for i in range(20)]
    lines.append({"question": "q" * 300, "completion": "y" * 300})
    data = write_lines(tmp_path / "d.jsonl", lines)
    words = ["tasks", "train", "--model", folder, "--data", data, "--epochs", "0.1"]
    for options, is_told in (((), True), (("--prompt-field", "question"), False)):
        told = tailor(*words, *options, "-o", tmp_path / f"a{is_told}").err
        assert ("No row has a prompt (prompt)" in told) == is_told
        assert "1 examples are longer than the model's 256 positions and are left out" in told


def test_what_cannot_be_done_is_said(
    folder: Path, data: Path, tmp_path: Path, tailor: Tailor
) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text(data.read_text().splitlines()[0] + "\n")
    train = ["train", "--data", data, "-o", tmp_path / "a", "--enrichment"]
    for words, message in (
        (["enrich", "--data", short, "-o", tmp_path / "x.json"], "20 are needed"),
        ([*train, data], "no enrichment"),
        ([*train, tmp_path], f"tailor: {tmp_path}: Is a directory"),
        (["analyze", "--data", tmp_path / "none"], "No such file"),
    ):
        assert message in tailor("tasks", *words, "--model", folder, status=1).err
