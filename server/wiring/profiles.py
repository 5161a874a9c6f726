"""Vocabulary profiles, as an engine and the check at start read them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.token_bytes import TokenBytes
    from vocab_store.profile import VocabProfile
    from vocab_store.slice import RequiredIds


class ProfileFiles:
    """Vocabulary profiles by file. A replaced file is read again; running requests keep the old
    profile."""

    def __init__(self, table: TokenBytes, eos_token_ids: Sequence[int]) -> None:
        """table: of the model's tokenizer. Every profile must hold the EOS ids, the special ids
        and the byte tokens."""
        self._table = table
        self._eos_token_ids = tuple(eos_token_ids)
        self._required: RequiredIds | None = None
        self._loaded: dict[str, tuple[tuple[int, int], VocabProfile]] = {}

    def __call__(self, name: str) -> VocabProfile:
        """The profile in a file. Raises VocabStoreError (a ValueError) or OSError."""
        from vocab_store.profile import VocabProfile
        from vocab_store.slice import RequiredIds

        found = os.stat(name)
        stamp = (found.st_mtime_ns, found.st_size)
        known = self._loaded.get(name)
        if known is not None and known[0] == stamp:
            return known[1]
        if self._required is None:
            self._required = RequiredIds.from_tokens(self._table, self._eos_token_ids)
        profile = VocabProfile.load(
            name, fingerprint=self._table.fingerprint, required=self._required
        )
        self._loaded[name] = (stamp, profile)
        return profile
