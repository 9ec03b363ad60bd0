"""Log lines stand on lines of their own beside a progress bar; import notices of libraries are left out."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest
from tqdm import tqdm

from videox_fun.utils import console


@contextmanager
def logs() -> Iterator[io.StringIO]:
    """Standard error with the run's logging on it; afterwards logging is as before."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.handlers.clear()
    try:
        with redirect_stderr(io.StringIO()) as output:
            console.configure_logging(level=logging.INFO)
            yield output
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        for name in console.NOTICES:
            logging.getLogger(name).filters.clear()


def test_a_line_beside_a_bar_is_a_line() -> None:
    with logs() as output, tqdm(total=2, file=output, ascii=True) as bar:
        bar.update()
        logging.getLogger("videox_fun.test").info("saved %d", 1)
    lines = [line.rpartition("\r")[2] for line in output.getvalue().split("\n")]
    assert [line for line in lines if line.endswith("INFO videox_fun.test: saved 1")]
    assert not [line for line in lines if "it/s" in line and "saved" in line]


@pytest.mark.parametrize("name", console.NOTICES)
def test_only_the_notices_are_left_out(name: str) -> None:
    def passes(text: str) -> bool:
        return bool(logging.getLogger(name).filter(logging.LogRecord(name, logging.WARNING, "", 0, text, (), None)))

    with logs():
        assert not passes(console.NOTICES[name] + " and so on")
        assert passes("something else")


@pytest.mark.parametrize(("terminal", "seconds"), [(True, 0.1), (False, console.BAR_SECONDS)])
def test_a_bar_in_a_file_is_drawn_seldom(monkeypatch: pytest.MonkeyPatch, terminal: bool, seconds: float) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    assert console.bar_interval() == seconds
