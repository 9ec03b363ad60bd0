"""Optimizers and learning-rate schedules, and how their state is put back.

A schedule counts optimizer steps: the loop calls ``lr_scheduler.step()`` once after every optimizer step that was
really made, on any number of processes and with any accumulation, so the curve is that of a single process. The
scheduler must therefore not be wrapped by ``accelerate``, which would step it once per process.

Optimizer state is restored by parameter name when the names are known, and in the precision it was saved in:
``torch`` casts restored state to the parameter's type, which would round the fp32 moments that CAME keeps for bf16
parameters.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LambdaLR

    from videox_fun.training.context import ParamGroup

logger = logging.getLogger(__name__)

# Upstream hands CAME these constants; the --adam_* flags belong to the Adam family.
_CAME_BETAS = (0.9, 0.999, 0.9999)
_CAME_EPS = (1e-30, 1e-16)
_FULL_SHAPE_STATE = ("exp_avg", "state1")


def learning_rate_factor(args: argparse.Namespace, *, world: int = 1) -> int:
    """What ``--scale_lr`` multiplies every learning rate by (1 without the flag)."""
    if not args.scale_lr:
        return 1
    return args.gradient_accumulation_steps * args.train_batch_size * world


def _came_class() -> Any:
    try:
        from came_pytorch import CAME
    except ImportError as error:
        raise ValueError("--use_came needs the package came-pytorch: pip install came-pytorch.") from error
    return CAME


def _adamw8bit_class() -> Any:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ValueError("--use_8bit_adam needs the package bitsandbytes: pip install bitsandbytes.") from error
    return AdamW8bit


def build_optimizer(
    args: argparse.Namespace, groups: Sequence[ParamGroup], *, world: int = 1
) -> torch.optim.Optimizer:
    """Make the optimizer that the flags ask for.

    Args:
        args: parsed flags.
        groups: parameters with their learning rates; an empty group is kept, as upstream's files have it.
        world: number of processes, for ``--scale_lr``.
    """
    if args.use_8bit_adam and args.use_came:
        raise ValueError("--use_8bit_adam and --use_came both choose the optimizer; keep one of them.")
    if not any(group.params for group in groups):
        raise ValueError("No parameter is trainable; check --trainable_modules or --target_name.")
    factor = learning_rate_factor(args, world=world)
    rows = [{"params": list(group.params), "lr": group.lr * factor} for group in groups]
    rate = args.learning_rate * factor
    if args.use_came:
        return _came_class()(rows, lr=rate, betas=_CAME_BETAS, eps=_CAME_EPS)
    cls = _adamw8bit_class() if args.use_8bit_adam else torch.optim.AdamW
    fused = {"fused": True} if getattr(args, "fused_optimizer", False) else {}
    return cls(
        rows,
        lr=rate,
        betas=(args.adam_beta1, args.adam_beta2),
        weight_decay=args.adam_weight_decay,
        eps=args.adam_epsilon,
        **fused,
    )


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """PyTorch's optimizer inside the wrappers of accelerate and DeepSpeed, which share its groups."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def build_lr_scheduler(
    args: argparse.Namespace, optimizer: torch.optim.Optimizer, *, total_steps: int
) -> LambdaLR:
    """Make the schedule ``--lr_scheduler`` over ``total_steps`` optimizer steps."""
    from diffusers.optimization import SchedulerType, get_scheduler

    known = [kind.value for kind in SchedulerType if kind is not SchedulerType.PIECEWISE_CONSTANT]
    if args.lr_scheduler not in known:
        raise ValueError(f"--lr_scheduler '{args.lr_scheduler}' is not known; choose one of {', '.join(known)}.")
    return get_scheduler(
        args.lr_scheduler,
        optimizer=innermost(optimizer),
        num_warmup_steps=args.lr_warmup_steps,
        num_training_steps=total_steps,
    )


def set_schedule_position(scheduler: LambdaLR, *, step: int) -> None:
    """Move a schedule to optimizer step ``step`` and write the rates into its optimizer."""
    rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler.last_epoch = step
    scheduler._step_count = step + 1
    scheduler._last_lr = rates
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


# ---------------------------------------------------------------------------------------------------- restoring state


def check_owned(optimizer: torch.optim.Optimizer, groups: Sequence[ParamGroup]) -> None:
    """Raise when the optimizer updates other tensors than the trainable parameters of the model.

    A resumed run whose optimizer holds stale tensors prints ordinary losses while nothing changes.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for group in groups:
        lost = [name for name, p in zip(group.names, group.params, strict=True) if id(p) not in held]
        if lost:
            raise ValueError(f"The optimizer does not hold {len(lost)} trainable parameters, for example '{lost[0]}'.")


def _listed(names: Sequence[str], *, limit: int = 5) -> str:
    shown = ", ".join(names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def name_difference(saved: Sequence[str], current: Sequence[str]) -> str | None:
    """Describe how two sets of names differ, or ``None`` when they are equal."""
    only_saved = sorted(set(saved) - set(current))
    only_current = sorted(set(current) - set(saved))
    parts = []
    if only_saved:
        parts.append(f"only in the saved state: {_listed(only_saved)}")
    if only_current:
        parts.append(f"only in this run: {_listed(only_current)}")
    return "; ".join(parts) or None


def _remap(state: Mapping[str, Any], saved: Sequence[Sequence[str]], current: Sequence[Sequence[str]],
           hyper: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rewrite a state dict to this run's grouping, matching parameters by name."""
    index_of = {}
    for names, group in zip(saved, state["param_groups"], strict=True):
        index_of.update(zip(names, group["params"], strict=True))
    values: dict[int, Any] = {}
    rows = []
    counter = 0
    for position, names in enumerate(current):
        source = state["param_groups"][position] if position < len(saved) else hyper[position]
        indices = list(range(counter, counter + len(names)))
        rows.append({**source, "params": indices})
        counter += len(names)
        for index, name in zip(indices, names, strict=True):
            if name in index_of and index_of[name] in state["state"]:
                values[index] = state["state"][index_of[name]]
    return {"state": values, "param_groups": rows}


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Items of a parameter's state; bitsandbytes nests its quantized tensors one level deeper."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield key, value


def _check_shapes(state: Mapping[str, Any], params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    for index, (param, name) in enumerate(zip(params, names, strict=True)):
        for key, value in _flat(state["state"].get(index, {})):
            if key in _FULL_SHAPE_STATE and tuple(value.shape) != tuple(param.shape):
                raise ValueError(f"Optimizer state of '{name}' has shape {tuple(value.shape)} but the parameter has "
                                 f"shape {tuple(param.shape)}; the saved run had other sizes (rank, modules).")


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    names: Sequence[Sequence[str]],
    saved_names: Sequence[Sequence[str]] | None = None,
    allow_changes: bool = False,
    keep_hyperparameters: bool = False,
) -> None:
    """Restore optimizer state bit for bit.

    Args:
        optimizer: the optimizer of this run, wrapped by accelerate or not.
        state: what its ``state_dict()`` returned when it was saved.
        names: this run's parameter names, one list per group.
        saved_names: the names at saving time; ``None`` when unknown (then order and count must agree).
        allow_changes: restore what both runs share instead of refusing another set of parameters.
        keep_hyperparameters: keep this run's betas, epsilon and weight decay instead of the saved ones.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    hyper = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
    current = [list(group) for group in names]
    if saved_names is not None and [list(group) for group in saved_names] != current:
        difference = name_difference([n for g in saved_names for n in g], [n for g in current for n in g])
        if difference and not allow_changes:
            raise ValueError(f"The trainable parameters differ from the saved run: {difference}. Use its "
                             "--trainable_modules/--target_name, or --allow_resume_changes to keep what both share.")
        state = _remap(state, saved_names, current, hyper)
    counts = [len(group["params"]) for group in state["param_groups"]]
    if counts != [len(group) for group in current]:
        raise ValueError(f"The saved optimizer has parameter groups of {counts} tensors, this run of "
                         f"{[len(group) for group in current]}; the saved run trained other modules.")
    flat_names = [name for group in current for name in group]
    params = [p for group in inner.param_groups for p in group["params"]]
    order = [index for group in state["param_groups"] for index in group["params"]]
    by_position = {"state": {i: state["state"][index] for i, index in enumerate(order) if index in state["state"]}}
    _check_shapes(by_position, params, flat_names)
    inner.load_state_dict(dict(state))
    for position, values in by_position["state"].items():
        live = inner.state[params[position]]
        for key, value in _flat(values):
            if isinstance(value, torch.Tensor) and live[key].dtype != value.dtype:
                live[key] = value.to(live[key].device, copy=True)
    if keep_hyperparameters:
        for group, own in zip(inner.param_groups, hyper, strict=True):
            group.update({key: value for key, value in own.items() if key not in ("lr", "initial_lr")})
