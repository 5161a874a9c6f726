"""GrammarCompiler: GrammarSpecs compiled for one tokenizer, off the step loop.

grammar.py uses what is compiled here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from server.grammar_text import grammar_text
from server.machine import release_code
from server.types import NO_SCOPE, GrammarSpec

if TYPE_CHECKING:
    from server.engine.grammar_library import Matcher
    from server.engine.grammar_tokenizer import GrammarTokenizer

_log = logging.getLogger(__name__)

MAX_FORCED_TOKENS = 8192
"""Most tokens that a grammar may force before the first that the model draws."""


class GrammarTemplate:
    """A compiled grammar before its first token; `GrammarState` copies it."""

    __slots__ = ("matcher", "num_words", "vocab_size")

    def __init__(self, matcher: Matcher, vocab_size: int) -> None:
        self.matcher = matcher
        self.vocab_size = vocab_size
        self.num_words = (vocab_size + 31) // 32


class GrammarCompiler:
    """Compiles grammars for one tokenizer in its own threads, and keeps the most recent ones.

    load_tokenizer: called once, in a thread, when the first grammar comes: until then nothing of it
    takes memory. max_kept, max_kept_chars: bounds on the compiled grammars kept, and on the length
    of their sources together (a large schema takes about 50 bytes a character once compiled); the
    least recently used go first. Grammars are kept per scope: a grammar that is already compiled
    would tell one client what another asks. timeout_s: how long a request may wait for its
    grammar; the engine then fails it. The engine's thread calls all methods.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], GrammarTokenizer],
        vocab_size: int,
        *,
        timeout_s: float = 10.0,
        max_kept: int = 64,
        max_kept_chars: int = 1 << 20,
        num_threads: int = 2,
    ) -> None:
        self.timeout_s = timeout_s
        self.vocab_size = vocab_size
        self._load_tokenizer = load_tokenizer
        self._max_kept = max_kept
        self._max_kept_chars = max_kept_chars
        self._num_kept_chars = 0
        self._kept: OrderedDict[tuple[str, GrammarSpec], Future[GrammarTemplate]] = OrderedDict()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._tokenizer: Future[GrammarTokenizer] | None = None

    def compile(self, spec: GrammarSpec, scope: str = NO_SCOPE) -> Future[GrammarTemplate]:
        """A Future of the compiled grammar. It raises ValueError for a grammar that cannot be
        compiled for this tokenizer. scope: whose it is (Request.scope)."""
        key = (scope, spec)
        future = self._kept.get(key)
        if future is not None and not (future.done() and _failed(future)):
            self._kept.move_to_end(key)
            return future
        if self._kept.pop(key, None) is not None:  # one that failed
            self._num_kept_chars -= len(spec.source)
        future = self._threads.submit(self._work, spec, self._loading())
        self._kept[key] = future
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
            if self._tokenizer is None:
                self._tokenizer = self._threads.submit(self._load)
            return self._tokenizer

    def _load(self) -> GrammarTokenizer:
        began = time.monotonic()
        try:
            tokenizer = self._load_tokenizer()
        except Exception as error:
            _log.warning("structured outputs are not available: %s", error)
            raise
        _log.info(
            "the first request with a grammar: its tables for %d ids took %.2f s",
            self.vocab_size,
            time.monotonic() - began,
        )
        return tokenizer

    @property
    def num_kept(self) -> int:
        """Grammars that are kept or under way."""
        return len(self._kept)

    def close(self) -> None:
        """End the threads; compilations under way are not waited for. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _work(self, spec: GrammarSpec, tokenizer: Future[GrammarTokenizer]) -> GrammarTemplate:
        try:
            known = tokenizer.result()
        except Exception as error:
            raise RuntimeError("the grammar library cannot read this model's tokenizer") from error
        try:
            return self._compiled(spec, known)
        finally:  # most of what was read of the libraries' code compiles, and is not in a step
            for library in ("/llguidance/", "/tokenizers/"):
                release_code(library)

    def _compiled(self, spec: GrammarSpec, known: GrammarTokenizer) -> GrammarTemplate:
        matcher = known.library.matcher(grammar_text(known.spelled(spec)))
        template = GrammarTemplate(matcher, self.vocab_size)
        # Copies keep what the first mask computed, so the step loop does not compute it.
        matcher.fill_mask(np.empty(template.num_words, np.uint32))
        if not matcher.error and len(matcher.forced(MAX_FORCED_TOKENS + 1)) > MAX_FORCED_TOKENS:
            # They would be kept, 0.3 KB each, and walked at every step.
            raise ValueError(f"forces more than {MAX_FORCED_TOKENS} tokens at its beginning")
        if matcher.error:
            problem = one_line(matcher.error)
            if problem.startswith("NoExtension"):
                problem = "nothing matches it (a rule that ends in itself alone, for example)"
            raise ValueError(problem)
        return template


def _failed(future: Future[GrammarTemplate]) -> bool:
    return future.cancelled() or future.exception() is not None


def one_line(message: str) -> str:
    """A message of llguidance on one line of printable ASCII."""
    message = " ".join(message.replace("<non-verbose/>", "").split())
    return message.encode("ascii", "backslashreplace").decode()[:200]
