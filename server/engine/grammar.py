"""Grammars: compiled off the step loop; each choice has a state that consumes its tokens and makes
its masks.

    grammars = GrammarCompiler(load_tokenizer)
    start = grammars.compile(spec, scope)     # a Future; equal specs of a scope share one
    state = GrammarState(start.result())      # one per choice
    state.fill_mask(row); state.consume(token_id); state.is_complete; state.rollback(num_tokens)

The allowed next tokens depend on the tokens consumed and on nothing else, so the masks and the text
are the same with and without drafts. `constrain` walks a draft tree with the state,
drops nodes that the grammar forbids before the draft budget is spent, and adds the tokens that the
grammar forces: those are the only ones allowed, so such a draft is always accepted.

llguidance (Moskal and others, github.com/guidance-ai/llguidance) parses with an Earley parser over
a lexer of derivatives and walks the vocabulary as a trie. Forced bytes are tokenized the way the
tokenizer would, and the mask then allows that one token.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from drafters.arrays import Int32x2
from drafters.tree import DraftTree
from server.engine.batch import UInt32
from server.engine.trees import Trees
from server.grammar_text import grammar_text
from server.machine import release_code
from server.types import NO_SCOPE, GrammarSpec

if TYPE_CHECKING:
    from server.engine.grammar_library import Matcher
    from server.engine.grammar_tokenizer import GrammarTokenizer

FORCED = "forced"
"""The name of the source that forced tokens are counted under."""


# -- compiled, off the step loop -------------------------------------------------------------------


_log = logging.getLogger(__name__)

MAX_FORCED_TOKENS = 8192
"""Most tokens that a grammar may force before the first that the model draws."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer in its own threads, and keeps the most recent ones.

    load_tokenizer: called in a thread, when the first grammar comes: until then nothing of it takes
    memory; and again where it raised an OSError. max_kept, max_kept_chars: bounds on the compiled
    grammars kept, and on the length of their sources together (a large schema takes about 50 bytes
    a character once compiled); the least recently used go first. Grammars are kept per scope: a
    grammar that is already compiled would tell one client what another asks. timeout_s: how long a
    request may wait for its grammar; the engine then fails it. The engine's thread calls all
    methods.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], GrammarTokenizer],
        *,
        timeout_s: float = 10.0,
        max_kept: int = 64,
        max_kept_chars: int = 1 << 20,
        num_threads: int = 2,
    ) -> None:
        self.timeout_s = timeout_s
        self._load_tokenizer = load_tokenizer
        self._max_kept = max_kept
        self._max_kept_chars = max_kept_chars
        self._num_kept_chars = 0
        self._kept: OrderedDict[tuple[str, GrammarSpec], Future[Matcher]] = OrderedDict()
        # Those that wait, by API key: the threads take one of each in turn.
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._tokenizer: Future[GrammarTokenizer] | None = None

    def compile(self, spec: GrammarSpec, scope: str = NO_SCOPE) -> Future[Matcher]:
        """A Future of the compiled grammar before its first token. It raises ValueError for a
        grammar that cannot be compiled for this tokenizer. scope: whose it is (Request.scope)."""
        key = (scope, spec)
        future = self._kept.get(key)
        if future is not None:
            has_failed = future.done() and future.exception()
            if not has_failed:
                self._kept.move_to_end(key)
                return future
        if self._kept.pop(key, None) is not None:  # one that failed
            self._num_kept_chars -= len(spec.source)
        future = self._kept[key] = Future()
        tokenizer = self._loading()
        with self._lock:
            waiting = self._waiting.setdefault(scope.partition("\0")[0], deque())
            waiting.append((future, spec, tokenizer))
        self._threads.submit(self._work)
        self._num_kept_chars += len(spec.source)
        while len(self._kept) > 1 and (
            len(self._kept) > self._max_kept or self._num_kept_chars > self._max_kept_chars
        ):
            (_, oldest), _ = self._kept.popitem(last=False)
            self._num_kept_chars -= len(oldest.source)
        return future

    def tokenizer(self) -> GrammarTokenizer:
        """What load_tokenizer gives, which is called if it was not. Called from any thread. Raises
        what it raises."""
        return self._loading().result()

    def _loading(self) -> Future[GrammarTokenizer]:
        with self._lock:
            known = self._tokenizer
            is_away = known is not None and known.done() and not known.cancelled()
            # A file that could not be read may be back.
            if known is None or (is_away and isinstance(known.exception(), OSError)):
                known = self._tokenizer = self._threads.submit(self._load)
            return known

    def _load(self) -> GrammarTokenizer:
        began = time.monotonic()
        try:
            tokenizer = self._load_tokenizer()
        except Exception as error:
            _log.warning("structured outputs are not available: %s", error)
            raise
        took_s = time.monotonic() - began
        _log.info("the first request with a grammar: its tables took %.2f s", took_s)
        return tokenizer

    def close(self) -> None:
        """End the threads; compilations under way are not waited for. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for future, *_ in chain(*self._waiting.values()):
                future.cancel()

    def _work(self) -> None:
        with self._lock:
            key, waiting = self._waiting.popitem(last=False)
            future, spec, tokenizer = waiting.popleft()
            if waiting:
                self._waiting[key] = waiting
        future.set_running_or_notify_cancel()
        try:
            future.set_result(self._made(spec, tokenizer))
        except BaseException as error:  # the libraries' panics, too
            future.set_exception(error)

    def _made(self, spec: GrammarSpec, tokenizer: Future[GrammarTokenizer]) -> Matcher:
        try:
            known = tokenizer.result()
        except Exception as error:
            raise RuntimeError("the grammar library cannot read this model's tokenizer") from error
        try:
            return _compiled(spec, known)
        finally:  # most of what was read of the libraries' code compiles, and is not in a step
            for library in ("/llguidance/", "/tokenizers/"):
                release_code(library)


_Job = tuple["Future[Matcher]", GrammarSpec, "Future[GrammarTokenizer]"]


def _compiled(spec: GrammarSpec, known: GrammarTokenizer) -> Matcher:
    matcher = known.library.matcher(grammar_text(known.spelled(spec)))
    # Copies keep what the first mask computed, so the step loop does not compute it.
    matcher.fill_mask(np.empty(matcher.num_words, np.uint32))
    if not matcher.error and len(matcher.forced(MAX_FORCED_TOKENS + 1)) > MAX_FORCED_TOKENS:
        # They would be kept, 0.3 KB each, and walked at every step.
        raise ValueError(f"forces more than {MAX_FORCED_TOKENS} tokens at its beginning")
    if matcher.error:
        problem = one_line(matcher.error)
        if problem.startswith("NoExtension"):
            problem = "nothing matches it (a rule that ends in itself alone, for example)"
        raise ValueError(problem)
    return matcher


def one_line(message: str) -> str:
    """A message of llguidance on one line of printable ASCII. The names that it gives to control
    tokens are nobody's to know."""
    message = message.partition("; following special tokens are available")[0]
    message = " ".join(message.replace("<non-verbose/>", "").split())
    return message.encode("ascii", "backslashreplace").decode()[:200]


# -- one choice's --------------------------------------------------------------------------------


class GrammarState:
    """Where one choice stands in its grammar: a function of the tokens consumed. start: of the
    compiled grammar, which is copied. num_words: uint32 words of a mask.

    `problem` is "" or why the grammar cannot be followed any further (one of llguidance's limits
    was reached, or a token was consumed that no mask had allowed); a state with a problem allows no
    token, so that the draw fails and with it the request.
    """

    __slots__ = ("_consumed", "_matcher", "_start", "num_words", "problem")

    def __init__(self, start: Matcher) -> None:
        self._start = start
        self._matcher = start.copy()
        self.num_words = start.num_words
        self._consumed: list[int] = []
        self.problem = ""

    @property
    def num_consumed(self) -> int:
        """Tokens consumed."""
        return len(self._consumed)

    @property
    def is_dead_end(self) -> bool:
        """Whether no text that matches begins with the text so far."""
        return self.problem.startswith("NoExtension")

    @property
    def is_complete(self) -> bool:
        """Whether the output matches the grammar and no token can follow it."""
        return not self.problem and self._matcher.is_stopped and self._matcher.is_accepting

    def consume(self, token_id: int) -> bool:
        """Take one more token. False, with `problem` set, when the grammar does not allow it
        here."""
        if self.problem:
            return False
        if not self._matcher.consume(token_id):
            self.problem = one_line(self._matcher.error) or "a token does not match"
            return False
        self._consumed.append(token_id)
        return True

    def rollback(self, num_consumed: int) -> None:
        """Go back to the first `num_consumed` tokens. Raises ValueError for more than were
        consumed."""
        num = len(self._consumed) - num_consumed
        if num < 0:
            raise ValueError(f"cannot go back to {num_consumed} of {len(self._consumed)} tokens")
        if num == 0 and not self.problem:
            return
        del self._consumed[num_consumed:]
        if self.problem or not self._matcher.rollback(num):
            self.rebuild()

    def rebuild(self) -> None:
        """Make the state again from the grammar's start, because a matcher that failed stays
        failed."""
        self._matcher = self._start.copy()
        self.problem = ""
        consumed, self._consumed = self._consumed, []
        for token_id in consumed:
            if not self.consume(token_id):
                return

    def fill_mask(self, row: UInt32) -> None:
        """Write the allowed ids into `row` (uint32 [num_words], contiguous); none on a problem."""
        if not self.problem:
            if self._matcher.fill_mask(row):
                return
            self.problem = one_line(self._matcher.error)
        row[:] = 0

    def forced(self) -> list[int]:
        """The tokens that the grammar forces from here on, in order; often none. Never EOS."""
        if self.problem or self._matcher.is_stopped:
            return []
        forced = self._matcher.forced(MAX_FORCED_TOKENS + 1)
        if not forced:
            self.problem = one_line(self._matcher.error)
        return forced


class _Growth:
    """The nodes of a constrained tree as they are found, depth first: token, parent, survival,
    source, and the drafter's mark, -1 for what is forced."""

    def __init__(self, source: int, forced: Sequence[int]) -> None:
        self.nodes: list[tuple[int, int, float, int, int]] = []
        self.depths: list[int] = []
        for token in forced:
            self.add(token, len(self.nodes) - 1, 1.0, source)

    def add(self, token: int, parent: int, survival: float, source: int, cell: int = -1) -> int:
        self.nodes.append((token, parent, survival, source, cell))
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        return len(self.nodes) - 1

    def tree(self) -> DraftTree:
        types = (np.int32, np.int32, np.float32, np.uint8, np.int32)
        columns = zip(*self.nodes, strict=True)
        return DraftTree(*map(np.asarray, columns, types))


def constrain(
    state: GrammarState,
    forced: Sequence[int],
    proposed: Trees | None,
    *,
    max_nodes: int,
    max_depth: int,
    source: int,
) -> tuple[DraftTree | None, int]:
    """The part of a proposal that the grammar allows, with the tokens that it forces added.

    state: at the root; it is moved and put back. forced: what state.forced() returned at the root,
    cut to max_nodes and max_depth; it comes first, and how much of it there is comes back beside
    the tree: that is always accepted. proposed: the one tree that the session proposes after it, or
    None. source: FORCED's index in the sequence's sources. A node is kept when the mask at its
    parent allows its token, so no node is verified that could not be drawn. Where a drafted path
    ends or leaves the forced tokens, these continue it, with the path's own chance. Of more than
    max_nodes the likeliest stay. None when nothing is left.
    """
    growth = _Growth(source, forced)
    if proposed is None:
        return growth.tree() if forced else None, len(forced)
    root = state.num_consumed
    token_ids, parents, _, sources, cells = proposed.nodes.tolist()
    chances = proposed.survival.tolist()
    children: list[list[int]] = [[] for _ in range(len(token_ids) + 1)]
    for node, parent in enumerate(parents):
        children[parent].append(node)
    row = np.empty(state.num_words, np.uint32)
    for token in forced:
        state.consume(token)
    base = len(forced)
    # (node of the proposal, node grown for its parent)
    stack: list[tuple[int, int]] = []

    def visit(node: int, grown: int) -> None:
        """The state is at `grown`: add what is forced there, push the allowed children."""
        depth = 0 if grown < 0 else growth.depths[grown]
        if depth >= max_depth or state.problem:
            return
        ahead = state.forced() if node >= 0 else []
        if ahead:
            match = [c for c in children[node] if token_ids[c] == ahead[0]]
            if match:
                stack.append((match[0], grown))
                return
            chance, at = growth.nodes[grown][2], grown
            for token in ahead[: min(max_depth - depth, max_nodes)]:
                at = growth.add(token, at, chance, source)
            return
        if children[node]:
            state.fill_mask(row)
            for child in reversed(children[node]):
                token = token_ids[child]
                if (int(row[token >> 5]) >> (token & 31)) & 1:
                    stack.append((child, grown))

    visit(-1, base - 1)
    while stack:
        node, parent = stack.pop()
        depth = base if parent < 0 else growth.depths[parent]
        state.rollback(root + depth)
        if not state.consume(token_ids[node]):
            continue
        grown = growth.add(token_ids[node], parent, chances[node], sources[node], cells[node])
        visit(node, grown)
    state.rollback(root)
    if not growth.nodes:
        return None, 0
    return growth.tree().prune(max_nodes), min(len(forced), max_nodes)


def fill_masks(state: GrammarState, nodes: Int32x2) -> UInt32:
    """The masks of a root and of a tree's nodes below it: uint32 [1 + num_nodes, num_words].

    state: at the root; it is moved and put back. nodes: of Trees, the item's own.
    """
    num = nodes.shape[1]
    masks = np.zeros((1 + num, state.num_words), np.uint32)
    state.fill_mask(masks[0])
    if state.problem:
        # What the matcher stored for drafts counts against its limits: try again without it.
        state.rebuild()
        state.fill_mask(masks[0])
    if not num or state.problem:
        return masks
    token_ids, parents, depths, *_ = nodes.tolist()
    root = state.num_consumed
    children: list[list[int]] = [[] for _ in range(num + 1)]
    for node, parent in enumerate(parents):
        children[parent].append(node)
    stack = children[-1][::-1]
    while stack:
        node = stack.pop()
        state.rollback(root + depths[node] - 1)
        if state.consume(token_ids[node]):  # else it is never reached: its mask stays empty
            state.fill_mask(masks[1 + node])
            stack.extend(reversed(children[node]))
    state.rollback(root)
    return masks
