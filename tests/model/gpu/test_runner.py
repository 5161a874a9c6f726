"""TorchRunner as a Runner: draws, tokens taken from the step before, slabs, errors, life cycle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from server.model.build import num_blocks_for
from server.model.gpu import attention
from server.model.gpu import body as graphs
from server.model.gpu.attention import Kept, KvCache
from server.model.gpu.body import Float8Linear, GraphKey, pad_to_bucket
from server.model.gpu.device import device_figures
from server.model.gpu.runner import TorchRunner
from server.types import DeviceFigures, SamplingParams
from tests.model import families
from tests.model.attention_cases import batch_of
from tests.model.batches import BatchBuilder, Pages, draw_params, prompt_step, run
from tests.model.families import tokens, truth
from tests.model.torch_runners import head_of, runner_over

V = families.VOCAB_SIZE
NUM_BLOCKS = 32
CPU = torch.device("cpu")


def make(family: str = "llama", **options: Any) -> TorchRunner:
    numbers: dict[str, Any] = {
        "num_blocks": NUM_BLOCKS, "max_num_seqs": 4, "max_num_batched_tokens": 64
    }  # fmt: skip
    return runner_over(families.build(family), **(numbers | options))


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    return make()


def test_nan_logits_are_reported_by_the_draw() -> None:
    made = make()
    with torch.no_grad():
        head_of(made).weight[17, 3] = float("nan")
    builder = BatchBuilder()
    row = builder.add_rows(Pages(NUM_BLOCKS).sequence(5), tokens(5, 8), 0)[-1]
    builder.draw(row, builder.add_params(draw_params()))
    builder.draw(row, builder.add_params(draw_params(SamplingParams(seed=1))))
    problems = run(made, builder.build()).problems
    assert [*problems] == [0, 1] and all("NaN" in problem for problem in problems.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 1 << 20}, "slot is outside"),
        ({"token_ids": V}, "outside the vocabulary"),
        ({"token_ids": -1}, "outside the vocabulary"),
        ({"positions": families.MAX_LEN}, "outside the model's length"),
        ({"seq_ids": 1}, "does not exist"),
        ({"prefix_len": 17}, "longer than its block table"),
        ({"path_len": 1}, "outside path_slots"),
    ],
)
def test_indices_outside_memory_are_refused(
    runner: TorchRunner, change: dict[str, int], message: str
) -> None:
    builder = BatchBuilder()
    builder.add_rows(Pages(NUM_BLOCKS).sequence(4), [5], 0)
    batch = builder.build()
    for name, value in change.items():
        getattr(batch, name)[0] = value
    runner.launch(batch)
    with pytest.raises(ValueError, match=message):
        runner.wait()


def test_splits_follow_the_history_and_float32_has_small_tiles() -> None:
    for longest in (2048, 9216, 40_960, 131_072):
        shape = attention.TileShape.of(
            num_heads=32, num_kv_heads=8, head_dim=64, max_model_len=longest, num_bytes=256 << 20
        )
        assert shape.split_size == 256 and shape.max_splits * 256 >= longest
        assert shape.large_m == attention.LARGE_M
    wide = attention.TileShape.of(
        num_heads=32, num_kv_heads=8, head_dim=64, max_model_len=2048, num_bytes=1 << 20,
        dtype=torch.float32,
    )  # fmt: skip
    assert wide.large_m == attention.SMALL_M


def test_warming_up_leaves_a_runner_that_draws_the_same() -> None:
    ids = tokens(12, 9)
    made = make()
    assert made.warm_up() == 4  # 65 rows at once do not fit 64 batched tokens
    made.launch(prompt_step([Pages(NUM_BLOCKS).sequence(12)], [ids]))
    with pytest.raises(RuntimeError, match="in flight"):
        made.warm_up()
    assert made.wait().token_ids.tolist() == [int(truth(families.build("llama"), ids)[-1].argmax())]


def test_life_cycle() -> None:
    made = make()
    assert made.device_figures() is None, "a CPU has none"
    with pytest.raises(RuntimeError, match="no step"):
        made.wait()
    builder = BatchBuilder()
    builder.add_rows(Pages(NUM_BLOCKS).sequence(4), [5], 0)
    batch = builder.build()
    made.launch(batch)
    with pytest.raises(RuntimeError, match="in flight"):
        made.launch(batch)
    drawn = made.wait()
    assert drawn.token_ids.shape == (0,) and drawn.model_s > 0.0
    made.close()
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        made.launch(batch)


def test_kv_memory_from_bytes() -> None:
    kept = Kept(3, 2, 16)
    per_block = kept.block_bytes(16, torch.float32)
    more = kept._replace(convolutions=2, width=5).block_bytes(16, torch.float32)
    assert more == per_block + 10 * 16 * 4
    num_blocks = num_blocks_for(per_block, CPU, num_bytes=10 * per_block + 5)
    cache = KvCache(kept, num_blocks, 16, torch.float32, CPU)
    assert cache.num_blocks == 9  # and one block for padded rows: never above what was given
    assert cache.memory.numel() * 4 == 10 * per_block
    with pytest.raises(ValueError, match="hold no block"):
        num_blocks_for(per_block, CPU, num_bytes=per_block)


@pytest.mark.parametrize(("free_gib", "total_gib"), [(15, 24), (5, 8), (8, 12), (20, 139), (3, 24)])
def test_kv_memory_is_a_fraction_of_what_is_free(
    free_gib: int, total_gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 4B model on 24 GiB, a 1B one on 8, a second engine beside a full one: all are served."""
    gib = 1 << 30
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (free_gib * gib, total_gib * gib)
    )
    cuda = torch.device("cuda", 0)
    per_block = 1 << 20
    assert num_blocks_for(per_block, cuda, fraction=0.5) == free_gib * 512 - 1
    assert num_blocks_for(per_block, cuda) == int(free_gib * gib * 0.85) // per_block - 1
    kept = num_blocks_for(per_block, cuda, reserve=1 << 30)
    assert kept == int((free_gib - 1) * gib * 0.85) // per_block - 1
    # What steps need is never so much that no block is left.
    assert num_blocks_for(per_block, cuda, reserve=100 * gib) > 0
    with pytest.raises(ValueError, match="hold no block"):
        num_blocks_for(per_block, cuda, fraction=1e-9)


def test_moves_read_before_they_write() -> None:
    cache = KvCache(Kept(2, 1, 4, 3, 5), 4, 4, torch.float32, CPU)
    cache.inputs.copy_(torch.arange(20.0)[None, :, None].expand_as(cache.inputs))
    cache.memory.copy_(torch.arange(20.0)[None, None, :, None, None].expand_as(cache.memory))
    i32 = lambda *slots: np.asarray(slots, np.int32)  # noqa: E731
    cache.move_slots(i32(1, 2, 3), i32(2, 3, 1))
    for layer_id in range(2):
        keys, values = cache.memory[layer_id]
        assert keys[:5, 0, 0].tolist() == [0, 3, 1, 2, 4] == values[:5, 0, 3].tolist()
    assert cache.inputs[2, :5, 4].tolist() == [0, 3, 1, 2, 4], "and what convolutions keep"
    cache.move_slots(cache.slots_of(i32(0, 3)), cache.slots_of(i32(3, 2)))
    assert cache.memory[1, 0][8:16, 0, 0].tolist() == [12, 13, 14, 15, 0, 3, 1, 2]
    for src, dst, message in [
        (i32(1), i32(1, 2), "1 source"),
        (i32(1, 2), i32(3, 3), "twice"),
        (i32(16), i32(1), "outside"),
        (i32(1), i32(-1), "outside"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.move_slots(src, dst)


def test_buckets_of_rows_and_levels_of_splits() -> None:
    buckets = {1: 1, 2: 2, 3: 4, 8: 8, 9: 16, 17: 32, 64: 64, 65: 96, 97: None}
    assert {num: graphs.row_bucket(num, 96) for num in buckets} == buckets
    assert [graphs.split_level(n, 64) for n in (1, 2, 4, 5, 17, 64)] == [1, 4, 4, 16, 64, 64]
    assert graphs.split_level(5, 8) == 8


def test_a_graph_that_cannot_be_captured_is_not_tried_at_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device that is not there."""
    key, hidden = GraphKey(4, 1), torch.ones(4, 2)

    def no_room(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("the pool is full")

    monkeypatch.setattr(torch.cuda, "graph", no_room)
    for name in ("CUDAGraph", "current_stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    made = graphs.StepGraphs(CPU, 8)
    assert made.run(key, lambda: hidden) is hidden, "the step itself is computed"
    assert made.refused == {key} and made.num_captured == 0
    made.forget()
    assert not made.refused


def tile_shape(max_partials: int = 10_000) -> attention.TileShape:
    return attention.TileShape(3, 256, 8, max_partials)


@pytest.mark.parametrize("max_partials", [10_000, 20, 0])
def test_partial_results_have_room(max_partials: int) -> None:
    """That the tiles are right the kernels show, which divide their rows by them."""
    plan = attention.plan_tiles(batch_of("mixed"), tile_shape(max_partials))
    assert plan.split_rows.shape[0] * plan.num_splits <= max_partials
    if max_partials == 10_000:  # 600 keys; all but the longer chunk
        assert (plan.num_splits, plan.split_rows.shape[0]) == (3, 55)


def test_ancestors_are_the_paths() -> None:
    """Bit by bit, for trees of more than one word, beside chunks and other trees."""
    rng = np.random.default_rng(7)
    pages = Pages(300)
    builder = BatchBuilder()
    builder.add_rows(pages.sequence(40), [1] * 30, 0)
    for num_nodes in (1, 5, 40, 70):
        table = pages.sequence(200)
        builder.add_rows(table, [1] * 3, 9)
        parents = [int(rng.integers(-1, i)) if i else -1 for i in range(num_nodes)]
        builder.add_tree(table, 11, [1] * num_nodes, parents)
    batch = builder.build()
    bits, starts = attention.ancestor_bits(batch), attention.tree_starts(batch)
    assert bits.shape == (batch.num_rows, 3) and bits.dtype == np.int32
    for row in range(batch.num_rows):
        begin = batch.path_start[row]
        path = batch.path_slots[begin : begin + batch.path_len[row]].tolist()
        seen = [j for j in range(96) if bits[row, j // 32] >> (j % 32) & 1]
        assert [int(batch.slots[starts[row] + j]) for j in seen] == path
    # A path to a later row, or to a row of another sequence's tree, is no path.
    for slot in (batch.slots[-1], batch.slots[34]):
        wrong = replace(batch, path_slots=np.full_like(batch.path_slots, slot))
        with pytest.raises(ValueError, match="earlier node of its tree"):
            attention.ancestor_bits(wrong)


def test_a_bucket_s_shapes_depend_on_the_bucket_alone() -> None:
    """What a CUDA graph needs, with and without trees; and what is padded does no harm."""

    def padded(num_seqs: int, num_nodes: int) -> dict[str, npt.NDArray[np.int32]]:
        pages = Pages(300)
        builder = BatchBuilder()
        for i in range(num_seqs):
            table = pages.sequence(700)
            builder.add_rows(table, [1], 600 + i)
        builder.add_tree(table, 600 + i, [1] * num_nodes, range(-1, num_nodes - 1))
        batch = builder.build()
        names = "token_ids positions seq_ids slots prefix_len block_tables".split()
        arrays = {name: getattr(batch, name) for name in names}
        arrays["ancestors"] = attention.ancestor_bits(batch)
        plan = attention.plan_tiles(batch, tile_shape())
        arrays |= {"short": plan.short, "long": plan.long, "split_rows": plan.split_rows}
        pad_to_bucket(arrays, GraphKey(8, 4), 4800, (4, 64))
        return arrays

    two, four = padded(2, 3), padded(4, 0)
    assert {k: a.shape for k, a in two.items()} == {k: a.shape for k, a in four.items()}
    assert two["slots"][5:].tolist() == [4800] * 3
    assert two["prefix_len"][5:].tolist() == [0] * 3
    assert two["ancestors"][:, 0].tolist() == [0, 0, 1, 3, 7, 0, 0, 0]
    # A group of three: five rows a tile, the second sequence's root and its tree in one.
    assert not two["short"][2:].any()
    assert two["split_rows"].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


def test_without_nvml_s_bindings_no_utilisation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that is not there."""
    device, shares = torch.device("cuda", 0), iter([75])
    told = {"mem_get_info": (5, 8), "memory_reserved": 2, "memory_allocated": 1}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)

    def utilization(_: torch.device) -> int:
        for share in shares:
            return share
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    assert device_figures(device) == DeviceFigures(2, 1, 5, 8, 0.75)
    assert device_figures(device) == DeviceFigures(2, 1, 5, 8)


def test_layers_in_eight_bits_are_near_and_rounded_once() -> None:
    """Every layer's product is that of the rounded weight and rows; the head stays in floats."""
    module: Any = families.build("qwen2")  # has biases
    linear = module.model.layers[0].self_attn.q_proj
    x = torch.randn((1, 5, linear.in_features), generator=torch.Generator().manual_seed(2))
    exact = linear(x).detach()
    own = Float8Linear(linear).requires_grad_(False)
    assert torch.equal(own(x)[:, 2:3], own(x[:, 2:3])), "a row's rounding is its own"
    weight = own.weight.float() * own.scales.t()
    rows = x[0].abs().amax(1, keepdim=True) / 448
    rounded = (x[0] / rows).to(torch.float8_e4m3fn).float() * rows
    want = (rounded @ weight.t()).bfloat16() + linear.bias
    torch.testing.assert_close(own(x)[0], want, rtol=2**-7, atol=1e-5)
    assert 0 < float((own(x) - exact).abs().max()) < 0.1 * float(exact.abs().max())
    made = runner_over(module, weights="fp8")
    left = [part for part in module.model.modules() if type(part) is torch.nn.Linear]
    assert all(part.in_features % 16 or part.out_features % 16 for part in left)
    assert sum(isinstance(part, Float8Linear) for part in module.modules()) > len(left)
    assert head_of(made).weight.dtype == torch.float32
