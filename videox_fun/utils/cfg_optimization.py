"""Leaving out the unguided half of a batch that was doubled for classifier-free guidance.

The pipelines here call the denoiser once per half and skip the second call themselves. A sampling loop that doubles its
batch to ``[negative, prompt]`` and calls the denoiser once is served by this decorator: it computes the prompt half
alone and gives its result for both, so that ``u + s (c - u)`` is ``c``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def cfg_skip() -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Decorator for ``forward(self, x, ...)`` of a denoiser with ``skips_guidance()``.

    It acts only without gradients, in the steps that the denoiser was told to leave guidance out of, and where the
    caller did not say by ``cond_flag`` that it passes one half. Every argument with one entry per sample is halved.
    """

    def decorate(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(forward)
        def wrapper(self: Any, x: Any, *args: Any, **kwargs: Any) -> Tensor:
            count = len(x)
            if torch.is_grad_enabled() or "cond_flag" in kwargs or count % 2 or not self.skips_guidance():
                return forward(self, x, *args, **kwargs)

            def prompted(value: Any) -> Any:
                per_sample = isinstance(value, list | tuple) or isinstance(value, Tensor) and value.dim() > 0
                return value[count // 2:] if per_sample and len(value) == count else value

            half = forward(self, prompted(x), *map(prompted, args), **{k: prompted(v) for k, v in kwargs.items()})
            return torch.cat([half, half])

        return wrapper

    return decorate
