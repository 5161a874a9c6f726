"""ClusterConfig: the keys of cluster.yaml, beside the server.yaml that it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from server.config.server import ServerConfig, load_server_config
from server.config.yaml_file import (
    FilePath,
    FilePlace,
    Memory,
    Section,
    parse_memory,
    read_yaml,
    validate,
)

Surge = Annotated[
    int,
    Field(
        ge=0,
        le=100,
        description="replicas beyond their number (one at least) while an update replaces them; 0 "
        "ends old ones before new ones are there",
    ),
]


class EmbeddedConfig(Section):
    """The Ray that is started here when no address is given."""

    num_cpus: float | None = Field(
        None, gt=0, le=4096, description="what replicas may ask for in all; default what they do"
    )
    object_store_memory: Memory = Field(
        parse_memory("200MiB"), description="shared memory of Ray's object store; an amount"
    )


class IngressConfig(Section):
    """The replicas of the HTTP application."""

    replicas: int = Field(1, ge=1, le=1000, description="how many")
    num_cpus: float = Field(0.5, ge=0, le=1024, description="cores that one asks Ray for")
    http: Literal["direct", "proxy"] = Field(
        "direct",
        description="direct: each listens itself, those of a machine on one port together; proxy: "
        "behind Ray Serve's own HTTP proxies, one a node, as a RayService expects",
    )
    own_ports: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="with http: direct, ingress i listens on this port + i, too: where Prometheus "
        "asks each for its own figures",
    )
    surge_percent: Surge = 25


class ScalingConfig(Section):
    """When replicas between min and max come and go: by what waits, at what steps were measured to
    cost."""

    first_token_s: float = Field(
        1.0, gt=0, le=3600, description="target for the 95th percentile of times to a first token"
    )
    spare: float = Field(
        0.5, ge=0, lt=1, description="share of it that is left over before a replica is given up"
    )
    seat_load: float = Field(
        0.8, gt=0, le=1, description="share of its sequences that a replica may fill"
    )
    up_after_s: float = Field(
        10.0, ge=0, le=3600, description="seconds that more are needed before they come"
    )
    down_after_s: float = Field(
        120.0, ge=0, le=86400, description="seconds that fewer would do before one goes"
    )
    sleep_after_s: float = Field(
        600.0, ge=0, le=86400, description="with min: 0, idle seconds before the last one goes"
    )
    look_back_s: float = Field(
        15.0, gt=10, le=3600, description="seconds over which what waits is averaged"
    )


class ReplicasConfig(Section):
    """The engines of a model: one a replica."""

    min: int = Field(1, ge=0, le=10_000, description="replicas at least; 0 lets it go to sleep")
    max: int | None = Field(
        None, ge=1, le=10_000, description="replicas at most; default min, and then none is scaled"
    )
    num_cpus: float = Field(1.0, ge=0, le=1024, description="cores that one asks Ray for")
    num_gpus: float = Field(0.0, ge=0, le=64, description="GPUs that one asks Ray for")
    max_ongoing_requests: int = Field(
        256, ge=1, le=1 << 20, description="requests open on one; more wait at the ingresses"
    )
    health_check_s: float = Field(
        2.0, ge=0.1, le=3600, description="seconds between two looks at its health"
    )
    surge_percent: Surge = 25
    scaling: ScalingConfig = Field(default_factory=ScalingConfig)

    @model_validator(mode="after")
    def _order(self) -> ReplicasConfig:
        if self.max is not None and self.max < max(1, self.min):
            raise ValueError("max must be at least min")
        if self.max is None and self.min == 0:
            raise ValueError("min 0 needs max")
        return self

    @property
    def most(self) -> int:
        """Replicas at most."""
        return self.min if self.max is None else self.max


class RoutingConfig(Section):
    """Which replica serves a request."""

    policy: Literal["tasks", "serve"] = Field(
        "tasks", description="tasks: a task has home replicas; serve: Ray Serve's default"
    )
    target_load: float = Field(
        0.7, gt=0, le=1, description="share of a replica that a task fills before it gets a home"
    )
    cold_cost: float = Field(
        0.3, ge=0, le=10, description="how much longer a task's steps take away from home"
    )
    max_messages_per_s: float = Field(
        2000.0,
        gt=0,
        le=1e6,
        description="messages that a replica sends in a second; above that, a stream's steps are "
        "sent together",
    )
    max_runs: int = Field(
        4, ge=1, le=100, description="replicas that a request may lose before it fails, and one"
    )


class LearningConfig(Section):
    """What one replica learned reaches the others: of tasks with `learn: persist`, key by key."""

    storage: FilePlace | None = Field(
        None,
        min_length=1,
        max_length=4096,
        description="where it lies: a folder that all machines see, or a URL that fsspec reads, as "
        "s3://bucket/folder; default a folder of the cache",
    )
    append_s: float = Field(
        20.0, gt=0, le=86400, description="seconds that an output waits before it is written there"
    )
    segment_tokens: int = Field(
        20_000, ge=100, le=5_000_000, description="learned tokens that are written before that"
    )
    publish_s: float = Field(
        20.0, gt=0, le=86400, description="seconds between two passes of a builder that merges them"
    )
    look_s: float = Field(
        20.0,
        gt=0,
        le=86400,
        description="seconds between two looks of a replica at what is there",
    )
    max_segments: int = Field(
        64, ge=1, le=100_000, description="of a replica, task and key, which nobody has merged yet"
    )
    max_scopes: int = Field(
        256,
        ge=1,
        le=1_000_000,
        description="keys and salts that are kept of a task; the oldest go",
    )
    max_age_days: float = Field(
        30.0, gt=0, le=3650, description="what was learned before is given up"
    )
    builders: int = Field(
        1, ge=1, le=100, description="processes that merge; each task belongs to one"
    )


class ClusterConfig(Section):
    """cluster.yaml: a fleet. Everything that a single server reads stays in its server.yaml."""

    server: FilePath = Field(
        min_length=1, max_length=4096, description="the server.yaml of every ingress and engine"
    )
    address: str | None = Field(
        None, max_length=4096, description="of a Ray cluster; without one, Ray is started here"
    )
    embedded: EmbeddedConfig = Field(default_factory=EmbeddedConfig)
    ingress: IngressConfig = Field(default_factory=IngressConfig)
    replicas: ReplicasConfig = Field(
        default_factory=ReplicasConfig, description="the engines of each model"
    )
    models: Mapping[str, ReplicasConfig] = Field(
        default_factory=dict, description="`replicas` for one model, by its name, all keys anew"
    )
    routing: RoutingConfig = Field(default_factory=RoutingConfig)
    drain_s: float = Field(
        3600.0,
        ge=0,
        le=86400,
        description="seconds that a replica which an update replaces, or which is given up, may "
        "take to end what is open; where all of the fleet ends, server.yaml's limits.drain_s",
    )
    learning: LearningConfig | None = Field(
        None, description="without this section, each replica learns for itself"
    )

    def replicas_of(self, model: str) -> ReplicasConfig:
        """The replicas of a model."""
        return self.models.get(model, self.replicas)


def load_cluster_config(path: Path) -> tuple[ClusterConfig, ServerConfig]:
    """Read cluster.yaml and the server.yaml that it names, relative to it.

    Raises ConfigError with one line a problem.
    """
    document = read_yaml(path)
    cluster = validate(ClusterConfig, document)
    server_file = Path(cluster.server)
    if not server_file.is_file():
        raise document.error(("server",), f"{server_file}: there is no such file")
    server = load_server_config(server_file)
    names = [model.name for model in server.models]
    for name in cluster.models:
        if name not in names:
            text = f"server.yaml has no model of this name; it has {', '.join(names)}"
            raise document.error(("models", name), text)
    for model in server.models:
        on_gpu = any(device != "cpu" for device in model.devices)
        if on_gpu != (cluster.replicas_of(model.name).num_gpus > 0):
            at = ("models", model.name) if model.name in cluster.models else ("replicas",)
            text = f"the model {model.name} runs on {model.devices[0]}: give its replicas "
            raise document.error(at, text + ("num_gpus" if on_gpu else "no num_gpus"))
    if server.listen.port == 0:
        raise document.error(("server",), "listen.port: a fleet needs a fixed port")
    if cluster.embedded.object_store_memory.num_bytes is None:
        raise document.error(
            ("embedded", "object_store_memory"), 'must be an amount, such as "200MiB"'
        )
    url = None if cluster.learning is None else cluster.learning.storage
    if url is not None:  # whether something here can reach such a place; no connection is made
        at = ("learning", "storage")
        try:
            import fsspec

            fsspec.get_filesystem_class(url.partition("://")[0] if "://" in url else "file")
        except ImportError as error:
            text = f"{error}; `pip install fsspec` brings it"
            raise document.error(at, text) from None
        except ValueError as error:
            raise document.error(at, str(error)) from None
    return cluster, server
