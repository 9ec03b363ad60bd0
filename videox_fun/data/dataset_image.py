"""Captioned pictures of one size."""

from __future__ import annotations

from typing import Any

from videox_fun.data.dataset_image_video import ImageVideoDataset

__all__ = ["CC15M"]


class CC15M(ImageVideoDataset):
    """Pictures with ``file_path`` and ``text``, as squares of ``resolution`` ``[3, S, S]`` in [-1, 1].

    With ``enable_bucket`` an item holds the raw picture ``[1, H, W, 3]``.
    """

    def __init__(
        self,
        json_path: str,
        video_folder: str | None = None,
        resolution: int = 512,
        enable_bucket: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(json_path, video_folder, resolution, image_sample_size=resolution,
                         enable_bucket=enable_bucket, **{"text_drop_ratio": 0.0, **options})  # fmt: skip

    def read_item(self, row: dict[str, Any], idx: int) -> dict[str, Any]:
        item = super().read_item(row, idx)
        if not self.enable_bucket:
            item["pixel_values"] = item["pixel_values"][0]
        return item
