"""A training run in miniature: real checkpoint manager, random streams, optimizer and schedule around a tiny network.

The loader draws from the streams while it fetches, fetches one batch ahead, and shuffles by epoch, so that a resume
that restores anything less than everything shows up in the recorded losses.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from videox_fun.training.checkpoint import CheckpointManager
from videox_fun.training.context import ParamGroup, Player
from videox_fun.training.ema import EMA
from videox_fun.training.optimizers import build_lr_scheduler, build_optimizer
from videox_fun.training.state import RngStreams

WIDTH = 6


@dataclass
class File:
    """The shape of ``trainable.ExportFile``."""

    name: str
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]
    config: dict[str, Any] | None = None


class Net(nn.Module):
    """A frozen layer, a trained one and an adapter."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.head = nn.Linear(width, width)
        self.adapter = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.dropout(torch.tanh(self.base(x.to(self.base.weight.dtype)).float()), 0.2)
        head, adapter = self.head, self.adapter
        return (hidden.to(head.weight.dtype) @ head.weight.T + head.bias).float() + (
            hidden.to(adapter.weight.dtype) @ adapter.weight.T).float()


class StandIn:
    """A trainable that keeps upstream's file names: the whole model, or the adapter as LoRA."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def attach(self, player: Player, args: Namespace) -> list[ParamGroup]:
        word = "head" if self.kind == "named" else "adapter"
        player.model.requires_grad_(False)
        named = [(n, p.requires_grad_(True)) for n, p in player.model.named_parameters() if n.startswith(word)]
        groups = [ParamGroup([p for _, p in named], args.learning_rate, [n for n, _ in named])]
        return groups + [ParamGroup([], args.learning_rate / 2, [])] if self.kind == "named" else groups

    def _tensors(self, player: Player, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        state = player.unwrapped().state_dict()
        if self.kind != "named":
            state = {name: value for name, value in state.items() if name.startswith("adapter")}
        return {name: value.detach().to(dtype) for name, value in state.items()}

    def export(self, player: Player, *, layout: str, dtype: torch.dtype) -> list[File]:
        tensors = self._tensors(player, dtype)
        if self.kind == "named":
            return [File("transformer/diffusion_pytorch_model.safetensors", tensors, {"format": "pt"},
                         {"_class_name": "Net"})]
        names = ["lora_diffusion_pytorch_model.safetensors"] if layout == "folder" else ["{stem}.safetensors"]
        if self.kind == "peft":
            names.append("lora_diffusion_pytorch_model_compatible_with_comfyui.safetensors" if layout == "folder"
                         else "{stem}-compatible_with_comfyui.safetensors")
        return [File(name, tensors, {"format": "pt"}) for name in names]

    def load(self, player: Player, source: Path) -> str:
        inside = {"named": "transformer/diffusion_pytorch_model.safetensors"}
        if source.is_dir():
            source = source / inside.get(self.kind, "lora_diffusion_pytorch_model.safetensors")
        tensors = load_file(source)
        player.unwrapped().load_state_dict(tensors, strict=False)
        return f"{len(tensors)} tensors"

    def clip_parameters(self, player: Player) -> list[nn.Parameter]:
        return [p for p in player.model.parameters() if p.requires_grad]


class Loader:
    """Rows in an order shuffled per epoch; each fetch draws an augmentation; one batch is fetched ahead."""

    def __init__(self, rng: RngStreams, *, rows: int = 10, batch: int = 2, seed: int = 7) -> None:
        self.rng, self.rows, self.batch, self.seed = rng, rows, batch, seed
        self.steps_per_epoch = rows // batch
        self.started: tuple[int, int] | None = None
        self._epoch, self._next = 0, 0
        self._before: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None

    def _order(self, epoch: int) -> list[int]:
        return torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()

    def _fetch(self, index: int) -> dict[str, Any]:
        ids = self._order(self._epoch)[index * self.batch:(index + 1) * self.batch]
        noise = float(np.random.rand()) + float(self.rng.numpy.random())
        return {"idx": ids, "x": torch.tensor(ids, dtype=torch.float32)[:, None].expand(-1, WIDTH) / 10 + noise}

    def epoch(self, epoch: int) -> Iterator[tuple[dict[str, Any], bool]]:
        resume, self._resume = self._resume, None
        self._epoch = epoch
        self._next = resume["next"] if resume else 0
        if self._next >= self.steps_per_epoch:
            return
        if resume:
            now = self.rng.snapshot()
            self.rng.restore(resume["before"])
        self._before = self.rng.snapshot()
        pending = self._fetch(self._next)
        if resume:
            self.rng.restore(now)
        while self._next < self.steps_per_epoch:
            batch, self._next = pending, self._next + 1
            last = self._next == self.steps_per_epoch
            self._before = self.rng.snapshot()
            pending = None if last else self._fetch(self._next)
            yield batch, last

    @property
    def sampler_position(self) -> tuple[int, int]:
        return self._next * self.batch % self.rows, self._epoch + (self._next == self.steps_per_epoch)

    def start_at(self, epoch: int, position: int) -> None:
        self.started = (epoch, position)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "before": self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resume = state


def make_args(output_dir: Path, **changes: Any) -> Namespace:
    values = {
        "output_dir": str(output_dir), "learning_rate": 0.05, "scale_lr": False, "gradient_accumulation_steps": 2,
        "train_batch_size": 2, "use_8bit_adam": False, "use_came": False, "adam_beta1": 0.9, "adam_beta2": 0.999,
        "adam_weight_decay": 0.01, "adam_epsilon": 1e-8, "lr_scheduler": "cosine", "lr_warmup_steps": 2,
        "max_train_steps": 10, "max_grad_norm": 1.0, "save_state": True, "use_ema": False, "seed": 3, "rank": 4,
        "network_alpha": 2, "target_name": "q,k", "trainable_modules": ["head"], "dataloader_num_workers": 0,
        "checkpoints_total_limit": None, "upstream_compat": False, "allow_resume_changes": False,
        "resume_from_checkpoint": None, "train_data_meta": None, "mixed_precision": "no",
    }
    return Namespace(**{**values, **changes})


@dataclass
class Run:
    """One process's view of a run, built the way the trainer builds it."""

    args: Namespace
    kind: str = "named"
    weight_dtype: torch.dtype = torch.float32
    trained_dtype: torch.dtype | None = None
    players: int = 1
    rank: int = 0
    world: int = 1
    fp16_scaler: bool = False
    sharded: bool = False
    extra_state: dict[str, Any] | None = None
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        args = self.args
        self.rng = RngStreams(args.seed, rank=self.rank)
        self.rng.seed_globals()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if self.fp16_scaler else None
        accelerator = SimpleNamespace(device=torch.device("cpu"), is_main_process=self.rank == 0,
                                      is_local_main_process=self.rank == 0, process_index=self.rank,
                                      num_processes=self.world,
                                      distributed_type=SimpleNamespace(value="FSDP" if self.sharded else "NO"),
                                      state=SimpleNamespace(fsdp_plugin=SimpleNamespace(sharding_strategy=None)),
                                      save_state=self._save_shards, load_state=self._load_shards)
        self.ctx = SimpleNamespace(
            spec=SimpleNamespace(id="tiny/train"), args=args, accelerator=accelerator, weight_dtype=self.weight_dtype,
            rng=self.rng, compat=args.upstream_compat, global_step=0, epoch=0, is_main=self.rank == 0, rank=self.rank,
            world=self.world, device=torch.device("cpu"))
        self.player_list = [self._player(name) for name in ("transformer", "fake_score")[:self.players]]
        self.loader = Loader(self.rng, batch=args.train_batch_size)
        self.manager = CheckpointManager(self.ctx, players=self.player_list, loader=self.loader, scaler=self.scaler,
                                         extra_state=self.extra_state)

    @property
    def player(self) -> Player:
        return self.player_list[0]

    def _player(self, name: str) -> Player:
        model = Net().to(self.weight_dtype)
        player = Player(name, model, StandIn(self.kind))
        player.groups = player.trainable.attach(player, self.args)
        for group in player.groups:
            for p in group.params:
                p.data = p.data.to(self.trained_dtype or self.weight_dtype)
        player.optimizer = build_optimizer(self.args, player.groups)
        player.lr_scheduler = build_lr_scheduler(self.args, player.optimizer, total_steps=self.args.max_train_steps)
        if self.args.use_ema:
            player.ema = EMA(model.named_parameters())
        player.model = self.wrap(model)
        return player

    def _save_shards(self, folder: str) -> None:
        """What accelerate does for FSDP: weights and optimizer in forms of its own."""
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            (Path(folder) / name).mkdir()
        torch.save(self.player.model.state_dict(), Path(folder) / "pytorch_model_fsdp_0" / "shard.pt")
        torch.save(self.player.optimizer.state_dict(), Path(folder) / "optimizer_0" / "shard.pt")

    def _load_shards(self, folder: str) -> None:
        self.player.model.load_state_dict(torch.load(Path(folder) / "pytorch_model_fsdp_0" / "shard.pt"))
        self.player.optimizer.load_state_dict(torch.load(Path(folder) / "optimizer_0" / "shard.pt"))

    def resume(self, asked: str = "latest"):
        point = self.manager.resume(asked)
        if point is not None:
            self.ctx.global_step, self.ctx.epoch = point.step, point.epoch
        self.manager.restore_rng()
        return point

    def _step(self, player: Player, batch: dict[str, Any]) -> torch.Tensor:
        noise = torch.randn(batch["x"].shape, generator=self.rng.torch)
        loss = (player.model(batch["x"] + noise) - noise).square().mean()
        share = loss / self.args.gradient_accumulation_steps
        (share if self.scaler is None else self.scaler.scale(share)).backward()
        return share.detach()

    def train(self, until: int, *, save_at: tuple[int, ...] = ()) -> None:
        """Go on to optimizer step ``until``."""
        micro, total, ids = 0, 0.0, []
        while self.ctx.global_step < until:
            for batch, is_last in self.loader.epoch(self.ctx.epoch):
                micro += 1
                total += sum(float(self._step(player, batch)) for player in self.player_list)
                ids += batch["idx"]
                if micro % self.args.gradient_accumulation_steps and not is_last:
                    continue
                self._update()
                self.losses.append(total)
                self.rows.append(ids)
                micro, total, ids = 0, 0.0, []
                self.ctx.global_step += 1
                self.steps.append(self.ctx.global_step)
                if self.ctx.global_step in save_at:
                    self.manager.save(self.ctx.global_step)
                if self.ctx.global_step >= until:
                    return
            self.ctx.epoch += 1

    def _update(self) -> None:
        self.rates.append(self.player.optimizer.param_groups[0]["lr"])
        for player in self.player_list:
            if self.scaler is None:
                player.optimizer.step()
            else:
                self.scaler.step(player.optimizer)
                self.scaler.update()
            player.lr_scheduler.step()
            player.optimizer.zero_grad()
            if player.ema is not None:
                player.ema.step()

    def everything(self) -> dict[str, Any]:
        """All state that a continuation depends on, flat, for comparison."""
        found: dict[str, Any] = {"rng": self.rng.snapshot(), "step": self.ctx.global_step}
        if self.scaler is not None:
            found["scale"] = self.scaler.state_dict()
        for player in self.player_list:
            for name, value in player.unwrapped().state_dict().items():
                found[f"{player.name}.{name}"] = value.clone()
            for index, row in player.optimizer.state_dict()["state"].items():
                for key, value in row.items():
                    found[f"{player.name}.optimizer.{index}.{key}"] = value
            found[f"{player.name}.lr"] = player.lr_scheduler.state_dict()["last_epoch"]
            if player.ema is not None:
                found[f"{player.name}.ema_step"] = player.ema.optimization_step
                for name, value in player.ema.shadow.items():
                    found[f"{player.name}.ema.{name}"] = value.clone()
        return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of entries that are not bit-equal."""
    return [key for key in sorted(a.keys() | b.keys()) if key not in a or key not in b or not same(a[key], b[key])]


SETUPS = {
    "full": {"kind": "named"},
    "full, EMA": {"kind": "named", "args": {"use_ema": True}},
    "full, bf16": {"kind": "named", "weight_dtype": torch.bfloat16},
    "full, bf16 with fp32 masters": {"kind": "named", "weight_dtype": torch.bfloat16, "trained_dtype": torch.float32,
                                     "args": {"use_ema": True}},
    "LoRA": {"kind": "lora"},
    "LoRA, bf16 with fp32 adapter": {"kind": "lora", "weight_dtype": torch.bfloat16, "trained_dtype": torch.float32},
    "PEFT": {"kind": "peft"},
    "fp16 scaler": {"kind": "named", "fp16_scaler": True},
    "two players": {"kind": "named", "players": 2, "args": {"use_ema": True}},
}


def build(output_dir: Path, setup: dict, flag: str | None = None, **more) -> Run:
    extra = {**setup.get("args", {}), **more, **({flag: True} if flag else {})}
    return Run(make_args(output_dir, **extra), **{k: v for k, v in setup.items() if k != "args"})


def state_at(folder: Path, step: int) -> Path:
    run = build(folder, SETUPS["LoRA"])
    run.ctx.global_step = step
    return run.manager.save(step)
