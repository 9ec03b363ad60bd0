"""Data tables, masks, poses, decoding and whole batch sequences against recorded reference numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.unit.data_kit import Streams, open_loader, seed_streams
from videox_fun.data import bucket_sampler, geometry
from videox_fun.data.camera import process_pose_file
from videox_fun.data.dataset_image_video import ImageVideoControlDataset, ImageVideoDataset
from videox_fun.data.masks import get_random_mask
from videox_fun.data.module import DataOptions
from videox_fun.data.resize import short_side_size
from videox_fun.data.step_ops import keep_all_node_same_token_length, random_frame_crop

FACTS = Path(__file__).resolve().parents[1] / "data" / "facts"
E2E = Path(__file__).resolve().parents[1] / "data" / "e2e_data"
TABLES = json.loads((FACTS / "data_tables.json").read_text())
BEHAVIOUR = json.loads((FACTS / "dataset_behaviour.json").read_text())
DRAWS = json.loads((FACTS / "draws.json").read_text())


# ---- tables ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["ASPECT_RATIO_512", "ASPECT_RATIO_RANDOM_CROP_512", "ASPECT_RATIO_RANDOM_CROP_PROB"])
def test_ratio_tables(name: str) -> None:
    assert getattr(bucket_sampler, name) == TABLES[name]


@pytest.mark.parametrize("case", TABLES["get_closest_ratio"], ids=lambda case: f"{case['h']}x{case['w']}")
def test_closest_ratio(case: dict) -> None:
    for base in (512, 256, 640, 1024, 64):
        expected = case[str(base)]
        size, ratio = geometry.get_closest_ratio(
            case["h"], case["w"], ratios=geometry.scaled(geometry.ASPECT_RATIO_512, base)
        )
        assert (list(size), ratio) == (expected["closest_size"], expected["closest_ratio"])
        assert list(geometry.floor_to(size, 16)) == expected["int16"]
        assert list(geometry.floor_to(size, 32)) == expected["int32_vae16"]


def test_resize_geometry() -> None:
    for case in TABLES["collate_resize_512"]:
        size, _ = geometry.get_closest_ratio(case["h"], case["w"])
        crop = geometry.floor_to(size, 16)
        assert (list(crop), list(geometry.cover_size(case["h"], case["w"], crop))) == (case["closest"], case["resize"])
    for case in TABLES["resize_frame"]:
        assert list(short_side_size(case["h"], case["w"], case["short"])) == case["out"]


def test_frame_sampling() -> None:
    for case in TABLES["frame_sampling"]:
        frames = geometry.sampled_frames(
            case["video_len"], n_frames=case["n_frames"], stride=case["stride"], upstream_compat=True
        )
        assert frames == case.get("min_sample_n_frames", 0), case
        if frames:
            assert geometry.legal_frames(frames, case["n_frames"] + 4, 4) == case["then_batch_len_4n1"]


def test_frames_per_size() -> None:
    for case in TABLES["length_to_frame_num"]:
        found = geometry.frames_of_sizes(
            geometry.token_sizes(case["video_sample_size"], case["image_sample_size"]),
            token_length=case["n_frames"] * case["token_sample_size"] ** 2,
            n_frames=case["n_frames"],
            temporal_ratio=4,
        )
        assert {str(size): frames for size, frames in found.items()} == case["out"]


# ---- samplers --------------------------------------------------------------------------------------------------------
def _sampler(count: int, seed: int, *, position: int = 0, k_repeat: int = 1) -> bucket_sampler.RandomSampler:
    generator = torch.Generator().manual_seed(seed)
    sampler = bucket_sampler.RandomSampler(range(count), generator=generator, k_repeat=k_repeat)
    sampler._pos_start = position
    return sampler


def test_random_sampler() -> None:
    expected = TABLES["RandomSampler"]
    for key, position in (("n10_seed42", 0), ("n10_seed42_pos4", 4), ("n10_seed42_pos12", 12)):
        sampler = _sampler(10, 42, position=position)
        assert [list(sampler) for _ in expected[key]] == expected[key]
    assert [list(_sampler(5, 42, k_repeat=2))] == expected["k2"]


def test_bucket_samplers() -> None:
    expected = TABLES["AspectRatioBatchImageVideoSampler"]
    rows = expected["dataset"]
    sampler = bucket_sampler.AspectRatioBatchImageVideoSampler(
        _sampler(len(rows), expected["seed"]), rows, expected["batch_size"], drop_last=True
    )
    assert [list(sampler) for _ in range(3)] == expected["epochs"]
    assert len(sampler) == expected["len_attr"]
    leftover = {f"{kind}:{ratio}": items for kind, by in expected["leftover"].items() for ratio, items in by.items()}
    assert sampler.leftovers == leftover
    plain = bucket_sampler.ImageVideoSampler(_sampler(len(rows), 0), rows, 2)
    assert [list(plain) for _ in range(2)] == TABLES["ImageVideoSampler"]["epochs"]


# ---- masks and poses -------------------------------------------------------------------------------------------------
def test_random_masks() -> None:
    packed = np.load(FACTS / "random_masks.npz")
    for case in TABLES["random_mask_cases"]:
        seed_streams(case["seed"])
        mask = get_random_mask(tuple(case["shape"]))
        assert mask.dtype == torch.uint8
        expected = np.unpackbits(packed[case["key"]])[: mask.numel()].reshape(mask.shape)
        assert np.array_equal(mask.numpy(), expected), case["key"]


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5, 9])
def test_random_masks_of_any_length(frames: int) -> None:
    for seed in range(60):
        seed_streams(seed)
        assert get_random_mask((frames, 3, 32, 48)).shape == (frames, 1, 32, 48)
    start_only = get_random_mask((frames, 3, 8, 8), image_start_only=True)
    assert start_only.flatten(1).float().mean(1).tolist() == ([0.0] + [1.0] * (frames - 1) if frames > 1 else [1.0])


def test_camera_rays(tmp_path: Path) -> None:
    path = tmp_path / "pose.txt"
    path.write_text("\n".join(TABLES["pose"]["file"]))
    expected = load_file(FACTS / "pose.safetensors")["plucker_w48_h32"]
    torch.testing.assert_close(process_pose_file(path, 48, 32), expected, atol=1e-6, rtol=0)
    assert list(process_pose_file(E2E / "train" / "pose.txt", 48, 32).shape) == TABLES["pose"]["shape"]


# ---- items -----------------------------------------------------------------------------------------------------------
def _dataset(meta: str | Path, cls: type = ImageVideoDataset, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "video_sample_size": 64,
        "image_sample_size": 64,
        "video_sample_stride": 2,
        "video_sample_n_frames": 9,
        "enable_bucket": True,
        "upstream_compat": True,
    }
    return cls(str(E2E / meta), str(E2E), **{**defaults, **options})


@pytest.mark.parametrize("index", range(6))
def test_decoded_and_resized_clip(index: int) -> None:
    expected = BEHAVIOUR["sampling_golden_bucket_vs64_stride2_n9"][str(index)]
    seed_streams(expected["seed"])
    item = _dataset("metadata_video.json")[index]
    pixels = item["pixel_values"]
    assert (list(pixels.shape), str(pixels.dtype), item["text"]) == (
        expected["shape"],
        expected["dtype"],
        expected["text"],
    )
    assert pixels.mean() == pytest.approx(expected["mean"], abs=1e-9)
    assert pixels[0].reshape(-1, 3).mean(0) == pytest.approx(expected["frame0_mean_rgb"], abs=1e-9)


def test_three_frame_clip_loses_a_frame_only_in_compat() -> None:
    assert len(_dataset("metadata_broken.json")[7]["pixel_values"]) == 1
    assert len(_dataset("metadata_broken.json", upstream_compat=False)[7]["pixel_values"]) == 2


def test_plain_inpaint_item() -> None:
    item = _dataset("metadata_video.json", enable_bucket=False, enable_inpaint=True)[0]
    expected = BEHAVIOUR["inpaint_nobucket"]["shapes"]
    for key in ("pixel_values", "mask_pixel_values", "mask", "clip_pixel_values"):
        assert list(item[key].shape) == expected[key]
    kept = item["mask"].expand_as(item["pixel_values"]) == 0
    assert torch.equal(item["mask_pixel_values"][kept], item["pixel_values"][kept])
    assert not item["mask_pixel_values"][~kept].any()


def test_control_item_and_absent_control(tmp_path: Path) -> None:
    rows = json.loads((E2E / "metadata_control.json").read_text())
    rows[0]["control_file_path"] = None
    meta = tmp_path / "control.json"
    meta.write_text(json.dumps(rows))
    item = _dataset(meta, ImageVideoControlDataset)[0]
    assert item["subject_image"] is None
    assert item["control_pixel_values"].shape == item["pixel_values"].shape
    assert not item["control_pixel_values"].any()
    assert _dataset(meta, ImageVideoControlDataset)[1]["control_pixel_values"].any()


def test_camera_item_works_where_upstream_loops() -> None:
    options = {"cls": ImageVideoControlDataset, "enable_camera_info": True}
    bucket = _dataset("metadata_camera.json", **options)[0]
    assert bucket["control_camera_values"].shape == (9, 19)
    plain = _dataset("metadata_camera.json", enable_bucket=False, **options)[0]
    assert plain["control_camera_values"].shape == (9, 6, 64, 64)


# ---- whole runs: the batches of each step in order -------------------------------------------------------------------
def _flags_of_full_mask(batch: dict) -> None:
    """The draw that an inpainting step makes per fully masked sample."""
    for mask in batch["mask"]:
        if mask.all():
            np.random.rand()


_INPAINT = {"inpaint": True}
_REF = {"kind": "control", "control_mode": "control_ref"}
RUNS: dict[str, tuple[dict[str, Any], Callable[[dict], None] | None]] = {
    "g_normal": ({}, None),
    "g_normal_mixed256": ({}, None),
    "g_broken": ({}, None),
    "g_fix": ({}, None),
    "g_nobucket": ({}, None),
    "g_workers": ({}, None),
    "g_inpaint": (_INPAINT, _flags_of_full_mask),
    "g_inp_vtl_b2": (_INPAINT, _flags_of_full_mask),
    "i_nobucket": (_INPAINT, _flags_of_full_mask),
    "w22f_5b_inp": ({**_INPAINT, "size_quantum": 32}, _flags_of_full_mask),
    "w22_5b_full": (
        {**_INPAINT, "mask_image_start_only": True, "size_quantum": 32, "ratio_draw_from_rng": True},
        _flags_of_full_mask,
    ),
    "d_i2v": ({**_INPAINT, "mask_image_start_only": True, "ratio_draw_from_rng": True}, None),
    "c_ctlref": (_REF, None),
    "c21_ref_rand": (_REF, None),
    "c22_low_inp_full": ({**_REF, "add_inpaint_info": True}, _flags_of_full_mask),
    "d2": ({"rank": 0, "world": 2}, None),
    "d2_r1": ({"rank": 1, "world": 2}, None),
    "vace": ({"kind": "vace"}, None),
    "g_frame_crop": ({}, None),
    "g_keep_token": ({}, None),
}
_SHORTENED = ("g_frame_crop", "g_keep_token")  # the step cuts these clips before they are encoded
#: Steps whose mask comes from torch's global stream, which upstream's model construction has moved before.
_TORCH_MASKS = {
    *(("g_inpaint", step) for step in (5, 6, 7)),
    ("w22f_5b_inp", 5),
    ("c22_low_inp_full", 0),
    ("c22_low_inp_full", 3),
}


def _vace_rows(folder: Path) -> Path:
    text = (E2E / "metadata_vace.json").read_text().replace("$E2E/data", str(E2E))
    path = folder / "vace.json"
    path.write_text(text)
    return path


def batches_of(tag: str, folder: Path, **over: Any) -> Iterator[dict]:
    """The batches of a recorded run, with the step's own draws in between."""
    extra, step_draws = RUNS[tag]
    args = dict(DRAWS[tag]["args"])
    meta = args.pop("train_data_meta")
    place = {name: extra[name] for name in ("rank", "world") if name in extra}
    extra = {name: value for name, value in extra.items() if name not in place}
    if "fix_sample_size" in args:
        args["fix_sample_size"] = tuple(args["fix_sample_size"])
    meta_path = _vace_rows(folder) if "vace" in meta else E2E / meta
    settings = {"train_data_meta": str(meta_path), "train_data_dir": str(E2E), "upstream_compat": True}
    options = DataOptions(**{**settings, **args, **extra, **over})
    # the globals are seeded alike on all ranks, the step's generator by rank
    streams = Streams(options.seed)
    streams.numpy = np.random.Generator(np.random.PCG64(options.seed + place.get("rank", 0)))
    loader, _, _ = open_loader(options, streams=streams, **place)
    for epoch in range(100):
        for batch, _ in loader.epoch(epoch):
            yield batch
            if step_draws is not None:
                step_draws(batch)


@pytest.mark.parametrize("tag", [tag for tag in RUNS if tag not in _SHORTENED])
def test_batches_of_recorded_run(tag: str, tmp_path: Path) -> None:
    steps = DRAWS[tag]["steps"]
    batches = batches_of(tag, tmp_path)
    for number, (expected, batch) in enumerate(zip(steps, batches, strict=False)):
        keys = {"d_i2v": ("mask_pixel_values",), "vace": ("pixel_values",)}.get(
            tag, ("pixel_values", "control_pixel_values", "ref_pixel_values", "mask_pixel_values")
        )
        tensors = [batch[key] for key in keys if key in batch]
        assert len(tensors) == len(expected["encode"]) or tag == "vace"
        for position, (tensor, (shape, mean)) in enumerate(zip(tensors, expected["encode"], strict=False)):
            pixels = tensor.transpose(1, 2)
            assert list(pixels.shape) == shape, (number, position)
            if tensor is batch.get("mask_pixel_values") and (tag, number) in _TORCH_MASKS:
                continue
            assert pixels.mean().item() == pytest.approx(mean, abs=2e-6), (number, position)
        assert [text == "" for text in batch["text"]] == [count == 1 for count in expected["tokens"]]


def test_subject_pictures_of_recorded_run(tmp_path: Path) -> None:
    """Steps 1, 3, 6 and 7 encode one or two subject pictures after the clips."""
    for expected, batch in zip(DRAWS["vace"]["steps"], batches_of("vace", tmp_path), strict=False):
        pictures = [entry for entry in expected["encode"][3:] if len(entry[0]) == 4]
        for slot, (shape, mean) in enumerate(pictures):
            subject = batch["subject_images"][0, slot]
            assert [3, 1, *subject.shape[1:]] == shape
            assert subject.mean().item() == pytest.approx(mean, abs=2e-6)
        assert int(batch["subject_flags"].sum()) >= len(pictures)


@pytest.mark.parametrize(
    ("tag", "key", "tensor"),
    [
        ("g_normal", "pixel_values", "s0.vae_in.0"),
        ("g_inpaint", "mask_pixel_values", "s0.vae_in.1"),
        ("c_ctlref", "control_pixel_values", "s0.vae_in.1"),
        ("c_ctlref", "ref_pixel_values", "s0.vae_in.2"),
    ],
)
def test_first_vae_input(goldens: Path, tmp_path: Path, tag: str, key: str, tensor: str) -> None:
    expected = load_file(goldens / "e2e" / "runs" / f"{tag}.tensors.safetensors")[tensor]
    batch = next(batches_of(tag, tmp_path))
    torch.testing.assert_close(batch[key].transpose(1, 2), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("tag", _SHORTENED)
def test_shortened_clips_of_recorded_run(tag: str, tmp_path: Path) -> None:
    streams = {"rng": np.random.Generator(np.random.PCG64(42)), "index": np.random.Generator(np.random.PCG64(43))}
    frames = DRAWS[tag]["args"]["video_sample_n_frames"]
    for expected, batch in zip(DRAWS[tag]["steps"], batches_of(tag, tmp_path), strict=False):
        if tag == "g_frame_crop":
            cut = random_frame_crop(batch, rng=streams["rng"], n_frames=frames, upstream_compat=True)
        else:
            cut = keep_all_node_same_token_length(
                batch, index_rng=streams["index"], n_frames=frames, token_sample_size=64, upstream_compat=True
            )
        pixels = cut["pixel_values"].transpose(1, 2)
        shape, mean = expected["encode"][0]
        assert list(pixels.shape) == shape
        assert pixels.mean().item() == pytest.approx(mean, abs=2e-6)


def test_draw_order_of_an_item() -> None:
    """Start frame first, then the caption: the first two Python draws of a clip."""
    seed_streams(7)
    item = _dataset("metadata_video.json", text_drop_ratio=0.5)[0]
    random.seed(7)
    start = random.randint(0, 48 - 17)
    assert (item["text"] == "") == (random.random() < 0.5)
    assert 0 <= start <= 31
