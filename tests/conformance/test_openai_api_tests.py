"""What the conformance script leaves out and rewrites, without the network."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("openai_api_tests.py")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("openai_api_tests", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_model_names_become_the_served_one_and_prompts_stay(script: ModuleType) -> None:
    source = (
        'create(model="gpt-3.5-turbo-instruct", prompt="gpt is a word", user="user-1")\n'
        'retrieve("gpt-6-astra"); retrieve("o3-mini"); retrieve("")\n'
        'create(model="model", input="model")\n'
    )
    assert script.name_served_model(source, "my/model") == (
        'create(model="my/model", prompt="gpt is a word", user="user-1")\n'
        'retrieve("my/model"); retrieve("my/model"); retrieve("")\n'
        'create(model="my/model", input="model")\n'
    )


def test_exactly_the_named_tests_are_left_out(script: ModuleType, tmp_path: Path) -> None:
    names = {
        "TestCompletions": [
            "method_create_overload_1",
            "method_create_with_all_params_overload_1",
            "method_retrieve",
            "raw_response_update",
            "streaming_response_list",
            "method_delete",
            "path_params_update",
        ],
        "TestAsyncCompletions": ["method_list", "streaming_response_create_overload_2"],
        "TestMessages": ["method_list", "path_params_list"],
        "TestAsyncMessages": ["raw_response_list", "path_params_list"],
        "TestDecisions": ["method_create", "method_create_with_all_params"],
        "TestModels": ["method_retrieve", "method_delete", "path_params_delete", "raw_list"],
        "TestAsyncModels": ["method_delete", "path_params_retrieve"],
    }
    text = "".join(
        f"class {group}:\n" + "".join(f"    def test_{name}(self): pass\n" for name in tests)
        for group, tests in names.items()
    )
    (tmp_path / "test_shipped.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider",
         "--rootdir", str(tmp_path), "-k", script.selection(), str(tmp_path)],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    kept = {line.rsplit("::", 1)[-1] for line in done.stdout.splitlines() if "::" in line}
    assert kept == {
        "test_method_create_overload_1",
        "test_path_params_update",
        "test_streaming_response_create_overload_2",
        "test_path_params_list",
        "test_method_create",
        "test_method_create_with_all_params",
        "test_method_retrieve",
        "test_path_params_delete",
        "test_raw_list",
        "test_path_params_retrieve",
    }


def test_every_omission_has_a_reason(script: ModuleType) -> None:
    assert all(len(reason) > 10 for reason in script.DESELECTED.values())
