"""The planner's command line flags, on every training script. No torch here: they are listed for ``--help``."""

from __future__ import annotations

from optim_patches.base import PatchFlag

POLICIES = ("auto", "refuse", "warn", "off")
GOALS = ("auto", "speed", "memory")

PLAN_FLAGS = (
    PatchFlag("--plan", "Print the predicted memory of this run and exit before any weight is loaded.",
              action="store_true", default=False),
    PatchFlag("--plan_png", "Also draw the plan into this file."),
    PatchFlag(
        "--plan_policy",
        "A run that cannot fit: refuse, warn, or off (do not plan). auto: refuse on CUDA, off on a CPU.",
        type=str, default="auto", choices=POLICIES,
    ),
    PatchFlag("--plan_gpu_gb", "Memory to plan for, in GB, instead of this machine's.", type=float),
    PatchFlag("--auto_fit", "Apply the cheapest set of changes with which the run fits into this many GB.", type=float),
    PatchFlag("--optimize", "Apply what the audit recommends for this machine and run, and say what and why.",
              type=str, choices=GOALS),
)  # fmt: skip
