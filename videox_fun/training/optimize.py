"""``--optimize auto|speed|memory``: take the audit's advice for this machine and this run.

The advice is that of the static audit on the parsed flags. Only flags of the script itself are set here, and only those
that leave the result of training what it is: nothing that changes sizes, data, learning rates, steps or what is
trained. Everything else is printed as something to do by hand. With ``memory``, or with ``auto`` where the plan says
that the run does not fit, the changes that make it fit come on top.
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import TYPE_CHECKING

from optim_patches.audit.edits import SCRIPT, Edit
from optim_patches.audit.facts import Facts, facts_from_namespace
from optim_patches.audit.hardware import CPU, detect_gpus

if TYPE_CHECKING:
    from videox_fun.training.specs import ScriptSpec

logger = logging.getLogger(__name__)

#: Flags that may be set: they change speed or memory, not what is learned.
SPEED = frozenset({"allow_tf32", "dataloader_num_workers", "prefetch_factor", "compile", "liger", "fused_optimizer",
                   "cache_latents", "cache_text"})
MEMORY = frozenset({"gradient_checkpointing", "low_vram", "vae_tiling", "use_8bit_adam", "activation_offload",
                    "vae_mini_batch"})
_SHARES = {"auto": SPEED | MEMORY, "speed": SPEED, "memory": MEMORY | {"allow_tf32"}}
_GOALS = {"auto": "balanced", "speed": "speed", "memory": "memory"}


def facts_of(spec: ScriptSpec, args: argparse.Namespace) -> Facts:
    """This run on this machine, as the audit sees it."""
    import torch

    cards = detect_gpus() if torch.cuda.is_available() else []
    facts = facts_from_namespace(args, script_id=spec.id, explicit=args.explicit, gpu=cards[0] if cards else CPU,
                                 world=int(os.environ.get("WORLD_SIZE", "1")))  # fmt: skip
    facts.goal = _GOALS[args.optimize]
    return facts


def apply_advice(spec: ScriptSpec, args: argparse.Namespace, *, facts: Facts | None = None) -> list[Edit]:
    """Set what is recommended, log it with the reasons, and return what was set."""
    from optim_patches.audit.checks import State, evaluate
    from optim_patches.audit.edits import merge_edits
    from videox_fun.training.planning import set_flags

    facts = facts or facts_of(spec, args)
    applied: list[Edit] = []
    for row in evaluate(facts):
        if row.state != State.RECOMMENDED:
            continue
        wanted = [edit for edit in row.edits if _allowed(edit, args, facts)]
        for edit in merge_edits(wanted):
            set_flags(args, {edit.name: _value(edit, args)})
            applied.append(edit)
            logger.info("--optimize %s: %s (%s: %s)", args.optimize, edit, row.id, row.reason.en)
        others = [str(edit) for edit in row.edits if edit not in wanted]
        if others:
            logger.info("--optimize leaves to you: %s (%s: %s)", ", ".join(others), row.id, row.reason.en)
    if not applied:
        logger.info("--optimize %s: nothing to change.", args.optimize)
    return applied


def _allowed(edit: Edit, args: argparse.Namespace, facts: Facts) -> bool:
    """Whether an edit is one of the flags that may be set, exists here and was not given."""
    if edit.where != SCRIPT or edit.remove or edit.name not in _SHARES[args.optimize]:
        return False
    if facts.cpu and edit.name in ("low_vram", "activation_offload", "liger", "allow_tf32"):
        return False
    return hasattr(args, edit.name) and edit.name not in args.explicit


def _value(edit: Edit, args: argparse.Namespace) -> object:
    if edit.value is None:
        return True
    old = getattr(args, edit.name)
    return type(old)(edit.value) if isinstance(old, (int, float)) and not isinstance(old, bool) else _plain(edit.value)


def _plain(text: str) -> object:
    return int(text) if text.lstrip("-").isdigit() else text
