"""What the data plane gives: reading the cache, filling it with two processes, decoding samples of long clips.

``read``: entries of the size of 81 frames at 480p, read in random order through the cache, against reading the same
files from first to last byte; the page cache holds them. ``precompute``: the same set filled by one process and by two,
one thread each, without the time to start; seconds, and processor seconds of the busier process. ``decode``: 49 frames
at stride 2 at random places of a 60 s 720p H.264 clip, against decoding from the start up to the last wanted frame.
All in turns; the best round, for ``decode`` the mean over places. ``read`` and ``decode`` count processor time, so that
other programs do not disturb them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402


def timed(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    work()
    return clock() - start


# ---- read ----
def measure_read(folder: Path, *, rounds: int, entries: int = 24, shape: tuple[int, ...] = (32, 21, 60, 104)) -> dict:
    from videox_fun.data.cache_store import CacheStore

    store = CacheStore(folder / "cache")
    for number in range(entries):
        store.write("latents", {"encoder": "v", "number": number}, {"moments": torch.randn(shape).bfloat16()})
    paths = list(store.entries())
    size = sum(path.stat().st_size for path in paths)
    buffer = bytearray(max(path.stat().st_size for path in paths))
    order = random.Random(0).sample(range(entries), entries)

    def plain() -> None:
        for path in paths:
            with open(path, "rb", buffering=0) as handle:
                handle.readinto(buffer)

    def cached() -> None:
        for number in order:
            store.read("latents", {"encoder": "v", "number": number})  # not mapped: all bytes are read

    plain(), cached()
    pairs = [(timed(plain, time.process_time), timed(cached, time.process_time)) for _ in range(rounds)]
    base, found = (min(pair[side] for pair in pairs) for side in (0, 1))
    return {"entry_mib": size / entries / 2**20, "plain_gib_s": size / base / 2**30,
            "cache_gib_s": size / found / 2**30, "ratio": base / found}  # fmt: skip


# ---- precompute ----
_FILL = """
import sys, time, torch
torch.set_num_threads(1)
from videox_fun.training import precompute
from videox_fun.training.entry import prepare_cache
fill, spent = precompute._fill_clips, []
def timed(*words):
    start, used = time.time(), time.process_time()
    fill(*words)
    print("SPAN", start, time.time(), time.process_time() - used, flush=True)
precompute._fill_clips = timed
sys.exit(prepare_cache(sys.argv[1], sys.argv[2:]))
"""


def fill(words: list[str], *, processes: int) -> tuple[float, float]:
    """Of processes that start together: seconds from the first clip to the last, most processor time of one."""
    port = str(random.randint(20000, 40000))
    running = []
    for rank in range(processes):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if processes > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_PORT": port,
                    "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
                    "ACCELERATE_USE_CPU": "true"}  # fmt: skip
        running.append(subprocess.Popen([sys.executable, "-c", _FILL, *words], env=env, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True, cwd=ROOT))
    spans = []
    for process in running:
        out, _ = process.communicate()
        if process.returncode:
            raise RuntimeError("filling the cache failed; run scripts/precompute.py with the same flags to see why")
        spans += [line.split()[1:] for line in out.splitlines() if line.startswith("SPAN")]
    wall = max(float(end) for _, end, _ in spans) - min(float(start) for start, _, _ in spans)
    return wall, max(float(used) for _, _, used in spans)


def measure_precompute(folder: Path, *, rounds: int, clips: int = 10, starts: int = 4, vae_dim: int = 32) -> dict:
    from benchmarks.cache import SCRIPT, command
    from videox_fun.data.demo import build_demo_dataset
    from videox_fun.utils.tiny import make_tiny_checkpoint

    checkpoint = make_tiny_checkpoint(folder / "model", family="wan2.1_t2v", vae_dim=vae_dim)
    metadata = build_demo_dataset(folder / "clips", clips=clips)
    base = [*command(checkpoint, metadata, folder / "out", steps=1), "--cache_latents"]
    base += ["--cache_clip_starts", str(starts)]
    pairs = []
    for number in range(rounds):
        pairs.append([fill([SCRIPT, *base, "--cache_dir_latents", str(folder / f"cache{number}_{count}")],
                           processes=count) for count in (1, 2)])
    wall, used = ([min(pair[side][kind] for pair in pairs) for side in (0, 1)] for kind in (0, 1))
    return {"one_s": wall[0], "two_s": wall[1], "ratio": wall[0] / wall[1], "one_cpu_s": used[0], "two_cpu_s": used[1],
            "cpu_ratio": used[0] / used[1]}  # fmt: skip


# ---- decode ----
def make_long_clip(path: Path, *, seconds: int = 60, fps: int = 24, height: int = 720, width: int = 1280) -> Path:
    """H.264 with the encoder's usual key frames (at most 250 apart)."""
    import av

    rng = np.random.default_rng(0)
    tile = rng.integers(96, 160, (height * 3 // 2, width + 256), dtype=np.uint8)
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=fps)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.options = {"preset": "ultrafast", "crf": "28"}
        for number in range(seconds * fps):
            shift = number * 2 % 256
            planes = np.ascontiguousarray(tile[:, shift : shift + width])
            out.mux(stream.encode(av.VideoFrame.from_ndarray(planes, format="yuv420p")))
        out.mux(stream.encode())
    return path


def measure_decode(folder: Path, *, rounds: int) -> dict:
    from videox_fun.data.decode import VideoReader
    from videox_fun.data.resize import resize_frame

    path, draw = make_long_clip(folder / "long.mp4"), random.Random(0)
    with VideoReader(path) as reader:
        length = len(reader)

    def shrink(frame: np.ndarray) -> np.ndarray:
        return resize_frame(frame, 480)

    def sought(start: int) -> None:
        with VideoReader(path, num_threads=1, timeout=600) as reader:
            reader.read(range(start, start + 97, 2), transform=shrink)

    def from_start(start: int) -> None:
        wanted, found = set(range(start, start + 97, 2)), {}
        with VideoReader(path, num_threads=1, timeout=600) as reader:
            reader._decode(wanted, found, shrink, from_start=True)

    pairs = []
    for _ in range(rounds):
        start = draw.randrange(length - 97)
        pairs.append([timed(partial(way, start), time.process_time) for way in (from_start, sought)])
    base, found = (sum(pair[side] for pair in pairs) / rounds for side in (0, 1))
    return {"from_start_s": base, "sought_s": found, "ratio": base / found}


MEASURES: dict[str, tuple[Callable[..., dict], int]] = {
    "read": (measure_read, 15), "precompute": (measure_precompute, 2), "decode": (measure_decode, 6),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=list(MEASURES), help="read, precompute, decode")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name in options.what:
        measure, rounds = MEASURES[name]
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(Path(folder), rounds=options.rounds or rounds)
        shown = ", ".join(f"{key} {value:.2f}" for key, value in found[name].items() if isinstance(value, float))
        sys.stdout.write(f"{name}: {shown}\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
