"""The steps of a fine-tuning: completion-only loss, AdamW, linear decay, validation, checkpoints.

    result = train(tuned, train_examples, held_out, TrainOptions(), folder, report=print)

The learning rate falls linearly with progress: the share of the steps or of the time limit,
whichever is further, so that a run that the time limit ends has decayed to zero, too. All
randomness comes from the seed and the step; a stopped run continues from its last checkpoint, with
the same batches as without the stop.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from drafters.atomic_file import EVERYBODY, replacing
from server.errors import ConfigError
from server.training.examples import Microbatch, TrainExample, collate, microbatches, segmented
from server.training.lora import Tuned, hidden_states

_CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How to train. epochs: passes over the examples. batch_size: examples a step. max_tokens:
    padded tokens of one forward pass. learning_rate, rows_learning_rate: of the LoRA and of new
    rows. warm_up: share of the run with a rising rate. spell_out: see examples.segmented.
    time_limit_s: the run ends then, decayed; None is none. validate_every, save_every_s: steps,
    seconds. bfloat16: matrix products in bfloat16 (autocast). seed: of everything random."""

    epochs: float = 3.0
    batch_size: int = 32
    max_tokens: int = 2048
    learning_rate: float = 2e-4
    rows_learning_rate: float = 1e-3
    warm_up: float = 0.03
    spell_out: float = 0.05
    weight_decay: float = 0.0
    time_limit_s: float | None = None
    validate_every: int = 50
    save_every_s: float = 120.0
    bfloat16: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """step of num_steps, nats an output id of the last step, seconds so far;
    validation: nats an answer on held-out examples, at the steps that measured it."""

    step: int
    num_steps: int
    loss: float
    elapsed_s: float
    validation: float | None = None


@dataclass(frozen=True, slots=True)
class TrainResult:
    """steps done, whether the time limit ended the run, seconds, and nats an answer on held-out
    examples before and after."""

    num_steps: int
    ended_by_clock: bool
    elapsed_s: float
    nats_before: float
    nats_after: float


def evaluate_loss(
    tuned: Tuned, examples: Sequence[TrainExample], options: TrainOptions, device: torch.device
) -> float:
    """Mean nats of an answer: -ln of the model's chance of the whole output, teacher-forced."""
    if not examples:
        return math.nan
    short = [segmented(example, tuned.enrichment) for example in examples]
    total = 0.0
    tuned.model.eval()
    with torch.no_grad():
        for group in microbatches(short, options.max_tokens, random.Random(0)):
            batch = collate(group, device)
            total += float(_loss_sum(tuned, batch, options.bfloat16))
    tuned.model.train()
    return total / len(examples)


def _loss_sum(tuned: Tuned, batch: Microbatch, bfloat16: bool) -> torch.Tensor:
    """Sum of -ln p over the batch's output ids; the softmax is in float32."""
    with torch.autocast(batch.input_ids.device.type, torch.bfloat16, enabled=bfloat16):
        states = hidden_states(tuned, batch.input_ids, batch.attention_mask)
        logits = tuned.head(states.flatten(0, 1)[batch.rows])
    return functional.cross_entropy(logits.float(), batch.targets, reduction="sum")


@dataclass(slots=True)
class _State:
    """The state of a run that a checkpoint holds beside tensors."""

    step: int = 0
    elapsed_s: float = 0.0
    nats_before: float = math.nan


def _steps(
    examples: Sequence[TrainExample], options: TrainOptions, tuned: Tuned, first: int, num: int
) -> Iterator[list[list[TrainExample]]]:
    """The forward passes of step `first`, `first` + 1, ... `num` - 1; a function of the seed."""
    per_epoch = math.ceil(len(examples) / options.batch_size)
    for step in range(first, num):
        epoch, at = divmod(step, per_epoch)
        order = list(range(len(examples)))
        random.Random(f"{options.seed} epoch {epoch}").shuffle(order)
        chooser = random.Random(f"{options.seed} step {step}")
        chosen = [
            segmented(examples[i], tuned.enrichment, chooser=chooser, spell_out=options.spell_out)
            for i in order[at * options.batch_size : (at + 1) * options.batch_size]
        ]
        yield list(microbatches(chosen, options.max_tokens, chooser))


def train(
    tuned: Tuned,
    examples: Sequence[TrainExample],
    held_out: Sequence[TrainExample],
    options: TrainOptions,
    folder: Path,
    *,
    report: Callable[[TrainProgress], None],
    clock: Callable[[], float] = time.monotonic,
) -> TrainResult:
    """Train `tuned` in place. folder: for the checkpoint, which is removed at the end.

    Raises ConfigError for no examples, for a loss that is not finite, and for a checkpoint of
    another run.
    """
    if not examples:
        raise ConfigError("there are no examples to train on")
    device = next(tuned.model.parameters()).device
    num = max(1, math.ceil(options.epochs * math.ceil(len(examples) / options.batch_size)))
    lora, rows = tuned.groups()
    optimizer = torch.optim.AdamW(
        [
            {"params": lora, "lr": options.learning_rate, "base": options.learning_rate},
            {"params": rows, "lr": options.rows_learning_rate, "base": options.rows_learning_rate},
        ],
        weight_decay=options.weight_decay,
    )
    keeper = _Checkpoint(folder, tuned, optimizer, _identity(examples, options, tuned))
    state = keeper.load()
    torch.manual_seed(options.seed)
    if math.isnan(state.nats_before):
        state.nats_before = evaluate_loss(tuned, held_out, options, device)
    tuned.model.train()
    began, saved = clock() - state.elapsed_s, clock()
    by_clock = False
    for groups in _steps(examples, options, tuned, state.step, num):
        done = state.step / num
        if options.time_limit_s is not None:
            done = max(done, (clock() - began) / options.time_limit_s)
            if done >= 1.0:
                by_clock = state.step < num
                break
        _set_rate(optimizer, done, options.warm_up)
        torch.manual_seed(options.seed * 1_000_003 + state.step)  # dropout
        loss = _step(tuned, groups, optimizer, options, device)
        state.step += 1
        state.elapsed_s = clock() - began
        validation = None
        if held_out and state.step % options.validate_every == 0 and state.step < num:
            validation = evaluate_loss(tuned, held_out, options, device)
        report(TrainProgress(state.step, num, loss, state.elapsed_s, validation))
        if clock() - saved > options.save_every_s:
            keeper.save(state)
            saved = clock()
    after = evaluate_loss(tuned, held_out, options, device)
    keeper.remove()
    return TrainResult(state.step, by_clock, clock() - began, state.nats_before, after)


def _set_rate(optimizer: torch.optim.Optimizer, done: float, warm_up: float) -> None:
    factor = done / warm_up if done < warm_up else (1.0 - done) / (1.0 - warm_up)
    for group in optimizer.param_groups:
        group["lr"] = group["base"] * max(0.02, factor)


def _step(
    tuned: Tuned,
    groups: Sequence[Sequence[TrainExample]],
    optimizer: torch.optim.Optimizer,
    options: TrainOptions,
    device: torch.device,
) -> float:
    """One update over all groups; returns mean nats an output id. Raises ConfigError for nan."""
    batches = [collate(group, device) for group in groups]
    num_targets = sum(int(batch.targets.numel()) for batch in batches)
    total = 0.0
    for batch in batches:
        loss = _loss_sum(tuned, batch, options.bfloat16)
        (loss / num_targets).backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    if not math.isfinite(total):
        raise ConfigError("the loss is not finite; try a lower learning rate")
    torch.nn.utils.clip_grad_norm_([p for g in tuned.groups() for p in g], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total / num_targets


def _identity(
    examples: Sequence[TrainExample], options: TrainOptions, tuned: Tuned
) -> dict[str, Any]:
    """What a run must share with a checkpoint to continue it."""
    kept = {k: v for k, v in asdict(options).items() if k not in ("save_every_s", "time_limit_s")}
    enrichment = "" if tuned.enrichment is None else tuned.enrichment.hash
    lengths = [len(example) for example in examples]
    return kept | {"examples": len(examples), "tokens": sum(lengths), "enrichment": enrichment}


class _Checkpoint:
    """A run's state on disk: adapter, optimizer and counters, replaced as a whole."""

    def __init__(
        self,
        folder: Path,
        tuned: Tuned,
        optimizer: torch.optim.Optimizer,
        identity: dict[str, Any],
    ) -> None:
        self._file = folder / _CHECKPOINT
        self._tuned = tuned
        self._optimizer = optimizer
        self._identity = json.dumps(identity, sort_keys=True)

    def _trained(self) -> dict[str, torch.Tensor]:
        named = self._tuned.model.named_parameters()
        return {name: p.detach() for name, p in named if p.requires_grad}

    def load(self) -> _State:
        """The saved state, with the tensors restored; a new one where nothing was saved."""
        if not self._file.is_file():
            return _State()
        saved = torch.load(self._file, weights_only=True)
        if saved["identity"] != self._identity:
            raise ConfigError(
                f"{self._file} is of another run (other data or options); delete it to begin anew"
            )
        with torch.no_grad():
            for name, tensor in self._trained().items():
                tensor.copy_(saved["trained"][name])
        self._optimizer.load_state_dict(saved["optimizer"])
        return _State(**saved["state"])

    def save(self, state: _State) -> None:
        """Save atomically. Raises OSError; the earlier checkpoint then stays."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        body = {
            "identity": self._identity,
            "state": asdict(state),
            "trained": self._trained(),
            "optimizer": self._optimizer.state_dict(),
        }
        with replacing(self._file, EVERYBODY) as out:
            torch.save(body, out)

    def remove(self) -> None:
        """Delete the checkpoint: the run has ended."""
        self._file.unlink(missing_ok=True)
