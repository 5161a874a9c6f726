"""`tailor fleet up`: a fleet on a Ray cluster, or on a Ray that is started here and ended with it.

status = up(cluster, parts, on_ready, again)     # until SIGTERM or SIGINT
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server.config.cluster import ClusterConfig
from server.errors import ConfigError
from server.fleet.parts import FleetParts

log = logging.getLogger("tailor.fleet")

APPLICATION = "tailor"
RECONNECT_S = 600
"""How long Ray's processes wait for a head that is gone before they end; Ray's own is 60."""
_CPUS = 1e6  # logical, and bind nothing: a SIGHUP may ask for more replicas than at the start
_LOOK_S = 0.2
_TELL_S = 1.0
_MAX_PAUSE_S = 10.0
QUIET = {
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Ray would start a process a core ahead, without what ours are started with: nobody's.
    "RAY_prestart_worker_first_driver": "0",
}
_ALONE = {
    # As on a laptop with Windows or OSX, Ray takes 127.0.0.1 for its node's address, and then its
    # own processes listen there. Without it `_node_ip_address` is looked up as the machine's.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Serve's replicas listen on all addresses, for which Ray has no setting. They, and all else of
    # Ray, take calls with the token of this run alone.
    "RAY_AUTH_MODE": "token",
}
_OPEN = (
    "Ray at {} asks for no token: whoever reaches its ports can run code there. Start it with "
    "RAY_AUTH_MODE=token on every node and here"
)


class Fleet:
    """A fleet that runs; a context manager, which ends what it has started.

        with Fleet(cluster, parts) as fleet:
            ...  # http://host:port of server.yaml's listen

    Ray is embedded in this process where the cluster has no address: it listens on 127.0.0.1, or
    takes calls with a token of this run alone, its dashboard is off, what it writes goes with it,
    and its head process is started again where it dies (HeadKeeper). On a cluster of others only
    the application is taken away at the end.
    Raises ConfigError when Ray is not installed, cannot be reached, or the fleet does not start.
    """

    def __init__(self, cluster: ClusterConfig, parts: FleetParts) -> None:
        self._cluster = cluster
        self._parts = parts
        self.keeper: HeadKeeper | None = None
        """Who looks after Ray's head process; None on a cluster of others."""
        self._folder: Path | None = None
        self._id = uuid.uuid4().hex

    def __enter__(self) -> Fleet:
        try:
            self._connect()
            self._deploy()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        try:
            if ray.is_initialized():
                self._end()
        finally:
            if self.keeper is not None:
                self.keeper.stop()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        import ray
        from ray import serve

        is_mine = True  # nobody else has deployed it since
        with contextlib.suppress(Exception):  # it has not started, or its head is away
            is_mine = self.keeper is not None or _ask_desk("owner") in ("", self._id)
            if is_mine:  # ingresses are not replaced: they wait for server.yaml's drain_s alone
                _ask_desk("end")
        try:
            if self.keeper is not None:
                serve.shutdown()
            elif is_mine:
                serve.delete(APPLICATION)
        finally:  # also where a second signal comes, or Serve has not started
            if self.keeper is not None:
                self.keeper.let_go()
            ray.shutdown()

    def update(self, cluster: ClusterConfig, parts: FleetParts) -> None:
        """Deploy anew: what has changed is replaced, new replicas first, while requests go on.
        Returns when that is done. Raises ConfigError; then the old fleet goes on.
        """
        self._cluster, self._parts = cluster, parts
        self._deploy()

    def _connect(self) -> None:
        cluster = self._cluster
        alone = {"RAY_AUTH_TOKEN": secrets.token_hex(32), **_ALONE}
        for name, value in {**QUIET, **(alone if cluster.address is None else {})}.items():
            os.environ.setdefault(name, value)
        try:
            import ray.serve
        except ImportError:
            raise ConfigError(
                "a fleet needs Ray Serve, which is not installed: "
                "pip install 'ray[serve]>=2.60,<2.61' fsspec"
            ) from None
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
        if cluster.address is None:
            log.info("preparing what is made once on this machine: models, machine code")
            self._parts.prepare()
            spare_processes()
        try:
            if cluster.address is not None:
                log.info(f"looking for Ray at {cluster.address}")
                ray.init(address=cluster.address, **common)
                if os.environ.get("RAY_AUTH_MODE") != "token":  # as Ray sets it, too
                    log.warning(_OPEN.format(cluster.address))
                return
            log.info("starting Ray")
            self._folder = Path(tempfile.mkdtemp(prefix="tailor-ray-"))
            memory = cluster.embedded.object_store_memory.num_bytes
            ray.init(
                address="local",
                num_cpus=cluster.embedded.num_cpus or _CPUS,
                object_store_memory=memory,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                _system_config=head_settings(str(self._folder)),
                _temp_dir=str(self._folder),
                **common,
            )
            self.keeper = HeadKeeper(ray._private.worker.global_worker.node)
        except Exception as error:  # Ray's are of any kind: a node that starts late, a plain one
            raise ConfigError(f"Ray could not be reached or started: {error}") from None

    def _deploy(self) -> None:
        from ray import serve

        from server.fleet.app import application

        listen = self._parts.server.listen
        direct = self._cluster.ingress.http == "direct"
        if direct:
            serve.start(proxy_location="Disabled")
        else:
            http = {"host": listen.host, "port": listen.port, "keep_alive_timeout_s": 30}
            serve.start(proxy_location="EveryNode", http_options=http)
        log.info("starting replicas: each reads its model, and measures it the first time")
        fleet = application(self._cluster, self._parts)
        try:
            serve.run_many(
                [serve.RunTarget(fleet, APPLICATION, route_prefix=None if direct else "/")],
                wait_for_applications_running=False,
            )
            self._wait()
            _ask_desk("own", self._id, timeout_s=30.0)
        except Exception as error:
            raise ConfigError(f"the fleet did not start: {error}") from None

    def _wait(self) -> None:
        """Until all of it runs; meanwhile, tell how many replicas each deployment has, and what
        Serve says of it. Raises RuntimeError."""
        from ray import serve

        told: dict[str, str] = {}
        began_s = time.monotonic()
        while True:
            time.sleep(_TELL_S)
            found: Any = serve.status().applications[APPLICATION]
            for name, one in found.deployments.items():
                words = [f"{num} {str.lower(state)}" for state, num in one.replica_states.items()]
                words = words or ["no replica yet"]
                if one.status == "UNHEALTHY" or "fail" in one.message:
                    words.append(" ".join(one.message.split())[:300])
                line = ", ".join(words)
                if told.get(name) != line:
                    told[name] = line
                    log.info(f"{name}: {line}, after {time.monotonic() - began_s:.0f} s")
            if found.status == "RUNNING":
                return
            if found.status == "DEPLOY_FAILED":
                raise RuntimeError(found.message)


def _ask_desk(*call: str, timeout_s: float = 5.0) -> Any:
    """What a method of desk.Desk answers. Raises whatever Ray does while it is away."""
    from ray import serve

    desk = serve.get_deployment_handle("desk", APPLICATION)
    return desk.ask.remote("desk", *call).result(timeout_s=timeout_s)


def head_settings(folder: str) -> dict[str, Any]:
    """Ray's `_system_config` for a head that keeps its state in a folder of its own."""
    return {
        "gcs_storage": "rocksdb",
        "gcs_storage_path": folder,
        "gcs_rpc_server_reconnect_timeout_s": RECONNECT_S,
    }


class HeadKeeper:
    """Ray's head process (the GCS) is started again where it dies, and knows what it knew.

    Ray ends all its processes some time after its head is lost. Its state lies in a folder here
    (Ray's RocksDB store), so a new head process knows every node, actor and replica; they find it
    at the same port, and what they are doing goes on meanwhile. This is for a Ray that this process
    has started; elsewhere whoever starts the head does the same (docs/fleet.md).

    node: Ray's head node (ray._private.node.Node), which this process has started.

    Call `stop` when Ray has ended: the head that was started again ends with the thread that
    started it.
    """

    def __init__(self, node: Any) -> None:
        self.node = node
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="head-keeper", daemon=True)
        self._thread.start()

    def let_go(self) -> None:
        """Start it no more; Ray is about to end."""
        self._ended.set()

    def stop(self) -> None:
        """Return when the thread has ended."""
        self._ended.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        pause_s = _LOOK_S
        while not self._ended.wait(pause_s):
            found = self.node.all_processes.get("gcs_server")
            if found and found[0].process.poll() is None:
                pause_s = _LOOK_S
                continue
            log.error("Ray's head process has died; it is started again")
            try:
                self.node.kill_gcs_server(check_alive=False)
                self.node.start_gcs_server()
            except Exception as error:  # whatever Ray raises: try again, requests go on
                log.error("Ray's head process did not start: %s", error)
                pause_s = min(_MAX_PAUSE_S, 2.0 * pause_s)


def up(
    cluster: ClusterConfig,
    parts: FleetParts,
    on_ready: Callable[[], None],
    again: Callable[[], tuple[ClusterConfig, FleetParts]],
) -> int:
    """Run a fleet until SIGTERM or SIGINT. Returns the exit status.

    again: reads the files anew; called on SIGHUP, and the fleet becomes what it says. May raise
    ConfigError: then it stays as it is.
    """
    stop, hup = threading.Event(), threading.Event()
    _catch(sys.exit, hup)  # a model may be made for minutes
    with Fleet(cluster, parts) as fleet:
        _catch(stop.set, hup)  # Ray has put its own there, which ends the process
        on_ready()
        updating: threading.Thread | None = None
        while not stop.wait(0.5):
            if hup.is_set() and not (updating and updating.is_alive()):
                hup.clear()
                # It lasts as long as what replaced replicas have open; a signal ends it all.
                updating = threading.Thread(target=_update, args=(fleet, again), daemon=True)
                updating.start()
    return 0


def _update(fleet: Fleet, again: Callable[[], tuple[ClusterConfig, FleetParts]]) -> None:
    try:
        fleet.update(*again())
        log.info("the fleet is up to date")
    except ConfigError as error:
        log.error("the fleet was not changed: %s", error.message)
    except Exception as error:  # whatever Ray raises, when the fleet ends meanwhile
        log.error("the fleet was not changed: %s: %s", type(error).__name__, error)


def _catch(end: Callable[[], object], hup: threading.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end())
    signal.signal(signal.SIGHUP, lambda *_: hup.set())


def spare_processes() -> None:
    """A Ray that this process starts has no dashboard, log monitor or autoscaler, of which nobody
    here asks anything: most of a start's work, and beside it a node's agents may come too late."""
    from ray._private.node import Node

    for start in ("start_api_server", "start_log_monitor", "start_monitor"):
        setattr(Node, start, lambda *_, **__: None)
