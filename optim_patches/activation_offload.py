"""``--activation_offload``: the inputs of checkpointed blocks wait in host memory until the backward.

With gradient checkpointing a block's input is all that stays of it, and for long clips these inputs are most of what a
step holds: 13 GB for Wan 14B at 480x832x81. This patch sends each to page-locked host memory while the next block
computes, and brings it back ahead of its recomputation; see ``offload_store``. What all blocks are handed alike (rotary
table, prompt, time modulation) stays on the device, where it is anyway.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from optim_patches.base import Applied, Evidence, PatchBase, PatchFlag, Stage, Target, Verdict
from optim_patches.compile import find_blocks

if TYPE_CHECKING:
    from torch import nn

    from optim_patches.offload_store import OffloadStore

MB, GB = 1e6, 1e9


class ActivationOffloadPatch(PatchBase):
    """Block inputs on the host."""

    name = "activation_offload"
    stage = Stage.PRE_SHARD
    conflicts = frozenset({"cuda_graph"})
    composable = frozenset({"*"})
    flags = (
        PatchFlag(
            "--activation_offload", "Keep the inputs of checkpointed blocks in host memory until the backward.",
            action="store_true", default=False,
        ),
        PatchFlag("--activation_offload_min_mb", "MB below which a tensor stays.", type=float, default=1.0),
    )  # fmt: skip

    def __init__(self) -> None:
        self.store: OffloadStore | None = None

    def check(self, target: Target) -> Verdict:
        from optim_patches import transfers

        args = target.args
        if target.device not in transfers.BACKENDS:
            reason = f"--activation_offload frees the memory of a GPU, and this run is on {target.device}."
            return Verdict(False, reason, "the run without it")
        if not getattr(args, "gradient_checkpointing", False):
            reason = "--activation_offload moves the inputs of recomputed blocks, and no block is recomputed."
            return Verdict(False, reason, "--gradient_checkpointing --activation_offload")
        if getattr(args, "compile", False) and getattr(args, "compile_scope", "regional") == "whole":
            reason = "--activation_offload acts between blocks, and --compile_scope whole leaves no between."
            return Verdict(False, reason, "--compile_scope regional")
        return Verdict(True)

    def planned_sites(self, target: Target) -> tuple[str, ...]:
        return tuple(f"{role}.{name}" for role, model in target.denoisers().items() for name, _ in find_blocks(model))

    def apply(self, target: Target) -> Applied:
        from optim_patches import transfers
        from optim_patches.offload_store import OffloadStore

        make = transfers.BACKENDS[target.device]
        store = OffloadStore(
            outward=make(), inward=make(), smallest=int(_option(target.args, "activation_offload_min_mb") * MB)
        )
        self.store = store
        undos: list[Callable[[], None]] = []
        sites: list[str] = []
        for role, model in target.denoisers().items():
            named = [f"{role}.{name}" for name, _ in find_blocks(model)]
            places = [m for m in model.modules() if getattr(m, "_gradient_checkpointing_func", None) is not None]
            for place in places if named else ():
                before = place._gradient_checkpointing_func
                place._gradient_checkpointing_func = OffloadedInputs(before, store=store)
                undos.append(partial(setattr, place, "_gradient_checkpointing_func", before))
            sites += named if places else []

        def undo() -> None:
            while undos:
                undos.pop()()
            store.close()

        detail = f"{len(sites)} blocks" if sites else "no network here checkpoints its blocks one by one"
        return Applied(tuple(sites), undo, detail)

    def evidence(self, target: Target, applied: Applied) -> Evidence:
        if self.store is None:
            return Evidence(False, applied.detail)
        counts = self.store.counts
        facts = {
            "tensors": counts.packed, "bytes_out": counts.bytes_out, "bytes_back": counts.bytes_back,
            "ahead": counts.ahead, "late": counts.late, "not_left": counts.not_left,
            "host_bytes": self.store.host_bytes,
        }  # fmt: skip
        if not counts.packed:
            least = _option(target.args, "activation_offload_min_mb")
            reason = f"no block input of at least {least:g} MB was saved; --activation_offload_min_mb lowers that"
            return Evidence(False, f"{reason}; {applied.detail}", facts)
        back = f"{counts.ahead} brought back ahead, {counts.late} late, {counts.not_left} before they had left"
        summary = (f"{counts.packed} block inputs, {counts.bytes_out / GB:.3g} GB out and {counts.bytes_back / GB:.3g} "
                   f"GB back ({back}); {self.store.host_bytes / GB:.3g} GB of host memory")
        return Evidence(True, summary, facts)


class OffloadedInputs:
    """Stands in a network's checkpoint function: what it saves of its arguments goes to the host."""

    def __init__(self, before: Callable[..., Any], *, store: OffloadStore) -> None:
        self.before = before
        self.store = store
        self._last: list[weakref.ref[Any]] = []
        self._shared: dict[type[nn.Module], set[int]] = {}  # positions of what all modules of a class are handed alike

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        import torch

        keeps_all = getattr(self.before, "keeps_all", None)
        if keeps_all is not None and keeps_all(module, args):
            return self.before(module, *args)
        shared = self._shared.setdefault(type(module), set())
        tensors = {place: value for place, value in enumerate(args) if isinstance(value, torch.Tensor)}
        shared.update(place for place, value in tensors.items() if any(value is earlier() for earlier in self._last))
        self._last = [weakref.ref(value) for value in tensors.values()]
        with self.store.saving([value for place, value in tensors.items() if place not in shared]):
            return self.before(module, *args)


def _option(args: argparse.Namespace, dest: str) -> Any:
    default = next(flag.default for flag in ActivationOffloadPatch.flags if flag.dest == dest)
    return getattr(args, dest, default)
