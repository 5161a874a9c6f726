"""A GGUF's tokenizer in transformers' form, with every id compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from server.errors import IntegrityError, UnsupportedModelError


def convert_tokenizer(gguf: Path, out: Path, report: Callable[[str], None]) -> None:
    """Write the tokenizer of `gguf` into `out`, a folder in transformers' form.

    Raises UnsupportedModelError for a pre-tokenizer that is not known, IntegrityError when an id
    does not stand for the GGUF's token.
    """
    import transformers

    report("Converting the tokenizer")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name
    )
    tokenizer.save_pretrained(out)
    _repair_tokenizer(out / "tokenizer.json", gguf_fields(gguf), gguf.name)


def gguf_fields(gguf: Path) -> dict[str, Any]:
    """The GGUF's metadata of the tokenizer, as Python values."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    return {
        key: field.contents()
        for key, field in reader.fields.items()
        if key.startswith("tokenizer.ggml.") and key != "tokenizer.ggml.scores"
    }


def eos_ids(fields: dict[str, Any]) -> list[int]:
    """Every id that ends a text, the one called EOS first."""
    ids: list[int] = []
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        value = fields.get(f"tokenizer.ggml.{key}")
        if value is not None and int(value) not in ids:
            ids.append(int(value))
    return ids


_GPT2_SPLIT = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]  # noqa: E501  # fmt: skip
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(regex: str) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]


# How a byte-level BPE cuts text before its merges, by `tokenizer.ggml.pre`. A GGUF does not hold
# the pattern, only its name, and a wrong one gives other ids for the same text ("  5" in SmolLM2).
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": _GPT2_SPLIT,
    "smollm": [{"type": "Digits", "individual_digits": True}, *_GPT2_SPLIT],
    "llama-bpe": _split(_LLAMA3),
    "llama3": _split(_LLAMA3),
    "qwen2": _split(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")),
}


def _repair_tokenizer(path: Path, fields: dict[str, Any], source: str) -> None:
    """Set what transformers' GGUF reader leaves at GPT-2's defaults, then compare every id.

    Raises UnsupportedModelError for a byte-level BPE whose pre-tokenizer is not known, and
    IntegrityError when an id does not stand for the GGUF's token.
    """
    from tokenizers import Tokenizer

    data = json.loads(path.read_text(encoding="utf-8"))
    pre = str(fields.get("tokenizer.ggml.pre", "default"))
    if fields.get("tokenizer.ggml.model") == "gpt2":
        steps = _PRE_TOKENIZERS.get(pre)
        if steps is None:
            raise UnsupportedModelError(
                f"{source}: its pre-tokenizer {pre[:40]!r} is not known "
                f"({', '.join(_PRE_TOKENIZERS)} are); use the model's folder in transformers' form"
            )
        data["pre_tokenizer"] = (
            steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": list(steps)}
        )
        if pre == "qwen2":
            data["normalizer"] = {"type": "NFC"}
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(path))
    tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
    if fields.get("tokenizer.ggml.model") != "gpt2":  # SentencePiece writes a space as U+2581
        tokens = [token.replace(" ", "\u2581") for token in tokens]
    wrong = [i for i, token in enumerate(tokens) if tokenizer.id_to_token(i) != token]
    if wrong:
        raise IntegrityError(
            f"{source}: {len(wrong)} token ids are wrong after the conversion, first {wrong[0]}"
        )
    adds_bos = bool(fields.get("tokenizer.ggml.add_bos_token", False))
    ids = tokenizer.encode("a").ids
    has_bos = bool(ids) and ids[0] == fields.get("tokenizer.ggml.bos_token_id")
    if adds_bos != has_bos:
        raise IntegrityError(f"{source}: the tokenizer {'lost' if adds_bos else 'adds'} its BOS")
