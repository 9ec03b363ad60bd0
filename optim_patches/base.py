"""The vocabulary of the patch layer: what an optimization patch is and what it reports.

A patch is one object with four verbs. ``check`` looks and changes nothing, ``apply`` changes live modules and says at
which sites, ``evidence`` reads afterwards whether the changed code really ran, ``undo`` (returned by ``apply``) puts
everything back. "Applied" and "exercised" are different words on purpose: a patch that touched forty layers and was
never executed is *inert*, and the audit says so.

A site is ``<role>.<module name>``, for example ``transformer.blocks.0.norm1``. Two patches that claim the same site
conflict unless one of them declares the other composable; nothing is decided by class.

This module imports no torch, so that the flags of all patches can be listed quickly.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn

#: Roles that only encode or decode. Every other model of a target is a denoiser.
ENCODER_ROLES = frozenset({"vae", "text_encoder", "text_encoder_2", "image_encoder", "audio_encoder"})


class Stage(IntEnum):
    """Moments of a run at which patches act, in order."""

    PRE_LOAD = 0
    POST_LOAD = 1
    PRE_ADAPTER = 2
    POST_ADAPTER = 3
    PRE_SHARD = 4
    POST_SHARD = 5
    LOADER = 6
    STEP = 7


class PatchRefused(ValueError):
    """Something was asked for that cannot be had. The text says why and what to use instead."""


@dataclass(frozen=True)
class PatchFlag:
    """One command line flag of a patch, as ``ArgumentParser.add_argument`` takes it."""

    name: str
    help: str
    type: Callable[[str], Any] | None = None
    default: Any = None
    choices: tuple[Any, ...] | None = None
    action: str | None = None
    nargs: str | int | None = None

    @property
    def dest(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    def add_to(self, parser: Any) -> None:
        """Add the flag to a parser or an argument group."""
        options: dict[str, Any] = {"help": self.help, "default": self.default}
        for key in ("type", "choices", "action", "nargs"):
            value = getattr(self, key)
            if value is not None:
                options[key] = list(value) if key == "choices" else value
        if self.action == "store_true" and self.default is None:
            options["default"] = False
        parser.add_argument(self.name, **options)


@dataclass
class Target:
    """What a patch may look at and change.

    At preflight ``models`` is empty or holds meta-device skeletons; from POST_LOAD on it holds the live modules.
    Modules may be wrapped (DDP) from POST_SHARD on: use :func:`unwrap`.
    """

    args: argparse.Namespace
    device: str = "cpu"
    models: dict[str, nn.Module] = field(default_factory=dict)
    loader: Any = None
    optimizers: list[Any] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)

    def denoisers(self) -> dict[str, nn.Module]:
        """The networks that are sampled or trained, by role and without wrappers."""
        return {role: unwrap(model) for role, model in self.models.items() if role not in ENCODER_ROLES}


@dataclass(frozen=True)
class Verdict:
    """The answer of ``check``."""

    ok: bool
    reason: str = ""
    instead: str = ""

    def __str__(self) -> str:
        return f"{self.reason} Use instead: {self.instead}." if self.instead else self.reason


@dataclass
class Applied:
    """What ``apply`` did. ``undo`` restores the modules as they were before."""

    sites: tuple[str, ...]
    undo: Callable[[], None]
    detail: str = ""


@dataclass(frozen=True)
class Evidence:
    """What was read after real steps ran."""

    exercised: bool
    summary: str
    facts: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class OptimPatch(Protocol):
    """The interface of a patch. :class:`PatchBase` supplies the parts that rarely differ."""

    name: str
    flags: tuple[PatchFlag, ...]
    stage: Stage
    requires: frozenset[str]
    conflicts: frozenset[str]
    composable: frozenset[str]

    def requested(self, args: argparse.Namespace) -> bool: ...

    def check(self, target: Target) -> Verdict: ...

    def planned_sites(self, target: Target) -> tuple[str, ...]: ...

    def while_loading(self, target: Target) -> AbstractContextManager[None]: ...

    def apply(self, target: Target) -> Applied: ...

    def evidence(self, target: Target, applied: Applied) -> Evidence: ...


class PatchBase:
    """Defaults of a patch that is requested by its first flag.

    Attributes:
        requires: patches that must be requested too.
        conflicts: patches that can never run in the same process as this one.
        composable: patches that may claim the same sites as this one (``"*"``: all).
        row: id of the audit row the patch answers for (``"I1"``), empty if none.
    """

    name: str = ""
    row: str = ""
    flags: tuple[PatchFlag, ...] = ()
    stage: Stage = Stage.POST_ADAPTER
    requires: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()
    composable: frozenset[str] = frozenset()

    def requested(self, args: argparse.Namespace) -> bool:
        flag = self.flags[0]
        return bool(getattr(args, flag.dest, flag.default))

    def check(self, target: Target) -> Verdict:
        return Verdict(True)

    def planned_sites(self, target: Target) -> tuple[str, ...]:
        return ()

    def while_loading(self, target: Target) -> AbstractContextManager[None]:
        """Entered before weights are read and left when they are; ``apply`` follows at the patch's stage."""
        return nullcontext()


def unwrap(module: nn.Module) -> nn.Module:
    """The network inside DDP, DeepSpeed or whole-module compile wrappers."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and type(module).__name__ in ("DistributedDataParallel", "DeepSpeedEngine"):
            inner = module.module
        if inner is None:
            return module
        module = inner


def iter_sites(
    models: Mapping[str, nn.Module], *, where: Callable[[str, nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``(site, module)`` for each module of each model for which ``where(name, module)`` holds."""
    for role, model in models.items():
        for name, module in unwrap(model).named_modules():
            if where(name, module):
                yield (f"{role}.{name}" if name else role), module


def count_by_class(modules: Iterable[nn.Module]) -> dict[str, int]:
    """How many modules there are of each class name."""
    counts: dict[str, int] = {}
    for module in modules:
        key = type(module).__name__
        counts[key] = counts.get(key, 0) + 1
    return counts


def describe_counts(counts: Mapping[str, int]) -> str:
    """``{"LayerNorm": 4, "WanRMSNorm": 8}`` as ``4 LayerNorm, 8 WanRMSNorm``."""
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))


def join_names(names: Sequence[str], *, limit: int = 4) -> str:
    """A short readable list of names."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
