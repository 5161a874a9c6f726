"""Reads a task's data: prompts and outputs from files, tokenized as a model would see them.

JSON lines, CSV with a header (commas, semicolons or tabs) and Parquet (with pyarrow), by the file's
ending. A row has a prompt and an output, or `messages` whose last one, the assistant's, is the
output, or ids (`prompt_ids`, `output_ids`, as recordings have). Whoever wrote the file is not
trusted: sizes and depth are bounded, and no output holds a control token.

Outputs are tokenized *in place*, after their prompt, so that the leading space and the merges are
the model's own, and end with EOS. Prompts begin with what the tokenizer puts before every text, as
they do when they are served.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from drafters.json_text import object_in, parsed
from server.errors import ConfigError, ModelError, TailorError, nearest

if TYPE_CHECKING:
    from server.token_bytes import TokenBytes

Example = tuple[list[int], list[int]]
"""Ids of a prompt and of its output."""

Render = Callable[[dict[str, Any]], tuple[str, list[int]]]
"""A chat (`Turn.asked`) as the model's template writes it, and its ids. Raises TailorError."""

MAX_ROW_BYTES = 64 << 20
TABLES = (".csv", ".tsv", ".parquet")
"""Endings of files that are no JSON lines."""

_MAX_WORD = 100_000  # characters: tokenizers take time that grows with a word's square
_LONG_WORD = re.compile(rf"(?<!\S)\S{{{_MAX_WORD + 1}}}")  # looked for where a word begins
_BATCH = 256  # rows that are tokenized together
_SHOWN = 200  # characters of a list of names


# --- rows -----------------------------------------------------------------------------------------


def rows(data: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line or row number from 1, row) of each row of a file. Raises ConfigError that names both.

    CSV counts lines, its header is the first. A member that is null is one that a row lacks: where
    rows differ, tables have all columns in each.
    """
    kinds = {".csv": _csv_rows, ".tsv": _csv_rows, ".parquet": _parquet_rows}
    try:
        for number, row in kinds.get(data.suffix.lower(), json_lines)(data):
            yield number, {key: value for key, value in row.items() if value is not None}
    except OSError as error:
        raise ConfigError(f"{data}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{data}: not UTF-8") from None


def check_file(data: Path) -> None:
    """Raise ConfigError for a folder, and for a pipe, which gives nothing when it is read again."""
    if data.exists() and not data.is_file():
        raise ConfigError(f"{data}: is no file; it is read more than once")


def json_lines(data: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each line of a JSONL file that is not blank. A line that is a
    string is a prompt.

    Raises ConfigError with file and line for what is no JSON object, nested too deeply, too long,
    or no text that can be encoded, and OSError.
    """
    with data.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b""), 1):
            if raw.strip():
                yield number, _object(raw, f"{data}:{number}")


def _object(raw: bytes, where: str) -> dict[str, Any]:
    if len(raw) > MAX_ROW_BYTES:
        raise ConfigError(f"{where}: longer than {MAX_ROW_BYTES >> 20} MB")
    try:
        text = raw.decode("utf-8-sig")
        entry = parsed(text)
        if "\\ud" in text.lower():  # half a character, written as an escape
            json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: not UTF-8") from None
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: holds half a character (a lone surrogate)") from None
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {str(error)[:100]}") from None
    if isinstance(entry, str):
        return {"prompt": entry}
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: a line must be an object")
    return entry


def _csv_rows(data: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(MAX_ROW_BYTES)
    with data.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True, delimiter=_delimiter(file))
        try:
            names = Counter(name for name in reader.fieldnames or () if name.strip())
            if twice := [name for name, num in names.items() if num > 1]:
                raise ConfigError(f"{data}:1: {min(twice)}: is there twice")
            for row in reader:
                if None in row or None in row.values():
                    wanted = len(reader.fieldnames or ())
                    raise ConfigError(f"{data}:{reader.line_num}: must have {wanted} fields")
                yield reader.line_num, dict(row)
        except csv.Error as error:
            raise ConfigError(f"{data}:{reader.line_num + 1}: {error}") from None


def _delimiter(file: TextIO) -> str:
    """What parts the fields of a CSV: its first line into as many as the second has, else into the
    most. A name may hold what parts those of another file."""

    def num_fields(delimiter: str) -> tuple[bool, int]:
        file.seek(0)
        try:
            head = [len(row) for row in islice(csv.reader(file, delimiter=delimiter), 2)]
        except csv.Error:
            return False, 0
        return len(head) == 2 and head[0] == head[1] > 1, max(head[:1], default=0)

    found = max(",;\t", key=num_fields)
    file.seek(0)
    return found


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
    except ArrowException as error:
        raise ConfigError(f"{data}: {str(error)[:200]}") from None


# --- fields ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fields:
    """Where a row has what. field, prompt_field: names of the output's and of the prompt's. joint:
    put between the two where neither has a blank."""

    field: str = "completion"
    prompt_field: str = "prompt"
    joint: str = " "

    def prompt_of(self, row: dict[str, Any], where: str) -> str:
        """A row's prompt, not empty. Raises ConfigError that names the place."""
        return self._text(row, self.prompt_field, "--prompt-field", where)

    def output_of(self, row: dict[str, Any], where: str) -> str:
        """A row's output. Raises ConfigError that names the place."""
        return self._text(row, self.field, "--field", where, may_be_empty=True)

    def _text(
        self, row: dict[str, Any], name: str, option: str, where: str, *, may_be_empty: bool = False
    ) -> str:
        value = row.get(name)
        if isinstance(value, str) and (value or may_be_empty):
            if _LONG_WORD.search(value):
                raise ConfigError(f"{where}: {name}: has a word of more than {_MAX_WORD} letters")
            return value
        if name in row:
            what = "empty" if value == "" else "no text"
            raise ConfigError(f"{where}: {name}: is {what}; it must be a string")
        there = ", ".join(map(str, row))[:_SHOWN]
        near = nearest(name, map(str, row))
        hint = f"did you mean {option} {near}?" if near else f"{option} says where it is"
        raise ConfigError(f"{where}: {name}: is missing (there are: {there}); {hint}")


@dataclass(frozen=True, slots=True)
class Turn:
    """A row as a request and its expected answer.

    asked: `prompt`, or `messages` and `tools`, of a request's body. gold: the output, None where
    the row has none.
    """

    asked: dict[str, Any]
    gold: str | None

    def rendered(self, where: str, render: Render | None) -> tuple[str, list[int]]:
        """Its messages as the model's template writes them, and their ids. Raises ConfigError that
        names `where`: there is no template (None), or it does not take them."""
        if render is None:
            raise ConfigError(f"{where}: messages: the model has no chat template")
        try:
            return render(self.asked)
        except TailorError as error:
            raise ConfigError(f"{where}: {error.message}") from None


def turn_of(row: dict[str, Any], where: str, fields: Fields) -> Turn:
    """A row's prompt or messages, and its output. Raises ConfigError that names `where`."""
    if "messages" not in row:
        asked: dict[str, Any] = {"prompt": fields.prompt_of(row, where)}
        has_output = row.get(fields.field) is not None
        return Turn(asked, fields.output_of(row, where) if has_output else None)
    messages = row["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise ConfigError(f"{where}: messages: must be a list of objects with a role")
    gold, at = row.get(fields.field), fields.field
    if messages and messages[-1]["role"] == "assistant":
        at = f"messages[{len(messages) - 1}].content"
        gold, messages = messages[-1].get("content"), messages[:-1]
    if not messages:
        raise ConfigError(f"{where}: messages: nothing is asked")
    if gold is not None and not isinstance(gold, str):
        raise ConfigError(f"{where}: {at}: must be a string")
    asked = {"messages": messages}
    if row.get("tools"):
        asked["tools"] = row["tools"]
    return Turn(asked, gold)


def answered_turn(row: dict[str, Any], where: str, fields: Fields) -> Turn:
    """A row that has an output, as a Turn. Raises ConfigError that names `where`."""
    turn = turn_of(row, where, fields)
    if turn.gold is None:
        if "messages" in row and fields.field not in row:
            told = "the last one must be the assistant's, with text, or --field names the output"
            raise ConfigError(f"{where}: messages: {told}")
        fields.output_of(row, where)  # says what is there
    return turn


def ids_of(value: object, where: str, key: str, vocab_size: int = 1 << 31) -> list[int]:
    """`value` as token ids, one or more. Raises ConfigError that names `where` and `key`."""
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise ConfigError(f"{where}: {key}: must be a list of token ids")
    if not value:
        raise ConfigError(f"{where}: {key}: is empty")
    most = max(value)
    if most >= vocab_size:
        raise ConfigError(f"{where}: {key}: {most} is not below {vocab_size}, the ids there are")
    return value


# --- examples -------------------------------------------------------------------------------------


def _joined(prompt: str, completion: str, joint: str) -> str:
    blank = not prompt or prompt[-1:].isspace() or completion[:1].isspace()
    return prompt + ("" if blank else joint) + completion


def _cut(alone: Sequence[int], whole: Sequence[int], eos_token_id: int) -> Example:
    """(prompt ids, output ids). Where the two join in one token, it belongs to the output: a model
    given the shorter prompt would emit it."""
    pairs = enumerate(zip(alone, whole, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(alone), len(whole)))
    return list(whole[:shared]), [*whole[shared:], eos_token_id]


class ExampleReader:
    """Examples of data files in the ids of one model.

    tokenizer: a tokenizers.Tokenizer. vocab_size: ids that a row may hold. render: of rows with
    messages; None: they are refused.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_id: int,
        *,
        fields: Fields = Fields(),
        vocab_size: int = 1 << 31,
        render: Render | None = None,
    ) -> None:
        self._tokenizer, self._eos = tokenizer, eos_token_id
        self._fields, self._vocab_size, self._render = fields, vocab_size, render
        opened = tokenizer.encode("a", add_special_tokens=True).ids
        bare = tokenizer.encode("a", add_special_tokens=False).ids
        starts = range(len(opened) - len(bare) + 1)
        at = next((i for i in reversed(starts) if opened[i : i + len(bare)] == bare), 0)
        self._opening: list[int] = opened[:at]
        added = tokenizer.get_added_tokens_decoder()
        self._end = added[eos_token_id].content if eos_token_id in added else ""
        controls = [t.content for t in added.values() if t.special and t.content.strip()]
        self._control = re.compile("|".join(map(re.escape, controls)) or "(?!)")

    def read(self, files: Iterable[Path]) -> Iterator[Example]:
        """The examples of some files. A row may lack the prompt, which is then unknown. Raises
        ConfigError with file and line."""
        waiting: list[tuple[str, dict[str, Any]]] = []
        for file in files:
            for number, row in rows(file):
                waiting.append((f"{file}:{number}", row))
                if len(waiting) >= _BATCH:
                    yield from self._examples(waiting)
                    waiting = []
        yield from self._examples(waiting)

    def of(self, row: dict[str, Any], where: str) -> Example:
        """One row's example. Raises ConfigError that names `where`."""
        return self._examples([(where, row)])[0]

    def _examples(self, some: Sequence[tuple[str, dict[str, Any]]]) -> list[Example]:
        """All texts in one call: tokenizers cuts them on several cores."""
        found = {i: ids for i, (where, row) in enumerate(some) if (ids := self._of_ids(row, where))}
        texts = {i: self._texts(row, at) for i, (at, row) in enumerate(some) if i not in found}
        flat = [text for _, *pair in texts.values() for text in pair]
        encoded = iter(self._tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        for i, (rendered, before, both) in texts.items():
            alone, whole = next(encoded), next(encoded)
            prompt, output = _cut(alone.ids, whole.ids, self._eos)
            if rendered is None:
                rendered = [*(self._opening if alone.ids else ()), *prompt]
            elif len(prompt) < len(alone.ids):
                # The two join in one token, but the template's ids are served as they are: the
                # answer is cut as it is behind an id that joins with nothing.
                text = self._end + both[len(before) :]
                cut = self._tokenizer.encode(text, add_special_tokens=False)
                output = [*cut.ids[bool(self._end) :], self._eos]
            found[i] = rendered, output
        return [found[i] for i in range(len(some))]

    def _of_ids(self, row: dict[str, Any], where: str) -> Example | None:
        """The example of a row of ids; None for others."""
        if row.get("output_ids") is None:
            return None
        size, given = self._vocab_size, row.get("prompt_ids") or []  # it may be unknown
        prompt = ids_of(given, where, "prompt_ids", size) if given else []
        return prompt, ids_of(row["output_ids"], where, "output_ids", size)

    def _texts(self, row: dict[str, Any], where: str) -> tuple[list[int] | None, str, str]:
        """(ids of a row's prompt, if a template wrote it, the prompt, prompt and output). Such ids
        know a client's text from control tokens; of the texts only what stands behind counts."""
        fields = self._fields
        if "messages" not in row:
            named = fields.prompt_field
            # A typing error in a name that was given would lose all prompts.
            is_wrong = named not in row and named != Fields().prompt_field
            has_prompt = is_wrong or row.get(named) not in (None, "")
            prompt = fields.prompt_of(row, where) if has_prompt else ""
            output = self._output(fields.output_of(row, where), where)
            return None, prompt, _joined(prompt, output, fields.joint)
        turn = answered_turn(row, where, fields)
        text, ids = turn.rendered(where, self._render)
        return ids, text, text + self._output(turn.gold or "", where)

    def _output(self, text: str, where: str) -> str:
        """An output without the EOS that may end it. One with a control token would teach the
        model to write it, whoever wrote the row."""
        if self._end and text.rstrip().endswith(self._end):
            text = text.rstrip().removesuffix(self._end)
        control = self._control.search(text)
        if control is not None:
            raise ConfigError(
                f"{where}: {self._fields.field}: holds {control[0]!r}, a control token of the "
                "model; an output ends by itself and may have none"
            )
        return text


# --- a model's tokenizer --------------------------------------------------------------------------


def open_table(folder: Path) -> tuple[Any, TokenBytes, int]:
    """(tokenizer, its id -> bytes table, an EOS id) of a model's folder. Raises ModelError for a
    damaged file, ConfigError without an EOS id, and OSError."""
    from tokenizers import Tokenizer

    from server import token_bytes
    from server.model.families import text_values

    config_file, tokenizer_file = folder / "config.json", folder / "tokenizer.json"
    try:
        config = parsed(config_file.read_text(encoding="utf-8"))
        text = text_values(config)
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{config_file}: {type(error).__name__}: {str(error)[:200]}") from None
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{tokenizer_file}: {str(error)[:200]}") from None
    # Of the tokenizer as its file has it: the server's table has this fingerprint.
    table = token_bytes.build(tokenizer, text.get("vocab_size"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    eos = text.get("eos_token_id", config.get("eos_token_id"))
    eos = object_in(folder / "generation_config.json").get("eos_token_id", eos)
    if isinstance(eos, list):
        eos = eos[0] if eos else None
    if not isinstance(eos, int):
        raise ConfigError(f"{folder}: the model names no EOS id")
    return tokenizer, table, eos
