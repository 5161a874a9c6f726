"""Forms of outputs, and what is drafted from them."""

from __future__ import annotations

import numpy as np

from drafters.auto.copying import Pieces
from drafters.auto.drafter import AutoDrafter
from drafters.auto.retrieval import Seen
from drafters.auto.template import SPAN, forms_of, write_form
from drafters.corpus_file import START
from tests.drafters.trees import pieces_of

OPEN, CLOSE, COMMA, NEXT, EOS = 1, 2, 3, 4, 5
DIGIT = 6  # "9."


def _pieces() -> Pieces:
    words = (b"w%c%c" % (97 + i // 26, 97 + i % 26) for i in range(200))
    return pieces_of([b"\0", b"{", b"}", b",", b"n", b"\n", b"9.", *words])


def _output(*own: int) -> np.ndarray:
    return np.array([OPEN, *own, CLOSE, NEXT, own[0] + 50, COMMA, EOS], np.int32)


def test_what_outputs_share_is_itself_and_the_rest_is_one_span_a_run() -> None:
    outputs = [_output(100, 110, DIGIT), _output(101, 110, 101), _output(104, DIGIT, DIGIT)]
    text, table, marks, size = forms_of(outputs, (0.5, 0.25, 1.0), _pieces())
    ends = [CLOSE, NEXT, SPAN, COMMA, EOS]
    form = [START, OPEN, SPAN, 110, SPAN, *ends]
    assert text[0, :size].tolist() == [*form, *form, START, OPEN, SPAN, *ends]
    assert marks[0].tolist() == 10 * [0.5] + 10 * [0.25] + 8 * [1.0]
    # Of a text, newest first: a numeral is no part of the template though two outputs hold it.
    written = np.zeros(16, np.int32)
    path = np.array([CLOSE, DIGIT, 140, 110, 141, OPEN], np.int32)
    with np.errstate(over="ignore"):  # hashes
        num, behind = write_form(path, path.shape[0], table, written)
    assert written[:num].tolist() == [CLOSE, SPAN, 110, SPAN, OPEN] and behind == 1


def test_a_form_is_no_longer_than_its_room() -> None:
    _, table, _, _ = forms_of([_output(100), _output(101)], (1.0, 1.0), None)
    written = np.zeros(16, np.int32)
    path = np.tile(np.array([OPEN, CLOSE], np.int32), 40)
    with np.errstate(over="ignore"):
        assert write_form(path, path.shape[0], table, written) == (16, 16)


def test_behind_a_value_that_no_output_holds_the_field_ends_as_it_did_in_others() -> None:
    pieces, seen = _pieces(), Seen()
    for first in (100, 110, 120, 130):
        seen.add(_output(first, first + 1))
    drafter = AutoDrafter(eos_token_ids=(EOS,), seen=seen, pieces=pieces)

    def sources(emitted: list[int]) -> dict[int, str]:
        session = drafter.open([0])
        session.settle_once()
        session.extend(emitted)
        tree = session.propose(16, 4)
        roots = [node for node in range(len(tree)) if tree.parents[node] == -1]
        found = {int(tree.token_ids[n]): drafter.sources[tree.source[n]] for n in roots}
        session.close()
        return found

    assert sources([OPEN, 140])[CLOSE] == "template"
    # Which field comes next is known from the form too: CLOSE alone might be anything.
    assert sources([OPEN, 140, CLOSE])[NEXT] == "template"
    # Nothing shared, no forms.
    seen.add(_output(100))
    alone = AutoDrafter(eos_token_ids=(EOS,), pieces=pieces).open([0])
    alone.settle_once()
    alone.extend([OPEN, 140])
    assert CLOSE not in alone.propose(16, 4).token_ids.tolist()
