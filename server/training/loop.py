"""The steps of a fine-tuning: completion-only loss, AdamW, linear decay, validation, checkpoints.

    result = train(tuned, train_examples, held_out, TrainOptions(), folder, report=print)

The learning rate falls linearly with progress: the share of the steps or of the time limit,
whichever is further, so that a run that the time limit ends has decayed to zero, too. What is kept
is the last step, unless the loss on held-back examples has risen (_RISEN). All randomness comes
from the seed and the step; a run continues from its last checkpoint, written where it is
interrupted, too, with the same batches as without the stop.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from drafters.atomic_file import replacing
from server.errors import ConfigError
from server.training.examples import TrainExample, collate, microbatches, segmented
from server.training.lora import Tuned

CHECKPOINT = "checkpoint.pt"
_NOT_FINITE = "the loss is not finite; try a lower learning rate"
_HELD_SHARE = 0.03  # of all examples that are trained on, validated on each time, ...
_LEAST_HELD = 32
_MOST_OF_TIME = 0.01  # ... in this share of the time limit, ...
_ALL_OF_TIME = 0.05  # ... and at all times together in this one
_RISEN = 0.1
"""Share of the lowest loss, by which the last one is higher where an earlier step is kept. A step
whose rate has not fallen yet answers worse than its loss says: of one run step 449 of 639 had 3.01
nats and 50.8 % of 500 answers exact, the last step 3.06 and 57.4 %."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How to train. epochs: passes over the examples. batch_size: examples a step. max_tokens:
    ids of one forward pass. learning_rate, rows_learning_rate: of the LoRA and of new rows.
    warm_up: share of the run with a rising rate. spell_out: see examples.segmented. time_limit_s:
    everything ends by then, decayed; None is none. validations: how often the held-back loss is
    measured at most, and last at the end. save_every_s: seconds. seed: of everything random."""

    epochs: float = 3.0
    batch_size: int = 16
    max_tokens: int = 1024
    learning_rate: float = 1e-3
    rows_learning_rate: float = 3e-3
    warm_up: float = 0.03
    spell_out: float = 0.05
    time_limit_s: float | None = None
    validations: int = 10
    save_every_s: float = 120.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """step of num_steps, seconds that are left; validation: nats an answer on held-out examples, at
    the steps that measured it."""

    step: int
    num_steps: int
    left_s: float
    validation: float | None = None


@dataclass(frozen=True, slots=True)
class TrainResult:
    """steps done, the step that was kept, whether the time limit ended the run, seconds, and nats
    an answer on held-out examples before and after."""

    num_steps: int
    kept_step: int
    ended_by_clock: bool
    elapsed_s: float
    nats_before: float
    nats_after: float


def evaluate_loss(
    tuned: Tuned,
    examples: Sequence[TrainExample],
    options: TrainOptions,
    *,
    goes_on: Callable[[], bool] = lambda: True,
) -> tuple[float, int]:
    """(mean nats of an answer: -ln of the model's chance of the whole output, teacher-forced;
    of how many examples). goes_on: asked between batches; the rest is left out where it says no.
    """
    total, num = 0.0, 0
    tuned.module.eval()
    with torch.no_grad():
        for at in range(0, len(examples), 2 * options.batch_size):
            if num and not goes_on():
                break
            some = [
                segmented(example, tuned.enrichment)
                for example in examples[at : at + 2 * options.batch_size]
            ]
            for batch in _batches(tuned, some, options, random.Random(0)):
                total += float(tuned.loss(batch))
            num += len(some)
    tuned.module.train()
    return (total / num if num else math.nan), num


def _batches(
    tuned: Tuned, examples: Sequence[TrainExample], options: TrainOptions, chooser: random.Random
) -> Iterator[Any]:
    for group in microbatches(examples, options.max_tokens, chooser, packed=tuned.is_packed):
        yield collate(group, tuned.device, packed=tuned.is_packed)


@dataclass(slots=True)
class _State:
    """The state of a run that a checkpoint holds beside tensors. num_held: examples that are
    validated on, -1: not decided. validated, best_nats, best_step: at the last validation, and the
    best one."""

    step: int = 0
    elapsed_s: float = 0.0
    nats_before: float = math.nan
    num_held: int = -1
    validation_s: float = 0.0
    num_validated: int = 0
    best_nats: float = math.inf
    best_step: int = 0


def train(
    tuned: Tuned,
    examples: Sequence[TrainExample],
    held_out: Sequence[TrainExample],
    options: TrainOptions,
    folder: Path,
    *,
    report: Callable[[TrainProgress], None],
    clock: Callable[[], float] = time.monotonic,
    began: float | None = None,
    base: str = "",
) -> TrainResult:
    """Train `tuned` in place. folder: for the checkpoint, which whoever saves the result removes
    then. began: when the time limit begins, by the clock; None: now. base: names the model and its
    form.

    Raises ConfigError for a loss that is not finite, and for a checkpoint of another run.
    """
    run = _Run(tuned, examples, options, folder, base)
    state = run.state
    tuned.module.train()  # else nothing is computed again in backward
    began = (clock() if began is None else began) - state.elapsed_s
    limit = options.time_limit_s or math.inf
    if state.num_held < 0:
        asked = clock()
        most = math.ceil(_HELD_SHARE * options.epochs * len(examples))
        held_out = held_out[: max(_LEAST_HELD, most)]
        state.nats_before, state.num_held = evaluate_loss(
            tuned, held_out, options, goes_on=lambda: clock() - asked < _MOST_OF_TIME * limit
        )
        state.validation_s = clock() - asked
    held_out = held_out[: state.num_held]
    # A validation takes a batch at least, of whatever length: where time is short there are fewer.
    num_validations = min(options.validations, _ALL_OF_TIME * limit / max(state.validation_s, 1e-9))
    saved, longest = clock(), 0.0
    stepping, first = 0.0, state.step  # seconds in steps of this process, and where it went on
    try:
        while state.step < run.num_steps:
            at = clock()
            # What ends the run comes out of the limit, too: a last step, a validation, the files.
            left = began + limit - at - 1.1 * (longest + state.validation_s)
            if left <= 0:
                break
            done = max(state.step / run.num_steps, (at - began) / (at - began + left))
            run.step(done)
            took = clock() - at
            longest, stepping = max(longest, took), stepping + took
            validation = None
            due = math.floor(done * num_validations)
            if held_out and due > state.num_validated and state.step < run.num_steps:
                validation = run.validate(held_out)
                state.num_validated = due
            state.elapsed_s = clock() - began
            # Steps tell, not `done`: that has the clock's share, also of what ran before a stop.
            each = stepping / (state.step - first)
            left = min((run.num_steps - state.step) * each, limit - state.elapsed_s)
            report(TrainProgress(state.step, run.num_steps, max(0.0, left), validation))
            if clock() - saved > options.save_every_s:
                run.save()
                saved = clock()
    except KeyboardInterrupt:
        if run.is_whole:
            run.save()
        raise
    if held_out:
        run.validate(held_out, is_last=True)
    after = state.best_nats if held_out else math.nan
    return TrainResult(
        state.step, state.best_step if held_out else state.step, state.step < run.num_steps,
        clock() - began, state.nats_before, after,
    )  # fmt: skip


class _Run:
    """A run's optimizer, its state, and their checkpoint: one file, replaced as a whole."""

    def __init__(
        self, tuned: Tuned, examples: Sequence[TrainExample], options: TrainOptions, folder: Path,
        base: str,
    ) -> None:  # fmt: skip
        self._tuned, self._examples, self._options = tuned, examples, options
        self._per_epoch = math.ceil(len(examples) / options.batch_size)
        self.num_steps = max(1, math.ceil(options.epochs * self._per_epoch))
        groups = []
        for is_lora, rate in ((True, options.learning_rate), (False, options.rows_learning_rate)):
            params = [p for name, p in tuned.trained() if (".lora_" in name) == is_lora]
            if params:
                groups.append({"params": params, "lr": rate, "base": rate})
        self._optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
        self._file = folder / CHECKPOINT
        self._identity = json.dumps([base, _identity(examples, options, tuned)], sort_keys=True)
        self._best: dict[str, torch.Tensor] = {}
        self.is_whole = True  # what is trained, and not in the middle of an update
        self.state = self._load()

    def step(self, done: float) -> None:
        """One update. done: share of the run. Its examples are a function of the seed and the step.
        Raises ConfigError for nan."""
        options, tuned, state = self._options, self._tuned, self.state
        epoch, at = divmod(state.step, self._per_epoch)
        order = list(range(len(self._examples)))
        random.Random(f"{options.seed} epoch {epoch}").shuffle(order)
        chooser = random.Random(f"{options.seed} step {state.step}")
        chosen = [
            segmented(
                self._examples[i], tuned.enrichment, chooser=chooser, spell_out=options.spell_out
            )
            for i in order[at * options.batch_size : (at + 1) * options.batch_size]
        ]
        warm = options.warm_up
        factor = done / warm if done < warm else (1.0 - done) / (1.0 - warm)
        for group in self._optimizer.param_groups:
            group["lr"] = group["base"] * max(0.02, factor)
        # Dropout's. Without CUDA torch.manual_seed writes down its stack, for milliseconds.
        generator: Any = torch if tuned.device.type == "cuda" else torch.default_generator
        generator.manual_seed(options.seed * 1_000_003 + state.step)
        num_targets = total = 0.0
        for batch in _batches(tuned, chosen, options, chooser):
            loss = tuned.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            num_targets += batch.targets.numel()
        if not math.isfinite(total):
            raise ConfigError(_NOT_FINITE)
        num_targets = max(1.0, num_targets)  # an empty output without a prompt has none
        trained = [parameter for _, parameter in tuned.trained()]
        torch._foreach_div_([p.grad for p in trained if p.grad is not None], num_targets)
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        self.is_whole = False
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        state.step += 1
        self.is_whole = True

    def validate(self, held_out: Sequence[TrainExample], *, is_last: bool = False) -> float:
        """Nats an answer; what is trained is kept where they are the fewest so far, or hardly more
        at the last step, which goes back to what was kept. Raises ConfigError where no validation
        gave a number."""
        nats, _ = evaluate_loss(self._tuned, held_out, self._options)
        if nats <= (1.0 + is_last * _RISEN) * self.state.best_nats:
            best = {name: p.detach().clone() for name, p in self._tuned.trained()}
            self._best, self.state.best_nats, self.state.best_step = best, nats, self.state.step
        if is_last:
            if not self._best:
                raise ConfigError(_NOT_FINITE)
            self._put(self._best)
        return nats

    def _put(self, tensors: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._tuned.trained():
                parameter.copy_(tensors[name])

    def _load(self) -> _State:
        """The saved state, with the tensors restored; a new one where nothing was saved."""
        if not self._file.is_file():
            return _State()
        identity = None
        with suppress(Exception):  # whatever a damaged file makes torch raise
            saved = torch.load(self._file, weights_only=True)
            identity = saved["identity"]
        if identity != self._identity:
            raise ConfigError(
                f"{self._file} is damaged, or of another run (other data, options or model); "
                "delete it to begin anew"
            )
        self._put(saved["trained"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._best = saved["best"]
        return _State(**saved["state"])

    def save(self) -> None:
        """Save atomically. Raises OSError; the earlier checkpoint then stays."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        body = {
            "identity": self._identity,
            "state": asdict(self.state),
            "trained": {name: p.detach() for name, p in self._tuned.trained()},
            "best": self._best,
            "optimizer": self._optimizer.state_dict(),
        }
        with replacing(self._file) as out:
            torch.save(body, out)


def _identity(
    examples: Sequence[TrainExample], options: TrainOptions, tuned: Tuned
) -> dict[str, Any]:
    """What a run must share with a checkpoint to continue it."""
    kept = {k: v for k, v in asdict(options).items() if k not in ("save_every_s", "time_limit_s")}
    enrichment = "" if tuned.enrichment is None else tuned.enrichment.hash
    ids = hashlib.sha256()
    for example in examples:
        ids.update(repr(example).encode())
    lora = asdict(tuned.options)
    return kept | {"lora": lora, "examples": ids.hexdigest(), "enrichment": enrichment}
