"""Datasets of clips with sound, pose and face, and the older ones for clips or pictures only."""

from __future__ import annotations

import logging
from pathlib import Path

import av
import numpy as np
import pytest

import videox_fun.data as data
from tests.unit.data_kit import grey_frames, make_clip, number_of, save_image, write_rows
from videox_fun.data.audio import read_audio
from videox_fun.data.decode import DecodeError

SIZE = {"video_sample_size": 64, "video_sample_stride": 1, "enable_bucket": True, "text_drop_ratio": 0.0}


def make_sound(path: Path, seconds: float, *, rate: int = 44100) -> Path:
    """A ramp from 0 to 0.5 over ``seconds``: the value tells the time. Two channels."""
    ramp = np.linspace(0, 0.5, int(seconds * rate), dtype=np.float32)
    with av.open(str(path), "w") as out:
        stream = out.add_stream("pcm_s16le", rate=rate, layout="stereo")
        for start in range(0, len(ramp), 1024):
            part = (np.stack([ramp[start : start + 1024]] * 2) * 32767).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(part.T.reshape(1, -1), format="s16", layout="stereo")
            frame.rate, frame.pts = rate, start
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


def test_sound_is_mono_and_at_the_right_place(tmp_path) -> None:
    path = make_sound(tmp_path / "a.wav", 4.0)
    sound = read_audio(path, rate=16000, start=1.0, seconds=2.0)
    assert sound.shape == (32000,) and sound.dtype == np.float32
    ideal = np.linspace(0.125, 0.375, 32000)
    assert np.abs(sound - ideal)[100:-100].max() < 2e-3
    with pytest.raises(DecodeError, match=r"a\.wav: 4\.00 s of sound, 5\.00 s are needed"):
        read_audio(path, rate=16000, start=3.0, seconds=2.0)
    with pytest.raises(DecodeError, match="no sound in this file"):
        read_audio(make_clip(tmp_path / "v.mp4", 5), rate=16000)


@pytest.mark.parametrize(("fps", "stride"), [(24, 1), (60, 2), (120, 4)])
def test_speech_and_frames_cover_the_same_time(tmp_path, fps, stride) -> None:
    make_clip(tmp_path / "a.mp4", 50, fps=fps)
    make_sound(tmp_path / "a.wav", 50 / fps)
    meta = write_rows(tmp_path / "m.json", [{"file_path": "a.mp4", "text": "hallo", "audio_path": "a.wav"}])
    dataset = data.VideoSpeechDataset(str(meta), str(tmp_path), video_sample_n_frames=9, **SIZE)
    item = dataset[0]
    numbers = [number_of(frame) for frame in item["pixel_values"]]
    assert np.diff(numbers).tolist() == [stride] * 8 and item["fps"] == pytest.approx(fps / stride)
    assert len(item["audio"]) == round(8 * stride / fps * 16000) and item["sample_rate"] == 16000
    at = item["audio"][0] / 0.5 * 50 / fps
    assert at == pytest.approx(numbers[0] / fps, abs=0.02)


def test_speech_with_control_and_motion(tmp_path, caplog) -> None:
    make_clip(tmp_path / "a.mp4", 40, fps=10)
    make_clip(tmp_path / "c.mp4", grey_frames(40, start=10), fps=10)
    make_sound(tmp_path / "a.wav", 4.0)
    make_sound(tmp_path / "short.wav", 0.2)
    row = {"file_path": "a.mp4", "text": "x", "audio_path": "a.wav", "control_file_path": "c.mp4"}
    rows = [row, {**row, "control_file_path": None}, {**row, "audio_path": "short.wav"}]
    meta = write_rows(tmp_path / "m.json", rows)
    dataset = data.VideoSpeechControlDataset(str(meta), str(tmp_path), video_sample_n_frames=5,
                                             enable_motion_info=True, motion_frames=6, **SIZE)  # fmt: skip
    for _ in range(4):
        item = dataset[0]
        first = number_of(item["pixel_values"][0])
        assert [number_of(frame) for frame in item["control_pixel_values"]] == [first + 10 + n for n in range(5)]
        motion = item["motion_pixel_values"]
        before = [None if (frame == 127.5).all() else number_of(frame) for frame in motion]
        assert before == [n if n >= 0 else None for n in range(first - 6, first)]
    assert not dataset[1]["control_pixel_values"].any()
    with caplog.at_level(logging.WARNING):
        assert dataset[2]["idx"] in (0, 1)
    assert any("short.wav" in record.getMessage() and "of sound" in record.getMessage() for record in caplog.records)
    plain = data.VideoSpeechControlDataset(
        str(meta), str(tmp_path), video_sample_n_frames=5, enable_motion_info=True, motion_frames=60,
        enable_inpaint=True, **{**SIZE, "enable_bucket": False},
    )[0]  # fmt: skip
    assert plain["motion_pixel_values"].shape == (60, 3, 64, 64) and not plain["motion_pixel_values"][0].any()
    assert plain["mask"][0].max() == 0 and plain["mask"][1:].min() == 1


def test_animate_reads_all_parts_at_the_same_frames(tmp_path) -> None:
    for number, name in enumerate(("a", "pose", "face", "bg", "mask")):
        make_clip(tmp_path / f"{name}.mp4", grey_frames(50, start=number))
    save_image(tmp_path / "r.png", height=64, width=64, level=77)
    row = {"file_path": "a.mp4", "text": "x", "control_file_path": "pose.mp4", "face_file_path": "face.mp4"}
    full = {**row, "background_file_path": "bg.mp4", "mask_file_path": "mask.mp4", "ref_file_path": "r.png"}
    meta = write_rows(tmp_path / "m.json", [row, full])
    dataset = data.VideoAnimateDataset(str(meta), str(tmp_path), video_sample_n_frames=5, **SIZE)
    for _ in range(5):
        item = dataset[1]
        first = number_of(item["pixel_values"][0])
        assert 4 <= first <= 40  # the first and last tenth are left out
        keys = ("pixel_values", "control_pixel_values", "face_pixel_values", "background_pixel_values", "mask")
        assert [number_of(item[key][0]) for key in keys] == [first + n for n in range(5)]
    assert item["mask"].shape == (5, 32, 64, 1) and item["clip_pixel_values"].mean() == 77
    bare = dataset[0]
    assert (bare["background_pixel_values"] == 127.5).all() and (bare["mask"] == 255).all()
    assert np.array_equal(bare["ref_pixel_values"][0], bare["pixel_values"][0])
    with pytest.raises(ValueError, match="needs enable_bucket"):
        data.VideoAnimateDataset(str(meta), str(tmp_path))
    with pytest.raises(ValueError, match="row 1: the key 'face_file_path' is missing"):
        gone = [{key: value for key, value in row.items() if key != "face_file_path"}]
        data.VideoAnimateDataset(str(write_rows(tmp_path / "n.json", gone)), str(tmp_path), enable_bucket=True)


def test_clips_and_pictures_only(tmp_path) -> None:
    make_clip(tmp_path / "dir" / "7.mp4", 20)
    save_image(tmp_path / "p.png", height=40, width=60, level=90)
    csv = tmp_path / "w.csv"
    csv.write_text("videoid,name,page_dir\n7,a caption,dir\n")
    clips = data.WebVid10M(str(csv), str(tmp_path), sample_size=32, sample_stride=2, sample_n_frames=4)
    assert clips[0]["pixel_values"].shape == (4, 3, 32, 32) and clips[0]["text"] == "a caption"
    still = data.WebVid10M(str(csv), str(tmp_path), sample_size=32, is_image=True)[0]
    assert still["pixel_values"].shape == (3, 32, 32) and still["data_type"] == "image"
    csv.write_text("videoid,title\n7,x\n")
    with pytest.raises(ValueError, match="row 1 has no 'name'; WebVid has videoid, name, page_dir"):
        data.WebVid10M(str(csv), str(tmp_path))
    meta = write_rows(tmp_path / "p.json", [{"file_path": "p.png", "text": "x"}])
    picture = data.CC15M(str(meta), str(tmp_path), resolution=32)[0]["pixel_values"]
    assert picture.shape == (3, 32, 32) and float(picture.mean()) == pytest.approx(90 / 127.5 - 1, abs=0.01)
    meta = write_rows(tmp_path / "v.json", [{"file_path": "dir/7.mp4", "text": "x"}])
    item = data.VideoDataset(str(meta), str(tmp_path), 32, 2, 4, enable_inpaint=True, text_drop_ratio=0.0)[0]
    assert {"pixel_values", "mask", "mask_pixel_values", "clip_pixel_values", "text", "data_type", "idx"} == set(item)
