"""The loop. There is one, for every script.

``setup`` runs in the order of cost and of dependence: what can be refused without weights first, then weights, patches,
adapters, sharding, loader, resume. ``run`` iterates micro-steps: the objective encodes a batch once, its phases give
losses, and each player whose gradients are complete is clipped and stepped. The host reads one pair of numbers per
optimizer step (gradient norm and loss); nothing else waits for the device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch

from optim_patches.audit import clock
from optim_patches.base import Stage, Target
from videox_fun.data.bad_rows import DataError
from videox_fun.recipes.base import Recipe
from videox_fun.training import activation, batches, launch, meters, planning
from videox_fun.training.checkpoint import CheckpointManager
from videox_fun.training.clipping import ClipResult, GradientClipper
from videox_fun.training.context import Components, Player, RunContext
from videox_fun.training.ema import EMA
from videox_fun.training.held_out import build_held_out
from videox_fun.training.objectives import OBJECTIVES, LossOutput, Phase
from videox_fun.training.optimizers import build_lr_scheduler, build_optimizer
from videox_fun.training.precision import LossScaling
from videox_fun.training.sanity import dump_first_batch
from videox_fun.training.signals import SignalSaver
from videox_fun.training.tracking import RunLogger
from videox_fun.training.validation import Validator

logger = logging.getLogger(__name__)


@dataclass
class Accumulated:
    """Loss and samples of the micro-steps since a player's last update."""

    loss: torch.Tensor | None = None
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    samples: list[Any] = field(default_factory=list)

    def add(self, output: LossOutput, *, share: float, samples: list[Any]) -> None:
        loss = output.loss.detach().float() * share
        self.loss = loss if self.loss is None else self.loss + loss
        for name, value in output.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value * share
        self.samples += samples


@final
class Trainer:
    """Runs one training script."""

    def __init__(self, ctx: RunContext, recipe: Recipe) -> None:
        self.ctx = ctx
        self.recipe = recipe
        self.args = ctx.args
        self.sharding = launch.sharding_stage(ctx.accelerator)
        facts = {"weight_dtype": ctx.weight_dtype, "sharding": self.sharding}
        self.target = Target(args=ctx.args, device=ctx.device.type, extras=facts)

    # ---- setup ----------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Everything up to the first step. Raises ``ValueError`` for what the user can mend."""
        ctx = self.ctx
        self.recipe.check(ctx)
        self.target.extras["denoiser_config"] = self.recipe.denoiser_config(ctx)
        ctx.patches.preflight(self.target)
        launch.join_sequence_groups(ctx)
        if self.args.resume_from_checkpoint:
            CheckpointManager(ctx, players=()).check(self.args.resume_from_checkpoint)
        self.data = self.recipe.data(ctx)
        if self.data is not None and ctx.is_main:
            summary = self.data.summary()
            self.target.extras["data_summary"] = summary
            for line in summary.lines():
                logger.info("%s", line)
        planning.before_weights(ctx, self.data, self.target.extras["denoiser_config"])
        self.held_out = build_held_out(ctx, self.recipe)
        with ctx.patches.loading(self.target):
            self.components: Components = self.recipe.load(ctx)
        ctx.rng.separate()
        self.target.models.update({"transformer": self.components.denoiser, **self.components.frozen()})
        self._attach()
        self._prepare()
        self._make_loader()
        self._make_services()
        self._resume()

    def _attach(self) -> None:
        """Adapters and trainable parameters, with the patches that belong before and after them."""
        ctx, patches = self.ctx, self.ctx.patches
        patches.run_stage(Stage.POST_LOAD, self.target)
        patches.run_stage(Stage.PRE_ADAPTER, self.target)
        self.objective = OBJECTIVES[ctx.spec.objective](ctx, self.recipe, self.components)
        self.players: list[Player] = self.objective.players()
        for player in self.players:
            player.groups = player.trainable.attach(ctx, player)
            if getattr(self.args, "init_lora_path", None):
                report = player.trainable.load(player, Path(self.args.init_lora_path))
                logger.info("%s starts from %s: %s", player.name, self.args.init_lora_path, report)
            player.model.train()
        patches.run_stage(Stage.POST_ADAPTER, self.target)
        for player in self.players:
            activation.enable(player.model, self.args)
        types = {p.dtype for player in self.players for p in player.parameters()}
        ctx.autocast_enabled = ctx.weight_dtype != torch.float32 and types != {ctx.weight_dtype}
        patches.run_stage(Stage.PRE_SHARD, self.target)

    def _prepare(self) -> None:
        """Devices, optimizers and wrappers."""
        ctx = self.ctx
        ctx.residency.place(*self.components.frozen().values())
        self.clippers: dict[str, GradientClipper] = {}
        for player in self.players:
            if self.sharding == 0 or ctx.accelerator.distributed_type.value != "FSDP":
                player.model.to(ctx.device)
            if self.args.use_ema and ctx.spec.trainable == "named":
                player.ema = EMA(player.model.named_parameters(), dtype=None if ctx.compat else torch.float32)
            player.optimizer = build_optimizer(self.args, player.groups, world=ctx.layout.data_world)
            if self._managed():
                player.model, player.optimizer = ctx.accelerator.prepare(player.model, player.optimizer)
            else:
                player.model = ctx.accelerator.prepare_model(player.model)
            self.clippers[player.name] = GradientClipper(self.args, sharded=self._managed())
            self.target.models[player.name] = player.model
            self.target.optimizers.append(player.optimizer)
        self.scaling = LossScaling(ctx, enabled=ctx.weight_dtype == torch.float16 and not self._managed())
        ctx.patches.run_stage(Stage.POST_SHARD, self.target)

    def _managed(self) -> bool:
        """Whether DeepSpeed or FSDP owns the optimizer step."""
        return self.ctx.accelerator.distributed_type.value in ("DEEPSPEED", "FSDP")

    def _make_loader(self) -> None:
        ctx, args = self.ctx, self.args
        self.loader = self.objective.loader(self.data)
        self.target.loader = self.loader
        ctx.patches.run_stage(Stage.LOADER, self.target)
        per_epoch = max(1, math.ceil(self.loader.steps_per_epoch / args.gradient_accumulation_steps))
        self.total_steps = args.max_train_steps or args.num_train_epochs * per_epoch
        for player in self.players:
            player.lr_scheduler = build_lr_scheduler(args, player.optimizer, total_steps=self.total_steps)
        ctx.patches.run_stage(Stage.STEP, self.target)

    def _make_services(self) -> None:
        ctx = self.ctx
        self.meter = meters.RunMeter(self.args, self.players, self.loader)
        self.signals = SignalSaver()
        self.checkpoints = CheckpointManager(
            ctx, players=self.players, loader=self.loader, scaler=self.scaling.scaler
        )
        self.validator = Validator(
            ctx, self.recipe, self.components, self.players, objective=self.objective, held_out=self.held_out
        )
        self.clock = meters.start_clock(ctx, self.target)
        self.audit = meters.start_audit(ctx, self.target)

    def _resume(self) -> None:
        point = None
        if self.args.resume_from_checkpoint:
            point = self.checkpoints.resume(self.args.resume_from_checkpoint)
        if point is not None:
            self.ctx.global_step, self.ctx.epoch = point.step, point.epoch
        self.first_step = self.ctx.global_step
        warm = point is not None and point.kind == "warm"
        self.run_logger = RunLogger(self.ctx, total_steps=self.total_steps, start_step=self.first_step, warm=warm)
        if self.ctx.is_main:
            self._announce()

    def _announce(self) -> None:
        args, ctx = self.args, self.ctx
        total_batch = args.train_batch_size * ctx.layout.data_world * args.gradient_accumulation_steps
        logger.info("***** Running training *****")
        if self.data is not None:
            logger.info("  Num examples = %d", len(self.data.dataset))
        logger.info("  Instantaneous batch size per device = %d", args.train_batch_size)
        logger.info("  Total train batch size (w. parallel, distributed & accumulation) = %d", total_batch)
        logger.info("  Gradient Accumulation steps = %d", args.gradient_accumulation_steps)
        logger.info("  Total optimization steps = %d", self.total_steps)

    # ---- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Train to the end. Returns the exit code: 0, or the documented code after a signal's save."""
        try:
            with self.signals:
                self._train()
            return self._close()
        finally:
            close = getattr(self.loader, "close", None)
            if close is not None:
                close()

    def _train(self) -> None:
        self.run_logger.start(vars(self.args))
        self.checkpoints.restore_rng()
        self.validator.start(self.run_logger)
        self.meter.restart_clock()
        micro = 0
        self.clock.switch(clock.DATA)
        for batch, is_last in self._batches():
            self.clock.switch(clock.OTHER)
            micro += 1
            sync = micro % self.args.gradient_accumulation_steps == 0 or is_last
            self._micro_step(batch, sync=sync)
            self.meter.micro_step(self.loader.wait_s)
            if sync:
                micro = 0
                if self._after_step():
                    break
            self.clock.switch(clock.DATA)

    def _batches(self) -> Iterator[tuple[dict, bool]]:
        """Batches of all epochs, until the loop stops asking."""
        empty = 0
        if self.ctx.global_step >= self.total_steps:
            return
        while True:
            found = False
            for batch, is_last in self.loader.epoch(self.ctx.epoch):
                found = True
                yield batch, is_last
            empty = 0 if found else empty + 1
            if empty > self.args.train_batch_size:  # leftovers fill a bucket at least this fast
                raise DataError(
                    f"{empty} epochs in a row gave no batch: the buckets do not fill up to --train_batch_size "
                    f"{self.args.train_batch_size} (lower it, or add rows), or no file can be read any more."
                )
            self.ctx.epoch += 1
            with self.clock.span(clock.VALIDATION):
                self.validator.after_epoch(self.ctx.epoch - 1)
            self.meter.restart_clock()

    def _micro_step(self, batch: dict, *, sync: bool) -> None:
        if self.ctx.global_step == self.first_step and not self.meter.micro_steps and "pixel_values" in batch:
            dump_first_batch(self.ctx, batch)
        options, before = getattr(self.data, "options", None), len(batch.get("text", ()))
        batch = batches.reshape(
            self.ctx, batch, temporal_ratio=getattr(options, "temporal_ratio", 4), tile=self.sharding != 3
        )
        self.meter.saw_batch(batch, tiles=len(batch.get("text", ())) // max(before, 1))
        with self.clock.span(clock.PREPARE):
            prepared = self.objective.prepare(batch)
        self.meter.saw(prepared)
        for phase in self.objective.phases(self.ctx.global_step):
            self._run_phase(phase, prepared, batch, sync=sync)

    def _run_phase(self, phase: Phase, prepared: Any, batch: dict, *, sync: bool) -> None:
        player, accelerator = phase.player, self.ctx.accelerator
        accelerator.gradient_state._set_sync_gradients(sync)
        context = nullcontext() if sync or self._managed() else accelerator.no_sync(player.model)
        pending = self.meter.pending.setdefault(player.name, Accumulated())
        with context:
            with self.clock.span(clock.FORWARD):
                output = phase.compute(prepared)
            self.meter.saw_output(output)
            pending.add(output, share=1 / self.args.gradient_accumulation_steps, samples=list(batch.get("idx", ())))
            with self.clock.span(clock.BACKWARD):
                accelerator.backward(self.scaling.scale(output.loss))
        if sync:
            with self.clock.span(clock.OPTIMIZER):
                self._update(player, output.loss_name)

    def _update(self, player: Player, loss_name: str) -> None:
        """Clip, step, schedule, forget the gradients, and put the numbers on the meter."""
        ctx, pending = self.ctx, self.meter.pending.pop(player.name)
        loss = ctx.accelerator.reduce(pending.loss, reduction="mean")
        parameters = player.trainable.clip_parameters(player)
        result = self.clippers[player.name].clip(
            parameters, step=ctx.global_step, loss=loss, samples=pending.samples, optimizer=player.optimizer,
            accelerator=ctx.accelerator if self._managed() else self.scaling,
            names=self._parameter_names(player, parameters),
        )
        stepped = self._step_optimizer(player, result)
        if stepped:
            player.lr_scheduler.step()
        player.optimizer.zero_grad(set_to_none=True)
        if player.ema is not None and stepped:
            player.ema.step()
        self.meter.updated(player, loss_name, result, pending.metrics, stepped=stepped)
        if getattr(self.args, "report_model_info", False) and not self._managed():
            self.run_logger.log_model_info(result, ctx.global_step)

    def _parameter_names(self, player: Player, parameters: list[torch.nn.Parameter]) -> list[str] | None:
        """Names in the order of ``parameters``, where ``--report_model_info`` wants norms per parameter."""
        if not getattr(self.args, "report_model_info", False) or not self.ctx.is_main or self._managed():
            return None
        names = {id(p): name for group in player.groups
                 for name, p in zip(group.names, group.params, strict=True)}
        return [names[id(parameter)] for parameter in parameters]

    def _step_optimizer(self, player: Player, result: ClipResult) -> bool:
        """Whether the weights moved."""
        if result.skip:
            return False
        if self._managed():
            player.optimizer.step()
            return not getattr(player.optimizer, "step_was_skipped", False)
        return self.scaling.step(player.optimizer)

    def _after_step(self) -> bool:
        """Everything that follows an optimizer step. Returns whether the run ends here."""
        ctx, args = self.ctx, self.args
        ctx.global_step += 1
        step = ctx.global_step
        self.run_logger.log(self.meter.values(), step)
        if self.audit is not None and step - self.first_step == self._audit_step():
            with self.clock.span(clock.AUDIT):
                self.run_logger.track(self.audit.report(self.target, self._facts()).scalars(), step)
        stop = self.signals.agreed(world=ctx.world, device=ctx.device)
        if stop or step % args.checkpointing_steps == 0:
            with self.clock.span(clock.SAVING):
                saved = self.checkpoints.save(step, force_state=stop)
            self.run_logger.note("checkpoint", step, path=str(saved))
        if not stop:
            with self.clock.span(clock.VALIDATION):
                self.validator.after_step(step)
        self.meter.restart_clock()
        return stop or step >= self.total_steps

    def _facts(self) -> dict[str, Any]:
        return self.meter.facts(self.ctx, self.clippers, total_steps=self.total_steps, phases=self.clock.read())

    def _audit_step(self) -> int:
        return min(self.args.audit_after_steps, self.total_steps - self.first_step)

    def _look_back(self) -> list[Path]:
        """The audit's last word, to its files, the trackers and the event file."""
        if self.audit is None:
            return []
        report = self.audit.finish(self.target, self._facts())
        scalars = report.scalars()
        self.run_logger.track(scalars, self.ctx.global_step)
        self.run_logger.note("summary", self.ctx.global_step, **scalars)
        return report.files

    def _close(self) -> int:
        ctx = self.ctx
        self.clock.stop()
        ctx.accelerator.wait_for_everyone()
        if ctx.cache is not None:
            logger.info("%s", ctx.cache.report())
        if not self.signals.requested:
            self.validator.finish()
            saved = self.checkpoints.final(ctx.global_step)
            if ctx.is_main:
                logger.info("written: %s", saved)
        try:
            written = self._look_back()
        finally:
            paths = self.run_logger.finish()
        for path in paths + written:
            logger.info("written: %s", path)
        try:
            ctx.accelerator.end_training()
        except Exception as error:  # a tracker that cannot say goodbye must not make a finished run look failed
            logger.warning("A tracker did not close (%s); the checkpoints are written.", error)
        return self.signals.exit_code
