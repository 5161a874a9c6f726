"""An HTML page from the load tests' JSON lines: plots, tables, machine and versions, in one file.

    python -m loadtest.report results.jsonl --out report.html

Takes the lines of compare, concurrency, load, lossless and step_profile, in any order; a line of
another tool is listed as it is. The page needs no network, no script and no font; plots are inline
SVG with their figures as text, so that they can be read aloud and searched.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment

WIDTH, LABEL, BAR, GAP = 720, 170, 20, 10
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
                    "title": f"{name}: {value:.3g} {unit}",
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
                "text": f"{total:.3g} {unit}",
            }
        )
    return {
        "title": title,
        "bars": drawn,
        "height": len(bars) * (BAR + GAP),
        "spoken": title + ": " + ", ".join(f"{one['label']} {one['text']}" for one in drawn),
    }


def _bars(rows: Mapping[str, Any], metric: str, scale: float = 1.0) -> list[Bar]:
    return [
        Bar(
            server,
            [(metric, row[metric]["p50"] * scale)],
            row[metric]["low"] * scale,
            row[metric]["high"] * scale,
        )
        for server, row in rows.items()
        if row.get(metric)
    ]


def _interval(found: Mapping[str, float] | None) -> str:
    if found is None:
        return ""
    return f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def _compare(result: Mapping[str, Any], section: dict[str, Any]) -> None:
    for prompt, rows in result["figures"].items():
        section["plots"] += [
            plot(
                f"{prompt}: decode, median and range", _bars(rows, "decode_tokens_per_s"), "tok/s"
            ),
            plot(f"{prompt}: first token, median and range", _bars(rows, "ttft_s", 1000), "ms"),
        ]
        section["tables"].append(
            {
                "title": f"{prompt}: {result['ours']} against each (above 1 is better for it), "
                "median of paired ratios, 95 % bootstrap interval",
                "head": ["server", "decode", "end to end", "first token"],
                "rows": [
                    [server, *(_interval(found[m]) for m in found)]
                    for server, found in result["ratios"][prompt].items()
                ],
            }
        )
        groups = result["texts"][prompt]
        if len(groups) == 1:
            section["notes"].append({"text": f"{prompt}: the same text from all.", "bad": False})
        for group in groups[1:]:
            names = ", ".join(group["servers"])
            section["notes"].append(
                {
                    "text": f"{prompt}: {names} differs from character {group['diverges_at']} on.",
                    "bad": True,
                }
            )


def _concurrency(result: Mapping[str, Any], section: dict[str, Any]) -> None:
    for count, rows in result["figures"].items():
        section["plots"].append(
            plot(f"{count} streams at once", _bars(rows, "tokens_per_s"), "tok/s")
        )
        section["tables"].append(
            {
                "title": f"{count} streams",
                "head": ["server", f"{result['ours']} / server", "worst first token s",
                         "longest silence s", "slowest / median", "KV use after"],
                "rows": [
                    [server, _interval(row["ratio"]), f"{row['worst_ttft_s']:.2f}",
                     f"{row['worst_silence_s']:.2f}", f"{row['slowest_share']:.2f}",
                     "" if row["kv_usage_after"] is None else f"{row['kv_usage_after']:.4f}"]
                    for server, row in rows.items()
                ],
            }
        )  # fmt: skip


def _load(result: Mapping[str, Any], section: dict[str, Any]) -> None:
    for level, rows in result["figures"].items():
        speeds = [Bar(server, [("tok/s", row["tokens_per_s"])]) for server, row in rows.items()]
        section["plots"].append(plot(f"{level}: throughput", speeds, "tok/s"))

        def pair(row: Mapping[str, Any], name: str, scale: float) -> str:
            found = row[name]
            return f"{found['p50'] * scale:.3g} / {found['p99'] * scale:.3g}" if found else ""

        section["tables"].append(
            {
                "title": f"{level}; ratio is server / {result['base']}; p50 / p99",
                "head": ["server", "req/s", "ratio", "TTFT ms", "TPOT ms", "gap ms",
                         "end to end s", "good", "tokens a step", "failed"],
                "rows": [
                    [server, f"{row['requests_per_s']:.2f}", _interval(row["ratio"]),
                     pair(row, "ttft_s", 1000), pair(row, "tpot_s", 1000),
                     pair(row, "itl_s", 1000), pair(row, "e2e_s", 1), f"{row['good_share']:.0%}",
                     "" if row["tokens_per_step"] is None else f"{row['tokens_per_step']:.2f}",
                     row["num_failed"]]
                    for server, row in rows.items()
                ],
            }
        )  # fmt: skip


def _lossless(result: Mapping[str, Any], section: dict[str, Any]) -> None:
    section["notes"].append(
        {
            "text": f"{result['num_different']} of {result['num_compared']} answers differ "
            f"({result['num_prompts']} prompts, {', '.join(result['settings'])}; drafter "
            f"{result['drafter']}; {result['num_accepted']} draft tokens accepted).",
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
    "compare": ("One stream against peers", _compare),
    "concurrency": ("Streams at once", _concurrency),
    "load": ("Load with task prompts", _load),
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
            "tables": [],
        }
        if fill is None:
            section["notes"].append({"text": json.dumps(result, ensure_ascii=False), "bad": False})
        else:
            fill(result, section)
        sections.append(section)
    page = Environment(autoescape=True).from_string(PAGE)
    return page.render(sections=sections, width=WIDTH, label=LABEL, height=BAR)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, nargs="+", help="files of JSON lines")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        results = [
            json.loads(line)
            for path in options.results
            for line in path.read_text(encoding="utf-8").splitlines()
            if line.strip()
        ]
        page = render(results)
    except (OSError, ValueError, KeyError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    options.out.write_text(page, encoding="utf-8")
    print(f"{options.out}: {len(results)} results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
