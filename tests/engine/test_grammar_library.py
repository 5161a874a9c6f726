"""llguidance's C interface: what is built when, and what it refuses. Masks and forced tokens are
compared with the Python classes in test_text_cutter.py and test_grammar.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from server.engine.grammar import GrammarCompiler
from server.engine.grammar_library import LibraryTokenizer
from server.engine.grammar_tokenizer import (
    GrammarTokenizer,
    open_tables,
    prepare_grammar_tokenizer,
)
from server.grammar_text import grammar_text
from server.machine import release_code
from server.types import GrammarSpec
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.engine.tiny_vocabularies import read_grammar_tokenizer

LETTERS = [b"", b"\xff<end>", *(bytes([i]) for i in range(256))]


def _library(eos: tuple[int, ...] = (1,)) -> LibraryTokenizer:
    return LibraryTokenizer(
        np.array([len(piece) for piece in LETTERS], np.uint32),
        np.frombuffer(b"".join(LETTERS), np.uint8),
        eos,
        lambda text: [2 + byte for byte in text.encode()],
        (),
    )


def test_more_forced_tokens_than_fit_at_first() -> None:
    matcher = _library().matcher(grammar_text(GrammarSpec("regex", "a{200}b?")))
    assert matcher.forced(1000) == [2 + ord("a")] * 200
    assert matcher.forced(150) == [2 + ord("a")] * 150
    assert matcher.forced(10) == [2 + ord("a")] * 10


def test_a_token_that_does_not_match_changes_nothing() -> None:
    matcher = _library().matcher(grammar_text(GrammarSpec("regex", "ab")))
    assert not matcher.consume(2 + ord("b")) and not matcher.error
    assert matcher.consume(2 + ord("a")) and not matcher.is_accepting
    copy = matcher.copy()
    assert copy.consume(2 + ord("b")) and copy.is_accepting and copy.is_stopped
    assert matcher.rollback(1) and matcher.consume(2 + ord("a"))


def test_what_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="out of range"):
        _library(eos=(len(LETTERS),))
    with pytest.raises(ValueError, match="out of range"):
        _library(eos=(1, len(LETTERS)))
    assert "unclosed" in _library().matcher(grammar_text(GrammarSpec("regex", "("))).error


def test_nothing_is_built_before_the_first_grammar(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    file, kept = tmp_path / "tokenizer.json", tmp_path / "kept"
    file.write_text(tokenizer.to_str(), encoding="utf-8")
    prepare_grammar_tokenizer(file, kept)
    assert open_tables(kept).num_ids
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    num_loads = 0

    def load() -> GrammarTokenizer:
        nonlocal num_loads
        num_loads += 1
        return read_grammar_tokenizer(tokenizer, size)

    compiler = GrammarCompiler(load)
    assert num_loads == 0
    found = [compiler.compile(GrammarSpec("regex", text)) for text in ("a", "b", "a")]
    assert found[0].result() is found[2].result() is not found[1].result()
    assert compiler.tokenizer() is compiler.tokenizer() and num_loads == 1
    compiler.close()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux alone tells of pages")
def test_code_that_compiled_leaves_memory_and_what_runs_again_says_the_same() -> None:
    def resident() -> int:
        """KiB of llguidance's code."""
        kib, counts = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split()[0]:
                counts = "/llguidance/" in line and " r-xp " in line
            elif counts and line.startswith("Rss:"):
                kib += int(line.split()[1])
        return kib

    matcher = _library().matcher(grammar_text(GrammarSpec("json_schema", '{"type": "object"}')))
    before, after = (np.zeros((len(LETTERS) + 31) // 32, np.uint32) for _ in range(2))
    assert matcher.copy().fill_mask(before) and before.any()
    used = resident()
    assert release_code("/llguidance/") > used * 1024
    assert resident() == 0 < used
    assert matcher.fill_mask(after) and (after == before).all()
    assert 0 < resident() < used
    assert release_code("/no such library/") == 0
