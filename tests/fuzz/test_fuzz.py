"""No hostile input ends a process, raises anything raw, takes long or much memory (harness.py).

`make nightly` draws CASES over all readers, every other run a thirtieth of them.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.fuzz.harness import Reader, case, run
from tests.fuzz.readers import READERS
from tests.profiles import share

CASES = 20_000
SEED = 7
_MOST_BYTES = 3 << 30  # of resident memory


@pytest.mark.parametrize("name", READERS)
def test_a_reader_takes_or_refuses_whatever_comes(name: str, tmp_path: Path) -> None:
    num = -(-CASES // len(READERS))
    num = num if share() == 1.0 else num // 30
    tally = run(READERS[name], num=num, seed=SEED, folder=tmp_path)
    assert not tally.failures, tally.told()
    assert tally.num_taken + tally.num_refused == tally.num, tally.told()
    assert tally.num_refused, "nothing hostile was drawn"
    assert tally.most_bytes < _MOST_BYTES, tally.told()


def _act(data: bytes, folder: Path) -> None:
    """Does what its input says."""
    if data == b"crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif data == b"hang":
        time.sleep(30.0)
    elif data == b"raw":
        raise KeyError("r")
    elif data == b"refuse":
        raise ValueError("it is not right")
    elif data == b"grow":
        bytearray(8 << 30)


def test_the_harness_counts_what_ends_a_process_and_goes_on(tmp_path: Path) -> None:
    inputs = [b"take", b"crash", b"refuse", b"hang", b"raw", b"grow", b"take"]
    acting = Reader(
        "acting", lambda: [b""], lambda chance, _: chance.choice(inputs), _act, (ValueError,), 1.0
    )
    tally = run(acting, num=20, seed=2, folder=tmp_path)
    drawn = [case(acting, 2, i) for i in range(20)]
    assert tally.num_taken == drawn.count(b"take")
    assert tally.num_refused == drawn.count(b"refuse")
    failed = {i for i, _ in tally.failures}
    assert failed == {
        i for i, data in enumerate(drawn) if data in (b"crash", b"hang", b"raw", b"grow")
    }
    told = tally.told()
    for what in ("status -11", "no answer", "KeyError: \"'r'\"", "MemoryError"):
        assert what in told, told
