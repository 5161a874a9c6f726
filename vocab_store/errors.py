"""The exceptions of vocab_store, one tree.

VocabStoreError (ValueError)
|-- EnrichmentFileError   an enrichment file is damaged or of another tokenizer
|-- MissingIdsError       a vocabulary map lacks ids that must always be inside
|-- ProfileFileError      a profile file is damaged, of another version or of another tokenizer
`-- SliceCapacityError    the slices of running sequences do not fit in the slice cache
"""

from __future__ import annotations


class VocabStoreError(ValueError):
    """Base of everything vocab_store raises on bad data."""


class EnrichmentFileError(VocabStoreError):
    """An enrichment file is damaged, of another format version, or made for another tokenizer."""


class MissingIdsError(VocabStoreError):
    """A vocabulary map lacks ids that must always be inside it."""


class ProfileFileError(VocabStoreError):
    """A profile file is damaged, of another format version, or made for another tokenizer."""


class SliceCapacityError(VocabStoreError):
    """The pinned rows of running sequences leave no room in the slice cache."""
