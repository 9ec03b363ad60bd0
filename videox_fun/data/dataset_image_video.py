"""Datasets of captioned pictures and clips.

An item is one row of the annotation file: which frames are read, and whether the caption is dropped, is drawn from
Python's random stream, in the order start frame, caption, references. A row that cannot be read is reported once and
another row of the same kind takes its place, whole: pixels and caption always come from one row. The draws of a failed
attempt are undone, so that a run that already knows the bad rows and one that meets them draw the same;
``upstream_compat`` keeps them, as upstream does.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from videox_fun.data.bad_rows import BadRows, DataError
from videox_fun.data.bucket_sampler import ImageVideoSampler, resolve
from videox_fun.data.camera import poses_at_frames, process_pose_params, read_pose_file
from videox_fun.data.decode import CONTROL_BACKGROUND, VideoReader, load_image, media_kind
from videox_fun.data.geometry import sampled_frames
from videox_fun.data.masks import get_random_mask
from videox_fun.data.metadata import (
    CONTROL_SCHEMA,
    FILE_SCHEMA,
    TEXT_SCHEMA,
    RowSchema,
    RowStore,
    is_video,
    load_rows,
    repeat_videos,
)
from videox_fun.data.probe import decode_in_own_process, frames_at_rate, is_suspect, probe_media
from videox_fun.data.resize import resize_frame
from videox_fun.data.transforms import first_frame_as_image, square_frames, square_image
from videox_fun.data.utils import padding_image

logger = logging.getLogger(__name__)

__all__ = [
    "AnnotatedDataset",
    "ImageVideoControlDataset",
    "ImageVideoDataset",
    "ImageVideoSafetensorsDataset",
    "ImageVideoSampler",
    "TextDataset",
]

MAX_SUBJECTS = 4


def _pair(size: int | Sequence[int]) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


class AnnotatedDataset(Dataset):
    """Rows, and the rule for rows that cannot be read. A subclass implements ``read_item``."""

    def __init__(
        self,
        ann_path: str | RowStore,
        *,
        data_root: str | None,
        schema: RowSchema,
        video_repeat: int = 0,
        upstream_compat: bool = False,
        max_data_errors: int | None = None,
        data_format: str = "auto",
        id_token: str | None = None,
    ) -> None:
        rows = load_rows(ann_path, schema=schema, upstream_compat=upstream_compat, data_format=data_format,
                         id_token=id_token)  # fmt: skip
        self.ann_path = "rows" if isinstance(ann_path, RowStore) else str(ann_path)
        self.data_root = data_root
        self.upstream_compat = upstream_compat
        self.dataset = repeat_videos(rows, video_repeat)
        self.length = len(self.dataset)
        kinds = np.zeros(rows.source_rows, dtype=bool)
        kinds[[rows.source_row(index) for index, row in enumerate(rows) if is_video(row)]] = True
        self.bad_rows = BadRows(source=self.ann_path, video_rows=kinds, max_errors=max_data_errors)
        logger.info("%s: %d rows, %d items", ann_path, len(rows), self.length)

    def __len__(self) -> int:
        return self.length

    def path_of(self, name: str) -> str:
        return resolve(name, self.data_root)

    def read_item(self, row: dict[str, Any], idx: int) -> dict[str, Any]:
        raise NotImplementedError

    def __getitem__(self, idx: int) -> dict[str, Any]:
        idx = idx % self.length
        video = is_video(self.dataset[idx])
        for consecutive in itertools.count(1):
            row = self.dataset[idx]
            if is_video(row) == video:
                item = self._try_item(row, idx)
                if item is not None:
                    return item
                self.bad_rows.check_hope(video=video, consecutive=consecutive)
            idx = random.randint(0, self.length - 1)
        raise AssertionError("unreachable")

    def _try_item(self, row: dict[str, Any], idx: int) -> dict[str, Any] | None:
        source = self.dataset.source_row(idx)
        if not self.upstream_compat and self.bad_rows.known(source):
            return None
        before = random.getstate()
        try:
            return self.read_item(row, idx)
        except (DataError, MemoryError):
            raise
        except Exception as error:  # whatever a decoder throws at a damaged file
            if not self.upstream_compat:
                random.setstate(before)
            self.bad_rows.report(source, file=str(row.get("file_path", "")), error=error)
            return None


class ImageVideoDataset(AnnotatedDataset):
    """Captioned pictures and clips.

    With ``enable_bucket`` an item holds raw uint8 frames ``[F, H, W, 3]`` for the collate; without, a square float clip
    ``[F, 3, S, S]`` in [-1, 1].
    """

    schema = RowSchema()

    def __init__(
        self,
        ann_path: str,
        data_root: str | None = None,
        video_sample_size: int | Sequence[int] = 512,
        video_sample_stride: int = 4,
        video_sample_n_frames: int = 16,
        image_sample_size: int | Sequence[int] = 512,
        video_repeat: int = 0,
        text_drop_ratio: float = 0.1,
        enable_bucket: bool = False,
        video_length_drop_start: float = 0.0,
        video_length_drop_end: float = 1.0,
        enable_inpaint: bool = False,
        inpaint_mask_fill_value: float = 0,
        return_file_name: bool = False,
        *,
        mask_image_start_only: bool = False,
        video_sample_fps: float | None = None,
        **reading: Any,
    ) -> None:
        super().__init__(
            ann_path, data_root=data_root, schema=self.schema, video_repeat=video_repeat, **reading
        )
        #: Frames per second that clips are sampled at, by their time stamps; ``None`` counts frames by the stride.
        self.video_sample_fps = video_sample_fps
        self.video_sample_size = _pair(video_sample_size)
        self.image_sample_size = _pair(image_sample_size)
        self.video_sample_stride = video_sample_stride
        self.video_sample_n_frames = video_sample_n_frames
        self.text_drop_ratio = text_drop_ratio
        self.enable_bucket = enable_bucket
        self.video_length_drop_start = video_length_drop_start
        self.video_length_drop_end = video_length_drop_end
        self.enable_inpaint = enable_inpaint
        self.inpaint_mask_fill_value = inpaint_mask_fill_value
        self.return_file_name = return_file_name
        self.mask_image_start_only = mask_image_start_only
        self.larger_side_of_image_and_video = max(min(self.image_sample_size), min(self.video_sample_size))
        #: Reads files by way of the cache of encoded clips (``data.cache.attach``).
        self.sources: Any = None
        #: Clips start at one of this many frames; 0 is any frame.
        self.clip_starts = 0
        #: Items say whose masks they are given (``--cache_mask_draws``).
        self.name_masks = False

    # -- reading -----------------------------------------------------------------------------------------------------
    def read_item(self, row: dict[str, Any], idx: int) -> dict[str, Any]:
        if self.sources is not None:
            return self._finish({**self._read_by_cache(row), "idx": idx}, row)
        pixels, text, kind = self.read_pixels(row)
        item = {"pixel_values": pixels, "text": text, "data_type": kind, "idx": idx}
        return self._finish(item, row)

    def _read_by_cache(self, row: dict[str, Any]) -> dict[str, Any]:
        """Like ``read_pixels``, with the same draws; raw frames are decoded when somebody looks at them."""
        video = is_video(row)
        frames = (self.sources.clip if video else self.sources.picture)(self, row["file_path"])
        item = {"text": self.draw_text(row), "data_type": "video" if video else "image"}
        if self.enable_bucket:
            return {"pixel_values": frames, **item}
        shape = self.shape_clip if video else self.shape_image
        pixels = shape(frames.load() if video else Image.fromarray(frames.load()[0]))
        return {"pixel_values": pixels, "source": {**frames.origin, "resize": [0, 0]}, **item}

    def get_batch(self, idx: int) -> tuple[Any, str, str, str]:
        """``(pixels, text, kind, file)`` of a row; errors are the caller's."""
        row = self.dataset[idx % self.length]
        pixels, text, kind = self.read_pixels(row)
        return pixels, text, kind, self.path_of(row["file_path"])

    def read_pixels(self, row: dict[str, Any]) -> tuple[Any, str, str]:
        if is_video(row):
            frames, _, _ = self.read_clip(row["file_path"])
            return self.shape_clip(frames), self.draw_text(row), "video"
        image = load_image(self.path_of(row["file_path"]), upstream_compat=self.upstream_compat)
        return self.shape_image(image), self.draw_text(row), "image"

    def open_clip(self, name: str) -> VideoReader:
        reader = VideoReader(self.path_of(name), apply_rotation=not self.upstream_compat)
        if not self.upstream_compat and is_suspect(reader):
            reader.close()
            decode_in_own_process(reader.path)  # raises before the clip can crash this process
            reader = VideoReader(self.path_of(name))
        return reader

    def read_clip(self, name: str, *, at_most: int | None = None) -> tuple[np.ndarray, np.ndarray, int]:
        """``(frames, their indices, frames in the clip)``, from a drawn start; the clip ends after ``at_most``."""
        with self.open_clip(name) as reader:
            length = len(reader)
            indices = self.draw_indices(min(length, at_most or length), name)
            return reader.read(indices, transform=self._shrink), indices, length

    def draw_indices(self, length: int, name: str) -> np.ndarray:
        places = self._places(length, name)
        first, last, span, count = self._start_range(len(places), name)
        start = random.randint(first, last) if span != int(self.video_length_drop_end * len(places)) else 0
        return places[np.linspace(*self._between(self._nearest_start(start, first, last), span), count, dtype=int)]

    def possible_indices(self, length: int, name: str) -> list[np.ndarray]:
        """Every outcome of ``draw_indices``."""
        places = self._places(length, name)
        first, last, span, count = self._start_range(len(places), name)
        starts = sorted({self._nearest_start(start, first, last) for start in range(first, last + 1)})
        return [places[np.linspace(*self._between(start, span), count, dtype=int)] for start in starts]

    def _places(self, length: int, name: str) -> np.ndarray:
        """The frames to sample from: all of the first ``length``, or those shown at the ticks of a rate."""
        if self.video_sample_fps is None:
            return np.arange(length)
        ticks = frames_at_rate(self.path_of(name), self.video_sample_fps)
        return ticks[ticks < length]

    @property
    def _stride(self) -> int:
        return self.video_sample_stride if self.video_sample_fps is None else 1

    def _start_range(self, length: int, name: str) -> tuple[int, int, int, int]:
        """``(first start, last start, frames spanned, frames read)``."""
        start_ratio, end_ratio = self.video_length_drop_start, self.video_length_drop_end
        count = sampled_frames(
            length,
            n_frames=self.video_sample_n_frames,
            stride=self._stride,
            start=start_ratio,
            end=end_ratio,
            upstream_compat=self.upstream_compat,
        )
        if count == 0:
            raise ValueError(f"{name}: {length} frame(s) are too few at stride {self._stride}")
        end = int(end_ratio * length)
        span = min(end, (count - 1) * self._stride + 1)
        return (int(start_ratio * end), end - span, span, count) if end != span else (0, 0, span, count)

    @staticmethod
    def _between(start: int, span: int) -> tuple[int, int]:
        return start, start + span - 1

    def _nearest_start(self, start: int, first: int, last: int) -> int:
        """With ``clip_starts``, the nearest of that many starts, spread evenly."""
        if not 0 < self.clip_starts <= last - first:
            return start
        if self.clip_starts == 1:
            return (first + last) // 2
        step = (last - first) / (self.clip_starts - 1)
        return first + round(round((start - first) / step) * step)

    def _shrink(self, frame: np.ndarray) -> np.ndarray:
        return resize_frame(frame, self.larger_side_of_image_and_video)

    def draw_text(self, row: dict[str, Any]) -> str:
        return "" if random.random() < self.text_drop_ratio else row["text"]

    # -- shaping -----------------------------------------------------------------------------------------------------
    def shape_clip(self, frames_FHWC: np.ndarray) -> Any:
        if self.enable_bucket:
            return frames_FHWC
        return square_frames(frames_FHWC, size=min(self.video_sample_size))

    def shape_image(self, image: Image.Image) -> Any:
        if self.enable_bucket:
            return np.array(image)[None]
        return square_image(image, size=min(self.image_sample_size))

    def _finish(self, item: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
        if self.return_file_name:
            item["file_name"] = os.path.basename(row["file_path"])
        if self.name_masks and self.enable_bucket:
            item["mask_name"] = row["file_path"]
        if self.enable_inpaint and not self.enable_bucket:
            pixels = item["pixel_values"]
            start_only = self.mask_image_start_only and not self.upstream_compat
            mask = get_random_mask(pixels.shape, image_start_only=start_only)
            fill = torch.full_like(pixels, self.inpaint_mask_fill_value)
            item["mask"] = mask
            item["mask_pixel_values"] = torch.where(mask.bool(), fill, pixels)
            item["clip_pixel_values"] = first_frame_as_image(pixels)
        return item


class ImageVideoControlDataset(ImageVideoDataset):
    """Captioned pictures and clips with a control clip, a camera path and/or pictures of subjects."""

    schema = CONTROL_SCHEMA

    def __init__(
        self,
        ann_path: str,
        data_root: str | None = None,
        video_sample_size: int | Sequence[int] = 512,
        video_sample_stride: int = 4,
        video_sample_n_frames: int = 16,
        image_sample_size: int | Sequence[int] = 512,
        video_repeat: int = 0,
        text_drop_ratio: float = 0.1,
        enable_bucket: bool = False,
        video_length_drop_start: float = 0.0,
        video_length_drop_end: float = 1.0,
        enable_inpaint: bool = False,
        inpaint_mask_fill_value: float = 0,
        enable_camera_info: bool = False,
        enable_subject_info: bool = False,
        padding_subject_info: bool = True,
        return_file_name: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            ann_path,
            data_root,
            video_sample_size,
            video_sample_stride,
            video_sample_n_frames,
            image_sample_size,
            video_repeat,
            text_drop_ratio,
            enable_bucket,
            video_length_drop_start,
            video_length_drop_end,
            enable_inpaint,
            inpaint_mask_fill_value,
            return_file_name,
            **options,
        )
        self.enable_camera_info = enable_camera_info
        self.enable_subject_info = enable_subject_info
        self.padding_subject_info = padding_subject_info
        #: Order of the subject lists, which upstream shuffles in place and so carries on from epoch to epoch.
        self._subject_order: dict[int, list[str]] = {}

    def read_item(self, row: dict[str, Any], idx: int) -> dict[str, Any]:
        read = self._read_video_row if is_video(row) else self._read_image_row
        if self.sources is not None:
            read = self._read_row_by_cache
        item = {**read(row, idx), "data_type": "video" if is_video(row) else "image", "idx": idx}
        return self._finish(item, row)

    def get_batch(self, idx: int) -> dict[str, Any]:
        """The parts of a row; errors are the caller's."""
        row = self.dataset[idx % self.length]
        return (self._read_video_row if is_video(row) else self._read_image_row)(row, idx % self.length)

    def _read_video_row(self, row: dict[str, Any], idx: int) -> dict[str, Any]:
        frames, indices, length = self.read_clip(row["file_path"], at_most=self._control_length(row))
        text = self.draw_text(row)
        control, camera = self._read_control_clip(row.get("control_file_path"), frames, indices, length)
        return {
            "pixel_values": self.shape_clip(frames),
            "control_pixel_values": self.shape_clip(control),
            **({"control_camera_values": camera} if self.enable_camera_info else {}),
            "subject_image": self._read_subjects(row, idx, *frames.shape[1:3]),
            "text": text,
        }

    def _read_image_row(self, row: dict[str, Any], idx: int) -> dict[str, Any]:
        image = load_image(self.path_of(row["file_path"]), upstream_compat=self.upstream_compat)
        text = self.draw_text(row)
        control_file = row.get("control_file_path")
        if control_file:
            control = load_image(
                self.path_of(control_file), upstream_compat=self.upstream_compat, background=CONTROL_BACKGROUND
            )
        else:
            control = Image.new("RGB", image.size)
        return {
            "pixel_values": self.shape_image(image),
            "control_pixel_values": self.shape_image(control),
            **({"control_camera_values": None} if self.enable_camera_info else {}),
            "subject_image": self._read_subjects(row, idx, image.height, image.width),
            "text": text,
        }

    def _read_row_by_cache(self, row: dict[str, Any], idx: int) -> dict[str, Any]:
        """Like the two above, with the same draws; raw frames are decoded when somebody looks at them."""
        name, control_name, camera = row["file_path"], row.get("control_file_path"), None
        frames = (self.sources.clip(self, name, at_most=self._control_length(row)) if is_video(row)
                  else self.sources.picture(self, name))
        text = self.draw_text(row)
        control = self.sources.checked(self.sources.control(self, row, frames))
        if is_video(row) and self.enable_camera_info and str(control_name).lower().endswith(".txt"):
            length = self.sources.look(self.path_of(name), kind="video", compat=self.upstream_compat)
            camera = poses_at_frames(read_pose_file(self.path_of(control_name)), clip_frames=length["media"]["frames"],
                                     indices=np.asarray(frames.origin["indices"]))  # fmt: skip
        subjects = self._read_subjects(row, idx, *frames.shape[1:3])
        found = {"pixel_values": frames, "control_pixel_values": control, "subject_image": subjects, "text": text}
        return {**found, "control_camera_values": camera} if self.enable_camera_info else found

    def _control_length(self, row: dict[str, Any]) -> int | None:
        """Frames of the control clip: a target may not be read beyond its control."""
        name = row.get("control_file_path")
        if self.upstream_compat or not name or media_kind(name) != "video":
            return None
        return probe_media(self.path_of(name), kind="video").frames

    def _read_control_clip(
        self, name: str | None, frames: np.ndarray, indices: np.ndarray, length: int
    ) -> tuple[np.ndarray, torch.Tensor | None]:
        """``(control frames, camera rows)`` at the frames of the clip; no control is black."""
        if not name:
            return np.zeros_like(frames), None
        if name.lower().endswith(".txt") and self.enable_camera_info:
            poses = poses_at_frames(read_pose_file(self.path_of(name)), clip_frames=length, indices=indices)
            if not self.enable_bucket:
                size = min(self.video_sample_size)
                poses = process_pose_params(poses, width=size, height=size).permute(0, 3, 1, 2).contiguous()
            return np.zeros_like(frames), poses
        with self.open_clip(name) as reader:
            return reader.read(indices, transform=self._shrink), None

    def _read_subjects(self, row: dict[str, Any], idx: int, height: int, width: int) -> np.ndarray | None:
        """Up to four subject pictures ``[k, H, W, 3]`` in drawn order, half of them mirrored."""
        if not self.enable_subject_info:
            return None
        names = list(row.get("object_file_path") or [])
        if self.upstream_compat:
            names = self._subject_order.setdefault(self.dataset.source_row(idx), names)
        random.shuffle(names)
        subjects = []
        for name in names[:MAX_SUBJECTS]:
            image = load_image(self.path_of(name), upstream_compat=self.upstream_compat)
            if self.padding_subject_info:
                image = padding_image(image, width, height)
            if random.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            subjects.append(np.asarray(image))
        return np.stack(subjects) if subjects else np.zeros((0, height, width, 3), np.uint8)


class TextDataset(AnnotatedDataset):
    """Captions only."""

    def __init__(
        self,
        ann_path: str,
        text_drop_ratio: float = 0.0,
        **reading: Any,
    ) -> None:
        super().__init__(ann_path, data_root=None, schema=TEXT_SCHEMA, **reading)
        self.text_drop_ratio = text_drop_ratio

    def read_item(self, row: dict[str, Any], idx: int) -> dict[str, Any]:
        return {"text": "" if random.random() < self.text_drop_ratio else row["text"], "idx": idx}


class ImageVideoSafetensorsDataset(AnnotatedDataset):
    """Tensors prepared beforehand: each row names a safetensors file, an item is the dictionary in it."""

    def __init__(
        self,
        ann_path: str,
        data_root: str | None = None,
        **reading: Any,
    ) -> None:
        super().__init__(ann_path, data_root=data_root, schema=FILE_SCHEMA, **reading)

    def read_item(self, row: dict[str, Any], idx: int) -> dict[str, Any]:
        from safetensors.torch import load_file

        path = Path(self.path_of(row["file_path"]))
        if path.suffix != ".safetensors":
            raise ValueError(f"{path}: expected a .safetensors file")
        return dict(load_file(path))
