"""How a run is spread, read from what accelerate sets for its processes and from DeepSpeed files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optim_patches.plan.runs import Machines


def read_zero(environ: Mapping[str, str], *, world: int, local: int) -> Machines:
    """DeepSpeed's stage and offloading from the launcher's environment."""
    zero: dict[str, Any] = {}
    file = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    if file and Path(file).is_file():
        zero = json.loads(Path(file).read_text(encoding="utf-8")).get("zero_optimization", {})
    stage = int(zero.get("stage", environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)))
    return Machines(
        world, local, "deepspeed", stage,
        _offloaded(zero, "offload_optimizer", environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE")),
        _offloaded(zero, "offload_param", environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE")),
    )  # fmt: skip


def _offloaded(zero: Mapping[str, Any], name: str, given: str | None) -> bool:
    device = zero.get(name, {}).get("device") if zero else given
    return device not in (None, "", "none")
