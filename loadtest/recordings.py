"""Recordings for replays: task data sets tokenized in place after their prompts.

A data set is a folder with train.jsonl and test.jsonl, each line {"prompt": ..., "completion":
...}. The completion is tokenized *after its prompt* (with a blank between them where neither
brings one), so that leading blanks and merges are those a model would emit, and ends with EOS.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter

from drafters.auto.copying import Pieces
from drafters.replay import Recording, read_recordings
from loadtest.options import listed
from loadtest.prompts import data_sets, read_examples
from server.commands.options import DEFAULT_MODEL, as_options
from server.datasets import ExampleReader, open_table
from server.token_bytes import TokenBytes
from vocab_store.profile import model_facts
from vocab_store.slice import RequiredIds


class Ids(NamedTuple):
    """A model's `tokenizers.Tokenizer`, its EOS id, and the bytes of its ids. required: ids that no
    slice of its vocabulary is without."""

    tokenizer: Any
    eos: int
    table: TokenBytes
    required: RequiredIds

    @property
    def pieces(self) -> Pieces:
        """The bytes, as `auto` takes them."""
        return Pieces(self.table.offsets, self.table.blob)

    @property
    def ends(self) -> dict[str, Any]:
        """What a drafter that never drafts an EOS takes."""
        return {"eos_token_ids": (self.eos,)}

    @property
    def own(self) -> dict[str, Any]:
        """What `auto` takes."""
        return self.ends | {"pieces": self.pieces}


def open_ids(model: str) -> Ids:
    """Of a model of the user's cache, or a folder. Raises ValueError that says how to get it."""
    from server.model.catalog import cached_folder

    folder = cached_folder(model, "file") or cached_folder(model)
    if folder is None:
        raise ValueError(f"{model} is not in the cache: tailor models fetch {model}")
    tokenizer, table, eos = open_table(folder)
    required = RequiredIds.from_tokens(table, model_facts(folder)[1])
    return Ids(tokenizer, eos, table, required)


@as_options
class SetOptions:
    """Which answers are replayed: the data's, or a model's own."""

    data: Annotated[Path | None, Parameter(help="folder of task data sets")] = None
    recorded: Annotated[
        Path | None, Parameter(help="folder of a model's own answers, SET/test.jsonl, instead")
    ] = None
    model: Annotated[str, Parameter(help="whose tokenizer")] = DEFAULT_MODEL
    sets: Annotated[str, Parameter(help="data sets, with commas (all)")] = ""
    examples: Annotated[int, Parameter(help="test examples a set")] = 100
    corpus_examples: Annotated[int, Parameter(help="train examples of a corpus")] = 2000

    def names(self) -> list[str]:
        """The sets. Raises ValueError where there is none."""
        if self.data is None and self.recorded is None:
            raise ValueError("name the answers with --data or --recorded")
        if self.recorded is not None:
            found = sorted(path.parent.name for path in self.recorded.glob("*/test.jsonl"))
        else:
            assert self.data is not None
            found = data_sets(self.data)
        wanted = listed(self.sets) or found
        if unknown := set(wanted) - set(found):
            raise ValueError(f"no data set {sorted(unknown)[0]!r}; there are {', '.join(found)}")
        return wanted

    def read(self, ids: Ids, name: str, split: str, num: int) -> list[Recording]:
        """The first `num` recordings of a split; none where a model's own are not there."""
        if self.recorded is not None:
            path = self.recorded / name / f"{split}.jsonl"
            return list(itertools.islice(read_recordings(path), num)) if path.is_file() else []
        assert self.data is not None
        reader = ExampleReader(ids.tokenizer, ids.eos)
        return [
            Recording(*reader.of({"prompt": one.prompt, "completion": one.completion}, name))
            for one in itertools.islice(read_examples(self.data, name, split), num)
        ]
