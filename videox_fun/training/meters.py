"""Numbers of the run: what is logged after each step, and the facts the audit asks for.

Everything here is read from values the loop has anyway; nothing waits for the device.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from videox_fun.training.context import Conditioning, Player, RunContext

if TYPE_CHECKING:
    from optim_patches.audit.clock import PhaseClock
    from optim_patches.audit.live import LiveAudit
    from optim_patches.base import Target
    from videox_fun.training.clipping import ClipResult, GradientClipper
    from videox_fun.training.objectives import LossOutput

_KEPT_DRAWS = 512


@dataclass
class StepTotals:
    """Sums since the last logged step."""

    seconds: float = 0.0
    wait_s: float = 0.0
    micro_steps: int = 0
    tokens: int = 0


@dataclass
class RunMeter:
    """Collects a run's numbers.

    Attributes:
        pending: per player, loss and samples since its last update.
    """

    args: argparse.Namespace
    players: list[Player]
    loader: Any
    pending: dict[str, Any] = field(default_factory=dict)
    totals: StepTotals = field(default_factory=StepTotals)
    run: StepTotals = field(default_factory=StepTotals)
    steps: int = 0
    shapes: dict[tuple[int, ...], int] = field(default_factory=dict)
    tiling: list[int] = field(default_factory=list)
    text_dropped: int = 0
    texts: int = 0
    timesteps: deque[torch.Tensor] = field(default_factory=lambda: deque(maxlen=_KEPT_DRAWS))
    motion_share: float | None = None
    reward: float | None = None
    reward_steps: int = 0
    _values: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    @property
    def micro_steps(self) -> int:
        return self.run.micro_steps

    def saw_batch(self, batch: dict, *, tiles: int) -> None:
        """Take note of captions and tiling."""
        captions = batch.get("text", ())
        self.texts += len(captions)
        self.text_dropped += sum(not caption for caption in captions)
        if self.args.auto_tile_batch_size:
            self.tiling.append(tiles)

    def saw(self, prepared: Any) -> None:
        """Take note of what the denoiser is about to get."""
        if isinstance(prepared, Conditioning):
            shape = tuple(prepared.latents.shape)
            self.shapes[shape] = self.shapes.get(shape, 0) + 1
            count = shape[0] * math.prod(shape[2:]) // 4
            self.totals.tokens += count
            self.run.tokens += count

    def saw_output(self, output: LossOutput) -> None:
        """Keep the drawn noise levels, on the device until somebody asks."""
        if output.timesteps is not None:
            self.timesteps.append(output.timesteps)

    def micro_step(self, wait_s: float) -> None:
        now = time.perf_counter()
        for totals in (self.totals, self.run):
            totals.seconds += now - self._last
            totals.wait_s += wait_s
            totals.micro_steps += 1
        self._last = now

    def restart_clock(self) -> None:
        """Leave what happened since the last step (saving, sampling) out of the step times."""
        self._last = time.perf_counter()

    def updated(
        self, player: Player, loss_name: str, result: ClipResult, metrics: dict[str, torch.Tensor], *, stepped: bool
    ) -> None:
        """Numbers of one player's update."""
        first = player is self.players[0]
        suffix = "" if first else f"_{player.name}"
        self._values[loss_name] = result.loss if result.loss is not None else math.nan
        self._values[f"lr{suffix}"] = player.lr_scheduler.get_last_lr()[0]
        self._values[f"grad_norm{suffix}"] = result.norm
        if math.isfinite(result.limit):
            self._values[f"grad_limit{suffix}"] = result.limit
        self._values |= {name: float(value) for name, value in metrics.items()}
        if "motion_share" in metrics:
            self.motion_share = self._values["motion_share"] / max(self._values[loss_name], 1e-12)
        if "reward" in metrics:
            self.reward, self.reward_steps = self._values["reward"], self.reward_steps + 1
        if not stepped:
            self._values["skipped"] = 1.0

    def values(self) -> dict[str, float]:
        """What to log for the optimizer step that just ended; starts the next one."""
        totals, self.totals = self.totals, StepTotals()
        self.steps += 1
        values, self._values = self._values, {}
        seconds = max(totals.seconds, 1e-9)
        values |= {"step_time": seconds, "data_wait": totals.wait_s, "tokens_per_s": totals.tokens / seconds}
        return values

    def facts(
        self, ctx: RunContext, clippers: dict[str, GradientClipper], *, total_steps: int,
        phases: dict[str, dict[str, float]],
    ) -> dict[str, Any]:
        """What the audit reads besides the live objects; reading the drawn noise levels waits for the device."""
        schedule = self.players[0].lr_scheduler
        plugin = getattr(ctx.accelerator.state, "deepspeed_plugin", None)
        scaler = getattr(ctx.accelerator, "scaler", None)
        return {
            "steps": self.steps, "micro_steps": self.run.micro_steps, "total_steps": total_steps,
            "seconds": self.run.seconds, "data_wait_s": self.run.wait_s, "tokens": self.run.tokens,
            "shapes": dict(self.shapes), "world": ctx.world, "distributed": ctx.accelerator.distributed_type.value,
            "deepspeed": plugin.deepspeed_config if plugin is not None else {}, "fsdp": _fsdp(ctx),
            "clip": {name: clipper.stats for name, clipper in clippers.items()},
            "trainable": {player.name: player.trainable.facts(player) for player in self.players},
            "groups": [(len(group.params), sum(p.numel() for p in group.params), group.lr)
                       for player in self.players for group in player.groups],
            "lr": schedule.get_last_lr(), "lr_lambda": self.args.lr_scheduler,
            "lr_curve": [schedule.base_lrs[0] * schedule.lr_lambdas[0](round(share * total_steps))
                         for share in (0, 0.25, 0.5, 0.75, 1)],
            "ema": self.players[0].ema, "loss_scale": scaler.get_scale() if scaler is not None else None,
            "timesteps": [value for drawn in self.timesteps for value in drawn.flatten().tolist()],
            "motion_share": self.motion_share, "texts": self.texts, "text_dropped": self.text_dropped,
            "tiling": list(self.tiling),
            "reward": self.reward, "reward_steps": self.reward_steps, "phases": phases,
            "cache": {} if ctx.cache is None else {"hits": dict(ctx.cache.hits), "misses": dict(ctx.cache.misses)},
        }


def _fsdp(ctx: RunContext) -> dict[str, Any]:
    plugin = getattr(ctx.accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return {}
    return {"strategy": str(plugin.sharding_strategy), "prefetch": str(plugin.backward_prefetch),
            "version": getattr(plugin, "fsdp_version", 1)}


def start_clock(ctx: RunContext, target: Target) -> PhaseClock:
    """The clock of the run's phases, standing still with ``--audit off``."""
    from optim_patches.audit.clock import PhaseClock

    clock = PhaseClock.on(target.device, enabled=ctx.args.audit != "off")
    clock.watch({role: module for role, module in target.models.items() if module is not None})
    return clock


def start_audit(ctx: RunContext, target: Target) -> LiveAudit | None:
    """The live audit with its counters installed, or ``None`` with ``--audit off``."""
    if ctx.args.audit == "off":
        return None
    from optim_patches.audit.live import LiveAudit

    audit = LiveAudit(
        args=ctx.args, explicit=ctx.args.explicit, manager=ctx.patches, output_dir=Path(ctx.args.output_dir),
        mode=ctx.args.audit, lang=ctx.args.audit_lang,
    )
    audit.install(target)
    return audit
