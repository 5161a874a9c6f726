"""The id -> bytes table of a few ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from server.token_bytes import TokenBytes


def table_of(pieces: Sequence[bytes], special_ids: Sequence[int] = ()) -> TokenBytes:
    """Whose id i is pieces[i]."""
    offsets = np.array([*accumulate(map(len, pieces), initial=0)], np.int64)
    blob = np.frombuffer(b"".join(pieces), np.uint8)
    return TokenBytes(offsets, blob, np.array(special_ids, np.int64), 0, b"")
