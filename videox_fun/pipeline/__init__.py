"""Sampling pipelines. Names are resolved when first used, so importing one family imports no other."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "WanPipeline": "pipeline_wan",
    "WanFunPipeline": "pipeline_wan",
    "WanPipelineOutput": "pipeline_wan",
    "WanFunInpaintPipeline": "pipeline_wan_fun_inpaint",
    "WanFunControlPipeline": "pipeline_wan_fun_control",
    "WanI2VPipeline": "pipeline_wan_fun_inpaint",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"videox_fun.pipeline has no '{name}'. Available: {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
