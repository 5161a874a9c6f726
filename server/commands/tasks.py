"""`tailor tasks`: task files, checked and made."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from server.commands.options import (
    DEFAULT_TASKS,
    FieldOptions,
    ModelOptions,
    SamplingOptions,
    sampling_of,
)
from server.commands.own_engine import own_engine
from server.commands.progress import Bar
from server.errors import ConfigError

__all__ = ["check", "tune"]

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
    """What outputs drafts are judged by."""

    outputs: Annotated[
        Literal["gold", "model"],
        Parameter(
            help="judge drafts by the model's own outputs, recorded now, or by the data's (model)"
        ),
    ] = "model"
    num_prompts: Annotated[int, Parameter(help="most prompts to record (200)")] = 200
    record_seconds: Annotated[
        float,
        Parameter(metavar="S", help="record for so long at most; what is there then is used (180)"),
    ] = 180.0


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
        from server.config import TaskConfig

        output = self.output or DEFAULT_TASKS / f"{self.name}.yaml"
        if output.suffix not in (".yaml", ".yml"):
            raise ConfigError(f"{output}: a task file ends in .yaml")
        if output.exists() and not self.force:
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
        Parameter(metavar="FILE", help="JSON lines with a prompt and a completion, or recordings"),
    ],
    file: TaskFile,
    fields: FieldOptions = _FIELDS,
    recording: RecordOptions = RecordOptions(),
    sampling: SamplingOptions = _SAMPLING,
    model: ModelOptions = _MODEL,
) -> int:
    from server.commands import tune as tuning
    from server.engine.probe import measure_head
    from server.wiring.drafter import make_task_drafter

    output = file.path()
    if recording.num_prompts < 1 or recording.record_seconds <= 0:
        raise ConfigError("--num-prompts and --record-seconds: must be above 0")
    drawn = sampling_of(sampling)
    if not data.is_file():  # told before a model is loaded
        raise ConfigError(f"{data}: no such file")
    settings = tuning.TuneSettings(
        name=file.name,
        data=data,
        output=output,
        outputs=recording.outputs,
        description=file.description,
        model=file.served_model_name,
        field=fields.field,
        prompt_field=fields.prompt_field,
        num_prompts=recording.num_prompts,
        record_s=recording.record_seconds,
        temperature=drawn.temperature,
        max_tokens=sampling.max_tokens,
        stop=sampling.stop,
        seed=drawn.seed,
    )
    with Bar() as bar, own_engine(model, bar, ("auto",)) as (served, engine):
        cost = engine.budget.cost
        assert cost is not None  # build_engine measures it
        report = tuning.tune(
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
            cost,
            measure_head(engine.runner),
            bar,
        )
    print(output.read_text(encoding="utf-8"), end="")
    print(json.dumps(report))
    return 0
