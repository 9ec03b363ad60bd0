"""Reading clips and pictures: exact frames, rotation, damaged files, transparency."""

from __future__ import annotations

import os
import struct
import sys

import av
import numpy as np
import pytest
from PIL import Image

from tests.unit.data_kit import grey_frames, make_clip, number_of
from videox_fun.data.decode import DecodeError, VideoReader, image_size, load_image, media_kind
from videox_fun.data.probe import decode_in_own_process, probe_media
from videox_fun.data.resize import resize_bilinear, resize_frame, short_side_size
from videox_fun.data.utils import VideoReader_contextmanager, get_video_reader_batch, padding_image

HAS_H264 = "libx264" in av.codecs_available
B_FRAMES = {"bf": "3", "g": "12", "sc_threshold": "0", "x264-params": "scenecut=0:open-gop=1:b-adapt=0"}


def _moving(count: int, *, height: int = 48, width: int = 64) -> np.ndarray:
    """Frames with a bright bar that moves, so that prediction between frames matters."""
    frames = grey_frames(count, height=height, width=width).copy()
    for number in range(count):
        left = (3 * number) % (width - 8)
        frames[number, 4:12, left : left + 8] = 250
    return frames


@pytest.mark.parametrize(
    ("suffix", "codec", "options"),
    [
        (".mp4", "mpeg4", {}),
        (".mp4", "mpeg4", {"bf": "2", "g": "10"}),
        (".avi", "mpeg4", {"g": "8"}),
        (".mkv", "mpeg4", {"bf": "2", "g": "9"}),
        (".mov", "mjpeg", {}),
        pytest.param(
            ".mp4", "libx264", B_FRAMES, marks=pytest.mark.skipif(not HAS_H264, reason="this PyAV has no libx264")
        ),
        pytest.param(
            ".mkv", "libx264", B_FRAMES, marks=pytest.mark.skipif(not HAS_H264, reason="this PyAV has no libx264")
        ),
    ],
)
def test_random_access_equals_reading_from_the_start(tmp_path, suffix, codec, options) -> None:
    pictures = _moving(50)
    if codec == "mjpeg":
        path = tmp_path / f"clip{suffix}"
        with av.open(str(path), "w") as out:
            stream = out.add_stream("mjpeg", rate=24)
            stream.height, stream.width, stream.pix_fmt = 48, 64, "yuvj420p"
            for picture in pictures:
                out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            out.mux(stream.encode())
    else:
        path = make_clip(tmp_path / f"clip{suffix}", pictures, codec=codec, options=options)
    with av.open(str(path)) as container:
        expected = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    with VideoReader(path) as reader:
        assert len(reader) == len(expected) == 50
        for indices in ([49], [0, 1, 2], [13, 27, 41], list(range(30, 47, 2)), [11, 12, 13], [5, 5, 4]):
            assert np.array_equal(reader.read(indices), np.stack([expected[index] for index in indices])), indices


def test_transform_runs_per_frame_and_times_are_known(tmp_path) -> None:
    path = make_clip(tmp_path / "a.mp4", 20, fps=10)
    with VideoReader(path) as reader:
        small = reader.read(range(0, 20, 4), transform=lambda frame: frame[:8, :8])
        assert small.shape == (5, 8, 8, 3)
        assert [number_of(frame) for frame in small] == [0, 4, 8, 12, 16]
        assert reader.fps == pytest.approx(10)
        assert reader.times == pytest.approx([number / 10 for number in range(20)])


def test_index_out_of_bounds_names_the_file(tmp_path) -> None:
    path = make_clip(tmp_path / "short.mp4", 5)
    with VideoReader(path) as reader, pytest.raises(DecodeError, match=r"short\.mp4: frames \[7\].* 5 frames"):
        reader.read([1, 7])


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts /proc/self/fd")
def test_files_are_closed_on_success_and_on_error(tmp_path) -> None:
    path = make_clip(tmp_path / "a.mp4", 6)
    text = tmp_path / "text.mp4"
    text.write_text("this is not a video")
    before = _open_files()
    for _ in range(3):
        with VideoReader(path) as reader:
            reader.read([2])
        with pytest.raises(DecodeError), VideoReader(text):
            pass
        with pytest.raises(RuntimeError), VideoReader_contextmanager(path, num_threads=1) as reader:
            raise RuntimeError
    assert _open_files() == before
    with pytest.raises(DecodeError, match="closed"):
        reader.read([0])


def test_reading_is_bounded_in_time(tmp_path) -> None:
    path = make_clip(tmp_path / "a.mp4", 6)
    with VideoReader(path) as reader:
        reader.timeout = -1.0
        with pytest.raises(TimeoutError, match=r"a\.mp4.*longer than"):
            reader.read([5])


def test_public_reader_helpers(tmp_path) -> None:
    path = make_clip(tmp_path / "a.mp4", 9)
    with VideoReader_contextmanager(path, num_threads=2) as reader:
        assert len(reader) == 9
        frames = get_video_reader_batch(reader, [0, 8])
    assert [number_of(frame) for frame in frames] == [0, 8]


@pytest.mark.skipif(
    not hasattr(av.VideoStream, "set_display_rotation"), reason="this PyAV cannot write rotation metadata"
)
@pytest.mark.parametrize("angle", [90, -90, 180])
def test_rotation_metadata_is_applied(tmp_path, angle) -> None:
    pictures = np.zeros((4, 32, 64, 3), np.uint8)
    pictures[:, :, :32, 0] = 255  # left half red, right half blue
    pictures[:, :, 32:, 2] = 255
    path = make_clip(tmp_path / "turned.mp4", pictures, rotation=angle)
    with VideoReader(path, apply_rotation=False) as reader:
        assert reader.size == (32, 64)
    with VideoReader(path) as reader:
        frame = reader.read([2])[0]
        assert reader.size == frame.shape[:2]
    expected = np.rot90(pictures[0], k=angle // 90)
    assert frame.shape == expected.shape
    assert np.abs(frame.astype(int) - expected).mean() < 12  # chroma bleeds at the edge
    info = probe_media(path, kind="video")
    assert (info.height, info.width) == expected.shape[:2]
    upstream = probe_media(path, kind="video", upstream_compat=True)
    assert (upstream.height, upstream.width) == (32, 64)


# ---- damaged files ---------------------------------------------------------------------------------------------------
def test_case_09_frames_are_counted_not_computed_from_the_duration(tmp_path) -> None:
    """89 frames at 16 fps last 5.5625 s; a duration rounded to 5.56 s would give 88.96 frames."""
    for suffix in (".mp4", ".mkv"):
        path = make_clip(tmp_path / f"clip{suffix}", 89, fps=16)
        with VideoReader(path) as reader:
            assert len(reader) == 89
            assert number_of(reader.read([88])[0]) == 88 % 56
        assert probe_media(path, kind="video").frames == 89


def test_case_11_header_count_of_one_is_not_believed(tmp_path) -> None:
    path = make_clip(tmp_path / "clip.avi", 40)
    content = bytearray(path.read_bytes())
    at = content.index(b"avih") + 8 + 16  # dwTotalFrames of the main header
    assert struct.unpack_from("<I", content, at)[0] == 40
    struct.pack_into("<I", content, at, 1)
    at = content.index(b"strh") + 8 + 32  # dwLength of the stream header
    struct.pack_into("<I", content, at, 1)
    path.write_bytes(bytes(content))
    with VideoReader(path) as reader:
        assert reader.header_frames == 1
        assert len(reader) == 40
        assert number_of(reader.read([39])[0]) == 39
    info = probe_media(path, kind="video")
    assert (info.frames, info.suspect) == (40, True)


def test_case_11_suspect_clip_is_decoded_where_a_crash_hurts_nobody(tmp_path, monkeypatch) -> None:
    path = make_clip(tmp_path / "clip.mp4", 12)
    assert decode_in_own_process(path) == 12
    crashing = make_clip(tmp_path / "crash.mp4", 12)
    monkeypatch.setattr(
        "videox_fun.data.probe._CHILD", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    )
    with pytest.raises(DecodeError, match=r"crash\.mp4: the decoder crashes on this file \(signal 11\)"):
        decode_in_own_process(crashing)


@pytest.mark.parametrize("share", [0.4, 0.6, 0.9])
def test_cut_off_clip_is_refused_by_name(tmp_path, share) -> None:
    whole = make_clip(tmp_path / "whole.mp4", _moving(60), options={"movflags": "faststart"}).read_bytes()
    path = tmp_path / "cut.mp4"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(DecodeError, match=r"cut\.mp4"):
        probe_media(path, kind="video")


def test_file_without_video_stream_and_missing_file(tmp_path) -> None:
    audio = tmp_path / "audio.mp4"
    with av.open(str(audio), "w") as out:
        stream = out.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        out.mux(stream.encode(frame))
        out.mux(stream.encode())
    with pytest.raises(DecodeError, match=r"audio\.mp4: no video stream"):
        VideoReader(audio)
    with pytest.raises(FileNotFoundError, match=r"absent\.mp4"):
        VideoReader(tmp_path / "absent.mp4")
    (tmp_path / "empty.mp4").write_bytes(b"")
    with pytest.raises(DecodeError, match=r"empty\.mp4: the file is empty"):
        probe_media(tmp_path / "empty.mp4", kind="video")


# ---- pictures --------------------------------------------------------------------------------------------------------
def _corners(array: np.ndarray) -> list[str]:
    names = {(1, 0, 0): "red", (0, 1, 0): "green", (0, 0, 1): "blue", (1, 1, 0): "yellow"}
    places = ((2, 2), (2, -3), (-3, 2), (-3, -3))
    return [names[tuple((array[place] > 127).astype(int).tolist())] for place in places]


def test_case_04_orientation_tag_turns_the_picture(tmp_path) -> None:
    stored = np.zeros((20, 40, 3), np.uint8)
    stored[:10, :20], stored[:10, 20:] = (255, 0, 0), (0, 255, 0)
    stored[10:, :20], stored[10:, 20:] = (0, 0, 255), (255, 255, 0)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown a quarter turn clockwise
    path = tmp_path / "photo.jpg"
    Image.fromarray(stored).save(path, quality=95, exif=exif)
    shown = np.asarray(load_image(path))
    assert shown.shape == (40, 20, 3)
    assert _corners(shown) == ["blue", "red", "yellow", "green"]
    assert image_size(path) == (40, 20)
    info = probe_media(path, kind="image")
    assert (info.height, info.width) == (40, 20)
    assert np.asarray(load_image(path, upstream_compat=True)).shape == (20, 40, 3)
    assert image_size(path, upstream_compat=True) == (20, 40)


def test_case_05_transparency_is_composited_over_white(tmp_path) -> None:
    pixels = np.zeros((8, 16, 4), np.uint8)
    pixels[:, :8] = (100, 100, 100, 255)
    pixels[:, 8:] = (255, 0, 0, 0)
    Image.fromarray(pixels, "RGBA").save(tmp_path / "alpha.png")
    shown = np.asarray(load_image(tmp_path / "alpha.png"))
    assert (shown[:, :8] == 100).all() and (shown[:, 8:] == 255).all()
    control = np.asarray(load_image(tmp_path / "alpha.png", background=(0, 0, 0)))
    assert (control[:, 8:] == 0).all()
    assert tuple(np.asarray(load_image(tmp_path / "alpha.png", upstream_compat=True))[0, 15]) == (255, 0, 0)

    palette = Image.new("P", (16, 8), 1)
    palette.putpalette([255, 0, 0, 100, 100, 100] + [0] * 750)
    palette.paste(0, (8, 0, 16, 8))
    palette.save(tmp_path / "palette.png", transparency=0)
    shown = np.asarray(load_image(tmp_path / "palette.png"))
    assert (shown[:, :8] == 100).all() and (shown[:, 8:] == 255).all()


def test_sixteen_bit_grey_picture_is_scaled(tmp_path) -> None:
    Image.fromarray(np.full((4, 4), 40000, np.uint16)).save(tmp_path / "deep.png")
    assert set(np.asarray(load_image(tmp_path / "deep.png")).ravel()) == {40000 >> 8}


def test_kind_by_extension() -> None:
    assert [media_kind(name) for name in ("a.MP4", "b.Png", "c.txt", "d")] == ["video", "image", None, None]


# ---- resizing --------------------------------------------------------------------------------------------------------
def test_resize_of_known_values() -> None:
    ramp = np.arange(0, 64, dtype=np.uint8).reshape(1, 64, 1).repeat(8, 0).repeat(3, 2) * 4
    half = resize_bilinear(ramp, height=4, width=32)
    assert half.shape == (4, 32, 3)
    assert (half[0, :, 0] == np.arange(32) * 8 + 2).all()  # the mean of two neighbours
    double = resize_bilinear(ramp, height=8, width=128)
    assert (double[0, 1:5, 0] == [1, 3, 5, 7]).all()  # a quarter and three quarters between 0, 4, 8
    flat = np.full((33, 57, 3), 137, np.uint8)
    assert (resize_bilinear(flat, height=17, width=100) == 137).all()
    assert resize_bilinear(flat, height=33, width=57) is flat


def test_short_side_never_grows() -> None:
    frame = np.zeros((30, 50, 3), np.uint8)
    assert resize_frame(frame, 64) is frame
    assert resize_frame(frame, 15).shape == (15, 25, 3)
    assert short_side_size(1080, 1920, 512) == (512, 910)


def test_padding_keeps_aspect_on_white() -> None:
    padded = np.asarray(padding_image(Image.new("RGB", (10, 20), (0, 0, 0)), 40, 40))
    assert padded.shape == (40, 40, 3)
    assert (padded[:, 10:30] == 0).all()
    assert (padded[:, :10] == 255).all() and (padded[:, 30:] == 255).all()
