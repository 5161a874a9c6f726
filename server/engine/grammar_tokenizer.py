"""A tokenizer for grammars that never reads the name of a control token in a text as that token.

A tokenizer.json turns "<|im_end|>" inside any text into the control token of that name, and
llguidance asks it how a forced text is tokenized. Then a schema's constant, a choice or a tool's
enum that holds such a name would end the answer, or be refused. So llguidance gets the tokenizer
with those names replaced by random ones that no client can guess; the ids stay the same. A Lark
grammar may still ask for a control token, by its name without quotes or as <[id]>.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from server.types import GrammarSpec
    from vocab_store.enrichment import Enrichment

_LARK = re.compile(
    r"""
    (?P<other> "(?:\\.|[^"\\])*" | //[^\n]* | /(?:\\.|[^/\\\n])+/ )
    | (?P<name> <[^<>\s"/\[\]]+> )
    """,
    re.VERBOSE,
)
"""A literal, comment or regular expression of Lark, or the name of a control token."""


@dataclass(frozen=True, slots=True)
class GrammarTokenizer:
    """library: llguidance's tokenizer. hidden: id of each control token whose name was replaced."""

    library: LLTokenizer
    hidden: Mapping[str, int]

    def spelled(self, spec: GrammarSpec) -> GrammarSpec:
        """The grammar with control tokens named by their ids."""
        if spec.kind != "lark" or "<" not in spec.source:
            return spec

        def by_id(found: re.Match[str]) -> str:
            token_id = self.hidden.get(found["name"] or "")
            return found[0] if token_id is None else f"<[{token_id}]>"

        return replace(spec, source=_LARK.sub(by_id, spec.source))


def load_grammar_tokenizer(
    tokenizer_file: Path | str,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    enrichment: Enrichment | None = None,
) -> GrammarTokenizer:
    """llguidance's view of a tokenizer.json. Takes 0.3 s for 49,000 ids and 3 s for 262,000, and
    holds the interpreter lock meanwhile.

    vocab_size: the model's, which may be padded above the tokenizer's; padded ids are in no mask.
    enrichment: tokens of the model's own; a forced text is cut into the fewest ids.
    """
    from llguidance import LLTokenizer

    spec = json.loads(Path(tokenizer_file).read_text(encoding="utf-8"))
    spec["truncation"] = spec["padding"] = None
    hidden = _hide(spec)
    library = LLTokenizer(json.dumps(spec), n_vocab=vocab_size, eos_token=list(eos_token_ids))
    known = GrammarTokenizer(library, hidden)
    if enrichment is None:
        return known
    return enriched_grammar_tokenizer(known, vocab_size, eos_token_ids, enrichment)


def enriched_grammar_tokenizer(
    base: GrammarTokenizer,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    enrichment: Enrichment,
) -> GrammarTokenizer:
    """`base` with an enrichment's tokens. Takes a third of load_grammar_tokenizer's time, so a
    running engine uses it for adapters."""
    from llguidance import LLTokenizer

    special = sorted({*base.hidden.values(), *eos_token_ids})
    wide: Any = _EnrichedTokenizer(base.library, enrichment, vocab_size, special, eos_token_ids[0])
    library = LLTokenizer(wide, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    return GrammarTokenizer(library, base.hidden)


class _EnrichedTokenizer:
    """What llguidance asks of a tokenizer (its TokenizerWrapper), with an enrichment's tokens.

    tokens[i] are the bytes of id i; an id without a token has none and is in no mask.
    """

    is_tokenizer_wrapper = True

    def __init__(
        self,
        base: LLTokenizer,
        enrichment: Enrichment,
        vocab_size: int,
        special_token_ids: Sequence[int],
        eos_token_id: int,
    ) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id: int | None = None
        self.special_token_ids = list(special_token_ids)
        pieces = [base.decode_bytes([i]) for i in range(min(base.vocab_size, vocab_size))]
        pieces += [b""] * (vocab_size - len(pieces))
        for token_id, parts in zip(enrichment.ids, enrichment.parts, strict=True):
            pieces[token_id] = b"".join(pieces[part] for part in parts)
        self.tokens = pieces
        self._base = base
        self._segment = enrichment.segment

    def __call__(self, text: str) -> list[int]:
        return self._segment(self._base.tokenize_str(text))


def _hide(spec: dict[str, Any]) -> dict[str, int]:
    """Rename the control tokens of a tokenizer.json; their names and ids.

    Those are the special ones and what llguidance takes for one: an added token like <tool_call>.
    Other added tokens ("   ") are text like any other.
    """
    secret = secrets.token_hex(16)  # a name that could be guessed could be written
    hidden: dict[str, int] = {}
    new_names: dict[str, str] = {}
    for token in spec.get("added_tokens") or ():
        name, token_id = token["content"], int(token["id"])
        if token.get("special") or (name.startswith("<") and name.endswith(">")):
            hidden[name] = token_id
            new_names[name] = token["content"] = f"<{secret}-{token_id}>"
    model = spec["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {new_names.get(name, name): i for name, i in vocab.items()}
    elif vocab is not None:  # Unigram: [piece, score] by id
        model["vocab"] = [[new_names.get(name, name), score] for name, score in vocab]
    if model.get("unk_token") in new_names:
        model["unk_token"] = new_names[model["unk_token"]]
    return hidden
