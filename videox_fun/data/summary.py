"""What a run will really train on, told before it starts.

Rows are looked at without decoding clips: sizes come from the metadata, and files are opened (packets counted, one
frame decoded) by a few threads for a limited time, rows without a size first, then evenly spread over the set. For
each distinct kind, size and length the flags' possible outcomes are enumerated with the same functions that the
collate draws from.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from videox_fun.data.bucket_sampler import resolve
from videox_fun.data.captions import caption_warnings
from videox_fun.data.collate import CollateRules
from videox_fun.data.geometry import (
    ASPECT_RATIO_512,
    ASPECT_RATIO_RANDOM_CROP_512,
    candidate_sizes,
    cover_size,
    floor_to,
    get_closest_ratio,
    legal_frames,
    resampled_length,
    sampled_frames,
    scaled,
)
from videox_fun.data.metadata import is_video, to_rate, to_size
from videox_fun.data.probe import MediaInfo, probe_media
from videox_fun.data.resize import short_side_size
from videox_fun.data.transforms import short_side_resize

if TYPE_CHECKING:
    from videox_fun.data.module import DataModule, DataOptions

_SHOWN = 12


@dataclass(frozen=True)
class Outcome:
    """One size and length that a row may be given; ``scale`` is the enlargement of its pixels."""

    height: int
    width: int
    frames: int
    scale: float


@dataclass
class SizeGroup:
    """Rows of one kind, size and number of sampled frames."""

    kind: str
    height: int
    width: int
    frames: int
    rows: int
    outcomes: list[Outcome]

    def line(self) -> str:
        shown = sorted({(o.height, o.width, o.frames, round(o.scale, 2)) for o in self.outcomes})
        parts = [f"{h}x{w}x{f} (x{scale:g})" for h, w, f, scale in islice(shown, 8)]
        more = f" ... {len(shown)} sizes" if len(shown) > 8 else ""
        return f"{self.kind} {self.height}x{self.width}, {self.frames} frame(s), {self.rows} row(s) -> " + ", ".join(
            parts
        ) + more


@dataclass
class DataSummary:
    """See ``lines``. ``dropped`` maps a row of the annotation file to the reason."""

    source: str
    items: int
    kinds: dict[str, int]
    dropped: dict[int, str] = field(default_factory=dict)
    opened: int = 0
    openable: int = 0
    seconds: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)
    groups: list[SizeGroup] = field(default_factory=list)
    batching: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    infos: dict[int, MediaInfo] = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> int:
        return sum(self.kinds.values())

    @property
    def kept(self) -> int:
        return self.rows - len(self.dropped)

    def lines(self) -> list[str]:
        """The summary as text, one line each."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        text = [f"data: {self.source}: {self.rows} rows ({kinds}), {self.kept} kept, {len(self.dropped)} dropped; "
                f"{self.items} items per epoch"]  # fmt: skip
        if self.openable:
            limit = "" if self.opened == self.openable else ", the time limit; the others are as the metadata says"
            text.append(f"  {self.opened} of {self.openable} files opened in {self.seconds:.1f} s{limit}")
        text += _shown([f"  dropped row {row + 1}: {reason}" for row, reason in sorted(self.dropped.items())])
        text += _shown([f"  bucket {name}: {count} row(s)" for name, count in self.buckets.items()])
        text += [f"  {line}" for line in self.batching]
        if self.groups:
            text.append("  source size (height x width) -> what is trained (height x width x frames, enlargement)")
        text += _shown([f"    {group.line()}" for group in self.groups])
        return text + [f"  warning: {warning}" for warning in self.warnings]


def _shown(lines: Sequence[str]) -> list[str]:
    more = [f"    ... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *more]


def summarize(module: DataModule, *, probe_seconds: float = 30.0, allow_empty: bool = False) -> DataSummary:
    """See ``DataModule.summary``; with ``allow_empty`` a set without one usable row is no error."""
    options, dataset = module.options, module.dataset
    rows = dataset.dataset
    first_item = {rows.source_row(index): index for index in reversed(range(len(rows)))}
    unique = {source: rows[index] for source, index in sorted(first_item.items())}
    kinds = Counter("video" if is_video(row) else "image" for row in unique.values())
    if options.kind in ("text", "safetensors"):
        return DataSummary(dataset.ann_path, len(dataset), {options.kind: len(unique)})
    summary = DataSummary(dataset.ann_path, len(dataset), dict(sorted(kinds.items())))
    started = time.monotonic()
    infos, failures = probe_rows(unique, options, seconds=probe_seconds)
    summary.seconds, summary.openable = time.monotonic() - started, len(unique)
    summary.opened = len(infos) + len(failures)
    summary.dropped.update(failures)
    summary.infos = infos
    _describe(summary, unique, infos, options)
    summary.batching = batching(module, summary)
    summary.warnings += caption_warnings(unique)
    for row, reason in summary.dropped.items():
        dataset.bad_rows.mark(row, reason)
    if summary.kept == 0 and not allow_empty:
        raise ValueError("\n".join([f"{summary.source}: no row is usable", *summary.lines()]))
    return summary


def batching(module: DataModule, summary: DataSummary) -> list[str]:
    """How the rows of the buckets become batches."""
    planned = getattr(module.batch_sampler, "lines", None)
    if planned is not None:
        return planned()
    size = module.options.train_batch_size
    waiting = {name: count % size for name, count in summary.buckets.items() if count % size}
    if not waiting:
        return []
    return [f"{sum(waiting.values())} row(s) in {len(waiting)} bucket(s) fill no batch of {size} and wait for the next "
            "epoch each time; --bucket_mode complete sees every row once per epoch"]


def probe_rows(
    rows: dict[int, dict[str, Any]], options: DataOptions, *, seconds: float
) -> tuple[dict[int, MediaInfo], dict[int, str]]:
    """``(facts, failures)`` of the rows whose files could be opened within ``seconds``."""
    sizeless = [number for number, row in rows.items() if to_size(row.get("width")) is None]
    missing = set(sizeless)
    sized = [number for number in rows if number not in missing]
    step = max(int(len(sized) ** 0.5), 1)
    order = sizeless + [sized[index] for start in range(step) for index in range(start, len(sized), step)]
    deadline = time.monotonic() + seconds

    def work(number: int) -> tuple[int, MediaInfo | str]:
        row = rows[number]
        path = resolve(row["file_path"], options.train_data_dir)
        kind = "video" if is_video(row) else "image"
        try:
            return number, probe_media(path, kind=kind, upstream_compat=options.upstream_compat)
        except (ValueError, OSError) as error:
            return number, f"{row['file_path']}: {error}"

    infos: dict[int, MediaInfo] = {}
    failures: dict[int, str] = {}
    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, 8)) as pool:
        # Blocks, so that what lies beyond the time limit is not even queued.
        blocks = (order[start : start + 64] for start in range(0, len(order), 64) if time.monotonic() < deadline)
        for number, result in chain.from_iterable(pool.map(work, block) for block in blocks):
            if isinstance(result, MediaInfo):
                infos[number] = result
            else:
                failures[number] = result
    return infos, failures


def _describe(
    summary: DataSummary, rows: dict[int, dict[str, Any]], infos: dict[int, MediaInfo], options: DataOptions
) -> None:
    groups: dict[tuple[str, int, int, int], int] = defaultdict(int)
    buckets: Counter[str] = Counter()
    short: list[str] = []
    differing: list[str] = []
    known: list[MediaInfo] = []
    for number, row in rows.items():
        if number in summary.dropped:
            continue
        opened, kind = infos.get(number), "video" if is_video(row) else "image"
        info = opened or info_of_row(row)
        said = (to_size(row.get("height")), to_size(row.get("width")))
        size = (info.height, info.width) if info is not None else said
        if opened is not None and None not in said and said != size:
            differing.append(f"row {number + 1} ({row['file_path']}): metadata {said[1]}x{said[0]}, file "
                             f"{size[1]}x{size[0]} (width x height)")  # fmt: skip
        known += [info] if info is not None else []
        frames = _sampled(info, kind, options)
        if frames == 0:
            summary.dropped[number] = f"{row['file_path']}: {info.frames} frame(s), too short"
            continue
        if 0 < frames < options.video_sample_n_frames and kind == "video":
            short.append(f"{row['file_path']} gives {frames}")
        if size[0] is not None and size[1] is not None:
            groups[(kind, size[0], size[1], frames)] += 1
            buckets[_bucket_name(kind, said if None not in said else size)] += 1
    if options.enable_bucket:
        summary.buckets = dict(sorted(buckets.items()))
    summary.groups = [
        SizeGroup(kind, height, width, frames, count, list(outcomes(kind, height, width, frames, options)))
        for (kind, height, width, frames), count in sorted(groups.items(), key=lambda entry: -entry[1])
    ]
    summary.warnings += _warnings(summary, options, short=short, differing=differing, known=known)


def _sampled(info: MediaInfo | None, kind: str, options: DataOptions) -> int:
    if kind == "image":
        return 1
    if info is None:
        return options.video_sample_n_frames
    return frames_read(info.frames, info.fps, options)


def frames_read(length: int, fps: float, options: DataOptions) -> int:
    """How many frames of a clip are read; 0 when it is too short."""
    rate = options.video_sample_fps
    return sampled_frames(
        resampled_length(length, fps=fps, rate=rate),
        n_frames=options.video_sample_n_frames,
        stride=options.video_sample_stride if rate is None else 1,
        upstream_compat=options.upstream_compat,
    )


def info_of_row(row: dict[str, Any]) -> MediaInfo | None:
    """What a row says about its file, when it says enough."""
    height, width, frames = (to_size(row.get(key)) for key in ("height", "width", "frames"))
    video = is_video(row)
    if height is None or width is None or (video and frames is None):
        return None
    return MediaInfo("video" if video else "image", height, width, frames or 1, to_rate(row.get("fps")) or 0.0)


@lru_cache(maxsize=65536)
def _bucket_name(kind: str, size: tuple[int, int]) -> str:
    _, ratio = get_closest_ratio(size[0], size[1], ratios=ASPECT_RATIO_512)
    return f"{kind} {ratio:g}"


def outcomes(kind: str, height: int, width: int, frames: int, options: DataOptions) -> Iterable[Outcome]:
    """Every size and length that the flags can give a row."""
    rules = options.collate_rules()
    if not options.enable_bucket:
        side = options.image_sample_size if kind == "image" else options.video_sample_size
        resized = short_side_resize(height, width, side)
        length = frames if options.upstream_compat else legal_frames(frames, frames, rules.temporal_ratio)
        yield Outcome(side, side, length, min(resized[0] / height, resized[1] / width))
        return
    seen = (height, width)
    if kind == "video":
        seen = short_side_size(height, width, max(options.image_sample_size, options.video_sample_size))
    for base, wanted in _bases(kind, seen, rules):
        for crop_to in _crops(base, seen, rules):
            resized = crop_to if rules.fix_sample_size is not None else cover_size(*seen, crop_to)
            scale = max(resized[0] / height, resized[1] / width)
            yield Outcome(*crop_to, legal_frames(frames, wanted, rules.temporal_ratio), scale)


def _bases(kind: str, seen: tuple[int, int], rules: CollateRules) -> list[tuple[float, float]]:
    wanted = rules.n_frames + rules.temporal_ratio
    if kind == "image":
        shrinks = rules.image_shrinks() if rules.random_hw_adapt else [1]
        return [(rules.image_sample_size / shrink, wanted) for shrink in shrinks]
    if not rules.random_hw_adapt:
        return [(rules.video_sample_size, wanted)]
    if not rules.token_length:
        return [(rules.video_sample_size / shrink, wanted) for shrink in rules.video_shrinks()]
    return [(size, rules.frames_of_size(size)) for size in candidate_sizes(rules.sizes(), sum(seen) / 2)]


def _crops(base: float, seen: tuple[int, int], rules: CollateRules) -> list[tuple[int, int]]:
    if rules.fix_sample_size is not None:
        return [floor_to(rules.fix_sample_size, rules.size_quantum)]
    if rules.random_ratio_crop:
        return [floor_to(size, rules.size_quantum) for size in scaled(ASPECT_RATIO_RANDOM_CROP_512, base).values()]
    size, _ = get_closest_ratio(*seen, ratios=scaled(ASPECT_RATIO_512, base))
    return [floor_to(size, rules.size_quantum)]


def _warnings(
    summary: DataSummary,
    options: DataOptions,
    *,
    short: list[str],
    differing: list[str],
    known: list[MediaInfo],
) -> list[str]:
    found: list[str] = []
    if short:
        found.append(f"{len(short)} clip(s) are shorter than --video_sample_n_frames {options.video_sample_n_frames} "
                     f"at stride {options.video_sample_stride} and give fewer frames: {_some(short)}")  # fmt: skip
    if differing:
        found.append(f"{len(differing)} row(s) have a size that is not the file's; what is decoded is what is trained: "
                     + _some(differing))  # fmt: skip
    enlarged = [(group, max(o.scale for o in group.outcomes)) for group in summary.groups]
    enlarged = [(group, scale) for group, scale in enlarged if scale > 1.005]
    if enlarged:
        rows, (group, scale) = sum(group.rows for group, _ in enlarged), max(enlarged, key=lambda entry: entry[1])
        found.append(f"{rows} row(s) may be enlarged, up to x{scale:.2f} ({group.kind} {group.height}x{group.width}): "
                     "enlarged pictures are blurred; lower --image_sample_size or --video_sample_size")  # fmt: skip
    rates = Counter(round(info.fps, 1) for info in known if info.kind == "video" and info.fps > 0)
    slow = sum(count for rate, count in rates.items() if rate < (options.video_sample_fps or 0) * 0.99)
    if slow:
        found.append(f"{slow} clip(s) have fewer frames per second than --video_sample_fps "
                     f"{options.video_sample_fps:g}: some of their frames are shown twice")  # fmt: skip
    if options.video_sample_fps is None and rates and max(rates) > 1.2 * min(rates):
        listed = ", ".join(f"{rate:g} fps ({count})" for rate, count in sorted(rates.items()))
        span = options.video_sample_stride
        found.append(f"frame rates are mixed: {listed}. --video_sample_stride {span} counts frames, so one step is "
                     f"{span / max(rates):.3f} s to {span / min(rates):.3f} s and motion differs in speed; "
                     "--video_sample_fps samples by time")  # fmt: skip
    if options.inpaint and summary.groups and all(group.frames == 1 for group in summary.groups):
        found.append("every row has one frame: an image-to-video model learns no motion from stills")
    small = [f"{name} ({count})" for name, count in summary.buckets.items() if count < options.train_batch_size]
    if small and options.bucket_mode == "upstream":
        found.append(f"{len(small)} bucket(s) hold fewer rows than --train_batch_size {options.train_batch_size} and "
                     f"fill over several epochs: {_some(small)}")  # fmt: skip
    return found


def _some(texts: Sequence[str]) -> str:
    return "; ".join(texts[:3]) + (" ..." if len(texts) > 3 else "")
