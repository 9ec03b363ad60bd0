"""Results one line at a time, so that a stopped job goes on where it was.

A line is written whole and flushed as soon as a clip is done. A half line at the end, left by a killed process, is cut
off before new lines are added.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Row = dict[str, Any]


def read_lines(path: str | Path) -> Iterator[Row]:
    """The whole lines of a file; what a killed process left of the last one is skipped."""
    with open(path, encoding="utf-8") as handle:
        for number, line in enumerate(handle, 1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}: line {number} is not valid JSON: {error.msg}") from error


def run_each(
    rows: Iterable[Row], target: str | Path, work: Callable[[Row], Row], *, workers: int = 1
) -> tuple[int, int]:
    """Append ``work(row)`` for each row whose file ``target`` does not hold. Returns ``(done, failed)``.

    Rows that raise ``ValueError`` or ``OSError`` are named in the log, leave no line and are tried again next time.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    known = {row["file_path"] for row in read_lines(target)} if target.is_file() else set()
    _cut_half_line(target)
    pending = list({row["file_path"]: row for row in rows if row["file_path"] not in known}.values())
    done = failed = 0
    with open(target, "a", encoding="utf-8") as out, ThreadPoolExecutor(max_workers=max(workers, 1)) as pool:
        futures = {pool.submit(work, row): row for row in pending}
        for future in as_completed(futures):
            try:
                result = future.result()
            except (ValueError, OSError) as error:
                failed += 1
                logger.warning("%s: %s", futures[future]["file_path"], error)
                continue
            out.write(json.dumps(result, ensure_ascii=False) + "\n")
            out.flush()
            done += 1
    return done, failed


def _cut_half_line(target: Path) -> None:
    if not target.is_file():
        return
    with open(target, "rb+") as handle:
        data = handle.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            handle.seek(whole)
            handle.truncate()
            os.fsync(handle.fileno())
