"""The fleet as an application of Ray Serve: engine replicas, the desk, ingress replicas.

    serve run server.fleet.app:build config=cluster.yaml
    serve build server.fleet.app:fleet      # reads the file that TAILOR_CLUSTER names

`tailor fleet up cluster.yaml` does the same and starts Ray where none is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import re
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from server import logs
from server.api.serving import listen
from server.config.cluster import ClusterConfig, ReplicasConfig, load_cluster_config
from server.fleet.budgets import Budgets
from server.fleet.changes import ChangeDesk, ChangeLog
from server.fleet.desk import Desk, Standing
from server.fleet.far_engine import FleetHandle
from server.fleet.ingress import IngressApp, OtherIngresses
from server.fleet.learning.builder import BuilderLoop, Sharing
from server.fleet.parts import FleetParts, Front, version_of
from server.fleet.replica import EngineReplica
from server.fleet.routing import Job
from server.fleet.serve_replicas import DeskLine, ServeReplicas

log = logging.getLogger("tailor.fleet")

_ONE_LOOP = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""Of ingresses and engine replicas: Serve's own part of a request runs on the loop of ours, because
each change of threads, four a request, delays a first token. Nothing of ours blocks that loop."""
_QUIET = {"enable_access_log": False}  # requests are in the log of the ingress's own application
_TELL_S = 1.0
_READY_S = 30.0
_ASK_S = 2.0
_SCALING = "server.fleet.scaling:WorkPolicy"
_ROUTER = "server.fleet.task_router:TaskRouter"


class DeskDeployment:
    """desk.Desk, budgets.Budgets and changes.ChangeLog; one replica. builders: which are deployed
    with it, and not called."""

    def __init__(self, num_ingresses: int, builders: DeploymentHandle | None = None) -> None:
        del builders
        self._parts = {
            "desk": Desk(), "budgets": Budgets(num_ingresses), "changes": ChangeLog()
        }  # fmt: skip

    async def ask(self, part: str, method: str, *args: Any) -> Any:
        """What a method of a part answers; see serve_replicas.DeskLine."""
        answer = getattr(self._parts[part], method)(*args)
        return await answer if inspect.isawaitable(answer) else answer


class BuilderDeployment:
    """learning.builder.BuilderLoop of the tasks that are this replica's by its rank."""

    def __init__(self, sharing: Sharing, num_builders: int) -> None:
        rank = serve.get_replica_context().rank.rank
        self._loop = BuilderLoop(sharing, (rank % num_builders, num_builders))

    def check_health(self) -> None:
        """Raises when it is to be replaced."""
        self._loop.check()

    async def __del__(self) -> None:
        if hasattr(self, "_loop"):
            await asyncio.to_thread(self._loop.stop)


class EngineDeployment:
    """replica.EngineReplica; ready when its engine is."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        parts: FleetParts,
        model: str,
        replicas: ReplicasConfig,
        max_messages_per_s: float,
        desk: DeploymentHandle,
    ) -> None:
        config = parts.server
        logs.configure(config.log.format, config.log.level)
        context = serve.get_replica_context()
        self._replica_id = context.replica_id.unique_id
        self._desk, self._changes = DeskLine(desk, "desk"), DeskLine(desk, "changes")
        number: int = await self._desk.number(model, context.rank.rank)
        spec = await asyncio.to_thread(
            parts.engine, model, number, replicas.num_cpus, replicas.num_gpus
        )
        self._replica = EngineReplica(
            spec,
            replica_id=self._replica_id,
            restart=config.restart,
            limits=config.limits,
            max_messages_per_s=max_messages_per_s,
        )
        await self._replica.start()
        await self._tell_once()
        self._telling = asyncio.create_task(self._tell())

    async def stream(self, request: bytes, age_s: float, job: Job) -> AsyncGenerator[bytes, None]:
        """EngineReplica.stream. job: for the router, which has chosen by it."""
        async with contextlib.aclosing(self._replica.stream(request, age_s)) as stream:
            async for message in stream:
                yield message

    async def control(self, name: str, payload: Any, replica: str) -> Any:
        """EngineReplica.control. replica: for the router."""
        return await self._replica.control(name, payload, timeout_s=8.0)

    async def pid(self, replica: str) -> int:
        """The replica's process, for those who test what happens when it dies."""
        return os.getpid()

    def record_routing_stats(self) -> dict[str, Any]:
        """What the router reads; see TaskRouter."""
        replica = self._replica
        return {
            "costs": replica.costs.costs(replica.info.max_num_seqs),
            "recent": replica.costs.recent,
            "habits": replica.costs.habits(),
            "is_stuck": not replica.serves,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaler reads; see scaling.WorkPolicy."""
        return {name: float(value) for name, value in asdict(self._replica.work).items()}

    def check_health(self) -> None:
        """Raises when the replica is to be replaced."""
        self._replica.check()

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_TELL_S)
            await self._replica.look()
            try:
                await self._tell_once()
            except Exception as error:
                log.warning("the desk was not told: %s", type(error).__name__)

    async def _tell_once(self) -> None:
        replica = self._replica
        await self._desk.tell(
            Standing(
                replica.spec.name,
                replica.spec.model,
                self._replica_id,
                ray.get_runtime_context().get_node_id(),
                replica.info,
                replica.figures,
            )
        )
        await replica.know(await self._changes.orders(replica.spec.model))

    async def __del__(self) -> None:
        if hasattr(self, "_telling"):
            self._telling.cancel()
            await self._replica.stop(0.0)  # Serve has waited for what was open


class IngressDeployment:
    """ingress.IngressApp on a port of its own: the HTTP application, its engines the fleet's."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        parts: FleetParts,
        cluster: ClusterConfig,
        desk: DeploymentHandle,
        engines: Mapping[str, DeploymentHandle],
    ) -> None:
        place, rank = parts.server.listen, serve.get_replica_context().rank.rank
        self._desk = DeskLine(desk, "desk")
        self._drain_s = (cluster.drain_s, parts.server.limits.drain_s)
        ports, requests_only = [place.port], None
        if cluster.ingress.own_ports is not None:
            ports.append(cluster.ingress.own_ports + rank)
            requests_only = ports[-1] if rank > 0 else None
        self._ingress = await _ingress(parts, cluster, desk, engines, requests_only)
        await self._ingress.start(_READY_S)
        # Only now: from here on the kernel gives it connections of the port that all share.
        listeners = [listen(place.host, port, is_shared=True) for port in ports]
        self._serving = asyncio.create_task(self._ingress.run(*listeners))

    def check_health(self) -> None:
        """Raises when it no longer listens."""
        if self._serving.done():
            raise RuntimeError("the ingress has ended")

    async def __del__(self) -> None:
        if hasattr(self, "_serving"):
            ends = await self._fleet_ends()
            self._ingress.stop(self._drain_s[ends], is_replaced=not ends)
            await self._serving

    async def _fleet_ends(self) -> bool:
        """Whether no other one takes the place of this ingress."""
        try:
            async with asyncio.timeout(_ASK_S):
                is_ending: bool = await self._desk.is_ending()
                return is_ending
        except Exception:  # the desk has gone already
            return True


@serve.ingress()
class ProxiedIngressDeployment:
    """ingress.IngressApp behind Serve's HTTP proxies."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        parts: FleetParts,
        cluster: ClusterConfig,
        desk: DeploymentHandle,
        engines: Mapping[str, DeploymentHandle],
    ) -> None:
        self._ingress = await _ingress(parts, cluster, desk, engines)

    def __serve_build_asgi_app__(self) -> Any:
        return self._ingress


async def _ingress(
    parts: FleetParts,
    cluster: ClusterConfig,
    desk: DeploymentHandle,
    engines: Mapping[str, DeploymentHandle],
    requests_only_port: int | None = None,
) -> IngressApp:
    """engines: the handles of the engine deployments, by model."""
    logs.configure(parts.server.log.format, parts.server.log.level)
    others = OtherIngresses(
        serve.get_replica_context().replica_id.unique_id,
        cluster.ingress.replicas,
        DeskLine(desk, "budgets").take,
        cast("ChangeDesk", DeskLine(desk, "changes")),
    )
    front: Front = await asyncio.to_thread(parts.front)
    loop = asyncio.get_running_loop()
    # On the loop, because their routers run on it: a request changes threads as seldom as it can.
    replicas = {model: ServeReplicas(model, handle, desk) for model, handle in engines.items()}

    def start(model: str, on_state: Any) -> FleetHandle:
        return FleetHandle(
            replicas[model],
            name=f"{model}/fleet",
            loop=loop,
            max_runs=cluster.routing.max_runs,
            on_state=on_state,
        )

    return IngressApp(parts.server, front, start, others, requests_only_port)


def application(cluster: ClusterConfig, parts: FleetParts) -> Application:
    """The fleet, to be deployed under any name and route."""
    desk = serve.deployment(
        DeskDeployment,
        name="desk",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10_000,
        logging_config=_QUIET,
    )
    desk = _versioned(desk, cluster.ingress.replicas, cluster.learning).bind(
        cluster.ingress.replicas, _builders(cluster, parts)
    )
    engines = {
        model.name: _engines(cluster, parts, model.name, desk) for model in parts.server.models
    }
    direct = cluster.ingress.http == "direct"
    ingress = serve.deployment(
        IngressDeployment if direct else ProxiedIngressDeployment,
        name="ingress",
        num_replicas=cluster.ingress.replicas,
        ray_actor_options={
            "num_cpus": cluster.ingress.num_cpus,
            "runtime_env": {"env_vars": _ONE_LOOP},
        },
        max_ongoing_requests=100_000,
        logging_config=_QUIET,
        graceful_shutdown_timeout_s=_drain_s(cluster, parts),
        health_check_period_s=2.0,
        max_surge_percent=cluster.ingress.surge_percent,
    )
    ingress = _versioned(ingress, parts.ingress_version(), cluster.ingress, cluster.routing)
    return ingress.bind(parts, cluster, desk, engines)


def _drain_s(cluster: ClusterConfig, parts: FleetParts) -> float:
    """How long a replica that ends may take; where ingresses end, engines have nothing open."""
    return max(cluster.drain_s, parts.server.limits.drain_s) + 5.0


def _versioned(deployment: Any, *told: object) -> Any:
    """A deployment whose replicas are replaced when something of `told` is another one, and not
    each time. Serve keeps this option for itself, hence `_internal`; Ray's version is pinned."""
    return deployment.options(version=version_of(*told), _internal=True)


def _builders(cluster: ClusterConfig, parts: FleetParts) -> Application | None:
    """Those that merge what replicas learn."""
    if cluster.learning is None or parts.sharing is None:
        return None
    builder = serve.deployment(
        BuilderDeployment,
        name="builder",
        num_replicas=cluster.learning.builders,
        ray_actor_options={"num_cpus": 0},
    )
    return _versioned(builder, cluster.learning).bind(parts.sharing, cluster.learning.builders)


def _engines(
    cluster: ClusterConfig, parts: FleetParts, model: str, desk: Application
) -> Application:
    """The engine replicas of one model."""
    replicas, routing = cluster.replicas_of(model), cluster.routing
    scales = replicas.most != replicas.min
    options: dict[str, Any] = {}
    if routing.policy == "tasks":
        options["request_router_config"] = RequestRouterConfig(
            request_router_class=_ROUTER,
            request_router_kwargs={
                "num_routers": cluster.ingress.replicas,
                "target_load": routing.target_load,
                "cold_cost": routing.cold_cost,
            },
            request_routing_stats_period_s=1.0,
        )
    if scales:
        options["autoscaling_config"] = _scaling(replicas)
    else:
        options["num_replicas"] = replicas.min
    engine = serve.deployment(
        EngineDeployment,
        name="engine-" + re.sub(r"[^A-Za-z0-9._-]", "-", model),
        ray_actor_options={
            "num_cpus": replicas.num_cpus,
            "num_gpus": replicas.num_gpus,
            "runtime_env": {"env_vars": _ONE_LOOP},
        },
        max_ongoing_requests=replicas.max_ongoing_requests,
        logging_config=_QUIET,
        graceful_shutdown_timeout_s=_drain_s(cluster, parts),
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=replicas.health_check_s,
        max_surge_percent=replicas.surge_percent,
        **options,
    )
    # Replicas that began without an autoscaler tell it nothing.
    told = (parts.engine_version(model), replicas.num_cpus, replicas.num_gpus, scales)
    return _versioned(engine, *told, routing.max_messages_per_s).bind(
        parts, model, replicas, routing.max_messages_per_s, desk
    )


def _scaling(replicas: ReplicasConfig) -> AutoscalingConfig:
    """Serve's autoscaler, with scaling.WorkPolicy."""
    scaling = replicas.scaling
    numbers = {
        "least": replicas.min,
        "most": replicas.most,
        "first_token_s": scaling.first_token_s,
        "spare": scaling.spare,
        "seat_load": scaling.seat_load,
    }
    return AutoscalingConfig(
        min_replicas=replicas.min,
        initial_replicas=max(1, replicas.min),  # which tells ingresses of its model
        max_replicas=replicas.most,
        upscale_delay_s=scaling.up_after_s,
        downscale_delay_s=scaling.down_after_s,
        downscale_to_zero_delay_s=scaling.sleep_after_s,
        look_back_period_s=scaling.look_back_s,
        policy=AutoscalingPolicy(policy_function=_SCALING, policy_kwargs=numbers),
    )


def build(args: Mapping[str, str]) -> Application:
    """For `serve run server.fleet.app:build config=cluster.yaml`. Raises ConfigError."""
    cluster, server = load_cluster_config(Path(args["config"]))
    return application(cluster, FleetParts(server, cluster.learning))


def __getattr__(name: str) -> Application:
    """`fleet`, for `serve build`, which takes no arguments: of the file TAILOR_CLUSTER names."""
    if name == "fleet":
        return build({"config": os.environ.get("TAILOR_CLUSTER", "cluster.yaml")})
    raise AttributeError(name)
