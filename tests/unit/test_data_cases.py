"""Faults that people met with training data, each with the right behaviour."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data_kit import (
    clip_rows,
    grey_frames,
    make_clip,
    number_of,
    open_loader,
    save_image,
    seed_streams,
    write_rows,
)
from videox_fun.data.bad_rows import DataError
from videox_fun.data.dataset_image_video import (
    ImageVideoControlDataset,
    ImageVideoDataset,
)
from videox_fun.data.metadata import rows_of_folder, scan_folder
from videox_fun.data.module import DataOptions, build_data

ROOT = Path(__file__).resolve().parents[2]


def options(meta: Path, **over) -> DataOptions:
    base = {
        "train_data_meta": str(meta),
        "train_data_dir": str(meta.parent),
        "video_sample_size": 64,
        "image_sample_size": 64,
        "token_sample_size": 64,
        "video_sample_stride": 1,
        "video_sample_n_frames": 9,
        "enable_bucket": True,
        "text_drop_ratio": 0.0,
        "seed": 42,
    }
    return DataOptions(**{**base, **over})


def epoch_batches(opts: DataOptions, epochs: int = 1) -> list[dict]:
    loader, _, _ = open_loader(opts)
    return [batch for epoch in range(epochs) for batch, _ in loader.epoch(epoch)]


# ---- sizes -----------------------------------------------------------------------------------------------------------
def test_case_01_rows_without_sizes_give_the_same_buckets(tmp_path) -> None:
    rows = []
    for number, (height, width) in enumerate([(32, 64), (64, 32), (48, 48), (32, 64)]):
        make_clip(tmp_path / f"{number}.mp4", grey_frames(9, height=height, width=width))
        rows.append({"file_path": f"{number}.mp4", "text": "x", "type": "video", "width": width, "height": height})
    save_image(tmp_path / "b.png", height=32, width=64)
    rows.append({"file_path": "b.png", "text": "y", "type": "image", "width": 64, "height": 32})
    sized = write_rows(tmp_path / "sized.json", rows)
    bare = [{key: row[key] for key in ("file_path", "text", "type")} for row in rows]
    mixed = [row if number % 2 else without for number, (row, without) in enumerate(zip(rows, bare, strict=True))]
    found = []
    for meta in (sized, write_rows(tmp_path / "bare.json", bare), write_rows(tmp_path / "mixed.json", mixed)):
        module = build_data(options(meta))
        batches = list(module.batch_sampler)
        found.append((batches, module.summary().buckets))
        assert len(batches) == 5
    assert found[0] == found[1] == found[2]


def test_case_02_decoded_frame_wins_over_swapped_metadata(tmp_path) -> None:
    pictures = np.zeros((9, 32, 64, 3), np.uint8)
    pictures[:, :, :21, 0] = 255
    pictures[:, :, 43:, 2] = 255
    make_clip(tmp_path / "a.mp4", pictures)
    row = {"file_path": "a.mp4", "text": "x", "type": "video", "width": 32, "height": 64}
    opts = options(write_rows(tmp_path / "m.json", [row]))
    batch = epoch_batches(opts)[0]
    pixels = batch["pixel_values"][0, 0]
    assert pixels.shape[2] > pixels.shape[1]
    assert pixels[0, :, :4].mean() > 0.5 and pixels[2, :, -4:].mean() > 0.5
    lines = "\n".join(build_data(opts).summary().lines())
    assert re.search(r"row 1 \(a\.mp4\): metadata 32x64, file 64x32", lines)


def test_mixed_aspects_in_a_batch_are_cut_not_stretched(tmp_path) -> None:
    """A wrong size column may put a portrait clip beside a landscape one; a circle must stay round."""
    for name, (height, width) in {"a.mp4": (64, 128), "b.mp4": (128, 64)}.items():
        rows, columns = np.mgrid[:height, :width]
        disc = (rows - height / 2) ** 2 + (columns - width / 2) ** 2 < 8**2
        make_clip(tmp_path / name, np.repeat(np.where(disc, 250, 10)[None, ..., None], 9, 0).repeat(3, 3).astype("u1"))
    rows = [{"file_path": n, "text": "x", "type": "video", "width": 128, "height": 64} for n in ("a.mp4", "b.mp4")]
    meta = write_rows(tmp_path / "m.json", rows)
    for compat in (False, True):
        batch = epoch_batches(options(meta, train_batch_size=2, video_sample_size=128, upstream_compat=compat))[0]
        ratios = []
        for clip in batch["pixel_values"]:
            inside = clip[0, 0] > 0
            ratios.append(inside.any(0).sum().item() / inside.any(1).sum().item())
        round_ones = [0.85 < ratio < 1.18 for ratio in ratios]
        assert all(round_ones) is not compat


# ---- lengths ---------------------------------------------------------------------------------------------------------
def test_case_06_captions_stay_with_their_clips(tmp_path) -> None:
    """Levels tell the clips apart: A from 0, B from 10, C from 20; B is too short to be read at all."""
    rows = []
    for number, (name, length) in enumerate([("A", 33), ("B", 3), ("C", 33)]):
        make_clip(tmp_path / f"{name}.mp4", np.full((length, 32, 64, 3), 40 + 60 * number, np.uint8))
        rows.append({"file_path": f"{name}.mp4", "text": name, "type": "video"})
    opts = options(
        write_rows(tmp_path / "m.json", rows), video_sample_n_frames=33, video_sample_stride=4, upstream_compat=True
    )
    module = build_data(opts)
    summary = module.summary()
    assert (summary.kept, summary.dropped) == (2, {1: "B.mp4: 3 frame(s), too short"})
    assert any("2 kept, 1 dropped" in line for line in summary.lines())
    for compat in (True, False):
        pairs = set()
        for batch in epoch_batches(options(Path(opts.train_data_meta), video_sample_n_frames=33,
                                           video_sample_stride=4, upstream_compat=compat), epochs=4):  # fmt: skip
            level = (float(batch["pixel_values"][0, 0].mean()) + 1) / 2 * 255
            pairs.add((round((level - 40) / 60), batch["text"][0]))
        assert pairs == ({(0, "A"), (2, "C")} if compat else {(0, "A"), (1, "B"), (2, "C")})


def test_case_07_one_frame_short_uses_the_next_legal_length(tmp_path) -> None:
    meta = clip_rows(tmp_path, [64] * 10)
    opts = options(meta, video_sample_n_frames=65)
    summary = build_data(opts).summary()
    assert (summary.kept, summary.rows) == (10, 10)
    assert any("10 clip(s) are shorter than --video_sample_n_frames 65" in line for line in summary.lines())
    batches = epoch_batches(opts)
    assert [batch["pixel_values"].shape[1] for batch in batches] == [61] * 10


def test_no_usable_row_stops_before_training(tmp_path) -> None:
    meta = clip_rows(tmp_path, [2, 2])
    with pytest.raises(ValueError, match=r"no row is usable[\s\S]*0\.mp4: 2 frame\(s\), too short"):
        build_data(options(meta, video_sample_stride=4, upstream_compat=True)).summary()


def test_seventeen_frames_at_stride_two_are_nine(tmp_path) -> None:
    meta = clip_rows(tmp_path, [17])
    kwargs = {"video_sample_stride": 2, "video_sample_n_frames": 9, "enable_bucket": True, "text_drop_ratio": 0.0}
    item = ImageVideoDataset(str(meta), str(tmp_path), **kwargs)[0]
    assert [number_of(frame) for frame in item["pixel_values"]] == list(range(0, 17, 2))
    assert len(ImageVideoDataset(str(meta), str(tmp_path), **kwargs, upstream_compat=True)[0]["pixel_values"]) == 8


# ---- unreadable files ------------------------------------------------------------------------------------------------
def _broken_set(tmp_path: Path) -> Path:
    make_clip(tmp_path / "good.mp4", 12)
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("not a video")
    whole = make_clip(tmp_path / "whole.mp4", 40).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: int(len(whole) * 0.6)])
    names = ["good.mp4", "empty.mp4", "text.mp4", "cut.mp4"]
    sizes = {"type": "video", "width": 64, "height": 32}
    return write_rows(tmp_path / "m.json", [{"file_path": name, "text": name, **sizes} for name in names])


def test_case_12_bad_files_are_named_once_and_the_good_one_trains(tmp_path, caplog) -> None:
    meta = _broken_set(tmp_path)
    with caplog.at_level(logging.WARNING):
        batches = epoch_batches(options(meta), epochs=4)
    assert [batch["text"] for batch in batches] == [["good.mp4"]] * 16
    for name in ("empty.mp4", "text.mp4", "cut.mp4"):
        assert sum(f"File {name}" in record.getMessage() for record in caplog.records) == 1


def test_case_12_with_workers_each_bad_file_is_reported_about_once(tmp_path) -> None:
    meta = _broken_set(tmp_path)
    handler = logging.FileHandler(tmp_path / "log.txt")  # workers append to it, too
    logger = logging.getLogger("videox_fun.data.bad_rows")
    logger.addHandler(handler)
    try:
        loader, module, _ = open_loader(options(meta, dataloader_num_workers=2))
        texts = [batch["text"] for epoch in range(4) for batch, _ in loader.epoch(epoch)]
        loader.close()
    finally:
        logger.removeHandler(handler)
        handler.close()
    assert texts == [["good.mp4"]] * 16
    assert module.dataset.bad_rows.rows() == [1, 2, 3]  # seen by the main process
    reported = (tmp_path / "log.txt").read_text()
    for name in ("empty.mp4", "text.mp4", "cut.mp4"):
        assert 1 <= reported.count(f"File {name}") <= 2  # two workers may meet it at the same moment


def test_case_12_all_bad_fails_fast_with_the_list(tmp_path) -> None:
    meta = _broken_set(tmp_path)
    rows = json.loads(meta.read_text())[1:]
    bad = write_rows(tmp_path / "bad.json", rows)
    for compat in (False, True):
        with pytest.raises(DataError, match=r"none of the 3 video row\(s\) can be read[\s\S]*empty\.mp4"):
            epoch_batches(options(bad, upstream_compat=compat))
    with pytest.raises(ValueError, match=r"no row is usable[\s\S]*text\.mp4"):
        build_data(options(bad)).summary()


def test_max_data_errors_stops_the_run(tmp_path) -> None:
    with pytest.raises(DataError, match=r"2 bad rows, --max_data_errors allows 1"):
        epoch_batches(options(_broken_set(tmp_path), max_data_errors=1), epochs=4)


def test_a_failed_attempt_leaves_no_trace_in_the_draws(tmp_path) -> None:
    """A run that knows the bad rows already draws the same as one that meets them."""
    meta = _broken_set(tmp_path)
    fresh = ImageVideoDataset(str(meta), str(tmp_path), video_sample_stride=1, video_sample_n_frames=5,
                              enable_bucket=True)  # fmt: skip
    seed_streams(3)
    first = [fresh[index]["pixel_values"].mean() for index in (3, 1, 2, 0)]
    seed_streams(3)
    assert [fresh[index]["pixel_values"].mean() for index in (3, 1, 2, 0)] == first


def test_replacement_is_of_the_same_kind(tmp_path) -> None:
    save_image(tmp_path / "a.png", height=32, width=64)
    make_clip(tmp_path / "b.mp4", 9)
    (tmp_path / "c.png").write_text("no picture")
    rows = [{"file_path": name, "text": name} for name in ("a.png", "b.mp4", "c.png")]
    dataset = ImageVideoDataset(str(write_rows(tmp_path / "m.json", rows)), str(tmp_path), enable_bucket=True,
                                video_sample_stride=1, text_drop_ratio=0.0)  # fmt: skip
    assert dataset[2]["text"] == "a.png"
    assert dataset[1]["data_type"] == "video"


# ---- folders and file names ------------------------------------------------------------------------------------------
def test_case_14_a_folder_of_videos_is_counted_and_explained(tmp_path) -> None:
    for number in range(3):
        make_clip(tmp_path / f"{number}.mp4", 5)
    with pytest.raises(ValueError, match=r"3 video\(s\) and 0 picture\(s\)[\s\S]*--train_data_meta"):
        build_data(DataOptions(train_data_dir=str(tmp_path)))
    with pytest.raises(ValueError, match=r"found 3 video\(s\).*3 of them have no caption.*0\.txt"):
        build_data(DataOptions(train_data_meta=str(tmp_path)))
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"clip {number}\n")
    rows = rows_of_folder(tmp_path)
    assert [(Path(row["file_path"]).name, row["text"], row["type"]) for row in rows] == [
        (f"{number}.mp4", f"clip {number}", "video") for number in range(3)
    ]
    assert build_data(options(tmp_path, train_data_dir=None)).summary().kept == 3


def test_case_15_stray_files_are_ignored_with_one_line(tmp_path, caplog) -> None:
    for name in ("dataset.toml", ".DS_Store", "Thumbs.db"):
        (tmp_path / name).write_text("x")
    (tmp_path / "sub").mkdir()
    for name in ("a.mp4", "sub/b.mp4"):
        make_clip(tmp_path / name, 5)
        (tmp_path / name).with_suffix(".txt").write_text("caption")
    media, strays = scan_folder(tmp_path)
    assert [path.name for path in media] == ["a.mp4", "b.mp4"]
    assert {path.name for path in strays} == {"dataset.toml", ".DS_Store", "Thumbs.db"}
    with caplog.at_level(logging.INFO):
        rows_of_folder(tmp_path)
    assert [r.getMessage() for r in caplog.records if "ignored" in r.getMessage()] == [
        f"{tmp_path}: 3 other file(s) ignored, e.g. .DS_Store"
    ]


def test_control_rows_need_their_key_but_may_be_null(tmp_path) -> None:
    make_clip(tmp_path / "a.mp4", 9)
    rows = [{"file_path": "a.mp4", "text": "x"}, {"file_path": "a.mp4", "text": "x", "control_file_path": None}]
    meta = write_rows(tmp_path / "m.json", rows)
    with pytest.raises(ValueError, match=r"row 1: the key 'control_file_path' is missing"):
        ImageVideoControlDataset(str(meta), str(tmp_path))
    meta = write_rows(tmp_path / "m.json", rows[1:])
    dataset = ImageVideoControlDataset(str(meta), str(tmp_path), enable_bucket=True, video_sample_stride=1)
    assert not dataset[0]["control_pixel_values"].any()


def test_a_target_is_not_read_beyond_its_control(tmp_path, caplog) -> None:
    make_clip(tmp_path / "long.mp4", 30)
    make_clip(tmp_path / "short.mp4", 10)
    meta = write_rows(
        tmp_path / "m.json", [{"file_path": "long.mp4", "text": "x", "control_file_path": "short.mp4"}]
    )
    dataset = ImageVideoControlDataset(str(meta), str(tmp_path), enable_bucket=True, video_sample_stride=2,
                                       video_sample_n_frames=5)  # fmt: skip
    for _ in range(5):
        item = dataset[0]
        numbers = [[number_of(frame) for frame in item[key]] for key in ("pixel_values", "control_pixel_values")]
        assert numbers[0] == numbers[1] and numbers[0][-1] < 10
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("given", ["video", "image", None])
def test_case_22_the_kind_follows_the_file(tmp_path, given, caplog) -> None:
    save_image(tmp_path / "test.png", height=512, width=512)
    csv = tmp_path / "m.csv"
    csv.write_text(f'file_path,text,type\ntest.png,"dog",{given or ""}\n', encoding="utf-8")
    opts = options(csv, video_sample_n_frames=1, image_sample_size=512, video_sample_size=512)
    batch = epoch_batches(opts)[0]
    assert (tuple(batch["pixel_values"].shape), batch["text"]) == ((1, 1, 3, 512, 512), ["dog"])
    assert any("treated as image" in record.getMessage() for record in caplog.records) is (given == "video")


def test_case_23_stills_get_a_mask_and_a_condition(tmp_path) -> None:
    for number in range(4):
        save_image(tmp_path / f"{number}.png", height=64, width=64)
    rows = [{"file_path": f"{number}.png", "text": "x"} for number in range(4)]
    opts = options(write_rows(tmp_path / "m.json", rows), inpaint=True)
    for start_only in (False, True):
        for batch in epoch_batches(DataOptions(**{**vars(opts), "mask_image_start_only": start_only})):
            assert batch["mask"].shape == (1, 1, 1, 64, 64)
            assert batch["mask_pixel_values"].shape == (1, 1, 3, 64, 64)
            assert batch["clip_pixel_values"].shape == (1, 64, 64, 3)
            assert bool(batch["mask"].all()) or not start_only


_NON_ASCII = """
import json, sys
from videox_fun.data.dataset_image_video import ImageVideoDataset
sys.stdout.reconfigure(encoding="utf-8")
for meta in sys.argv[2:]:
    item = ImageVideoDataset(meta, sys.argv[1], enable_bucket=True, video_sample_stride=1, text_drop_ratio=0.0)[0]
    print(json.dumps([item["text"], list(item["pixel_values"].shape)], ensure_ascii=False))
"""


def test_case_25_names_and_captions_in_any_language(tmp_path) -> None:
    name, caption = "数据/猫 é.mp4", "日本語の説明"
    make_clip(tmp_path / name, 9)
    metas = [write_rows(tmp_path / "meta.json", [{"file_path": name, "text": caption, "type": "video"}])]
    metas.append(tmp_path / "meta.csv")
    metas[1].write_text(f"file_path,text\n{name},{caption}\n", encoding="utf-8-sig")
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _NON_ASCII, str(tmp_path), *map(str, metas)]
    done = subprocess.run(command, env=env, check=False, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found = [json.loads(line) for line in done.stdout.decode("utf-8").splitlines()]
    assert found == [[caption, [9, 32, 64, 3]]] * 2


def test_case_26_frame_rates_are_said_and_frames_are_evenly_spaced(tmp_path) -> None:
    rows = []
    for rate in (8, 24, 30):
        make_clip(tmp_path / f"{rate}.mp4", 30, fps=rate)
        rows.append({"file_path": f"{rate}.mp4", "text": "x", "type": "video"})
    opts = options(write_rows(tmp_path / "m.json", rows), video_sample_stride=2)
    warned = [line for line in build_data(opts).summary().lines() if "frame rates are mixed" in line]
    assert len(warned) == 1 and "8 fps (1), 24 fps (1), 30 fps (1)" in warned[0]
    assert "0.067 s to 0.250 s" in warned[0]
    kwargs = {"enable_bucket": True, "video_sample_stride": 2, "video_sample_n_frames": 9}
    dataset = ImageVideoDataset(opts.train_data_meta, opts.train_data_dir, **kwargs)
    for index in range(3):
        numbers = [number_of(frame) for frame in dataset[index]["pixel_values"]]
        assert np.diff(numbers).tolist() == [2] * 8


def test_case_37_the_table_shows_sizes_frames_and_enlargement(tmp_path) -> None:
    make_clip(tmp_path / "a.mp4", grey_frames(81, height=480, width=832), options={"g": "100"})
    save_image(tmp_path / "b.png", height=480, width=832)
    rows = [{"file_path": name, "text": "x"} for name in ("a.mp4", "b.png")]
    opts = options(
        write_rows(tmp_path / "m.json", rows),
        image_sample_size=1280,
        video_sample_size=256,
        token_sample_size=632,
        video_sample_n_frames=81,
        training_with_video_token_length=True,
        random_hw_adapt=True,
    )
    summary = build_data(opts).summary()
    clip = next(group for group in summary.groups if group.kind == "video")
    assert {(o.height, o.width, o.frames) for o in clip.outcomes} == {
        (192, 336, 81), (288, 496, 81), (384, 672, 81), (480, 832, 77), (576, 1008, 53)
    }  # fmt: skip
    assert max(o.scale for o in clip.outcomes) == pytest.approx(1.212, abs=0.01)
    lines = summary.lines()
    assert any("576x1008x53 (x1.21)" in line for line in lines)
    assert any("may be enlarged, up to x2" in line and "image 480x832" in line for line in lines)
