"""Shows what the trainer really sees: the first batch, after decoding, sampling, resizing and cropping, as files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from videox_fun.training.context import RunContext

logger = logging.getLogger(__name__)

_STEM_LENGTH = 10


def stems(texts: list[str], *, step: int) -> list[str]:
    """A file name stem per caption: its first ten characters, or step and position; repeated ones get a number."""
    result: list[str] = []
    for position, caption in enumerate(texts):
        words = "-".join(caption.replace("/", "").split()[:_STEM_LENGTH])
        stem = (words or f"{step}-{position}")[:_STEM_LENGTH]
        result.append(stem if stem not in result else f"{stem}-{position}")
    return result


def dump_first_batch(ctx: RunContext, batch: dict) -> None:
    """Write clips, masked clips and condition frames of a batch to ``<output_dir>/sanity_check``."""
    folder = Path(ctx.args.output_dir) / "sanity_check"
    folder.mkdir(parents=True, exist_ok=True)
    for position, stem in enumerate(stems(batch["text"], step=ctx.global_step)):
        _write_clip(batch["pixel_values"][position], folder / f"{stem}.mp4")
        for key, name in (("mask_pixel_values", f"mask_{stem}.mp4"), ("control_pixel_values", f"{stem}_control.mp4"),
                          ("ref_pixel_values", f"{stem}_ref.gif")):
            if key in batch:
                _write_clip(batch[key][position], folder / name)
        if "clip_pixel_values" in batch:
            _write_image(batch["clip_pixel_values"][position], folder / f"clip_{stem}.png")


def _write_clip(clip_FCHW: torch.Tensor, path: Path) -> None:
    from videox_fun.utils.utils import save_videos_grid

    save_videos_grid(clip_FCHW.detach().float().cpu().transpose(0, 1)[None], str(path), rescale=True)


def _write_image(image_HWC: torch.Tensor, path: Path) -> None:
    from PIL import Image

    Image.fromarray(image_HWC.detach().cpu().to(torch.uint8).numpy()).save(path)
