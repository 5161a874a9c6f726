"""`tailor tasks`: task files, checked and made."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from server.commands.data import FieldOptions, chat_render
from server.commands.options import (
    ModelOptions,
    SamplingOptions,
    sampling_of,
)
from server.commands.own_engine import OwnTokenizer, own_engine
from server.commands.progress import Bar, duration
from server.config import DEFAULT_TASKS
from server.errors import ConfigError

if TYPE_CHECKING:
    from server.api.served_model import ServedModel
    from server.commands.tune_data import TuneSettings
    from server.engine.engine import Engine

_MODEL, _FIELDS, _SAMPLING = ModelOptions(), FieldOptions(), SamplingOptions()


def check(
    folder: Annotated[Path, Parameter(name="DIR", help="folder of *.yaml files")],
    /,
    *,
    config: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="server.yaml, to check the tasks' models too"),
    ] = None,
) -> int:
    from drafters import DRAFTER_NAMES
    from server.config import load_server_config, load_tasks

    models: tuple[str, ...] = ()
    if config is not None:
        models = tuple(model.name for model in load_server_config(config).models)
    tasks = load_tasks(folder, models, DRAFTER_NAMES)
    for task in tasks.values():
        print(f"{task.name:24} {task.speculation.drafter:8} {task.description}")
    return 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class RecordOptions:
    """Which outputs the drafts are replayed on."""

    outputs: Annotated[
        Literal["gold", "model"],
        Parameter(
            help="judge drafts by the model's own outputs, recorded now, or by the data's (model)"
        ),
    ] = "model"
    limit: Annotated[int, Parameter(help="most prompts to record (200)")] = 200
    record_seconds: Annotated[
        float,
        Parameter(metavar="S", help="record for so long at most; what is there then is used (180)"),
    ] = 180.0
    serve_seconds: Annotated[
        float,
        Parameter(
            metavar="S",
            help="serve with drafts and without for so long at most; 0: forecast alone (60)",
        ),
    ] = 60.0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFile:
    """The file that is made."""

    name: Annotated[str, Parameter(help="the task's name")]
    description: Annotated[str, Parameter(metavar="TEXT", help="goes into the file")] = ""
    served_model_name: Annotated[
        str | None,
        Parameter(metavar="NAME", help="the task's model in server.yaml (the server's first)"),
    ] = None
    output: Annotated[
        Path | None,
        Parameter(
            name=("--output", "-o"),
            metavar="FILE",
            help=f"the task file ({DEFAULT_TASKS}/NAME.yaml); its corpus goes beside it",
        ),
    ] = None
    force: Annotated[bool, Parameter(help="replace a file that is there")] = False

    def path(self) -> Path:
        """Where the task file goes. Raises ConfigError for a place or name that cannot be."""
        from server.commands.tune_data import kept_file
        from server.config import TaskConfig

        output = self.output or DEFAULT_TASKS / f"{self.name}.yaml"
        if output.suffix not in (".yaml", ".yml"):
            raise ConfigError(f"{output}: a task file ends in .yaml")
        # An interrupted run goes on with its own file; tune_data.Kept looks whether it is this.
        if output.exists() and not self.force and not kept_file(output).exists():
            raise ConfigError(f"{output}: is there already; --force replaces it")
        try:
            TaskConfig(name=self.name, description=self.description)
        except ValueError:
            raise ConfigError(f"--name: {self.name!r} cannot be a task's name") from None
        return output


def tune(
    *,
    data: Annotated[
        Path,
        Parameter(
            metavar="FILE",
            help="JSON lines, CSV or Parquet with a prompt and a completion, or messages; or "
            "recordings",
        ),
    ],
    file: TaskFile,
    fields: FieldOptions = _FIELDS,
    recording: RecordOptions = RecordOptions(),
    sampling: SamplingOptions = _SAMPLING,
    model: ModelOptions = _MODEL,
    even_if_busy: Annotated[
        bool, Parameter(help="decide although others use the machine; without mode exact")
    ] = False,
    skip_forms: Annotated[
        bool, Parameter(help="do not measure the other forms of the weights, which choose nothing")
    ] = False,
    as_json: Annotated[bool, Parameter(name="--json", help="one line of JSON, no text")] = False,
) -> int:
    report = tune_task(
        data, file, fields, recording, sampling, model,
        even_if_busy=even_if_busy, skip_forms=skip_forms,
    )  # fmt: skip
    output = Path(report["file"])
    if as_json:
        print(json.dumps(report))
    else:
        _tell(output, report)
    return 0


def tune_task(
    data: Path,
    file: TaskFile,
    fields: FieldOptions,
    recording: RecordOptions,
    sampling: SamplingOptions,
    model: ModelOptions,
    *,
    even_if_busy: bool,
    skip_forms: bool = False,
) -> dict[str, Any]:
    """Tune a task and write its files; what `tune` reports. Raises ConfigError, ModelError."""
    from server.commands.tune_data import TuneSettings, check_data
    from server.commands.tune_machine import LIMIT_S, OtherProcesses, compare_forms, refuse_if_busy
    from server.wiring.model import enrichment_of

    # Told before a model is loaded.
    output = file.path()
    if recording.limit < 1 or recording.record_seconds <= 0:
        raise ConfigError("--limit and --record-seconds: must be above 0")
    if not recording.serve_seconds >= 0:
        raise ConfigError("--serve-seconds: must not be below 0")
    drawn = sampling_of(sampling)
    if not data.is_file():
        raise ConfigError(f"{data}: no such file")
    check_data(data, recording.outputs, fields.names())
    others = OtherProcesses()
    time.sleep(0.5)
    if not even_if_busy:
        refuse_if_busy(others.share())
    stages = {
        "recording": recording.record_seconds if recording.outputs == "model" else 0.0,
        "serving": recording.serve_seconds,
        "the forms of the weights": 0.0 if skip_forms else LIMIT_S,
    }
    times = ", ".join(f"{stage} {duration(most_s)}" for stage, most_s in stages.items() if most_s)
    with Bar() as bar, own_engine(model, bar, ("auto",)) as (served, engine):
        if times:
            bar.say(f"beside replays, which tell what is left of them, about: {times}")
        busy = others.share()  # while the model was loaded and its steps were measured
        if not even_if_busy:
            refuse_if_busy(busy)
        settings = TuneSettings(
            name=file.name,
            data=data,
            output=output,
            replaces=file.force,
            outputs=recording.outputs,
            description=file.description,
            model=file.served_model_name,
            fields=fields.names(),
            num_prompts=recording.limit,
            record_s=recording.record_seconds,
            serve_s=recording.serve_seconds,
            temperature=drawn.temperature,
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
            seed=drawn.seed,
            head_share=_head_share(model.model, engine.info.dtype),
            busy=busy,
            render=None if served.chat is None else chat_render(served.chat),
            compare_forms=(
                None if skip_forms else functools.partial(compare_forms, model, progress=bar)
            ),
            enrichment=enrichment_of(model.adapter),
        )
        return _tuned(settings, served, engine, bar)


def _head_share(model: str, form: str) -> float | None:
    """The LM head's share of the bytes of a step; None where floats were rounded to integers, the
    head to others than the rest. form: ModelInfo.dtype."""
    from server.commands.tune_machine import head_share
    from server.model.catalog import model_folder
    from server.model.gguf_folder import file_folder

    if form not in ("file", "float32", "bfloat16"):
        return None
    return head_share((file_folder if form == "file" else model_folder)(model))


def _tuned(settings: TuneSettings, served: ServedModel, engine: Engine, bar: Bar) -> dict[str, Any]:
    from drafters.auto.copying import Pieces
    from server.commands.tune import tune
    from server.commands.tune_machine import head_seconds
    from server.wiring.drafter import make_task_drafter

    pieces = Pieces(served.table.offsets, served.table.blob)
    return tune(
        settings,
        engine,
        OwnTokenizer(served),
        served.table,
        lambda name, task, speculation: make_task_drafter(
            name,
            served.table.fingerprint.hex(),
            engine.info.eos_token_ids,
            task,
            speculation,
            enrichment=settings.enrichment,
            pieces=pieces,
        ),
        head_seconds(engine.runner),
        bar,
    )


def _tell(output: Path, report: dict[str, Any]) -> None:
    """Print the file, what was written, and what to do next."""
    print(output.read_text(encoding="utf-8"))
    written = [report["file"], report["corpus"]]
    if report["vocabulary"].get("mode") == "exact":
        written.append(str(output.with_suffix(".vocab")))
    print(f"written: {', '.join(name for name in written if name is not None)}")
    if report["quality"] and not report["quality"]["does_the_task"]:
        print("next: mend the answers first (see Try, above); drafts only make them faster")
    else:
        print(f"next: tailor serve --tasks {output.parent}, and ask for model {report['task']!r}")
