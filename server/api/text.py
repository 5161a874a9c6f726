"""From ids to text, one choice at a time: never half a UTF-8 character, never text that may still
be part of a stop string.

The engine decides where a choice ends (it matches stop strings on the same bytes, see
server.token_bytes); this module only holds text back and cuts it. At any time

    released text = a prefix of decode(bytes of all ids so far), cut at the stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from server.token_bytes import TokenBytes
from server.types import FinishReason

_decoder = codecs.getincrementaldecoder("utf-8")


class StopPrefix:
    """How many of the last bytes could be the beginning of one stop string.

    Knuth-Morris-Pratt's automaton: constant work per byte. A complete match does not stop it (the
    engine may have to ignore it, before min_tokens); it goes on with the longest border.
    """

    __slots__ = ("_fail", "_stop", "held")

    def __init__(self, stop: bytes) -> None:
        if not stop:
            raise ValueError("a stop string cannot be empty")
        fail = [0] * (len(stop) + 1)
        k = 0
        for i in range(1, len(stop)):
            while k and stop[i] != stop[k]:
                k = fail[k]
            if stop[i] == stop[k]:
                k += 1
            fail[i + 1] = k
        self._stop = stop
        self._fail = fail
        self.held = 0

    def push(self, data: bytes) -> int:
        """Take more bytes; returns (and keeps in `held`) the length of the pending prefix."""
        stop, fail, k = self._stop, self._fail, self.held
        for byte in data:
            while k and (k == len(stop) or byte != stop[k]):
                k = fail[k]
            if byte == stop[k]:
                k += 1
        if k == len(stop):
            k = fail[k]
        self.held = k
        return k


class TextStream:
    """The text of one choice.

    stop: the request's stop strings in UTF-8. include_stop: whether the stop string (or the text of
    the id that ended the choice) is part of the text. skip_special: whether special ids have text.
    dropped_last: set by `finish` when the last id only ended the choice and has no text.
    """

    __slots__ = (
        "_decode",
        "_include_stop",
        "_pending",
        "_prefixes",
        "_skip_special",
        "_table",
        "dropped_last",
    )

    def __init__(
        self,
        table: TokenBytes,
        *,
        stop: Sequence[bytes] = (),
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._table = table
        self._include_stop = include_stop
        self._skip_special = skip_special
        self._prefixes = [StopPrefix(s) for s in stop]
        self._pending = b""
        self._decode = _decoder("replace").decode
        self.dropped_last = False

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that can be sent after `token_ids`, which do not end the choice."""
        new = self._table.join(token_ids, skip_special=self._skip_special)
        if not self._prefixes:
            return self._decode(new)
        held = max(prefix.push(new) for prefix in self._prefixes)
        pending = self._pending + new
        self._pending = pending[len(pending) - held :]
        return self._decode(pending[: len(pending) - held])

    def finish(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason,
        stop_reason: int | bytes | None,
    ) -> str:
        """The rest of the text, once the choice ended with these last ids.

        A stop string ends inside the last id: the text is cut there. An EOS or stop id (reason
        "stop" without a string) has no text; the id that completes a grammar (stop_reason b"") has.
        Bytes that never became a character are U+FFFD.
        """
        if finish_reason == "stop" and not isinstance(stop_reason, bytes):
            if token_ids and not self._include_stop:
                token_ids = token_ids[:-1]
                self.dropped_last = True
            stop_reason = None
        assert not isinstance(stop_reason, int)
        before = self._pending + self._table.join(token_ids[:-1], skip_special=self._skip_special)
        last = self._table.join(token_ids[-1:], skip_special=self._skip_special)
        text = before + last
        if stop_reason:
            at = text.find(stop_reason, max(0, len(before) - len(stop_reason) + 1))
            if at >= 0:
                text = text[: at + len(stop_reason) if self._include_stop else at]
        self._pending = b""
        return self._decode(text, True)


class CharCounter:
    """Character offsets of tokens in a text (logprobs.text_offset).

    A token's offset is the number of complete characters before its first byte; a token that
    continues a character has that character's index.
    """

    __slots__ = ("_decode", "num_chars")

    def __init__(self, num_chars: int = 0) -> None:
        self._decode = _decoder("replace").decode
        self.num_chars = num_chars

    def push(self, token: bytes) -> int:
        """The offset of the next token."""
        offset = self.num_chars
        self.num_chars += len(self._decode(token))
        return offset


class TokenNames:
    """Token strings for logprobs: the token's text, or "bytes:\\xe2\\x80" as OpenAI writes tokens
    that are not UTF-8 by themselves; in chats without the prefix, where the answer has the bytes
    beside them. Names are made on first use and kept."""

    __slots__ = ("_names", "_prefix", "_table")

    def __init__(self, table: TokenBytes, *, prefix: str = "bytes:") -> None:
        self._table = table
        self._prefix = prefix
        self._names: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        name = self._names.get(token_id)
        if name is None:
            data = self._table.bytes_of(token_id)
            try:
                name = data.decode()
            except UnicodeDecodeError:
                name = self._prefix + "".join(f"\\x{byte:02x}" for byte in data)
            self._names[token_id] = name
        return name


class TokenIdNames:
    """Token strings for logprobs as vLLM's return_tokens_as_token_ids writes them."""

    __slots__ = ()

    def __getitem__(self, token_id: int) -> str:
        return f"token_id:{token_id}"
