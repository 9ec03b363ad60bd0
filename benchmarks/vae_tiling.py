"""Peak memory and time of the Wan VAE at 720x1280 with and without ``--vae_tiling``.

A VAE of the real depth and a third of the width, random weights, a smooth moving picture. Each call is timed while its
live bytes are counted; weights and the input are left out of the peak. Calls with and without tiles alternate.

On one CPU core (float32, width 32, 5 frames): encoding 3555 -> 197 MiB in 1.02 times the time, decoding 5375 -> 347 MiB
in 1.09 times.

    python benchmarks/vae_tiling.py --operations encode   # five minutes on one CPU core, decoding eight
    python benchmarks/vae_tiling.py
    python benchmarks/vae_tiling.py --device cuda --dtype bf16 --base_dim 96 --frames 17
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks.memory import LiveBytes  # noqa: E402
from optim_patches.base import Target  # noqa: E402
from optim_patches.vae_tiling import VaeTilingPatch  # noqa: E402
from videox_fun.models.wan_vae import AutoencoderKLWan, NormalizedVAE  # noqa: E402
from videox_fun.models.wan_vae3_8 import AutoencoderKLWan3_8  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TARGET_PEAK, TARGET_TIME = 0.25, 1.3


@dataclass
class Result:
    """One operation, untiled and tiled."""

    operation: str
    peak_untiled: int = 0
    peak_tiled: int = 0
    seconds_untiled: float = float("inf")
    seconds_tiled: float = float("inf")

    @property
    def peak_share(self) -> float:
        return self.peak_tiled / self.peak_untiled

    @property
    def time_ratio(self) -> float:
        return self.seconds_tiled / self.seconds_untiled

    def line(self) -> str:
        return (f"{self.operation:7} peak {self.peak_untiled / 2**20:7.0f} -> {self.peak_tiled / 2**20:6.0f} MiB "
                f"({100 * self.peak_share:4.1f} %, target {100 * TARGET_PEAK:.0f} %)   time "
                f"{self.seconds_untiled:6.1f} -> {self.seconds_tiled:6.1f} s ({self.time_ratio:4.2f}x, target "
                f"{TARGET_TIME}x)")


def make_vae(name: str, base_dim: int) -> NormalizedVAE:
    """A VAE of the given width with random weights."""
    torch.manual_seed(0)
    if name == "wan2.1":
        return AutoencoderKLWan(dim=base_dim)
    return AutoencoderKLWan3_8(c_dim=base_dim, dec_dim=base_dim)


def moving_picture(frames: int, height: int, width: int) -> torch.Tensor:
    """``[1, 3, F, H, W]`` in [-1, 1]: waves that drift."""
    t = torch.arange(frames).view(-1, 1, 1) / 8
    y = torch.linspace(0, 6, height).view(1, -1, 1)
    x = torch.linspace(0, 10, width).view(1, 1, -1)
    return torch.stack([torch.sin(x * k + y + t) * torch.cos(y * k - t) for k in (1, 3, 7)])[None]


def measure(call: Callable[[], torch.Tensor], device: torch.device, held: list[torch.Tensor]) -> tuple[int, float]:
    """Peak bytes beyond ``held`` and seconds of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, time.perf_counter() - start
    tracker = LiveBytes()
    tracker.ignore(held)
    start = time.perf_counter()
    with tracker:
        call()
    return tracker.peak, time.perf_counter() - start


@torch.no_grad()
def compare(args: argparse.Namespace) -> list[Result]:
    """Run both operations, with tiles and without, ``args.repeats`` times; the best time counts."""
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    vae = make_vae(args.vae, args.base_dim).to(device, dtype).eval().requires_grad_(False)
    pixels = moving_picture(args.frames, args.height, args.width).to(device, dtype)
    ratio = vae.model.spatial_compression_ratio
    frames = 1 + (args.frames - 1) // 4
    latents = torch.randn(1, vae.latent_channels, frames, args.height // ratio, args.width // ratio)
    latents = latents.to(device, dtype)
    held = [pixels, latents, *vae.parameters(), *vae.buffers()]
    warm = pixels[..., :64, :64]
    vae.decode_latents(vae.encode_moments(warm).chunk(2, dim=1)[0])
    patch, results = VaeTilingPatch(), []
    target = Target(argparse.Namespace(vae_tile_size=args.tile_size, vae_tile_overlap=args.tile_overlap), args.device,
                    {"vae": vae})
    verdict = patch.check(target)
    if not verdict.ok:
        raise ValueError(str(verdict))
    for name in args.operations:
        result = Result(name)
        call = (lambda: vae.encode_moments(pixels)) if name == "encode" else (lambda: vae.decode_latents(latents))
        for _ in range(args.repeats):
            result.peak_untiled, seconds = measure(call, device, held)
            result.seconds_untiled = min(result.seconds_untiled, seconds)
            applied = patch.apply(target)
            result.peak_tiled, seconds = measure(call, device, held)
            result.seconds_tiled = min(result.seconds_tiled, seconds)
            applied.undo()
        sys.stdout.write(result.line() + "\n")
        sys.stdout.flush()
        results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vae", choices=("wan2.1", "wan2.2"), default="wan2.1")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--height", type=int, default=720)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--frames", type=int, default=5)
    parser.add_argument("--base_dim", type=int, default=32)
    parser.add_argument("--tile_size", type=int, default=256)
    parser.add_argument("--tile_overlap", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--operations", nargs="+", choices=("encode", "decode"), default=["encode", "decode"])
    parser.add_argument("--json", help="File to write the numbers to.")
    args = parser.parse_args()
    results = compare(args)
    if args.json:
        rows = [{**asdict(r), "peak_share": r.peak_share, "time_ratio": r.time_ratio} for r in results]
        Path(args.json).write_text(json.dumps({"settings": vars(args), "results": rows}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
