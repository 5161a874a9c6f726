"""`tailor fleet`: many replicas of the engines behind one API, on Ray Serve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from server.config.cluster import load_cluster_config

if TYPE_CHECKING:
    from server.config.cluster import ClusterConfig
    from server.fleet.parts import FleetParts


ClusterFile = Annotated[Path, Parameter(name="FILE", help="the cluster.yaml")]


def up(file: ClusterFile, /) -> int:
    from server import logs
    from server.fleet.local import up as run

    cluster, parts = _checked(file)
    log, listen = parts.server.log, parts.server.listen
    logs.configure(log.format, log.level)

    def on_ready() -> None:
        print(f"The fleet is ready on {listen.url(listen.port)}.", flush=True)

    return run(cluster, parts, on_ready, lambda: _checked(file))


def check(file: ClusterFile, /) -> int:
    from server.wiring.task_set import server_tasks

    cluster, parts = _checked(file)
    server = parts.server
    for model in server.models:
        replicas = cluster.replicas_of(model.name)
        num = (
            str(replicas.min)
            if replicas.most == replicas.min
            else f"{replicas.min} to {replicas.most}"
        )
        print(
            f"{model.name}: {num} replica{'s' if replicas.most > 1 else ''}, each with "
            f"{replicas.num_cpus:g} cores and {replicas.num_gpus:g} GPUs"
        )
    print(
        f"ingress: {cluster.ingress.replicas} on {server.listen.host}:{server.listen.port}; "
        f"routing by {cluster.routing.policy}; Ray: {cluster.address or 'started here'}"
    )
    if cluster.learning is not None:
        tasks = [
            task.name
            for task in server_tasks(server).values()
            if task.speculation.learns and task.speculation.learn == "persist"
        ]
        what = ", ".join(tasks) if tasks else "nothing: no task says learn: persist"
        where = cluster.learning.storage or "the cache folder, which all machines must see"
        print(f"learned outputs travel of {what}; they lie in {where}")
    return 0


def _checked(file: Path) -> tuple[ClusterConfig, FleetParts]:
    """Both files, and what they name. Raises ConfigError."""
    from server.commands.serve import check_server
    from server.fleet.parts import FleetParts

    cluster, server = load_cluster_config(file)
    check_server(server)
    return cluster, FleetParts(server, cluster.learning)
