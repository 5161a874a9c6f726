"""Grammars over a model's own tokens: they are letters like the base ids they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from server.engine.grammar import GrammarCompiler, GrammarState
from server.types import GrammarSpec
from tests.api.tiny_tokenizers import unmerged_tokenizer
from tests.engine.tiny_vocabularies import allowed_ids, read_grammar_tokenizer
from vocab_store.enrichment import Enrichment

BASE, EOS = 128, 2


def _states(spec: GrammarSpec) -> tuple[GrammarState, GrammarState, Enrichment]:
    """(over base ids, over enriched ids, the enrichment)."""
    tokenizer = unmerged_tokenizer(BASE)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    parts = (ids("ab"), ids("cd"), ids("abc"), ids("dx"))
    enrichment = Enrichment("t", BASE, tuple(range(BASE, BASE + len(parts))), parts)

    def state(given: Enrichment | None, size: int) -> GrammarState:
        compiler = GrammarCompiler(lambda: read_grammar_tokenizer(tokenizer, size, (EOS,), given))
        return GrammarState(compiler.compile(spec).result())

    return state(None, BASE), state(enrichment, BASE + len(parts)), enrichment


@pytest.mark.parametrize("source", ["ab(cd|x)*", "a(b|bcdx)+", "(abc|dx)+y?"])
def test_an_own_token_is_allowed_where_its_parts_are(source: str) -> None:
    spec = GrammarSpec("regex", source)
    base, own, enrichment = _states(spec)
    rng = np.random.default_rng(5)
    num_consumed = 0
    for _ in range(6):
        allowed = set(allowed_ids(own))
        spelled = set()
        for token_id in enrichment.ids:
            taken = 0
            for part in enrichment.parts_of(token_id):
                if part not in allowed_ids(base):
                    break
                base.consume(part)
                taken += 1
            if taken == len(enrichment.parts_of(token_id)):
                spelled.add(token_id)
            base.rollback(num_consumed)
        assert allowed & set(enrichment.ids) == spelled
        letters = allowed - set(enrichment.ids)
        assert letters <= set(allowed_ids(base))
        choices = sorted(allowed - {EOS})
        if not choices:
            break
        token_id = int(rng.choice(choices))
        own.consume(token_id)
        for part in enrichment.parts_of(token_id):
            base.consume(part)
            num_consumed += 1
        assert own.is_complete == base.is_complete


def test_forced_text_is_written_in_the_fewest_ids() -> None:
    _, own, enrichment = _states(GrammarSpec("regex", "abcdx"))
    ids: list[int] = []
    while not own.is_complete and len(ids) < 8:
        forced = set(allowed_ids(own)) & set(enrichment.ids)
        longest = max(forced, key=lambda i: len(enrichment.parts_of(i)))
        own.consume(longest)
        ids.append(longest)
    assert ids == [BASE + 2, BASE + 3]  # "abc" "dx"
