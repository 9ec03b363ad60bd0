"""What each training mode adds to a batch. See ``collate.Field``.

* ``InpaintField``: ``mask`` (1 = to generate), ``mask_pixel_values`` (masked pixels are 0, mid grey) and
  ``clip_pixel_values`` (first frame, 0..255).
* ``ControlField``: ``control_pixel_values``, shaped exactly like the target.
* ``CameraField``: ``control_camera_values``, six Plücker channels per frame, cut like the target.
* ``ReferenceField``: ``clip_idx``, ``ref_pixel_values`` (that frame) and ``clip_pixel_values``.
* ``SubjectField``: ``subject_images``, four slots (empty ones are -1), and ``subject_flags``.

With a cache of encodings, ``masked_moments``, ``control_moments``, ``ref_moments`` and ``clip_features`` take the place
of the pixels. Masks drawn anew have no entries; with ``draws`` each clip has that many masks of its own, which do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from videox_fun.data.camera import process_pose_params
from videox_fun.data.collate import Example, Field, Plan
from videox_fun.data.geometry import first_heavy
from videox_fun.data.masks import get_random_mask, stated_mask
from videox_fun.data.transforms import center_crop, first_frame_as_image, prepare_frames
from videox_fun.data.utils import padding_image

SUBJECT_SLOTS = 4
_ANEW, _START = -1, -2  # mask numbers: drawn for one batch only; keeps the first frame


class InpaintField(Field):
    def __init__(self, *, image_start_only: bool, with_clip: bool = True, draws: int = 0) -> None:
        self.image_start_only = image_start_only
        self.with_clip = with_clip
        self.draws = draws
        self.listed = image_start_only or draws > 0

    def draw(self, example: Example, plan: Plan) -> tuple[int, torch.Tensor | None]:
        """``(number, mask)``; the mask is made in ``add`` when its number says what it is."""
        if self.image_start_only:
            return _START, None
        if self.draws:
            return int(np.random.randint(self.draws)), None
        return _ANEW, get_random_mask((plan.frames, 3, *plan.crop_to))

    def possible(self, example: Example, plan: Plan) -> list[Any]:
        """Without stated masks, the one that keeps the first frame: the likeliest to come again."""
        stated = self.draws and not self.image_start_only
        return [(number, None) for number in range(self.draws)] if stated else [(_START, None)]

    def entries(
        self, cache: Any, example: Example, plan: Plan, drawn: tuple[int, torch.Tensor | None]
    ) -> dict[str, Any]:
        frames, number = example["pixel_values"], drawn[0]
        known = (1 if plan.frames > 1 else 0, 0)
        part = cache.masked_part(known=known) if number == _START else cache.masked_part(frames.origin["name"], number)
        found = {} if number == _ANEW else {"masked_moments": cache.clip_entry(frames, plan, part=part)}
        return {**found, "clip_features": cache.picture_entry(frames, plan)} if self.with_clip else found

    def add(
        self, example: Example, pixels: torch.Tensor | None, plan: Plan, drawn: tuple[int, torch.Tensor | None],
        out: dict[str, list],
    ) -> None:
        number, mask = drawn
        shape = (plan.frames, 3, *plan.crop_to)
        if mask is None and number == _START:
            mask = get_random_mask(shape, image_start_only=True)
        elif mask is None:
            mask = stated_mask(example["mask_name"], number, shape)
        out["mask"].append(mask)
        if number >= 0:
            out["mask_number"].append(number)
        if pixels is None:
            return
        out["mask_pixel_values"].append(pixels * (1 - mask))
        if self.with_clip:
            out["clip_pixel_values"].append(first_frame_as_image(pixels))


class ControlField(Field):
    def entries(self, cache: Any, example: Example, plan: Plan, drawn: None) -> dict[str, Any]:
        target = example["pixel_values"].shape[1:3]
        return {"control_moments": cache.clip_entry(example["control_pixel_values"], plan, target=target)}

    def add(self, example: Example, pixels: torch.Tensor | None, plan: Plan, drawn: None, out: dict[str, list]) -> None:
        # The target decides the size: a control clip of another size still lines up with it.
        resize_to = plan.resize_to(*example["pixel_values"].shape[1:3])
        control = example["control_pixel_values"]
        if hasattr(control, "origin"):
            out["control_source"].append({**control.origin, "resize": list(resize_to)})
        if pixels is not None:
            shown = prepare_frames(control[: plan.frames], resize_to=resize_to, crop_to=plan.crop_to)
            out["control_pixel_values"].append(shown)


class CameraField(Field):
    def add(self, example: Example, pixels: torch.Tensor | None, plan: Plan, drawn: None, out: dict[str, list]) -> None:
        poses = example.get("control_camera_values")
        if poses is None:
            out["control_camera_values"].append(torch.zeros(plan.frames, 6, *plan.crop_to))
            return
        height, width = plan.resize_to(*example["pixel_values"].shape[1:3])
        rays = process_pose_params(poses[: plan.frames], width=width, height=height).permute(0, 3, 1, 2)
        cut = center_crop(rays, height=plan.crop_to[0], width=plan.crop_to[1])
        out["control_camera_values"].append(cut.contiguous())


class ReferenceField(Field):
    """A frame of the target as the reference picture: the first, or a drawn one (the first with probability 0.4)."""

    def __init__(self, *, first_frame: bool, padded: bool = False) -> None:
        self.first_frame = first_frame
        self.padded = padded

    def draw(self, example: Example, plan: Plan) -> int:
        return 0 if self.first_frame else self.draw_index(plan.frames)

    @staticmethod
    def draw_index(frames: int) -> int:
        return int(np.random.choice(list(range(frames)), p=first_heavy(frames, 0.4)))

    def possible(self, example: Example, plan: Plan) -> list[Any]:
        return list(range(1 if self.first_frame else plan.frames))

    def entries(self, cache: Any, example: Example, plan: Plan, drawn: int) -> dict[str, Any]:
        frames = example["pixel_values"]
        part = cache.reference_part(drawn, padded=self.padded)
        return {"ref_moments": cache.clip_entry(frames, plan, part=part, frames=1),
                "clip_features": cache.picture_entry(frames, plan, index=drawn)}  # fmt: skip

    def add(self, example: Example, pixels: torch.Tensor | None, plan: Plan, drawn: int, out: dict[str, list]) -> None:
        out["clip_idx"].append(torch.tensor(drawn))
        if pixels is not None:
            reference = pixels[drawn : drawn + 1]
            out["ref_pixel_values"].append(_padded_reference(reference, plan) if self.padded else reference)
            out["clip_pixel_values"].append(first_frame_as_image(pixels, drawn))


def _padded_reference(reference_1CHW: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The reference as an 8-bit picture on white, back in [-1, 1]."""
    height, width = plan.crop_to
    array = first_frame_as_image(reference_1CHW).numpy().astype(np.uint8)
    padded = np.array(padding_image(Image.fromarray(array), width, height))
    return prepare_frames(padded[None], resize_to=plan.crop_to, crop_to=plan.crop_to)


class SubjectField(Field):
    listed = False  # pictures of subjects are shuffled and mirrored by the dataset, and encoded at each use

    def add(self, example: Example, pixels: torch.Tensor | None, plan: Plan, drawn: None, out: dict[str, list]) -> None:
        subjects: Any = example.get("subject_image")
        count = 0 if subjects is None else min(len(subjects), SUBJECT_SLOTS)
        slots = torch.full((SUBJECT_SLOTS, 3, *plan.crop_to), -1.0)
        if count:
            resize_to = plan.resize_to(*example["pixel_values"].shape[1:3])
            slots[:count] = prepare_frames(subjects[:count], resize_to=resize_to, crop_to=plan.crop_to)
        out["subject_images"].append(slots)
        out["subject_flags"].append(torch.tensor([int(slot < count) for slot in range(SUBJECT_SLOTS)]))
