"""``tests/field_cases.json``: which tests hold which fault that people met, by its number in the list of faults."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
NUMBERED = re.compile(r"test_case_(\d+)(?:_and_(\d+))?_")
MAIN_JOB = (1, 2, 4, 5, 6, 12, 21, 30, 31, 32, 37, 40, 61, 73, 81, 87, 91, 92, 94, 102, 104, 106, 107, 110, 125, 127)
AROUND_IT = (41, 42, 44, 45, 46, 48, 50, 51, 53, 55, 56, 58, 59, 74, 75, 77, 79, 80, 85, 86, 96, 98, 100, 119, 120,
             121, 123, 124)


def functions() -> Iterator[tuple[str, str]]:
    """``(file, name)`` of every test function below ``tests``."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield path.relative_to(TESTS.parent).as_posix(), node.name


@pytest.fixture(scope="module")
def table() -> dict[str, list[str]]:
    return json.loads((TESTS / "field_cases.json").read_text(encoding="utf-8"))


def test_every_named_test_exists(table) -> None:
    existing = {f"{file}::{name}" for file, name in functions()}
    assert [test for tests in table.values() for test in tests if test not in existing] == []


def test_every_numbered_test_is_in_the_table(table) -> None:
    missing = [f"{number}: {file}::{name}" for file, name in functions() if (match := NUMBERED.match(name))
               for number in match.groups() if number and f"{file}::{name}" not in table.get(str(int(number)), [])]
    assert missing == []


def test_the_cases_of_single_process_training_are_covered(table) -> None:
    """Each by at least one test that goes through the training script."""
    whole = ("tests/unit/test_field_cases_", "tests/parity/test_resume.py", "tests/dist/")
    bare = [number for number in (*MAIN_JOB, *AROUND_IT)
            if not any(test.startswith(whole) for test in table.get(str(number), []))]
    assert bare == []
