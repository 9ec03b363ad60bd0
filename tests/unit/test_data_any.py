"""Whatever rows and files people bring: a row that cannot be used is named, and nothing else happens."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.data_kit import grey_frames, make_clip, open_loader, save_image, write_rows
from videox_fun.data.check import check
from videox_fun.data.decode import VideoReader
from videox_fun.data.metadata import load_rows
from videox_fun.data.module import DataOptions, build_data
from videox_fun.data.probe import probe_media

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["a.mp4", "p.png", "gone.mp4", "text.mp4", "64", "-3", "1e999", "video", "image", ""]),
    st.lists(st.text(max_size=3), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=1),
)  # fmt: skip
KEYS = st.one_of(
    st.sampled_from(["file_path", "text", "type", "width", "height", "frames", "fps", "control_file_path",
                     "object_file_path", "caption", "filepath"]), st.text(max_size=6)
)  # fmt: skip
GOOD = st.fixed_dictionaries(
    {"file_path": st.sampled_from(["a.mp4", "p.png"]), "text": st.text(max_size=20)},
    optional={"width": VALUES, "height": VALUES, "frames": VALUES, "fps": VALUES, "type": VALUES},
)  # fmt: skip
ROWS = st.lists(st.one_of(GOOD, st.dictionaries(KEYS, VALUES, max_size=5), VALUES), min_size=1, max_size=4)
RELAXED = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("any")
    make_clip(folder / "a.mp4", 5)
    save_image(folder / "p.png", height=32, width=64)
    (folder / "text.mp4").write_text("no video")
    return folder


def options(meta: Path, **over) -> DataOptions:
    return DataOptions(**{"train_data_meta": str(meta), "train_data_dir": str(meta.parent), "video_sample_size": 32,
                          "image_sample_size": 32, "video_sample_stride": 1, "video_sample_n_frames": 5,
                          "enable_bucket": True, "seed": 3, **over})  # fmt: skip


@RELAXED
@given(rows=ROWS, kind=st.sampled_from(["image_video", "control"]))
def test_arbitrary_rows_train_or_are_named(folder, rows, kind) -> None:
    meta = folder / "m.json"
    meta.write_text(json.dumps(rows), encoding="utf-8")
    try:
        loader, module, _ = open_loader(options(meta, kind=kind))
        module.summary()
        batches = [batch for batch, _ in itertools.islice(loader.epoch(0), 4)]
    except ValueError as error:
        assert "row " in str(error), error
        return
    assert all(batch["pixel_values"].shape[0] == 1 for batch in batches)


@RELAXED
@given(rows=ROWS)
def test_check_names_a_row_for_everything_it_finds(folder, rows) -> None:
    meta = folder / "c.json"
    meta.write_text(json.dumps(rows), encoding="utf-8")
    report = check(options(meta), probe_seconds=5.0)
    usable = report.summary.kept if report.summary is not None else 0
    assert all(finding.where.startswith("row ") for finding in report.findings)
    assert report.errors > 0 or usable == len(rows)
    report.lines()
    json.dumps(report.as_dict())


TEXT = st.text(max_size=80).map(lambda text: text.encode("utf-8", "replace"))


@RELAXED
@given(text=st.one_of(st.binary(max_size=80), TEXT), suffix=st.sampled_from([".json", ".jsonl", ".csv"]))
def test_arbitrary_annotation_files_are_read_or_named(folder, text, suffix) -> None:
    meta = folder / f"x{suffix}"
    meta.write_bytes(text)
    try:
        load_rows(meta)
    except ValueError as error:
        assert f"x{suffix}" in str(error), error


# ---- files -----------------------------------------------------------------------------------------------------------
def encode(path: Path, codec: str, pixels: str, frames: np.ndarray, *, given_as: str = "rgb24") -> Path:
    with av.open(str(path), "w") as out:
        stream = out.add_stream(codec, rate=24)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], pixels
        for picture in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format=given_as)))
        out.mux(stream.encode())
    return path


@pytest.mark.parametrize(("height", "width"), [(33, 51), (1, 64), (64, 17)])
def test_odd_sizes(tmp_path, height, width) -> None:
    path = encode(tmp_path / "odd.mkv", "ffv1", "yuv444p", grey_frames(6, height=height, width=width))
    info = probe_media(path, kind="video")
    assert (info.height, info.width, info.frames) == (height, width, 6)
    meta = write_rows(tmp_path / "m.json", [{"file_path": "odd.mkv", "text": "x"}])
    batch = build_data(options(meta))
    pixels = batch.collate_fn([batch.dataset[0]])["pixel_values"]
    assert pixels.shape[1] == 5 and pixels.shape[-1] % 16 == pixels.shape[-2] % 16 == 0


def test_ten_bit_clips(tmp_path) -> None:
    path = encode(tmp_path / "ten.mkv", "ffv1", "yuv420p10le", grey_frames(12))
    with VideoReader(path) as reader:
        frames = reader.read([0, 5, 11])
    levels = frames.mean(axis=(1, 2, 3))
    assert frames.dtype == np.uint8 and np.abs(levels - [16, 36, 60]).max() < 3


def test_transparent_parts_of_a_clip_are_white(tmp_path) -> None:
    """Left half opaque grey, right half transparent over red."""
    frames = np.zeros((3, 32, 64, 4), np.uint8)
    frames[..., :32, :] = (100, 100, 100, 255)
    frames[..., 32:, :] = (255, 0, 0, 0)
    path = encode(tmp_path / "alpha.mov", "png", "rgba", frames, given_as="rgba")
    with VideoReader(path) as reader:
        frame = reader.read([1])[0]
    assert (frame[:, :32] == 100).all() and (frame[:, 32:] == 255).all()
    with VideoReader(path, apply_rotation=False) as reader:
        assert (reader.read([1])[0][:, 32:] == (255, 0, 0)).all()


def test_case_35_portrait_clips_get_a_portrait_size(tmp_path) -> None:
    make_clip(tmp_path / "tall.mp4", grey_frames(5, height=128, width=72))
    make_clip(tmp_path / "wide.mp4", grey_frames(5, height=72, width=128))
    rows = [{"file_path": name, "text": name} for name in ("tall.mp4", "wide.mp4")]
    report = check(options(write_rows(tmp_path / "m.json", rows), video_sample_size=64, image_sample_size=64))
    shapes = {(group.height, group.width): {(o.height, o.width) for o in group.outcomes}
              for group in report.summary.groups}  # fmt: skip
    assert shapes == {(128, 72): {(80, 48)}, (72, 128): {(48, 80)}}
    assert report.summary.buckets == {"video 0.57": 1, "video 1.75": 1}
    assert not [finding for finding in report.findings if finding.code == "cropped"]
    square = check(options(tmp_path / "m.json", enable_bucket=False))
    assert len([finding for finding in square.findings if finding.code == "cropped"]) == 2


def _resident_mib() -> float:
    with open("/proc/self/statm", encoding="ascii") as handle:
        return int(handle.read().split()[1]) * 4096 / 2**20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
def test_case_27_memory_stays_flat_over_many_reads(folder) -> None:
    meta = folder / "many.jsonl"
    row = {"file_path": "a.mp4", "type": "video", "text": "a long caption " * 20}
    meta.write_text((json.dumps(row) + "\n") * 20_000)
    dataset = build_data(options(meta)).dataset
    seen = []
    for number in range(600):
        assert len(dataset[number * 97 % len(dataset)]["pixel_values"]) == 5
        if number % 100 == 99:
            seen.append(_resident_mib())
    assert seen[-1] - seen[1] < 8.0
