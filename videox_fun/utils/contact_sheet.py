"""Videos as one picture: a strip of frames, and sheets of labelled strips to compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

_PAPER, _INK, _MUTED = (255, 255, 255), (31, 41, 51), (123, 135, 148)
_MARGIN, _GAP, _FONT_SIZE, _LABEL_WIDTH = 16, 4, 15, 150
_CELL_WIDTH = 160

Group = tuple[str, Sequence[tuple[str, Tensor]]]


def pick_frames(video: Tensor, frames: int) -> list[np.ndarray]:
    """At most ``frames`` evenly spread pictures ``[H, W, 3]`` uint8 of ``[3, F, H, W]`` in [0, 1], ends included."""
    count = video.shape[1]
    wanted = torch.linspace(0, count - 1, min(frames, count)).round().long().tolist()
    pixels = (video.detach().float().cpu() * 255).round().clamp(0, 255).to(torch.uint8)
    return [pixels[:, index].permute(1, 2, 0).numpy() for index in wanted]


def filmstrip(video: Tensor, *, frames: int = 8) -> np.ndarray:
    """Frames of ``[3, F, H, W]`` in [0, 1] side by side: ``[H, frames * W, 3]`` uint8."""
    return np.concatenate(pick_frames(video, frames), axis=1)


def make_comparison_sheet(groups: Sequence[Group], path: str | Path, *, title: str = "", frames: int = 6) -> Path:
    """Write a PNG with one strip of frames per video.

    Args:
        groups: ``(caption, [(label, video), ...])``; the videos ``[3, F, H, W]`` or ``[1, 3, F, H, W]`` in [0, 1] of a
            group lie under each other, so that equal frames meet.
        path: of the picture; its folder is made.
        title: above everything.
        frames: at most so many of each video.
    """
    if not groups or any(not rows for _, rows in groups):
        raise ValueError("A comparison needs at least one video in every group.")
    strips = [(caption, [(label, _cells(video, frames)) for label, video in rows]) for caption, rows in groups]
    width = max(sum(cell.width + _GAP for cell in cells) for _, rows in strips for _, cells in rows)
    line = _FONT_SIZE + 8
    height = 2 * _MARGIN + (line + 6 if title else 0)
    for _, rows in strips:
        height += line + sum(cells[0].height + _GAP for _, cells in rows) + _MARGIN
    sheet = Image.new("RGB", (2 * _MARGIN + _LABEL_WIDTH + max(width, 480), height), _PAPER)
    draw, top = ImageDraw.Draw(sheet), _MARGIN
    room = sheet.width - 2 * _MARGIN
    if title:
        draw.text((_MARGIN, top), _clipped(draw, title, room, _font(18)), fill=_INK, font=_font(18))
        top += line + 6
    for caption, rows in strips:
        draw.text((_MARGIN, top), _clipped(draw, caption, room, _font()), fill=_MUTED, font=_font())
        top += line
        for label, cells in rows:
            middle = top + (cells[0].height - _FONT_SIZE) // 2
            draw.text((_MARGIN, middle), _clipped(draw, label, _LABEL_WIDTH - 8, _font()), fill=_INK, font=_font())
            left = _MARGIN + _LABEL_WIDTH
            for cell in cells:
                sheet.paste(cell, (left, top))
                left += cell.width + _GAP
            top += cells[0].height + _GAP
        top += _MARGIN
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(target)
    return target


def _cells(video: Tensor, frames: int) -> list[Image.Image]:
    """Frames at a size that can be looked at: small ones are enlarged, big ones reduced."""
    cells = []
    for pixels in pick_frames(video[0] if video.dim() == 5 else video, frames):
        picture = Image.fromarray(pixels)
        size = _CELL_WIDTH, max(1, round(picture.height * _CELL_WIDTH / picture.width))
        cells.append(picture.resize(size, Image.Resampling.LANCZOS))
    return cells


def _font(size: int = _FONT_SIZE) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _clipped(draw: ImageDraw.ImageDraw, text: str, width: int, font: ImageFont.ImageFont) -> str:
    """``text`` on one line, cut so that it fits."""
    text = " ".join(text.split())
    if draw.textlength(text, font=font) <= width:
        return text
    while text and draw.textlength(text + "...", font=font) > width:
        text = text[:-1]
    return text + "..."
