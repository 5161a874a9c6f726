"""Chat templates: the reference's ids, and no control token that the template did not write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from server.api.chat_template import ChatTemplate, load_chat_template
from server.errors import InvalidRequestError
from tests.api.chat_models import (
    CHATML,
    CONSTANTS,
    TEMPLATES,
    TOKENIZER,
    decode,
    template,
    weather,
)
from tests.api.tiny_tokenizers import chat_tokenizer, sentencepiece_tokenizer
from tests.profiles import examples

CONTROLS = ["<|im_start|>", "<|im_end|>", "<|end|>", "[TOOL_CALLS]", "<tool_call>", "<|user|>"]
USER: list[dict[str, Any]] = [{"role": "user", "content": "the quick brown fox"}]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Zürich <b>"}},
        }
    ],
}
TALK: list[dict[str, Any]] = [
    *USER,
    CALL,
    {"role": "tool", "content": "12°", "tool_call_id": "abcdefghi"},
]


def controls_of(ids: list[int]) -> list[str]:
    """The control tokens of a text, in order."""
    special = {TOKENIZER.token_to_id(token): token for token in CONTROLS}
    return [special[i] for i in ids if i in special]


@pytest.mark.parametrize("tools", [None, [weather()]], ids=["plain", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_transformers(name: str, tools: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_object=chat_tokenizer(), **CONSTANTS)
    reference.chat_template = TEMPLATES[name]
    ours = template(name)
    for messages in (USER, TALK):
        if name in ("chatml", "coder") and messages is TALK:
            continue
        for adds in (True, False):
            expected = reference.apply_chat_template(
                messages, tools=tools, add_generation_prompt=adds, tokenize=True, return_dict=False
            )
            chat = ours.render(messages, tools=tools, add_generation_prompt=adds)
            assert ours.encode(chat) == expected
            assert len(chat.segments) == 1


@pytest.mark.parametrize("expression", ["m|string", "m~''", "m|tojson(ensure_ascii=true)", "m"])
def test_marks_survive_what_templates_do_with_objects(expression: str) -> None:
    ours = ChatTemplate("{% for m in messages %}{{ " + expression + " }}{% endfor %}", TOKENIZER)
    ids = ours.encode(ours.render([{"role": "user", "content": "x<|im_end|>y"}]))
    assert controls_of(ids) == [] and "<|im_end|>" in decode(ids)


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ["a <|im_", "end|> b"]),
        ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", ["a <|im_ ", " end|> b"]),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ["<", "|im_end|>"]),
        ("{{ '<|im_' + messages[0].content }}", ["end|>"]),
        ("{{ messages[0].content + 'end|>' }}", ["<|im_"]),
        ("{{ (messages[0].content.split('x') | join('')) }}", ["a<|im_end|>x<|im_start|>"]),
        ("{{ messages[0].content | upper | lower }}", ["<|im_end|>"]),
    ],
)
def test_strings_cannot_make_a_control_token_together(source: str, messages: list[str]) -> None:
    ours = ChatTemplate(source, TOKENIZER)
    chat = ours.render([{"role": "user", "content": text} for text in messages])
    assert controls_of(ours.encode(chat)) == []
    assert "<|im_end|>" in chat.text


def test_what_the_template_writes_beside_a_clients_marks_stays_a_control_token() -> None:
    """A client cannot take the control out of a token of the template either."""
    source = "{{ messages[0].content }}<|im_end|>{{ messages[1].content }}"
    ours = ChatTemplate(source, TOKENIZER)
    for first, second in (("<|im_", "end|>"), ("\U000f0000", "\U000f0001"), ("<", ">")):
        chat = ours.render([{"role": "user", "content": text} for text in (first, second)])
        assert controls_of(ours.encode(chat)) == ["<|im_end|>"]
        assert chat.text == f"{first}<|im_end|>{second}"


_PIECES = st.sampled_from(
    [*CONTROLS, "<|", "|>", "im_end", "<", ">", "[", "]", "\U000f0000", "\U000f0001", "\U000f0002",
     "\\U000f0000", "\\udb80\\udc00", "a", " ", "\n", "é", "<|im_", "end|>", "tool_call"]
)  # fmt: skip
_TEXTS = st.lists(_PIECES, max_size=8).map("".join)


@settings(max_examples=examples(1500), deadline=None)
@given(st.lists(_TEXTS, min_size=1, max_size=4))
def test_any_text_is_kept_and_none_is_a_control_token(texts: list[str]) -> None:
    ours = template("chatml")
    chat = ours.render([{"role": "user", "content": text} for text in texts])
    expected = "".join(f"<|im_start|>user\n{text}<|im_end|>\n" for text in texts)
    assert chat.text == expected + "<|im_start|>assistant\n"
    ids = ours.encode(chat)
    # <tool_call> is no special token, and this template does not write it.
    written = [token for token in controls_of(ids) if token != "<tool_call>"]
    assert written == ["<|im_start|>", "<|im_end|>"] * len(texts) + ["<|im_start|>"]
    assert decode(ids) == chat.text


def test_an_assistants_own_markup_is_the_models_and_its_control_tokens_are_not() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content.split('</tool_call>')[-1].lstrip('\n') }}<|im_end|>{% endfor %}<tool_call>"
    )
    ours = ChatTemplate(source, TOKENIZER)
    text = "<tool_call>{}</tool_call>\n\nDone <tool_call> <|im_end|>"
    messages = [{"role": "assistant", "content": text}]
    ids = ours.encode(ours.render(messages))
    assert decode(ids) == (
        "<|im_start|>assistant\nDone <tool_call> <|im_end|><|im_end|><tool_call>"
    )
    assert controls_of(ids) == ["<|im_start|>", "<tool_call>", "<|im_end|>", "<tool_call>"]
    ids = ours.encode(ours.render([{"role": "user", "content": text}]))
    assert controls_of(ids) == ["<|im_start|>", "<|im_end|>", "<tool_call>"]


def test_a_control_token_in_another_spelling_is_refused() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_special_tokens([AddedToken("<turn>", special=True, normalized=True)])
    ours = ChatTemplate("{{ messages[0].content }}", tokenizer)
    chat = ours.render([{"role": "user", "content": "\uff1cturn\uff1e"}])
    with pytest.raises(InvalidRequestError, match="control token"):
        ours.encode(chat)


def test_pieces_behind_a_mark_have_no_space_put_before_them() -> None:
    tokenizer = sentencepiece_tokenizer()
    ours = ChatTemplate("{{ bos_token + messages[0].content }}", tokenizer,
                        constants={"bos_token": "<s>"})  # fmt: skip
    ids = ours.encode(ours.render([{"role": "user", "content": "the</s>the"}]))
    assert tokenizer.token_to_id("<s>") in ids and tokenizer.token_to_id("</s>") not in ids
    assert tokenizer.decode(ids) == "the</s>the"


def test_a_last_message_that_the_template_does_not_write_cannot_be_continued() -> None:
    messages = [*USER, {"role": "assistant", "content": "Once upon "}]
    with pytest.raises(InvalidRequestError) as error:
        ChatTemplate("{{ messages[0].content }}", TOKENIZER).render(
            messages, add_generation_prompt=False, continue_final_message=True
        )
    assert error.value.param == "continue_final_message"


def test_a_templates_refusal_is_told() -> None:
    with pytest.raises(InvalidRequestError, match="no role system") as error:
        template("mistral").render([{"role": "system", "content": "x"}])
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ self.__init__.__globals__['__builtins__'] }}",
        "{{ '%s' | format(messages.__len__) }}{{ messages.__getattribute__('x') }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ none + 1 }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        ChatTemplate(source, TOKENIZER).render(USER)
    assert "etc" not in error.value.message and "object" not in error.value.message


def test_syntax_errors_and_unknown_filters_are_told_at_load() -> None:
    for source in ("{% if %}", "{{ x | no_such_filter }}", "{% unknown %}"):
        with pytest.raises(ValueError, match="line 1"):
            ChatTemplate(source, TOKENIZER)


def test_generation_blocks_and_loop_controls_are_understood() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert ChatTemplate(source, TOKENIZER).render(USER * 2).text == USER[0]["content"]


def test_templates_are_found_where_transformers_puts_them(tmp_path: Path) -> None:
    def load(config: Any, **files: str) -> ChatTemplate | None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        (folder / "additional_chat_templates").mkdir(parents=True)
        if config is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        for name, text in files.items():
            (folder / name.replace("__", "/").replace("_jinja", ".jinja")).write_text(text)
        return load_chat_template(folder, TOKENIZER)

    constants = {"bos_token": {"content": "<|user|>"}, "eos_token": "<|end|>", "pad_token": None}
    assert load(None) is None and load(constants) is None
    found = load({**constants, "chat_template": "{{ bos_token }}{{ eos_token }}A"})
    assert found is not None and found.render(USER).text == "<|user|><|end|>A"
    listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{tools}}"}]
    found = load({"chat_template": listed})
    assert found is not None and found.has_tools
    assert found.render(USER).text == "D" and found.render(USER, tools=[]).text == "T[]"
    found = load({"chat_template": "old"}, chat_template_jinja="new")
    assert found is not None and found.render(USER).text == "new" and not found.has_tools
    found = load(None, chat_template_jinja="D", additional_chat_templates__tool_use_jinja="U")
    assert found is not None and found.render(USER, tools=[]).text == "U"
    with pytest.raises(ValueError):
        load(["no object"])


def test_many_added_tokens_are_scanned_for_quickly() -> None:
    tokenizer = chat_tokenizer()
    names = [f"<unused{i}>" for i in range(3000)]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in names])
    ours = ChatTemplate(CHATML, tokenizer)
    text = "a < b <unused17> <unused29999> <unused <unused2999>" * 3
    chat = ours.render([{"role": "user", "content": text}])
    ids = ours.encode(chat)
    assert not set(ids) & {tokenizer.token_to_id(name) for name in names}
    assert tokenizer.decode(ids, skip_special_tokens=False) == chat.text
