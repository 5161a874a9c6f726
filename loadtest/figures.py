"""What the cells of a load test add up to: JSON values, and tables for a person.

Servers are measured in alternating rounds, so that a slow minute of the machine hits all of them:
the figure of interest is the ratio *within* a round. Its spread is a percentile bootstrap over
rounds (Efron, "Bootstrap methods: another look at the jackknife", Ann. Statist. 1979).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from loadtest.cells import Answer, Cell, Level
from loadtest.peer import Peer, Timing
from server.commands.quality import estimate, exact, f1


def summarize(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p95 and p99 of `values`, in their own unit; None when there are none."""
    if not values:
        return None
    p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
    return {"p50": p50, "p95": p95, "p99": p99}


NUM_RESAMPLES = 10_000


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """median, low and high of numerators[i] / denominators[i], as median_interval gives them. All
    are above 0. With one pair the interval is the point itself: no spread is known, and num says
    so."""
    return median_interval([a / b for a, b in zip(numerators, denominators, strict=True)])


def median_interval(values: Sequence[float]) -> dict[str, float]:
    """The median of `values`, low and high of its two-sided 95 % percentile-bootstrap interval, and
    num, of the values. Raises ValueError for none."""
    sample = np.asarray(values, dtype=np.float64)
    if not sample.size:
        raise ValueError("no value")
    picks = np.random.default_rng(0).integers(0, len(sample), size=(NUM_RESAMPLES, len(sample)))
    low, high = np.percentile(np.median(sample[picks], axis=1), [2.5, 97.5]).tolist()
    return {"median": float(np.median(sample)), "low": low, "high": high, "num": len(sample)}


def first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    """The place where two texts or lists differ first; of equal ones their length."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


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


def _account(
    answers: Sequence[Answer], num_failed: int, slo: Mapping[str, float]
) -> dict[str, Any]:
    """What a set of requests got, as JSON values; the failed ones met no objective."""
    good = sum(meets_slo(answer.timing, answer.late_s, slo) for answer in answers)
    speculation = [a.timing.speculation for a in answers if a.timing.speculation]
    steps = sum(one.get("steps", 0) for one in speculation)
    drafted = sum(one.get("drafted_tokens", 0) for one in speculation)
    with_steps = sum(a.timing.num_tokens for a in answers if a.timing.speculation)
    timings = [answer.timing for answer in answers]
    # The streams' decode speeds, and LATENCIES, of which the first and the last count from the due
    # time.
    samples = {
        "decode_tokens_per_s": [v for t in timings if (v := t.decode_tokens_per_s) is not None],
        "ttft_s": [a.timing.ttft_s + a.late_s for a in answers if a.timing.chunk_s],
        "tpot_s": [v for t in timings if (v := t.tpot_s) is not None],
        "itl_s": [gap for t in timings for gap in t.inter_chunk_s],
        "e2e_s": [a.timing.end_s - a.timing.start_s + a.late_s for a in answers],
    }
    return {
        "num_requests": len(answers) + num_failed,
        "num_good": good,
        "good_share": good / max(1, len(answers) + num_failed),
        "tokens_per_step": with_steps / steps if steps else None,
        "nodes_per_step": drafted / steps if steps else None,
        **{name: summarize(values) for name, values in samples.items()},
    }


def quality(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """Exact match and word F1 of the answers whose data have a completion; None without one."""
    pairs = [(a.example.completion, a.timing.text) for a in answers if a.example.completion]
    if not pairs:
        return None
    return {
        metric.__name__: asdict(estimate([metric(gold, text) for gold, text in pairs]))
        for metric in (exact, f1)
    }


def by_round(cells: Sequence[Cell], slo: Mapping[str, float]) -> dict[str, list[float | None]]:
    """One figure a cell of: tokens/s, characters/s, good requests/s, CPU seconds per 1,000 tokens,
    and the median of the streams' decode speed and of each latency (TTFT: p95 and p99, too). None
    where a cell has none."""
    found: dict[str, list[float | None]] = {}
    for cell in cells:
        account = _account(cell.answers, 0, slo)
        figures: dict[str, float | None] = {
            "tokens_per_s": cell.num_tokens / cell.wall_s,
            "chars_per_s": cell.num_chars / cell.wall_s,
            "goodput_per_s": account["num_good"] / cell.wall_s,
            "cpu_s_per_1000": None,
        }
        if cell.cpu_s is not None and cell.num_tokens:
            figures["cpu_s_per_1000"] = 1000 * cell.cpu_s / cell.num_tokens
        for name in ("decode_tokens_per_s", *LATENCIES):
            figures[name] = account[name] and account[name]["p50"]
        for part in ("p95", "p99"):
            figures[f"ttft_{part}_s"] = account["ttft_s"] and account["ttft_s"][part]
        for name, value in figures.items():
            found.setdefault(name, []).append(value)
    return found


RATIOS = (
    "tokens_per_s", "chars_per_s", "decode_tokens_per_s", "cpu_s_per_1000", *LATENCIES,
    "ttft_p95_s",
)  # fmt: skip


def _ratios(
    own: Mapping[str, Sequence[float | None]], base: Mapping[str, Sequence[float | None]]
) -> dict[str, Any]:
    """server / first server of RATIOS, paired by round; None where a round lacks one."""
    found: dict[str, Any] = {}
    for name in RATIOS:
        pairs = [(a, b) for a, b in zip(own[name], base[name], strict=True) if a and b]
        whole = bool(pairs) and len(pairs) == len(own[name])
        found[name] = ratio(*zip(*pairs, strict=True)) if whole else None
    return found


def _of_data_set(cell: Cell, name: str) -> Cell:
    """The part of a cell whose prompts are from one data set."""
    return replace(
        cell,
        answers=[answer for answer in cell.answers if answer.example.task == name],
        failures=[f for f in cell.failures if f.startswith(f"{name}: ")],
    )


def _together(cells: Sequence[Cell]) -> dict[str, Any]:
    """What streams at once did to each other: the worst first token and silence in seconds, and
    the slowest stream's share of its cell's median speed."""
    timings = [t for cell in cells for t in cell.timings]
    shares = []
    for cell in cells:
        rates = sorted(t.end_to_end_tokens_per_s for t in cell.timings if t.chunk_s)
        if rates:
            shares.append(rates[0] / rates[len(rates) // 2])
    return {
        "worst_ttft_s": max((t.ttft_s for t in timings if t.chunk_s), default=None),
        "worst_silence_s": max((gap for t in timings for gap in t.inter_chunk_s), default=None),
        "slowest_share": min(shares, default=None),
        "worst_foreign_cores": round(max((cell.foreign_cores for cell in cells), default=0.0), 2),
        "num_runs": len(timings),
        "num_tokens": sorted({t.num_tokens for t in timings}),
        "num_cached_tokens": max((t.num_cached_tokens for t in timings), default=0),
    }


def _same_text(own: Sequence[Cell], base: Sequence[Cell]) -> dict[str, Any]:
    """How many answers have the text (the ids, where both have them) that the first server's answer
    to the same request has, and where the first of the others differs."""
    said = {(c.round_id, a.index): a.timing for c in base for a in c.answers}
    found: dict[str, Any] = {"num_compared": 0, "num_same": 0, "first_difference": None}
    for cell in own:
        for answer in cell.answers:
            ours, theirs = answer.timing, said.get((cell.round_id, answer.index))
            if theirs is None:
                continue
            found["num_compared"] += 1
            ids = bool(ours.token_ids and theirs.token_ids)
            if ours.token_ids == theirs.token_ids if ids else ours.text == theirs.text:
                found["num_same"] += 1
            elif found["first_difference"] is None:
                at = first_difference(ours.text, theirs.text)
                found["first_difference"] = {
                    "prompt": answer.example.task, "at": at, "text": ours.text[at : at + 40],
                }  # fmt: skip
    return found


def _row(own: Sequence[Cell], base: Sequence[Cell], slo: Mapping[str, float]) -> dict[str, Any]:
    """One server at one level. base: the first server's cells of the same rounds; none for itself,
    and where a round lacks one."""
    answers = [answer for cell in own for answer in cell.answers]
    wall = sum(c.wall_s for c in own)
    num_failed = sum(len(c.failures) for c in own)
    rounds = by_round(own, slo)
    account = _account(answers, num_failed, slo)
    good = account.pop("num_good")
    ratios = _ratios(rounds, by_round(base, slo)) if base else {}
    data_sets = {}
    for name in sorted({answer.example.task for answer in answers}):
        part = [_of_data_set(cell, name) for cell in own]
        of_set = [answer for cell in part for answer in cell.answers]
        failed = sum(len(cell.failures) for cell in part)
        data_sets[name] = _account(of_set, failed, slo) | {"quality": quality(of_set)}
        if base:
            theirs = by_round([_of_data_set(cell, name) for cell in base], slo)
            data_sets[name]["ratios"] = _ratios(by_round(part, slo), theirs)
    return {
        **account,
        **_together(own),
        "num_failed": num_failed,
        "failures": sorted({f for c in own for f in c.failures})[:5],
        "requests_per_s": len(answers) / wall,
        "tokens_per_s": sum(c.num_tokens for c in own) / wall,
        "chars_per_s": sum(c.num_chars for c in own) / wall,
        "goodput_per_s": good / wall,
        "same_text": _same_text(own, base) if base else None,
        "ratios": ratios,
        "rounds": {
            name: median_interval(known)
            for name, values in rounds.items()
            if (known := [value for value in values if value is not None])
        },
        "data_sets": data_sets,
    }


def report(
    cells: Sequence[Cell], peers: Sequence[Peer], levels: Sequence[Level], slo: Mapping[str, float]
) -> dict[str, Any]:
    """All figures as JSON values. Latencies in seconds; ratios are server / first server, of the
    rounds' medians for latencies. A level or server without a finished cell is left out."""
    figures: dict[str, Any] = {}
    for level in levels:
        of_level = [cell for cell in cells if cell.level == level]
        first = {c.round_id: c for c in of_level if c.server == peers[0].name}
        rows = {}
        for peer in peers:
            own = [cell for cell in of_level if cell.server == peer.name]
            base = [first[cell.round_id] for cell in own if cell.round_id in first]
            if own:
                paired = peer is not peers[0] and len(base) == len(own)
                rows[peer.name] = _row(own, base if paired else [], slo)
        if rows:
            figures[level.label] = rows
    return {"base": peers[0].name, "slo": dict(slo), "figures": figures}


def _pair(found: Mapping[str, float] | None, scale: float) -> str:
    return "-" if found is None else f"{found['p50'] * scale:.4g}/{found['p99'] * scale:.4g}"


def _p50(found: Mapping[str, float] | None, scale: float = 1.0) -> float | None:
    return None if found is None else found["p50"] * scale


def interval(found: Mapping[str, float] | None) -> str:
    """A median with its interval, in a table."""
    if found is None:
        return "-"
    return f"{found['median']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


def number(value: float | None, form: str = ".2f") -> str:
    """A number in a table."""
    return "-" if value is None else f"{value:{form}}"


Columns = Mapping[str, Callable[[Any], str]]
"""Headings, and what stands below them of a row."""

LEVEL: Columns = {
    "req/s": lambda row: number(row["requests_per_s"]),
    "tok/s": lambda row: number(row["tokens_per_s"], ".1f"),
    "ratio": lambda row: interval(row["ratios"].get("tokens_per_s")),
    "chars/s": lambda row: number(row["chars_per_s"], ".0f"),
    "TTFT p50/p99 ms": lambda row: _pair(row["ttft_s"], 1000),
    "TPOT p50/p99 ms": lambda row: _pair(row["tpot_s"], 1000),
    "ITL p50/p99 ms": lambda row: _pair(row["itl_s"], 1000),
    "e2e p50/p99 s": lambda row: _pair(row["e2e_s"], 1),
    "CPU s/1k": lambda row: number(row["rounds"].get("cpu_s_per_1000", {}).get("median")),
    "silence s": lambda row: number(row["worst_silence_s"]),
    "slowest": lambda row: number(row["slowest_share"]),
    "good": lambda row: number(row["good_share"], ".0%"),
    "tok/step": lambda row: number(row["tokens_per_step"]),
    "nodes/step": lambda row: number(row["nodes_per_step"]),
    "others' cores": lambda row: number(row["worst_foreign_cores"]),
    "failed": lambda row: str(row["num_failed"]),
}
DATA_SET: Columns = {
    "requests": lambda part: str(part["num_requests"]),
    "decode tok/s": lambda part: number(_p50(part["decode_tokens_per_s"]), ".1f"),
    "ratio": lambda part: interval(part.get("ratios", {}).get("decode_tokens_per_s")),
    "chars/s ratio": lambda part: interval(part.get("ratios", {}).get("chars_per_s")),
    "TTFT p50 ms": lambda part: number(_p50(part["ttft_s"], 1000), ".4g"),
    "TTFT ratio": lambda part: interval(part.get("ratios", {}).get("ttft_s")),
    "tok/step": lambda part: number(part["tokens_per_step"]),
    "exact": lambda part: number(part["quality"] and part["quality"]["exact"]["mean"], ".1%"),
    "F1": lambda part: number(part["quality"] and part["quality"]["f1"]["mean"], ".1%"),
}


def _table(title: str, columns: Columns, rows: Mapping[Any, Any]) -> Table:
    """rows: by what stands in front of the columns, in a tuple."""
    table = Table(title=title)
    for heading in ("data set", "server")[-len(next(iter(rows))) :]:
        table.add_column(heading)
    for heading in columns:
        table.add_column(heading, justify="right")
    for names, row in rows.items():
        table.add_row(*names, *(shown(row) for shown in columns.values()))
    return table


def print_report(console: Console, result: Mapping[str, Any]) -> None:
    """The figures as tables for a person; the texts of fixed prompts too."""
    for level, rows in result["figures"].items():
        ratio_of = f"ratio = server / {result['base']}"
        by_server = {(server,): row for server, row in rows.items()}
        console.print(_table(f"{level}; {ratio_of}", LEVEL, by_server))
        names = sorted({name for row in rows.values() for name in row["data_sets"]})
        parts = {
            (name, server): row["data_sets"][name]
            for name in names
            for server, row in rows.items()
            if name in row["data_sets"]
        }
        if len(names) > 1 or any(part["quality"] for part in parts.values()):
            console.print(_table(f"{level}, by data set; {ratio_of}", DATA_SET, parts))
        for server, row in rows.items():
            if (texts := row["same_text"]) and texts["num_same"] < texts["num_compared"]:
                where = texts["first_difference"]
                console.print(
                    f"{level}: {texts['num_same']} of {texts['num_compared']} texts of {server} "
                    f"are those of {result['base']}; {where['prompt']} differs at character "
                    f"{where['at']}: {where['text']!r}",
                    markup=False,
                )
