"""From items to a batch: one size and one frame count for all, and the tensors a mode needs.

``BucketCollate`` first draws the batch's geometry (``draw_plan``), then shapes each example and hands it to the
*fields*, small objects that add what a mode needs: inpainting masks, control clips, camera rays, references. Draws
happen in a fixed order (size, crop ratio, then per example reference frame and mask), because runs are compared draw
by draw. They are made before any pixel is looked at: with a cache of encodings, all that a batch needs may be there
already. Everything here is picklable: it runs in loader workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from videox_fun.data.geometry import (
    ASPECT_RATIO_512,
    ASPECT_RATIO_RANDOM_CROP_512,
    ASPECT_RATIO_RANDOM_CROP_PROB,
    candidate_sizes,
    cover_size,
    downsample_ratios,
    first_heavy,
    floor_to,
    frames_of_sizes,
    get_closest_ratio,
    legal_frames,
    nearest_heavy,
    scaled,
    token_sizes,
)
from videox_fun.data.transforms import prepare_frames

Example = dict[str, Any]
Size = tuple[int, int]


@dataclass(frozen=True)
class CollateRules:
    """The flags that decide a batch's size. ``first_ratio_prob`` and ``ratio_draw_from_rng`` differ by script.

    Attributes:
        size_near_token: half of the token-length draws go to the size nearest ``token_sample_size`` (control scripts).
        per_example_aspect: each example is resized by its own aspect ratio instead of the first example's.
    """

    video_sample_size: int
    image_sample_size: int
    token_sample_size: int
    n_frames: int
    temporal_ratio: int = 4
    size_quantum: int = 16
    random_hw_adapt: bool = False
    token_length: bool = False
    random_ratio_crop: bool = False
    fix_sample_size: Size | None = None
    first_ratio_prob: float = 0.90
    ratio_draw_from_rng: bool = False
    size_near_token: bool = False
    per_example_aspect: bool = True

    @property
    def target_token_length(self) -> int:
        return self.n_frames * self.token_sample_size**2

    def sizes(self) -> list[int]:
        return token_sizes(self.video_sample_size, self.image_sample_size)

    def frames_of_size(self, size: int) -> float:
        frames = frames_of_sizes(
            [size],
            token_length=self.target_token_length,
            n_frames=self.n_frames,
            temporal_ratio=self.temporal_ratio,
        )
        return frames[size]

    def image_shrinks(self) -> list[float]:
        return downsample_ratios(self.image_sample_size, [self.image_sample_size / self.video_sample_size])

    def video_shrinks(self) -> list[float]:
        return downsample_ratios(self.video_sample_size)


@dataclass(frozen=True)
class Plan:
    """What all examples of a batch share."""

    crop_to: Size
    frames: int
    first_size: Size
    stretch: bool = False
    resize_by_first: bool = False

    def resize_to(self, height: int, width: int) -> Size:
        """The size an example of ``height x width`` is resized to before the middle is cut out."""
        if self.stretch:
            return self.crop_to
        return cover_size(*(self.first_size if self.resize_by_first else (height, width)), self.crop_to)


class Field:
    """What one mode adds to a batch, example by example.

    A subclass implements ``add``. The other methods let a cache of encodings take the place of pixels: what is drawn,
    every outcome of it, and the entries that hold what the step would encode.
    """

    #: Whether ``possible`` lists all outcomes of ``draw`` and ``entries`` all that is encoded.
    listed = True

    def draw(self, example: Example, plan: Plan) -> Any:
        return None

    def possible(self, example: Example, plan: Plan) -> list[Any]:
        return [None]

    def entries(self, cache: Any, example: Example, plan: Plan, drawn: Any) -> dict[str, Any]:
        """Entry of the cache by the batch key that its value gets."""
        return {}

    def add(
        self, example: Example, pixels: torch.Tensor | None, plan: Plan, drawn: Any, out: dict[str, list]
    ) -> None:
        """Append to the lists in ``out``; without ``pixels``, only what is not encoded."""
        raise NotImplementedError

    def __call__(self, example: Example, pixels: torch.Tensor, plan: Plan, out: dict[str, list]) -> None:
        self.add(example, pixels, plan, self.draw(example, plan), out)


class BucketCollate:
    """Collate for items of raw frames (``enable_bucket``). ``rng`` is the step's own generator."""

    def __init__(
        self, rules: CollateRules, *, rng: np.random.Generator | None, fields: Sequence[Field] = ()
    ) -> None:
        self.rules = rules
        self.rng = rng
        self.fields = tuple(fields)
        #: Draws the size of the next batch alike on all ranks, when set.
        self.size_rng: np.random.Generator | None = None
        #: Where posteriors of whole batches are read instead of decoding them (``data.cache.attach``).
        self.cache: Any = None

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        plan = self.draw_plan(examples)
        return self.assemble(examples, plan, self.draw_fields(examples, plan))

    def draw_fields(self, examples: Sequence[Example], plan: Plan) -> list[list[Any]]:
        return [[field.draw(example, plan) for field in self.fields] for example in examples]

    def entries(self, cache: Any, example: Example, plan: Plan, drawn: Sequence[Any]) -> dict[str, Any]:
        """Every entry of the cache that stands for something of this example."""
        found = {"moments": cache.clip_entry(example["pixel_values"], plan)}
        for field, value in zip(self.fields, drawn, strict=True):
            found.update(field.entries(cache, example, plan, value))
        return found

    def assemble(self, examples: Sequence[Example], plan: Plan, drawn: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """The batch of a plan and of what the fields drew."""
        lists: dict[str, list] = defaultdict(list)
        stored = None
        if self.cache is not None:
            stored = self.cache.read_batch([self.entries(self.cache, example, plan, values)
                                            for example, values in zip(examples, drawn, strict=True)])
        for example, values in zip(examples, drawn, strict=True):
            frames = example["pixel_values"]
            resize_to = plan.resize_to(*frames.shape[1:3])
            if hasattr(frames, "origin"):
                lists["source"].append({**frames.origin, "resize": list(resize_to)})
            pixels = None
            if stored is None:
                pixels = prepare_frames(frames[: plan.frames], resize_to=resize_to, crop_to=plan.crop_to)
                lists["pixel_values"].append(pixels)
            lists["text"].append(example["text"])
            lists["idx"].append(example.get("idx"))
            if "file_name" in example:
                lists["file_name"].append(example["file_name"])
            for field, value in zip(self.fields, values, strict=True):
                field.add(example, pixels, plan, value, lists)
        lists.update(stored or {})
        return {"target_token_length": self.rules.target_token_length, **stack_lists(lists)}

    # -- draws -------------------------------------------------------------------------------------------------------
    def draw_plan(self, examples: Sequence[Example]) -> Plan:
        first = examples[0]["pixel_values"]
        height, width = first.shape[1:3]
        if examples[0].get("data_type") == "image":
            base, wanted = self._draw_image_base(), self.rules.n_frames + self.rules.temporal_ratio
        else:
            base, wanted = self._draw_video_base(examples)
        crop_to = self._draw_size(base, height, width)
        shortest = min(len(example["pixel_values"]) for example in examples)
        return Plan(
            crop_to=crop_to,
            frames=legal_frames(shortest, wanted, self.rules.temporal_ratio),
            first_size=(height, width),
            stretch=self.rules.fix_sample_size is not None,
            resize_by_first=not self.rules.per_example_aspect and not self.rules.random_ratio_crop,
        )

    def _draw_image_base(self) -> float:
        shrink = self._draw_shrink(self.rules.image_shrinks()) if self.rules.random_hw_adapt else 1.0
        return self.rules.image_sample_size / shrink

    def _draw_video_base(self, examples: Sequence[Example]) -> tuple[float, float]:
        rules = self.rules
        wanted = rules.n_frames + rules.temporal_ratio
        if not rules.random_hw_adapt:
            return rules.video_sample_size, wanted
        if not rules.token_length:
            return rules.video_sample_size / self._draw_shrink(rules.video_shrinks()), wanted
        sides = [np.mean(example["pixel_values"].shape[1:3]) for example in examples]
        candidates = candidate_sizes(rules.sizes(), float(np.min(sides)))
        weights = nearest_heavy(candidates, rules.token_sample_size) if rules.size_near_token else None
        size = int(self._draw(candidates, weights))
        return size, rules.frames_of_size(size)

    def _draw_shrink(self, ratios: Sequence[float]) -> float:
        return float(self._draw(ratios, first_heavy(len(ratios), self.rules.first_ratio_prob)))

    def _draw(self, choices: Sequence[Any], weights: Sequence[float] | None) -> Any:
        source = self.rng if self.rules.ratio_draw_from_rng and self.rng is not None else np.random
        source = self.size_rng or source
        return source.choice(choices, p=weights)

    def _draw_size(self, base: float, height: int, width: int) -> Size:
        rules = self.rules
        if rules.fix_sample_size is not None:
            return floor_to(rules.fix_sample_size, rules.size_quantum)
        if rules.random_ratio_crop:
            source = self.size_rng or self.rng or np.random
            key = source.choice(list(ASPECT_RATIO_RANDOM_CROP_512), p=ASPECT_RATIO_RANDOM_CROP_PROB)
            return floor_to(scaled(ASPECT_RATIO_RANDOM_CROP_512, base)[str(key)], rules.size_quantum)
        size, _ = get_closest_ratio(height, width, ratios=scaled(ASPECT_RATIO_512, base))
        return floor_to(size, rules.size_quantum)


def stack_lists(lists: dict[str, list]) -> dict[str, Any]:
    """Tensors stacked, everything else kept as a list."""
    return {key: torch.stack(value) if _all_tensors(value) else value for key, value in lists.items()}


def _all_tensors(values: list) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values)


#: Keys with one entry per frame.
FRAME_KEYS = ("pixel_values", "control_pixel_values", "control_camera_values", "mask", "mask_pixel_values")


class PlainCollate:
    """Collate for items of one size (no buckets): tensors are stacked, clips cut to the shortest legal length."""

    def __init__(self, *, temporal_ratio: int = 4, upstream_compat: bool = False) -> None:
        self.temporal_ratio = temporal_ratio
        self.upstream_compat = upstream_compat

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        lists: dict[str, list] = defaultdict(list)
        for example in examples:
            for key, value in example.items():
                if value is not None:
                    lists[key].append(torch.from_numpy(value) if isinstance(value, np.ndarray) else value)
        if not self.upstream_compat and "pixel_values" in lists:
            frames = legal_frames(min(map(len, lists["pixel_values"])), float("inf"), self.temporal_ratio)
            for key in FRAME_KEYS:
                if key in lists:
                    lists[key] = [value[:frames] for value in lists[key]]
        return stack_lists(lists)
