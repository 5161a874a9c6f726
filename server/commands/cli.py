"""`tailor`: the command line. Commands are one row each here and one function in a file by noun.

A command's module is imported when the command is called, and numpy and torch inside its function,
so that `tailor --help` answers at once. What reads the words is imported when they are read, so
that `serve` takes signals from its first moment on.

Exit status: 0 when the command succeeded, 1 when it failed (the reason is on stderr), 2 for a wrong
command line, 130 when it was interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from drafters.target import NATIVE, chosen, runs_here
from server import __version__
from server.errors import ConfigError, TailorError
from server.machine import has_terminal

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError


class Command(NamedTuple):
    """One command. words: its name after `tailor`. function: "module:function", below
    server.commands. what: one line of help. example: a command line that works."""

    words: str
    function: str
    what: str
    example: str


GROUPS = {  # what each is for, and an example
    "tasks": ("Work with task files.", "tailor tasks check configs/tasks"),
    "models": ("Work with models.", "tailor models fetch gemma-3-270m"),
    "adapters": ("Work with a running server's adapters.", "tailor adapters list"),
    "corpus": ("Work with a task's corpus.", "tailor corpus show task.corpus"),
    "vocab": ("Work with vocabulary profiles.", "tailor vocab show task.vocab"),
    "fleet": ("Serve with many replicas on many machines.", "tailor fleet up cluster.yaml"),
}

COMMANDS = (
    Command(
        "serve",
        "serve:serve",
        "run the server",
        "tailor serve --model smollm2-135m-instruct --tasks configs/tasks --port 8000",
    ),
    Command(
        "tasks check",
        "tasks:check",
        "check every task file of a folder; a problem names file, line and key",
        "tailor tasks check configs/tasks",
    ),
    Command(
        "tasks make",
        "make:make",
        "make a served task of a file of examples: analyze, enrich, train, tune, evaluate. The "
        "plan and what it takes are shown first; started again, it goes on where it stopped",
        "tailor tasks make train.jsonl --name slots",
    ),
    Command(
        "tasks tune",
        "tasks:tune",
        "make a task's file from its data: build its corpus, replay every drafter and node budget "
        "on a part that is held back, and choose by what this machine's steps cost",
        "tailor tasks tune --model smollm2-135m-instruct --data train.jsonl --name slots",
    ),
    Command(
        "tasks pack",
        "tasks:pack",
        "put a task into one file: its YAML, corpus, profile and their hashes",
        "tailor tasks pack configs/tasks/slots.yaml",
    ),
    Command(
        "tasks unpack",
        "tasks:unpack",
        "take a packed task apart into a folder of task files; damage is told",
        "tailor tasks unpack slots.tailor-task --tasks configs/tasks",
    ),
    Command(
        "tasks analyze",
        "enrich:analyze",
        "measure how a task's outputs repeat, and say what would make it fast",
        "tailor tasks analyze --model smollm2-135m-instruct --data train.jsonl",
    ),
    Command(
        "tasks enrich",
        "enrich:enrich",
        "find tokens of a task's own: the n-grams of its outputs that save most ids (TASC-ft)",
        "tailor tasks enrich --data train.jsonl -o slots.enrichment.json",
    ),
    Command(
        "tasks train",
        "train:train",
        "fine-tune an adapter for a task (LoRA), with tokens of its own where there are some; "
        "started again, it goes on where it stopped",
        "tailor tasks train --data train.jsonl --enrichment slots.enrichment.json -o slots-adapter",
    ),
    Command(
        "models list",
        "models:list_models",
        "list the models, built-in ones and those on this machine, with sizes and places",
        "tailor models list",
    ),
    Command(
        "models show",
        "models:show",
        "show a model that is on this machine: its place, size and shape, whether it is supported",
        "tailor models show smollm2-135m-instruct",
    ),
    Command(
        "models fetch",
        "models:fetch",
        "fetch and convert a model now, and print its folder",
        "tailor models fetch gemma-3-270m",
    ),
    Command(
        "models prior",
        "models:prior",
        "learn what a model says next from texts that it writes itself, so that `auto` drafts "
        "where no text is known; half an hour of two cores, once a model",
        "tailor models prior smollm2-135m-instruct",
    ),
    Command(
        "models rm",
        "models:remove",
        "remove a model's copy from this machine; folders of your own stay",
        "tailor models rm gemma-3-270m",
    ),
    Command(
        "adapters list",
        "client:list_adapters",
        "list the adapters that a running server has beside its models",
        "tailor adapters list",
    ),
    Command(
        "adapters add",
        "client:add",
        "make a running server serve an adapter; needs an admin key",
        "tailor adapters add slots slots-adapter",
    ),
    Command(
        "adapters rm",
        "client:remove",
        "make a running server serve an adapter no more; needs an admin key",
        "tailor adapters rm slots",
    ),
    Command(
        "run",
        "client:run",
        "answer a file of prompts through a running server; started again, it goes on where it "
        "stopped",
        "tailor run --task extraction --data prompts.jsonl --output answers.jsonl",
    ),
    Command(
        "eval",
        "evaluate:evaluate",
        "say how good a file of answers, or a running server, is on a task's data: exact match, "
        "token F1, ROUGE-L, JSON fields, with intervals",
        "tailor eval --task extraction --data test.jsonl --answers answers.jsonl",
    ),
    Command(
        "complete",
        "client:complete",
        "stream one completion of a running server, accepted drafts in colour by source",
        'tailor complete --task extraction --max-tokens 40 "Birthplace:"',
    ),
    Command(
        "record",
        "record:record",
        "record a running server's outputs for a file of prompts, for `replay`, `corpus build` and "
        "`tasks tune`; an interrupted run goes on where it stopped",
        "tailor record --task extraction --data prompts.jsonl -o recorded.jsonl",
    ),
    Command(
        "corpus build",
        "corpus:build",
        "build a task's corpus from its training data",
        "tailor corpus build --model smollm2-135m-instruct --data train.jsonl "
        "--field completion -o task.corpus",
    ),
    Command(
        "corpus show",
        "corpus:show",
        "show what a corpus holds",
        "tailor corpus show task.corpus --model smollm2-135m-instruct",
    ),
    Command(
        "corpus generate",
        "record:generate",
        "run a model over prompts and keep its outputs, for `corpus build`, `tasks tune` and "
        "`replay`; an interrupted run goes on where it stopped. With --url a running Tailor "
        "server is asked instead of loading the model here",
        "tailor corpus generate --model smollm2-135m-instruct --data prompts.jsonl -o own.jsonl",
    ),
    Command(
        "corpus bigrams",
        "corpus:bigrams",
        "take a model's own bigrams, for the drafter grammys (speculation.grammys.table)",
        "tailor corpus bigrams --model smollm2-135m-instruct -o smollm2.bigrams",
    ),
    Command(
        "replay",
        "record:replay",
        "feed recorded outputs through a drafter and print its tokens per step",
        "tailor replay --drafter auto --corpus task.corpus --data recorded.jsonl",
    ),
    Command(
        "vocab profile",
        "vocab:profile",
        "find the vocabulary that a task's outputs need (VocabTailor's Algorithm 1)",
        "tailor vocab profile --model gemma-3-270m --data train.jsonl --language en -o task.vocab",
    ),
    Command(
        "vocab show",
        "vocab:show",
        "show what a vocabulary profile holds",
        "tailor vocab show task.vocab",
    ),
    Command(
        "fleet up",
        "fleet:up",
        "run a fleet: replicas of the engines and of the API on Ray Serve, here or on a cluster",
        "tailor fleet up cluster.yaml",
    ),
    Command(
        "fleet check",
        "fleet:check",
        "check a cluster.yaml and all that it names; a problem names file, line and key",
        "tailor fleet check cluster.yaml",
    ),
    Command(
        "doctor",
        "doctor:doctor",
        "say what a server would find here, a line a finding: cores, memory, caches, models, "
        "tasks, port",
        "tailor doctor --config configs/server.yaml",
    ),
    Command(
        "cache",
        "doctor:cache",
        "show what Tailor keeps on this machine, and remove parts of it",
        "tailor cache --clear costs",
    ),
    Command(
        "completion",
        "cli:completion",
        "print what makes a shell complete tailor's commands and options",
        "tailor completion bash",
    ),
    Command("version", "cli:version", "print the version", "tailor version"),
)

OLD_COMMANDS = {"task": "tasks"}
OLD_OPTIONS = {
    "run": {"--in": "--data", "--out": "--output"},
    "replay": {"--budget": "--max-draft-tokens"},
    "tasks tune": {"--num-prompts": "--limit"},
}
"""Earlier names of commands and options; they still work and are not shown."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    words = _new_names(sys.argv[1:] if argv is None else argv)
    if words[:1] != ["serve"]:
        if argv is None:  # what ends it, too, takes half-written files away
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        return _run(words)
    with _early_signals():
        return _run(_without_taken(words))


def _run(words: Sequence[str]) -> int:
    try:
        try:
            target = chosen()  # told before what asks it is imported
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if target.name != NATIVE and not runs_here(target):
            raise ConfigError(f"TAILOR_CPU={target.name}: this machine's CPU does not run it")
        app = build_app()
        chain, apps, rest = app.parse_commands(words)
        if apps[-1].default_command is None and not rest:  # half a command
            app.help_print(list(chain), console=app.error_console)
            return 2
        status: int | None = app(words, result_action="return_value")
        return status or 0  # --help and --version return nothing
    except TailorError as error:
        for line in error.message.splitlines():
            print(f"tailor: {line}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `tailor models list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


@contextlib.contextmanager
def _early_signals() -> Iterator[None]:
    """Until the server takes SIGTERM and SIGHUP itself. SIGTERM ends it and what it has begun: the
    first process of a container gets no signal that it does not catch. SIGHUP waits until then,
    where it is not the end of a terminal: a supervisor asks for a reload. It waits in threads that
    begin from here on, so what is imported before brings none (numpy does)."""
    waits = set() if has_terminal() else {signal.SIGHUP}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waits)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        for number in waits:  # one that still waits is dropped
            signal.signal(number, signal.signal(number, signal.SIG_IGN))
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def build_app() -> App:
    """The whole command line; the README is tested against it."""
    from cyclopts import App, Parameter

    app = App(
        name="tailor",
        help="An OpenAI-compatible inference server for small models that do tasks.",
        help_epilogue="example: tailor serve --model smollm2-135m-instruct",
        help_format="plaintext",
        version=__version__,
        default_parameter=Parameter(negative=(), show_default=False),
        suppress_keyboard_interrupt=False,
        error_formatter=_told,
    )
    groups = {
        name: App(name=name, help=what, help_epilogue=f"example: {example}")
        for name, (what, example) in GROUPS.items()
    }
    for place, command in enumerate(COMMANDS):
        group_name, _, name = command.words.rpartition(" ")
        parent = groups[group_name] if group_name else app
        if group_name not in ("", *app):
            parent.sort_key = place
            app.command(parent)
        parent.command(
            f"server.commands.{command.function}",
            name=name,
            help=f"{command.what[:1].upper()}{command.what[1:]}.",
            help_epilogue=f"example: {command.example}",
            sort_key=place,
        )
    return app


def parse(words: Sequence[str]) -> Callable[..., Any]:
    """The function that a command line calls, without calling it. Raises CycloptsError."""
    function, _, _ = build_app().parse_args(
        _new_names(words), exit_on_error=False, print_error=False
    )
    return function


def version() -> int:
    print(__version__)
    return 0


def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    print(build_app().generate_completion(shell=shell))
    return 0


OPTIONS_OF_OTHERS = {
    "-m": "--model",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-t": "--threads",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "--lora": "--adapter",
    "--lora-modules": "models[].adapters of a server.yaml (--config)",
    "--enable-lora": "models[].adapters of a server.yaml (--config)",
    "--quantization": "--weights",
    "--gpu-memory-utilization": "--kv-cache-memory",
    "--kv-cache-dtype": "engine.kv_cache_dtype of a server.yaml (--config)",
    "--chat-template": "chat_template.jinja in the model's folder",
    "--cache-type-k": "engine.kv_cache_dtype of a server.yaml (--config)",
    "--model-path": "--model",
    "--context-length": "--max-model-len",
}
"""What `serve` calls options of vLLM, llama.cpp and SGLang."""

_TRUE, _ONE = ("", "true"), ("1",)
TAKEN_OF_OTHERS: Mapping[str, tuple[str, ...]] = {
    "--enable-auto-tool-choice": _TRUE,
    "--tool-call-parser": (),  # the model's chat template says how it writes calls
    "--trust-remote-code": _TRUE,  # no code of a model is run, and none is needed
    "--disable-log-requests": _TRUE,  # no prompt and no output is ever logged
    "--no-enable-log-requests": _TRUE,
    "--disable-log-stats": _TRUE,
    "--tensor-parallel-size": _ONE,
    "-tp": _ONE,
    "--pipeline-parallel-size": _ONE,
    "--data-parallel-size": _ONE,
    "--enable-prefix-caching": _TRUE,
    "--enable-chunked-prefill": _TRUE,
    "--enforce-eager": _TRUE,
    "--load-format": ("auto", "safetensors", "gguf"),
    "--tokenizer-mode": ("auto",),
    "--task": ("auto", "generate"),
    "--runner": ("auto", "generate"),
    "--swap-space": ("0",),
    "--n-gpu-layers": ("0",),
    "-ngl": ("0",),
    "--gpu-layers": ("0",),
    "--jinja": _TRUE,
    "--cont-batching": _TRUE,
    "-cb": _TRUE,
    "--metrics": _TRUE,
    "--slots": _TRUE,
    "--no-slots": _TRUE,
    "--flash-attn": ("", "auto", "on"),
    "-fa": ("", "auto", "on"),
    "--mlock": _TRUE,
}
"""Options of theirs that ask for what is so anyway, with the values that do: "" is none, () any."""


def _without_taken(words: Sequence[str]) -> list[str]:
    """A command line of `serve` without the options of TAKEN_OF_OTHERS. One with another value
    stays, and is refused by its name."""
    rest: list[str] = []
    coming = list(reversed(words))
    while coming:
        word = coming.pop()
        name, equals, value = word.partition("=")
        if name in TAKEN_OF_OTHERS:
            values = TAKEN_OF_OTHERS[name]
            if (
                not equals
                and coming
                and (coming[-1] in values if values else coming[-1][:1] != "-")
            ):
                value = coming.pop()
            if value in values if values else value:
                continue
        rest.append(word)
    return rest


def _told(error: CycloptsError) -> str:
    from cyclopts import UnknownOptionError, UnusedCliTokensError

    serves = tuple(error.command_chain or ()) == ("serve",)
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        rest = " ".join(error.unused_tokens)
        near = f" A model is given as --model {error.unused_tokens[0]}." if serves else ""
        return f"tailor: No option takes {rest!r}.{near}"
    if isinstance(error, UnknownOptionError) and serves:
        name = (error.token.keyword or error.token.value).partition("=")[0]
        if name in OPTIONS_OF_OTHERS:
            return f"tailor: Unknown option: {name}. Here it is {OPTIONS_OF_OTHERS[name]}."
        if name in TAKEN_OF_OTHERS:
            values = " or ".join(value or "no value" for value in TAKEN_OF_OTHERS[name])
            return f"tailor: Unknown option: {name}. It is taken with {values or 'a value'} only."
    return f"tailor: {error}"


def _new_names(words: Sequence[str]) -> list[str]:
    """A command line with today's names in place of earlier ones."""
    if not words:
        return []
    first, second = OLD_COMMANDS.get(words[0], words[0]), (*words, "")[1]
    options = OLD_OPTIONS.get(first) or OLD_OPTIONS.get(f"{first} {second}", {})
    rest = [word.partition("=") for word in words[1:]]
    return [first, *(options.get(name, name) + equals + value for name, equals, value in rest)]


if __name__ == "__main__":
    sys.exit(main())
