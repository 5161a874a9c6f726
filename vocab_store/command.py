"""`tailor vocab profile` and `tailor vocab show`, without their command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters.json_text import parsed
from vocab_store.documents import Example, Progress
from vocab_store.edge_llm import export_vocab_map
from vocab_store.enrichment import Enrichment
from vocab_store.errors import VocabStoreError
from vocab_store.profile import ProfileSettings, VocabProfile, build_profile, report_of
from vocab_store.slice import RequiredIds, TokenTexts


def model_facts(folder: str | Path) -> tuple[int, int, tuple[int, ...]]:
    """(vocabulary size, hidden size, EOS ids of the generation config, else of the config).

    Raises VocabStoreError when the folder's JSON files lack one.
    """
    root = Path(folder)

    def read(name: str) -> dict[str, Any]:
        path = root / name
        if not path.exists():
            return {}
        loaded = parsed(path.read_text(encoding="utf-8"))
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
    """A profile to be made. model: the model's folder. data: examples in its ids. heldout: those to
    report on; None: every 10th of the data. edge_llm: a folder where the ids are also written as
    vocab_map.safetensors. enrichment: tokens of the model's own that the examples are written in;
    all of them are in the profile."""

    model: Path
    data: Sequence[Example]
    output: Path
    heldout: Sequence[Example] | None = None
    edge_llm: Path | None = None
    enrichment: Enrichment | None = None


def profile(
    order: ProfileOrder,
    settings: ProfileSettings,
    tokens: TokenTexts,
    progress: Progress | None = None,
) -> str:
    """Build a profile, write it, and return the report.

    tokens: of the model's ids, those of the order's enrichment with them. Raises VocabStoreError
    (and its subclasses), UnknownBlockError, OSError.
    """
    _, hidden_size, eos_ids = model_facts(order.model)
    required = RequiredIds.from_tokens(tokens, eos_ids)
    if order.enrichment is not None:
        required = required.with_own(order.enrichment.ids)
    heldout = order.heldout or order.data[9::10]
    examples = order.data
    if not order.heldout:
        examples = [example for i, example in enumerate(order.data) if i % 10 != 9]
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
