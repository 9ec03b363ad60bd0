"""What ``--gradient_checkpointing`` recomputes: by name, by share, or by a budget.

Plain checkpointing keeps each block's input and computes everything else again in the backward.

``--checkpointing_keep attention``  also keeps what self-attention computed, so that only the rest is computed again.
    One more tensor of the size of a block's input; for long clips self-attention is most of a block's work. Attention
    to fewer tokens than ask (the prompt) costs little and is computed again.
``--checkpointing_fraction 0.5``    recomputes that share of the blocks, spread evenly, and keeps all of the others.
``--checkpointing_budget_gb 20``    keeps as much as fits beside the inputs: attention's results first, which save most
    per byte, then whole blocks. What a block keeps is measured once per shape of its input, on the block itself.

The results are those of plain checkpointing, bit for bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from optim_patches.base import Applied, Evidence, PatchBase, PatchFlag, Stage, Target, Verdict
from optim_patches.compile import find_blocks
from optim_patches.selection import evenly

if TYPE_CHECKING:
    from torch import nn

GB = 1e9
KEEP = ("attention",)
#: Parts of the names of forward operators that compute attention.
_ATTENTION_OPS = ("scaled_dot_product", "flash_attn", "flash_attention", "efficient_attention", "cudnn_attention")
_ANY = ("checkpointing_keep", "checkpointing_fraction", "checkpointing_budget_gb")


class CheckpointingPatch(PatchBase):
    """Row B2 of the audit."""

    name = "checkpointing"
    row = "B2"
    stage = Stage.PRE_SHARD
    composable = frozenset({"*"})
    flags = (
        PatchFlag("--checkpointing_keep", "Keep what self-attention computed.", type=str, choices=KEEP),
        PatchFlag("--checkpointing_fraction", "Share of the blocks that is recomputed (0 to 1).", type=float),
        PatchFlag("--checkpointing_budget_gb", "GB for results that are kept beside the blocks' inputs.", type=float),
    )

    def __init__(self) -> None:
        self.log = Log()

    def requested(self, args: argparse.Namespace) -> bool:
        return any(getattr(args, name, None) is not None for name in _ANY)

    def check(self, target: Target) -> Verdict:
        args = target.args
        keep, fraction, budget = (getattr(args, name, None) for name in _ANY)
        given = next(f"--{name}" for name in _ANY if getattr(args, name, None) is not None)
        if not getattr(args, "gradient_checkpointing", False):
            reason = f"{given} says what --gradient_checkpointing keeps, and that flag is missing."
            return Verdict(False, reason, f"--gradient_checkpointing {given}")
        if fraction is not None and not 0 < fraction <= 1:
            reason = f"--checkpointing_fraction {fraction:g} is no share of the blocks."
            return Verdict(False, reason, "a number above 0, at most 1; for 0 leave out --gradient_checkpointing")
        if fraction == 1 and keep is None and budget is None:
            return Verdict(False, "--checkpointing_fraction 1 is plain --gradient_checkpointing.", "a share below 1")
        if budget is not None and (budget <= 0 or fraction is not None or keep is not None):
            reason = "--checkpointing_budget_gb chooses by itself what is kept, in GB above 0."
            return Verdict(False, reason, "the budget alone, or --checkpointing_keep with --checkpointing_fraction")
        if getattr(args, "compile", False) and getattr(args, "compile_scope", "regional") == "whole":
            reason = f"{given} decides block by block, and --compile_scope whole compiles the network as one."
            return Verdict(False, reason, "--compile_scope regional")
        return Verdict(True)

    def planned_sites(self, target: Target) -> tuple[str, ...]:
        return tuple(f"{role}.{name}" for role, model in target.denoisers().items() for name, _ in find_blocks(model))

    def apply(self, target: Target) -> Applied:
        args = target.args
        self.log = Log()
        undos: list[Callable[[], None]] = []
        sites: list[str] = []
        for role, model in target.denoisers().items():
            named = find_blocks(model)
            places = [m for m in model.modules() if getattr(m, "_gradient_checkpointing_func", None) is not None]
            if not named or not places:
                continue
            plan = Plan(len(named), args)
            for place in places:
                before = place._gradient_checkpointing_func
                place._gradient_checkpointing_func = Recomputation(
                    [block for _, block in named], plan=plan, before=before, log=self.log
                )
                undos.append(partial(setattr, place, "_gradient_checkpointing_func", before))
            sites += [f"{role}.{name}" for name, _ in named]

        def undo() -> None:
            while undos:
                undos.pop()()

        if not sites:
            return Applied((), undo, "no network here checkpoints its blocks one by one")
        return Applied(tuple(sites), undo, Plan(len(sites), args).describe())

    def evidence(self, target: Target, applied: Applied) -> Evidence:
        log = self.log
        facts = {
            "calls_kept_whole": log.plain, "calls_with_kept_attention": log.kept, "calls_recomputed": log.full,
            "kept_results": log.kept_results, "plans": dict(log.plans),
        }  # fmt: skip
        if not log.plain + log.kept + log.full:
            return Evidence(False, f"no block was called; {applied.detail}", facts)
        if log.kept and not log.kept_results:
            reason = "attention ran as no operator that can be kept (its kernel hides it)"
            return Evidence(log.plain > 0, f"{reason}; {applied.detail}", facts)
        if not log.plain and not log.kept:
            return Evidence(False, f"every block was recomputed whole; {applied.detail}", facts)
        summary = (f"block calls: {log.plain} kept whole, {log.kept} with kept attention ({log.kept_results} results), "
                   f"{log.full} recomputed")
        return Evidence(True, "; ".join([summary, *log.plans.values()] if log.plans else [summary]), facts)


@dataclass
class Log:
    """Block calls with gradient, by what became of them."""

    plain: int = 0
    kept: int = 0
    full: int = 0
    kept_results: int = 0
    plans: dict[str, str] = field(default_factory=dict)


@dataclass
class Sizes:
    """Bytes that one block keeps: all that its backward needs, and what attention computed."""

    whole: int = 0
    attention: int = 0


class Plan:
    """Which blocks are kept whole, and which with their attention."""

    def __init__(self, count: int, args: argparse.Namespace) -> None:
        keep, fraction, self.budget = (getattr(args, name, None) for name in _ANY)
        self.count = count
        self.keep = keep is not None
        recomputed = count if fraction is None else max(1, round(fraction * count))
        self.recomputed = frozenset(evenly(count, recomputed))

    def describe(self) -> str:
        if self.budget is not None:
            return f"{self.count} blocks share {self.budget:g} GB of kept results"
        kept = ", keeping attention" if self.keep else ""
        return f"{len(self.recomputed)} of {self.count} blocks are recomputed{kept}"

    def fit(self, sizes: Sizes) -> tuple[int, int]:
        """How many blocks the budget lets keep attention, and how many of these then everything."""
        budget = int((self.budget or 0) * GB)
        attention = min(self.count, budget // sizes.attention) if sizes.attention else 0
        rest = budget - attention * sizes.attention
        if attention < self.count and sizes.attention:
            return attention, 0
        more = max(sizes.whole - sizes.attention, 1)
        return attention, min(self.count, rest // more)


class Recomputation:
    """Stands in a network's checkpoint function and decides for each block."""

    def __init__(self, blocks: list[nn.Module], *, plan: Plan, before: Callable[..., Any], log: Log) -> None:
        self.position = {id(block): number for number, block in enumerate(blocks)}
        self.plan = plan
        self.before = before
        self.log = log
        self._budgets: dict[Any, tuple[frozenset[int], frozenset[int]]] = {}

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        number = self.position.get(id(module))
        if number is None:  # not a block: the head
            return self.before(module, *args)
        whole, attention = self._choice(module, args)
        if number in whole:
            self.log.plain += 1
            return module(*args)
        if number in attention:
            self.log.kept += 1
            return self._keeping_attention(module, *args)
        self.log.full += 1
        return self.before(module, *args)

    def keeps_all(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        """Whether a call is not checkpointed."""
        number = self.position.get(id(module))
        return number is not None and number in self._choice(module, args)[0]

    def _choice(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[frozenset[int], frozenset[int]]:
        """Numbers of the blocks that are kept whole, and of those that keep attention."""
        plan = self.plan
        if plan.budget is None:
            whole = frozenset(range(plan.count)) - plan.recomputed
            return whole, plan.recomputed if plan.keep else frozenset()
        key = tuple(tuple(value.shape) for value in args if hasattr(value, "shape"))
        if key not in self._budgets:
            sizes = measure(module, args)
            attention, whole = plan.fit(sizes)
            self._budgets[key] = frozenset(evenly(plan.count, whole)), frozenset(evenly(plan.count, attention))
            self.log.plans[str(key[0])] = (
                f"input {'x'.join(map(str, key[0]))}: {whole} of {plan.count} blocks whole ({sizes.whole / GB:.3g} GB "
                f"each), {max(attention - whole, 0)} more with attention ({sizes.attention / GB:.3g} GB each)"
            )
        return self._budgets[key]

    def _keeping_attention(self, module: nn.Module, *args: Any) -> Any:
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        def run(*inputs: Any) -> Any:
            with uncached_casts():
                return module(*inputs)

        contexts = partial(create_selective_checkpoint_contexts, self._policy)
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts)

    def _policy(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        from torch.utils.checkpoint import CheckpointPolicy

        if not is_kept(operator, args):
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.log.kept_results += not context.is_recompute
        return CheckpointPolicy.MUST_SAVE


@contextmanager
def uncached_casts() -> Iterator[None]:
    """Autocast makes each cast anew, as it does in a recomputation: operators are counted, and must be the same."""
    import torch

    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def is_attention(operator: Any) -> bool:
    """Whether an operator computes attention (forward)."""
    name = operator.name() if hasattr(operator, "name") else str(operator)
    return any(part in name for part in _ATTENTION_OPS) and "backward" not in name


def is_kept(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call is attention to at least as many tokens as ask."""
    return is_attention(operator) and args[1].numel() >= args[0].numel()


def measure(block: nn.Module, args: tuple[Any, ...]) -> Sizes:
    """Run a block once and count the bytes that its backward would hold, parameters and inputs aside."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    sizes = Sizes()
    known = {value.untyped_storage().data_ptr() for value in (*args, *_weights(block)) if torch.is_tensor(value)}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if is_kept(func, args):
                sizes.attention += sum(leaf.nbytes for leaf in tree_leaves(out) if torch.is_tensor(leaf))
            return out

    alive = []  # storages stay alive, or their addresses would come up twice

    def pack(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            alive.append(storage)
            sizes.whole += storage.nbytes()

    def unpack(_: Any) -> None:
        raise RuntimeError("a measured block has no backward")

    inputs = [value.detach().requires_grad_(value.requires_grad) if torch.is_tensor(value) else value for value in args]
    device = next((value.device for value in args if torch.is_tensor(value)), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), uncached_casts(), Watch():
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            block._call_impl(*inputs)
    return sizes


def _weights(block: nn.Module) -> list[Any]:
    native = [weight for layer in block.modules() if "_lora" in layer.__dict__
              for weight in layer.__dict__["_lora"].parameters()]
    return [*block.parameters(), *block.buffers(), *native]
