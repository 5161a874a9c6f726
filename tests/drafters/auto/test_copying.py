"""Copying by text: found whatever way tokens are cut, and gone on with behind tags and edits."""

from __future__ import annotations

import re

import pytest

from drafters.auto.cells import COPIED, NUM_SOURCES
from drafters.auto.copying import Pieces, bone
from drafters.auto.drafter import AutoDrafter, AutoSession
from drafters.auto.retrieval import Seen
from drafters.replay import Recording, replay
from tests.drafters.trees import opened, pieces_of

TEXT = "Ada Kowalczyk, Moving pictures of distant islands. Harbour Press, 1987."
WORDS = ["Ada", " Ada", " K", "K", "owal", "czyk", "Kow", "alczyk", "Moving", " pictures", " of"]
WORDS += [" distant", " islands", "Harbour", " Harbour", " Press", " Moving", "title", "author"]
WORDS += [" picture", "s", " nearby", " and", "19", "87", "</", ">", "<", " <", " the"]
TOKENS = [*(bytes([i]).decode("latin1") for i in range(256)), *dict.fromkeys(WORDS)]
IDS = {token: i for i, token in enumerate(TOKENS)}
BY_LENGTH = sorted(TOKENS, key=len, reverse=True)


def ids(text: str) -> list[int]:
    """The longest pieces, from the left."""
    found = re.findall("|".join(map(re.escape, BY_LENGTH)), text, re.DOTALL)
    return [IDS[piece] for piece in found]


@pytest.fixture(scope="module")
def pieces() -> Pieces:
    return pieces_of([token.encode("latin1") for token in TOKENS])


def session_behind(pieces: Pieces | None, text: str, prompt: str = TEXT) -> AutoSession:
    """A session whose output so far is `text`."""
    session = opened(AutoDrafter(pieces=pieces), ids(prompt))
    for token in ids(text):
        session.extend([token])
    return session


@pytest.mark.parametrize(
    ("behind", "goes_on"),
    [
        pytest.param("<author>Ada Kow", "alczyk", id="a word that is cut otherwise"),
        pytest.param("ADA KOW", "alczyk", id="another case"),
        pytest.param("<author>Ada Kowalczyk</author> <title>", "Moving", id="a tag"),
        pytest.param("Moving pictures of nearby", " islands", id="a replaced word"),
        pytest.param("Moving pictures of the", " distant", id="a word put in"),
        pytest.param("Moving distant", " islands", id="words left out"),
    ],
)
def test_a_copy_goes_on_behind(pieces: Pieces, behind: str, goes_on: str) -> None:
    roots = session_behind(pieces, behind).propose(16, 8)
    first = [TOKENS[t] for t, p in zip(roots.token_ids, roots.parents, strict=True) if p < 0]
    assert goes_on in first
    assert COPIED in roots.source.tolist()
    alone = session_behind(None, behind).propose(16, 8)
    assert COPIED not in alone.source.tolist()


def test_letters_and_digits_are_compared_in_lower_case() -> None:
    skeleton = bytes(map(bone, range(256)))
    assert skeleton.translate(
        None, b"\0"
    ) == b"0123456789" + 2 * b"abcdefghijklmnopqrstuvwxyz" + bytes(range(128, 256))
    assert [skeleton[ord(char)] for char in "AZaz"] == [97, 122, 97, 122]


def test_what_the_vocabulary_does_not_hold_is_left_out(pieces: Pieces) -> None:
    prompt = [*ids(TEXT), len(TOKENS), len(TOKENS) + 5]
    session = AutoDrafter(pieces=pieces).open(prompt)
    session.extend([len(TOKENS) + 7, *ids("Moving distant")])
    assert TOKENS[session.propose(4, 4).token_ids[0]] == " islands"


def test_a_rollback_and_a_gap_leave_the_place_of_a_fresh_session(pieces: Pieces) -> None:
    text = "<author>Ada Kowalczyk</author> <title>Moving pictures"
    fresh = session_behind(pieces, text)
    back = session_behind(pieces, text[:30])
    mark = back.checkpoint()
    back.extend(ids(" Press, 1987"))
    back.rollback(mark)
    gap = opened(AutoDrafter(pieces=pieces), ids(TEXT))
    gap.catch_up(ids(text))
    back.extend(ids(text)[mark:])
    wanted = fresh.propose(12, 12)
    for other in (back.propose(12, 12), gap.propose(12, 12)):
        assert other.token_ids.tolist() == wanted.token_ids.tolist()


def test_where_copies_go_on_is_learned_for_the_scope(pieces: Pieces) -> None:
    outputs = ["<author>Ada Kowalczyk</author> <title>Moving pictures of distant islands</title>"]
    seen = Seen()
    drafter = AutoDrafter(pieces=pieces, seen=seen)
    first = replay(drafter, [Recording(ids(TEXT), ids(o)) for o in outputs], budget=16)
    assert seen.entered[1, IDS[">"] & 511] > 0
    asked, right = drafter.trust.evidence.reshape(2, NUM_SOURCES, -1)[:, COPIED].sum(axis=1)
    assert asked > right > 0
    plain = replay(AutoDrafter(), [Recording(ids(TEXT), ids(o)) for o in outputs], budget=16)
    assert sum(first.num_steps) < sum(plain.num_steps)
    assert first.by_source["copied"][1] > 0
    seen.entered[:] = 60.0
    replay(drafter, [Recording(ids(TEXT), ids(o)) for o in outputs], budget=16)
    assert (seen.entered[:, IDS[">"] & 511] < 40.0).all(), "what is old counts less"
