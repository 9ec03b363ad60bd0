"""Which patches exist, and the manager that runs those a command line asks for.

``PATCHES`` maps a patch's name to ``"module:Class"`` (imported when first needed) or to a class. Adding a patch means
one file and one row here; flags, order, conflicts, audit rows and tests follow from the patch itself.

The manager decides three things in one place:

* **Refusals.** ``preflight`` runs before any weights load. What is asked for and cannot be had stops the run with the
  reason and the alternative; with ``--audit log`` or ``off`` it becomes a row and the run goes on without it.
* **Order.** Stages first, then ``requires``, then the order of ``PATCHES``.
* **Conflicts.** By name where a patch declares them, else by site: a site belongs to the patch that claimed it first
  unless one of the two declares the other composable.

This module imports no torch.
"""

from __future__ import annotations

import argparse
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import cast

from optim_patches.base import (
    Applied,
    Evidence,
    OptimPatch,
    PatchFlag,
    PatchRefused,
    Stage,
    Target,
    Verdict,
    join_names,
)
from optim_patches.plan.flags import PLAN_FLAGS

logger = logging.getLogger(__name__)

AUDIT_MODES = ("default", "strict", "log", "off")
AUDIT_LANGUAGES = ("en", "zh")

PATCHES: dict[str, str | Callable[[], OptimPatch]] = {
    "vae_tiling": "optim_patches.vae_tiling:VaeTilingPatch",
    "qlora": "optim_patches.qlora:QLoraPatch",
    "liger": "optim_patches.liger:LigerPatch",
    "ulysses": "optim_patches.ulysses:UlyssesPatch",
    "fp8": "optim_patches.fp8:Fp8Patch",
    "fp8_base": "optim_patches.fp8:Fp8BasePatch",
    "train_teacache": "optim_patches.train_teacache:TrainTeaCachePatch",
    "compile": "optim_patches.compile:CompilePatch",
    "cuda_graph": "optim_patches.cuda_graph:CudaGraphPatch",
    "checkpointing": "optim_patches.checkpointing:CheckpointingPatch",
    "activation_offload": "optim_patches.activation_offload:ActivationOffloadPatch",
    "block_swap": "optim_patches.block_swap:BlockSwapPatch",
}

AUDIT_FLAGS = (
    PatchFlag(
        "--audit",
        "What happens to an optimization that was asked for and cannot be had or has no effect. default: stop when it "
        "cannot be had, a loud row when it has no effect; strict: stop for both; log: a row for both; off: no audit.",
        type=str,
        default="default",
        choices=AUDIT_MODES,
    ),
    PatchFlag("--audit_lang", "Language of the audit table.", type=str, default="en", choices=AUDIT_LANGUAGES),
    PatchFlag("--audit_after_steps", "Optimizer steps after which the audit table is written.", type=int, default=3),
)


def register(name: str, location: str | Callable[[], OptimPatch]) -> None:
    """Add a patch: ``"module:Class"`` or the class itself."""
    if name in PATCHES:
        raise ValueError(f"A patch named {name!r} is registered already; choose another name.")
    PATCHES[name] = location


@contextmanager
def registered(name: str, location: str | Callable[[], OptimPatch]) -> Iterator[None]:
    """:func:`register` for the length of a ``with`` block."""
    register(name, location)
    try:
        yield
    finally:
        del PATCHES[name]


def load_patch(name: str) -> OptimPatch:
    """A new instance of the patch registered under ``name``."""
    if name not in PATCHES:
        raise ValueError(f"No patch is named {name!r}; there are {', '.join(sorted(PATCHES))}.")
    location = PATCHES[name]
    if isinstance(location, str):
        module, _, attribute = location.partition(":")
        location = cast(Callable[[], OptimPatch], getattr(importlib.import_module(module), attribute))
    patch = location()
    if patch.name != name:
        raise ValueError(f"The patch registered as {name!r} calls itself {patch.name!r}.")
    return patch


def all_flags() -> list[PatchFlag]:
    """Flags of the audit and the planner, and those of every registered patch, in the order of ``PATCHES``."""
    flags = [*AUDIT_FLAGS, *PLAN_FLAGS]
    for name in PATCHES:
        flags.extend(load_patch(name).flags)
    seen: set[str] = set()
    for flag in flags:
        if flag.name in seen:
            raise ValueError(f"Two patches define the flag {flag.name}.")
        seen.add(flag.name)
    return flags


@dataclass
class Outcome:
    """What became of one requested patch."""

    patch: OptimPatch
    verdict: Verdict
    applied: Applied | None = None
    evidence: Evidence | None = None

    @property
    def state(self) -> str:
        """``refused``, ``pending`` (stage not reached), ``inert`` or ``exercised``."""
        if not self.verdict.ok:
            return "refused"
        if self.applied is None:
            return "pending"
        if self.applied.sites and self.evidence is not None and self.evidence.exercised:
            return "exercised"
        return "inert"


class PatchManager:
    """Runs the patches that a command line asks for, stage by stage."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.mode: str = getattr(args, "audit", "default") or "default"
        self._all = [load_patch(name) for name in PATCHES]
        self.requested: list[OptimPatch] = _ordered([patch for patch in self._all if patch.requested(args)])
        self._outcomes = {patch.name: Outcome(patch, Verdict(True)) for patch in self.requested}
        self._claims: dict[str, str] = {}
        self._order: list[Outcome] = []
        self._target: Target | None = None

    @property
    def raises(self) -> bool:
        """Whether a refusal stops the run."""
        return self.mode in ("default", "strict")

    def preflight(self, target: Target) -> None:
        """Refuse what cannot be had, before weights load. Changes nothing in ``target``."""
        self._target = target
        for message in self.idle_flags():
            if self.raises:
                raise PatchRefused(message)
            logger.warning(message)
        for patch in self.requested:
            verdict = self._names_verdict(patch)
            if verdict.ok:
                verdict = patch.check(target)
            if not verdict.ok:
                self._refuse(patch, verdict)

    def idle_flags(self) -> list[str]:
        """A sentence for each patch whose options were given without the flag that turns it on."""
        explicit: frozenset[str] = getattr(self.args, "explicit", frozenset())
        messages = []
        for patch in self._all:
            if patch.name in self._outcomes or not patch.flags:
                continue
            given = [flag.name for flag in patch.flags[1:] if flag.dest in explicit]
            if given:
                messages.append(f"{join_names(given)} does nothing without {patch.flags[0].name}.")
        return messages

    def run_stage(self, stage: Stage, target: Target) -> None:
        """Apply the patches of ``stage``. Refused patches are looked at again, so that their row names live sites."""
        self._target = target
        for patch in self.requested:
            outcome = self._outcomes[patch.name]
            if patch.stage != stage or outcome.applied is not None:
                continue
            if not outcome.verdict.ok:
                outcome.verdict = self._fresh_reason(patch, outcome.verdict, target)
                continue
            verdict = patch.check(target)
            if verdict.ok:
                verdict = self._site_verdict(patch, patch.planned_sites(target))
            if not verdict.ok:
                self._refuse(patch, verdict)
                continue
            self._apply(patch, outcome, target)

    @contextmanager
    def loading(self, target: Target) -> Iterator[None]:
        """The block in which weights are read: ``PRE_LOAD`` before it, and what patches do meanwhile around it."""
        self.run_stage(Stage.PRE_LOAD, target)
        with ExitStack() as stack:
            for patch in self.requested:
                if self._outcomes[patch.name].verdict.ok:
                    stack.enter_context(patch.while_loading(target))
            yield

    def outcomes(self) -> list[Outcome]:
        """One entry per requested patch, with evidence read at this moment."""
        for outcome in self._outcomes.values():
            if outcome.applied is not None and self._target is not None:
                outcome.evidence = outcome.patch.evidence(self._target, outcome.applied)
        return list(self._outcomes.values())

    def outcome(self, name: str) -> Outcome | None:
        """The entry of one patch, or ``None`` when it was not requested."""
        return next((outcome for outcome in self.outcomes() if outcome.patch.name == name), None)

    def undo_all(self) -> None:
        """Restore every patched module, last patch first."""
        while self._order:
            outcome = self._order.pop()
            if outcome.applied is not None:
                outcome.applied.undo()
            outcome.applied = None
            outcome.evidence = None
        self._claims.clear()

    def _apply(self, patch: OptimPatch, outcome: Outcome, target: Target) -> None:
        applied = patch.apply(target)
        verdict = self._site_verdict(patch, applied.sites)
        if not verdict.ok:
            applied.undo()
            self._refuse(patch, verdict)
            return
        for site in applied.sites:
            self._claims.setdefault(site, patch.name)
        outcome.applied = applied
        self._order.append(outcome)
        logger.info("%s: %d sites. %s", patch.name, len(applied.sites), applied.detail)
        if not applied.sites:
            logger.warning("%s found nothing to change: %s", patch.flags[0].name, applied.detail)

    def _names_verdict(self, patch: OptimPatch) -> Verdict:
        for other_name, other in self._outcomes.items():
            clash = other_name in patch.conflicts or patch.name in other.patch.conflicts
            if clash and other_name != patch.name and other.verdict.ok:
                reason = f"{patch.flags[0].name} and {other.patch.flags[0].name} cannot run together."
                return Verdict(False, reason, f"one of {patch.flags[0].name}, {other.patch.flags[0].name}")
        for name in sorted(patch.requires):
            needed = self._outcomes.get(name)
            if needed is None:
                flag = load_patch(name).flags[0].name
                return Verdict(False, f"{patch.flags[0].name} needs {flag}.", f"{patch.flags[0].name} {flag}")
            if not needed.verdict.ok:
                flag = needed.patch.flags[0].name
                return Verdict(False, f"{patch.flags[0].name} needs {flag}, which cannot be had here: {needed.verdict}")
        return Verdict(True)

    def _site_verdict(self, patch: OptimPatch, sites: tuple[str, ...]) -> Verdict:
        by_owner: dict[str, list[str]] = {}
        for site in sites:
            owner = self._claims.get(site)
            if owner is not None and owner != patch.name and not _composable(patch, self._outcomes[owner].patch):
                by_owner.setdefault(owner, []).append(site)
        if not by_owner:
            return Verdict(True)
        owner, shared = next(iter(by_owner.items()))
        flag, other = patch.flags[0].name, self._outcomes[owner].patch.flags[0].name
        reason = f"{flag} and {other} both want {len(shared)} sites ({join_names(shared)})."
        return Verdict(False, reason, f"one of {flag}, {other}")

    def _refuse(self, patch: OptimPatch, verdict: Verdict) -> None:
        self._outcomes[patch.name].verdict = verdict
        message = f"{patch.flags[0].name} is refused: {verdict}"
        if self.raises:
            raise PatchRefused(f"{message} (--audit log goes on without it.)")
        logger.warning("%s The run goes on without it.", message)

    def _fresh_reason(self, patch: OptimPatch, verdict: Verdict, target: Target) -> Verdict:
        fresh = patch.check(target)
        return verdict if fresh.ok else fresh


def _composable(first: OptimPatch, second: OptimPatch) -> bool:
    return (
        "*" in first.composable
        or "*" in second.composable
        or second.name in first.composable
        or first.name in second.composable
    )


def _ordered(patches: list[OptimPatch]) -> list[OptimPatch]:
    """Sort by stage; inside a stage what is required comes first, else the registry's order holds."""
    remaining = sorted(patches, key=lambda patch: patch.stage)
    names = {patch.name for patch in remaining}
    done: list[OptimPatch] = []
    while remaining:
        placed = {patch.name for patch in done}
        ready = next((p for p in remaining if (p.requires & names) <= placed), None)
        if ready is None:
            raise ValueError(f"Patches require each other in a circle: {', '.join(p.name for p in remaining)}.")
        early = [n for n in ready.requires & names if next(p for p in patches if p.name == n).stage > ready.stage]
        if early:
            raise ValueError(f"Patch {ready.name!r} requires {early[0]!r}, which only runs at a later stage.")
        done.append(ready)
        remaining.remove(ready)
    return sorted(done, key=lambda patch: patch.stage)
