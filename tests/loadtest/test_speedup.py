"""loadtest.speedup: rounds over a scripted server, figures from counts, a sitting that goes on."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loadtest import speedup
from loadtest.peer import Peer
from loadtest.prompts import SETS, Example, Places, examples_of, prepare, train_prompts
from tests.json_lines import write_lines
from tests.loadtest.scripted_server import ScriptedServer

OPTIONS = speedup.SpeedupOptions(
    data=Path("x"), work=Path("x"), rounds=3, prompts=2, peer_rounds=1, tokens=12
)
EXAMPLES = [Example("alpha", f"alpha-{i}", f"alpha {i}", "") for i in range(8)]


def measure(
    server: ScriptedServer, peers: list[Peer], ways: str = "off,cold,warm",
    taught: tuple[str, ...] = (), **more: Any,
) -> dict[str, Any]:  # fmt: skip
    tailor = Peer("tailor", "x.sh", "tailor", url=server.url)
    variants = speedup.variants_of(tailor, SETS["squad"], ways.split(","))

    async def run() -> dict[str, Any]:
        if taught:
            await speedup.teach(variants[-1], taught, 12)
        options = replace(OPTIONS, **more)
        return await speedup.measure_set(variants, peers, EXAMPLES, options, Console(quiet=True))

    found = asyncio.run(run())["figures"]
    return found if "clients" in more else found["1 clients"]


def test_rounds_ask_the_same_prompts_once_and_find_the_ratio() -> None:
    with (
        ScriptedServer(pace_s=0.006, tokens_per_chunk=4) as server,
        ScriptedServer(pace_s=0.006, tokens_per_chunk=2, running_usage=True) as other,
    ):
        peer = Peer("llamacpp-mod", other.url, "llamacpp", "m", url=other.url)
        rows = measure(server, [peer])
    warm, off = rows["warm"], rows["off"]
    assert (warm["num_requests"], warm["tokens_per_step"], warm["nodes_per_step"]) == (6, 4, 3)
    assert off["tokens_per_step"] == 1.0 and off["ratios"] == {}
    assert warm["same_text"]["num_same"] == warm["same_text"]["num_compared"] == 6
    speed = rows["cold"]["ratios"]["tokens_per_s"]
    assert speed["num"] == 3 and 1.5 < speed["median"] < 8.0  # 4, but for a busy machine
    beside = rows["llamacpp-mod"]
    assert beside["num_requests"] == 2 and beside["same_text"]["num_same"] == 2
    assert beside["ratios"]["tokens_per_s"]["num"] == 1  # of the same, last round
    # The first example warms up; no prompt of a round comes back, and each way has its task.
    for task, drafter in (("squad-cold", "off"), ("squad-cold", None), ("squad-warm", None)):
        asked = [
            body["prompt"]
            for body in server.bodies
            if body["model"] == task and body.get("speculation", {}).get("drafter") == drafter
        ]
        assert sorted(set(asked)) == [f"alpha {i}" for i in range(7)]
        assert asked.count("alpha 0") == 2 and len(asked) == 8  # once before each kind of round
    assert len({body["cache_salt"] for body in server.bodies}) == len(server.bodies)
    assert [b["prompt"] for b in other.bodies] == ["alpha 0", "alpha 5", "alpha 6"]


def test_a_learner_has_answered_train_prompts_under_the_salt_that_it_is_measured_with(
    tmp_path: Path,
) -> None:
    lines = [{"id": i, "prompt": f"train {i}"} for i in range(9)]
    write_lines(tmp_path / "squad" / "train.jsonl", lines)
    prompts = train_prompts(tmp_path, SETS["squad"], 7)
    assert prompts == [f"train {i}" for i in range(7)]
    assert train_prompts(tmp_path, SETS["squad"], 20) == [f"train {i}" for i in range(9)]
    assert train_prompts(tmp_path, SETS["spec_bench-rag"], 7) == []
    with ScriptedServer(tokens_per_chunk=4) as server:
        rows = measure(server, [], "off,cold,learned", taught=tuple(prompts), rounds=2)
        own = [body for body in server.bodies if body["model"] == "squad-learned"]
    assert sorted(body["prompt"] for body in own[:7]) == prompts
    assert len(own) == 7 + 1 + 4 and len({body["cache_salt"] for body in own}) == 1
    assert rows["learned"]["ratios"]["tokens_per_s"]["num"] == 2


def test_several_clients_share_a_round() -> None:
    with ScriptedServer(pace_s=0.002) as server:
        levels = measure(server, [], "off,cold", rounds=2, prompts=1, clients="1,3")
    assert [rows["cold"]["num_requests"] for rows in levels.values()] == [2, 6]
    assert 2 <= server.most_open <= 3


def test_each_way_asks_for_its_part_of_the_vocabulary() -> None:
    with ScriptedServer() as server:
        measure(server, [], "off,slice,exact,exact-warm", rounds=1)
    asked = {
        (body["model"], body.get("speculation", {}).get("drafter"),
         body.get("vocabulary", {}).get("mode"))
        for body in server.bodies
    }  # fmt: skip
    assert asked == {
        ("squad-cold", "off", None), ("squad-cold", "off", "slice"),
        ("squad-cold", "off", "exact"), ("squad-warm", None, "exact"),
    }  # fmt: skip


def test_an_answer_that_ends_at_once_is_one_token() -> None:
    with (
        ScriptedServer(tokens_per_chunk=4) as server,
        ScriptedServer(answer=lambda body: []) as other,
    ):
        peer = Peer("transformers", other.url, "openai", "m", url=other.url)
        rows = measure(server, [peer], rounds=1)
    beside = rows["transformers"]
    assert beside["tokens_per_s"] > 0 and beside["num_tokens"] == [1]
    assert beside["same_text"]["num_same"] == 0


def line(name: str, low: float, median: float, same: int = 30) -> dict[str, Any]:
    bound = {"median": median, "low": low, "high": 2.0, "num": 10}
    texts = {"num_compared": 30, "num_same": same}
    row = {
        "tokens_per_s": 50.0, "tokens_per_step": 2.0, "nodes_per_step": 2.0, "same_text": texts,
        "ratios": {"tokens_per_s": bound, "ttft_s": bound, "cpu_s_per_1000": None},
    }  # fmt: skip
    off = row | {"ratios": {}, "same_text": None}
    figures = {"1 clients": {"off": off, "cold": row, "slice": row}}
    return {"set": name, "ways": ["off", "cold", "slice"], "figures": figures}


def test_a_finished_sitting_is_only_printed_and_names_what_is_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("squad", "gsm8k", "my-own"):
        write_lines(tmp_path / name / "test.jsonl", [{"id": 1, "prompt": "a"}] * 3)
    out = tmp_path / "out.jsonl"

    def run(lines: list[dict[str, Any]]) -> tuple[int, dict[str, Any], str]:
        write_lines(out, lines)
        status = speedup.main(
            ["--data", str(tmp_path), "--work", str(tmp_path / "w"), "--out", str(out),
             "--sets", "squad,gsm8k,my-own", "--max-load", "0"]
        )  # fmt: skip
        printed = capsys.readouterr().out
        return status, json.loads(printed.strip().splitlines()[-1]), printed

    lines = [line("squad", 1.1, 1.5), line("gsm8k", 0.93, 1.0), line("my-own", 1, 2.0)]
    status, result, printed = run(lines)
    cold = result["levels"]["1 clients"]["cold"]
    assert status == 0 and result["different_texts"] == 0
    assert cold["median"] == 1.5 and cold["slower_than_off"] == ["gsm8k"]
    assert "| squad | 1 | cold | 50.0 | 1.50 (1.10-2.00) |" in printed
    assert not (tmp_path / "w").exists()
    status, result, _ = run([*lines[:2], line("my-own", 1, 2.0, same=29)])
    assert status == 1 and result["different_texts"] == 1  # that of a slice may differ


@pytest.mark.parametrize(
    "words", [["--ways", "cold"], ["--ways", "off,fast"], ["--sets", "none"], ["--rounds", "0"]]
)
def test_what_cannot_be_measured_is_refused(words: list[str], tmp_path: Path) -> None:
    write_lines(tmp_path / "squad" / "test.jsonl", [{"prompt": "a"}] * 3)
    sets = [] if "--sets" in words else ["--sets", "squad"]
    given = ["--data", str(tmp_path), "--work", str(tmp_path / "w"), *sets, *words]
    assert speedup.main(given) == 2


def test_a_category_is_a_set_of_its_own_and_has_no_warm_task(tmp_path: Path) -> None:
    kinds = ("summarization", "rag")
    lines = [{"id": i, "prompt": f"p{i}", "category": kinds[i % 2]} for i in range(6)]
    write_lines(tmp_path / "spec_bench" / "test.jsonl", lines)
    rag = SETS["spec_bench-rag"]
    assert [example.prompt for example in examples_of(tmp_path, rag)] == ["p1", "p3", "p5"]
    work = tmp_path / "work"
    corpora = prepare(
        [rag], Places(tmp_path, tmp_path, work), ("cold", "warm", "mix", "trie"), model="none",
        num_train=4, max_tokens=8, max_nodes=16, profiles=False, report=print,
    )  # fmt: skip
    assert corpora == {}
    from server.config import load_task

    tasks = {path.stem: load_task(path) for path in (work / "tasks/base").iterdir()}
    drafters = {name: task.speculation.drafter for name, task in tasks.items()}
    assert drafters == {"spec_bench-rag-cold": "auto", "spec_bench-rag-trie": "trie"}
