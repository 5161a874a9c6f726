"""What must hold after an attack: the server answers, nothing is open, memory is where it was."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.api.live import LiveServer, post_bytes
from tests.waiting import wait_until

MOST_GROWTH_MIB = 48


def rss_mib() -> float:
    """Resident memory, once what is free has gone back to the system."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # another libc
        pass
    return resident_mib()


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def unharmed_by(server: LiveServer, normal: Callable[[], httpx.Response]) -> Iterator[None]:
    """Asserts at its end that the attack within left nothing behind.

    normal: sends a request of three tokens that has nothing wrong.
    """
    normal()
    is_measured = Path("/proc/self/statm").exists()
    most = rss_mib() + MOST_GROWTH_MIB if is_measured else 0.0
    yield
    wait_until(lambda: server.client.num_open == 0)
    answer = normal()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert len(server.client.waiting) == server.client.waiting.num_tokens == 0
    wait_until(lambda: server.sample("tailor_kv_cache_usage_perc") == 0)
    assert server.client.engines()[0]["restarts"] == 0
    if is_measured:
        # What is free is given back, which takes long, only where it decides.
        wait_until(lambda: resident_mib() < most or rss_mib() < most, 10)


def exchange(live: LiveServer, data: bytes, wait_s: float = 10.0) -> bytes:
    """Raw bytes out, raw bytes back until the server closes (it does, at the latest by a limit)."""
    got = b""
    with socket.create_connection(("127.0.0.1", live.port), timeout=wait_s) as s:
        try:
            s.sendall(data)
            while part := s.recv(65536):
                got += part
        except (ConnectionResetError, BrokenPipeError):
            pass
    return got


def reset(live: LiveServer, path: str, bodies: Sequence[Mapping[str, Any]]) -> None:
    """POST each body with the key sk-one and reset the connection, a third of them once something
    was answered; returns when the server works for none of them any more."""

    def cut(i: int) -> None:
        with socket.create_connection(("127.0.0.1", live.port), timeout=30) as s:
            s.sendall(post_bytes(path, bodies[i], "sk-one"))
            if i % 3 == 0:
                s.recv(100)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(cut, range(len(bodies))))
    wait_until(lambda: live.client.num_open == 0, 20)
