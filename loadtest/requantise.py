"""A GGUF with its matrices in another form: dequantised, and rounded as ggml's reference does.

    python -m loadtest.requantise IN.gguf OUT.gguf q8_0

What this is for: files of one model in several forms, to compare *speed* on the same shapes.
Numbers that had 4 bits and get 8 are no 8-bit model: say where a figure comes from. Vectors,
metadata and the tokenizer stay what they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

FORMS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "f32")
"""What gguf's Python package can round to."""


def requantise(source: Path, out: Path, form: str) -> None:
    """Write `out`. Raises ValueError for a form that is not rounded to here."""
    import gguf

    if form not in FORMS:
        raise ValueError(f"no form {form!r}; there are {', '.join(FORMS)}")
    kind = gguf.GGMLQuantizationType[form.upper()]
    reader = gguf.GGUFReader(source)
    fields = reader.fields
    architecture: Any = fields["general.architecture"].contents()
    scratch = out.with_name(f".{out.name}.part")
    writer = gguf.GGUFWriter(scratch, architecture)
    for key, field in fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        value: Any = field.contents()
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, field.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType[file_type(form)])
    try:
        for tensor in reader.tensors:
            if len(tensor.shape) != 2:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
                continue
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            rounded = values if form == "f32" else gguf.quants.quantize(values, kind)
            writer.add_tensor(tensor.name, rounded, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        scratch.rename(out)
    finally:
        scratch.unlink(missing_ok=True)


def file_type(form: str) -> str:
    """gguf's name of a file whose matrices have that form."""
    return "ALL_F32" if form == "f32" else f"MOSTLY_{form.upper()}"


def main() -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="example: python -m loadtest.requantise in.gguf out.gguf q8_0",
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("form", choices=FORMS)
    options = parser.parse_args()
    requantise(options.source, options.out, options.form)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
