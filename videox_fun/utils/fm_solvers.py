"""DPM-Solver++ for flow matching and the helpers of its callers, under upstream's names.

The solver is the one of diffusers with flow sigmas; noise levels are given from outside, already shifted.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import DPMSolverMultistepScheduler
from diffusers.configuration_utils import register_to_config


def shifted(sigmas: np.ndarray, shift: float) -> np.ndarray:
    """Noise levels moved towards noise."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def get_sampling_sigmas(sampling_steps: int, shift: float) -> np.ndarray:
    """Noise levels ``[sampling_steps]`` from 1 downwards, shifted towards noise."""
    return shifted(np.linspace(1, 0, sampling_steps + 1)[:sampling_steps], shift)


def use_levels(scheduler: Any, sigmas: np.ndarray, device: str | torch.device | None) -> None:
    """Replace a scheduler's noise levels. Its times are cut to whole numbers, not rounded."""
    times = (sigmas * scheduler.config.num_train_timesteps).astype(np.int64)
    scheduler.timesteps = torch.from_numpy(times).to(device)
    scheduler.sigmas = torch.cat([torch.from_numpy(sigmas.astype(np.float32)), torch.zeros(1)])


def retrieve_timesteps(
    scheduler: Any, num_inference_steps: int | None = None, device: str | torch.device | None = None,
    timesteps: Sequence[float] | None = None, sigmas: Sequence[float] | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, int]:
    """Set the scheduler's noise levels and return its timesteps and their number.

    Raises:
        ValueError: both or an unsupported one of ``timesteps`` and ``sigmas`` were given.
    """
    if timesteps is not None and sigmas is not None:
        raise ValueError("Give either timesteps or sigmas, not both.")
    given = {"timesteps": timesteps} if timesteps is not None else {"sigmas": sigmas} if sigmas is not None else {}
    accepted = inspect.signature(scheduler.set_timesteps).parameters
    for name in given:
        if name not in accepted:
            raise ValueError(f"{type(scheduler).__name__} takes no {name}; choose another sampler.")
    if not given:
        given = {"num_inference_steps": num_inference_steps}
    scheduler.set_timesteps(device=device, **given, **kwargs)
    return scheduler.timesteps, len(scheduler.timesteps)


class FlowDPMSolverMultistepScheduler(DPMSolverMultistepScheduler):
    """DPM-Solver++ over flow sigmas."""

    @register_to_config
    def __init__(
        self, num_train_timesteps: int = 1000, solver_order: int = 2, prediction_type: str = "flow_prediction",
        shift: float = 1.0, use_dynamic_shifting: bool = False, thresholding: bool = False,
        dynamic_thresholding_ratio: float = 0.995, sample_max_value: float = 1.0,
        algorithm_type: str = "dpmsolver++", solver_type: str = "midpoint", lower_order_final: bool = True,
        euler_at_final: bool = False, final_sigmas_type: str = "zero", lambda_min_clipped: float = -float("inf"),
        variance_type: str | None = None, invert_sigmas: bool = False,
    ) -> None:
        if invert_sigmas:
            raise ValueError("invert_sigmas is not supported by this sampler.")
        super().__init__(
            num_train_timesteps=num_train_timesteps, solver_order=solver_order, prediction_type=prediction_type,
            use_flow_sigmas=True, flow_shift=shift, use_dynamic_shifting=use_dynamic_shifting,
            thresholding=thresholding, dynamic_thresholding_ratio=dynamic_thresholding_ratio,
            sample_max_value=sample_max_value, algorithm_type=algorithm_type, solver_type=solver_type,
            lower_order_final=lower_order_final, euler_at_final=euler_at_final,
            final_sigmas_type=final_sigmas_type, lambda_min_clipped=lambda_min_clipped, variance_type=variance_type,
        )

    def set_timesteps(
        self, num_inference_steps: int | None = None, device: str | torch.device | None = None,
        sigmas: Sequence[float] | None = None, mu: float | None = None, shift: float | None = None,
    ) -> None:
        """Choose the noise levels of a run: given (``sigmas``, decreasing) or spread evenly and shifted."""
        if shift is not None:
            self.register_to_config(flow_shift=shift)
        count = num_inference_steps if sigmas is None else len(sigmas)
        super().set_timesteps(count, device=device, mu=mu if self.config.use_dynamic_shifting else None)
        if sigmas is not None:
            use_levels(self, np.asarray(sigmas, dtype=np.float64), device)
