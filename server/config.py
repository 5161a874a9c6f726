"""ServerConfig and TaskConfig: what configs/server.yaml and configs/tasks/*.yaml may say.

Every section is a frozen pydantic model that refuses unknown keys and wrong types (a quoted "8" is
no number, `true` is no 1, nan is nothing). An error is one line a problem, in the form
`FILE:LINE: KEY: what is wrong`, so that an editor can jump to it; all problems of a file are told
at once. Files are read as YAML 1.2's core schema: `off` is a string and not False, `010` is ten,
there are no tags, no anchors and no dates, a repeated key is an error, and size and depth are
bounded.

Importing this module imports neither torch nor fastapi.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from server.errors import ConfigError

__all__ = [
    "CORPUS_DRAFTERS",
    "DEFAULT_TASK",
    "ContextMarks",
    "CorsConfig",
    "DashboardConfig",
    "EngineConfig",
    "GrammysOptions",
    "KeyConfig",
    "LimitsConfig",
    "ListenConfig",
    "LogConfig",
    "MemorySize",
    "MetricsConfig",
    "MixOptions",
    "ModelConfig",
    "RestartConfig",
    "SamplingDefaults",
    "ServerConfig",
    "SpeculationConfig",
    "TaskConfig",
    "TaskLimits",
    "TracingConfig",
    "TrieOptions",
    "VocabularyConfig",
    "load_server_config",
    "load_task",
    "load_tasks",
    "parse_device_list",
    "parse_memory",
    "read_yaml",
    "task_version",
    "with_overrides",
]

CORPUS_DRAFTERS = ("auto", "mix")
"""The drafters that draft from a corpus, and so from what a task has learned."""

DEFAULT_TASK = "completion"
"""The task of a request whose `model` names a model and not a task."""

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_TASK_FILES = 10_000

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._:-]{0,95})?")
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[KMGT]i?B?|B)?", re.IGNORECASE)
_UNITS = {
    "": 1, "B": 1,
    "K": 1 << 10, "KB": 10**3, "KIB": 1 << 10,
    "M": 1 << 20, "MB": 10**6, "MIB": 1 << 20,
    "G": 1 << 30, "GB": 10**9, "GIB": 1 << 30,
    "T": 1 << 40, "TB": 10**12, "TIB": 1 << 40,
}  # fmt: skip


# --- values ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemorySize:
    """An amount of memory: a fraction of what is free once the weights are loaded, or bytes.

    Exactly one of the two is set.
    """

    fraction: float | None = None
    num_bytes: int | None = None

    def resolve(self, free_bytes: int) -> int:
        """The amount in bytes when `free_bytes` are free."""
        if self.num_bytes is not None:
            return self.num_bytes
        assert self.fraction is not None
        return int(free_bytes * self.fraction)


def parse_memory(value: object) -> MemorySize:
    """0.4, "40%", "2GiB", "500MB" or 2000000000 as a MemorySize.

    A number up to 1 is a fraction, a larger one is bytes. Raises ValueError for anything else.
    """
    if isinstance(value, MemorySize):
        return value
    problem = 'must be a fraction (0.4 or "40%") or an amount ("2GiB", or a number of bytes)'
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(problem)
    text = str(value).strip()
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise ValueError(problem)
    number, unit = float(match[1]), (match[2] or "").upper()
    if unit == "%":
        number, unit = number / 100, ""
        if number > 1:
            raise ValueError("a share of memory is at most 100%")
    if not unit and 0 < number <= 1:
        return MemorySize(fraction=number)
    num_bytes = int(number * _UNITS[unit])
    if num_bytes < 1 << 20:
        raise ValueError("must be at least 1MiB")
    if num_bytes > 1 << 50:
        raise ValueError("must be at most 1024TiB")
    return MemorySize(num_bytes=num_bytes)


def parse_device_list(text: str) -> tuple[str, ...]:
    """ "cuda:0,cuda:1" as ("cuda:0", "cuda:1"). One engine a device; "cpu,cpu" is two engines.

    Raises ValueError for anything but cpu, cuda and cuda:N.
    """
    devices = tuple(part.strip() for part in text.split(","))
    for device in devices:
        _check_device(device)
    return devices


def _check_device(device: str) -> str:
    if not _DEVICE.fullmatch(device):
        raise ValueError(f"{device[:40]!r} is no device: use cpu, cuda or cuda:N")
    return device


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            "a name has 1 to 128 letters, digits and . _ : - and starts with a letter or digit"
        )
    return name


Memory = Annotated[MemorySize, BeforeValidator(parse_memory)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]


class _Section(BaseModel):
    """A part of a file: frozen, strict, no unknown keys, finite numbers only."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=False,
        validate_by_name=True,
        validate_by_alias=True,
        hide_input_in_errors=True,
        arbitrary_types_allowed=True,
    )


# --- server.yaml ----------------------------------------------------------------------------------


class ListenConfig(_Section):
    """Where the API listens."""

    host: str = Field("127.0.0.1", min_length=1, max_length=255, description="address to bind")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one")


class ModelConfig(_Section):
    """One model, with the devices it runs on: one engine process a device."""

    name: str = Field(description="what the `model` field of a request calls it")
    path: str = Field(
        min_length=1,
        max_length=4096,
        description="a built-in name, a folder, a GGUF file or a Hugging Face id",
    )
    adapter: str | None = Field(
        None, max_length=4096, description="folder of a PEFT LoRA that is merged at load"
    )
    devices: tuple[str, ...] = Field(
        ("cpu",),
        min_length=1,
        max_length=64,
        description="cpu, cuda or cuda:N, repeats allowed",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = Field(
        None, description="overrides engine.dtype"
    )
    max_model_len: int | None = Field(
        None, ge=16, le=1 << 24, description="overrides engine.max_model_len"
    )

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not _MODEL_NAME.fullmatch(value):  # "org/name", as Hugging Face writes it, is allowed
            raise ValueError("a model's name has letters, digits and . _ : - and at most one /")
        return value

    @field_validator("devices")
    @classmethod
    def _devices(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_check_device(device) for device in value)


class KeyConfig(_Section):
    """One API key. `id` names it in metrics and scopes; exactly one of key, env and file is set."""

    id: str = Field(description="a name for the key; never the key")
    key: SecretStr | None = Field(None, description="the key itself")
    env: str | None = Field(None, min_length=1, description="environment variable that holds it")
    file: str | None = Field(None, min_length=1, description="file whose first line holds it")
    admin: bool = Field(False, description="whether it may call the admin routes, /v1/tasks/...")
    tasks: tuple[str, ...] | None = Field(
        None,
        max_length=10_000,
        description="names that it may put into `model`; default all tasks and models",
    )
    requests_per_minute: int | None = Field(
        None, ge=1, le=1 << 31, description="more get 429; a minute's worth may come at once"
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        le=1 << 40,
        description="prompt tokens and max_tokens of its requests; what is not generated is "
        "given back",
    )
    max_concurrent_requests: int | None = Field(
        None, ge=1, le=1 << 20, description="requests that it may have open at once; more get 429"
    )

    @field_validator("id")
    @classmethod
    def _id(cls, value: str) -> str:
        return _check_name(value)

    @model_validator(mode="after")
    def _one_source(self) -> KeyConfig:
        if sum(source is not None for source in (self.key, self.env, self.file)) != 1:
            raise ValueError("set exactly one of key, env and file")
        return self

    def secret(self) -> str:
        """The key. Raises ConfigError when its source is missing, empty or not printable ASCII."""
        if self.key is not None:
            value = self.key.get_secret_value()
        elif self.env is not None:
            value = os.environ.get(self.env, "")
        else:
            assert self.file is not None
            try:
                value = Path(self.file).read_text(encoding="utf-8").split("\n", 1)[0].strip()
            except OSError as error:
                raise ConfigError(f"key {self.id}: {self.file}: {error.strerror}") from None
        if not value:
            raise ConfigError(f"key {self.id}: {self.env or self.file or 'key'} is empty")
        if not value.isascii() or not value.isprintable() or " " in value:
            raise ConfigError(f"key {self.id}: a key is printable ASCII without spaces")
        return value


class MetricsConfig(_Section):
    """GET /metrics."""

    require_key: bool = Field(
        False, description="whether /metrics needs an API key when there are any"
    )
    vllm_aliases: bool = Field(
        False, description="whether /metrics tells the figures under vLLM's names too"
    )


class DashboardConfig(_Section):
    """GET /dashboard, the built-in page. Its data need an API key when there are any."""

    enabled: bool = Field(True, description="whether the page is served")


class CorsConfig(_Section):
    """Cross-origin requests; off while the list is empty."""

    allow_origins: tuple[str, ...] = Field(
        (), max_length=100, description='origins that may call from a browser; ["*"] is all'
    )


class LimitsConfig(_Section):
    """What one request, and all of them, may take. Task limits can only be tighter."""

    max_body_bytes: int = Field(16 << 20, ge=1024, le=1 << 30, description="larger bodies get 413")
    max_prompts: int = Field(256, ge=1, le=65536, description="prompts in one request")
    max_choices: int = Field(128, ge=1, le=1024, description="n and best_of")
    max_tokens: int | None = Field(
        None, ge=1, description="most tokens a choice may generate; default the model's context"
    )
    max_request_tokens: int = Field(
        1 << 20, ge=1, description="prompts x choices x (prompt and max_tokens) of one request"
    )
    max_queued_requests: int = Field(
        1024, ge=1, le=1 << 20, description="requests waiting for an engine; then 429"
    )
    max_queued_tokens: int = Field(
        1 << 21, ge=1, description="prompt tokens waiting for an engine; then 429"
    )
    max_upload_bytes: int = Field(
        64 << 20, ge=1024, le=1 << 30, description="body of a corpus upload; larger ones get 413"
    )
    body_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="seconds a body may take to arrive; then 408"
    )
    max_header_bytes: int = Field(
        65536, ge=1024, le=1 << 24, description="request line and headers; more get 431"
    )
    header_timeout_s: float = Field(
        15.0, gt=0, le=3600, description="seconds the headers may take to arrive; then 408"
    )
    send_timeout_s: float = Field(
        60.0, gt=0, le=86400, description="seconds a client may leave its answer unread"
    )
    queue_timeout_s: float | None = Field(
        None, gt=0, le=86400, description="seconds a request may wait for its first step; then 503"
    )
    total_timeout_s: float | None = Field(
        None, gt=0, le=86400, description="seconds a request may take in all; then 504"
    )
    sse_keep_alive_s: float = Field(
        15.0, ge=0, le=3600, description="seconds of silence before a stream sends a comment; 0 off"
    )
    drain_s: float = Field(
        30.0, ge=0, le=86400, description="seconds that SIGTERM waits for open requests"
    )


class EngineConfig(_Section):
    """How an engine runs a model."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on cpu, the model's own on cuda"
    )
    max_model_len: int | None = Field(
        None, ge=16, le=1 << 24, description="longest prompt + output; default the model's own"
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="sequences in one step")
    max_num_batched_tokens: int = Field(
        512, ge=16, le=1 << 20, description="rows in one step: prompt chunks, last tokens, drafts"
    )
    block_size: int = Field(16, ge=1, le=1024, description="KV slots in a block")
    kv_cache_memory: Memory = Field(
        MemorySize(fraction=0.3),
        description="memory of the KV cache: a fraction of what is free after loading, or an "
        'amount such as "2GiB"',
    )
    prefix_cache: bool = Field(True, description="whether prompts share KV blocks by content")
    structured_outputs: bool = Field(
        True,
        description="whether requests may bring a grammar; reading the tokenizer for it takes 0.3 "
        "to 4 seconds at start",
    )
    slice_cache_rows: int = Field(
        4096, ge=0, le=1 << 20, description="LM-head rows of prompts kept beside the profiles' own"
    )
    full_head: Literal["device", "stream", "cpu"] = Field(
        "device",
        description="where the full LM head lies on cuda; stream: in CPU memory, copied through "
        "the device whenever it is needed; cpu: the same, and `exact` verifies on the CPU",
    )
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of an engine; default chosen at start"
    )

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two")
        return value

    @model_validator(mode="after")
    def _rows_for_all(self) -> EngineConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
        return self


class LogConfig(_Section):
    """Log lines on stderr. They hold no prompts and no outputs."""

    format: Literal["console", "json"] = Field(
        "console", description="lines for people, or a JSON object a line"
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="info has a line a request"
    )


class TracingConfig(_Section):
    """OpenTelemetry traces; off without an endpoint. Needs the extra `tracing`."""

    endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        max_length=2048,
        description="OTLP/HTTP collector, such as http://127.0.0.1:4318; its own path is kept",
    )
    service_name: str = Field(
        "tailor", min_length=1, max_length=255, description="service.name of the spans"
    )
    sample_ratio: float = Field(
        1.0, ge=0, le=1, description="share of requests traced; a caller's own decision wins"
    )


class RestartConfig(_Section):
    """What happens when an engine dies."""

    max_restarts: int = Field(
        5, ge=0, le=1000, description="restarts within window_s before an engine is given up"
    )
    window_s: float = Field(600.0, gt=0, le=86400, description="seconds that max_restarts covers")
    first_delay_s: float = Field(
        0.5, ge=0, le=3600, description="seconds before the first restart; doubles each time"
    )
    max_delay_s: float = Field(30.0, ge=0, le=3600, description="longest wait before a restart")


class ServerConfig(_Section):
    """configs/server.yaml, and the defaults of everything that the command line can set."""

    listen: ListenConfig = Field(default_factory=ListenConfig)
    models: tuple[ModelConfig, ...] = Field(
        (ModelConfig(name="smollm2-135m-instruct", path="smollm2-135m-instruct"),),
        min_length=1,
        max_length=64,
        description="the models served on this port; the first one is the default",
    )
    tasks: str | None = Field(
        None,
        max_length=4096,
        description="folder of task files; default configs/tasks",
    )
    keys: tuple[KeyConfig, ...] = Field(
        (), max_length=10_000, description="API keys; without any, every client may call"
    )
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    dashboard: DashboardConfig = Field(default_factory=DashboardConfig)
    cors: CorsConfig = Field(default_factory=CorsConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    restart: RestartConfig = Field(default_factory=RestartConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    tracing: TracingConfig = Field(default_factory=TracingConfig)

    @model_validator(mode="after")
    def _unique(self) -> ServerConfig:
        for what, names in (
            ("models", [model.name for model in self.models]),
            ("keys", [key.id for key in self.keys]),
        ):
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                raise ValueError(f"{what}: {sorted(twice)[0]!r} is there twice")
        return self


# --- tasks/*.yaml ---------------------------------------------------------------------------------


class SamplingDefaults(_Section):
    """What a request gets for a field that it leaves out. None: OpenAI's (and vLLM's) default."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=1 << 31, description="0 is off")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    min_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    stop: tuple[StopString, ...] = Field(
        (), max_length=4, description="stop strings of requests that bring none"
    )
    stop_token_ids: tuple[TokenId, ...] = Field((), max_length=256)
    ignore_eos: bool | None = Field(None)
    seed: int | None = Field(None, ge=0, lt=1 << 63)

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingDefaults:
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens is above max_tokens")
        return self


class TaskLimits(_Section):
    """What a request of this task may ask for at most; more is a 400. None: the server's limit."""

    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_prompt_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_prompts: int | None = Field(None, ge=1, le=65536)
    max_choices: int | None = Field(None, ge=1, le=1024)
    max_logprobs: int | None = Field(None, ge=0, le=20)
    max_draft_tokens: int | None = Field(
        None, ge=0, le=256, description="cap of a request's own speculation.max_draft_tokens"
    )
    queue_timeout_s: float | None = Field(
        None, gt=0, le=86400, description="seconds a request may wait for its first step; then 503"
    )
    total_timeout_s: float | None = Field(
        None, gt=0, le=86400, description="seconds a request may take in all; then 504"
    )


class TrieOptions(_Section):
    """N-Gram-Trie's parameters (EMNLP 2025). None: the drafter's default, in parentheses."""

    n: int | None = Field(None, ge=2, le=64, description="window length in tokens (13)")
    prefix_length: int | None = Field(
        None, ge=1, le=63, description="L_p: most generated tokens that are matched (3)"
    )
    num_draft: int | None = Field(None, ge=1, le=256, description="nodes kept of a sub-tree (32)")

    @model_validator(mode="after")
    def _prefix_fits(self) -> TrieOptions:
        if (self.prefix_length or 3) >= (self.n or 13):
            raise ValueError("prefix_length must be below n")
        return self


class MixOptions(_Section):
    """TASC-spec's parameters (arXiv 2602.24174). None: the drafter's default, in parentheses."""

    n_max: int | None = Field(None, ge=1, le=16, description="longest n-gram (5)")
    horizon: int | None = Field(None, ge=1, le=64, description="tokens drafted ahead (10)")
    weight: float | None = Field(
        None, ge=0, le=1, alias="lambda", description="lambda: share of the corpus (0.75)"
    )


class GrammysOptions(_Section):
    """N-Grammys' parameters (arXiv 2411.03786). None: the drafter's default, in parentheses."""

    table: str | None = Field(
        None,
        min_length=1,
        max_length=4096,
        description="the model's bigrams, a file of `tailor corpus bigrams`",
    )
    strategy: Literal["bigram", "mixed"] | None = Field(
        None, description="the table alone, or behind the request's own text (mixed)"
    )

    @model_validator(mode="after")
    def _bigram_has_a_table(self) -> GrammysOptions:
        if self.strategy == "bigram" and self.table is None:
            raise ValueError("strategy bigram needs a table")
        return self


class ContextMarks(_Section):
    """Where the task's context lies in a prompt: after the first `after`, before the next `before`.

    Strings of the prompt's text; a prompt without them is a context as a whole.
    """

    after: str | None = Field(None, min_length=1, max_length=1000)
    before: str | None = Field(None, min_length=1, max_length=1000)


class SpeculationConfig(_Section):
    """How the task drafts. It changes speed only, never the text."""

    drafter: str = Field("auto", description="a registered drafter; off drafts nothing")
    max_draft_tokens: int = Field(16, ge=0, le=256, description="most tree nodes in a step")
    allowed_drafters: tuple[str, ...] | None = Field(
        None, description="drafters that a request may choose; default all"
    )
    corpus: str | None = Field(
        None, min_length=1, max_length=4096, description="the task's corpus file"
    )
    allowed_corpora: tuple[str, ...] = Field(
        (),
        max_length=1000,
        description="tasks whose corpus a request may draft from instead of the task's own",
    )
    learn: bool = Field(
        False, description="whether drafts also come from the outputs of finished requests"
    )
    learn_max_tokens: int = Field(
        200_000,
        ge=1000,
        le=5_000_000,
        description="learned tokens that are held per API key and cache_salt; older ones fade out",
    )
    context: ContextMarks | None = Field(None)
    trie: TrieOptions = Field(default_factory=TrieOptions)
    mix: MixOptions = Field(default_factory=MixOptions)
    grammys: GrammysOptions = Field(default_factory=GrammysOptions)

    @model_validator(mode="after")
    def _drafter_allowed(self) -> SpeculationConfig:
        if self.allowed_drafters is not None and self.drafter not in self.allowed_drafters:
            raise ValueError("allowed_drafters does not hold the task's own drafter")
        return self

    @model_validator(mode="after")
    def _learning_drafter(self) -> SpeculationConfig:
        if self.learn and self.drafter not in CORPUS_DRAFTERS:
            raise ValueError(
                f"learn needs a drafter with a corpus ({' or '.join(CORPUS_DRAFTERS)}), "
                f"not {self.drafter}"
            )
        return self

    def options(self) -> tuple[tuple[str, float | int | str | bool], ...]:
        """The drafters' parameters that were set, as sorted (dotted name, value) pairs."""
        pairs = [
            (f"{section}.{key}", value)
            for section, options in (
                ("grammys", self.grammys),
                ("mix", self.mix),
                ("trie", self.trie),
            )
            for key, value in options.model_dump(by_alias=True, exclude_none=True).items()
        ]
        return tuple(sorted(pairs))


VocabularyModeName = Literal["full", "slice", "exact"]


class VocabularyConfig(_Section):
    """What part of the LM head the task computes. Only `slice` may change the text."""

    mode: VocabularyModeName = Field(
        "full",
        description="slice: draw only from the profile's ids and the request's own; exact: propose "
        "from them, verify with the full head, the text of full",
    )
    profile: str | None = Field(
        None, min_length=1, max_length=4096, description="a file of `tailor vocab profile`"
    )
    verify_every: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="tokens that exact verifies at once; default adapted to the measured misses",
    )
    allowed_modes: tuple[VocabularyModeName, ...] | None = Field(
        None,
        description="modes that a request may choose; default the task's own, full and, with a "
        "profile, exact",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> VocabularyConfig:
        if self.mode != "full" and self.profile is None:
            raise ValueError(f"mode {self.mode} needs a profile; see tailor vocab profile")
        if self.allowed_modes is not None:
            if self.mode not in self.allowed_modes:
                raise ValueError("allowed_modes does not hold the task's own mode")
            if self.profile is None and set(self.allowed_modes) != {"full"}:
                raise ValueError("allowed_modes other than full need a profile")
        if self.profile is not None and self.modes == ("full",):
            raise ValueError("profile means nothing where only full is allowed; take it out")
        if self.verify_every is not None and "exact" not in self.modes:
            raise ValueError("verify_every means nothing where exact is not allowed; take it out")
        return self

    @property
    def modes(self) -> tuple[VocabularyModeName, ...]:
        """The modes that a request may choose."""
        if self.allowed_modes is not None:
            return tuple(dict.fromkeys(self.allowed_modes))
        if self.profile is None:
            return ("full",)
        return ("full", "exact") if self.mode != "slice" else ("full", "slice", "exact")


class TaskConfig(_Section):
    """One file of configs/tasks: a named way to call a model. The `model` field names it."""

    name: str = Field("", description="default the file's name without .yaml")
    description: str = Field("", max_length=2000)
    model: str | None = Field(
        None, max_length=128, description="name of a model of server.yaml; default the first"
    )
    sampling: SamplingDefaults = Field(default_factory=SamplingDefaults)
    limits: TaskLimits = Field(default_factory=TaskLimits)
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    vocabulary: VocabularyConfig = Field(default_factory=VocabularyConfig)

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        return _check_name(value)

    @model_validator(mode="after")
    def _within_limits(self) -> TaskConfig:
        asked, most = self.sampling.max_tokens, self.limits.max_tokens
        if asked is not None and most is not None and asked > most:
            raise ValueError("sampling.max_tokens is above limits.max_tokens")
        most = self.limits.max_draft_tokens
        if most is not None and self.speculation.max_draft_tokens > most:
            raise ValueError("speculation.max_draft_tokens is above limits.max_draft_tokens")
        return self


# --- YAML with line numbers -----------------------------------------------------------------------

Path_ = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML file: plain values, and the line (from 1) of every key path in it."""

    source: str
    data: Any
    lines: Mapping[Path_, int]

    def line(self, path: Path_) -> int:
        """The line of `path`, or of the nearest thing around it that the file has."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def error(self, path: Path_, message: str) -> str:
        """One line that tells where and what."""
        where = f"{self.source}:{self.line(path)}"
        key = _dotted(path)
        return f"{where}: {key}: {message}" if key else f"{where}: {message}"


def _dotted(path: Path_) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


class _CoreLoader(yaml.SafeLoader):
    """YAML 1.2's core schema, without tags, anchors, aliases, merge keys and bottomless nesting."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own way to start from none)

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.MarkedYAMLError(None, None, "anchors and aliases are not read", _mark(event))
        if getattr(event, "tag", None):
            raise yaml.MarkedYAMLError(None, None, "tags are not read", _mark(event))
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(None, None, "nested too deeply", _mark(event))
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _mark(event: Any) -> yaml.Mark:
    mark: yaml.Mark = event.start_mark
    return mark


for _tag, _regex, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]{1,30}", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _CoreLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_regex})$"), _first
    )


def read_yaml(path: Path) -> Document:
    """Read one file. Raises ConfigError for what is not plain YAML of at most 1 MiB."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or 'cannot be read'}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Document:
    """Parse YAML text; `source` is what error messages call it."""
    lines: dict[Path_, int] = {}
    try:
        loader = _CoreLoader(text)
        node = loader.get_single_node()
        data = None if node is None else _plain(node, (), lines, source)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            f"{source}:{mark.line + 1 if mark else 1}: {error.problem or error.context}"
        ) from None
    except yaml.YAMLError as error:
        reason = getattr(error, "reason", None) or "not YAML"
        raise ConfigError(f"{source}:1: {reason}") from None
    except RecursionError:
        raise ConfigError(f"{source}:1: nested too deeply") from None
    return Document(source, data, lines)


def _plain(node: yaml.Node, path: Path_, lines: dict[Path_, int], source: str) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return tuple(_plain(item, (*path, i), lines, source) for i, item in enumerate(node.value))
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{source}:{line}: a key must be a plain word")
            key = str(key_node.value)
            if key in values:
                first = lines[(*path, key)]
                raise ConfigError(
                    f"{source}:{line}: {_dotted((*path, key))}: is there twice (first in line "
                    f"{first})"
                )
            lines[(*path, key)] = line
            values[key] = _plain(value_node, (*path, key), lines, source)
        return values
    text, kind = str(node.value), node.tag.rsplit(":", 1)[-1]
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text)
    if kind == "float":
        return float(text.replace(".inf", "inf").replace(".nan", "nan").replace(".NaN", "nan"))
    return text


# --- loading --------------------------------------------------------------------------------------

_Model = TypeVar("_Model", bound=_Section)


def _validate(model: type[_Model], document: Document) -> _Model:
    data = document.data if document.data is not None else {}
    if not isinstance(data, dict):
        raise ConfigError(document.error((), "must be a mapping of keys to values"))
    data = _without_empty_sections(data)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_problems(model, document, error)) from None


def _without_empty_sections(data: dict[str, Any]) -> dict[str, Any]:
    """A key without a value ("sampling:" and nothing below it) is the default, not null."""
    return {
        key: _without_empty_sections(value) if isinstance(value, dict) else value
        for key, value in data.items()
        if value is not None
    }


def _problems(model: type[_Section], document: Document, error: ValidationError) -> str:
    """One line a problem, in the order of the file."""
    told: list[tuple[int, str]] = []
    problems = error.errors(include_url=False, include_context=False)
    for problem in problems:
        path, kind = tuple(problem["loc"]), problem["type"]
        if kind == "too_short" and any(
            len(other["loc"]) > len(path) and other["loc"][: len(path)] == path
            for other in problems
        ):
            continue  # items that are wrong themselves are not counted
        message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if kind == "extra_forbidden":
            message = "unknown key"
            known = _known_keys(model, path[:-1])
            near = difflib.get_close_matches(str(path[-1]), known, n=1)
            if near:
                message += f"; did you mean {near[0]}?"
            elif known:
                message += f"; known keys: {', '.join(known)}"
        elif kind == "missing":
            message = "is missing"
        message = document.error(path, message[:1].lower() + message[1:])
        told.append((document.line(path), message))
    return "\n".join(message for _, message in sorted(told))


def _known_keys(model: type[BaseModel], path: Path_) -> list[str]:
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = None if field is None else _section_of(field.annotation)
        if inner is None:
            return []
        model = inner
    return [field.alias or name for name, field in model.model_fields.items()]


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _section_of(argument)
        if found is not None:
            return found
    return None


def load_server_config(path: Path) -> ServerConfig:
    """Read configs/server.yaml. Relative paths in it count from its own folder.

    Raises ConfigError with one line a problem.
    """
    config = _validate(ServerConfig, read_yaml(path))
    base = path.resolve().parent
    return config.model_copy(
        update={
            "tasks": None if config.tasks is None else _from_folder(base, config.tasks),
            "models": tuple(
                model.model_copy(
                    update={
                        "path": _model_path(base, model.path),
                        "adapter": None
                        if model.adapter is None
                        else _from_folder(base, model.adapter),
                    }
                )
                for model in config.models
            ),
            "keys": tuple(
                key
                if key.file is None
                else key.model_copy(update={"file": _from_folder(base, key.file)})
                for key in config.keys
            ),
        }
    )


def _from_folder(base: Path, value: str) -> str:
    return str(base / Path(value).expanduser())


def _model_path(base: Path, value: str) -> str:
    """A model's path counts from the file's folder; a built-in name or a hub id stays as it is."""
    if value.startswith((".", "~", "/")) or value.endswith(".gguf") or (base / value).exists():
        return _from_folder(base, value)
    return value


def with_overrides(config: ServerConfig, section: str, values: Mapping[str, Any]) -> ServerConfig:
    """`config` with some keys of one section replaced, checked again. Nones are left out.

    Raises ConfigError that names the command-line option (`max_num_seqs` is --max-num-seqs).
    """
    given = {key: value for key, value in values.items() if value is not None}
    if not given:
        return config
    old = getattr(config, section)
    try:
        new = type(old).model_validate({**dict(old), **given})
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False, include_context=False):
            option = "--" + str(problem["loc"][0] if problem["loc"] else section).replace("_", "-")
            lines.append(f"{option}: {problem['msg'].removeprefix('Value error, ')}")
        raise ConfigError("\n".join(lines)) from None
    return config.model_copy(update={section: new})


def load_task(path: Path) -> TaskConfig:
    """Read one task file. Paths in it count from the file's folder. Raises ConfigError."""
    document = read_yaml(path)
    if document.data is None:
        document = Document(document.source, {}, document.lines)
    if isinstance(document.data, dict):
        document.data.setdefault("name", path.stem)
    task = _validate(TaskConfig, document)
    base = path.resolve().parent
    update: dict[str, object] = {}
    if task.speculation.corpus is not None:
        update["corpus"] = _from_folder(base, task.speculation.corpus)
    grammys = task.speculation.grammys
    if grammys.table is not None:
        table = _from_folder(base, grammys.table)
        update["grammys"] = grammys.model_copy(update={"table": table})
    if update:
        task = task.model_copy(update={"speculation": task.speculation.model_copy(update=update)})
    if task.vocabulary.profile is not None:
        profile = _from_folder(base, task.vocabulary.profile)
        task = task.model_copy(
            update={"vocabulary": task.vocabulary.model_copy(update={"profile": profile})}
        )
    return task


def load_tasks(
    folder: Path, models: tuple[str, ...] = (), drafters: tuple[str, ...] = ()
) -> dict[str, TaskConfig]:
    """All *.yaml and *.yml files of a folder, by task name, in the order of their file names.

    models: names of the server's models; a task may name one of them, and may not be called like
        one. drafters: names that a task may choose from. Empty leaves that unchecked.
    The default task is added when the folder has none. Raises ConfigError with all problems of all
    files.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    files = sorted(
        file
        for file in folder.iterdir()
        if file.suffix in (".yaml", ".yml") and not file.name.startswith(".")
    )
    if len(files) > MAX_TASK_FILES:
        raise ConfigError(f"{folder}: more than {MAX_TASK_FILES} task files")
    tasks: dict[str, TaskConfig] = {}
    sources: dict[str, Path] = {}
    problems: list[str] = []
    for file in files:
        try:
            task = load_task(file)
            document = read_yaml(file)
            if task.name in tasks:
                raise ConfigError(
                    document.error(("name",), f"{task.name!r} is also in {sources[task.name]}")
                )
            if task.name in models:
                raise ConfigError(document.error(("name",), f"{task.name!r} is a model's name"))
            if models and task.model is not None and task.model not in models:
                raise ConfigError(
                    document.error(
                        ("model",), f"no model {task.model!r}; there are: {', '.join(models)}"
                    )
                )
            corpus = task.speculation.corpus
            if corpus is not None and not Path(corpus).is_file():
                raise ConfigError(document.error(("speculation", "corpus"), f"no file {corpus}"))
            table = task.speculation.grammys.table
            if table is not None and not Path(table).is_file():
                at = ("speculation", "grammys", "table")
                raise ConfigError(document.error(at, f"no file {table}"))
            if drafters:
                _check_drafters(task, document, drafters)
        except ConfigError as error:
            problems.append(error.message)
            continue
        tasks[task.name], sources[task.name] = task, file
    if problems:
        raise ConfigError("\n".join(problems))
    if DEFAULT_TASK not in tasks:
        tasks[DEFAULT_TASK] = TaskConfig(
            name=DEFAULT_TASK, description="Plain text completion with OpenAI's defaults"
        )
    return tasks


def _check_drafters(task: TaskConfig, document: Document, drafters: tuple[str, ...]) -> None:
    chosen: list[tuple[Path_, str]] = [(("speculation", "drafter"), task.speculation.drafter)]
    for i, name in enumerate(task.speculation.allowed_drafters or ()):
        chosen.append((("speculation", "allowed_drafters", i), name))
    for path, name in chosen:
        if name not in drafters:
            raise ConfigError(
                document.error(path, f"no drafter {name!r}; there are: {', '.join(drafters)}")
            )


def task_version(task: TaskConfig) -> str:
    """Twelve hex digits that change whenever a task's settings do."""
    return hashlib.sha256(task.model_dump_json().encode()).hexdigest()[:12]
