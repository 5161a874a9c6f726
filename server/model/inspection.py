"""What a module of the generic path computes, by transformers' own eager forward on a short text.

Both devices inspect a module before they put our attention into it: its own log-probabilities to
compare with, how its logits differ from its LM head's product, and the windows of its masks; and
behind that, what its layers ask of our attention (heads_asked_for). Raises UnsupportedModelError
with the reason for what we do not compute.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from server.errors import UnsupportedModelError
from server.model.families import layer_types, logit_scale
from server.model.generic import RECURRENT
from server.model.interface import Call, StepHolder

NUM_PROBED = 29
"""Tokens of the text that is tried; a prime (cpu/generic/soundness.py)."""

TOLERANCE = 1e-2
"""Of log-probabilities, against transformers' eager forward: sums in another order move them by
1e-5 or so, a wrong mask or scale by more than this."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """What a module computes.

    truth: float32 [NUM_PROBED, V], its own log-probabilities of the probed ids. factor: on the last
    hidden states, before the head. cap: soft-capping of the logits. windows: per layer, as its own
    masks have them, 0 = all.
    """

    truth: torch.Tensor
    factor: float
    cap: float
    windows: tuple[int, ...]


def refusal(module: nn.Module, reason: str) -> UnsupportedModelError:
    """The error that says why a module is not served."""
    return UnsupportedModelError(
        f"{type(module).__name__} is not supported: {reason}. Nearest that works: any family of "
        "`tailor models list`, such as Qwen3 or Llama 3.2"
    )


@contextlib.contextmanager
def failing_as_refusal(module: nn.Module) -> Iterator[None]:
    """Turn whatever transformers' code raises inside the block into a refusal of the model."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        told = f"its forward raises {type(error).__name__}: {str(error)[:160]}"
        raise refusal(module, told) from error


@contextlib.contextmanager
def _mask_kinds(module: nn.Module) -> Iterator[set[str]]:
    """The kinds of masks that the module's own forward makes, by transformers' names."""
    source = sys.modules[type(module).__module__]
    made: set[str] = set()
    makers = {
        name: maker
        for name, maker in vars(source).items()
        if callable(maker) and name.startswith("create_") and "mask" in name
    }

    def watched(name: str, maker: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            made.add(name)
            return maker(*args, **kwargs)

        return make

    for name, maker in makers.items():
        setattr(source, name, watched(name, maker))
    try:
        yield made
    finally:
        for name, maker in makers.items():
            setattr(source, name, maker)


def _windows(module: nn.Module, kinds: set[str]) -> tuple[int, ...]:
    """Per layer, the window of the module's own masks."""
    config: Any = module.config
    layers = int(config.num_hidden_layers)
    window = int(getattr(config, "sliding_window", None) or 0)
    full, sliding = "create_causal_mask", "create_sliding_window_causal_mask"
    if config.model_type in RECURRENT:
        kinds = kinds - {"create_recurrent_attention_mask"}
    if kinds == {full}:
        return (0,) * layers
    if kinds == {sliding}:
        return (window,) * layers
    types = getattr(config, "layer_types", None)
    if kinds != {full, sliding} or types is None:
        told = ", ".join(sorted(kinds)) or "none of transformers'"
        raise refusal(module, f"its attention masks are not only causal ones ({told})")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def inspected(module: nn.Module, ids: torch.Tensor) -> Inspected:
    """What a module computes of ids int64 [1, n], by transformers' own eager forward.

    Raises UnsupportedModelError.
    """
    config: Any = module.config
    model: Any = module
    model.set_attn_implementation("eager")
    with torch.no_grad(), failing_as_refusal(module), _mask_kinds(module) as kinds:
        logits = model(input_ids=ids, use_cache=False).logits[0]
        rounding = 1e-3 if logits.dtype == torch.float32 else 3e-2
        logits = logits.float()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
        factor = logit_scale(config)
        own = head_logits(module, hidden * factor)
        own = cap * torch.tanh(own / cap) if cap else own
        if float((own - logits).abs().max()) > rounding * float(logits.abs().max()):
            raise refusal(module, "its logits are not its LM head's product")
    return Inspected(torch.log_softmax(logits, -1), factor, cap, _windows(module, kinds))


@dataclass(slots=True)
class _Watching:
    """A Step that gives zeros and notes what it is asked for."""

    calls: list[Call] = field(default_factory=list)
    sizes: set[tuple[int, int, int]] = field(default_factory=set)
    num_recurrent: int = 0

    def attend(
        self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See Step."""
        self.calls.append(call)
        self.sizes.add((query.shape[1], key.shape[1], query.shape[2]))
        return torch.zeros_like(query).contiguous()

    def recur(self, net: Any, mixed: torch.Tensor) -> torch.Tensor:
        """See Step."""
        self.num_recurrent += 1
        return mixed.new_zeros((mixed.shape[0], net.rate.shape[0] * net.dv))


def heads_asked_for(
    module: nn.Module, holder: StepHolder, ids: torch.Tensor, found: Inspected
) -> tuple[int, int, int]:
    """(heads, kv_heads, head_dim) of the attention that a module's layers ask for, each of them
    once and for its own mask's window. Raises UnsupportedModelError."""
    model: Any = module
    watching = _Watching()
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    with torch.no_grad(), failing_as_refusal(module):
        holder.run(model.base_model, watching, input_ids=ids, position_ids=positions)
    layers = [call.layer for call in watching.calls]
    types = layer_types(model.config)
    attends = [i for i, kind in enumerate(types) if kind != "linear_attention"]
    if sorted(layers) != attends or watching.num_recurrent != len(types) - len(attends):
        told = f"{len(set(layers))} of {model.config.num_hidden_layers} layers"
        raise refusal(module, f"{told} call the attention interface once")
    if len(watching.sizes) != 1:
        raise refusal(module, "its layers differ in their heads")
    for call in watching.calls:
        if call.window != found.windows[call.layer]:
            told = f"{call.window or 'none'} and its mask {found.windows[call.layer] or 'none'}"
            raise refusal(module, f"layer {call.layer} asks for the window {told}")
    (sizes,) = watching.sizes
    if sizes[0] % sizes[1]:
        raise refusal(module, f"{sizes[0]} heads cannot share {sizes[1]} key-value heads")
    return sizes


def head_logits(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """float32 [n, V]: the product of a module's LM head, with its bias, of states [n, H]."""
    model: Any = module
    head = model.get_output_embeddings()
    logits: torch.Tensor = hidden.float() @ head.weight.float().T
    return logits if getattr(head, "bias", None) is None else logits + head.bias.float()


def check_logits(
    module: nn.Module, hidden: torch.Tensor, found: Inspected, tolerance: float = TOLERANCE
) -> None:
    """Whether final states [n, H], times the factor, give the truth. Raises
    UnsupportedModelError."""
    with torch.no_grad():
        logits = head_logits(module, hidden)
    logits = found.cap * torch.tanh(logits / found.cap) if found.cap else logits
    worst = float((torch.log_softmax(logits, -1) - found.truth).abs().max())
    if not worst < tolerance:
        raise refusal(module, f"our logits are {worst:.2g} away from transformers' own")


def probe_ids(num_token_ids: int) -> torch.Tensor:
    """int64 [1, NUM_PROBED]: the text that is tried."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, num_token_ids, (1, NUM_PROBED), generator=generator)
