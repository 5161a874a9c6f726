"""GET /dashboard and its data, rejected drafts in answers, and vLLM's names in /metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from server.api.dashboard import PAGE_PATHS, History, View
from server.api.keys import ApiKey
from server.config import KeyConfig, ServerConfig
from server.config.task import VocabularyConfig
from tests.api.live import LiveServer, as_key, encode
from tests.fakes.scripted_engine import ScriptedEngine, saying
from tests.monitoring.live_engine import monitored, suffix_task
from tests.waiting import wait_until

IDS = encode(" over the lazy dog. Once upon a time")


SLICE = VocabularyConfig(mode="exact", profile="half", verify_every=4)


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    config = ServerConfig.model_validate({"metrics": {"vllm_aliases": True}})
    tasks = {"tags": suffix_task("tags"), "slim": suffix_task("slim", vocabulary=SLICE)}
    with monitored(config=config, tasks=tasks) as server:
        yield server


# --- the page ---


def test_every_file_is_served_closed_against_everything_foreign(live: LiveServer) -> None:
    page = httpx.get(live.url + "/dashboard")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert "/dashboard/live.js" in PAGE_PATHS
    for path in PAGE_PATHS:
        answer = httpx.get(live.url + path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert httpx.head(live.url + path).headers["etag"] == answer.headers["etag"]
        again = httpx.get(live.url + path, headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304 and not again.content
        # No host is named but that of the SVG namespace, which nothing fetches.
        hosts = set(re.findall(r"https?://[^/\"'\s]+", answer.text))
        assert hosts <= {"http://www.w3.org"}, (path, hosts)
        assert not re.search(r"\bon[a-z]+=|style=|javascript:", answer.text), path


def test_the_root_leads_to_the_page(live: LiveServer) -> None:
    answer = httpx.get(live.url + "/", follow_redirects=True)
    assert answer.status_code == 200 and answer.url.path == "/dashboard"


def test_all_that_the_page_names_is_there(live: LiveServer) -> None:
    page = httpx.get(live.url + "/dashboard").text + httpx.get(live.url + "/docs").text
    wanted = set(re.findall(r'(?:href|src)="(dashboard/[^"]+)"', page))
    assert wanted >= {"dashboard/page.css", "dashboard/live.js", "dashboard/playground.js"}
    scripts = [path for path in PAGE_PATHS if path.endswith(".js")]
    for path in scripts:
        source = httpx.get(live.url + path).text
        wanted |= {f"dashboard/{name}" for name in re.findall(r'from "\./([^"]+)"', source)}
        ids = set(re.findall(r'byId\("([^"]+)"\)', source))
        assert ids <= set(re.findall(r'id="([^"]+)"', page)), path
    assert {f"/{name}" for name in wanted} <= set(PAGE_PATHS)
    for label in re.findall(r'<label for="([^"]+)"', page):
        assert f'id="{label}"' in page


def test_the_playground_stands_before_the_tables(live: LiveServer) -> None:
    page = httpx.get(live.url + "/dashboard", timeout=10).text
    places = [page.index(f'"{name}-title"') for name in ("now", "try", "time", "tasks", "drafts")]
    assert places == sorted(places)


def test_the_page_can_be_switched_off() -> None:
    config = ServerConfig.model_validate({"dashboard": {"enabled": False}})
    with LiveServer([ScriptedEngine(saying(IDS))], config=config) as off:
        for path in (*PAGE_PATHS, "/dashboard/data"):
            assert httpx.get(off.url + path).status_code == 404


# --- its data ---


def test_the_history_is_what_the_counters_were_and_each_key_sees_its_own() -> None:
    now = [0.0]
    figures: dict[str, Any] = {
        "drafts": [
            {"task": "a", "model": "m", "drafter": "auto", "tokens": 5.0, "steps": 2.0},
            {"task": "a", "model": "m", "drafter": "off", "tokens": 1.0, "steps": 1.0},
            {"task": "b", "model": "m", "drafter": "auto", "tokens": 7.0, "drafted": 4.0},
        ],
        "tasks": [{"task": "b", "model": "m", "outcomes": {"ok": 3.0}}],
        "slices": [],
        "engines": [{"running": 1.0, "steps": 9.0, "rows": {"draft": 3.0}}, {"rows": {}}],
        "num_open": 1,
        "open": [{"task": "a"}],
    }
    history = History(lambda: figures | {"now_s": now[0]})
    for moment in range(400):
        now[0] = 10.0 * moment
        history.take()
    points = history.since(-1.0, View())
    assert len(points) == 361 and points[-1]["now_s"] == 3990.0  # an hour
    assert points[-1] == {
        "now_s": 3990.0, "running": 1.0, "engine_steps": 9.0, "draft_rows": 3.0,
        "drafts": [("a", "m", 6.0, 3.0, 0.0, 0.0), ("b", "m", 7.0, 0.0, 4.0, 0.0)],
    }  # fmt: skip
    assert [p["now_s"] for p in history.since(3970.0, View())] == [3980.0, 3990.0]
    key = ApiKey.from_config(KeyConfig(id="k", key=SecretStr("sk-k"), tasks=("b",)))
    [last] = history.since(3980.0, View(key))
    assert [entry[0] for entry in last["drafts"]] == ["b"]
    [cut] = history.since(3980.0, View(key, tells_sums=False))
    assert cut["drafts"] == [] and cut["draft_rows"] == 0.0 and cut["running"] == 1.0
    recent = history.recent(View())
    assert [r["now_s"] for r in recent] == [10.0 * moment for moment in range(369, 400)]
    assert recent[-1]["drafts"] == figures["drafts"] and recent[-1]["tasks"] == figures["tasks"]
    assert recent[-1]["open"] == [] and recent[-1]["num_open"] == 0
    [*_, last] = history.recent(View(key))
    assert [entry["task"] for entry in (*last["drafts"], *last["tasks"])] == ["b", "b"]
    assert history.recent(View(key, tells_sums=False)) == []


def test_the_history_is_served_and_its_field_is_checked(live: LiveServer) -> None:
    answer = httpx.get(live.url + "/dashboard/history")
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    points = answer.json()["points"]
    assert points and len(answer.json()["recent"]) == min(31, len(points))
    later = httpx.get(live.url + "/dashboard/history", params={"after": points[-1]["now_s"]})
    assert later.json() == {"points": []}
    refused = httpx.get(live.url + "/dashboard/history", params={"after": "noon"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "after"


def data(server: LiveServer, key: str = "") -> dict[str, Any]:
    answer = httpx.get(server.url + "/dashboard/data", headers=as_key(key))
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    figures: dict[str, Any] = answer.json()
    return figures


def test_the_data_are_the_sums_of_the_reports(live: LiveServer) -> None:
    before = data(live)
    assert {entry["task"] for entry in before["tasks"]} >= {"tags"}  # shown before any request
    answers = [
        live.post(
            model="tags", prompt="the quick brown fox", max_tokens=20 + i, temperature=0,
            ignore_eos=True, include_speculation=True,
        ).json()
        for i in range(6)
    ]  # fmt: skip
    figures = data(live)
    reports = [answer["speculation"] for answer in answers]
    [drafts] = (entry for entry in figures["drafts"] if entry["task"] == "tags")
    assert (drafts["task"], drafts["drafter"], drafts["model"]) == ("tags", "suffix", "tiny")
    for name, field in (("steps", "steps"), ("drafted", "drafted_tokens"),
                        ("accepted", "accepted_tokens")):  # fmt: skip
        assert drafts[name] == sum(report[field] for report in reports) > 0
    assert drafts["tokens"] == sum(a["usage"]["completion_tokens"] for a in answers)
    assert drafts["wasted"] == drafts["drafted"] - drafts["accepted"]
    by_position = [0] * 40
    for report in reports:
        for depth, number in enumerate(report["accepted_by_depth"]):
            by_position[depth] += number
    assert {int(p): n for p, n in drafts["accepted_by_position"].items() if n} == {
        p: n for p, n in enumerate(by_position) if n
    }
    for kind in ("source", "survival"):
        assert sum(drafts[f"drafted_by_{kind}"].values()) == drafts["drafted"]
        assert sum(drafts[f"accepted_by_{kind}"].values()) == drafts["accepted"]
    assert 0 < drafts["expected"] <= drafts["drafted"]
    [task] = (entry for entry in figures["tasks"] if entry["task"] == "tags")
    assert task["outcomes"] == {"ok": 6, "abort": 0, "error": 0, "refused": 0}
    assert sum(task["ttft"]) == sum(task["end_to_end"]) == 6
    assert sum(task["inter_token"]) == drafts["tokens"] - 6
    assert len(task["ttft"]) == len(figures["edges_s"]) + 1
    [engine] = figures["engines"]
    assert engine["state"] == "ready" and engine["up"] == 1
    assert engine["rows"]["draft"] == sum(entry["drafted"] for entry in figures["drafts"])
    assert engine["steps"] >= drafts["steps"] and engine["step_s"] > engine["propose_s"] > 0
    assert figures["open"] == [] and figures["num_open"] == 0


def test_slices_are_told_by_task_and_mode(live: LiveServer) -> None:
    assert data(live)["slices"] == []
    answer = live.post(
        model="slim", max_tokens=40, ignore_eos=True, include_speculation=True
    ).json()
    [slices] = data(live)["slices"]
    [engine] = data(live)["engines"]
    told = answer["speculation"]["vocabulary"]
    assert (slices["task"], slices["mode"], slices["model"]) == ("slim", "exact", "tiny")
    assert slices["head_rows"] == told["head_rows"] > 0
    assert slices["misses"] == told["misses"] > 0
    assert engine["vocab_size"] == 400 > slices["ids"]


def test_open_requests_are_listed_without_their_text() -> None:
    engine = ScriptedEngine(saying(IDS, per_step=2), step_s=0.1)  # 25 steps
    with LiveServer([engine]) as server:
        body = {"model": "tiny", "prompt": "SECRET fox", "max_tokens": 50, "stream": True}
        with server.http.stream("POST", server.url + "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            engine.gate.clear()
            wait_until(lambda: data(server)["open"][0]["tokens"] >= 2)
            figures = data(server)
            [entry] = figures["open"]
            assert (entry["task"], entry["state"], entry["drafter"]) == (
                "completion", "running", "suffix",
            )  # fmt: skip
            assert entry["max_tokens"] == 50 and 0 < entry["tokens"] <= 50
            assert entry["accepted"] == entry["steps"] == entry["tokens"] // 2
            assert entry["age_s"] > 0 and figures["num_open"] == 1
            assert "SECRET" not in str(figures)
            engine.step_s = 0.0
            engine.gate.set()
            for _ in lines:
                pass
        assert data(server)["open"] == []


def test_a_key_sees_its_own_and_polling_costs_it_nothing() -> None:
    keys = (
        {"id": "a", "key": "sk-a", "tasks": ("tags",), "requests_per_minute": 3},
        {"id": "b", "key": "sk-b"},
        {"id": "root", "key": "sk-root", "admin": True},
    )
    config = ServerConfig.model_validate({"keys": keys})
    engine = ScriptedEngine(saying(IDS))
    tasks = {"tags": suffix_task("tags"), "other": suffix_task("other")}
    with LiveServer([engine], config=config, tasks=tasks) as server:
        assert data(server, "sk-a")["needs_key"]
        refused = httpx.get(server.url + "/dashboard/data")
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        for _ in range(5):  # a page polls more often than a key may ask
            assert {entry["task"] for entry in data(server, "sk-a")["tasks"]} == {"tags"}
        assert {entry["task"] for entry in data(server, "sk-b")["tasks"]} >= {"tags", "other"}
        engine.gate.clear()
        body = {"model": "tags", "prompt": "the", "max_tokens": 5, "stream": True}
        url, key = server.url + "/v1/completions", as_key("sk-a")
        with server.http.stream("POST", url, json=body, headers=key) as answer:
            wait_until(lambda: data(server, "sk-a")["num_open"] == 1)
            assert data(server, "sk-b")["num_open"] == 0
            assert data(server, "sk-root")["num_open"] == 1
            engine.gate.set()
            answer.read()


# --- rejected drafts ---


def test_rejected_drafts_of_the_engine_account_for_wasted_rows(live: LiveServer) -> None:
    [choice], report = (
        (body := live.post(
            prompt="the quick brown fox", max_tokens=60, temperature=0.9, seed=3, ignore_eos=True,
            include_rejected_drafts=True, include_speculation=True, include_token_sources=True,
        ).json())["choices"],
        body["speculation"],
    )  # fmt: skip
    wasted = report["drafted_tokens"] - report["accepted_tokens"]
    rejected = choice["rejected_drafts"]
    assert rejected and wasted > 0
    # Paths share their first nodes, and what lies past the end is left out: bounds, not equality.
    assert max(d["tokens"] for d in rejected) <= wasted
    assert sum(d["tokens"] for d in rejected) >= 0.8 * wasted
    assert all(0 <= d["token"] < 60 and d["offset"] <= len(choice["text"]) for d in rejected)
    assert all(d["source"] in report["by_source"] for d in rejected)


# --- vLLM's names ---


def test_vllm_names_tell_the_same_figures(live: LiveServer) -> None:
    for _ in range(2):
        live.post(max_tokens=60, ignore_eos=True, temperature=0)
    page = httpx.get(live.url + "/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    text = page.text

    def values(name: str, **labels: str) -> list[float]:
        told = ",".join(f'{key}="{value}"' for key, value in labels.items())
        line = re.escape(f"vllm:{name}{{{told}")
        return [float(found) for found in re.findall(rf"^{line}.*\}} (\S+)$", text, re.M)]

    for name in (
        "generation_tokens_total", "time_to_first_token_seconds_count",
        "request_success_total", "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count", "e2e_request_latency_seconds_sum",
        "spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total",
    ):  # fmt: skip
        same = live.sample(f"tailor_{name}")
        assert sum(values(name)) == pytest.approx(same) and same > 0, name
    assert values("generation_tokens_total", model_name="tiny") != []
    assert values("num_requests_running", engine="0", model_name="tiny") == [0]
    parts = ("queue", "prefill", "decode")
    whole = sum(live.sample(f"tailor_request_{part}_time_seconds_sum") for part in parts)
    end_to_end = live.sample("tailor_e2e_request_latency_seconds_sum")
    assert whole == pytest.approx(end_to_end, rel=0.05)
