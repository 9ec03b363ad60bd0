"""Saving and resuming a run.

Two forms, under upstream's names. A *bare* save is the LoRA file ``checkpoint-20.safetensors``. A *state* is the
folder ``checkpoint-20/``: weights, ``optimizer.bin``, ``scheduler.bin``, ``sampler_pos_start.pkl`` and
``random_states_<rank>.pkl`` as upstream would read them, and beside them what an exact continuation needs:
``videox_rank_<rank>.json`` (every random stream, loader position), ``trainable_parameters.safetensors`` when the
weights are saved in a narrower type than they are trained in, and the marker ``videox_state.json``.

With DDP rank 0 writes weights and optimizer and every rank its own streams; DeepSpeed and FSDP write their shards
through accelerate into the same hidden folder. A failure on one rank is told to all, so that none waits for ever.
Restoring is in ``resume.py``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from videox_fun.training import checkpoint_io as io
from videox_fun.training.checkpoint_io import CheckpointError
from videox_fun.training.checkpoint_parts import (
    EMA_FOLDER,
    MASTER_FILE,
    accelerate_rng_state,
    group_names,
    is_sharded,
    live_parameters,
    scheduler_for_upstream,
)
from videox_fun.training.checkpoint_scan import Entry, recover, scan, to_prune
from videox_fun.training.checkpoint_settings import run_settings
from videox_fun.training.ema import CONFIG_NAME, WEIGHTS_NAME
from videox_fun.training.launch import sharding_stage
from videox_fun.training.optimizers import check_owned
from videox_fun.training.resume import ResumePoint, Resumer

if TYPE_CHECKING:
    from videox_fun.training.context import Player, RunContext

logger = logging.getLogger(__name__)

__all__ = ["CheckpointError", "CheckpointManager", "ResumePoint", "Stateful"]


class Stateful(Protocol):
    """Anything else that must survive an interruption."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class CheckpointManager:
    """Writes, prunes, finds and restores the checkpoints of one run.

    Args:
        ctx: the run.
        players: trained networks after ``accelerator.prepare``; the first one's files lie at the top of a state.
        loader: the training loader, or ``None`` for objectives without data.
        scaler: the fp16 gradient scaler, if there is one.
        extra_state: further objects to save and restore, by name.
    """

    def __init__(
        self,
        ctx: RunContext,
        *,
        players: Sequence[Player],
        loader: Any = None,
        scaler: Any = None,
        extra_state: Mapping[str, Stateful] | None = None,
    ) -> None:
        self.ctx = ctx
        self.players = list(players)
        self.loader = loader
        self.scaler = scaler
        self.extra_state = dict(extra_state or {})
        self.output_dir = Path(ctx.args.output_dir)
        self.sharded = is_sharded(ctx.accelerator)
        self.last_saved: tuple[int, Path] | None = None
        self.first_epoch = ctx.epoch
        self._resumer = Resumer(self)
        if not self.sharded:
            for player in self.players:
                if player.optimizer is not None:
                    check_owned(player.optimizer, player.groups)
        if ctx.is_main:
            recover(self.output_dir)

    # ------------------------------------------------------------------------------------------------------- restoring

    @property
    def player_names(self) -> list[str]:
        return [player.name for player in self.players]

    def find(self, resume_from_checkpoint: str) -> Entry | None:
        """What ``--resume_from_checkpoint`` means here; ``None`` when the run starts from the beginning."""
        return self._resumer.find(resume_from_checkpoint)

    def check(self, resume_from_checkpoint: str) -> None:
        """Raise what :meth:`resume` would raise of what the files alone can tell; needs no players."""
        self._resumer.check(resume_from_checkpoint)

    def resume(self, resume_from_checkpoint: str) -> ResumePoint | None:
        """Restore the run and say where it goes on; ``None`` when it starts from the beginning."""
        return self._resumer.resume(resume_from_checkpoint)

    def restore_rng(self) -> None:
        """Set all random streams to the resumed state again; call just before the loop, after anything that draws."""
        self._resumer.restore_rng()

    # ---------------------------------------------------------------------------------------------------------- saving

    @property
    def saves_state(self) -> bool:
        """Whether a periodic save is a resumable folder rather than a bare LoRA file."""
        if any(player.trainable.kind == "named" for player in self.players):
            return True
        if self.sharded and sharding_stage(self.ctx.accelerator) == 3:
            return True
        return bool(getattr(self.ctx.args, "save_state", False))

    def save(self, step: int, *, force_state: bool = False) -> Path:
        """Save at optimizer step ``step``; on every rank, after the step and before the next batch is used.

        Args:
            step: number of optimizer steps made.
            force_state: write a resumable folder even where the flags ask for bare files (a signal came).
        """
        return self._save(step, state=force_state or self.saves_state, ema_weights=False)

    def final(self, step: int) -> Path:
        """Save at the end of the run.

        With EMA the saved model holds the averaged weights, as upstream's does; the raw ones are kept beside them, so
        the state still resumes exactly. Without EMA nothing is written when this step was just saved.
        """
        averaged = any(player.ema is not None and player.trainable.kind == "named" for player in self.players)
        if not averaged and self.last_saved is not None and self.last_saved[0] == step:
            return self.last_saved[1]
        return self._save(step, state=self.saves_state, ema_weights=averaged)

    def _save(self, step: int, *, state: bool, ema_weights: bool) -> Path:
        started = time.perf_counter()
        self.output_dir.mkdir(parents=True, exist_ok=True)
        path = self._save_state(step, ema_weights) if state else self._save_bare(step)
        self.last_saved = (step, path)
        if self.ctx.is_main:
            logger.info("Saved %s (%.1f s).", path, time.perf_counter() - started)
            self._prune(step)
        return path

    def _prune(self, step: int) -> None:
        limit = getattr(self.ctx.args, "checkpoints_total_limit", None)
        if limit is None:
            return
        entries = scan(self.output_dir, player_names=self.player_names)
        for path in to_prune(entries, limit=limit, keep_step=step):
            logger.info("Removing %s (--checkpoints_total_limit %d).", path.name, limit)
            io.remove_checkpoint(path)

    # ---------------------------------------------------------------------------------------------- agreement of ranks

    def _share(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self.ctx.world == 1 or not dist.is_initialized():
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _agree(self, error: Exception | None, *, target: Path, temporary: Sequence[Path]) -> None:
        """Meet the other ranks; when one failed, clean up and raise on all."""
        failures = [] if error is None else [(str(error), io.is_write_error(error))]
        if self.ctx.world > 1 and dist.is_initialized():
            heard: list[Any] = [None] * self.ctx.world
            dist.all_gather_object(heard, failures)
            failures = [(f"rank {rank}: {text}", disk) for rank, rows in enumerate(heard) for text, disk in rows]
        if not failures:
            return
        if self.ctx.is_main:
            for path in temporary:
                io.remove(path)
        text, disk = failures[0]
        if disk:
            raise io.explain_write_error(text, target, kept=self._kept()) from error
        if error is not None and not isinstance(error, CheckpointError):
            raise error
        raise CheckpointError(f"Could not save {target.name}: {text}") from error

    def _kept(self) -> str | None:
        """Name of the newest checkpoint that is still there."""
        if self.last_saved is not None and self.last_saved[1].exists():
            return self.last_saved[1].name
        earlier = scan(self.output_dir, player_names=self.player_names)
        return earlier[-1].path.name if earlier else None

    # ------------------------------------------------------------------------------------------------------ bare files

    def _save_bare(self, step: int) -> Path:
        first = self.output_dir / f"checkpoint-{step}.safetensors"
        pairs: list[tuple[Path, Path]] = []
        error: Exception | None = None
        if self.ctx.is_main or self.sharded:
            try:
                for position, player in enumerate(self.players):
                    stem = f"checkpoint-{step}" + (f"-{player.name}" if position else "")
                    files = player.trainable.export(player, layout="bare", dtype=self.ctx.weight_dtype)
                    for file in files if self.ctx.is_main else ():
                        final = self.output_dir / file.name.replace("{stem}", stem)
                        pairs.append((io.hidden_name(final, "tmp"), final))
                        io.write_safetensors(pairs[-1][0], file.tensors, file.metadata)
                for temporary, final in pairs:
                    io.publish(temporary, final)
            except Exception as caught:
                error = caught
        self._agree(error, target=first, temporary=[temporary for temporary, _ in pairs])
        return first

    # --------------------------------------------------------------------------------------------------- state folders

    def _save_state(self, step: int, ema_weights: bool) -> Path:
        final = self.output_dir / f"checkpoint-{step}"
        temporary = io.hidden_name(final, "tmp")
        error: Exception | None = None
        if self.ctx.is_main:
            io.remove(temporary)  # before the others hear the name and begin to write
        temporary = Path(self._share(str(temporary)))
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            if self.sharded:
                self.ctx.accelerator.save_state(str(temporary))
            self._write_players(temporary, ema_weights)
            self._write_rank(temporary)
        except Exception as caught:
            error = caught
        self._agree(error, target=final, temporary=[temporary])
        error = None
        if self.ctx.is_main:
            try:
                self._check_ranks(temporary)
                io.write_marker(temporary, self._marker(step, ema_weights))
                io.publish(temporary, final)
            except Exception as caught:
                error = caught
        self._agree(error, target=final, temporary=[temporary])
        return final

    def _check_ranks(self, folder: Path) -> None:
        lost = [r for r in range(self.ctx.world) if not (folder / f"videox_rank_{r}.json").is_file()]
        if lost:
            raise CheckpointError(f"the files of ranks {lost} are not in {folder.parent}; --output_dir must be a "
                                  "folder that all machines share.")

    def _marker(self, step: int, ema_weights: bool) -> dict[str, Any]:
        ctx = self.ctx
        players = {}
        for player in self.players:
            players[player.name] = {
                "kind": player.trainable.kind,
                "parameters": group_names(player),
                "ema": player.ema.names if player.ema is not None else None,
                "weights": "ema" if ema_weights and player.ema is not None else "raw",
            }
        return {
            "step": step, "epoch": ctx.epoch, "micro_step": 0,
            "world": ctx.world, "sharded": self.sharded, "weight_dtype": str(ctx.weight_dtype).removeprefix("torch."),
            "torch": torch.__version__, "settings": run_settings(ctx.args, script=ctx.spec.id, world=ctx.world),
            "players": players,
        }

    def _write_players(self, folder: Path, ema_weights: bool) -> None:
        for position, player in enumerate(self.players):
            place = folder / player.name if position else folder
            if self.sharded:
                files = player.trainable.export(player, layout="folder", dtype=self.ctx.weight_dtype)
                if self.ctx.is_main:
                    self._write_exports(place, files)
                    self._write_scheduler(place, player)
            elif self.ctx.is_main:
                self._write_player(place, player, ema_weights and player.ema is not None)
        if self.ctx.is_main and self.scaler is not None:
            io.write_torch(folder / "scaler.pt", self.scaler.state_dict())

    @staticmethod
    def _write_exports(place: Path, files: Sequence[Any]) -> None:
        for file in files:
            io.write_safetensors(place / file.name, file.tensors, file.metadata)
            if file.config is not None:
                io.write_json((place / file.name).parent / CONFIG_NAME, file.config)

    def _write_scheduler(self, place: Path, player: Player) -> None:
        if player.lr_scheduler is not None and not (place / "scheduler.bin").exists():
            state = scheduler_for_upstream(player.lr_scheduler.state_dict(), world=self.ctx.world)
            io.write_torch(place / "scheduler.bin", state)

    def _write_player(self, place: Path, player: Player, ema_weights: bool) -> None:
        raw = {name: p.detach() for name, p in live_parameters(player).items()}
        narrowed = any(p.dtype != self.ctx.weight_dtype for p in raw.values())
        if ema_weights and player.ema is not None:
            raw = player.ema.store()
            player.ema.copy_to()
        try:
            files = player.trainable.export(player, layout="folder", dtype=self.ctx.weight_dtype)
            self._write_exports(place, files)
        finally:
            if ema_weights and player.ema is not None:
                player.ema.restore()
        if narrowed or ema_weights:
            io.write_safetensors(place / MASTER_FILE, raw, {"format": "pt"})
        if player.ema is not None:
            model = next((f for f in files if f.name.endswith("/" + WEIGHTS_NAME)), None)
            tensors, config = player.ema.folder_content(model and model.tensors, model and model.config)
            io.write_safetensors(place / EMA_FOLDER / WEIGHTS_NAME, tensors, {"format": "pt"})
            io.write_json(place / EMA_FOLDER / CONFIG_NAME, config)
        if player.optimizer is not None:
            io.write_torch(place / "optimizer.bin", player.optimizer.state_dict())
        self._write_scheduler(place, player)

    def _write_rank(self, folder: Path) -> None:
        ctx = self.ctx
        position, epoch = 0, ctx.epoch
        content: dict[str, Any] = {"rng": ctx.rng.snapshot(), "loader": None}
        if self.loader is not None:
            content["loader"] = self.loader.state_dict()
            position, epoch = self.loader.sampler_position
        if ctx.compat:
            epoch = self.first_epoch  # upstream stores the epoch in which the process started
        io.require_jsonable(content, where="the state of random streams and loader")
        io.write_json(folder / f"videox_rank_{ctx.rank}.json", content, indent=None)
        if not (folder / f"random_states_{ctx.rank}.pkl").exists():
            state = accelerate_rng_state()
            io.write_torch(folder / f"random_states_{ctx.rank}.pkl", state)
        if self.extra_state:
            extra = {name: thing.state_dict() for name, thing in self.extra_state.items()}
            io.write_torch(folder / f"videox_extra_{ctx.rank}.pt", extra)
        if ctx.is_main:
            io.write_sampler_position(folder / io.SAMPLER_FILE, position, epoch)
