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
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from server import logs
from server.config.cluster import ClusterConfig, ReplicasConfig, load_cluster_config
from server.fleet.budgets import Budgets, FleetUses
from server.fleet.changes import ChangeLog, SharedTasks
from server.fleet.desk import Desk, FleetState, Standing
from server.fleet.far_engine import ReplicaLostError
from server.fleet.learning.builder import BuilderLoop, Sharing
from server.fleet.parts import FleetParts, version_of
from server.fleet.replica import CONTROL_S, EngineReplica
from server.fleet.routing import Job

log = logging.getLogger("tailor.fleet")

_ONE_LOOP = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""Of ingresses and engine replicas: Serve's own part of a request runs on the loop of ours, because
each change of threads, four a request, delays a first token. Nothing of ours blocks that loop."""
_TELL_S = 1.0
_READY_S = 30.0
_ASK_S = 2.0
_SCALING = "server.fleet.scaling:WorkPolicy"
_ROUTER = "server.fleet.task_router:TaskRouter"


class ServeReplicas:
    """model: its name. engines: the handle of its deployment. desk: of the fleet's desk."""

    def __init__(self, model: str, engines: DeploymentHandle, desk: DeploymentHandle) -> None:
        self._model = model
        # By value: a message is some hundred bytes, and an object in Ray's store costs more.
        self._streams = engines.options(stream=True, _by_reference=False)
        self._calls = engines.options(_by_reference=False)
        self._desk = DeskLine(desk, "desk")

    async def stream(self, request: bytes, age_s: float, job: Job) -> AsyncGenerator[bytes, None]:
        """One run of a Request on the replica that the router chose."""
        try:
            response = self._streams.stream.remote(request, age_s, job)
            async for message in response:
                yield message
        except Exception as error:  # Ray's own, and those of gRPC as they are
            raise ReplicaLostError(f"{type(error).__name__}: {str(error)[:120]}") from None
        except BaseException:  # it was aborted
            response.cancel()
            raise

    async def state(self) -> FleetState:
        """What the desk knows of the replicas now."""
        found: FleetState = await self._desk.state(self._model)
        return found

    async def control(self, name: str, payload: Any) -> list[dict[str, Any]]:
        """The answers of all replicas to one control."""
        there: list[Standing] = await self._desk.standings(self._model)
        return await asyncio.gather(*(self._ask(standing, name, payload) for standing in there))

    async def _ask(self, standing: Standing, name: str, payload: Any) -> dict[str, Any]:
        response = self._calls.control.remote(name, payload, replica=standing.replica_id)
        try:
            async with asyncio.timeout(CONTROL_S):
                answer: dict[str, Any] = await response
                return answer
        except Exception:
            with contextlib.suppress(Exception):
                response.cancel()
            raise ReplicaLostError(f"{standing.name} does not answer") from None


class DeskLine:
    """The methods of a part of the desk (app.DeskDeployment), as coroutines. desk: the handle of
    its deployment. Each may raise whatever Ray does while the desk is away."""

    def __init__(self, desk: DeploymentHandle, part: str) -> None:
        # By value, as a request is: see ServeReplicas.
        self._ask = partial(desk.options(_by_reference=False).ask.remote, part)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._call, method)

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._ask(method, *args)


class DeskDeployment:
    """desk.Desk, budgets.Budgets and changes.ChangeLog; one replica. builders: which are deployed
    with it, and not called."""

    def __init__(self, num_ingresses: int, builders: DeploymentHandle | None = None) -> None:
        del builders
        self._parts = {"desk": Desk(), "budgets": Budgets(num_ingresses), "changes": ChangeLog()}

    async def ask(self, part: str, method: str, *args: Any) -> Any:
        """What a method of a part answers; see DeskLine."""
        answer = getattr(self._parts[part], method)(*args)
        return await answer if inspect.isawaitable(answer) else answer


class BuilderDeployment(BuilderLoop):
    """Of the tasks that are this replica's by its rank."""

    def __init__(self, sharing: Sharing, num_builders: int) -> None:
        rank = serve.get_replica_context().rank.rank
        super().__init__(sharing, (rank % num_builders, num_builders))

    async def __del__(self) -> None:
        if hasattr(self, "_thread"):
            await asyncio.to_thread(self.stop)


class EngineDeployment(EngineReplica):
    """Ready when its engine is; the desk is told of it."""

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
        self._desk, self._changes = DeskLine(desk, "desk"), DeskLine(desk, "changes")
        number: int = await self._desk.number(model, context.rank.rank)
        spec = await asyncio.to_thread(
            parts.engine, model, number, replicas.num_cpus, replicas.num_gpus
        )
        super().__init__(
            spec,
            replica_id=context.replica_id.unique_id,
            restart=config.restart,
            limits=config.limits,
            max_messages_per_s=max_messages_per_s,
        )
        await self.start()
        await self.look()
        await self._tell_once()
        self._telling = asyncio.create_task(self.tell())

    def record_routing_stats(self) -> dict[str, Any]:
        """What the router reads; see TaskRouter."""
        return {
            "costs": self.costs.costs(self.info.max_num_seqs),
            "recent": self.costs.recent,
            "habits": self.costs.habits(),
            "is_stuck": not self.serves,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaler reads; see scaling.WorkPolicy."""
        return self.work

    async def tell(self) -> None:
        """Tell the desk, each second, until cancelled."""
        while True:
            looking = asyncio.create_task(self.look())  # a busy engine's answer takes a second
            await asyncio.sleep(_TELL_S)
            try:
                await looking
                await self._tell_once()
            except Exception as error:
                log.warning("the desk was not told: %r", error)

    async def _tell_once(self) -> None:
        name, model = self.spec.name, self.spec.model
        await self._desk.tell(Standing(name, model, self.replica_id, self.info, self.figures))
        orders = await self._changes.orders(model)
        if orders is not None:
            await self.know(orders)

    async def __del__(self) -> None:
        if hasattr(self, "_telling"):
            self._telling.cancel()
            with contextlib.suppress(Exception):  # the desk has gone already
                async with asyncio.timeout(_ASK_S):
                    await self._desk.leave(self.replica_id)
            await self.stop()  # Serve has waited for what was open


class IngressDeployment:
    """ingress.IngressApp, its engines the fleet's, on a port of its own. engines: the handles of
    their deployments, by model."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        parts: FleetParts,
        cluster: ClusterConfig,
        desk: DeploymentHandle,
        engines: Mapping[str, DeploymentHandle],
    ) -> None:
        from server.api.serving import listen
        from server.fleet.ingress import IngressApp

        logs.configure(parts.server.log.format, parts.server.log.level)
        context = serve.get_replica_context()
        own_id, rank, place = context.replica_id.unique_id, context.rank.rank, parts.server.listen
        self._desk = DeskLine(desk, "desk")
        self._drain_s = (cluster.drain_s, parts.server.limits.drain_s)
        ports, requests_only = [place.port], None
        if cluster.ingress.own_ports is not None:
            ports.append(cluster.ingress.own_ports + rank)
            requests_only = ports[-1] if rank > 0 else None
        take = DeskLine(desk, "budgets").take
        uses = FleetUses(own_id, num_ingresses=cluster.ingress.replicas, take=take)
        plan = await asyncio.to_thread(parts.plan)
        changes: Any = DeskLine(desk, "changes")
        forget = None if parts.sharing is None else parts.sharing.forget
        shared = SharedTasks(plan.task_set, changes, own_id, forget)
        # On the loop, because their routers run on it: a request changes threads as seldom as it
        # can.
        replicas = {model: ServeReplicas(model, handle, desk) for model, handle in engines.items()}
        self._ingress = IngressApp(
            plan, replicas, cluster.routing.max_runs, uses, shared, requests_only
        )
        self._serving: asyncio.Task[None] | None = None
        if cluster.ingress.http == "direct":
            await self._ingress.start(_READY_S)
            # Only now: from here on the kernel gives it connections of the port that all share.
            listeners = [listen(place.host, port, is_shared=True) for port in ports]
            self._serving = asyncio.create_task(self._ingress.run(*listeners))

    def check_health(self) -> None:
        """Raises when it no longer listens."""
        if self._serving is not None and self._serving.done():
            raise RuntimeError("the ingress has ended")

    async def __del__(self) -> None:
        if (serving := getattr(self, "_serving", None)) is not None:
            ends = True  # no other one takes its place
            with contextlib.suppress(Exception):  # the desk has gone already
                async with asyncio.timeout(_ASK_S):
                    ends = await self._desk.is_ending()
            self._ingress.stop(self._drain_s[ends], is_replaced=not ends)
            await serving


@serve.ingress()
class ProxiedIngressDeployment(IngressDeployment):
    """The same behind Serve's HTTP proxies, without a port of its own."""

    def __serve_build_asgi_app__(self) -> Any:
        return self._ingress


def application(cluster: ClusterConfig, parts: FleetParts) -> Application:
    """The fleet, to be deployed under any name and route."""
    ingress, learning = cluster.ingress, cluster.learning
    builders = None
    if learning is not None and parts.sharing is not None:  # those that merge what replicas learn
        builders = _deployment(
            BuilderDeployment,
            "builder",
            learning,
            num_replicas=learning.builders,
            ray_actor_options={"num_cpus": 0},
        ).bind(parts.sharing, learning.builders)
    desk = _deployment(
        DeskDeployment,
        "desk",
        ingress.replicas,
        learning,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10_000,
    ).bind(ingress.replicas, builders)
    # How long a replica that ends may take; where ingresses end, engines have nothing open.
    drain_s = max(cluster.drain_s, parts.server.limits.drain_s) + 5.0
    engines = {
        model.name: _engines(cluster, parts, model.name, desk, drain_s)
        for model in parts.server.models
    }
    return _deployment(
        IngressDeployment if ingress.http == "direct" else ProxiedIngressDeployment,
        "ingress",
        parts.ingress_version(),
        ingress,
        cluster.routing,
        num_replicas=ingress.replicas,
        ray_actor_options={"num_cpus": ingress.num_cpus, "runtime_env": {"env_vars": _ONE_LOOP}},
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=drain_s,
        health_check_period_s=2.0,
        max_surge_percent=ingress.surge_percent,
    ).bind(parts, cluster, desk, engines)


def _deployment(kind: Any, name: str, *told: object, **options: Any) -> Any:
    """A deployment whose replicas are replaced when something of `told` is another one, and not
    each time. Serve keeps this option for itself, hence `_internal`; Ray's version is pinned."""
    deployment: Any = serve.deployment(
        kind,
        name=name,
        # Requests are in the log of the ingress's own application.
        logging_config={"enable_access_log": False},
        # The desk takes longer: ingresses that end ask it whether all of the fleet does.
        graceful_shutdown_wait_loop_s=1.0 if kind is DeskDeployment else 0.2,
        **options,
    )
    return deployment.options(version=version_of(*told), _internal=True)


def _engines(
    cluster: ClusterConfig, parts: FleetParts, model: str, desk: Application, drain_s: float
) -> Application:
    """The engine replicas of one model."""
    replicas, routing = cluster.replicas_of(model), cluster.routing
    scaling, scales = replicas.scaling, replicas.most != replicas.min
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
        config = replicas.model_dump(mode="json")
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=replicas.min,
            initial_replicas=max(1, replicas.min),  # which tells ingresses of its model
            max_replicas=replicas.most,
            upscale_delay_s=scaling.up_after_s,
            downscale_delay_s=scaling.down_after_s,
            downscale_to_zero_delay_s=scaling.sleep_after_s,
            look_back_period_s=scaling.look_back_s,
            policy=AutoscalingPolicy(policy_function=_SCALING, policy_kwargs=config),
        )
    else:
        options["num_replicas"] = replicas.min
    return _deployment(
        EngineDeployment,
        "engine-" + re.sub(r"[^A-Za-z0-9._-]", "-", model),
        parts.engine_version(model),
        replicas.num_cpus,
        replicas.num_gpus,
        scales,  # replicas that began without an autoscaler tell it nothing
        routing.max_messages_per_s,
        ray_actor_options={
            "num_cpus": replicas.num_cpus,
            "num_gpus": replicas.num_gpus,
            "runtime_env": {"env_vars": _ONE_LOOP},
        },
        max_ongoing_requests=replicas.max_ongoing_requests,
        graceful_shutdown_timeout_s=drain_s,
        health_check_period_s=replicas.health_check_s,
        max_surge_percent=replicas.surge_percent,
        **options,
    ).bind(parts, model, replicas, routing.max_messages_per_s, desk)


def build(args: Mapping[str, str]) -> Application:
    """For `serve run server.fleet.app:build config=cluster.yaml`. Raises ConfigError."""
    cluster, server = load_cluster_config(Path(args["config"]))
    return application(cluster, FleetParts(server, cluster.learning))


def __getattr__(name: str) -> Application:
    """`fleet`, for `serve build`, which takes no arguments: of the file TAILOR_CLUSTER names."""
    if name == "fleet":
        return build({"config": os.environ.get("TAILOR_CLUSTER", "cluster.yaml")})
    raise AttributeError(name)
