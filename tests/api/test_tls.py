"""HTTPS: with a certificate the server speaks TLS; a bad one is told before a start."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from server.api.serving import check_certificate
from server.config import ListenConfig, ServerConfig
from server.errors import ConfigError
from tests.api.live import LiveServer, as_bytes
from tests.fakes.scripted_engine import ScriptedEngine, saying

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate of 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    chain, key = str(folder / "chain.pem"), str(folder / "key.pem")
    command = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 -out {chain} -keyout {key}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return chain, key


def test_a_completion_over_https(files: tuple[str, str]) -> None:
    listen = ListenConfig(ssl_certfile=files[0], ssl_keyfile=files[1])
    check_certificate(listen)
    engine = ScriptedEngine(saying(as_bytes("abcdefgh")))
    with LiveServer([engine], config=ServerConfig(listen=listen)) as live:
        assert live.url.startswith("https://")
        body = {"model": "tiny", "prompt": "x", "max_tokens": 8, "stream": True}
        with httpx.Client(verify=live.trusted) as client:
            answer = client.post(f"{live.url}/v1/completions", json=body)
            assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.TransportError):
            httpx.get(live.url.replace("https", "http") + "/ready")


@pytest.mark.parametrize(
    ("chain", "key", "told"),
    [
        ("none.pem", None, "No such file"),
        ("chain.pem", None, "see --ssl-certfile"),
        ("key.pem", "chain.pem", "see --ssl-certfile"),
    ],
)
def test_what_cannot_be_used_is_told(
    files: tuple[str, str], chain: str, key: str | None, told: str
) -> None:
    folder = Path(files[0]).parent
    listen = ListenConfig(
        ssl_certfile=str(folder / chain), ssl_keyfile=None if key is None else str(folder / key)
    )
    with pytest.raises(ConfigError, match=told):
        check_certificate(listen)


def test_a_key_that_wants_a_password_is_refused_without_asking(
    files: tuple[str, str], tmp_path: Path
) -> None:
    locked = str(tmp_path / "locked.pem")
    command = f"openssl ec -in {files[1]} -aes128 -passout pass:x -out {locked}"
    subprocess.run(command.split(), check=True, capture_output=True)
    with pytest.raises(ConfigError, match=r"certificate|password"):
        check_certificate(ListenConfig(ssl_certfile=files[0], ssl_keyfile=locked))


def test_a_key_needs_a_certificate() -> None:
    with pytest.raises(ValueError, match="ssl_keyfile needs ssl_certfile"):
        ListenConfig(ssl_keyfile="key.pem")
