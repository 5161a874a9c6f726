"""A real server for tests: create_app and serve, on uvicorn, on a real socket, in a thread.

In-process clients buffer streams and cannot see disconnects, so every HTTP test goes through this.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx

from server.api.admin import TaskAdmin
from server.api.app import create_app
from server.api.engines.client import EngineClient, EngineSpec
from server.api.gate import Traces
from server.api.served_model import ServedModel
from server.api.serving import listen, run_loop, serve
from server.config import DEFAULT_TASK, RestartConfig, ServerConfig, SpeculationConfig, TaskConfig
from server.metrics import Metrics
from tests.api.real_engine import TABLE as TABLE
from tests.api.real_engine import TOKENIZER as TOKENIZER
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.fakes.scripted_engine import ScriptedEngine
from tests.waiting import wait_until

if TYPE_CHECKING:
    import openai

BYTE_IDS = {TABLE.bytes_of(i): i for i in range(TABLE.vocab_size) if len(TABLE.bytes_of(i)) == 1}
DRAFTERS = ("off", "suffix")
Specs = Sequence[EngineSpec]
between: Callable[[Specs, Callable[[], asyncio.AbstractEventLoop], Metrics], Specs] | None = None
"""Tests of fleets put something between a server and its engines (tests/fleet/api)."""
PLAIN_TASK = TaskConfig(name=DEFAULT_TASK, speculation=SpeculationConfig(drafter="suffix"))


def encode(text: str) -> list[int]:
    """Ids of a text under the tests' tokenizer."""
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


def as_bytes(text: str) -> list[int]:
    """One id per UTF-8 byte."""
    return [BYTE_IDS[bytes([b])] for b in text.encode()]


def served(name: str = "tiny", max_model_len: int = 256) -> ServedModel:
    """The tests' model as the API knows it."""
    return ServedModel(name, byte_level_tokenizer(), TABLE, 400, max_model_len, 1_700_000_000, "fp")


def keyed(*names: str, **sections: Any) -> ServerConfig:
    """A configuration with these sections and a key for each name: sk-NAME."""
    keys = tuple({"id": name, "key": f"sk-{name}"} for name in names)
    return ServerConfig.model_validate({"keys": keys, **sections})


def as_key(secret: str) -> dict[str, str]:
    """The headers of who has this key; of nobody without one."""
    return {"authorization": f"Bearer {secret}"} if secret else {}


def post_bytes(path: str, body: Mapping[str, Any], secret: str = "") -> bytes:
    """A POST of a JSON body as it goes over a socket, which stays open behind it."""
    content = json.dumps(body).encode()
    head = {"host": "x", "content-type": "application/json", "content-length": len(content)}
    lines = [f"{name}: {value}\r\n" for name, value in {**head, **as_key(secret)}.items()]
    return f"POST {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + content


class LiveServer:
    """A running server; a context manager. `status` is serve's return value after the exit."""

    def __init__(
        self,
        engines: Sequence[ScriptedEngine] | Sequence[EngineSpec],
        *,
        config: ServerConfig | None = None,
        tasks: Mapping[str, TaskConfig] | None = None,
        models: Mapping[str, ServedModel] | None = None,
        restart: RestartConfig | None = None,
        wait_ready: bool = True,
        drafters: Sequence[str] = DRAFTERS,
        max_model_len: int = 256,
        drain_s: float = 5.0,
        leave_s: float = 0.0,
        task_admin: TaskAdmin | None = None,
        traces: Traces | None = None,
    ) -> None:
        self.config = config or ServerConfig()
        self.specs = [
            e if isinstance(e, EngineSpec) else EngineSpec(e.name, e.info.name, "cpu", e.factory)
            for e in engines
        ]
        tasks = {**(tasks or {})}
        # The default task drafts with what the tests' engines have.
        tasks.setdefault(DEFAULT_TASK, PLAIN_TASK)
        self.models = models or {s.model: served(s.model, max_model_len) for s in self.specs}
        self._app: dict[str, Any] = {
            "tasks": tasks,
            "models": self.models,
            "drafters": drafters,
            "task_admin": task_admin,
            "traces": traces,
        }
        self._restart = restart or RestartConfig(first_delay_s=0.05, max_delay_s=0.1)
        self._limits = self.config.limits.model_copy(update={"drain_s": drain_s})
        self._leave_s = leave_s
        self.metrics = Metrics(vllm_aliases=self.config.metrics.vllm_aliases)
        if between is not None:
            self.specs = list(between(self.specs, lambda: self.loop, self.metrics))
        self.status: int | None = None
        self.error: BaseException | None = None
        self._wait_ready = wait_ready
        self._socket = listen("127.0.0.1", 0)
        self.port = self._socket.getsockname()[1]
        chain = self.config.listen.ssl_certfile
        self.url = f"{'http' if chain is None else 'https'}://127.0.0.1:{self.port}"
        self.trusted = ssl.create_default_context(cafile=chain)
        self.thread = threading.Thread(target=self._run, daemon=True)
        # One for all its clients' requests: a new connection for each takes as long as an answer.
        self.http = httpx.Client(
            timeout=20, verify=self.trusted, limits=httpx.Limits(max_connections=None)
        )
        self._openai: list[openai.OpenAI] = []
        self.client: EngineClient
        self.loop: asyncio.AbstractEventLoop
        self.stop: asyncio.Event

    def _run(self) -> None:
        try:
            self.status = run_loop(self.serve())
        except BaseException as error:
            self.error = error

    async def serve(self) -> int:
        """Run the server on this loop; returns the exit status."""
        self.loop = asyncio.get_running_loop()
        self.stop = asyncio.Event()
        self.client = EngineClient(
            self.specs, metrics=self.metrics, restart=self._restart, limits=self._limits
        )
        return await serve(
            create_app(self.config, client=self.client, **self._app),
            self.client,
            limits=self._limits,
            sockets=[self._socket],
            certificate=self.config.listen.certificate,
            leave_s=lambda: self._leave_s,
            stop=self.stop,
        )

    def __enter__(self) -> LiveServer:
        self.thread.start()
        if self._wait_ready:
            wait_until(lambda: self.error is not None or self._all_ready(), 40)
        else:
            wait_until(lambda: self.error is not None or self.answers("/ping"), 40)
        if self.error is not None:
            raise self.error
        return self

    def answers(self, path: str) -> bool:
        try:
            return httpx.get(self.url + path, verify=self.trusted).status_code == 200
        except httpx.TransportError:
            return False

    def _all_ready(self) -> bool:
        client = getattr(self, "client", None)  # asked first: a request takes longer
        return (
            client is not None
            and all(engine["state"] == "ready" for engine in client.engines())
            and self.answers("/ready")
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for client in self._openai:
            client.close()
        self.http.close()
        self.terminate()
        self.join()

    def terminate(self) -> None:
        """What SIGTERM does."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.stop.set)

    def join(self, timeout_s: float = 20.0) -> int | None:
        """Wait for the end; returns the exit status."""
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), "the server did not stop"
        if self.error is not None:
            raise self.error
        return self.status

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        """The real client, without retries; closed with the server."""
        import openai  # takes as long as all of the server: not in programs of tests

        client = openai.OpenAI(api_key=api_key, base_url=self.url + "/v1", max_retries=0)
        # One that is left to the garbage collector may find its sockets collected before itself.
        self._openai.append(client)
        return client

    def post(
        self, path: str = "/v1/completions", secret: str = "", /, **body: Any
    ) -> httpx.Response:
        """POST a JSON body, with this key; model and prompt have defaults for completions."""
        if path == "/v1/completions":
            body = {"model": "tiny", "prompt": "the", **body}
        return self.http.post(self.url + path, json=body, headers=as_key(secret), timeout=60)

    def ask_figures(self) -> None:
        """Have the engines tell the metrics how they are."""
        asking = asyncio.run_coroutine_threadsafe(self.client.ask_figures(), self.loop)
        asking.result(10)

    def sample(self, name: str, **labels: str) -> float:
        """Sum of a series over the labels that are not given."""
        self.ask_figures()
        return sum(
            s.value
            for family in self.metrics.families([name])
            for s in family.samples
            if all(s.labels.get(k) == v for k, v in labels.items())
        )
