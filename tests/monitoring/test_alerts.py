"""Every alert's expression, asked of a real Prometheus through its HTTP API, in its scripted fault.

promtool runs the same faults (test_prometheus.py) through the rules; here their series lie in
Prometheus's own storage, as if they had been scraped, and the expression is asked as Grafana or a
person would ask it. Recorded series are replaced by what records them.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.prometheus_server import Prometheus, binary
from tests.monitoring.test_prometheus import ALERTS, FAULTS, RULES

RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
CASES: list[dict[str, Any]] = yaml.safe_load(FAULTS.read_text())["tests"]
APART_S = 30 * 3600
"""Between two faults: more than a day, which is what an alert looks back at most."""
EXPECTED = [(number, test) for number, case in enumerate(CASES) for test in case["alert_rule_test"]]


def samples(notation: Any) -> list[float | None]:
    """promtool's series notation: `1x4` is five times 1, `0+60x30` counts up, `_` is no sample."""
    values: list[float | None] = []
    for word in str(notation).split():
        repeated = re.fullmatch(r"(-?[\d.]+)(?:([+-][\d.]+))?x(\d+)", word)
        if repeated:
            first, step, times = repeated.groups()
            values += [float(first) + float(step or 0) * i for i in range(int(times) + 1)]
        else:
            values.append(None if word == "_" else float(word))
    return values


def seconds(duration: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([smh])", duration).groups()  # type: ignore[union-attr]
    return float(number) * {"s": 1, "m": 60, "h": 3600}[unit]


def spelled_out(expr: str) -> str:
    """The expression with what records a series in that series' place."""
    for name, recorded in RECORDED.items():
        expr = re.sub(rf"{re.escape(name)}\[(\w+)\]", rf"({recorded})[\1:1m]", expr)
        expr = re.sub(rf"{re.escape(name)}(?![\w:])", f"({recorded})", expr)
    return expr


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, list[float]]]:
    """A Prometheus that holds all faults, and the second at which each begins."""
    folder: Path = tmp_path_factory.mktemp("faults")
    newest = time.time() // 60 * 60 - 6 * 3600
    begins = [newest - APART_S * (len(CASES) - 1 - number) for number in range(len(CASES))]
    by_name: dict[str, list[str]] = {}
    for case, begin in zip(CASES, begins, strict=True):
        for series in case["input_series"]:
            lines = by_name.setdefault(series["series"].split("{")[0], [])
            for i, value in enumerate(samples(series["values"])):
                if value is not None:
                    at = begin + i * seconds(case["interval"])
                    lines.append(f"{series['series'].replace(', ', ',')} {value} {at:.0f}")
    text = "".join("\n".join(lines) + "\n" for lines in by_name.values())
    (folder / "faults.txt").write_text(text + "# EOF\n")
    done = subprocess.run(
        [binary("promtool"), "tsdb", "create-blocks-from", "openmetrics", "--quiet",
         str(folder / "faults.txt"), str(folder / "data")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    flags = ("--storage.tsdb.retention.time=100d",)
    with Prometheus(folder, "127.0.0.1:9", *flags) as prometheus:
        yield prometheus, begins


def firing(prometheus: Prometheus, name: str, at_s: float) -> list[dict[str, str]]:
    """The label sets for which the alert's expression held at `at_s` and all of `for` before."""
    rule = ALERTS[name]
    held: list[set[tuple[tuple[str, str], ...]]] = []
    moment = at_s - seconds(rule.get("for", "0m"))
    while moment <= at_s:
        found = prometheus.query(spelled_out(rule["expr"]), at_s=moment)
        held.append(
            {tuple(sorted(i for i in e["metric"].items() if i[0] != "__name__")) for e in found}
        )
        moment += 60
    return [dict(labels) for labels in sorted(set.intersection(*held))]


@pytest.mark.parametrize(
    ("number", "test"), EXPECTED,
    ids=[f"{t['alertname']} at {t['eval_time']}" for _, t in EXPECTED],
)  # fmt: skip
def test_it_fires_in_its_fault_and_for_nobody_else(
    faults: tuple[Prometheus, list[float]], number: int, test: dict[str, Any]
) -> None:
    prometheus, begins = faults
    found = firing(prometheus, test["alertname"], begins[number] + seconds(test["eval_time"]))
    wanted = [
        {name: value for name, value in alert["exp_labels"].items() if name != "severity"}
        for alert in test.get("exp_alerts", ())
    ]
    assert found == sorted(wanted, key=lambda labels: sorted(labels.items()))


def test_every_alert_has_its_fault() -> None:
    assert {t["alertname"] for _, t in EXPECTED if t.get("exp_alerts")} == set(ALERTS)


def test_the_notation_is_promtools() -> None:
    assert samples("1x2 0+5x2 _ 7") == [1, 1, 1, 0, 5, 10, None, 7]
    assert samples("900-10x1") == [900, 890] and samples(48) == [48]
