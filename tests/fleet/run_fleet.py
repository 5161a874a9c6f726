"""A fleet of fake engines in a process of its own: python -m tests.fleet.run_fleet PORT [OPTIONS].

It says READY and then does what it is told, a line each:

    deploy OPTIONS   runs another fleet on the same Ray, on the same port; READY
    kill [NAME]      ends an engine replica's process as kill -9 does; KILLED and its id
    signal NUMBER    sends a signal to the process of the busiest engine; SIGNALLED and its id
    rewrite          deploys a model that writes other texts; REWRITTEN
    update           deploys other weights; UPDATED and how often that was
    learned TASK     LEARNED and JSON: what each engine has learned of a task
    lose             ends all processes of a node that has engine replicas, not the first; LOST
    behead           ends Ray's head process as kill -9 does; BEHEADED and the process of the
                     one that is started again, when it is
    headless         the same, but nobody starts it again; HEADLESS, and then no more commands
    status           STATUS and the state of each deployment

Anything else, or the end, ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from server.config import ServerConfig
from server.config.cluster import ClusterConfig
from server.fleet.local import (
    APPLICATION,
    QUIET,
    Fleet,
    HeadKeeper,
    head_settings,
    spare_processes,
)
from tests.fleet.ray_parts import FakeParts
from tests.waiting import wait_until

KEYS = (
    {"id": "all", "key": "sk-all", "admin": True},
    {"id": "few", "key": "sk-few", "requests_per_minute": 20},
)
LIMITS = {"max_queued_requests": 4096}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--least", type=int, help="fewest of --replicas, by what waits")
    parser.add_argument("--ingresses", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=0, help="Ray nodes; 0: Ray embedded")
    parser.add_argument("--eager", action="store_true", help="scale in seconds")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--row-s", type=float, default=0.0)
    parser.add_argument("--policy", default="tasks")
    parser.add_argument("--processes", action="store_true", help="of engines, one each")
    parser.add_argument("--drafts", action="store_true", help="the engines draft and learn")
    parser.add_argument("--single", action="store_true", help="one server, no fleet, for a measure")
    parser.add_argument("--own-ports", type=int)
    parser.add_argument("--more-tasks", type=Path)
    parser.add_argument("--shared", help="folder by which the engines learn from each other")
    parser.add_argument("--drain-s", type=float, default=30.0, help="server.yaml's")
    parser.add_argument("--keys", action="store_true", help="those of KEYS are needed")
    return parser


def _fleet_of(
    options: argparse.Namespace, address: str | None = None
) -> tuple[ClusterConfig, FakeParts]:
    server = ServerConfig.model_validate(
        {
            "listen": {"port": options.port},
            "models": ({"name": "tiny", "path": "tiny"},),
            "keys": KEYS if options.keys else (),
            "limits": {**LIMITS, "drain_s": options.drain_s},
        }
    )
    engines: dict[str, Any] = {"min": options.replicas}
    if options.eager:
        _be_eager()
    if options.least is not None:  # by what waits, in a hurry
        hurry = {"up_after_s": 0.5, "down_after_s": 1.0, "sleep_after_s": 1.0, "look_back_s": 11.0}
        scaling = {"first_token_s": 0.2, **hurry}
        engines = {"min": options.least, "max": options.replicas, "scaling": scaling}
    cluster = ClusterConfig.model_validate(
        {
            "server": "server.yaml",
            "address": address,
            "ingress": {
                "replicas": options.ingresses,
                "num_cpus": 2,  # see _nodes: it fits on the first node alone
                "http": "direct",
                "own_ports": options.own_ports,
            },
            "replicas": {**engines, "num_cpus": 0.1, "health_check_s": 1.0},
            "routing": {"policy": options.policy},
            "learning": None if options.shared is None else {},
        }
    )
    parts = FakeParts(
        server,
        step_s=options.step_s,
        drafts=options.drafts,
        more_tasks=options.more_tasks,
        shared=options.shared,
        row_s=options.row_s,
        processes=options.processes,
    )
    return cluster, parts


def _be_eager() -> None:
    """Serve's autoscaler is told each second what waits, and looks back on two: those that the
    fleet asks for are more than ten, as Serve is told each ten seconds."""
    from ray.serve.config import AutoscalingConfig

    from server.fleet import app

    def eager(**asked: Any) -> Any:
        own = {"metrics_interval_s": 1.0, "look_back_period_s": 2.0}
        return AutoscalingConfig(**{**asked, **own})

    app.AutoscalingConfig = eager  # type: ignore[attr-defined]


def main() -> None:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    logging.basicConfig(level=logging.INFO)  # what happens while it starts is told beside
    options = _parser().parse_args()
    if options.single:
        _single(_fleet_of(options)[1])
        return
    with _nodes(options.nodes) as nodes:
        address = None if nodes is None else nodes.cluster.address
        cluster, parts = _fleet_of(options, address)
        with Fleet(cluster, parts) as fleet:
            keeper = fleet.keeper if nodes is None else nodes.keeper
            _say("READY")
            for line in sys.stdin:
                command, _, rest = line.strip().partition(" ")
                if command in ("deploy", "become"):
                    asked = _parser().parse_args([str(options.port), *shlex.split(rest)])
                    cluster, parts = _fleet_of(asked, address)
                    if command == "deploy":
                        _take_away()
                    fleet.update(cluster, parts)
                    _say("READY" if command == "deploy" else "BECAME")
                elif command == "update":
                    parts = replace(parts, weights=parts.weights + 1)
                    fleet.update(cluster, parts)
                    _say(f"UPDATED {parts.weights}")
                elif command == "rewrite":
                    parts = replace(parts, text=parts.text + 1)
                    fleet.update(cluster, parts)
                    _say("REWRITTEN")
                elif command == "behead":
                    _say(f"BEHEADED {_behead(keeper)}")
                elif not _obey(command, rest, nodes):
                    break
    _say("ENDED")


def _take_away() -> None:
    """End the fleet that runs, before another one takes its port."""
    from ray import serve

    serve.delete(APPLICATION)


@dataclass(frozen=True)
class Nodes:
    """A ray.cluster_utils.Cluster, and who starts its head again."""

    cluster: Any
    keeper: HeadKeeper


@contextlib.contextmanager
def _nodes(num: int) -> Iterator[Nodes | None]:
    """A Ray cluster of so many nodes on this machine; None of 0. An ingress fits on the first, and
    an engine beside two ingresses that come and two that still answer what is open."""
    if not num:
        yield None
        return
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # for Ray: nodes are at 127.0.0.1
    from ray.cluster_utils import Cluster

    spare_processes()
    common: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False}
    with tempfile.TemporaryDirectory() as folder:
        first = {"num_cpus": 9, "_system_config": head_settings(folder), **common}
        cluster = Cluster(initialize_head=True, head_node_args=first)
        keeper = HeadKeeper(cluster.head_node)
        try:
            for _ in range(num - 1):
                cluster.add_node(num_cpus=1, **common)
            yield Nodes(cluster, keeper)
        finally:
            keeper.let_go()
            cluster.shutdown()
            keeper.stop()


def _behead(keeper: HeadKeeper | None) -> int:
    """End Ray's head process, and wait until there is another one."""
    assert keeper is not None
    before = _heads(keeper)
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: _heads(keeper) not in ([], before), 120, pause_s=0.05)
    return _heads(keeper)[0]


def _heads(keeper: HeadKeeper) -> list[int]:
    """The head process; none between two of them."""
    return [head.process.pid for head in keeper.node.all_processes.get("gcs_server", ())]


def _obey(command: str, rest: str, nodes: Any) -> bool:
    """Do what a line says. False where it says that this is the end."""
    if command == "kill":
        pid = _process_of_one(rest)
        os.kill(pid, signal.SIGKILL)
        _say(f"KILLED {pid}")
    elif command == "signal":
        engine = next(
            child for child in psutil.Process(_process_of_one("")).children()
            if "process_main" in " ".join(child.cmdline())
        )  # fmt: skip
        engine.send_signal(int(rest))
        _say(f"SIGNALLED {engine.pid}")
    elif command == "lose":
        _say(f"LOST {_lose_one(nodes)}")
    elif command == "headless":
        nodes.keeper.stop()
        nodes.cluster.head_node.kill_gcs_server(check_alive=False)
        _say("HEADLESS")
        sys.stdin.readline()
        os._exit(0)  # without its head, Ray has nothing that it could end by
    elif command == "learned":
        _say(f"LEARNED {json.dumps(_learned(rest))}")
    elif command == "status":
        from ray import serve

        deployments: Any = serve.status().applications[APPLICATION].deployments
        _say(f"STATUS { {name: one.status.value for name, one in deployments.items()} }")
    else:
        return False
    return True


def _single(parts: FakeParts) -> None:
    """One server with the fleet's engine, on a port that READY tells, until its input ends."""
    with parts.single(ServerConfig.model_validate({"limits": LIMITS})) as live:
        _say(f"READY {live.port}")
        sys.stdin.read()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _standings() -> list[Any]:
    from ray import serve

    desk = serve.get_deployment_handle("desk", APPLICATION)
    standings: list[Any] = desk.ask.remote("desk", "standings", "tiny").result()
    return standings


def _actor(standing: Any) -> dict[str, Any]:
    """What Ray knows of a replica."""
    from ray._private.state import actors

    named = {one["Name"].rpartition("#")[2]: one for one in actors().values()}
    found: dict[str, Any] = named[standing.replica_id]
    return found


def _figure(standing: Any, name: str) -> Any:
    names = [figure.name for figure in standing.info.figures]
    return standing.figures[names.index(name)] if standing.figures else 0


def _process_of_one(name: str) -> int:
    """The process of the engine replica with this name, or of the one with most requests."""
    busiest = max(_standings(), key=lambda s: (s.name == name, _figure(s, "num_requests_running")))
    return int(_actor(busiest)["Pid"])


def _lose_one(nodes: Any) -> str:
    """The node, not the first, with the most engine replicas; how many those were."""
    homes = [_actor(standing)["Address"]["NodeID"] for standing in _standings()]
    node = max(nodes.cluster.worker_nodes, key=lambda node: homes.count(node.node_id))
    nodes.cluster.remove_node(node, allow_graceful=False)
    return str(homes.count(node.node_id))


def _learned(task: str) -> dict[str, tuple[int, int]]:
    """(tokens that it holds, outputs that it has learned itself), by engine."""
    from ray import serve

    engines = serve.get_deployment_handle("engine-tiny", APPLICATION)
    payload: dict[str, Any] = {"task": task, "drafter": "auto", "options": [], "corpus": None}
    told = {}
    for standing in _standings():
        call = engines.control.remote("task_report", payload, replica=standing.replica_id)
        try:
            value = call.result(timeout_s=5.0)["value"]
        except Exception:  # it is gone
            continue
        told[standing.name] = (value["num_learned_tokens"], value["num_learned_outputs"])
    return told


if __name__ == "__main__":
    main()
