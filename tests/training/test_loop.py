"""Training: a stop changes nothing, the right step is kept, a time limit holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from server.errors import ConfigError
from server.training import loop
from server.training.examples import TrainExample, collate, segmented
from server.training.loop import TrainOptions, TrainProgress, TrainResult, evaluate_loss, train
from server.training.lora import Tuned
from tests.training.tiny import ENRICHMENT, EOS, V, examples, next_id, tuned

OPTIONS = TrainOptions(
    epochs=2, batch_size=4, max_tokens=64, learning_rate=2e-2, rows_learning_rate=2e-2,
    validations=4, save_every_s=0.0, seed=3,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_training_learns_the_task_in_the_enriched_ids_and_their_long_form(tmp_path: Path) -> None:
    given = tuned()
    seen: list[TrainProgress] = []
    options = TrainOptions(
        epochs=48, batch_size=5, learning_rate=2e-2, rows_learning_rate=5e-2, spell_out=0.7
    )
    result = train(given, examples(), examples(4), options, tmp_path, report=seen.append)
    assert result.nats_after < 0.3 * result.nats_before
    again, num = evaluate_loss(given, examples(4), options)
    assert num == 4 and again == pytest.approx(result.nats_after, rel=1e-5)
    assert [p.step for p in seen] == list(range(1, result.num_steps + 1))
    assert all(p.left_s > 0 for p in seen[:-1])
    assert not result.ended_by_clock
    for example in examples():
        given_prompt, last = example.prompt_ids, example.prompt_ids[-1]
        # Chosen though it was spelled out in seven examples of ten; around it, where it is not.
        assert next_id(given, given_prompt) == V
        assert next_id(given, given_prompt, but=V) == 7
        assert [next_id(given, (*given_prompt, *(7, 8, 9)[:n])) for n in (1, 2)] == [8, 9]
        assert next_id(given, (*given_prompt, 7, 8, 9, last)) == V + 1


@pytest.mark.parametrize("in_update", [False, True])
def test_a_stopped_run_ends_as_one_that_was_not(
    in_update: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()

    def run(given: Tuned, folder: str, stop_at: int = 0) -> list[int]:
        steps: list[int] = []

        def report(progress: TrainProgress) -> None:
            assert given.module.training  # layers are computed again in this mode alone
            steps.append(progress.step)
            if progress.step == stop_at and in_update:
                monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)
            elif progress.step == stop_at:
                raise KeyboardInterrupt

        given.module.eval()
        train(given, examples(), examples(3), OPTIONS, tmp_path / folder, report=report,
              clock=lambda: float(next(ticks)))  # fmt: skip
        return steps

    update = torch.optim.AdamW.step

    def interrupted(self: torch.optim.AdamW) -> None:
        update(self)
        raise KeyboardInterrupt

    whole, stopped, resumed = (tuned(dropout=0.1) for _ in range(3))
    run(whole, "a")
    with pytest.raises(KeyboardInterrupt):
        run(stopped, "b", stop_at=4)
    monkeypatch.undo()
    assert (tmp_path / "b" / "checkpoint.pt").is_file()
    assert run(resumed, "b")[0] == 5, "it is saved where it is interrupted"
    assert (tmp_path / "b" / "checkpoint.pt").is_file(), "until the result is saved"
    theirs = dict(resumed.trained())
    for name, parameter in whole.trained():
        assert torch.equal(parameter, theirs[name]), name


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    def stop(progress: TrainProgress) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    data = examples()
    with pytest.raises(KeyboardInterrupt):
        train(tuned(), data, [], OPTIONS, tmp_path, report=stop, base="a")
    first = replace(data[0], output_ids=data[1].output_ids)
    others: list[tuple[Tuned, list[TrainExample], str]] = [
        (tuned(), examples(7), "a"),
        (tuned(), [first, *data[1:]], "a"),  # of the same length
        (tuned(dropout=0.1), data, "a"),
        (tuned(), data, "b"),
    ]
    for given, some, base in others:
        with pytest.raises(ConfigError, match="another run"):
            train(given, some, [], OPTIONS, tmp_path, report=lambda _: None, base=base)
    file = tmp_path / "checkpoint.pt"
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1000], b"text"):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"damaged, .*; delete it to begin anew"):
            train(tuned(), data, [], OPTIONS, tmp_path, report=lambda _: None, base="a")
    file.write_bytes(whole)
    train(tuned(), data, [], OPTIONS, tmp_path, report=lambda _: None, base="a")


@pytest.mark.parametrize(("last", "kept"), [(1.09, 12), (1.11, 7)])
def test_the_lowest_held_back_loss_is_kept_or_the_last_where_it_has_hardly_risen(
    last: float, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run that was stopped in between, too."""
    half = list[torch.Tensor]()
    losses = iter([5.0, 1.0, last])  # before, in the middle, at the end
    monkeypatch.setattr(loop, "evaluate_loss", lambda *_, **__: (next(losses), 3))
    options = replace(OPTIONS, epochs=6, batch_size=5, validations=2)

    def run(stop_at: int) -> tuple[Tuned, TrainResult]:
        given = tuned()

        def report(progress: TrainProgress) -> None:
            if progress.validation is not None:
                half.extend(p.detach().clone() for _, p in given.trained())
            if progress.step == stop_at:
                raise KeyboardInterrupt

        return given, train(given, examples(), examples(3), options, tmp_path, report=report)

    with pytest.raises(KeyboardInterrupt):
        run(stop_at=9)
    given, result = run(stop_at=0)
    assert (result.kept_step, result.nats_after) == (kept, last if kept == 12 else 1.0)
    stays = [torch.equal(p, q) for (_, p), q in zip(given.trained(), half, strict=True)]
    assert all(stays) if kept == 7 else not any(stays)


def test_a_step_is_adamw_s_of_the_mean_loss_at_each_group_s_rate(tmp_path: Path) -> None:
    options = replace(
        OPTIONS, epochs=40, batch_size=10, rows_learning_rate=5e-2, warm_up=0.0, spell_out=0.0
    )  # a step of all examples in several batches
    given, plain = tuned(), tuned()
    train(given, examples(), [], options, tmp_path, report=lambda _: None)
    lora = [parameter for name, parameter in plain.trained() if ".lora_" in name]
    rows = [parameter for name, parameter in plain.trained() if ".lora_" not in name]
    optimizer = torch.optim.AdamW([{"params": lora}, {"params": rows}], weight_decay=0.0)
    for step in range(40):
        for group, rate in zip(optimizer.param_groups, (2e-2, 5e-2), strict=True):
            group["lr"] = rate * (1.0 - step / 40)
        some = [segmented(example, ENRICHMENT) for example in examples()]
        batch = collate(some, plain.device, packed=plain.is_packed)
        (plain.loss(batch) / batch.targets.numel()).backward()
        torch.nn.utils.clip_grad_norm_([*lora, *rows], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    theirs = dict(plain.trained())
    for name, parameter in given.trained():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("epochs", [1, 2])  # the last validation meets it, or a step
def test_a_loss_that_is_no_number_is_told(epochs: int, tmp_path: Path) -> None:
    options = replace(
        OPTIONS, epochs=epochs, batch_size=16, learning_rate=1e30, rows_learning_rate=1e30,
        warm_up=0.0,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="the loss is not finite"):
        train(tuned(), examples(), examples(3), options, tmp_path, report=lambda _: None)


def test_an_empty_output_without_a_prompt_teaches_nothing(tmp_path: Path) -> None:
    given, untrained = tuned(), dict(tuned().trained())
    train(given, [TrainExample((), (EOS,))], [], OPTIONS, tmp_path, report=lambda _: None)
    assert all(torch.equal(p, untrained[name]) for name, p in given.trained())


def forward_passes(given: Tuned) -> Callable[[], float]:
    """A clock of which each forward pass takes a second."""
    passes = 0

    def forward(*_: object) -> None:
        nonlocal passes
        passes += 1

    given.module.get_decoder().register_forward_hook(forward)
    return lambda: float(passes)


@pytest.mark.parametrize("epochs", [6, 1000])  # its steps end it, or its time
def test_the_time_left_is_right_behind_a_stop(epochs: int, tmp_path: Path) -> None:
    options = replace(OPTIONS, epochs=epochs, batch_size=5, time_limit_s=20.0)
    seen: list[TrainProgress] = []

    def run(stop_at: int) -> float:
        given = tuned()
        clock = forward_passes(given)

        def report(progress: TrainProgress) -> None:
            seen.append(progress)
            if progress.step == stop_at:
                raise KeyboardInterrupt

        train(given, examples(), [], options, tmp_path, report=report, clock=clock)
        return clock()

    with pytest.raises(KeyboardInterrupt):
        run(stop_at=5)
    stopped, took = len(seen), run(stop_at=0)
    assert seen[stopped].step == 6
    assert seen[stopped].left_s == pytest.approx(took - 1.0, abs=1.0)


@pytest.mark.parametrize(("limit_s", "num_held"), [(12.0, 0), (12.0, 6), (40.0, 6), (20.0, 90)])
def test_all_is_done_within_the_time_limit(limit_s: float, num_held: int, tmp_path: Path) -> None:
    """A forward pass takes a second here, and the command had taken two before."""
    given = tuned()
    passes = forward_passes(given)
    seen: list[TrainProgress] = []

    def report(told: TrainProgress) -> None:
        seen.append(told)
        assert passes() + 2.0 + told.left_s <= limit_s

    options = TrainOptions(epochs=1000, batch_size=5, time_limit_s=limit_s)
    result = train(
        given, examples(), examples(num_held), options, tmp_path, report=report, clock=passes,
        began=-2.0,
    )  # fmt: skip
    assert result.ended_by_clock and result.num_steps == seen[-1].step
    assert 0.6 * limit_s <= passes() + 2.0 <= limit_s
