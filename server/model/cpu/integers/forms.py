"""Form: how the numbers of a weight matrix are stored, and where each byte lies in a panel.

This module has the table of forms and the sizes that follow from them. weights.py makes such
weights, kernels/integers multiplies by them.

A panel holds PANEL outputs. Its bytes, in order, all multiples of 64:
  `int8`: 32 float32 scales, one an output; then for each group of 4 inputs 32 x 4 bytes, the
      inputs of one output side by side, stored + 128.
  the others: for each super-block a header (two-level forms only: 32 float16 `d`, then 32 float16
      `dmin` where there are minima), then its blocks of 32 inputs, each a record:
        the low bits: 8 bits as above; else 4 groups of 32 x 4 bytes, group t holding input 4 t + j
          of its block in the low and input 16 + 4 t + j in the high half of byte j;
        the high bits, 5-bit forms: 32 x 4 bytes, bit t of byte j belongs to input 4 t + j;
          6-bit forms: two times 32 x 4 bytes, bits 2 s and 2 s + 1 of byte j of the first half
          belong to input 4 s + j, of the second to input 16 + 4 s + j;
        the scales: 32 float16, or 8-bit numbers (two-level), one run of 32 a sub-block;
        the minima in the same way.

The numbers are those of ggml's types of the same name (gguf.quants dequantises them):
  value = scale * (stored - zero) [+ min], scale = d * sub-scale and min = -dmin * sub-min in
  two-level forms. Both products are exact in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from drafters.library import raw_address

PANEL = 32
"""Outputs of a panel."""

BLOCK = 32
"""Inputs that share one scale of the activations."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to store weights.

    number: what compiled code knows it by. bits: of a stored number. sub: inputs that share a
    weight scale. zero: the stored number that means 0. has_min: value = scale * stored + min.
    two_level: scales are 8-bit multiples of a float16 that a super-block of 256 inputs shares.
    """

    name: str
    number: int
    bits: int
    zero: int
    sub: int = BLOCK
    has_min: bool = False
    two_level: bool = False

    @property
    def per_output(self) -> bool:
        """Whether one scale an output is all there is: sums run over all inputs."""
        return self.number == 0

    @property
    def high_bytes(self) -> int:
        """Bytes of the high bits in a block's record."""
        return {5: 4 * PANEL, 6: 8 * PANEL}.get(self.bits, 0)

    @property
    def low_bytes(self) -> int:
        """Bytes of the low bits in a block's record."""
        return (BLOCK if self.bits == 8 else BLOCK // 2) * PANEL

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales in a block's record; as many more for minima."""
        return (BLOCK // self.sub) * PANEL * (1 if self.two_level else 2)

    @property
    def record_bytes(self) -> int:
        """Bytes of one block of 32 inputs x PANEL outputs."""
        if self.per_output:
            return self.low_bytes
        return self.low_bytes + self.high_bytes + self.scale_bytes * (1 + self.has_min)

    @property
    def blocks_per_super(self) -> int:
        """Blocks that a header belongs to; 1 without headers."""
        return 8 if self.two_level else 1

    @property
    def header_bytes(self) -> int:
        """Bytes before each super-block's records; of `int8`, before all of a panel's."""
        if self.per_output:
            return 4 * PANEL
        return 2 * PANEL * (1 + self.has_min) if self.two_level else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in a GGUF, of 32 inputs, or of a super-block of 256."""
        small = (12 if self.has_min else 16) if self.two_level else 0
        numbers = BLOCK * self.blocks_per_super * self.bits // 8
        return numbers + small + 2 * (1 + self.has_min)

    def panel_bytes(self, num_inputs: int) -> int:
        """Bytes of a panel with that many inputs, a multiple of what padded_inputs rounds to."""
        blocks = num_inputs // BLOCK
        headers = 1 if self.per_output else blocks // self.blocks_per_super
        return blocks * self.record_bytes + headers * self.header_bytes


CHANNEL = Form("int8", 0, 8, 128)

FORMS: tuple[Form, ...] = (
    CHANNEL,
    Form("q8_0", 1, 8, 128),
    Form("q4_0", 2, 4, 8),
    Form("q4_1", 3, 4, 0, has_min=True),
    Form("q5_0", 4, 5, 16),
    Form("q5_1", 5, 5, 0, has_min=True),
    Form("q4_k", 6, 4, 0, has_min=True, two_level=True),
    Form("q5_k", 7, 5, 0, has_min=True, two_level=True),
    Form("q6_k", 8, 6, 32, sub=16, two_level=True),
)
"""All forms, in the order of their numbers."""

BY_NAME: dict[str, Form] = {form.name: form for form in FORMS}

COARSE = BY_NAME["q4_0"]
"""That of a Screen's weights (kernels/screen.py)."""


def padded_inputs(form: Form, num_inputs: int) -> int:
    """num_inputs rounded up to whole super-blocks; what is added multiplies zeros."""
    unit = BLOCK * form.blocks_per_super
    return -(-num_inputs // unit) * unit


def panels_of(num_outputs: int) -> int:
    """Panels for that many outputs."""
    return -(-num_outputs // PANEL)


def kernel_name(form: Form) -> str:
    """The symbol of a form's kernel."""
    return f"tailor_rows_{form.name}"


def kernel_address(form: Form) -> int:
    """Address of the form's kernel for this CPU (records.JOB_ITEMS)."""
    return raw_address("server.model.cpu.kernels.integers.tiles", kernel_name(form))


def count_of(form: Form, num_inputs: int) -> int:
    """What a kernel's loop runs over: blocks, or super-blocks."""
    return padded_inputs(form, num_inputs) // (BLOCK * form.blocks_per_super)
