"""Picture and video helpers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import videox_fun.utils as utils
from videox_fun.utils.color import color_transfer, lab_to_rgb, rgb_to_lab
from videox_fun.utils.suggest import describe_missing, near_paths, nearest
from videox_fun.utils.utils import (
    calculate_dimensions,
    filter_kwargs,
    get_image_latent,
    get_image_to_video_latent,
    get_video_to_video_latent,
    get_width_and_height_from_image_and_base_resolution,
    padding_image,
    read_video,
    save_videos_grid,
)


def test_dimensions_keep_area_and_ratio() -> None:
    assert calculate_dimensions(512 * 512, 1.0) == (512, 512)
    assert calculate_dimensions(512 * 512, 16 / 9) == (672, 384)
    assert calculate_dimensions(512 * 512, 9 / 16) == (384, 672)


def test_base_resolution_gives_height_first(tmp_path: Path) -> None:
    Image.new("RGB", (200, 100)).save(tmp_path / "a.png")
    assert get_width_and_height_from_image_and_base_resolution(tmp_path / "a.png", 100) == (71, 141)


def test_filter_kwargs_reads_the_constructor() -> None:
    class Plain:
        def __init__(self, shift: float = 1.0) -> None:
            self.shift = shift

    assert filter_kwargs(Plain, {"shift": 5.0, "other": 1, "self": 2}) == {"shift": 5.0}
    from diffusers import FlowMatchEulerDiscreteScheduler

    kept = filter_kwargs(FlowMatchEulerDiscreteScheduler, {"shift": 5.0, "scheduler_subpath": None})
    assert kept == {"shift": 5.0}


def test_mp4_round_trip_keeps_size_frames_and_colours(tmp_path: Path) -> None:
    video = torch.zeros(1, 3, 5, 32, 48)
    video[:, 0, :, :, :24] = 1.0
    video[:, 2, :, :, 24:] = 1.0
    save_videos_grid(video * 2 - 1, tmp_path / "new" / "a.mp4", rescale=True)
    frames = read_video(tmp_path / "new" / "a.mp4")
    assert frames.shape == (5, 32, 48, 3)
    assert np.abs(frames[:, :, 4:20].mean(axis=(0, 1, 2)) - [255, 0, 0]).max() < 12
    assert np.abs(frames[:, :, 28:44].mean(axis=(0, 1, 2)) - [0, 0, 255]).max() < 12


def test_odd_sizes_are_padded_not_refused(tmp_path: Path) -> None:
    save_videos_grid(torch.rand(1, 3, 2, 33, 47), tmp_path / "a.mp4")
    assert read_video(tmp_path / "a.mp4").shape == (2, 34, 48, 3)


def test_grid_places_videos_side_by_side(tmp_path: Path) -> None:
    video = torch.stack([torch.full((3, 1, 8, 8), value) for value in (0.2, 0.4, 0.6)])
    save_videos_grid(video, tmp_path / "a.gif", n_rows=2)
    with Image.open(tmp_path / "a.gif") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape == (22, 22, 3)
    assert abs(int(pixels[5, 5, 0]) - 51) <= 2 and abs(int(pixels[5, 15, 0]) - 102) <= 2
    assert abs(int(pixels[15, 5, 0]) - 153) <= 2 and pixels[15, 15, 0] == 0 and pixels[0, 0, 0] == 0


def test_gif_without_imageio_backend(tmp_path: Path) -> None:
    save_videos_grid(torch.rand(1, 3, 3, 8, 8), tmp_path / "a.mp4", imageio_backend=False)
    with Image.open(tmp_path / "a.gif") as picture:
        assert picture.n_frames == 3 and picture.info["duration"] == 100


def test_image_latents_and_white_padding() -> None:
    picture = Image.new("RGB", (20, 10), (255, 0, 0))
    latent = get_image_latent(picture, sample_size=[16, 16])
    assert latent is not None and latent.shape == (1, 3, 1, 16, 16)
    assert torch.equal(latent[0, :, 0, 0, 0], torch.tensor([1.0, 0.0, 0.0]))
    padded = get_image_latent(picture, sample_size=[16, 16], padding=True)
    assert padded is not None and torch.equal(padded[0, :, 0, 0, 0], torch.ones(3))
    assert torch.equal(padded[0, :, 0, 8, 8], torch.tensor([1.0, 0.0, 0.0]))
    assert padding_image(picture, 40, 40).size == (40, 40)
    assert get_image_latent(None, sample_size=[16, 16]) is None


def test_start_and_end_pictures_condition_the_video() -> None:
    red, blue = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 255))
    video, mask, clip = get_image_to_video_latent(red, blue, 5, [8, 8])
    assert video.shape == (1, 3, 5, 8, 8) and clip is not None and clip.getpixel((0, 0)) == (255, 0, 0)
    assert video[0, 0, :, 0, 0].tolist() == [1, 1, 1, 1, 0] and video[0, 2, :, 0, 0].tolist() == [0, 0, 0, 0, 1]
    assert mask[0, 0, :, 0, 0].tolist() == [0, 255, 255, 255, 0]
    several, mask, _ = get_image_to_video_latent([red, blue], None, 4, [8, 8])
    assert mask[0, 0, :, 0, 0].tolist() == [0, 0, 255, 255] and several[0, 2, :, 0, 0].tolist() == [0, 1, 0, 0]
    empty, mask, none = get_image_to_video_latent(None, None, 3, [8, 8])
    assert none is None and not empty.any() and bool((mask == 255).all())
    with pytest.raises(ValueError, match="start picture"):
        get_image_to_video_latent(None, blue, 3, [8, 8])


def test_video_conditions_a_video(tmp_path: Path) -> None:
    save_videos_grid(torch.rand(1, 3, 9, 32, 32), tmp_path / "a.mp4", fps=24)
    mask_picture = Image.new("L", (32, 32), 100)
    mask_picture.paste(255, (0, 0, 16, 32))
    video, mask, ref, clip = get_video_to_video_latent(tmp_path / "a.mp4", 4, [16, 16], fps=12,
                                                       validation_video_mask=mask_picture)
    assert video is not None and video.shape == (1, 3, 4, 16, 16) and 0 <= video.min() and video.max() <= 1
    assert mask is not None and mask[0, 0, :, 0, 0].tolist() == [255] * 4 and mask[0, 0, 0, 0, 15] == 0
    assert ref is None and clip is None
    frames = [np.full((8, 8, 3), value, np.uint8) for value in (0, 51, 102)]
    video, mask, ref, clip = get_video_to_video_latent(frames, 2, [8, 8], ref_image=Image.new("RGB", (8, 8)))
    assert video is not None and video[0, 0, :, 0, 0].tolist() == pytest.approx([0, 0.2])
    assert mask is not None and bool((mask == 255).all()) and ref is not None and clip is not None
    assert len(read_video(tmp_path / "a.mp4", fps=12)) == 5


def test_lab_matches_published_values_and_transfer_moves_statistics() -> None:
    corners = np.array([[[255, 255, 255], [255, 0, 0], [0, 0, 255]]], np.uint8)
    expected = [[100.0, 0.0, 0.0], [53.24, 80.09, 67.20], [32.30, 79.19, -107.86]]
    assert np.allclose(rgb_to_lab(corners)[0], expected, atol=0.02)
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (16, 16, 3)).astype(np.uint8)
    assert np.array_equal(lab_to_rgb(rgb_to_lab(picture)), picture)
    assert np.array_equal(color_transfer(picture, picture), picture)
    grey = rng.integers(100, 120, (16, 16, 1)).repeat(3, axis=2).astype(np.uint8)
    moved = rgb_to_lab(color_transfer(grey, np.roll(grey, 1) + 60))
    assert abs(moved[..., 0].mean() - rgb_to_lab(grey + 60)[..., 0].mean()) < 0.5


def test_public_names_resolve_lazily() -> None:
    assert set(utils.__all__) <= set(dir(utils))
    assert utils.calculate_dimensions is calculate_dimensions
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = utils.no_such_name
    code = "import sys, videox_fun.utils; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_suggestions(tmp_path: Path) -> None:
    assert nearest("inpant", ["normal", "inpaint"]) == "inpaint" and nearest("zzz", ["normal"]) is None
    (tmp_path / "metadata.json").touch()
    (tmp_path / "metadata.csv").touch()
    assert set(near_paths(tmp_path / "metadata.jsn")) == {"metadata.json", "metadata.csv"}
    assert "as far as" in describe_missing(tmp_path / "a" / "b" / "c")
    assert "nothing in its folder" in describe_missing(tmp_path / "qqqqqq")
