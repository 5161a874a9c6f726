"""HeadKeeper: Ray's head process is started again where it dies, and knows what it knew.

Ray ends all its processes some time after its head (the GCS) is lost. Its state lies in a folder
here (Ray's RocksDB store), so a new head process knows every node, actor and replica; they find it
at the same port, and what they are doing goes on meanwhile. This is for a Ray that this process has
started; elsewhere whoever starts the head does the same (docs/fleet.md).
"""

from __future__ import annotations

import logging
import threading
from typing import Any

log = logging.getLogger("tailor.fleet")

RECONNECT_S = 600
"""How long Ray's processes wait for a head that is gone before they end; Ray's own is 60."""
_LOOK_S = 0.2
_MAX_PAUSE_S = 10.0


def head_settings(folder: str) -> dict[str, Any]:
    """Ray's `_system_config` for a head that keeps its state in a folder of its own."""
    return {
        "gcs_storage": "rocksdb",
        "gcs_storage_path": folder,
        "gcs_rpc_server_reconnect_timeout_s": RECONNECT_S,
    }


class HeadKeeper:
    """node: Ray's head node (ray._private.node.Node), which this process has started.

    `start` returns at once. Call `stop` when Ray has ended: the head that was started again ends
    with the thread that started it. num_restarts: how often that was.
    """

    def __init__(self, node: Any) -> None:
        self._node = node
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="head-keeper", daemon=True)
        self.num_restarts = 0

    def start(self) -> None:
        """Look after the head from now on."""
        self._thread.start()

    def let_go(self) -> None:
        """Start it no more; Ray is about to end."""
        self._ended.set()

    def stop(self) -> None:
        """Return when the thread has ended."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def pid(self) -> int:
        """Of the head process. Raises KeyError between two of them."""
        pid: int = self._node.all_processes["gcs_server"][0].process.pid
        return pid

    def _run(self) -> None:
        pause_s = _LOOK_S
        while not self._ended.wait(pause_s):
            if self._lives():
                pause_s = _LOOK_S
                continue
            log.error("Ray's head process has died; it is started again")
            try:
                self._node.kill_gcs_server(check_alive=False)
                self._node.start_gcs_server()
                self.num_restarts += 1
            except Exception as error:  # whatever Ray raises: try again, requests go on
                log.error("Ray's head process did not start: %s", error)
                pause_s = min(_MAX_PAUSE_S, 2.0 * pause_s)

    def _lives(self) -> bool:
        found = self._node.all_processes.get("gcs_server")
        return bool(found) and found[0].process.poll() is None
