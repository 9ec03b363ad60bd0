"""One data row per training script.

A script is a point on four axes: which family recipe it uses, which objective, what is trainable, and which flag
groups its command line has. Adding a script is adding a row here and a ten-line file under ``scripts/``.
This module imports nothing heavy, so that ``--help`` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ScriptSpec:
    """What distinguishes one training script from another.

    Attributes:
        id: path under ``scripts/`` without the suffix, for example ``wan2.1_fun/train_lora``.
        recipe: ``module:Class`` under ``videox_fun.recipes``, imported when the run starts.
        objective: name in ``videox_fun.training.objectives.OBJECTIVES``.
        trainable: ``named`` (parameters chosen by name) or ``lora`` (native or, with ``--use_peft_lora``, PEFT).
        flag_groups: groups of ``videox_fun.training.flags`` on the command line.
        defaults: flag defaults in which this script differs from the groups.
        options: facts handed to the recipe (conditioning kind, probabilities), not visible as flags.
    """

    id: str
    recipe: str
    objective: str
    trainable: str
    flag_groups: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Path of the script below the repository root."""
        return f"scripts/{self.id}.py"


_COMMON = ("model", "data", "optim", "schedule", "checkpoint", "validation", "logging", "runtime", "ignored")

# The plain Wan 2.1 scripts condition on the first frame only, never drop the CLIP context, draw size reductions with
# the per-rank generator and give the loader workers no seed; the Fun scripts use random masks.
_WAN21 = {"mask_image_start_only": True, "clip_drop": 0.0, "first_ratio_prob": 0.75, "ratio_draw_from_rng": True,
          "worker_seeding": False}
_WAN21_FUN = {"mask_image_start_only": False, "clip_drop": 0.1, "first_ratio_prob": 0.90,
              "ratio_draw_from_rng": False, "worker_seeding": True}

SCRIPTS: dict[str, ScriptSpec] = {
    spec.id: spec
    for spec in (
        ScriptSpec("wan2.1/train", "wan:WanRecipe", "flow_match", "named", (*_COMMON, "full", "selective_ac"),
                   options=_WAN21),
        ScriptSpec("wan2.1/train_lora", "wan:WanRecipe", "flow_match", "lora", (*_COMMON, "lora"), options=_WAN21),
        ScriptSpec("wan2.1_fun/train", "wan:WanRecipe", "flow_match", "named", (*_COMMON, "full"),
                   options=_WAN21_FUN),
        ScriptSpec("wan2.1_fun/train_lora", "wan:WanRecipe", "flow_match", "lora", (*_COMMON, "lora"),
                   options=_WAN21_FUN),
    )
}


def get_spec(script_id: str) -> ScriptSpec:
    """Return the row of a script; raises ``ValueError`` naming the known scripts."""
    try:
        return SCRIPTS[script_id]
    except KeyError:
        raise ValueError(f"Unknown training script '{script_id}'. Known: {', '.join(sorted(SCRIPTS))}.") from None
