"""The built-in page at /dashboard, for people without Grafana, and the API's at /docs: their
files, and the data.

The pages are static files in this package (server/api/page): no build step, nothing from other
hosts, and a content security policy that allows neither. The files hold no data; what the page
shows comes from `snapshot` at /dashboard/data. All of it needs a key when there are any.

The page reads a JSON route and not /metrics: an answer of this route is about a thirtieth of
/metrics, which matters for a page that is open all day; it also has the open requests, which are no
series; and /metrics is often closed to browsers. All figures are read from the series that /metrics
shows, so that they cannot differ.

The last hour is kept in memory: one point every ten seconds, and of the last minutes all figures,
so that a page that was just opened shows the time before. Both hold cumulative counts, as
snapshots do, so that the page can take the difference of any two. Nothing is written to disk, and
no text or open request is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from server import __version__
from server.api.engines.client import EngineClient
from server.api.keys import ApiKey
from server.api.route_context import caller_of
from server.errors import InvalidRequestError, echoed
from server.types import LATENCY_BUCKETS_S

ROOT_PATH = "/"
"""Leads a browser to the page."""

PATH = "/dashboard"
DOCS_PATH = "/docs"
DATA_PATH = f"{PATH}/data"
HISTORY_PATH = f"{PATH}/history"
MAX_OPEN_SHOWN = 50
"""Open requests in one answer, the oldest first."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FOLDER = Path(__file__).parent / "page"
_PAGES = {"index.html": PATH, "docs.html": DOCS_PATH}
_FILES = {
    _PAGES.get(file.name, f"{PATH}/{file.name}"): file
    for file in sorted(_FOLDER.iterdir())
    if file.suffix in _TYPES
}
PAGE_PATHS = tuple(_FILES)
"""Routes of the pages' files."""

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class View:
    """Who looks. A key sees the tasks that it may use; None (a server without keys) sees all.
    tells_sums: whether a key that is no admin's sees the sums over all keys; if not, only how busy
    the engines are."""

    key: ApiKey | None = None
    tells_sums: bool = True

    @property
    def is_cut(self) -> bool:
        """Whether it sees only how busy the engines are."""
        return not self.tells_sums and self.key is not None and not self.key.admin

    def sees(self, task: str, model: str) -> bool:
        """Whether it sees the figures of a task."""
        return self.key is None or self.key.may_use(task, model)


def add_dashboard(
    app: FastAPI, client: EngineClient, history: History, *, tells_sums: bool
) -> None:
    """Declare the pages and their data. history: the application runs it. tells_sums: of each
    View."""
    static = StaticFiles(directory=_FOLDER)

    async def get_page(request: HttpRequest) -> Response:
        file = _FILES[request.scope["path"]]
        response = static.file_response(file, file.stat(), request.scope)
        response.headers.update(_HEADERS)
        if response.status_code == 200:
            response.headers["content-type"] = _TYPES[file.suffix]
        return response

    for path in PAGE_PATHS:
        app.add_route(path, get_page, include_in_schema=False)

    @app.get(ROOT_PATH, include_in_schema=False)
    async def get_root() -> Response:
        return RedirectResponse(PATH)

    @app.get(DATA_PATH, include_in_schema=False)
    async def get_dashboard_data(request: HttpRequest) -> Response:
        await client.ask_figures()
        view = View(caller_of(request).key, tells_sums)
        figures = snapshot(client, view)
        told = {"version": __version__, "needs_key": view.key is not None}
        return JSONResponse({**told, **figures}, headers={"cache-control": "no-store"})

    @app.get(HISTORY_PATH, include_in_schema=False)
    async def get_dashboard_history(request: HttpRequest, after: str = "") -> Response:
        try:
            after_s = float(after or "-inf")
        except ValueError:
            raise InvalidRequestError(
                f"after: must be a number; got {echoed(after)}.", param="after"
            ) from None
        view = View(caller_of(request).key, tells_sums)
        body: dict[str, Any] = {"points": history.since(after_s, view)}
        if not after:  # a page that was opened just now
            body["recent"] = history.recent(view)
        return JSONResponse(body, headers={"cache-control": "no-store"})


_SECTIONS = {
    ("task", "drafter", "model"): "drafts",
    ("task", "model"): "tasks",
    ("task", "mode", "model"): "slices",
    ("engine", "model"): "engines",
}
"""The lists of a snapshot, by the labels that tell their entries apart."""

_SERIES = {
    f"tailor_{series}": member
    for series, member in {
        "prompt_tokens_total": "prompt_tokens",
        "prompt_tokens_cached_total": "cached_tokens",
        "generation_tokens_total": "tokens",
        "spec_decode_num_decode_steps_total": "steps",
        "spec_decode_num_drafts_total": "drafts",
        "spec_decode_num_draft_tokens_total": "drafted",
        "spec_decode_num_accepted_tokens_total": "accepted",
        "spec_decode_expected_accepted_tokens_total": "expected",
        "spec_decode_num_wasted_rows_total": "wasted",
        "spec_decode_num_offered_per_pos_total": "offered_by_position",
        "spec_decode_num_accepted_tokens_per_pos_total": "accepted_by_position",
        "spec_decode_num_draft_tokens_by_source_total": "drafted_by_source",
        "spec_decode_num_accepted_tokens_by_source_total": "accepted_by_source",
        "spec_decode_num_draft_tokens_by_survival_total": "drafted_by_survival",
        "spec_decode_num_accepted_tokens_by_survival_total": "accepted_by_survival",
        "spec_decode_num_no_draft_total": "no_draft",
        "request_outcomes_total": "outcomes",
        "time_to_first_token_seconds_bucket": "ttft",
        "inter_token_latency_seconds_bucket": "inter_token",
        "e2e_request_latency_seconds_bucket": "end_to_end",
        "request_queue_time_seconds_bucket": "queue",
        "vocab_slice_ids": "ids",
        "vocab_slice_steps_total": "slice_steps",
        "vocab_full_steps_total": "full_steps",
        "vocab_head_rows_total": "head_rows",
        "vocab_verify_windows_total": "windows",
        "vocab_verified_tokens_total": "verified",
        "vocab_slice_misses_total": "misses",
        "vocab_dropped_tokens_total": "dropped",
        "engine_up": "up",
        "num_requests_running": "running",
        "num_requests_waiting": "waiting",
        "num_tokens_waiting": "waiting_tokens",
        "kv_cache_usage_perc": "kv_usage",
        "draft_budget": "draft_budget",
        "model_vocab_size": "vocab_size",
        "engine_steps_total": "steps",
        "step_time_seconds_sum": "step_s",
        "step_model_time_seconds_sum": "model_s",
        "propose_time_seconds_sum": "propose_s",
        "num_preemptions_total": "preemptions",
        "prefix_cache_queries_total": "prefix_queries",
        "prefix_cache_hits_total": "prefix_hits",
        "engine_rows_total": "rows",
    }.items()
}
"""By series: the member of an entry. Of a series with a further label it holds several numbers, by
that label's values, or of a histogram one a bucket."""

_LATENCIES = [member for name, member in _SERIES.items() if name.endswith("_bucket")]
_LOAD = frozenset(
    name for name, member in _SERIES.items() if member in ("up", "running", "waiting", "kv_usage")
)
"""Series that every key may see: how busy the engines are."""


def snapshot(client: EngineClient, view: View) -> dict[str, Any]:
    """All that the page shows, as cumulative counts; the page takes differences itself.

    now_s: a clock to divide differences by. edges_s: upper edges of the latency buckets; one more
    bucket has no upper edge. drafts: sums by task, drafter and model. tasks: outcomes, and counts
    per latency bucket, by task and model. slices: sums by task, mode and model. engines: gauges
    and sums. open: the oldest open requests, without any text of theirs; num_open: all of them.

    Of open requests a key that is no admin's sees its own.
    """
    is_cut, key = view.is_cut, view.key
    told: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {
        section: {} for section in _SECTIONS.values()
    }
    engines = told["engines"]
    for engine in client.engines():
        engines[engine["name"], engine["model"]] = {**engine, "rows": {}}
    for family in client.metrics.families(_SERIES):
        for sample in family.samples:
            name, labels, value = sample.name, sample.labels, sample.value
            if is_cut and name not in _LOAD:
                continue
            task = labels.get("task")
            if task is not None and not view.sees(task, labels["model"]):
                continue
            member, keys, label = _SERIES[name], tuple(labels), ""
            if keys not in _SECTIONS:
                keys, label = keys[:-1], keys[-1]
            section = _SECTIONS[keys]
            at = tuple(labels[key] for key in keys)
            if section == "engines" and at not in engines:
                continue
            entry = told[section].setdefault(at, dict(zip(keys, at, strict=True)))
            if not label:
                entry[member] = value
            elif label == "le":
                entry.setdefault(member, []).append(value)
            else:
                entry.setdefault(member, {})[labels[label]] = value
    for entry in told["tasks"].values():
        for member in _LATENCIES:
            counts = entry.get(member, [0.0] * (len(LATENCY_BUCKETS_S) + 1))
            entry[member] = [
                int(count - before) for count, before in zip(counts, [0.0, *counts], strict=False)
            ]
    open_requests = client.open_requests(None if key is None or key.admin else key.key_id)
    return {
        "now_s": time.monotonic(),
        "edges_s": LATENCY_BUCKETS_S,
        **{section: list(entries.values()) for section, entries in told.items()},
        "num_open": len(open_requests),
        "open": open_requests[:MAX_OPEN_SHOWN],
    }


# --- the last hour --------------------------------------------------------------------------------

EVERY_S = 10.0
NUM_POINTS = 361
NUM_RECENT = 31
"""Points whose figures are kept whole: the page's longest period, five minutes."""


class History:
    """Takes a point every EVERY_S seconds while `run` runs, and forgets those over an hour old.

    look: makes a `snapshot` without a key. What is told is what a View sees.
    """

    def __init__(self, look: Callable[[], Mapping[str, Any]]) -> None:
        self._look = look
        self._points: deque[dict[str, Any]] = deque(maxlen=NUM_POINTS)
        self._recent: deque[dict[str, Any]] = deque(maxlen=NUM_RECENT)

    def take(self) -> None:
        """Add the point of now: counts by task and model (task, model, tokens, steps, drafted,
        accepted), and of all engines together."""
        figures = self._look()
        sums: dict[tuple[str, str], list[float]] = {}
        for entry in figures["drafts"]:
            own = sums.setdefault((entry["task"], entry["model"]), [0.0] * 4)
            for i, name in enumerate(("tokens", "steps", "drafted", "accepted")):
                own[i] += entry.get(name, 0.0)
        engines = figures["engines"]
        point = {
            "now_s": float(figures["now_s"]),
            "running": sum(engine.get("running", 0.0) for engine in engines),
            "engine_steps": sum(engine.get("steps", 0.0) for engine in engines),
            "draft_rows": sum(engine["rows"].get("draft", 0.0) for engine in engines),
            "drafts": [(*labels, *counts) for labels, counts in sums.items()],
        }
        self._points.append(point)
        self._recent.append({**figures, "open": [], "num_open": 0})

    async def run(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Take points until it is cancelled. ask: has engines tell their figures."""
        while True:
            await ask()
            self.take()
            await asyncio.sleep(EVERY_S)

    def since(self, after_s: float, view: View) -> list[dict[str, Any]]:
        """The points later than after_s, as JSON; oldest first."""
        hidden: dict[str, Any] = {}
        if view.is_cut:
            hidden = {"engine_steps": 0.0, "draft_rows": 0.0, "drafts": []}
        return [
            {
                **point,
                "drafts": [e for e in point["drafts"] if view.sees(e[0], e[1])],
                **hidden,
            }
            for point in self._points
            if point["now_s"] > after_s
        ]

    def recent(self, view: View) -> list[dict[str, Any]]:
        """The figures of the last minutes, oldest first, without open requests; none where only how
        busy the engines are is seen."""
        if view.is_cut:
            return []
        return [
            {
                **figures,
                **{
                    kind: [e for e in figures[kind] if view.sees(e["task"], e["model"])]
                    for kind in ("drafts", "tasks", "slices")
                },
            }
            for figures in self._recent
        ]
