"""Skipping work while sampling: TeaCache and guidance skipping.

TeaCache watches how much the time modulation changes from step to step. A polynomial fitted per model turns that into
an estimate of how much the output changes; while the estimates since the last computed step stay below a threshold, the
blocks are not run and their last residual is added instead. The decision is made on the prompt half of the guided batch
and holds for the other half of the same step.

Guidance skipping leaves out the unguided half in the last share of the steps, where guidance changes little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

# Fits published with TeaCache for Wan 2.1, for the time projection as the signal.
_COEFFICIENTS: dict[str, tuple[float, ...]] = {
    "1.3b": (-5.21862437e04, 9.23041404e03, -5.28275948e02, 1.36987616e01, -4.99875664e-02),
    "t2v-14b": (-3.03318725e05, 4.90537029e04, -2.65530556e03, 5.87365115e01, -3.15583525e-01),
    "i2v-480p": (2.57151496e05, -3.54229917e04, 1.40286849e03, -1.35890334e01, 1.32517977e-01),
    "i2v-720p": (8.10705460e03, 2.13393892e03, -3.72934672e02, 1.66203073e01, -4.17769401e-02),
}


def get_teacache_coefficients(model_name: str) -> list[float] | None:
    """Polynomial for a model, judged by its folder's name; ``None`` when no fit is known."""
    name = model_name.lower()
    if "wan" not in name:
        return None
    if "1.3b" in name or "5b" in name:
        return list(_COEFFICIENTS["1.3b"])
    if "t2v" in name:
        return list(_COEFFICIENTS["t2v-14b"])
    if "14b" in name or "i2v" in name:
        return list(_COEFFICIENTS["i2v-480p" if "480p" in name else "i2v-720p"])
    return None


class TeaCache:
    """Decides per step whether the blocks run, and keeps their residuals.

    Args:
        coefficients: polynomial, highest power first.
        num_steps: denoising steps of a run; afterwards the cache starts again.
        rel_l1_thresh: accumulated estimate above which a step is computed.
        num_skip_start_steps: first steps, always computed.
        offload: keep residuals on the host.
        reset_before_second_half: upstream starts again after the prompt half of the last step, so that the other half
            is always computed there.
    """

    def __init__(
        self, coefficients: Sequence[float], num_steps: int, rel_l1_thresh: float = 0.0,
        num_skip_start_steps: int = 0, offload: bool = True, *, reset_before_second_half: bool = False,
    ) -> None:
        if num_steps < 1:
            raise ValueError(f"num_steps must be positive, not {num_steps}.")
        if not 0 <= num_skip_start_steps <= num_steps:
            raise ValueError(f"num_skip_start_steps must lie between 0 and num_steps, not {num_skip_start_steps}.")
        self.num_steps = num_steps
        self.rel_l1_thresh = rel_l1_thresh
        self.num_skip_start_steps = num_skip_start_steps
        self.offload = offload
        self.reset_before_second_half = reset_before_second_half
        self.rescale = np.poly1d(list(coefficients))
        self.computed = self.skipped = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything about the run."""
        self.step = 0
        self.distance = 0.0
        self.compute = True
        self.previous: Tensor | None = None
        self.residuals: dict[bool, Tensor] = {}

    def _decide(self, signal: Tensor) -> None:
        if self.step < self.num_skip_start_steps or self.previous is None:
            self.compute, self.distance = True, 0.0
        else:
            change = (signal - self.previous).abs().mean() / self.previous.abs().mean()
            self.distance += float(self.rescale(change.item()))
            self.compute = self.distance >= self.rel_l1_thresh
            if self.compute:
                self.distance = 0.0
        self.previous = signal

    def run(
        self, tokens: Tensor, signal: Tensor, blocks: Callable[[], Tensor], *, prompted: bool,
        must_compute: bool = False,
    ) -> Tensor:
        """Tokens after the blocks, computed or estimated.

        Args:
            tokens: before the blocks.
            signal: time modulation of this step.
            blocks: runs them.
            prompted: whether this is the half that decides.
            must_compute: run the blocks in any case, because a gradient is to flow through them.
        """
        if prompted:
            if self.step == self.num_steps:
                self.reset()
            self._decide(signal.detach())
            self.step += 1
            if must_compute:
                self.compute, self.distance = True, 0.0
        last = prompted and self.step == self.num_steps
        if self.compute or must_compute or prompted not in self.residuals:
            result = blocks()
            residual = result.detach() - tokens.detach()
            self.residuals[prompted] = residual.cpu() if self.offload else residual
            self.computed += 1
        else:
            result = tokens + self.residuals[prompted].to(tokens.device, non_blocking=True)
            self.skipped += 1
        if last and self.reset_before_second_half:
            self.reset()
        return result


class CachedSampling:
    """Mixin of a denoiser: the switches of TeaCache and guidance skipping."""

    teacache: TeaCache | None = None
    cfg_skip_ratio: float | None = None
    current_steps: int = 0
    num_inference_steps: int | None = None

    def enable_teacache(
        self, coefficients: Sequence[float], num_steps: int, rel_l1_thresh: float, num_skip_start_steps: int = 0,
        offload: bool = True, *, upstream_compat: bool = False,
    ) -> None:
        """Turn TeaCache on for runs of ``num_steps`` steps."""
        self.teacache = TeaCache(coefficients, num_steps, rel_l1_thresh, num_skip_start_steps, offload,
                                 reset_before_second_half=upstream_compat)

    def share_teacache(self, transformer: CachedSampling) -> None:
        """Use another denoiser's cache (two experts of one run)."""
        self.teacache = transformer.teacache

    def disable_teacache(self) -> None:
        self.teacache = None

    def enable_cfg_skip(self, cfg_skip_ratio: float, num_steps: int) -> None:
        """Leave guidance out of the last ``cfg_skip_ratio`` of ``num_steps`` steps; a ratio of 0 turns it off."""
        on = cfg_skip_ratio != 0
        self.cfg_skip_ratio = cfg_skip_ratio if on else None
        self.num_inference_steps = num_steps if on else None
        self.current_steps = 0

    def share_cfg_skip(self, transformer: CachedSampling) -> None:
        self.cfg_skip_ratio = transformer.cfg_skip_ratio
        self.num_inference_steps = transformer.num_inference_steps

    def disable_cfg_skip(self) -> None:
        self.cfg_skip_ratio = self.num_inference_steps = None

    def start_sampling(self) -> None:
        """A new run: step 0, and nothing kept from one that was broken off."""
        self.current_steps = 0
        if self.teacache is not None:
            self.teacache.reset()

    def skips_guidance(self) -> bool:
        """Whether the unguided half is left out in the step ``current_steps``."""
        if self.cfg_skip_ratio is None or self.num_inference_steps is None:
            return False
        return self.current_steps >= self.num_inference_steps * (1 - self.cfg_skip_ratio)

    def cached(self, tokens: Tensor, signal: Tensor, blocks: Callable[[], Tensor], *, prompted: bool) -> Tensor:
        """Run the blocks, through TeaCache when it is on and no gradient is wanted."""
        if self.teacache is None or torch.is_grad_enabled():
            return blocks()
        return self.teacache.run(tokens, signal, blocks, prompted=prompted)
