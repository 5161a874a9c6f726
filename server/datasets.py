"""Data of a task: JSON lines of prompts and outputs, tokenized as a model would see them.

Completions are tokenized *in place*, behind their prompt, so that the leading space and the merges
are the model's own, and end with EOS.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from server.errors import ConfigError

__all__ = [
    "example_of",
    "ids_of",
    "json_lines",
    "open_tokenizer",
    "read_examples",
    "tokenize_in_place",
]

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


def read_examples(
    data: Path, field: str, prompt_field: str, tokenizer: Any, eos_token_id: int
) -> Iterator[Example]:
    """The examples of a JSONL file. `field` holds the output; a missing prompt is "not known".

    A line may instead hold `output_ids` (and `prompt_ids`), as recordings do. Raises ConfigError
    with file and line for anything else.
    """
    for number, entry in json_lines(data):
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
    from tokenizers import Tokenizer

    from server import token_bytes

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    fingerprint = token_bytes.build(tokenizer, int(config["vocab_size"])).fingerprint.hex()
    generation = folder / "generation_config.json"
    eos = config.get("eos_token_id")
    if generation.is_file():
        eos = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id", eos)
    if isinstance(eos, list):
        eos = eos[0] if eos else None
    if not isinstance(eos, int):
        raise ConfigError(f"{folder}: the model names no EOS id")
    return tokenizer, fingerprint, eos
