"""The figures of `loadtest.speedup`: of a sitting's answers, of their replay, and the tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from loadtest.completion import Timing
from loadtest.peer import PeerFailed
from loadtest.stats import ratio

OFF, COLD, LEARNED, WARM = WAYS = "off", "cold", "learned", "warm"
"""Ways of answering: no drafts; `auto` alone; after requests before; with a corpus."""


@dataclass(slots=True)
class Answer:
    """One measured request. cpu_s: of the server's processes, while it ran."""

    timing: Timing
    cpu_s: float

    @property
    def seconds(self) -> float:
        return self.timing.end_s - self.timing.start_s

    @property
    def decode_s(self) -> float:
        """From the first chunk to the last one."""
        times = self.timing.chunk_s
        return times[-1] - times[0] if len(times) > 1 else 0.0

    @property
    def decode_tokens(self) -> int:
        return self.timing.num_tokens - self.timing.chunk_tokens[0]


@dataclass(slots=True)
class Sitting:
    """All answers of one data set: answers[variant][pair] in the order of the prompts.

    Written by `measure_set` only. foreign_cores: most that others used during one pair.
    """

    answers: dict[str, list[list[Answer]]] = field(default_factory=dict)
    foreign_cores: float = 0.0

    def book(self, variant: str, pair: int, answer: Answer) -> None:
        pairs = self.answers.setdefault(variant, [])
        while len(pairs) <= pair:
            pairs.append([])
        pairs[pair].append(answer)


def figures_of(sitting: Sitting, variants: Sequence[str], peers: Sequence[str]) -> dict[str, Any]:
    """A data set's figures as JSON values; ratios are above 1 where drafting is faster."""
    plain = sitting.answers[OFF]
    rows = {name: _variant_row(sitting.answers[name]) for name in variants}
    ratios = {name: _ratios(plain, sitting.answers[name]) for name in variants if name != OFF}
    different = sum(
        a.timing.token_ids != b.timing.token_ids
        for name in variants
        for a, b in zip(_flat(plain), _flat(sitting.answers[name]), strict=True)
    )
    beside: dict[str, Any] = {}
    for peer in peers:
        theirs = [pair for pair in sitting.answers[peer] if pair]
        own = {name: sitting.answers[name][-len(theirs) :] for name in variants}
        speeds = [_rate(pair) for pair in theirs]
        beside[peer] = {
            "num_rounds": len(theirs),
            "tokens_per_s": float(np.median(speeds)),
            "cpu_s_per_token": _cpu(theirs),
            "same_text": sum(
                a.timing.text == b.timing.text
                for a, b in zip(_flat(theirs), _flat(own[OFF]), strict=True)
            ),
            "num_texts": len(_flat(theirs)),
            "tailor_tokens_per_s": {
                name: float(np.median([_rate(pair) for pair in own[name]])) for name in variants
            },
            "ratio": {
                name: ratio([_rate(pair) for pair in own[name]], speeds).to_json()
                for name in variants
            },
        }
    prompts = [a.timing.num_prompt_tokens or 0 for a in _flat(plain)]
    return {
        "num_requests": len(_flat(plain)),
        "mean_prompt_tokens": float(np.mean(prompts)),
        "mean_output_tokens": float(np.mean([a.timing.num_tokens for a in _flat(plain)])),
        "num_different": different,
        "foreign_cores": round(sitting.foreign_cores, 2),
        "variants": rows,
        "ratios": ratios,
        "peers": beside,
    }


def _flat(pairs: Sequence[Sequence[Answer]]) -> list[Answer]:
    return [answer for pair in pairs for answer in pair]


def _rate(pair: Sequence[Answer]) -> float:
    """End-to-end tokens/s over one pair's prompts."""
    return sum(a.timing.num_tokens for a in pair) / sum(a.seconds for a in pair)


def _decode_rate(pair: Sequence[Answer]) -> float:
    """Tokens after the first chunk over the time after it; 0 where nothing came after it."""
    seconds = sum(a.decode_s for a in pair)
    return sum(a.decode_tokens for a in pair) / seconds if seconds > 0 else 0.0


def _cpu(pairs: Sequence[Sequence[Answer]]) -> float:
    answers = _flat(pairs)
    return sum(a.cpu_s for a in answers) / sum(a.timing.num_tokens for a in answers)


def _variant_row(pairs: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    answers = _flat(pairs)
    counts = {
        key: sum((a.timing.speculation or {}).get(key, 0) for a in answers)
        for key in ("steps", "drafted_tokens", "accepted_tokens")
    }
    tokens = sum(a.timing.num_tokens for a in answers)
    return {
        **counts,
        "tokens": tokens,
        "tokens_per_step": tokens / max(1, counts["steps"]),
        # A step verifies its last token and its draft nodes.
        "rows_per_token": (counts["steps"] + counts["drafted_tokens"]) / tokens,
        "nodes_per_step": counts["drafted_tokens"] / max(1, counts["steps"]),
        "cpu_s_per_token": _cpu(pairs),
        "tokens_per_s": float(np.median([_rate(pair) for pair in pairs])),
        "decode_tokens_per_s": float(np.median([_decode_rate(pair) for pair in pairs])),
        "pair_seconds": [round(sum(a.seconds for a in pair), 4) for pair in pairs],
    }


def _ratios(
    plain: Sequence[Sequence[Answer]], drafted: Sequence[Sequence[Answer]]
) -> dict[str, Any]:
    def seconds(pairs: Sequence[Sequence[Answer]]) -> list[float]:
        return [sum(a.seconds for a in pair) for pair in pairs]

    rates = [
        (own, other)
        for a, b in zip(drafted, plain, strict=True)
        if (own := _decode_rate(a)) > 0 and (other := _decode_rate(b)) > 0
    ]
    return {
        "end_to_end": ratio(seconds(plain), seconds(drafted)).to_json(),
        "decode": ratio([a for a, _ in rates], [b for _, b in rates]).to_json() if rates else None,
        "total": sum(seconds(plain)) / sum(seconds(drafted)),
        "cpu": _cpu(plain) / _cpu(drafted) if _cpu(drafted) > 0 else None,
    }


def forecasts_of(
    sitting: Sitting, variants: Sequence[str], cost: Mapping[str, Any], corpus: Path | None,
    max_nodes: int,
) -> dict[str, Any]:  # fmt: skip
    """What replaying the same outputs with `cost` (CostTable.as_dict) promises, by variant."""
    from drafters import make_drafter
    from drafters.corpus import Corpus
    from drafters.replay import Recording
    from server.engine.budget import CostTable
    from server.engine.forecast import ServedBy, forecast

    recordings = [
        Recording(a.timing.prompt_token_ids, a.timing.token_ids)
        for a in _flat(sitting.answers[OFF])
    ]
    found: dict[str, Any] = {}
    for name in variants:
        if name in (OFF, LEARNED):  # a replay does not know what was learned before
            continue
        own = Corpus.load(corpus, fingerprint=None) if name == WARM and corpus is not None else None
        drafter: Any = make_drafter("auto", **({} if own is None else {"corpus": own}))
        drafter.warm_up()  # compiling is none of a step's cost
        expected = forecast(
            drafter,
            recordings,
            ServedBy(CostTable.from_dict(dict(cost))),
            max_draft_tokens=max_nodes,
        )
        tokens = sum(len(recording.output_ids) for recording in recordings)
        found[name] = {
            "speedup": expected.speedup,
            "decode_speedup": expected.decode_speedup,
            # As in `variants`: all tokens, and the step that ends the prompt is one.
            "tokens_per_step": tokens / (expected.num_steps + len(recordings)),
            "nodes_per_step": expected.num_rows / (expected.num_steps + len(recordings)),
        }
    return found


def read_cost(cache_dir: Path) -> dict[str, Any]:
    """The one cost table that a server has left in its cache. Raises PeerFailed without one."""
    files = sorted((cache_dir / "costs").glob("*.json"))
    if len(files) != 1:
        raise PeerFailed(f"{len(files)} cost tables in {cache_dir}, not 1")
    plain: dict[str, Any] = json.loads(files[0].read_text())
    return plain


def read_done(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of an earlier sitting by data set; none when the file is not there."""
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {line["set"]: line for line in lines if "set" in line}


def summary_of(done: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the data sets, and the sets that miss a rule, by variant."""
    found: dict[str, Any] = {}
    for name in WAYS[1:]:
        rows = {key: row for key, row in done.items() if name in row["ratios"]}
        if not rows:
            continue
        speeds = {key: row["ratios"][name]["end_to_end"] for key, row in rows.items()}
        kept = {
            key: row["ratios"][name]["total"] / row["forecast"][name]["speedup"]
            for key, row in rows.items()
            if name in row["forecast"]
        }
        found[name] = {
            "num_sets": len(rows),
            "median_speedup": float(np.median([r["median"] for r in speeds.values()])),
            "median_decode_speedup": float(
                np.median([r["ratios"][name]["decode"]["median"] for r in rows.values()
                           if r["ratios"][name]["decode"]])
            ),
            "slower_than_off": sorted(key for key, r in speeds.items() if r["low"] < 0.95),
            "below_forecast": sorted(key for key, share in kept.items() if share < 0.9),
        }  # fmt: skip
    peers = sorted({peer for row in done.values() for peer in row["peers"]})
    found["peers"] = {
        peer: {
            name: float(
                np.median(
                    [
                        row["peers"][peer]["ratio"][best]["median"]
                        for row in done.values()
                        if peer in row["peers"]
                        for best in [name if name in row["peers"][peer]["ratio"] else COLD]
                    ]
                )
            )
            for name in WAYS
        }
        for peer in peers
    }
    found["different_texts"] = sum(row["num_different"] for row in done.values())
    return found


def table_cells(done: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of the main table: a row a data set and variant."""
    columns = [
        "set", "corpus", "end to end", "decode", "CPU s", "tokens/step", "rows/token",
        "nodes/step", "forecast", "of forecast", "others' cores",
    ]  # fmt: skip
    rows = []
    for key, row in done.items():
        for name, found in row["ratios"].items():
            own, expected = row["variants"][name], row["forecast"].get(name)
            promised, share = "-", "-"
            if expected is not None:
                promised = f"{expected['speedup']:.2f} ({expected['tokens_per_step']:.2f}/step)"
                share = f"{found['total'] / expected['speedup']:.2f}"
            rows.append(
                [
                    key,
                    name,
                    told_interval(found["end_to_end"]),
                    told_interval(found["decode"]),
                    "-" if found["cpu"] is None else f"{found['cpu']:.2f}",
                    f"{own['tokens_per_step']:.2f}",
                    f"{own['rows_per_token']:.2f}",
                    f"{own['nodes_per_step']:.1f}",
                    promised,
                    share,
                    f"{row['foreign_cores']:.2f}",
                ]
            )
    return columns, rows


def peer_cells(done: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of the table of peers: tokens/s end to end, then the ratios' medians."""
    peers = sorted({peer for row in done.values() for peer in row["peers"]})
    if not peers:
        return [], []
    told = [row for row in done.values() if row["peers"]]
    ways = [
        name
        for name in WAYS
        if any(name in found["ratio"] for row in told for found in row["peers"].values())
    ]
    columns = ["set", *(f"Tailor, {name}" for name in ways), *peers]
    rows = []
    for key, row in done.items():
        if not row["peers"]:
            continue
        first = next(iter(row["peers"].values()))
        cells = [key]
        for name in ways:
            speed = first["tailor_tokens_per_s"].get(name)
            cells.append("-" if speed is None else f"{speed:.1f}")
        for peer in peers:
            found = row["peers"].get(peer)
            if found is None:
                cells.append("-")
                continue
            ratios = " / ".join(f"{r['median']:.2f}" for r in found["ratio"].values())
            same = "" if found["same_text"] == found["num_texts"] else (
                f", {found['same_text']} of {found['num_texts']} texts"
            )  # fmt: skip
            cells.append(f"{found['tokens_per_s']:.1f} ({ratios}{same})")
        rows.append(cells)
    medians = summary_of(done)["peers"]
    rows.append(
        ["median ratio", *("" for _ in ways),
         *(" / ".join(f"{medians[peer][name]:.2f}" for name in ways) for peer in peers)]
    )  # fmt: skip
    return columns, rows


def told_interval(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    return f"{found['median']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for docs/benchmarks."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def print_tables(console: Console, done: Mapping[str, Mapping[str, Any]]) -> None:
    """To the console for a person, to stdout for docs/benchmarks."""
    titles = ("off / auto, times faster", "tokens/s (Tailor's ways over the server)")
    for title, (columns, rows) in zip(titles, (table_cells(done), peer_cells(done)), strict=True):
        if not rows:
            continue
        table = Table(title=title)
        for column in columns:
            table.add_column(column, justify="left" if column == "set" else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        print(markdown(columns, rows), end="\n\n")


def cost_at(cost: Mapping[str, Any], rows: int) -> float:
    """Seconds of a step of so many rows in `cost` (CostTable.as_dict)."""
    from server.engine.budget import CostTable

    return CostTable.from_dict(dict(cost)).cost(rows)
