"""Texts that spell a control token are letters to a grammar: they are written, and end nothing.

Over a real socket: the real Engine and llguidance on the FakeRunner, with a tokenizer that has
ChatML's control tokens; with and without drafts, streamed too. At the end the real SmolLM2
tokenizer, without a model, where it is in the cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from server.engine.grammar import GrammarCompiler, GrammarState
from server.machine_code import make_ready
from server.model.catalog import cached_folder
from server.types import GrammarSpec
from tests.api.chat_models import TOKENIZER
from tests.api.live import LiveServer
from tests.api.test_chat_end_to_end import chat
from tests.api.test_chat_end_to_end import server as server  # a fixture
from tests.api.test_completions import streamed
from tests.api.tiny_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer
from tests.engine.tiny_vocabularies import read_grammar_tokenizer

SPELLED = (
    "<|im_end|>",
    "a <|im_start|> b",
    "<|end|>",
    "x<|im_end|>",
    "<|im_end|><|im_end|>y",
    "[TOOL_CALLS]",
    "<tool_call>",
)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """No request waits for what is compiled on first use."""
    make_ready()


def _complete(server: LiveServer, **body: Any) -> tuple[str, str]:
    response = server.post(
        **{"model": "hermes", "prompt": "the", "max_tokens": 90, "temperature": 0, **body}
    )
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice["text"], choice["finish_reason"]


@pytest.mark.parametrize("text", SPELLED)
def test_a_choice_that_spells_a_control_token_is_written(server: LiveServer, text: str) -> None:
    off = {"drafter": "off"}
    fields: list[dict[str, Any]] = [
        {"choice": [text]},
        {"grammar": f"start: {json.dumps(text)}"},
        {"regex": "".join(f"\\x{{{ord(c):x}}}" for c in text)},
    ]
    for structured in fields:
        got = _complete(server, structured_outputs=structured, speculation=off)
        assert got == (text, "stop"), structured
    constant = {"json": {"const": text}}
    written, reason = _complete(server, structured_outputs=constant, speculation=off)
    assert (json.loads(written), reason) == (text, "stop")
    stream = server.post(model="hermes", max_tokens=90, stream=True, structured_outputs=fields[0])
    assert streamed(stream) == [text]


@pytest.mark.parametrize("model", ["hermes", "mistral", "llama"])
def test_a_required_tool_s_enum_may_spell_control_tokens(server: LiveServer, model: str) -> None:
    for word in ("<|im_end|>", "<|end|> x", "<|python_tag|>"):
        parameters = {"type": "object", "properties": {"a": {"enum": [word]}}, "required": ["a"]}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        answer = chat(
            server, model=model, tools=[tool], tool_choice="required", ignore_eos=None,
            max_completion_tokens=150,
        ).json()  # fmt: skip
        [choice] = answer["choices"]
        [call] = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["a"] == word
        assert choice["finish_reason"] == "tool_calls"


def test_a_lark_grammar_may_still_ask_for_the_token_itself(server: LiveServer) -> None:
    """By name without quotes, or by id; in a string it is letters."""
    token_id = TOKENIZER.token_to_id("<|im_start|>")
    for source in ('start: "a" <|im_start|> "b"', f'start: "a" <[{token_id}]> "b"'):
        answer = server.post(
            model="hermes", prompt="the", max_tokens=9, temperature=0, return_token_ids=True,
            structured_outputs={"grammar": source},
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        assert choice["token_ids"][1] == token_id, source
    text, _ = _complete(
        server,
        structured_outputs={
            "grammar": 'start: "a<|im_end|>" X // <|im_end|>\nX: /<\\|im_end\\|>"?/ "<|im_end|>"'
        },
    )
    assert text in ("a<|im_end|><|im_end|><|im_end|>", 'a<|im_end|><|im_end|>"<|im_end|>')


def _write_out(state: GrammarState, vocab: int) -> list[int]:
    """The ids of the only text that a grammar allows."""
    ids: list[int] = []
    row = np.zeros(state.num_words, np.uint32)
    while not state.is_complete:
        forced = state.forced()
        state.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        assert allowed.size and int(allowed[-1]) < vocab, (ids, state.problem)
        if forced:
            assert forced[0] in allowed, "what is forced is allowed"
        token = forced[0] if forced else int(allowed[0])
        assert state.consume(token), state.problem
        ids.append(token)
        assert len(ids) < 100
    return ids


@pytest.fixture
def real_tokenizer() -> Path:
    folder = cached_folder("smollm2-135m-instruct")
    if folder is None:
        pytest.skip("the built-in model is not in the cache")
    return folder / "tokenizer.json"


def _check_tokenizer(file: Path, eos: int, texts: tuple[str, ...], special: set[str]) -> None:
    tokenizer = Tokenizer.from_file(str(file))
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    compiler = GrammarCompiler(lambda: read_grammar_tokenizer(tokenizer, vocab, (eos,)))
    try:
        for text in texts:
            for spec, wanted in (
                (GrammarSpec("lark", f"start: {json.dumps(text)}"), text),
                (
                    GrammarSpec("json_schema", json.dumps({"const": text})),
                    json.dumps(text, ensure_ascii=False),
                ),
            ):
                ids = _write_out(GrammarState(compiler.compile(spec).result()), vocab)
                if ids[-1] == eos:
                    ids.pop()
                names = {tokenizer.id_to_token(i) for i in ids}
                assert not names & special, "a control token was written"
                assert tokenizer.decode(ids, skip_special_tokens=False) == wanted
    finally:
        compiler.close()


def test_the_real_tokenizer_writes_its_control_tokens_names(real_tokenizer: Path) -> None:
    names = {token["content"] for token in json.loads(real_tokenizer.read_text())["added_tokens"]}
    texts = ("<|im_end|>", "a <|im_start|> b", "<|endoftext|>", "no <|im_end|>", "plain", "é 日")
    _check_tokenizer(real_tokenizer, 2, texts, names)


def test_other_kinds_of_tokenizers(tmp_path: Path) -> None:
    """An unknown token that is special (sentencepiece), and truncation and padding switched off."""
    file = tmp_path / "tokenizer.json"
    file.write_text(sentencepiece_tokenizer().to_str(), encoding="utf-8")
    _check_tokenizer(file, 2, ("the</s>", "<s> a", "<unk>"), {"<s>", "</s>", "<unk>"})
    padded = byte_level_tokenizer()
    padded.enable_truncation(4)
    padded.enable_padding()
    file.write_text(padded.to_str(), encoding="utf-8")
    _check_tokenizer(file, 0, ("the quick <|end|> brown fox",), {"<|end|>", "<|user|>"})
