"""What is looked at during training: clips drawn for given prompts, and the loss on held-out clips.

Both use the very weights in training, or their EMA, have random streams of their own, and never stop a run: the
training streams are put back afterwards, and a failure is logged. A run trains the same, bit for bit, with and without
them. All ranks take part and meet afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from videox_fun.training.media import send_clip

if TYPE_CHECKING:
    from videox_fun.recipes.base import Recipe
    from videox_fun.training.context import Components, Player, RunContext
    from videox_fun.training.held_out import HeldOutLoss
    from videox_fun.training.objectives import Objective
    from videox_fun.training.tracking import RunLogger

logger = logging.getLogger(__name__)

_FPS = 12


class Validator:
    """Draws clips and measures the held-out loss at the steps and epochs that the flags name."""

    def __init__(
        self, ctx: RunContext, recipe: Recipe, components: Components, players: list[Player], *,
        objective: Objective | None = None, held_out: HeldOutLoss | None = None,
    ) -> None:
        self.ctx = ctx
        self.recipe = recipe
        self.components = components
        self.player = players[0]
        self.objective = objective
        self.held_out = held_out
        self.run_logger: RunLogger | None = None
        self.failures = 0
        self._sampled: int | None = None
        self._measured: int | None = None

    # ---- when -----------------------------------------------------------------------------------------------------

    def start(self, run_logger: RunLogger) -> None:
        """Before the first step: the held-out loss that the run starts from."""
        self.run_logger = run_logger
        self.measure()

    def after_step(self, step: int) -> None:
        args = self.ctx.args
        if step % args.validation_steps == 0:
            self.run()
        if step % (args.validation_loss_steps or args.validation_steps) == 0:
            self.measure()

    def after_epoch(self, epoch: int) -> None:
        """``epoch`` counts from 0, and the first epoch always validates."""
        if epoch % self.ctx.args.validation_epochs == 0:
            self.run()

    def finish(self) -> None:
        """After the last step: the held-out loss that the run ends with."""
        self.measure()

    # ---- what -----------------------------------------------------------------------------------------------------

    def run(self) -> list[Path]:
        """Draw a clip for every prompt, once per step; returns the files written."""
        ctx = self.ctx
        if not ctx.args.validation_prompts or self._sampled == ctx.global_step:
            return []
        self._sampled = ctx.global_step
        folder, written, start = Path(ctx.args.output_dir) / "sample", [], time.perf_counter()

        def save(name: str, video: torch.Tensor, caption: str = "") -> None:
            from videox_fun.utils.utils import save_videos_grid

            if ctx.rank % ctx.layout.sequence:
                return  # a neighbour that shares the tokens writes the same clip
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"sample-{ctx.global_step}-rank{ctx.rank}-{name}.mp4"
            save_videos_grid(video, str(path), fps=_FPS)
            written.append(path)
            if ctx.is_main:
                send_clip(ctx.accelerator, f"validation/{name}", video, path, caption=caption, step=ctx.global_step)

        with self._survived("Sampling"), self._weights():
            self.recipe.validate(ctx, self.components, self.player.unwrapped(), save)
        self._note("validation", start, files=[str(path) for path in written])
        return written

    def measure(self) -> dict[str, float]:
        """The held-out loss of the weights as they are, once per step; empty where none is asked for or it failed."""
        ctx = self.ctx
        if self.held_out is None or self.objective is None or self._measured == ctx.global_step:
            return {}
        self._measured = ctx.global_step
        values: dict[str, float] = {}
        with self._survived("The held-out loss"), self._weights():
            values = self.held_out.measure(self.objective, self.components)
            if self.run_logger is not None:
                self.run_logger.log_validation(values, ctx.global_step)
            if ctx.is_main:
                logger.info("Held-out loss after step %d: %.5f", ctx.global_step, values["validation_loss"])
        return values

    def _note(self, event: str, start: float, **values: object) -> None:
        if self.run_logger is not None:
            self.run_logger.note(event, self.ctx.global_step, seconds=round(time.perf_counter() - start, 3), **values)

    # ---- how ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _survived(self, what: str) -> Iterator[None]:
        """Log what goes wrong inside and go on; all ranks meet at the end."""
        ctx = self.ctx
        try:
            yield
        except Exception:
            self.failures += 1
            logger.exception("%s at step %d failed on rank %d; training goes on.", what, ctx.global_step, ctx.rank)
        finally:
            if ctx.device.type == "cuda":
                torch.cuda.empty_cache()
        ctx.accelerator.wait_for_everyone()

    @contextmanager
    def _weights(self) -> Iterator[None]:
        """Evaluation mode, EMA weights where there are any, and streams that training does not see."""
        ctx, model, ema = self.ctx, self.player.unwrapped(), self.player.ema
        streams = ctx.rng.snapshot()
        if ema is not None:
            ema.store()
        model.eval()
        try:
            if ema is not None:
                ema.copy_to()
            with torch.no_grad(), ctx.autocast():
                yield
        finally:
            if ema is not None:
                ema.restore()
            model.train()
            ctx.residency.place(*self.components.frozen().values())
            ctx.rng.restore(streams)
