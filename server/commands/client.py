"""`tailor run`, `tailor complete` and `tailor adapters ...`: a running server, from the command
line."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from server.client.bulk import BulkOutcome, answer_file
from server.client.http import Endpoint, Tally, events, tell
from server.client.http import call as request
from server.commands.options import Bar, CallOptions, OutputFile, PromptField, bounded

_CALL = CallOptions()
_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "bright_red")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

TaskName = Annotated[str, Parameter(metavar="NAME", help="a task, or a model")]
MaxTokens = Annotated[int | None, bounded("longest output (the task's)", gte=1)]


def run(
    *,
    task: TaskName,
    data: Annotated[
        Path,
        Parameter(
            metavar="FILE",
            help="JSON lines: a string, or an object with prompt or messages, id, and request for "
            "further fields of its request; or CSV or Parquet with a prompt",
        ),
    ],
    output: OutputFile,
    concurrency: Annotated[int, bounded("requests open at once (8)", gte=1)] = 8,
    retries: Annotated[int, bounded("times a line is tried again (10)", gte=0)] = 10,
    max_tokens: MaxTokens = None,
    prompt_field: PromptField = "prompt",
    call: CallOptions = _CALL,
) -> int:
    outcome, began_s = BulkOutcome(), time.monotonic()

    def told() -> None:
        rate = outcome.tally.num_tokens / max(1e-9, time.monotonic() - began_s)
        failed = f", {outcome.num_failed} failed" if outcome.num_failed else ""
        bar("answering", outcome.num_done, outcome.num_lines, note=f", {rate:.0f} tokens/s{failed}")

    with Bar() as bar:
        try:
            answer_file(
                call.endpoint(), task, data, output, outcome, concurrency=concurrency,
                max_retries=retries, timeout_s=call.timeout, max_tokens=max_tokens,
                prompt_field=prompt_field, on_progress=told,
            )  # fmt: skip
        except KeyboardInterrupt:
            bar.say("Stopped. The same command goes on from here.")
            raise
        finally:
            for line in outcome.summary() if outcome.num_done else ():
                bar.say(line)
    return 1 if outcome.num_failed else 0


def complete(
    prompt: Annotated[
        str, Parameter(allow_leading_hyphen=True, help="the prompt; - reads it from stdin")
    ],
    /,
    *,
    task: TaskName,
    max_tokens: MaxTokens = None,
    temperature: Annotated[float | None, bounded("0 is greedy (the task's)", gte=0, lte=2)] = None,
    seed: Annotated[int | None, Parameter(help="of the draws, with a temperature")] = None,
    drafter: Annotated[
        str | None, Parameter(metavar="NAME", help="default: the task's; off drafts none")
    ] = None,
    call: CallOptions = _CALL,
) -> int:
    body: dict[str, Any] = {"model": task, "prompt": sys.stdin.read() if prompt == "-" else prompt}
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    body |= {name: value for name, value in given.items() if value is not None}
    if drafter is not None:
        body["speculation"] = {"drafter": drafter}
    stream(
        call.endpoint(),
        body,
        out=Console(highlight=False),
        note=Console(stderr=True, highlight=False),
        timeout_s=call.timeout,
    )
    return 0


def stream(
    endpoint: Endpoint,
    body: dict[str, Any],
    *,
    out: Console,
    note: Console,
    timeout_s: float = 600.0,
) -> Tally:
    """Stream a completion to `out` and a line of figures to `note`; what it added up to.

    Every source of accepted drafts has a colour; tokens that the model drew without a draft have
    none. Where the output is no terminal the text is written as it is, without colours.

    body: of POST /v1/completions, without the fields of streaming. Raises CallFailedError.
    """
    body = {
        **body,
        "stream": True,
        "stream_options": {"include_usage": True},
        "include_speculation": True,
        "include_token_sources": True,
    }
    tally, colours = Tally(), dict[str, str]()
    num_drawn = 0
    started_s = time.monotonic()
    first_s: float | None = None
    shown = ""

    def style_of(source: str | None) -> str:
        """A colour for each source, in the order of their appearance."""
        num = len(colours)
        return "" if source is None else colours.setdefault(source, _COLOURS[num % len(_COLOURS)])

    for chunk in events(endpoint, "/completions", body, timeout_s):
        for choice in chunk.get("choices", ()):
            if first_s is None:
                first_s = time.monotonic()
            for run in choice.get("token_sources", ()):
                num_drawn += run["tokens"] if run["source"] is None else 0
                shown = run["text"] or shown
                if out.is_terminal:
                    text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", run["text"])
                    style = style_of(run["source"])
                    out.print(Text(text, style=style), end="", soft_wrap=True)
                else:
                    out.file.write(run["text"])
            out.file.flush()
        if not chunk.get("choices"):
            tally.add(chunk)
    if not shown.endswith("\n"):
        out.file.write("\n")
        out.file.flush()
    ended_s = time.monotonic()
    wall_s = ended_s - started_s
    rate = tally.num_tokens / wall_s if wall_s > 0 else 0.0
    line = Text(
        f"{tally.num_tokens} tokens in {wall_s:.2f} s (first after "
        f"{(first_s or ended_s) - started_s:.2f} s): {rate:.1f} tokens/s, {tally.summary()}"
    )
    if tally.by_source:
        line.append(f"; {num_drawn} drawn without a draft")
    for source, style in colours.items():
        line.highlight_words([source], style)
    note.print(line, soft_wrap=True)
    return tally


# --- adapters -------------------------------------------------------------------------------------


def list_adapters(*, call: CallOptions = _CALL) -> int:
    models = request(call.endpoint(), "GET", "/models", timeout_s=call.timeout)["data"]
    found = [m for m in models if m.get("parent") and m["root"] != m["parent"]]
    for model in found:
        print(f"{model['id']}\tof {model['parent']}\t{model['root']}")
    if not found:
        print("the server has no adapters")
    return 0


def add(
    name: Annotated[str, Parameter(help="what the `model` field of a request will call it")],
    folder: Annotated[Path, Parameter(help="folder that PEFT saved, on the server's machine")],
    /,
    *,
    model: Annotated[
        str | None, Parameter(metavar="NAME", help="the model it is beside (the server's first)")
    ] = None,
    pinned: Annotated[bool, Parameter(help="it stays in memory")] = False,
    force: Annotated[bool, Parameter(help="replace one of the same name")] = False,
    call: CallOptions = _CALL,
) -> int:
    body = {
        "lora_name": name,
        "lora_path": str(folder.expanduser().absolute()),
        "load_inplace": force,
        "base_model_name": model,
        "pinned": pinned,
    }
    print(tell(call.endpoint(), "/load_lora_adapter", body, call.timeout))
    return 0


def remove(
    name: Annotated[str, Parameter(help="of an adapter that the server has")],
    /,
    *,
    call: CallOptions = _CALL,
) -> int:
    body = {"lora_name": name}
    print(tell(call.endpoint(), "/unload_lora_adapter", body, call.timeout))
    return 0
