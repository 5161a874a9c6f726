"""GGUF files to measure *speed* with: of another form, of another shape, or of hardly any size.

What such files say is worth nothing. Numbers that had 4 bits and get 8 are no 8-bit model, and
random weights say noise; they are read and multiplied as the real ones would be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import pre_tokenizers

FORMS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "f32")
"""What gguf's Python package can round to."""
_POOL = 1 << 22  # random blocks of 32 numbers that matrices are filled with, in turn


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model's config.json says of its sizes."""

    architecture: str
    pre: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_base: float

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """(name, outputs, inputs) in the order of the file."""
        yield "token_embd.weight", self.vocab, self.hidden
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for i in range(self.layers):
            yield f"blk.{i}.attn_q.weight", q, self.hidden
            yield f"blk.{i}.attn_k.weight", kv, self.hidden
            yield f"blk.{i}.attn_v.weight", kv, self.hidden
            yield f"blk.{i}.attn_output.weight", self.hidden, q
            yield f"blk.{i}.ffn_gate.weight", self.inner, self.hidden
            yield f"blk.{i}.ffn_up.weight", self.inner, self.hidden
            yield f"blk.{i}.ffn_down.weight", self.hidden, self.inner

    def vectors(self) -> Iterator[tuple[str, int]]:
        """(name, size) of the norms."""
        yield "output_norm.weight", self.hidden
        for i in range(self.layers):
            yield f"blk.{i}.attn_norm.weight", self.hidden
            yield f"blk.{i}.ffn_norm.weight", self.hidden
            if self.architecture == "qwen3":
                yield f"blk.{i}.attn_q_norm.weight", self.head_dim
                yield f"blk.{i}.attn_k_norm.weight", self.head_dim


SHAPES = {
    "qwen3-0.6b": Shape("qwen3", "qwen2", 28, 1024, 3072, 16, 8, 128, 151_936, 40_960, 1e6),
    "llama-3.2-1b": Shape("llama", "llama-bpe", 16, 2048, 8192, 32, 8, 64, 128_256, 131_072, 5e5),
    "llama-3.2-3b": Shape("llama", "llama-bpe", 28, 3072, 8192, 24, 8, 128, 128_256, 131_072, 5e5),
}
NOTHING = Shape("llama", "smollm", 1, 64, 64, 1, 1, 64, 259, 256, 1e4)
"""A model of 50 KB."""


def check_form(form: str) -> None:
    """Raises ValueError for a form that is not rounded to here."""
    if form not in FORMS:
        raise ValueError(f"no form {form!r}; there are {', '.join(FORMS)}")


def requantise(source: Path, out: Path, form: str) -> None:
    """Write `out`: a GGUF with its matrices dequantised, and rounded as ggml's reference does.
    Vectors, metadata and the tokenizer stay what they are. Raises ValueError."""
    check_form(form)
    reader = gguf.GGUFReader(source)
    fields = reader.fields
    architecture: Any = fields["general.architecture"].contents()
    with _writing(out, architecture) as writer:
        for key, field in fields.items():
            if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
                continue
            value: Any = field.contents()
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, value, field.types[0], inner)
        writer.add_file_type(gguf.LlamaFileType[_file_type(form)])
        kind = gguf.GGMLQuantizationType[form.upper()]
        for tensor in reader.tensors:
            if len(tensor.shape) != 2:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
                continue
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            rounded = values if form == "f32" else gguf.quants.quantize(values, kind)
            writer.add_tensor(tensor.name, rounded, raw_dtype=kind)


def write_random(tokenizer: Path, out: Path, shape: Shape, form: str) -> None:
    """Write `out`: random weights in a known model's shape, so that a step reads as many bytes and
    does the same arithmetic. tokenizer: a GGUF with a byte-level BPE, whose tokens are taken and
    filled up with others that no text is cut into. Raises ValueError for another."""
    check_form(form)
    fields = gguf.GGUFReader(tokenizer).fields

    def of(key: str) -> Any:
        return fields[f"tokenizer.ggml.{key}"].contents()

    if of("model") != "gpt2":
        raise ValueError(f"the tokenizer is no byte-level BPE but {of('model')!r}")
    tokens = list(of("tokens"))
    more = range(shape.vocab - len(tokens))
    kind = gguf.GGMLQuantizationType[form.upper()]
    rng = np.random.default_rng(0)
    blocks = rng.normal(scale=0.02, size=(_POOL, 32)).astype(np.float32)
    pool = blocks if form == "f32" else gguf.quants.quantize(blocks, kind)
    with _writing(out, shape.architecture) as writer:
        _add_sizes(writer, shape, form)
        _add_tokenizer(
            writer, shape.pre, [*tokens, *(f"qzx{i:06d}" for i in more)],
            [*(int(t) for t in of("token_type")), *(1 for _ in more)], list(of("merges")),
            (int(of("bos_token_id")), int(of("eos_token_id"))),
        )  # fmt: skip
        for name, size in shape.vectors():
            writer.add_tensor(name, np.ones(size, np.float32))
        for number, (name, outputs, inputs) in enumerate(shape.matrices()):
            rows = _filled(pool, outputs, inputs // 32, 7919 * number)
            writer.add_tensor(name, rows, raw_dtype=kind)


def write_nothing(out: Path) -> None:
    """Write `out`: NOTHING, one layer of ones, and a tokenizer of the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    kind = gguf.GGMLQuantizationType.Q8_0
    with _writing(out, NOTHING.architecture) as writer:
        _add_sizes(writer, NOTHING, "q8_0")
        types = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 257
        _add_tokenizer(
            writer, NOTHING.pre, ["<s>", "</s>", "ab", *alphabet], types, ["a b"], (0, 1)
        )
        for name, size in NOTHING.vectors():
            writer.add_tensor(name, np.ones(size, np.float32))
        for name, outputs, inputs in NOTHING.matrices():
            rows = gguf.quants.quantize(np.ones((outputs, inputs), np.float32), kind)
            writer.add_tensor(name, rows, raw_dtype=kind)


@contextmanager
def _writing(out: Path, architecture: str) -> Iterator[gguf.GGUFWriter]:
    """A writer whose file takes the place of `out` when the block ends well."""
    scratch = out.with_name(f".{out.name}.part")
    writer = gguf.GGUFWriter(scratch, architecture)
    try:
        yield writer
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        scratch.rename(out)
    finally:
        scratch.unlink(missing_ok=True)


def _file_type(form: str) -> str:
    """gguf's name of a file whose matrices have that form."""
    return "ALL_F32" if form == "f32" else f"MOSTLY_{form.upper()}"


def _add_sizes(writer: Any, shape: Shape, form: str) -> None:
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(gguf.LlamaFileType[_file_type(form)])


def _add_tokenizer(
    writer: Any, pre: str, tokens: list[str], types: Sequence[int], merges: list[str],
    ends: tuple[int, int],
) -> None:  # fmt: skip
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(ends[0])
    writer.add_eos_token_id(ends[1])
    writer.add_add_bos_token(False)


def _filled(pool: npt.NDArray[Any], outputs: int, blocks: int, first: int) -> npt.NDArray[Any]:
    """[outputs, numbers or bytes of so many blocks], from `first` of the pool on, in a ring."""
    at = np.arange(first, first + outputs * blocks) % len(pool)
    return pool[at].reshape(outputs, -1)
