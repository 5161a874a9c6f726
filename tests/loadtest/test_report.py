"""Every tool's own JSON line becomes a page: figures, intervals, verdicts, no outside requests."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from loadtest import load, lossless, report
from tests.loadtest.scripted_server import WORDS, ScriptedServer

VOID = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """Collects text and addresses, and checks that tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == []
    return page


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "alpha").mkdir()
    (folder / "alpha" / "test.jsonl").write_text('{"id": "a-0", "prompt": "<b>&"}\n')
    out = folder / "results.jsonl"

    def other(body: dict[str, Any]) -> list[str]:
        return [" else", *WORDS[1 : body["max_tokens"]]]

    with ScriptedServer(pace_s=0.0) as a, ScriptedServer(pace_s=0.0, answer=other) as b:
        one = ["--server", f"tailor={a.url}", "--max-load", "1e9", "--json", str(out)]
        two = [*one, "--server", f"peer<x>={b.url}"]
        short = ["--rounds", "1", "--tokens", "4"]
        data = ["--data", str(folder)]
        assert load.main([*two, *short, "--prompts", "copy"]) == 0
        distinct = ["--prompts", "distinct", "--concurrency", "2"]
        assert load.main([*two, *short, *distinct]) == 0
        assert load.main(
            [*two, *short, *data, "--mix", "alpha", "--concurrency", "1,2", "--requests", "2"]
        ) == 0  # fmt: skip
        assert lossless.main([*one, *data, "--tokens", "4"]) == 0
    return out


def test_a_page_of_every_tool(results: Path, tmp_path: Path) -> None:
    profile = {
        "tool": "step_profile",
        "in_process": {
            "1 x off": {
                "body_ms": 10.0, "head_ms": 2.0, "sampler_ms": 0.5, "drafter_ms": 0.0,
                "host_ms": 0.25,
            }
        },
    }  # fmt: skip
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps(profile) + "\n" + json.dumps({"tool": "other", "x": 1}) + "\n")
    assert report.main([str(results), str(more), "--out", str(tmp_path / "r.html")]) == 0
    html = (tmp_path / "r.html").read_text()
    page = read(html)
    text = " ".join(page.text)
    assert page.tags.count("h2") == 6
    assert "peer<x>" in text and "peer<x>" not in html  # names are escaped
    assert "copy: peer<x> differs from character 0 on." in text
    assert "0 of 15 answers differ" in text
    assert "12.8 ms" in text  # the parts of the step, stacked
    assert page.addresses == [] and "http://" not in html and "script" not in page.tags
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    speed = lines[0]["figures"]["1 clients"]["tailor"]["rounds"]["decode_tokens_per_s"]["median"]
    assert f"{report.figure(speed)} tok/s" in text


def test_bars_are_to_scale_and_stay_inside() -> None:
    drawn = report.plot(
        "t", [report.Bar("a", [("x", 10.0)], 8.0, 12.0), report.Bar("b", [("x", 3.0), ("y", 2.0)])],
        "ms",
    )  # fmt: skip
    first, second = drawn["bars"]
    assert first["pieces"][0]["width"] == pytest.approx(
        2 * (second["end"] - report.LABEL - 8), 0.01
    )
    assert second["pieces"][1]["x"] == pytest.approx(
        second["pieces"][0]["x"] + second["pieces"][0]["width"], abs=0.2
    )
    assert first["low"] < first["pieces"][0]["x"] + first["pieces"][0]["width"] < first["high"]
    assert max(bar["end"] for bar in drawn["bars"]) < report.WIDTH - 100
    assert drawn["spoken"] == "t: a 10 ms, b 5 ms"


def test_a_broken_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text("{")
    assert report.main([str(tmp_path / "bad.jsonl"), "--out", str(tmp_path / "r.html")]) == 1
    assert "JSONDecodeError" in capsys.readouterr().err


def test_a_sweep_is_a_line_chart_with_every_figure_in_words() -> None:
    lines: dict[str, list[report.Interval | None]] = {
        "on": [(10.0, 9.0, 11.0), (20.0, 18.0, 40.0)],
        "off": [(5.0, 5.0, 5.0), None],
        "c": [(1.0, 1.0, 1.0)] * 2,
        "d": [(2.0, 2.0, 2.0)] * 2,
    }
    drawn = report.chart("t", ["1 clients", "4 clients"], lines, "ms")
    on, off, _, fourth = drawn["lines"]
    assert [len(line["dots"]) for line in (on, off)] == [2, 1]
    bottom, top = drawn["ticks"][0]["y"], drawn["ticks"][-1]["y"]
    assert on["dots"][1]["high"] == top and drawn["ticks"][-1]["text"] == "40 ms"
    # 20 of 40 stands halfway up, and its interval around it.
    assert on["dots"][1]["y"] == pytest.approx((bottom + top) / 2, abs=0.2)
    assert on["dots"][0]["high"] < on["dots"][0]["y"] < on["dots"][0]["low"]
    assert "on, 4 clients: 20 ms [18, 40]" in drawn["spoken"]
    assert len({(line["colour"], line["dash"]) for line in drawn["lines"]}) == 4
    assert (fourth["x"], fourth["y"]) == (on["x"], on["y"] + report.LEGEND_ROW)
    assert fourth["y"] < top < bottom < drawn["height"]


def test_the_page_of_a_load_has_its_ratios_and_its_sweep(results: Path, tmp_path: Path) -> None:
    assert report.main([str(results), "--out", str(tmp_path / "r.html")]) == 0
    page = read((tmp_path / "r.html").read_text())
    text = " ".join(page.text)
    lines = map(json.loads, results.read_text().splitlines())
    [line] = [r for r in lines if "alpha" in r.get("mix", ())]
    ratios = line["figures"]["2 clients"]["peer<x>"]["ratios"]
    assert f"{ratios['ttft_s']['median']:.2f} [{ratios['ttft_s']['low']:.2f}, " in text
    assert page.tags.count("polyline") == 2 * len(report.LOAD_CHARTS)
    assert "time to the first token, 99 % of requests" in text


def test_a_picture_of_the_page(
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [str(results), "--out", str(tmp_path / "r.html"), "--picture", str(tmp_path / "r.png")]
    with monkeypatch.context() as patch:
        patch.setattr(report.shutil, "which", lambda name: None)
        assert report.main(words) == 1
    assert "Chromium is not installed" in capsys.readouterr().err
    if report.shutil.which("chromium") is None:
        pytest.skip("Chromium is not installed")
    assert report.main(words) == 0
    data = (tmp_path / "r.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 20_000
