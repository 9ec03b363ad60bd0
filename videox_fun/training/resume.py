"""Going on with an interrupted run.

``--resume_from_checkpoint`` names a state folder, ``latest``, or a bare LoRA file. A state of ours restores everything
bit for bit. A state folder of upstream restores what it carries: weights, optimizer, schedule, epoch, sampler position
and the global random streams. Bare weights give a *warm start*: the step of the name, a new optimizer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from videox_fun.training import checkpoint_io as io
from videox_fun.training.checkpoint_io import CheckpointError
from videox_fun.training.checkpoint_parts import (
    EMA_FOLDER,
    MASTER_FILE,
    group_names,
    live_parameters,
    restore_accelerate_rng,
    scheduler_from_upstream,
)
from videox_fun.training.checkpoint_scan import (
    Entry,
    Kind,
    inspect_file,
    inspect_folder,
    latest_state,
    parse_step,
    scan,
    stray_names,
)
from videox_fun.training.checkpoint_settings import (
    changed_settings,
    describe_changes,
    optimizer_changed,
    run_settings,
)
from videox_fun.training.optimizers import check_owned, load_optimizer_state, name_difference, set_schedule_position

if TYPE_CHECKING:
    from videox_fun.training.checkpoint import CheckpointManager
    from videox_fun.training.context import Player

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on.

    Attributes:
        step: optimizer steps already made.
        epoch: epoch to iterate first; the loader continues inside it.
        source: what was read.
        kind: ``exact``, ``upstream`` (as far as that folder carries state) or ``warm`` (weights only).
        notes: what could not be restored.
    """

    step: int
    epoch: int
    source: Path
    kind: str
    notes: tuple[str, ...] = ()


@dataclass
class _Restored:
    """What the last resume read, to be applied again just before the loop."""

    rng: Mapping[str, Any] | None = None
    global_rng: Mapping[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


def _first(folder: Path, stem: str) -> Path | None:
    return next((p for p in (folder / f"{stem}.bin", folder / f"{stem}.pt") if p.is_file()), None)


@torch.no_grad()
def _round_to_bf16(tensors: Iterable[torch.Tensor]) -> None:
    """Upstream reads the model of a state through bf16 whatever the run's precision (Q-06)."""
    for tensor in tensors:
        tensor.copy_(tensor.to(torch.bfloat16))


class Resumer:
    """The reading half of a checkpoint manager."""

    def __init__(self, manager: CheckpointManager) -> None:
        self.manager = manager
        self.ctx = manager.ctx
        self.args = manager.ctx.args
        self._restored = _Restored()

    # -------------------------------------------------------------------------------------------------------- finding

    def find(self, asked: str) -> Entry | None:
        """Decide on rank 0 and tell the others, so that all ranks read the same folder."""
        outcome: tuple[Entry | None, str | None] = (None, None)
        if self.ctx.is_main:
            try:
                outcome = (self._find(asked), None)
            except ValueError as error:
                outcome = (None, str(error))
        entry, problem = self.manager._share(outcome)
        if problem is not None:
            raise ValueError(problem)
        return entry

    def _find(self, asked: str) -> Entry | None:
        entries = scan(self.manager.output_dir, player_names=self.manager.player_names)
        if asked == "latest":
            found = latest_state(entries)
            if found is not None:
                return found
            strays = stray_names(self.manager.output_dir, entries)
            if not entries and not strays:
                logger.warning("--resume_from_checkpoint latest: %s holds no checkpoint yet; starting from the "
                               "beginning.", self.manager.output_dir)
                return None
            return self._nothing("latest", entries, strays)
        found = self._named(asked)
        if found is None:
            return self._nothing(asked, entries, stray_names(self.manager.output_dir, entries))
        if found.kind in (Kind.BROKEN, Kind.FOREIGN):
            raise ValueError(f"--resume_from_checkpoint {asked}: {found.path} cannot be used ({found.problem}). "
                             "'latest' takes the newest one that can.")
        return found

    def _named(self, asked: str) -> Entry | None:
        """A bare name belongs to the output folder; anything with a folder in it is taken literally first."""
        literal, inside = Path(asked), self.manager.output_dir / Path(asked).name
        order = [inside, literal] if literal.name == str(literal) or self.ctx.compat else [literal, inside]
        path = next((p for p in order if p.exists()), None)
        if path is None:
            return None
        step = parse_step(path.name) or parse_step(path.parent.name) or 0
        if path.is_dir():
            return inspect_folder(path, step)
        return inspect_file(path, step) if path.suffix == ".safetensors" else Entry(step, path, Kind.LORA_FILE)

    def _nothing(self, asked: str, entries: list[Entry], strays: list[str]) -> None:
        there = [entry.describe() for entry in entries] + [f"{name} (not a checkpoint name)" for name in strays]
        text = (f"--resume_from_checkpoint {asked}: no resumable state in {self.manager.output_dir}. There is: "
                f"{', '.join(there) or 'nothing'}.")
        if self.ctx.compat:
            logger.warning("%s Starting from the beginning.", text)
            return None
        exports = [entry.path.name for entry in entries if entry.kind in (Kind.LORA_FILE, Kind.WEIGHTS)]
        if exports:
            text += (f" These hold weights only: optimizer, schedule, data position and random streams are missing. "
                     f"--resume_from_checkpoint {exports[-1]} starts from those weights with a new optimizer;")
        text += " --save_state makes LoRA runs save states that can be resumed."
        raise ValueError(text)

    # ------------------------------------------------------------------------------------------------------- resuming

    def resume(self, asked: str) -> ResumePoint | None:
        entry = self.find(asked)
        if entry is None:
            return None
        self._restored = _Restored()
        point = self._resume_state(entry) if entry.kind is Kind.STATE else self._warm_start(entry)
        for note in point.notes:
            logger.warning("Resume: %s", note)
        total = getattr(self.args, "max_train_steps", None)
        if total and point.step >= total:
            logger.warning("The checkpoint is at step %d and --max_train_steps is %d: nothing is left to train.",
                           point.step, total)
        if entry.kind is Kind.STATE and entry.path == self.manager.output_dir / f"checkpoint-{point.step}":
            self.manager.last_saved = (point.step, entry.path)
        self.manager.first_epoch = point.epoch
        logger.info("Resumed (%s) from %s at step %d, epoch %d.", point.kind, point.source, point.step, point.epoch)
        return point

    def check(self, asked: str) -> None:
        """Raise what the files alone can tell, before anything is loaded: nothing there, or other settings."""
        entry = self.find(asked)
        if entry is not None and entry.kind is Kind.STATE:
            self._check_settings(entry, io.read_marker(entry.path) or {})

    def restore_rng(self) -> None:
        """Set the random streams to the resumed state, once more."""
        if self._restored.rng is not None:
            self.ctx.rng.restore(dict(self._restored.rng))
        elif self._restored.global_rng is not None:
            restore_accelerate_rng(self._restored.global_rng)

    def _epoch_of(self, step: int) -> int:
        per_epoch = getattr(self.manager.loader, "steps_per_epoch", 0)
        return step * self.args.gradient_accumulation_steps // per_epoch if per_epoch else 0

    def _warm_start(self, entry: Entry) -> ResumePoint:
        for position, player in enumerate(self.manager.players):
            source = entry.path
            if position:
                source = (entry.path / player.name if entry.path.is_dir()
                          else entry.path.with_name(f"{entry.path.stem}-{player.name}.safetensors"))
                if not source.exists():
                    raise ValueError(f"Warm start from {entry.path.name}: {source.name} of the player '{player.name}' "
                                     "is not beside it.")
            report = player.trainable.load(player, source)
            logger.info("%s: loaded %s", player.name, report)
            if player.ema is not None:
                player.ema.reset()
            if player.lr_scheduler is not None:
                set_schedule_position(player.lr_scheduler, step=entry.step)
        note = (f"warm start from the weights in {entry.path.name}, counted as step {entry.step}: the optimizer is "
                "new, data order and random streams start afresh")
        return ResumePoint(entry.step, self._epoch_of(entry.step), entry.path, "warm", (note,))

    # ----------------------------------------------------------------------------------------------------- full states

    def _resume_state(self, entry: Entry) -> ResumePoint:
        marker = io.read_marker(entry.path) or {}
        changes = self._check_settings(entry, marker)
        step = int(marker.get("step", entry.step))
        if self.manager.sharded:
            self.ctx.accelerator.load_state(str(entry.path))
        world = int(marker.get("world", 0)) or max(1, len(list(entry.path.glob("random_states_*.pkl"))))
        for position, player in enumerate(self.manager.players):
            folder = entry.path / player.name if position else entry.path
            saved = (marker.get("players") or {}).get(player.name, {})
            if not self.manager.sharded:
                self._load_player(player, folder, saved, changes)
            self._load_schedule(player, folder, changes, world=world, step=step)
        if self.manager.scaler is not None:
            if (entry.path / "scaler.pt").is_file():
                self.manager.scaler.load_state_dict(io.read_torch(entry.path / "scaler.pt"))
            else:
                self._note("no loss scale is saved: the fp16 scaler starts at its initial scale")
        epoch = self._load_rank(entry, marker, step)
        self.restore_rng()
        kind = "exact" if marker and not self._restored.notes else ("upstream" if not marker else "partial")
        return ResumePoint(step, epoch, entry.path, kind, tuple(self._restored.notes))

    def _note(self, text: str) -> None:
        self._restored.notes.append(text)

    def _check_settings(self, entry: Entry, marker: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        current = run_settings(self.args, script=self.ctx.spec.id, world=self.ctx.world)
        changes = changed_settings(marker.get("settings") or {}, current)
        if not changes:
            return {}
        text = describe_changes(changes)
        if not (getattr(self.args, "allow_resume_changes", False) or self.ctx.compat):
            raise ValueError(f"{entry.path.name} was saved by a run with other settings: {text}. Give the saved "
                             "values, or --allow_resume_changes to go on with the new ones.")
        self._note(f"settings differ from the saved run: {text}")
        return changes

    def _allowed(self) -> bool:
        return bool(getattr(self.args, "allow_resume_changes", False))

    def _load_player(self, player: Player, folder: Path, saved: Mapping[str, Any],
                     changes: Mapping[str, tuple[Any, Any]]) -> None:
        names, saved_names = group_names(player), saved.get("parameters")
        if saved_names is not None and not self._allowed():
            difference = name_difference([n for g in saved_names for n in g], [n for g in names for n in g])
            if difference:
                raise ValueError(f"{folder.name} trained other parameters of {player.name}: {difference}. Use the same "
                                 "--trainable_modules/--target_name, or --allow_resume_changes.")
        player.trainable.load(player, folder)
        if self.ctx.compat and player.trainable.kind == "named":
            _round_to_bf16(player.unwrapped().parameters())
        else:
            self._load_masters(player, folder / MASTER_FILE)
        if player.optimizer is not None:
            path = _first(folder, "optimizer")
            if path is None:
                raise CheckpointError(f"{folder} holds no optimizer.bin.")
            load_optimizer_state(
                player.optimizer, io.read_torch(path), names=names, saved_names=saved_names,
                allow_changes=self._allowed(), keep_hyperparameters=optimizer_changed(changes),
            )
            check_owned(player.optimizer, player.groups)
        self._load_ema(player, folder / EMA_FOLDER, saved)

    def _load_masters(self, player: Player, path: Path) -> None:
        """Trained parameters in the precision they are trained in."""
        if not path.is_file():
            return
        from safetensors import safe_open

        live = live_parameters(player)
        with safe_open(path, framework="pt") as handle, torch.no_grad():
            for name in handle.keys():
                if name in live:
                    live[name].copy_(handle.get_tensor(name))

    def _load_ema(self, player: Player, folder: Path, saved: Mapping[str, Any]) -> None:
        if player.ema is None:
            if folder.is_dir():
                self._note(f"the saved EMA of {player.name} is not continued (no --use_ema)")
            return
        if not folder.is_dir():
            player.ema.reset()
            self._note(f"no EMA of {player.name} is saved: the average starts from the resumed weights")
            return
        player.ema.load_folder(folder, saved_names=None if self._allowed() else saved.get("ema"))
        if self.ctx.compat:
            _round_to_bf16(player.ema.shadow.values())

    def _load_schedule(self, player: Player, folder: Path, changes: Mapping[str, tuple[Any, Any]], *, world: int,
                       step: int) -> None:
        scheduler = player.lr_scheduler
        if scheduler is None:
            return
        path = _first(folder, "scheduler")
        if path is None:
            set_schedule_position(scheduler, step=step)
            return
        own_rates = list(scheduler.base_lrs)
        state = scheduler_from_upstream(io.read_torch(path), world=world)
        if optimizer_changed(changes):
            for group, rate in zip(scheduler.optimizer.param_groups, own_rates, strict=True):
                group["initial_lr"] = rate
            set_schedule_position(scheduler, step=state["last_epoch"])
        else:
            scheduler.load_state_dict(state)

    # ---------------------------------------------------------------------------------- random streams and the loader

    def _load_rank(self, entry: Entry, marker: Mapping[str, Any], step: int) -> int:
        """Restore this rank's part and return the epoch to go on in."""
        rank, folder = self.ctx.rank, entry.path
        path = folder / f"videox_rank_{rank}.json"
        extra = folder / f"videox_extra_{rank}.pt"
        if self.manager.extra_state and extra.is_file():
            states = io.read_torch(extra)
            for name, thing in self.manager.extra_state.items():
                if name in states:
                    thing.load_state_dict(states[name])
        if self.ctx.compat:
            return self._load_as_upstream(folder, step)
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            self._restored.rng = content["rng"]
            if self.manager.loader is not None and content["loader"] is not None:
                self.manager.loader.load_state_dict(content["loader"])
            return int(marker["epoch"])
        if marker:
            self._note(f"the state was saved by {marker.get('world')} processes and has no part for rank {rank}: data "
                       "order and random streams start afresh")
            return int(marker["epoch"])
        self._note("the folder was written by the original trainer: it carries no noise and coin-flip streams, they "
                   "start from the seed")
        epoch, position = self._upstream_position(folder, step)
        self._start_loader(epoch, position)
        self._read_global_streams(folder)
        return epoch

    def _load_as_upstream(self, folder: Path, step: int) -> int:
        """What upstream restores: the epoch, and in full fine-tuning sampler and global streams (Q-24, Q-71)."""
        epoch, position = self._upstream_position(folder, step)
        if all(player.trainable.kind == "named" for player in self.manager.players) or self.manager.sharded:
            self._start_loader(epoch, position)
            self._read_global_streams(folder)
        return epoch

    def _upstream_position(self, folder: Path, step: int) -> tuple[int, int]:
        """Epoch and first row; a loader with workers had fetched further than it had trained."""
        if not (folder / io.SAMPLER_FILE).is_file():
            return self._epoch_of(step), 0
        position, epoch = io.read_sampler_position(folder / io.SAMPLER_FILE)
        ahead = getattr(self.args, "dataloader_num_workers", 0) * self.ctx.world * 2
        return epoch, max(position - ahead, 0)

    def _start_loader(self, epoch: int, position: int) -> None:
        if self.manager.loader is not None:
            self.manager.loader.start_at(epoch, position)

    def _read_global_streams(self, folder: Path) -> None:
        streams = folder / f"random_states_{self.ctx.rank}.pkl"
        if streams.is_file():
            self._restored.global_rng = io.read_torch(streams)
