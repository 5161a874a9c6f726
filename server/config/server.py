"""ServerConfig: the keys of configs/server.yaml, and the command line's options over them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from server.config.yaml_file import (
    Device,
    Document,
    FilePath,
    Memory,
    ModelPath,
    Name,
    Section,
    read_yaml,
    validate,
)
from server.errors import ConfigError
from server.types import DEFAULT_ROWS, DEFAULT_SEQS, EngineSizes

_SIZES = EngineSizes()  # the defaults


_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._:-]{0,95})?")


def _check_model_name(value: str) -> str:
    if not _MODEL_NAME.fullmatch(value):  # "org/name", as Hugging Face writes it, is allowed
        raise ValueError("a model's name has letters, digits and . _ : - and at most one /")
    return value


ModelName = Annotated[str, AfterValidator(_check_model_name)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
WeightsForm = Literal["auto", "float32", "bfloat16", "int8", "int8-blocks", "int4", "file", "fp8"]


class AdapterConfig(Section):
    """A PEFT LoRA that is served beside its base, in the same batches."""

    name: ModelName = Field(description="what the `model` field of a request or a task calls it")
    path: FilePath = Field(min_length=1, max_length=4096, description="folder that PEFT saved")
    pinned: bool = Field(False, description="whether it is read at start and stays in memory")


class ModelConfig(Section):
    """One model, with the devices it runs on: one engine process a device."""

    name: ModelName = Field(description="what the `model` field of a request calls it")
    aliases: tuple[ModelName, ...] = Field(
        (), max_length=100, description="further names that the `model` field may call it by"
    )
    path: ModelPath = Field(
        min_length=1,
        max_length=4096,
        description="a built-in name, a folder, a GGUF file or a Hugging Face id",
    )
    adapter: FilePath | None = Field(
        None, max_length=4096, description="folder of a PEFT LoRA that is merged at load"
    )
    adapters: tuple[AdapterConfig, ...] = Field(
        (), max_length=10_000, description="PEFT LoRAs that are served beside it"
    )
    devices: tuple[Device, ...] = Field(
        ("cpu",),
        min_length=1,
        max_length=64,
        description="cpu, cuda or cuda:N, repeats allowed",
    )
    dtype: Dtype | None = Field(None, description="overrides engine.dtype")
    weights: WeightsForm | None = Field(None, description="overrides engine.weights")
    max_model_len: int | None = Field(
        None, ge=16, le=1 << 24, description="overrides engine.max_model_len"
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="auto: the model's generation_config.json says how to sample where a task is "
        "silent",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> ModelConfig:
        if self.adapter is not None and self.adapters:
            raise ValueError("adapter is merged, adapters stand beside the base: give one of them")
        return self

    def over(self, engine: EngineConfig) -> EngineConfig:
        """How its engines run it: as all do, but for what is said here."""
        own = {key: getattr(self, key) for key in ("dtype", "weights", "max_model_len")}
        return engine.model_copy(update={key: value for key, value in own.items() if value})

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it and its adapters."""
        return (self.name, *self.aliases, *(one.name for one in self.adapters))


class ListenConfig(Section):
    """Where the API listens."""

    host: str = Field("127.0.0.1", min_length=1, max_length=255, description="address to bind")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one")
    ssl_certfile: FilePath | None = Field(
        None, min_length=1, description="certificate chain (PEM): HTTPS instead of HTTP"
    )
    ssl_keyfile: FilePath | None = Field(
        None, min_length=1, description="its key, where the chain's file has none"
    )

    def url(self, port: int) -> str:
        """What this machine calls it by. port: the one that was taken."""
        scheme = "http" if self.ssl_certfile is None else "https"
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"{scheme}://{host}:{port}"

    @property
    def certificate(self) -> tuple[str, str | None] | None:
        """The files of HTTPS: the chain's, and its key's where that is another one."""
        return None if self.ssl_certfile is None else (self.ssl_certfile, self.ssl_keyfile)

    @model_validator(mode="after")
    def _key_of_a_certificate(self) -> ListenConfig:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile needs ssl_certfile")
        return self


class KeyConfig(Section):
    """One API key. `id` names it in metrics and scopes; exactly one of key, env and file is set."""

    id: Name = Field(description="a name for the key; never the key")
    key: SecretStr | None = Field(None, description="the key itself")
    env: str | None = Field(None, min_length=1, description="environment variable that holds it")
    file: FilePath | None = Field(None, min_length=1, description="file whose first line holds it")
    admin: bool = Field(False, description="whether it may call the admin routes, /v1/tasks/...")
    tasks: tuple[str, ...] | None = Field(
        None,
        max_length=10_000,
        description="tasks, models and adapters that it may put into `model`; default all",
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

    _at: str = PrivateAttr("")

    @model_validator(mode="after")
    def _one_source(self) -> KeyConfig:
        if sum(source is not None for source in (self.key, self.env, self.file)) != 1:
            raise ValueError("set exactly one of key, env and file")
        return self

    @property
    def where(self) -> str:
        """The start of an error: file and line of the key, if it is from a file, and its id."""
        return f"{self._at}key {self.id}"

    def at(self, document: Document, index: int) -> KeyConfig:
        """The same key, with its place in the file."""
        key = self.model_copy()
        key._at = f"{document.source}:{document.line(('keys', index))}: "
        return key

    def secret(self) -> str:
        """The key. Raises ConfigError when its source is missing, empty or not printable ASCII."""
        if self.key is not None:
            value = self.key.get_secret_value()
        elif self.env is not None:
            value = os.environ.get(self.env, "")
        else:
            assert self.file is not None
            try:
                text = Path(self.file).read_text(encoding="utf-8", errors="replace")
                value = text.split("\n", 1)[0].strip()
            except OSError as error:
                raise ConfigError(f"{self.where}: {self.file}: {error.strerror}") from None
        source = self.env or self.file or "key"
        if not value:
            raise ConfigError(f"{self.where}: {source} is empty")
        if not value.isascii() or not value.isprintable() or " " in value:
            raise ConfigError(f"{self.where}: {source}: a key is printable ASCII without spaces")
        return value


class MetricsConfig(Section):
    """GET /metrics."""

    require_key: bool = Field(
        True, description="whether /metrics needs an API key when there are any"
    )
    admin_only: bool = Field(
        False,
        description="whether sums over all keys (/metrics, and the tables of the dashboard) are "
        "for admin keys alone, when there are keys",
    )
    vllm_aliases: bool = Field(
        False,
        description="whether /metrics has all figures under vLLM's names, not the main ones alone",
    )


class DashboardConfig(Section):
    """GET /dashboard, the built-in page. It needs an API key when there are any."""

    enabled: bool = Field(True, description="whether it and /docs are served")


class CorsConfig(Section):
    """Cross-origin requests; off while the list is empty."""

    allow_origins: tuple[str, ...] = Field(
        (), max_length=100, description='origins that may call from a browser; ["*"] is all'
    )


class LimitsConfig(Section):
    """Limits of one request and of all together. A task's limits can only be tighter."""

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
        1024,
        ge=1,
        le=1 << 20,
        description="requests waiting for an engine; then keys that have their share get 429",
    )
    max_queued_tokens: int = Field(
        1 << 21, ge=1, description="prompt tokens waiting for an engine; then the same"
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


class EngineConfig(Section):
    """How an engine runs a model."""

    dtype: Dtype = Field("auto", description="auto: float32 on cpu, the model's own on cuda")
    weights: WeightsForm = Field(
        "auto",
        description="how a cpu keeps weights, and which of them fp8 is on cuda: docs/models.md; "
        "auto: on a cpu file for a GGUF or a built-in model without merged adapter and dtype, else "
        "dtype",
    )
    max_model_len: int | None = Field(
        None, ge=16, le=1 << 24, description="longest prompt + output; default the model's own"
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="sequences in one step; default "
        + ", ".join(f"{seqs} on {kind}" for kind, seqs in DEFAULT_SEQS.items()),
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=16,
        le=1 << 20,
        description="rows in one step: prompt chunks, last tokens, drafts; default "
        + ", ".join(f"{rows} on {kind}" for kind, rows in DEFAULT_ROWS.items())
        + ", or max_num_seqs if that is more",
    )
    block_size: int = Field(_SIZES.block_size, ge=1, le=1024, description="KV slots in a block")
    kv_cache_memory: Memory | None = Field(
        None,
        description="memory of the KV cache: a fraction of what is free after loading (on cuda "
        'beside the largest step and max_adapters adapters), or an amount such as "2GiB"; default '
        "0.3 on cpu, 0.85 on cuda",
    )
    prefix_cache: bool = Field(
        _SIZES.prefix_cache, description="whether prompts share KV blocks by content"
    )
    kv_cache_dtype: Literal["auto", "float32", "float16", "int8"] = Field(
        "auto",
        description="what a cpu keeps keys and values as; int8 has a scale a head and position; "
        "auto: float32 beside float32 weights, else float16",
    )
    structured_outputs: bool = Field(
        True,
        description="whether requests may bring a grammar; what makes masks is built for the first",
    )
    slice_cache_rows: int = Field(
        _SIZES.slice_cache_rows,
        ge=0,
        le=1 << 20,
        description="LM-head rows of prompts kept beside the profiles' own",
    )
    max_adapters: int = Field(
        _SIZES.max_adapters,
        ge=1,
        le=4096,
        description="adapters in memory at once; more may be known",
    )
    full_head: Literal["auto", "device", "stream", "cpu"] = Field(
        "auto",
        description="where the full LM head lies: docs/vocabulary.md; auto: device, but on a cpu "
        "the model's file where all its tasks say `vocabulary: {mode: slice}`",
    )
    cuda_graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="whether steps of few rows, trees included, replay captured graphs on cuda; "
        "auto: yes there",
    )
    steps_ahead: Literal["auto", 0] = Field(
        "auto",
        description="steps launched before the last is accepted; 1 is refused, until a device has "
        "run them",
    )
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of an engine; default chosen at start"
    )
    idle_prior: Literal["auto", "off"] = Field(
        "auto",
        description="auto: a built-in model on a cpu gets its prior (docs/drafting.md) while the "
        "machine is idle",
    )

    @field_validator("steps_ahead", mode="before")
    @classmethod
    def _no_steps_ahead(cls, value: Any) -> Any:
        if value in (1, "1"):  # True, too
            raise ValueError(
                "steps launched ahead left until a device has run them: use 0, or leave it out"
            )
        return "auto" if value is None or value is False else value

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two")
        return value

    @model_validator(mode="after")
    def _rows_for_all(self) -> EngineConfig:
        rows, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if rows is not None and seqs is not None and rows < seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
        return self

    def sizes(self, device: str) -> EngineSizes:
        """The sizes of an engine on a device."""
        memory = self.kv_cache_memory
        kind = device.partition(":")[0]
        rows = self.max_num_batched_tokens or max(self.max_num_seqs or 0, DEFAULT_ROWS[kind])
        return EngineSizes(
            max_num_seqs=self.max_num_seqs or min(rows, DEFAULT_SEQS[kind]),
            max_num_batched_tokens=rows,
            block_size=self.block_size,
            kv_bytes=None if memory is None else memory.num_bytes,
            kv_fraction=None if memory is None else memory.fraction,
            prefix_cache=self.prefix_cache,
            slice_cache_rows=self.slice_cache_rows,
            max_adapters=self.max_adapters,
        )


class LogConfig(Section):
    """Log lines on stderr. They hold no prompts and no outputs."""

    format: Literal["console", "json"] = Field(
        "console", description="lines for people, or a JSON object a line"
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="info has a line a request"
    )


class TracingConfig(Section):
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


class RestartConfig(Section):
    """What happens when an engine dies, and when one counts as stuck."""

    max_restarts: int = Field(
        5, ge=0, le=1000, description="restarts within window_s before an engine is given up"
    )
    window_s: float = Field(600.0, gt=0, le=86400, description="seconds that max_restarts covers")
    first_delay_s: float = Field(
        0.5, ge=0, le=3600, description="seconds before the first restart; doubles each time"
    )
    max_delay_s: float = Field(30.0, ge=0, le=3600, description="longest wait before a restart")
    stuck_after_s: float = Field(
        10.0,
        ge=2,
        le=3600,
        description="seconds without progress after which an engine is killed and started again",
    )


class ServerConfig(Section):
    """configs/server.yaml, and the defaults of everything that the command line can set."""

    listen: ListenConfig = Field(default_factory=ListenConfig)
    models: tuple[ModelConfig, ...] = Field(
        (ModelConfig(name="smollm2-135m-instruct", path="smollm2-135m-instruct"),),
        min_length=1,
        max_length=64,
        description="the models served on this port; the first one is the default",
    )
    tasks: FilePath | None = Field(
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
            ("models", [name for model in self.models for name in model.names]),
            ("keys", [key.id for key in self.keys]),
        ):
            twice = [name for name, num in Counter(names).items() if num > 1]
            if twice:
                raise ValueError(f"{what}: {min(twice)!r} is there twice")
        return self


def load_server_config(path: Path) -> ServerConfig:
    """Read configs/server.yaml. Relative paths in it count from its own folder.

    Raises ConfigError with one line a problem.
    """
    document = read_yaml(path)
    config = validate(ServerConfig, document)
    keys = tuple(key.at(document, i) for i, key in enumerate(config.keys))
    return config.model_copy(update={"keys": keys})


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
