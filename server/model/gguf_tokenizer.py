"""A GGUF's tokenizer in transformers' form, with every id compared.

A GGUF has the tokens, their kinds and the merges, or SentencePiece's scores. It has no pattern that
cuts text before the merges, only its name (`tokenizer.ggml.pre`), and a wrong one gives other ids
for the same text; a name that is not known is refused. Importing this imports neither transformers
nor tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from server.errors import IntegrityError, ModelError, UnsupportedModelError
from server.model.gguf_index import GgufIndex

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import Decoder
    from tokenizers.pre_tokenizers import PreTokenizer

Fields = Mapping[str, Any]
"""Metadata by key without `tokenizer.ggml.`; `chat_template` and `tool_template` too."""

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
        ("tokenizer.chat_template.tool_use", "tool_template"),
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
        if type(found[key]) is not int or not 0 <= found[key] < len(tokens):
            if key not in _SPARE:
                raise wrong(f"{_PREFIX}{key} is {str(found[key])[:40]}, of {len(tokens)} tokens")
            del found[key]  # llama.cpp's loader leaves it out, too
    return found


_TURN_ENDS = frozenset(("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"))
"""Tokens that end a turn, by their texts, as in llama.cpp's loader: files of Gemma 3 and Phi-3 call
another one EOS, and no key says more."""


def eos_ids(fields: Fields) -> list[int]:
    """Every id that ends a text, the one called EOS first: those of the keys, and the ends of turns
    that the chat template writes."""
    found = [fields.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    template = str(fields.get("chat_template", ""))
    ends = {token for token in _TURN_ENDS if token in template}
    found += [i for i, token in enumerate(fields["tokens"]) if token in ends]
    return list(dict.fromkeys(int(value) for value in found if value is not None))


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
_DIGITS = ("smollm", "starcoder", "refact", "codeshell", "exaone")
"""Where each digit is a piece before anything else is cut."""

_CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4", "granite-docling", "trillion"), ()),
    **dict.fromkeys(_DIGITS, ()),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), (_LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    **dict.fromkeys(("hunyuan-dense", "deepseek-v3"), _HUNYUAN),
}
"""Patterns of pieces, one after the other; (): GPT-2's own, which tokenizers has. By the names of
llama.cpp's converter; families of this server and what is built on them."""

_WHOLE_WORDS = frozenset(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken", "glm4")
)
"""Where a piece that is a token is not made of merges."""

_ADD_BOS = _WHOLE_WORDS - {"glm4"}
"""Where BOS is added unless the file says no."""

_NFC = frozenset(("qwen2", "deepseek-r1-qwen", "qwen35"))

_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")
"""Phi-3's tokens that keep the white space behind them: its others drop it. No key says so."""


# --- the two kinds of tokenizers ------------------------------------------------------------------


def _byte_level(fields: Fields, pre: str) -> Tokenizer:
    """GPT-2's kind."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    vocab = {token: i for i, token in enumerate(fields["tokens"])}
    merges: Any = [tuple(merge.split(" ")) for merge in fields.get("merges") or ()]
    made = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _NFC:
        made.normalizer = normalizers.NFC()
    steps: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in _CUTS[pre]]
    if pre in _DIGITS:
        steps = [Digits(individual_digits=True)]
    steps.append(ByteLevel(add_prefix_space=False, use_regex=not _CUTS[pre]))
    made.pre_tokenizer = Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(fields: Fields, tokens: Sequence[str]) -> Tokenizer:
    """SentencePiece's BPE. tokens: as tokenizer.json has them."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {token: i for i, token in enumerate(tokens)}
    is_gemma = _is_gemma(fields)
    ranks = [-i for i in range(len(tokens))] if is_gemma else fields["scores"]
    merges = _merges(vocab, dict(zip(tokens, ranks, strict=True)))
    unknown = fields.get("unknown_token_id")
    unk = tokens[int(unknown)] if is_gemma and unknown is not None else None
    made = Tokenizer(models.BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    spelled = normalizers.Replace(" ", _SPACE)
    made.normalizer = spelled
    steps: list[Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_gemma:
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif fields.get("add_space_prefix", True):
        steps.append(decoders.Strip(" ", 1, 0))
        made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spelled])
    made.decoder = decoders.Sequence(steps)
    return made


def _is_gemma(fields: Fields) -> bool:
    """Whether scores do not follow the merges, as in Gemma: there the order of the tokens does."""
    return str(fields.get("architecture")).startswith("gemma")


def _merges(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to make a token of two, best score first: what a SentencePiece file leaves out."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, score in scores.items():
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(score, len(left), len(right), (left, right)) for left, right in known]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [pair for *_, pair in found]


# --- the files ------------------------------------------------------------------------------------


def convert_tokenizer(
    fields: Fields, out: Path, source: str, report: Callable[[str], None]
) -> None:
    """Write a tokenizer into `out`, a folder in transformers' form. fields: gguf_fields of the
    file `source`. The EOS that a file may ask for behind a prompt is not added: it is continued.

    Raises UnsupportedModelError for a tokenizer that is not known, ModelError for parts that do not
    fit together, IntegrityError when an id does not stand for the GGUF's token.
    """
    from tokenizers.processors import TemplateProcessing

    report("Converting the tokenizer")
    kind = fields.get("model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{source}: its tokenizer is {str(kind)[:40]!r} (tokenizer.ggml.model), gpt2 and llama "
            "are read; use the model's folder in transformers' form"
        )
    pre = str(fields.get("pre", "default"))
    if kind == "gpt2" and pre not in _CUTS:
        raise UnsupportedModelError(
            f"{source}: its pre-tokenizer {pre[:40]!r} is not known "
            f"({', '.join(_CUTS)} are); use the model's folder in transformers' form"
        )
    tokens: list[str] = fields["tokens"]
    if kind == "llama":
        tokens = [token.replace(" ", _SPACE) for token in tokens]
    try:
        made = _byte_level(fields, pre) if kind == "gpt2" else _sentencepiece(fields, tokens)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{source}: its tokenizer is not whole: {str(error)[:200]}") from None
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
        adds_bos = kind == "llama" or pre in _ADD_BOS
    bos = named.get("bos_token") if adds_bos else None
    added = list(_added(fields, tokens, set(named.values())))
    made.add_special_tokens([token for token in added if token.special])
    made.add_tokens([token for token in added if not token.special])
    begin = [] if bos is None else ["BOS"]
    made.post_processor = TemplateProcessing(
        single=[*begin, "$A"],
        pair=[*begin, "$A", *(f"{one}:1" for one in begin), "$B:1"],
        special_tokens=[
            {"id": one, "ids": [int(fields["bos_token_id"])], "tokens": [bos]} for one in begin
        ],
    )
    _check(made, tokens, bos, source)
    made.save(str(out / "tokenizer.json"), pretty=False)  # read at every start
    told: Any = {"backend": "tokenizers", "tokenizer_class": "TokenizersBackend", **named}
    if fields.get("tool_template"):  # where transformers looks for a second one
        told["chat_template"] = [{"name": "tool_use", "template": fields["tool_template"]}]
    text = json.dumps(told, ensure_ascii=False, indent=1) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")
    if template := fields.get("chat_template"):
        (out / "chat_template.jinja").write_text(str(template), encoding="utf-8")


def _added(fields: Fields, tokens: Sequence[str], named: set[str]) -> Iterator[AddedToken]:
    """Tokens that are cut out of a text whole; those that a user defined are not special ones."""
    from tokenizers import AddedToken

    strips = fields.get("model") == "llama" and fields.get("architecture") == "phi3"
    kinds = fields.get("token_type") or [1] * len(tokens)
    for token, kind, raw in zip(tokens, kinds, fields["tokens"], strict=True):
        special = kind == _CONTROL or token in named
        # Runs of spaces are made by the merges: no text has them as the vocabulary spells them.
        if special or (kind == _USER_DEFINED and token == raw):
            rstrip = strips and token not in _KEEPS_SPACE
            yield AddedToken(token, normalized=False, special=special, rstrip=rstrip)


def _check(tokenizer: Tokenizer, tokens: Sequence[str], bos: str | None, source: str) -> None:
    """Compare every id, and that BOS is there or not. Raises IntegrityError."""
    wrong = [i for i, token in enumerate(tokens) if tokenizer.id_to_token(i) != token]
    if wrong:
        raise IntegrityError(
            f"{source}: {len(wrong)} token ids are wrong after the conversion, first {wrong[0]}"
        )
    encoded = tokenizer.encode("a").tokens
    if bos is not None and (not encoded or encoded[0] != bos):
        raise IntegrityError(f"{source}: the tokenizer lost its BOS")
