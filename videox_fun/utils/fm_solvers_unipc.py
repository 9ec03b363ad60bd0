"""UniPC for flow matching, under upstream's name and arguments.

The solver is the one of diffusers with flow sigmas. What differs is the interface: the shift of the noise schedule is
chosen per sampling run, as an argument of ``set_timesteps``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from diffusers import UniPCMultistepScheduler
from diffusers.configuration_utils import register_to_config

from videox_fun.utils.fm_solvers import shifted, use_levels


class FlowUniPCMultistepScheduler(UniPCMultistepScheduler):
    """UniPC over ``sigma = shift s / (1 + (shift - 1) s)``."""

    @register_to_config
    def __init__(
        self, num_train_timesteps: int = 1000, solver_order: int = 2, prediction_type: str = "flow_prediction",
        shift: float = 1.0, use_dynamic_shifting: bool = False, thresholding: bool = False,
        dynamic_thresholding_ratio: float = 0.995, sample_max_value: float = 1.0, predict_x0: bool = True,
        solver_type: str = "bh2", lower_order_final: bool = True, disable_corrector: Sequence[int] = (),
        solver_p: object = None, timestep_spacing: str = "linspace", steps_offset: int = 0,
        final_sigmas_type: str = "zero",
    ) -> None:
        super().__init__(
            num_train_timesteps=num_train_timesteps, solver_order=solver_order, prediction_type=prediction_type,
            use_flow_sigmas=True, flow_shift=shift, use_dynamic_shifting=use_dynamic_shifting,
            thresholding=thresholding, dynamic_thresholding_ratio=dynamic_thresholding_ratio,
            sample_max_value=sample_max_value, predict_x0=predict_x0, solver_type=solver_type,
            lower_order_final=lower_order_final, disable_corrector=list(disable_corrector),
            timestep_spacing=timestep_spacing, steps_offset=steps_offset, final_sigmas_type=final_sigmas_type,
        )

    def set_timesteps(
        self, num_inference_steps: int | None = None, device: str | torch.device | None = None,
        sigmas: Sequence[float] | None = None, mu: float | None = None, shift: float | None = None,
    ) -> None:
        """Choose the noise levels of a run.

        Args:
            num_inference_steps: that many levels, evenly spread below ``1 - 1 / num_train_timesteps``.
            device: of the timesteps.
            sigmas: the levels before shifting, decreasing, instead of a number.
            mu: used with ``use_dynamic_shifting``.
            shift: overrides the configured one.
        """
        if shift is not None:
            self.register_to_config(flow_shift=shift)
        if sigmas is None:
            sigmas = np.linspace(1 - 1 / self.config.num_train_timesteps, 0, num_inference_steps + 1)[:-1]
        super().set_timesteps(len(sigmas), device=device, mu=mu if self.config.use_dynamic_shifting else None)
        levels = np.asarray(sigmas, dtype=np.float64)
        if self.config.use_dynamic_shifting:
            levels = np.exp(mu) / (np.exp(mu) + 1 / levels - 1)
        else:
            levels = shifted(levels, self.config.flow_shift)
        use_levels(self, levels, device)
