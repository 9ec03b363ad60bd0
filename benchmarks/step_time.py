"""Time and memory of the Wan transformer, against diffusers' and against what the machine can do at best.

The *floor* is the same matrix products and attentions, forward and backward, with nothing between them. All contestants
hold the same weights, see the same input, and take turns within one process, so that a busy machine slows all alike;
seconds are medians, "over floor" is the median of each round's ratio. On a CPU the C library is told to keep freed
memory, for all contestants, as the caching allocator of a GPU does; otherwise half of the difference is page faults
of fresh activations, which come and go with the layout of the heap.

    python benchmarks/step_time.py                        # three sizes, fp32 and bf16, eager and compiled
    python benchmarks/step_time.py --sizes 512x4x1280 --dtypes bf16 --no_compile --json out.json
    python benchmarks/step_time.py --threads 1 --clock cpu   # processor time, for a machine that others use too
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.memory import keep_freed_memory, peak_bytes  # noqa: E402

TEXT_TOKENS = 512
HEAD_DIM = 128
WARMUP_ROUNDS = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Size:
    """One shape: ``dim x blocks x tokens``."""

    dim: int
    blocks: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> Size:
        return cls(*map(int, text.split("x")))

    @property
    def heads(self) -> int:
        return self.dim // HEAD_DIM

    @property
    def ffn(self) -> int:
        return int(self.dim * 5.4) // 64 * 64  # the ratio of the real models, 8960 / 1536 and 13824 / 5120

    @property
    def grid(self) -> tuple[int, int, int]:
        """Latent frames and patch grid whose product is the token count."""
        frames = next(n for n in (8, 5, 4, 2, 1) if self.tokens % n == 0)
        plane = self.tokens // frames
        height = next(n for n in range(int(plane**0.5), 0, -1) if plane % n == 0)
        return frames, height, plane // height

    def __str__(self) -> str:
        return f"{self.dim}x{self.blocks}x{self.tokens}"


@dataclass
class Row:
    """One measurement."""

    size: str
    dtype: str
    contestant: str
    seconds: float
    over_floor: float
    peak_mib: float


def build_models(size: Size, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """Our transformer and diffusers', with equal weights."""
    from diffusers import WanTransformer3DModel as Theirs

    from videox_fun.models.keymaps import to_diffusers_state
    from videox_fun.models.wan_transformer3d import WanTransformer3DModel as Ours

    ours = Ours(dim=size.dim, ffn_dim=size.ffn, num_heads=size.heads, num_layers=size.blocks, in_dim=16, out_dim=16,
                text_dim=64, hidden_size=size.dim, in_channels=16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    theirs = Theirs(num_attention_heads=size.heads, attention_head_dim=HEAD_DIM, in_channels=16, out_channels=16,
                    text_dim=64, ffn_dim=size.ffn, num_layers=size.blocks, freq_dim=256)
    theirs.load_state_dict(to_diffusers_state(ours.state_dict()))
    return ours.to(device, dtype), theirs.to(device, dtype)


class Floor:
    """The matrix products and attentions of one forward and backward, by themselves."""

    def __init__(self, size: Size, dtype: torch.dtype, device: torch.device) -> None:
        def leaf(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, device=device, dtype=dtype) * 0.02).requires_grad_(True)

        dim, ffn, tokens, heads = size.dim, size.ffn, size.tokens, size.heads
        self.blocks = size.blocks
        self.linears = [
            *[(leaf(1, tokens, dim), leaf(dim, dim)) for _ in range(6)],
            *[(leaf(1, TEXT_TOKENS, dim), leaf(dim, dim)) for _ in range(2)],
            (leaf(1, tokens, dim), leaf(ffn, dim)), (leaf(1, tokens, ffn), leaf(dim, ffn)),
        ]
        query, key = leaf(1, heads, tokens, HEAD_DIM), leaf(1, heads, TEXT_TOKENS, HEAD_DIM)
        self.attentions = [(query, query), (query, key)]
        self.grads = [torch.ones(x.shape[0], x.shape[1], w.shape[0], device=device, dtype=dtype)
                      for x, w in self.linears]

    def __call__(self) -> None:
        for _ in range(self.blocks):
            for (x, weight), grad in zip(self.linears, self.grads, strict=True):
                torch.autograd.grad(F.linear(x, weight), (x, weight), grad)
            for query, key in self.attentions:
                value = key.detach().requires_grad_(True)
                out = F.scaled_dot_product_attention(query, key, value)
                torch.autograd.grad(out, (query, key, value) if key is not query else (query, value), out.detach())


def inputs(size: Size, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    frames, height, width = size.grid
    generator = torch.Generator().manual_seed(1)
    return {
        "latents": torch.randn(1, 16, frames, 2 * height, 2 * width, generator=generator).to(device, dtype),
        "text": torch.randn(1, TEXT_TOKENS, 64, generator=generator).to(device, dtype),
        "t": torch.tensor([500.0], device=device),
    }


def run_ours(model: nn.Module, data: dict[str, torch.Tensor], size: Size) -> Callable[[], None]:
    def step() -> None:
        out = model(x=data["latents"], context=data["text"], t=data["t"], seq_len=size.tokens)
        out.float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    return step


def run_theirs(model: nn.Module, data: dict[str, torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        out = model(hidden_states=data["latents"], timestep=data["t"], encoder_hidden_states=data["text"],
                    return_dict=False)[0]
        out.float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    return step


def measure(
    contestants: dict[str, Callable[[], None]], repeats: int, device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each contestant, round by round; they take turns. Two rounds before do not count."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(WARMUP_ROUNDS):
        for step in contestants.values():
            step()
    for _ in range(repeats):
        for name, step in contestants.items():
            _sync(device)
            started = clock()
            step()
            _sync(device)
            times[name].append(clock() - started)
    return times


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def compile_blocks(model: nn.Module) -> None:
    for block in model.blocks:
        block.compile(fullgraph=True)


def bench(size: Size, dtype_name: str, args: argparse.Namespace) -> list[Row]:
    """All contestants at one size and type."""
    device, dtype = torch.device(args.device), DTYPES[dtype_name]
    ours, theirs = build_models(size, dtype, device)
    data = inputs(size, dtype, device)
    contestants: dict[str, Callable[[], None]] = {"floor": Floor(size, dtype, device)}
    contestants["ours"], contestants["diffusers"] = run_ours(ours, data, size), run_theirs(theirs, data)
    held = {"ours": ours, "diffusers": theirs}
    peaks = {
        name: peak_bytes(contestants[name], device, held=[*model.parameters(), *model.buffers(), *data.values()])
        for name, model in held.items()
    }
    if not args.no_compile:
        pair = build_models(size, dtype, device)
        for model in pair:
            compile_blocks(model)
        contestants["ours compiled"] = run_ours(pair[0], data, size)
        contestants["diffusers compiled"] = run_theirs(pair[1], data)
    times = measure(contestants, args.repeats, device, CLOCKS[args.clock])
    return [Row(str(size), dtype_name, name, statistics.median(seconds), ratio_to(times["floor"], seconds),
                peaks.get(name, 0) / 2**20) for name, seconds in times.items()]


def ratio_to(floor: list[float], seconds: list[float]) -> float:
    """Median of the ratios of one round each: what slows a whole round cancels out."""
    return statistics.median(mine / least for mine, least in zip(seconds, floor, strict=True))


def table(rows: list[Row]) -> str:
    lines = ["| dim x blocks x tokens | type | | seconds | over floor | peak MiB |", "|---|---|---|---|---|---|"]
    lines += [f"| {r.size} | {r.dtype} | {r.contestant} | {r.seconds:.3f} | {r.over_floor:.2f} | "
              f"{r.peak_mib:.0f} |" if r.peak_mib else
              f"| {r.size} | {r.dtype} | {r.contestant} | {r.seconds:.3f} | {r.over_floor:.2f} | |" for r in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["512x4x1280", "1024x4x2048", "1024x8x4000"])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no_compile", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    rows: list[Row] = []
    for size in map(Size.parse, args.sizes):
        for dtype in args.dtypes:
            rows += bench(size, dtype, args)
            sys.stdout.write(table(rows[-5:]) + "\n")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
