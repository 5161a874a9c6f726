"""Masks, sampling, trees and forced tokens together draw from the masked model's distribution.

The masked model is the one whose next id is drawn from its softmax over what the grammar still
allows, after temperature and top-k. For a small language all texts are enumerated, and the chance
of each is the product of transformers' own chances: what the engine draws over many choices is held
against that by chi-square, with drafts of several branches and without, which must be the same
texts. Seeds are fixed, so that no run differs; a right sampler would fail one of 10,000 such tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from server.engine.engine import Engine
from server.engine.grammar import GrammarCompiler, GrammarState
from server.engine.plan import EngineSettings
from server.model.build import RunnerSpec, build_runner
from server.types import EngineSizes, GrammarSpec, Request, SamplingParams, SpeculationParams
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.engine.scenarios import run_requests
from tests.engine.tiny_vocabularies import read_grammar_tokenizer
from tests.fakes.fake_drafters import FakeDrafter, oracle_drafter
from tests.model.cpu_models import cpu_runner
from tests.model.tiny_models import tiny_model
from tests.profiles import examples

Path_ = tuple[int, ...]
Ids = npt.NDArray[np.int64]
Logits = Callable[[tuple[Path_, ...]], torch.Tensor]

# Texts share beginnings, "the " is forced in one branch, and some ends are.
GRAMMAR = GrammarSpec(
    "lark", 'start: "a" ("nd" | "ll the " x | "s") | "the " x "."\nx: "fo" /[xnr]/'
)
TOP_K = 3
VOCAB = 400
TOKENIZER = byte_level_tokenizer()


@dataclass
class Language:
    """Its texts in ids, with the chance of each, and how many places had one allowed id alone."""

    chances: dict[Path_, float]
    num_forced: int


def enumerated(compiler: GrammarCompiler, spec: GrammarSpec, of: Logits, eos: int,
               top_k: int, temperature: float) -> Language:  # fmt: skip
    """Every text of a grammar and its chance. of: raw logits behind each of some texts of one
    length, by transformers."""
    grammar = compiler.compile(spec).result()
    found, num_forced = dict[Path_, float](), 0
    chances: dict[Path_, float] = {(): 1.0}
    while chances:
        allowed = dict[Path_, Ids]()
        for path, chance in chances.items():
            state = GrammarState(grammar)
            for token in path:
                assert state.consume(token)
            row = np.zeros(state.num_words, np.uint32)
            state.fill_mask(row)
            ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            if state.is_complete and set(ids.tolist()) <= {eos}:
                found[path] = chance
            else:
                allowed[path] = ids
        longer = dict[Path_, float]()
        for (path, ids), every in zip(allowed.items(), of((*allowed,)), strict=True):
            num_forced += ids.shape[0] == 1
            logits = every.double()[torch.from_numpy(ids)] / temperature
            kept = torch.topk(logits, min(top_k, ids.shape[0]) if top_k else ids.shape[0])
            shares = torch.softmax(kept.values, 0).tolist()
            for which, share in zip(kept.indices.tolist(), shares, strict=True):
                token = int(ids[which])
                if token == eos:
                    found[path] = chances[path] * share
                else:
                    longer[*path, token] = chances[path] * share
        chances = longer
    return Language(found, int(num_forced))


def last_logits(module: Any, prompt: Path_) -> Logits:
    """transformers' own, behind the prompt and each of some texts of one length."""

    @cache
    def logits(texts: tuple[Path_, ...]) -> torch.Tensor:
        if not texts:
            return torch.empty(0)
        with torch.no_grad():
            told = module(torch.tensor([[*prompt, *text] for text in texts]), logits_to_keep=1)
        rows: torch.Tensor = told.logits[:, -1]
        return rows

    return logits


def knowing(language: Language, prompt: Path_) -> FakeDrafter:
    """Proposes all that may still come, as a tree, however unlikely."""
    return oracle_drafter([[*prompt, *path] for path in sorted(language.chances)])


def drawn(engine: Engine, prompt: Path_, spec: GrammarSpec, *, drafts: int, num: int,
          top_k: int, temperature: float) -> tuple[list[Path_], int]:  # fmt: skip
    """Texts of num choices, in their order, and the forced and drafted tokens accepted for them.
    drafts: nodes that may be drafted for one in a step."""
    at_once = 40
    sampling = SamplingParams(temperature=temperature, top_k=top_k, max_tokens=24)
    speculation = SpeculationParams("known", drafts) if drafts else SpeculationParams()
    requests = [
        Request(
            f"{i:04d}", "task", "tiny", prompt, replace(sampling, seed=i), speculation,
            num_choices=at_once, grammar=spec,
        )
        for i in range(num // at_once)
    ]  # fmt: skip
    found = run_requests(engine, [(0, request) for request in requests])
    assert not engine.recovery.num_failed_steps
    results = [found[key] for key in sorted(found)]
    assert not any(result.error_code for result in results)
    accepted = sum(n for r in results for c in r.counts for _, _, n in c.by_source)
    return [
        tuple(i for i in r.ids if i not in engine.info.eos_token_ids) for r in results
    ], accepted


def check(language: Language, texts: list[Path_]) -> None:
    """Chi-square at one false alarm in 10,000; texts of less than 5 expected draws are a class."""
    assert sum(language.chances.values()) == pytest.approx(1.0)
    counts = Counter(texts)
    assert set(counts) <= set(language.chances), "a text that the grammar, or top-k, leaves out"
    num, small, statistic, freedom = len(texts), [0.0, 0.0], 0.0, -1
    for path, chance in language.chances.items():
        if num * chance < 5:
            small = [small[0] + counts[path], small[1] + num * chance]
            continue
        statistic += (counts[path] - num * chance) ** 2 / (num * chance)
        freedom += 1
    if small[1] >= 5:
        statistic += (small[0] - small[1]) ** 2 / small[1]
        freedom += 1
    assert freedom >= 2
    # Wilson and Hilferty's approximation (1931) of the quantile.
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 3.719 * spread**0.5) ** 3


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(partial(read_grammar_tokenizer, TOKENIZER, VOCAB))
    yield made
    made.close()


@pytest.mark.parametrize("top_k", [0, TOP_K])
def test_a_tiny_model_s_texts_have_the_masked_model_s_chances(
    compiler: GrammarCompiler, top_k: int
) -> None:
    ends = {"eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 0}
    module = tiny_model("llama", 11, vocab_size=VOCAB, **ends)
    temperature = 0.7  # not so hot that a wrong one changes little
    prompt = tuple(TOKENIZER.encode("The answer is").ids)

    logits = last_logits(module, prompt)
    language, hotter = (
        enumerated(compiler, GRAMMAR, logits, 0, top_k, degrees)
        for degrees in (temperature, temperature * 1.4 / 1.1)
    )
    assert len(language.chances) > 6 and language.num_forced > 4
    found = []
    for drafts, num in ((0, 800), (12, 240)):
        runner = cpu_runner(module, num_blocks=512)
        runner.info = replace(runner.info, eos_token_ids=(0,))
        engine = Engine(
            runner, {"known": knowing(language, prompt)},
            EngineSettings(max_num_seqs=40, max_num_batched_tokens=256), grammars=compiler,
        )  # fmt: skip
        texts, accepted = drawn(
            engine, prompt, GRAMMAR, drafts=drafts, num=num, top_k=top_k, temperature=temperature
        )
        assert bool(accepted) == bool(drafts)
        found.append(texts)
        runner.close()
    check(language, found[0])
    assert found[1] == found[0][:240], "drafts change no text, so their distribution is the same"
    flat = replace(language, chances=dict.fromkeys(language.chances, 1 / len(language.chances)))
    for wrong in (flat, hotter):
        with pytest.raises(AssertionError):
            check(wrong, found[0])


@pytest.mark.slow
def test_a_real_model_s_texts_have_the_masked_model_s_chances(real_model_folder: Path) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(real_model_folder / "tokenizer.json"))
    sizes = EngineSizes(max_num_seqs=40, max_num_batched_tokens=512, kv_bytes=64 << 20)
    spec = RunnerSpec("real", str(real_model_folder), sizes, weights="float32", max_model_len=256)
    runner: Any = build_runner(spec)
    eos = runner.info.eos_token_ids
    load = partial(read_grammar_tokenizer, tokenizer, runner.info.vocab_size, eos)
    compiler = GrammarCompiler(load)
    module: Any = AutoModelForCausalLM.from_pretrained(real_model_folder, dtype=torch.float32)
    prompt = tuple(tokenizer.encode("Is the sky blue? Answer with one word:").ids)
    grammar = GrammarSpec("regex", " (yes|no|not (so|in)|a big no)")

    language = enumerated(compiler, grammar, last_logits(module, prompt), eos[0], 0, 1.4)
    engine = Engine(
        runner, {"known": knowing(language, prompt)},
        EngineSettings(max_num_seqs=40, max_num_batched_tokens=512), grammars=compiler,
    )  # fmt: skip
    num = max(240, examples(600))
    texts, accepted = drawn(engine, prompt, grammar, drafts=4, num=num, top_k=0, temperature=1.4)
    assert accepted
    check(language, texts)
    engine.close()
