"""Loss scaling for fp16.

Gradients of half precision underflow, so the loss is multiplied by a large factor before backward and the gradients are
divided by it before clipping. A step whose gradients overflowed is left out and the factor lowered. Trainable weights
are float32 in such runs, since a scaler cannot unscale half-precision gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from videox_fun.training.context import RunContext


class LossScaling:
    """A gradient scaler that is a no-op when disabled."""

    def __init__(self, ctx: RunContext, *, enabled: bool) -> None:
        self.scaler = torch.amp.GradScaler(ctx.device.type) if enabled else None

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer; ``False`` when the scaler left the step out."""
        if self.scaler is None:
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before
