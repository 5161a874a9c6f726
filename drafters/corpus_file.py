"""The file of a corpus: its kind and version, and how to read its size without compiled code.

The API process checks corpora (their tokenizer and size) and never drafts from them, so this module
imports nothing that compiles. drafters.corpus writes and maps the whole file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drafters.array_file import ArrayFileError, read_arrays

KIND = "task corpus"
VERSION = 2  # 2: occurrences beside edges and tops


@dataclass(frozen=True, slots=True)
class CorpusExtent:
    """How much a corpus file holds: examples, output tokens, and bytes on disk."""

    num_documents: int
    num_tokens: int
    num_bytes: int


def read_extent(path: Path | str, *, fingerprint: str) -> CorpusExtent:
    """Look at a corpus file and check that it is of this version and of this tokenizer.

    Raises OSError, FingerprintError (another tokenizer) or ArrayFileError (anything else).
    """
    path = Path(path)
    _, arrays = read_arrays(path, kind=KIND, version=VERSION, fingerprint=fingerprint)
    try:
        return CorpusExtent(
            int(arrays["document_starts"].shape[0]) - 1,
            int(arrays["token_ids"].shape[0]),
            path.stat().st_size,
        )
    except KeyError as error:
        raise ArrayFileError(f"{path} lacks a part of a corpus: {error}") from error
