"""``--compile``: torch.compile for the denoiser's repeated blocks, or for the whole network.

Regional compilation (the default) compiles each repeated block in place with ``module.compile()``. All blocks share one
graph, so that a network of forty blocks compiles in the time of one, no key of the state dict changes, and gradient
checkpointing, adapters and DDP work outside of the compiled region.

Buckets change the number of tokens from step to step. The sequence dimension of a block's inputs is therefore marked
dynamic before the first compilation, and further shapes reuse the same graph.

Evidence is counted where it happens. The backend is wrapped, so that every launch of a compiled graph adds one to a
counter: code that fell back to eager execution cannot pass for compiled code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
    join_names,
    unwrap,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
SCOPES = ("regional", "whole")
DYNAMIC = {"auto": None, "true": True, "false": False}

#: Classes of repeated blocks, for models that do not list them in ``_repeated_blocks`` or ``_no_split_modules``.
BLOCK_CLASSES = frozenset(
    {
        "WanAttentionBlock",
        "BaseWanAttentionBlock",
        "VaceWanAttentionBlock",
        "WanAnimateAttentionBlock",
        "WanS2VAttentionBlock",
        "CogVideoXBlock",
        "HunyuanVideoTransformerBlock",
        "HunyuanVideoSingleTransformerBlock",
        "FluxTransformerBlock",
        "FluxSingleTransformerBlock",
    }
)

#: Shapes, gradient modes and block variants multiply; torch's limit of eight graphs per function is for whole models.
RECOMPILE_LIMIT = 64


@dataclass
class CompileLog:
    """Counters of one run: block calls, compiled graphs and launches of compiled graphs."""

    calls: int = 0
    graphs: int = 0
    launches: int = 0
    graphs_when_warm: int | None = None
    breaks_before: dict[str, int] = field(default_factory=dict)


class CountingBackend:
    """A dynamo backend that counts compilations and launches of the backend it stands for."""

    def __init__(self, *, name: str, mode: str, dynamic: bool | None, log: CompileLog) -> None:
        self.name = name
        self.log = log
        self._compile = _backend(name, mode=mode, dynamic=dynamic)

    def __call__(self, graph: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        log = self.log
        log.graphs += 1
        compiled = self._compile(graph, example_inputs)

        def launch(*inputs: Any) -> Any:
            log.launches += 1
            return compiled(*inputs)

        return launch


class CompiledUnit:
    """Stands in a module's compiled call slot: counts the call, marks the sequence dynamic, calls the compiled code."""

    def __init__(self, compiled: Callable[..., Any], *, log: CompileLog, mark: bool) -> None:
        self.compiled = compiled
        self.log = log
        self.mark = mark

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.log.calls += 1
        if self.mark:
            mark_sequence_dynamic(args, kwargs)
        return self.compiled(*args, **kwargs)


class CompilePatch(PatchBase):
    """Row I1 of the audit."""

    name = "compile"
    row = "I1"
    stage = Stage.PRE_SHARD
    composable = frozenset({"*"})
    flags = (
        PatchFlag("--compile", "Compile the denoiser's blocks with torch.compile.", action="store_true", default=False),
        PatchFlag("--compile_mode", "Mode of torch.compile.", type=str, default="default", choices=MODES),
        PatchFlag("--compile_backend", "Backend of torch.compile.", type=str, default="inductor"),
        PatchFlag(
            "--compile_dynamic",
            "auto: only the sequence length is dynamic; true: every size; false: one graph per shape.",
            type=str,
            default="auto",
            choices=tuple(DYNAMIC),
        ),
        PatchFlag("--compile_fullgraph", "Fail on a graph break.", action="store_true", default=False),
        PatchFlag(
            "--compile_scope", "regional: each block; whole: the network.", type=str, default="regional", choices=SCOPES
        ),
        PatchFlag("--compile_cache_dir", "Folder where compiled code is kept between runs.", type=str, default=None),
    )

    def __init__(self) -> None:
        self.log = CompileLog()

    def check(self, target: Target) -> Verdict:
        args = target.args
        backend = _option(args, "compile_backend")
        for verdict in (_dynamo_verdict(), _backend_verdict(backend), _toolchain_verdict(backend, target.device)):
            if not verdict.ok:
                return verdict
        mode = _option(args, "compile_mode")
        if backend != "inductor" and mode != "default":
            return Verdict(False, f"--compile_mode {mode} needs --compile_backend inductor.", "--compile_mode default")
        return Verdict(True)

    def planned_sites(self, target: Target) -> tuple[str, ...]:
        scope = _option(target.args, "compile_scope")
        return tuple(site for site, _ in _units(target, scope=scope))

    def apply(self, target: Target) -> Applied:
        import torch

        args = target.args
        dynamic = DYNAMIC[_option(args, "compile_dynamic")]
        name, scope, mode = _option(args, "compile_backend"), _option(args, "compile_scope"), _mode(args)
        restore = _configure(cache_dir=_option(args, "compile_cache_dir"))
        self.log = CompileLog(breaks_before=dict(torch._dynamo.utils.counters["graph_break"]))
        backend = CountingBackend(name=name, mode=mode, dynamic=dynamic, log=self.log)
        mark = dynamic is None and scope == "regional"
        units = _units(target, scope=scope)
        before = [(module, module._compiled_call_impl) for _, module in units]
        for _, module in units:
            module.compile(backend=backend, dynamic=dynamic, fullgraph=_option(args, "compile_fullgraph"))
            module._compiled_call_impl = CompiledUnit(module._compiled_call_impl, log=self.log, mark=mark)

        def undo() -> None:
            for module, implementation in before:
                module._compiled_call_impl = implementation
            restore()

        return Applied(tuple(site for site, _ in units), undo, _detail(target, units, scope=scope))

    def evidence(self, target: Target, applied: Applied) -> Evidence:
        log = self.log
        breaks = self._graph_breaks()
        facts = {
            "units": len(applied.sites),
            "block_calls": log.calls,
            "graphs": log.graphs,
            "graph_launches": log.launches,
            "graph_breaks": sum(breaks.values()),
            "graph_break_reasons": sorted(breaks, key=lambda reason: -breaks[reason])[:3],
            "recompiles_after_warmup": self.recompiles_after_warmup(),
        }
        if not applied.sites:
            return Evidence(False, applied.detail, facts)
        if not log.launches:
            why = "the blocks were never called" if not log.calls else "torch ran the blocks without compiling them"
            return Evidence(False, f"{len(applied.sites)} units marked, no compiled graph ran: {why}", facts)
        warm = facts["recompiles_after_warmup"]
        late = "" if warm is None else f", {warm} recompiles after warm-up"
        summary = (
            f"{len(applied.sites)} units, {log.graphs} graphs, {facts['graph_breaks']} graph breaks{late}; "
            f"{log.launches} graph launches in {log.calls} calls"
        )
        return Evidence(True, summary, facts)

    def mark_warm(self) -> None:
        """Count recompilations from here on. The audit calls this when it reports the first time."""
        if self.log.graphs_when_warm is None:
            self.log.graphs_when_warm = self.log.graphs

    def recompiles_after_warmup(self) -> int | None:
        """Graphs compiled since :meth:`mark_warm`, or ``None`` before it."""
        warm = self.log.graphs_when_warm
        return None if warm is None else self.log.graphs - warm

    def _graph_breaks(self) -> dict[str, int]:
        import torch

        now = torch._dynamo.utils.counters["graph_break"]
        before = self.log.breaks_before
        return {reason: count - before.get(reason, 0) for reason, count in now.items() if count > before.get(reason, 0)}


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of a network: by class name, else the largest list of modules of one class."""
    names = set(BLOCK_CLASSES)
    for attribute in ("_repeated_blocks", "_no_split_modules"):
        names.update(getattr(model, attribute, None) or ())
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in names and name]
    if not found:
        return _largest_list(model)
    outer = {name for name, _ in found}
    return [(name, module) for name, module in found if not any(name.startswith(f"{other}.") for other in outer)]


def mark_sequence_dynamic(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Mark the token dimension of a block's inputs, the one at index 1 of its first 3-D tensor.

    Other inputs are marked where their dimension 0 or 1 has the same length (RoPE tables, per-token modulation).
    """
    import torch

    tensors = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, torch.Tensor)]
    length = next((tensor.shape[1] for tensor in tensors if tensor.dim() >= 3 and tensor.is_floating_point()), 1)
    if length <= 1:
        return
    for tensor in tensors:
        for dim in range(min(2, tensor.dim() - 1)):
            if tensor.shape[dim] == length:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _flat(values: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        if isinstance(value, (tuple, list)):
            flat.extend(value)
        else:
            flat.append(value)
    return flat


def _option(args: argparse.Namespace, dest: str) -> Any:
    default = next(flag.default for flag in CompilePatch.flags if flag.dest == dest)
    return getattr(args, dest, default)


def _mode(args: argparse.Namespace) -> str:
    """The mode asked for; ``--cuda_graph`` turns the default into the one that records graphs."""
    mode = _option(args, "compile_mode")
    return "reduce-overhead" if mode == "default" and getattr(args, "cuda_graph", False) else mode


def _units(target: Target, *, scope: str) -> list[tuple[str, nn.Module]]:
    if scope == "whole":
        return list(target.denoisers().items())
    return [
        (f"{role}.{name}", module) for role, model in target.denoisers().items() for name, module in find_blocks(model)
    ]


def _largest_list(model: nn.Module) -> list[tuple[str, nn.Module]]:
    from torch import nn

    best: list[tuple[str, nn.Module]] = []
    best_size = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        children = list(module)
        size = sum(parameter.numel() for parameter in module.parameters())
        if len({type(child) for child in children}) == 1 and size > best_size:
            best = [(f"{name}.{index}", child) for index, child in enumerate(children)]
            best_size = size
    return best


def _detail(target: Target, units: Sequence[tuple[str, Any]], *, scope: str) -> str:
    if units:
        return f"{scope}: {describe_counts(count_by_class(module for _, module in units))}"
    models = join_names([type(unwrap(model)).__name__ for model in target.denoisers().values()]) or "no model"
    return f"no repeated block found in {models}; --compile_scope whole compiles the network as one"


def _dynamo_verdict() -> Verdict:
    import torch._dynamo

    if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return Verdict(False, "torch.compile is switched off by the environment.", "unset TORCHDYNAMO_DISABLE")
    return Verdict(True)


def _backend_verdict(backend: str) -> Verdict:
    import torch

    names = torch._dynamo.list_backends(exclude_tags=())
    if backend in names:
        return Verdict(True)
    return Verdict(False, f"--compile_backend {backend} does not exist; there are {', '.join(names)}.", "inductor")


def _toolchain_verdict(backend: str, device: str) -> Verdict:
    """Inductor writes C++ on the CPU and Triton on CUDA, and needs what compiles these."""
    if backend != "inductor":
        return Verdict(True)
    if device == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            reason = f"--compile on the CPU needs a C++ compiler, and {compiler!r} is not on the PATH."
            return Verdict(False, reason, "install g++, name one in CXX, or drop --compile")
        header = Path(sysconfig.get_path("include")) / "Python.h"
        if not header.exists():
            reason = f"--compile on the CPU needs Python's C headers, and {header.name} is missing."
            return Verdict(False, reason, "install the Python development package, or drop --compile")
        return Verdict(True)
    from torch.utils._triton import has_triton

    if not has_triton():
        return Verdict(False, "--compile on CUDA needs Triton and a driver it can use.", "pip install triton")
    return Verdict(True)


def _backend(name: str, *, mode: str, dynamic: bool | None) -> Callable[[Any, Any], Callable[..., Any]]:
    if name != "inductor":
        from torch._dynamo.backends.registry import lookup_backend

        return lookup_backend(name)
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    options = {} if mode == "default" else list_mode_options(mode, dynamic)

    def compile_graph(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_fx(graph, example_inputs, config_patches=dict(options) or None)

    return compile_graph


def _configure(*, cache_dir: str | None) -> Callable[[], None]:
    """Set the graph limit and the cache folder; the result puts both back."""
    import torch

    config = torch._dynamo.config
    limit, folder = config.recompile_limit, os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    config.recompile_limit = max(limit, RECOMPILE_LIMIT)
    if cache_dir:
        Path(cache_dir).mkdir(parents=True, exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache_dir).resolve())

    def restore() -> None:
        config.recompile_limit = limit
        if cache_dir and folder is None:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        elif cache_dir and folder is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder

    return restore
