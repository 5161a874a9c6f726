"""What engines tell of themselves, as series of /metrics.

An engine declares its figures when it is ready (ModelInfo.figures) and tells their values when
somebody asks (EngineClient.ask_figures), counted from its start. Here they get the labels `engine`
and `model`, and counters and histograms go on where they were when an engine was started again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from server.types import Figure, FigureValue

_Numbers = tuple[float, ...]
"""One number; of a histogram, how many values lay in each bucket and above, and their sum."""


class _Life:
    """An engine slot. Of each figure, by the values of its labels: numbers, what was told last, and
    before, what earlier processes of the slot had counted."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.figures: Sequence[Figure] = ()
        self.numbers: dict[str, dict[tuple[str, ...], _Numbers]] = {}
        self.before: dict[str, dict[tuple[str, ...], _Numbers]] = {}


class EngineFigures(Collector):
    """See the top of this file."""

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}

    def begin(self, engine: str, model: str, figures: Sequence[Figure]) -> None:
        """An engine is ready; it counts from 0."""
        life = self._lives.setdefault(engine, _Life(model))
        self.end(engine)
        life.figures = figures

    def told(self, engine: str, values: Iterable[FigureValue]) -> None:
        """What an engine told, in the order of its figures. One that was not ready is not known."""
        life = self._lives.get(engine)
        for figure, value in zip(life.figures if life else (), values, strict=False):
            assert life is not None
            life.numbers[figure.name] = _by_labels(figure, value)

    def end(self, engine: str) -> None:
        """An engine is gone: it holds nothing, and what it counted stays."""
        life = self._lives.get(engine)
        for figure in () if life is None else life.figures:
            assert life is not None
            told = life.numbers.get(figure.name, {})
            if figure.kind == "gauge":
                life.numbers[figure.name] = dict.fromkeys(told, (0.0,))
                continue
            before = life.before.setdefault(figure.name, {})
            for labels, numbers in told.items():
                before[labels] = _sum(before.get(labels), numbers)
            life.numbers[figure.name] = {}

    def describe(self) -> list[Metric]:
        """Nothing: what there is is known when an engine is ready."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family for each figure that some engine has told."""
        families: dict[str, Any] = {}
        for engine, life in self._lives.items():
            for figure in life.figures:
                told, before = life.numbers.get(figure.name, {}), life.before.get(figure.name, {})
                for labels in {**before, **told}:
                    numbers = _sum(before.get(labels), told.get(labels))
                    if figure.name not in families:
                        names = ("engine", "model", *figure.labels)
                        made = _KINDS[figure.kind](
                            f"tailor_{figure.name}", figure.text, labels=names
                        )
                        families[figure.name] = made
                    _add(families[figure.name], (engine, life.model, *labels), figure, numbers)
        yield from families.values()


def _by_labels(figure: Figure, value: Any) -> dict[tuple[str, ...], _Numbers]:
    if value is None:
        return {}
    if figure.kind == "histogram":
        return {(): (*value[0], value[1])}
    if isinstance(value, int | float):
        return {(): (value,)}
    return {tuple(labels): (number,) for labels, number in value}


def _sum(a: _Numbers | None, b: _Numbers | None) -> _Numbers:
    if a is None or b is None:
        return a or b or ()
    return tuple(x + y for x, y in zip(a, b, strict=True))


_KINDS: dict[str, type[Any]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _add(family: Any, labels: tuple[str, ...], figure: Figure, numbers: _Numbers) -> None:
    if figure.kind != "histogram":
        family.add_metric(labels, numbers[0])
        return
    edges, buckets, count = (*figure.buckets, float("inf")), [], 0.0
    for edge, number in zip(edges, numbers[:-1], strict=True):
        count += number
        buckets.append((str(floatToGoString(edge)), count))  # type: ignore[no-untyped-call]
    family.add_metric(labels, buckets, numbers[-1])


def total(figures: Sequence[Figure], told: Sequence[Sequence[Any]]) -> list[FigureValue]:
    """The values of several engines as those of one: sums; shares as means, and of what is decided
    anew each step the largest."""
    values: list[FigureValue] = []
    for i, figure in enumerate(figures):
        found = [by for one in told if (by := _by_labels(figure, one[i]))]
        sums: dict[tuple[str, ...], _Numbers] = {}
        for by in found:
            for labels, numbers in by.items():
                is_largest = figure.name in ("draft_budget", "vocab_verify_every")
                before = sums.get(labels)
                sums[labels] = (
                    max(before or numbers, numbers) if is_largest else _sum(before, numbers)
                )
        if figure.name.endswith("_perc"):
            sums = {labels: (numbers[0] / len(found),) for labels, numbers in sums.items()}
        if figure.kind == "histogram":
            numbers = sums.get((), (0.0,) * (len(figure.buckets) + 2))
            values.append((tuple(map(int, numbers[:-1])), numbers[-1]))
        elif figure.labels:
            values.append(tuple((labels, numbers[0]) for labels, numbers in sorted(sums.items())))
        else:
            values.append(sums[()][0] if sums else None)
    return values
