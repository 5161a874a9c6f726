"""How transformers' modules reach the step that they run in, on both devices.

In every layer a module calls the attention function that its config names, with rotated queries,
keys and values. Ours hands them to the Step that the module's StepHolder has; what is put in the
place of transformers' own layers (`put_in_place`) asks the same Step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "tailor_paged"

_HARMLESS = {"dropout", "is_causal", "output_attentions", "position_ids", "use_cache",
             "cache_position", "position_embeddings", "target_dtype"}  # fmt: skip
"""Further keywords that modules hand on and that change no score."""


class Call(NamedTuple):
    """What a layer asks for: its index, the factor on scores, its window (0 = all), soft-capping of
    scores: cap * tanh(score / cap), 0 = none (Gemma 2, section 2)."""

    layer: int
    scaling: float
    window: int
    cap: float


class Step(Protocol):
    """Attends for one step, and carries its recurrent states."""

    def recur(self, net: Any, mixed: torch.Tensor) -> torch.Tensor:
        """net: a states.DeltaNet. mixed: [R, net.kept_width]; returns [R, heads dv]."""

    def attend(
        self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [R, heads, head_dim], key and value [R, kv_heads, head_dim]; returns query's
        shape."""


class StepHolder:
    """Where the layers of a module find the step that they run in, as their `tailor_holder`. Not a
    keyword of the forward: some modules hand no keywords on. The module's attention is ours from
    now on; layers that are put into it later have no holder."""

    def __init__(self, module: nn.Module) -> None:
        self._step: Step | None = None
        ALL_ATTENTION_FUNCTIONS.register(NAME, paged_attention)
        config: Any = module.config
        config._attn_implementation = NAME
        for part in module.modules():
            part.tailor_holder = self  # type: ignore[assignment]

    @property
    def step(self) -> Any:
        """The step. Raises RuntimeError outside one."""
        if self._step is None:
            raise RuntimeError("the module runs outside a step")
        return self._step

    def run(self, body: Any, step: Step, **inputs: torch.Tensor) -> torch.Tensor:
        """Last hidden states [n, H] of a module's body for these inputs of its forward."""
        self._step = step
        try:
            result = body(**inputs, use_cache=False)
        finally:
            self._step = None
        hidden: torch.Tensor = result.last_hidden_state[0]
        return hidden


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' contract: query [1, heads, R, head_dim], key and value [1, kv_heads, R,
    head_dim]; returns ([1, R, heads, head_dim], None). Raises ValueError on what is not computed,
    RuntimeError outside a step.
    """
    holder: Any = module.tailor_holder
    step = holder.step
    softcap = kwargs.pop("softcap", None)
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in _HARMLESS)
    if unknown or attention_mask is not None or kwargs.get("is_causal") is False:
        what = unknown[0] if unknown else "a mask" if attention_mask is not None else "is_causal"
        raise ValueError(f"its attention asks for {what}, which is not computed")
    index: Any = getattr(module, "layer_idx", None)
    if index is None or query.shape[0] != 1 or value.shape != key.shape:
        raise ValueError("its attention has values of another size than keys, or no layer_idx")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = Call(int(index), scale, int(sliding_window or 0), float(softcap or 0.0))
    out = step.attend(call, *(rows[0].transpose(0, 1) for rows in (query, key, value)))
    return out.unsqueeze(0), None


Made = TypeVar("Made", bound=nn.Module)


def put_in_place(body: nn.Module, kind: str, make: Callable[[Any, int], Made]) -> list[Made]:
    """Put what `make` gives of a module, and of its place among its kind, in the place of every
    module of a class of transformers, by the class's name; all that was made."""
    found: list[Made] = []
    for name, module in list(body.named_modules()):
        if type(module).__name__ == kind:
            found.append(make(module, len(found)))
            body.set_submodule(name, found[-1])
    return found
