"""A fleet of fake engines in a process of its own: python -m tests.fleet.run_fleet PORT [OPTIONS].

It says READY and then does what it is told, a line each: `kill` ends an engine replica's process as
kill -9 does, `kill NAME` that of this engine, `update` deploys other weights, `learned
TASK` says what each engine has learned of a task, `status` the state of each deployment; anything
else, or the end, ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from server.config import ListenConfig, ServerConfig
from server.fleet.local import APPLICATION, Fleet
from tests.api.live import LiveServer
from tests.api.real_engine import CONTEXT, spec
from tests.fleet.ray_parts import FakeParts, fake_cluster, fake_server

KEYS = (
    {"id": "all", "key": "sk-all", "admin": True},
    {"id": "few", "key": "sk-few", "requests_per_minute": 20},
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--least", type=int, help="fewest of --replicas, by what waits")
    parser.add_argument("--ingresses", type=int, default=1)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--http", default="direct")
    parser.add_argument("--policy", default="tasks")
    parser.add_argument("--drafts", action="store_true", help="the engines draft")
    parser.add_argument("--single", action="store_true", help="one server, no fleet, for a measure")
    parser.add_argument("--own-ports", type=int)
    parser.add_argument("--more-tasks", type=Path)
    parser.add_argument("--shared", help="folder by which the engines learn from each other")
    parser.add_argument("--keys", action="store_true", help="those of KEYS are needed")
    options = parser.parse_args()
    server: ServerConfig = fake_server(keys=KEYS if options.keys else ()).model_copy(
        update={"listen": ListenConfig(port=options.port)}
    )
    cluster = fake_cluster(
        options.replicas,
        options.ingresses,
        http=options.http,
        policy=options.policy,
        own_ports=options.own_ports,
        learns=options.shared is not None,
        least=options.least,
    )
    parts = FakeParts(server, options.step_s, options.drafts, options.more_tasks)
    parts = replace(parts, shared=options.shared)
    if options.single:
        _single(parts)
        return
    with Fleet(cluster, parts) as fleet:
        _say("READY")
        for line in sys.stdin:
            if line.startswith("kill"):
                _say(f"KILLED {_kill_one(line[4:].strip())}")
            elif line.strip() == "update":
                parts = replace(parts, weights=parts.weights + 1)
                fleet.update(cluster, parts)
                _say(f"UPDATED {parts.weights}")
            elif line.startswith("learned"):
                _say(f"LEARNED {json.dumps(_learned(line[7:].strip()))}")
            elif line.strip() == "status":
                _say(f"STATUS {fleet.status()}")
            else:
                break
    _say("ENDED")


def _single(parts: FakeParts) -> None:
    """One server with the fleet's engine, on a port that READY tells, until its input ends."""
    front = parts.front()
    engine = spec(step_s=parts.step_s, drafts=parts.drafts)
    with LiveServer(
        [engine], max_model_len=CONTEXT, tasks=front.tasks, drafters=front.drafters
    ) as live:
        _say(f"READY {live.port}")
        sys.stdin.read()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _kill_one(name: str) -> int:
    """The process of the engine replica with this name, or of one that has a request, or of any."""
    from ray import serve

    desk = serve.get_deployment_handle("desk", APPLICATION)
    standings = desk.standings.remote("tiny").result()
    busiest = max(standings, key=lambda s: (s.name == name, s.stats.num_running))
    engines = serve.get_deployment_handle("engine-tiny", APPLICATION)
    pid: int = engines.pid.remote(replica=busiest.replica_id).result()
    os.kill(pid, signal.SIGKILL)
    return pid


def _learned(task: str) -> dict[str, tuple[int, int]]:
    """(tokens that it holds, outputs that it has learned itself), by engine."""
    from ray import serve

    desk = serve.get_deployment_handle("desk", APPLICATION)
    engines = serve.get_deployment_handle("engine-tiny", APPLICATION)
    payload = {"task": task, "drafter": "auto", "options": [], "corpus": None}
    told = {}
    for standing in desk.standings.remote("tiny").result():
        call = engines.control.remote("task_report", payload, replica=standing.replica_id)
        try:
            value = call.result(timeout_s=5.0)["value"]
        except Exception:  # it is gone
            continue
        told[standing.name] = (value["num_learned_tokens"], value["num_learned_outputs"])
    return told


if __name__ == "__main__":
    main()
