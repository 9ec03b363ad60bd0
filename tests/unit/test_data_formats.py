"""What people have as data: CogVideo's lists, folders, tar shards; and sampling by time."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data_kit import clip_rows, grey_frames, make_clip, number_of, open_loader, save_image, write_rows
from videox_fun.data.cache_store import FileFacts
from videox_fun.data.dataset_image_video import ImageVideoControlDataset, ImageVideoDataset
from videox_fun.data.formats import detect_format, shards_of
from videox_fun.data.metadata import load_rows
from videox_fun.data.module import DataOptions, build_data
from videox_fun.data.storage import locate, media_stat, open_media


def lists(folder: Path, captions: list[str], clips: list[str] | None = None, *, prompts: str = "prompts.txt") -> Path:
    folder.mkdir(exist_ok=True)
    clips = clips if clips is not None else [f"videos/{number}.mp4" for number in range(len(captions))]
    for number, name in enumerate(clips):
        make_clip(folder / name, np.full((5, 32, 64, 3), 40 + 50 * number, np.uint8))
    (folder / prompts).write_text("\n".join(captions) + "\n", encoding="utf-8")
    (folder / "videos.txt").write_text("\n".join(clips) + "\n")
    return folder


def options(meta: Path | str, **over) -> DataOptions:
    return DataOptions(**{"train_data_meta": str(meta), "video_sample_size": 64, "image_sample_size": 64, "seed": 1,
                          "video_sample_stride": 1, "video_sample_n_frames": 5, "enable_bucket": True,
                          "text_drop_ratio": 0.0, **over})  # fmt: skip


# ---- CogVideo --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prompts", ["prompts.txt", "prompt.txt"])
def test_lists_are_paired_by_line_and_train(tmp_path, prompts) -> None:
    folder = lists(tmp_path / "set", ["a red ball", "ein Hund, müde", "三"], prompts=prompts)
    assert detect_format(str(folder)) == "cogvideo"
    pairs = set()
    loader, module, _ = open_loader(options(folder, id_token="sks"))
    for batch, _ in loader.epoch(0):
        level = (float(batch["pixel_values"][0, 0].mean()) + 1) / 2 * 255
        pairs.add((round((level - 40) / 50), batch["text"][0]))
    assert pairs == {(0, "sks a red ball"), (1, "sks ein Hund, müde"), (2, "sks 三")}
    assert module.summary().kept == 3
    explicit = load_rows(folder / "videos.txt", data_format="cogvideo")
    assert [row["text"] for row in explicit] == ["a red ball", "ein Hund, müde", "三"]


def test_blank_lines_counts_and_missing_files_are_refused(tmp_path) -> None:
    folder = lists(tmp_path / "set", ["one", "", "three"])
    with pytest.raises(ValueError, match=r"prompts\.txt: blank line\(s\) 2\. Lines are paired by their number"):
        load_rows(folder)
    (folder / "prompts.txt").write_text("one\ntwo\n")
    with pytest.raises(ValueError, match=r"prompts\.txt has 2, videos\.txt has 3 lines"):
        load_rows(folder)
    (folder / "prompts.txt").write_text("one\ntwo\nthree\n")
    (folder / "videos" / "1.mp4").unlink()
    with pytest.raises(ValueError, match=r"1 listed file\(s\) do not exist:\n  line 2: .*1\.mp4"):
        load_rows(folder)
    (folder / "prompts.txt").unlink()
    with pytest.raises(ValueError, match=r"no prompts\.txt"):
        load_rows(folder)


def test_pictures_of_the_lists(tmp_path) -> None:
    folder = lists(tmp_path / "set", ["one", "two"])
    for name in ("a", "b"):
        save_image(folder / f"{name}.png", height=32, width=64)
    (folder / "images.txt").write_text("a.png\nb.png\n")
    rows = load_rows(folder)
    assert [Path(row["first_frame_path"]).name for row in rows] == ["a.png", "b.png"]
    (folder / "videos.txt").unlink()
    assert [(row["type"], row["text"]) for row in load_rows(folder, data_format="cogvideo")] == [
        ("image", "one"), ("image", "two")
    ]  # fmt: skip


def test_a_folder_needs_no_data_dir(tmp_path, monkeypatch) -> None:
    make_clip(tmp_path / "clips" / "a.mp4", 5)
    (tmp_path / "clips" / "a.txt").write_text("caption")
    monkeypatch.chdir(tmp_path)
    for folder in (None, "clips"):
        assert build_data(options("clips", train_data_dir=folder, data_format="folder")).summary().kept == 1
    with pytest.raises(ValueError, match="expected an annotation file"):
        load_rows("clips", data_format="videox")
    with pytest.raises(ValueError, match="--data_format must be one of auto, videox"):
        load_rows("clips", data_format="folders")


# ---- shards ----------------------------------------------------------------------------------------------------------
def shard(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    clip = [make_clip(folder / f"{n}.mp4", grey_frames(20, start=20 * n)).read_bytes() for n in range(3)]
    image = save_image(folder / "p.png", height=32, width=64).read_bytes()
    facts = {"caption": "two", "width": 64, "height": 32, "source": "web"}
    shard(folder / "s-000.tar", {"a/0.mp4": clip[0], "a/0.txt": "zéro\n".encode(), "a/1.mp4": clip[1],
                                 "a/1.json": json.dumps({"caption": "one"}).encode(),
                                 "a/1.control.mp4": clip[0]})  # fmt: skip
    shard(folder / "s-001.tar", {"2.mp4": clip[2], "2.json": json.dumps(facts).encode(), "3.png": image,
                                 "3.txt": b"three", "4.txt": b"no clip"})  # fmt: skip
    for name in ("0.mp4", "1.mp4", "2.mp4", "p.png"):
        (folder / name).unlink()
    return folder


def test_shards_are_read_without_unpacking(shards, caplog) -> None:
    rows = load_rows(shards)
    assert [row["text"] for row in rows] == ["zéro", "one", "two", "three"]
    assert [row["type"] for row in rows] == ["video", "video", "video", "image"]
    assert (rows[2]["width"], rows[2]["height"]) == (64, 32)
    assert any("1 sample(s) without a clip" in record.getMessage() for record in caplog.records)
    dataset = ImageVideoDataset(str(shards), None, video_sample_stride=1, video_sample_n_frames=20,
                                enable_bucket=True, text_drop_ratio=0.0)  # fmt: skip
    for index in range(3):
        item = dataset[index]
        numbers = [number_of(frame) for frame in item["pixel_values"]]
        assert numbers == [(20 * index + n) % 56 for n in range(20)]
    assert dataset[3]["pixel_values"].shape == (1, 32, 64, 3)
    summary = build_data(options(f"{shards}/s-{{000..001}}.tar", dataloader_num_workers=0)).summary()
    assert (summary.kept, summary.opened) == (4, 4)


def test_control_clip_of_a_shard(shards) -> None:
    rows = [row for row in load_rows(shards / "s-000.tar") if "control_file_path" in row]
    meta = write_rows(shards / "control.json", rows)
    dataset = ImageVideoControlDataset(str(meta), None, video_sample_stride=1, video_sample_n_frames=20,
                                       enable_bucket=True)  # fmt: skip
    item = dataset[0]
    assert [number_of(item[key][3]) for key in ("pixel_values", "control_pixel_values")] == [23, 3]


def test_shards_behind_a_url(shards) -> None:
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://set/s-000.tar", "wb") as handle:
        handle.write((shards / "s-000.tar").read_bytes())
    rows = load_rows("memory://set/s-000.tar")
    assert len(rows) == 2 and rows[0]["file_path"].startswith("memory://set/s-000.tar::")
    item = ImageVideoDataset("memory://set/s-000.tar", "ignored/for/urls", video_sample_stride=1,
                             video_sample_n_frames=5, enable_bucket=True)[1]  # fmt: skip
    first = number_of(item["pixel_values"][0])
    assert 20 <= first <= 35 and number_of(item["pixel_values"][4]) == first + 4


def test_the_cache_knows_members_by_their_content(shards, tmp_path) -> None:
    rows = load_rows(shards / "s-000.tar")
    files = FileFacts(tmp_path)
    first, second = (files.of(row["file_path"])["sha256"] for row in rows)
    with open_media(rows[0]["file_path"]) as handle:
        assert first == hashlib.sha256(handle.read()).hexdigest() != second
    assert FileFacts(tmp_path).of(rows[1]["control_file_path"])["sha256"] == first


def test_members_by_name_and_damaged_shards(shards, tmp_path) -> None:
    name = f"{shards}/s-000.tar::a/0.txt"
    with open_media(name) as handle:
        assert handle.read().decode() == "zéro\n"
        handle.seek(-2, io.SEEK_END)
        assert handle.read() == b"o\n"
    assert media_stat(name)[0] == 6 and locate(name)[3] == "a/0.txt"
    with pytest.raises(FileNotFoundError, match=r"no member 'a/9\.txt'"):
        open_media(f"{shards}/s-000.tar::a/9.txt")
    bad = tmp_path / "bad.tar"
    bad.write_bytes(b"x" * 2048)
    with pytest.raises(ValueError, match=r"bad\.tar: not a plain tar file"):
        load_rows(bad)
    with pytest.raises(ValueError, match="shard not found: .*s-002"):
        shards_of(f"{shards}/s-{{000..002}}.tar")
    assert shards_of(f"{shards}/*.tar") == [f"{shards}/s-{n:03d}.tar" for n in range(2)]
    shard(tmp_path / "list.tar", {"0.mp4": b"x", "0.json": b"[1]"})
    with pytest.raises(ValueError, match=r"0\.json must hold an object"):
        load_rows(tmp_path / "list.tar")


def test_a_row_of_a_shard_without_caption_is_named(tmp_path) -> None:
    path = shard(tmp_path / "s.tar", {"0.mp4": b"x", "0.txt": b"zero", "1.mp4": b"x"})
    with pytest.raises(ValueError, match=r"row 2 \(s\.tar: /1\): the key 'text' is missing"):
        load_rows(path)


def test_a_broken_member_is_named_and_replaced(tmp_path, caplog) -> None:
    good = make_clip(tmp_path / "g.mp4", 5).read_bytes()
    shard(tmp_path / "s.tar", {"0.mp4": good[: len(good) // 2], "0.txt": b"bad", "1.mp4": good, "1.txt": b"good"})
    dataset = ImageVideoDataset(str(tmp_path / "s.tar"), None, video_sample_stride=1, video_sample_n_frames=5,
                                enable_bucket=True, text_drop_ratio=0.0)  # fmt: skip
    with caplog.at_level(logging.WARNING):
        assert dataset[0]["text"] == "good"
    assert any("0.mp4" in record.getMessage() for record in caplog.records)


# ---- time ------------------------------------------------------------------------------------------------------------
def picked(meta: Path, **over) -> list[int]:
    dataset = ImageVideoDataset(str(meta), str(meta.parent), enable_bucket=True, **over)
    return [number_of(frame) for frame in dataset[0]["pixel_values"]]


@pytest.mark.parametrize(("fps", "expected"), [
    (8, [0, 1, 2, 3, 4, 5]), (24, [0, 3, 6, 9, 12, 15]), (30, [0, 4, 7, 11, 15, 19]), (4, [0, 0, 1, 1, 2, 2])
])  # fmt: skip
def test_case_26_frames_are_picked_by_time(tmp_path, fps, expected) -> None:
    """Eight frames per second whatever the source's rate."""
    meta = clip_rows(tmp_path, [expected[-1] + 2], fps=fps)
    found = picked(meta, video_sample_fps=8.0, video_sample_n_frames=6, video_length_drop_end=1.0)
    ideal = np.arange(6) / 8 * fps
    offset = found[0]
    assert np.abs(np.array(found) - offset - ideal).max() <= 1.0
    if offset == 0 and fps != 30:
        assert found == expected


def test_case_26_variable_rate_is_sampled_evenly_in_time(tmp_path) -> None:
    """Dropped frames: stamps 0..9, then every third, in units of 1/24 s."""
    stamps = [*range(10), *range(12, 60, 3)]
    frames = grey_frames(len(stamps))
    make_clip(tmp_path / "v.mkv", frames, fps=24, stamps=stamps)
    meta = write_rows(tmp_path / "m.json", [{"file_path": "v.mkv", "text": "x"}])
    found = picked(meta, video_sample_fps=8.0, video_sample_n_frames=19)
    times = np.array([stamps[number] for number in found]) / 24
    assert len(found) == 19 and np.abs(times - times[0] - np.arange(19) / 8).max() <= 1 / 24 + 1e-3
    by_stride = picked(meta, video_sample_stride=3, video_sample_n_frames=8)
    uneven = np.diff([stamps[number] for number in by_stride])
    assert uneven.max() == 9 > uneven.min()


def test_sampling_by_time_in_the_summary(tmp_path) -> None:
    for name, fps in (("a", 8), ("b", 24), ("c", 4)):
        make_clip(tmp_path / f"{name}.mp4", 25, fps=fps)
    rows = [{"file_path": f"{name}.mp4", "text": "x"} for name in "abc"]
    opts = options(write_rows(tmp_path / "m.json", rows), train_data_dir=str(tmp_path), video_sample_fps=8.0,
                   video_sample_n_frames=25)  # fmt: skip
    summary = build_data(opts).summary()
    assert {group.frames: group.rows for group in summary.groups} == {9: 1, 25: 2}
    assert any("1 clip(s) have fewer frames per second than --video_sample_fps 8" in line for line in summary.lines())
    assert not any("frame rates are mixed" in line for line in summary.lines())
    for rate in (0.0, -1.0):
        with pytest.raises(ValueError, match="--video_sample_fps is a positive number"):
            options(tmp_path, video_sample_fps=rate)
    with pytest.raises(ValueError, match="--video_sample_fps"):
        options(tmp_path, video_sample_fps=8.0, upstream_compat=True)
