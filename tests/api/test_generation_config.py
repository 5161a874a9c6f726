"""Sampling where request and task are silent comes from the model's generation_config.json."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.config import SamplingDefaults, TaskConfig
from server.wiring.model import sampling_defaults
from tests.api.live import served
from tests.api.orders import completion, orders

MODEL = SamplingDefaults(temperature=0.7, top_k=20, top_p=0.8, min_p=0.1, repetition_penalty=1.1)
TASK = TaskConfig(name="greedy", sampling=SamplingDefaults(temperature=0.0, top_k=0))


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({}, (0.7, 20, 0.8, 0.1, 1.1)),
        ({"temperature": 0.2, "top_k": -1, "repetition_penalty": 1.0}, (0.2, 0, 0.8, 0.1, 1.0)),
        ({"model": "greedy"}, (0.0, 0, 0.8, 0.1, 1.1)),
        ({"model": "greedy", "temperature": 1.0}, (1.0, 0, 0.8, 0.1, 1.1)),
    ],
)
def test_request_task_model(body: dict[str, Any], wanted: tuple[float, ...]) -> None:
    takes = orders(TASK, models=[replace(served(), sampling=MODEL)])
    got = completion(takes, **body).requests[0].sampling
    assert (got.temperature, got.top_k, got.top_p, got.min_p, got.repetition_penalty) == wanted


def test_what_is_read_of_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "generation_config.json"
    assert sampling_defaults(tmp_path) == SamplingDefaults()
    raw = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": None, "eos_token_id": [1, 2]}
    file.write_text(json.dumps(raw))
    assert sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.7, top_k=20, top_p=0.8)
    assert "temperature 0.7" in caplog.text
    for bad in ("[]", "{", '{"temperature": "hot"}', '{"top_p": 7}'):
        caplog.clear()
        file.write_text(bad)
        assert sampling_defaults(tmp_path) == SamplingDefaults()
        assert "is not used" in caplog.text, bad
