"""Configuration files: what is read, and that every error names file, line and key."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from drafters import DRAFTER_NAMES
from server.config import (
    DEFAULT_TASK,
    KeyConfig,
    ServerConfig,
    TaskConfig,
    load_server_config,
    load_task,
    load_tasks,
)
from server.config.task import task_version
from server.config.yaml_file import MemorySize, parse_device_list, parse_memory, parse_yaml
from server.errors import ConfigError

ROOT = Path(__file__).parents[2]


def _task(tmp_path: Path, text: str, name: str = "mine.yaml") -> TaskConfig:
    path = tmp_path / name
    path.write_text(text)
    return load_task(path)


# --- errors ---


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sampling:\n  temprature: 1\n", "mine.yaml:2: sampling.temprature: unknown key; did you"),
        ("\nnothing: 1\n", "mine.yaml:2: nothing: unknown key"),
        ("sampling:\n\n  temperature: true\n", "mine.yaml:3: sampling.temperature: "),
        ("sampling: {top_p: 2}\n", "mine.yaml:1: sampling.top_p: input should be less than or"),
        ('sampling:\n  max_tokens: "8"\n', "mine.yaml:2: sampling.max_tokens: "),
        ("sampling:\n  temperature: .NAN\n", "mine.yaml:2: sampling.temperature: "),
        ("sampling:\n  temperature: -.Inf\n", "mine.yaml:2: sampling.temperature: "),
        ("sampling:\n  temperature: 1e308\n", "mine.yaml:2: sampling.temperature: "),
        ("sampling:\n  stop:\n    - a\n    - 1\n", "mine.yaml:4: sampling.stop[1]: "),
        ('sampling:\n  stop: ";"\n', 'mine.yaml:2: sampling.stop: must be a list, such as [";"]'),
        ("sampling: 3\n", "mine.yaml:1: sampling: must be a mapping of keys"),
        ("- a\n", "mine.yaml:1: must be a mapping"),
        (
            "sampling:\n  max_tokens: 9\nlimits:\n  max_tokens: 8\n",
            "mine.yaml:1: sampling.max_tokens is above limits.max_tokens",
        ),
        (
            "sampling:\n  min_tokens: 9\nlimits:\n  max_tokens: 8\n",
            "mine.yaml:1: sampling.min_tokens is above limits.max_tokens",
        ),
        (
            "limits: {max_draft_tokens: 4}\n",
            "mine.yaml:1: speculation.max_draft_tokens 16 is above limits.max_draft_tokens",
        ),
        (
            "speculation:\n  trie:\n    n: 3\n    prefix_length: 3\n",
            "mine.yaml:2: speculation.trie: prefix_length must be below n",
        ),
        ("vocabulary:\n  mode: slice\n", "mine.yaml:1: vocabulary: mode slice needs a profile"),
        ("vocabulary:\n  verify_every: 4\n", "mine.yaml:1: vocabulary: verify_every means noth"),
        (
            "vocabulary:\n  profile: p.vocab\n  allowed_modes: [full]\n",
            "mine.yaml:1: vocabulary: profile means nothing",
        ),
        (
            "vocabulary:\n  mode: exact\n  profile: p.vocab\n  allowed_modes: [full]\n",
            "mine.yaml:1: vocabulary: allowed_modes does not hold the task's own mode",
        ),
        (
            "vocabulary:\n  allowed_modes: [full, slice]\n",
            "mine.yaml:1: vocabulary: allowed_modes other than full need a profile",
        ),
        (
            "speculation: {drafter: trie, learn: true}\n",
            "mine.yaml:1: speculation: learn needs a drafter with",
        ),
        ("name: a b\n", "mine.yaml:1: name: a name has"),
        ("a: 1\nb: 2\na: 3\n", "mine.yaml:3: a: is there twice (first in line 1)"),
        ("a: &x 1\nb: *x\n", "mine.yaml:1: anchors and aliases are not read"),
        ("a: *x\n", "mine.yaml:1: anchors and aliases are not read"),
        ("\na: !!python/name:os.system 1\n", "mine.yaml:2: tags are not read"),
        ("a: [1\n", "mine.yaml:2: expected ',' or ']'"),
        ("[" * 3000, "mine.yaml:1: nested too deeply"),
        ("a:\n  ? [1]\n  : 2\n", "mine.yaml:2: a key must be a plain word"),
        ("a: \x01\n", "mine.yaml:1: "),
    ],
)
def test_error_names_file_line_and_key(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _task(tmp_path, text)
    assert caught.value.message.startswith(f"{tmp_path}/{told}"), caught.value.message


def test_all_problems_of_a_file_are_told_in_its_order(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _task(tmp_path, "limits:\n  max_token: 1\nsampling:\n  top_p: 2\n  min_p: -1\n")
    lines = [line.split(":")[1] for line in caught.value.message.splitlines()]
    assert lines == ["2", "4", "5"]


def test_message_does_not_repeat_long_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _task(tmp_path, f"sampling:\n  temperature: {'x' * 5000}\n")
    assert "xxx" not in caught.value.message


def test_size_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than"):
        _task(tmp_path, "# " + "x" * (1 << 20))


def test_missing_and_undecodable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_task(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"name: a\ndescription: \xff\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml:2: not UTF-8"):
        load_task(tmp_path / "bad.yaml")


# --- values ---


def test_yaml_is_the_core_schema() -> None:
    text = "a: off\nb: 010\nc: 1:30\nd: 2020-01-01\ne: yes\nf: 1e3\ng: [~]\nh: true\ni: 0x1f\nj: .5"
    assert parse_yaml(text, "F").data == {
        "a": "off", "b": 10, "c": "1:30", "d": "2020-01-01", "e": "yes", "f": 1000.0, "g": (None,),
        "h": True, "i": "0x1f", "j": 0.5,
    }  # fmt: skip


def test_name_defaults_to_the_file_s(tmp_path: Path) -> None:
    assert _task(tmp_path, "", "tag-it.yaml").name == "tag-it"
    assert _task(tmp_path, "name:\n", "tag-it.yaml").name == "tag-it"
    assert _task(tmp_path, "name: other\n", "tag-it.yaml").name == "other"


def test_empty_sections_are_defaults(tmp_path: Path) -> None:
    assert _task(tmp_path, "sampling:\nlimits:\n  max_tokens:\n") == _task(tmp_path, "")


def test_drafter_options_are_dotted_and_sorted(tmp_path: Path) -> None:
    task = _task(
        tmp_path,
        "speculation:\n  drafter: mix\n  trie: {prefix_length: 2, n: 8}\n  mix: {lambda: 0.5}\n",
    )
    assert task.speculation.options() == (
        ("mix.lambda", 0.5),
        ("trie.n", 8),
        ("trie.prefix_length", 2),
    )


def test_corpus_counts_from_the_task_file(tmp_path: Path) -> None:
    task = _task(tmp_path, "speculation: {drafter: mix, corpus: ../c.bin}\n")
    assert task.speculation.corpus == str(tmp_path.resolve() / "../c.bin")


def test_bigrams_count_from_the_task_file_and_must_be_there(tmp_path: Path) -> None:
    text = "speculation: {drafter: grammys, grammys: {table: m.bigrams, strategy: bigram}}\n"
    task = _task(tmp_path, text)
    table = str(tmp_path.resolve() / "m.bigrams")
    assert task.speculation.options() == (
        ("grammys.strategy", "bigram"),
        ("grammys.table", table),
    )
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "t.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"t\.yaml:1: speculation\.grammys\.table: no file "):
        load_tasks(folder)
    with pytest.raises(ConfigError, match="strategy bigram needs a table"):
        _task(tmp_path, "speculation: {grammys: {strategy: bigram}}\n")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.4, MemorySize(fraction=0.4)),
        ("40%", MemorySize(fraction=0.4)),
        (1, MemorySize(fraction=1.0)),
        ("2GiB", MemorySize(num_bytes=2 << 30)),
        ("2 GB", MemorySize(num_bytes=2 * 10**9)),
        ("512M", MemorySize(num_bytes=512 << 20)),
        *((text, MemorySize(num_bytes=2 << 30)) for text in ("2Gi", "2G", "2048 MI", "2048mib")),
        (1 << 31, MemorySize(num_bytes=1 << 31)),
    ],
)
def test_memory(value: object, expected: MemorySize) -> None:
    assert parse_memory(value) == expected


@pytest.mark.parametrize("value", [True, 0, -1, "0", "101%", "2XB", "", "nan", 5, None, "1e999999"])
def test_memory_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"must be|at most"):
        parse_memory(value)


def test_devices() -> None:
    assert parse_device_list("cuda:0, cuda:1") == ("cuda:0", "cuda:1")
    assert parse_device_list("cpu,cpu") == ("cpu", "cpu")
    for wrong in ("", "gpu", "cuda:x", "cpu,", "mps"):
        with pytest.raises(ValueError, match="is no device"):
            parse_device_list(wrong)


# --- server.yaml ---


def test_paths_count_from_the_file_and_names_do_not(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    path = tmp_path / "server.yaml"
    path.write_text(
        "models:\n"
        "  - {name: a, path: weights}\n"
        "  - {name: b, path: org/name, adapter: ./lora, devices: [cpu, cpu]}\n"
        "  - {name: c, path: gemma-3-270m}\n"
        "  - {name: d, path: m.gguf}\n"
        "tasks: tasks\n"
        "keys:\n  - {id: k, file: key.txt}\n"
        "listen: {ssl_certfile: chain.pem, ssl_keyfile: key.pem}\n"
    )
    config = load_server_config(path)
    base = tmp_path.resolve()
    assert [model.path for model in config.models] == [
        str(base / "weights"), "org/name", "gemma-3-270m", str(base / "m.gguf"),
    ]  # fmt: skip
    assert config.models[1].adapter == str(base / "lora")
    assert config.tasks == str(base / "tasks") and config.keys[0].file == str(base / "key.txt")
    assert config.listen.certificate == (str(base / "chain.pem"), str(base / "key.pem"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models:\n  - {name: a, path: x}\n  - {name: a, path: y}\n", ":1: models: 'a' is there"),
        ("models:\n  - path: x\n", ":2: models[0].name: is missing"),
        ("models:\n  - {name: a, path: x, devices: [tpu]}\n", ":2: models[0].devices[0]: 'tpu' is"),
        ("models: []\n", ":1: models: "),
        ("engine:\n  block_size: 24\n", ":2: engine.block_size: must be a power of two"),
        ("engine:\n  steps_ahead: 1\n", ":2: engine.steps_ahead: steps launched ahead left"),
        ("engine:\n  steps_ahead: true\n", ":2: engine.steps_ahead: steps launched ahead left"),
        ("engine:\n  kv_cache_memory: 2XB\n", ":2: engine.kv_cache_memory: must be a fraction"),
        (
            "engine: {max_num_seqs: 600, max_num_batched_tokens: 512}\n",
            ":1: engine: max_num_batched_tokens must be at least",
        ),
        ("keys:\n  - {id: a, key: x, env: Y}\n", ":2: keys[0]: set exactly one of key, env and"),
        ("listen:\n  port: 70000\n", ":2: listen.port: "),
        ("limits:\n  drain: 3\n", ":2: limits.drain: unknown key; did you mean drain_s?"),
        ("models:\n  - {name: a, path: x, device: cpu}\n", ":2: models[0].device: unknown key; d"),
    ],
)
def test_server_errors(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_server_config(path)
    assert caught.value.message.startswith(f"{path}{told}"), caught.value.message


def test_keys_come_from_their_source_and_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key.txt").write_text("from-file\nmore\n")
    path = tmp_path / "server.yaml"
    path.write_text(
        "keys:\n  - {id: a, key: literal-1, admin: ~}\n  - {id: b, env: SOME_KEY}\n"
        "  - {id: c, file: key.txt}\n"
    )
    monkeypatch.setenv("SOME_KEY", "from-env")
    config = load_server_config(path)
    assert [key.secret() for key in config.keys] == ["literal-1", "from-env", "from-file"]
    assert "literal-1" not in repr(config) and "literal-1" not in config.model_dump_json()
    monkeypatch.setenv("SOME_KEY", "with space")
    with pytest.raises(ConfigError, match="printable ASCII"):
        config.keys[1].secret()


def test_as_many_keys_as_there_may_be_are_told_apart_at_once() -> None:
    keys = tuple(KeyConfig(id=f"key-{i}", env="KEY") for i in range(10_000))
    began = time.process_time()
    ServerConfig(keys=keys)
    assert time.process_time() - began < 1.0
    with pytest.raises(ValueError, match="keys: 'key-7' is there twice"):
        ServerConfig(keys=(*keys[:9], keys[7]))


# --- folders of tasks ---


def test_shipped_files_are_right() -> None:
    config = load_server_config(ROOT / "configs" / "server.yaml")
    tasks = load_tasks(Path(str(config.tasks)), tuple(m.name for m in config.models), DRAFTER_NAMES)
    assert {"completion", "extraction", "rag-qa", "sql", "summarize", "tagging"} <= set(tasks)
    assert all(task.description for task in tasks.values())
    # The shipped server.yaml says of itself that it holds the defaults.
    defaults = ServerConfig()
    for section in (
        "listen", "models", "metrics", "dashboard", "cors", "limits", "engine", "keys", "restart",
    ):  # fmt: skip
        assert getattr(config, section) == getattr(defaults, section), section


def test_default_task_is_openai_s_defaults() -> None:
    sampling = load_tasks(ROOT / "configs" / "tasks")[DEFAULT_TASK].sampling
    assert all(value in (None, ()) for value in sampling.model_dump().values())


def test_folder_problems_are_all_told(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: same\n")
    (tmp_path / "b.yml").write_text("description: x\nname: same\n")
    (tmp_path / "c.yaml").write_text("\nmodel: none\n")
    (tmp_path / "d.yaml").write_text("name: base\n")
    (tmp_path / "e.yaml").write_text("speculation:\n  drafter: magic\n")
    (tmp_path / "f.yaml").write_text("what: 1\n")
    (tmp_path / "g.yaml").write_text("\n\nspeculation:\n  corpus: none.bin\n")
    (tmp_path / "h.yaml").write_text("vocabulary:\n  mode: exact\n  profile: none.vocab\n")
    (tmp_path / "notes.txt").write_text("not a task")
    with pytest.raises(ConfigError) as caught:
        load_tasks(tmp_path, ("base",), ("off", "auto"))
    told = caught.value.message.splitlines()
    starts = [
        "b.yml:2: name: 'same' is also in",
        "c.yaml:2: model: no model 'none'; there are: base",
        "d.yaml:1: name: 'base' is a model's name",
        "e.yaml:2: speculation.drafter: no drafter 'magic'; there are: off, auto",
        "f.yaml:1: what: unknown key",
        "g.yaml:4: speculation.corpus: no file",
        f"h.yaml:3: vocabulary.profile: no file {tmp_path}/none.vocab",
    ]
    assert len(told) == len(starts)
    for line, start in zip(told, starts, strict=True):
        assert line.startswith(f"{tmp_path}/{start}"), line


def test_a_folder_that_cannot_be_listed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for name in ("none", "file"):
        with pytest.raises(ConfigError, match=f"{name}: no such folder"):
            load_tasks(tmp_path / name)

    def denies(_: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denies)
    with pytest.raises(ConfigError, match=f"^{tmp_path}: Permission denied$"):
        load_tasks(tmp_path)


def test_task_version_follows_its_settings(tmp_path: Path) -> None:
    one = _task(tmp_path, "sampling: {temperature: 0}\n")
    same = _task(tmp_path, "# a comment\nsampling:\n  temperature: 0\n")
    other = _task(tmp_path, "sampling: {temperature: 1}\n")
    assert task_version(one) == task_version(same) != task_version(other)


def test_a_mapping_where_a_list_belongs_gets_no_example(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml:2: sampling\.stop: must be a list$"):
        _task(tmp_path, "sampling:\n  stop: {a: 1}\n")


# --- learning ---


def test_learning_is_on_in_memory_and_needs_a_drafter_with_a_corpus(tmp_path: Path) -> None:
    default = _task(tmp_path, "").speculation
    assert default.learn is True and default.learns
    assert not _task(tmp_path, "speculation: {learn: false}\n").speculation.learns
    assert _task(tmp_path, "speculation: {learn: persist}\n").speculation.learn == "persist"
    # What cannot learn does not, unless the file says that it should.
    assert not _task(tmp_path, "speculation: {drafter: trie}\n").speculation.learns
    with pytest.raises(ConfigError, match=r"mine\.yaml:1: speculation\.learn"):
        _task(tmp_path, "speculation: {learn: disk}\n")
    text = "speculation:\n  drafter: auto\n  learn: true\n  learn_max_tokens: 5000\n"
    task = _task(tmp_path, text)
    assert task.speculation.learn and task.speculation.learn_max_tokens == 5000
