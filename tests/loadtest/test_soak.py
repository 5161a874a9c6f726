"""The soak: its mix is valid, its sums are the server's, and each check can fail."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import psutil
import pytest
from rich.console import Console
from rich.progress import Progress

from server.api.bodies import validate
from server.api.faces.chat import ChatBody
from server.api.faces.completions import CompletionBody
from server.api.faces.decisions import DecisionBody
from server.config import TaskConfig
from tests import soak
from tests.api.chat_models import chat_spec, served
from tests.api.live import LiveServer
from tests.soak import COUNTED, KEPT, LEFT, Reading, SoakOptions, Tally

PAGE = "".join(f'{name}{{drafter="suffix",task="{KEPT}"}} 7.0\n' for name in COUNTED)
IDLE = {"kv_cache_usage": 0.0, "running": 0.0, "waiting": 0.0, "open": 0, "restarts": 0}


def good() -> tuple[Tally, dict[str, Any], list[str]]:
    tally = Tally()
    tally.usage.update(dict.fromkeys(COUNTED.values(), 7))
    tally.readings = [Reading(500.0 + i % 3, 40, 12) for i in range(40)]
    return tally, {**IDLE, "page": PAGE}, []


def verdict(tally: Tally, left: dict[str, Any], errors: list[str]) -> dict[str, Any]:
    return soak.judge(tally, left, errors, slack_mib=32.0)


@pytest.mark.parametrize(
    "check",
    ["memory", "handles", "threads", "blocks", "idle", "restarts", "counters", "answers", "log"],
)
def test_each_check_can_fail(check: str) -> None:
    tally, left, errors = good()
    grown = {
        "memory": lambda i: Reading(500.0 + 2 * i, 40, 12),
        "handles": lambda i: Reading(500.0, 40 + i, 12),
        "threads": lambda i: Reading(500.0, 40, 12 + i),
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


def test_every_request_of_the_mix_is_valid() -> None:
    rng = random.Random(3)
    for _ in range(300):
        body = soak.make_body(rng, 32, ("off", "suffix"))
        validate(CompletionBody, body)
        validate(ChatBody, soak.make_chat(body, rng))
        validate(DecisionBody, soak.make_decision(rng))


def test_counters_of_a_real_engine_equal_the_usage_of_what_was_kept() -> None:
    tasks = {name: TaskConfig(name=name) for name in (KEPT, LEFT)}
    options = SoakOptions(minutes=0.03, clients=4, leave=0.3, tokens=12, drafters="off,suffix")
    tally = Tally()
    with LiveServer(
        [chat_spec("hermes")], tasks=tasks, models={"hermes": served("hermes")}
    ) as live:
        # The tests' tokenizer makes long prompts longer than its context.
        with pytest.MonkeyPatch.context() as patch, Progress(console=Console(quiet=True)) as bar:
            patch.setattr(soak, "PLAIN", "the cat. a dog. over it. the fox")
            patch.setattr(soak, "read_processes", lambda _: Reading(100.0, 10, 5))
            asyncio.run(soak.send_all(live.url, psutil.Process(), options, tally, bar))
        left = asyncio.run(soak.settle(live.url))
        result = verdict(tally, left, [])
    assert result["passed"], result
    assert tally.usage["completion_tokens"] > 0 and tally.outcomes["unexpected"] == 0
    assert {"whole", "stream", "left", "decision"} <= set(tally.outcomes)


def test_what_is_no_info_in_a_log_is_an_error() -> None:
    log = '{"level": "info"}\nTailor 1.0 ready on http://x\n{"level": "error"}\nTraceback\n\n'
    assert soak.log_errors(log) == ['{"level": "error"}', "Traceback"]


@pytest.mark.parametrize(
    "words", [["--minutes", "0"], ["--leave", "1"], ["--clients", "0"], ["--frob"]]
)
def test_wrong_options_exit_with_2(words: list[str]) -> None:
    assert soak.main(words) == 2
