"""`tailor complete`: one completion, streamed to a terminal, accepted drafts in colour.

Every source of drafts has a colour; tokens that the model drew without a draft have none. Where the
output is no terminal the text is written as it is, without colours.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from server.client.http import Endpoint, Tally, events

COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "bright_red")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def complete(
    endpoint: Endpoint,
    body: dict[str, Any],
    *,
    out: Console,
    note: Console,
    timeout_s: float = 600.0,
    clock: Callable[[], float] = time.monotonic,
) -> Tally:
    """Stream a completion to `out` and a line of figures to `note`; what it added up to.

    body: of POST /v1/completions, without the fields of streaming. Raises CallFailedError.
    """
    body = {
        **body,
        "stream": True,
        "stream_options": {"include_usage": True},
        "include_speculation": True,
        "include_token_sources": True,
    }
    tally, colours = Tally(), _Colours()
    num_drawn = 0
    started_s = clock()
    first_s: float | None = None
    shown = ""
    for chunk in events(endpoint, "/completions", body, timeout_s):
        for choice in chunk.get("choices", ()):
            if first_s is None:
                first_s = clock()
            for run in choice.get("token_sources", ()):
                num_drawn += run["tokens"] if run["source"] is None else 0
                shown = run["text"] or shown
                if out.is_terminal:
                    text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", run["text"])
                    style = colours.of(run["source"])
                    out.print(Text(text, style=style), end="", soft_wrap=True)
                else:
                    out.file.write(run["text"])
            out.file.flush()
        if not chunk.get("choices"):
            tally.add(chunk)
    if not shown.endswith("\n"):
        out.file.write("\n")
        out.file.flush()
    wall_s = clock() - started_s
    rate = tally.num_tokens / wall_s if wall_s > 0 else 0.0
    line = Text(
        f"{tally.num_tokens} tokens in {wall_s:.2f} s (first after "
        f"{(first_s or clock()) - started_s:.2f} s): {rate:.1f} tokens/s, {tally.summary()}"
    )
    if tally.by_source:
        line.append(f"; {num_drawn} drawn without a draft")
    for source, style in colours.chosen.items():
        line.highlight_words([source], style)
    note.print(line, soft_wrap=True)
    return tally


class _Colours:
    """A colour for each source, in the order of their appearance."""

    def __init__(self) -> None:
        self.chosen: dict[str, str] = {}

    def of(self, source: str | None) -> str:
        if source is None:
            return ""
        if source not in self.chosen:
            self.chosen[source] = COLOURS[len(self.chosen) % len(COLOURS)]
        return self.chosen[source]
