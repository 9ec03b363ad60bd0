"""A look at what the trainer really gets: frames after sampling, resize and crop, with the caption that goes with them.

Items are read and collated by the objects of the run itself, so a sheet shows the wrong crop, the turned clip and the
neighbour's caption as they would be trained. Each row of the sheet is one row of the data; control clips and masked
clips follow their target on a line of their own.
"""

from __future__ import annotations

import base64
import html
import io
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from videox_fun.data.module import DataModule

_HEIGHT, _GAP, _TEXT = 120, 6, 46
#: Tensors shown, with the word for each.
_STRIPS = {"pixel_values": "trained", "control_pixel_values": "control", "mask_pixel_values": "kept by the mask"}


@dataclass
class SheetRow:
    """One row of the sheet: ``strips`` maps a word to frames ``[H, W, 3]``; ``error`` says why there are none."""

    name: str
    text: str
    strips: dict[str, list[np.ndarray]]
    error: str = ""


def sheet_rows(
    module: DataModule, *, rows: int = 16, frames: int = 4, names: Sequence[str] = (), seed: int = 0
) -> Iterator[SheetRow]:
    """Rows spread evenly over the data set, read as in training. The random streams of the process stay as they are."""
    count = len(module.dataset)
    picked = sorted({round(place) for place in np.linspace(0, count - 1, min(rows, count))})
    for index in picked:
        row = module.dataset.dataset[index]
        source = module.dataset.dataset.source_row(index)
        name = f"{names[source] if names else f'row {source + 1}'}: {Path(str(row.get('file_path', ''))).name}"
        with _own_streams(seed + source):
            try:
                batch = module.collate_fn([module.dataset.read_item(row, index)])
            except (ValueError, OSError) as error:
                yield SheetRow(name, str(row.get("text", "")), {}, str(error))
                continue
        strips = {word: _frames(batch[key], frames) for key, word in _STRIPS.items() if key in batch}
        height, width = batch["pixel_values"].shape[-2:]
        length = batch["pixel_values"].shape[1]
        yield SheetRow(f"{name}: {width}x{height}, {length} frame(s)", batch["text"][0], strips)


@contextmanager
def _own_streams(seed: int) -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _frames(batch: Any, count: int) -> list[np.ndarray]:
    clip = batch[0]
    chosen = sorted({round(place) for place in np.linspace(0, len(clip) - 1, min(count, len(clip)))})
    return [((clip[index].permute(1, 2, 0).float() * 0.5 + 0.5) * 255).round().clamp(0, 255).byte().numpy()
            for index in chosen]  # fmt: skip


def _small(frame: np.ndarray) -> Image.Image:
    image = Image.fromarray(frame)
    return image.resize((max(round(image.width * _HEIGHT / image.height), 1), _HEIGHT), Image.Resampling.BILINEAR)


def write_sheet(rows: Sequence[SheetRow], target: str | Path) -> Path:
    """Write ``target`` as one picture (.png) or one page (.html); both hold everything in themselves."""
    target = Path(target)
    if target.suffix.lower() not in (".png", ".html"):
        raise ValueError(f"{target}: a contact sheet is a .png or an .html file")
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix.lower() == ".html":
        target.write_text(_page(rows), encoding="utf-8", errors="replace")
    else:
        _picture(rows).save(target)
    return target


def _picture(rows: Sequence[SheetRow]) -> Image.Image:
    lines = [(row, [[_small(frame) for frame in frames] for frames in row.strips.values()]) for row in rows]
    width = max([sum(image.width + _GAP for image in strip) for _, strips in lines for strip in strips] + [480])
    height = sum(_TEXT + len(strips) * (_HEIGHT + _GAP) for _, strips in lines)
    sheet = Image.new("RGB", (width + _GAP, height + _GAP), (28, 28, 28))
    draw, font, top = ImageDraw.Draw(sheet), ImageFont.load_default(), _GAP
    letters = max(width // 7, 20)
    for row, strips in lines:
        draw.text((_GAP, top), _plain(row.name)[:letters], fill=(255, 220, 120), font=font)
        said = row.error or row.text
        draw.text((_GAP, top + 18), _plain(said)[:letters], fill=(255, 110, 110) if row.error else (235, 235, 235),
                  font=font)  # fmt: skip
        top += _TEXT - _GAP
        for strip in strips:
            left = _GAP
            for image in strip:
                sheet.paste(image, (left, top))
                left += image.width + _GAP
            top += _HEIGHT + _GAP
        top += _GAP
    return sheet


def _plain(text: str) -> str:
    """The built-in font draws Latin letters; the page shows every script."""
    return " ".join(text.split()).encode("latin-1", "replace").decode("latin-1")


def _page(rows: Sequence[SheetRow]) -> str:
    parts = ["<!doctype html><meta charset='utf-8'><title>contact sheet</title><style>body{background:#1c1c1c;"
             "color:#eee;font:14px sans-serif}h3{color:#fd7;margin:18px 0 2px}img{margin:2px}"
             "small{color:#999}.e{color:#f77}</style>"]  # fmt: skip
    for row in rows:
        parts.append(f"<h3>{html.escape(row.name)}</h3><p>{html.escape(row.text)}</p>")
        if row.error:
            parts.append(f"<p class='e'>{html.escape(row.error)}</p>")
        for word, frames in row.strips.items():
            images = "".join(f"<img src='data:image/png;base64,{_png(frame)}'>" for frame in frames)
            parts.append(f"<div><small>{word}</small><br>{images}</div>")
    return "\n".join(parts) + "\n"


def _png(frame: np.ndarray) -> str:
    out = io.BytesIO()
    _small(frame).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()
