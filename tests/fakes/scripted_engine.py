"""An engine that does what a test says, at the other end of a real pipe, in a thread.

It speaks the channel's messages and keeps a record of what it was told. A script turns a Request
into the Deltas it will send: one list per step. Between steps it reads its messages, as the real
engine does, so `abort_lag` (steps made for a request after its client left) can be asserted.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from server import channel
from server.engine.figures import StepTotals, declared
from server.types import (
    Delta,
    FigureValue,
    FinishReason,
    ModelInfo,
    Request,
    StepCounts,
    TokenLogprob,
)

Script = Callable[[Request], Iterable[list[Delta]]]


def steps_of(
    request: Request,
    token_ids: Sequence[int],
    *,
    per_step: int = 1,
    finish_reason: FinishReason = "length",
    stop_reason: int | bytes | None = None,
    choice_id: int = 0,
    logprob: Callable[[int], float] = lambda i: -0.25,
    source: str = "suffix",
) -> list[list[Delta]]:
    """The Deltas of one choice that emits `token_ids`, `per_step` at a time.

    Every step but a one-token step counts per_step - 1 accepted drafts out of per_step drafted.
    """
    num_top, named = request.sampling.num_logprobs, request.sampling.logprob_token_ids
    steps: list[list[Delta]] = []
    for start in range(0, len(token_ids), per_step):
        part = tuple(token_ids[start : start + per_step])
        accepted = len(part) - 1
        logprobs: tuple[TokenLogprob, ...] = ()
        if num_top is not None:
            logprobs = tuple(top_entry(t, logprob(start + i), num_top) for i, t in enumerate(part))
            if named:
                top = tuple((token_id, -5.0 - i) for i, token_id in enumerate(named))
                logprobs = tuple(replace(entry, top=top) for entry in logprobs)
        counts = StepCounts(num_steps=1, no_draft_reason="off" if per_step == 1 else "")
        if per_step > 1:
            counts = StepCounts(
                num_steps=1,
                num_drafts=1,
                num_drafted=per_step,
                num_accepted=accepted,
                accepted_by_depth=(1,) * accepted,
                offered_by_depth=(1,) * per_step,
                by_source=((source, per_step, accepted),),
                verify_s=0.002,
            )
        sources = (source,) * accepted + ("",) if request.report_sources else ()
        steps.append(
            [Delta(request.request_id, choice_id, part, logprobs, counts=counts, sources=sources)]
        )
    if not steps:
        steps = [[Delta(request.request_id, choice_id, ())]]
    last = steps[-1][0]
    steps[-1] = [last._replace(finish_reason=finish_reason, stop_reason=stop_reason)]
    if request.echo_logprobs is not None:
        entries = tuple(
            None if i == 0 else top_entry(t, -1.0 - i, request.echo_logprobs)
            for i, t in enumerate(request.prompt_ids)
        )
        steps[0] = [steps[0][0]._replace(prompt_logprobs=entries)]
    return steps


def top_entry(token_id: int, logprob: float, num_top: int) -> TokenLogprob:
    """A drawn token with num_top others below it."""
    top = tuple((token_id + k, logprob - k) for k in range(num_top))
    return TokenLogprob(token_id, logprob, 1, top)


def together(choices: Sequence[list[list[Delta]]]) -> list[list[Delta]]:
    """The steps of several choices, side by side."""
    longest = max(len(steps) for steps in choices)
    return [[d for steps in choices if i < len(steps) for d in steps[i]] for i in range(longest)]


def saying(token_ids: Sequence[int], *, per_step: int = 1) -> Script:
    """Every choice says `token_ids`, over and over, for max_tokens."""

    def script(request: Request) -> list[list[Delta]]:
        num = request.sampling.max_tokens
        ids = (list(token_ids) * (num // len(token_ids) + 1))[:num]
        return together(
            [
                steps_of(request, ids, per_step=per_step, choice_id=k)
                for k in range(request.num_choices)
            ]
        )

    return script


class ScriptedEngine:
    """One engine process, scripted. `factory` may be called again after it died.

    refuses: why it cannot be built, which it says instead of being ready.
    step_s: how long a step takes. gate: steps wait while it is cleared. Written by the engine's
    thread: submitted, aborted, num_steps, steps_of_request.
    """

    def __init__(
        self,
        script: Script,
        *,
        name: str = "engine-0",
        model: str = "tiny",
        vocab_size: int = 400,
        max_model_len: int = 256,
        step_s: float = 0.0,
        ready: bool = True,
        refuses: str = "",
    ) -> None:
        self.script = script
        self.name = name
        self.step_s = step_s
        self.gate = threading.Event()
        self.gate.set()
        self.refuses = refuses
        self.may_be_ready = threading.Event()
        if ready:
            self.may_be_ready.set()
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.steps_of_request: dict[str, int] = {}
        self.num_steps = 0
        self.num_starts = 0
        self.running: dict[str, list[list[Delta]]] = {}
        self.fail_starts = 0
        self.calls: list[tuple[str, object]] = []
        self.info = ModelInfo(
            model, vocab_size, max_model_len, (0,), 64, 16, "cpu", "float32", "fp-test", 8, 64,
            figures=declared(),
        )  # fmt: skip
        self.steps = StepTotals()
        self._handle: ScriptedHandle | None = None

    def factory(self) -> ScriptedHandle:
        """Start the engine in a thread."""
        if self.fail_starts:
            self.fail_starts -= 1
            raise RuntimeError("cannot start")
        ours, theirs = Pipe()
        thread = threading.Thread(target=self._run, args=(theirs,), daemon=True)
        self._handle = ScriptedHandle(ours, theirs, thread)
        thread.start()
        self.num_starts += 1  # last: a test that sees it may let the engine die
        return self._handle

    def die(self) -> None:
        """The process is gone: its end of the pipe closes, whatever it was doing."""
        assert self._handle is not None
        self._handle.kill()

    def _run(self, connection: Connection) -> None:
        self.running = {}
        try:
            while not self.may_be_ready.wait(0.02):
                if connection.poll(0) and channel.receive(connection)[0] == "stop":
                    return
            if self.refuses:
                channel.send(connection, ("failed", self.refuses, True))
                return
            channel.send(connection, ("ready", self.info))
            beat_s = time.monotonic()
            while True:
                if time.monotonic() - beat_s > 1.0:
                    beat_s = time.monotonic()
                    channel.send(connection, ("beat", 0.0))
                while connection.poll(0 if self.running and self.gate.is_set() else 0.02):
                    if not self._told(connection, channel.receive(connection)):
                        return
                if self.running and self.gate.is_set():
                    self._step(connection)
        except (EOFError, OSError):
            pass
        finally:
            connection.close()

    def _told(self, connection: Connection, message: channel.Message) -> bool:
        kind = message[0]
        if kind == "submit":
            request = message[1]
            self.submitted.append(request)
            self.running[request.request_id] = list(self.script(request))
            self.steps_of_request[request.request_id] = 0
        elif kind == "abort":
            self.aborted.append(message[1])
            self.running.pop(message[1], None)
        elif kind == "control" and message[2] == "figures":
            answer = {"ok": True, "value": self._figures()}
            channel.send(connection, ("control", message[1], answer))
        elif kind == "control":
            self.calls.append((message[2], message[3]))
            channel.send(connection, ("control", message[1], {"done": message[2]}))
        return kind != "stop"

    def _step(self, connection: Connection) -> None:
        time.sleep(self.step_s)
        self.num_steps += 1
        deltas = []
        for request_id, steps in list(self.running.items()):
            self.steps_of_request[request_id] += 1
            deltas += steps.pop(0)
            if not steps:
                del self.running[request_id]
        self.steps.observe(0.01, 0.008, 0.0001, 0.002, max(1, len(deltas)))
        self.steps.rows[1] += max(1, len(deltas))
        channel.send(connection, ("deltas", deltas))

    def _figures(self) -> list[FigureValue]:
        """What it tells of itself; of most, nothing."""
        own: dict[str, FigureValue] = {
            "num_requests_running": len(self.running),
            "num_requests_waiting": 0,
            "num_tokens_waiting": 0,
            "kv_cache_usage_perc": len(self.running) / 64,
            "num_preemptions": self.num_steps // 10,
            "engine_steps": self.steps.num_steps,
            "engine_rows": ((("prefill",), 0), (("decode",), self.steps.rows[1]), (("draft",), 0)),
        }
        names = ("step_time_seconds", "step_model_time_seconds", "propose_time_seconds",
                 "step_host_time_seconds", "step_rows")  # fmt: skip
        own |= {name: self.steps.histogram(i) for i, name in enumerate(names)}
        return [
            own.get(one.name, () if one.labels else 0 if one.kind != "histogram" else None)
            for one in declared()
        ]


class ScriptedHandle:
    """channel.EngineHandle over a thread."""

    def __init__(
        self, connection: Connection, other_end: Connection, thread: threading.Thread
    ) -> None:
        self.connection = connection
        self._other_end = other_end
        self._thread = thread

    def kill(self) -> None:
        """Shut the engine's end down as the kernel does when a process dies."""
        with socket.socket(fileno=os.dup(self._other_end.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        self.connection.close()  # which asks it to end
        self._thread.join(timeout_s)
