"""What the step does to a batch, and the geometry of a batch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from videox_fun.data.collate import BucketCollate, CollateRules, PlainCollate
from videox_fun.data.fields import CameraField, ControlField, InpaintField, ReferenceField, SubjectField
from videox_fun.data.geometry import candidate_sizes, downsample_ratios, first_heavy, nearest_heavy
from videox_fun.data.step_ops import auto_tile_batch, keep_all_node_same_token_length, random_frame_crop
from videox_fun.data.transforms import center_crop, prepare_frames


def batch_of(frames: int, *, size: int = 2, height: int = 16, width: int = 16) -> dict:
    pixels = torch.arange(size * frames, dtype=torch.float32).view(size, frames, 1, 1, 1)
    return {
        "pixel_values": pixels.expand(size, frames, 3, height, width),
        "mask": torch.ones(1).expand(size, frames, 1, height, width),
        "control_camera_values": torch.zeros(1).expand(size, frames, 6, height, width),
        "ref_pixel_values": torch.zeros(1).expand(size, 1, 3, height, width),
        "clip_idx": torch.arange(size),
        "text": [f"t{number}" for number in range(size)],
        "target_token_length": 4096,
    }


@pytest.mark.parametrize(("frames", "times"), [(33, 1), (16, 2), (8, 2), (4, 4), (1, 4)])
def test_small_batches_are_tiled(frames, times) -> None:
    batch = batch_of(frames)
    tiled = auto_tile_batch(batch, n_frames=64, token_sample_size=16)  # budget 64 frames of 16 x 16
    assert tiled["pixel_values"].shape[0] == 2 * times
    assert tiled["text"] == batch["text"] * times
    assert torch.equal(tiled["clip_idx"], batch["clip_idx"].repeat(times))
    assert torch.equal(tiled["pixel_values"][:2], batch["pixel_values"])
    assert tiled["target_token_length"] == 4096


def test_frame_crop_keeps_pixel_frames_by_default_and_latent_count_in_compat() -> None:
    """Q-09: of 17 frames upstream keeps 5 where 17 were drawn."""
    counts: dict[bool, Counter] = {False: Counter(), True: Counter()}
    for seed in range(200):
        for compat in counts:
            rng = np.random.default_rng(seed)
            cut = random_frame_crop(batch_of(17), rng=rng, n_frames=17, upstream_compat=compat)
            counts[compat][cut["pixel_values"].shape[1]] += 1
            assert cut["mask"].shape[1] == cut["pixel_values"].shape[1]
            assert cut["ref_pixel_values"].shape[1] == 1
            camera = cut["control_camera_values"].shape[1]
            assert camera == (17 if compat else cut["pixel_values"].shape[1])
    assert set(counts[False]) == {5, 9, 13, 17} and set(counts[True]) == {2, 3, 4, 5}
    assert counts[False][17] == counts[True][5] > 150  # the same draws, the longest in nine of ten
    single = random_frame_crop(batch_of(5), rng=np.random.default_rng(0), n_frames=5)
    assert single["pixel_values"].shape[1] == 5
    assert random_frame_crop(batch_of(3), rng=np.random.default_rng(0), n_frames=1)["pixel_values"].shape[1] == 1


def test_same_token_length_on_all_ranks() -> None:
    # sizes 256, 384 and 500 give 256^2 * 33 / (512 * 400) = 10.6, 23.8 and 40.3 frames
    for compat, expected in ((False, {9, 21, 33}), (True, {3, 6, 9})):
        seen = set()
        for seed in range(60):
            cut = keep_all_node_same_token_length(
                batch_of(33, height=512, width=400),
                index_rng=np.random.default_rng(seed),
                n_frames=33,
                token_sample_size=500,
                upstream_compat=compat,
            )
            seen.add(cut["pixel_values"].shape[1])
        assert seen == expected


# ---- geometry --------------------------------------------------------------------------------------------------------
def test_choices_and_probabilities() -> None:
    assert downsample_ratios(1280, [5.0]) == [1, 1.25, 1.5, 2, 5.0]
    assert downsample_ratios(256, [4.0]) == [1]
    assert first_heavy(4, 0.9) == pytest.approx([0.9, 1 / 30, 1 / 30, 1 / 30]) and first_heavy(1, 0.9) == [1.0]
    assert nearest_heavy([256, 384, 512], 400) == [0.25, 0.5, 0.25]
    assert candidate_sizes([256, 384, 512], 400) == [256, 384]
    assert candidate_sizes([256, 384], 100) == [256, 384]


def example(frames: int = 9, *, height: int = 40, width: int = 60, **extra) -> dict:
    rng = np.random.default_rng(frames)
    pixels = rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    return {"pixel_values": pixels, "text": "x", "data_type": "video", "idx": 0, **extra}


def collate(fields=(), **rules) -> BucketCollate:
    base = {"video_sample_size": 64, "image_sample_size": 64, "token_sample_size": 64, "n_frames": 9}
    return BucketCollate(CollateRules(**{**base, **rules}), rng=np.random.default_rng(0), fields=fields)


def test_frames_are_cut_to_the_shortest_legal_length() -> None:
    batch = collate()([example(9), example(7)])
    assert batch["pixel_values"].shape[:2] == (2, 5)
    assert collate(n_frames=33)([example(33)])["pixel_values"].shape[1] == 33
    assert collate()([example(3)])["pixel_values"].shape[1] == 1
    assert batch["target_token_length"] == 9 * 64 * 64


@pytest.mark.parametrize("quantum", [16, 32])
def test_sizes_are_multiples_of_the_quantum(quantum) -> None:
    batch = collate(video_sample_size=128, size_quantum=quantum)([example()])
    assert batch["pixel_values"].shape[-2:] == ((96, 144) if quantum == 16 else (96, 128))
    fixed = collate(fix_sample_size=(100, 70), size_quantum=quantum)([example()])
    assert fixed["pixel_values"].shape[-2:] == ((96, 64))


def test_ratio_crop_draws_from_the_step_generator() -> None:
    make = collate(random_ratio_crop=True, video_sample_size=512)
    first = [tuple(make([example(1)])["pixel_values"].shape[-2:]) for _ in range(6)]
    make.rng = np.random.default_rng(0)
    assert [tuple(make([example(1)])["pixel_values"].shape[-2:]) for _ in range(6)] == first
    assert len(set(first)) > 1


def test_fields_add_aligned_tensors() -> None:
    control = np.full((9, 20, 30, 3), 255, np.uint8)  # another size than the target
    poses = torch.tensor([[0, 0.5, 0.9, 0.5, 0.5, 0, 0, 1, 0, 0, 0.1 * i, 0, 1, 0, 0, 0, 0, 1, 0] for i in range(9)])
    subjects = np.zeros((2, 40, 60, 3), np.uint8)
    fields = [ControlField(), CameraField(), ReferenceField(first_frame=False), InpaintField(image_start_only=True),
              SubjectField()]  # fmt: skip
    examples = [
        example(control_pixel_values=control, control_camera_values=poses, subject_image=subjects),
        example(control_pixel_values=control, control_camera_values=None, subject_image=None),
    ]
    np.random.seed(0)
    batch = collate(fields, random_ratio_crop=True)(examples)
    _, _, _, height, width = batch["pixel_values"].shape
    assert batch["control_pixel_values"].shape == batch["pixel_values"].shape
    assert (batch["control_pixel_values"] == 1).all()
    assert batch["control_camera_values"].shape == (2, 9, 6, height, width)
    assert batch["control_camera_values"][0].any() and not batch["control_camera_values"][1].any()
    assert torch.equal(batch["mask_pixel_values"], batch["pixel_values"] * (1 - batch["mask"]))
    for row, index in enumerate(batch["clip_idx"].tolist()):
        assert torch.equal(batch["ref_pixel_values"][row, 0], batch["pixel_values"][row, index])
    assert batch["subject_images"].shape == (2, 4, 3, height, width)
    assert batch["subject_flags"].tolist() == [[1, 1, 0, 0], [0, 0, 0, 0]]
    assert (batch["subject_images"][0, 2:] == -1).all()


def test_references_prefer_the_first_frame() -> None:
    np.random.seed(0)
    counts = Counter(ReferenceField.draw_index(9) for _ in range(600))
    assert 0.33 < counts[0] / 600 < 0.47 and len(counts) == 9


def test_plain_collate_cuts_and_stacks() -> None:
    items = [{"pixel_values": torch.zeros(frames, 3, 8, 8), "text": str(frames), "subject_image": None}
             for frames in (9, 8)]  # fmt: skip
    batch = PlainCollate()(items)
    assert batch["pixel_values"].shape == (2, 5, 3, 8, 8) and batch["text"] == ["9", "8"]
    assert "subject_image" not in batch
    assert PlainCollate(upstream_compat=True)(items[1:])["pixel_values"].shape[1] == 8


def test_blocks_of_frames_do_not_show() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (37, 30, 50, 3), dtype=np.uint8)
    whole = prepare_frames(frames, resize_to=(20, 34), crop_to=(16, 32))
    single = torch.cat([prepare_frames(frame[None], resize_to=(20, 34), crop_to=(16, 32)) for frame in frames])
    assert torch.equal(whole, single) and whole.abs().max() <= 1


def test_crop_offsets_round_half_to_even() -> None:
    ramp = torch.arange(7.0).view(1, 1, 1, 7)
    assert center_crop(ramp, height=1, width=4).flatten().tolist() == [2, 3, 4, 5]  # offset 1.5 becomes 2
    assert center_crop(ramp, height=1, width=2).flatten().tolist() == [2, 3]  # offset 2.5 becomes 2
    assert center_crop(torch.ones(1, 1, 2, 2), height=4, width=4).sum() == 4
