"""`tailor tasks train`: a LoRA for a task, and rows for the tokens of an enrichment."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from drafters.target import native
from server.commands.data import DataFiles, FieldOptions, read_task_data
from server.commands.options import (
    DEFAULT_MODEL,
    FOLDER,
    Bar,
    Device,
    Threads,
    WeightsForm,
    as_options,
    bounded,
    refused,
    writing,
)
from server.commands.own_engine import device_problem
from server.errors import ConfigError

if TYPE_CHECKING:
    from server.training.loop import TrainProgress, TrainResult

_FIELDS = FieldOptions()


@as_options
class RecipeOptions:
    """How it is trained; the defaults are the recipe of docs/benchmarks/papers.md."""

    epochs: Annotated[float, bounded("passes over the examples (3)", gt=0, lte=1e6)] = 3.0
    batch_size: Annotated[int, bounded("examples a step (16)", gte=1)] = 16
    learning_rate: Annotated[float, bounded("of the LoRA (1e-3)", gte=0)] = 1e-3
    rows_learning_rate: Annotated[float, bounded("of new tokens' rows (3e-3)", gte=0)] = 3e-3
    rank: Annotated[int, bounded("of the LoRA (16)", gte=1)] = 16
    dropout: Annotated[float, bounded("of the LoRA's inputs (0.1)", gte=0, lt=1)] = 0.1
    start: Annotated[
        Literal["leaning", "mean"],
        Parameter(help="how rows begin: leaning to their outer parts, or their mean (leaning)"),
    ] = "leaning"
    max_examples: Annotated[int | None, bounded("train on so many at most (all)", gte=1)] = None
    time_limit: Annotated[
        float | None, bounded("all is done by then, decayed (none)", gt=0, metavar="MINUTES")
    ] = None
    seed: Annotated[int, bounded("of everything random (0)", gte=0, lt=1 << 32)] = 0
    saved_as: Annotated[
        Literal["float32", "bfloat16", "float16"],
        Parameter(help="what the LoRA is stored in; a half takes half the memory (float32)"),
    ] = "float32"


@as_options
class BaseOptions:
    """The model that the adapter is for."""

    model: Annotated[str, Parameter(help=f"the base model ({DEFAULT_MODEL})")] = DEFAULT_MODEL
    weights: Annotated[
        WeightsForm | None,
        Parameter(
            help="the form that the base is in while it is trained over (QLoRA), as it is served "
            "(floats)"
        ),
    ] = None
    device: Device = "cpu"
    threads: Threads = None
    memory: Annotated[
        float,
        bounded(
            "what a step may keep for its way back; more saves time where examples are long "
            "or begin alike (2)",
            gt=0,
            metavar="GIB",
        ),
    ] = 2.0


_RECIPE, _BASE = RecipeOptions(), BaseOptions()


def train(
    *,
    data: DataFiles,
    output: Annotated[
        Path, FOLDER, Parameter(name=("--output", "-o"), help="the adapter's folder")
    ],
    enrichment: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="tokens of the task's own (`tailor tasks enrich`)"),
    ] = None,
    base: BaseOptions = _BASE,
    fields: FieldOptions = _FIELDS,
    recipe: RecipeOptions = _RECIPE,
) -> int:
    if (output / "adapter_config.json").exists():
        raise ConfigError(f"{output}: an adapter is there already; choose another folder")
    with Bar() as bar:
        result = train_adapter(data, output, enrichment, base, fields, recipe, bar)
    print(
        f"{result.num_steps} steps in {result.elapsed_s / 60:.1f} minutes"
        f"{', ended by the time limit' if result.ended_by_clock else ''}; nats an answer on "
        f"held-out examples {result.nats_before:.2f} -> {result.nats_after:.2f}, of step "
        f"{result.kept_step}"
    )
    following = f"tailor serve --model {base.model} --adapter {output}"
    if base.weights in ("int4", "file"):  # rounding merged weights again would lose the adapter
        part = f"models[].adapters: [{{path: {output}}}]"
        following = f"{part} of a server.yaml, weights: {base.weights}"
    print(f"written: {output}, next: {following}")
    return 0


def train_adapter(
    data: Sequence[Path],
    output: Path,
    enrichment_file: Path | None,
    base: BaseOptions,
    fields: FieldOptions,
    recipe: RecipeOptions,
    bar: Bar,
) -> TrainResult:
    """Train, or go on with what was begun in `output`, and write the adapter's folder.

    Raises ConfigError and ModelError.
    """
    began = time.monotonic()
    wait_asleep()
    import torch

    from server.model.families import position_limit
    from server.training.examples import TrainExample, segmented, shared_prefix
    from server.training.loop import CHECKPOINT, TrainOptions
    from server.training.loop import train as run
    from server.training.lora import LoraOptions, plan_memory, prepare, save
    from server.training.stored import open_base
    from vocab_store.enrichment import Enrichment

    if (problem := device_problem(base.device)) is not None:
        raise ConfigError(f"--device {base.device}: {problem}")
    found = read_task_data(base.model, data, fields)
    if not any(prompt for prompt, _ in found.train):
        bar.say(
            f"No row has a prompt ({fields.prompt_field}): outputs are learned without any; "
            "--prompt-field says where it is."
        )
    enrichment = None
    if enrichment_file is not None:
        with refused(), writing(enrichment_file):
            enrichment = Enrichment.load(enrichment_file, tokenizer=found.text.fingerprint)
    if base.threads is not None:
        torch.set_num_threads(base.threads)
    torch.manual_seed(recipe.seed)
    bar(f"Opening {base.model}", 0, None)
    dtype = torch.float32
    if base.weights == "bfloat16" or (base.weights != "float32" and has_bfloat16(base.device)):
        dtype = torch.bfloat16
    device = torch.device(base.device)
    module, matrix_of = open_base(
        base.model, base.weights or "auto", dtype=dtype, device=device, threads=base.threads
    )
    shape = LoraOptions(recipe.rank, recipe.rank, recipe.dropout, recipe.start)
    tuned = prepare(
        module, matrix_of, enrichment, shape, tokenizer=found.text.fingerprint, dtype=dtype
    )
    most = position_limit(module.config)
    examples, held_out = (
        [e for p, o in part if len(e := TrainExample(tuple(p), tuple(o))) <= most]
        for part in (found.train, found.held_out)
    )
    if num := len(found.train) + len(found.held_out) - len(examples) - len(held_out):
        bar.say(f"{num} examples are longer than the model's {most} positions and are left out.")
    if not examples:
        raise ConfigError("there are no examples to train on")
    random.Random(recipe.seed).shuffle(examples)
    examples = examples[: recipe.max_examples]
    some = [segmented(example, enrichment) for example in examples[:500]]
    prefix = shared_prefix(some) if tuned.is_packed else 0
    own = recipe.batch_size * (sum(map(len, some)) / len(some) - prefix)
    max_tokens, again = plan_memory(
        module.config, own, prefix, max(map(len, some)), int(base.memory * (1 << 30))
    )
    if again:
        module.activation_checkpointing_enable({"use_reentrant": False})
    options = TrainOptions(
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        max_tokens=max_tokens,
        learning_rate=recipe.learning_rate,
        rows_learning_rate=recipe.rows_learning_rate,
        time_limit_s=None if recipe.time_limit is None else 60.0 * recipe.time_limit,
        seed=recipe.seed,
    )
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        result = run(
            tuned, examples, held_out, options, output,
            report=lambda progress: _show(bar, progress), began=began,
            base=f"{base.model} {base.weights}",
        )  # fmt: skip
        save(tuned, output, recipe.saved_as)
        figures = asdict(result) | {"examples": len(examples), "weights": base.weights}
        text = json.dumps(figures | asdict(recipe), indent=1) + "\n"
        (output / "training.json").write_text(text, encoding="utf-8")
        (output / CHECKPOINT).unlink(missing_ok=True)
    return result


def wait_asleep() -> None:
    """Have torch's threads sleep where they wait for each other, after a tenth of a millisecond.
    Called before torch is imported. They spin for milliseconds else, which beside other work takes
    the core from the thread that is waited for: a step takes 20 times as long."""
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def has_bfloat16(device: str) -> bool:
    """Whether matrix products in bfloat16 are faster there: instructions for them exist."""
    import torch

    if device != "cpu":
        return bool(torch.cuda.is_bf16_supported())
    return not native().features.isdisjoint(("avx512_bf16", "amx-bf16"))


def _show(bar: Bar, progress: TrainProgress) -> None:
    bar("Steps", progress.step, progress.num_steps, left_s=progress.left_s)
    if progress.validation is not None:
        bar.say(
            f"step {progress.step} of {progress.num_steps}: {progress.validation:.2f} nats an "
            "answer held out"
        )
