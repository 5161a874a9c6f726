"""`tailor tasks train`: a LoRA for a task, and rows for the tokens of an enrichment."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from server.commands.enrich import DataFiles, read_task_data
from server.commands.options import DEFAULT_MODEL, FieldOptions
from server.commands.progress import Bar
from server.errors import ConfigError

if TYPE_CHECKING:
    from server.training.loop import TrainProgress

_FIELDS = FieldOptions()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeOptions:
    """How it is trained."""

    epochs: Annotated[float, Parameter(help="passes over the examples (3)")] = 3.0
    batch_size: Annotated[int, Parameter(help="examples a step (32)")] = 32
    learning_rate: Annotated[float, Parameter(help="of the LoRA (2e-4)")] = 2e-4
    rows_learning_rate: Annotated[float, Parameter(help="of new tokens' rows (1e-3)")] = 1e-3
    rank: Annotated[int, Parameter(help="of the LoRA (16)")] = 16
    dropout: Annotated[
        float, Parameter(help="of the LoRA's inputs; 0 takes a fifth less time on a CPU (0.05)")
    ] = 0.05
    max_examples: Annotated[
        int | None, Parameter(help="train on so many at most (3000 on a CPU, else all)")
    ] = None
    time_limit: Annotated[
        float | None, Parameter(metavar="MINUTES", help="end by then, decayed (60 on a CPU)")
    ] = None
    seed: Annotated[int, Parameter(help="of everything random (0)")] = 0
    saved_as: Annotated[
        Literal["float32", "bfloat16", "float16"],
        Parameter(help="what the LoRA is stored in; a half takes half the memory (float32)"),
    ] = "float32"


_RECIPE = RecipeOptions()


def train(
    *,
    data: DataFiles,
    output: Annotated[
        Path, Parameter(name=("--output", "-o"), metavar="DIR", help="the adapter's folder")
    ],
    model: Annotated[str, Parameter(help=f"the base model ({DEFAULT_MODEL})")] = DEFAULT_MODEL,
    enrichment: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="tokens of the task's own (`tailor tasks enrich`)"),
    ] = None,
    device: Annotated[str, Parameter(help="cpu, cuda or cuda:N (cpu)")] = "cpu",
    fields: FieldOptions = _FIELDS,
    recipe: RecipeOptions = _RECIPE,
) -> int:
    from server.model.catalog import model_folder
    from server.training.loop import TrainOptions
    from server.training.loop import train as run
    from server.training.lora import save

    if (output / "adapter_config.json").exists():
        raise ConfigError(f"{output}: an adapter is there already; choose another folder")
    folder = model_folder(model)
    found = read_task_data(folder, data, fields)
    on_cpu = device == "cpu"
    limit = recipe.time_limit if recipe.time_limit is not None else (60.0 if on_cpu else None)
    most = recipe.max_examples or (3000 if on_cpu else None)
    options = TrainOptions(
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        rows_learning_rate=recipe.rows_learning_rate,
        time_limit_s=None if limit is None else 60.0 * limit,
        bfloat16=_has_bfloat16(device),
        seed=recipe.seed,
    )
    tuned = _prepare(folder, enrichment, found.fingerprint, recipe, device)
    chooser = random.Random(recipe.seed)
    examples = list(found.train)
    chooser.shuffle(examples)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with Bar() as bar:
            result = run(
                tuned,
                _as_examples(examples[:most]),
                _as_examples(found.held_out),
                options,
                output,
                report=lambda progress: _show(bar, progress),
            )
        save(tuned, output, recipe.saved_as)
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror or error}") from None
    figures = asdict(result) | {"examples": min(len(examples), most or len(examples))}
    (output / "training.json").write_text(json.dumps(figures | asdict(recipe), indent=1) + "\n")
    print(
        f"{result.num_steps} steps in {result.elapsed_s / 60:.1f} minutes"
        f"{', ended by the time limit' if result.ended_by_clock else ''}; nats an answer on "
        f"held-out examples {result.nats_before:.2f} -> {result.nats_after:.2f}"
    )
    print(f"written: {output}, next: tailor serve --model {model} --adapter {output}")
    return 0


def _as_examples(pairs: Any) -> Any:
    from server.training.examples import TrainExample

    return [TrainExample(tuple(prompt), tuple(output)) for prompt, output in pairs]


def _prepare(
    folder: Path, file: Path | None, fingerprint: str, recipe: RecipeOptions, device: str
) -> Any:
    """The base model with a fresh adapter on `device`. Raises ConfigError and ModelError."""
    import torch

    from server.model.loader import build_module, open_model
    from server.training.lora import LoraOptions, prepare
    from vocab_store.enrichment import Enrichment
    from vocab_store.errors import EnrichmentFileError

    enrichment = None
    if file is not None:
        try:
            enrichment = Enrichment.load(file, tokenizer=fingerprint)
        except (EnrichmentFileError, OSError) as error:
            raise ConfigError(str(error)) from None
    torch.manual_seed(recipe.seed)
    base: Any = build_module(open_model(folder), torch.float32, torch.device(device))
    if device == "cpu" and _has_bfloat16(device):
        base.set_attn_implementation("eager")  # torch's flash attention is slow there in bfloat16
    options = LoraOptions(rank=recipe.rank, alpha=recipe.rank, dropout=recipe.dropout)
    return prepare(base, enrichment, options, tokenizer=fingerprint)


def _has_bfloat16(device: str) -> bool:
    """Whether matrix products in bfloat16 are faster there: instructions for them exist."""
    import torch

    if device != "cpu":
        return bool(torch.cuda.is_bf16_supported())
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _show(bar: Bar, progress: TrainProgress) -> None:
    bar("Steps", progress.step, progress.num_steps)
    if progress.validation is not None:
        bar(f"step {progress.step}: {progress.validation:.2f} nats an answer held out", 1, 1)
