"""The servers that are compared: where each one is, how to start it, how to talk to it.

A server is named on the command line as NAME=WHERE:

    tailor=http://127.0.0.1:8000     already running
    llamacpp=loadtest/peers/llamacpp.sh   started by us on a free port, stopped at the end
    tailor-suffix=@tailor            the same server again, with other request fields

A start script gets PORT in its environment, takes everything else (MODEL, PYTHON, BIN, ...) from
the environment it was called in, and execs the server in the foreground on 127.0.0.1:$PORT.
The dialect is the known name that NAME starts with, else the one that the server's list of models
gives as their owner, else plain OpenAI.

`stream` is one completion, timed: when its tokens came, how many, and what they said. Servers
differ in how they tell the number of tokens in a chunk. In order of preference: the chunk's running
usage (`continuous_usage_stats`; Tailor, vLLM), its token ids, and one token a chunk with the total
put right by the final usage. A chunk without text and without tokens is no token.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

UNBOUNDED = httpx.Limits(max_connections=None, max_keepalive_connections=None)
"""As many connections as anybody wants."""

Dialect = Literal["tailor", "vllm", "llamacpp", "openai"]
DIALECTS: tuple[Dialect, ...] = ("tailor", "vllm", "llamacpp")


class ServerRefused(Exception):
    """The server answered with an error, or with a stream that is none."""


@dataclass(slots=True)
class Timing:
    """One choice's stream. Times are time.perf_counter() seconds; written by `stream` only.

    chunk_s[i], chunk_tokens[i]: when chunk i arrived and how many tokens it brought. num_tokens is
    the server's usage where it told one, else their sum. `text` is what the client saw.
    """

    start_s: float
    end_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_tokens: int = 0
    finish_reason: str | None = None
    speculation: dict[str, Any] | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to its first token. Raises ValueError without one."""
        if not self.chunk_s:
            raise ValueError("the stream brought no token")
        return self.chunk_s[0] - self.start_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first chunk over the time after the first chunk; None for one chunk."""
        if len(self.chunk_s) < 2 or self.chunk_s[-1] <= self.chunk_s[0]:
            return None
        return (self.num_tokens - self.chunk_tokens[0]) / (self.chunk_s[-1] - self.chunk_s[0])

    @property
    def end_to_end_tokens_per_s(self) -> float:
        """All tokens over the time from sending to the end of the stream."""
        return self.num_tokens / (self.end_s - self.start_s)

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first chunk; None when all came in one chunk."""
        rate = self.decode_tokens_per_s
        return 1.0 / rate if rate else None

    @property
    def inter_chunk_s(self) -> list[float]:
        """Gaps between chunks, in seconds: what a reader of the stream feels."""
        return [b - a for a, b in zip(self.chunk_s, self.chunk_s[1:], strict=False)]


def request_body(
    dialect: Dialect,
    model: str,
    prompt: str,
    *,
    max_tokens: int,
    salt: str,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A greedy, streamed /v1/completions body whose prompt is not read from a prefix cache.

    salt: unique per request. Tailor and vLLM key their prefix cache by it; llama.cpp is told not to
    reuse a prompt. For an unknown server ("openai") the salt becomes the prompt's first line.
    `extra` is merged last.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if dialect in ("tailor", "vllm"):
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        body["cache_salt"] = salt
    elif dialect == "llamacpp":
        body["cache_prompt"] = False
    elif dialect == "openai":
        body["prompt"] = f"[{salt}]\n{prompt}"
    if not model:  # a server with one model, whose name it did not tell
        del body["model"]
    body.update(extra or {})
    return body


def total(metrics: str, name: str, **labels: str) -> float:
    """Sum of a series of /metrics over the labels that are not given; 0.0 without one."""
    # The parser takes half a second for a page of ten thousand lines.
    told = "\n".join(line for line in metrics.split("\n") if line.startswith(name))
    samples = (s for family in text_string_to_metric_families(told) for s in family.samples)
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


async def stream(client: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> Timing:
    """Send `body` (stream: true, one choice) to url/v1/completions and time its tokens.

    Raises ServerRefused on a status other than 200, an error inside the stream, or a stream
    without a finish reason; httpx.HTTPError when the connection fails.
    """
    timing = Timing(start_s=time.perf_counter())
    seen = 0
    async with client.stream("POST", f"{url}/v1/completions", json=dict(body)) as response:
        if response.status_code != 200:
            await response.aread()
            raise ServerRefused(f"HTTP {response.status_code}: {response.text[:300]}")
        async for line in response.aiter_lines():
            now = time.perf_counter()
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                break
            seen = _take(timing, json.loads(data), now, seen)
    timing.end_s = time.perf_counter()
    if timing.finish_reason is None:
        raise ServerRefused("the stream ended without a finish reason")
    if not timing.num_tokens:
        timing.num_tokens = sum(timing.chunk_tokens)
    return timing


def _take(timing: Timing, chunk: Mapping[str, Any], now: float, seen: int) -> int:
    """Book one parsed chunk. Returns the number of tokens seen so far."""
    if chunk.get("error"):
        raise ServerRefused(f"error in the stream: {str(chunk['error'])[:300]}")
    usage = chunk.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    timing.num_cached_tokens = cached or timing.num_cached_tokens
    if chunk.get("speculation"):
        timing.speculation = chunk["speculation"]
    running: int | None = usage.get("completion_tokens")
    choices = chunk.get("choices") or []
    if choices:
        choice = choices[0]
        text = choice.get("text") or ""
        ids = choice.get("token_ids") or []
        timing.text += text
        timing.token_ids += ids
        timing.finish_reason = choice.get("finish_reason") or timing.finish_reason
        # A final usage on a chunk without text counts no new token here: servers that send one
        # have sent every token in a chunk of its own, and num_tokens below takes the usage.
        if running is not None and (text or ids):
            new = running - seen
        elif ids:
            new = len(ids)
        else:
            new = 1 if text else 0
        if new > 0:
            timing.chunk_s.append(now)
            timing.chunk_tokens.append(new)
            seen += new
    if running is not None:
        timing.num_tokens = running
    return seen


class PeerFailed(Exception):
    """A server could not be started or did not become ready."""


@dataclass(slots=True)
class Peer:
    """One named server under test. `extra` fields are merged into every request's body; `env` into
    the environment of its start script; `key` is its API key."""

    name: str
    where: str
    dialect: Dialect = "openai"
    model: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    key: str = field(default="", repr=False)
    url: str = ""
    version: str = ""
    process: subprocess.Popen[bytes] | None = None
    log_path: Path | None = None

    @property
    def is_alias(self) -> bool:
        return self.where.startswith("@")

    @property
    def is_running(self) -> bool:
        """Whether somebody else has started it."""
        return self.where.startswith(("http://", "https://"))

    @property
    def process_name(self) -> str:
        """The name of the server that an alias is a name of; else its own."""
        return self.where[1:] if self.is_alias else self.name

    def salt(self, base: str) -> str:
        """The prefix-cache salt of one request: unlike that of an alias, which shares the cache.

        Where the salt goes into the prompt ("openai") every server must see the same one, so that
        the texts can be compared; an alias then may read the cache, and num_cached_tokens tells.
        """
        return base if self.dialect == "openai" else f"{base}-{self.name}"


class ServerKeys(httpx.Auth):
    """Sends every server its own API key, and no server another's."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = list(peers)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the key of the server that the request goes to."""
        for peer in self._peers:
            if peer.key and str(request.url).startswith(f"{peer.url}/"):
                request.headers["authorization"] = f"Bearer {peer.key}"
                break
        yield request


def _split(option: str, text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name or not value:
        raise ValueError(f"{option} wants NAME=VALUE, not {text!r}")
    return name, value


def parse_peers(
    servers: Sequence[str],
    *,
    models: Sequence[str] = (),
    extras: Sequence[str] = (),
    keys: Sequence[str] = (),
) -> list[Peer]:
    """The peers of a command line, in its order.

    keys name the environment variables that hold them. Raises ValueError for a malformed, repeated
    or unknown name, an alias of nothing, an extra that is no JSON object, or a variable that is not
    set.
    """
    peers: dict[str, Peer] = {}
    for text in servers:
        name, where = _split("--server", text)
        if name in peers:
            raise ValueError(f"server {name!r} is named twice")
        if where.startswith("@") and (where[1:] not in peers or peers[where[1:]].is_alias):
            raise ValueError(f"{name}: {where} is no server named before it")
        known = (dialect for dialect in DIALECTS if name.startswith(dialect))
        peers[name] = Peer(name, where, dialect=next(known, "openai"))

    def chosen(option: str, text: str) -> tuple[Peer, str]:
        name, value = _split(option, text)
        if name not in peers:
            raise ValueError(f"{option} names {name!r}, which is no server here")
        return peers[name], value

    for text in models:
        peer, value = chosen("--model", text)
        peer.model = value
    for text in extras:
        peer, value = chosen("--extra", text)
        fields = json.loads(value)
        if not isinstance(fields, dict):
            raise ValueError(f"--extra {peer.name}: wants a JSON object")
        peer.extra = fields
    for text in keys:
        peer, value = chosen("--key", text)
        peer.key = os.environ.get(value, "")
        if not peer.key:
            raise ValueError(f"--key {peer.name}: the variable {value} is not set")
    return list(peers.values())


SETTLE_S = 1.5
"""Pause between servers' turns: vLLM's OpenMP threads keep a core busy for a second after an
answer, which would be charged to whoever comes next."""


def shuffled(peers: Sequence[Peer], round_id: int, what: str) -> list[Peer]:
    """The servers' order in one round: drawn anew for each, and the same in every run.

    Rotating is not enough: then each server always follows the same one.
    """
    return random.Random(f"{round_id}-{what}").sample(list(peers), len(peers))


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(peer: Peer, log_dir: Path) -> None:
    """Run the peer's start script on a free port; returns at once. Sets url, process, log_path."""
    script = Path(peer.where).resolve()
    if not script.is_file():
        raise PeerFailed(f"{peer.name}: no start script {peer.where}")
    port = free_port()
    log_dir.mkdir(parents=True, exist_ok=True)
    peer.log_path = log_dir / f"{peer.name}.log"
    with peer.log_path.open("wb") as log:
        peer.process = subprocess.Popen(
            ["bash", str(script)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **peer.env, "PORT": str(port), "HOST": "127.0.0.1"},
            start_new_session=True,  # so that stop() reaches its workers and nothing else
        )
    peer.url = f"http://127.0.0.1:{port}"


def tailor_peer(
    name: str,
    model: str,
    arguments: str,
    *,
    url_name: str = "",
    env: Mapping[str, str] | None = None,
) -> Peer:
    """Tailor, to be started by us. arguments: further ones of `tailor serve`. url_name: what
    requests put into `model`; what the server says first without one."""
    script = Path(__file__).parent / "peers/tailor.sh"
    given = {"PYTHON": sys.executable, "TAILOR_MODEL": model, "TAILOR_ARGS": arguments}
    return Peer(name, str(script), "tailor", model=url_name, env=given | dict(env or {}))


def stop(peer: Peer) -> None:
    """End a server that start() began: SIGTERM to its session, SIGKILL after 20 seconds."""
    process = peer.process
    if process is None:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20.0)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    peer.process = None


async def wait_ready(peer: Peer, *, timeout_s: float = 600.0, every_s: float = 0.5) -> None:
    """Wait until the server answers, then learn its model's name, its version and, where its name
    tells none, its dialect. every_s: seconds between two looks.

    Raises PeerFailed when the process ends or the time is over.
    """
    deadline = time.monotonic() + timeout_s
    async with httpx.AsyncClient(timeout=10.0, auth=ServerKeys([peer])) as client:
        while True:
            if peer.process is not None and peer.process.poll() is not None:
                tail = peer.log_path.read_text(errors="replace")[-1500:] if peer.log_path else ""
                raise PeerFailed(f"{peer.name} ended with {peer.process.returncode}:\n{tail}")
            with suppress(httpx.HTTPError, ValueError, KeyError, IndexError):
                health = await client.get(f"{peer.url}/health")
                ready = await client.get(f"{peer.url}/ready")  # ours is healthy while it loads
                if health.status_code in (200, 404) and ready.status_code != 503:
                    models = await client.get(f"{peer.url}/v1/models")
                    # A server may tell none, and need none.
                    served = models.json()["data"] if models.status_code == 200 else []
                    owner = served[0].get("owned_by") if served else None
                    if peer.dialect == "openai" and owner in DIALECTS:
                        peer.dialect = owner
                    peer.model = peer.model or (served[0]["id"] if served else "")
                    break
            if time.monotonic() > deadline:
                raise PeerFailed(f"{peer.name} was not ready after {timeout_s:.0f} s")
            await asyncio.sleep(every_s)
        for path, key in (("/version", "version"), ("/props", "build_info")):
            with suppress(httpx.HTTPError, ValueError, AttributeError):
                found = await client.get(f"{peer.url}{path}")
                if found.status_code == 200 and found.json().get(key):
                    peer.version = str(found.json()[key])
                    break


async def bring_up(peers: Sequence[Peer], log_dir: Path, *, timeout_s: float = 600.0) -> None:
    """Start and await every peer, one after the other (two loading at once slow each other).

    Raises PeerFailed for the first that fails; what was started stays up for bring_down.
    """
    by_name = {peer.name: peer for peer in peers}
    for peer in peers:
        if peer.is_alias:
            original = by_name[peer.where[1:]]
            peer.url, peer.version = original.url, original.version
            peer.model = peer.model or original.model
            if peer.dialect == "openai":
                peer.dialect = original.dialect
            continue
        if peer.is_running:
            peer.url = peer.where.rstrip("/").removesuffix("/v1")
        else:
            start(peer, log_dir)
        await wait_ready(peer, timeout_s=timeout_s)


def bring_down(peers: Sequence[Peer]) -> None:
    """Stop every server that we started. Idempotent."""
    for peer in peers:
        stop(peer)


class CpuMeter:
    """CPU seconds of each server's process tree, and of everybody else.

    A server that we did not start is found by the port it listens on; one that can't be found
    (another machine, another user) has none.
    """

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._roots: dict[str, psutil.Process] = {}
        for peer in peers:
            root = None if peer.process_name in self._roots else self._find(peer)
            if root is not None:
                self._roots[peer.process_name] = root

    @staticmethod
    def _find(peer: Peer) -> psutil.Process | None:
        with suppress(psutil.Error, OSError):
            if peer.process is not None:
                return psutil.Process(peer.process.pid)
            parts = urlsplit(peer.url)
            if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
                return None
            for connection in psutil.net_connections("tcp"):
                if connection.status != psutil.CONN_LISTEN or not connection.laddr:
                    continue
                if connection.laddr[1] == parts.port and connection.pid:
                    return psutil.Process(connection.pid)
        return None

    def read(self, peer: Peer) -> tuple[float | None, float]:
        """(CPU seconds that this server has used so far; that others have, neither this server nor
        this process, since the machine began).

        Differences of two readings tell whether somebody else was busy, another server that ought
        to be idle or time stolen by a hypervisor among them.
        """
        own_s = None
        with suppress(psutil.Error, KeyError):
            root, total_s = self._roots[peer.process_name], 0.0
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    total_s += times.user + times.system
            own_s = total_s
        machine, here = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = machine.idle + getattr(machine, "iowait", 0.0) + getattr(machine, "guest", 0.0)
        return own_s, float(sum(machine) - idle - here.user - here.system - (own_s or 0.0))
