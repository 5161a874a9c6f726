"""The prior of a model that Tailor brings, made while the machine has nothing else to do.

`tailor models prior` takes two cores for half an hour, once a model and machine. A server runs
it by itself once nobody has used the cores for IDLE_S, in a process that gets only what is left of
them, and halts that process whenever somebody uses them: a request of this server, a build, another
server that is measured beside it. The engines draft with the prior when it is there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from asyncio import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drafters.library import own_path
from server.machine import OtherProcesses, available_memory

if TYPE_CHECKING:
    from server.api.engines.client import EngineClient

log = logging.getLogger("tailor.server")

IDLE_S = 120.0
_WAIT_S, _LOOK_S = 2.0, 0.5
"""Between looks (0.4 ms) before it has begun, which may be all of a server's life, and after."""
_CALM_S = 5.0
"""After the last sign of other work, what was halted waits so long before it goes on."""
_BUSY_CORES = 0.3
"""Work of others, in cores, from which on the machine is in use: a request's tokens take a whole
core at least, what a server and a desktop do while they wait a few percent."""
_MEMORY = 5 << 30
"""Bytes that must be free: the larger of the models takes 4.6 GB in training."""

# It ends with the server, halted or not (PR_SET_PDEATHSIG is 1), runs when no other process of the
# server's session wants a core, and is the first to end where memory does. All of it comes before
# what takes time to import.
_CHILD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")
from server.commands.cli import main
sys.exit(main(sys.argv[2:]))
"""


async def make_priors(files: Mapping[str, Path], client: EngineClient) -> None:
    """Make the priors that are not there, one after the other, and have the engines take them.

    files: where the prior of each built-in model will lie, by the model's name. Ends when all are
    there or one could not be made; cancelled, it ends what it has begun.
    """
    if not hasattr(os, "SCHED_IDLE"):
        return
    for model, file in files.items():
        if file.is_file():
            continue
        words = [sys.executable, "-c", _CHILD, str(os.getpid()), "models", "prior", model]
        try:
            status = await run_when_idle(model, words, IDLE_S)
        except OSError:  # the machine has no process or no memory left
            status = 1
        if status:
            log.warning("%s: its prior was not made; `tailor models prior` says why", model)
            return
        if await client.tell("drafters_reload", None):
            log.info("%s: its prior is there, and is drafted with from now on", model)


async def run_when_idle(model: str, command: Sequence[str], idle_s: float) -> int:
    """Run a command while nobody else uses the machine. model: for the log. idle_s: seconds without
    other work before it begins. Returns its exit status; negative for a signal."""
    process: subprocess.Process | None = None
    quiet_s, halted = 0.0, False
    try:
        while True:
            others = OtherProcesses(but=None if process is None else process.pid)
            pause_s = _WAIT_S if process is None else _LOOK_S
            await asyncio.sleep(pause_s)
            quiet_s = 0.0 if others.cores() > _BUSY_CORES else quiet_s + pause_s
            if process is None:
                if quiet_s >= idle_s and available_memory() > _MEMORY:
                    log.info(
                        "%s: nobody uses this machine, so the model's prior is made, by which a "
                        "new key's drafts come true more often; engine.idle_prior: off leaves it",
                        model,
                    )
                    process = await asyncio.create_subprocess_exec(
                        *command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL, env=own_path(),
                    )  # fmt: skip
            elif process.returncode is not None:
                return process.returncode
            elif halted != (quiet_s < _CALM_S):
                halted = not halted
                process.send_signal(signal.SIGSTOP if halted else signal.SIGCONT)
    finally:
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
