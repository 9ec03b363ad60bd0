"""Fixtures of the comparisons with recorded numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest


def _expanded(pattern: str) -> list[str]:
    """``a.#2.b`` stands for ``a.0.b`` and ``a.1.b``."""
    count = re.search(r"#(\d+)", pattern)
    if not count:
        return [pattern]
    return [key for index in range(int(count[1]))
            for key in _expanded(f"{pattern[:count.start()]}{index}{pattern[count.end():]}")]


@pytest.fixture(scope="session")
def manifest(data_dir: Path) -> Callable[[str], dict[str, tuple[int, ...]]]:
    """Keys and shapes of a published file, by its name."""

    def read(name: str) -> dict[str, tuple[int, ...]]:
        keys = json.loads((data_dir / "manifests" / f"{name}.json").read_text())["keys"]
        return {key: tuple(shape) for pattern, shape in keys.items() for key in _expanded(pattern)}

    return read
