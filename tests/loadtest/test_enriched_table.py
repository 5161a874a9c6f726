"""Both programs about enriched ids: what they say of two adapters agrees with itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.enriched_load import main as load
from loadtest.enriched_table import main
from server.commands.cli import main as tailor
from tests.model.tiny_models import save_tiny

pytest.importorskip("peft")

# peft 0.21 asks transformers 5.23 by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def test_both_adapters_are_measured_on_the_same_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TAILOR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "tiny").mkdir()
    save_tiny(tmp_path / "tiny", "llama")
    data = tmp_path / "train.jsonl"
    lines = [
        {"prompt": f"{'abcdefgh'[i % 8]}:", "completion": f" !!ok!! {'xy'[i % 2]} ##"}
        for i in range(60)
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shared = ["--model", str(tmp_path / "tiny"), "--data", str(data)]
    tokens = tmp_path / "tokens.json"
    assert tailor(["tasks", "enrich", *shared, "--tokens", "4", "-o", str(tokens)]) == 0
    recipe = ["--epochs", "12", "--learning-rate", "0.02", "--rows-learning-rate", "0.05",
              "--batch-size", "8", "--rank", "4", "--dropout", "0"]  # fmt: skip
    for name, more in (("base", []), ("own", ["--enrichment", str(tokens)])):
        words = ["tasks", "train", *shared, *recipe, *more, "-o", str(tmp_path / name)]
        assert tailor(words) == 0
    capsys.readouterr()
    arguments = [
        "--model", str(tmp_path / "tiny"), "--base", str(tmp_path / "base"),
        "--enriched", str(tmp_path / "own"), "--train", str(data), "--test", str(data),
        "--prompts", "8", "--tokens", "24", "--budgets", "2,4", "--starts", "4",
    ]  # fmt: skip
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])

    base, own = found["base"], found["enriched"]
    assert own["exact"]["num"] == 8 and own["f1"]["mean"] > 0.5
    for metric in ("exact", "f1"):
        both = own[metric]["mean"] - base[metric]["mean"]
        assert found["difference"][metric]["mean"] == pytest.approx(both)
    assert base["ids"] == base["base_ids"]
    assert own["fewest_ids"] <= own["ids"] < 0.7 * own["base_ids"]
    assert 0.5 < own["adoption"] <= 1.0
    for side in (base, own):
        assert side["passes"]["0"] == pytest.approx(side["ids"])
        assert side["passes"]["16"] < side["passes"]["0"]
    assert found["budgets"]["4"]["ids"] < 0.6 * found["budgets"]["0"]["ids"]
    assert set(found["nats_before"]) == {"mean", "leaning"}

    words = ["--clients", "1,3", "--least", "3", "--rounds", "2", "--max-load", "99"]
    arguments = [*arguments[:10], *words]
    assert load([*arguments, "--tokens", "24"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["enriched_load"]
    assert set(found) == {"1", "3"}
    for cases in found.values():
        assert cases["base, off"]["of_base_off"]["median"] == 1.0
        assert cases["enriched, auto"]["text_ids_per_s"] > 0
        assert cases["enriched, off"]["kv"] < cases["base, off"]["kv"]
        assert cases["base, auto"]["kv"] == cases["base, off"]["kv"], "drafts change no text"
        assert cases["base, off"]["nodes_per_step"] == 0.0
        assert cases["base, off"]["ids_per_step"] == 1.0
    alone = found["1"]["base, auto"]
    assert alone["nodes_per_step"] >= alone["accepted_per_step"] > 0.5, "drafts are made"
    assert alone["ids_per_step"] == pytest.approx(1 + alone["accepted_per_step"], abs=0.02)

    with pytest.raises(SystemExit):
        main(["--train", str(data), "--test", str(data), "--base", str(tmp_path / "base")])
