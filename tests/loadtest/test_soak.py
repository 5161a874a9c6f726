"""The soak: its mix is valid, its sums are the server's, and each check can fail."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from loadtest import soak, soak_traffic
from loadtest.soak_traffic import COUNTED, CUT, KEPT, Options, Reading, Tally
from server.api import protocol
from server.api.chat_protocol import ChatBody
from server.api.decision_body import DecisionBody
from server.api.engines.slot import EngineSpec
from server.config import TaskConfig
from server.engine.host import start_thread
from tests.api.chat_models import TOKENIZER, served
from tests.api.live import LiveServer
from tests.api.test_chat_end_to_end import make_engine

PAGE = "".join(f'{name}{{drafter="suffix",task="{KEPT}"}} 7.0\n' for name in COUNTED)
IDLE = {"kv_cache_usage": 0.0, "running": 0.0, "waiting": 0.0, "open": 0, "restarts": 0}


def good() -> tuple[Tally, dict[str, Any], list[str]]:
    tally = Tally()
    tally.usage.update(dict.fromkeys(COUNTED.values(), 7))
    tally.readings = [Reading(float(i), 500.0 + i % 3, 40, 12) for i in range(40)]
    return tally, {**IDLE, "page": PAGE}, []


def verdict(tally: Tally, left: dict[str, Any], errors: list[str]) -> dict[str, Any]:
    return soak.judge(tally, left, errors, slack_mib=32.0, share=0.02)


def test_all_well_passes() -> None:
    result = verdict(*good())
    assert result["passed"] and all(result["checks"].values())


@pytest.mark.parametrize(
    "check",
    ["memory", "handles", "threads", "blocks", "idle", "restarts", "counters", "answers", "log"],
)
def test_each_check_can_fail(check: str) -> None:
    tally, left, errors = good()
    grown = {
        "memory": lambda i: Reading(float(i), 500.0 + 2 * i, 40, 12),
        "handles": lambda i: Reading(float(i), 500.0, 40 + i, 12),
        "threads": lambda i: Reading(float(i), 500.0, 40, 12 + i),
    }
    if check in grown:
        tally.readings = [grown[check](i) for i in range(40)]
    elif check == "counters":
        tally.usage["completion_tokens"] -= 1
    elif check == "answers":
        tally.unexpected.append("whole: 500")
    elif check == "log":
        errors.append("a line")
    else:
        left[{"blocks": "kv_cache_usage", "idle": "open", "restarts": "restarts"}[check]] = 1
    result = verdict(tally, left, errors)
    assert not result["passed"]
    assert [name for name, well in result["checks"].items() if not well] == [check]


def test_series_are_summed_by_label() -> None:
    page = 'a_total{task="x",b="1"} 2\na_total{task="x",b="2"} 3.5\na_total{task="y"} 1\nb 4\n'
    assert soak.metric(page, "a_total", task="x") == 5.5
    assert soak.metric(page, "a_total") == 6.5
    assert soak.metric(page, "b") == 4.0 and soak.metric(page, "c") == 0.0


def test_every_request_of_the_mix_is_valid() -> None:
    rng = random.Random(3)
    for _ in range(300):
        body = soak_traffic.make_body(rng, 32, ("off", "suffix"))
        protocol.validate(protocol.CompletionBody, body)
        protocol.validate(ChatBody, soak_traffic.make_chat(body, rng))
        protocol.validate(DecisionBody, soak_traffic.make_decision(rng))


def test_counters_of_a_real_engine_equal_the_usage_of_what_was_kept(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(TOKENIZER.to_str(), encoding="utf-8")
    factory = partial(start_thread, partial(make_engine, file), name="e", device="cpu")
    engines = [EngineSpec("e", "hermes", "cpu", factory)]
    tasks = {name: TaskConfig(name=name) for name in (KEPT, CUT)}
    options = Options(0.1, 4, 0.3, 12, ("off", "suffix"), 1)
    tally = Tally()
    with LiveServer(engines, tasks=tasks, models={"hermes": served("hermes")}) as live:

        class Here:
            url = live.url

            def read(self, began_s: float) -> Reading:
                return Reading(0.0, 100.0, 10, 5)

        server: Any = Here()
        # The tests' tokenizer makes long prompts longer than its context.
        with pytest.MonkeyPatch.context() as patch, Progress(console=Console(quiet=True)) as bar:
            patch.setattr(soak_traffic, "PLAIN", "the cat. a dog. over it. the fox")
            asyncio.run(soak.load(server, options, tally, bar))
        left = asyncio.run(soak.settle(server))
        result = verdict(tally, left, [])
    assert result["passed"], result
    assert tally.usage["completion_tokens"] > 0 and tally.outcomes["unexpected"] == 0
    assert {"whole", "stream", "left", "decision"} <= set(tally.outcomes)


@pytest.mark.parametrize(
    "words", [["--minutes", "0"], ["--abort-share", "1"], ["--clients", "0"], ["--frob"]]
)
def test_wrong_options_exit_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        soak.main(words)
    assert ended.value.code == 2
