"""An HTML page from the load tests' JSON lines: plots, tables, machine and versions, in one file.

    python -m loadtest.report results.jsonl --out report.html --picture report.png

Takes the lines of compare, concurrency, load, lossless and step_profile, in any order; a line of
another tool is listed as it is. The page needs no network, no script and no font; plots are inline
SVG with their figures as text, so that they can be read aloud and searched. `--picture` takes one
of the page's top with a headless Chromium (Debian: apt-get install chromium).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment

from drafters.atomic_file import replacing

WIDTH, LABEL, BAR, GAP = 720, 170, 20, 10
Interval = tuple[float, float, float]
PART_COLOURS = {
    "body_ms": "#33608c", "head_ms": "#6d9dc5", "sampler_ms": "#b5d0e6",
    "drafter_ms": "#c46a2b", "host_ms": "#8a8f98",
}  # fmt: skip

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Load test report</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c2024; background: #fff; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 3rem; border-top: 1px solid #ccd; padding-top: 1rem; }
svg { max-width: 100%; height: auto; } svg text { font: 13px system-ui, sans-serif; fill: currentColor; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #dde; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.bad { color: #a11; font-weight: 600; } .small { color: #555; font-size: .875rem; }
@media (prefers-color-scheme: dark) { body { background: #16191d; color: #e6e8ea; }
  th, td { border-color: #333a44; } .small { color: #aab; } .bad { color: #f99; } }
</style></head><body>
<h1>Load test report</h1>
{% for section in sections %}
<h2>{{ section.title }}</h2>
<p class="small">{{ section.machine }}</p>
{% for note in section.notes %}<p{% if note.bad %} class="bad"{% endif %}>{{ note.text }}</p>{% endfor %}
{% for chart in section.charts %}
<figure><figcaption>{{ chart.title }}</figcaption>
<svg viewBox="0 0 {{ width }} {{ chart.height }}" role="img" aria-label="{{ chart.spoken }}">
{% for tick in chart.ticks %}<line x1="{{ label }}" x2="{{ chart.right }}" y1="{{ tick.y }}" y2="{{ tick.y }}" stroke="#8a8f98" stroke-opacity=".35"/>
<text x="{{ label - 8 }}" y="{{ tick.y + 4 }}" text-anchor="end">{{ tick.text }}</text>{% endfor %}
{% for mark in chart.marks %}<text x="{{ mark.x }}" y="{{ chart.height - 4 }}" text-anchor="middle">{{ mark.text }}</text>{% endfor %}
{% for line in chart.lines %}<g stroke="{{ line.colour }}" fill="{{ line.colour }}"><polyline points="{{ line.points }}" fill="none" stroke-width="2.5"{% if line.dash %} stroke-dasharray="{{ line.dash }}"{% endif %}/>
{% for dot in line.dots %}<line x1="{{ dot.x }}" x2="{{ dot.x }}" y1="{{ dot.low }}" y2="{{ dot.high }}" stroke-width="1.5"/><circle cx="{{ dot.x }}" cy="{{ dot.y }}" r="4" stroke="none"><title>{{ dot.title }}</title></circle>{% endfor %}</g>
<g transform="translate({{ line.x }} {{ line.y }})"><line x2="24" y1="-4" y2="-4" stroke="{{ line.colour }}" stroke-width="3"{% if line.dash %} stroke-dasharray="{{ line.dash }}"{% endif %}/><text x="30">{{ line.name }}</text></g>{% endfor %}
</svg></figure>{% endfor %}
{% for plot in section.plots %}
<figure><figcaption>{{ plot.title }}</figcaption>
<svg viewBox="0 0 {{ width }} {{ plot.height }}" role="img" aria-label="{{ plot.spoken }}">
{% for bar in plot.bars %}<g transform="translate(0 {{ bar.y }})">
<text x="{{ label - 8 }}" y="15" text-anchor="end">{{ bar.label }}</text>
{% for piece in bar.pieces %}<rect x="{{ piece.x }}" width="{{ piece.width }}" height="{{ height }}" fill="{{ piece.colour }}"><title>{{ piece.title }}</title></rect>{% endfor %}
{% if bar.low is not none %}<line x1="{{ bar.low }}" x2="{{ bar.high }}" y1="10" y2="10" stroke="currentColor" stroke-width="2"/>{% endif %}
<text x="{{ bar.end }}" y="15">{{ bar.text }}</text></g>{% endfor %}
</svg></figure>{% endfor %}
{% for table in section.tables %}<table><caption>{{ table.title }}</caption>
<thead><tr>{% for cell in table.head %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</tbody>
</table>{% endfor %}
{% endfor %}
</body></html>
"""  # noqa: E501


@dataclass(frozen=True, slots=True)
class Bar:
    """One labelled bar: its pieces as (name, value), and the whisker's ends where known."""

    label: str
    pieces: Sequence[tuple[str, float]]
    low: float | None = None
    high: float | None = None


def figure(value: float) -> str:
    """Three digits that matter, and no exponent for a large one."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def plot(title: str, bars: Sequence[Bar], unit: str) -> dict[str, Any]:
    """A horizontal bar chart as what the page's template draws. Scale from 0 to the largest end."""
    room = WIDTH - LABEL - 120
    ends = [max(sum(v for _, v in bar.pieces), bar.high or 0.0) for bar in bars]
    scale = room / (max(ends, default=0.0) or 1.0)
    drawn = []
    for index, (bar, end) in enumerate(zip(bars, ends, strict=True)):
        at, pieces = float(LABEL), []
        for name, value in bar.pieces:
            pieces.append(
                {
                    "x": round(at, 1),
                    "width": round(max(0.0, value) * scale, 1),
                    "colour": PART_COLOURS.get(name, "#33608c" if index == 0 else "#8fb3d4"),
                    "title": f"{name}: {figure(value)} {unit}",
                }
            )
            at += max(0.0, value) * scale
        total = sum(value for _, value in bar.pieces)
        drawn.append(
            {
                "y": index * (BAR + GAP),
                "label": bar.label,
                "pieces": pieces,
                "low": None if bar.low is None else round(LABEL + bar.low * scale, 1),
                "high": None if bar.high is None else round(LABEL + bar.high * scale, 1),
                "end": round(LABEL + end * scale + 8, 1),
                "text": f"{figure(total)} {unit}",
            }
        )
    return {
        "title": title,
        "bars": drawn,
        "height": len(bars) * (BAR + GAP),
        "spoken": title + ": " + ", ".join(f"{one['label']} {one['text']}" for one in drawn),
    }


PLOT_HEIGHT, LEGEND_ROW, LEGEND_WIDTH = 190, 20, 180
LINES = (("#33608c", ""), ("#c46a2b", "7 4"), ("#3f7d5a", "2 4"), ("#7a4f9a", "10 3 2 3"))


def chart(
    title: str, marks: Sequence[str], lines: Mapping[str, Sequence[Interval | None]], unit: str
) -> dict[str, Any]:
    """A line chart over load levels: a line a server, (median, low, high) a point, from 0 up.

    Servers differ in colour and in dashes. The spoken text has every figure.
    """
    right, legend_columns = WIDTH - 20, (WIDTH - LABEL) // LEGEND_WIDTH
    begin = LEGEND_ROW * (1 + (len(lines) - 1) // legend_columns) + 8
    bottom = begin + PLOT_HEIGHT
    top = max((point[2] for points in lines.values() for point in points if point), default=0.0)
    top = top or 1.0
    step = (right - LABEL) / max(1, len(marks))

    def height(value: float) -> float:
        return round(bottom - PLOT_HEIGHT * value / top, 1)

    at = [round(LABEL + step * (i + 0.5), 1) for i in range(len(marks))]
    drawn, spoken = [], []
    for index, (name, points) in enumerate(lines.items()):
        dots = [
            {
                "x": x, "y": height(point[0]), "low": height(point[1]), "high": height(point[2]),
                "title": f"{name}, {mark}: {figure(point[0])} {unit} "
                f"[{figure(point[1])}, {figure(point[2])}]",
            }
            for x, mark, point in zip(at, marks, points, strict=True)
            if point is not None
        ]  # fmt: skip
        colour, dash = LINES[index % len(LINES)]
        drawn.append(
            {
                "name": name, "colour": colour, "dash": dash, "dots": dots,
                "points": " ".join(f"{dot['x']},{dot['y']}" for dot in dots),
                "x": LABEL + index % legend_columns * LEGEND_WIDTH,
                "y": LEGEND_ROW * (1 + index // legend_columns) - 6,
            }
        )  # fmt: skip
        spoken += [str(dot["title"]) for dot in dots]
    return {
        "title": title,
        "height": bottom + 24,
        "right": right,
        "ticks": [
            {"y": height(top * part / 4), "text": f"{figure(top * part / 4)} {unit}"}
            for part in range(5)
        ],
        "marks": [{"x": x, "text": mark} for x, mark in zip(at, marks, strict=True)],
        "lines": drawn,
        "spoken": title + ": " + "; ".join(spoken),
    }


def _interval(found: Mapping[str, float] | None) -> str:
    if found is None:
        return ""
    return f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def _between(found: Mapping[str, float] | None, scale: float = 1.0) -> Interval | None:
    if not found:
        return None
    return found["median"] * scale, found["low"] * scale, found["high"] * scale


LOAD_CHARTS = (
    ("tokens_per_s", "throughput", 1, "tok/s"),
    ("decode_tokens_per_s", "decode speed of a stream, median", 1, "tok/s"),
    ("goodput_per_s", "requests that met the objective", 1, "/s"),
    ("ttft_s", "time to the first token, median", 1000, "ms"),
    ("ttft_p99_s", "time to the first token, 99 % of requests", 1000, "ms"),
    ("tpot_s", "time per output token, median", 1000, "ms"),
    ("itl_s", "gap between chunks, median", 1000, "ms"),
)
LOAD_RATIOS = {
    "tokens_per_s": "tok/s", "decode_tokens_per_s": "decode", "ttft_s": "TTFT",
    "ttft_p95_s": "TTFT p95", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "end to end",
}  # fmt: skip


def _pair(row: Mapping[str, Any], name: str, scale: float) -> str:
    """p50 / p99 of a row's figure; "" where it has none."""
    found = row.get(name)
    return f"{figure(found['p50'] * scale)} / {figure(found['p99'] * scale)}" if found else ""


def _two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _load_charts(figures: Mapping[str, Any], section: dict[str, Any]) -> None:
    """A curve for each figure over the levels of one kind, bars where there is one level."""
    swept: set[str] = set()  # their charts have what bars would say
    for kind in ("clients", "req/s", "trace"):
        levels = [level for level in figures if kind in level]
        if len(levels) < 2:
            continue
        swept |= set(levels)
        for metric, title, scale, unit in LOAD_CHARTS:
            lines = {
                server: [
                    _between(figures[level][server]["rounds"].get(metric), scale)
                    for level in levels
                ]
                for server in figures[levels[0]]
            }
            section["charts"].append(chart(title, levels, lines, unit))
    for level, rows in figures.items():
        for metric, title, scale, unit in LOAD_CHARTS if level not in swept else ():
            found = {s: _between(row["rounds"].get(metric), scale) for s, row in rows.items()}
            bars = [
                Bar(s, [(title, point[0])], point[1], point[2])
                for s, point in found.items()
                if point
            ]
            if bars:
                section["plots"].append(plot(f"{level}: {title}", bars, unit))


def _load_tables(
    level: str, rows: Mapping[str, Any], base: str, tables: list[dict[str, Any]]
) -> None:
    tables.append(
        {
            "title": f"{level}; p50 / p99 of all requests",
            "head": ["server", "req/s", "tok/s", "TTFT ms", "TPOT ms", "ITL ms", "end to end s",
                     "good", "good/s", "tokens a step", "longest silence s", "failed"],
            "rows": [
                [server, _two(row["requests_per_s"]), f"{row['tokens_per_s']:.1f}",
                 _pair(row, "ttft_s", 1000), _pair(row, "tpot_s", 1000),
                 _pair(row, "itl_s", 1000), _pair(row, "e2e_s", 1), f"{row['good_share']:.0%}",
                 _two(row["goodput_per_s"]), _two(row["tokens_per_step"]),
                 _two(row.get("worst_silence_s")), row["num_failed"]]
                for server, row in rows.items()
            ],
        }
    )  # fmt: skip
    if len(rows) > 1:
        tables.append(
            {
                "title": f"{level}: server / {base}, median of the rounds' ratios and its 95 % "
                "bootstrap interval",
                "head": ["server", *LOAD_RATIOS.values()],
                "rows": [
                    [server, *(_interval(row["ratios"].get(name)) for name in LOAD_RATIOS)]
                    for server, row in rows.items()
                    if server != base
                ],
            }
        )
    sets = sorted({name for row in rows.values() for name in row["data_sets"]})
    if len(sets) > 1:
        tables.append(
            {
                "title": f"{level}, by data set; p50 / p99; ratios are server / {base}",
                "head": ["data set", "server", "requests", "decode tok/s", "ratio", "TTFT ms",
                         "TPOT ms", "good", "tokens a step"],
                "rows": [
                    [name, server, part["num_requests"], _pair(part, "decode_tokens_per_s", 1),
                     _interval(part.get("ratios", {}).get("decode_tokens_per_s")),
                     _pair(part, "ttft_s", 1000), _pair(part, "tpot_s", 1000),
                     f"{part['good_share']:.0%}", _two(part["tokens_per_step"])]
                    for name in sets
                    for server, row in rows.items()
                    if (part := row["data_sets"].get(name))
                ],
            }
        )  # fmt: skip


def _load(result: Mapping[str, Any], section: dict[str, Any]) -> None:
    slo = ", ".join(f"{name} ≤ {limit:g} s" for name, limit in result["slo"].items())
    mix = ", ".join(f"{name} {weight:g}" for name, weight in result["mix"].items())
    told = [
        f"Objective: {slo or 'an answer'}. Mix: {mix}. {result['num_rounds']} rounds; points are "
        "medians of rounds with their 95 % bootstrap interval."
    ]
    section["notes"] += [{"text": text, "bad": False} for text in told]
    for prompt, groups in result.get("texts", {}).items():
        if len(groups) == 1:
            section["notes"].append({"text": f"{prompt}: the same text from all.", "bad": False})
        for group in groups[1:]:
            at = f"differs from character {group['diverges_at']} on."
            text = f"{prompt}: {', '.join(group['servers'])} {at}"
            section["notes"].append({"text": text, "bad": True})
    _load_charts(result["figures"], section)
    for level, rows in result["figures"].items():
        _load_tables(level, rows, result["base"], section["tables"])


def _lossless(result: Mapping[str, Any], section: dict[str, Any]) -> None:
    section["notes"].append(
        {
            "text": f"{result['num_different']} of {result['num_compared']} answers differ "
            f"({result['num_prompts']} prompts, {', '.join(result['settings'])}; drafters "
            f"{', '.join(result['drafters'])}; {result['num_accepted']} draft tokens accepted).",
            "bad": bool(result["num_different"]),
        }
    )


def _step_profile(result: Mapping[str, Any], section: dict[str, Any]) -> None:
    inside = result.get("in_process")
    if inside:
        bars = [
            Bar(case, [(part, row[part]) for part in PART_COLOURS]) for case, row in inside.items()
        ]
        section["plots"].append(
            plot("a decode step in process: body, head, sampler, drafter, host", bars, "ms")
        )
    for where in ("in_process", "server"):
        rows = result.get(where)
        if rows:
            columns = list(next(iter(rows.values())))
            section["tables"].append(
                {
                    "title": where.replace("_", " "),
                    "head": ["sequences x drafter", *columns],
                    "rows": [
                        [case, *(f"{row[column]:.3g}" for column in columns)]
                        for case, row in rows.items()
                    ],
                }
            )


SECTIONS = {
    "load": ("Load", _load),
    "lossless": ("The same text with and without speculation", _lossless),
    "step_profile": ("Where a step's time goes", _step_profile),
}


def render(results: Iterable[Mapping[str, Any]]) -> str:
    """The page. Raises KeyError for a line that lacks what its tool writes."""
    sections = []
    for result in results:
        tool = str(result.get("tool", "unknown"))
        title, fill = SECTIONS.get(tool, (tool, None))
        about = result.get("machine", {})
        versions = ", ".join(f"{k} {v}" for k, v in about.get("versions", {}).items())
        dirty = " with local changes" if about.get("tree_dirty") else ""
        section: dict[str, Any] = {
            "title": title,
            "machine": f"{about.get('utc', '')} · {about.get('cpu', '')}, "
            f"{about.get('cores', '?')} cores · commit {about.get('commit', '?')}{dirty} · "
            f"{versions}",
            "notes": [],
            "plots": [],
            "charts": [],
            "tables": [],
        }
        if fill is None:
            section["notes"].append({"text": json.dumps(result, ensure_ascii=False), "bad": False})
        else:
            fill(result, section)
        sections.append(section)
    page = Environment(autoescape=True).from_string(PAGE)
    return page.render(sections=sections, width=WIDTH, label=LABEL, height=BAR)


def take_picture(page: Path, picture: Path) -> None:
    """A PNG of the page's first 1400 pixels. Raises OSError without a browser or a picture."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise OSError("Chromium is not installed")
    with tempfile.TemporaryDirectory(prefix="report-") as profile:
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={profile}", "--window-size=1000,1400",
             f"--screenshot={picture.resolve()}", page.resolve().as_uri()],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    if done.returncode or not picture.exists():
        raise OSError(f"Chromium took no picture: {done.stderr[-500:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, nargs="+", help="files of JSON lines")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path, metavar="PNG", help="of the page's top")
    options = parser.parse_args(arguments)
    try:
        results = [
            json.loads(line)
            for path in options.results
            for line in path.read_text(encoding="utf-8").splitlines()
            if line.strip()
        ]
        page = render(results)
        with replacing(options.out) as out:
            out.write(page.encode())
        options.out.chmod(0o644)
        if options.picture is not None:
            take_picture(options.out, options.picture)
    except (OSError, ValueError, KeyError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {len(results)} results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
