"""`tailor vocab`: vocabulary profiles of tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from server.commands.options import DEFAULT_MODEL, FieldOptions, OutputFile
from server.commands.progress import Bar, Stages
from server.errors import ConfigError


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class FilterOptions:
    """The filters of VocabTailor's Algorithm 1."""

    no_input_aware: Annotated[bool, Parameter(help="count output tokens of the own prompt too")] = (
        False
    )
    language: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="TAG",
            help="keep only tokens of this language's Unicode blocks; may be repeated",
        ),
    ] = ()
    block: Annotated[tuple[str, ...], Parameter(help="keep a further block; may be repeated")] = ()
    tolerance: Annotated[
        float,
        Parameter(metavar="TAU", help="share of documents that may lose a token (0.01)"),
    ] = 0.01


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class IdOptions:
    """Whose ids a profile holds."""

    model: Annotated[str, Parameter(help=f"the model ({DEFAULT_MODEL})")] = DEFAULT_MODEL
    adapter: Annotated[
        str | None, Parameter(metavar="DIR", help="merged into it; its own tokens are in the ids")
    ] = None


_FILTERS, _FIELDS, _IDS = FilterOptions(), FieldOptions(), IdOptions()


def profile(
    *,
    data: Annotated[
        Path,
        Parameter(metavar="FILE", help="JSON lines, CSV or Parquet with a prompt and a completion"),
    ],
    output: OutputFile,
    fields: FieldOptions = _FIELDS,
    ids: IdOptions = _IDS,
    heldout: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="report on these; default: every 10th line of --data"),
    ] = None,
    filters: FilterOptions = _FILTERS,
    joint: Annotated[
        str, Parameter(help="put between prompt and completion where neither has a blank")
    ] = " ",
    export_edge_llm: Annotated[
        Path | None, Parameter(metavar="DIR", help="also write vocab_map.safetensors here")
    ] = None,
) -> int:
    from server.model.gguf_folder import text_folder
    from server.token_bytes import TokenBytes, build, enriched
    from server.wiring.model import enrichment_of
    from vocab_store import command
    from vocab_store.profile import ProfileSettings

    pairs = _pairs(data, fields)
    held = None if heldout is None else _pairs(heldout, fields)
    with Stages() as stages:
        folder = text_folder(ids.model, report=stages)
    own = enrichment_of(ids.adapter)

    def tokens_of(tokenizer: Any, vocab_size: int) -> TokenBytes:
        table = build(tokenizer, vocab_size)
        if own is None:
            return table
        enrichment_of(ids.adapter, table)  # raises where it is of another tokenizer
        return enriched(table, own.ids, own.parts, own.hash)

    order = command.ProfileOrder(folder, pairs, output, held, joint, export_edge_llm, own)
    with Bar() as bar, _errors():
        settings = ProfileSettings(
            input_aware=not filters.no_input_aware,
            languages=filters.language,
            extra_blocks=filters.block,
            tolerance=filters.tolerance,
        )
        report = command.profile(order, settings, tokens_of, bar)
    print(report)
    return 0


def _pairs(data: Path, fields: FieldOptions) -> list[tuple[str, str]]:
    """(prompt, completion) of each row. Raises ConfigError with file, line and field."""
    from server.datasets import rows

    pairs: list[tuple[str, str]] = []
    for number, row in rows(data):
        prompt, completion = row.get(fields.prompt_field), row.get(fields.field)
        for name, value in ((fields.prompt_field, prompt), (fields.field, completion)):
            if not isinstance(value, str):
                there = ", ".join(map(str, row))[:200]
                raise ConfigError(f"{data}:{number}: {name}: must be a string (there are: {there})")
        assert isinstance(prompt, str) and isinstance(completion, str)
        pairs.append((prompt, completion))
    return pairs


def show(profile: Annotated[Path, Parameter(name="FILE", help="the profile")], /) -> int:
    from vocab_store import command

    with _errors():
        shown = command.show(profile)
    print(shown)
    return 0


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """What is wrong with a profile's files or settings, as an error of the command line."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    except (ValueError, KeyError) as error:  # VocabStoreError, UnknownBlockError, wrong settings
        raise ConfigError(str(error.args[0] if error.args else error)) from None
