"""A decoder in training: frozen matrices, a LoRA on each linear layer, rows for an enrichment.

transformers' own modules compute it, with three of their parts replaced: linear layers (the frozen
product and its LoRA are one function, so that nothing wide is kept for backward); embedding and
head (own rows are trained alone, a frozen table gets no gradient); and attention (examples stand
one after another behind the beginning that their prompts share, which is computed once).

The new rows of embedding and head are trained apart, so a model with a tied head is untied: the two
rows of a token differ. The rows are absolute, so whoever loads the adapter needs the base model's
files and nothing else. The folder is PEFT's: adapter_config.json and adapter_model.safetensors,
with `trainable_token_indices` of both tables, and enrichment.json. To load it with PEFT: untie the
base, give its tables the enrichment's number of rows, then PeftModel.from_pretrained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from drafters.atomic_file import replacing
from server.errors import ConfigError
from server.model.adapter import ENRICHMENT_FILE
from server.model.families import logit_scale
from server.training.examples import Layout, Microbatch
from server.training.stored import Matrix
from vocab_store.enrichment import Enrichment

Start = Literal["leaning", "mean"]
START: Start = "leaning"
ATTENTION = "tailor_training"
_CHUNK_BYTES = 64 << 20
"""Of the logits, and of the head's rows, that are there at a time."""


# --- linear layers --------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """x [n, in] @ W.T + scale x A.T B.T, the frozen W widened here and again in backward.

    kept: bool of x's shape, the inputs that the LoRA sees, or None: all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        kept: torch.Tensor | None,
        base: Matrix,
        scale: float,
    ) -> torch.Tensor:
        out = x @ base.rows(slice(None), x.dtype).T
        low = _seen(x, kept) @ a.to(x.dtype).T
        out.addmm_(low, b.to(x.dtype).T, alpha=scale)
        ctx.save_for_backward(x, low, a, b, kept)
        ctx.base, ctx.scale = base, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, low, a, b, kept = ctx.saved_tensors
        grad_low = (grad @ b.to(grad.dtype)).mul_(ctx.scale)
        grad_b = (grad.T @ low).float().mul_(ctx.scale)
        grad_a = (grad_low.T @ _seen(x, kept)).float()
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ ctx.base.rows(slice(None), grad.dtype)
            grad_x += _seen(grad_low @ a.to(grad.dtype), kept)
        return grad_x, grad_a, grad_b, None, None, None


def _seen(x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """x, or zero where it is not kept."""
    return x if kept is None else torch.where(kept, x, 0.0)


def _kept(x: torch.Tensor, dropout: float) -> tuple[torch.Tensor, float]:
    """(bool of x's shape, what the rest is multiplied by: 1 / (1 - dropout)). Four draws of 16 bits
    come from one of torch's, whose own Bernoulli draws take a tenth of a step."""
    share = int(dropout * 65536)
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device)
    draws.random_(-(2**63), 2**63 - 1)
    kept = draws.view(torch.int16)[: x.numel()].view(x.shape) >= share - 32768
    return kept, 65536 / (65536 - share)


class LoraLinear(nn.Module):
    """A frozen linear layer with a LoRA (arXiv 2106.09685): W x + bias + (alpha / rank) B A x.

    base: W. bias: float32 [outputs] or None. dropout: of the LoRA's inputs, in training. A and B
    begin as in PEFT: A at random, B zero.
    """

    def __init__(
        self, base: Matrix, bias: torch.Tensor | None, options: LoraOptions, dtype: torch.dtype
    ) -> None:
        super().__init__()
        outputs, inputs = base.shape
        self.base, self.bias, self._dtype = base, bias, dtype
        self.in_features, self.out_features = inputs, outputs
        self._scale = options.alpha / options.rank
        self._dropout = options.dropout
        self.lora_A = nn.Parameter(torch.empty((options.rank, inputs)))
        self.lora_B = nn.Parameter(torch.zeros((outputs, options.rank)))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs], in the dtype that is computed in."""
        flat = x.reshape(-1, self.in_features).to(self._dtype)
        kept, factor = None, 1.0
        if self.training and self._dropout > 0:
            kept, factor = _kept(flat, self._dropout)
        trained = self.lora_A, self.lora_B
        out: torch.Tensor = _Product.apply(flat, *trained, kept, self.base, self._scale * factor)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.view(*x.shape[:-1], self.out_features)


# --- the two tables -------------------------------------------------------------------------------


class OwnEmbedding(nn.Module):
    """A frozen embedding table, and trained rows for own_ids. scale: factor on what is gathered."""

    def __init__(self, base: Matrix, own_ids: list[int], rows: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.base, self._scale = base, scale
        last = max([base.shape[0] - 1, *own_ids])
        places = torch.full((last + 1,), -1, dtype=torch.int64, device=rows.device)
        places[torch.tensor(own_ids, dtype=torch.int64)] = torch.arange(len(own_ids)).to(places)
        self._places = places
        self.rows = nn.Parameter(rows) if own_ids else None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """float32 [..., width]."""
        ids = input_ids.flatten().clamp(max=self.base.shape[0] - 1)
        found = self.base.rows(ids, torch.float32)
        if self.rows is not None:
            places = self._places[input_ids.flatten()]
            own = self.rows[places.clamp(min=0)]
            found = torch.where((places >= 0)[:, None], own, found)
        return found.view(*input_ids.shape, -1) * self._scale


class OwnHead(nn.Module):
    """A frozen LM head, and trained rows for own_ids. cap: soft-capping of logits, 0 = none."""

    def __init__(self, base: Matrix, own_ids: list[int], rows: torch.Tensor, cap: float) -> None:
        super().__init__()
        self.base, self._cap = base, cap
        self.own_ids = torch.tensor(own_ids, dtype=torch.int64, device=rows.device)
        self.num_ids = max([base.shape[0], *(i + 1 for i in own_ids)])
        self.rows = nn.Parameter(rows) if own_ids else None

    def loss(
        self, states: torch.Tensor, targets: torch.Tensor, spelled: torch.Tensor
    ) -> torch.Tensor:
        """The sum of -ln p(target): states [n, width], in the dtype that is computed in; targets
        int64 [n]; spelled bool [n], where own_ids have no chance."""
        rows = states.new_zeros((0, states.shape[1])) if self.rows is None else self.rows
        most = max(8, _CHUNK_BYTES // (4 * self.num_ids))
        parts = [
            _Loss.apply(  # type: ignore[no-untyped-call]
                states[at : at + most], rows, targets[at : at + most], spelled[at : at + most], self
            )
            for at in range(0, max(1, states.shape[0]), most)
        ]
        return torch.stack(parts).sum()

    def logits(self, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """float32 [n, num_ids]."""
        out = states.new_empty((states.shape[0], self.num_ids))
        for chunk in self.chunks():
            out[:, chunk] = states @ self.base.rows(chunk, states.dtype).T
        if rows.shape[0]:
            out[:, self.own_ids] = states @ rows.to(states.dtype).T
        logits = out.float()
        return logits if not self._cap else self._cap * torch.tanh(logits / self._cap)

    def chunks(self) -> list[slice]:
        """The base's rows, so many at a time as are widened at once."""
        num, width = self.base.shape
        step = max(32, _CHUNK_BYTES // (4 * width))
        return [slice(first, min(first + step, num)) for first in range(0, num, step)]

    def backward(
        self, grad: torch.Tensor, states: torch.Tensor, rows: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of states and rows, float32. grad: of the logits; it is written to."""
        if self._cap:
            grad *= 1 - (logits / self._cap) ** 2
        narrow = grad.to(states.dtype)
        to_states = torch.zeros_like(states)
        to_rows = torch.zeros_like(rows)
        if rows.shape[0]:
            own = narrow[:, self.own_ids]
            to_states += own @ rows.to(states.dtype)
            to_rows = (own.T @ states).to(rows.dtype)
            narrow[:, self.own_ids] = 0
        for chunk in self.chunks():
            to_states += narrow[:, chunk] @ self.base.rows(chunk, states.dtype)
        return to_states, to_rows


class _Loss(torch.autograd.Function):
    """Sum of -ln p(target) with its gradients computed at once: logits of all ids of a vocabulary
    are never kept for backward (as in Cut Cross-Entropy, arXiv 2411.09009)."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor,
        spelled: torch.Tensor,
        head: OwnHead,
    ) -> torch.Tensor:
        logits = head.logits(states, rows)
        at = spelled.nonzero(), head.own_ids
        kept, logits[at] = logits[at], -math.inf
        chances = torch.log_softmax(logits, dim=-1)
        logits[at] = kept  # a cap's slope is taken of them
        loss = -chances.gather(1, targets[:, None]).sum()
        if any(ctx.needs_input_grad):
            grad = chances.exp_()
            grad[torch.arange(len(targets), device=grad.device), targets] -= 1.0
            ctx.save_for_backward(*head.backward(grad, states, rows, logits))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        to_states, to_rows = ctx.saved_tensors
        return to_states * grad, to_rows * grad, None, None, None


# --- attention ------------------------------------------------------------------------------------


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # transformers makes none for a function of ours
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' contract: query [b, heads, t, head_dim], key and value [b, kv_heads, t,
    head_dim]; returns ([b, t, heads, head_dim], None). Without a layout every line is a text."""
    if attention_mask is not None:
        raise ValueError("its attention asks for a mask, which is not computed")
    config: Any = module.config  # where Tuned.loss puts it
    layout: Layout | None = config.tailor_layout
    key, value = key.to(query.dtype), value.to(query.dtype)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal, the last query at the last key."""
        more = k.shape[2] - q.shape[2]
        if not more and not sliding_window and not softcap:
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=True
            )
        at = torch.arange(more, k.shape[2], device=q.device)[:, None]
        of = torch.arange(k.shape[2], device=q.device)[None]
        seen = of <= at
        if sliding_window:
            seen &= of > at - sliding_window
        if not softcap:
            return functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=scaling, enable_gqa=True
            )
        repeated = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeated, 1), v.repeat_interleave(repeated, 1)
        scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = softcap * torch.tanh(scores / softcap)
        return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v

    if layout is None:
        return attend(query, key, value).transpose(1, 2), None
    num, (b, t) = layout.num_prefix, layout.places.shape

    def own(x: torch.Tensor) -> torch.Tensor:
        """[1, heads, row, dim] -> [b, heads, t, dim]."""
        picked = x.squeeze(0).index_select(1, layout.places.flatten())
        return picked.view(x.shape[1], b, t, -1).transpose(0, 1)

    def whole(x: torch.Tensor) -> torch.Tensor:
        """Behind the prefix."""
        if not num:
            return own(x)
        return torch.cat((x[:, :, :num].expand(b, -1, -1, -1), own(x)), dim=2)

    found = attend(own(query), whole(key), whole(value))  # [b, heads, t, dim]
    found = found.transpose(0, 1).flatten(1, 2).index_select(1, layout.back)[None]
    if num:
        first = attend(query[:, :, :num], key[:, :, :num], value[:, :, :num])
        found = torch.cat((first, found), dim=2)
    return found.transpose(1, 2), None


# --- the whole ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """The adapter's shape. rank, alpha, dropout: of every linear layer's LoRA. start: how the rows
    of new tokens begin (initial_rows)."""

    rank: int = 16
    alpha: int = 16
    dropout: float = 0.0
    start: Start = START


@dataclass(frozen=True, slots=True)
class Tuned:
    """A model in training.

    module: transformers' causal LM with its parts replaced. enrichment: the new tokens, or None.
    options: the adapter's. is_packed: whether examples may stand one after another in a row; layers
    with a state that runs along the row forbid it. dtype: of products.
    """

    module: Any
    embedding: OwnEmbedding
    head: OwnHead
    enrichment: Enrichment | None
    options: LoraOptions
    is_packed: bool
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Of the trained parameters."""
        return next(p for _, p in self.trained()).device

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters by name, of LoRAs and of rows."""
        return [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]

    def loss(self, batch: Microbatch) -> torch.Tensor:
        """Sum of -ln p over the batch's output ids; the softmax is in float32. `backward` of it
        must be called before the next."""
        self.module.config.tailor_layout = batch.layout
        body = self.module.get_decoder()
        states = body(
            input_ids=batch.input_ids, position_ids=batch.positions, use_cache=False
        ).last_hidden_state
        scale = logit_scale(self.module.config)
        states = states.flatten(0, 1).index_select(0, batch.rows) * scale
        return self.head.loss(states.to(self.dtype), batch.targets, batch.spelled)


def prepare(
    module: Any,
    matrix_of: Callable[[str], Matrix],
    enrichment: Enrichment | None,
    options: LoraOptions,
    *,
    tokenizer: str,
    dtype: torch.dtype = torch.float32,
) -> Tuned:
    """transformers' causal LM `module` with a fresh adapter; its linear layers, embedding and head
    are replaced by ones over matrix_of(name of the weight), and may have been on the meta device.

    tokenizer: fingerprint (hex) of the model's tokenizer. Raises ConfigError for an enrichment of
    another tokenizer or of another vocabulary, and for a model without linear layers (GPT-2's are
    of another kind).
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = module.config
    names = {id(part): name for name, part in module.named_modules()}
    tables = module.get_input_embeddings(), module.get_output_embeddings()
    input_name, head_name = (names[id(table)] for table in tables)
    embedding, head = matrix_of(f"{input_name}.weight"), matrix_of(f"{head_name}.weight")
    ids: list[int] = []
    if enrichment is not None:
        if enrichment.tokenizer != tokenizer:
            raise ConfigError("the enrichment was made for another tokenizer")
        if enrichment.base_vocab_size != embedding.shape[0]:
            raise ConfigError(
                f"the enrichment is of {enrichment.base_vocab_size} ids, the model has "
                f"{embedding.shape[0]}"
            )
        ids = list(enrichment.ids)
    parts = () if enrichment is None else enrichment.parts
    of_inputs, of_heads = (partial(m.rows, dtype=torch.float32) for m in (embedding, head))
    inputs = initial_rows(of_inputs, parts, side="input", start=options.start)
    heads = initial_rows(of_heads, parts, side="head", start=options.start)
    for name, part in list(module.named_modules()):
        if isinstance(part, nn.Linear) and part is not tables[1]:
            owner, _, leaf = name.rpartition(".")
            bias = None if part.bias is None else part.bias.detach()
            linear = LoraLinear(matrix_of(f"{name}.weight"), bias, options, dtype)
            setattr(module.get_submodule(owner), leaf, linear.to(inputs.device))
    scale = float(getattr(tables[0], "embed_scale", 1.0))
    own_embedding = OwnEmbedding(embedding, ids, inputs, scale)
    cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    own_head = OwnHead(head, ids, heads, cap)
    module.set_input_embeddings(own_embedding)
    module.set_output_embeddings(own_head)
    trained = {id(p) for m in module.modules() if isinstance(m, LoraLinear) for p in m.parameters()}
    if not trained:
        raise ConfigError(f"{type(module).__name__} has no linear layers that a LoRA may stand on")
    trained |= {id(p) for p in (own_embedding.rows, own_head.rows) if p is not None}
    for parameter in module.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
    module.set_attn_implementation(ATTENTION)
    kinds = set(getattr(config, "layer_types", None) or ())
    is_packed = kinds <= {"full_attention", "sliding_attention"}
    return Tuned(module, own_embedding, own_head, enrichment, options, is_packed, dtype)


def plan_memory(
    config: Any, own: float, prefix: int, longest: int, most_bytes: int
) -> tuple[int, bool]:
    """(ids of one forward pass, whether layers are computed again in backward): what computes the
    fewest ids while what is kept for backward stays below most_bytes, as counted of a decoder's
    usual parts. Computing again takes a third more time and lets more ids share a prefix.

    own: ids of a step's examples behind their shared prefix, of that many ids. longest: ids of the
    longest example.
    """
    hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    a_layer = 37 * hidden + 17 * inner  # bytes an id, of SmolLM2 as measured

    def computed(num: int) -> float:
        return own + prefix * math.ceil(own / max(num - prefix, longest - prefix, 1))

    plain = most_bytes // (layers * a_layer)
    again = max(longest, most_bytes // (4 * hidden * layers + a_layer))
    if plain >= longest and computed(plain) <= 4 / 3 * computed(again):
        return min(4096, plain), False
    return min(max(4096, longest), again), True


def initial_rows(
    rows: Callable[[torch.Tensor], torch.Tensor],
    parts: Sequence[Sequence[int]],
    *,
    side: Literal["input", "head"],
    start: Start = START,
) -> torch.Tensor:
    """float32 [M, width]: what the row of each token begins as.

    The paper (TASC-ft) takes the mean of the parts' rows. AdaptiVocab (arXiv 2503.19693) leans: the
    *input* row towards the last part, since what follows a token depends on how it ends, and the
    *head* row towards the first, since the head must fire where the first part would: weights
    exp(-2 k), k counted from the end or from the beginning.

    rows: ids int64 [n] -> float32 [n, width], of the embedding (side "input") or the head. parts:
    base ids of each token.
    """
    made = []
    for token in parts:
        picked = rows(torch.tensor(token))
        weights = torch.ones(len(token), device=picked.device)
        if start == "leaning":
            weights = torch.exp(-2.0 * torch.arange(len(token), device=picked.device))
        if side == "input":
            weights = weights.flip(0)
        made.append((weights / weights.sum()) @ picked)
    return torch.stack(made) if made else rows(torch.tensor([0]))[:0]


def save(tuned: Tuned, folder: Path, saved_as: str = "float32") -> None:
    """Write the adapter into `folder` (made if needed). saved_as: what its matrices are stored in,
    float32, bfloat16 or float16; rows of new tokens stay as they are. What was learned from the
    data is its owner's to read, as a corpus is. Raises OSError."""
    from peft import LoraConfig
    from safetensors.torch import save as to_bytes

    kind: torch.dtype = getattr(torch, saved_as)
    module, prefix = tuned.module, "base_model.model."
    tensors: dict[str, torch.Tensor] = {}
    targets, indices = set(), {}
    for name, part in module.named_modules():
        if isinstance(part, LoraLinear):
            targets.add(name.rpartition(".")[2])
            tensors[f"{prefix}{name}.lora_A.weight"] = part.lora_A.detach().to(kind)
            tensors[f"{prefix}{name}.lora_B.weight"] = part.lora_B.detach().to(kind)
        elif part in (tuned.embedding, tuned.head) and part.rows is not None:
            assert tuned.enrichment is not None
            indices[name.rpartition(".")[2]] = list(tuned.enrichment.ids)
            tensors[f"{prefix}{name}.token_adapter.trainable_tokens_delta"] = part.rows.detach()
    config = LoraConfig(
        r=tuned.options.rank,
        lora_alpha=tuned.options.alpha,
        lora_dropout=tuned.options.dropout,
        target_modules=sorted(targets),
        task_type="CAUSAL_LM",
        trainable_token_indices=indices or None,
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "adapter_model.safetensors") as out:
        out.write(to_bytes({n: t.contiguous() for n, t in tensors.items()}, {"format": "pt"}))
    if tuned.enrichment is not None:
        tuned.enrichment.save(folder / ENRICHMENT_FILE)
    # Last: whoever finds the config finds a whole adapter.
    config.save_pretrained(str(folder))
