"""Replay counts every step, and its command ends with one line of JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafters.replay import Recording, main, read_recordings, replay
from drafters.tree import DraftTree, followed
from tests.fakes.fake_drafters import FakeDrafter, chain, tree_of


def scripted(trees: list[DraftTree]) -> FakeDrafter:
    """Proposes the trees it is given, one a step."""
    return FakeDrafter(lambda *_: trees.pop(0))


def test_steps_are_counted_drafted_or_not() -> None:
    # Output 1 2 3 4 5 6 7: prefill gives 1; "2 3" accepted + 4; nothing drafted: 5; 6 wrong: 6;
    # 7 accepted, and the output ends without a bonus token.
    trees = [
        chain([2, 3, 9]),
        DraftTree.empty(),
        chain([8]),
        chain([7, 7]),
    ]
    drafter = scripted(trees)
    result = replay(drafter, [Recording([0], [1, 2, 3, 4, 5, 6, 7])], budget=4)
    assert result.num_tokens == [6] and result.num_steps == [4]
    assert result.decode_tokens_per_step == 1.5
    assert result.mean_tokens_per_step == 7 / 5  # the prefill step and its token count there
    assert (result.num_drafted, result.num_accepted) == (6, 3)
    assert result.offered_by_depth == [3, 2, 1]
    assert result.accepted_by_depth == [2, 1, 0]
    (session,) = drafter.sessions
    told = [(1, []), (2, [0, 1]), (5, []), (6, []), (7, [0])]
    assert session.told == told, "each before what came is added"
    assert session.tokens == [*range(8)]


def test_a_tree_in_the_prefill_step_saves_decode_steps() -> None:
    drafter = scripted([chain([1, 2]), DraftTree.empty()])
    result = replay(drafter, [Recording([0], [1, 2, 3, 4])], budget=4, in_prefill=True)
    assert result.num_tokens == [3] and result.num_steps == [1]


def test_the_longest_path_is_followed() -> None:
    tree = tree_of([4, 5, 6, 5], [-1, 0, 1, -1], [0.5, 0.4, 0.3, 0.2])
    assert followed(tree.children(), [4, 5, 9]) == [0, 1]
    assert followed(tree.children(), [5]) == [3]
    assert followed(tree.children(), [9]) == followed(tree.children(), []) == []


def test_recordings_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt_ids": [1], "output_ids": [2]}\n\n{"prompt_ids": [1]}\n')
    with pytest.raises(ValueError, match="line 3: not a recording"):
        list(read_recordings(path))
    path.write_text('{"prompt_ids": [1, true], "output_ids": [2]}\n')
    with pytest.raises(ValueError, match="line 1: ids must be integers"):
        list(read_recordings(path))


def test_the_command_ends_with_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.jsonl"
    line = json.dumps({"prompt_ids": [1, 2, 3, 4, 5], "output_ids": [1, 2, 3, 4, 5, 0]})
    path.write_text(line + "\n")
    assert main(["--drafter", "suffix", "--data", str(path), "--budget", "8"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["tokens"] == 5 and summary["steps"] == 1
    assert summary["by_source"]["prompt"]["accepted"] == 4
    assert main(["--drafter", "nothing", "--data", str(path)]) == 2
    assert "unknown drafter" in capsys.readouterr().err
    assert main(["--drafter", "prompt", "--data", str(path), "--option", "num_tokens=2"]) == 0
    assert main(["--drafter", "prompt", "--data", str(path), "--option", "speed=2"]) == 2
    for option in ("--limit", "--budget", "--max-depth"):
        with pytest.raises(SystemExit):
            main(["--drafter", "prompt", "--data", str(path), option, "-1"])
        told = capsys.readouterr().err
        assert option in told.splitlines()[-1] and told.endswith("are 0 or more\n")
    path.write_text("\n")
    assert main(["--drafter", "prompt", "--data", str(path)]) == 2
    assert f"{path}: no recordings" in capsys.readouterr().err
