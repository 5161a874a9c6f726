"""guidellm and aiperf get the same work as our own load, and their reports are read right."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from loadtest import second_opinion
from loadtest.second_opinion import AGAIN, OURS, Figures
from tests.loadtest.scripted_server import ScriptedServer

PROGRAM = """#!{python}
import json, pathlib, sys
if sys.argv[1] == "--version":
    print("{name} version: 9.8.7")
    raise SystemExit
options = dict(zip(sys.argv[2::1], sys.argv[3::1]))
folder = pathlib.Path({folder!r})
with (folder / "{name}.seen").open("a") as seen:
    seen.write(json.dumps(sys.argv[1:]) + "\\n")
{body}
"""
GUIDELLM = """
data = json.loads(options["--data"])["path"]
rows = [json.loads(line) for line in open(data)]
(folder / "guidellm.rows").write_text(json.dumps(rows))
def mean(value):
    return {"successful": {"mean": value}}
metrics = {"request_totals": {"successful": len(rows) - MISSING, "errored": MISSING},
           "requests_per_second": mean(4.0), "time_to_first_token_ms": mean(250.0),
           "inter_token_latency_ms": mean(50.0)}
out = json.loads(options["--output"])["path"]
pathlib.Path(out).write_text(json.dumps({"benchmarks": [{"metrics": metrics}]}))
"""
AIPERF = """
rows = [json.loads(line) for line in open(options["--input-file"])]
(folder / "aiperf.rows").write_text(json.dumps(rows))
out = pathlib.Path(options["--output-artifact-dir"])
out.mkdir(exist_ok=True)
told = {"request_count": {"avg": float(len(rows))}, "request_throughput": {"avg": 5.0},
        "time_to_first_token": {"avg": 200.0}, "inter_token_latency": {"avg": 40.0}}
(out / "profile_export_aiperf.json").write_text(json.dumps(told))
"""


def program(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(
        PROGRAM.replace("{python}", sys.executable)
        .replace("{name}", name)
        .replace("{folder!r}", repr(str(folder)))
        .replace("{body}", body)
    )
    path.chmod(0o755)
    return path


def arguments(url: str, folder: Path, missing: int = 0) -> list[str]:
    guidellm = program(folder, "guidellm", GUIDELLM.replace("MISSING", str(missing)))
    return [
        "--server", url, "--model", "tiny", "--tokenizer", str(folder),
        "--guidellm", str(guidellm), "--aiperf", str(program(folder, "aiperf", AIPERF)),
        "--streams", "2", "--requests", "4", "--tokens", "6", "--rounds", "2", "--pause", "0",
        "--max-load", "1e9", "--extra", '{"speculation": {"drafter": "off"}}',
    ]  # fmt: skip


def test_all_programs_get_the_same_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(pace_s=0.002) as server:
        assert second_opinion.main(arguments(server.url, tmp_path)) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(server.bodies) == 5 * 4  # a warm-up, and twice a round
    sent = {body["prompt"] for body in server.bodies}
    assert {row["prompt"] for row in json.loads((tmp_path / "guidellm.rows").read_text())} == sent
    assert {row["text"] for row in json.loads((tmp_path / "aiperf.rows").read_text())} == sent
    ours = server.bodies[0]
    words = [json.loads(line) for line in (tmp_path / "aiperf.seen").read_text().splitlines()]
    told = json.loads(words[0][words[0].index("--extra-inputs") + 1])
    for name in ("temperature", "ignore_eos", "max_tokens", "speculation"):
        assert told[name] == ours[name], name
    salts = {one[one.index("--extra-inputs") + 1] for one in words}
    assert len(salts) == 2 and len({body["cache_salt"] for body in server.bodies}) == 20
    words = [json.loads(line) for line in (tmp_path / "guidellm.seen").read_text().splitlines()]
    backend = json.loads(words[0][words[0].index("--backend") + 1])
    assert backend["request_format"] == "/v1/completions" and backend["target"] == server.url
    assert backend["extras"]["body"]["speculation"] == {"drafter": "off"}
    rows = json.loads((tmp_path / "guidellm.rows").read_text())
    assert {row["output_tokens_count"] for row in rows} == {6}

    assert result["versions"] == {"guidellm": "9.8.7", "aiperf": "9.8.7"}
    assert set(result["programs"]) == {OURS, AGAIN, "guidellm", "aiperf"}
    assert result["programs"]["guidellm"]["ttft_s"]["median"] == 0.25
    assert result["programs"]["aiperf"]["itl_s"]["median"] == 0.04
    # 2 ms a token: five gaps of it, whatever the tools say.
    assert 0.0015 < result["programs"][OURS]["itl_s"]["median"] < 0.04
    assert result["programs"]["guidellm"]["itl_s"]["ratio"]["num_pairs"] == 2


def test_a_tool_that_loses_requests_or_fails_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(pace_s=0.0) as server:
        assert second_opinion.main(arguments(server.url, tmp_path, missing=1)) == 1
        assert "guidellm: {'successful': 3" in capsys.readouterr().err
        words = arguments(server.url, tmp_path)
        program(tmp_path, "aiperf", "print('out of luck')\nraise SystemExit(3)")
        assert second_opinion.main(words) == 1
    told = capsys.readouterr().err
    assert "aiperf ended with 3" in told and "out of luck" in told


def test_agreement_is_measured_against_our_own_noise() -> None:
    def rounds(tool: float) -> list[dict[str, Figures]]:
        return [
            {
                OURS: Figures(10.0, 0.1, 0.02),
                AGAIN: Figures(10.0 * noise, 0.1 * noise, 0.02 * noise),
                "guidellm": Figures(10.0 * tool * noise, 0.1 * tool, 0.02),
            }
            for noise in (0.97, 0.99, 1.0, 1.01, 1.03)
        ]

    near = second_opinion.report(rounds(1.02))["programs"]["guidellm"]
    far = second_opinion.report(rounds(1.2))["programs"]["guidellm"]
    assert near["requests_per_s"]["agrees"] and near["ttft_s"]["agrees"]
    assert not far["requests_per_s"]["agrees"] and not far["ttft_s"]["agrees"]
    assert far["itl_s"]["agrees"] and far["itl_s"]["ratio"]["median"] == 1.0


def test_what_a_tool_told_is_held_against_the_server_s_own_books() -> None:
    name = second_opinion.BOOKS["ttft_s"]
    pages = [
        f'{name}_sum{{task="a"}} {a}\n{name}_count{{task="a"}} {n}\n'
        f'{name}_sum{{task="b"}} 3.0\n{name}_count{{task="b"}} 1.0\n'
        for a, n in ((1.0, 2.0), (2.0, 6.0))
    ]
    told = iter(f"# TYPE {name} histogram\n{page}" for page in pages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = next(told).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: Any) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        before, after = second_opinion.read_books(url), second_opinion.read_books(url)
        server.shutdown()
        thread.join()
    booked = second_opinion.booked_between(before, after)
    assert booked == {"served_ttft_s": 0.25}

    slowed = Figures(6.0, 0.26, 0.03, served_ttft_s=0.25, served_itl_s=0.03)
    ours = Figures(10.0, 0.1, 0.02, served_ttft_s=0.1, served_itl_s=0.02)
    rounds = [{OURS: ours, AGAIN: ours, "tool": slowed}] * 3
    row = second_opinion.report(rounds)["programs"]["tool"]
    assert not row["ttft_s"]["agrees"]
    assert row["ttft_s"]["of_server"]["median"] == pytest.approx(1.04)
    assert row["itl_s"]["of_server"]["median"] == pytest.approx(1.0)
    assert "of_server" not in row["requests_per_s"]
