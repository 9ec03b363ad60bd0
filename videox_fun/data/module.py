"""The data of a run from its options: dataset, batch sampler and collate, put together the way the flags say."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from videox_fun.data.batch_plan import BUCKET_MODES, PlannedBatchSampler, RowCost
from videox_fun.data.bucket_sampler import (
    AspectRatioBatchImageVideoSampler,
    ImageVideoSampler,
    RandomSampler,
    ResumableBatchSampler,
    RowSizes,
)
from videox_fun.data.collate import BucketCollate, CollateRules, Field, PlainCollate
from videox_fun.data.dataset_image_video import (
    ImageVideoControlDataset,
    ImageVideoDataset,
    ImageVideoSafetensorsDataset,
    TextDataset,
)
from videox_fun.data.fields import CameraField, ControlField, InpaintField, ReferenceField, SubjectField
from videox_fun.data.metadata import RowStore, explain_missing_meta
from videox_fun.data.summary import DataSummary, summarize

KINDS = ("image_video", "control", "vace", "text", "safetensors")


@dataclass(frozen=True)
class DataOptions:
    """Everything that decides the batches of a run. Names are the flags'.

    Attributes:
        kind: which dataset: "image_video", "control", "vace" (control clips, references and subjects), "text",
            "safetensors".
        inpaint: batches get a mask and the masked clip. mask_image_start_only: the mask keeps the first frame only.
        control_mode: "control", "control_ref" or "control_camera_ref".
        size_quantum: sides are multiples of it. temporal_ratio: frames per latent frame.
        first_ratio_prob, ratio_draw_from_rng: how ``random_hw_adapt`` draws (0.75 and the step's generator in the
            plain scripts, 0.90 and NumPy's global stream in the others).
        worker_seeding: with ``upstream_compat``, whether this script seeds its workers.
        max_data_errors: stop when more different rows than this cannot be read.
        bucket_mode: "upstream", "complete" or "balanced" (``batch_plan``). model_width: hidden size of the denoiser,
            for the cost of attention in the mode "balanced".
        cache_mask_draws: masks that a clip is given one of (buckets only); 0 draws them anew.
        data_format, id_token: see ``data.formats``. video_sample_fps: sample clips at this rate by their time stamps,
            whatever the stride.
    """

    train_data_meta: str | RowStore | None = None
    train_data_dir: str | None = None
    train_batch_size: int = 1
    video_sample_size: int = 512
    image_sample_size: int = 512
    token_sample_size: int = 512
    video_sample_stride: int = 4
    video_sample_n_frames: int = 17
    video_repeat: int = 0
    enable_bucket: bool = False
    random_hw_adapt: bool = False
    training_with_video_token_length: bool = False
    random_ratio_crop: bool = False
    fix_sample_size: tuple[int, int] | None = None
    text_drop_ratio: float = 0.1
    dataloader_num_workers: int = 0
    seed: int = 0
    inpaint: bool = False
    mask_image_start_only: bool = False
    size_quantum: int = 16
    temporal_ratio: int = 4
    first_ratio_prob: float = 0.90
    ratio_draw_from_rng: bool = False
    worker_seeding: bool = True
    upstream_compat: bool = False
    kind: str = "image_video"
    control_mode: str = "control"
    control_ref_image: str = "first_frame"
    add_inpaint_info: bool = False
    max_data_errors: int | None = None
    bucket_mode: str = "upstream"
    model_width: int = 1536
    cache_mask_draws: int = 0
    data_format: str = "auto"
    id_token: str | None = None
    video_sample_fps: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name in ("train_batch_size", "video_sample_n_frames", "video_sample_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.video_sample_fps is not None and (self.video_sample_fps <= 0 or self.upstream_compat):
            raise ValueError("--video_sample_fps is a positive number of frames per second, and VideoX-Fun has no such "
                             f"setting to be compatible with; got {self.video_sample_fps}")  # fmt: skip
        if self.bucket_mode not in BUCKET_MODES:
            raise ValueError(f"--bucket_mode must be one of {', '.join(BUCKET_MODES)}, got {self.bucket_mode!r}")
        if self.upstream_compat and self.bucket_mode != "upstream":
            raise ValueError(f"--bucket_mode {self.bucket_mode} is not VideoX-Fun's order of batches; leave out it or "
                             "--upstream_compat.")  # fmt: skip

    @classmethod
    def from_args(cls, args: argparse.Namespace, **overrides: Any) -> DataOptions:
        """Options from flags of the same names; ``overrides`` win. Flags a script does not have keep the default."""
        values = {field.name: getattr(args, field.name) for field in fields(cls) if hasattr(args, field.name)}
        values.update(overrides)
        if values.get("fix_sample_size") is not None:
            values["fix_sample_size"] = tuple(int(side) for side in values["fix_sample_size"])
        return cls(**{name: value for name, value in values.items() if value is not None})

    @property
    def camera(self) -> bool:
        return self.kind == "control" and self.control_mode == "control_camera_ref"

    def effective(self) -> DataOptions:
        """With a fixed size (buckets only) the size flags give way to it."""
        if self.fix_sample_size is None or not self.enable_bucket:
            return replace(self, fix_sample_size=None)
        largest = max(self.fix_sample_size)
        return replace(
            self,
            video_sample_size=max(largest, self.video_sample_size),
            image_sample_size=max(largest, self.image_sample_size),
            training_with_video_token_length=False,
            random_hw_adapt=False,
        )

    def collate_rules(self) -> CollateRules:
        return CollateRules(
            video_sample_size=self.video_sample_size,
            image_sample_size=self.image_sample_size,
            token_sample_size=self.token_sample_size,
            n_frames=self.video_sample_n_frames,
            temporal_ratio=self.temporal_ratio,
            size_quantum=self.size_quantum,
            random_hw_adapt=self.random_hw_adapt,
            token_length=self.training_with_video_token_length,
            random_ratio_crop=self.random_ratio_crop,
            fix_sample_size=self.fix_sample_size,
            first_ratio_prob=self.first_ratio_prob,
            ratio_draw_from_rng=self.ratio_draw_from_rng,
            size_near_token=self.kind in ("control", "vace"),
            per_example_aspect=not self.upstream_compat,
        )


@dataclass
class DataModule:
    """Dataset, batch sampler and collate of a run; ``collate_fn`` holds the generator shared with the step."""

    options: DataOptions
    dataset: Dataset
    batch_sampler: ResumableBatchSampler
    collate_fn: Callable[[Sequence[Any]], dict[str, Any]]

    @property
    def random_sampler(self) -> RandomSampler:
        return self.batch_sampler.sampler

    def set_epoch(self, epoch: int, *, seed: int | None = None) -> None:
        """Shuffle for ``epoch`` from its start, the same on all ranks."""
        base = self.options.seed if seed is None else seed
        self.random_sampler.generator = torch.Generator().manual_seed(base + epoch)
        self.random_sampler._pos_start = 0

    def summary(self, *, probe_seconds: float = 30.0) -> DataSummary:
        """What this data will give: rows kept and dropped and why, buckets, real sizes and frame counts.

        Files are opened for at most ``probe_seconds``; what was not reached is said. Raises ``ValueError`` when no
        row is usable.
        """
        return summarize(self, probe_seconds=probe_seconds)


def build_data(
    options: DataOptions, *, rank: int = 0, world: int = 1, rng: np.random.Generator | None = None
) -> DataModule:
    """Dataset, sampler and collate for ``options``. ``rng`` is the step's generator (shared, draws interleave)."""
    if not options.train_data_meta:
        raise ValueError(explain_missing_meta(options.train_data_dir))
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of {world}")
    options = options.effective()
    dataset = _build_dataset(options)
    generator = torch.Generator().manual_seed(options.seed)
    sampler = RandomSampler(dataset, generator=generator)
    batches = _build_batch_sampler(options, dataset, sampler)
    dataset.name_masks = options.cache_mask_draws > 0
    if options.bucket_mode != "upstream":
        batches = PlannedBatchSampler(batches, world=world, row_cost=_row_cost(options, dataset))
    return DataModule(options, dataset, batches, _build_collate(options, rng))


def _build_dataset(options: DataOptions) -> Any:
    common = {"upstream_compat": options.upstream_compat, "max_data_errors": options.max_data_errors,
              "data_format": options.data_format, "id_token": options.id_token}  # fmt: skip
    if options.kind == "text":
        return TextDataset(options.train_data_meta, text_drop_ratio=0.0, **common)
    if options.kind == "safetensors":
        return ImageVideoSafetensorsDataset(options.train_data_meta, options.train_data_dir, **common)
    shared = {
        "video_sample_size": options.video_sample_size,
        "video_sample_stride": options.video_sample_stride,
        "video_sample_n_frames": options.video_sample_n_frames,
        "image_sample_size": options.image_sample_size,
        "video_repeat": options.video_repeat,
        "text_drop_ratio": options.text_drop_ratio,
        "enable_bucket": options.enable_bucket,
        "enable_inpaint": options.inpaint,
        "mask_image_start_only": options.mask_image_start_only,
        "video_sample_fps": options.video_sample_fps,
        **common,
    }
    if options.kind == "image_video":
        return ImageVideoDataset(options.train_data_meta, options.train_data_dir, **shared)
    return ImageVideoControlDataset(
        options.train_data_meta,
        options.train_data_dir,
        enable_camera_info=options.camera,
        enable_subject_info=options.kind == "vace",
        **shared,
    )


def _build_batch_sampler(options: DataOptions, dataset: Any, sampler: RandomSampler) -> ResumableBatchSampler:
    if options.kind in ("text", "safetensors"):
        return ResumableBatchSampler(sampler, options.train_batch_size, drop_last=True)
    if not options.enable_bucket:
        return ImageVideoSampler(sampler, dataset, options.train_batch_size)
    return AspectRatioBatchImageVideoSampler(
        sampler,
        dataset.dataset,
        options.train_batch_size,
        train_folder=options.train_data_dir,
        drop_last=True,
        upstream_compat=options.upstream_compat,
    )


def _row_cost(options: DataOptions, dataset: Any) -> RowCost | None:
    if options.bucket_mode != "balanced" or options.kind in ("text", "safetensors"):
        return None
    sizes = RowSizes(dataset.dataset, folder=options.train_data_dir, upstream_compat=options.upstream_compat)
    return RowCost(dataset.dataset, options, sizes=sizes, width=options.model_width)


def _build_collate(options: DataOptions, rng: np.random.Generator | None) -> Callable[[Sequence[Any]], dict[str, Any]]:
    if options.kind in ("text", "safetensors") or not options.enable_bucket:
        return PlainCollate(temporal_ratio=options.temporal_ratio, upstream_compat=options.upstream_compat)
    return BucketCollate(options.collate_rules(), rng=rng, fields=_fields(options))


def _fields(options: DataOptions) -> list[Field]:
    """In the order of their draws."""
    first_frame = options.control_ref_image == "first_frame"
    added: list[Field] = []
    if options.kind in ("control", "vace"):
        added.append(ControlField())
    if options.camera:
        added.append(CameraField())
    references = options.kind == "vace" or (options.kind == "control" and options.control_mode != "control")
    if references:
        added.append(ReferenceField(first_frame=first_frame, padded=options.kind == "vace"))
    if options.inpaint or options.kind == "vace" or options.add_inpaint_info:
        # The reference field already supplies the CLIP picture.
        added.append(InpaintField(image_start_only=options.mask_image_start_only, with_clip=not references,
                                  draws=options.cache_mask_draws))  # fmt: skip
    if options.kind == "vace":
        added.append(SubjectField())
    return added
