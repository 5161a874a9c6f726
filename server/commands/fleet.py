"""`tailor fleet`: many replicas of the engines behind one API, on Ray Serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from server.config.cluster import load_cluster_config
from server.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.config import ServerConfig
    from server.config.cluster import ClusterConfig, LearningConfig
    from server.engine.budget import CostTable
    from server.fleet.parts import ServedParts
    from server.fleet.simulation import Arrival, Outcome

_SYNTHETIC_S = 60.0
_OVERHEAD_S = 0.003


def up(file: Path, /) -> int:
    from server import logs
    from server.fleet.local import up as run
    from server.fleet.parts import ServedParts

    cluster, server = _checked(file)
    logs.configure(server.log.format, server.log.level)
    listen = server.listen

    def on_ready() -> None:
        host = "127.0.0.1" if listen.host in ("0.0.0.0", "::") else listen.host
        print(f"The fleet is ready on http://{host}:{listen.port}.", flush=True)

    def again() -> tuple[ClusterConfig, ServedParts]:
        cluster, server = _checked(file)
        return cluster, ServedParts(server, cluster.learning)

    return run(cluster, ServedParts(server, cluster.learning), on_ready=on_ready, again=again)


def check(file: Path, /) -> int:
    cluster, server = _checked(file)
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
        print(_learning_line(cluster.learning, server))
    return 0


def _learning_line(learning: LearningConfig, server: ServerConfig) -> str:
    """What travels, and where it lies."""
    from server.commands.serve import server_tasks

    tasks = [
        task.name
        for task in server_tasks(server).values()
        if task.speculation.learns and task.speculation.learn == "persist"
    ]
    what = ", ".join(tasks) if tasks else "nothing: no task says learn: persist"
    where = learning.storage or "the cache folder, which all machines must see"
    return f"learned outputs travel of {what}; they lie in {where}"


def simulate(
    file: Path,
    /,
    *,
    log: Annotated[
        Path | None, Parameter(metavar="FILE", help="arrivals: a server's log, in JSON lines")
    ] = None,
    load: Annotated[float, Parameter(help="how many times as fast they come (1)")] = 1.0,
    rate: Annotated[
        float | None, Parameter(help="instead: so many requests a second, at random, for a minute")
    ] = None,
    num_tasks: Annotated[int, Parameter(help="tasks of those (24)")] = 24,
    costs: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="an engine's cost table; default the newest in the cache"),
    ] = None,
    replicas: Annotated[
        int | None, Parameter(help="how many engines (replicas.min of cluster.yaml)")
    ] = None,
    first_token_ms: Annotated[
        float | None,
        Parameter(help="instead: find how many engines give 95 % of first tokens within this time"),
    ] = None,
) -> int:
    from server.fleet.simulation import RoutingNumbers, Simulation, replicas_for

    cluster, server = load_cluster_config(file)
    arrivals = _arrivals(log, load, rate, num_tasks, server.models[0].name)
    table = _cost_table(costs)
    sizes = server.engine.sizes(server.limits, server.models[0].devices[0])
    routing = RoutingNumbers(
        cluster.ingress.replicas, cluster.routing.target_load, cluster.routing.cold_cost
    )

    def play(num: int) -> Outcome:
        return Simulation(
            table.cost,
            num_replicas=num,
            seats=sizes.max_num_seqs,
            max_rows=sizes.max_num_batched_tokens,
            routing=routing,
            overhead_s=_OVERHEAD_S,
        ).run(arrivals)

    num = replicas or max(1, cluster.replicas_of(server.models[0].name).min)
    if first_token_ms is None:
        outcome = play(num)
    else:
        found = replicas_for(arrivals, first_token_ms / 1e3, play)
        if found is None:
            print(f"No number of replicas holds a p95 of {first_token_ms:g} ms.")
            return 1
        num, outcome = found
        print(f"{num} replicas hold a p95 of {first_token_ms:g} ms to the first token.")
    _tell(arrivals, num, outcome)
    return 0


def _tell(arrivals: Sequence[Arrival], num: int, outcome: Outcome) -> None:
    from server.fleet.simulation import percentile

    tasks = len({arrival.task for arrival in arrivals})
    print(
        f"{len(arrivals)} requests of {tasks} tasks in {arrivals[-1].at_s:.0f} s on {num} replicas:"
    )
    for name, values in (("first token", outcome.first_s), ("whole answer", outcome.total_s)):
        told = ", ".join(f"p{p} {percentile(values, p) * 1e3:.0f} ms" for p in (50, 95, 99))
        print(f"  {name}: {told}")
    away = outcome.num_away / len(arrivals)
    print(f"  {away:.1%} of requests ran away from their task's homes")
    print(f"  replicas make steps {outcome.load:.0%} of the time, the busiest one", end=" ")
    print(f"{outcome.imbalance:.2f} times the mean")
    half, most = (percentile(outcome.route_s, p) * 1e6 for p in (50, 95))
    memory = outcome.state_bytes / 1e6
    print(f"  the router: p50 {half:.0f} us and p95 {most:.0f} us a request, {memory:.1f} MB")


def _arrivals(
    log: Path | None, load: float, rate: float | None, num_tasks: int, model: str
) -> Sequence[Arrival]:
    from server.fleet.arrivals import arrivals_of
    from server.fleet.simulation import synthetic

    if (log is None) == (rate is None):
        raise ConfigError("give either --log or --rate")
    if load <= 0 or (rate is not None and rate <= 0) or num_tasks < 1:
        raise ConfigError("--load, --rate and --num-tasks must be above 0")
    if log is None:
        assert rate is not None
        found = list(synthetic(rate * load, _SYNTHETIC_S, num_tasks))
        if not found:
            raise ConfigError("--rate: no request comes within a minute")
        return found
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            return arrivals_of(lines, model, load=load)
    except OSError as error:
        raise ConfigError(f"{log}: {error.strerror}") from None


def _cost_table(file: Path | None) -> CostTable:
    """What an engine measured of its steps and kept. Raises ConfigError."""
    from server.engine.budget import CostTable
    from server.model.cache_folder import cache_dir

    if file is None:
        kept = sorted((cache_dir() / "costs").glob("*.json"), key=lambda path: path.stat().st_mtime)
        if not kept:
            raise ConfigError("no engine has measured its steps here yet: start one, or --costs")
        file = kept[-1]
    try:
        return CostTable.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{file} is no cost table of an engine") from None


def _checked(file: Path) -> tuple[ClusterConfig, ServerConfig]:
    """Both files, and what they name. Raises ConfigError."""
    from server.commands.serve import check_server

    cluster, server = load_cluster_config(file)
    check_server(server)
    return cluster, server
