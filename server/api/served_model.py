"""One target model in the API process: its tokenizer, its sizes, its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokenizers import Tokenizer

from server.api.chat_template import ChatTemplate
from server.api.segments import SegmentEncoder
from server.api.text import TokenNames
from server.config import SamplingDefaults
from server.token_bytes import TokenBytes
from server.types import AdapterOrder


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One target model in the API process; the engine has the weights.

    vocab_size: V of the model (ids at or above are refused). max_model_len: tokens of prompt and
    output together. created: Unix seconds. fingerprint: OpenAI's system_fingerprint. chat: the
    model's chat template, None for a base model. sampling: its sampling
    defaults (generation_config.json), used where a task has none. implementation: what computes
    it, a family of ours or transformers' own forward. adapter: None for a base model; an adapter
    shares everything with its base but the meaning of ids. own_ids: for each id that is a token of
    the model's own, how many base ids it stands for. reads: turns the base ids of a prompt into
    the model's, None: they are the same.
    longest_token: bytes. root: the folder of an adapter, as in vLLM's /v1/models.
    """

    name: str
    tokenizer: Tokenizer
    table: TokenBytes
    vocab_size: int
    max_model_len: int
    created: int = 0
    fingerprint: str = ""
    chat: ChatTemplate | None = None
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    implementation: Literal["tailor", "transformers"] = "tailor"
    adapter: AdapterOrder | None = None
    own_ids: Mapping[int, int] = field(default_factory=dict)
    reads: Callable[[Sequence[int]], list[int]] | None = None
    root: str = ""
    names: TokenNames = field(init=False, repr=False)
    segments: SegmentEncoder = field(init=False, repr=False)
    longest_token: int = field(init=False, repr=False)

    @property
    def adapter_id(self) -> str:
        """Request.adapter."""
        return "" if self.adapter is None else self.adapter.adapter_id

    @property
    def key(self) -> str:
        """The name that a `model` field calls it by."""
        return self.name if self.adapter is None else self.adapter.name

    def __post_init__(self) -> None:
        # A tokenizer.json may carry truncation and padding: a prompt is never cut or padded.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        object.__setattr__(self, "names", TokenNames(self.table))
        object.__setattr__(self, "segments", SegmentEncoder(self.tokenizer))
        offsets = self.table.offsets
        longest = int((offsets[1:] - offsets[:-1]).max(initial=1))
        object.__setattr__(self, "longest_token", max(1, longest))

    def prompt_ids(self, base_ids: list[int]) -> list[int]:
        """The ids of a prompt whose text has these base ids."""
        return base_ids if self.reads is None else self.reads(base_ids)
