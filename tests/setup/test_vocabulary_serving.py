"""Profiles in a server: checked before anything is loaded, copied before the engine is ready, read
again when their file is replaced."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from server import token_bytes
from server.config import EngineConfig, ModelConfig, ServerConfig, TaskConfig
from server.config.task import VocabularyConfig
from server.engine.engine import Engine
from server.errors import ConfigError
from server.types import Delta, VocabularyParams
from server.wiring.engine import EngineOrder, build_engine, profile_reader
from server.wiring.server import plan_server
from tests.engine.requests import finish, ids_of, request_of
from tests.model.tiny_models import save_tiny
from vocab_store.errors import VocabStoreError
from vocab_store.profile import Example, ProfileSettings, VocabProfile, build_profile
from vocab_store.slice import RequiredIds, VocabSlice

EOS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "tiny"
    # More rows than the tokenizer has tokens: their ids are never drawn.
    save_tiny(made, "llama", vocab_size=144)
    return made


def _table(folder: Path) -> token_bytes.TokenBytes:
    from tokenizers import Tokenizer

    return token_bytes.build(Tokenizer.from_file(str(folder / "tokenizer.json")), 144)


def _profile(folder: Path, ids: range) -> VocabProfile:
    tokens = _table(folder)
    found = np.asarray(list(ids), np.int32)
    none = np.empty(0, np.int32)
    # The tiny tokenizer's tokens are bytes: without this every id would be a required one.
    required = RequiredIds.of(144, eos_ids=[EOS])
    return build_profile([Example(none, found)], tokens, required, ProfileSettings(tolerance=0.0))


def _full_profile(folder: Path) -> VocabProfile:
    """What the tiny tokenizer requires (every byte token), and no more."""
    tokens = _table(folder)
    required = RequiredIds.from_tokens(tokens, [EOS])
    made = _profile(folder, range(3, 10))
    return VocabProfile(
        VocabSlice.make(required.ids, required), made.fill_ids, made.fill_gains, made.manifest
    )


def test_a_profile_file_is_read_once_and_again_when_replaced(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.vocab"
    _full_profile(folder).save(path)
    files = profile_reader(_table(folder), [EOS])
    assert path.stat().st_mode & 0o777 == 0o644, "a server of another user reads it"
    first = files(str(path))
    assert files(str(path)) is first
    _full_profile(folder).save(path)
    assert files(str(path)) is not first
    with pytest.raises(OSError, match="nothing"):
        files(str(tmp_path / "nothing.vocab"))


def test_a_map_without_an_eos_or_of_another_tokenizer_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "t.vocab"
    _profile(folder, range(3, 40)).save(path)
    with pytest.raises(VocabStoreError, match="lacks special token ids 0, 1"):
        profile_reader(_table(folder), [EOS])(str(path))
    with pytest.raises(VocabStoreError, match="EOS"):
        profile_reader(_table(folder), [EOS, 60])(str(path))
    other = _full_profile(folder)
    other.manifest["fingerprint"] = "00" * 32
    other.save(path)
    with pytest.raises(VocabStoreError, match="another tokenizer"):
        profile_reader(_table(folder), [EOS])(str(path))


def _order(
    folder: Path, profile: Path, mode: str = "exact", device: str = "cpu", full_head: str = "auto"
) -> EngineOrder:
    """Of a server with one task."""
    engine = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, slice_cache_rows=64)
    config = ServerConfig(
        models=(ModelConfig(name="m", path="m", devices=(device,)),),
        engine=engine.model_copy(update={"full_head": full_head}),
    )
    vocabulary = VocabularyConfig.model_validate({"mode": mode, "profile": str(profile)})
    tasks = {"t": TaskConfig(name="t", vocabulary=vocabulary)}
    [order] = plan_server(config, tasks, {"m": folder}).orders
    return order


def test_a_plan_names_the_task_whose_profile_is_wrong(
    folder: Path, tmp_path: Path, own_cache: Path
) -> None:
    path = tmp_path / "t.vocab"
    with pytest.raises(ConfigError, match=r"task t: vocabulary\.profile: .*t\.vocab: No such file"):
        _order(folder, path)
    _profile(folder, range(3, 40)).save(path)
    with pytest.raises(ConfigError, match=r"task t: vocabulary\.profile: .*lacks"):
        _order(folder, path)
    _full_profile(folder).save(path)
    for where in ({"device": "cuda:0"}, {"full_head": "device"}):
        order = _order(folder, path, "slice", **where)
        assert order.vocabularies == (("slice", str(path)), ("exact", str(path)))
        assert not order.slices_only
    order = _order(folder, path, "slice")
    assert order.slices_only and order.vocabularies == (("slice", str(path)),)
    assert not _order(folder, path, "exact").slices_only


def _answers(engine: Engine, path: Path) -> dict[str, list[Delta]]:
    """By mode."""
    found: dict[str, list[Delta]] = {}
    for mode in ("full", "slice", "exact"):
        vocabulary = VocabularyParams(mode, None if mode == "full" else str(path))
        asked = request_of(
            mode, (5, 9, 40, 8), task="t", temperature=1.0, seed=3, max_tokens=20,
            vocabulary=vocabulary,
        )  # fmt: skip
        found |= finish(engine, asked)
    return found


def test_an_engine_starts_with_its_profiles_and_answers_in_every_mode_that_it_holds(
    folder: Path, tmp_path: Path, own_cache: Path
) -> None:
    path = tmp_path / "t.vocab"
    profile = _full_profile(folder)
    profile.save(path)
    ids: dict[str, dict[str, list[int]]] = {}
    for full_head in ("device", "stream", "auto"):
        with closing(build_engine(_order(folder, path, "slice", full_head=full_head))) as engine:
            assert engine.slices.num_bytes > 0
            num = engine.slices.index.num_static_rows
            assert num == (1 if full_head == "auto" else 2) * profile.slice.num_ids
            assert (engine.info.head_bytes_in_file > 0) == (full_head != "device")
            answers = _answers(engine, path)
        if full_head == "auto":  # all tasks are slices: the head stays in its file
            for mode in ("full", "exact"):
                told = answers.pop(mode)[-1].error or ""
                assert told.startswith(f"vocabulary.mode: {mode}") and "full_head: device" in told
        assert all(deltas[-1].finish_reason == "length" for deltas in answers.values())
        ids[full_head] = {mode: ids_of(told) for mode, told in answers.items()}
    assert ids["device"] == ids["stream"] and ids["device"]["exact"] == ids["device"]["full"]
    assert ids["auto"] == {"slice": ids["device"]["slice"]}
    allowed = set(_full_profile(folder).slice.ids.tolist()) | {5, 9, 40, 8}
    assert set(ids["auto"]["slice"]) <= allowed
