"""What the cells of a load test add up to: JSON values, and tables for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.cells import Cell, Level
from loadtest.completion import Timing
from loadtest.peer import Peer
from loadtest.stats import median_interval, ratio, summarize

SLO_NAMES = ("ttft", "tpot", "e2e")


def parse_slo(text: str) -> dict[str, float]:
    """`ttft=0.5,tpot=0.05` in seconds. Raises ValueError for an unknown name or a bad number."""
    limits: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in SLO_NAMES:
            raise ValueError(f"--slo knows {', '.join(SLO_NAMES)}, not {name!r}")
        limits[name] = float(value)
        if not limits[name] > 0:
            raise ValueError(f"--slo {name} must be positive")
    return limits


def meets_slo(timing: Timing, late_s: float, slo: Mapping[str, float]) -> bool:
    """Whether a request kept every limit. One-chunk answers keep any TPOT."""
    if not timing.chunk_s:
        return False
    figures = {
        "ttft": timing.ttft_s + late_s,
        "tpot": timing.tpot_s or 0.0,
        "e2e": timing.end_s - timing.start_s + late_s,
    }
    return all(figures[name] <= limit for name, limit in slo.items())


LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")


def latencies(timings: Sequence[Timing], lates: Sequence[float]) -> dict[str, list[float]]:
    """Every sample of LATENCIES, in seconds; the first and the last count from the due time."""
    return {
        "ttft_s": [t.ttft_s + x for t, x in zip(timings, lates, strict=True) if t.chunk_s],
        "tpot_s": [v for t in timings if (v := t.tpot_s) is not None],
        "itl_s": [gap for t in timings for gap in t.inter_chunk_s],
        "e2e_s": [t.end_s - t.start_s + x for t, x in zip(timings, lates, strict=True)],
    }


def _account(
    timings: Sequence[Timing], lates: Sequence[float], num_failed: int, slo: Mapping[str, float]
) -> dict[str, Any]:
    """What a set of requests got, as JSON values; the failed ones met no objective."""
    good = sum(meets_slo(t, late, slo) for t, late in zip(timings, lates, strict=True))
    steps = sum((t.speculation or {}).get("steps", 0) for t in timings)
    drafted = sum((t.speculation or {}).get("drafted_tokens", 0) for t in timings)
    with_steps = sum(t.num_tokens for t in timings if t.speculation)
    decode = summarize([v for t in timings if (v := t.decode_tokens_per_s) is not None])
    return {
        "num_requests": len(timings) + num_failed,
        "num_good": good,
        "good_share": good / max(1, len(timings) + num_failed),
        "tokens_per_step": with_steps / steps if steps else None,
        "nodes_per_step": drafted / steps if steps else None,
        "decode_tokens_per_s": None if decode is None else decode.to_json(),
        **{
            name: None if (s := summarize(values)) is None else s.to_json()
            for name, values in latencies(timings, lates).items()
        },
    }


def by_round(cells: Sequence[Cell], slo: Mapping[str, float]) -> dict[str, list[float | None]]:
    """One figure a cell of: tokens/s, good requests/s, and the median of the streams' decode speed
    and of each latency (TTFT: p95 and p99, too). None where a cell has none."""
    found: dict[str, list[float | None]] = {}
    for cell in cells:
        samples = latencies(cell.timings, cell.late_s)
        good = sum(
            meets_slo(t, late, slo) for t, late in zip(cell.timings, cell.late_s, strict=True)
        )
        figures: dict[str, float | None] = {
            "tokens_per_s": cell.tokens_per_s,
            "goodput_per_s": good / cell.wall_s,
        }
        decode = [v for t in cell.timings if (v := t.decode_tokens_per_s) is not None]
        figures["decode_tokens_per_s"] = None if (d := summarize(decode)) is None else d.p50
        for name in LATENCIES:
            told = summarize(samples[name])
            figures[name] = None if told is None else told.p50
            if name == "ttft_s":
                figures["ttft_p95_s"] = None if told is None else told.p95
                figures["ttft_p99_s"] = None if told is None else told.p99
        for name, value in figures.items():
            found.setdefault(name, []).append(value)
    return found


RATIOS = ("tokens_per_s", "decode_tokens_per_s", *LATENCIES, "ttft_p95_s")


def _ratios(
    own: Mapping[str, Sequence[float | None]], base: Mapping[str, Sequence[float | None]]
) -> dict[str, Any]:
    """server / first server of RATIOS, paired by round; None where a round lacks one."""
    found: dict[str, Any] = {}
    for name in RATIOS:
        pairs = [(a, b) for a, b in zip(own[name], base[name], strict=True) if a and b]
        whole = bool(pairs) and len(pairs) == len(own[name])
        found[name] = ratio(*zip(*pairs, strict=True)).to_json() if whole else None
    return found


def _of_data_set(cell: Cell, name: str) -> Cell:
    """The part of a cell whose prompts are from one data set."""
    keep = [i for i, data_set in enumerate(cell.data_sets) if data_set == name]
    return replace(
        cell,
        timings=[cell.timings[i] for i in keep],
        late_s=[cell.late_s[i] for i in keep],
        data_sets=[name] * len(keep),
        failures=[f for f in cell.failures if f.startswith(f"{name}: ")],
    )


def _together(cells: Sequence[Cell]) -> dict[str, Any]:
    """What streams at once did to each other: the worst first token and silence in seconds, and
    the slowest stream's share of its cell's median speed."""
    silences, shares = [], []
    for cell in cells:
        silences += [gap for t in cell.timings for gap in t.inter_chunk_s]
        rates = sorted(t.end_to_end_tokens_per_s for t in cell.timings if t.chunk_s)
        if rates:
            shares.append(rates[0] / rates[len(rates) // 2])
    firsts = [t.ttft_s for cell in cells for t in cell.timings if t.chunk_s]
    usages = [cell.kv_usage_after for cell in cells if cell.kv_usage_after is not None]
    return {
        "worst_ttft_s": max(firsts, default=None),
        "worst_silence_s": max(silences, default=None),
        "slowest_share": min(shares, default=None),
        "kv_usage_after": max(usages, default=None),
        "worst_foreign_cores": round(max((cell.foreign_cores for cell in cells), default=0.0), 2),
        "num_runs": sum(len(cell.timings) for cell in cells),
        "num_tokens": sorted({t.num_tokens for cell in cells for t in cell.timings}),
        "num_cached_tokens": max(
            (t.num_cached_tokens for cell in cells for t in cell.timings), default=0
        ),
    }


def _row(own: Sequence[Cell], of_base: Sequence[Cell], slo: Mapping[str, float]) -> dict[str, Any]:
    """One server at one level. of_base: the first server's cells there, the same for itself."""
    timings = [t for c in own for t in c.timings]
    wall = sum(c.wall_s for c in own)
    num_failed = sum(len(c.failures) for c in own)
    rounds, is_base = by_round(own, slo), own[:1] == of_base[:1]
    account = _account(timings, [late for c in own for late in c.late_s], num_failed, slo)
    good = account.pop("num_good")
    ratios = {} if is_base or len(own) != len(of_base) else _ratios(rounds, by_round(of_base, slo))
    data_sets = {}
    for name in sorted({name for c in own for name in c.data_sets}):
        part = [_of_data_set(c, name) for c in own]
        data_sets[name] = _account(
            [t for c in part for t in c.timings],
            [late for c in part for late in c.late_s],
            sum(len(c.failures) for c in part),
            slo,
        )
        if ratios:
            base = [_of_data_set(c, name) for c in of_base]
            data_sets[name]["ratios"] = _ratios(by_round(part, slo), by_round(base, slo))
    return {
        **account,
        **_together(own),
        "num_failed": num_failed,
        "failures": sorted({f for c in own for f in c.failures})[:5],
        "requests_per_s": len(timings) / wall,
        "tokens_per_s": sum(t.num_tokens for t in timings) / wall,
        "goodput_per_s": good / wall,
        "ratio": ratios.get("tokens_per_s"),
        "ratios": ratios,
        "rounds": {
            name: median_interval(told).to_json()
            for name, values in rounds.items()
            if (told := [value for value in values if value is not None])
        },
        "data_sets": data_sets,
    }


def report(
    cells: Sequence[Cell], peers: Sequence[Peer], levels: Sequence[Level], slo: Mapping[str, float]
) -> dict[str, Any]:
    """All figures as JSON values. Latencies in seconds; ratios are server / first server, of the
    rounds' medians for latencies. A level or server without a finished cell is left out."""
    base = peers[0].name
    figures: dict[str, Any] = {}
    for level in levels:
        at = [c for c in cells if c.level == level]
        rows = {
            peer.name: _row(own, [c for c in at if c.server == base], slo)
            for peer in peers
            if (own := [c for c in at if c.server == peer.name])
        }
        if rows:
            figures[level.label] = rows
    return {"base": base, "slo": dict(slo), "figures": figures}


def text_groups(cells: Sequence[Cell], prompt: str, ours: str) -> list[dict[str, Any]]:
    """The different texts of a prompt, most common first (ours among equals), with the servers that
    said them.

    `diverges_at` is the first character that differs from the first group's text.
    """
    texts: dict[str, dict[str, int]] = {}
    for cell in cells:
        for timing, name in zip(cell.timings, cell.data_sets, strict=True):
            if name == prompt:
                counts = texts.setdefault(timing.text, {})
                counts[cell.server] = counts.get(cell.server, 0) + 1
    ordered = sorted(
        texts.items(),
        key=lambda item: (-len(item[1]), -sum(item[1].values()), ours not in item[1]),
    )
    groups: list[dict[str, Any]] = []
    for text, counts in ordered:
        reference = ordered[0][0]
        common = next(
            (at for at, (a, b) in enumerate(zip(text, reference, strict=False)) if a != b),
            min(len(text), len(reference)),
        )
        groups.append(
            {
                "servers": counts,
                "num_chars": len(text),
                "diverges_at": None if text == reference else common,
                "text_there": None if text == reference else text[common : common + 40],
            }
        )
    return groups


def _pair(row: Mapping[str, Any], name: str, scale: float) -> str:
    found = row[name]
    return "-" if found is None else f"{found['p50'] * scale:.4g}/{found['p99'] * scale:.4g}"


def _interval(found: Mapping[str, float] | None) -> str:
    if found is None:
        return ""
    return f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else f"{value:{form}}"


def _level_table(level: str, rows: Mapping[str, Any], base: str) -> Table:
    table = Table(title=f"{level}; ratio = server / {base}")
    for column in (
        "server", "req/s", "tok/s", "ratio", "TTFT p50/p99 ms", "TPOT p50/p99 ms",
        "ITL p50/p99 ms", "e2e p50/p99 s", "silence s", "slowest", "good", "tok/step",
        "nodes/step", "others' cores", "failed",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "server" else "right")
    for server, row in rows.items():
        table.add_row(
            server,
            f"{row['requests_per_s']:.2f}",
            f"{row['tokens_per_s']:.1f}",
            _interval(row["ratio"]),
            _pair(row, "ttft_s", 1000),
            _pair(row, "tpot_s", 1000),
            _pair(row, "itl_s", 1000),
            _pair(row, "e2e_s", 1),
            _number(row["worst_silence_s"]),
            _number(row["slowest_share"]),
            f"{row['good_share']:.0%}",
            _number(row["tokens_per_step"]),
            _number(row["nodes_per_step"]),
            f"{row['worst_foreign_cores']:.2f}",
            str(row["num_failed"]),
        )
    return table


def _data_set_table(level: str, rows: Mapping[str, Any], base: str) -> Table:
    table = Table(title=f"{level}, by data set; ratio = server / {base}")
    for column in (
        "data set", "server", "requests", "decode tok/s", "ratio", "TTFT p50 ms", "ratio",
        "tok/step",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column in ("data set", "server") else "right")
    for name in sorted({name for row in rows.values() for name in row["data_sets"]}):
        for server, row in rows.items():
            part = row["data_sets"].get(name)
            if part is None:
                continue
            ratios, decode, first = (
                part.get("ratios", {}),
                part["decode_tokens_per_s"],
                part["ttft_s"],
            )
            table.add_row(
                name, server, str(part["num_requests"]),
                _number(decode and decode["p50"], ".1f"),
                _interval(ratios.get("decode_tokens_per_s")),
                _number(first and first["p50"] * 1000, ".4g"),
                _interval(ratios.get("ttft_s")),
                _number(part["tokens_per_step"]),
            )  # fmt: skip
    return table


def print_report(console: Console, result: Mapping[str, Any]) -> None:
    """The figures as tables for a person; the texts of fixed prompts too."""
    for level, rows in result["figures"].items():
        console.print(_level_table(level, rows, result["base"]))
        if any(len(row["data_sets"]) > 1 for row in rows.values()):
            console.print(_data_set_table(level, rows, result["base"]))
    for prompt, groups in result.get("texts", {}).items():
        if len(groups) == 1:
            console.print(f"{prompt}: the same text from all ({groups[0]['num_chars']} characters)")
        for group in groups[1:]:
            names = ", ".join(group["servers"])
            console.print(
                f"{prompt}: {names} differs at character {group['diverges_at']}: "
                f"{group['text_there']!r}",
                markup=False,
            )
