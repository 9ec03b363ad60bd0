"""The training script on CogVideo's lists, on tar shards, and with clips sampled by time."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data_kit import make_clip
from tests.unit.real_runs import checkpoint, refusal, train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory)


def lists(folder: Path, count: int = 2) -> Path:
    folder.mkdir()
    for number in range(count):
        make_clip(folder / "videos" / f"{number}.mp4", np.full((21, 32, 64, 3), 60 + 90 * number, np.uint8))
    (folder / "videos.txt").write_text("".join(f"videos/{number}.mp4\n" for number in range(count)))
    (folder / "prompts.txt").write_text("".join(f"clip {number}\n" for number in range(count)))
    return folder


def test_lists_and_shards_train_alike(model: Path, tmp_path: Path) -> None:
    """The same clips, once as lists and once as a shard, with a token in front of the captions."""
    folder = lists(tmp_path / "set")
    with tarfile.open(tmp_path / "s-000.tar", "w") as archive:
        for number in range(2):
            archive.add(folder / "videos" / f"{number}.mp4", f"{number}.mp4")
            (tmp_path / "caption.txt").write_text(f"clip {number}")
            archive.add(tmp_path / "caption.txt", f"{number}.txt")
    flags = {"train_data_dir": None, "text_drop_ratio": 0, "id_token": "sks", "video_sample_fps": 8.0,
             "video_sample_n_frames": 5, "max_train_steps": 2, "validation_prompts": None}  # fmt: skip
    runs = [train(model, tmp_path / name, train_data_meta=meta, data_format=form, **flags)
            for name, meta, form in (("a", folder, "cogvideo"), ("b", tmp_path / "s-000.tar", "webdataset"))]
    assert sorted(text for texts in runs[0].texts for text in texts) == ["sks clip 0", "sks clip 1"]
    assert runs[0].losses == runs[1].losses and runs[0].texts == runs[1].texts
    assert [tuple(pixels.shape[1:2]) for pixels in runs[0].pixels] == [(5,), (5,)]


def test_unpaired_lists_are_refused_before_weights_load(model: Path, tmp_path: Path, capsys) -> None:
    folder = lists(tmp_path / "set")
    (folder / "prompts.txt").write_text("only one\n")
    text = refusal(model, tmp_path / "out", train_data_dir=None, train_data_meta=folder) + capsys.readouterr().err
    assert "prompts.txt has 1, videos.txt has 2 lines" in text
