"""``--fp8`` (matrix products in FP8) and ``--fp8_base`` (frozen weights stored in FP8).

**--fp8** runs the linear layers of the repeated blocks through torchao's float8 training casts: input, weight and
gradient are scaled and rounded to 8 bits before each product, sums are kept in full width. Where the weight is frozen
(LoRA) its cast is made once, kept beside the weight and made again only when the weight was written to; the product
for its gradient is not computed at all. Where the weight is trained, torchao's own layer computes with the very same
parameter. Only the forward of a layer is replaced, behind its adapter: keys, classes and parameters stay.

FP8 pays where all three sizes of a product are large. Layers below ``--fp8_min_dim`` or whose sides are no multiple of
16, and everything outside the blocks (a few rows per sample), keep their type; the audit says how many and why.

**--fp8_base** stores each frozen weight as FP8 with one scale per output channel, half the memory of bfloat16, and
widens it inside the forward and again in the backward. It needs no FP8 hardware and no torchao.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optim_patches.base import Applied, Evidence, PatchBase, PatchFlag, Stage, Target, Verdict, describe_counts
from optim_patches.compile import find_blocks

if TYPE_CHECKING:
    from torch import nn

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
MULTIPLE = 16  # what the FP8 matrix units take
CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}


@dataclass(frozen=True)
class Plan:
    """Linear layers to change by site, and how many are left alone for which reason."""

    chosen: dict[str, nn.Linear]
    left: dict[str, int]

    def __str__(self) -> str:
        text = f"{len(self.chosen)} linear layers"
        return f"{text}; left alone: {describe_counts(self.left)}" if self.left else text


class Fp8Patch(PatchBase):
    """Row I7 of the audit."""

    name = "fp8"
    row = "I7"
    stage = Stage.POST_ADAPTER
    conflicts = frozenset({"fp8_base", "qlora"})
    flags = (
        PatchFlag("--fp8", "Compute the blocks' linear layers in FP8 (torchao).", action="store_true", default=False),
        PatchFlag(
            "--fp8_recipe", "Scales per tensor (fastest) or per row (more exact).", type=str, default="tensorwise",
            choices=RECIPES,
        ),
        PatchFlag("--fp8_min_dim", "Smallest side of a layer that is computed in FP8.", type=int, default=1024),
        PatchFlag(
            "--fp8_emulate", "Round to FP8 but compute in full width, on any device: for tests of accuracy, not speed.",
            action="store_true", default=False,
        ),
    )  # fmt: skip

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def check(self, target: Target) -> Verdict:
        if importlib.util.find_spec("torchao") is None:
            return Verdict(False, "--fp8 needs the torchao package.", "pip install torchao, or --fp8_base without it")
        if any(os.environ.get(name) == "true" for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")):
            reason = "--fp8 keeps casts of whole weights, which FSDP and DeepSpeed split or move."
            return Verdict(False, reason, "DDP with --fp8, or FSDP without it")
        if _option(target.args, "fp8_emulate"):
            return Verdict(True)
        if target.device != "cuda":
            reason = f"--fp8 needs FP8 matrix units and this run is on {target.device}."
            return Verdict(False, reason, "--fp8_emulate to test accuracy, or --fp8_base to save memory")
        return _capability_verdict(_option(target.args, "fp8_recipe"))

    def planned_sites(self, target: Target) -> tuple[str, ...]:
        return tuple(plan_layers(target, min_dim=_option(target.args, "fp8_min_dim")).chosen)

    def apply(self, target: Target) -> Applied:
        from optim_patches.fp8_layers import attach, make_layer

        plan = plan_layers(target, min_dim=_option(target.args, "fp8_min_dim"))
        recipe, emulate = (_option(target.args, f"fp8_{key}") for key in ("recipe", "emulate"))
        self.layers = [make_layer(module, recipe=recipe, emulate=emulate) for module in plan.chosen.values()]
        undo = attach(self.layers, list(target.denoisers().values()))
        how = f"{recipe}, emulated" if emulate else recipe
        return Applied(tuple(plan.chosen), undo, f"{how}: {plan}")

    def evidence(self, target: Target, applied: Applied) -> Evidence:
        frozen = [layer for layer in self.layers if layer.frozen]
        facts = {
            "layers": len(self.layers), "frozen": len(frozen), "calls": sum(layer.count.total for layer in self.layers),
            "weight_casts_of_frozen": sum(layer.casts for layer in frozen),
            "cast_bytes": sum(layer.cast_bytes for layer in frozen), "filter": applied.detail,
        }  # fmt: skip
        if not facts["calls"]:
            return Evidence(False, f"no FP8 product ran; {applied.detail}", facts)
        casts = f"; {facts['weight_casts_of_frozen']} casts of {len(frozen)} frozen weights" if frozen else ""
        return Evidence(True, f"{facts['calls']} calls{casts}; {applied.detail}", facts)


class Fp8BasePatch(PatchBase):
    """Scaled FP8 storage of frozen weights."""

    name = "fp8_base"
    stage = Stage.PRE_ADAPTER
    conflicts = frozenset({"fp8", "qlora"})
    flags = (
        PatchFlag(
            "--fp8_base", "Store the blocks' frozen linear weights in FP8 with one scale per channel (LoRA scripts).",
            action="store_true", default=False,
        ),
    )  # fmt: skip

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.sizes = (0, 0)

    def check(self, target: Target) -> Verdict:
        if getattr(target.args, "trainable_modules", None) is not None:
            reason = "--fp8_base stores rounded weights, and full fine-tuning trains and saves all of them."
            return Verdict(False, reason, "a LoRA script with --fp8_base, or --fp8 here")
        if any(os.environ.get(name) == "true" for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")):
            reason = "--fp8_base stores weights as bytes, which FSDP and DeepSpeed cannot shard together with others."
            return Verdict(False, reason, "DDP with --fp8_base, or sharding without it")
        return Verdict(True)

    def planned_sites(self, target: Target) -> tuple[str, ...]:
        return tuple(plan_layers(target, min_dim=1, multiple=1).chosen)

    def apply(self, target: Target) -> Applied:
        from optim_patches.fp8_layers import StoredLayer

        plan = plan_layers(target, min_dim=1, multiple=1)
        modules = list(plan.chosen.values())
        before = sum(module.weight.nbytes for module in modules)
        self.layers = [StoredLayer(module) for module in modules]
        self.sizes = before, sum(module.weight.nbytes + module.weight_scale.nbytes for module in modules)

        def undo() -> None:
            for layer in self.layers:
                layer.widen()

        detail = f"{plan}; {before / 2**20:.4g} MiB became {self.sizes[1] / 2**20:.4g} MiB (undo keeps the rounding)"
        return Applied(tuple(plan.chosen), undo, detail)

    def evidence(self, target: Target, applied: Applied) -> Evidence:
        stored, calls = len(self.layers), sum(layer.count.total for layer in self.layers)
        facts = {"stored": stored, "calls": calls, "bytes_before": self.sizes[0], "bytes_after": self.sizes[1]}
        if not calls:
            return Evidence(False, f"no stored weight was used; {applied.detail}", facts)
        return Evidence(True, f"{stored} stored weights, widened in {calls} forwards; {applied.detail}", facts)


def plan_layers(target: Target, *, min_dim: int, multiple: int = MULTIPLE) -> Plan:
    """Sort the linear layers of all denoisers into those that are changed and those that are not."""
    from torch import nn

    chosen: dict[str, nn.Linear] = {}
    left: dict[str, int] = {}
    for role, model in target.denoisers().items():
        inside = {id(module) for _, block in find_blocks(model) for module in block.modules()}
        adapters = {id(m) for name, module in model.named_modules() if _is_adapter(name) for m in module.modules()}
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear) or id(module) in adapters:
                continue
            reason = _unfit(module, inside=id(module) in inside, min_dim=min_dim, multiple=multiple)
            if reason:
                left[reason] = left.get(reason, 0) + 1
            else:
                chosen[f"{role}.{name}"] = module
    return Plan(chosen, left)


def _is_adapter(name: str) -> bool:
    return name == "network" or name.rpartition(".")[2] in ("lora_A", "lora_B", "lora_down", "lora_up")


def _unfit(module: nn.Linear, *, inside: bool, min_dim: int, multiple: int) -> str:
    sides = module.in_features, module.out_features
    if not inside:
        return "outside the blocks (few rows)"
    if not module.weight.is_floating_point():
        return "quantized already"
    if min(sides) < min_dim:
        return f"smaller than {min_dim}"
    return f"not a multiple of {multiple}" if any(side % multiple for side in sides) else ""


def _option(args: argparse.Namespace, dest: str) -> Any:
    default = next(flag.default for flag in Fp8Patch.flags if flag.dest == dest)
    return getattr(args, dest, default)


def _capability_verdict(recipe: str) -> Verdict:
    import torch

    needed, found = CAPABILITY[recipe], torch.cuda.get_device_capability()
    if found >= needed:
        return Verdict(True)
    reason = "--fp8_recipe {} needs compute capability {}.{}; this GPU has {}.{}.".format(recipe, *needed, *found)
    instead = "--fp8_recipe tensorwise" if found >= CAPABILITY["tensorwise"] else "--fp8_base, which saves memory"
    return Verdict(False, reason, instead)
