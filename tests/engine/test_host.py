"""EngineHost in a thread and in a process: messages, aborts, failures, and how it ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from server import channel
from server.engine import figures
from server.engine.engine import Engine
from server.engine.process import EngineFactory, start_process
from server.types import Delta, DeviceFigures, Request, SpeculationParams
from tests.engine.engine_factories import build, factory, refuse
from tests.engine.one_token_loop import one_token_loop
from tests.engine.requests import request_of
from tests.fakes.engine_thread import start_thread
from tests.fakes.fake_runner import FakeModel
from tests.waiting import wait_until

Start = Callable[..., Any]


@pytest.fixture
def start_own() -> Iterator[Start]:
    """Starts engines in processes of their own and stops them after the test."""
    yield from _starter(start_process)


@pytest.fixture
def start_here() -> Iterator[Start]:
    """Engines in threads: what they do alike is the same loop, and starts sooner."""
    yield from _starter(start_thread)


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """An engine in a process, idle between the tests."""
    handle = start_process(factory(step_s=0.001))
    _ready(handle)
    yield handle
    handle.stop(5.0)


def _starter(how: Callable[..., Any]) -> Iterator[Start]:
    handles = []

    def make(built: EngineFactory = build, *, ready: bool = True) -> Any:
        """ready: whether it says so before the test goes on."""
        handles.append(how(built))
        if ready:
            _ready(handles[-1])
        return handles[-1]

    yield make
    for handle in handles:
        handle.stop(5.0)
        handle.stop(5.0)  # idempotent
        assert not handle.is_alive()


def _request(name: str, max_tokens: int = 12, prompt: tuple[int, ...] = (3, 4, 5)) -> Request:
    drafts = SpeculationParams("d", 4)
    return request_of(
        name, prompt, temperature=0.7, seed=3, max_tokens=max_tokens, speculation=drafts
    )


def _receive(handle: Any, timeout_s: float = 20.0) -> Any:
    """The next message that is no heartbeat."""
    while True:
        assert handle.connection.poll(timeout_s), "nothing came"
        message = channel.receive(handle.connection)
        if message[0] != "beat":
            return message


def _beat(handle: Any) -> float:
    """The age that the next heartbeat says."""
    while True:
        assert handle.connection.poll(5.0), "no heartbeat"
        message = channel.receive(handle.connection)
        if message[0] == "beat":
            return float(message[1])


def _ready(handle: Any) -> None:
    message = _receive(handle)
    assert message[0] == "ready"
    assert message[1].name == "fake"


def _submit(handle: Any, request: Request) -> None:
    channel.send(handle.connection, ("submit", request))


def _working(start: Start, max_tokens: int = 400, **options: Any) -> Any:
    """An engine whose request "a" has its first tokens. options: factory's."""
    handle = start(factory(**options))
    _submit(handle, _request("a", max_tokens))
    while _receive(handle)[0] != "deltas":
        pass
    return handle


def _figures(handle: Any) -> dict[str, Any]:
    """What the engine tells of itself now, by name."""
    channel.send(handle.connection, ("control", 99, "figures", None))
    while (message := _receive(handle))[:2] != ("control", 99):
        pass
    return {
        figure.name: value
        for figure, value in zip(figures.declared(), message[2]["value"], strict=True)
    }


def _until_finished(handle: Any, names: set[str]) -> dict[str, list[Delta]]:
    out: dict[str, list[Delta]] = {}
    open_names = set(names)
    while open_names:
        message = _receive(handle)
        if message[0] == "deltas":
            assert message[1], "Deltas are sent when there are some"
            for delta in message[1]:
                out.setdefault(delta.request_id, []).append(delta)
                if delta.finish_reason:
                    open_names.discard(delta.request_id)
    return out


def _ends(handle: Any) -> None:
    wait_until(lambda: not handle.is_alive(), 10.0)


def _comes_back_right(handle: Any, requests: list[Request]) -> None:
    """What the engine sends is what the one-token loop gives."""
    for request in requests:
        _submit(handle, request)
    results = _until_finished(handle, {r.request_id for r in requests})
    for request in requests:
        want = one_token_loop(
            FakeModel(16, seed=5), request, 0, eos=(1,), max_model_len=512, token_bytes=[]
        )
        assert [i for d in results[request.request_id] for i in d.token_ids] == want.ids


def test_a_request_comes_back_as_the_one_token_loop_gives_it(engine: Any) -> None:
    _comes_back_right(engine, [_request(f"r{i}", prompt=(3 + i, 4)) for i in range(3)])
    told = _figures(engine)
    assert told["num_requests_running"] == 0 and told["step_time_seconds"][1] > 0


def test_an_abort_takes_effect_within_a_step(start_here: Start) -> None:
    handle = _working(start_here, step_s=0.05)
    channel.send(handle.connection, ("abort", "a"))
    channel.send(handle.connection, ("control", 0, "echo", {"n": 1}))  # read after the abort
    read, num_after = False, 0
    deltas: list[Delta] = []
    while not any(delta.finish_reason for delta in deltas):
        message = _receive(handle)
        read = read or message[0] == "control"
        if message[0] == "deltas":
            deltas = message[1]
            num_after += read
    assert deltas[-1].finish_reason == "abort"
    assert num_after <= 2, "more than the step that was under way, and the abort"
    told = _figures(handle)
    assert told["num_requests_running"] == told["kv_cache_usage_perc"] == 0


def test_controls_answer_and_their_errors_do_too(start_here: Start) -> None:
    handle = start_here()
    answers: dict[int, Any] = {}
    for call, name in enumerate(("echo", "fail", "odd", "unknown", "long")):
        channel.send(handle.connection, ("control", call, name, {"n": 1}))
    channel.send(handle.connection, ("nonsense", 1))
    while len(answers) < 5:
        message = _receive(handle)
        if message[0] == "control":
            answers[message[1]] = message[2]
    assert answers[0] == {"ok": True, "value": {"n": 1}}
    assert answers[1] == {"ok": False, "error": "no such corpus"}
    assert answers[2]["ok"] is answers[3]["ok"] is False
    assert answers[4]["value"].startswith("control"), "what takes long is not done in the loop"


def test_an_idle_engine_does_not_spin(engine: Any) -> None:
    _figures(engine)  # its loop has begun

    def cpu_ticks() -> int:
        with open(f"/proc/{engine.pid}/stat") as file:
            values = file.read().rsplit(")", 1)[1].split()
        return int(values[11]) + int(values[12])

    before = cpu_ticks()
    time.sleep(0.5)
    assert cpu_ticks() - before <= 10, "a spinning loop takes 50 ticks"
    while engine.connection.poll(0):
        assert channel.receive(engine.connection)[0] == "beat"


def test_a_broken_runner_fails_its_requests_says_so_and_ends(start_here: Start) -> None:
    handle = start_here(factory(fail="always"))
    names = {f"r{i}" for i in range(9)}
    for name in names:
        _submit(handle, _request(name))
    results = _until_finished(handle, names)
    assert {r[-1].finish_reason for r in results.values()} == {"error"}
    message = _receive(handle)
    while message[0] != "failed":
        message = _receive(handle)
    assert "the device is gone" in message[1]
    _ends(handle)
    with pytest.raises(EOFError):
        _receive(handle)


def test_a_factory_that_raises_is_told_and_ends(start_own: Start) -> None:
    handle = start_own(refuse, ready=False)
    kind, text, final = _receive(handle)
    assert kind == "failed" and final and "the model is unsupported" in text
    _ends(handle)


@pytest.mark.parametrize("by_signal", [False, True])
def test_what_is_told_to_stop_aborts_what_is_open_and_ends(
    start_here: Start, start_own: Start, by_signal: bool
) -> None:
    handle = _working(start_own if by_signal else start_here, step_s=0.01)
    if by_signal:
        os.kill(handle.pid, signal.SIGUSR1)
    else:
        channel.send(handle.connection, ("stop",))
    results = _until_finished(handle, {"a"})
    assert results["a"][-1].finish_reason == "abort"
    _ends(handle)


def test_sigterm_and_sigint_to_the_group_leave_the_engine_to_its_api(engine: Any) -> None:
    """systemd and `timeout` signal every process of a service; the API drains, engines go on."""
    _submit(engine, _request("a", 100))
    while _receive(engine)[0] != "deltas":
        pass
    os.kill(engine.pid, signal.SIGTERM)
    os.kill(engine.pid, signal.SIGINT)
    results = _until_finished(engine, {"a"})
    assert results["a"][-1].finish_reason in ("stop", "length")
    assert engine.is_alive()


@pytest.mark.slow
def test_an_engine_does_not_survive_its_api_process() -> None:
    """The "API" is a process that is killed; its engine must be gone soon after, though it hangs in
    a step."""
    program = textwrap.dedent(
        """
        from server.engine.process import start_process
        from tests.engine import test_host
        from tests.engine.engine_factories import factory

        if __name__ == "__main__":
            handle = start_process(factory(fail="hang"))
            test_host._ready(handle)
            test_host._submit(handle, test_host._request("a", prompt=(9, 9)))
            while not test_host._beat(handle):
                pass
            print(handle.pid, flush=True)
            input()
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as api:
        assert api.stdout is not None
        pid = int(api.stdout.readline())
        api.kill()
    wait_until(lambda: not _exists(pid), 5.0, told=lambda: "an orphan engine")


def _exists(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_the_heartbeat_says_how_long_the_loop_has_been_at_it(start_here: Start) -> None:
    handle = start_here(factory(step_s=3.6))
    assert _beat(handle) == 0.0, "idle"
    channel.send(handle.connection, ("submit", _request("a", max_tokens=1)))
    ages = [_beat(handle) for _ in range(3)]
    assert ages[0] < ages[1] < ages[2] and ages[2] > 1.5, "a long step"
    while _beat(handle):
        pass


def test_late_sending_loses_and_reorders_nothing(start_here: Start) -> None:
    """An accelerator's engine sends Deltas while the next step runs."""
    handle = start_here(factory(device="cuda:0"))
    _comes_back_right(handle, [_request("a", max_tokens=100)])


def test_threads_and_descriptors_do_not_pile_up() -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        handle = start_thread(factory())
        _ready(handle)
        handle.stop(5.0)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_process_that_cannot_be_begun_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is tried again and again."""

    def no_memory(*_: Any, **__: Any) -> None:
        raise OSError("no memory for a process")

    monkeypatch.setattr(subprocess, "Popen", no_memory)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no memory"):
        start_process(factory())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_runner_that_tells_of_a_device_is_read(start_here: Start) -> None:
    device = DeviceFigures(5, 4, 2, 8, 0.5, (3, 1, 2))

    def built() -> Engine:
        engine = factory()()
        engine.runner.device_figures = lambda: device  # type: ignore[attr-defined]
        return engine

    handle = start_here(built)
    told = _figures(handle)
    assert [["reserved"], 5] in told["device_memory_bytes"]
    assert told["device_utilization_ratio"] == 0.5


def test_a_flood_of_choices_is_opened_between_several_steps(start_here: Start) -> None:
    """What runs is not held up by all of it."""
    arrived, opened = threading.Event(), [0]

    def built() -> Engine:
        engine = factory()()
        submit, step = engine.submit, engine.step

        def counted_submit(request: Request) -> None:
            opened[-1] += request.num_choices
            submit(request)

        def counted_step(*arguments: Any) -> list[Delta]:
            opened.append(0)
            return step(*arguments)

        engine.submit = counted_submit  # type: ignore[method-assign]
        engine.step = counted_step  # type: ignore[method-assign,assignment]
        arrived.wait(20.0)
        return engine

    handle = start_here(built, ready=False)
    for i in range(10):
        request = replace(_request(f"r{i}", max_tokens=1), num_choices=128)
        channel.send(handle.connection, ("submit", request))
    arrived.set()
    assert _receive(handle)[0] == "ready"
    ended = 0
    while ended < 10 * 128:
        ended += sum(delta.finish_reason is not None for delta in _receive(handle)[1])
    assert sum(opened) == 10 * 128 and max(opened) <= 1024
