"""Samplers: a resumable shuffle, and batches of one kind and one aspect ratio.

``RandomSampler`` draws the permutation of an epoch and counts what it handed out, so that an epoch can be entered in
the middle. The batch samplers sort indices into buckets and emit a bucket when it is full; what is left over stays for
the next epoch, so over a run each row is seen equally often. All of them have ``state_dict``/``load_state_dict``,
exact at each batch boundary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler

from videox_fun.data.decode import DecodeError, image_size, media_kind
from videox_fun.data.geometry import (
    ASPECT_RATIO_512,
    ASPECT_RATIO_RANDOM_CROP_512,
    ASPECT_RATIO_RANDOM_CROP_PROB,
    Table,
    get_closest_ratio,
)
from videox_fun.data.metadata import RowStore, is_video, to_size
from videox_fun.data.probe import probe_media
from videox_fun.data.storage import is_url

logger = logging.getLogger(__name__)

__all__ = [
    "ASPECT_RATIO_512",
    "ASPECT_RATIO_RANDOM_CROP_512",
    "ASPECT_RATIO_RANDOM_CROP_PROB",
    "AspectRatioBatchImageSampler",
    "AspectRatioBatchImageVideoSampler",
    "AspectRatioBatchSampler",
    "BatchSampler",
    "ImageVideoSampler",
    "RandomSampler",
    "ResumableBatchSampler",
    "RowSizes",
    "get_closest_ratio",
    "get_image_size_without_loading",
]


def get_image_size_without_loading(path: str | Path) -> tuple[int, int]:
    """``(width, height)`` of a picture, from its header."""
    height, width = image_size(path)
    return width, height


class RandomSampler(Sampler[int]):
    """Shuffled indices. ``_pos_start`` items of the first permutation are skipped, and it follows what is handed out.

    ``k_repeat`` repeats each index that many times in a row.
    """

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        k_repeat: int = 1,
    ) -> None:
        if num_samples is not None and num_samples <= 0:
            raise ValueError(f"num_samples must be positive, got {num_samples}")
        self.data_source = data_source
        self.replacement = replacement
        self._num_samples = num_samples
        self.generator = generator
        self.k_repeat = k_repeat
        self._pos_start = 0

    @property
    def num_samples(self) -> int:
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def __len__(self) -> int:
        return self.num_samples * self.k_repeat

    def __iter__(self) -> Iterator[int]:
        count = len(self.data_source)
        generator = self.generator
        if generator is None:
            generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        if self.replacement:
            yield from torch.randint(count, (self.num_samples,), generator=generator, dtype=torch.int64).tolist()
            return
        if self._pos_start >= count:
            self._pos_start = 0
        for _ in range(self.num_samples // count):
            order = torch.randperm(count, generator=generator).tolist()
            logger.debug("order of this epoch: %s ...", order[:10])
            yield from self._hand_out(order)
        # The permutation of the remainder is drawn even when there is none: the generator's next epoch depends on it.
        yield from self._hand_out(torch.randperm(count, generator=generator).tolist()[: self.num_samples % count])
        self._pos_start = 0

    def _hand_out(self, order: list[int]) -> Iterator[int]:
        for index in order[self._pos_start :]:
            self._pos_start = (self._pos_start + 1) % len(self.data_source)
            for _ in range(self.k_repeat):
                yield index


class RowSizes:
    """Height and width of rows: as the row says, else probed from the file. Failures are reported once."""

    def __init__(self, rows: Sequence[dict[str, Any]], *, folder: str | None, upstream_compat: bool = False) -> None:
        self.rows = rows
        self.folder = folder
        self.upstream_compat = upstream_compat
        self._reported: set[int] = set()

    def __call__(self, index: int, row: dict[str, Any]) -> tuple[int, int] | None:
        """``(height, width)`` or ``None`` for a row that cannot be used."""
        height, width = to_size(row.get("height")), to_size(row.get("width"))
        if height is not None and width is not None:
            return height, width
        path = resolve(row["file_path"], self.folder)
        kind = "video" if is_video(row) else "image"
        try:
            info = probe_media(path, kind=kind, upstream_compat=self.upstream_compat)
        except (DecodeError, OSError) as error:
            self._report(index, path, error)
            return None
        return info.height, info.width

    def _report(self, index: int, path: str, error: Exception) -> None:
        source = self.rows.source_row(index) if isinstance(self.rows, RowStore) else index
        if source not in self._reported:
            self._reported.add(source)
            logger.warning("row %d is left out, its size cannot be read. File %s, %s", source + 1, path, error)


def resolve(path: str, folder: str | None) -> str:
    """The path below the data folder; absolute paths and URLs stay."""
    return str(Path(folder) / path) if folder and not is_url(path) else path


class ResumableBatchSampler(BatchSampler):
    """Consecutive indices in batches; base of the bucketed samplers.

    A subclass says in ``bucket_of`` where an index belongs. ``sampler`` is iterated once per epoch.
    """

    #: Whether a bucket that is not full at the end of an epoch waits for the next one.
    carries_leftovers = False

    def __init__(self, sampler: Sampler[int], batch_size: int, drop_last: bool = False) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.buckets: dict[str, list[int]] = {}

    def bucket_of(self, index: int) -> str | None:
        """Name of the bucket of an index; ``None`` leaves the index out."""
        return "all"

    def __iter__(self) -> Iterator[list[int]]:
        for index in self.sampler:
            name = self.bucket_of(index)
            if name is None:
                continue
            bucket = self.buckets.setdefault(name, [])
            bucket.append(index)
            if len(bucket) == self.batch_size:
                batch = bucket[:]
                bucket.clear()
                yield batch
        if not self.carries_leftovers:
            leftover = [bucket for bucket in self.buckets.values() if bucket]
            self.buckets = {}
            if not self.drop_last:
                yield from leftover

    @property
    def leftovers(self) -> dict[str, list[int]]:
        return {name: bucket[:] for name, bucket in self.buckets.items() if bucket}

    def state_dict(self) -> dict[str, Any]:
        return {"position": getattr(self.sampler, "_pos_start", 0), "buckets": self.leftovers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if hasattr(self.sampler, "_pos_start"):
            self.sampler._pos_start = int(state["position"])
        self.buckets = {name: list(bucket) for name, bucket in state["buckets"].items()}


class AspectRatioBatchImageVideoSampler(ResumableBatchSampler):
    """Batches of one kind (pictures or videos) and one aspect ratio of the table."""

    carries_leftovers = True

    def __init__(
        self,
        sampler: Sampler[int],
        dataset: Sequence[dict[str, Any]],
        batch_size: int,
        train_folder: str | None = None,
        aspect_ratios: Table = ASPECT_RATIO_512,
        drop_last: bool = False,
        *,
        upstream_compat: bool = False,
    ) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.dataset = dataset
        self.train_folder = train_folder
        self.aspect_ratios = aspect_ratios
        self.sizes = RowSizes(dataset, folder=train_folder, upstream_compat=upstream_compat)
        self._ratios: dict[tuple[int, int], float] = {}

    def kind_of(self, row: dict[str, Any]) -> str:
        return "video" if is_video(row) else "image"

    def bucket_of(self, index: int) -> str | None:
        row = self.dataset[index]
        size = self.sizes(index, row)
        if size is None:
            return None
        if size not in self._ratios:
            self._ratios[size] = get_closest_ratio(*size, ratios=self.aspect_ratios)[1]
        return f"{self.kind_of(row)}:{self._ratios[size]}"


class AspectRatioBatchSampler(AspectRatioBatchImageVideoSampler):
    """Batches of videos of one aspect ratio."""

    def __init__(
        self,
        sampler: Sampler[int],
        dataset: Sequence[dict[str, Any]],
        batch_size: int,
        video_folder: str | None = None,
        train_data_format: str = "webvid",
        aspect_ratios: Table = ASPECT_RATIO_512,
        drop_last: bool = False,
        config: Any = None,
        **kwargs: Any,
    ) -> None:
        rows = [_webvid_row(row) for row in dataset] if train_data_format == "webvid" else dataset
        super().__init__(sampler, rows, batch_size, video_folder, aspect_ratios, drop_last, **kwargs)
        self.config = config

    def kind_of(self, row: dict[str, Any]) -> str:
        return "video"


def _webvid_row(row: dict[str, Any]) -> dict[str, Any]:
    """WebVid's columns (``videoid``, ``page_dir``) as a row of ours; rows that have a path stay."""
    if "file_path" in row or "videoid" not in row:
        return {"type": "video", **row}
    name = f"{row['videoid']}.mp4"
    folder = row.get("page_dir")
    return {**row, "file_path": str(Path(folder) / name) if folder else name, "type": "video"}


class AspectRatioBatchImageSampler(AspectRatioBatchImageVideoSampler):
    """Batches of pictures of one aspect ratio."""

    def __init__(
        self,
        sampler: Sampler[int],
        dataset: Sequence[dict[str, Any]],
        batch_size: int,
        train_folder: str | None = None,
        aspect_ratios: Table = ASPECT_RATIO_512,
        drop_last: bool = False,
        config: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(sampler, dataset, batch_size, train_folder, aspect_ratios, drop_last, **kwargs)
        self.config = config

    def kind_of(self, row: dict[str, Any]) -> str:
        return "image"

    def bucket_of(self, index: int) -> str | None:
        if media_kind(self.dataset[index]["file_path"]) == "video":
            return None
        return super().bucket_of(index)


class ImageVideoSampler(ResumableBatchSampler):
    """Batches of one kind (pictures or videos), any size."""

    def __init__(
        self, sampler: Sampler[int], dataset: Any, batch_size: int, drop_last: bool = False
    ) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.dataset = dataset

    carries_leftovers = True

    def bucket_of(self, index: int) -> str | None:
        rows = getattr(self.dataset, "dataset", self.dataset)
        return "video" if is_video(rows[index]) else "image"
