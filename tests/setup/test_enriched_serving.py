"""A model with tokens of its own, served: PEFT's ids, their text, and the same ids with drafts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.corpus import build_corpus
from server.api.served_model import ServedModel
from server.commands.cli import main
from server.config import EngineConfig, ModelConfig, ServerConfig
from server.engine.engine import Engine
from server.errors import ModelError
from server.types import SpeculationParams, VocabularyParams
from server.wiring.drafter import EnrichedDrafter, make_task_drafter
from server.wiring.engine import EngineOrder, build_engine
from server.wiring.model import served_model
from server.wiring.server import plan_server
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.engine.requests import finish, ids_of, request_of
from tests.installed import needs
from tests.json_lines import write_lines
from tests.model.peft_adapters import with_tokens
from tests.model.tiny_models import save_tiny
from vocab_store.enrichment import Enrichment
from vocab_store.errors import VocabStoreError
from vocab_store.profile import VocabProfile

pytestmark = [needs("peft"), pytest.mark.usefixtures("files_cache")]

V, NEW = 128, 6
PROMPTS = [(5, 9, 40, 8), (60, 61, 62, 60, 61, 62), (100, 7)]


def _fingerprint(folder: Path) -> str:
    return served_model(ModelConfig(name="m", path="m"), folder, None).table.fingerprint.hex()


Served = tuple[Path, Path, Enrichment, Any]
"""(model folder, adapter folder, enrichment, PEFT's merged model)."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Who changes the adapter takes `own_adapter`."""
    folder = tmp_path_factory.mktemp("enriched") / "tiny"
    return _tuned(save_tiny(folder, "llama"), folder)


@pytest.fixture
def own_adapter(served: Served, tmp_path: Path) -> Path:
    """A copy of the adapter's folder."""
    return Path(shutil.copytree(served[1], tmp_path / "adapter"))


def _tuned(model: Any, folder: Path) -> Served:
    """The same of a saved model; the adapter is written beside its folder."""
    vocab_size, adapter = model.config.vocab_size, folder.parent / "adapter"
    fingerprint = _fingerprint(folder)
    parts = ((60, 61), (70, 71, 72), (61, 62), (9, 40), (62, 60), (100, 101, 102))
    ids = tuple(range(vocab_size, vocab_size + NEW))
    enrichment = Enrichment(fingerprint, vocab_size, ids, parts)
    tuned = with_tokens(model, adapter, enrichment, 9, 0.05)
    torch.manual_seed(9)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if parameter.requires_grad and "lm_head" in name:
                # Head rows that are large: the new ids win often.
                parameter.add_(torch.randn_like(parameter))
    tuned.save_pretrained(adapter, save_embedding_layers=False)
    return folder, adapter, enrichment, tuned.merge_and_unload().eval()


def _plan(folder: Path, adapter: Path) -> tuple[ServedModel, EngineOrder]:
    config = ServerConfig(
        models=(ModelConfig(name="m", path="m", adapter=str(adapter), devices=("cpu",)),),
        engine=EngineConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )
    plan = plan_server(config, {}, {"m": folder})
    [order] = plan.orders
    return plan.models["m"], order


def _answers(
    engine: Engine,
    speculation: SpeculationParams,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    vocabulary: VocabularyParams | None = None,
    **sampling: Any,
) -> list[list[int]]:
    """The ids of every prompt's answer, all prompts at once."""
    asked = [
        request_of(
            str(i), prompt, task="t", speculation=speculation,
            vocabulary=vocabulary or VocabularyParams(), **{"max_tokens": 24, **sampling},
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip
    told = finish(engine, *asked)
    for deltas in told.values():
        assert deltas[-1].error is None, deltas[-1].error
    return [ids_of(told[request.request_id]) for request in asked]


def _theirs(merged: Any, prompt: tuple[int, ...]) -> list[int]:
    """The greedy answer of PEFT's merged model."""
    with torch.no_grad():
        ids = merged.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    answer: list[int] = ids[0, len(prompt) :].tolist()
    return answer


def test_the_ids_are_those_of_the_merged_model_with_and_without_drafts(served: Served) -> None:
    folder, adapter, enrichment, merged = served
    model, order = _plan(folder, adapter)
    with closing(build_engine(order)) as engine:
        off = SpeculationParams(drafter="off")
        plain = _answers(engine, off)
        assert plain == [_theirs(merged, prompt) for prompt in PROMPTS]
        new = [i for answer in plain for i in answer if i >= V]
        assert len(new) > 10, "the test is about ids of the adapter's own"
        sampled: Any = {"temperature": 1.0, "seed": 4}
        plain_sampled = _answers(engine, off, **sampled)
        for drafter in ("suffix", "auto", "trie"):
            drafts = SpeculationParams(drafter=drafter, max_draft_tokens=8)
            assert _answers(engine, drafts) == plain
            assert _answers(engine, drafts, **sampled) == plain_sampled

    assert model.vocab_size == V + NEW
    for answer in plain:
        text = model.table.join(answer, skip_special=False)
        assert text == model.table.join(enrichment.expand(answer), skip_special=False)


def test_prompts_in_the_models_own_ids_are_answered_as_the_merged_model_does(
    served: Served, own_adapter: Path
) -> None:
    folder, adapter, enrichment, merged = served
    model, _ = _plan(folder, adapter)
    assert [model.prompt_ids(list(prompt)) for prompt in PROMPTS] == [*map(list, PROMPTS)]
    replace(enrichment, prompts=True).save(own_adapter / "enrichment.json")
    model, order = _plan(folder, own_adapter)
    prompts = [tuple(model.prompt_ids(list(prompt))) for prompt in PROMPTS]
    assert sum(i >= V for prompt in prompts for i in prompt) >= 3
    theirs = [_theirs(merged, prompt) for prompt in prompts]
    with closing(build_engine(order)) as engine:
        for drafter in ("off", "auto", "trie"):
            answers = _answers(engine, SpeculationParams(drafter=drafter), prompts)
            assert answers == theirs, drafter


def test_a_profile_in_the_models_own_ids_cuts_its_head(tmp_path: Path) -> None:
    folder = tmp_path / "bytes"
    folder.mkdir()
    tokenizer = byte_level_tokenizer()  # ids that are no single bytes, so that some may be left out
    size = tokenizer.get_vocab_size()
    base_model = save_tiny(folder, "llama", vocab_size=size)
    tokenizer.save(str(folder / "tokenizer.json"))
    _, adapter, enrichment, _ = _tuned(base_model, folder)
    model, order = _plan(folder, adapter)
    table = model.table
    base, own = tmp_path / "base.vocab", tmp_path / "own.vocab"
    row = {"prompt": "a", "completion": tokenizer.decode([60, 61, 70, 71, 72])}
    data = write_lines(tmp_path / "d.jsonl", [row] * 20)
    made = ["vocab", "profile", "--model", str(folder), "--data", str(data), "-o"]
    assert main([*made, str(base)]) == 0
    assert main([*made, str(own), "--adapter", str(adapter)]) == 0
    with pytest.raises(VocabStoreError, match="another tokenizer"):
        VocabProfile.load(base, fingerprint=table.fingerprint)
    profile = VocabProfile.load(own, fingerprint=table.fingerprint)
    assert profile.slice.vocab_size == size + NEW and profile.slice.num_ids < 0.9 * size
    assert set(enrichment.ids) <= set(profile.slice.ids.tolist())
    with closing(build_engine(order)) as engine:
        off = SpeculationParams(drafter="off")
        drafts = SpeculationParams(drafter="auto", max_draft_tokens=8)
        exact, cut = (VocabularyParams(mode, str(own)) for mode in ("exact", "slice"))
        full = _answers(engine, off)
        assert _answers(engine, drafts, vocabulary=exact) == full
        plain = _answers(engine, off, vocabulary=cut)
        assert _answers(engine, drafts, vocabulary=cut) == plain != full
        for prompt, answer in zip(PROMPTS, plain, strict=True):
            assert set(answer) <= {*profile.slice.ids.tolist(), *prompt}
        assert any(i >= size for answer in plain for i in answer)


def test_a_corpus_of_base_ids_is_not_taken_for_one_of_enriched_ids(
    served: Served, tmp_path: Path
) -> None:
    folder, adapter, enrichment, _ = served
    model, _ = _plan(folder, adapter)
    fingerprint = model.table.fingerprint.hex()
    assert fingerprint != enrichment.tokenizer
    outputs = [enrichment.segment([60, 61, 62, 9, 40, 2])] * 5
    corpus = tmp_path / "t.corpus"
    speculation = SpeculationParams(drafter="auto", corpus=str(corpus))
    build_corpus([([5], o) for o in outputs], fingerprint=fingerprint).save(corpus)
    drafter = make_task_drafter("auto", fingerprint, (2,), "t", speculation, enrichment=enrichment)
    assert isinstance(drafter, EnrichedDrafter)
    session = drafter.open([5])
    drafted = session.propose(8, 8)
    assert outputs[0][0] in drafted.token_ids.tolist()
    session.close()
    build_corpus([([5], [60, 61, 2])], fingerprint=enrichment.tokenizer).save(corpus)
    with pytest.raises(ValueError, match=r"tokenizer|fingerprint"):
        make_task_drafter("auto", fingerprint, (2,), "t", speculation, enrichment=enrichment)


def test_what_a_prompt_holds_is_drafted_in_the_models_own_ids(served: Served) -> None:
    _, _, enrichment, _ = served
    drafter = make_task_drafter(
        "prompt", "f", (2,), "t", SpeculationParams(drafter="prompt"), enrichment=enrichment
    )
    session = drafter.open([5, 30, 31, 60, 61, 70, 71, 72, 8, 9])
    session.extend([30, 31])
    tree = session.propose(4, 4)
    assert tree.token_ids.tolist()[:2] == enrichment.segment([60, 61, 70, 71, 72])
    session.close()


def test_an_enrichment_of_another_tokenizer_is_refused_before_anything_is_loaded(
    served: Served, own_adapter: Path
) -> None:
    folder, _, enrichment, _ = served
    other = Enrichment("00" * 32, V, enrichment.ids, enrichment.parts)
    other.save(own_adapter / "enrichment.json")
    with pytest.raises(ModelError, match="another tokenizer"):
        _plan(folder, own_adapter)
