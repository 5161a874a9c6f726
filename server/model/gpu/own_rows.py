"""Rows of the embedding and of the LM head that adapters bring, beside a base on a GPU.

    embedding   a row whose adapter has a row of its own for its id takes that one, else the base's
    head        the logits of a row whose adapter has head rows are as wide as the widest adapter's
                ids: its own rows' products in the columns of their ids, the base's logits in the
                others, -inf where neither has a row

Each half is an OwnPart: tables by place on the device, which a CUDA graph reads where they are.
Rows of the base are not touched: their logits are the base's own, in their own width, with the same
bits. Products of own head rows are grouped ones (grouped.py). Tokens of an adapter's own
come from PEFT's `trainable_token_indices` (server.model.adapter).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from server.engine.batch import Batch, Int32
from server.model.adapter import TokenRows
from server.model.gpu.grouped import Grouped, power_of_two
from server.model.gpu.lm_head import soft_capped
from server.model.gpu.slices import gathered

_LEAST_ROWS = 16  # of a tensor core's tile
_LEAST_NEW = 64


class OwnPart(NamedTuple):
    """Own rows of one table. P: places, N: rows of a place.

    at: int32 [P, W]: where an id's row lies among its place's `rows`, -1: the base's. rows:
    [P, N, hidden_size], in the model's dtype.
    """

    at: torch.Tensor
    rows: torch.Tensor


def part_sizes(num_base: int, parts: Sequence[TokenRows]) -> tuple[int, int]:
    """(columns of `at`, rows of a place) that parts, at least one, need beside num_base rows."""
    new = max(int(part.ids[-1]) + 1 for part in parts) - num_base
    width = num_base + (power_of_two(max(new, _LEAST_NEW)) if new > 0 else 0)
    return width, power_of_two(max(_LEAST_ROWS, *(part.ids.shape[0] for part in parts)))


class OwnRows:
    """The own rows of the adapters on a device, by place. Changed between steps alone.

    num_base: rows of the base's tables, of `size` numbers. product: of own head rows. width:
    columns of logits with own rows: at least the ids of every adapter; 0 while none was held.
    """

    def __init__(
        self, num_base: int, size: int, dtype: torch.dtype, device: torch.device, product: Grouped
    ) -> None:
        self.width = 0
        self._num_base, self._size = num_base, size
        self._product = product
        self._embeddings: dict[int, TokenRows] = {}
        self._heads: dict[int, TokenRows] = {}
        at = torch.zeros((0, 0), dtype=torch.int32, device=device)
        rows = torch.zeros((0, 0, size), dtype=dtype, device=device)
        self._embedding = self._head = OwnPart(at, rows)

    def hold(self, place: int, embedding: TokenRows | None, head: TokenRows | None) -> bool:
        """Put an adapter's rows at a free place; whether the tables have moved for it."""
        parts = [part for part in (embedding, head) if part is not None]
        if not parts:
            return False
        num_places, num_rows = self._embedding.rows.shape[:2]
        width, most = part_sizes(self._num_base, parts)
        moves = place >= num_places or width > self.width or most > num_rows
        if moves:
            places = max(num_places, power_of_two(place + 1))
            self.width = max(width, self.width)
            shape = places, max(most, num_rows)
            self._embedding = self._grown(self._embedding, *shape)
            self._head = self._grown(self._head, *shape)
        for own, held, part in (
            (embedding, self._embeddings, self._embedding),
            (head, self._heads, self._head),
        ):
            if own is not None:
                num = own.ids.shape[0]
                part.rows[place, :num] = own.rows.to(part.rows.device)
                at = torch.from_numpy(own.ids).to(part.at.device)
                part.at[place, at] = torch.arange(num, dtype=torch.int32, device=part.at.device)
                held[place] = own
        return moves

    def bytes_for(self, parts: Sequence[TokenRows], places: int) -> int:
        """Bytes of the tables of so many places with room for each of these parts."""
        width, num = part_sizes(self._num_base, parts)
        a_place = 4 * width + num * self._size * self._embedding.rows.element_size()
        return 2 * places * a_place

    def drop(self, place: int) -> None:
        """Forget what is at a place; an empty one is fine."""
        for held, part in ((self._embeddings, self._embedding), (self._heads, self._head)):
            if held.pop(place, None) is not None:
                part.at[place] = -1

    def _grown(self, part: OwnPart, places: int, num: int) -> OwnPart:
        at = torch.full((places, self.width), -1, dtype=torch.int32, device=part.at.device)
        at[: part.at.shape[0], : part.at.shape[1]] = part.at
        rows = part.rows.new_zeros((places, num, self._size))
        rows[: part.rows.shape[0], : part.rows.shape[1]] = part.rows
        return OwnPart(at, rows)

    # -- which rows ---------------------------------------------------------------------------

    def embedding_places(self, batch: Batch) -> Int32 | None:
        """int32 [R]: the place of each row whose adapter has rows of the embedding, else -1; None
        where no row has one."""
        return _places(batch, slice(None), self._embeddings)

    def head_places(self, batch: Batch, rows: Int32) -> Int32 | None:
        """The same of rows [n] of the batch and of the head."""
        return _places(batch, rows, self._heads)

    # -- the embedding ------------------------------------------------------------------------

    def embed(self, table: torch.Tensor, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size]: rows of the base's table and own ones, not scaled yet. ids, places:
        int32 [R], places as of embedding_places."""
        part, ids, place = self._embedding, ids.long(), places.clamp(min=0).long()
        at = torch.where(places >= 0, part.at[place, ids.clamp(max=part.at.shape[1] - 1)], -1)
        base = table.index_select(0, ids.clamp(max=table.shape[0] - 1))
        return torch.where(at[:, None] >= 0, part.rows[place, at.clamp(min=0).long()], base)

    def gathered(self, table: torch.Tensor, batch: Batch, token_ids: Int32) -> npt.NDArray[Any]:
        """The same where the base's table is in CPU memory: as slices.gathered has them."""
        found = gathered(table, np.where(token_ids < table.shape[0], token_ids, 0))
        places = self.embedding_places(batch)
        if places is not None:
            for place in np.unique(places[places >= 0]).tolist():
                own, rows = self._embeddings[place], np.flatnonzero(places == place)
                wanted = token_ids[rows]
                at = np.minimum(np.searchsorted(own.ids, wanted), own.ids.shape[0] - 1)
                has_own = own.ids[at] == wanted
                found[rows[has_own]] = gathered(own.rows, at[has_own])
        return found

    # -- the head -----------------------------------------------------------------------------

    def widened(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        spans: torch.Tensor,
        places: torch.Tensor,
        cap: float,
    ) -> torch.Tensor:
        """float32 [n, width] of hidden [n, hidden_size] whose logits over the base's ids are there.

        places: of head_places; spans: their spans_of. cap: soft-capping of logits, 0 = none.
        """
        num, part = hidden.shape[0], self._head
        out = torch.empty((num, self.width), dtype=torch.float32, device=hidden.device)
        shape = num, part.rows.shape[1]
        own = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        self._product(hidden, spans, part.rows.transpose(1, 2), own)
        # Rows without a place have anything in `own`, which nothing reads.
        at = part.at.index_select(0, places.clamp(min=0)).masked_fill_(places[:, None] < 0, -1)
        out[:, : logits.shape[1]] = logits
        out[:, logits.shape[1] :] = float("-inf")
        mine = soft_capped(own, cap).gather(1, at.clamp(min=0).long())
        return out.copy_(torch.where(at >= 0, mine, out))


def with_no_places(places: Int32, num: int) -> Int32:
    """Places of adapters, int32 [num], -1 behind the last."""
    padded = np.full(num, -1, np.int32)
    padded[: places.shape[0]] = places
    return padded


def _places(batch: Batch, rows: Int32 | slice, held: dict[int, TokenRows]) -> Int32 | None:
    of_seq = batch.seq_adapters
    if of_seq is None or not held:
        return None
    places = np.where(np.isin(of_seq, list(held)), of_seq, -1)[batch.seq_ids[rows]].astype(np.int32)
    return places if (places >= 0).any() else None
