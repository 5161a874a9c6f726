"""The built-in page at /dashboard, for people without Grafana, and the API's at /docs: their
files, and the data.

The pages are static files in this package (server/api/page): no build step, nothing from other
hosts, and a content security policy that allows neither. The files hold no data and need no key;
what the page shows comes from `snapshot` at /dashboard/data, which needs one when there are any.

The page reads a JSON route and not /metrics: an answer of this route is about a thirtieth of
/metrics, which matters for a page that is open all day; it also has the open requests, which are no
series; and /metrics is often closed to browsers. All figures are read from the series that /metrics
shows, so that they cannot differ.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response

from server import __version__
from server.api.dashboard_history import History, tells_load_only
from server.api.engines.client import EngineClient
from server.api.keys import ApiKey
from server.api.route_context import caller_of
from server.errors import InvalidRequestError, echoed
from server.metrics.series import Metrics
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

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Page:
    """The page's files, read once."""

    def __init__(self) -> None:
        self._bodies = {path: file.read_bytes() for path, file in _FILES.items()}
        self._headers = {
            path: {
                "content-type": _TYPES[file.suffix],
                "content-security-policy": POLICY,
                "x-content-type-options": "nosniff",
                "referrer-policy": "no-referrer",
                "cross-origin-opener-policy": "same-origin",
                "cache-control": "no-cache",
                "etag": f'"{hashlib.sha256(self._bodies[path]).hexdigest()[:32]}"',
            }
            for path, file in _FILES.items()
        }

    def response(self, request: HttpRequest) -> Response:
        """The file that the request's path names; 304 when the browser has it already."""
        path = request.scope["path"]
        headers = self._headers[path]
        if headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self._bodies[path], headers=headers)


class DashboardRoutes:
    """`add_to` puts the page and its data into an app. tells_sums: see snapshot.

    history: the last hour; the application runs it.
    """

    def __init__(self, client: EngineClient, metrics: Metrics, *, tells_sums: bool = True) -> None:
        self._client = client
        self._metrics = metrics
        self._page = Page()
        self._tells_sums = tells_sums
        self.history = History(lambda: snapshot(metrics, client, None))

    async def take_history(self) -> None:
        """Take points until it is cancelled."""
        await self.history.run(self._client.ask_figures)

    def add_to(self, app: FastAPI) -> None:
        """Declare the routes."""

        async def get_page(request: HttpRequest) -> Response:
            return self._page.response(request)

        @app.get(ROOT_PATH, include_in_schema=False)
        async def get_root() -> Response:
            return RedirectResponse(PATH)

        for path in PAGE_PATHS:
            app.add_api_route(path, get_page, methods=["GET", "HEAD"], include_in_schema=False)

        @app.get(DATA_PATH, include_in_schema=False)
        async def get_dashboard_data(request: HttpRequest) -> Response:
            await self._client.ask_figures()
            figures = snapshot(
                self._metrics,
                self._client,
                caller_of(request).key,
                tells_sums=self._tells_sums,
            )
            told = {"version": __version__, "needs_key": caller_of(request).key is not None}
            return JSONResponse({**told, **figures}, headers={"cache-control": "no-store"})

        @app.get(HISTORY_PATH, include_in_schema=False)
        async def get_dashboard_history(request: HttpRequest, after: str = "") -> Response:
            try:
                after_s = float(after or "-inf")
            except ValueError:
                raise InvalidRequestError(
                    f"after: must be a number; got {echoed(after)}.", param="after"
                ) from None
            key = caller_of(request).key
            points = self.history.since(after_s, key, tells_sums=self._tells_sums)
            body: dict[str, Any] = {"points": points}
            if not after:  # a page that was opened just now
                body["recent"] = self.history.recent(key, tells_sums=self._tells_sums)
            return JSONResponse(body, headers={"cache-control": "no-store"})


# Short names of the answer, and the series behind them (without `tailor_` and `_total`).
_PER_DRAFTER = {
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "prompt_tokens_cached",
    "tokens": "generation_tokens",
    "steps": "spec_decode_num_decode_steps",
    "drafts": "spec_decode_num_drafts",
    "drafted": "spec_decode_num_draft_tokens",
    "accepted": "spec_decode_num_accepted_tokens",
    "expected": "spec_decode_expected_accepted_tokens",
    "wasted": "spec_decode_num_wasted_rows",
}
_PER_LABEL = {
    "offered_by_position": ("spec_decode_num_offered_per_pos", "position"),
    "accepted_by_position": ("spec_decode_num_accepted_tokens_per_pos", "position"),
    "drafted_by_source": ("spec_decode_num_draft_tokens_by_source", "source"),
    "accepted_by_source": ("spec_decode_num_accepted_tokens_by_source", "source"),
    "drafted_by_survival": ("spec_decode_num_draft_tokens_by_survival", "survival"),
    "accepted_by_survival": ("spec_decode_num_accepted_tokens_by_survival", "survival"),
    "no_draft": ("spec_decode_num_no_draft", "reason"),
}
_LATENCIES = {
    "ttft": "time_to_first_token",
    "inter_token": "inter_token_latency",
    "end_to_end": "e2e_request_latency",
    "queue": "request_queue_time",
}
_GAUGES = {
    "up": "engine_up",
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "waiting_tokens": "num_tokens_waiting",
    "kv_usage": "kv_cache_usage_perc",
    "draft_budget": "draft_budget",
    "vocab_size": "model_vocab_size",
}
_ENGINE_SUMS = {
    "steps": "engine_steps_total",
    "step_s": "step_time_seconds_sum",
    "model_s": "step_model_time_seconds_sum",
    "propose_s": "propose_time_seconds_sum",
    "preemptions": "num_preemptions_total",
    "prefix_queries": "prefix_cache_queries_total",
    "prefix_hits": "prefix_cache_hits_total",
}

_DRAFTER_OF = {f"tailor_{series}_total": name for name, series in _PER_DRAFTER.items()}
_LABEL_OF = {
    f"tailor_{series}_total": (name, label) for name, (series, label) in _PER_LABEL.items()
}
_BUCKETS_OF = {f"tailor_{series}_seconds_bucket": name for name, series in _LATENCIES.items()}
_ENGINE_OF = {f"tailor_{series}": name for name, series in (_GAUGES | _ENGINE_SUMS).items()}
_PER_SLICE = {
    "ids": "vocab_slice_ids",
    "slice_steps": "vocab_slice_steps_total",
    "full_steps": "vocab_full_steps_total",
    "head_rows": "vocab_head_rows_total",
    "windows": "vocab_verify_windows_total",
    "verified": "vocab_verified_tokens_total",
    "misses": "vocab_slice_misses_total",
    "dropped": "vocab_dropped_tokens_total",
}
_SLICE_OF = {f"tailor_{series}": name for name, series in _PER_SLICE.items()}
_ROWS, _OUTCOMES = "tailor_engine_rows_total", "tailor_request_outcomes_total"
_NAMES = (*_DRAFTER_OF, *_LABEL_OF, *_BUCKETS_OF, *_ENGINE_OF, *_SLICE_OF, _ROWS, _OUTCOMES)
_NUM_BUCKETS = len(LATENCY_BUCKETS_S) + 1


_LOAD = frozenset(f"tailor_{_GAUGES[name]}" for name in ("up", "running", "waiting", "kv_usage"))
"""Members of `snapshot` that every key may see: how busy the engines are."""


def snapshot(
    metrics: Metrics, client: EngineClient, key: ApiKey | None, *, tells_sums: bool = True
) -> dict[str, Any]:
    """All that the page shows, as cumulative counts; the page takes differences itself.

    now_s: a clock to divide differences by. edges_s: upper edges of the latency buckets; one more
    bucket has no upper edge. drafts: sums by task, drafter and model. tasks: outcomes, and counts
    per latency bucket, by task and model. slices: sums by task, mode and model. engines: gauges
    and sums. open: the oldest open requests, without any text of theirs; num_open: all of them.

    key: whose view it is. A key sees the tasks that it may use and, unless it is an admin key,
    its own open requests; None (a server without keys) sees everything. tells_sums: whether a
    key that is no admin's sees the sums over all keys; if not, only how busy the engines are.
    """
    is_cut = tells_load_only(key, tells_sums)
    drafts: dict[tuple[str, ...], dict[str, Any]] = {}
    tasks: dict[tuple[str, ...], dict[str, Any]] = {}
    slices: dict[tuple[str, ...], dict[str, Any]] = {}
    engines: dict[str, dict[str, Any]] = {
        engine["name"]: {**engine, "rows": {}} for engine in client.engines()
    }
    for family in metrics.families(_NAMES):
        for sample in family.samples:
            name, labels, value = sample.name, sample.labels, sample.value
            if is_cut and name not in _LOAD:
                continue
            task = labels.get("task")
            if task is not None and key is not None and not key.may_use(task, labels["model"]):
                continue
            if name in _ENGINE_OF or name == _ROWS:
                engine = engines.get(labels["engine"])
                if engine is None:
                    continue
                if name == _ROWS:
                    engine["rows"][labels["kind"]] = value
                else:
                    engine[_ENGINE_OF[name]] = value
            elif name in _BUCKETS_OF or name == _OUTCOMES:
                entry = _entry(tasks, labels, ("task", "model"))
                if name == _OUTCOMES:
                    entry.setdefault("outcomes", {})[labels["outcome"]] = value
                else:
                    entry.setdefault(_BUCKETS_OF[name], []).append(value)
            elif name in _SLICE_OF:
                _entry(slices, labels, ("task", "mode", "model"))[_SLICE_OF[name]] = value
            elif name in _DRAFTER_OF:
                _entry(drafts, labels, ("task", "drafter", "model"))[_DRAFTER_OF[name]] = value
            else:
                short, label = _LABEL_OF[name]
                entry = _entry(drafts, labels, ("task", "drafter", "model"))
                entry.setdefault(short, {})[labels[label]] = value
    for entry in tasks.values():
        for short in _LATENCIES:
            counts = entry.get(short, [0.0] * _NUM_BUCKETS)
            entry[short] = [
                int(count - before) for count, before in zip(counts, [0.0, *counts], strict=False)
            ]
    open_requests = client.open_requests(None if key is None or key.admin else key.key_id)
    return {
        "now_s": time.monotonic(),
        "edges_s": LATENCY_BUCKETS_S,
        "drafts": list(drafts.values()),
        "tasks": list(tasks.values()),
        "slices": list(slices.values()),
        "engines": list(engines.values()),
        "num_open": len(open_requests),
        "open": open_requests[:MAX_OPEN_SHOWN],
    }


def _entry(
    entries: dict[tuple[str, ...], dict[str, Any]], labels: dict[str, str], names: tuple[str, ...]
) -> dict[str, Any]:
    key = tuple(labels[name] for name in names)
    entry = entries.get(key)
    if entry is None:
        entry = entries[key] = {name: labels[name] for name in names}
    return entry
