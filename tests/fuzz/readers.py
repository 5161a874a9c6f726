"""Every reader of what comes from outside, and how it is met with hostile input (harness.py)."""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from drafters.array_file import ALIGN, ArrayFileError
from server.errors import ConfigError, ModelError
from tests.fuzz.harness import Reader
from tests.fuzz.mutations import FLOATS, NUMBERS, TEXTS, mutate_bytes, mutate_json, one_of

# --- our own array files --------------------------------------------------------------------------

PROMPT = [7, 7, 23, 8]


def _written(*writes: Callable[[Path], object]) -> list[bytes]:
    """What each of these writes to a file."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(i) for i in range(len(writes))]
        for write, file in zip(writes, files, strict=True):
            write(file)
        return [file.read_bytes() for file in files]


def _read_once(found: list[bytes], read: Callable[[bytes, Path], None]) -> list[bytes]:
    """These, read: what that imports or compiles is there before the forks."""
    for data in found:
        with tempfile.TemporaryDirectory() as folder:
            read(data, Path(folder))
    return found


@functools.cache
def _corpus_files() -> Sequence[bytes]:
    from drafters.auto.held_out import build_calibrated
    from drafters.corpus import build_corpus

    examples = [([7, 7, n, 8], [1, 2, n % 32, 3, n % 5, 0]) for n in range(20, 90)]
    corpora = (
        build_corpus(examples, fingerprint="f", p_min=1),
        build_calibrated(examples * 3, fingerprint="f"),
        build_corpus([([], [1, 2])], fingerprint="f"),
    )
    return _read_once(_written(*(corpus.save for corpus in corpora)), _use_corpus)


def _use_corpus(data: bytes, folder: Path) -> None:
    from drafters.auto.drafter import AutoDrafter
    from drafters.corpus import Corpus, build_corpus
    from drafters.published.mix import MixDrafter

    file = folder / "corpus"
    file.write_bytes(data)
    corpus = Corpus.load(file, fingerprint=None)
    for prompt in (PROMPT, [1, 2, 3, 4, 5, 6, 50, 7]):
        for drafter in (AutoDrafter(corpus=corpus), MixDrafter(corpus=corpus)):
            session = drafter.open(prompt)
            for token in (1, 2, 23, 3, 0, 77):
                session.propose(16, 8)
                session.extend([token])
    examples = [(np.asarray(PROMPT, np.int32), np.asarray([1, 2], np.int32))]
    build_corpus(examples, base=corpus, fingerprint=corpus.fingerprint)
    corpus.count_grams(2)


@functools.cache
def _learned_files() -> Sequence[bytes]:
    from drafters.learned import LearnedOutputs
    from drafters.shared_outputs import SharedFile, save_shared, segment_of

    examples = [(np.asarray(PROMPT, np.int32), np.arange(n, dtype=np.int32)) for n in range(2, 20)]
    outputs = LearnedOutputs(1000)
    for prompt, output in examples:
        outputs.add(prompt, output)
    counts = {"evidence": np.eye(3, 40), "outcomes": np.ones((3, 5))}
    shared = SharedFile(
        segment_of(examples, 1000, 7), {("auto", "c"): counts}, {"max_tokens": 100, "corpus": ""}
    )
    own = {"fingerprint": "f", "scope": "s"}
    return _written(
        lambda file: outputs.save(file, **own), lambda file: save_shared(file, shared, **own)
    )


def _use_learned(data: bytes, folder: Path) -> None:
    from drafters.learned import LearnedOutputs
    from drafters.shared_outputs import load_shared, merge

    file = folder / "learned"
    file.write_bytes(data)
    LearnedOutputs(50).restore(file, fingerprint="f", scope="s")
    shared = load_shared(file, fingerprint=None, scope=None)
    merge([shared.outputs], max_tokens=int(shared.meta.get("max_tokens") or 1))


@functools.cache
def _bigram_files() -> Sequence[bytes]:
    from drafters.published.grammys import BigramTable

    ids = np.arange(200, dtype=np.int32).reshape(50, 4) % 50
    table = BigramTable("f", ids, np.full((50, 4), 0.2, np.float32))
    return _read_once(_written(table.save), _use_bigrams)


def _use_bigrams(data: bytes, folder: Path) -> None:
    from drafters.published.grammys import BigramTable, GrammysDrafter

    file = folder / "bigrams"
    file.write_bytes(data)
    table = BigramTable.load(file, fingerprint=None)
    GrammysDrafter(table=table).open([1, 2, 3, 1, 2]).propose(8, 4)


@functools.cache
def _prior_files() -> Sequence[bytes]:
    from tests.fakes.fake_drafters import random_prior

    return _written(functools.partial(random_prior(50).save, fingerprint="model"))


def _use_prior(data: bytes, folder: Path) -> None:
    from drafters.auto.drafter import AutoDrafter
    from drafters.auto.prior import Prior

    file = folder / "prior"
    file.write_bytes(data)
    prior = Prior.load(file, fingerprint=None)
    session = AutoDrafter(model_prior=prior).open(PROMPT)
    session.settle()
    session.note_state(np.linspace(-9.0, 9.0, prior.hidden_size, dtype=np.float32))
    session.extend([7])
    session.propose(8, 4)
    session.extend([9, 1])


def mutate_arrays(chance: random.Random, data: bytes) -> bytes:
    """Values of one array, or of the header, are others; the checksum is right again."""
    length = int.from_bytes(data[8:16], "little")
    header = json.loads(data[24 : 24 + length])
    body = bytearray(data[-(-(24 + length) // ALIGN) * ALIGN :])
    if chance.randrange(4) == 0:
        header = mutate_json(chance, header)
    else:
        entry = chance.choice(list(header["arrays"].values()))
        size = int(np.prod(entry["shape"]))
        values: Any = np.frombuffer(body, entry["dtype"], size, entry["offset"]) if size else None
        for _ in range(chance.choice((1, 1, 3, 50)) if size else 0):
            at = chance.randrange(size)
            new = chance.choice((*NUMBERS, size, size - 1, size + 1, int(values[at]) + 1))
            with np.errstate(all="ignore"):
                values[at] = np.asarray(new & 0xFFFF_FFFF_FFFF_FFFF, np.uint64).astype(values.dtype)
    told = json.dumps(header).encode()
    payload = told + bytes(-(24 + len(told)) % ALIGN) + body
    head = data[:8] + len(told).to_bytes(8, "little")
    return head + zlib.crc32(payload).to_bytes(4, "little") + bytes(4) + payload


def _of_arrays(name: str, seeds: Any, read: Any) -> Reader:
    mutate = one_of(mutate_arrays, mutate_arrays, mutate_bytes)
    return Reader(name, seeds, mutate, read, (ArrayFileError,))


# --- models: GGUF, safetensors, config.json, adapters ---------------------------------------------

_GGUF_SIZES = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}  # noqa: E501  # fmt: skip


class _GgufParts:
    """A GGUF taken apart: fields as [key, type, value], lists as (type of the entries, entries);
    tensors as [name, sizes, type, offset]; and what lies behind the header."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 24
        num_tensors, num_fields = struct.unpack_from("<QQ", data, 8)
        self.fields: list[list[Any]] = []
        for _ in range(num_fields):
            key, kind = self._text(), self._number("<I")
            self.fields.append([key, kind, self._value(kind)])
        self.tensors: list[list[Any]] = []
        for _ in range(num_tensors):
            name, num = self._text(), self._number("<I")
            sizes = [self._number("<Q") for _ in range(num)]
            self.tensors.append([name, sizes, self._number("<I"), self._number("<Q")])
        self.body = data[-(-self._at // 32) * 32 :]

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _text(self) -> bytes:
        size = self._number("<Q")
        self._at += size
        return self._data[self._at - size : self._at]

    def _value(self, kind: int) -> Any:
        if kind == 8:
            return self._text()
        if kind != 9:
            return self._number(_GGUF_SIZES[kind])
        inner, num = self._number("<I"), self._number("<Q")
        return inner, [self._value(inner) for _ in range(num)]

    def bytes(self, lie: int = 0) -> bytes:
        """The file. lie: added to the number of entries that the first list says it has."""
        out = [b"GGUF", struct.pack("<IQQ", 3, len(self.tensors), len(self.fields))]
        for key, kind, value in self.fields:
            out += [_gguf_text(key), struct.pack("<I", kind), _gguf_value(kind, value, lie)]
            lie = 0 if kind == 9 else lie
        for name, sizes, kind, offset in self.tensors:
            out += [_gguf_text(name), struct.pack("<I", len(sizes))]
            out += [struct.pack(f"<{len(sizes)}QIQ", *sizes, kind, offset)]
        head = b"".join(out)
        return head + bytes(-len(head) % 32) + self.body


def _gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _gguf_value(kind: int, value: Any, lie: int = 0) -> bytes:
    if kind == 8:
        return _gguf_text(value)
    if kind == 9:
        inner, entries = value
        told = struct.pack("<IQ", inner, (len(entries) + lie) % (1 << 64))
        return told + b"".join(_gguf_value(inner, one) for one in entries)
    form = _GGUF_SIZES.get(kind, "<I")
    if form in ("<f", "<d"):
        return struct.pack(form, value)
    return (int(value) % (1 << 8 * struct.calcsize(form))).to_bytes(struct.calcsize(form), "little")


def _hostile_field(chance: random.Random) -> tuple[int, Any]:
    """(type, value)"""
    kind = chance.choice((0, 4, 4, 5, 5, 6, 6, 7, 8, 9, 9, 10, 11, 12, 13))
    if kind in (6, 12):
        value = chance.choice(FLOATS)
        return kind, value if kind == 12 or abs(value) < 1e39 or value != value else 1e38
    if kind == 8:
        return kind, chance.choice(TEXTS).encode("utf-8", "surrogatepass")
    if kind == 9:
        deep: Any = (4, [1, 2])
        for _ in range(chance.choice((0, 1, 5, 5000))):
            deep = (9, [deep])
        return kind, chance.choice((deep, (8, [b"a", b"\xff\xfe"]), (6, [1.0] * 9), (7, [1, 0])))
    return kind, chance.choice(NUMBERS)


def mutate_gguf(chance: random.Random, data: bytes) -> bytes:
    """Fields and tensors of other types, sizes and names; the rest of the file stays whole."""
    parts = _GgufParts(data)
    lie = 0
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        field = chance.choice(parts.fields)
        tensor = chance.choice(parts.tensors)
        kind = chance.randrange(10)
        if kind < 4:
            field[1:] = _hostile_field(chance)
        elif kind == 4 and field[1] in (4, 5, 10, 11):
            field[2] = chance.choice((*NUMBERS, field[2] + 1, field[2] - 1, field[2] * 2))
        elif kind == 4 and field[1] == 9 and field[2][1]:
            del field[2][1][chance.randrange(len(field[2][1])) :]
        elif kind == 5:
            parts.fields.append(list(chance.choice(parts.fields)))
        elif kind == 6:
            parts.fields.remove(field)
        elif kind == 7:
            tensor[1][chance.randrange(len(tensor[1]))] = chance.choice(NUMBERS) % (1 << 64)
        elif kind == 8:
            tensor[2:] = [
                chance.choice((0, 1, 2, 8, 12, 28, 99)),
                chance.choice((0, 1, 32, 1 << 60)),
            ]
        else:
            lie = chance.choice((1, -1, 1 << 20, 1 << 62))
        if not parts.fields:
            break
    return parts.bytes(lie)


@functools.cache
def _gguf_files() -> Sequence[bytes]:
    from tests.model.gguf_models import MODELS, write

    def writes(name: str) -> Callable[[Path], object]:
        return lambda file: write(MODELS[name], MODELS[name].build(), file, "Q8_0")

    names = ("llama", "qwen3", "gemma3_text", "phi3", "lfm2", "olmo3", "granite")
    found = _written(*map(writes, names))
    return _read_once([*found, _with_sentencepiece(found[0])], _use_gguf)


def _with_sentencepiece(data: bytes) -> bytes:
    """The file with a tokenizer of the other kind, of as many tokens."""
    parts = _GgufParts(data)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += ["\u2581", "a", "b", "c", "ab", "\u2581a", "abc", "\u2581ab"]
    tokens += [f"<x{i}>" for i in range(320 - len(tokens))]
    own = {
        "model": (8, b"llama"),
        "tokens": (9, (8, [token.encode() for token in tokens])),
        "scores": (9, (6, [-float(i) for i in range(320)])),
        "token_type": (9, (5, [3] * 3 + [6] * 256 + [1] * 61)),
    }
    kept = [f for f in parts.fields if not f[0].startswith(b"tokenizer.ggml.")]
    ids = [f for f in parts.fields if f[0].endswith(b"_token_id")]
    parts.fields = [*kept, *ids, *([f"tokenizer.ggml.{k}".encode(), *v] for k, v in own.items())]
    return parts.bytes()


def _use_gguf(data: bytes, folder: Path) -> None:
    from server.model.catalog import model_folder

    file = folder / "m.gguf"
    file.write_bytes(data)
    os.environ["TAILOR_CACHE_DIR"] = str(folder / "cache")
    shutil.rmtree(folder / "cache", ignore_errors=True)
    _read_whole(model_folder(str(file), "file", report=lambda _: None))


def _read_whole(folder: Path) -> None:
    from server.model.loader import open_model

    opened = open_model(str(folder))
    for name in opened.weights.names():
        opened.weights.get(name)
    opened.shape()
    opened.ropes(64)
    assert opened.num_token_ids <= opened.config.vocab_size


@functools.cache
def _folders() -> Sequence[bytes]:
    """A model's folder in transformers' form, packed: {name: content}."""
    from tests.model.tiny_models import save_tiny

    found = []
    for family in ("llama", "gemma3", "qwen2"):
        with tempfile.TemporaryDirectory() as folder:
            save_tiny(Path(folder), family)
            found.append(_packed(Path(folder)))
    return _read_once(found, _use_folder)


def _packed(folder: Path) -> bytes:
    return pickle.dumps({file.name: file.read_bytes() for file in sorted(folder.iterdir())})


def _unpacked(data: bytes, folder: Path) -> Path:
    place = folder / "unpacked"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name, content in pickle.loads(data).items():
        (place / name).write_bytes(content)
    return place


def _mutate_packed(*names: str) -> Callable[[random.Random, bytes], bytes]:
    """One of these files of a packed folder is another one."""

    def mutate(chance: random.Random, data: bytes) -> bytes:
        files = pickle.loads(data)
        name = chance.choice([name for name in names if name in files])
        if chance.randrange(4) == 0:
            files[name] = mutate_bytes(chance, files[name])
        elif name.endswith(".safetensors"):
            files[name] = _mutate_safetensors(chance, files[name])
        else:
            told = mutate_json(chance, json.loads(files[name]))
            files[name] = json.dumps(told).encode()
        return pickle.dumps(files)

    return mutate


_OFFSETS: tuple[Any, ...] = (
    [0, 0], [8, 4], [-4, 4], [0, 1 << 63], [0, 4.0], ["0", "4"], [0], [], None,
)  # fmt: skip
_SHAPES: tuple[Any, ...] = (
    [], [0], [-1, -1], [1 << 63], [1 << 32, 1 << 32], [1.5, 2], ["3"], [[2], [2]], None, 7,
)  # fmt: skip
_DTYPES: tuple[Any, ...] = ("F64", "BF16", "I8", "U64", "BOOL", "F8_E4M3", "f32", "", 32, None)
_BEFORE = (b" ", b"\xef\xbb\xbf", b"\x00", b"[" * 99_999, b'{"a":' * 9_999, b"\xff\xfe")


def _mutate_safetensors(chance: random.Random, data: bytes) -> bytes:
    """Its numbers, or what it says before them: any of it, one tensor, the text."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    kind = chance.randrange(6)
    tensors = sorted(header.keys() - {"__metadata__"})
    if kind < 2:
        bad = np.asarray(chance.choice(FLOATS)).astype("<f4").tobytes()
        for _ in range(chance.choice((1, 5))):
            at = 4 * chance.randrange(max(1, len(body) // 4))
            body[at : at + 4] = bad
    elif kind == 2:
        header = mutate_json(chance, header)
    elif kind < 5:
        one, other = chance.sample(tensors, 2)
        field, values = chance.choice(
            (("data_offsets", _OFFSETS), ("shape", _SHAPES), ("dtype", _DTYPES))
        )
        wrong = (*values, header[other].get(field), {}, chance.choice(NUMBERS))
        header[one][field] = chance.choice(wrong)
        if kind == 4:
            header[chance.choice((other, "", "\n", "../a", one * 200))] = header.pop(one)
    told = json.dumps(header).encode()
    if kind == 5:
        told = chance.choice(
            (told[:-1], told + told, told.replace(b"}", b"},", 1), chance.choice(_BEFORE) + told)
        )
    size = len(told) if chance.randrange(4) else chance.choice(NUMBERS) % (1 << 64)
    return size.to_bytes(8, "little") + told + body


def _use_folder(data: bytes, folder: Path) -> None:
    os.environ["TAILOR_CACHE_DIR"] = str(folder / "cache")
    _read_whole(_unpacked(data, folder))


@functools.cache
def _adapters() -> Sequence[bytes]:
    import torch

    from tests.model.peft_adapters import enriched, lora
    from tests.model.tiny_models import tiny_model

    torch.set_num_threads(1)
    found = []
    for i in range(3):
        with tempfile.TemporaryDirectory() as folder:
            if i < 2:
                more: Any = {"rank_pattern": {"q_proj": 2, "layers.0.mlp.up_proj": 3}} if i else {}
                lora(tiny_model("llama"), Path(folder), **more)
            else:
                enriched(tiny_model("llama"), Path(folder))
            for file in Path(folder).iterdir():
                if not file.name.startswith(("adapter_", "enrichment")):
                    file.unlink()
            found.append(_packed(Path(folder)))
    return _read_once(found, _use_adapter)


def _use_adapter(data: bytes, folder: Path) -> None:
    import torch

    from server.model.adapter import opened_adapter, token_rows
    from server.model.shape import shape_of
    from tests.model.tiny_models import tiny_config

    shape = shape_of(_supported(tiny_config("llama")))
    lora = opened_adapter(_unpacked(data, folder), shape, 128)
    for table in token_rows(lora, shape):
        assert table is None or bool(torch.isfinite(table.rows.float()).all())
    for name in lora.names():
        a, b = lora.pair(name)
        assert bool(torch.isfinite(b @ a * lora.scale(name)).all())


def _supported(config: Any) -> Any:
    config.architectures = ["LlamaForCausalLM"]
    return config


# --- what a cache folder keeps --------------------------------------------------------------------


@functools.cache
def _kept_files() -> Sequence[bytes]:
    """Files of a cache folder, each behind its kind and a zero byte."""
    from drafters.auto.trust import Trust
    from drafters.calibration import Calibration
    from server import token_bytes
    from server.engine.grammar_tokenizer import make_tables, save_tables
    from server.fleet.learning.storage import MANIFEST, Manifest
    from tests.api.tiny_tokenizers import byte_level_tokenizer
    from vocab_store.profile import VocabProfile
    from vocab_store.slice import VocabSlice

    tokenizer = byte_level_tokenizer()
    report = {"heldout": {"num_tokens": 10, "num_missed": 1}}
    ids = np.arange(20, dtype=np.int32)
    profile = VocabProfile(
        VocabSlice(ids, 40), ids + 20, np.ones(20, np.float32), {"report": report}
    )
    manifest = Manifest(1, 2, "state-0123456789abcdef.bin", marks={"w": (1, 2)})
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        token_bytes.save(token_bytes.build(tokenizer), place / "tokens")
        save_tables(make_tables(json.loads(tokenizer.to_str())), place / "merges")
        Calibration(("a", "b")).save(place / "calibration")
        Trust().save(place / "trust")
        profile.save(place / "profile")
        (place / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        found = [f.name.encode() + b"\0" + f.read_bytes() for f in sorted(place.iterdir())]
    return _read_once(found, _use_kept)


def _use_kept(data: bytes, folder: Path) -> None:
    from tokenizers import Tokenizer

    from drafters.auto.trust import Trust
    from drafters.calibration import Calibration
    from server import token_bytes
    from server.engine.grammar_tokenizer import TextCutter, open_tables
    from server.fleet.learning.storage import Storage, read_manifest
    from vocab_store.profile import VocabProfile

    kind, _, content = data.partition(b"\0")
    file = folder / kind.decode()
    file.write_bytes(content)
    if kind == b"tokens":
        table = token_bytes.open_table(file)
        table.join(range(table.vocab_size), skip_special=True)
    elif kind == b"merges":
        try:
            cutter = TextCutter(open_tables(file), Tokenizer.from_str)
        except Exception as error:  # of the tokenizers library; its engine has no grammars then
            raise ValueError(f"{type(error).__name__}: {str(error)[:100]}") from None
        cutter("the fox jumps")
    elif kind == b"calibration":
        Calibration(("a", "b")).restore(file)
    elif kind == b"trust":
        trust = Trust()
        trust.restore(file)
        trust.table()
    elif kind == b"profile":
        profile = VocabProfile.load(file)
        profile.filled(20)
    else:
        read_manifest(Storage(str(folder.parent)), folder.name)


def _mutate_kept(chance: random.Random, data: bytes) -> bytes:
    kind, _, content = data.partition(b"\0")
    if chance.randrange(4) == 0:
        content = mutate_bytes(chance, content)
    elif kind in (b"tokens", b"merges"):
        content = mutate_arrays(chance, content)
    elif kind == b"profile":
        length = int.from_bytes(content[12:16], "little")
        told = json.dumps(mutate_json(chance, json.loads(content[16 : 16 + length]))).encode()
        head = content[:12] + len(told).to_bytes(4, "little") + told
        content = head + bytes(-len(head) % 64) + content[-(-(16 + length) // 64) * 64 :]
    else:
        content = json.dumps(mutate_json(chance, json.loads(content))).encode()
    return kind + b"\0" + content


# --- configuration and data -----------------------------------------------------------------------

_TASK = {
    "name": "sql",
    "description": "SQL",
    "sampling": {"max_tokens": 64, "temperature": 0.5, "stop": ["\n"], "stop_token_ids": [3]},
    "limits": {"max_draft_tokens": 8, "queue_timeout_s": 30},
    "speculation": {
        "drafter": "auto",
        "max_draft_tokens": 8,
        "learn": "memory",
        "context": {"after": "Q:", "before": "A:"},
        "mix": {"n_max": 4},
        "allowed_drafters": ["auto", "mix"],
    },
    "vocabulary": {"mode": "full"},
}
_SERVER = {
    "listen": {"host": "127.0.0.1", "port": 8000},
    "models": [{"name": "m", "path": "smollm2-135m-instruct", "adapters": []}],
    "keys": [{"id": "a", "env": "KEY", "tasks": ["sql"], "requests_per_minute": 5}],
    "limits": {"max_queued_requests": 10, "drain_s": 5},
    "engine": {"max_num_seqs": 4, "kv_cache_memory": "200MiB", "threads": 2},
    "log": {"format": "json"},
    "restart": {"max_restarts": 3},
}
_CLUSTER = {
    "server": "server.yaml",
    "ingress": {"replicas": 1, "http": "direct"},
    "replicas": {"min": 1, "max": 3, "num_cpus": 1, "scaling": {"first_token_s": 1.0}},
    "routing": {"target_load": 0.7},
    "learning": {"storage": "/tmp/x", "max_age_days": 3},
}
_BOMB = "a: &a [1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 8)}]\n" for i in range(9)
)


@functools.cache
def _yaml_files() -> Sequence[bytes]:
    told = (("task", _TASK), ("server", _SERVER), ("cluster", _CLUSTER))
    files = [f"{kind}\n{yaml.safe_dump(values)}".encode() for kind, values in told]
    return [*files, f"task\n{_BOMB}".encode()]


@functools.cache
def _yaml_values(text: bytes) -> Any:
    return yaml.safe_load(text)


def _mutate_yaml(chance: random.Random, data: bytes) -> bytes:
    kind, _, text = data.partition(b"\n")
    if chance.randrange(3) == 0 or b"&a" in text:
        return kind + b"\n" + mutate_bytes(chance, text)
    return kind + b"\n" + json.dumps(mutate_json(chance, _yaml_values(text))).encode()


def _use_yaml(data: bytes, folder: Path) -> None:
    from server.config import load_tasks
    from server.config.cluster import load_cluster_config
    from server.config.server import load_server_config

    kind, _, text = data.partition(b"\n")
    place = folder / "configs"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    (place / "server.yaml").write_text(json.dumps(_SERVER))  # which is YAML, too
    file = place / f"{kind.decode('utf-8', 'replace')[:20]}.yaml"
    file.write_bytes(text)
    if kind == b"task":
        load_tasks(place / "none" if not place.is_dir() else place, ("m",), ("auto", "mix"))
    elif kind == b"cluster":
        load_cluster_config(file)
    else:
        load_server_config(file)


_ROWS = [
    {"prompt": "List users", "completion": "SELECT * FROM users"},
    {"prompt_ids": [5, 6], "output_ids": [7, 8, 0]},
    {"completion": "x"},
    {"messages": [{"role": "user", "content": "hi"}], "completion": "there"},
]


def _data_files() -> Sequence[bytes]:
    lines = "\n".join(json.dumps(row) for row in _ROWS)
    table = 'prompt,completion\n"a, b",c\nd,"e\nf"\n'
    return [b"jsonl\0" + lines.encode(), b"csv\0" + table.encode()]


def _mutate_data(chance: random.Random, data: bytes) -> bytes:
    kind, _, content = data.partition(b"\0")
    if kind == b"jsonl" and chance.randrange(2):
        rows = [mutate_json(chance, row) for row in _ROWS]
        return kind + b"\0" + b"\n".join(json.dumps(row).encode() for row in rows)
    return kind + b"\0" + mutate_bytes(chance, content)


def _use_data(data: bytes, folder: Path) -> None:
    from server.datasets import ExampleReader
    from tests.api.tiny_tokenizers import byte_level_tokenizer

    kind, _, content = data.partition(b"\0")
    file = folder / f"data.{kind.decode()}"
    file.write_bytes(content)
    for prompt, output in ExampleReader(byte_level_tokenizer(), 0).read([file]):
        np.asarray(prompt, np.int32), np.asarray(output, np.int32)


# --- requests -------------------------------------------------------------------------------------

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "at": {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
}
_TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "d", "parameters": _SCHEMA, "strict": True},
}
_CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
_BODIES: Sequence[tuple[str, dict[str, Any]]] = (
    (
        "/v1/completions",
        {
            "model": "tiny", "prompt": "the", "max_tokens": 4, "n": 2, "temperature": 0.7,
            "stop": ["x"], "logprobs": 2, "seed": 3, "logit_bias": {"5": 1}, "echo": False,
            "stream": False, "top_p": 0.9, "presence_penalty": 0.1, "top_k": 5, "min_p": 0.1,
            "speculation": {"drafter": "suffix", "max_draft_tokens": 4},
        },
    ),
    ("/v1/completions", {"model": "tiny", "prompt": [[1, 2], [3]], "stream": True}),
    (
        "/v1/chat/completions",
        {
            "model": "tiny", "messages": _CHAT, "max_tokens": 4, "tools": [_TOOL],
            "tool_choice": "auto", "logprobs": True, "top_logprobs": 2,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "tiny", "messages": _CHAT, "max_tokens": 4,
            "response_format": {
                "type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA},
            },
        },
    ),
    ("/v1/responses", {"model": "tiny", "input": "hello", "max_output_tokens": 4, "store": False}),
    ("/v1/decisions", {"model": "tiny", "prompt": "is it", "choices": ["yes", "no"]}),
    ("/tokenize", {"model": "tiny", "prompt": "the fox"}),
    ("/detokenize", {"model": "tiny", "tokens": [1, 2, 3]}),
)  # fmt: skip


def _bodies() -> Sequence[bytes]:
    import tests.api.live  # noqa: F401  # before the forks: it takes seconds on a busy machine

    return [f"{path}\0{json.dumps(body)}".encode() for path, body in _BODIES]


def _mutate_body(chance: random.Random, data: bytes) -> bytes:
    path, _, content = data.partition(b"\0")
    if chance.randrange(6) == 0:
        return path + b"\0" + mutate_bytes(chance, content)
    body = mutate_json(chance, json.loads(content))
    return path + b"\0" + json.dumps(body).encode()


class _RefusedError(Exception):
    """An answer of 4xx."""


@functools.cache
def _server(_process: int) -> Any:
    """A server with an engine that always says the same, of the process that asks first."""
    from tests.api.live import LiveServer
    from tests.fakes.scripted_engine import ScriptedEngine, saying

    return LiveServer([ScriptedEngine(saying([260, 261, 262]))]).__enter__()


def _use_body(data: bytes, folder: Path) -> None:
    path, _, body = data.partition(b"\0")
    server = _server(os.getpid())
    headers = {"content-type": "application/json"}
    answer = server.http.post(server.url + path.decode(), content=body, headers=headers)
    if answer.status_code >= 500:
        raise RuntimeError(f"{answer.status_code}: {answer.text[:200]}")
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert {"message", "type", "param", "code"} <= error.keys(), error
        raise _RefusedError(error["message"])


_GRAMMARS = {
    "json_schema": json.dumps(_SCHEMA),
    "regex": r"(yes|no)( [a-z]{1,5}){0,3}\.?",
    "lark": 'start: "a" b+\nb: /[0-9]{2}/ | "x" start\n%ignore /[ ]+/\n',
}


def _grammars() -> Sequence[bytes]:
    return [f"{kind}\0{source}".encode() for kind, source in _GRAMMARS.items()]


def _mutate_grammar(chance: random.Random, data: bytes) -> bytes:
    kind, _, source = data.partition(b"\0")
    if kind == b"json_schema" and chance.randrange(4):
        return kind + b"\0" + json.dumps(mutate_json(chance, json.loads(source))).encode()
    hard = (b"(a*)*b", b"x{1000}{1000}", b"((" * 500, b"|" * 100, b"\\p{L}{999}", b"%ignore", b"b*")
    at = chance.randrange(len(source))
    if chance.randrange(2):
        return kind + b"\0" + source[:at] + chance.choice(hard) + source[at:]
    return kind + b"\0" + mutate_bytes(chance, source)


@functools.cache
def _grammar_tokenizer() -> Any:
    from tests.api.tiny_tokenizers import byte_level_tokenizer
    from tests.engine.tiny_vocabularies import read_grammar_tokenizer

    return read_grammar_tokenizer(byte_level_tokenizer(), 400)


def _use_grammar(data: bytes, folder: Path) -> None:
    from server.engine.grammar import GrammarCompiler, GrammarState
    from server.types import GrammarSpec

    kind, _, source = data.partition(b"\0")
    compiler = GrammarCompiler(_grammar_tokenizer)
    text = source.decode("utf-8", "replace")
    state = GrammarState(compiler.compile(GrammarSpec(kind.decode(), text)).result())  # type: ignore[arg-type]
    state.fill_mask(np.zeros(state.num_words, np.uint32))
    state.forced()


READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (
        _of_arrays("corpus", _corpus_files, _use_corpus),
        _of_arrays("learned outputs", _learned_files, _use_learned),
        _of_arrays("bigram table", _bigram_files, _use_bigrams),
        _of_arrays("prior", _prior_files, _use_prior),
        Reader(
            "gguf",
            _gguf_files,
            one_of(mutate_gguf, mutate_gguf, mutate_gguf, mutate_bytes),
            _use_gguf,
            (ModelError,),
        ),
        Reader(
            "model folder",
            _folders,
            _mutate_packed("config.json", *["model.safetensors"] * 3, "generation_config.json"),
            _use_folder,
            (ModelError,),
        ),
        Reader(
            "adapter",
            _adapters,
            _mutate_packed("adapter_config.json", "adapter_model.safetensors", "enrichment.json"),
            _use_adapter,
            (ModelError,),
        ),
        Reader("kept files", _kept_files, _mutate_kept, _use_kept, (ValueError,)),
        Reader("yaml", _yaml_files, _mutate_yaml, _use_yaml, (ConfigError,)),
        Reader("data files", _data_files, _mutate_data, _use_data, (ConfigError,)),
        Reader("request bodies", _bodies, _mutate_body, _use_body, (_RefusedError,)),
        Reader("grammars", _grammars, _mutate_grammar, _use_grammar, (ValueError,)),
    )
}
