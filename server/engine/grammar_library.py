"""llguidance through its C interface (llguidance.h): a tokenizer, and matchers over it.

What: LibraryTokenizer and Matcher, with what grammar.py asks of them. What
not: which tokens a tokenizer has (grammar_tokenizer.py).

llguidance's Python classes hold the interpreter lock while they build a tokenizer, 0.1 to 1.2 s in
which every stream would stand still. A call through ctypes holds it in no call, so a tokenizer is
built when the first grammar comes, beside the steps. The C functions are in the shared object that
`import llguidance` loads, and do the same: tests compare both, mask by mask.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from server.grammar_text import GRAMMAR_LIMITS

if TYPE_CHECKING:
    import numpy.typing as npt

_log = logging.getLogger(__name__)

_pointer, _text = ctypes.c_void_p, ctypes.c_char_p
_Tokenize = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
)
_FEW = 64
"""Forced tokens that are asked for first. There are seldom more."""


class _TokenizerInit(ctypes.Structure):
    """LlgTokenizerInitV2: it begins with its own size, so later versions know what is there."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", _pointer),
        ("token_bytes", _pointer),
        ("tokenizer_json", _text),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", _Tokenize),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", _pointer),
        ("slices", ctypes.POINTER(_text)),
        ("tok_eos_extra", _pointer),
        ("tok_eos_extra_count", ctypes.c_uint32),
    )


class _ConstraintInit(ctypes.Structure):
    """LlgConstraintInit with its ParserLimits, and room for what later versions add."""

    _fields_ = (
        ("tokenizer", _pointer),
        ("log_buffer_level", ctypes.c_uint32),
        ("log_stderr_level", ctypes.c_uint32),
        ("ff_tokens_ok", ctypes.c_bool),
        ("backtrack_ok", ctypes.c_bool),
        ("max_items_in_row", ctypes.c_size_t),
        ("initial_lexer_fuel", ctypes.c_uint64),
        ("step_lexer_fuel", ctypes.c_uint64),
        ("step_max_items", ctypes.c_size_t),
        ("max_lexer_states", ctypes.c_size_t),
        ("max_grammar_size", ctypes.c_size_t),
        ("precompute_large_lexemes", ctypes.c_bool),
        ("verbose_errors", ctypes.c_bool),
        ("more", ctypes.c_char * 256),
    )


_LIMITS = tuple(name for name, _ in _ConstraintInit._fields_[5:-1])
"""Those of ParserLimits."""
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "new_tokenizer_v2": (_pointer, (_pointer, _pointer, ctypes.c_size_t)),
    "free_tokenizer": (None, (_pointer,)),
    "constraint_init_set_defaults": (None, (_pointer, _pointer)),
    "new_matcher": (_pointer, (_pointer, _text, _text)),
    "clone_matcher": (_pointer, (_pointer,)),
    "free_matcher": (None, (_pointer,)),
    "matcher_get_error": (_text, (_pointer,)),
    "matcher_validate_tokens": (ctypes.c_int32, (_pointer, _pointer, ctypes.c_size_t)),
    "matcher_consume_token": (ctypes.c_int32, (_pointer, ctypes.c_uint32)),
    "matcher_rollback": (ctypes.c_int32, (_pointer, ctypes.c_size_t)),
    "matcher_compute_mask_into": (ctypes.c_int32, (_pointer, _pointer, ctypes.c_size_t)),
    "matcher_compute_ff_tokens": (ctypes.c_int32, (_pointer, _pointer, ctypes.c_size_t)),
    "matcher_is_stopped": (ctypes.c_bool, (_pointer,)),
    "matcher_is_accepting": (ctypes.c_bool, (_pointer,)),
}


class _Library:
    """The C functions, by their names without llg_."""

    def __init__(self) -> None:
        from llguidance import LLParserLimits, _lib

        shared = ctypes.CDLL(_lib.__file__)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(shared, f"llg_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        known, told = LLParserLimits(), self.defaults()
        if any(getattr(told, name) != getattr(known, name) for name in _LIMITS):
            raise RuntimeError("this version of llguidance has another C interface")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def defaults(self) -> _ConstraintInit:
        init = _ConstraintInit()
        self.constraint_init_set_defaults(ctypes.byref(init), None)
        return init


@functools.cache
def _library() -> _Library:
    """Raises AttributeError or RuntimeError where llguidance has no such C interface."""
    return _Library()


class LibraryTokenizer:
    """llguidance's view of the tokens: their tries, and how a forced text is cut.

    lengths: uint32 [vocab_size], bytes of each id; 0: the id is in no mask. blob: uint8, the bytes
    of all ids; a control token's begin with 0xFF. cut: a text's ids, called from any thread.
    slices: sets of tokens, as regular expressions, that are allowed at once where all of a set may
    follow. Raises ValueError for tokens that llguidance refuses.
    """

    def __init__(
        self,
        lengths: npt.NDArray[np.uint32],
        blob: npt.NDArray[np.uint8],
        eos_token_ids: Sequence[int],
        cut: Callable[[str], list[int]],
        slices: Sequence[str],
    ) -> None:
        self._handle = None
        library = self._library = _library()
        self._tokenize = _Tokenize(_tokenizing(cut))  # kept as long as the handle
        more = np.array(eos_token_ids[1:], np.uint32)
        problem = ctypes.create_string_buffer(512)
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit),
            vocab_size=lengths.shape[0],
            tok_eos=eos_token_ids[0],
            token_lens=lengths.ctypes.data,
            token_bytes=blob.ctypes.data,
            tokenize_assumes_string=True,
            tokenize_fn=self._tokenize,
            slices=(_text * (len(slices) + 1))(*(one.encode() for one in slices), None),
            tok_eos_extra=more.ctypes.data if len(more) else None,
            tok_eos_extra_count=len(more),
        )
        self._handle = library.new_tokenizer_v2(ctypes.byref(init), problem, len(problem))
        if not self._handle:
            raise ValueError(problem.value.decode(errors="replace"))
        self.vocab_size = lengths.shape[0]

    def __del__(self) -> None:
        if self._handle:
            self._library.free_tokenizer(self._handle)

    def matcher(self, grammar: str) -> Matcher:
        """A matcher before its first token. grammar: of grammar_text. Without the interpreter lock.
        A grammar that cannot be compiled gives a matcher with an error."""
        library = self._library
        init = library.defaults()
        init.tokenizer, init.log_stderr_level = self._handle, 0
        for name, limit in GRAMMAR_LIMITS.items():
            setattr(init, name, limit)
        handle = library.new_matcher(ctypes.byref(init), b"llguidance", grammar.encode())
        return Matcher(handle, self, library)


def _tokenizing(cut: Callable[[str], list[int]]) -> Callable[[int, int, int, int, int], int]:
    """A LlgTokenizeFn. llguidance asks again when the ids did not fit."""
    ids_of = functools.lru_cache(1)(lambda data: cut(data.decode()))

    def tokenize(_: int, text: int, length: int, out: int, room: int) -> int:
        try:
            ids = ids_of(ctypes.string_at(text, length))
            num = min(len(ids), room)
            ctypes.memmove(out, (ctypes.c_uint32 * num)(*ids[:num]), 4 * num)
            return len(ids)
        except Exception:  # it would be lost in the library; a text without ids is not forced
            _log.exception("a forced text could not be cut")
            return 0

    return tokenize


class Matcher:
    """Where one text stands in its grammar. Its calls give False where the grammar, or a limit,
    does not let them; then `error` may say why, and stays. Used by one thread at a time; copied
    by any."""

    __slots__ = ("_handle", "_library", "_tokenizer", "num_words")

    def __init__(self, handle: int, tokenizer: LibraryTokenizer, library: _Library) -> None:
        self._handle = handle
        self.num_words = (tokenizer.vocab_size + 31) // 32
        self._tokenizer = tokenizer  # lives as long as its matchers
        self._library = library

    def __del__(self) -> None:
        self._library.free_matcher(self._handle)

    def copy(self) -> Matcher:
        return Matcher(self._library.clone_matcher(self._handle), self._tokenizer, self._library)

    @property
    def error(self) -> str:
        """ "" or what has failed for good."""
        found: bytes | None = self._library.matcher_get_error(self._handle)
        return "" if found is None else found.decode(errors="replace")

    @property
    def is_stopped(self) -> bool:
        """Whether no token but EOS can follow, or something has failed."""
        return bool(self._library.matcher_is_stopped(self._handle))

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        return bool(self._library.matcher_is_accepting(self._handle))

    def consume(self, token_id: int) -> bool:
        """Go on by a token. One that the grammar does not allow changes nothing."""
        token = ctypes.c_uint32(token_id)
        library, handle = self._library, self._handle
        if library.matcher_validate_tokens(handle, ctypes.byref(token), 1) != 1:
            return False
        return bool(library.matcher_consume_token(handle, token_id) == 0)

    def rollback(self, num_tokens: int) -> bool:
        return bool(self._library.matcher_rollback(self._handle, num_tokens) == 0)

    def fill_mask(self, row: npt.NDArray[np.uint32]) -> bool:
        """Write the allowed ids into uint32 [num_words], contiguous."""
        code = self._library.matcher_compute_mask_into(self._handle, row.ctypes.data, row.nbytes)
        return bool(code == 0)

    def forced(self, most: int) -> list[int]:
        """The tokens that must follow, in order, at most `most`; never EOS."""
        num = min(_FEW, most)
        while True:
            ids = (ctypes.c_uint32 * num)()
            found = self._library.matcher_compute_ff_tokens(self._handle, ids, num)
            if found < num or num == most:
                return ids[: max(found, 0)]
            num = most
