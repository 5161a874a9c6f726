"""A GrammarSpec in llguidance's own form, its limits, and a check that needs no tokenizer.

Both processes use this module: the API refuses grammars that cannot be compiled before admission,
and an engine compiles them for its tokenizer (server/engine/grammar.py). llguidance releases the
interpreter lock while it compiles, and its limits bound time and memory.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.types import GrammarSpec

MAX_SOURCE_CHARS = 1 << 18
"""Longest schema, expression or grammar. OpenAI's limit for schemas is 120,000 characters."""

MAX_GBNF_CHARS = 1 << 16
"""Longest grammar in llama.cpp's form, which is translated."""

GRAMMAR_LIMITS: dict[str, Any] = {
    "max_grammar_size": 200_000,  # symbols; a schema of 2,000 string properties has about 20,000
    "max_lexer_states": 50_000,  # one or two kB each
    "initial_lexer_fuel": 300_000,
    "verbose_errors": False,
}
"""llguidance's limits. Past one, the grammar is refused, or the request that uses it fails. Fuel
is operations on expressions before the first token: 9,000 alternatives take about 150,000. Each
byte that an expression forces takes four (`a{1000}{1000}` forces a million), and they are walked at
once, in the step loop when the expression does not begin with them: 0.1 s at this limit."""


def grammar_text(spec: GrammarSpec) -> str:
    """The grammar as llguidance takes it. Raises ValueError for what cannot be one."""
    from llguidance import LLMatcher

    if spec.kind == "json_schema":
        if not spec.whitespace:
            return LLMatcher.grammar_from_json_schema(
                spec.source, overrides={"whitespace_flexible": False}
            )
        return LLMatcher.grammar_from_json_schema(
            spec.source,
            overrides={"whitespace_flexible": True, "whitespace_pattern": spec.whitespace},
        )
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.source)
    if spec.kind == "gbnf":
        return LLMatcher.grammar_from_lark(_lark_of(spec.source))
    return LLMatcher.grammar_from_lark(spec.source)


_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)


def _plain(escape: re.Match[str]) -> str:
    """An escape of GBNF as one that llguidance's translation keeps whole, or as its character."""
    name = escape[1]
    code = ord(name) if name in ("[", "]") else int(name[1:] or "-1", 16)
    if code > 0x10FFFF:
        raise ValueError(f"{escape[0]} is no character")
    if code < 0 or 0xD800 <= code < 0xE000:
        return escape[0]
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _lark_of(gbnf: str) -> str:
    """llama.cpp's form of a grammar in llguidance's. Raises ValueError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(gbnf) > MAX_GBNF_CHARS:
        raise ValueError(f"GBNF of more than {MAX_GBNF_CHARS} characters")
    try:
        return gbnf_to_lark(_ESCAPE.sub(_plain, gbnf))
    except Exception as error:  # a parser of grammars: it may raise anything
        raise ValueError(f"not GBNF: {str(error)[:120]}") from None


def grammar_problem(spec: GrammarSpec) -> str:
    """Why the grammar cannot be compiled, on one line of printable ASCII; "" when it can be.

    Takes from a millisecond to about half a second, without the interpreter lock.
    """
    from llguidance import LLMatcher, LLParserLimits

    if len(spec.source) > MAX_SOURCE_CHARS:
        return f"longer than {MAX_SOURCE_CHARS} characters"
    try:
        message = LLMatcher.validate_grammar(
            grammar_text(spec), None, limits=LLParserLimits(**GRAMMAR_LIMITS)
        )
    except ValueError as error:
        message = str(error) or "not valid"
    if message.startswith("WARNING"):
        return ""
    return " ".join(message.split()).encode("ascii", "backslashreplace").decode()
