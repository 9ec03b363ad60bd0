"""SIGKILL at random instants never leaves ``latest`` unusable."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_while_saving(tmp_path, repo_root):
    trials = 100 if os.environ.get("VIDEOX_SLOW") == "1" else 30
    result = subprocess.run(
        [sys.executable, "-m", "tests.faults.kill_loop", str(tmp_path), str(trials)], cwd=repo_root, timeout=240,
        env={**os.environ, "PYTHONPATH": str(repo_root)}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["problems"] == []
    assert max(report["steps"]) > trials / 6 > len(report["steps"])  # it really saved between the kills, and pruned
