"""configs/grafana: the files are what dashboards.py makes, and Grafana can lay them out.

What their expressions return is asked in test_prometheus.py.
"""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from server.engine.figures import declared
from server.metrics import Metrics

FIGURES: list[Any] = [
    SimpleNamespace(name=f"tailor_{figure.name}", type=figure.kind) for figure in declared()
]
"""The families of what engines tell."""

GRAFANA = Path(__file__).parents[2] / "configs" / "grafana"


def _source() -> Any:
    import sys

    module_spec = importlib.util.spec_from_file_location("dashboards", GRAFANA / "dashboards.py")
    assert module_spec and module_spec.loader
    module = importlib.util.module_from_spec(module_spec)
    sys.modules.setdefault(module_spec.name, module)  # dataclasses look their module up
    module_spec.loader.exec_module(module)
    return module


@cache
def dashboards() -> dict[str, dict[str, Any]]:
    """The shipped files, by name."""
    return {
        file.stem: json.loads(file.read_text(encoding="utf-8"))
        for file in sorted((GRAFANA / "dashboards").glob("*.json"))
    }


PANELS = [
    (name, panel)
    for name, board in dashboards().items()
    for panel in board["panels"]
    if panel["type"] != "row"
]


def test_the_files_are_what_the_source_makes(capsys: pytest.CaptureFixture[str]) -> None:
    source = _source()
    assert source.main(["--check"]) == 0, capsys.readouterr().err
    assert {board.name for board in source.DASHBOARDS} == set(dashboards())


def test_check_tells_a_stale_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = _source()
    monkeypatch.setattr(source, "FOLDER", tmp_path / "dashboards")
    assert source.main([]) == 0
    first = tmp_path / "dashboards" / "serving.json"
    first.write_text(first.read_text().replace("Latency", "Lateness"))
    assert source.main(["--check"]) == 1
    assert "serving.json is not what dashboards.py makes" in capsys.readouterr().err


@pytest.mark.parametrize("name", dashboards())
def test_layout(name: str) -> None:
    board = dashboards()[name]
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for a, b in combinations(places, 2):
        apart = (
            a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        )  # fmt: skip
        assert apart, (name, a, b)


@pytest.mark.parametrize("name", dashboards())
def test_variables(name: str) -> None:
    board = dashboards()[name]
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert {"datasource", "task", "model"} <= variables
    used = {n for n in re.findall(r"\$\{?(\w+)", json.dumps(board)) if not n.startswith("__")}
    assert used <= variables
    by_task = [p for d, p in PANELS if d == name and "$task" in p["targets"][0]["expr"]]
    assert len(by_task) >= 3


@cache
def _known() -> set[str]:
    """All series."""
    return {
        sample
        for family in (*Metrics().registry.collect(), *FIGURES)
        for sample in _sample_names(family.name, family.type)
    }


@cache
def _labels() -> dict[str, set[str]]:
    """Series -> its labels."""
    return {
        sample: set(collector._labelnames)  # type: ignore[attr-defined]
        for sample, collector in Metrics().registry._names_to_collectors.items()
    } | {
        sample: {"engine", "model", *figure.labels}
        for family, figure in zip(FIGURES, declared(), strict=True)
        for sample in _sample_names(family.name, family.type)
    }


def test_panels_say_what_they_show_and_read_series_that_exist() -> None:
    for name, panel in PANELS:
        assert len(panel["description"]) >= 4 and panel["title"], (name, panel["id"])
    told = {
        (name, panel["title"], target["expr"]): set(re.findall(r"\btailor_\w+", target["expr"]))
        for name, panel in PANELS
        for target in panel["targets"]
    }
    assert not {at: series - _known() for at, series in told.items() if series - _known()}
    assert not [at for at, series in told.items() if not series]


def test_every_expression_follows_the_variables_that_its_series_know() -> None:
    """Who chooses a task or a model sees its figures alone, wherever a series has that label."""
    missing = [
        (name, panel["title"], series, variable)
        for name, panel in PANELS
        for target in panel["targets"]
        for series, matchers in re.findall(r"\b(tailor_\w+)(\{[^}]*\})?", target["expr"])
        for variable in ("task", "model")
        if variable in _labels()[series] and f'{variable}=~"${variable}"' not in matchers
    ]
    assert not missing


@pytest.mark.parametrize("name", dashboards())
def test_every_panel_asks_the_chosen_data_source(name: str) -> None:
    board = dashboards()[name]
    [source] = [v for v in board["templating"]["list"] if v["name"] == "datasource"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    wanted = {"type": "prometheus", "uid": "${datasource}"}
    for panel in board["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == wanted
        assert all(target["datasource"] == wanted for target in panel["targets"])
        ids = [target["refId"] for target in panel["targets"]]
        assert len(set(ids)) == len(ids)
    for variable in board["templating"]["list"]:
        assert variable.get("datasource", wanted) == wanted
    assert len({one["uid"] for one in dashboards().values()}) == len(dashboards())


def _sample_names(name: str, kind: str) -> tuple[str, ...]:
    if kind == "counter":
        return (f"{name}_total",)
    if kind == "histogram":
        return (f"{name}_bucket", f"{name}_sum", f"{name}_count")
    return (name,)


def test_provisioning_agrees_with_the_dashboards() -> None:
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())
    [source] = sources["datasources"]
    assert source["type"] == "prometheus" and source["isDefault"]
    providers = yaml.safe_load((GRAFANA / "provisioning/dashboards/tailor.yml").read_text())
    assert providers["providers"][0]["options"]["path"]
