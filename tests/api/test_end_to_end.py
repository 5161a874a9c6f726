"""The app over a real socket with the real Engine behind a real channel, on the FakeRunner.

What is asserted here needs all parts: the same text whatever drafts, batches or streams it; stop
strings matched by the engine and cut by the API; counters that equal usage; nothing left behind.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from tests.api.fixtures import over
from tests.api.live import LiveServer, as_key, encode, keyed
from tests.api.real_engine import CONTEXT, spec
from tests.api.test_completions import events, streamed
from tests.api.test_lifecycle import send_request
from tests.api.unharmed import rss_mib
from tests.profiles import examples, share
from tests.waiting import wait_until

server = over(spec(), max_model_len=CONTEXT)
PROMPTS = ["the quick brown fox", "Once upon a time", "SELECT name FROM users", "héllo wörld"]
NUM_TOKENS = 24
VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "top_p": 0.9, "seed": 8, "n": 2},
    {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.3, "seed": 9},
    {"temperature": 0, "repetition_penalty": 1.2, "min_tokens": 8, "logprobs": 3},
    {"temperature": 0.9, "seed": 4, "best_of": 3, "n": 2},
]


def answers(live: LiveServer, **body: Any) -> list[tuple[str, str, Any]]:
    response = live.post(max_tokens=NUM_TOKENS, ignore_eos=True, **body)
    assert response.status_code == 200, response.text
    return [(c["text"], c["finish_reason"], c["logprobs"]) for c in response.json()["choices"]]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))
def test_speculation_batching_and_streaming_never_change_an_answer(
    server: LiveServer, variant: dict[str, Any]
) -> None:
    plain = {
        p: answers(server, prompt=p, speculation={"drafter": "off"}, **variant) for p in PROMPTS
    }
    with ThreadPoolExecutor(6) as threads:
        asked = [*PROMPTS, *PROMPTS[:2]]
        futures = [(p, threads.submit(answers, server, prompt=p, **variant)) for p in asked]
        for p, future in futures:
            assert future.result() == plain[p]
    one_by_one = [choice for p in PROMPTS for choice in plain[p]]
    if "best_of" in variant:  # which has no streams
        assert answers(server, prompt=PROMPTS, **variant) == one_by_one
        return
    stream = server.post(
        prompt=PROMPTS, max_tokens=NUM_TOKENS, ignore_eos=True, stream=True, **variant
    )
    assert streamed(stream) == [text for text, _, _ in one_by_one]


def test_drafts_are_accepted_and_reported_and_sources_agree(server: LiveServer) -> None:
    body = server.post(
        prompt="the quick brown fox", max_tokens=120, temperature=0, ignore_eos=True,
        include_speculation=True, include_token_sources=True,
    ).json()  # fmt: skip
    report, [choice] = body["speculation"], body["choices"]
    assert report["drafter"] == "suffix" and report["accepted_tokens"] > 10
    assert report["mean_tokens_per_step"] == 120 / report["steps"] > 1.2
    assert sum(report["accepted_by_depth"]) == report["accepted_tokens"]
    tokens: dict[str | None, int] = {}
    for run in choice["token_sources"]:
        tokens[run["source"]] = tokens.get(run["source"], 0) + run["tokens"]
    assert sum(tokens.values()) == 120 and tokens.pop(None) == 120 - report["accepted_tokens"]
    by_source = {name: s["accepted_tokens"] for name, s in report["by_source"].items()}
    assert tokens == {name: num for name, num in by_source.items() if num}
    assert "".join(run["text"] for run in choice["token_sources"]) == choice["text"]


def test_stop_strings_cut_the_text_wherever_they_fall(server: LiveServer) -> None:
    options = {"prompt": "the quick", "temperature": 0, "ignore_eos": True, "max_tokens": 40}
    text = server.post(**options).json()["choices"][0]["text"]
    rng = random.Random(3)
    tried = 0
    while tried < 5:
        start = rng.randrange(2, len(text) - 6)
        stop = text[start : start + rng.randrange(1, 6)]
        if "�" in stop:
            continue
        tried += 1
        cut = text[: text.index(stop)]
        for stream in (False, True):
            for include in (False, True):
                response = server.post(
                    stop=[stop, "\x00never"], stream=stream,
                    include_stop_str_in_output=include, **options,
                )  # fmt: skip
                if stream:
                    chunks = events(response)
                    got = "".join(c["choices"][0]["text"] for c in chunks)
                    end = chunks[-1]["choices"][0]
                else:
                    end = response.json()["choices"][0]
                    got = end["text"]
                assert got == cut + (stop if include else "")
                assert (end["finish_reason"], end["stop_reason"]) == ("stop", stop)


def test_prompt_logprobs_are_the_drawn_ones(server: LiveServer) -> None:
    """Scoring a text that was generated gives the logprobs that it was generated with."""
    options = {"temperature": 0, "logprobs": 2, "ignore_eos": True, "return_token_ids": True}
    made = server.post(prompt="the quick", max_tokens=12, **options).json()["choices"][0]
    ids = encode("the quick") + made["token_ids"]
    for max_tokens in (0, 3):
        scored = server.post(prompt=ids, echo=True, max_tokens=max_tokens, **options).json()
        logprobs = scored["choices"][0]["logprobs"]
        at = len(encode("the quick"))
        assert logprobs["token_logprobs"][at : at + 12] == made["logprobs"]["token_logprobs"]
        assert logprobs["top_logprobs"][at : at + 12] == made["logprobs"]["top_logprobs"]
        assert len(logprobs["tokens"]) == len(ids) + max_tokens
        assert scored["usage"]["completion_tokens"] == max_tokens


def test_a_request_that_no_token_satisfies_fails_alone(server: LiveServer) -> None:
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(answers, server, prompt="the quick", temperature=0)
        for body in (
            {"allowed_token_ids": [5], "logit_bias": {"5": -100}},
            {"allowed_token_ids": [0], "min_tokens": 3},  # nothing but EOS, and no EOS
        ):
            response = server.post(**body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["code"] == "constraint_unsatisfiable"
            assert error["param"] == "allowed_token_ids"
            assert error["type"] == "invalid_request_error"
        assert other.result()[0][1] == "length"
    assert server.post(max_tokens=2).status_code == 200


@pytest.mark.slow
def test_thousands_of_choices_of_one_key_leave_another_s_first_token_its_time() -> None:
    """In order of arrival it would wait for 512 steps; at night, of 32,768 choices, for 2,048."""
    step_s = 0.02
    prompts = ["a"] * max(64, examples(256))
    flood = {"prompt": prompts, "n": 128, "max_tokens": 1, "temperature": 1, "stream": True}
    with LiveServer([spec(step_s=step_s)], max_model_len=CONTEXT, config=keyed("a", "b")) as live:
        url = f"{live.url}/v1/completions"

        def first_token_s() -> float:
            body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 1, "stream": True}
            began = time.monotonic()
            asked = httpx.stream("POST", url, json=body, headers=as_key("sk-b"), timeout=30)
            with asked as response:
                assert response.status_code == 200, response.read()
                next(line for line in response.iter_lines() if line.startswith("data: {"))
            return time.monotonic() - began

        unloaded_s = median(first_token_s() for _ in range(9))
        flood["model"] = "tiny"
        with httpx.stream("POST", url, json=flood, headers=as_key("sk-a"), timeout=30) as response:
            assert response.status_code == 200
            next(response.iter_lines())
            loaded_s = median(first_token_s() for _ in range(9))
        # A step, and time for the API, which has two floods of choices to tell on the same core.
        assert loaded_s <= 2 * unloaded_s + 50 * step_s


def test_counters_equal_usage_and_the_kv_cache_is_empty_after() -> None:
    with LiveServer([spec(i=0), spec(i=1)], max_model_len=CONTEXT) as live:

        def one(i: int) -> tuple[dict[str, Any], dict[str, Any]]:
            body = live.post(
                prompt=[PROMPTS[i % 4]] * (1 + i % 2), n=1 + i % 3, max_tokens=5 + i % 40,
                temperature=0.8, include_speculation=True,
                speculation={"drafter": "off" if i % 5 == 0 else "suffix"},
            ).json()  # fmt: skip
            return body["usage"], body["speculation"]

        with ThreadPoolExecutor(8) as threads:
            pairs = list(threads.map(one, range(15)))
        usages, reports = [u for u, _ in pairs], [r for _, r in pairs]

        def total(name: str) -> float:
            return live.sample(f"tailor_{name}_total")

        assert total("generation_tokens") == sum(u["completion_tokens"] for u in usages)
        assert total("prompt_tokens") == sum(u["prompt_tokens"] for u in usages)
        cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
        assert total("prompt_tokens_cached") == cached
        spec_decode = "spec_decode_num_"
        drafted = sum(r["drafted_tokens"] for r in reports)
        accepted = sum(r["accepted_tokens"] for r in reports)
        assert total(spec_decode + "draft_tokens") == drafted > accepted > 0
        assert total(spec_decode + "accepted_tokens") == accepted
        assert total(spec_decode + "accepted_tokens_per_pos") == accepted
        assert total(spec_decode + "draft_tokens_by_source") == drafted
        assert total(spec_decode + "wasted_rows") == drafted - accepted
        assert total(spec_decode + "decode_steps") == sum(r["steps"] for r in reports)
        assert live.sample("tailor_inter_token_latency_seconds_count") + live.sample(
            "tailor_time_to_first_token_seconds_count"
        ) <= total("generation_tokens")
        wait_until(lambda: live.sample("tailor_num_requests_running") == 0)
        wait_until(lambda: live.sample("tailor_kv_cache_usage_perc") == 0)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_many_requests_a_third_of_them_cut_leave_nothing_behind() -> None:
    num = 6000 if share() == 1.0 else 300
    with LiveServer([spec()], max_model_len=CONTEXT) as live:
        cut_off = 0

        def run(client: httpx.Client, i: int) -> None:
            nonlocal cut_off
            prompt = f"request {i} of the quick brown fox"
            if i % 3 == 0:
                s = send_request(live.port, prompt=prompt, max_tokens=60, stream=i % 2 == 0)
                if i % 2 == 0:
                    s.recv(256)
                s.close()
                cut_off += 1
                return
            response = client.post(
                live.url + "/v1/completions",
                json={"model": "tiny", "prompt": prompt, "max_tokens": 3, "stream": i % 2 == 0},
            )
            assert response.status_code == 200

        def many(first: int, last: int) -> None:
            def worker(k: int) -> None:
                with httpx.Client(timeout=30) as client:
                    for i in range(first + k, last, 4):
                        run(client, i)

            threads = [threading.Thread(target=worker, args=(k,)) for k in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            wait_until(lambda: live.client.num_open == 0, 20)
            gc.collect()

        many(0, num // 4)
        memory, handles, num_threads = rss_mib(), open_handles(), threading.active_count()
        many(num // 4, num)
        assert rss_mib() - memory < 8
        wait_until(lambda: open_handles() <= handles + 1)
        assert threading.active_count() <= num_threads
        wait_until(lambda: live.sample("tailor_num_requests_running") == 0)
        wait_until(lambda: live.sample("tailor_kv_cache_usage_perc") == 0)
        assert len(live.client.waiting) == live.client.waiting.num_tokens == 0
        done = live.sample("tailor_request_outcomes_total", outcome="ok")
        gone = live.sample("tailor_request_outcomes_total", outcome="abort")
        assert cut_off == -(-num // 3) and num - cut_off <= done <= num - gone


def open_handles() -> int:
    return len(os.listdir("/proc/self/fd"))
