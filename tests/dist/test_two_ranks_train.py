"""Two processes on gloo run the real LoRA script: three steps, a state after the second, and a resume from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.real_runs import checkpoint, command, file_differences
from videox_fun.recipes.wan import flow_schedule
from videox_fun.training.launch import load_config

LORA_FILE = "lora_diffusion_pytorch_model.safetensors"
SIZES = {"random_hw_adapt": True, "training_with_video_token_length": True, "video_sample_n_frames": 9}
RECORDED = ("d2", "d2_r1")  # what each rank of the original trainer saw, with these flags


@dataclass
class Ranks:
    """What both ranks noted, and where they wrote."""

    notes: list[dict]
    output: Path
    log: str

    def both(self, name: str) -> list:
        return [notes[name] for notes in self.notes]


def launch(words: list[str], folder: Path, repo_root: Path) -> Ranks:
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
               "-m", "tests.dist.ranks", str(folder), *words]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(repo_root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=repo_root, env=environment, capture_output=True, text=True, timeout=300,
                          check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    notes = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return Ranks(notes, Path(words[words.index("--output_dir") + 1]), done.stderr)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Ranks:
    folder = tmp_path_factory.mktemp("two_ranks")
    words = command("wan2.1_fun/train_lora", checkpoint(tmp_path_factory), folder / "out", max_train_steps=3,
                    save_state=True, checkpointing_steps=1, checkpoints_total_limit=2, **SIZES)
    return launch(words, folder / "notes", repo_root)


@pytest.fixture(scope="module")
def resumed(first: Ranks, tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Ranks:
    folder = tmp_path_factory.mktemp("two_ranks_resumed")
    words = command("wan2.1_fun/train_lora", checkpoint(tmp_path_factory), folder / "out", max_train_steps=3,
                    save_state=True, resume_from_checkpoint=first.output / "checkpoint-2", **SIZES)
    return launch(words, folder / "notes", repo_root)


def test_both_ranks_make_the_same_steps_with_the_same_weights(first: Ranks) -> None:
    assert first.both("world") == [2, 2] and first.both("device") == ["cpu", "cpu"] and first.both("code") == [0, 0]
    assert first.both("steps") == [[1, 2, 3]] * 2
    assert first.notes[0]["trained"] == first.notes[1]["trained"]
    assert first.notes[0]["norms"] == first.notes[1]["norms"]


def test_ranks_see_different_rows_and_halves_of_the_noise_levels(first: Ranks, tmp_path_factory) -> None:
    rows = first.both("rows")
    assert sorted(sum(rows[0] + rows[1], [])) == list(range(6))  # six clips in three rounds of two
    levels = flow_schedule(load_config(str(checkpoint(tmp_path_factory) / "wan.yaml"))).timesteps.tolist()
    for rank, timesteps in enumerate(first.both("timesteps")):
        assert [levels.index(value) // 500 for (value,) in timesteps] == [rank] * 3


def test_the_logged_loss_is_the_mean_over_ranks(first: Ranks) -> None:
    events = [json.loads(line) for line in (first.output / "events.jsonl").read_text().splitlines()]
    logged = [event["loss"] for event in events if event["event"] == "step"]
    assert logged == first.notes[0]["losses"] == first.notes[1]["losses"]


def test_only_rank_0_writes_files(first: Ranks) -> None:
    names = sorted(path.name for path in first.output.iterdir())
    assert names == ["checkpoint-2", "checkpoint-3", "events.jsonl", "sanity_check", "training_curves.png"]
    steps = (first.output / "events.jsonl").read_text().count('"event": "step"')
    assert steps == 3  # a second writer would have doubled the lines
    files = {path.name for path in (first.output / "checkpoint-3").iterdir()}
    assert {LORA_FILE, "videox_rank_0.json", "videox_rank_1.json", "random_states_1.pkl"} <= files
    assert not [name for name in names if name.startswith(".")]


def test_rows_sizes_and_noise_levels_are_the_recorded_ones(first: Ranks, goldens: Path) -> None:
    """Which clip, at which size, with which noise level: fixed by the seed on each rank."""
    for notes, tag in zip(first.notes, RECORDED, strict=True):
        calls = json.loads((goldens / "e2e" / "runs" / f"{tag}.json").read_text())["calls"]
        recorded = [call[2]["t_values"] for call in calls if call[1] == "transformer"]
        encoded = [call for call in calls if call[1] == "vae.encode"]
        for mine, theirs in zip(notes["timesteps"], recorded, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
        for shape, call in zip(notes["shapes"], encoded, strict=True):
            batch, frames, channels, height, width = shape
            assert [batch, channels, frames, height, width] == call[2]


def test_a_resume_on_two_ranks_is_exact(first: Ranks, resumed: Ranks) -> None:
    assert resumed.both("steps") == [[3], [3]]
    for before, after in zip(first.notes, resumed.notes, strict=True):
        assert after["losses"] == before["losses"][2:]
        assert after["rows"] == before["rows"][2:] and after["timesteps"] == before["timesteps"][2:]
        assert after["trained"] == before["trained"]
    files = [ranks.output / "checkpoint-3" / LORA_FILE for ranks in (first, resumed)]
    assert file_differences(*files) == []
