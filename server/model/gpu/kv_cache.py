"""KvCache: the paged key and value memory of one model on one device.

One tensor of shape [num_layers, 2, num_slots + block_size, num_kv_heads, head_dim]. Index 0 of the
second axis is keys, 1 is values. A *slot* is one position's K and V of a layer; slot numbers are
those of server.engine.batch (block * block_size + offset) and are the same in every layer, sliding
or global. Layers with a short convolution keep one vector a slot instead (`inputs`), in a tensor of
[convolutions, num_slots + block_size, width]. The last `block_size` slots belong to no block of the
engine: padded rows of a CUDA graph write there (`trash_slot`), which no row ever reads.
"""

from __future__ import annotations

import torch

from server.engine.batch import Int32


def bytes_per_block(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kept: int = 0,
) -> int:
    """Bytes that one block takes over all layers, keys and values. kept: numbers that convolutions
    keep of a position, all together."""
    return (2 * num_layers * num_kv_heads * head_dim + kept) * block_size * dtype.itemsize


class KvCache:
    """Owns the KV memory. Every operation is queued on the current stream and does not sync."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        inputs: tuple[int, int] = (0, 0),
    ) -> None:
        """inputs: convolutions, and the width of what each keeps."""
        self.block_size = block_size
        self._place = num_layers, num_kv_heads, head_dim
        self._inputs, self._dtype, self._device = inputs, dtype, device
        self.resize(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Memory of zeros for so many blocks in the place of what there was, at other addresses."""
        self.num_blocks = num_blocks
        self.num_slots = num_blocks * self.block_size
        self.trash_slot = self.num_slots
        room = self.num_slots + self.block_size
        num_layers, *vector = self._place
        num, width = self._inputs
        self._layers: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
        self.memory = self.inputs = torch.empty(0)  # given back before there is more
        # Zeros, not empty: masked lanes multiply by exactly 0, which would turn a stale NaN or
        # infinity into a NaN.
        size = (num_layers, 2, room, *vector)
        self.memory = torch.zeros(size, dtype=self._dtype, device=self._device)
        self.inputs = torch.zeros((num, room, width), dtype=self._dtype, device=self._device)
        self._layers = tuple((self.memory[i, 0], self.memory[i, 1]) for i in range(num_layers))

    def layer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of a layer: views [num_slots + block_size, num_kv_heads, head_dim]."""
        return self._layers[layer_id]

    def move_slots(self, src: Int32, dst: Int32) -> None:
        """memory[..., dst[i]] = memory[..., src[i]] for all i at once; src and dst may overlap.

        Gather to a temporary, then scatter. Raises ValueError when the lengths differ, a slot is
        outside the engine's range, or a destination is named twice.
        """
        if src.shape != dst.shape:
            raise ValueError(f"{src.shape[0]} source slots but {dst.shape[0]} destinations")
        if src.shape[0] == 0:
            return
        for name, slots in (("source", src), ("destination", dst)):
            if int(slots.min()) < 0 or int(slots.max()) >= self.num_slots:
                raise ValueError(f"a {name} slot is outside [0, {self.num_slots})")
        if len(set(dst.tolist())) != dst.shape[0]:
            raise ValueError("a destination slot is named twice")
        both = torch.empty((2, src.shape[0]), dtype=torch.int64)
        both[0] = torch.from_numpy(src)
        both[1] = torch.from_numpy(dst)
        device = self.memory.device
        if device.type == "cuda":
            # Pageable memory is staged before the call returns, so `both` may be freed at once;
            # pinning a few numbers would cost more than the copy.
            both = both.to(device, non_blocking=True)
        self.memory.index_copy_(2, both[1], self.memory.index_select(2, both[0]))
        if self.inputs.shape[0]:
            self.inputs.index_copy_(1, both[1], self.inputs.index_select(1, both[0]))

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        """Copy whole blocks src[i] to dst[i]. Raises as move_slots does."""
        if src.shape != dst.shape:
            raise ValueError(f"{src.shape[0]} source blocks but {dst.shape[0]} destinations")
        offsets = torch.arange(self.block_size, dtype=torch.int32).numpy()
        self.move_slots(
            (src[:, None] * self.block_size + offsets).reshape(-1),
            (dst[:, None] * self.block_size + offsets).reshape(-1),
        )
