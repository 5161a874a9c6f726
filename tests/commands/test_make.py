"""`tailor tasks make`: what the data says, what is kept, and the whole way at tiny size."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drafters.corpus import Corpus
from server.client.bulk import AnswerFile
from server.commands.cli import main
from server.commands.corpus import corpus_of
from server.commands.data import FieldOptions
from server.commands.make import find_fields, num_own_ids, propose, split
from server.config import EngineConfig, ModelConfig, ServerConfig, load_task
from server.datasets import Turn
from server.wiring.server import plan_server
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.commands.command_line import Tailor
from tests.installed import needs
from vocab_store.enrichment import Enrichment

pytestmark = needs("peft")

FIELDS = FieldOptions()


def _turns(*outputs: str) -> list[Turn]:
    return [Turn({"prompt": f"{i}:"}, text) for i, text in enumerate(outputs)]


@pytest.mark.parametrize(
    ("outputs", "metric", "stop"),
    [
        (['{"a": 1}', "[2]"], "json", ("\n",)),
        (["yes", "no way"], "exact", ("\n",)),
        (["one two three four\nfive six", "a b c d e f"], "f1", ("\n\n",)),
        (["word " * 50, "a\n\nb"], "f1", ()),
        (["word " * 50 + "\n", "word " * 60], "rouge_l", ("\n",)),
        (["7", "8"], "exact", ("\n",)),  # numbers are JSON, but no fields
    ],
)
def test_the_data_says_what_counts_and_what_ends(
    outputs: list[str], metric: str, stop: tuple[str, ...]
) -> None:
    found = propose(_turns(*outputs))
    assert (found.metric, found.stop, found.chats) == (metric, stop, False)


def test_a_chat_ends_by_itself() -> None:
    found = propose([Turn({"messages": [{"role": "user", "content": "a"}]}, "b")])
    assert found.chats and found.stop == ()


@pytest.mark.parametrize("text", ["the weather of today", "\u4eca\u5929\u7684\u5929\u6c14"])
def test_the_price_of_a_training_counts_ids(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    turns = [Turn({"prompt": f"{i} {text}?"}, text) for i in range(100)]
    found = num_own_ids(turns, tokenizer)
    ids = sum(len(tokenizer.encode(f"{i} {text}?{text}").ids) for i in range(100))
    assert 0.7 < found / ids < 1.4


class _ColdProducts:
    """A matrix whose first product takes longer than products are timed."""

    def __init__(self) -> None:
        self._takes_s = 0.3

    def __matmul__(self, _: object) -> None:
        time.sleep(self._takes_s)
        self._takes_s = 0.001


def test_the_price_of_a_training_is_that_of_a_warm_machine(
    folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch, tailor: Tailor
) -> None:
    import torch

    ones = torch.ones

    def made(*size: Any, **more: Any) -> Any:
        return _ColdProducts() if size == (512, 512) else ones(*size, **more)

    monkeypatch.setattr(torch, "ones", made)
    words = ["tasks", "make", data, "--name", "c", "--model", folder]
    told = tailor(*words, "--epochs", 1000, "--plan").out
    (line,) = (row for row in told.splitlines() if " train " in row)
    assert re.search(r" about \d+ s ", line), "of the first product it would be minutes"


def test_columns_with_usual_names_are_found() -> None:
    def names(row: dict[str, str], given: FieldOptions = FIELDS) -> tuple[str, str]:
        found = find_fields(row, given)
        return found.prompt_field, found.field

    assert names({"Question": "", "Answer": ""}) == ("Question", "Answer")
    assert names({"prompt": "", "question": "", "label": ""}) == ("prompt", "label")
    assert names({"text": "", "answer": "", "sql": ""}, FieldOptions(field="sql")) == (
        "text", "sql",
    )  # fmt: skip
    assert names({"a": "", "b": ""}) == ("prompt", "completion"), "which the reader then misses"


def test_equal_prompts_are_on_one_side_and_stay_there() -> None:
    turns = [Turn({"prompt": f"{i % 150}"}, str(i)) for i in range(300)]
    learned, held = split(turns)
    assert len(held) == 30 and len(learned) == 270
    asked = {turn.asked["prompt"] for turn in held}
    assert not asked & {turn.asked["prompt"] for turn in learned}
    more, held_then = split([*turns, *(Turn({"prompt": f"new {i}"}, "") for i in range(9))])
    assert not asked - {t.asked["prompt"] for t in held_then} - {t.asked["prompt"] for t in more}


def test_a_prompt_that_many_rows_have_is_learned_from() -> None:
    for often in range(20):
        asked = [often] * 50 + list(range(100, 150))
        learned, held = split([Turn({"prompt": f"{one}"}, "") for one in asked])
        assert len(held) == 10 and len(learned) == 90
        assert f"{often}" not in {turn.asked["prompt"] for turn in held}


# --- the whole way ---


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "train.csv"
    with file.open("w", newline="") as out:
        table = csv.writer(out)
        table.writerow(["question", "answer"])
        for i in range(90):
            table.writerow([f"{'abcdefgh'[i % 8]}{'uvw'[i % 3]}:{i}", f"!!ok!!{'xy'[i % 2]}##"])
    return file


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan times large products to price the training: all cores for a fifth of a second.
    Nor are forms of the weights compared, which choose nothing."""
    monkeypatch.setattr("server.commands.make._Make._training_s", lambda _: 60.0)
    monkeypatch.setattr("server.commands.tasks.compare_forms", lambda *_, **__: {})


def _interrupted_with_an_adapter(*given: Any, adapter: str | None, **more: Any) -> Corpus:
    if adapter is not None:
        raise KeyboardInterrupt
    return corpus_of(*given, **more)


def _interrupted_at_the_adapter(folder: Path, ignore_errors: bool = False, **more: Any) -> None:
    if Path(folder).name == "adapter":
        raise KeyboardInterrupt
    shutil.rmtree(folder, ignore_errors, **more)


def _interrupted_at_the_vocabulary(*_: object) -> None:
    raise KeyboardInterrupt


def _full(_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_from_a_file_to_a_served_task(
    folder: Path, data: Path, tmp_path: Path, request: pytest.FixtureRequest,
    tailor: Tailor, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    output, work = tmp_path / "tasks" / "codes.yaml", tmp_path / "tasks" / "codes.make"
    words = ["tasks", "make", data, "--name", "codes", "-o", output, "--model", folder,
             "--epochs", 20, "--learning-rate", 0.02, "--rows-learning-rate", 0.05,
             "--batch-size", 8, "--rank", 4, "--even-if-busy"]  # fmt: skip
    parts = [*words, "--skip", "tune", "--skip", "evaluate"]
    plan = tailor(*words, "--plan").out
    assert "'question' to 'answer'; 81 to learn from, 9 to judge by" in plan and "in all" in plan
    assert not output.parent.exists(), "a plan writes nothing"
    request.getfixturevalue("priced")

    # The first file is there as soon as the data is read, and is the base model's.
    tailor(*parts, "--skip", "train")
    first = load_task(output)
    assert (first.metric, first.speculation.drafter) == ("exact", "auto")
    assert "--adapter" not in output.read_text()
    base = Corpus.load(str(first.speculation.corpus), fingerprint=None)
    assert base.num_documents == 81, "what is held out is in no corpus"

    # Once there is an adapter, it is the adapter's, its corpus in the ids that this one writes.
    adapter = work / "adapter"
    with monkeypatch.context() as stopped:
        stopped.setattr("server.commands.corpus.corpus_of", _interrupted_with_an_adapter)
        assert "Steps" in tailor(*parts, status=130).err
    told = tailor(*parts).err
    assert "codes: analyze" not in told and "Steps" not in told, "that is done"
    assert f"# Serve: tailor serve --model {folder} --adapter {adapter}" in output.read_text()
    assert 0 < len(Enrichment.load(adapter / "enrichment.json")) <= 50
    private = (
        adapter / "adapter_model.safetensors",
        adapter / "enrichment.json",
        work / "train.jsonl",
    )
    assert all(file.stat().st_mode & 0o077 == 0 for file in private)
    own = Corpus.load(str(load_task(output).speculation.corpus), fingerprint=None)
    assert own.fingerprint != base.fingerprint and own.num_documents == 81
    assert own.num_tokens < 0.6 * base.num_tokens

    before = (adapter / "adapter_model.safetensors").stat().st_mtime_ns
    with monkeypatch.context() as stopped:
        stopped.setattr("server.commands.tune.vocabulary", _interrupted_at_the_vocabulary)
        tailor(*words, status=130)
    assert "# Not whole" in output.read_text() and load_task(output).metric == "exact"
    assert "codes: train" not in tailor(*words).err
    text = output.read_text()
    assert text.startswith("# Made by `tailor tasks tune`") and "# Serve: " in text
    assert "# Evaluated on 9 rows that were held out: exact 100.0%" in text
    assert load_task(output).metric == "exact"
    assert "the longest output has 10\n" in text, "in base ids"
    (right,) = re.findall(r"exact match (\d+)%", text)
    assert int(right) >= 90, "as text, whatever ids it is in"

    # Nothing is made twice; what depends on a changed option is.
    assert "codes:" not in tailor(*words).err
    assert (adapter / "adapter_model.safetensors").stat().st_mtime_ns == before

    def done(*more: str) -> set[str]:
        told = tailor(*words, *more, "--plan").out
        return set(re.findall(r"^  \d (\w+) +done", told, re.MULTILINE))

    for told_of in ("--limit=50", "--description=of codes", "--served-model-name=m"):
        assert done(told_of) == {"analyze", "enrich", "train"}
    output.write_text(f"{text}vocabulary: {{mode: exact, profile: codes.vocab}}\n")
    assert done() == {"analyze", "enrich", "train"}, "the profile is gone"
    output.write_text(text)
    for left, others in (
        (output, {"analyze", "enrich", "train"}),
        (adapter, {"analyze", "enrich"}),
        (work / "enrichment.json", {"analyze", "train", "tune", "evaluate"}),
    ):
        left.rename(tmp_path / "gone")
        assert done() == others, "what is gone is made again"
        (tmp_path / "gone").rename(left)
    weights = folder / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    assert done() == set(), "what was made of other weights"
    weights.write_bytes(kept)
    with AnswerFile(output):
        assert f"{output}: another run is writing to it" in tailor(*words, status=1).err
    corpus = output.with_suffix(".corpus")
    for left in (output, corpus):
        left.unlink()
        tailor(*parts)
        assert f"--adapter {adapter}" in output.read_text() and corpus.exists()
    for without in (["--skip", "train"], []):
        tailor(*parts, *without)
        is_own = Corpus.load(str(corpus), fingerprint=None).fingerprint == own.fingerprint
        assert is_own == ("--adapter" in output.read_text()) == (not without)

    model = ModelConfig(name="m", path="m", adapter=str(adapter), devices=("cpu",))
    tasks = {"codes": load_task(output)}
    plan_server(ServerConfig(models=(model,), engine=EngineConfig()), tasks, {"m": folder})

    # What was stopped before the old adapter was away does not take it for its own.
    other = [*parts, "--seed", 2, "--max-examples", 8]
    with monkeypatch.context() as stopped:
        stopped.setattr(
            "server.commands.make.shutil", SimpleNamespace(rmtree=_interrupted_at_the_adapter)
        )
        tailor(*other, status=130)
    tailor(*other)
    assert json.loads((adapter / "training.json").read_text())["seed"] == 2
    (work / "made.json").unlink()
    assert done() == set(), "stopped behind the first file, and not refused for it"


@pytest.mark.usefixtures("priced")
@pytest.mark.parametrize(
    ("shared", "more", "reads"),
    [
        ("please tell the code of ", [], True),
        ("please tell the code of ", ["--no-reads-prompts"], False),
        ("", [], False),  # these prompts have nothing in common
    ],
)
def test_prompts_are_read_in_own_tokens_where_that_shortens_them(
    shared: str, more: list[str], reads: bool, folder: Path, data: Path, tmp_path: Path,
    tailor: Tailor,
) -> None:  # fmt: skip
    head, *rows = data.read_text().splitlines()
    data.write_text("\n".join([head, *(shared + row for row in rows)]))
    words = ["tasks", "make", data, "--name", "c", "-o", tmp_path / "c.yaml", *more,
             "--model", folder, "--max-examples", 8, "--skip", "tune",
             "--skip", "evaluate"]  # fmt: skip
    told = []
    for only_plan in (["--plan"], [], ["--plan"]):
        out = tailor(*words, *only_plan).out
        told.append(next(line for line in out.splitlines() if " enrich " in line))
    assert Enrichment.load(tmp_path / "c.make/adapter/enrichment.json").prompts is reads
    assert ("prompts read in them, if that pays" in told[0]) == (not more)
    assert "done" in told[2] and ("prompts read in them" in told[2]) == reads


@pytest.mark.parametrize(
    "template",
    # More ids than a step has rows, and than are scored.
    ["{{ messages[0].content }}", "#", "L" * 600, "#" * 1100, None],
)
def test_plain_prompts_are_asked_as_chats_where_answers_are_likelier_there(
    folder: Path, data: Path, tmp_path: Path, template: str | None
) -> None:
    output, work = tmp_path / "c.yaml", tmp_path / "c.make"
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('embeddings": 256', 'embeddings": 2048'))
    left_out = [w for step in ("train", "tune", "evaluate") for w in ("--skip", step)]
    words = ["tasks", "make", str(data), "--name", "c", "-o", str(output), "--model", str(folder)]
    assert main([*words, *left_out]) == 0
    figures = json.loads((work / "made.json").read_text())["form"]["figures"]
    if template is None or "messages" in template or len(template) > 1000:
        assert not figures["chats"], "no template, or one that adds nothing, or too much"
    else:
        nats = figures["nats"]
        assert figures["chats"] == (nats["chat"] < 0.95 * nats["plain"]) == ("L" in template)
    for part in ("train", "test"):
        (first, *_) = (work / f"{part}.jsonl").read_text().splitlines()
        assert ("messages" in json.loads(first)) == figures["chats"]


def test_too_few_rows_for_tokens_are_said_with_the_number_wanted(
    folder: Path, tmp_path: Path, tailor: Tailor
) -> None:
    data = tmp_path / "few.csv"
    # Words without a common pair of letters, each in 8 rows.
    words = ["".join("abcdefghijk"[at * far % 11] for at in range(7)) for far in range(1, 9)]
    with data.open("w", newline="") as out:
        table = csv.writer(out)
        table.writerow(["question", "answer"])
        table.writerows([f"#{i}:", words[i % 8]] for i in range(64))
    words_of = ["tasks", "make", data, "--name", "few", "-o", tmp_path / "few.yaml"]
    told = tailor(*words_of, "--model", folder, "--plan").out
    (line,) = (row for row in told.splitlines() if " enrich " in row)
    assert "left out" in line and "too few rows for tokens" in line
    assert "learned from 10 answers, about 116 rows are wanted" in line


def test_what_cannot_be_made_is_said(
    folder: Path, data: Path, tmp_path: Path, tailor: Tailor, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, output = tmp_path / "short.csv", tmp_path / "t.yaml"
    short.write_text("\n".join(data.read_text().splitlines()[:20]))
    same = tmp_path / "same.csv"
    same.write_text("prompt,answer\n" + "".join(f"what?,{i}\n" for i in range(60)))
    nameless = tmp_path / "d.csv"
    nameless.write_text("question,reply\na,b\n")
    chats, turn = tmp_path / "chats.jsonl", '{"role": "user", "content": "a"}, '
    line = '{"messages": [' + turn + turn.replace("user", "assistant")[:-2] + "]}\n"
    chats.write_text(line.replace('"a"', '"%d"', 1) * 60 % (*range(60),))

    def says(*words: object) -> str:
        shared = ("--name", "t", "-o", output, "--model", folder)
        return tailor("tasks", "make", *words, *shared, status=1).err

    for words, message in (
        ((chats, "--skip", "train"), "chats.jsonl:1: messages: the model has no chat templ"),
        ((short,), "19 rows; 50 are needed"),
        ((same,), "60 rows; 50 are needed, most of them with a prompt of their own"),
        ((nameless,), "d.csv:2: completion: is missing (there are: question, reply)"),
        ((data, "--weights", "int4"), "merged and rounded"),
        ((data, "--device", "cuda:99"), "device cuda:99: "),
        ((data, "--adapter", tmp_path), "holds no adapter_config.json"),
        ((tmp_path / "no.csv",), "No such file"),
    ):
        assert message in says(*words)
    output.write_text("name: t\n")
    assert "--force" in says(data)
    assert not (tmp_path / "t.make").exists()
    monkeypatch.setattr("server.commands.make._Make._write_parts", _full)
    assert f"tailor: {output}: No space left" in says(data, "--force")
