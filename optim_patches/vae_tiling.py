"""``--vae_tiling``: the Wan VAEs work on one spatial tile at a time, so their peak follows the tile, not the frame.

Each axis is cut into the fewest tiles of at most ``--vae_tile_size`` that overlap by at least ``--vae_tile_overlap``.
All tiles of an axis have the same length, so no work is spent on a narrow last one, and kernels see one shape. A tile
is encoded or decoded by the network's own code, with its chunks of frames and cached convolutions; the results are
added up under windows that rise and fall linearly over the overlap and sum to one. The outer quarter of an overlap is
left to the neighbour altogether, since convolutions saw zeros beyond the edge there. Where one tile alone covers a
place its values stay as they are.

The middle of the network attends to the whole frame, so a tile differs a little from the same place of the whole: that
is the price, bounded in the tests. Frames that fit into one tile take the old path and give the very same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optim_patches.base import Applied, Evidence, PatchBase, PatchFlag, Stage, Target, Verdict

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

#: Pixels per latent of the coarsest Wan VAE. What divides by it suits every VAE, before one is loaded.
COARSEST_RATIO = 16
_METHODS = ("encode_moments", "decode_latents")


@dataclass(frozen=True)
class Span:
    """Where one tile lies on an axis, in latents."""

    start: int
    stop: int


@dataclass
class TileLog:
    """What the patched methods did."""

    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_METHODS, 0))
    untiled: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_METHODS, 0))
    tiles: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_METHODS, 0))
    peak_rise: int = 0


class VaeTilingPatch(PatchBase):
    """Row I5 of the audit."""

    name = "vae_tiling"
    row = "I5"
    stage = Stage.POST_LOAD
    flags = (
        PatchFlag("--vae_tiling", "Encode and decode videos tile by tile.", action="store_true", default=False),
        PatchFlag("--vae_tile_size", "Largest height and width of a tile, in pixels.", type=int, default=256),
        PatchFlag("--vae_tile_overlap", "Least overlap of neighbouring tiles, in pixels.", type=int, default=32),
    )

    def __init__(self) -> None:
        self.log = TileLog()

    def check(self, target: Target) -> Verdict:
        size, overlap = _sizes(target)
        verdict = _sizes_verdict(size, overlap, ratio=COARSEST_RATIO)
        if not verdict.ok or not target.models:
            return verdict
        vae = target.models.get("vae")
        if vae is None:  # latents come from a cache
            return verdict
        if not all(hasattr(vae, name) for name in _METHODS):
            reason = f"--vae_tiling knows the Wan VAEs, and this run's is {type(vae).__name__}."
            return Verdict(False, reason, "no --vae_tiling")
        return _sizes_verdict(size, overlap, ratio=_ratio(vae))

    def planned_sites(self, target: Target) -> tuple[str, ...]:
        return tuple(f"vae.{name}" for name in _METHODS) if "vae" in target.models else ()

    def apply(self, target: Target) -> Applied:
        vae, log = target.models.get("vae"), TileLog()
        self.log = log
        if vae is None:
            return Applied((), lambda: None, "this run loads no VAE")
        before = {name: vae.__dict__.get(name) for name in _METHODS}
        ratio = _ratio(vae)
        size, overlap = (value // ratio for value in _sizes(target))
        for name, scales in zip(_METHODS, ((ratio, 1), (1, ratio)), strict=True):
            tiler = Tiler(getattr(vae, name), name=name, size=size, overlap=overlap, scales=scales, log=log)
            setattr(vae, name, tiler)

        def undo() -> None:
            for name, own in before.items():
                delattr(vae, name)
                if own is not None:
                    setattr(vae, name, own)

        detail = f"tiles of {size * ratio} pixels that overlap by {overlap * ratio}, {type(vae).__name__}"
        return Applied(self.planned_sites(target), undo, detail)

    def evidence(self, target: Target, applied: Applied) -> Evidence:
        log = self.log
        facts: dict[str, Any] = {"peak_rise_bytes": log.peak_rise}
        parts = []
        for name, word in zip(_METHODS, ("encode", "decode"), strict=True):
            tiled = log.calls[name] - log.untiled[name]
            facts.update({f"{word}_calls": log.calls[name], f"{word}_untiled": log.untiled[name],
                          f"{word}_tiles": log.tiles[name]})
            if tiled:
                parts.append(f"{log.tiles[name]} tiles in {tiled} {word} calls")
        if parts:
            peak = f"; these calls raised the peak memory of the process by {log.peak_rise / 2**20:.0f} MiB"
            return Evidence(True, f"{', '.join(parts)} ({applied.detail}){peak}", facts)
        if sum(log.calls.values()):
            return Evidence(False, f"every frame fits into one tile: {applied.detail}", facts)
        return Evidence(False, "the VAE was not called" if applied.sites else applied.detail, facts)


class Tiler:
    """Stands in for a method of a VAE: splits large frames, leaves small ones to the method.

    Args:
        method: the bound method.
        size, overlap: of a tile, in latents.
        scales: what a latent measures in the input and in the output.
    """

    def __init__(
        self, method: Callable[[Tensor], Tensor], *, name: str, size: int, overlap: int, scales: tuple[int, int],
        log: TileLog,
    ) -> None:
        self.method = method
        self.name = name
        self.size = size
        self.overlap = overlap
        self.scales = scales
        self.log = log

    def __call__(self, source_BCTHW: Tensor) -> Tensor:
        import torch

        log, scale = self.log, self.scales[0]
        log.calls[self.name] += 1
        rows, columns = (spans(length // scale, size=self.size, overlap=self.overlap)
                         for length in source_BCTHW.shape[-2:])
        before = high_water(source_BCTHW.device)
        if len(rows) == len(columns) == 1:
            log.untiled[self.name] += 1
            out = self.method(source_BCTHW)
        else:
            log.tiles[self.name] += source_BCTHW.shape[0] * len(rows) * len(columns)
            samples = [self._tiled(sample, rows, columns) for sample in source_BCTHW.split(1)]
            out = torch.cat(samples) if len(samples) > 1 else samples[0]
        log.peak_rise += high_water(source_BCTHW.device) - before
        return out

    def _tiled(self, source: Tensor, rows: Sequence[Span], columns: Sequence[Span]) -> Tensor:
        """One sample: the sum of its tiles under their windows."""
        inside, outside = self.scales
        ramp = self.overlap * outside
        heights, widths = (windows(axis, scale=outside, ramp=ramp, device=source.device) for axis in (rows, columns))
        out = None
        for row, height in zip(rows, heights, strict=True):
            for column, width in zip(columns, widths, strict=True):
                tile = self.method(source[..., _slice(row, inside), _slice(column, inside)])
                if out is None:
                    size = rows[-1].stop * outside, columns[-1].stop * outside
                    out = tile.new_zeros(*tile.shape[:-2], *size)
                out[..., _slice(row, outside), _slice(column, outside)] += tile * (height[:, None] * width)
        if self.name == "decode_latents":  # windows summed in bfloat16 can exceed 1 by a rounding
            out = out.clamp_(-1, 1)
        return out


def spans(length: int, *, size: int, overlap: int) -> tuple[Span, ...]:
    """The fewest equal tiles of at most ``size`` that cover ``length`` and overlap by at least ``overlap``."""
    if length <= size:
        return (Span(0, length),)
    count = math.ceil((length - overlap) / (size - overlap))
    size = math.ceil((length + (count - 1) * overlap) / count)
    starts = [number * (length - size) // (count - 1) for number in range(count)]
    return tuple(Span(start, start + size) for start in starts)


def windows(axis: Sequence[Span], *, scale: int, ramp: int, device: torch.device | str = "cpu") -> list[Tensor]:
    """A float32 weight for each position of each tile. At every place the weights of all tiles sum to one."""
    import torch

    margin = ramp // 4
    total = torch.zeros(axis[-1].stop * scale, dtype=torch.float64)
    raw = []
    for span in axis:
        length = (span.stop - span.start) * scale
        rise = ((torch.arange(1, length + 1, dtype=torch.float64) - margin) / (ramp - 2 * margin + 1)).clamp(0, 1)
        window = torch.ones(length, dtype=torch.float64)
        if span.start > 0:
            window = window * rise
        if span.stop < axis[-1].stop:
            window = window * rise.flip(0)
        total[_slice(span, scale)] += window
        raw.append(window)
    return [(window / total[_slice(span, scale)]).float().to(device)
            for window, span in zip(raw, axis, strict=True)]


def high_water(device: torch.device) -> int:
    """The most memory this process has held so far, in bytes: of the CUDA allocator, else resident on the host."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _slice(span: Span, scale: int) -> slice:
    return slice(span.start * scale, span.stop * scale)


def _sizes(target: Target) -> tuple[int, int]:
    size, overlap = VaeTilingPatch.flags[1:]
    return getattr(target.args, size.dest, size.default), getattr(target.args, overlap.dest, overlap.default)


def _ratio(vae: nn.Module) -> int:
    """Pixels per latent of the network itself; the wrapper's own number is what the configuration file states."""
    return vae.model.spatial_compression_ratio


def _sizes_verdict(size: int, overlap: int, *, ratio: int) -> Verdict:
    for flag, value, least in (("--vae_tile_size", size, ratio), ("--vae_tile_overlap", overlap, 0)):
        if value < least or value % ratio:
            near = max(round(value / ratio) * ratio, least)
            return Verdict(False, f"{flag} {value} is not a multiple of {ratio} pixels.", f"{flag} {near}")
    if 2 * overlap > size:
        reason = f"--vae_tile_overlap {overlap} is more than half of --vae_tile_size {size}."
        return Verdict(False, reason, f"--vae_tile_overlap {size // 2 // ratio * ratio}")
    return Verdict(True)
