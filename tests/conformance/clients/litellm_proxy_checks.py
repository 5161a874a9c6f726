"""LiteLLM's proxy in front of the server, asked by the openai client and by curl's kind of request.

The proxy is started here, on a free port of this machine, with one model that is the server's.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

from checks import BASE_URL, MODEL, check, finish
from conversation import CITY_FORMAT, three_turns
from openai import OpenAI


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


PORT = free_port()
CONFIG = {
    "model_list": [
        {
            "model_name": name,
            "litellm_params": {
                "model": f"{provider}/{MODEL}", "api_base": BASE_URL, "api_key": "none",
                "num_retries": 0,
            },
        }
        for name, provider in (("served", "openai"), ("text", "text-completion-openai"))
    ],
}  # fmt: skip
KEY = f"sk-{secrets.token_hex(16)}"
"""The proxy does not start without one."""
CLIENT = OpenAI(base_url=f"http://127.0.0.1:{PORT}", api_key=KEY, max_retries=0, timeout=120)
MESSAGES: list[Any] = [{"role": "user", "content": "Say hello."}]


def start(folder: Path) -> subprocess.Popen[bytes]:
    """The proxy, once it answers. Raises RuntimeError when it ends or stays away."""
    config = folder / "config.yaml"
    config.write_text(json.dumps(CONFIG))  # JSON is YAML
    command = [Path(sys.executable).parent / "litellm", "--config", config]
    command += ["--host", "127.0.0.1", "--port", str(PORT), "--telemetry", "False"]
    with (folder / "proxy.log").open("wb") as log:
        environment = {**os.environ, "LITELLM_MASTER_KEY": KEY}
        proxy = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environment)
    limit = time.monotonic() + 180
    while time.monotonic() < limit and proxy.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health/liveliness", timeout=5):
                return proxy
        except OSError:
            time.sleep(1.0)
    proxy.kill()
    raise RuntimeError((folder / "proxy.log").read_text()[-3000:])


os.environ.pop("DATABASE_URL", None)
scratch = tempfile.TemporaryDirectory()
proxy = start(Path(scratch.name))


@check("litellm proxy completion")
def _() -> None:
    answer = CLIENT.completions.create(model="text", prompt="One, two,", max_tokens=5)
    assert answer.choices[0].text


@check("litellm proxy chat, its own messages sent back over three turns with a tool")
def _() -> None:
    three_turns(partial(CLIENT.chat.completions.create, model="served"))


@check("litellm proxy stream")
def _() -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8}
    chunks = list(CLIENT.chat.completions.create(model="served", messages=MESSAGES, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


@check("litellm proxy JSON schema")
def _() -> None:
    answer = CLIENT.chat.completions.create(
        model="served", messages=MESSAGES, response_format=CITY_FORMAT, max_tokens=60
    )
    assert set(json.loads(answer.choices[0].message.content or "")) == {"name"}


@check("litellm proxy responses, two turns")
def _() -> None:
    first = CLIENT.responses.create(model="served", input="Say hello.", max_output_tokens=8)
    items: Any = [
        {"role": "user", "content": "Say hello."},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"role": "user", "content": "And again."},
    ]
    assert CLIENT.responses.create(model="served", input=items, max_output_tokens=8).output


proxy.terminate()
proxy.wait(30)
scratch.cleanup()
finish()
