"""Gradient clipping, with the rule for abnormal norms and the guard against non-finite values.

The norm of all gradients is computed once. Its value is read on the host once per optimizer step, together with the
loss when the loop passes it; that one read serves clipping, the finite check and the log. With the abnormal-norm rule
(full fine-tuning, or LoRA when ``--abnormal_norm_clip_start`` is given) the limit falls linearly from
``max_grad_norm * initial_grad_norm_ratio`` to ``max_grad_norm`` over that many steps; afterwards a norm more than five
times the limit is cut to a limit that shrinks with the excess, at most tenfold.

A non-finite step is not applied: in bf16 and fp32 the loop is told to skip it, and three in a row stop the run with
the step and the samples named. In fp16 an overflow is the grad scaler's ordinary business, so the optimizer is called
(the scaler refuses the step and lowers its scale) and only a non-finite loss, or a scale that never recovers, stops.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

_ABNORMAL_RATIO = 5.0
_LARGEST_CUT = 10.0
_SCALER_PATIENCE = 25  # 2**16 halved 25 times is far below 1: no scale can make these gradients finite
_AVERAGE_DECAY = 0.98


class NonFiniteError(RuntimeError):
    """Training stopped because losses or gradients stayed non-finite."""


@dataclass(frozen=True)
class ClipResult:
    """One optimizer step's gradients.

    Attributes:
        norm: global norm before clipping.
        limit: the limit applied, ``inf`` when clipping is off.
        clipped: whether gradients were scaled down.
        abnormal: whether the abnormal-norm rule lowered the limit.
        finite: whether norm and loss are finite.
        skip: the loop must not call ``optimizer.step()`` (nor step the schedule) and must zero the gradients.
        loss: value of the loss that was passed.
        parameter_norms: norms per parameter, only when asked for and the rule of ``--report_model_info`` holds.
    """

    norm: float
    limit: float
    clipped: bool
    abnormal: bool
    finite: bool
    skip: bool
    loss: float | None = None
    parameter_norms: dict[str, float] = field(default_factory=dict)


@dataclass
class ClipStats:
    """Counts for the audit."""

    steps: int = 0
    clipped: int = 0
    abnormal: int = 0
    skipped: int = 0
    largest_norm: float = 0.0
    average_norm: float = 0.0

    def note(self, result: ClipResult) -> None:
        self.steps += 1
        self.clipped += result.clipped
        self.abnormal += result.abnormal
        self.skipped += not result.finite
        if result.finite:
            self.largest_norm = max(self.largest_norm, result.norm)
            weight = _AVERAGE_DECAY if self.average_norm else 0.0
            self.average_norm = weight * self.average_norm + (1 - weight) * result.norm


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _engine_steps(accelerator: Any) -> bool:
    """Whether the optimizer step is made inside ``accelerator.backward`` (DeepSpeed), where it cannot be skipped."""
    return getattr(getattr(accelerator, "distributed_type", None), "value", "") == "DEEPSPEED"


class GradientClipper:
    """Clips the gradients of one player and watches that they stay finite.

    Args:
        args: parsed flags; ``abnormal_norm_clip_start`` absent or ``None`` turns the abnormal-norm rule off.
        sharded: DeepSpeed or FSDP holds the gradients; clipping then is the plain rule, done by accelerate.
        patience: consecutive non-finite steps that stop the run.
    """

    def __init__(self, args: argparse.Namespace, *, sharded: bool = False, patience: int = 3) -> None:
        self.max_norm = float(args.max_grad_norm)
        self.start: int | None = None if sharded else getattr(args, "abnormal_norm_clip_start", None)
        self.ratio = float(getattr(args, "initial_grad_norm_ratio", None) or 1)
        self.sharded = sharded
        self.patience = patience
        self.stats = ClipStats()
        self._bad = 0
        self._overflows = 0

    def limit_at(self, step: int) -> float:
        """The limit before looking at the gradients; ``step`` is the global step before it is incremented."""
        if self.max_norm <= 0:
            return math.inf
        if self.start is None or step >= self.start:
            return self.max_norm
        first = self.max_norm * self.ratio
        return first + (self.max_norm - first) / self.start * max(step, 0)

    def _limit(self, step: int, norm: float) -> tuple[float, bool]:
        limit = self.limit_at(step)
        if self.start is None or step <= self.start or not math.isfinite(limit):
            return limit, False
        excess = norm / limit
        if not excess > _ABNORMAL_RATIO:
            return limit, False
        return limit / min(excess, _LARGEST_CUT), True

    def clip(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        step: int,
        loss: torch.Tensor | None = None,
        samples: Sequence[Any] = (),
        accelerator: Accelerator | None = None,
        optimizer: Any = None,
        names: Sequence[str] | None = None,
    ) -> ClipResult:
        """Clip in place, on steps where gradients are synchronized.

        Args:
            parameters: those whose gradients count.
            step: global step before it is incremented.
            loss: this step's loss, equal on all ranks (the decision to skip must be).
            samples: what the step was computed from (row numbers, file names), named when it fails.
            accelerator: given when fp16 gradients may need unscaling, and in sharded runs.
            optimizer: whose gradients to unscale.
            names: names of ``parameters``, to get norms per parameter (``--report_model_info``).

        Raises:
            NonFiniteError: too many non-finite steps in a row.
        """
        params = list(parameters)
        scaler = getattr(accelerator, "scaler", None)
        scaled = scaler is not None and scaler.is_enabled()
        if self.sharded:
            norm = accelerator.clip_grad_norm_(params, self.max_norm) if accelerator is not None else None
        else:
            if scaled:
                accelerator.unscale_gradients(optimizer)
            norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        value, loss_value = self._read(norm, loss)
        limit, abnormal = (self.max_norm, False) if self.sharded else self._limit(step, value)
        report = names is not None and self.start is not None and value > 1 and step > self.start
        per_parameter = _parameter_norms(params, names) if report and names is not None else {}
        finite = math.isfinite(value) and (loss_value is None or math.isfinite(loss_value))
        if not self.sharded and finite and math.isfinite(limit):
            torch.nn.utils.clip_grads_with_norm_(params, limit, norm)
        result = ClipResult(
            norm=value, limit=limit, clipped=finite and value > limit, abnormal=finite and abnormal, finite=finite,
            skip=not finite and not scaled and not _engine_steps(accelerator), loss=loss_value,
            parameter_norms=per_parameter,
        )
        self.stats.note(result)
        self._guard(result, step=step, samples=samples, scaled=scaled)
        return result

    @staticmethod
    def _read(norm: Any, loss: torch.Tensor | None) -> tuple[float, float | None]:
        """Both values in one transfer."""
        if not isinstance(norm, torch.Tensor):
            return (0.0 if norm is None else float(norm)), (None if loss is None else float(loss))
        norm = _local(norm.detach()).float()
        if loss is None:
            return float(norm), None
        # The loss is summed over micro-steps in its own precision; float64 keeps the printed value that of the tensor.
        pair = torch.stack([norm.double(), loss.detach().to(norm.device).double().reshape(())])
        value, loss_value = pair.tolist()
        return value, loss_value

    def _guard(self, result: ClipResult, *, step: int, samples: Sequence[Any], scaled: bool) -> None:
        if result.finite:
            self._bad = self._overflows = 0
            return
        what = "loss" if result.loss is not None and not math.isfinite(result.loss) else "gradient norm"
        number = result.loss if what == "loss" else result.norm
        where = f"step {step + 1}" + (f", samples {', '.join(map(str, samples))}" if len(samples) else "")
        overflow = scaled and what != "loss"
        if overflow:
            self._overflows += 1
            logger.warning("fp16 overflow at %s: the step is skipped and the loss scale lowered.", where)
        else:
            self._bad += 1
            logger.error("Non-finite %s (%s) at %s: this optimizer step is not applied (%d in a row).",
                         what, number, where, self._bad)
        if self._bad >= self.patience or self._overflows >= _SCALER_PATIENCE:
            count = self._overflows if overflow else self._bad
            raise NonFiniteError(
                f"Stopped: the {what} was non-finite {count} optimizer steps in a row, last at {where}. The weights "
                "are those of the last finite step. Look at these samples, lower --learning_rate, or use "
                "--mixed_precision bf16 or no."
            )


def _parameter_norms(params: Sequence[torch.nn.Parameter], names: Sequence[str]) -> dict[str, float]:
    rows = [(n, p.grad) for n, p in zip(names, params, strict=True) if p.grad is not None]
    if not rows:
        return {}
    values = torch.stack([torch.linalg.vector_norm(_local(grad).float()) for _, grad in rows]).tolist()
    return dict(zip((name for name, _ in rows), values, strict=True))
