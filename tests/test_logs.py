"""Logs: a log that nobody reads stops nobody."""

from __future__ import annotations

import json
import subprocess
import sys

_WRITES = """
import logging, sys
from server import logs
logs.configure("json", "info")
logging.getLogger("httpx").info("HTTP Request: GET ...")
log = logging.getLogger("tailor.test")
for number in range(2000):
    log.info("line", extra={"number": number, "text": "x" * 100})
print("done", flush=True)
sys.stdin.readline()
log.info("line", extra={"number": 2000})
"""


def test_a_pipe_that_nobody_reads_loses_lines_and_stops_nobody() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _WRITES],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        try:
            assert process.stdout.readline() == "done\n"  # beyond what a pipe holds
            first = process.stderr.readline()
            process.stdin.close()
            lines = [first, *process.stderr.read().splitlines()]
        finally:
            process.kill()
    whole = [json.loads(line) for line in lines if line.endswith("}") or line.endswith("}\n")]
    numbers = [line["number"] for line in whole if "number" in line]
    assert "HTTP Request" not in first
    assert numbers == [*range(len(numbers) - 1), 2000] and 100 < len(numbers) < 2000
    [dropped] = [line["event"] for line in whole if "dropped" in line["event"]]
    assert dropped.startswith(f"{2000 - len(numbers) + 1} lines before this one were dropped")
