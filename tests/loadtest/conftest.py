"""What tests of load tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON line that a program ended in."""
    result: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return result


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Two data sets of four prompts each, "alpha" and "beta"."""
    for name in ("alpha", "beta"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test.jsonl").write_text(
            "".join(
                json.dumps({"id": f"{name}-{i}", "prompt": f"{name} {i}"}) + "\n" for i in range(4)
            )
        )
    return tmp_path
