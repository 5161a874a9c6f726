"""Unicode blocks of languages: the second filter of Algorithm 1 (arXiv 2508.15229, section 3.2).

No table of blocks or languages is typed by hand:

- blocks, scripts and script extensions come from `fontTools.unicodedata`, which is generated from
  the Unicode Character Database (Blocks.txt, Scripts.txt, ScriptExtensions.txt);
- a language's script comes from `langcodes`, which holds CLDR's likely subtags ("it" -> Latn,
  "zh" -> Hans, "sr" -> Cyrl, "sr-Latn" -> Latn);
- the four composite codes of ISO 15924 (Jpan, Kore, Hanb, Hrkt) and its variants (Hans, Hant, ...)
  are resolved as UTS #39, section 5.1, states, because the character database has no such scripts.

A block belongs to a set of languages when
  1. it is Basic Latin (digits, blanks and punctuation of every language), or
  2. none of its characters belongs to a script (punctuation, currency, arrows, mathematics,
     emoji), or
  3. it holds a character of one of their scripts, by Script_Extensions, and no other script owns
     more than half of it (so that two shared combining marks do not let Cyrillic into English).
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from vocab_store.errors import VocabStoreError

_ASCII_BLOCK = "Basic Latin"
_NO_SCRIPT = frozenset(("Zyyy", "Zinh", "Zzzz"))
# UTS #39, 5.1 (augmented script sets) and ISO 15924's variants of a script.
_COMPOSITE: dict[str, tuple[str, ...]] = {
    "Jpan": ("Hani", "Hira", "Kana"),
    "Kore": ("Hani", "Hang"),
    "Hanb": ("Hani", "Bopo"),
    "Hrkt": ("Hira", "Kana"),
    "Hans": ("Hani",),
    "Hant": ("Hani",),
    "Latf": ("Latn",),
    "Latg": ("Latn",),
    "Cyrs": ("Cyrl",),
    "Aran": ("Arab",),
}


@dataclass(frozen=True, slots=True)
class BlockSet:
    """A set of Unicode blocks that answers for characters and for token bytes. starts, ends: the
    blocks' code points, [start, end), ascending."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]

    def meets_range(self, first: int, last: int) -> bool:
        """Whether any code point of [first, last] lies in one of the blocks."""
        i = bisect_right(self.starts, last) - 1
        return i >= 0 and first < self.ends[i]

    def has_token(self, data: bytes) -> bool:
        """Whether a token, given as its bytes, can be part of a text in these blocks.

        Every whole character must lie inside. A token of a byte-level vocabulary may begin or end
        within a character: continuation bytes at its start pass; an unfinished character at its
        end passes when one of the characters it may become lies inside. Bytes that are never
        UTF-8 pass, because they are part of no character.
        """
        start = 0
        while start < min(3, len(data)) and 0x80 <= data[start] < 0xC0:
            start += 1
        decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        text = decoder.decode(data[start:])
        unfinished, _ = decoder.getstate()
        if unfinished and not self.meets_range(*_may_become(unfinished)):
            return False
        return all(self.meets_range(ord(char), ord(char)) for char in text)


def _may_become(unfinished: bytes) -> tuple[int, int]:
    """The first and the last code point that the beginning of a UTF-8 character may become."""
    length = 2 if unfinished[0] < 0xE0 else 3 if unfinished[0] < 0xF0 else 4
    bits = unfinished[0] & (0x7F >> length)
    for follow in unfinished[1:]:
        bits = bits << 6 | follow & 0x3F
    missing = 6 * (length - len(unfinished))
    # Overlong forms and surrogates are no characters: 0xE0 starts at U+0800, 0xF0 at U+10000, and
    # nothing lies above U+10FFFF.
    first = max(bits << missing, (0, 0, 0x80, 0x800, 0x10000)[length])
    return first, min(((bits + 1) << missing) - 1, 0x10FFFF)


class _Block(NamedTuple):
    """One block: [start, end), how many characters each script has, and the scripts it serves."""

    start: int
    end: int
    owners: Counter[str]
    served: set[str]


@cache
def _blocks() -> dict[str, _Block]:
    """By name, ascending."""
    from fontTools import unicodedata as ucd  # type: ignore[import-untyped]
    from fontTools.unicodedata import (  # type: ignore[import-untyped]
        Blocks,
        ScriptExtensions,
        Scripts,
    )

    # Script and extensions are constant between two boundaries: a few thousand pieces, not 1.1 M.
    edges = sorted({*Blocks.RANGES, *Scripts.RANGES, *ScriptExtensions.RANGES, 0x110000})
    found: dict[str, _Block] = {}
    for start, end in pairwise(edges):
        char = chr(start)
        name, script = ucd.block(char), ucd.script(char)
        if name == "No_Block":
            continue
        known = found.get(name, _Block(start, end, Counter(), set()))
        block = found[name] = known._replace(end=end)
        if script != "Zzzz":
            block.owners[script] += end - start
            block.served.update(ucd.script_extension(char) - _NO_SCRIPT)
    return found


def scripts_of_language(tag: str) -> frozenset[str]:
    """ISO 15924 codes of the scripts a BCP 47 language tag is written in ("en" -> {"Latn"}).

    Raises VocabStoreError for a tag that is malformed or has no likely script.
    """
    import langcodes
    from langcodes.data_dicts import LIKELY_SUBTAGS

    try:
        language = langcodes.get(tag)
    except ValueError as error:
        raise VocabStoreError(f"{tag!r} is not a BCP 47 language tag: {error}") from error
    script = language.script
    if script is None:
        # maximize() returns "Latn" for a language that CLDR does not know.
        known = language.language in LIKELY_SUBTAGS and language.language != "und"
        script = language.maximize().script if known else None
    if script is None:
        raise VocabStoreError(
            f"no script is known for the language tag {tag!r}; add one, as in '{tag}-Latn'"
        )
    return frozenset(_COMPOSITE.get(script, (script,)))


def blocks_of_languages(languages: Sequence[str], *, extra_blocks: Iterable[str] = ()) -> BlockSet:
    """The Unicode blocks of a task's languages, by the three rules of this module's docstring.

    languages: BCP 47 tags of the task's inputs and outputs, at least one. extra_blocks: further
    block names, as Unicode writes them ("Greek and Coptic").

    Raises VocabStoreError for a tag without a known script and for an unknown block name.
    """
    scripts = frozenset().union(*(scripts_of_language(tag) for tag in languages))
    blocks, extra = _blocks(), frozenset(extra_blocks)
    if unknown := sorted(extra - blocks.keys()):
        raise VocabStoreError(f"Unicode has no block {', '.join(map(repr, unknown))}")
    if not any(scripts & block.served for block in blocks.values()):
        raise VocabStoreError(f"no Unicode block holds the script {', '.join(sorted(scripts))}")

    def belongs(block: _Block) -> bool:
        others = {s: n for s, n in block.owners.items() if s not in _NO_SCRIPT}
        if not others:
            return bool(block.owners)
        most = max((n for s, n in others.items() if s not in scripts), default=0)
        return bool(scripts & block.served) and 2 * most <= block.owners.total()

    kept = [b for name, b in blocks.items() if name in (_ASCII_BLOCK, *extra) or belongs(b)]
    return BlockSet(tuple(block.start for block in kept), tuple(block.end for block in kept))
