"""Rows that could not be read: said once per run, counted, and bounded.

The record is one byte per annotation row in shared memory, so the main process and all loader workers see the same
rows as bad: each is reported by whoever meets it first. A run stops with the list when every row of a kind is bad,
when ``max_errors`` different rows are bad, or when too many draws in a row hit bad rows.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

logger = logging.getLogger(__name__)

_GOOD, _BAD, _TRANSIENT = 0, 1, 2
_SHOWN = 10
#: Consecutive bad draws after which a run gives up.
MAX_CONSECUTIVE = 1000


class DataError(RuntimeError):
    """Training cannot go on with this data; the text lists rows, files and reasons."""


class BadRows:
    """What is known about unreadable rows, shared between processes."""

    def __init__(self, *, source: str, video_rows: np.ndarray, max_errors: int | None = None) -> None:
        """``video_rows`` says for each row of the annotation file whether it is a video."""
        self.source = source
        self.max_errors = max_errors
        self._video = video_rows
        self._state = torch.zeros(len(video_rows), dtype=torch.uint8).share_memory_()
        self._reasons: dict[int, str] = {}

    def known(self, row: int) -> bool:
        """Whether trying this row again is pointless."""
        return self._state[row].item() == _BAD

    @property
    def count(self) -> int:
        return int((self._state == _BAD).sum())

    def rows(self) -> list[int]:
        return torch.nonzero(self._state == _BAD).flatten().tolist()

    def report(self, row: int, *, file: str, error: Exception) -> None:
        """Record a failed row. Raises ``DataError`` when ``max_errors`` is passed."""
        reason = f"{type(error).__name__}: {error}"
        self._reasons[row] = f"row {row + 1} ({file}): {reason}"
        first = self._state[row].item() == _GOOD
        # A timeout may be the storage's fault: the row is tried again, but not reported again.
        self._state[row] = _TRANSIENT if isinstance(error, TimeoutError) else _BAD
        if first:
            logger.warning("%s: row %d is skipped, another row takes its place. File %s, %s", self.source, row + 1,
                           file, reason)  # fmt: skip
        if self.max_errors is not None and self.count > self.max_errors:
            raise DataError(f"{self.source}: {self.count} bad rows, --max_data_errors allows {self.max_errors}"
                            + self.listing())  # fmt: skip

    def mark(self, row: int, reason: str) -> None:
        """Record a row that was found bad, and reported, before training."""
        self._reasons[row] = f"row {row + 1}: {reason}"
        self._state[row] = _BAD

    def check_hope(self, *, video: bool, consecutive: int) -> None:
        """Stop when no row of this kind is left, or when bad rows come without end."""
        kind = "video" if video else "image"
        of_kind = torch.from_numpy(self._video == video)
        states, rows = self._state[of_kind], int(of_kind.sum())
        if bool((states == _BAD).all()) or (bool((states != _GOOD).all()) and consecutive > 3 * rows):
            raise DataError(f"{self.source}: none of the {rows} {kind} row(s) can be read"
                            + self.listing())  # fmt: skip
        if consecutive >= MAX_CONSECUTIVE:
            raise DataError(f"{self.source}: {consecutive} {kind} draws in a row hit unreadable rows ({self.count} bad "
                            "rows so far)" + self.listing())  # fmt: skip

    def listing(self) -> str:
        rows = torch.nonzero(self._state != _GOOD).flatten().tolist()
        lines = [self._reasons.get(row, f"row {row + 1}: reported by another data worker") for row in rows[:_SHOWN]]
        more = f"\n  ... and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        return ":\n  " + "\n  ".join(lines) + more
