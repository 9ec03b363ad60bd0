"""What each training mode adds to a batch. See ``collate.Field`` for the shape of these callables.

* ``InpaintField``: ``mask`` (1 = to generate), ``mask_pixel_values`` (masked pixels are 0, mid grey) and
  ``clip_pixel_values`` (first frame, 0..255).
* ``ControlField``: ``control_pixel_values``, shaped exactly like the target.
* ``CameraField``: ``control_camera_values``, six Plücker channels per frame, cut like the target.
* ``ReferenceField``: ``clip_idx``, ``ref_pixel_values`` (that frame) and ``clip_pixel_values``.
* ``SubjectField``: ``subject_images``, four slots (empty ones are -1), and ``subject_flags``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from videox_fun.data.camera import process_pose_params
from videox_fun.data.collate import Example, Plan
from videox_fun.data.geometry import first_heavy
from videox_fun.data.masks import get_random_mask
from videox_fun.data.transforms import center_crop, first_frame_as_image, prepare_frames
from videox_fun.data.utils import padding_image

SUBJECT_SLOTS = 4


class InpaintField:
    def __init__(self, *, image_start_only: bool, with_clip: bool = True) -> None:
        self.image_start_only = image_start_only
        self.with_clip = with_clip

    def __call__(self, example: Example, pixels: torch.Tensor, plan: Plan, out: dict[str, list]) -> None:
        mask = get_random_mask(pixels.shape, image_start_only=self.image_start_only)
        out["mask"].append(mask)
        out["mask_pixel_values"].append(pixels * (1 - mask))
        if self.with_clip:
            out["clip_pixel_values"].append(first_frame_as_image(pixels))


class ControlField:
    def __call__(self, example: Example, pixels: torch.Tensor, plan: Plan, out: dict[str, list]) -> None:
        control = example["control_pixel_values"][: plan.frames]
        # The target decides the size: a control clip of another size still lines up with it.
        resize_to = plan.resize_to(*example["pixel_values"].shape[1:3])
        out["control_pixel_values"].append(prepare_frames(control, resize_to=resize_to, crop_to=plan.crop_to))


class CameraField:
    def __call__(self, example: Example, pixels: torch.Tensor, plan: Plan, out: dict[str, list]) -> None:
        poses = example.get("control_camera_values")
        if poses is None:
            out["control_camera_values"].append(torch.zeros(len(pixels), 6, *plan.crop_to))
            return
        height, width = plan.resize_to(*example["pixel_values"].shape[1:3])
        rays = process_pose_params(poses[: plan.frames], width=width, height=height).permute(0, 3, 1, 2)
        cut = center_crop(rays, height=plan.crop_to[0], width=plan.crop_to[1])
        out["control_camera_values"].append(cut.contiguous())


class ReferenceField:
    """A frame of the target as the reference picture: the first, or a drawn one (the first with probability 0.4)."""

    def __init__(self, *, first_frame: bool, padded: bool = False) -> None:
        self.first_frame = first_frame
        self.padded = padded

    def __call__(self, example: Example, pixels: torch.Tensor, plan: Plan, out: dict[str, list]) -> None:
        index = 0 if self.first_frame else self.draw(len(pixels))
        reference = pixels[index : index + 1]
        out["clip_idx"].append(torch.tensor(index))
        out["ref_pixel_values"].append(_padded_reference(reference, plan) if self.padded else reference)
        out["clip_pixel_values"].append(first_frame_as_image(pixels, index))

    @staticmethod
    def draw(frames: int) -> int:
        return int(np.random.choice(list(range(frames)), p=first_heavy(frames, 0.4)))


def _padded_reference(reference_1CHW: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The reference as an 8-bit picture on white, back in [-1, 1]."""
    height, width = plan.crop_to
    array = first_frame_as_image(reference_1CHW).numpy().astype(np.uint8)
    padded = np.array(padding_image(Image.fromarray(array), width, height))
    return prepare_frames(padded[None], resize_to=plan.crop_to, crop_to=plan.crop_to)


class SubjectField:
    def __call__(self, example: Example, pixels: torch.Tensor, plan: Plan, out: dict[str, list]) -> None:
        subjects: Any = example.get("subject_image")
        count = 0 if subjects is None else min(len(subjects), SUBJECT_SLOTS)
        slots = torch.full((SUBJECT_SLOTS, 3, *plan.crop_to), -1.0)
        if count:
            resize_to = plan.resize_to(*example["pixel_values"].shape[1:3])
            slots[:count] = prepare_frames(subjects[:count], resize_to=resize_to, crop_to=plan.crop_to)
        out["subject_images"].append(slots)
        out["subject_flags"].append(torch.tensor([int(slot < count) for slot in range(SUBJECT_SLOTS)]))
