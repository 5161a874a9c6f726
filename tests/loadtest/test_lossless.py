"""loadtest.lossless end to end, against a scripted server that says the same, or not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from loadtest import lossless
from loadtest.prompts import Example, edited
from tests.loadtest.conftest import Ended
from tests.loadtest.scripted_server import WORDS, ScriptedServer


def lossless_args(url: str, data_dir: Path, drafter: str = "suffix") -> list[str]:
    return ["--server", f"tailor={url}", "--data", str(data_dir), "--limit", "3", "--tokens", "6",
            "--drafter", drafter]  # fmt: skip


def test_lossless_passes_equal_answers(ended: Ended, data_dir: Path) -> None:
    with ScriptedServer(pace_s=0.01) as server:
        result = ended(lossless.main, *lossless_args(server.url, data_dir))
    # 3 prompts x 6 settings x (3 compared with the reference).
    assert (result["num_compared"], result["num_different"]) == (54, 0)
    assert result["forms"]["servers"]["num_accepted"] > 0
    assert 2 <= server.most_open <= 8
    seeds = {(body["prompt"], body["seed"]) for body in server.bodies}
    assert len(seeds) == 3  # the seed is the prompt's, whatever the drafter and the neighbours
    references = [body for body in server.bodies if "cache_salt" in body]
    assert {body["speculation"]["drafter"] for body in references} == {"off"}
    assert len(references) == 18


def test_lossless_sees_one_wrong_token(ended: Ended, data_dir: Path) -> None:
    def lying(body: dict[str, Any]) -> list[str]:
        words = (WORDS * 8)[: body["max_tokens"]]
        on = body["speculation"]["drafter"] == "suffix"
        if on and body["prompt"] == "beta 0" and body.get("n") == 2:
            words[4] = " a much longer word"
        return words

    with ScriptedServer(answer=lying, pace_s=0.0) as server:
        result = ended(lossless.main, *lossless_args(server.url, data_dir), status=1)
    assert result["num_different"] == 2  # alone and together
    first = result["forms"]["servers"]["differences"][0]
    assert (first["task"], first["setting"], first["drafter"]) == ("beta", "n2", "suffix")
    assert first["difference"] == "choice 0, token 4: [5, 4] against [19, 4]"


def test_lossless_with_every_drafter_and_predictions(ended: Ended, data_dir: Path) -> None:
    with ScriptedServer(pace_s=0.0) as server:
        options = lossless_args(server.url, data_dir, "auto,trie,prediction")
        result = ended(lossless.main, *options, "--settings", "greedy", "--together")
    # Per prompt: off twice, the others once; all but the reference are compared.
    assert (len(server.bodies), result["num_compared"]) == (3 * 5, 3 * 4)
    accepted = result["forms"]["servers"]["accepted_by_drafter"]
    assert accepted == {"auto": 9, "trie": 9, "prediction": 9}
    predicted = [body for body in server.bodies if "prediction" in body]
    assert len(predicted) == 3 and not any("speculation" in body for body in predicted)
    told = "".join((WORDS * 8)[:6]).split(" ")
    given = [body["prediction"]["content"].split(" ") for body in predicted]
    assert all(set(words) <= set(told) for words in given)


def test_an_edited_prediction_is_nearly_right() -> None:
    words = [f"w{i}" for i in range(600)]
    other = edited(words, 1 / 6, random.Random(1))
    assert 0.75 < len(set(other)) / len(words) < 0.97
    assert edited(words, 1 / 6, random.Random(1)) == other


def test_lossless_without_accepted_drafts_shows_nothing(data_dir: Path) -> None:
    with ScriptedServer(accepted=0, pace_s=0.0) as server:
        assert lossless.main(lossless_args(server.url, data_dir)) == 3


def answer(logprobs: tuple[float, ...], reason: str = "stop") -> lossless.Answer:
    return lossless.Answer((((1, 2), "ab", reason, logprobs),), 2, 0, 0, 2)


def test_difference_sees_the_last_bit_of_a_logprob_and_the_reason() -> None:
    assert lossless.difference(answer((0.1, 0.2)), answer((0.1, 0.2))) is None
    near = 0.2000000000000000111 + 2**-54
    assert near != 0.2
    found = lossless.difference(answer((0.1, 0.2)), answer((0.1, near)))
    assert found is not None and "logprob 1" in found
    found = lossless.difference(answer(()), answer((), "length"))
    assert found is not None and "finish reason" in found


def test_other_servers_must_say_what_the_first_one_says(ended: Ended, data_dir: Path) -> None:
    def other(body: dict[str, Any]) -> list[str]:
        return [*WORDS[:5], " else"] if body["prompt"] == "alpha 1" else WORDS[:6]

    with ScriptedServer(pace_s=0.0) as server, ScriptedServer(pace_s=0.0, answer=other) as second:
        options = [*lossless_args(server.url, data_dir), "--settings", "greedy"]
        options += ["--at-once", "2,4", "--server", f"tailor-2={second.url}"]
        figures = ended(lossless.main, *options, status=1)["forms"]["servers"]
    # Per prompt: the reference, one with drafts alone, two x two among others; the second all six.
    assert (len(server.bodies), len(second.bodies)) == (3 * 6, 3 * 6)
    assert figures["num_compared"] == 3 * 5 + 3 * 6
    assert {(d["server"], d["example"]) for d in figures["differences"]} == {
        ("tailor-2", "alpha-1")
    }
    assert figures["num_different"] == 6 and server.most_open <= 4


def test_exact_is_compared_with_the_full_head() -> None:
    options = lossless.LosslessOptions(data=Path("x"), exact=True, drafter="auto", at_once="4")
    example = Example("snips", "1", "turn on", "")
    settings = [*lossless.EXACT_SETTINGS]
    first, alone, together = lossless.plan(1, settings, options)
    # Alone and without drafts an exact request is no reference: it is compared too.
    assert (len(first), len(alone), len(together)) == (2, 4, 4)
    reference = lossless.job_body(first[0], example, "m", options, "salt")
    compared = lossless.job_body(alone[0], example, "m", options, None)
    assert "vocabulary" not in reference and compared["vocabulary"] == {"mode": "exact"}
    for key in ("model", "seed", "temperature"):
        assert reference[key] == compared[key]
    assert compared["model"] == "snips"


@pytest.mark.parametrize("words", [["--settings", "none"], ["--limit", "0"], ["--exact"]])
def test_lossless_refuses_bad_arguments(words: list[str], data_dir: Path) -> None:
    given = lossless_args("http://127.0.0.1:9", data_dir)
    if words[0] in given:
        at = given.index(words[0])
        del given[at : at + 2]
    assert lossless.main([*given, *words]) == 2
