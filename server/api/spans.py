"""A request that has ended, as fields of a log line and as a tree of spans.

    POST /v1/completions                      the HTTP request
    └── generate                              one prompt, all its choices
        ├── queue       arrival to first step
        ├── prefill     first step to first token
        └── decode      first token to last token
            └── verify  the forward passes that carried drafts, as one stretch from decode's begin

All times come from the Deltas. `verify` is a sum of steps that lie apart, so it has the attribute
tailor.aggregate.
"""

from __future__ import annotations

import time
from typing import Any

from server.api.keys import Visit
from server.api.usage import RequestAccount
from server.tracing import Span

MAX_PROMPT_SPANS = 64
"""Prompts of one request that get spans of their own."""


def request_fields(visit: Visit, ended_s: float) -> dict[str, Any]:
    """The log line's fields of a request: who, what, how long, how many tokens; no content."""
    fields: dict[str, Any] = {
        "request_id": visit.request_id,
        "duration_ms": round((ended_s - visit.started_s) * 1e3, 1),
    }
    if visit.key is not None:
        fields["key"] = visit.key.key_id
    if visit.task:
        fields["task"], fields["model"] = visit.task, visit.model
    accounts = _accounts(visit)
    if accounts:
        first_s = min((s for a in accounts if (s := a.first_token_s) is not None), default=None)
        fields["prompt_tokens"] = sum(a.num_prompt_tokens for a in accounts)
        fields["completion_tokens"] = sum(a.num_completion_tokens for a in accounts)
        fields["queue_ms"] = round(max(a.queue_s for a in accounts) * 1e3, 1)
        if first_s is not None:
            fields["first_token_ms"] = round((first_s - visit.started_s) * 1e3, 1)
    return fields


def request_span(
    visit: Visit, ended_s: float, method: str, route: str, status: int, code: str
) -> Span:
    """The tree of spans of a request."""
    offset_ns = time.time_ns() - time.monotonic_ns()

    def at(seconds: float) -> int:
        return offset_ns + int(seconds * 1e9)

    attributes: dict[str, str | int | float | bool] = {
        "http.request.method": method if method.isascii() and method.isalpha() else "_OTHER",
        "http.route": route,
        "http.response.status_code": status,
        "tailor.request_id": visit.request_id,
    }
    if visit.key is not None:
        attributes["tailor.key"] = visit.key.key_id
    return Span(
        f"{attributes['http.request.method']} {route}",
        at(visit.started_s),
        at(ended_s),
        attributes,
        [_generate(a, ended_s, at) for a in _accounts(visit)[:MAX_PROMPT_SPANS]],
        error=code if status >= 500 else "",
        is_server=True,
    )


def _accounts(visit: Visit) -> list[RequestAccount]:
    return [account for submission in visit.submissions for account in submission.accounts]


def _generate(account: RequestAccount, ended_s: float, at: Any) -> Span:
    request = account.request
    arrival_s = request.arrival_s
    first_s, last_s = account.first_token_s, account.last_token_s
    begun_s = arrival_s + account.queue_s if account.started else None
    children = [Span("queue", at(arrival_s), at(ended_s if begun_s is None else begun_s))]
    if begun_s is not None:
        prompt = {
            "gen_ai.usage.input_tokens": account.num_prompt_tokens,
            "tailor.cached_tokens": account.num_cached_tokens,
        }
        end_s = ended_s if first_s is None else first_s
        children.append(Span("prefill", at(begun_s), at(end_s), prompt))
    if first_s is not None and last_s is not None:
        drafting = {
            "tailor.steps": account.num_steps,
            "tailor.drafted_tokens": account.num_drafted,
            "tailor.accepted_tokens": account.num_accepted,
        }
        verify = []
        if account.verify_s > 0:
            end_s = min(last_s, first_s + account.verify_s)
            seconds = {"tailor.aggregate": True, "tailor.seconds": account.verify_s}
            verify.append(Span("verify", at(first_s), at(end_s), {**drafting, **seconds}))
        children.append(Span("decode", at(first_s), at(last_s), drafting, verify))
    return Span(
        "generate",
        at(arrival_s),
        at(ended_s if last_s is None else last_s),
        {
            "gen_ai.request.model": request.model,
            "gen_ai.usage.input_tokens": account.num_prompt_tokens,
            "gen_ai.usage.output_tokens": account.num_completion_tokens,
            "tailor.task": request.task,
            "tailor.drafter": request.speculation.drafter,
            "tailor.choices": request.num_choices,
        },
        children,
    )
