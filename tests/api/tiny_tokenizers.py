"""Small tokenizers built from nothing, for tests: no download, the same ids on every run."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

_CORPUS = [
    "The capital of France is Paris. The answer is 42.",
    "the quick brown fox jumps over the lazy dog",
    "Once upon a time there was a small model that did tasks.",
    "SELECT name FROM users WHERE id = 1; hello world, héllo wörld",
] * 4


@cache
def _byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _CORPUS,
        BpeTrainer(
            vocab_size=400,
            special_tokens=["<|end|>", "<|user|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer.to_str()


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE, about 400 ids; <|end|> (0, the EOS) and <|user|> (1) are special."""
    return Tokenizer.from_str(_byte_level_json())


def chat_tokenizer() -> Tokenizer:
    """The byte-level one with what chat templates write: <|im_start|>, <|im_end|>, [TOOL_CALLS] and
    <|python_tag|> are special, <tool_call> and </tool_call> are added tokens only (as Qwen's)."""
    tokenizer = byte_level_tokenizer()
    special = ("<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "<|python_tag|>")
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    plain = ("<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """As Llama 2's: "▁" for spaces, a prepended one, byte fallback, a stripped start, <s>."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for char in "▁abcdefghijklmnopqrstuvwxyzTFP.,":
        vocab[char] = len(vocab)
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("a", "n"), ("e", "r"), ("▁", "▁")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


def unmerged_tokenizer(vocab_size: int = 128) -> Tokenizer:
    """A byte-level BPE without merges, as large as the tiny models' vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab_size - 3]
    tokens = ["<pad>", "<s>", "</s>", *alphabet]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    return tokenizer
