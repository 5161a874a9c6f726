"""`tailor complete`: the stream's text, coloured by source on a terminal, and one line of sums."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from server.client.http import CallFailedError, Endpoint
from server.commands.cli import main
from server.commands.client import stream
from tests.api.live import LiveServer, as_bytes, encode
from tests.client.conftest import REPLY
from tests.client.test_bulk import answering
from tests.fakes.scripted_engine import ScriptedEngine, saying

IDS = encode(REPLY)


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=200, color_system="standard")


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_drafts_have_their_source_s_colour(server: LiveServer) -> None:
    out, note = terminal(), Console(file=io.StringIO(), width=200)
    body: dict[str, Any] = {"model": "tiny", "prompt": "the", "max_tokens": 4}
    tally = stream(Endpoint(server.url), body, out=out, note=note)
    text = [server.post(max_tokens=i).json()["choices"][0]["text"] for i in range(1, 5)]
    pieces = [text[0], *(b[len(a) :] for a, b in pairwise(text))]
    want = f"\x1b[32m{pieces[0]}\x1b[0m{pieces[1]}\x1b[32m{pieces[2]}\x1b[0m{pieces[3]}\n"
    assert shown(out) == want
    assert (tally.num_tokens, tally.num_steps, tally.by_source) == (4, 2, {"suffix": [4, 2]})
    line = shown(note)
    assert line.startswith("4 tokens in ") and line.count("\n") == 1
    assert "2.00 tokens/step; accepted: suffix 2 of 4" in line
    assert "2 drawn without a draft" in line


def test_escapes_of_the_model_do_not_reach_the_terminal(
    server: LiveServer, engine: ScriptedEngine
) -> None:
    engine.script = saying(as_bytes("a\x1b[31mb\nc"))
    out = terminal()
    body: dict[str, Any] = {"model": "tiny", "prompt": "the", "max_tokens": 9}
    stream(Endpoint(server.url), body, out=out, note=Console(file=io.StringIO()))
    assert shown(out) == "a�[31mb\nc\n"


def test_as_a_command_into_a_pipe(
    server: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["complete", "--task", "tiny", "--url", server.url, "--max-tokens", str(len(IDS))]
    assert main([*words, "the"]) == 0
    caught = capsys.readouterr()
    assert caught.out == REPLY + "\n" and "tokens/s" in caught.err
    monkeypatch.setattr("sys.stdin", io.StringIO("the quick"))
    assert main([*words, "--drafter", "off", "--temperature", "0", "--seed", "3", "-"]) == 0
    assert capsys.readouterr().out == REPLY + "\n"
    assert main([*words, "--drafter", "none", "the"]) == 1
    assert "speculation.drafter" in capsys.readouterr().err
    assert main(["complete", "--task", "nobody", "--url", server.url, "x"]) == 1
    assert "'nobody' does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'data: {"choices":[]}\n\n', "ended too early"),
        (b"data: what\n\n", "does not answer as Tailor does"),
        (b'data: {"error":{"message":"gone"}}\n\n', "gone"),
    ],
)
def test_a_broken_stream_is_an_error(data: bytes, told: str) -> None:
    with answering(lambda i, body: (200, {}, data)) as (url, _):
        quiet = Console(file=io.StringIO())
        with pytest.raises(CallFailedError, match=told):
            stream(Endpoint(url), {"model": "m", "prompt": "p"}, out=quiet, note=quiet)
