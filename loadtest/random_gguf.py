"""A GGUF of random weights in the shape of a known model: to compare *speed* at its size.

    python -m loadtest.random_gguf SMOLLM2.gguf OUT.gguf qwen3-0.6b q8_0

Layers, widths, heads, vocabulary and tied embeddings are the model's own, so that a step reads as
many bytes and does the same arithmetic. The tokenizer is that of the file given (a byte-level BPE),
filled up to the model's vocabulary with tokens that no text is cut into. What it says is noise.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loadtest.requantise import FORMS, file_type

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
    "qwen3-0.6b": Shape(
        "qwen3", "qwen2", 28, 1024, 3072, 16, 8, 128, 151_936, 40_960, 1e6
    ),
    "llama-3.2-1b": Shape(
        "llama", "llama-bpe", 16, 2048, 8192, 32, 8, 64, 128_256, 131_072, 5e5
    ),
}  # fmt: skip


def write(tokenizer: Path, out: Path, shape: Shape, form: str) -> None:
    """Write `out`. tokenizer: a GGUF with a byte-level BPE. Raises ValueError for another."""
    import gguf

    kind = gguf.GGMLQuantizationType[form.upper()]
    scratch = out.with_name(f".{out.name}.part")
    writer = gguf.GGUFWriter(scratch, shape.architecture)
    add_sizes(writer, shape, form)
    _add_tokenizer(writer, gguf.GGUFReader(tokenizer).fields, shape)
    try:
        rng = np.random.default_rng(0)
        for name, size in shape.vectors():
            writer.add_tensor(name, np.ones(size, np.float32))
        blocks = rng.normal(scale=0.02, size=(_POOL, 32)).astype(np.float32)
        pool = blocks if form == "f32" else gguf.quants.quantize(blocks, kind)
        for number, (name, outputs, inputs) in enumerate(shape.matrices()):
            rows = _filled(pool, outputs, inputs // 32, 7919 * number)
            writer.add_tensor(name, rows, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        scratch.rename(out)
    finally:
        scratch.unlink(missing_ok=True)


def add_sizes(writer: Any, shape: Shape, form: str) -> None:
    """What a GGUFWriter's file says of a shape. form: of the matrices."""
    import gguf

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
    writer.add_file_type(gguf.LlamaFileType[file_type(form)])


def _filled(pool: npt.NDArray[Any], outputs: int, blocks: int, first: int) -> npt.NDArray[Any]:
    """[outputs, numbers or bytes of so many blocks], from `first` of the pool on, in a ring."""
    parts, wanted = [], outputs * blocks
    at = first % len(pool)
    while wanted:
        part = pool[at : at + wanted]
        parts.append(part)
        wanted, at = wanted - len(part), 0
    return np.concatenate(parts).reshape(outputs, -1)


def _add_tokenizer(writer: Any, fields: Any, shape: Shape) -> None:
    """The tokens, types and merges of another file, with tokens behind them that are never met."""

    def of(key: str) -> Any:
        return fields[f"tokenizer.ggml.{key}"].contents()

    if of("model") != "gpt2":
        raise ValueError(f"the tokenizer is no byte-level BPE but {of('model')!r}")
    tokens = list(of("tokens"))
    more = range(shape.vocab - len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape.pre)
    writer.add_token_list([*tokens, *(f"qzx{i:06d}" for i in more)])
    writer.add_token_types([*(int(t) for t in of("token_type")), *(1 for _ in more)])
    writer.add_token_merges(list(of("merges")))
    for key, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        add(int(of(f"{key}_token_id")))
    writer.add_add_bos_token(False)


def main() -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m loadtest.random_gguf in.gguf out.gguf qwen3-0.6b q8_0",
    )
    parser.add_argument("tokenizer", type=Path, help="a GGUF whose tokenizer is taken")
    parser.add_argument("out", type=Path)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("form", choices=FORMS)
    options = parser.parse_args()
    write(options.tokenizer, options.out, SHAPES[options.shape], options.form)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
