"""python -m tests.fuzz [--num N] [--seed S] [READER ...]: the nightly fuzz by hand, with figures.

python -m tests.fuzz --num 20000          # over all readers, as `make nightly`
python -m tests.fuzz --num 1000 gguf      # one reader
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fuzz.harness import run
from tests.fuzz.readers import READERS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("readers", nargs="*", choices=[*READERS, []], help="default: all")
    parser.add_argument("--num", type=int, default=20_000, help="cases over all readers")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    names = options.readers or list(READERS)
    failures = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            num = -(-options.num // len(names))
            tally = run(READERS[name], num=num, seed=options.seed, folder=Path(folder))
        sys.stdout.write(tally.told() + "\n")
        sys.stdout.flush()
        failures += len(tally.failures)
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
