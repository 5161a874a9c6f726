"""NF4: weights of 4 bits with double quantisation, as QLoRA has them and bitsandbytes stores them.

QLoRA (arXiv 2305.14314, section 3): blocks of 64 weights are divided by their largest magnitude and
rounded to 16 numbers, the quantiles of a normal distribution; the magnitudes are quantised again,
in blocks of 256, to 8 bits. A weight takes 4.127 bits. bitsandbytes writes the weight NAME as NAME
(uint8, two numbers a byte, the first in the upper half), NAME.absmax, NAME.quant_map,
NAME.nested_absmax, NAME.nested_quant_map, and NAME.quant_state.bitsandbytes__nf4, a JSON text.
Importing this imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from drafters.json_text import parsed
from server.errors import ModelError

if TYPE_CHECKING:
    import torch

BLOCK, NESTED_BLOCK = 64, 256
STATE = ".quant_state.bitsandbytes__nf4"
PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE)
"""Ends of the names of tensors that are a part of a weight."""

# QLoRA, appendix E.
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def is_read(config: Mapping[str, Any] | None) -> bool:
    """Whether a config's `quantization_config` is of NF4 by bitsandbytes."""
    return bool(
        isinstance(config, Mapping)
        and config.get("quant_method") == "bitsandbytes"
        and config.get("load_in_4bit")
        and config.get("bnb_4bit_quant_type") == "nf4"
        and config.get("bnb_4bit_quant_storage", "uint8") == "uint8"
    )


@dataclass(frozen=True, slots=True)
class Nf4:
    """A matrix. shape: (outputs, inputs). numbers: uint8 [n / 2], row by row. levels: float32 [16].
    magnitudes: of each block of `block` numbers, 8 bits: a place in `map` (float32 [256]) times
    scales[block of NESTED_BLOCK magnitudes], plus offset; or, with an empty map, float32 itself."""

    shape: tuple[int, int]
    numbers: torch.Tensor
    levels: torch.Tensor
    magnitudes: torch.Tensor
    map: torch.Tensor
    scales: torch.Tensor
    offset: float
    block: int = BLOCK

    def widened(self, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows first..last - 1, [rows, inputs]."""
        import torch

        width = self.shape[1]
        begin, end = first * width, last * width
        start = begin // self.block * self.block  # a row may begin inside a block
        stop = min(-(-end // self.block) * self.block, self.shape[0] * width)
        packed = self.numbers[start // 2 : -(-stop // 2)]
        numbers = torch.stack((packed >> 4, packed & 0x0F), dim=-1).flatten()
        values = self.levels.to(dtype)[numbers.int()]
        blocks = self._magnitudes(start // self.block, -(-stop // self.block)).to(dtype)
        spread = blocks.repeat_interleave(self.block)[: values.shape[0]]
        return (values * spread)[begin - start : end - start].view(-1, width)

    def _magnitudes(self, first: int, last: int) -> torch.Tensor:
        """float32, of some blocks."""
        import torch

        some = self.magnitudes[first:last]
        if not self.map.numel():
            return some
        at = torch.arange(first, last, device=some.device) // NESTED_BLOCK
        return self.map[some.int()] * self.scales[at] + self.offset


def read_nf4(name: str, tensor_of: Callable[[str], torch.Tensor]) -> Nf4:
    """A weight of a file. tensor_of: its tensors by their stored names. Raises ModelError for one
    that is not whole."""
    import torch

    try:
        state = parsed(bytes(tensor_of(name + STATE).tolist()))
        outputs, inputs = (int(size) for size in state["shape"])
        block = int(state["blocksize"])
        if min(outputs, inputs) < 1 or block < 2 or block % 2:
            raise ValueError(f"shape {state['shape']} in blocks of {block}")
        none = torch.zeros(0)
        magnitudes, nested = tensor_of(f"{name}.absmax"), "nested_blocksize" in state
        if nested and int(state["nested_blocksize"]) != NESTED_BLOCK:
            raise ValueError(f"nested blocks of {state['nested_blocksize']}")
        found = Nf4(
            (outputs, inputs),
            tensor_of(name).flatten(),
            tensor_of(f"{name}.quant_map").float(),
            magnitudes if nested else magnitudes.float(),
            tensor_of(f"{name}.nested_quant_map").float() if nested else none,
            tensor_of(f"{name}.nested_absmax").float() if nested else none,
            float(state.get("nested_offset", 0.0)),
            block,
        )
        num, blocks = outputs * inputs, math.ceil(outputs * inputs / block)
        sizes = [
            (found.numbers, math.ceil(num / 2)), (found.levels, 16), (magnitudes, blocks),
            (found.map, 256 * nested), (found.scales, math.ceil(blocks / NESTED_BLOCK) * nested),
        ]  # fmt: skip
        for tensor, size in sizes:
            if tensor.numel() != size:
                raise ValueError(f"a part has {tensor.numel()} numbers, and {size} are needed")
        if nested and magnitudes.dtype != torch.uint8:
            raise ValueError(f"magnitudes are {magnitudes.dtype}")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{name} is no whole NF4 weight: {str(error)[:200]}") from None
    return found


def rounded(weight: torch.Tensor) -> Nf4:
    """Floats [outputs, inputs] rounded to NF4: the nearest level; magnitudes, less their mean, as
    8-bit floats (e4m3) over the largest of their block."""
    import torch

    outputs, inputs = weight.shape
    values = weight.detach().float().flatten()
    padded = torch.nn.functional.pad(values, (0, -values.shape[0] % BLOCK)).view(-1, BLOCK)
    tops = padded.abs().amax(dim=1)
    offset = float(tops.mean())
    nested = torch.nn.functional.pad(tops - offset, (0, -tops.shape[0] % NESTED_BLOCK))
    nested = nested.view(-1, NESTED_BLOCK)
    scales = nested.abs().amax(dim=1).clamp(min=1e-30)
    map_ = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / 448.0
    eighths = (nested / scales[:, None] * 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    levels = torch.tensor(_LEVELS)
    edges = (levels[1:] + levels[:-1]) / 2
    found = Nf4(
        (outputs, inputs), torch.zeros(0, dtype=torch.uint8), levels,
        eighths.flatten()[: tops.shape[0]].clone(), torch.nan_to_num(map_), scales, offset,
    )  # fmt: skip
    # Divided by the magnitude that will multiply it again.
    back = found._magnitudes(0, tops.shape[0]).clamp(min=1e-30)[:, None]
    numbers = torch.bucketize(padded / back, edges).to(torch.uint8).flatten()[: values.shape[0]]
    numbers = torch.nn.functional.pad(numbers, (0, numbers.shape[0] % 2))
    packed = (numbers[::2] << 4) | numbers[1::2]
    return replace(found, numbers=packed)
