"""What is served, as the API knows it: models, with their tokenizers, sizes and ways to chat, the
adapters beside them, and tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from tokenizers import Tokenizer

from server.api.chat_template import ChatTemplate, SegmentEncoder
from server.api.tools import MARKERS, ToolFormat, format_of
from server.config import DEFAULT_TASK, SamplingDefaults, TaskConfig
from server.errors import InvalidRequestError, ModelNotFoundError, echoed, nearest
from server.token_bytes import TokenBytes
from server.types import AdapterOrder

_MAX_SHOWN = 10
"""Names that the error of an unknown model tells, and that are compared with what was sent."""


@dataclass(frozen=True)
class ServedModel:
    """One target model in the API process; the engine has the weights.

    vocab_size: V of the model (ids at or above are refused). max_model_len: tokens of prompt and
    output together. created: Unix seconds. fingerprint: OpenAI's system_fingerprint. chat: the
    model's chat template, None for a base model. sampling: its sampling
    defaults (generation_config.json), used where a task has none. implementation: what computes
    it, a family of ours or transformers' own forward. adapter: None for a base model; an adapter
    shares everything with its base but the meaning of ids. own_ids: for each id that is a token of
    the model's own, how many base ids it stands for. reads: turns the base ids of a prompt into
    the model's, None: they are the same. root: the folder of an adapter, as in vLLM's /v1/models.
    aliases: further names that requests may call it by. tokenizer_class: as the model's files
    name it.
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
    aliases: tuple[str, ...] = ()
    tokenizer_class: str = "PreTrainedTokenizerFast"

    def __post_init__(self) -> None:
        # A tokenizer.json may carry truncation and padding: a prompt is never cut or padded.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    @property
    def adapter_id(self) -> str:
        """Request.adapter."""
        return "" if self.adapter is None else self.adapter.adapter_id

    @cached_property
    def key(self) -> str:
        """The name that a `model` field calls it by."""
        return self.name if self.adapter is None else self.adapter.name

    @cached_property
    def segments(self) -> SegmentEncoder:
        """Encodes texts that stand inside another one."""
        return SegmentEncoder(self.tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Bytes."""
        offsets = self.table.offsets
        return max(1, int((offsets[1:] - offsets[:-1]).max(initial=1)))

    @cached_property
    def call_style(self) -> ToolFormat | None:
        """How it writes calls of tools in a chat, None for a way that is not read here. A model
        whose template reads no tools is told of them, and how to call them."""
        if self.chat is None or not self.chat.has_tools:
            return "hermes"
        return format_of(self.chat.tool_source)

    @cached_property
    def call_table(self) -> TokenBytes:
        """id -> bytes, with text for the tokens that the reading of calls needs."""
        markers = () if self.call_style is None else MARKERS[self.call_style]
        seen = {self.tokenizer.token_to_id(marker) for marker in markers}
        return self.table.showing({token_id for token_id in seen if token_id is not None})

    def encoded(self, text: str, add_special: bool) -> list[int]:
        """The ids of a prompt's text. add_special: with the tokenizer's own BOS and EOS."""
        return self.prompt_ids(self.tokenizer.encode(text, add_special_tokens=add_special).ids)

    def prompt_ids(self, base_ids: list[int]) -> list[int]:
        """The ids of a prompt whose text has these base ids."""
        return base_ids if self.reads is None else self.reads(base_ids)

    def check_ids(self, ids: Sequence[int], at: str, param: str | None = None) -> None:
        """Raise InvalidRequestError for an id that it does not have."""
        if (most := max(ids, default=0)) >= self.vocab_size:
            raise InvalidRequestError(
                f"token id {echoed(most)} is not below the vocabulary size, {self.vocab_size}.",
                at=at,
                param=param,
            )


class Catalog:
    """What is served: the models, the adapters beside them, and the tasks; each by name.

    The first model is the default. Tasks are replaced as a whole; adapters come and go in the
    mapping that is given.
    """

    def __init__(
        self,
        tasks: Mapping[str, TaskConfig],
        models: Mapping[str, ServedModel],
        adapters: Mapping[str, ServedModel],
    ) -> None:
        if not models:
            raise ValueError("no model")
        self.models = dict(models)
        self.adapters = adapters
        self.default_model = next(iter(self.models))
        self.tasks: dict[str, TaskConfig] = {}
        self._aliases = {alias: model for model in models.values() for alias in model.aliases}
        self.replace_tasks(tasks)

    def replace_tasks(self, tasks: Mapping[str, TaskConfig]) -> None:
        """Use these tasks from the next request on; requests that are open keep theirs."""
        self.tasks = {**tasks}
        self.tasks.setdefault(DEFAULT_TASK, TaskConfig(name=DEFAULT_TASK))

    @property
    def names(self) -> list[str]:
        """What a `model` field may hold."""
        return list(dict.fromkeys((*self.models, *self._aliases, *self.adapters, *self.tasks)))

    def find(
        self, name: str | None, may_use: Callable[[str, str], bool] | None = None
    ) -> tuple[TaskConfig, ServedModel]:
        """The task and the model that a `model` field names.

        may_use: whether the caller may run a task on a model; None: it may all. Raises
        ModelNotFoundError, for what it may not use as for what does not exist: a key does not learn
        other tasks' names.
        """
        wanted = self.default_model if name is None else name
        model = self.models.get(wanted) or self.adapters.get(wanted) or self._aliases.get(wanted)
        task = self.tasks[DEFAULT_TASK] if model is not None else self.tasks.get(wanted)
        if task is not None and model is None and task.name != DEFAULT_TASK:
            task = task if may_use is None or may_use(task.name, "") else None
        if task is not None:
            model = model or self.model_of(task)
            if may_use is None or may_use(task.name, model.key):
                return task, model
        raise ModelNotFoundError(
            f"The model {echoed(wanted)} does not exist or you do not have access to it."
            f"{self._advice(wanted, may_use)}",
            param="model",
        )

    def base_of(self, task: TaskConfig) -> ServedModel:
        """The model that runs a task, whatever its adapter."""
        return self.models[task.model or self.default_model]

    def model_of(self, task: TaskConfig) -> ServedModel:
        """The model that runs a task, with its adapter. Raises ModelNotFoundError for one that was
        unloaded."""
        model = self.base_of(task)
        if task.adapter is None:
            return model
        adapter = self.adapters.get(task.adapter)
        if adapter is None or adapter.name != model.name:
            raise ModelNotFoundError(
                f"The adapter {echoed(task.adapter)} of the task {echoed(task.name)} is not "
                "loaded.",
                param="model",
            )
        return adapter

    def names_for(self, may_use: Callable[[str, str], bool] | None) -> list[str]:
        """The names that a caller may put into `model`. may_use: as of `find`."""
        if may_use is None:
            return self.names
        found: list[str] = []
        for name in self.names:
            with contextlib.suppress(ModelNotFoundError):
                task, model = self.find(name)
                found += [name] if may_use(task.name, model.key) else []
        return found

    def _advice(self, name: str, may_use: Callable[[str, str], bool] | None) -> str:
        known = self.names_for(may_use)
        if near := nearest(name, known):
            return f" Did you mean {near}?"
        shown = ", ".join(known[:_MAX_SHOWN])
        more = f" and {len(known) - _MAX_SHOWN} more" if len(known) > _MAX_SHOWN else ""
        return f" There are: {shown}{more}." if known else ""


class TokenIdNames:
    """Token strings for logprobs as vLLM's return_tokens_as_token_ids writes them."""

    __slots__ = ()

    def __getitem__(self, token_id: int) -> str:
        return f"token_id:{token_id}"
