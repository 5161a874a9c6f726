"""The exceptions of vocab_store, one tree.

VocabStoreError (ValueError)
|-- EnrichmentFileError   an enrichment file is damaged or of another tokenizer
|-- MissingIdsError       a vocabulary map lacks ids that must always be inside
|-- ProfileFileError      a profile file is damaged, of another version or of another tokenizer
`-- SliceCapacityError    the slices of running sequences do not fit in the slice cache
"""

from __future__ import annotations

from collections.abc import Sequence


class VocabStoreError(ValueError):
    """Base of everything vocab_store raises on bad data."""


class EnrichmentFileError(VocabStoreError):
    """An enrichment file is damaged, of another format version, or made for another tokenizer."""


class MissingIdsError(VocabStoreError):
    """A vocabulary map lacks ids that must always be inside it.

    kind: "EOS", "special", "byte" or "other"; ids: what is missing, ascending.
    """

    def __init__(self, kind: str, ids: Sequence[int]) -> None:
        self.kind = kind
        self.ids = tuple(ids)
        shown = map(str, self.ids[:8])
        more = f" and {len(self.ids) - 8} more" if len(self.ids) > 8 else ""
        super().__init__(
            f"the vocabulary map lacks {kind} token ids {', '.join(shown)}{more}: "
            "a model cut to it could not stop or could not write every text"
        )


class ProfileFileError(VocabStoreError):
    """A profile file is damaged, of another format version, or made for another tokenizer."""


class SliceCapacityError(VocabStoreError):
    """The pinned rows of running sequences leave no room in the slice cache."""
