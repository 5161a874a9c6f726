"""FakeRunner: a Runner in numpy whose draws depend on exactly the KV that each row reads.

The fake KV of a slot is one uint64: a hash of the row's token, its position and the KV of every
slot the row attends to, read through block tables and tree paths. Logits come from that hash. So
a stale slot, a block published too early, a missing copy or a wrong move changes what is drawn,
and a test that compares with `FakeModel.hashes` sees it. Never-written slots hold poison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from server.engine.batch import Batch, Drawn, Float32, HeadSlice, Int32, Likely
from server.types import ModelInfo
from tests.fakes.reference_sampler import draw, token_logprob

UInt64 = npt.NDArray[np.uint64]
_U64 = (1 << 64) - 1
_MAX_LEN = 1 << 14
_WEIGHTS: UInt64 = np.random.default_rng(7).integers(0, 1 << 63, _MAX_LEN, np.uint64) * np.uint64(
    2
) + np.uint64(1)
_29, _40, _FACTOR = np.uint64(29), np.uint64(40), np.uint64(0xBF58476D1CE4E5B9)


def _mix(z: int) -> int:
    z &= _U64
    z = ((z ^ (z >> 33)) * 0xFF51AFD7ED558CCD) & _U64
    z = ((z ^ (z >> 33)) * 0xC4CEB9FE1A85EC53) & _U64
    return z ^ (z >> 33)


class FakeModel:
    """A "language model": the next-token logits are a hash of all tokens so far.

    alphabet: when above 0, ids [0, alphabet) are `boost` logits likelier, so that guesses from a
    small alphabet are often right. context: when above 0 the favourite next id depends on the last
    `context` tokens alone, so that texts repeat themselves and n-gram drafters find something.
    """

    def __init__(
        self,
        vocab_size: int = 16,
        *,
        seed: int = 0,
        alphabet: int = 0,
        boost: float = 6.0,
        context: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self.alphabet = alphabet
        self.boost = boost
        self.context = context
        self._ids = np.arange(vocab_size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

    def row_hash(self, token: int, position: int, attended: UInt64) -> int:
        """The KV of a row: attended = uint64 hashes of the slots before its own, in order."""
        digest = int(attended @ _WEIGHTS[: attended.shape[0]])
        return _mix(_mix(digest ^ (self.seed * 0x9E37)) + token * 0x2545F4914F6CDD1D + position)

    def hashes(self, tokens: Sequence[int]) -> UInt64:
        """The KV of every position of a plain text: what a correct engine must reproduce."""
        kv = np.empty(len(tokens), np.uint64)
        for p, token in enumerate(tokens):
            kv[p] = self.row_hash(token, p, kv[:p])
        return kv

    def logits(self, row_hash: int, recent: Sequence[int] = ()) -> Float32:
        """float32 [V] raw logits of a row, to read: the loop, the engine and its drafters ask for
        the same ones."""
        return self._logits(row_hash, tuple(recent[-self.context :]) if self.context else ())

    @lru_cache(300)  # noqa: B019
    def _logits(self, row_hash: int, recent: tuple[int, ...]) -> Float32:
        bits = self._ids ^ np.uint64(row_hash)
        bits = (bits ^ (bits >> _29)) * _FACTOR
        out: Float32 = ((bits >> _40).astype(np.float32) / np.float32(1 << 24)) * 6 - 3
        if self.alphabet:
            out[: self.alphabet] += np.float32(self.boost)
        if self.context:
            h = self.seed
            for token in recent:
                h = _mix(h * 31 + token + 1)
            out[h % self.vocab_size] += np.float32(self.boost)
        out.flags.writeable = False
        return out


def fake_info(
    *,
    vocab_size: int = 16,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 128,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    eos_token_ids: tuple[int, ...] = (1,),
    device: str = "cpu",
) -> ModelInfo:
    """A ModelInfo for a FakeRunner."""
    return ModelInfo(
        name="fake",
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        num_blocks=num_blocks,
        block_size=block_size,
        device=device,
        dtype="float32",
        fingerprint="fake",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


@dataclass(frozen=True)
class FakeAdapter:
    """An adapter of a FakeRunner: a model of its own."""

    model: FakeModel
    num_bytes: int = 1

    @property
    def vocab_size(self) -> int:
        """Ids of its own included."""
        return self.model.vocab_size


def state_of_hash(value: int) -> Float32:
    """What a row's state is here, float32 [24]."""
    bits = (value & 0xFFFFFF) >> np.arange(24) & 1
    return (2.0 * bits - 1.0).astype(np.float32)


class FakeRunner:
    """A Runner over a FakeModel. Checks the Batch's invariants as it goes.

    fail: called with each Batch before it runs; raises to simulate a broken device (an
    out-of-memory, say). load_fails: whether head rows cannot be copied, asked at each load.
    row_s, step_s: simulated device seconds a row and a step.
    """

    def __init__(
        self,
        model: FakeModel,
        info: ModelInfo,
        *,
        fail: Callable[[Batch], None] | None = None,
        row_s: float = 0.0,
        step_s: float = 0.0,
    ) -> None:
        self.model = model
        self.info = info
        self.fail = fail
        self.load_fails: Callable[[], bool] = lambda: False
        self.row_s = row_s
        self.step_s = step_s
        self.num_steps = 0
        self.num_rows = 0
        self.closed = False
        size = info.num_blocks * info.block_size
        rng = np.random.default_rng(99)
        self._kv: UInt64 = rng.integers(0, 1 << 63, size, np.uint64)
        self._token_at = np.full(size, -1, np.int64)
        self._launched: Batch | None = None
        self._drawn_from: list[int] = []  # hashes of the last step's draws
        self.head_row_bytes = 4
        self.num_verifies = 0
        self._tables: dict[int, list[int]] = {}
        self._pool: dict[int, int] = {}  # place -> id
        self._kept: dict[int, tuple[int, list[int]]] = {}  # place -> hash, recent tokens
        self.models: dict[str, FakeModel] = {}  # adapters by their folder
        self.pack_waits: Callable[[str], None] = lambda folder: None
        self._adapters: dict[int, FakeModel] = {}

    def check_adapter(self, folder: str) -> bool:
        """Heads are their own."""
        return True

    def pack_adapter(self, folder: str) -> FakeAdapter:
        """A FakeModel of its own."""
        self.pack_waits(folder)
        return FakeAdapter(self.models[folder])

    def hold_adapter(self, place: int, adapter: FakeAdapter) -> None:
        """At a free place."""
        assert self._is_idle and place not in self._adapters
        self._adapters[place] = adapter.model

    def drop_adapter(self, place: int) -> None:
        """Between steps."""
        assert self._is_idle
        self._adapters.pop(place, None)

    @property
    def num_adapters(self) -> int:
        """Adapters in memory."""
        return len(self._adapters)

    def _model(self, batch: Batch, row: int) -> FakeModel:
        """That of a row's adapter."""
        if batch.seq_adapters is None:
            return self.model
        place = int(batch.seq_adapters[batch.seq_ids[row]])
        return self.model if place < 0 else self._adapters[place]

    def load_table(self, table: int, token_ids: Int32) -> None:
        """Make T resident."""
        assert self._is_idle and table not in self._tables
        assert (np.diff(token_ids) > 0).all()
        if self.load_fails():
            raise MemoryError("no room for a table")
        self._tables[table] = token_ids.tolist()

    def drop_table(self, table: int) -> None:
        """Forget T."""
        assert self._is_idle
        self._tables.pop(table, None)

    def load_rows(self, token_ids: Int32, places: Int32) -> None:
        """Dynamic rows."""
        assert self._is_idle
        if self.load_fails():
            raise OSError("the model's file cannot be read")
        self._pool.update(zip(places.tolist(), token_ids.tolist(), strict=True))

    def verify(self, batch: Batch, kept: Int32) -> Drawn:
        """Draw again from kept states."""
        assert self._is_idle
        assert batch.draw_slice is None and batch.draw_keep is None
        if self.fail is not None:
            self.fail(batch)
        self.num_verifies += 1
        states = [self._kept[int(place)] for place in kept]
        return self._draw(batch, [h for h, _ in states], [r for _, r in states])

    def _sliced(self, logits: Float32, slice_: HeadSlice) -> Float32:
        """-inf outside the slice; checks that the slice's rows lie where it says."""
        if slice_.table >= 0:
            table = self._tables[slice_.table]
            assert slice_.num_static == len(table)
            rows = [
                table[c] if c < len(table) else self._pool[c - len(table)]
                for c in slice_.columns.tolist()
            ]
            assert rows == slice_.ids.tolist()
        out: Float32 = np.full_like(logits, -np.inf)
        out[slice_.ids] = logits[slice_.ids]
        return out

    def launch(self, batch: Batch) -> None:
        """Take a step; it runs in wait()."""
        assert self._is_idle, "a step is in flight already"
        assert not self.closed
        assert batch.num_rows <= self.info.max_num_batched_tokens
        assert len(set(batch.slots.tolist())) == batch.num_rows, "two rows write one slot"
        self._launched = batch

    def wait(self) -> Drawn:
        """Run the step."""
        batch, self._launched = self._launched, None
        assert batch is not None, "no step is in flight"
        if self.fail is not None:
            self.fail(batch)
        self.num_steps += 1
        self.num_rows += batch.num_rows
        began = time.perf_counter()
        hashes, recents = self._forward(batch)
        self._drawn_from = [hashes[row] for row in batch.draw_rows.tolist()]
        drawn = self._draw(batch, hashes, recents)
        seconds = self.step_s + self.row_s * batch.num_rows
        left = seconds - (time.perf_counter() - began)
        if left > 0:
            time.sleep(left)
        return drawn

    def last_states(self, draws: Int32 | int) -> Float32:
        """See StateRunner: of each draw's row the bits of its hash."""
        assert self._is_idle
        if isinstance(draws, int):
            return state_of_hash(self._drawn_from[draws])
        return np.stack([state_of_hash(self._drawn_from[draw]) for draw in draws.tolist()])

    @property
    def _is_idle(self) -> bool:
        return self._launched is None

    def move_slots(self, src: Int32, dst: Int32) -> None:
        """Gather, then scatter."""
        assert self._is_idle
        assert len(set(dst.tolist())) == dst.shape[0], "two moves into one slot"
        self._kv[dst] = self._kv[src]
        self._token_at[dst] = self._token_at[src]

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        """Gather, then scatter whole blocks."""
        size = self.info.block_size
        within = np.arange(size)
        self.move_slots(
            (src[:, None] * size + within).ravel(), (dst[:, None] * size + within).ravel()
        )

    def close(self) -> None:
        """Idempotent."""
        self.closed = True

    def _forward(self, batch: Batch) -> tuple[list[int], list[list[int]]]:
        size, context = self.info.block_size, self.model.context
        hashes: list[int] = []
        recents: list[list[int]] = []
        tables = batch.block_tables.astype(np.int64)[:, :, None] * size + np.arange(size)
        for r in range(batch.num_rows):
            token, position = int(batch.token_ids[r]), int(batch.positions[r])
            prefix, slot = int(batch.prefix_len[r]), int(batch.slots[r])
            start, length = int(batch.path_start[r]), int(batch.path_len[r])
            slots = tables[batch.seq_ids[r]].reshape(-1)[:prefix]
            if length:
                assert position == prefix - 1 + length
                slots = np.concatenate([slots, batch.path_slots[start : start + length]])
            else:
                assert prefix == position + 1
            assert slots[-1] == slot, "a row attends to its own slot last"
            value = self._model(batch, r).row_hash(token, position, self._kv[slots[:-1]])
            self._kv[slot] = np.uint64(value)
            self._token_at[slot] = token
            hashes.append(value)
            recents.append(self._token_at[slots[-context:]].tolist() if context else [])
        return hashes, recents

    def _draw(self, batch: Batch, hashes: list[int], recents: list[list[int]]) -> Drawn:
        num, scored = batch.num_draws, batch.score_rows.shape[0]
        ids = np.empty(num, np.int32)
        logprobs = np.full(num, np.nan, np.float32)
        ranks = np.zeros(num, np.int32)
        top: list[tuple[tuple[int, float], ...]] = [()] * num
        failed: list[tuple[int, str]] = []
        shape = (num, batch.num_likely)
        likely = Likely(np.full(shape, -1, np.int32), np.zeros(shape, np.float32))
        for d in range(num):
            row = int(batch.draw_rows[d])
            params = batch.params[int(batch.draw_params[d])]
            path: list[int] = []
            at = d
            while batch.draw_parent[at] >= 0:
                path.append(int(batch.token_ids[batch.draw_rows[at]]))
                at = int(batch.draw_parent[at])
            path.reverse()
            logits = self._model(batch, row).logits(hashes[row], recents[row])
            position = int(batch.draw_positions[d])
            assert position == int(batch.positions[row]) + 1
            mask_id = int(batch.draw_mask[d])
            mask = batch.masks[mask_id] if mask_id >= 0 else None
            keep = -1 if batch.draw_keep is None else int(batch.draw_keep[d])
            if keep >= 0:
                self._kept[keep] = hashes[row], recents[row]
            seen = logits
            if batch.draw_slice is not None and batch.draw_slice[d] >= 0:
                seen = self._sliced(logits, batch.slices[int(batch.draw_slice[d])])
            try:
                try:
                    ids[d] = draw(seen, params, position, path, mask)
                except ValueError:
                    if seen is logits:
                        raise
                    seen = logits
                    ids[d] = draw(logits, params, position, path, mask)
            except (ValueError, FloatingPointError) as error:
                ids[d] = -1
                failed.append((d, str(error)))
                continue
            _fill_likely(likely, d, seen)
            if params.sampling.num_logprobs is not None and keep < 0:
                asked = params.sampling
                lp = token_logprob(
                    seen, int(ids[d]), asked.num_logprobs or 0, asked.logprob_token_ids
                )
                logprobs[d], ranks[d], top[d] = lp.logprob, lp.rank, lp.top
        score_logprobs = np.empty(scored, np.float32)
        score_ranks = np.empty(scored, np.int32)
        score_top: list[tuple[tuple[int, float], ...]] = []
        for c in range(scored):
            row = int(batch.score_rows[c])
            logits = self._model(batch, row).logits(hashes[row], recents[row])
            lp = token_logprob(logits, int(batch.score_targets[c]), int(batch.score_top[c]))
            score_logprobs[c], score_ranks[c] = lp.logprob, lp.rank
            score_top.append(lp.top)
        return Drawn(
            ids,
            logprobs,
            ranks,
            top,
            score_logprobs,
            score_ranks,
            score_top,
            likely=likely if batch.num_likely else None,
            problems=dict(failed),
        )


def _fill_likely(likely: Likely, d: int, logits: Float32) -> None:
    """The likeliest ids of draw d."""
    num = min(likely.ids.shape[1], logits.shape[0])
    if num:
        x = logits.astype(np.float64)
        chances = np.exp(x - x.max())
        order = np.argsort(-x, kind="stable")[:num]
        order = order[chances[order] > 0]
        likely.ids[d, : order.shape[0]] = order
        likely.chances[d, : order.shape[0]] = chances[order] / chances.sum()
