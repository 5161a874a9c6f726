"""What a module of the generic path computes, by transformers' own eager forward on a short text.

Both devices inspect a module before they put our attention into it: its own log-probabilities to
compare with, how its logits differ from its LM head's product, and the windows of its masks. Raises
UnsupportedModelError with the reason for what we do not compute.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from server.errors import UnsupportedModelError
from server.model.generic import RECURRENT

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
        factor = float(getattr(config, "logit_scale", None) or 1.0)
        factor /= float(getattr(config, "logits_scaling", None) or 1.0)
        own = head_logits(module, hidden * factor)
        own = cap * torch.tanh(own / cap) if cap else own
        if float((own - logits).abs().max()) > rounding * float(logits.abs().max()):
            raise refusal(module, "its logits are not its LM head's product")
    return Inspected(torch.log_softmax(logits, -1), factor, cap, _windows(module, kinds))


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
