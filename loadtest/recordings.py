"""Recordings for replays: task data sets tokenized in place after their prompts.

A data set is a folder with train.jsonl and test.jsonl, each line {"prompt": ..., "completion":
...}. The completion is tokenized *after its prompt* (with a blank between them where neither
brings one), so that leading blanks and merges are those a model would emit, and ends with EOS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafters.replay import Recording
from server.datasets import tokenize_in_place

EOS = "<|im_end|>"  # what SmolLM2-Instruct ends with


def load_tokenizer(path: Path | None) -> Any:
    """A `tokenizers.Tokenizer`: of `path`, or of the default model in Tailor's cache.

    Raises FileNotFoundError that says how to get it.
    """
    from platformdirs import user_cache_dir
    from tokenizers import Tokenizer

    if path is None:
        cache = os.environ.get("TAILOR_CACHE_DIR") or user_cache_dir("tailor")
        found = sorted(Path(cache).glob("models/smollm2-135m-instruct-v*/tokenizer.json"))
        path = found[-1] if found else Path(cache) / "models/smollm2-135m-instruct"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: start the server once (make serve), which fetches the default"
            " model, or name a tokenizer.json with --tokenizer"
        )
    return Tokenizer.from_file(str(path))


def data_sets(folder: Path) -> list[str]:
    """Names of the data sets in `folder` that have a train and a test part."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing: name the data sets' folder with --data")
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if (entry / "train.jsonl").is_file() and (entry / "test.jsonl").is_file()
    )


def read_split(tokenizer: Any, folder: Path, name: str, split: str, limit: int) -> list[Recording]:
    """The first `limit` examples of a split."""

    def lines() -> Iterator[dict[str, str]]:
        with (folder / name / f"{split}.jsonl").open() as source:
            for number, line in enumerate(source):
                if number >= limit:
                    return
                yield json.loads(line)

    eos = int(tokenizer.token_to_id(EOS))
    return [
        Recording(*tokenize_in_place(tokenizer, entry["prompt"], entry["completion"], eos))
        for entry in lines()
    ]
