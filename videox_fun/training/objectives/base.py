"""The interface between the loop and an objective.

Each micro-step the loop calls :meth:`Objective.prepare` once (encoding, without gradients) and then runs the phases in
order. A phase computes the loss of one player; the loop does backward, clipping, the optimizer step and the learning
rate before the next phase starts, so a critic can be trained on the generator that was just updated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from videox_fun.data.loader import TrainLoader
    from videox_fun.data.module import DataModule
    from videox_fun.recipes.base import Recipe
    from videox_fun.training.context import Components, Player, RunContext


@dataclass
class LossOutput:
    """Loss of one phase (a scalar with a graph), values worth logging (detached scalars), noise levels drawn."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    loss_name: str = "train_loss"
    timesteps: torch.Tensor | None = None


@dataclass(frozen=True)
class Phase:
    """One update of one player within a step."""

    player: Player
    compute: Callable[[Any], LossOutput]


class Objective(ABC):
    """Base of all objectives. ``ctx``, ``recipe`` and ``components`` are fixed for the run."""

    def __init__(self, ctx: RunContext, recipe: Recipe, components: Components) -> None:
        self.ctx = ctx
        self.recipe = recipe
        self.components = components

    @abstractmethod
    def players(self) -> list[Player]:
        """The trained networks, made once; the loop fills in optimizer and wrappers."""

    @abstractmethod
    def prepare(self, batch: dict) -> Any:
        """Everything that needs no gradient: runs once per micro-step, before the phases."""

    @abstractmethod
    def phases(self, step: int) -> Sequence[Phase]:
        """The updates of optimizer step ``step`` (counted from 0), in order."""

    def held_out_loss(self, prepared: Any, *, noise: torch.Tensor, share: float) -> LossOutput:
        """Loss for given noise at the noise level at ``share`` (0 = most noise, 1 = least) of the schedule."""
        raise ValueError(f"--validation_data_meta: {type(self).__name__} has no held-out loss; leave the flag out.")

    def loader(self, data: DataModule | None) -> TrainLoader:
        """What the loop iterates. An objective that needs no dataset supplies its own."""
        if data is None:
            raise ValueError(f"{type(self).__name__} needs a dataset, and the recipe has none.")
        return self.recipe.loader(self.ctx, self.components, data)
