"""How long ranks wait for each other with plain and with balanced buckets, by simulation.

A data set as people collect them: landscape, portrait and square clips of 0.5 to 20 s and some pictures. The batches
are those the loader would hand out. A step lasts as long as its costliest batch; the cost of a batch is that of its
tokens and their attention (``batch_plan.RowCost``) at the width of a 1.3B model. Idle is the share of rank time spent
waiting.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from videox_fun.data.batch_plan import RowCost
from videox_fun.data.loader import TrainLoader
from videox_fun.data.module import DataModule, DataOptions, build_data

_SHAPES = [((1920, 1080), 30), ((1280, 720), 25), ((1080, 1920), 20), ((720, 1280), 5), ((1080, 1080), 10),
           ((1440, 1080), 5), ((2560, 1080), 5)]  # fmt: skip


def metadata(folder: Path, *, rows: int, seed: int, pictures: float = 0.1) -> Path:
    """An annotation file with sizes and lengths; the files themselves are never opened."""
    draw = random.Random(seed)
    found: list[dict[str, Any]] = []
    for number in range(rows):
        (width, height), = draw.choices([shape for shape, _ in _SHAPES], [weight for _, weight in _SHAPES])
        row = {"text": "", "width": width, "height": height}
        if draw.random() < pictures:
            found.append({"file_path": f"{number}.jpg", "type": "image", **row})
        else:
            seconds = min(max(draw.lognormvariate(1.2, 0.8), 0.5), 20.0)
            found.append({"file_path": f"{number}.mp4", "type": "video", "frames": int(seconds * 24), **row})
    path = folder / f"rows{rows}_{seed}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    return path


def idle_share(module: DataModule, cost: RowCost, *, ranks: int, epochs: int) -> float:
    loader = TrainLoader(module, rank=0, world=ranks, device="cpu", seed=0, snapshot_rng=dict, restore_rng=dict)
    busy = lasted = 0.0
    for epoch in range(epochs):
        loader._epoch = epoch
        loader._enter(None)
        dealt: list[list[int]] = []
        for batch in module.batch_sampler:
            dealt.append(batch)
            if len(dealt) == ranks:
                costs = [_cost(cost, batch) for batch in dealt]
                busy, lasted, dealt = busy + sum(costs), lasted + ranks * max(costs), []
    return 1.0 - busy / lasted


def _cost(cost: RowCost, batch: list[int]) -> float:
    """All clips of a batch are cut to the shortest."""
    return len(batch) * min(cost(index)[0] for index in batch)


def simulate(*, rows: int, ranks: int, batch: int, epochs: int, seed: int, folder: Path) -> dict[str, float]:
    """Idle share by bucket mode."""
    found = {}
    for mode in ("upstream", "complete", "balanced"):
        options = DataOptions(
            train_data_meta=str(metadata(folder, rows=rows, seed=seed)), train_batch_size=batch, video_sample_size=512,
            image_sample_size=512, video_sample_stride=2, video_sample_n_frames=81, enable_bucket=True, seed=seed,
            bucket_mode=mode,
        )
        module = build_data(options, world=ranks)
        sizes = module.batch_sampler.sizes if mode == "upstream" else module.batch_sampler.inner.sizes
        cost = RowCost(module.dataset.dataset, module.options, sizes=sizes, width=1536)
        found[mode] = idle_share(module, cost, ranks=ranks, epochs=epochs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            for batch in options.batch:
                idle = simulate(rows=options.rows, ranks=ranks, batch=batch, epochs=options.epochs, seed=1,
                                folder=Path(folder))
                table.append({"ranks": ranks, "batch": batch, **idle})
                shown = ", ".join(f"{mode} {share:.1%}" for mode, share in idle.items())
                sys.stdout.write(f"{ranks:3} ranks, batch {batch}: idle {shown}\n")
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
