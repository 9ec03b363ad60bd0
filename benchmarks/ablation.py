"""What each optimization brings: the same LoRA steps without any, with each one, and with the recommended sets.

Weights are random, latents and text are given; a step is forward, backward and AdamW. The list of optimizations is the
registry's, so a new one appears here by itself; what cannot run on this machine is listed with the reason. The *floor*
is what the matrix products and attentions of such a step take by themselves, measured on the same machine; a share of
it above 1 is possible where products run in a narrower type. MFU counts the step's work without recomputation.

    python benchmarks/ablation.py --out ablation                  # small on a CPU; Wan 1.3B and 14B on a GPU
    python benchmarks/ablation.py --shapes 256x4x640 --steps 3 --only compile,qlora

On a CPU the contestants take turns and the medians count, so that other work slows all alike. On a GPU they run one
after the other, each in an emptied memory; ``--minutes`` ends the whole, and what was left out is named.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.memory import peak_bytes  # noqa: E402
from benchmarks.step_time import HEAD_DIM, TEXT_TOKENS, Size  # noqa: E402
from optim_patches.base import Stage, Target  # noqa: E402
from optim_patches.registry import PATCHES, PatchManager, PatchRefused, all_flags, load_patch  # noqa: E402

TEXT_WIDTH = 64
#: ``name: (dim, blocks, tokens)``. 480x832x81 has 21 x 30 x 52 tokens, 512x512x49 has 13 x 32 x 32.
GPU_SHAPES = {
    "Wan 1.3B, 512x512x49": "1536x30x13312", "Wan 1.3B, 480x832x81": "1536x30x32760",
    "Wan 14B, 512x512x49": "5120x40x13312", "Wan 14B, 480x832x81": "5120x40x32760",
}  # fmt: skip
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "B200": 2250, "4090": 165, "L40S": 362}
CHECKPOINTED: dict[str, Any] = {"gradient_checkpointing": True}
#: Flags of a patch that is not switched on by one flag alone; ``{blocks}`` is counted per shape.
SETTINGS: dict[str, dict[str, Any]] = {
    "ulysses": {"sequence_parallel_size": 2}, "checkpointing": {"checkpointing_keep": "attention"},
    "block_swap": {"block_swap": "{blocks}"}, "cuda_graph": {"gradient_checkpointing": False},
}  # fmt: skip
NOT_HERE = {"vae_tiling": "no VAE in this work: benchmarks/vae_tiling.py"}
RECOMMENDED: dict[str, tuple[str, ...]] = {
    "recommended: speed": ("compile", "checkpointing"), "recommended: memory": ("qlora", "compile"),
}  # fmt: skip


@dataclass
class Row:
    """One contestant at one shape."""

    shape: str
    name: str
    note: str = ""
    step_s: float | None = None
    tokens_per_s: float | None = None
    of_floor: float | None = None
    mfu: float | None = None
    peak_gib: float | None = None
    loss_difference: float | None = None
    losses: list[float] = field(default_factory=list)


def contestants(only: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Names and their patches; the base has none."""
    singles = {name: (name,) for name in PATCHES if not only or name in only}
    sets = {name: patches for name, patches in RECOMMENDED.items() if not only or set(patches) <= set(only)}
    return {"base": (), **singles, **sets}


def flags_of(patches: tuple[str, ...], blocks: int) -> dict[str, Any]:
    flags = dict(CHECKPOINTED)
    for name in patches:
        first = load_patch(name).flags[0]
        flags |= {first.dest: True} if first.action == "store_true" else {}
        flags |= SETTINGS.get(name, {})
    return {key: max(3, blocks * 3 // 4) if value == "{blocks}" else value for key, value in flags.items()}


class Contestant:
    """A model with its patches, and one training step of it."""

    def __init__(self, size: Size, patches: tuple[str, ...], *, device: torch.device, dtype: torch.dtype) -> None:
        flags = flags_of(patches, size.blocks)
        args = argparse.Namespace(**{flag.dest: flag.default for flag in all_flags()}, gradient_checkpointing=False)
        vars(args).update(flags)
        args.explicit = frozenset(flags)
        facts = {"weight_dtype": dtype, "sharding": 0,
                 "denoiser_config": {"num_heads": size.heads, "num_layers": size.blocks}}
        self.size, self.device, self.dtype = size, device, dtype
        self.manager, target = PatchManager(args), Target(args, device=device.type, extras=facts)
        self.manager.preflight(target)
        self.model = self._build(target)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)
        generator = torch.Generator().manual_seed(1)
        frames, height, width = size.grid
        self.latents = torch.randn(1, 16, frames, 2 * height, 2 * width, generator=generator).to(device, dtype)
        self.text = torch.randn(1, TEXT_TOKENS, TEXT_WIDTH, generator=generator).to(device, dtype)
        self.losses: list[float] = []

    def _build(self, target: Target) -> nn.Module:
        from videox_fun.models.wan_transformer3d import WanTransformer3DModel
        from videox_fun.utils.lora_utils import create_network

        size = self.size
        with self.device:
            model = WanTransformer3DModel(
                dim=size.dim, ffn_dim=size.ffn, num_heads=size.heads, num_layers=size.blocks, in_dim=16, out_dim=16,
                text_dim=TEXT_WIDTH, hidden_size=size.dim, in_channels=16,
            ).to(self.dtype)  # fmt: skip
        generator = torch.Generator(self.device).manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02, generator=generator)
        model.requires_grad_(False)
        if target.args.qlora:
            _quantize(model, target)
        target.models["transformer"] = model
        for stage in (Stage.POST_LOAD, Stage.PRE_ADAPTER):
            self.manager.run_stage(stage, target)
        torch.manual_seed(2)
        network = create_network(1.0, 64, 32, None, model, target_name="q,k,v,ffn.0,ffn.2")
        network.apply_to(None, model, False, True)
        model.network = network.to(self.device, self.dtype).requires_grad_(True)
        model.train()
        self.manager.run_stage(Stage.POST_ADAPTER, target)
        if target.args.gradient_checkpointing:
            model.enable_gradient_checkpointing()
        for stage in (Stage.PRE_SHARD, Stage.POST_SHARD, Stage.LOADER, Stage.STEP):
            self.manager.run_stage(stage, target)
        return model

    def step(self) -> None:
        t = torch.tensor([500.0], device=self.device)
        out = self.model(x=self.latents, context=self.text, t=t, seq_len=self.size.tokens)
        loss = (out.float() - self.latents.float()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(float(loss.detach()))

    def states(self) -> dict[str, str]:
        return {outcome.patch.name: outcome.state for outcome in self.manager.outcomes()}


def _quantize(model: nn.Module, target: Target) -> None:
    """As the loader does it: weight by weight, and the original is dropped."""
    from optim_patches.qlora import Quantizer

    quantizer = Quantizer(target)
    for name, layer in quantizer.layers(model).items():
        quantizer.store(model, f"{name}.weight", layer.weight.data)


def floor_seconds(size: Size, *, device: torch.device, dtype: torch.dtype) -> float:
    """Products and attentions of one LoRA step: forward, and backward to the inputs; one block, times the blocks."""

    def leaf(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=device, dtype=dtype) * 0.02).requires_grad_(True)

    dim, ffn, tokens = size.dim, size.ffn, size.tokens
    linears = [(leaf(1, tokens, dim), leaf(dim, dim).detach()) for _ in range(6)]
    linears += [(leaf(1, tokens, dim), leaf(ffn, dim).detach()), (leaf(1, tokens, ffn), leaf(dim, ffn).detach())]
    query, key = leaf(1, size.heads, tokens, HEAD_DIM), leaf(1, size.heads, TEXT_TOKENS, HEAD_DIM)

    def block() -> None:
        for x, weight in linears:
            out = F.linear(x, weight)
            torch.autograd.grad(out, x, out.detach())
        for other in (query.detach().requires_grad_(True), key):
            value = other.detach().requires_grad_(True)
            out = F.scaled_dot_product_attention(query, other, value)
            torch.autograd.grad(out, (query, other, value), out.detach())

    block()
    return size.blocks * statistics.median(_timed(block, device) for _ in range(3))


def model_flops(size: Size) -> float:
    """Of one LoRA step without recomputation: linear layers twice, attention three times the forward."""
    linear = size.blocks * size.tokens * (2 * 6 * size.dim**2 + 2 * 2 * size.dim * size.ffn)
    attention = size.blocks * 4 * size.tokens * (size.tokens + TEXT_TOKENS) * size.dim
    return 2 * linear + 3 * attention


def _timed(call: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _peak_gib(one: Contestant) -> float | None:
    """Peak of a whole step with its weights. Compiled code hides its storages from the CPU's count."""
    if one.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        one.step()
        return torch.cuda.max_memory_allocated() / 2**30
    if "compile" in one.states():
        return None
    held = [*one.model.parameters(), *one.model.buffers(), one.latents, one.text]
    held += [value for state in one.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return (peak_bytes(one.step, one.device, held=held) + sum(t.nbytes for t in held)) / 2**30


def fill(row: Row, one: Contestant, seconds: list[float], *, floor: float) -> None:
    row.step_s = statistics.median(seconds)
    row.tokens_per_s = one.size.tokens / row.step_s
    row.of_floor = floor / row.step_s
    name = torch.cuda.get_device_name() if one.device.type == "cuda" else ""
    peak = next((value for key, value in PEAK_TFLOPS.items() if key in name), None)
    row.mfu = model_flops(one.size) / row.step_s / (peak * 1e12) if peak else None
    idle = [key for key, state in one.states().items() if state != "exercised"]
    row.note = f"no effect: {', '.join(idle)}" if idle else ""


def enter(
    row: Row, size: Size, patches: tuple[str, ...], *, device: torch.device, dtype: torch.dtype
) -> Contestant | None:
    """Build a contestant and warm it up; ``None`` with a note in the row where that cannot be had."""
    try:
        one = Contestant(size, patches, device=device, dtype=dtype)
        one.step()
        one.step()
    except PatchRefused as error:
        row.note = str(error).partition(" is refused: ")[2].partition(" Use instead:")[0]
        return None
    except torch.cuda.OutOfMemoryError:
        row.note = "does not fit in this GPU's memory"
        return None
    return one


def bench(label: str, size: Size, args: argparse.Namespace, *, until: float) -> list[Row]:
    """All contestants at one shape."""
    device, dtype = torch.device(args.device), torch.bfloat16 if args.dtype == "bf16" else torch.float32
    floor = floor_seconds(size, device=device, dtype=dtype)
    rows = [Row(label, "floor", step_s=floor, tokens_per_s=size.tokens / floor, of_floor=1.0)]
    running: list[tuple[Row, Contestant, list[float]]] = []
    for name, patches in contestants(args.only).items():
        row = Row(label, name, note=NOT_HERE.get(name, ""))
        rows.append(row)
        if row.note:
            continue
        if time.monotonic() > until:
            row.note = "left out: time was up"
            continue
        torch._dynamo.reset()
        one = enter(row, size, patches, device=device, dtype=dtype)
        if one is None:
            continue
        row.peak_gib = _peak_gib(one)
        times: list[float] = []
        running.append((row, one, times))
        if device.type == "cuda":
            times += [_timed(one.step, device) for _ in range(args.steps)]
            fill(row, one, times, floor=floor)
            row.losses = one.losses
            running.clear()
            del one
            gc.collect()
            torch.cuda.empty_cache()
    for _ in range(args.steps):
        for _, one, times in running:
            times.append(_timed(one.step, device))
    for row, one, times in running:
        fill(row, one, times, floor=floor)
        row.losses = one.losses
    base = next(row for row in rows if row.name == "base")
    for row in rows:
        pairs = list(zip(row.losses, base.losses, strict=False))
        row.loss_difference = max((abs(a - b) / b for a, b in pairs), default=None)
    return rows


def table(rows: list[Row]) -> str:
    lines = ["| shape | | step s | times base | tokens/s | share of floor | MFU | peak GiB | loss differs by | |",
             "|---|---|---|---|---|---|---|---|---|---|"]

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    for row in rows:
        base = next(other for other in rows if other.shape == row.shape and other.name == "base")
        speed = base.step_s / row.step_s if base.step_s and row.step_s else None
        cells = [row.shape, row.name, shown(row.step_s, ".3g"), shown(speed, ".2f"), shown(row.tokens_per_s, ".0f"),
                 shown(row.of_floor, ".0%"), shown(row.mfu, ".0%"), shown(row.peak_gib, ".3g"),
                 shown(row.loss_difference, ".1e"), row.note]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    """Bars of step time and of peak memory, one pair of panels per shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row.shape for row in rows))
    figure, axes = pyplot.subplots(len(shapes), 2, figsize=(10, 3.2 * len(shapes)), squeeze=False)
    for shape, (left, right) in zip(shapes, axes, strict=True):
        timed = [row for row in rows if row.shape == shape and row.step_s is not None]
        names = [row.name for row in timed]
        left.barh(names, [row.step_s for row in timed], color="#4878a8")
        right.barh(names, [row.peak_gib or 0 for row in timed], color="#a86848")
        left.set(title=f"{shape}: seconds per step")
        right.set(title="peak GiB")
        left.invert_yaxis()
        right.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", help="dim x blocks x tokens, for example 512x4x1280")
    parser.add_argument("--only", type=lambda text: tuple(text.split(",")), default=(), help="comma list of patches")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("ablation"), help="the results, as .md, .json and .png")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    torch.set_num_threads(args.threads)
    shapes = {text: text for text in args.shapes} if args.shapes else (
        GPU_SHAPES if args.device == "cuda" else {"256x4x640": "256x4x640"})
    rows: list[Row] = []
    for label, text in shapes.items():
        rows += bench(label, Size.parse(text), args, until=until)
        sys.stdout.write(table([row for row in rows if row.shape == label]) + "\n")
        args.out.with_suffix(".md").write_text(table(rows) + "\n", encoding="utf-8")
        args.out.with_suffix(".json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", "utf-8")
    draw(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
