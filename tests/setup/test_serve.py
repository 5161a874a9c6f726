"""`tailor serve` as a person runs it: processes, signals, a real socket, a tiny real model."""

from __future__ import annotations

import gc
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import urllib.error
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer

from drafters import DRAFTER_NAMES
from drafters.corpus import Corpus, build_corpus
from server.api.serving import listen
from server.commands.cli import main
from server.config import EngineConfig, ModelConfig, ServerConfig, TaskConfig
from server.errors import ConfigError, ModelError, UnsupportedModelError
from server.types import SpeculationParams
from server.wiring.drafter import FilesRead, make_task_drafter
from server.wiring.model import served_model
from server.wiring.server import plan_server
from tests.api.live import as_key
from tests.model.gguf_models import BLOCKS, write_llama
from tests.processes import TAILOR, Running, run_python
from tests.setup.serve_here import serve_here
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a server's tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    shutil.copy(ROOT / "configs" / "tasks" / "extraction.yaml", folder)
    (folder / "known.yaml").write_text("speculation: {drafter: auto, learn: persist}\n")
    return folder


@pytest.fixture(scope="module")
def place(
    tiny_file: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], dict[str, str]]:
    """The words of the server, and its environment."""
    return ["--model", str(tiny_file), "--served-model-name", "tiny", "--max-num-seqs", "8",
            "--tasks", str(tasks), "--hello"], {
        "TAILOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "TAILOR_API_KEY": "secret",
        "TAILOR_ADMIN_KEY": "admin",
    }  # fmt: skip


@pytest.fixture(scope="module")
def server(place: tuple[list[str], dict[str, str]]) -> Iterator[Running]:
    with Running(*place) as running:
        yield running


BODY = {"model": "tiny", "prompt": "abcabcabc", "max_tokens": 12, "temperature": 0}


def test_serve_says_hello_and_no_secret(server: Running) -> None:
    server.wait_for(r"^The capital of France is")
    server.wait_for(r"Ctrl-C stops the server")
    told = "".join(server.lines)
    assert "secret" not in told
    assert f"{server.url}/dashboard" in told and "extraction" in told, "the page and a task"


def test_serve_completes_for_whoever_has_the_key(server: Running) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.ask("/v1/completions", BODY)
    assert refused.value.code == 401
    refused.value.close()
    plain = server.ask("/v1/completions", BODY | {"speculation": {"drafter": "off"}}, "secret")
    drafted = server.ask("/v1/completions", BODY | {"model": "extraction"}, "secret")
    assert plain["usage"]["completion_tokens"] > 0
    held = BODY | {"structured_outputs": {"choice": ["abba", "cab"]}}
    assert server.ask("/v1/completions", held, "secret")["choices"][0]["text"] in ("abba", "cab")
    assert drafted["choices"][0]["text"].startswith(plain["choices"][0]["text"][:4])


def test_a_hangup_reloads_the_tasks_or_keeps_the_old_ones(server: Running, tasks: Path) -> None:
    fresh = tasks / "fresh.yaml"
    fresh.write_text("sampling: {max_tokens: 2}\n")
    server.process.send_signal(signal.SIGHUP)
    server.wait_for("the tasks were reloaded: extraction, fresh, known, completion")
    assert server.ask("/v1/models/fresh", key="admin")["id"] == "fresh"
    fresh.write_text("sampling: {max_tokens: none}\n")
    server.process.send_signal(signal.SIGHUP)
    server.wait_for(r"were not reloaded, the old ones stay: .*fresh\.yaml:1: sampling\.max_tokens")
    assert server.ask("/v1/models/fresh", key="admin")["id"] == "fresh"
    fresh.unlink()


_UNTIL_IT_ENDS = """
import asyncio, pathlib, sys
from types import SimpleNamespace
from server.api.serving import _signals

async def main(told):
    ended, reloaded = asyncio.Event(), asyncio.Event()
    async def reload():
        reloaded.set()
    app = SimpleNamespace(state=SimpleNamespace(reload_tasks=reload))
    with _signals(app, ended, ended):
        told.write_text("ready")
        waits = [asyncio.create_task(event.wait()) for event in (ended, reloaded)]
        await asyncio.wait(waits, return_when="FIRST_COMPLETED")
    told.write_text("ended" if ended.is_set() else "reloaded")

asyncio.run(main(pathlib.Path(sys.argv[1])))
"""


@pytest.mark.parametrize(("nohup", "what"), [(False, "ended"), (True, "reloaded")])
def test_a_terminal_that_closes_ends_the_server_unless_it_was_started_with_nohup(
    nohup: bool, what: str, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    words = [sys.executable, "-c", _UNTIL_IT_ENDS, str(told)]
    child, terminal = pty.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else nohup makes a file of its own
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
        os.execvp("nohup" if nohup else words[0], ["nohup", *words] if nohup else words)
    try:
        wait_until(told.exists, 60)
    finally:
        os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0 and told.read_text() == what


def test_signals_during_a_start_that_makes_its_model(tmp_path: Path, tasks: Path) -> None:
    """SIGHUP waits, SIGTERM ends the server and what it has begun."""
    write_llama(tmp_path / "new.gguf", *BLOCKS)
    words = [*TAILOR, "serve", "--port", "0", "--model", str(tmp_path / "new.gguf")]
    env = {**os.environ, "TAILOR_CACHE_DIR": str(tmp_path)}
    server = subprocess.Popen(
        [*words, "--tasks", str(tasks)], cwd=ROOT, env=env, start_new_session=True
    )
    try:
        below = psutil.Process(server.pid)
        wait_until(lambda: any("fetch" in p.cmdline() for p in below.children()), 60)
        children = below.children()
        server.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(0.3)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert psutil.wait_procs(children, 10)[1] == []
    finally:
        server.kill()
        server.wait()


def test_sigterm_ends_it_cleanly_while_it_imports() -> None:
    """The first process of a container gets no signal that it does not catch."""
    code = (
        "import os, signal, sys\n"
        "class Instead:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'cyclopts':\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Instead)\n"
        "from server.commands.cli import main\n"
        "main(['serve', '--model', ''])\n"
    )
    assert run_python("-c", code) == ""


def test_ctrl_c_stops_it_cleanly_and_the_next_start_keeps_what_a_task_knows(
    server: Running, place: tuple[list[str], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one has two engines, of which the first is the task's home."""
    body: dict[str, Any] = BODY | {"model": "known"}
    text = server.ask("/v1/completions", body, "admin")["choices"][0]["text"]
    # A thread of low priority takes the output after it was answered.
    at = "/v1/tasks/known"
    wait_until(lambda: server.ask(at, key="admin")["learned"]["outputs"] == 1, pause_s=0.1)
    told = server.ask(at, key="admin")
    assert told["measured_steps"] > 0
    assert server.stop(signal.SIGINT) == 0
    log = "".join(server.lines)
    assert "Traceback" not in log and "abcabc" not in log
    words, environment = place
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with serve_here(*words, "--device", "cpu,cpu") as second:

        def known() -> Any:
            return second.http.get(second.url + at, headers=as_key("admin")).json()

        kept = known()
        assert kept["measured_steps"] == told["measured_steps"]
        assert kept["calibration"] == told["calibration"]
        for _ in range(4):
            answer = second.post("/v1/completions", "admin", **body).json()
            assert answer["choices"][0]["text"] == text
        wait_until(lambda: known()["learned"]["outputs"] == 5, pause_s=0.1)


def test_rows_that_pad_the_vocabulary_are_no_ids_of_the_api(
    tiny_folder: Path, tmp_path: Path, own_cache: Path
) -> None:
    folder = tmp_path / "padded"
    shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    known = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
    config["vocab_size"] = max(known.values()) + 65
    (folder / "config.json").write_text(json.dumps(config))
    model = served_model(ModelConfig(name="padded", path=str(folder)), folder, None)
    assert model.vocab_size == max(known.values()) + 1


def test_more_context_than_the_model_has_is_refused_before_loading(
    tiny_folder: Path, own_cache: Path
) -> None:
    most = json.loads((tiny_folder / "config.json").read_text())["max_position_embeddings"]
    model = ModelConfig(name="tiny", path=str(tiny_folder))
    assert served_model(model, tiny_folder, most).max_model_len == most
    with pytest.raises(ModelError, match=f"model tiny: max_model_len .* the model's {most}$"):
        served_model(model, tiny_folder, most + 1)


def test_a_folders_chat_template_is_served_and_a_broken_one_is_told(
    tiny_folder: Path, tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "talker"
    shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)

    def chat() -> Any:
        return served_model(ModelConfig(name="talker", path=str(folder)), folder, None).chat

    assert chat() is None and not caplog.records
    config = {"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert chat().render([{"role": "user", "content": "hi"}]).text == "<s>hi"
    (folder / "chat_template.jinja").write_text("{% if %}")
    assert chat() is None
    assert "talker cannot chat: the chat template, line 1" in caplog.text


def test_a_busy_port_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # An engine's process starts while the files are read; here it would be left behind.
    monkeypatch.setattr("server.engine.process.EngineProcess", lambda imports: None)
    monkeypatch.setattr("server.wiring.model.ready_folder", pytest.fail)
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    told = capsys.readouterr().err
    assert f"127.0.0.1:{port}: Address already in use" in told and "Traceback" not in told


def test_unknown_host_is_told() -> None:
    with pytest.raises(ConfigError, match="cannot listen on no-such-host"):
        listen("no-such-host.invalid", 0)


def test_unsupported_model_is_refused_before_loading(tmp_path: Path) -> None:
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text(
        json.dumps({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"})
    )
    with pytest.raises(UnsupportedModelError, match="MixtralForCausalLM is not supported"):
        served_model(ModelConfig(name="gpt", path="gpt"), tmp_path / "gpt", None)
    with pytest.raises(ModelError, match=r"config\.json"):
        served_model(ModelConfig(name="x", path="x"), tmp_path / "none", None)
    named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 9}
    for values in ([named], {**named, "max_position_embeddings": 9, "rope_parameters": [1]}):
        (tmp_path / "gpt" / "config.json").write_text(json.dumps(values))
        with pytest.raises(ModelError, match=r"config\.json: (not a JSON object|AttributeError)"):
            served_model(ModelConfig(name="gpt", path="gpt"), tmp_path / "gpt", None)


# --- the plan ---


def test_plan_has_one_order_a_device(tiny_folder: Path, own_cache: Path) -> None:
    config = ServerConfig(
        models=(
            ModelConfig(name="a", path="a", devices=("cuda:0", "cuda:1"), dtype="float16"),
            ModelConfig(name="b", path="b", max_model_len=100),
        ),
        engine=EngineConfig(max_model_len=120),
    )
    tasks = {"t": TaskConfig(name="t")}
    plan = plan_server(config, tasks, {"a": tiny_folder, "b": tiny_folder})
    assert [
        (o.name, r.device, r.dtype, r.max_model_len) for o in plan.orders for r in (o.runner,)
    ] == [
        ("a/0", "cuda:0", "float16", 120),
        ("a/1", "cuda:1", "float16", 120),
        ("b/0", "cpu", "auto", 100),
    ]
    assert plan.models["a"].max_model_len == 120 and plan.models["b"].max_model_len == 100
    assert plan.models["a"].vocab_size == 128
    assert len({order.table for order in plan.orders}) == 1
    assert all(Path(order.table).is_file() for order in plan.orders)


def test_engines_on_the_cpu_share_its_cores(tiny_folder: Path, own_cache: Path) -> None:
    def threads(devices: tuple[str, ...], given: int | None = None) -> list[int | None]:
        config = ServerConfig(
            models=(ModelConfig(name="a", path="a", devices=devices),),
            engine=EngineConfig(threads=given),
        )
        return [o.runner.threads for o in plan_server(config, {}, {"a": tiny_folder}).orders]

    cores = len(os.sched_getaffinity(0))
    assert threads(("cpu",)) == [None]
    assert threads(("cpu", "cpu")) == [max(1, cores // 2)] * 2
    assert threads(("cpu", "cpu"), 3) == [3, 3]


def test_what_is_kept_of_tailor_s_own_tasks_is_found_wherever_a_server_starts(
    tiny_folder: Path, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def namespace(folder: Path) -> str:
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        config = ServerConfig(models=(ModelConfig(name="a", path="a"),))
        return plan_server(config, {}, {"a": tiny_folder}).orders[0].namespace

    shipped = namespace(tmp_path / "one")
    assert namespace(tmp_path / "two") == shipped
    (tmp_path / "two" / "configs" / "tasks").mkdir(parents=True)
    assert namespace(tmp_path / "two") != shipped


# --- drafters of tasks ---


@pytest.mark.parametrize("name", [n for n in DRAFTER_NAMES if n != "off"])
def test_every_drafter_can_be_made_for_a_task(name: str) -> None:
    drafter = make_task_drafter(name, "f" * 64, (2,), "t", SpeculationParams(name, 8))
    session = drafter.open((1, 2, 3, 1, 2, 3, 1, 2))
    session.settle()
    session.extend((3,))
    assert len(session.propose(8, 4).token_ids) <= 8
    session.close()


def test_options_reach_their_drafter_only() -> None:
    task = TaskConfig.model_validate(
        {"name": "t", "speculation": {"mix": {"lambda": 0.25, "n_max": 3}, "trie": {"n": 6}}}
    )
    speculation = SpeculationParams("mix", 8, task.speculation.options())
    mix: Any = make_task_drafter("mix", "f", (2,), "t", speculation)
    assert (mix.mixing, mix.n_max) == (0.25, 3)
    trie: Any = make_task_drafter("trie", "f", (2,), "t", speculation)
    assert (trie.n, trie.prefix_length) == (6, 3)
    make_task_drafter("suffix", "f", (2,), "t", speculation)


def test_a_task_drafts_without_a_corpus_that_is_missing_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    speculation = SpeculationParams("mix", 8, (), "none.bin")
    session = make_task_drafter("mix", "f", (2,), "t", speculation).open((1, 2, 3, 1, 2))
    session.settle()
    assert session.propose(8, 4).token_ids[0] == 3, "from the prompt alone"
    session.close()
    assert "task t drafts without its corpus: " in caplog.text and "none.bin" in caplog.text


def test_a_corpus_whose_file_is_gone_is_let_go_when_another_is_read(tmp_path: Path) -> None:
    files, held = FilesRead[Corpus](), list[weakref.ref[Any]]()
    for file in (tmp_path / "old", tmp_path / "new"):
        build_corpus([((1, 2), (3,))], fingerprint="f").save(file)
        read = partial(Corpus.load, file, fingerprint="f")
        held.append(weakref.ref(files(str(file), read).token_ids))
        file.unlink()
    gc.collect()
    assert [one() is None for one in held] == [True, False]


def test_bigrams_of_another_model_are_refused(tmp_path: Path) -> None:
    import numpy as np

    from drafters.published.grammys import BigramTable

    file = str(tmp_path / "m.bigrams")
    next_ids = np.asarray([[1], [2], [0]], np.int32)
    BigramTable("model-a", next_ids, np.full((3, 1), 0.9, np.float32)).save(file)
    options = (("grammys.strategy", "bigram"), ("grammys.table", file))

    def make(model: str | None, options: tuple[tuple[str, str], ...]) -> Any:
        speculation = SpeculationParams("grammys", 8, options)
        return make_task_drafter("grammys", "f", (2,), "t", speculation, model=model)

    for model in ("model-a:float32", "model-a:bfloat16", None):
        tree = make(model, options).open([0]).propose(3, 3)
        assert tree.token_ids.tolist() == [1, 2, 0]
    with pytest.raises(ValueError, match="was taken from another model; make it again with"):
        make("model-b:float32", options)
    with pytest.raises(ValueError, match="bigrams of task t: No such file"):
        make(None, (("grammys.table", file + ".none"),))
