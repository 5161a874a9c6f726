"""`tailor replay`: recorded outputs fed through a drafter (drafters.replay does the work)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def replay(
    *,
    drafter: Annotated[str, Parameter(metavar="NAME", help="the drafter")],
    data: Annotated[
        Path, Parameter(metavar="FILE", help="JSON lines with prompt_ids and output_ids")
    ],
    corpus: Annotated[
        Path | None, Parameter(metavar="FILE", help="for the drafters that use one")
    ] = None,
    max_draft_tokens: Annotated[int, Parameter(help="nodes a step (16)")] = 16,
    limit: Annotated[int | None, Parameter(help="only the first N recordings")] = None,
    prefill: Annotated[
        bool, Parameter(help="the first tree hangs off the last prompt row")
    ] = False,
    option: Annotated[
        tuple[str, ...],
        Parameter(metavar="NAME=VALUE", help="a drafter's parameter; may be repeated"),
    ] = (),
) -> int:
    from drafters.replay import main

    words = ["--drafter", drafter, "--data", str(data), "--budget", str(max_draft_tokens)]
    words += ["--corpus", str(corpus)] if corpus is not None else []
    words += ["--limit", str(limit)] if limit is not None else []
    words += ["--prefill"] if prefill else []
    for pair in option:
        words += ["--option", pair]
    return main(words)
