"""Many adapters on one base over HTTP: named like models, mixed in a batch, loaded and unloaded."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import pytest
import torch
from pydantic import SecretStr

from drafters import DRAFTER_NAMES
from drafters.corpus import Corpus
from drafters.learned import LearnedOutputs
from server.api.engines.client import EngineSpec
from server.config import (
    AdapterConfig,
    EngineConfig,
    KeyConfig,
    ModelConfig,
    ServerConfig,
    SpeculationConfig,
    TaskConfig,
)
from server.errors import ConfigError
from server.wiring.engine import EngineOrder, build_engine
from server.wiring.model import served_model
from server.wiring.server import plan_server
from server.wiring.task_set import build_upload
from tests.api.live import LiveServer
from tests.api.orders import decisions, orders
from tests.commands.command_line import Tailor
from tests.fakes.engine_thread import start_thread
from tests.installed import needs
from tests.model.peft_adapters import enriched, lora
from tests.model.tiny_models import save_tiny, tiny_model
from tests.waiting import wait_until

pytestmark = needs("peft")

V, NEW, MANY = 128, 5, 12
PROMPTS = ["ab cd", "12345", "the cat", "x"]


@dataclass
class Served:
    """A server with the adapters plain, own and a0 .. a11, four of them in memory at once."""

    server: LiveServer
    folder: Path
    peft: dict[str, Any]

    def client(self, key: str = "admin-key") -> openai.OpenAI:
        return self.server.openai(key)

    def post(self, path: str, body: dict[str, Any], key: str = "admin-key") -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(self.server.url + path, json=body, headers=headers, timeout=60)

    def ask(self, model: str, prompt: str, **more: Any) -> tuple[list[int], str]:
        """(ids, text) of a greedy answer."""
        body = {"temperature": 0.0, "max_tokens": 12, **more}
        extra = {"return_token_ids": True, "ignore_eos": True, **body.pop("extra_body", {})}
        answer = self.client().completions.create(
            model=model, prompt=prompt, extra_body=extra, **body
        )
        [choice] = answer.choices
        return choice.token_ids, choice.text


def _copies(source: Path, target: Path, num: int) -> list[AdapterConfig]:
    """Adapters like one that PEFT saved, each with its own numbers."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "adapter_model.safetensors")
    made = []
    for i in range(num):
        folder = target / f"a{i}"
        shutil.copytree(source, folder)
        factor = 1.0 + i / num
        save_file({k: t * factor for k, t in tensors.items()}, folder / "adapter_model.safetensors")
        made.append(AdapterConfig(name=f"a{i}", path=str(folder)))
    return made


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters")
    patch = pytest.MonkeyPatch()
    patch.setenv("TAILOR_CACHE_DIR", str(folder / "cache"))
    save_tiny(folder / "tiny", "llama")
    base = served_model(ModelConfig(name="m", path="m"), folder / "tiny", None)
    tokenizer = base.table.fingerprint.hex()
    peft = {
        "plain": lora(tiny_model("llama"), folder / "plain", 1),
        "own": enriched(tiny_model("llama"), folder / "own", 2, NEW, tokenizer),
    }
    adapters = (
        AdapterConfig(name="plain", path=str(folder / "plain"), pinned=True),
        AdapterConfig(name="own", path=str(folder / "own")),
        *_copies(folder / "plain", folder, MANY),
    )
    config = ServerConfig(
        models=(ModelConfig(name="m", path="m", adapters=adapters),),
        engine=EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, max_adapters=4),
        keys=(
            KeyConfig(id="ops", key=SecretStr("admin-key"), admin=True),
            KeyConfig(id="team", key=SecretStr("team-key"), tasks=("plain", "slots")),
        ),
    )
    tasks = {
        "slots": TaskConfig(name="slots", adapter="own"),
        "off": TaskConfig(name="off", speculation=SpeculationConfig(drafter="off")),
    }
    plan = plan_server(config, tasks, {"m": folder / "tiny"})
    order = replace(plan.orders[0], drafters=("off", "auto"))
    engine = build_engine(order)  # may have to compile: no server waits for it
    start = functools.partial(start_thread, lambda: engine)
    with LiveServer(
        [EngineSpec(order.name, "m", "cpu", start)],
        config=config,
        tasks=plan.tasks,
        models=plan.models,
        drafters=DRAFTER_NAMES,
        task_admin=plan.task_set,
    ) as server:
        yield Served(server, folder, peft)
    patch.undo()


def test_they_are_listed_as_vllm_lists_them(served: Served) -> None:
    listed = {model.id: model for model in served.client().models.list()}
    assert {"m", "plain", "own", "a0", "a11", "slots"} <= set(listed)
    plain = listed["plain"].model_dump()
    assert plain["parent"] == "m" and plain["root"] == str(served.folder / "plain")
    assert listed["m"].model_dump()["parent"] is None
    assert served.client().models.retrieve("own").model_dump()["parent"] == "m"
    team = {model.id for model in served.client("team-key").models.list()}
    assert team == {"plain", "slots"}
    with pytest.raises(openai.NotFoundError):
        served.client("team-key").completions.create(model="own", prompt="x", max_tokens=1)
    served.client("team-key").completions.create(model="plain", prompt="x", max_tokens=1)


def test_answers_are_those_of_peft(served: Served) -> None:
    for name, model in served.peft.items():
        for prompt in PROMPTS:
            ids, _ = served.ask(name, prompt)
            response = served.post("/tokenize", {"model": name, "prompt": prompt})
            asked = torch.tensor([response.json()["tokens"]])
            with torch.no_grad():
                theirs = model.generate(
                    input_ids=asked, max_new_tokens=12, do_sample=False, eos_token_id=None,
                    pad_token_id=0,
                )  # fmt: skip
            assert ids == theirs[0, asked.shape[1] :].tolist()


def test_any_mix_gives_each_its_own_answer(served: Served) -> None:
    models = ["m", "plain", "own", "slots", "a3", "off"]
    want = {(model, prompt): served.ask(model, prompt) for model in models for prompt in PROMPTS}
    assert len({tuple(want[model, "ab cd"][0]) for model in models}) == 4
    assert want["slots", "x"] == want["own", "x"] and want["off", "x"] == want["m", "x"]
    jobs = list(want) * 3
    Random(1).shuffle(jobs)
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda job: served.ask(*job), jobs))
    assert got == [want[job] for job in jobs]
    sampled = {"temperature": 1.0, "seed": 5}
    plain = {"speculation": {"drafter": "off"}}
    for model in ("own", "plain"):
        drafted = served.ask(model, "ab cd", **sampled)
        assert drafted == served.ask(model, "ab cd", extra_body=plain, **sampled)


def test_many_adapters_share_four_places(served: Served) -> None:
    names = [f"a{i}" for i in range(MANY)]
    want = {name: served.ask(name, "ab cd") for name in names}
    assert len({tuple(ids) for ids, _ in want.values()}) > 5
    Random(2).shuffle(names)
    with ThreadPoolExecutor(3) as pool:  # one place is pinned, three are left
        assert list(pool.map(lambda name: served.ask(name, "ab cd"), names)) == [
            want[name] for name in names
        ]


def test_figures_are_told_by_name(served: Served) -> None:
    def sample(name: str) -> float:
        return served.server.sample(f"tailor_adapter_{name}", adapter="plain")

    before = sample("requests_total")
    served.ask("plain", "ab cd")
    wait_until(lambda: sample("requests_total") == before + 1)
    assert sample("loads_total") >= 1
    assert sample("bytes") > 0
    assert sample("evictions_total") == 0  # it is pinned


def test_ids_of_its_own_have_text_and_are_nobody_elses(served: Served) -> None:
    new = {str(V + i): 100 for i in range(NEW)}
    ids, text = served.ask("own", "ab cd", logit_bias=new)
    assert all(i >= V for i in ids)
    expanded = [part for i in ids for part in (3 + i - V, 4 + i - V)]
    assert (
        served.ask("own", "ab cd", logit_bias=new, stop=text[5:7])[1]
        == text[: text.find(text[5:7])]
    )
    answer = served.client().completions.create(
        model="own", prompt="ab cd", max_tokens=3, logit_bias=new, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    details = answer.usage.completion_tokens_details
    assert details is not None and details.model_dump()["base_tokens"] == 6
    plain = served.client().completions.create(model="m", prompt="ab cd", max_tokens=3).usage
    assert plain is not None and plain.completion_tokens_details is not None
    assert "base_tokens" not in plain.completion_tokens_details.model_dump()
    told = served.post("/detokenize", {"model": "m", "tokens": expanded}).json()["prompt"]
    assert text == told
    for model in ("m", "plain"):
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            served.ask(model, "x", logit_bias=new)


def test_decisions_are_those_of_each_adapter(served: Served) -> None:
    """The softmax over the labels of PEFT's own model, whoever else is asked at the time."""
    questions = [
        {"type": "predicate", "instructions": "It is so."},
        {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]},
    ]

    def decide(model: str) -> list[dict[str, Any]]:
        body = {"model": model, "input": "ab cd", "questions": questions}
        answer = served.post("/v1/decisions", body)
        assert answer.status_code == 200, answer.text
        answers: list[dict[str, Any]] = answer.json()["answers"]
        return answers

    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(("m", *served.peft), pool.map(decide, ("m", *served.peft)), strict=True))
    requests = decisions(orders(models=list(served.server.models.values())), "ab cd", questions)
    for name, model in served.peft.items():
        for request, answer in zip(requests, found[name], strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([request.prompt_ids])).logits[0, -1].double()
            want = torch.softmax(logits[list(request.label_ids)], dim=0).tolist()
            got = (
                [answer["probability"]]
                if answer["type"] == "predicate"
                else [p["probability"] for p in answer["probabilities"]]
            )
            assert got == pytest.approx(want[: len(got)], abs=1e-3)
        assert found[name] != found["m"]


def test_a_grammar_speaks_an_adapters_ids(served: Served) -> None:
    regex = {"structured_outputs": {"regex": "[a-z]{9}"}, "ignore_eos": False}
    with ThreadPoolExecutor(2) as pool:
        own, base = pool.map(lambda m: served.ask(m, "ab", extra_body=regex)[1], ("own", "m"))
    for text in (own, base):
        assert len(text) == 9 and text.isalpha() and text.islower()


def test_uploaded_examples_are_written_in_an_adapters_ids(served: Served, tmp_path: Path) -> None:
    text = served.post("/detokenize", {"model": "m", "tokens": [3, 4, 5, 6]}).json()["prompt"]
    made = build_upload(
        served.folder / "tiny", [{"prompt": text, "completion": text}] * 3, None, tmp_path,
        "ab" * 32, served.folder / "own" / "enrichment.json",
    )  # fmt: skip
    assert made["fingerprint"] == "ab" * 32
    corpus = Corpus.load(tmp_path / made["corpus"], fingerprint="ab" * 32)
    assert corpus.num_tokens < 3 * 5  # (3, 4) and (5, 6) are one id each, and the end
    held = LearnedOutputs(1 << 20)
    held.restore(tmp_path / made["examples"], fingerprint="ab" * 32, scope="upload")
    (prompt, output), *_ = held.examples()
    assert prompt.tolist() == [3, 4, 5, 6] and output.tolist()[:2] == [V, V + 2]


def test_load_and_unload(served: Served, tmp_path: Path) -> None:
    lora(tiny_model("llama"), tmp_path / "new", 7)
    body = {"lora_name": "new", "lora_path": str(tmp_path / "new")}
    assert served.post("/v1/load_lora_adapter", body, "team-key").status_code == 403
    assert served.post("/v1/load_lora_adapter", {**body, "lora_name": "m"}).status_code == 400
    loaded = served.post("/v1/load_lora_adapter", body)
    assert (loaded.status_code, "added successfully" in loaded.text) == (200, True)
    first = served.ask("new", "ab cd")
    assert first != served.ask("m", "ab cd")
    again = served.post("/v1/load_lora_adapter", body)
    assert again.status_code == 400 and "already been loaded" in again.json()["error"]["message"]
    lora(tiny_model("llama"), tmp_path / "new", 8)
    assert served.post("/v1/load_lora_adapter", {**body, "load_inplace": True}).status_code == 200
    assert served.ask("new", "ab cd") != first
    name = {"lora_name": "new"}
    unloaded = served.post("/v1/unload_lora_adapter", name)
    assert (unloaded.status_code, "removed successfully" in unloaded.text) == (200, True)
    with pytest.raises(openai.NotFoundError):
        served.ask("new", "x")
    assert served.post("/v1/unload_lora_adapter", name).status_code == 404
    used = served.post("/v1/unload_lora_adapter", {"lora_name": "own"})
    assert used.status_code == 400 and "slots" in used.json()["error"]["message"]


def test_the_command_line_adds_lists_and_removes(
    served: Served, tmp_path: Path, tailor: Tailor
) -> None:
    lora(tiny_model("llama"), tmp_path / "new", 7)
    server = ["--url", served.server.url, "--api-key", "admin-key"]
    tailor("adapters", "add", "typed", tmp_path / "new", "--pinned", *server)
    printed = tailor("adapters", "list", *server).out
    assert f"typed\tof m\t{tmp_path / 'new'}" in printed and "slots" not in printed
    tailor("adapters", "rm", "typed", *server)
    assert "cannot be found" in tailor("adapters", "rm", "typed", *server, status=1).err


@pytest.mark.parametrize(
    ("settings", "reason"), [({"use_dora": True}, "use_dora"), ({"r": 0}, "adapter_model")]
)
def test_what_cannot_be_served_is_refused_by_name(
    settings: dict[str, Any], reason: str, served: Served, tmp_path: Path
) -> None:
    if settings.get("r") == 0:
        (tmp_path / "adapter_config.json").write_text("{}")
    else:
        lora(tiny_model("llama"), tmp_path, 7, **settings)
    body = {"lora_name": "bad", "lora_path": str(tmp_path)}
    refused = served.post("/v1/load_lora_adapter", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "lora_path"
    assert reason in refused.json()["error"]["message"]
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "bad"}).status_code == 404


def test_what_a_configuration_may_not_say(served: Served, tmp_path: Path) -> None:
    one = AdapterConfig(name="plain", path=str(served.folder / "plain"))
    model = ModelConfig(name="m", path="m", adapters=(one,))

    def planned(*tasks: TaskConfig, keys: tuple[KeyConfig, ...] = (), **more: Any) -> EngineOrder:
        config = ServerConfig(models=(model.model_copy(update=more),), keys=keys)
        named = {task.name: task for task in tasks}
        [order] = plan_server(config, named, {"m": served.folder / "tiny"}).orders
        return order

    with pytest.raises(ConfigError, match="no adapter of the model"):
        planned(TaskConfig(name="t", adapter="gone"))
    with pytest.raises(ConfigError, match="same name"):
        planned(TaskConfig(name="plain"))
    with pytest.raises(ConfigError, match="task fast: an adapter or an alias has the same name"):
        planned(TaskConfig(name="fast"), aliases=("fast",))
    order = planned(devices=("cuda",))
    assert [a.adapter_id.partition("@")[0] for a in order.adapters] == ["plain"]
    beside = [adapter.folder for adapter in order.adapters]
    assert (beside, order.runner.adapter_places) == ([one.path], 1), "what the KV cache leaves"
    admin = KeyConfig(id="ops", key=SecretStr("admin-key"), admin=True)
    order = planned(keys=(admin,), adapters=())
    assert (order.adapters, order.runner.adapter_places) == ((), EngineConfig().max_adapters)
    with pytest.raises(ValueError, match="twice"):
        ServerConfig(models=(model.model_copy(update={"adapters": (one, one)}),))
    with pytest.raises(ValueError, match="give one of them"):
        ModelConfig(name="m", path="m", adapter="x", adapters=(one,))
    shutil.copytree(served.folder / "plain", tmp_path / "broken")
    file = tmp_path / "broken" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
    order = planned(adapters=(one.model_copy(update={"path": str(file.parent)}),))
    with pytest.raises(Exception, match="use_dora"):
        build_engine(order)
    build_engine(replace(order, checks_adapters=False)).close()
