"""The command line: help with examples, exit statuses, options over files."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from drafters.target import chosen
from server import __version__
from server.commands.cli import (
    COMMANDS,
    OPTIONS_OF_OTHERS,
    TAKEN_OF_OTHERS,
    build_app,
    main,
    parse,
)
from server.commands.options import Bar
from server.commands.serve import EngineOptions, ModelChoice, Place, server_config
from server.config.yaml_file import MemorySize
from server.errors import ConfigError
from tests.commands.command_line import Tailor, known
from tests.processes import run_python

ROOT = Path(__file__).parents[2]


def test_every_command_has_an_example_that_parses() -> None:
    for command in COMMANDS:
        assert f"{command.example} ".startswith(f"tailor {command.words} ")
        assert callable(parse(shlex.split(command.example)[1:])), command.words


def test_help_ends_with_the_example(tailor: Tailor) -> None:
    told = " ".join(tailor("tasks", "pack", "--help").out.split())
    assert told.endswith("example: tailor tasks pack configs/tasks/slots.yaml")
    assert "Put a task into one file" in told and "--force" in told
    assert "nf4" not in tailor("serve", "--help").out, "it is for training"
    assert re.search("FILE +the cluster.yaml", tailor("fleet", "up", "--help").out)


@pytest.mark.parametrize("words", [[], ["tasks"], ["models"]])
def test_half_a_command_prints_help_and_fails(words: list[str], tailor: Tailor) -> None:
    told = tailor(*words, status=2)
    assert "Usage: tailor" in told.err and not told.out


def test_version(tailor: Tailor) -> None:
    assert tailor("version").out.strip() == tailor("--version").out.strip() == __version__


def test_names_of_before_still_work_and_are_not_shown(tailor: Tailor) -> None:
    words = ["run", "--task", "t", "--in", "a.jsonl", "--out=b.jsonl"]
    assert parse(words) is parse(["run", "--task", "t", "--data", "a.jsonl", "-o", "b.jsonl"])
    replay = ["replay", "--drafter", "auto", "--data", "a"]
    assert parse([*replay, "--budget", "4"]) is parse([*replay, "--max-draft-tokens", "4"])
    assert parse(["task", "check", "configs/tasks"]) is parse(["tasks", "check", "configs/tasks"])
    assert "--in" not in tailor("run", "--help").out.split()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["serve", "org/name"], "A model is given as --model org/name."),
        (["serve", "--kv-cache-dtype", "int8"], "Here it is engine.kv_cache_dtype of a"),
        (["serve", "-m", "file.gguf"], "Here it is --model."),
        (["serve", "--ctx-size=2048"], "Here it is --max-model-len."),
        (["serve", "--frobnicate"], "Unknown option: --frobnicate."),
        (["version", "x"], "No option takes 'x'."),
    ],
)
def test_a_command_line_of_another_server_is_told_what_to_write(
    words: list[str], says: str, tailor: Tailor
) -> None:
    told = tailor(*words, status=2).err
    assert says in " ".join(told.split()) and told.startswith("tailor: ")


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            "tasks train --data d -o o",
            ["--epochs=0", "--epochs=inf", "--batch-size=0", "--learning-rate=nan", "--rank=0",
             "--dropout=1", "--max-examples=0", "--time-limit=0", "--seed=-1", "--threads=0",
             "--memory=0", "--device=gpu"],
        ),
        ("tasks make d --name n", ["--batch-size=0", "--limit=0", "--serve-seconds=-1"]),
        ("tasks tune --data d --name n", ["--limit=0", "--record-seconds=0", "--device=cpu,cpu"]),
        ("tasks analyze --data d", ["--tokens=0", "--row-cost=-1"]),
        (
            "corpus generate --data d -o o",
            ["--limit=0", "--concurrency=0", "--max-tokens=0", "--temperature=3", "--seed=-1"],
        ),
        ("tasks enrich --data d -o o", ["--tokens=0", "--n-max=1", "--alpha=nan", "--least=-1"]),
        ("run --task t --data d -o o", ["--concurrency=0", "--retries=-1", "--max-tokens=0"]),
        ("vocab profile --data d -o o", ["--tolerance=nan", "--tolerance=2"]),
        ("complete --task t p", ["--temperature=nan", "--max-tokens=0"]),
        ("eval --data d --task t", ["--limit=-1", "--timeout=0", "--concurrency=0"]),
        ("corpus build --data d -o o", ["--n-max=17", "--p-min=0"]),
        ("corpus show c", ["--top=-1"]),
        ("corpus bigrams -o o", ["--threads=0", "--device=tpu", "-k=21"]),
        ("models prior m", ["--tokens=0", "--steps=0", "--threads=0", "--seed=-1"]),
        ("replay --data d --drafter auto", ["--limit=-1", "--max-draft-tokens=-1"]),
        (
            "serve",
            ["--device=tpu", "--kv-cache-memory=lots", "--dtype=int4", "--weights=int5",
             "--port=x"],
        ),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_told_before_anything_is_done(
    command: str, options: list[str], tailor: Tailor
) -> None:
    for option in options:
        told = " ".join(tailor(*command.split(), option, status=2).err.split())
        assert told.startswith("tailor: Invalid value"), option
        assert re.search(rf" for {option.partition('=')[0]}[.:] ", told), option


@pytest.mark.parametrize(
    ("command", "place", "says"),
    [
        ("vocab profile --data d", "", "{here}: is a folder"),
        ("vocab profile --data d", "none/o", "{here}/none: no such folder"),
        ("tasks enrich --data d", "", "{here}: is a folder"),
        ("tasks pack t.yaml", "", "{here}: is a folder"),
        ("tasks pack t.yaml", "none/o", "{here}/none: no such folder"),
        ("corpus build --data d", "file/o", "{here}/file: no such folder"),
        ("tasks train --data d", "file", "{here}/file: is no folder"),
        ("tasks train --data d", "file/o", "{here}/file: cannot be written to"),
        ("tasks tune --data d --name n --force", "folder.yaml", "{here}/folder.yaml: is a folder"),
        ("tasks tune --data d --name n", "file/n.yaml", "{here}/file: cannot be written to"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_written_is_told_before_the_work(
    command: str, place: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "file").touch()
    with contextlib.suppress(SystemExit):
        assert main([*command.split(), "-o", str(tmp_path / place)]) == 1
    assert says.format(here=tmp_path) in " ".join(capsys.readouterr().err.split())


def test_options_of_others_that_change_nothing_are_taken(tailor: Tailor) -> None:
    """All of them in one command line, in both ways to write a value."""
    pairs = [(name, v) for name, values in TAKEN_OF_OTHERS.items() for v in values or ("hermes",)]
    apart = [word for name, value in pairs for word in ((name, value) if value else (name,))]
    for words in (apart, [f"{name}={value}" if value else name for name, value in pairs]):
        told = tailor("serve", *words, "--model", "", status=1).err
        assert told.startswith("tailor: --model: it is empty")


@pytest.mark.parametrize("name", TAKEN_OF_OTHERS)
def test_an_option_of_others_with_a_value_that_changes_something_is_refused(
    name: str, tailor: Tailor
) -> None:
    words = ["serve", f"{name}={'2' if TAKEN_OF_OTHERS[name] else ''}", "--model", ""]
    told = " ".join(tailor(*words, status=2).err.split())
    assert f"{name}. It is taken with " in told


def test_the_options_that_are_advised_are_there() -> None:
    options = known()["tailor serve"].options
    for theirs, ours in OPTIONS_OF_OTHERS.items():
        assert theirs not in options
        assert ours in options or not ours.startswith("-")


SYNONYMS = {
    "--data": ("--in", "--input", "--file", "--prompts", "--train", "--dataset"),
    "--output": ("--out", "--to", "--dest", "--save", "--write"),
    "--url": ("--server", "--base-url", "--address", "--endpoint"),
    "--api-key": ("--key", "--token"),
    "--limit": ("--num-prompts", "--num", "--max-prompts", "--count", "--first"),
    "--max-tokens": ("--max-new-tokens", "--max-output-tokens", "--length"),
    "--max-draft-tokens": ("--budget", "--nodes", "--draft-tokens"),
    "--model": ("--model-path", "--model-name", "--path"),
    "--adapter": ("--lora", "--peft"),
    "--field": ("--completion-field", "--output-field", "--column"),
    "--prompt-field": ("--input-field",),
    "--concurrency": ("--parallel", "--workers", "--jobs", "--streams"),
    "--corpus": ("--corpus-file",),
    "--force": ("--overwrite", "--replace", "--yes"),
    "--json": ("--as-json", "--format"),
    "--device": ("--devices", "--gpu"),
    "--threads": ("--num-threads", "--cpu-threads"),
}
"""Names that mean what an option means already: none of them is an option's first name."""


def test_nothing_has_a_second_name_and_a_name_takes_one_kind_of_value() -> None:
    names = {option for facts in known().values() for option in facts.types}
    assert set(SYNONYMS) <= names
    assert not names & {other for others in SYNONYMS.values() for other in others}
    kinds: dict[str, dict[str, str]] = {}
    for command, facts in known().items():
        for option, kind in facts.types.items():
            if option.startswith("--"):
                told = re.sub(r"<class '(.*)'>", r"\1", kind).replace("pathlib.", "")
                told = re.sub(r"tuple\[(.*), \.\.\.\]", r"\1", told)  # it may be repeated
                kinds.setdefault(option, {})[command] = told.replace(" | None", "")
    differ = {name: of for name, of in kinds.items() if len(set(of.values())) > 1}
    assert not differ


def test_a_command_that_reads_data_is_told_where_in_a_line_it_is() -> None:
    """All of JSON lines, CSV and Parquet have fields of their own names."""
    options = {name: facts.options for name, facts in known().items()}
    own_form = {"tailor run", "tailor replay"}  # requests by line; recordings
    for command, there in options.items():
        if "--data" in there and command not in own_form:
            assert "--prompt-field" in there, command


def test_what_is_left_is_reckoned_by_what_was_done_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that goes on begins with what an earlier one has done."""
    ticks = iter([0.0, 20.0, 40.0])
    monkeypatch.setattr("server.commands.options.time.monotonic", lambda: next(ticks))
    with Bar() as bar:
        bar("recording", 600, 1000)
        bar("recording", 700, 1000)
    first, second = capsys.readouterr().err.splitlines()
    assert (first, second) == ("recording 600 of 1000", "recording 700 of 1000, about 60 s left")


def test_completion_knows_commands_and_options(tailor: Tailor) -> None:
    script = tailor("completion", "bash").out
    assert "max-num-batched-tokens" in script and "bigrams" in script
    assert all(parse(["completion", shell]) for shell in ("zsh", "fish"))


def test_no_colour_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch, tailor: Tailor) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[3" in tailor("serve", "--help").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in tailor("serve", "--help").out


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from server.commands.cli import main; main(['--help'])\n"
        "heavy = {'numpy', 'torch', 'pydantic', 'tokenizers', 'httpx', 'yaml'}\n"
        "print('heavy:', *sorted(heavy & set(sys.modules)))"
    )
    assert run_python("-c", code).splitlines()[-1].strip() == "heavy:"


def test_a_supervisor_s_signal_leaves_no_scratch_files(tmp_path: Path) -> None:
    code = """if True:
        import os, signal, sys, tempfile
        from server.commands import cli
        def version():
            with tempfile.TemporaryDirectory():
                os.kill(os.getpid(), signal.SIGTERM)
        cli.version, sys.argv = version, ["tailor", "version"]
        print(cli.main())"""
    assert run_python("-c", code, TMPDIR=str(tmp_path)) == "130\n"
    assert not list(tmp_path.iterdir())


def test_tasks_check(tmp_path: Path, tailor: Tailor) -> None:
    check = ["tasks", "check", tmp_path]
    assert "extraction" in tailor("tasks", "check", ROOT / "configs" / "tasks").out
    (tmp_path / "bad.yaml").write_text("sampling:\n  top_p: 3\n")
    assert f"{tmp_path}/bad.yaml:2: sampling.top_p: " in tailor(*check, status=1).err
    (tmp_path / "bad.yaml").write_text("model: other\n")
    tailor(*check)
    told = tailor(*check, "--config", ROOT / "configs" / "server.yaml", status=1).err
    assert "no model 'other'" in told


# --- serve's options over server.yaml ---


def _config(*words: str):  # type: ignore[no-untyped-def]
    _, bound, _ = build_app().parse_args(["serve", *words])
    given = bound.arguments
    return server_config(
        given.get("place", Place()), given.get("what", ModelChoice()),
        given.get("how", EngineOptions()),
    )  # fmt: skip


def test_options_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        "listen: {port: 9000}\nengine: {max_num_seqs: 8, dtype: bfloat16}\ntasks: mine\n"
        "models:\n  - {name: a, path: org/a, devices: [cpu, cpu]}\n  - {name: b, path: org/b}\n"
    )
    config = _config("--config", str(path), "--host", "0.0.0.0", "--max-num-seqs", "4")
    assert (config.listen.host, config.listen.port) == ("0.0.0.0", 9000)
    assert (config.engine.max_num_seqs, config.engine.dtype) == (4, "bfloat16")
    assert [m.devices for m in config.models] == [("cpu", "cpu"), ("cpu",)]
    assert config.tasks == str(tmp_path.resolve() / "mine")
    config = _config("--config", str(path), "--model", "gemma-3-270m", "--device", "cuda:0,cuda:1")
    assert [(m.name, m.path, m.devices) for m in config.models] == [
        ("gemma-3-270m", "gemma-3-270m", ("cuda:0", "cuda:1"))
    ]


def test_model_names(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "q.gguf").write_bytes(b"GGUF")
    for given, name in (
        (str(tmp_path / "my-model"), "my-model"),
        (str(tmp_path / "q.gguf"), "q"),
        ("org/name@main", "org/name"),
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
    ):
        assert _config("--model", given).models[0].name == name
    assert _config("--model", "org/x", "--served-model-name", "y").models[0].name == "y"
    several = _config("--served-model-name", "y", "z", "y", "--model", "org/x").models[0]
    assert several.names == ("y", "z")
    # Without --model it names the one that is served: the default, or server.yaml's.
    default = _config("--served-model-name", "y", "z").models[0]
    assert default.names == ("y", "z") and default.path == "smollm2-135m-instruct"
    file = tmp_path / "server.yaml"
    file.write_text(
        "models: [{name: a, path: org/a, devices: [cpu, cpu], adapters: [{name: b, path: b}]}]\n"
    )
    own = _config("--config", str(file), "--served-model-name", "y").models[0]
    assert (own.name, own.path, len(own.devices)) == ("y", "org/a", 2)
    with pytest.raises(ConfigError, match="'b' is an adapter's name"):
        _config("--config", str(file), "--served-model-name", "y", "b")
    file.write_text("models: [{name: a, path: org/a}, {name: b, path: org/b}]\n")
    with pytest.raises(ConfigError, match="--served-model-name needs --model when"):
        _config("--config", str(file), "--served-model-name", "y")
    (tmp_path / "a b").mkdir()
    with pytest.raises(ConfigError, match="--served-model-name"):
        _config("--model", str(tmp_path / "a b"))


def test_engine_options() -> None:
    engine = _config(
        "--kv-cache-memory", "2GiB", "--max-num-batched-tokens", "128", "--no-prefix-cache"
    ).engine
    assert engine.kv_cache_memory == MemorySize(num_bytes=2 << 30)
    assert engine.max_num_batched_tokens == 128 and not engine.prefix_cache
    # More sequences than the default number of rows raises the rows.
    many = _config("--max-num-seqs", "1024")
    assert many.engine.sizes("cpu").max_num_batched_tokens == 1024
    assert many.engine.sizes("cuda:1").max_num_batched_tokens == 8192
    few = _config("--max-num-batched-tokens", "32")  # fewer than sequences by default
    assert few.engine.sizes("cpu").max_num_seqs == 32


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", ""], "--model: it is empty"),
        (["--weights", "fp8"], "weights: fp8 is for cuda"),
        (["--max-num-seqs", "0"], "--max-num-seqs: "),
        (["--port", "70000"], "--port: "),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "at least max_num_seqs"),
        (["--served-model-name", "a b"], "--served-model-name: 'a b' cannot be a model's name"),
        (["--config", "no-such.yaml"], "no-such.yaml: No such file"),
        (["--tasks", "no-such-folder"], "no-such-folder: no such folder"),
        (["--api-key", "has space"], "printable ASCII"),
    ],
)
def test_what_cannot_be_served_is_one_line_before_anything_is_loaded(
    words: list[str], says: str, tailor: Tailor
) -> None:
    told = tailor("serve", *words, status=1)
    assert says in told.err and len(told.err.splitlines()) == 1 and not told.out


@pytest.mark.parametrize(
    ("name", "value", "command"),
    [
        ("TAILOR_API_KEY", "has space", "serve"),
        ("TAILOR_ADMIN_KEY", "schl\u00fcssel", "serve"),
        ("TAILOR_API_KEY", "schl\u00fcssel", "adapters list"),
        ("TAILOR_API_KEY", "has space", "adapters list"),
        ("TAILOR_CPU", "z80", "version"),
        ("TAILOR_CPU", "amx" if platform.machine() == "aarch64" else "neon-i8mm", "version"),
    ],
)
def test_a_variable_that_cannot_be_is_named(
    name: str, value: str, command: str, monkeypatch: pytest.MonkeyPatch, tailor: Tailor
) -> None:
    monkeypatch.setenv(name, value)
    chosen.cache_clear()
    try:
        told = tailor(*command.split(), status=1).err
    finally:
        chosen.cache_clear()
    assert name in told and value not in told.replace(f"TAILOR_CPU={value}:", "")
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(("own", "keys"), [("three", ["one", "two", "three"]),
                                          ("one", ["one", "two"])])  # fmt: skip
def test_keys(own: str, keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is given twice, as by --api-key $TAILOR_API_KEY, is one."""
    monkeypatch.setenv("TAILOR_API_KEY", own)
    config = _config("--api-key", "one", "--api-key", "two")
    assert [key.secret() for key in config.keys] == keys
    assert len({key.id for key in config.keys}) == len(keys)


_UNTIL_TORCH = """
import ctypes, importlib.machinery, os, pathlib, sys
class Instead:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            found = importlib.machinery.PathFinder.find_spec(name, path)
            (library,) = pathlib.Path(found.origin).parent.glob("lib/libgomp*.so*")
            ctypes.CDLL(str(library))
            os._exit(0)
sys.meta_path.insert(0, Instead)
from server.commands.cli import main
main(["tasks", "train", "--data", "none.jsonl", "-o", "none"])
"""


def test_training_takes_its_share_of_a_busy_machine() -> None:
    """libgomp reads how long waiting threads spin when it is loaded, by torch's import or, here,
    instead of that, and says what it read."""
    if sys.platform != "linux":
        pytest.skip("libgomp is torch's on Linux")
    done = subprocess.run(
        [sys.executable, "-c", _UNTIL_TORCH],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_DISPLAY_ENV": "VERBOSE"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "GOMP_SPINCOUNT = '10000'" in done.stderr
