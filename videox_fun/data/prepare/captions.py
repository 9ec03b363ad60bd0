"""A command of your own for captions: it is run once per clip, and what it prints is the caption.

Anything that takes a file and prints text will do: a local model, a client of a server, a script. Captions go to a
jsonl file line by line, ready for ``--train_data_meta``; a job that is started again does the clips that are missing.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

from videox_fun.data.bucket_sampler import resolve
from videox_fun.data.prepare.jsonl import Row, run_each


def caption_rows(
    rows: Iterable[Row],
    target: str | Path,
    *,
    command: str,
    folder: str | None = None,
    workers: int = 1,
    timeout: float = 600.0,
) -> tuple[int, int]:
    """Append each row with its caption to ``target``; returns ``(written, failed)``."""
    words = shlex.split(command)
    if not any("{file}" in word for word in words):
        raise ValueError(f"--run {command!r}: write {{file}} where the clip's name goes")

    def work(row: Row) -> Row:
        path = resolve(row["file_path"], folder)
        line = [word.replace("{file}", path) for word in words]
        try:
            done = subprocess.run(line, capture_output=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            raise ValueError(f"the command took longer than {timeout:g} s") from None
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise ValueError(f"the command ended with {done.returncode}: {said[-1] if said else 'it said nothing'}")
        text = " ".join(done.stdout.decode("utf-8", "replace").split())
        if not text:
            raise ValueError("the command printed no caption")
        return {**row, "text": text}

    return run_each(rows, target, work, workers=workers)
