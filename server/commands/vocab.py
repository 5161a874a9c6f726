"""`tailor vocab`: vocabulary profiles of tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from server.commands.data import DataFiles, FieldOptions, open_text
from server.commands.options import (
    FOLDER,
    Bar,
    IdOptions,
    OutputFile,
    bounded,
    refused,
    writing,
)
from server.errors import ConfigError

if TYPE_CHECKING:
    from server.commands.data import ModelText


_FIELDS, _IDS = FieldOptions(), IdOptions()


def profile(
    *,
    data: DataFiles,
    output: OutputFile,
    fields: FieldOptions = _FIELDS,
    ids: IdOptions = _IDS,
    heldout: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="report on these; default: every 10th line of --data"),
    ] = None,
    # The filters of VocabTailor's Algorithm 1.
    no_input_aware: Annotated[bool, Parameter(help="count output tokens of the own prompt too")] = (
        False
    ),
    language: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="TAG",
            help="keep only tokens of this language's Unicode blocks; may be repeated",
        ),
    ] = (),
    block: Annotated[tuple[str, ...], Parameter(help="keep a further block; may be repeated")] = (),
    tolerance: Annotated[
        float,
        bounded("share of documents that may lose a token (0.01)", metavar="TAU", gte=0, lte=1),
    ] = 0.01,
    export_edge_llm: Annotated[
        Path | None, FOLDER, Parameter(help="also write vocab_map.safetensors here")
    ] = None,
) -> int:
    from vocab_store.profile import ProfileSettings, build_profile, model_facts, report_text
    from vocab_store.slice import RequiredIds, export_vocab_map

    if block and not language:
        raise ConfigError("--block needs --language: without it tokens of all blocks are kept")
    with Bar() as bar:
        text = open_text(ids.model, fields, adapter=ids.adapter, report=bar.stage)
    with Bar() as bar, refused():
        settings = ProfileSettings(
            input_aware=not no_input_aware,
            languages=language,
            extra_blocks=block,
            tolerance=tolerance,
        )
        hidden_size, eos_ids = model_facts(text.folder)
        required = RequiredIds.from_tokens(text.table, eos_ids)
        if text.own is not None:
            required = required.with_own(text.own.ids)
        examples = _documents(text, data, bar)
        if heldout is not None:
            judged = _documents(text, [heldout], bar)
        else:
            judged = examples[9::10]
            examples = [example for i, example in enumerate(examples) if i % 10 != 9]
        made = build_profile(
            examples,
            text.table,
            required,
            settings,
            heldout=judged,
            head_row_bytes=4 * hidden_size,
            progress=bar,
        )
        with writing(output):
            made.save(output)
        if export_edge_llm is not None:
            with writing(export_edge_llm):
                export_vocab_map(made.slice, export_edge_llm)
    print(f"{report_text(made.manifest)}\nwritten to         {output}")
    return 0


def _documents(
    text: ModelText, files: Sequence[Path], bar: Bar
) -> list[tuple[list[int], list[int]]]:
    """The examples of some files as the model reads and writes them, without the id that ends an
    output: it is in every slice. Raises ConfigError with file, line and field."""
    from vocab_store.profile import TICK

    found = []
    for prompt, output in text.reader.read(files):
        ids = output[:-1] if output[-1:] == [text.eos] else output
        if text.own is not None:
            prompt, ids = text.own.read(prompt), text.own.segment(ids)
        found.append((prompt, ids))
        if len(found) % TICK == 0:
            bar("tokenize", len(found), None)
    bar("tokenize", len(found), len(found))
    return found


def show(profile: Annotated[Path, Parameter(name="FILE", help="the profile")], /) -> int:
    from vocab_store.profile import VocabProfile, report_text

    with refused(), writing(profile):
        made = VocabProfile.load(profile)
        report = report_text(made.manifest)
    print(f"profile            {made.version}")
    print(f"tokenizer          {str(made.manifest.get('fingerprint'))[:16]}")
    print(f"corpus             {str(made.manifest.get('corpus_sha256'))[:16]}")
    print(f"settings           {json.dumps(made.manifest.get('settings'), sort_keys=True)}")
    print(f"fill order         {made.fill_ids.shape[0]} ids")
    print(report)
    return 0
