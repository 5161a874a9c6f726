"""A GGUF's tokenizer in transformers' form, with every id compared.

A GGUF has the tokens, their kinds and the merges, or SentencePiece's scores. It has no pattern that
cuts text before the merges, only its name (`tokenizer.ggml.pre`), and a wrong one gives other ids
for the same text; a name that is not known is refused. Importing this imports no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from server.errors import IntegrityError, ModelError, UnsupportedModelError
from server.model.gguf_index import GgufIndex

Fields = Mapping[str, Any]
"""Metadata by key without `tokenizer.ggml.`; `chat_template` too."""

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4  # of token_type
_MOST_TOKEN = 2048  # bytes of a token
_SPARE = ("padding_token_id", "unknown_token_id", "seperator_token_id", "mask_token_id")
_SPACE = "\u2581"  # how SentencePiece writes a space


def gguf_fields(index: GgufIndex) -> dict[str, Any]:
    """The GGUF's metadata of the tokenizer and its architecture, as Python values, whose lists fit
    together and whose ids are below the embedding table's rows.

    Raises ModelError for what does not.
    """
    fields = index.fields
    found = {k.removeprefix(_PREFIX): v for k, v in fields.items() if k.startswith(_PREFIX)}
    for key, name in (
        ("tokenizer.chat_template", "chat_template"),
        ("general.architecture", "architecture"),
    ):
        if key in fields:
            found[name] = fields[key]

    def wrong(problem: str) -> ModelError:
        return ModelError(f"{index.name} is no complete GGUF: {problem}")

    tokens = index.texts(f"{_PREFIX}tokens", _MOST_TOKEN)
    if not tokens:
        raise wrong(f"it lacks {_PREFIX}tokens")
    table = index.tensors.get("token_embd.weight")
    if table is not None and len(tokens) > table.shape[0]:
        raise wrong(f"it has {len(tokens)} tokens and {table.shape[0]} rows of token_embd.weight")
    found["tokens"] = tokens
    found["merges"] = index.texts(f"{_PREFIX}merges", 2 * _MOST_TOKEN) or []
    for name in ("scores", "token_type"):
        values = index.numbers(f"{_PREFIX}{name}")
        if values is None:
            continue
        if values.shape[0] != len(tokens) or not np.isfinite(values).all():
            raise wrong(f"{_PREFIX}{name} does not fit its {len(tokens)} tokens")
        found[name] = values.tolist()
    if found.get("model") == "llama" and not (_is_gemma(found) or "scores" in found):
        raise wrong(f"it lacks {_PREFIX}scores")
    for key in [key for key in found if key.endswith("_token_id")]:
        if not isinstance(found[key], int) or not 0 <= found[key] < len(tokens):
            if key not in _SPARE:
                raise wrong(f"{_PREFIX}{key} is {str(found[key])[:40]}, of {len(tokens)} tokens")
            del found[key]  # llama.cpp's loader leaves it out, too
    return found


def eos_ids(fields: Fields) -> list[int]:
    """Every id that ends a text, the one called EOS first."""
    ids: list[int] = []
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        value = fields.get(key)
        if value is not None and int(value) not in ids:
            ids.append(int(value))
    return ids


# --- how text is cut before the merges ------------------------------------------------------------

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = r"[^\r\n\p{L}\p{N}]?"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_WORDS}{_UPPER}*{_LOWER}+|{_WORDS}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST}"
_GPT4O = (
    rf"{_WORDS}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_WORDS}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    rf"\p{{N}}{{1,3}}|{_REST}"
)
_HUNYUAN = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_GPT2_SPLIT = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]  # noqa: E501  # fmt: skip
_DIGITS = [{"type": "Digits", "individual_digits": True}, *_GPT2_SPLIT]


def _split(*patterns: str) -> list[dict[str, Any]]:
    return [
        *(
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
            for regex in patterns
        ),
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]


_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4", "granite-docling", "trillion"), _GPT2_SPLIT),  # noqa: E501
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _split(_LLAMA3)),  # noqa: E501
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan"), _split(_QWEN2)),
    "qwen35": _split(_QWEN35),
    "tekken": _split(_TEKKEN),
    **dict.fromkeys(("gpt-4o", "llama4"), _split(_GPT4O)),
    **dict.fromkeys(("hunyuan-dense", "deepseek-v3"), _split(*_HUNYUAN)),
}  # fmt: skip
"""By the names of llama.cpp's converter; families of this server and what is built on them."""

_WHOLE_WORDS = frozenset(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken", "glm4")
)
"""Where a piece that is a token is not made of merges."""

_ADD_BOS = _WHOLE_WORDS - {"glm4"}
"""Where BOS is added unless the file says no."""

_NFC = frozenset(("qwen2", "deepseek-r1-qwen", "qwen35"))


# --- the two kinds of tokenizers ------------------------------------------------------------------


def _byte_level(fields: Fields, source: str) -> dict[str, Any]:
    """The parts of tokenizer.json for GPT-2's kind. Raises UnsupportedModelError."""
    pre = str(fields.get("pre", "default"))
    steps = _PRE_TOKENIZERS.get(pre)
    if steps is None:
        raise UnsupportedModelError(
            f"{source}: its pre-tokenizer {pre[:40]!r} is not known "
            f"({', '.join(_PRE_TOKENIZERS)} are); use the model's folder in transformers' form"
        )
    return {
        "normalizer": {"type": "NFC"} if pre in _NFC else None,
        "pre_tokenizer": (
            steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": list(steps)}
        ),
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True
        },
        "model": _bpe(
            {token: i for i, token in enumerate(fields["tokens"])},
            [merge.split(" ") for merge in fields.get("merges") or ()],
            ignore_merges=pre in _WHOLE_WORDS,
        ),
    }  # fmt: skip


def _sentencepiece(fields: Fields) -> dict[str, Any]:
    """The parts of tokenizer.json for SentencePiece's BPE."""
    tokens = _spelled(fields)
    vocab = {token: i for i, token in enumerate(tokens)}
    is_gemma = _is_gemma(fields)
    ranks = [-i for i in range(len(tokens))] if is_gemma else fields["scores"]
    merges = _merges(vocab, dict(zip(tokens, ranks, strict=True)))
    unknown = fields.get("unknown_token_id")
    unk = tokens[int(unknown)] if is_gemma and unknown is not None else None
    model = _bpe(vocab, merges, prefix=None, unk_token=unk, fuse_unk=True, byte_fallback=True)
    has_prefix = bool(fields.get("add_space_prefix", True))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer: dict[str, Any] | None = replace
    pre_tokenizer: dict[str, Any] | None = None
    if is_gemma:
        pre_tokenizer = {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
            "invert": False,
        }  # fmt: skip
    elif has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        normalizer = {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": _SPACE}, replace],
        }
    return {
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _bpe(
    vocab: Mapping[str, int], merges: Sequence[Sequence[str]], prefix: str | None = "", **own: Any
) -> dict[str, Any]:
    switches = {"unk_token": None, "fuse_unk": False, "byte_fallback": False}
    switches |= {"ignore_merges": False} | own
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": switches["unk_token"],
        "continuing_subword_prefix": prefix,
        "end_of_word_suffix": prefix,
        "fuse_unk": switches["fuse_unk"],
        "byte_fallback": switches["byte_fallback"],
        "ignore_merges": switches["ignore_merges"],
        "vocab": vocab,
        "merges": merges,
    }


def _is_gemma(fields: Fields) -> bool:
    """Whether scores do not follow the merges, as in Gemma: there the order of the tokens does."""
    return str(fields.get("architecture")).startswith("gemma")


def _merges(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[list[str]]:
    """Every way to make a token of two, best score first: what a SentencePiece file leaves out."""
    found: list[tuple[float, int, int, list[str]]] = []
    for token, score in scores.items():
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(score, len(left), len(right), [left, right]) for left, right in known]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [pair for *_, pair in found]


def _spelled(fields: Fields) -> list[str]:
    """The tokens as tokenizer.json has them."""
    tokens: list[str] = fields["tokens"]
    if fields.get("model") == "gpt2":
        return tokens
    return [token.replace(" ", _SPACE) for token in tokens]


# --- the files ------------------------------------------------------------------------------------


def convert_tokenizer(
    fields: Fields, out: Path, source: str, report: Callable[[str], None]
) -> None:
    """Write a tokenizer into `out`, a folder in transformers' form. fields: gguf_fields of the
    file `source`. The EOS that a file may ask for behind a prompt is not added: it is continued.

    Raises UnsupportedModelError for a tokenizer that is not known, IntegrityError when an id does
    not stand for the GGUF's token.
    """
    report("Converting the tokenizer")
    kind = fields.get("model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{source}: its tokenizer is {str(kind)[:40]!r} (tokenizer.ggml.model), gpt2 and llama "
            "are read; use the model's folder in transformers' form"
        )
    parts = _byte_level(fields, source) if kind == "gpt2" else _sentencepiece(fields)
    tokens = _spelled(fields)
    named = {
        name: tokens[int(fields[key])]
        for name, key in (
            ("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"), ("pad_token", "padding_token_id"),
        )
        if fields.get(key) is not None
    }  # fmt: skip
    adds_bos = fields.get("add_bos_token")
    if adds_bos is None:
        adds_bos = kind == "llama" or fields.get("pre") in _ADD_BOS
    bos = named.get("bos_token") if adds_bos else None
    data = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(fields, tokens, set(named.values())),
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": _template(bos, fields.get("bos_token_id")),
        "decoder": parts["decoder"],
        "model": parts["model"],
    }
    told = {"backend": "tokenizers", "tokenizer_class": "TokenizersBackend", **named}
    _write(out / "tokenizer.json", data)
    _write(out / "tokenizer_config.json", told)
    template = fields.get("chat_template")
    if template:
        (out / "chat_template.jinja").write_text(str(template), encoding="utf-8")
    _check(out / "tokenizer.json", tokens, bos, source)


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _added(fields: Fields, tokens: Sequence[str], named: set[str]) -> list[dict[str, Any]]:
    """Tokens that are cut out of a text whole: special ones, and those that a user defined."""
    kinds = fields.get("token_type") or [1] * len(tokens)
    added = []
    for i, (token, kind, raw) in enumerate(zip(tokens, kinds, fields["tokens"], strict=True)):
        is_special = kind == _CONTROL or token in named
        # Runs of spaces are made by the merges: no text has them as the vocabulary spells them.
        if is_special or (kind == _USER_DEFINED and token == raw):
            added.append(
                {
                    "id": i, "content": token, "single_word": False, "lstrip": False,
                    "rstrip": False, "normalized": False, "special": is_special,
                }
            )  # fmt: skip
    return added


def _template(bos: str | None, bos_id: Any) -> dict[str, Any]:
    """What stands around a text, and around two."""

    def begin(type_id: int) -> list[dict[str, Any]]:
        return [] if bos is None else [{"SpecialToken": {"id": bos, "type_id": type_id}}]

    first = [*begin(0), {"Sequence": {"id": "A", "type_id": 0}}]
    known = {} if bos is None else {bos: {"id": bos, "ids": [int(bos_id)], "tokens": [bos]}}
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [*first, *begin(1), {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": known,
    }


def _check(path: Path, tokens: Sequence[str], bos: str | None, source: str) -> None:
    """Compare every id, and that BOS is there or not. Raises IntegrityError."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    wrong = [i for i, token in enumerate(tokens) if tokenizer.id_to_token(i) != token]
    if wrong:
        raise IntegrityError(
            f"{source}: {len(wrong)} token ids are wrong after the conversion, first {wrong[0]}"
        )
    encoded = tokenizer.encode("a").tokens
    if bos is not None and (not encoded or encoded[0] != bos):
        raise IntegrityError(f"{source}: the tokenizer lost its BOS")
