"""``--liger``: fused Triton kernels for the denoiser's norms, modulation, gates and rotary embedding.

RMSNorm and LayerNorm with parameters get Liger's kernels. Where Liger has none and a video transformer spends memory
traffic - LayerNorm with modulation, the gated residual, RMSNorm with rotary embedding - our own kernels run
(``optim_patches/kernels``). Only a module's forward is swapped; parameters, keys and classes stay.

Triton needs CUDA. Without it the patch refuses and says how many layers it would have replaced. Under
``TRITON_INTERPRET=1`` it runs on the CPU in float32, far too slow for anything but tests.

With ``--compile`` the compiler fuses element-wise chains into its own kernels, and an opaque kernel in between only
gets in its way; so our own kernels then leave their sites to the compiler unless ``--liger_kernels`` names them.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
from typing import TYPE_CHECKING, Any

from optim_patches.base import (
    Applied,
    Evidence,
    PatchBase,
    PatchFlag,
    Stage,
    Target,
    Verdict,
    count_by_class,
    describe_counts,
    iter_sites,
)
from optim_patches.kernels import interpreted

if TYPE_CHECKING:
    from torch import nn

LIBRARY = ("rms_norm", "layer_norm")
OWN = ("modulate", "gate", "rms_rope", "gelu")
KERNELS = (*LIBRARY, *OWN)
#: PyTorch's GELU is one kernel already, so ours is there to be asked for, not by default.
AUTO = ("rms_norm", "layer_norm", "modulate", "gate", "rms_rope")
#: Layers that Liger has kernels for and video transformers usually lack; the audit says so instead of keeping silent.
OTHER_FAMILIES = ("swiglu", "geglu")


class LigerPatch(PatchBase):
    """Row I2 of the audit."""

    name = "liger"
    row = "I2"
    stage = Stage.POST_ADAPTER
    flags = (
        PatchFlag("--liger", "Use fused Triton kernels (Liger's and ours).", action="store_true", default=False),
        PatchFlag(
            "--liger_kernels",
            f"auto, or a comma list of {', '.join(KERNELS)}.",
            type=str,
            default="auto",
        ),
    )

    def check(self, target: Target) -> Verdict:
        unknown = [name for name in selected(target.args) if name not in KERNELS]
        if unknown:
            near = difflib.get_close_matches(unknown[0], KERNELS, n=1) or [", ".join(KERNELS)]
            return Verdict(False, f"--liger_kernels {unknown[0]} does not exist.", near[0])
        reason, instead = _obstacle(target)
        if reason:
            return Verdict(False, f"{reason} {_would_replace(target)}", instead)
        return Verdict(True)

    def planned_sites(self, target: Target) -> tuple[str, ...]:
        return tuple(site for site, _, _ in _plan(target))

    def apply(self, target: Target) -> Applied:
        from optim_patches import liger_sites

        plan = _plan(target)
        owners = {id(module): (module, kernel) for _, module, kernel in plan}
        liger_sites.reset_counts()
        for module, kernel in owners.values():
            liger_sites.replace(module, kernel)

        def undo() -> None:
            for module, kernel in owners.values():
                liger_sites.restore(module, kernel)

        by_kernel: dict[str, int] = {}
        for _, kernel in owners.values():
            by_kernel[kernel] = by_kernel.get(kernel, 0) + 1
        detail = describe_counts(by_kernel) if by_kernel else "no layer of this model fits a kernel"
        return Applied(tuple(site for site, _, _ in plan), undo, f"{detail}; {_absent(target)}")

    def evidence(self, target: Target, applied: Applied) -> Evidence:
        from optim_patches import liger_sites

        eager, traced = dict(liger_sites.EAGER), dict(liger_sites.TRACED)
        facts: dict[str, Any] = {"replaced": applied.detail, "eager_calls": eager, "calls_in_compiled_graphs": traced}
        calls = {kernel: eager.get(kernel, 0) + traced.get(kernel, 0) for kernel in {*eager, *traced}}
        if not calls:
            return Evidence(False, f"no kernel ran; {applied.detail}", facts)
        return Evidence(True, f"calls: {describe_counts(calls)}; replaced: {applied.detail}", facts)


def selected(args: argparse.Namespace) -> tuple[str, ...]:
    """The kernels that the flags ask for."""
    text = getattr(args, "liger_kernels", "auto") or "auto"
    if text == "auto":
        return LIBRARY if getattr(args, "compile", False) else AUTO
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _plan(target: Target) -> list[tuple[str, nn.Module, str]]:
    """``(site, module, kernel)``. The rotary kernel acts in the attention module and claims its two norms."""
    from optim_patches.liger_sites import kernel_of

    chosen = selected(target.args)
    found = [
        (site, module, kernel_of(site, module))
        for site, module in iter_sites(target.denoisers(), where=lambda name, module: kernel_of(name, module) in chosen)
    ]
    plan: list[tuple[str, Any, str]] = []
    for site, module, kernel in found:
        if kernel == "rms_rope":
            plan += [(f"{site}.norm_q", module, kernel), (f"{site}.norm_k", module, kernel)]
    taken = {site for site, _, _ in plan}
    plan += [(site, module, kernel) for site, module, kernel in found if kernel != "rms_rope" and site not in taken]
    return plan


def _obstacle(target: Target) -> tuple[str, str]:
    """Why the kernels cannot run here and what to use instead, or two empty strings."""
    instead = "--compile, which fuses the same layers on this machine"
    if target.device != "cuda" and not interpreted():
        return f"Triton kernels need CUDA and this run is on {target.device}.", instead
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed.", "pip install triton, or --compile"
    if any(name in LIBRARY for name in selected(target.args)) and importlib.util.find_spec("liger_kernel") is None:
        return "The liger-kernel package is not installed.", "pip install liger-kernel, or --compile"
    if target.device == "cuda":
        return "", ""
    wide = str(target.extras.get("weight_dtype", "torch.float32"))
    if not wide.endswith("float32"):
        return f"Triton's interpreter is exact in float32 only, and this run is in {wide}.", "--mixed_precision no"
    return "", ""


def _would_replace(target: Target) -> str:
    models = target.denoisers()
    if not models:
        return f"It would serve these kinds of layers: {', '.join(selected(target.args))}."
    sites = [module.norm_q if kernel == "rms_rope" else module for _, module, kernel in _plan(target)]
    counts = describe_counts(count_by_class(sites))
    return f"It would replace {counts}." if counts else "No layer of this model fits a kernel either."


def _absent(target: Target) -> str:
    classes = {type(module).__name__.lower() for _, module in iter_sites(target.denoisers(), where=lambda *_: True)}
    absent = [name for name in OTHER_FAMILIES if not any(name in kind for kind in classes)]
    return f"not in this model: {', '.join(absent)}" if absent else "every layer kind of Liger is in this model"
