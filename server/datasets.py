"""`tailor corpus build` and `tailor corpus show`: a task's corpus from its training data.

Completions are tokenized *in place*, behind their prompt, so that the leading space and the merges
are the model's own, and end with EOS. The file names the tokenizer it was made with, and an engine
refuses it for another.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from server.errors import ConfigError

__all__ = [
    "build",
    "example_of",
    "ids_of",
    "json_lines",
    "open_tokenizer",
    "read_examples",
    "show",
    "tokenize_in_place",
]

Progress = Callable[[str, float], None]
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


def build(
    folder: Path,
    data: list[Path],
    output: Path,
    *,
    field: str = "completion",
    prompt_field: str = "prompt",
    n_max: int = 5,
    p_min: int = 5,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build a corpus and write it atomically to `output`; returns its figures.

    folder: the model's. Raises ConfigError for data that cannot be read and for no data at all.
    """
    from drafters.corpus import build_corpus

    tokenizer, fingerprint, eos_token_id = open_tokenizer(folder)
    # One by one: as Python's lists a large corpus would take ten times the memory of its arrays.
    examples = itertools.chain.from_iterable(
        read_examples(path, field, prompt_field, tokenizer, eos_token_id) for path in data
    )
    first = next(examples, None)
    if first is None:
        raise ConfigError(f"{', '.join(map(str, data))}: no examples")
    examples = itertools.chain([first], examples)
    try:
        corpus = build_corpus(
            examples, fingerprint=fingerprint, n_max=n_max, p_min=p_min, progress=progress
        )
        corpus.save(output)
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return {
        "file": str(output),
        "bytes": output.stat().st_size,
        "documents": corpus.num_documents,
        "tokens": corpus.num_tokens,
    }


def show(file: Path, folder: Path | None, num_top: int = 10) -> list[str]:
    """What a corpus holds, as lines for people; n-grams as text when the model's folder is given.

    Raises ConfigError for a file that is no corpus, or another tokenizer's.
    """
    from drafters.corpus import ArrayFileError, Corpus, FingerprintError

    tokenizer, fingerprint = None, None
    if folder is not None:
        tokenizer, fingerprint, _ = open_tokenizer(folder)
    try:
        corpus = Corpus.load(file, fingerprint=fingerprint)
    except (FingerprintError, ArrayFileError) as error:
        raise ConfigError(f"{file}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    entropy, k80 = corpus.bigram_measures()
    lines = [
        f"file        {file}, {file.stat().st_size / 1e6:.1f} MB",
        f"tokenizer   {corpus.fingerprint[:16]}",
        f"outputs     {corpus.num_documents:,}, {corpus.num_tokens:,} tokens",
        f"bigrams     entropy {entropy:.2f} bits, K80 {k80:,} (TASC, table 1; of tokens)",
    ]
    for n in range(1, 6):
        grams, counts = corpus.count_grams(n)
        lines.append(f"{n}-grams     {counts.shape[0]:,} distinct")
        if n in (2, 5):
            for gram, count in zip(grams[:num_top].tolist(), counts[:num_top], strict=True):
                text = (
                    " ".join(map(str, gram))
                    if tokenizer is None
                    else repr(tokenizer.decode(gram, skip_special_tokens=False))
                )
                lines.append(f"  {count:8,}  {text}")
    return lines
