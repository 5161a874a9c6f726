"""`tailor corpus`: builds a task's corpus from its data, shows one, makes a model's bigrams."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from server.commands.data import DataFiles, FieldOptions, open_text
from server.commands.options import (
    Bar,
    IdOptions,
    ModelOptions,
    OutputFile,
    bounded,
    refused,
    writing,
)
from server.commands.own_engine import own_engine
from server.commands.record import Failure, Prompt, ask_engine
from server.errors import ConfigError
from server.types import SamplingParams
from server.wiring.drafter import model_fingerprint

if TYPE_CHECKING:
    from drafters.corpus import Corpus
    from drafters.published.grammys import BigramTable
    from server.engine.engine import Engine

_FIELDS, _MODEL, _IDS = FieldOptions(), ModelOptions(), IdOptions()


def build(
    *,
    data: DataFiles,
    output: OutputFile,
    ids: IdOptions = _IDS,
    fields: FieldOptions = _FIELDS,
    n_max: Annotated[int, bounded("longest n-gram (5)", gte=1, lte=16)] = 5,
    p_min: Annotated[int, bounded("n-grams seen less often are dropped (5)", gte=1)] = 5,
) -> int:
    with Bar() as bar:
        corpus = corpus_of(
            ids.model,
            list(data),
            adapter=ids.adapter,
            fields=fields,
            n_max=n_max,
            p_min=p_min,
            progress=lambda what, share: bar(what, round(100 * share), 100),
        )
    with writing(output):
        corpus.save(output)
    figures = {
        "file": str(output),
        "bytes": output.stat().st_size,
        "documents": corpus.num_documents,
        "tokens": corpus.num_tokens,
    }
    print(json.dumps(figures))
    return 0


def show(
    file: Annotated[Path, Parameter(help="the corpus")],
    /,
    *,
    model: Annotated[str | None, Parameter(help="show n-grams as this model's text")] = None,
    top: Annotated[int, bounded("commonest n-grams (10)", gte=0)] = 10,
) -> int:
    from drafters.corpus import Corpus
    from vocab_store.entropy import measure

    tokenizer, fingerprint = None, None
    if model is not None:
        opened = open_text(model, _FIELDS)
        tokenizer, fingerprint = opened.tokenizer, opened.fingerprint
    with refused(), writing(file):
        corpus = Corpus.load(file, fingerprint=fingerprint)
    pairs = measure(corpus.count_grams(2)[1].tolist())
    print(f"file        {file}, {file.stat().st_size / 1e6:.1f} MB")
    print(f"tokenizer   {corpus.fingerprint[:16]}")
    print(f"outputs     {corpus.num_documents:,}, {corpus.num_tokens:,} tokens")
    print(
        f"bigrams     entropy {pairs.bits:.2f} bits, K80 {pairs.k80:,} (TASC, table 1; of tokens)"
    )
    for n in range(1, 6):
        grams, counts = corpus.count_grams(n)
        print(f"{n}-grams     {counts.shape[0]:,} distinct")
        if n in (2, 5):
            for gram, count in zip(grams[:top].tolist(), counts[:top], strict=True):
                text = " ".join(map(str, gram))
                if tokenizer is not None:
                    text = repr(tokenizer.decode(gram, skip_special_tokens=False))
                print(f"  {count:8,}  {text}")
    return 0


def bigrams(
    *,
    output: OutputFile,
    k: Annotated[
        int, bounded("next tokens kept for each token (10)", name="-k", gte=1, lte=20)
    ] = 10,
    model: ModelOptions = _MODEL,
) -> int:
    with Bar() as bar, own_engine(model, bar, ()) as (served, engine):
        before: list[int] = served.tokenizer.encode("", add_special_tokens=True).ids
        table = take_bigrams(
            engine,
            k,
            bos_token_id=before[0] if before else None,
            progress=partial(bar, "bigrams"),
        )
        with writing(output):
            table.save(output)
    num, kept = table.next_ids.shape
    print(json.dumps({"file": str(output), "tokens": num, "next": kept}))
    return 0


def take_bigrams(
    engine: Engine,
    num_next: int = 10,
    *,
    bos_token_id: int | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> BigramTable:
    """The bigrams of an idle engine's model, for the drafter `grammys` (N-Grammys, arXiv
    2411.03786): the model is run on every id alone, behind its BOS where it has one, and the most
    probable next ids are kept with their probabilities. This needs no data, and takes as long as
    prefilling the whole vocabulary.

    num_next: ids kept for each, 1 to 20. progress: (done, all). Raises RuntimeError when the model
    cannot be run on some id.
    """
    import numpy as np

    from drafters.published.grammys import BigramTable

    info = engine.info
    num, num_next = info.vocab_size, min(num_next, info.vocab_size)
    next_ids, chances = np.zeros((num, num_next), np.int32), np.zeros((num, num_next), np.float32)
    before = () if bos_token_id is None else (bos_token_id,)
    answers = ask_engine(
        engine, None, (Prompt(i, None, (*before, i)) for i in range(num)),
        SamplingParams(temperature=0.0, max_tokens=1), num_open=engine.settings.max_num_seqs,
        num_likely=lambda _: num_next, task="bigrams",
    )  # fmt: skip
    for done, answer in enumerate(answers, 1):
        if isinstance(answer, Failure):
            raise RuntimeError(f"the model cannot be run: {answer.message}")
        token, top = answer.prompt.line, answer.likely[0].top[:num_next]
        next_ids[token, : len(top)] = [i for i, _ in top]
        chances[token, : len(top)] = [math.exp(value) for _, value in top]
        progress(done, num)
    return BigramTable(model_fingerprint(info.fingerprint), next_ids, chances)


# --- files ----------------------------------------------------------------------------------------


def corpus_of(
    model: str,
    data: list[Path],
    *,
    adapter: str | None = None,
    fields: FieldOptions = _FIELDS,
    n_max: int = 5,
    p_min: int = 5,
    progress: Callable[[str, float], None] | None = None,
) -> Corpus:
    """The corpus of these files.

    adapter: prompts and outputs are written in its tokens, where it has some.
    Raises ConfigError for data that cannot be read and for no data at all, and ModelError.
    """
    from drafters.auto.copying import Pieces
    from drafters.auto.held_out import build_calibrated

    text = open_text(model, fields, adapter=adapter)
    spelled: Callable[[list[int]], list[int]] = list if text.own is None else text.own.segment
    with refused():
        corpus = build_calibrated(
            # One by one: as Python's lists a large corpus would take ten times its arrays' memory.
            ((spelled(prompt), spelled(ids)) for prompt, ids in text.reader.read(data)),
            fingerprint=text.fingerprint,
            n_max=n_max,
            p_min=p_min,
            progress=progress,
            # An adapter may write other ids.
            pieces=None if adapter else Pieces(text.table.offsets, text.table.blob),
        )
    if not corpus.num_documents:
        raise ConfigError(f"{', '.join(map(str, data))}: no examples")
    return corpus
