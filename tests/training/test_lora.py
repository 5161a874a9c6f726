"""The model in training: its loss and gradients are transformers', PEFT reads what is saved."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from server.commands.enrich import give_rows
from server.errors import ConfigError
from server.model.adapter import ENRICHMENT_FILE
from server.training.examples import (
    TrainExample,
    collate,
    microbatches,
    segmented,
    shared_prefix,
)
from server.training.lora import (
    LoraLinear,
    LoraOptions,
    OwnHead,
    Tuned,
    initial_rows,
    plan_memory,
    save,
)
from server.training.stored import Floats
from tests.model.families import FAMILIES
from tests.model.generic_models import GENERIC
from tests.training.tiny import ENRICHMENT, EOS, V, base, examples, over, shake, tuned
from vocab_store.enrichment import Enrichment

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT reads old attributes

CPU = torch.device("cpu")
NO_LINEAR = {"gpt2"}
MODELS: dict[str, Callable[[], Any]] = {
    **FAMILIES,
    **{name: make for name, (_, make) in GENERIC.items() if name not in NO_LINEAR},
}


def texts(num: int, vocab_size: int, shared: int = 11) -> list[TrainExample]:
    """Prompts that begin alike, of more ids than a window holds."""
    chooser = random.Random(7)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(chooser.randrange(3, vocab_size) for _ in range(n))

    start = ids(shared)
    return [
        TrainExample((*start, *ids(chooser.randrange(1, 9))), ids(chooser.randrange(1, 9)))
        for _ in range(num)
    ]


def losses(given: Tuned, data: list[TrainExample], *, packed: bool) -> tuple[float, list[Any]]:
    """(loss, gradients) of the examples in one pass."""
    loss = given.loss(collate(data, CPU, packed=packed))
    loss.backward()
    gradients = [p.grad for _, p in given.trained()]
    for _, parameter in given.trained():
        parameter.grad = None
    return float(loss.detach()), gradients


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_loss_is_that_of_transformers_on_the_outputs_alone(name: str) -> None:
    """Of every family, of examples in one row behind their shared beginning."""
    model = MODELS[name]().float().eval()
    data = texts(4, model.config.vocab_size)
    theirs = 0.0
    with torch.no_grad():
        for example in data:
            text = torch.tensor([[*example.prompt_ids, *example.output_ids]])
            labels = text.clone()
            labels[:, : len(example.prompt_ids)] = -100
            theirs += float(model(input_ids=text, labels=labels).loss) * len(example.output_ids)
    given = over(model, None)
    given.module.eval()
    assert len(given.trained()) >= 4 * model.config.num_hidden_layers
    found, _ = losses(given, data, packed=given.is_packed)
    assert found == pytest.approx(theirs, rel=2e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_packing_sharing_and_computing_again_change_no_gradient(name: str) -> None:
    model = FAMILIES[name]().float()
    num = model.config.vocab_size
    own = Enrichment("tok", num, (num, num + 1), ((3, 4), (5, 6, 7)))
    given = shake(over(model, own))
    data = [TrainExample(e.prompt_ids, (num, *e.output_ids, num + 1)) for e in texts(5, num)]
    assert given.is_packed and shared_prefix(data) >= 11
    want, gradients = losses(given, data, packed=False)
    assert all(g is not None and g.abs().max() > 0 for g in gradients)
    alone = [losses(given, [example], packed=True) for example in data]
    assert sum(loss for loss, _ in alone) == pytest.approx(want, rel=1e-5)
    found, packed = losses(given, data, packed=True)
    assert found == pytest.approx(want, rel=1e-5)
    given.module.train()
    given.module.activation_checkpointing_enable({"use_reentrant": False})
    _, again = losses(given, data, packed=True)
    for i, gradient in enumerate(gradients):
        size = float(gradient.abs().max())
        for other in (sum(g[i] for _, g in alone), packed[i], again[i]):
            torch.testing.assert_close(other, gradient, rtol=1e-4, atol=2e-5 * size)


def dropped(x: torch.Tensor, dropout: float, seed: int) -> torch.Tensor:
    """What a LoRA sees of x in training: through a layer whose A and B change nothing."""
    num = x.shape[-1]
    nothing = Floats(torch.zeros(num, num))
    layer = LoraLinear(nothing, None, LoraOptions(num, num, dropout), torch.float32)
    with torch.no_grad():
        layer.lora_A.copy_(torch.eye(num))
        layer.lora_B.copy_(torch.eye(num))
        torch.manual_seed(seed)
        return layer(x)


def test_dropout_drops_its_share_and_lifts_the_rest() -> None:
    for share in (0.1, 0.4):
        seen = dropped(torch.ones(1001, 64), share, 3)
        rest = seen[seen > 0]
        torch.testing.assert_close(rest, torch.full_like(rest, 1 / (1 - share)), rtol=1e-4, atol=0)
        assert float((seen == 0).float().mean()) == pytest.approx(share, abs=5 / 64064**0.5 / 2)
        assert len({tuple(row) for row in seen.tolist()}) > 990  # no two rows lose the same
    assert dropped(torch.ones(9, 4), 1 - 1e-9, 3).isfinite().all()


def test_a_linear_layer_s_gradients_are_those_of_its_formula() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(7, 5), torch.randn(7)
    layer = LoraLinear(Floats(weight), bias, LoraOptions(3, 6, 0.4), torch.float32)
    with torch.no_grad():
        layer.lora_B.normal_()
    x, toward = torch.randn(2, 4, 5, requires_grad=True), torch.randn(2, 4, 7)
    for training in (False, True):
        layer.train(training)
        torch.manual_seed(9)
        out = layer(x)
        found = torch.autograd.grad((out * toward).sum(), [x, layer.lora_A, layer.lora_B])
        kept = dropped(torch.ones(2, 4, 5), 0.4, 9) if training else 1.0
        low = (x * kept) @ layer.lora_A.T
        plain = x @ weight.T + bias + 2.0 * low @ layer.lora_B.T
        torch.testing.assert_close(out, plain)
        want = torch.autograd.grad((plain * toward).sum(), [x, layer.lora_A, layer.lora_B])
        for ours, theirs in zip(found, want, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_new_rows_lean_to_the_last_part_at_the_input_and_to_the_first_at_the_head() -> None:
    table = torch.eye(4)

    def rows(ids: torch.Tensor) -> torch.Tensor:
        return table[ids]

    inputs = initial_rows(rows, [(0, 1, 2)], side="input")[0]
    heads = initial_rows(rows, [(0, 1, 2)], side="head")[0]
    assert inputs.argmax() == 2
    assert heads.argmax() == 0
    assert inputs.sum().item() == pytest.approx(1.0)
    assert inputs[:3].flip(0).tolist() == pytest.approx(heads[:3].tolist())
    mean = initial_rows(rows, [(0, 1, 2)], side="input", start="mean")[0]
    assert mean[:3].tolist() == pytest.approx([1 / 3] * 3)
    assert initial_rows(rows, [], side="head").shape == (0, 4)


def test_own_rows_change_no_logit_of_the_base_and_take_reserved_ids() -> None:
    """An id of a row that the base never used is the adapter's own."""
    own = Enrichment("tok", V, (38, V), ((7, 8), (5, 6)))
    model = base()
    with torch.no_grad():
        before = model(input_ids=torch.tensor([[3, 7, 8, 1]])).logits[0]
    given = shake(over(model, own))
    rows = given.head.rows
    assert rows is not None and given.embedding.rows is not None
    with torch.no_grad():
        states = base().model(input_ids=torch.tensor([[3, 7, 8, 1]])).last_hidden_state[0]
        found = given.head.logits(states, rows)
        embedded = given.embedding(torch.tensor([[38, 3, V]]))[0]
    assert found.shape[-1] == V + 1
    others = [i for i in range(V) if i != 38]
    torch.testing.assert_close(found[:, others], before[:, others])
    torch.testing.assert_close(found[:, [38, V]], states @ rows.T)
    torch.testing.assert_close(embedded[[0, 2]], given.embedding.rows.detach())


def test_peft_reads_the_adapter_and_gives_the_same_loss(tmp_path: Path) -> None:
    from peft import PeftModel

    given, data = shake(tuned()), [segmented(e, ENRICHMENT) for e in examples()]
    found, _ = losses(given, data, packed=True)
    save(given, tmp_path / "adapter")
    assert Enrichment.load(tmp_path / "adapter" / ENRICHMENT_FILE) == ENRICHMENT
    wide = base()
    give_rows(wide, dict(zip(ENRICHMENT.ids, ENRICHMENT.parts, strict=True)))
    with torch.no_grad():  # the adapter's rows are absolute: whatever stands there is replaced
        for table in (wide.get_input_embeddings(), wide.get_output_embeddings()):
            table.weight[V:] = 7.0
    loaded = PeftModel.from_pretrained(wide, str(tmp_path / "adapter")).eval()
    theirs = 0.0
    for example in data:
        text = torch.tensor([[*example.prompt_ids, *example.output_ids]])
        with torch.no_grad():
            chances = loaded(input_ids=text).logits[0].log_softmax(-1)
        at = range(len(example.prompt_ids) - 1, text.shape[1] - 1)
        theirs -= sum(float(chances[i, text[0, i + 1]]) for i in at)
    assert found == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_where_a_long_form_begins_own_ids_have_no_chance_and_no_gradient(cap: float) -> None:
    torch.manual_seed(4)
    table, states = torch.randn(V, 8), torch.randn(6, 8, requires_grad=True)
    head = OwnHead(Floats(table), list(ENRICHMENT.ids), torch.randn(2, 8), cap)
    assert head.rows is not None
    targets = torch.tensor([7, 5, 7, V, 3, V + 1])
    spelled = torch.tensor([True, True, False, False, False, False])
    loss = head.loss(states, targets, spelled)
    loss.backward()
    rows = head.rows.detach().requires_grad_()
    given = states.detach().requires_grad_()
    logits = given @ torch.cat((table, rows)).T
    logits = cap * torch.tanh(logits / cap) if cap else logits
    without = functional.cross_entropy(logits[:2, :V], targets[:2], reduction="sum")
    want = without + functional.cross_entropy(logits[2:], targets[2:], reduction="sum")
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(states.grad, given.grad)
    torch.testing.assert_close(head.rows.grad, rows.grad)


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match="another tokenizer"):
        over(base(), Enrichment("other", V, (V,), ((1, 2),)))
    with pytest.raises(ConfigError, match="is of 41 ids, the model has 40"):
        over(base(), Enrichment("tok", V + 1, (V + 1,), ((1, 2),)))
    with pytest.raises(ConfigError, match="no linear layers"):
        over(GENERIC["gpt2"][1](), None)


def test_layers_are_computed_again_where_memory_is_short() -> None:
    class Sizes:
        hidden_size, intermediate_size, num_hidden_layers = 576, 1536, 30

    assert plan_memory(Sizes, 300.0, 20, 90, 2 << 30) == (1509, False)
    # A long shared beginning is worth more ids a pass; a long example needs them.
    assert plan_memory(Sizes, 3500.0, 560, 1100, 2 << 30)[1]
    assert plan_memory(Sizes, 3500.0, 560, 1100, 6 << 30) == (4096, False)
    num, again = plan_memory(Sizes, 300.0, 20, 5000, 2 << 30)
    assert again and num >= 5000


def test_what_is_kept_for_backward_is_what_the_plan_counts() -> None:
    config = LlamaConfig(
        vocab_size=V, hidden_size=144, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=9, num_key_value_heads=3, head_dim=16, eos_token_id=EOS,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    given = over(LlamaForCausalLM(config).float(), None, LoraOptions(4, 4, 0.1))
    given.module.train()
    trained = {p.untyped_storage().data_ptr() for _, p in given.trained()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in trained:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    example = TrainExample(tuple(range(1, 38)) * 10, (5, 6, EOS))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        given.loss(collate([example], given.device, packed=True))
    num, _ = plan_memory(config, 1000.0, 0, 10, sum(kept.values()))
    assert num == pytest.approx(len(example), rel=0.1)


def test_outputs_are_spelled_out_now_and_then_and_batches_hold_everything_once() -> None:
    example = TrainExample((1,), (7, 8, 9, 5, 6, EOS))
    assert segmented(example, ENRICHMENT).output_ids == (V, V + 1, EOS)
    drawn = {
        (made.output_ids, made.spelled)
        for made in (
            segmented(example, ENRICHMENT, chooser=random.Random(i), spell_out=0.5)
            for i in range(40)
        )
    }
    assert drawn == {
        ((V, V + 1, EOS), (False, False, False)),
        ((7, 8, 9, V + 1, EOS), (True, False, False, False, False)),
        ((V, 5, 6, EOS), (False, True, False, False)),
        ((7, 8, 9, 5, 6, EOS), (True, False, False, True, False, False)),
    }
    data = examples(30)
    for packed in (False, True):
        groups = list(microbatches(data, 40, random.Random(1), packed=packed))
        assert sorted(map(id, data)) == sorted(id(e) for group in groups for e in group)
        sizes = [collate(group, CPU, packed=packed).input_ids.numel() for group in groups]
        assert max(sizes) <= 40 and len(groups) > 3


def test_rows_and_targets_of_a_batch() -> None:
    group = [
        TrainExample((1, 2), (3, 4), (True, False)),
        TrainExample((), (5, 6, 7), (True, False, True)),
    ]
    batch = collate(group, CPU, packed=False)
    assert batch.spelled.tolist() == [True, False, False, True]
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert batch.rows.tolist() == [1, 2, 4, 5]
    assert batch.targets.tolist() == [3, 4, 6, 7]
    group = [
        TrainExample((1, 2, 8), (3,)),
        TrainExample((1, 2), (4, 5)),
        TrainExample((1, 2), (6,)),
    ]
    batch = collate(group, CPU, packed=True)
    assert batch.layout is not None and batch.layout.num_prefix == 1  # the last one predicts
    assert batch.input_ids.tolist() == [[1, 2, 8, 3, 2, 4, 5, 2, 6]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 1, 2, 3, 1, 2]]
    assert batch.rows.tolist() == [2, 4, 5, 7]
    assert batch.targets.tolist() == [3, 4, 5, 6]
