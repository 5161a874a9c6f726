"""`tailor vocab profile` and `tailor vocab show`, without their command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vocab_store.documents import Example, Progress, tokenize_pairs
from vocab_store.edge_llm import export_vocab_map
from vocab_store.enrichment import Enrichment
from vocab_store.errors import VocabStoreError
from vocab_store.profile import ProfileSettings, VocabProfile, build_profile, report_of
from vocab_store.slice import RequiredIds, TokenTexts

TokensOf = Callable[[Any, int], TokenTexts]
"""(tokenizers.Tokenizer, the model's vocabulary size) -> TokenTexts; token_bytes.build is one.
The server must build its own with the same size, or the fingerprints differ."""


def model_facts(folder: str | Path) -> tuple[int, int, tuple[int, ...]]:
    """(vocabulary size, hidden size, EOS ids of the generation config, else of the config).

    Raises VocabStoreError when the folder's JSON files lack one.
    """
    root = Path(folder)

    def read(name: str) -> dict[str, Any]:
        path = root / name
        if not path.exists():
            return {}
        loaded = json.loads(path.read_text(encoding="utf-8"))
        return loaded if isinstance(loaded, dict) else {}

    config, generation = read("config.json"), read("generation_config.json")
    text = config.get("text_config") or config
    eos = generation.get("eos_token_id", text.get("eos_token_id", config.get("eos_token_id")))
    if eos is None or "vocab_size" not in text or "hidden_size" not in text:
        raise VocabStoreError(f"{root}: config.json lacks vocab_size, hidden_size or eos_token_id")
    return (
        int(text["vocab_size"]),
        int(text["hidden_size"]),
        tuple(int(i) for i in (eos if isinstance(eos, list) else [eos])),
    )


@dataclass(frozen=True, slots=True)
class ProfileOrder:
    """A profile to be made. model: the model's folder. data: prompts and completions. heldout:
    those to report on; None: every 10th of the data. joint: put between prompt and completion where
    neither has a blank. edge_llm: a folder where the ids are also written as
    vocab_map.safetensors. enrichment: tokens of the model's own, which outputs are written in; all
    of them are in the profile."""

    model: Path
    data: Sequence[tuple[str, str]]
    output: Path
    heldout: Sequence[tuple[str, str]] | None = None
    joint: str = " "
    edge_llm: Path | None = None
    enrichment: Enrichment | None = None


def profile(
    order: ProfileOrder,
    settings: ProfileSettings,
    tokens_of: TokensOf,
    progress: Progress | None = None,
) -> str:
    """Build a profile, write it, and return the report.

    tokens_of: gives the token texts with those of the order's enrichment. Raises VocabStoreError
    (and its subclasses), UnknownBlockError, OSError.
    """
    from tokenizers import Tokenizer

    vocab_size, hidden_size, eos_ids = model_facts(order.model)
    tokenizer = Tokenizer.from_file(str(order.model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokens = tokens_of(tokenizer, vocab_size)
    required = RequiredIds.from_tokens(tokens, eos_ids)
    if order.enrichment is not None:
        required = required.with_own(order.enrichment.ids)

    def ids_of(pairs: Sequence[tuple[str, str]]) -> list[Example]:
        found = tokenize_pairs(pairs, tokenizer, joint=order.joint, progress=progress)
        return found if order.enrichment is None else [_spelled(e, order.enrichment) for e in found]

    examples = ids_of(order.data)
    if order.heldout:
        heldout = ids_of(order.heldout)
    else:
        heldout = examples[9::10]
        examples = [example for i, example in enumerate(examples) if i % 10 != 9]
    made = build_profile(
        examples,
        tokens,
        required,
        settings,
        heldout=heldout,
        head_row_bytes=4 * hidden_size,
        progress=progress,
    )
    made.save(order.output)
    if order.edge_llm:
        export_vocab_map(made.slice, order.edge_llm)
    return f"{report_of(made.manifest).text()}\nwritten to         {order.output}"


def _spelled(example: Example, enrichment: Enrichment) -> Example:
    """The example as a model with tokens of its own reads and writes it."""
    prompt = enrichment.read(example.input_ids.tolist())
    output = enrichment.segment(example.output_ids.tolist())
    return Example(np.asarray(prompt, np.int32), np.asarray(output, np.int32))


def show(file: Path) -> str:
    """What a profile file holds. Raises ProfileFileError, OSError."""
    made = VocabProfile.load(file)
    manifest = made.manifest
    return "\n".join(
        [
            f"profile            {made.version}",
            f"tokenizer          {manifest['fingerprint'][:16]}",
            f"corpus             {manifest['corpus_sha256'][:16]}",
            f"settings           {json.dumps(manifest['settings'], sort_keys=True)}",
            f"fill order         {made.fill_ids.shape[0]} ids",
            report_of(manifest).text(),
        ]
    )
