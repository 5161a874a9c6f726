"""What the conformance scripts do beside running suites: without the network."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.api.fixtures import over
from tests.api.live import LiveServer
from tests.fakes.scripted_engine import ScriptedEngine, saying

FOLDER = Path(__file__).parent


with pytest.MonkeyPatch.context() as _patch:  # they import `environment` as scripts do
    _patch.syspath_prepend(str(FOLDER))
    schemathesis_run: Any = importlib.import_module("schemathesis_run")
    openai_api_tests: Any = importlib.import_module("openai_api_tests")

server = over(ScriptedEngine(saying([5])))


def test_only_models_and_amounts_are_narrowed(server: LiveServer) -> None:
    document = server.http.get(server.url + "/openapi.json").json()
    narrow = schemathesis_run.narrowed(copy.deepcopy(document), ["a", "b"])

    def properties(path: str, of: Any = narrow) -> Any:
        body = of["paths"][path]["post"]["requestBody"]
        return body["content"]["application/json"]["schema"]["properties"]

    fields, before = properties("/v1/completions"), properties("/v1/completions", document)
    changed = [name for name in fields if fields[name] != before[name]]
    assert set(changed) == {"model", "max_tokens", "min_tokens", "n", "best_of"}
    assert fields["model"] == {"enum": ["a", "b", None]}
    whole, null = fields["max_tokens"]["anyOf"]
    assert whole == {**before["max_tokens"]["anyOf"][0], "maximum": 3} and null == {"type": "null"}
    [parameter] = narrow["paths"]["/v1/models/{model}"]["get"]["parameters"]
    assert parameter["schema"] == {"enum": ["a", "b", "nobody"]}
    deep = schemathesis_run.deepened(narrow)
    assert list(deep["paths"]) == ["/v1/completions", "/v1/chat/completions"]
    deepest = properties("/v1/completions")
    assert set(deepest) == set(before) & set(schemathesis_run.DEEP_FIELDS) and "suffix" in before
    assert "anyOf" in deepest["prompt"] and deepest["max_tokens"] == fields["max_tokens"]


def test_openai_s_operations_are_asked_with_all_their_fields() -> None:
    def asks(name: str) -> dict[str, Any]:
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        answer: Any = {"200": {"content": {"application/json": {"schema": {}}}}}
        return {"requestBody": {"content": body}, "responses": answer, "security": [{}]}

    gets: Any = {"responses": {"200": {"content": {"application/json": {"schema": {}}}}}}
    schemas = {
        "Both": {"properties": {"seed": {"type": "integer"}}, "required": ["seed"]},
        "Chat": {
            "allOf": [
                {"$ref": "#/components/schemas/Both"},
                {"properties": {"messages": {}, "seed": {"type": "number"}}},
                {"required": ["messages"]},
            ]
        },
        "Completion": {"properties": {"prompt": {}, "model": {"type": "string"}}},
        "ErrorResponse": {},
    }
    document = {
        "openapi": "3.1.0",
        "info": {},
        "paths": {
            "/completions": {"post": asks("Completion")},
            "/chat/completions": {"post": asks("Chat"), "get": gets},
            "/models": {"get": gets},
            "/models/{model}": {"get": gets, "delete": gets},
            "/files": {"get": gets},
        },
        "components": {"schemas": schemas},
    }
    told = schemathesis_run.openai_document(copy.deepcopy(document))
    assert {path: list(methods) for path, methods in told["paths"].items()} == {
        "/v1/completions": ["post"],
        "/v1/chat/completions": ["post"],
        "/v1/models": ["get"],
        "/v1/models/{model}": ["get"],
    }
    chat = told["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"] == {
        "type": "object",
        "properties": {"seed": {"type": "number"}, "messages": {}},
        "required": ["messages", "seed"],
    }
    assert set(chat["responses"]) == {"200", *schemathesis_run.REFUSALS}
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    refused = chat["responses"]["400"]["content"]["application/json"]["schema"]["$ref"]
    assert refused.endswith("/ErrorResponse") and "ErrorResponse" in told["components"]["schemas"]
    assert "security" not in chat
    asked = schemathesis_run.narrowed(told, ["a"])["paths"]["/v1/completions"]["post"][
        "requestBody"
    ]
    schema = asked["content"]["application/json"]["schema"]
    assert schema["properties"] == {"prompt": {}, "model": {"enum": ["a"]}}


def test_model_names_become_the_served_one_and_prompts_stay() -> None:
    source = (
        'create(model="gpt-3.5-turbo-instruct", prompt="gpt is a word", user="user-1")\n'
        'retrieve("gpt-6-astra"); retrieve("o3-mini"); retrieve("")\n'
        'create(model="model", input="model")\n'
    )
    assert openai_api_tests.name_served_model(source, "my/model") == (
        'create(model="my/model", prompt="gpt is a word", user="user-1")\n'
        'retrieve("my/model"); retrieve("my/model"); retrieve("")\n'
        'create(model="my/model", input="model")\n'
    )


def test_exactly_the_named_tests_are_left_out(tmp_path: Path) -> None:
    kept = {
        "TestCompletions": ["method_create_overload_1", "path_params_update"],
        "TestAsyncCompletions": ["streaming_response_create_overload_2"],
        "TestMessages": ["path_params_list"],
        "TestAsyncMessages": ["path_params_list"],
        "TestDecisions": ["method_create", "method_create_with_all_params"],
        "TestModels": ["method_retrieve", "path_params_delete", "raw_list"],
        "TestAsyncModels": ["path_params_retrieve"],
    }
    left_out = {
        "TestCompletions": [
            "method_create_with_all_params_overload_1", "method_retrieve", "raw_response_update",
            "streaming_response_list", "method_delete",
        ],
        "TestAsyncCompletions": ["method_list"],
        "TestMessages": ["method_list"],
        "TestAsyncMessages": ["raw_response_list"],
        "TestModels": ["method_delete"],
        "TestAsyncModels": ["method_delete"],
    }  # fmt: skip
    text = ""
    for group, names in kept.items():
        tests = [*names, *left_out.get(group, ())]
        text += f"class {group}:\n" + "".join(f"    def test_{n}(self): pass\n" for n in tests)
    (tmp_path / "test_shipped.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider",
         "--rootdir", str(tmp_path), "-k", openai_api_tests.selection(), str(tmp_path)],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    found = [line.split("::")[1:] for line in done.stdout.splitlines() if "::" in line]
    assert found == [[group, f"test_{name}"] for group, names in kept.items() for name in names]
