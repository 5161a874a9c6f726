"""Prior: a small recurrent head on a model's own last hidden state, trained once a model.

The state that an id was drawn from, and the id, give a state of WIDTH numbers, which says how
likely some thousand frequent ids come next; it goes on by its own words behind each further id
(Medusa, arXiv 2401.10774; Hydra, arXiv 2402.05109; here one head for all depths, over the model's
frequent ids alone). Every other source of `auto` reads text. This one knows what is free to choose.

With h the state and x the id that was drawn from it, softsign(v) = v / (1 + |v|):

    s_1 = softsign(project h + bias_1 + embed[x])
    s_k+1 = softsign(recur s_k + bias_2 + embed[the next id])
    logits = output s + bias_3, over `ids`, the last of which, -1, stands for all others

A node costs the product of `output`. All matrices are integers of 8 bits, which together lie in a
core's cache; the model's step before has pushed them out of it, so that the first product of a
draft takes as long as they take from memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt

from drafters.array_file import ArrayFileError, ArrayFormat, Column
from drafters.arrays import Float32, Float32x2, Int32, Int32x2, Int64
from drafters.jit import inlined

WIDTH = 192
"""Numbers of a state: a constant of the compiled product."""
LANES = 16  # outputs come in such groups
MOST_FOLLOWED = 4
"""Ids behind the model's state that are followed."""
MOST_NODES = 128  # of a tree that it says something of
LEAST_CHANCE = 0.01  # of what is proposed
_KEPT = 32
"""States whose scores are kept: a step's tokens are learned from behind the states that it was
drafted from, and a task's two trees (with its corpus, without) begin alike."""
_LARGEST = 1e4  # of a number in a file: products of a few hundred such are finite
_STATE_BITS = 12
"""Of the model's state, beside the sign: some of its numbers are a hundred times the others."""
_UNIT = np.float32(1.0 / 127.0)  # of a state's integers
_INTEGERS = ("project", "embed", "recur", "output")

Int8 = npt.NDArray[np.int8]
Int8x2 = Annotated[Int8, 2]
Int16 = npt.NDArray[np.int16]

FORMAT = ArrayFormat(
    "prior of a model",
    3,
    {
        "ids": Column("int32", ("outputs",), low=-1, high="vocabulary"),
        "project": Column("uint8", (WIDTH, "hidden")),
        "project_scale": Column("float32", (WIDTH,)),
        "project_bias": Column("float32", (WIDTH,)),
        "embed": Column("uint8", ("vocabulary", WIDTH)),
        "embed_scale": Column("float32", ("vocabulary",)),
        "recur": Column("uint8", (WIDTH, WIDTH)),
        "recur_scale": Column("float32", (WIDTH,)),
        "recur_bias": Column("float32", (WIDTH,)),
        "output": Column("uint8", ("outputs", WIDTH)),
        "output_scale": Column("float32", ("outputs",)),
        "output_bias": Column("float32", ("outputs",)),
    },
)


class Prior(NamedTuple):
    """The head of one model. Immutable; shared by all that draft for the model.

    ids: int32 [outputs], what each output is of; -1: any other id, or a pad. embed: int8
    [vocabulary, WIDTH], each row times its embed_scale. The rows of project, int8 [WIDTH, hidden
    size], of recur, int8 [WIDTH, WIDTH], and of output, int8 [outputs, WIDTH], the same; a state is
    127 at most before the last two.
    """

    ids: Int32
    project: Int8x2
    project_scale: Float32
    project_bias: Float32
    embed: Int8x2
    embed_scale: Float32
    recur: Int8x2
    recur_scale: Float32
    recur_bias: Float32
    output: Int8x2
    output_scale: Float32
    output_bias: Float32

    @property
    def hidden_size(self) -> int:
        return int(self.project.shape[1])

    def save(self, path: Path | str, *, fingerprint: str) -> None:
        """Write atomically. fingerprint: of the model, without the types of its weights."""
        arrays = self._asdict()
        for name in _INTEGERS:
            arrays[name] = arrays[name].view(np.uint8)
        FORMAT.write(path, arrays, fingerprint=fingerprint)

    @classmethod
    def load(cls, path: Path | str, *, fingerprint: str | None) -> Prior:
        """Map what save() wrote. Raises as ArrayFormat.read does."""
        arrays = FORMAT.read(path, fingerprint=fingerprint).arrays
        for name, array in arrays.items():
            if array.dtype == np.float32 and array.size and np.abs(array).max() > _LARGEST:
                raise ArrayFileError(f"{path} is damaged: {name} has values that cannot be")
        if arrays["ids"].shape[0] % LANES:
            raise ArrayFileError(f"{path} is damaged, or of a model of another size")
        for name in _INTEGERS:
            arrays[name] = arrays[name].view(np.int8)
        return cls(**arrays)


class PriorView(NamedTuple):
    """A Prior, and where a text stands.

    hidden: float32 [hidden size], a row of the model, or [0]: there is none. at: index of the token
    that was drawn from it. start: float32 [WIDTH], the state behind that token, once it was asked
    for. most: ids behind it that are followed. states: float32 [nodes + 1, WIDTH], scratch: behind
    the text, then behind each node; NaN where it is not known, as in start. sums: float32 [WIDTH],
    numbers: int16 [the larger of WIDTH and the hidden size], scratch.

    What was scored last, of all sessions: scored: float32 [_KEPT, WIDTH], states. scores: float32
    [_KEPT, outputs] and totals: float32 [_KEPT], what `score` says of each. owners: int64 [_KEPT],
    whose each is; owner: who asks, and finds none but its own. turn: int32 [1], which is forgotten
    next.
    """

    head: Prior
    hidden: Float32
    at: int
    start: Float32
    most: int
    states: Float32x2
    sums: Float32
    numbers: Int16
    scored: Float32x2
    scores: Float32x2
    totals: Float32
    owners: Int64
    turn: Int32
    owner: int


def integers_of(rows: Float32) -> tuple[Int8, Float32]:
    """Rows as int8, and what each is multiplied by."""
    scale = np.maximum(np.abs(rows).max(axis=1), 1e-6).astype(np.float32) / np.float32(127)
    return np.rint(rows / scale[:, None]).astype(np.int8, order="C"), scale


NO_HIDDEN: Float32 = np.empty(0, np.float32)
"""The state of a text of which none is known."""
_NO_ROWS, _NO_BYTES = np.empty((0, WIDTH), np.float32), np.empty((0, WIDTH), np.int8)
_NO_MATRIX = _NO_BYTES, NO_HIDDEN, NO_HIDDEN
_NO_HEAD = Prior(np.empty(0, np.int32), *_NO_MATRIX, _NO_BYTES, NO_HIDDEN, *_NO_MATRIX, *_NO_MATRIX)
NO_PRIOR = PriorView(
    _NO_HEAD, NO_HIDDEN, 0, NO_HIDDEN, 0, _NO_ROWS, NO_HIDDEN, np.empty(0, np.int16),
    _NO_ROWS, _NO_ROWS, NO_HIDDEN, np.empty(0, np.int64), np.empty(0, np.int32), 0,
)  # fmt: skip


class PriorScratch:
    """The scratch of all that one thread drafts for with a Prior: half a megabyte, which would have
    to be fetched anew for each.

    prior: what it is of. Nobody finds what another has had scored: how long that takes would tell.
    """

    def __init__(self, prior: Prior) -> None:
        self.prior = prior
        self._num_owners = 0
        self._scratch = (
            np.zeros((MOST_NODES + 1, WIDTH), np.float32),
            np.zeros(WIDTH, np.float32),
            np.zeros(max(WIDTH, prior.hidden_size), np.int16),
            np.zeros((_KEPT, WIDTH), np.float32),
            np.empty((_KEPT, prior.ids.shape[0]), np.float32),
            np.empty(_KEPT, np.float32),
            np.zeros(_KEPT, np.int64),
            np.zeros(1, np.int32),
        )

    def new_owner(self) -> int:
        """A number for one scope's drafter."""
        self._num_owners += 1
        return self._num_owners

    def view(self, whose: tuple[int, int], hidden: Float32, at: int, start: Float32) -> PriorView:
        """See PriorView; a plain tuple of the same items. whose: the owner, and the most ids that
        its states are followed by."""
        given = self.prior, hidden, at, start, whose[1]
        return (*given, *self._scratch, whose[0])  # type: ignore[return-value]


@inlined
def _settle(sums: Float32, states: Float32x2, row: int) -> None:
    """states[row] = softsign of the sums."""
    for i in range(WIDTH):
        value = sums[i]
        if not value > np.float32(-1e4):  # NaN, too
            value = np.float32(-1e4)
        value = min(value, np.float32(1e4))
        states[row, i] = value / (np.float32(1.0) + abs(value))


@inlined
def _multiply(
    matrix: Int8x2, width: int, scale: Float32, unit: np.float32, bias: Float32, numbers: Int16,
    out: Float32,
) -> None:  # fmt: skip
    """out = bias + matrix @ numbers, each row times its scale and the unit of the numbers. width:
    of the matrix, a constant where it is known: the loop is faster then by a third."""
    for row in range(matrix.shape[0]):
        total = np.int32(0)
        for i in range(width):
            total += np.int32(numbers[i]) * np.int32(matrix[row, i])
        # A sum of int32 is one of int64 to the compiler, unless only 32 bits of it are asked for.
        out[row] = np.float32(np.int32(total)) * (scale[row] * unit) + bias[row]


@inlined
def _write_numbers(prior: PriorView, row: int) -> None:
    """The state of a row in integers."""
    for i in range(WIDTH):
        prior.numbers[i] = np.int16(np.rint(prior.states[row, i] * np.float32(127.0)))


@inlined
def _add_id(prior: PriorView, token: int) -> None:
    scale = prior.head.embed_scale[token]
    for i in range(WIDTH):
        prior.sums[i] += scale * np.float32(prior.head.embed[token, i])


@inlined
def _is_known(states: Float32x2, row: int) -> bool:
    return bool(states[row, 0] > np.float32(-2.0))  # not NaN


@inlined
def go_on(prior: PriorView, parent: int, token: int, row: int, followed: int) -> int:
    """states[row] = the state behind that of `parent` and a token. followed: ids behind the model's
    state at the parent. Returns them for the row, -1 where nothing is known."""
    states = prior.states
    if row >= states.shape[0]:
        return -1
    known = 0 <= followed < prior.most and parent < states.shape[0] and _is_known(states, parent)
    if not known or not 0 <= token < prior.head.embed.shape[0]:
        states[row, 0] = np.nan
        return -1
    head = prior.head
    _write_numbers(prior, parent)
    _multiply(
        head.recur, WIDTH, head.recur_scale, _UNIT, head.recur_bias, prior.numbers, prior.sums
    )
    _add_id(prior, token)
    _settle(prior.sums, states, row)
    return followed + 1


@inlined
def begin(prior: PriorView, text: Int32x2, size: int) -> int:
    """states[0] = the state behind text[0, :size]; returns how many ids lie behind the model's own
    state, -1 where nothing is known."""
    at = prior.at
    if prior.hidden.shape[0] == 0 or not 0 <= size - 1 - at <= prior.most:
        return -1
    token = text[0, at]
    if not 0 <= token < prior.head.embed.shape[0]:
        return -1
    states, start = prior.states, prior.start
    if np.isnan(start[0]):
        head, num, largest = prior.head, prior.hidden.shape[0], np.float32(1e-6)
        for j in range(num):
            value = abs(prior.hidden[j])
            largest = value if value > largest else largest
        # A sum of so many products is an int32.
        most = np.float32(min(1 << _STATE_BITS, (1 << 24) // max(num, 1)) - 1)
        unit = largest / most
        for j in range(num):
            value = prior.hidden[j] / unit
            if not value > -most:  # NaN, too
                value = -most
            prior.numbers[j] = np.int16(np.rint(min(value, most)))
        _multiply(
            head.project, num, head.project_scale, unit, head.project_bias, prior.numbers,
            prior.sums,
        )  # fmt: skip
        _add_id(prior, token)
        _settle(prior.sums, states, 0)
        for i in range(WIDTH):
            start[i] = states[0, i]
    else:
        for i in range(WIDTH):
            states[0, i] = start[i]
    followed = 0
    for place in range(at + 1, size):
        followed = go_on(prior, 0, text[0, place], 0, followed)
    return followed


@inlined
def _exp(value: np.float32) -> np.float32:
    """e to the power of a number of at most 0, to 1e-4: a line that compiles to vectors."""
    power = max(value, np.float32(-40.0)) * np.float32(1.44269504)
    whole = np.floor(power)
    part = power - whole
    bits = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23))
    curve = np.float32(0.22449434) + part * np.float32(0.07944016)
    curve = np.float32(1.0) + part * (np.float32(0.69606564) + part * curve)
    power_of_2: np.float32 = bits.view(np.float32) * curve
    return power_of_2


@inlined
def _place_of(prior: PriorView, row: int) -> int:
    """Which of the states that were scored last is states[row]; -1: none."""
    for place in range(prior.scored.shape[0]):
        same = 0 if prior.owners[place] == prior.owner else WIDTH + 1
        while same < WIDTH and prior.scored[place, same] == prior.states[row, same]:
            same += 1
        if same == WIDTH:
            return place
    return -1


@inlined
def score(prior: PriorView, row: int) -> int:
    """Which of prior.scores is what states[row] says of each output: e^(logit - the highest), the
    chance of it but for the sum of all, in prior.totals."""
    known = _place_of(prior, row)
    if known >= 0:
        return known
    place = prior.turn[0]
    prior.turn[0], prior.owners[place] = (place + 1) % prior.totals.shape[0], prior.owner
    head, scores, sums = prior.head, prior.scores, prior.sums
    num = head.output.shape[0]
    for i in range(WIDTH):
        prior.scored[place, i] = prior.states[row, i]
    _write_numbers(prior, row)
    _multiply(
        head.output, WIDTH, head.output_scale, _UNIT, head.output_bias, prior.numbers,
        scores[place],
    )  # fmt: skip
    # A loop for each: one that keeps its numbers and adds them up is not compiled to vectors.
    for i in range(LANES):
        sums[i] = scores[place, i]
    for f in range(0, num, LANES):
        for i in range(LANES):
            value = scores[place, f + i]
            sums[i] = value if value > sums[i] else sums[i]
    highest = sums[0]
    for i in range(LANES):
        highest = max(highest, sums[i])
    for f in range(num):
        scores[place, f] = _exp(scores[place, f] - highest)
    for i in range(LANES):
        sums[i] = 0.0
    for f in range(0, num, LANES):
        for i in range(LANES):
            sums[i] += scores[place, f + i]
    prior.totals[place] = 0.0
    for i in range(LANES):
        prior.totals[place] += sums[i]
    return int(place)
