"""Data files: what is read from each kind, and every way in which one is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from server.api.chat_template import ChatTemplate
from server.commands.data import chat_render
from server.config import ModelConfig
from server.datasets import ExampleReader, Fields, open_table, turn_of
from server.errors import ConfigError, ModelError, RequestError
from server.wiring.model import served_model
from tests.api.tiny_tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
EOS = 0


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return found


def written(tmp_path: Path, content: str | bytes, name: str = "data.jsonl") -> Path:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def read(file: Path, **settings: Any) -> list[tuple[list[int], list[int]]]:
    return list(ExampleReader(TOKENIZER, EOS, **settings).read([file]))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"prompt": "a, b", "completion": "c"}\n\n{"prompt": "d", "completion": "e"}'),
        (
            "a.jsonl",
            '\ufeff{"prompt": "a, b", "completion": "c", "messages": null, "output_ids": null}\n'
            '{"prompt": "d", "completion": "e"}',
        ),
        ("a.csv", 'prompt,completion\n"a, b",c\nd,e\n'),
        ("A.CSV", 'prompt,completion\n"a, b",c\nd,e\n'),
        ("a.csv", "\ufeffprompt;completion\na, b;c\nd;e\n"),
        ("a.tsv", "prompt\tcompletion\na, b\tc\nd\te\n"),
        ("a.csv", '"note, of whom, or why";prompt;completion\n"x, y\n";a, b;c\n;d;e\n'),
    ],
)
def test_each_kind_of_file_gives_the_same_examples(name: str, content: str, tmp_path: Path) -> None:
    want = [(ids("a, b"), [*ids(" c"), EOS]), (ids("d"), [*ids(" e"), EOS])]
    assert read(written(tmp_path, content, name)) == want


def test_many_rows_are_cut_as_one_alone_is(tmp_path: Path) -> None:
    pairs = [(f"row {i}", f"{'x' * (i % 7)} {i}") for i in range(600)]
    lines = "".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in pairs)
    for joint in (" ", ""):
        fields = Fields("a", "q", joint)
        alone = ExampleReader(TOKENIZER, EOS, fields=fields)
        want = [alone.of({"q": prompt, "a": output}, "") for prompt, output in pairs]
        assert read(written(tmp_path, lines), fields=fields) == want
        assert [*want[1][0], *want[1][1]] == [*ids(f"row 1{joint}x 1"), EOS]


def test_prompts_begin_with_what_the_tokenizer_puts_before_a_text(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    opening = byte_level_tokenizer()
    first = opening.token_to_id("a")
    opening.post_processor = TemplateProcessing(single="a $A", special_tokens=[("a", first)])
    file = written(tmp_path, '{"prompt": "b", "completion": "c"}\n{"completion": "c"}')
    known, unknown = ExampleReader(opening, EOS).read([file])
    assert known == ([first, *ids("b")], [*ids(" c"), EOS])
    assert unknown == ([], [*ids("c"), EOS])  # a prompt that is not known begins with nothing


def test_a_chat_is_read_as_the_model_s_template_writes_it(tmp_path: Path) -> None:
    def render(asked: dict[str, Any]) -> tuple[str, list[int]]:
        text = "".join(f"[{m['content']}]" for m in asked["messages"])
        return text, [7, *ids(text)]

    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    file = written(tmp_path, json.dumps({"messages": chat}) + "\n")
    assert read(file, render=render) == [([7, *ids("[q]")], [*ids("yes"), EOS])]
    # "a t" ends in one token with what follows; what is served ends as the template does.
    joined = written(tmp_path, json.dumps({"messages": [chat[0], {**chat[1], "content": "he"}]}))
    assert ids("a the")[:2] != ids("a t")
    found = read(joined, render=lambda _: ("a t", ids("a t")))
    assert found == [(ids("a t"), [*ids("he"), EOS])]
    for messages, why in (
        (chat[:1], "the last one must be the assistant's"),
        (chat[1:], "nothing is asked"),
        ([*chat[:1], {"role": "assistant", "tool_calls": []}], "the assistant's, with text"),
        ([*chat[:1], {"role": "assistant", "content": []}], r"messages\[1\].content: must be a st"),
        ([1], "objects with a role"),
    ):
        with pytest.raises(ConfigError, match=why):
            read(written(tmp_path, json.dumps({"messages": messages}), "b.jsonl"), render=render)
    with pytest.raises(ConfigError, match="no chat template"):
        read(file)
    assert turn_of({"messages": chat}, "x", Fields()).gold == "yes"
    asked = turn_of({"messages": chat, "tools": [1], "n": 2}, "x", Fields()).asked
    assert asked == {"messages": chat[:1], "tools": [1]}


@pytest.mark.parametrize("tools", ["", "{{ tools }}"])
def test_a_chat_is_rendered_as_the_server_does_it(tools: str) -> None:
    """Else a model is trained on prompts that it never gets."""
    source = "{% for m in messages %}[{{ m.role }}:{{ m.content }}{{ m.tool_calls }}]{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 2}'}}
    none = {"name": None, "tool_calls": None, "tool_call_id": None}  # as Parquet has it
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "x"}], "weight": 1, **none},
        {**none, "role": "assistant", "content": None, "tool_calls": [call]},
        {**none, "role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    render = chat_render(ChatTemplate(source + tools, TOKENIZER))
    text, found = render({"messages": messages})
    assert found == ids(text)
    function = {"name": "f", "description": "F.", "parameters": {"type": "object"}}
    offered = [{"type": "function", "function": function}]
    told, found = render({"messages": messages, "tools": offered})
    assert found == ids(told)
    if tools:
        assert told == text.replace("None", str(offered))
    else:
        assert told.startswith("[system:x\n\n") and json.dumps(offered[0]) in told
    with pytest.raises(RequestError, match=r"tools\[0\].function.name is required"):
        render({"messages": messages, "tools": [{"type": "function", "function": {}}]})
    if tools:
        shown = {**call, "function": {"name": "f", "arguments": {"a": 2}}}
        assert text == f"[system:x][assistant:[{shown}]][tool:3]None"
    else:
        asked = json.dumps({"name": "f", "arguments": {"a": 2}})
        told = f"[assistant:<tool_call>\n{asked}\n</tool_call>]"
        assert text == f"[system:x]{told}[user:<tool_response>\n3\n</tool_response>]"
    with pytest.raises(RequestError, match=r"messages\[2\].tool_call_id"):
        render({"messages": [*messages[:2], {"role": "tool", "content": "3"}]})


def test_no_output_holds_a_control_token(tmp_path: Path) -> None:
    """Whoever writes the data would write the model's control tokens."""
    end = TOKENIZER.get_added_tokens_decoder()[EOS].content
    ended = written(tmp_path, json.dumps({"prompt": "a", "completion": f"b{end}\n"}))
    assert read(ended) == [(ids("a"), [*ids(" b"), EOS])]
    inside = written(tmp_path, json.dumps({"prompt": "a", "completion": f"b{end}c"}))
    with pytest.raises(ConfigError, match=r"data\.jsonl:1: completion: holds .* control token"):
        read(inside)


BAD: dict[str, list[tuple[str | bytes, str]]] = {
    "data.jsonl": [
        ("[" * 100_000, "1: no JSON: it is nested too deeply"),
        ('{"prompt": ' + "[" * 100_000, "1: no JSON: it is nested too deeply"),
        ('{"prompt": "\\ud800", "completion": "x"}', "1: holds half a character"),
        (b'{"prompt": "\xff"}', "1: not UTF-8"),
        (json.dumps({"prompt": "a " + "x" * 200_000, "completion": ""}), "a word of more than"),
        ('{"output_ids": [99999999]}', "1: output_ids: 99999999 is not below 500"),
        ('{"output_ids": [-1]}', "must be a list of token ids"),
        ('{"output_ids": []}', "1: output_ids: is empty"),
        ('{"output_ids": [true]}', "must be a list of token ids"),
        ('\n{"prompt": "a"}', r"2: completion: is missing \(there are: prompt\); --field says"),
        ('{"prompt": "a", "completions": ""}', "did you mean --field completions"),
        ('{"prompt": "a", "completion": null}', "completion: is missing"),
        ('{"prompt": 1, "completion": "a"}', "prompt: is no text"),
        ('["a"]', "a line must be an object"),
        ("{,}", "1: no JSON"),
    ],
    "data.csv": [
        ("prompt,completion\na,b,c\n", "2: must have 2 fields"),
        ("prompt,completion,prompt,,\na,b,c,,\n", "1: prompt: is there twice"),
        ('prompt,completion\na,b\na,"b\n', "3: unexpected end"),
        ('prompt,completion\n"a" b,c\n', "2: ',' expected after"),
        ('"a" b,c\na,b\n', "1: ',' expected after"),
        (b"prompt,completion\n\xff,b\n", "not UTF-8"),
        ("utterance,label\na,b\n", r"2: completion: is missing \(there are: utterance, label\)"),
    ],
}


@pytest.mark.parametrize(
    ("name", "content", "why"), [(name, *row) for name, rows in BAD.items() for row in rows]
)
def test_bad_lines_and_tables_are_named_with_their_reason(
    name: str, content: str | bytes, why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        read(written(tmp_path, content, name), vocab_size=500)


def test_a_word_that_is_too_long_is_found_in_a_glance_at_each_letter() -> None:
    began = time.process_time()
    long = ("a" * 100_000 + " ") * 3
    assert Fields().prompt_of({"prompt": long}, "x") == long
    with pytest.raises(ConfigError, match="x: prompt: has a word of more than 100000 letters"):
        Fields().prompt_of({"prompt": f"{long}{'a' * 100_001}"}, "x")
    assert time.process_time() - began < 2.0, "looked for at each letter it takes a minute"


def test_a_row_may_lack_a_prompt_but_not_one_that_was_named(tmp_path: Path) -> None:
    file = written(tmp_path, "question,completion\na,b\n", "data.csv")
    assert read(file) == [([], [*ids("b"), EOS])]
    assert read(file, fields=Fields(prompt_field="question")) == [(ids("a"), [*ids(" b"), EOS])]
    with pytest.raises(ConfigError, match=r"questoin: is missing .*mean --prompt-field qu"):
        read(file, fields=Fields(prompt_field="questoin"))


def test_a_table_is_the_server_s_though_the_tokenizer_would_cut_texts(folder: Path) -> None:
    file = str(folder / "tokenizer.json")
    cutting = Tokenizer.from_file(file)
    cutting.enable_truncation(16)
    cutting.save(file)
    tokenizer, table, _ = open_table(folder)
    served = served_model(ModelConfig(name="m", path="m"), folder, None)
    assert table.fingerprint == served.table.fingerprint
    assert len(tokenizer.encode("a" * 100).ids) == len(served.tokenizer.encode("a" * 100).ids) > 16


def test_a_multimodal_model_s_table_is_that_of_its_text_part(folder: Path) -> None:
    _, table, eos = open_table(folder)
    plain = json.loads((folder / "config.json").read_text())
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps({"text_config": plain}))
    _, found, eos_found = open_table(folder)
    assert (found.fingerprint, found.vocab_size, eos_found) == (
        table.fingerprint, table.vocab_size, eos
    )  # fmt: skip
    del plain["vocab_size"]  # as Gemma 3's: the server's table has what the family has then
    told = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": plain}
    (folder / "config.json").write_text(json.dumps(told))
    assert open_table(folder)[1].vocab_size == 262208


def test_a_model_s_file_that_is_damaged_or_gone_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json: No such file"):
        open_table(folder)
    for text in ("{", "[1]"):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json: \w+Error: "):
            open_table(folder)
