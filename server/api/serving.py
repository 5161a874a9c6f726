"""`serve`: runs the application and its engines until it is told to stop.

    client = EngineClient([EngineSpec(name, model, device, factory), ...], metrics=metrics, ...)
    app = create_app(config, tasks=tasks, models=models, client=client, ...)
    status = await serve(app, client, limits=config.limits, sockets=[listen(host, port)])

- Both calls stand inside one coroutine, run by `run_loop(main())`, which is asyncio.run on uvloop
  where that is installed.
- `serve` starts the engines, listens at once (/ready is 503 until they are loaded), and returns an
  exit status: 0 after SIGTERM or SIGINT and a drain, 1 when no engine is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from server.api.engines.client import EngineClient
from server.api.gate import error_response
from server.config import LimitsConfig, ListenConfig
from server.errors import (
    BodyTimeoutError,
    ConfigError,
    HeadersTooLargeError,
    InvalidHttpError,
    TailorError,
)
from server.machine import MIN_FILES, allow_files, has_terminal

log = logging.getLogger("tailor.server")

_T = TypeVar("_T")
_LOOK_S = 0.05


def run_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """asyncio.run, on uvloop where it is installed (about half the CPU per streamed token)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: `serve` drains before it closes the socket."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.contextmanager
def _signals(app: FastAPI, stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """Takes SIGTERM, SIGINT and SIGHUP within, where the platform and the thread allow it. stop:
    set by the first SIGTERM or SIGINT; hurry: by a second one, which ends the drain."""
    loop = asyncio.get_running_loop()
    # Who starts it with nohup wants it to outlive the terminal.
    had_terminal = has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    reloads: set[asyncio.Task[None]] = set()
    caught: list[signal.Signals] = []

    def end() -> None:
        (hurry if stop.is_set() else stop).set()

    def hang_up() -> None:
        if had_terminal and not has_terminal():
            end()
            return
        reload = asyncio.create_task(_reload(app))
        reloads.add(reload)
        reload.add_done_callback(reloads.discard)

    for number, act in ((signal.SIGHUP, hang_up), (signal.SIGTERM, end), (signal.SIGINT, end)):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, act)
            caught.append(number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, caught)  # one may have come during the start
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


def listen(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A listening TCP socket. Opened before a model is loaded, so that a busy port is an error at
    once.

    is_shared: other processes may listen on the port, too; the kernel divides the connections.
    Raises ConfigError.
    """
    files = allow_files()
    if files < MIN_FILES:
        log.warning(
            "this process may open %d files, and each connection takes one: those beyond get no "
            "answer. ulimit -n 65536 allows more.", files,
        )  # fmt: skip
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        taken = socket.socket(family, kind, protocol)
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            taken.bind(address)
            taken.listen(2048)
        except OSError:
            taken.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; see --host and --port"
        ) from None
    taken.setblocking(False)
    return taken


def check_certificate(place: ListenConfig) -> None:
    """Read what TLS needs, where it is asked for. Raises ConfigError."""
    if place.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            place.ssl_certfile, place.ssl_keyfile, password=""
        )
    except (OSError, ValueError) as error:  # ssl's errors are OSErrors
        files = " and ".join(filter(None, (place.ssl_certfile, place.ssl_keyfile)))
        raise ConfigError(
            f"the certificate of {files} cannot be used: {error.strerror or error}; "
            "see --ssl-certfile and --ssl-keyfile"
            if isinstance(error, OSError)
            else f"the key of {files} is encrypted: give one without a password"
        ) from None


async def serve(
    app: FastAPI,
    client: EngineClient,
    *,
    limits: LimitsConfig,
    sockets: Sequence[socket.socket],
    certificate: tuple[str, str | None] | None = None,
    leave_s: Callable[[], float] = lambda: 0.0,
    on_ready: Callable[[int], None] = lambda _: None,
    stop: asyncio.Event | None = None,
) -> int:
    """Run the app and its engines; returns the exit status.

    limits: drain_s, and those of each Connection. sockets: that listen. certificate: files of a
    chain and its key, for HTTPS (check_certificate).
    leave_s: asked when the server is told to end: for how many seconds it goes on to serve the
    connections that are open, because others listen on its port; it takes no new ones then.
    on_ready: called once with the port, when everything is loaded. stop: ends the server like
    SIGTERM (tests; where signals cannot be caught). A second SIGTERM or SIGINT ends the drain.

    On the first signal /ready turns 503 and new completions are refused with 503, each answer ends
    its connection, and open ones go on for up to drain_s seconds; then they are aborted with an
    error, the engines are stopped and the status is 0. When no engine is left and none will be
    restarted, the status is 1.
    SIGHUP reloads the tasks; when the terminal was closed, it ends the server.
    """
    stop = stop or asyncio.Event()
    chain, key = certificate or (None, None)
    connection: Any = functools.partial(
        Connection,
        limits=limits,
        on_refused=functools.partial(client.metrics.count_response, "other"),
        is_leaving=stop.is_set,
    )
    server = _Server(
        uvicorn.Config(
            app,
            http=connection,
            access_log=False,
            log_config=None,
            ws="none",
            lifespan="on",
            server_header=False,
            ssl_certfile=chain,
            ssl_keyfile=key,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
        )
    )
    hurry = asyncio.Event()
    with _signals(app, stop, hurry):
        await client.start()
        running = asyncio.create_task(server.serve(list(sockets)))
        tasks = [
            asyncio.create_task(stop.wait()),
            asyncio.create_task(client.gave_up.wait()),
            asyncio.create_task(_announce(server, client, on_ready)),
        ]
        try:
            await asyncio.wait({running, *tasks[:2]}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set() and not client.gave_up.is_set():
                await _leave(server, leave_s())
                await _drain(client, limits.drain_s, hurry)
            gave_up = client.gave_up.is_set()
            await client.stop()
            server.should_exit = True
            await running
            return 1 if gave_up else 0
        finally:
            for task in tasks:
                task.cancel()
            await client.stop()


async def _leave(server: uvicorn.Server, seconds: float) -> None:
    """Take no new connections; return when those that are open have ended, or after so long."""
    if seconds <= 0.0:
        return
    for listening in server.servers:
        listening.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while server.server_state.connections:
                await asyncio.sleep(_LOOK_S)


async def _drain(client: EngineClient, drain_s: float, hurry: asyncio.Event) -> None:
    """Let open requests end, for drain_s seconds at most or until `hurry` is set."""
    log.info("draining: %d open requests", client.num_open)
    drain = asyncio.create_task(client.drain(drain_s))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait({drain, hurried}, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    drain.cancel()


async def _reload(app: FastAPI) -> None:
    """Reload the tasks (SIGHUP); a problem is logged, and the old tasks stay."""
    try:
        await app.state.reload_tasks()
    except TailorError as error:
        log.error("%s", error.message)
    except Exception:
        log.exception("the tasks could not be reloaded")


async def _announce(
    server: uvicorn.Server, client: EngineClient, on_ready: Callable[[int], None]
) -> None:
    """Call on_ready with the port once the socket listens and every model has an engine."""
    while not (server.started and client.is_ready):
        await asyncio.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    log.info("ready on port %d", port)
    on_ready(port)


# --- one HTTP/1.1 connection ----------------------------------------------------------------------

_http_log = logging.getLogger("tailor.http")
_parser_log = logging.getLogger("tailor.http.parser")
_parser_log.setLevel(logging.ERROR)  # uvicorn warns of every byte that is no HTTP: see _refuse

CHUNK_OVERHEAD = 32
"""Bytes around a chunk's data that the limit does not count."""


class Connection(HttpToolsProtocol):
    """One HTTP/1.1 connection: uvicorn's, with bounds on what a client may hold and for how long.

    It adds to uvicorn's:

    - the request line and headers have a size and a time (431, 408), however slowly they drip, and
      so have trailers and chunk extensions;
    - HTTP that the parser refuses (smuggling, bad lengths, raw TLS) answers in OpenAI's error
      shape, and so does what it takes and HTTP/1.1 forbids: another version, no Host or two, an
      Expect that nobody knows;
    - a client that does not read its answer is cut off, so that it cannot hold what it asked for.

    An error is never written into an answer that is under way: the connection is closed instead.

    limits: max_header_bytes, header_timeout_s (from the connection's start, a request's first byte
    or an answer before its body's end) and send_timeout_s. on_refused: called with (status, code)
    of each refusal made here.
    is_leaving: whether answers end their connection, so that clients come back elsewhere.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: LimitsConfig,
        on_refused: Callable[[int, str], None],
        is_leaving: Callable[[], bool],
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = _parser_log
        self._limits = limits
        self._on_refused = on_refused
        self._is_leaving = is_leaving
        self._in_head = True  # a request's head is awaited or being read
        self._num_head_bytes = 0
        self._num_extra_bytes = 0  # of chunk sizes, chunk extensions and trailers
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._refusal: TailorError | None = None
        self._open: list[RequestResponseCycle] = []  # uvicorn itself knows the last one only

    # --- what uvicorn and the transport call ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_send_timer()
        self._tell_that_it_left()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self.transport.is_closing():
            return
        if self._in_head:
            self._num_head_bytes += len(data)
            self._start_head_timer()
        else:
            self._num_extra_bytes += len(data)
        super().data_received(data)
        num_bytes = self._num_head_bytes if self._in_head else self._num_extra_bytes
        if num_bytes > self._limits.max_header_bytes:
            self._refuse(self._too_large())

    def on_body(self, body: bytes) -> None:
        self._num_extra_bytes -= len(body) + CHUNK_OVERHEAD
        super().on_body(body)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            self._refusal = self._too_large()
            raise ValueError("too large")  # ends the parser's work; send_400_response follows
        problem = self._problem_of_head()
        if problem:
            self._refusal = InvalidHttpError(problem)
            raise ValueError("forbidden")
        self._in_head = False
        self._num_head_bytes = self._num_extra_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()
        if self._is_leaving() and self.cycle is not None:
            self.cycle.keep_alive = False
        self._open = [cycle for cycle in self._open if not cycle.response_complete]
        self._open.append(self.cycle)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # An answer before the body's end: the next byte of that ends uvicorn's timer for good.
        if not self._in_head and self.cycle.response_complete:
            self._start_head_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that the parser refused."""
        refusal, self._refusal = self._refusal, None
        self._refuse(refusal or InvalidHttpError("The request is not valid HTTP/1.1."))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self._limits.send_timeout_s, self._not_read)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore upgrades, as HTTP allows, and log nothing: a client could fill the log."""

    # --- inside ---

    def _problem_of_head(self) -> str:
        """What HTTP/1.1 (RFC 9112, 2.3 and 3.2; RFC 9110, 10.1.1) forbids in a head, "" if it is
        right."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return f"HTTP/{version} is not spoken on this port; send HTTP/1.1."
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            return f"A request has one Host header; this one has {len(hosts)}."
        expected = [value.strip().lower() for name, value in self.headers if name == b"expect"]
        if any(value != b"100-continue" for value in expected):
            return "Expect: 100-continue is the only expectation that is known."
        return ""

    def _too_large(self) -> TailorError:
        return HeadersTooLargeError(
            f"The request's headers are larger than {self._limits.max_header_bytes} bytes."
        )

    def _refuse(self, error: TailorError) -> None:
        """Answer with an error and close; once."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = error
        self._on_refused(error.status, error.code or "")
        _http_log.info("refused", extra={"status": error.status, "code": error.code})
        cycle = self.cycle
        # Never into an answer of which a byte was sent.
        can_answer = not self.pipeline and cycle is not None and not cycle.response_started
        if cycle is None or cycle.response_complete or can_answer:
            status, body, headers = error_response(error)
            headers += [
                (b"x-request-id", f"req-{secrets.token_hex(12)}".encode()),
                (b"connection", b"close"),
            ]
            head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
            self.transport.write(STATUS_LINE[status] + head + b"\r\n" + body)
        if cycle is not None:
            cycle.disconnected = True  # whoever reads this request's body learns that it ends here
            cycle.message_event.set()
        self.transport.close()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            seconds = self._limits.header_timeout_s
            self._head_timer = self.loop.call_later(seconds, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_head_timer()  # the next request may take its time while this one runs
        elif self._num_head_bytes:
            time_s = self._limits.header_timeout_s
            self._refuse(BodyTimeoutError(f"The headers did not arrive within {time_s:g} seconds."))
        else:
            self.transport.close()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _not_read(self) -> None:
        self._send_timer = None
        _http_log.info("cut off: the client does not read its answer")
        self._tell_that_it_left()
        self.transport.abort()

    def _tell_that_it_left(self) -> None:
        """Nothing more is written for the open requests, and who works for them learns it."""
        for cycle in self._open:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
