"""`auto`: what each source brings, that its chances are right, and what it learns and keeps."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest

from drafters.auto.cells import NUM_CELLS, SOURCES
from drafters.auto.drafter import AutoDrafter
from drafters.auto.held_out import build_calibrated
from drafters.auto.retrieval import Seen
from drafters.auto.tree_builder import Workspace
from drafters.auto.trust import Trust
from drafters.calibration import CalibrationError
from drafters.corpus import Corpus
from drafters.published.suffix import SuffixDrafter
from drafters.replay import Recording, replay
from drafters.tree import followed
from tests.drafters.trees import opened

EOS = 0


def examples(num: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """A tagging task: a constant instruction, one of 40 words, and an output that the word fixes,
    with a copied name in it."""
    rng = random.Random(seed)
    out = []
    for _ in range(num):
        word, name = rng.randrange(40), [rng.randrange(500, 900) for _ in range(3)]
        prompt = [*range(900, 912), 100 + word, *name, 912]
        out.append((prompt, [1, 2, 200 + word, 300 + word, 3, *name, 4, EOS]))
    return out


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return build_calibrated(examples(400, 1), fingerprint="")


def recordings(num: int, seed: int) -> list[Recording]:
    return [Recording(p, o) for p, o in examples(num, seed)]


def test_the_first_answer_tokens_are_drafted_before_any_is_there(corpus: Corpus) -> None:
    prompt, output = examples(1, 2)[0]
    tree = AutoDrafter(corpus=corpus).open(prompt).propose(16, 16)
    # The corpus begins all outputs with 1 2; the nearest prompts know what their word leads to.
    assert len(followed(tree.children(), output)) >= 5


def test_the_nearest_examples_are_worth_tokens(corpus: Corpus) -> None:
    tests = recordings(30, 3)
    with_them = replay(AutoDrafter(corpus=corpus), tests, budget=8)
    alone = AutoDrafter(corpus=corpus)
    alone.num_retrieved = 0
    without = replay(alone, tests, budget=8)
    assert with_them.decode_tokens_per_step > 1.2 * without.decode_tokens_per_step
    assert with_them.by_source["retrieved"][1] > 0


def test_all_sources_beat_the_text_alone(corpus: Corpus) -> None:
    tests = recordings(30, 4)
    both = replay(AutoDrafter(corpus=corpus), tests, budget=16)
    alone = replay(SuffixDrafter(), tests, budget=16)
    assert both.decode_tokens_per_step > 2.0 * alone.decode_tokens_per_step
    assert (
        replay(AutoDrafter(), tests, budget=16).decode_tokens_per_step
        >= alone.decode_tokens_per_step
    )


def test_a_prediction_is_followed_and_found_again_after_a_divergence() -> None:
    prediction = list(range(50, 90))
    session = AutoDrafter().open([1, 2, 3], prediction_ids=prediction)
    tree = session.propose(8, 8)
    assert tree.token_ids[:6].tolist() == prediction[:6]  # before anything was emitted
    assert {SOURCES[s] for s in tree.source} == {"prediction"}
    session.extend(prediction[:10])
    session.extend([7, 7, 7])  # the output leaves the prediction ...
    session.extend(prediction[12:14])  # ... and comes back to it
    tree = session.propose(8, 8)
    assert tree.token_ids[:6].tolist() == prediction[14:20]


@pytest.mark.parametrize("seed", range(4))
def test_scratch_that_another_scope_wrote_to_changes_no_tree(seed: int) -> None:
    """All scopes of an engine take turns with one Workspace: nothing of one shows in another."""
    rng = random.Random(seed)
    shared = Workspace()
    alone = AutoDrafter(seen=Seen())
    ours, theirs = (AutoDrafter(seen=Seen(workspace=shared)) for _ in range(2))
    for prompt, output in examples(4, seed):
        sessions = [drafter.open([*prompt, *output[:5], *prompt]) for drafter in (alone, ours)]
        other = theirs.open([rng.randrange(60) for _ in range(400)])
        while output:
            budget, depth = rng.choice([1, 4, 16, 80]), rng.choice([2, 16, 70])
            other.propose(rng.choice([8, 64, 120]), rng.choice([8, 90]))
            other.settle()
            other.extend([rng.randrange(60) for _ in range(rng.randrange(1, 90))])
            want, got = (session.propose(budget, depth) for session in sessions)
            assert got.token_ids.tolist() == want.token_ids.tolist()
            assert got.parents.tolist() == want.parents.tolist()
            assert got.survival.tolist() == want.survival.tolist()
            num = rng.randrange(1, 4)
            for session in sessions:
                session.settle()
                session.extend(output[:num])
            output = output[num:]
        for session in (*sessions, other):
            session.settle()
            session.close()
    np.testing.assert_array_equal(ours.trust.evidence, alone.trust.evidence)
    np.testing.assert_array_equal(ours.trust.outcomes, alone.trust.outcomes)


def test_survival_is_the_chance_of_acceptance(corpus: Corpus) -> None:
    drafter = AutoDrafter(corpus=corpus, min_survival=0.05)
    claimed: list[float] = []
    hits: list[bool] = []
    for recording in recordings(120, 6):
        session = opened(drafter, recording.prompt_ids)
        position = 0
        while position < len(recording.output_ids):
            tree = session.propose(16, 16)
            accepted = followed(tree.children(), recording.output_ids[position:])
            claimed.extend(tree.survival.tolist())
            hits.extend(node in accepted for node in range(len(tree)))
            num = min(len(accepted) + 1, len(recording.output_ids) - position)
            session.extend(recording.output_ids[position : position + num])
            session.settle()
            position += num
    chance, right = np.asarray(claimed), np.asarray(hits, np.float64)
    assert chance.shape[0] > 1000
    assert right.mean() == pytest.approx(chance.mean(), abs=0.08)
    likely = chance > 0.8
    assert right[likely].mean() > 0.8
    assert right[~likely].mean() < 0.5


def test_trust_learns_what_holds_in_a_task() -> None:
    # Pairs from the prompt never come again in the output: copying must lose its trust.
    rng = random.Random(7)
    drafter = AutoDrafter(min_survival=0.0)
    before = after = 0.0
    for turn in range(60):
        prompt = [rng.randrange(1, 30) for _ in range(60)]
        session = opened(drafter, prompt, [prompt[5]])
        tree = session.propose(4, 1)
        if turn == 0:
            before = float(tree.survival.sum())
        after = float(tree.survival.sum())
        session.extend([rng.randrange(1000, 9000) for _ in range(20)])
        session.extend([rng.randrange(1, 30) for _ in range(20)])
        session.settle()
        session.close()
        drafter.trust.update()
    assert after < 0.5 * before


def test_nothing_is_learned_twice_after_a_rollback(corpus: Corpus) -> None:
    drafter = AutoDrafter(corpus=corpus)
    session = opened(drafter, [1, 2, 3, 1, 2], [3, 1, 2])
    once = drafter.trust.evidence.copy()
    session.rollback(1)
    session.extend([1, 2])
    assert np.array_equal(drafter.trust.evidence, once)
    session.extend([3])
    assert drafter.trust.evidence.sum() > once.sum()
    then = drafter.trust.evidence.copy()
    session.catch_up([1, 2, 3])  # what it missed is known, and cost no time
    assert np.array_equal(drafter.trust.evidence, then) and session.size == 12


def test_neither_a_step_that_was_taken_back_nor_an_end_is_compared(corpus: Corpus) -> None:
    """An end is known from the corpus and never drafted: no way of drafting is better at it."""
    drafter = AutoDrafter(corpus=corpus)
    session = opened(drafter, [1, 2, 3], [5, 6])
    assert drafter.trust.fit.num_tokens == 2
    session.extend(list(corpus.end_ids())[:1])
    assert drafter.trust.fit.num_tokens == 2
    session.feedback(session.propose(4, 4), [])
    session.rollback(0)
    session.extend([9, 8])
    assert drafter.trust.fit.num_steps == 0


def test_trust_is_kept_across_restarts(tmp_path: Path, corpus: Corpus) -> None:
    drafter = AutoDrafter(corpus=corpus)
    replay(drafter, recordings(20, 8), budget=8)
    drafter.trust.update()
    path = tmp_path / "state" / "trust.json"
    drafter.trust.save(path)
    restored = AutoDrafter(corpus=corpus).trust  # begins where this corpus says
    restored.restore(path)
    assert np.allclose(restored.weights, drafter.trust.weights, atol=1e-4)
    assert np.allclose(restored.factors, drafter.trust.factors, atol=1e-3)
    assert [p.name for p in path.parent.iterdir()] == ["trust.json"]
    rows = restored.table()
    assert rows and rows[0]["source"] in SOURCES
    assert [row["offered"] for row in rows] == sorted(
        (row["offered"] for row in rows), reverse=True
    )
    for row in rows:
        assert row["accepted"] <= row["offered"] and row["min_share"] <= row["mean_claim"] + 1e-4
        expected = (row["accepted"] + 1) / (row["offered"] + 2)
        assert row["chance"] == pytest.approx(expected, abs=0.02)
    renamed = path.read_text().replace('"corpus"', '"copied"')
    for text in ('{"kind": "drafter trust"}', "{", renamed):
        path.write_text(text)
        with pytest.raises(CalibrationError):
            restored.restore(path)


def test_old_evidence_fades_and_a_trust_has_the_shape_of_its_cells() -> None:
    trust, usual = Trust(memory=100.0), Trust().weights.copy()
    trust.evidence[:, 5], trust.num_news = (400.0, 90.0), 490.0
    trust.outcomes[:, 7] = (90.0, 10.0, 400.0)
    trust.update()
    assert trust.evidence[:, 5].tolist() == [200.0, 45.0] and trust.num_news == 0.0
    assert trust.outcomes[:, 7].tolist() == [45.0, 5.0, 200.0]
    assert np.array_equal(Trust().weights, usual), "all scopes begin with the same arrays"
    with pytest.raises(ValueError, match="weights"):
        Trust(np.ones(3))


def test_a_trust_without_evidence_is_not_fitted_while_the_first_request_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fitted: list[Trust] = []
    monkeypatch.setattr(Trust, "update", lambda trust: fitted.append(trust))
    drafter = AutoDrafter()
    session = opened(drafter, [1, 2, 3, 1, 2])
    assert not fitted
    for _ in range(200):
        session.extend([3, 1, 2])
    session.settle()
    assert fitted == [drafter.trust]


def test_after_a_changed_token_the_prediction_is_drafted_on_at_once() -> None:
    prediction = list(range(50, 90))
    session = opened(AutoDrafter(), [1, 2, 3], prediction[:10], prediction_ids=prediction)
    session.extend([7])  # in place of prediction[10]; 7 was never seen, so nothing matches it
    tree = session.propose(8, 8)
    assert followed(tree.children(), prediction[11:]) and tree.token_ids[0] == prediction[11]
    session.extend([prediction[11]])
    assert session.propose(8, 8).token_ids[:4].tolist() == prediction[12:16]
    session.rollback(10)
    session.extend([7, *prediction[10:12]])  # this time it was put in, and nothing replaced
    assert session.propose(8, 8).token_ids[:4].tolist() == prediction[12:16]


def test_a_prediction_that_is_wrong_is_dropped() -> None:
    rng = random.Random(9)
    drafter = AutoDrafter()
    prediction, output = ([rng.randrange(at, 2 * at) for _ in range(200)] for at in (50, 5000))
    session = opened(drafter, [1, 2, 3], output[:40], prediction_ids=prediction)
    assert len(session.propose(16, 16)) == 0

    def extended_s() -> float:
        began = time.process_time()
        session.extend([next(fresh)])
        return time.process_time() - began

    fresh = iter(range(10_000, 20_000))
    near = min(extended_s() for _ in range(20))
    session.catch_up([next(fresh) for _ in range(8000)])
    assert min(extended_s() for _ in range(20)) < 5 * near, "however long ago it was left"


def _tokens_per_step(drafter: AutoDrafter, tests: list[Recording]) -> float:
    return replay(drafter, tests, budget=8, in_prefill=True).decode_tokens_per_step


def _strays(num: int, seed: int) -> list[Recording]:
    """Answers that copy what the corpus says is never copied: parts of the instruction."""
    rng = random.Random(seed)
    out = []
    for prompt, _ in examples(num, seed):
        places = [rng.randrange(8) for _ in range(3)]
        answer = [token for place in places for token in prompt[place : place + 5]]
        out.append(Recording(prompt, [*answer, EOS]))
    return out


def test_a_corpus_that_outputs_do_not_follow_costs_no_steps(corpus: Corpus) -> None:
    first, later = _strays(50, 11), _strays(100, 12)
    with_it, without = AutoDrafter(corpus=corpus), AutoDrafter(eos_token_ids=(EOS,))
    _tokens_per_step(with_it, first)
    _tokens_per_step(without, first)
    assert _tokens_per_step(with_it, later) >= 0.99 * _tokens_per_step(without, later)
    fit = with_it.trust.fit
    # Its chances of a token may be the better ones: the trees are not, and they decide.
    assert fit.num_steps > fit.MIN_STEPS and not fit.helps


def test_a_corpus_that_fits_is_followed_again(corpus: Corpus) -> None:
    drafter = AutoDrafter(corpus=corpus)
    drafter.trust.fit.num_tokens, drafter.trust.fit.gain = 400.0, -80.0
    assert not drafter.trust.fit.helps
    session = opened(drafter, examples(1, 2)[0][0])
    assert len(session.propose(8, 8)) == 0, "nothing else knows how an output begins"
    _tokens_per_step(drafter, recordings(200, 13))
    assert drafter.trust.fit.helps and drafter.trust.fit.gain > 0.0


def test_what_a_step_without_the_corpus_would_have_brought_is_counted(corpus: Corpus) -> None:
    """Every step's other tree is followed as well, where it learns."""
    drafter = AutoDrafter(corpus=corpus)
    _tokens_per_step(drafter, recordings(40, 13))
    fit = drafter.trust.fit
    assert fit.num_steps > 40 and fit.tokens_with > 1.5 * fit.tokens_without
    plain = AutoDrafter(corpus=corpus, learn=False)
    _tokens_per_step(plain, recordings(5, 13))
    assert plain.trust.fit.num_steps == 0


def test_held_out_evidence_is_a_place_to_begin(corpus: Corpus) -> None:
    """What was held out fixes the weights and counts no more than any prior."""
    assert corpus.evidence.shape == (2, NUM_CELLS)
    trust, plain = AutoDrafter(corpus=corpus).trust, Trust()
    begun, claims = trust.weights.copy(), trust.factors.copy()
    assert trust.evidence.sum() == 0.0 and not np.allclose(begun, plain.weights)
    assert not np.allclose(claims, plain.factors)
    assert AutoDrafter(corpus=corpus, trust=plain).trust is plain
    cell = int(np.argmax(corpus.evidence[0]))
    assert corpus.evidence[0, cell] > 50.0
    trust.evidence[0, cell] += 100.0  # asked, and never right
    trust.update()
    assert trust.weights[cell] < 0.3 * begun[cell]
    np.testing.assert_allclose(trust.factors, claims)


def test_nodes_that_would_not_be_verified_are_not_looked_for() -> None:
    text = [*range(9), 3, 7, *range(9), 3, 8, *range(9), 3]
    session = AutoDrafter(eos_token_ids=()).open(text)
    whole = np.sort(session.propose(16, 8).survival)[::-1]
    session.least = np.array([0.0, 0.0, whole[3]])
    assert len(whole) > 4 and whole[3] > whole[4]
    assert np.sort(session.propose(16, 8).survival)[::-1].tolist() == whole[:4].tolist()
    session.least = np.ones(1)
    assert session.propose(16, 8).survival.tolist() == whole[:1].tolist()
