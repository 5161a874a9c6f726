"""A GGUF's tokenizer: the ids are those of transformers' tokenizer of the same vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from server.api.chat_template import load_chat_template
from server.errors import UnsupportedModelError
from server.model.gguf_tokenizer import convert_tokenizer, eos_ids

TEXTS = ("Hello  world 12345", "I'M ÉTÉ's\n\n x", "  leading", "a\tb<end>c", "日本 12 hé", "")


def _ids(fields: dict[str, Any], folder: Path) -> list[list[int]]:
    convert_tokenizer(fields, folder, "m.gguf", lambda _: None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


def _theirs(fields: dict[str, Any]) -> list[list[int]]:
    from transformers.integrations import gguf

    known = {**fields, "tokenizer_type": fields["model"]}
    known["pre_tokenizer_type"] = fields.get("pre")
    backend, _ = cast("Any", gguf).convert_gguf_tokenizer(
        fields.get("architecture", "llama"), known
    )
    return [backend.encode(text, add_special_tokens=False).ids for text in TEXTS]


def _byte_level(pre: str, **more: Any) -> dict[str, Any]:
    """Bytes, and words whose merges cross the borders that only some pre-tokenizers cut at."""
    merges = ["1 2", "12 3", "123 4", "I '", "Ġ Ġ", "ĠĠ l", "l e", "' s", "Ċ Ċ", "h Ã"]
    tokens = ["<end>", "<begin>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [merge.replace(" ", "") for merge in merges]
    return {
        "model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges, "bos_token_id": 1,
        "token_type": [3, 3, *[1] * (len(tokens) - 2)], "eos_token_id": 0, **more,
    }  # fmt: skip


@pytest.mark.parametrize("pre", ["llama-bpe", "dbrx", "lfm2", "tekken", "gpt-4o", "qwen2"])
def test_text_is_cut_as_the_named_pre_tokenizer_cuts_it(pre: str, tmp_path: Path) -> None:
    fields = _byte_level(pre, add_bos_token=False)
    assert _ids(fields, tmp_path) == _theirs(fields)


def test_qwen35_cuts_as_transformers_class_of_it_does(tmp_path: Path) -> None:
    texts = ("he\u0301llo हिन्दी 12 x", "a\u0301\u0302b", "किताबें 3", *TEXTS)
    fields = _byte_level("qwen35", add_bos_token=False)
    convert_tokenizer(fields, tmp_path, "m.gguf", lambda _: None)
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    vocabulary = {token: i for i, token in enumerate(fields["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    theirs: Any = Qwen3_5Tokenizer(vocabulary, merges)  # type: ignore[arg-type]
    for text in texts:
        assert ours.normalizer.normalize_str(text) == theirs.backend_tokenizer.normalizer.normalize_str(text)  # noqa: E501  # fmt: skip
        cut = [tokenizer.pre_tokenizer.pre_tokenize_str(text) for tokenizer in (ours, theirs.backend_tokenizer)]  # noqa: E501  # fmt: skip
        assert cut[0] == cut[1]


def test_names_differ_where_their_patterns_do(tmp_path: Path) -> None:
    names = ("gpt-2", "smollm", "llama-bpe")
    ids = [_ids(_byte_level(pre, add_bos_token=False), tmp_path) for pre in names]
    assert len({str(found) for found in ids}) == len(names)


@pytest.mark.parametrize(
    ("pre", "said", "has_bos"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("tekken", None, True),
     ("qwen2", None, False), ("gpt-2", True, True), ("glm4", None, False)],
)  # fmt: skip
def test_bos_is_added_as_llama_cpp_adds_it(
    pre: str, said: bool | None, has_bos: bool, tmp_path: Path
) -> None:
    ids = _ids(_byte_level(pre, add_bos_token=said), tmp_path)
    assert all((found[:1] == [1]) == has_bos for found in ids)


def _sentencepiece(architecture: str) -> dict[str, Any]:
    words = ["\u2581", *"Helowrdab12345c", "ll", "lo", "\u2581w", "He", "Hell", "Hello", "or"]
    words += ["\u2581wor", "ld", "12", "\u2581le", "\u2581l"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words, "<end>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words), 4]
    return {
        "model": "llama", "architecture": architecture, "tokens": tokens, "token_type": kinds,
        "scores": [0.0] * 259 + [-float(i) for i in range(len(words))] + [0.0], "bos_token_id": 1,
        "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma3"])
def test_sentencepiece_merges_by_scores(architecture: str, tmp_path: Path) -> None:
    fields = _sentencepiece(architecture)
    got = _ids(fields, tmp_path)
    assert all(ids[0] == 1 for ids in got), "BOS is added unless the file says no"
    want = _theirs(fields)
    if architecture == "llama":
        # transformers puts no space in front of a space, nor behind a token of the user's, as it
        # does for Phi-3; llama.cpp does for all.
        got, want = got[:2] + got[4:], want[:2] + want[4:]
    assert [ids[1:] for ids in got] == want


def test_a_space_is_put_in_front_unless_the_file_says_no(tmp_path: Path) -> None:
    fields = _sentencepiece("ernie4_5")
    first = [_ids({**fields, "add_space_prefix": on}, tmp_path)[0][1] for on in (True, False)]
    assert [fields["tokens"][i] for i in first] == ["\u2581", "Hello"]


@pytest.mark.parametrize(("architecture", "drops"), [("phi3", True), ("llama", False)])
def test_tokens_of_phi3_drop_the_space_behind_them(
    architecture: str, drops: bool, tmp_path: Path
) -> None:
    """As its own tokenizer.json and llama.cpp have it; of the text before them, they drop none."""
    fields = _sentencepiece(architecture)
    convert_tokenizer(fields, tmp_path, "m.gguf", lambda _: None)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = [tokenizer.encode(f"He <end>{more}llo").ids for more in ("", " ", "\n \t")]
    assert [found == ids[0] for found in ids[1:]] == [drops, drops]
    assert tokenizer.encode("<s>llo").ids != tokenizer.encode("<s> llo").ids


@pytest.mark.parametrize(
    ("named", "template", "ends"),
    [
        ({"eos_token_id": 0}, "{{ x }}<end_of_turn>", [0, 3]),
        ({"eos_token_id": 3}, "<end_of_turn>", [3]),
        ({"eos_token_id": 0, "eot_token_id": 2}, "<|end|><end_of_turn>", [0, 2, 3]),
        ({"eos_token_id": 0}, "<|im_end|>", [0]),
        ({"eos_token_id": 0}, None, [0]),
        ({}, "<|end|>", [2]),
    ],
)
def test_a_text_ends_where_the_template_ends_a_turn(
    named: dict[str, int], template: str | None, ends: list[int]
) -> None:
    """A Gemma 3 for chats calls <eos> its EOS and nothing else, a Phi-3 <|endoftext|>."""
    fields: dict[str, Any] = {"tokens": ["<eos>", "a", "<|end|>", "<end_of_turn>"], **named}
    if template is not None:
        fields["chat_template"] = template
    assert eos_ids(fields) == ends


def test_what_is_not_known_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"pre-tokenizer 'bloom' is not known"):
        _ids(_byte_level("bloom"), tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"'t5' \(tokenizer.ggml.model\), gpt2 and"):
        _ids({**_byte_level("gpt-2"), "model": "t5"}, tmp_path)


def test_the_chat_template_and_special_tokens_are_kept(tmp_path: Path) -> None:
    _ids(_byte_level("gpt-2", chat_template="{{ x }}", tool_template="{{ tools }}"), tmp_path)
    found = load_chat_template(tmp_path, Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    assert found is not None and (found.source, found.tool_source) == ("{{ x }}", "{{ tools }}")
    assert '"bos_token": "<begin>"' in (tmp_path / "tokenizer_config.json").read_text()
