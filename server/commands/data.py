"""A command's data: its options, and the examples of its files in a model's ids."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from server.commands.options import PromptField, as_options, writing
from server.datasets import ExampleReader, Fields, Render, open_table
from server.errors import ConfigError, TailorError

if TYPE_CHECKING:
    from server.token_bytes import TokenBytes
    from vocab_store.enrichment import Enrichment

_T = TypeVar("_T")
_SEED = 20
_LEAST = 20  # examples
_WHAT = "JSON lines, CSV or Parquet with a prompt and a completion, or messages"

DataFiles = Annotated[tuple[Path, ...], Parameter(metavar="FILE", help=f"{_WHAT}; may be repeated")]


@as_options
class FieldOptions(Fields):
    """Where a row of the data has what."""

    field: Annotated[str, Parameter(help="where the output is (completion)")] = "completion"
    prompt_field: PromptField = "prompt"
    joint: Annotated[
        str, Parameter(help="put between prompt and output where neither has a blank")
    ] = " "


@dataclass(frozen=True, slots=True)
class ModelText:
    """What a command needs of a model that it does not run.

    folder: the model's. tokenizer: a tokenizers.Tokenizer. table: its id -> bytes table. eos: an id
    that ends a text. reader: of data files, in the base's ids. own: the tokens of an adapter, which
    the table has, too; None without any.
    """

    folder: Path
    tokenizer: Any
    table: TokenBytes
    eos: int
    reader: ExampleReader
    own: Enrichment | None

    @property
    def fingerprint(self) -> str:
        """Of the ids, hex."""
        return self.table.fingerprint.hex()


def open_text(
    model: str,
    fields: FieldOptions,
    *,
    adapter: str | None = None,
    report: Callable[[str], None] | None = None,
) -> ModelText:
    """A model's tokenizer, and what reads data files with it. adapter: whose tokens are in its ids.
    report: told what takes long. Raises ConfigError, ModelError."""
    from server.api.chat_template import load_chat_template
    from server.model.adapter import enrichment_of
    from server.model.catalog import text_folder
    from server.token_bytes import enriched

    folder = text_folder(model, report=report)
    with writing(folder / "config.json"):
        tokenizer, table, eos = open_table(folder)
    chat = None  # of a model without a template that can be used
    with contextlib.suppress(TailorError, ValueError):
        chat = load_chat_template(folder, tokenizer)
    reader = ExampleReader(
        tokenizer,
        eos,
        fields=fields,
        vocab_size=table.vocab_size,
        render=None if chat is None else chat_render(chat),
    )
    own = enrichment_of(adapter, table.fingerprint.hex())
    if own is not None:
        table = enriched(table, own.ids, own.parts, own.hash)
    return ModelText(folder, tokenizer, table, eos, reader, own)


def as_body(asked: dict[str, Any]) -> dict[str, Any]:
    """A turn as a request's body has it: without members of messages that /v1/chat/completions does
    not know, nor NaN, by which pandas writes that a row lacks one."""
    from server.api.faces.chat import MessageBody

    known, messages = MessageBody.model_fields.keys(), asked.get("messages", ())
    told = [{k: m[k] for k in m if k in known and m[k] == m[k]} for m in messages]
    return {**asked, "messages": told} if told else asked


def chat_render(chat: Any) -> Render:
    """What /v1/chat/completions makes of messages and tools (`as_body`): text and ids."""

    def render(asked: dict[str, Any]) -> tuple[str, list[int]]:
        from server.api.bodies import validate
        from server.api.chats import rendered
        from server.api.faces.chat import ChatBody, chat_of
        from server.api.schemas import SchemaRules
        from server.api.tools import chosen_tools

        body = chat_of(validate(ChatBody, as_body(asked)))
        tools = chosen_tools(body.tools, ("auto", {}), SchemaRules()).shown
        shown = rendered(chat, body.turns, tools)
        return shown.text, chat.encode(shown)

    return render


@dataclass(frozen=True, slots=True)
class TaskData:
    """A task's examples in ids, a part of them held back. text: of the model that they are for."""

    train: Sequence[tuple[list[int], list[int]]]
    held_out: Sequence[tuple[list[int], list[int]]]
    text: ModelText


def read_task_data(
    model: str,
    files: Sequence[Path],
    fields: FieldOptions,
    *,
    max_held_out: int = 300,
) -> TaskData:
    """The examples of `files`, shuffled by a fixed seed; a tenth is held back (`hold_back`), by row
    where none of the prompts is as rare. Raises ConfigError for files that cannot be read and for
    fewer than 20 examples."""
    text = open_text(model, fields)
    examples = list(text.reader.read(files))
    if len(examples) < _LEAST:
        where = ", ".join(map(str, files))
        raise ConfigError(f"{where}: {len(examples)} examples; {_LEAST} are needed")
    random.Random(_SEED).shuffle(examples)
    learned, held = hold_back(examples, lambda one: tuple(one[0]) or id(one), max_held_out)
    if not held:
        learned, held = hold_back(examples, id, max_held_out)
    return TaskData(learned, held, text)


def hold_back(
    rows: Sequence[_T], prompt_of: Callable[[_T], Hashable], most: int
) -> tuple[list[_T], list[_T]]:
    """(to learn from, held back): of the rows' beginning a tenth, at most `most`. Equal prompts are
    on one side; one with more rows than are held back is learned from."""
    num = min(most, len(rows) // 10)
    by_prompt: dict[Hashable, list[_T]] = {}
    for row in rows:
        by_prompt.setdefault(prompt_of(row), []).append(row)
    held, learned = list[_T](), list[_T]()
    for same in by_prompt.values():
        (held if len(held) + len(same) <= num else learned).extend(same)
    return learned, held
