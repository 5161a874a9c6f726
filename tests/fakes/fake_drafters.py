"""Drafters for tests: random, oracle, liar and broken ones. All deterministic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from drafters.arrays import Float32, Int32
from drafters.auto.drafter import AutoDrafter, AutoSession
from drafters.auto.prior import WIDTH, Prior, integers_of
from drafters.auto.retrieval import Seen
from drafters.base import SessionClosedError
from drafters.tree import DraftTree
from tests.fakes.fake_runner import FakeModel, state_of_hash


class FakeSession:
    """Keeps the text and asks `propose_from(tokens, budget, max_depth)` for trees. told: how long
    the text was at each feedback, and what was accepted."""

    def __init__(
        self, prompt_ids: Sequence[int], propose_from: Callable[[list[int], int, int], DraftTree]
    ) -> None:
        self.tokens = list(prompt_ids)
        self._num_prompt = len(self.tokens)
        self.propose_from = propose_from
        self.is_closed = False
        self.told: list[tuple[int, list[int]]] = []

    def _alive(self) -> None:
        if self.is_closed:
            raise SessionClosedError("the session is closed")

    def propose(self, budget: int, max_depth: int) -> DraftTree:
        self._alive()
        return self.propose_from(self.tokens, budget, max_depth)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._alive()
        self.tokens.extend(token_ids)

    def feedback(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        self._alive()
        check_tree(tree)
        parent = -1
        for node in accepted:
            assert tree.parents[node] == parent
            parent = node
        self.told.append((len(self.tokens), list(accepted)))

    def settle(self) -> None:
        self._alive()

    def checkpoint(self) -> int:
        self._alive()
        return len(self.tokens) - self._num_prompt

    def rollback(self, mark: int) -> None:
        self._alive()
        if mark > len(self.tokens) - self._num_prompt:
            raise ValueError("a mark ahead")
        del self.tokens[self._num_prompt + mark :]

    def close(self) -> None:
        self.is_closed = True


class FakeDrafter:
    """Opens FakeSessions; counts those open."""

    name = "fake"
    sources: tuple[str, ...] = ("fake", "other")

    def __init__(
        self,
        propose_from: Callable[[list[int], int, int], DraftTree],
        kind: type[FakeSession] = FakeSession,
    ) -> None:
        self.propose_from = propose_from
        self._kind = kind
        self.sessions: list[FakeSession] = []

    def open(self, prompt_ids: Sequence[int], **_: Any) -> FakeSession:
        session = self._kind(prompt_ids, self.propose_from)
        self.sessions.append(session)
        return session

    @property
    def num_open(self) -> int:
        """Sessions that were never closed."""
        return sum(not s.is_closed for s in self.sessions)


def tree_of(
    ids: Sequence[int],
    parents: Sequence[int] | Int32,
    survival: float | Sequence[float] | Float32,
    source: int | Sequence[int] = 0,
    cell: Sequence[int] | Int32 = (),
) -> DraftTree:
    """A tree, right or wrong. survival, source: of each node, or of all."""
    return DraftTree(
        np.asarray(ids, np.int32),
        np.asarray(parents, np.int32),
        np.full(len(ids), survival, np.float32),
        np.full(len(ids), source, np.uint8),
        np.asarray(cell, np.int32),
    )


def chain(ids: Sequence[int], survival: Sequence[float] | None = None) -> DraftTree:
    """A tree that is one path; survival falls by a factor of 0.9 a token when not given."""
    falling = [0.9 ** (i + 1) for i in range(len(ids))]
    return tree_of(ids, range(-1, len(ids) - 1), survival or falling)


def check_tree(tree: DraftTree) -> None:
    """Raise AssertionError unless what DraftTree says of itself is true."""
    parents, survival, num = tree.parents, tree.survival, len(tree)
    assert parents.shape == survival.shape == (num,), "columns differ in length"
    assert ((parents >= -1) & (parents < np.arange(num))).all(), "a parent that is no earlier node"
    assert (survival <= np.append(survival, 1.0)[parents] + 1e-6).all(), "above its parent's"
    siblings = set(zip(parents.tolist(), tree.token_ids.tolist(), strict=True))
    assert len(siblings) == num, "a node repeats a sibling's token"


def random_tree(
    rng: Random, vocab_size: int, budget: int, max_depth: int, alphabet: int = 0
) -> DraftTree:
    """A valid tree of at most `budget` nodes in a random topological order."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    survival: list[float] = []
    seen: set[tuple[int, int]] = set()
    for _ in range(rng.randint(0, budget)):
        parent = rng.randint(-1, len(tokens) - 1)
        depth = 1 if parent < 0 else depths[parent] + 1
        token = rng.randrange(alphabet or vocab_size)
        if depth > max_depth or (parent, token) in seen:
            continue
        seen.add((parent, token))
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        survival.append((1.0 if parent < 0 else survival[parent]) * rng.random())
    return tree_of(tokens, parents, survival, [rng.randint(0, 1) for _ in tokens])


def random_drafter(seed: int, vocab_size: int, alphabet: int = 0) -> FakeDrafter:
    """Random trees, guesses from a small alphabet."""
    rng = Random(seed)
    return FakeDrafter(lambda _, b, d: random_tree(rng, vocab_size, b, d, alphabet))


def tree_along(paths: Sequence[tuple[Sequence[int], float]], most: int = 1 << 30) -> DraftTree:
    """Its nodes are the beginnings of these paths, in their order, at most `most`; each survives
    with the chance of the first path that has it."""
    nodes: dict[tuple[int, ...], int] = {}
    survival: list[float] = []
    for path, chance in paths:
        for end in range(1, len(path) + 1):
            if len(nodes) < most and tuple(path[:end]) not in nodes:
                nodes[tuple(path[:end])] = len(nodes)
                survival.append(chance)
    parents = [nodes.get(beginning[:-1], -1) for beginning in nodes]
    return tree_of([beginning[-1] for beginning in nodes], parents, survival)


def oracle_drafter(texts: Sequence[Sequence[int]]) -> FakeDrafter:
    """Knows whole texts (prompt and output): proposes how those go on, as one tree."""

    def propose(tokens: list[int], budget: int, max_depth: int) -> DraftTree:
        num = len(tokens)
        known = [text for text in texts if list(text[:num]) == tokens]
        return tree_along([(text[num : num + max_depth], 0.9) for text in known], budget)

    return FakeDrafter(propose)


def liar_drafter(seed: int, texts: Sequence[Sequence[int]], vocab_size: int) -> FakeDrafter:
    """Sure of wrong tokens and unsure of right ones: the true path lies last and must be moved."""
    rng = Random(seed)

    def propose(tokens: list[int], budget: int, max_depth: int) -> DraftTree:
        num = len(tokens)
        truths = [list(t[num : num + max_depth]) for t in texts if list(t[:num]) == tokens]
        truth = rng.choice(truths) if truths else []
        ids: list[int] = []
        parents: list[int] = []
        parent = -1
        for token in truth:
            for wrong in (token + 1, token + 2):
                if rng.random() < 0.6 and len(ids) + 1 < budget:
                    ids.append(wrong % vocab_size)
                    parents.append(parent)
            if len(ids) >= budget:
                break
            ids.append(token)
            parents.append(parent)
            parent = len(ids) - 1
        return tree_of(ids, parents, 0.99)

    return FakeDrafter(propose)


class _BrokenSession(FakeSession):
    """Never goes back, and tires of what it is told."""

    def rollback(self, mark: int) -> None:
        raise RuntimeError("the session is broken")

    def extend(self, token_ids: Sequence[int]) -> None:
        super().extend(token_ids)
        if len(self.tokens) % 13 == 0:
            raise RuntimeError("the session is broken")


def broken_drafter(seed: int, vocab_size: int) -> FakeDrafter:
    """Raises, or proposes what is no tree, now and then."""
    rng = Random(seed)

    def propose(tokens: list[int], budget: int, max_depth: int) -> DraftTree:
        kind = rng.randrange(16)
        if kind == 0:
            raise RuntimeError("the drafter is broken")
        if kind == 1:
            return chain([vocab_size + 3])
        if kind == 2:
            return tree_of([1, 2], [1, -1], 0.5)
        if kind == 3:
            return chain([1], [float("nan")])
        return random_tree(rng, vocab_size, budget, max_depth)

    return FakeDrafter(propose, _BrokenSession)


def random_prior(
    vocab_size: int, hidden_size: int = 24, *, num_outputs: int = 32, sure: float = 1.0
) -> Prior:
    """A head with random numbers. sure: what its outputs are multiplied by."""
    rng = np.random.default_rng(0)

    def numbers(*shape: int) -> npt.NDArray[np.float32]:
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    embed, embed_scale = integers_of(numbers(vocab_size, WIDTH) * 4)
    output, output_scale = integers_of(numbers(num_outputs, WIDTH) * sure)
    ids = rng.permutation(max(vocab_size, num_outputs))[:num_outputs].astype(np.int32)
    ids[ids >= vocab_size] = -1
    ids[-1] = -1
    return Prior(
        ids, *integers_of(numbers(hidden_size, WIDTH).T), numbers(WIDTH), embed, embed_scale,
        *integers_of(numbers(WIDTH, WIDTH).T), numbers(WIDTH), output, output_scale,
        numbers(num_outputs),
    )  # fmt: skip


class LikelySession(FakeSession):
    """Drafts what the model held likely, and checks that it is told so of the right contexts: each
    row's chances are those of the model's own logits behind the text and the node's path, and the
    state that it is told is that of the row that drew the last token."""

    num_likely = 3
    wants_state = True

    def __init__(self, prompt_ids: Sequence[int], model: FakeModel) -> None:
        super().__init__(prompt_ids, self._behind)
        self.num_rows = self.num_states = 0
        self._model = model
        self._likely: dict[int, list[int]] = {}
        self._state: npt.NDArray[np.float32] | None = None

    def note_state(self, state: npt.NDArray[np.float32]) -> None:
        self._alive()
        self.num_states += 1
        self._state = state

    def extend(self, token_ids: Sequence[int]) -> None:
        super().extend(token_ids)
        if self._state is not None and token_ids:
            behind = int(self._model.hashes(self.tokens[:-1])[-1])
            np.testing.assert_array_equal(self._state, state_of_hash(behind))
            self._state = None

    def note_likely(
        self,
        token_ids: Sequence[int],
        parents: Sequence[int],
        ids: npt.NDArray[np.int32],
        chances: npt.NDArray[np.float32],
    ) -> None:
        self._alive()
        assert ids.shape == chances.shape == (1 + len(token_ids), ids.shape[1])
        paths: list[list[int]] = []
        for row in range(ids.shape[0]):
            if row:
                parent = parents[row - 1]
                paths.append([*(paths[parent] if parent >= 0 else []), token_ids[row - 1]])
            text = [*self.tokens, *(paths[-1] if row else [])]
            recent = text[-self._model.context :] if self._model.context else []
            logits = self._model.logits(int(self._model.hashes(text)[-1]), recent)
            known = chances[row] > 0
            seen = logits[ids[row, known]]
            assert (np.diff(seen) <= 0).all()  # of a slice they need not be the very first
            np.testing.assert_allclose(
                chances[row, known], chances[row, 0] * np.exp(seen - seen[:1]), rtol=1e-3
            )
            self._likely[text[-1]] = ids[row, known].tolist()
            self.num_rows += 1

    def _behind(self, tokens: list[int], budget: int, max_depth: int) -> DraftTree:
        path: list[int] = []
        token = tokens[-1] if tokens else -1
        while len(path) < min(budget, max_depth) and self._likely.get(token):
            token = self._likely[token][0]
            path.append(token)
        return chain(path)


class LikelyDrafter(FakeDrafter):
    """Opens LikelySessions."""

    sources = ("likely",)

    def __init__(self, model: FakeModel) -> None:
        super().__init__(lambda tokens, budget, max_depth: DraftTree.empty())
        self._model = model

    def open(self, prompt_ids: Sequence[int], **_: Any) -> LikelySession:
        session = LikelySession(prompt_ids, self._model)
        self.sessions.append(session)
        return session


@cache
def _sure_prior(vocab_size: int) -> Prior:
    return random_prior(vocab_size, sure=40.0)


class OwnLogits(AutoDrafter):
    """`auto` without a corpus; its sessions share what the model held likely and read its states,
    and are counted."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(seen=Seen(), model_prior=_sure_prior(vocab_size))
        self.sessions: list[AutoSession] = []

    def open(
        self, prompt_ids: Sequence[int], *, prediction_ids: Sequence[int] = (), **_: Any
    ) -> AutoSession:
        self.sessions.append(super().open(prompt_ids, prediction_ids=prediction_ids))
        return self.sessions[-1]

    @property
    def num_open(self) -> int:
        """Sessions that were never closed."""
        return sum(_is_open(session) for session in self.sessions)


def _is_open(session: AutoSession) -> bool:
    try:
        session.checkpoint()
    except SessionClosedError:
        return False
    return True
