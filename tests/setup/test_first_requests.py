"""Neither a start nor a request needs a compiler where machine code is there: numba's import alone
is 64 MiB and half a second, and every client of an engine would wait for what it compiles."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from server.config import ModelConfig, ServerConfig
from server.engine.engine import Engine
from server.machine_code import make_ready
from server.model.loader import open_model
from server.types import GrammarSpec, Request, SamplingParams, SpeculationParams
from server.wiring.engine import build_engine
from server.wiring.server import plan_server
from tests.processes import run_python
from tests.waiting import wait_until


def compilers() -> list[str]:
    """What of a compiler this process has imported."""
    return [name for name in ("numba", "llvmlite") if name in sys.modules]


def requests(engine: Engine) -> Iterator[Request]:
    """One of each kind; each repeats a prompt that drafts are accepted from."""
    ids = tuple([5, 6, 7, 8, 9, 10] * 8)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    sampled = replace(greedy, temperature=0.9, seed=7)
    drafts = SpeculationParams("auto", 8, learn_tokens=1000)
    plain = Request("plain", "t", engine.info.name, ids, greedy)
    yield plain
    for name, sampling in {
        "sampled": sampled,
        "nucleus": replace(sampled, top_p=0.8, top_k=9, min_p=0.01),
        "penalties": replace(greedy, presence_penalty=0.5, repetition_penalty=1.2),
        "biased": replace(sampled, logit_bias=((3, 1.0),), allowed_token_ids=(3, 4, 5)),
        "logprobs": replace(greedy, num_logprobs=3),
        "chosen-logprobs": replace(sampled, num_logprobs=2, logprob_token_ids=(3, 4)),
        "min-tokens": replace(sampled, min_tokens=3, ignore_eos=False),
    }.items():
        yield replace(plain, request_id=name, sampling=sampling)
        yield replace(plain, request_id=f"{name}-drafts", sampling=sampling, speculation=drafts)
    yield replace(plain, request_id="choices", sampling=sampled, num_choices=3)
    yield replace(plain, request_id="echo", echo_logprobs=2)
    once = replace(greedy, max_tokens=0)
    yield replace(plain, request_id="labels", sampling=once, label_ids=(3, 4))
    grammar = GrammarSpec("regex", "[a-z ]+")
    bounded = replace(greedy, ignore_eos=False)
    yield replace(plain, request_id="grammar", sampling=bounded, grammar=grammar)
    warm = replace(sampled, ignore_eos=False)
    yield replace(plain, request_id="grammar-sampled", sampling=warm, grammar=grammar)


def run(engine: Engine, request: Request) -> None:
    """To its end. Raises AssertionError when it fails."""
    engine.submit(request)
    deltas = engine.take_deltas()
    while engine.num_open:
        wait_until(lambda: engine.has_work, told=lambda: request.request_id)  # for its grammar
        deltas += engine.step()
    failed = [d.error for d in deltas if d.finish_reason == "error"]
    assert not failed, (request.request_id, failed)


def main(folder: str, *forms: Any) -> None:
    """Write, as JSON, what of a compiler was imported for all of them, in each form of weights."""
    for weights in forms:
        config = ServerConfig(models=(ModelConfig(name="m", path=folder, weights=weights),))
        engine = build_engine(plan_server(config, {}, {"m": Path(folder)}).orders[0])
        for request in requests(engine):
            run(engine, request)
            assert not compilers(), (weights, request.request_id)
        engine.close()
    sys.stdout.write(json.dumps(compilers()) + "\n")


def test_every_kind_of_request_is_served_without_a_compiler(
    own_cache: Path, tiny_folder: Path
) -> None:
    open_model(tiny_folder, remembers=True).ropes(256)  # transformers has been asked, here
    make_ready()
    told = run_python("-m", "tests.setup.test_first_requests", tiny_folder, "float32", "int8")
    assert json.loads(told.splitlines()[-1]) == []


if __name__ == "__main__":
    main(*sys.argv[1:])
