"""loadtest.load end to end, against scripted servers: figures, verdicts, exit codes, JSON line."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest import cells, figures, load
from loadtest.peer import CpuMeter, Timing, request_body, stream
from tests.json_lines import write_lines
from tests.loadtest.conftest import Ended
from tests.loadtest.scripted_server import WORDS, ScriptedServer

IDLE = ["--max-load", "1e9"]
FIXED = ["--prompts", "plain,copy", *IDLE]


def test_one_stream_finds_the_ratio_and_the_different_text(ended: Ended, tmp_path: Path) -> None:
    def other(body: dict[str, Any]) -> list[str]:
        words = (WORDS * 8)[: body["max_tokens"]]
        return words if "Brennick" in body["prompt"] else [*words[:3], " SIX", *words[4:]]

    with (
        ScriptedServer(pace_s=0.004) as fast,
        ScriptedServer(pace_s=0.04, running_usage=False, answer=other) as slow,
    ):
        result = ended(
            load.main, "--server", f"tailor={fast.url}", "--server", f"llamacpp={slow.url}",
            "--rounds", 3, "--warmups", 2, "--tokens", 8, "--pause", 0,
            "--json", tmp_path / "out.jsonl", *FIXED,
        )  # fmt: skip
    rows = result["figures"]["1 clients"]
    against = rows["llamacpp"]["data_sets"]["plain"]["ratios"]
    found = against["decode_tokens_per_s"]
    assert found["num"] == 3
    assert 0.05 < found["median"] < 0.83  # a tenth, but for a busy machine
    assert against["ttft_s"]["median"] > 1.0
    assert rows["tailor"]["num_runs"] == 6 and rows["tailor"]["num_tokens"] == [8]
    speed = rows["tailor"]["data_sets"]["plain"]["decode_tokens_per_s"]["p50"]
    assert 10 < speed < 260  # at least 4 ms a token
    texts = rows["llamacpp"]["same_text"]
    assert (texts["num_compared"], texts["num_same"]) == (6, 3) and rows["tailor"]["ratios"] == {}
    where = texts["first_difference"]
    assert (where["prompt"], where["at"], where["text"][:8]) == ("copy", 14, "SIX five")
    assert result["servers"]["tailor"]["version"] == "1.2.3"
    assert {"cpu", "cores", "commit", "versions"} <= set(result["machine"])
    assert json.loads((tmp_path / "out.jsonl").read_text()) == result
    # Two prompts, four rounds, one request at a time, the same prompt to both, a new salt each.
    for server in (fast, slow):
        assert (len(server.bodies), server.most_open) == (8, 1)
    salts = [body["cache_salt"] for body in fast.bodies]
    assert len(set(salts)) == 8
    assert all(body["cache_prompt"] is False for body in slow.bodies)
    prompts = [sorted({body["prompt"] for body in server.bodies}) for server in (fast, slow)]
    assert prompts[0] == prompts[1]


def test_tokens_after_the_first_chunk_are_counted_and_not_chunks() -> None:
    timing = Timing(
        start_s=0.0, end_s=2.0, chunk_s=[1.0, 1.5, 2.0], chunk_tokens=[4, 4, 2], num_tokens=10
    )
    assert timing.ttft_s == 1.0
    assert timing.decode_tokens_per_s == 6.0
    assert timing.end_to_end_tokens_per_s == 5.0
    assert timing.tpot_s == pytest.approx(1 / 6)
    one = Timing(start_s=0.0, end_s=1.0, chunk_s=[1.0], chunk_tokens=[3], num_tokens=3)
    assert one.decode_tokens_per_s is None and one.tpot_s is None


@pytest.mark.parametrize(("running_usage", "told"), [(True, [4, 4, 2]), (False, [1, 1, 1])])
async def test_a_stream_counts_the_tokens_of_a_chunk(running_usage: bool, told: list[int]) -> None:
    """By its running usage; without one a chunk is a token, and the last usage says how many."""
    with ScriptedServer(pace_s=0.0, tokens_per_chunk=4, running_usage=running_usage) as server:
        body = request_body("tailor", "m", "x", max_tokens=10, salt="s")
        async with httpx.AsyncClient() as client:
            timing = await stream(client, server.url, body)
    assert (timing.chunk_tokens, timing.num_tokens) == (told, 10)


def test_a_cell_that_others_disturbed_is_run_again(
    ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Others' CPU seconds at both ends of each stream: far too much, too much, too much, none.
    readings = iter([0.0, 100.0, 100.0, 110.0, 110.0, 130.0, 200.0, 200.0])
    monkeypatch.setattr(CpuMeter, "read", lambda self, peer: (None, next(readings)))
    with ScriptedServer(pace_s=0.001) as server:
        arguments = ["--server", f"tailor={server.url}", "--rounds", "2", "--warmups", "0",
                     "--tokens", "4", "--prompts", "copy", "--pause", "0", *IDLE]  # fmt: skip
        result = ended(load.main, *arguments, "--tries", 3, "--max-foreign", 0.1)
    row = result["figures"]["1 clients"]["tailor"]
    assert len(server.bodies) == 4  # three tries, none quiet; then a quiet first one
    assert len({body["cache_salt"] for body in server.bodies}) == 4
    assert row["num_runs"] == 2
    assert row["worst_foreign_cores"] > 10  # the least disturbed of the three is kept, and told


def test_it_keeps_what_it_has_when_interrupted(ended: Ended) -> None:
    def answer(body: dict[str, Any]) -> list[str]:
        if len(server.bodies) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        return WORDS[: body["max_tokens"]]

    before = signal.getsignal(signal.SIGTERM)
    try:
        with ScriptedServer(answer=answer) as server:
            arguments = ["--server", f"tailor={server.url}", "--rounds", "5", "--warmups", "0",
                         "--tokens", "4", "--prompts", "copy", *IDLE]  # fmt: skip
            result = ended(load.main, *arguments)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result["complete"] is False
    assert result["figures"]["1 clients"]["tailor"]["num_runs"] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--server", "nonsense", "--prompts", "copy"],
        ["--server", "a=http://x", "--prompts", "copy", "--rounds", "0"],
        ["--server", "a=http://x", "--prompts", "copy", "--requests", "0"],
        ["--server", "a=http://x", "--prompts", "none"],
        ["--server", "a=http://x", "--prompts", "copy", "--mix", "squad"],
        ["--server", "a=http://x", "--mix", "squad", "--concurrency", "1"],
        ["--server", "a=http://x", "--concurrency", "1"],
        ["--server", "a=http://x", *FIXED, "--max-load", "-1"],
        *(["--server", "a=http://x", *FIXED, "--rate", rate] for rate in ("0%", "x%", "-3")),
    ],
)
def test_it_refuses_bad_arguments(arguments: list[str]) -> None:
    assert load.main(arguments) == 2


def test_distinct_prompts_go_all_at_once(ended: Ended) -> None:
    with ScriptedServer(pace_s=0.005) as server:
        result = ended(
            load.main, "--server", f"tailor={server.url}", "--prompts", "distinct",
            "--concurrency", 4, "--rounds", 2, "--tokens", 8, "--warmups", 4, *IDLE,
        )  # fmt: skip
    row = result["figures"]["4 clients"]["tailor"]
    assert server.most_open == 4
    assert row["num_tokens"] == [8]
    assert row["num_runs"] == 8 and 0 < row["slowest_share"] <= 1 and row["worst_silence_s"] > 0
    assert len({body["prompt"] for body in server.bodies}) == 4
    assert 10 < row["tokens_per_s"] < 850  # 32 tokens in 8 x 5 ms


def load_args(urls: list[str], data_dir: Path, *more: str) -> list[str]:
    servers = [item for i, url in enumerate(urls) for item in ("--server", f"tailor-{i}={url}")]
    usual = {"--mix": "alpha=3,beta", "--requests": "4", "--rounds": "2", "--tokens": "6",
             "--pause": "0"}  # fmt: skip
    rest = [word for item in usual.items() if item[0] not in more for word in item]
    return [*servers, "--data", str(data_dir), "--warmups", "0", *rest, *IDLE, *more]


def test_load_closed_and_open_loop(ended: Ended, data_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    with ScriptedServer(pace_s=0.004) as fast, ScriptedServer(pace_s=0.2) as slow:
        arguments = load_args(
            [slow.url, fast.url], data_dir, "--concurrency", "2", "--rate", "100",
            "--slo", "ttft=0.195,e2e=10", "--tokens", "2", "--rounds", "1", "--html", str(file),
        )  # fmt: skip
        result = ended(load.main, *arguments)
    rows = result["figures"]["2 clients"]
    assert fast.most_open <= 4
    assert rows["tailor-1"]["num_requests"] == 4 and rows["tailor-1"]["num_failed"] == 0
    assert rows["tailor-1"]["tokens_per_step"] == 1.0  # it was asked for its speculation
    assert 1.1 < rows["tailor-1"]["ratios"]["tokens_per_s"]["median"] < 50
    # The slow one's first chunk comes after 200 ms: none of its requests can be good.
    assert rows["tailor-0"]["good_share"] == 0.0
    assert rows["tailor-1"]["good_share"] > 0.0
    assert "100 req/s" in result["figures"]
    page = file.read_text(encoding="utf-8")
    assert "2 clients" in page and "TTFT" in page and "commit" in page
    assert "http://" not in page.replace("http://www.w3.org", "")  # it asks nobody for anything


def test_load_at_shares_of_the_capacity(ended: Ended, data_dir: Path) -> None:
    with ScriptedServer(pace_s=0.01) as base, ScriptedServer(pace_s=0.01) as other:
        arguments = load_args([base.url, other.url], data_dir, "--rate", "50%,200%")
        result = ended(load.main, *arguments, "--capacity-clients", 2)
        num_asked = len(base.bodies), len(other.bodies)
    half, twice = result["rates"]["50% of capacity"], result["rates"]["200% of capacity"]
    # Two clients, answers of six chunks and 60 ms: at most 33 requests a second.
    assert 0.5 < half < 17.0 and twice == pytest.approx(4 * half)
    assert num_asked == (4 * 2 * 3, 4 * 2 * 2), "only the first server's capacity is measured"
    row = result["figures"]["50% of capacity"]["tailor-1"]
    assert row["num_requests"] == 8
    for name in ("ttft_s", "ttft_p95_s", "tokens_per_s", "e2e_s"):
        assert row["ratios"][name]["num"] == 2, name


def test_load_books_failures_and_exits_1(
    capsys: pytest.CaptureFixture[str], data_dir: Path
) -> None:
    with ScriptedServer(status=429) as server:
        assert load.main(load_args([server.url], data_dir, "--concurrency", "1")) == 1
    told = capsys.readouterr()
    assert "HTTP 429" in told.err
    row = json.loads(told.out.splitlines()[-1])["figures"]["1 clients"]["tailor-0"]
    assert row["num_failed"] == 8 and "HTTP 429" in row["failures"][0]
    assert row["ttft_s"] is None and row["good_share"] == 0.0


def test_arrivals_are_poisson_and_repeatable() -> None:
    times = cells.arrival_times(4000, 50.0, 3)
    assert times == cells.arrival_times(4000, 50.0, 3)
    assert times != cells.arrival_times(4000, 50.0, 4)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert min(gaps) >= 0
    assert times[-1] == pytest.approx(80.0, rel=0.08)  # sd of the mean gap: 1.6 %
    # Exponential gaps: 1 - exp(-1) = 63.2 % are below the mean (sd 0.8 %).
    assert sum(gap < 0.02 for gap in gaps) / 4000 == pytest.approx(0.632, abs=0.04)


def test_lateness_counts_against_the_objective() -> None:
    timing = Timing(start_s=5.0, end_s=6.0, chunk_s=[5.1], chunk_tokens=[1], num_tokens=1)
    assert figures.meets_slo(timing, 0.0, {"ttft": 0.2, "tpot": 0.001, "e2e": 1.5})
    assert not figures.meets_slo(timing, 0.15, {"ttft": 0.2})
    assert not figures.meets_slo(timing, 0.6, {"e2e": 1.5})


def test_load_counts_each_data_set_and_every_ratio(ended: Ended, data_dir: Path) -> None:
    # Far apart, so that a busy machine does not make them equal.
    with ScriptedServer(pace_s=0.0) as fast, ScriptedServer(pace_s=0.06) as slow:
        urls = [slow.url, fast.url]
        arguments = load_args(urls, data_dir, "--concurrency", "2", "--tokens", "3")
        result = ended(load.main, *arguments, "--as", "alpha=extraction")
    row = result["figures"]["2 clients"]["tailor-1"]
    sent = [body["prompt"].split()[0] for body in fast.bodies]
    assert {name: part["num_requests"] for name, part in row["data_sets"].items()} == {
        name: sent.count(name) for name in ("alpha", "beta")
    }
    models = {body["prompt"].split()[0]: body["model"] for body in fast.bodies}
    assert models == {"alpha": "extraction", "beta": "scripted-model"}
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        found = row["ratios"][name]
        assert found["num"] == 2 and found["median"] < 0.9, name
    for name in ("tokens_per_s", "goodput_per_s", "ttft_s", "ttft_p99_s"):
        told = row["rounds"][name]
        assert told["num"] == 2 and 0 < told["low"] <= told["median"] <= told["high"]


def test_tasks_are_refused_where_no_server_is_tailor(
    capsys: pytest.CaptureFixture[str], data_dir: Path
) -> None:
    with ScriptedServer() as server:
        arguments = load_args([], data_dir, "--concurrency", "1", "--server", f"mine={server.url}")
        assert load.main([*arguments, "--as", "alpha=extraction"]) == 2
        assert not server.bodies and load.main(arguments) == 0
    assert "none of these servers is Tailor" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["ttfb=1", "ttft=0", "ttft=x", "ttft=nan"])
def test_bad_objectives_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        figures.parse_slo(text)


def test_answers_are_judged_by_the_completions_of_the_data(ended: Ended, data_dir: Path) -> None:
    lines = [{"prompt": f"alpha {i}", "completion": "one two" + " six" * (i % 2)} for i in range(4)]
    write_lines(data_dir / "alpha" / "test.jsonl", lines)
    with ScriptedServer() as server, ScriptedServer(answer=lambda _: ["one  two"]) as shorter:
        urls, more = [server.url, shorter.url], ("--mix", "alpha", "--tokens", "2")
        result = ended(load.main, *load_args(urls, data_dir, "--concurrency", "1", *more))
    rows = result["figures"]["1 clients"]
    for row in rows.values():
        quality = row["data_sets"]["alpha"]["quality"]
        assert quality["exact"]["mean"] == 0.5 and quality["exact"]["num"] == 8
        assert quality["f1"]["mean"] == pytest.approx((1 + 0.8) / 2)
    # The same text in half the tokens: as much text a second, or more.
    for name, chars in (("tailor-0", 3.5), ("tailor-1", 8.0)):
        row = rows[name]
        assert row["chars_per_s"] / row["tokens_per_s"] == pytest.approx(chars)
