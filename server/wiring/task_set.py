"""TaskSet: the tasks that are served now, with their corpora, and how an operator changes them.

`reload` reads the folder of task files again and takes all of it or nothing. `upload` builds a
corpus from an operator's examples; it takes the place of the file's own corpus until it is
deleted, and survives restarts. A corpus of another tokenizer is refused in both.

Uploads are examples and not corpus files, and are built in a process of its own. A corpus that is
damaged is named and set aside at the start, and its task is served without; a reload is refused.

Layout of a task's folder of uploads (its name is a digest; no task's name becomes a path):

    current.json              {"task", "fingerprint", "corpus": file name, figures}
    examples-<digest>.bin     what was uploaded, as ids (drafters.learned)
    corpus-<digest>.corpus    what was built from it; a new file for every upload, so that
                              sequences that run keep theirs
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from drafters.atomic_file import replacing
from drafters.catalog import Need, that_use
from drafters.json_text import object_in, parsed
from server.api.shapes import CorpusSize
from server.config import DEFAULT_TASK, DEFAULT_TASKS, ServerConfig, TaskConfig, load_tasks
from server.errors import ConfigError, ModelError, StorageError, TaskNotFoundError, echoed

log = logging.getLogger("tailor.tasks")

MAX_UPLOADED_TOKENS = 50_000_000
_KEPT_FILES = 2  # the corpus that is served and the one before it, which open requests may name

Build = Callable[[], dict[str, Any]]
"""Builds an uploaded corpus: `build_upload` with all that it needs."""


class TaskSet:
    """The tasks of a server (see the top of this file). Used from one event loop; threads read
    files.

    tasks: those read at start-up. load: reads them again; raises ConfigError. models: each model's
    (folder, tokenizer fingerprint) by its name; the first is the default. kept: folder of uploaded
    corpora, and of the engines' folders of what they learned (server.engine.task_store), swept by
    `delete`. run: where a corpus is built. adapters: an AdapterSet of those that are served.
    enrichments: file of the tokens of each model that has some of its own.
    """

    def __init__(
        self,
        tasks: Mapping[str, TaskConfig],
        *,
        load: Callable[[], Mapping[str, TaskConfig]],
        models: Mapping[str, tuple[Path, str]],
        kept: Path,
        run: Callable[[Build], dict[str, Any]] | None = None,
        adapters: Any = None,
        enrichments: Mapping[str, Path] | None = None,
    ) -> None:
        """Raises ConfigError when a task's corpus cannot be used, and is whole."""
        self._load = load
        self._models = dict(models)
        self.adapters = adapters
        self._enrichments = dict(enrichments or {})
        self._default_model = next(iter(self._models))
        self._uploads, self._learned = kept / "uploads", kept / "engines"
        self._run = run or _run_apart
        self._lock = asyncio.Lock()  # the tasks change
        self._uploading = asyncio.Lock()  # files of uploads change; taken before the other
        self._files = dict(tasks)
        self.tasks: Mapping[str, TaskConfig]
        """To serve: as in their files, but for corpora that were uploaded."""
        self.tasks, self._sizes = self._checked(self._files, is_start=True)

    @contextlib.asynccontextmanager
    async def adapter_turn(self) -> AsyncIterator[Callable[..., Awaitable[None]]]:
        """Tasks stay as they are meanwhile. Nobody else serves what this server serves."""

        async def publish(*_: object) -> None: ...

        async with self._lock:
            yield publish

    def corpus_size(self, task: str) -> CorpusSize | None:
        """Of a task's corpus, None when it has none."""
        return self._sizes.get(task)

    def profile_summary(self, task: str) -> dict[str, Any] | None:
        """Of the vocabulary profile that a task names: its size and expected misses per token.

        None when the task names none. Reads the file; raises ConfigError when it cannot be used.
        """
        from vocab_store.errors import VocabStoreError
        from vocab_store.profile import VocabProfile

        path = self.tasks[task].vocabulary.profile
        if path is None:
            return None
        try:
            profile = VocabProfile.load(path)
        except VocabStoreError as error:
            raise ConfigError(str(error)) from None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        return {
            "version": profile.version,
            "num_ids": profile.slice.num_ids,
            "vocab_size": profile.slice.vocab_size,
            "expected_misses_per_token": profile.miss_rate,
        }

    async def reload(self) -> Mapping[str, TaskConfig]:
        """Read all task files again. Raises ConfigError, and changes nothing then."""
        async with self._lock:
            files = dict(await asyncio.to_thread(self._load))
            self.tasks, self._sizes = await asyncio.to_thread(self._checked, files)
            self._files = files
            return self.tasks

    async def upload(
        self, task: str, examples: Sequence[Mapping[str, Any]], *, append: bool
    ) -> Mapping[str, TaskConfig]:
        """Build a task's corpus from examples, `prompt` and `completion` each or their ids.

        append: with those that were uploaded before. Raises ConfigError with what is wrong, and
        StorageError when it cannot be written.
        """
        async with self._uploading:
            async with self._lock:
                config = self._file(task)
            users = that_use(Need.CORPUS)
            if config.speculation.drafter not in users:
                raise ConfigError(
                    f"the task {task} drafts with {config.speculation.drafter}, which uses no "
                    f"corpus; set speculation.drafter to {' or '.join(users)}"
                )
            await asyncio.to_thread(self._upload, config, examples, append)
            return await self.refresh(task)

    async def delete(self, task: str) -> Mapping[str, TaskConfig]:
        """Delete what was uploaded for a task, and files of what it learned.

        Its file's own corpus is used again. The caller tells running engines.
        """
        async with self._uploading, self._lock:
            self._file(task)
            await asyncio.to_thread(self._delete, task)
            return await asyncio.to_thread(self._check_again, task)

    async def refresh(self, task: str) -> Mapping[str, TaskConfig]:
        """Read a task's uploads again: another process has changed them."""
        async with self._lock:
            if task not in self._files:
                return self.tasks
            return await asyncio.to_thread(self._check_again, task)

    def _file(self, task: str) -> TaskConfig:
        """A task as its file has it. Raises TaskNotFoundError where a reload took it away since."""
        if task not in self._files:
            raise TaskNotFoundError(f"There is no task {echoed(task)}.", param="task")
        return self._files[task]

    # -- in threads -------------------------------------------------------------------------

    def _model_of(self, task: TaskConfig) -> tuple[Path, str]:
        """(folder of the task's model, fingerprint of the ids that its corpus is in)."""
        folder, fingerprint = self._models[task.model or self._default_model]
        served = {} if self.adapters is None else self.adapters.served
        adapter = served.get(task.adapter or "")
        return folder, fingerprint if adapter is None else adapter.table.fingerprint.hex()

    def _enrichment_of(self, task: TaskConfig) -> Path | None:
        """File of the tokens that a task's outputs are written with."""
        if task.adapter is None:
            return self._enrichments.get(task.model or self._default_model)
        adapter = self.adapters.served[task.adapter]
        return Path(adapter.adapter.folder) / "enrichment.json" if adapter.own_ids else None

    def _check_again(self, task: str) -> Mapping[str, TaskConfig]:
        """Check one task again, whose corpus has changed."""
        tasks, sizes = self._checked({task: self._files[task]})
        self.tasks = {**self.tasks, **tasks}
        self._sizes = {**{n: s for n, s in self._sizes.items() if n != task}, **sizes}
        return self.tasks

    def _checked(
        self, files: Mapping[str, TaskConfig], *, is_start: bool = False
    ) -> tuple[dict[str, TaskConfig], dict[str, CorpusSize]]:
        """The tasks with their uploaded corpora, checked, and the sizes of all corpora."""
        tasks: dict[str, TaskConfig] = {}
        sizes: dict[str, CorpusSize] = {}
        problems: list[str] = []
        for name, task in files.items():
            fingerprint = self._model_of(task)[1]
            if problem := self._beyond_vocabulary(task):
                problems.append(f"task {name}: {problem}")
            uploaded, own = self._current(name, fingerprint), task.speculation.corpus
            corpus = own if uploaded is None else str(uploaded)
            while corpus is not None:
                is_own = corpus == own
                try:
                    sizes[name] = _size_of(Path(corpus), fingerprint, not is_own)
                    break
                except _DamagedError as error:
                    if is_own and not is_start:
                        problems.append(f"task {name}: speculation.corpus: {error.message}")
                        break
                    log.error("task %s is served without a corpus: %s", name, error.message)
                    corpus = None if is_own else own
                except ConfigError as error:
                    problems.append(f"task {name}: speculation.corpus: {error.message}")
                    break
            spec = task.speculation.model_copy(update={"corpus": corpus})
            tasks[name] = task.model_copy(update={"speculation": spec})
        if problems:
            raise ConfigError("\n".join(problems))
        return tasks, sizes

    def _beyond_vocabulary(self, task: TaskConfig) -> str:
        """What names ids that the task's model does not have, "" for nothing."""
        ids = task.sampling.stop_token_ids
        if not ids:
            return ""
        vocab_size = object_in(self._model_of(task)[0] / "config.json").get("vocab_size")
        if not isinstance(vocab_size, int) or max(ids) < vocab_size:
            return ""
        return f"sampling.stop_token_ids: {max(ids)} is not below the vocabulary size, {vocab_size}"

    def _folder(self, task: str) -> Path:
        return self._uploads / hashlib.sha256(task.encode()).hexdigest()[:24]

    def _state(self, task: str) -> dict[str, Any]:
        try:
            body = parsed((self._folder(task) / "current.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):  # the cache folder may be a file: told once
            return {}
        except (OSError, ValueError):
            log.warning("task %s: its uploaded corpus cannot be read and is not used", task)
            return {}
        return body if isinstance(body, dict) else {}

    def _current(self, task: str, fingerprint: str) -> Path | None:
        """The uploaded corpus that is served, if there is one for this tokenizer."""
        state = self._state(task)
        name = str(state.get("corpus", ""))
        if not name or Path(name).name != name:
            return None
        if state.get("fingerprint") != fingerprint:
            log.warning(
                "task %s: the uploaded corpus was made for another model's tokenizer and is not "
                "used; upload the examples again",
                task,
            )
            return None
        return self._folder(task) / name

    def _upload(
        self, task: TaskConfig, examples: Sequence[Mapping[str, Any]], append: bool
    ) -> None:
        folder = self._folder(task.name)
        model_folder, fingerprint = self._model_of(task)
        state = self._state(task.name)
        old = None
        if append and state.get("fingerprint") == fingerprint:
            old = folder / Path(str(state.get("examples"))).name
        before = {*folder.glob("*")}
        try:
            own = self._enrichment_of(task)
            build = partial(build_upload, model_folder, examples, old, folder, fingerprint, own)
            figures = self._run(build)
            with replacing(folder / "current.json") as out:
                out.write(json.dumps({"task": task.name, **figures}).encode())
        except OSError as error:
            with contextlib.suppress(OSError):  # what it has written, and the folder if it is empty
                for path in {*folder.glob("*")} - before:
                    path.unlink(missing_ok=True)
                if not before:
                    folder.rmdir()
            told = "The corpus was not changed: the server could not write it"
            raise _storage_error(task.name, told, error) from None
        self._prune(folder, figures)

    def _prune(self, folder: Path, figures: Mapping[str, Any]) -> None:
        """Delete corpora older than the served one and the one before it."""
        for pattern, current, num in (
            ("corpus-*.corpus", figures["corpus"], _KEPT_FILES),
            ("examples-*.bin", figures["examples"], 1),
        ):
            with contextlib.suppress(OSError):
                files = sorted(folder.glob(pattern), key=lambda path: -path.stat().st_mtime)
                for path in [path for path in files if path.name != current][num - 1 :]:
                    path.unlink(missing_ok=True)

    def _delete(self, task: str) -> None:
        digest = hashlib.sha256(task.encode()).hexdigest()[:16]
        try:
            for path in self._learned.glob(f"*/learned-{digest}-*.bin"):
                path.unlink(missing_ok=True)
            if (folder := self._folder(task)).is_dir():
                (folder / "current.json").unlink(missing_ok=True)  # first: the rest is not served
                shutil.rmtree(folder)
        except OSError as error:
            raise _storage_error(task, "The server could not delete all of it", error) from None


def _storage_error(task: str, what: str, error: OSError) -> StorageError:
    """The client's error, without the path, which the log has."""
    log.error("task %s: %s: %s", task, what, error)
    return StorageError(f"{what} ({error.strerror or type(error).__name__}).")


def _lower_priority() -> None:
    with contextlib.suppress(OSError, AttributeError):
        os.nice(5)


def _run_apart(build: Build) -> dict[str, Any]:
    """In a process: it may take a minute of one core, and this one answers requests."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_lower_priority) as pool:
        try:
            return pool.submit(build).result()
        except BrokenProcessPool:
            raise ConfigError("the corpus could not be built: its process died") from None


def build_upload(
    model: Path,
    examples: Sequence[Mapping[str, Any]],
    old: Path | None,
    target: Path,
    fingerprint: str,
    enrichment: Path | None,
) -> dict[str, Any]:
    """Tokenize examples, build their corpus, write both. Returns what current.json says.

    model: its folder. old: file of those that are kept. target: the task's folder of uploads.
    fingerprint: of the ids that the corpus is in. enrichment: file of the tokens that outputs are
    written with, None for the base's alone. Raises ConfigError for examples that cannot be used,
    and ModelError.
    """
    from drafters.array_file import ArrayFileError
    from drafters.auto.copying import Pieces
    from drafters.auto.held_out import build_calibrated
    from drafters.learned import LearnedOutputs
    from server.datasets import ExampleReader, open_table
    from vocab_store.enrichment import Enrichment

    try:
        tokenizer, table, eos_token_id = open_table(model)
    except OSError as error:
        what = error.strerror or type(error).__name__
        raise ModelError(
            f"The corpus was not changed: the model's files cannot be read ({what})."
        ) from None
    vocab_size = table.vocab_size
    written: Callable[[Sequence[int]], list[int]] = list
    if enrichment is not None:
        own = Enrichment.load(enrichment)
        vocab_size, written = own.vocab_size, own.segment
    reader = ExampleReader(tokenizer, eos_token_id, vocab_size=vocab_size)
    # There is room for everything: an upload that is too large is refused, never reduced.
    held = LearnedOutputs(1 << 40, max_prompt=1 << 30, max_output=1 << 30, repeats=True)
    if old is not None:
        try:
            held.restore(old, fingerprint=fingerprint, scope="upload")
        except (OSError, ArrayFileError) as error:
            raise ConfigError(
                f"what was uploaded before cannot be read ({error}); upload with mode replace"
            ) from None
    for i, example in enumerate(examples):
        prompt, output = reader.of(dict(example), f"examples[{i}]")
        if example.get("output_ids") is None:
            output = written(output)
        held.add(prompt, output)
        if held.num_tokens > MAX_UPLOADED_TOKENS:
            raise ConfigError(
                f"a corpus may have {MAX_UPLOADED_TOKENS} tokens; build a larger one with "
                "tailor corpus build"
            )
    if len(held) == 0:
        raise ConfigError("there are no examples")
    pieces = None if enrichment is not None else Pieces(table.offsets, table.blob)
    corpus = build_calibrated(held.examples(), fingerprint=fingerprint, pieces=pieces)
    digest = hashlib.sha256()
    for prompt_ids, output_ids in held.examples():
        for ids in (prompt_ids, output_ids):
            digest.update(ids.shape[0].to_bytes(8, "little") + ids.tobytes())
    name = digest.hexdigest()[:16]
    target.mkdir(parents=True, exist_ok=True, mode=0o700)  # nothing is left of what was refused
    held.save(target / f"examples-{name}.bin", fingerprint=fingerprint, scope="upload")
    corpus.save(target / f"corpus-{name}.corpus")
    return {
        "fingerprint": fingerprint,
        "corpus": f"corpus-{name}.corpus",
        "examples": f"examples-{name}.bin",
    }


class _DamagedError(ConfigError):
    """What lies there is no whole corpus."""


def _size_of(path: Path, fingerprint: str, uploaded: bool) -> CorpusSize:
    """Raises ConfigError unless the file is a corpus of this tokenizer."""
    from drafters.array_file import ArrayFileError, FingerprintError
    from drafters.corpus_file import read_extent

    try:
        documents, tokens, num_bytes = read_extent(path, fingerprint=fingerprint)
    except FingerprintError:
        raise ConfigError(
            f"{path} was built for another model's tokenizer; build it again with this model "
            "(tailor corpus build)"
        ) from None
    except ArrayFileError as error:
        raise _DamagedError(str(error)) from None
    except OSError as error:
        raise (_DamagedError if uploaded else ConfigError)(f"{path}: {error.strerror}") from None
    return CorpusSize(documents=documents, tokens=tokens, bytes=num_bytes, uploaded=uploaded)


def server_tasks(config: ServerConfig) -> dict[str, TaskConfig]:
    """The tasks that a server of this configuration serves. Raises ConfigError."""
    from drafters import DRAFTER_NAMES

    models = tuple(model.name for model in config.models)
    folder = tasks_folder(config.tasks)
    if folder is None:
        return {DEFAULT_TASK: TaskConfig(name=DEFAULT_TASK)}
    return load_tasks(folder, models, DRAFTER_NAMES)


def tasks_folder(named: str | Path | None = None) -> Path | None:
    """The folder of tasks: the named one, else ./configs/tasks, else those that Tailor brings."""
    if named is not None:
        return Path(named)
    if DEFAULT_TASKS.is_dir():
        return DEFAULT_TASKS
    clone = Path(__file__).parents[2] / DEFAULT_TASKS
    if clone.is_dir():
        return clone
    try:
        files = metadata.distribution("tailor-server").files or ()
    except metadata.PackageNotFoundError:
        return None
    shipped = [file for file in files if file.parent.as_posix().endswith("share/tailor/tasks")]
    return Path(str(shipped[0].locate())).resolve().parent if shipped else None
