"""TaskRouter: routing.TaskRouting as a request router of Ray Serve.

Serve makes one in each process that has a handle, and runs it in that process. The Job is the
third argument of a call; a call with `replica` goes to that replica and to no other. Replicas tell
their costs, their tasks' habits and whether they hang by record_routing_stats.
"""

from __future__ import annotations

import time
from collections import ChainMap
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from server.fleet.routing import Job, Pace, ReplicaView, TaskRouting

_STALE_S = 0.5  # how old the views may be before they are read again


class TaskRouter(RequestRouter):
    """See the top of this file. Its keyword arguments are TaskRouting's numbers."""

    def initialize_state(self, **numbers: Any) -> None:
        """Takes RequestRouterConfig.request_router_kwargs."""
        self._routing = TaskRouting(**numbers)
        self.by_id: dict[str, RunningReplica] = {}
        self._told: dict[str, dict[str, Any]] = {}  # by each, last
        self._pace = Pace()
        self._read_s = 0.0

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve tells which replicas there are."""
        super().update_replicas(replicas)
        self.by_id = {replica.replica_id.unique_id: replica for replica in replicas}
        self._routing.set_replicas(self.by_id)
        self._told = {name: told for name, told in self._told.items() if name in self.by_id}
        self._read_s = 0.0

    def _view(self, name: str) -> ReplicaView | None:
        """A replica as it is now; None for one that is gone."""
        if name not in self.by_id:
            return None
        queued = self._replica_queue_len_cache.get(self.by_id[name].replica_id)
        told = self._told.get(name, {})
        is_out = told.get("is_stuck", False) or self._pace.is_out(name)
        return ReplicaView(queued or 0, told.get("costs"), is_out)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replicas to try, one by one."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        wanted = pending_request.kwargs.get("replica")
        if wanted is not None:
            return [[self.by_id[wanted]]] if wanted in self.by_id else []
        job = _job_of(pending_request)
        if job is None:
            return [candidate_replicas]
        self._read(candidate_replicas)
        return [[self.by_id[name]] for name in self._routing.choose(job, self._view)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """A replica took a call."""
        job = _job_of(pending_request)
        if job is not None:
            name = replica_id.unique_id
            self._routing.routed(job, name, self._told.get(name, {}).get("costs"))
            self._pace.routed(name)

    def _read(self, replicas: list[RunningReplica]) -> None:
        """Read the replicas' last reports, not for every request but once in a while."""
        now_s = time.monotonic()
        if now_s - self._read_s < _STALE_S:
            return
        self._read_s = now_s
        self._told |= {r.replica_id.unique_id: r.routing_stats for r in replicas if r.routing_stats}
        self._routing.habits = dict(ChainMap(*(told["habits"] for told in self._told.values())))
        recent, costs = (
            {name: told[key] for name, told in self._told.items() if told[key] is not None}
            for key in ("recent", "costs")
        )
        self._pace.read(recent, costs)


def _job_of(request: PendingRequest) -> Job | None:
    """The third argument of EngineDeployment.stream; None for other calls."""
    args = request.args
    return args[2] if len(args) == 3 and isinstance(args[2], Job) else None
