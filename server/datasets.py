"""Reads a task's data: prompts and outputs from a file, tokenized as a model would see them.

JSON lines, CSV with a header, and Parquet (with pyarrow) are read, by the file's ending. A row has
a prompt and an output, or `messages` whose last one, the assistant's, is the output, or ids.

Completions are tokenized *in place*, after their prompt, so that the leading space and the merges
are the model's own, and end with EOS.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.errors import ConfigError

if TYPE_CHECKING:
    from server.token_bytes import TokenBytes

Example = tuple[list[int], list[int]]


def tokenize_in_place(tokenizer: Any, prompt: str, completion: str, eos_token_id: int) -> Example:
    """(prompt ids, output ids) as a model would see and emit them; the output ends with EOS.

    A blank is put between the two where neither side has one. Where prompt and completion join in
    one token, it belongs to the output: a model given the shorter prompt would emit it.
    """
    blank = not prompt or prompt[-1:].isspace() or completion[:1].isspace()
    alone = tokenizer.encode(prompt, add_special_tokens=False).ids
    whole = tokenizer.encode(
        prompt + ("" if blank else " ") + completion, add_special_tokens=False
    ).ids
    shared = 0
    while shared < min(len(alone), len(whole)) and alone[shared] == whole[shared]:
        shared += 1
    return whole[:shared], [*whole[shared:], eos_token_id]


def json_lines(data: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each line of a JSONL file that is not blank.

    Raises ConfigError with file and line for what is no JSON object.
    """
    try:
        file = data.open(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{data}: {error.strerror}") from None
    with file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    entry = json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{data}:{number}: no JSON: {str(error)[:100]}") from None
                if not isinstance(entry, dict):
                    raise ConfigError(f"{data}:{number}: a line must be an object")
                yield number, entry
        except UnicodeDecodeError:
            raise ConfigError(f"{data}: not UTF-8") from None


def rows(data: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line or row number from 1, row) of each row of a file. Raises ConfigError that names both.

    CSV counts lines, its header is the first.
    """
    if data.suffix == ".csv":
        yield from _csv_rows(data)
    elif data.suffix == ".parquet":
        yield from _parquet_rows(data)
    else:
        yield from json_lines(data)


def _csv_rows(data: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with data.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    wanted = len(reader.fieldnames or ())
                    raise ConfigError(f"{data}:{reader.line_num}: must have {wanted} fields")
                yield reader.line_num, dict(row)
    except OSError as error:
        raise ConfigError(f"{data}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{data}: not UTF-8") from None
    except csv.Error as error:
        raise ConfigError(f"{data}:{reader.line_num}: {error}") from None


def _parquet_rows(data: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(
            f"{data}: Parquet is read with pyarrow, which is not here: pip install pyarrow; or "
            "give the data as JSON lines or CSV"
        ) from None
    try:
        with parquet.ParquetFile(data) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except OSError as error:
        raise ConfigError(f"{data}: {error.strerror or error}") from None
    except ArrowException as error:
        raise ConfigError(f"{data}: {str(error)[:200]}") from None


@dataclass(frozen=True, slots=True)
class Turn:
    """A row as a request and its expected answer.

    asked: `prompt`, or `messages`, of a request's body. gold: the output, None where the row has
    none.
    """

    asked: dict[str, Any]
    gold: str | None


def turn_of(entry: dict[str, Any], where: str, field: str, prompt_field: str) -> Turn:
    """A row's prompt or messages, and its output. Raises ConfigError that names `where`."""
    if "messages" in entry:
        messages = entry["messages"]
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
        ):
            raise ConfigError(f"{where}: messages: must be a list of objects with a role")
        gold = entry.get(field)
        if messages and messages[-1]["role"] == "assistant":
            gold, messages = messages[-1].get("content"), messages[:-1]
        if not messages:
            raise ConfigError(f"{where}: messages: nothing is asked")
        asked: dict[str, Any] = {"messages": messages}
    else:
        prompt = entry.get(prompt_field)
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(
                f"{where}: {prompt_field}: must be a string, not empty (there are: "
                f"{', '.join(map(str, entry))[:200]})"
            )
        asked, gold = {"prompt": prompt}, entry.get(field)
    if gold is not None and not isinstance(gold, str):
        raise ConfigError(f"{where}: {field}: must be a string")
    return Turn(asked, gold)


def read_examples(
    data: Path, field: str, prompt_field: str, tokenizer: Any, eos_token_id: int
) -> Iterator[Example]:
    """The examples of a file. `field` holds the output; a row may lack the prompt, which is then
    unknown.

    A line may instead hold `output_ids` (and `prompt_ids`), as recordings do. Raises ConfigError
    with file and line for anything else.
    """
    for number, entry in rows(data):
        yield example_of(entry, f"{data}:{number}", field, prompt_field, tokenizer, eos_token_id)


def example_of(
    entry: dict[str, Any],
    where: str,
    field: str,
    prompt_field: str,
    tokenizer: Any,
    eos_token_id: int,
) -> Example:
    """One line's example; see read_examples. where: file and line, for the ConfigError."""
    if "output_ids" in entry:
        return (
            ids_of(entry.get("prompt_ids", []), where, "prompt_ids"),
            ids_of(entry["output_ids"], where, "output_ids"),
        )
    completion, prompt = entry.get(field), entry.get(prompt_field, "")
    if not isinstance(completion, str):
        raise ConfigError(f"{where}: {field}: must be a string")
    if not isinstance(prompt, str):
        raise ConfigError(f"{where}: {prompt_field}: must be a string")
    return tokenize_in_place(tokenizer, prompt, completion, eos_token_id)


def ids_of(value: object, where: str, key: str) -> list[int]:
    """`value` as token ids. Raises ConfigError that names `where` and `key`."""
    if isinstance(value, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in value):
        return value
    raise ConfigError(f"{where}: {key}: must be a list of token ids")


def open_tokenizer(folder: Path) -> tuple[Any, str, int]:
    """(tokenizer, its fingerprint as engines check it, an EOS id) of a model's folder."""
    tokenizer, table, eos = open_table(folder)
    return tokenizer, table.fingerprint.hex(), eos


def open_table(folder: Path) -> tuple[Any, TokenBytes, int]:
    """(tokenizer, its id -> bytes table, an EOS id) of a model's folder."""
    from tokenizers import Tokenizer

    from server import token_bytes

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    table = token_bytes.build(tokenizer, int(config["vocab_size"]))
    generation = folder / "generation_config.json"
    eos = config.get("eos_token_id")
    if generation.is_file():
        eos = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id", eos)
    if isinstance(eos, list):
        eos = eos[0] if eos else None
    if not isinstance(eos, int):
        raise ConfigError(f"{folder}: the model names no EOS id")
    return tokenizer, table, eos
