"""``--cuda_graph``: replay what the blocks launch instead of launching it again.

With short sequences the GPU waits for the host, which launches thousands of small kernels a step. A recorded graph is
launched at once. There is one for each shape that training sees (one per bucket); all share their memory.

Without ``--compile`` the block stack is recorded here, forward and backward (``graph_cache``). With it the compiler
records what it compiles, which is its mode ``reduce-overhead``: the patch turns that mode on, tells it where a step
begins, and counts what is replayed.

A graph keeps all that its backward needs, so it cannot be had together with recomputation, and sizes that are drawn
anew for each batch would need a graph each.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from optim_patches.base import Applied, Evidence, PatchBase, PatchFlag, Stage, Target, Verdict
from optim_patches.compile import find_blocks

if TYPE_CHECKING:
    from optim_patches.graph_cache import GraphedBlocks

RANDOM_SIZES = ("random_hw_adapt", "training_with_video_token_length", "random_ratio_crop", "random_frame_crop")


class CudaGraphPatch(PatchBase):
    """Row I3 of the audit."""

    name = "cuda_graph"
    row = "I3"
    stage = Stage.PRE_SHARD
    conflicts = frozenset({"ulysses", "block_swap", "activation_offload"})
    composable = frozenset({"*"})
    flags = (
        PatchFlag("--cuda_graph", "Replay the blocks as CUDA graphs.", action="store_true", default=False),
        PatchFlag("--cuda_graph_limit", "Shapes that get a graph; others run without.", type=int, default=16),
    )

    def __init__(self) -> None:
        self.graphed: dict[str, GraphedBlocks] = {}
        self.counts = {"captures": 0, "replays": 0}

    def check(self, target: Target) -> Verdict:
        from optim_patches import graph_cache

        args = target.args
        if target.device not in graph_cache.CAPTURES:
            return Verdict(False, f"--cuda_graph needs CUDA and this run is on {target.device}.", "the run without it")
        if getattr(args, "gradient_checkpointing", False) or getattr(args, "selective_ac", 0):
            reason = "--cuda_graph keeps what a block computes, and --gradient_checkpointing would compute it again."
            return Verdict(False, reason, "one of them: graphs for short sequences, checkpointing for long ones")
        drawn = [f"--{name}" for name in RANDOM_SIZES if getattr(args, name, False)]
        if drawn:
            reason = f"--cuda_graph records one graph per shape, and {drawn[0]} draws sizes anew for each batch."
            return Verdict(False, reason, "--fix_sample_size, or --enable_bucket with few buckets")
        if any(os.environ.get(name) == "true" for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")):
            return Verdict(False, "--cuda_graph records fixed addresses, and FSDP and DeepSpeed move weights.", "DDP")
        if getattr(args, "compile", False) and getattr(args, "compile_backend", "inductor") != "inductor":
            reason = f"--cuda_graph with --compile is the compiler's own, and {args.compile_backend} has none."
            return Verdict(False, reason, "--compile_backend inductor")
        return self._model_verdict(target)

    def _model_verdict(self, target: Target) -> Verdict:
        if _option(target.args, "cuda_graph_limit") < 1:
            return Verdict(False, "--cuda_graph_limit must be at least 1.", "the default")
        if getattr(target.args, "compile", False):
            return Verdict(True)
        for role, model in target.denoisers().items():
            if not hasattr(type(model), "run_blocks"):
                reason = f"{role} ({type(model).__name__}) has no block stack that could be recorded as one."
                return Verdict(False, reason, "--compile --compile_mode reduce-overhead")
        return Verdict(True)

    def planned_sites(self, target: Target) -> tuple[str, ...]:
        if getattr(target.args, "compile", False):
            return tuple(f"{role}.{name}" for role, model in target.denoisers().items()
                         for name, _ in find_blocks(model))
        return tuple(target.denoisers())

    def apply(self, target: Target) -> Applied:
        if getattr(target.args, "compile", False):
            return self._watch_compiler(target)
        from optim_patches import graph_cache

        capture = graph_cache.CAPTURES[target.device]()
        limit = _option(target.args, "cuda_graph_limit")
        self.graphed = {role: graph_cache.GraphedBlocks(model, capture=capture, limit=limit)
                        for role, model in target.denoisers().items()}
        for blocks in self.graphed.values():
            blocks.model.__dict__["run_blocks"] = blocks

        def undo() -> None:
            for blocks in self.graphed.values():
                del blocks.model.__dict__["run_blocks"]
                blocks.entries.clear()

        return Applied(tuple(self.graphed), undo, f"block stacks of {', '.join(self.graphed) or 'no model'}")

    def _watch_compiler(self, target: Target) -> Applied:
        """Tell the compiler where steps begin, and count its graphs where they are recorded and replayed."""
        import torch

        def begin(module: Any, args: Any) -> None:
            if module.training and torch.is_grad_enabled():
                torch.compiler.cudagraph_mark_step_begin()

        handles = [model.register_forward_pre_hook(begin) for model in target.denoisers().values()]
        restore = _count_graphs(self.counts)

        def undo() -> None:
            for handle in handles:
                handle.remove()
            restore()

        return Applied(self.planned_sites(target), undo, "graphs of the compiler (reduce-overhead)")

    def evidence(self, target: Target, applied: Applied) -> Evidence:
        if getattr(target.args, "compile", False):
            facts: dict[str, Any] = dict(self.counts)
            text = f"{facts['captures']} graphs recorded, {facts['replays']} replays; {applied.detail}"
            return Evidence(facts["replays"] > 0, text, facts)
        entries = [entry for blocks in self.graphed.values() for entry in blocks.entries.values()]
        eager: dict[str, int] = {}
        for blocks in self.graphed.values():
            for reason, number in blocks.eager.items():
                eager[reason] = eager.get(reason, 0) + number
        facts = {
            "shapes": len(entries), "captures": sum(blocks.captured for blocks in self.graphed.values()),
            "replays": sum(entry.replays for entry in entries),
            "replays_per_shape": [entry.replays for entry in entries], "without_graph": eager,
        }  # fmt: skip
        parts = [f"{facts['captures']} graphs for {facts['shapes']} shapes, {facts['replays']} replays"]
        parts += [f"{number} calls without a graph: {reason}" for reason, number in eager.items()]
        parts += [f"{role}: {blocks.failure}" for role, blocks in self.graphed.items() if blocks.failure]
        return Evidence(facts["replays"] > 0, "; ".join([*parts, applied.detail]), facts)


def _count_graphs(counts: dict[str, int]) -> Callable[[], None]:
    """Count recordings and replays of CUDA graphs by anybody; the result stops it."""
    import torch

    graph, kept = torch.cuda.CUDAGraph, []
    for method, name in (("capture_begin", "captures"), ("replay", "replays")):
        own = getattr(graph, method, None)
        if own is None:
            continue

        def call(*args: Any, _own: Callable[..., Any] = own, _name: str = name, **kwargs: Any) -> Any:
            counts[_name] += 1
            return _own(*args, **kwargs)

        kept.append((method, vars(graph).get(method)))
        setattr(graph, method, call)

    def restore() -> None:
        for method, own in kept:
            if own is None:
                delattr(graph, method)
            else:
                setattr(graph, method, own)

    return restore


def _option(args: argparse.Namespace, dest: str) -> Any:
    default = next(flag.default for flag in CudaGraphPatch.flags if flag.dest == dest)
    return getattr(args, dest, default)
