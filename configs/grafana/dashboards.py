"""The Grafana dashboards, from a list of panels: a reader maintains expressions, not coordinates.

    python configs/grafana/dashboards.py            # writes configs/grafana/dashboards/*.json
    python configs/grafana/dashboards.py --check    # fails when the files are not these

Grafana reads the JSON files (provisioning/dashboards/tailor.yml). A panel is a title, what it
means, a width of 24, and its queries; it is placed after the one before. tests/monitoring asks a
real Prometheus, which scrapes a server under load, each of the expressions below.

Counters are shown as rates over Grafana's $__rate_interval, single figures over $__range.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
HEIGHT = 8

T = '{task=~"$task",model=~"$model"}'
E = '{model=~"$model"}'


@dataclass(frozen=True)
class Query:
    """expr: PromQL. legend: Grafana's legend format. table: an instant query as a table."""

    expr: str
    legend: str = ""
    table: bool = False


@dataclass(frozen=True)
class Panel:
    """kind: timeseries, stat, barchart or table. x: the label on a bar chart's axis."""

    title: str
    about: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 12
    stacked: bool = False
    x: str = ""


@dataclass(frozen=True)
class Dashboard:
    """name: of the file and part of the uid. rows: panels under a title each."""

    name: str
    title: str
    about: str
    rows: dict[str, tuple[Panel, ...]] = field(default_factory=dict)


def rate(series: str, by: str, over: str = "$__rate_interval", where: str = T) -> str:
    """Events a second, summed over everything but `by`."""
    return f"sum by ({by}) (rate(tailor_{series}{where}[{over}]))"


def share(part: str, whole: str, by: str, where: str = T, over: str = "$__rate_interval") -> str:
    """One rate divided by another; nothing (and not NaN) while the whole stands still."""
    return f"{rate(part, by, over, where)} / ({rate(whole, by, over, where)} > 0)"


def total_share(part: str, whole: str, by: str = "", where: str = T) -> str:
    """The same over the dashboard's time range."""
    return share(part, whole, by, where, "$__range").replace("by () ", "")


def quantiles(series: str, label: str, where: str = T, by: str = "") -> tuple[Query, ...]:
    """p50, p95 and p99 of a histogram."""
    labels = f"le, {by}" if by else "le"
    return tuple(
        Query(
            f"histogram_quantile({q}, {rate(f'{series}_bucket', labels, where=where)})",
            f"{label}p{str(q)[2:].ljust(2, '0')}",
        )
        for q in (0.5, 0.95, 0.99)
    )


ACCEPTED = "spec_decode_num_accepted_tokens_total"
DRAFTED = "spec_decode_num_draft_tokens_total"
STEPS = "spec_decode_num_decode_steps_total"
TOKENS = "generation_tokens_total"
BOTH = "{{task}} · {{drafter}}"

SPECULATION = Dashboard(
    "speculation",
    "Tailor: Speculation",
    "What drafting brings and what it costs. Acceptance of trees is three figures: accepted of "
    "verified rows, chance by depth, tokens per step. None of them replaces another.",
    {
        "Acceptance": (
            Panel(
                "Accepted / verified rows",
                "Draft tokens that were kept, of the draft rows that were computed. A tree has "
                "rows that cannot all be right, so this is lower than the chance of a draft.",
                (Query(total_share(ACCEPTED, DRAFTED)),),
                "stat", "percentunit", 6,
            ),
            Panel(
                "Chance at the first position",
                "Of the drafts, how many had the next token among the root's children.",
                (
                    Query(
                        total_share(
                            "spec_decode_num_accepted_tokens_per_pos_total",
                            "spec_decode_num_offered_per_pos_total",
                            where='{task=~"$task",model=~"$model",position="0"}',
                        )
                    ),
                ),
                "stat", "percentunit", 6,
            ),
            Panel(
                "Tokens per step",
                "Emitted tokens per step that emits any. All count, drafted or not, after the cut "
                "at EOS, stop and max_tokens; the step that ends a prompt, with its first token, "
                "too (replays and `tailor tasks tune` leave it out). 1 is plain decoding.",
                (Query(total_share(TOKENS, STEPS)),),
                "stat", "short", 6,
            ),
            Panel(
                "Rows wasted",
                "Verified draft rows that were not kept, of all rows that the engines computed.",
                (
                    Query(
                        f"sum(increase(tailor_spec_decode_num_wasted_rows_total{T}[$__range])) / "
                        f"(sum(increase(tailor_engine_rows_total{E}[$__range])) > 0)"
                    ),
                ),
                "stat", "percentunit", 6,
            ),
            Panel(
                "Accepted / verified rows",
                "By task and drafter.",
                (Query(share(ACCEPTED, DRAFTED, "task, drafter"), BOTH),),
                unit="percentunit",
            ),
            Panel(
                "Tokens per step",
                "By task and drafter.",
                (Query(share(TOKENS, STEPS, "task, drafter"), BOTH),),
            ),
            Panel(
                "Chance by depth",
                "Of the drafts that had a node at this position, how many were accepted there. "
                "Position 0 is the first drafted token.",
                (
                    Query(
                        total_share(
                            "spec_decode_num_accepted_tokens_per_pos_total",
                            "spec_decode_num_offered_per_pos_total",
                            "position",
                        ),
                        table=True,
                    ),
                ),
                "barchart", "percentunit", x="position",
            ),
            Panel(
                "Accepted / verified rows by source",
                "Which evidence drafts well: the task's corpus, the prompt, the output so far, "
                "outputs of similar prompts, the client's prediction.",
                (
                    Query(
                        share(
                            "spec_decode_num_accepted_tokens_by_source_total",
                            "spec_decode_num_draft_tokens_by_source_total",
                            "source",
                        ),
                        "{{source}}",
                    ),
                ),
                unit="percentunit",
            ),
            Panel(
                "Accepted tokens by source",
                "Tokens a second that each source has drafted and that were kept.",
                (
                    Query(
                        rate("spec_decode_num_accepted_tokens_by_source_total", "source"),
                        "{{source}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "Steps without a draft",
                "Why, as docs/no-drafts.md tells: cooldown (drafts like these do not pay now), "
                "no_match (no source had anything), budget (no node was worth its row), room (a "
                "step or the KV cache was full), length (one token left), prefill (the prompt is "
                "being read), off.",
                (Query(rate("spec_decode_num_no_draft_total", "reason"), "{{reason}}"),),
                stacked=True,
            ),
        ),
        "Cost and budget": (
            Panel(
                "Draft budget against load",
                "Draft rows a step, and the most that could have paid (the budget), beside the "
                "sequences that run. The more of them, the fewer rows pay.",
                (
                    Query(
                        f'sum(rate(tailor_engine_rows_total{{model=~"$model",kind="draft"}}'
                        "[$__rate_interval])) / (sum(rate(tailor_engine_steps_total"
                        f"{E}[$__rate_interval])) > 0)",
                        "draft rows a step",
                    ),
                    Query(f"sum(tailor_draft_budget{E})", "budget of the last step"),
                    Query(f"sum(tailor_num_requests_running{E})", "running"),
                ),
            ),
            Panel(
                "Rows a second",
                "What the engines compute: prompt rows, the last token of each sequence, drafts.",
                (Query(rate("engine_rows_total", "kind", where=E), "{{kind}}"),),
                stacked=True,
            ),
            Panel(
                "Wasted rows",
                "Draft rows a second that were computed and not kept.",
                (Query(rate("spec_decode_num_wasted_rows_total", "task, drafter"), BOTH),),
            ),
            Panel(
                "Rows of a draft",
                "Mean number of rows of the drafts that were verified.",
                (Query(share(DRAFTED, "spec_decode_num_drafts_total", "task, drafter"), BOTH),),
            ),
            Panel(
                "Time of a step",
                "Mean seconds of a step: proposing drafts, verifying (forward pass and draws of "
                "all rows), and the rest of the host's work.",
                (
                    Query(
                        share("propose_time_seconds_sum", "engine_steps_total", "model", E),
                        "propose {{model}}",
                    ),
                    Query(
                        share("step_model_time_seconds_sum", "engine_steps_total", "model", E),
                        "verify {{model}}",
                    ),
                    Query(
                        f"({rate('step_host_time_seconds_sum', 'model', where=E)} - "
                        f"{rate('propose_time_seconds_sum', 'model', where=E)}) / "
                        f"({rate('engine_steps_total', 'model', where=E)} > 0)",
                        "rest {{model}}",
                    ),
                ),
                unit="s",
            ),
            Panel(
                "Time to propose",
                "Seconds that drafting takes in a step, for all its sequences together.",
                quantiles("propose_time_seconds", "", E),
                unit="s",
            ),
        ),
        "Calibration": (
            Panel(
                "Claimed and observed",
                "Share of the verified rows that the drafters' calibration claimed would be kept, "
                "and that were. The budget is chosen by the claim.",
                (
                    Query(
                        share("spec_decode_expected_accepted_tokens_total", DRAFTED, "task"),
                        "claimed {{task}}",
                    ),
                    Query(share(ACCEPTED, DRAFTED, "task"), "observed {{task}}"),
                ),
                unit="percentunit",
            ),
            Panel(
                "Observed chance by claimed chance",
                "Verified rows by the tenth of the chance that was claimed for them (0.3 is 30 to "
                "40 %). A true claim gives bars that rise from 5 to 95 %.",
                (
                    Query(
                        total_share(
                            "spec_decode_num_accepted_tokens_by_survival_total",
                            "spec_decode_num_draft_tokens_by_survival_total",
                            "survival",
                        ),
                        table=True,
                    ),
                ),
                "barchart", "percentunit", x="survival",
            ),
        ),
    },
)  # fmt: skip

SERVING = Dashboard(
    "serving",
    "Tailor: Serving",
    "Latency, load and outcomes.",
    {
        "Latency": (
            Panel(
                "Time to first token", "Arrival to the first token.",
                quantiles("time_to_first_token_seconds", ""), unit="s",
            ),
            Panel(
                "Between tokens",
                "Tokens that come in one step share its time equally.",
                quantiles("inter_token_latency_seconds", ""), unit="s",
            ),
            Panel(
                "Whole answer", "Arrival to the last token.",
                quantiles("e2e_request_latency_seconds", ""), unit="s",
            ),
            Panel(
                "Queue", "Arrival to the first step.",
                quantiles("request_queue_time_seconds", ""), unit="s",
            ),
            Panel(
                "Time per output token",
                "Of each answer: (last token - first token) / (tokens - 1).",
                quantiles("request_time_per_output_token_seconds", ""), unit="s",
            ),
            Panel(
                "Parts of an answer's time",
                "Mean seconds: waiting, from the first step to the first token, and from there to "
                "the last.",
                tuple(
                    Query(
                        share(f"{part}_seconds_sum", f"{part}_seconds_count", "task"),
                        f"{name} {{{{task}}}}",
                    )
                    for name, part in (
                        ("queue", "request_queue_time"),
                        ("prefill", "request_prefill_time"),
                        ("decode", "request_decode_time"),
                    )
                ),
                unit="s",
            ),
            Panel(
                "First token by task", "p95.",
                (
                    Query(
                        "histogram_quantile(0.95, "
                        + rate("time_to_first_token_seconds_bucket", "le, task")
                        + ")",
                        "{{task}}",
                    ),
                ),
                unit="s",
            ),
        ),
        "Load": (
            Panel(
                "Running and waiting", "Sequences in the batch; requests that wait for one.",
                (
                    Query(f"sum by(engine) (tailor_num_requests_running{E})", "running {{engine}}"),
                    Query(f"sum by(engine) (tailor_num_requests_waiting{E})", "waiting {{engine}}"),
                ),
            ),
            Panel(
                "KV cache in use", "Share of the blocks. Preemptions begin near 1.",
                (Query(f"max by (engine) (tailor_kv_cache_usage_perc{E})", "{{engine}}"),),
                unit="percentunit",
            ),
            Panel(
                "Prefix hits", "Share of the prompt tokens that were found in the prefix cache.",
                (
                    Query(
                        share("prefix_cache_hits_total", "prefix_cache_queries_total", "engine", E),
                        "{{engine}}",
                    ),
                ),
                unit="percentunit",
            ),
            Panel(
                "Throughput", "Tokens a second.",
                (
                    Query(rate("prompt_tokens_total", "task"), "prompt {{task}}"),
                    Query(rate(TOKENS, "task"), "generated {{task}}"),
                ),
            ),
            Panel(
                "Rows of a step", "Prompt rows, last tokens and drafts together.",
                quantiles("step_rows", "", E),
            ),
            Panel(
                "Time of a step", "Wall time.",
                quantiles("step_time_seconds", "", E), unit="s",
            ),
            Panel(
                "Preemptions", "Sequences a second that lost their KV and were computed again.",
                (Query(rate("num_preemptions_total", "engine", where=E), "{{engine}}"),),
            ),
            Panel(
                "Engines up", "1 while an engine serves.",
                (Query(f"tailor_engine_up{E}", "{{engine}}"),),
            ),
        ),
        "GPU": (
            Panel(
                "GPU memory",
                "What the engine's allocator holds, what its tensors take of that, and what is "
                "free on the device. Engines on a CPU have none.",
                (
                    Query(
                        f"max by (engine, kind) (tailor_device_memory_bytes{E})",
                        "{{kind}} {{engine}}",
                    ),
                ),
                unit="bytes",
            ),
            Panel(
                "GPU in use", "Share of time in which a kernel runs. Needs NVML's bindings.",
                (Query(f"max by (engine) (tailor_device_utilization_ratio{E})", "{{engine}}"),),
                unit="percentunit",
            ),
            Panel(
                "CUDA graphs",
                "Steps a second that replayed a graph, captured one first or had none.",
                (Query(rate("cuda_graph_steps_total", "kind", where=E), "{{kind}}"),),
            ),
        ),
        "Outcomes": (
            Panel(
                "Requests by outcome", "ok, error, abort (the client left) or refused (4xx).",
                (Query(rate("request_outcomes_total", "outcome"), "{{outcome}}"),),
                stacked=True,
            ),
            Panel(
                "Answers by finish reason", "stop: EOS, a stop string or id. length: max_tokens.",
                (Query(rate("request_success_total", "finished_reason"), "{{finished_reason}}"),),
                stacked=True,
            ),
            Panel(
                "HTTP responses", "All routes, by status.",
                (
                    Query(
                        "sum by (status, code) (rate(tailor_http_responses_total"
                        "[$__rate_interval]))",
                        "{{status}} {{code}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "Tokens of requests", "Median prompt and answer.",
                (
                    Query(
                        "histogram_quantile(0.5, "
                        + rate("request_prompt_tokens_bucket", "le, task") + ")",
                        "prompt {{task}}",
                    ),
                    Query(
                        "histogram_quantile(0.5, "
                        + rate("request_generation_tokens_bucket", "le, task") + ")",
                        "answer {{task}}",
                    ),
                ),
            ),
        ),
        "Adapters beside a base": (
            Panel(
                "Requests of adapters", "Requests a second that named each.",
                (Query(rate("adapter_requests_total", "adapter", where=E), "{{adapter}}"),),
            ),
            Panel(
                "Adapters that come and go",
                "Times a second that one was put into memory, or made room. Many of the second: "
                "engine.max_adapters is low for what is asked.",
                (
                    Query(rate("adapter_loads_total", "model", where=E), "read {{model}}"),
                    Query(rate("adapter_evictions_total", "model", where=E), "made room {{model}}"),
                ),
            ),
            Panel(
                "Memory of adapters", "Bytes of each in memory.",
                (Query(f"sum by (engine, adapter) (tailor_adapter_bytes{E})", "{{adapter}}"),),
                unit="bytes",
            ),
        ),
    },
)  # fmt: skip

# A step of a sliced request with the full head would have computed a row for every id.
FULL_ROWS = (
    f"({rate('vocab_slice_steps_total', 'task, mode, model')} + "
    f"{rate('vocab_full_steps_total', 'task, mode, model')}) "
    f"* on (model) group_left () max by (model) (tailor_model_vocab_size{E})"
)
HEAD_ROWS = rate("vocab_head_rows_total", "task, mode, model")
ROW_BYTES = (
    f"(sum by (model) (tailor_slice_cache_bytes{E}) / "
    f"(sum by (model) (tailor_slice_cache_rows{E}) > 0))"
)
MODE = "{{task}} · {{mode}}"

VOCABULARY = Dashboard(
    "vocabulary",
    "Tailor: Vocabulary",
    "Slices of the LM head: how much of it a task computes, what that saves, and what it misses. "
    "Empty while no task has a vocabulary.mode other than full.",
    {
        "Slices": (
            Panel(
                "Slice size",
                "Ids of the last request's slice: the task's, the prompt's, specials.",
                (Query(f"max by (task, mode) (tailor_vocab_slice_ids{T})", MODE),),
            ),
            Panel(
                "Share of the head computed",
                "LM-head rows of sliced requests, verification by the full head included, of those "
                "that the full head would have computed. 1 is no gain.",
                (Query(f"{HEAD_ROWS} / ({FULL_ROWS} > 0)", MODE),),
                unit="percentunit",
            ),
            Panel(
                "Bytes saved",
                "Bytes of the LM head a second that were not read.",
                (
                    Query(
                        f"(({FULL_ROWS}) - {HEAD_ROWS}) * on (model) group_left () {ROW_BYTES}",
                        MODE,
                    ),
                ),
                unit="Bps",
            ),
            Panel(
                "Steps from the slice",
                "Of the decode steps of sliced requests, those that the slice answered. In exact "
                "mode the full head takes over where misses make a slice slower.",
                (
                    Query(
                        f"{rate('vocab_slice_steps_total', 'task, mode')} / "
                        f"(({rate('vocab_slice_steps_total', 'task, mode')} + "
                        f"{rate('vocab_full_steps_total', 'task, mode')}) > 0)",
                        MODE,
                    ),
                ),
                unit="percentunit",
            ),
            Panel(
                "Slice cache", "LM-head rows that are held beside the head.",
                (Query(f"sum by (engine) (tailor_slice_cache_rows{E})", "{{engine}}"),),
            ),
            Panel(
                "Memory of the slice cache", "Those rows in bytes: a second copy of a tied table.",
                (Query(f"sum by (engine) (tailor_slice_cache_bytes{E})", "{{engine}}"),),
                unit="bytes",
            ),
            Panel(
                "Rows of prompts",
                "Rows a second that a prompt wanted: found in the cache, copied, forgotten.",
                (
                    Query(rate("slice_cache_hits_total", "model", where=E), "found {{model}}"),
                    Query(rate("slice_cache_loads_total", "model", where=E), "copied {{model}}"),
                    Query(
                        rate("slice_cache_evictions_total", "model", where=E), "forgotten {{model}}"
                    ),
                ),
            ),
        ),
        "Exact mode": (
            Panel(
                "Misses",
                "Share of the verified tokens that the full head replaced. Only exact mode knows.",
                (
                    Query(
                        share(
                            "vocab_slice_misses_total", "vocab_verified_tokens_total", "task, mode"
                        ),
                        MODE,
                    ),
                ),
                unit="percentunit",
            ),
            Panel(
                "Tokens taken back", "Emitted behind a miss, and never sent.",
                (Query(rate("vocab_dropped_tokens_total", "task, mode"), MODE),),
            ),
            Panel(
                "Tokens of a verification", "Verified tokens each; and verify_every now.",
                (
                    Query(
                        share(
                            "vocab_verified_tokens_total",
                            "vocab_verify_windows_total",
                            "task, mode",
                        ),
                        MODE,
                    ),
                    Query(f"max by (engine) (tailor_vocab_verify_every{E})", "now {{engine}}"),
                ),
            ),
            Panel(
                "Verifications", "Verifications a second.",
                (Query(rate("vocab_verify_windows_total", "task, mode"), MODE),),
            ),
            Panel(
                "Time of a verification", "Seconds that a choice waits for the full head.",
                quantiles("vocab_verify_time_seconds", ""), unit="s",
            ),
        ),
    },
)  # fmt: skip


def of_engines(expr: str, by: str = "engine") -> str:
    """A figure of an engine, once, also where several ingresses on one port tell it."""
    return f"max by ({by}) ({expr})"


LEARNED = "0 or nothing where replicas do not learn from each other."

FLEET = Dashboard(
    "fleet",
    "Tailor: Fleet",
    "All replicas of a fleet and its ingresses, by replica and by task. Figures of engines are "
    "counted once, whoever tells them; figures of requests are summed over the ingresses. A single "
    "server is a fleet of one.",
    {
        "Replicas": (
            Panel(
                "Replicas that serve", "Engines that are up, by model.",
                (Query(f"sum by (model) ({of_engines(f'tailor_engine_up{E}', 'engine, model')})",
                       "{{model}}"),),
                "stat", width=6,
            ),
            Panel(
                "Imbalance",
                "Sequences of the busiest replica, of the mean of all; 1 is even. With task homes "
                "and few tasks it is higher, and pays as long as nobody waits.",
                (
                    Query(
                        f"max({of_engines(f'tailor_num_requests_running{E}')}) / clamp_min("
                        f"avg({of_engines(f'tailor_num_requests_running{E}')}), 0.001)"
                    ),
                ),
                "stat", width=6,
            ),
            Panel(
                "Time to first token, p95", "Over all ingresses.",
                (
                    Query(
                        "histogram_quantile(0.95, "
                        + rate("time_to_first_token_seconds_bucket", "le", "$__range") + ")"
                    ),
                ),
                "stat", "s", 6,
            ),
            Panel(
                "Requests that failed", "Of all requests.",
                (
                    Query(
                        "(sum(increase(tailor_request_outcomes_total"
                        '{task=~"$task",model=~"$model",outcome="error"}[$__range])) or vector(0))'
                        f" / (sum(increase(tailor_request_outcomes_total{T}[$__range])) > 0)"
                    ),
                ),
                "stat", "percentunit", 6,
            ),
            Panel(
                "Sequences by replica", "In the running batch.",
                (Query(of_engines(f"tailor_num_requests_running{E}"), "{{engine}}"),),
                stacked=True,
            ),
            Panel(
                "Waiting by replica", "Requests that have no seat; the autoscaler looks at them.",
                (Query(of_engines(f"tailor_num_requests_waiting{E}"), "{{engine}}"),),
                stacked=True,
            ),
            Panel(
                "Prompt tokens that wait, by replica",
                "What the autoscaler turns into seconds by the measured cost of a step.",
                (Query(of_engines(f"tailor_num_tokens_waiting{E}"), "{{engine}}"),),
                stacked=True,
            ),
            Panel(
                "KV cache by replica", "Used share of blocks.",
                (Query(of_engines(f"tailor_kv_cache_usage_perc{E}"), "{{engine}}"),),
                unit="percentunit",
            ),
            Panel(
                "Steps a second by replica", "A slow machine makes fewer under the same load.",
                (
                    Query(
                        of_engines(f"rate(tailor_engine_steps_total{E}[$__rate_interval])"),
                        "{{engine}}",
                    ),
                ),
            ),
            Panel(
                "Prompt tokens found, by replica",
                "Share of looked-up prompt tokens that lay in a replica's prefix cache: what "
                "routing by task and by prompt brings.",
                (
                    Query(
                        of_engines(f"rate(tailor_prefix_cache_hits_total{E}[$__rate_interval])")
                        + " / (max by (engine) "
                        f"(rate(tailor_prefix_cache_queries_total{E}[$__rate_interval])) > 0)",
                        "{{engine}}",
                    ),
                ),
                unit="percentunit",
            ),
        ),
        "Tasks": (
            Panel(
                "Requests a second by task", "Over all ingresses.",
                (Query(rate("request_outcomes_total", "task"), "{{task}}"),),
                stacked=True,
            ),
            Panel(
                "Time to first token by task, p95", "Over all ingresses.",
                (
                    Query(
                        "histogram_quantile(0.95, "
                        + rate("time_to_first_token_seconds_bucket", "le, task") + ")",
                        "{{task}}",
                    ),
                ),
                unit="s",
            ),
            Panel(
                "Tokens a second by task", "Generated.",
                (Query(rate(TOKENS, "task"), "{{task}}"),),
                stacked=True,
            ),
            Panel(
                "Tokens per step by task", "Away from its home a task drafts less.",
                (Query(share(TOKENS, STEPS, "task"), "{{task}}"),),
            ),
        ),
        "Ingresses": (
            Panel(
                "Requests a second by ingress", "Prometheus tells them apart by address.",
                (Query(rate("request_outcomes_total", "instance"), "{{instance}}"),),
                stacked=True,
            ),
            Panel(
                "Time to first token by ingress, p95", "One that is busy adds to it.",
                (
                    Query(
                        "histogram_quantile(0.95, "
                        + rate("time_to_first_token_seconds_bucket", "le, instance") + ")",
                        "{{instance}}",
                    ),
                ),
                unit="s",
            ),
        ),
        "What replicas learn from each other": (
            Panel(
                "Segments a second by replica", "Written for others. " + LEARNED,
                (
                    Query(
                        of_engines(
                            f"rate(tailor_learned_segments_total{T}[$__rate_interval])",
                            "engine, task",
                        ) + " or vector(0)",
                        "{{engine}} {{task}}",
                    ),
                ),
            ),
            Panel(
                "Version by replica", "Replicas that serve a task agree soon after each new one. "
                + LEARNED,
                (
                    Query(
                        of_engines(f"tailor_learned_version{T}", "engine, task") + " or vector(0)",
                        "{{engine}} {{task}}",
                    ),
                ),
            ),
            Panel(
                "Age of what is published",
                "Seconds since the newest version of a task; it grows while nothing new is "
                "learned, and when the builder or the storage is away. " + LEARNED,
                (
                    Query(
                        "time() - max by (task) "
                        f"(tailor_learned_published_timestamp_seconds{T} > 0) or vector(0)",
                        "{{task}}",
                    ),
                ),
                unit="s",
            ),
            Panel(
                "Segments merged", "Of all replicas, in what a task's replicas have. " + LEARNED,
                (
                    Query(
                        f"max by (task) (tailor_learned_segments_merged{T}) or vector(0)",
                        "{{task}}",
                    ),
                ),
            ),
        ),
    },
)  # fmt: skip

DASHBOARDS = (SPECULATION, VOCABULARY, SERVING, FLEET)


# --- to Grafana's JSON ----------------------------------------------------------------------------

SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def grafana(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in dashboard.rows.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        y += 1
        x = height = 0
        for panel in row:
            tall = HEIGHT // 2 if panel.kind == "stat" else HEIGHT
            if x + panel.width > 24:
                x, y, height = 0, y + height, 0
            where = {"x": x, "y": y, "w": panel.width, "h": tall}
            panels.append(_panel(panel, len(panels) + 1, where))
            x, height = x + panel.width, max(height, tall)
        y += height
    return {
        "uid": f"tailor-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["tailor"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "",
        "links": [
            {
                "type": "dashboards",
                "title": "Tailor",
                "icon": "external link",
                "tooltip": "The other dashboards of Tailor",
                "targetBlank": False,
                "tags": ["tailor"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    def labels(name: str, text: str, query: str) -> dict[str, Any]:
        return {
            "name": name,
            "label": text,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": ["All"], "value": ["$__all"]},
            "refresh": 2,
            "sort": 1,
        }

    return [
        {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus"},
        labels("model", "Model", "label_values(tailor_engine_up, model)"),
        labels("task", "Task", f"label_values(tailor_generation_tokens_total{E}, task)"),
    ]


def _legend(*, shown: bool) -> dict[str, Any]:
    return {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": shown}


def _panel(panel: Panel, panel_id: int, where: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    options: dict[str, Any] = {}
    transformations: list[dict[str, Any]] = []
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 20 if panel.stacked else 0,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
        options = {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": _legend(shown=True)}
    elif panel.kind == "stat":
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "none",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": "auto",
            "wideLayout": True,
            "showPercentChange": False,
            "percentChangeColorMode": "standard",
        }
    elif panel.kind == "barchart":
        options = {
            "xField": panel.x,
            "showValue": "never",
            "legend": _legend(shown=False),
            "tooltip": {"mode": "single", "sort": "none"},
            "orientation": "auto",
            "stacking": "none",
            "barWidth": 0.97,
            "groupWidth": 0.7,
            "fullHighlight": False,
            "xTickLabelRotation": 0,
            "xTickLabelMaxLength": 0,
        }
        transformations = [
            {"id": "organize", "options": {"excludeByName": {"Time": True}}},
            {
                "id": "convertFieldType",
                "options": {"conversions": [{"targetField": panel.x, "destinationType": "number"}]},
            },
            {"id": "sortBy", "options": {"sort": [{"field": panel.x}]}},
            {
                "id": "convertFieldType",
                "options": {"conversions": [{"targetField": panel.x, "destinationType": "string"}]},
            },
        ]
    return {
        "id": panel_id,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": where,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "transformations": transformations,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "instant": query.table or panel.kind == "stat",
                "range": not (query.table or panel.kind == "stat"),
                "format": "table" if query.table else "time_series",
            }
            for i, query in enumerate(panel.queries)
        ],
    }


def text_of(dashboard: Dashboard) -> str:
    """The file's content."""
    return json.dumps(grafana(dashboard), indent=1, ensure_ascii=False) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the files. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Write Grafana's dashboards.",
        epilog="example: python configs/grafana/dashboards.py",
    )
    parser.add_argument("--check", action="store_true", help="only compare with the files")
    args = parser.parse_args(argv)
    stale = 0
    for dashboard in DASHBOARDS:
        file, text = FOLDER / f"{dashboard.name}.json", text_of(dashboard)
        if file.exists() and file.read_text(encoding="utf-8") == text:
            continue
        if args.check:
            print(f"{file.name} is not what dashboards.py makes", file=sys.stderr)
            stale += 1
            continue
        FOLDER.mkdir(exist_ok=True)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
        print(f"wrote {file.name}")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
