"""Debian's real Prometheus, as a process of its own that scrapes one server under test.

It runs configs/prometheus as it is shipped, but for the target, the intervals (a second instead of
five) and the folder. `apt-get install prometheus` brings the binaries; without them tests skip.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadtest.peer import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "prometheus"


def binary(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return found


class Prometheus:
    """A running Prometheus; a context manager. folder: for its configuration and its data."""

    def __init__(self, folder: Path, target: str) -> None:
        config = yaml.safe_load((CONFIG / "prometheus.yml").read_text())
        # A scrape may take its whole interval, and a busy machine needs more than half a second.
        config["global"] = {
            "scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s",
        }  # fmt: skip
        for file in (CONFIG / "rules").glob("*.yml"):
            rules = yaml.safe_load(file.read_text())
            for group in rules["groups"]:
                group.pop("interval", None)
            (folder / file.name).write_text(yaml.safe_dump(rules))
        config["rule_files"] = ["recording.yml", "alerts.yml"]
        [job] = config["scrape_configs"]
        job["file_sd_configs"] = [{"files": ["target.yml"]}]
        (folder / "target.yml").write_text(yaml.safe_dump([{"targets": [target]}]))
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                binary("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._client = httpx.Client(base_url=self.url, timeout=10)

    def __enter__(self) -> Prometheus:
        wait_until(self._is_ready, pause_s=0.05, told=lambda: "Prometheus did not start")
        return self

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, Path(self._log.name).read_text()
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait(20)
        self._log.close()

    def query(self, expr: str, at_s: float | None = None) -> list[dict[str, Any]]:
        """The vector that an instant query returns, now or at a Unix time. Fails for an expression
        that is none."""
        params = {"query": expr} if at_s is None else {"query": expr, "time": f"{at_s:.0f}"}
        answer = self._client.get("/api/v1/query", params=params).json()
        assert answer["status"] == "success", (expr, answer)
        data = answer["data"]
        assert data["resultType"] == "vector", expr
        result: list[dict[str, Any]] = data["result"]
        return result

    def values(self, expr: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The values of a vector by some of their labels."""
        return {
            tuple(entry["metric"][label] for label in labels): float(entry["value"][1])
            for entry in self.query(expr)
        }

    def wait_scraped_after(self, unix_s: float) -> None:
        """Return once all that happened before `unix_s` has been scraped."""
        scraped = "min(timestamp(tailor_engine_up)) or vector(0)"
        wait_until(lambda: self.values(scraped)[()] > unix_s, pause_s=0.1)
