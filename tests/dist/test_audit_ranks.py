"""What processes do differently is a finding of the audit, on all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from optim_patches.audit.live_view import DISABLED, ENABLED, INERT, LiveRow, RunFacts
from optim_patches.audit.ranks import RankNote, differences, gather
from optim_patches.audit.text import Text


def note(*rows: LiveRow, tokens: int = 100, micro: int = 1, wait: float = 0.0) -> RankNote:
    return RankNote.of(rows, RunFacts(tokens=tokens, micro_steps=micro, seconds=10.0, data_wait_s=10 * wait))


def row(row_id: str, state: str, sites: int | None = None) -> LiveRow:
    return LiveRow(row_id, state, Text("why", "原因"), sites=sites)


def test_equal_ranks_differ_in_nothing() -> None:
    alike = note(row("A1", ENABLED, 3), row("B1", DISABLED))
    assert differences([alike, alike]) == [] and differences([alike]) == [] and gather(alike) == [alike]


def test_states_places_tokens_and_waits() -> None:
    first = note(row("A1", ENABLED, 3), row("B1", ENABLED, 2), row("I2", DISABLED))
    second = note(row("A1", ENABLED, 3), row("B1", INERT, 0), row("I2", DISABLED), tokens=150, wait=0.4)
    third = note(row("A1", ENABLED, 1), row("B1", ENABLED, 2), row("I2", DISABLED))
    found = differences([first, second, third])
    assert [text.en for text in found] == [
        "A1: places changed per rank: 3, 3, 1",
        "B1: enabled on rank 0, 2, INERT on rank 1 (why)",
        "G7: tokens per micro-step on ranks 0 to 2: 100, 150, 100; the others wait for rank 1",
        "G1: time waiting for data per rank: 0 %, 40 %, 0 %",
    ]
    assert "已启用（rank 0, 2）" in found[1].zh and "原因" in found[1].zh


def test_two_processes_tell_each_other(tmp_path: Path, repo_root: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(repo_root), "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, "-m", "tests.dist.audit_ranks", str(rank), str(tmp_path)], cwd=repo_root,
                              env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
             for rank in range(2)]  # fmt: skip
    try:
        screens = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], screens
    assert [screen.count("Ranks differ: B1: enabled on rank 0, INERT on rank 1") for screen in screens] == [2, 0]
    found = {}
    for mode in ("default", "strict"):
        folder = tmp_path / mode
        found[mode] = [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
        saved = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
        assert saved["differences"] == found[mode][0]["differences"] and len(saved["differences"]) == 4
    for ranks in found.values():
        assert ranks[0]["differences"] == ranks[1]["differences"]
        assert [notes["state"] for notes in ranks] == [ENABLED, INERT]
    assert [notes["outcome"] for notes in found["default"]] == ["ran", "ran"]
    assert all("asked for, but without effect" in notes["outcome"] for notes in found["strict"])  # both stop
    assert "on another rank: B1" in found["strict"][0]["outcome"]
