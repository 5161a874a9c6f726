from __future__ import annotations

import json

import pytest

from loadtest import step_profile
from tests.loadtest.scripted_server import ScriptedServer


def metrics(steps: float) -> str:
    """What a server says that made `steps` steps of 10 ms, 8 of them model, on two engines."""
    lines = []
    for engine in ("0", "1"):
        labels = f'{{engine="{engine}",model="m"}}'
        for name, each_s in (
            ("step_time", 0.010),
            ("step_model_time", 0.008),
            ("propose_time", 0.0005),
            ("step_host_time", 0.002),
        ):
            lines += [
                f"# HELP tailor_{name}_seconds x",
                f'tailor_{name}_seconds_bucket{{le="0.01"}} 5',
                f"tailor_{name}_seconds_sum{labels} {each_s * steps / 2}",
                f"tailor_{name}_seconds_count{labels} {steps / 2}",
            ]
        lines.append(f"tailor_step_rows_sum{labels} {3 * steps / 2}")
    return "\n".join(lines) + "\n"


def test_means_are_of_the_steps_between_two_readings() -> None:
    before, after = (step_profile.parse_steps(metrics(steps)) for steps in (100, 150))
    found = step_profile.per_step(before, after, wall_s=0.6)
    assert found == pytest.approx(
        {
            "num_steps": 50,
            "rows": 3,
            "wall_ms": 12,
            "step_ms": 10,
            "model_ms": 8,
            "drafter_ms": 0.5,
            "host_ms": 2,
            "outside_ms": 2,
            "overhead_ms": 4,
            "overhead_share": 1 / 3,
        }
    )
    with pytest.raises(ValueError, match="no step"):
        step_profile.per_step(after, after, 1.0)


def test_a_server_is_profiled_between_the_last_start_and_the_first_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ScriptedServer(pace_s=0.005) as server:
        server.metrics = lambda: metrics(server.num_chunks)
        status = step_profile.main(
            ["--url", server.url, "--sequences", "1,2", "--drafters", "off,suffix",
             "--tokens", "20", "--rounds", "1", "--max-load", "1e9"]
        )  # fmt: skip
    figures = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["server"]
    assert status == 0
    assert list(figures) == ["1 x off", "1 x suffix", "2 x off", "2 x suffix"]
    # 20 chunks a stream, the first one before the first reading (two streams may lag a little).
    assert 17 <= figures["1 x off"]["num_steps"] <= 20
    assert 30 <= figures["2 x off"]["num_steps"] <= 40
    assert figures["1 x off"]["wall_ms"] >= 4.5
    assert figures["1 x off"]["model_ms"] == pytest.approx(8)
    asked = {body["speculation"]["drafter"] for body in server.bodies}
    assert asked == {"off", "suffix"}
    assert all(body["ignore_eos"] for body in server.bodies)


def test_something_to_profile_must_be_named() -> None:
    with pytest.raises(SystemExit) as left:
        step_profile.main(["--sequences", "1"])
    assert left.value.code == 2
