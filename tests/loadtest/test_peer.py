from __future__ import annotations

import asyncio
import itertools
import re
import sys
import textwrap
from pathlib import Path

import httpx
import psutil
import pytest

from loadtest.peer import (
    CpuMeter,
    PeerFailed,
    ServerKeys,
    bring_down,
    bring_up,
    parse_peers,
    request_body,
    shuffled,
    total,
)
from tests.waiting import wait_until


def test_names_give_the_dialect_and_options_their_server() -> None:
    peers = parse_peers(
        ["tailor=http://a", "tailor-suffix=@tailor", "llamacpp-4=x.sh", "mine=http://b"],
        models=["mine=big=model"],
        extras=['tailor-suffix={"speculation": {"drafter": "suffix"}}'],
    )
    assert [peer.dialect for peer in peers] == ["tailor", "tailor", "llamacpp", "openai"]
    assert peers[3].model == "big=model"
    assert peers[1].extra == {"speculation": {"drafter": "suffix"}}
    assert peers[0].extra == {}


@pytest.mark.parametrize(
    ("servers", "extras"),
    [
        (["noequals"], []),
        (["a=http://x", "a=http://y"], []),
        (["a=@b"], []),
        (["a=http://x", "b=@a", "c=@b"], []),
        (["a=http://x"], ["b={}"]),
        (["a=http://x"], ["a=[1]"]),
        (["a=http://x"], ["a={"]),
    ],
)
def test_bad_command_lines_are_refused(servers: list[str], extras: list[str]) -> None:
    with pytest.raises(ValueError):
        parse_peers(servers, extras=extras)


def test_a_server_s_key_goes_to_that_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_KEY", "secret")
    servers = ["a=http://h:1", "b=http://h:12", "c=@a"]
    peers = parse_peers(servers, keys=["a=OUR_KEY"])
    assert "secret" not in repr(peers)
    with pytest.raises(ValueError, match="NO_SUCH_KEY is not set"):
        parse_peers(servers, keys=["a=NO_SUCH_KEY"])
    with pytest.raises(ValueError, match="no server here"):
        parse_peers(servers, keys=["d=OUR_KEY"])
    for peer in peers:
        peer.url = peer.where.replace("@a", "http://h:1")

    def told(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=[request.headers.get("authorization")])

    transport = httpx.MockTransport(told)
    with httpx.Client(transport=transport, auth=ServerKeys(peers)) as client:
        heard = [client.get(f"{peer.url}/v1/models").json()[0] for peer in peers]
    assert heard == ["Bearer secret", None, "Bearer secret"]


def test_each_dialect_keeps_the_prefix_cache_out_of_the_way() -> None:
    def body(dialect: str) -> dict[str, object]:
        return request_body(dialect, "m", "Hello", max_tokens=4, salt="s1")  # type: ignore[arg-type]

    for dialect in ("tailor", "vllm"):
        assert (body(dialect)["cache_salt"], body(dialect)["prompt"]) == ("s1", "Hello")
    assert (body("llamacpp")["cache_prompt"], body("llamacpp")["prompt"]) == (False, "Hello")
    assert body("openai")["prompt"] == "[s1]\nHello"
    assert "model" not in request_body("openai", "", "x", max_tokens=1, salt="s")


ROOT = Path(__file__).resolve().parents[2]


def script(path: Path, text: str) -> str:
    path.write_text("#!/usr/bin/env bash\n" + textwrap.dedent(text))
    return str(path)


SERVER = f"""
exec env PYTHONPATH={ROOT} {sys.executable} - <<'PY'
import os
from http.server import HTTPServer
from tests.small_server import Handler
class H(Handler):
    asked = 0
    def do_GET(self):
        if self.path == "/ready" and H.asked == 0:
            H.asked = 1
            return self.send_error(503)
        assert self.path != "/v1/models" or H.asked
        self.reply({{"data": [{{"id": "m1", "owned_by": "tailor"}}], "version": "9"}})
HTTPServer((os.environ["HOST"], int(os.environ["PORT"])), H).serve_forever()
PY
"""


def test_a_start_script_is_run_found_ready_metered_and_ended(tmp_path: Path) -> None:
    peers = parse_peers([f"a={script(tmp_path / 'a.sh', SERVER)}", "b=@a", "vllm=@a"])
    try:
        asyncio.run(bring_up(peers, tmp_path / "logs", timeout_s=30))
        assert [peer.dialect for peer in peers] == ["tailor", "tailor", "vllm"]
        assert (peers[0].model, peers[0].version) == ("m1", "9")
        assert (peers[1].url, peers[1].model) == (peers[0].url, "m1")
        own_s, others_s = CpuMeter(peers).read(peers[1])
        assert own_s is not None and 0 < own_s < others_s
        process = peers[0].process
        assert process is not None
    finally:
        bring_down(peers)
    wait_until(lambda: not psutil.pid_exists(process.pid), 10)
    assert peers[0].process is None


def test_a_server_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    peers = parse_peers([f"a={script(tmp_path / 'a.sh', 'echo no such weights; exit 3')}"])
    try:
        with pytest.raises(PeerFailed, match="ended with 3:\nno such weights"):
            asyncio.run(bring_up(peers, tmp_path / "logs", timeout_s=30))
    finally:
        bring_down(peers)


def test_a_missing_start_script_is_told(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="no start script"):
        asyncio.run(bring_up(parse_peers([f"a={tmp_path}/none.sh"]), tmp_path))


def test_every_shipped_start_script_is_valid_and_names_no_machine() -> None:
    import subprocess

    folder = ROOT / "loadtest" / "peers"
    scripts = sorted(folder.glob("*.sh"))
    assert len(scripts) >= 5
    for path in scripts:
        assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
        text = path.read_text()
        base = re.search(r'^exec bash "\$\(dirname "\$0"\)/(\w+\.sh)"$', text, re.MULTILINE)
        if base is not None:  # hands on to another one, which is looked at too
            assert folder / base[1] in scripts
        else:
            assert "127.0.0.1" in text or "--port" in text
            assert "${PORT:?}" in text
        for place in ("/home/", "/root/", "/work/", "/opt/"):
            assert place not in text


def test_in_the_long_run_every_server_follows_every_other_one() -> None:
    peers = parse_peers([f"{name}=http://127.0.0.1:1" for name in ("a", "b", "c")])
    pairs: set[tuple[str, str]] = set()
    for round_id in range(12):
        order = [peer.name for peer in shuffled(peers, round_id, "plain")]
        assert sorted(order) == ["a", "b", "c"]
        pairs |= set(itertools.pairwise(order))
    assert len(pairs) == 6
    again = [peer.name for peer in shuffled(peers, 11, "plain")]
    assert again == order


def test_series_are_summed_by_label() -> None:
    page = 'a_total{task="x",b="1"} 2\na_total{task="x",b="2"} 3.5\na_total{task="y"} 1\nb 4\n'
    assert total(page, "a_total", task="x") == 5.5
    assert total(page, "a_total") == 6.5
    assert total(page, "b") == 4.0 and total(page, "c") == 0.0
