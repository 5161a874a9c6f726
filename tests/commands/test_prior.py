"""`tailor models prior` on a tiny model, and answers that are drafted from what it made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from drafters.auto.drafter import AutoDrafter
from drafters.auto.prior import FORMAT, Prior
from drafters.auto.retrieval import Seen
from drafters.base import Drafter
from server.commands.cli import main
from server.commands.options import Bar, ModelOptions
from server.commands.own_engine import own_engine
from server.commands.train_prior import own_texts
from server.engine.engine import Engine
from server.engine.plan import EngineSettings
from server.model.build import RunnerSpec, build_runner
from server.model.cpu.runner import CpuRunner
from server.types import EngineSizes, Request, SamplingParams, SpeculationParams
from tests.commands.command_line import Tailor
from tests.engine.requests import finish, ids_of

# Whoever finds a prior drafts from it.
pytestmark = pytest.mark.usefixtures("files_cache")


@pytest.fixture(scope="module")
def file(shallow: Path) -> Path:
    """The file of a prior that the command made."""
    command = ["models", "prior", str(shallow), "--tokens", "3000", "--steps", "60"]
    with redirect_stdout(StringIO()) as out:
        assert main([*command, "--threads", "1"]) == 0
    told = json.loads(out.getvalue().splitlines()[-1])
    made = Path(told["file"])
    assert told["tokens"] >= 3000 and told["bytes"] == made.stat().st_size
    assert made.name.endswith(f"-{FORMAT.version}.prior")
    return made


def _answers(
    folder: Path, drafters: Mapping[str, Drafter], sampling: SamplingParams, num: int
) -> tuple[list[tuple[int, ...]], int]:
    """The answers to `num` prompts at once, and how many of their tokens the prior had drafted."""
    sizes = EngineSizes(max_num_seqs=32, kv_bytes=1 << 22)
    runner = build_runner(RunnerSpec("tiny", str(folder), sizes, threads=1))
    engine = Engine(runner, drafters, EngineSettings(max_num_seqs=32, max_draft_rows=256))
    how = SpeculationParams(*(("auto", 8) if drafters else ("off", 0)))
    prompts = [(3 + i, 50, 7 + 2 * i, 9) for i in range(num)]
    told = finish(
        engine, *(Request(str(i), "t", "tiny", p, sampling, how) for i, p in enumerate(prompts))
    )
    deltas = [delta for of_one in told.values() for delta in of_one]
    assert engine.drafts.num_errors == 0 and not any(delta.error for delta in deltas)
    engine.close()
    accepted = [a for d in deltas for name, _, a in d.counts.by_source if name == "prior"]
    return [tuple(ids_of(told[str(i)])) for i in range(num)], sum(accepted)


def test_texts_have_the_shape_of_tasks_and_are_what_the_model_would_write(shallow: Path) -> None:
    sizes = EngineSizes(max_num_seqs=4, max_num_batched_tokens=4, kv_bytes=1 << 21)
    tasks = [[[5, 6], [7, 8]], [[9], [10, 11, 12]]]
    with closing(build_runner(RunnerSpec("tiny", str(shallow), sizes, threads=1))) as runner:
        assert isinstance(runner, CpuRunner)
        texts = own_texts(runner, 4 * (4 * 96 + 192), tasks, seed=3)
        ends = runner.info.eos_token_ids
    assert [text.ids.shape[0] for text in texts] == [96] * 16 + [192] * 4
    for number, text in enumerate(texts):
        chances = np.where(np.isin(text.likely, ends), 0.0, text.chances)
        greedy = text.likely[np.arange(len(chances)), chances.argmax(axis=1)]
        follows = text.ids[1:] == greedy[:-1]
        drawn = (text.ids[1:, None] == text.likely[:-1]).any(axis=1)
        assert not np.isin(text.ids[1:], ends).any()
        if number < 16:
            of_few = number // 4 % 2 == 1
            assert drawn.all() and follows[16:].all() == of_few, "a few are drawn, then none"
            continue
        ids = text.ids.tolist()
        before, label = next(task for task in tasks if ids[: len(task[0])] == task[0])
        at = next(i for i in range(12, 192) if ids[i : i + len(label)] == label)
        assert drawn[len(before) - 1 : at - 1].all() and not follows[: at - 1].all()
        assert follows[at + len(label) - 1 :][:40].all()


def test_it_drafts_and_changes_no_text(shallow: Path, file: Path) -> None:
    drafted, prior = 0, Prior.load(file, fingerprint=None)
    for num in (1, 32):
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(
                temperature=temperature, seed=5, max_tokens=24, ignore_eos=True
            )
            plain, _ = _answers(shallow, {}, sampling, num)
            auto = AutoDrafter(model_prior=prior, eos_token_ids=(2,), seen=Seen())
            found, by_prior = _answers(shallow, {"auto": auto}, sampling, num)
            assert found == plain
            drafted += by_prior
    assert drafted > 0


def test_an_engine_reads_what_was_made_and_does_without_what_is_damaged(
    shallow: Path, file: Path
) -> None:
    @contextmanager
    def started() -> Iterator[Engine]:
        with Bar() as bar, own_engine(ModelOptions(model=str(shallow), threads=1), bar, ()) as made:
            yield made[1]

    def has_prior(engine: Engine, **options: int) -> bool:
        asked = SpeculationParams("auto", 8, tuple((f"auto.{k}", v) for k, v in options.items()))
        drafter = engine.drafters.resolve("t", asked)
        assert isinstance(drafter, AutoDrafter)
        return drafter.prior is not None

    with started() as engine:
        assert has_prior(engine) and not has_prior(engine, prior=0)
    whole = file.read_bytes()
    file.unlink()
    with started() as engine:
        assert not has_prior(engine)
        file.write_bytes(whole)  # it is made beside the engine
        engine.controls["drafters_reload"](None)
        assert has_prior(engine)
    file.write_bytes(whole[:-64])
    with started() as engine:
        assert not has_prior(engine)
    file.write_bytes(whole)


def test_text_that_is_given(shallow: Path, own_cache: Path, tmp_path: Path, tailor: Tailor) -> None:
    file = tmp_path / "text.txt"
    file.write_text("One line of text.\n\nAnother line, a little longer than the first.\n" * 8)
    command = ["models", "prior", shallow, "--threads", 1, "--steps", 4, "--text"]
    assert tailor(*command, file).json["tokens"] > 0
    (made,) = (own_cache / "priors").iterdir()
    digest = made.name.partition("-")[0]
    older, others = (f"{digest}.prior", f"{digest}-1.prior"), (f"{digest}-10.prior", "0.prior")
    for name in (*older, *others):
        (own_cache / "priors" / name).touch()
    tailor(*command, file)
    kept = {one.name for one in (own_cache / "priors").iterdir()}
    assert kept == {made.name, *others}, "of older formats nothing stays"
    file.write_text("a")
    assert "too short" in tailor(*command, file, status=1).err
    told = tailor(*command, tmp_path / "none", status=1).err
    assert told == f"tailor: {tmp_path / 'none'}: No such file or directory\n", "no model is loaded"
