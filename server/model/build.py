"""build_runner: from a model folder and plain numbers to a Runner, on a CPU or CUDA.

The engine process calls this once. On a CPU, float32 and bfloat16 run on CpuRunner (fused, same
bits at every batch); CUDA runs TorchRunner.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from server.engine.batch import Runner
from server.errors import UnsupportedModelError
from server.machine import available_memory
from server.model.generic import IMPLEMENTATION, is_generic
from server.types import EngineSizes, ModelInfo, NarrowForm

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from server.model.gpu.runner import TorchRunner
    from server.model.loader import ModelFolder
    from server.model.shape import ModelShape

_log = logging.getLogger(__name__)

DEFAULT_FRACTIONS = {"cpu": 0.3, "cuda": 0.85}
"""Of the free memory that the KV cache takes, by kind of device: others use a CPU's memory too."""

MARGIN = 256 << 20
"""Bytes beside what the largest steps have taken: smaller graphs, adapters' graphs, slices of
vocabularies and fragments."""


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What a Runner is built from; plain values, so that it can be sent to a new process.

    folder: a model in transformers' form. adapter: a PEFT LoRA's folder, merged at load.
    dtype: "auto" is float32 on a CPU and the model's own on CUDA. weights: how a CPU keeps them:
    "auto", "float32", "bfloat16", "int8", "int8-blocks", "int4" or "file"; on CUDA the layers' are
    of `dtype` or "fp8". max_model_len: None = the model's own limit, or what the KV memory holds
    if that is less. threads:
    CPU threads, None = the cores this process may run on. kv_dtype: what a CPU keeps K and V as:
    "auto", "float32", "float16" or "int8". full_head: where the full LM head lies on
    CUDA: "device"; "stream", in CPU memory and copied through the device when it is needed; "cpu",
    the same, and `exact` is verified on the CPU. A CPU has it in its memory. cuda_graphs:
    whether steps of few rows replay captured graphs on CUDA. adapters:
    folders of those that stand beside it, and adapter_places: how many will be in memory at once,
    which the KV cache leaves room for there.
    """

    name: str
    folder: str
    sizes: EngineSizes = field(default_factory=EngineSizes)
    adapter: str | None = None
    device: str = "cpu"
    dtype: str = "auto"
    weights: str = "auto"
    kv_dtype: str = "auto"
    max_model_len: int | None = None
    threads: int | None = None
    full_head: Literal["auto", "device", "stream", "cpu"] = "device"
    cuda_graphs: bool = False
    adapters: tuple[str, ...] = ()
    adapter_places: int = 0


def build_runner(spec: RunnerSpec) -> Runner:
    """Load the model and make its Runner.

    Raises UnsupportedModelError for a model that is not supported, with the reason, ModelError
    for files that cannot be read, and ValueError for numbers that do not fit.
    """
    if spec.device == "cpu":
        return _build_cpu_runner(spec)
    if spec.weights not in ("auto", *get_args(NarrowForm)):
        raise UnsupportedModelError(
            f"weights: {spec.weights} is for cpu; on {spec.device} they have `dtype`, or 8 bits. "
            "Nearest that works: `weights: fp8`, `dtype: bfloat16`, or `devices: [cpu]` for "
            "this model"
        )
    if spec.kv_dtype != "auto":
        raise UnsupportedModelError(
            f"kv_cache_dtype: {spec.kv_dtype} is for cpu; on {spec.device} K and V have `dtype`"
        )
    return _build_torch_runner(spec)


def num_blocks_for(
    per_block: int,
    device: torch.device | str,
    *,
    num_bytes: int | None = None,
    fraction: float | None = None,
    reserve: int = 0,
) -> int:
    """How many blocks fit.

    num_bytes: memory given to the KV cache; when None, `fraction` of what is free on the device
    now (the weights are loaded by then; on the CPU, memory that this process may still take), less
    `reserve` bytes, of which at most half of the free memory is kept. fraction: None is that of
    DEFAULT_FRACTIONS. Raises ValueError when not even one block fits.
    """
    kind = str(device).partition(":")[0]
    if num_bytes is None:
        if fraction is None:
            fraction = DEFAULT_FRACTIONS[kind]
        if kind == "cuda":
            import torch

            free = torch.cuda.mem_get_info(device)[0]
        else:
            free = available_memory()
        num_bytes = int((free - min(reserve, free // 2)) * fraction)
    num_blocks = num_bytes // per_block - 1  # one block more is allocated for padded rows
    if num_blocks < 1:
        raise ValueError(
            f"{max(num_bytes, 0)} bytes of KV memory hold no block of {per_block} bytes "
            "beside the one kept for padding"
        )
    return num_blocks


def _length(spec: RunnerSpec, shape: ModelShape, num_blocks: int) -> int:
    """The longest sequence: what was asked for, else the most that fits."""
    limit, room = shape.max_position_embeddings, num_blocks * spec.sizes.block_size
    if spec.max_model_len is None:
        return min(limit, room)
    if spec.max_model_len > shape.longest_positions:
        told = f"max_model_len {spec.max_model_len} is above the model's {shape.longest_positions}"
        raise ValueError(told)
    if spec.max_model_len > room:
        raise ValueError(
            f"max_model_len {spec.max_model_len} does not fit the KV cache's {room} slots; "
            "give it more memory or lower max_model_len"
        )
    return spec.max_model_len


def _info(
    spec: RunnerSpec,
    folder: ModelFolder,
    shape: ModelShape,
    kv: tuple[int, int],
    marks: str,
    **own: Any,
) -> ModelInfo:
    """What the engine is told. kv: blocks, and the bytes of each. marks: of the fingerprint, for
    what changes outputs beside the folder and whether the factors of long sequences are used. own:
    the rest."""
    is_long = (spec.max_model_len or 0) > shape.max_position_embeddings
    return ModelInfo(
        name=spec.name,
        vocab_size=folder.num_token_ids,
        max_model_len=_length(spec, shape, kv[0]),
        eos_token_ids=tuple(folder.eos_token_ids),
        num_blocks=kv[0],
        block_size=spec.sizes.block_size,
        fingerprint=folder.fingerprint + ":longrope" * is_long + marks,
        max_num_seqs=spec.sizes.max_num_seqs,
        max_num_batched_tokens=spec.sizes.max_num_batched_tokens,
        kv_block_bytes=kv[1],
        **own,
    )


def _cpu_form(spec: RunnerSpec, *, is_file: bool) -> str:
    """How the weights are kept on a CPU. is_file: the folder is served from a GGUF as it is.

    Raises ValueError for a form that does not exist, and when dtype and weights contradict.
    """
    if is_file and spec.weights in ("auto", "file") and spec.dtype == "auto":
        return "file"
    if is_file or spec.weights == "file":
        raise ValueError(
            f"weights {spec.weights}, dtype {spec.dtype}: `file` needs a GGUF's folder"
        )
    if spec.dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"dtype on a CPU is float32 or bfloat16, not {spec.dtype}")
    if spec.weights == "fp8":
        raise ValueError("weights fp8 is for cuda; on a CPU int8 and int4 are the small ones")
    if spec.weights == "auto":
        return "float32" if spec.dtype == "auto" else spec.dtype
    if spec.dtype not in ("auto", spec.weights):
        raise ValueError(f"dtype is {spec.dtype} and weights are {spec.weights}; give one of them")
    return spec.weights


def _kv_dtype(spec: RunnerSpec, form: str) -> str:
    """What K and V are kept as on a CPU: "auto" is float32 beside float32 weights, so that nothing
    is rounded, and float16 beside rounded weights, whose own error is a hundred times larger
    (docs/benchmarks, "A smaller KV cache")."""
    if spec.kv_dtype != "auto":
        return spec.kv_dtype
    return "float32" if form == "float32" else "float16"


def _build_cpu_runner(spec: RunnerSpec) -> Runner:
    from server.model.cpu.integers.amx import kernel_name
    from server.model.cpu.integers.packed import FORM_OF
    from server.model.cpu.linear import keep_heap_small
    from server.model.cpu.runner import BLOCK_SIZE, VERIFY_ROWS, CpuRunner
    from server.model.cpu.weights import PackedWeights, RunnerWeights
    from server.model.gguf_file import GgufWeights
    from server.model.loader import open_model
    from server.model.packed_folder import integer_weights

    if spec.sizes.block_size != BLOCK_SIZE:
        raise ValueError(f"block_size is {BLOCK_SIZE} on a CPU, not {spec.sizes.block_size}")
    folder = open_model(spec.folder, adapter=spec.adapter, remembers=True)
    form = _cpu_form(spec, is_file=isinstance(folder.weights, GgufWeights))
    if folder.known is None and is_generic(folder.config):
        return _build_generic_runner(spec, folder, form)
    shape = replace(folder.shape(), vocab_size=folder.num_token_ids)
    weights: RunnerWeights
    how = ""
    max_rows = spec.sizes.max_num_batched_tokens
    if form == "file" or form in FORM_OF:
        most_rows = max(max_rows, VERIFY_ROWS)
        weights, how = integer_weights(
            folder, shape, form=form, max_rows=most_rows, threads=spec.threads,
            head_in_file=spec.full_head == "stream",
        )  # fmt: skip
    else:
        weights = PackedWeights(
            shape, folder.weights, dtype=form, head_in_file=spec.full_head == "stream"
        )
    kernel = "float32" if isinstance(weights, PackedWeights) else kernel_name()
    kv_dtype = _kv_dtype(spec, form)
    _log.info(
        "weights: %s%s, %d MB, kernel: %s, KV cache: %s",
        form, f" ({how})" if how else "",
        weights.num_bytes >> 20, kernel, kv_dtype,
    )  # fmt: skip
    info = _cpu_info(spec, folder, shape, (form, kernel, kv_dtype))
    if weights.packed_head.in_file:
        head_bytes = weights.packed_head.row_bytes * shape.vocab_size
        info = replace(info, head_bytes_in_file=head_bytes)
        _log.info("the LM head stays in its file: %d MB less", head_bytes >> 20)
    keep_heap_small()  # a step's buffers have room for rows that no step may ever have
    ropes = folder.ropes(info.max_model_len)
    return CpuRunner(shape, weights, ropes, info, num_threads=spec.threads)


def _cpu_info(
    spec: RunnerSpec, folder: ModelFolder, shape: ModelShape, forms: tuple[str, str, str]
) -> ModelInfo:
    """The sizes that a CPU's memory has room for, and what else the engine tells. forms: of
    weights, the kernel, K and V."""
    from server.model.cpu.runner import kv_bytes_per_block

    (form, kernel, kv_dtype), sizes = forms, spec.sizes
    longest = -(-(spec.max_model_len or shape.max_position_embeddings) // sizes.block_size)
    block_bytes = kv_bytes_per_block(shape, kv_dtype)
    num_blocks = num_blocks_for(
        block_bytes, "cpu", num_bytes=sizes.kv_bytes, fraction=sizes.kv_fraction
    )
    # At most those of every sequence at full length.
    num_blocks = min(num_blocks, sizes.max_num_seqs * (longest + 1))
    marks = f":{form}" + f":kv-{kv_dtype}" * (kv_dtype != "float32")
    return _info(
        spec, folder, shape, (num_blocks, block_bytes), marks, device="cpu", dtype=form,
        kernel=kernel, kv_dtype=kv_dtype,
    )  # fmt: skip


def _build_generic_runner(spec: RunnerSpec, folder: ModelFolder, form: str) -> Runner:
    """transformers' own forward on our products and attention (generic.py)."""
    import torch

    from server.model.cpu.generic.runner import GenericRunner, generic_model
    from server.model.loader import build_module
    from server.model.shape import shape_of

    name = str(folder.config.architectures[0])
    if form not in ("float32", "bfloat16"):
        raise UnsupportedModelError(
            f"weights: {form} is for families of `tailor models list`; {name} is computed by "
            "transformers' own forward, in float32 or bfloat16"
        )
    limit = shape_of(folder.config).max_position_embeddings
    model = generic_model(
        build_module(folder, torch.float32, torch.device("cpu")),
        num_token_ids=folder.num_token_ids,
        num_positions=min(limit, spec.max_model_len or limit),
        threads=spec.threads,
        bf16=form == "bfloat16",
    )
    kv_dtype = _kv_dtype(spec, form)
    _log.warning(
        "%s is no family of ours: transformers' own forward computes it, slower than a family of "
        "`tailor models list`; weights: %s, %d MB, KV cache: %s",
        name, form, model.weights.num_bytes >> 20, kv_dtype,
    )  # fmt: skip
    info = _cpu_info(spec, folder, model.shape, (form, IMPLEMENTATION, kv_dtype))
    return GenericRunner(model, info, num_threads=spec.threads)


def _prepare_cuda(device: torch.device, narrow: NarrowForm | None) -> None:
    """What is torch's own state, for this process: one engine, one device. Raises
    UnsupportedModelError where the device does not compute weights of the form `narrow`.

    Sums of bfloat16 and float16 products are kept in float32 to their end: how a product is split
    depends on the number of rows, and must not be seen in the text.
    """
    import torch

    if narrow is not None and torch.cuda.get_device_capability(device) < (8, 9):
        raise UnsupportedModelError(
            f"weights: {narrow} needs compute capability (8, 9), and {device} has "
            f"{torch.cuda.get_device_capability(device)}. Nearest that works: `weights: auto`"
        )
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _fit_kv(spec: RunnerSpec, shape: ModelShape, runner: TorchRunner) -> None:
    """Give the KV cache of a runner that has a small one its share of what is free beside a step.

    Raises ValueError when no block fits, or max_model_len does not.
    """
    runner.take_room(spec.adapters, spec.adapter_places)
    block_bytes, size = runner.info.kv_block_bytes, spec.sizes.block_size
    num_blocks = num_blocks_for(
        block_bytes, spec.device, fraction=spec.sizes.kv_fraction, reserve=MARGIN
    )
    max_model_len = min(runner.info.max_model_len, _length(spec, shape, num_blocks))
    runner.resize_kv(num_blocks, max_model_len)
    _log.info(
        "KV cache: %d tokens, %d MiB, beside steps, graphs and adapters",
        num_blocks * size, num_blocks * block_bytes >> 20,
    )  # fmt: skip


def _build_torch_runner(spec: RunnerSpec) -> Runner:
    """Embedding and head lie on the device, so that a step can be launched before the host knows
    the ids that the step before draws. Where the full head is kept in CPU memory, to save the
    device's, the embedding is, too: mapped from the file where its dtype is the model's."""
    import torch

    from server.model.adapter import EMBEDDING, HEAD
    from server.model.gpu.body import kept_by
    from server.model.gpu.generic import take_over
    from server.model.gpu.runner import FEW_SLOTS, TorchModel, TorchRunner
    from server.model.loader import build_module, finish_module, open_model
    from server.model.shape import shape_of

    device = torch.device(spec.device)
    device = torch.device("cuda", 0) if device == torch.device("cuda") else device
    folder = open_model(spec.folder, adapter=spec.adapter)
    by_transformers = is_generic(folder.config)
    narrow = None if spec.weights == "auto" else cast("NarrowForm", spec.weights)
    if device.type == "cuda":
        _prepare_cuda(device, narrow)
    stored = getattr(folder.config, "dtype", None)
    if spec.dtype == "auto":
        dtype = stored if isinstance(stored, torch.dtype) else torch.bfloat16
    else:
        dtype = getattr(torch, spec.dtype)
    embedding = head = None
    if spec.full_head in ("stream", "cpu"):
        if by_transformers:
            raise UnsupportedModelError(
                f"{folder.config.architectures[0]} needs full_head: device: transformers' own "
                "forward computes it, with its embedding and its head in place"
            )
        head = folder.floats.get(HEAD).to(dtype)
        tied = bool(getattr(folder.config, "tie_word_embeddings", False))
        embedding = head if tied else folder.floats.get(EMBEDDING).to(dtype)
    elsewhere = [n for n, t in ((HEAD, head), (EMBEDDING, embedding)) if t is not None]
    made = build_module(folder, dtype, device, skip=elsewhere)
    if by_transformers:
        take_over(made, folder.num_token_ids)
    module = cast("PreTrainedModel", finish_module(made, spec.max_model_len or 0))
    sizes, shape = spec.sizes, shape_of(module.config)
    block_bytes = kept_by(module).block_bytes(sizes.block_size, dtype)
    measures = device.type == "cuda" and sizes.kv_bytes is None
    num_blocks = num_blocks_for(
        block_bytes, device, num_bytes=sizes.kv_bytes,
        fraction=1.0 if measures else sizes.kv_fraction,
    )  # fmt: skip
    kv_name = str(dtype).removeprefix("torch.")
    info = _info(
        spec, folder, shape, (num_blocks, block_bytes), f":{kv_name}" + f":{narrow}" * bool(narrow),
        device=str(device), dtype=narrow or kv_name, kv_dtype=kv_name,
    )  # fmt: skip
    if measures:
        info = replace(info, num_blocks=-(-FEW_SLOTS // sizes.block_size))
    graphs = spec.cuda_graphs and device.type == "cuda"
    model = TorchModel(module, embedding, head, verify_on_cpu=spec.full_head == "cpu")
    runner = TorchRunner(model, info, cuda_graphs=graphs, weights=narrow)
    if measures:
        _fit_kv(spec, shape, runner)
    _log.info("weights: %s", runner.info.dtype)
    runner.warm_up()
    return runner
