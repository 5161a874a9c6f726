"""configs/prometheus and configs/grafana, asked of a real Prometheus that scrapes a real server.

Every expression of every panel returns data; every alert fires in a scripted fault of its own;
acceptance and tokens per step from Prometheus are those of the requests' own reports, exactly.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from server.config import ServerConfig, SpeculationConfig, TaskConfig
from server.config.task import VocabularyConfig
from tests.api.live import LiveServer
from tests.api.test_completions import events
from tests.api.test_end_to_end import PROMPTS
from tests.api.test_lifecycle import send_request
from tests.monitoring.live_engine import POISON, monitored, suffix_task
from tests.monitoring.prometheus_server import CONFIG, ROOT, Prometheus, binary
from tests.monitoring.test_grafana import PANELS, dashboards
from tests.waiting import wait_until

FAULTS = ROOT / "tests" / "monitoring" / "alert_faults.yml"
RULES = [
    rule
    for file in sorted((CONFIG / "rules").glob("*.yml"))
    for group in yaml.safe_load(file.read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}

TASKS = {
    "sql": suffix_task("sql"),
    "rag": suffix_task("rag"),
    "plain": TaskConfig(name="plain", speculation=SpeculationConfig(drafter="off")),
    "exact": suffix_task(
        "exact", vocabulary=VocabularyConfig(mode="exact", profile="half", verify_every=4)
    ),
    "slice": suffix_task("slice", vocabulary=VocabularyConfig(mode="slice", profile="half")),
    "faulty": suffix_task("faulty"),
}


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        [binary("promtool"), *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    out = promtool("check", "config", str(CONFIG / "prometheus.yml"))
    assert f"{len(RULES)} rules found" in out or out.count("SUCCESS") >= 3, out
    assert "WARNING" not in out
    promtool("check", "rules", *map(str, sorted((CONFIG / "rules").glob("*.yml"))))


def test_every_alert_fires_in_its_own_scripted_fault() -> None:
    promtool("test", "rules", str(FAULTS))
    fired = {
        test["alertname"]
        for case in yaml.safe_load(FAULTS.read_text())["tests"]
        for test in case["alert_rule_test"]
        if test.get("exp_alerts")
    }
    assert fired == set(ALERTS)


def test_every_alert_says_what_it_is() -> None:
    assert {"TailorAcceptanceCollapse", "TailorQueueGrowth", "TailorKvExhaustion",
            "TailorErrorRate"} <= set(ALERTS)  # fmt: skip
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        assert rule["annotations"]["summary"], name


# --- a server under load ---


@dataclass
class Run:
    """A server that was under load, what its answers reported, and the Prometheus that watched."""

    server: LiveServer
    prometheus: Prometheus
    ended_s: float = 0.0  # Unix time when all of the load had been scraped
    reports: list[tuple[str, dict[str, Any], dict[str, Any]]] = field(default_factory=list)


def _ask(server: LiveServer, i: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """One request; its task, its speculation report and its usage."""
    task = ("sql", "rag", "plain", "exact", "slice")[i % 5]
    body: dict[str, Any] = {
        "model": task, "prompt": PROMPTS[i % 4], "max_tokens": 30 + i % 20,
        "temperature": i % 4 // 3 / 4,
        "n": 1 + i % 2, "include_speculation": True, "stop": "qq" if i % 7 == 0 else None,
    }  # fmt: skip
    if i % 2:
        stream = events(server.post(stream=True, stream_options={"include_usage": True}, **body))
        return task, stream[-1]["speculation"], stream[-1]["usage"]
    answer = server.post(**body).json()
    return task, answer["speculation"], answer["usage"]


def _faults(server: LiveServer) -> None:
    """A request that fails, one that its client leaves, one that is refused, as "faulty"."""
    for _ in range(3):
        failed = server.post(model="faulty", prompt=[POISON, 7])
        assert failed.status_code == 500
        connection = send_request(server.port, model="faulty", max_tokens=200, ignore_eos=True)
        wait_until(lambda: server.client.num_open > 0)
        connection.close()
        assert server.post(model="faulty", nonsense=1).status_code == 400


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    binary("prometheus")
    config = ServerConfig.model_validate({"metrics": {"vllm_aliases": True}})
    with (
        monitored(step_s=0.002, config=config, tasks=TASKS) as server,
        Prometheus(tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{server.port}") as prometheus,
        ThreadPoolExecutor(8) as threads,
    ):
        made = Run(server, prometheus)
        prometheus.wait_scraped_after(time.time())
        # Scraped between rounds: a rate needs a rise that was seen, also of series that begin with
        # their first event.
        for i in (0, 25, 50):
            made.reports += threads.map(lambda k: _ask(server, k), range(i, i + 25))
            # Alone: beside others that read the full head anyway, `exact` draws from it, too.
            made.reports.append(_ask(server, 3))
            _faults(server)
            prometheus.wait_scraped_after(time.time())
        wait_until(lambda: server.client.num_open == 0)
        wait_until(lambda: server.sample("tailor_request_outcomes_total", outcome="abort") >= 3)
        prometheus.wait_scraped_after(time.time() + 1.0)  # and the rules have seen it
        made.ended_s = time.time()
        yield made


def _filled_in(expr: str) -> str:
    """An expression as Grafana would send it with every variable at "All"."""
    values = {"$__rate_interval": "30s", "$__range": "5m", "$task": ".*", "$model": ".*"}
    for name, value in values.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


@pytest.mark.parametrize(
    ("name", "expr"), [(f"{d}: {p['title']}", t["expr"]) for d, p in PANELS for t in p["targets"]]
)
def test_every_expression_of_every_panel_returns_data(run: Run, name: str, expr: str) -> None:
    # As the load ended: by the last of these tests it may lie further back than a rate looks.
    result = run.prometheus.query(_filled_in(expr), run.ended_s)
    assert result, f"{name}: no data for {expr}"
    numbers = [float(entry["value"][1]) for entry in result]
    assert any(number == number for number in numbers), f"{name}: only NaN for {expr}"


def test_every_variable_of_the_dashboards_has_values(run: Run) -> None:
    seen = set()
    for board in dashboards().values():
        for variable in board["templating"]["list"]:
            if variable["type"] != "query":
                continue
            inner = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert inner
            asked = f"group by ({inner[2]}) ({_filled_in(inner[1])})"
            found = run.prometheus.query(asked, run.ended_s)
            seen.add((variable["name"], *sorted(entry["metric"][inner[2]] for entry in found)))
    assert seen == {
        ("model", "tiny"),
        ("task", "completion", "exact", "faulty", "plain", "rag", "slice", "sql"),
    }


@pytest.mark.parametrize("rule", [r for r in RULES if "record" in r], ids=lambda r: r["record"])
def test_every_recorded_series_has_data(run: Run, rule: dict[str, Any]) -> None:
    wait_until(lambda: bool(run.prometheus.query(rule["record"])), 10)


@pytest.mark.parametrize("name", ALERTS)
def test_every_series_that_an_alert_reads_is_there(run: Run, name: str) -> None:
    """The expression is valid, and empty because nothing is wrong: not for want of its series."""
    expr = ALERTS[name]["expr"]
    run.prometheus.query(expr)
    series = set(re.findall(r"\b(?:\w+:)?tailor_\w+(?::\w+)?|\bup\b", expr))
    assert series
    for one in series:
        assert run.prometheus.query(one), f"{name} reads {one}, which does not exist"


def test_prometheus_tells_what_the_requests_reports_tell_exactly(run: Run) -> None:
    """Metric truth: acceptance and tokens per step, by task, from two independent ways."""
    sums: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    positions: dict[tuple[str, str], int] = defaultdict(int)
    offers: dict[tuple[str, str], int] = defaultdict(int)
    sources: dict[tuple[str, str], int] = defaultdict(int)
    for task, report, usage in run.reports:
        own = sums[task]
        own["steps"] += report["steps"]
        own["drafted"] += report["drafted_tokens"]
        own["accepted"] += report["accepted_tokens"]
        own["tokens"] += usage["completion_tokens"]
        own["requests"] += 1
        for position, number in enumerate(report["accepted_by_depth"]):
            positions[task, str(position)] += number
            offers[task, str(position)] += report["offered_by_depth"][position]
        for source, counts in report["by_source"].items():
            sources[task, source] += counts["accepted_tokens"]
    assert sums["sql"]["accepted"] > 100 and sums["plain"]["drafted"] == 0

    spec = "tailor_spec_decode_num"
    ask, where = run.prometheus.values, '{task!~"faulty|completion"}'
    accepted_of_rows = ask(
        f'sum by (task) ({spec}_accepted_tokens_total{{task!~"plain|faulty|completion"}}) / '
        f"sum by (task) ({spec}_draft_tokens_total)", "task",
    )  # fmt: skip
    assert accepted_of_rows == {
        (task,): own["accepted"] / own["drafted"] for task, own in sums.items() if own["drafted"]
    }
    tokens_per_step = ask(
        f"sum by (task) (tailor_generation_tokens_total{where}) / "
        f"sum by (task) ({spec}_decode_steps_total)", "task",
    )  # fmt: skip
    assert tokens_per_step == {(task,): own["tokens"] / own["steps"] for task, own in sums.items()}
    chance = ask(
        f"sum by (task, position) ({spec}_accepted_tokens_per_pos_total{where}) / "
        f"sum by (task, position) ({spec}_offered_per_pos_total)", "task", "position",
    )  # fmt: skip
    assert chance == {key: positions[key] / number for key, number in offers.items()}
    by_source = ask(
        f"sum by (task, source) ({spec}_accepted_tokens_by_source_total{where})", "task", "source"
    )
    assert by_source == dict(sources)
    answered = ask(
        'sum by (task) (tailor_request_outcomes_total{task!~"faulty|completion",outcome="ok"})',
        "task",
    )
    assert answered == {(task,): own["requests"] for task, own in sums.items()}
    vllm = ask('sum(vllm:generation_tokens_total{model_name="tiny"})')
    assert vllm == ask("sum(tailor_generation_tokens_total)")
