"""Helpers without knowledge of models, data or training.

Names resolve when they are first used (PEP 562), so importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_SOURCES = {
    "videox_fun.utils.discrete_sampler": ("DiscreteSampling",),
    "videox_fun.utils.lora_utils": ("convert_peft_lora_to_kohya_lora", "create_network", "merge_lora", "unmerge_lora"),
    "videox_fun.utils.utils": ("calculate_dimensions", "filter_kwargs", "get_autocast_dtype", "get_image_latent",
                               "get_image_to_video_latent", "get_video_to_video_latent", "save_videos_grid"),
}
_NAMES = {name: module for module, names in _SOURCES.items() for name in names}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
