"""Datasets of clips with companions: sound, a pose, a face, what lies behind; and the older video-only ones.

All of them read rows the way ``ImageVideoDataset`` does, so bad rows, draws, seeking and shrinking are the same, and
add what their scripts train on. Companion clips are read at the frames of the target. A row that lacks an optional
companion gets the neutral value: grey (127.5) for pixels, 255 for masks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from videox_fun.data.audio import read_audio
from videox_fun.data.dataset_image_video import ImageVideoDataset
from videox_fun.data.decode import load_image
from videox_fun.data.metadata import RowSchema, RowStore, read_source

__all__ = ["VideoAnimateDataset", "VideoDataset", "VideoSpeechControlDataset", "VideoSpeechDataset", "WebVid10M"]

_FACTS = ("type", "width", "height", "frames", "fps")
_GREY = 127.5
_FASTEST = 30


class VideoDataset(ImageVideoDataset):
    """Captioned clips of one size."""

    def __init__(
        self,
        ann_path: str | RowStore,
        data_root: str | None = None,
        sample_size: int | Sequence[int] = 256,
        sample_stride: int = 4,
        sample_n_frames: int = 16,
        enable_bucket: bool = False,
        enable_inpaint: bool = False,
        inpaint_mask_fill_value: float = 0,
        video_length_drop_start: float = 0.0,
        video_length_drop_end: float = 1.0,
        text_drop_ratio: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(
            ann_path, data_root, sample_size, sample_stride, sample_n_frames, sample_size, 0, text_drop_ratio,
            enable_bucket, video_length_drop_start, video_length_drop_end, enable_inpaint, inpaint_mask_fill_value,
            **options,
        )  # fmt: skip


class WebVid10M(VideoDataset):
    """Clips listed as WebVid does: columns ``videoid``, ``name`` (the caption) and ``page_dir``."""

    def __init__(
        self,
        csv_path: str,
        video_folder: str,
        sample_size: int | Sequence[int] = 256,
        sample_stride: int = 4,
        sample_n_frames: int = 16,
        enable_bucket: bool = False,
        enable_inpaint: bool = False,
        is_image: bool = False,
        **options: Any,
    ) -> None:
        rows = RowStore(_webvid_rows(csv_path))
        super().__init__(rows, video_folder, sample_size, sample_stride, 1 if is_image else sample_n_frames,
                         enable_bucket, enable_inpaint, **{"text_drop_ratio": 0.0, **options})  # fmt: skip
        self.is_image = is_image

    def read_item(self, row: dict[str, Any], idx: int) -> dict[str, Any]:
        item = super().read_item(row, idx)
        if self.is_image:
            item.update(pixel_values=item["pixel_values"][0], data_type="image")
        return item


def _webvid_rows(csv_path: str) -> list[dict[str, Any]]:
    rows = []
    for number, row in enumerate(read_source(csv_path, data_format="videox").rows, 1):
        absent = [key for key in ("videoid", "name", "page_dir") if key not in row]
        if absent:
            raise ValueError(f"{csv_path}: row {number} has no {absent[0]!r}; WebVid has videoid, name, page_dir")
        rows.append({"file_path": f"{row['page_dir']}/{row['videoid']}.mp4", "text": row["name"], "type": "video"})
    return rows


class VideoSpeechDataset(ImageVideoDataset):
    """Captioned clips with their sound (``audio_path``).

    The stride is raised until the clip runs at 30 frames per second or less. Items get ``audio`` (one channel at
    ``audio_sr``, as long as the frames), ``fps`` of the frames and, with ``enable_motion_info``,
    ``motion_pixel_values``: the frames before the first at the same stride.
    """

    schema = RowSchema(required=("file_path", "text", "audio_path"), optional=(*_FACTS, "control_file_path"))

    def __init__(
        self,
        ann_path: str | RowStore,
        data_root: str | None = None,
        video_sample_size: int | Sequence[int] = 512,
        video_sample_stride: int = 4,
        video_sample_n_frames: int = 16,
        enable_bucket: bool = False,
        enable_inpaint: bool = False,
        inpaint_mask_fill_value: float = 0,
        audio_sr: int = 16000,
        text_drop_ratio: float = 0.1,
        enable_motion_info: bool = False,
        motion_frames: int = 73,
        return_file_name: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            ann_path, data_root, video_sample_size, video_sample_stride, video_sample_n_frames, video_sample_size, 0,
            text_drop_ratio, enable_bucket, 0.0, 1.0, enable_inpaint, inpaint_mask_fill_value, return_file_name,
            **{"mask_image_start_only": True, **options},
        )  # fmt: skip
        self.audio_sr = audio_sr
        self.enable_motion_info = enable_motion_info
        self.motion_frames = motion_frames

    def too_fast(self, fps: float, stride: int) -> bool:
        return fps / stride > _FASTEST

    def read_item(self, row: dict[str, Any], idx: int) -> dict[str, Any]:
        with self.open_clip(row["file_path"]) as reader:
            fps, stride = reader.fps, self.video_sample_stride
            while self.too_fast(fps, stride):
                stride += 1
            start, count = self._draw_start(len(reader), stride, row["file_path"])
            indices = start + stride * np.arange(count)
            frames = reader.read(indices, transform=self._shrink)
            motion = self._motion(reader, start, stride, frames) if self.enable_motion_info else None
        audio = read_audio(self.path_of(row["audio_path"]), rate=self.audio_sr, start=start / fps,
                           seconds=(count - 1) * stride / fps)  # fmt: skip
        item = {"pixel_values": self.shape_clip(frames), "text": self.draw_text(row), "data_type": "video",
                "idx": idx, "audio": audio, "sample_rate": self.audio_sr, "fps": fps / stride}  # fmt: skip
        if motion is not None:
            item["motion_pixel_values"] = self._shape_floats(motion)
        self.add_companions(item, row, indices, frames)
        return self._finish(item, row)

    def _draw_start(self, length: int, stride: int, name: str) -> tuple[int, int]:
        count = min(self.video_sample_n_frames, (length - 1) // stride + 1)
        if count < 2:
            raise ValueError(f"{name}: {length} frame(s) are too few at stride {stride}")
        return random.randint(0, length - 1 - (count - 1) * stride), count

    def _motion(self, reader: Any, start: int, stride: int, frames: np.ndarray) -> np.ndarray:
        before = [index for index in range(start - stride * self.motion_frames, start, stride) if index >= 0]
        motion = np.full((self.motion_frames, *frames.shape[1:]), _GREY, np.float32)
        if before:
            motion[self.motion_frames - len(before) :] = reader.read(before, transform=self._shrink)
        return motion

    def _shape_floats(self, frames: np.ndarray) -> Any:
        """Like ``shape_clip``; half-grey stays half-grey, in the middle of the range."""
        if self.enable_bucket:
            return frames
        shaped = self.shape_clip(frames.astype(np.uint8))
        shaped[[index for index, frame in enumerate(frames) if (frame == _GREY).all()]] = 0.0
        return shaped

    def add_companions(
        self, item: dict[str, Any], row: dict[str, Any], indices: np.ndarray, frames: np.ndarray
    ) -> None:
        """More clips of a row, read at ``indices``."""


class VideoSpeechControlDataset(VideoSpeechDataset):
    """Speech with a control clip (``control_file_path``, may be null: black)."""

    schema = RowSchema(required=("file_path", "text", "audio_path", "control_file_path"), optional=_FACTS,
                       nullable=("control_file_path",))  # fmt: skip

    def too_fast(self, fps: float, stride: int) -> bool:
        return int(fps // stride) > _FASTEST

    def add_companions(
        self, item: dict[str, Any], row: dict[str, Any], indices: np.ndarray, frames: np.ndarray
    ) -> None:
        control = np.zeros_like(frames)
        if row["control_file_path"]:
            with self.open_clip(row["control_file_path"]) as reader:
                control = reader.read(indices, transform=self._shrink)
        item["control_pixel_values"] = self.shape_clip(control)


class VideoAnimateDataset(ImageVideoDataset):
    """A person moved by another's pose: ``control_file_path`` (pose), ``face_file_path``, ``ref_file_path``, and
    optionally ``background_file_path`` and ``mask_file_path``. Needs ``enable_bucket``: sizes differ between them.
    """

    schema = RowSchema(
        required=("file_path", "text", "control_file_path", "face_file_path"),
        optional=(*_FACTS, "background_file_path", "mask_file_path", "ref_file_path"),
    )

    def __init__(
        self,
        ann_path: str | RowStore,
        data_root: str | None = None,
        video_sample_size: int | Sequence[int] = 512,
        video_sample_stride: int = 4,
        video_sample_n_frames: int = 16,
        video_repeat: int = 0,
        text_drop_ratio: float = 0.1,
        enable_bucket: bool = False,
        video_length_drop_start: float = 0.1,
        video_length_drop_end: float = 0.9,
        return_file_name: bool = False,
        **options: Any,
    ) -> None:
        if not enable_bucket:
            raise ValueError("VideoAnimateDataset needs enable_bucket: pose, face and picture have sizes of their own")
        super().__init__(
            ann_path, data_root, video_sample_size, video_sample_stride, video_sample_n_frames, video_sample_size,
            video_repeat, text_drop_ratio, enable_bucket, video_length_drop_start, video_length_drop_end,
            return_file_name=return_file_name, **options,
        )  # fmt: skip

    def read_item(self, row: dict[str, Any], idx: int) -> dict[str, Any]:
        frames, indices, _ = self.read_clip(row["file_path"])
        text = self.draw_text(row)

        def companion(key: str) -> np.ndarray | None:
            if not row.get(key):
                return None
            with self.open_clip(row[key]) as reader:
                return reader.read(indices, transform=self._shrink)

        background, mask = companion("background_file_path"), companion("mask_file_path")
        height, width = frames.shape[1:3]
        reference = self._reference(row, frames)
        item = {
            "pixel_values": frames, "text": text, "data_type": "video", "idx": idx,
            "control_pixel_values": companion("control_file_path"),
            "face_pixel_values": companion("face_file_path"),
            "background_pixel_values": background if background is not None
            else np.full(frames.shape, _GREY, np.float32),
            "mask": mask[..., :1] if mask is not None else np.full((len(frames), height, width, 1), 255, np.uint8),
            "ref_pixel_values": reference[None],
            "clip_pixel_values": reference,
        }  # fmt: skip
        return self._finish(item, row)

    def _reference(self, row: dict[str, Any], frames: np.ndarray) -> np.ndarray:
        """The reference picture; without one, the first frame read."""
        if not row.get("ref_file_path"):
            return frames[0]
        return self._shrink(np.array(load_image(self.path_of(row["ref_file_path"]))))
