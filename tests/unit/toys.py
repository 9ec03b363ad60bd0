"""Toy recipes and objectives: two players, and a reward, on the real engine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from videox_fun.recipes.base import Recipe
from videox_fun.training.context import Components, Conditioning, NoiseSchedule, Player, RunContext
from videox_fun.training.objectives import LossOutput, Objective, Phase
from videox_fun.training.specs import ScriptSpec
from videox_fun.training.trainable import make_trainable

GROUPS = ("model", "data", "optim", "schedule", "checkpoint", "validation", "logging", "runtime", "ignored", "full")


class ToyBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.proj(x))


class ToyDenoiser(nn.Module):
    """Maps ``[B, C, T, h, w]`` to the same shape, with the interface the engine expects of a denoiser."""

    def __init__(self, width: int = 4, seed: int = 0) -> None:
        super().__init__()
        state = torch.random.get_rng_state()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(ToyBlock(width) for _ in range(2))
        torch.random.set_rng_state(state)
        self.config = {"width": width}

    def enable_gradient_checkpointing(self) -> None:
        self.checkpointing = True

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        hidden = x.movedim(1, -1) + t.view(-1, 1, 1, 1, 1) / 1000
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.movedim(-1, 1)


class ToyData:
    """Six fixed samples; the pieces of DataModule that the loop touches."""

    def __init__(self, rows: int = 6) -> None:
        self.dataset = [torch.randn(4, 2, 2, 2, generator=torch.Generator().manual_seed(i)) for i in range(rows)]

    def summary(self):
        return argparse.Namespace(lines=lambda: [f"{len(self.dataset)} toy rows"])


@dataclass
class ToyLoader:
    data: ToyData
    batch_size: int
    wait_s: float = 0.0
    seen: int = 0

    @property
    def steps_per_epoch(self) -> int:
        return len(self.data.dataset) // self.batch_size

    def epoch(self, epoch: int):
        order = torch.randperm(len(self.data.dataset), generator=torch.Generator().manual_seed(epoch)).tolist()
        first, self.seen = self.seen, 0
        for number in range(first, self.steps_per_epoch):
            rows = order[number * self.batch_size:(number + 1) * self.batch_size]
            self.seen = (number + 1) % self.steps_per_epoch
            batch = {"latents": torch.stack([self.data.dataset[i] for i in rows]), "idx": rows}
            yield batch, number == self.steps_per_epoch - 1

    @property
    def sampler_position(self) -> tuple[int, int]:
        return self.seen * self.batch_size, 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class ToyRecipe(Recipe):
    def check(self, ctx: RunContext) -> None:
        self.checked = True

    def data(self, ctx: RunContext) -> ToyData:
        return ToyData()

    def loader(self, ctx: RunContext, components: Components, data: ToyData) -> ToyLoader:
        return ToyLoader(data, ctx.args.train_batch_size)

    def load(self, ctx: RunContext) -> Components:
        sigmas = torch.linspace(1, 0.001, 1000)
        return Components(ToyDenoiser(), NoiseSchedule(sigmas * 1000, sigmas), extras={"critic": ToyDenoiser(seed=1)})

    def condition(self, ctx: RunContext, components: Components, batch: dict) -> Conditioning:
        return Conditioning(batch["latents"].to(ctx.weight_dtype), [])

    def predict(self, ctx, model, noisy, timesteps, conditioning) -> torch.Tensor:
        return model(noisy, timesteps)


class ToyAdversary(Objective):
    """A generator that is updated every second step, then a critic that learns from the updated generator."""

    def players(self) -> list[Player]:
        trainable = make_trainable(self.ctx.spec, self.ctx.args)
        self.generator = Player("transformer", self.components.denoiser, trainable)
        critic_part = make_trainable(self.ctx.spec, self.ctx.args)
        self.critic = Player("fake_score", self.components.extras["critic"], critic_part)
        self.events: list[tuple[str, int]] = []
        return [self.generator, self.critic]

    def prepare(self, batch: dict) -> Conditioning:
        return self.recipe.condition(self.ctx, self.components, batch)

    def phases(self, step: int) -> Sequence[Phase]:
        critic = Phase(self.critic, self._critic_loss)
        return [Phase(self.generator, self._generator_loss), critic] if step % 2 == 0 else [critic]

    def _sample(self, conditioning: Conditioning) -> torch.Tensor:
        latents = conditioning.latents
        noise = torch.randn(latents.shape, generator=self.ctx.rng.torch)
        return self.generator.model(noise, torch.full((latents.shape[0],), 500.0))

    def _generator_loss(self, conditioning: Conditioning) -> LossOutput:
        self.events.append(("generator", self.ctx.global_step))
        loss = (self._sample(conditioning) - conditioning.latents).square().mean()
        return LossOutput(loss, {"critic_score": loss.detach() * 2}, loss_name="train_dmd_loss")

    def _critic_loss(self, conditioning: Conditioning) -> LossOutput:
        self.events.append(("critic", self.ctx.global_step))
        with torch.no_grad():
            sample = self._sample(conditioning)
        prediction = self.critic.model(sample, torch.full((sample.shape[0],), 500.0))
        return LossOutput((prediction - conditioning.latents).square().mean(), loss_name="train_denoising_loss")


class ToyReward(Objective):
    """Raises the mean of what the denoiser makes from noise; it needs no dataset and brings its own loader."""

    def players(self) -> list[Player]:
        self.player = Player("transformer", self.components.denoiser, make_trainable(self.ctx.spec, self.ctx.args))
        return [self.player]

    def loader(self, data: ToyData | None) -> ToyLoader:
        assert data is None
        return ToyLoader(ToyData(), self.ctx.args.train_batch_size)

    def prepare(self, batch: dict) -> int:
        return len(batch["idx"])

    def phases(self, step: int) -> Sequence[Phase]:
        return [Phase(self.player, self._loss)]

    def _loss(self, count: int) -> LossOutput:
        noise = torch.randn((count, 4, 2, 2, 2), generator=self.ctx.rng.torch)
        reward = self.player.model(noise, torch.full((count,), 100.0)).mean()
        return LossOutput(-reward, {"train_reward": reward.detach()})


class NoDataRecipe(ToyRecipe):
    def data(self, ctx: RunContext) -> None:
        return None


def toy_spec(objective: str, trainable: str = "named") -> ScriptSpec:
    groups = GROUPS if trainable == "named" else (*GROUPS[:-1], "lora")
    return ScriptSpec(f"toy/{objective}", "unused:Unused", objective, trainable, groups)
