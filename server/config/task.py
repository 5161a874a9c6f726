"""TaskConfig: the keys of a file of configs/tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from drafters.catalog import Need, that_use
from server.config.declared import parameters, sections, task_sections
from server.config.yaml_file import (
    Document,
    FilePath,
    Name,
    Path_,
    Section,
    StopString,
    TokenId,
    read_yaml,
    validate,
)
from server.errors import ConfigError
from server.types import VocabularyMode

DEFAULT_TASKS = Path("configs/tasks")
DEFAULT_TASK = "completion"
"""The task of a request whose `model` names a model and not a task."""

MAX_TASK_FILES = 10_000


@parameters(lambda one: one.in_tasks)
class SamplingDefaults(Section):
    """Values for fields that a request leaves out. None: the model's (generation_config.json), else
    OpenAI's (and vLLM's) default."""

    stop: tuple[StopString, ...] = Field(
        (), max_length=16, description="stop strings of requests that bring none"
    )
    stop_token_ids: tuple[TokenId, ...] = Field(
        (), max_length=256, description="further ids that end a choice"
    )

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingDefaults:
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens is above max_tokens")
        return self

    if TYPE_CHECKING:  # the parameters are declared in server.types

        def __init__(self, **values: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...


class TaskLimits(Section):
    """Limits of this task's requests; more is a 400. None: the server's limit."""

    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_prompt_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_prompts: int | None = Field(None, ge=1, le=65536)
    max_choices: int | None = Field(None, ge=1, le=1024)
    max_logprobs: int | None = Field(None, ge=0, le=20)
    max_draft_tokens: int | None = Field(
        None, ge=0, le=256, description="cap of a request's own speculation.max_draft_tokens"
    )
    queue_timeout_s: float | None = Field(
        None, gt=0, le=86400, description="seconds a request may wait for its first step; then 503"
    )
    total_timeout_s: float | None = Field(
        None, gt=0, le=86400, description="seconds a request may take in all; then 504"
    )


class ContextMarks(Section):
    """Where the task's context lies in a prompt: after the first `after`, before the next `before`.

    Strings of the prompt's text; a prompt without them is a context as a whole.
    """

    after: str | None = Field(None, min_length=1, max_length=1000)
    before: str | None = Field(None, min_length=1, max_length=1000)


@task_sections(Section)
class SpeculationConfig(Section):
    """How the task drafts. It changes speed only, never the text."""

    drafter: str = Field("auto", description="a registered drafter; off drafts nothing")
    max_draft_tokens: int = Field(16, ge=0, le=256, description="most tree nodes in a step")
    allowed_drafters: tuple[str, ...] | None = Field(
        None, description="drafters that a request may choose; default all"
    )
    corpus: FilePath | None = Field(
        None, min_length=1, max_length=4096, description="the task's corpus file"
    )
    allowed_corpora: tuple[str, ...] = Field(
        (),
        max_length=1000,
        description="tasks whose corpus a request may draft from instead of the task's own",
    )
    learn: bool | Literal["persist"] = Field(
        True,
        description="whether drafts also come from outputs of finished requests, held in memory; "
        "persist: and written to disk",
    )
    learn_max_tokens: int = Field(
        200_000,
        ge=1000,
        le=5_000_000,
        description="learned tokens that are held per API key and cache_salt; older ones fade out",
    )
    context: ContextMarks | None = Field(None)

    @model_validator(mode="after")
    def _drafter_allowed(self) -> SpeculationConfig:
        if self.allowed_drafters is not None and self.drafter not in self.allowed_drafters:
            raise ValueError("allowed_drafters does not hold the task's own drafter")
        return self

    @model_validator(mode="after")
    def _learning_drafter(self) -> SpeculationConfig:
        learning = that_use(Need.LEARNED)
        asked = self.learn if "learn" in self.model_fields_set else False
        if asked and self.drafter not in learning:
            raise ValueError(
                f"learn needs a drafter with a corpus ({' or '.join(learning)}), not {self.drafter}"
            )
        return self

    @property
    def learns(self) -> bool:
        """Whether requests that draft as the task does are learned from."""
        return bool(self.learn) and self.drafter in that_use(Need.LEARNED)

    def options(self) -> tuple[tuple[str, float | int | str | bool], ...]:
        """The drafters' parameters that were set, as sorted (dotted name, value) pairs."""
        told = self.model_dump(
            by_alias=True, exclude_none=True, include={spec.name for spec in sections()}
        )
        pairs = [
            (f"{name}.{key}", value) for name, given in told.items() for key, value in given.items()
        ]
        return tuple(sorted(pairs))


class VocabularyConfig(Section):
    """What part of the LM head the task computes. Only `slice` may change the text."""

    mode: VocabularyMode = Field(
        "full",
        description="slice: draw only from the profile's ids and the request's own; exact: propose "
        "from them, verify with the full head, the text of full",
    )
    profile: FilePath | None = Field(
        None, min_length=1, max_length=4096, description="a file of `tailor vocab profile`"
    )
    verify_every: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="tokens that exact verifies at once; default adapted to the measured misses",
    )
    allowed_modes: tuple[VocabularyMode, ...] | None = Field(
        None,
        description="modes that a request may choose; default the task's own, full and, with a "
        "profile, exact",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> VocabularyConfig:
        if self.mode != "full" and self.profile is None:
            raise ValueError(f"mode {self.mode} needs a profile; see tailor vocab profile")
        if self.allowed_modes is not None:
            if self.mode not in self.allowed_modes:
                raise ValueError("allowed_modes does not hold the task's own mode")
            if self.profile is None and set(self.allowed_modes) != {"full"}:
                raise ValueError("allowed_modes other than full need a profile")
        if self.profile is not None and self.modes == ("full",):
            raise ValueError("profile means nothing where only full is allowed; take it out")
        if self.verify_every is not None and "exact" not in self.modes:
            raise ValueError("verify_every means nothing where exact is not allowed; take it out")
        return self

    @property
    def modes(self) -> tuple[VocabularyMode, ...]:
        """The modes that a request may choose."""
        if self.allowed_modes is not None:
            return tuple(dict.fromkeys(self.allowed_modes))
        if self.profile is None:
            return ("full",)
        return ("full", "exact") if self.mode != "slice" else ("full", "slice", "exact")


class TaskConfig(Section):
    """One file of configs/tasks: a named way to call a model. The `model` field names it."""

    name: Name = Field("", description="default the file's name without .yaml")
    description: str = Field("", max_length=2000)
    model: str | None = Field(
        None, max_length=128, description="name of a model of server.yaml; default the first"
    )
    adapter: str | None = Field(
        None, max_length=128, description="name of an adapter that stands beside that model"
    )
    sampling: SamplingDefaults = Field(default_factory=SamplingDefaults)
    limits: TaskLimits = Field(default_factory=TaskLimits)
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    vocabulary: VocabularyConfig = Field(default_factory=VocabularyConfig)
    metric: Literal["exact", "f1", "rouge_l", "json"] | None = Field(
        None, description="what `tailor eval` judges the task's answers by; default f1"
    )
    additional_properties: bool = Field(
        False,
        description="whether objects of a JSON schema that do not say may have members that it "
        "does not describe",
    )
    lenient_schemas: bool = Field(
        False,
        description="whether keywords of JSON schemas that cannot be held are left out; else they "
        "are refused by name",
    )

    @model_validator(mode="after")
    def _within_limits(self) -> TaskConfig:
        most = self.limits.max_tokens
        for name in ("max_tokens", "min_tokens"):
            if most is not None and (getattr(self.sampling, name) or 0) > most:
                raise ValueError(f"sampling.{name} is above limits.max_tokens")
        most, own = self.limits.max_draft_tokens, self.speculation.max_draft_tokens
        if most is not None and own > most:  # `own` may be the default, which nobody wrote
            raise ValueError(f"speculation.max_draft_tokens {own} is above limits.max_draft_tokens")
        return self

    def files(self) -> Iterator[tuple[Path_, str]]:
        """(key, file) of all that it names."""
        named: dict[Path_, str | None] = {
            ("speculation", "corpus"): self.speculation.corpus,
            ("vocabulary", "profile"): self.vocabulary.profile,
        }
        for spec in sections():
            own = getattr(self.speculation, spec.name)
            named |= {
                ("speculation", spec.name, one.key): getattr(own, one.name)
                for one in spec.fields
                if one.file is not None
            }
        yield from ((at, file) for at, file in named.items() if file is not None)


def load_task(path: Path) -> TaskConfig:
    """Read one task file. Paths in it count from the file's folder. Raises ConfigError."""
    return _task_of(read_yaml(path))


def _task_of(document: Document) -> TaskConfig:
    data = {} if document.data is None else document.data
    if isinstance(data, dict):
        data = {"name": Path(document.source).stem, **data}
    return validate(TaskConfig, replace(document, data=data))


def load_tasks(
    folder: Path, models: tuple[str, ...] = (), drafters: tuple[str, ...] = ()
) -> dict[str, TaskConfig]:
    """All *.yaml and *.yml files of a folder, by task name, in the order of their file names.

    models: names of the server's models; a task may name one of them, and may not be called like
        one. drafters: names that a task may choose from. Empty leaves that unchecked.
    The default task is added when the folder has none. Raises ConfigError with all problems of all
    files.
    """
    try:
        files = sorted(
            file
            for file in folder.iterdir()
            if file.suffix in (".yaml", ".yml") and not file.name.startswith(".")
        )
    except OSError as error:
        is_none = isinstance(error, (FileNotFoundError, NotADirectoryError))
        what = "no such folder" if is_none else error.strerror
        raise ConfigError(f"{folder}: {what}") from None
    if len(files) > MAX_TASK_FILES:
        raise ConfigError(f"{folder}: more than {MAX_TASK_FILES} task files")
    tasks: dict[str, TaskConfig] = {}
    sources: dict[str, Path] = {}
    problems: list[str] = []
    for file in files:
        try:
            document = read_yaml(file)
            task = _task_of(document)
            if task.name in tasks:
                raise document.error(("name",), f"{task.name!r} is also in {sources[task.name]}")
            if task.name in models:
                raise document.error(("name",), f"{task.name!r} is a model's name")
            if models and task.model is not None and task.model not in models:
                raise document.error(
                    ("model",), f"no model {task.model!r}; there are: {', '.join(models)}"
                )
            _check_named(task, document, drafters)
        except ConfigError as error:
            problems.append(error.message)
            continue
        tasks[task.name], sources[task.name] = task, file
    if problems:
        raise ConfigError("\n".join(problems))
    if DEFAULT_TASK not in tasks:
        tasks[DEFAULT_TASK] = TaskConfig(
            name=DEFAULT_TASK, description="Plain text completion with OpenAI's defaults"
        )
    return tasks


def _check_named(task: TaskConfig, document: Document, drafters: tuple[str, ...]) -> None:
    """The drafters and the files that a task names are there."""
    for at, path in task.files():
        if not Path(path).is_file():
            raise document.error(at, f"no file {path}")
    speculation = task.speculation
    chosen: list[tuple[Path_, str]] = [(("speculation", "drafter"), speculation.drafter)]
    for i, name in enumerate(speculation.allowed_drafters or ()):
        chosen.append((("speculation", "allowed_drafters", i), name))
    for at, name in chosen if drafters else ():
        if name not in drafters:
            told = f"no drafter {name!r}; there are: {', '.join(drafters)}"
            raise document.error(at, told)


def task_version(task: TaskConfig) -> str:
    """Twelve hex digits that change whenever a task's settings do."""
    return hashlib.sha256(task.model_dump_json().encode()).hexdigest()[:12]
