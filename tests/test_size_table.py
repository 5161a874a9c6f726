"""What the table of sizes counts."""

from __future__ import annotations

from tests.size_table import circles, code_lines, column, repetitions


def test_lines_of_code_are_those_with_a_token_and_no_docstring() -> None:
    assert code_lines('"""A\n\nB."""\n\n# why\nx = [\n    1,\n]\n\n\ndef f():\n    """C."""\n') == 4


def test_a_circle_is_counted_once_and_types_alone_make_none() -> None:
    texts = {
        "a/__init__.py": "",
        "a/b.py": "from a.c import f\n",
        "a/c.py": "import a.d\n",
        "a/d.py": "from a import b\n",
        "a/e.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.b import f\n",
    }
    assert circles(texts) == 1
    assert circles(texts | {"a/d.py": "def g():\n    from a import b\n"}) == 0


def test_a_longest_stretch_is_one_repetition() -> None:
    eight = "".join(f"x{i} = {i}\n" for i in range(8))
    spread = "".join(f"x{i} = {i}\n\n# why\n" for i in range(8))
    assert repetitions({"a.py": eight, "b.py": spread + "y = 1\n"}) == 1
    assert repetitions({"a.py": eight, "b.py": eight[: eight.index("x5")]}) == 0
    assert (
        repetitions({"a.py": "from a import (\n    b,\n    c,\n    d,\n    e,\n    f,\n)\n" * 2})
        == 0
    )


def test_a_column_has_the_bounds_of_the_size_test() -> None:
    found = column({"a.py": "x = 1\n" * 501})
    assert (found["files"], found["lines"], found["files over 500 lines"]) == (1, 501, 1)
