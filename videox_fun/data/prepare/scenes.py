"""Cuts of long videos, and clips between them.

The built-in detector compares colour histograms and small pictures of neighbouring frames: a cut changes both at once,
a pan only the second, a flash comes back. PySceneDetect's content detector is used when it is installed (the
``prepare`` extra). Clips are encoded anew from exact frames, so a clip starts at its cut and not at a key frame near
it; sound is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from videox_fun.data.bucket_sampler import resolve
from videox_fun.data.convert import write_rows
from videox_fun.data.decode import VideoReader
from videox_fun.data.prepare.jsonl import Row, read_lines, run_each
from videox_fun.data.resize import resize_frame

logger = logging.getLogger(__name__)

_SIDE, _BINS, _APART = 64, 8, 8
_PYSCENEDETECT, _BUILT_IN = 27.0, 0.35


def find_scenes(
    rows: Iterable[Row],
    target: str | Path,
    *,
    folder: str | None = None,
    detector: str = "auto",
    threshold: float | None = None,
) -> tuple[int, int]:
    """Append each video's ``scenes`` (``[first frame, frame after the last]``) to ``target``."""
    use = _available() if detector == "auto" else detector

    def work(row: Row) -> Row:
        path = resolve(row["file_path"], folder)
        cuts = _by_pyscenedetect if use == "pyscenedetect" else scene_starts
        level = threshold if threshold is not None else _PYSCENEDETECT if use == "pyscenedetect" else _BUILT_IN
        with VideoReader(path, timeout=3600.0) as reader:
            length, fps = len(reader), reader.fps
        starts = [*cuts(path, threshold=level), length]
        scenes = [[first, last] for first, last in zip(starts, starts[1:], strict=False) if last > first]
        return {"file_path": path, "fps": fps, "detector": use, "scenes": scenes}

    return run_each(rows, target, work)


def _available() -> str:
    try:
        import scenedetect  # noqa: F401
    except ImportError:
        return "built-in"
    return "pyscenedetect"


def scene_starts(path: str | Path, *, threshold: float = _BUILT_IN) -> list[int]:
    """The first frames of the scenes of a video, by the built-in detector."""
    starts, previous = [0], None
    for number, frame in enumerate(_small_frames(path)):
        current = _histogram(frame), frame
        if previous is not None and number - starts[-1] >= _APART:
            colour = 0.5 * float(np.abs(current[0] - previous[0]).sum())
            places = float(np.abs(current[1] - previous[1]).mean()) / 64
            if min(colour, places) > threshold:
                starts.append(number)
        previous = current
    return starts


def _small_frames(path: str | Path) -> Iterator[np.ndarray]:
    with VideoReader(path, timeout=3600.0) as reader:
        for frame in reader.frames():
            yield resize_frame(frame, _SIDE).astype(np.float32)


def _histogram(frame: np.ndarray) -> np.ndarray:
    levels = (frame.astype(np.int64) * _BINS // 256).reshape(-1, 3)
    found = np.bincount(levels @ np.array([_BINS * _BINS, _BINS, 1]), minlength=_BINS**3)
    return found / len(levels)


def _by_pyscenedetect(path: str | Path, *, threshold: float) -> list[int]:
    try:
        from scenedetect import ContentDetector, SceneManager, open_video
    except ImportError as error:
        raise ValueError("PySceneDetect is not installed: pip install 'videox-fun-optim[prepare]', or use "
                         "--detector built-in") from error  # fmt: skip
    manager = SceneManager()
    manager.add_detector(ContentDetector(threshold=threshold, min_scene_len=15))
    manager.detect_scenes(open_video(str(path), backend="pyav"))
    return sorted({0, *(scene[0].get_frames() for scene in manager.get_scene_list())})


def split_videos(source: str | Path, target: str | Path, *, min_seconds: float = 3.0, max_seconds: float = 10.0) -> int:
    """Write the scenes that ``source`` lists as clips into ``target``, with a ``metadata.json``. Returns the count.

    Clips that exist are kept, so a stopped job goes on. Captions are empty: ``videox-data caption`` writes them.
    """
    target = Path(target)
    target.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for video in read_lines(source):
        fps = video["fps"] or 24.0
        for number, (first, last) in enumerate(_parts(video["scenes"], fps, min_seconds, max_seconds)):
            clip = target / f"{Path(video['file_path']).stem}_{number:04d}.mp4"
            if not clip.is_file():
                _encode(video["file_path"], clip, first, last, fps)
            rows.append({"file_path": clip.name, "text": "", "type": "video"})
    write_rows(rows, target / "metadata.json", data_format="videox")
    return len(rows)


def _parts(scenes: Iterable[list[int]], fps: float, shortest: float, longest: float) -> Iterator[tuple[int, int]]:
    at_least, at_most = max(round(shortest * fps), 1), max(round(longest * fps), 1)
    for first, last in scenes:
        for start in range(first, last, at_most):
            stop = min(start + at_most, last)
            if stop - start >= at_least:
                yield start, stop


def _encode(source: str, clip: Path, first: int, last: int, fps: float) -> None:
    import av

    half = clip.with_suffix(".part.mp4")
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with VideoReader(source, timeout=3600.0) as reader, av.open(str(half), "w") as out:
        stream = out.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.options = {"crf": "18", "preset": "veryfast"} if codec == "libx264" else {"qscale": "3"}
        height, width = (side // 2 * 2 for side in reader.size)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for start in range(first, last, 32):
            for picture in reader.read(range(start, min(start + 32, last))):
                even = np.ascontiguousarray(picture[:height, :width])
                out.mux(stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))
        out.mux(stream.encode())
    half.replace(clip)
