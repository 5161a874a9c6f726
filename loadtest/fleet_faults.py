"""The faults part of loadtest.fleet: requests in flight while parts of the fleet die.

Half of the requests are streams, which get their text and one end, half whole answers; both
must be what a single server answers, to the bit. While requests are open, each when so many of them
have been answered, the fleet is updated and every replica replaced, the process of an engine is
halted (SIGSTOP) and another's killed, a replica's is killed, Ray's head dies and comes back with
what it knew, and a node is lost. Then the head dies for good, and fewer requests follow.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
from rich.console import Console

from loadtest.completion import ServerRefused, stream
from loadtest.fleet_process import FleetProcess
from loadtest.fleet_traffic import NUM_TASKS, FleetOptions, body, many

NUM_TEXTS = 200
"""Different requests; each is sent several times."""


def request(i: int) -> dict[str, Any]:
    """The i-th of the different requests: some at temperature 0, the others with a seed."""
    asked = body(i % NUM_TASKS, [60 + (i * 7 + k) % 300 for k in range(8)], 24 + i % 40)
    return asked if i % 3 == 0 else {**asked, "temperature": 0.9, "seed": i}


async def answer(client: httpx.AsyncClient, i: int, is_stream: bool) -> str:
    """The text; raises ServerRefused and httpx.HTTPError where there is none."""
    if is_stream:
        return (await stream(client, "", {**request(i), "stream": True})).text
    response = await client.post("/v1/completions", json=request(i))
    if response.status_code != 200:
        raise ServerRefused(f"status {response.status_code}: {response.text[:200]}")
    text: str = response.json()["choices"][0]["text"]
    return text


async def expected(url: str) -> list[str]:
    """What a single server answers to each request."""
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=many()) as client:
        return await asyncio.gather(*(answer(client, i, False) for i in range(NUM_TEXTS)))


class Flight:
    """num_requests that are open at once, and what has become of them."""

    def __init__(self, url: str, wanted: list[str], num_requests: int) -> None:
        self._url = url
        self._wanted = wanted
        self._num_requests = num_requests
        self.num_answered = 0
        self.num_lost = 0
        self.num_wrong = 0
        self.problems: set[str] = set()

    async def run(self, events: list[tuple[int, Callable[[], object]]]) -> float:
        """All of them; each event, in a thread, when so many are answered. Returns seconds."""
        began_s = time.perf_counter()
        limits, timeout = many(), httpx.Timeout(280)
        async with httpx.AsyncClient(base_url=self._url, timeout=timeout, limits=limits) as client:
            asking = [asyncio.create_task(self._ask(client, i)) for i in range(self._num_requests)]
            for when, event in events:
                while self.num_answered + self.num_lost < when:
                    await asyncio.sleep(0.02)
                await asyncio.to_thread(event)
            await asyncio.gather(*asking)
        return time.perf_counter() - began_s

    async def _ask(self, client: httpx.AsyncClient, i: int) -> None:
        which = i % NUM_TEXTS
        try:
            text = await answer(client, which, is_stream=i // NUM_TEXTS % 2 == 1)
        except (ServerRefused, ValueError, httpx.HTTPError) as error:
            self.num_lost += 1
            self.problems.add(f"{type(error).__name__}: {str(error)[:160]}")
            return
        self.num_answered += 1
        if text != self._wanted[which]:
            self.num_wrong += 1
            told = f"{len(text)} characters of {len(self._wanted[which])}"
            self.problems.add(f"{request(which)}: {told}: {text[:40]!r}")


def measure_faults(fleet: FleetProcess, console: Console, options: FleetOptions) -> dict[str, Any]:
    """Requests that were lost, and answers that were not a single server's: none."""
    with FleetProcess("--single") as single:
        wanted = asyncio.run(expected(single.url))
    fleet.deploy("--replicas", "4", "--step-s", "0.03", "--processes")
    num = options.requests
    flight = Flight(fleet.url, wanted, num)
    faults = [
        ("update", "UPDATED", ""),
        ("signal", "SIGNALLED", f" {signal.SIGSTOP.value}"),
        ("signal", "SIGNALLED", f" {signal.SIGKILL.value}"),
        ("kill", "KILLED", ""),
        ("behead", "BEHEADED", ""),
        ("lose", "LOST", ""),
    ]
    events: list[tuple[int, Callable[[], object]]] = [
        (num * (i + 1) // 8, partial(fleet.ask, command + option, answer, 120))
        for i, (command, answer, option) in enumerate(faults)
    ]
    took_s = asyncio.run(flight.run(events))
    # Nobody starts it again now, and Ray's processes go on without it for some time.
    fleet.ask("headless", "HEADLESS")
    headless = Flight(fleet.url, wanted, num // 20)
    headless_s = asyncio.run(headless.run([]))
    for problem in sorted(flight.problems | headless.problems)[:8]:
        console.print(f"not as it should be: {problem}", markup=False)
    for name, one, seconds in (
        ("an update, an engine halted, one killed, a replica, the head, a node", flight, took_s),
        ("without Ray's head", headless, headless_s),
    ):
        console.print(
            f"{name}: {one.num_answered} answered in {seconds:.0f} s, {one.num_lost} lost, "
            f"{one.num_wrong} with another text"
        )
    return {
        "requests": num,
        "seconds": took_s,
        "num_lost": flight.num_lost,
        "num_wrong": flight.num_wrong,
        "num_lost_headless": headless.num_lost,
        "num_wrong_headless": headless.num_wrong,
    }
