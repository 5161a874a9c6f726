"""Replay: recorded outputs through a drafter, no model run, tokens per step over all steps.

    python -m drafters.replay --drafter auto --corpus task.corpus --data recorded.jsonl

Each line of the data is {"prompt_ids": [...], "output_ids": [...]}; an output that ended by itself
ends with its EOS id. Verification is exact: the tree's longest path that the output follows is
accepted, and the step emits one token more (the bonus token), unless the output ends. The last
line printed is JSON.

Two ways: *first token given* (the prefill step emits one token and carries no tree: what most
papers report) and *first tree in prefill* (a tree hangs off the last prompt row).

Two units, the same as in a server's answers: `decode_tokens_per_step` is output tokens after the
first over the decode steps behind the prefill step; `mean_tokens_per_step` counts that step and its
token as well, and is nearer to 1 the shorter the outputs are. No speculation is exactly 1 in both.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from drafters import DRAFTER_NAMES, Drafter, make_drafter
from drafters.base import DraftSession, LikelySession
from drafters.tree import DraftTree, followed


@dataclass(frozen=True, slots=True)
class Recording:
    """One request as it went: ids of prompt and output (its EOS id included if it ended).

    likely_ids, likely_chances: what the model held likeliest at each token of the output, where
    that was recorded (loadtest.replay); else empty. It is not recorded for rejected nodes.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    likely_ids: Sequence[Sequence[int]] = ()
    likely_chances: Sequence[Sequence[float]] = ()


@dataclass(slots=True)
class ReplayResult:
    """Sums over the recordings.

    num_tokens, num_steps: per recording: tokens after the first, and decode steps behind the
    prefill step. offered_by_depth[d], accepted_by_depth[d]: drafts with a node at depth d + 1, and
    drafts whose accepted path got there. by_source: nodes drafted and accepted.
    propose_s, extend_s: seconds of each propose, and of extend per token.
    """

    drafter: str
    budget: int
    in_prefill: bool
    num_tokens: list[int] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    offered_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)
    propose_s: list[float] = field(default_factory=list)
    extend_s: list[float] = field(default_factory=list)

    @property
    def decode_tokens_per_step(self) -> float:
        """Over all steps behind the prefill step, drafted or not, without the first token; the
        number of tokens when there was no step at all."""
        return sum(self.num_tokens) / max(1, sum(self.num_steps))

    @property
    def mean_tokens_per_step(self) -> float:
        """The prefill step and its token count as well."""
        num = len(self.num_steps)
        return (sum(self.num_tokens) + num) / max(1, sum(self.num_steps) + num)

    def summary(self) -> dict[str, Any]:
        """Plain values for the JSON line. Times in microseconds, medians."""

        def median_us(seconds: list[float]) -> float:
            return round(1e6 * float(np.median(seconds)), 2) if seconds else 0.0

        return {
            "drafter": self.drafter,
            "budget": self.budget,
            "first_tree_in_prefill": self.in_prefill,
            "recordings": len(self.num_steps),
            "tokens": sum(self.num_tokens),
            "steps": sum(self.num_steps),
            "decode_tokens_per_step": round(self.decode_tokens_per_step, 4),
            "mean_tokens_per_step": round(self.mean_tokens_per_step, 4),
            "drafted": self.num_drafted,
            "accepted": self.num_accepted,
            "acceptance_by_depth": [
                round(accepted / offered, 4)
                for accepted, offered in zip(
                    self.accepted_by_depth, self.offered_by_depth, strict=True
                )
            ],
            "by_source": {
                name: {"drafted": drafted, "accepted": accepted}
                for name, (drafted, accepted) in self.by_source.items()
            },
            "propose_us": median_us(self.propose_s),
            "extend_us_per_token": median_us(self.extend_s),
        }


def replay(
    drafter: Drafter,
    recordings: Iterable[Recording],
    *,
    budget: int = 16,
    max_depth: int = 32,
    in_prefill: bool = False,
) -> ReplayResult:
    """Feed recordings through `drafter`, one after the other, as an engine would.

    Sessions are settled after each step; feedback is given before extend. Depth is bounded by the
    tokens that are left to generate only through max_depth, as for a request without a limit.
    """
    result = ReplayResult(drafter.name, budget, in_prefill)
    sources: Sequence[str] = getattr(drafter, "sources", (drafter.name,))
    drafted_by, accepted_by = Counter[int](), Counter[int]()
    clock = time.perf_counter
    for recording in recordings:
        output = recording.output_ids
        if not output:
            continue
        session = drafter.open(recording.prompt_ids)
        session.settle()
        position = 0
        num_steps = 0
        while position < len(output):
            is_prefill = position == 0
            tree = DraftTree.empty()
            if in_prefill or not is_prefill:
                start = clock()
                tree = session.propose(budget, max_depth)
                result.propose_s.append(clock() - start)
            accepted = followed(tree.children(), output[position:])
            num = min(len(accepted) + 1, len(output) - position)
            note_rows(session, recording, position, num)
            session.feedback(tree, accepted)
            emitted = [int(token) for token in output[position : position + num]]
            start = clock()
            session.extend(emitted)
            result.extend_s.append((clock() - start) / num)
            session.settle()
            position += num
            num_steps += not is_prefill
            if len(tree):
                _count(result, tree, accepted)
                of = tree.source.tolist()  # empty where the drafter does not say
                drafted_by.update(of)
                accepted_by.update(of[node] for node in accepted if of)
        session.close()
        result.num_tokens.append(len(output) - 1)
        result.num_steps.append(num_steps)
    for source, drafted in sorted(drafted_by.items()):
        result.by_source[sources[source]] = (drafted, accepted_by[source])
    return result


def note_rows(session: DraftSession, recording: Recording, position: int, num: int) -> None:
    """Give a LikelySession the rows of the next `num` tokens of a recording."""
    if not recording.likely_ids or not getattr(session, "num_likely", 0):
        return
    rows = slice(position, position + num)
    width = max(len(ids) for ids in recording.likely_ids)
    ids = np.full((num, width), -1, np.int32)
    chances = np.zeros((num, width), np.float32)
    for row, (own, of) in enumerate(
        zip(recording.likely_ids[rows], recording.likely_chances[rows], strict=True)
    ):
        ids[row, : len(own)], chances[row, : len(of)] = own, of
    path = [int(token) for token in recording.output_ids[position : position + num - 1]]
    parents = range(-1, num - 2)
    cast("LikelySession", session).note_likely(path, parents, ids, chances)


def _count(result: ReplayResult, tree: DraftTree, accepted: list[int]) -> None:
    result.num_drafted += len(tree)
    result.num_accepted += len(accepted)
    deepest = int(tree.depths().max())
    more = [0] * (deepest - len(result.offered_by_depth))
    result.offered_by_depth += more
    result.accepted_by_depth += more
    for depth in range(deepest):
        result.offered_by_depth[depth] += 1
        result.accepted_by_depth[depth] += depth < len(accepted)


def read_recordings(path: Path | str) -> Iterator[Recording]:
    """Recordings of a JSON-lines file. Raises ValueError naming the line that is not one."""
    with Path(path).open() as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                prompt, output = entry["prompt_ids"], entry["output_ids"]
                good = all(type(token) is int and token >= 0 for token in (*prompt, *output))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a recording: {error}") from error
            if not good or not prompt:
                raise ValueError(
                    f"{path}, line {number}: ids must be integers, the prompt not empty"
                )
            likely = entry.get("likely_ids", ()), entry.get("likely_chances", ())
            yield Recording(prompt, output, *likely)


def _option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main(argv: Sequence[str] | None = None, name: str = "replay") -> int:
    """The command. name: what its errors begin with. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m drafters.replay", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--drafter",
        required=True,
        help=f"one of {', '.join(DRAFTER_NAMES[1:])}, or module:callable for one of your own",
    )
    parser.add_argument("--data", required=True, type=Path, help="recordings, JSON lines")
    parser.add_argument("--corpus", type=Path, help="a corpus file, for the drafters that use one")
    parser.add_argument("--budget", type=int, default=16, help="nodes a step (default 16)")
    parser.add_argument("--max-depth", type=int, default=32, help="deepest node (default 32)")
    parser.add_argument("--limit", type=int, help="replay only the first N recordings")
    parser.add_argument("--prefill", action="store_true", help="first tree off the last prompt row")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args(argv)
    if min(arguments.budget, arguments.max_depth, arguments.limit or 0) < 0:
        parser.error("--budget, --max-depth and --limit are 0 or more")
    try:
        options = dict(map(_option, arguments.option))
        if arguments.corpus is not None:
            from drafters.corpus import Corpus

            options["corpus"] = Corpus.load(arguments.corpus, fingerprint=None)
        if ":" in arguments.drafter:
            module, _, attribute = arguments.drafter.partition(":")
            drafter = getattr(importlib.import_module(module), attribute)(**options)
        else:
            drafter = make_drafter(arguments.drafter, **options)
        recordings = list(read_recordings(arguments.data))[: arguments.limit]
        if not recordings:
            raise ValueError(f"{arguments.data}: no recordings")
    except (OSError, ValueError, ImportError, AttributeError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    result = replay(
        drafter,
        recordings,
        budget=arguments.budget,
        max_depth=arguments.max_depth,
        in_prefill=arguments.prefill,
    )
    summary = result.summary()
    print(
        f"{summary['decode_tokens_per_step']:.3f} tokens per decode step over {summary['steps']} "
        f"steps; {summary['mean_tokens_per_step']:.3f} with the step that ends the prompt"
    )
    for depth, share in enumerate(summary["acceptance_by_depth"], 1):
        print(f"  depth {depth:2d}: accepted in {100 * share:.1f} % of the drafts that reach it")
    for name, counts in summary["by_source"].items():
        print(f"  {name}: {counts['accepted']} of {counts['drafted']} nodes accepted")
    print(
        f"  propose {summary['propose_us']} us, extend {summary['extend_us_per_token']} us a token"
    )
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
