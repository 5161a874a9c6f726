"""The words of the project, all frozen. This module imports no other of the project.

A *Request* is what a client asked, in ids, and never changes. A *Delta* is what one choice
gained in one step. Everything that crosses the channel between the API process and an engine
process is built from these and holds only ints, floats, strings, bytes and tuples of them.

What every choice of every step makes is a NamedTuple: it is made, sent and read in a fraction of a
dataclass's time.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, TypeVar

FinishReason = Literal["stop", "length", "abort", "error"]
VocabularyMode = Literal["full", "slice", "exact"]
GrammarKind = Literal["json_schema", "regex", "lark", "gbnf"]

INT31, INT63 = (1 << 31) - 1, (1 << 63) - 1

LEAST_TEMPERATURE = 1e-30
"""Below it logits divide to infinity (fp32 ends at 3e38). Just above it the likeliest id already
has all the probability, so treating lower ones as greedy changes no choice."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A sampling parameter, as `parameter` declares it in SamplingParams.

    name: of the field, in requests and in task files. kind: bool, int or float. default: OpenAI's,
    where request, task and model are silent. ge, le: bounds, None without. in_tasks: whether a
    task's file may set it. in_models: whether a model's generation_config.json may. in_draws:
    whether the samplers are given it as one of `numbers`. aliases: what clients of other servers
    call it.
    """

    name: str
    kind: type
    default: Any
    help: str
    ge: float | None = None
    le: float | None = None
    in_tasks: bool = True
    in_models: bool = False
    in_draws: bool = False
    aliases: tuple[str, ...] = ()


def parameter(default: Any, **told: Any) -> Any:
    """A field of SamplingParams that is a number or a switch. told: further fields of Parameter.

    This row is all that the API needs: the fields of requests and task files, their checks, the
    defaults, /openapi.json and the reference of configuration come from it. What the parameter does
    to a draw is in the samplers: server/model/cpu/kernels/sampling.py, server/model/gpu/sampler.py.
    """
    return field(default=default, metadata=told)


BANNED = -100.0
"""A bias of this and less excludes its id."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one choice draws its tokens. Every number is validated at the API's edge.

    The order of processing is fixed (docs/DESIGN.md 1.1): bias, grammar and min_tokens, penalties,
    temperature, top-k, top-p, min-p. Temperature 0 is greedy: argmax, ties to the lowest id, no
    noise. The other fields that are no parameters of a row:

    logit_bias: (token id, bias) pairs, ids unique and ascending; -100 or lower bans the id.
    allowed_token_ids: ascending ids the draw is restricted to, or None for all.
    stop_token_ids: further ids that end the choice (the id itself is kept, its text is not).
    stop: stop strings as UTF-8 bytes; the engine matches them on bytes.
    num_logprobs: None = no logprobs; k >= 0 = the drawn token's logprob and the k most likely.
    logprob_token_ids: ascending ids whose logprobs are given in place of the k most likely.
    """

    temperature: float = parameter(
        1.0,
        ge=0,
        le=2,
        in_models=True,
        in_draws=True,
        help="0 is greedy: the likeliest id, without noise",
    )
    top_p: float = parameter(
        1.0,
        ge=0,
        le=1,
        in_models=True,
        in_draws=True,
        help="draw from the likeliest ids that have this share of the probability; 0 is one id",
    )
    top_k: int = parameter(
        0,
        ge=-1,
        le=INT31,
        in_models=True,
        in_draws=True,
        help="draw from so many of the likeliest ids; 0 and -1 are off",
    )
    min_p: float = parameter(
        0.0,
        ge=0,
        le=1,
        in_models=True,
        in_draws=True,
        help="draw from ids with this share of the likeliest one's chance; 0 is off",
    )
    presence_penalty: float = parameter(
        0.0, ge=-2, le=2, in_draws=True, help="taken off the logits of ids that were generated"
    )
    frequency_penalty: float = parameter(
        0.0,
        ge=-2,
        le=2,
        in_draws=True,
        help="taken off the logits of ids for each time they were generated",
    )
    repetition_penalty: float = parameter(
        1.0,
        ge=0.01,
        le=10,
        in_models=True,
        in_draws=True,
        aliases=("repeat_penalty",),
        help="divides positive logits of ids that are in prompt or output; 1 is off",
    )
    max_tokens: int = parameter(
        16,
        ge=1,
        le=INT31,
        aliases=("max_new_tokens", "n_predict"),
        help="most tokens of a choice; default 16, of chats what the context holds",
    )
    min_tokens: int = parameter(
        0,
        ge=0,
        le=INT31,
        aliases=("min_new_tokens",),
        help="EOS and stop ids are banned until so many tokens are generated",
    )
    ignore_eos: bool = parameter(False, help="whether an EOS ends nothing")
    seed: int = parameter(
        0,
        ge=-INT63 - 1,
        le=INT63,
        help="of the noise: the same seed, the same text; default, and -1, a new one a request",
    )
    skip_special_tokens: bool = parameter(
        True, in_tasks=False, help="whether special tokens have no text"
    )
    include_stop_str_in_output: bool = parameter(
        False,
        in_tasks=False,
        aliases=("no_stop_trim",),
        help="whether the text keeps the stop string that ended it",
    )
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[bytes, ...] = ()
    num_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values of DRAW_NUMBERS, in their order: what samplers are given."""
        return tuple(float(getattr(self, name)) for name in DRAW_NUMBERS)

    @property
    def takes_likeliest(self) -> bool:
        """Whether it draws without noise."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True when token counts change the distribution."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.counts_prompt

    @property
    def counts_prompt(self) -> bool:
        """Whether ids of the prompt count, too."""
        return self.repetition_penalty != 1.0

    @staticmethod
    def canonical(values: dict[str, Any]) -> dict[str, Any]:
        """Fields by name, of which some say the same in two ways, in the one that samplers know."""
        if values["top_p"] == 0.0:  # OpenAI allows it; it keeps the most likely id alone
            values |= {"top_p": 1.0, "top_k": 1}
        if values["temperature"] < LEAST_TEMPERATURE:
            values["temperature"] = 0.0
        return values | {"top_k": max(0, values["top_k"])}


_KINDS = typing.get_type_hints(SamplingParams)
PARAMETERS = tuple(
    Parameter(name=one.name, kind=_KINDS[one.name], default=one.default, **one.metadata)
    for one in fields(SamplingParams)
    if one.metadata
)
"""The rows of SamplingParams, in their order."""

DRAW_NUMBERS = tuple(one.name for one in PARAMETERS if one.in_draws)
"""The parameters that change the logits of a draw."""


def scope_of(tenant: str, cache_salt: str, adapter: str = "") -> str:
    """The scope of a tenant, cache_salt and adapter: what is kept of one scope's content serves no
    other scope (docs/isolation.md). Tenants' names hold no control character, so two scopes
    cannot have one name."""
    own = f"{adapter}\1" if adapter else ""
    return f"{own}{tenant}\0{cache_salt}"


def adapter_of(scope: str) -> str:
    """The adapter of a scope, "" for the base model."""
    own, is_there, _ = scope.partition("\0")[0].partition("\1")
    return own if is_there else ""


CORPUS_FITS = 1.02
"""A corpus fits a task if `auto` makes so many times the tokens a step with it as without it."""

NO_SCOPE = scope_of("", "")
"""The scope without API keys and cache_salt."""


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Which drafter proposes for a request, and how much.

    drafter: a name registered in the engine ("off", "suffix", ...).
    max_draft_tokens: most tree nodes a step may carry for this sequence; 0 is off.
    options: drafter parameters as (name, value) pairs, dotted names ("trie.n"), sorted.
    corpus: name of a task corpus, or None for the task's own.
    prediction_ids: OpenAI's Predicted Outputs content in ids; a private corpus of this request.
    context_span: [start, end) of the prompt ids that the task marks as its context, or None for
        the whole prompt.
    learn_tokens: when above 0, the output enters the learned outputs of (task, scope), of
        which so many tokens are held, and drafts come from them. 0: nothing is learned or used.
    persists: what is learned is written to disk and read from there; else it is in memory only.
    scope: whose calibration and learned outputs are used: the engine sets Request.scope, so that
        no drafts depend on another scope's text. adapter: Request.adapter, so that drafts are
        in its ids.
    """

    drafter: str = "off"
    max_draft_tokens: int = 16
    options: tuple[tuple[str, float | int | str | bool], ...] = ()
    corpus: str | None = None
    prediction_ids: tuple[int, ...] = ()
    context_span: tuple[int, int] | None = None
    learn_tokens: int = 0
    persists: bool = False
    scope: str = NO_SCOPE
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class VocabularyParams:
    """What part of the LM head a request uses (docs/DESIGN.md section 6).

    mode: "full"; "slice": the profile's ids and the request's own, which may change the text;
    "exact": the slice proposes, the full head verifies, and the text is that of "full".
    profile: the task's profile file. verify_every: unverified tokens before
    a verification, 0 = adapted.
    """

    mode: VocabularyMode = "full"
    profile: str | None = None
    verify_every: int = 0


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the text of every choice must match, from its first byte to its last.

    kind and source: a JSON schema as JSON text; a regular expression (Rust's regex syntax, anchored
    at both ends); a grammar in llguidance's dialect of Lark, or in llama.cpp's GBNF.
    whitespace: for json_schema: the regular expression that white space between two JSON tokens
        matches; "" allows none.
    """

    kind: GrammarKind
    source: str
    whitespace: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and its choices, frozen at admission.

    request_id: unique in the server's life.
    task: the task's name (metrics label, affinity key). model: name of the target model.
    adapter: the id of an adapter that the engine knows (AdapterOrder), "" for the base model.
    prompt_ids: int token ids, never empty.
    num_choices: choices the engine runs (the API's best_of); each is one Sequence.
    echo_logprobs: None, or how many top logprobs per *prompt* position are wanted (0..20): such a
        request writes the prefix cache but does not read it.
    cache_salt: mixed into the prefix-cache keys; requests with different salts share no block.
    label_ids: the request asks for the logprobs of these ids as the first token of its output,
        and for nothing else: max_tokens is 0 and there is one choice. It reads the prefix cache.
    report_sources: whether Deltas have the draft source of every token.
    queue_timeout_s: when above 0, the engine refuses the request unless its first step comes within
        so many seconds of arrival_s.
    tenant: the API key's id, "" without keys; tenants share no block either, so that the time to a
        first token does not show what another tenant has asked.
    priority: lower runs first: each step is worth 5 seconds of waiting, up to 64 steps, so that
        many requests of one priority cannot starve another; ties by arrival.
    arrival_s: time.monotonic() at the API, for queue time and deadlines.
    grammar: what the output must match, or None. A choice ends (finish_reason "stop") with the
        token that completes it where nothing may follow; elsewhere EOS is allowed only where the
        output matches as it stands. Never together with sampling.ignore_eos.
    report_rejected: whether Deltas have the drafts that were rejected.
    """

    request_id: str
    task: str
    model: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    vocabulary: VocabularyParams = field(default_factory=VocabularyParams)
    num_choices: int = 1
    echo_logprobs: int | None = None
    cache_salt: str = ""
    priority: int = 0
    arrival_s: float = 0.0
    report_sources: bool = False
    tenant: str = ""
    queue_timeout_s: float = 0.0
    grammar: GrammarSpec | None = None
    label_ids: tuple[int, ...] = ()
    report_rejected: bool = False
    adapter: str = ""

    @property
    def scope(self) -> str:
        """See scope_of."""
        return scope_of(self.tenant, self.cache_salt, self.adapter)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The logprob of one token and the k most likely at its position (natural log).

    `rank` counts from 1. `top` is ordered by (logprob descending, id ascending).
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class StepCounts(NamedTuple):
    """Counts of speculation for one choice, over the steps that a Delta covers; sums are additive.

    num_steps: decode steps (a step that emitted at least one token of this choice), drafted or not.
    num_drafts: steps that carried at least one draft node.
    num_drafted: verified draft rows. num_accepted: draft tokens kept *after* the cut at
        EOS/stop/max_tokens. accepted_by_depth[d]: accepted at depth d; offered_by_depth[d]: whether
        the tree had a node at depth d (counted per draft).
    by_source: (source name, drafted, accepted) triples.
    expected_accepted: sum of the drafted nodes' survival, as the drafter estimated it.
    by_survival: (tenth of the claimed survival 0..9, drafted, accepted) triples.
    In vocabulary mode "exact" tokens are counted before they are verified.
    verify_s: seconds of the forward passes that carried drafts of this choice; every choice of a
        batch counts the whole pass.
    no_draft_reason: "" or why no node was carried, each told in docs/no-drafts.md: "off",
        "prefill", "length", "cooldown", "no_match", "budget", "room".
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    offered_by_depth: tuple[int, ...] = ()
    by_source: tuple[tuple[str, int, int], ...] = ()
    no_draft_reason: str = ""
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    expected_accepted: float = 0.0
    by_survival: tuple[tuple[int, int, int], ...] = ()
    verify_s: float = 0.0

    def plus(self, more: StepCounts) -> StepCounts:
        """The sum of both; the later reason stands."""
        if self.num_steps == 0:
            return more
        if more.num_steps == 0:
            return self
        accepted, rejected = self.accepted_prediction_tokens, self.rejected_prediction_tokens
        return StepCounts(
            num_steps=self.num_steps + more.num_steps,
            num_drafts=self.num_drafts + more.num_drafts,
            num_drafted=self.num_drafted + more.num_drafted,
            num_accepted=self.num_accepted + more.num_accepted,
            accepted_by_depth=_by_depth(self.accepted_by_depth, more.accepted_by_depth),
            offered_by_depth=_by_depth(self.offered_by_depth, more.offered_by_depth),
            by_source=_by_key(self.by_source, more.by_source),
            no_draft_reason=more.no_draft_reason or self.no_draft_reason,
            accepted_prediction_tokens=accepted + more.accepted_prediction_tokens,
            rejected_prediction_tokens=rejected + more.rejected_prediction_tokens,
            expected_accepted=self.expected_accepted + more.expected_accepted,
            by_survival=_by_key(self.by_survival, more.by_survival),
            verify_s=self.verify_s + more.verify_s,
        )


_Key = TypeVar("_Key", int, str)
_Pairs = tuple[tuple[_Key, int, int], ...]


def _by_depth(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))


def _by_key(a: _Pairs[_Key], b: _Pairs[_Key]) -> _Pairs[_Key]:
    """Sums of (key, drafted, accepted) triples."""
    sums = {key: (drafted, accepted) for key, drafted, accepted in a}
    for key, drafted, accepted in b:
        old = sums.get(key, (0, 0))
        sums[key] = (old[0] + drafted, old[1] + accepted)
    return tuple((key, drafted, accepted) for key, (drafted, accepted) in sums.items())


@dataclass(frozen=True, slots=True)
class VocabularyCounts:
    """Counts of an LM-head slice for one choice, over the steps that a Delta covers. All are sums,
    except where stated.

    num_ids: ids of its slice now (no sum). num_loaded: head rows copied for it. num_slice_steps,
    num_full_steps: decode steps drawn from the slice, from the full head. head_rows: head rows
    computed for its draws, its share of verifications included. num_verifications: verifications.
    num_checked: tokens they looked at. num_missed: verifications that found a wrong one.
    num_dropped: emitted tokens that were taken back, never released. verify_every: tokens
    between verifications now (no sum). verify_s: seconds of verifications this choice waited for.
    """

    num_ids: int = 0
    num_loaded: int = 0
    num_slice_steps: int = 0
    num_full_steps: int = 0
    head_rows: int = 0
    num_verifications: int = 0
    num_checked: int = 0
    num_missed: int = 0
    num_dropped: int = 0
    verify_every: int = 0
    verify_s: float = 0.0

    def plus(self, more: VocabularyCounts) -> VocabularyCounts:
        """The sums of both; of what is none, the larger slice, and the later verify_every."""
        sums: dict[str, Any] = {
            one.name: getattr(self, one.name) + getattr(more, one.name) for one in fields(self)
        }
        sums["num_ids"] = max(self.num_ids, more.num_ids)
        sums["verify_every"] = more.verify_every or self.verify_every
        return VocabularyCounts(**sums)


class Delta(NamedTuple):
    """New, released tokens of one choice after one step.

    token_ids: may be empty only when finish_reason is set.
    logprobs: one per token when asked for, else empty.
    prompt_logprobs: on the first delta of a choice that asked for them: one per prompt token,
        None for the first.
    finish_reason: set on the last delta of a choice.
    stop_reason: the stop string (bytes) or stop id that ended it, if one did; None for EOS; b""
        when a grammar's text is complete (its last token has text, unlike an EOS).
    error: a message when finish_reason is "error".
    num_cached_tokens: prompt tokens read from the prefix cache (first delta).
    queue_s: seconds between arrival and the first step (first delta).
    label_logprobs: one per label id of the request (last delta): log-softmax of the raw logits
        after the prompt.
    sources: when the request asked for them, one name per token: the drafter's source whose draft
        of this token was accepted, "" for a token that nothing drafted.
    vocabulary: None in mode "full".
    rejected_drafts: when the request asked for them, (index, source, ids) triples: what was drafted
        in place of token_ids[index] and after it, a path each.
    """

    request_id: str
    choice_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | bytes | None = None
    error: str | None = None
    error_code: str | None = None
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    counts: StepCounts = StepCounts()
    sources: tuple[str, ...] = ()
    label_logprobs: tuple[float, ...] = ()
    vocabulary: VocabularyCounts | None = None
    rejected_drafts: tuple[tuple[int, str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """Memory of an accelerator in bytes, and how busy it is.

    reserved: what the engine's allocator holds, allocated: what its tensors take of that. free,
    total: of the device, whoever uses it. utilisation: 0 to 1, None where it cannot be told. steps:
    since the start, that replayed a CUDA graph, that captured one first, and without one.
    """

    reserved: int
    allocated: int
    free: int
    total: int
    utilisation: float | None = None
    steps: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class SharedFigures:
    """What a fleet's engine has to do with what others learned of a task, summed over its scopes.

    num_written: segments that it has written. num_merged: segments of all engines in what it has
    from others. version: how often that was published. published_s: when last, as time.time();
    0.0 for never.
    """

    task: str
    num_written: int = 0
    num_merged: int = 0
    version: int = 0
    published_s: float = 0.0


LATENCY_BUCKETS_S = (
    0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0,
    45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0,
)  # fmt: skip
SHORT_BUCKETS_S = (
    0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.00075, *LATENCY_BUCKETS_S[:24],
)  # fmt: skip
ROW_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
"""Upper edges of histograms: of seconds of requests and steps, of shorter ones, of rows a step."""

FigureKind = Literal["gauge", "counter", "histogram"]
FigureValue = (
    float | None | tuple[tuple[tuple[str, ...], float], ...] | tuple[tuple[int, ...], float]
)
"""What a figure reads: a number; with labels ((its labels' values), number) pairs; of a histogram
(how many values lay in each bucket and above the last, not added up, and the sum of the values);
None where there is none."""


@dataclass(frozen=True, slots=True)
class Figure:
    """The declaration of a series that engines tell: `tailor_` and its name in /metrics, with the
    labels `engine` and `model` before its own. buckets: upper edges of a histogram. Counters and
    histograms count from the engine's start."""

    name: str
    kind: FigureKind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """An adapter that an engine shall know.

    adapter_id: its name and a hash of its files, "name@hash". folder: where those are. vocab_size:
    ids that its requests may have. table: file of its id -> bytes table, "" for the base's. pinned:
    it stays in memory.
    """

    adapter_id: str
    folder: str
    vocab_size: int
    table: str = ""
    pinned: bool = False

    @property
    def name(self) -> str:
        """Its name in requests."""
        return self.adapter_id.rpartition("@")[0]


NarrowForm = Literal["fp8"]
"""Weights in 8 bits on a GPU."""

DEFAULT_SEQS = {"cpu": 64, "cuda": 256}
"""Sequences in one step, by kind of device: as many as the largest CUDA graph has rows."""

DEFAULT_ROWS = {"cpu": 512, "cuda": 8192}
"""Rows in one step, by kind of device: a GPU is idle while few rows are on it."""


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """The sizes of one engine, and the only place of their defaults.

    server.yaml (EngineConfig, LimitsConfig) takes its defaults from here and is turned into one of
    these; the runner (RunnerSpec.sizes) and the step loop (EngineSettings) are made of it, and
    ModelInfo reports the result to the API.

    max_num_seqs: sequences in one step. max_num_batched_tokens: rows in one step. block_size: KV
    slots in a block. kv_bytes or kv_fraction: memory of the KV cache, the fraction of what is free
    once the weights are loaded (None: by the device, 0.3 on a CPU and 0.85 on CUDA). prefix_cache:
    whether prompts share KV blocks. slice_cache_rows: LM-head rows kept beside the profiles' own.
    max_adapters: adapters in memory at once.
    """

    max_num_seqs: int = DEFAULT_SEQS["cpu"]
    max_num_batched_tokens: int = DEFAULT_ROWS["cpu"]
    block_size: int = 16
    kv_bytes: int | None = None
    kv_fraction: float | None = None
    prefix_cache: bool = True
    slice_cache_rows: int = 4096
    max_adapters: int = 16


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What an engine reports when it is ready: the sizes that it runs with.

    dtype: how weights are kept (`engine.weights` on a CPU). kernel: what multiplies them. kv_dtype:
    what K and V are kept as. kv_block_bytes: bytes of a block in all layers, 0 = unknown.
    head_bytes_in_file: what the LM head would take, which stays in the model's file and is packed
    row by row for slices; 0: it is in memory. figures: what the control "figures" answers, in its
    order.
    """

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    device: str
    dtype: str
    fingerprint: str
    max_num_seqs: int
    max_num_batched_tokens: int
    kernel: str = "torch"
    kv_dtype: str = "float32"
    kv_block_bytes: int = 0
    head_bytes_in_file: int = 0
    figures: tuple[Figure, ...] = ()
