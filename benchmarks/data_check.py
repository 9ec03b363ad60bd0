"""How long ``videox-data check`` takes: rows that carry their facts, and clips that have to be opened.

Prints one JSON object: seconds for ``--rows`` rows with sizes (one file behind all of them), seconds to probe
``--clips`` clips of 64 frames 320x180, and the rates that follow. ``--memory`` measures instead how the memory of a
process moves over reads of one clip with ``--rows`` rows of long captions at hand.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
import time
from multiprocessing import active_children
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

from videox_fun.data.check import check
from videox_fun.data.module import DataOptions, build_data
from videox_fun.data.probe import _probe


def _clip(path: Path, frames: int = 64) -> Path:
    import av

    picture = np.random.default_rng(0).integers(0, 255, (12, 20, 3), dtype=np.uint8).repeat(15, 0).repeat(16, 1)
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264" if "libx264" in av.codecs_available else "mpeg4", rate=24)
        stream.height, stream.width, stream.pix_fmt = *picture.shape[:2], "yuv420p"
        for number in range(frames):
            rolled = np.ascontiguousarray(np.roll(picture, 4 * number, axis=1))
            out.mux(stream.encode(av.VideoFrame.from_ndarray(rolled, format="rgb24")))
        out.mux(stream.encode())
    return path


def _options(meta: Path, **over: object) -> DataOptions:
    return DataOptions(**{"train_data_meta": str(meta), "train_data_dir": str(meta.parent), "enable_bucket": True,
                          "video_sample_size": 256, "image_sample_size": 256, "video_sample_stride": 2,
                          "video_sample_n_frames": 17, "text_drop_ratio": 0.0, **over})  # fmt: skip


def _write(folder: Path, rows: list[dict]) -> Path:
    meta = folder / "metadata.json"
    meta.write_text(json.dumps(rows))
    return meta


def check_rows(folder: Path, count: int) -> dict[str, float]:
    """Rows that say everything about their file."""
    _clip(folder / "a.mp4")
    shapes = [(320, 180), (180, 320), (240, 240), (400, 180)]
    rows = [{"file_path": "a.mp4", "text": f"a caption of some length that says number {number}", "type": "video",
             "width": shapes[number % 4][0], "height": shapes[number % 4][1], "frames": 64, "fps": 24.0}
            for number in range(count)]  # fmt: skip
    meta = _write(folder, rows)
    started, cpu = time.perf_counter(), time.process_time()
    report = check(_options(meta))
    return {"rows": report.rows, "rows_s": round(time.perf_counter() - started, 2),
            "rows_cpu_s": round(time.process_time() - cpu, 2)}  # fmt: skip


def probe_clips(folder: Path, count: int) -> dict[str, float]:
    """Rows without facts: every clip is opened."""
    first = _clip(folder / "0.mp4")
    for number in range(1, count):
        shutil.copyfile(first, folder / f"{number}.mp4")
    _probe.cache_clear()
    rows = [{"file_path": f"{number}.mp4", "text": f"caption {number}"} for number in range(count)]
    meta = _write(folder, rows)
    started = time.perf_counter()
    report = check(_options(meta))
    seconds = time.perf_counter() - started
    assert report.summary is not None and report.summary.kept == count
    return {"clips": count, "clips_s": round(seconds, 2), "clips_per_s": round(count / seconds, 1)}


def resident_mib() -> float:
    """Resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as handle:
        return int(handle.read().split()[1]) * 4096 / 2**20


def own_mib(process: int) -> float:
    """Memory of a process that it shares with no other."""
    with open(f"/proc/{process}/smaps_rollup", encoding="ascii") as handle:
        return sum(int(line.split()[1]) for line in handle if line.startswith("Private_")) / 1024


def memory(folder: Path, *, rows: int, samples: int, workers: int = 0) -> dict[str, object]:
    """Memory (of workers: what they do not share) while a dataset of ``rows`` rows is read ``samples`` times."""
    _clip(folder / "a.mp4")
    caption = "a long caption with many words about what is seen " * 6
    lines = ({"file_path": "a.mp4", "text": f"{number} {caption}"} for number in range(rows))
    meta = folder / "metadata.jsonl"
    with open(meta, "w", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)
    before = resident_mib()
    dataset = build_data(_options(meta)).dataset
    gc.collect()
    loaded, seen = resident_mib(), []
    order = [number * 97 % rows for number in range(samples)]
    items = DataLoader(dataset, batch_size=None, sampler=order, num_workers=workers)
    for number, _ in enumerate(items):
        if number % max(samples // 10, 1) == max(samples // 10, 1) - 1:
            seen.append(round(resident_mib() + sum(own_mib(child.pid) for child in active_children()), 1))
    return {"rows": rows, "metadata_mib": round(meta.stat().st_size / 2**20, 1),
            "loaded_mib": round(loaded - before, 1), "workers": workers, "samples": samples, "memory_mib": seen,
            "growth_mib": round(seen[-1] - seen[len(seen) // 5], 1)}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--clips", type=int, default=500)
    parser.add_argument("--samples", type=int, default=2_000)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if args.memory:
            result = memory(Path(folder), rows=args.rows, samples=args.samples, workers=args.workers)
        else:
            result = {**check_rows(Path(folder), args.rows), **probe_clips(Path(folder), args.clips)}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
