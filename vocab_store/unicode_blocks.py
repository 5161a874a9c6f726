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
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

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


class UnknownBlockError(ValueError):
    """A language tag without a known script, or a block that Unicode does not have."""


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


@dataclass(frozen=True, slots=True)
class _Block:
    """One block: [start, end), how many characters each script owns, and the scripts it serves."""

    name: str
    start: int
    end: int
    num_assigned: int
    owners: dict[str, int]
    served: frozenset[str]


@cache
def _blocks() -> tuple[_Block, ...]:
    from fontTools import unicodedata as ucd  # type: ignore[import-untyped]
    from fontTools.unicodedata import (  # type: ignore[import-untyped]
        Blocks,
        ScriptExtensions,
        Scripts,
    )

    # Script and extensions are constant between two boundaries: a few thousand pieces, not 1.1 M.
    edges = sorted({*Blocks.RANGES, *Scripts.RANGES, *ScriptExtensions.RANGES, 0x110000})
    spans: dict[str, list[int]] = {}
    owners: dict[str, Counter[str]] = defaultdict(Counter)
    served: dict[str, set[str]] = defaultdict(set)
    for start, end in pairwise(edges):
        char = chr(start)
        name = ucd.block(char)
        if name == "No_Block":
            continue
        spans.setdefault(name, [start, end])[1] = end
        script = ucd.script(char)
        if script == "Zzzz":
            continue
        owners[name][script] += end - start
        served[name].update(ucd.script_extension(char))
    return tuple(
        _Block(
            name,
            start,
            end,
            sum(owners[name].values()),
            {s: n for s, n in owners[name].items() if s not in _NO_SCRIPT},
            frozenset(served[name] - _NO_SCRIPT),
        )
        for name, (start, end) in spans.items()
    )


def scripts_of_language(tag: str) -> frozenset[str]:
    """ISO 15924 codes of the scripts a BCP 47 language tag is written in ("en" -> {"Latn"}).

    Raises UnknownBlockError for a tag that is malformed or has no likely script.
    """
    import langcodes
    from langcodes.data_dicts import LIKELY_SUBTAGS

    try:
        language = langcodes.get(tag)
    except ValueError as error:
        raise UnknownBlockError(f"{tag!r} is not a BCP 47 language tag: {error}") from error
    script = language.script
    if script is None:
        # maximize() returns "Latn" for a language that CLDR does not know.
        known = language.language in LIKELY_SUBTAGS and language.language != "und"
        script = language.maximize().script if known else None
    if script is None:
        raise UnknownBlockError(
            f"no script is known for the language tag {tag!r}; add one, as in '{tag}-Latn'"
        )
    return frozenset(_COMPOSITE.get(script, (script,)))


def blocks_of_languages(languages: Sequence[str], *, extra_blocks: Iterable[str] = ()) -> BlockSet:
    """The Unicode blocks of a task's languages, by the three rules of this module's docstring.

    languages: BCP 47 tags of the task's inputs and outputs, at least one. extra_blocks: further
    block names, as Unicode writes them ("Greek and Coptic").

    Raises UnknownBlockError for a tag without a known script and for an unknown block name.
    """
    scripts = frozenset().union(*(scripts_of_language(tag) for tag in languages))
    blocks = _blocks()
    known = {block.name for block in blocks}
    extra = frozenset(extra_blocks)
    if unknown := sorted(extra - known):
        raise UnknownBlockError(f"Unicode has no block {', '.join(map(repr, unknown))}")
    if not any(scripts & block.served for block in blocks):
        raise UnknownBlockError(f"no Unicode block holds the script {', '.join(sorted(scripts))}")
    kept = [
        block
        for block in blocks
        if block.name == _ASCII_BLOCK
        or block.name in extra
        or (block.num_assigned > 0 and not block.owners)
        or _serves(block, scripts)
    ]
    kept.sort(key=lambda block: block.start)
    return BlockSet(tuple(block.start for block in kept), tuple(block.end for block in kept))


def _serves(block: _Block, scripts: frozenset[str]) -> bool:
    if not scripts & block.served:
        return False
    others = max((n for script, n in block.owners.items() if script not in scripts), default=0)
    return 2 * others <= block.num_assigned
