"""Is the text the same, bit for bit? Real model, real prompts, every way of sampling.

    python -m loadtest.lossless --data DATA_DIR --drafter auto,trie,mix,grammys,prompt,suffix
    python -m loadtest.lossless --data DATA_DIR --form file,int8,int4,float32 --exact
    python -m loadtest.lossless --data DATA_DIR --server tailor=http://127.0.0.1:8000 \\
        --server other=http://127.0.0.1:8001

For each prompt and each setting (greedy; temperature 0.8 with seeds; top_p 0.9; penalties; n = 2; a
JSON schema) the completion is asked with every drafter and with none, x {alone, among others}. The
one with none, alone and with a cold prefix cache, is the reference; the others share a prefix
cache. The drafter "prediction" is the task's own with the reference as `prediction`, some words of
it changed, dropped or added. --together asks the drafters among others only, which takes half the
time. Token ids, text, finish reasons and the logprob of every token must be *equal*, to the last
bit: JSON carries a double exactly.

Without --server it starts Tailor itself, once for each form of the weights (--form), each with its
own references. --exact adds two settings there: greedy and sampled requests that draw with a
vocabulary slice and verify with the full head, beside references of the full head; the slices come
from the sets' train.jsonl. With several servers the references are the first one's, and the others
must say the same: another instruction set, another machine, another commit.

Exits 0 when all are equal, 1 on any difference, 3 when something was not shown: a drafter of which
no draft was accepted was never on. Ends in one JSON line.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from loadtest.figures import first_difference
from loadtest.options import (
    ResultOptions,
    ServerOptions,
    ask_servers,
    describe_machine,
    describe_servers,
    emit,
    listed,
    numbers,
    program,
)
from loadtest.peer import Peer, PeerFailed, ServerKeys, tailor_peer
from loadtest.prompts import (
    SCHEMA,
    Example,
    data_sets,
    edited,
    make_profile,
    spread_examples,
    write_task,
)
from server.commands.options import as_options

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
    "schema": {
        "temperature": 0.8,
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA},
        },
    },
}  # fmt: skip
EXACT: dict[str, Any] = {"vocabulary": {"mode": "exact"}}
EXACT_SETTINGS = {f"exact, {name}": SETTINGS[name] | EXACT for name in ("greedy", "temperature")}
PREDICTION = "prediction"

app, main = program("lossless", __doc__)


@as_options
class LosslessOptions:
    """What is asked."""

    data: Annotated[Path, Parameter(help="folder of task data sets")]
    form: Annotated[
        str, Parameter(metavar="FORM,...", help="start Tailor with each form of the weights")
    ] = "auto"
    tailor_model: Annotated[str, Parameter(help="the model that is started")] = (
        "smollm2-135m-instruct"
    )
    serve: Annotated[str, Parameter(help="more options of `tailor serve`, in one string")] = ""
    exact: Annotated[bool, Parameter(help="slices verified by the full head, too")] = False
    limit: Annotated[int, Parameter(help="prompts")] = 100
    settings: str = ",".join(SETTINGS)
    drafter: Annotated[str, Parameter(help="drafters with commas, and prediction")] = "auto"
    together: Annotated[bool, Parameter(help="with drafters, ask among others only")] = False
    at_once: Annotated[str, Parameter(metavar="N,...", help="requests beside each other")] = "8"
    tokens: int = 48
    max_prompt_chars: int = 1500


_SERVERS, _RESULTS = ServerOptions(), ResultOptions()


@dataclass(frozen=True, slots=True)
class Job:
    """One request: prompt number, setting, drafter, how many run beside it (1: none), and the
    number of the server."""

    prompt_id: int
    setting: str
    drafter: str
    at_once: int
    server: int = 0

    @property
    def case(self) -> tuple[int, str]:
        """What a reference is of."""
        return self.prompt_id, self.setting


@dataclass(frozen=True, slots=True)
class Answer:
    """What must be equal. One entry a choice: ids, text, finish reason, logprobs."""

    choices: tuple[tuple[tuple[int, ...], str, str, tuple[float, ...]], ...]
    num_tokens: int
    num_drafted: int
    num_accepted: int
    num_steps: int


def job_body(
    job: Job, example: Example, model: str, options: LosslessOptions, salt: str | None,
    prediction: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The request of a job. The seed depends on the prompt only, so every drafter meets it. salt:
    of a reference, which is of the full head."""
    body: dict[str, Any] = {
        "model": example.task if options.exact else model,
        "prompt": example.prompt,
        "max_tokens": options.tokens,
        "seed": 1_000_003 * (job.prompt_id + 1),
        "return_token_ids": True,
        "include_speculation": True,
        "logprobs": 0,
        **(SETTINGS | EXACT_SETTINGS)[job.setting],
    }
    if job.drafter != PREDICTION:
        body["speculation"] = {"drafter": job.drafter}
    elif prediction:
        body["prediction"] = {"type": "content", "content": prediction}
    if salt is not None:
        body["cache_salt"] = salt
        body.pop("vocabulary", None)
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
    names = ("token", "text", "finish reason", "logprob")
    for index, pair in enumerate(zip(reference.choices, other.choices, strict=True)):
        for name, a, b in zip(names, *pair, strict=True):
            if a == b:
                continue
            if isinstance(a, str):
                return f"choice {index}, {name}: {a!r} against {b!r}"
            at = first_difference(a, b)
            shown = f"{list(a[at : at + 3])} against {list(b[at : at + 3])}"
            return f"choice {index}, {name} {at}: {shown}"
    return None


def plan(
    num_prompts: int, settings: Sequence[str], options: LosslessOptions, num_servers: int = 1
) -> list[list[Job]]:
    """Jobs in the order of their groups: the references; the others alone; those of each number at
    once, shuffled, so that neighbours differ in prompt, setting and drafter."""
    cases = [(prompt_id, setting) for prompt_id in range(num_prompts) for setting in settings]
    every = ("off", *listed(options.drafter))
    first = [Job(p, s, "off", 1) for p, s in cases]
    alone = [
        Job(p, s, d, 1, server)
        for server in range(num_servers)
        for p, s in cases
        for d in (every[:1] if options.together else every)
        # An exact request without drafts and alone is not its reference: that is the full head's.
        if server or d != "off" or s in EXACT_SETTINGS
    ]
    groups = [first, alone]
    for num in numbers(options.at_once, "--at-once"):
        group = [
            Job(p, s, d, num, server)
            for server in range(num_servers)
            for p, s in cases
            for d in every
        ]
        random.Random(num).shuffle(group)
        groups.append(group)
    return groups


class Comparison:
    """One run of all jobs: the references, what differs from them, and counts."""

    def __init__(
        self, peers: Sequence[Peer], examples: Sequence[Example], settings: Sequence[str],
        options: LosslessOptions, console: Console,
    ) -> None:  # fmt: skip
        self._peers = peers
        self._examples = examples
        self._settings = settings
        self._options = options
        self._console = console
        self._salt = f"{time.time_ns():x}"
        self.reference: dict[tuple[int, str], Answer] = {}
        self.differences: list[dict[str, Any]] = []
        self.num_compared = 0
        self.totals = {"num_tokens": 0, "num_drafted": 0, "num_accepted": 0}
        self._steps_on = self._tokens_on = 0
        self.accepted = dict.fromkeys(listed(options.drafter), 0)

    async def run(self) -> None:
        """Ask everything. Raises PeerFailed when a server refuses."""
        groups = plan(len(self._examples), self._settings, self._options, len(self._peers))
        with Progress(console=self._console) as progress:
            bar = progress.add_task("references", total=sum(map(len, groups)))
            async with httpx.AsyncClient(timeout=900.0, auth=ServerKeys(self._peers)) as client:

                async def a_client(waiting: Iterator[Job], is_reference: bool) -> None:
                    for job in waiting:
                        await self._ask(client, job, is_reference)
                        where = f"{job.at_once} at once ({len(self.differences)} differ)"
                        progress.update(bar, advance=1, description=where)

                for number, jobs in enumerate(groups):
                    waiting, num = iter(jobs), jobs[0].at_once if jobs else 0
                    await asyncio.gather(*(a_client(waiting, number == 0) for _ in range(num)))

    async def _ask(self, client: httpx.AsyncClient, job: Job, is_reference: bool) -> None:
        """Ask, count, and compare."""
        peer, example = self._peers[job.server], self._examples[job.prompt_id]
        salt = f"{self._salt}-{job.prompt_id}-{job.setting}" if is_reference else None
        prediction = None
        if job.drafter == PREDICTION:
            words = self.reference[job.case].choices[0][1].split(" ")
            prediction = " ".join(edited(words, 1 / 6, random.Random(job.prompt_id)))
        body = job_body(job, example, peer.model, self._options, salt, prediction) | peer.extra
        response = await client.post(f"{peer.url}/v1/completions", json=body)
        if response.status_code != 200:
            raise PeerFailed(f"{peer.name}: HTTP {response.status_code}: {response.text[:300]}")
        answer = read_answer(response.json())
        for name in self.totals:
            self.totals[name] += getattr(answer, name)
        if job.drafter != "off":
            self.accepted[job.drafter] += answer.num_accepted
            self._steps_on += answer.num_steps
            self._tokens_on += answer.num_tokens
        if is_reference:
            self.reference[job.case] = answer
            return
        self.num_compared += 1
        if (found := difference(self.reference[job.case], answer)) is not None:
            self.differences.append(
                {
                    "server": peer.name,
                    "task": example.task,
                    "example": example.example_id,
                    "setting": job.setting,
                    "drafter": job.drafter,
                    "at_once": job.at_once,
                    "difference": found,
                }
            )
            self._console.print(f"DIFFERENT: {self.differences[-1]}", markup=False)

    def figures(self) -> dict[str, Any]:
        """Counts and every difference as JSON values."""
        return {
            "accepted_by_drafter": self.accepted,
            "num_compared": self.num_compared,
            "num_different": len(self.differences),
            "differences": self.differences[:50],
            **self.totals,
            "mean_tokens_per_step_on": (
                self._tokens_on / self._steps_on if self._steps_on else None
            ),
        }


@app.default
def lossless(
    *,
    options: LosslessOptions,
    servers: ServerOptions = _SERVERS,
    results: ResultOptions = _RESULTS,
) -> int:
    """Ask everything, and compare. Raises ValueError for what cannot be asked, PeerFailed."""
    given, settings = servers.peers(), listed(options.settings)
    if unknown := set(settings) - set(SETTINGS):
        raise ValueError(f"no setting {sorted(unknown)}; there are {', '.join(SETTINGS)}")
    if min(options.limit, options.tokens) < 1:
        raise ValueError("--limit and --tokens want at least 1")
    if options.exact and given:
        raise ValueError("--exact makes tasks for servers of its own: leave --server out")
    names = data_sets(options.data) if options.exact else None
    examples = spread_examples(
        options.data, options.limit, max_prompt_chars=options.max_prompt_chars, names=names
    )
    if not examples:
        raise ValueError(f"no */test.jsonl with short enough prompts in {options.data}")
    settings += list(EXACT_SETTINGS) if options.exact else []
    console, about, began = Console(stderr=True, width=120), describe_machine(), time.perf_counter()
    found: dict[str, Any] = {}
    with TemporaryDirectory(prefix="lossless-") as place:
        folder = Path(place)
        for name in dict.fromkeys(e.task for e in examples) if options.exact else ():
            profile, train = folder / "profiles" / f"{name}.vocab", options.data / name
            make_profile(options.tailor_model, train / "train.jsonl", profile, 1000)
            write_task(folder, name, profile=profile)
        sides = {"": given} if given else {
            form: [tailor_peer("tailor", options.tailor_model,
                               f"--weights {form} --tasks {folder} {options.serve}")]
            for form in listed(options.form)
        }  # fmt: skip
        for form, peers in sides.items():
            comparison = Comparison(peers, examples, settings, options, console)
            ask_servers(peers, servers.log_dir, comparison.run)
            figures = comparison.figures()
            found[form or "servers"] = figures | {"servers": describe_servers(peers)}
            verdict = f"{figures['num_different']} of {figures['num_compared']} answers differ"
            console.print(f"{form} {verdict}; {figures['num_accepted']} draft tokens accepted")
    result = {
        "num_prompts": len(examples),
        "settings": settings,
        "drafters": listed(options.drafter),
        "at_once": options.at_once,
        "max_tokens": options.tokens,
        "num_different": sum(one["num_different"] for one in found.values()),
        "num_compared": sum(one["num_compared"] for one in found.values()),
        "forms": found,
        "wall_s": round(time.perf_counter() - began, 1),
    }
    emit("lossless", result, results.json, about)
    if result["num_different"]:
        return 1
    shown = all(all(one["accepted_by_drafter"].values()) for one in found.values())
    return 0 if shown else 3


if __name__ == "__main__":
    sys.exit(main())
