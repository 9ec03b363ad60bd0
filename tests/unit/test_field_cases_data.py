"""Faults that people met with their data, given to the training script itself."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from unittest import mock

import av
import numpy as np
import pytest
from PIL import Image

from tests.unit.data_kit import grey_frames, make_clip, save_image, write_rows
from tests.unit.real_runs import LORA, RealRun, checkpoint, command, refusal, set_up, train
from videox_fun.recipes.wan import WanRecipe
from videox_fun.training import entry


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory)


def of_rows(folder: Path, rows: list[dict], name: str = "m.json") -> dict:
    """Flags that train on ``rows`` with files in ``folder``; captions stay."""
    return {"train_data_dir": folder, "train_data_meta": write_rows(folder / name, rows), "text_drop_ratio": 0}


def flat(level: int, frames: int, *, height: int = 32, width: int = 64) -> np.ndarray:
    return np.full((frames, height, width, 3), level, np.uint8)


def levels(run: RealRun) -> list[int]:
    """Mean brightness of each batch, in 0 to 255."""
    return [round((float(pixels.mean()) + 1) / 2 * 255) for pixels in run.pixels]


def test_case_01_rows_without_sizes_train_as_rows_with_them(model: Path, tmp_path: Path) -> None:
    rows = []
    for number, (height, width) in enumerate([(32, 64), (64, 32)]):
        make_clip(tmp_path / f"{number}.mp4", grey_frames(9, height=height, width=width))
        rows.append({"file_path": f"{number}.mp4", "text": "x", "type": "video", "width": width, "height": height})
    save_image(tmp_path / "b.png", height=32, width=64)
    rows.append({"file_path": "b.png", "text": "y", "type": "image", "width": 64, "height": 32})
    bare = [{key: row[key] for key in ("file_path", "text", "type")} for row in rows]
    mixed = [rows[0], bare[1], rows[2]]
    runs = [train(model, tmp_path / f"out{number}", max_train_steps=3, **of_rows(tmp_path, kind, f"{number}.json"))
            for number, kind in enumerate((rows, bare, mixed))]
    assert sorted(runs[0].rows) == [[0], [1], [2]]
    for run in runs[1:]:
        assert run.rows == runs[0].rows and run.losses == runs[0].losses


def test_case_02_the_decoded_frame_wins_over_the_manifest(model: Path, tmp_path: Path, caplog) -> None:
    pictures = flat(0, 9)
    pictures[:, :, :21, 0], pictures[:, :, 43:, 2] = 255, 255
    make_clip(tmp_path / "a.mp4", pictures)
    row = {"file_path": "a.mp4", "text": "x", "type": "video", "width": 32, "height": 64}
    with caplog.at_level(logging.INFO):
        run = train(model, tmp_path / "out", max_train_steps=1, **of_rows(tmp_path, [row]))
    first = run.pixels[0][0, 0]
    assert first.shape[2] > first.shape[1]
    assert first[0, :, :4].mean() > 0.5 and first[2, :, -4:].mean() > 0.5
    assert "row 1 (a.mp4): metadata 32x64, file 64x32" in caplog.text


def test_case_04_pictures_train_as_a_viewer_shows_them(model: Path, tmp_path: Path) -> None:
    stored = np.zeros((20, 40, 3), np.uint8)
    stored[:10, :20], stored[:10, 20:], stored[10:, :20] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown a quarter turn clockwise
    Image.fromarray(stored).save(tmp_path / "photo.jpg", quality=95, exif=exif)
    rows = of_rows(tmp_path, [{"file_path": "photo.jpg", "text": "x", "type": "image"}])
    pixels = train(model, tmp_path / "out", max_train_steps=1, **rows).pixels[0][0, 0]
    assert pixels.shape[1] > pixels.shape[2]
    corners = [pixels[:, y, x].argmax().item() for y, x in ((2, 2), (2, -3), (-3, -3))]
    assert corners == [2, 0, 1]  # blue, red and green, in the viewer's order
    sideways = train(model, tmp_path / "compat", max_train_steps=1, upstream_compat=True, **rows).pixels[0][0, 0]
    assert sideways.shape[1] < sideways.shape[2]


def test_case_05_hidden_colours_of_transparent_pictures_do_not_train(model: Path, tmp_path: Path) -> None:
    picture = np.zeros((32, 64, 4), np.uint8)
    picture[:, :32], picture[:, 32:] = (100, 100, 100, 255), (255, 0, 0, 0)
    Image.fromarray(picture, "RGBA").save(tmp_path / "alpha.png")
    row = {"file_path": "alpha.png", "text": "x", "type": "image"}
    pixels = train(model, tmp_path / "out", max_train_steps=1, **of_rows(tmp_path, [row])).pixels[0][0, 0]
    half = pixels.shape[2] // 2
    assert pixels[:, :, half + 4:].min() > 0.95  # white in all three channels
    assert abs(float(pixels[:, :, :half - 4].mean()) - (100 / 127.5 - 1)) < 0.02


def test_case_06_captions_stay_with_their_clips(model: Path, tmp_path: Path, caplog) -> None:
    """B is shorter than asked for and trains with what it has; what cannot be read is dropped with its caption."""
    rows = []
    for number, (name, length) in enumerate([("A", 33), ("B", 25), ("C", 33)]):
        make_clip(tmp_path / f"{name}.mp4", flat(40 + 60 * number, length))
        rows.append({"file_path": f"{name}.mp4", "text": name, "type": "video"})
    (tmp_path / "D.mp4").write_bytes(b"")
    rows.insert(1, {"file_path": "D.mp4", "text": "D", "type": "video"})
    with caplog.at_level(logging.INFO):
        run = train(model, tmp_path / "out", max_train_steps=6, video_sample_stride=4, video_sample_n_frames=9,
                    **of_rows(tmp_path, rows))
    pairs = {(round((level - 40) / 60), text) for level, (text,) in zip(levels(run), run.texts, strict=True)}
    assert pairs == {(0, "A"), (1, "B"), (2, "C")}
    assert {pixels.shape[1] for pixels in run.pixels} == {5, 9}
    assert "3 kept, 1 dropped" in caplog.text and "D.mp4: the file is empty" in caplog.text
    assert "B.mp4 gives 7" in caplog.text


def broken_set(folder: Path) -> list[dict]:
    make_clip(folder / "good.mp4", 12)
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "text.mp4").write_text("not a video")
    whole = make_clip(folder / "whole.mp4", 40).read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: int(len(whole) * 0.6)])
    with av.open(str(folder / "sound.mp4"), "w") as out:
        stream = out.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
        frame.rate = 16000
        out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return [{"file_path": f"{name}.mp4", "text": name, "type": "video", "width": 64, "height": 32}
            for name in ("good", "empty", "text", "cut", "sound")]


def test_case_12_bad_videos_are_named_once_and_the_good_one_trains(model: Path, tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.INFO):
        run = train(model, tmp_path / "out", max_train_steps=10, video_sample_n_frames=1,
                    **of_rows(tmp_path, broken_set(tmp_path)))
    assert run.texts == [["good"]] * 10
    for name in ("empty", "text", "cut", "sound"):
        assert sum(f"{name}.mp4" in record.getMessage() for record in caplog.records) == 1
    assert "1 kept, 4 dropped" in caplog.text


def test_case_12_a_set_without_one_good_video_ends_at_once(model: Path, tmp_path: Path, caplog, capsys) -> None:
    words = command(LORA, model, tmp_path / "out", **of_rows(tmp_path, broken_set(tmp_path)[1:]))
    with mock.patch.object(WanRecipe, "load", side_effect=AssertionError("weights were read")):
        with mock.patch.object(entry, "_configure_logging"):
            assert entry.main(LORA, words) == entry.EXIT_USAGE
    assert "no row is usable" in caplog.text and "sound.mp4" in caplog.text


@pytest.mark.parametrize(("size", "says"), [
    ({"width": 64, "height": 32}, ("none of the 1 video row(s) can be read", "a.mp4: cannot be opened")),
    ({}, ("gave no batch", "no file can be read any more")),
])
def test_case_12_videos_that_break_later_end_the_run(size, says, model: Path, tmp_path: Path, caplog) -> None:
    make_clip(tmp_path / "a.mp4", 12)
    rows = of_rows(tmp_path, [{"file_path": "a.mp4", "text": "x", **size}])
    words = command(LORA, model, tmp_path / "out", **rows)
    load = WanRecipe.load

    def breaking(self, ctx):
        (tmp_path / "a.mp4").write_bytes(b"")
        return load(self, ctx)

    with mock.patch.object(WanRecipe, "load", breaking), mock.patch.object(entry, "_configure_logging"):
        assert entry.main(LORA, words) == entry.EXIT_FAILED
    assert all(part in caplog.text for part in says)


def test_case_21_wrong_keys_are_named_before_weights_load(model: Path, tmp_path: Path) -> None:
    rows = of_rows(tmp_path, [{"filepath": "a.png", "caption": "x"}])
    with mock.patch.object(WanRecipe, "load", side_effect=AssertionError("weights were read")):
        said = refusal(model, tmp_path / "out", **rows)
    assert "row 1: the key 'file_path' is missing; found 'filepath', rename it to 'file_path'" in said
    assert "row 1: the key 'text' is missing; found 'caption', rename it to 'text'" in said


def test_case_37_sizes_that_will_really_be_used_are_shown(model: Path, tmp_path: Path, caplog) -> None:
    make_clip(tmp_path / "a.mp4", grey_frames(81, height=480, width=832), options={"g": "100"})
    save_image(tmp_path / "b.png", height=480, width=832)
    rows = [{"file_path": name, "text": "x"} for name in ("a.mp4", "b.png")]
    with caplog.at_level(logging.INFO):
        set_up(model, tmp_path / "out", image_sample_size=1280, video_sample_size=256, token_sample_size=632,
               video_sample_stride=1, video_sample_n_frames=81, training_with_video_token_length=True,
               random_hw_adapt=True, **of_rows(tmp_path, rows))
    assert re.search(r"video 480x832, 81 frame\(s\).* -> 192x336x81.*576x1008x53 \(x1\.21\)", caplog.text)
    assert "may be enlarged, up to x2" in caplog.text


def test_case_22_and_23_a_still_trains_in_either_mode(model: Path, tmp_path: Path, tmp_path_factory) -> None:
    """A png listed as a video becomes a clip of one frame; with an image-to-video model it gets mask and condition."""
    save_image(tmp_path / "test.png", height=64, width=64)
    (tmp_path / "m.csv").write_text('file_path,text,type\ntest.png,"dog",video\n', encoding="utf-8")
    rows = {"train_data_dir": tmp_path, "train_data_meta": tmp_path / "m.csv", "max_train_steps": 1}
    run = train(model, tmp_path / "a", **rows)
    assert tuple(run.pixels[0].shape) == (1, 1, 3, 64, 64)
    conditioned = train(checkpoint(tmp_path_factory, "ckpt_inp"), tmp_path / "b", train_mode="inpaint", **rows)
    assert tuple(conditioned.inputs[0]["y"].shape) == (1, 20, 1, 8, 8)


def test_case_28_a_misspelt_annotation_file_shows_its_neighbours(model: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "metadata.json").write_text(json.dumps([]))
    with pytest.raises(SystemExit) as caught:
        set_up(model, tmp_path / "out", train_data_meta=tmp_path / "metadata.jsn", train_data_dir=tmp_path)
    assert caught.value.code == 2 and "metadata.json" in capsys.readouterr().err
