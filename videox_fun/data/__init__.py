"""Data for training: reading, sampling, batching. Names resolve on first use."""

from __future__ import annotations

import importlib
from typing import Any

_BUCKET = (
    "ASPECT_RATIO_512 ASPECT_RATIO_RANDOM_CROP_512 ASPECT_RATIO_RANDOM_CROP_PROB AspectRatioBatchImageSampler "
    "AspectRatioBatchImageVideoSampler AspectRatioBatchSampler BatchSampler RandomSampler get_closest_ratio "
    "get_image_size_without_loading"
)
_DATASETS = (
    "ImageVideoControlDataset ImageVideoDataset ImageVideoSafetensorsDataset ImageVideoSampler TextDataset"
)
_VIDEOS = "VideoAnimateDataset VideoDataset VideoSpeechControlDataset VideoSpeechDataset WebVid10M"
_UTILS = (
    "VIDEO_READER_TIMEOUT Camera VideoReader_contextmanager custom_meshgrid get_random_mask get_relative_pose "
    "get_video_reader_batch padding_image process_pose_file process_pose_params ray_condition resize_frame "
    "resize_image_with_target_area"
)
_ENGINE = {"DataModule": "module", "DataOptions": "module", "build_data": "module", "TrainLoader": "loader"}

_HOME: dict[str, str] = {
    **dict.fromkeys(_BUCKET.split(), "bucket_sampler"),
    **dict.fromkeys(_DATASETS.split(), "dataset_image_video"),
    **dict.fromkeys(_VIDEOS.split(), "dataset_video"),
    "CC15M": "dataset_image",
    **dict.fromkeys(_UTILS.split(), "utils"),
    **_ENGINE,
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
