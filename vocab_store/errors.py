"""What vocab_store raises on bad data."""

from __future__ import annotations


class VocabStoreError(ValueError):
    """A file is damaged, of another format version or of another tokenizer; a vocabulary map lacks
    ids that must always be inside; a language or a block is not known; the pinned rows of running
    sequences leave no room in the slice cache. The message says which."""
