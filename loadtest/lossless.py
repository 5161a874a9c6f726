"""Does speculation change the text? Real model, real prompts, every way of sampling, bit for bit.

    python -m loadtest.lossless --data DATA_DIR --server tailor=http://127.0.0.1:8000 \\
        --model tailor=my-task --drafter auto,trie,mix,grammys,prompt,suffix,prediction

For each prompt and each setting (greedy; temperature 0.8 with seeds; top_p 0.9; penalties; n = 2)
the completion is asked with every drafter and with none, x {alone, among 8 at once}. The one with
none, alone and with a cold prefix cache, is the reference; the others share a prefix cache. The
drafter "prediction" is the task's own with the reference as `prediction`, some words of it changed,
dropped or added. --together asks the drafters among others only, which takes half the time. Token
ids, text, finish reasons and (unless --no-logprobs) the logprob of every token must be *equal*, to
the last bit: JSON carries a double exactly.

Exits 0 when all are equal, 1 on any difference, 3 when something was not shown: a drafter of which
no draft was accepted was never on. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from loadtest import machine
from loadtest.options import add_server_options, describe_servers, emit, peers_of
from loadtest.peer import (
    Peer,
    PeerFailed,
    ServerKeys,
    bring_down,
    bring_up,
    stop_on_sigterm,
)
from loadtest.prompts import Example, spread_examples

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {
        "temperature": 0.8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
    },
    "n2": {"temperature": 0.8, "n": 2},
}


PREDICTION = "prediction"


@dataclass(frozen=True, slots=True)
class Job:
    """One request: prompt number, setting, drafter and whether others run beside it."""

    prompt_id: int
    setting: str
    drafter: str
    alone: bool

    @property
    def case(self) -> tuple[int, str]:
        return self.prompt_id, self.setting


@dataclass(frozen=True, slots=True)
class Answer:
    """What must be equal. One entry a choice: ids, text, finish reason, logprobs."""

    choices: tuple[tuple[tuple[int, ...], str, str, tuple[float, ...]], ...]
    num_tokens: int
    num_drafted: int
    num_accepted: int
    num_steps: int


def edited(text: str, seed: int) -> str:
    """`text` with a word in six changed, dropped or doubled: a prediction that is nearly right."""
    rng = random.Random(seed)
    words = text.split(" ")
    out: list[str] = []
    for word in words:
        edit = rng.random() * 18
        out += [rng.choice(words)] if edit < 1 else [] if edit < 2 else [word] * (1 + (edit < 3))
    return " ".join(out)


def job_body(
    job: Job,
    prompt: str,
    model: str,
    *,
    max_tokens: int,
    logprobs: bool,
    salt: str | None,
    prediction: str | None = None,
) -> dict[str, Any]:
    """The request of a job. The seed depends on the prompt only, so every drafter meets it."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "seed": 1_000_003 * (job.prompt_id + 1),
        "return_token_ids": True,
        "include_speculation": True,
        **SETTINGS[job.setting],
    }
    if job.drafter != PREDICTION:
        body["speculation"] = {"drafter": job.drafter}
    elif prediction:
        body["prediction"] = {"type": "content", "content": prediction}
    if logprobs:
        body["logprobs"] = 0
    if salt is not None:
        body["cache_salt"] = salt
    return body


def read_answer(response: Mapping[str, Any]) -> Answer:
    """Raises KeyError when the server left out token ids or speculation."""
    choices = sorted(response["choices"], key=lambda choice: choice["index"])
    speculation = response["speculation"]
    return Answer(
        tuple(
            (
                tuple(choice["token_ids"]),
                choice["text"],
                choice["finish_reason"],
                tuple((choice.get("logprobs") or {}).get("token_logprobs") or ()),
            )
            for choice in choices
        ),
        response["usage"]["completion_tokens"],
        speculation["drafted_tokens"],
        speculation["accepted_tokens"],
        speculation["steps"],
    )


def difference(reference: Answer, other: Answer) -> str | None:
    """Where two answers differ first, in words; None when they are equal."""
    if len(reference.choices) != len(other.choices):
        return f"{len(reference.choices)} choices, {len(other.choices)} choices"
    for index, (a, b) in enumerate(zip(reference.choices, other.choices, strict=True)):
        if a == b:
            continue
        ids_a, ids_b = a[0], b[0]
        if ids_a != ids_b:
            at = next(
                (i for i, (x, y) in enumerate(zip(ids_a, ids_b, strict=False)) if x != y),
                min(len(ids_a), len(ids_b)),
            )
            return (
                f"choice {index}, token {at}: {list(ids_a[at : at + 3])} against "
                f"{list(ids_b[at : at + 3])}"
            )
        for name, x, y in zip(("text", "finish reason", "logprobs"), a[1:], b[1:], strict=True):
            if x != y:
                if name != "logprobs":
                    return f"choice {index}, {name}: {x!r} against {y!r}"
                at = next(
                    (i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q),
                    min(len(x), len(y)),
                )
                return f"choice {index}, logprob {at}: {x[at : at + 1]} against {y[at : at + 1]}"
    return None


def plan(
    num_prompts: int, settings: Sequence[str], drafters: Sequence[str], *, together_only: bool
) -> tuple[list[Job], list[Job]]:
    """(jobs run one at a time, jobs run several at once); the second list is shuffled, so that
    neighbours differ in prompt, setting and drafter."""
    cases = [(prompt_id, setting) for prompt_id in range(num_prompts) for setting in settings]
    every = ("off", *drafters)
    alone = [Job(p, s, d, True) for p, s in cases for d in (every[:1] if together_only else every)]
    together = [Job(p, s, d, False) for p, s in cases for d in every]
    random.Random(0).shuffle(together)
    return alone, together


@dataclass(frozen=True, slots=True)
class Asked:
    """What is compared. num_at_once: of the jobs that run beside others. logprobs: compared too."""

    examples: Sequence[Example]
    settings: Sequence[str]
    drafters: Sequence[str]
    together_only: bool
    num_at_once: int
    max_tokens: int
    logprobs: bool


class Comparison:
    """One run of all jobs: the references, what differs from them, and counts."""

    def __init__(self, peer: Peer, asked: Asked, console: Console) -> None:
        self._peer = peer
        self._asked = asked
        self._console = console
        self._salt = f"{time.time_ns():x}"
        self.reference: dict[tuple[int, str], Answer] = {}
        self.differences: list[dict[str, Any]] = []
        self.totals = {"tokens": 0, "drafted": 0, "accepted": 0, "steps_on": 0, "tokens_on": 0}
        self.accepted = dict.fromkeys(asked.drafters, 0)

    async def run(self, client: httpx.AsyncClient, job: Job) -> None:
        """Ask, count, and compare. Raises PeerFailed when the server refuses."""
        is_reference = job.alone and job.drafter == "off"
        response = await client.post(
            f"{self._peer.url}/v1/completions", json=self._body(job, is_reference)
        )
        if response.status_code != 200:
            raise PeerFailed(f"HTTP {response.status_code}: {response.text[:300]}")
        answer = read_answer(response.json())
        self.totals["tokens"] += answer.num_tokens
        self.totals["drafted"] += answer.num_drafted
        self.totals["accepted"] += answer.num_accepted
        if job.drafter != "off":
            self.accepted[job.drafter] += answer.num_accepted
            self.totals["steps_on"] += answer.num_steps
            self.totals["tokens_on"] += answer.num_tokens
        if is_reference:
            self.reference[job.case] = answer
        elif (found := difference(self.reference[job.case], answer)) is not None:
            example = self._asked.examples[job.prompt_id]
            self.differences.append(
                {
                    "task": example.task,
                    "example": example.example_id,
                    "setting": job.setting,
                    "drafter": job.drafter,
                    "alone": job.alone,
                    "difference": found,
                }
            )
            self._console.print(f"DIFFERENT: {self.differences[-1]}", markup=False)

    def _body(self, job: Job, is_reference: bool) -> dict[str, Any]:
        prediction = None
        if job.drafter == PREDICTION:
            prediction = edited(self.reference[job.case].choices[0][1], job.prompt_id)
        body = job_body(
            job,
            self._asked.examples[job.prompt_id].prompt,
            self._peer.model,
            max_tokens=self._asked.max_tokens,
            logprobs=self._asked.logprobs,
            salt=f"{self._salt}-{job.prompt_id}-{job.setting}" if is_reference else None,
            prediction=prediction,
        )
        return body | self._peer.extra

    def figures(self, num_compared: int) -> dict[str, Any]:
        """Counts and every difference as JSON values."""
        asked, totals = self._asked, self.totals
        return {
            "num_prompts": len(asked.examples),
            "settings": list(asked.settings),
            "drafters": list(asked.drafters),
            "accepted_by_drafter": self.accepted,
            "num_at_once": asked.num_at_once,
            "max_tokens": asked.max_tokens,
            "logprobs_compared": asked.logprobs,
            "num_compared": num_compared,
            "num_different": len(self.differences),
            "differences": self.differences[:50],
            "num_tokens": totals["tokens"],
            "num_drafted": totals["drafted"],
            "num_accepted": totals["accepted"],
            "mean_tokens_per_step_on": (
                totals["tokens_on"] / totals["steps_on"] if totals["steps_on"] else None
            ),
        }


async def check(peer: Peer, asked: Asked, console: Console) -> dict[str, Any]:
    """Run all jobs; the figures and every difference as JSON values."""
    alone, together = plan(
        len(asked.examples), asked.settings, asked.drafters, together_only=asked.together_only
    )
    done = Comparison(peer, asked, console)
    async with httpx.AsyncClient(timeout=900.0, auth=ServerKeys([peer])) as client:
        with Progress(console=console) as progress:
            bar = progress.add_task("alone", total=len(alone) + len(together))

            async def run(job: Job) -> None:
                await done.run(client, job)
                where = "alone" if job.alone else "together"
                told = f"{where} ({len(done.differences)} differ)"
                progress.update(bar, advance=1, description=told)

            for job in alone:
                await run(job)
            gate = asyncio.Semaphore(asked.num_at_once)

            async def gated(job: Job) -> None:
                async with gate:
                    await run(job)

            await asyncio.gather(*(gated(job) for job in together))
    return done.figures(len(alone) + len(together) - len(done.reference))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lossless",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server_options(parser)
    parser.add_argument("--data", type=Path, required=True, help="folder of task data sets")
    parser.add_argument("--limit", type=int, default=100, help="prompts (default 100)")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument(
        "--drafter", default="suffix", help="drafters with commas, and prediction (default suffix)"
    )
    parser.add_argument(
        "--together", action="store_true", help="with drafters, ask among others only"
    )
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--max-prompt-chars", type=int, default=1500)
    parser.add_argument("--no-logprobs", action="store_true", help="compare ids and text only")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    settings = options.settings.split(",")
    try:
        peers = peers_of(options)
        if len(peers) != 1:
            raise ValueError("one --server is checked at a time")
        unknown = set(settings) - set(SETTINGS)
        if unknown:
            raise ValueError(f"no setting {unknown}; there are {', '.join(SETTINGS)}")
        if min(options.limit, options.at_once, options.tokens) < 1:
            raise ValueError("--limit, --at-once and --tokens want at least 1")
        examples = spread_examples(
            options.data, options.limit, max_prompt_chars=options.max_prompt_chars
        )
        if not examples:
            raise ValueError(f"no */test.jsonl with short enough prompts in {options.data}")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    console = Console(stderr=True, width=120)
    about = machine.describe()
    stop_on_sigterm()
    began = time.perf_counter()
    try:

        async def run() -> dict[str, Any]:
            await bring_up(peers, options.log_dir)
            return await check(
                peers[0],
                Asked(
                    examples,
                    settings,
                    options.drafter.split(","),
                    together_only=options.together,
                    num_at_once=options.at_once,
                    max_tokens=options.tokens,
                    logprobs=not options.no_logprobs,
                ),
                console,
            )

        figures = asyncio.run(run())
        servers = describe_servers(peers)
    except (PeerFailed, httpx.HTTPError, KeyError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        bring_down(peers)
    result = {
        "tool": "lossless",
        "machine": about,
        "servers": servers,
        **figures,
        "wall_s": round(time.perf_counter() - began, 1),
    }
    verdict = f"{figures['num_different']} of {figures['num_compared']} answers differ"
    console.print(f"{verdict}; {figures['num_accepted']} draft tokens accepted")
    emit(result, options.json)
    if figures["num_different"]:
        return 1
    return 0 if all(figures["accepted_by_drafter"].values()) else 3


if __name__ == "__main__":
    sys.exit(main())
