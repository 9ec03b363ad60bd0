"""When and how samples are drawn during training.

Sampling uses the very weights in training (or their EMA), has random streams of its own, and never stops a run: the
training streams are put back afterwards, and a failure is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from videox_fun.recipes.base import Recipe
    from videox_fun.training.context import Components, Player, RunContext

logger = logging.getLogger(__name__)


class Validator:
    """Runs the recipe's sampling at the steps and epochs that the flags name."""

    def __init__(self, ctx: RunContext, recipe: Recipe, components: Components, players: list[Player]) -> None:
        self.ctx = ctx
        self.recipe = recipe
        self.components = components
        self.player = players[0]
        self.failures = 0

    def after_step(self, step: int) -> None:
        if step % self.ctx.args.validation_steps == 0:
            self.run()

    def after_epoch(self, epoch: int) -> None:
        """``epoch`` counts from 0, and the first epoch always validates."""
        if epoch % self.ctx.args.validation_epochs == 0:
            self.run()

    def run(self) -> list[Path]:
        """Sample every prompt; returns the files written."""
        ctx = self.ctx
        if not ctx.args.validation_prompts:
            return []
        folder = Path(ctx.args.output_dir) / "sample"
        written: list[Path] = []

        def save(name: str, video: torch.Tensor) -> None:
            from videox_fun.utils.utils import save_videos_grid

            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"sample-{ctx.global_step}-rank{ctx.rank}-{name}.mp4"
            save_videos_grid(video, str(path), fps=12)
            written.append(path)

        try:
            with self._weights(), torch.no_grad(), ctx.autocast():
                self.recipe.validate(ctx, self.components, self.player.unwrapped(), save)
        except Exception:
            self.failures += 1
            logger.exception("Validation at step %d failed on rank %d; training goes on.", ctx.global_step, ctx.rank)
        return written

    @contextmanager
    def _weights(self) -> Iterator[Any]:
        """Evaluation mode, EMA weights where there are any, and streams that training does not see."""
        ctx, model, ema = self.ctx, self.player.unwrapped(), self.player.ema
        streams = ctx.rng.snapshot()
        model.eval()
        if ema is not None:
            ema.store()
            ema.copy_to()
        try:
            yield
        finally:
            if ema is not None:
                ema.restore()
            model.train()
            ctx.residency.place(*self.components.frozen().values())
            ctx.rng.restore(streams)
