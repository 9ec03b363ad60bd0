"""Saving from two processes: rank files, pruning by rank 0, one failure told to all."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def report(tmp_path_factory, repo_root):
    folder = tmp_path_factory.mktemp("two_ranks")
    command = [sys.executable, "-m", "tests.faults.two_ranks", str(folder / "out"), str(folder / "rendezvous")]
    shared = {**os.environ, "PYTHONPATH": str(repo_root), "WORLD_SIZE": "2"}
    started = [subprocess.Popen(command, cwd=repo_root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env={**shared, "RANK": str(rank)}) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs[0][1][-1500:] + outputs[1][1][-1500:]
    return json.loads(outputs[0][0].splitlines()[-1])


def test_limit_is_applied_once(report):
    assert report["kept"] == ["checkpoint-4", "checkpoint-6"]


def test_every_rank_has_its_files(report):
    assert {"videox_rank_0.json", "videox_rank_1.json", "random_states_0.pkl", "random_states_1.pkl", "optimizer.bin",
            "scheduler.bin", "sampler_pos_start.pkl", "videox_state.json"} < set(report["files"])


def test_resumed_ranks_equal_the_unbroken_run(report):
    assert report["resumed"] == [[6, "exact"], [6, "exact"]]
    assert report["differences"] == [[], []]
    assert report["streams differ"] == 2


def test_failure_of_one_rank_reaches_all(report):
    assert all("No space left on device" in text and "checkpoint-6 is untouched" in text for text in report["told"])
    assert report["after failure"] == [4, 6] and report["hidden"] == []


def test_refusal_reaches_all(report):
    assert report["refused"] == [True, True]


def test_signal_on_one_rank_stops_all(report):
    assert report["signal"] == [[True, 85], [True, 85]]
