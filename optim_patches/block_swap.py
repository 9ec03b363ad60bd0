"""``--block_swap N``: keep the frozen weights of N blocks in host memory and stream them through the device.

For LoRA on cards that the model does not fit on. The adapters, and whatever else is trained, stay on the device; the
frozen weights of the chosen blocks lie in page-locked host memory and come through a ring of device buffers, the next
block while the present one computes. With ``--block_swap_gb`` the number follows from the device memory that the
frozen weights of all blocks, ring included, may take.

The blocks are spread evenly over the network, so that a copy has the time of several resident blocks to hide behind.
They must be recomputed in the backward; see ``block_ring`` for the mechanism.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from optim_patches.base import Applied, Evidence, PatchBase, PatchFlag, Stage, Target, Verdict, unwrap
from optim_patches.compile import find_blocks
from optim_patches.selection import block_count, evenly

if TYPE_CHECKING:
    from torch import nn

    from optim_patches.block_ring import BlockRing

GB = 1e9
_FULL = "--block_swap streams frozen weights from the host and never back, and full fine-tuning changes them each step."


class BlockSwapPatch(PatchBase):
    """Frozen blocks on the host."""

    name = "block_swap"
    stage = Stage.PRE_SHARD
    conflicts = frozenset({"fp8", "cuda_graph"})
    composable = frozenset({"*"})
    flags = (
        PatchFlag("--block_swap", "Blocks of the denoiser whose frozen weights stay on the host.", type=int, default=0),
        PatchFlag(
            "--block_swap_gb", "Instead of a number: GB of device memory for the frozen weights of all blocks.",
            type=float, default=None,
        ),
        PatchFlag("--block_swap_ring", "Device buffers that the blocks pass through.", type=int, default=2),
    )  # fmt: skip

    def __init__(self) -> None:
        self.ring: BlockRing | None = None
        self.names: tuple[str, ...] = ()

    def requested(self, args: argparse.Namespace) -> bool:
        return bool(_option(args, "block_swap")) or _option(args, "block_swap_gb") is not None

    def check(self, target: Target) -> Verdict:
        from optim_patches import transfers

        args = target.args
        if getattr(args, "trainable_modules", None) is not None:
            return Verdict(False, _FULL, "a LoRA script with --block_swap, or ZeRO-3 with CPU offload here")
        if any(os.environ.get(name) == "true" for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")):
            reason = "--block_swap moves whole blocks, which FSDP and DeepSpeed split or move themselves."
            return Verdict(False, reason, "their own CPU offload, or DDP with --block_swap")
        if target.device not in transfers.BACKENDS:
            reason = f"--block_swap frees the memory of a GPU, and this run is on {target.device}, the host itself."
            return Verdict(False, reason, "the run without it")
        if not getattr(args, "gradient_checkpointing", False):
            reason = "--block_swap reuses the memory of a block's weights, so the backward must recompute each block."
            return Verdict(False, reason, "--gradient_checkpointing --block_swap")
        for verdict in (_beside_verdict(args), self._number_verdict(target)):
            if not verdict.ok:
                return verdict
        return Verdict(True)

    def _number_verdict(self, target: Target) -> Verdict:
        args, count = target.args, block_count(target)
        asked, ring = _option(args, "block_swap"), _option(args, "block_swap_ring")
        if ring < 2:
            return Verdict(False, f"--block_swap_ring {ring}: one buffer computes while another fills.", "2 or more")
        if asked and _option(args, "block_swap_gb") is not None:
            return Verdict(False, "--block_swap and --block_swap_gb both say how many blocks go.", "one of them")
        if asked < 0 or (count and asked > count):
            return Verdict(False, f"--block_swap {asked}: the denoiser has {count} blocks.", f"1 to {count}")
        if 0 < asked <= ring:
            reason = f"--block_swap {asked} saves nothing: the ring of {ring} buffers holds as many blocks."
            return Verdict(False, reason, f"--block_swap {ring + 1} or more")
        return self._budget_verdict(target)

    def _budget_verdict(self, target: Target) -> Verdict:
        from optim_patches.block_ring import frozen_bytes

        budget = _option(target.args, "block_swap_gb")
        if budget is None:
            return Verdict(True)
        for model in target.denoisers().values():
            sizes = [frozen_bytes(block) for _, block in find_blocks(model)]
            least = _option(target.args, "block_swap_ring") * max(sizes, default=0)
            if budget * GB < least:
                reason = f"--block_swap_gb {budget:g} is less than the ring of buffers, {least / GB:.3g} GB."
                return Verdict(False, reason, f"--block_swap_gb {least / GB:.3g} or more")
            if sum(sizes) <= budget * GB:
                reason = f"--block_swap_gb {budget:g}: all blocks fit, they take {sum(sizes) / GB:.3g} GB."
                return Verdict(False, reason, "the run without it")
        return Verdict(True)

    def planned_sites(self, target: Target) -> tuple[str, ...]:
        return tuple(name for chosen in self._chosen(target).values() for name, _ in chosen)

    def apply(self, target: Target) -> Applied:
        from torch import device

        from optim_patches import transfers
        from optim_patches.block_ring import BlockRing, HostBlock, StateHooks, StreamedCall

        chosen = {role: blocks for role, blocks in self._chosen(target).items() if blocks}
        flat = [block for blocks in chosen.values() for _, block in blocks]
        self.names = tuple(name for blocks in chosen.values() for name, _ in blocks)
        if not flat:
            return Applied((), lambda: None, "no repeated block with frozen weights was found")
        backend = transfers.BACKENDS[target.device]()
        hosted = [HostBlock(block, transfers=backend, device=device(target.device)) for block in flat]
        ends = [sum(len(blocks) for blocks in list(chosen.values())[: k + 1]) - 1 for k in range(len(chosen))]
        ring = BlockRing(hosted, ends=ends, transfers=backend, slots=_option(target.args, "block_swap_ring"))
        self.ring = ring
        before = [(block, block._compiled_call_impl) for block in flat]
        for number, block in enumerate(flat):
            block._compiled_call_impl = StreamedCall(block, ring=ring, number=number)
        hooks = StateHooks(ring)
        hooks.install()
        unignore = [_ignore_in_ddp(model) for model in target.denoisers().values()]

        def undo() -> None:
            hooks.remove()
            for put_back in unignore:
                put_back()
            for block, implementation in before:
                block._compiled_call_impl = implementation
            ring.close()

        detail = (f"{len(flat)} of {sum(len(find_blocks(m)) for m in target.denoisers().values())} blocks, "
                  f"{ring.host_bytes / GB:.3g} GB on the host, {ring.device_bytes / GB:.3g} GB in "
                  f"{len(ring.slots)} device buffers")
        return Applied(self.names, undo, detail)

    def evidence(self, target: Target, applied: Applied) -> Evidence:
        if self.ring is None:
            return Evidence(False, applied.detail)
        counts = self.ring.counts
        facts = {
            "blocks": len(self.ring.blocks), "host_bytes": self.ring.host_bytes,
            "device_bytes": self.ring.device_bytes, "calls": counts.calls,
            "backward_calls": counts.backward_calls, "copies": counts.copies, "copied_bytes": counts.copied_bytes,
            "late_copies": counts.late,
        }  # fmt: skip
        if not counts.calls:
            return Evidence(False, f"no block on the host was called; {applied.detail}", facts)
        ahead = counts.copies - counts.late
        copied = f"{counts.copies} copies ({counts.copied_bytes / GB:.3g} GB), {ahead} of them ahead of their block"
        return Evidence(True, f"{copied}; {applied.detail}", facts)

    def _chosen(self, target: Target) -> dict[str, list[tuple[str, nn.Module]]]:
        from optim_patches.block_ring import frozen_bytes

        chosen: dict[str, list[tuple[str, nn.Module]]] = {}
        for role, model in target.denoisers().items():
            blocks = [(f"{role}.{name}", block) for name, block in find_blocks(model) if frozen_bytes(block)]
            number = self._how_many(target.args, [frozen_bytes(block) for _, block in blocks])
            chosen[role] = [blocks[position] for position in evenly(len(blocks), number)]
        return chosen

    @staticmethod
    def _how_many(args: argparse.Namespace, sizes: list[int]) -> int:
        budget, ring = _option(args, "block_swap_gb"), _option(args, "block_swap_ring")
        if budget is None:
            return min(_option(args, "block_swap"), len(sizes))
        fitting = (n for n in range(len(sizes) + 1)
                   if _on_device(sizes, evenly(len(sizes), n), ring=ring) <= budget * GB)
        return next(fitting, len(sizes))


def _on_device(sizes: list[int], away: tuple[int, ...], *, ring: int) -> int:
    """Bytes of frozen weights on the device when the blocks ``away`` are on the host."""
    resident = sum(size for position, size in enumerate(sizes) if position not in away)
    return resident + (ring * max(sizes[position] for position in away) if away else 0)


def _beside_verdict(args: argparse.Namespace) -> Verdict:
    """Options of other patches that need weights to stay where they are."""
    if getattr(args, "compile", False):
        if getattr(args, "compile_scope", "regional") == "whole":
            reason = "--block_swap brings weights between blocks, and --compile_scope whole leaves no between."
            return Verdict(False, reason, "--compile_scope regional")
        if getattr(args, "compile_mode", "default") in ("reduce-overhead", "max-autotune"):
            reason = f"--compile_mode {args.compile_mode} records CUDA graphs, which read weights at fixed places."
            return Verdict(False, reason, "--compile_mode default or max-autotune-no-cudagraphs")
    given = [name for name in ("checkpointing_fraction", "checkpointing_budget_gb")
             if getattr(args, name, None) is not None]
    if given:
        reason = f"--block_swap needs every block recomputed, and --{given[0]} leaves some out."
        return Verdict(False, reason, "--gradient_checkpointing alone, or with --checkpointing_keep")
    return Verdict(True)


def _ignore_in_ddp(model: nn.Module) -> Any:
    """Keep DDP from sending parameters around that are away; returns the undo."""
    from optim_patches.block_ring import frozen_parameters

    name = "_ddp_params_and_buffers_to_ignore"
    model = unwrap(model)
    before = model.__dict__.get(name)
    away = {id(parameter) for _, block in find_blocks(model) for _, _, parameter in frozen_parameters(block)}
    model.__dict__[name] = [*(before or ()), *(key for key, value in model.named_parameters() if id(value) in away)]

    def undo() -> None:
        del model.__dict__[name]
        if before is not None:
            model.__dict__[name] = before

    return undo


def _option(args: argparse.Namespace, dest: str) -> Any:
    default = next(flag.default for flag in BlockSwapPatch.flags if flag.dest == dest)
    return getattr(args, dest, default)
