"""Share of a training step spent outside the transformer, when latents and text are given.

The real loop runs LoRA steps: data wait, noise, loss, clipping, optimizer, logging. Only encoding is left out, as with
a warm cache. The time of the denoiser's forward and of backward is taken inside the loop; the rest is overhead.

    python benchmarks/step_overhead.py --size 1024x8x4000 --steps 8
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks.step_time import TEXT_TOKENS, Size  # noqa: E402
from videox_fun.recipes.base import Recipe  # noqa: E402
from videox_fun.training.context import Components, Conditioning, NoiseSchedule, RunContext  # noqa: E402
from videox_fun.training.flags import parse_args  # noqa: E402
from videox_fun.training.launch import make_context  # noqa: E402
from videox_fun.training.specs import get_spec  # noqa: E402
from videox_fun.training.trainer import Trainer  # noqa: E402


class GivenData:
    """Stands for a dataset whose samples are encoded already."""

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        frames, height, width = size.grid
        self.latents = torch.randn(1, 16, frames, 2 * height, 2 * width).to(dtype)
        self.text = torch.randn(TEXT_TOKENS, 64).to(dtype)
        self.dataset = [None] * 8

    def summary(self) -> argparse.Namespace:
        return argparse.Namespace(lines=list)


class GivenLoader:
    """Hands out the same batch."""

    steps_per_epoch = 8
    wait_s = 0.0
    sampler_position = (0, 0)

    def __init__(self, data: GivenData) -> None:
        self.data = data

    def epoch(self, epoch: int) -> Iterator[tuple[dict, bool]]:
        for number in range(self.steps_per_epoch):
            yield {"latents": self.data.latents, "text": [""], "idx": [number]}, number == self.steps_per_epoch - 1

    def state_dict(self) -> dict[str, Any]:
        return {}


class GivenRecipe(Recipe):
    """The Wan transformer on given latents; notes how long its forward takes."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.forward_s = 0.0

    def check(self, ctx: RunContext) -> None:
        return None

    def data(self, ctx: RunContext) -> GivenData:
        return GivenData(self.size, ctx.weight_dtype)

    def loader(self, ctx: RunContext, components: Components, data: GivenData) -> GivenLoader:
        return GivenLoader(data)

    def load(self, ctx: RunContext) -> Components:
        from videox_fun.models.wan_transformer3d import WanTransformer3DModel

        size = self.size
        model = WanTransformer3DModel(
            dim=size.dim, ffn_dim=size.ffn, num_heads=size.heads, num_layers=size.blocks, text_dim=64
        ).to(ctx.weight_dtype)
        sigmas = torch.linspace(1, 0.001, 1000)
        return Components(model.requires_grad_(False), NoiseSchedule(sigmas * 1000, sigmas))

    def condition(self, ctx: RunContext, components: Components, batch: dict) -> Conditioning:
        return Conditioning(batch["latents"].to(ctx.device), [batch_text(ctx)])

    def predict(self, ctx, model, noisy, timesteps, conditioning):  # noqa: ANN001, ANN201
        started = _now(ctx.device)
        out = model(x=noisy, context=conditioning.text, t=timesteps, seq_len=self.size.tokens)
        self.forward_s += _now(ctx.device) - started
        return out


def batch_text(ctx: RunContext) -> torch.Tensor:
    return torch.zeros(TEXT_TOKENS, 64, dtype=ctx.weight_dtype, device=ctx.device)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(call: Callable[..., None], device: torch.device, spent: list[float]) -> Callable[..., None]:
    def wrapper(*args: Any, **kwargs: Any) -> None:
        started = _now(device)
        call(*args, **kwargs)
        spent[-1] += _now(device) - started

    return wrapper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1024x8x4000")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mixed_precision", default="bf16", choices=["no", "bf16"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spec = get_spec("wan2.1_fun/train_lora")
    with tempfile.TemporaryDirectory() as folder:
        args = parse_args(spec, [
            "--pretrained_model_name_or_path", "none", "--output_dir", folder, "--max_train_steps",
            str(options.steps), "--train_batch_size", "1", "--rank", "64", "--network_alpha", "32", "--target_name",
            "q,k,v,ffn.0,ffn.2", "--uniform_sampling", "--seed", "0", "--mixed_precision", options.mixed_precision,
            "--audit", "off", "--checkpointing_steps", "1000000",
        ], check_paths=False)
        recipe = GivenRecipe(Size.parse(options.size))
        trainer = Trainer(make_context(spec, args), recipe)
        trainer.setup()
        shares = measure(trainer, recipe)
    row = {"size": options.size, "precision": options.mixed_precision, "steps": options.steps,
           "overhead_share": statistics.median(shares)}
    sys.stdout.write(f"outside the transformer: {row['overhead_share']:.2%} of the step (median of {len(shares)})\n")
    if options.json:
        options.json.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")


def measure(trainer: Trainer, recipe: GivenRecipe) -> list[float]:
    """Share of each step, from the second on, that is neither forward nor backward."""
    backward = [0.0]
    accelerator = trainer.ctx.accelerator
    accelerator.backward = timed(accelerator.backward, trainer.ctx.device, backward)
    shares: list[float] = []
    log = trainer.run_logger.log

    def note(values: dict[str, float], step: int) -> None:
        log(values, step)
        inside = recipe.forward_s + backward[-1]
        if step > 1:
            shares.append(max(0.0, 1 - inside / values["step_time"]))
        recipe.forward_s, backward[-1] = 0.0, 0.0

    trainer.run_logger.log = note
    trainer.run()
    return shares


if __name__ == "__main__":
    main()
