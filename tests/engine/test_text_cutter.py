"""A TextCutter cuts as the tokenizer does, and grammars allow what they allowed with all of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from server import token_bytes
from server.engine.grammar import GrammarCompiler, GrammarState
from server.engine.grammar_tokenizer import (
    TextCutter,
    control_tokens,
    load_grammar_tokenizer,
    make_tables,
)
from server.grammar_text import grammar_text
from server.types import GrammarSpec
from tests.api.tiny_tokenizers import byte_level_tokenizer, chat_tokenizer, sentencepiece_tokenizer
from tests.engine.tiny_vocabularies import read_grammar_tokenizer
from tests.profiles import examples


def _with_spaces() -> Tokenizer:
    """Byte pairs with added tokens that are text, as SmolLM2's and Gemma's runs of spaces."""
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(
        [AddedToken("   ", normalized=False), AddedToken("fox j", normalized=True)]
    )
    return tokenizer


def _unigram() -> Tokenizer:
    pieces = ["<unk>", "</s>", "▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁abc"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(
        models.Unigram([(p, -float(i)) for i, p in enumerate(pieces)], 0, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


KINDS = {
    "byte level": byte_level_tokenizer,
    "chat": chat_tokenizer,
    "spaces": _with_spaces,
    "sentencepiece": sentencepiece_tokenizer,
    "unigram": _unigram,
}


def _whole(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """llguidance's own reading of a whole tokenizer, with all its sets of tokens, its control
    tokens named so that no text has their names."""
    spec = json.loads(tokenizer.to_str())
    names = control_tokens(spec)

    def hidden(piece: str) -> str:
        return f"<secret-{names[piece]}>" if piece in names else piece

    model = spec["model"]
    for token in spec["added_tokens"]:
        token["content"] = hidden(token["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden(piece): i for piece, i in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden(piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = hidden(model["unk_token"])
    return LLTokenizer(json.dumps(spec), n_vocab=vocab_size, eos_token=[0])


WORDS = ["the", " quick", "   ", "fox j", "<|user|>", "<unk>", "<tool_call>", "▁", "é", "🙂", "\n"]
WORDS += [" the", "hello", "SELECT", "1", "ab", "abc", " ", "\t", "<0x41>", "e\u0301", "中"]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_cut_as_by_the_whole_tokenizer(kind: str) -> None:
    tokenizer = KINDS[kind]()
    spec = json.loads(tokenizer.to_str())
    tables = make_tables(spec)
    assert (tables.pairs is None) == (kind == "unigram")
    cut = TextCutter(tables, Tokenizer.from_str)
    whole = _whole(tokenizer, tables.num_ids).tokenize_str

    @settings(max_examples=examples(150), deadline=None)
    @given(st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=12))
    def check(parts: list[str]) -> None:
        text = "".join(parts)
        assert cut(text) == whole(text)

    check()
    assert cut("") == []
    assert not set(cut("a<|user|>b<|end|></s>")) & set(tables.control.values())


def test_a_pair_is_merged_by_rank_and_from_the_left() -> None:
    """Also where a merge makes a pair that comes before those which wait."""
    rng = Random(3)
    vocab = {piece: i for i, piece in enumerate("abcd")}
    merges: list[tuple[str, str]] = []
    for _ in range(60):
        left, right = rng.choice(list(vocab)), rng.choice(list(vocab))
        if (left, right) not in merges and len(left + right) < 9:
            merges.append((left, right))
            vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    cut = TextCutter(make_tables(json.loads(tokenizer.to_str())), Tokenizer.from_str)
    for length in [*range(60), 3000]:
        text = "".join(rng.choice("abcd") for _ in range(length))
        assert cut(text) == tokenizer.encode(text).ids


SPECS = (
    GrammarSpec("regex", "(the |quick |é){1,4}fox <.user.> jumps"),
    GrammarSpec("regex", "[a-zT ]{0,40}[.,]"),
    GrammarSpec("json_schema", json.dumps({
        "type": "object",
        "properties": {"the": {"type": "string", "maxLength": 20}, "x": {"enum": ["the", "tan"]}},
        "required": ["the", "x"],
        "additionalProperties": False,
    }), " ?"),
    GrammarSpec("lark", 'start: "hello" <[1]> /[^"]+/ "🙂"'),
)  # fmt: skip


@pytest.mark.parametrize("kind", ["chat", "spaces", "sentencepiece"])
def test_masks_are_those_of_the_whole_tokenizer(tmp_path: Path, kind: str) -> None:
    """Along random texts, with what is forced; ids that pad the model are in none."""
    tokenizer = KINDS[kind]()
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer.to_str(), encoding="utf-8")
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True) + 7
    table = token_bytes.build(tokenizer, vocab_size)
    known = load_grammar_tokenizer(
        file, table, vocab_size, (0,), Tokenizer.from_str, None, tmp_path / "kept"
    )
    compiler, library = GrammarCompiler(lambda: known), _whole(tokenizer, vocab_size)
    rng = Random(kind)
    num_masks = num_forced = 0
    for spec in SPECS:
        for _ in range(4):
            state = GrammarState(compiler.compile(spec).result())
            whole = LLMatcher(library, grammar_text(spec), log_level=0)
            for _ in range(25):
                row = np.zeros(state.num_words, np.uint32)
                state.fill_mask(row)
                forced = state.forced()
                assert row.tobytes() == whole.compute_bitmask()
                assert forced == whole.compute_ff_tokens()
                num_masks += 1
                num_forced += len(forced)
                allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
                if allowed.size == 0 or state.is_complete:
                    break
                token_id = int(rng.choice(list(allowed)))
                assert state.consume(token_id) and whole.consume_token(token_id)
    assert num_masks > 50 and num_forced > 20
    compiler.close()


@pytest.mark.parametrize(
    ("source", "is_control"),
    [
        ('# one "\nstart: "a" <tool_call> "b"', True),
        ('start: "a" <tool_call> "b" // the end', True),
        ("start: /a<tool_call>b/", False),
        ("start: /a\n<tool_call>b/", False),
        ('start: "a<tool_call>b"', False),
        ('# "' + 20_000 * '\\"' + "\nstart: /a/ <tool_call> /b/", True),
    ],
    ids=["comment", "plain", "regex", "regex of lines", "literal", "a comment of quotes"],
)
def test_a_name_is_a_token_s_outside_comments_and_literals_alone(
    source: str, is_control: bool
) -> None:
    """And found in no time: the engine's steps wait for it."""
    tokenizer = chat_tokenizer()
    known = read_grammar_tokenizer(tokenizer, tokenizer.get_vocab_size(with_added_tokens=True))
    began_s = time.process_time()
    spelled = known.spelled(GrammarSpec("lark", source))
    assert time.process_time() - began_s < 1.0
    forced = known.library.matcher(grammar_text(spelled)).forced(99)
    assert (known.control["<tool_call>"] in forced) is is_control
    assert is_control or b"<tool_call>" in known.pieces.join(forced, skip_special=False)


def test_what_was_read_is_kept(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    file, kept = tmp_path / "tokenizer.json", tmp_path / "new" / "kept"
    file.write_text(tokenizer.to_str(), encoding="utf-8")
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    table = token_bytes.build(tokenizer, vocab_size)
    text = "the quick <|user|> fox"

    def ids() -> list[int]:
        return load_grammar_tokenizer(
            file, table, vocab_size, (0,), Tokenizer.from_str, None, kept
        ).cut(text)

    first = ids()
    whole = kept.read_bytes()
    file.rename(tmp_path / "elsewhere")
    assert ids() == first  # without the tokenizer's file
    (tmp_path / "elsewhere").rename(file)
    for damaged in (b"", whole[:100], b"x" * len(whole), whole[:-8]):
        kept.write_bytes(damaged)
        assert ids() == first
        assert kept.read_bytes() == whole


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer.to_str(), encoding="utf-8")
    table = token_bytes.build(tokenizer)
    with pytest.raises(ValueError, match="ids, the model 300"):
        load_grammar_tokenizer(file, table, 300, (0,), Tokenizer.from_str)
