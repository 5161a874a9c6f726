"""Answers about models, tokens, the server's state and tasks (see server.api.responses)."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from server.api.responses import Chance, Count, Shape


class ModelEntry(Shape, kw_only=True):
    """OpenAI's members, vLLM's root and max_model_len, a description, and what computes the model:
    `tailor`, or `transformers` for a dense model of another family (slower). decoder: of a model on
    CUDA whose engine is ready, what computes its layers."""

    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: str = "tailor"
    root: str
    parent: str | None
    max_model_len: Count
    description: str
    implementation: Literal["tailor", "transformers"]
    decoder: Literal["fused", "modules"] | UnsetType = UNSET


class ModelList(Shape, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


class Tokens(Shape, kw_only=True):
    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str | None] | None


class RenderedPrompt(Shape, kw_only=True):
    """A chat as the model gets it, control tokens included."""

    prompt: str
    prompt_token_ids: list[Count]
    count: Count
    max_model_len: Count


class AddedToken(Shape, kw_only=True):
    id: Count
    content: str
    special: bool


class TokenizerInfo(Shape, kw_only=True):
    """tool_chat_template: of models that have one of their own for requests with tools."""

    model: str
    vocab_size: Count
    max_model_len: Count
    special_tokens: dict[str, str]
    added_tokens: list[AddedToken]
    chat_template: str | None
    tool_chat_template: str | None


class Load(Shape, kw_only=True):
    """Requests that engines work for, or that wait for one."""

    server_load: Count


class Detokenized(Shape, kw_only=True):
    prompt: str


class EngineState(Shape, kw_only=True):
    name: str
    model: str
    device: str
    state: Literal["loading", "ready", "stuck", "restarting", "failed", "stopped"]
    restarts: Count
    open_requests: Count


class Health(Shape, kw_only=True):
    status: Literal["ok", "degraded", "loading", "stuck", "dead"]
    engines: list[EngineState]


class Ready(Shape, kw_only=True):
    status: Literal["ready", "loading", "stuck", "draining"]
    stuck: list[str] | UnsetType = UNSET


class Version(Shape, kw_only=True):
    version: str


# --- /v1/tasks ---


class CorpusSize(Shape, kw_only=True):
    documents: Count
    tokens: Count
    bytes: Count
    uploaded: bool


class Learned(Shape, kw_only=True):
    tokens: Count
    outputs: Count
    scopes: Count


class TaskEntry(Shape, kw_only=True):
    id: str
    object: Literal["task"] = "task"
    description: str
    model: str
    drafter: str
    max_draft_tokens: Count
    learn: bool
    corpus: CorpusSize | None


class TaskList(Shape, kw_only=True):
    object: Literal["list"] = "list"
    data: list[TaskEntry]


class EngineReport(Shape, kw_only=True):
    name: str
    state: str
    answered: bool


class CalibrationRow(Shape, kw_only=True):
    source: str
    min_match_length: Count
    predicted_share: float
    offered: float
    accepted: float
    chance: Chance


class CorpusFit(Shape, kw_only=True):
    """Whether outputs follow the task's corpus. steps: whose trees were grown with the corpus and
    without, and followed. gain: tokens a step of those with it over those without, as `corpus_gain`
    of `tailor tasks tune`; fits: it is at least 1.02."""

    steps: Count
    gain: float
    fits: bool
    message: str


class TaskAnswer(TaskEntry, kw_only=True):
    """sampling, limits, speculation, vocabulary: keys of the task's file."""

    version: str
    sampling: dict[str, Any]
    limits: dict[str, Any]
    speculation: dict[str, Any]
    vocabulary: dict[str, Any]
    learned: Learned
    expected_tokens_per_step: float | None
    measured_steps: Count
    corpus_fit: CorpusFit | None
    engines: list[EngineReport]
    calibration: list[CalibrationRow]


class CorpusAnswer(Shape, kw_only=True):
    object: Literal["task.corpus"] = "task.corpus"
    task: str
    corpus: CorpusSize | None
    learn: bool
    learned: Learned


class CorpusDeleted(Shape, kw_only=True):
    object: Literal["task.corpus.deleted"] = "task.corpus.deleted"
    task: str
    deleted: Literal[True] = True


class ReloadAnswer(Shape, kw_only=True):
    object: Literal["task.reload"] = "task.reload"
    tasks: list[str]
    added: list[str]
    removed: list[str]
    changed: list[str]
