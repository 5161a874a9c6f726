"""loadtest.speedup: pairs over a scripted server, figures from counts, a sitting that goes on."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from rich.progress import Progress

from loadtest import speedup
from loadtest import speedup_figures as figures
from loadtest.completion import Timing
from loadtest.peer import CpuMeter, Peer
from loadtest.prompts import Example
from loadtest.task_sets import SETS, Places, examples_of, prepare, train_prompts
from tests.loadtest.scripted_server import ScriptedServer

EXAMPLES = [Example("alpha", f"alpha-{i}", f"alpha {i}", "") for i in range(8)]


def measure(server: ScriptedServer, peers: list[Peer], pairs: int = 3) -> figures.Sitting:
    tailor = Peer("tailor", "x.sh", "tailor", url=server.url)
    variants = speedup.variants_of(tailor, SETS["squad"], warm=True)

    async def run() -> figures.Sitting:
        async with httpx.AsyncClient() as client:
            with Progress(console=Console(quiet=True)) as progress:
                return await speedup.measure_set(
                    client, SETS["squad"], variants, peers, CpuMeter([]), EXAMPLES,
                    speedup.Amounts(pairs, 2, 1, max_tokens=12), progress,
                )  # fmt: skip

    return asyncio.run(run())


def test_pairs_ask_the_same_prompts_once_and_find_the_ratio() -> None:
    with (
        ScriptedServer(pace_s=0.006, tokens_per_chunk=4) as server,
        ScriptedServer(pace_s=0.006, tokens_per_chunk=2, running_usage=True) as other,
    ):
        peer = Peer("llamacpp-mod", other.url, "llamacpp", "m", url=other.url)
        sitting = measure(server, [peer])
    found = figures.figures_of(sitting, ["off", "cold", "warm"], ["llamacpp-mod"])
    assert found["num_requests"] == 6 and found["num_different"] == 0
    own = found["variants"]["warm"]
    assert (own["tokens"], own["steps"], own["drafted_tokens"]) == (72, 18, 54)
    assert own["tokens_per_step"] == 4.0 and own["nodes_per_step"] == 3.0
    assert own["rows_per_token"] == 1.0 and found["variants"]["off"]["rows_per_token"] == 1.0
    ratios = found["ratios"]["cold"]
    assert ratios["end_to_end"]["num_pairs"] == 3
    assert 1.5 < ratios["end_to_end"]["median"] < 8.0  # 4, but for a busy machine
    assert 1.5 < ratios["total"] < 8.0
    beside = found["peers"]["llamacpp-mod"]
    assert (beside["num_rounds"], beside["num_texts"], beside["same_text"]) == (1, 2, 2)
    assert beside["ratio"]["warm"]["median"] > 1.1  # 2
    # The first example warms up; no prompt of a pair comes back, and each variant has its task.
    for task, off in (("squad-cold", True), ("squad-cold", False), ("squad-warm", False)):
        asked = [
            body["prompt"]
            for body in server.bodies
            if body["model"] == task and ("speculation" in body) == off
        ]
        assert asked == [f"alpha {i}" for i in range(7)]
    assert len({body["cache_salt"] for body in server.bodies}) == len(server.bodies)
    assert [b["prompt"] for b in other.bodies] == ["alpha 0", "alpha 5", "alpha 6"]


def test_a_learner_has_answered_train_prompts_under_the_salt_that_it_is_measured_with(
    tmp_path: Path,
) -> None:
    (tmp_path / "squad").mkdir()
    lines = [json.dumps({"id": i, "prompt": f"train {i}"}) + "\n" for i in range(9)]
    (tmp_path / "squad" / "train.jsonl").write_text("".join(lines))
    prompts = train_prompts(tmp_path, SETS["squad"], 7)
    assert prompts == [f"train {i}" for i in range(7)]
    assert train_prompts(tmp_path, SETS["squad"], 20) == [f"train {i}" for i in range(9)]
    assert train_prompts(tmp_path, SETS["spec_bench-rag"], 7) == []
    with ScriptedServer(tokens_per_chunk=4) as server:
        tailor = Peer("tailor", "x.sh", "tailor", url=server.url)
        variants = speedup.variants_of(tailor, SETS["squad"], warm=False, learned=True)
        assert [variant.name for variant in variants] == ["off", "cold", "learned"]

        async def run() -> figures.Sitting:
            async with httpx.AsyncClient() as client:
                told = argparse.Namespace(data=tmp_path, learned=7, tokens=12)
                await speedup.teach(client, variants, told, SETS["squad"])
                with Progress(console=Console(quiet=True)) as progress:
                    return await speedup.measure_set(
                        client, SETS["squad"], variants, [], CpuMeter([]), EXAMPLES,
                        speedup.Amounts(2, 2, 0, max_tokens=12), progress,
                    )  # fmt: skip

        sitting = asyncio.run(run())
        own = [body for body in server.bodies if body["model"] == "squad-learned"]
    assert sorted(body["prompt"] for body in own[:7]) == prompts
    assert len(own) == 7 + 1 + 4 and len({body["cache_salt"] for body in own}) == 1
    names = [variant.name for variant in variants]
    found = figures.figures_of(sitting, names, [])
    assert found["ratios"]["learned"]["end_to_end"]["num_pairs"] == 2
    # Told beside the others; nobody forecasts what was learned.
    row = {
        **found,
        "set": "squad",
        "peers": {},
        "forecast": {"cold": {"speedup": 1.0, "tokens_per_step": 2.0}},
    }
    _, rows = figures.table_cells({"squad": row})
    assert [cells[1] for cells in rows] == ["cold", "learned"] and rows[1][8:10] == ["-", "-"]
    assert figures.summary_of({"squad": row})["learned"]["below_forecast"] == []


def test_an_answer_that_ends_at_once_is_one_token() -> None:
    with (
        ScriptedServer(tokens_per_chunk=4) as server,
        ScriptedServer(answer=lambda body: []) as other,
    ):
        peer = Peer("openvino", other.url, "transformers", "m", url=other.url)
        sitting = measure(server, [peer], pairs=1)
    beside = figures.figures_of(sitting, ["off", "cold", "warm"], ["openvino"])["peers"]["openvino"]
    assert beside["tokens_per_s"] > 0 and beside["same_text"] == 0
    assert [a.timing.num_tokens for a in sitting.answers["openvino"][0]] == [1, 1]


def sitting_of(ids: list[int]) -> figures.Sitting:
    sitting = figures.Sitting()
    for name, own in (("off", [1, 2, 3]), ("cold", ids)):
        timing = Timing(
            start_s=0.0, end_s=1.0, chunk_s=[0.5, 1.0], chunk_tokens=[1, 2], token_ids=own,
            num_tokens=3, num_prompt_tokens=4, prompt_token_ids=[1, 2, 3, 1],
        )  # fmt: skip
        sitting.book(name, 0, figures.Answer(timing, 0.3))
    return sitting


def test_a_different_text_is_counted() -> None:
    same = figures.figures_of(sitting_of([1, 2, 3]), ["off", "cold"], [])
    other = figures.figures_of(sitting_of([1, 2, 4]), ["off", "cold"], [])
    assert (same["num_different"], other["num_different"]) == (0, 1)
    assert same["variants"]["off"]["cpu_s_per_token"] == pytest.approx(0.1)


def test_the_forecast_replays_the_recorded_text_with_the_servers_costs() -> None:
    sitting = figures.Sitting()
    for i in range(6):
        prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13 + i]
        timing = Timing(
            start_s=0.0, end_s=1.0, chunk_s=[0.5], chunk_tokens=[8], num_tokens=8,
            token_ids=prompt[:8], prompt_token_ids=prompt,
        )  # fmt: skip
        for name in ("off", "cold"):
            sitting.book(name, i, figures.Answer(timing, 0.1))
    cheap = {"rows": [1, 64], "seconds": [0.01, 0.011], "key_s": 0.0}
    dear = {"rows": [1, 64], "seconds": [0.01, 0.64], "key_s": 0.0}
    found = figures.forecasts_of(sitting, ["off", "cold"], cheap, None, 8)["cold"]
    assert found["tokens_per_step"] > 1.5 and found["speedup"] > 1.3
    none = figures.forecasts_of(sitting, ["off", "cold"], dear, None, 8)["cold"]
    assert none["nodes_per_step"] < found["nodes_per_step"]
    assert none["speedup"] < found["speedup"]


def line(name: str, low: float, total: float, forecast: float) -> dict[str, Any]:
    bound = {"median": total, "low": low, "high": 2.0, "num_pairs": 10}
    row = {"tokens_per_step": 2.0, "rows_per_token": 1.5, "nodes_per_step": 2.0}
    return {
        "set": name,
        "num_different": 0,
        "foreign_cores": 0.0,
        "variants": {"cold": row},
        "ratios": {"cold": {"end_to_end": bound, "decode": bound, "total": total, "cpu": 1.2}},
        "forecast": {"cold": {"speedup": forecast, "tokens_per_step": 2.1}},
        "peers": {},
    }


def test_a_finished_sitting_is_only_told_and_names_what_misses_a_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("squad", "gsm8k", "bfcl"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test.jsonl").write_text('{"id": 1, "prompt": "a"}\n' * 3)
    out = tmp_path / "out.jsonl"
    lines = [line("squad", 1.1, 1.5, 1.6), line("gsm8k", 0.93, 1.0, 1.2), line("bfcl", 1, 2.0, 2)]
    out.write_text("".join(json.dumps(row) + "\n" for row in lines))
    status = speedup.main(
        ["--data", str(tmp_path), "--work", str(tmp_path / "w"), "--out", str(out),
         "--sets", "squad,gsm8k,bfcl", "--max-load", "0"]
    )  # fmt: skip
    printed = capsys.readouterr().out
    result = json.loads(printed.strip().splitlines()[-1])
    assert status == 0
    assert result["cold"]["median_speedup"] == 1.5
    assert result["cold"]["slower_than_off"] == ["gsm8k"]
    assert result["cold"]["below_forecast"] == ["gsm8k"]
    assert "| squad | cold | 1.50 (1.10-2.00) |" in printed
    assert not (tmp_path / "w").exists()


def test_a_category_is_a_set_of_its_own_and_has_no_warm_task(tmp_path: Path) -> None:
    folder = tmp_path / "spec_bench"
    folder.mkdir()
    (folder / "test.jsonl").write_text(
        "".join(
            json.dumps(
                {"id": i, "prompt": f"p{i}", "category": "rag" if i % 2 else "summarization"}
            )
            + "\n"
            for i in range(6)
        )
    )
    rag = SETS["spec_bench-rag"]
    assert [example.prompt for example in examples_of(tmp_path, rag)] == ["p1", "p3", "p5"]
    work = tmp_path / "work"
    corpora = prepare(
        [rag], Places(tmp_path, tmp_path, work), model="none", num_train=4,
        max_tokens=8, max_nodes=16, tell=print,
    )  # fmt: skip
    assert corpora == {}
    assert sorted(p.name for p in (work / "tasks/base").iterdir()) == [
        "spec_bench-rag-cold.yaml",
        "spec_bench-rag-learned.yaml",
    ]
    from server.config import load_task

    assert load_task(work / "tasks/base/spec_bench-rag-cold.yaml").speculation.drafter == "auto"
