"""Training: the loss is transformers' own, a stop changes nothing, PEFT reads what is saved."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from server.errors import ConfigError
from server.training.examples import TrainExample, collate, microbatches, segmented
from server.training.loop import TrainOptions, TrainProgress, evaluate_loss, train
from server.training.lora import ENRICHMENT_FILE, LoraOptions, Tuned, prepare, save, widen
from server.training.rows import initial_rows
from vocab_store.enrichment import Enrichment

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT reads old attributes

V, EOS = 40, 39
ENRICHMENT = Enrichment("tok", V, (V, V + 1), ((7, 8, 9), (5, 6)))
OPTIONS = TrainOptions(
    epochs=4, batch_size=4, max_tokens=64, learning_rate=2e-2, rows_learning_rate=2e-2,
    validate_every=3, save_every_s=0.0, seed=3,
)  # fmt: skip


def base(tied: bool = True) -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied,
        eos_token_id=EOS, bos_token_id=None, pad_token_id=None, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).float()


def tuned(enrichment: Enrichment | None = ENRICHMENT) -> Tuned:
    torch.manual_seed(2)
    return prepare(base(), enrichment, LoraOptions(rank=4, alpha=8), tokenizer="tok")


def examples(num: int = 10) -> list[TrainExample]:
    """The output copies the prompt's last id behind a fixed phrase."""
    chooser = random.Random(5)
    made = []
    for _ in range(num):
        prompt = tuple(chooser.randrange(10, 38) for _ in range(chooser.randrange(1, 5)))
        made.append(TrainExample(prompt, (7, 8, 9, prompt[-1], 5, 6, EOS)))
    return made


def test_the_loss_is_that_of_transformers_on_the_outputs_alone() -> None:
    given = tuned(None)
    model = given.model
    for example in examples(3):
        text = torch.tensor([[*example.prompt_ids, *example.output_ids]])
        labels = text.clone()
        labels[:, : len(example.prompt_ids)] = -100
        model.eval()
        loss = model(input_ids=text, labels=labels).loss.detach()
        theirs = float(loss) * len(example.output_ids)
        ours = evaluate_loss(given, [example], OPTIONS, torch.device("cpu"))
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_padding_and_grouping_change_no_loss() -> None:
    given, data = tuned(), examples(9)
    alone = [evaluate_loss(given, [e], OPTIONS, torch.device("cpu")) for e in data]
    together = evaluate_loss(given, data, OPTIONS, torch.device("cpu"))
    assert together == pytest.approx(sum(alone) / len(alone), rel=1e-5)


def test_new_rows_lean_to_the_last_part_at_the_input_and_to_the_first_at_the_head() -> None:
    table = torch.eye(4)
    inputs = initial_rows(table, [(0, 1, 2)], side="input")[0]
    heads = initial_rows(table, [(0, 1, 2)], side="head")[0]
    assert inputs.argmax() == 2
    assert heads.argmax() == 0
    assert inputs.sum().item() == pytest.approx(1.0)
    assert inputs[:3].flip(0).tolist() == pytest.approx(heads[:3].tolist())
    mean = initial_rows(table, [(0, 1, 2)], side="input", start="mean")[0]
    assert mean[:3].tolist() == pytest.approx([1 / 3] * 3)


def test_widening_changes_no_logit_of_the_base() -> None:
    model = base()
    ids = torch.tensor([[3, 7, 8, 9, 1]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        widen(model, ENRICHMENT)
        after = model(input_ids=ids).logits
    assert after.shape[-1] == V + 2
    assert torch.equal(before, after[..., :V])


def test_training_learns_the_task_and_the_enriched_ids(tmp_path: Path) -> None:
    given = tuned()
    seen: list[TrainProgress] = []
    options = TrainOptions(
        epochs=40, batch_size=5, learning_rate=2e-2, rows_learning_rate=5e-2, spell_out=0.0
    )
    result = train(given, examples(), examples(4), options, tmp_path, report=seen.append)
    assert result.nats_after < 0.3 * result.nats_before
    assert [p.step for p in seen] == list(range(1, result.num_steps + 1))
    assert not result.ended_by_clock
    assert not list(tmp_path.glob("checkpoint*"))
    given.model.eval()
    with torch.no_grad():
        first = [
            int(given.model(input_ids=torch.tensor([e.prompt_ids])).logits[0, -1].argmax())
            for e in examples()
        ]
    assert first == [V] * len(first)  # the token (7, 8, 9), not the id 7


def test_a_stopped_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    def parameters(given: Tuned) -> dict[str, torch.Tensor]:
        return {n: p.detach() for n, p in given.model.named_parameters() if p.requires_grad}

    whole = tuned()
    ticks = count()
    train(whole, examples(), [], OPTIONS, tmp_path / "a", report=lambda _: None,
          clock=lambda: float(next(ticks)))  # fmt: skip

    def stop(progress: TrainProgress) -> None:
        if progress.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tuned(), examples(), [], OPTIONS, tmp_path / "b", report=stop,
              clock=lambda: float(next(ticks)))  # fmt: skip
    assert (tmp_path / "b" / "checkpoint.pt").is_file()
    resumed = tuned()
    steps: list[int] = []
    train(resumed, examples(), [], OPTIONS, tmp_path / "b",
          report=lambda p: steps.append(p.step), clock=lambda: float(next(ticks)))  # fmt: skip
    assert steps[0] == 5  # step 5 was reported before it was saved
    theirs = parameters(resumed)
    for name, tensor in parameters(whole).items():
        assert torch.equal(tensor, theirs[name]), name


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    def stop(progress: TrainProgress) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tuned(), examples(), [], OPTIONS, tmp_path, report=stop)
    with pytest.raises(ConfigError, match="another run"):
        train(tuned(), examples(7), [], OPTIONS, tmp_path, report=lambda _: None)


def test_the_clock_ends_a_run_with_a_decayed_rate(tmp_path: Path) -> None:
    ticks = count(0, 1)
    options = TrainOptions(epochs=1000, batch_size=5, time_limit_s=40.0, validate_every=10_000)
    result = train(tuned(), examples(), [], options, tmp_path, report=lambda _: None,
                   clock=lambda: float(next(ticks)))  # fmt: skip
    assert result.ended_by_clock
    assert 5 < result.num_steps < 40


def test_peft_reads_the_adapter_and_gives_the_same_logits(tmp_path: Path) -> None:
    from peft import PeftModel

    given = tuned()
    train(given, examples(), [], OPTIONS, tmp_path, report=lambda _: None)
    save(given, tmp_path / "adapter")
    assert Enrichment.load(tmp_path / "adapter" / ENRICHMENT_FILE) == ENRICHMENT
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 60_000
    wide = base()
    widen(wide, ENRICHMENT, "mean")  # other rows: the adapter's own are absolute
    loaded = PeftModel.from_pretrained(wide, str(tmp_path / "adapter"))
    ids = torch.tensor([[3, V, 12, V + 1]])
    given.model.eval()
    loaded.eval()
    with torch.no_grad():
        expected, found = given.model(input_ids=ids).logits, loaded(input_ids=ids).logits
    assert torch.equal(expected, found)
    with pytest.raises(ConfigError, match="another tokenizer"):
        prepare(base(), ENRICHMENT, LoraOptions(), tokenizer="other")


def test_outputs_are_spelled_out_now_and_then_and_batches_hold_everything_once() -> None:
    example = TrainExample((1,), (7, 8, 9, 5, 6, EOS))
    assert segmented(example, ENRICHMENT).output_ids == (V, V + 1, EOS)
    drawn = {
        segmented(example, ENRICHMENT, chooser=random.Random(i), spell_out=0.5).output_ids
        for i in range(40)
    }
    assert len(drawn) == 4
    assert all(ENRICHMENT.expand(ids) == list(example.output_ids) for ids in drawn)
    data = examples(30)
    groups = list(microbatches(data, 40, random.Random(1)))
    assert sorted(map(id, data)) == sorted(id(e) for group in groups for e in group)
    assert all(len(g) * max(map(len, g)) <= 40 for g in groups)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_rows_and_targets_of_a_padded_batch() -> None:
    batch = collate(
        [TrainExample((1, 2), (3, 4)), TrainExample((), (5, 6, 7))], torch.device("cpu")
    )
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert batch.rows.tolist() == [1, 2, 4, 5]
    assert batch.targets.tolist() == [3, 4, 6, 7]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
