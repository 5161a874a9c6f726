"""`tailor tasks`: task files, checked, tuned, and packed into one file.

What tuning does is in tune.py; what it measures of the machine and of the model is below.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import statistics
import time
import zipfile
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from drafters import DRAFTER_NAMES
from drafters.atomic_file import EVERYBODY, replacing
from drafters.json_text import parsed
from server import __version__
from server.commands.data import FieldOptions, chat_render
from server.commands.options import (
    OUTPUT,
    Bar,
    ModelOptions,
    SamplingOptions,
    duration,
    sampling_of,
    writing,
)
from server.commands.own_engine import OwnTokenizer, own_engine
from server.commands.record import Progress
from server.commands.tune_data import (
    BUSY,
    Example,
    RecordOptions,
    TaskFile,
    Tuning,
    check_data,
    refuse_to_replace,
)
from server.config import DEFAULT_TASKS, load_server_config, load_task, load_tasks
from server.datasets import check_file
from server.errors import ConfigError, TailorError
from server.machine import OtherProcesses
from server.types import EngineSizes, SpeculationParams

if TYPE_CHECKING:
    from drafters.base import Drafter
    from server.engine.batch import Runner


_MODEL, _FIELDS, _SAMPLING, _RECORDING = (
    ModelOptions(), FieldOptions(), SamplingOptions(), RecordOptions()
)  # fmt: skip


def check(
    folder: Annotated[Path, Parameter(name="DIR", help="folder of *.yaml files")],
    /,
    *,
    config: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="server.yaml, to check the tasks' models too"),
    ] = None,
) -> int:
    models: tuple[str, ...] = ()
    if config is not None:
        models = tuple(model.name for model in load_server_config(config).models)
    tasks = load_tasks(folder, models, DRAFTER_NAMES)
    for task in tasks.values():
        print(f"{task.name:24} {task.speculation.drafter:8} {task.description}")
    return 0


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
    recording: RecordOptions = _RECORDING,
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
    if as_json:
        print(json.dumps(report))
    else:
        _tell(Path(report["file"]), report)
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
    from drafters.auto.copying import Pieces
    from server.commands.tune import tune as run
    from server.model.adapter import enrichment_of
    from server.wiring.drafter import make_task_drafter

    # Told before a model is loaded.
    file.check()
    drawn = sampling_of(sampling)
    check_file(data)
    check_data(data, recording.outputs, fields)
    others = OtherProcesses()
    time.sleep(0.5)
    busy_share(others, even_if_busy)
    stages = {
        "recording": recording.record_seconds if recording.outputs == "model" else 0.0,
        "serving": recording.serve_seconds,
        "the forms of the weights": 0.0 if skip_forms else _LIMIT_S,
    }
    times = ", ".join(f"{stage} {duration(most_s)}" for stage, most_s in stages.items() if most_s)
    with Bar() as bar, own_engine(model, bar, ("auto",)) as (served, engine):
        if times:
            bar.say(f"beside replays, which tell what is left of them, about: {times}")
        # While the model was loaded and its steps were measured.
        busy = busy_share(others, even_if_busy)
        table, own = served.table, enrichment_of(model.adapter)
        pieces = Pieces(table.offsets, table.blob)

        def make_drafter(speculation: SpeculationParams) -> Drafter:
            return make_task_drafter(
                speculation.drafter, table.fingerprint.hex(), engine.info.eos_token_ids, file.name,
                speculation, enrichment=own, pieces=pieces,
            )  # fmt: skip

        return run(
            Tuning(
                data,
                fields,
                file,
                recording,
                engine,
                OwnTokenizer(served),
                table,
                make_drafter,
                head_seconds(engine.runner),
                bar,
                sampling=drawn,
                max_tokens=sampling.max_tokens,
                head_share=head_share(engine.runner),
                busy=busy,
                render=None if served.chat is None else chat_render(served.chat),
                compare_forms=None if skip_forms else partial(compare_forms, model, progress=bar),
                enrichment=own,
            )
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


# --- what tuning measures of the machine and of the model -----------------------------------------

_NUM_HEADS = 3  # measurements of the LM head, of which the median counts
_NUM_TEXTS, _LONGEST = 24, 512  # examples that a form of the weights is judged by, and their ids
_NUM_STEPS = 9  # that are timed
_LIMIT_S = 90.0  # no further form is begun after so many seconds
_FLOATS = ("float32", "bfloat16")
_FORMS = (*_FLOATS, "int8", "int8-blocks", "int4")  # of a model that has floats


def busy_share(others: OtherProcesses, may_be_busy: bool) -> float:
    """What others use of the machine. Raises ConfigError for more than BUSY, where it may not."""
    share = others.share()
    if share > BUSY and not may_be_busy:
        raise ConfigError(
            f"others use {share:.0%} of this machine: what is measured now would decide wrongly, "
            "so nothing is decided and nothing is written. Try again when it is idle, or with "
            "--even-if-busy, which leaves mode `exact` out"
        )
    return share


def head_seconds(runner: Runner) -> tuple[float, float]:
    """server.engine.probe.measure_head, several times; the median of each figure."""
    from server.engine.probe import measure_head

    measured = [measure_head(runner) for _ in range(_NUM_HEADS)]
    first, further = (sorted(figures)[_NUM_HEADS // 2] for figures in zip(*measured, strict=True))
    return first, further


def head_share(runner: Runner) -> float | None:
    """The LM head's share of the weights that a step of one row reads; None of a runner that does
    not tell, and of floats that were rounded to integers: the head to others than the rest, which
    take another time a byte."""
    from server.model.cpu.runner import CpuRunner

    if not isinstance(runner, CpuRunner) or runner.info.dtype not in (*_FLOATS, "file"):
        return None
    return runner.head_bytes / runner.weight_bytes


def forms_of(model: ModelOptions) -> list[tuple[str, Path]]:
    """(form, folder) of what can be served from what is here; [] on other devices than a CPU."""
    from server.model.catalog import cached_folder, gguf_of

    if model.device != "cpu":
        return []
    floats = cached_folder(model.model)
    found = [] if floats is None or gguf_of(floats) else [(form, floats) for form in _FORMS]
    file = cached_folder(model.model, "file") if model.adapter is None else None
    if file is not None and gguf_of(file) is not None:
        found.insert(0, ("file", file))
    return found


def compare_forms(
    model: ModelOptions, examples: Sequence[Example], progress: Progress
) -> dict[str, dict[str, float]]:
    """form -> perplexity of the data's outputs, share of them that greedy decoding gives whole,
    milliseconds of a step of 1 and of 16 rows. {} where there is no second form to compare.

    A form that cannot be run is left out. It chooses nothing: the user does (`weights`).
    """
    from server.model.scoring import Text

    texts = [
        Text((*prompt, *output), len(prompt))
        for prompt, output in examples
        if prompt and output and len(prompt) + len(output) <= _LONGEST
    ][-_NUM_TEXTS:]
    forms = forms_of(model)
    if len(forms) < 2 or not texts:
        return {}
    began, found = time.monotonic(), {}
    for number, (form, folder) in enumerate(forms):
        if time.monotonic() - began > _LIMIT_S:
            break
        progress("forms of the weights", number, len(forms))
        try:
            found[form] = _measure(model, form, folder, texts)
        except (TailorError, ValueError) as error:
            logging.getLogger(__name__).warning("weights %s: %s", form, error)
    progress("forms of the weights", len(forms), len(forms))
    return found


def _measure(
    model: ModelOptions, form: str, folder: Path, texts: Sequence[Any]
) -> dict[str, float]:
    from server.engine.probe import make_prober
    from server.model.build import RunnerSpec, build_runner
    from server.model.scoring import compare, score

    sizes = EngineSizes(max_num_seqs=1, max_num_batched_tokens=_LONGEST, kv_bytes=256 << 20)
    spec = RunnerSpec(
        name=form,
        folder=str(folder),
        adapter=model.adapter,
        weights=form,
        sizes=sizes,
        threads=model.threads,
    )
    with closing(build_runner(spec)) as runner:
        scores = score(runner, list(texts))
        probe = make_prober(runner)
        steps: dict[int, list[float]] = {1: [], 16: []}
        for _ in range(_NUM_STEPS):
            for rows, taken in steps.items():
                taken.append(1e3 * probe(rows, 128))
    figures = compare(scores, scores)
    return {
        "perplexity": figures["perplexity"],
        "exact": figures["exact"],
        "step_ms": round(statistics.median(steps[1]), 2),
        "step_16_rows_ms": round(statistics.median(steps[16]), 2),
    }


# --- a task as one file ---------------------------------------------------------------------------

# To be carried to another machine: a zip of the task's YAML, the files that it names (corpus,
# vocabulary profile, tables of drafters), and manifest.json: their sizes and sha256. Equal tasks
# make equal files.

_SUFFIX = ".tailor-task"
_MANIFEST = "manifest.json"
_FORMAT = 1
_MAX_BYTES = 8 << 30
_MAX_MANIFEST = 1 << 20
_EPOCH = (1980, 1, 1, 0, 0, 0)


def pack(
    task: Annotated[Path, Parameter(name="FILE", help="the task's YAML file")],
    /,
    *,
    output: Annotated[
        Path | None,
        OUTPUT,
        Parameter(metavar="FILE", help=f"the packed task (NAME{_SUFFIX})"),
    ] = None,
    force: Annotated[bool, Parameter(help="replace a file that is there")] = False,
) -> int:
    name, files = _files_of(task)
    output = output or Path(f"{name}{_SUFFIX}")
    refuse_to_replace(output, force)
    manifest: dict[str, Any] = {
        "format": _FORMAT,
        "task": name,
        "yaml": task.name,
        "made_by": f"tailor {__version__}",
        "files": {
            file.name: {
                "bytes": file.stat().st_size,
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            }
            for file in files
        },
    }
    with (
        writing(output),
        replacing(output, EVERYBODY) as out,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        _put(archive, _MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        for file in files:
            _put(archive, file.name, file.read_bytes())
    print(f"written: {output} ({', '.join(file.name for file in files)})")
    if found := re.search(r"^# Serve: (.* --adapter .*)", task.read_text("utf-8"), re.MULTILINE):
        print(f"not in it: the adapter; carry its folder, too ({found[1]})")
    print(f"next: tailor tasks unpack {output}, on the machine that serves it")
    return 0


def unpack(
    file: Annotated[Path, Parameter(help="a packed task")],
    /,
    *,
    tasks: Annotated[
        Path, Parameter(metavar="DIR", help=f"folder of task files ({DEFAULT_TASKS})")
    ] = DEFAULT_TASKS,
    force: Annotated[bool, Parameter(help="replace files that are there")] = False,
) -> int:
    with writing(file):
        source = file.open("rb")
    try:
        with source, zipfile.ZipFile(source) as archive:
            manifest, contents = _read(file, archive)
    except TailorError:
        raise
    except Exception:  # zipfile, zlib, and whatever a manifest of others makes fail
        raise ConfigError(f"{file}: is no packed task, or a damaged one") from None
    for name in contents:
        refuse_to_replace(tasks / name, force)
    with writing(tasks):
        tasks.mkdir(parents=True, exist_ok=True)
        # The YAML last: a server that reloads meanwhile finds what it names.
        for name in sorted(contents, key=lambda name: name == manifest["yaml"]):
            with replacing(tasks / name, EVERYBODY) as out:
                out.write(contents[name])
    print(f"written: {', '.join(str(tasks / name) for name in contents)}")
    print(f"next: tailor tasks check {tasks}")
    return 0


def _files_of(task: Path) -> tuple[str, list[Path]]:
    """(the task's name, its YAML and the files it names). Raises ConfigError."""
    loaded = load_task(task)
    files = [task]
    for path in (Path(name) for _, name in loaded.files()):
        if not path.is_file():
            raise ConfigError(f"{task}: no file {path}")
        if path.resolve().parent != task.resolve().parent:
            raise ConfigError(f"{task}: {path}: lies elsewhere; put it beside the task's file")
        if path.name not in [file.name for file in files]:
            files.append(path)
    return loaded.name, files


def _read(file: Path, archive: zipfile.ZipFile) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest, and the content of each file that it names, checked. Raises ConfigError."""
    with archive.open(_MANIFEST) as member:
        manifest = parsed(member.read(_MAX_MANIFEST))
    if manifest["format"] != _FORMAT:
        raise ConfigError(f"{file}: is of a newer Tailor (format {manifest['format']})")
    if manifest["yaml"] not in manifest["files"]:
        raise ValueError("no task in it")
    sizes = {name: int(facts["bytes"]) for name, facts in manifest["files"].items()}
    if min(sizes.values()) < 0:
        raise ValueError("no size of a file")
    if sum(sizes.values()) > _MAX_BYTES:
        raise ConfigError(f"{file}: holds more than {_MAX_BYTES} bytes")
    contents = {}
    for name, facts in manifest["files"].items():
        if name != Path(name).name or name.startswith("."):
            raise ConfigError(f"{file}: {name[:100]!r} is no name of a file in it")
        with archive.open(name) as member:
            data = member.read(sizes[name] + 1)
        if hashlib.sha256(data).hexdigest() != facts["sha256"]:
            raise ConfigError(f"{file}: {name} is damaged: its sha256 is another one")
        contents[name] = data
    return manifest, contents


def _put(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
