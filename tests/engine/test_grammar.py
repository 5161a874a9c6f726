"""Grammars in the engine: the masks are a function of the text, and so is the text."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.tree import DraftTree
from server import token_bytes
from server.engine.engine import Engine
from server.engine.figures import FIGURES
from server.engine.grammar import GrammarCompiler, GrammarState, constrain, fill_masks
from server.engine.trees import CELL, SOURCE, Trees, checked
from server.types import GrammarSpec, Request, SpeculationParams, VocabularyParams
from tests.api.tiny_tokenizers import byte_level_tokenizer
from tests.engine.requests import engine_over, request_of
from tests.engine.scenarios import Collector, Result, answers, profile_of, run_requests
from tests.engine.tiny_vocabularies import allowed_ids, read_grammar_tokenizer
from tests.fakes.fake_drafters import FakeDrafter, check_tree, tree_along
from tests.fakes.fake_runner import FakeModel
from tests.profiles import examples
from vocab_store.profile import VocabProfile

# -- the state ------------------------------------------------------------------------------------

TOKENIZER = byte_level_tokenizer()
VOCAB = 400
TABLE = token_bytes.build(TOKENIZER, VOCAB)
SCHEMA = GrammarSpec(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "year": {"type": "integer"},
                "kind": {"enum": ["the quick", "the slow", "other"]},
            },
            "required": ["name", "year", "kind"],
            "additionalProperties": False,
        }
    ),
    " ?",
)
COMPACT = replace(SCHEMA, whitespace="")


@pytest.fixture(scope="module")
def load() -> Callable[[], Any]:
    """Reads the tokenizer as a compiler does."""
    padded = byte_level_tokenizer()
    padded.enable_truncation(8)
    padded.enable_padding()
    return partial(read_grammar_tokenizer, padded, VOCAB)


@pytest.fixture(scope="module")
def compiler(load: Callable[[], Any]) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(load)
    yield made
    made.close()


def _state(compiler: GrammarCompiler, spec: GrammarSpec) -> GrammarState:
    return GrammarState(compiler.compile(spec).result())


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_a_state_is_a_function_of_the_tokens(
    compiler: GrammarCompiler, data: st.DataObject
) -> None:
    """However it got there: by rollbacks, failed tokens, masks and forced tokens asked or not."""
    spec = data.draw(st.sampled_from([SCHEMA, COMPACT, GrammarSpec("regex", "(the |quick )*fox")]))
    state = _state(compiler, spec)
    tokens: list[int] = []
    rng = data.draw(st.randoms(use_true_random=False))
    for _ in range(12):
        action = rng.random()
        if action < 0.3 and tokens:
            keep = rng.randrange(len(tokens))
            state.rollback(keep)
            del tokens[keep:]
        elif action < 0.45:
            state.forced()
        elif action < 0.55:
            wrong = [i for i in range(VOCAB) if i not in allowed_ids(state)]
            if not state.consume(rng.choice(wrong)):
                assert state.problem and not allowed_ids(state)
                state.rollback(len(tokens))
            else:  # right bytes in another tokenization: no mask allows it, the parser follows it
                state.rollback(len(tokens))
        else:
            choices = [i for i in allowed_ids(state) if i != 0]
            if choices:
                tokens.append(rng.choice(choices))
                assert state.consume(tokens[-1])
        fresh = _state(compiler, spec)
        for token in tokens:
            assert fresh.consume(token)
        allowed = allowed_ids(state)
        assert allowed == allowed_ids(fresh) and max(allowed, default=0) < VOCAB
        assert state.forced() == fresh.forced()
        assert state.is_complete == fresh.is_complete
        assert state.num_consumed == len(tokens)


def test_a_mark_that_lies_ahead(compiler: GrammarCompiler) -> None:
    with pytest.raises(ValueError, match="cannot go back"):
        _state(compiler, SCHEMA).rollback(1)


def test_what_is_forced_is_all_that_the_masks_allow(compiler: GrammarCompiler) -> None:
    state = _state(compiler, COMPACT)
    forced = state.forced()
    assert b'{"name":"'.startswith(b"".join(TABLE.bytes_of(i) for i in forced)) and len(forced) > 2
    for token in forced:
        assert allowed_ids(state) == [token]
        assert state.consume(token)
    assert len(allowed_ids(state)) > 1


# -- trees ----------------------------------------------------------------------------------------


def _ids(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


def _tree(paths: list[tuple[list[int], float]]) -> DraftTree:
    tree = tree_along(paths)
    num = len(tree)
    return replace(tree, source=np.ones(num, np.uint8), cell=np.arange(num, dtype=np.int32))


def _checked(tree: DraftTree | None, depth: int = 64) -> Trees:
    """As the one tree of a step; it can be verified."""
    found, errors = checked([tree], np.array([(VOCAB, depth)]))
    assert not errors
    return found


def _paths(tree: Trees) -> set[bytes]:
    texts: list[bytes] = []
    token_ids, parents, *_ = tree.nodes.tolist()
    for token, parent in zip(token_ids, parents, strict=True):
        texts.append((texts[parent] if parent >= 0 else b"") + TABLE.bytes_of(token))
    inner = set(parents)
    return {text for i, text in enumerate(texts) if i not in inner}


def _constrain(
    state: GrammarState,
    paths: list[tuple[list[int], float]],
    *,
    max_nodes: int = 64,
    depth: int = 64,
) -> Trees:
    forced = state.forced()[: min(max_nodes, depth)]
    proposed = _checked(_tree(paths)) if paths else None
    tree, num = constrain(state, forced, proposed, max_nodes=max_nodes, max_depth=depth, source=3)
    assert tree is not None and len(tree) <= max_nodes
    return replace(_checked(tree, depth), certain=np.array([num], np.int32))


def test_forced_tokens_come_first_and_the_drafts_follow_them(compiler: GrammarCompiler) -> None:
    state = _state(compiler, COMPACT)
    forced = state.forced()
    tree = _constrain(state, [(_ids("the"), 0.4)])
    num = len(forced)
    token_ids, parents, *_ = tree.nodes.tolist()
    assert token_ids[:num] == forced and tree.certain == num
    assert parents[: num + 1] == list(range(-1, num))
    assert tree.survival[:num].tolist() == [1.0] * num
    assert tree.survival[num] == pytest.approx(0.4)
    assert tree.nodes[SOURCE].tolist()[:num] == [3] * num and tree.nodes[SOURCE, num] == 1
    assert state.num_consumed == 0  # put back
    assert allowed_ids(state) == forced[:1]


def test_what_the_grammar_forbids_is_dropped_with_all_below(compiler: GrammarCompiler) -> None:
    state = _state(compiler, SCHEMA)
    for token in _ids('{"name":"'):
        state.consume(token)
    right = _ids('fox"')
    wrong = [*_ids("fox"), 0, *_ids("lazy")]  # EOS within a string
    tree = _constrain(state, [(right, 0.5), (wrong, 0.4), (_ids("}"), 0.3)], depth=len(right))
    assert 0 not in tree.nodes[0]
    assert _paths(tree) == {b'fox"', b"}"}


def test_forced_tokens_go_on_from_where_a_draft_ends(compiler: GrammarCompiler) -> None:
    state = _state(compiler, COMPACT)
    for token in _ids('{"name":"fox'):
        state.consume(token)
    tree = _constrain(state, [([*_ids('"'), *_ids(',"ye')], 0.5), (_ids("es"), 0.2)])
    assert _paths(tree) == {b'","year":', b"es"}
    forced = np.flatnonzero(tree.nodes[CELL] < 0).tolist()
    assert forced and all(tree.survival[i] == 0.5 for i in forced)
    assert all(tree.nodes[SOURCE, i] == 3 for i in forced)


def test_the_likeliest_stay_and_the_session_is_told_of_its_own(compiler: GrammarCompiler) -> None:
    state = _state(compiler, COMPACT)
    for token in _ids('{"name":"fox'):
        state.consume(token)
    kept = _constrain(
        state, [(_ids("es"), 0.2), ([*_ids('"'), *_ids(',"ye')], 0.5), (_ids("jum"), 0.1)]
    )
    kept.prune(np.array([4]))
    assert kept.survival.tolist() == [0.5] * 4
    path: list[int] = []
    for node, parent in enumerate(kept.nodes[1]):
        if parent == (path[-1] if path else -1):
            path.append(node)
    own, accepted = kept.proposed(0, path, 3)
    check_tree(own)
    assert accepted == list(range(len(own))) and len(own) == (kept.nodes[CELL] >= 0).sum()
    assert own.cell.tolist() == [cell for cell in kept.nodes[CELL] if cell >= 0]
    assert kept.certain == 0
    only_forced = _constrain(_state(compiler, COMPACT), [])
    assert len(only_forced.proposed(0, [0], 3)[0]) == 0
    assert only_forced.certain == only_forced.nodes.shape[1]


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_no_node_is_left_that_could_not_be_drawn(
    compiler: GrammarCompiler, data: st.DataObject
) -> None:
    """Every node's token is in its parent's mask, and the masks are those of a fresh state."""
    rng = data.draw(st.randoms(use_true_random=False))
    spec = rng.choice([SCHEMA, COMPACT])
    state = _state(compiler, spec)
    text = '{"name": "foxes", "year": 42, "kind": "the slow"}'.replace(
        ": ", ":" if rng.random() < 0.5 else ": "
    )
    ids = _ids(text)
    start: list[int] = []
    for token in ids[: rng.randrange(len(ids))]:
        if not state.consume(token):
            state.rollback(state.num_consumed)
            break
        start.append(token)
    paths = []
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(ids))
        paths.append((ids[at : at + rng.randint(1, 6)], rng.random()))
    forced = state.forced()[:8]
    paths.sort(key=lambda path: -path[1])  # no node survives more often than its parent
    proposed = _checked(_tree(paths)) if paths else None
    tree, _ = constrain(state, forced, proposed, max_nodes=12, max_depth=9, source=2)
    columns = _checked(tree, 9).nodes
    masks = fill_masks(state, columns)
    assert state.num_consumed == len(start)
    nodes = columns.shape[1]
    assert masks.shape == (1 + nodes, state.num_words)
    for node in range(-1, nodes):
        path: list[int] = []
        at = node
        while at >= 0:
            token, parent, *_ = columns[:, at].tolist()
            assert (int(masks[1 + parent, token >> 5]) >> (token & 31)) & 1
            path.insert(0, token)
            at = parent
        fresh = _state(compiler, spec)
        for token in start + path:
            assert fresh.consume(token)
        row = np.zeros(state.num_words, np.uint32)
        fresh.fill_mask(row)
        assert (masks[1 + node] == row).all()


# -- in the engine --------------------------------------------------------------------------------


def _engine(
    compiler: GrammarCompiler | None, profile: VocabProfile | None = None, **options: Any
) -> Engine:
    none = FakeDrafter(lambda tokens, budget, depth: DraftTree.empty())
    engine, _ = engine_over(
        FakeModel(VOCAB, seed=3), {"none": none}, num_blocks=128, block_size=8, max_model_len=256,
        eos_token_ids=(0,), stop_table=TABLE, grammars=compiler,
        profiles=None if profile is None else lambda _: profile, **options,
    )  # fmt: skip
    return engine


def _request(
    name: str,
    grammar: GrammarSpec | None,
    *,
    draft: bool = False,
    choices: int = 1,
    **sampling: Any,
) -> Request:
    drafts = SpeculationParams("none", 16) if draft else SpeculationParams()
    return request_of(
        name, (7, 8, 9), speculation=drafts, num_choices=choices, grammar=grammar,
        **{"max_tokens": 60, "ignore_eos": False, **sampling},
    )  # fmt: skip


def _answer(result: Result) -> bytes:
    return TABLE.join(result.ids, skip_special=True)


def test_forced_tokens_save_steps_and_change_nothing(compiler: GrammarCompiler) -> None:
    outcomes = {}
    for draft in (False, True):
        engine = _engine(compiler)
        outcomes[draft] = answers(
            engine, _request("r", COMPACT, draft=draft, temperature=1.0, seed=5, num_logprobs=2)
        )["r", 0]
    plain, drafted = outcomes[False], outcomes[True]
    assert drafted.ids == plain.ids and drafted.logprobs == plain.logprobs
    assert drafted.finish_reason == "stop"
    answer = json.loads(_answer(drafted))
    assert list(answer) == ["name", "year", "kind"] and isinstance(answer["year"], int)
    steps = {draft: sum(c.num_steps for c in r.counts) for draft, r in outcomes.items()}
    assert steps[True] <= 0.7 * steps[False]
    forced = [source for c in drafted.counts for source in c.by_source if source[0] == "forced"]
    assert sum(n for _, n, _ in forced) == sum(k for _, _, k in forced) > 8
    # A draft that holds nothing of the drafter's own says nothing about the drafter.
    assert all(p.rank > 0 for p in plain.logprobs)


def test_what_is_forced_beside_a_rest_counts_as_no_ask(compiler: GrammarCompiler) -> None:
    engine = _engine(compiler)
    gain, told = engine.gain, list[tuple[list[int], int]]()
    observe, choose = gain.observe_asks, gain.choose

    def observed(seats: Any, *columns: Any) -> int:
        told.append((seats.tolist(), -1))
        return observe(seats, *columns)

    def chosen(*given: Any) -> Any:
        told.append(([], given[-1]))
        return choose(*given)

    gain.ask = lambda seats, *_: (["cooldown"] * len(seats), 0)  # type: ignore[method-assign]
    gain.observe_asks, gain.choose = observed, chosen  # type: ignore[method-assign,assignment]
    (result,) = answers(engine, _request("r", COMPACT, draft=True)).values()
    assert sum(c.num_accepted for c in result.counts) > 8 and len(told) > 4
    assert {(*seats, num) for seats, num in told} == {(-1, -1), (0,)}


@pytest.mark.parametrize("num", [3, 6])
def test_a_grammar_that_fails_has_unverified_tokens_checked_at_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    """Not after `verify_every` of them: what follows would be drawn without its token."""
    consume = GrammarState.consume

    def limited(state: GrammarState, token_id: int) -> bool:
        if state.num_consumed < num:
            return consume(state, token_id)
        state.problem = "a limit"
        return False

    monkeypatch.setattr(GrammarState, "consume", limited)
    profile = profile_of(set(range(VOCAB)), VOCAB)
    results = {}
    for mode in ("full", "exact"):
        engine = _engine(compiler, profile=profile, may_use_full_head=False)
        vocabulary = VocabularyParams(mode, "p", 40)
        results.update(answers(engine, replace(_request(mode, COMPACT), vocabulary=vocabulary)))
    full, exact = results["full", 0], results["exact", 0]
    assert exact.error_code == full.error_code == "grammar_limit"
    assert len(full.ids) == len(exact.ids) == num


@pytest.mark.parametrize("draft", [False, True])
def test_what_excludes_every_token_fails_alone_and_says_so(
    compiler: GrammarCompiler, draft: bool
) -> None:
    engine = _engine(compiler)
    start = _ids("the")
    other = next(i for i in range(2, VOCAB) if i not in start)
    allowed = (*start, other)
    grammar = GrammarSpec("lark", 'start: "the fox"')
    results = answers(
        engine,
        _request("r", grammar, draft=draft, allowed_token_ids=allowed),
        _request("never", GrammarSpec("regex", "[^\\x00-\\U0010FFFF]")),
        _request("fine", None, max_tokens=3),
    )
    assert results["r", 0].error_code == "constraint_unsatisfiable"
    assert results["never", 0].error_code == "grammar_invalid"  # known once it is compiled
    assert results["r", 0].ids == start  # what came before was handed out, accepted drafts too
    assert sum(c.num_accepted for c in results["r", 0].counts) == (len(start) if draft else 0)
    assert results["fine", 0].finish_reason == "length"


@pytest.mark.parametrize("seed", range(4))
def test_a_choice_without_a_token_left_ends_those_that_draw_one_in_the_same_step(
    compiler: GrammarCompiler, seed: int
) -> None:
    """Each is told its end once, and nothing after it."""
    engine = _engine(compiler)
    ids = (*_ids("a"), *_ids("b"))
    grammar = GrammarSpec("regex", "bc|aaaaaaaa")  # after a "b" nothing is left
    engine.submit(
        _request("r", grammar, choices=8, allowed_token_ids=ids, temperature=1.0, seed=seed)
    )
    results = run_requests(engine)
    assert {r.error_code for r in results.values()} == {"constraint_unsatisfiable"}
    assert {len(r.ids) for r in results.values()} == {1} and len(results) == 8


@pytest.mark.parametrize("grammar", [None, COMPACT])
def test_without_a_compiler_or_with_ignore_eos_a_grammar_is_refused(
    compiler: GrammarCompiler, grammar: GrammarSpec | None
) -> None:
    for engine, ignore_eos in ((_engine(None), False), (_engine(compiler), True)):
        asked = _request("r", grammar, ignore_eos=ignore_eos, max_tokens=1)
        codes = {r.error_code for r in answers(engine, asked).values()}
        assert codes == ({None} if grammar is None else {"unsupported_parameter"})


# -- compiling ------------------------------------------------------------------------------------


def _slow(gate: threading.Event, load: Callable[[], Any], **options: Any) -> GrammarCompiler:
    """It compiles when `gate` opens."""

    def wait() -> Any:
        assert gate.wait(30)
        return load()

    return GrammarCompiler(wait, **options)


def test_others_go_on_while_a_grammar_is_compiled(load: Callable[[], Any]) -> None:
    gate = threading.Event()
    slow = _slow(gate, load)
    engine = _engine(slow)
    engine.submit(_request("waits", COMPACT))
    engine.submit(_request("leaves", COMPACT))
    engine.submit(_request("runs", None, max_tokens=5, ignore_eos=True))
    collector = Collector()
    while engine.has_work:
        collector.take(engine.step())
    assert collector.results["runs", 0].finish_reason == "length"
    figures = {figure.name: read(engine) for figure, read in FIGURES}
    assert engine.is_preparing and engine.num_open == figures["num_requests_waiting"] == 2
    engine.abort("leaves")
    engine.submit(_request("later", None, max_tokens=5, ignore_eos=True))
    while engine.has_work:
        collector.take(engine.step())
    assert collector.results["leaves", 0].finish_reason == "abort"
    assert collector.results["later", 0].finish_reason == "length"
    gate.set()
    results = run_requests(engine)
    assert _answer(results["waits", 0]).startswith(b'{"name":"')
    assert not engine.is_preparing


def test_keys_take_turns_at_the_threads(load: Callable[[], Any]) -> None:
    gate, done, order = threading.Event(), threading.Event(), list[str]()
    slow = _slow(gate, load, num_threads=1)

    def made(key: str, _: object) -> None:
        order.append(key)
        if len(order) == 6:
            done.set()

    for i, key in enumerate("aaaabb"):
        future = slow.compile(GrammarSpec("regex", f"b{{{i}}}"), f"{key}\0")
        future.add_done_callback(partial(made, key))
    gate.set()
    assert done.wait(30) and "".join(order) == "ababaa"
    slow.close()


def test_a_grammar_that_takes_too_long_is_given_up(load: Callable[[], Any]) -> None:
    gate = threading.Event()
    engine = _engine(_slow(gate, load, timeout_s=0.05))
    behind = replace(_request("behind", GrammarSpec("regex", "a")), tenant="another")
    results = answers(engine, _request("r", COMPACT, choices=2), behind)
    assert results.pop(("behind", 0)).error_code == "queue_full", "it waited for a thread"
    assert {r.error_code for r in results.values()} == {"grammar_limit"} and len(results) == 2
    engine = _engine(_slow(gate, load))
    asked = replace(_request("r", COMPACT), queue_timeout_s=0.05, arrival_s=time.monotonic())
    assert answers(engine, asked)["r", 0].error_code == "queue_timeout"
    gate.set()


def test_a_grammar_that_cannot_be_compiled_fails_its_request(
    compiler: GrammarCompiler, load: Callable[[], Any]
) -> None:
    engine = _engine(compiler)
    unknown = GrammarSpec("lark", 'start: "a" <|nothing|>')
    with pytest.raises(ValueError, match=r"<.nothing.>.$"):  # not what the others are called here
        compiler.compile(unknown).result()
    results = answers(
        engine,
        _request("bad", unknown),
        _request("fine", None, max_tokens=2),
    )
    assert results["bad", 0].error_code == "grammar_invalid"
    assert results["fine", 0].finish_reason == "length"

    tries: list[str] = []

    def broken() -> Any:
        tries.append("one more")
        if len(tries) == 1:
            raise OSError("no such file")
        return load()

    engine = _engine(GrammarCompiler(broken))
    for name, code in (("r", "engine_error"), ("later", None), ("last", None)):
        assert answers(engine, _request(name, COMPACT))[name, 0].error_code == code
    assert len(tries) == 2


def test_equal_grammars_are_compiled_once_and_few_are_kept(load: Callable[[], Any]) -> None:
    small = GrammarCompiler(load, max_kept=4)
    first = small.compile(GrammarSpec("regex", "a"))
    assert small.compile(GrammarSpec("regex", "a")) is first
    other = small.compile(GrammarSpec("regex", "a"), "b\0")
    assert other is not first, "how soon it is there would tell what another scope asks"
    assert small.compile(GrammarSpec("regex", "a"), "b\0") is other
    found = [small.compile(GrammarSpec("regex", f"b{{{i}}}")) for i in range(20)]
    again = [small.compile(GrammarSpec("regex", f"b{{{i}}}")) for i in (19, 18, 17, 16, 15)]
    assert [one in found for one in again] == [True, True, True, True, False]
    last = small.compile(GrammarSpec("regex", "b{16}"))
    assert last in found, "the 19th went, which was asked for again before it"
    assert small.compile(GrammarSpec("regex", "a")) is not first
    bad = small.compile(GrammarSpec("regex", "("))
    with pytest.raises(ValueError, match="unclosed"):
        bad.result()
    assert small.compile(GrammarSpec("regex", "(")) is not bad  # failures are not kept
    small.close()


def test_large_grammars_are_kept_by_their_length(load: Callable[[], Any]) -> None:
    large = GrammarCompiler(load, max_kept_chars=1000)
    specs = [GrammarSpec("regex", f"{i}" * 300) for i in range(9)]
    found = []
    for spec in specs:
        found.append(large.compile(spec))
        large.compile(GrammarSpec("regex", "(" * 300)).exception()  # fails each time: kept once
    again = [large.compile(spec) for spec in specs[:-4:-1]]
    assert [one in found for one in again] == [True, True, False], "beside the one that fails"
    alone = large.compile(GrammarSpec("regex", "a" * 5000))
    assert large.compile(GrammarSpec("regex", "a" * 5000)) is alone
    assert large.compile(specs[-1]) not in found
    specs = [GrammarSpec("regex", f"b{i}") for i in range(9)]
    found = [large.compile(spec) for spec in specs]
    assert [large.compile(spec) for spec in specs] == found  # the long one went, and its length
    large.close()


def test_a_forced_beginning_is_bounded(compiler: GrammarCompiler) -> None:
    """One that is walked at every step, or takes the memory of a model, is refused."""
    for source in ("(((a{100}){100}){100}){100}", "a{8193}b{300000}"):
        with pytest.raises(ValueError, match="forces more than 8192 tokens"):
            compiler.compile(GrammarSpec("regex", source)).result()
    assert compiler.compile(GrammarSpec("regex", "a{4000}")).result()
