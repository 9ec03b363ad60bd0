"""Triton kernels of our own, each beside its plain PyTorch reference.

A kernel file imports Triton through :func:`load_triton` and is itself imported only where its kernels are used, so that
machines without Triton never notice. Under ``TRITON_INTERPRET=1`` the kernels run on the CPU, slowly, for tests.
"""

from __future__ import annotations

import importlib
import os
from typing import Any


def load_triton() -> tuple[Any, Any]:
    """The modules ``triton`` and ``triton.language``."""
    try:
        return importlib.import_module("triton"), importlib.import_module("triton.language")
    except ImportError as error:
        raise ImportError("The fused kernels need Triton: pip install triton") from error


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, which needs no GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
