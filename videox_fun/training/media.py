"""Clips in trackers: the video itself where the tracker shows videos, otherwise a row of its frames."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

_FRAMES = 8


def send_clip(accelerator: Accelerator, name: str, video: torch.Tensor, path: Path, *, caption: str, step: int) -> None:
    """Show a clip ``[1, 3, F, H, W]`` in [0, 1], also written at ``path``, in every tracker. A failure is logged."""
    for tracker in getattr(accelerator, "trackers", ()):
        try:
            _send(tracker, name, video, path, caption=caption, step=step)
        except Exception as error:
            logger.warning("The tracker %s did not take %s (%s); the clip is in %s.", tracker.name, name, error, path)


def _send(tracker: Any, name: str, video: torch.Tensor, path: Path, *, caption: str, step: int) -> None:
    from videox_fun.utils.contact_sheet import filmstrip

    if tracker.name == "wandb":
        import wandb

        tracker.log({name: wandb.Video(str(path), caption=caption, format="mp4")}, step=step)
        return
    if not hasattr(tracker, "log_images"):
        return
    strip = filmstrip(video[0], frames=_FRAMES)
    if tracker.name == "tensorboard":
        tracker.log_images({name: strip[None]}, step=step, dataformats="NHWC")
        tracker.writer.add_text(f"{name}/prompt", caption, global_step=step)
    elif tracker.name == "aim":
        tracker.log_images({name: (strip, caption)}, step=step)
    else:
        tracker.log_images({name: [strip]}, step=step)
