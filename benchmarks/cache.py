"""Time of a training step with a filled cache against live encoding.

The same LoRA command runs with and without ``--cache_latents --cache_text``, in turns, in one process, on real clips at
64 px: with a tiny VAE (everything is small), and with a VAE of the published width (96). The denoiser is tiny in both,
so the ratio says how much of a small step is encoding; with a big denoiser the share is smaller. Medians over the steps
after the first two of each run; the cached run's share of waiting for data is printed with them.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from videox_fun.data.demo import build_demo_dataset
from videox_fun.training.entry import build_trainer
from videox_fun.training.flags import parse_args
from videox_fun.training.specs import get_spec
from videox_fun.utils.tiny import make_tiny_checkpoint

SCRIPT = "wan2.1_fun/train_lora"


def command(checkpoint: Any, metadata: Path, output: Path, *, steps: int) -> list[str]:
    return [
        "--config_path", str(checkpoint.config_path), "--pretrained_model_name_or_path", str(checkpoint.folder),
        "--train_data_dir", str(metadata.parent), "--train_data_meta", str(metadata), "--output_dir", str(output),
        "--image_sample_size", "64", "--video_sample_size", "64", "--token_sample_size", "64",
        "--video_sample_stride", "2", "--video_sample_n_frames", "9", "--train_batch_size", "1", "--enable_bucket",
        "--uniform_sampling", "--max_train_steps", str(steps), "--checkpointing_steps", "100000", "--seed", "1",
        "--rank", "8", "--network_alpha", "8", "--target_name", "q,k,v", "--report_to", "none", "--audit", "off",
        "--cache_clip_starts", "1", "--lr_warmup_steps", "0",
    ]  # fmt: skip


def run(words: list[str]) -> list[dict[str, float]]:
    """Logged values of every step but the first two."""
    spec = get_spec(SCRIPT)
    trainer = build_trainer(spec, parse_args(spec, words))
    trainer.setup()
    rows: list[dict[str, float]] = []
    log = trainer.run_logger.log

    def note(values: dict[str, float], step: int) -> None:
        rows.append(dict(values))
        log(values, step)

    trainer.run_logger.log = note
    trainer.run()
    return rows[2:]


def measure(folder: Path, *, vae_dim: int, rounds: int, steps: int) -> dict[str, float]:
    checkpoint = make_tiny_checkpoint(folder / f"model{vae_dim}", family="wan2.1_t2v", vae_dim=vae_dim)
    metadata = build_demo_dataset(folder / "clips", clips=4)
    base = command(checkpoint, metadata, folder / f"out{vae_dim}", steps=steps)
    cached = [*base, "--cache_latents", "--cache_text", "--cache_dir_latents", str(folder / f"cache{vae_dim}")]
    from videox_fun.training.entry import prepare_cache

    if prepare_cache(SCRIPT, cached):
        raise RuntimeError("the cache could not be filled")
    live_rows: list[dict[str, float]] = []
    cached_rows: list[dict[str, float]] = []
    for _ in range(rounds):
        live_rows += run(base)
        cached_rows += run(cached)
    live, warm = (statistics.median(row["step_time"] for row in rows) for rows in (live_rows, cached_rows))
    waits = sum(row["data_wait"] for row in cached_rows) / sum(row["step_time"] for row in cached_rows)
    return {"vae_dim": vae_dim, "live_s": live, "cached_s": warm, "ratio": live / warm, "cached_data_wait_share": waits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae_dims", type=int, nargs="+", default=[4, 96])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for dim in options.vae_dims:
            rows.append(measure(Path(folder), vae_dim=dim, rounds=options.rounds, steps=options.steps))
    logging.getLogger().handlers.clear()
    for row in rows:
        sys.stdout.write(f"VAE of width {row['vae_dim']:3}: live {row['live_s']:.3f} s, cached {row['cached_s']:.3f} s "
                         f"per step, {row['ratio']:.1f}x; waiting for data {row['cached_data_wait_share']:.1%}\n")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
