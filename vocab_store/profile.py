"""Task profiles: the static set T of VocabTailor's Algorithm 1, its report and its file.

Algorithm 1 (arXiv 2508.15229), on M (input, output) documents, three filters, each switchable:
  1. input-aware: df(v) = documents whose output holds v while their own input does not;
  2. language: keep v whose characters lie in the Unicode blocks of the task's languages;
  3. tolerance: in ascending df, drop while the dropped sum is at most tau * M.
The required ids (EOS, specials, byte tokens) are added at the end, whatever the filters say.

Beyond the paper a profile carries a *fill order*: tokens outside T by how often they occur in the
corpus, inputs included, then by id (a BPE's early merges are its frequent ones). `exact` takes a
prefix of it by the cost model; `slice` never does.

Two baselines of the paper's tables: T alone ("static only": dynamic=False in `measure_coverage`),
and the required ids alone ("dynamic only").

File: magic | uint32 version | uint32 manifest bytes | manifest (JSON) | zeros to a multiple of 64 |
int32 ids [n] | int32 fill_ids [f] | float32 fill_gains [f]; little-endian, memory-mapped.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from drafters.atomic_file import EVERYBODY, replacing
from drafters.json_text import object_in, parsed
from vocab_store.errors import VocabStoreError
from vocab_store.slice import Float32, Int32, Int64, RequiredIds, TokenTexts, VocabSlice
from vocab_store.unicode_blocks import blocks_of_languages

VERSION = 1
_MAGIC = b"TLRVOCB1"
_PREFIX = struct.Struct("<8sII")
_ALIGN = 64

Progress = Callable[[str, int, int | None], None]
"""(stage, done, total or None), called now and then."""

_NUM_WORST = 10  # missed ids that a report names
_MAX_FILL = 32_768  # the longest fill order that is kept
TICK = 256
"""Documents between two calls of a Progress."""


class Example(NamedTuple):
    """One document: the ids of its prompt and of its output. int32, flat."""

    input_ids: Int32
    output_ids: Int32


Document = tuple[npt.ArrayLike, npt.ArrayLike]
"""(ids of its prompt, of its output); an Example is one."""


def _examples(documents: Iterable[Document]) -> list[Example]:
    return [Example(np.asarray(p, np.int32), np.asarray(o, np.int32)) for p, o in documents]


def corpus_hash(examples: Iterable[Example]) -> str:
    """sha256 over the documents' lengths and ids, in order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(struct.pack("<II", len(example.input_ids), len(example.output_ids)))
        digest.update(np.ascontiguousarray(example.input_ids, "<i4").tobytes())
        digest.update(np.ascontiguousarray(example.output_ids, "<i4").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """Which filters run.

    input_aware: count only output tokens that their own input lacks; else every output token.
    languages: BCP 47 tags of the language filter; empty = no language filter. extra_blocks: see
    blocks_of_languages.
    tolerance: tau, the share of documents (0..1) that may lose a token; 0.0 = no tolerance filter,
    as every counted df is at least 1.
    """

    input_aware: bool = True
    languages: tuple[str, ...] = ()
    extra_blocks: tuple[str, ...] = ()
    tolerance: float = 0.01


@dataclass(frozen=True, slots=True)
class Coverage:
    """How well a slice covers documents it was not made from. Counts are additive.

    num_tokens, num_missed: output tokens, and those neither in the slice nor in the own input.
    num_documents, num_documents_missed: the same by document. mean_dynamic: prompt ids outside
    the slice, per document (the [mean dynamic] of the paper's tables). missed: (id, times), most
    frequent first, then by id.
    """

    num_tokens: int
    num_missed: int
    num_documents: int
    num_documents_missed: int
    mean_dynamic: float
    missed: tuple[tuple[int, int], ...] = ()

    @property
    def miss_rate(self) -> float:
        return self.num_missed / self.num_tokens if self.num_tokens else 0.0

    @property
    def recall(self) -> float:
        """Token-level recall."""
        return 1.0 - self.miss_rate

    @property
    def document_miss_rate(self) -> float:
        return self.num_documents_missed / self.num_documents if self.num_documents else 0.0


# -- Algorithm 1 -------------------------------------------------------------------------------


def document_frequencies(
    examples: Sequence[Example],
    vocab_size: int,
    *,
    input_aware: bool = True,
    progress: Progress | None = None,
) -> Int64:
    """df [V]: documents whose output holds v (and, input-aware, whose own input does not)."""
    df = np.zeros(vocab_size, np.int64)
    for done, example in enumerate(examples, 1):
        ids = np.unique(example.output_ids)
        if input_aware:
            ids = np.setdiff1d(ids, example.input_ids)
        df[ids] += 1
        if progress is not None and (done % TICK == 0 or done == len(examples)):
            progress("count", done, len(examples))
    return df


def tolerance_filter(ids: Int64, df: Int64, tolerance: float, num_documents: int) -> Int64:
    """Ids left when the rarest are dropped while their summed df is at most tau * M; ascending.

    Among equal df the higher id goes first: a BPE's later merges are its rarer ones.
    """
    order = ids[np.lexsort((-ids, df[ids]))]
    dropped = np.cumsum(df[order]) <= tolerance * num_documents
    # cumsum is ascending, so the dropped ones are a prefix of the order.
    return np.sort(order[~dropped])


def measure_coverage(
    slice_: VocabSlice, examples: Sequence[Example], *, dynamic: bool = True
) -> Coverage:
    """Token by token: is each output token in the slice or (dynamic) in its own prompt?"""
    inside = np.zeros(slice_.vocab_size, bool)
    inside[slice_.ids] = True
    missed: Counter[int] = Counter()
    num_tokens = num_missed = num_documents_missed = num_dynamic = 0
    for example in examples:
        prompt = np.unique(example.input_ids)
        num_dynamic += int(np.count_nonzero(~inside[prompt]))
        out = example.output_ids[~inside[example.output_ids]]
        if dynamic:
            out = out[~np.isin(out, prompt)]
        missed.update(out.tolist())
        num_tokens += len(example.output_ids)
        num_missed += len(out)
        num_documents_missed += bool(len(out))
    count = len(examples)
    return Coverage(
        num_tokens,
        num_missed,
        count,
        num_documents_missed,
        num_dynamic / count if count else 0.0,
        tuple(sorted(missed.items(), key=lambda item: (-item[1], item[0]))),
    )


def fill_order(examples: Sequence[Example], static: VocabSlice) -> Int32:
    """Ids outside T by occurrences in the corpus, inputs and outputs, then by id; int32 [f]."""
    written = np.concatenate([ids for example in examples for ids in example])
    counts = np.bincount(written, minlength=static.vocab_size)
    counts[static.ids] = -1
    order = np.lexsort((np.arange(static.vocab_size), -counts))
    return order[: min(_MAX_FILL, static.vocab_size - static.num_ids)].astype(np.int32)


def fill_gains(fill_ids: Int32, coverage: Coverage) -> Float32:
    """By how much each id of the fill order lowers the held-out miss rate; float32 [f].

    Which rare token is missed next is random, so the held-out misses are spread evenly over ranks
    [2^k - 1, 2^(k+1) - 1): sums over these are as measured, single gains are estimates.
    """
    missed = dict(coverage.missed)
    times = np.array([missed.get(token_id, 0) for token_id in fill_ids.tolist()], np.float64)
    gains = times / max(1, coverage.num_tokens)
    start = 0
    while start < gains.shape[0]:
        end = min(2 * start + 1, gains.shape[0])
        gains[start:end] = gains[start:end].mean()
        start = end
    return gains.astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class VocabProfile:
    """T of a task, with what is needed to trust and to extend it.

    slice: T with the required ids. fill_ids, fill_gains: int32, float32 [f], see `fill_order`.
    manifest: tokenizer fingerprint (hex), corpus hash, settings, versions, report; JSON values.
    version: names exactly these ids of this tokenizer: the key a request pins (16 hex digits).
    """

    slice: VocabSlice
    fill_ids: Int32
    fill_gains: Float32
    manifest: dict[str, Any] = field(default_factory=dict)
    version: str = field(init=False)

    def __post_init__(self) -> None:
        fingerprint = str(self.manifest.get("fingerprint")).encode()
        digest = hashlib.sha256(fingerprint + self._payload()).hexdigest()
        object.__setattr__(self, "version", digest[:16])

    def _payload(self) -> bytes:
        arrays = (self.slice.ids, "<i4"), (self.fill_ids, "<i4"), (self.fill_gains, "<f4")
        return b"".join(np.ascontiguousarray(*array).tobytes() for array in arrays)

    @property
    def miss_rate(self) -> float | None:
        """Expected misses per token, from the held-out documents; None without them."""
        held = self.manifest.get("report", {}).get("heldout")
        if not held or not held["num_tokens"]:
            return None
        return float(held["num_missed"] / held["num_tokens"])

    def filled(self, num_fill: int) -> VocabSlice:
        """T with the first ids of the fill order (`exact` only)."""
        return self.slice.union(self.fill_ids[:num_fill])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically: a reader sees the old one or the whole new one."""
        payload = self._payload()
        manifest = {
            **self.manifest,
            "vocab_size": self.slice.vocab_size,
            "num_ids": self.slice.num_ids,
            "num_fill": int(self.fill_ids.shape[0]),
            "payload_sha256": hashlib.sha256(payload).hexdigest(),
        }
        text = json.dumps(manifest, sort_keys=True).encode()
        head = _PREFIX.pack(_MAGIC, VERSION, len(text)) + text
        head += b"\0" * (-len(head) % _ALIGN)
        with replacing(path, EVERYBODY) as out:
            out.write(head + payload)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        fingerprint: bytes | None = None,
        required: RequiredIds | None = None,
    ) -> VocabProfile:
        """Map a profile file.

        fingerprint: of the tokenizer it will be used with (TokenTexts.fingerprint, built with the
        same vocabulary size). required: the model's, checked to be inside.

        Raises VocabStoreError naming the file when it is damaged, of another version or of
        another tokenizer, and when required ids are absent; OSError.
        """
        data = np.asarray(np.memmap(path, np.uint8, "r") if os.path.getsize(path) else [], np.uint8)
        head = data[: _PREFIX.size].tobytes()
        if len(head) < _PREFIX.size or not head.startswith(_MAGIC):
            raise VocabStoreError(f"{path}: not a vocabulary profile")
        _, version, length = _PREFIX.unpack(head)
        if version != VERSION:
            raise VocabStoreError(f"{path}: version {version}, this program reads {VERSION}")
        try:
            manifest = parsed(data[_PREFIX.size : _PREFIX.size + length].tobytes())
            num_ids, num_fill = int(manifest["num_ids"]), int(manifest["num_fill"])
            vocab_size = int(manifest["vocab_size"])
            digest = str(manifest["payload_sha256"])
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise VocabStoreError(f"{path}: the manifest is damaged") from error
        start = -(-(_PREFIX.size + length) // _ALIGN) * _ALIGN
        payload = data[start:]
        if (
            min(num_ids, num_fill) < 0
            or payload.shape[0] != 4 * num_ids + 8 * num_fill
            or hashlib.sha256(payload.tobytes()).hexdigest() != digest
        ):
            raise VocabStoreError(f"{path}: the ids are damaged or cut short")
        if fingerprint is not None and manifest.get("fingerprint") != fingerprint.hex():
            raise VocabStoreError(
                f"{path}: made for another tokenizer (fingerprint "
                f"{str(manifest.get('fingerprint'))[:12]}, the model's is {fingerprint.hex()[:12]})"
            )
        ids: Int32 = payload[: 4 * num_ids].view("<i4")
        if num_ids and (ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) <= 0).any()):
            raise VocabStoreError(f"{path}: the ids are not ascending within the vocabulary")
        middle = 4 * (num_ids + num_fill)
        fill: Int32 = payload[4 * num_ids : middle].view("<i4")
        gains = payload[middle:].view("<f4")
        if num_fill and (
            fill.min() < 0 or fill.max() >= vocab_size or not np.isfinite(gains).all()
        ):
            raise VocabStoreError(f"{path}: what fills it up is not within the vocabulary")
        if required is not None:
            if required.vocab_size != vocab_size:
                raise VocabStoreError(
                    f"{path}: for {vocab_size} tokens, the model has {required.vocab_size}"
                )
            required.check(ids)
        profile = cls(VocabSlice(ids, vocab_size), fill, gains, manifest)
        try:
            float(profile.miss_rate or 0.0)
        except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise VocabStoreError(f"{path}: the manifest is damaged") from error
        return profile


def build_profile(
    documents: Sequence[Document],
    tokens: TokenTexts,
    required: RequiredIds,
    settings: ProfileSettings,
    *,
    heldout: Sequence[Document] = (),
    head_row_bytes: int | None = None,
    progress: Progress | None = None,
) -> VocabProfile:
    """Algorithm 1 on `documents`, reported on `heldout`.

    head_row_bytes: bytes of one row of the LM head (width times bytes per value).

    Raises VocabStoreError without documents and for an unknown language.
    """
    if not documents:
        raise VocabStoreError("a profile needs at least one document")
    examples, judged = _examples(documents), _examples(heldout)
    num = required.vocab_size
    df = document_frequencies(examples, num, input_aware=settings.input_aware, progress=progress)
    ids = np.flatnonzero(df)
    num_input_aware = len(ids)
    tables = ("fonttools", "langcodes") if settings.languages else ()  # of languages' blocks
    if settings.languages:
        blocks = blocks_of_languages(settings.languages, extra_blocks=settings.extra_blocks)
        ids = np.asarray([i for i in ids if blocks.has_token(tokens.bytes_of(int(i)))], np.int64)
    num_language = len(ids)
    ids = tolerance_filter(ids, df, settings.tolerance, len(examples))
    static = VocabSlice.make(np.union1d(ids, required.ids), required)

    coverage = measure_coverage(static, judged) if judged else None
    fill = fill_order(examples, static)
    gains = fill_gains(fill, coverage) if coverage else np.zeros(fill.shape[0], np.float32)
    worst = () if coverage is None else coverage.missed[:_NUM_WORST]
    report = {
        "num_documents": len(examples),
        "num_unfiltered": len(np.unique(np.concatenate([one.output_ids for one in examples]))),
        "num_input_aware": num_input_aware,
        "num_language": num_language,
        "num_tolerance": len(ids),
        "num_ids": static.num_ids,
        "vocab_size": num,
        "heldout": None if coverage is None else asdict(coverage),
        "head_bytes_saved": head_row_bytes and (num - static.num_ids) * head_row_bytes,
        "worst_missed": [(i, tokens.bytes_of(i).decode("utf-8", "replace"), n) for i, n in worst],
    }
    manifest = {
        "fingerprint": tokens.fingerprint.hex(),
        "corpus_sha256": corpus_hash(examples),
        "settings": asdict(settings),
        "versions": {"profile": VERSION} | {name: version(name) for name in ("numpy", *tables)},
        "report": report,
    }
    # Through JSON once, so that a profile in memory and one from a file are equal.
    return VocabProfile(static, fill, gains, json.loads(json.dumps(manifest)))


def report_text(manifest: Mapping[str, Any]) -> str:
    """What building a profile found, for a terminal. Raises VocabStoreError for a manifest that
    does not say.

    Of its "report": num_unfiltered: unique output ids. num_input_aware, num_language,
    num_tolerance: left after each filter in turn (equal to the one before where a filter is off).
    num_ids: T with the required ids. heldout: a Coverage, None without held-out documents.
    head_bytes_saved: per head read, None when the width is unknown. worst_missed: (id, text, times)
    on the held-out documents.
    """
    try:
        report = manifest["report"]
        share = 100.0 * report["num_ids"] / report["vocab_size"]
        lines = [
            f"documents          {report['num_documents']}",
            f"output ids         {report['num_unfiltered']}",
            f"+ input-aware      {report['num_input_aware']}",
            f"+ language         {report['num_language']}",
            f"+ tolerance        {report['num_tolerance']}",
            f"T with required    {report['num_ids']} of {report['vocab_size']} ({share:.2f} %)",
        ]
        if (saved := report["head_bytes_saved"]) is not None:
            lines.append(f"head bytes saved   {saved / 1e6:.1f} MB per token")
        if report["heldout"] is None:
            return "\n".join([*lines, "held-out           none"])
        held = Coverage(**report["heldout"])
        lines += [
            f"held-out documents {held.num_documents} ({held.num_tokens} output tokens)",
            f"mean dynamic       {held.mean_dynamic:.1f} prompt ids outside T",
            f"coverage           {100 * held.recall:.2f} % of tokens",
            f"miss rate          {100 * held.miss_rate:.2f} % of tokens, "
            f"{100 * held.document_miss_rate:.1f} % of documents",
        ]
        missed = report["worst_missed"]
        return "\n".join(
            [*lines, *(f"missed             {n:5d} x {t!r} ({i})" for i, t, n in missed)]
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise VocabStoreError("the manifest holds no report") from error


def eos_ids(values: Iterable[Any], vocab_size: int) -> tuple[int, ...]:
    """Every id that ends a text, ascending: of each "eos_token_id" (an id, several or None)."""
    ids = (i for value in values for i in (value if isinstance(value, list | tuple) else (value,)))
    return tuple(sorted({i for i in ids if type(i) is int and 0 <= i < vocab_size}))


def model_facts(folder: str | Path) -> tuple[int, tuple[int, ...]]:
    """(hidden size, EOS ids of the config and the generation config together).

    Raises VocabStoreError when the folder's JSON files lack one.
    """
    root = Path(folder)
    config = object_in(root / "config.json")
    text = config.get("text_config") or config  # of a multimodal model, which may say no size
    generation = object_in(root / "generation_config.json")
    named = (told.get("eos_token_id") for told in (config, text, generation))
    eos = eos_ids(named, text.get("vocab_size") or 1 << 31)
    if not eos or "hidden_size" not in text:
        raise VocabStoreError(f"{root}: config.json lacks hidden_size or eos_token_id")
    return int(text["hidden_size"]), eos
