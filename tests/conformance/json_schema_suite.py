"""Counts what Tailor takes of the JSON-Schema-Test-Suite.

    python tests/conformance/json_schema_suite.py FOLDER     # its tests/draft7, tests/draft2020-12

For each folder: groups whose schema is taken, invalid values that its grammar accepts (there should
be none) and valid ones that it refuses. The suite is not kept here; jsonschema's source
distribution has it in json/tests. `-v` prints each wrong value.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from llguidance import LLMatcher, LLTokenizer

from server.api.grammars import grammar_of_schema
from server.api.schemas import SchemaRules
from server.errors import TailorError
from server.grammar_text import grammar_problem, grammar_text

BYTES = LLTokenizer("byte")
OPEN = SchemaRules(closes=False)


def grammar_of(schema: Any) -> str | None:
    """The grammar of a schema, None where it is refused."""
    try:
        spec = grammar_of_schema(schema, "schema", OPEN)
    except TailorError:
        return None
    return None if grammar_problem(spec) else grammar_text(spec)


def accepts(grammar: str, value: Any) -> bool:
    """Whether the grammar takes a value as json.dumps writes it."""
    matcher = LLMatcher(BYTES, grammar)
    tokens = BYTES.tokenize_str(json.dumps(value, ensure_ascii=False))
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    matcher.consume_tokens(tokens)
    return bool(matcher.is_accepting())


def counted(folder: Path, *, tells: bool) -> Counter[str]:
    """The counts of one draft."""
    counts: Counter[str] = Counter()
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text()):
            counts["groups"] += 1
            grammar = grammar_of(group["schema"])
            if grammar is None:
                continue
            counts["taken"] += 1
            for test in group["tests"]:
                kind = "valid" if test["valid"] else "invalid"
                counts[kind] += 1
                if accepts(grammar, test["data"]) != test["valid"]:
                    wrong = "valid refused" if test["valid"] else "invalid accepted"
                    counts[wrong] += 1
                    if tells:
                        print(f"{wrong}: {file.name}: {group['description']}: {test['data']!r}")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("-v", action="store_true", dest="tells", help="print each wrong value")
    options = parser.parse_args()
    wrong = 0
    for folder in options.folders:
        counts = counted(folder, tells=options.tells)
        wrong += counts["invalid accepted"]
        print(json.dumps({"draft": folder.name, **counts}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
